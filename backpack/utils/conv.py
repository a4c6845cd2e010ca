"""Unfolding of convolutions, their padding, and diagonals of ``(J^T S)(J^T S)^T`` for their parameters.

A convolution multiplies each patch of its padded input with the weight. The unfolded input has one column a position: ``[N, C_in * K, L]`` for
``K`` entries of the kernel and ``L`` positions of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn import Module, functional

from backpack.utils.errors import ArgumentError, ShapeError
from backpack.utils.moment import second_moment

_MANY = 2000
_WIDE = 2**20
"""Patches, and multiplications in the product of two of their rows, from which on sums of outer products are worth more calls, and copies of the
result, than to form the patches.

Measured on one thread of a CPU, for 434 convolutions over one to three axes, with kernels of 2 to 15 and at least 2000 patches: in the mean 1.02
times the time of the better way, 2.5 at most; 1.4 if all are formed, and 1.75, up to 109 in single cases, if none is. With fewer patches, copies
of the result take up to 24 times as long.
"""
_ENTRIES = 2**15
_ROW = 10
_SPREAD_ROW = 24
"""Entries of all patches from which on they are looked up by their numbers, and longest rows of positions for it, without and with strides.

Measured on one thread of a CPU: with rows of 4, 6 and 10 positions it takes a quarter, a half and 0.9 of the time of a strided copy, with strides of
two a quarter, a half and 0.6, with longer rows and few entries more. ``torch.nn.functional.unfold`` takes as long as the copy, or several times it.
"""


def get_conv_module(N: int) -> type[Module]:
    """Return the class of convolutions over ``N`` axes.

    Args:
        N: 1, 2 or 3.

    Returns:
        ``torch.nn.Conv1d``, ``Conv2d`` or ``Conv3d``.
    """
    return _choose(N, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def get_conv_function(N: int) -> Callable[..., Tensor]:
    """Return the function that convolves over ``N`` axes.

    Args:
        N: 1, 2 or 3.

    Returns:
        ``conv1d``, ``conv2d`` or ``conv3d`` of ``torch.nn.functional``.
    """
    return _choose(N, functional.conv1d, functional.conv2d, functional.conv3d)


def _choose(N: int, *choices: Any) -> Any:
    if N not in (1, 2, 3):
        raise ArgumentError(f"Convolutions exist over 1, 2 or 3 axes, got N={N!r}.")
    return choices[N - 1]


def paddings(module: Module) -> list[tuple[int, int]]:
    """Return by how much a convolution pads its input.

    Args:
        module: A convolution.

    Returns:
        For each axis the amounts at its two ends.
    """
    if module.padding == "valid":
        return [(0, 0) for _ in module.kernel_size]
    if module.padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(amount, amount) for amount in module.padding]


def pad(input: Tensor, amounts: Sequence[tuple[int, int]], mode: str = "zeros") -> Tensor:
    """Pad the last axes of a tensor.

    Args:
        input: ``[N, C, *]``.
        amounts: For each of the last axes the amounts at its two ends; negative ones cut off.
        mode: ``padding_mode`` of a convolution.

    Returns:
        The padded tensor; ``input`` itself if there is nothing to do.
    """
    flat = [amount for pair in reversed(amounts) for amount in pair]
    return functional.pad(input, flat, "constant" if mode == "zeros" else mode) if any(flat) else input


def windows(input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """View of all patches of a tensor.

    Args:
        input: ``[N, C, *]``, already padded.
        kernel_size: Size of a patch along each axis.
        stride: Distance of patches.
        dilation: Distance of the entries of a patch.

    Returns:
        ``[N, C, *kernel_size, *positions]``, a view.
    """
    axes = len(kernel_size)
    for axis in range(axes):
        reach = dilation[axis] * (kernel_size[axis] - 1) + 1
        input = input.unfold(2 + axis, reach, stride[axis])[..., :: dilation[axis]]
    return input.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))


def patches_of(input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], mirrored: bool = False) -> Tensor:
    """Form all patches of a tensor.

    Args:
        input: ``[N, C, *]``, already padded.
        kernel_size: Size of a patch along each axis.
        stride: Distance of patches.
        dilation: Distance of the entries of a patch.
        mirrored: Whether the entries of a patch come in reverse order.

    Returns:
        ``[N, C, *kernel_size, *positions]``, contiguous.
    """
    entries = range(2, 2 + len(kernel_size))
    patches, longest = windows(input, kernel_size, stride, dilation), _ROW if stride[-1] == 1 else _SPREAD_ROW
    if patches.is_contiguous() or patches.numel() < _ENTRIES or patches.shape[-1] > longest or input.device.type != "cpu":
        return (patches.flip(*entries) if mirrored else patches).contiguous()
    shape, numbers = input.shape[2:], torch.arange(input.shape[2:].numel(), device=input.device)
    places = windows(numbers.reshape(1, 1, *shape), kernel_size, stride, dilation)
    places = (places.flip(*entries) if mirrored else places).flatten()
    return input.flatten(2).flatten(0, 1).index_select(1, places).view(patches.shape)  # with three axes it takes seven times as long


def unfolded_moment(input: Tensor, module: Module) -> Tensor:
    """Sum the outer products of the columns of the unfolded input with themselves, over samples and positions.

    Args:
        input: ``[N, C_in, *]``.
        module: A convolution over one, two or three axes.

    Returns:
        ``[G, K, K]`` for ``G`` groups and ``K`` entries of a patch of one of them.
    """
    padded = pad(input, paddings(module), module.padding_mode)
    return patch_moment(padded, module.groups, module.kernel_size, module.stride, module.dilation)


def patch_moment(input: Tensor, groups: int, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Sum the outer products of all patches of a tensor with themselves, without forming the patches where there are many.

    Then the tensor is unfolded along all axes but the first, that of rows. Two rows of a patch that lie a given distance apart meet in nearly the
    same rows of the tensor wherever in the patch they lie: these are multiplied once, and only those near the border for each pair. On the layers
    of 3c3d and All-CNN-C this takes a third to a half of the time that unfolding takes, and as long for images of 6 x 6; on depthwise layers of a few
    hundred images of 16 x 16 a tenth.

    Args:
        input: ``[N, G * C, *]``, already padded.
        groups: Number ``G`` of groups of channels.
        kernel_size: Size of a patch along each axis.
        stride: Distance of patches.
        dilation: Distance of the entries of a patch.

    Returns:
        ``[G, K, K]`` for the ``K`` entries of a patch.
    """
    rows, step, axes = kernel_size[0], dilation[0], len(kernel_size)
    positions, *others = windows(input, kernel_size, stride, dilation).shape[2 + axes :]
    count, width = len(input) * prod((positions, *others)), input.shape[1] * prod(kernel_size[1:]) // groups
    if stride[0] != 1 or count < _MANY or groups * count * width**2 < _WIDE:
        patches = patches_of(input, kernel_size, stride, dilation).unflatten(1, (groups, -1))
        return second_moment(patches.movedim(0, 2 + axes).flatten(1, 1 + axes).flatten(2).mT)
    unfolded = windows(input, (1, *kernel_size[1:]), (1, *stride[1:]), (1, *dilation[1:]))
    # [G, C, 1, *kernel, rows of the tensor, N, *positions] -> [G, K / rows, rows of the tensor, *]
    unfolded = unfolded.unflatten(1, (groups, -1)).movedim(0, 3 + axes).flatten(1, 1 + axes).flatten(3).contiguous()
    total = unfolded.new_zeros(rows, rows, groups, unfolded.shape[1], unfolded.shape[1])
    for apart in range(rows):
        starts = [step * row for row in range(rows - apart)]
        limits = sorted({*starts, *(start + positions for start in starts)})
        for low, high in pairwise(limits):
            inside = [row for row, start in enumerate(starts) if start <= low and high <= start + positions]
            if inside:
                upper, lower = (unfolded[:, :, low + shift : high + shift].flatten(2) for shift in (0, step * apart))
                product = upper @ lower.mT if apart else second_moment(upper.mT)
                for row in inside:
                    total[row, row + apart] += product
    lower, upper = torch.tril_indices(rows, rows, -1)
    total[lower, upper] = total[upper, lower].mT
    channels = input.shape[1] // groups
    by_entry = total.unflatten(4, (channels, -1)).unflatten(3, (channels, -1))  # [rows, rows, G, C, entries of a row, C, entries of a row]
    size = channels * prod(kernel_size)
    return by_entry.permute(2, 3, 0, 4, 5, 1, 6).reshape(groups, size, size)


def unfold_by_conv(input: Tensor, module: Module) -> Tensor:
    """Unfold the input of a convolution, with its padding in its mode.

    Args:
        input: ``[N, C_in, *]``.
        module: A convolution over one, two or three axes.

    Returns:
        ``[N, C_in * K, L]``.
    """
    padded = pad(input, paddings(module), module.padding_mode)
    patches = patches_of(padded, module.kernel_size, module.stride, module.dilation)
    axes = len(module.kernel_size)
    return patches.reshape(len(input), prod(patches.shape[1 : 2 + axes]), prod(patches.shape[2 + axes :]))


def unfold_input(module: Module, input: Tensor) -> Tensor:
    """Unfold the input of a convolution: ``unfold_by_conv`` with the arguments in the other order.

    Args:
        module: A convolution over one, two or three axes.
        input: ``[N, C_in, *]``.

    Returns:
        ``[N, C_in * K, L]``.
    """
    return unfold_by_conv(input, module)


def get_weight_gradient_factors(input: Tensor, grad_out: Tensor, module: Module) -> tuple[Tensor, Tensor]:
    """Return the two matrices for each sample whose product over positions is its weight gradient.

    Args:
        input: ``[N, C_in, *]``.
        grad_out: Gradient with respect to the output, ``[N, C_out, *]``.
        module: A convolution.

    Returns:
        Unfolded input ``[N, C_in * K, L]`` and gradient ``[N, C_out, L]``.
    """
    return unfold_input(module, input), grad_out.flatten(2)


def extract_weight_diagonal(module: Module, unfolded_input: Tensor, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Compute the diagonal for the weight of a convolution.

    Args:
        module: The convolution.
        unfolded_input: ``[N, C_in * K, L]``.
        S: Columns with respect to the output, ``[V, N, C_out, *]``.
        sum_batch: Sum over the samples.

    Returns:
        ``sum_{v[,n]} (sum_l S[v,n,g,o,l] x[n,g,k,l])^2``, of shape ``[*weight]``, or ``[N, *weight]`` without the sum over samples.
    """
    squares = group_squares(module, unfolded_input, S, sum_batch)
    return squares.reshape(*squares.shape[:-3], *module.weight.shape)


def group_squares(module: Module, unfolded_input: Tensor, S: Tensor, sum_batch: bool) -> Tensor:
    """Square the products of unfolded input and columns, group by group.

    Args:
        module: A convolution or a transposed one.
        unfolded_input: ``[N, C_in * K, L]``.
        S: Columns with respect to the output, ``[V, N, C_out, *]``.
        sum_batch: Sum over the samples.

    Returns:
        ``[G, O, K]``, or ``[N, G, O, K]`` without the sum over samples.

    Raises:
        ShapeError: If the shapes do not fit.
    """
    x = unfolded_input.unflatten(1, (module.groups, -1))
    if S.dim() < 4 or S.shape[1:3] != (len(x), module.out_channels) or S.shape[3:].numel() != x.shape[3]:
        expected = ["V", len(x), module.out_channels, f"{x.shape[3]} positions"]
        raise ShapeError(f"{module} with an unfolded input of shape {list(unfolded_input.shape)} needs S of shape {expected}, got {list(S.shape)}.")
    products = torch.einsum("vngol,ngkl->vngok", S.flatten(3).unflatten(2, (module.groups, -1)), x)
    return products.square_().sum((0, 1) if sum_batch else 0)


def extract_bias_diagonal(module: Module, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Compute the diagonal for the bias of a convolution.

    Args:
        module: The convolution.
        S: Columns with respect to the output, ``[V, N, C_out, *]``.
        sum_batch: Sum over the samples.

    Returns:
        ``sum_{v[,n]} (sum_l S[v,n,o,l])^2``, of shape ``[C_out]``, or ``[N, C_out]`` without the sum over samples.

    Raises:
        ShapeError: If the shapes do not fit.
    """
    if S.dim() < 4 or S.shape[2] != module.out_channels:
        raise ShapeError(f"{module} needs S of shape {['V', 'N', module.out_channels, '*']}, got {list(S.shape)}.")
    return S.flatten(3).sum(3).square().sum((0, 1) if sum_batch else 0)


def _grad_input_padding(
    grad_output: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the output padding with which a transposed convolution gives a tensor of the size of a convolution's input.

    Args:
        grad_output: ``[N, C_out, *]``.
        input_size: Size of the input, its last axes or all.
        stride: Stride along each axis.
        padding: Padding along each axis.
        kernel_size: Size of the kernel along each axis.
        dilation: Dilation along each axis; without it, a warning and 1.

    Returns:
        One amount an axis.

    Raises:
        ArgumentError: If no input of this size has an output of the size of ``grad_output``.
    """
    if dilation is None:
        warn("_grad_input_padding without dilation: assuming 1.", stacklevel=2)
        dilation = [1] * len(kernel_size)
    sizes, axes = list(input_size)[-len(kernel_size) :], range(len(kernel_size))
    least = [(grad_output.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel_size[i] - 1) + 1 for i in axes]
    if any(not low <= size < low + step for size, low, step in zip(sizes, least, stride, strict=True)):
        raise ArgumentError(f"An output of shape {list(grad_output.shape)} comes from an input of size {least}, up to stride - 1 more, not {sizes}.")
    return tuple(size - low for size, low in zip(sizes, least, strict=True))
