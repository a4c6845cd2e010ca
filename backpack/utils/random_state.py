"""Random numbers that are drawn in between, and given back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def random_state_kept(tensors: Iterable[Tensor]) -> Iterator[Callable[[], bool]]:
    """Leave the global random generators of torch, Python and numpy as they are.

    Args:
        tensors: Lie on the devices whose generators are meant, beside that of the CPU.

    Yields:
        A function that says whether one of them has been used so far. Then what has run is not sure to be what has run before, even if it gives the
        same output: the derivative of a sample that is rounded need not be the same.
    """
    numpy, devices = sys.modules.get("numpy"), list({tensor.device for tensor in tensors if tensor.is_cuda})  # what is not imported has drawn nothing
    python, legacy = random.getstate(), None if numpy is None else numpy.random.get_state()
    states = _of_torch(devices)

    def drawn() -> bool:
        same = random.getstate() == python and all(map(torch.equal, _of_torch(devices), states))
        return not same or numpy is not None and not all(map(numpy.array_equal, numpy.random.get_state(), legacy))

    try:
        with torch.random.fork_rng(devices):
            yield drawn
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(legacy)


def _of_torch(devices: Iterable[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
