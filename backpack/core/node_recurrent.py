"""Layers of RNNs and GRUs, whose steps are several nodes of the graph each: they are read like a single one, with one product for all steps.

A step is recognized by its nodes; a layer by its steps, each of which starts from the state of another one, while nothing else is made of what lies
between them, and nobody has seen it. Whatever looks different is followed node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import GRU, RNN, RNNBase

from backpack.core.checkpoints import checkpointed
from backpack.core.graph import operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.node_calls import LINEAR, Composite, NodeCall, reads, unit_of, way_to_leaf
from backpack.core.samples import Layout, settle
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.utils.recurrent import ElmanSteps, GRUSteps, Steps

# name, operation, number of the output, and what it is made of: other nodes, or edges, by name; what ends in "?" may need no gradient
_ELMAN = ("state", "Tanh Relu", 0, ("sum", "Add", 0, "product", "given?"))
_PRODUCTS, _TERMS = ([(name, "UnsafeSplit", gate, edge) for gate in range(3)] for name, edge in (("products", "product"), ("terms?", "given?")))
_RESET, _UPDATE = ((name, "Sigmoid", 0, (f"{name} sum", "Add", 0, _PRODUCTS[gate], _TERMS[gate])) for gate, name in enumerate(("reset", "update")))
_NEW = ("new", "Tanh", 0, ("new sum", "Add", 0, _TERMS[2], ("reset product", "Mul", 0, _PRODUCTS[2], _RESET)))
_GRU = ("state", "Add", 0, ("change", "Mul", 0, ("difference", "Sub", 0, "before?", _NEW), _UPDATE), _NEW)


class Step(NamedTuple):
    """A step of a layer.

    Attributes:
        nodes: Its nodes, by name.
        edges: Edges from it to others: to the product with the state before, to the term of the input, if that needs a gradient.
    """

    nodes: dict[str, Node]
    edges: dict[str, Edge]

    @property
    def state(self) -> Edge:
        """Edge to the state after the step."""
        return self.nodes["state"], 0

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
    if (names in ("Add", "Sub") and saved(node, "alpha") != 1) or (names == "UnsafeSplit" and not _is_in_thirds(node)):
        return False
    return len(parts) == len(node.next_functions) and all(map(partial(_matches, step=step), node.next_functions, parts))


def _is_in_thirds(node: Node) -> bool:
    return outputs_of(node) == 3 and saved(node, "dim") in (1, -1) and len({shape_of((node, nr)) for nr in range(3)}) == 1  # noqa: PLR2004


def _step(edge: Edge) -> Step | None:
    """Read a step.

    Args:
        edge: Edge to the state after it.

    Returns:
        The step; ``None`` if it is something else.
    """
    step = Step({}, {})
    if edge[0] is None or not _matches(edge, _GRU if operation(edge[0]) == "Add" else _ELMAN, step):
        return None
    node, number = step.edges["product"]
    step.nodes["product"] = node
    if number or operation(node) not in ("Addmm", "Mm") or (step.has_bias and (saved(node, "alpha") != 1 or saved(node, "beta") != 1)):
        return None
    return step if step.edges.get("before?", step.before) == step.before else None


def _steps(node: Node) -> list[Step] | None:
    """Read the steps of a layer whose states are stacked, or of which only the last state is.

    Args:
        node: The node that stacks them.

    Returns:
        The steps in the order in which they were computed; ``None`` if it stacks something else.
    """
    edges = list(node.next_functions)
    if len(edges) == 1:
        found = []
        while (step := _step(edges[0])) is not None:
            found.insert(0, step)
            edges = [step.before]
        return found if len(found) > 1 else None
    if edges[0][0] is None or edges[1][0] is None or edges[0] == edges[1]:
        return None
    first = _step(edges[0])
    if first is not None and first.before == edges[1]:  # the last one in time comes first
        edges.reverse()
    found = [_step(edge) for edge in edges] if first is not None else []
    return found if found and None not in found and all(two.before == one.state for one, two in pairwise(found)) else None


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


def _is_closed(node: Node, steps: list[Step], inside: set[Node], walk: Walk) -> bool:
    """Say whether nothing else is made of what lies inside, and all that is read was saved, in the precision of the result.

    Args:
        node: The node that stacks the states.
        steps: The steps.
        inside: Their nodes.
        walk: The graph.

    Returns:
        Whether it is so.
    """
    edges = Counter(upstream for inner in (node, *inside) for upstream, _ in inner.next_functions)
    types = {tensor_at(edge).dtype for edge in ((node, 0), (steps[0].nodes["product"], 0), steps[0].state)}
    weights = [step.nodes["product"].next_functions[step.factors["weight"]][0] for step in steps]
    if not types <= {torch.float32, torch.float64} or len(types) > 1 or None in weights or any(map(checkpointed, inside)):
        return False
    return all(walk.consumers[inner] == edges[inner] for inner in inside)


def _is_out_of_reach(inside: set[Node], walk: Walk) -> bool:
    """Say whether torch itself has made the steps, in a layer: tensors of a loop that is written out may have hooks, which act on the gradient.

    Args:
        inside: Nodes of the steps.
        walk: The graph.

    Returns:
        Whether it has.
    """
    for node, marks in walk.marks.items():
        for mark in marks:
            module = mark.call.module
            if isinstance(module, RNNBase) and type(module).forward in (RNN.forward, GRU.forward) and "forward" not in vars(module):
                piece = walk.piece(node, mark.call, mark.base)
                if piece is not None and inside <= piece.inside:
                    return True
    return False


@reads("Stack")
def _recurrent_layer(node: Node, states: dict[int, Layout], walk: Walk) -> Composite | None:
    """Read a layer of an RNN or a GRU in one direction, of which all states are stacked, or the last one alone.

    Args:
        node: The node that stacks them, ``[T, R, H]`` or ``[1, R, H]``.
        states: Where the samples lie.
        walk: The graph.

    Returns:
        The composite; ``None`` if it is something else, the samples do not lie along ``R``, or a pass with ``create_graph=True`` needs every node.
    """
    shape = shape_of((node, 0))
    steps = None if walk.connected or saved(node, "dim") != 0 or len(shape) != 3 else _steps(node)  # noqa: PLR2004
    found = None if steps is None else _given(steps)
    if found is None:
        return None
    (given, turned), reverse = found, node.next_functions[-1] != steps[-1].state
    layout = Layout(1, (0,) * shape[1], 1) if states[0].samples == 1 else settle(states[0])  # of a single sample it may be any axis
    inside = {inner for step in steps for inner in step.nodes.values()}
    inside |= {step.edges["given?"][0] for step in steps} - {None}
    if layout.axis != 1 or not _is_closed(node, steps, inside, walk) or not _is_out_of_reach(inside, walk):
        return None
    products = steps[0].nodes["product"]

    def all_steps(read: Callable[[Step], Tensor]) -> Tensor:
        return torch.stack([read(step) for step in steps])

    like = torch.empty(len(steps), *shape_of((products, 0)), dtype=tensor_at((node, 0)).dtype, device="meta")
    weight = partial(_weight, steps)
    call = NodeCall(node, LINEAR, like, input0=partial(all_steps, Step.previous), weight=weight)
    unit = unit_of(products, call, steps[0].factors, layout, walk, turned=True)
    ways = [] if unit is None or unit.split else [_ways(step) for step in steps]
    if not ways or any([way[-1:] for way in some] != [way[-1:] for way in ways[0]] for some in ways):
        return None
    unit.inside |= inside.union(*(way for some in ways for way in some))

    @torch.no_grad()  # what it computes is overwritten
    def pull(columns: list[Tensor]) -> tuple[Tensor, list[Callable[[slice], Tensor]]]:
        outputs = columns[0].flip(1) if reverse else columns[0]
        inner, outer, first = _slopes(steps, all_steps).pull_back(outputs, weight())
        outer = outer.flip(1) if turned else outer
        return inner, [lambda part, value=value: value[part] for value, used in ((outer, given), (first, steps[0].before)) if used in needed]

    below = [(given, layout), (steps[0].before, layout._replace(axis=0))]
    below = [(edge, to) for edge, to in below if walk.reach.get(edge[0])]
    needed = [edge for edge, _ in below]
    return Composite([unit], pull, below)


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


def _slopes(steps: list[Step], all_steps: Callable[[Callable[[Step], Tensor]], Tensor]) -> Steps:
    if "reset" not in steps[0].nodes:
        return ElmanSteps(all_steps(lambda step: step.saved("state")), operation(steps[0].nodes["state"]) == "Relu")
    gates = [all_steps(lambda step, name=name: step.saved(name)) for name in ("reset", "update", "new")]
    return GRUSteps(*gates, *(all_steps(lambda step, name=name: step.saved(name, "self")) for name in ("change", "reset product")))
