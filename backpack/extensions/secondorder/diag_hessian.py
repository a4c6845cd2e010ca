"""Diagonals of the Hessian, summed over samples and for each sample."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from backpack.core.flow import Columns, Flow
from backpack.extensions.backprop_extension import SubsamplingExtension
from backpack.extensions.combining import PerSample, Sum
from backpack.extensions.made import OfSquares
from backpack.extensions.rules import signs_of, stack
from backpack.extensions.secondorder.base import OfDiagonals, SecondOrderBackpropExtension, squares_at_once
from backpack.extensions.signed_flow import SignedSqrtFlow
from backpack.utils.moment import sum_of_squared_columns


class HessianExtension(OfDiagonals, OfSquares, SecondOrderBackpropExtension):
    """A quantity of the Hessian's diagonal blocks, read off signed square roots of its terms."""

    flow: Flow = SignedSqrtFlow()


class DiagHessian(SubsamplingExtension, HessianExtension):
    """Diagonal of the Hessian of the loss, ``[*parameter]``, saved to ``diag_h``.

    Exact for modules with a rule, branches of them, and all operations whose second derivative is known: element-wise functions, products, softmax,
    attention, norms; others are refused. Memory and time grow with the square of the number of entries that curved operations have.
    """

    savefield = "diag_h"
    any_root = sums_columns = True
    combination = Sum(degree=1)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return _squares(self, state).sum(0)


class BatchDiagHessian(SubsamplingExtension, HessianExtension):
    """Diagonal of the Hessian of each sample's summand of the loss, ``[N, *parameter]``, saved to ``diag_h_batch``.

    The sum over samples is ``diag_h``.
    """

    savefield = "diag_h_batch"
    any_root = sums_columns = True
    combination = PerSample(degree=1)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return _squares(self, state)


def _squares(extension: HessianExtension, state: Columns) -> Tensor:
    """Sum the signed squares of columns.

    Args:
        extension: Knows the subsampling.
        state: ``{source: [V, N, *parameter]}``.

    Returns:
        ``[N, *parameter]``.
    """
    return sum_of_squared_columns(stack(state), signs_of(state, extension.get_subsampling()))


squares_at_once(DiagHessian, BatchDiagHessian)
