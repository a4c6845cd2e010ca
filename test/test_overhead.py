"""What a pass costs in Python: function calls a layer, which a busy machine does not change, beyond those of the plain gradient."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType

import pytest
from torch import rand, tensor
from torch.nn import CrossEntropyLoss, Linear, ReLU, Sequential

from backpack import backpack, extend
from backpack.core.owners import owners
from backpack.extensions import BatchL2Grad, DiagGGNMC, SumGradSquared, Variance, hook_queue

X, Y = rand(4, 8), tensor([0, 1, 2, 3])


def python_calls(function: Callable[[], None]) -> int:
    """Count the calls of Python functions.

    Args:
        function: What is run, once before to warm up.

    Returns:
        Their number.
    """
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    function()
    before = sys.getprofile()
    gc.collect()  # and not in between, where finalizers would be counted
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def calls_a_pair(*extensions: type, extended: bool = True) -> float:
    """Count the calls for a linear layer and its activation.

    Args:
        *extensions: Classes of extensions; none for no context.
        extended: Whether the network is extended.

    Returns:
        What a pair adds to the calls of a step.
    """
    counts = []
    for pairs in (4, 12):
        layers, loss = [part for _ in range(pairs) for part in (Linear(8, 8), ReLU())], CrossEntropyLoss()
        model = Sequential(*layers)
        if extended:
            model, loss = extend(model), extend(loss)

        def step(model: Sequential = model, loss: CrossEntropyLoss = loss) -> None:
            with backpack(*(cls() for cls in extensions)) if extensions else nullcontext():
                loss(model(X), Y).backward()

        counts.append(python_calls(step))
    return (counts[1] - counts[0]) / 8


def test_hooks_of_many_modules() -> None:
    """What waits is found by what happens, not by asking everything that waits: four times the modules are four times the work."""
    counts = []
    for pairs in (10, 40):
        model, visited = extend(Sequential(*[part for _ in range(pairs) for part in (Linear(8, 8), ReLU())])), []
        events = 0

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal events
            events += frame.f_code.co_filename == hook_queue.__file__

        with backpack(BatchL2Grad(), extension_hook=visited.append):
            loss = model(X).sum()
            sys.setprofile(profile)
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
        assert sorted(map(id, visited)) == sorted(map(id, model))
        counts.append(events)
    assert counts[1] < 5 * counts[0]


@pytest.mark.parametrize(
    ("extensions", "most"),
    [((), 73), ((BatchL2Grad,), 267), ((SumGradSquared,), 270), ((Variance,), 283), ((DiagGGNMC,), 364)],
    ids=lambda value: "-".join(cls.__name__ for cls in value) or "recording" if isinstance(value, tuple) else "",
)
def test_python_calls_a_layer(extensions: tuple[type, ...], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bound is a seventh above what was counted when it was written: nobody makes a pass slower without noticing."""
    monkeypatch.setattr(owners, "_carriers", {})  # where other models live that carry results, as after other tests, a pass looks at its own anew
    extra = calls_a_pair(*extensions) - calls_a_pair(extended=False)
    assert 0 < extra <= most
