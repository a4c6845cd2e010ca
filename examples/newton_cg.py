"""
Newton's method without a matrix
================================

A step of Newton's method solves a linear system with as many unknowns as the network has weights. Conjugate gradients do it with products alone, and
``backpack.hessianfree`` has the products with the generalized Gauss-Newton matrix (GGN). A few dozen such steps do what thousands
of steps along the gradient do.
"""

# %%
# How a disease progresses
# ------------------------
# Ten measurements of 442 patients; the network predicts the progression of their diabetes after one year.
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREEN, GREY, save
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from tqdm import tqdm

from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.utils.convert_parameters import vector_to_parameter_list

features, progression = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
X = (features - features.mean(0)) / features.std(0)
y = ((progression - progression.mean()) / progression.std()).unsqueeze(1)
WEIGHT_DECAY = 1e-4
lossfunc = nn.MSELoss()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def objective(model: nn.Module) -> Tensor:
    return lossfunc(model(X), y) + WEIGHT_DECAY / 2 * sum(p.square().sum() for p in model.parameters())


# %%
# Conjugate gradients
# -------------------


def solve(product: Callable, b: Tensor, tolerance: float, most: int) -> tuple[Tensor, list[float]]:
    """Solve ``A x = b`` for a positive definite ``A``; return the relative residuals of the iterations, too."""
    x, r = torch.zeros_like(b), b.clone()
    d, residuals = r, [1.0]
    while residuals[-1] > tolerance and len(residuals) <= most:
        Ad = product(d)
        step = (r @ r) / (d @ Ad)
        x, r_new = x + step * d, r - step * Ad
        d, r = r_new + (r_new @ r_new) / (r @ r) * d, r_new
        residuals.append((r.norm() / b.norm()).item())
    return x, residuals


# %%
# The system
# ----------
# One forward pass serves the gradient and all products. Weight decay and damping add a multiple of the identity.


def system(model: nn.Module, damping: float) -> tuple[Tensor, Callable]:
    """Gradient of the objective, and the product with its damped GGN."""
    parameters = list(model.parameters())
    outputs = model(X)
    loss = lossfunc(outputs, y)
    gradient = flat(list(torch.autograd.grad(loss, parameters, retain_graph=True))) + WEIGHT_DECAY * flat(parameters).detach()

    def product(v: Tensor) -> Tensor:
        return flat(list(ggn_vector_product(loss, outputs, model, vector_to_parameter_list(v, parameters)))) + (WEIGHT_DECAY + damping) * v

    return gradient, product


# %%
# Is that so? The matrix is small enough to be formed, and the system to be solved. The GGN of a network with one output has a rank of at most the
# number of samples, and few large eigenvalues, which is what conjugate gradients like.
model = network()
for damping in (1e-1, 1e-2):
    gradient, product = system(model, damping)
    matrix = torch.stack([product(e) for e in torch.eye(len(gradient))])
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-4, atol=1e-5)
    solution, residuals = solve(product, gradient, tolerance=1e-4, most=100)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, gradient), rtol=1e-2, atol=1e-2)
    print(f"{len(gradient)} unknowns, damping {damping}: {len(residuals) - 1} products")

# %%
# Newton's method
# ---------------
# Levenberg and Marquardt's rule chooses the damping: less of it when the quadratic model has predicted the progress well, more when it has not; steps
# that make things worse are not taken. A product costs about two gradients, half of each forward and backward pass being saved.


def newton(budget: int) -> tuple[list[int], list[float], list]:
    model, damping = network(), 0.03
    parameters = list(model.parameters())
    costs, values, history = [0], [objective(model).item()], []
    with tqdm(total=budget, desc="Newton", unit="gradient") as progress:
        while costs[-1] < budget:
            gradient, product = system(model, damping)
            step, residuals = solve(product, gradient, tolerance=0.03, most=30)
            old = [p.detach().clone() for p in parameters]
            predicted = gradient @ step - step @ (product(step) - damping * step) / 2  # of the model without damping
            with torch.no_grad():
                for p, d in zip(parameters, vector_to_parameter_list(step, parameters), strict=True):
                    p.sub_(d)
                value = objective(model).item()
                ratio = (values[-1] - value) / predicted.item()
                if ratio < 0:
                    for p, before in zip(parameters, old, strict=True):
                        p.copy_(before)
            damping *= 1 / 3 if ratio > 0.75 else 3 if ratio < 0.25 else 1
            cost = 2 + 2 * len(residuals)
            costs.append(costs[-1] + cost)
            values.append(min(value, values[-1]))
            history.append(residuals)
            progress.update(cost)
    return costs, values, history


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
BUDGET = 3000
costs, values, history = newton(BUDGET)
runs = {
    "gradient descent, momentum": first_order(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), BUDGET),
    "Adam": first_order(lambda ps: torch.optim.Adam(ps, lr=0.01), BUDGET),
    "Newton, conjugate gradients": (costs, values),
}
for name, (_, found) in runs.items():
    print(f"{name:28} {len(found) - 1:5} steps, objective {found[-1]:.4f}")
assert len(values) < 120 and values[-1] < 1.05 * min(found[-1] for _, found in runs.values())

# %%
# What it buys
# ------------
# Few, expensive steps, without a step size to be tuned. At equal cost they are behind at first and ahead at the end. As the objective falls, so
# does the damping, and the systems become harder; 30 products are then far from a solution, and yet enough for a good step.
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2))
for (name, (spent, found)), colour in zip(runs.items(), (GREY, GREEN, BLUE), strict=True):
    left.plot(range(1, len(found) + 1), found, color=colour)
    middle.plot([cost + 1 for cost in spent], found, color=colour, label=name)
for axes, label in ((left, "steps"), (middle, "cost [gradients]")):
    axes.set(xlabel=label, xscale="log", yscale="log")
left.set(title="Step by step", ylabel="objective [variances of the target]")
middle.set(title="At equal cost")
middle.legend(loc="lower left")
colours = plt.get_cmap("viridis")
for number, residuals in enumerate(history):
    right.plot(residuals, color=colours(number / len(history)), linewidth=1)
right.axhline(0.03, color=GREY, linestyle=":")
right.annotate("small enough", (0, 0.03), xytext=(0, -11), textcoords="offset points", color=GREY)
right.set(title="Conjugate gradients", xlabel="products with the GGN", ylabel="relative residual", yscale="log")
bar = figure.colorbar(plt.cm.ScalarMappable(plt.Normalize(1, len(history)), colours), ax=right, label="step of Newton's method")
save(figure, "newton_cg")
