"""
Differentially private training
===============================

Training is differentially private if no single sample can be recognised in the weights. For this the gradient of each sample is clipped to a norm
of at most :math:`C`, and noise in proportion to :math:`C` is added to their sum. ``BatchL2Grad`` yields the norms without the
gradients, and a second, weighted backward pass yields the sum of clipped gradients. Thus the memory that one needs is that of ordinary training.
"""

# %%
# The data
# --------
# Grey values are divided by 16, the largest possible value. A mean over the training set would already have told something about it.
import math

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, digits, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import BatchGrad, BatchL2Grad

X, y, X_test, y_test = digits()
lossfunc = nn.CrossEntropyLoss(reduction="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))


# %%
# Clip each sample
# ----------------
# The factor of a sample is :math:`c_n = \min(1, C/|g_n|)`: gradients that are too long are shortened to the norm :math:`C`, the others stay as they
# are. The norm is that of the whole gradient, all parameters together. As the gradient is linear in the loss, :math:`\sum_n c_n g_n` is
# the gradient of :math:`\sum_n c_n \ell_n`.


def clipped_sum(model: nn.Module, X: Tensor, y: Tensor, C: float) -> Tensor:
    """Leave the sum of clipped gradients in ``.grad``; return the norms before clipping."""
    losses = lossfunc(model(X), y)
    with backpack(BatchL2Grad()):
        losses.sum().backward(retain_graph=True)
    norms = sum(p.batch_l2 for p in model.parameters()).sqrt()
    model.zero_grad()
    (losses * (C / norms).clamp(max=1)).sum().backward()
    return norms


# %%
# Is that so? Clip the gradients themselves, and compare. That they are clipped one by one, and not their sum, is the whole point: a factor of
# :math:`\min(1, |g_n|/C)`, easily mistaken for the right one, would leave the long gradients as they are.
model, C = network(), 1.0
norms = clipped_sum(model, X, y, C)
clipped = [p.grad.clone() for p in model.parameters()]
with backpack(BatchGrad()):
    lossfunc(model(X), y).sum().backward()
gradients = torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], dim=1)
one_by_one = gradients / (gradients.norm(dim=1, keepdim=True) / C).clamp(min=1)
torch.testing.assert_close(norms, gradients.norm(dim=1))
torch.testing.assert_close(torch.cat([g.flatten() for g in clipped]), one_by_one.sum(0), rtol=1e-4, atol=1e-4)
assert one_by_one.norm(dim=1).max() < C * (1 + 1e-5)
print(f"{(norms > C).float().mean():.0%} of the gradients are longer than C = {C}")

# %%
# How private?
# ------------
# A step adds noise of standard deviation :math:`\sigma C` to each entry. To add or remove one sample changes the clipped sum by at most :math:`C`, so
# :math:`T` steps over the whole data set have a privacy loss of :math:`\rho = T / 2\sigma^2` (zero-concentrated differential privacy), and thus
# they are :math:`(\varepsilon, \delta)`-private with :math:`\varepsilon = \rho + 2\sqrt{\rho \ln(1/\delta)}`
# (`Bun & Steinke 2016 <https://arxiv.org/abs/1605.02065>`_). The choice of
# the settings is not accounted for; the step size, in units of :math:`C`, is the best of 1, 2, 4 and 8 at :math:`\varepsilon = 2`.
T, DELTA, STEP_SIZE = 80, 1e-5, 2.0


def noise_multiplier(epsilon: float) -> float:
    log = math.log(1 / DELTA)
    rho = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
    return math.sqrt(T / (2 * rho))


def train(C: float, sigma: float, seed: int) -> tuple[float, Tensor]:
    """Accuracy on the test set, and the norms of all gradients on the way, ``[T, N]``."""
    model, generator, norms = network(), torch.Generator().manual_seed(seed), []
    for _ in range(T):
        norms.append(clipped_sum(model, X, y, C))
        with torch.no_grad():
            for p in model.parameters():
                noise = sigma * C * torch.randn(p.shape, generator=generator)
                p.sub_(STEP_SIZE / C * (p.grad + noise) / len(X))  # the step is divided by C, so that C only decides who is clipped
    with torch.no_grad():
        return (model(X_test).argmax(1) == y_test).float().mean().item(), torch.stack(norms)


EPSILONS, CLIPS, SEEDS = [0.25, 0.5, 1, 2, 4, math.inf], [0.1, 1.0, 10.0], range(3)
accuracy = torch.zeros(len(CLIPS), len(EPSILONS), len(SEEDS))
with tqdm(total=accuracy.numel(), unit="run") as progress:
    for i, C in enumerate(CLIPS):
        for j, epsilon in enumerate(EPSILONS):
            for k, seed in enumerate(SEEDS):
                accuracy[i, j, k], norms = train(C, noise_multiplier(epsilon) if epsilon < math.inf else 0.0, seed)
                progress.update()
for C, row in zip(CLIPS, accuracy.mean(2), strict=True):
    print(f"C = {C:4}: " + ", ".join(f"{a:.1%} at epsilon {e}" for e, a in zip(EPSILONS, row.tolist(), strict=True)))

mean = accuracy.mean(2)
assert (mean[:, EPSILONS.index(4)] > mean[:, 0] + 0.2).all(), "less noise does not help"
assert mean[1, EPSILONS.index(2)] > 0.88 > mean[2, EPSILONS.index(2)], "the clipping norm does not matter"

# %%
# Privacy against accuracy
# ------------------------
# A norm that hardly anybody reaches adds noise for nothing: :math:`C = 10` is longer than nearly all gradients.
_, norms = train(1.0, noise_multiplier(2), seed=0)

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
places = range(len(EPSILONS))
for C, values, colour in zip(CLIPS, accuracy, [GREY, BLUE, ORANGE], strict=True):
    left.fill_between(places, 100 * values.amin(1), 100 * values.amax(1), color=colour, alpha=0.2, linewidth=0)
    left.plot(places, 100 * values.mean(1), "o-", color=colour, label=f"C = {C:g}")
left.set(xticks=places, xticklabels=[f"{epsilon:g}" if epsilon < math.inf else "no noise" for epsilon in EPSILONS], ylim=(0, 100))
left.set(title="Accuracy on the test set", xlabel=f"privacy loss $\\varepsilon$ at $\\delta = 10^{{{math.log10(DELTA):.0f}}}$", ylabel="accuracy [%]")
left.legend(title="clipping norm", loc="lower right")

levels = norms.quantile(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]), dim=1)
right.fill_between(range(T), levels[0], levels[4], color=BLUE, alpha=0.15, linewidth=0, label="90 % of the samples")
right.fill_between(range(T), levels[1], levels[3], color=BLUE, alpha=0.3, linewidth=0, label="half of them")
right.plot(levels[2], color=BLUE, label="median")
BOX = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}
for C, colour in zip(CLIPS, [GREY, BLUE, ORANGE], strict=True):
    right.axhline(C, color=colour, linestyle=":")
    right.annotate(f"C = {C:g}", (T, C), xytext=(0, 3), textcoords="offset points", ha="right", color=colour, bbox=BOX)
right.set(title="Norms before clipping (C = 1, $\\varepsilon$ = 2)", xlabel="step", ylabel="norm of a sample's gradient", yscale="log", xlim=(0, T))
right.legend(loc="lower left", bbox_to_anchor=(0, 0.12))
save(figure, "private_training")
