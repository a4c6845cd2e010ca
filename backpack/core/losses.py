"""Which calls count as losses: those whose class has the rule of a loss, and modules of the user's own that look like one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.calls import Mark, ModuleCall
from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.loss_elementwise import PiecewiseLinearLossDerivatives
from backpack.core.derivatives.loss_generic import EntrywiseLossDerivatives, GenericLossDerivatives, OwnLossDerivatives, how_to_register
from backpack.core.graph import operation, sequence_number, shape_of
from backpack.core.linear import LINEAR_IN_LOG_PROBABILITIES, PIECEWISE_LINEAR, SAME_ENTRIES, TRANSPOSES, is_linear
from backpack.core.loss_nodes import FUNCTIONS, function_at
from backpack.core.samples import Layout
from backpack.core.slots import Edge, Slot
from backpack.core.ways import BROADCASTING, ELEMENTWISE
from backpack.utils.differentiation import search
from backpack.utils.errors import LossNotExtendedError, LossValueError, ShapeError, UnsupportedError

_OWN, _CURVED, _ENTRYWISE = OwnLossDerivatives(), GenericLossDerivatives(), EntrywiseLossDerivatives()
_OF_TARGETS = frozenset("MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss".split())
"""Losses of entries, which they may sum."""
_REARRANGES = SAME_ENTRIES | TRANSPOSES | {"Slice", "Clone", "ToCopy"}
_PICKS = _REARRANGES | {"Select"}


def take_for_loss(call: ModuleCall, node: Node, always: bool = False) -> bool:
    """Take a call for that of a loss, if it looks like one: differentiated automatically from now on.

    Args:
        call: A call, upstream of which there is no loss.
        node: Node of what it returned.
        always: Whether a cross-entropy is taken for a loss of one's own, too, where functions are not read.

    Returns:
        Whether a module without rule and parameters, extended on its own, has made one number of a prediction and something else; or of a prediction
        alone, if that is curved, and the prediction is no loss already. Not where it is a cross-entropy: that is known, as of a function.
    """
    if call.derivatives is not None or not call.root or not call.recorder.bare or not _makes_a_number(call):
        return False
    prediction = next(iter(call.inputs), None)
    if not isinstance(prediction, Slot) or prediction.edge is None or not prediction.shape or not prediction.dtype.is_floating_point:
        return False
    nodes = _inside(call, node)
    curved = _is_curved(nodes)
    of_log_probabilities = len(call.inputs) > 1 and _are_log_probabilities(prediction.edge[0], nodes)
    if not always and (of_log_probabilities or _is_cross_entropy(nodes, prediction.edge)):
        return False
    if len(call.inputs) == 1 and (not curved or any(function_at(inside) for inside in search([prediction.edge[0]]))):
        return False
    call.derivatives = _CURVED if curved else _OWN
    return True


def _inside(call: ModuleCall, node: Node) -> list[Node]:
    # the nodes of a call, behind what it was given
    given = {slot.edge[0] for slot in call.tensor_inputs if slot.edge is not None}
    return [*search([node], lambda inside: [n for n, _ in inside.next_functions if n is not None and n not in given])]


def _is_curved(nodes: Iterable[Node]) -> bool:
    # whether some operation is: where predictions are far away, or clipped, the curvature of such a loss may still be zero for all samples
    linear = (operation(n) in LINEAR_IN_LOG_PROBABILITIES or is_linear(n, lambda _: True) or isinstance(n, BackwardCFunction) for n in nodes)
    return not all(linear)


def _is_cross_entropy(nodes: list[Node], prediction: Edge) -> bool:
    # whether there is one softmax, of the prediction, perhaps rearranged, and all behind it is linear in log-probabilities
    softmaxes, front = [node for node in nodes if operation(node) == "LogSoftmax"], {prediction[0]}
    if len(softmaxes) != 1:
        return False
    edge = softmaxes[0].next_functions[0]
    while edge != prediction:
        if edge[0] is None or operation(edge[0]) not in _REARRANGES:
            return False
        front.add(edge[0])
        edge = edge[0].next_functions[0]
    behind = [node for node in nodes if node is not softmaxes[0] and node not in front]
    return all(_is_linear_behind(node) and front.isdisjoint(n for n, _ in node.next_functions) for node in behind)


def _are_log_probabilities(node: Node, nodes: list[Node]) -> bool:
    # whether a loss that is linear is given such, as it does with them what is only done with such, or as a softmax made them
    if not all(map(_is_linear_behind, nodes)):
        return False
    made = search([node], lambda n: [upstream for upstream, _ in n.next_functions if upstream is not None] if _is_linear_behind(n) else [])
    return any(operation(n) in LINEAR_IN_LOG_PROBABILITIES for n in nodes) or any(operation(n) == "LogSoftmax" for n in made)


def _is_linear_behind(node: Node) -> bool:
    if operation(node) in LINEAR_IN_LOG_PROBABILITIES:
        return True
    return is_linear(node, lambda _: True) and operation(node) not in PIECEWISE_LINEAR and not isinstance(node, BackwardCFunction)


def read_entries(call: ModuleCall, inside: Iterable[Node], prediction: Edge, varies: Callable[[Node], Any]) -> None:
    """Let the Hessian of a loss that is differentiated automatically be a diagonal, where its graph shows that it is one.

    Args:
        call: The call of the loss.
        inside: Its nodes.
        prediction: Edge of its first input.
        varies: Says, of the node of an input, whether that depends on the prediction.
    """
    if type(call.derivatives) is GenericLossDerivatives and _keeps_entries_apart(inside, prediction, varies):
        call.derivatives = _ENTRYWISE


def _keeps_entries_apart(inside: Iterable[Node], prediction: Edge, varies: Callable[[Node], Any]) -> bool:
    # whether all is of single entries, until all is linear: what has been arranged alike, and is broadcast at most, lies along the same axes
    arranged: dict[Edge, Edge] = {prediction: prediction}
    for node in sorted(inside, key=sequence_number):
        name, ways = operation(node), {arranged.get(edge) for edge in node.next_functions if edge[0] is not None and varies(edge[0])}
        way = next(iter(ways)) if len(ways) == 1 else None
        if way and name in ELEMENTWISE | BROADCASTING | _PICKS:
            arranged[node, 0] = (node, 0) if name in _PICKS else way
        elif ways and not (is_linear(node, varies) or (way and name in _OF_TARGETS)):
            return False
    return True


def completes_softmax(call: ModuleCall, reach: Mapping[Node, int], is_linear: Callable[[Node], bool]) -> bool:
    """Say whether a loss is linear in log-probabilities of some ``LogSoftmax``: both together are a cross-entropy, and the loss starts there.

    The loss alone would have no curvature; and it would matter whether it is a module that was extended, or a function. Where another path leads past
    every ``LogSoftmax``, it is refused as that of a function is.

    Args:
        call: A call.
        reach: Node to bit set of the tracked parameters upstream of it.
        is_linear: Says whether a node is linear in what depends on them.

    Returns:
        Whether it is.
    """
    if not isinstance(call.derivatives, PiecewiseLinearLossDerivatives) or not isinstance(call.module, (nn.NLLLoss, nn.KLDivLoss)):
        return False
    prediction, *others = [slot.edge and slot.edge[0] for slot in call.tensor_inputs]
    if any(reach.get(target) for target in others) or not reach.get(prediction):
        return False
    nodes = search([prediction], lambda node: [n for n, _ in node.next_functions if reach.get(n)] if is_linear(node) else [])
    return any(function_at(node) == "LogSoftmax" for node in nodes)


def _has_no_rule(call: ModuleCall) -> bool:
    return call.derivatives in (None, _OWN, _CURVED) or isinstance(call.derivatives, GenericDerivatives)


def _makes_a_number(call: ModuleCall) -> bool:
    return len(call.outputs) == 1 and not call.outputs[0].shape


def has_samples(call: ModuleCall, second_order: bool) -> bool:
    """Say whether the samples of a loss lie on axis 0 of its prediction.

    Args:
        call: A loss call.
        second_order: Whether quantities start at the loss, so that anything else is refused.

    Returns:
        Whether they do.

    Raises:
        NotImplementedError: What the rule raises, if ``second_order``.
        ValueError: What the rule raises, if ``second_order``.
        RuntimeError: What the rule raises, if ``second_order``; for a single sample without a batch axis (``ShapeError``) in any case.
        UnsupportedError: If the prediction is complex, if ``second_order``.
    """
    if not second_order and not call.inputs[0].shape:
        return False  # a loss of one number: the samples have been summed up before
    if second_order and call.inputs[0].dtype.is_complex:
        raise UnsupportedError(
            f"{call.path} takes complex predictions, for which its curvature is not known. Give it real ones, torch.view_as_real(prediction), say."
        )
    try:
        call.derivatives._verify_support(call)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        if second_order or isinstance(error, ShapeError):
            raise
        return False
    return True


def refuse_as_loss(marks: Iterable[Mark]) -> None:
    """Refuse a loss that could not stand for its piece of the graph.

    Args:
        marks: What calls left on a graph node.

    Raises:
        LossValueError: If one of them is a loss.
    """
    for mark in marks:
        if mark.call.is_loss:
            if swapped := _swapped(mark.call):
                raise LossValueError(f"{swapped}.")
            raise LossValueError(
                f"The curvature of {mark.call.path} with respect to the prediction is not known, or not all of it: it has parameters of its own, "
                "depends on more than its arguments, or has computed something else than its class does, as with a hook or a patched function. Move "
                "layers into the model, and give the loss their output; write what a hook computes as a loss of your own."
            )


def _swapped(call: ModuleCall) -> str | None:
    prediction, *others = [slot.edge for slot in call.tensor_inputs]
    if prediction is not None or not any(others):
        return None
    return f"{call.path}: its first argument, the prediction, depends on no parameter, but another one does. Write the prediction first"


def refuse_without_loss(parameters: Mapping[Parameter, str], calls: Iterable[ModuleCall], ended: Collection[ModuleCall]) -> None:
    """Refuse a second-order quantity for want of a loss.

    Args:
        parameters: The parameters and their names.
        calls: All calls.
        ended: Those that have made the tensor on which backward was called.

    Raises:
        LossNotExtendedError: Always.
    """
    write = "write `lossfunc = extend(torch.nn.CrossEntropyLoss())`, and `lossfunc(model(X), y).backward()`"
    hint = f"{write}; a loss written by hand goes into a module of your own, `(prediction, target) -> loss`, called with both and extended likewise"
    for call in calls:
        if not call.root:
            continue
        if call in ended and not (call.is_loss or call.recorder.bare or _makes_a_number(call)):
            hint = (
                f"it was called on the output of {call.path} itself. If a gradient was given there, it is not known which loss it belongs to: call "
                f"backward on the loss, without a detached copy in between. That is, {write}"
            )
        elif call.is_loss and (swapped := _swapped(call)):
            hint = swapped
        elif (call.is_loss or (call.recorder.bare and _makes_a_number(call))) and call.inputs and not isinstance(call.inputs[0], Slot):
            hint = (
                f"the first argument of {call.path}, the prediction, is a {type(call.inputs[0]).__name__}, but has to be one tensor with the samples "
                "on axis 0. Give it all parts in one, as `torch.cat([mean, variance], 1)`, and let it take them apart"
            )
        elif not call.recorder.bare and _makes_a_number(call):
            hint = f"{call.path} has parameters, but a loss is a function of the model's output: {write} for it"
            if len(call.inputs) > 1:
                hint += (
                    f". If it is a loss, with parameters of its own, say so, {how_to_register(call)}, and freeze these, or leave them out of "
                    "second-order quantities (exclude=)"
                )
        elif call.recorder.bare and len(call.inputs) > 1 and _has_no_rule(call):
            hint = (
                f"{call.path} has no rule, or depends on more than its arguments. If it is a loss, whose first argument is the prediction with the "
                f"samples on axis 0, write {how_to_register(call)} before the forward pass"
            )
    raise LossNotExtendedError(
        "No loss is known on a path from the tensor on which backward was called to {names}. Second-order quantities start at a loss that is an "
        f"extended module, or one of {', '.join(name for name, *_ in FUNCTIONS.values())} in torch.nn.functional: {hint}. "
        "Write `backpack.leave_out(term)` for a term to be ignored.",
        parameters,
    )


def refuse_target(path: str) -> None:
    """Refuse a loss of which not only the prediction depends on parameters.

    Args:
        path: Its name.

    Raises:
        LossValueError: Always.
    """
    raise LossValueError(
        f"{path}: an input other than the prediction depends on trainable parameters, so that the curvature of the loss with "
        "respect to its prediction is not all of it. Detach that input, if this loss is not to train it, as a target. Otherwise make one prediction "
        "of all that depends on parameters: the difference of two predictions, with zeros as its target; or mean and variance side by side, "
        "torch.cat([mean, var], 1), in an extended loss of your own that takes them apart."
    )


def refuse_axis(path: str, edge: Edge, layout: Layout) -> None:
    """Refuse a prediction whose samples lie on another axis than the loss takes them from.

    Args:
        path: Name of the loss.
        edge: Edge of the prediction.
        layout: Where they lie.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{path} takes its samples from axis 0 of a prediction of shape {list(shape_of(edge))}, but the {layout.samples} samples lie on axis "
        f"{layout.axis} there. Give it the samples on axis 0, [N, C, T] or [N * T, C], say, instead of [T, C, N]."
    )
