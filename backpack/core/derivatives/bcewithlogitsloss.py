"""Derivatives of ``BCEWithLogitsLoss``: the negative log-likelihood of independent Bernoulli variables, one per entry of the input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Binomial
from torch.nn import BCEWithLogitsLoss, Module

from backpack.core.derivatives.nll_base import ElementwiseLikelihoodDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.precision import wide


@register(BCEWithLogitsLoss)
class BCELossWithLogitsDerivatives(ElementwiseLikelihoodDerivatives):
    """Binary cross-entropy of every logit ``x`` of the input ``[N, *]`` with its target ``t``, which may be soft.

    With ``s = sigmoid(x)``, the loss ``w ((1 - t) x + (1 + (pos_weight - 1) t) log(1 + e^-x))`` has the second derivative
    ``w (1 + (pos_weight - 1) t) s (1 - s)``.
    """

    def _hessian_weight(self, module: Module) -> Tensor | float:
        weight = super()._hessian_weight(module)
        if module.pos_weight is not None:
            weight = weight * (1 + (wide(module.pos_weight) - 1) * module.input1)
        if module.weight is not None:
            weight = weight * wide(module.weight)
        return weight.expand(module.input0.shape) if isinstance(weight, Tensor) else weight

    def _curvature(self, subsampled_input: Tensor) -> Tensor:
        logits = wide(subsampled_input)
        return logits.sigmoid() * (-logits).sigmoid()

    def _make_distribution(self, subsampled_input: Tensor) -> Binomial:
        return Binomial(probs=wide(subsampled_input).sigmoid(), validate_args=False)

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        distribution = self._make_distribution(subsampled_input)
        return distribution.probs - distribution.sample(torch.Size([mc_samples]))
