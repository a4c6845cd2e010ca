"""``supported``: which quantity is there for which layer, read off the rules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.nn.modules.loss import _Loss

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseLossDerivatives, BaseParameterDerivatives
from backpack.core.derivatives.bilinear import BilinearDerivatives
from backpack.core.derivatives.loss_generic import GenericLossDerivatives, NoSampleAxisDerivatives
from backpack.core.derivatives.registry import registered
from backpack.extensions import curvmatprod, firstorder, secondorder
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.chains import AverageFlow, MatProdFlow
from backpack.extensions.curvature import Curvature
from backpack.extensions.flows import GradientFlow
from backpack.extensions.secondorder.hbp import HBP
from backpack.extensions.signed_flow import SignedSqrtFlow

EXTENSIONS: dict[str, BackpropExtension] = {
    name: getattr(family, name)() for family in (firstorder, secondorder, curvmatprod) for name in family.__all__ if name != "HBP"
}
"""The quantities; ``HBP`` is as ``KFLR`` or as ``KFRA``, according to its options."""

OTHER_LOSS = "any other loss"
"""Losses that are differentiated automatically."""

OTHER = "any other module"
OTHER_VECTORS, OTHER_MATRICES = f"{OTHER} with vectors", f"{OTHER} with matrices (other than in products)"
"""Modules without a rule whose operations are curved: without parameters, or with vectors or matrices as parameters."""

_NO_AVERAGE = "batch-averaged factors exist for weights and biases of linear layers and convolutions only"


class How(Enum):
    """How a quantity is computed where a layer is concerned."""

    RULE = "rule"
    GRAPH = "graph"
    REFUSED = "refused"


class Support(NamedTuple):
    """What is said about one layer and one quantity.

    Attributes:
        how: By the layer's own rule; by the graph's nodes, or automatic differentiation of the module: exact, too, but slower; or not at all.
        reason: Why it is refused.
    """

    how: How
    reason: str = ""


class SupportTable(dict[str, dict[str, Support]]):
    """Name of a layer to name of a quantity to support; prints as a table."""

    def __str__(self) -> str:
        width = max(map(len, self))
        lines = [f"{'':{width}}  " + "  ".join(EXTENSIONS)]
        for layer, row in self.items():
            lines.append(f"{layer:{width}}  " + "  ".join(f"{cell.how.value:{len(name)}}" for name, cell in row.items()).rstrip())
        return "\n".join(lines)


def supported() -> SupportTable:
    """Tell which quantity is there for which layer, in a sequence of modules, with the layer in evaluation mode and on its usual input.

    Made from the rules that are registered at the moment, those of users included. Options of a layer that its rule does not cover (a random mode,
    say) go by the graph. The last rows are about modules without a rule whose operations are curved. Attention and recurrent layers consist of
    products with matrices, which have the rule of ``Linear``, and of such operations.

    Returns:
        ``{layer: {quantity: Support(how, reason)}}``, printable.

    Example:
        >>> supported()["Softmax"]["PCHMP"]
        Support(how=<How.REFUSED: 'refused'>, reason='its second derivative is dense')
    """
    table = SupportTable()
    for module_class, rule in sorted(registered().items(), key=lambda entry: (entry[1].is_loss, entry[0].__name__)):
        cell = _of_loss if isinstance(rule, BaseLossDerivatives) else _of_layer
        layer = OTHER_LOSS if module_class is _Loss else module_class.__name__
        table[layer] = {name: cell(extension, rule) for name, extension in EXTENSIONS.items()}
    for layer, axes in ((OTHER, 0), (OTHER_VECTORS, 1), (OTHER_MATRICES, 2)):
        table[layer] = {name: _of_other(extension, axes) for name, extension in EXTENSIONS.items()}
    return table


def _of_loss(extension: BackpropExtension, rule: BaseLossDerivatives) -> Support:
    flow = extension.flow
    if isinstance(flow, GradientFlow):
        return Support(How.GRAPH)
    if isinstance(rule, NoSampleAxisDerivatives):
        return Support(How.REFUSED, "its samples do not lie on axis 0 of its input")
    return Support(How.GRAPH if type(rule)._sqrt_hessian is GenericLossDerivatives._sqrt_hessian else How.RULE)


def _of_layer(extension: BackpropExtension, rule: BaseDerivatives) -> Support:
    flow = extension.flow
    if isinstance(flow, AverageFlow) and rule.params and (isinstance(rule, BilinearDerivatives) or not isinstance(rule, AffineDerivatives)):
        return Support(How.REFUSED, _NO_AVERAGE)
    if isinstance(flow, MatProdFlow):
        missing = [name for name in rule.params if not _has(rule, f"_{name}_jac_mat_prod")]
        if missing:
            return Support(How.REFUSED, f"there is no product with the Jacobian for {', '.join(missing)}")
    curved = isinstance(flow, SignedSqrtFlow) or (isinstance(flow, MatProdFlow) and Curvature.require_residual(flow.curvature))
    if curved and _has(rule, "_jac_t_mat_prod"):
        if not _has(rule, "hessian_is_zero"):
            return Support(How.REFUSED, "its second derivative is not known")
        if not _claims(rule.hessian_is_zero):
            diagonal = _claims(rule.hessian_is_diagonal)
            if isinstance(flow, MatProdFlow) and Curvature.is_pch(flow.curvature) and not diagonal:
                return Support(How.REFUSED, "its second derivative is dense")
            if not _has(rule, "hessian_diagonal" if diagonal else "_residual_mat_prod"):
                return Support(How.REFUSED, "there is no product with its second derivative")
    return Support(How.RULE)


def _of_other(extension: BackpropExtension, axes: int) -> Support:
    """Tell about a module without a rule.

    Args:
        extension: The extension.
        axes: Number of axes of its parameters; 0 if it has none.

    Returns:
        Support.
    """
    flow = extension.flow
    if axes and isinstance(flow, AverageFlow):
        return Support(How.REFUSED, _NO_AVERAGE)
    if axes > 1 and isinstance(extension, HBP):
        return Support(How.REFUSED, "there is no Kronecker factor for it")
    if axes and isinstance(flow, MatProdFlow) and Curvature.require_residual(flow.curvature):
        return Support(How.REFUSED, "its second derivative with respect to its own parameters is not known to be zero")
    if isinstance(flow, MatProdFlow) and Curvature.is_pch(flow.curvature):
        return Support(How.REFUSED, "its second derivative is not known to be diagonal")
    return Support(How.GRAPH)


def _claims(claim: Callable[[Any], bool]) -> bool:
    """Ask for something that a rule claims of its layer in evaluation mode.

    Args:
        claim: Method of the rule.

    Returns:
        Whether it claims it; no, where this depends on more of the layer.
    """
    with suppress(AttributeError):
        return claim(SimpleNamespace(training=False))
    return False


def _has(rule: BaseDerivatives, method: str) -> bool:
    """Tell whether a rule defines a method that its base class leaves open.

    Args:
        rule: The rule.
        method: Name of the method.

    Returns:
        Whether it does.
    """
    return getattr(type(rule), method, None) not in {None, getattr(BaseDerivatives, method, None), getattr(BaseParameterDerivatives, method, None)}
