"""Multiplication with a number as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from backpack.utils.errors import ArgumentError, UnsupportedError


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


class _ScaledSummand(ScaleModule):
    """Factor of a summand that a sum or a difference has been split into: ``a + (-1.0 * b)`` is ``a - b``, but not where ``b`` has integers."""

    def __init__(self, weight: float, operation: str) -> None:
        """Store the number.

        Args:
            weight: The factor.
            operation: What was split, for messages.
        """
        super().__init__(weight)
        self.operation = operation

    def forward(self, input: Tensor | complex) -> Tensor | complex:
        """Scale the input.

        Args:
            input: A tensor of real or complex numbers, or one such number that the model was given.

        Returns:
            ``weight * input``.

        Raises:
            UnsupportedError: If the input has integers.
        """
        real = input.is_floating_point() or input.is_complex() if isinstance(input, Tensor) else isinstance(input, float | complex)
        if not real:
            kind = input.dtype if isinstance(input, Tensor) else type(input).__name__
            raise UnsupportedError(
                f"{self.operation} is computed with integers ({kind}), and would be with floating-point numbers after the conversion. "
                "Use the model without conversion, or convert the second summand to floating-point numbers."
            )
        return super().forward(input)
