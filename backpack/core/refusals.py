"""Refusals of a plan: what is wrong, where, and the way out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import Node
from torch.nn import MultiheadAttention, Parameter

from backpack.core.batches import batch_of, lacks_batch, leading_shape
from backpack.core.calls import ModuleCall
from backpack.core.graph import operation, reads_data, saved, shape_of
from backpack.core.linear import RESHAPES
from backpack.core.samples import Layout, settle
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.core.ways import SPLIT, State
from backpack.utils.differentiation import compiled
from backpack.utils.errors import MixedSamplesError, NotRecordedError, UnattributedError, UnsupportedError

_NOT_COMPILED = 'Run the forward pass of a compiled model under `torch.compiler.set_stance("force_eager")` where you ask for quantities.'
_RETURN = "Let the model return its predictions, with the samples on axis 0 (padded, if these are ragged), and compute the loss of them."
_COMPARED = (
    "A loss that compares each sample with each, as contrastive ones do, has first-order quantities only, those of the rows that it compares: let "
    "the model return these, and compute the loss of them outside. "
)
_SELECT = frozenset({"Select", "Unbind"})


def mixing(walk: Walk, node: Node, how: str, by: Node | None = None) -> MixedSamplesError:
    """Refuse samples that influence one another.

    Args:
        walk: The graph.
        node: Node upstream of which the parameters lie.
        how: In which way.
        by: Node that mixes them, if it is known.

    Returns:
        The error.
    """
    if by is not None and operation(by) in RESHAPES:
        way_out = (
            "Keep the samples on an axis of their own (return [N, T, C], and reshape in the call of the loss: `lossfunc(out.reshape(-1, C), y)`)"
        )
    elif by is not None and node in walk.derived:
        way_out = (
            "Take these derivatives without create_graph=True, which makes them constants, extend one module that takes them and returns the loss, "
            "or call backward outside of the context"
        )
    elif by is not None and operation(by).startswith(("Bmm", "Scaled")) and (call := next(filter(_attends_along, walk.calls), None)):
        way_out = (
            f"{call} takes its samples from axis 1 (batch_first=False), and lets those of axis 0 attend to one another: if these are the samples, "
            "give it batch_first=True"
        )
    else:
        way_out = (
            "Use an operation that treats samples independently (LayerNorm or GroupNorm instead of batch statistics; .eval() for BatchNorm) and "
            "inputs that have a batch axis"
        )
    compared = _COMPARED if by is not None and by not in walk.marks and len({*shape_of((by, 0))[-2:]}) == 1 else ""
    return MixedSamplesError(
        f"The samples of the mini-batch influence one another: {how}. No per-sample quantity exists for {{names}}. {compared}{way_out}, or leave "
        "these parameters out of all extensions: {exclude}.",
        walk.named(walk.reach[node]),
    )


def _attends_along(call: ModuleCall) -> bool:
    return isinstance(call.module, MultiheadAttention) and not call.module.batch_first


def single(walk: Walk, node: Node, call: ModuleCall) -> MixedSamplesError | None:
    """Refuse a module that was given one sample without a batch axis, where something else would be taken for samples.

    Args:
        walk: The graph.
        node: Node of its output.
        call: Its call.

    Returns:
        The error; ``None`` if it is no such call, or has no parameters.
    """
    if call.is_loss or next(call.module.parameters(), None) is None or not lacks_batch(call):
        return None
    return MixedSamplesError(
        f"{call} got an input of shape {list(call.inputs[0].shape)}, without a batch axis: one sample, or several that were mixed. Give it "
        "inputs with samples on axis 0 (`x[None]` for a single one), or leave these parameters out of all extensions: {exclude}.",
        walk.named(walk.reach[node]),
    )


def unrecorded(walk: Walk, node: Node) -> NotRecordedError:
    """Refuse parameters of modules that were not recorded.

    Args:
        walk: The graph.
        node: Node upstream of which the parameters lie.

    Returns:
        The error.
    """
    for part in filter(compiled, walk.order):
        if any(leaf in walk.leaves and walk.reach[leaf] & walk.reach[node] for leaf, _ in part.next_functions):
            return NotRecordedError(_of_compiled(part), walk.named(walk.reach[part]))
    if not (walk.marks or reads_data(walk.order)):
        return NotRecordedError(
            "{names}: backward was called on what is made of parameters alone, as far as its graph tells: a penalty on weights, say. It belongs to "
            "no sample. Call its backward outside of the context, or give it to backpack.leave_out(): leave_out(penalty).backward().",
            walk.named(walk.reach[node]),
        )
    return NotRecordedError(
        "No forward pass of an extended module was recorded for {names}. It may have run before extend(); after CTX.remove_hooks(), which undoes "
        "that; under disable() or no_grad(); with other parameters (torch.func.functional_call, or replaced since); compiled; past the hooks, as "
        "model.forward(X); or inside of torch.vmap. Run it again after extend(), as model(X) of the whole mini-batch. Where a part of the model is "
        "to carry nothing any more, as if only the last layer was extended again, call unextend() on that part. If the loss uses nothing that a "
        "module has returned, but an attribute that the model sets, say, let the model return that. A penalty on weights, of no sample, is given to "
        "backpack.leave_out(). "
        f"{_NOT_COMPILED}",
        walk.named(walk.reach[node]),
    )


def refuse_compiled(walk: Walk, node: Node) -> None:
    """Refuse to look into a compiled part of the model.

    Args:
        walk: The graph.
        node: A node upstream of which parameters lie.

    Raises:
        UnsupportedError: If the node stands for such a part.
    """
    if compiled(node):
        raise UnsupportedError(_of_compiled(node), walk.named(walk.reach[node]))


def _of_compiled(node: Node) -> str:
    return (
        f"A part of the model was compiled (torch.compile, or a CUDA graph): for autograd it is the single node {node.name()}, in which neither "
        f"samples nor uses of {{names}} can be followed. {_NOT_COMPILED}"
    )


def bare(walk: Walk, node: Node) -> UnattributedError:
    """Refuse a use of parameters that belongs to no sample.

    Args:
        walk: The graph.
        node: Node upstream of which the parameters lie.

    Returns:
        The error.
    """
    graphs = (slot.shape for call in walk.outermost for index, slot in enumerate(call.outputs) if index not in call.detached)
    parts = [f" (a model returned {list(s)} for {n} samples)" for s in graphs for n in walk.batches if n and s[:1] not in ((), (1,), (n,))]
    return UnattributedError(
        "{names}: used outside of everything that has samples: in a penalty on the parameters, say, or on derivatives inside of a model that returns "
        "its loss, in an output of the model that is made of parameters alone or of some samples, or in a factor of losses behind the last module. "
        "The gradient there belongs to no sample, or to samples that cannot be followed, as where another axis is as long as the mini-batch"
        f"{''.join(parts[:1])}. To leave such a term out of all quantities, and keep it in .grad, write "
        "`loss = loss + backpack.leave_out(penalty)`. To keep it in them, let the model return a row for each sample there (padded, where "
        "it has several), like losses [N] or `std.expand_as(mean)`, and reduce outside. To leave the parameters out of an extension, write "
        "{exclude}.",
        walk.named(walk.reach[node]),
    )


def nowhere(walk: Walk, node: Node) -> UnattributedError:
    """Refuse parameters of models in which no place is known where the samples begin.

    Args:
        walk: The graph.
        node: Node upstream of which the parameters lie.

    Returns:
        The error.
    """
    counted = f" ({', '.join(map(str, sorted(walk.batches)))})" if walk.batches else ""
    return UnattributedError(
        "{names}: nothing on the way to the tensor on which backward was called is known to hold the samples. No outermost module returns as many "
        f"rows as it was given samples{counted}, nor does one inside. {_RETURN}",
        walk.named(walk.reach[node]),
    )


def other_rows(walk: Walk, node: Node, what: str, samples: int, axis: int | None = None) -> UnsupportedError:
    """Refuse a model that returns its loss, or no rows that can be told, where rows of a module inside may be something else than samples.

    Args:
        walk: The graph.
        node: Node of the output of a module.
        what: A tensor inside.
        samples: Number of samples.
        axis: The axis on which they would lie there, but do not; ``None`` if it is only that they may lie elsewhere.

    Returns:
        The error.
    """
    why = (
        f"the {samples} rows of a module inside could be others: there is {what}, and several axes of it, or arguments of the model, may have samples"
        if axis is None
        else f"{what} was called, and the {samples} samples would lie on its axis {axis}, but the model's input says otherwise"
    )
    shape, way = next((slot.shape for call in walk.outermost for slot in call.outputs), torch.Size()), ""
    returned = "its loss"
    if shape.numel() > 1:
        returned = f"a tensor of shape {list(shape)}, of which no axis is known to be that of the samples that it was given"
        way = "Use a mini-batch of another size, if another axis is as long. "
    return UnsupportedError(
        f"The model returns {returned}, so that samples can only be told from the modules inside: {why}. {way}{_RETURN}", walk.named(walk.reach[node])
    )


def ambiguous(walk: Walk, edge: Edge, one: Layout, other: Layout) -> UnsupportedError:
    """Refuse a tensor whose samples lie differently for two of its consumers: on another axis, or others; or the same in another order.

    Args:
        walk: The graph.
        edge: Edge of the tensor.
        one: Where they lie for one consumer.
        other: Where they lie for another one.

    Returns:
        The error.
    """
    shape = list(shape_of(edge))
    if one._replace(labels=sorted(one.labels)) == other._replace(labels=sorted(other.labels)):
        how = f"they lie in one order on axis {one.axis} of a tensor of shape {shape} for one of its consumers, and in another order for another one"
        return mixing(walk, edge[0], f"{how}, as where each is added to another one (`x + x[permutation]`)")
    compared = _COMPARED if one.axis != other.axis and len({*shape}) == 1 else ""
    elsewhere = "in another order" if one.axis == other.axis else f"on axis {other.axis}, or in another order,"
    return UnsupportedError(
        f"The {one.samples} samples lie on axis {one.axis} of a tensor of shape {shape} for one of its consumers, and "
        f"{elsewhere} for another one: per-sample quantities of {{names}} are ambiguous. What the model returns should have "
        "the samples on axis 0: transpose it, or set batch_first=True. If another axis of the model is as long as the mini-batch, use a mini-batch "
        f"of another size. {compared}Or leave these parameters out of all extensions: {{exclude}}.",
        walk.named(walk.reach[edge[0]]),
    )


def sizes(walk: Walk, edge: Edge, one: int, other: int) -> UnsupportedError:
    """Refuse a tensor at which mini-batches of different size meet.

    Args:
        walk: The graph.
        edge: Edge of the tensor.
        one: Number of samples for one consumer.
        other: Number of samples for another one.

    Returns:
        The error.
    """
    return UnsupportedError(
        f"Mini-batches of {one} and of {other} samples meet in a tensor of shape {list(shape_of(edge))}: per-sample quantities of "
        "{names} are ambiguous. Call backward for each of them (backpack(..., accumulate=True) unites the results), or leave these parameters "
        "out of all extensions: {exclude}.",
        walk.named(walk.reach[edge[0]]),
    )


def unequal(walk: Walk, parameter: Parameter, one: int, other: int) -> UnsupportedError:
    """Refuse a parameter that is used with mini-batches of different size.

    Args:
        walk: The graph.
        parameter: The parameter.
        one: Number of samples for one use.
        other: Number of samples for another one.

    Returns:
        The error.
    """
    return UnsupportedError(
        f"{{names}}: used with mini-batches of {one} and of {other} samples in one backward pass: which samples belong together "
        "is not known. Call backward for each of them (backpack(..., accumulate=True) unites the results), or leave it out of all "
        "extensions: {exclude}.",
        {parameter: walk.names[parameter]},
    )


def refuse_second_order(node: Node, walk: Walk) -> None:
    """Refuse to carry second-order quantities across a node whose gradients are none.

    Args:
        node: A graph node.
        walk: The graph.

    Raises:
        UnsupportedError: If it is such a node.
    """
    if operation(node) in ("Embedding", "EmbeddingBag") and saved(node, "scale_grad_by_freq"):
        raise UnsupportedError(
            f"{walk.where(node)} divides gradients by frequencies (scale_grad_by_freq=True), so that they are not derivatives of the loss, and no "
            "second-order quantity is defined. Switch it off, or leave these parameters out: {exclude}.",
            walk.named(walk.reach[node]),
        )


def refuse_prediction(call: ModuleCall, shape: torch.Size, samples: int, axis: int) -> None:
    """Refuse a loss that counts samples in another way than the model.

    Args:
        call: Call of the model.
        shape: Shape of its output.
        samples: Number of samples.
        axis: The axis on which they lie.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"The loss takes its samples from axis 0 of a tensor that is not laid out like the output {list(shape)} of {call} "
        f"({samples} samples on axis {axis}). Give the loss that output with the samples on axis 0, reshaped at most."
    )


def turned(call: ModuleCall) -> UnsupportedError:
    """Refuse a model of which input and output tell different samples, where no loss says which they are.

    Args:
        call: Its call.

    Returns:
        The error.
    """
    given, shape = list(leading_shape(call)), next(list(slot.shape) for slot in call.outputs if slot.shape)
    squeezed = " (squeeze() drops that of a single sample, too: use squeeze(-1))" * (batch_of(call) == 1)
    return UnsupportedError(
        f"{call} was given a tensor of shape {given} and returns {shape}: samples lie on axis 0 of what a model returns, which would be {shape[0]} "
        f"there, but it was given {batch_of(call) or given[0]}. Give it the samples on axis 0, and return them there; exchange or merge axes outside "
        f"of the model, if the loss needs it{squeezed}."
    )


def refuse_other_rows(walk: Walk, node: Node, states: Iterable[State]) -> None:
    """Refuse to take rows for samples where they turn out to be something else.

    Args:
        walk: The graph.
        node: A node that made the output of a module, upstream of a loss whose rows have been taken for samples.
        states: States of its outputs.

    Raises:
        UnsupportedError: If the rows do not stay on axis 0, one or several neighbours for each of them.
    """
    settled = [settle(state) for state in states if state is not SPLIT]
    if any(state.axis or [*state.labels] != sorted([*range(state.samples)] * (len(state.labels) // max(1, state.samples))) for state in settled):
        raise UnsupportedError(
            f"The loss takes the rows of its prediction for samples, but these are not the rows of what a module inside returns, at "
            f"{walk.where(node)}. {_RETURN}"
        )


def refuse_one_row(walk: Walk, loss: object, below: Edge, layout: Layout) -> None:
    """Refuse a single loss of one row of what a module has returned, as ``out[-1]``: what lies on axis 0 there is something else than samples.

    Args:
        walk: The graph.
        loss: The only loss.
        below: Edge of its prediction.
        layout: Where the samples would lie in it.

    Raises:
        UnsupportedError: If the prediction is such a row.
    """
    node, selects = below[0], False
    while node not in walk.marks:
        selects = selects or operation(node) in _SELECT
        ways = [upstream for upstream, _ in node.next_functions if walk.is_tracked(upstream)]
        if len(ways) != 1:
            return
        node = ways[0]
    if selects and layout.samples > 1 and len(set(settle(layout).labels)) == 1:
        raise UnsupportedError(
            f"{loss} is a loss of one of the {layout.samples} rows that {walk.marks[node][-1].call} returned, of shape {list(shape_of((node, 0)))}: "
            "on axis 0 there lie no samples, it seems, but steps in time, say. Return the samples on axis 0 (transpose, or batch_first=True), and "
            "extend the whole model; for the loss of a single sample, take a slice (out[i : i + 1]).",
            walk.named(walk.reach[node]),
        )


def refuse_released(call: ModuleCall) -> None:
    """Refuse a call whose tensors are gone.

    Args:
        call: The call.

    Raises:
        NotRecordedError: If it has given back what it had recorded.
    """
    if call.released:
        raise NotRecordedError(
            f"What {call.path} had recorded was given back after an earlier backward pass over this graph, or by memory_cleanup(). Call that "
            "pass with retain_graph=True, and clean up after this one."
        )
