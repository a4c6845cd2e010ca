"""
Many outputs: curvature in blocks
=================================

An autoencoder has as many outputs as inputs, 64 here, a million elsewhere. Exact second-order quantities carry one column per output and sample
through the network. They are sums over outputs and over samples, hence they can be computed in blocks of both: same numbers, a fraction of the
memory.
"""

# %%
# An autoencoder
# --------------
import time

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, digits, memory, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, clear, extend
from backpack.extensions import DiagGGNExact, DiagGGNMC

X, _, X_test, _ = digits()
model = extend(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)))
lossfunc = extend(nn.MSELoss(reduction="sum"))  # a sum, so that blocks add up; divide by N * 64 for the mean
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters, lr=3e-3)
for _ in tqdm(range(60), desc="training", unit="epoch"):
    for chosen in torch.randperm(len(X)).split(64):
        optimizer.zero_grad()
        lossfunc(model(X[chosen]), X[chosen]).backward()
        optimizer.step()

# %%
# Blocks
# ------
# A block of samples is a smaller mini-batch. A block of outputs is a loss that looks at some outputs: the Hessian of the sum of squares has no
# entries between different outputs. (``backpack(..., memory="8MiB")`` cuts outputs by itself, whatever the loss.)


def in_blocks(X: Tensor, samples: int, outputs: int) -> list[Tensor]:
    """Diagonal of the GGN of all parameters, from blocks of so many samples and outputs."""
    total = [torch.zeros_like(p) for p in parameters]
    for part in X.split(samples):
        for columns in torch.arange(64).split(outputs):
            with backpack(DiagGGNExact()):
                lossfunc(model(part)[:, columns], part[:, columns]).backward()
            for sum_, p in zip(total, parameters, strict=True):
                sum_.add_(p.diag_ggn_exact)
    clear(model)
    return total


N = 512
whole = in_blocks(X[:N], N, 64)
for samples, outputs in ((N, 16), (100, 64), (200, 24)):
    for a, b in zip(in_blocks(X[:N], samples, outputs), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)

# %%
# One column is checked from the definition: the squared derivatives of one output, summed over samples, twice (the second derivative of a square).
last = in_blocks(X[:5], 5, 64)[-2]
outputs = model(X[:5])
squares = sum(torch.autograd.grad(outputs[n, c], parameters[-2], retain_graph=True)[0] ** 2 for n in range(5) for c in range(64))
torch.testing.assert_close(last, 2 * squares)

# %%
# Memory and time
# ---------------
# Each number of outputs at once, from 1 to 64: the peak of allocated memory, and the time.


def seconds(outputs: int) -> float:
    start = time.process_time()
    in_blocks(X[:N], N, outputs)
    return time.process_time() - start


SIZES = [1, 2, 4, 8, 16, 32, 64]
peaks = [max(memory(lambda outputs=outputs: in_blocks(X[:N], N, outputs))[1]) for outputs in tqdm(SIZES, desc="memory")]
times = [min(seconds(size) for _ in range(3)) for size in tqdm(SIZES, desc="time")]
for row in zip(SIZES, peaks, times, strict=True):
    print("{:3} outputs at once: {:6.1f} MiB, {:.3f} s".format(*row))
assert peaks[0] < peaks[-1] / 4

# %%
# A cheaper way, less exact
# -------------------------
# ``DiagGGNMC`` replaces the columns of all outputs by random ones. It is unbiased; its error falls with the square root of their number.
DRAWS = [1, 4, 16, 64]


def error(draws: int) -> float:
    with backpack(DiagGGNMC(mc_samples=draws)):
        lossfunc(model(X[:N]), X[:N]).backward()
    difference = sum((p.diag_ggn_mc - exact).square().sum() for p, exact in zip(parameters, whole, strict=True))
    return (difference / sum(exact.square().sum() for exact in whole)).sqrt().item()


errors = [sum(error(draws) for _ in range(5)) / 5 for draws in tqdm(DRAWS, desc="Monte-Carlo")]
print("relative error with 1, 4, 16, 64 random columns: " + ", ".join(f"{e:.1%}" for e in errors))
assert errors[-1] < errors[0] / 4

# %%
# Curvature of the first layer, summed over its units, says which pixels the autoencoder looks at.
figure = plt.figure(figsize=(13, 4.4))
left, right = figure.subfigures(1, 2, width_ratios=[1.7, 1])
axes, panel = left.subplots(1, 2)
axes.plot(SIZES, peaks, "o-", color=BLUE)
for size, used, spent in zip(SIZES, peaks, times, strict=True):
    axes.annotate(f"{spent:.2f} s", (size, used), xytext=(-3, 7), textcoords="offset points", ha="right", fontsize=8, color=GREY)
axes.set(title="Exact, in blocks", xlabel="outputs at once", ylabel="peak memory [MiB]", xscale="log", xticks=SIZES, xticklabels=SIZES)
axes.set(xlim=(0.4, 90), ylim=(0, peaks[-1] * 1.15))
axes.minorticks_off()
panel.plot(DRAWS, [100 * e for e in errors], "o", color=ORANGE, markersize=8, label="mean of five")
panel.plot(DRAWS, [100 * errors[0] / draws**0.5 for draws in DRAWS], color=GREY, linewidth=1, label="$\\propto M^{-1/2}$")
panel.set(title="Monte-Carlo", xlabel="random columns M", ylabel="relative error [%]", xscale="log", yscale="log", xticks=DRAWS, xticklabels=DRAWS)
panel.minorticks_off()
panel.set(yticks=[2, 5, 10, 20], yticklabels=[2, 5, 10, 20])
panel.legend()

tiles = right.subplots(3, 4)
with torch.no_grad():
    pairs = list(zip(X_test[:4], model(X_test[:4]), strict=True))
for column, (scan, rebuilt) in zip(tiles.T, pairs, strict=True):
    for axes, image in zip(column, (scan, rebuilt), strict=False):
        axes.imshow(image.view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
for axes in tiles.flat:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
for axes, label in zip(tiles[:, 0], ("scan", "rebuilt", "curvature"), strict=True):
    axes.set_ylabel(label)
for axes, size in zip(tiles[2], (1, 2, 3, None), strict=True):
    if size is None:
        image, title = whole[0], "exact"
    else:
        with backpack(DiagGGNMC(mc_samples=4 ** (size - 1))):
            lossfunc(model(X[:N]), X[:N]).backward()
        image, title = parameters[0].diag_ggn_mc, f"M = {4 ** (size - 1)}"
    axes.imshow(image.sum(0).view(8, 8).numpy())
    axes.set_xlabel(title, fontsize=9)
save(figure, "autoencoder_blocks")
