"""Probing: columns that are sent through an operation of which nothing is known, to see where the samples come out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from backpack.core.samples import Layout, along, label_tensor, layout_of


def probes(shape: torch.Size, layout: Layout, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Make columns that tell the samples: for each bit, random numbers at samples whose number has it, then for each bit those at the others.

    Args:
        shape: Shape of the tensor.
        layout: Where its samples lie.
        dtype: Of the columns.
        device: Of the columns.

    Yields:
        Which rows along the axis of samples have numbers, and the column ``[*shape]``.
    """
    # a generator of its own: the user's random numbers must not notice; of complex numbers, either part may be all that arrives somewhere
    generator = torch.Generator(device).manual_seed(0)
    u = (torch.rand(shape, generator=generator, device=device, dtype=torch.float32).to(dtype) + 0.5) * (1 + 0.5j if dtype.is_complex else 1)
    bits = torch.arange(max(1, (layout.samples - 1).bit_length()), device=device)
    labels = label_tensor(layout.labels, device)
    ones = (labels >> bits[:, None]) & 1
    for mask in torch.cat([ones, 1 - ones]).bool() & (labels >= 0):
        yield mask, u * along(mask, layout.axis, len(shape)).to(dtype)


def probe(shape: torch.Size, layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return columns from which ``decode`` can tell the samples.

    Args:
        shape: Shape of the tensor.
        layout: Where its samples lie.
        dtype: Of the columns.
        device: Of the columns.

    Returns:
        ``[2 * bits, *shape]``.
    """
    return torch.stack([column for _, column in probes(shape, layout, dtype, device)])


def decode(columns: Tensor, samples: int, prefer: int) -> tuple[Layout | None, bool]:
    """Read where the samples lie from probing columns that have passed an operation.

    Numbers are compared with exact zeros: a sample that is small beside others is a sample all the same.

    Args:
        columns: ``[2 * bits, *shape]``.
        samples: Number of samples.
        prefer: The axis to try first.

    Returns:
        The layout, ``None`` where samples mix; and whether every row along its axis has told its sample.
    """
    ones, zeros = columns.nan_to_num(0.0, 0.0, 0.0).ne(0).chunk(2)
    known = (ones | zeros).any(0)
    if samples > 1 and ((ones & zeros).any() or not ((ones | zeros).all(0) | ~known).all()):
        return None, True
    labels = sum(ones[b].long() << b for b in range(len(ones)))
    layout = layout_of(labels, known, samples, prefer)
    return layout, layout is not None and -1 not in layout.labels
