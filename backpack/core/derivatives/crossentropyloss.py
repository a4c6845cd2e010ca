"""Derivatives of ``CrossEntropyLoss``: the negative log-likelihood of one categorical variable per position of the input.

A position with logits ``f``, probabilities ``p = softmax(f)``, class weights ``w`` and target probabilities ``t`` contributes
``-sum_c w_c t_c log p_c``. The Hessian is ``a (diag(p) - p p^T)`` with ``a = sum_c w_c t_c``, and ``diag(p) - p p^T = S^T S`` with
``S[v, c] = sqrt(p_v) (delta_vc - p_c)``, since the probabilities add up to one. Its rank is one less than there are classes, and so is the
number of columns of the other root that is here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import ClassVar

import torch
from torch import Size, Tensor
from torch.distributions import Categorical
from torch.nn import CrossEntropyLoss, Module

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.loss_generic import signs_of
from backpack.core.derivatives.nll_base import NLLLossDerivatives
from backpack.core.derivatives.records import module_of
from backpack.core.derivatives.registry import register
from backpack.utils.columns import Entries
from backpack.utils.errors import LossValueError
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample

_VECTORIZED = 16
"""From so many classes on, CPU kernels are fast along a last axis of classes; with ten, they take four times as long as along the first."""


def _over_classes(function: Callable[[Tensor, int], Tensor], logits: Tensor) -> Tensor:
    """Apply a softmax, or its logarithm, to the classes.

    Args:
        function: Takes a tensor and an axis.
        logits: ``[N, C, *]``.

    Returns:
        ``[N, C, *]``, laid out in memory as the logits are.
    """
    if _classes_last(logits):
        return function(logits.movedim(1, -1), logits.dim() - 1).movedim(-1, 1)
    if logits.dim() == 2 and logits.shape[1] < _VECTORIZED and logits.device.type == "cpu":
        return function(logits.T, 0).T.contiguous()
    return function(logits, 1)


def _classes_last(logits: Tensor) -> bool:
    # the transposed output of a Linear layer with positions: else it would be copied to and fro, at the cost of three softmaxes
    return logits.dim() > 2 and logits.movedim(1, -1).is_contiguous()


def _usual_columns(log_probs: Tensor, weight: Tensor | float) -> Tensor:
    """Compute ``S[v, c] = sqrt(p_v) (delta_vc - p_c)`` at each position.

    Args:
        log_probs: Logarithms of the probabilities ``[N, C, L]``.
        weight: Factor of the columns of a position, a number or ``[N, 1, L]``.

    Returns:
        ``[C, N, C, L]``.
    """
    root = (log_probs / 2).exp_() * weight
    factor = root.neg().movedim(1, 0).unsqueeze(2) * log_probs.exp()
    factor.diagonal(dim1=0, dim2=2).add_(root.movedim(1, 2))
    return factor


def _reflection(log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a root is made of that has no column for the most likely class ``k``.

    The square roots ``r`` of the probabilities are a unit vector, and ``diag(p) - p p^T = diag(r) (1 - r r^T) diag(r)``. A reflection that maps
    ``r`` to the axis of ``k`` has rows that are orthonormal, and all but the ``k``-th are orthogonal to ``r``: ``1 - r r^T`` is the product of these
    with themselves. That is ``S[v, c] = r_v (delta_vc - t_c)`` for ``v != k``, with ``t_k = r_k``, and ``t_c = p_c / (1 + r_k)`` for the others.
    Nothing cancels: ``p_v`` is not more than one half.

    Args:
        log_probs: Logarithms of the probabilities ``[N, C, L]``.

    Returns:
        ``r [N, C, L]``, ``k [N, 1, L]``, and ``t [N, C, L]``.
    """
    root = (log_probs / 2).exp_()
    largest, likely = root.max(1, keepdim=True)
    return root, likely, (log_probs.exp() / (1 + largest)).scatter_(1, likely, largest)


def _few_columns(log_probs: Tensor, weight: Tensor | float) -> Tensor:
    root, likely, shares = _reflection(log_probs)
    others = _others(torch.arange(root.shape[1] - 1, device=root.device).unsqueeze(1), likely)
    scale, others = (part.movedim(1, 0).unsqueeze(2) for part in (root.gather(1, others) * weight, others))
    return (scale.neg() * shares).scatter_add_(2, others, scale)


def _others(numbers: Tensor, likely: Tensor) -> Tensor:
    # the classes of the columns, all but the most likely one
    return numbers + (numbers >= likely)


class _Differences:
    """Columns ``r_v (delta_vc - t_c)``, ``v != k``, formed where they are needed, ``[B, C - 1, C]``; those of a block have the same sign."""

    def __init__(self, root: Tensor, likely: Tensor, shares: Tensor, dtype: torch.dtype) -> None:
        """Take note of what they are made of.

        Args:
            root: ``r [B, C]``.
            likely: ``k [B, 1]``.
            shares: ``t [B, C]``.
            dtype: Type of the columns.
        """
        self._root, self._likely, self._shares, self.dtype, self.device = root, likely, shares, dtype, root.device
        self.shape = Size([len(root), root.shape[1] - 1, root.shape[1]])

    def __mul__(self, factors: Tensor) -> _Differences:
        return _Differences(self._root * factors[..., 0], self._likely, self._shares, self.dtype)

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor:
        block, number = (part.unsqueeze(1) for part in at)
        classes = _others(number, self._likely[at[0]])
        scales = self._root[block, classes]
        return self._shares[at[0]].mul_(-scales).scatter_add_(1, classes, scales).to(self.dtype)

    def squares(self, signs: Tensor) -> Tensor:
        own, all_of_them = self._squared_scales(signs[:, :1])
        return torch.addcmul(own * (1 - 2 * self._shares), all_of_them, self._shares.square())

    def moment(self) -> Tensor:
        own, all_of_them = self._squared_scales(1.0)
        mixed = own.T @ self._shares
        return own.sum(0).diag() - mixed - mixed.T + (all_of_them * self._shares).T @ self._shares

    def _squared_scales(self, signs: Tensor | float) -> tuple[Tensor, Tensor]:
        # of the column of each class, [B, C], and of all columns together, [B, 1]
        scales = self._root.square().mul_(signs).scatter_(1, self._likely, 0)
        return scales, scales.sum(1, keepdim=True)


@register(CrossEntropyLoss)
class CrossEntropyLossDerivatives(NLLLossDerivatives):
    """Cross-entropy of logits ``[N, C, *]`` with class indices ``[N, *]`` or class probabilities ``[N, C, *]``.

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
        return self._common_weight(module) is not None or not (self._hessian_weight(module) < 0).any()

    def _common_weight(self, module: Module) -> float | None:
        """Return the factor of all positions, where it is known to be the same for each.

        Args:
            module: The loss with recorded inputs.

        Returns:
            A number; ``None`` with class weights, label smoothing, target probabilities or ignored targets, and where a subclass has factors of
            its own.
        """
        if type(self)._hessian_weight is not CrossEntropyLossDerivatives._hessian_weight:
            return None
        target, loss = module.input1, module_of(module)
        usual = loss.weight is None and not loss.label_smoothing and not target.is_floating_point()
        if not usual or not target.numel():
            return None
        # the forward pass has accepted no other number below zero
        if target.min().item() < 0 if loss.ignore_index < 0 else (target == loss.ignore_index).any():
            return None
        return 1 / target.numel() if loss.reduction == "mean" else 1.0

    def _hessian_weight(self, module: Module) -> Tensor:
        logits, target, loss = module.input0, module.input1, module_of(module)
        weights = module.weight
        weight = wide(logits.new_ones(logits.shape[1]) if weights is None else weights)
        if target.shape == logits.shape:
            counts = None
            factor = torch.einsum("c,nc...->n...", weight, target.to(weight.dtype))
            divisor = self._get_mean_normalization(logits)
        else:
            counts = target != loss.ignore_index
            factor = counts.to(weight.dtype) if weights is None else weight[target.where(counts, 0).long()] * counts
            divisor = factor.sum()
        if loss.label_smoothing:
            factor = (1 - loss.label_smoothing) * factor + loss.label_smoothing * weight.mean()
        if loss.reduction == "mean":
            factor = factor / divisor
        if counts is not None:  # an ignored term is no part of the loss, not even where all are and the divisor is zero
            factor = factor.where(counts, 0)
        return factor.unsqueeze(1)

    def _sqrt_weight(self, module: Module, subsampling: Samples) -> Tensor | float:
        common = self._common_weight(module)
        return super()._sqrt_weight(module, subsampling) if common is None else common**0.5

    def _sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        self._verify_support(module)
        return self._factor(module, self._sqrt_weight(module, subsampling), subsampling)

    def _signed_sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> tuple[Tensor, Tensor | None]:
        self._verify_support(module)
        weight, signs = self._signed_weight(module, module.input0.shape[1])
        return self._factor(module, weight), signs

    def _signed_weight(self, module: Module, columns: int) -> tuple[Tensor | float, Tensor | None]:
        """Return the square root of each position's factor in the loss, without its sign, and the signs.

        Args:
            module: The loss with recorded inputs.
            columns: Number of columns of a position.

        Returns:
            A number or ``[N, 1, *]``; and ``[V, N]`` for all columns, ``None`` if all count positive.
        """
        common = self._common_weight(module)
        if common is not None:
            return common**0.5, None
        weight = self._hessian_weight(module)
        return weight.abs().sqrt(), signs_of(weight.expand(len(weight), columns, *weight.shape[2:]).flatten(1))

    def least_columns(self, shape: Size) -> int:
        usual, of = CrossEntropyLossDerivatives, type(self)
        if shape[1] < 2 or (of._sqrt_hessian, of._signed_sqrt_hessian) != (usual._sqrt_hessian, usual._signed_sqrt_hessian):
            return super().least_columns(shape)
        return (shape[1] - 1) * shape[2:].numel()

    def _least_sqrt_hessian(self, module: Module, g_out: Grads, signed: bool) -> tuple[Tensor, Tensor | None]:
        self._verify_support(module)
        shape = module.input0.shape
        if self.least_columns(shape) == shape[1:].numel():
            return super()._least_sqrt_hessian(module, g_out, signed)
        if not signed:
            return self._factor(module, self._sqrt_weight(module, None), make=_few_columns), None
        weight, signs = self._signed_weight(module, shape[1] - 1)
        return self._factor(module, weight, make=_few_columns), signs

    def _factor(
        self, module: Module, weight: Tensor | float, subsampling: Samples = None, make: Callable[[Tensor, Tensor | float], Tensor] = _usual_columns
    ) -> Tensor:
        """Compute a factor, column by column, the positions of one class side by side.

        Args:
            module: The loss with recorded inputs.
            weight: Square root of each position's factor in the loss, a number or ``[N, 1, *]``.
            subsampling: Indices of samples, or ``None`` for all.
            make: Makes the columns of a position.

        Returns:
            ``[V, N, C, *]``.
        """
        factor = self._of_positions(module, weight, subsampling, make)
        columns, num_samples, _, num_positions = factor.shape
        if num_positions != 1:
            # Different positions share no entry of the Hessian: each has columns of its own.
            factor = factor.diag_embed(dim1=1, dim2=4)
        return factor.reshape(columns * num_positions, num_samples, *module.input0.shape[1:])

    def _of_positions(self, module: Module, weight: Tensor | float, subsampling: Samples, make: Callable[[Tensor, Tensor | float], Tensor]) -> Tensor:
        """Compute a factor at each position, see ``_factor``.

        Returns:
            ``E`` columns of each of ``L`` positions, ``[E, N, C, L]``.
        """
        log_probs = self._log_probs(module, subsampling)
        samples, _, positions = log_probs.shape
        return make(log_probs, weight.reshape(samples, 1, positions) if isinstance(weight, Tensor) else weight).to(module.input0.dtype)

    def root_of_blocks(self, module: Module, signed: bool) -> tuple[Tensor | Entries, Tensor | None, int]:
        self._verify_support(module)
        shape, axis = module.input0.shape, 1 - module.input0.dim()
        few = self.least_columns(shape) < shape[1:].numel()
        columns, positions = shape[1] - few, prod(shape[2:])
        weight, signs = self._signed_weight(module, columns) if signed else (self._sqrt_weight(module, None), None)
        if signs is not None:  # [V, N], the positions of a class side by side
            signs = signs.reshape(columns, positions, shape[0]).permute(2, 1, 0).flatten(0, 1)
        if not few:
            return self._of_positions(module, weight, None, _usual_columns).permute(1, 3, 0, 2).flatten(0, 1), signs, axis
        weight = weight.reshape(-1, 1, positions) if isinstance(weight, Tensor) else weight
        root, likely, shares = _reflection(self._log_probs(module))
        parts = (part.movedim(1, 2).flatten(0, 1) for part in (root * weight, likely, shares))
        return _Differences(*parts, module.input0.dtype), signs, axis

    def _log_probs(self, module: Module, subsampling: Samples = None) -> Tensor:
        """Compute the logarithm of the probabilities, all positions in one axis.

        Args:
            module: The loss with recorded inputs.
            subsampling: Indices of samples, or ``None`` for all.

        Returns:
            ``[N, C, L]``.
        """
        logits = wide(subsample(module.input0, subsampling=subsampling))
        return _over_classes(Tensor.log_softmax, logits).reshape(*logits.shape[:2], prod(logits.shape[2:]))

    def _make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        self._verify_support(module)
        probs, weighted = self._weighted_probs(module)
        likely = probs.argmax(1, keepdim=True)

        def product(mat: Tensor) -> Tensor:
            # differences to the most likely class: those of its own entry and the mean would cancel where its probability is close to one
            differences = wide(mat) - wide(mat.gather(2, likely.expand(len(mat), *likely.shape)))
            return (weighted * (differences - (probs * differences).sum(2, keepdim=True))).to(mat.dtype)

        return product

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        self._verify_support(module)
        probs, weighted = (part.flatten(2) if part.dim() > 2 else part.unsqueeze(2) for part in self._weighted_probs(module))
        blocks = torch.baddbmm(weighted.sum(0).T.diag_embed(), weighted.permute(2, 1, 0), probs.permute(2, 0, 1), alpha=-1).movedim(0, 2)
        if probs.shape[2] != 1:
            blocks = blocks.diag_embed(dim1=1, dim2=3)
        return blocks.reshape(2 * module.input0.shape[1:]).to(module.input0.dtype)

    def _weighted_probs(self, module: Module) -> tuple[Tensor, Tensor]:
        """Compute the probabilities.

        Args:
            module: The loss with recorded inputs.

        Returns:
            The probabilities ``[N, C, *]``, and their products with each position's factor in the loss.
        """
        probs, common = _over_classes(Tensor.softmax, wide(module.input0)), self._common_weight(module)
        return probs, probs * (self._hessian_weight(module) if common is None else common)

    def _make_distribution(self, subsampled_input: Tensor) -> Categorical:
        return Categorical(probs=wide(subsampled_input).softmax(1).movedim(1, -1))

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        probs = _over_classes(Tensor.softmax, wide(subsampled_input))
        labels, axis = self._draw(probs, mc_samples), probs.dim() - 1 if _classes_last(probs) else 1
        grads = probs.new_zeros(mc_samples, *probs.movedim(1, axis).shape).movedim(1 + axis, 2)
        return grads.scatter_(2, labels.unsqueeze(2), -1.0).add_(probs)

    def _draw(self, probs: Tensor, mc_samples: int) -> Tensor:
        """Draw labels as ``_make_distribution(...).sample`` does, without its checks.

        Args:
            probs: ``[N, C, *]``.
            mc_samples: Number of draws ``M``.

        Returns:
            Classes ``[M, N, *]``.

        Raises:
            LossValueError: If the probabilities are not finite.
        """
        if len(probs) == 1:  # no copy is made below, and numbers are drawn in the order of memory
            probs = probs.contiguous()
        flat = probs if probs.dim() == 2 else probs.movedim(1, -1).reshape(-1, probs.shape[1])
        # on a CPU drawing raises by itself, elsewhere it might end the process
        if probs.device.type == "cpu" or flat.isfinite().all():
            try:
                labels = torch.multinomial(flat, mc_samples, replacement=True).T
            except RuntimeError:
                pass
            else:
                return labels if probs.dim() == 2 else labels.reshape(mc_samples, probs.shape[0], *probs.shape[2:])
        raise LossValueError(
            "CrossEntropyLoss: the probabilities of the classes are not finite (nan or inf logits), so that no labels can be drawn. Take a "
            "quantity that draws none (DiagGGNExact, KFLR), or call backward outside of the context where the loss is not finite."
        )


class LogProbabilitiesDerivatives(CrossEntropyLossDerivatives):
    """Any loss that is linear in log-probabilities: ``-sum_c a_c log p_c`` at each position, as cross-entropies are, whatever their options.

    The gradient that arrives at the log-probabilities, ``-a``, contains targets, weights and divisors alike. The Hessian with respect to the
    logits is ``(sum_c a_c) (diag(p) - p p^T)``, and log-probabilities are as good as logits: their softmax is the same.
    """

    def _hessian_weight(self, module: Module) -> Tensor:
        return -wide(module.incoming).sum(1, keepdim=True)
