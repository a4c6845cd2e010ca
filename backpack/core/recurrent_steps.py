"""Steps of RNNs, GRUs and LSTMs: patterns of nodes of the graph.

A step is recognized by its nodes; what it starts from is the state of another step, the first rows of one, or one that has got rows of sequences
which begin later.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.graph import operation, outputs_of, saved, shape_of
from backpack.core.slots import Edge

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
    return saved(node, "dim") in (1, -1) and len({tuple(output.shape) for output in outputs_of(node)}) == 1


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


def is_slice(node: Node, start: int) -> bool:
    """Say whether a node cuts rows.

    Args:
        node: The node.
        start: The first row.

    Returns:
        Whether it does.
    """
    return operation(node) == "Slice" and saved(node, "dim") == 0 and saved(node, "step") == 1 and saved(node, "start") == start


def behind(edge: Edge) -> Edge:
    """Go past a node that takes the first rows of a state, where sequences have ended, or appends constant ones, where others begin.

    Args:
        edge: Edge to what a step starts from.

    Returns:
        Edge to the state; the given one, if there is no such node.
    """
    node = edge[0]
    if node is not None and (is_slice(node, 0) or (operation(node) == "Cat" and saved(node, "dim") == 0)):
        first, *others = node.next_functions
        return first if all(other is None for other, _ in others) else edge
    return edge


def steps_to(node: Node) -> list[Step]:
    """Read the steps that lead to a state.

    Args:
        node: The node of the state.

    Returns:
        The steps in the order in which they were computed; none if their cells belong to others.
    """
    found, edge = [], (node, 0)
    while (step := _step(edge)) is not None:
        if found and behind(found[0].cell_before) != step.cell:
            return []
        found.insert(0, step)
        edge = behind(step.before)
    return found
