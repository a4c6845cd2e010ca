"""Options: the plain attributes of a module (numbers, names, sizes, its mode) as they were when it was called, for rules that run later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from math import prod
from numbers import Number
from operator import itemgetter
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from backpack.utils.differentiation import version_of

_TORCH = frozenset(vars(Module())) - {"training"}
"""Attributes that every module has for torch's own purposes."""
_KINDS = (int, float, str, type(None), torch.dtype, torch.device, slice, EllipsisType, Enum, Number)
_SEQUENCES = (tuple, list, torch.Size)
_LONGEST = 1024
"""Number of entries from which on a container is data rather than an option: it would be compared in every forward pass."""
_LARGEST = 2**16
"""Number of entries up to which arrays and tensors in containers are copied, as they can be changed in place."""


def _is_plain(value: Any) -> bool:
    entries, left = [value], _LONGEST
    for entry in entries:  # those of containers come behind
        # a class of tuples of somebody else's need not have a length, nor be equal to itself
        if type(entry) is dict:
            more = [*entry, *entry.values()]
        elif type(entry) in _SEQUENCES or (isinstance(entry, tuple) and hasattr(entry, "_fields")):
            more = entry
        elif isinstance(entry, _KINDS) or type(entry) is np.ndarray or (entry is not value and _is_constant(entry)):
            continue
        else:
            return False
        left -= len(more) + 1
        if left < 0:
            return False
        entries += more
    return True


def _is_constant(value: Any) -> bool:
    # indices, say: told from others by identity, as comparing tensors, and arrays, fails
    return type(value) is Tensor and not value.requires_grad


def _fixed(value: Any, replaced: Mapping[int, Any]) -> Any:
    # containers with other entries for some, by their identity
    if type(value) is dict:
        return {name: _fixed(entry, replaced) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_fixed(entry, replaced) for entry in value])
    return replaced.get(id(value), value)


def _arrays_in(value: Any) -> Iterator[Tensor | np.ndarray]:
    # what may be changed in place, and is not too large to be copied
    if type(value) in (dict, list, tuple):
        for entry in value.values() if type(value) is dict else value:
            yield from _arrays_in(entry)
    elif isinstance(value, (Tensor, np.ndarray)) and not getattr(value, "is_nested", False) and prod(value.shape) <= _LARGEST:
        yield value


def _state(array: Tensor | np.ndarray) -> Any:
    return version_of(array) if isinstance(array, Tensor) else array.tobytes()


class Options(dict[str, Any]):
    """Name to value. All calls of a module between which nothing changes share them; they hold nothing to which a graph could hang.

    Attributes:
        tensors: Names of attributes that are tensors, and neither parameters nor buffers.
    """

    __slots__ = ("_get", "_size", "_states", "_values", "tensors")

    def __init__(self, module: Module) -> None:
        attributes = vars(module)
        super().__init__({name: _fixed(value, {}) for name, value in attributes.items() if name not in _TORCH and _is_plain(value)})
        self._get, self._size = itemgetter(*self), len(attributes)
        self._values = self._get(self)
        self._states = [(array, _state(array)) for value in self.values() for array in _arrays_in(value)]
        if self._states:
            copies = {id(array): array.clone() if isinstance(array, Tensor) else array.copy() for array, _ in self._states}
            self.update({name: _fixed(value, copies) for name, value in self.items()})
        self.tensors = [name for name, value in attributes.items() if isinstance(value, Tensor)]

    def hold(self, module: Module) -> bool:
        """Say whether a module has these options now: once a call, in every forward pass.

        Args:
            module: The module.

        Returns:
            Whether it has them, and no other attributes than then.
        """
        attributes = module.__dict__
        try:
            same = len(attributes) == self._size and self._get(attributes) == self._values
            same = same and (not self._states or all([_state(array) == state for array, state in self._states]))
            return same and (not self.tensors or all(isinstance(attributes[name], Tensor) for name in self.tensors))
        except (KeyError, RuntimeError, ValueError):  # deleted; or an array by now, which is neither equal nor not
            return False

    def constants(self, module: Module) -> Mapping[str, Tensor | None]:
        """Return the tensors of a module that are not parameters.

        Args:
            module: The module, with these options.

        Returns:
            Name to buffer, and to attribute, unless that depends on something: it is what a hook has stored, rather than a part of the module.
        """
        if not self.tensors:
            return module._buffers
        attributes = {name: module.__dict__.get(name) for name in self.tensors}
        return module._buffers | {name: t for name, t in attributes.items() if isinstance(t, Tensor) and not t.requires_grad}

    def restored(self, module: Module, constants: Mapping[str, Tensor | None]) -> Module:
        """Return a module that computes what another one did when it had these options.

        Args:
            module: The module.
            constants: Its tensors then that are not parameters; none for those it has now.

        Returns:
            A module with the same parameters, children and hooks, of which nobody else knows.
        """
        now, twin = Options(module), object.__new__(type(module))
        # what has been set since hides no default of the class
        others = {name: value for name, value in vars(module).items() if name not in now or not hasattr(type(module), name)}
        twin.__dict__ |= others | self
        if constants:
            twin.__dict__ |= {name: constants[name] for name in self.tensors if name in constants}
            twin.__dict__["_buffers"] = {name: tensor for name, tensor in constants.items() if name not in self.tensors}
        return twin
