"""Selection of samples along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from backpack.utils.errors import ArgumentError


def are_indices(given: Any) -> bool:
    """Say whether something is a sequence of integers, those of numpy included, and no text.

    Args:
        given: Anything.

    Returns:
        Whether it is.
    """
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        return False
    return all(isinstance(index, Integral) and not isinstance(index, bool) for index in given)


def subsample(tensor: Tensor, dim: int = 0, subsampling: Sequence[int] | slice | None = None) -> Tensor:
    """Select entries along one axis, in the given order.

    Args:
        tensor: Any tensor with an axis ``dim``.
        dim: The axis to select along, counted from the end if negative.
        subsampling: Indices along ``dim``. They may repeat and count from the end if negative. ``None`` selects everything, a slice a part.

    Returns:
        ``tensor`` itself (not a copy) if ``subsampling`` is ``None``, a view if it is a slice, else a copy with ``len(subsampling)`` entries
        along ``dim``.

    Raises:
        ArgumentError: If the tensor has no such axis, or the indices are no integers.
    """
    if subsampling is None:
        return tensor
    if not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(f"A tensor of shape {list(tensor.shape)} has no axis {dim} of which entries could be selected.")
    index = subsampling
    if not isinstance(index, slice):
        index = None if isinstance(subsampling, (str, bytes)) else torch.as_tensor(subsampling, device=tensor.device)
        if index is None or (index.numel() and (index.is_floating_point() or index.is_complex())):
            raise ArgumentError(f"subsampling must be a list of integers, got {subsampling!r}.")
        index = index.long()
    return tensor[(slice(None),) * (dim % tensor.dim()) + (index,)]
