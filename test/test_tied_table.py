"""A table of words that is the output layer, too: statistics of its gradients need no gradient of each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_extensions import QUANTITIES
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from backpack import backpack, extend

WORDS, WIDTH, LENGTH, N = 3000, 64, 4, 3  # more than a block of samples holds


class Largest(TorchDispatchMode):
    """Notes how many entries the largest tensor has that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.Tensor):
                self.entries = max(self.entries, part.untyped_storage().nbytes() // part.element_size())
        return result


class Writer(nn.Module):
    """Predicts each next word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(x)).tanh()).transpose(1, 2)


@pytest.mark.parametrize("quantity", ["BatchL2Grad", "SumGradSquared", "Variance"])
def test_no_gradient_of_each_sample(quantity: str) -> None:
    torch.manual_seed(0)
    model, x = extend(Writer()), torch.randint(WORDS, (N, LENGTH))
    loss = extend(nn.CrossEntropyLoss())(model(x), x)
    with backpack(QUANTITIES[quantity].make()), Largest() as largest:
        loss.backward()
    assert WORDS * WIDTH <= largest.entries < N * WORDS * WIDTH
    gradients = []
    for n in range(N):
        model.zero_grad()
        (nn.functional.cross_entropy(model(x[n : n + 1]), x[n : n + 1]) / N).backward()
        gradients.append(model.table.weight.grad.double())
    each = torch.stack(gradients)
    expected = {"BatchL2Grad": each.square().sum((1, 2)), "SumGradSquared": each.square().sum(0), "Variance": each.var(0, correction=0)}[quantity]
    actual = getattr(model.table.weight, QUANTITIES[quantity].field)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-6 * float(each.square().max()))
