"""Operations in the graph that are read like calls of modules: a node needs none to be covered by a rule, as what it has saved supplies the rest.

A node may also compute what several layers do inside, with something else in between (a layer of an LSTM); then columns are carried to these first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.arrangements import arrangement
from backpack.core.calls import Mark
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.graph import operation, shape_of, tensor_at
from backpack.core.leaves import SHIFTS, joins_leaves, way_to_leaf
from backpack.core.mixing import is_given_data, is_made_of_constants, multiplies_data
from backpack.core.origins import STACKS
from backpack.core.samples import Layout, settle
from backpack.core.slots import Edge
from backpack.core.units import Unit
from backpack.core.walk import Walk
from backpack.core.ways import State

_COMPLEX = frozenset({"Mm", "Bmm"})  # gradients of products are products of complex numbers, too
LINEAR = LinearDerivatives()


def unfused(node: Node) -> str:
    """Say how to do without an operation that hides others.

    Args:
        node: Its node.

    Returns:
        A sentence; nothing where that is not known.
    """
    known = operation(node) == "MkldnnRnnLayer"
    return "Run the forward pass in double precision, or under torch.backends.mkldnn.flags(enabled=False), where it is not fused" if known else ""


class NodeCall:
    """A graph node, read like the record of a module call: tensors come from what the node has saved.

    Attributes:
        derivatives: The rule.
        outputs: The output: shape, dtype and device.
        module: There is none.
        node: The node.
        path: Its name, for messages.
    """

    module = None
    is_loss = released = moved = False
    order = 0

    def __init__(self, node: Node, rule: BaseParameterDerivatives, output: Tensor | None = None, **read: Callable[[], Any]) -> None:
        self.derivatives, self._read = rule, read
        self.outputs = [tensor_at((node, 0)) if output is None else output]
        self.node, self.path = node, node.name()

    @property
    def output(self) -> Tensor:
        """A tensor without data that has the shape of the output."""
        slot = self.outputs[0]
        return torch.empty(slot.shape, dtype=slot.dtype, device="meta")

    def __getattr__(self, name: str) -> Any:
        if name not in self._read:
            raise AttributeError(name)
        return self._read[name]()

    def __repr__(self) -> str:
        return self.path


class Waiting(NamedTuple):
    """A node with one output, all columns of which wait for a composite upstream; some are handed on to it, too, as autograd does with the gradient.

    Attributes:
        own: Where the samples lie in its output.
        to: Edge to the composite.
        layout: Where the samples lie there.
        take: Takes what is handed on ``[V, *shape]`` from the columns.
    """

    own: Layout
    to: Edge
    layout: Layout
    take: Callable[[Tensor], Tensor]
    parts: tuple[Unit, ...] = ()

    @property
    def upstream(self) -> list[Edge]:
        """Where what it hands on goes."""
        return [self.to]


class Composite(NamedTuple):
    """A node that computes several products inside.

    Attributes:
        parts: The products, whose outputs have the same shape.
        pull: Carries columns from all edges in ``given``, ``[V, *shape]`` each, to the outputs of the products ``[V, *shape]``; returns, too, for
            each edge below a function that carries some of the columns there.
        below: Next edges from which something needed is reached, and where the samples lie there.
        given: Edges to the node, and to others whose columns wait for it.
        waiting: These other nodes, and what they hand on.
        covers: Nodes inside, of which nothing else is made.
    """

    parts: list[Unit]
    pull: Callable[[list[Tensor]], tuple[Tensor, list[Callable[[slice], Tensor]]]]
    below: list[tuple[Edge, Layout]]
    given: list[Edge]
    waiting: Mapping[Node, Waiting] = MappingProxyType({})
    covers: Set[Node] = frozenset()

    @property
    def upstream(self) -> list[Edge]:
        """Where what it hands on goes."""
        return [edge for edge, _ in self.below]

    def pull_all(self, given: list[dict[Edge, Tensor]]) -> tuple[Tensor | None, list[Callable[[slice], Tensor]], list[slice]]:
        """Carry the columns of several owners at once.

        Args:
            given: Edge to columns that have arrived there ``[V, *shape]``, for each owner; nothing has arrived at the others.

        Returns:
            What ``pull`` returns, and the place of each owner's columns.
        """
        ends = list(accumulate((len(next(iter(columns.values()))) for columns in given), initial=0))
        places = [slice(*pair) for pair in pairwise(ends)]
        if not given:
            return None, [], places
        outputs = []
        for edge in self.given:
            slot = tensor_at(edge)
            none = torch.zeros((), dtype=slot.dtype, device=slot.device)
            parts = [columns.get(edge, none).expand(at.stop - at.start, *slot.shape) for columns, at in zip(given, places, strict=True)]
            outputs.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return *self.pull(outputs), places


States = Mapping[Node, Mapping[int, State]]
Reader = Callable[[Node, States, "Walk"], "Unit | Composite | None"]
_READERS: dict[str, Reader] = {}


def reads(*operations: str) -> Callable[[Reader], Reader]:
    """Register a function that reads the nodes of some operations, given the layouts of the outputs.

    Args:
        *operations: Names of the operations.

    Returns:
        A decorator.
    """

    def decorator(reader: Reader) -> Reader:
        _READERS.update(dict.fromkeys(operations, reader))
        return reader

    return decorator


def read(node: Node, states: States, walk: Walk) -> Unit | Composite | None:
    """Read a node like the call of a module, or of several.

    Args:
        node: The node.
        states: Where the samples lie in its outputs, and in those of other nodes, as far as it is known.
        walk: The graph.

    Returns:
        What stands for the node and the nodes between it and the parameters that it uses; ``None`` if no rule does, as for most with complex numbers.
    """
    reader = _READERS.get(operation(node))
    unknown = tensor_at((node, 0)).dtype.is_complex and operation(node) not in _COMPLEX
    return None if reader is None or unknown else reader(node, states, walk)


Ways = Mapping[str, list[Node]]


def unit_of(
    node: Node, call: NodeCall, factors: dict[str, int], layout: Layout, walk: Walk, turned: bool = False, ways: Ways = MappingProxyType({})
) -> Unit | None:
    """Find the parameters behind the factors of a product.

    Args:
        node: The node.
        call: The product.
        factors: Name to number of the next edge, of weight and bias.
        layout: Where the samples lie in its output.
        walk: The graph.
        turned: Whether the weight is the transposed of what lies behind its edge.
        ways: Nodes between factors and their leaves, where they are known; none for those that are no parameters themselves.

    Returns:
        The unit; ``None`` if a factor has samples.
    """
    unit = Unit(Mark(call, 0, 0, False), {node}, {})
    for name, number in factors.items():
        edge = node.next_functions[number]
        if edge[0] is None or not walk.reach[edge[0]]:
            continue
        way = ways[name] if name in ways else way_to_leaf(edge, turned=turned and name == "weight")
        if not way or not SHIFTS.isdisjoint(map(operation, way)):
            # what lies beside joined leaves does not change their derivatives
            fits = (operation(node) not in STACKS or shape_of(edge)[0] == 1) and joins_leaves(edge[0], walk, name == "bias")
            if not fits and (is_given_data(walk, edge[0], layout) or multiplies_data(walk, edge[0], layout.samples)):
                return None  # a product of two activations
            if not fits and layout.of_one and not layout.plain and not is_made_of_constants(walk, edge[0], layout.samples):
                return None  # of one sample, too, as in a loop over samples
        if way:
            unit.parameters[name] = walk.leaves[way[-1]]
            unit.inside.update(way)
        else:
            unit.split[name] = edge
    unit.arrangement, unit.layout = arrangement(layout) if call.derivatives.any_batch_axis else (None, settle(layout))
    return unit


def layer(
    node: Node,
    call: NodeCall,
    below: int | None,
    factors: dict[str, int],
    layout: Layout,
    walk: Walk,
    turned: bool = False,
    ways: Ways = MappingProxyType({}),
) -> Unit | None:
    """Make a unit of a node that computes what one layer does.

    Args:
        node: The node.
        call: The layer.
        below: Which of the next edges belongs to the input, if it can be differentiated.
        factors: Name to number of the next edge, of weight and bias.
        layout: Where the samples lie in its output.
        walk: The graph.
        turned: Whether the weight is the transposed of what lies behind its edge.
        ways: Nodes between factors and their leaves, where they are known; none for those that are no parameters themselves.

    Returns:
        The unit; ``None`` if a factor has samples.
    """
    unit = unit_of(node, call, factors, layout, walk, turned, ways)
    edge = (None, 0) if below is None else node.next_functions[below]
    if unit is not None and edge[0] is not None and walk.reach[edge[0]]:
        unit.below, unit.arrives = edge, layout
        for bits in [walk.bits[id(p)] for p in unit.parameters.values()] + [walk.reach[split[0]] for split in unit.split.values()]:
            unit.couples |= walk.reach[edge[0]] & bits
    return unit
