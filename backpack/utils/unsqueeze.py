"""Let a function of matrices accept vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from torch import Tensor

from backpack.utils.errors import ShapeError


def kfacmp_unsqueeze_if_missing_dim(mat_dim: int) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """Build a decorator for a function that maps tensors with ``mat_dim`` axes to such tensors.

    The decorated function also accepts tensors that lack the last axis; its result then lacks it, too.

    Args:
        mat_dim: Number of axes that the function expects.

    Returns:
        The decorator. What it decorates raises ``ShapeError`` for any other number of axes.
    """

    def decorator(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @wraps(function)
        def wrapped(mat: Tensor) -> Tensor:
            if mat.dim() == mat_dim:
                return function(mat)
            if mat.dim() == mat_dim - 1:
                return function(mat.unsqueeze(-1)).squeeze(-1)
            raise ShapeError(f"Expected a tensor with {mat_dim} or {mat_dim - 1} axes, got shape {list(mat.shape)}.")

        return wrapped

    return decorator
