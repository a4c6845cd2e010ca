"""Another axis that happens to be as long as the mini-batch, and calls for other samples each: exact, or refused, whatever the lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear, Module
from torch.nn import functional as F

from backpack import backpack, extend
from backpack.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact, Variance
from backpack.utils.errors import BackpackError, MixedSamplesError, UnsupportedError

EXPERTS = 4
LENGTHS = [1, 3, EXPERTS, 5]
Function = Callable[["Net", Tensor], Tensor]


class Net(Module):
    """A function with some layers at hand, of which as many outputs as there are experts."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.trunk, self.last, self.first = Linear(3, 5), Linear(5, EXPERTS), Linear(3, EXPERTS)
        self.experts = nn.ModuleList(Linear(3, 3) for _ in range(EXPERTS))
        self.recurrent, self.function = nn.GRU(5, 5), function
        self.register_buffer("grid", torch.randn(EXPERTS, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def stack(self, x: Tensor) -> Tensor:
        return torch.stack([self.first.weight * k for k in range(1, EXPERTS + 1)])


def make(function: Function) -> Net:
    torch.manual_seed(0)
    return Net(function).double()


def rows_of(model: Module, losses: Tensor) -> dict[str, Tensor]:
    """Gradients of each summand, by plain autograd."""
    named = dict(model.named_parameters())
    grads = [torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True) for loss in losses]
    return {
        name: torch.stack([torch.zeros_like(p) if grad[i] is None else grad[i] for grad in grads])
        for i, (name, p) in enumerate(named.items())
        if any(grad[i] is not None for grad in grads)
    }


def compare(function: Function, losses: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> None:
    labels = torch.arange(len(x)) % 3
    expected = rows_of(model := make(function), losses(model(x), labels) / len(x))
    model = extend(make(function))
    with backpack(BatchGrad()):
        (losses(model(x), labels) / len(x)).sum().backward()
    found = {name: p.grad_batch for name, p in model.named_parameters() if hasattr(p, "grad_batch")}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


def of_mean(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.mean(0), y, reduction="none")


def of_turned(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.T, y, reduction="none")


def of_rows(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


ELSEWHERE: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "experts": (lambda net, x: torch.stack([expert(x) for expert in net.experts]), of_mean),
    "experts on changed data": (lambda net, x: torch.stack([expert(x * 2 + k) for k, expert in enumerate(net.experts)]), of_mean),
    "experts, two layers": (lambda net, x: torch.stack([net.last(net.trunk(x + k).tanh()) for k in range(EXPERTS)]), of_mean),
    "turned": (lambda net, x: net.first(x).T, of_turned),
    "turned, changed data": (lambda net, x: net.first(x.exp()).T, of_turned),
    "a second output": (lambda net, x: (net.trunk(x), torch.stack([expert(x) for expert in net.experts]))[1], of_mean),
}
"""Outputs without the samples on axis 0; the numbers of samples are told by layers inside, unless there are as many experts."""
FUNCTIONAL: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": (lambda net, x: torch.stack([F.linear(x, weight) for weight in net.stack(x)]), of_mean),
    "linear, changed data": (lambda net, x: torch.stack([F.linear(x + 1, weight) for weight in net.stack(x)]), of_mean),
    "linear, turned": (lambda net, x: F.linear(x, net.first.weight, net.first.bias).T, of_turned),
    "linear, turned, changed data": (lambda net, x: F.linear(2 * x, net.first.weight, net.first.bias).T, of_turned),
    "einsum": (lambda net, x: torch.einsum("ni,eoi->eno", x, net.stack(x)), of_mean),
    "einsum, changed data": (lambda net, x: torch.einsum("ni,eoi->eno", x.sin(), net.stack(x)), of_mean),
    "matmul": (lambda net, x: x @ net.stack(x).mT, of_mean),
    "bmm": (lambda net, x: torch.bmm(x.expand(EXPERTS, *x.shape), net.stack(x).mT), of_mean),
    "copies": (lambda net, x: net.first(x.expand(EXPERTS, *x.shape)), of_mean),
    "convolution": (lambda net, x: F.conv1d(x[:, :, None], net.first.weight[:, :, None]).squeeze(2).T, of_turned),
    "product": (lambda net, x: (x * net.experts[0].weight[:1]).sum(1, keepdim=True).mul(torch.arange(4)).T, of_turned),
}
"""The same without layers inside, or with one that is called with all of them."""


REFUSED = r"would (lie on axis|be all of sample)|ambiguous|influence one another"


@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_samples_elsewhere(name: str, N: int) -> None:
    function, losses = ELSEWHERE[name]
    x = torch.randn(N, 3, dtype=torch.float64)
    if N != EXPERTS:
        compare(function, losses, x)
        return
    with pytest.raises((UnsupportedError, MixedSamplesError), match=REFUSED):
        compare(function, losses, x)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_samples_elsewhere_in_functions(name: str) -> None:
    function, losses = FUNCTIONAL[name]
    x = torch.randn(EXPERTS, 3, dtype=torch.float64)
    with pytest.raises((UnsupportedError, MixedSamplesError), match=REFUSED):
        compare(function, losses, x)


@pytest.mark.parametrize("zero", [True, False])
def test_products_of_what_is_zero(zero: bool) -> None:
    """Nothing tells of which samples the rows are, and all gradients are zero; else the samples mix."""
    net = make(lambda net, x: F.linear(x, net.stack(x)[0]) @ F.linear(x.sin(), net.stack(x)[0]).T)
    if zero:
        nn.init.zeros_(net.first.weight)
    extend(net)
    with backpack(BatchGrad()):
        loss = F.cross_entropy(net(torch.randn(3, 3, dtype=torch.float64)), torch.arange(3))
        if zero:
            loss.backward()
            assert not net.first.weight.grad_batch.any()
            return
        with pytest.raises(MixedSamplesError):
            loss.backward()


def test_errors_name_the_layer_and_the_way_out() -> None:
    with pytest.raises(UnsupportedError, match=r"experts.0 \(Linear\) is given, of shape \[4, 3\], would be all of sample 0.*\[N, E, C\].*exclude="):
        compare(*ELSEWHERE["experts"], torch.randn(EXPERTS, 3, dtype=torch.float64))
    message = r"experts.0 \(Linear\) is given, .* be all of sample 0, but it may have .* where it comes from is not recorded"
    with pytest.raises(UnsupportedError, match=message):
        compare(*ELSEWHERE["experts on changed data"], torch.randn(EXPERTS, 3, dtype=torch.float64))


WHERE_THEY_SHOULD_BE: dict[str, Function] = {
    "rows, one by one": lambda net, x: torch.stack([net.first(row) for row in x]),
    "rows of one, one by one": lambda net, x: torch.cat([net.first(x[i : i + 1]) for i in range(len(x))]),
    "steps in front": lambda net, x: net.last(net.recurrent(net.trunk(x.expand(EXPERTS, *x.shape)))[0][-1]),
    "another order": lambda net, x: net.first(x.flip(0)).flip(0),
    "rolled": lambda net, x: net.first(x).roll(1, 0).roll(-1, 0),
    "some rows": lambda net, x: torch.zeros(len(x), EXPERTS, dtype=x.dtype).index_add(0, (rows := torch.arange(0, len(x), 2)), net.first(x[rows])),
    "a scale from the data": lambda net, x: net.first(x)[torch.arange(len(x))] * x.norm(dim=1, keepdim=True),
    "rows that are dropped": lambda net, x: torch.where(torch.arange(len(x))[:, None] > 0, net.first(x) * x.exp().sum(1)[:, None], 1.0),
    "a buffer of as many rows": lambda net, x: net.first(x) + net.first(net.grid).T.mean(0),
    "steps in front, a gate": lambda net, x: net.last((net.trunk(x).expand(EXPERTS, -1, -1).sin() * x.exp()[:, :1]).sum(0)),
    "products with a buffer": lambda net, x: net.first(x) @ (net.grid @ net.first.weight.T),
}


class Graphs(Net):
    """Is given a list of samples, each with as many rows as it has nodes."""

    def forward(self, nodes: list[Tensor]) -> Tensor:
        return torch.stack([self.last(self.trunk(rows).tanh()).mean(0) for rows in nodes])


@pytest.mark.parametrize("N", [3, EXPERTS, 5])
@pytest.mark.parametrize("name", WHERE_THEY_SHOULD_BE)
def test_samples_where_they_should_be(name: str, N: int) -> None:
    compare(WHERE_THEY_SHOULD_BE[name], of_rows, torch.randn(N, 3, dtype=torch.float64))


def test_samples_with_rows_of_their_own() -> None:
    """There may be as many as samples."""
    nodes = [torch.randn(i + 2, 3, dtype=torch.float64) for i in range(3)]
    expected = rows_of(model := Graphs(lambda net, x: x).double(), F.cross_entropy(model(nodes), torch.arange(3), reduction="none") / 3)
    extend(model)
    with backpack(BatchGrad()):
        F.cross_entropy(model(nodes), torch.arange(3)).backward()
    for name in ("trunk.weight", "trunk.bias", "last.weight", "last.bias"):
        torch.testing.assert_close(model.get_parameter(name).grad_batch, expected[name])


class Images(Module):
    """Is given a list of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 2), Linear(4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        pooled = [self.first(image).sin().mean((-2, -1)) for image in images]
        return self.last(torch.cat(pooled) if images[0].dim() > 3 else torch.stack(pooled))


@pytest.mark.parametrize("one", [True, False], ids=["mini-batches of one", "without a batch axis"])
@pytest.mark.parametrize("N", [1, 3, 4])
def test_lists_of_samples_of_other_sizes(N: int, one: bool) -> None:
    """All entries differ in their shapes; the sizes of images and the number of samples may be the same."""
    images = [torch.randn(2, i + 4, 5, dtype=torch.float64) for i in range(N)]
    images = [image[None] for image in images] if one else images
    expected = rows_of(model := Images().double(), F.cross_entropy(model(images), torch.arange(N) % 3, reduction="none") / N)
    extend(model)
    with backpack(BatchGrad(), DiagGGNExact()):
        F.cross_entropy(model(images), torch.arange(N) % 3).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad_batch, expected[name])
    whole = [param.diag_ggn_exact for param in model.parameters()]
    parts = [torch.zeros_like(param) for param in whole]
    for n, image in enumerate(images):
        with backpack(DiagGGNExact()):
            (F.cross_entropy(model([image]), torch.tensor([n % 3])) / N).backward()
        parts = [part + param.diag_ggn_exact for part, param in zip(parts, model.parameters(), strict=True)]
    torch.testing.assert_close(whole, parts)


def test_arguments_in_a_list_that_are_stacked() -> None:
    """As many arguments of all samples as there are rows in front of these."""
    model = make(lambda net, x: torch.stack([net.first(x[0]), net.last(net.trunk(x[0]) + x[1][:, :1])]))
    x = [torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)]
    expected = rows_of(model, model(x).square().mean((0, 2)))
    extend(model)
    with backpack(BatchGrad()):
        model(x).square().mean((0, 2)).sum().backward()
    for name in ("first.weight", "trunk.weight", "last.bias"):
        torch.testing.assert_close(model.get_parameter(name).grad_batch, expected[name])


@pytest.mark.parametrize("N", [3, 4])
@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("change", [lambda tokens: tokens, lambda tokens: tokens + 1])
def test_tokens_with_steps_in_front(change: Callable[[Tensor], Tensor], module: bool, N: int) -> None:
    """There may be as many as samples."""

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(7, 5), Linear(5, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            tokens = change(tokens.T)
            states = self.table(tokens) if module else F.embedding(tokens, self.table.weight)
            return self.layer(states.sin().mean(0))

    model, tokens, y = Model().double(), torch.randint(6, (N, 4)), torch.arange(N) % 2
    expected = rows_of(model, F.cross_entropy(model(tokens), y, reduction="none") / N)
    extend(model)
    with backpack(BatchGrad()):
        F.cross_entropy(model(tokens), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_batch, expected[name])


@pytest.mark.parametrize("N", [1, 2, 4])
@pytest.mark.parametrize("given", ["list", "pairs", "dictionaries"])
def test_lists_of_samples_to_a_model_that_returns_its_loss(given: str, N: int) -> None:
    """The rows of a sample are its positions, as many as they may be."""

    class Tagger(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(3, 4)

        def forward(self, samples: list) -> Tensor:
            pairs = [(sample, torch.zeros(4, dtype=torch.long)) if given == "list" else sample for sample in samples]
            pairs = [tuple(pair.values()) if isinstance(pair, dict) else pair for pair in pairs]
            return torch.stack([F.cross_entropy(self.layer(rows), labels) for rows, labels in pairs]).mean()

    model, samples = extend(Tagger()), [torch.randn(4, 3) for _ in range(N)]
    if given != "list":
        samples = [(rows, torch.arange(4)) for rows in samples]
    if given == "dictionaries":
        samples = [{"rows": rows, "labels": labels} for rows, labels in samples]
    with backpack(BatchGrad()), pytest.raises(BackpackError):
        model(samples).backward()
    assert not hasattr(model.layer.weight, "grad_batch")


def test_arguments_in_a_tuple_to_a_model_that_returns_its_loss() -> None:
    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(3, 4)

        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(self.layer(given[0]), given[1])

    model, x, y = extend(Model().double()), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 4
    expected = rows_of(model.layer, F.cross_entropy(model.layer(x), y, reduction="none") / 5)
    with backpack(BatchGrad()):
        model((x, y)).backward()
    torch.testing.assert_close(model.layer.weight.grad_batch, expected["weight"])


LISTS: dict[str, Callable[[Tensor, Tensor], tuple]] = {
    "targets": lambda x, y: (x, [y, y]),
    "states": lambda x, y: (x, y, (torch.zeros(1, 5, 2), torch.zeros(1, 5, 2))),
    "a mini-batch": lambda x, y: ([x, y[:, None].double()],),
}


@pytest.mark.parametrize("given", LISTS)
def test_lists_of_other_things(given: str) -> None:
    """The first layer is given what has the samples."""

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(3, 4)

        def forward(self, x: Tensor | list[Tensor], *others: object) -> Tensor:
            return self.layer(x[0] if isinstance(x, list) else x).square().mean()

    model, x, y = extend(Model().double()), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 4
    expected = rows_of(model.layer, model.layer(x).square().mean(1) / 5)
    with backpack(BatchGrad()):
        model(*LISTS[given](x, y)).backward()
    torch.testing.assert_close(model.layer.weight.grad_batch, expected["weight"])


@pytest.mark.parametrize("N", [3, 4])
@pytest.mark.parametrize("change", [torch.exp, torch.clone])
def test_loops_over_samples_in_a_model_that_returns_its_loss(change: Callable[[Tensor], Tensor], N: int) -> None:
    class Tagger(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(3, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.stack([F.cross_entropy(self.layer(change(rows)), labels) for rows, labels in zip(x, y, strict=True)]).mean()

    model = extend(Tagger())
    with backpack(BatchGrad()), pytest.raises(BackpackError):
        model(torch.randn(N, 4, 3), torch.zeros(N, 4, dtype=torch.long)).backward()
    assert not hasattr(model.layer.weight, "grad_batch")


@pytest.mark.parametrize("kind", ["sparse", "mkldnn"])
def test_tensors_without_memory_of_their_own(kind: str) -> None:
    """An adjacency, say, or one that the model does not use."""

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(3, 4)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return self.layer(x)

    model, x, y = extend(Model()), torch.randn(4, 3), torch.arange(4)
    other = torch.eye(4).to_sparse() if kind == "sparse" else torch.eye(4).to_mkldnn()
    with backpack(BatchGrad()):
        (F.cross_entropy(model(x, other), y) + F.cross_entropy(model(2 * x, other), y)).backward()
    torch.testing.assert_close(model.layer.weight.grad_batch.sum(0), model.layer.weight.grad)


# --- several calls ------------------------------------------------------------------------------------------------------------------------------


def halves(model: Module, x: Tensor) -> Iterator[Tensor]:
    return (model(part) for part in x.split(3))


def one_by_one(model: Module, x: Tensor) -> Iterator[Tensor]:
    return (model(part) for part in x.split(1))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights": lambda out, y: torch.linspace(1, 2, len(y)) @ F.cross_entropy(out, y, reduction="none"),
    "chosen": lambda out, y: F.cross_entropy(out, y, reduction="none")[y > 0].mean(),
    "gathered": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(),
    "indexed": lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "margins": lambda out, y: (out[torch.arange(len(y)), y] - out[torch.arange(len(y)), y - 1]).exp().mean(),
    "norms": lambda out, y: (out - F.one_hot(y, out.shape[1])).norm(dim=1).mean(),
    "module": extend(nn.CrossEntropyLoss()),
    "function": F.cross_entropy,
    "by hand": lambda out, y: (out.softmax(1) - F.one_hot(y, out.shape[1])).square().mean(),
}


@pytest.mark.parametrize("extensions", [(BatchGrad, Variance), (DiagGGNExact,), (BatchGrad, BatchDiagGGNExact)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("calls", [halves, one_by_one])
def test_outputs_of_several_calls_below_one_another(calls: Callable, loss: str, extensions: tuple[type, ...]) -> None:
    """Rows of different calls may be different samples, or not: nothing tells."""
    model, x, y = extend(nn.Sequential(Linear(4, 6), nn.Tanh(), Linear(6, 3))), torch.randn(6, 4), torch.arange(6) % 3
    with backpack(*(extension() for extension in extensions)), pytest.raises(BackpackError):
        LOSSES[loss](torch.cat(list(calls(model, x))), y).backward()
    assert not any(vars(parameter) for parameter in model.parameters())


def assigned(outs: list[Tensor]) -> Tensor:
    joined = torch.zeros(6, 3)
    joined[:3], joined[3:] = outs
    return joined


UNSORTED = torch.tensor([3, 0, 5, 1, 4, 2])
JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "copies": lambda outs: torch.cat([out.clone() * 1 for out in outs]),
    "stacked": lambda outs: torch.stack(outs).flatten(0, 1),
    "assigned": assigned,
    "index_copy": lambda outs: torch.zeros(6, 3).index_copy(0, torch.arange(3), outs[0]).index_copy(0, torch.arange(3, 6), outs[1]),
    "sorted back": lambda outs: torch.cat(outs)[UNSORTED],
    "sorted back, selected": lambda outs: torch.cat(outs).index_select(0, UNSORTED),
    "sorted back, gathered": lambda outs: torch.cat(outs).take_along_dim(UNSORTED[:, None], 0),
    "turned": lambda outs: torch.cat(outs).flip(0),
    "shifted": lambda outs: torch.cat(outs).roll(1, 0),
    "without what was added to the last": lambda outs: torch.cat(outs)[:5],
    "without what was added to the last, before": lambda outs: torch.cat([outs[0], outs[1][:2]]),
    "and turned": lambda outs: torch.cat([z := torch.cat(outs), z.flip(0)]),
    "stacked, the last in front": lambda outs: torch.stack(outs).flip(0).flatten(0, 1),
    "parts of each": lambda outs: torch.cat([*outs[0].split(2), *outs[1].split(2)]),
    "and multiplied by a matrix": lambda outs: F.linear(torch.cat(outs), torch.eye(3) + 1, torch.ones(3)),
    "and classes turned": lambda outs: torch.cat(outs).flip(1),
    "and classes shifted": lambda outs: torch.cat(outs).roll(1, 1),
    "and convolved": lambda outs: F.conv1d(torch.cat(outs)[:, None], torch.tensor([[[1.0, 2.0]], [[2.0, 1.0]]])).flatten(1),
    "and compared with constants": lambda outs: torch.cdist(torch.cat(outs), torch.eye(3)),
}


@pytest.mark.parametrize("join", JOINS)
def test_ways_to_put_outputs_below_one_another(join: str) -> None:
    model, x, y = extend(Linear(4, 3)), torch.randn(6, 4), torch.arange(6) % 3
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match="was called 2 times"):
        F.cross_entropy(out := JOINS[join](list(halves(model, x))), y.repeat(2)[: len(out)]).backward()


def test_the_error_says_what_to_do_about_several_calls() -> None:
    model, x, y = extend(Linear(4, 3)), torch.randn(6, 4), torch.arange(6) % 3
    message = r"Linear was called 2 times, with different data, .* \[\[3, 3\], \[3, 3\]\], was joined.*Call the model once .* accumulate=True"
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=message):
        F.cross_entropy(torch.cat(list(halves(model, x))), y).backward()


def test_another_model_on_what_was_joined() -> None:
    """It tells the samples."""
    encoder, head, y = Linear(4, 3).double(), Linear(3, 2).double(), torch.arange(6) % 2
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = rows_of(head, F.cross_entropy(head(encoder(x)), y, reduction="none") / 6)
    for module in (encoder, head):
        extend(module)
    with backpack(BatchGrad(exclude=[encoder])):
        F.cross_entropy(head(torch.cat([encoder(x[:3]), encoder(x[3:])])), y).backward()
    torch.testing.assert_close(head.weight.grad_batch, expected["weight"])


class Joined(Module):
    """Says that they are different samples."""

    def __init__(self, calls: Callable) -> None:
        super().__init__()
        self.model, self.calls = nn.Sequential(Linear(4, 6), nn.Tanh(), Linear(6, 3)), calls

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.calls(self.model, x)))


@pytest.mark.parametrize("calls", [halves, one_by_one])
def test_a_module_that_joins_its_calls(calls: Callable) -> None:
    model, x, y = Joined(calls).double(), torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    expected = rows_of(model, F.cross_entropy(model(x), y, reduction="none") / 6)
    extend(model)
    with backpack(BatchGrad()):
        F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_batch, expected[name])


def steps(model: nn.GRUCell, x: Tensor) -> Tensor:
    """What was computed from one another belongs to the same samples."""
    states = [torch.zeros(len(x), 3, dtype=x.dtype)]
    for step in x.unbind(1):
        states.append(model(step, states[-1]))
    return torch.cat(states[1:])


TOGETHER: dict[str, tuple[Callable[[], Module], Callable[[Module, Tensor], Tensor]]] = {
    "steps": (lambda: nn.GRUCell(2, 3), steps),
    "the same data": (lambda: Linear(2, 3), lambda model, x: torch.cat([model(x[:, 0]), model(x[:, 0])])),
    "side by side": (lambda: Linear(2, 3), lambda model, x: torch.cat([model(x[:, 0]).T, model(x[:, 1]).T]).T.reshape(2 * len(x), 3)),
    "mean of two views": (lambda: Linear(2, 3), lambda model, x: torch.cat([model(x[:, 0]), model(x[:, 1])]).view(2, len(x), 3).mean(0)),
    "parts": (lambda: Linear(2, 3), lambda model, x: torch.mul(*torch.cat([model(x[:, 0]), model(x[:, 1])]).chunk(2))),
    "stacked": (lambda: Linear(2, 3), lambda model, x: torch.stack([model(x[:, 0]), model(x[:, 1])])),
    "steps on axis 1": (lambda: Linear(2, 3), lambda model, x: torch.stack([model(x[:, 0]), model(x[:, 1])], 1).flatten(0, 1)),
    "steps side by side": (lambda: Linear(2, 3), lambda model, x: torch.cat([model(x[:, 0]), model(x[:, 1])], 1).view(-1, 3)),
    "a difference, repeated": (lambda: Linear(2, 3), lambda model, x: (model(x[:, 0]) - model(x[:, 1])).repeat_interleave(2, 0)),
    "the larger one": (lambda: Linear(2, 3), lambda model, x: torch.cat([model(x[:, 0]), model(x[:, 1])]).view(2, len(x), 3).amax(0)),
    "contrasts": (lambda: Linear(2, 3), lambda model, x: (z := torch.cat([model(x[:, 0]), model(x[:, 1])])) @ z.T),
    "contrasts, row by row": (lambda: Linear(2, 3), lambda model, x: (z := torch.cat([model(x[:, 0]), model(x[:, 1])])) * z.roll(len(x), 0)),
    "contrasts side by side": (lambda: Linear(2, 3), lambda model, x: torch.cat([z := torch.cat([model(x[:, 0]), model(x[:, 1])]), z.flip(0)], 1)),
    "pairs": (
        lambda: Linear(2, 3),
        lambda model, x: torch.cat([model(x[:, 0]), model(x[:, 1])])[torch.arange(2 * len(x))[:, None] - torch.arange(2)].prod(1),
    ),
    "neighbours": (lambda: Linear(2, 3), lambda model, x: (z := torch.cat([model(x[:, 0]), model(x[:, 1])]))[1:] - z[:-1]),
    "negatives": (lambda: Linear(2, 3), lambda model, x: model(x[:, 0]) * (z := model(x[:, 1])) - model(x[:, 0]) * z[torch.arange(len(x)) - 1]),
}


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("name", TOGETHER)
def test_rows_of_several_calls_that_belong_together(name: str, N: int) -> None:
    """Rows ``i`` of all calls are sample ``i``, for which there is a copy of the model here."""
    build, outputs = TOGETHER[name]
    model, x = build().double(), torch.randn(N, 2, 2, dtype=torch.float64)
    copies = [build().double() for _ in range(N)]
    for copy in copies:
        copy.load_state_dict(model.state_dict())

    class Each(Module):
        def forward(self, *given: Tensor) -> Tensor:
            return torch.cat([copies[i](*(part[i : i + 1] for part in given)) for i in range(N)])

    outputs(Each(), x).tanh().square().mean().backward()
    extend(model)
    with backpack(BatchGrad()):
        outputs(model, x).tanh().square().mean().backward()
    for name_, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_batch, torch.stack([copy.get_parameter(name_).grad for copy in copies]))
