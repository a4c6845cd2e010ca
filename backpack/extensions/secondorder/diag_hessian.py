"""Diagonals of the Hessian, summed over samples and for each sample."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from backpack.core.flow import Columns, Flow, Use
from backpack.core.samples import add_rows
from backpack.extensions.backprop_extension import SubsamplingExtension
from backpack.extensions.combining import PerSample, Sum
from backpack.extensions.rules import signs_of, stack
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension, squares_at_once
from backpack.extensions.signed_flow import SignedSqrtFlow
from backpack.utils.moment import sum_of_squared_columns


class HessianExtension(SecondOrderBackpropExtension):
    """A quantity of the Hessian's diagonal blocks, read off signed square roots of its terms."""

    flow: Flow = SignedSqrtFlow()

    @property
    def takes_diagonals(self) -> bool:
        """Whether ``of_diagonal`` holds: unless a user reads the columns, or a subclass has made something else of its quantity."""
        return self.adds_up and self.takes_any_root

    def of_diagonal(self, use: Use, name: str) -> Tensor:
        """Say what a diagonal matrix at the output of an affine layer adds at a parameter.

        Args:
            use: The use, with the diagonal for its column ``{0: [1, N, *output]}``.
            name: Name of the parameter.

        Returns:
            The quantity.
        """
        chosen, summed = self.get_subsampling(), isinstance(self, DiagHessian)
        result = use.call.derivatives.sum_at_diagonal(use.call, name, use.value[0], summed and chosen is None)
        if summed and chosen is None:
            return result
        result = add_rows(result[None], use.layout)[0]
        result = result if chosen is None else result[list(chosen)]
        return result.sum(0) if summed else result


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
