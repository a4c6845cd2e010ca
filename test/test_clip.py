"""Clipping: each sample's gradient on its own, over all parameters together."""

from __future__ import annotations

import pytest
import torch
from cases import CASES
from test_extensions import close, run
from torch import Tensor, nn

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad
from backpack.utils.clip import clip_factors, clip_per_sample
from backpack.utils.errors import ArgumentError

N = 4


def clipped(case: str, max_norm: float) -> tuple[Tensor, dict[str, Tensor]]:
    """One sample after the other, each gradient clipped by torch."""
    problem = CASES[case].build(N)
    (term,) = problem.terms
    total: dict[str, Tensor] = {}
    norms = []
    for n in range(N):
        problem.model.zero_grad()
        one = problem.x[n : n + 1]
        (term.module(problem.output(problem.model, one), term.target[n : n + 1]) / N).backward()
        norms.append(nn.utils.clip_grad_norm_(problem.model.parameters(), max_norm))
        for name, parameter in problem.model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad
    return torch.stack(norms), total


@pytest.mark.parametrize(
    "case", ["Tanh", "frozen first layer", "linear twice", "tied branches", "net: Conv2d", "Embedding", "position embedding", "bare scalar"]
)
@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_clipped_gradient(case: str, quantile: float) -> None:
    norms, _ = clipped(case, 1e9)
    bound = norms.quantile(quantile).item() * 0.9
    _, truth = clipped(case, bound)
    problem = CASES[case].build(N)
    run(problem, BatchGrad())
    close(clip_per_sample(problem.model, bound), (bound / norms).clamp(max=1), rtol=1e-5)  # torch adds 1e-6 to norms
    found = {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        close(gradient, truth[name], rtol=1e-4)


@pytest.mark.parametrize("case", ["Tanh", "net: Conv2d", "linear twice"])
def test_two_passes(case: str) -> None:
    """Norms in the first pass, weighted losses in the second: no per-sample gradient is ever formed."""
    norms, _ = clipped(case, 1e9)
    bound = norms.median().item()
    _, truth = clipped(case, bound)
    problem = CASES[case].build(N)
    run(problem, BatchL2Grad())
    factors = clip_factors(problem.model, bound)
    (term,) = problem.terms
    problem.model.zero_grad()
    losses = type(term.module)(reduction="none")(problem.output(problem.model, problem.x), term.target)
    (factors @ losses.reshape(N, -1).mean(1) / N).backward()
    for name, parameter in problem.model.named_parameters():
        close(parameter.grad, truth[name], rtol=1e-4)


def test_zero_gradients_stay() -> None:
    model = extend(nn.Linear(3, 2))
    with backpack(BatchGrad()):
        (model(torch.zeros(3, 3)) * 0).sum().backward()
    assert torch.equal(clip_per_sample(model, 1.0), torch.ones(3))
    assert torch.equal(model.weight.grad, torch.zeros(2, 3))


def test_parameters_without_norms_are_refused() -> None:
    """A parameter that is left out of the norm would not be protected."""
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match="No parameter carries"):
        clip_factors(model, 1.0)
    with backpack(BatchGrad(exclude=["1.bias"])):
        model(torch.rand(3, 3)).sum().backward()
    before = {p: p.grad.clone() for p in model.parameters()}
    with pytest.raises(ArgumentError, match=r"1\.bias has a gradient"):
        clip_per_sample(model, 1.0)
    with pytest.raises(ArgumentError, match="positive"):
        clip_factors(model, 0.0)
    with backpack(BatchGrad(exclude=["1.bias"]), BatchL2Grad()):
        model(torch.rand(3, 3)).sum().backward()
    before = {p: p.grad.clone() for p in model.parameters()}
    with pytest.raises(ArgumentError, match=r"1\.bias carries no grad_batch"):
        clip_per_sample(model, 1.0)
    assert all(torch.equal(p.grad, gradient) for p, gradient in before.items())
