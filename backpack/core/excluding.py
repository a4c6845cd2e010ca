"""What extensions leave out: parameters, modules, and names of either."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from copy import copy, deepcopy
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from torch.nn import Module, Parameter

from backpack.core.owners import owners
from backpack.utils.errors import ArgumentError, exclusion

Excluded = Parameter | Module | str
"""What an extension can leave out."""
_Self = TypeVar("_Self", bound="Excluding")


def as_excluded(exclude: Iterable[Excluded], name: str) -> tuple[Excluded, ...]:
    """Check what is excluded.

    Args:
        exclude: Parameters, modules and names.
        name: Of the extension.

    Returns:
        The same.

    Raises:
        ArgumentError: If it is something else, or a single one of them.
    """
    entries = (None,) if isinstance(exclude, Excluded) or not isinstance(exclude, Iterable) else tuple(exclude)
    if not all(isinstance(entry, Excluded) for entry in entries):
        raise ArgumentError(f"{name}: exclude must be a list of parameters, modules and names, got {exclude!r}. Write exclude=[model.head].")
    return entries


def find_excluded(entries: Iterable[Excluded], name: str) -> frozenset[int]:
    """Find the parameters that are left out.

    Args:
        entries: Parameters, modules and names.
        name: Of the extension.

    Returns:
        Their ids.

    Raises:
        ArgumentError: If a name is that of no parameter or module.
    """
    found: set[int] = set()
    for entry in entries:
        if isinstance(entry, str):
            named = owners.named(entry)
            if not named:
                meant = f" Did you mean {exclusion(*similar)}?" if (similar := owners.like(entry)) else ""
                raise ArgumentError(f"{name}: exclude={entry!r} names no parameter of an extended module, and no module with one.{meant}")
            found |= named
        else:
            found.update(map(id, entry.parameters() if isinstance(entry, Module) else (entry,)))
    return frozenset(found)


class Excluding:
    """Something that leaves out parameters, and so do its copies: the same ones, and the copies of them that are made along with it."""

    _exclude: tuple[Excluded, ...] = ()
    _copies: WeakValueDictionary[int, Module | Parameter] | None = None  # weak: they are another model's, or nobody's

    def excluded(self) -> frozenset[int]:
        """Find the parameters that are left out.

        Returns:
            Their ids.

        Raises:
            ArgumentError: If a name is that of no parameter or module.
        """
        return find_excluded(self._entries(), type(self).__name__) if self._exclude else frozenset()

    def refuse_elsewhere(self, model: Callable[[], Container[int]]) -> None:
        """Refuse names that another model has, where those of the model at hand end so: they would leave out nothing.

        Args:
            model: Returns the ids of the parameters of the model at hand.

        Raises:
            ArgumentError: If there is one.
        """
        names = [entry for entry in self._exclude if isinstance(entry, str)]
        parameters = model() if names else ()
        for entry in names:
            if owners.named(entry).isdisjoint(parameters) and owners.ending(entry, parameters):
                raise ArgumentError(
                    f"{type(self).__name__}: exclude={entry!r} names parameters of another extended model, and none of this one. "
                    f"Did you mean {exclusion('*.' + entry)}? Give the parameters themselves if you mean those of the other one."
                )

    def leaving_out(self: _Self, parameters: Iterable[Parameter]) -> _Self:
        """Make a copy that leaves out more.

        Args:
            parameters: What the copy leaves out, too.

        Returns:
            The copy.
        """
        other = copy(self)
        other._exclude = (*other._exclude, *parameters)
        return other

    def _entries(self) -> tuple[Excluded, ...]:
        return self._exclude if self._copies is None else (*self._exclude, *self._copies.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_exclude": self._entries(), "_copies": None}

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        other = memo[id(self)] = copy(self)
        vars(other).update(deepcopy({name: value for name, value in vars(self).items() if name not in ("_exclude", "_copies")}, memo))
        entries = [entry for entry in self._entries() if not isinstance(entry, str)]
        entries += [parameter for entry in entries if isinstance(entry, Module) for parameter in entry.parameters()]
        other._exclude = self._exclude
        other._copies = WeakValueDictionary({id(entry): entry for entry in (*deepcopy(entries, memo), *(self._copies or {}).values())})
        return other
