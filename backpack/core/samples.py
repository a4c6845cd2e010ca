"""Following the samples: to which sample of the mini-batch do the entries of an inner tensor belong?

A ``Layout`` says it for one tensor: entries with index ``i`` along ``axis`` belong to sample ``labels[i]``. Layouts are carried backward over
a graph node by sending known columns through it and looking where they arrive; the result depends on the structure only, for most operations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from backpack.utils.precision import wide


class Layout(NamedTuple):
    """Entries with index ``i`` along ``axis`` belong to sample ``labels[i]``.

    Attributes:
        axis: The axis along which samples lie.
        labels: A sample number for each index of the axis; -1 where columns are zero, so that it is not known, and does not matter. A tensor without
            axes has a single one.
        samples: Number of samples in the mini-batch.
    """

    axis: int
    labels: tuple[int, ...]
    samples: int

    @property
    def plain(self) -> bool:
        """Whether sample ``i`` lies at index ``i``."""
        usual = _identity(self.samples)
        return self.labels is usual or self.labels == usual

    @property
    def of_one(self) -> bool:
        """Whether all entries of which the sample is known belong to the same."""
        return len({*self.labels} - {-1}) <= 1


@lru_cache(maxsize=256)
def _identity(samples: int) -> tuple[int, ...]:
    return tuple(range(samples))


@lru_cache(maxsize=256)
def plain_layout(samples: int, axis: int = 0) -> Layout:
    """Return the layout of a tensor in which sample ``i`` lies at index ``i`` of an axis.

    Args:
        samples: Number of samples.
        axis: The axis.

    Returns:
        The layout.
    """
    return Layout(axis, _identity(samples), samples)


@lru_cache(maxsize=256)
def label_tensor(labels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return labels as a tensor.

    Args:
        labels: Sample numbers.
        device: Where to put them.

    Returns:
        Integer tensor ``[len(labels)]``.
    """
    return torch.tensor(labels, dtype=torch.int64, device=device)


def along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """Give a vector enough axes to broadcast along one axis of a tensor.

    Args:
        values: ``[..., R]``.
        axis: The axis of length ``R``.
        ndim: Number of axes of the tensor.

    Returns:
        ``[..., 1, R, 1]`` with ``ndim`` axes after the leading ones.
    """
    return values.reshape([*values.shape[:-1], *(values.shape[-1] if i == axis else 1 for i in range(ndim))])


def rows_of_one(layout: Layout | None, shape: torch.Size) -> Layout | None:
    """Let the only sample of a mini-batch have all rows on axis 0, as it may have an axis of length one elsewhere.

    Args:
        layout: Where the samples lie; ``None`` if that is not known.
        shape: Shape of the tensor.

    Returns:
        The layout; as it is if there are several samples.
    """
    return layout if layout is None or layout.samples != 1 or not shape else Layout(0, (0,) * shape[0], 1)


def shape_of_one(shape: torch.Size, layout: Layout | None) -> torch.Size:
    """Return the shape of the part of a tensor that one sample has.

    Args:
        shape: Shape of the tensor.
        layout: Where the samples lie, with as many rows each; ``None`` if all use the same tensor.

    Returns:
        The shape.
    """
    whole = layout is None or (layout.of_one and layout.samples > 0)
    return shape if whole else torch.Size(n // max(layout.samples, 1) if i == layout.axis else n for i, n in enumerate(shape))


def layout_of(labels: Tensor, known: Tensor, samples: int, prefer: int) -> Layout | None:
    """Find the axis along which the samples lie.

    Args:
        labels: Sample number of each entry.
        known: Which entries have one.
        samples: Number of samples.
        prefer: The axis to try first.

    Returns:
        The layout, with label -1 for rows of which nothing is known; ``None`` if there is no such axis.
    """
    shape = labels.shape
    axes = sorted(range(len(shape)), key=lambda axis: (axis != prefer, axis))
    if samples == 0:
        axis = next((axis for axis in axes if shape[axis] == 0), None)
        return None if axis is None else Layout(axis, (), 0)
    if 0 in shape:  # nothing to be seen: an expert to which no token is sent, or half of a single feature
        return Layout(axes[0], (-1,) * shape[axes[0]], samples)
    if not shape:
        return Layout(0, (int(labels) if known else -1,), samples)
    if samples == 1:
        # any axis will do; one that is certainly not that of features is the better choice
        axis = next((axis for axis in axes if shape[axis] == 1 and (axis < len(shape) - 1 or len(shape) == 1)), 0)
        return Layout(axis, (0,) * shape[axis], 1)
    if len(shape) > 1 and axes[0] == len(shape) - 1 and known.all() and (labels == labels.flatten()[0]).all():
        return Layout(0, (int(labels.flatten()[0]),) * shape[0], samples)  # all is of one sample: any axis will do but that of features
    found: Layout | None = None
    for axis in axes:
        rows, seen = (t.movedim(axis, 0).reshape(shape[axis], -1) for t in (labels, known))
        low = torch.where(seen, rows, samples).amin(1)
        high = torch.where(seen, rows, -1).amax(1)
        alive = high >= 0
        if (low[alive] == high[alive]).all():
            layout = Layout(axis, tuple(high.tolist()), samples)
            alone = low.amin() == high.amax()  # rows of a single sample, of which some features were cut out, say
            usual = alone and (axis < len(shape) - 1 or shape[axis] == samples) and settle(layout).labels in patterns(shape[axis], samples)
            likely = not alone or axis == prefer or alive.sum() == 1 or usual
            if likely and (seen.all(1) == alive).all():  # nothing has to be guessed along this axis
                return layout
            if found is None or (settle(layout).plain and not settle(found).plain):
                found = layout
    return found


def filled(tensor: Tensor, layout: Layout) -> Tensor:
    """Say which rows along the axis of samples have an entry that is not zero.

    Args:
        tensor: The tensor, not without entries.
        layout: Where the samples lie there.

    Returns:
        Boolean tensor, of as many entries as there are labels.
    """
    rows = tensor.movedim(layout.axis, 0).reshape(len(layout.labels), -1)
    return rows.abs().amax(1) != 0  # several times as fast as a comparison of all entries


def rows_along(axis: int, rows: int, layout: Layout) -> Layout | None:
    """Say to which samples the rows along an axis belong.

    Args:
        axis: The axis.
        rows: Its length.
        layout: Where the samples lie; where all belongs to one of them, any axis may have been taken.

    Returns:
        The layout of the rows, on axis 0; ``None`` if the samples lie elsewhere.
    """
    if layout.axis == axis and len(layout.labels) == rows:
        return layout._replace(axis=0)
    return Layout(0, (max(layout.labels, default=-1),) * rows, layout.samples) if layout.of_one else None


def settle(layout: Layout) -> Layout:
    """Give rows whose sample is not known, because nothing arrives there, to the sample that a usual pattern suggests, for rules that need some.

    Args:
        layout: Where the samples lie; the label of such a row is -1.

    Returns:
        Layout without such labels.
    """
    axis, labels, samples = layout
    if -1 not in labels:
        return layout
    for pattern in patterns(len(labels), samples):
        if all(label in (-1, guess) for label, guess in zip(labels, pattern, strict=True)):
            return Layout(axis, pattern, samples)
    return Layout(axis, tuple(max(label, 0) for label in labels), samples)


def unite(one: Layout, other: Layout) -> Layout | None:
    """Put together what two consumers of a tensor know of its samples.

    Args:
        one: What one knows.
        other: What the other one knows.

    Returns:
        What both know; ``None`` if they contradict each other.
    """
    one, other = (one, other) if max(one.labels, default=-1) >= 0 else (other, one)
    if one == other or one.samples == other.samples == 1 or max(other.labels, default=-1) < 0:
        return one
    if one.axis != other.axis and one._replace(labels=one.labels + other.labels).of_one:
        return Layout(one.axis, (max(one.labels + other.labels, default=-1),) * len(one.labels), one.samples)
    if (one.axis, one.samples) != (other.axis, other.samples):
        return None
    if any(a != b and -1 not in (a, b) for a, b in set(zip(one.labels, other.labels, strict=True))):  # of many rows there are few pairs
        return None
    return Layout(one.axis, tuple(map(max, one.labels, other.labels)), one.samples)


@lru_cache(maxsize=64)
def patterns(length: int, samples: int) -> tuple[tuple[int, ...], ...]:
    """Return the usual ways in which samples lie along an axis.

    Args:
        length: Length of the axis.
        samples: Number of samples.

    Returns:
        One sample a row; consecutive rows a sample; samples in turn.
    """
    if length == samples:
        return (_identity(samples),)
    if samples == 0 or length % samples or length == 0:
        return ()
    rows = length // samples
    return tuple(i // rows for i in range(length)), tuple(i % samples for i in range(length))


def split(columns: Tensor, layout: Layout, block: slice = slice(None)) -> Tensor:
    """Give every sample columns of its own, which are zero at the entries of all others.

    Args:
        columns: ``[V, *shape]``.
        layout: Where the samples lie in ``shape``.
        block: Which samples.

    Returns:
        ``[V, len(block), *shape]``.
    """
    start, stop, _ = block.indices(layout.samples)
    found = columns.new_zeros(len(columns), stop - start, *columns.shape[1:])  # no multiples by zero: of what is no number, these are none
    if len({*layout.labels}) == 1:
        if start <= layout.labels[0] < stop:
            found[:, layout.labels[0] - start] = columns
        return found
    labels, given = label_tensor(layout.labels, columns.device), columns.movedim(1 + layout.axis, 1)
    rows = places = labels
    if stop - start < layout.samples or not layout.plain:
        rows = ((labels >= start) & (labels < stop)).nonzero()[:, 0]
        places, given = labels[rows] - start, given[:, rows]
    found.movedim(2 + layout.axis, 2)[:, places, rows] = given
    return found


@lru_cache(maxsize=256)
def seen_through_reshape(layout: Layout, old: torch.Size, new: torch.Size) -> Layout | None:
    """Return the layout of a tensor after a reshape: axes that are not split or merged with that of the samples do not matter.

    Args:
        layout: Where the samples lie before.
        old: Shape before.
        new: Shape after.

    Returns:
        The layout after; ``None`` if no axis holds the samples any more.
    """
    axis, device = layout.axis, torch.device("cpu")
    begin, end, there, there_end = 0, len(old), 0, len(new)
    if not layout.of_one and old.numel():
        end = there_end = 0
        while end <= axis:
            begin, there = end, there_end
            size, other, end, there_end = old[begin], new[there], begin + 1, there + 1
            while size != other:
                if size < other:
                    size, end = size * old[end], end + 1
                else:
                    other, there_end = other * new[there_end], there_end + 1
        if end - begin == 1 == there_end - there:
            return layout._replace(axis=there)
    labels = along(label_tensor(layout.labels, device), axis - begin, end - begin).expand(old[begin:end]).reshape(new[there:there_end])
    found = layout_of(labels, labels >= 0, layout.samples, axis - there)
    return None if found is None else found._replace(axis=there + found.axis)


def sum_to(tensor: Tensor, shape: torch.Size, lead: int) -> Tensor:
    """Sum over the axes along which a tensor of the given shape was broadcast.

    Args:
        tensor: ``[*lead axes, *full]``.
        shape: The shape before broadcasting.
        lead: Number of leading axes that are not part of the broadcast.

    Returns:
        ``[*lead axes, *shape]``.
    """
    if tensor.shape[lead:] == shape:
        return tensor
    extra = max(tensor.dim() - lead - len(shape), 0)
    axes = [*range(lead, lead + extra), *(lead + extra + i for i, n in enumerate(shape) if n == 1 and tensor.shape[lead + extra + i] != 1)]
    return (tensor.sum(axes) if axes else tensor).reshape(*tensor.shape[:lead], *shape)


def after_sum(layout: Layout, full: torch.Size, shape: torch.Size) -> Layout | None:
    """Say where the samples lie after the gradient of a broadcast tensor is summed to the tensor's shape.

    Args:
        layout: Where the samples lie in the broadcast shape.
        full: The broadcast shape.
        shape: The shape before broadcasting.

    Returns:
        The layout; with the one sample for all rows where some of the same sample are summed; ``None`` if the sum would run over several samples.
    """
    axis = layout.axis - (len(full) - len(shape))
    if full == shape or (shape and axis >= 0 and shape[axis] == full[layout.axis]):
        return layout if axis == layout.axis else Layout(axis, layout.labels, layout.samples)
    return Layout(0, (max(layout.labels, default=-1),) * (shape[0] if shape else 1), layout.samples) if layout.of_one and layout.samples else None


def add_rows(columns: Tensor, layout: Layout) -> Tensor:
    """Add the rows that belong to the same sample.

    Args:
        columns: ``[V, R, *rest]``.
        layout: Whose labels say to which sample each of the ``R`` rows belongs.

    Returns:
        ``[V, N, *rest]``.
    """
    if layout.plain:
        return columns
    layout = settle(layout)
    terms = wide(columns)  # in half precision, sums of many would stop growing
    out = terms.new_zeros(columns.shape[0], layout.samples, *columns.shape[2:])
    return out.index_add_(1, label_tensor(layout.labels, columns.device), terms).to(columns.dtype)
