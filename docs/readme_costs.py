"""Write the measured costs into README, from the results of the benchmark: ``python docs/readme_costs.py``."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RUN, PROBLEMS = "cpu, 1 thread", ("3c3d", "transformer")
LIBRARIES = {"ours": "this package", "backpack": "BackPACK", "torch.func": "torch.func", "opacus": "opacus", "curvlinops": "curvlinops"}
QUANTITIES = ["BatchGrad", "BatchL2Grad", "Variance", "DiagGGNMC", "DiagGGNExact", "KFAC", "KFLR"]
PLACE = re.compile(r"(?<=<!-- costs: python docs/readme_costs\.py -->\n).*?(?=<!-- end of costs -->)", re.S)


def table() -> str:
    """A row for each quantity, a column for each library, a number for each problem."""
    cells = json.loads((ROOT / "docs" / "_static" / "benchmarks.json").read_text())[RUN]["cells"]
    ratios = {(library, cell["problem"], cell["quantity"]): f"{cell['ratio']:.1f}" for library in cells for cell in cells[library] if "ratio" in cell}
    lines = [f"| {', '.join(PROBLEMS)} | {' | '.join(LIBRARIES.values())} |", "|---|" + "---|" * len(LIBRARIES)]
    for quantity in QUANTITIES:
        found = [", ".join(ratios.get((library, problem, quantity), "–") for problem in PROBLEMS) for library in LIBRARIES]
        lines.append(f"| `{quantity}` | {' | '.join(row if re.search(r'[0-9]', row) else '' for row in found)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(PLACE.sub(lambda _: table(), README.read_text()))
