"""Who reads what is carried backward: readers are handed to the engine from above."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch.nn import Parameter

from backpack.core.calls import ModuleCall
from backpack.core.flow import Columns, Flow, Use
from backpack.core.made import MadeUse


class Reader(ABC):
    """Reads quantities off at parameters.

    Attributes:
        watches_calls: Whether ``after_call`` has something to do.
    """

    watches_calls: bool = False

    @abstractmethod
    def concerned(self, flow: Flow) -> int:
        """Say at which parameters a flow is read.

        Args:
            flow: The flow.

        Returns:
            Bit set of parameters.
        """

    @abstractmethod
    def at_call(self, flow: Flow, use: Use) -> None:
        """Take note of a use by a module call.

        Args:
            flow: The flow.
            use: The use.
        """

    @abstractmethod
    def at_layer(self, flow: Flow, use: Use) -> bool:
        """Read off a layer what a matrix at its output that couples no positions adds, without columns, if that is all that is made of it.

        Args:
            flow: The flow.
            use: The use by an affine layer, with the signed diagonal for its column ``{0: [1, N, *output]}``. Where the layer has no groups, it
                notes a function ``"moment"`` that returns the sum of the matrices of all positions ``[1, O, O]``.

        Returns:
            Whether it was done for all parameters there.
        """

    @abstractmethod
    def at_leaf(self, flow: Flow, parameter: Parameter, columns: Columns) -> None:
        """Take note of a use outside all rules.

        Args:
            flow: The flow.
            parameter: The parameter.
            columns: ``{source: [V, N, *parameter]}``.
        """

    def at_made(self, flow: Flow, made: MadeUse) -> bool:
        """Take note of uses in a factor of a product that is made of parameters, without forming what they contribute.

        Args:
            flow: The flow.
            made: The uses.

        Returns:
            Whether it was done for all of them.
        """
        return False

    @abstractmethod
    def finish(self, parameter: Parameter) -> None:
        """Write the quantities of a parameter whose last use has been noted.

        Args:
            parameter: The parameter.
        """

    @abstractmethod
    def after_call(self, call: ModuleCall) -> None:
        """Take note that everything at a call is done.

        Args:
            call: The call.
        """


class Blocks(ABC):
    """How the columns of a flow are carried, if not all at once."""

    @abstractmethod
    def cut(self, width: int) -> list[slice]:
        """Cut the columns of a source into blocks.

        Args:
            width: Number of columns.
        """

    @abstractmethod
    def reader(self) -> Reader:
        """Return what reads off a block."""
