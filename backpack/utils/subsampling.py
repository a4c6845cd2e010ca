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


def check_indices(given: Any, count: int) -> None:
    """Refuse what are no indices of samples.

    Args:
        given: Anything.
        count: Number of samples.

    Raises:
        ArgumentError: If it is no sequence of integers, or one of them is beyond the samples.
    """
    if not are_indices(given) or any(not -count <= index < count for index in given):
        raise ArgumentError(f"subsampling must be a list of indices of {count} samples, got {given!r}.")


def subsample(tensor: Tensor, dim: int = 0, subsampling: Sequence[int] | slice | None = None) -> Tensor:
    """Select entries along one axis, in the given order.

    Args:
        tensor: Any tensor with an axis ``dim``.
        dim: The axis to select along, counted from the end if negative.
        subsampling: Indices along ``dim``, also in a tensor or an array. They may repeat and count from the end if negative. ``None`` selects
            everything, a slice a part.

    Returns:
        ``tensor`` itself (not a copy) if ``subsampling`` is ``None``, a view if it is a slice, else a copy with ``len(subsampling)`` entries
        along ``dim``.

    Raises:
        ArgumentError: If the tensor has no such axis, or the indices are no integers, or beyond its end.
    """
    if subsampling is None:
        return tensor
    if not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(f"A tensor of shape {list(tensor.shape)} has no axis {dim} of which entries could be selected.")
    index = subsampling
    if not isinstance(index, slice):
        given = index.tolist() if hasattr(index, "tolist") else index
        check_indices(given, tensor.shape[dim])
        index = torch.tensor(given, dtype=torch.long, device=tensor.device)
    return tensor[(slice(None),) * (dim % tensor.dim()) + (index,)]
