"""Unfolding of transposed convolutions, and diagonals of ``(J^T S)(J^T S)^T`` for their parameters.

A transposed convolution is a convolution with the mirrored kernel of its input with zeros between the entries. Its unfolded input has one column
a position of the output: ``[N, C_in * K, X]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import gcd, prod

import torch
from torch import Tensor, nn
from torch.nn import Module, functional

from backpack.utils.conv import _choose, extract_bias_diagonal, group_squares, pad, patch_moment, patches_of

__all__ = [
    "extract_bias_diagonal",
    "extract_weight_diagonal",
    "get_conv_transpose_function",
    "get_conv_transpose_module",
    "get_weight_gradient_factors",
    "unfold_by_conv_transpose",
]


def get_conv_transpose_module(N: int) -> type[Module]:
    """Return the class of transposed convolutions over ``N`` axes.

    Args:
        N: 1, 2 or 3.

    Returns:
        ``torch.nn.ConvTranspose1d``, ``ConvTranspose2d`` or ``ConvTranspose3d``.
    """
    return _choose(N, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def get_conv_transpose_function(N: int) -> Callable[..., Tensor]:
    """Return the function of transposed convolutions over ``N`` axes.

    Args:
        N: 1, 2 or 3.

    Returns:
        ``conv_transpose1d``, ``conv_transpose2d`` or ``conv_transpose3d`` of ``torch.nn.functional``.
    """
    return _choose(N, functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def output_paddings(module: Module, input_size: Sequence[int], output_size: Sequence[int]) -> list[int]:
    """Return the output padding that leads from an input size to an output size.

    Args:
        module: A transposed convolution.
        input_size: Size of its input along each axis.
        output_size: Size of its output along each axis.

    Returns:
        One amount an axis.
    """
    settings = zip(input_size, output_size, module.stride, module.padding, module.dilation, module.kernel_size, strict=True)
    return [out - ((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1) for size, out, stride, padding, dilation, kernel in settings]


def unfold_by_conv_transpose(input: Tensor, module: Module, output_size: Sequence[int] | None = None) -> Tensor:
    """Unfold the input of a transposed convolution.

    Args:
        input: ``[N, C_in, *]``.
        module: A transposed convolution over one, two or three axes.
        output_size: Size of the output; by default the one that follows from the module's own ``output_padding``.

    Returns:
        ``[N, C_in * K, X]``, such that for each sample the output is the weight ``[C_out, C_in * K]`` times it.
    """
    if output_size is None:
        extra = output_paddings(module, input.shape[2:], [0] * len(module.stride))
        output_size = [own - amount for own, amount in zip(module.output_padding, extra, strict=True)]
    axes = len(module.kernel_size)
    patches = patches_of(_spread(input, module, output_size), module.kernel_size, [1] * axes, module.dilation, mirrored=True)
    return patches.reshape(len(input), prod(patches.shape[1 : 2 + axes]), prod(patches.shape[2 + axes :]))


def unfolded_moment(input: Tensor, module: Module, output_size: Sequence[int]) -> Tensor:
    """Sum the outer products of the columns of the unfolded input with themselves, over samples and positions.

    With strides, the entries of a patch meet in groups: those that see the input, and not the zeros in between, at the same positions. Each group is
    that of a convolution with stride 1. On layers with stride 2 and kernels of 4 x 4 this takes a sixteenth of the multiplications.

    Args:
        input: ``[N, C_in, *]``.
        module: A transposed convolution over one, two or three axes.
        output_size: Size of the output along each axis.

    Returns:
        ``[G, K, K]`` for ``G`` groups and ``K`` entries of a patch of one of them.
    """
    entries, channels = prod(module.kernel_size), module.in_channels // module.groups
    total = input.new_zeros(module.groups, channels * entries, channels * entries)
    settings = zip(input.shape[2:], output_size, module.stride, module.padding, module.dilation, module.kernel_size, strict=True)
    numbers = torch.arange(channels * entries, device=input.device).view(channels, *module.kernel_size)
    for axes in product(*(_meetings(*of_axis) for of_axis in settings)):
        places, amounts, steps = zip(*axes, strict=True)
        moment = patch_moment(pad(input, amounts), module.groups, [len(of_axis) for of_axis in places], [1] * len(axes), steps)
        rows = numbers[(slice(None), *torch.meshgrid(*map(torch.tensor, places), indexing="ij"))].flatten()
        total[:, rows[:, None], rows] = moment
    return total


def _meetings(size: int, out: int, stride: int, padding: int, dilation: int, kernel: int) -> Iterator[tuple[list[int], tuple[int, int], int]]:
    """Go through the groups of entries of a kernel that see entries of the input at the same positions, along one axis.

    Args:
        size: Size of the input.
        out: Size of the output.
        stride: Distance of the entries of the input in the output.
        padding: How much is cut off the output.
        dilation: Distance of the entries of the kernel.
        kernel: Their number.

    Yields:
        The entries, in the order of what they see; by how much the input is to be padded at both ends; and the distance of what they see.
    """
    step = dilation // gcd(dilation, stride)
    for phase in range(stride):
        places = [place for place in reversed(range(kernel)) if (dilation * place - phase) % stride == 0]
        first = (phase - padding) % stride
        count = len(range(first, out, stride))
        if places and count:
            start = (first + padding - dilation * places[0]) // stride
            stop = start + step * (len(places) - 1) + count
            if start < size and stop > 0:  # else they see zeros
                yield places, (-start, stop - size), step


def _spread(input: Tensor, module: Module, output_size: Sequence[int]) -> Tensor:
    """Put zeros between the entries of an input, and around them, such that a convolution with stride 1 has the wanted output.

    Args:
        input: ``[N, C_in, *]``.
        module: A transposed convolution.
        output_size: Size of the output along each axis.

    Returns:
        ``[N, C_in, *]``.
    """
    settings = list(zip(input.shape[2:], module.stride, module.padding, module.dilation, module.kernel_size, strict=True))
    apart = input.new_zeros(*input.shape[:2], *((size - 1) * stride + 1 for size, stride, _, _, _ in settings))
    apart[(..., *(slice(None, None, stride) for stride in module.stride))] = input
    amounts = []
    for size, out, (_, _, padding, dilation, kernel) in zip(apart.shape[2:], output_size, settings, strict=True):
        before = dilation * (kernel - 1) - padding
        amounts.append((before, out + dilation * (kernel - 1) - size - before))
    return pad(apart, amounts)


def get_weight_gradient_factors(input: Tensor, grad_out: Tensor, module: Module) -> tuple[Tensor, Tensor]:
    """Return the two matrices for each sample whose product over positions is its weight gradient.

    Args:
        input: ``[N, C_in, *]``.
        grad_out: Gradient with respect to the output, ``[N, C_out, *]``.
        module: A transposed convolution.

    Returns:
        Unfolded input ``[N, C_in * K, X]`` and gradient ``[N, C_out, X]``.
    """
    return unfold_by_conv_transpose(input, module, grad_out.shape[2:]), grad_out.flatten(2)


def matrix_to_weight(module: Module, matrix: Tensor) -> Tensor:
    """Give matrices the shape of the weight of a transposed convolution.

    Args:
        module: The transposed convolution, with the weight ``[C_in, O, *kernel]`` for ``O`` outputs a group.
        matrix: ``[..., G, O, K]``.

    Returns:
        ``[..., C_in, O, *kernel]``.
    """
    inputs = module.in_channels // module.groups
    return matrix.unflatten(-1, (inputs, -1)).transpose(-3, -2).reshape(*matrix.shape[:-3], *module.weight.shape)


def extract_weight_diagonal(module: Module, unfolded_input: Tensor, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Compute the diagonal for the weight of a transposed convolution.

    Args:
        module: The transposed convolution.
        unfolded_input: ``[N, C_in * K, X]``.
        S: Columns with respect to the output, ``[V, N, C_out, *]``.
        sum_batch: Sum over the samples.

    Returns:
        ``sum_{v[,n]} (sum_x S[v,n,g,o,x] u[n,g,c,k,x])^2``, of shape ``[*weight]``, or ``[N, *weight]`` without the sum over samples.
    """
    return matrix_to_weight(module, group_squares(module, unfolded_input, S, sum_batch))
