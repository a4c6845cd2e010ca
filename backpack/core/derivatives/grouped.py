"""Derivatives of products of rows with one matrix of a stack each, ``torch.nn.functional.grouped_mm``."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.derivatives.weight_parts import PartDerivatives
from backpack.utils.subsampling import subsample


class GroupedDerivatives(AffineDerivatives):
    """Input ``[N, *positions, K]``, ``input1 [N, *positions, 1]`` with the number of the matrix for each: a layer with as many groups."""

    any_batch_axis = in_parts = True

    def __init__(self, groups: int, transposed: bool) -> None:
        """Say how the matrices lie.

        Args:
            groups: Their number.
            transposed: Whether the inputs come first in a matrix of the weight.
        """
        self._groups, self.transposed = groups, transposed

    @property
    def weight_layout(self) -> Hashable:  # the same weight may be used in parts, too
        return (MatmulDerivatives if self.transposed else PartDerivatives).weight_from_matrix

    def groups(self, module: Any) -> int:
        return self._groups

    def columns(self, module: Any, subsampling: Samples | slice = None) -> Tensor:
        given, chosen = (subsample(part, subsampling=subsampling) for part in (module.input0, module.input1))
        return self._in_groups(given[None], chosen)[0]

    def rows(self, module: Any, mat: Tensor) -> Tensor:
        return self._in_groups(mat, module.input1)

    def _in_groups(self, mat: Tensor, chosen: Tensor) -> Tensor:
        # ``[V, N, *positions, F]`` to ``[V, N, G, F, L]``, zeros in the groups that were not chosen
        mat = mat.reshape(*mat.shape[:2], -1, 1, mat.shape[-1])
        index = chosen.reshape(1, *mat.shape[1:3], 1, 1).expand_as(mat)
        whole = mat.new_zeros(*mat.shape[:3], self._groups, mat.shape[-1])
        return whole.scatter_(3, index, mat).permute(0, 1, 3, 4, 2)

    def output_from_rows(self, module: Any, rows: Tensor) -> Tensor:
        by_position = rows.permute(0, 1, 4, 2, 3)
        index = module.input1.reshape(1, *by_position.shape[1:3], 1, 1).expand(*by_position.shape[:3], 1, by_position.shape[4])
        return by_position.gather(3, index).reshape(len(rows), *module.output.shape)

    def weight_from_matrix(self, module: Any, matrix: Tensor) -> Tensor:
        return matrix.mT if self.transposed else matrix

    def matrix_from_weight(self, module: Any, weight: Tensor) -> Tensor:
        return weight.mT if self.transposed else weight

    def _weight_jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        if subsampling is not None:
            module = SimpleNamespace(**{name: subsample(getattr(module, name), subsampling=subsampling) for name in ("input0", "input1")})
        return super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch=sum_batch)

    def _jac_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._times(mat, module.matrices, module.input1)

    def _jac_t_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return self._times(mat, module.matrices.mT, subsample(module.input1, subsampling=subsampling))

    @staticmethod
    def _times(mat: Tensor, stack: Tensor, chosen: Tensor) -> Tensor:
        flat, chosen = mat.reshape(len(mat), -1, mat.shape[-1]), chosen.flatten()
        products = flat.new_empty(*flat.shape[:2], stack.shape[-1])
        for number, matrix in enumerate(stack):
            there = (chosen == number).nonzero()[:, 0]
            products[:, there] = flat[:, there] @ matrix
        return products.reshape(*mat.shape[:-1], stack.shape[-1])
