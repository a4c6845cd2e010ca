"""Running a module of the user's once more, without a trace of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy


@contextmanager
def kept_state(module: Module) -> Iterator[None]:
    """Let a module, and all modules inside it, run on copies of their attributes and buffers, and put the attributes back afterwards.

    Tensors are copied, and so are lists, dictionaries, sets and deques, as deep as they lie in one another. Parameters are not, nor is anything
    else: what a forward pass stores in other objects, or outside of the module, stays there.

    Args:
        module: The module.

    Yields:
        Nothing.
    """
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    copies: dict[int, Any] = {}
    for now, then in before:
        now.update({name: _copied(value, copies) for name, value in then.items()})
    try:
        yield
    finally:
        for now, then in before:
            now.clear()
            now.update(then)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if id(value) not in copies:
        if isinstance(value, Tensor):
            copies[id(value)] = value if isinstance(value, Parameter) or is_lazy(value) else value.clone()
        elif isinstance(value, list | dict | set | deque):
            copies[id(value)] = new = copy(value)
            for key, part in () if isinstance(new, set) else [*(new.items() if isinstance(new, dict) else enumerate(new))]:
                new[key] = _copied(part, copies)
        else:
            return value
    return copies[id(value)]
