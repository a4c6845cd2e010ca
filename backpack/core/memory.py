"""Which entries of a mini-batch a tensor has, as far as the memory that it shares with it, or its entries, tell."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from backpack.core.samples import along

_SPREAD = 16
"""Times its entries that a tensor may be spread over memory for its entries to be looked up there."""


def owners_in(tensor: Tensor, source: Tensor, axis: int) -> Tensor | None:
    """Find out from which samples the entries of a tensor are.

    Args:
        tensor: The tensor.
        source: One that has samples.
        axis: The axis on which they lie.

    Returns:
        Their numbers, in the tensor's shape; ``None`` if it is no view of the source, or entries of the source share memory.
    """
    if not place_of(tensor) or place_of(tensor) != place_of(source):
        return None
    if source.is_complex() and not (tensor.is_complex() or source.is_conj()):
        source = torch.view_as_real(source)
    start, spans = source.storage_offset(), [(t.storage_offset(), _span(t)) for t in (source, tensor)]
    inside = spans[0][0] <= spans[1][0] and sum(spans[1]) <= sum(spans[0])
    if source.dtype != tensor.dtype or not (tensor.numel() and inside) or spans[0][1] > _SPREAD * source.numel() or _repeats(source):
        return None
    numbers = along(torch.arange(source.shape[axis], dtype=torch.int32), axis, source.dim())
    owners = torch.full((spans[0][1],), -1, dtype=torch.int32)  # of each place in memory
    theirs, mine = (owners.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in (source, tensor))
    theirs.copy_(numbers)
    return mine if (theirs == numbers).all() and (mine >= 0).all() else None


def is_sorted(tensor: Tensor, source: Tensor, axis: int) -> bool:
    """Say whether a tensor has the same samples as another one, in another order.

    Args:
        tensor: The tensor.
        source: One that has samples.
        axis: The axis on which they lie; only axis 0 is compared.

    Returns:
        Whether it has, as far as their sums tell.
    """
    if axis or tensor.shape != source.shape or tensor.dtype != source.dtype or source.layout != torch.strided or tensor.layout != torch.strided:
        return False
    mine, theirs = (t.detach().flatten(1).sum(1) if t.dim() > 1 else t.detach() for t in (tensor, source))
    return not torch.equal(mine, theirs) and torch.equal(mine.sort().values, theirs.sort().values)


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _repeats(tensor: Tensor) -> bool:
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def are_cut(tensors: Iterable[Tensor | None]) -> bool:
    """Say whether tensors are pieces of one that was cut along its first axis.

    Args:
        tensors: The tensors; ``None`` for those that nobody holds any more.

    Returns:
        Whether several share memory, and lie behind one another there.
    """
    known = sorted((place_of(tensor), tensor.storage_offset(), _span(tensor)) for tensor in tensors if place_of(tensor))
    return any(one == other and start < after >= start + span for (one, start, span), (other, after, _) in pairwise(known))


def place_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor's memory, which it shares with its views.

    Args:
        tensor: The tensor.

    Returns:
        The address; 0 if it has none, or is no array of numbers.
    """
    return 0 if tensor is None or tensor.is_nested or tensor.layout != torch.strided else tensor.untyped_storage().data_ptr()
