"""Matrices that grow with the square of a number of features: refused before they are formed, where they would fill the memory."""

from __future__ import annotations

import pytest
import torch
from test_extensions import QUANTITIES
from torch import nn

from backpack import backpack, extend, results
from backpack.extensions import KFAC, KFLR, KFRA, chains
from backpack.extensions.backprop_extension import BackpropExtension
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
    """Everything up to the limit is formed. The nine inputs of the first layer count nothing: no matrix is carried there."""
    monkeypatch.setattr(chains, "LARGEST", limit)
    model, x = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 9)
    if limit == 36:
        run(model, x, KFRA())
        assert len(results(model)) == 4
        return
    with pytest.raises(UnsupportedError, match=r"6 x 6 numbers, 0\.0 GiB, at 2 \(Linear\).*0\.weight"):
        run(model, x, KFRA())
    run(model, x, KFRA(exclude=["0"]))


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


@pytest.mark.parametrize("quantity", ["KFAC", "KFLR"])
@pytest.mark.parametrize("name", FACTORS)
def test_large_factors_are_refused(name: str, quantity: str) -> None:
    make, shape, message = FACTORS[name]
    model, x = extend(nn.Sequential(make(), nn.Flatten())), torch.randn(2, *shape)
    with backpack(QUANTITIES[quantity].make()), pytest.raises(UnsupportedError, match=f"{message}.*exclude="):
        extend(nn.MSELoss())(out := model(x), torch.zeros_like(out)).backward()
    assert results(model) == {}


def test_factors_of_a_large_table_exist() -> None:
    """The input factor of a table is a diagonal, and takes as many numbers as there are words."""
    model, words = extend(nn.Sequential(nn.Embedding(50_257, 2), nn.Flatten(), nn.Linear(6, 2))), torch.randint(50_257, (2, 3))
    with backpack(KFAC()):
        extend(nn.MSELoss())(model(words), torch.zeros(2, 2)).backward()
    counts, outputs = model[0].weight.kfac
    assert torch.equal(counts, torch.bincount(words.flatten(), minlength=50_257) / 2)
    assert outputs.shape == (2, 2)
