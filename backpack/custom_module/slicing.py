"""Indexing as a module."""

from __future__ import annotations

from types import EllipsisType

from torch import Tensor
from torch.nn import Module


class Slicing(Module):
    """Module version of ``input[slice_info]``."""

    def __init__(self, slice_info: tuple[slice | int | EllipsisType | None, ...]) -> None:
        """Store the index.

        Args:
            slice_info: What stands between the brackets, as a tuple; ``(slice(None), 0)`` for ``[:, 0]``.
        """
        super().__init__()
        self.slice_info = slice_info

    def forward(self, input: Tensor) -> Tensor:
        """Index the input.

        Args:
            input: The tensor.

        Returns:
            ``input[slice_info]``.
        """
        return input[self.slice_info]

    def extra_repr(self) -> str:
        return f"slice_info={self.slice_info}"
