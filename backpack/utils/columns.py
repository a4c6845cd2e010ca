"""Columns: matrices whose columns have the shape of a mini-batch; and blocks, into which columns or samples are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Protocol, runtime_checkable

import torch
from torch import Size, Tensor, einsum

from backpack.utils.moment import second_moment
from backpack.utils.precision import largest, wide

_PIECE = 2**20
"""Entries of columns that are mixed at a time."""
_TINY = 1e-15
"""Factors beyond which columns are mixed in double precision."""


class ScatteredColumns:
    """Columns of which each has entries in a single block of a sample, formed where they are needed: all of them are mostly zeros.

    They are indexed like a tensor ``[T * E, *]``, by slices: column ``t * E + e`` is the ``e``-th one of the ``t``-th block of each sample.

    Attributes:
        size: Entries of a block. If each has a single one, the columns are the root of a diagonal matrix.
        entries: Entries of all blocks.
    """

    def __init__(
        self, values: Tensor | Entries, signs: Tensor, turns: Tensor, most: int, arrange: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> None:
        """Take note of what they are made of.

        Args:
            values: The ``E`` columns of each of the ``B`` blocks of all samples, ``[B, E, M]``.
            signs: Whether they count positive or negative, ``[B, E]``.
            turns: Which block of its sample each is, ``[B]``.
            most: Blocks of the sample that has most, ``T``.
            arrange: Maps ``[V, B, M]`` to ``[V, *]``.
            dtype: Type of the columns.
        """
        self._values, self._signs, self._turns, self._most, self._arrange, self._dtype = values, signs, turns, most, arrange, dtype
        count, _, self.size = values.shape
        self.entries = count * self.size

    def __len__(self) -> int:
        return self._most * self._values.shape[1]

    def __getitem__(self, part: slice) -> Tensor:
        (start, stop, _), (count, size, entries) = part.indices(len(self)), self._values.shape
        places = (self._turns.unsqueeze(1) * size - start) + torch.arange(size, device=self._turns.device)
        block, number = ((places >= 0) & (places < stop - start)).nonzero(as_tuple=True)
        values = self._values[block, number]
        full = values.new_zeros(stop - start, count, entries)
        full[places[block, number], block] = values
        return self._arrange(full.to(self._dtype))

    def squares(self) -> Tensor | None:
        """Sum the signed squares of the columns: the diagonal of the matrix of which they are the root.

        Returns:
            ``[*]``; ``None`` if all columns would have to be formed for it.
        """
        if isinstance(self._values, Tensor):
            sums = einsum("bem,be->bm", wide(self._values).square(), wide(self._signs))
        elif isinstance(self._values, SummedEntries):
            sums = self._values.squares(wide(self._signs))
        else:
            return None
        return self._arrange(sums.unsqueeze(0))[0]

    def moment(self) -> Tensor:
        """Sum the outer products of the columns with themselves, for columns of which ``squares`` are known.

        Returns:
            ``[M, M]``, over all blocks.
        """
        return second_moment(wide(self._values).flatten(0, 1).unsqueeze(0))[0] if isinstance(self._values, Tensor) else self._values.moment()

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Say of each entry in which block it is, and where in there, so that one can see where it has gone.

        Returns:
            Numbers ``[1, *]``, in double precision, that can be sent the way of columns; they share memory, as far as that goes.
        """
        shape, like = (1, self.entries // max(1, self.size), self.size), {"dtype": torch.float64, "device": self._turns.device}
        block, place = torch.arange(shape[1], **like).unsqueeze(1), torch.arange(shape[2], **like)
        return self._arrange(block.expand(shape)), self._arrange(place.expand(shape))

    def times(self, matrix: Tensor, back: Callable[[Tensor], Tensor], shape: Size) -> ScatteredColumns | None:
        """Multiply columns that have a single entry each by a matrix, along the last axis: they become multiples of its rows.

        Args:
            matrix: ``[O, I]``.
            back: Maps ``[V, *]`` to ``[V, *, O]``, by reshaping and permuting.
            shape: Of the products, ``[*, I]``.

        Returns:
            The products; ``None`` if the columns are in another order than that of the entries, for which there is no block for each row.
        """
        size = len(matrix)
        parts = (part.reshape(1, -1, 1) for part in (self._values, self._signs, self._turns))
        scales, signs, turns = (back(self._arrange(part)).reshape(-1, size) for part in parts)
        first = turns[:, 0] // size
        if not torch.equal(turns, first.unsqueeze(1) * size + torch.arange(size, device=turns.device)):
            return None
        rows = _Multiples(scales, matrix)
        return ScatteredColumns(rows, signs, first, self._most // size, lambda full: full.reshape(len(full), *shape), self._dtype)


class _Multiples:
    """Columns ``s_i w_i`` of blocks, formed where they are needed, ``[B, O, I]``."""

    def __init__(self, scales: Tensor, rows: Tensor) -> None:
        """Take note of what they are made of.

        Args:
            scales: ``s [B, O]``.
            rows: ``w [O, I]``.
        """
        self._scales, self._rows, self.shape = scales, rows, Size([*scales.shape, rows.shape[1]])

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor:
        return self._rows[at[1]] * self._scales[at].unsqueeze(1)


class Entries(Protocol):
    """What is read like a tensor ``[B, E, M]``: ``entries[b, e]`` is ``[K, M]`` for ``K`` pairs of indices."""

    shape: Size

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor: ...


@runtime_checkable
class SummedEntries(Entries, Protocol):
    """Entries of which sums over columns are known."""

    def squares(self, signs: Tensor) -> Tensor:
        """Sum signed squares over the columns.

        Args:
            signs: ``[B, E]``.

        Returns:
            ``[B, M]``.
        """

    def moment(self) -> Tensor:
        """Sum outer products over columns and blocks.

        Returns:
            ``[M, M]``.
        """


def unit_columns(shape: Size, like: Tensor, some: slice = slice(None)) -> Tensor:
    """Return the unit vectors of the entries of a sample, the same for all samples.

    Args:
        shape: Of the mini-batch, ``[N, *]`` with ``D`` entries a sample.
        like: Has type and device.
        some: Of which entries.

    Returns:
        ``[D, N, *]``, a view that is not to be written to.
    """
    places = torch.arange(shape[1:].numel(), device=like.device)
    units = (places[some].unsqueeze(1) == places).to(like.dtype)
    return units.reshape(len(units), 1, *shape[1:]).expand(len(units), *shape)


def norms(vectors: Tensor) -> Tensor:
    """Return the norms of vectors, also of numbers whose squares leave the range.

    Args:
        vectors: ``[*, M]``.

    Returns:
        ``[*]``.
    """
    size = vectors.abs().sum(-1) / max(1, vectors.shape[-1])
    return (vectors / size.where(size > 0, 1).unsqueeze(-1)).norm(dim=-1) * size


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


def compare_mixture(
    columns: Sequence[Tensor], found: Sequence[Tensor], plain: Callable[..., Sequence[Tensor]], proves: bool = True
) -> tuple[bool, bool]:
    """Compare what ``torch.vmap`` has made of columns with a plain call: not all of torch's batching rules are right (that of cdist's derivative).

    The function is linear, so that a mixture of all columns tells whether the result is wrong for one of them.

    Args:
        columns: Arguments ``[V, *]``, at least one column.
        found: The results ``[V, *]``.
        plain: The function, which takes one column.
        proves: Whether to find out whether that proves anything.

    Returns:
        Whether they agree; and whether that proves the rule for other columns, too, since all results differ.
    """
    count = len(columns[0])
    tops = [part.reshape(count, -1).abs().amax(1).double() for c in columns if c.numel() for part in _pieces(c)]
    sizes = torch.stack(tops).amax(0) if tops else columns[0].new_ones(count).double()
    weights = (1 + torch.arange(count, device=sizes.device) * 0.618 % 1) / sizes.where(sizes > 0, 1)  # each column counts, none like another
    if all(part.dtype == torch.float32 for part in (*columns, *found)) and bool(((weights > _TINY) & (weights < 1 / _TINY)).all()):
        weights = weights.float()

    def flat(part: Tensor) -> Tensor:
        return part.reshape(count, part.shape[1:].numel()).to(torch.promote_types(part.dtype, weights.dtype))

    def mixed(rows: Tensor) -> Tensor:
        return weights.to(rows.dtype) @ rows

    differ = False
    mixtures = (_joined([mixed(flat(part)).reshape(part.shape[1:]).to(c.dtype) for part in _pieces(c)], c[0]) for c in columns)
    for t, wanted in zip(found, plain(*mixtures), strict=True):
        if t.shape[1:] != wanted.shape:
            return False, False
        if t.numel():
            # what goes in may be coarser than what comes out, as behind spikes in single precision in a net in double precision
            eps, sums, highest, finite = max(torch.finfo(part.dtype).eps for part in (t, *columns)), [], [0.0, 0.0], True
            for part in _pieces(t):
                rows = flat(part)
                magnitudes = rows.abs()
                total = mixed(magnitudes)
                if not (all_finite := bool(total.isfinite().all())):
                    magnitudes = weights.unsqueeze(1) * magnitudes
                terms = weights * magnitudes.amax(1) if all_finite else magnitudes
                highest = [max(top, largest(values)) for top, values in zip(highest, (terms, total), strict=True)]
                finite = finite and all_finite
                sums.append(mixed(rows).reshape(part.shape[1:]))
            allowed = sqrt(eps) * highest[0] + 4 * eps * highest[1]
            rights = wanted.split([s.shape[_axis(wanted)] for s in sums], _axis(wanted)) if len(sums) > 1 else [wanted]
            pairs = zip(sums, rights, strict=True)
            if not all(torch.allclose(mixture, right.to(mixture.dtype), sqrt(eps), allowed, True) for mixture, right in pairs):
                return False, False
            differ = differ or (proves and finite and _are_different(t))
    return True, differ


def are_linear(columns: Sequence[Tensor], found: Sequence[Tensor], plain: Callable[..., Sequence[Tensor]]) -> bool:
    """Say whether a function that may be any has treated columns as a linear one would.

    Args:
        columns: Arguments ``[V, *]``, at least one column.
        found: The results ``[V, *]``.
        plain: The function, which takes one column.

    Returns:
        Whether the result for a mixture of negative columns is the negative mixture of the results, up to rounding errors: of results that
        cancel, these are as large as those of others would be.
    """

    def negative(*mixed: Tensor) -> list[Tensor]:
        return [-t for t in plain(*(-c for c in mixed))]

    if compare_mixture(columns, found, negative, False)[0]:
        return True
    others = [distinct_columns(c[:1]) * c.abs().amax() if c.numel() else c[:1] for c in columns]
    more = plain(*(other[0] for other in others))
    columns = [torch.cat([part, other]) for part, other in zip(columns, others, strict=True)]
    found = [torch.cat([part, other[None]]) for part, other in zip(found, more, strict=True)]
    return compare_mixture(columns, found, negative, False)[0]


def _pieces(columns: Tensor) -> Sequence[Tensor]:
    # whole columns would take several times their memory where they are mixed, in double precision: cut along the longest axis
    if columns.numel() <= _PIECE or columns.dim() == 1:
        return [columns]
    axis = _axis(columns[0])
    return columns.split(max(1, _PIECE * columns.shape[1 + axis] // columns.numel()), 1 + axis)


def _axis(column: Tensor) -> int:
    return column.shape.index(max(column.shape))


def _joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, _axis(like))


def distinct_columns(like: Tensor) -> Tensor:
    """Make columns that are different from each other, without drawing numbers.

    Args:
        like: Columns ``[V, *]``.

    Returns:
        Columns of the same shape and type.
    """
    return torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float64).sin().view(like.shape).to(like.dtype)


def _are_different(columns: Tensor) -> bool:
    # each from each other one: a rule that permutes or repeats columns could be right for the same ones
    flat = wide(columns.reshape(len(columns), -1))
    factors = torch.arange(flat.shape[1], device=flat.device, dtype=torch.float32).mul_(0.618).remainder_(1).add_(1)
    sums = flat @ factors.to(flat.dtype)
    return len(torch.unique(sums.real if sums.is_complex() else sums)) == len(columns)
