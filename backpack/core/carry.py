"""Carrying columns through a planned backward pass, in hooks that run right before autograd runs a node.

When the hook of a node fires, all its consumers have run, so that the gradient of its output, and the columns that arrived there, are complete.
What the columns are is the business of a ``Flow``; what is read off at parameters that of a ``Reader``: both are handed in from above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.calls import RANDOM, Edge, Mark, ModuleCall, recording
from backpack.core.graph import SPLIT, Gap, Way, call_node, outputs_of, shape_of
from backpack.core.plan import Plan
from backpack.core.samples import Layout, add_rows, blocks, first_axis, numel, split, sum_to
from backpack.core.walk import Need, Unit
from backpack.utils.errors import NotRecordedError

Columns = dict[Hashable, Tensor]
"""Columns of each source, ``[V, ...]``. Columns of one source add where branches meet; those of different sources stand side by side."""


class Flow(ABC):
    """What travels backward beside the gradient."""

    crosses_gaps: bool = True
    is_gradient: bool = False
    needs: Need = Need.COLUMNS

    @abstractmethod
    def start(self, call: ModuleCall, grad: Tensor) -> Any:
        """Return the value at the input of a loss.

        Args:
            call: The loss call.
            grad: Gradient that arrives at the loss value.
        """

    @abstractmethod
    def through(self, call: ModuleCall, value: Any, grad: Tensor, layout: Layout) -> Any:
        """Map a value from the output of a module to its input.

        Args:
            call: The module call, samples first.
            value: Value at the output, samples first.
            grad: Gradient that arrives at the output ``[R, *out]``.
            layout: Says to which sample each of the ``R`` rows belongs.
        """

    def merge(self, old: Any, new: Any) -> Any:
        """Unite values that arrive from two consumers.

        Args:
            old: Value that arrived before.
            new: Value that arrives now.

        Returns:
            Columns added source by source.
        """
        return {**old, **{source: old[source] + c if source in old else c for source, c in new.items()}}

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Refuse a plan that the flow cannot follow exactly.

        Args:
            plan: The plan.
        """


class Use:
    """One use of parameters by a module call, samples first.

    Attributes:
        call: The call.
        parameters: Name to parameter.
        value: What the flow carries at the output: for columns ``{source: [V, R, *out]}``.
        grad: Gradient at the output ``[R, *out]``.
        layout: Says to which of the ``N`` samples each of the ``R`` rows belongs.
    """

    __slots__ = ("call", "grad", "layout", "parameters", "value")

    def __init__(self, call: ModuleCall, parameters: dict[str, Parameter], value: Any, grad: Tensor, layout: Layout) -> None:
        self.call, self.parameters, self.value, self.grad, self.layout = call, parameters, value, grad, layout


class Reader(ABC):
    """Reads quantities off at parameters."""

    @abstractmethod
    def at_call(self, flow: Flow, use: Use) -> None:
        """Take note of a use by a module call.

        Args:
            flow: The flow.
            use: The use.
        """

    @abstractmethod
    def at_leaf(self, flow: Flow, parameter: Parameter, columns: Columns) -> None:
        """Take note of a use outside all rules.

        Args:
            flow: The flow.
            parameter: The parameter.
            columns: ``{source: [V, N, *parameter]}``.
        """

    @abstractmethod
    def finish(self, parameter: Parameter) -> None:
        """Write the quantities of a parameter whose last use has been noted.

        Args:
            parameter: The parameter.
        """

    @abstractmethod
    def after_call(self, call: ModuleCall) -> None:
        """Take note that everything at a call is done.

        Args:
            call: The call.
        """


class BatchFirst:
    """A call whose sample axis, of inputs and output, is moved to the front."""

    __slots__ = ("_axis", "_call")

    def __init__(self, call: ModuleCall, axis: int) -> None:
        self._call, self._axis = call, axis

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._call, name)
        moves = isinstance(value, Tensor) and (name == "output" or (name.startswith("input") and name[5:].isdigit()))
        return value.movedim(self._axis, 0) if moves else value


class Carry:
    """Hooks for one backward pass."""

    def __init__(self, plan: Plan, flows: list[Flow], reader: Reader) -> None:
        self._plan, self._flows, self._reader = plan, flows, reader
        self._pending = dict(plan.uses)
        self._data: dict[tuple[Flow, Edge], Any] = {}
        self._split: dict[tuple[Flow, Edge], Columns] = {}

    def install(self) -> list[Any]:
        """Register the hooks.

        Returns:
            Handles that remove them.
        """
        plan, handles = self._plan, []
        for node, mark in plan.losses.items() if any(not flow.is_gradient for flow in self._flows) else ():
            handles.append(node.register_prehook(self._hook(self._at_loss, node, mark)))
        for node, unit in plan.units.items():
            handles.append(node.register_prehook(self._hook(self._at_unit, node, unit)))
        only_gradient = all(flow.is_gradient for flow in self._flows)
        for node, gap in plan.gaps.items():
            if not only_gradient or any(self._explicit(n) for n in gap.nexts):
                handles.append(node.register_prehook(self._hook(self._at_gap, node, gap)))
        return handles

    def peek(self, flow: Flow | None, edge: Edge) -> Any:
        """Return what a flow carries at an edge, without taking it.

        Args:
            flow: The flow, or ``None``.
            edge: The edge.

        Returns:
            The value; ``None`` if there is none.
        """
        return self._data.get((flow, edge))

    @staticmethod
    def _hook(run: Callable, node: Node, what: Any) -> Callable:
        def hook(grads: tuple[Tensor | None, ...]) -> None:
            if torch.is_grad_enabled():  # with create_graph=True
                with torch.no_grad():
                    run(node, what, grads)
            else:
                run(node, what, grads)

        return hook

    def _explicit(self, upstream: tuple | None) -> bool:
        """Whether the gradient has to be carried to an edge, because autograd's own is summed over samples there.

        Args:
            upstream: Next edge of a gap.

        Returns:
            Whether it is split, or the leaf of a parameter.
        """
        return upstream is not None and (self._is_leaf(upstream[0]) or self._plan.states[upstream[0]].get(upstream[1]) is SPLIT)

    def _is_leaf(self, node: Node) -> bool:
        return not node.next_functions and hasattr(node, "variable")

    # --------------------------------------------------------------------------------------------------------------- nodes
    def _at_loss(self, node: Node, mark: Mark, grads: tuple[Tensor | None, ...]) -> None:
        call, grad = mark.call, grads[mark.nr]
        self._refuse_released(call)
        before, recording.on = recording.on, False  # the loss may be evaluated again
        try:
            for flow in self._flows:
                if not flow.is_gradient and grad is not None:
                    self._deposit(flow, call.inputs[0].edge, Way.DATA, flow.start(call, grad), first_axis(call.inputs[0].shape[0]))
        finally:
            recording.on = before
        self._reader.after_call(call)

    def _at_unit(self, node: Node, unit: Unit, grads: tuple[Tensor | None, ...]) -> None:
        call, layout = unit.call, unit.layout
        self._refuse_released(call)
        edge, slot, axis = (node, unit.nr), call.outputs[0], layout.axis
        grad = grads[unit.nr]
        if grad is None:
            grad = torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device)
        if call.derivatives is RANDOM and unit.below is not None:
            call.slope = self._slope(node, unit)
        view = BatchFirst(call, axis) if axis else call
        arranged = grad.reshape(slot.shape).movedim(axis, 0) if unit.base or axis else grad
        for flow in self._flows:
            value = {0: arranged[None]} if flow.is_gradient else self._data.pop((flow, edge), None)
            if value is None:
                continue
            if not flow.is_gradient and flow.crosses_gaps and (unit.base or axis):
                value = {s: c.reshape(len(c), *slot.shape).movedim(1 + axis, 1) for s, c in value.items()}
            self._reader.at_call(flow, Use(view, unit.parameters, value, arranged, layout))
            below = unit.below
            if below is None or (flow.is_gradient and not self._explicit(below)):
                continue
            value = flow.through(view, value, arranged, layout)
            if flow.crosses_gaps:
                shape = shape_of(below)
                value = {s: c.movedim(1, 1 + axis).reshape(len(c), *shape) for s, c in value.items()}
            self._deposit(flow, below, Way.DATA, value, unit.arrives)
        for parameter in unit.parameters.values():
            self._used(parameter)
        self._reader.after_call(call)

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
        for flow in self._flows:
            if not flow.crosses_gaps:
                continue
            wanted = [c is not None and (not flow.is_gradient or self._explicit(n)) for n, c in zip(gap.nexts, gap.crossings, strict=True)]
            data = {
                nr: ({} if grads[nr] is None else {0: grads[nr][None]}) if flow.is_gradient else self._data.pop((flow, (node, nr)), {})
                for nr, state in gap.states.items()
                if state is not SPLIT
            }
            parts = {nr: self._split.pop((flow, (node, nr)), {}) for nr, state in gap.states.items() if state is SPLIT}
            sources = dict.fromkeys(source for value in (*data.values(), *parts.values()) for source in value)
            for source in sources if any(wanted) else ():
                given = {nr: value[source] for nr, value in data.items() if source in value}
                if parts:
                    columns = {nr: split(c, gap.states[nr]) for nr, c in given.items()}
                    columns |= {nr: value[source] for nr, value in parts.items() if source in value}
                    self._send(flow, source, gap, wanted, self._call_split(gap, columns), SPLIT)
                    continue
                self._send_data(flow, source, gap, wanted, given)
                if any(w and c.way is Way.MASKED for w, c in zip(wanted, gap.crossings, strict=True)):
                    self._send(flow, source, gap, wanted, self._call_masked(gap, given), Way.MASKED)
        for upstream, crossing in zip(gap.nexts, gap.crossings, strict=True):
            if upstream is not None and crossing is not None and self._is_leaf(upstream[0]):
                self._used(upstream[0].variable)

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
        for i, columns in enumerate(call_node(gap.node, self._full(gap, given))):
            if not usable[i] or columns is None:
                continue
            crossing, shape = gap.crossings[i], gap.nexts[i][2]
            if crossing.way is Way.DATA:
                self._deposit(flow, gap.nexts[i][:2], Way.DATA, {source: sum_to(columns, shape, 1)}, crossing.arrives)
            else:
                axis = crossing.returned.axis
                rows = add_rows(columns.movedim(1 + axis, 1), crossing.returned).unsqueeze(2 + axis)
                self._deposit(flow, gap.nexts[i][:2], SPLIT, {source: sum_to(rows, shape, 2)}, None)

    def _send(self, flow: Flow, source: Hashable, gap: Gap, wanted: list[bool], returned: list[Tensor | None], way: Way) -> None:
        for upstream, crossing, use, columns in zip(gap.nexts, gap.crossings, wanted, returned, strict=True):
            if use and columns is not None and crossing.way is way:
                self._deposit(flow, upstream[:2], SPLIT, {source: columns}, None)

    @staticmethod
    def _full(gap: Gap, columns: dict[int, Tensor]) -> list[Tensor | None]:
        return [columns.get(nr) for nr in range(outputs_of(gap.node))]

    def _call_split(self, gap: Gap, columns: dict[int, Tensor]) -> list[Tensor | None]:
        """Call a gap node with split columns.

        Args:
            gap: The gap.
            columns: Output number to ``[V, N, *shape]``.

        Returns:
            For each next edge ``[V, N, *shape]``, or ``None``.
        """
        lead = next(iter(columns.values())).shape[:2]
        returned = call_node(gap.node, self._full(gap, {nr: c.flatten(0, 1) for nr, c in columns.items()}))
        return [None if c is None or n is None else sum_to(c.unflatten(0, lead), n[2], 2) for c, n in zip(returned, gap.nexts, strict=True)]

    def _call_masked(self, gap: Gap, given: dict[int, Tensor]) -> list[Tensor | None]:
        """Split columns by masks, block of samples by block, and call a gap node with them.

        Args:
            gap: The gap.
            given: Output number to ``[V, *shape]``.

        Returns:
            For each next edge ``[V, N, *shape]``, or ``None``.
        """
        samples = next(layout.samples for layout in gap.states.values())
        size = sum(numel(c.shape) for c in given.values())
        rows = [self._call_split(gap, {nr: split(c, gap.states[nr], block) for nr, c in given.items()}) for block in blocks(samples, size)]
        return [None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*rows, strict=True)]

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
        if flow.crosses_gaps and (leaf or self._plan.states[node].get(edge[1]) is SPLIT):
            if way is Way.DATA:
                value = {source: split(columns, layout) for source, columns in value.items()}
            if leaf:
                if node.variable in self._pending:
                    self._reader.at_leaf(flow, node.variable, value)
                return
            store = self._split
        else:
            store = self._data
        key = (flow, edge)
        store[key] = flow.merge(store[key], value) if key in store else value

    def _used(self, parameter: Parameter) -> None:
        self._pending[parameter] -= 1
        if not self._pending[parameter]:
            self._reader.finish(parameter)

    @staticmethod
    def _refuse_released(call: ModuleCall) -> None:
        if call.released:
            raise NotRecordedError(
                f"What {call.path} had recorded was given back after an earlier backward pass over this graph. Call that one with retain_graph=True."
            )
