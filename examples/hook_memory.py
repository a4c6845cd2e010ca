"""
Reduce and forget: quantities that never take memory
====================================================

Per-sample gradients are as large as the model, times the number of samples. Who wants a statistic of them needs those of one layer at a time. A
function given as ``extension_hook`` runs at each module as soon as its quantities are there, and may replace them by what is wanted. The memory
that this saves is measured.
"""

# %%
# A convolutional network
# -----------------------
import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREEN, GREY, ORANGE, digits, memory, save
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, clear, extend
from backpack.extensions import BatchGrad, BatchL2Grad

X, y, _, _ = digits()
X, y = X[:256].view(-1, 1, 8, 8), y[:256]
model = extend(
    nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        *(layer for _ in range(6) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
)
lossfunc = nn.CrossEntropyLoss()
parameters = list(model.parameters())

# %%
# The hook
# --------
# The cosine between the gradient of each sample and the gradient of the mini-batch, in each layer, tells who agrees with the others. It needs the
# per-sample gradients of a layer, but only until two numbers are made of them.


def reduce_and_forget(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        p.products, p.squares = products_and_squares(p.grad_batch)
        del p.grad_batch


def products_and_squares(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products with the sum of the gradients ``[N, *]``, and squared norms, both ``[N]``."""
    flat = gradients.flatten(1)
    return flat @ flat.sum(0), torch.einsum("np,np->n", flat, flat)


def ordinary() -> None:
    lossfunc(model(X), y).backward()


def at_the_end() -> list[tuple[Tensor, Tensor]]:
    with backpack(BatchGrad()):
        lossfunc(model(X), y).backward()
    found = [products_and_squares(p.grad_batch) for p in parameters]
    clear(model)
    return found


def in_the_hook() -> list[tuple[Tensor, Tensor]]:
    with backpack(BatchGrad(), extension_hook=reduce_and_forget):
        lossfunc(model(X), y).backward()
    return [(p.products, p.squares) for p in parameters]


# %%
# If only norms are wanted, ``BatchL2Grad`` finds them without any per-sample gradient.


def norms_only() -> list[Tensor]:
    with backpack(BatchL2Grad()):
        lossfunc(model(X), y).backward()
    return [p.batch_l2 for p in parameters]


for late, early, norms in zip(at_the_end(), in_the_hook(), norms_only(), strict=True):
    torch.testing.assert_close(early, late)
    torch.testing.assert_close(norms, late[1])

# %%
# Measure
# -------
# PyTorch's profiler writes down each allocation.
WAYS = {
    "gradient only": (ordinary, GREY),
    "BatchL2Grad": (norms_only, GREEN),
    "BatchGrad, hook": (in_the_hook, BLUE),
    "BatchGrad": (at_the_end, ORANGE),
}
curves = {}
for name, (function, _) in tqdm(WAYS.items(), desc="measuring"):
    model.zero_grad()
    clear(model)
    curves[name] = memory(function)
peaks = {name: max(used) for name, (_, used) in curves.items()}
gradients = len(X) * sum(p.numel() for p in parameters) * 4 / 2**20
print(f"all per-sample gradients: {gradients:.0f} MiB")
for name, peak in peaks.items():
    print(f"{name:16} peak {peak:6.1f} MiB")
assert peaks["BatchGrad"] > gradients
assert peaks["BatchGrad, hook"] < 0.6 * peaks["BatchGrad"]
assert peaks["BatchL2Grad"] < peaks["BatchGrad, hook"]

# %%
# Left: per-sample gradients pile up, or they do not. Right: what the hook has found. In a network that has learned nothing yet, samples of one
# digit pull into the same direction, and some digits pull against the others.
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), width_ratios=[1.2, 1])
for name, (times, used) in curves.items():
    portion = [t / times[-1] for t in times]
    left.plot(portion, used, drawstyle="steps-post", color=WAYS[name][1], label=f"{name}: {peaks[name]:.0f} MiB", linewidth=1.4)
left.set(
    title="Memory during a forward and a backward pass",
    xlabel="time [duration of the call]",
    ylabel="memory in use [MiB]",
    xlim=(0, 1),
    ylim=(0, 1.25 * max(peaks.values())),
)
left.legend(title="peak", loc="upper left")

weights = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
in_the_hook()
cosines = torch.stack([p.products / (p.squares.sqrt() * p.grad.norm()) for p in weights.values()])
order = y.argsort()
edges = torch.searchsorted(y[order], torch.arange(11))
shown = right.imshow(cosines[:, order].numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
names = [f"conv {i}" for i in range(1, len(weights))] + ["linear"]
right.set(title="Agreement with the mini-batch", xlabel="sample, sorted by digit", yticks=range(len(weights)), yticklabels=names)
right.set_xticks(((edges[1:] + edges[:-1]) / 2).tolist(), range(10))
figure.colorbar(shown, ax=right, label="cosine of gradient and mini-batch gradient")
save(figure, "hook_memory")
