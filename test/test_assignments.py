"""Parts of a tensor that are overwritten: the node in the graph does not tell with what operation, but what its backward pass reads does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import Oracle, Problem, Term
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.extensions import BatchDiagHessian, BatchGrad, DiagGGNExact, DiagHessian
from backpack.utils.errors import UnsupportedError

T = 4


class Writer(nn.Module):
    """Walks along a sequence, and writes what it computes into a tensor."""

    def __init__(self, write: Callable[[Tensor, int, Tensor], object], again: bool = False) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(3, 4), nn.Linear(8, 4), nn.Linear(4, 2)
        self.write, self.again = write, again

    def walk(self, x: Tensor) -> Tensor:
        given = self.first(x)
        out, hidden = given.new_zeros(len(x), T, 4), given.new_zeros(len(x), 4)
        for t in range(T):
            hidden = torch.tanh(self.cell(torch.cat([given[:, t], hidden], 1)))
            self.write(out, t, hidden)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.walk, x, use_reentrant=False) if self.again else self.walk(x)).mean(1)


class HiddenSquare(torch.autograd.Function):
    """Squares in place, and hides what its backward pass reads."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.twice = 2 * x.detach()
        ctx.mark_dirty(x)
        return x.square_()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        return ctx.twice * g


def put(out: Tensor, t: int, h: Tensor) -> None:
    out[:, t] = h


def last(change: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor, int, Tensor], None]:
    def write(out: Tensor, t: int, h: Tensor) -> None:
        put(out, t, h)
        if t == T - 1:
            change(out[:, t], h)

    return write


LINEAR: dict[str, Callable[[Tensor, int, Tensor], object]] = {
    "assignment": put,
    "sum": lambda out, t, h: out[:, t].add_(h),
    "difference": lambda out, t, h: out[:, t].sub_(h, alpha=2.0),
    "over others": lambda out, t, h: out[:, max(t - 1, 0) : t + 1].copy_(h[:, None]),
    "indexed": lambda out, t, h: out[:, torch.tensor([t])].copy_(h[:, None]) if t % 2 else put(out, t, h),
    "transposed": lambda out, t, h: put(out.mT, t, h),
    "product with a number": last(lambda part, _: part.mul_(2.0)),
    "product with a constant": last(lambda part, _: part.mul_(torch.tensor([1.0, -2.0, 0.0, 3.0]))),
    "quotient": last(lambda part, _: part.div_(3.0)),
    "mask": last(lambda part, _: part.masked_fill_(torch.tensor([True, False, False, True]), 0.5)),
    "zero": last(lambda part, _: part[:, 1:].zero_()),
    "relu": last(lambda part, _: F.relu_(part)),
    "leaky_relu": last(lambda part, _: F.leaky_relu_(part, 0.2)),
    "hardtanh": last(lambda part, _: F.hardtanh_(part, -0.1, 0.2)),
    "threshold": last(lambda part, _: F.threshold_(part, 0.1, 0.2)),
    "clamp": last(lambda part, _: part.clamp_(-0.1, 0.2)),
}
CURVED: dict[str, Callable[[Tensor, int, Tensor], object]] = {
    "product": last(lambda part, h: part.mul_(h)),
    "product with itself": last(lambda part, _: part.square_()),
    "exponential": last(lambda part, _: part.exp_()),
    "quotient": last(lambda part, h: part.div_(2 + h)),
    "sum of products": last(lambda part, h: part.addcmul_(h, h)),
    "elu": last(lambda part, _: F.elu_(part)),
    "hardswish": last(lambda part, _: F.hardswish(part, inplace=True)),
    "custom function": last(lambda part, _: HiddenSquare.apply(part)),
}


def problem(write: Callable, samples: int, again: bool = False) -> Problem:
    torch.manual_seed(0)
    net = Writer(write, again).double()
    return Problem(net, torch.randn(samples, T, 3, dtype=torch.float64), [Term(nn.CrossEntropyLoss(), torch.arange(samples) % 2)])


def run(given: Problem, *active: object) -> None:
    extend(given.model)
    extend(given.terms[0].module)
    with backpack(*active):
        given.loss(given.outputs()).backward()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("name", "again"), [*((name, False) for name in LINEAR), *((name, True) for name in list(LINEAR)[:6])])
def test_linear(name: str, again: bool, samples: int) -> None:
    net, oracle = problem(LINEAR[name], samples, again), Oracle(problem(LINEAR[name], samples))
    run(net, BatchDiagHessian(), DiagHessian(), DiagGGNExact(), BatchGrad())
    for key, p in net.model.named_parameters():
        torch.testing.assert_close(p.grad_batch, oracle.grad_batch[key])
        torch.testing.assert_close(p.diag_h_batch, oracle.diag_h_batch[key])
        torch.testing.assert_close(p.diag_h, oracle.diag_h_batch[key].sum(0))
        torch.testing.assert_close(p.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[key].sum(0))


@pytest.mark.parametrize("name", CURVED)
def test_curved(name: str) -> None:
    """Refused where the second derivative is needed; the generalized Gauss-Newton is there."""
    net = problem(CURVED[name], 3)
    with pytest.raises(UnsupportedError, match=r"CopySlices .an operation in place on a part of a tensor.* or may hide, a curved operation"):
        run(net, DiagHessian())
    oracle = Oracle(problem(CURVED[name], 3))
    run(net, DiagGGNExact())
    for key, p in net.model.named_parameters():
        torch.testing.assert_close(p.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[key].sum(0))


def entry_by_entry(out: Tensor, h: Tensor) -> None:
    for n in range(len(h)):
        out[n] = h[n] * 2


VECTORS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "entry by entry": entry_by_entry,
    "all": lambda out, h: out.copy_(h),
    "some": lambda out, h: out[1:].copy_(h[1:]),
    "changed": lambda out, h: out.add_(h)[:1].mul_(3.0),
}


class Vector(nn.Module):
    """Writes a number for each sample."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.first, self.last, self.write = nn.Linear(3, 1), nn.Linear(1, 2), write

    def forward(self, x: Tensor) -> Tensor:
        scores = self.first(x)[:, 0].tanh()
        out = scores.sin()
        self.write(out, scores)
        return self.last(out[:, None])


@pytest.mark.parametrize("samples", [1, 3, 5])
@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str, samples: int) -> None:
    """A tensor may have no other axis than that of the samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = Vector(VECTORS[name]).double(), torch.randn(samples, 3, dtype=torch.float64), torch.arange(samples) % 2
    given, oracle = (Problem(model, x, [Term(nn.CrossEntropyLoss(), y)]) for _ in range(2))
    oracle = Oracle(oracle)
    run(given, DiagHessian(), DiagGGNExact(), BatchGrad())
    for key, p in given.model.named_parameters():
        torch.testing.assert_close(p.grad_batch, oracle.grad_batch[key])
        torch.testing.assert_close(p.diag_h, oracle.diag_h_batch[key].sum(0))
        torch.testing.assert_close(p.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[key].sum(0))


def losses_of(out: Tensor, labels: Tensor, *, written: bool) -> Tensor:
    parts = [F.cross_entropy(row, label) for row, label in zip(out.split(1), labels.split(1), strict=True)]
    if not written:
        return torch.stack(parts).mean()
    losses = torch.zeros(len(out), dtype=out.dtype)
    for i, part in enumerate(parts):
        losses[i] = part
    return losses.mean()


def test_losses_that_are_written_into_a_tensor() -> None:
    found = []
    for written in (False, True):
        given = problem(put, 3)
        extend(given.model)
        with backpack(DiagGGNExact(), DiagHessian(), BatchGrad()):
            losses_of(given.model(given.x), torch.tensor([0, 1, 1]), written=written).backward()
        found.append([value for p in given.model.parameters() for value in (p.grad_batch, p.diag_h, p.diag_ggn_exact)])
    torch.testing.assert_close(*found)


class Pair(nn.Module):
    """Writes what a layer returns twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        out = hidden.new_zeros(len(x), 2, 4)
        out[:, 0] = hidden
        out[:, 1] = 2 * hidden
        return out.flatten(1)


def test_assignments_draw_nothing() -> None:
    model, x = extend(Pair().double()), torch.randn(37, 3, dtype=torch.float64)  # a number that no other test has: codes of samples are kept
    state = torch.get_rng_state()
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    alone = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), model.layer.weight)[0] for n in range(len(x))]
    torch.testing.assert_close(model.layer.weight.grad_batch, torch.stack(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_assignments_of_more_samples_than_half_precision_tells_apart(dtype: torch.dtype) -> None:
    x = torch.randn(5000, 3).to(dtype)
    model = extend(Pair().to(dtype))
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    expected = 2 * 5 * model.layer(x).detach().double()[:, :, None] * x.double()[:, None]
    torch.testing.assert_close(model.layer.weight.grad_batch.double(), expected, rtol=0.1, atol=0.1)
