"""
Spectra of the Hessian and of the Gauss-Newton matrix
=====================================================

Curvature has as many directions as there are weights, and hardly any of them matter. Here are all eigenvalues of a small network before and after
training, and what remains possible when there are too many: products with the Hessian, Lanczos' method, and traces.
"""

# %%
# A network, small enough to see everything
# -----------------------------------------
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, digits, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import DiagGGNExact, DiagHessian, SqrtGGNExact
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op
from backpack.utils.convert_parameters import vector_to_parameter_list

X, y, _, _ = digits()
X, y = X[:500], y[:500]
model = extend(nn.Sequential(nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10)))
lossfunc = extend(nn.CrossEntropyLoss())
parameters = list(model.parameters())
P = sum(p.numel() for p in parameters)


def flat(tensors: list[Tensor], start: int = 0) -> Tensor:
    return torch.cat([tensor.flatten(start) for tensor in tensors], dim=start)


# %%
# Three ways to the curvature
# ---------------------------
# Products with the Hessian come from differentiating twice. Applied to unit vectors, they are its columns. The root of the GGN is the matrix of
# columns of ``SqrtGGNExact``. The traces alone are sums of diagonals, exact, from one backward pass.


def hessian_product() -> Callable:
    loss = lossfunc(model(X), y)
    gradients = L_op(loss, parameters, None, detach=False)
    return lambda v: flat(hessian_vector_product(loss, parameters, vector_to_parameter_list(v, parameters), gradients))


def spectra() -> dict[str, Tensor]:
    product = hessian_product()
    hessian = torch.stack([product(e) for e in tqdm(torch.eye(P), desc="columns of the Hessian")])
    with backpack(SqrtGGNExact(), DiagGGNExact(), DiagHessian()):
        lossfunc(model(X), y).backward()
    U = flat([p.sqrt_ggn_exact for p in parameters], start=2).flatten(0, 1)
    found = {"Hessian": torch.linalg.eigvalsh((hessian + hessian.T) / 2), "GGN": torch.linalg.eigvalsh(U.T @ U)}

    traces = {"Hessian": sum(p.diag_h.sum() for p in parameters), "GGN": sum(p.diag_ggn_exact.sum() for p in parameters)}
    for name, trace in traces.items():
        torch.testing.assert_close(found[name].sum(), trace, rtol=1e-3, atol=1e-4)
        print(f"{name:8} trace {trace:8.4f}, eigenvalues from {found[name][0]:9.5f} to {found[name][-1]:8.4f}")
    torch.testing.assert_close(flat([p.diag_h for p in parameters]), hessian.diagonal(), rtol=1e-3, atol=1e-5)
    return found


before = spectra()
optimizer = torch.optim.Adam(parameters, lr=0.02)
for _ in tqdm(range(100), desc="training", unit="step"):
    optimizer.zero_grad()
    lossfunc(model(X), y).backward()
    optimizer.step()
after = spectra()
for found in (before, after):
    assert found["GGN"][0] > -1e-5, "the GGN is not positive semi-definite"
    assert found["Hessian"][0] < -1e-4, "the Hessian has no negative eigenvalue"

# %%
# When there are too many
# -----------------------
# Lanczos' method finds the outermost eigenvalues with few products. Its vectors are kept orthogonal explicitly.


def lanczos(product: Callable, dimension: int, steps: int) -> Tensor:
    """Ritz values, ascending; the outermost converge first."""
    basis, diagonal, beside = torch.zeros(steps, dimension), [], []
    v = torch.randn(dimension)
    for k in tqdm(range(steps), desc="Lanczos"):
        basis[k] = v / v.norm()
        v = product(basis[k])
        diagonal.append(v @ basis[k])
        for _ in range(2):
            v = v - basis[: k + 1].T @ (basis[: k + 1] @ v)
        beside.append(v.norm())
    off = torch.stack(beside[:-1])
    return torch.linalg.eigvalsh(torch.stack(diagonal).diag() + off.diag(1) + off.diag(-1))


ritz = lanczos(hessian_product(), P, steps=60)
torch.testing.assert_close(ritz[-10:], after["Hessian"][-10:], rtol=1e-2, atol=1e-4)
share = after["Hessian"].clamp(min=0).sort(descending=True).values.cumsum(0) / after["Hessian"].clamp(min=0).sum()
few = int((share < 0.9).sum()) + 1
print(f"{few} of {P} eigenvalues have 90 % of the positive curvature; Lanczos needed 60 products for the ten largest")
assert few < P / 10

# %%
# All eigenvalues
# ---------------
# After training, the Hessian is close to the GGN where curvature is large.
figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
rank = range(1, P + 1)
for axes, found, title in zip(panels, (before, after), ("Before training", "After training"), strict=True):
    axes.axhline(0, color="black", linewidth=0.6)
    for name, colour in (("Hessian", ORANGE), ("GGN", BLUE)):
        axes.plot(rank, found[name].flip(0), ".", markersize=4, color=colour, label=f"{name}, trace {found[name].sum():.2f}")
    axes.set_yscale("symlog", linthresh=1e-4, linscale=0.7)
    axes.set(title=title, xlabel="number of the eigenvalue", xlim=(-10, P + 10))
panels[1].plot(rank[:10], ritz.flip(0)[:10], "o", markersize=9, markerfacecolor="none", color=GREY, label="Lanczos, the ten largest")
for axes in panels:
    axes.legend(loc="upper right", markerscale=1.5)
panels[0].set_ylabel("eigenvalue [nats per squared unit of weight]")
save(figure, "spectra")
