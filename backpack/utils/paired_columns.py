"""Square roots of matrices that couple two factors and nothing else, as pairs of columns with opposite signs, formed where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from backpack.utils.columns import norms
from backpack.utils.precision import wide

Form = Callable[[slice], tuple[Tensor, Tensor]]
"""Returns ``a`` and ``b [U, R, *]`` for some of the units ``p``."""


class PairedColumns:
    """Columns ``(a_p, b_p)`` and ``(a_p, -b_p)`` of ``sum_p (a_p b_p^T + b_p a_p^T)``, side by side; for each row of a sample there are others."""

    def __init__(self, units: int, form: Form, ratio: Tensor, turns: list[int] | None = None) -> None:
        """Take note of what they are made of.

        Args:
            units: Number of units, ``P``.
            form: Forms ``a``, of norm one, and ``b``.
            ratio: Of the sizes of the values at which columns on ``a`` and on ``b`` arrive: in these units both parts of a column are of one size.
            turns: Which row of its sample each row is ``[R]``; ``None`` if each sample has one.
        """
        self._units, self._form, self._ratio, self._turns = units, form, ratio, turns
        self._formed: dict[tuple[int, int, int], Tensor] = {}  # the other part of columns that were formed for one

    def __len__(self) -> int:
        return 2 * self._units * (1 + max(self._turns or (), default=0))

    def part(self, number: int, arrange: Callable[[Tensor], Tensor] = lambda columns: columns) -> PartOfPairs:
        """Return one part of the columns.

        Args:
            number: Which one.
            arrange: Maps ``[V, R, *]`` to ``[V, *]``.

        Returns:
            What is indexed, by slices, like a tensor ``[2 T P, *]`` for ``T`` rows of the sample that has most.
        """
        return PartOfPairs(self, number, arrange)

    def take(self, number: int, block: slice) -> Tensor:
        """Form one part of some columns; the other one is kept until it is asked for.

        Args:
            number: Which part.
            block: Which columns.

        Returns:
            ``[V, R, *]``.
        """
        start, stop, _ = block.indices(len(self))
        found = self._formed.pop((number, start, stop), None)
        if found is None:
            both = list(zip(*self._blocks(start, stop), strict=True))
            found, other = (part[0] if len(part) == 1 else torch.cat(part) for part in (both[number], both[1 - number]))
            self._formed = {(1 - number, start, stop): other}
        return found

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        each = max(1, 2 * self._units)
        for turn in range(start // each, max(start // each + 1, -(-stop // each))):
            first, last = max(start - turn * each, 0), min(stop - turn * each, each)
            one, other = _scaled(*self._form(slice(first // 2, -(-last // 2))), self._ratio)
            if self._turns is not None:
                away = torch.tensor([row != turn for row in self._turns], dtype=torch.bool, device=one.device)
                one, other = (part.masked_fill(away.reshape(-1, *[1] * (part.dim() - 2)), 0) for part in (one, other))
            part = slice(first % 2, first % 2 + last - first)
            yield tuple(torch.stack(both, 1).flatten(0, 1)[part] for both in ((one, one), (other, -other)))


class PartOfPairs:
    """One part of columns that are formed together with another."""

    def __init__(self, pairs: PairedColumns, number: int, arrange: Callable[[Tensor], Tensor]) -> None:
        self._pairs, self._number, self._arrange = pairs, number, arrange

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, block: slice) -> Tensor:
        return self._arrange(self._pairs.take(self._number, block))


def signs_of_pairs(units: int, rows: int, like: Tensor) -> Tensor:
    """Return the signs of the columns of one row of each sample.

    Args:
        units: Number of units, ``P``.
        rows: Number of rows, ``R``.
        like: Has type and device.

    Returns:
        ``[2 P, R]``.
    """
    return torch.tensor([1.0, -1.0], dtype=like.dtype, device=like.device).repeat(units).unsqueeze(1).expand(-1, rows)


def sizes_of(values: Tensor) -> Tensor:
    """Return the root mean square of the values of each sample, as the unit of its entries; one if it is zero, or not finite.

    Args:
        values: Tensor with the samples on the first axis.

    Returns:
        The sizes, ``[N]``.
    """
    return units_of(wide(values).square().reshape(len(values), values.shape[1:].numel()).mean(1))


def units_of(squares: Tensor) -> Tensor:
    """Return the roots of mean squares as units.

    Args:
        squares: Any tensor.

    Returns:
        The roots; one if they are zero, or not finite.
    """
    return torch.where((squares > 0) & squares.isfinite(), squares.sqrt(), 1.0)


def floored(sizes: Sequence[Tensor], sure: Sequence[bool]) -> list[Tensor]:
    """Take sizes that differ by more than rounding errors allow for larger than they seem to be.

    Args:
        sizes: Of values that are multiplied with each other.
        sure: Of each, whether it is what it seems to be. A mean that is zero but for rounding errors is no smaller than what it is made of.

    Returns:
        The sizes.
    """
    least = reduce(torch.maximum, sizes) * torch.finfo(sizes[0].dtype).eps ** 0.5
    return [size if is_sure else torch.maximum(size, least) for size, is_sure in zip(sizes, sure, strict=True)]


def _scaled(one: Tensor, other: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    scale = (norms(other.reshape(*other.shape[:2], other.shape[2:].numel())) * ratio).sqrt().to(other.dtype)
    factors = (scale * 0.5**0.5, torch.where(scale > 0, 1 / scale, 0.0) * 0.5**0.5)
    return tuple(part * factor.reshape(*factor.shape, *[1] * (part.dim() - 2)) for part, factor in zip((one, other), factors, strict=True))
