"""Variance: the variance of per-sample gradients."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from backpack.core.carry import Columns, Use
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.affine_squares import sum_and_sum_of_squares
from backpack.extensions.firstorder.base import GradientExtension
from backpack.extensions.rules import faster


class Variance(GradientExtension):
    """Variance of the per-sample gradients, element by element, ``[*parameter]``, saved to ``variance`` (readable as ``var``, too).

    ``1/N sum_n g_n^2 - (1/N sum_n g_n)^2``: biased, and of gradients that contain the divisor of a mean loss. Multiply by ``N^2`` for the
    variance of the gradients of the samples' own losses.
    """

    def __init__(self, subsampling: list[int] | None = None) -> None:
        """Choose the samples.

        Args:
            subsampling: Indices of the samples, whose number is the divisor then; ``None`` for all.
        """
        super().__init__("variance", subsampling=subsampling)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        gradients = state[0][0]
        return gradients.var(0, correction=0) if len(gradients) else gradients.sum(0)


@faster(Variance, AffineDerivatives, "weight")
def _weight(extension: Variance, use: Use, name: str) -> Tensor:
    total, squares = sum_and_sum_of_squares(use.call.derivatives, use.call, use.grad[None])
    samples = max(len(use.grad), 1)
    # rounding may take the difference below zero
    return (squares / samples - (total / samples).square()).clamp_(min=0)
