"""Second moments: the symmetric product of a matrix with itself, and sums of squares."""

from __future__ import annotations

from torch import Tensor

from backpack.utils.pages import empty
from backpack.utils.precision import wide

_BLOCK = 128
"""Columns of a block.

Measured on one thread of a CPU: with 1280 x 512 to 16384 x 288 entries blocks take 0.7 to 0.8 of the time of the whole product, 256 columns 0.75 to
0.95; with 128 x 784 and 256 x 784 entries 0.9 and 0.75, a quarter of the columns 0.85 and 0.75; with 64 rows and with 128 x 512 they lose.
"""
_ROWS = 128
_ENTRIES = 2**16
"""Rows from which on blocks are worth their copies, and entries of which there must be more, for blocks to be worth their calls."""
_EACH = 2**14
"""Entries of a column from which on each is squared and added by itself, in one pass over it instead of three.

Measured on one thread of a CPU: the same time with 10 columns, 0.5 of it with 100 columns; with 2^16 entries 0.5 and 0.2; with 2^12 entries 1.5 to 2.
"""


def second_moment(rows: Tensor, scale: float = 1.0) -> Tensor:
    """Sum the outer products of rows with themselves: blocks on and above the diagonal are computed, those below are copies.

    Args:
        rows: ``[G, R, K]``.
        scale: Factor.

    Returns:
        ``[G, K, K]``, ``scale rows^T rows``.
    """
    groups, count, size = rows.shape
    if size <= _BLOCK or count < _ROWS or count * size <= _ENTRIES or rows.device.type != "cpu":  # elsewhere a launch costs more than a block
        if groups == 1:
            only = rows.squeeze(0)
            return empty((size, size), rows).addmm_(only.t(), only, beta=0, alpha=scale).unsqueeze(0)
        return empty((groups, size, size), rows).baddbmm_(rows.mT, rows, beta=0, alpha=scale)
    result = empty((groups, size, size), rows)
    for group in range(groups):
        given, total = rows[group], result[group]
        for start in range(0, size, _BLOCK):
            end = start + _BLOCK
            product = total[start:end, start:].addmm_(given[:, start:end].t(), given[:, start:], beta=0, alpha=scale)
            total[end:, start:end] = product[:, _BLOCK:].t()
    return result


def sum_of_squared_columns(mat: Tensor, signs: Tensor | None = None) -> Tensor:
    """Sum the squares of columns.

    Args:
        mat: ``[V, N, *]``.
        signs: Factor of each column and sample ``[V, N]``; ``None`` for one.

    Returns:
        ``[N, *]``.
    """
    mat = wide(mat)
    factors = None if signs is None else signs.to(mat.dtype).reshape(*signs.shape, *[1] * (mat.dim() - 2))
    if not len(mat) or mat.numel() < _EACH * len(mat):
        squares = mat.square() if factors is None else mat.square() * factors
        return squares[0] if len(squares) == 1 else squares.sum(0)
    total = mat[0].square() if factors is None else mat[0].square() * factors[0]
    for number, column in enumerate(mat[1:], 1):
        # a fused sum does not round products: columns of opposite signs that are the same would not cancel
        total = total.addcmul_(column, column) if factors is None else total.add_(column.square() * factors[number])
    return total
