"""Systems of equations with a matrix that all samples share: crossed without masks, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_extensions import close
from torch import Tensor, nn
from torch.linalg import solve, solve_triangular

from backpack import backpack, extend
from backpack.core.crossings import Gap
from backpack.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNMC

SOLVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "from the left": lambda a, h: solve(a, h.T).T,
    "from the right": lambda a, h: solve(a, h, left=False),
    "upper triangle": lambda a, h: solve_triangular(a, h.T, upper=True).T,
    "lower triangle": lambda a, h: solve_triangular(a, h.T, upper=False).T,
    "upper triangle, from the right": lambda a, h: solve_triangular(a, h, upper=True, left=False),
    "lower triangle, ones, from the right": lambda a, h: solve_triangular(a, h, upper=False, left=False, unitriangular=True),
    "upper triangle, ones": lambda a, h: solve_triangular(a, h.T, upper=True, unitriangular=True).T,
    "rows of samples": lambda a, h: solve(a, h.unsqueeze(1).repeat(1, 2, 1).mul(torch.tensor([[1.0], [2.0]]).double()).flatten(0, 1).T).T[1::2],
    "symmetric": lambda a, h: solve(a @ a.T + torch.eye(4).double(), h.T).T,
}


class Solves(nn.Module):
    """Solves with a matrix between two layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.matrix = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(2 * torch.eye(4) + 0.3 * torch.randn(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.matrix, self.a(x).tanh()))


@pytest.mark.parametrize("samples", [1, 2, 4, 5])
@pytest.mark.parametrize("name", SOLVED)
def test_against_oracle(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, lossfunc = extend(Solves(SOLVED[name]).double()), extend(nn.MSELoss(reduction="sum"))
    x, y = torch.randn(samples, 3).double(), torch.randn(samples, 2).double()
    if name != "symmetric":  # a matrix that is made of the parameter
        monkeypatch.setattr(Gap, "call_split", lambda *_: pytest.fail("crossed sample by sample"))
    with backpack(BatchGrad(), BatchDiagGGNExact(), DiagGGNMC()):
        lossfunc(net(x), y).backward()
    for parameter in net.parameters():
        outputs = [net(x[n : n + 1]) for n in range(samples)]
        rows = [torch.autograd.grad((out - y[n]).square().sum(), parameter, retain_graph=True)[0] for n, out in enumerate(outputs)]
        close(parameter.grad_batch, torch.stack(rows))
        squares = [sum(2 * torch.autograd.grad(entry, parameter, retain_graph=True)[0].square() for entry in out[0]) for out in outputs]
        close(parameter.diag_ggn_exact_batch, torch.stack(squares))


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
@pytest.mark.parametrize("name", ["from the left", "from the right", "upper triangle"])
def test_results_that_can_be_differentiated(name: str) -> None:
    torch.manual_seed(0)
    net, x = extend(Solves(SOLVED[name]).double()), torch.randn(5, 3).double()
    with backpack(BatchGrad()):
        net(x).square().sum().backward(create_graph=True)
    found = torch.autograd.grad(net.matrix.grad_batch.square().sum(), [net.a.weight, net.matrix])
    rows = [torch.autograd.grad(net(x[n : n + 1]).square().sum(), net.matrix, create_graph=True)[0] for n in range(5)]
    for gradient, expected in zip(found, torch.autograd.grad(torch.stack(rows).square().sum(), [net.a.weight, net.matrix]), strict=True):
        close(gradient, expected)
    net.zero_grad()


@pytest.mark.parametrize("name", ["from the left", "from the right"])
def test_complex_systems(name: str) -> None:
    """The parameter is real: the product would be another one."""
    torch.manual_seed(0)
    net = extend(Solves(lambda a, h: SOLVED[name](a * (1 + 0.5j), h.to(torch.complex128)).abs()).double())
    x = torch.randn(5, 3).double()
    with backpack(BatchGrad()):
        net(x).square().sum().backward()
    rows = [torch.autograd.grad(net(x[n : n + 1]).square().sum(), net.matrix)[0] for n in range(5)]
    close(net.matrix.grad_batch, torch.stack(rows))


def test_right_hand_sides_of_data_alone() -> None:
    torch.manual_seed(0)
    net, x = extend(Solves(lambda a, h: solve(a, h.detach(), left=False) + h).double()), torch.randn(5, 3).double()
    with backpack(BatchGrad()):
        net(x).square().sum().backward()
    rows = [torch.autograd.grad(net(x[n : n + 1]).square().sum(), net.matrix)[0] for n in range(5)]
    close(net.matrix.grad_batch, torch.stack(rows))
