"""
Laplace approximation: a classifier that knows where it knows nothing
=====================================================================

Far away from all data a trained network is as sure of itself as ever. The Laplace approximation takes the curvature of the loss at the trained
weights for the inverse covariance of the weights. The predictions that it averages are cautious where no data has been. Three curvatures are
compared: the complete generalized Gauss-Newton matrix (GGN), Kronecker factors, and the diagonal.
"""

# %%
# Three wines in two dimensions
# -----------------------------
import matplotlib.pyplot as plt
import torch
from _common import save
from matplotlib.colors import ListedColormap
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import KFLR, DiagGGNExact, SqrtGGNExact

wine = load_wine()
X = torch.from_numpy(PCA(2).fit_transform(StandardScaler().fit_transform(wine.data))).float()
y = torch.from_numpy(wine.target)
order = torch.randperm(len(X))
train, test = order[:120], order[120:]

# %%
# Train
# -----
# Gaussian weights with the precision :math:`\tau` are the prior, and the loss, a sum over samples plus :math:`\tau |\theta|^2 / 2`, is the negative
# logarithm of the posterior.
TAU = 0.5
model = extend(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)))
lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters, lr=0.01)
for _ in tqdm(range(1500), desc="training", unit="step"):
    optimizer.zero_grad()
    (lossfunc(model(X[train]), y[train]) + TAU / 2 * sum(p.square().sum() for p in parameters)).backward()
    optimizer.step()

# %%
# Three curvatures from one backward pass
# ---------------------------------------
# The columns of ``SqrtGGNExact``, side by side, are a matrix :math:`U` with :math:`U^\top U` equal to the GGN.
with backpack(SqrtGGNExact(), KFLR(), DiagGGNExact()):
    lossfunc(model(X[train]), y[train]).backward()

U = torch.cat([p.sqrt_ggn_exact.flatten(2) for p in parameters], dim=2).flatten(0, 1)
full = (U.T @ U + TAU * torch.eye(U.shape[1])).inverse()
diagonal = 1 / (torch.cat([p.diag_ggn_exact.flatten() for p in parameters]) + TAU)
torch.testing.assert_close((U.T @ U).diagonal() + TAU, 1 / diagonal, rtol=1e-4, atol=1e-4)

# %%
# :math:`B \otimes A + \tau I` has the eigenvectors of the Kronecker product, so that the prior can be added exactly. A bias has a single factor.


def kronecker_covariance(factors: list[Tensor]) -> Tensor:
    values, vectors = zip(*(torch.linalg.eigh(factor) for factor in factors), strict=True)
    products, basis = (values[0], vectors[0]) if len(factors) == 1 else (torch.kron(*values), torch.kron(*vectors))
    return basis / (products + TAU) @ basis.T


COVARIANCES = {
    "complete GGN": full,
    "Kronecker factors": torch.block_diag(*(kronecker_covariance(p.kflr) for p in parameters)),
    "diagonal": diagonal.diag(),
}

# %%
# Predictions
# -----------
# Around the trained weights the network is linearised; then the outputs are Gaussian with the covariance :math:`J \Sigma J^\top`. The Jacobian
# :math:`J` of all outputs with respect to all weights is the square root of the GGN of a loss whose Hessian is the identity: half the sum of squares.
# Targets do not matter for it.
squares = extend(nn.MSELoss(reduction="sum"))


def jacobian(X: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[N, C]`` and their Jacobian ``[N, C, P]``."""
    outputs = model(X)
    with backpack(SqrtGGNExact()):
        (0.5 * squares(outputs, torch.zeros_like(outputs))).backward()
    return outputs.detach(), torch.cat([p.sqrt_ggn_exact.flatten(2) for p in parameters], dim=2).transpose(0, 1)


outputs, J = jacobian(X[:5])
for c in range(3):
    one = torch.autograd.grad(model(X[4:5])[0, c], parameters)
    torch.testing.assert_close(J[4, c], torch.cat([g.flatten() for g in one]))

draws = torch.randn(300, 1, 3)


def predict(X: Tensor, covariance: Tensor | None) -> Tensor:
    """Probabilities of the classes, ``[N, C]``."""
    outputs, J = jacobian(X)
    if covariance is None:
        return outputs.softmax(1)
    spread = torch.linalg.cholesky(J @ covariance @ J.transpose(1, 2) + 1e-4 * torch.eye(3))
    return (outputs + torch.einsum("ncd,mnd->mnc", spread, draws.expand(-1, len(X), -1))).softmax(2).mean(0)


# %%
# What changes
# ------------
# Far away the trained weights alone are certain, and their neighbours disagree. Near the data not much changes, except with the diagonal: it knows of
# no correlation between weights, takes them to be freer than they are, and is too cautious everywhere.
MODES = {"trained weights": None, **COVARIANCES}
radius = 12
angles = torch.linspace(0, 2 * torch.pi, 200)
circle = radius * torch.stack([angles.cos(), angles.sin()], dim=1)
entropy = {}
for name, covariance in MODES.items():
    p = predict(X[test], covariance)
    accuracy, loss = (p.argmax(1) == y[test]).float().mean(), -p[range(len(test)), y[test]].log().mean()
    far = predict(circle, covariance)
    entropy[name] = -(far * far.clamp(min=1e-12).log()).sum(1).mean().item()
    print(f"{name:18} test accuracy {accuracy:.1%}, loss {loss:.3f} nats; entropy far away {entropy[name]:.3f} nats (at most 1.099)")
    assert accuracy > 0.9
assert entropy["complete GGN"] > 2 * entropy["trained weights"]

# %%
# Colours say which wine, and how dark they are, how sure the prediction is.
side = 90
line = torch.linspace(-radius, radius, side)
grid = torch.cartesian_prod(line, line)
base = torch.tensor([[0x00, 0x60, 0xA8], [0xE0, 0x7B, 0x00], [0x2A, 0x9D, 0x5C]]) / 255

figure, panels = plt.subplots(1, 4, figsize=(13, 4), sharey=True)
for axes, (name, covariance) in zip(panels, MODES.items(), strict=True):
    p = torch.cat([predict(part, covariance) for part in grid.split(2000)])
    certainty = (p.amax(1) - 1 / 3) * 1.5  # between 0 and 1
    colours = 1 - certainty[:, None] * (1 - p @ base)
    image = colours.view(side, side, 3).transpose(0, 1).clamp(0, 1)
    axes.imshow(image.numpy(), origin="lower", extent=(-radius, radius, -radius, radius), interpolation="bilinear")
    levels = axes.contour(line, line, p.amax(1).view(side, side).T, levels=[0.6, 0.9, 0.99], colors="black", linewidths=0.7, alpha=0.7)
    axes.clabel(levels, fmt=lambda level: f"{level:.0%}", fontsize=7)
    axes.scatter(*X[train].T, c=y[train], cmap=ListedColormap(base.tolist()), s=14, edgecolors="white", linewidths=0.5)
    axes.set(title=name, xlabel="first principal component")
panels[0].set_ylabel("second principal component")
figure.suptitle("Probability of the most likely of three wines", fontsize=11)
save(figure, "laplace")
