"""Average-pooling to a given output size: a linear map, also where the input is no multiple of it."""

from __future__ import annotations

from torch.nn import AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, Module

from backpack.core.derivatives.avgpoolnd import AvgPoolNDDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.errors import UnsupportedError


class AdaptiveAvgPoolNDDerivatives(AvgPoolNDDerivatives):
    """Derivatives of means over windows that divide the last ``N`` axes into given numbers of parts."""

    def check_parameters(self, module: Module) -> None:
        """Make sure that all windows have the same size.

        No product needs that.

        Args:
            module: The layer with its recorded input and output.

        Raises:
            UnsupportedError: If the input is no multiple of the output along some axis.
        """
        inputs, outputs = self._sizes(module)
        if any(size % parts for size, parts in zip(inputs, outputs, strict=True)):
            raise UnsupportedError(
                f"{module} divides {inputs} into {outputs} windows of different sizes, so that it has no stride and no kernel_size. Use the "
                "products (jac_mat_prod, jac_t_mat_prod), or an input whose size is a multiple of the output's."
            )

    def get_avg_pool_parameters(self, module: Module) -> tuple[list[int], list[int], int]:
        """Describe the windows.

        Args:
            module: The layer with its recorded input and output.

        Returns:
            ``(stride, kernel_size, padding)``, with a number for each pooled axis, and no padding.
        """
        self.check_parameters(module)
        stride = [size // parts for size, parts in zip(*self._sizes(module), strict=True)]
        return stride, list(stride), 0

    def _sizes(self, module: Module) -> tuple[list[int], list[int]]:
        return list(module.input0.shape[-self._axes :]), list(module.output.shape[-self._axes :])


@register(AdaptiveAvgPool1d)
class AdaptiveAvgPool1dDerivatives(AdaptiveAvgPoolNDDerivatives):
    """Derivatives of adaptive average-pooling over one axis."""

    def __init__(self) -> None:
        super().__init__(1)


@register(AdaptiveAvgPool2d)
class AdaptiveAvgPool2dDerivatives(AdaptiveAvgPoolNDDerivatives):
    """Derivatives of adaptive average-pooling over two axes."""

    def __init__(self) -> None:
        super().__init__(2)


@register(AdaptiveAvgPool3d)
class AdaptiveAvgPool3dDerivatives(AdaptiveAvgPoolNDDerivatives):
    """Derivatives of adaptive average-pooling over three axes."""

    def __init__(self) -> None:
        super().__init__(3)
