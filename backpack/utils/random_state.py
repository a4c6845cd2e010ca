"""Random numbers that are drawn in between, and given back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept(devices: Iterable[int | torch.device]) -> Iterator[None]:
    """Leave the global random generators of torch, Python and numpy as they are.

    Args:
        devices: Devices beside the CPU whose generators are meant, too.

    Yields:
        Nothing.
    """
    numpy = sys.modules.get("numpy")  # what is not imported has drawn nothing
    python, legacy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(legacy)
