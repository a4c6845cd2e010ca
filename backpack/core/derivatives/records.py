"""What derivatives are given: a module that carries the tensors of its last execution, or the record of an execution, which reads like it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from itertools import count, takewhile
from typing import Any
from weakref import ref

from torch import Size
from torch.nn import Module

from backpack.utils.class_table import ClassTable
from backpack.utils.errors import NotRecordedError

_ABSENT = object()
_ARGUMENTS: ClassTable[dict[tuple[int, tuple[str, ...]], dict[str, Any]]] = ClassTable(lambda _: {})


def module_of(record: Any) -> Module:
    """Return the module itself.

    Args:
        record: The module, or the record of one execution.

    Returns:
        The module without recorded tensors, with the options it had then.
    """
    if isinstance(record, Module):
        return record
    as_called = getattr(record, "as_called", None)
    return record.module if as_called is None else as_called


@cache
def number_of(name: str) -> int | None:
    """Say which tensor of a record a name stands for.

    Args:
        name: The name.

    Returns:
        ``i`` for ``input{i}``, -1 for ``output``; ``None`` for all other names.
    """
    return -1 if name == "output" else int(name[5:]) if name.startswith("input") and name[5:].isdigit() else None


def named_arguments(cls: type[Module], count: int, given: tuple[str, ...]) -> dict[str, Any]:
    """List the arguments behind the positional ones, in the order of the forward method's signature.

    Args:
        cls: Class of the module.
        count: Number of positional arguments.
        given: Names of keyword arguments.

    Returns:
        Name to default value, from the first to the last of those that were given; and those of which the signature does not know.
    """
    known = _ARGUMENTS[ref(cls)]
    if (count, given) not in known:
        known[count, given] = _named_arguments(cls, count, given)
    return known[count, given]


def _named_arguments(cls: type[Module], count: int, given: tuple[str, ...]) -> dict[str, Any]:
    arguments = list(signature(cls.forward).parameters.values())[1:]
    by_place = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    behind = [*by_place[count:], *(a for a in arguments if a.kind is a.KEYWORD_ONLY)]
    last = max((i for i, a in enumerate(behind) if a.name in given), default=-1)
    return {a.name: a.default for a in behind[: last + 1]} | {name: None for name in given if name not in {a.name for a in behind}}


def call_arguments(record: Any, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Name arguments as those of the recorded execution were, to run the module again.

    Args:
        record: The module, or the record of one execution.
        inputs: All arguments, in the order of the recorded ones.

    Returns:
        Positional arguments, and keyword arguments.
    """
    names = () if isinstance(record, Module) else getattr(record, "keywords", ())
    first = len(inputs) - len(names)
    return tuple(inputs[:first]), dict(zip(names, inputs[first:], strict=True))


def inputs_of(record: Any, first: int = 0) -> list[Any]:
    """Return the recorded arguments of an execution.

    Args:
        record: The module with its recorded inputs, or the record of one execution.
        first: Number of the argument to begin with.

    Returns:
        Tensors, and other arguments as they were given.
    """
    return list(takewhile(lambda value: value is not _ABSENT, (getattr(record, f"input{i}", _ABSENT) for i in count(first))))


def shapes_of(record: Any) -> tuple[Size, Size]:
    """Return the shapes of the first input and of the output.

    Args:
        record: The module with its recorded tensors, or the record of one execution.

    Returns:
        Both shapes.

    Raises:
        NotRecordedError: If the module carries no tensors.
    """
    try:
        return record.input0.shape, record.output.shape
    except AttributeError as error:
        raise NotRecordedError(
            f"{record} carries no input0 and output. Extend it before its forward pass, and keep what that returns. A layer that returns its input "
            "as it is (Flatten of [N, D], Dropout in evaluation mode) is not recorded: its products are those of the identity."
        ) from error
