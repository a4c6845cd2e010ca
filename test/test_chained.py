"""Modules that are called one after the other, outside of any module: whose rows are the samples, where they disagree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_extensions import close
from test_model_outputs import results
from test_overhead import python_calls
from torch import Tensor, nn
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import cross_entropy

from backpack import backpack, extend
from backpack.extensions import KFLR, BatchGrad, BatchL2Grad, DiagGGNExact, Variance
from backpack.utils.errors import MixedSamplesError, UnsupportedError


def mlp(*sizes: int) -> Sequential:
    return Sequential(Linear(sizes[0], 5), Tanh(), Linear(5, sizes[1]))


class Parts(nn.Module):
    """Parts that are called apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rnn, self.positions, self.draws = mlp(4, 3), mlp(3, 2), nn.GRU(3, 3), nn.Embedding(6, 3), mlp(3, 3)
        self.forward_first = nn.GRU(3, 3, batch_first=True)
        self.double()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# parts, x [N, M, 4] -> prediction, of which the samples are rows for the last part, and something else for the first one
OTHER_AXES: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "draws first": lambda net, x: net.b(net.a(x[:, 0])[None] + noise(x.shape[1], len(x), 3)),
    "draws first, averaged": lambda net, x: net.b(net.a(x[:, 0])[None] + noise(x.shape[1], len(x), 3)).mean(0),
    "views stacked": lambda net, x: net.b(torch.stack([net.a(x[:, i]) for i in range(x.shape[1])])).mean(0),
    "axes exchanged": lambda net, x: net.b(net.a(x).transpose(0, 1)).transpose(0, 1).mean(1),
    "draws of a network": lambda net, x: net.b(net.a(x[:, 0])[None] + net.draws(noise(x.shape[1], len(x), 3))),
    "leaf modules": lambda net, x: net.b[2](net.a[0](x[:, 0])[None] + noise(x.shape[1], len(x), 5)),
}


@pytest.mark.parametrize("extensions", [(BatchGrad, Variance), (BatchL2Grad,), (DiagGGNExact, KFLR)])
@pytest.mark.parametrize(("samples", "others"), [(4, 1), (4, 2), (3, 4), (3, 3)])
@pytest.mark.parametrize("way", OTHER_AXES)
def test_samples_on_another_axis_of_a_later_part(way: str, samples: int, others: int, extensions: tuple[type, ...]) -> None:
    net, lossfunc = extend(Parts()), extend(nn.MSELoss())
    out = OTHER_AXES[way](net, torch.rand(samples, others, 4).double())
    with backpack(*(extension() for extension in extensions)), pytest.raises((UnsupportedError, MixedSamplesError)):
        lossfunc(out, torch.zeros_like(out)).backward()
    assert results(net) == {}


def test_message_of_other_axes() -> None:
    net = extend(Parts())
    out = OTHER_AXES["draws first"](net, torch.rand(4, 1, 4).double())
    said = r"a\.2 \(Linear\) returns \[4, 3\], and b\.\d \(\w+\), which comes later, \[1, 4, \d\].* 4 for the one and 1 for(.|\n)*a\.0\.weight"
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=said):
        out.square().mean().backward()


# parts, x [N, M, 4] -> prediction [N, 2]
AGREE: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "draws behind the samples": lambda net, x: net.b(net.a(x[:, 0])[:, None] + noise(7, x.shape[1], 3)[:1]).mean(1),
    "rows of a sample": lambda net, x: net.b(net.a(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)),
    "time first": lambda net, x: net.b(net.a(x.transpose(0, 1)).mean(0)),
    "time first, recurrent": lambda net, x: net.b(net.rnn(net.a(x.transpose(0, 1)))[0].mean(0)),
    "flattened for one part": lambda net, x: net.b(net.a(x.flatten(0, 1)).view(*x.shape[:2], 3)).mean(1),
    "flattened in front of a recurrent layer": lambda net, x: net.b(net.forward_first(net.a(x.flatten(0, 1)).view(*x.shape[:2], 3))[0][:, -1]),
    "positions": lambda net, x: net.b(net.a(x) + net.positions(torch.arange(x.shape[1]))).mean(1),
    "positions beside what is no part": lambda net, x: net.b(x[..., :3] + net.positions(torch.arange(x.shape[1]))).mean(1),
    "pieces": lambda net, x: net.b(torch.cat([net.a(part) for part in x[:, 0].split(1)])),
    "flattened, for the loss, too": lambda net, x: (
        net.b(net.a(x.flatten(0, 1)).view(*x.shape[:2], 3)).flatten(0, 1).unflatten(0, x.shape[:2]).mean(1)
    ),
    "positions, for the loss, too": lambda net, x: (
        net.b(net.a(x) + net.positions(torch.arange(x.shape[1]))).flatten(0, 1).unflatten(0, x.shape[:2]).mean(1)
    ),
}


@pytest.mark.parametrize(("samples", "others"), [(4, 1), (4, 2), (3, 5), (1, 3)])
@pytest.mark.parametrize("way", AGREE)
def test_samples_that_are_followed_through_parts(way: str, samples: int, others: int) -> None:
    torch.manual_seed(0)
    net, x, y = extend(Parts()), torch.rand(samples, others, 4).double(), torch.randint(2, (samples,))
    with backpack(BatchGrad()):
        cross_entropy(AGREE[way](net, x), y, reduction="sum").backward()
    used = {name: p for name, p in net.named_parameters() if p.grad is not None}
    rows = [torch.autograd.grad(cross_entropy(AGREE[way](net, x[n : n + 1]), y[n : n + 1]), [*used.values()]) for n in range(samples)]
    assert len(used) >= 4
    for parameter, *expected in zip(used.values(), *rows, strict=True):
        close(parameter.grad_batch, torch.stack(expected))


# ------------------------------------------------------------------------------------------------------------------ rows that are chosen, or put


class Tasks(nn.Module):
    """A trunk, heads of tasks, experts, and a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = mlp(4, 3), nn.ModuleList(Linear(3, 2) for _ in range(3))
        self.gate, self.experts, self.book = Linear(4, 2), nn.ModuleList(mlp(4, 3) for _ in range(2)), nn.Embedding(5, 3)
        self.double()


class TasksInside(Tasks):
    """Returns what each head makes of the samples of its task."""

    def forward(self, x: Tensor, task: Tensor) -> list[Tensor]:
        hidden = self.trunk(x).tanh()
        return [self.heads[k](hidden[task == k]) for k in range(2)]


def losses(outputs: list[Tensor]) -> Tensor:
    return sum(output.square().sum() for output in outputs)


# parts, x [N, 4], task [N] -> loss: as many samples of each task
CHOSEN: dict[str, Callable[[Tasks, Tensor, Tensor], Tensor]] = {
    "masks": lambda net, x, task: losses(TasksInside.forward(net, x, task)),
    "numbers": lambda net, x, task: losses([net.heads[k](h[(task == k).nonzero()[:, 0]]) for h in [net.trunk(x)] for k in range(2)]),
    "index_select": lambda net, x, task: losses(
        [net.heads[k](h.index_select(0, (task == k).nonzero()[:, 0])) for h in [net.trunk(x)] for k in range(2)]
    ),
    "functions in between": lambda net, x, task: losses([net.heads[k](h.sin()[task == k]) for h in [net.trunk(x)] for k in range(2)]),
    "returned": lambda net, x, task: losses(net(x, task)),
    "laid one behind the other": lambda net, x, task: torch.cat(TasksInside.forward(net, x, task)).square().sum(),
}


@pytest.mark.parametrize("extensions", [(BatchGrad, Variance), (BatchL2Grad,)])
@pytest.mark.parametrize("tasks", [[0, 1, 1, 0, 0, 1], [0, 0, 1, 1], [1, 0]], ids=str)
@pytest.mark.parametrize("way", CHOSEN)
def test_samples_of_several_tasks(way: str, tasks: list[int], extensions: tuple[type, ...]) -> None:
    net, task = extend(TasksInside()), torch.tensor(tasks)
    loss = CHOSEN[way](net, torch.rand(len(tasks), 4).double(), task)
    with backpack(*(extension() for extension in extensions)), pytest.raises(UnsupportedError, match=r"chosen by numbers or masks, \d for each"):
        loss.backward()
    assert results(net) == {}


def test_way_out_of_several_tasks() -> None:
    torch.manual_seed(0)
    net, x, task = extend(Tasks()), torch.rand(4, 4).double(), torch.tensor([0, 1, 1, 0])

    def loss(x: Tensor, task: Tensor) -> Tensor:
        hidden = net.trunk(x).tanh()
        return torch.where(task[:, None] == 0, net.heads[0](hidden), net.heads[1](hidden)).square().sum()

    with backpack(BatchGrad()):
        loss(x, task).backward()
    for parameter in (net.trunk[0].weight, net.heads[0].weight, net.heads[1].bias):
        expected = [torch.autograd.grad(loss(x[n : n + 1], task[n : n + 1]), parameter)[0] for n in range(4)]
        close(parameter.grad_batch, torch.stack(expected))


def put_by_experts(net: Tasks, x: Tensor, way: str, head: bool = False) -> Tensor:
    out, to = x.new_zeros(len(x), 3), torch.arange(len(x)) % 3 // 2  # expert 1 has a third of the samples
    for k, expert in enumerate(net.experts):
        rows = (to == k).nonzero()[:, 0]
        made = expert(x[rows]) * net.gate(x)[rows, k, None]
        if way == "index_add":
            out = out.index_add(0, rows, made)
        elif way == "index_copy":
            out = out.index_copy(0, rows, made)
        elif way == "scatter_add":
            out = out.scatter_add(0, rows[:, None].expand(-1, 3), made)
        else:
            out = out.clone()
            out[to == k if way == "assignment by a mask" else rows] = made
    return net.heads[0](out) if head else out


@pytest.mark.parametrize("way", ["index_add", "index_copy", "scatter_add", "assignment", "assignment by a mask"])
@pytest.mark.parametrize("samples", [3, 4, 5, 6])
def test_experts_that_are_called_by_hand(samples: int, way: str) -> None:
    torch.manual_seed(0)
    net, x = extend(Tasks()), torch.rand(samples, 4).double()
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=r"experts\.\d.*rows, which are put into a tensor of shape|not known"):
        put_by_experts(net, x, way).square().sum().backward()
    assert results(net) == {}
    with backpack(BatchGrad()):  # a module behind all of them tells
        put_by_experts(net, x, way, head=True).square().sum().backward()
    for parameter in (net.experts[1][0].weight, net.experts[0][2].bias, net.gate.weight):
        rows = [put_by_experts(net, x, way, head=True)[n].square().sum() for n in range(samples)]
        close(parameter.grad_batch, torch.stack([torch.autograd.grad(row, parameter, retain_graph=True)[0] for row in rows]))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_positions_that_are_told_apart_beside_other_modules(samples: int) -> None:
    torch.manual_seed(0)
    net, x, codes = extend(Tasks()), torch.rand(samples, 4, 4).double(), torch.randint(5, (samples * 4,))
    ways = (lambda table: table, lambda table: table.softmax(1).unsqueeze(1).squeeze(1), lambda table: table[:, :2].sum(1))
    for way in ways:
        told = way(net.book(codes)).view(samples, 4, -1)
        loss = (net.trunk(x).detach()[..., : told.shape[2]] - told).square().sum() + net.trunk(x).square().sum()
        with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=r"book \(Embedding\) returns \d+ rows, which are put into a tensor"):
            loss.backward()
    with backpack(BatchGrad(), Variance()):  # a row of codes for each sample
        table = net.book(codes.view(samples, 4))
        ((net.trunk(x).detach() - table).square().sum() + net.trunk(x).square().sum()).backward()
    assert len(net.book.weight.grad_batch) == samples


# parts, x [N, 4] -> loss, samples
STILL: dict[str, Callable[[Tasks, Tensor], tuple[Tensor, int]]] = {
    "the hardest": lambda net, x: ((hidden := net.trunk(x))[hidden.sum(1).topk(2).indices].square().sum(), len(x)),
    "the hardest, for a head": lambda net, x: (net.heads[0]((hidden := net.trunk(x))[hidden.sum(1).topk(2).indices]).square().sum(), 2),
    "views": lambda net, x: (losses([net.heads[k](part) for k, part in enumerate(net.trunk(x).split(len(x) // 2))]), len(x) // 2),
    "pairs by numbers": lambda net, x: (
        (net.heads[0]((hidden := net.trunk(x))[::2]) * net.heads[1](hidden[torch.arange(1, len(x), 2)])).sum(),
        len(x) // 2,
    ),
    "triplets": lambda net, x: (
        torch.nn.functional.triplet_margin_loss(
            *(net.heads[k](hidden[rows]) for hidden in [net.trunk(x)] for k, rows in enumerate(torch.arange(6).view(3, 2))),
            reduction="sum",
        ),
        2,
    ),
    "slices": lambda net, x: (losses([net.heads[0]((hidden := net.trunk(x))[:3]), net.heads[1](hidden[3:])]), 3),
    "a slice, and numbers": lambda net, x: (losses([net.heads[0]((hidden := net.trunk(x))[:3]), net.heads[1](hidden[torch.arange(3, 6)])]), 3),
    "slices, and a part": lambda net, x: (
        losses([net.heads[0]((hidden := net.trunk(x))[:3]), net.heads[1](hidden[3:]), hidden.split(3)[1].sin()]),
        3,
    ),
    "side by side": lambda net, x: (
        torch.cat([net.heads[k](hidden[torch.arange(k, 6, 2)]) for hidden in [net.trunk(x)] for k in range(2)], 1).square().sum(),
        3,
    ),
    "all, by numbers": lambda net, x: (losses([net.heads[k](hidden[torch.arange(6)]) for hidden in [net.trunk(x)] for k in range(2)]), 6),
    "other rows, beside": lambda net, x: (net.trunk(x).square().sum() + net.gate(x[:2]).view(1, -1).sum(), None),
}


@pytest.mark.parametrize("way", STILL)
def test_rows_that_are_chosen_and_known(way: str) -> None:
    torch.manual_seed(0)
    net, x = extend(Tasks()), torch.rand(6, 4).double()
    loss, samples = STILL[way](net, x)
    with backpack(BatchGrad()):
        loss.backward()
    used = [p for p in net.parameters() if p.grad is not None]
    assert len(used) >= 4
    for parameter in used:
        close(parameter.grad_batch.sum(0), parameter.grad)
        assert samples in (None, len(parameter.grad_batch))


def test_choices_at_many_steps_take_linear_time() -> None:
    """Rows that belong to the steps of a recurrent net, chosen one step after the other."""
    counts = []
    for steps in (20, 40):
        net = extend(Tasks())
        rows, hidden, state = torch.arange(3) * steps, net.trunk(torch.rand(3 * steps, 4).double()), torch.zeros(3, 3).double()
        for t in range(steps):
            state = (state + hidden[rows + t]).tanh()
        loss = net.heads[0](state).square().sum()
        with backpack(BatchGrad()):
            counts.append(python_calls(partial(loss.backward, retain_graph=True)))
        assert len(net.heads[0].weight.grad_batch) == len(net.trunk[0].weight.grad_batch) == 3
    assert counts[1] < 2.2 * counts[0]
