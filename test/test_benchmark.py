"""The benchmark measures, reports, and measures what it says; how long anything takes is no test."""

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.image import imread
from torch import nn

from backpack import extensions

ROOT = Path(__file__).parents[1]
BENCHMARK = ROOT / "test" / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import by_hand  # noqa: E402
import hooks_only  # noqa: E402
import measure  # noqa: E402
import report  # noqa: E402
import with_backpack  # noqa: E402
import with_torch_func  # noqa: E402
from problems import PROBLEMS  # noqa: E402

GIVEN = {
    "machine": "a machine",
    "date": "2001-01-01",
    "command": "a command",
    "problems": {"p": "First problem.", "q": "Second problem."},
    "versions": {"torch": "0.0", "ours": "0.0", "backpack": "9.9"},
    "cells": {
        "ours": [
            {"problem": "p", "quantity": "gradient", "peak": 2**20},
            {"problem": "p", "quantity": "KFAC", "ratio": 2.345, "gradient": 0.5, "peak": 9 * 2**20},
            {"problem": "p", "quantity": "Variance", "ratio": 1.5, "gradient": 0.7, "peak": 1},
            {"problem": "q", "quantity": "KFAC", "status": "refused", "why": "It has no p_0."},
            {"problem": "q", "quantity": "Variance", "status": "not run", "why": "Too much."},
        ],
        "backpack": [
            {"problem": "p", "quantity": "gradient", "peak": 2**20},
            {"problem": "p", "quantity": "KFAC", "ratio": 45.67, "gradient": 1.5, "peak": 456 * 2**20},
            {"problem": "q", "quantity": "KFAC", "status": "refused", "why": "It has no p_0."},
        ],
    },
}
"""Results of a run, invented."""


def python(script: str, *arguments: str | Path) -> str:
    """Run a script of the benchmark on this checkout; return what it prints."""
    done = subprocess.run([sys.executable, BENCHMARK / script, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quick_run(tmp_path: Path) -> None:
    """Every extension is measured; what is there of other devices stays; the page shows all of it."""
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps({"cuda, 1 thread": GIVEN}))
    python("run.py", "--quick", "--against", "by_hand", "--output", results)
    runs = json.loads(results.read_text())
    assert runs["cuda, 1 thread"] == GIVEN

    run = runs["cpu, 1 thread"]
    assert run["versions"]["torch"] == torch.__version__
    cells = {cell["quantity"]: cell for cell in run["cells"]["ours"]}
    assert cells.keys() == {"gradient", "extended", *extensions.__all__}
    for name in ("extended", *extensions.__all__):
        assert cells[name]["problem"] == "logreg" and cells[name]["rounds"] == 1
        assert cells[name]["ratio"] > 0 and cells[name]["gradient"] > 0 and cells[name]["peak"] > 2**20

    assert {cell["quantity"] for cell in run["cells"]["by_hand"]} == {"gradient", *by_hand.QUANTITIES["logreg"]}

    python("run.py", "--quick", "--against", "by_hand", "--extensions", "Variance", "--keep", "--output", results)
    again = json.loads(results.read_text())["cpu, 1 thread"]
    assert again["cells"]["ours"] == run["cells"]["ours"]
    ratios = [{cell["quantity"]: cell.get("ratio") for cell in kept["cells"]["by_hand"]} for kept in (run, again)]
    assert {name for name in ratios[0] if ratios[0][name] != ratios[1][name]} == {"Variance"} and ratios[0].keys() == ratios[1].keys()

    python("report.py", results, "--page", page)
    text = page.read_text()
    assert all(f"| `{name}` | **this package** |" in text for name in extensions.__all__)
    assert text.count("|  | *by hand* |") == 2 * len(by_hand.QUANTITIES["logreg"])
    for picture in ("results-cpu-1-thread.png", "results-cuda-1-thread.png"):
        assert f"]({picture})" in text
        pixels = imread(tmp_path / picture)
        assert pixels[..., :3].std() > 0.05


def test_what_is_not_measured_has_a_reason() -> None:
    """Refusals and cells that would take too long are results."""
    lines = python("measure.py", "ours", "--problems", "LSTM", "--extensions", "KFRA", "DiagGGNExact", "--rounds", "1").splitlines()
    version, gradient, kfra, exact = map(json.loads, lines)
    assert version == {"version": torch.__version__}
    assert gradient.keys() == {"problem", "quantity", "peak"}
    assert kfra["status"] == "refused" and "TransposeBackward0" in kfra["why"]
    assert exact["status"] == "not run" and exact["why"].startswith("It takes 4,150 columns")


def test_matrices_that_are_too_large() -> None:
    model, x, _ = PROBLEMS["3c3d"]()
    assert measure.too_large("KFRA", model, x[:1]) == "It takes a matrix of 50,176 x 50,176 numbers."
    assert measure.too_large("KFAC", model, x[:1]) is None
    model, x, _ = PROBLEMS["mlp"]()
    assert measure.too_large("KFRA", model, x) is None


def test_report() -> None:
    """Numbers, memory in excess of the gradient's, reasons that are cited more than once, and nothing where nothing was asked for."""
    text = report.page({"cpu, 1 thread": GIVEN}, {"cpu, 1 thread": "a.png"})
    for line in (
        "| gradient (ms) | | 600 |  |",
        "| `KFAC` | **this package** | 2.35 | refused[^2] |",
        "|  | BackPACK | 45.7[^3] | refused[^2] |",
        "| `Variance` | **this package** | 1.50 | not run[^1] |",
        "| `KFAC` | **this package** | 8.00 |  |",
        "|  | BackPACK | 455 |  |",
        "| `Variance` | **this package** | 0.00 |  |",
        "[^1]: Too much.",
        r"[^2]: It has no p\_0.",
        "[^3]: Beside it, the gradient took 1500 ms, not 600: if its passes, and no busy machine, are the reason, it costs 114 of those.",
        "- **q**: Second problem.",
    ):
        assert line in text.splitlines()


def test_order_of_report_is_complete() -> None:
    assert set(report.ORDER) == {"extended", *extensions.__all__}
    assert len(set(report.ORDER)) == len(report.ORDER)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("logreg", 7_850), ("mlp", 669_706), ("3c3d", 895_210), ("All-CNN-C", 1_387_108), ("GPT-2", 124_439_808)],
)
def test_published_numbers_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model, _, _ = PROBLEMS[name]()
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_fit_together(name: str) -> None:
    """Outputs have an axis of classes after that of the samples, and all else as the targets."""
    with torch.device("meta"):
        model, x, y = PROBLEMS[name]()
        out = model(x)
    assert (out.shape[0], *out.shape[2:]) == y.shape
    assert PROBLEMS[name].__doc__.endswith(f"N = {len(x)}.")


@pytest.mark.parametrize("quantity", with_torch_func.QUANTITIES)
def test_libraries_compute_the_same(quantity: str) -> None:
    torch.manual_seed(0)
    model, x, y = PROBLEMS["logreg"]()
    theirs = with_torch_func.step(quantity, model, nn.CrossEntropyLoss(), x, y)()
    ours = with_backpack.step(quantity, model, nn.CrossEntropyLoss(), x, y)()
    for mine, (name, value) in zip(ours, theirs.items(), strict=True):
        torch.testing.assert_close(mine, value, msg=name)


BY_HAND = [
    pytest.param(problem, quantity, marks=pytest.mark.slow if problem == "All-CNN-C" else ())
    for problem, names in by_hand.QUANTITIES.items()
    for quantity in names[1:]
]


HOOKS_ONLY = [(problem, quantity) for problem, names in hooks_only.QUANTITIES.items() for quantity in names]


def compare(other: ModuleType, problem: str, quantity: str, samples: int) -> None:
    torch.manual_seed(0)
    model, x, y = PROBLEMS[problem]()
    models, results = (model.double(), deepcopy(model)), []
    for library, copy in zip((with_backpack, other), models, strict=True):
        step = library.step(quantity, copy, nn.CrossEntropyLoss(), x[:samples].double(), y[:samples])
        torch.manual_seed(1)
        results.append(step())
    for ours, theirs, p, q in zip(*results, *(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(("problem", "quantity"), BY_HAND)
def test_by_hand_is_the_same(problem: str, quantity: str, samples: int) -> None:
    """What is written by hand has our results, and sets the same gradients; with one seed both draw the same labels."""
    compare(by_hand, problem, quantity, samples)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(("problem", "quantity"), HOOKS_ONLY)
def test_hooks_alone_are_the_same(problem: str, quantity: str, samples: int) -> None:
    """So have hooks that check nothing."""
    compare(hooks_only, problem, quantity, samples)


@pytest.mark.parametrize("problem", [name for name in PROBLEMS if name != "GPT-2"])
def test_hooks_by_hand(problem: str) -> None:
    """A model with hooks has the same gradients."""
    torch.manual_seed(0)
    model, x, y = PROBLEMS[problem]()
    hooked = deepcopy(model)
    by_hand.step("extended", hooked, nn.CrossEntropyLoss(), x[:2], y[:2])()
    nn.CrossEntropyLoss()(model(x[:2]), y[:2]).backward()
    for p, q in zip(model.parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
