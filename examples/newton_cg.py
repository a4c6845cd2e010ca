"""
Newton's method without a matrix
================================

A step of Newton's method solves a linear system with as many unknowns as the network has weights. Conjugate gradients do it with products alone, and
``backpack.hessianfree`` has the products with the generalized Gauss-Newton matrix (GGN). Its diagonal, from ``DiagGGNExact``, makes them converge faster.
"""

# %%
# How a disease progresses
# ------------------------
# Ten measurements of 442 patients; the network predicts the progression of their diabetes after one year.
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREEN, GREY, ORANGE, save
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, disable, extend
from backpack.extensions import DiagGGNExact
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.utils.convert_parameters import vector_to_parameter_list

features, progression = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
X = (features - features.mean(0)) / features.std(0)
X[:, 2] *= 10  # a measurement in another unit: what scales a weight wrongly is what slows down gradient descent
y = ((progression - progression.mean()) / progression.std()).unsqueeze(1)
WEIGHT_DECAY = 1e-2
lossfunc = extend(nn.MSELoss())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def objective(model: nn.Module) -> Tensor:
    return lossfunc(model(X), y) + WEIGHT_DECAY / 2 * sum(p.square().sum() for p in model.parameters())


# %%
# Conjugate gradients
# -------------------


def solve(product: Callable, b: Tensor, inverse: Tensor, tolerance: float, most: int) -> tuple[Tensor, list[float]]:
    """Solve ``A x = b`` for positive definite ``A``, preconditioned by a diagonal; return the relative residuals, too."""
    x, r = torch.zeros_like(b), b.clone()
    d = z = inverse * r
    residuals = [1.0]
    while residuals[-1] > tolerance and len(residuals) <= most:
        Ad = product(d)
        step = (r @ z) / (d @ Ad)
        x, r_new = x + step * d, r - step * Ad
        z_new = inverse * r_new
        d, r, z = z_new + (r_new @ z_new) / (r @ z) * d, r_new, z_new
        residuals.append((r.norm() / b.norm()).item())
    return x, residuals


# %%
# The system
# ----------
# One forward pass serves all products. ``DiagGGNExact`` takes one backward pass; the weight decay adds a multiple of the identity.


def system(model: nn.Module, damping: float) -> tuple[Tensor, Callable, Tensor]:
    """Gradient of the objective, product with its damped GGN, and the diagonal of that."""
    parameters, shift = list(model.parameters()), WEIGHT_DECAY + damping
    model.zero_grad()
    with backpack(DiagGGNExact()):
        lossfunc(model(X), y).backward()
    gradient = flat([p.grad + WEIGHT_DECAY * p.detach() for p in parameters])
    diagonal = flat([p.diag_ggn_exact for p in parameters]) + shift
    with disable():
        outputs = model(X)
        loss = lossfunc(outputs, y)

    def product(v: Tensor) -> Tensor:
        return flat(ggn_vector_product(loss, outputs, model, vector_to_parameter_list(v, parameters))) + shift * v

    return gradient, product, diagonal


model = network()
gradient, product, diagonal = system(model, damping=0.0)
matrix = torch.stack([product(e) for e in torch.eye(len(gradient))])
torch.testing.assert_close(matrix.diagonal(), diagonal, rtol=1e-4, atol=1e-5)
plain, plain_residuals = solve(product, gradient, torch.ones_like(diagonal), 1e-4, 300)
better, better_residuals = solve(product, gradient, 1 / diagonal, 1e-4, 300)
torch.testing.assert_close(better, torch.linalg.solve(matrix, gradient), rtol=1e-2, atol=1e-3)
print(f"conjugate gradients: {len(plain_residuals) - 1} products without, {len(better_residuals) - 1} with the diagonal")
assert len(better_residuals) < len(plain_residuals)

# %%
# Newton's method
# ---------------
# Levenberg and Marquardt's rule chooses the damping: less of it when the quadratic model has predicted the progress well, more when it has not; steps
# that make things worse are not taken. A product costs about two gradients, and the diagonal, of one output, about one.


def newton(budget: int) -> tuple[list[int], list[float]]:
    model, damping = network(), 1.0
    parameters = list(model.parameters())
    costs, values = [0], [objective(model).item()]
    with tqdm(total=budget, desc="Newton", unit="gradient") as progress:
        while costs[-1] < budget:
            gradient, product, diagonal = system(model, damping)
            step, residuals = solve(product, gradient, 1 / diagonal, tolerance=0.05, most=40)
            cost = 3 + 2 * (len(residuals) - 1)
            with torch.no_grad():
                predicted = gradient @ step - step @ (product(step) - damping * step) / 2
                for p, d in zip(parameters, vector_to_parameter_list(step, parameters), strict=True):
                    p -= d
                value = objective(model).item()
                ratio = (values[-1] - value) / predicted.item()
                if value > values[-1]:
                    for p, d in zip(parameters, vector_to_parameter_list(step, parameters), strict=True):
                        p += d
            damping *= 0.5 if ratio > 0.75 else 2 if ratio < 0.25 else 1
            costs.append(costs[-1] + cost)
            values.append(min(value, values[-1]))
            progress.update(cost)
    return costs, values


def first_order(make: Callable, budget: int) -> tuple[list[int], list[float]]:
    model = network()
    optimizer, values = make(model.parameters()), []
    for _ in range(budget):
        optimizer.zero_grad()
        loss = objective(model)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return list(range(budget)), values


# %%
# Step sizes of the others are the best of small grids.
BUDGET = 1500
runs = {
    "gradient descent, momentum": first_order(lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9), BUDGET),
    "Adam": first_order(lambda ps: torch.optim.Adam(ps, lr=0.01), BUDGET),
    "Newton, conjugate gradients": newton(BUDGET),
}
for name, (costs, values) in runs.items():
    print(f"{name:28} objective {values[-1]:.4f}")
