"""Products with matrices, read like Linear layers, wherever the matrices come from: also those that are one of several in a node, as in an LSTM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F

from backpack.core.arrangements import arrangement
from backpack.core.checkpoints import checkpointed
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.derivatives.rearranged import RearrangedDerivatives
from backpack.core.graph import operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.leaves import axes_of, multiple_of_leaf, part_of, stack_of_all, way_to_leaf
from backpack.core.node_calls import LINEAR, Composite, NodeCall, States, layer, reads, unit_of
from backpack.core.origins import FACTORS, STACKS
from backpack.core.samples import rows_along, unite
from backpack.core.units import Unit
from backpack.core.walk import Walk
from backpack.utils.lstm import LSTMSteps, previous

_LSTM = 2  # mode of a recurrent node
_MATMUL = MatmulDerivatives()


def _product(node: Node, states: States, walk: Walk, bias: bool = False, multiples: bool = True) -> Unit | None:
    """Read ``x @ W``, perhaps with a bias and for a stack of matrices, as a layer with input ``x [*, N, K]`` and weight ``W``.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.
        bias: Whether the first of the next edges is that of a term that is added.
        multiples: Whether a multiple of a parameter is read as that, with multiples of the input.

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
    multiple = multiple_of_leaf(weight) if multiples and not (stack or turned or weight[0] is None) else None

    def inputs() -> Tensor | None:
        value = saved(node, first)
        if value is not None and multiple is not None:
            value = multiple.of_inputs(value)
        return value if value is None else value.conj()  # as autograd's products have it, if they are complex

    def matrix() -> Tensor:
        value = saved(node, second)
        if value is None:  # the input needs no gradient; if the weight needs none either, the bias is all there is
            value = torch.empty((*stack, 0, shape[-1]) if weight[0] is None else shape_of(weight), device="meta")
        return (value.mT if turned else value).conj()

    factors = {"weight": 2, "bias": 0} if bias else {"weight": 1}
    apart: dict[str, list[Node]] = {"bias": []} if stack else {}  # biases of a stack are rows of what may have any shape
    if multiple is not None:
        found = RearrangedDerivatives(multiple.axes, stacked=False, left=False), {"weight": multiple.way}
    else:
        found = None if turned or weight[0] is None else part_of(weight, node.next_functions[0] if bias else None, walk)
    if found is None:
        call = NodeCall(node, LINEAR if turned else _MATMUL, input0=inputs, weight=matrix)
        return layer(node, call, int(bias), factors, layout, walk, turned, apart)
    rule, ways = found[0], found[1] | apart
    call = NodeCall(node, rule, input0=inputs, weight=lambda: walk.leaves[ways["weight"][-1]], matrices=matrix)
    unit = layer(node, call, int(bias), factors, layout, walk, ways=ways)
    if multiple is not None and unit is not None and unit.couples:  # the derivative with respect to input and parameter has that factor, too
        return _product(node, states, walk, bias, multiples=False)
    return unit


def _left_product(node: Node, states: States, walk: Walk, bias: bool = False) -> Unit | None:
    """Read ``W @ x``, perhaps for a stack of matrices, or with a bias, as a layer with input ``x [*, K, N]`` and weight ``W``.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.
        bias: Whether the first of the next edges is that of a term that is added: a column.

    Returns:
        The layer; ``None`` if the samples do not lie along the columns, or the left factor is no parameter.
    """
    shape, weight, (first, second) = shape_of((node, 0)), node.next_functions[int(bias)], FACTORS[operation(node)]
    column = node.next_functions[0] if bias else (None, 0)
    if (bias and (saved(node, "alpha") != 1 or saved(node, "beta") != 1)) or (column[0] is not None and shape_of(column) != (shape[-2], 1)):
        return None
    layout = rows_along(len(shape) - 1, shape[-1], states[node][0])
    layout = layout and layout._replace(axis=len(shape) - 1)
    found = None if layout is None or weight[0] is None else axes_of(weight, left=True)
    if found is None:
        return None
    (axes, way), last = found, arrangement(layout)[1].plain  # rows of samples that have other numbers of them come first, not last
    rule = RearrangedDerivatives(axes, len(shape) > 2, left=last)  # noqa: PLR2004

    def matrices() -> Tensor:
        return saved(node, first) if last else saved(node, first).mT

    read = {"input0": lambda: saved(node, second), "weight": lambda: walk.leaves[way[-1]], "matrices": matrices}
    factors, ways = {"weight": int(bias)} | ({"bias": 0} if bias else {}), {"weight": way, "bias": []}  # a column may have any shape
    return None if bias and not rule.keeps_order else layer(node, NodeCall(node, rule, **read), 1 + bias, factors, layout, walk, ways=ways)


def _product_of_each(node: Node, states: States, walk: Walk, left: bool) -> Unit | None:
    """Read ``x @ W``, or ``W @ x``, where each sample has a stack of inputs ``[N * G, ...]``, as a layer with a stack of matrices.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.
        left: Whether the weight is the left factor.

    Returns:
        The layer; ``None`` if the weight is no stack that is repeated for each sample.
    """
    turn, weight = arrangement(states[node][0])[0], node.next_functions[1 - left]
    shared = turn is not None and not (turn.axis or turn.place) and len(turn.parts) > 1 and weight[0] is not None
    repeated = stack_of_all(weight, turn.parts) if shared else None
    found = None if repeated is None else axes_of(repeated[1], left)
    if found is None:
        return None
    (axes, way), (name, other) = found, ("self", "mat2") if left else ("mat2", "self")
    rule = _MATMUL if not left and way_to_leaf(repeated[1], False) else RearrangedDerivatives(axes, True, left)
    read = {"input0": lambda: saved(node, other), "weight": lambda: walk.leaves[way[-1]], "matrices": lambda: saved(node, name)[: turn.parts[1]]}
    return layer(node, NodeCall(node, rule, **read), int(left), {"weight": int(not left)}, states[node][0], walk, ways={"weight": repeated[0] + way})


@reads("Mm", "Bmm")
def _either_product(node: Node, states: States, walk: Walk) -> Unit | None:
    if tensor_at((node, 0)).dtype.is_complex:
        return _product(node, states, walk)
    for left in (False, True) if operation(node) in STACKS else ():
        if (of_each := _product_of_each(node, states, walk, left)) is not None:
            return of_each
    found = None if walk.is_tracked(node.next_functions[1][0]) else _left_product(node, states, walk)
    return found or _product(node, states, walk) or _left_product(node, states, walk)


@reads("Addmm", "Baddbmm")
def _either_product_and_sum(node: Node, states: States, walk: Walk) -> Unit | None:
    left = None if len(shape_of((node, 0))) > 2 else partial(_left_product, node, states, walk, bias=True)  # noqa: PLR2004
    found = left() if left is not None and not walk.is_tracked(node.next_functions[2][0]) else None
    return found or _product(node, states, walk, bias=True) or (left() if left is not None else None)


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
    return None if None in parts else Composite(parts, pull, edges, [(node, nr) for nr in range(len(outputs_of(node)))])
