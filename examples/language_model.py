"""
A recurrent language model, passage by passage
==============================================

An LSTM learns to continue text, character by character, on passages of Python's own documentation. Its gradient, split into passages, tells which of
them it stumbles over; Kronecker factors of its curvature tell which characters it takes for each other.
"""

# %%
# Text that comes with Python
# ---------------------------
# A sample is a passage of 64 characters; its loss is the sum over them.
import re
from collections import Counter
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from _common import GREY, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, clear, extend
from backpack.extensions import KFAC, BatchGrad, BatchL2Grad

text = " ".join(topics[name] for name in ("assignment", "calls", "class", "for", "function", "import", "try", "while", "with", "yield"))
text = re.sub(r"\s+", " ", re.sub(r"[^\x20-\x7e\n]", "", text))
characters = sorted(set(text))
LENGTH = 64
codes = torch.tensor([characters.index(c) for c in text[: (len(text) - 1) // LENGTH * LENGTH + 1]])
X, Y = codes[:-1].view(-1, LENGTH), codes[1:].view(-1, LENGTH)
print(f"{len(X)} passages of {LENGTH} characters, of {len(characters)} different ones")


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(characters), 24)
        self.lstm = nn.LSTM(24, 64, batch_first=True)
        self.head = nn.Linear(64, len(characters))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0]).transpose(1, 2)  # [N, C, T], as the loss wants it


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return extend(LanguageModel())


lossfunc = extend(nn.CrossEntropyLoss())

# %%
# Is that so? Per-sample gradients of the LSTM's weights against single passages.
model = language_model()
with backpack(BatchGrad(), BatchL2Grad()):
    lossfunc(model(X[:4]), Y[:4]).backward()
for n in range(4):
    alone = torch.autograd.grad(lossfunc(model(X[n : n + 1]), Y[n : n + 1]) / 4, list(model.parameters()))
    for p, g in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(p.grad_batch[n], g, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(p.batch_l2[n], g.square().sum(), rtol=1e-3, atol=1e-8)
clear(model)

# %%
# Learn to write
# --------------
model = language_model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in tqdm(range(300), desc="training", unit="step"):
    chosen = torch.randint(len(X), (64,))
    optimizer.zero_grad()
    loss = lossfunc(model(X[chosen]), Y[chosen])
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f} nats per character")
assert loss < 1.6

# %%
# Passage by passage
# ------------------
# The norms of the gradients of all passages, and Kronecker factors, from the same backward passes. Gradients of passages are made independent of
# how many are in a chunk, by a factor.
norms, factor, losses = [], 0, []
for chosen in tqdm(torch.arange(len(X)).split(128), desc="passages", unit="chunk"):
    model.zero_grad()
    with backpack(BatchL2Grad(), KFAC()):
        outputs = model(X[chosen])
        lossfunc(outputs, Y[chosen]).backward()
    norms.append(len(chosen) * sum(p.batch_l2 for p in model.parameters()).sqrt())
    factor = factor + len(chosen) / len(X) * model.head.bias.kfac[0]
    losses.append(nn.functional.cross_entropy(outputs, Y[chosen], reduction="none").detach())
norms, losses = torch.cat(norms), torch.cat(losses)
order = norms.argsort()
assert norms[order[-1]] > 3 * norms[order[0]], "all passages are equally hard"

# %%
# Which characters?
# -----------------
# The bias of the last layer has a single Kronecker factor, the covariance of the gradients at the outputs for characters that the model itself would
# write. Where it takes one character for another, their entries have a negative correlation.
letters = [c for c, _ in Counter(text.lower()).most_common() if c.isalpha()][:16]
letters.sort(key=lambda c: (c not in "aeiou", c))
index = torch.tensor([characters.index(c) for c in letters])
sizes = factor.diagonal().sqrt()
correlation = (factor / sizes.outer(sizes))[index][:, index]
vowels = sum(c in "aeiou" for c in letters)
among = correlation[:vowels, :vowels][~torch.eye(vowels, dtype=torch.bool)].mean()
between = correlation[:vowels, vowels:].mean()
print(f"mean correlation among vowels {among:.3f}, of vowels and consonants {between:.3f}: vowels are taken for vowels")
assert among < between, "vowels are not taken for vowels"

# %%
# The text that it stumbles over, and the text that it knows by heart: each character is the redder, the more it surprised the model.
figure = plt.figure(figsize=(13, 4.6))
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.9])
axes = left.subplots()
axes.spines[:].set_visible(False)
image = correlation.clone().fill_diagonal_(torch.nan)
shown = axes.imshow(image.numpy(), cmap="RdBu", vmin=-0.3, vmax=0.3)
axes.set(title="Taken for each other", xticks=range(len(letters)), yticks=range(len(letters)), xticklabels=letters, yticklabels=letters)
axes.set(xlabel="character", ylabel="character")
axes.tick_params(length=0)
left.colorbar(shown, ax=axes, label="correlation of gradients (red: taken for each other)", shrink=0.8, extend="min")

axes = right.subplots()
axes.axis("off")
axes.set(xlim=(-8, LENGTH), ylim=(12.2, -1.2))
colours = plt.get_cmap("Reds")
for start, title, rows in ((0, "Hardest passages", order[-5:].flip(0)), (6.5, "Easiest passages", order[:5])):
    axes.text(0, start - 0.6, title, weight="bold", va="bottom")
    axes.text(-1, start - 0.6, "norm", ha="right", va="bottom", color=GREY, fontsize=9)
    for line, n in enumerate(rows):
        axes.text(-1, start + line, f"{norms[n]:.2f}", ha="right", va="center", color=GREY, fontsize=9)
        for place, (code, surprise) in enumerate(zip(Y[n], losses[n], strict=True)):
            axes.add_patch(plt.Rectangle((place - 0.5, start + line - 0.42), 1, 0.84, color=colours(surprise.item() / 12), linewidth=0))
            axes.text(place, start + line, characters[code], ha="center", va="center", family="monospace", fontsize=8)
right.colorbar(plt.cm.ScalarMappable(plt.Normalize(0, 12), colours), ax=axes, label="surprise [nats]", shrink=0.7)
save(figure, "language_model")
