"""Losses that are negative log-likelihoods: the Hessian's square root by sampling labels from the model's own distribution.

If the targets are drawn from the distribution that the loss belongs to, the outer product of the gradient with itself has the Hessian as
its expected value (information matrix equality, for a loss whose input is the natural parameter, or the mean of a normal distribution).
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod, sqrt
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.factors import root_of_factors
from backpack.core.derivatives.loss_elementwise import ElementwiseLossDerivatives
from backpack.core.derivatives.loss_generic import GenericLossDerivatives
from backpack.utils.differentiation import square_root
from backpack.utils.errors import LossValueError, UnsupportedError
from backpack.utils.subsampling import subsample


class NLLLossDerivatives(GenericLossDerivatives):
    """A loss that is a negative log-likelihood, up to factors and constants.

    A subclass says from which distribution labels are drawn (``_make_distribution``), by what ``reduction="mean"`` divides
    (``_get_mean_normalization``) and, if it is not left to automatic differentiation, the gradient for sampled labels
    (``_compute_sampled_grads_manual``). Exact quantities come from automatic differentiation until a subclass knows better.
    """

    any_forward = False

    def __init__(self, use_autograd: bool = True) -> None:
        """Choose where the gradients for sampled labels come from.

        Args:
            use_autograd: Differentiate the distribution's negative log-probability (``True``), or use the closed form (``False``).
        """
        self.use_autograd = use_autograd

    def _is_likelihood(self, module: Module) -> bool:
        """Tell whether the expected Hessian, for labels from the distribution, is that of the recorded targets.

        Args:
            module: The loss with recorded inputs.

        Returns:
            ``False`` if random signs have to be drawn instead of labels.
        """
        return True

    def _make_distribution(self, subsampled_input: Tensor) -> Distribution:
        """Create the distribution of the labels; draws have the shape of the targets, and ``use_autograd`` needs ``log_prob``.

        Args:
            subsampled_input: Input of the loss ``[N, *]``, perhaps some of its samples only.

        Raises:
            UnsupportedError: If the subclass does not say.
        """
        raise UnsupportedError(f"{type(self).__name__} does not define _make_distribution, so that no labels can be sampled.")

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        """Return the number by which ``reduction="mean"`` divides the sum of all terms.

        Args:
            input: Input of the loss ``[N, *]``, all samples.

        Raises:
            UnsupportedError: If the subclass does not say.
        """
        raise UnsupportedError("This loss does not define _get_mean_normalization, so that its reduction 'mean' is not known.")

    def _hessian_weight(self, module: Module) -> Tensor | float:
        """Return the factor of each entry's term in the loss: its weight over the divisor of the reduction.

        Args:
            module: The loss with recorded inputs.

        Returns:
            A number, or a tensor ``[N, *]`` that can be broadcast against the input.
        """
        return 1 / (self._get_mean_normalization(module.input0) or 1) if module.reduction == "mean" else 1.0

    def _sqrt_weight(self, module: Module, subsampling: Samples) -> Tensor | float:
        weight = self._hessian_weight(module)
        if isinstance(weight, Tensor):
            if (weight < 0).any():
                raise LossValueError(
                    f"Weights or targets of {module}, or what it is multiplied by, give some terms a negative factor (smallest "
                    f"{weight.min().item():.3g}), so that its Hessian has no real square root. Use non-negative weights, and targets in [0, 1]."
                )
            return root_of_factors(subsample(weight, subsampling=subsampling), str(module))
        return weight**0.5

    def _sqrt_hessian_sampled(self, module: Module, g_inp: Grads, g_out: Grads, mc_samples: int = 1, subsampling: Samples = None) -> Tensor:
        self._verify_support(module)
        if not self._is_likelihood(module):
            return super()._sqrt_hessian_sampled(module, g_inp, g_out, mc_samples=mc_samples, subsampling=subsampling)
        grads = self.compute_sampled_grads(subsample(module.input0, subsampling=subsampling), mc_samples)
        return (grads * (self._sqrt_weight(module, subsampling) / sqrt(mc_samples))).to(module.input0.dtype)

    def compute_sampled_grads(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        """Compute gradients of the negative log-likelihood for labels drawn from the model's own distribution.

        The labels come from one call ``distribution.sample(torch.Size([mc_samples]))``, and nothing else draws random numbers. A gradient
        holds all positions of a sample, with labels drawn independently; the sign of a gradient has no meaning for what is built from it.

        Args:
            subsampled_input: Input of the loss ``[N, *]``, perhaps some of its samples only.
            mc_samples: Number of draws ``M``.

        Returns:
            Gradients ``[M, N, *]`` without weights and without the divisor of the reduction.
        """
        compute = self._compute_sampled_grads_autograd if self.use_autograd else self._compute_sampled_grads_manual
        return compute(subsampled_input, mc_samples)

    def _compute_sampled_grads_autograd(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        differentiable = subsampled_input.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            point = subsampled_input if differentiable else subsampled_input.detach().requires_grad_()
            distribution = self._make_distribution(point)
            losses = [-distribution.log_prob(labels).sum() for labels in distribution.sample(torch.Size([mc_samples]))]
            return torch.stack([torch.autograd.grad(loss, point, retain_graph=True, create_graph=differentiable)[0] for loss in losses])

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        """Compute the gradients ``[M, N, *]`` for sampled labels in closed form.

        Args:
            subsampled_input: Input of the loss ``[N, *]``, perhaps some of its samples only.
            mc_samples: Number of draws ``M``.

        Raises:
            UnsupportedError: If the subclass has no closed form.
        """
        raise UnsupportedError(f"{type(self).__name__} has no closed form for sampled gradients: set use_autograd=True.")


class ElementwiseLikelihoodDerivatives(ElementwiseLossDerivatives, NLLLossDerivatives):
    """A negative log-likelihood of independent labels, one per entry of the input, whose curvature does not depend on the label."""

    keeps: ClassVar[frozenset[str]] = frozenset({"input"})

    def __init__(self, use_autograd: bool = False) -> None:
        super().__init__(use_autograd=use_autograd)

    @abstractmethod
    def _curvature(self, subsampled_input: Tensor) -> Tensor:
        """Return the second derivative of a term, without weights and without the divisor of the reduction.

        Args:
            subsampled_input: Input of the loss ``[N, *]``, perhaps some of its samples only.

        Returns:
            Non-negative second derivatives ``[N, *]``, in single precision or better.
        """

    def hessian_is_psd(self) -> bool:
        return True  # negative weights are refused where a square root is needed

    def _one_target_is_any(self, module: Module) -> bool:
        return self._is_likelihood(module)

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return input.numel()

    def _hessian_weight(self, module: Module) -> Tensor | float:
        if module.reduction == "mean":
            return super()._hessian_weight(module)
        # An input that is broadcast against the target meets several entries of it; in the mean, they are part of the divisor.
        return prod(torch.broadcast_shapes(module.input0.shape, module.input1.shape)) / (module.input0.numel() or 1)

    def _hessian_diagonal(self, module: Module) -> Tensor:
        return self._curvature(module.input0) * self._hessian_weight(module)

    def _root(self, module: Module, subsampling: Samples = None) -> Tensor:
        if not self._is_likelihood(module):
            return super()._root(module, subsampling)
        inputs = subsample(module.input0, subsampling=subsampling)
        return (square_root(self._curvature(inputs)) * self._sqrt_weight(module, subsampling)).to(inputs.dtype)
