"""Derivatives of products with a matrix, or a stack of matrices, that is a parameter with its axes put in another order, joined or cut."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Size, Tensor, einsum

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.derivatives.weight_parts import PartDerivatives
from backpack.utils.subsampling import subsample


class Axes(NamedTuple):
    """How the axes of a stack of matrices are made of those of a parameter: its shape, and the lengths of the axes of which both consist.

    Axes are given by numbers, in the order of the parameter: those that count the matrices, in the order in which they do, those of inputs, along
    which is summed, and those of outputs.
    """

    shape: Size
    sizes: Sequence[int]
    stack: Sequence[int]
    inputs: Sequence[int]
    outputs: Sequence[int]

    @property
    def groups(self) -> int | None:
        """How many of the first axes count groups, so that then come all axes of outputs, then those of inputs, or the other way round."""
        inputs = set(self.inputs)
        for count in range(min(self.inputs, default=len(self.sizes)) + 1):
            kinds = [axis in inputs for axis in range(count, len(self.sizes))]
            if all(axis < count for axis in self.stack) and sorted(kinds) in (kinds, kinds[::-1]):
                return count
        return None

    def turned(self, order: Sequence[int]) -> Axes:
        """Say how the matrices are made of a parameter that has these axes in another order.

        Args:
            order: Numbers of the axes.

        Returns:
            The axes.
        """
        sizes = [self.sizes[axis] for axis in order]
        return Axes(Size(sizes), sizes, *([order.index(axis) for axis in part] for part in (self.stack, self.inputs, self.outputs)))


class RearrangedDerivatives(AffineDerivatives):
    """A product of inputs ``[N, (stack,) *positions, K]`` with matrices on the right, or ``[N, (stack,) K, *positions]`` with matrices on the left.

    Axes of outputs that come first in the parameter, and cannot be joined with the others there, are groups, which see the same inputs. A parameter
    in which axes of inputs lie on both sides of others is turned, so that they come last.
    """

    any_batch_axis = True

    def __init__(self, axes: Axes, stacked: bool, left: bool) -> None:
        """Say how the matrices are made.

        Args:
            axes: Of what the axes of the matrices consist.
            stacked: Whether tensors have an axis for the stack.
            left: Whether the matrices are on the left, and positions come last.
        """
        self.separates = axes.groups is not None
        self._order = range(len(axes.sizes)) if self.separates else [*axes.stack, *axes.outputs, *axes.inputs]
        self._own, self._axes, self._stacked, self._left = axes, axes if self.separates else axes.turned(self._order), stacked, left
        self._count = self._axes.groups
        rows, inputs = [axis for axis in self._axes.outputs if axis >= self._count], self._axes.inputs
        if rows and inputs:
            self.transposed = min(inputs) < min(rows)
        else:  # one side is an axis of length one, which is no part: it is the last one of the parameter, or comes in front of the other side
            self.transposed = (axes.shape[-1:] == (1,)) is bool(inputs)

    @property
    def weight_layout(self) -> Hashable:
        groups, inputs, outputs = self._matrices()
        matrix = (inputs, outputs) if self.transposed else (outputs, inputs)
        if not self.separates:
            return RearrangedDerivatives.weight_from_matrix, *self._order, *self._own.sizes, groups
        if self._axes.shape == matrix:
            return (MatmulDerivatives if self.transposed else LinearDerivatives).weight_from_matrix
        if self._axes.shape == (groups, *matrix):
            return (MatmulDerivatives if self.transposed else PartDerivatives).weight_from_matrix
        return RearrangedDerivatives.weight_from_matrix, self.transposed, groups

    @property
    def keeps_order(self) -> bool:
        """Whether outputs come in the order in which the groups have theirs."""
        return [*self._axes.stack, *self._axes.outputs] == sorted([*self._axes.stack, *self._axes.outputs])

    def _size(self, axes: Iterable[int]) -> int:
        return prod(self._axes.sizes[axis] for axis in axes)

    def _matrices(self) -> tuple[int, int, int]:
        # groups, inputs and outputs of each
        groups, inputs = self._size(range(self._count)), self._size(self._axes.inputs)
        return groups, inputs, prod(self._axes.sizes) // max(groups * inputs, 1)

    def groups(self, module: Any) -> int:
        return self._matrices()[0]

    def columns(self, module: Any, subsampling: Samples | slice = None) -> Tensor:
        axes, shared = self._axes, [axis for axis in self._axes.outputs if axis < self._count]
        given = self._positions_last(subsample(module.input0, subsampling=subsampling)[None])[0]
        present = [*axes.stack, *shared, *axes.inputs]
        sizes = [1 if axis in shared else axes.sizes[axis] for axis in present]
        apart = given.reshape(len(given), *sizes, given.shape[-1]).expand(-1, *(axes.sizes[axis] for axis in present), -1)
        ordered = apart.permute(0, *(1 + present.index(axis) for axis in sorted(present)), -1)
        return ordered.reshape(len(given), self.groups(module), self._size(axes.inputs), given.shape[-1])

    def rows(self, module: Any, mat: Tensor) -> Tensor:
        given, present = self._positions_last(mat), [*self._axes.stack, *self._axes.outputs]
        apart = given.reshape(*given.shape[:2], *(self._axes.sizes[axis] for axis in present), given.shape[-1])
        ordered = apart.permute(0, 1, *(2 + present.index(axis) for axis in sorted(present)), -1)
        groups, _, outputs = self._matrices()
        return ordered.reshape(*given.shape[:2], groups, outputs, given.shape[-1])

    def output_from_rows(self, module: Any, rows: Tensor) -> Tensor:
        axes, present = self._axes, [*self._axes.stack, *self._axes.outputs]
        apart = rows.reshape(*rows.shape[:2], *(axes.sizes[axis] for axis in sorted(present)), rows.shape[-1])
        ordered = apart.permute(0, 1, *(2 + sorted(present).index(axis) for axis in present), -1)
        views = ordered.reshape(*rows.shape[:2], self._size(axes.stack), self._size(axes.outputs), rows.shape[-1])
        return (views if self._left else views.mT).reshape(len(rows), *module.output.shape)

    def _positions_last(self, mat: Tensor) -> Tensor:
        # ``[V, N, stack, F, L]``
        lead, (*first, last) = (*mat.shape[:2], self._size(self._axes.stack)), mat.shape[2 + self._stacked :]
        if self._left:
            features, *positions = (*first, last)
            return mat.reshape(*lead, features, prod(positions))
        return mat.reshape(*lead, prod(first), last).mT

    def weight_from_matrix(self, module: Any, matrix: Tensor) -> Tensor:
        lead = matrix.shape[:-3]
        if self.separates:
            return (matrix.mT if self.transposed else matrix).reshape(*lead, *self._axes.shape)
        places = [len(lead) + self._order.index(axis) for axis in range(len(self._order))]
        return matrix.reshape(*lead, *self._axes.sizes).permute(*range(len(lead)), *places).reshape(*lead, *self._own.shape)

    def matrix_from_weight(self, module: Any, weight: Tensor) -> Tensor:
        groups, inputs, outputs = self._matrices()
        if not self.separates:
            weight = weight.reshape(len(weight), *self._own.sizes).permute(0, *(1 + axis for axis in self._order))
        if self.transposed:
            return weight.reshape(len(weight), groups, inputs, outputs).mT
        return weight.reshape(len(weight), groups, outputs, inputs)

    def _jac_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._times(mat, module.matrices if self._left else module.matrices.mT)

    def _jac_t_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return self._times(mat, module.matrices.mT if self._left else module.matrices)

    def _times(self, mat: Tensor, matrices: Tensor) -> Tensor:
        # multiplies features with ``[(stack,) F', F]``
        if not self._left and not self._stacked:
            return mat @ matrices.mT
        # einsum multiplies all rows by a matrix at once, matmul those of each sample
        stack, given, outputs = matrices if self._stacked else matrices[None], self._positions_last(mat), matrices.shape[-2]
        if self._left:
            products = einsum("gof,vngfl->vngol", stack, given)
            return products.reshape(*mat.shape[: 2 + self._stacked], outputs, *mat.shape[3 + self._stacked :])
        return einsum("gof,vngfl->vnglo", stack, given).reshape(*mat.shape[:-1], outputs)
