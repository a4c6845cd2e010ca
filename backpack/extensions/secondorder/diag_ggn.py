"""Diagonals of the generalized Gauss-Newton, exact and Monte-Carlo, summed over samples and for each sample."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from backpack.core.flow import Columns
from backpack.extensions.combining import PerSample, Sum
from backpack.extensions.made import OfSquares
from backpack.extensions.rules import stack
from backpack.extensions.secondorder.base import ExactGGNExtension, GGNExtension, OfDiagonals, SampledGGNExtension, squares_at_once
from backpack.utils.moment import sum_of_squared_columns


class DiagGGN(OfDiagonals, OfSquares, GGNExtension):
    """Diagonal of the generalized Gauss-Newton ``sum_n J_n^T H_n J_n``, ``[*parameter]`` (Schraudolph 2002; Dangel et al. 2020, eq. 19)."""

    any_root = sums_columns = True
    combination = Sum(degree=1)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return sum_of_squared_columns(stack(state)).sum(0)


class BatchDiagGGN(OfDiagonals, OfSquares, GGNExtension):
    """Diagonals of the samples' summands of the generalized Gauss-Newton, ``[N, *parameter]``."""

    any_root = sums_columns = True
    combination = PerSample(degree=1)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return sum_of_squared_columns(stack(state))


class DiagGGNExact(ExactGGNExtension, DiagGGN):
    """Diagonal of the generalized Gauss-Newton, ``[*parameter]``, saved to ``diag_ggn_exact`` (readable as ``diag_ggn``, too).

    Contains the divisor of a mean loss once.
    """

    savefield = "diag_ggn_exact"


class DiagGGNMC(SampledGGNExtension, DiagGGN):
    """Monte-Carlo estimate of the diagonal of the generalized Gauss-Newton, ``[*parameter]``, saved to ``diag_ggn_mc``.

    Unbiased: labels are drawn from the distribution that the loss stands for; where it stands for none, the exact root is multiplied by random signs.
    Costs ``mc_samples`` columns instead of about as many as there are classes.
    """

    savefield = "diag_ggn_mc"


class BatchDiagGGNExact(ExactGGNExtension, BatchDiagGGN):
    """Diagonal of each sample's summand of the generalized Gauss-Newton, ``[N, *parameter]``, saved to ``diag_ggn_exact_batch``.

    The sum over samples is ``diag_ggn_exact``.
    """

    savefield = "diag_ggn_exact_batch"


class BatchDiagGGNMC(SampledGGNExtension, BatchDiagGGN):
    """Monte-Carlo estimate of ``diag_ggn_exact_batch``, ``[N, *parameter]``, saved to ``diag_ggn_mc_batch``."""

    savefield = "diag_ggn_mc_batch"


squares_at_once(DiagGGN, BatchDiagGGN)
