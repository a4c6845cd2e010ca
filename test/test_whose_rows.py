"""Whose rows are whose: programs in which one thing alone tells that rows are samples, or parts of samples, or that they are not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cases_nets import Net, parameter
from test_extensions import close
from test_rows_of_others import linear
from torch import Tensor, cat, nn, rand, stack
from torch.nn import functional as F

from backpack import backpack, extend, results
from backpack.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact
from backpack.utils.errors import BackpackError, LossNotExtendedError, LossValueError, MixedSamplesError, UnattributedError, UnsupportedError

N = 4


class Same(torch.autograd.Function):
    """Something unknown that changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Program(NamedTuple):
    """A loss of models, each extended on its own, and of what is given: shapes of numbers, or lists of labels."""

    loss: Callable[..., Tensor]
    given: tuple[tuple[int, ...] | list[int], ...]
    models: dict[str, Callable[[], nn.Module]]

    def made(self) -> tuple[SimpleNamespace, list[Tensor]]:
        own = SimpleNamespace(**{name: extend(make().double()) for name, make in self.models.items()})
        return own, [torch.tensor(some) if isinstance(some, list) else rand(some).double() for some in self.given]


def program(loss: Callable[..., Tensor], /, *given: tuple[int, ...] | list[int], **models: Callable[[], nn.Module]) -> Program:
    return Program(loss, given, models)


def whole(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Net(forward, **{name: make() for name, make in parts.items()})


def alone(forward: Callable[..., Any], *given: tuple[int, ...] | list[int], **parts: Callable[[], Any]) -> Program:
    """Make a single model, and square what it returns."""
    return program(lambda own, *given: own.m(*given).square().sum(), *given, m=whole(forward, **parts))


def buffer(values: Any) -> Callable[[], nn.Buffer]:
    return lambda: nn.Buffer(torch.as_tensor(values))


def table(*shape: int) -> Callable[[], nn.Module]:
    return whole(lambda own: own.w * 1, w=parameter(*shape))


LABELS = [2, 0, 1, 2]
DATA = torch.arange(12.0).double().view(N, 3).square().sin()
UNEVEN = [[0.0], [1], [2], [3], [10], [11], [12], [13], [14.5], [15.5], [16.5], [17.5]]


def gated(own: Any, a: Tensor, b: Tensor) -> Tensor:
    one, other = (rows * rows.tanh() for rows in map(own.m, (a, b)))
    return cat([one, one, other]).square().sum()


def reused_normalizer(own: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = own.m(x)
    total = scores.logsumexp(1, keepdim=True)
    return F.nll_loss(scores - total, y) + total.mean()


def some_in_another_order(own: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = own.m(x)
    return F.mse_loss(own.h(rows.flip(0))[:2], y) + rows.square().sum()


def kernel(own: Any, x: Tensor) -> Tensor:
    rows, scales = own.m(x)
    return (rows @ scales.exp().T).square().sum()


def two_steps(own: Any, tokens: Tensor) -> Tensor:
    first = own.m(tokens)
    return cat([first, own.m(tokens.add_(2))]).square().sum()


REFUSED: dict[str, tuple[type[BackpackError], type, Program]] = {
    "a parameter and rows of samples": (
        MixedSamplesError,
        BatchGrad,
        alone(lambda own, x: own.l(x) @ cat([own.p, x[1:]]).T, (N, 3), l=linear(3, 3), p=parameter(1, 3)),
    ),
    "one row for all": (
        UnsupportedError,
        BatchDiagGGNExact,
        program(lambda own, x, y: F.cross_entropy(own.m(x)[1:2] + rand(5, 3), y), (N, 4), [*LABELS, 0], m=linear(4, 3)),
    ),
    "classes first": (
        UnsupportedError,
        BatchDiagGGNExact,
        program(lambda own, x, y: -Same.apply(own.m(x)).t().log_softmax(0)[y, torch.arange(3)].sum(), (3, 4), LABELS[:3], m=linear(4, 3)),
    ),
    "tokens that were changed": (
        UnsupportedError,
        BatchGrad,
        program(two_steps, [1, 2, 3, 4], m=whole(lambda own, i: own.e(i.clone()), e=lambda: nn.Embedding(9, 3))),
    ),
    "a parameter beside": (
        UnattributedError,
        BatchGrad,
        program(kernel, (N, 3), m=whole(lambda own, x: (own.l(x), own.p * 1), l=linear(3, 3), p=parameter(N, 3))),
    ),
    "a parameter beside, as it is": (
        UnattributedError,
        BatchGrad,
        program(kernel, (N, 3), m=whole(lambda own, x: (own.l(x), own.p.expand(N, 3)), l=linear(3, 3), p=parameter(N, 3))),
    ),
    "places on uneven lines": (
        MixedSamplesError,
        BatchGrad,
        alone(lambda own, x: own.q(x) @ own.k(torch.tensor(UNEVEN).double()).T, (3, 3), k=linear(1, 3), q=linear(3, 3)),
    ),
    "a loss of a table": (
        UnattributedError,
        BatchGrad,
        program(lambda own, x, y: own.loss(own.m(x), y) + own.loss(own.p(), y), (N, 3), (N, 2), m=linear(3, 2), p=table(N, 2), loss=nn.MSELoss),
    ),
    "a normalizer used again": (LossNotExtendedError, BatchDiagGGNExact, program(reused_normalizer, (N, 3), LABELS, m=linear(3, 3))),
    "calls joined behind a residual": (UnsupportedError, BatchGrad, program(gated, (N, 3), (N, 3), m=linear(3, 2))),
    "some in another order": (
        MixedSamplesError,
        BatchGrad,
        program(some_in_another_order, (N, 3), (2, 2), m=lambda: nn.Sequential(nn.Linear(3, 2)), h=linear(2, 2)),
    ),
    "mini-batches of two sizes": (
        UnsupportedError,
        BatchGrad,
        program(lambda own, a, b, y, z: F.mse_loss(own.m(a), y) + F.mse_loss(own.m(b), z), (N, 3), (6, 3), (N, 2), (6, 2), m=linear(3, 2)),
    ),
    "a loss of losses": (
        LossValueError,
        BatchDiagGGNExact,
        program(
            lambda own, x, y: own.loss(F.cross_entropy(own.m(x), y, reduction="none")),
            (N, 3),
            LABELS,
            m=linear(3, 4),
            loss=whole(lambda own, losses: losses.square().mean()),
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, extension, of = REFUSED[name]
    own, given = of.made()
    with backpack(extension()), pytest.raises(error):
        of.loss(own, *given).backward()
    assert all(results(model) == {} for model in vars(own).values())


def two_heads(own: Any, a: Tensor, b: Tensor, dim: int = 1) -> Tensor:
    rows = cat([own.m(a), own.m(b)], dim)
    return cat([own.h(rows), own.k(rows)]).square().sum()


def sharing_pairs(own: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    one, other, shared = map(own.m, (a, b, c))
    return cat([cat([shared, one], 1), cat([other, shared], 1)]).square().sum()


def alike(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1)


def halves(own: Any, a: Tensor, b: Tensor) -> Tensor:
    one, other = own.m(a), own.m(b)
    return cat([one[:2], one[2:]]).square().sum() + cat([other, other]).square().sum()


EXACT: dict[str, Program] = {
    "many places": alone(lambda own, x: own.l(x) @ (torch.arange(8.0).double()[:, None] @ own.p).T, (N, 3), l=linear(3, 3), p=parameter(1, 3)),
    "rows of a table that a buffer tells": alone(
        lambda own, x: own.l(x) @ F.embedding(own.i, own.p).mean(1).T,
        (N, 3),
        l=linear(3, 3),
        p=parameter(9, 3),
        i=buffer([[1, 3], [0, 2], [4, 4], [7, 1]]),
    ),
    "the only row, taken and given back": program(
        lambda own, a, b: stack([own.m(a)[0][None], own.m(b)[0][None]]).square().sum(), (1, 3), (1, 3), m=linear(3, 2)
    ),
    "halves of calls": program(halves, (N, 3), (N, 3), m=linear(3, 2)),
    "two heads on pairs": program(two_heads, (N, 3), (N, 3), m=linear(3, 2), h=linear(4, 2), k=linear(4, 2)),
    "pairs that share a call": program(sharing_pairs, *[(N, 3)] * 3, m=linear(3, 2)),
    "pairs that share what was given": program(
        lambda own, a, b, c: cat([alike(own.m(a), own.m(b)), alike(own.m(a), own.m(c))]).tanh().square().sum(), *[(N, 3)] * 3, m=linear(3, 2)
    ),
    "a pair twice": program(
        lambda own, a, b: cat([(own.m(a) - own.m(b)).exp(), (own.m(a) + own.m(b)).exp()]).square().sum(), (N, 3), (N, 3), m=linear(3, 2)
    ),
    "twins": program(lambda own, a, b: cat([own.m(a) + own.m(b), own.h(a) + own.h(b)]).exp().sum(), (N, 3), (N, 3), m=linear(3, 2), h=linear(3, 2)),
    "twins, one by one": program(
        lambda own, a, b: cat([own.m(a), own.h(a)]).exp().sum() + (own.m(b) * own.h(b)).sum(), (N, 3), (N, 3), m=linear(3, 2), h=linear(3, 2)
    ),
    "draws of a mean": program(lambda own, draws: own.d(own.m(DATA).mean(0) * draws).square().sum(), (3, 5, 1), m=linear(3, 2), d=linear(2, N)),
    "two inputs of a model that returns its loss": program(
        lambda own, *x: own.m([*x]),
        (1, 3),
        (1, 4),
        m=whole(lambda own, x: (own.l(x[0]) + own.l(x[0]) * own.k(x[1])).square().sum(), l=linear(3, 2), k=linear(4, 2)),
    ),
    "a list of two rows that are summed": program(
        lambda own, *x: own.m([*x]).square().sum(), (1, 3), (1, 3), m=whole(lambda own, x: own.l(x[0]) + own.l(x[1]), l=linear(3, 2))
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    own, given = EXACT[name].made()
    with backpack(BatchGrad()):
        EXACT[name].loss(own, *given).backward()
    losses = [EXACT[name].loss(own, *(x[n : n + 1] for x in given)) for n in range(len(given[0]))]
    for p in [p for model in vars(own).values() for p in model.parameters()]:
        close(p.grad_batch, stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses]))


def test_two_heads_on_calls_that_were_joined() -> None:
    """Of each of their rows, the heads make a sample."""
    own, given = program(two_heads, (N, 3), (N, 3), m=linear(3, 2), h=linear(2, 3), k=linear(2, 3)).made()
    with backpack(BatchGrad()):
        two_heads(own, *given, dim=0).backward()
    rows = [own.m(x) for x in cat(given).unsqueeze(1)]
    losses = [own.h(row).square().sum() + own.k(row).square().sum() for row in rows]
    for p in [p for model in vars(own).values() for p in model.parameters()]:
        close(p.grad_batch, stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses]))


def test_joined_calls_that_are_compared() -> None:
    """Rows ``i`` of all calls are one sample, where each meets all others."""
    model, given = extend(nn.Linear(3, 2).double()), [rand(N, 3).double() for _ in range(2)]

    def loss(*outs: Tensor) -> Tensor:
        rows = cat(outs)
        return (rows * (rows @ rows.T).softmax(1).sum(0, keepdim=True).T).square().sum()

    with backpack(BatchGrad()):
        loss(*map(model, given)).backward()
    outs = [*map(model, given)]
    grads = torch.autograd.grad(loss(*outs), outs, retain_graph=True)
    for p in model.parameters():
        rows = [torch.autograd.grad([out[n] for out in outs], p, [grad[n] for grad in grads], retain_graph=True)[0] for n in range(N)]
        close(p.grad_batch, stack(rows))


CURVED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Callable[[Tensor, Tensor], Tensor]], int, list[int]]] = {
    "something unknown of one sample": (lambda out: Same.apply(out).view(2, 3), lambda: F.cross_entropy, 1, [0, 2]),
    "a cross-entropy and the mean": (
        lambda out: out,
        lambda: extend(Net(lambda own, out, y: F.nll_loss(out.log_softmax(1), y) + out.mean())),
        N,
        LABELS,
    ),
}


@pytest.mark.parametrize("name", CURVED)
def test_curvature(name: str) -> None:
    behind, make, samples, labels = CURVED[name]
    loss = make()
    model, x, y = extend(nn.Linear(3, 6).double()), rand(samples, 3).double(), torch.tensor(labels)
    with backpack(DiagGGNExact()):
        loss(behind(model(x)), y).backward()
    out = behind(model(x))
    curvature = torch.autograd.functional.hessian(lambda out: loss(out, y), out.detach()).reshape(out.numel(), -1)
    for p in model.parameters():
        rows = stack([torch.autograd.grad(entry, p, retain_graph=True)[0] for entry in out.flatten()]).flatten(1)
        close(p.diag_ggn_exact.flatten(), (rows * (curvature @ rows)).sum(0))
