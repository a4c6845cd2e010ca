"""Losses that add up terms of one input entry each, so that the Hessian is diagonal: one number an entry instead of a matrix a sample.

Entries that are broadcast against the target enter several terms. Where no closed form is given, the diagonal comes from one Hessian-vector
product with a vector of ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import (
    BCELoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MarginRankingLoss,
    Module,
    MultiLabelMarginLoss,
    MultiMarginLoss,
    NLLLoss,
    SmoothL1Loss,
    SoftMarginLoss,
)

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.loss_generic import GenericLossDerivatives, non_negative, signs_of
from backpack.core.derivatives.loss_hessian import hessian_product
from backpack.core.derivatives.registry import register
from backpack.utils.differentiation import square_root
from backpack.utils.errors import UnsupportedError
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample


@register(BCELoss)
class ElementwiseLossDerivatives(GenericLossDerivatives):
    """A loss each of whose terms depends on one entry of its input.

    The exact factor has one column an entry of a sample; the sampled one has random signs.
    """

    any_forward = False

    def _hessian_diagonal(self, module: Module) -> Tensor:
        """Compute the second derivatives of the value (or of the sum of the values) of the loss.

        Args:
            module: The loss with recorded inputs.

        Returns:
            Second derivatives ``[N, *]`` of any sign, in single precision or better.
        """
        return wide(hessian_product(module)(torch.ones_like(module.input0)))

    def _root(self, module: Module, subsampling: Samples = None) -> Tensor:
        """Compute the square root of the diagonal.

        Args:
            module: The loss with recorded inputs.
            subsampling: Indices of samples, or ``None`` for all.

        Returns:
            ``[N, *]`` in the type of the input.
        """
        root = square_root(non_negative(self._hessian_diagonal(module), module, "second derivatives"))
        return subsample(root, subsampling=subsampling).to(module.input0.dtype)

    def hessian_is_psd_at(self, module: Module) -> bool:
        return not (self._hessian_diagonal(module) < 0).any()

    def _one_target_is_any(self, module: Module) -> bool:
        """Tell whether all terms of one entry have the same second derivative, whatever their targets.

        Args:
            module: The loss with recorded inputs.

        Returns:
            ``False`` where it is not known.
        """
        return False

    def position_weights(self, module: Module, g_out: tuple[Tensor, ...]) -> Tensor:
        incoming, inputs = g_out[0], module.input0
        if incoming.dim() == 0 or incoming.shape == inputs.shape or not incoming.numel():
            return incoming.sum_to_size(inputs.shape) if incoming.dim() else incoming
        mean = incoming.sum_to_size(inputs.shape) * (inputs.numel() / incoming.numel())
        if not (self._one_target_is_any(module) or torch.allclose(mean.expand_as(incoming), incoming, rtol=1e-6, atol=0.0)):
            raise UnsupportedError(
                f"The output {list(incoming.shape)} of {module} has several terms an entry of its input {list(inputs.shape)}, and they are weighted "
                'differently. Expand the input to the shape of the target, or use reduction="mean" or "sum".'
            )
        return mean

    def _sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        self._verify_support(module)
        return _spread(self._root(module, subsampling))

    def _signed_sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> tuple[Tensor, Tensor | None]:
        self._verify_support(module)
        diagonal = self._hessian_diagonal(module)
        return _spread(diagonal.abs().sqrt().to(module.input0.dtype)), signs_of(diagonal.reshape(len(diagonal), prod(diagonal.shape[1:])))

    def root_of_blocks(self, module: Module, signed: bool) -> tuple[Tensor, Tensor | None, int]:
        self._verify_support(module)
        if not signed:
            return self._root(module).reshape(-1, 1, 1), None, -1
        diagonal = self._hessian_diagonal(module).reshape(-1, 1)
        return diagonal.abs().sqrt().to(module.input0.dtype).unsqueeze(2), diagonal.sign(), -1

    def _root_mat_prod(self, module: Module, mat: Tensor, subsampling: Samples = None) -> Tensor:
        self._verify_support(module)
        return self._root(module, subsampling) * mat

    def _make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        self._verify_support(module)
        diagonal = self._hessian_diagonal(module).to(module.input0.dtype)
        return lambda mat: diagonal * mat

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        self._verify_support(module)
        diagonal = self._hessian_diagonal(module).to(module.input0.dtype).sum(0)
        return diagonal.flatten().diag().reshape(2 * diagonal.shape)


def _spread(root: Tensor) -> Tensor:
    """Give each entry of a sample a column.

    Args:
        root: ``[N, *]``.

    Returns:
        ``[V, N, *]``.
    """
    num_features = prod(root.shape[1:])
    return root.reshape(root.shape[0], num_features).diag_embed(dim1=0, dim2=2).reshape(num_features, *root.shape)


class ClosedFormDerivatives(ElementwiseLossDerivatives):
    """A loss of input and target whose terms have a known second derivative, weighted alike."""

    keeps: ClassVar[frozenset[str]] = frozenset({"input"})

    def __init__(self, second_derivative: Callable[[Module, Tensor, Tensor], Tensor]) -> None:
        """Store the second derivative.

        Args:
            second_derivative: Function of loss, input and target, entry by entry.
        """
        self._second_derivative = second_derivative

    def _hessian_diagonal(self, module: Module) -> Tensor:
        return diagonal_of(self._second_derivative(module, wide(module.input0), module.input1), module)


def diagonal_of(terms: Tensor, module: Module) -> Tensor:
    """Add up the second derivatives of all terms in which an entry takes part, and apply the reduction.

    Args:
        terms: Second derivatives, in the shape to which input and target are broadcast.
        module: The loss with recorded inputs.

    Returns:
        ``[N, *]``.
    """
    inputs = module.input0
    diagonal = terms.to(torch.promote_types(inputs.dtype, torch.float32)).sum_to_size(inputs.shape)
    return diagonal / (terms.numel() or 1) if module.reduction == "mean" else diagonal


class PiecewiseLinearLossDerivatives(ElementwiseLossDerivatives):
    """A loss whose second derivative with respect to its input vanishes (almost everywhere): all factors are zero, nothing is drawn.

    This holds for ``NLLLoss`` and ``KLDivLoss``, too, whose input are log-probabilities. In a pass, quantities start at the softmax that has made
    them, if there is one.
    """

    keeps: ClassVar[frozenset[str]] = frozenset({"input"})

    def hessian_is_psd(self) -> bool:
        return True

    def position_weights(self, module: Module, g_out: tuple[Tensor, ...]) -> Tensor:
        return g_out[0].new_ones(())  # of zeros

    def _hessian_diagonal(self, module: Module) -> Tensor:
        return torch.zeros_like(wide(module.input0))

    def _sqrt_hessian_sampled(self, module: Module, g_inp: Grads, g_out: Grads, mc_samples: int = 1, subsampling: Samples = None) -> Tensor:
        self._verify_support(module)
        inputs = subsample(module.input0, subsampling=subsampling)
        return inputs.new_zeros(mc_samples, *inputs.shape)


class PiecewiseLinearRowLossDerivatives(PiecewiseLinearLossDerivatives):
    """As above, for losses that take a vector without a batch axis for a single sample."""

    least_axes = 2


@register(MultiMarginLoss)
class MultiMarginLossDerivatives(PiecewiseLinearRowLossDerivatives):
    """Piecewise linear with ``p=1``; torch has no second derivative of the squares."""

    def _verify_support(self, module: Module) -> None:
        super()._verify_support(module)
        if module.p != 1:
            raise UnsupportedError(f"{module} with p={module.p} cannot be differentiated twice. Use p=1, or a loss of your own.")


def _smooth_l1(module: Module, x: Tensor, target: Tensor) -> Tensor:
    return ((x - target).abs() < module.beta).to(x.dtype) / (module.beta or 1)


def _soft_margin(module: Module, x: Tensor, target: Tensor) -> Tensor:
    return target.square() * (target * x).sigmoid() * (-target * x).sigmoid()


register(HuberLoss, ClosedFormDerivatives(lambda module, x, target: (x - target).abs() < module.delta))
register(SmoothL1Loss, ClosedFormDerivatives(_smooth_l1))
register(SoftMarginLoss, ClosedFormDerivatives(_soft_margin))
for _loss in (HingeEmbeddingLoss, KLDivLoss, L1Loss, MarginRankingLoss):
    register(_loss, PiecewiseLinearLossDerivatives)
for _loss in (MultiLabelMarginLoss, NLLLoss):
    register(_loss, PiecewiseLinearRowLossDerivatives)
