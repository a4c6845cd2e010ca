"""What each quantity costs on GPT-2 (124 million random parameters, tied output layer): CPU time in gradients, and memory beside the gradient.

Each quantity runs in a process of its own, whose peak memory the operating system tells: ``python test/benchmark/gpt2.py [QUANTITY ...]``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from backpack import backpack, extend, extensions

QUANTITIES = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNMC"]
GRADIENT = "gradient"


def measure(quantity: str, samples: int, length: int, repeats: int) -> tuple[float, float]:
    """Run forward and backward passes.

    Args:
        quantity: Name of an extension, or ``"gradient"``.
        samples: Size of the mini-batch.
        length: Number of words.
        repeats: How often; the first pass does not count.

    Returns:
        CPU time of the fastest pass in seconds, and peak memory in GiB.
    """
    torch.manual_seed(0)
    model, loss = extend(GPT2LMHeadModel(GPT2Config()).eval()), extend(torch.nn.CrossEntropyLoss())
    words, times = torch.randint(model.config.vocab_size, (samples, length + 1)), []
    for _ in range(repeats + 1):
        for parameter in model.parameters():
            vars(parameter).clear()
            parameter.grad = None
        begin = time.process_time()
        with backpack(*([] if quantity == GRADIENT else [getattr(extensions, quantity)()])):
            loss(model(words[:, :-1]).logits.transpose(1, 2), words[:, 1:]).backward()
        times.append(time.process_time() - begin)
    return min(times[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Measure, each quantity in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("quantities", nargs="*", default=QUANTITIES)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="measure the first quantity in this process")
    options = parser.parse_args()
    sizes = options.samples, options.length, options.repeats
    if options.here:
        print(*measure(options.quantities[0], *sizes))
        return
    found = {}
    for quantity in (GRADIENT, *options.quantities):
        arguments = [f"--{name}={size}" for name, size in zip(("samples", "length", "repeats"), sizes, strict=True)]
        output = subprocess.run([sys.executable, __file__, quantity, "--here", *arguments], check=True, capture_output=True, text=True).stdout
        found[quantity] = seconds, memory = tuple(map(float, output.split()[-2:]))
        base_seconds, base_memory = found[GRADIENT]
        print(
            f"{quantity:16} {seconds:7.2f} s {seconds / base_seconds:6.2f} gradients {memory:7.2f} GiB {memory - base_memory:+7.2f} GiB", flush=True
        )


if __name__ == "__main__":
    main()
