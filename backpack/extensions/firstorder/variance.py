"""Variance: the variance of per-sample gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.affine_squares import sum_of_squares
from backpack.core.derivatives.embedding import LookupDerivatives, add_at
from backpack.core.flow import Columns, Use
from backpack.extensions.backprop_extension import SubsamplingExtension
from backpack.extensions.combining import CentredSquares, Noted
from backpack.extensions.firstorder.base import GradientExtension
from backpack.extensions.rules import FromGradient, faster, finish_at_once
from backpack.utils.precision import wide


class Variance(SubsamplingExtension, GradientExtension):
    """Variance of the per-sample gradients, element by element, ``[*parameter]``, saved to ``variance`` (readable as ``var``, too).

    ``1/N sum_n g_n^2 - (1/N sum_n g_n)^2``: biased, and of gradients that contain the divisor of a mean loss. Multiply by ``N^2`` for the
    variance of the gradients of the samples' own losses. With ``subsampling``, ``N`` is the number of chosen samples.
    """

    savefield = "variance"
    combination = CentredSquares()

    def finish(self, state: Columns, parameter: Parameter) -> Noted:
        gradients = wide(state[0][0])
        # Tensor.var over the first axis is ten times slower on a CPU
        variance = (gradients - gradients.mean(0)).square().mean(0) if len(gradients) else gradients.sum(0)
        return Noted(variance, lambda: gradients.sum(0))


faster(Variance, AffineDerivatives, "bias")(finish_at_once)


@faster(Variance, AffineDerivatives, "weight")
def _weight(extension: Variance, use: Use, name: str) -> FromGradient:
    samples = max(use.layout.samples, 1)
    squares = sum_of_squares(use.call.derivatives, use.call, use.value[0], sums=use.sums, scale=1 / samples, notes=use.notes)
    return FromGradient(lambda grad: Noted(_variance(squares, grad, samples), lambda: wide(grad)))


@faster(Variance, LookupDerivatives, "weight")
def _lookup(extension: Variance, use: Use, name: str) -> Noted:
    sums, _, rows = use.call.derivatives.sums_per_sample(use.call, use.value[0])
    found, places = torch.unique(rows, return_inverse=True)
    gradient, squares = (add_at(part, places, len(found))[0] for part in (sums, sums.square()))
    shape = use.call.weight.shape

    def spread(part: Tensor) -> Tensor:
        return part.new_zeros(shape).index_copy_(0, found, part)

    samples = max(use.layout.samples, 1)
    return Noted(spread(_variance(squares.div_(samples), gradient, samples)), lambda: spread(gradient))


def _variance(squares: Tensor, gradient: Tensor, samples: int) -> Tensor:
    """Subtract the square of the mean from the mean of squares.

    Args:
        squares: Mean of squares, which is overwritten: fresh memory would take longer than the arithmetic.
        gradient: Sum.
        samples: Number of summands.

    Returns:
        Shape of the gradient.
    """
    gradient = wide(gradient)
    # rounding may take the difference below zero
    return squares.addcmul_(gradient, gradient, value=-1 / samples**2).clamp_(min=0)
