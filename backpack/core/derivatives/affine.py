"""Affine layers: two views, of the input and of a matrix of outputs, in which every rule for weight and bias is written once.

With ``columns`` ``x [N, G, K, L]`` and the weight as a matrix ``W [G, O, K]`` such a layer computes ``W x + b`` at each of ``L``
positions, in ``G`` groups with ``O`` outputs each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, einsum
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.kinds import ConstantJacobianDerivatives
from backpack.utils.columns import blocks
from backpack.utils.moment import second_moment
from backpack.utils.pages import compute, empty
from backpack.utils.precision import wide

SMALL = 2**18
LARGE = 2**20
"""Entries of a block of samples, and of one of columns: as much as stays in the cache of a core.

Measured on the layers of 3c3d and All-CNN-C, one thread: from 2^16 to 2^18 entries the squares of one column take the same time, with 2^22 they
take 1.3 times as long; with 10 and with 100 columns 2^20 is the best by 10 to 30 percent.
"""
_ALONE = 2**15
"""Entries of a weight from which on per-sample products are computed one by one, in the same memory, which stays in the cache.

Measured on one thread of a CPU: DiagGGNExact on All-CNN-C 74 gradients instead of 79, on 3c3d 6.8 instead of 6.9. Elsewhere, calls cost more.
"""


class AffineDerivatives(ConstantJacobianDerivatives, BaseParameterDerivatives):
    """A layer that multiplies by its weight and adds its bias.

    Attributes:
        transposed: The input side of the weight comes before the output side.
        separates: Axes of inputs lie side by side in the weight, as those of outputs do, so that it has Kronecker factors.
        in_parts: A use need not see all groups at each position: with other numbers of positions, those of two samples need not go together.
        apart: Positions of two samples do not go together.
    """

    keeps = frozenset({"input"})
    transposed: ClassVar[bool] = False
    separates: bool = True
    in_parts: ClassVar[bool] = False
    apart: bool = False

    @property
    def weight_layout(self) -> Hashable:
        """What two rules have in common whose matrices lie in the weight alike, so that uses of one weight by both can be joined."""
        return type(self).weight_from_matrix

    @abstractmethod
    def columns(self, module: Module, subsampling: Samples | slice = None) -> Tensor:
        """View of the input.

        Args:
            module: The layer with its recorded input.
            subsampling: Samples to select; ``None`` for all.

        Returns:
            ``[N, G, K, L]``: what each of the ``L`` positions multiplies by the weight.
        """

    @abstractmethod
    def rows(self, module: Module, mat: Tensor) -> Tensor:
        """View of a matrix of outputs.

        Args:
            module: The layer with its recorded output.
            mat: ``[V, *output]``, with any number of samples.

        Returns:
            ``[V, N, G, O, L]``.
        """

    @abstractmethod
    def output_from_rows(self, module: Module, rows: Tensor) -> Tensor:
        """Undo ``rows``.

        Args:
            module: The layer with its recorded output.
            rows: ``[V, N, G, O, L]``.

        Returns:
            ``[V, *output]``.
        """

    def vectors(self, module: Module) -> Tensor | None:
        """Input of each sample as one vector, which the whole weight ``[O, K]`` multiplies: in a small net, calls for views of it are felt.

        Returns:
            ``[N, K]``; ``None``, the default, where there are several positions or groups, or may be.
        """
        return None

    def easier(self, module: Module, mat: Tensor, subsampling: Samples = None) -> tuple[AffineDerivatives, Module, Tensor]:
        """Say which layer's per-sample products with the weight are the same and cheaper: its own, by default.

        Args:
            module: The layer with its recorded input and output.
            mat: ``[V, *output]``.
            subsampling: Samples that ``mat`` is about; ``None`` for all.

        Returns:
            Derivatives, layer, and columns at its output, ``mat`` or ``[1, V * N, ...]``.
        """
        return self, module, mat

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
            matrix: ``[..., G, O, K]``.

        Returns:
            ``[..., *weight]``.
        """
        return matrix.reshape(*matrix.shape[:-3], *module.weight.shape)

    def matrix_from_weight(self, module: Module, weight: Tensor) -> Tensor:
        """Undo ``weight_from_matrix`` on a stack of weights.

        Args:
            module: The layer.
            weight: ``[V, *weight]``.

        Returns:
            ``[V, G, O, K]``.
        """
        groups = self.groups(module)
        return weight.reshape(weight.shape[0], groups, weight.shape[1] // groups, prod(weight.shape[2:]))

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        rows = self.rows(module, mat)
        if sum_batch:
            products = _summed_products(rows, self.columns(module, subsampling))
        elif self.fills_blocks(module, rows):
            products = empty((*rows.shape[:4], module.weight.numel() // max(1, rows.shape[2:4].numel())), mat)
            for v, n, block in self.weight_blocks(module, mat, subsampling):
                products[v, n] = block
        else:
            products = _products(rows, self.columns(module, subsampling))
        return self.weight_from_matrix(module, products)

    def fills_blocks(self, module: Module, rows: Tensor) -> bool:
        """Tell whether per-sample products with the weight are better computed for a block of samples at a time.

        Args:
            module: The layer with its recorded input.
            rows: ``[V, N, G, O, L]``.

        Returns:
            ``False`` where the columns are a view of the input.
        """
        return False

    def weight_blocks(self, module: Module, mat: Tensor, subsampling: Samples = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Multiply by the transposed Jacobian of the output with respect to the weight, for a block of columns and samples at a time.

        Args:
            module: The layer with its recorded input.
            mat: ``[V, *output]``.
            subsampling: Samples that ``mat`` is about; ``None`` for all.

        Yields:
            Which columns ``v``, which samples ``n``, and their products ``[v, n, G, O, K]``, a tensor that the caller may overwrite, and that is
            overwritten afterwards, except for the first one.
        """
        rows, size = self.rows(module, mat), module.weight.numel()
        inputs = size // max(1, rows.shape[3]) * rows.shape[4]
        alone = size >= _ALONE and rows.shape[2] == 1 and rows.shape[4] > 1 and mat.device.type == "cpu" and not torch.is_grad_enabled()
        count = 0
        for n in blocks(rows.shape[1], inputs if alone else size + inputs, SMALL):
            columns = self.columns(module, n if subsampling is None else subsampling[n])
            if alone:
                # between products, Python and the tensors that it makes have left the cache: whatever can be done before is
                given = (column.unbind() for column in rows[:, n, 0].unbind())
                for sample, (inner, *mats) in enumerate(zip(columns[:, 0].mT.unbind(), *given, strict=True), n.start):
                    for v, row in enumerate(mats):
                        if count < 2:  # noqa: PLR2004  the first one is the caller's, all others are in the same memory
                            out = empty((rows.shape[3], size // rows.shape[3]), rows)
                            product = out[None, None, None]
                        count += 1
                        torch.mm(row, inner, out=out)
                        yield slice(v, v + 1), slice(sample, sample + 1), product
                continue
            for v in blocks(rows.shape[0], size * len(columns), LARGE):
                yield v, n, _products(rows[v, n], columns)

    def sum_of_products(self, module: Module, mat: Tensor) -> Tensor:
        """Sum per-sample products with the weight over samples, in ``float32`` at least, where autograd's sum is rounded to half precision.

        Args:
            module: The layer with its recorded input.
            mat: A single column ``[1, *output]``.

        Returns:
            ``[*weight]``.
        """
        return self.weight_from_matrix(module, _summed_products(wide(self.rows(module, mat)), wide(self.columns(module))))[0]

    def sum_at_diagonal(self, module: Module, name: str, mat: Tensor, sum_batch: bool) -> Tensor:
        """Diagonal of ``J^T diag(d) J`` for the Jacobian with respect to weight or bias, ``sum_l d_l x_l^2`` and ``sum_l d_l``.

        Args:
            module: The layer with its recorded input.
            name: Name of the parameter.
            mat: ``d [1, N, *output]``.
            sum_batch: Whether to sum over samples.

        Returns:
            ``[*parameter]`` if ``sum_batch``, else ``[N, *parameter]``.
        """
        mat = wide(mat)
        if name == "bias":
            return self._bias_jac_t_mat_prod(module, None, (mat[0],), mat, sum_batch=sum_batch)[0]
        rows, squares = self.rows(module, mat), wide(self.columns(module)).square()
        return self.weight_from_matrix(module, (_summed_products if sum_batch else _products)(rows, squares))[0]

    def input_moment(self, module: Module, scale: float = 1.0) -> Tensor:
        """Sum the outer products of the columns of the input with themselves, over samples and positions.

        Args:
            module: The layer with its recorded input.
            scale: Factor.

        Returns:
            ``[G, K, K]``, a tensor that the caller may change.
        """
        vectors = self.vectors(module)
        if vectors is not None:
            return second_moment(wide(vectors).unsqueeze(0), scale)
        return second_moment(wide(self.columns(module)).permute(1, 0, 3, 2).flatten(1, 2), scale)  # makes no copy in a Linear layer

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
        groups, positions = self.groups(module), prod(module.output.shape[1:]) // max(1, mat.shape[1])
        rows = mat.reshape(mat.shape[0], 1, groups, mat.shape[1] // groups, 1)
        return self.output_from_rows(module, rows.expand(-1, module.output.shape[0], -1, -1, positions))


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """Sum over positions the outer products of rows and columns.

    Returns:
        ``[V, N, G, O, K]``.
    """
    # one position: a multiplication is two to four times as fast as N matrix products with an inner axis of length one
    if columns.shape[3] == 1 or len(rows) == 1:
        return compute(torch.mul if columns.shape[3] == 1 else torch.matmul, (*rows.shape[:4], columns.shape[2]), rows, columns.mT)
    return einsum("vngol,ngkl->vngok", rows, columns)  # a broadcast product would copy the columns V times


def _summed_products(rows: Tensor, columns: Tensor) -> Tensor:
    """Sum over positions and samples the outer products of rows and columns, by one matrix product for each group and column ``v``.

    Returns:
        ``[V, G, O, K]``.
    """
    # [G, V, O, NL] @ [G, 1, NL, K]; the samples come one after the other in a Linear layer, so that flattening makes no copy
    return (rows.permute(2, 0, 3, 1, 4).flatten(3) @ columns.permute(1, 0, 3, 2).flatten(1, 2).unsqueeze(1)).transpose(0, 1)


def is_bilinear(module: Module, rule: BaseDerivatives) -> bool:
    """Say whether a layer is linear in its weight and in its input, so that it has a second derivative only with respect to both.

    Args:
        module: The layer with its recorded input.
        rule: Its rule.

    Returns:
        Whether it is.
    """
    return isinstance(rule, AffineDerivatives) and rule.hessian_is_zero(module)
