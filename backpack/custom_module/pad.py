"""Padding as a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad


class Pad(Module):
    """Module version of ``torch.nn.functional.pad``."""

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        """Store what the function needs.

        Args:
            pad: Numbers of entries to add before and after each axis, from the last axis backward.
            mode: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
            value: What to fill in, in mode ``"constant"``.
        """
        super().__init__()
        self.pad = pad
        self.mode = mode
        self.value = value

    def forward(self, input: Tensor) -> Tensor:
        """Pad the input.

        Args:
            input: The tensor to pad.

        Returns:
            The padded tensor.
        """
        return pad(input, self.pad, mode=self.mode, value=self.value)

    def extra_repr(self) -> str:
        return f"pad={self.pad}, mode={self.mode!r}, value={self.value}"
