"""Selection of samples along one axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def subsample(tensor: Tensor, dim: int = 0, subsampling: Sequence[int] | slice | None = None) -> Tensor:
    """Select entries along one axis, in the given order.

    Args:
        tensor: Any tensor with an axis ``dim``.
        dim: The axis to select along, counted from the end if negative.
        subsampling: Indices along ``dim``. They may repeat and count from the end if negative. ``None`` selects everything, a slice a part.

    Returns:
        ``tensor`` itself (not a copy) if ``subsampling`` is ``None``, a view if it is a slice, else a copy with ``len(subsampling)`` entries
        along ``dim``.
    """
    if subsampling is None:
        return tensor
    index = subsampling if isinstance(subsampling, slice) else torch.as_tensor(subsampling, dtype=torch.long, device=tensor.device)
    return tensor[(slice(None),) * (dim % tensor.dim()) + (index,)]
