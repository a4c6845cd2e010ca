"""What each quantity costs, in gradients: ``python test/benchmark/run.py [--against torch.func,opacus,backpack,by_hand --python PYTHON]``.

Each library is measured by ``measure.py`` in an interpreter of its own; the results go to one file, from which ``report.py`` makes page and pictures.
With ``--keep`` the file's other cells stay: ``--against by_hand --keep`` measures the floor again, and nothing else,
``--against ours --keep`` what has changed here.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from argparse import Namespace
from datetime import date
from pathlib import Path
from shlex import join

import torch
from measure import LIBRARIES, parser
from problems import PROBLEMS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "docs" / "_static" / "benchmarks.json"
OWN = ("ours", "by_hand", "hooks_only")
"""What this checkout has, measured by the interpreter that runs this file."""


def machine(device: str) -> str:
    """What the numbers were measured on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def measured(library: str, threads: int, options: Namespace) -> tuple[str, list[dict[str, object]]]:
    """Run ``measure.py``; return the version of the library and its cells, which are printed as they come."""
    python = sys.executable if library in OWN else options.python
    command = [python, str(HERE / "measure.py"), library, f"--threads={threads}", f"--device={options.device}"]
    command += [f"--rounds={options.rounds}", f"--seconds={options.seconds}", "--problems", *options.problems]
    command += ["--extensions", *options.extensions] if options.extensions else []
    # a look for devices must not initialize CUDA before the fork
    environment = os.environ | {"PYTHONPATH": str(ROOT) if library in OWN else "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        (version, *cells) = map(show, process.stdout)
    if process.returncode:
        sys.exit(f"{library} could not be measured.")
    return version["version"], cells


def show(line: str) -> dict[str, object]:
    """Print what a line of results says."""
    cell = json.loads(line)
    if "ratio" in cell:
        print(f"  {cell['problem']:12} {cell['quantity']:18} {cell['ratio']:8.2f}   {cell['rounds']} rounds", flush=True)
    elif "status" in cell:
        print(f"  {cell['problem']:12} {cell['quantity']:18} {cell['status']}: {cell['why'][:100]}", flush=True)
    return cell


def main() -> None:
    """Run the benchmark."""
    arguments = parser()
    arguments.add_argument("--threads", default="1", help="numbers of threads, with commas between them")
    arguments.add_argument("--against", default="", help=f"with commas between them: {', '.join(list(LIBRARIES)[1:])}")
    arguments.add_argument("--python", default=sys.executable, help="interpreter of the environment that has the others (make bench creates one)")
    arguments.add_argument("--output", type=Path, default=RESULTS, help="file of results; runs on other devices or numbers of threads stay in it")
    arguments.add_argument("--title", help="name of the run on the page, where those of several machines stand side by side")
    arguments.add_argument("--keep", action="store_true", help="measure only what --against names, into a run that the file has")
    arguments.add_argument("--quick", action="store_true", help="one round of the smallest problem, to see that all works")
    options = arguments.parse_args()
    if options.quick:
        options.problems, options.rounds = ["logreg"], 1
    others = [name for name in options.against.split(",") if name]
    if unknown := set(others) - (LIBRARIES.keys() - (set() if options.keep else {"ours"})):
        arguments.error(f"--against does not know {', '.join(unknown)}; it knows {', '.join(list(LIBRARIES)[1:])}")
    said = ["--problems", *options.problems] if options.problems != list(PROBLEMS) else []
    said += ["--against", options.against] if others else []
    said += ["--title", options.title] if options.title else []
    runs = json.loads(options.output.read_text()) if options.output.exists() else {}
    for threads in map(int, options.threads.split(",")):
        title = options.title or f"{options.device}, {threads} thread{'s' * (threads > 1)}"
        new = {
            "machine": machine(options.device),
            "date": str(date.today()),
            "command": f"test/benchmark/run.py --threads {threads} --device {options.device} --rounds {options.rounds} --seconds {options.seconds:g}"
            f" {join(said)}".rstrip(),
            "problems": {name: PROBLEMS[name].__doc__ for name in options.problems},
            "versions": {"Python": platform.python_version(), "torch": torch.__version__},
            "cells": {},
        }
        run = runs.get(title, new) if options.keep else new
        for library in others if options.keep else ["ours", *others]:
            print(f"{library}, {threads} thread(s)", flush=True)
            run["versions"][library], cells = measured(library, threads, options)
            kept = run["cells"].get(library, [])
            run["cells"][library] = list({(cell["problem"], cell["quantity"]): cell for cell in kept + cells}.values())
            runs[title] = run
            options.output.write_text(json.dumps(runs, indent=1) + "\n")
        broken = [f"{cell['quantity']} of {cell['problem']}" for name in OWN for cell in run["cells"].get(name, []) if cell.get("status") == "failed"]
        if broken:
            sys.exit(f"Errors that are no refusals: {', '.join(broken)}.")


if __name__ == "__main__":
    main()
