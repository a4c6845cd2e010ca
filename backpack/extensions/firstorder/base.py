"""Bases of first-order extensions: quantities made of per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Size
from torch.nn import Module

from backpack.core.flow import Flow
from backpack.extensions.backprop_extension import FAIL_WARN, BackpropExtension, Excluded
from backpack.extensions.flows import GRADIENT
from backpack.extensions.module_extension import ModuleExtension


class FirstOrderModuleExtension(ModuleExtension):
    """What a first-order extension computes for the parameters of one module class, written by a user."""


class FirstOrderBackpropExtension(BackpropExtension):
    """A quantity made of per-sample gradients, from module extensions that a user has written."""

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[Module], ModuleExtension] | None = None,
        fail_mode: str = FAIL_WARN,
        subsampling: list[int] | None = None,
        *,
        exclude: Iterable[Excluded] = (),
    ) -> None:
        super().__init__(savefield, module_exts, fail_mode, subsampling, exclude=exclude)

    def expects_backpropagation_quantities(self) -> bool:
        return False


class GradientExtension(FirstOrderBackpropExtension):
    """One of the library's own first-order quantities: a function of the per-sample gradients of a parameter."""

    flow: Flow = GRADIENT

    def forms_gradients(self, rows: Size, entries: int) -> bool:
        return self.get_subsampling() is None
