"""What operations in autograd's graph were told beside their inputs, compared with what the rule of a layer takes it to be: the layer's options.

They differ where something else than the ``forward`` of the layer has called the operation (a hook, a patched function), and where an option is not
that of the forward pass any more, or can only be asked now, as one of a class. In a checkpointed part numbers are compared, but no tensors: for those
it would have to run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.calls import ModuleCall
from backpack.core.checkpoints import checkpointed
from backpack.core.graph import has_saved, saved, saves_tensor, setting_reader, shape_of
from backpack.core.loss_nodes import REDUCTIONS
from backpack.core.slots import Slot
from backpack.utils.conv import paddings
from backpack.utils.errors import OverwrittenError

Check = Callable[[ModuleCall, Node], bool]
"""Says whether a node of a call was told what the rule takes it to be."""


class Constant(NamedTuple):
    """What an operation is told in any case, compared without a call of a function: that of most layers.

    Attributes:
        read: Reads it off a node.
        value: What it is.
    """

    read: Callable[[Node], Any]
    value: Any


SUM, SUM_OF_PRODUCT = Constant(setting_reader("alpha"), 1), Constant(setting_reader("alpha", "beta"), (1, 1))


def told(names: Iterable[str], wanted: Callable[[ModuleCall], tuple], data: Iterable[str] = ()) -> Check:
    """Compare what a node was told.

    Args:
        names: Under which names it is saved.
        wanted: Computes of the call what that should be.
        data: Names of tensors that have to be those of the layer.

    Returns:
        The check.
    """
    names, read, tensors = tuple(names), setting_reader(*names), {name: setting_reader(name) for name in data}

    def check(call: ModuleCall, node: Node) -> bool:
        given, right = read(node), wanted(call)
        if (given if len(names) > 1 else (given,)) != right and tuple(saved(node, name) for name in names) != right:  # of negative numbers
            return False
        return not tensors or checkpointed(node) or all([_same_data(call, node, name, had) for name, had in tensors.items()])

    return check


def same(*names: str, data: Iterable[str] = ()) -> Check:
    """Compare what has the same name at the node and at the layer.

    Args:
        *names: Names of numbers.
        data: Names of tensors.

    Returns:
        The check.
    """
    return told(names, lambda call: tuple(getattr(call, name) for name in names), data)


def reduced(*names: str, data: Iterable[str] = ()) -> Check:
    """Compare the reduction of a loss, and other options of the same name.

    Args:
        *names: Names of numbers.
        data: Names of tensors.

    Returns:
        The check.
    """
    return told(("reduction", *names), lambda call: (REDUCTIONS.index(call.reduction), *(getattr(call, name) for name in names)), data)


def _same_data(call: ModuleCall, node: Node, name: str, read: Callable[[Node], Tensor | None]) -> bool:
    # tensors without a graph: weights of classes, running statistics, the target
    try:
        slot = call.inputs[1] if name == "target" else None
        given = slot.tensor if isinstance(slot, Slot) else getattr(call, name, None)
    except OverwrittenError:  # refused where a rule reads it
        return True
    had = read(node)
    if given is None or had is None:
        return given is had or name == "target"  # which is kept where a rule reads it
    return given.data_ptr() == had.data_ptr() or torch.equal(given, had)  # as with hooks that keep copies


# --- sizes ------------------------------------------------------------------------------------------------------------------------------------


def _each(value: Any, axes: int) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes


def sizes(*names: str, axes: int = 2, numbers: Iterable[str] = ()) -> Check:
    """Compare sizes along axes: for torch, ``3`` is ``(3, 3)``, and a line that is pooled an image with one row.

    Args:
        *names: Names of sizes.
        axes: Number of axes.
        numbers: Names of what is the same for all axes; ``None`` where the layer has no such option.

    Returns:
        The check.
    """

    def wanted(call: ModuleCall) -> tuple:
        rows = {name: ((0,) if name == "padding" else (1,)) if axes == 1 else () for name in names}
        return *(rows[name] + _each(getattr(call, name), axes) for name in names), *(getattr(call, name, None) for name in numbers)

    return told((*names, *numbers), wanted)


def _amounts(call: ModuleCall) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    # what torch's convolution pads, on both sides, and what is padded before
    axes = call.weight.dim() - 2
    amounts = [(amount, amount) for amount in _each(call.padding, axes)] if not isinstance(call.padding, str) else paddings(call)
    if call.padding_mode != "zeros":
        return (0,) * axes, amounts
    return tuple(before for before, _ in amounts), [(0, after - before) for before, after in amounts]


def _convolved(call: ModuleCall) -> tuple:
    # of one that is transposed, the rest of the padding is in the shape of the output
    axes, transposed = call.weight.dim() - 2, call.transposed
    padding = _each(call.padding, axes) if transposed else _amounts(call)[0]
    return _each(call.stride, axes), padding, _each(call.dilation, axes), call.groups, transposed


CONVOLVED = told(("stride", "padding", "dilation", "groups", "transposed"), _convolved)


def padded(call: ModuleCall, node: Node) -> bool:
    """Compare amounts of padding, before and after each axis from the last one backward: of a layer of padding, or of what a convolution adds itself.

    Args:
        call: The call.
        node: The node.

    Returns:
        Whether they agree.
    """
    if hasattr(call, "padding_mode"):
        wanted = [amount for pair in reversed(_amounts(call)[1]) for amount in pair]
    else:
        wanted = call.pad if hasattr(call, "pad") else call.padding
    return saved(node, "pad" if has_saved(node, "pad") else "padding") == tuple(wanted)


def resized(call: ModuleCall, node: Node) -> bool:
    """Compare how entries are placed where a layer interpolates.

    Args:
        call: The call.
        node: The node.

    Returns:
        Whether it is done alike.
    """
    scales = tuple(saved(node, name) for name in ("scales", "scales_d", "scales_h", "scales_w") if has_saved(node, name))
    told_scales = call.size is None and not call.recompute_scale_factor
    wanted = _each(call.scale_factor if told_scales else None, len(scales))
    return scales == wanted and (not has_saved(node, "align_corners") or saved(node, "align_corners") == bool(call.align_corners))


def along(axis: Callable[[ModuleCall], int | None]) -> Check:
    """Compare the axis along which exponentials are normalized.

    Args:
        axis: Says which it is; ``None`` for torch's choice.

    Returns:
        The check.
    """

    def check(call: ModuleCall, node: Node) -> bool:
        axes, dim = len(shape_of((node, 0))), axis(call)
        return saved(node, "dim") % max(1, axes) == (int(axes not in (0, 1, 3)) if dim is None else dim) % max(1, axes)

    return check


def mean_slope(call: ModuleCall, node: Node) -> bool:
    """Compare the slope of a random unit that is not random.

    Args:
        call: The call.
        node: The node.

    Returns:
        Whether it is the mean of the bounds.
    """
    return isclose(saved(node, "negative_slope"), (call.lower + call.upper) / 2, rel_tol=1e-6)  # torch computes it in the precision of the input


def of_table(call: ModuleCall) -> tuple:
    """Say what a table of vectors is told.

    Args:
        call: Its call.

    Returns:
        Which row is never trained, -1 for none, and whether gradients are divided by frequencies.
    """
    index = -1 if call.padding_idx is None else call.padding_idx % call.num_embeddings
    return index, call.scale_grad_by_freq


def of_bags(call: ModuleCall) -> tuple:
    """Say what a table of vectors is told that are united.

    Args:
        call: Its call.

    Returns:
        What ``of_table`` does, and the number of the mode.
    """
    return *of_table(call), ("sum", "mean", "max").index(call.mode)


def of_classes(call: ModuleCall) -> int:
    """Say on which axis a loss finds classes.

    Args:
        call: Its call.

    Returns:
        The axis.
    """
    return int(len(call.inputs[0].shape) > 1)


def factor(name: str) -> Check:
    """Compare a number that an operation multiplies by.

    Args:
        name: Name of the option.

    Returns:
        The check.
    """

    def check(call: ModuleCall, node: Node) -> bool:
        other = None if checkpointed(node) else saved(node, "other")
        return other is None or other.dim() > 0 or other.item() == getattr(call, name)

    return check


def smoothed(call: ModuleCall, node: Node) -> bool:
    """Compare the numbers by which a cross-entropy with smoothed labels multiplies.

    Args:
        call: The call.
        node: The node of a product.

    Returns:
        Whether they are those of the loss.
    """
    shape, amount = call.inputs[0].shape, call.label_smoothing
    return saves_tensor(node, "other") or any(isclose(saved(node, "other"), n) for n in (1 - amount, amount / shape[of_classes(call)]))


# --- normalizations ---------------------------------------------------------------------------------------------------------------------------


def of_channels(*data: str) -> dict[str, Check]:
    """Compare what a normalization of each channel is told.

    Args:
        *data: Names of running statistics, where the rule reads them.

    Returns:
        Name of an operation to the check.
    """

    def wanted(call: ModuleCall) -> tuple:
        return call.eps, call.training or not call.track_running_stats

    return {
        f"{name}BatchNorm": told((eps, "training"), wanted, data) for name, eps in (("Native", "eps"), ("Cudnn", "epsilon"), ("Miopen", "epsilon"))
    }


def of_neighbours() -> dict[str, Check]:
    """Compare what the normalization by neighbouring channels is told; but for the number that is added, which nodes do not save.

    Returns:
        Name of an operation to the check.
    """

    def windows(call: ModuleCall, node: Node) -> bool:
        return saved(node, "kernel_size") == (call.size, *[1] * (len(saved(node, "kernel_size")) - 1))

    return {"Pow": told(("exponent",), lambda call: (call.beta,)), "Mul": factor("alpha"), "AvgPool2D": windows, "AvgPool3D": windows}


ENTRIES = told(("normalized_shape",), lambda call: (tuple(call.normalized_shape),))
"""The last axes, over which a normalization goes. What is added to variances is not among what nodes save."""


def root_of_mean(call: ModuleCall, node: Node) -> bool:
    """Compare over which axes the normalization by the root of the mean square goes, where it is made of plain operations.

    Args:
        call: The call.
        node: The node of the inverse root.

    Returns:
        Whether these are those of the layer.
    """
    mean = node.next_functions[0][0].next_functions[0][0]
    square, axes = mean.next_functions[0][0], len(call.normalized_shape)
    dims = sorted(dim % len(shape_of((square, 0))) for dim in saved(mean, "dim"))
    return dims == [*range(len(shape_of((square, 0))))][-axes:]
