"""Average-pooling: a linear map, whatever its options."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import AvgPool1d, AvgPool2d, AvgPool3d, Module

from backpack.core.derivatives.kinds import LinearMapDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.errors import UnsupportedError

Sizes = int | Sequence[int]


class AvgPoolNDDerivatives(LinearMapDerivatives):
    """Derivatives of means over windows of the last ``N`` axes."""

    def __init__(self, N: int) -> None:
        """Choose the number of pooled axes.

        Args:
            N: 1, 2 or 3.
        """
        self._axes = N

    def check_parameters(self, module: Module) -> None:
        """Make sure that the pooling is the convolution with one constant kernel that ``get_avg_pool_parameters`` describes.

        No product needs that.

        Args:
            module: The layer.

        Raises:
            UnsupportedError: If other options change the divisor or the number of windows.
        """
        if module.ceil_mode or not module.count_include_pad or getattr(module, "divisor_override", None) is not None:
            raise UnsupportedError(
                f"{module} is not the convolution with a constant kernel: ceil_mode, count_include_pad=False and divisor_override are no part of its "
                "stride, kernel_size and padding. Use the products (jac_mat_prod, jac_t_mat_prod), which take all options into account."
            )

    def get_avg_pool_parameters(self, module: Module) -> tuple[Sizes, Sizes, Sizes]:
        """Describe the windows.

        Args:
            module: The layer.

        Returns:
            ``(stride, kernel_size, padding)``.
        """
        return module.stride, module.kernel_size, module.padding


@register(AvgPool1d)
class AvgPool1DDerivatives(AvgPoolNDDerivatives):
    """Derivatives of average-pooling over one axis."""

    def __init__(self) -> None:
        super().__init__(1)


@register(AvgPool2d)
class AvgPool2DDerivatives(AvgPoolNDDerivatives):
    """Derivatives of average-pooling over two axes."""

    def __init__(self) -> None:
        super().__init__(2)


@register(AvgPool3d)
class AvgPool3DDerivatives(AvgPoolNDDerivatives):
    """Derivatives of average-pooling over three axes."""

    def __init__(self) -> None:
        super().__init__(3)
