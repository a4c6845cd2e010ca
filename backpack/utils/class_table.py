"""What is known of classes, as long as they live: parametrized modules have a class each, which holds its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

Value = TypeVar("Value")


class ClassTable(dict["ref[type]", Value], Generic[Value]):
    """A table by weak references to classes, ``table[ref(cls)]``, filled where something is asked for that is not there."""

    def __init__(self, compute: Callable[[type], Value]) -> None:
        """Begin with nothing.

        Args:
            compute: Says what is known of a class, without holding it.
        """
        super().__init__()
        self._compute = compute

    def __missing__(self, key: ref[type]) -> Value:
        return self.put(key(), self._compute(key()))

    def put(self, cls: type, value: Value) -> Value:
        """Take note of something.

        Args:
            cls: The class.
            value: What is known of it.

        Returns:
            The same.
        """
        self[ref(cls, self._forget)] = value
        return value

    def _forget(self, key: ref[type]) -> None:
        self.pop(key, None)
