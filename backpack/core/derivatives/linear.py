"""Derivatives of ``torch.nn.Linear``, with any number of axes between the samples and the features."""

from __future__ import annotations

from math import prod

from torch import Size, Tensor
from torch.nn import Linear
from torch.nn.functional import linear

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.registry import register
from backpack.utils.subsampling import subsample


@register(Linear)
class LinearDerivatives(AffineDerivatives):
    """Axes between the samples and the features are positions that share the weight."""

    any_batch_axis = True
    least_axes = 2

    @staticmethod
    def _get_additional_dims(module: Linear) -> Size:
        return module.input0.shape[1:-1]

    def vectors(self, module: Linear) -> Tensor | None:
        inputs = module.input0
        return inputs if inputs.dim() == 2 else None

    def columns(self, module: Linear, subsampling: Samples = None) -> Tensor:
        inputs = subsample(module.input0, subsampling=subsampling)
        if inputs.dim() == 2:
            return inputs.unsqueeze(1).unsqueeze(3)
        return inputs.reshape(inputs.shape[0], 1, prod(inputs.shape[1:-1]), inputs.shape[-1]).mT

    def rows(self, module: Linear, mat: Tensor) -> Tensor:
        if mat.dim() == 3:
            return mat.unsqueeze(2).unsqueeze(4)
        return mat.reshape(*mat.shape[:2], 1, prod(mat.shape[2:-1]), mat.shape[-1]).mT

    def _weight_jac_t_mat_prod(
        self, module: Linear, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        inputs = self.vectors(module) if sum_batch else None
        if inputs is None:
            return super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch=sum_batch, subsampling=subsampling)
        return mat.mT @ subsample(inputs, subsampling=subsampling)

    def _weight_jac_mat_prod(self, module: Linear, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        inputs = self.vectors(module)
        if inputs is None:
            return super()._weight_jac_mat_prod(module, g_inp, g_out, mat)
        return (inputs @ mat.flatten(0, 1).T).unflatten(1, mat.shape[:2]).transpose(0, 1)

    def _bias_jac_t_mat_prod(
        self, module: Linear, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        mat = mat.flatten(2, -2).sum(2) if mat.dim() > 3 else mat
        return mat.sum(1) if sum_batch else mat

    def weight_from_matrix(self, module: Linear, matrix: Tensor) -> Tensor:
        return matrix.squeeze(-3)

    def output_from_rows(self, module: Linear, rows: Tensor) -> Tensor:
        return rows.mT.reshape(rows.shape[0], *module.output.shape)

    def _jac_mat_prod(self, module: Linear, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return linear(mat, module.weight)

    def _jac_t_mat_prod(self, module: Linear, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return mat @ module.weight
