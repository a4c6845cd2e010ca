"""Derivatives of any loss whose value is a sum (or mean) of one term per sample: the per-sample Hessian by automatic differentiation.

The loss is evaluated again on its recorded inputs and differentiated twice, so that its own reduction, weights and options enter as they
are. ``D`` Hessian-vector products with the unit vectors of a sample's ``D`` input entries, applied to all samples at once, give all blocks
of the Hessian; one more product with a fixed pseudo-random vector proves that nothing lies outside the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod, sqrt
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd import grad
from torch.nn import (
    BCELoss,
    GaussianNLLLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    Module,
    MultiLabelMarginLoss,
    MultiLabelSoftMarginLoss,
    MultiMarginLoss,
    NLLLoss,
    PoissonNLLLoss,
    SmoothL1Loss,
    SoftMarginLoss,
)

from backpack.core.derivatives.basederivatives import BaseLossDerivatives, Grads, Samples
from backpack.core.derivatives.registry import register
from backpack.utils.errors import LossValueError, MixedSamplesError, UnsupportedError
from backpack.utils.subsampling import subsample


def at_least_float32(tensor: Tensor) -> Tensor:
    """Widen half precision, whose few digits do not survive the exponentials and divisors of a loss.

    Args:
        tensor: A tensor of any type.

    Returns:
        The same values in single precision, or the tensor itself if it is as precise.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class GenericLossDerivatives(BaseLossDerivatives):
    """Hessian factors of an arbitrary twice differentiable loss, called as ``loss(input, target, ...)``.

    All comparisons (samples do not mix, the Hessian is positive semidefinite, a second evaluation gives the same value) allow the square
    root of the machine epsilon, relative to the largest entry of the mini-batch; smaller negative eigenvalues are set to zero.

    A loss of one's own takes part with ``register(MyLoss, GenericLossDerivatives)``.
    """

    def hessian_is_psd(self) -> bool:
        return False  # nothing is known before it has been computed

    def _sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        inputs = module.input0
        hessian = at_least_float32(subsample(sample_hessians(module), subsampling=subsampling))
        values, vectors = torch.linalg.eigh(hessian)
        if (values < -_tolerance(values, inputs.dtype)).any():
            raise LossValueError(
                f"The Hessian of {_name(module)} has negative eigenvalues (smallest {values.min().item():.3g}, largest {values.max().item():.3g}), "
                "so that it has no real square root. Use a quantity that needs none (HMP, GGNMP, or backpack.hessianfree), a convex loss, or, "
                "if the loss is convex, float64."
            )
        factor = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        return factor.movedim(2, 0).reshape(hessian.shape[2], hessian.shape[0], *inputs.shape[1:]).to(inputs.dtype)

    def _sqrt_hessian_sampled(
        self,
        module: Module,
        g_inp: Grads,
        g_out: Grads,
        mc_samples: int = 1,
        subsampling: Samples = None,
    ) -> Tensor:
        # Independent signs e with E[e_v e_w] = delta_vw turn the columns of a sample into one column of the same second moment.
        factor = self._sqrt_hessian(module, g_inp, g_out, subsampling=subsampling)
        signs = torch.empty(mc_samples, *factor.shape[:2], dtype=factor.dtype, device=factor.device).bernoulli_().mul_(2).sub_(1)
        return torch.einsum("mvn,vn...->mn...", signs, factor) / sqrt(mc_samples)

    def _make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        hessian = sample_hessians(module)
        return lambda mat: torch.einsum("nij,vnj->vni", hessian, mat.reshape(mat.shape[0], *hessian.shape[:2])).reshape(mat.shape)

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        return sample_hessians(module).sum(0).reshape(2 * module.input0.shape[1:])


def sample_hessians(module: Module) -> Tensor:
    """Compute the Hessian of (the sum over the entries of) a loss with respect to each sample's slice of its first input.

    Args:
        module: A loss with recorded inputs and output.

    Returns:
        Symmetric matrices ``[[N, D, D]]``, where ``D`` is the number of input entries per sample.

    Raises:
        UnsupportedError: If the loss cannot be differentiated twice.
        LossValueError: If a second evaluation gives another value than the recorded one.
        MixedSamplesError: If the Hessian couples different samples.
    """
    recorded = module.input0
    if recorded.dim() == 0 or not recorded.is_floating_point():
        raise UnsupportedError(
            f"{_name(module)} got an input of shape {tuple(recorded.shape)} and type {recorded.dtype}. Second-order quantities need a real "
            "input with the samples on axis 0."
        )
    num_samples, num_features = recorded.shape[0], prod(recorded.shape[1:])
    with torch.enable_grad():
        point = recorded.detach().requires_grad_()
        output = _evaluate(module, point)
        try:
            product = _hessian_product(output.sum(), point)
            units = torch.eye(num_features, dtype=point.dtype, device=point.device)
            columns = [product(unit.expand(num_samples, -1)) for unit in units]
            probe = torch.randn(num_samples, num_features, generator=Generator().manual_seed(0)).to(units)
            probed = product(probe)
        except RuntimeError as error:
            raise UnsupportedError(f"{_name(module)} cannot be differentiated twice: {error}") from error

    blocks = torch.stack(columns, 2) if columns else recorded.new_zeros(num_samples, 0, 0)
    deviation = probed - torch.einsum("nij,nj->ni", blocks, probe)
    if (deviation.abs() > _tolerance(probed, point.dtype)).any():
        raise MixedSamplesError(
            f"The Hessian of {_name(module)} with respect to its input {tuple(recorded.shape)} couples entries with different indices on axis 0, "
            "so that no per-sample quantity exists. The loss must be a sum, or a mean, of one term per sample."
        )
    return (blocks + blocks.mT) / 2


def _evaluate(module: Module, point: Tensor) -> Tensor:
    # The forward method, not the call: the hooks that record a forward pass are not for this one.
    loss = module if isinstance(module, Module) else module.module
    output = loss.forward(point, *_further_arguments(module))
    tolerance = sqrt(torch.finfo(output.dtype).eps)
    if not torch.allclose(output.detach(), module.output.detach().to(output.dtype), rtol=tolerance, atol=tolerance, equal_nan=True):
        raise LossValueError(
            f"{_name(module)} gives another value when it is evaluated again on the same input, so that its Hessian is not the one of the "
            "recorded value. Remove what is random or changes with each call."
        )
    return output


def _further_arguments(module: Module) -> list[Any]:
    arguments: list[Any] = []
    with suppress(AttributeError):  # ends the recorded inputs
        while True:
            arguments.append(getattr(module, f"input{len(arguments) + 1}"))
    return arguments


def _hessian_product(value: Tensor, point: Tensor) -> Callable[[Tensor], Tensor]:
    # Only where the incoming gradient takes part in the graph does a backward pass that must not be differentiated leave a mark there.
    (gradient,) = grad(value, point, torch.ones_like(value, requires_grad=True), create_graph=True)
    open_nodes, seen = [gradient.grad_fn], set()
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            if node.name() == "torch::autograd::Error":  # not on the way to the point, hence never run: it would pass for a zero
                raise RuntimeError("the backward pass of one of its functions is marked as once_differentiable")
            seen.add(node)
            open_nodes += [parent for parent, _ in node.next_functions]
    return lambda vector: grad(gradient, point, vector.reshape(point.shape), retain_graph=True, materialize_grads=True)[0].reshape(vector.shape)


def _tolerance(values: Tensor, dtype: torch.dtype) -> float:
    return sqrt(torch.finfo(dtype).eps) * values.abs().max().item() if values.numel() else 0.0


def _name(module: Module) -> str:
    return type(module if isinstance(module, Module) else module.module).__name__


# The losses of torch whose first argument is their only prediction, with the samples on its axis 0.
for _loss in (
    BCELoss,
    GaussianNLLLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MultiLabelMarginLoss,
    MultiLabelSoftMarginLoss,
    MultiMarginLoss,
    NLLLoss,
    PoissonNLLLoss,
    SmoothL1Loss,
    SoftMarginLoss,
):
    register(_loss, GenericLossDerivatives)
