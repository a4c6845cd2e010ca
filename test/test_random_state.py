"""What looks at a model leaves the random generators as they are."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack import explain, verify
from backpack.extensions import BatchGrad


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
