"""A table of words that is the output layer, too: statistics of its gradients need no gradient of each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES
from oracle import Oracle
from test_extensions import QUANTITIES, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backpack import backpack, extend
from backpack.extensions import BatchDiagGGNMC, BatchGrad, DiagGGNMC, SqrtGGNMC, SumGradSquared

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

    def __init__(self, words: int = WORDS, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(words, WIDTH, padding), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(x)).tanh()).transpose(1, 2)


def draw(model: Writer, x: torch.Tensor, samples: int) -> torch.Tensor:
    """Draw labels ``[samples, N, LENGTH]`` as the extensions do."""
    with torch.no_grad():
        return torch.distributions.Categorical(probs=model(x).softmax(1).movedim(1, -1)).sample(torch.Size([samples]))


def columns_of(model: Writer, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Gradients of the sum over positions of a sample's loss, ``[samples, N, *table]``, in the scale of the square root."""
    columns = []
    for drawn in labels:
        for n in range(len(x)):
            loss = nn.functional.cross_entropy(model(x[n : n + 1]), drawn[n : n + 1], reduction="sum")
            columns.append(torch.autograd.grad(loss, model.table.weight)[0] / (x.numel() * len(labels)) ** 0.5)
    return torch.stack(columns).unflatten(0, labels.shape[:2])


@pytest.mark.parametrize(("samples", "memory"), [(1, None), (3, None), (3, 1)], ids=["one column", "three columns", "three blocks of one"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("padding", [None, 2])
def test_sampled_labels(padding: int | None, batch: int, samples: int, memory: int | None) -> None:
    """What is carried to the lookups stands beside what is carried to the output layer, before anything is squared."""
    torch.manual_seed(0)
    model = extend(Writer(7, padding).double())
    x = torch.randint(7, (batch, LENGTH))  # words are looked up repeatedly
    loss = extend(nn.CrossEntropyLoss())(model(x), x)
    torch.manual_seed(1)
    expected = columns_of(model, x, draw(model, x, samples))
    torch.manual_seed(1)
    with backpack(DiagGGNMC(samples), BatchDiagGGNMC(samples), SqrtGGNMC(samples), memory=memory):
        loss.backward()
    table = model.table.weight
    torch.testing.assert_close(table.sqrt_ggn_mc, expected)
    torch.testing.assert_close(table.diag_ggn_mc_batch, expected.square().sum(0))
    torch.testing.assert_close(table.diag_ggn_mc, expected.square().sum((0, 1)))


def test_no_column_of_each_sample() -> None:
    torch.manual_seed(0)
    model, x = extend(Writer()), torch.randint(WORDS, (N, LENGTH))
    loss = extend(nn.CrossEntropyLoss())(model(x), x)
    torch.manual_seed(1)
    expected = columns_of(model, x, draw(model, x, 1)).double().square().sum((0, 1))
    torch.manual_seed(1)
    with backpack(DiagGGNMC()), Largest() as largest:
        loss.backward()
    assert WORDS * WIDTH <= largest.entries < N * WORDS * WIDTH
    torch.testing.assert_close(model.table.weight.diag_ggn_mc.double(), expected, rtol=1e-4, atol=1e-6 * float(expected.max()))


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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("tied table,")])
def test_one_column_of_a_table(case: str, batch: int) -> None:
    """Lookups and layer are united where they have the same column: not those of different losses."""
    problem, oracle = CASES[case].build(batch), Oracle(CASES[case].build(batch))
    run(problem, DiagGGNMC(), BatchDiagGGNMC())
    expected = [oracle.diag_ggn_batch(hessian)["table.weight"] for hessian in oracle.sampled_hessians(1)]
    for found in (problem.model.table.weight.diag_ggn_mc_batch, problem.model.table.weight.diag_ggn_mc):
        errors = [(found - (truth if found.dim() == truth.dim() else truth.sum(0))).abs().max() / truth.max() for truth in expected]
        assert min(errors) < 1e-9, "for no order of draws"


class Cancelling(nn.Module):
    """What lookups add to the gradient is almost what the layer takes away."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3)

    def forward(self, words: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        scores = h @ self.table.weight.T
        rows = (self.table(words) * -0.9999 * h).sum(1, keepdim=True)
        return scores.gather(1, words[:, None]) + rows


@pytest.mark.parametrize("extension", ["BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNMC"])
def test_lookups_and_layer_that_cancel(extension: str) -> None:
    """Squares of differences are no differences of squares in single precision."""
    torch.manual_seed(0)
    model, words, h = extend(Cancelling()), torch.tensor([1, 4]), torch.randn(2, 3)
    loss = extend(nn.MSELoss())(model(words, h), torch.randn(2, 1))
    torch.manual_seed(1)
    with backpack(BatchGrad(), SqrtGGNMC(), QUANTITIES[extension].make() if extension != "DiagGGNMC" else DiagGGNMC()):
        loss.backward()
    table = model.table.weight
    each = (table.sqrt_ggn_mc[0] if extension == "DiagGGNMC" else table.grad_batch).double()
    expected = {"BatchL2Grad": each.square().sum((1, 2)), "Variance": each.var(0, correction=0)}.get(extension, each.square().sum(0))
    torch.testing.assert_close(getattr(table, QUANTITIES[extension].field).double(), expected, rtol=1e-3, atol=0)


def test_lookups_that_cancel_the_layer() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.layer.weight = self.table.weight

        def forward(self, indices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.table(indices)

    model, x = extend(Tied()), torch.randn(3, 4)
    with backpack(SumGradSquared()):
        scores, rows = model(torch.arange(3), x)
        (scores.diagonal() - (rows * x).sum(1) * (1 - 2**-16)).sum().backward()
    expected = torch.zeros(6, 4)
    expected[:3] = (x * 2**-16) ** 2
    torch.testing.assert_close(model.table.weight.sum_grad_squared, expected, rtol=0.02, atol=1e-14)
