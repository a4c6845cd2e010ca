"""Derivatives of ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d``, with all their options, and what they share with transposed convolutions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import Conv1d, Conv2d, Conv3d, Module

from backpack.core.derivatives.affine import LARGE, SMALL, AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.registry import register
from backpack.utils.columns import blocks
from backpack.utils.conv import pad, paddings, unfold_by_conv, unfolded_moment
from backpack.utils.pages import empty
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample

_UNFOLDED = 2**19
"""Entries of the unfolded input of a sample beyond which torch's kernel is the better way to its products.

Measured for one column on the layers of All-CNN-C: as fast with 2^18.75 entries, 1.35 times as fast with 2^19.75; for 100 columns slower by 1.2.
"""
_POSITIONS = 160
"""Positions from which on torch's kernel, with samples as groups, is the better way to their products.

Measured for one column, 3 x 3 kernels and one thread: with 1024 positions it takes 0.3 to 0.7 of the time of unfolding, the less the fewer the
channels, with 256 positions 0.45 to 1, with 144 about the same, with 64 up to 1.5 times as long. It needs eight channels in a group, unless
there are several groups in a sample; for three channels it takes 1.3 times as long, for 10 columns as long.
"""
_PULLED = 2**21
"""Entries of the columns that go through the transposed layer at once, at its input or output.

Measured on the layers of All-CNN-C: 0.75 to 0.95 of the time of 1600 columns at once, for which the kernel takes buffers of the same size; with 2^23
entries nothing is gained.
"""
_PATCHES = 2**23
"""Entries of unfolded inputs of which second moments are taken at once, unless the moments are large.

Measured on one thread of a CPU: kernels of 5 and 7 that see one channel take 0.4 of the time of 2^20 entries of the input at once, which they make 25
and 49 times as many; others 0.8 to 1.
"""
_AT_ONCE = 2**22
"""Entries of products that torch's kernel forms at once where all are kept: it lays out anew what it takes and returns, in memory of the same size.

Measured for weights of 30,000 to 600,000 entries and 16 to 128 samples: 0.65 to 1 of the time of all at once; with 2^18 up to 1.1.
"""
_LAST, _CHANNELS = 256, 96


def _faster_with_channels_last(module: Module) -> bool:
    """Tell whether columns had better leave a convolution over two axes with channels last.

    Measured with 40 and 80 columns on one thread of a CPU: with 3 x 3 kernels, the layers of All-CNN-C with 32 x 32 positions take 0.6 of the time,
    with stride 2 0.4; with 16 x 16 positions 0.85 and 0.75; with 8 x 8 positions 1.0. With 64 channels nothing is gained, and normalizations in
    between lose 3 percent. 1 x 1 kernels take 1.2 to 1.7 of the time, 7 x 7 kernels 1.2, groups up to 2.9.

    Args:
        module: The layer with its recorded input.

    Returns:
        Whether the kernel is faster so.
    """
    wide_enough = module.groups == 1 and min(module.in_channels, module.out_channels) >= _CHANNELS
    return wide_enough and module.weight.shape[2:] == (3, 3) and module.input0.shape[2:].numel() >= _LAST


class ConvolutionDerivatives(AffineDerivatives):
    """Products by torch's own kernels, which see further samples in the columns of inputs, and further output channels in those of weights.

    Attributes:
        weight_axis: Axis of the output channels in the weight.
    """

    weight_axis: ClassVar[int] = 0
    _SAVE_MEMORY: ClassVar[bool] = False

    def __init__(self, N: int) -> None:
        """Choose the number of axes.

        Args:
            N: Number of axes that are convolved over.
        """
        self.N = N
        self.least_axes = N + 2

    @abstractmethod
    def _options(self, module: Module) -> tuple[Any, ...]:
        """Return what follows weight and bias in the arguments of torch's convolution.

        Args:
            module: The layer with its recorded input and output.
        """

    def _amounts(self, module: Module) -> list[tuple[int, int]]:
        """Return by how much the input is padded at both ends of each axis, beyond what torch's convolution pads itself.

        Returns:
            Empty if torch's convolution does it all.
        """
        return []

    def _pad(self, module: Module, inputs: Tensor) -> Tensor:
        return pad(inputs, self._amounts(module), module.padding_mode)

    def applies(self, module: Module) -> bool:
        # settings may have been changed, or the weight, since the module was made: torch convolves with some of them, or with copies
        sides = (module.out_channels, module.in_channels // module.groups), (module.in_channels, module.out_channels // module.groups)
        settings = [module.stride, module.dilation, *[module.padding] * (not isinstance(module.padding, str))]
        fits = all(isinstance(setting, tuple) and len(setting) == self.N for setting in settings)
        return fits and module.weight.shape == (*sides[self.weight_axis], *module.kernel_size)

    def groups(self, module: Module) -> int:
        return module.groups

    def rows(self, module: Module, mat: Tensor) -> Tensor:
        return mat.reshape(*mat.shape[:2], module.groups, module.out_channels // module.groups, prod(mat.shape[3:]))

    def fills_blocks(self, module: Module, rows: Tensor) -> bool:
        # measured on the layers of 3c3d and All-CNN-C: with 1024 positions and 96 outputs blocks take two thirds of the time, from two positions
        # an output on about the same, below up to twice as long, since the columns are smaller than the products then
        return self._SAVE_MEMORY or rows.shape[4] > 2 * rows.shape[3] or self._by_kernel(module, rows)

    def weight_blocks(self, module: Module, mat: Tensor, subsampling: Samples = None) -> Iterator[tuple[slice, slice, Tensor]]:
        if not self._by_kernel(module, self.rows(module, mat)):
            yield from super().weight_blocks(module, mat, subsampling)
            return
        for n in blocks(mat.shape[1], module.weight.numel(), SMALL):
            products = self._by_groups(module, mat[:, n], n if subsampling is None else subsampling[n])
            yield slice(None), n, self.matrix_from_weight(module, products.flatten(0, 1)).unflatten(0, products.shape[:2])

    def _by_kernel(self, module: Module, rows: Tensor) -> bool:
        """Tell whether torch's kernel is a better way to per-sample products than unfolded inputs and matrix products.

        Args:
            module: The layer.
            rows: ``[V, N, G, O, L]``.

        Returns:
            Whether there is one column, and the unfolded input of a sample does not fit into the cache or the kernel is at its best.
        """
        groups, outputs, positions = rows.shape[2:]
        large = module.weight.numel() // outputs * positions > _UNFOLDED
        return len(rows) == 1 and (large or (positions >= _POSITIONS and (groups > 1 or module.in_channels >= 8)))

    def output_from_rows(self, module: Module, rows: Tensor) -> Tensor:
        return rows.reshape(rows.shape[0], *module.output.shape)

    def input_moment(self, module: Module, scale: float = 1.0) -> Tensor:
        inputs, size = wide(module.input0), module.in_channels * prod(module.kernel_size)
        limit = max(_PATCHES, 4 * size * size // module.groups)  # sums of results cost time, too
        most = min(LARGE // max(1, inputs.shape[1:].numel()), limit // max(1, size * module.output.shape[2:].numel()))
        rows = blocks(len(inputs), 1, most) or [slice(0, 0)]
        return reduce(Tensor.add_, (self._moment(module, inputs[n]) for n in rows)).mul_(scale)

    @abstractmethod
    def _moment(self, module: Module, inputs: Tensor) -> Tensor:
        """Sum the outer products of the columns of some inputs with themselves.

        Args:
            module: The layer with its recorded output.
            inputs: ``[N, C_in, *]``.

        Returns:
            ``[G, K, K]``.
        """

    def get_unfolded_input(self, module: Module) -> Tensor:
        """Return all patches of the input.

        Args:
            module: The layer with its recorded input.

        Returns:
            ``[N, C_in * K, L]``.
        """
        return self.columns(module).flatten(1, 2)

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        result = torch.ops.aten.convolution(self._pad(module, mat.flatten(0, 1)), module.weight, None, *self._options(module))
        return result.unflatten(0, mat.shape[:2])

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        columns, features = mat.flatten(0, 1), module.input0.shape[1:]
        size, order = max(features.numel(), columns.shape[1:].numel()), self._order(module, columns)
        # the kernel of a GPU wants as much as there is
        parts = blocks(len(columns), size, _PULLED) if mat.device.type == "cpu" else [slice(None)]
        if len(parts) <= 1:
            return self._pull(module, columns, order).unflatten(0, mat.shape[:2])
        result = empty((len(columns), *features), columns, order)
        for part in parts:
            result[part] = self._pull(module, columns[part], order)
        return result.unflatten(0, mat.shape[:2])

    def _order(self, module: Module, columns: Tensor) -> torch.memory_format:
        """Choose how what comes out of the transposed layer lies in memory.

        Args:
            module: The layer.
            columns: ``[B, C_out, *]``.

        Returns:
            Channels last where the kernel is faster so.
        """
        return torch.contiguous_format

    def _pull(self, module: Module, columns: Tensor, order: torch.memory_format) -> Tensor:
        """Multiply by the transposed Jacobian with respect to the input.

        Args:
            module: The layer.
            columns: ``[B, C_out, *]``.
            order: How the result lies in memory.

        Returns:
            ``[B, C_in, *]``.
        """
        shape, weight = (len(columns), *module.input0.shape[1:]), module.weight
        if order is torch.channels_last:
            weight = weight.contiguous(memory_format=order)
        anywhere = torch.empty(shape, dtype=columns.dtype, device=columns.device, memory_format=order)  # its shape and order are read
        padded, unpad = vjp(partial(self._pad, module), anywhere) if self._amounts(module) else (anywhere, lambda result: (result,))
        only_input = (True, False, False)
        return unpad(torch.ops.aten.convolution_backward(columns, padded, weight, None, *self._options(module), only_input)[0])[0]

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        if sum_batch and len(mat):
            return self._by_groups(module, mat, subsampling, separate=False).squeeze(1)
        if not sum_batch and not self._SAVE_MEMORY and mat.shape[1] and self._by_kernel(module, self.rows(module, mat)):
            parts = blocks(mat.shape[1], module.weight.numel(), _AT_ONCE)
            if len(parts) == 1:
                return self._by_groups(module, mat, subsampling)
            products = empty((*mat.shape[:2], *module.weight.shape), mat)
            for n in parts:
                products[:, n] = self._by_groups(module, mat[:, n], n if subsampling is None else subsampling[n])
            return products
        return super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch, subsampling)

    def _by_groups(self, module: Module, mat: Tensor, subsampling: Samples | slice = None, separate: bool = True) -> Tensor:
        """Multiply by the transposed Jacobian with respect to the weight, by torch's kernel, for which samples can be further groups.

        Args:
            module: The layer with its recorded input.
            mat: ``[V, N, C_out, *]``; the kernel takes neither zero columns nor zero samples that are groups.
            subsampling: Samples that ``mat`` is about; ``None`` for all.
            separate: Keep the samples apart.

        Returns:
            ``[V, N, *weight]``, or ``[V, 1, *weight]`` with the sum over samples.
        """
        inputs, samples = self._pad(module, subsample(module.input0, subsampling=subsampling)), 1
        if separate:
            samples, inputs, mat = len(inputs), inputs.flatten(0, 1).unsqueeze(0), mat.flatten(1, 2).unsqueeze(1)
        *options, groups = self._options(module)
        groups *= samples
        weight_groups, axis = self._weight_groups(groups), self.weight_axis
        anything = module.weight.new_empty(()).expand(len(mat), samples, *module.weight.shape).flatten(1, 2)
        anything = _into_channels(anything, weight_groups, axis + 1)
        columns, only_weight = _into_channels(mat, groups, 2), (False, True, False)
        result = torch.ops.aten.convolution_backward(columns, inputs, anything, None, *options, groups, only_weight)[1]
        return _out_of_channels(result, len(mat), weight_groups, axis).unflatten(1, (samples, -1))

    def _weight_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        if not len(mat):
            return super()._weight_jac_mat_prod(module, g_inp, g_out, mat)
        weight = _into_channels(mat, self._weight_groups(module.groups), self.weight_axis + 1)
        result = torch.ops.aten.convolution(self._pad(module, module.input0), weight, None, *self._options(module))
        return _out_of_channels(result, len(mat), module.groups, 1)

    def _weight_groups(self, groups: int) -> int:
        """Return how many groups follow one another along the axis of the output channels in the weight.

        Args:
            groups: Number of groups.

        Returns:
            All, or one.
        """
        return groups if self.weight_axis == 0 else 1


def _into_channels(tensor: Tensor, groups: int, axis: int) -> Tensor:
    """Turn columns into further output channels.

    Args:
        tensor: ``[V, ..., G * O, ...]``.
        groups: ``G``.
        axis: Axis of length ``G * O``.

    Returns:
        ``[..., G * V * O, ...]``, without the first axis.
    """
    return tensor.unflatten(axis, (groups, -1)).movedim(0, axis).flatten(axis - 1, axis + 1)


def _out_of_channels(tensor: Tensor, columns: int, groups: int, axis: int) -> Tensor:
    """Undo ``_into_channels``.

    Args:
        tensor: ``[..., G * V * O, ...]``.
        columns: ``V``.
        groups: ``G``.
        axis: Axis of length ``G * V * O``.

    Returns:
        ``[V, ..., G * O, ...]``.
    """
    return tensor.unflatten(axis, (groups, columns, -1)).movedim(axis + 1, 0).flatten(axis + 1, axis + 2)


class ConvNDDerivatives(ConvolutionDerivatives):
    """Derivatives of convolutions.

    ``padding_mode`` other than zeros, and ``padding="same"`` where it is not the same at both ends, are done beforehand, as in the module itself.
    """

    def applies(self, module: Module) -> bool:
        if not super().applies(module):
            return False
        amounts = [amount for pair in reversed(paddings(module)) for amount in pair]
        return module.padding_mode == "zeros" or amounts == list(module._reversed_padding_repeated_twice)

    def _amounts(self, module: Module) -> list[tuple[int, int]]:
        amounts = paddings(module)
        if module.padding_mode == "zeros":
            amounts = [(0, after - before) for before, after in amounts]
        return amounts if any(map(any, amounts)) else []

    def _options(self, module: Module) -> tuple[Any, ...]:
        none = [0] * self.N
        native = [before for before, _ in paddings(module)] if module.padding_mode == "zeros" else none
        return module.stride, native, module.dilation, False, none, module.groups

    def _order(self, module: Module, columns: Tensor) -> torch.memory_format:
        last = self.N == 2 and columns.device.type == "cpu" and _faster_with_channels_last(module)  # noqa: PLR2004
        return torch.channels_last if last else torch.contiguous_format

    def _moment(self, module: Module, inputs: Tensor) -> Tensor:
        return unfolded_moment(inputs, module)

    def columns(self, module: Module, subsampling: Samples | slice = None) -> Tensor:
        return unfold_by_conv(subsample(module.input0, subsampling=subsampling), module).unflatten(1, (module.groups, -1))


@contextmanager
def weight_jac_t_save_memory(save_memory: bool = True) -> Iterator[None]:
    """Choose whether per-sample weight gradients of convolutions are computed for few samples at a time even where that is slower.

    Results do not depend on it. The choice holds for all threads.

    Args:
        save_memory: Never unfold the inputs of all samples at once.

    Yields:
        Nothing.
    """
    before, ConvolutionDerivatives._SAVE_MEMORY = ConvolutionDerivatives._SAVE_MEMORY, save_memory
    try:
        yield
    finally:
        ConvolutionDerivatives._SAVE_MEMORY = before


@register(Conv1d)
class Conv1DDerivatives(ConvNDDerivatives):
    """Derivatives of ``torch.nn.Conv1d``."""

    def __init__(self) -> None:
        """Convolve over one axis."""
        super().__init__(1)


@register(Conv2d)
class Conv2DDerivatives(ConvNDDerivatives):
    """Derivatives of ``torch.nn.Conv2d``."""

    def __init__(self) -> None:
        """Convolve over two axes."""
        super().__init__(2)


@register(Conv3d)
class Conv3DDerivatives(ConvNDDerivatives):
    """Derivatives of ``torch.nn.Conv3d``."""

    def __init__(self) -> None:
        """Convolve over three axes."""
        super().__init__(3)
