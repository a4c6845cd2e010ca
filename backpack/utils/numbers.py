"""Numbers that users give: Python's, numpy's, and tensors without axes."""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import Any

import torch
from torch import Tensor


def as_integer(given: Any, least: int | None = None) -> int | None:
    """Take an integer.

    Args:
        given: Anything.
        least: The smallest one that will do; ``None`` for any.

    Returns:
        The integer; ``None`` if it is none, or a truth value, or too small.
    """
    try:
        number = index(given)
    except TypeError:
        return None
    truth = isinstance(given, bool) or (isinstance(given, Tensor) and given.dtype is torch.bool)
    return None if truth or (least is not None and number < least) else number


def is_number(given: Any) -> bool:
    """Say whether something is a real number.

    Args:
        given: Anything.

    Returns:
        Whether it is one, also as a tensor or an array without axes.
    """
    return isinstance(given, Real) or (getattr(given, "ndim", None) == 0 and not isinstance(given, str))
