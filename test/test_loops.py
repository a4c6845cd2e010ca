"""Loops over steps and samples that are written out: single rows and steps are cut out of one tensor, of which some are never read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases_nets import Net
from oracle import Oracle, Problem
from table import classify, default_dtype, every_second
from test_extensions import QUANTITIES, collect, run
from test_lstm import agree
from torch import Tensor, nn
from torch.nn import GRU, LSTM, RNN, Linear
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from backpack import backpack, extend
from backpack.core import arrangements
from backpack.core.plan import Plan
from backpack.core.walk import Walk
from backpack.extensions import HBP
from backpack.extensions.secondorder import hbp
from backpack.utils.errors import UnsupportedError

Read = Callable[[Tensor, int, int], Tensor]
# a step of a sample ``[1, D]``, cut out of ``[N, T, D]``
READS: dict[str, Read] = {
    "row and step": lambda z, n, t: z[n : n + 1, t],
    "sample and step cut": lambda z, n, t: z[n, t : t + 1],
    "entry": lambda z, n, t: z[n, t][None],
    "row, then step": lambda z, n, t: z[n : n + 1][:, t],
    "step, then row": lambda z, n, t: z[:, t][n : n + 1],
    "sample, then step cut": lambda z, n, t: z[n][t : t + 1],
    "row of the activation": lambda z, n, t: z[n : n + 1].tanh()[:, t],
    "row of the transposed": lambda z, n, t: z[n : n + 1].transpose(0, 1)[t],
    "row and step of an unsqueezed tensor": lambda z, n, t: z.unsqueeze(1)[n : n + 1, :, t].squeeze(1),
}
LENGTHS = ([1, 2, 4], [1, 1, 3], [2, 5, 1, 1])


def prepared(net: Net, x: Tensor, first: str) -> Tensor:
    """Return hidden steps; with time first, rows of the mini-batch are steps in memory, too."""
    z = net.a(x)
    return net.b(z.transpose(0, 1)).transpose(0, 1) if first == "time" else net.b(z)


def shrinking(net: Net, x: Tensor, lengths: list[int], first: str, ended: str) -> Tensor:
    """Sort the samples by length, and go on with those that have not ended."""
    length = torch.tensor(lengths)
    order = length.argsort(descending=True)
    z, done = prepared(net, x, first)[order], []
    z = z.transpose(0, 1) if first == "time" else z
    h = z.new_zeros(len(lengths), z.shape[2])
    for t in range(max(lengths)):
        active = int((length > t).sum())
        if ended == "kept":
            done.insert(0, h[active:])
            h = h[:active]
        new = torch.tanh((z[t, :active] if first == "time" else z[:active, t]) + net.c(h[:active]))
        h = new if ended == "kept" else torch.cat([new, h[active:]])
    return net.d(torch.cat([h, *done])[order.argsort()])


def one_by_one(net: Net, x: Tensor, lengths: list[int], read: Read, joined: str) -> Tensor:
    """Run each sample through its last steps, of which none but a few are read."""
    z, last = prepared(net, x, "sample"), []
    for n, length in enumerate(lengths):
        h = z.new_zeros(1, z.shape[2])
        for t in range(max(length - 2, 0), length):
            h = torch.tanh(read(z, n, t) + net.c(h))
        last.append(h)
    return net.d(torch.cat(last) if joined == "cat" else torch.stack([h[0] for h in last]))


def build(forward: Callable[..., Tensor], lengths: list[int], *how: object) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(1)
        x = torch.randn(len(lengths), max(lengths) + 1, 3)
        return classify(Net(partial(forward_of, forward, lengths, how), a=Linear(3, 2), b=nn.Tanh(), c=Linear(2, 2), d=Linear(2, 4)), x)


def forward_of(forward: Callable[..., Tensor], lengths: list[int], how: tuple[object, ...], net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return forward(net, x, lengths, *how)


def check(make: Callable[[], Problem]) -> None:
    """Compare with the oracle what is of each sample, and of all."""
    for name in ("BatchGrad", "BatchL2Grad", "BatchDiagGGNExact", "DiagHessian", "KFAC"):
        problem, quantity = make(), QUANTITIES[name]
        run(problem, quantity.make())
        quantity.check(Oracle(make()), collect(problem, quantity.field))


@pytest.mark.parametrize("ended", ["kept", "joined at each step"])
@pytest.mark.parametrize("first", ["sample", "time"])
@pytest.mark.parametrize("lengths", [*LENGTHS, [3], [2, 2, 2]], ids=str)
def test_mini_batch_that_gets_smaller(lengths: list[int], first: str, ended: str) -> None:
    check(partial(build, shrinking, lengths, first, ended))


@pytest.mark.parametrize("joined", ["cat", "stack"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("lengths", [*LENGTHS, [3]], ids=str)
def test_samples_one_by_one(lengths: list[int], read: str, joined: str) -> None:
    check(partial(build, one_by_one, lengths, READS[read], joined))


Sequence = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]


def batched(own: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs ``[T, D]`` of a sequence, and last states ``[D, H]``."""
    out, states = own(x[None] if own.batch_first else x[:, None])
    return out.squeeze(0 if own.batch_first else 1), (states[0] if isinstance(own, LSTM) else states).squeeze(1)


def without_batch(own: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D103
    out, states = own(x)
    return out, states[0] if isinstance(own, LSTM) else states


def packed(own: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D103
    axis = int(not own.batch_first)
    out, states = own(pack_padded_sequence(x.unsqueeze(axis), torch.tensor([len(x)]), batch_first=own.batch_first))
    return pad_packed_sequence(out, batch_first=own.batch_first)[0].squeeze(axis), (states[0] if isinstance(own, LSTM) else states).squeeze(1)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last step": lambda out, states: out[-1],
    "first step": lambda out, states: out[0],
    "all steps": lambda out, states: out.tanh().mean(0),
    "last state": lambda out, states: states[-1].repeat(2),
    "first and last state": lambda out, states: states[0].sin().repeat(2) + states[-1].repeat(2),
    "last state as a query": lambda out, states: (torch.softmax(out @ out[-1], 0)[:, None] * out).sum(0),
}


def sequences(net: Net, x: Tensor, lengths: list[int], ways: tuple[Sequence, str, str]) -> Tensor:
    """Run sequences of unequal length through a recurrent layer, one after the other."""
    (through, use, joined), z = ways, net.a(x)
    last = [USES[use](*through(net.own, z[n, :length])) for n, length in enumerate(lengths)]
    return net.b(torch.stack(last) if joined == "stack" else torch.cat([h[None] for h in last]))


def recurrent(own: Callable[[], nn.Module], lengths: list[int], dtype: torch.dtype, *ways: object) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float32):
        torch.manual_seed(1)
        forward = partial(sequences, lengths=lengths, ways=ways)
        problem = classify(Net(forward, a=Linear(3, 2), own=own(), b=Linear(4, 4)), torch.randn(len(lengths), max(lengths), 3))
    problem.model.to(dtype)
    problem.x = problem.x.to(dtype)
    gradients = torch.autograd.grad(problem.loss(problem.outputs()), list(problem.model.parameters()), allow_unused=True)
    for param, gradient in zip(problem.model.parameters(), gradients, strict=True):
        param.requires_grad_(gradient is not None)
    return problem


LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "RNN": (lambda: RNN(2, 2, 2, bidirectional=True), torch.float64),
    "GRU": (lambda: GRU(2, 2, bidirectional=True, batch_first=True), torch.float64),
    "LSTM": (lambda: LSTM(2, 2, 2, bidirectional=True, batch_first=True), torch.float64),
    "LSTM of single nodes": (lambda: LSTM(2, 2, 2, bidirectional=True), torch.float32),
}


@pytest.mark.parametrize("use", every_second(USES))
@pytest.mark.parametrize("through", [batched, without_batch, packed])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("lengths", [[3, 2, 4, 2], [4]], ids=str)
def test_sequences_one_by_one(lengths: list[int], layer: str, through: Sequence, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (own, dtype), joined = LAYERS[layer], "stack" if through is without_batch else "cat"
    for name in ("BatchGrad", "BatchDiagGGNExact", "KFLR"):
        quantity = QUANTITIES[name]
        problem, truth = (recurrent(own, lengths, kind, through, use, joined) for kind in (dtype, torch.float64))
        if dtype == torch.float32:
            agree(monkeypatch, quantity, problem, truth)
        else:
            run(problem, quantity.make())
            quantity.check(Oracle(truth), collect(problem, quantity.field))


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_that_see_one_sequence_are_read(layer: str) -> None:
    """As they are where they see a mini-batch."""
    problem = recurrent(LAYERS[layer][0], [3, 2, 4], LAYERS[layer][1], batched, "last step", "stack")
    for module in (problem.model, *problem.losses):
        extend(module)
    plan = Plan(Walk([problem.loss(problem.outputs()).grad_fn], True))
    assert len(plan.composites) == 3 * problem.model.own.num_layers * 2


class Pieces(nn.Module):
    """Two layers that see all samples, or some of them at a time."""

    def __init__(self, first: nn.Module, cut: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.first, self.last, self.cut = first, Linear(4, 3), cut

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.last(torch.tanh(self.first(rows)).flatten(1)) for rows in self.cut(x)])


CUTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "one by one": lambda x: list(x.split(1)),
    "pairs": lambda x: list(x.split(2)),
    "two": lambda x: [x[:4], x[4:]],
}


def mean_inputs(first: nn.Module, x: Tensor, cut: Callable[[Tensor], list[Tensor]]) -> list[list[Tensor]]:
    model, lossfunc = extend(Pieces(first, cut)), extend(nn.CrossEntropyLoss())
    options = (hbp.Curvature.GGN, hbp.LossHessianStrategy.EXACT, hbp.BackpropStrategy.SQRT, hbp.ExpectationApproximation.CHEN)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for param in model.parameters():
            nn.init.normal_(param)
    with backpack(HBP(*options)):
        lossfunc(model(x), torch.arange(len(x)) % 3).backward()
    return [list(param.hbp) for param in model.parameters()]


@pytest.mark.parametrize("most", [4, 0])
@pytest.mark.parametrize("cut", CUTS)
def test_means_of_inputs_are_those_of_all_samples(cut: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrangements, "_MOST_PADDING", most)
    monkeypatch.setattr(arrangements, "_SHORT", 0)
    arrangements.ragged.cache_clear()
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first = Linear(3, 4).double()
    with default_dtype(torch.float64):
        torch.testing.assert_close(mean_inputs(first, x, CUTS[cut]), mean_inputs(first, x, lambda x: [x]))
    arrangements.ragged.cache_clear()


def test_means_of_inputs_of_some_samples_are_refused() -> None:
    """Inputs of convolutions, which would be unfolded, are not put together."""
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedError, match="Mean inputs of a layer that is called for some of the samples at a time"):
        mean_inputs(nn.Conv1d(2, 2, 2), x, CUTS["pairs"])
    whole = mean_inputs(nn.Conv1d(2, 2, 2), x, lambda x: [x])
    assert [factor.shape for factor in whole[0]] == [(2, 2), (4, 4)]
