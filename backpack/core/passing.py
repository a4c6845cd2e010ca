"""A backward pass of autograd, with hooks that run right before it runs a node: there flows start, are carried on, and are read.

When the hook of a node fires, nothing upstream of it has run: what starts there can be carried through all that lies upstream at once, before the
pass goes on. That is done with columns that would take too much memory together: block by block, each in a pass of its own, the last one with this
pass. What is linear is added over all uses of a parameter within a block, so that it may be squared there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from math import nan, prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Size, Tensor
from torch.autograd.graph import Node

from backpack.core.carry import Carry
from backpack.core.connect import Connection
from backpack.core.crossings import Gap
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.flow import BatchFirst, Columns, Flow, Use
from backpack.core.graph import operation, shape_of
from backpack.core.leaves import turns
from backpack.core.linear import SAME_ENTRIES, TRANSPOSES
from backpack.core.loss_nodes import LossNode
from backpack.core.plan import Plan
from backpack.core.reader import Blocks, Reader
from backpack.core.refusals import refuse_released
from backpack.core.samples import plain_layout, sum_to
from backpack.core.slots import Edge
from backpack.core.starts import Start
from backpack.core.state import recording
from backpack.core.terms import slopes
from backpack.core.units import Unit
from backpack.core.ways import BROADCASTING, ELEMENTWISE
from backpack.utils.columns import ScatteredColumns

Place = Callable[[Carry, Columns], None]
"""Puts columns where they are carried from."""


class Pass(Carry):
    """Hooks for one backward pass."""

    def __init__(
        self, plan: Plan, flows: list[Flow], reader: Reader, connection: Connection | None = None, blocks: dict[Flow, Blocks] | None = None
    ) -> None:
        super().__init__(plan, flows, reader, connection)
        self._blocks = blocks or {}
        self._only_gradient = all(flow.is_gradient for flow in flows)

    def install(self) -> list[Any]:
        """Register the hooks.

        Returns:
            Handles that remove them.
        """
        plan, handles, only_gradient = self._plan, [], self._only_gradient
        for node, start in plan.losses.items() if not only_gradient else ():
            handles.append(node.register_prehook(self._hook(self._at_loss, node, start)))
        for node, unit in plan.units.items():
            if not only_gradient or self._reader.watches_calls or unit.parameters or unit.split or self._explicit(unit.below):
                handles.append(node.register_prehook(self._hook(self._at_unit, node, unit)))
        for node, unit in plan.shared.items():
            handles.append(node.register_prehook(self._hook(self._at_shared, node, unit)))
        for node, composite in plan.composites.items():
            products = any(unit.parameters or unit.split for unit in composite.parts)
            if not only_gradient or products or any(self._explicit(edge) for edge, _ in composite.below):
                handles.append(node.register_prehook(self._hook(self._at_composite, node, composite)))
                handles += [n.register_prehook(self._hook(self._at_waiting, n, waiting)) for n, waiting in composite.waiting.items()]
        for gap in self.crossed():
            handles.append(gap.node.register_prehook(self._hook(self._at_gap, gap.node, gap)))
        return handles

    def crossed(self) -> list[Gap]:
        """List the graph nodes that are crossed by calling them.

        Returns:
            The gaps.
        """
        return [gap for gap in self._plan.gaps.values() if not self._only_gradient or any(self._explicit(n) for n in gap.nexts)]

    def peek(self, flow: Flow | None, edge: Edge) -> Any:
        """Return what a flow carries at an edge, without taking it: it is not overwritten any more.

        Args:
            flow: The flow, or ``None``.
            edge: The edge.

        Returns:
            The value; ``None`` if there is none.
        """
        value = self._data.get(flow, {}).get(edge)
        if isinstance(value, dict):  # columns; flows of sequences of modules carry matrices, or functions
            self._own[flow, edge].difference_update(value)
        return value

    def _hook(self, run: Callable, node: Node, what: Any) -> Callable:
        def connected(grads: Any) -> None:
            before, recording.connection = recording.connection, self._connection  # of this thread, which autograd has chosen
            try:
                run(node, what, grads)
            finally:
                recording.connection = before

        return partial(run, node, what) if self._connection is None else connected

    def _at_loss(self, node: Node, start: Start, grads: tuple[Tensor | None, ...]) -> None:
        call, grad = start.call, grads[start.nr]
        refuse_released(call)
        grad = None if grad is None else start.take(grad)
        before, recording.on = recording.on, False  # the loss may be evaluated again
        try:
            for flow in self._each_flow():
                if not flow.is_gradient and grad is not None:
                    self._start(flow, start, flow.start(call, grad, start.layout))
        finally:
            recording.on = before
        self._reader.after_call(call)

    def _start(self, flow: Flow, start: Start, value: Any) -> None:
        """Let a flow start.

        Args:
            flow: The flow.
            start: The loss.
            value: The value at its input.
        """
        if not flow.crosses_gaps:
            self.deposit(flow, start.below, value, start.layout)
            return

        def back(columns: Tensor) -> Tensor:
            return start.call.back(columns) if isinstance(start.call, LossNode) else columns

        def place(to: Carry, columns: Columns) -> None:
            to.deposit(flow, start.below, {source: back(c) for source, c in columns.items()}, start.layout)

        for source, columns in value.items():
            if not self._bear_at_layer(flow, source, columns, start.below, back):
                self._bear(flow, source, [(columns, place)])

    def _bear_at_unit(self, flow: Flow, unit: Unit, use: Use) -> None:
        def back(columns: Tensor) -> Tensor:
            return columns if unit.arrangement is None else unit.arrangement.back(columns, 1)

        for source, columns, factors in flow.at_unit(self._plan.walk, self._concerned[flow], unit, use):
            if not len(columns) or (not factors and self._bear_at_layer(flow, source, columns, unit.below, back)):
                continue
            parts: list[tuple[Tensor, Place]] = [(columns, lambda to, c: to.to_input(flow, unit, c))]
            parts += [(part, lambda to, c, name=name: to.to_factor(flow, unit, name, c)) for name, part in factors.items()]
            self._bear(flow, source, parts)

    def _bear_at_gap(self, flow: Flow, gap: Gap, grad: Tensor) -> None:
        born = flow.at_gap(self._plan.walk, self._concerned[flow], gap, grad)
        if born is None:
            return
        (source, parts), nexts = born, gap.nexts
        if not len(parts[0].columns):
            return  # where no row arrives, as at an idle expert
        if len(parts) == 1:
            columns, upstream = parts[0].columns, nexts[parts[0].number]
            if parts[0].layout is None and self._bear_at_parameter(flow, columns, upstream):
                return
            if self._bear_at_layer(flow, source, columns, upstream[:2], lambda c: c):
                return
        self._bear(flow, source, [(p.columns, lambda to, c, p=p: to.hand_on(flow, nexts[p.number], c, p.layout)) for p in parts])

    def _bear_at_parameter(self, flow: Flow, columns: Tensor | ScatteredColumns, upstream: tuple[Node, int, Size]) -> bool:
        """Read a diagonal matrix off at the parameter behind operations that treat each of its entries alone, without columns.

        Args:
            flow: The flow.
            columns: The root of the diagonal matrix of each sample.
            upstream: Where it was born, and the shape there, which may have been broadcast.

        Returns:
            Whether it was: whether there is such a parameter, and nobody needs to see the columns there.
        """
        alone = isinstance(columns, ScatteredColumns) and columns.size == 1 and self._connection is None
        diagonal, edge = columns.squares() if alone else None, upstream[:2]
        if diagonal is not None:
            same = diagonal[:1].numel() == upstream[2].numel()  # axes of length one may have been left out
            diagonal = diagonal.reshape(len(diagonal), *upstream[2]) if same else sum_to(diagonal, upstream[2], 1)
        while diagonal is not None and not self._is_leaf(edge[0]):
            diagonal, edge = _squares_behind(self._plan.gaps.get(edge[0]), diagonal)
        if diagonal is None:
            return False
        parameter, layout = edge[0].variable, plain_layout(len(diagonal))
        use = Use(SimpleNamespace(derivatives=_AtParameter), {"weight": parameter}, {0: diagonal[None].to(parameter.dtype)}, diagonal, layout)
        return self._concerns(flow, edge) and self._reader.at_layer(flow, use)

    def _bear_at_layer(self, flow: Flow, source: Hashable, columns: Tensor | ScatteredColumns, edge: Edge, back: Callable[[Tensor], Tensor]) -> bool:
        """Read a matrix that couples no positions off at the affine layer at whose output it was born, without columns: that of most losses, too.

        Its root is born at the input of the layer, if it is needed upstream.

        Args:
            flow: The flow.
            source: Source of the columns.
            columns: The root, ``[V, *]``.
            edge: Where it was born.
            back: Puts the samples of columns where they lie at the edge.

        Returns:
            Whether it was: whether there is such a layer, and nobody needs to see the columns there.
        """
        if not isinstance(columns, ScatteredColumns) or self._connection is not None:
            return False
        gaps, edge = behind_views(self._plan, edge)
        for gap in gaps:
            back = partial(_behind, gap, back)
        unit = self._plan.units.get(edge[0])
        if unit is None or unit.nr != edge[1] or unit.split or not unit.parameters:
            return False
        slot, turn, rule = unit.call.outputs[0], unit.arrangement, unit.call.derivatives
        if not (isinstance(rule, AffineDerivatives) and unit.is_ours and columns.entries == prod(slot.shape)):
            return False
        refuse_released(unit.call)
        view = unit.call if turn is None else BatchFirst(unit.call, turn)

        def arrived(mat: Tensor) -> Tensor:
            given = back(mat).reshape(len(mat), *slot.shape)
            return given if turn is None else turn.front(given, 1)

        def use(value: Columns) -> Use:
            some = next(iter(value.values()))
            return Use(view, unit.parameters, value, some.new_full((), nan).expand(some.shape[1:]), unit.layout)

        def through(value: Columns) -> Columns:
            return {s: arrived(c).to(slot.dtype) for s, c in value.items()}

        rows = partial(rule.rows, view)
        local = columns.size == 1 or _are_of_positions(*(rows(arrived(part))[0].flatten(1, 2) for part in columns.numbers()), columns.size)
        squares = columns.squares() if local else None
        if squares is None:
            return False
        read = use({0: arrived(squares.unsqueeze(0))})
        if rule.groups(view) == 1:
            read.notes["moment"] = partial(_moment, columns, rows, read.value[0])
        if not self._reader.at_layer(flow, read):
            return False
        if unit.below is not None and self._wants(flow, unit.below):
            products, shape = None, shape_of(unit.below)
            if type(rule) is LinearDerivatives and columns.size == 1 and shape[:-1] == shape_of(edge)[:-1] and not unit.call.moved:
                products = columns.times(unit.call.weight.detach(), back, shape)
            if products is not None:
                self._bear(flow, source, [(products, lambda to, c: to.deposit(flow, unit.below, c, unit.arrives, own=True))])
            else:
                self._bear(flow, source, [(columns, lambda to, c: to.to_input(flow, unit, to._through(flow, unit, use(through(c)))))])
        return True

    def _bear(self, flow: Flow, source: Hashable, parts: list[tuple[Tensor, Place]]) -> None:
        """Let new columns go their way: the last block in this pass, others before, in passes of their own.

        Args:
            flow: The flow.
            source: Their source.
            parts: What they are at several places, ``[V, ...]``, and how to put some of them there.
        """
        given = self._blocks.get(flow)
        *blocks, last = [slice(None)] if given is None else given.cut(len(parts[0][0]))
        for block in blocks:
            apart = Carry(self._plan, [flow], given.reader())
            _put(apart, flow, source, parts, block)
            apart.run()
        _put(self, flow, source, parts, last)


def _put(to: Carry, flow: Flow, source: Hashable, parts: list[tuple[Tensor, Place]], block: slice) -> None:
    some = source if block == slice(None) else flow.part(source, block)
    for columns, place in parts:
        place(to, {some: columns[block]})


def behind_views(plan: Plan, edge: Edge) -> tuple[list[Gap], Edge]:
    """Go on through operations that leave every entry what it is.

    Args:
        plan: The plan.
        edge: An edge.

    Returns:
        The operations, and the first edge that is none of these.
    """
    gaps: list[Gap] = []
    while (gap := plan.gaps.get(edge[0])) is not None and operation(gap.node) in SAME_ENTRIES | TRANSPOSES and gap.nexts[0] is not None:
        gaps.append(gap)
        edge = gap.nexts[0][:2]
    return gaps, edge


def _behind(gap: Gap, back: Callable[[Tensor], Tensor], mat: Tensor) -> Tensor:
    return gap.call({0: back(mat)})[0]


def _are_of_positions(block: Tensor, place: Tensor, size: int) -> bool:
    """Say whether blocks of entries are the outputs of a layer at one position each, in their order.

    Args:
        block: In which block each entry is, as they lie in the rows of the layer ``[N, O, L]``.
        place: Where in there it is.
        size: Entries of a block.

    Returns:
        Whether they are.
    """
    return block.shape[1] == size and bool((block == block[:, :1]).all() and (place.mT == torch.arange(size, device=place.device)).all())


def _moment(columns: ScatteredColumns, rows: Callable[[Tensor], Tensor], squares: Tensor) -> Tensor:
    """Sum the outer products of columns that are of one position each, over positions and samples.

    Args:
        columns: The columns.
        rows: Arranges outputs as rows of the layer, which has no groups.
        squares: Squares of the columns, at the output of the layer ``[1, *output]``.

    Returns:
        ``[1, O, O]``.
    """
    return rows(squares)[0].sum((0, 3)).diag_embed() if columns.size == 1 else columns.moment().unsqueeze(0)


class _AtParameter:
    """Rule of a parameter that is read like a layer which returns it for each sample."""

    @staticmethod
    def sum_at_diagonal(module: Any, name: str, mat: Tensor, sum_batch: bool) -> Tensor:
        """Say what a diagonal matrix adds at the parameter.

        Args:
            module: There is none.
            name: Name of the parameter.
            mat: The diagonal ``[1, N, *parameter]``.
            sum_batch: Whether to sum over samples.

        Returns:
            ``[*parameter]`` if ``sum_batch``, else ``[N, *parameter]``.
        """
        return mat[0].sum(0) if sum_batch else mat[0].clone()


def _squares_behind(gap: Gap | None, diagonal: Tensor) -> tuple[Tensor | None, Edge]:
    """Carry a diagonal matrix through an operation that treats each entry alone.

    Args:
        gap: The node.
        diagonal: The diagonal at its output, of each sample ``[N, *shape]``.

    Returns:
        That at its input ``[N, *shape]``, ``None`` if it does something else, or has several inputs; and the edge there.
    """
    found = [] if gap is None else [(number, upstream[:2]) for number, upstream in enumerate(gap.nexts) if upstream is not None]
    if len(found) != 1 or gap.outputs > 1:
        return None, (None, 0)
    ((number, edge),), node = found, gap.node
    if operation(node) in SAME_ENTRIES or turns((node, 0)):
        return gap.call_split({0: diagonal[None]})[number][0], edge
    if operation(node) not in ELEMENTWISE | BROADCASTING or shape_of(edge) != shape_of((node, 0)):
        return None, edge
    slope = slopes(node, number)
    return None if slope is None else diagonal * slope.to(diagonal.dtype).square(), edge
