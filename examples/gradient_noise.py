"""
Which batch size pays?
======================

Large mini-batches give better gradients, small ones cheaper gradients. How large is large enough is written in the variance of the per-sample
gradients, which one ordinary backward pass reveals. Here it predicts at which batch size a network stops to learn faster, and training at
nine batch sizes shows that the prediction is right.
"""

# %%
# The noise scale
# ---------------
# The gradient of a mini-batch of :math:`B` samples has the expectation :math:`G`, the gradient of the whole data set, and the covariance
# :math:`\Sigma / B`, with the covariance :math:`\Sigma` of per-sample gradients. Signal and noise are equally long at the *noise scale*
#
# .. math:: B_\text{noise} = \operatorname{tr}\Sigma \,/\, |G|^2
#
# (`McCandlish et al. 2018 <https://arxiv.org/abs/1812.06162>`_). Much smaller mini-batches waste steps, much larger ones waste samples.
#
# ``Variance`` is taken of the summands of the mean loss, which contain the divisor :math:`B`, hence a factor of :math:`B^2`;
# the unbiased estimate has another :math:`B/(B-1)`.
import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREY, ORANGE, digits, save
from torch import nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import Variance

X, y, _, _ = digits()
lossfunc = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))


def signal_and_noise(model: nn.Module, B: int) -> tuple[float, float]:
    """Estimates of |G|^2 and of the trace of Sigma, after a backward pass over ``B`` samples."""
    trace = B**3 / (B - 1) * sum(p.variance.sum().item() for p in model.parameters())
    squared = sum(p.grad.square().sum().item() for p in model.parameters())
    return squared - trace / B, trace


# %%
# One mini-batch at a time, compared with the definition
# -------------------------------------------------------
# Estimates from 32 samples, averaged over 500 mini-batches, agree with what the whole data set says.
model = network()
with backpack(Variance()):
    lossfunc(model(X), y).backward()
G2 = sum(p.grad.square().sum().item() for p in model.parameters())
trace = len(X) ** 2 * sum(p.variance.sum().item() for p in model.parameters())

estimates = []
for _ in range(500):
    chosen = torch.randint(len(X), (32,))
    model.zero_grad()
    with backpack(Variance()):
        lossfunc(model(X[chosen]), y[chosen]).backward()
    estimates.append(signal_and_noise(model, 32))
estimated_G2, estimated_trace = torch.tensor(estimates).mean(0).tolist()
print(f"|G|^2 {G2:.3f}, estimated {estimated_G2:.3f};   trace of Sigma {trace:.3f}, estimated {estimated_trace:.3f}")
assert abs(estimated_trace / trace - 1) < 0.05 and abs(estimated_G2 / G2 - 1) < 0.1

# %%
# The noise scale grows while the network learns
# ----------------------------------------------
# Watch eight runs. All that it takes is the line that begins with ``with``.
TARGET = 0.15  # training loss, in nats


def sgd_step(model: nn.Module, B: int, step_size: float, generator: torch.Generator) -> None:
    chosen = torch.randint(len(X), (B,), generator=generator)
    model.zero_grad()
    lossfunc(model(X[chosen]), y[chosen]).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(step_size * p.grad)


def training_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return lossfunc(model(X), y).item()


def watched_run(seed: int) -> torch.Tensor:
    """Signal and noise of each step, ``[steps, 2]``."""
    model, generator, found = network(), torch.Generator().manual_seed(seed), []
    while training_loss(model) > TARGET:
        with backpack(Variance()):
            sgd_step(model, 64, 0.3, generator)
        found.append(signal_and_noise(model, 64))
    return torch.tensor(found)


watched = [watched_run(seed) for seed in range(8)]
shortest = min(len(run) for run in watched)
signal, noise = torch.stack([run[:shortest] for run in watched]).mean(0).T
WINDOW = 20
curve = noise.unfold(0, WINDOW, WINDOW).mean(1) / signal.unfold(0, WINDOW, WINDOW).mean(1)  # a ratio of means: each mean is unbiased
noise_scale = (noise.sum() / signal.sum()).item()
print(f"noise scale: {curve[0]:.0f} at the beginning, {curve[-1]:.0f} at the end, {noise_scale:.0f} over whole runs")

# %%
# Does it matter?
# ---------------
# Train with nine batch sizes to the same loss, with a choice of step sizes, of which each batch size gets its best.
SIZES, STEP_SIZES, MOST_STEPS = [2, 4, 8, 16, 32, 64, 128, 512, 1024], [0.1 * 2 ** (k / 2) for k in range(8)], 1600


def steps_to_target(B: int, step_size: float) -> float:
    model, generator = network(), torch.Generator().manual_seed(1)
    every = max(1, 32 // B)  # steps between two looks at the training loss
    for step in range(every, MOST_STEPS + 1, every):
        for _ in range(every):
            sgd_step(model, B, step_size, generator)
        if training_loss(model) < TARGET:
            return step
    return float("inf")


progress = tqdm([(B, step_size) for B in SIZES for step_size in STEP_SIZES], unit="run")
counts = torch.tensor([steps_to_target(B, step_size) for B, step_size in progress]).view(len(SIZES), -1)
steps = dict(zip(SIZES, counts.min(1).values.tolist(), strict=True))
for B in SIZES:
    print(f"{B:5} samples in a mini-batch: {steps[B]:5.0f} steps, {B * steps[B]:7.0f} samples seen")

# %%
# The theory says that :math:`S` steps, and :math:`E = BS` samples, satisfy
# :math:`(S/S_\text{min} - 1)(E/E_\text{min} - 1) = 1`, in other words :math:`S = S_\text{min} (1 + B_\text{knee}/B)`, with the knee at the noise
# scale. It is a theory of orders of magnitude, for it takes the curvature to be the same in all directions.
inverse = torch.tensor([1 / B for B in SIZES])
logs = torch.tensor([steps[B] for B in SIZES]).log()
candidates = torch.logspace(0, 3, 301)
shapes = (1 + candidates[:, None] * inverse).log()
misfit = (logs - shapes - (logs - shapes).mean(1, keepdim=True)).square().sum(1)
knee = candidates[misfit.argmin()].item()
S_min = (logs - (1 + knee * inverse).log()).mean().exp().item()
print(f"knee at {knee:.0f} samples, noise scale {noise_scale:.0f}")

assert curve[-1] > curve[0], "the noise scale has not grown"
assert 1 / 5 < knee / noise_scale < 5, "the noise scale is not of the order of magnitude of the knee"
assert steps[16] < 0.3 * steps[2], "below the noise scale, more samples do not save steps"
assert steps[1024] > 0.7 * steps[128], "above the noise scale, more samples save steps"

# %%
# Left of the knee each doubling of the mini-batch halves the number of steps, at the same number of samples. Right of it, steps stay the same, and
# samples double.
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
middles = torch.arange(len(curve)) * WINDOW + WINDOW / 2
left.plot(middles, curve, "o-", color=BLUE)
left.axhline(noise_scale, color=GREY, linestyle=":")
left.annotate("whole runs", (middles[-1], noise_scale), xytext=(0, -14), textcoords="offset points", color=GREY, ha="right")
left.set(title="Noise scale while training", xlabel="step", ylabel="noise scale [samples]", yscale="log", ylim=(25, 500))
left.set_yticks([30, 50, 100, 200, 400], ["30", "50", "100", "200", "400"])
left.minorticks_off()

fine = torch.logspace(0, 3.3, 100)
right.plot(fine, S_min * (1 + knee / fine), color=GREY, linewidth=1, label="$S_{min}(1 + B_{knee}/B)$, fitted")
right.plot(SIZES, [steps[B] for B in SIZES], "o", color=ORANGE, markersize=8, label="measured, best step size")
right.axvspan(curve.min().item(), curve.max().item(), color=BLUE, alpha=0.15, linewidth=0, label="noise scale while training")
right.axvline(knee, color=GREY, linestyle=":")
right.annotate("knee", (knee, S_min), xytext=(-6, 0), textcoords="offset points", ha="right", color=GREY)
right.set(title=f"Steps to a training loss of {TARGET} nats", xlabel="samples in a mini-batch", ylabel="steps", xscale="log", yscale="log")
right.legend()
save(figure, "gradient_noise")
