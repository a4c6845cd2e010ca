"""Affine layers: two views, of the input and of a matrix of outputs, in which every rule for weight and bias is written once.

With ``columns`` ``x [[N, G, K, L]]`` and the weight as a matrix ``W [[G, O, K]]`` such a layer computes ``W x + b`` at each of ``L``
positions, in ``G`` groups with ``O`` outputs each.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import ClassVar

from torch import Tensor, einsum
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.kinds import ConstantJacobianDerivatives


class AffineDerivatives(ConstantJacobianDerivatives, BaseParameterDerivatives):
    """A layer that multiplies by its weight and adds its bias.

    Attributes:
        transposed: The input side of the weight comes before the output side.
    """

    keeps = frozenset({"input"})
    transposed: ClassVar[bool] = False

    @abstractmethod
    def columns(self, module: Module, subsampling: Samples = None) -> Tensor:
        """View of the input.

        Args:
            module: The layer with its recorded input.
            subsampling: Samples to select; ``None`` for all.

        Returns:
            ``[[N, G, K, L]]``: what each of the ``L`` positions multiplies by the weight.
        """

    @abstractmethod
    def rows(self, module: Module, mat: Tensor) -> Tensor:
        """View of a matrix of outputs.

        Args:
            module: The layer with its recorded output.
            mat: ``[[V, *output]]``, with any number of samples.

        Returns:
            ``[[V, N, G, O, L]]``.
        """

    @abstractmethod
    def output_from_rows(self, module: Module, rows: Tensor) -> Tensor:
        """Undo ``rows``.

        Args:
            module: The layer with its recorded output.
            rows: ``[[V, N, G, O, L]]``.

        Returns:
            ``[[V, *output]]``.
        """

    def groups(self, module: Module) -> int:
        """Number of groups of channels that do not meet.

        Returns:
            ``G``.
        """
        return 1

    def weight_from_matrix(self, module: Module, matrix: Tensor) -> Tensor:
        """Give matrices the shape of the weight.

        Args:
            module: The layer.
            matrix: ``[[..., G, O, K]]``.

        Returns:
            ``[[..., *weight]]``.
        """
        return matrix.reshape(*matrix.shape[:-3], *module.weight.shape)

    def matrix_from_weight(self, module: Module, weight: Tensor) -> Tensor:
        """Undo ``weight_from_matrix`` on a stack of weights.

        Args:
            module: The layer.
            weight: ``[[V, *weight]]``.

        Returns:
            ``[[V, G, O, K]]``.
        """
        groups = self.groups(module)
        return weight.reshape(weight.shape[0], groups, weight.shape[1] // groups, prod(weight.shape[2:]))

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        rows, columns = self.rows(module, mat), self.columns(module, subsampling)
        return self.weight_from_matrix(module, _summed_products(rows, columns) if sum_batch else _products(rows, columns))

    def _bias_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        rows = self.rows(module, mat)
        rows = rows.squeeze(4) if rows.shape[4] == 1 else rows.sum(4)
        return (rows.sum(1) if sum_batch else rows).flatten(-2)

    def _weight_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        rows = einsum("vgok,ngkl->vngol", self.matrix_from_weight(module, mat), self.columns(module))
        return self.output_from_rows(module, rows)

    def _bias_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        groups, positions = self.groups(module), prod(module.output.shape[1:]) // mat.shape[1]
        rows = mat.reshape(mat.shape[0], 1, groups, mat.shape[1] // groups, 1)
        return self.output_from_rows(module, rows.expand(-1, module.output.shape[0], -1, -1, positions))


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """Sum over positions the outer products of rows and columns.

    Returns:
        ``[[V, N, G, O, K]]``.
    """
    # one position: a multiplication is two to four times as fast as N matrix products with an inner axis of length one
    return rows * columns.mT if columns.shape[3] == 1 else rows @ columns.mT


def _summed_products(rows: Tensor, columns: Tensor) -> Tensor:
    """Sum over positions and samples the outer products of rows and columns, by one matrix product for each group and column ``v``.

    Returns:
        ``[[V, G, O, K]]``.
    """
    # [G, V, O, NL] @ [G, 1, NL, K]; the samples come one after the other in a Linear layer, so that flattening makes no copy
    return (rows.permute(2, 0, 3, 1, 4).flatten(3) @ columns.permute(1, 0, 3, 2).flatten(1, 2).unsqueeze(1)).transpose(0, 1)
