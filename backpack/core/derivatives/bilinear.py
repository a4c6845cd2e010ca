"""Derivatives of ``torch.nn.Bilinear``: a linear layer on the outer products of its two inputs."""

from __future__ import annotations

from math import prod

from torch import Tensor, einsum
from torch.nn import Bilinear

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.registry import register
from backpack.utils.subsampling import subsample


@register(Bilinear)
class BilinearDerivatives(AffineDerivatives):
    """Jacobians with respect to the first input depend on the second, which must not depend on parameters itself."""

    any_batch_axis = True
    least_axes = 2
    same_jacobian = False

    def columns(self, module: Bilinear, subsampling: Samples | slice = None) -> Tensor:
        first, second = (subsample(x, subsampling=subsampling) for x in (module.input0, module.input1))
        outer = first.unsqueeze(-1) * second.unsqueeze(-2)
        return outer.reshape(outer.shape[0], 1, prod(outer.shape[1:-2]), prod(outer.shape[-2:])).mT

    def rows(self, module: Bilinear, mat: Tensor) -> Tensor:
        return mat.reshape(*mat.shape[:2], 1, prod(mat.shape[2:-1]), mat.shape[-1]).mT

    def output_from_rows(self, module: Bilinear, rows: Tensor) -> Tensor:
        return rows.mT.reshape(rows.shape[0], *module.output.shape)

    def _jac_mat_prod(self, module: Bilinear, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return einsum("v...i,...j,oij->v...o", mat, module.input1, module.weight)

    def _jac_t_mat_prod(self, module: Bilinear, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return einsum("v...o,...j,oij->v...i", mat, subsample(module.input1, subsampling=subsampling), module.weight)
