"""Where modules of torch have the samples, in what they are given and in what they return; axis 0, if nothing else is known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import getattr_static
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from backpack.core.calls import Mark, ModuleCall
from backpack.core.graph import operation, saved, shape_of
from backpack.core.memory import is_sorted, owners_in, place_of
from backpack.core.samples import Layout, along, label_tensor
from backpack.core.slots import Slot
from backpack.utils.class_table import ClassTable
from backpack.utils.nested import lists_in, opened, tensors_in

_MATRIX, _SEQUENCE = 2, 3
"""Axes of ``[N, C]``, and of ``[N, T, C]``."""
_ATTENTION = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)


def batch_of(call: ModuleCall) -> int | None:
    """Count the samples that a module was called with.

    Args:
        call: Its call.

    Returns:
        Length of the axis of samples of the first tensor; without one, of all those in a mapping or an object; ``None`` if they do not tell.
    """
    shape = first_shape(call)
    return shape[_batch_axis(call)] if shape and not lacks_batch(call) else None


def first_shape(call: ModuleCall) -> torch.Size:
    """Return the shape of the tensor that tells with how many samples a module was called.

    Args:
        call: Its call.

    Returns:
        The shape of the first tensor; without one, of the first in a mapping or an object, where all agree; no axes if nothing tells.
    """
    nested = [] if call.tensor_inputs or lists_samples(call) else nested_in(call)
    disagree = len({tensor.shape[0] for tensor in nested if tensor.shape} - {1}) > 1  # nodes and edges, say
    return torch.Size() if disagree else leading_shape(call)


def leading_shape(call: ModuleCall) -> torch.Size:
    """Return the shape of the first tensor that a module was called with, in whatever.

    Args:
        call: Its call.

    Returns:
        The shape; no axes without such a tensor, or if it may be one of a list of samples.
    """
    nested = [] if call.tensor_inputs or lists_samples(call) else nested_in(call)
    return next((tensor.shape for tensor in call.tensor_inputs or nested if tensor.shape), torch.Size())


def sample_axis(call: ModuleCall, index: int) -> int:
    """Say on which axis of an output of a module the samples lie.

    Args:
        call: Its call, with a batch axis.
        index: Number of the output.

    Returns:
        The axis.
    """
    if index and _LEAST_AXES[ref(call.kind)] and issubclass(call.kind, nn.RNNBase):
        return 1  # states of all layers
    return 0 if index else _batch_axis(call)


def known_axis(call: ModuleCall) -> int | None:
    """Say on which axis the samples lie in the input and in the output of a module of torch that is no map of single rows.

    Args:
        call: Its call.

    Returns:
        The axis, for recurrent layers and attention; ``None`` for all others.
    """
    return _batch_axis(call) if _LEAST_AXES[ref(call.kind)] == _SEQUENCE and isinstance(call.inputs[0], Slot) else None


def lacks_batch(call: ModuleCall) -> bool:
    """Say whether a module was given a single sample, without a batch axis.

    Args:
        call: Its call.

    Returns:
        Whether torch, or its rule, takes the input for one sample.
    """
    given = call.inputs[0] if call.inputs else None
    if not isinstance(given, Slot):
        return False
    least = _LEAST_AXES[ref(call.kind)]
    if least:
        return len(given.shape) < least
    rule = call.found.rule
    if rule is None or rule.is_loss:
        return False
    more = rule.feature_axes(call) - 1 if rule.any_batch_axis else 0
    return len(given.shape) < rule.least_axes + more


def rows_of(call: ModuleCall, marks: Iterable[Mark] = ()) -> int | None:
    """Count the samples that an outermost module returns: as many as the first of its outputs has rows, of those with a graph, if some have one.

    Args:
        call: Its call.
        marks: What calls left on the node of its output: a layer without a batch axis that ends there has returned one sample.

    Returns:
        Their number; ``None`` if it returns none (a loss, say), or if the rows are not the samples that it was given, but may be parts of them
        (``[N * T, C]``, ``[T, N, C]``).
    """
    with_graph = [output for output in enumerate(call.outputs) if output[0] not in call.detached]
    for index, slot in with_graph or enumerate(call.outputs):
        shape, axis = slot.shape, sample_axis(call, index)
        if len(shape) > axis:
            break
    else:
        return None
    rows, first = shape[axis], batch_of(call)
    if rows == first:
        return rows
    if lacks_batch(call) or any(lacks_batch(mark.call) for mark in marks):
        return None
    second = shape[1:2] == (first,) and len(shape) > _MATRIX
    if rows in lengths_of(call):
        return None if second and rows in first_shape(call)[1:] else rows
    if shape == (1,):  # a loss
        return None
    if not first or rows in _others(call):
        return rows if first != 1 and (first not in shape or (len(shape) == _MATRIX and shape != first_shape(call)[::-1])) else None
    return None if first in shape or rows % first == 0 else rows


def counts_others(call: ModuleCall, shape: torch.Size, marks: Iterable[Mark]) -> bool:
    """Say whether the rows of an output are neither the samples that an outermost module was given, nor their positions: members of an ensemble, say.

    Args:
        call: Its call.
        shape: Shape of the output, in which another axis is as long as the mini-batch.
        marks: What calls left on its node.

    Returns:
        Whether they are not.
    """
    return rows_of(call, marks) is None and shape[0] not in {*lengths_of(call), first_shape(call)[:_MATRIX].numel()}


def turns(call: ModuleCall) -> bool:
    """Say whether a module may have exchanged axis 0 with another axis, so that its input and its output tell different samples.

    Args:
        call: Its call.

    Returns:
        Whether it may: if both lengths occur in both; if it returns one row, of as many entries as it was given samples; if it returns a row for each
        step of each sample.
    """
    shapes = [slot.shape for index, slot in enumerate(call.outputs) if slot.shape and index not in call.detached]
    shape, first = next(iter(shapes), (0,)), batch_of(call)
    if rows_of(call) is not None or not first:
        return False
    if len(shape) == _MATRIX and shape == first_shape(call)[::-1]:
        return True
    if len(shape) <= _MATRIX or first == 1:
        return (len(shape) == _MATRIX or first == 1) and shape[0] % first == 0 and shape[0] // first in _others(call)
    flat = len(first_shape(call)) == _MATRIX and shape[0] == 1
    return first in shape and (flat or shape[0] in _others(call) or (first > 1 and shape[1] != first))


def is_single(call: ModuleCall) -> bool:
    """Say whether a module was called with one sample, and has returned one, or nothing that has samples.

    Args:
        call: Its call.

    Returns:
        Whether it was.
    """
    rows = rows_of(call)
    if rows is not None:
        return rows == 1
    axes = [(slot.shape, sample_axis(call, index)) for index, slot in enumerate(call.outputs)] if lengths_of(call) == {1} else []
    return bool(axes) and all(len(shape) <= axis or shape[axis] == 1 for shape, axis in axes)


def of_others(calls: Iterable[ModuleCall], is_data: Callable[[Slot], bool]) -> dict[ModuleCall, ModuleCall]:
    """Find modules that were called several times, not with the same data each time.

    Args:
        calls: Calls of outermost modules.
        is_data: Says of a tensor whether it depends on no parameter.

    Returns:
        Their calls with data alone, or with some rows of what another module has returned; for each the first one, of any, with the same data.
    """
    found: dict[Any, list[tuple[Any, ModuleCall]]] = {}
    for call in calls:
        nested, piece = nested_in(call), _piece(call)
        if piece is not None:
            found.setdefault(call.recorder, []).append((piece, call))
        if all(map(is_data, call.tensor_inputs)) and not any(tensor.grad_fn is not None for tensor in nested):
            slot = next(iter(call.tensor_inputs), None)  # the mini-batch; what is not held any more was another one
            tensor, version = (next(iter(nested), None), 0) if slot is None else (slot.tensor, slot.version)
            memory = (tensor.shape, tensor.data_ptr(), tensor.stride(), version) if place_of(tensor) else id(slot if tensor is None else tensor)
            found.setdefault(call.recorder, []).append((memory, call))
    first: dict[Any, ModuleCall] = {}
    return {call: first.setdefault(data, call) for calls in found.values() if len({data for data, _ in calls}) > 1 for data, call in calls}


def _piece(call: ModuleCall) -> tuple | None:
    # which rows of a tensor of the graph a module was given, if they were cut out
    edge = next((slot.edge for slot in call.tensor_inputs), None)
    name = None if edge is None else operation(edge[0])
    if name not in ("Slice", "Split", "SplitWithSizes") or saved(edge[0], "dim") not in (0, -len(shape_of(edge))):
        return None
    return edge[0].next_functions[0], edge[1], saved(edge[0], "start") if name == "Slice" else None


def agrees_with_data(calls: Iterable[ModuleCall], tensor: Tensor | None, layout: Layout) -> bool | None:
    """Compare where the samples should lie in a tensor with where they do: in a view of what an outermost module was called with.

    Args:
        calls: Calls of outermost modules.
        tensor: A tensor that a module or a function inside was called with; ``None`` if nobody holds it any more.
        layout: Where the samples should lie.

    Returns:
        Whether they do; ``None`` where the tensor is no view of one with as many rows as samples, or nobody holds that any more.
    """
    found = None
    for source, axis in mini_batches(calls, layout.samples) if tensor is not None else ():
        owners = owners_in(tensor, source, axis)
        if owners is None:
            found = False if is_sorted(tensor, source, axis) else found
            continue
        if tensor.shape[layout.axis : layout.axis + 1] == (len(layout.labels),):
            labels = along(label_tensor(layout.labels, owners.device), layout.axis, tensor.dim())
            if ((owners == labels) | (labels < 0)).all():
                return None if _is_crossed(source, calls) else True
        found = False
    return found


def _is_crossed(source: Tensor, calls: Iterable[ModuleCall]) -> bool:
    # whether something beside it has its first two axes in the other order, as labels [N, T] beside a sequence [T, N, D]: either may be time first
    turned = source.shape[:_MATRIX][::-1]
    return len({*turned}) == _MATRIX and any(not other.is_nested and other.shape[:_MATRIX] == turned for call in calls for other in given_to(call))


def mini_batches(calls: Iterable[ModuleCall], samples: int) -> Iterator[tuple[Tensor, int]]:
    """Go through what outermost modules were given that has as many rows as there are samples.

    Args:
        calls: Calls of outermost modules.
        samples: Number of samples.

    Yields:
        A tensor, not one of what may be a list of samples, and the axis of its rows.
    """
    for call in calls:
        axis, given = _batch_axis(call), given_to(call) if not lists_samples(call) else [slot.origin() for slot in call.tensor_inputs]
        yield from ((t, axis) for t in given if t is not None and not t.is_nested and t.shape[axis : axis + 1] == (samples,))


def lists_samples(call: ModuleCall) -> bool:
    """Say whether a module may have been called with a list of samples.

    Args:
        call: Its call.

    Returns:
        Whether it may: with a list of one, one in which entries are alike, or one with an entry for each row of the first output, in which only sizes
        differ. Else two tensors of different shapes or types are arguments, of all samples each.
    """
    lists = [value for given in call.inputs for value in lists_in(opened(given)) if tensors_in(value)]
    shape = call.outputs[0].shape if call.outputs else torch.Size()
    return any(len({_kind(entry) for entry in value}) < max(2, len(value)) or _is_listed(value, shape) for value in lists)


def _kind(entry: Any) -> Any:
    return tuple((tensor.dtype, tensor.dim(), tensor.shape[1:]) for tensor in tensors_in(entry) if not tensor.is_nested)


def _is_listed(entries: Sequence[Any], shape: torch.Size) -> bool:
    # whether they are alike but for their sizes, with a row of the output for each, and no arguments of all samples, which have an axis of these
    kinds, lengths = {tuple(kind[:2] for kind in _kind(entry)) for entry in entries}, {t.shape[0] for t in tensors_in(entries) if t.shape}
    return shape[:1] == (len(entries),) and len(kinds) == 1 and lengths.isdisjoint(shape[1:] if len(lengths - {1}) > 1 else shape)


def holds_samples(tensor: Tensor, calls: Iterable[ModuleCall], samples: int) -> bool:
    """Say whether a tensor holds what an outermost module was given for several samples.

    Args:
        tensor: The tensor.
        calls: Calls of outermost modules.
        samples: Number of samples.

    Returns:
        Whether it is a view of a tensor with as many rows, or has the same integers, in any order; as long as somebody holds that.
    """
    if tensor.is_nested:
        return False
    for call in calls:
        axis = _batch_axis(call)
        for source in (t for t in given_to(call) if not t.is_nested and t.shape[axis : axis + 1] == (samples,)):
            owners = owners_in(tensor, source, axis)
            if owners is not None:
                if (owners != owners.flatten()[0]).any():
                    return True
            elif tensor.dtype == source.dtype == torch.long and tensor.numel() == source.numel():
                if torch.equal(tensor.flatten().sort().values, source.flatten().sort().values):
                    return True
    return False


def given_to(call: ModuleCall) -> list[Tensor]:
    """List the tensors that a module was called with.

    Args:
        call: Its call.

    Returns:
        Those that somebody holds; also in mappings, lists and objects.
    """
    found = [[value.origin()] if isinstance(value, Slot) else tensors_in(opened(value)) for value in call.inputs]
    return [tensor for tensors in found for tensor in tensors if tensor is not None]


def lengths_of(call: ModuleCall) -> set[int]:
    """List how many samples a module may have been called with.

    Args:
        call: Its call.

    Returns:
        The length of the axis of samples of each tensor; a single row beside several, as of a mask, is the same for all samples, unless it may be the
        label of the only one of a mini-batch with time first.
    """
    first, shape = batch_of(call), first_shape(call)
    others = [*call.tensor_inputs[1:], *nested_in(call)] if _batch_axis(call) == 0 else []
    lengths = {other.shape[0] for other in others if other.shape} | ({first} - {None})
    labels = [*shape[1:-1]] == [1] and any(other.shape == (1,) and not other.dtype.is_floating_point for other in others)
    return lengths - {1} if first not in (None, 1) and len(shape) > 1 and not labels else lengths


def _others(call: ModuleCall) -> set[int]:
    return {size for given in (*call.tensor_inputs, *nested_in(call)) for size in given.shape[1:]}


def nested_in(call: ModuleCall) -> list[Tensor]:
    """List the tensors in mappings, lists and objects that a module was called with.

    Args:
        call: Its call.

    Returns:
        The tensors.
    """
    return [tensor for value in call.inputs if not isinstance(value, Slot) for tensor in tensors_in(opened(value))]


def _batch_axis(call: ModuleCall) -> int:
    if _LEAST_AXES[ref(call.kind)] < _SEQUENCE or not isinstance(call.inputs[0], Slot):  # packed sequences are no tensor
        return 0
    return 0 if next(part.batch_first for part in call.as_called.modules() if isinstance(part, (nn.RNNBase, nn.MultiheadAttention))) else 1


def _least_axes(cls: type[nn.Module]) -> int:
    """Count the axes of a mini-batch for a class of torch's to which one axis less is a single sample; 3 where it has an option for their order.

    Returns:
        Number of axes; 0 for all other classes, also for those that inherit from one and bring a ``forward`` of their own.
    """
    if getattr_static(cls, "forward") is not next(base for base in cls.__mro__ if base.__module__.startswith("torch.nn.")).forward:
        return 0
    return 3 if issubclass(cls, (nn.RNNBase, *_ATTENTION)) else 2 if issubclass(cls, nn.RNNCellBase) else 0


_LEAST_AXES = ClassTable(_least_axes)
