"""Columns: matrices whose columns have the shape of a mini-batch."""

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
