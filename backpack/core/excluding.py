"""What extensions leave out: parameters, modules, and names of either."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module, Parameter

from backpack.core.owners import owners
from backpack.utils.errors import ArgumentError, exclusion

Excluded = Parameter | Module | str
"""What an extension can leave out."""


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
