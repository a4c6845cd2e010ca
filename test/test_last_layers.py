"""Hessians of losses at the layers that make predictions: read off there without columns, and carried from the input of the layer if need be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from cases_nets import Net, parameter
from oracle import Oracle, Problem, Term
from table import default_dtype, labels
from test_born_diagonals import note_reads
from test_extensions import all_factors_close, close, collect, run
from torch import Tensor, nn
from torch.nn import Conv2d, CrossEntropyLoss, Linear, Module, Sequential, Tanh
from torch.nn import functional as F

from backpack import backpack, extend, register
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.passing import Pass
from backpack.extensions import HBP, KFLR, BatchDiagGGNExact, BatchDiagHessian, DiagGGNExact, DiagHessian, SqrtGGNExact, flows
from backpack.utils.columns import ScatteredColumns
from backpack.utils.errors import UnsupportedError


class Case(NamedTuple):
    """A model, its input, and its loss.

    Attributes:
        model: Makes the model.
        shape: Of the input of a sample.
        loss: The loss.
        target: Draws targets for a batch size.
        factors: How often the flow of Kronecker factors is read without columns.
        diagonals: The same for diagonals.
        function: What is called in place of the loss.
    """

    model: Callable[[], Module]
    shape: tuple[int, ...]
    loss: Callable[[], Module]
    target: Callable[[int], Tensor]
    factors: int = 1
    diagonals: int = 1
    function: Callable | None = None


class Spread(Module):
    """A loss whose Hessian couples all entries along the last axis."""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out - target).square().sum(-1) + 1).log().sum() + out.square().sum()


class Whole(Module):
    """A loss whose Hessian couples all entries of a sample."""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out - target).square().flatten(1).sum(1) + 1).sqrt().sum()


def head(forward: Callable, **parts: Callable[[], Any]) -> Callable[[], Module]:
    return lambda: Net(forward, **{name: make() for name, make in parts.items()})


def net(*layers: Callable[[], Module]) -> Callable[[], Module]:
    return lambda: Sequential(*(make() for make in layers))


def folded(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum")


def frozen() -> Module:
    layer = Linear(3, 4)
    layer.bias.requires_grad_(False)
    return layer


def time_first(own: Net, x: Tensor) -> Tensor:
    return own.b(own.a(x.transpose(0, 1)).tanh()).permute(1, 2, 0)


BELOW, HEAD = partial(Linear, 5, 3), partial(Linear, 3, 4)
CE, classes = CrossEntropyLoss, partial(labels, classes=4)
WEIGHTED = partial(CrossEntropyLoss, weight=torch.tensor([1.0, 2.0, 0.5, 0.0]).double(), ignore_index=2, reduction="sum")
CASES = {
    "alone": Case(net(HEAD), (3,), CE, classes),
    "layers below": Case(net(BELOW, Tanh, HEAD), (5,), CE, classes),
    "positions": Case(head(lambda own, x: own.b(own.a(x).tanh()).transpose(1, 2), a=BELOW, b=HEAD), (2, 5), CE, lambda n: labels(n, 2)),
    "positions, folded": Case(net(BELOW, Tanh, HEAD), (2, 5), partial(CE, reduction="sum"), lambda n: labels(n, 2), function=folded),
    "time first": Case(head(time_first, a=BELOW, b=HEAD), (2, 5), CE, lambda n: labels(n, 2)),
    "1 x 1": Case(net(partial(Conv2d, 3, 3, 2), Tanh, partial(Conv2d, 3, 4, 1)), (3, 3, 3), CE, lambda n: labels(n, 2, 2)),
    "patches": Case(net(partial(Conv2d, 3, 4, 2, padding=1)), (3, 2, 2), CE, lambda n: labels(n, 3, 3)),
    "transposed convolution": Case(net(partial(nn.ConvTranspose1d, 3, 4, 2, stride=2)), (3, 2), CE, lambda n: labels(n, 4)),
    "groups": Case(net(partial(nn.Conv1d, 4, 4, 2, groups=2)), (4, 3), CE, lambda n: labels(n, 2), factors=0),
    "groups, entries": Case(net(partial(nn.Conv1d, 4, 4, 2, groups=2)), (4, 3), nn.MSELoss, lambda n: torch.rand(n, 4, 2), factors=0),
    "matrix": Case(head(lambda own, x: own.a(x).tanh() @ own.w, a=BELOW, w=parameter(3, 4)), (5,), CE, classes),
    "frozen bias": Case(net(BELOW, Tanh, frozen), (5,), CE, classes),
    "weights, ignored": Case(net(BELOW, Tanh, HEAD), (5,), WEIGHTED, classes),
    "smoothed": Case(net(BELOW, Tanh, HEAD), (5,), partial(CE, label_smoothing=0.2), classes),
    "two classes": Case(net(BELOW, Tanh, partial(Linear, 3, 2)), (5,), CE, partial(labels, classes=2)),
    "entries": Case(net(BELOW, Tanh, HEAD), (2, 5), nn.MSELoss, lambda n: torch.rand(n, 2, 4)),
    "bits": Case(net(BELOW, Tanh, HEAD), (5,), nn.BCEWithLogitsLoss, lambda n: torch.rand(n, 4)),
    "own loss": Case(net(BELOW, Tanh, HEAD), (5,), Spread, lambda n: torch.rand(n, 4)),
    "own loss that couples positions": Case(net(BELOW, Tanh, HEAD), (2, 5), Whole, lambda n: torch.rand(n, 2, 4), 0, 0),
    "classes elsewhere": Case(
        head(lambda own, x: own.b(own.a(x).tanh()).unflatten(1, (2, 2)), a=BELOW, b=HEAD), (5,), CE, lambda n: labels(n, 2, classes=2), 0, 0
    ),
    "classes turned": Case(head(lambda own, x: own.b(own.a(x).tanh()).flip(1), a=BELOW, b=HEAD), (5,), CE, classes, 0, 0),
    "entries in another order": Case(
        head(lambda own, x: own.b(own.a(x).tanh()).unflatten(1, (2, 2)).mT, a=BELOW, b=HEAD), (5,), Whole, lambda n: torch.rand(n, 2, 2), 0, 0
    ),
    "positions, entries in another order": Case(
        head(lambda own, x: own.b(own.a(x).tanh()).transpose(1, 2), a=BELOW, b=HEAD), (2, 5), nn.MSELoss, lambda n: torch.rand(n, 4, 2)
    ),
    "frozen": Case(head(lambda own, x: F.linear(own.a(x).tanh(), own.w.detach()), a=BELOW, w=parameter(4, 3)), (5,), CE, classes, 0, 0),
    "views": Case(head(lambda own, x: own.b(own.a(x).tanh()).view(-1, 1, 4).transpose(1, 2).squeeze(2), a=BELOW, b=HEAD), (5,), CE, classes),
    "as many channels": Case(net(partial(Linear, 4, 4), Tanh, partial(nn.Conv1d, 4, 4, 1)), (4, 4), nn.MSELoss, lambda n: torch.rand(n, 4, 4)),
    "used twice": Case(head(lambda own, x: own.b(own.a(x).tanh()) + own.b(own.a(x).sin()), a=BELOW, b=HEAD), (5,), CE, classes, 0, 0),
}


def build(name: str, samples: int, dtype: torch.dtype = torch.float64) -> Problem:
    case = CASES[name]
    with torch.random.fork_rng(), default_dtype(dtype):
        torch.manual_seed(1)
        model, x = case.model(), torch.rand(samples, *case.shape)
        return Problem(model, x, [Term(case.loss(), case.target(samples), function=case.function)])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Form columns where they are needed, and note what is read off without them."""
    monkeypatch.setattr(flows, "FORMED", 1)
    return note_reads(monkeypatch)


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name: str, samples: int, memory: int | None, read: list[bool]) -> None:
    oracle = Oracle(build(name, samples))
    expected = oracle.diag_ggn_batch(oracle.hessian_exact)
    for extensions, reads in (((DiagGGNExact(), BatchDiagGGNExact()), CASES[name].diagonals), ((KFLR(), DiagGGNExact()), CASES[name].factors)):
        problem = build(name, samples)
        run(problem, *extensions, memory=memory)
        assert sum(read) == reads
        read.clear()
        for key, value in collect(problem, "diag_ggn_exact").items():
            close(value, expected[key].sum(0))
        for key, value in collect(problem, "diag_ggn_exact_batch").items():
            close(value, expected[key])
    all_factors_close(collect(problem, "kflr"), oracle.kronecker(oracle.hessian_exact))
    problem, expected = build(name, samples), oracle.diag_h_batch
    run(problem, DiagHessian(), BatchDiagHessian(), memory=memory)
    assert sum(read) >= CASES[name].diagonals  # activations are read as well
    for key, value in expected.items():
        close(collect(problem, "diag_h")[key], value.sum(0))
        close(collect(problem, "diag_h_batch")[key], value)


@pytest.mark.parametrize("name", ["alone", "patches", "entries"])
def test_nothing_is_born_where_nothing_is_below(name: str, read: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError("columns")

    monkeypatch.setattr(ScatteredColumns, "__getitem__", refused)
    monkeypatch.setattr(Pass, "_bear", refused)
    problem = build(name, 3)
    for layer in list(problem.model.children())[:-1]:
        layer.requires_grad_(False)
    oracle = Oracle(build(name, 3))
    run(problem, DiagGGNExact(), KFLR())
    assert read == [True]
    factors = oracle.kronecker(oracle.hessian_exact)
    found = collect(problem, "kflr")
    assert len(found) == 2
    all_factors_close(found, {key: factors[key] for key in found})


def test_losses_with_negative_weights(read: list[bool]) -> None:
    def problem() -> Problem:
        loss = CrossEntropyLoss(weight=torch.tensor([1.0, -2.0, 0.5, -1.0]).double(), reduction="sum")
        return Problem(build("layers below", 4).model, build("layers below", 4).x, [Term(loss, torch.tensor([0, 1, 2, 3]))])

    expected, found = Oracle(problem()).diag_h_batch, problem()
    run(found, BatchDiagHessian())
    assert read[0]
    assert min(value.min() for value in expected.values()) < 0
    for key, value in expected.items():
        close(collect(found, "diag_h_batch")[key], value)


def test_weights_that_are_made(read: list[bool]) -> None:
    """The columns of what they are made of are read behind the layer."""

    def problem() -> Problem:
        torch.manual_seed(0)
        made = build("matrix", 3)
        made.model.c = nn.Parameter(torch.rand(4).double())
        made.model.function = lambda own, x: F.linear(own.a(x).tanh(), own.w.T.square(), own.c)
        return made

    oracle, found = Oracle(problem()), problem()
    run(found, DiagGGNExact())
    assert read == []
    for key, value in oracle.diag_ggn_batch(oracle.hessian_exact).items():
        close(collect(found, "diag_ggn_exact")[key], value.sum(0))


@pytest.mark.parametrize("function", [True, False])
def test_two_losses_on_one_prediction(function: bool, read: list[bool]) -> None:
    def problem() -> Problem:
        made = build("layers below", 3)
        other = Term(nn.MSELoss(), torch.linspace(0, 1, 12).double().reshape(3, 4), scale=0.3, function=F.mse_loss if function else None)
        return Problem(made.model, made.x, [*made.terms, other])

    oracle, found = Oracle(problem()), problem()
    run(found, DiagGGNExact(), KFLR())
    assert read == [True, True]
    expected = oracle.diag_ggn_batch(oracle.hessian_exact)
    for key, value in collect(found, "diag_ggn_exact").items():
        close(value, expected[key].sum(0))
    all_factors_close(collect(found, "kflr"), oracle.kronecker(oracle.hessian_exact))


def test_a_loss_in_columns_beside_one_without(read: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The large one is read at the layer, the small one arrives as columns."""

    def problem() -> Problem:
        made = build("layers below", 3)
        return Problem(made.model, made.x, [*made.terms, Term(nn.MSELoss(), torch.zeros(3, 4).double(), scale=0.3)])

    monkeypatch.setattr(flows, "FORMED", 37)  # 3 x 3 x 4 entries, and 4 x 3 x 4
    oracle, found = Oracle(problem()), problem()
    run(found, DiagGGNExact(), KFLR())
    assert read == [True]
    expected = oracle.diag_ggn_batch(oracle.hessian_exact)
    for key, value in collect(found, "diag_ggn_exact").items():
        close(value, expected[key].sum(0))
    all_factors_close(collect(found, "kflr"), oracle.kronecker(oracle.hessian_exact))


def test_all_that_reads_factors(read: list[bool]) -> None:
    """Extensions that share what they read, and the product of mean inputs."""
    options = "ggn", "exact", "sqrt"
    oracle = Oracle(build("layers below", 3))
    problem = build("layers below", 3)
    run(problem, KFLR(), HBP(*options, "E[J^T E(H) J]", "same"), HBP(*options, "E(J^T) E(H) E(J)", "means"))
    assert read == [True]
    expected = oracle.kronecker(oracle.hessian_exact)
    for field in ("kflr", "same"):
        all_factors_close(collect(problem, field), expected)
    layer, last = list(problem.model.children())[-1], next(name for name in expected if name.endswith("weight") and not name.startswith("0"))
    mean = problem.model[:-1](problem.x).detach().mean(0)
    close(layer.weight.means[0], expected[last][0])
    close(layer.weight.means[1], mean.outer(mean))
    layer.weight.kflr[0].zero_()
    close(layer.weight.same[0], expected[last][0])  # no shared memory
    close(layer.bias.kflr[0], expected[last][0])


def test_who_needs_columns_gets_them(read: list[bool]) -> None:
    oracle, problem = Oracle(build("layers below", 3)), build("layers below", 3)
    run(problem, DiagGGNExact(), SqrtGGNExact())
    assert not any(read)
    for key, value in oracle.diag_ggn_batch(oracle.hessian_exact).items():
        close(collect(problem, "sqrt_ggn_exact")[key].square().sum((0, 1)), value.sum(0))
        close(collect(problem, "diag_ggn_exact")[key], value.sum(0))


@pytest.mark.parametrize("index", [[2, 0], [1, 1], []], ids=str)
def test_chosen_samples(index: list[int], read: list[bool]) -> None:
    oracle, problem = Oracle(build("positions", 3)), build("positions", 3)
    run(problem, DiagGGNExact(subsampling=index), BatchDiagGGNExact(subsampling=index))
    assert read == [True]
    for key, value in oracle.diag_ggn_batch(oracle.hessian_exact).items():
        torch.testing.assert_close(collect(problem, "diag_ggn_exact")[key], value[index].sum(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(collect(problem, "diag_ggn_exact_batch")[key], value[index], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_numbers(dtype: torch.dtype, read: list[bool]) -> None:
    """Second derivatives below the smallest number of half precision, at a layer with large inputs."""
    found = []
    for precision in (dtype, torch.float64):
        torch.manual_seed(0)
        model, x = Linear(3, 4).to(dtype).to(precision), (torch.rand(64, 3) * 200).to(dtype).to(precision)
        out = DiagGGNExact(), KFLR()
        with backpack(*out):
            (extend(CrossEntropyLoss())(extend(model)(x), torch.arange(64) % 4) * 1e-3).backward()
        found.append([model.weight.diag_ggn_exact, model.bias.kflr[0]])
    for value, truth in zip(*found, strict=True):
        error = (value.double() - truth).abs().amax() / truth.abs().amax()
        assert error < {torch.float16: 0.05, torch.bfloat16: 0.2}.get(dtype, 1e-4)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_graphs_of_derivatives_are_kept_as_before(read: list[bool]) -> None:
    problem = build("layers below", 3)
    model, lossfunc = extend(problem.model), extend(problem.terms[0].module)
    with backpack(DiagGGNExact()):
        lossfunc(model(problem.x), problem.terms[0].target).backward(create_graph=True)
    assert not any(read)
    assert model[2].weight.diag_ggn_exact.requires_grad


class Own(Linear):
    """A layer of a user's."""


class TenTimes(LinearDerivatives):
    """A rule of a user's, which says something else at the parameters."""

    def _weight_jac_t_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        return 10 * super()._weight_jac_t_mat_prod(*args, **kwargs)


def test_rules_of_users_are_asked(read: list[bool]) -> None:
    register(Own, TenTimes())
    model, x, y = extend(Sequential(Linear(5, 3), Tanh(), Own(3, 4)).double()), torch.rand(6, 5).double(), torch.arange(6) % 4
    with backpack(DiagGGNExact()), pytest.raises(UnsupportedError, match="says something else than `columns` and `rows`"):
        extend(CE())(model(x), y).backward()
    assert read == []
