"""Diagonal second derivatives at the output of an affine layer: read off there without columns, and carried from its input."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases_nets import Net, parameter
from oracle import Oracle, Problem
from table import classify, default_dtype
from test_extensions import close, collect, run
from torch import Tensor, nn
from torch.nn import Conv2d, Flatten, Linear, Module, Sequential, Tanh
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.passing import Pass
from backpack.extensions import BatchDiagHessian, DiagHessian
from backpack.extensions.collector import Collector
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.rules import ColumnRule

Build = Callable[[int], Problem]


def flat(make: Callable[[], tuple[Module, ...]]) -> Build:
    return lambda n: classify(Sequential(*make(), Flatten(), nn.LazyLinear(4)), torch.randn(n, 4, 3, 3))


def net(forward: Callable, *shape: int, **modules: Callable[[], Module]) -> Build:
    return lambda n: classify(Net(forward, **{name: make() for name, make in modules.items()}), torch.randn(n, *shape))


def linear(*sizes: int) -> Callable[[], Module]:
    return lambda: Linear(*sizes)


def time_first(own: Net, x: Tensor) -> Tensor:
    return own.b(own.act(own.a(x.transpose(0, 1))).sum(0))


def twice(own: Net, x: Tensor) -> Tensor:
    h = own.a(x)
    return own.b(own.act(h) + h.sin() * own.other(h))


def shared(own: Net, x: Tensor) -> Tensor:
    return own.b(own.act(own.a(x)) + own.act(own.a(x + 1)))


def scaled(own: Net, x: Tensor) -> Tensor:
    return own.b(own.act(F.linear(x, own.w * 2)))


def squared(own: Net, x: Tensor) -> Tensor:
    return own.b(own.act(F.linear(x, own.w.square())))


def broadcast(own: Net, x: Tensor) -> Tensor:
    return own.b(torch.atan2(own.a(x), torch.cat([x, x[:, :1] + 3], 1)))


TANH = {"act": Tanh}
# the problem, and how many diagonals are read off at layers
CASES: dict[str, tuple[Build, int]] = {
    "Linear": (lambda n: classify(Sequential(Linear(4, 5), Tanh(), Linear(5, 4), nn.SiLU(), Linear(4, 4)), torch.randn(n, 4)), 2),
    "no bias": (lambda n: classify(Sequential(Linear(4, 5, bias=False), Tanh(), Linear(5, 4)), torch.randn(n, 4)), 1),
    "positions": (net(lambda own, x: own.b(own.act(own.a(x)).sum(1)), 2, 4, a=linear(4, 5), b=linear(5, 4), **TANH), 1),
    "Conv2d": (
        flat(
            lambda: (
                Conv2d(4, 2, 2),
                nn.Sigmoid(),
                Conv2d(2, 3, 2),
                Tanh(),
            )
        ),
        2,
    ),
    "groups": (
        flat(
            lambda: (
                Conv2d(4, 6, 2, groups=2, padding=1),
                Tanh(),
            )
        ),
        1,
    ),
    "depthwise, strides": (
        flat(
            lambda: (
                Conv2d(4, 4, 2, groups=4, stride=2, padding=1),
                Tanh(),
            )
        ),
        1,
    ),
    "reflect": (
        flat(
            lambda: (
                Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
                Tanh(),
            )
        ),
        1,
    ),
    "circular, dilation": (
        flat(
            lambda: (
                Conv2d(4, 2, 2, padding=1, dilation=2, padding_mode="circular"),
                Tanh(),
            )
        ),
        1,
    ),
    "transposed": (
        flat(
            lambda: (
                nn.ConvTranspose2d(4, 2, 2, stride=2),
                Tanh(),
            )
        ),
        1,
    ),
    "pooled behind": (
        flat(
            lambda: (
                Conv2d(4, 2, 2),
                Tanh(),
                nn.AvgPool2d(2),
            )
        ),
        1,
    ),
    "pooled in between": (
        flat(
            lambda: (
                Conv2d(4, 2, 2),
                nn.AvgPool2d(2),
                Tanh(),
            )
        ),
        0,
    ),
    "function": (net(lambda own, x: own.b(torch.tanh(own.a(x))), 4, a=linear(4, 5), b=linear(5, 4)), 1),
    "function, time first": (net(lambda own, x: own.b(F.silu(own.a(x.transpose(0, 1))).sum(0)), 2, 4, a=linear(4, 5), b=linear(5, 4)), 1),
    "module, time first": (net(time_first, 2, 4, a=linear(4, 5), b=linear(5, 4), **TANH), 1),
    "folded": (
        net(lambda own, x: own.b(own.act(own.a(x.flatten(0, 1))).unflatten(0, (-1, 2)).sum(1)), 2, 4, a=linear(4, 5), b=linear(5, 4), **TANH),
        1,
    ),
    "two activations": (net(twice, 4, a=linear(4, 5), b=linear(5, 4), other=linear(5, 5), **TANH), 2),
    "called twice": (net(shared, 4, a=linear(4, 5), b=linear(5, 4), **TANH), 0),
    "computed weight": (net(squared, 4, w=parameter(5, 4), b=linear(5, 4), **TANH), 1),
    "multiple of a weight": (net(scaled, 4, w=parameter(5, 4), b=linear(5, 4), **TANH), 1),
    "broadcast": (net(broadcast, 4, a=linear(4, 1), b=linear(5, 4)), 0),
    "matrix": (net(lambda own, x: own.b(own.act(x @ own.w)), 4, w=parameter(4, 5), b=linear(5, 4), **TANH), 1),
    "frozen bias": (lambda n: classify(Sequential(frozen(Linear(4, 5)), Tanh(), Linear(5, 4)), torch.randn(n, 4)), 1),
}


def frozen(layer: Linear) -> Linear:
    layer.bias.requires_grad_(False)
    return layer


def build(name: str, samples: int) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(1)
        problem = CASES[name][0](samples)
        problem.outputs()
    return problem


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note, from now on, what is read off without columns."""
    seen, at_layer = [], Collector.at_layer

    def noting(*args: Any) -> bool:
        seen.append(at_layer(*args))
        return seen[-1]

    monkeypatch.setattr(Collector, "at_layer", noting)
    return seen


read = pytest.fixture(note_reads, name="read")


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name: str, samples: int, memory: int | None, read: list[bool]) -> None:
    problem, expected = build(name, samples), Oracle(build(name, samples)).diag_h_batch
    run(problem, DiagHessian(), BatchDiagHessian(), memory=memory)
    assert sum(read) == CASES[name][1]
    for key, value in expected.items():
        close(collect(problem, "diag_h_batch")[key], value)
        close(collect(problem, "diag_h")[key], value.sum(0))


# what a parameter of this shape is made into, before something curved is done to it
MADE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "itself": (lambda w: w, (4,)),
    "sums": (lambda w: w.cumsum(0), (4,)),
    "with another entry": (lambda w: w + w.roll(1, 0), (4,)),
    "in another order": (lambda w: w.flip(0), (4,)),
    "broadcast": (lambda w: w * torch.arange(1.0, 5.0).to(w), (1,)),
    "expanded": (lambda w: (3 * w).expand(4), (1,)),
    "a part": (lambda w: w.split(4)[1], (8,)),
    "the largest": (lambda w: w.max(0)[0], (3, 4)),
    "rows": (lambda w: (2 * w.T)[1], (4, 2)),
    "in lower precision": (lambda w: w.float(), (4,)),
}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("curved", [torch.exp, lambda w: w.sin().square()], ids=["exp", "two operations"])
def test_curvature_of_what_parameters_are_made_into(curved: Callable[[Tensor], Tensor], name: str, samples: int) -> None:
    made, shape = MADE[name]
    case = net(lambda own, x: own.b((x + curved(made(own.w)).to(x)).tanh()), 4, w=parameter(*shape), b=linear(4, 4))
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        problem = case(samples)
    expected = Oracle(deepcopy(problem)).diag_h_batch
    run(problem, DiagHessian(), BatchDiagHessian())
    for key, value in expected.items():
        close(collect(problem, "diag_h_batch")[key], value, 1e-6 if name == "in lower precision" else 1e-9)
        close(collect(problem, "diag_h")[key], value.sum(0), 1e-6 if name == "in lower precision" else 1e-9)


@pytest.mark.parametrize("index", [[2, 0], [1, 1, 2], []], ids=str)
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "folded", "function, time first"])
def test_chosen_samples(name: str, index: list[int], read: list[bool]) -> None:
    problem, expected = build(name, 3), Oracle(build(name, 3)).diag_h_batch
    run(problem, DiagHessian(subsampling=index), BatchDiagHessian(subsampling=index))
    assert sum(read) == CASES[name][1]
    for key, value in expected.items():
        torch.testing.assert_close(collect(problem, "diag_h")[key], value[index].sum(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(collect(problem, "diag_h_batch")[key], value[index], rtol=1e-9, atol=1e-12)


def test_no_columns_are_carried_to_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a net with one activation, none are born but those of the loss."""
    widths, bear = [], Pass._bear
    monkeypatch.setattr(Pass, "_bear", lambda carry, flow, source, parts: widths.append(len(parts[0][0])) or bear(carry, flow, source, parts))
    run(build("no bias", 3), DiagHessian())
    assert widths == [3]  # classes less one


def test_what_is_left_out(read: list[bool]) -> None:
    problem, expected = build("Linear", 3), Oracle(build("Linear", 3)).diag_h_batch
    run(problem, DiagHessian(exclude=["0.weight", "2"]))
    assert read == [True]
    found = collect(problem, "diag_h")
    assert found.keys() == {"0.bias", "4.weight", "4.bias"}
    for key, value in found.items():
        close(value, expected[key].sum(0))


class Root(DiagHessian):
    """A quantity that does not add up."""

    def finish(self, state: Any, parameter: nn.Parameter) -> Tensor:
        return super().finish(state, parameter).abs().sqrt()


class Doubled(DiagHessian):
    """Reads columns in another way."""

    def rule_at(self, samples: int) -> Any:
        class Doubling(ColumnRule):
            def choose(self, columns: Any) -> Any:
                return {source: 2 * c for source, c in super().choose(columns).items()}

        return Doubling(self.flow, None)

    def rule_key(self) -> Any:
        return self


class Seen(ModuleExtension):
    """Sees columns."""

    def weight(self, ext: Any, module: Module, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:  # noqa: N803
        return torch.stack([mat.square().sum() for mat in bpQuantities["matrices"]])


def test_who_needs_columns_gets_them(read: list[bool]) -> None:
    problem, expected = build("Linear", 3), Oracle(build("Linear", 3)).diag_h_batch
    for extension, factor in ((BatchDiagHessian(), 1), (Doubled(subsampling=[0, 1, 2]), 4)):
        run(problem, extension)
        for key, value in expected.items():
            close(collect(problem, extension.savefield)[key], factor * (value if factor == 1 else value.sum(0)))
    assert read == [True, True, False, False]
    read.clear()
    run(problem, Root(), BatchDiagHessian())
    for key, value in expected.items():
        close(collect(problem, "diag_h")[key], value.sum(0).abs().sqrt())
        close(collect(problem, "diag_h_batch")[key], value)
    extension = DiagHessian(exclude=["0.bias", "2", "4"])
    extension.set_module_extension(Linear, Seen())
    run(problem, extension)
    assert len(problem.model[0].weight.diag_h) > 2
    assert not any(read)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_graph(read: list[bool]) -> None:
    problem, expected = build("Linear", 3), Oracle(build("Linear", 3)).diag_h_batch
    extend(problem.model)
    lossfunc = extend(problem.losses[0])
    with backpack(extensions.DiagHessian()):
        lossfunc(problem.model(problem.x), problem.terms[0].target).backward(create_graph=True)
    close(problem.model[0].weight.diag_h.detach(), expected["0.weight"].sum(0))
    assert not read


@pytest.mark.parametrize("base", ["logaddexp", "logaddexp2"])
@pytest.mark.parametrize("far", [float("inf"), 1000.0, 90.0])
def test_sums_of_exponentials_of_which_one_is_nothing(far: float, base: str) -> None:
    """The function is linear in the other argument there, or as good as that; torch's own second derivative is not a number for some."""
    add, parts = getattr(torch, base), torch.tensor([False, True, False, False])

    def model() -> Net:
        forward = lambda own, x: own.b(add(own.a(x).masked_fill(parts, -far), own.w.masked_fill(parts.roll(1), -far)))  # noqa: E731
        torch.manual_seed(0)
        return Net(forward, a=Linear(4, 4), b=Linear(4, 3), w=nn.Parameter(torch.rand(4))).double()

    net, x, y = extend(model()), torch.rand(3, 4).double(), torch.arange(3)
    with backpack(DiagHessian()):
        extend(nn.CrossEntropyLoss())(net(x), y).backward()
    plain = model()
    plain.function = lambda own, x: own.b(
        torch.where(parts, own.w, torch.where(parts.roll(1), own.a(x), add(own.a(x), own.w)))  # what is far away is not there
    )
    gradients = torch.autograd.grad(nn.functional.cross_entropy(plain(x), y), list(plain.parameters()), create_graph=True)
    for found, own, gradient in zip(net.parameters(), plain.parameters(), gradients, strict=True):
        rows = [torch.autograd.grad(entry, own, retain_graph=True)[0].flatten() for entry in gradient.flatten()]
        close(found.diag_h, torch.stack(rows).diagonal().reshape(own.shape))
