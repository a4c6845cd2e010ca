"""
Differentiate the variance
==========================

Quantities of a pass with ``create_graph=True`` are functions of the parameters that can be differentiated like the loss. So the noise of the
gradient, the trace of its covariance, can be made part of what is minimized: the samples are to agree about where to go.
"""

# %%
# The noise of a gradient, and its gradient
# -----------------------------------------
# ``variance`` holds, for each entry of a parameter, how much the per-sample gradients differ. With ``create_graph=True`` its sum can be
# differentiated; the output of the model is kept in a variable, because the pass reads it again.
import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, digits, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, clear, extend
from backpack.extensions import Variance

X, y, X_test, y_test = digits()
lossfunc = extend(nn.CrossEntropyLoss())


def network() -> nn.Module:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))


def loss_and_noise(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a mini-batch, and the trace of the covariance of its per-sample gradients. Both can be differentiated."""
    params = list(model.parameters())
    with backpack(Variance()):
        output = model(x)
        loss = lossfunc(output, labels)
        torch.autograd.grad(loss, params, create_graph=True)
    # gradients of single samples are N times the summands of a mean loss
    return loss, len(x) ** 2 * sum(p.variance.sum() for p in params)


# %%
# The derivative is that of the definition: a step along some direction changes the noise as predicted.
model = network().double()
direction = [torch.randn_like(p) for p in model.parameters()]
batch = X[:64].double(), y[:64]
slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(loss_and_noise(model, *batch)[1], list(model.parameters())), direction, strict=True))
values = []
for step in (1e-5, -2e-5):
    with torch.no_grad():
        for parameter, d in zip(model.parameters(), direction, strict=True):
            parameter.add_(d, alpha=step)
    values.append(loss_and_noise(model, *batch)[1].item())
quotient = (values[0] - values[1]) / 2e-5
print(f"derivative of the noise {slope:.6f}, difference quotient {quotient:.6f}")
assert abs(slope - quotient) < 1e-6 * abs(quotient)

# %%
# Training for agreement
# ----------------------
# The same network, with and without the noise in what is minimized.
STEPS, RATE, SIZE = 400, 0.5, 128


def train(weight: float) -> dict[str, list[float]]:
    model, found = network(), {"noise": [], "training": [], "test": []}
    params, order = list(model.parameters()), torch.Generator().manual_seed(0)
    for step in tqdm(range(STEPS), desc=f"weight {weight}"):
        rows = torch.randint(len(X), (SIZE,), generator=order)
        loss, noise = loss_and_noise(model, X[rows], y[rows])
        gradients = torch.autograd.grad(loss + weight * noise, params)
        with torch.no_grad():
            for parameter, gradient in zip(params, gradients, strict=True):
                parameter.sub_(gradient, alpha=RATE)
        if step % 10 == 9:
            found["noise"].append(loss_and_noise(model, X, y)[1].item())
            with torch.no_grad():
                found["training"].append(lossfunc(model(X), y).item())
                found["test"].append((model(X_test).argmax(1) == y_test).float().mean().item())
    clear(model)  # the results hold the graph of the last pass
    return found


WEIGHTS = {0.0: GREY, 0.001: BLUE, 0.01: ORANGE}
runs = {weight: train(weight) for weight in WEIGHTS}
for weight, run in runs.items():
    print(f"weight {weight:5}: noise {run['noise'][-1]:7.3f}, training loss {run['training'][-1]:.4f}, test accuracy {100 * run['test'][-1]:.1f} %")

# %%
# The samples agree more, and more so the more it counts; loss and accuracy go the way that they go without it.
noises = [run["noise"][-1] for run in runs.values()]
assert noises == sorted(noises, reverse=True)
assert min(run["test"][-1] for run in runs.values()) > 0.9

figure, axes = plt.subplots(1, 3, figsize=(10, 3.2))
steps = range(10, STEPS + 1, 10)
for axis, (key, title) in zip(axes, (("noise", "Noise of the gradient"), ("training", "Training loss"), ("test", "Test accuracy")), strict=True):
    for weight, color in WEIGHTS.items():
        axis.plot(steps, runs[weight][key], color=color, label=f"weight {weight:g}")
    axis.set(title=title, xlabel="step", yscale="linear" if key == "test" else "log")
axes[0].set_ylabel("trace of the covariance")
axes[2].set_ylim(0.8, 1.0)
axes[2].legend()
save(figure, "differentiable_variance")
