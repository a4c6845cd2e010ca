"""SumGradSquared: the second moment of per-sample gradients."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.embedding import LookupDerivatives
from backpack.core.flow import Columns, Use
from backpack.extensions.backprop_extension import SubsamplingExtension
from backpack.extensions.combining import Sum
from backpack.extensions.firstorder.base import GradientExtension
from backpack.extensions.made import OfSquares
from backpack.extensions.rules import affine_squares_at_once, faster, sum_at_rows
from backpack.utils.precision import wide


class SumGradSquared(OfSquares, SubsamplingExtension, GradientExtension):
    """Sum over samples of the squared per-sample gradients, element by element, ``[*parameter]``, saved to ``sum_grad_squared``.

    Uncentred, and not divided by the number of samples.
    """

    savefield = "sum_grad_squared"
    combination = Sum(degree=2)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return wide(state[0][0]).square().sum(0)


affine_squares_at_once(SumGradSquared)


@faster(SumGradSquared, LookupDerivatives, "weight")
def _lookup(extension: SumGradSquared, use: Use, name: str) -> Tensor:
    return sum_at_rows(use)
