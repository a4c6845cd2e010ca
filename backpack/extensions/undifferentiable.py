"""Quantities of a pass with ``create_graph=True``: to differentiate them raises, rather than to count them as constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.utils.errors import DifferentiationError


class _Undifferentiable(torch.autograd.Function):
    """The identity, whose derivative is refused."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Tensor, field: str) -> Tensor:
        ctx.field = field
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise DifferentiationError(
            f"{ctx.field} was computed in a backward pass with create_graph=True, but it cannot be differentiated: it is not connected to the "
            "graph of the parameters. Use .detach() if it is meant to be constant; per-sample quantities that can be differentiated "
            "come from torch.func."
        )


def undifferentiable(value: Any, parameter: Parameter, field: str) -> Any:
    """Let a quantity of a pass with ``create_graph=True`` raise, rather than count as constant, when it is differentiated.

    Args:
        value: The quantity.
        parameter: Its parameter.
        field: Its name.

    Returns:
        The quantity.
    """
    if isinstance(value, list):
        return [undifferentiable(part, parameter, field) for part in value]
    return _Undifferentiable.apply(value, parameter, field) if isinstance(value, Tensor) else value
