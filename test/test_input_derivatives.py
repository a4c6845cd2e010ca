"""Models that return derivatives of networks with respect to their input: energies and forces, residuals of differential equations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, results
from backpack.extensions import BatchDiagGGNExact, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, Variance
from backpack.utils.errors import UnsupportedError

FEATURES = 4
Function = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Layers at hand; the forward pass is a function of them and of an input that requires a gradient."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.first, self.inner, self.last = function, nn.Linear(FEATURES, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm, self.groups, self.conv, self.slope = nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.Conv1d(1, 2, 3, padding=1), nn.PReLU()
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
    "convolution": lambda net, x: slope(net.conv(x[:, None]).tanh().square().mean((1, 2)), x),
    "parametric": lambda net, x: slope(net.last(net.slope(net.first(x))), x),
    "matrix": lambda net, x: slope((x @ net.matrix).tanh().square().sum(1), x),
    "norms": lambda net, x: behind(torch.tanh)(net, x).norm(dim=1, keepdim=True),
    "differential equation": residual,
}


def problem(name: str, samples: int) -> Problem:
    torch.manual_seed(0)
    model, x = Net(NETS[name]).double(), torch.randn(samples, FEATURES, dtype=torch.float64)
    out = model(x)
    used = torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
    for parameter, gradient in zip(list(model.parameters()), used, strict=True):
        parameter.requires_grad_(gradient is not None)
    return Problem(model, x, [Term(nn.MSELoss(), torch.randn_like(out))])


def used_in(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("samples", [1, 3, FEATURES])
@pytest.mark.parametrize("name", NETS)
def test_derivatives_that_a_model_returns(name: str, samples: int) -> None:
    """First order and the generalized Gauss-Newton are exact; as many samples as features can be mistaken for nothing else."""
    made, oracle = problem(name, samples), Oracle(problem(name, samples))
    extend(made.model)
    extend(made.losses[0])
    with backpack(BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact(), BatchDiagGGNExact()):
        made.loss(made.outputs()).backward()
    ggn = oracle.diag_ggn_batch(oracle.hessian_exact)
    for parameter_name, parameter in used_in(made.model).items():
        close(parameter.grad_batch, oracle.grad_batch[parameter_name])
        close(parameter.batch_l2, oracle.batch_l2[parameter_name])
        close(parameter.variance, oracle.variance[parameter_name])
        close(parameter.diag_ggn_exact_batch, ggn[parameter_name])
        close(parameter.diag_ggn_exact, sum_batch(ggn)[parameter_name])


@pytest.mark.parametrize("name", ["sin", "matrix", "gelu", "softplus", "log_sigmoid", "tanh", "convolution", "normalized"])
def test_hessian_of_derivatives(name: str) -> None:
    """Exact where the derivative is made of known operations; refused where it is an operation of its own."""
    made, oracle = problem(name, 3), Oracle(problem(name, 3))
    extend(made.model)
    extend(made.losses[0])
    if name == "sin":
        with backpack(DiagHessian()):
            made.loss(made.outputs()).backward()
        for parameter_name, parameter in used_in(made.model).items():
            close(parameter.diag_h, sum_batch(oracle.diag_h_batch)[parameter_name])
        return
    with backpack(DiagHessian()), pytest.raises(UnsupportedError, match="BackwardBackward0 is, or may hide, a curved operation"):
        made.loss(made.outputs()).backward()
    assert results(made.model) == {}


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_derivatives_in_the_training_loop(extension: type, extended: bool) -> None:
    """Refused, with a way out."""
    model, x = extend(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))), torch.randn(3, FEATURES, requires_grad=True)
    lossfunc = extend(nn.MSELoss()) if extended else F.mse_loss
    with backpack(extension()), pytest.raises(UnsupportedError, match="in the model's forward pass, and return them"):
        lossfunc(slope(model(x), x), torch.randn(3, FEATURES)).backward()
    assert results(model) == {}
    assert all(p.grad is None for p in model.parameters())
