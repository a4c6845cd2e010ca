"""Where outermost modules have their samples: layers of torch that take sequences first, and layers that are given no batch axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import QUANTITIES, close, collect, sum_batch
from torch import Tensor, nn

from backpack import backpack, extend, results
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact, Variance
from backpack.utils.errors import MixedSamplesError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")


def encoder(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoder(transformer(batch_first), 1, enable_nested_tensor=False)


def transformer(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=batch_first)


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)


def first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


# name: how to make it, what enters the loss, whether that has the samples on axis 1 although the module has them on axis 0
MODULES: dict[str, tuple[Callable[[bool], nn.Module], Callable[[Any], Tensor], bool]] = {
    "GRU": (lambda bf: nn.GRU(4, 3, batch_first=bf), first, False),
    "LSTM in two directions": (lambda bf: nn.LSTM(4, 3, bidirectional=True, batch_first=bf), first, False),
    "states of a GRU": (lambda bf: nn.GRU(4, 3, num_layers=2, batch_first=bf), lambda out: out[1], True),
    "cells of an LSTM": (lambda bf: nn.LSTM(4, 3, num_layers=2, batch_first=bf), lambda out: out[1][1], True),
    "attention": (lambda bf: nn.MultiheadAttention(4, 2, batch_first=bf), first, False),
    "transformer layer": (transformer, first, False),
    "transformer": (encoder, first, False),
}


class BatchFirst(nn.Module):
    """The same with the samples on axis 0, whatever is inside."""

    def __init__(self, module: nn.Module, turned: bool, choose: Callable[[Any], Tensor], turned_back: bool) -> None:
        super().__init__()
        self.module, self.turned, self.choose, self.turned_back = module, turned, choose, turned_back

    def forward(self, x: Tensor) -> Tensor:
        out = self.choose(call(self.module, x.transpose(0, 1) if self.turned else x))
        return out.transpose(0, 1) if self.turned_back else out


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("samples", "steps"), [(1, 3), (3, 1), (2, 2), (3, 3), (3, 2)])
@pytest.mark.parametrize("name", MODULES)
def test_samples_of_an_outermost_module_of_torch(name: str, samples: int, steps: int, batch_first: bool) -> None:
    """A module of torch that is not wrapped has the samples where torch says, also where there are as many steps, or layers."""
    make, choose, states = MODULES[name]
    back = states or not batch_first

    def problem() -> Problem:
        torch.manual_seed(0)
        model = BatchFirst(make(batch_first).double(), not batch_first, choose, back)
        x = torch.randn(samples, steps, 4, dtype=torch.float64)
        out = model(x)
        return Problem(model, x, [Term(nn.CrossEntropyLoss(), torch.randint(out.shape[2], out.shape[:2]))], lambda model, x: model(x).transpose(1, 2))

    made, oracle = problem(), Oracle(problem())
    model, target = extend(made.model.module), made.terms[0].target

    def loss() -> Tensor:
        out = choose(call(model, made.x if batch_first else made.x.transpose(0, 1)))
        return extend(nn.CrossEntropyLoss())(out.flatten(0, 1), (target.T if back else target).flatten())

    with backpack(BatchGrad(), Variance(), DiagGGNExact(), BatchDiagGGNExact()):
        loss().backward()
    diagonals = oracle.diag_ggn_batch(oracle.hessian_exact)
    for key, parameter in made.model.named_parameters():
        close(parameter.grad_batch, oracle.grad_batch[key])
        close(parameter.variance, oracle.variance[key])
        close(parameter.diag_ggn_exact_batch, diagonals[key])
        close(parameter.diag_ggn_exact, sum_batch(diagonals)[key])


class Encoder(nn.GRU):
    """Takes ``[N, T, D]``, and returns the last state."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1))[0][-1]


class SelfAttention(nn.MultiheadAttention):
    """Takes and returns ``[N, T, D]``."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return super().forward(x, x, x)[0].transpose(0, 1)


class Layer(nn.TransformerEncoderLayer):
    """Takes and returns ``[N, T, D]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Cell(nn.GRUCell):
    """Takes ``[D]`` numbers of each sample as a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = super().forward(step[:, None], state)
        return state


@pytest.mark.parametrize(("samples", "steps"), [(1, 3), (2, 3), (3, 3), (4, 3), (3, 1)])
@pytest.mark.parametrize(
    "make",
    [lambda: Encoder(4, 3), lambda: SelfAttention(4, 2), lambda: Layer(4, 2, 3, dropout=0.0), lambda: Cell(1, 3)],
    ids=["GRU", "MHA", "TEL", "cell"],
)
def test_samples_of_classes_that_inherit_from_torch(make: Callable[[], nn.Module], samples: int, steps: int) -> None:
    """Who brings a ``forward`` of their own may take samples otherwise than the class that they inherit from: axis 0 counts."""

    def problem() -> Problem:
        torch.manual_seed(0)
        model = make().double()
        x = torch.randn(samples, steps, *[4] * (not isinstance(model, Cell)), dtype=torch.float64)
        return Problem(model, x, [Term(nn.MSELoss(), torch.randn_like(model(x)))])

    made, oracle = problem(), Oracle(problem())
    extend(made.model)
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(nn.MSELoss())(made.model(made.x), made.terms[0].target).backward()
    for name, parameter in made.model.named_parameters():
        close(parameter.grad_batch, oracle.grad_batch[name])
        close(parameter.diag_ggn_exact, sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))[name])


def test_losses_that_look_at_axis_0() -> None:
    """Second-order quantities start where a loss has its samples, so the error says to turn them; first-order ones need no loss."""
    model, x = extend(nn.GRU(4, 3)), torch.randn(5, 2, 4)
    with backpack(DiagGGNExact()), pytest.raises(UnsupportedError, match=r"the 2 samples lie on axis 1 there.*Give it the samples on axis 0"):
        extend(nn.PoissonNLLLoss())(model(x)[0], torch.zeros(5, 2, 3)).backward()
    assert results(model) == {}
    with backpack(BatchGrad()):
        extend(nn.PoissonNLLLoss())(model(x)[0], torch.zeros(5, 2, 3)).backward()
    assert model.weight_hh_l0.grad_batch.shape == (2, 9, 3)
    torch.testing.assert_close(model.weight_hh_l0.grad_batch.sum(0), model.weight_hh_l0.grad)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_last_step_in_a_model_that_returns_its_loss(extension: type, samples: int) -> None:
    """With time first, a mini-batch of one has a single label, and its steps are no samples."""

    class Last(nn.Sequential):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(super().forward(x)[-1], y)

    model = extend(Last(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    with pytest.raises(UnsupportedError, match="steps in time"), backpack(extension()):
        model(torch.randn(2, samples, 4), torch.randint(3, (samples,))).backward()
    assert results(model) == {}


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_one_of_the_rows(extension: type, samples: int) -> None:
    """The last step of ``[T, N, C]`` is no sample; losses of one sample after the other, and of a slice, are losses of samples."""
    torch.manual_seed(0)
    model, lossfunc, x, y = extend(nn.Linear(4, 3)), extend(nn.MSELoss()), torch.randn(3, samples, 4), torch.randn(3, samples, 3)
    for last in (lambda out: out[-1], lambda out: out.unbind()[-1]):
        with pytest.raises(UnsupportedError, match=r"one of the 3 rows that Linear returned, of shape .*Return the samples"), backpack(extension()):
            lossfunc(last(model(x)), y[-1]).backward()
        assert results(model) == {}
    with backpack(extension()):
        sum(lossfunc(out, one) for out, one in zip(model(x), y, strict=True)).backward()
    whole = getattr(model.weight, extension.savefield)
    with backpack(extension()):
        (3 * lossfunc(model(x), y)).backward()
    torch.testing.assert_close(getattr(model.weight, extension.savefield), whole)
    with backpack(extension()):
        lossfunc(model(x)[-1:], y[-1:]).backward()
    assert getattr(model.weight, extension.savefield).count_nonzero() == 12


def test_wrapped_sequences() -> None:
    """Of other modules it is not known: axis 0 of their output counts, and the error says to transpose."""
    model, x = extend(nn.Sequential(nn.GRU(4, 3), ReduceTuple(0))), torch.randn(5, 2, 4)
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=r"samples on axis 0: transpose it, or set batch_first=True"):
        model(x).sum().backward()


SINGLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (4,)),
    "LayerNorm, two axes": (lambda: nn.LayerNorm([3, 4]), (3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (4,)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 4)),
    "Linear": (lambda: nn.Linear(4, 4), (4,)),
    "Linear, other width": (lambda: nn.Linear(4, 3), (4,)),
    "Conv1d": (lambda: nn.Conv1d(3, 3, 1), (3, 4)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 1), (2, 4, 4)),
    "GRU": (lambda: nn.GRU(4, 3), (5, 4)),
    "LSTM": (lambda: nn.LSTM(4, 3, batch_first=True), (5, 4)),
    "RNNCell": (lambda: nn.RNNCell(4, 4), (4,)),
    "transformer": (lambda: transformer(batch_first=True), (5, 4)),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("quantity", ["BatchGrad", "DiagGGNExact"])
def test_without_batch_axis(name: str, quantity: str, nested: bool) -> None:
    """One sample without a batch axis: neither its features nor its time steps are samples."""
    make, shape = SINGLE[name]
    layer = make()
    if nested and isinstance(layer, nn.RNNBase):
        layer = nn.Sequential(layer, ReduceTuple(0))
    model = extend(nn.Sequential(layer) if nested else layer)
    with backpack(QUANTITIES[quantity].make()), pytest.raises(MixedSamplesError, match=r"got an input of shape .* without a batch axis"):
        out = first(model(torch.randn(shape)))
        extend(nn.MSELoss())(out, torch.zeros_like(out)).backward()
    assert results(model) == {}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4), lambda: nn.RNNCell(4, 4)])
def test_one_call_a_sample(make: Callable[[], nn.Module], samples: int) -> None:
    """A layer without a batch axis is right where it is called for each sample."""

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = make(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.stack([self.layer(h) for h in x]))

    def problem() -> Problem:
        torch.manual_seed(0)
        x, y = torch.randn(samples, 4, dtype=torch.float64), torch.randint(3, (samples,))
        return Problem(Each().double(), x, [Term(nn.CrossEntropyLoss(), y)])

    made, oracle = problem(), Oracle(problem())
    extend(made.model)
    extend(made.losses[0])
    with backpack(BatchGrad(), DiagGGNExact()):
        made.loss(made.outputs()).backward()
    for key, value in collect(made, "grad_batch").items():
        close(value, oracle.grad_batch[key])
    for key, value in collect(made, "diag_ggn_exact").items():
        close(value, sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))[key])


BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of positions": lambda out: (out @ MIXED).reshape(-1, 4),
    "time first": lambda out: out.transpose(0, 1) @ MIXED,
    "backwards": lambda out: out.flip(0) @ MIXED,
    "upsampled": lambda out: nn.functional.interpolate(out, size=4, mode="linear"),
}
MIXED = torch.arange(16.0, dtype=torch.float64).reshape(4, 4).cos()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (1, 3), (3, 3), (2, 3)])
@pytest.mark.parametrize("case", list(BEHIND))
def test_samples_are_those_of_the_model(case: str, samples: int, steps: int, nested: bool) -> None:
    """Behind operations through which rows cannot be followed to an extended loss, they are not taken for samples."""

    torch.manual_seed(0)
    layer, x = nn.Linear(2, 4).double(), torch.randn(samples, steps, 2, dtype=torch.float64)
    model, weight, lossfunc = extend(nn.Sequential(layer) if nested else layer), layer.weight, extend(nn.MSELoss())
    out = BEHIND[case](model(x))
    jacobians = [jacobian_of(BEHIND[case](model(x[n : n + 1])), weight) for n in range(samples)]
    values = [BEHIND[case](model(x[n : n + 1])).detach().flatten() for n in range(samples)]
    with backpack(BatchGrad()):
        lossfunc(out, torch.zeros_like(out)).backward()
    close(weight.grad_batch, 2 / out.numel() * torch.stack([torch.tensordot(v, j, 1) for v, j in zip(values, jacobians, strict=True)]))
    try:
        with backpack(BatchDiagGGNExact()):
            out = BEHIND[case](model(x))
            lossfunc(out, torch.zeros_like(out)).backward()
    except (UnsupportedError, MixedSamplesError):
        assert samples > 1
        assert not hasattr(weight, "diag_ggn_exact_batch")
    else:
        close(weight.diag_ggn_exact_batch, 2 / out.numel() * torch.stack([jacobian.square().sum(0) for jacobian in jacobians]))


def jacobian_of(out: Tensor, parameter: Tensor) -> Tensor:
    return torch.stack([torch.autograd.grad(entry, parameter, retain_graph=True)[0] for entry in out.flatten()])


class Squeezed(nn.Module):
    """Forgets the axis of samples, where there is one of them."""

    def __init__(self, width: int, forward: Callable[[Squeezed, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.step, self.changed = nn.Linear(2, 3), nn.Linear(3, width), nn.GRU(2, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.changed(self, x)


POSITIONS: dict[str, tuple[int, Callable[[Squeezed, Tensor], Tensor]]] = {
    "numbers": (1, lambda net, x: net.last(net.first(x).tanh()).squeeze()),
    "rows": (2, lambda net, x: net.last(net.first(x).tanh()).squeeze()),
    "matrices": (4, lambda net, x: net.last(net.first(x).tanh()).unflatten(2, (2, 2)).squeeze()),
    "in front of the last layer": (2, lambda net, x: net.last(net.first(x).tanh()[0])),
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "extended": nn.MSELoss(),
    "function": nn.functional.mse_loss,
    "by hand": lambda out, y: (out - y).abs().sum(),
}


@pytest.mark.parametrize("extension", [BatchGrad, BatchDiagGGNExact])
@pytest.mark.parametrize("loss", list(SUMS))
@pytest.mark.parametrize("name", list(POSITIONS))
def test_positions_of_a_single_sample_are_no_samples(name: str, loss: str, extension: type) -> None:
    model, lossfunc = extend(Squeezed(*POSITIONS[name])), SUMS[loss]
    if isinstance(lossfunc, nn.Module):
        extend(lossfunc)
    with backpack(extension()), pytest.raises(UnsupportedError, match=r"samples|loss is known"):
        out = model(torch.randn(1, 5, 2))
        lossfunc(out, torch.zeros_like(out)).backward()
    assert results(model) == {}


@pytest.mark.parametrize("samples", [1, 3])
def test_one_step_in_front_of_the_samples(samples: int) -> None:
    model = extend(Squeezed(2, lambda net, x: net.last(net.step(x)[0][-1])))
    with backpack(BatchGrad()):
        nn.functional.cross_entropy(model(torch.randn(1, samples, 2)), torch.zeros(samples, dtype=torch.long)).backward()
    assert [len(p.grad_batch) for p in model.parameters() if p.grad is not None] == [samples] * 6


@pytest.mark.parametrize("loss", list(SUMS)[:2])
@pytest.mark.parametrize("shape", [(3, 2), (3, 5, 2)])
def test_samples_behind_an_axis_of_length_one(shape: tuple[int, ...], loss: str) -> None:
    """They made one sample of the mini-batch for second-order quantities, and for those beside them."""
    model, lossfunc = extend(Squeezed(4, lambda net, x: net.last(net.first(x).tanh())[None])), SUMS[loss]
    if isinstance(lossfunc, nn.Module):
        extend(lossfunc)
    with backpack(BatchGrad(), BatchDiagGGNExact()), pytest.raises(UnsupportedError, match="samples lie on axis 0"):
        out = model(torch.randn(shape))
        lossfunc(out, torch.zeros_like(out)).backward()
    assert results(model) == {}
    with backpack(BatchDiagGGNExact()):
        out = model(torch.randn(shape))[0]
        lossfunc(out, torch.zeros_like(out)).backward()
    assert len(model.last.weight.diag_ggn_exact_batch) == len(out)


class Draws(nn.Module):
    """Bounds of an autoencoder with several draws in front of the samples, ``[K, N]``."""

    def __init__(self, draws: int, united: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.draws, self.united = nn.Linear(6, 3), nn.Linear(3, 6), draws, united

    def forward(self, x: Tensor) -> Tensor:
        noise = x.new_tensor(range(3 * self.draws)).view(-1, 1, 3).sin()
        bounds = (self.decoder(self.encoder(x) + noise).tanh() - x).square().sum(-1)
        return bounds.logsumexp(0) if self.united else bounds


@pytest.mark.parametrize("draws", [1, 4, 6])
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_draws_in_front_of_the_samples(samples: int, draws: int) -> None:
    """As many as the input has features, they were taken for samples, and united behind the model; as many as samples, they may be these."""
    model, x = extend(Draws(draws, True).double()), torch.randn(samples, 6).double()
    rows = [torch.autograd.grad(model(x)[nr] / samples, list(model.parameters())) for nr in range(samples)]
    for model.united in (True, False):
        if not model.united and draws > 1 and draws in (samples, 6):
            with backpack(BatchGrad()), pytest.raises((UnsupportedError, MixedSamplesError)):
                model(x).logsumexp(0).mean().backward()
            continue
        with backpack(BatchGrad()):
            out = model(x)
            (out if model.united else out.logsumexp(0)).mean().backward()
        for parameter, *expected in zip(model.parameters(), *rows, strict=True):
            torch.testing.assert_close(parameter.grad_batch, torch.stack(expected))


class Ragged(nn.Module):
    """Sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(rows).tanh().mean(0) for rows in x.unbind()])


def test_nested_tensors_are_samples() -> None:
    """A nested tensor that the model takes apart is read like a list of samples."""
    rows, y = [torch.randn(length, 2, dtype=torch.float64) for length in (2, 4, 3)], torch.tensor([0, 3, 1])
    model, lossfunc = Ragged().double(), nn.CrossEntropyLoss()
    expected = [torch.autograd.grad(lossfunc(model(torch.stack([x])), y[n : n + 1]) / 3, model.layer.weight)[0] for n, x in enumerate(rows)]
    with backpack(BatchGrad()):
        extend(lossfunc)(extend(model)(torch.nested.nested_tensor(rows, layout=torch.jagged)), y).backward()
    close(model.layer.weight.grad_batch, torch.stack(expected))


def test_layers_do_not_return_nested_tensors() -> None:
    model = extend(nn.Linear(2, 4))
    out = model(torch.nested.nested_tensor([torch.rand(2, 2), torch.rand(4, 2)], layout=torch.jagged))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=r"nested tensor.*padded tensors with masks"):
        torch.nested.to_padded_tensor(out, 0.0).sum().backward()
    assert results(model) == {}


class Holding(nn.Module):
    """A model that holds its data, with time first, and returns a row for each sample."""

    def __init__(self, steps: int, samples: int) -> None:
        super().__init__()
        self.x, self.layer = torch.randn(steps, samples, 3, dtype=torch.float64), nn.Linear(3, 2).double()

    def forward(self) -> Tensor:
        return self.layer(self.x).tanh().sum(0)


@pytest.mark.parametrize(("steps", "samples"), [(2, 4), (5, 3), (3, 3), (4, 1)])
def test_models_that_are_given_nothing(steps: int, samples: int) -> None:
    """The samples lie on axis 0 of what they return, as of any model."""
    model = extend(Holding(steps, samples))
    expected = [torch.autograd.grad(row.square().sum(), list(model.parameters()), retain_graph=True) for row in model()]
    with backpack(BatchGrad()):
        model().square().sum().backward()
    for parameter, *rows in zip(model.parameters(), *expected, strict=True):
        close(parameter.grad_batch, torch.stack(rows))
