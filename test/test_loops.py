"""Loops over steps and samples that are written out: single rows and steps are cut out of one tensor, of which some are never read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases_nets import Net
from oracle import Oracle, Problem
from table import classify, default_dtype
from test_extensions import QUANTITIES, collect, run
from torch import Tensor, nn
from torch.nn import Linear

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
