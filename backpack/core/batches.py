"""Where modules of torch have the samples, in what they are given and in what they return; axis 0, if nothing else is known of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import nn

from backpack.core.calls import ModuleCall
from backpack.core.samples import Layout, along, label_tensor
from backpack.core.slots import Slot

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
        Whether they do; ``None`` where the tensor is no view of such a tensor, or nobody holds it any more.
    """
    tensor = given.value if given.kept else given.origin()
    for call in calls:
        source = next((slot.origin() for slot in call.tensor_inputs if slot.shape), None)
        if tensor is None or source is None or {tensor.layout, source.layout} != {torch.strided} or not tensor.numel():
            continue
        if tensor.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
            continue
        axis = 0 if _batch_first(call) else 1
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
