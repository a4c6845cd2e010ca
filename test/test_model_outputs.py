"""Where samples start: on axis 0 of what a model returns, whatever it is given, unless these rows are parts of the samples that it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from test_extensions import close
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from backpack import backpack, extend, results
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import UnattributedError, UnsupportedError


class Layers(nn.Module):
    """Scores of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Time(Layers):
    """``[T, N, 3]`` to ``[N, 2]``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).mean(0)


class Bags(Layers):
    """``[rows, 3]`` to ``[bags, 2]``."""

    def forward(self, x: Tensor, bag: Tensor) -> Tensor:
        return torch.zeros(3, 2, dtype=x.dtype).index_add(0, bag, self.scores(x))


class Opaque(Layers):
    """An object with ``[N, T, 3]`` to ``[N, 2]``."""

    def forward(self, data: Any) -> Tensor:
        return self.scores(data.x.transpose(0, 1)).mean(0)


class Trunk(Layers):
    """``[P, 4]`` points, and ``[N, 3]``, to ``[N, P]``."""

    def forward(self, points: Tensor, x: Tensor) -> Tensor:
        return self.body(x).tanh() @ points.T


class Positions(Layers):
    """A mapping with ``[N, T, 3]`` to ``[N, T, 2]``."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.scores(batch["x"])


class Codes(Layers):
    """``[N, T, 3]`` to ``[N, 2]``, and something with the samples on another axis, from which it is made."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x.transpose(0, 1)).tanh()
        return self.head(z.mean(0)), z


class Encoder(Layers):
    """``[N, T, 3]`` to ``[T, N, 4]``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(0, 1)).tanh()


class Decoder(Layers):
    """``[T, N, 4]`` to ``[N, 2]``."""

    def forward(self, z: Tensor) -> Tensor:
        return self.head(z.mean(0))


class Case(NamedTuple):
    """The loss of chosen samples, in double precision."""

    modules: list[nn.Module]
    loss: Callable[[list[int]], Tensor]
    samples: int = 3


def by_hand(out: Tensor) -> Tensor:
    return (out**4).sum()


def entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def time_first(functional: bool) -> Case:
    model, x, y = Time(), torch.randn(2, 3, 3), torch.tensor([0, 1, 1])  # as many steps as classes
    return Case([model], lambda chosen: entropy(model(x[:, chosen]), y[chosen]) if functional else by_hand(model(x[:, chosen])))


def bags() -> Case:
    model, x, bag = Bags(), torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 1, 2])
    return Case([model], lambda chosen: by_hand(model(*(t[torch.isin(bag, torch.tensor(chosen))] for t in (x, bag)))))


def opaque() -> Case:
    model, x = Opaque(), torch.randn(3, 4, 3)
    return Case([model], lambda chosen: by_hand(model(SimpleNamespace(x=x[chosen]))))


def points_first() -> Case:
    model, points, x = Trunk(), torch.randn(7, 4), torch.randn(3, 3)
    return Case([model], lambda chosen: by_hand(model(points, x[chosen])))


def masked(samples: int, keep: list[tuple[int, int]] | None = None) -> Case:
    model, x, y = Positions(), torch.randn(samples, 5, 3), torch.randint(2, (samples, 5))
    mask = torch.tensor([[keep is None or (n, t) in keep for t in range(5)] for n in range(samples)])
    return Case([model], lambda chosen: entropy(model({"x": x[chosen]})[mask[chosen]], y[chosen][mask[chosen]]), samples)


def codes(length: int) -> Case:
    model, x, y = Codes(), torch.randn(3, length, 3), torch.tensor([0, 1, 1])
    return Case([model], lambda chosen: entropy(model(x[chosen])[0], y[chosen]))


def coded(length: int) -> Case:
    encoder, decoder, x, y = Encoder(), Decoder(), torch.randn(3, length, 3), torch.tensor([0, 1, 1])
    return Case([encoder, decoder], lambda chosen: entropy(decoder(encoder(x[chosen])), y[chosen]))


CASES: dict[str, Callable[[], Case]] = {
    "time first": lambda: time_first(False),
    "time first, as many steps as classes": lambda: time_first(True),
    "bags": bags,
    "object": opaque,
    "points first": points_first,
    "mapping, one sample": lambda: masked(1),
    "mapping, rows": lambda: masked(3),
    "mapping, mask": lambda: masked(3, [(0, 0), (0, 1), (2, 2)]),
    "codes": lambda: codes(4),
    "codes, as many": lambda: codes(3),
    "two models": lambda: coded(4),
    "two models, as many": lambda: coded(3),
}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_samples_are_rows_of_the_output(name: str) -> None:
    """They are neither rows of modules inside, nor as many as the first argument has."""
    made = CASES[name]()
    parameters = [p for module in made.modules for p in module.parameters()]
    losses = [made.loss([n]) for n in range(made.samples)]
    alone = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses]
    for module in made.modules:
        extend(module)
    with backpack(BatchGrad()):
        made.loss(list(range(made.samples))).backward()
    for i, parameter in enumerate(parameters):
        if alone[0][i] is not None:
            close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("module", [False, True])
def test_connectionist_temporal_classification(length: int, module: bool) -> None:
    """It takes ``[T, N, C]``, and tells by that where the samples of such an output lie."""

    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x).transpose(0, 1).log_softmax(2)

    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(3, length, 3), torch.ones(3, 1, dtype=torch.long)
    lossfunc = nn.CTCLoss(reduction="sum") if module else partial(F.ctc_loss, reduction="sum")

    def loss(chosen: list[int]) -> Tensor:
        return lossfunc(model(x[chosen]), y[chosen], torch.tensor([length] * len(chosen)), torch.tensor([1] * len(chosen)))

    alone = [torch.autograd.grad(loss([n]), tuple(model.parameters())) for n in range(3)]
    extend(model)
    lossfunc = extend(lossfunc) if module else lossfunc
    with backpack(BatchGrad()):
        loss([0, 1, 2]).backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


def test_input_and_output_with_other_axes_in_front() -> None:
    """Which of both has the samples in front cannot be told; the other order of the output is the way out."""
    x, y = torch.randn(3, 5, 3), torch.randint(2, (3, 5))

    class Model(Layers):
        turned = True

        def forward(self, x: Tensor) -> Tensor:
            out = self.scores(x)
            return out.transpose(0, 1) if self.turned else out

    model = extend(Model())
    with (
        pytest.raises(UnsupportedError, match=r"was given a tensor of shape \[3, 5, 3\] and returns \[5, 3, 2\].*Give it the samples"),
        backpack(BatchGrad()),
    ):
        entropy(model(x).flatten(0, 1), y.t().flatten()).backward()
    assert results(model) == {}
    model.turned = False
    alone = [torch.autograd.grad(entropy(model(x[n : n + 1])[0], y[n]), tuple(model.parameters())) for n in range(3)]
    with backpack(BatchGrad()):
        entropy(model(x).transpose(0, 1).flatten(0, 1), y.t().flatten()).backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


def test_parameters_alone_with_other_axes_in_front() -> None:
    """A model need not contain modules; one whose parameters are left out is a function of what another one returns."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.matrix).transpose(0, 1)

    first, model, x = extend(nn.Linear(3, 3)), extend(Bare()), torch.randn(3, 5, 3)
    for given in (x, first(x)):
        with pytest.raises(UnsupportedError, match=r"of shape \[3, 5, 3\] and returns \[5, 3, 2\].*Give it the samples"), backpack(BatchGrad()):
            by_hand(model(given)).backward()
    alone = [torch.autograd.grad(by_hand(model(first(x[n : n + 1]))), tuple(first.parameters())) for n in range(3)]
    with backpack(BatchGrad(exclude=[model])):
        by_hand(model(first(x))).backward()
    for i, parameter in enumerate(first.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


@dataclass
class Scores:
    """What a model returns; something later sets the loss."""

    scores: Tensor
    loss: Tensor = field(init=False)


@pytest.mark.parametrize("returned", [Scores, lambda scores: {"scores": scores, "kind": Scores}])
def test_data_classes(returned: Callable[[Tensor], Any]) -> None:
    """A field that is not set yet, or a data class that is no instance, holds no tensor."""

    class Model(Layers):
        def forward(self, x: Tensor) -> Any:
            return returned(self.scores(x))

    model, x, y = extend(Model()), torch.randn(3, 3), torch.tensor([0, 1, 1])
    out = model(x)
    scores = out.scores if isinstance(out, Scores) else out["scores"]
    with backpack(BatchGrad()):
        F.cross_entropy(scores, y).backward()
    for parameter in model.parameters():
        close(parameter.grad_batch.sum(0), parameter.grad)


class Gaussian(nn.Module):
    """A mean for each sample, and one standard deviation for all, made by a function of the logarithm, the scale and the mean."""

    def __init__(self, returned: Callable[[Tensor, Tensor], Any], deviation: Callable[[Tensor], Tensor] = torch.exp) -> None:
        super().__init__()
        self.mean, self.logarithm = nn.Linear(3, 2), nn.Parameter(torch.randn(2))
        self.returned, self.deviation = returned, deviation

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.mean(x), self.deviation(self.logarithm))


def log_likelihood(out: Any, y: Tensor) -> Tensor:
    if isinstance(out, dict):
        out = out["mean"], out["deviation"]
    out = Normal(*out) if isinstance(out, tuple) else out
    value = out.log_prob(y)
    return (value.sum(1) if value.dim() > 1 else value).mean()


DISTRIBUTIONS = {
    "tuple": lambda mean, deviation: (mean, deviation.expand_as(mean)),
    "repeated": lambda mean, deviation: (mean, deviation.repeat(len(mean), 1)),
    "one by one": lambda mean, deviation: (mean, deviation[None].repeat_interleave(len(mean), 0)),
    "stacked": lambda mean, deviation: (mean, torch.stack([deviation] * len(mean))),
    "joined": lambda mean, deviation: (mean, torch.cat([deviation[None]] * len(mean))),
    "beside zeros": lambda mean, deviation: (mean, deviation + torch.zeros_like(mean)),
    "distribution": Normal,
    "nested": lambda mean, deviation: Independent(Normal(mean, deviation), 1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("N", [1, 2, 3])
def test_gaussians(name: str, N: int) -> None:
    model, x, y = extend(Gaussian(DISTRIBUTIONS[name])), torch.randn(N, 3), torch.randn(N, 2)
    alone = [torch.autograd.grad(log_likelihood(model(x[n : n + 1]), y[n : n + 1]) / N, tuple(model.parameters())) for n in range(N)]
    with backpack(BatchGrad()):
        log_likelihood(model(x), y).backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


COPIES = [lambda p, n: torch.cat([p] * n), lambda p, n: torch.stack([p[0]] * n), lambda p, n: p.repeat_interleave(n, 0), lambda p, n: p.expand(n, -1)]


class Shifted(nn.Module):
    """Two heads on data that nothing but copies of a parameter were added to."""

    def __init__(self, copies: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.shift, self.first, self.second, self.copies = nn.Parameter(torch.randn(1, 3)), nn.Linear(3, 2), nn.Linear(3, 4), copies
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + self.copies(self.shift, len(x))
        return self.first(h), self.second(h)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("N", [1, 2, 3])
def test_copies_of_a_parameter_below_two_heads(copies: Callable, N: int) -> None:
    model, x = extend(Shifted(copies)), torch.randn(N, 3).double()

    def loss(x: Tensor) -> Tensor:
        return sum(F.mse_loss(out, out.detach() + 1 + torch.arange(out.shape[1]), reduction="sum") for out in model(x))

    alone = [torch.autograd.grad(loss(x[n : n + 1]), tuple(model.parameters())) for n in range(N)]
    with backpack(BatchGrad()):
        loss(x).backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


@pytest.mark.parametrize(
    "returned",
    [
        lambda mean, deviation: (mean, deviation),
        lambda mean, deviation: {"mean": mean, "deviation": deviation},
        lambda mean, deviation: (mean, deviation[None]),
    ],
)
@pytest.mark.parametrize("deviation", [torch.exp, lambda a: F.softplus(a) * 2 + 0.1, lambda a: a.square().reciprocal().sort()[0].erf()])
@pytest.mark.parametrize("N", [2, 3])
def test_outputs_of_parameters_alone_are_no_samples(returned: Callable, deviation: Callable, N: int) -> None:
    """Not even if they have as many entries as there are samples."""
    model, x, y = extend(Gaussian(returned, deviation)), torch.randn(N, 3), torch.randn(N, 2)
    with pytest.raises(UnattributedError, match=r"logarithm: used outside .*std\.expand_as\(mean\)"), backpack(BatchGrad()):
        log_likelihood(model(x), y).backward()
    assert results(model) == {}
    with backpack(BatchGrad(exclude=[model.logarithm])):
        log_likelihood(model(x), y).backward()
    close(model.mean.weight.grad_batch.sum(0), model.mean.weight.grad)


class Heads(nn.Module):
    """Two heads, of which the bias alone is trained in the first one, behind something that has a graph, but no quantities."""

    def __init__(self, features: Callable[[Tensor], Tensor], united: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.features, self.united = nn.Linear(3, 2), nn.Linear(3, 2), features, united
        self.a.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.united(self.a(h), self.b(h))


UNTRACKED: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "input": lambda: lambda x: x,
    "function of the input": lambda: lambda x: 2 * x,
    "input, a parameter": lambda: lambda x: x,
    "excluded layer": lambda: nn.Linear(3, 3),
    "excluded bias": lambda: nn.Linear(3, 3).requires_grad_(False),
    "foreign layer": lambda: nn.Linear(3, 3).forward,
}


def heads(name: str, united: Callable[[Tensor, Tensor], Any]) -> Heads:
    model = extend(Heads(UNTRACKED[name](), united))
    if name == "excluded bias":
        model.features.bias.requires_grad_(True)
    return model


def given(N: int, name: str) -> Tensor:
    x = torch.randn(N, 3, requires_grad="input" in name)
    return nn.Parameter(x) if "parameter" in name else x


@pytest.mark.parametrize("name", UNTRACKED)
@pytest.mark.parametrize("N", [1, 2, 3])
def test_heads_of_which_the_bias_alone_is_trained(name: str, N: int) -> None:
    """What such a head is given is data, although nothing of it is saved there."""
    model, x, y = heads(name, lambda a, b: (a, b)), given(N, name), torch.randn(N, 2)
    tracked = [model.a.bias, model.b.weight, model.b.bias]
    alone = [torch.autograd.grad(sum(F.mse_loss(out, y[n : n + 1]) for out in model(x[n : n + 1])) / N, tracked) for n in range(N)]
    with backpack(BatchGrad(exclude=["features.*"] if "excluded" in name else [])):
        sum(F.mse_loss(out, y) for out in model(x)).backward()
    for i, parameter in enumerate(tracked):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


def test_head_behind_a_graph_that_was_freed() -> None:
    """Autograd does not go there, and what was saved cannot be read any more."""
    model, x = extend(Heads(lambda x: x, lambda a, b: (a, b))), nn.Linear(3, 3)(torch.randn(2, 3)).tanh()
    x.sum().backward()
    tracked = [model.a.bias, model.b.weight, model.b.bias]
    with backpack(BatchGrad()):
        sum(out.square().sum() for out in model(x)).backward(inputs=tracked)
    for parameter in tracked:
        close(parameter.grad_batch.sum(0), parameter.grad)


@pytest.mark.parametrize("united", [lambda a, b: b @ a.T, lambda a, b: b * a.sum(0)], ids=["products", "sum"])
@pytest.mark.parametrize("name", UNTRACKED)
@pytest.mark.parametrize("N", [2, 3])
def test_samples_that_meet_behind_a_head_of_which_the_bias_alone_is_trained(name: str, united: Callable, N: int) -> None:
    model, x = heads(name, united), given(N, name)
    with (
        pytest.raises(UnsupportedError, match="samples of the mini-batch influence one another"),
        backpack(BatchGrad(exclude=["features.*"] if "excluded" in name else [])),
    ):
        model(x).square().mean().backward()
    assert results(model) == {}


def test_outputs_of_several_models_and_parameters_alone() -> None:
    """Another model returns the standard deviation, whatever it was given."""
    mean = extend(nn.Linear(3, 2))
    other, x, y = extend(Gaussian(lambda _, deviation: deviation)), torch.randn(2, 3), torch.randn(2, 2)
    with pytest.raises(UnattributedError, match="logarithm"), backpack(BatchGrad()):
        log_likelihood((mean(x), other(x)), y).backward()
    assert results(mean) == results(other) == {}


class Flow(nn.Module):
    """An invertible layer that returns the logarithm of its determinant beside features."""

    def __init__(self, determinant: Callable[[Tensor], Tensor], spread: bool) -> None:
        super().__init__()
        self.matrix, self.determinant, self.spread = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4)), determinant, spread

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logarithm = self.determinant(self.matrix)
        return x @ self.matrix, logarithm.expand(len(x)) if self.spread else logarithm


class Density(nn.Module):
    """A normalizing flow."""

    def __init__(self, flow: Flow, first: nn.Module) -> None:
        super().__init__()
        self.first, self.flow = first, flow

    def forward(self, x: Tensor) -> Tensor:
        z, logarithm = self.flow(self.first(x))
        return logarithm - z.square().sum(1) / 2


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Linear(4, 4)])
@pytest.mark.parametrize(
    "determinant",
    [
        lambda w: torch.linalg.slogdet(w)[1],
        lambda w: w.det().abs().log(),
        torch.logdet,
        lambda w: torch.linalg.cholesky(w @ w.T).diagonal().log().sum(),
        lambda w: torch.linalg.svd(w)[1].log().sum(),
        lambda w: torch.linalg.solve(w, w @ w).logdet(),
        lambda w: torch.linalg.matrix_exp(w).trace(),
        lambda w: torch.linalg.qr(w)[1].diagonal().abs().log().sum(),
        lambda w: torch.linalg.eigvalsh(w @ w.T).log().sum() / 2,
    ],
)
def test_determinants_belong_to_all_samples(determinant: Callable, first: Callable, spread: bool) -> None:
    model, x = extend(Density(Flow(determinant, spread), first())), torch.randn(4, 4)
    alone = [torch.autograd.grad(model(x[n : n + 1]).sum() / 4, tuple(model.parameters())) for n in range(4)]
    with backpack(BatchGrad()):
        model(x).mean().backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


class Carried(nn.Module):
    """A module between layers that is given features in a structure."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2)
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unwrap(self.norm(self.wrap(self.first(x).tanh()))))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda t: {"0": t}, lambda given: given["0"]),
        (lambda t: (t, t), lambda given: given[0] + given[1]),
        (lambda t: [t], lambda given: given[0]),
        (Scores, lambda given: given.scores),
    ],
    ids=["dictionary", "tuple", "list", "data class"],
)
def test_modules_that_return_whatever_they_are_given(wrap: Callable, unwrap: Callable) -> None:
    model, x = extend(Carried(wrap, unwrap)), torch.randn(3, 3)
    alone = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), tuple(model.parameters())) for n in range(3)]
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


CHOSEN = torch.tensor([1, 3])


class Partly(nn.Module):
    """Returns features, and what was made of those of some samples, or of all of them in another order."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor], features: Callable[[nn.Module, Tensor], Tensor], first: bool) -> None:
        super().__init__()
        self.body, self.head, self.matrix, self.scale = nn.Linear(3, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(4))
        self.way, self.features, self.first = way, features, first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.features(self, x)
        other = self.way(self, z)
        return (z, other) if self.first else (other, z)


PARTS: dict[str, Callable[[Partly, Tensor], Tensor]] = {
    "some rows": lambda net, z: torch.zeros_like(z).index_put((CHOSEN,), net.head(z[CHOSEN])),
    "mask": lambda net, z: torch.where(torch.tensor([[False], [True], [True], [False]]), z.tanh(), z.detach()),
    "detached but one": lambda net, z: torch.stack([z[0].detach(), z[1].detach(), z[2], z[3].detach()]) * net.scale,
    "dead for all": lambda net, z: torch.where(z > 1e6, z, net.scale),
}
FEATURES: dict[str, Callable[[Partly, Tensor], Tensor]] = {
    "layer": lambda net, x: net.body(x).tanh(),
    "product": lambda net, x: x @ net.matrix,
    "weight of functions": lambda net, x: F.linear(x, net.body.weight.softmax(0), net.body.bias),
}


def first_order_of(net: Partly, x: Tensor, weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of each sample, by autograd, and the loss of all."""
    z, other = net(x)
    losses = ((z - 1).square() + weights * other.square()).sum(1)
    gradients = torch.autograd.grad(losses.sum(), tuple(net.parameters()), retain_graph=True, allow_unused=True)
    used = {name: p for (name, p), gradient in zip(net.named_parameters(), gradients, strict=True) if gradient is not None}
    rows = [torch.autograd.grad(loss, tuple(used.values()), retain_graph=True, materialize_grads=True) for loss in losses]
    return dict(zip(used, map(torch.stack, zip(*rows, strict=True)), strict=True)), losses.sum()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("part", PARTS)
def test_outputs_that_are_made_of_some_samples_of_others(part: str, features: str, first: bool) -> None:
    """Gradients arrive at the rows of features from the loss, too, where nothing arrives from the other output."""
    torch.manual_seed(0)
    net, x, weights = Partly(PARTS[part], FEATURES[features], first).double(), torch.randn(4, 3, dtype=torch.float64), torch.rand(4).double()
    expected, _ = first_order_of(net, x, weights)
    extend(net)
    _, loss = first_order_of(net, x, weights)
    with backpack(BatchGrad()):
        loss.backward()
    assert {name for name, p in net.named_parameters() if hasattr(p, "grad_batch")} == set(expected)
    for name, gradients in expected.items():
        close(net.get_parameter(name).grad_batch, gradients)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("change", [lambda z: z.roll(1, 0), lambda z: z.flip(0), lambda z: z[[2, 0, 3, 1]]], ids=["roll", "flip", "index"])
def test_outputs_that_are_others_in_another_order(change: Callable[[Tensor], Tensor], features: str, first: bool) -> None:
    """Which of both tells the samples is not known."""
    net = extend(Partly(lambda net, z: change(z), FEATURES[features], first))
    z, other = net(torch.randn(4, 3))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match="in another order"):
        (z.square().sum() + other.square().sum()).backward()
    assert results(net) == {}


@pytest.mark.parametrize("extended", [True, False])
def test_loss_of_one_sample_beside_a_function_of_all(extended: bool) -> None:
    """A mini-batch of one sample would take in the rows of all."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            scores = self.layer(x)
            return {"all": scores, "one": scores[[3]]}

    model, lossfunc = extend(Chosen()), extend(nn.MSELoss()) if extended else F.mse_loss
    out, y = model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)
    loss = lossfunc(out["one"], torch.zeros(1, 2)) + F.cross_entropy(out["all"], y)
    with backpack(BatchGrad()):
        if extended:
            with pytest.raises(UnsupportedError, match=r"Mini-batches of 1 and of 4 samples meet.*layer\.weight"):
                loss.backward()
            assert results(model) == {}
        else:
            loss.backward()
            assert len(model.layer.weight.grad_batch) == 4
            close(model.layer.weight.grad_batch.double().sum(0), model.layer.weight.grad.double(), rtol=1e-5)


class Branches(nn.Module):
    """Two outputs of which one has other rows than the samples."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.rec, self.head, self.shift, self.way = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.randn(2, 3)), way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.way == "labelled":
            return self.rec(x), self.head(x[[1, 3]])
        z = self.body(x)
        return z, (z[[2, 0, 3, 1]] if self.way == "permuted" else z + self.shift[: 1 if self.way == "one step" else 2].unsqueeze(1))


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("way, first", [("labelled", True)] + [(way, first) for way in ("steps", "one step", "permuted") for first in (True, False)])
def test_outputs_of_other_rows_than_samples(way: str, first: bool, extended: bool) -> None:
    """Rows of a parameter would be some samples, steps or all of them at once, beside rows of another one that are samples."""
    model, lossfunc = extend(Branches(way)), extend(nn.MSELoss()) if extended else F.mse_loss
    one, other = model(torch.randn(4, 3))
    loss = lossfunc(other, torch.zeros_like(other))
    with backpack(BatchGrad()), pytest.raises((UnsupportedError, UnattributedError)):
        (loss + F.mse_loss(one, torch.zeros_like(one)) if first else loss).backward()
    assert results(model) == {}


class Both(torch.autograd.Function):
    """Two results of one function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return a * w + b, (a * x + b).sum(0)


class Keeping(nn.Module):
    """Keeps one of several results of an operation, and returns what the others give."""

    def __init__(self, way: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layer, self.head, self.scale, self.memory = nn.Linear(4, 4), nn.Linear(2, 2), nn.Parameter(torch.randn(4)), nn.Buffer(torch.randn(2, 4))
        self.lstm, self.way = nn.LSTM(2, 3, batch_first=True), way

    def forward(self, x: Tensor) -> Tensor:
        out, self.kept = self.way(self, x)
        return out


KEPT_OF_SAMPLES: dict[str, Callable[[Keeping, Tensor], tuple[Tensor, Tensor]]] = {
    "features": lambda net, x: net.layer(x).chunk(2, -1),
    "features of a product": lambda net, x: (net.scale * net.layer(x)).split([1, 3], 1),
    "features, behind a layer": lambda net, x: (net.head((h := net.layer(x).tanh().chunk(2, -1))[0]), h[1]),
    "parts of each sample": lambda net, x: net.layer(torch.stack([x, x.sin()])).unbind(0),
    "states of a recurrent layer": lambda net, x: ((out := net.lstm(x.view(-1, 2, 2)))[0], out[1][1]),
    "eigenvectors": lambda net, x: torch.linalg.eigh(net.layer(x).unsqueeze(2) * x.unsqueeze(1) + torch.arange(4).diag()),
}
KEPT_OF_NONE: dict[str, Callable[[Keeping, Tensor], tuple[Tensor, Tensor]]] = {
    "rows": lambda net, x: net.layer(torch.cat([x, net.memory])).split([len(x), 2]),
    "rows of a product": lambda net, x: (net.scale * torch.cat([x, net.memory])).split([len(x), 2]),
    "rows of a loop": lambda net, x: (torch.stack((rows := net.layer(torch.cat([x, net.memory])).unbind())[: len(x)]), rows[-1]),
    "slices": lambda net, x: ((h := net.layer(torch.cat([x, net.memory])))[: len(x)], h[len(x) :]),
    "as many rows": lambda net, x: net.layer(torch.cat([x, net.memory.repeat(2, 1)[: len(x)]])).chunk(2),
    "function of a parameter": lambda net, x: Both.apply(x, net.scale),
    "function of a parameter, behind a layer": lambda net, x: Both.apply(net.layer(x), net.scale),
}


def with_penalty(model: Keeping, x: Tensor) -> Tensor:
    return model(x).pow(3).sum() + model.kept.pow(3).sum()


def used_by(model: Keeping, x: Tensor) -> list[nn.Parameter]:
    return [p for p in model.parameters() if torch.autograd.grad(with_penalty(model, x), p, allow_unused=True)[0] is not None]


@pytest.mark.parametrize("name", KEPT_OF_SAMPLES)
@pytest.mark.parametrize("N", [1, 3, 4])
def test_penalties_on_other_results_of_an_operation(name: str, N: int) -> None:
    model, x = Keeping(KEPT_OF_SAMPLES[name]), torch.randn(N, 4)
    used = used_by(model, x)
    alone = [torch.autograd.grad(with_penalty(model, row), used) for row in x.split(1)]
    extend(model)
    with backpack(BatchGrad()):
        with_penalty(model, x).backward()
    for parameter, gradients in zip(used, zip(*alone, strict=True), strict=True):
        close(parameter.grad_batch, torch.stack(gradients))


@pytest.mark.parametrize("name", KEPT_OF_NONE)
@pytest.mark.parametrize("N", [3, 4])
def test_penalties_on_results_of_no_sample(name: str, N: int) -> None:
    """As where the operation has one result for each."""
    model, x = extend(Keeping(KEPT_OF_NONE[name])), torch.randn(N, 4)
    with backpack(BatchGrad()), pytest.raises(UnattributedError, match="used outside of everything that has samples"):
        with_penalty(model, x).backward()
    assert results(model) == {}


def test_parts_of_samples_beside_samples() -> None:
    """Forces of atoms, ``[N * A, 3]``, beside energies ``[N]``: the message shows which output it is."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy, self.force = nn.Linear(12, 1), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.energy(x).squeeze(1), self.force(x.reshape(-1, 3))

    model = extend(Forces())
    energy, forces = model(torch.randn(5, 12))
    with backpack(BatchGrad()), pytest.raises(UnattributedError, match=r"force\.weight.*a model returned \[20, 3\] for 5 samples"):
        (energy.square().mean() + forces.square().mean()).backward()


class Featured(nn.Module):
    """``[4, 5, 6]`` to ``[4, 5, C]``, by one of its layers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear, self.table, self.conv = nn.Linear(6, features), nn.Embedding(9, features), nn.Conv1d(6, features, 3, padding=1)
        self.matrix, self.kernels = nn.Parameter(torch.randn(6, features)), nn.Parameter(torch.randn(features, 6, 3))


def whole_numbers(x: Tensor) -> Tensor:
    """Whole numbers, computed from the data."""
    return (3 * x.sum(-1)).long().abs() % 9


FEATURED = {
    "linear": lambda model, x: model.linear(x),
    "function": lambda model, x: F.linear(x, model.linear.weight),
    "two layers": lambda model, x: model.linear(model.conv(x.mT).mT.tanh().repeat(1, 1, 6)[..., :6]),
    "matrix": lambda model, x: x @ model.matrix,
    "einsum": lambda model, x: torch.einsum("ntd,dc->ntc", x, model.matrix),
    "table": lambda model, x: model.table(whole_numbers(x)),
    "table, function": lambda model, x: F.embedding(whole_numbers(x), model.table.weight),
    "convolution": lambda model, x: model.conv(x.mT).mT,
    "convolution, function": lambda model, x: F.conv1d(x.mT, model.kernels).mT,
}
FEATURES_FIRST = {
    "mean": lambda h: h.mean(0).T,
    "sum": lambda h: h.movedim(-1, 0).sum(1),
    "maximum": lambda h: h.amax(0).T,
    "windows": lambda h: h.unfold(0, 2, 1).permute(2, 0, 1, 3),
}


@pytest.mark.parametrize("last", FEATURES_FIRST)
@pytest.mark.parametrize("layer", FEATURED)
@pytest.mark.parametrize("features", [3, 4])
def test_features_are_no_samples(layer: str, last: str, features: int) -> None:
    """Samples are averaged, and features returned on axis 0, be they as many as samples or not."""

    class Model(Featured):
        def forward(self, x: Tensor) -> Tensor:
            return FEATURES_FIRST[last](FEATURED[layer](self, x))

    model = extend(Model(features))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError):
        model(torch.randn(4, 5, 6)).tanh().sum().backward()
    assert results(model) == {}


@pytest.mark.parametrize("layer", FEATURED)
def test_time_in_front_of_samples(layer: str) -> None:
    """The same layers, where samples are on axis 1 of what the model is given."""

    class Model(Featured):
        def forward(self, x: Tensor) -> Tensor:
            return FEATURED[layer](self, x).mean(0)

    torch.manual_seed(0)
    model, x = Model(3).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    if "convolution" in layer:  # whose axis 0 is that of samples
        x = x.transpose(0, 1)
        model.forward = lambda x: FEATURED[layer](model, x).mean(1)
    used = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    out = model(x)
    rows = [torch.autograd.grad(row.tanh().sum(), list(used.values()), retain_graph=True, allow_unused=True) for row in out]
    extend(model)
    with backpack(BatchGrad()):
        model(x).tanh().sum().backward()
    expected = {name: torch.stack(found) for name, found in zip(used, zip(*rows, strict=True), strict=True) if found[0] is not None}
    assert {name for name, parameter in used.items() if hasattr(parameter, "grad_batch")} == expected.keys()
    for name, value in expected.items():
        close(used[name].grad_batch, value)


class Members(nn.Module):
    """``[N, 3]`` to ``[5, N, 2]``: what the members of an ensemble make of all samples."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.heads, self.way = nn.ModuleList(nn.Linear(3, 2) for _ in range(5)), way
        self.stack, self.shift = nn.Parameter(torch.randn(5, 3, 2)), nn.Parameter(torch.randn(5, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "heads":
            return torch.stack([head(x) for head in self.heads])
        if self.way == "matrices":
            return (x @ self.stack).tanh()
        if self.way == "stacks":
            return torch.baddbmm(self.shift, x.expand(5, -1, -1), self.stack)
        return torch.vmap(lambda weight: x @ weight)(self.stack)


@pytest.mark.parametrize("way", ["heads", "matrices", "stacks", "vmap"])
@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, extend(nn.MSELoss()), lambda o, y: F.binary_cross_entropy_with_logits(o, y.sigmoid()), partial(F.huber_loss, reduction="sum")],
    ids=["squares", "squares, extended", "two classes", "Huber"],
)
@pytest.mark.parametrize("quantity", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("N", [2, 3, 4])
def test_members_of_an_ensemble_are_no_samples(way: str, loss: Callable, quantity: type, N: int) -> None:
    """A loss that treats entries alone does not tell which axis is that of the samples; one for each member, or members behind samples, do."""
    torch.manual_seed(0)
    model, x = extend(Members(way).double()), torch.randn(N, 3, dtype=torch.float64)
    y = torch.randn(N, 2, dtype=torch.float64)
    try:
        with backpack(quantity()):
            made = model(x)
            loss(made, y.expand_as(made)).backward()
    except NotImplementedError:
        assert results(model) == {}
    else:  # heads that are called with the samples tell, for first order
        assert way == "heads" and quantity is BatchGrad
        assert all(len(p.grad_batch) == N for p in model.heads.parameters())


class Behind(nn.Module):
    """The same, with samples in front."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).transpose(0, 1)


@pytest.mark.parametrize("way", ["heads", "matrices", "stacks", "vmap"])
def test_members_of_an_ensemble_behind_samples(way: str) -> None:
    """The way out of what is refused otherwise."""
    torch.manual_seed(0)
    model, x = Behind(Members(way)).double(), torch.randn(4, 3, dtype=torch.float64)
    names = {"heads": ("model.heads",), "stacks": ("model.stack", "model.shift")}.get(way, ("model.stack",))
    used = [parameter for name, parameter in model.named_parameters() if name.startswith(names)]
    alone = [torch.autograd.grad(F.mse_loss(model(row[None]), torch.ones(1, 5, 2).double()) / 4, used) for row in x]
    extend(model)
    with backpack(BatchGrad()):
        F.mse_loss(model(x), torch.ones(4, 5, 2).double()).backward()
    for parameter, gradients in zip(used, zip(*alone, strict=True), strict=True):
        close(parameter.grad_batch, torch.stack(gradients))


OTHERS_FIRST: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "queries": (lambda net, q, x: net.head((net.body(x)[:, None] + net.body(q)[None]).tanh()), (6, 3)),
    "points": (lambda net, q, x: net.head((net.body(x)[:, None] + q.sum(1)[None, :, None]).tanh()), (6, 3)),
    "table": (lambda net, q, x: net.scores(x)[:, None] * q[:, :2], (5, 3)),
    "scale of all": (lambda net, q, x: net.head((net.body(x) * q.sum()).tanh())[:, None], (1, 3)),
    "row of all": (lambda net, q, x: net.head((net.body(x) + net.body(q)).tanh())[:, None], (1, 3)),
}


@pytest.mark.parametrize("loss", [F.mse_loss, extend(nn.MSELoss())], ids=["function", "extended"])
@pytest.mark.parametrize("name", OTHERS_FIRST)
def test_other_arguments_in_front_of_the_samples(name: str, loss: Callable) -> None:
    """What is as long as one of them may lie on another axis of the output: the rows are those of the samples."""
    make, shape = OTHERS_FIRST[name]
    model = type("Asked", (Layers,), {"forward": make})().double()
    torch.manual_seed(0)
    q, x, used = torch.randn(shape, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64), list(model.parameters())
    rows = [model(q, row[None]) for row in x]
    alone = [torch.autograd.grad(F.mse_loss(row, torch.ones_like(row)) / 4, used) for row in rows]
    extend(model)
    with backpack(BatchGrad(), DiagGGNExact()):
        out = model(q, x)
        loss(out, torch.ones_like(out)).backward()
    for parameter, gradients in zip(used, zip(*alone, strict=True), strict=True):
        close(parameter.grad_batch, torch.stack(gradients))
