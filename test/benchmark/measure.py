"""Measure one library: ``python test/benchmark/measure.py ours --problems mlp``; prints a line of JSON for each cell.

Each cell has a process of its own, forked when the library is imported and nothing has been computed. The first pass there tells the peak of memory;
then the plain gradient and the quantity take turns, and the ratio is taken in each round, so that a drift of the machine cancels.
"""

from __future__ import annotations

import json
import re
import resource
import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from statistics import median, quantiles
from sys import platform
from time import perf_counter, process_time
from warnings import simplefilter

import torch
from problems import PROBLEMS
from torch import Tensor, nn

Step = Callable[[], object]

LIBRARIES = {
    "ours": ("with_backpack", "torch"),
    "torch.func": ("with_torch_func", "torch"),
    "opacus": ("with_opacus", "opacus"),
    "backpack": ("with_released", "backpack-for-pytorch"),
    "curvlinops": ("with_curvlinops", "curvlinops-for-pytorch"),
    "by_hand": ("by_hand", "torch"),
    "hooks_only": ("hooks_only", "torch"),
}
"""Name to the file that uses it and the distribution that has its version."""
EXACT = {"DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "DiagHessian", "BatchDiagHessian"}
"""What takes a column for each output of a sample."""
MOST_COLUMNS = 200
AVERAGED = {"KFRA", "HBP"}
"""What takes a matrix of the outputs of a layer, in a sequence of layers; elsewhere it is refused."""
MOST_FEATURES = 20_000
MEMORY = 8 << 30
"""Bytes that a process may have on the CPU."""
SECONDS = 400
"""How long a cell may take."""
LONG = 5.0
"""Seconds from which on a pass is timed once, after the first one."""


def clock(step: Step, options: Namespace, times: int = 1) -> float:
    """Seconds of a pass, the mean of several in a row; on one thread of the CPU those that it ran, so that other processes count less."""
    if options.device == "cpu":
        now = process_time if options.threads == 1 else perf_counter
        start = now()
        for _ in range(times):
            step()
        return (now() - start) / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / times


def peak(device: str) -> int:
    """Most bytes that this process has had at once."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform == "darwin" else 1024)
    return torch.cuda.max_memory_allocated()


def alternate(gradient: Step, step: Step, options: Namespace) -> tuple[list[float], list[float]]:
    """Seconds of the gradient and of the step, in turn, which have run once."""
    once = clock(gradient, options)
    first = clock(step, options)
    if first > LONG:
        return [clock(gradient, options)], [first]
    times = max(1, round(0.01 / first))  # at least ten milliseconds each
    rounds = max(min(3, options.rounds), min(options.rounds, int(options.seconds / (times * (first + once)))))
    pairs = []
    for _ in range(rounds):
        if first < 0.1:  # as in a training loop, what runs has run just before
            gradient()
        base = clock(gradient, options, times)
        if first < 0.1:
            step()
        pairs.append((base, clock(step, options, times)))
    base, seconds = zip(*pairs, strict=True)
    return list(base), list(seconds)


def too_large(quantity: str, model: nn.Module, x: Tensor) -> str | None:
    """Why a quantity would take hours, if it would."""
    with torch.no_grad():
        if quantity in EXACT and (columns := model(x)[0].numel()) > MOST_COLUMNS:
            return f"It takes {columns:,} columns, one for each output of a sample."
        if quantity in AVERAGED and isinstance(model, nn.Sequential):
            side = max((x := layer(x))[0].numel() for layer in model)
            if side > MOST_FEATURES:
                return f"It takes a matrix of {side:,} x {side:,} numbers."
    return None


def cell(library: str, problem: str, quantity: str, options: Namespace) -> dict[str, object]:
    """Measure one quantity in this process; what it cannot do is a result, too."""
    signal.alarm(SECONDS)
    simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.manual_seed(0)
    model, x, y = PROBLEMS[problem]()
    model, x, y, lossfunc = model.to(options.device), x.to(options.device), y.to(options.device), nn.CrossEntropyLoss()

    def gradient() -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    other = deepcopy(model)
    if quantity == "gradient":
        clock(gradient, options)
        return {"peak": peak(options.device)}
    if reason := too_large(quantity, model, x):
        return {"status": "not run", "why": reason}
    try:
        step = import_module(LIBRARIES[library][0]).step(quantity, other, deepcopy(lossfunc), x, y)
        step()
        top = peak(options.device)
        base, seconds = alternate(gradient, step, options)
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return {"status": "not run", "why": f"It takes more than {f'{MEMORY >> 30} GiB' if options.device == 'cpu' else 'the device has'}."}
        status = "refused" if isinstance(error, NotImplementedError) else "failed"
        return {"status": status, "why": re.split(r"(?<=\.)\s|\n", str(error).strip())[0] or type(error).__name__}
    ratios = [s / b for s, b in zip(seconds, base, strict=True)]
    quarters = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    numbers = {"ratio": median(ratios), "lower": quarters[0], "upper": quarters[2], "gradient": median(base)}
    return {name: float(f"{number:.4g}") for name, number in numbers.items()} | {"rounds": len(ratios), "peak": top}


def isolated(*arguments: object) -> dict[str, object]:
    """Measure a cell in a process of its own."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            return pool.submit(cell, *arguments).result()
    except BrokenProcessPool:
        return {"status": "not run", "why": f"It was stopped after {SECONDS} seconds, or died."}


def parser() -> ArgumentParser:
    """Options that are passed on from the run."""
    options = ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    options.add_argument("--extensions", nargs="+", help="all, if not given")
    options.add_argument("--rounds", type=int, default=20, help="at most; fewer where they take more than the seconds")
    options.add_argument("--seconds", type=float, default=1.5, help="what the rounds of a cell may take; three rounds are the least")
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return options


def main() -> None:
    """Measure."""
    arguments = parser()
    arguments.add_argument("library", choices=LIBRARIES)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    name, distribution = LIBRARIES[options.library]
    offered = import_module(name).QUANTITIES
    print(json.dumps({"version": version(distribution)}), flush=True)
    for problem in options.problems:
        names = offered.get(problem, ()) if isinstance(offered, dict) else offered
        for quantity in ("gradient", *(name for name in names if name in (options.extensions or names))):
            print(json.dumps({"problem": problem, "quantity": quantity} | isolated(options.library, problem, quantity, options)), flush=True)


if __name__ == "__main__":
    main()
