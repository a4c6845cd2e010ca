"""Cost of every quantity in units of the gradient: ``python test/benchmark/run.py [--threads 1] [--rounds 20] [--output docs/benchmarks.md]``.

Each cell is (forward + backward + quantity) / (forward + backward of the same model, not extended), measured in turn in one process, the median of
the rounds. The row ``extended`` is the extended model outside of any context.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions

Step = Callable[[], None]


def logreg() -> tuple[nn.Module, Tensor, Tensor]:
    """Flatten and Linear 784-10, 128 samples."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), torch.rand(128, 1, 28, 28), torch.randint(10, (128,))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """784-512-512-10 with ReLU, 128 samples."""
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.rand(128, 784), torch.randint(10, (128,))


def c3d3() -> tuple[nn.Module, Tensor, Tensor]:
    """Three convolutions with pooling, three Linear (DeepOBS), shapes of CIFAR-10, 64 samples."""
    layers: list[nn.Module] = []
    for channels, outputs, kernel, padding in ((3, 64, 5, 0), (64, 96, 3, 0), (96, 128, 3, 1)):
        layers += [nn.Conv2d(channels, outputs, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.rand(64, 3, 32, 32), torch.randint(10, (64,))


def all_cnn_c() -> tuple[nn.Module, Tensor, Tensor]:
    """Nine convolutions and the mean over positions (DeepOBS), shapes of CIFAR-100, 16 samples."""
    layers: list[nn.Module] = []
    sizes = ((3, 96, 3, 1, 1), (96, 96, 3, 1, 1), (96, 96, 3, 2, 1), (96, 192, 3, 1, 1), (192, 192, 3, 1, 1), (192, 192, 3, 2, 1))
    for channels, outputs, kernel, stride, padding in (*sizes, (192, 192, 3, 1, 0), (192, 192, 1, 1, 0), (192, 100, 1, 1, 0)):
        layers += [nn.Conv2d(channels, outputs, kernel, stride, padding), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(6), nn.Flatten()), torch.rand(16, 3, 32, 32), torch.randint(100, (16,))


class Classifier(nn.Module):
    """Four layers of a transformer, width 256, four heads, and a Linear on the mean over positions."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.encoder, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify.

        Args:
            x: ``[N, T, 256]``.

        Returns:
            ``[N, 10]``.
        """
        return self.head(self.encoder(x).mean(1))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """Four layers, 128 positions, 8 samples."""
    return Classifier(), torch.rand(8, 128, 256), torch.randint(10, (8,))


PROBLEMS = {"logreg": logreg, "mlp": mlp, "3c3d": c3d3, "All-CNN-C": all_cnn_c, "transformer": transformer}
QUANTITIES = {
    name: getattr(extensions, name)
    for name in """BatchGrad BatchL2Grad SumGradSquared Variance DiagGGNMC DiagGGNExact BatchDiagGGNMC BatchDiagGGNExact SqrtGGNMC SqrtGGNExact
    KFAC KFLR KFRA DiagHessian BatchDiagHessian GGNMP HMP PCHMP""".split()
}
LEFT_OUT = {
    "BatchDiagGGNExact": {"mlp", "All-CNN-C", "transformer"},
    "BatchDiagGGNMC": {"mlp", "transformer"},
    "SqrtGGNExact": {"mlp", "3c3d", "All-CNN-C", "transformer"},
    "BatchDiagHessian": {"mlp", "3c3d", "All-CNN-C", "transformer"},
    "DiagHessian": {"3c3d", "All-CNN-C", "transformer"},
    "DiagGGNExact": {"All-CNN-C"},
    "KFLR": {"All-CNN-C"},
    "KFRA": {"3c3d", "All-CNN-C", "transformer"},
} | {name: {"transformer"} for name in ("GGNMP", "HMP", "PCHMP")}
"""Where results, or what is carried, take a gigabyte and more, or the quantity is refused."""


def steps(problem: str) -> dict[str, Step]:
    """Build the steps to be timed.

    Args:
        problem: Name.

    Returns:
        Name to a function that runs forward, backward and one quantity.
    """
    torch.manual_seed(0)
    model, x, y = PROBLEMS[problem]()
    plain, lossfunc = model, nn.CrossEntropyLoss()
    torch.manual_seed(0)
    extended, extended_loss = extend(PROBLEMS[problem]()[0]), extend(nn.CrossEntropyLoss())

    def gradient(model: nn.Module = plain, lossfunc: nn.Module = lossfunc) -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    def quantity(make: Callable) -> Step:
        def step() -> None:
            with backpack(make()):
                gradient(extended, extended_loss)

        return step

    timed: dict[str, Step] = {"gradient": gradient, "extended": lambda: gradient(extended, extended_loss)}
    return timed | {name: quantity(make) for name, make in QUANTITIES.items() if problem not in LEFT_OUT.get(name, ())}


def measure(timed: dict[str, Step], rounds: int) -> dict[str, float]:
    """Time all steps in turn.

    Args:
        timed: The steps.
        rounds: How often.

    Returns:
        Median over rounds of the seconds of each step divided by those of the gradient; for the gradient itself the seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(rounds + 2):
        for name, step in timed.items():
            step()  # as in a training loop, what runs has run just before
            start = perf_counter()
            step()
            if turn > 1:
                seconds[name].append(perf_counter() - start)
    base = seconds.pop("gradient")
    # each step against the gradient of the same round, so that drift of the machine cancels
    ratios = {name: median(s / b for s, b in zip(values, base, strict=True)) for name, values in seconds.items()}
    return {"gradient": median(base)} | ratios


def table(results: dict[str, dict[str, float]], threads: int, rounds: int) -> str:
    """Write the results as a Markdown table.

    Args:
        results: Problem to name to ratio.
        threads: Number of threads.
        rounds: Number of rounds.

    Returns:
        The text.
    """
    lines = [
        f"Cost in gradients, median of {rounds} rounds; torch {torch.__version__}, {threads} thread(s) of {platform.machine()} CPU, float32, "
        f"{date.today()}.",
        "",
        "| quantity | " + " | ".join(results) + " |",
        "|---|" + "---|" * len(results),
        "| gradient (ms) | " + " | ".join(f"{1e3 * values['gradient']:.2f}" for values in results.values()) + " |",
    ]
    for name in ("extended", *QUANTITIES):
        lines.append(f"| {name} | " + " | ".join(f"{values[name]:.2f}" if name in values else "" for values in results.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {problem: measure(steps(problem), arguments.rounds) for problem in arguments.problems}
    text = table(results, arguments.threads, arguments.rounds)
    print(text)
    if arguments.output:
        arguments.output.write_text("# Benchmarks\n\n" + text + "\n`make bench` writes this page.\n")


if __name__ == "__main__":
    main()
