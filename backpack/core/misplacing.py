"""Misplacing: what was taken for samples, but is something else, as far as what the model was given tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.batches import agrees_with_data, known_axis, mini_batches
from backpack.core.calls import ModuleCall
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.downstream import is_looked_up, meets
from backpack.core.graph import operation, saved, saved_tensors, shape_of
from backpack.core.loss_nodes import title
from backpack.core.memory import owners_in
from backpack.core.origins import FACTORS, is_constant, is_made, is_relative
from backpack.core.samples import Layout
from backpack.core.walk import Walk
from backpack.core.ways import SPLIT, State
from backpack.utils.errors import UnsupportedError

_TOLD = frozenset("Mul Mv Convolution Embedding Gather".split())
"""Other operations of which the axes of a result are those of what goes in, but for features."""


def refuse_misplaced(walk: Walk, node: Node, states: Mapping[int, State]) -> None:
    """Refuse what was taken for samples, but is something else, as far as what the model was given tells.

    The output ``[E, N, C]`` of ``E`` experts has as many rows as there are samples if ``E`` happens to be ``N``, and so has ``[C, N]`` if ``C`` is.

    Args:
        walk: The graph.
        node: A node into which something goes that depends on no parameter.
        states: States of its outputs.

    Raises:
        _misplaced: If a layer, or a product, was given samples that lie elsewhere than those of its output; or a tensor of
            unknown origin with as many rows as there are samples, where those of its output lie on another axis.
    """
    for nr, layout in states.items():
        if layout is SPLIT:
            continue
        elsewhere = layout.axis > 0 or (layout.of_one and len(layout.labels) - layout.labels.count(-1) > 1)
        if not elsewhere and not _repeats(walk, layout.samples):
            continue
        marks = [mark for mark in walk.marks.get(node, ()) if mark.nr == nr and not mark.base]
        calls = [mark.call for mark in marks if mark.call.found.rule is not None and not mark.call.is_loss]
        if calls:
            given = [_input_of(walk, call, layout, elsewhere) for call in calls]
        else:
            given = _factors_of(walk, node, layout, elsewhere)
        for tensor, apart in given:
            turned = apart and not layout.of_one and (bool(calls) or _has_features(walk, node, layout))  # no feature is a sample
            if not turned and not (_repeats(walk, layout.samples) and any(mini_batches(walk.outermost, layout.samples))):
                continue
            if tensor is None and turned:  # what a layer was given
                raise _misplaced(walk, node, calls, calls[0].tensor_inputs[0].shape, layout, False)
            if tensor is None or tensor.layout != torch.strided or tensor.is_nested or is_constant(walk, tensor) or is_relative(tensor):
                continue
            found = _lies_elsewhere(*_by_groups(node, tensor, layout), walk.outermost, apart)
            copied = not calls and not apart and tensor.stride()[layout.axis : layout.axis + 1] == (0,)
            unknown = found is None and (elsewhere or copied) and (calls or operation(node) != "Mul")
            axes = tensor.shape[:-1][:2] if tensor.is_floating_point() else tensor.shape[:2]
            rows = [size for axis, size in enumerate(axes) if apart or axis != layout.axis or layout.of_one]
            if turned or found or (unknown and (calls or -1 not in layout.labels) and layout.samples in rows):
                raise _misplaced(walk, node, calls, tensor.shape, layout, not (turned or found))


def refuse_own_rows(walk: Walk, node: Node, state: State) -> None:
    """Refuse a parameter that would have a row for each sample, where what it meets first has an axis that is as long.

    The output ``[E, N, C]`` of ``E`` experts ``[E, D, C]`` looks like that if ``E`` is ``N``, whatever they are given.

    Args:
        walk: The graph.
        node: Leaf of the parameter.
        state: Where the samples lie in it.

    Raises:
        UnsupportedError: If its rows are rather no samples.
    """
    if state is SPLIT or state.samples == 1 or not state.plain or is_looked_up(walk, node, state.axis) or not meets(walk, node, state.samples):
        return
    raise UnsupportedError(
        f"{{names}}: of shape {list(shape_of((node, 0)))}, would have a row on axis {state.axis} for each of the {state.samples} samples, and what "
        "is made of it has another axis of this length: rather, these are experts, classes or positions, and samples lie on that one. Let the model "
        "return its samples on axis 0 ([N, E, C], not [E, N, C]), use a mini-batch of another size, or leave it out of all extensions: {exclude}.",
        walk.named(walk.reach[node]),
    )


def factors_agree(walk: Walk, node: Node, states: Mapping[int, State]) -> bool | None:
    """Compare where the samples should lie in what a function was given with where they do, in a model that returns its loss.

    Args:
        walk: The graph.
        node: Node of the function.
        states: States of its outputs.

    Returns:
        Whether they do; ``None`` where that is no data of a model, as far as memory tells.
    """
    found = []
    for layout in states.values() if walk.returns_loss else ():
        if layout is not SPLIT and layout.samples > 1:
            found += [agrees_with_data(walk.outermost, tensor, layout) for tensor, apart in _factors_of(walk, node, layout, True) if not apart]
    return None if set(found) <= {None} else False not in found


def _lies_elsewhere(tensor: Tensor, layout: Layout, calls: Iterable[ModuleCall], apart: bool = False) -> bool | None:
    """Say whether several samples that an outermost module was given lie in a tensor where there should be one; in which order does not matter.

    Args:
        tensor: The tensor.
        layout: Where the samples should lie.
        calls: Calls of outermost modules.
        apart: Whether the axis on which they should is none of the tensor.

    Returns:
        Whether they do; ``None`` where the tensor is no view of one with as many rows as samples, or nobody holds that any more.
    """
    for source, axis in mini_batches(calls, layout.samples):
        owners = owners_in(tensor, source, axis)
        if owners is None:
            continue
        if not apart and tensor.shape[layout.axis : layout.axis + 1] == (len(layout.labels),):
            owners = owners.movedim(layout.axis, 0)[[index for index, label in enumerate(layout.labels) if label >= 0]]
            owners = owners.unsqueeze(1).flatten(1)
            if not layout.of_one:
                return bool((owners != owners[:, :1]).any())
        return owners.numel() > 0 and bool((owners != owners.flatten()[0]).any())
    return None


def _by_groups(node: Node, tensor: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    # what a convolution multiplies with kernels of each sample has other channels than it returns: it is compared group by group
    if operation(node) != "Convolution" or layout.axis != 1:
        return tensor, layout
    groups, given, weight = saved(node, "groups"), saved(node, "input"), saved(node, "weight")
    # a checkpointed part hands out another tensor each time, of one that has a graph
    axis = int(given is not None and tensor.shape == given.shape and (weight is None or weight.shape != given.shape or torch.equal(tensor, given)))
    labels = layout.labels[:: len(layout.labels) // groups]
    if layout.labels != tuple(label for label in labels for _ in range(len(layout.labels) // groups)):
        return tensor, layout
    return tensor.unflatten(axis, (groups, -1)), Layout(axis, labels, layout.samples)


def _repeats(walk: Walk, samples: int) -> bool:
    # whether another axis of what an outermost module returns is as long as the mini-batch
    if "repeated" not in walk.memo:
        shapes = [slot.shape for call in walk.outermost for slot in call.outputs]
        walk.memo["repeated"] = {size for shape in shapes for size in shape if shape.count(size) > 1}
    return samples in walk.memo["repeated"]


def _input_of(walk: Walk, call: ModuleCall, layout: Layout, elsewhere: bool) -> tuple[Tensor | None, bool]:
    # the first tensor that a layer was given, if it is data; and whether an axis of the output is that of features
    slot, rule = next(iter(call.tensor_inputs), None), call.found.rule
    told = slot is not None and (elsewhere or slot.shape[:2] == (layout.samples,) * 2)  # else no other axis could be meant
    if not told or not walk.is_data(slot) or known_axis(call) == layout.axis:
        return None, False
    if not isinstance(rule, (AffineDerivatives, EmbeddingDerivatives)):
        return slot.tensor, False
    if not rule.any_batch_axis:  # a convolution
        return slot.tensor, layout.axis == 1 and getattr(call, "groups", 1) == 1
    return slot.tensor, layout.axis >= len(call.outputs[0].shape) - rule.feature_axes(call)


def _factors_of(walk: Walk, node: Node, layout: Layout, elsewhere: bool) -> Iterator[tuple[Tensor | None, bool]]:
    # the factors of a product that are data; and whether an axis of it is none of the factor
    name, axes = operation(node), len(shape_of((node, 0)))
    for axis, names in zip((1, 2), FACTORS.get(name, ()), strict=False):
        tensor, apart = saved(node, names), layout.axis == axes - axis
        # samples that are mixed by a matrix that was computed from them are refused elsewhere
        if tensor is not None and not is_made(walk, tensor) and (elsewhere or not apart or node.next_functions[-2][0] not in walk.has_data):
            yield tensor, apart
    for tensor in saved_tensors(node, results=False) if name in _TOLD and (elsewhere or name in ("Mul", "Gather")) else ():
        if not is_made(walk, tensor):
            yield tensor[(None,) * (axes - tensor.dim())] if name == "Mul" else tensor, _is_feature(node, layout)


def _is_feature(node: Node, layout: Layout) -> bool:
    # whether an axis of the result is that of features, which a table or kernels bring
    if operation(node) == "Embedding":
        return layout.axis == len(shape_of((node, 0))) - 1
    return operation(node) == "Convolution" and layout.axis == 1 and saved(node, "groups") == 1


def _has_features(walk: Walk, node: Node, layout: Layout) -> bool:
    # whether what brings an axis that is none of the data depends on parameters alone
    last = layout.axis == len(shape_of((node, 0))) - 1
    factor = node.next_functions[{"Embedding": 0, "Convolution": 1}.get(operation(node), -1 if last else -2)][0]
    return factor is not None and factor not in walk.has_data


def _misplaced(walk: Walk, node: Node, calls: list[ModuleCall], given: torch.Size, layout: Layout, unknown: bool) -> UnsupportedError:
    what, shape = calls[0] if calls else title(node), list(given)
    owner = max(layout.labels, default=-1)
    where = (f"be all of sample {owner}" if owner >= 0 else "be of no sample") if layout.of_one else f"lie on axis {layout.axis}"
    why = (
        f"may have samples elsewhere: where it comes from is not recorded. If the axis of length {layout.samples} there is another one, use a "
        "mini-batch of another size."
        if unknown
        else "has its samples elsewhere, as the input of the model tells."
    )
    return UnsupportedError(
        f"The {layout.samples} samples are taken from axis 0 of what the model returns. Followed from there, what {what} is given, of shape "
        f"{shape}, would {where}, but it {why} Let the model return its samples on axis 0 ([N, E, C], not the [E, N, C] of experts), or leave these "
        "parameters out of all extensions: {exclude}.",
        walk.named(walk.reach[node]),
    )
