"""Clipping of per-sample gradients, by the norm over all parameters together (Abadi et al. 2016)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from backpack.utils.errors import ArgumentError
from backpack.utils.precision import wide


def clip_factors(model: Module, max_norm: float) -> Tensor:
    """Return the factors that bound the norms of per-sample gradients: ``min(1, max_norm / norm)``.

    Made from ``batch_l2``, which needs no memory for per-sample gradients, or from ``grad_batch``. With a mean loss its divisor is in the gradients,
    and belongs into ``max_norm``, too. A second backward pass over ``(factors * losses).sum()``, with ``reduction="none"``, leaves the clipped
    gradient in ``.grad``.

    Args:
        model: Its parameters carry ``batch_l2`` or ``grad_batch``.
        max_norm: The bound.

    Returns:
        ``[[N]]``.

    Raises:
        ArgumentError: If the bound is not positive, or a parameter with a gradient carries neither, so that it would be left out of the norm.
    """
    if not max_norm > 0:
        raise ArgumentError(f"max_norm must be positive, got {max_norm!r}.")
    squares = []
    for name, parameter in model.named_parameters():
        carried = vars(parameter)
        if "batch_l2" in carried:
            squares.append(carried["batch_l2"])
        elif "grad_batch" in carried:
            gradients = wide(carried["grad_batch"])
            squares.append(gradients.reshape(len(gradients), parameter.numel()).square().sum(1))
        elif parameter.grad is not None:
            raise ArgumentError(f"{name} has a gradient, but neither batch_l2 nor grad_batch: backpack(BatchL2Grad()) computes the former.")
    if not squares:
        raise ArgumentError("No parameter carries batch_l2 or grad_batch: run a backward pass inside backpack(BatchL2Grad()).")
    return (max_norm / torch.stack(squares).sum(0).sqrt()).clamp(max=1)


def clip_per_sample(model: Module, max_norm: float) -> Tensor:
    """Replace ``.grad`` by the sum of the per-sample gradients, each clipped to a norm over all parameters.

    Args:
        model: Its parameters carry ``grad_batch``.
        max_norm: The bound; see ``clip_factors``.

    Returns:
        The factors ``[[N]]``.

    Raises:
        ArgumentError: As ``clip_factors``, or if a parameter does not carry ``grad_batch``.
    """
    factors = clip_factors(model, max_norm)
    parameters = [(name, p) for name, p in model.named_parameters() if {"batch_l2", "grad_batch"} & vars(p).keys()]
    for name, parameter in parameters:
        if "grad_batch" not in vars(parameter):
            raise ArgumentError(f"{name} carries no grad_batch: write backpack(BatchGrad()), or use clip_factors() and a second backward pass.")
    for _, parameter in parameters:
        parameter.grad = torch.einsum("n,n...->...", factors.to(parameter.dtype), parameter.grad_batch)
    return factors
