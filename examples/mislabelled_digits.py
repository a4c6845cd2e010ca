"""
Find wrong labels
=================

Somebody has typed 100 of 1438 labels wrongly. The gradient of a mini-batch hides it, but the gradients of the samples do not: a sample with a
wrong label pulls hard, and against the others. One pass over the data, no second network, and most of the wrong labels are found.
"""

# %%
# Plant wrong labels
# ------------------
import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREEN, GREY, ORANGE, digits, save
from sklearn.metrics import average_precision_score, precision_recall_curve
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, clear, extend
from backpack.extensions import BatchGrad, BatchL2Grad

X, true_labels, X_trusted, y_trusted = digits()
wrong = torch.zeros(len(X), dtype=torch.bool)
wrong[torch.randperm(len(X))[:100]] = True
y = torch.where(wrong, (true_labels + torch.randint(1, 10, (len(X),))) % 10, true_labels)

# %%
# Train, but not for long
# -----------------------
# A small convolutional network would learn the wrong labels by heart if it had the time. It gets 8 epochs.
model = nn.Sequential(
    nn.Unflatten(1, (1, 8)),
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
model, X, X_trusted = extend(model), X.unflatten(1, (8, 8)), X_trusted.unflatten(1, (8, 8))
lossfunc = nn.CrossEntropyLoss(reduction="sum")  # the gradients of the samples are those of their own losses, without a divisor

optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in tqdm(range(8), desc="training", unit="epoch"):
    for chosen in torch.randperm(len(X)).split(64):
        optimizer.zero_grad()
        lossfunc(model(X[chosen]), y[chosen]).backward()
        optimizer.step()

# %%
# Two scores
# ----------
# *How hard does a sample pull?* ``BatchL2Grad`` has the squared norm of each sample's gradient, parameter by parameter; their sum is that of the
# whole gradient. No per-sample gradient is formed for it.
#
# *Against whom?* The inner product of a sample's gradient with the gradient of a few samples whose labels one trusts says by how much a step for this
# sample would raise, or lower, the loss of those. It takes ``BatchGrad``.
optimizer.zero_grad()
lossfunc(model(X_trusted), y_trusted).backward()
trusted = [p.grad.clone() for p in model.parameters()]


def scores(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with backpack(BatchL2Grad(), BatchGrad()):
        lossfunc(model(X), y).backward()
    norms = sum(p.batch_l2 for p in model.parameters()).sqrt()
    against = -sum(torch.einsum("n...,...->n", p.grad_batch, g) for p, g in zip(model.parameters(), trusted, strict=True))
    clear(model)
    return norms, against


pieces = [scores(X[chosen], y[chosen]) for chosen in tqdm(torch.arange(len(X)).split(128), desc="scores", unit="chunk")]
norms, against = (torch.cat(parts) for parts in zip(*pieces, strict=True))

# %%
# Is that so? Three samples, one at a time.
for n in (0, 700, 1400):
    gradient = torch.autograd.grad(lossfunc(model(X[n : n + 1]), y[n : n + 1]), list(model.parameters()))
    torch.testing.assert_close(norms[n], sum(g.square().sum() for g in gradient).sqrt(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(against[n], -sum((g * t).sum() for g, t in zip(gradient, trusted, strict=True)), rtol=1e-3, atol=1e-2)

# %%
# How good are they?
# ------------------
# Whoever looks through the samples in the order of a score finds wrong labels with this precision, and after a while all of them.
precision = {name: average_precision_score(wrong, score) for name, score in {"norm": norms, "against": against}.items()}
print(f"average precision: {precision['norm']:.2f} by norm, {precision['against']:.2f} by inner product, {wrong.float().mean():.2f} by chance")
assert precision["norm"] > 0.8, "the norms do not find wrong labels"
first = norms.argsort(descending=True)[:100]
print(f"{wrong[first].sum()} of the first 100 by norm are wrong")

figure = plt.figure(figsize=(12, 4.8))
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.35])
axes = left.subplots()
for name, score, colour in [("norm of the gradient", norms, BLUE), ("inner product with trusted samples", against, ORANGE)]:
    values, recall, _ = precision_recall_curve(wrong, score)
    axes.plot(recall, values, color=colour, label=name)
axes.axhline(wrong.float().mean(), color=GREY, linestyle=":", label="by chance")
axes.set(title="Wrong labels found", xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.03))
axes.legend(loc="lower left", bbox_to_anchor=(0, 0.12))

right.suptitle("The 24 samples that pull hardest, as labelled", weight="bold", fontsize=11)
for n, axes in zip(first, right.subplots(3, 8).flat, strict=False):
    axes.imshow(X[n].numpy(), cmap="gray_r")
    colour = GREEN if wrong[n] else GREY
    axes.set_title(f"“{y[n]}”" + (f", is {true_labels[n]}" if wrong[n] else ""), color=colour, fontsize=9)
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set(visible=True, color=colour, linewidth=2)
right.supxlabel("green: planted, grey: labelled so by scikit-learn", fontsize=9)
save(figure, "mislabelled_digits")
