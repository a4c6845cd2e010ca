"""Mini-batches with as many samples as another axis has entries: exact where the graph tells them apart, else refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, MSELoss, Parameter

from backpack import backpack, extend, results
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import MixedSamplesError, UnsupportedError

LENGTH = 3


class Scores(Module):
    """Attention with a bias for each pair of positions, made by a layer that is called with their distances."""

    def __init__(self, bias: Module, distances: Tensor) -> None:
        super().__init__()
        self.bias, self.first, self.last, self.distances = bias, Linear(2, 2), Linear(2, 2), distances

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        bias = self.bias(self.distances).sum(-1)
        return self.last(torch.softmax(h @ x.mT + bias, 2) @ h)


def between_positions(*axes: None) -> Tensor:
    places = torch.arange(LENGTH)
    return (places[:, None] - places + LENGTH)[axes]


def table(*axes: None) -> Module:
    return Scores(Embedding(2 * LENGTH, 2), between_positions(*axes))


def network(*axes: None) -> Module:
    return Scores(Linear(1, 2), between_positions(*axes)[..., None].double())


def problem(make: Callable[[], Module], samples: int) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(samples, LENGTH, 2, dtype=torch.float64)
    return Problem(make().double(), x, [Term(MSELoss(), torch.randn_like(x))])


def run(made: Problem) -> None:
    extend(made.model)
    extend(made.losses[0])
    with backpack(BatchGrad(), DiagGGNExact()):
        made.loss(made.outputs()).backward()


def check(make: Callable[[], Module], samples: int) -> None:
    made, oracle = problem(make, samples), Oracle(problem(make, samples))
    run(made)
    for name, parameter in made.model.named_parameters():
        close(parameter.grad_batch, oracle.grad_batch[name])
        close(parameter.diag_ggn_exact, sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))[name])


@pytest.mark.parametrize("make", [table, network])
def test_positions_of_a_layer(make: Callable[..., Module]) -> None:
    """Whether three rows without a graph are samples or positions cannot be known; the error names both ways out, and both work."""
    for samples in (1, 2, 4):
        check(make, samples)
    made = problem(make, LENGTH)
    with pytest.raises(MixedSamplesError, match=r"bias returns .*if its axis 0 holds 3 positions.*another size.*shape \[1, 3, 3.*bias\.weight"):
        run(made)
    assert results(made.model) == {}
    check(partial(make, None), LENGTH)


class Pairs(Module):
    """A tensor that is used as it is, and transposed."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.weight, self.data = Parameter(torch.randn(LENGTH, LENGTH)), data

    def forward(self, x: Tensor) -> Tensor:
        table = x[..., 0] * self.weight if self.data else self.weight.tanh()
        return x[..., 0] * (table + table.T)


def test_two_orientations_of_a_parameter() -> None:
    """What is made of a parameter alone may be used differently by different samples; what is made of data mixes them."""

    def make(data: bool) -> Problem:
        made = problem(lambda: Pairs(data), LENGTH)
        made.terms[0].target = made.terms[0].target[..., 0]
        return made

    made, oracle = make(False), Oracle(make(False))
    run(made)
    close(made.model.weight.grad_batch, oracle.grad_batch["weight"])
    close(made.model.weight.diag_ggn_exact, sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))["weight"])
    with pytest.raises(UnsupportedError, match=r"axis 0 .*axis 1.*ambiguous.*another size.*exclude"):
        run(make(True))
