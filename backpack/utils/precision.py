"""Half precision: squares leave its range, and sums of many terms, exponentials and divisors its digits."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from backpack.utils.errors import ArgumentTypeError, UnsupportedError

_WIDE = (torch.float32, torch.float64)
_UNCHANGED = nullcontext()


def wide(tensor: Tensor) -> Tensor:
    """Widen half precision to ``float32``, in which squares can be added and exponentials taken; anything as precise stays as it is.

    Args:
        tensor: Numbers.

    Returns:
        The same numbers, in the same tensor if its type will do.
    """
    return tensor if tensor.dtype in _WIDE else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def largest(values: Tensor) -> float:
    """Return the largest absolute value among those that are finite: else one that overflows would tolerate any error in the others.

    Args:
        values: Numbers.

    Returns:
        The largest; zero if none is finite.
    """
    top = values.abs().max().item() if values.numel() else 0.0
    if isfinite(top):  # choosing entries takes ten times longer
        return top
    finite = values[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def tolerance(values: Tensor, dtype: torch.dtype) -> float:
    """Return the difference from numbers that is taken for rounding: the square root of the machine epsilon, relative to the largest of them.

    Args:
        values: The numbers.
        dtype: The type in which they were computed.

    Returns:
        The difference.
    """
    return sqrt(torch.finfo(dtype).eps) * largest(values)


def tolerances(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the difference from numbers that is taken for rounding, for each sample: where they are small, what they stand for may be large.

    Args:
        values: The numbers ``[N, *]``.
        dtype: The type in which they were computed.

    Returns:
        The differences ``[N, 1, ...]``, relative to the largest of a sample's numbers that are finite.
    """
    return sqrt(torch.finfo(dtype).eps) * largest_of_each(values)


def largest_of_each(values: Tensor) -> Tensor:
    """Return the size of the largest number of each sample that is finite; zero if none is.

    Args:
        values: The numbers ``[N, *]``.

    Returns:
        The sizes ``[N, 1, ...]``.
    """
    sizes = values.nan_to_num(0.0, 0.0, 0.0).abs().unsqueeze(-1).flatten(1)
    sizes = sizes.amax(1) if sizes.numel() else sizes.sum(1)
    return sizes.view(-1, *[1] * (values.dim() - 1))


def in_type(value: Any, dtype: torch.dtype) -> Any:
    """Convert a result.

    Args:
        value: A tensor, a list of such, or something else, which is returned as it is.
        dtype: The type.

    Returns:
        The result.
    """
    if isinstance(value, list):
        return [in_type(part, dtype) for part in value]
    return value.to(dtype) if isinstance(value, Tensor) else value


def without_autocast() -> AbstractContextManager:
    """Leave autocast, where a backward pass was called inside of it: gradients are the same, but what is squared and added would lose its digits.

    Returns:
        A context.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return _UNCHANGED
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def require_type(dtype: object, adds: bool = False) -> None:
    """Refuse what is no type of floating-point numbers.

    Args:
        dtype: What was given as one; ``None`` is allowed.
        adds: Whether many numbers are to be added in it.

    Raises:
        ArgumentTypeError: If it is something else.
        UnsupportedError: If sums in it would stop growing.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(f"dtype must be a type of floating-point numbers, torch.float64, say, got {dtype!r}.")
    if adds and dtype is not None and dtype.itemsize < torch.float32.itemsize:
        raise UnsupportedError(
            f"Passes that accumulate add results in the type in which these are kept, and in {dtype} sums would stop growing before long. Keep them "
            "in torch.float32 at least, and convert what they have become."
        )
