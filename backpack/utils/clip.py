"""Clipping of per-sample gradients, by the norm over all parameters together (Abadi et al. 2016)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.owners import owners
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
        ArgumentError: If the bound is not positive, or a parameter with a gradient carries neither, or one of an earlier context than others, so
            that it would be left out of the norm.
    """
    found = _of_last_context(model, max_norm)
    return _factors(max_norm, [parameter.batch_l2 if "batch_l2" in fields else _squares(parameter) for _, parameter, fields in found])


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
    found = _of_last_context(model, max_norm)
    for name, _, fields in found:
        if "grad_batch" not in fields:
            raise ArgumentError(
                f"{name} carries no grad_batch of the last context: write backpack(BatchGrad()), or use clip_factors() and a second backward pass."
            )
    factors = _factors(max_norm, [_squares(parameter) for _, parameter, _ in found])
    for _, parameter, _ in found:
        gradients = parameter.grad_batch
        parameter.grad = torch.einsum("n,n...->...", factors.to(gradients.dtype), gradients).to(parameter.dtype)
    return factors


def _of_last_context(model: Module, max_norm: float) -> list[tuple[str, Parameter, set[str]]]:
    """Find what the last context has written; what an earlier one has left is about another mini-batch.

    Args:
        model: The model.
        max_norm: The bound.

    Returns:
        Name, parameter, and those of the two fields that it carries; no parameters without.

    Raises:
        ArgumentError: See ``clip_factors``.
    """
    if not max_norm > 0:
        raise ArgumentError(f"max_norm must be positive, got {max_norm!r}.")
    contexts: dict[Parameter, dict[str, float]] = {}
    for parameter in model.parameters():
        notes = owners.notes(parameter)
        carried = {"batch_l2", "grad_batch"} & vars(parameter).keys()
        contexts[parameter] = {field: getattr(notes[field], "context", 0) if field in notes else inf for field in carried}  # inf: the user's own
    last = max((number for numbers in contexts.values() for number in numbers.values() if number < inf), default=0)
    found = []
    for name, parameter in model.named_parameters():
        fields = {field for field, number in contexts[parameter].items() if number >= last}
        if fields:
            found.append((name, parameter, fields))
        elif parameter.grad is not None:
            if contexts[parameter]:
                raise ArgumentError(
                    f"{name} has a gradient, but its batch_l2, or grad_batch, is of an earlier context than that of others. Compute those of all "
                    "parameters in one context; of those that take no part any more, set .grad to None."
                )
            raise ArgumentError(f"{name} has a gradient, but neither batch_l2 nor grad_batch: backpack(BatchL2Grad()) computes the former.")
    if not found:
        raise ArgumentError("No parameter carries batch_l2 or grad_batch: run a backward pass inside backpack(BatchL2Grad()).")
    return found


def _squares(parameter: Parameter) -> Tensor:
    gradients = wide(parameter.grad_batch)
    return gradients.reshape(len(gradients), parameter.numel()).square().sum(1)


def _factors(max_norm: float, squares: list[Tensor]) -> Tensor:
    return (max_norm / torch.stack(squares).sum(0).clamp(min=0).sqrt()).clamp(max=1)  # a rounding error below zero has no root
