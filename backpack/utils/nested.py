"""What a module is given, or returns: tensors, or several in a structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributions import Distribution


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a module.

    Args:
        output: A tensor, or tensors nested in tuples, lists, mappings, instances of data classes and probability distributions.

    Returns:
        The tensors in order.
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif hasattr(output, "__dataclass_fields__") and not isinstance(output, type):
        output = [getattr(output, name, None) for name in output.__dataclass_fields__]  # a field need not be set yet
    elif isinstance(output, Distribution):
        output = list(vars(output).values())
    return [tensor for part in output for tensor in tensors_in(part)] if isinstance(output, (tuple, list)) else []


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
