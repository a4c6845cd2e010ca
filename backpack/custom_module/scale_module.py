"""Multiplication with a number as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from backpack.utils.errors import ArgumentError


class ScaleModule(Module):
    """Multiply the input with a fixed number."""

    def __init__(self, weight: float = 1.0) -> None:
        """Store the number.

        Args:
            weight: The factor, a ``float``. It is no parameter.

        Raises:
            ArgumentError: If ``weight`` is no ``float``.
        """
        super().__init__()
        if not isinstance(weight, float):
            raise ArgumentError(f"weight must be a float, got {weight!r} of type {type(weight).__name__}.")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Scale the input.

        Args:
            input: Any tensor.

        Returns:
            ``weight * input``.
        """
        return input * self.weight

    def extra_repr(self) -> str:
        return f"weight={self.weight}"
