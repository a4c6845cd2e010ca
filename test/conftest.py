"""Settings that all tests share: one thread, fixed seeds."""

import gc
from collections.abc import Iterator
from random import seed

import numpy
import pytest
import torch
from hypothesis import settings

from backpack.extensions import flows

torch.set_num_threads(1)  # tests run side by side in several processes
settings.register_profile("backpack", derandomize=True, deadline=None)
settings.load_profile("backpack")


def freeze() -> None:
    """Let the garbage collector pass over what is there."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Spare it the tests themselves, a million objects that stay."""
    freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start each test from the same random state."""
    seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each kind of device that is not there


@pytest.fixture(autouse=True)
def short_columns_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small nets carry what large ones do: a root with few columns, where any will do."""
    monkeypatch.setattr(flows, "LONG", 0)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """Let whatever forms a reference cycle stay; what was there before a test is not looked at, nor ever after, which would take seconds."""
    freeze()
    gc.disable()
    yield
    gc.enable()
