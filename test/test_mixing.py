"""Which functions of a mini-batch treat its samples alone: those that do are exact, those that mix them are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, cat, einsum, nn, stack
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from backpack import backpack, extend, results
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import MixedSamplesError, UnsupportedError

LENGTH, TOKENS = 3, 9
Function = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A function of a mini-batch, with layers, bare parameters and constants at hand."""

    def __init__(self, made: Function) -> None:
        super().__init__()
        self.made, self.layer, self.other, self.table = made, nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(TOKENS, 2)
        self.norm, self.weight, self.vector = nn.BatchNorm1d(2, affine=False), nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2))
        self.register_buffer("grid", torch.randn(8, 2))
        self.register_buffer("words", torch.arange(8))
        self.register_buffer("chosen", torch.tensor([0, 0, 3, 5]))
        self.register_buffer("edges", torch.randn(8, 8).relu().to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self, x)


def inside(made: Callable[[Tensor], Tensor]) -> Function:
    """Compute in a module inside."""

    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return made(x)

    return lambda net, x: net._modules.setdefault("inside", extend(Inside()))(x)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def problem(made: Function, samples: int, tokens: bool, **more: nn.Parameter) -> Problem:
    torch.manual_seed(0)
    x = torch.randint(TOKENS, (samples, LENGTH)) if tokens else torch.randn(samples, LENGTH, 2)
    model = Net(made)
    for name, parameter in more.items():
        model.register_parameter(name, parameter)
    out = model(x)
    used = torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
    for parameter, gradient in zip(list(model.parameters()), used, strict=True):
        parameter.requires_grad_(gradient is not None)
    return Problem(model, x, [Term(nn.MSELoss(), torch.randn_like(out))])


def run(made: Problem) -> None:
    extend(made.model)
    extend(made.losses[0])
    with backpack(BatchGrad(), DiagGGNExact()):
        made.loss(made.outputs()).backward()


def experts(net: Net, x: Tensor) -> Tensor:
    """The last of three experts may get no row."""
    out = torch.zeros_like(x[:, 0])
    for e, layer in enumerate((net.layer, net.other, net.layer)):
        chosen = (torch.arange(len(x)) % 2 == e).nonzero().flatten()
        out = out.index_add(0, chosen, layer(x[chosen, 0]))
    return out


def features_first(net: Net, x: Tensor) -> Tensor:
    softmax = net._modules.setdefault("softmax", extend(nn.LogSoftmax(0)))
    return softmax(net.layer(x).permute(2, 1, 0)).permute(2, 1, 0)


def messages(net: Net, h: Tensor) -> Tensor:
    """From nodes to nodes, along the edges of a graph that all samples use."""
    return h + torch.zeros_like(h).index_add(0, net.chosen, h[net.words[4:]].sin())


def pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 1))


def relative(length: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length) + length - 1


def grid(height: int, width: int) -> Tensor:
    lines = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return torch.stack(lines, -1).reshape(-1, 2)


def waves(length: int) -> Tensor:
    angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.1])
    return torch.stack([angles[:, 0].sin(), angles[:, 1].cos()], 1)


ALONE: dict[str, Function] = {
    "rows of a loop": lambda net, x: stack([(row @ net.weight).tanh().sum(0) for row in x]),
    "rows of a loop, minus their mean": lambda net, x: stack([h - h.mean() for h in (row @ net.weight for row in x)]),
    "rows of a loop, attention": lambda net, x: stack([torch.softmax(row @ net.weight @ row.T, 1) @ row for row in x]),
    "parts of one sample": lambda net, x: cat([part @ net.weight / (part @ net.weight).norm() for part in x.split(1)]),
    "points behind a layer": lambda net, x: net.layer(x[:, 0]) @ net.other(net.grid).T,
    "points behind a matrix": lambda net, x: net.layer(x[:, 0]) @ (net.grid @ net.weight).T,
    "attention to points": lambda net, x: torch.softmax(net.layer(x) @ net.layer(net.grid).T, 2) @ net.other(net.grid),
    "words": lambda net, x: net.layer(x) @ net.table(net.words).T,
    "positions": lambda net, x: torch.softmax(net.layer(x) @ net.table(torch.arange(7)).T, 2) @ net.other(net.grid[:7]),
    "positions, backwards": lambda net, x: einsum("ntc,kc->nkt", net.layer(x), net.table(torch.arange(6, -1, -1)[None])[0]),
    "relative positions": lambda net, x: einsum("ntc,tkc->nkt", net.layer(pad(x)), net.table(relative(LENGTH + 2))),
    "relative positions in boxes": lambda net, x: einsum("ntc,tkc->nkt", net.layer(pad(x)), net.table(relative(LENGTH + 2).abs().sqrt().long())),
    "relative positions of values": lambda net, x: einsum("ntk,tkc->ntc", x @ pad(x).mT, net.table(relative(LENGTH + 2)[None])[0, :LENGTH]),
    "waves": lambda net, x: net.layer(x) @ net.other(waves(7)).T,
    "waves on an axis in front": lambda net, x: einsum("ntc,kmc->nkt", net.layer(x), net.other(waves(7)[:, None])),
    "points of a grid": lambda net, x: einsum("ntc,mc->nm", net.layer(x), net.other(grid(3, 7))),
    "points of a grid on an axis": lambda net, x: net.layer(x) @ net.other(net.layer(grid(7, 3)[None])).mT.tanh(),
    "classes": lambda net, x: net.layer(x) @ net.other(net.table(torch.arange(2))).T,
    "a task": lambda net, x: net.layer(x) @ net.table(torch.tensor(3)) + x @ net.other(net.table(torch.tensor([4]))).T.squeeze(1),
    "points behind a normalization": lambda net, x: net.layer(x) * net.other(F.layer_norm(net.grid[: len(x)], (2,), net.vector)).square().mean(0),
    "weights made of coordinates": lambda net, x: F.linear(x, net.layer(net.grid) * 0.5),
    "graph of nodes": lambda net, x: torch.softmax(net.layer(net.grid[:LENGTH]) @ net.weight @ net.grid[:LENGTH].T, 1) @ net.other(x),
    "centers in the memory of the data": lambda net, x: (
        (net.layer(x)[:, :, None] - net._parameters.setdefault("centers", nn.Parameter(x[0]))).square().sum(3)
    ),
    "an expert without rows": experts,
    "messages in a graph": lambda net, x: net.layer(x) @ messages(net, net.other(messages(net, net.other(net.grid)))).T,
    "messages to some nodes": lambda net, x: x[:, 0] + messages(net, net.other(messages(net, net.layer(net.grid))))[torch.arange(len(x)).flip(0)],
    "messages to nodes of all": lambda net, x: x + messages(net, net.other(messages(net, net.layer(net.grid))))[(x[..., 0] > 0).long()],
    "messages, sparse": lambda net, x: x + torch.sparse.mm(net.edges, net.other(net.edges @ net.layer(net.grid)).sin())[(x[..., 0] > 0).long()],
    "messages, normalized": lambda net, x: x[:, 0] + F.layer_norm(messages(net, net.layer(net.grid)), (2,), eps=0.1)[torch.arange(len(x)).flip(0)],
    "batch norm of chosen words": lambda net, x: net.layer(x) + net.norm(net.table.weight[net.chosen]).square().mean(0),
    "batch norm of positions": lambda net, x: net.layer(x) + net.norm(net.table.weight[torch.arange(max(2, len(x)) + 2)[2:]]).square().mean(0),
    "softmax over features that come first": features_first,
    "classes, some of them used": lambda net, x: cat([x[:, 0] @ (c := net.grid @ net.weight).T, x[:, 1] * c[: len(x)]], 1),
}


def check(function: Function, differentiated: bool = False) -> None:
    for samples in (1, 2, 4, 5):
        made, oracle = problem(function, samples, False), Oracle(problem(function, samples, False))
        made.x.requires_grad_(differentiated)
        run(made)
        ggn = sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))
        for parameter_name, parameter in made.model.named_parameters():
            if parameter.requires_grad:
                close(parameter.grad_batch, oracle.grad_batch[parameter_name])
                close(parameter.diag_ggn_exact, ggn[parameter_name])


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_samples_alone(name: str, differentiated: bool) -> None:
    """Whether the gradient of the input is asked for makes no difference, here and below."""
    check(ALONE[name], differentiated)


MIXED: dict[str, Function] = {
    "batch norm of twins": lambda net, x: sum(net.norm(net.layer(cat([x[:, 0], 2 * x[:, 1]]))).chunk(2)),
    "batch norm of frames": lambda net, x: net.norm(net.layer((x - 0.5).flatten(0, 1))).view(x.shape),
    "negatives of other samples": lambda net, x: torch.softmax(net.layer(x[:, 0]) @ net.other(x[:, 1:].flatten(0, 1)).T, 1)[:, :2],
    "twins beside each other": lambda net, x: torch.softmax(net.layer(x[:, 0]) @ net.other(cat([x[:, 1], x[:, 2]]) * 2).T, 1)[:, :2],
    "means over everything": lambda net, x: net.layer(x) + inside(lambda x: net.other(2 * x.flatten(0, 1)).mean(0))(net, x),
    "sums of scaled copies": lambda net, x: net.layer(x) + inside(lambda x: ((2 * x.flatten(0, 1)) * net.vector).mean(0))(net, x),
    "sums of moved copies": lambda net, x: net.layer(x) + inside(lambda x: (x.flatten(0, 1) * 2 + net.vector).tanh().mean(0))(net, x),
    "copies of other samples": lambda net, x: torch.softmax(net.layer(x[:, 0]) @ net.other(x[1:, 0].clone()).T, 1)[:, :1],
    "batch norm of what data choose of nodes": lambda net, x: net.norm(messages(net, net.layer(net.grid))[(x[:, 0, 0] > 0).long()]),
    "batch norm behind a sum": lambda net, x: net.norm((x + net.vector)[:, 0]),
    "batch norm behind a matrix": lambda net, x: net.norm((2 * x[:, 0]) @ net.weight),
    "batch norm behind a convolution": lambda net, x: net.norm(F.conv1d(F.pad(x.mT, (1, 1)), net.weight[..., None])),
    "function of batch statistics": lambda net, x: F.batch_norm(F.linear(F.normalize(x[:, 0]), net.weight), None, None, training=True),
    "softmax over samples": lambda net, x: (x + net.vector).softmax(0),
    "softmax over samples, a module": lambda net, x: net._modules.setdefault("soft", extend(nn.Softmax(0)))(x + net.vector),
    "layer over samples": lambda net, x: net._modules.setdefault("over", extend(nn.Linear(len(x), len(x))))(net.layer(x[:, 0]).T).T,
    "layer norm over samples": lambda net, x: net._modules.setdefault("over", extend(nn.LayerNorm(len(x))))(net.layer(x[:, 0]).T).T,
    "softmax over samples, by default": lambda net, x: net._modules.setdefault("soft", extend(nn.Softmax2d()))(net.layer(x)),
    "keys that lie evenly": lambda net, x: net.layer(x[:, 0]) @ net.other(torch.linspace(0, 1, 2 * len(x)).view(-1, 2)).T,
    "keys that are repeated": lambda net, x: net.layer(x[:, 0]) @ net.other((2 * x[1:, 0]).repeat_interleave(2, 0)).T[:, :1],
    "keys that are moved": lambda net, x: net.layer(x[:, 0]) @ net.other(cat([x[1:, 0], x[1:, 0] + 1])).T[:, :1],
    "keys of all samples": lambda net, x: torch.softmax(net.layer(x[:, 0]) @ net.other(x[:, 1]).T, 1) @ x[:, 0],
    "keys of prepared data": lambda net, x: torch.softmax(x[:, 0] @ ((3 * x[:, 1]) @ net.weight).T, 1) @ x[:, 0],
    "values of prepared data": lambda net, x: torch.softmax(x[:, 0] @ net.weight @ x[:, 1].T, 1) @ ((3 * x[:, 0]) @ net.layer.weight),
    "negatives of prepared data": lambda net, x: torch.softmax(x[:, 0] @ ((3 * x[:, 1:]).flatten(0, 1) @ net.weight).T, 1)[:, :2],
    "batch norm of prepared frames": lambda net, x: net.norm((x / 3).flatten(0, 1) @ net.weight).view(x.shape),
}
MIXED_TOKENS: dict[str, Function] = {
    "flat": lambda net, x: net.table(x) + net.table(x.reshape(-1)).view(*x.shape, 2).sum(0),
    "flat, positions in front": lambda net, x: net.table(x) + net.table(x.T.reshape(-1)).view(LENGTH, -1, 2).amax(1),
    "positions in front": lambda net, x: net.table(x) + F.embedding(x.T, net.table.weight).mean(1),
    "bag": lambda net, x: net.table(x) + F.embedding_bag(x.T.reshape(-1), net.table.weight, torch.arange(0, x.numel(), len(x)), mode="sum"),
    "chosen rows": lambda net, x: net.table(x) + net.table.weight[x.T.reshape(-1)].view(LENGTH, -1, 2).sum(1),
    "batch norm of what computed numbers name": lambda net, x: net.norm(F.embedding(x[:, 0] % 4 * 2, net.table.weight)),
    "batch norm of rows that computed numbers choose": lambda net, x: net.norm(net.layer(net.table.weight[x[:, 0] % 4 * 2])),
    "batch norm of rows that computed numbers choose, positions": lambda net, x: net.norm(net.table.weight[x + 0].mean(1)),
    "batch norm of rows, selected": lambda net, x: net.norm(net.table.weight.index_select(0, x[:, 0] % 4 * 2)),
}


@pytest.mark.parametrize(("name", "differentiated"), [*product(MIXED, [False, True]), *product(MIXED_TOKENS, [False])])
def test_mixed_samples(name: str, differentiated: bool) -> None:
    for samples in (2, 4, 5):
        made = problem({**MIXED, **MIXED_TOKENS}[name], samples, name in MIXED_TOKENS)
        made.x.requires_grad_(differentiated)
        with pytest.raises(MixedSamplesError, match=r"mixes them|is summed over the"):
            run(made)
        assert results(made.model) == {}


PREPARED: dict[str, Function] = {
    "rows": lambda net, x: (2 * x[:, 0]) @ net.weight,
    "positions": lambda net, x: (x / 3) @ net.weight,
    "positions, flat": lambda net, x: F.linear((x / 3).flatten(0, 1), net.weight, net.vector).view(x.shape),
    "positions in front": lambda net, x: ((x.transpose(0, 1) / 3) @ net.weight).transpose(0, 1),
    "matrix in front": lambda net, x: (net.weight @ (x / 3).mT).mT,
    "rows, matrix in front": lambda net, x: (net.weight @ (x[:, 0] / 3).T).T,
    "scaled": lambda net, x: (x / 3) * net.vector,
    "scaled, flat": lambda net, x: ((x / 3).flatten(0, 1) * net.vector).view(x.shape),
    "moved": lambda net, x: ((x / 3).flatten(0, 1) + net.vector).view(x.shape),
    "convolution": lambda net, x: F.conv1d((x / 3).mT, net.weight[..., None]).mT,
}
TOGETHER: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "batch norm": lambda net, h: net.norm(h.movedim(-1, 1)).movedim(1, -1),
    "centered": lambda net, h: h - h.mean(0),
    "standardized": lambda net, h: (h - h.mean(0)) / h.std(0),
    "divided by the norm": lambda net, h: h / h.norm(),
    "minus the maximum": lambda net, h: h - h.max(),
    "plus the first": lambda net, h: h + h[:1],
    "softmax": lambda net, h: h.softmax(0),
    "cumulative": lambda net, h: h.cumsum(0),
    "normalized": lambda net, h: F.normalize(h, dim=0),
    "attention": lambda net, h: torch.softmax(h.flatten(1) @ h.flatten(1).T, 1) @ h.flatten(1),
    "messages": lambda net, h: h + torch.zeros_like(h).index_add(0, net.chosen[:1], h[net.words[1:2]].sin()),
    "averaged by a matrix": lambda net, h: torch.tensordot(torch.ones(len(h), len(h)), h, 1),
}
APART: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "function": lambda net, h: h.tanh() - h.mean(1, keepdim=True),
    "attention": lambda net, h: torch.softmax(h.unsqueeze(-1) * h.unsqueeze(-2), -1).sum(-1),
    "points": lambda net, h: torch.softmax(h @ (net.grid @ net.weight).T, -1) @ net.grid,
    "points of a grid": lambda net, h: h @ (grid(3, 7) @ net.weight).T,
    "waves": lambda net, h: h @ (waves(7) @ net.weight).T,
    "positions": lambda net, h: h @ F.embedding(torch.arange(6), net.table.weight).T,
    "weights made of constants": lambda net, h: h @ (net.grid[:2] @ net.weight).tanh(),
    "weights made of parameters": lambda net, h: h @ (net.weight + net.layer.weight @ net.other.weight),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("how", [how for how in PREPARED if how != "rows, matrix in front"])
def test_prepared_samples_alone(how: str, name: str) -> None:
    """A model may compute something of its input first, and call functions alone."""
    check(lambda net, x: APART[name](net, PREPARED[how](net, x)))


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("how", PREPARED)
def test_prepared_samples_that_are_mixed(how: str, name: str) -> None:
    for samples in (2, 4, 5):
        made = problem(lambda net, x: TOGETHER[name](net, PREPARED[how](net, x)), samples, False)
        with pytest.raises((MixedSamplesError, UnsupportedError), match=r"influence one another|may have samples elsewhere|in another order"):
            run(made)
        assert results(made.model) == {}


REORDERED: dict[str, Function] = {
    "mixup": lambda net, x: net.other(0.7 * (h := net.layer(x).relu()) + 0.3 * h[torch.arange(len(x) - 1, -1, -1)]),
    "neighbours": lambda net, x: (h := net.layer(x)) - h.roll(1, 0),
    "neighbours, positions in front": lambda net, x: ((h := net.other(x.transpose(0, 1))) - h.roll(1, 1)).transpose(0, 1),
}


@pytest.mark.parametrize("name", REORDERED)
def test_samples_in_two_orders(name: str) -> None:
    for samples in (2, 4, 5):
        made = problem(REORDERED[name], samples, False)
        with pytest.raises(MixedSamplesError, match=r"influence one another: they lie in one order on axis \d of a tensor.*x\[permutation\]"):
            run(made)
        assert results(made.model) == {}


def compare_with_each(model: nn.Module, x: Tensor) -> None:
    """Compare gradients of samples with those of mini-batches of one."""
    with backpack(BatchGrad()):
        (model(x) ** 3).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alone = [torch.autograd.grad((model(row) ** 3).sum(), trained) for row in x.split(1)]
    for parameter, gradients in zip(trained, zip(*alone, strict=True), strict=True):
        close(parameter.grad_batch, torch.stack(gradients))


FIRST: dict[str, Function] = {
    "product": lambda net, x: x @ net.first,
    "sum": lambda net, x: x + net.first[0],
    "function of a product": lambda net, x: (x @ net.first).tanh(),
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_samples_behind_a_parameter_that_is_left_out(name: str, first: str) -> None:
    """What is made of data and of such a parameter has samples, as what is made of data alone."""
    made = problem(lambda net, x: MIXED[name](net, FIRST[first](net, x)), 4, False, first=nn.Parameter(torch.randn(2, 2)))
    left = [p for key, p in made.model.named_parameters() if p.requires_grad and key != "first"]
    with pytest.raises(MixedSamplesError) if left else nullcontext(), backpack(BatchGrad(exclude=["first"])):
        extend(made.losses[0])(extend(made.model)(made.x), made.terms[0].target).backward()
    assert results(made.model) == {}


@pytest.mark.parametrize("number", [6, 7])
def test_points_that_the_model_is_given(number: int) -> None:
    """They may be rows of samples, as nodes of graphs are; those of a buffer are not."""

    class Operator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch, self.trunk = nn.Linear(3, 4), nn.Linear(2, 4)
            self.register_buffer("points", torch.randn(number, 2))

        def forward(self, x: Tensor, points: Tensor | None = None) -> Tensor:
            return self.branch(x) @ self.trunk(self.points if points is None else points).tanh().T

    torch.manual_seed(0)
    x, model = torch.randn(3, 3), extend(Operator())
    compare_with_each(model, x)
    with pytest.raises(MixedSamplesError, match=r"mixes them .*same for all samples: then make that of a buffer"), backpack(BatchGrad()):
        (model(x, torch.randn(number, 2)) ** 2).sum().backward()


class Placed(nn.Module):
    """Reads the places of the first sample, which are those of all."""

    def __init__(self, first: int | slice) -> None:
        super().__init__()
        self.values, self.places, self.first = nn.Linear(1, 2), nn.Linear(1, 2), first

    def forward(self, x: Tensor) -> Tensor:
        return self.values(x[..., 1:]).tanh() + self.places(x[self.first, :, :1])


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("first", [0, slice(1)])
def test_places_that_samples_share(first: int | slice, samples: int) -> None:
    places, x = torch.randn(1, LENGTH, 1).expand(samples, -1, -1), torch.randn(samples, LENGTH, 1)
    compare_with_each(extend(Placed(first)), cat([places, x], 2))


@pytest.mark.parametrize("samples", [3, 4, 5])
def test_frozen_prototypes(samples: int) -> None:
    """They are no samples, however many there are."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(3, 2), parametrizations.weight_norm(nn.Linear(3, 2))
            self.key.parametrizations.weight.original1.requires_grad_(False)
            self.table = nn.Parameter(torch.randn(4, 3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.query(x) @ self.key(self.table).T, 1) @ self.table

    torch.manual_seed(0)
    compare_with_each(extend(Attention()), torch.randn(samples, 3))


@pytest.mark.parametrize(
    "bias", [lambda net: net.table(net.places), lambda net: F.embedding(net.places, net.table.weight)], ids=["layer", "function"]
)
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_numbers_of_a_buffer_are_no_samples(samples: int, bias: Callable[[nn.Module], Tensor]) -> None:
    """Relative positions, of as many positions as there are samples."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.table = nn.Linear(3, 3), nn.Embedding(4, 1)
            self.register_buffer("places", (torch.arange(4)[:, None] - torch.arange(4)).abs())

        def forward(self, x: Tensor) -> Tensor:
            return ((self.query(x) @ x.mT + bias(self)[..., 0]).softmax(2) @ x).mean(1)

    torch.manual_seed(0)
    compare_with_each(extend(Attention()), torch.randn(samples, 4, 3))


RELATIVE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "layer": lambda net, places: net.table(places),
    "function": lambda net, places: F.embedding(places, net.table.weight),
    "index": lambda net, places: net.table.weight[places],
}


class Relative(nn.Module):
    """Attention with a bias that is looked up for numbers that the forward pass computes, of no input or of the mini-batch."""

    def __init__(self, look_up: Callable[[nn.Module, Tensor], Tensor], places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.table, self.look_up, self.places = nn.Linear(3, 3), nn.Embedding(9, 1), look_up, places

    def forward(self, x: Tensor) -> Tensor:
        bias = self.look_up(self, self.places(x)).permute(2, 0, 1)
        return ((self.query(x) @ x.mT + bias).softmax(2) @ x).mean(1)


@pytest.mark.parametrize("samples", [1, 3, 4, 5])
@pytest.mark.parametrize("name", RELATIVE)
def test_relative_positions_are_no_samples(name: str, samples: int) -> None:
    torch.manual_seed(0)
    model = Relative(RELATIVE[name], lambda x: (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).clamp(-2, 2) + 2)
    compare_with_each(extend(model), torch.randn(samples, 4, 3))


@pytest.mark.parametrize(
    "places", [lambda x: (x[..., 0] > 0).long(), lambda x: (x[..., 0] > 9).long(), lambda x: x.argsort(1)[..., 0]], ids=["signs", "the same", "order"]
)
@pytest.mark.parametrize("name", RELATIVE)
def test_numbers_that_data_tell_are_samples(name: str, places: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = extend(Relative(RELATIVE[name], places))
    with pytest.raises(MixedSamplesError), backpack(BatchGrad()):
        (model(torch.randn(4, 4, 3)) ** 3).sum().backward()
    assert results(model) == {}


TABLES: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]] = {
    "parameter": lambda part, x: (part.layer(x), part.table),
    "function of a parameter": lambda part, x: (part.layer(x), 2 * part.table.softmax(0) + 0.1),
    "layer of a parameter": lambda part, x: (part.layer(x), part.other(part.table)),
    "layer of a buffer": lambda part, x: (part.layer(x), part.other(part.points).tanh()),
    "copies": lambda part, x: (part.layer(x)[:, None], part.other(part.points).expand(len(x), -1, -1)),
}


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", TABLES)
def test_tables_that_a_module_returns_beside_samples(name: str, samples: int) -> None:
    """They are no samples, although the module was given some."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other, self.table = nn.Linear(3, 2), nn.Linear(2, 2), nn.Parameter(torch.randn(2, 2))
            self.register_buffer("points", torch.randn(2, 2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return TABLES[name](self, x)

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            features, table = self.part(x)
            return (features @ table.mT).flatten(1)

    torch.manual_seed(0)
    model = Scores()
    for parameter in model.parameters():
        used = torch.autograd.grad(model(torch.randn(1, 3)).sum(), parameter, allow_unused=True)[0] is not None
        parameter.requires_grad_(used)
    compare_with_each(extend(model), torch.randn(samples, 3))


def test_nodes_of_graphs_are_no_constants() -> None:
    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooled, self.keys = nn.Linear(2, 4), nn.Linear(2, 4)

        def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:
            pooled = torch.zeros(3, 4).index_add(0, graph, self.pooled(nodes))
            return (pooled @ self.keys(nodes).T).softmax(1) @ nodes

    model = extend(Graphs())
    with pytest.raises(MixedSamplesError), backpack(BatchGrad()):
        (model(torch.randn(7, 2), torch.tensor([0, 0, 0, 1, 1, 2, 2])) ** 2).sum().backward()
    assert results(model) == {}


def test_states_of_recurrent_layers() -> None:
    """``[1, N, H]``, with the samples on axis 1, as the layer says."""

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(2, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[1]

    torch.manual_seed(0)
    model, x = extend(States()), torch.randn(4, 5, 2)
    compare_with_each(model, x)


class Words(nn.Module):
    """Adds to each sample the mean of all words of the mini-batch, whatever it is given in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.all = nn.Embedding(7, 5), nn.Embedding(7, 5)

    def forward(self, weights: Tensor | float, words: Tensor) -> Tensor:
        return self.own(words).mean(1) * weights + self.all(words.flatten().clone()).mean(0)


@pytest.mark.parametrize("how", ["alone", "behind another model", "in front of another model", "behind other data"])
def test_numbers_of_all_samples_are_known_again(how: str) -> None:
    """Wherever among what models were given they are."""
    model, other = extend(Words()), extend(nn.EmbeddingBag(7, 5))
    words, others, target = torch.randint(7, (4, 3)), torch.randint(7, (4, 3)), torch.randn(4, 5)
    if how == "behind another model":
        before = other(others)
        out = model(1.0, words) - before
    else:
        out = model(torch.rand(4, 1) if how == "behind other data" else 1.0, words)
        out = out - other(others) if how == "in front of another model" else out
    with backpack(BatchGrad()), pytest.raises(MixedSamplesError, match=r"all\.weight"):
        F.mse_loss(out, target).backward()
    assert results(model) == {}


def test_samples_that_lie_evenly_are_no_positions() -> None:
    """A model that is called with ``arange`` compares its samples with one another."""
    net = Net(lambda net, x: net.table(x) @ net.keys(x).T)
    net.keys = nn.Embedding(TOKENS, 2)
    extend(net)
    with backpack(BatchGrad()), pytest.raises(MixedSamplesError):
        net(torch.arange(5)).square().sum().backward()
    assert results(net) == {}


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_mini_batches_that_a_model_keeps_are_no_constants(extension: type) -> None:
    """What it was given may be a buffer of it, as memories are."""

    def compare(net: Net, x: Tensor) -> Tensor:
        net.grid = x
        return net.layer(x) @ net.other(net.grid).T

    net, x = extend(Net(compare)), torch.randn(5, 2)
    with backpack(extension()), pytest.raises((MixedSamplesError, UnsupportedError)):
        F.mse_loss(net(x), torch.zeros(5, 5)).backward()
    assert results(net) == {}


LOW_RANK: dict[str, Callable[[nn.ParameterDict], Tensor]] = {
    "multiple of a factor": lambda p: p["w"] + (0.5 * p["b"]) @ p["a"],
    "directions": lambda p: p["g"] * (p["b"] @ p["a"] / (p["b"] @ p["a"]).norm(dim=1, keepdim=True)),
}


@pytest.mark.parametrize("made", LOW_RANK)
@pytest.mark.parametrize("out", ["b", "a"])
@pytest.mark.parametrize("samples", [2, 4])
def test_a_factor_that_is_left_out_is_known_to_be_a_parameter(made: str, out: str, samples: int) -> None:
    """What is made of it alone has no samples, though a mini-batch may be as long as it, or a part of that."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = {"w": (4, 4), "a": (2, 4), "b": (4, 2), "g": (4, 1)}
            self.parts = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, LOW_RANK[made](self.parts))

    torch.manual_seed(0)
    model, x = extend(nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(4, 3))), torch.randn(samples, 4)
    y = torch.arange(samples) % 3
    for options in ({}, {"inputs": [p for name, p in model.named_parameters() if not name.endswith(f".{out}")]}):
        with backpack(BatchGrad(exclude=[] if options else [f"*.{out}"])):
            F.cross_entropy(model(x), y).backward(**options)
        used = {name: p for name, p in model.named_parameters() if hasattr(p, "grad_batch")}
        assert f"0.parts.{out}" not in used
        for n in range(samples):
            gradients = torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / samples, list(used.values()))
            for parameter, gradient in zip(used.values(), gradients, strict=True):
                close(parameter.grad_batch[n], gradient)
        for parameter in used.values():
            del parameter.grad_batch
