"""Derivatives of the product of an input with a matrix, or with a stack of matrices, that is laid out as in ``x @ W``."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, einsum

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
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
        return mat.reshape(*mat.shape[:2], groups, prod(mat.shape[2:-1]) // groups, mat.shape[-1]).mT

    @staticmethod
    def _times(mat: Tensor, weight: Tensor) -> Tensor:
        return mat @ weight if weight.dim() == 2 else einsum("vng...i,gij->vng...j", mat, weight)
