r"""
Solve a differential equation by Gauss-Newton steps
===================================================

A network can be the solution of a differential equation: its derivatives with respect to its input are put into the equation, and what is left
over is made small at random points. Gradient descent is notoriously slow at that. The Gauss-Newton method needs the Jacobian of the residuals, which
``SqrtGGNExact`` yields during ``loss.backward()``, and the solution of a small system of equations, for the residuals are few.
"""

# %%
# The equation
# ------------
# Poisson's equation on the unit square, :math:`\Delta u = f` with :math:`u = 0` at the border, has the solution
# :math:`u(x, y) = \sin(\pi x) \sin(2 \pi y)` for :math:`f = -5 \pi^2 u`. A factor in front of the network makes it vanish at the border.
import math
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from _common import BLUE, ORANGE, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import SqrtGGNExact

POINTS = 256  # at which the equation shall hold, others in each step
SETTINGS = {"Adam": 1500, "Gauss-Newton": 40}  # steps
squares = extend(nn.MSELoss())


def solution(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x[:, :1]) * torch.sin(2 * math.pi * x[:, 1:])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).double())


def u(model: nn.Module, x: Tensor) -> Tensor:
    return 16 * (x * (1 - x)).prod(1, keepdim=True) * model(x)


# %%
# The loss
# --------
# The derivatives are taken in the training loop. Within ``with backpack(...)`` they count among the outputs of the model, a row for each point, and
# the mean of squares is a loss like any other.


def loss_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of squares, and the residuals ``[N, 1]``."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(u(model, x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    laplacian, f = sum(second).unsqueeze(1), -5 * math.pi**2 * solution(x.detach())
    return squares(laplacian, f), laplacian.detach() - f


# %%
# A Gauss-Newton step
# -------------------
# The square root of the generalized Gauss-Newton matrix of a mean of squares is :math:`\sqrt{2 / N}\, J`, with a row of the Jacobian :math:`J` for
# each residual :math:`r`. The step :math:`-J^\top (J J^\top + \lambda I)^{-1} r` solves a system of as many equations as there are points. How far to
# go is tried out.


def gauss_newton_step(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    with backpack(SqrtGGNExact()):
        loss, residuals = loss_of(model, x)
        loss.backward()
    J = torch.cat([p.sqrt_ggn_exact[0].flatten(1) for p in parameters], 1)
    K = J @ J.T
    K.diagonal().add_(1e-7 * K.diagonal().mean())
    step = J.T @ torch.linalg.solve(K, math.sqrt(2 / len(x)) * residuals)
    steps = [part.view_as(p) for part, p in zip(step.split([p.numel() for p in parameters]), parameters, strict=True)]
    start = [p.detach().clone() for p in parameters]

    def loss_after(rate: float) -> float:
        with torch.no_grad():
            for p, before, direction in zip(parameters, start, steps, strict=True):
                p.copy_(before - rate * direction)
        return loss_of(model, x)[0].item()

    loss_after(min((1, 0.5, 0.25, 0.1, 0.03, 0.01), key=loss_after))
    model.zero_grad()


def adam(model: nn.Module, steps: int) -> Callable[[nn.Module, Tensor], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(model: nn.Module, x: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x)[0].backward()
        optimizer.step()
        schedule.step()

    return step


# %%
# Both of them
# ------------
# The error is that of the solution, relative to its norm, on a grid that no step has seen.
axis = torch.linspace(0, 1, 61, dtype=torch.float64)
grid = torch.cartesian_prod(axis, axis)
truth = solution(grid)


def solve(name: str) -> tuple[list[float], list[float], Tensor]:
    """Times in seconds, errors, and the difference from the solution at the end."""
    model, points, spent, times, errors = network(), torch.Generator().manual_seed(1), 0.0, [], []
    step = adam(model, SETTINGS[name]) if name == "Adam" else gauss_newton_step
    for _ in tqdm(range(SETTINGS[name]), desc=name, unit="step"):
        x = torch.rand(POINTS, 2, generator=points, dtype=torch.float64)
        begin = time.perf_counter()
        step(model, x)
        spent += time.perf_counter() - begin
        with torch.no_grad():
            difference = u(model, grid) - truth
        times.append(spent)
        errors.append((difference.norm() / truth.norm()).item())
    print(f"{name:12}: error {errors[-1]:.1e} after {SETTINGS[name]} steps and {spent:.1f} s")
    return times, errors, difference.view(61, 61)


results = {name: solve(name) for name in SETTINGS}
assert results["Gauss-Newton"][1][-1] < results["Adam"][1][-1] / 3

# %%
# A few dozen steps lead closer to the solution than hundreds of gradient steps.
figure, (left, *others) = plt.subplots(1, 3, figsize=(13, 4.2), width_ratios=[1.4, 1, 1])
for (name, (times, errors, _)), colour in zip(results.items(), (ORANGE, BLUE), strict=True):
    left.plot(times, errors, color=colour, label=f"{name}, {SETTINGS[name]} steps")
left.set(title="Distance from the solution", xlabel="seconds", ylabel="relative error", yscale="log")
left.legend()
for axes, (name, (_, _, difference)) in zip(others, results.items(), strict=True):
    shown = axes.imshow(difference.abs().log10().T.numpy(), origin="lower", extent=(0, 1, 0, 1), vmin=-7, vmax=-3)
    axes.set(title=f"{name}: what is left", xlabel="x", ylabel="y")
figure.colorbar(shown, ax=others, label="difference from the solution, decimal logarithm", shrink=0.8)
save(figure, "differential_equation")
