"""What looks at a model leaves the random generators as they are."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, explain, extend, verify
from backpack.extensions import HMP, BatchGrad, DiagGGNExact
from backpack.utils.errors import UnsupportedError


class Drawing(nn.Linear):
    """Draws from all global generators."""

    def forward(self, x: Tensor) -> Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        if len(x) == 1:
            raise RuntimeError("stop")
        return super().forward(x)


@pytest.mark.parametrize("look", [verify, explain])
@pytest.mark.parametrize("samples", [4, 1])
def test_random_generators_stay(look: Callable, samples: int) -> None:
    """Also after an exception."""
    model, before = Drawing(3, 2), (random.getstate(), np.random.get_state()[1:], torch.get_rng_state())
    try:
        look(model, nn.CrossEntropyLoss(), torch.ones(samples, 3), torch.zeros(samples, dtype=torch.long), [BatchGrad()])
    except (RuntimeError, ValueError) as error:
        assert samples == 1 and "stop" in str(error)
    assert random.getstate() == before[0]
    assert all(map(np.array_equal, np.random.get_state()[1:], before[1]))
    assert torch.equal(torch.get_rng_state(), before[2])


class Noting(nn.Module):
    """Notes down some of its calls only."""

    def forward(self, x: Tensor) -> Tensor:
        random.random(), np.random.rand()
        return x.sin()


class NotingLoss(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        random.random(), np.random.rand()
        return (x - target).pow(4).mean()


@pytest.mark.parametrize("in_loss", [True, False])
def test_modules_that_run_again_draw_nothing(in_loss: bool) -> None:
    """Losses of users, and modules without a rule, run once more in a backward pass: numbers of Python and numpy are as those of torch."""
    model = extend(nn.Linear(3, 2) if in_loss else nn.Sequential(nn.Linear(3, 2), Noting()))
    loss = extend(NotingLoss() if in_loss else nn.MSELoss())(model(torch.rand(4, 3)), torch.rand(4, 2))
    before = random.getstate(), np.random.get_state()[1:]
    if in_loss:
        with backpack(DiagGGNExact()):
            loss.backward()
    else:
        with backpack(HMP()), pytest.raises(UnsupportedError, match="draws random numbers"):
            loss.backward()
            model[0].weight.hmp(torch.rand(1, 2, 3))
    assert random.getstate() == before[0]
    assert all(map(np.array_equal, np.random.get_state()[1:], before[1]))
