"""Layers of RNNs, GRUs and LSTMs, whose steps are several nodes of the graph each: they are read like a single one, with one product for all steps.

A step is recognized by its nodes; a layer by its steps, each of which starts from the state of another one, while nothing else is made of what lies
between them, and nobody has seen it. Whatever looks different is followed node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import GRU, LSTM, RNN

from backpack.core.batches import nested_in
from backpack.core.calls import ModuleCall
from backpack.core.checkpoints import checkpointed
from backpack.core.graph import operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.node_calls import LINEAR, Composite, NodeCall, Waiting, reads, unit_of, way_to_leaf
from backpack.core.samples import Layout, settle
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.utils.lstm import LSTMSteps
from backpack.utils.recurrent import ElmanSteps, GRUSteps

# name, operation, number of the output, and what it is made of: other nodes, or edges, by name; what ends in "?" may need no gradient
_ELMAN = ("state", "Tanh Relu", 0, ("sum", "Add", 0, "product", "given?"))
_PRODUCTS, _TERMS = ([(name, "UnsafeSplit", gate, edge) for gate in range(3)] for name, edge in (("products", "product"), ("terms?", "given?")))
_RESET, _UPDATE = ((name, "Sigmoid", 0, (f"{name} sum", "Add", 0, _PRODUCTS[gate], _TERMS[gate])) for gate, name in enumerate(("reset", "update")))
_NEW = ("new", "Tanh", 0, ("new sum", "Add", 0, _TERMS[2], ("reset product", "Mul", 0, _PRODUCTS[2], _RESET)))
_GRU = ("state", "Add", 0, ("change", "Mul", 0, ("difference", "Sub", 0, "before?", _NEW), _UPDATE), _NEW)
_PARTS = [("parts", "UnsafeSplit", gate, ("sum", "Add", 0, "product", "given?")) for gate in range(4)]
_IN, _FORGET, _CELL, _OUT = ((name, "Tanh" if name == "new" else "Sigmoid", 0, _PARTS[i]) for i, name in enumerate(("in", "forget", "new", "out")))
_KEPT_AND_ADDED = ("cell", "Add", 0, ("kept", "Mul", 0, _FORGET, "cell before?"), ("added", "Mul", 0, _IN, _CELL))
_LSTM = ("state", "Mul", 0, _OUT, ("squashed", "Tanh", 0, _KEPT_AND_ADDED))
_PATTERNS = {"Tanh": (1, _ELMAN), "Relu": (1, _ELMAN), "Add": (3, _GRU), "Mul": (4, _LSTM)}  # operation of a state to number of gates, and what it is
_STATES = {RNN: ("Tanh", "Relu"), GRU: ("Add",), LSTM: ("Mul",)}


class Step(NamedTuple):
    """A step of a layer.

    Attributes:
        nodes: Its nodes, by name.
        edges: Edges from it to others: to the product with the state before, to the term of the input and the cell before, if they need a gradient.
    """

    nodes: dict[str, Node]
    edges: dict[str, Edge]

    @property
    def state(self) -> Edge:
        """Edge to the state after the step."""
        return self.nodes["state"], 0

    @property
    def cell(self) -> Edge:
        """Edge to the cell after the step, to nobody if there is none."""
        return self.nodes.get("cell"), 0

    @property
    def cell_before(self) -> Edge:
        """Edge to the cell before the step, likewise."""
        return self.edges.get("cell before?", (None, 0))

    @property
    def before(self) -> Edge:
        """Edge to the state before the step."""
        return self.nodes["product"].next_functions[int(self.has_bias)]

    @property
    def has_bias(self) -> bool:
        """Whether something is added to the product."""
        return operation(self.nodes["product"]) == "Addmm"

    @property
    def factors(self) -> dict[str, int]:
        """Weight and bias of the product, and which of its next edges is theirs."""
        return {"weight": 2, "bias": 0} if self.has_bias else {"weight": 1}

    def saved(self, node: str, name: str = "result") -> Tensor:
        """Read what a node has saved.

        Args:
            node: Name of the node.
            name: Name of the tensor.

        Returns:
            The tensor.
        """
        return saved(self.nodes[node], name)

    def previous(self) -> Tensor:
        """Read the state before the step.

        Returns:
            ``[R, H]``.
        """
        return self.saved("product", "mat1" if self.has_bias else "self")


class Layer(NamedTuple):
    """A layer in one direction.

    Attributes:
        steps: Its steps, in the order in which they were computed.
        inside: Their nodes.
        stack: The node that stacks the states after all steps, if one does.
        reverse: Whether the last step comes first there.
    """

    steps: list[Step]
    inside: set[Node]
    stack: Node | None
    reverse: bool


def _matches(edge: Edge, pattern: tuple | str, step: Step) -> bool:
    """Compare a part of the graph with a pattern.

    Args:
        edge: Edge to the part.
        pattern: The pattern.
        step: Takes the nodes and edges that are found.

    Returns:
        Whether they agree.
    """
    if isinstance(pattern, str):
        return (edge[0] is not None or pattern.endswith("?")) and step.edges.setdefault(pattern, edge) == edge
    (name, names, number, *parts), (node, nr) = pattern, edge
    if node is None:  # what is made of it needs no gradient either
        return name.endswith("?") and name not in step.nodes and all(_matches(edge, part, step) for part in parts)
    if nr != number or operation(node) not in names.split() or step.nodes.setdefault(name, node) is not node:
        return False
    if (names in ("Add", "Sub") and saved(node, "alpha") != 1) or (names == "UnsafeSplit" and not _is_even(node)):
        return False
    return len(parts) == len(node.next_functions) and all(map(partial(_matches, step=step), node.next_functions, parts))


def _is_even(node: Node) -> bool:
    return saved(node, "dim") in (1, -1) and len({shape_of((node, nr)) for nr in range(outputs_of(node))}) == 1


def _step(edge: Edge) -> Step | None:
    """Read a step.

    Args:
        edge: Edge to the state after it.

    Returns:
        The step; ``None`` if it is something else.
    """
    step = Step({}, {})
    gates, pattern = _PATTERNS.get(operation(edge[0]) if edge[0] is not None else "", (0, None))
    if not gates or not _matches(edge, pattern, step):
        return None
    node, number = step.edges["product"]
    step.nodes["product"] = node
    if shape_of((node, number))[-1:] != (gates * shape_of(edge)[-1],):
        return None
    if number or operation(node) not in ("Addmm", "Mm") or (step.has_bias and (saved(node, "alpha") != 1 or saved(node, "beta") != 1)):
        return None
    return step if step.edges.get("before?", step.before) == step.before else None


def _steps(node: Node) -> list[Step]:
    """Read the steps that lead to a state.

    Args:
        node: The node of the state.

    Returns:
        The steps in the order in which they were computed; none if their cells belong to others.
    """
    found, edge = [], (node, 0)
    while (step := _step(edge)) is not None:
        if found and found[0].cell_before != step.cell:
            return []
        found.insert(0, step)
        edge = step.before
    return found


def _given(steps: list[Step]) -> tuple[Edge, bool] | None:
    """Find out where the terms of the inputs come from.

    Args:
        steps: The steps, in the order in which they were computed.

    Returns:
        Edge to the terms of all steps ``[T, R, G H]``, to nobody if they need no gradient; whether the last step comes first there. ``None`` if they
            are not stacked.
    """
    edges = [step.edges["given?"] for step in steps]
    node = edges[0][0]
    if node is None:
        return ((None, 0), False) if all(other is None for other, _ in edges) else None
    if operation(node) != "Unbind" or saved(node, "dim") != 0 or outputs_of(node) != len(steps):
        return None
    numbers = [nr for other, nr in edges if other is node]
    order = list(range(len(steps)))
    return (node.next_functions[0], numbers != order) if numbers in (order, order[::-1]) else None


def _is_closed(stack: Node | None, steps: list[Step], inside: set[Node], walk: Walk) -> bool:
    """Say whether nothing else is made of what lies inside, and all that is read was saved, in the precision of the result.

    Args:
        stack: The node that stacks the states, if one does.
        steps: The steps, of which the last one may be used in any way.
        inside: Their nodes.
        walk: The graph.

    Returns:
        Whether it is so.
    """
    users, last = inside if stack is None else {stack, *inside}, steps[-1].nodes["state"]
    edges = Counter(upstream for user in users for upstream, _ in user.next_functions)
    types = {tensor_at(edge).dtype for edge in ((steps[0].nodes["product"], 0), steps[0].state, steps[-1].state)}
    weights = [step.nodes["product"].next_functions[step.factors["weight"]][0] for step in steps]
    if not types <= {torch.float32, torch.float64} or len(types) > 1 or None in weights or any(map(checkpointed, inside)):
        return False
    return all(walk.consumers[inner] == edges[inner] for inner in inside if inner is not last)


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
        before = {upstream for node in products for upstream, _ in node.next_functions}
        stacks = {node.next_functions: node for node in made if operation(node) == "Stack" and saved(node, "dim") == 0}
        for node in made - before:
            steps = _steps(node) if operation(node) in names else []
            states = tuple(step.state for step in steps)
            reverse = states[::-1] in stacks
            inside = {inner for step in steps for inner in (*step.nodes.values(), step.edges["given?"][0])} - {None}
            if len(steps) > 1 and inside <= made:
                found[node] = Layer(steps, inside, stacks.get(states[::-1] if reverse else states), reverse)
    return found


@reads("Tanh", "Relu", "Add", "Mul")
def _recurrent_layer(node: Node, states: dict[int, Layout], walk: Walk) -> Composite | None:
    """Read a layer of an RNN, a GRU or an LSTM in one direction.

    Args:
        node: The node of the state after the last step, ``[R, H]``; states after all steps may be used, too, where they are stacked, ``[T, R, H]``.
        states: Where the samples lie.
        walk: The graph.

    Returns:
        The composite; ``None`` if it is something else, the samples do not lie along ``R``, or a pass with ``create_graph=True`` needs every node.
    """
    if walk.recurrent is None:
        walk.recurrent = {} if walk.connected else _layers(walk)
    if node not in walk.recurrent:
        return None
    steps, inside, stack, reverse = walk.recurrent[node]
    rows = shape_of((node, 0))[0]
    layout = Layout(0, (0,) * rows, 1) if states[0].samples == 1 else settle(states[0])  # of a single sample it may be any axis
    if (found := _given(steps)) is None or layout.axis != 0 or not _is_closed(stack, steps, inside, walk):
        return None
    (given, turned), products, stacked = found, steps[0].nodes["product"], layout._replace(axis=1)

    like = torch.empty(len(steps), *shape_of((products, 0)), dtype=tensor_at((node, 0)).dtype, device="meta")
    weight = partial(_weight, steps)
    call = NodeCall(products, LINEAR, like, input0=lambda: torch.stack([step.previous() for step in steps]), weight=weight)
    unit = unit_of(products, call, steps[0].factors, stacked, walk, turned=True)
    ways = [] if unit is None or unit.split else [_ways(step) for step in steps]
    if not ways or any([way[-1:] for way in some] != [way[-1:] for way in ways[0]] for some in ways):
        return None
    unit.inside |= inside.union(*(way for some in ways for way in some))

    @torch.no_grad()  # what it computes is overwritten
    def pull(columns: list[Tensor]) -> tuple[Tensor, list[Callable[[slice], Tensor]]]:
        if stack is not None and reverse:
            columns[-1] = columns[-1].flip(1)
        inner, outer, *firsts = _pull_back(steps, weight(), *columns)
        values = [outer.flip(1) if turned else outer, *firsts]
        return inner, [lambda part, value=value: value[part] for value, (edge, _) in zip(values, ends, strict=True) if walk.reach.get(edge[0])]

    ends = [(given, stacked), (steps[0].before, layout), (steps[0].cell_before, layout)][: 2 if steps[0].cell[0] is None else 3]
    below = [(edge, to) for edge, to in ends if walk.reach.get(edge[0])]
    last = partial(torch.select, dim=1, index=0 if reverse else -1)
    waiting = {} if stack is None else {stack: Waiting(stacked, (node, 0), layout, last)}
    return Composite([unit], pull, below, [(node, 0), *((other, 0) for other in waiting)], waiting, inside)


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


def _pull_back(steps: list[Step], weight: Tensor, last: Tensor, states: Tensor | None = None) -> tuple[Tensor, ...]:
    """Carry columns through the recursion.

    Args:
        steps: The steps.
        weight: ``[G H, H]``.
        last: At the state after the last step ``[V, R, H]``.
        states: At the states after all steps ``[V, T, R, H]``, of which the last ones are in ``last``, too; ``None`` for zeros.

    Returns:
        Columns at the products with previous states and at the terms of the inputs ``[V, T, R, G H]``; at the first state, and cell, ``[V, R, H]``.
    """

    def read(*saved: tuple[str, str]) -> list[Tensor]:
        return [torch.stack([step.saved(*one) for step in steps]) for one in saved]

    if "cell" in steps[0].nodes:
        gates = torch.stack(read(*((name, "result") for name in ("in", "forget", "new", "out"))), 2)
        every, none = LSTMSteps(gates, *read(("kept", "other"), ("squashed", "result")), weight), last.new_zeros(())
        states = none.expand(len(last), len(steps), *last.shape[1:]) if states is None else states
        inner, *firsts = every.pull_back(states, last, none.expand_as(last), complete=True)
        return inner, inner, *firsts
    if "reset" in steps[0].nodes:
        gates = read(("reset", "result"), ("update", "result"), ("new", "result"), ("change", "self"), ("reset product", "self"))
        return GRUSteps(*gates).pull_back(weight, last, states)
    return ElmanSteps(*read(("state", "result")), operation(steps[0].nodes["state"]) == "Relu").pull_back(weight, last, states)
