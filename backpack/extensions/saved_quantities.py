"""What an extension of a user's carries, between the module that sends it and the one that receives it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from backpack.core.calls import KEY, ModuleCall
from backpack.core.operations import NAMES
from backpack.core.slots import Slot


class SavedQuantities:
    """Quantities, each under the key of what they belong to: in a pass, the call that made the tensor; by hand, the memory of the tensor.

    Attributes:
        losses: Key to the calls of losses from which the quantity comes, in a pass under ``backpack``.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.losses: dict[Hashable, frozenset] = {}
        self._saved_quantities: dict[Hashable, Any] = {}

    def save_quantity(self, key: Hashable, quantity: Any, accumulation_function: Callable[[Any, Any], Any]) -> None:
        """Save a quantity.

        Args:
            key: What it belongs to.
            quantity: The quantity.
            accumulation_function: Unites it with one that is there already: ``accumulation_function(existing, quantity)``.
        """
        if key in self._saved_quantities:
            quantity = accumulation_function(self._saved_quantities.pop(key), quantity)
        self._saved_quantities[key] = quantity

    def retrieve_quantity(self, key: Hashable, delete_old: bool) -> Any:
        """Return a quantity.

        Args:
            key: What it belongs to.
            delete_old: Keep it no longer.

        Returns:
            The quantity; ``None`` if there is none.
        """
        return self._saved_quantities.pop(key, None) if delete_old else self._saved_quantities.get(key)

    def clear(self) -> None:
        """Forget everything."""
        self._saved_quantities.clear()
        self.losses.clear()


def makers(slot: Slot) -> list[ModuleCall]:
    """List the calls that made the input of another one, which hands on to them what is carried.

    Each makes a tensor of its own, although many may be views with the same base. Operations that keep all entries in their order may lie in between,
    where the shape is the same again.

    Args:
        slot: The input.

    Returns:
        The calls: a container and the last one in it have made the same tensor, and so has a call that returned its input.
    """
    edge, makers = slot.edge, []
    while edge is not None and edge[0] is not None and not makers:
        makers = [mark for mark in edge[0].metadata.get(KEY, ()) if mark.nr == edge[1] and not mark.base]
        edge = None if NAMES[type(edge[0]).__name__] else edge[0].next_functions[0]
    return [mark.call for mark in makers if mark.call.outputs[mark.index].shape == slot.shape]
