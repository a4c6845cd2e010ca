"""Crossings: how a graph node that no rule covers carries the samples of the mini-batch to its inputs."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from backpack.core.coefficients import by_coefficients
from backpack.core.graph import call_node, has_saved, operation, outputs_of, saved, settings_of, shape_of, tensor_at
from backpack.core.known_ways import known_crossings
from backpack.core.linear import LINEAR, ON_A_PART
from backpack.core.probing import decode, probe, probes
from backpack.core.samples import Layout, add_rows, along, filled, label_tensor, layout_of, split, sum_to
from backpack.core.selections import SELECTS, selection
from backpack.core.solutions import to_matrix
from backpack.core.ways import OF_ONE, SPLIT, STATIC, Crossing, State, Way, axis_kept, summed
from backpack.utils.columns import blocks
from backpack.utils.errors import UnsupportedError

_MASKED = 2**24
"""Entries of columns that are masked at once."""
_SMALL = 2**14
"""Entries up to which probing columns take less time together."""
_TENSOR_AND_PART = 2
"""Inputs of an assignment."""


class Gap:
    """A graph node that no rule covers, crossed by calling it.

    Attributes:
        node: The node.
        parts: The units that stand for it: none.
        outputs: Number of its outputs.
        states: Output number to state of the incoming columns.
        nexts: For each next edge from which something needed is reached: (node, number, shape).
        crossings: For each next edge: how columns leave, ``None`` where nothing is needed.
    """

    __slots__ = ("crossings", "nexts", "node", "outputs", "states")
    parts = ()

    def __init__(self, node: Node, states: dict[int, State], nexts: list[tuple[Node, int, torch.Size] | None], of_data: Container[Node]) -> None:
        self.node, self.outputs, self.states, self.nexts = node, len(outputs_of(node)), states, nexts
        if SPLIT in states.values():
            self.crossings = [None if n is None else Crossing(SPLIT, None, None) for n in nexts]
        else:
            found = crossings_of(node, states, tuple(None if n is None else n[2] for n in nexts))
            # what all samples use by turns is split from here on: a scale that each one multiplies with what is its own
            self.crossings = [c if n is None or c is None else c.of_all(n[0], n[2], of_data) for n, c in zip(nexts, found, strict=True)]

    @property
    def upstream(self) -> list[tuple[Node, int, torch.Size] | None]:
        """Where what it hands on goes."""
        return [n for n, crossing in zip(self.nexts, self.crossings, strict=True) if crossing is not None]

    @property
    def hides_samples(self) -> bool:
        """Whether the derivative for some input is exactly zero for all samples, or all but one: where they lie there is not known."""
        known = max((len(set(state.labels) - {-1}) for state in self.states.values() if state is not SPLIT), default=0)
        for crossing in self.crossings:
            labels = () if crossing is None or crossing.arrives is None else crossing.arrives.labels
            if -1 in labels and len(set(labels)) <= min(known, 2):  # of one sample at most
                return True
        return False

    def call(self, columns: dict[int, Tensor]) -> list[Tensor | None]:
        """Call the node.

        Args:
            columns: Output number to ``[V, *shape]``.

        Returns:
            For each next edge ``[V, *shape]``, or ``None``. Where the input was broadcast, the gradient may still have the shape of the output.
        """
        return call_node(self.node, [columns.get(nr) for nr in range(self.outputs)])

    def call_split(self, columns: dict[int, Tensor]) -> list[Tensor | None]:
        """Call the node with split columns.

        Args:
            columns: Output number to ``[V, N, *shape]``.

        Returns:
            For each next edge ``[V, N, *shape]``, or ``None``.
        """
        (nr, some), *others = columns.items()
        lead, multiples = some.shape[:2], not (others or some.is_complex() or isinstance(self.node, BackwardCFunction))
        if not multiples or lead.numel() <= 1 or some.shape[2:].numel() != 1:
            returned = self.call({nr: c.flatten(0, 1) for nr, c in columns.items()})
            returned = [None if c is None else c.unflatten(0, lead) for c in returned]
        else:  # columns with a single entry are multiples of one
            returned = self.call({nr: torch.ones_like(some[0, :1])})
            returned = [None if c is None else some.reshape(*lead, *(1,) * (c.dim() - 1)) * c for c in returned]
        return [None if c is None or n is None else sum_to(c, n[2], 2) for c, n in zip(returned, self.nexts, strict=True)]

    def call_masked(self, given: dict[int, Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Split columns by masks, block of samples by block, and call the node with them; add what is selected where it belongs, for each sample.

        Args:
            given: Output number to ``[V, *shape]``.
            wanted: For each next edge, whether it is.

        Returns:
            For each next edge ``[V, N, *shape]``, or ``None``.
        """
        state = next(iter(self.states.values()))
        points = _shared_points(self.node, state)
        if points is not None and not torch.is_grad_enabled():  # torch does not know the derivative of that derivative
            return _to_points(self.node, given[0], state, points)
        if _copies_for_samples(self.node, state):
            return [_to_copied(self.node, given[0], state)]
        chosen = selection(self.node) if operation(self.node) in SELECTS and not tensor_at((self.node, 0)).dtype.is_complex else None
        if chosen is not None and chosen.numbers(state.axis):
            return [None if n is None else chosen.added(given[0], state).reshape(*given[0].shape[:1], -1, *n[2]) for n in self.nexts]
        if wanted[0] and sum(wanted) == 1 and (sent := to_matrix(self.node, given[0], state)) is not None:
            return [sent if want else None for want in wanted]
        if sum(wanted) == 1 and self.outputs == 1:
            number = wanted.index(True)
            if (sent := by_coefficients(self.node, number, given[0], state, self.nexts[number][2])) is not None:
                return [sent if want else None for want in wanted]
        samples = state.samples
        size = sum(prod(c.shape) for c in given.values())
        rows = []
        for block in blocks(samples, size, _MASKED) or [slice(0, 0)]:
            sent = self.call_split({nr: split(c, self.states[nr], block) for nr, c in given.items()})
            rows.append([part if want else None for part, want in zip(sent, wanted, strict=True)])  # the others are as large as N masks
        return [None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*rows, strict=True)]


def _shared_points(node: Node, layout: Layout) -> int | None:
    """Say which input of a matrix of distances holds points that samples along the other axis share.

    Args:
        node: The node.
        layout: Where the samples lie in its output.

    Returns:
        Number of the input; ``None`` if it is another node, or has several matrices.
    """
    shape = shape_of((node, 0)) if operation(node) in ("Cdist", "EuclideanDist") else torch.Size()
    axis = layout.axis - len(shape) + 2
    return None if not layout.samples or prod(shape[:-2]) != 1 or not shape or axis < 0 else 1 - axis


def _to_points(node: Node, columns: Tensor, layout: Layout, number: int) -> list[Tensor | None]:
    """Differentiate distances to points that all samples share with respect to these, for each sample.

    Args:
        node: The node.
        columns: ``[V, (1,) R, M]``, or ``[V, (1,) M, R]``, for ``M`` points.
        layout: Where the samples lie in the output.
        number: Number of the input that holds the points.

    Returns:
        ``[V, N, (1,) M, D]`` for the points, ``None`` for the samples.
    """
    sides = saved(node, "x1"), saved(node, "x2")
    points, own = (side.reshape(side.shape[-2:]) for side in (sides[number], sides[1 - number]))
    if not points.numel():
        return [columns.new_zeros(len(columns), layout.samples, *points.shape) if side == number else None for side in range(2)]
    power, lead = saved(node, "p") if has_saved(node, "p") else 2.0, (len(columns), len(own))
    grad, distances = (part.mT if number == 0 else part for part in (columns, saved(node, "result")))
    grad, distances = (part.reshape(-1, *lead[1:], len(points)).expand(*lead, -1).reshape(-1, len(points), 1) for part in (grad, distances))
    others = points.expand(len(grad), *points.shape).contiguous(), own.expand(lead[0], *own.shape).reshape(-1, 1, own.shape[1])
    rows = torch.ops.aten._cdist_backward(grad.contiguous(), *others, power, distances.contiguous())
    rows = rows.reshape(*lead, *sides[number].shape)
    return [add_rows(rows, layout) if side == number else None for side in range(2)]


def _copies_for_samples(node: Node, layout: Layout) -> bool:
    # what is the same for all of them
    if operation(node) != "Repeat":
        return False
    full, shape = shape_of((node, 0)), shape_of(node.next_functions[0])
    axis = layout.axis - len(full) + len(shape)
    return full.numel() > 0 and (axis < 0 or shape[axis] == 1)


def _to_copied(node: Node, columns: Tensor, layout: Layout) -> Tensor:
    # ``[V, *full]`` to ``[V, N, *shape]``: the copies of a sample are summed
    full, shape = shape_of((node, 0)), shape_of(node.next_functions[0])
    rows = add_rows(columns.movedim(layout.axis + 1, 1), layout).unsqueeze(2).movedim(2, layout.axis + 2)
    sizes = rows.shape[2:], (*[1] * (len(full) - len(shape)), *shape)
    for axis, (made, size) in enumerate(zip(*sizes, strict=True)):
        if made != size:
            rows = rows.unflatten(axis + 2, (-1, size)).sum(axis + 2)
    return rows.reshape(*rows.shape[:2], *shape)


def _completed(layout: Layout, state: Layout) -> Layout:
    """Give rows whose sample a derivative of zero hides to the only sample of the output, or to that in the same place, if others lie as there.

    Args:
        layout: Where the samples lie in what a node returns; the label of such a row is -1.
        state: Where they lie in its output.

    Returns:
        The layout, with labels where they are known.
    """
    if state.of_one and -1 not in state.labels and state.labels:
        return layout._replace(labels=state.labels[:1] * len(layout.labels))
    as_there = len(layout.labels) == len(state.labels) and all(one in (-1, other) for one, other in zip(layout.labels, state.labels, strict=True))
    return layout._replace(labels=state.labels) if as_there and not layout.of_one else layout


def lies_elsewhere(node: Node, state: State, reach: Callable[[Node | None], Any], shape: torch.Size) -> Layout | None:
    """Say where else the samples may lie in an input of a node, as far as its output tells.

    Args:
        node: The node.
        state: Where they lie in its output.
        reach: Tells whether something that is needed lies upstream of a node.
        shape: Shape of one of the inputs that are needed.

    Returns:
        Along another axis of what is selected by numbers; along that of a sample that is selected; or without the rows that are multiplied by
        zero, or replaced by something else. ``None`` if there is no such axis, and no such row.
    """
    if state is SPLIT or state.samples <= 1:
        return None
    if operation(node) in SELECTS:
        chosen = selection(node)
        return next(iter(chosen.before(state)[1:]), None) if chosen is not None else None
    if operation(node) not in OF_ONE or state.plain or not state.of_one:
        return None
    if operation(node) == "Select":
        return axis_kept(node, state, shape)
    needed = [number for number, (upstream, _) in enumerate(node.next_functions) if reach(upstream)]
    return _unmasked(node, state, needed[0], shape) if len(needed) == 1 else None


def _unmasked(node: Node, layout: Layout, number: int, shape: torch.Size) -> Layout | None:
    # with label -1 for rows that a node, of which this input alone is needed, multiplies by zero; ``None`` if there are none
    slot = tensor_at((node, 0))
    if not shape or 0 in shape or shape_of((node, 0)) != shape:
        return None
    with torch.no_grad():
        sent = call_node(node, [torch.ones(1, *shape, dtype=slot.dtype, device=slot.device)], probing=True)[number]
    alive = filled(sent[0], layout)
    return None if alive.all() else layout._replace(labels=tuple(torch.where(alive, label_tensor(layout.labels, alive.device), -1).tolist()))


def _hides_places(node: Node, shapes: tuple[torch.Size | None, ...]) -> bool:
    # where the parts of a concatenation begin, of which several need no gradient; which entries use a number that is filled in
    return (operation(node) == "Cat" and shapes.count(None) > 1) or (operation(node) == "MaskedFill" and shapes[1:].count(None) < len(shapes) - 1)


def _assigned(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how an assignment to a part of a tensor, or a view by strides, carries the samples: entries stay in place; those of the part move.

    One column, with a random number for each sample, shows where they go, and that no entry is made of several.

    Args:
        node: The node of an operation in place on a part of a tensor, or of a view by strides, which is made where that part is read.
        layout: Where the samples lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it does something else, or numbers are too coarse.
    """
    slot, full = tensor_at((node, 0)), shape_of((node, 0))
    codes, values, order = _codes(layout.samples, slot.device, slot.dtype)
    if len(shapes) > _TENSOR_AND_PART or layout.of_one or not full.numel() or codes is None:
        return None
    labels = label_tensor(layout.labels, slot.device)
    column = along(torch.where(labels < 0, 0, codes[labels]), layout.axis, len(full)).expand(full).contiguous()
    with torch.no_grad():
        returned = call_node(node, [column[None]], probing=True)
    crossings: list[Crossing | None] = []
    for number, (shape, sent) in enumerate(zip(shapes, returned, strict=True)):
        if shape is None or sent is None:
            crossings.append(None)
            continue
        found = sent[0].abs()  # what is subtracted is moved, too
        if found.shape != shape:
            return None
        if number or node.name() != ON_A_PART:
            places = order[torch.searchsorted(values, found).clamp(max=layout.samples - 1)]
            wanted, there = codes[places], layout_of(places, found.ne(0), layout.samples, layout.axis)
        else:
            wanted, there = column, layout._replace(labels=tuple(torch.where(filled(found, layout), labels, -1).tolist()))
        # each entry is what it should be, or zero
        if there is None or torch.linalg.vector_norm((wanted - found).mul_(found.sign())) != 0:
            return None
        crossings.append(Crossing(Way.DATA, there, there))
    return crossings


@lru_cache(maxsize=16)
def _codes(samples: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor | None, Tensor, Tensor]:
    # a number for each sample, ``None`` if some are the same; these in order, and whose they are
    codes = (torch.rand(samples, generator=torch.Generator().manual_seed(0)) + 0.5).to(device, dtype)
    values, order = codes.sort()
    return None if values.diff().eq(0).any() else codes, values, order


def _kept(node: Node, states: dict[int, Layout], shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say whether a node leaves the samples where they are, by one probing column after the other: these stay in the cache, and nobody asks entries.

    Args:
        node: The node.
        states: Output number to layout.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` where samples come elsewhere, or mix.
    """
    (nr, layout), *others = states.items()
    slot, full = tensor_at((node, nr)), shape_of((node, nr))
    if others or layout.samples <= 1 or full.numel() < _SMALL or slot.dtype.is_complex or any(shape not in (None, full) for shape in shapes):
        return None
    columns: list[Tensor | None] = [None] * len(outputs_of(node))
    found: dict[int, Tensor] = {}
    for mask, column in probes(full, layout, slot.dtype, slot.device):
        columns[nr] = column[None]
        with torch.no_grad():
            returned = call_node(node, columns, probing=True)
        for number, sent in enumerate(returned):
            if shapes[number] is not None and sent is not None:
                if sent.shape[1:] != full or ((rows := filled(sent[0], layout)) & ~mask).any():
                    return None
                found[number] = rows | found.get(number, False)
    there = {
        number: _completed(layout._replace(labels=tuple(torch.where(rows, label_tensor(layout.labels, rows.device), -1).tolist())), layout)
        for number, rows in found.items()
    }
    return [Crossing(Way.DATA, there[number], there[number]) if number in there else None for number in range(len(shapes))]


_CROSSINGS: dict[Any, list[Crossing | None]] = {}


def crossings_of(node: Node, states: dict[int, Layout], shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None]:
    """Find out how a node carries the samples to its inputs, by sending known columns through it.

    Args:
        node: The node.
        states: Output number to layout.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input.

    Raises:
        RuntimeError: If the node takes no such columns.
    """
    known = known_crossings(node, states, shapes)
    points = _shared_points(node, next(iter(states.values())))
    if known is None and points is not None:
        there = states[0]._replace(axis=len(shape_of((node, 0))) - 2)
        of_samples, of_points = Crossing(Way.DATA, there, there), Crossing(Way.MASKED, None, None)
        known = [None if shape is None else of_points if number == points else of_samples for number, shape in enumerate(shapes)]
    if known is None and (node.name() == ON_A_PART or operation(node) == "AsStrided") and not tensor_at((node, 0)).dtype.is_complex:
        known = _assigned(node, states[0], shapes)
    if known is not None:
        return known
    tensors, key = outputs_of(node), None
    if operation(node) in STATIC and not _hides_places(node, shapes):
        key = (node.name(), tuple(torch.Size(m.shape) for m in tensors), shapes, tuple(states.items()), settings_of(node))
        if key in _CROSSINGS:
            return _CROSSINGS[key]
    kept = None if key is not None else _kept(node, states, shapes)
    if kept is not None:
        return kept
    samples, axis = next((layout.samples, layout.axis) for layout in states.values())
    columns = [probe(m.shape, states[nr], m.dtype, m.device) if nr in states else None for nr, m in enumerate(tensors)]
    with torch.no_grad():  # as autograd runs its nodes
        try:
            gradients = call_node(node, columns, probing=True)
        except RuntimeError as error:  # complex singular vectors take only some columns: of one sample, to which all belongs, zeros tell as much
            if isinstance(error, UnsupportedError) or not all(layout.of_one for layout in states.values()):
                raise
            gradients = call_node(node, [None if c is None else torch.zeros_like(c) for c in columns], probing=True)
    crossings: list[Crossing | None] = []
    settled = True
    for shape, returned in zip(shapes, gradients, strict=True):
        if shape is None or returned is None:
            crossings.append(None)
            continue
        layout, certain = decode(returned, samples, axis)
        settled = settled and certain
        if layout is not None and operation(node) not in LINEAR:
            layout = _completed(layout, next(iter(states.values())))
        if layout is None:
            crossings.append(Crossing(Way.MASKED, None, None))
            continue
        crossings.append(summed(layout, returned.shape[1:], shape))
    if key is not None and settled:
        if len(_CROSSINGS) > 10_000:
            _CROSSINGS.clear()
        _CROSSINGS[key] = crossings
    return crossings
