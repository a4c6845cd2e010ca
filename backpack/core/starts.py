"""Where second-order quantities start: calls of extended losses, and graph nodes of losses that were called as functions.

A loss node is read like the call of torch's own module, from what the node has saved. Cross-entropies are read off the log-softmax in them:
whatever is linear in log-probabilities, from there to the root, is a cross-entropy, and its options are in the gradient that arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import nan
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.batches import rows_of, sample_axis
from backpack.core.calls import Mark, ModuleCall
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.graph import operation, shape_of
from backpack.core.linear import LINEAR_IN_LOG_PROBABILITIES
from backpack.core.loss_nodes import LossNode, classes_of, function_at, normalizer, prediction_first, title, weighs_entries
from backpack.core.losses import has_samples, read_entries, refuse_axis, refuse_target
from backpack.core.mixing import is_shared, stands_beside
from backpack.core.origins import FACTORS
from backpack.core.predictions import find_samples
from backpack.core.refusals import bare
from backpack.core.samples import Layout, plain_layout
from backpack.core.slots import Edge, Slot
from backpack.core.walk import Walk
from backpack.core.ways import BROADCASTING
from backpack.utils.errors import BackpackError, LossValueError, UnsupportedError

FEW = 4
"""Losses in one pass up to which each has columns of its own that are drawn: less noise, for as many times the cost."""
_TEMPORAL = frozenset(("CtcLoss", "CudnnCtcLoss"))
_OF_PAIRS = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss"})
_TIME_FIRST = 3
"""Axes of ``[T, N, C]``."""


class Start(NamedTuple):
    """A loss.

    Attributes:
        call: Its call, or its node.
        nr: Output number of the graph node at which it is hooked.
        below: Edge of the prediction.
        layout: Where the samples lie in the prediction.
        inside: Graph nodes that it stands for.
        sure: Whether it is known where the samples lie; otherwise every row has been taken for a sample, which a module's output has to confirm.
    """

    call: ModuleCall | LossNode
    nr: int
    below: Edge
    layout: Layout
    inside: set[Node]
    sure: bool

    def take(self, grad: Tensor) -> Tensor:
        """Hand the gradient that has arrived over to the call.

        Args:
            grad: Gradient of the output of the node at which it is hooked.

        Returns:
            The gradient of the value of the loss; no number where the one that has arrived is not finite, for which the loss is refused.
        """
        if not isinstance(self.call, LossNode):
            return grad
        if not self.call.of_classes:  # a number, or one for each entry
            return grad.permute(self.call.axes) if grad.dim() else grad
        self.call.incoming = grad.permute(self.call.axes)
        return grad.new_full((), 1.0 if grad.isfinite().all() else nan)


def put_in_order(losses: Sequence[Start]) -> None:
    """Give losses positions in front of all other calls, and say which share columns: those of other samples, and many, if columns are drawn.

    Args:
        losses: All losses, in the order of the forward passes.
    """
    taken: list[tuple[int, set[int]]] = []
    for position, start in enumerate(losses, -len(losses)):
        own = {*start.layout.labels} - {-1}
        turn, samples = next((before for before in taken if before[1].isdisjoint(own)), (position, set()))
        if not samples:
            taken.append((turn, samples))
        samples |= own
        start.call.order, start.call.turns = position, (turn, turn if len(losses) <= FEW else -len(losses))


def start_at(walk: Walk, node: Node, marks: Iterable[Mark], second_order: bool, curved: Node | None) -> Start | None:
    """Find a loss that ends at a node.

    Args:
        walk: The graph.
        node: The node, at which no samples have arrived.
        marks: What calls left on it.
        second_order: Whether quantities start at losses.
        curved: A curved operation between the node and the root, if there is one.

    Returns:
        The loss, ``None`` if there is none, or its rule cannot stand for its piece of the graph.
    """
    for mark in marks if node not in walk.passed else ():
        start = _start_of_call(walk, node, mark, second_order) if mark.call.is_loss and not mark.base else None
        if start is not None:
            return start
    if second_order:
        return _start_of_node(walk, node, curved)
    with suppress(BackpackError):  # first-order quantities need no loss: if it tells where samples lie, all the better
        return _start_of_node(walk, node, None) if function_at(node) and walk.returns_loss else None
    return None


def _start_of_call(walk: Walk, node: Node, mark: Mark, second_order: bool) -> Start | None:
    """Start at the call of an extended loss.

    Args:
        walk: The graph.
        node: Node that made the loss value.
        mark: Its mark.
        second_order: Whether quantities start there.

    Returns:
        The loss; ``None`` if its rule cannot stand for its piece of the graph.

    Raises:
        bare: If the prediction has no samples.
    """
    call = mark.call
    piece = walk.piece(node, call)
    below = call.inputs[0].edge if call.inputs and isinstance(call.inputs[0], Slot) else None
    if piece is None or below is None or not walk.bits.keys().isdisjoint(map(id, piece.parameters.values())):
        return None
    if any(slot.edge is not None and walk.reach.get(slot.edge[0]) for slot in call.tensor_inputs[1:]):
        if second_order:
            refuse_target(call.path)
        return None
    if not has_samples(call, second_order):
        return None
    dim = 1 if isinstance(call.derivatives, CrossEntropyLossDerivatives) else None
    layout = find_samples(walk, below, dim)
    if layout is None and not second_order:
        return None  # samples begin at the output of a module
    if layout is None and is_shared(walk, below[0], call.inputs[0].shape[0]):
        raise bare(walk, below[0])
    if layout is not None and second_order and layout.axis:
        if function_at(node):  # which starts there as well
            return None
        refuse_axis(call.path, below, layout)
    read_entries(call, piece.inside, below, walk.reach.get)
    return Start(call, mark.nr, below, layout or plain_layout(call.inputs[0].shape[0]), piece.inside, layout is not None)


def _start_of_node(walk: Walk, node: Node, curved: Node | None) -> Start | None:
    """Start at the node of a loss that was called as a function.

    Args:
        walk: The graph.
        node: The node.
        curved: A curved operation between the node and the root, if there is one.

    Returns:
        The loss; ``None`` if the node is none.

    Raises:
        bare: If the prediction has no samples.
        UnsupportedError: If the samples do not lie where the loss looks for them.
    """
    name, nexts = function_at(node), prediction_first(node, walk.reach)
    if curved is not None and operation(node) in LINEAR_IN_LOG_PROBABILITIES and node in walk.to_function:
        refuse_curved(node, curved)
    classes, inside = name == "LogSoftmax", {normalizer(node)} - {None}
    used = any(walk.consumers[n] > 1 for n in inside)  # elsewhere, too
    if not name or (classes and (used or curved is not None)) or not walk.reach.get(nexts[0][0]):
        return None
    if curved is not None:
        refuse_curved(node, curved)
    if any(walk.reach.get(upstream) for upstream, _ in nexts[1:]):
        refuse_target(title(node))
    below, shape = nexts[0], shape_of(nexts[0])
    dim = classes_of(node) % len(shape) if classes and shape else None
    if len(shape) < 1 + classes:
        has_samples(LossNode(node, below, tuple(range(len(shape)))), True)  # raises
    layout = find_samples(walk, below, dim)
    sure = layout is not None
    if layout is not None and (layout.axis == dim or (layout.axis and weighs_entries(node))):
        refuse_axis(title(node), below, layout)
    if layout is None:
        if is_shared(walk, below[0], shape[0]):
            raise bare(walk, below[0])
        if shape[0] not in walk.batches or dim == 0:
            raise UnsupportedError(
                f"{title(node)} takes a prediction of shape {list(shape)}, and which of its entries belong to which sample cannot be read off the "
                "graph. Make it from the output of a module, with samples on axis 0, by reshaping, selecting and products with parameters alone."
            )
        layout = plain_layout(shape[0])
    first = (layout.axis, dim) if classes else (layout.axis,)
    call = LossNode(node, below, (*first, *(axis for axis in range(len(shape)) if axis not in first)))
    has_samples(call, True)
    return Start(call, 0, below, layout, inside, sure)


def start_at_time(walk: Walk, node: Node) -> list[tuple[Edge, Layout]]:
    """Let samples start at the input ``[T, N, C]`` of a connectionist temporal classification, which has them on axis 1.

    Args:
        walk: The graph.
        node: A node.

    Returns:
        The input, and where the samples lie there; nothing if the node is something else, or quantities start at losses.
    """
    below = node.next_functions[0] if operation(node) in _TEMPORAL and not walk.second_order else (None, 0)
    shape = shape_of(below) if walk.reach.get(below[0]) else ()
    return [(below, plain_layout(shape[1], 1))] if len(shape) == _TIME_FIRST else []


def start_beside(walk: Walk, node: Node) -> list[tuple[Edge, Layout]]:
    """Let samples start where what modules made of them meets parameters that no module used: inside of a model that returns its loss.

    Args:
        walk: The graph.
        node: A node, at which no samples have arrived.

    Returns:
        The output of the node, or its inputs if it is a loss, and where the samples lie there; nothing where that is not known, or told elsewhere.
    """
    is_loss = operation(node) in _OF_PAIRS
    if walk.second_order or not walk.returns_loss or not (is_loss or operation(node) in BROADCASTING | FACTORS.keys()):
        return []
    ways = [edge for edge in node.next_functions if walk.reach.get(edge[0])]
    of_samples = [edge for edge in ways if edge[0] in walk.has_data]
    edges = ways if is_loss else [(node, 0)]
    if len(of_samples) != 1 or len(ways) == 1 or not shape_of(edges[0]) or len({*map(shape_of, edges)}) > 1:
        return []
    layout = find_samples(walk, of_samples[0] if is_loss else edges[0], None)
    return [] if layout is None else [(edge, layout) for edge in edges]


def start_at_output(walk: Walk, node: Node, mark: Mark, known: bool) -> Layout | None:
    """Say where the samples lie in an output: on axis 0 of what outermost modules return, as a rule; inside, on that of as many rows as samples.

    Args:
        walk: The graph.
        node: Node of the output.
        mark: What a call left there.
        known: Whether samples have arrived there from a loss: then only a model has a say, and the call is that of an outermost module.

    Returns:
        The layout; ``None`` if the output does not tell.
    """
    call, shape = mark.call, mark.call.outputs[mark.index].shape
    if mark.base or call.is_loss or (known and not call.module._modules):
        return None
    axis = sample_axis(call, mark.index)
    size = shape[axis] if axis < len(shape) else None
    expected = {rows_of(call, walk.marks[node])} if call.root else walk.batches or {size}
    if size is None or size not in expected:
        return None
    return None if stands_beside(walk, node, call, size) else plain_layout(size, axis)


def refuse_curved(node: Node, curved: Node) -> None:
    """Refuse a curved operation between a loss and the root.

    Args:
        node: The loss, or a node next to it.
        curved: The operation.

    Raises:
        LossValueError: Always.
    """
    loss = "the loss" if node is curved else f"the loss {title(node)}"
    raise LossValueError(
        f"{title(curved)} lies between {loss} and the tensor on which backward was called. Second-order quantities are exact only for weighted "
        "sums of losses (a * L1 + b * L2, .sum(), .mean()): the curvature of anything else is not that of its loss. Call backward on the loss "
        "without this operation. Or, if all of it is a sum or mean of one term per sample, write it as a loss of your own, a module (prediction, "
        "target) -> loss, and extend it; losses inside of it have to be functions (torch.nn.functional), not modules. Products with the Hessian of "
        "what you have are in backpack.hessianfree."
    )
