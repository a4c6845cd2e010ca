"""
Write an optimizer that knows the curvature
===========================================

``KFAC`` and ``DiagGGNMC`` leave curvature beside each gradient, where an optimizer finds it. Here are two, in a few lines each. They
train a deep autoencoder, a kind of network on which gradient descent is slow. The training loop stays as it was, but for the line that begins
with ``with``.
"""

# %%
# Two optimizers
# --------------
# Both replace the gradient by a better direction, and leave the step, with momentum, to ``torch.optim.SGD``. The curvature is a running mean, and it
# is damped.
import time
from collections.abc import Callable
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREEN, GREY, ORANGE, digits, save
from torch import Tensor, nn
from torch.optim import SGD, Adam
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import KFAC, DiagGGNMC
from backpack.utils.kroneckers import apply_inv_kfac_mat_prod


class Preconditioned(SGD):
    """Says ``new_curvature``, a list of tensors, and which ``direction`` takes the place of a gradient."""

    def __init__(self, params, lr: float, damping: float, momentum: float = 0.9, decay: float = 0.95) -> None:
        super().__init__(params, lr, momentum)
        self.damping, self.decay, self.means = damping, decay, {}

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            new = self.new_curvature(p)
            means = self.means.setdefault(p, [curvature.clone() for curvature in new])
            for mean, curvature in zip(means, new, strict=True):
                mean.lerp_(curvature, 1 - self.decay)
            p.grad = self.direction(p.grad, means)
        super().step()


# %%
# The first divides by the diagonal of the generalized Gauss-Newton matrix (GGN).


class DiagonalGGN(Preconditioned):
    """``g / (diagonal + damping)`` takes the place of ``g``, after backward passes with ``DiagGGNMC``."""

    def new_curvature(self, p: nn.Parameter) -> list[Tensor]:
        return [p.diag_ggn_mc]

    def direction(self, g: Tensor, means: list[Tensor]) -> Tensor:
        return g / (means[0] + self.damping)


# %%
# The second uses Kronecker factors. A weight has two, of its outputs and of its inputs, a bias has one. Each factor gets its share of the damping, in
# proportion to its size (`Martens & Grosse 2015 <https://arxiv.org/abs/1503.05671>`_, section 6.3).


class Kronecker(Preconditioned):
    """``(B (x) A + damping)^-1 g``, approximately, takes the place of ``g``, after backward passes with ``KFAC``."""

    def new_curvature(self, p: nn.Parameter) -> list[Tensor]:
        return p.kfac

    def direction(self, g: Tensor, means: list[Tensor]) -> Tensor:
        sizes = torch.stack([mean.diagonal().mean() for mean in means])
        shares = sizes * (self.damping / sizes.prod()) ** (1 / len(sizes))  # their product is the damping
        return apply_inv_kfac_mat_prod(means, g.flatten(), shift=shares.tolist()).view_as(g)


# %%
# Train
# -----
# The autoencoder squeezes 64 pixels through 6 numbers. Step sizes and damping are the best of small grids, for all four optimizers.
X, _, X_test, _ = digits()
EPOCHS, BATCH = 40, 128
WIDTHS = [64, 48, 32, 16, 6, 16, 32, 48, 64]


def autoencoder() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for pair in pairwise(WIDTHS) for layer in (nn.Linear(*pair), nn.Tanh())]
    return extend(nn.Sequential(*layers[:-1]))


lossfunc = extend(nn.MSELoss())


def train(make: Callable, *quantities) -> dict:
    model = autoencoder()
    optimizer, generator = make(model.parameters()), torch.Generator().manual_seed(1)
    losses, seconds, spent = [], [], 0.0
    for _ in range(EPOCHS):
        start = time.process_time()
        for chosen in torch.randperm(len(X), generator=generator).split(BATCH):
            optimizer.zero_grad()
            with backpack(*quantities):
                lossfunc(model(X[chosen]), X[chosen]).backward()
            optimizer.step()
        spent += time.process_time() - start
        with torch.no_grad():
            losses.append(lossfunc(model(X_test), X_test).item())
        seconds.append(spent)
    return {"losses": losses, "seconds": seconds, "model": model}


OPTIMIZERS = {
    "SGD, momentum": (lambda ps: SGD(ps, lr=3.0, momentum=0.9),),
    "Adam": (lambda ps: Adam(ps, lr=0.01),),
    "GGN diagonal": (lambda ps: DiagonalGGN(ps, lr=0.03, damping=1e-2), DiagGGNMC()),
    "KFAC": (lambda ps: Kronecker(ps, lr=0.1, damping=1e-2), KFAC()),
}
runs = {name: train(*settings) for name, settings in tqdm(OPTIMIZERS.items(), desc="training", unit="optimizer")}
for name, run in runs.items():
    early, last = run["losses"][4], run["losses"][-1]
    print(f"{name:14} test loss {early:.4f} after 5 epochs, {last:.4f} after {EPOCHS}; {run['seconds'][-1]:5.1f} s")

losses = {name: torch.tensor(run["losses"]) for name, run in runs.items()}
others = torch.stack([loss for name, loss in losses.items() if name != "KFAC"])
assert (losses["KFAC"][4:15] < others[:, 4:15].amin(0)).all(), "KFAC does not need the fewest steps"

# %%
# What it costs
# -------------
# An epoch is 12 steps. Kronecker factors save steps, not seconds, in a network as small as this one, whose steps cost next to nothing; their
# eigen-decompositions, here in each step, could be kept for some steps. Below: how test images come out after 40 epochs.
figure = plt.figure(figsize=(12, 6.2))
above, below = figure.subfigures(2, 1, height_ratios=[2.2, 1])
panels = above.subplots(1, 2, sharey=True)
colours = dict(zip(OPTIMIZERS, (GREY, GREEN, ORANGE, BLUE), strict=True))
for name, run in runs.items():
    panels[0].plot(range(1, EPOCHS + 1), run["losses"], color=colours[name], label=name)
    panels[1].plot(run["seconds"], run["losses"], color=colours[name])
panels[0].set(title="Step by step", xlabel="epoch", ylabel="test loss [mean squared grey value]", yscale="log", xlim=(0, EPOCHS))
panels[1].set(title="Second by second", xlabel="time of one core [s]", xscale="log")
ticks = [0.02, 0.03, 0.05, 0.08]
panels[0].set_yticks(ticks, ticks)
panels[0].minorticks_off()
panels[0].legend()

rows = {"test image": X_test} | {name: runs[name]["model"] for name in ("SGD, momentum", "KFAC")}
tiles = below.subplots(len(rows), 16)
for row, (name, source) in zip(tiles, rows.items(), strict=True):
    for n, axes in enumerate(row):
        image = source[n] if isinstance(source, torch.Tensor) else source(X_test[n : n + 1])[0].detach()
        axes.imshow(image.view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    row[0].set_ylabel(name, rotation=0, ha="right", va="center", color=colours.get(name, "black"))
save(figure, "curvature_optimizers")
