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
# is damped. The first optimizer divides by the diagonal of the generalized Gauss-Newton matrix (GGN).
import time
from collections.abc import Callable
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREEN, GREY, ORANGE, digits, save
from torch import nn
from torch.optim import SGD, Adam
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import KFAC, DiagGGNMC
from backpack.utils.kroneckers import apply_inv_kfac_mat_prod


class DiagonalGGN(SGD):
    """``g / (diagonal + damping)`` takes the place of ``g``, after backward passes with ``DiagGGNMC``."""

    def __init__(self, params, lr: float, damping: float, momentum: float = 0.9, decay: float = 0.95) -> None:
        super().__init__(params, lr, momentum)
        self.damping, self.decay, self.curvature = damping, decay, {}

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            mean = self.curvature.setdefault(p, p.diag_ggn_mc.clone())
            mean.lerp_(p.diag_ggn_mc, 1 - self.decay)
            p.grad /= mean + self.damping
        super().step()


# %%
# The second uses Kronecker factors. A weight has two, of its outputs and of its inputs, a bias has one. Each factor gets its share of the damping, in
# proportion to its size (`Martens & Grosse 2015 <https://arxiv.org/abs/1503.05671>`_, section 6.3).


class Kronecker(SGD):
    """``(B (x) A + damping)^-1 g``, approximately, takes the place of ``g``, after backward passes with ``KFAC``."""

    def __init__(self, params, lr: float, damping: float, momentum: float = 0.9, decay: float = 0.95) -> None:
        super().__init__(params, lr, momentum)
        self.damping, self.decay, self.curvature = damping, decay, {}

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            means = self.curvature.setdefault(p, [factor.clone() for factor in p.kfac])
            for mean, factor in zip(means, p.kfac, strict=True):
                mean.lerp_(factor, 1 - self.decay)
            sizes = torch.stack([mean.diagonal().mean() for mean in means])
            shares = sizes * (self.damping / sizes.prod()) ** (1 / len(sizes))  # their product is the damping
            p.grad = apply_inv_kfac_mat_prod(means, p.grad.flatten(), shift=shares.tolist()).view_as(p)
        super().step()


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
