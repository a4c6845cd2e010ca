"""Rows that are times, members, draws or another call's samples: refused where nothing tells that they are samples, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases_nets import Net, parameter
from test_extensions import close
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, results
from backpack.extensions import KFLR, BatchDiagGGNExact, BatchGrad, DiagGGNExact, SumGradSquared
from backpack.utils.errors import BackpackError, UnsupportedError

N = 4
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "function": F.mse_loss,
    "module": extend(nn.MSELoss()),
    "by hand": lambda out, target: (out - target).square().sum(),
}


def net(forward: Callable[..., Any], **parts: Callable[[], Any]) -> nn.Module:
    return extend(Net(forward, **{name: make() for name, make in parts.items()}).double())


def linear(*sizes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(*sizes)


def decoder() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


TRAJECTORIES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "step by step": lambda own, z, t: torch.stack([own.h(z * now) for now in t]),
    "at once": lambda own, z, t: own.h(z * t[:, None, None]),
    "scaled": lambda own, z, t: torch.einsum("t,nd->tnd", t, own.h(z)),
    "without features": lambda own, z, t: torch.stack([own.h(z * now).sum(1) for now in t]),
}


GIVEN: dict[str, tuple[Callable[[Tensor, Tensor], tuple], Callable[..., tuple[Tensor, Tensor]]]] = {
    "arguments": (lambda z, t: (z, t), lambda z, t: (z, t)),
    "a mapping": (lambda z, t: ({"z": z, "t": t},), lambda given: (given["z"], given["t"])),
    "an object": (lambda z, t: (SimpleNamespace(z=z, t=t),), lambda given: (given.z, given.t)),
    "a list": (lambda z, t: ([z, t],), tuple),
    "a tuple": (lambda z, t: ((z, t),), tuple),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("times", [3, 5])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", TRAJECTORIES)
def test_times_are_no_samples(way: str, loss: str, times: int, given: str) -> None:
    """A model of states and times that returns times first; with samples in front, it is exact."""
    torch.manual_seed(0)
    give, read = GIVEN[given]
    model = net(lambda own, *given: TRAJECTORIES[way](own, *read(*given)), h=decoder)
    z, t = torch.rand(N, 2).double(), torch.rand(times).double()
    out = model(*give(z, t))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=rf"given a tensor of shape \[4, 2\] and returns \[{times}, 4"):
        LOSSES[loss](out, torch.ones_like(out)).backward()
    assert results(model) == {}
    turned = extend(Net(lambda own, z, t: own.model(*give(z, t)).transpose(0, 1), model=model))
    with backpack(BatchGrad()):
        out = turned(z, t)
        LOSSES[loss](out, torch.ones_like(out)).backward()
    for p in model.parameters():
        rows = [torch.autograd.grad(LOSSES[loss](o := turned(z[n : n + 1], t), torch.ones_like(o)), p)[0] for n in range(N)]
        close(p.grad_batch, torch.stack(rows) / (1 if loss == "by hand" else N))


FIRST: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "a mask": (lambda own, mask, x: mask.softmax(1) @ own.h(x), linear(2, 2), (3, 3), (N, 3, 2)),
    "points": (lambda own, p, x: own.h(x) @ p.sin().T, linear(3, 2), (3, 2), (N, 3)),
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("loss", LOSSES)
def test_arguments_in_front_of_the_samples(loss: str, name: str) -> None:
    """They are as long as another axis of samples that a layer is given as they are."""
    forward, make, first, shape = FIRST[name]
    torch.manual_seed(0)
    model, a, x = net(forward, h=make), torch.rand(first).double(), torch.rand(shape).double()
    with backpack(BatchGrad()):
        out = model(a, x)
        LOSSES[loss](out, torch.ones_like(out)).backward()
    for p in model.parameters():
        rows = [torch.autograd.grad(LOSSES[loss](o := model(a, x[n : n + 1]), torch.ones_like(o)), p)[0] for n in range(N)]
        close(p.grad_batch, torch.stack(rows) / (1 if loss == "by hand" else N))


MEMBERS: dict[str, Callable[[], nn.Module]] = {
    "matrices from the left": lambda: net(lambda own, z: (own.w @ z.T).tanh(), w=parameter(3, 2)),
    "scales": lambda: net(lambda own, z: (own.w * own.h(z)[:, 0]).tanh(), w=parameter(3, 1), h=linear(2, 1)),
    "turned": lambda: net(lambda own, z: own.h(z).tanh().T, h=linear(2, 3)),
}


@pytest.mark.parametrize("extension", [BatchGrad, BatchDiagGGNExact])
@pytest.mark.parametrize("loss", ["function", "module"])
@pytest.mark.parametrize("way", MEMBERS)
def test_members_are_no_samples(way: str, loss: str, extension: type) -> None:
    """Of outputs with two axes, too."""
    model = MEMBERS[way]()
    with backpack(extension()), pytest.raises(UnsupportedError):
        LOSSES[loss](model(torch.rand(N, 2).double()), torch.rand(3, N).double()).backward()
    assert results(model) == {}


@pytest.mark.parametrize("draws", [2, 4, 8])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("make", [linear(3, 2), lambda: nn.Sequential(nn.Linear(3, 2))], ids=["layer", "model"])
def test_draws_of_a_second_model_are_no_samples(make: Callable[[], nn.Module], loss: str, draws: int) -> None:
    encoder, last = extend(make().double()), net(lambda own, z: own.h(z).squeeze(-1), h=linear(2, 1))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError):
        out = last(encoder(torch.rand(N, 3).double())[None] + torch.rand(draws, N, 2).double())
        LOSSES[loss](out, torch.ones_like(out)).backward()
    assert results(encoder) == results(last) == {}


def of_calls(join: Callable[..., Tensor], calls: int = 2) -> Callable[[], Tensor]:
    model = extend(nn.Linear(3, 2).double())
    return lambda: join(model, *(torch.rand(N, 3).double() for _ in range(calls)))


def alike(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1)


def two_orders(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    rows, one, other = torch.cat([m(a), m(b)]), torch.arange(2 * N).flip(0), torch.arange(2 * N).roll(3)
    return rows[one].square().sum() + rows[other].tanh().sum()


def masks(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    rows, mask = torch.cat([m(a), m(b)]), torch.tensor([1, 0, 1, 0, 0, 1, 1, 0]).bool()
    return (rows[mask] * rows[~mask]).square().sum()


MIXED: dict[str, Callable[[], Tensor]] = {
    "in two orders": of_calls(two_orders),
    "masks": of_calls(masks),
    "joined behind a residual": of_calls(lambda m, a, b: torch.cat([m(x) * m(x).tanh() for x in (a, b)]).square().sum()),
    "pairs": of_calls(lambda m, a, b, c, d: torch.cat([torch.cat([m(a), m(b)], 1), torch.cat([m(c), m(d)], 1)]).square().sum(), 4),
    "similarities": of_calls(lambda m, a, b, c, d: torch.cat([alike(m(a), m(b)), alike(m(c), m(d))]).tanh().square().sum(), 4),
    "a pair and a row": of_calls(lambda m, a, b, c: torch.cat([m(a) - m(b), m(c)]).square().sum(), 3),
}


@pytest.mark.parametrize("way", MIXED)
def test_samples_that_meet_are_refused(way: str) -> None:
    torch.manual_seed(0)
    loss = MIXED[way]()
    with backpack(BatchGrad()), pytest.raises(BackpackError):
        loss.backward()


PAIRS: dict[str, Callable[..., Tensor]] = {
    "a row in both": lambda a, b, c, d: torch.cat([alike(a, b), alike(a, c)]).tanh().square().sum(),
    "all rows in both": lambda a, b, c, d: torch.cat([alike(a, b), alike(b, a), a[:, 0], b[:, 1]]).exp().sum(),
    "pairs side by side": lambda a, b, c, d: torch.stack([alike(a, b), alike(c, d)], 1).logsumexp(1).sum(),
    "losses": lambda a, b, c, d: alike(a, b).exp().sum() + torch.stack([alike(c, d).sin().sum(), alike(a, c).sum()]).sum(),
    "a pair of pairs": lambda a, b, c, d: (torch.cat([a, b], 1) * torch.cat([c, d], 1)).exp().sum(),
}


@pytest.mark.parametrize("way", PAIRS)
def test_rows_of_several_calls_are_a_sample(way: str) -> None:
    torch.manual_seed(0)
    model, inputs = extend(nn.Linear(3, 2).double()), [torch.rand(N, 3).double() for _ in range(4)]
    with backpack(BatchGrad()):
        PAIRS[way](*map(model, inputs)).backward()
    for p in model.parameters():
        rows = [torch.autograd.grad(PAIRS[way](*(model(x[n : n + 1]) for x in inputs)), p)[0] for n in range(N)]
        close(p.grad_batch, torch.stack(rows))


def test_channels_of_samples_with_kernels_of_their_own() -> None:
    torch.manual_seed(0)
    model = net(lambda own, x: own.c(x.transpose(0, 1)).transpose(0, 1), c=lambda: nn.Conv1d(N, N, 3, padding=1, groups=N))
    x = torch.rand(N, 1, 6).double()
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    out = model(x)
    for p in model.parameters():
        close(p.grad_batch, torch.stack([torch.autograd.grad(row.square().sum(), p, retain_graph=True)[0] for row in out]))


@pytest.mark.parametrize("graphs", [2, 3])
def test_as_many_nodes_as_classes(graphs: int) -> None:
    """What a model of graphs is given first are nodes, and no samples."""
    torch.manual_seed(0)
    x, graph = torch.rand(6, 2).double(), torch.arange(6) % graphs
    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])

    def pooled(own: Any, data: dict[str, Tensor]) -> Tensor:
        nodes = own.h(data["x"]).tanh()
        nodes = nodes.index_add(0, data["edges"][1], nodes[data["edges"][0]])
        return nodes.new_zeros(int(data["graph"].max()) + 1, 6).index_add(0, data["graph"], nodes)

    model, target = net(pooled, h=linear(2, 6)), torch.rand(graphs, 6).double()
    with backpack(BatchGrad()):
        F.mse_loss(model({"x": x, "edges": edges, "graph": graph}), target).backward()
    losses = (pooled(model, {"x": x, "edges": edges, "graph": graph}) - target).square().mean(1) / graphs
    for p in model.parameters():
        close(p.grad_batch, torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses]))


@pytest.mark.parametrize("samples", [4, 5])
def test_rows_of_a_model_that_each_sample_of_another_uses(samples: int) -> None:
    encoder, head = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh())), extend(nn.Linear(4, 2))
    bank, x = torch.randn(4, 3), torch.randn(samples, 4)
    with pytest.raises(UnsupportedError), backpack(SumGradSquared()):
        head((x[:, None] * encoder(bank)).sum(2)).square().sum().backward()
    assert results(encoder) == {}


@pytest.mark.parametrize("extension", [BatchDiagGGNExact, DiagGGNExact, KFLR])
def test_loss_of_the_mean_of_all_samples(extension: type) -> None:
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), extend(nn.CrossEntropyLoss())
    with pytest.raises(UnsupportedError, match="not laid out like the output"), backpack(extension()):
        lossfunc(model(torch.randn(2, 3, 3)).mean((0, 1))[None], torch.tensor([1])).backward()
    assert results(model) == {}
