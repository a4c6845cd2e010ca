"""Matrices at the output of an affine layer that couple no positions: what they add at its parameters is known without columns."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from backpack.core.flow import Use
from backpack.extensions.backprop_extension import BackpropExtension


class OfLayers(BackpropExtension):
    """A quantity to which such a matrix adds something that needs no columns, as the Hessian of a loss does at the last layer."""

    @abstractmethod
    def takes_matrix(self, use: Use) -> bool:
        """Say whether ``of_matrix`` holds: not where a user reads the columns, or a subclass has made something else of its quantity.

        Args:
            use: The use, see ``of_matrix``.

        Returns:
            Whether it does.
        """

    @abstractmethod
    def of_matrix(self, use: Use, name: str) -> Any:
        """Say what a matrix adds at a parameter.

        Args:
            use: The use, with the matrix's diagonal for its column ``{0: [1, N, *output]}``. Where the layer has no groups, it notes a function
                ``"moment"`` that returns the sum of the blocks of all positions ``[1, O, O]``.
            name: Name of the parameter.

        Returns:
            The quantity if ``adds_up``, else the linear part.
        """
