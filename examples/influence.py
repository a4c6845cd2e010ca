"""
Which training samples made this prediction?
============================================

How would the loss of a test image change if one training image had never been seen? Training again for each of 1438 images tells. The inverse
curvature tells it, too, and at once: an influence function. For 60 images the prediction is compared with really training again.
"""

# %%
# Multinomial regression
# ----------------------
# The loss is convex: a sum over samples plus :math:`\lambda |\theta|^2/2`. Newton's method finds its minimum in a few steps. For a model that is
# linear in its parameters the Hessian is the GGN, and ``SqrtGGNExact`` has its root: :math:`G = U^\top U`.
import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, digits, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import KFLR, BatchGrad, SqrtGGNExact
from backpack.utils.convert_parameters import vector_to_parameter_list

X, y, X_test, y_test = digits()
LAMBDA = 1.0
model = extend(nn.Linear(64, 10))
lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
parameters = list(model.parameters())
P = sum(p.numel() for p in parameters)


def flat(tensors: list[Tensor], start: int = 0) -> Tensor:
    return torch.cat([tensor.flatten(start) for tensor in tensors], dim=start)


def gradient_and_hessian(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    with backpack(SqrtGGNExact()):
        lossfunc(model(X), y).backward()
    U = flat([p.sqrt_ggn_exact for p in parameters], start=2).flatten(0, 1)
    return flat([p.grad for p in parameters]) + LAMBDA * flat(parameters).detach(), U.T @ U + LAMBDA * torch.eye(P)


def train(X: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        gradient, hessian = gradient_and_hessian(X, y)
        with torch.no_grad():
            for p, d in zip(parameters, vector_to_parameter_list(torch.linalg.solve(hessian, gradient), parameters), strict=True):
                p.sub_(d)


with torch.no_grad():
    for p in parameters:
        p.zero_()
train(X, y, steps=9)
gradient, hessian = gradient_and_hessian(X, y)
assert gradient.norm() < 1e-2, "not at the minimum"
trained = [p.detach().clone() for p in parameters]

# %%
# Influence
# ---------
# Without sample :math:`n` the minimum moves by :math:`H^{-1} g_n`, to first order, and the loss of the test image by
# :math:`g_\text{test}^\top H^{-1} g_n` (`Koh & Liang 2017 <https://arxiv.org/abs/1703.04730>`_). ``BatchGrad`` has all :math:`g_n`. The test image
# is the one that the model gets most wrong.
with torch.no_grad():
    losses = nn.functional.cross_entropy(model(X_test), y_test, reduction="none")
chosen = losses.argmax()
query = X_test[chosen : chosen + 1], y_test[chosen : chosen + 1]
g_test = flat(list(torch.autograd.grad(lossfunc(model(query[0]), query[1]), parameters)))

with backpack(BatchGrad(), KFLR()):
    lossfunc(model(X), y).backward()
per_sample = flat([p.grad_batch for p in parameters], start=1)
influence = per_sample @ torch.linalg.solve(hessian, g_test)

# %%
# The complete Hessian has 650 rows here. Where there are millions, Kronecker factors take its place. They are cruder.


def kronecker_solve(factors: list[Tensor], g: Tensor) -> Tensor:
    """``(B (x) A + lambda)^-1 g``, by the eigenvectors of the factors."""
    values, vectors = zip(*(torch.linalg.eigh(factor) for factor in factors), strict=True)
    scales, basis = (values[0], vectors[0]) if len(factors) == 1 else (torch.kron(*values), torch.kron(*vectors))
    return basis @ ((basis.T @ g) / (scales + LAMBDA))


pieces = g_test.split([p.numel() for p in parameters])
kronecker = per_sample @ torch.cat([kronecker_solve(p.kflr, piece) for p, piece in zip(parameters, pieces, strict=True)])

# %%
# Train again, and again
# ----------------------
# Without one sample the Hessian is nearly the old one, so that steps with the old one converge quickly. The 20 images that are predicted to help
# most, the 20 that harm most, and 20 at random:
order = influence.argsort()
candidates = torch.cat([order[:20], order[-20:], order[20:-20][torch.randperm(len(X) - 40)[:20]]])
factor = torch.linalg.cholesky(hessian)


def without(n: int) -> float:
    """The change of the test image's loss if training leaves out sample ``n``."""
    keep = torch.arange(len(X)) != n
    for _ in range(8):
        g = flat(list(torch.autograd.grad(lossfunc(model(X[keep]), y[keep]), parameters))) + LAMBDA * flat(parameters).detach()
        with torch.no_grad():
            for p, d in zip(parameters, vector_to_parameter_list(torch.cholesky_solve(g[:, None], factor)[:, 0], parameters), strict=True):
                p.sub_(d)
    assert g.norm() < 1e-2, "not at the minimum"
    with torch.no_grad():
        loss = lossfunc(model(query[0]), query[1]).item()
        for p, old in zip(parameters, trained, strict=True):
            p.copy_(old)
    return loss - losses[chosen].item()


measured = torch.tensor([without(int(n)) for n in tqdm(candidates, desc="training again", unit="sample")])
correlation, crude = (torch.corrcoef(torch.stack([measured, predicted[candidates]]))[0, 1].item() for predicted in (influence, kronecker))
slope = (measured @ influence[candidates] / influence[candidates].square().sum()).item()
print(f"correlation of prediction and truth: {correlation:.4f} (slope {slope:.2f}); with Kronecker factors {crude:.4f}")
assert correlation > 0.98 and 0.8 < slope < 1.5 and crude > 0.8

# %%
# Nines that look alike help to read this one; ones with a stroke like its own, and unusual nines, harm. To leave out a sample also lowers the
# curvature, which is why the true changes are larger than predicted to first order.
figure = plt.figure(figsize=(12, 4.8))
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.3])
axes = left.subplots()
axes.axline((0, 0), slope=1, color=GREY, linewidth=1)
axes.scatter(kronecker[candidates], measured, color=ORANGE, s=22, label=f"Kronecker factors, r = {crude:.2f}")
axes.scatter(influence[candidates], measured, color=BLUE, s=22, label=f"complete Hessian, r = {correlation:.3f}")
axes.set(title="The test image's loss, without one sample", xlabel="predicted change [nats]", ylabel="change after training again [nats]")
axes.legend(loc="upper left")

rows = right.subplots(3, 6)
strips = [("helps", order.flip(0)[:6], BLUE), ("harms", order[:6], ORANGE)]
for axes in rows[0]:
    axes.axis("off")
prediction = model(query[0]).argmax(1).item()
rows[0, 0].axis("on")
rows[0, 0].imshow(query[0].view(8, 8).numpy(), cmap="gray_r")
rows[0, 0].set(xticks=[], yticks=[])
rows[0, 1].text(
    -0.4, 0.5, f"The test image: “{query[1].item()}”,\ntaken for “{prediction}”", transform=rows[0, 1].transAxes, va="center", fontsize=11
)
for row, (title, samples, colour) in zip(rows[1:], strips, strict=True):
    for n, axes in zip(samples, row, strict=True):
        axes.imshow(X[n].view(8, 8).numpy(), cmap="gray_r")
        axes.set_title(f"“{y[n]}”, {influence[n]:+.3f}", fontsize=9, color=colour)
        axes.set(xticks=[], yticks=[])
    row[0].set_ylabel(title, color=colour, weight="bold")
right.supxlabel("label of the training image, predicted change of the test image's loss without it [nats]", fontsize=9)
save(figure, "influence")
