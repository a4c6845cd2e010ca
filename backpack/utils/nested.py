"""What a module is given, or returns: tensors, or several in a structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution


def tensors_in(output: Any, inside: tuple = ()) -> list[Tensor]:
    """Return the tensors in the output of a module.

    Args:
        output: A tensor, or tensors nested in tuples, lists, mappings, instances of data classes and probability distributions.
        inside: What it is a part of: a part that refers to one of these is left out.

    Returns:
        The tensors in order.
    """
    if isinstance(output, Tensor):
        return [output]
    parts = _fields(output)
    if not isinstance(parts, list | tuple) or any(output is outer for outer in inside):
        return []
    return [tensor for part in parts for tensor in tensors_in(part, (*inside, output))]


def lists_in(given: Any, inside: tuple = ()) -> list[Sequence]:
    """Return a list, or those in a mapping or a data class, that a module was called with.

    Args:
        given: An argument.
        inside: What it is a part of: a part that refers to one of these is left out.

    Returns:
        Lists and tuples, not those inside of one.
    """
    if isinstance(given, list | tuple):
        return [given]
    fields = _fields(given)
    if not isinstance(fields, list) or any(given is outer for outer in inside):
        return []
    return [found for value in fields for found in lists_in(value, (*inside, given))]


def opened(argument: Any) -> Any:
    """Return the attributes of an object that may be a mini-batch.

    Args:
        argument: What a module was called with.

    Returns:
        Its attributes, if it is no module, and nothing that :func:`tensors_in` looks into; the argument itself otherwise.
    """
    known = isinstance(argument, Tensor | nn.Module | list | tuple) or _fields(argument) is not argument
    return argument if known else getattr(argument, "__dict__", argument)


def _fields(value: Any) -> Any:
    # the values in a mapping, an instance of a data class or a distribution, in a list; anything else as it is
    if isinstance(value, Mapping):
        return list(value.values())
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [getattr(value, name, None) for name in value.__dataclass_fields__]  # a field need not be set yet
    return list(vars(value).values()) if isinstance(value, Distribution) else value


def call_with(function: Callable, first: tuple, given: Any) -> Any:
    """Call a model or a loss.

    Args:
        function: The model or the loss.
        first: Its first arguments.
        given: Further arguments: several in a tuple, named ones in a dictionary.

    Returns:
        What it returns.
    """
    if isinstance(given, Mapping):
        return function(*first, **given)
    return function(*first, *given) if isinstance(given, tuple) else function(*first, given)
