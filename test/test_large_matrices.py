"""Matrices that grow with the square of a number of features: refused before they are formed, where they would fill the memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from math import prod

import pytest
import torch
from test_tied_table import Largest
from torch import nn
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend, results
from backpack.extensions import HBP, KFAC, KFLR, KFRA, BatchGrad, DiagGGNExact, DiagGGNMC, DiagHessian, chains, flows
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.hbp import BackpropStrategy, Curvature, ExpectationApproximation, LossHessianStrategy
from backpack.utils.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Sigmoid(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))


def run(model: nn.Module, x: torch.Tensor, *extensions: BackpropExtension) -> None:
    extend(model)
    with backpack(*extensions):
        extend(nn.CrossEntropyLoss())(model(x), torch.zeros(len(x), dtype=torch.int64)).backward()


def test_features_of_an_image() -> None:
    """A convolution on an image of 200 x 200 has 40,000 outputs: KFRA says so, and what it names can be left out; KFAC and KFLR do without."""
    x = torch.randn(2, 1, 200, 200)
    model = images()
    with pytest.raises(UnsupportedError, match=r"40,000 x 40,000 numbers, 6\.0 GiB, at .*KFAC.*0\.weight"):
        run(model, x, KFRA())
    assert results(model) == {}
    run(model, x, KFRA(exclude=["0"]))
    assert set(results(model)) == {"4.weight", "4.bias"}
    run(model, x, KFAC(), KFLR())
    assert set(results(model)) == {"0.weight", "0.bias", "4.weight", "4.bias"}


@pytest.mark.parametrize("limit", [36, 35])
def test_limit_of_averages(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Everything up to the limit is formed. The entries of an image in front of the first layer count nothing: no matrix is carried there."""
    monkeypatch.setattr(chains, "LARGEST", limit)
    model, x = nn.Sequential(nn.Conv1d(1, 1, 5), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 1, 10)
    if limit == 36:
        run(model, x, KFRA())
        assert len(results(model)) == 4
        return
    with pytest.raises(
        UnsupportedError, match=r'(?s)"0\.weight", "0\.bias", "3\.weight".*6 x 6 numbers, 0\.0 GiB, at 3 \(Linear\).*factor of 3\.weight'
    ):
        run(model, x, KFRA())
    run(model, x, KFRA(exclude=["0", "3.weight"]))


def test_matrices_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the Jacobian differs between samples and is no diagonal, there is a matrix for each of them on the way."""
    monkeypatch.setattr(chains, "LARGEST", 36)
    model = nn.Sequential(nn.Linear(4, 6), nn.Softmax(1), nn.Linear(6, 3))
    run(model, torch.randn(1, 4), KFRA())
    with pytest.raises(UnsupportedError, match=r"2 matrices of 6 x 6 numbers.*1 \(Softmax\)"):
        run(model, torch.randn(2, 4), KFRA())


FACTORS = {
    "inputs": (lambda: nn.Linear(40_000, 2, bias=False), (40_000,), "40,000 x 40,000 numbers, 6.0 GiB"),
    "outputs": (lambda: nn.Linear(2, 40_000), (2,), "40,000 x 40,000 numbers, 6.0 GiB"),
    "unfolded inputs": (lambda: nn.Conv2d(600, 1, 8, bias=False), (600, 8, 8), "38,400 x 38,400 numbers, 5.5 GiB"),
    "vector": (lambda: nn.LayerNorm(40_000), (40_000,), "40,000 x 40,000 numbers"),
}


def averages(strategy: str) -> Callable[..., HBP]:
    return partial(HBP, Curvature.GGN, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE, strategy)


MAKE = {
    "KFAC": KFAC,
    "KFLR": KFLR,
    "KFRA": KFRA,
    "HBP": averages(ExpectationApproximation.BOTEV_MARTENS),
    "HBP Chen": averages(ExpectationApproximation.CHEN),
}


@pytest.mark.parametrize("quantity", MAKE)
@pytest.mark.parametrize("name", FACTORS)
def test_large_factors_are_refused(name: str, quantity: str) -> None:
    make, shape, message = FACTORS[name]
    model, x = extend(nn.Sequential(make(), nn.Flatten())), torch.randn(2, *shape)
    if name == "vector" and quantity not in ("KFAC", "KFLR"):
        message += ", 6.0 GiB, at MSELoss"  # carried, before anything is formed of it
    with backpack(MAKE[quantity]()), pytest.raises(UnsupportedError, match=f"{message}.*exclude="):
        extend(nn.MSELoss())(out := model(x), torch.zeros_like(out)).backward()
    assert results(model) == {}


@pytest.mark.parametrize("quantity", MAKE)
def test_large_factor_is_left_out(monkeypatch: pytest.MonkeyPatch, quantity: str) -> None:
    """Of the first layer, the input factor is too large, and the rest is formed, with the same numbers as without the limit."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(5, 10)
    torch.manual_seed(1)
    run(model, x, MAKE[quantity]())
    expected = results(model)
    monkeypatch.setattr(chains, "LARGEST", 99)
    with pytest.raises(UnsupportedError, match=r'factor of 0\.weight \[4, 10\] would be a matrix of 10 x 10.*exclude=\["0\.weight"\]'):
        run(model, x, MAKE[quantity]())
    torch.manual_seed(1)
    run(model, x, MAKE[quantity](exclude=["0.weight"]))
    found = results(model)
    assert set(found) == {"0.bias", "2.weight", "2.bias"}
    for name, fields in found.items():
        for field, factors in fields.items():
            assert all(map(torch.equal, factors, expected[name][field]))


def test_factors_of_a_large_table_exist() -> None:
    """The input factor of a table is a diagonal, and takes as many numbers as there are words."""
    model, words = extend(nn.Sequential(nn.Embedding(50_257, 2), nn.Flatten(), nn.Linear(6, 2))), torch.randint(50_257, (2, 3))
    with backpack(KFAC()):
        extend(nn.MSELoss())(model(words), torch.zeros(2, 2)).backward()
    counts, outputs = model[0].weight.kfac
    assert torch.equal(counts, torch.bincount(words.flatten(), minlength=50_257) / 2)
    assert outputs.shape == (2, 2)


CLASSES = 500
SCORES: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "flattened": lambda z, y: (z.flatten(0, 1), y.flatten()),
    "turned": lambda z, y: (z.transpose(1, 2), y),
    "cut": lambda z, y: (z[:, :-1].reshape(-1, CLASSES), y[:, 1:].flatten()),
}
"""How a loss takes scores of the words at all positions."""


class Writer(nn.Module):
    """Returns its loss, or scores; the last layer is called, or not."""

    def __init__(self, way: str, calls: bool) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES, bias=False)
        self.way, self.calls = way, calls

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.table(x)).tanh()
        return self.head(h) if self.calls else nn.functional.linear(h, self.head.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.scores(x) if y is None else nn.functional.cross_entropy(*SCORES[self.way](self.scores(x), y))


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("way", SCORES)
def test_scores_of_many_words(way: str, calls: bool) -> None:
    """Where the samples lie is found out without anything larger than the scores, which fill the memory in a language model."""
    torch.manual_seed(0)
    model, x, y = Writer(way, calls), torch.randint(7, (5, 6)), torch.randint(CLASSES, (5, 6))
    returns_scores = extend(deepcopy(model))
    alone = [torch.autograd.grad(model(x[n : n + 1], y[n : n + 1]) / 5, tuple(model.parameters())) for n in range(5)]
    extend(model)
    with backpack(BatchGrad()), Largest() as largest:
        model(x, y).backward()
    assert largest.entries <= 5 * 6 * CLASSES
    for parameter, expected in zip(model.parameters(), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(expected), rtol=1e-4, atol=1e-7)
    for one, loss in ((model, model(x, y)), (returns_scores, extend(nn.CrossEntropyLoss())(*SCORES[way](returns_scores(x), y)))):
        torch.manual_seed(0)
        with backpack(DiagGGNMC()), Largest() as largest:
            loss.backward()
        assert largest.entries <= 5 * 6 * CLASSES, one
    for parameter, other in zip(model.parameters(), returns_scores.parameters(), strict=True):
        torch.testing.assert_close(parameter.diag_ggn_mc, other.diag_ggn_mc)


@pytest.mark.parametrize("shape", [(12, 200), (3, 200, 4)])
@pytest.mark.parametrize("extension", [DiagGGNExact, KFLR, DiagHessian])
@pytest.mark.parametrize("called", ["module", "function"])
def test_root_of_many_classes(shape: tuple[int, ...], extension: type[BackpropExtension], called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has as many numbers as samples times the square of classes, and no more of them are formed than columns may take."""
    monkeypatch.setattr(flows, "FORMED", 2**16)
    torch.manual_seed(0)
    layers = [nn.Linear(2, 3), nn.Linear(3, 200 * (shape[2] if len(shape) > 2 else 1)), nn.Unflatten(1, shape[1:])]
    model, x, y = extend(nn.Sequential(*layers).double()), torch.randn(shape[0], 2).double(), torch.randint(200, (shape[0], *shape[2:]))
    loss, found = extend(nn.CrossEntropyLoss()) if called == "module" else nn.functional.cross_entropy, []
    for memory in (1 << 30, 12 * 200 * 8 * 10):
        out = extension()
        with Largest() as largest, backpack(out, memory=memory):
            loss(model(x), y).backward()
        found.append([value for p in model.parameters() for value in tree_leaves(getattr(p, out.savefield))])
    assert largest.entries <= 12 * 200 * 20 + prod(shape[1:]) ** 2 * (extension is KFLR)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
