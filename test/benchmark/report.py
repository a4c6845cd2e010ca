"""Write the page and the pictures of the benchmark from its results: ``python test/benchmark/report.py [RESULTS] [--page PAGE]``."""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentParser
from math import ceil
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

DOCS = Path(__file__).resolve().parents[2] / "docs"
ORDER = """extended BatchGrad BatchL2Grad SumGradSquared Variance DiagGGNMC DiagGGNExact BatchDiagGGNMC BatchDiagGGNExact DiagHessian BatchDiagHessian
    SqrtGGNMC SqrtGGNExact KFAC KFLR KFRA HBP GGNMP HMP PCHMP""".split()
LABELS = {"ours": "**this package**", "backpack": "BackPACK", "by_hand": "*by hand*", "hooks_only": "*hooks alone*"}
COLOURS = {"ours": "#1b6ca8", "backpack": "#e08214", "torch.func": "#7a7a7a", "opacus": "#5aae61", "curvlinops": "#9970ab"}
COLOURS |= {"by_hand": "#d7191c", "hooks_only": "#c2a5cf"}
SLOW = 2.0
"""How many times the usual a gradient may take without a note."""
FLOOR = "by_hand"
"""Drawn as a mark across the bars of the others."""
INTRODUCTION = """# Benchmarks

What a quantity costs: the time of forward pass, backward pass and quantity, divided by the time of the forward and backward pass of the same model
that is not extended. A number of 1.3 says that the quantity costs 30 % more than training does already. `make bench` measures all of it again and
writes this page.

**How it is measured.** Each cell has a process of its own, in which the plain gradient and the quantity take turns. The ratio is taken in each
round; the table shows the median over rounds, and [benchmarks.json](_static/benchmarks.json) has the quartiles, the number of rounds and the time
of the gradient. A pass that takes more than five seconds is timed once, after a first one. On one thread of a CPU, time is that of the processor,
which other programs disturb least. *Memory* is the most that the first pass of the process took, beyond what a process took that computed only the
gradient; differences of a few MB are noise. The networks are as they are initialized, and the data are random.

**What is measured.** `extended` is the extended model outside of `with backpack(...)`. The products with curvature matrices (`GGNMP`, `HMP`,
`PCHMP`) include one product with one vector for each parameter. Monte-Carlo quantities draw one sample. `HBP` is the Hessian, averaged over
samples. Others compute less in some cells: `torch.func` forms no `.grad`, and the norms of opacus are one number for each sample, over all
parameters.

*By hand* is the floor: the least code that an expert would write for exactly this network and this quantity, with PyTorch alone, `.grad` included
(`test/benchmark/by_hand.py`; a test compares its results with ours). The pictures show it as a red mark across the bars. It is written for some cells
only. Its row under `extended` is what hooks cost at least: a plain model with a forward hook for each module, which keeps the input of a layer, and
a hook on the node of each output in the backward pass, which does nothing. *Hooks alone* is the least that any library with hooks does in a net of
Linear layers, with hooks that compute and without a single check (`test/benchmark/hooks_only.py`): what lies between it and ours is the price of
knowing that the numbers are right.

A small net costs Python, not arithmetic: *logreg* and *deep* show it. Between large products, as in *mlp*, the same Python takes two to four times as
long, since what it needs has left the cache.

**How to read it.** *Refused* says that the quantity is undefined for the model, or that the library has no rule for it; *not run*, that it would
take more time or memory than this table is worth; *failed*, that the library raised another error. The notes at the end give the reasons. An empty
cell was not measured, or is something that the library does not offer.

`python test/benchmark/run.py --help` tells how to measure some problems or extensions only, on several threads, or on a GPU (`--device cuda`);
`python test/benchmark/report.py` draws this page again without measuring.
"""

Run = dict[str, object]
Cells = dict[tuple[str, str, str], dict[str, object]]


class Notes:
    """Reasons, numbered in the order in which they are cited."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cite(self, reason: str) -> str:
        """A reference to a reason."""
        return f"[^{self.numbers.setdefault(reason, len(self.numbers) + 1)}]"

    def lines(self) -> list[str]:
        """All reasons, as footnotes."""
        return [f"[^{number}]: " + re.sub(r"([*<>_|])", r"\\\1", reason) for reason, number in self.numbers.items()]


def cells_of(run: Run) -> Cells:
    """Library, problem and quantity to what was measured; memory becomes the excess over the gradient's."""
    cells = {(library, cell["problem"], cell["quantity"]): cell for library, cells in run["cells"].items() for cell in cells}
    for (library, problem, _), cell in cells.items():
        if "ratio" in cell:
            cell["extra"] = max(0, cell["peak"] - cells[library, problem, "gradient"]["peak"]) / 2**20
    return cells


def quantities(cells: Cells) -> list[str]:
    """Quantities in the order of the page."""
    return [name for name in ORDER if any(quantity == name for _, _, quantity in cells)]


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def shown(cell: dict[str, object], field: str, notes: Notes, usual: float) -> str:
    """A number, with a note if the gradient beside it was slow, or why there is none; both are said once, beside the times."""
    if field in cell:
        slow = field == "ratio" and cell["gradient"] > SLOW * usual
        return number(cell[field]) + (notes.cite(beside(cell, usual)) if slow else "")
    return cell["status"] + notes.cite(cell["why"]) if "status" in cell and field == "ratio" else ""


def beside(cell: dict[str, object], usual: float) -> str:
    """What to know of a ratio to a slow gradient."""
    taken, usually, again = number(1000 * cell["gradient"]), number(1000 * usual), number(cell["ratio"] * cell["gradient"] / usual)
    return f"Beside it, the gradient took {taken} ms, not {usually}: if its passes, and no busy machine, are the reason, it costs {again} of those."


def base(cells: Cells, problem: str) -> float | None:
    """Seconds of the gradient, the median over the cells."""
    seconds = [cell["gradient"] for (library, name, _), cell in cells.items() if (library, name) == ("ours", problem) and "ratio" in cell]
    return median(seconds) if seconds else None


def table(run: Run, field: str, notes: Notes) -> list[str]:
    """A table of one field, a row for each quantity and library."""
    cells, problems = cells_of(run), list(run["problems"])
    usual = {problem: base(cells, problem) for problem in problems}
    lines = ["| quantity | library | " + " | ".join(problems) + " |", "|---|---|" + "---:|" * len(problems)]
    if field == "ratio":
        lines.append("| gradient (ms) | | " + " | ".join(number(1000 * usual[p]) if usual[p] else "" for p in problems) + " |")
    for quantity in quantities(cells):
        title = f"`{quantity}`"
        for library in run["cells"]:
            row = [cells.get((library, problem, quantity), {}) for problem in problems]
            if any(row):
                entries = [shown(cell, field, notes, usual[problem]) for problem, cell in zip(problems, row, strict=True)]
                lines.append(f"| {title} | {LABELS.get(library, library)} | " + " | ".join(entries) + " |")
                title = ""
    return [*lines, ""]


def picture(run: Run, title: str, path: Path) -> None:
    """Bars of each quantity, ours beside others, a mark at what is written by hand, a panel for each problem."""
    cells, problems, libraries = cells_of(run), list(run["problems"]), [library for library in run["cells"] if library != FLOOR]
    names = quantities(cells)
    columns = min(3, len(problems))
    rows = ceil(len(problems) / columns)
    figure = Figure(figsize=(3.4 * columns + 1, 0.32 * len(names) * rows + 1.2), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    height, most = 0.84 / len(libraries), max(cell.get("ratio", 1) for cell in cells.values())
    for axis, problem in zip(axes, problems, strict=False):
        for row, name in enumerate(names):
            bars = [(library, cell["ratio"]) for library in libraries if "ratio" in (cell := cells.get((library, problem, name), {}))]
            for index, (library, ratio) in enumerate(bars):
                axis.barh(row + (index - (len(bars) - 1) / 2) * height, ratio, height, color=COLOURS[library])
            if "ratio" in (cell := cells.get((FLOOR, problem, name), {})):
                axis.vlines(cell["ratio"], row - 0.48, row + 0.48, color=COLOURS[FLOOR], linewidth=1.8)
            cell = cells.get(("ours", problem, name), {})
            if "status" in cell:
                axis.text(1.05, row, cell["status"], fontsize=6.5, color="#888888", va="center")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=problem, xscale="log", xlim=(0.7, 1.3 * most), ylim=(len(names) - 0.5, -0.5))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(names)), names)
    for axis in axes[len(problems) :]:
        axis.remove()
    shown_here = [*libraries, FLOOR] if FLOOR in run["cells"] else libraries
    legend = {LABELS.get(library, library).strip("*"): Patch(color=COLOURS[library]) for library in shown_here}
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=len(legend), frameon=False)
    figure.supxlabel(f"cost in gradients, {title}")
    figure.savefig(path, dpi=100)


def page(runs: dict[str, Run], pictures: dict[str, str]) -> str:
    """The whole page."""
    notes, lines = Notes(), [INTRODUCTION]
    for title, run in runs.items():
        versions = ", ".join(
            f"{LABELS.get(name, name)} {version}"
            for name, version in run["versions"].items()
            if name not in ("ours", "torch.func", "hooks_only", FLOOR)
        )
        lines += [f"## {title}", "", f"{run['machine']}; {versions}; {run['date']}; `{run['command']}`", "", f"![{title}]({pictures[title]})", ""]
        lines += ["### Time, in gradients", "", *table(run, "ratio", notes)]
        lines += ["### Memory beyond the gradient's, in MB", "", *table(run, "extra", notes)]
    problems = {name: text for run in runs.values() for name, text in run["problems"].items()}
    lines += ["## Problems", "", *(f"- **{name}**: {text}" for name, text in problems.items()), "", *notes.lines()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write page and pictures."""
    arguments = ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("results", nargs="?", type=Path, default=DOCS / "_static" / "benchmarks.json")
    arguments.add_argument("--page", type=Path, default=DOCS / "benchmarks.md")
    options = arguments.parse_args()
    mpl.rcParams["font.size"] = 9
    runs, pictures = json.loads(options.results.read_text()), {}
    for title, run in runs.items():
        path = options.results.with_name(f"{options.results.stem}-{re.sub(r'[^a-z0-9]+', '-', title)}.png")
        picture(run, title, path)
        pictures[title] = os.path.relpath(path, options.page.parent)
    options.page.write_text(page(runs, pictures))


if __name__ == "__main__":
    main()
