"""Carrying columns through a planned backward pass, in hooks that run right before autograd runs a node.

When the hook of a node fires, all its consumers have run, so that the gradient of its output, and the columns that arrived there, are complete.
What the columns are is the business of a ``Flow``; what is read off at parameters that of a ``Reader``: both are handed in from above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.calls import RANDOM
from backpack.core.connect import Connection
from backpack.core.crossings import Gap
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.flow import BatchFirst, Columns, Flow, Use, add_in_place, cast, is_apart, reshaped
from backpack.core.graph import HOOKED, operation, saved, saved_maxima, shape_of, tensor_at
from backpack.core.made import MadeUse
from backpack.core.node_calls import Composite, Waiting, unfused
from backpack.core.plan import Plan
from backpack.core.reader import Reader
from backpack.core.refusals import refuse_released
from backpack.core.routes import route
from backpack.core.samples import Layout, add_rows, after_sum, split, sum_to
from backpack.core.slots import Edge
from backpack.core.units import Unit
from backpack.core.ways import SPLIT, Way
from backpack.utils.errors import OverwrittenError


class Carry:
    """What is carried, and the steps from node to node. In a pass of its own, nothing but what is put somewhere is carried, and nothing is born."""

    def __init__(self, plan: Plan, flows: list[Flow], reader: Reader, connection: Connection | None = None) -> None:
        self._plan, self._flows, self._reader, self._connection = plan, flows, reader, connection
        self._pending = dict(plan.uses)
        self._data: dict[Flow, dict[Edge, Any]] = {flow: {} for flow in flows}
        self._split: dict[Flow, dict[Edge, Columns]] = {flow: {} for flow in flows}
        self._concerned = {flow: reader.concerned(flow) for flow in flows}
        self._own: dict[tuple[Flow, Edge], set[Hashable]] = defaultdict(set)  # sources of columns whose memory nobody else holds
        self._leaves: dict[Parameter, Edge] = {}  # where columns have arrived

    def run(self) -> None:
        """Carry what has been put somewhere through all nodes upstream, without gradients: what columns become there does not depend on them."""
        stores = [*self._data.values(), *self._split.values()]
        visits = self._at_unit, self._at_shared, self._at_composite, self._at_gap, self._at_waiting
        steps, uses = route(self._plan, frozenset(edge[0] for store in stores for edge in store))
        self._pending, begun = dict(uses), [*self._leaves]
        for node, what, group, outputs in steps:
            here = any((node, nr) in store for store in stores for nr in range(outputs))
            visits[group](node, what, (None,) * outputs) if here else self._leave(what)
        for parameter in begun:
            self._used(parameter)

    def _each_flow(self) -> Iterator[Flow]:
        for flow in self._flows:
            if self._connection is not None:
                self._connection.flow = flow
            yield flow

    def _explicit(self, upstream: tuple | None) -> bool:
        # whether the gradient has to be carried to an edge, as autograd's own is summed over samples there
        return upstream is not None and (self._is_leaf(upstream[0]) or self._plan.states.get(upstream[0], {}).get(upstream[1]) is SPLIT)

    def _concerns(self, flow: Flow, upstream: tuple) -> bool:
        return bool(self._plan.walk.reach[upstream[0]] & self._concerned[flow])

    def _wants(self, flow: Flow, upstream: tuple) -> bool:
        # the gradient goes its own way, in autograd, as far as it can
        return self._concerns(flow, upstream) and (not flow.is_gradient or self._explicit(upstream))

    def _arrived(self, flow: Flow, node: Node, nr: int, grads: tuple[Tensor | None, ...]) -> Columns:
        if not flow.is_gradient:
            return self._data[flow].pop((node, nr), {})
        return {} if grads[nr] is None else {0: grads[nr].unsqueeze(0)}

    def _is_leaf(self, node: Node) -> bool:
        return node in self._plan.walk.leaves

    def _at_unit(self, node: Node, unit: Unit, grads: tuple[Tensor | None, ...]) -> None:
        call, turn = unit.call, unit.arrangement
        refuse_released(call)
        edge, below, slot = (node, unit.nr), unit.below, call.outputs[0]
        grad = grads[unit.nr]
        if grad is None or grad._is_zerotensor():
            grad = torch.zeros((), dtype=slot.dtype, device=slot.device).expand(slot.shape)
        if call.derivatives is RANDOM and below is not None:
            call.slope = unit.slope(node)
        elif call.derivatives.reads_maxima:
            call.maxima = saved_maxima(unit.inside)
        call.scratch = {} if self._connection is None else None  # each flow says what it misses
        view = call if turn is None else BatchFirst(call, turn)
        grad = grad.reshape(slot.shape) if unit.base else grad
        grad = grad if turn is None else turn.front(grad)
        for flow in self._each_flow():
            value = {0: grad.unsqueeze(0)} if flow.is_gradient else self._data[flow].pop(edge, None)
            if value is None:
                continue
            if not flow.is_gradient and flow.crosses_gaps:
                # a sum with a tensor of higher precision hands its own on, which autograd changes back
                value = reshaped(cast(value, grad.dtype), slot.shape)
                value = value if turn is None else {s: turn.front(c, 1) for s, c in value.items()}
            use = Use(view, unit.parameters, value, grad, unit.layout)
            self._at_use(flow, unit, use)
            if below is None or not self._wants(flow, below):
                continue
            over = self._may_overwrite(flow, edge, unit, value)
            result = self._through(flow, unit, use, over)
            self.to_input(flow, unit, result, over or (flow.crosses_gaps and unit.is_ours and is_apart(result, value)))
            self._bear_at_unit(flow, unit, use)
        call.scratch = None
        self._leave(unit)
        self._reader.after_call(call)

    @staticmethod
    def _through(flow: Flow, unit: Unit, use: Use, over: bool = False) -> Any:
        if unit.call.moved:
            raise OverwrittenError(
                f"Other data were put into a parameter of {unit.call.path} after the forward pass (p.data = ..., or in place), or a frozen tensor in "
                "its place: autograd sees neither, or has kept copies, but the rule of the layer would. Change parameters after backward, or use a "
                "module for each."
            )
        return flow.through(use.call, use.value, use.grad, use.layout, over)

    def _may_overwrite(self, flow: Flow, edge: Edge, unit: Unit, value: Any) -> bool:
        # a rule of the library that multiplies columns by slopes may put the result in their place, if nobody else holds their memory
        if flow.is_gradient or not flow.crosses_gaps or unit.parameters or unit.split:
            return False
        elementwise = isinstance(unit.call.derivatives, ElementwiseDerivatives) and unit.is_ours
        return elementwise and self._own[flow, edge].issuperset(value)

    def to_input(self, flow: Flow, unit: Unit, value: Any, own: bool = False) -> None:
        """Hand a value to the input of a unit.

        Args:
            flow: The flow.
            unit: The unit.
            value: The value, samples first.
            own: Whether nobody else holds its memory.
        """
        if flow.crosses_gaps:
            value = value if unit.arrangement is None else {s: unit.arrangement.back(c, 1) for s, c in value.items()}
            value = reshaped(value, shape_of(unit.below))
        self.deposit(flow, unit.below, value, unit.arrives, own)

    def to_factor(self, flow: Flow, unit: Unit, name: str, columns: Columns) -> None:
        """Hand columns to a factor of a unit.

        Args:
            flow: The flow.
            unit: The unit.
            name: Name of the factor there: a parameter, or something that is computed from some.
            columns: ``{source: [V, N, *factor]}``.
        """
        if name in unit.parameters:
            self._reader.at_leaf(flow, unit.parameters[name], columns)
        else:
            self._deposit_split(flow, unit.split[name], columns)

    def _deposit_split(self, flow: Flow, edge: Edge, columns: Columns) -> None:
        self.deposit(flow, edge, {s: c.reshape(*c.shape[:2], *shape_of(edge)) for s, c in columns.items()})

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
                made = None if self._connection else MadeUse.of(use, name, unit, self._plan, flow, self._concerned)
                if made is None or not self._reader.at_made(flow, made):
                    self.deposit(flow, upstream, use.per_sample(name, shape_of(upstream)))

    def _at_shared(self, node: Node, unit: Unit, grads: tuple[Tensor | None, ...]) -> None:
        call, shape = unit.call, (unit.layout.samples, *unit.call.outputs[0].shape)
        refuse_released(call)
        call.scratch, view = {} if self._connection is None else None, BatchFirst(call, unit.arrangement)
        arrived = {flow: self._split[flow].pop((node, unit.nr), {}) for flow in self._flows}  # autograd's gradient is a sum
        grad = next((c[0] for flow, c in arrived.items() if flow.is_gradient and c), None)
        for flow in self._each_flow():
            value = {source: c.reshape(len(c), *shape) for source, c in arrived[flow].items()}
            if value:  # rules do not read the gradient where it is not carried
                given = next(iter(value.values())).new_full((), nan).expand(shape) if grad is None else grad.reshape(shape)
                use = Use(view, unit.parameters, value, given, unit.layout)
                self._at_use(flow, unit, use)
                if unit.below is not None and self._wants(flow, unit.below):
                    self._deposit_split(flow, unit.below, self._through(flow, unit, use))
        call.scratch = None
        self._leave(unit)
        self._reader.after_call(call)

    def _at_composite(self, node: Node, composite: Composite, grads: tuple[Tensor | None, ...]) -> None:
        # the columns of all flows are carried together
        arrived: dict[tuple[Flow, Hashable], dict[Edge, Tensor]] = {}
        for flow in self._each_flow():
            for edge in composite.given:
                found = self._arrived(flow, *edge, grads) if edge[0] is node else self._data[flow].pop(edge, {})
                for source, columns in found.items():
                    arrived.setdefault((flow, source), {})[edge] = columns
        inner, below, places = composite.pull_all(list(arrived.values()))
        for flow in self._each_flow():
            value = {source: place for (owner, source), place in zip(arrived, places, strict=True) if owner is flow}
            if not value:
                continue
            if self._connection is not None:
                self._connection.fail(f"{node.name()} is one fused operation. {unfused(node)}".removesuffix(". "))
            notes: dict[Hashable, Any] = {}  # the columns are the same for all parts
            for unit in composite.parts:
                turn = unit.arrangement
                columns = {source: inner[place] if turn is None else turn.front(inner[place], 1) for source, place in value.items()}
                # the rule of a product does not read the gradient, which is carried for those only that ask for it
                grad = columns[0][0] if flow.is_gradient else inner.new_full((), nan).expand(next(iter(columns.values())).shape[1:])
                view = unit.call if turn is None else BatchFirst(unit.call, turn)
                self._at_use(flow, unit, Use(view, unit.parameters, columns, grad, unit.layout, notes))
            for (edge, layout), send in zip(composite.below, below, strict=True):
                if self._wants(flow, edge):
                    self.deposit(flow, edge, {source: send(place) for source, place in value.items()}, layout)
        self._leave(composite)

    def _at_waiting(self, node: Node, waiting: Waiting, grads: tuple[Tensor | None, ...]) -> None:
        for flow in self._each_flow():
            value = self._arrived(flow, node, 0, grads)
            if value and self._wants(flow, waiting.to):
                self.deposit(flow, waiting.to, {source: waiting.take(columns) for source, columns in value.items()}, waiting.layout)
            self._data[flow][node, 0] = value

    def _at_gap(self, node: Node, gap: Gap, grads: tuple[Tensor | None, ...]) -> None:
        own = [self._split[flow].get((node, 0), {}).get(0) for flow in self._flows if flow.is_gradient]  # the gradient of each sample
        for flow in self._each_flow():
            if not flow.crosses_gaps:
                continue
            if self._connection is not None:
                self._connection.cross(node)
            wanted = [c is not None and self._wants(flow, n) for n, c in zip(gap.nexts, gap.crossings, strict=True)]
            data = {nr: self._arrived(flow, node, nr, grads) for nr, state in gap.states.items() if state is not SPLIT}
            parts = {nr: self._split[flow].pop((node, nr), {}) for nr, state in gap.states.items() if state is SPLIT}
            sources = dict.fromkeys(source for value in (*data.values(), *parts.values()) for source in value)
            for source in sources if any(wanted) else ():
                given = {nr: value[source] for nr, value in data.items() if source in value}
                if parts:
                    columns = {nr: split(c, gap.states[nr]) for nr, c in given.items()}
                    columns |= {nr: value[source] for nr, value in parts.items() if source in value}
                    if operation(node) == "Select":
                        self._send_selected(flow, source, gap, columns, 2)
                    else:
                        self._send(flow, source, gap, wanted, gap.call_split(columns), SPLIT)
                    continue
                self._send_data(flow, source, gap, wanted, given)
                masked = [w and c.way is Way.MASKED for w, c in zip(wanted, gap.crossings, strict=True)]
                if any(masked):
                    self._send(flow, source, gap, masked, gap.call_masked(given, masked), Way.MASKED)
            grad = grads[0] if not parts else own[0][0] if own and own[0] is not None else None
            if grad is not None:
                self._bear_at_gap(flow, gap, grad)
        self._leave(gap)

    def _bear_at_unit(self, flow: Flow, unit: Unit, use: Use) -> None:
        """Let be born what the second derivative of a unit adds.

        Args:
            flow: The flow.
            unit: The unit.
            use: Its use of parameters.
        """

    def _bear_at_gap(self, flow: Flow, gap: Gap, grad: Tensor) -> None:
        """Let be born what the second derivative of a gap adds.

        Args:
            flow: The flow.
            gap: The gap.
            grad: Gradient of its output; with a leading axis of samples where the columns are split.
        """

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
        if operation(gap.node) == "Select":
            self._send_selected(flow, source, gap, given, 1)
            return
        for i, columns in enumerate(gap.call(given)):
            if usable[i] and columns is not None:
                self.hand_on(flow, gap.nexts[i], {source: columns}, gap.crossings[i].returned)

    def _send_selected(self, flow: Flow, source: Hashable, gap: Gap, given: dict[int, Tensor], lead: int) -> None:
        """Call the node of ``x[i]``; where another ``x[j]`` has come before, add to what it has made.

        Args:
            flow: The flow.
            source: Source of the columns.
            gap: The gap.
            given: Output number, which is zero, to columns.
            lead: Number of their leading axes: two, if they are split.
        """
        edge, store = gap.nexts[0][:2], self._data if lead == 1 else self._split
        if source in self._own[flow, edge] and edge in store[flow]:
            dim = saved(gap.node, "dim")
            store[flow][edge][source].select(dim + lead * (dim >= 0), saved(gap.node, "index")).add_(given[0])
            return
        (columns,) = gap.call(given) if lead == 1 else gap.call_split(given)
        self.hand_on(flow, gap.nexts[0], {source: columns}, gap.crossings[0].returned if lead == 1 else None, own=True)

    def hand_on(self, flow: Flow, upstream: tuple[Node, int, torch.Size], columns: Columns, layout: Layout | None, own: bool = False) -> None:
        """Sum columns to the shape of an input that may have been broadcast, and hand them to its edge.

        Args:
            flow: The flow.
            upstream: Node, number and shape.
            columns: ``{source: [V, *full]}``; split, ``[V, N, *full]``, if there is no layout.
            layout: Where the samples lie in ``full``.
            own: Whether nobody else holds their memory.
        """
        edge, shape = upstream[:2], upstream[2]
        for source, given in columns.items():
            kept, sent = None if layout is None else after_sum(layout, given.shape[1:], shape), given
            if layout is not None and kept is None:
                sent = add_rows(given.movedim(1 + layout.axis, 1), layout).unsqueeze(2 + layout.axis)
            self.deposit(flow, edge, {source: sum_to(sent, shape, 2 if kept is None else 1)}, kept, own)

    def _send(self, flow: Flow, source: Hashable, gap: Gap, wanted: list[bool], returned: list[Tensor | None], way: Way) -> None:
        for upstream, crossing, use, columns in zip(gap.nexts, gap.crossings, wanted, returned, strict=True):
            if use and columns is not None and crossing.way is way:
                self.deposit(flow, upstream[:2], {source: columns})

    def deposit(self, flow: Flow, edge: Edge, value: Any, layout: Layout | None = None, own: bool = False) -> None:
        """Hand a value to an edge.

        Args:
            flow: The flow.
            edge: The edge.
            value: The value.
            layout: Where the samples lie in it; ``None`` if it is split.
            own: Whether nobody else holds its memory.
        """
        while not flow.crosses_gaps and isinstance(edge[0], HOOKED):  # full backward hooks of modules hand on what arrives
            edge = edge[0].next_functions[edge[1]]
        node, leaf = edge[0], self._is_leaf(edge[0])
        if not leaf and node not in self._plan.states:
            return
        if flow.crosses_gaps:  # as autograd does with gradients where precisions are mixed; uses of a parameter are added in single precision
            value = cast(value, tensor_at(edge).dtype if not leaf or self._connection else torch.promote_types(edge[0].variable.dtype, torch.float32))
        if flow.crosses_gaps and (leaf or self._plan.states[node].get(edge[1]) is SPLIT):
            if layout is not None:
                value, own = {source: split(columns, layout) for source, columns in value.items()}, False
            if leaf and node.variable not in self._pending:
                return
            if leaf and self._connection is not None:
                return self._reader.at_leaf(flow, node.variable, value)
            if leaf:
                self._leaves[node.variable] = edge
            store = self._split[flow]
        else:
            store = self._data[flow]
        if self._connection is None and flow.crosses_gaps:  # else autograd may hold it
            value = add_in_place(store.pop(edge, {}), value, self._own[flow, edge], own)
        store[edge] = flow.merge(store[edge], value) if edge in store else value

    def _leave(self, what: Unit | Composite | Waiting | Gap) -> None:
        """Note the uses of parameters at a node, where everything is done.

        Args:
            what: What stands for the node.
        """
        for unit in what.parts:
            for parameter in unit.parameters.values():
                self._used(parameter)
        for upstream in what.upstream:
            if upstream is not None and self._is_leaf(upstream[0]):  # the input itself is a parameter
                self._used(upstream[0].variable)

    def _used(self, parameter: Parameter) -> None:
        self._pending[parameter] = left = self._pending[parameter] - 1
        edge = None if left else self._leaves.pop(parameter, None)
        for flow in () if edge is None else self._flows:
            if columns := self._split[flow].pop(edge, None):
                self._reader.at_leaf(flow, parameter, cast(columns, parameter.dtype))
        if not left:
            self._reader.finish(parameter)
