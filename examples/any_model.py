"""
Any model as it is: a residual net and a transformer
====================================================

In-place operations, residual connections, functions instead of modules, bare parameters, attention: nothing has to be rewritten. Two networks
that are written as people write them learn to read digits, while per-sample gradients show where in the depth of the network the signal is.
"""

# %%
# A residual net, in-place and functional
# ---------------------------------------
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from _common import digits, save
from matplotlib.colors import LogNorm
from torch import Tensor, nn
from tqdm import tqdm

from backpack import backpack, extend
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, Variance

X, y, X_test, y_test = digits()
X, X_test = X.view(-1, 1, 8, 8), X_test.view(-1, 1, 8, 8)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x), inplace=True)
        out = self.conv2(out)
        out += x if self.shortcut is None else self.shortcut(x)
        return out.relu_()


class ResidualNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.avg_pool2d(self.blocks(F.relu(self.stem(x))), 2).flatten(1))


# %%
# A transformer
# -------------
# It reads 16 patches of 2 x 2 pixels. The class token and the positions are parameters without a module.


class Transformer(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, nhead=3, dim_feedforward=48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


torch.manual_seed(0)
MODELS = {"residual net": extend(ResidualNet()), "transformer": extend(Transformer())}
lossfunc = extend(nn.CrossEntropyLoss())

# %%
# Is that so?
# -----------
# All per-sample gradients, and the GGN diagonal, of five samples against plain automatic differentiation: one sample, and one output, at a time.
# Kronecker factors come along for all parameters: for the weights of attention, and for the positions, which are seen like the table of an embedding.
for model in MODELS.values():
    with backpack(BatchGrad(), DiagGGNExact(), KFAC()):
        lossfunc(model(X[:5]), y[:5]).backward()
    parameters = list(model.parameters())
    diagonal = [torch.zeros_like(p) for p in parameters]
    for n in range(5):
        output = model(X[n : n + 1])
        for p, g in zip(parameters, torch.autograd.grad(lossfunc(output, y[n : n + 1]) / 5, parameters, retain_graph=True), strict=True):
            torch.testing.assert_close(p.grad_batch[n], g, rtol=1e-3, atol=1e-5)
        probabilities = output.softmax(1)[0].detach()
        root = probabilities.sqrt().diag() - torch.outer(probabilities, probabilities.sqrt())  # root @ root.T: Hessian of the cross-entropy
        for column in root.T:
            for d, g in zip(diagonal, torch.autograd.grad(output[0] @ column, parameters, retain_graph=True), strict=True):
                d.add_(g.square() / 5)
    for p, d in zip(parameters, diagonal, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, d, rtol=1e-3, atol=1e-5)
    assert all(hasattr(p, "kfac") for p in parameters)

# %%
# Signal and noise, layer by layer
# --------------------------------
# ``Variance`` splits the squared length of each parameter's gradient into signal and noise: of a mean over :math:`B` samples, the noise is
# :math:`B^2/(B-1)` times the variance of the summands.
BATCH, EPOCHS, WINDOW = 64, 12, 22


def train(name: str, model: nn.Module) -> dict:
    optimizer, shares = torch.optim.Adam(model.parameters(), lr=4e-3), []
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=EPOCHS * (len(X) // BATCH))
    with tqdm(total=EPOCHS * (len(X) // BATCH), desc=name, unit="step") as progress:
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(X)).split(BATCH)[: len(X) // BATCH]:
                optimizer.zero_grad()
                with backpack(Variance()):
                    lossfunc(model(X[chosen]), y[chosen]).backward()
                optimizer.step()
                schedule.step()
                noise = [BATCH**2 / (BATCH - 1) * p.variance.sum() for p in model.parameters()]
                shares.append(torch.tensor([[p.grad.square().sum(), v] for p, v in zip(model.parameters(), noise, strict=True)]))
                progress.update()
    with torch.no_grad():
        accuracy = (model(X_test).argmax(1) == y_test).float().mean().item()
    squares, noises = torch.stack(shares).unfold(0, WINDOW, WINDOW).mean(3).unbind(2)  # [windows, parameters]
    return {"ratio": squares / noises - 1, "accuracy": accuracy}


runs = {name: train(name, model) for name, model in MODELS.items()}
for name, run in runs.items():
    weights = sum(p.numel() for p in MODELS[name].parameters())
    print(f"{name:13} {weights} weights, test accuracy {run['accuracy']:.1%}")
    assert run["accuracy"] > 0.92
    assert run["ratio"][0].median() > run["ratio"][-1].median(), "the gradient has not sunk towards its noise"

# %%
# From the input at the top to the output at the bottom. Yellow: mostly signal. Blue: mostly the noise of the mini-batch. Once nearly all images are
# known, a single one may bring nearly all of a gradient: then its square is as large as its noise, and no signal is left (darkest blue).
SHORT = {
    "self_attn.": "attention.",
    "in_proj_weight": "q, k, v",
    "out_proj.weight": "out",
    "encoder.layers.": "layer ",
    "blocks.": "block ",
    ".weight": "",
}

figure, panels = plt.subplots(1, 2, figsize=(12.5, 6))
for axes, (name, run) in zip(panels, runs.items(), strict=True):
    rows = [(i, label) for i, (label, p) in enumerate(MODELS[name].named_parameters()) if p.dim() > 1]
    image = run["ratio"][:, [i for i, _ in rows]].T
    labels = [label for _, label in rows]
    for long, short in SHORT.items():
        labels = [label.replace(long, short) for label in labels]
    shown = axes.imshow(image.clamp(min=0.03).numpy(), aspect="auto", norm=LogNorm(0.03, 3), extent=(0, EPOCHS, len(rows), 0))
    axes.set(title=f"{name}: {run['accuracy']:.1%} of the test images", xlabel="epoch")
    axes.set_yticks([i + 0.5 for i in range(len(rows))], labels, fontsize=8)
bar = figure.colorbar(shown, ax=panels, label="signal-to-noise ratio of the gradient", ticks=[0.03, 0.1, 0.3, 1, 3], extend="both", shrink=0.8)
bar.ax.minorticks_off()
bar.ax.set_yticklabels(["0.03", "0.1", "0.3", "1", "3"])
save(figure, "any_model")
