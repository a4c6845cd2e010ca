"""Settings that all tests share: one thread, fixed seeds."""

from random import seed

import numpy
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # tests run side by side in several processes
settings.register_profile("backpack", derandomize=True, deadline=None)
settings.load_profile("backpack")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start each test from the same random state."""
    seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
