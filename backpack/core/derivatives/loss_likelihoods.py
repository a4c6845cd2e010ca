"""Derivatives of further losses that are negative log-likelihoods of one label per entry: Poisson, normal with given variance, Bernoulli."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Normal, Poisson
from torch.nn import GaussianNLLLoss, Module, MultiLabelSoftMarginLoss, PoissonNLLLoss

from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.loss_elementwise import diagonal_of
from backpack.core.derivatives.loss_hessian import hessian_product
from backpack.core.derivatives.nll_base import ElementwiseLikelihoodDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.precision import wide

_MANY = 2**20
"""Counts from which on they are drawn from the normal distribution: their digits end where those of their deviations from the mean would follow."""


@register(PoissonNLLLoss)
class PoissonNLLLossDerivatives(ElementwiseLikelihoodDerivatives):
    """Counts ``t`` with the rate ``e^x``: ``e^x - t x`` has the second derivative ``e^x``, and labels are drawn.

    With ``log_input=False`` the input is the rate, and ``x - t log(x + eps)`` has ``t / (x + eps)^2``: that depends on the target, so that
    labels would give the expectation over another Hessian. Signs are drawn then.
    """

    def hessian_is_psd(self) -> bool:
        return False  # negative targets, where the input is the rate

    def _is_likelihood(self, module: Module) -> bool:
        return module.log_input

    def _hessian_diagonal(self, module: Module) -> Tensor:
        if module.log_input:
            return super()._hessian_diagonal(module)
        return diagonal_of(module.input1 / (wide(module.input0) + module.eps).square(), module)

    def _curvature(self, subsampled_input: Tensor) -> Tensor:
        return wide(subsampled_input).exp()

    def _make_distribution(self, subsampled_input: Tensor) -> Poisson:
        return Poisson(wide(subsampled_input).exp())

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        rate = wide(subsampled_input).exp()
        deviations = rate - Poisson(rate.where(rate <= _MANY, 0)).sample(torch.Size([mc_samples]))
        many = rate > _MANY
        return deviations.where(~many, rate.sqrt() * torch.randn_like(deviations)) if many.any() else deviations


@register(GaussianNLLLoss)
class GaussianNLLLossDerivatives(ElementwiseLikelihoodDerivatives):
    """A normal distribution with given variances: ``(x - t)^2 / (2 var)`` has the second derivative ``1 / max(var, eps)``.

    The inverse variance is the weight of a normal distribution with variance one, from which labels are drawn. How variances are broadcast is
    left to the loss itself, which is differentiated. If they depend on parameters, the curvature with respect to the mean is not all of it:
    second-order quantities are refused.
    """

    keeps = frozenset({"input", "output"})

    def _hessian_weight(self, module: Module) -> Tensor:
        return wide(hessian_product(module)(torch.ones_like(module.input0)))

    def _curvature(self, subsampled_input: Tensor) -> Tensor:
        return torch.ones_like(wide(subsampled_input))

    def _make_distribution(self, subsampled_input: Tensor) -> Normal:
        return Normal(wide(subsampled_input), 1.0, validate_args=False)

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        # how far labels are from the mean, whatever that is: where it is large, a difference would have no digits left
        return -self._make_distribution(torch.zeros_like(subsampled_input)).sample(torch.Size([mc_samples]))


@register(MultiLabelSoftMarginLoss)
class MultiLabelSoftMarginLossDerivatives(BCELossWithLogitsDerivatives):
    """Binary cross-entropy of logits, averaged over the ``C`` classes on the last axis before the reduction."""

    least_axes = 2

    def _hessian_weight(self, module: Module) -> Tensor | float:
        logits = module.input0
        divisor = (logits.numel() if module.reduction == "mean" else logits.shape[-1]) or 1
        return 1 / divisor if module.weight is None else (wide(module.weight) / divisor).expand(logits.shape)

    def position_weights(self, module: Module, g_out: tuple[Tensor, ...]) -> Tensor:
        return g_out[0].unsqueeze(-1) if g_out[0].dim() else g_out[0]
