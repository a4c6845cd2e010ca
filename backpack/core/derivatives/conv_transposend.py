"""Derivatives of ``torch.nn.ConvTranspose1d``, ``ConvTranspose2d`` and ``ConvTranspose3d``, with all their options and any output size."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Module

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.convnd import ConvNDDerivatives, ConvolutionDerivatives
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

    def turned(self, module: Module, mat: Tensor, subsampling: Samples = None) -> tuple[AffineDerivatives, Module, Tensor] | None:
        """Read columns at the output as inputs of the convolution with the same weight, and inputs as columns at its output.

        Its positions are those of the input here: with strides, fewer than those of the output, and no zeros are multiplied.

        Args:
            module: The layer with its recorded input and output.
            mat: ``[V, N, C_out, *]``.
            subsampling: Samples that ``mat`` is about; ``None`` for all.

        Returns:
            Derivatives, layer, and columns at its output ``[1, V * N, C_in, *]``; ``None`` if that has further positions, or nothing is there.
        """
        extra = output_paddings(module, module.input0.shape[2:], module.output.shape[2:])
        if not mat.numel() or any(amount >= step for amount, step in zip(extra, module.stride, strict=True)):
            return None
        inputs = subsample(module.input0, subsampling=subsampling)
        columns = inputs.expand(len(mat), *inputs.shape).flatten(0, 1)
        settings = {name: getattr(module, name) for name in ("weight", "kernel_size", "stride", "padding", "dilation", "groups")}
        channels = {"in_channels": module.out_channels, "out_channels": module.in_channels}
        layer = SimpleNamespace(**settings, **channels, padding_mode="zeros", input0=mat.flatten(0, 1), output=columns)
        return ConvNDDerivatives(self.N), layer, columns.unsqueeze(0)

    def easier(self, module: Module, mat: Tensor, subsampling: Samples = None) -> tuple[AffineDerivatives, Module, Tensor]:
        # measured on layers of DCGAN: with stride 2, for ten columns a third to a fifth of the time, for one column, where positions are few, a
        # tenth to a half
        spread = module.output.shape[2:].numel() > module.input0.shape[2:].numel()
        turned = self.turned(module, mat, subsampling) if spread and not self._by_kernel(module, self.rows(module, mat)) else None
        return turned or (self, module, mat)

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        layer, turned, columns = (self, module, mat) if sum_batch else self.easier(module, mat, subsampling)
        if layer is self:
            return super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch, subsampling)
        return layer._weight_jac_t_mat_prod(turned, None, None, columns, sum_batch=False).reshape(*mat.shape[:2], *module.weight.shape)

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
