"""Squares of per-sample products ``sum_l rows[v, n, :, l] x[n, :, l]^T`` without forming them where that is cheaper."""

from __future__ import annotations

import torch
from torch import Tensor, einsum

_BLOCK = 2**22
"""Entries of per-sample matrices that are formed at a time: small enough to stay in cache, large enough to keep the cores busy."""


def squared_norms(x: Tensor, rows: Tensor) -> Tensor:
    """Squared Frobenius norms of per-sample weight gradients (Goodfellow 2015; with positions, by Gram matrices, Rochette et al. 2019).

    Args:
        x: Columns of the input ``[[N, G, K, L]]``.
        rows: Gradient ``[[N, G, O, L]]``.

    Returns:
        ``[[N]]``.
    """
    positions, size = x.shape[3], x.shape[2] + rows.shape[2]
    if positions == 1:
        norms = torch.linalg.vector_norm(x, dim=(2, 3)) * torch.linalg.vector_norm(rows, dim=(2, 3))
        return norms.square_().sum(1) if norms.shape[1] > 1 else norms.square_().squeeze(1)
    if positions * size <= x.shape[2] * rows.shape[2]:
        return (x.transpose(2, 3) @ x * (rows.transpose(2, 3) @ rows)).sum((1, 2, 3))
    out = x.new_empty(x.shape[0])
    for block in _blocks(x.shape[0], x.shape[1] * x.shape[2] * rows.shape[2]):
        out[block] = (rows[block] @ x[block].transpose(2, 3)).square().sum((1, 2, 3))
    return out


def sum_of_squares(x: Tensor, rows: Tensor, signs: Tensor | None = None) -> Tensor:
    """Sum of element-wise squares over samples and columns.

    Args:
        x: Columns of the input ``[[N, G, K, L]]``.
        rows: Columns at the output ``[[V, N, G, O, L]]``.
        signs: Factor of each column and sample ``[[V, N]]``; ``None`` for one.

    Returns:
        ``[[G, O, K]]``.
    """
    if x.shape[3] == 1:
        weights, squares = _weighted_squares(rows, signs), x.squeeze(3).square()
        return torch.bmm(weights.movedim(0, 2), squares.transpose(0, 1))
    out = x.new_zeros(x.shape[1], rows.shape[3], x.shape[2])
    for block in _blocks(x.shape[0], out.numel() * rows.shape[0]):
        product = einsum("vngol,ngkl->vngok", rows[:, block], x[block]).square()
        out += product.sum((0, 1)) if signs is None else einsum("vngok,vn->gok", product, signs[:, block])
    return out


def squares_per_sample(x: Tensor, rows: Tensor, signs: Tensor | None = None) -> Tensor:
    """Sum of element-wise squares over columns, for each sample.

    Args:
        x: Columns of the input ``[[N, G, K, L]]``.
        rows: Columns at the output ``[[V, N, G, O, L]]``.
        signs: Factor of each column and sample ``[[V, N]]``; ``None`` for one.

    Returns:
        ``[[N, G, O, K]]``.
    """
    if x.shape[3] == 1:
        return _weighted_squares(rows, signs).unsqueeze(3) * x.squeeze(3).square().unsqueeze(2)
    out = x.new_empty(x.shape[0], x.shape[1], rows.shape[3], x.shape[2])
    for block in _blocks(x.shape[0], out[0].numel() * rows.shape[0]):
        product = einsum("vngol,ngkl->vngok", rows[:, block], x[block]).square()
        out[block] = product.sum(0) if signs is None else einsum("vngok,vn->ngok", product, signs[:, block])
    return out


def _weighted_squares(rows: Tensor, signs: Tensor | None) -> Tensor:
    squares = rows.squeeze(4).square()
    if signs is not None:
        squares = squares * signs[:, :, None, None]
    return squares[0] if len(squares) == 1 else squares.sum(0)


def _blocks(samples: int, elements: int) -> list[slice]:
    step = max(1, _BLOCK // max(1, elements))
    return [slice(start, min(samples, start + step)) for start in range(0, samples, step)]


def second_moment(x: Tensor) -> Tensor:
    """Second moment of the columns of an input, group by group.

    Args:
        x: ``[[N, G, K, L]]``.

    Returns:
        ``[[G, K, K]]``: sum over samples and positions, divided by ``N``.
    """
    flat = x.movedim(1, 0).transpose(2, 3).flatten(1, 2)
    return torch.bmm(flat.transpose(1, 2), flat) / max(1, x.shape[0])
