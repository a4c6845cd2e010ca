"""Derivatives of ``CrossEntropyLoss``: the negative log-likelihood of one categorical variable per position of the input.

A position with logits ``f``, probabilities ``p = softmax(f)``, class weights ``w`` and target probabilities ``t`` contributes
``-sum_c w_c t_c log p_c``. The Hessian is ``a (diag(p) - p p^T)`` with ``a = sum_c w_c t_c``, and ``diag(p) - p p^T = S^T S`` with
``S[v, c] = sqrt(p_v) (delta_vc - p_c)``, since the probabilities add up to one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import CrossEntropyLoss, Module

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.loss_generic import at_least_float32, signs_of
from backpack.core.derivatives.nll_base import NLLLossDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.errors import LossValueError
from backpack.utils.subsampling import subsample


@register(CrossEntropyLoss)
class CrossEntropyLossDerivatives(NLLLossDerivatives):
    """Cross-entropy of logits ``[[N, C, *]]`` with class indices ``[[N, *]]`` or class probabilities ``[[N, C, *]]``.

    All options are exact: class weights, ignored targets, label smoothing, target probabilities that do not add up to one. If all
    targets are ignored, the mean is not a number, but its gradient is zero, and so is the Hessian here.
    """

    least_axes: ClassVar[int] = 2
    keeps: ClassVar[frozenset[str]] = frozenset({"input"})

    def __init__(self, use_autograd: bool = False) -> None:
        super().__init__(use_autograd=use_autograd)

    def hessian_is_psd(self) -> bool:
        return True  # negative weights are refused where a square root is needed

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return input.shape[0] * prod(input.shape[2:])

    def position_weights(self, module: Module, g_out: tuple[Tensor, ...]) -> Tensor:
        return g_out[0].unsqueeze(1) if g_out[0].dim() else g_out[0]

    def hessian_is_psd_at(self, module: Module) -> bool:
        return not (self._hessian_weight(module) < 0).any()

    def _hessian_weight(self, module: Module) -> Tensor:
        logits, target, smoothing = module.input0, module.input1, module.label_smoothing
        weight = at_least_float32(logits.new_ones(logits.shape[1]) if module.weight is None else module.weight)
        if target.shape == logits.shape:
            counts = None
            factor = torch.einsum("c,nc...->n...", weight, target.to(weight.dtype))
            divisor = self._get_mean_normalization(logits)
        else:
            counts = target != module.ignore_index
            factor = counts.to(weight.dtype) if module.weight is None else weight[target.where(counts, 0).long()] * counts
            divisor = factor.sum()
        if smoothing:
            factor = (1 - smoothing) * factor + smoothing * weight.mean()
        if module.reduction == "mean":
            factor = factor / divisor
        if counts is not None:  # an ignored term is no part of the loss, not even where all are and the divisor is zero
            factor = factor.where(counts, 0)
        return factor.unsqueeze(1)

    def _sqrt_weight(self, module: Module, subsampling: Samples) -> Tensor | float:
        target = module.input1
        usual = module.weight is None and not module.label_smoothing and target.shape != module.input0.shape
        if usual and target.numel() and not (target == module.ignore_index).any():
            return target.numel() ** -0.5 if module.reduction == "mean" else 1.0
        return super()._sqrt_weight(module, subsampling)

    def _log_probs(self, module: Module, subsampling: Samples = None) -> Tensor:
        """Compute the logarithm of the probabilities, all positions in one axis.

        Args:
            module: The loss with recorded inputs.
            subsampling: Indices of samples, or ``None`` for all.

        Returns:
            ``[[N, C, L]]``.
        """
        self._verify_support(module)
        logits = at_least_float32(subsample(module.input0, subsampling=subsampling))
        return logits.log_softmax(1).reshape(*logits.shape[:2], prod(logits.shape[2:]))

    def _sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        return self._factor(module, self._sqrt_weight(module, subsampling), subsampling)

    def _signed_sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> tuple[Tensor, Tensor | None]:
        weight = self._hessian_weight(module)
        return self._factor(module, weight.abs().sqrt()), signs_of(weight.expand(module.input0.shape).flatten(1))

    def _factor(self, module: Module, weight: Tensor | float, subsampling: Samples = None) -> Tensor:
        """Compute the factor, column by column, the positions of one class side by side.

        Args:
            module: The loss with recorded inputs.
            weight: Square root of each position's factor in the loss, a number or ``[[N, 1, *]]``.
            subsampling: Indices of samples, or ``None`` for all.

        Returns:
            ``[[V, N, C, *]]``.
        """
        log_probs = self._log_probs(module, subsampling)
        num_samples, num_classes, num_positions = log_probs.shape
        weight = weight.reshape(num_samples, 1, num_positions) if isinstance(weight, Tensor) else weight
        scale = ((log_probs / 2).exp() * weight).movedim(1, 0).unsqueeze(2)
        delta = torch.eye(num_classes, dtype=scale.dtype, device=scale.device)[:, None, :, None]
        factor = (delta - log_probs.exp()).mul_(scale).to(module.input0.dtype)
        if num_positions != 1:
            # Different positions share no entry of the Hessian: each has columns of its own.
            factor = factor.diag_embed(dim1=1, dim2=4)
        return factor.reshape(num_classes * num_positions, num_samples, *module.input0.shape[1:])

    def _make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        probs = self._log_probs(module).exp().reshape(module.input0.shape)
        weighted = probs * self._hessian_weight(module)
        return lambda mat: (weighted * (mat - (probs * mat).sum(2, keepdim=True))).to(mat.dtype)

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        probs = self._log_probs(module).exp()
        weighted = probs * self._hessian_weight(module).reshape(probs.shape[0], 1, probs.shape[2])
        blocks = weighted.sum(0).T.diag_embed() - torch.einsum("ncl,ndl->lcd", weighted, probs)
        return blocks.movedim(0, 2).diag_embed(dim1=1, dim2=3).reshape(2 * module.input0.shape[1:]).to(module.input0.dtype)

    def _make_distribution(self, subsampled_input: Tensor) -> Categorical:
        return Categorical(probs=at_least_float32(subsampled_input).softmax(1).movedim(1, -1))

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        probs = at_least_float32(subsampled_input).softmax(1)
        labels = self._draw(probs, mc_samples).unsqueeze(2)
        return probs.expand(mc_samples, *probs.shape).scatter_add(2, labels, probs.new_full((1,), -1.0).expand(labels.shape))

    def _draw(self, probs: Tensor, mc_samples: int) -> Tensor:
        """Draw labels as ``_make_distribution(...).sample`` does, without its checks.

        Args:
            probs: ``[[N, C, *]]``.
            mc_samples: Number of draws ``M``.

        Returns:
            Classes ``[[M, N, *]]``.

        Raises:
            LossValueError: If the probabilities are not finite.
        """
        flat = probs.movedim(1, -1).reshape(-1, probs.shape[1])
        # on a CPU drawing raises by itself, elsewhere it might end the process
        if probs.device.type == "cpu" or flat.isfinite().all():
            with suppress(RuntimeError):
                labels = torch.multinomial(flat, mc_samples, replacement=True)
                return labels.T.reshape(mc_samples, probs.shape[0], *probs.shape[2:])
        raise LossValueError("CrossEntropyLoss: the probabilities of the classes are not finite (nan or inf logits), so that no labels can be drawn.")
