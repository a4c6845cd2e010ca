"""Derivatives of ``MSELoss``: the negative log-likelihood of a normal distribution with variance 1/2, up to constants."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import MSELoss

from backpack.core.derivatives.nll_base import ElementwiseLikelihoodDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.precision import wide


@register(MSELoss)
class MSELossDerivatives(ElementwiseLikelihoodDerivatives):
    """Squared distance of every entry of the input ``[N, *]`` to its target: the Hessian is ``2 I`` over the divisor."""

    def _curvature(self, subsampled_input: Tensor) -> Tensor:
        return torch.full_like(wide(subsampled_input), 2.0)

    def _make_distribution(self, subsampled_input: Tensor) -> Normal:
        mean = wide(subsampled_input)
        return Normal(mean, torch.tensor(0.5, dtype=mean.dtype, device=mean.device).sqrt(), validate_args=False)

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        # how far labels are from the mean, whatever that is: where it is large, a difference would have no digits left
        return 2 * self._make_distribution(torch.zeros_like(subsampled_input)).sample(torch.Size([mc_samples]))
