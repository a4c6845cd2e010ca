"""Derivatives of the product of an input with some rows, or columns, of a matrix, or with one matrix of a stack."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Size, Tensor

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives

_VIEWS = LinearDerivatives()


class PartDerivatives(AffineDerivatives):
    """A layer with the whole weight, cut into as many groups as there are blocks, of which it sees some: the others multiply zeros.

    Attributes:
        own: The groups that it sees.
    """

    any_batch_axis = in_parts = True

    def __init__(self, shape: Size, groups: int, own: slice, transposed: bool, bias: bool, axis: int = 0) -> None:
        """Say which part of the weight it is.

        Args:
            shape: Shape of the whole weight: a matrix of blocks one below the other, or side by side, or a stack of them.
            groups: Number of blocks.
            own: Those which the layer sees.
            transposed: Whether blocks are ``[K, O]``, instead of ``[O, K]``.
            bias: Whether a bias is cut in the same way. Else it is that of the own groups alone.
            axis: Along which axis of the weight blocks lie.
        """
        self._shape, self._groups, self.own, self.transposed, self._bias, self._axis = shape, groups, own, transposed, bias, axis
        self.separates = not axis  # else blocks do not lie one after the other in the weight
        self._cuts_inputs = len(shape) == 2 and transposed is (axis == 0)  # noqa: PLR2004  outputs of blocks are summed, not laid side by side

    @property
    def weight_layout(self) -> Hashable:
        if self._axis:
            return PartDerivatives.weight_from_matrix, self.transposed
        return (MatmulDerivatives if self.transposed else PartDerivatives).weight_from_matrix

    def groups(self, module: Any) -> int:
        return self._groups

    def own_columns(self, module: Any, subsampling: Samples | slice = None) -> Tensor:
        """View of the input.

        Args:
            module: The product with its recorded input.
            subsampling: Samples to select; ``None`` for all.

        Returns:
            ``[N, own groups, K, L]``.
        """
        columns, count = _VIEWS.columns(module, subsampling), self.own.stop - self.own.start
        return columns.squeeze(1).unflatten(1, (count, -1)) if self._cuts_inputs else columns.expand(-1, count, -1, -1)

    def own_rows(self, module: Any, mat: Tensor) -> Tensor:
        """View of a matrix of outputs.

        Args:
            module: The product with its recorded output.
            mat: ``[V, *output]``.

        Returns:
            ``[V, N, own groups, O, L]``.
        """
        rows, count = _VIEWS.rows(module, mat), self.own.stop - self.own.start
        return rows.expand(-1, -1, count, -1, -1) if self._cuts_inputs else rows.squeeze(2).unflatten(2, (count, -1))

    def columns(self, module: Any, subsampling: Samples | slice = None) -> Tensor:
        return self.among_all(self.own_columns(module, subsampling), 1)

    def rows(self, module: Any, mat: Tensor) -> Tensor:
        return self.among_all(self.own_rows(module, mat), 2)

    def among_all(self, part: Tensor, axis: int) -> Tensor:
        """Fill up what belongs to some of the groups with zeros.

        Args:
            part: ``[..., own groups, *]``.
            axis: Axis of the groups.

        Returns:
            ``[..., G, *]``.
        """
        whole = part.new_zeros(*part.shape[:axis], self._groups, *part.shape[axis + 1 :])
        whole.narrow(axis, self.own.start, part.shape[axis]).copy_(part)
        return whole

    def output_from_rows(self, module: Any, rows: Tensor) -> Tensor:
        rows = rows[:, :, self.own]
        return _VIEWS.output_from_rows(module, rows.sum(2, keepdim=True) if self._cuts_inputs else rows.flatten(2, 3).unsqueeze(2))

    def weight_from_matrix(self, module: Any, matrix: Tensor) -> Tensor:
        matrix = matrix.mT if self.transposed else matrix
        return (matrix.transpose(-3, -2) if self._axis else matrix).reshape(*matrix.shape[:-3], *self._shape)

    def matrix_from_weight(self, module: Any, weight: Tensor) -> Tensor:
        count, groups = weight.shape[0], self._groups
        if self._axis:
            matrix = weight.reshape(count, weight.shape[1], groups, -1).transpose(1, 2)
        else:
            matrix = weight.reshape(count, groups, -1, weight.shape[-1])
        return matrix.mT if self.transposed else matrix

    def _bias_jac_t_mat_prod(
        self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        result = super()._bias_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch=sum_batch, subsampling=subsampling)
        return result if self._bias else result.unflatten(-1, (self._groups, -1))[..., self.own, :].flatten(-2)

    def _jac_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat @ module.matrices

    def _jac_t_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return mat @ module.matrices.mT
