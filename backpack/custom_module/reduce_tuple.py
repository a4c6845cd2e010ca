"""Selection from a tuple as a module."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module


class ReduceTuple(Module):
    """Pick one entry of a tuple, such as the output of a recurrent layer."""

    def __init__(self, index: int = 0) -> None:
        """Store the index.

        Args:
            index: Position of the entry.
        """
        super().__init__()
        self.index = index

    def forward(self, input: tuple[Tensor | tuple[Tensor, ...], ...]) -> Tensor | tuple[Tensor, ...]:
        """Pick the entry.

        Args:
            input: The tuple.

        Returns:
            Its entry at ``index``.
        """
        return input[self.index]

    def extra_repr(self) -> str:
        return f"index={self.index}"
