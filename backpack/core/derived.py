"""Derivatives that are taken behind a model, in the training loop: what autograd returns counts among what the model has returned."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backpack.core.batches import rows_of
from backpack.core.calls import KEY, Mark, ModuleCall
from backpack.core.engine import Request, transformed
from backpack.core.owners import owners
from backpack.core.slots import Slot
from backpack.core.state import recording
from backpack.utils.differentiation import nodes_below


def count_as_returned(request: Request, result: Any) -> None:
    """Let derivatives with respect to data, of what a model has returned, count among its outputs, so that they may be part of its loss.

    Args:
        request: A call of autograd. Of what it differentiates with respect to, only tensors with a row for each sample count, which are data, or have
            been returned by a module.
        result: What has come of it.
    """
    if not (request.returns and request.create_graph and recording.on) or request.batched or transformed():
        return
    marks = [mark for node in nodes_below(request.roots) for mark in node.metadata.get(KEY, ())]
    call = max((mark.call for mark in marks if mark.call.root and not mark.call.is_loss), key=lambda call: call.order, default=None)
    rows = None if call is None else rows_of(call)
    for given, derivative in zip(request.inputs, result, strict=True):
        if (
            derivative is not None
            and derivative.grad_fn is not None
            and isinstance(given, Tensor)
            and given.shape[:1] == (rows,)
            and _is_of_samples(given)
        ):
            _add_output(call, derivative)


def _is_of_samples(tensor: Tensor) -> bool:
    # whether a tensor is data, or the output of a module
    if tensor.grad_fn is not None and KEY in tensor.grad_fn.metadata:
        return True
    return tensor not in owners and not any(node.variable in owners for node in nodes_below([tensor]) if hasattr(node, "variable"))


def _add_output(call: ModuleCall, tensor: Tensor) -> None:
    if call.derivatives is not None:  # the rule of a layer knows of one output
        other = object.__new__(ModuleCall)
        other.__dict__ |= {**vars(call), "derivatives": None, "outputs": [*call.outputs]}
        call = other
    call.outputs.append(Slot(tensor, keep=False))
    tensor.grad_fn.metadata.setdefault(KEY, []).append(Mark(call, len(call.outputs) - 1, tensor.output_nr, base=False))
