"""Layers of RNNs, GRUs and LSTMs, whose steps are several nodes of the graph each: they are read like a single one, with one product for all steps.

A layer is recognized by its steps, each of which starts from the state of another one, while nothing else is made of what lies between them, and
nobody has seen it. Whatever looks different is followed node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import GRU, LSTM, RNN

from backpack.core.batches import nested_in
from backpack.core.calls import ModuleCall
from backpack.core.checkpoints import checkpointed
from backpack.core.graph import operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.leaves import way_to_leaf
from backpack.core.node_calls import LINEAR, Composite, NodeCall, States, Waiting, reads, unit_of
from backpack.core.recurrent_steps import Step, behind, is_slice, steps_to
from backpack.core.samples import Layout, rows_along
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.utils.lstm import LSTMSteps
from backpack.utils.recurrent import ElmanSteps, GRUSteps

_STATES = {RNN: ("Tanh", "Relu"), GRU: ("Add",), LSTM: ("Mul",)}


class Layer(NamedTuple):
    """A layer in one direction.

    Attributes:
        steps: Its steps, in the order in which they were computed.
        inside: Their nodes.
        states: The node that joins the states after all steps, if one does: ``[T, R, H]``.
        reverse: Whether the last step comes first there.
        packed: Whether sequences end at different steps, or might: then it joins ``[S, H]``, the rows of one step after those of the other.
        ends: Then, the node that joins the states after the last step of each sequence ``[N, H]``, if some end early, and one does.
    """

    steps: list[Step]
    inside: set[Node]
    states: Node | None
    reverse: bool
    packed: bool
    ends: Node | None

    @property
    def last(self) -> Node:
        """The node of the state after the last step ``[R, H]``."""
        return self.steps[-1].nodes["state"]

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each step."""
        return [shape_of(step.state)[0] for step in self.steps]

    def join(self, read: Callable[[Step], Tensor]) -> Tensor:
        """Join tensors of all steps.

        Args:
            read: What to take of a step ``[R, ...]``.

        Returns:
            ``[T, R, ...]``, or ``[S, ...]`` if sequences are packed.
        """
        return (torch.cat if self.packed else torch.stack)(list(map(read, self.steps)))

    def turn(self, columns: Tensor, turned: bool) -> Tensor:
        """Put the last step first, or back in its place.

        Args:
            columns: ``[V, T, R, ...]`` or ``[V, S, ...]``.
            turned: Whether the last step comes first there.

        Returns:
            Likewise, the other way round.
        """
        return torch.cat(columns.split(self.sizes[:: -1 if turned else 1], 1)[::-1], 1) if self.packed else columns.flip(1)

    def layout(self, rows: Layout, turned: bool = False) -> Layout:
        """Say where the samples lie in tensors of all steps.

        Args:
            rows: Where they lie in those of one step, in which all sequences have begun, and none has ended.
            turned: Whether the last step comes first.

        Returns:
            The layout.
        """
        parts = [rows.labels[:size] for size in (self.sizes[::-1] if turned else self.sizes)] if self.packed else [rows.labels]
        return Layout(int(not self.packed), sum(parts, ()), rows.samples)

    def rows(self, states: States) -> Layout | None:
        """Find out where the samples lie in tensors of one step.

        Args:
            states: Where they lie in the outputs of nodes.

        Returns:
            The layout; ``None`` if they lie elsewhere.
        """
        sizes, labels = self.sizes, [-1] * max(self.sizes)
        steps = (sizes[::-1] if self.reverse else sizes) if self.packed else sizes[:1]
        places = [(self.last, 0, sizes[-1:]), (self.states, int(not self.packed), steps), (self.ends, 0, [max(sizes)])]
        for node, axis, parts in places:
            state = None if node is None else states.get(node, {}).get(0)
            layout = rows_along(axis, sum(parts), state) if isinstance(state, Layout) else None
            if node is not None and layout is None:
                return None
            for start, stop in pairwise(accumulate(parts, initial=0)) if layout else ():
                labels[: stop - start] = map(max, labels, layout.labels[start:stop])
        return Layout(0, tuple(labels), states[self.last][0].samples)


def _given(layer: Layer) -> tuple[Edge, bool] | None:
    """Find out where the terms of the inputs come from.

    Args:
        layer: The layer.

    Returns:
        Edge to the terms of all steps, joined, to nobody if they need no gradient; whether the last step comes first there. ``None`` if they are not
            joined.
    """
    edges, sizes = [step.edges["given?"] for step in layer.steps], layer.sizes
    node = edges[0][0]
    if node is None:
        return ((None, 0), False) if all(other is None for other, _ in edges) else None
    source, order = node.next_functions[0], list(range(len(edges)))
    if operation(node) == "Unbind" and saved(node, "dim") == 0 and len(outputs_of(node)) == len(edges):
        numbers = [nr for other, nr in edges if other is node]
        return (source, numbers != order) if numbers in (order, order[::-1]) else None
    if None in (upstream for upstream, _ in edges) or any(upstream.next_functions != (source,) for upstream, _ in edges):
        return None
    for turned in (False, True):
        starts = accumulate(sizes[::-1] if turned else sizes, initial=0)
        if all(is_slice(upstream, start) for (upstream, _), start in zip(edges[::-1] if turned else edges, starts, strict=False)):
            return (source, turned) if shape_of(source)[0] == sum(sizes) else None
    return None


def _is_closed(layer: Layer, walk: Walk) -> bool:
    """Say whether nothing else is made of what lies inside, and all that is read was saved, in the precision of the result.

    Args:
        layer: The layer, of whose last state anything may be made.
        walk: The graph.

    Returns:
        Whether it is so.
    """
    steps, inside = layer.steps, layer.inside
    edges = Counter(upstream for user in {layer.states, layer.ends, *inside} - {None} for upstream, _ in user.next_functions)
    types = {tensor_at(edge).dtype for edge in ((steps[0].nodes["product"], 0), steps[0].state, steps[-1].state)}
    weights = [step.nodes["product"].next_functions[step.factors["weight"]][0] for step in steps]
    if not types <= {torch.float32, torch.float64} or len(types) > 1 or None in weights or any(map(checkpointed, inside)):
        return False
    return all(walk.consumers[inner] == edges[inner] for inner in inside if inner is not layer.last)


def _made_by(call: ModuleCall, outputs: list[Node], walk: Walk) -> set[Node]:
    """Collect the nodes that a call has made.

    Args:
        call: The call.
        outputs: Nodes of its outputs.
        walk: The graph.

    Returns:
        The nodes; none if the call was connected to anything but its inputs and its own parameters.
    """
    given = {edge for slot in call.tensor_inputs for edge in (slot.edge, slot.base_edge)} | {(t.grad_fn, t.output_nr) for t in nested_in(call)}
    own, made, stack = set(map(id, call.module._parameters.values())), set(outputs), list(outputs)
    while stack:
        for edge in stack.pop().next_functions:
            node = edge[0]
            if node in walk.leaves and id(walk.leaves[node]) not in own and edge not in given:
                return set()
            if node is not None and node not in made and node not in walk.leaves and edge not in given:
                made.add(node)
                stack.append(node)
    return made


def _layers(walk: Walk) -> dict[Node, Layer]:
    """Find the layers that torch itself has computed: tensors of a loop that is written out may have hooks, which act on the gradient.

    Args:
        walk: The graph.

    Returns:
        The node of the state after the last step to the layer.
    """
    found = {}
    for call in walk.calls:
        names = next((names for kind, names in _STATES.items() if issubclass(call.kind, kind) and call.kind.forward is kind.forward), ())
        if not names or "forward" in vars(call.module):
            continue
        made = _made_by(call, [node for node, marks in walk.marks.items() if any(mark.call is call for mark in marks)], walk)
        products = [node for node in made if operation(node) in ("Addmm", "Mm")]
        before = {behind(edge)[0] for node in products for edge in node.next_functions}
        joins = {node.next_functions: node for node in made if operation(node) in ("Stack", "Cat") and saved(node, "dim") == 0}
        for node in made - before:
            steps = steps_to(node) if operation(node) in names else []
            if len(steps) > 1 and (layer := _layer(steps, joins)).inside <= made:
                found[node] = layer
    return found


def _layer(steps: list[Step], joins: dict[tuple[Edge, ...], Node]) -> Layer:
    """Make a layer of steps.

    Args:
        steps: The steps.
        joins: Edges to nodes that join what lies there.

    Returns:
        The layer.
    """
    states, sizes = tuple(step.state for step in steps), [shape_of(step.state)[0] for step in steps]
    reverse = states[::-1] in joins
    joined, parts = joins.get(states[::-1] if reverse else states), [edge[0] for step in steps for edge in step.edges.values()]
    packed = len({*sizes}) > 1 or any(node is not None and operation(node) in ("Slice", "Cat") for node in (joined, *parts))
    ended = [(state, after) for state, (size, after) in zip(states, pairwise(sizes), strict=False) if size > after][::-1]
    ends = next((join for edges, join in joins.items() if packed and ended and _are_ends(edges, states[-1], ended)), None)
    inside = {inner for step in steps for inner in step.nodes.values()} | {step.edges["given?"][0] for step in steps}
    between = [edge[0] for step in steps[1:] for edge in (step.before, step.cell_before)] if packed else []
    return Layer(steps, {*inside, *between, *(edge[0] for edge in (ends.next_functions if ends else ()))} - {None}, joined, reverse, packed, ends)


def _are_ends(edges: tuple[Edge, ...], last: Edge, ended: list[tuple[Edge, int]]) -> bool:
    # whether they lead to the last state, and to the rows of the others of which there are more than in the next one, last ones first
    (first, *others), (states, starts) = edges, zip(*ended, strict=True)
    if first != last or len(others) != len(ended):
        return False
    return all(is_slice(node, start) and node.next_functions == (state,) for (node, _), state, start in zip(others, states, starts, strict=True))


@reads("Tanh", "Relu", "Add", "Mul")
def _recurrent_layer(node: Node, states: States, walk: Walk) -> Composite | None:
    """Read a layer of an RNN, a GRU or an LSTM in one direction.

    Args:
        node: The node of the state after the last step, ``[R, H]``; states after all steps, and the last ones of sequences that end before, may be
            used, too, where they are joined.
        states: Where the samples lie.
        walk: The graph.

    Returns:
        The composite; ``None`` if it is something else, the samples do not lie along ``R``, or a pass with ``create_graph=True`` needs every node.
    """
    if walk.recurrent is None:
        walk.recurrent = {} if walk.connected else _layers(walk)
    if node not in walk.recurrent:
        return None
    layer = walk.recurrent[node]
    steps, sizes, found, layout = layer.steps, layer.sizes, _given(layer), layer.rows(states)
    if found is None or layout is None or not _is_closed(layer, walk):
        return None
    (given, turned), products, joined, size = found, steps[0].nodes["product"], layer.layout(layout), sizes[-1]

    rows = (sum(sizes),) if layer.packed else (len(steps), size)
    like = torch.empty(*rows, shape_of((products, 0))[-1], dtype=tensor_at((node, 0)).dtype, device="meta")
    call = NodeCall(products, LINEAR, like, input0=partial(layer.join, Step.previous), weight=partial(_weight, steps))
    unit = unit_of(products, call, steps[0].factors, joined, walk, turned=True)
    ways = [] if unit is None or unit.split else [_ways(step) for step in steps]
    if not ways or any([way[-1:] for way in some] != [way[-1:] for way in ways[0]] for some in ways):
        return None
    unit.inside |= layer.inside.union(*(way for some in ways for way in some))

    @torch.no_grad()  # what it computes is overwritten
    def pull(columns: list[Tensor]) -> tuple[Tensor, list[Callable[[slice], Tensor]]]:
        inner, outer, *firsts = _pull_back(layer, *columns)
        values = [layer.turn(outer, False) if turned else outer, *firsts]
        return inner, [lambda part, value=value: value[part] for value, (edge, _) in zip(values, ends, strict=True) if walk.reach.get(edge[0])]

    first = layout._replace(labels=layout.labels[: sizes[0]])
    ends = [(given, layer.layout(layout, turned)), (steps[0].before, first), (steps[0].cell_before, first)][: 2 if steps[0].cell[0] is None else 3]
    below = [(edge, to) for edge, to in ends if walk.reach.get(edge[0])]
    own, waiting = layout._replace(labels=layout.labels[:size]), {}
    if layer.states is not None:
        start = 0 if layer.reverse else sum(sizes[:-1]) if layer.packed else len(steps) - 1
        take = partial(torch.narrow, dim=1, start=start, length=size) if layer.packed else partial(torch.select, dim=1, index=start)
        waiting[layer.states] = Waiting(layer.layout(layout, layer.reverse), (node, 0), own, take)
    if layer.ends is not None:
        waiting[layer.ends] = Waiting(layout, (node, 0), own, partial(torch.narrow, dim=1, start=0, length=size))
    return Composite([unit], pull, below, [(node, 0), *((other, 0) for other in waiting)], waiting, layer.inside)


def _weight(steps: list[Step]) -> Tensor:
    return next(found for step in steps if (found := step.saved("product", "mat2")) is not None).mT


def _ways(step: Step) -> list[list[Node]]:
    """Return the nodes between a product and the leaves of its factors.

    Args:
        step: The step.

    Returns:
        A list for each factor, empty if it needs no gradient, or does not come from a leaf.
    """
    edges = {name: step.nodes["product"].next_functions[number] for name, number in step.factors.items()}
    return [(way_to_leaf(edge, turned=name == "weight") or []) if edge[0] is not None else [] for name, edge in edges.items()]


def _pull_back(layer: Layer, last: Tensor, *waiting: Tensor) -> tuple[Tensor, ...]:
    """Carry columns through the recursion.

    Args:
        layer: The layer.
        last: At the state after the last step ``[V, R, H]``.
        *waiting: At the states after all steps, and those after the last step of each sequence ``[V, N, H]``, where they are joined; the last ones of
            the first are in ``last``, too, and so are the first ones of the others.

    Returns:
        Columns at the products with previous states and at the terms of the inputs, of all steps; at the first state, and cell, ``[V, R, H]``.
    """
    sizes, states, size = layer.sizes, None, last.shape[1]
    if layer.states is not None:
        columns = layer.turn(waiting[0], True) if layer.reverse else waiting[0]
        states = [*(columns.split(sizes, 1) if layer.packed else columns.unbind(1))[:-1], None]
    if layer.ends is not None:
        last = torch.cat([last, waiting[-1][:, size:]], 1)
    elif max(sizes) > size:
        last = torch.cat([last, last.new_zeros(()).expand(len(last), max(sizes) - size, last.shape[2])], 1)

    def read(*names: tuple[str, str]) -> list[Tensor]:
        return [torch.cat([step.saved(*name) for step in layer.steps]) for name in names]

    if "cell" in layer.steps[0].nodes:
        gates = torch.stack(read(*((name, "result") for name in ("in", "forget", "new", "out"))), 1)
        every, ends = LSTMSteps(sizes, gates, *read(("kept", "other"), ("squashed", "result"))), [last, last.new_zeros(()).expand_as(last)]
    elif "reset" in layer.steps[0].nodes:
        every = GRUSteps(sizes, *read(("reset", "result"), ("update", "result"), ("new", "result"), ("change", "self"), ("reset product", "self")))
        ends = [last]
    else:
        every, ends = ElmanSteps(sizes, *read(("state", "result")), operation(layer.last) == "Relu"), [last]
    inner, outer, *firsts = every.pull_back(_weight(layer.steps), ends, states)
    return (inner.flatten(1, -2), outer.flatten(1, -2), *firsts) if layer.packed else (inner, outer, *firsts)
