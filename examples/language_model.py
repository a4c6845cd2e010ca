"""
A recurrent language model, passage by passage
==============================================

An LSTM learns to continue text, character by character, on passages of Python's own documentation. Its gradient, split into passages, tells which of them
it stumbles over; and Kronecker factors of the recurrent weights let it learn in fewer steps.
"""

# %%
# Text that comes with Python
# ---------------------------
# A sample is a passage of 64 characters; its loss is the sum over them.
import re
import textwrap

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, save
from pydoc_data.topics import topics
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, clear, extend
from backpack.extensions import KFAC, BatchGrad, BatchL2Grad
from backpack.utils.kroneckers import apply_kfac_mat_prod, inv_kfacs

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
# Once with Adam, once along directions that Kronecker factors make better. For an LSTM the factors treat all time steps of a passage as positions that
# share the weight. The embedding's table has a factor as well, the diagonal of counts of characters.
STEPS, BATCH = 200, 64


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(len(X), (BATCH,), generator=generator) for _ in range(STEPS)]


def train_adam() -> tuple[nn.Module, list[float]]:
    model, losses = language_model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for chosen in tqdm(batches(), desc="Adam", unit="step"):
        optimizer.zero_grad()
        loss = lossfunc(model(X[chosen]), Y[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def damped_inverse(factors: list[Tensor], damping: float) -> list[Tensor]:
    """Each factor gets its share of the damping, in proportion to its size. A vector stands for a diagonal matrix."""
    sizes = torch.stack([f.mean() if f.dim() == 1 else f.diagonal().mean() for f in factors])
    return inv_kfacs(factors, shift=(sizes * (damping / sizes.prod()) ** (1 / len(sizes))).tolist())


def train_kfac(lr: float = 0.1, damping: float = 1e-2) -> tuple[nn.Module, list[float]]:
    model, losses, curvature, inverses = language_model(), [], {}, {}
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    for step, chosen in enumerate(tqdm(batches(), desc="KFAC", unit="step")):
        fresh = step % 5 == 0  # curvature changes slowly
        optimizer.zero_grad()
        with backpack(*([KFAC()] if fresh else [])):
            loss = lossfunc(model(X[chosen]), Y[chosen])
            loss.backward()
        for p in model.parameters():
            if fresh:
                curvature[p] = [old.lerp(new, 0.2) for old, new in zip(curvature.get(p, p.kfac), p.kfac, strict=True)]
                inverses[p] = damped_inverse(curvature[p], damping)
            p.grad = apply_kfac_mat_prod(inverses[p], p.grad.flatten()).view_as(p)
        optimizer.step()
        losses.append(loss.item())
    return model, losses
