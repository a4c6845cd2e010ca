"""Carrying columns through a planned backward pass, in hooks that run right before autograd runs a node.

When the hook of a node fires, all its consumers have run, so that the gradient of its output, and the columns that arrived there, are complete.
What the columns are is the business of a ``Flow``; what is read off at parameters that of a ``Reader``: both are handed in from above.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.calls import RANDOM, ModuleCall
from backpack.core.connect import Connection
from backpack.core.crossings import SPLIT, Gap, Way
from backpack.core.derivatives.maxpoolnd import MaxPoolNDDerivatives
from backpack.core.flow import BatchFirst, Columns, Flow, Reader, Use
from backpack.core.graph import call_node, outputs_of, saved_maxima, shape_of, tensor_at
from backpack.core.node_calls import Composite
from backpack.core.plan import Plan
from backpack.core.samples import Layout, add_rows, keeps_samples, split, sum_to
from backpack.core.slots import Edge
from backpack.core.starts import LossNode, Start
from backpack.core.state import recording
from backpack.core.walk import Unit
from backpack.utils.errors import NotRecordedError


class Carry:
    """Hooks for one backward pass."""

    def __init__(self, plan: Plan, flows: list[Flow], reader: Reader, connection: Connection | None = None) -> None:
        self._plan, self._flows, self._reader, self._connection = plan, flows, reader, connection
        self._pending = dict(plan.uses)
        self._data: dict[Flow, dict[Edge, Any]] = {flow: {} for flow in flows}
        self._split: dict[Flow, dict[Edge, Columns]] = {flow: {} for flow in flows}
        self._concerned = {flow: reader.concerned(flow) for flow in flows}

    def install(self) -> list[Any]:
        """Register the hooks.

        Returns:
            Handles that remove them.
        """
        plan, handles = self._plan, []
        for node, start in plan.losses.items() if any(not flow.is_gradient for flow in self._flows) else ():
            handles.append(node.register_prehook(self._hook(self._at_loss, node, start)))
        only_gradient = all(flow.is_gradient for flow in self._flows)
        for node, unit in plan.units.items():
            if not only_gradient or self._reader.watches_calls or unit.parameters or unit.split or self._explicit(unit.below):
                handles.append(node.register_prehook(self._hook(self._at_unit, node, unit)))
        for node, composite in plan.composites.items():
            products = any(unit.parameters or unit.split for unit in composite.parts)
            if not only_gradient or products or any(self._explicit(edge) for edge, _ in composite.below):
                handles.append(node.register_prehook(self._hook(self._at_composite, node, composite)))
        for gap in self.crossed():
            handles.append(gap.node.register_prehook(self._hook(self._at_gap, gap.node, gap)))
        return handles

    def crossed(self) -> list[Gap]:
        """List the graph nodes that are crossed by calling them.

        Returns:
            The gaps.
        """
        only_gradient = all(flow.is_gradient for flow in self._flows)
        return [gap for gap in self._plan.gaps.values() if not only_gradient or any(self._explicit(n) for n in gap.nexts)]

    def peek(self, flow: Flow | None, edge: Edge) -> Any:
        """Return what a flow carries at an edge, without taking it.

        Args:
            flow: The flow, or ``None``.
            edge: The edge.

        Returns:
            The value; ``None`` if there is none.
        """
        return self._data.get(flow, {}).get(edge)

    def _hook(self, run: Callable, node: Node, what: Any) -> Callable:
        def connected(grads: Any) -> None:
            recording.connection = self._connection  # of this thread, which autograd has chosen
            try:
                run(node, what, grads)
            finally:
                recording.connection = None

        return partial(run, node, what) if self._connection is None else connected

    def _each_flow(self) -> Iterator[Flow]:
        for flow in self._flows:
            if self._connection is not None:
                self._connection.flow = flow
            yield flow

    def _explicit(self, upstream: tuple | None) -> bool:
        """Whether the gradient has to be carried to an edge, because autograd's own is summed over samples there.

        Args:
            upstream: Next edge of a gap.

        Returns:
            Whether it is split, or the leaf of a parameter.
        """
        return upstream is not None and (self._is_leaf(upstream[0]) or self._plan.states[upstream[0]].get(upstream[1]) is SPLIT)

    def _concerns(self, flow: Flow, upstream: tuple) -> bool:
        return bool(self._plan.walk.reach[upstream[0]] & self._concerned[flow])

    def _is_leaf(self, node: Node) -> bool:
        return node in self._plan.walk.leaves

    # --------------------------------------------------------------------------------------------------------------- nodes
    def _at_loss(self, node: Node, start: Start, grads: tuple[Tensor | None, ...]) -> None:
        call, grad = start.call, grads[start.nr]
        self._refuse_released(call)
        grad = None if grad is None else start.take(grad)
        before, recording.on = recording.on, False  # the loss may be evaluated again
        try:
            for flow in self._each_flow():
                if not flow.is_gradient and grad is not None:
                    value = flow.start(call, grad, start.layout)
                    if isinstance(call, LossNode) and flow.crosses_gaps:
                        value = {source: call.back(columns) for source, columns in value.items()}
                    self._deposit(flow, start.below, Way.DATA, value, start.layout)
        finally:
            recording.on = before
        self._reader.after_call(call)

    def _at_unit(self, node: Node, unit: Unit, grads: tuple[Tensor | None, ...]) -> None:
        call, turn = unit.call, unit.arrangement
        self._refuse_released(call)
        edge, slot = (node, unit.nr), call.outputs[0]
        grad = grads[unit.nr]
        if grad is None:
            grad = torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device)
        if call.derivatives is RANDOM and unit.below is not None:
            call.slope = self._slope(node, unit)
        elif isinstance(call.derivatives, MaxPoolNDDerivatives):
            call.maxima = saved_maxima(unit.inside)
        view = call if turn is None else BatchFirst(call, turn)
        grad = grad.reshape(slot.shape) if unit.base else grad
        grad = grad if turn is None else turn.front(grad)
        for flow in self._each_flow():
            value = {0: grad[None]} if flow.is_gradient else self._data[flow].pop(edge, None)
            if value is None:
                continue
            if not flow.is_gradient and flow.crosses_gaps:  # a sum with a tensor of higher precision hands its own on, which autograd changes back
                value = {s: c.to(grad.dtype) for s, c in value.items()}
            if not flow.is_gradient and flow.crosses_gaps and (unit.base or turn is not None):
                value = {s: c.reshape(len(c), *slot.shape) for s, c in value.items()}
                value = value if turn is None else {s: turn.front(c, 1) for s, c in value.items()}
            use = Use(view, unit.parameters, value, grad, unit.layout)
            self._at_use(flow, unit, use)
            below = unit.below
            if below is None or (flow.is_gradient and not self._explicit(below)) or not self._concerns(flow, below):
                continue
            born = flow.at_unit(self._plan.walk, self._concerned[flow], unit, use)
            value = flow.through(view, value, grad, unit.layout)
            if born is not None:
                source, value[born[0]], factors = born
                for name, columns in factors.items():
                    if name in unit.parameters:
                        self._reader.at_leaf(flow, unit.parameters[name], {source: columns})
                    else:
                        factor = unit.split[name]
                        self._deposit(flow, factor, Way.SPLIT, {source: columns.reshape(*columns.shape[:2], *shape_of(factor))}, None)
            if flow.crosses_gaps:
                shape = shape_of(below)
                value = value if turn is None else {s: turn.back(c, 1) for s, c in value.items()}
                value = {s: c.reshape(len(c), *shape) for s, c in value.items()}
            self._deposit(flow, below, Way.DATA, value, unit.arrives)
        for parameter in unit.parameters.values():
            self._used(parameter)
        self._used_below(unit.below)
        self._reader.after_call(call)

    def _at_use(self, flow: Flow, unit: Unit, use: Use) -> None:
        """Let what needs it know of a use, and hand columns to factors that are no parameters.

        Args:
            flow: The flow.
            unit: The unit.
            use: The use.
        """
        if unit.parameters:
            self._reader.at_call(flow, use)
        for name, upstream in unit.split.items():
            if self._concerns(flow, upstream):
                self._deposit(flow, upstream, Way.SPLIT, self._per_sample(use, name, shape_of(upstream)), None)

    def _at_composite(self, node: Node, composite: Composite, grads: tuple[Tensor | None, ...]) -> None:
        outputs = [tensor_at((node, nr)) for nr in range(outputs_of(node))]
        # the columns of all flows are carried together, behind the gradient
        arrived: dict[tuple[Flow | None, Hashable], dict[int, Tensor]] = {(None, 0): {nr: g[None] for nr, g in enumerate(grads) if g is not None}}
        for flow in self._each_flow():
            for nr in range(len(outputs)) if not flow.is_gradient else ():
                for source, columns in self._data[flow].pop((node, nr), {}).items():
                    arrived.setdefault((flow, source), {})[nr] = columns
        sizes = [next((len(c) for c in given.values()), 1) for given in arrived.values()]
        wide = []
        for nr, slot in enumerate(outputs):
            none = torch.zeros((), dtype=slot.dtype, device=slot.device)
            wide.append(torch.cat([given.get(nr, none).expand(size, *slot.shape) for given, size in zip(arrived.values(), sizes, strict=True)]))
        inner, below = composite.pull(wide)
        split = [columns.split(sizes) for columns in (inner, *below)]
        pulled = dict(zip(arrived, zip(*split, strict=True), strict=True))
        for flow in self._each_flow():
            value = {source: parts for (owner, source), parts in pulled.items() if owner is (None if flow.is_gradient else flow)}
            if not value:
                continue
            if self._connection is not None:
                self._connection.fail(f"{node.name()} is one fused operation")
            for unit in composite.parts:
                turn = unit.arrangement
                columns = {source: turn.front(parts[0], 1) for source, parts in value.items()}
                grad = turn.front(pulled[None, 0][0][0])
                self._at_use(flow, unit, Use(BatchFirst(unit.call, turn), unit.parameters, columns, grad, unit.layout))
            for i, (edge, layout) in enumerate(composite.below, 1):
                if self._concerns(flow, edge) and (not flow.is_gradient or self._explicit(edge)):
                    self._deposit(flow, edge, Way.DATA, {source: parts[i] for source, parts in value.items()}, layout)
        for unit in composite.parts:
            for parameter in unit.parameters.values():
                self._used(parameter)
        for edge, _ in composite.below:
            self._used_below(edge)

    @staticmethod
    def _per_sample(use: Use, name: str, shape: torch.Size) -> Columns:
        """Return the columns of each sample at a factor that is computed from parameters.

        Args:
            use: The use.
            name: Name of the factor.
            shape: Its shape.

        Returns:
            ``{source: [V, N, *shape]}``.
        """
        rule = use.call.derivatives
        columns = {s: rule._param_mjp(name, use.call, None, (use.grad,), c, sum_batch=False) for s, c in use.value.items()}
        return {s: add_rows(c, use.layout).reshape(*c.shape[:1], use.layout.samples, *shape) for s, c in columns.items()}

    @staticmethod
    def _slope(node: Node, unit: Unit) -> Tensor:
        """Return the derivative of an element-wise module, by sending ones through its piece of the graph.

        Args:
            node: Node of the output.
            unit: The unit.

        Returns:
            Shape of the input.
        """
        edge, slot = (node, unit.nr), unit.call.outputs[0]
        columns = torch.ones(1, *shape_of(edge), dtype=slot.dtype, device=slot.device)
        while edge != unit.below:
            returned = call_node(edge[0], [columns if nr == edge[1] else None for nr in range(outputs_of(edge[0]))])
            edge, columns = next((n, c) for n, c in zip(edge[0].next_functions, returned, strict=True) if n[0] in unit.inside or n == unit.below)
        return columns.reshape(slot.shape)

    def _at_gap(self, node: Node, gap: Gap, grads: tuple[Tensor | None, ...]) -> None:
        own = [self._split[flow].get((node, 0), {}).get(0) for flow in self._flows if flow.is_gradient]  # the gradient of each sample
        for flow in self._each_flow():
            if not flow.crosses_gaps:
                continue
            if self._connection is not None:
                self._connection.cross(node)
            wanted = [
                c is not None and self._concerns(flow, n) and (not flow.is_gradient or self._explicit(n))
                for n, c in zip(gap.nexts, gap.crossings, strict=True)
            ]
            arrived = self._data[flow]
            data = {
                nr: ({} if grads[nr] is None else {0: grads[nr][None]}) if flow.is_gradient else arrived.pop((node, nr), {})
                for nr, state in gap.states.items()
                if state is not SPLIT
            }
            parts = {nr: self._split[flow].pop((node, nr), {}) for nr, state in gap.states.items() if state is SPLIT}
            sources = dict.fromkeys(source for value in (*data.values(), *parts.values()) for source in value)
            for source in sources if any(wanted) else ():
                given = {nr: value[source] for nr, value in data.items() if source in value}
                if parts:
                    columns = {nr: split(c, gap.states[nr]) for nr, c in given.items()}
                    columns |= {nr: value[source] for nr, value in parts.items() if source in value}
                    self._send(flow, source, gap, wanted, gap.call_split(columns), SPLIT)
                    continue
                self._send_data(flow, source, gap, wanted, given)
                if any(w and c.way is Way.MASKED for w, c in zip(wanted, gap.crossings, strict=True)):
                    self._send(flow, source, gap, wanted, gap.call_masked(given), Way.MASKED)
            grad = grads[0] if not parts else own[0][0] if own and own[0] is not None else None
            born = None if grad is None else flow.at_gap(self._plan.walk, self._concerned[flow], gap, grad)
            for part in born[1] if born is not None else ():
                self._hand_on(flow, gap.nexts[part.number], {born[0]: part.columns}, part.layout)
        for upstream, crossing in zip(gap.nexts, gap.crossings, strict=True):
            if crossing is not None:
                self._used_below(upstream)

    def _send_data(self, flow: Flow, source: Hashable, gap: Gap, wanted: list[bool], given: dict[int, Tensor]) -> None:
        """Call a gap node with columns that hold the samples on an axis, and hand on what still does, or what can be split afterwards.

        Args:
            flow: The flow.
            source: Source of the columns.
            gap: The gap.
            wanted: Which next edges need columns.
            given: Output number to columns.
        """
        usable = [w and c.way is not Way.MASKED for w, c in zip(wanted, gap.crossings, strict=True)]
        if not any(usable):
            return
        for i, columns in enumerate(gap.call(given)):
            if not usable[i] or columns is None:
                continue
            self._hand_on(flow, gap.nexts[i], {source: columns}, gap.crossings[i].returned)

    def _hand_on(self, flow: Flow, upstream: tuple[Node, int, torch.Size], columns: Columns, layout: Layout | None) -> None:
        """Sum columns to the shape of an input that may have been broadcast, and hand them to its edge.

        Args:
            flow: The flow.
            upstream: Node, number and shape.
            columns: ``{source: [V, *full]}``; split, ``[V, N, *full]``, if there is no layout.
            layout: Where the samples lie in ``full``.
        """
        edge, shape = upstream[:2], upstream[2]
        for source, given in columns.items():
            if layout is None:
                self._deposit(flow, edge, Way.SPLIT, {source: sum_to(given, shape, 2)}, None)
                continue
            kept = keeps_samples(layout, given.shape[1:], shape)
            if kept is not None:
                self._deposit(flow, edge, Way.DATA, {source: sum_to(given, shape, 1)}, layout._replace(axis=kept))
            else:
                rows = add_rows(given.movedim(1 + layout.axis, 1), layout).unsqueeze(2 + layout.axis)
                self._deposit(flow, edge, Way.SPLIT, {source: sum_to(rows, shape, 2)}, None)

    def _send(self, flow: Flow, source: Hashable, gap: Gap, wanted: list[bool], returned: list[Tensor | None], way: Way) -> None:
        for upstream, crossing, use, columns in zip(gap.nexts, gap.crossings, wanted, returned, strict=True):
            if use and columns is not None and crossing.way is way:
                self._deposit(flow, upstream[:2], SPLIT, {source: columns}, None)

    # --------------------------------------------------------------------------------------------------------------- edges
    def _deposit(self, flow: Flow, edge: Edge, way: Way, value: Any, layout: Layout | None) -> None:
        """Hand a value to an edge.

        Args:
            flow: The flow.
            edge: The edge.
            way: ``DATA`` or ``SPLIT``.
            value: The value; samples on an axis, or split.
            layout: Where the samples lie, for ``DATA``.
        """
        node = edge[0]
        leaf = self._is_leaf(node)
        if not leaf and node not in self._plan.states:
            return
        if flow.crosses_gaps:  # as autograd does with gradients where precisions are mixed
            value = {source: columns.to(tensor_at(edge).dtype) for source, columns in value.items()}
        if flow.crosses_gaps and (leaf or self._plan.states[node].get(edge[1]) is SPLIT):
            if way is Way.DATA:
                value = {source: split(columns, layout) for source, columns in value.items()}
            if leaf:
                if node.variable in self._pending:
                    self._reader.at_leaf(flow, node.variable, value)
                return
            store = self._split[flow]
        else:
            store = self._data[flow]
        store[edge] = flow.merge(store[edge], value) if edge in store else value

    def _used_below(self, upstream: tuple | None) -> None:
        if upstream is not None and self._is_leaf(upstream[0]):  # the input itself is a parameter
            self._used(upstream[0].variable)

    def _used(self, parameter: Parameter) -> None:
        self._pending[parameter] = left = self._pending[parameter] - 1
        if not left:
            self._reader.finish(parameter)

    @staticmethod
    def _refuse_released(call: ModuleCall) -> None:
        if call.released:
            raise NotRecordedError(
                f"What {call.path} had recorded was given back after an earlier backward pass over this graph. Call that one with retain_graph=True."
            )
