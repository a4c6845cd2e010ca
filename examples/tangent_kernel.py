"""
Jacobians in batches, and the neural tangent kernel
===================================================

``SqrtGGNExact`` is the Jacobian of the network's outputs if the Hessian of the loss is the identity, which is so for half the sum of squares.
Inner products of the Jacobian's rows are the neural tangent kernel. A wide network, trained by gradient descent, predicts almost what regression
with this kernel predicts: one equation, no training.
"""

# %%
# Odd and even digits
# -------------------
# The network has one output, which shall be 1 for even digits and -1 for odd ones.
import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, digits, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import SqrtGGNExact

X, labels, X_test, labels_test = digits()
X, labels, X_test, labels_test = X[:300], labels[:300], X_test[:200], labels_test[:200]
order = labels.argsort()
X, labels = X[order], labels[order]  # sorted by digit, so that the kernel can be looked at
y, y_test = ((1 - 2.0 * (t % 2)).unsqueeze(1) for t in (labels, labels_test))
squares = extend(nn.MSELoss(reduction="sum"))


class Network(nn.Module):
    """One hidden layer in the parametrisation of the theory: the scale is outside of the weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, width), nn.Linear(width, 1, bias=False)
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.hidden(x) / 8).relu()) / self.out.in_features**0.5


# %%
# The Jacobian
# ------------
# All rows at once; the targets do not matter. Compared with one ``autograd.grad`` for each row.


def jacobian(model: nn.Module, X: Tensor) -> Tensor:
    """The derivative of the outputs, ``[N, P]``."""
    outputs = model(X)
    with backpack(SqrtGGNExact()):
        (0.5 * squares(outputs, torch.zeros_like(outputs))).backward()
    J = torch.cat([p.sqrt_ggn_exact[0].flatten(1) for p in model.parameters()], dim=1)
    model.zero_grad()
    return J


model = extend(Network(32))
J = jacobian(model, X)
for n in (0, 100, 299):
    row = torch.autograd.grad(model(X[n : n + 1]).sum(), list(model.parameters()))
    torch.testing.assert_close(J[n], torch.cat([g.flatten() for g in row]))

# %%
# Regression with the kernel, and training
# ----------------------------------------
# Gradient descent on the squares, for :math:`t` steps of size :math:`\eta`, gives the linearised network
# :math:`f(x) = f_0(x) + K(x, X)\, K^{-1} (1 - e^{-\eta K t})\, (y - f_0(X))` with :math:`K = J J^\top`, up to terms of higher order in
# :math:`\eta`. The wider the network, the closer it stays to its linearisation.
STEPS = 400


def compare(width: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = extend(Network(width))
    J, J_test = jacobian(model, X), jacobian(model, X_test)
    K = J @ J.T
    values, vectors = torch.linalg.eigh(K)
    step_size = 1 / values[-1].item()
    learned = (1 - (1 - step_size * values.clamp(min=0)) ** STEPS) / values.clamp(min=1e-6)
    with torch.no_grad():
        residual = y - model(X)
        predicted = model(X_test) + J_test @ (J.T @ (vectors @ (learned[:, None] * (vectors.T @ residual))))
    for _ in tqdm(range(STEPS), desc=f"width {width}", unit="step"):
        loss = 0.5 * squares(model(X), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(step_size * g)
    with torch.no_grad():
        return {"kernel": K, "predicted": predicted, "trained": model(X_test)}


results = {width: compare(width) for width in (16, 128, 1024)}
errors = []
for width, result in results.items():
    errors.append((result["predicted"] - result["trained"]).square().mean().sqrt().item())
    right = [(result[kind].sign() == y_test).float().mean().item() for kind in ("predicted", "trained")]
    print(f"width {width:5}: distance {errors[-1]:.3f}; odd or even right in {right[0]:.1%} (kernel), {right[1]:.1%} (trained network)")
assert errors == sorted(errors, reverse=True) and errors[-1] < 0.15

# %%
# The kernel knows the digits, although no label has entered it.
figure, (left, *others) = plt.subplots(1, 4, figsize=(14, 4.2), width_ratios=[1.25, 1, 1, 1])
kernel = results[1024]["kernel"]
scale = kernel.diagonal().sqrt()
shown = left.imshow((kernel / scale.outer(scale)).numpy(), vmin=0.5, vmax=1)
edges = torch.searchsorted(labels, torch.arange(11)).tolist()
middles = [(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
left.set(title="Kernel, normalised", xlabel="digit", ylabel="digit", xticks=middles, yticks=middles, xticklabels=range(10), yticklabels=range(10))
left.tick_params(length=0)
figure.colorbar(shown, ax=left, label="cosine of two gradients", shrink=0.75)
for axes, (width, result), error in zip(others, results.items(), errors, strict=True):
    axes.axline((0, 0), slope=1, color=GREY, linewidth=1)
    for sign, colour, name in ((1, BLUE, "even"), (-1, ORANGE, "odd")):
        chosen = (y_test == sign).squeeze(1)
        axes.scatter(result["predicted"][chosen], result["trained"][chosen], s=12, color=colour, label=name, alpha=0.7)
    axes.set(title=f"width {width}", xlabel="kernel regression", xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), aspect="equal")
    axes.text(0.97, 0.04, f"distance {error:.2f}", transform=axes.transAxes, ha="right")
others[0].set_ylabel("output of the trained network")
others[0].legend(loc="upper left", markerscale=1.5)
save(figure, "tangent_kernel")
