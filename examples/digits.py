"""
Handwritten digits: what the gradient hides, and what it is good for
====================================================================

A small network learns to read scanned digits, three times: by plain gradient descent, with a diagonal preconditioner and with a Kronecker-factored
one. Each backward pass of each run also yields the variance of the per-sample gradients, the diagonal of the generalized Gauss-Newton matrix (GGN)
and its Kronecker factors. One table and one picture show the result. ::

    python examples/digits.py                            # 8 x 8 scans that come with scikit-learn; a few seconds
    python examples/digits.py --data mnist --root DIR    # MNIST's own four files, in DIR
"""

# %%
# Settings
# --------
import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
import torch
from _common import OUTPUT
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad
from tqdm import tqdm

from backpack import backpack, clear, extend
from backpack.extensions import KFAC, BatchGrad, DiagGGNMC, Variance
from backpack.utils.examples import load_mnist_dataset
from backpack.utils.kroneckers import apply_inv_kfac_mat_prod

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="which scans")
parser.add_argument("--root", type=Path, default=Path("data"), help="folder with MNIST's files (default: data)")
parser.add_argument("--epochs", type=int, help="passes over the training set (default: 15 for digits, 1 for mnist)")
parser.add_argument("--seed", type=int, default=0, help="of initial weights, mini-batches and Monte-Carlo samples (default: 0)")
parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything runs; nothing is claimed about the training")
parser.add_argument("--figure", type=Path, default=OUTPUT / "digits.png", help="where to save the picture")
args = parser.parse_args([] if "ipykernel" in sys.modules else None)
if args.epochs is not None and args.epochs < 1:
    parser.error(f"--epochs must be at least 1, got {args.epochs}")

N = 64  # samples in a mini-batch
WINDOW = 30  # steps over which the signal-to-noise ratio is averaged
TARGET = 0.1  # training loss; the runs are compared by the number of steps to it
EPOCHS = {"digits": 15, "mnist": 1}

torch.set_num_threads(1)  # matrices this small gain nothing from more

# %%
# The scans
# ---------
# Both data sets end up as 8 x 8 grey values. The small digits were made from 32 x 32 bitmaps by counting the ink in blocks of 4 x 4; MNIST's images
# get a margin to 32 x 32 and are averaged in the same blocks. Hence the same network reads both.


def mnist(train: bool) -> tuple[Tensor, Tensor]:
    images, labels = load_mnist_dataset(args.root, train=train).tensors
    return avg_pool2d(pad(images, (2, 2, 2, 2), value=images.min().item()), 4).flatten(1), labels


if args.data == "mnist":
    (X_train, y_train), (X_test, y_test) = mnist(train=True), mnist(train=False)
else:
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))  # the same split for every seed
    pixels, digits = pixels.float()[order], digits[order]
    split = len(pixels) // 5
    (X_test, y_test), (X_train, y_train) = (pixels[:split], digits[:split]), (pixels[split:], digits[split:])

mean, std = X_train.mean(), X_train.std()
X_train, X_test = (X_train - mean) / std, (X_test - mean) / std
X_eval, y_eval = X_train[:2000], y_train[:2000]  # where the training loss is measured: all of the small digits, a part of MNIST

STEPS = 10 if args.quick else (args.epochs or EPOCHS[args.data]) * (len(X_train) // N)

# %%
# The network
# -----------
# Sigmoids make gradients of very different size in different layers: easy to write down, slow to train without knowledge of the curvature.
# ``extend`` lets the modules record their forward passes; it changes neither outputs nor gradients.

LAYERS = {"layer 1": 0, "layer 2": 2, "layer 3": 4}  # name -> index in the network


def network() -> nn.Sequential:
    torch.manual_seed(args.seed)
    return extend(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10)))


lossfunc = extend(nn.CrossEntropyLoss())

# %%
# Signal and noise of a gradient
# ------------------------------
# The loss is a mean, L = 1/N sum_n l_n, and the gradient g = sum_n g_n, where the summands g_n = 1/N grad l_n contain the divisor. ``Variance`` is
# the variance of these summands over the mini-batch, element by element::
#
#     v = 1/N sum_n g_n^2 - (1/N sum_n g_n)^2
#
# For independent samples the variance of the sum is N times that of one summand, whose unbiased estimate is v N/(N-1). Summed over the parameters of
# a layer, the expected squared distance of g from its mean, the *noise*, is therefore estimated without bias by ::
#
#     noise = N^2/(N-1) sum v
#
# and, as ``E|g|^2 = |E g|^2 + noise``, the *signal* ``|E g|^2`` by ``|g|^2 - noise``. Both are averaged over some steps before their ratio is
# taken. At a ratio of 1, half of the gradient's squared length is noise; at 0, all of it.


def noise_of(layer: nn.Module) -> float:
    return N**2 / (N - 1) * sum(p.variance.sum().item() for p in layer.parameters())


def squared_gradient(layer: nn.Module) -> float:
    return sum(p.grad.square().sum().item() for p in layer.parameters())


def signal_to_noise(squares: numpy.ndarray, noises: numpy.ndarray) -> numpy.ndarray:
    """Both arguments ``[steps, layers]``."""
    return squares.mean(0) / noises.mean(0) - 1


# %%
# Is that so? One mini-batch, sample by sample
# --------------------------------------------
# All quantities of one backward pass are exact for their definition, or unbiased where the name says MC. ``DiagGGNMC`` and ``KFAC`` share their
# draws, so that even the Monte-Carlo estimates agree: a bias has a single Kronecker factor, its whole GGN block.

model = network()
with backpack(BatchGrad(), Variance(), DiagGGNMC(), KFAC()):
    lossfunc(model(X_train[:N]), y_train[:N]).backward()

for p in model.parameters():
    torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
    torch.testing.assert_close(p.grad_batch.var(0, correction=0), p.variance)
for name in LAYERS.values():
    torch.testing.assert_close(model[name].bias.kfac[0].diagonal(), model[name].bias.diag_ggn_mc)
clear(model)

# %%
# Is that so? Many mini-batches
# -----------------------------
# Measure the noise: the mean squared distance between gradients of independent mini-batches and the gradient of the whole data set, at fixed weights.

everything = torch.cat([g.flatten() for g in torch.autograd.grad(lossfunc(model(X_train), y_train), list(model.parameters()))])
predicted, measured = [], []
for _ in range(10 if args.quick else 300):
    chosen = torch.randint(len(X_train), (N,))
    model.zero_grad()
    with backpack(Variance()):
        lossfunc(model(X_train[chosen]), y_train[chosen]).backward()
    predicted.append(noise_of(model))
    measured.append((torch.cat([p.grad.flatten() for p in model.parameters()]) - everything).square().sum().item())
predicted, measured = numpy.mean(predicted), numpy.mean(measured)
print(f"noise of a gradient of {N} samples: predicted from inside {predicted:.4f}, measured between mini-batches {measured:.4f}")
assert args.quick or abs(measured / predicted - 1) < 0.2, "the measured noise is not the predicted one"

# %%
# Three directions
# ----------------
# All three runs descend along P^-1 g, without momentum. P is the identity, the diagonal of the GGN, or its Kronecker-factored approximation: for a
# weight the product of two factors, for a bias a single one. One mini-batch gives but a noisy estimate of the curvature, hence running means. Damping
# bounds the steps where the curvature is small; each factor gets its share, in proportion to its own size (Martens & Grosse 2015, section 6.3).


def plain(g: Tensor, ggn_diagonal: Tensor, factors: list[Tensor], damping: float) -> Tensor:
    return g


def diagonal(g: Tensor, ggn_diagonal: Tensor, factors: list[Tensor], damping: float) -> Tensor:
    return g / (ggn_diagonal + damping)


def kronecker(g: Tensor, ggn_diagonal: Tensor, factors: list[Tensor], damping: float) -> Tensor:
    sizes = torch.stack([factor.diagonal().mean() for factor in factors])
    shares = sizes * (damping / sizes.prod()) ** (1 / len(sizes))  # their product is the damping
    return apply_inv_kfac_mat_prod(factors, g.flatten(), shift=shares.tolist()).view_as(g)


OPTIMIZERS = {  # name -> direction, step size, damping; fast on a grid, and reliable for twelve seeds
    "SGD": (plain, 3.0, 0.0),
    "GGN diagonal": (diagonal, 0.02, 3e-3),
    "KFAC": (kronecker, 0.1, 3e-3),
}

# %%
# Training
# --------
# The usual loop, except for the line that begins with ``with``. Each run starts from the same weights, sees the same mini-batches, and collects the
# same quantities, whether its direction needs them or not.


def mini_batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        yield from torch.randperm(len(X_train), generator=generator).split(N)[: len(X_train) // N]


def train(direction: Callable, step_size: float, damping: float, progress: tqdm) -> dict:
    model, curvature, losses, squares, noises = network(), {}, [], [], []
    for chosen in islice(mini_batches(), STEPS):
        model.zero_grad()
        with backpack(Variance(), DiagGGNMC(), KFAC()):
            lossfunc(model(X_train[chosen]), y_train[chosen]).backward()

        squares.append([squared_gradient(model[index]) for index in LAYERS.values()])
        noises.append([noise_of(model[index]) for index in LAYERS.values()])
        with torch.no_grad():
            for name, p in model.named_parameters():
                new = [p.diag_ggn_mc, *p.kfac]
                curvature[name] = [old.lerp(now, 0.05) for old, now in zip(curvature.get(name, new), new, strict=True)]
                p.sub_(direction(p.grad, curvature[name][0], curvature[name][1:], damping), alpha=step_size)
            losses.append(lossfunc(model(X_eval), y_eval).item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        progress.update()
    with torch.no_grad():
        accuracy = (model(X_test).argmax(1) == y_test).float().mean().item()
    return {"losses": losses, "squares": numpy.array(squares), "noises": numpy.array(noises), "accuracy": accuracy, "curvature": curvature}


runs = {}
with tqdm(total=STEPS * len(OPTIMIZERS), unit="step") as progress:
    for name, settings in OPTIMIZERS.items():
        progress.set_description(f"{name:12}")
        runs[name] = train(*settings, progress)
for run in runs.values():
    run["to target"] = next((step for step, loss in enumerate(run["losses"], start=1) if loss < TARGET), None)

# %%
# The table
# ---------
# The last columns are the signal-to-noise ratio of each layer's gradient, over the first and over the last steps.

print(f"\n{len(X_train)} training and {len(X_test)} test images, {STEPS} steps with {N} images each, seed {args.seed}\n")
print(f"{'':12} {'training':>9} {'test':>9} {'steps to':>9}   signal-to-noise ratio, first -> last {min(WINDOW, STEPS)} steps")
print(f"{'optimizer':12} {'loss':>9} {'accuracy':>9} {f'loss {TARGET}':>9}   " + " ".join(f"{layer:>15}" for layer in LAYERS))
for name, run in runs.items():
    run["first"], run["last"] = (signal_to_noise(run["squares"][part], run["noises"][part]) for part in (slice(None, WINDOW), slice(-WINDOW, None)))
    ratios = " ".join(f"{f'{first:.2f} -> {last:.2f}':>15}" for first, last in zip(run["first"], run["last"], strict=True))
    print(f"{name:12} {run['losses'][-1]:9.4f} {run['accuracy']:9.1%} {run['to target'] or '-':>9}   {ratios}")

# %%
# The picture
# -----------
# Above: what curvature saves, and how the gradient of each layer sinks towards its noise as the loss falls. Below: curvature at the end of the plain
# run, as KFAC and DiagGGNMC see it. Left: which pixels are bright and dark together. Middle: which digits the network still confuses; the outputs of
# such a pair have a negative correlation. Right: the pixels on whose weights the loss depends most.

COLOURS = dict(zip(OPTIMIZERS, ["#6b6b6b", "#e07b00", "#0060a8"], strict=True))
SHADES = dict(zip(LAYERS, ["#a6dba0", "#39a35c", "#00441b"], strict=True))  # the deeper the layer, the darker

figure = plt.figure(figsize=(13, 8.4), dpi=110, layout="constrained")
above, below = [["loss", [list(OPTIMIZERS)]]], [["inputs", "outputs", "diagonal"]]
panels = figure.subplot_mosaic([[above], [below]])
figure.get_layout_engine().set(w_pad=0.08, h_pad=0.12)

axes = panels["loss"]
axes.axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
for name, run in runs.items():
    reached = f", {run['to target']} steps to {TARGET}" if run["to target"] else ""
    axes.plot(range(1, STEPS + 1), run["losses"], color=COLOURS[name], linewidth=1.6, label=f"{name}{reached}")
    if reached:
        axes.plot(run["to target"], TARGET, "o", color=COLOURS[name], markeredgecolor="white", markersize=9, zorder=3)
axes.set(title="Training loss", xlabel="step", ylabel="cross-entropy [nats]", yscale="log", xlim=(0, STEPS))
axes.legend(loc="upper right", frameon=False)

starts = range(0, STEPS, WINDOW)
for name, run in runs.items():
    axes = panels[name]
    ratios = [signal_to_noise(run["squares"][start : start + WINDOW], run["noises"][start : start + WINDOW]) for start in starts]
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.axhline(0, color="black", linewidth=0.8)
    for (layer, shade), values in zip(SHADES.items(), numpy.transpose(ratios), strict=True):
        axes.plot([start + min(WINDOW, STEPS - start) / 2 for start in starts], values, "o-", color=shade, markersize=4, label=layer)
    axes.set_yscale("symlog", linthresh=0.1, linscale=0.6)
    axes.set(xlabel="step", xlim=(0, STEPS), ylim=(-0.15, 20), yticks=[0, 0.1, 1, 10], yticklabels=["0", "0.1", "1", "10"] if name == "SGD" else [])
    axes.set_title(name, color=COLOURS[name], weight="bold")
panels["SGD"].set_ylabel("signal-to-noise ratio of the gradient")
panels["KFAC"].legend(loc="upper right", frameon=False)

curvature = runs["SGD"]["curvature"]
(ggn_diagonal, _, inputs), (_, outputs, _) = curvature["0.weight"], curvature["4.weight"]
sizes = outputs.diagonal().sqrt()
images = {
    "inputs": (inputs, "Layer 1: Kronecker factor, inputs", "pixel, row by row", range(0, 64, 8), "second moment"),
    "outputs": (outputs / sizes.outer(sizes), "Layer 3: Kronecker factor, outputs", "digit", range(10), "correlation"),
    "diagonal": (1e3 * ggn_diagonal.sum(0).reshape(8, 8), "Layer 1: GGN diagonal", "column and row", range(8), "sum over units [$10^{-3}$]"),
}
for panel, (image, title, label, ticks, unit) in images.items():
    signed, largest = bool((image < 0).any()), image.abs().max().item()
    shown = panels[panel].imshow(image.numpy(), cmap="RdBu_r" if signed else "viridis", vmin=-largest if signed else 0, vmax=largest)
    panels[panel].set(title=title, xlabel=label, xticks=ticks, yticks=ticks)
    figure.colorbar(shown, ax=panels[panel], label=unit, shrink=0.8)

args.figure.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(args.figure)
print(f"\nsaved {args.figure}")

# %%
# What is claimed
# ---------------
# Of the small digits, trained to the end.

if args.data == "digits" and STEPS >= EPOCHS["digits"] * (len(X_train) // N):
    needed = [run["to target"] for run in runs.values()]
    assert min(run["accuracy"] for run in runs.values()) > 0.94, "a network has not learned to read"
    assert None not in needed, "a run has not reached the target"
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == len(needed), "curvature has not saved steps"
    assert all((run["first"] > run["last"]).all() for run in runs.values()), "the gradient has not sunk towards its noise"
