"""Operations in the graph that are read like calls of modules: a product with a matrix is a Linear layer, wherever the matrix comes from.

Such a node needs no call of a module to be covered by a rule: its own saved tensors supply the input and the weight. A node may also compute
several such products inside, with something else in between (a layer of an LSTM); then columns are carried to the products first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial, reduce
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F

from backpack.core.arrangements import arrangement
from backpack.core.calls import Mark
from backpack.core.checkpoints import checkpointed
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.derivatives.rearranged import RearrangedDerivatives
from backpack.core.graph import operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.leaves import axes_of, joins_leaves, part_of, way_to_leaf
from backpack.core.mixing import is_made_of_constants, multiplies_data
from backpack.core.origins import FACTORS, STACKS
from backpack.core.samples import Layout, rows_along, settle, unite
from backpack.core.slots import Edge
from backpack.core.units import Unit
from backpack.core.walk import Walk
from backpack.core.ways import State
from backpack.utils.lstm import LSTMSteps, previous

_COMPLEX = frozenset({"Mm", "Bmm"})  # gradients of products are products of complex numbers, too
_LSTM = 2  # mode of a recurrent node
LINEAR, _MATMUL = LinearDerivatives(), MatmulDerivatives()


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
        if way:
            unit.parameters[name] = walk.leaves[way[-1]]
            unit.inside.update(way)
        elif (operation(node) not in STACKS or shape_of(edge)[0] == 1) and joins_leaves(edge[0], walk, name == "bias"):
            unit.split[name] = edge  # what lies beside them does not change their derivatives
        elif edge[0] in walk.has_data or multiplies_data(walk, edge[0], layout.samples):
            return None  # a product of two activations
        elif layout.of_one and not layout.plain and not is_made_of_constants(walk, edge[0], layout.samples):
            return None  # of one sample, too, as in a loop over samples
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


def _product(node: Node, states: States, walk: Walk, bias: bool = False) -> Unit | None:
    """Read ``x @ W``, perhaps with a bias and for a stack of matrices, as a layer with input ``x [*, N, K]`` and weight ``W``.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.
        bias: Whether the first of the next edges is that of a term that is added.

    Returns:
        The layer; ``None`` if the samples do not lie along the rows, or are in the weight, or if the left factor is sparse.
    """
    shape, (first, second) = shape_of((node, 0)), FACTORS[operation(node)]
    layout, stack = rows_along(len(shape) - 2, shape[-2], states[node][0]), shape[:-2]
    if layout is None or (bias and (saved(node, "alpha") != 1 or saved(node, "beta") != 1)):
        return None
    if bias and node.next_functions[0][0] is not None and shape_of(node.next_functions[0]) != ((*stack, 1, shape[-1]) if stack else shape[-1:]):
        return None
    layout, (source, weight) = layout._replace(axis=len(shape) - 2), node.next_functions[int(bias) : int(bias) + 2]
    if source[0] is None or not checkpointed(node):  # there, it would have to be computed again
        given = saved(node, first)
        if given is not None and given.layout != torch.strided:
            return None
    turned = weight[0] is not None and not stack and way_to_leaf(weight, True) is not None

    def inputs() -> Tensor | None:
        value = saved(node, first)
        return value if value is None else value.conj()  # as autograd's products have it, if they are complex

    def matrix() -> Tensor:
        value = saved(node, second)
        if value is None:  # the input needs no gradient; if the weight needs none either, the bias is all there is
            value = torch.empty((*stack, 0, shape[-1]) if weight[0] is None else shape_of(weight), device="meta")
        return (value.mT if turned else value).conj()

    factors = {"weight": 2, "bias": 0} if bias else {"weight": 1}
    apart: dict[str, list[Node]] = {"bias": []} if stack else {}  # biases of a stack are rows of what may have any shape
    found = None if turned or weight[0] is None else part_of(weight, node.next_functions[0] if bias else None, walk)
    if found is None:
        call = NodeCall(node, LINEAR if turned else _MATMUL, input0=inputs, weight=matrix)
        return layer(node, call, int(bias), factors, layout, walk, turned, apart)
    rule, ways = found[0], found[1] | apart
    call = NodeCall(node, rule, input0=inputs, weight=lambda: walk.leaves[ways["weight"][-1]], matrices=matrix)
    return layer(node, call, int(bias), factors, layout, walk, ways=ways)


def _left_product(node: Node, states: States, walk: Walk) -> Unit | None:
    """Read ``W @ x``, perhaps for a stack of matrices, as a layer with input ``x [*, K, N]`` and weight ``W``.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.

    Returns:
        The layer; ``None`` if the samples do not lie along the columns, or the left factor is no parameter.
    """
    shape, weight = shape_of((node, 0)), node.next_functions[0]
    layout = rows_along(len(shape) - 1, shape[-1], states[node][0])
    layout = layout and layout._replace(axis=len(shape) - 1)
    found = None if layout is None or weight[0] is None else axes_of(weight, left=True)
    if found is None:
        return None
    (axes, way), last = found, arrangement(layout)[1].plain  # rows of samples that have other numbers of them come first, not last
    rule = RearrangedDerivatives(axes, len(shape) > 2, left=last)  # noqa: PLR2004

    def matrices() -> Tensor:
        return saved(node, "self") if last else saved(node, "self").mT

    read = {"input0": lambda: saved(node, "mat2"), "weight": lambda: walk.leaves[way[-1]], "matrices": matrices}
    return layer(node, NodeCall(node, rule, **read), 1, {"weight": 0}, layout, walk, ways={"weight": way})


@reads("Mm", "Bmm")
def _either_product(node: Node, states: States, walk: Walk) -> Unit | None:
    if tensor_at((node, 0)).dtype.is_complex:
        return _product(node, states, walk)
    found = None if walk.is_tracked(node.next_functions[1][0]) else _left_product(node, states, walk)
    return found or _product(node, states, walk) or _left_product(node, states, walk)


reads("Addmm", "Baddbmm")(partial(_product, bias=True))


@reads("MkldnnRnnLayer")
def _lstm_layer(node: Node, states: States, walk: Walk) -> Composite | None:
    """Read a layer of an LSTM in one direction: two Linear layers, of inputs and of previous states, whose sum passes the gates.

    Args:
        node: The node, with outputs ``[T, R, H]``, and state and cell after the last step ``[R, H]``.
        states: Where the samples lie in them.
        walk: The graph.

    Returns:
        The composite; ``None`` if the samples do not lie along ``R``, or are in a weight.
    """
    steps, rows, size = shape_of((node, 0))
    found = [rows_along(int(nr == 0), rows, state) for nr, state in states[node].items()]
    own = reduce(lambda one, other: one and other and unite(one, other), found)
    if own is None or saved(node, "mode") != _LSTM or saved(node, "batch_sizes") or tensor_at((node, 0)).dtype != torch.float32:
        return None
    layout, reverse = own._replace(axis=1), saved(node, "reverse")
    weights, biases, products = ("weight0", "weight1"), ("weight2", "weight3"), torch.empty(steps, rows, 4 * size, device="meta")

    def inputs(part: int) -> Tensor:
        return previous(saved(node, "result0"), saved(node, "hx_"), reverse) if part else saved(node, "input")

    @torch.no_grad()  # what it computes is overwritten
    def pull(columns: list[Tensor]) -> tuple[Tensor, list[Callable[[slice], Tensor]]]:
        bias = sum(saved(node, name) for name in biases) if saved(node, "has_biases") else None
        gates = F.linear(inputs(0), saved(node, "weight0"), bias)
        gates.flatten(0, 1).addmm_(inputs(1).flatten(0, 1), saved(node, "weight1").t())
        outputs, *last = columns
        inner, _, *first = LSTMSteps.run(gates, saved(node, "cx_"), reverse).pull_back(saved(node, "weight1"), last, outputs.unbind(1))

        def send(number: int, part: slice) -> Tensor:
            if number:
                return first[number - 5][part]
            # time comes first in memory: a product in that order makes no copy
            return (inner[part].transpose(0, 1) @ saved(node, "weight0")).transpose(0, 1)

        return inner, [partial(send, number) for number in below]

    below = [number for number in (0, 5, 6) if walk.reach.get(node.next_functions[number][0])]
    parts = []
    for part in range(2):
        call = NodeCall(node, LINEAR, products, input0=partial(inputs, part), weight=partial(saved, node, weights[part]))
        parts.append(unit_of(node, call, {"weight": 1 + part, "bias": 3 + part}, layout, walk))
    edges = [(node.next_functions[number], layout._replace(axis=int(number == 0))) for number in below]
    return None if None in parts else Composite(parts, pull, edges, [(node, nr) for nr in range(outputs_of(node))])
