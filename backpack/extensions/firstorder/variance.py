"""Variance: the variance of per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.affine_squares import sum_of_squares
from backpack.core.derivatives.embedding import LookupDerivatives, add_at, place_at
from backpack.core.derivatives.tied import TiedDerivatives
from backpack.core.flow import Columns, Use
from backpack.extensions.backprop_extension import SubsamplingExtension
from backpack.extensions.combining import CentredSquares, Noted
from backpack.extensions.firstorder.base import GradientExtension
from backpack.extensions.made import OfSquares
from backpack.extensions.rules import FromGradient, faster, finish_at_once, squares_of_tied
from backpack.utils.precision import wide


class Variance(OfSquares, SubsamplingExtension, GradientExtension):
    """Variance of the per-sample gradients, element by element, ``[*parameter]``, saved to ``variance`` (readable as ``var``, too).

    ``1/N sum_n g_n^2 - (1/N sum_n g_n)^2``: biased, and of gradients that contain the divisor of a mean loss. Multiply by ``N^2`` for the
    variance of the gradients of the samples' own losses. With ``subsampling``, ``N`` is the number of chosen samples.

    Weights of affine layers have it as that difference, which loses digits where the deviation is far below the mean. Measured in single precision,
    with a deviation of a hundredth, thousandth, ten-thousandth of the mean: relative errors up to 0.07, 3 and 1000. There ``BatchGrad`` and
    ``grad_batch.var(0, correction=0)`` have 5e-6, 7e-5 and 5e-4, and so has a model in double precision.
    """

    savefield = "variance"
    combination = CentredSquares()

    def finish(self, state: Columns, parameter: Parameter) -> Noted | Tensor:
        gradients = wide(state[0][0])
        # Tensor.var over the first axis is ten times slower on a CPU
        variance = (gradients - gradients.mean(0)).square().mean(0) if len(gradients) else gradients.sum(0)
        return Noted(variance, lambda: gradients.sum(0)) if self.combined_by() else variance

    def of_moments(self, squares: Tensor, total: Callable[[], Tensor], samples: int) -> Noted:
        gradient = total()
        return Noted(_variance(squares / max(1, samples), gradient, max(1, samples)), lambda: gradient)


faster(Variance, AffineDerivatives, "bias")(finish_at_once)


@faster(Variance, AffineDerivatives, "weight")
def _weight(extension: Variance, use: Use, name: str) -> FromGradient | Noted:
    layer, call, mat, samples = use.call.derivatives, use.call, use.value[0], max(use.layout.samples, 1)
    rounded = _rounds_gradient(mat, use.parameters[name])
    sums = {} if rounded and use.sums is None else use.sums
    squares = sum_of_squares(layer, call, mat, sums=sums, scale=1 / samples, notes=use.notes)
    if not rounded:
        return FromGradient(lambda grad: Noted(_variance(squares, grad, samples), lambda: wide(grad)))
    total = wide(sums["weight"]) if "weight" in sums else layer.sum_of_products(call, mat)
    return Noted(_variance(squares, total, samples), lambda: total)


@faster(Variance, TiedDerivatives, "weight")
def _tied(extension: Variance, use: Use, name: str) -> FromGradient | Noted:
    mat, samples = use.value[0], max(use.layout.samples, 1)
    squares = squares_of_tied(use, 1 / samples)
    if squares is NotImplemented:
        return NotImplemented
    if not _rounds_gradient(mat, use.parameters[name]):
        return FromGradient(lambda grad: Noted(_variance(squares, grad, samples), lambda: wide(grad)))
    total = use.call.derivatives.sum_of_products(use.call, mat)
    return Noted(_variance(squares, total, samples), lambda: total)


def _rounds_gradient(mat: Tensor, parameter: Parameter) -> bool:
    """Say whether autograd keeps fewer digits of the gradient than squares have: of the difference to their mean, nothing may be left then.

    Args:
        mat: Gradient at the output of the layer.
        parameter: The parameter.

    Returns:
        Whether it does.
    """
    return {mat.dtype, parameter.dtype, getattr(parameter, "grad_dtype", None) or parameter.dtype} != {torch.promote_types(mat.dtype, torch.float32)}


@faster(Variance, LookupDerivatives, "weight")
def _lookup(extension: Variance, use: Use, name: str) -> Noted:
    sums, _, rows = use.call.derivatives.sums_per_sample(use.call, use.value[0])
    found, places, counts = torch.unique(rows, return_inverse=True, return_counts=True)
    gradient, size, samples = add_at(sums, places, len(found))[0], len(use.call.weight), max(use.layout.samples, 1)
    mean = gradient / samples
    deviations = add_at(mean[places].sub_(sums[0]).square_().unsqueeze(0), places, len(found))[0]
    others = (samples - counts).unsqueeze(1)  # the gradients of samples that have not looked up a row are zero there
    variance = place_at((deviations + others * mean.square()) / samples, found, size)
    return Noted(variance, lambda: place_at(gradient, found, size))


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
