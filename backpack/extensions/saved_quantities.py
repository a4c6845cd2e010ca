"""What an extension of a user's carries, between the module that sends it and the one that receives it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class SavedQuantities:
    """Quantities, each under the key of the tensor that they belong to."""

    def __init__(self) -> None:
        """Start empty."""
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
