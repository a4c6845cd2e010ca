"""Derivatives of ``torch.nn.ConvTranspose1d``, ``ConvTranspose2d`` and ``ConvTranspose3d``, with all their options and any output size."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Module

from backpack.core.derivatives.basederivatives import Samples
from backpack.core.derivatives.convnd import ConvolutionDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.conv_transpose import matrix_to_weight, output_paddings, unfold_by_conv_transpose, unfolded_moment
from backpack.utils.subsampling import subsample


class ConvTransposeNDDerivatives(ConvolutionDerivatives):
    """Derivatives of transposed convolutions, whose weight is ``[C_in, O, *kernel]`` for ``O`` outputs a group.

    In the views, hence in Kronecker factors, the outputs come first, as if the weight were transposed: ``[G, O, K]``.
    """

    weight_axis = 1

    def _options(self, module: Module) -> tuple[Any, ...]:
        extra = output_paddings(module, module.input0.shape[2:], module.output.shape[2:])
        return module.stride, module.padding, module.dilation, True, extra, module.groups

    def _moment(self, module: Module, inputs: Tensor) -> Tensor:
        return unfolded_moment(inputs, module, module.output.shape[2:])

    def columns(self, module: Module, subsampling: Samples | slice = None) -> Tensor:
        inputs = subsample(module.input0, subsampling=subsampling)
        return unfold_by_conv_transpose(inputs, module, module.output.shape[2:]).unflatten(1, (module.groups, -1))

    def weight_from_matrix(self, module: Module, matrix: Tensor) -> Tensor:
        return matrix_to_weight(module, matrix)

    def matrix_from_weight(self, module: Module, weight: Tensor) -> Tensor:
        groups = module.groups
        outputs, inputs = module.out_channels // groups, module.in_channels // groups
        by_group = weight.reshape(len(weight), groups, inputs, outputs, prod(module.kernel_size))
        return by_group.transpose(2, 3).flatten(3)


@register(ConvTranspose1d)
class ConvTranspose1DDerivatives(ConvTransposeNDDerivatives):
    """Derivatives of ``torch.nn.ConvTranspose1d``."""

    def __init__(self) -> None:
        """Convolve over one axis."""
        super().__init__(1)


@register(ConvTranspose2d)
class ConvTranspose2DDerivatives(ConvTransposeNDDerivatives):
    """Derivatives of ``torch.nn.ConvTranspose2d``."""

    def __init__(self) -> None:
        """Convolve over two axes."""
        super().__init__(2)


@register(ConvTranspose3d)
class ConvTranspose3DDerivatives(ConvTransposeNDDerivatives):
    """Derivatives of ``torch.nn.ConvTranspose3d``."""

    def __init__(self) -> None:
        """Convolve over three axes."""
        super().__init__(3)
