"""Random numbers that are drawn in between, and given back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept(devices: Iterable[int | torch.device]) -> Iterator[Callable[[], bool]]:
    """Leave the global random generators of torch, Python and numpy as they are.

    Args:
        devices: Devices beside the CPU whose generators are meant, too.

    Yields:
        A function that says whether one of them has been used so far.
    """
    numpy, devices = sys.modules.get("numpy"), list(devices)  # what is not imported has drawn nothing
    python, legacy = random.getstate(), None if numpy is None else numpy.random.get_state()
    tensors = _of_torch(devices)

    def drawn() -> bool:
        same = random.getstate() == python and all(map(torch.equal, _of_torch(devices), tensors))
        return not same or numpy is not None and not all(map(numpy.array_equal, numpy.random.get_state(), legacy))

    try:
        with torch.random.fork_rng(devices):
            yield drawn
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(legacy)


def _of_torch(devices: Iterable[int | torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
