"""Columns: matrices whose columns have the shape of a mini-batch; and blocks, into which columns or samples are cut."""

from __future__ import annotations

import torch
from torch import Size, Tensor


def unit_columns(shape: Size, like: Tensor) -> Tensor:
    """Return the unit vectors of the entries of a sample, the same for all samples.

    Args:
        shape: Of the mini-batch, ``[[N, *]]`` with ``D`` entries a sample.
        like: Has type and device.

    Returns:
        ``[[D, N, *]]``, a view that is not to be written to.
    """
    size = shape[1:].numel()
    return torch.eye(size, dtype=like.dtype, device=like.device).reshape(size, 1, *shape[1:]).expand(size, *shape)


def blocks(length: int, elements: int, limit: int) -> list[slice]:
    """Cut an axis into blocks, of at least one entry each.

    Args:
        length: Length of the axis.
        elements: Elements that each of its entries brings.
        limit: Elements of a block.

    Returns:
        The blocks.
    """
    step = max(1, limit // max(1, elements))
    return [slice(start, min(length, start + step)) for start in range(0, length, step)]
