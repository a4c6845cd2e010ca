"""Arrangements: how tensors are turned so that samples come first, as rules expect them."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from backpack.core.samples import Layout, label_tensor, patterns, plain_layout, settle

_MOST_PADDING = 4
"""How many times as long samples of unequal length may become together."""


class Arrangement(NamedTuple):
    """How a tensor is turned so that its samples come first, and back.

    Attributes:
        axis: The axis along which samples lie.
        parts: Lengths into which the axis is cut; its own length alone if it holds every sample once.
        place: Which of the parts counts samples.
    """

    axis: int
    parts: tuple[int, ...]
    place: int

    def front(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Turn the samples to the front.

        Args:
            tensor: ``[*lead axes, *shape]``.
            lead: Number of leading axes that are none of the tensor's.

        Returns:
            ``[*lead axes, N, *rest]``; positions of one sample stay where the samples were.
        """
        at = lead + self.axis
        return (tensor if len(self.parts) == 1 else tensor.unflatten(at, self.parts)).movedim(at + self.place, lead)

    def back(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Undo ``front``.

        Args:
            tensor: ``[*lead axes, N, *rest]``.
            lead: Number of leading axes that are none of the tensor's.

        Returns:
            ``[*lead axes, *shape]``.
        """
        at = lead + self.axis
        tensor = tensor.movedim(lead, at + self.place)
        return tensor if len(self.parts) == 1 else tensor.flatten(at, at + 1)


class Repeated(NamedTuple):
    """What stands for each sample alike is there once: it is repeated, so that samples come first.

    Attributes:
        samples: Their number.
    """

    samples: int

    def front(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Put the samples to the front.

        Args:
            tensor: ``[*lead axes, *shape]``.
            lead: Number of leading axes that are none of the tensor's.

        Returns:
            View ``[*lead axes, N, *shape]``.
        """
        return tensor.unsqueeze(lead).expand(*tensor.shape[:lead], self.samples, *tensor.shape[lead:])


class Ragged(NamedTuple):
    """Samples have rows of other numbers, in any order: zeros give all as many.

    They become the last of the positions of a layer, as axes further in front may be told apart: each matrix of a stack has one of its own.

    Attributes:
        samples: Their number.
        length: How many rows each gets.
        places: For each row, sample times length and number within the sample.
    """

    samples: int
    length: int
    places: tuple[int, ...]

    def front(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Give each sample an axis of rows.

        Args:
            tensor: ``[*lead axes, R, *positions, D]``.
            lead: Number of leading axes that are none of the tensor's.

        Returns:
            ``[*lead axes, N, *positions, length, D]``, with zeros.
        """
        full = tensor.new_zeros(*tensor.shape[:lead], self.samples * self.length, *tensor.shape[lead + 1 :])
        placed = full.index_copy(lead, label_tensor(self.places, tensor.device), tensor)
        return placed.unflatten(lead, (self.samples, self.length)).movedim(lead + 1, -2)


def repetitions(indices: tuple[int, ...]) -> list[int]:
    """Count how often each index occurred before.

    Args:
        indices: Sample indices.

    Returns:
        One number an index.
    """
    seen: Counter[int] = Counter()
    result = []
    for index in indices:
        result.append(seen[index])
        seen[index] += 1
    return result


@lru_cache(maxsize=64)
def ragged(layout: Layout, groups: int = 1) -> Ragged | None:
    """Find out how to give all samples as many rows, as a sum over those costs much less than a result for each row.

    Args:
        layout: To which sample each row on axis 0 belongs.
        groups: How many times as long the rows are, with zeros, if this is not possible.

    Returns:
        The arrangement; ``None`` if some have so many rows more than others that there would be little else than zeros.
    """
    length = max(Counter(layout.labels).values(), default=0)
    if layout.samples * length > _MOST_PADDING * groups * max(layout.samples, len(layout.labels)) or not length:
        return None
    places = tuple(label * length + turn for label, turn in zip(layout.labels, repetitions(layout.labels), strict=True))
    return Ragged(layout.samples, length, places)


def arrangement(layout: Layout) -> tuple[Arrangement | None, Layout]:
    """Find out how to turn the samples to the front.

    Args:
        layout: Where they lie.

    Returns:
        The arrangement, ``None`` if there is nothing to do; and the layout afterwards.
    """
    layout = settle(layout)
    axis, labels, samples = layout
    if layout.plain:
        return (Arrangement(axis, (samples,), 0), plain_layout(samples)) if axis else (None, layout)
    rows = len(labels) // samples if samples else 0
    for place, pattern in enumerate(patterns(len(labels), samples)):
        if labels == pattern:
            return Arrangement(axis, (samples, rows) if place == 0 else (rows, samples), place), plain_layout(samples)
    return (Arrangement(axis, (len(labels),), 0) if axis else None), Layout(0, labels, samples)
