"""Arrangements: how tensors are turned so that samples come first, as rules expect them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from backpack.core.samples import Layout, label_tensor, patterns, plain_layout, settle

_MOST_PADDING = 4
"""How many times as long samples of unequal length may become together."""
_SHORT = 32
"""Rows of a sample up to which all may get as many.

Measured for layers of 128 x 128 and 256 x 256 and 256 samples, of which one has several rows and the others one each, in gradients, as long as that
one, and in pieces: 16 rows 7 to 23 and 15 to 118, 32 rows 10 to 20 and 16 to 94, 64 rows 31 to 52 and 20 to 113.
"""


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
    """Samples have rows of other numbers, in any order: zeros give all as many, or all pieces into which the long ones are cut.

    They become the last of the positions of a layer, as axes further in front may be told apart: each matrix of a stack has one of its own.

    Attributes:
        length: How many rows each gets.
        places: For each row, number of the piece times length, and number within the piece.
        layout: Says to which sample each piece belongs.
    """

    length: int
    places: tuple[int, ...]
    layout: Layout

    def front(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Give each sample an axis of rows.

        Args:
            tensor: ``[*lead axes, R, *positions, D]``.
            lead: Number of leading axes that are none of the tensor's.

        Returns:
            ``[*lead axes, pieces, *positions, length, D]``, with zeros.
        """
        pieces = len(self.layout.labels)
        full = tensor.new_zeros(*tensor.shape[:lead], pieces * self.length, *tensor.shape[lead + 1 :])
        placed = full.index_copy(lead, label_tensor(self.places, tensor.device), tensor)
        return placed.unflatten(lead, (pieces, self.length)).movedim(lead + 1, -2)


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
        The arrangement, of samples, or of pieces of them if some have so many rows more than others that there would be little else than zeros;
        ``None`` if there are no rows, or no samples.
    """
    counts, (_, labels, samples) = Counter(layout.labels), layout
    if not (counts and samples):
        return None
    length = max(counts.values())
    if samples * length <= _MOST_PADDING * groups * len(labels) or (groups == 1 and length <= _SHORT):
        owners: Sequence[int] = range(samples)
    else:  # pieces
        length = min(length, -(-2 * len(labels) // len(counts)))
        owners = [label for label, count in counts.items() for _ in range(0, count, length)]
    firsts = {label: place for place, label in reversed([*enumerate(owners)])}
    places = tuple(firsts[label] * length + turn for label, turn in zip(labels, repetitions(labels), strict=True))
    return Ragged(length, places, Layout(0, tuple(owners), samples))


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
