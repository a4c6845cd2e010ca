"""Squares of sums of scaled outer products, which are products of them in pairs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement
from math import prod

import torch
from torch import Size, Tensor

from backpack.core.derivatives.affine import LARGE
from backpack.utils.columns import blocks
from backpack.utils.moment import sum_of_squared_columns

_LEAST = 2**-6
"""Share of the squares of the summands below which the square of a sum is not taken from their products: it keeps all but two digits."""


class SumOfProducts:
    """Sum of scaled outer products ``scale * left right^T`` of columns and samples, whose squares are added without forming it."""

    def __init__(self, parts: list[tuple[Tensor, Tensor, Tensor | None]], signs: Tensor | None, shape: Size) -> None:
        """Take note of the factors.

        Args:
            parts: ``left`` ``[V, N, O]`` and ``right`` ``[V, N, K]``, one column where they are the same in all, and ``scale`` ``[O, K]``.
            signs: Signs of the columns, ``[V, N]``.
            shape: Shape of what has the entries of the matrix.
        """
        self._parts, self._signs, self._shape = parts, signs, shape

    def _products(self) -> Iterator[tuple[Tensor, Tensor, Tensor | float, bool]]:
        # of each two of them: of the left sides, of the right ones, of the scales; and whether it is a square
        for (one, (left, right, scale)), (two, (other, beside, factor)) in combinations_with_replacement(enumerate(self._parts), 2):
            scales = [each for each in (scale, factor) if each is not None]
            yield left * other, right * beside, prod(scales, start=1.0 if one == two else 2.0), one == two

    def squares(self) -> Tensor:
        """Add the squares over columns and samples, with their signs.

        Returns:
            ``[*shape]``.
        """
        found, sizes = 0.0, 0.0
        for left, right, scale, is_square in self._products():
            signed = left if self._signs is None else left * self._signs.to(left.dtype).unsqueeze(2)
            product = _matrix(signed, right) * scale
            found = found + product
            if is_square:
                sizes = sizes + (product if self._signs is None else _matrix(left, right) * scale)
        cancelled = (found.abs() < sizes * _LEAST).nonzero(as_tuple=True)
        for part in blocks(len(cancelled[0]), max(1, self._parts[0][0].shape[:2].numel()), LARGE):
            places = cancelled[0][part], cancelled[1][part]
            columns = sum(
                left[..., places[0]] * right[..., places[1]] * (1 if scale is None else scale[places]) for left, right, scale in self._parts
            )
            found[places] = sum_of_squared_columns(columns, self._signs).sum(0)
        return found.reshape(self._shape)

    def norms(self) -> Tensor:
        """Add the squares of a single column over the entries.

        Returns:
            ``[N]``.
        """
        found, sizes = 0.0, 0.0
        for left, right, scale, is_square in self._products():
            scaled = left[0] @ scale if isinstance(scale, Tensor) else scale * left[0].sum(1, keepdim=True)
            norms = (scaled * right[0]).sum(1)
            found, sizes = found + norms, sizes + norms if is_square else sizes
        cancelled = (found < sizes * _LEAST).nonzero()[:, 0]
        for part in blocks(len(cancelled), self._parts[0][0].shape[2] * self._parts[0][1].shape[2], LARGE):
            found[cancelled[part]] = torch.linalg.vector_norm(self._formed(cancelled[part]).flatten(1), dim=1).square()
        return found

    def _formed(self, samples: Tensor) -> Tensor:
        outer = (left[0, samples].unsqueeze(2) * right[0, samples].unsqueeze(1) * (1 if s is None else s) for left, right, s in self._parts)
        return sum(outer)

    def total(self) -> Tensor:
        """Add the columns, and the samples.

        Returns:
            ``[*shape]``.
        """
        return sum(_matrix(left, right) * (1 if scale is None else scale) for left, right, scale in self._parts).reshape(self._shape)


def _matrix(left: Tensor, right: Tensor) -> Tensor:
    # sum of outer products over columns and samples
    if 1 in (len(left), len(right)):
        left, right = left.sum(0), right.sum(0)
    return left.flatten(0, -2).T @ right.flatten(0, -2)
