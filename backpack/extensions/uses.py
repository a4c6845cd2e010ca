"""Which uses of a parameter go together."""

from __future__ import annotations

from torch.nn import Parameter

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.flow import Use
from backpack.core.plan import Plan


def joins(use: Use, plan: Plan, parameter: Parameter) -> bool:
    """Say whether a use of a parameter can be joined with others, or is cheaper in this way.

    Args:
        use: The use.
        plan: The plan.
        parameter: The parameter.

    Returns:
        Whether it can.
    """
    rule, several = use.call.derivatives, plan.uses[parameter] > 1
    if isinstance(rule, EmbeddingDerivatives) and type(rule).__module__.startswith("backpack."):
        return several or not use.layout.plain
    # others unfold inputs, which are as long as many samples where these do not share a call
    return several and isinstance(rule, AffineDerivatives) and (use.layout.plain or rule.any_batch_axis)


def is_tied(plan: Plan, parameter: Parameter) -> bool:
    """Say whether a table is the weight of an affine layer, too.

    Args:
        plan: The plan.
        parameter: The table.

    Returns:
        Whether it is.
    """
    units = (unit for unit in plan.units.values() if any(p is parameter for p in unit.parameters.values()))
    return any(isinstance(unit.call.derivatives, AffineDerivatives) for unit in units)
