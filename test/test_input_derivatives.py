"""Derivatives of networks with respect to their input, which a model returns, or which are taken behind it: forces, differential equations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle import Oracle, Problem, Term, call_model
from test_extensions import close, sum_batch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jvp, vjp, vmap
from torch.nn import functional as F

from backpack import backpack, extend, results
from backpack.core import crossings
from backpack.core.crossings import Gap
from backpack.extensions import KFLR, BatchDiagGGNExact, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, Variance, collector
from backpack.extensions.positions import join
from backpack.utils.errors import BackpackError, UnsupportedError

FEATURES = 4
Function = Callable[["Net", Tensor], Tensor]


def fixed_norm(channels: int) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(channels).eval()
    norm.running_mean.copy_(torch.linspace(-1, 1, channels))
    norm.running_var.copy_(torch.linspace(0.5, 2, channels))
    norm.weight.data.copy_(torch.linspace(2, 1, channels))
    return norm


class Net(nn.Module):
    """Layers at hand; the forward pass is a function of them and of an input that requires a gradient."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.first, self.inner, self.last = function, nn.Linear(FEATURES, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm, self.groups, self.conv, self.slope = nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.Conv1d(1, 2, 3, padding=1), nn.PReLU()
        self.channels, self.fixed = nn.InstanceNorm1d(2, affine=True), fixed_norm(6)
        self.matrix = nn.Parameter(torch.randn(FEATURES, 6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.function(self, x.detach().requires_grad_())


def slope(energy: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def behind(act: Callable[[Tensor], Tensor]) -> Function:
    return lambda net, x: slope(net.last(act(net.inner(act(net.first(x))))), x)


def residual(net: Net, x: Tensor) -> Tensor:
    """Of ``u'' + u u' - du/dt``."""
    u = net.last(torch.tanh(net.first(x)))
    first = slope(u, x)
    return slope(first[:, 0], x)[:, :1] + u * first[:, :1] - first[:, 1:2]


NETS: dict[str, Function] = {
    **{f.__name__: behind(f) for f in (torch.tanh, torch.sigmoid, torch.sin, F.softplus, F.silu, F.gelu, F.elu, F.relu, F.mish)},
    "log_sigmoid": behind(F.logsigmoid),
    "softmax": behind(lambda h: h.softmax(1)),
    "energy and forces": lambda net, x: torch.cat([e := net.last(net.first(x).tanh()), -slope(e, x)], 1),
    "normalized": lambda net, x: slope(net.last(net.norm(net.first(x)).tanh()), x),
    "groups": lambda net, x: slope(net.last(net.groups(net.first(x)).sigmoid()), x),
    "groups of waves": lambda net, x: slope(net.last(net.groups(net.first(x)).sin()), x),
    "function of groups": lambda net, x: slope(net.last(F.group_norm(net.first(x), 2, net.groups.weight).sin()), x),
    "channels": lambda net, x: slope(net.last(net.channels(net.first(x).reshape(-1, 2, 3)).sin().flatten(1)), x),
    "fixed statistics": lambda net, x: slope(net.last(net.fixed(net.first(x)).sin()), x),
    "convolution": lambda net, x: slope(net.conv(x[:, None]).tanh().square().mean((1, 2)), x),
    "parametric": lambda net, x: slope(net.last(net.slope(net.first(x))), x),
    "matrix": lambda net, x: slope((x @ net.matrix).tanh().square().sum(1), x),
    "norms": lambda net, x: behind(torch.tanh)(net, x).norm(dim=1, keepdim=True),
    "differential equation": residual,
}


def behind_the_model(net: Net, x: Tensor) -> Tensor:
    """Call the layers one by one, none of them inside of another module."""
    return net.function(net, x.detach().requires_grad_())


PLACES = {"in the model": call_model, "behind it": behind_the_model}


def problem(name: str, samples: int, output: Callable[[nn.Module, Tensor], Tensor] = call_model) -> Problem:
    torch.manual_seed(0)
    model, x = Net(NETS[name]).double(), torch.randn(samples, FEATURES, dtype=torch.float64)
    return Problem(freeze_unused(model, x, output), x, [Term(nn.MSELoss(), torch.randn_like(model(x)))], output)


def freeze_unused(model: nn.Module, x: Tensor, output: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    used = torch.autograd.grad(output(model, x).sum(), list(model.parameters()), allow_unused=True)
    for parameter, gradient in zip(list(model.parameters()), used, strict=True):
        parameter.requires_grad_(gradient is not None)
    return model


def used_in(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check(made: Problem, oracle: Oracle) -> None:
    extend(made.model)
    extend(made.losses[0])
    with backpack(BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact(), BatchDiagGGNExact()):
        made.loss(made.outputs()).backward()
    ggn = oracle.diag_ggn_batch(oracle.hessian_exact)
    for name, parameter in used_in(made.model).items():
        close(parameter.grad_batch, oracle.grad_batch[name])
        close(parameter.batch_l2, oracle.batch_l2[name])
        close(parameter.variance, oracle.variance[name])
        close(parameter.diag_ggn_exact_batch, ggn[name])
        close(parameter.diag_ggn_exact, sum_batch(ggn)[name])


@pytest.mark.parametrize("samples", [1, 3, FEATURES])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("place", PLACES)
def test_derivatives(place: str, name: str, samples: int) -> None:
    """First order and the generalized Gauss-Newton are exact; as many samples as features can be mistaken for nothing else."""
    made = problem(name, samples, PLACES[place])
    if place == "behind it" and name in {
        "matrix",
        "parametric",
        "function of groups",
    }:  # the derivative uses parameters of layers that made none of it
        extend(made.model)
        with backpack(BatchGrad()), pytest.raises(BackpackError):
            made.loss(made.outputs()).backward()
        return
    check(made, Oracle(problem(name, samples, PLACES[place])))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv1d(2, 3, 2), (2, 4)),
    "stride": (lambda: nn.Conv2d(2, 3, (3, 2), stride=2, padding=(1, 0)), (2, 5, 4)),
    "unused border": (lambda: nn.Conv2d(1, 2, 2, stride=(3, 2), bias=False), (1, 7, 5)),
    "dilation": (lambda: nn.Conv1d(2, 1, 3, dilation=2, padding=1), (2, 7)),
    "groups": (lambda: nn.Conv2d(4, 2, 2, groups=2), (4, 3, 3)),
    "circular": (lambda: nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), (2, 4)),
    "volume": (lambda: nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), (1, 2, 3, 2)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 3)),
    "transposed, groups": (lambda: nn.ConvTranspose2d(4, 2, (2, 3), stride=(2, 1), groups=2, dilation=(1, 2)), (4, 2, 3)),
    "norm of groups": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 2)), (4, 3)),
    "norm of groups behind a layer": (lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)), (2, 4)),
    "norm by fixed statistics": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), fixed_norm(3), nn.Tanh(), nn.Conv1d(3, 2, 2)), (2, 5)),
    "norm of channels": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3), nn.Tanh(), nn.Conv1d(3, 2, 2)), (2, 5)),
    "norm of layers": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), (2, 3)),
    "norm of the input": (lambda: nn.Sequential(nn.LayerNorm((2, 3)), nn.Linear(3, 2)), (2, 2, 3)),
}


class Slopes(nn.Module):
    """The derivative of a function of what layers return."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return slope(self.layers(x).tanh().square().flatten(1).sum(1), x).flatten(1)


@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_of_layers(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of convolutions are convolutions, too, the other way round; no columns of all samples are masked for each of them."""
    make, shape = LAYERS[name]

    def made() -> Problem:
        torch.manual_seed(0)
        model, x = Slopes(make()).double(), torch.randn(samples, *shape, dtype=torch.float64)
        return Problem(model, x, [Term(nn.MSELoss(), torch.randn_like(model(x)))])

    oracle = Oracle(made())
    monkeypatch.setattr(Gap, "call_masked", lambda *_: pytest.fail("a layer is crossed sample by sample"))
    check(made(), oracle)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softplus", "gelu", "elu", "relu", "softmax", "log_sigmoid", "differential equation"])
def test_cost_of_derivatives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses of a weight and of its transposed are one; nothing is sent through activations to find out where samples lie."""
    made, oracle, uses = problem(name, 3), Oracle(problem(name, 3)), []
    monkeypatch.setattr(collector, "join", lambda parts: uses.append(join(parts)) or uses[-1])
    monkeypatch.setattr(crossings, "probe", lambda *_: pytest.fail("samples are searched for"))
    extend(made.model)
    extend(made.losses[0])
    with backpack(BatchGrad()):
        made.loss(made.outputs()).backward()
    for parameter, expected in used_in(made.model).items():
        close(expected.grad_batch, oracle.grad_batch[parameter])
    weight = next(iter(used_in(made.model).values())) if name == "differential equation" else made.model.inner.weight
    (found,) = [found for found in uses if found and found[0][0].parameters.get("weight") is weight]
    assert len(found) == 1


def layers(net: Net, x: Tensor) -> Tensor:
    return net.last(net.inner(net.first(x).tanh()).sin())


TRANSFORMS: dict[str, Function] = {
    "jvp": lambda net, x: jvp(partial(layers, net), (x,), (x.cos(),))[1],
    "vjp": lambda net, x: vjp(partial(layers, net), x)[1](x[:, :1].cos())[0],
    "vmap of grad": lambda net, x: vmap(grad(lambda row: layers(net, row).sum()))(x),
    "vmap of jacfwd": lambda net, x: vmap(jacfwd(partial(layers, net)))(x).flatten(1),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch, in forward mode
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_by_torch_func(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact in a model that returns them; refused, with this way out, where only its layers are extended."""
    monkeypatch.setitem(NETS, name, TRANSFORMS[name])
    check(problem(name, 3), Oracle(problem(name, 3)))
    made = problem(name, 3)
    for layer in made.model.children():
        extend(layer)
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match="no extended model has returned.*torch.func serves there.*extended"):
        made.loss(made.outputs()).backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch, in forward mode
@pytest.mark.parametrize("samples", [1, 3])
def test_factors_of_forward_derivatives(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``jvp`` multiplies with the weight of a layer are further positions of it; backward, there are no factors."""
    monkeypatch.setitem(NETS, "jvp", TRANSFORMS["jvp"])
    made = problem("jvp", samples)
    net, x, lossfunc = extend(made.model), made.x, extend(made.losses[0])
    h, change = (t.detach() for t in jvp(lambda x: net.first(x).tanh(), (x,), (x.cos(),)))
    z, dz = (t.detach().requires_grad_() for t in (net.inner(h), change @ net.inner.weight.T))
    with backpack(KFLR()):
        made.loss(made.outputs()).backward()
    delta = sum(torch.autograd.grad((dz * z.cos() @ net.last.weight.T).sum(), (z, dz)))
    close(net.inner.weight.kflr[0], 2 / samples * delta.T @ delta)
    close(net.inner.weight.kflr[1], (h.T @ h + change.T @ change) / samples)
    with backpack(KFLR()), pytest.raises(UnsupportedError, match="transposed, as in derivatives with respect to inputs, unless torch.func"):
        lossfunc(slope(net.last(net.first(x := x.clone().requires_grad_()).sin()), x), x.detach()).backward()


@pytest.mark.parametrize("samples", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", NETS)
def test_hessian_of_derivatives(name: str, samples: int) -> None:
    """Exact where the derivative is made of known operations; refused where it is an operation of its own."""
    made, oracle = problem(name, samples), Oracle(problem(name, samples))
    extend(made.model)
    extend(made.losses[0])
    if name not in {"softmax", "normalized", "channels", "groups", "groups of waves", "function of groups", "fixed statistics", "parametric"}:
        with backpack(DiagHessian()):
            made.loss(made.outputs()).backward()
        for parameter_name, parameter in used_in(made.model).items():
            close(parameter.diag_h, sum_batch(oracle.diag_h_batch)[parameter_name])
        return
    with backpack(DiagHessian()), pytest.raises(UnsupportedError, match=r"Backward0( of groups.*| \(weight\))? (is, or may|has terms)"):
        made.loss(made.outputs()).backward()
    assert results(made.model) == {}


# --- in the training loop ---------------------------------------------------------------------------------------------------------------------

Model = Callable[[Tensor], Tensor]


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def columns(model: Model, x: Tensor) -> Tensor:
    t, s = leaf(x[:, :1]), leaf(x[:, 1:])
    u = model(torch.cat([t, s], 1))
    return slope(u, t) + u * slope(u, s)[:, :1]


def laplacian(model: Model, x: Tensor) -> Tensor:
    x = leaf(x)
    first = slope(model(x), x)
    return sum(slope(first[:, i], x)[:, i : i + 1] for i in range(FEATURES))


def of_single_outputs(model: Model, x: Tensor) -> Tensor:
    x = leaf(x)
    return sum(slope(out, x) for out in model(x))


def with_energy(model: Model, x: Tensor) -> Tensor:
    x = leaf(x)
    energy = model(x)
    return torch.cat([energy, slope(energy, x)], 1)


def of_features(model: Model, x: Tensor) -> Tensor:
    h = model[0](x)
    return slope(model[2](model[1](h)), h)


def moved(model: Model, x: Tensor) -> Tensor:
    x = leaf(x)
    return model(x + 0.1 * slope(model(x), x))


OUTPUTS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "force": lambda model, x: slope(model(x := leaf(x)), x),
    "energy and force": with_energy,
    "columns of data": columns,
    "Laplacian": laplacian,
    "one output after the other": of_single_outputs,
    "of a function of the output": lambda model, x: slope(F.softplus(model(x := leaf(x))), x),
    "with respect to features": of_features,
    "at a place that was moved": moved,
}
MODELS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}


def in_the_loop(name: str, activation: str, samples: int) -> Problem:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(FEATURES, 6), MODELS[activation](), nn.Linear(6, 1)).double(),
        torch.randn(samples, FEATURES, dtype=torch.float64),
    )
    out = OUTPUTS[name](model, x)
    return Problem(
        freeze_unused(model, x, OUTPUTS[name]) if out.requires_grad else model, x, [Term(nn.MSELoss(), torch.randn_like(out))], OUTPUTS[name]
    )


@pytest.mark.parametrize("samples", [1, 3, FEATURES])
@pytest.mark.parametrize("activation", MODELS)
@pytest.mark.parametrize("name", OUTPUTS)
def test_derivatives_in_the_training_loop(name: str, activation: str, samples: int) -> None:
    """As those that a model returns."""
    check(in_the_loop(name, activation, samples), Oracle(in_the_loop(name, activation, samples)))


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def penalty_of_outputs(model: Model, x: Tensor, y: Tensor) -> Tensor:
    x = leaf(x)
    out = model(x)
    return F.cross_entropy(out, y) + 0.1 * (slope(out, x).norm(dim=1) - 1).square().mean()


def penalty_of_losses(model: Model, x: Tensor, y: Tensor) -> Tensor:
    x = leaf(x)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    return loss / len(x) + 0.1 * slope(loss, x).square().sum(1).mean()


def score_matching(model: Model, x: Tensor, _: Tensor) -> Tensor:
    x = leaf(x)
    score = model(x)
    return (sum(slope(score[:, i], x)[:, i] for i in range(2)) + 0.5 * score.square().sum(1)).mean()


LOSSES: dict[str, Loss] = {
    "penalty of outputs": penalty_of_outputs,
    "penalty of losses": penalty_of_losses,
    "penalty alone": lambda model, x, _: slope(model(x := leaf(x)), x).square().mean(),
    "score matching": score_matching,
    "with respect to outputs": lambda model, x, _: slope(h := model(x).square(), h).square().mean() + h.mean(),
}


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_derivatives(name: str, samples: int) -> None:
    """Each sample has the gradient of the loss of a mini-batch of one."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    x, y = torch.randn(samples, 3, dtype=torch.float64), torch.arange(samples) % 3
    expected = [
        torch.autograd.grad(LOSSES[name](model, x[n : n + 1], y[n : n + 1]), used := list(model.parameters()), allow_unused=True)
        for n in range(samples)
    ]
    with backpack(BatchGrad()):
        LOSSES[name](model, x, y).backward()
    for parameter, *rows in zip(used, *expected, strict=True):
        if rows[0] is None:
            assert not hasattr(parameter, "grad_batch")
            continue
        close(parameter.grad_batch, torch.stack(rows) / samples)
        close(parameter.grad, parameter.grad_batch.sum(0))


def of_parameters(model: nn.Module, x: Tensor) -> Tensor:
    return slope(model(x).square(), model[0].weight).square().sum()


def of_a_sum(model: nn.Module, x: Tensor) -> Tensor:
    x = leaf(x)
    return slope(model(x).sum() ** 2, x).square().sum(1).mean()


def of_what_all_share(model: nn.Module, x: Tensor) -> Tensor:
    shift = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    return (slope(model(x + shift).square(), shift) * model(x)).mean()


def of_columns(model: nn.Module, x: Tensor) -> Tensor:
    turned = leaf(x.T)
    return slope(model(turned.T).square(), turned).square().sum(0).mean()


def of_others(model: nn.Module, x: Tensor) -> Tensor:
    x = leaf(x)
    out = model(x.flip(0))
    return (slope(out.square(), x) + out).square().mean()


def of_made_weights(model: nn.Module, x: Tensor) -> Tensor:
    weight = model[0].weight * 1
    return slope(F.linear(x, weight).square(), weight).square().sum(1).mean()


@pytest.mark.parametrize("samples", [3, FEATURES])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("loss", [of_parameters, of_a_sum, of_what_all_share, of_columns, of_others, of_made_weights])
def test_derivatives_that_are_of_no_sample(loss: Callable, extension: type, samples: int) -> None:
    """Refused, also where there are as many rows as samples, and nothing is left."""
    model = extend(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1)).double())
    with backpack(extension()), pytest.raises(BackpackError):
        loss(model, torch.randn(samples, FEATURES, dtype=torch.float64)).backward()
    assert results(model) == {}
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_derivatives_outside_of_the_context(extension: type, extended: bool) -> None:
    """Refused, with two ways out."""
    model, x = extend(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))), torch.randn(3, FEATURES, requires_grad=True)
    lossfunc = extend(nn.MSELoss()) if extended else F.mse_loss
    force = slope(model(x), x)
    with backpack(extension()), pytest.raises(UnsupportedError, match=r"inside of the context.*or in the model's forward pass, and return them"):
        lossfunc(force, torch.randn(3, FEATURES)).backward(retain_graph=True)
    if extended:
        with backpack(extension()), pytest.raises(UnsupportedError, match="inside of the context"):
            torch.autograd.grad(lossfunc(force, torch.randn(3, FEATURES)), list(model.parameters()))
    assert results(model) == {}
    assert all(p.grad is None for p in model.parameters())
