"""What a module has under a name that records of its executions use themselves: rules of users read the module's own.

A record reads like the module, but has attributes of its own, ``order`` and ``inputs`` among them, which a user's class may have, too, for something
else. The rule of such a class is given a record in which the module's come first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.records import number_of
from backpack.utils.class_table import ClassTable

_RESERVED = frozenset({"as_called", "keywords", "own"})
"""Of a record, for the library's derivatives, from which users derive theirs."""


class OwnFirst:
    """A record of an execution that reads some names off the module, as it was when it was called."""

    __slots__ = ("__names", "__record")

    def __init__(self, record: Any, names: frozenset[str]) -> None:
        """Hide what the record has under some names.

        Args:
            record: The record; its method ``own`` returns what the module had under a name.
            names: The names.
        """
        self.__record, self.__names = record, names

    def __getattr__(self, name: str) -> Any:
        return self.__record.own(name) if name in self.__names else getattr(self.__record, name)

    def __repr__(self) -> str:
        return repr(self.__record)


def reading_own(rule: BaseDerivatives, names: frozenset[str]) -> BaseDerivatives:
    """Let a rule read some names off the module, whatever records use them for.

    Args:
        rule: The rule.
        names: The names; none if there is nothing to hide.

    Returns:
        A rule with the same attributes, of a class derived from that of the rule; the rule itself if there are no names.
    """
    if not names:
        return rule
    other = object.__new__(_reading_own(type(rule), names))
    other.__dict__ = rule.__dict__
    return other


@cache
def _reading_own(cls: type[BaseDerivatives], names: frozenset[str]) -> type[BaseDerivatives]:
    def read(self: BaseDerivatives, name: str) -> Any:
        value = super(derived, self).__getattribute__(name)
        return partial(_call, value, names) if callable(value) and not isinstance(value, type) else value

    own = {name: vars(cls)[name] for name in ("keeps", "needs") if name in vars(cls)}  # what the class says itself
    derived = type(cls.__name__, (cls,), own | {"__getattribute__": read, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
    return derived


def _call(function: Callable[..., Any], names: frozenset[str], *args: Any, **kwargs: Any) -> Any:
    def given(value: Any) -> Any:
        is_record = not isinstance(value, (Tensor, Module, OwnFirst)) and hasattr(value, "own")
        return OwnFirst(value, names) if is_record else value

    return function(*map(given, args), **{name: given(value) for name, value in kwargs.items()})


def hidden(module: Module, record: Any) -> frozenset[str]:
    """Find the names that a record of an execution uses itself, and the module for something else.

    Args:
        module: The module.
        record: The record, with all its attributes.

    Returns:
        The names.
    """
    names = _NAMES[ref(type(module))].union(vars(module), module._parameters, module._buffers, module._modules)
    used = {name for name in names - _RESERVED if name in vars(record) or hasattr(type(record), name)}
    return frozenset(name for name in used if number_of(name) is None)  # recorded tensors are what these names are for


def _names_of(cls: type[Module]) -> frozenset[str]:
    return frozenset(name for base in cls.__mro__ if base not in Module.__mro__ for name in vars(base) if not name.startswith("__"))


_NAMES = ClassTable(_names_of)
