"""Bases of second-order extensions: quantities made of what the loss sends back beside the gradient."""

from __future__ import annotations

from typing import ClassVar

from backpack.core.flow import Flow
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.flows import SqrtFlow
from backpack.utils.errors import ArgumentError


class SecondOrderBackpropExtension(BackpropExtension):
    """A quantity that needs an extended loss and something beside the gradient."""

    def expects_backpropagation_quantities(self) -> bool:
        return True


class GGNExtension(SecondOrderBackpropExtension):
    """A quantity of the generalized Gauss-Newton, read off a square root of the loss's Hessian.

    Attributes:
        sampled: Whether the square root is a Monte-Carlo estimate.
    """

    sampled: ClassVar[bool] = False

    def __init__(self, savefield: str, mc_samples: int = 0, subsampling: list[int] | None = None) -> None:
        """Choose the square root.

        Args:
            savefield: Name of the attribute under which parameters carry the result.
            mc_samples: Number of Monte-Carlo samples; 0 for the exact square root.
            subsampling: Indices of the samples; ``None`` for all.

        Raises:
            ArgumentError: If the number of Monte-Carlo samples is not a positive integer.
        """
        super().__init__(savefield, subsampling=subsampling)
        if self.sampled and (not isinstance(mc_samples, int) or isinstance(mc_samples, bool) or mc_samples < 1):
            raise ArgumentError(f"{type(self).__name__}: mc_samples must be a positive integer, got {mc_samples!r}.")
        self._mc_samples = mc_samples
        # other samples are drawn for a subset than for the mini-batch, hence a flow of its own
        chosen = None if self._subsampling is None else tuple(self._subsampling)
        self._flow = SqrtFlow(mc_samples, chosen) if self.sampled else SqrtFlow()

    @property
    def flow(self) -> Flow:
        return self._flow

    def get_num_mc_samples(self) -> int:
        """Return the number of Monte-Carlo samples.

        Returns:
            Their number; 0 for the exact square root.
        """
        return self._mc_samples
