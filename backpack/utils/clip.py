"""Clipping of per-sample gradients, by the norm over all parameters together (Abadi et al. 2016)."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.core.owners import owners
from backpack.utils.errors import ArgumentError, ArgumentTypeError, require_module
from backpack.utils.precision import wide

_OWN = (inf, 0)
"""When what the user has set was written."""


def clip_factors(model: Module, max_norm: float) -> Tensor:
    """Return the factors that bound the norms of per-sample gradients: ``min(1, max_norm / norm)``.

    Made from ``batch_l2``, which needs no memory for per-sample gradients, or from ``grad_batch``. With a mean loss its divisor is in the gradients,
    and belongs into ``max_norm``, too. A second backward pass over ``(factors * losses).sum()``, with ``reduction="none"``, leaves the clipped
    gradient in ``.grad``.

    Args:
        model: Its parameters carry ``batch_l2`` or ``grad_batch`` of the last pass; passes under ``backpack(..., accumulate=True)`` count as one.
        max_norm: The bound.

    Returns:
        ``[N]``.

    Raises:
        ArgumentError: If the bound is no positive number; if a parameter would be left out of the norm: one with a gradient carries neither, or one
            of an earlier context than others, or any carries one of an earlier pass under the same context; or if samples are not the
            same everywhere.
    """
    found = _of_last_pass(model, max_norm, "clip_factors")
    return _factors(max_norm, [(name, parameter, "batch_l2" if "batch_l2" in fields else "grad_batch") for name, parameter, fields in found])


def clip_per_sample(model: Module, max_norm: float) -> Tensor:
    """Replace ``.grad`` by the sum of the per-sample gradients, each clipped to a norm over all parameters.

    Args:
        model: Its parameters carry ``grad_batch`` of the last pass.
        max_norm: The bound; see ``clip_factors``.

    Returns:
        The factors ``[N]``.

    Raises:
        ArgumentError: As ``clip_factors``, or if a parameter does not carry ``grad_batch``, or that of some of the samples.
    """
    found = _of_last_pass(model, max_norm, "clip_per_sample")
    for name, parameter, fields in found:
        if "grad_batch" not in fields:
            raise ArgumentError(
                f"{name} carries no grad_batch of the last pass: write backpack(BatchGrad()), or use clip_factors() and a second backward pass."
            )
        if getattr(owners.notes(parameter).get("grad_batch"), "partial", False):
            raise ArgumentError(
                f"{name} carries grad_batch of some of the samples only, or of repeated ones (subsampling=...), of which .grad would be made: write "
                "backpack(BatchGrad()), or, for the gradient of these samples, call backward on their losses alone."
            )
    factors = _factors(max_norm, [(name, parameter, "grad_batch") for name, parameter, _ in found])
    for _, parameter, _ in found:
        gradients = parameter.grad_batch
        parameter.grad = torch.einsum("n,n...->...", factors.to(gradients.dtype), gradients).to(parameter.dtype)
    return factors


def _of_last_pass(model: Module, max_norm: float, function: str) -> list[tuple[str, Parameter, set[str]]]:
    """Find what the last pass has written; what an earlier one has left is about another mini-batch, as far as is known.

    Args:
        model: The model.
        max_norm: The bound.
        function: Name of the caller.

    Returns:
        Name, parameter, and those of the two fields that it carries; no parameters without.

    Raises:
        ArgumentTypeError: If the model is no module, or the bound no number.
        ArgumentError: See ``clip_factors``.
    """
    require_module(model, function)
    try:
        positive = bool(max_norm > 0)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"max_norm must be a number, got {max_norm!r}.") from error
    if not positive:
        raise ArgumentError(f"max_norm must be positive, got {max_norm!r}.")
    written: dict[Parameter, dict[str, tuple[float, int]]] = {}  # when: numbers of pass and context
    for parameter in model.parameters():
        notes, carried = owners.notes(parameter), {"batch_l2", "grad_batch"} & vars(parameter).keys()
        written[parameter] = {field: _when(notes[field]) if field in notes else _OWN for field in carried}
    last = max((when for fields in written.values() for when in fields.values() if when is not _OWN), default=(0, 0))
    found = []
    for name, parameter in model.named_parameters():
        fields = {field for field, when in written[parameter].items() if when >= last}
        if fields:
            found.append((name, parameter, fields))
        elif any(context == last[1] for _, context in written[parameter].values()):
            raise ArgumentError(
                f"{name} carries {' and '.join(sorted(written[parameter]))} of an earlier pass than others, under the same context: whether it "
                "belongs to the samples of the last pass is not known. If it takes no part in that, call clear(model) before each pass, and set "
                ".grad to None; else compute those of all parameters in one pass, over the sum of the losses."
            )
        elif parameter.grad is not None:
            if written[parameter]:
                raise ArgumentError(
                    f"{name} has a gradient, but its batch_l2, or grad_batch, is of an earlier context than that of others. Compute those of all "
                    "parameters in one pass; of those that take no part any more, set .grad to None."
                )
            raise ArgumentError(
                f"{name} has a gradient, but neither batch_l2 nor grad_batch: backpack(BatchL2Grad()) computes the former. If it takes no part, set "
                ".grad to None."
            )
    if not found:
        raise ArgumentError("No parameter carries batch_l2 or grad_batch: run a backward pass inside backpack(BatchL2Grad()).")
    return found


def _when(note: Any) -> tuple[int, int]:
    return (0, 0) if note is None else (note.turn, note.context)


def _squares(parameter: Parameter) -> Tensor:
    gradients = wide(parameter.grad_batch)
    return gradients.reshape(len(gradients), parameter.numel()).square().sum(1)


def _samples(parameter: Parameter, field: str) -> tuple[int, tuple[int, ...] | None]:
    """Say which samples a result is about.

    Args:
        parameter: The parameter that carries it.
        field: Its name.

    Returns:
        Their number, and indices in the mini-batch; ``None`` for all, or where that is not known.

    Raises:
        ArgumentError: If something else stands in its place.
    """
    note, shape = owners.notes(parameter).get(field), getattr(parameter, field).shape
    if not shape or shape[1:] != (parameter.shape if field == "grad_batch" else ()):
        raise ArgumentError(
            f"A parameter of shape {list(parameter.shape)} carries {field} of shape {list(shape)}: an extension hook, say, has replaced what a "
            "backward pass had written. Keep that under a name of your own. BatchL2Grad() computes squared norms, and needs no gradients of samples."
        )
    chosen = None if note is None else note.extension.get_subsampling()
    return shape[0], None if chosen is None else tuple(chosen)


def _factors(max_norm: float, used: list[tuple[str, Parameter, str]]) -> Tensor:
    """Make the factors.

    Args:
        max_norm: The bound.
        used: Name and parameter, and the field to make them of.

    Returns:
        ``[N]``.

    Raises:
        ArgumentError: If it is about different samples.
    """
    samples = {_samples(parameter, field): f"{name}.{field}" for name, parameter, field in used}
    if len(samples) > 1:
        several = ", ".join(f"{what} of {number}{'' if chosen is None else ' chosen'}" for (number, chosen), what in samples.items())
        raise ArgumentError(
            f"Norms are over all parameters together, but these are about different samples: {several}. Compute all of the same ones."
        )
    squares = [parameter.batch_l2 if field == "batch_l2" else _squares(parameter) for _, parameter, field in used]
    return (max_norm / torch.stack(squares).sum(0).clamp(min=0).sqrt()).clamp(max=1)  # a rounding error below zero has no root
