"""Where modules of torch have the samples, in what they are given and in what they return; axis 0, if nothing else is known of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

from backpack.core.calls import ModuleCall
from backpack.core.samples import Layout, along, label_tensor
from backpack.core.slots import Slot
from backpack.utils.nested import tensors_in

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
        Length of the axis of samples of the first tensor; ``None`` if there is none.
    """
    shape = next((slot.shape for slot in call.tensor_inputs if slot.shape), None)
    return None if shape is None or lacks_batch(call) else shape[0 if _batch_first(call) else 1]


def sample_axis(call: ModuleCall, index: int) -> int:
    """Say on which axis of an output of a module the samples lie.

    Args:
        call: Its call, with a batch axis.
        index: Number of the output.

    Returns:
        The axis.
    """
    if index and isinstance(call.module, nn.RNNBase):
        return 1  # states of all layers
    return 0 if _batch_first(call) or index else 1


def lacks_batch(call: ModuleCall) -> bool:
    """Say whether a module was given a single sample, without a batch axis.

    Args:
        call: Its call.

    Returns:
        Whether torch, or its rule, takes the input for one sample.
    """
    module, given = call.module, call.inputs[0] if call.inputs else None
    if not isinstance(given, Slot):
        return False
    least = _least_axes(type(module))
    if least:
        return len(given.shape) < least
    rule = call.found.rule
    if rule is None or rule.is_loss:
        return False
    more = rule.feature_axes(call) - 1 if rule.any_batch_axis else 0
    return len(given.shape) < rule.least_axes + more


def is_single(call: ModuleCall) -> bool:
    """Say whether a module was called with one sample, and has returned one, or nothing that has samples.

    Args:
        call: Its call.

    Returns:
        Whether it was.
    """
    axes = [(slot.shape, sample_axis(call, index)) for index, slot in enumerate(call.outputs)] if batch_of(call) == 1 else []
    return bool(axes) and all(len(shape) <= axis or shape[axis] == 1 for shape, axis in axes)


def agrees_with_data(calls: Iterable[ModuleCall], given: Slot, layout: Layout) -> bool | None:
    """Compare where the samples should lie in a tensor with where they do: in a view of what an outermost module was called with.

    Args:
        calls: Calls of outermost modules.
        given: A tensor that a module inside was called with.
        layout: Where the samples should lie.

    Returns:
        Whether they do; ``None`` where the tensor is no view of one with as many rows as samples, or nobody holds that any more.
    """
    tensor = given.value if given.kept else given.origin()
    for source, axis in ((source, 0 if _batch_first(call) else 1) for call in calls for source in _given_to(call)):
        if tensor is None or {tensor.layout, source.layout} != {torch.strided} or not tensor.numel():
            continue
        if source.shape[axis : axis + 1] != (layout.samples,) or tensor.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
            continue
        start = min(source.storage_offset(), tensor.storage_offset())
        ends = (t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in (source, tensor))
        owners = torch.full((max(ends) - start + 1,), -1, dtype=torch.int32)  # of each place in memory
        mine, theirs = (owners.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in (tensor, source))
        theirs.copy_(along(torch.arange(source.shape[axis]), axis, source.dim()))
        if tensor.dim() <= layout.axis:
            return False
        labels = along(label_tensor(layout.labels, owners.device), layout.axis, tensor.dim())
        return bool(((mine == labels) | (labels < 0)).all())
    return None


def _given_to(call: ModuleCall) -> list[Tensor]:
    # also in mappings and lists, as far as somebody holds them
    found = [[value.origin()] if isinstance(value, Slot) else tensors_in(value) for value in call.inputs]
    return [tensor for tensors in found for tensor in tensors if tensor is not None]


def lengths_of(call: ModuleCall) -> set[int]:
    """List how many samples a module may have been called with.

    Args:
        call: Its call.

    Returns:
        The length of the axis of samples of each tensor.
    """
    first = batch_of(call)
    nested = [tensor.shape for value in call.inputs if not isinstance(value, Slot) for tensor in tensors_in(value)]
    shapes = [slot.shape for slot in call.tensor_inputs[1:]] + nested if _batch_first(call) else []
    return {shape[0] for shape in shapes if shape} | ({first} - {None})


def _batch_first(call: ModuleCall) -> bool:
    if _least_axes(type(call.module)) < 3 or not isinstance(call.inputs[0], Slot):  # packed sequences are no tensor
        return True
    return next(part.batch_first for part in call.as_called.modules() if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)))


@cache
def _least_axes(cls: type[nn.Module]) -> int:
    """Count the axes of a mini-batch for a class of torch's to which one axis less is a single sample; 3 where it has an option for their order.

    Returns:
        Number of axes; 0 for all other classes.
    """
    return 3 if issubclass(cls, (nn.RNNBase, *_ATTENTION)) else 2 if issubclass(cls, nn.RNNCellBase) else 0
