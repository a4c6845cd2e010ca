"""Dropout: the identity in evaluation mode; in training mode the mask has to be read off the output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, FeatureAlphaDropout, Module

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.kinds import FlatDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.errors import NotRecordedError, UnsupportedError
from backpack.utils.subsampling import subsample


@register(Dropout)
@register(Dropout1d)
@register(Dropout2d)
@register(Dropout3d)
class DropoutDerivatives(FlatDerivatives, ElementwiseDerivatives):
    """Entries, or channels, are set to zero at random, and the others multiplied by ``1 / (1 - p)``.

    In training mode, entries with zero output are taken for dropped. Where the input is exactly zero this is a guess, so the rule does not
    apply there. In evaluation mode nothing is read.
    """

    keeps = frozenset()

    def applies(self, module: Module) -> bool:
        return not module.training or module.p == 0

    def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        output = subsample(module.output, subsampling=subsampling)
        if self.applies(module):
            return torch.ones_like(output)
        if output.is_meta:
            raise NotRecordedError(
                f"Which entries {module} dropped is read off its output, which is not at hand. Enter the context before the forward pass."
            )
        return (output != 0).to(output.dtype) / (1 - module.p) if module.p < 1 else torch.zeros_like(output)

    def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        return torch.zeros_like(module.output)

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat if self.applies(module) else super()._jac_mat_prod(module, g_inp, g_out, mat)

    def _jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None, out: Tensor | None = None
    ) -> Tensor:
        return mat if self.applies(module) else super()._jac_t_mat_prod(module, g_inp, g_out, mat, subsampling=subsampling, out=out)

    def ea_jac_t_mat_jac_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat if self.applies(module) else super().ea_jac_t_mat_jac_prod(module, g_inp, g_out, mat)


@register(AlphaDropout)
@register(FeatureAlphaDropout)
class AlphaDropoutDerivatives(DropoutDerivatives):
    """Dropped entries get a value other than zero, so that the output does not show them."""

    def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        if not self.applies(module):
            raise UnsupportedError(f"{module} in training mode does not record which entries it dropped. Call .eval() on it.")
        return super().df(module, g_inp, g_out, subsampling=subsampling)
