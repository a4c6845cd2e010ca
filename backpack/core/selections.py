"""Entries that nodes select by their numbers along some axes, alike for each entry along the others: to which samples they belong."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.derivatives.embedding import add_at
from backpack.core.graph import operation, saved, shape_of, tensor_at
from backpack.core.samples import Layout, along, label_tensor, layout_of, settle

SELECTS = frozenset({"Index", "IndexSelect", "Gather", "Slice", "PackPaddedSequence"})
"""Operations that select entries."""


class Selection(NamedTuple):
    """What a node selects.

    Attributes:
        axis: First one of the axes along which entries are numbered, of the input and of the output.
        sizes: Shape of the input along these axes.
        places: For each of them, where along it the entries of the output come from, which may be numbered along more axes, or fewer.
    """

    axis: int
    sizes: torch.Size
    places: tuple[Tensor, ...]

    @property
    def made(self) -> torch.Size:
        """Shape of the output along the axes that stand for those of the input."""
        return self.places[0].shape

    def numbers(self, axis: int) -> bool:
        """Say whether entries are numbered along an axis of the output.

        Args:
            axis: The axis.

        Returns:
            Whether they are.
        """
        return self.axis <= axis < self.axis + len(self.made)

    def before(self, layout: Layout) -> list[Layout]:
        """Say where the samples lie in the input.

        Args:
            layout: Where they lie in the output: those of several samples, or rows along a single axis.

        Returns:
            The layout, with label -1 for rows of which nothing was selected; then others, if it may be along several axes; none if they mix.
        """
        own = layout.axis - self.axis
        if not 0 <= own < len(self.made):
            return [layout._replace(axis=layout.axis + (len(self.sizes) - len(self.made) if own >= 0 else 0))]
        labels = along(label_tensor(layout.labels, self.places[0].device), own, len(self.made)).expand(self.made)
        known = labels >= 0
        labels, places, found = labels[known], [numbers[known] for numbers in self.places], []
        for axis in sorted(range(len(places)), key=lambda axis: (axis != own, axis)):
            rows = labels.new_full((self.sizes[axis],), -1)
            rows[places[axis]] = labels
            if torch.equal(rows[places[axis]], labels):
                found.append(Layout(self.axis + axis, tuple(rows.tolist()), layout.samples))
        if len(found) < 2:  # noqa: PLR2004
            return found
        entries = torch.stack(places).unique(dim=1).shape[1]

        def doubts(layout: Layout) -> tuple[bool, bool]:  # first an axis along which nothing has to be guessed, as ``layout_of`` does
            rows = sum(label >= 0 for label in layout.labels)
            return rows * self.sizes.numel() != entries * len(layout.labels), not settle(layout).plain

        return sorted(found, key=doubts)

    def added(self, columns: Tensor, layout: Layout) -> Tensor:
        """Add columns where their entries were selected, for each sample by itself.

        Args:
            columns: ``[V, *output]``.
            layout: Where the samples lie in the output, along one of the axes by which entries are numbered.

        Returns:
            ``[V, N, entries of the input]``.
        """
        device, lead = columns.device, prod(columns.shape[1 : 1 + self.axis])
        labels = along(label_tensor(layout.labels, device), layout.axis - self.axis, len(self.made)).expand(self.made).flatten()
        numbers = sum(place.flatten() * prod(self.sizes[axis + 1 :]) for axis, place in enumerate(self.places))
        rows = columns.reshape(len(columns), lead, len(labels), prod(columns.shape[1 + self.axis + len(self.made) :])).transpose(1, 2)
        size, known = self.sizes.numel(), labels >= 0
        added = add_at(rows.flatten(2)[:, known], (labels * size + numbers)[known], layout.samples * size)
        return added.reshape(len(columns), layout.samples, size, lead, rows.shape[3]).transpose(2, 3).flatten(2)

    def behind(self, layout: Layout) -> Layout | None:
        """Say where the samples lie in the output.

        Args:
            layout: Where they lie in the input.

        Returns:
            The layout; ``None`` if they are on no axis.
        """
        own = layout.axis - self.axis
        if not 0 <= own < len(self.sizes):
            return layout._replace(axis=layout.axis + (len(self.made) - len(self.sizes) if own >= 0 else 0))
        labels = label_tensor(layout.labels, self.places[0].device)[self.places[own]]
        found = layout_of(labels, labels >= 0, layout.samples, own)
        return None if found is None else found._replace(axis=self.axis + found.axis)


def selection(node: Node) -> Selection | None:
    """Read what a node selects, or where it puts something.

    Args:
        node: The node, of one of these operations, or ``IndexPut``.

    Returns:
        The entries; ``None`` if other ones are selected for each entry along other axes.
    """
    name = operation(node)
    shape = shape_of((node, 0) if name == "IndexPut" else node.next_functions[0])
    if name == "PackPaddedSequence":
        running = saved(node, "result1")  # how many sequences there are at each step
        places = (torch.arange(running[0]) < running[:, None]).nonzero(as_tuple=True)
        return Selection(0, shape[:2], places[::-1] if saved(node, "batch_first") else places)
    if name not in ("Index", "IndexPut"):
        full, (dim, rows) = list(shape_of((node, 0))), numbered_rows(node) or (0, None)
        if rows is None or not shape or full[:dim] + full[dim:][1:] != list(shape[:dim] + shape[dim:][1:]):  # for some entries along other axes alone
            return None
        return Selection(dim % len(shape), shape[dim:][:1], (rows,))
    given = saved(node, "indices")
    chosen = [place for place, index in enumerate(given) if index is not None]
    first, last = chosen[0], chosen[-1]
    if len(chosen) <= last - first:  # an axis stays between them: what is selected is in front of all axes
        first = 0
    used = tuple(slice(None) if index is None else index.bool() if index.dtype.itemsize == 1 else index for index in given[first : last + 1])
    axes = sum(index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1 for index in used)
    sizes, device = shape[first : first + axes], tensor_at((node, 0)).device
    numbers = (along(torch.arange(size, device=device), axis, axes).expand(sizes) for axis, size in enumerate(sizes))
    return Selection(first, sizes, tuple(places[used] for places in numbers))


def rows_of_slice(node: Node) -> slice:
    """Read which rows a slice selects.

    Args:
        node: The node.

    Returns:
        The rows.
    """
    return slice(saved(node, "start"), saved(node, "end"), saved(node, "step"))


def numbered_rows(node: Node) -> tuple[int, Tensor] | None:
    """Read which rows a node selects, or adds others to.

    Args:
        node: The node.

    Returns:
        An axis, and the numbers of rows along it; ``None`` if not these alone tell where an entry goes.
    """
    if operation(node) == "Slice":
        dim = saved(node, "dim")
        return dim, torch.arange(saved(node, "self_sym_sizes")[dim])[rows_of_slice(node)]
    dim, index = saved(node, "dim"), saved(node, "index")
    if index is None:  # nothing was added but constants
        return None
    if index.dim() > 1:
        others = [axis for axis in range(index.dim()) if axis != dim % index.dim()]
        if any(not index.shape[axis] or (index.shape[axis] > 1 and index.stride(axis)) for axis in others):
            return None
        index = index.movedim(dim, -1)[(0,) * len(others)]
    return dim, index.reshape(-1)
