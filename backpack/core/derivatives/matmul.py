"""Derivatives of the product of an input with a matrix, or with a stack of matrices, that is laid out as in ``x @ W``."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, einsum

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.kinds import ConstantJacobianDerivatives
from backpack.utils.subsampling import subsample


class MatmulDerivatives(AffineDerivatives):
    """Input ``[N, (G,) *positions, K]``, weight ``[(G,) K, O]``, output ``[N, (G,) *positions, O]``; each matrix of a stack is a group."""

    any_batch_axis = True
    transposed = True

    def groups(self, module: Any) -> int:
        weight = module.weight
        return weight.shape[0] if weight.dim() == 3 else 1

    def columns(self, module: Any, subsampling: Samples | slice = None) -> Tensor:
        inputs = subsample(module.input0, subsampling=subsampling)
        return self._stacked(inputs.unsqueeze(0), module)[0]

    def rows(self, module: Any, mat: Tensor) -> Tensor:
        return self._stacked(mat, module)

    def output_from_rows(self, module: Any, rows: Tensor) -> Tensor:
        return rows.mT.reshape(rows.shape[0], *module.output.shape)

    def weight_from_matrix(self, module: Any, matrix: Tensor) -> Tensor:
        return matrix.mT.reshape(*matrix.shape[:-3], *module.weight.shape)

    def matrix_from_weight(self, module: Any, weight: Tensor) -> Tensor:
        return weight.reshape(weight.shape[0], self.groups(module), *weight.shape[-2:]).mT

    def _jac_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._times(mat, module.weight)

    def _jac_t_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return self._times(mat, module.weight.mT)

    def _stacked(self, mat: Tensor, module: Any) -> Tensor:
        groups = self.groups(module)
        return mat.reshape(*mat.shape[:2], groups, prod(mat.shape[2:-1]) // max(1, groups), mat.shape[-1]).mT

    @staticmethod
    def _times(mat: Tensor, weight: Tensor) -> Tensor:
        return mat @ weight if weight.dim() == 2 else einsum("vng...i,gij->vng...j", mat, weight)


class VectorDerivatives(ConstantJacobianDerivatives, BaseParameterDerivatives):
    """Input ``[N, *positions, K]``, weight ``[K]``, output ``[N, *positions]``: a product with a vector, which has no outputs of its own."""

    keeps = frozenset({"input"})
    any_batch_axis = True

    def _jac_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat @ module.weight

    def _jac_t_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return mat.unsqueeze(-1) * module.weight

    def _weight_jac_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return (module.input0 @ mat.mT).movedim(-1, 0)

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        inputs, positions = subsample(module.input0, subsampling=subsampling), prod(mat.shape[2:])
        rows, columns = mat.reshape(*mat.shape[:2], positions), inputs.reshape(len(inputs), positions, inputs.shape[-1])
        return einsum("vnl,nlk->vk" if sum_batch else "vnl,nlk->vnk", rows, columns)
