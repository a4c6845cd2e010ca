"""Settings that all tests share: one thread, fixed seeds, and which of very many cases are slow."""

import gc
from collections import Counter
from collections.abc import Iterator
from random import seed
from zlib import crc32

import numpy
import pytest
import torch
from hypothesis import settings

from backpack.extensions import flows

torch.set_num_threads(1)  # tests run side by side in several processes
settings.register_profile("backpack", derandomize=True, deadline=None)
settings.load_profile("backpack")


MANY = 60
"""Number of cases of one test from which on three of four are slow."""
WHOLE = "test_extensions.py::test_against_oracle"
"""The test that has all of them nevertheless: every extension on every case."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave three of four of very many cases to the slow tests: always the same ones, whatever runs beside them."""
    tests = [item.nodeid.partition("[")[0] for item in items]
    count = Counter(tests)
    for item, test in zip(items, tests, strict=True):
        if count[test] >= MANY and not test.endswith(WHOLE) and crc32(item.nodeid.encode()) % 4:
            item.add_marker(pytest.mark.slow)


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
