"""Module extensions for single layers, made by a rule: ``SqrtGGNReLU``, ``BatchGradLinear``, ``DiagGGNCrossEntropyLoss``, ...

Attributes of this module are called like a family of quantities followed by a module class that has derivatives, or by the class of these
(``BatchGradBatchNormNd``); they are constructed without arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.registry import registered
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.module_extensions import (
    BatchGradBase,
    BatchL2Base,
    DiagGGNBaseModule,
    DiagHBaseModule,
    GGNMPBase,
    GradBaseModule,
    HBPBaseModule,
    HBPLoss,
    HMPBase,
    PCHMPBase,
    SGSBase,
    SqrtGGNBaseModule,
    VarianceBaseModule,
)

_Make = Callable[[BaseDerivatives, Sequence[str]], tuple]


def _usual(rule: BaseDerivatives, params: Sequence[str]) -> tuple:
    return rule, params


FAMILIES: dict[str, tuple[type[ModuleExtension], _Make]] = {
    "BatchGrad": (BatchGradBase, _usual),
    "BatchL2": (BatchL2Base, lambda rule, params: (params, rule)),
    "SGS": (SGSBase, _usual),
    "Grad": (GradBaseModule, _usual),
    "Variance": (VarianceBaseModule, lambda rule, params: (params, GradBaseModule(rule, params), SGSBase(rule, params))),
    "DiagGGN": (DiagGGNBaseModule, lambda rule, params: (rule, params, True)),
    "BatchDiagGGN": (DiagGGNBaseModule, lambda rule, params: (rule, params, False)),
    "DiagH": (DiagHBaseModule, _usual),
    "BatchDiagH": (DiagHBaseModule, lambda rule, params: (rule, params, False)),
    "SqrtGGN": (SqrtGGNBaseModule, _usual),
    "HBP": (HBPBaseModule, _usual),
    "GGNMP": (GGNMPBase, _usual),
    "HMP": (HMPBase, _usual),
    "PCHMP": (PCHMPBase, _usual),
}
"""Name of the family to its base and the arguments of the base's constructor, made from derivatives and names of parameters."""


def __getattr__(name: str) -> type[ModuleExtension]:
    """Make the class of a family for a module class that has derivatives.

    Args:
        name: Name of the family, followed by that of the module class.

    Returns:
        The class, the same one whenever it is asked for.

    Raises:
        AttributeError: If the name is no such name.
    """
    known = dict(reversed(registered().items()))  # the library's own come first
    rules = {type(rule).__name__.removesuffix("Derivatives"): rule for rule in known.values()}  # ``BatchNormNd``, for example
    rules |= {module_class.__name__: rule for module_class, rule in known.items()}
    for family, (base, make) in FAMILIES.items():
        rule = rules.get(name.removeprefix(family)) if name.startswith(family) else None
        if rule is not None:
            parent = HBPLoss if base is HBPBaseModule and rule.is_loss else base

            def construct(self: ModuleExtension) -> None:
                parent.__init__(self, *make(rule, rule.params))  # noqa: B023  returned at once

            made = type(name, (parent,), {"__init__": construct, "__doc__": f"{family} of {name.removeprefix(family)}.", "__module__": __name__})
            return globals().setdefault(name, made)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: no family of quantities followed by a module class that has derivatives")
