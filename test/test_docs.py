"""The documentation: scripts print what it says, links lead somewhere, tables agree with the package and with what was measured."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import backpack
from backpack import extend, extensions
from backpack.extensions.secondorder.hbp_options import BackpropStrategy, ExpectationApproximation, LossHessianStrategy
from backpack.utils.errors import BackpackError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS))
import readme_costs  # noqa: E402

GENERATED = {"_build", "api", "gallery", "generated"}
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.relative_to(DOCS).parts[0] not in GENERATED]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *PAGES]}
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\s*^```text\n(?P<output>.*?)^```$)?", re.M | re.S)
BLOCKS = {name: list(BLOCK.finditer(text)) for name, text in TEXTS.items() if BLOCK.search(text)}
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
END, DONE = "--- end of block ---\n", "--- done ---\n"
SERVER = f"""
import os, sys, traceback, warnings
import torch, backpack
for code in map(eval, sys.stdin):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads that libraries may have started
        child = os.fork()
    if not child:
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    print("it died" * bool(os.wait()[1]), {DONE!r}, sep="\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def fresh() -> Iterator[Callable[[str], str]]:
    """Run code as in a fresh interpreter, in which warnings are errors, and return what it prints; torch is imported once for all."""
    command = [sys.executable, "-W", "error", "-c", SERVER]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:

        def run(code: str) -> str:
            print(repr(code), file=server.stdin, flush=True)
            return "".join(takewhile(bool, iter(server.stdout.readline, DONE))).removesuffix("\n")  # empty lines are the end

        yield run
        server.stdin.close()


@pytest.mark.parametrize("page", BLOCKS)
def test_documentation_runs(page: str, fresh: Callable[[str], str]) -> None:
    """The Python blocks of a page run one after the other, without warnings, and print what the page says, if anything."""
    output = fresh("".join(f"{block['code']}\nprint({END!r}, end='')\n" for block in BLOCKS[page]))
    assert output == "".join((block["output"] or "") + END for block in BLOCKS[page])


def test_pages_have_scripts() -> None:
    silent = {"docs/changelog.md", "docs/benchmarks.md", "docs/design.md", "docs/quantities/index.md"}
    assert TEXTS.keys() - BLOCKS.keys() == silent


def test_hook_at_modules_that_share_a_parameter() -> None:
    """The one that is shown deletes what it has read."""
    names: dict[str, Callable] = {"nn": nn}
    exec(re.search(r"^def largest.*?(?=^with)", TEXTS["docs/start.md"], re.M | re.S)[0], names)
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    model[2].weight = model[0].weight
    with backpack.backpack(extensions.BatchGrad(), extension_hook=names["largest"]):
        model(torch.rand(4, 3)).sum().backward()
    assert all(hasattr(p, "largest_norm") and not hasattr(p, "grad_batch") for p in model.parameters())


def test_training_loops_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown of frameworks does what it says, where these call it as theirs do."""

    class Module(nn.Module):
        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

    class Trainer:
        def training_step(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = model(**inputs)
            loss.backward()
            return loss.detach()

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(super().forward(x), labels)

    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(LightningModule=Module))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Trainer=Trainer))
    names: dict[str, type] = {}
    for code in re.findall(r"^```py\n(.*?)^```$", TEXTS["docs/training.md"], re.M | re.S):
        exec(code, names)
    X, y = torch.rand(5, 64), torch.arange(5)
    module, model, logged = names["Classifier"](), extend(Model(64, 10)), {}
    model.load_state_dict(module.model.state_dict())
    module.log = logged.__setitem__
    optimizer = module.configure_optimizers()
    module.backward(module.training_step((X, y), 0))
    module.on_before_optimizer_step(optimizer)
    names["TrainerWithVariance"]().training_step(model, {"x": X, "labels": y})
    by_hand = torch.stack([torch.autograd.grad(model(X[n : n + 1], y[n : n + 1]) / 5, model.weight)[0] for n in range(5)]).var(0, correction=0)
    torch.testing.assert_close([logged["variance"], model.weight.variance], [by_hand.mean(), by_hand])


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    """Files, pages and headings exist; the gallery and the pages that the build writes are known by what they are made from."""
    folder = (ROOT / page).parent
    for target, anchor in LINK.findall(re.sub(r"```.*?```", "", TEXTS[page], flags=re.S)):
        path = (folder / target).resolve() if target else ROOT / page
        if DOCS / "gallery" in path.parents:
            assert path.stem == "index" or (ROOT / "examples" / f"{path.stem}.py").exists(), target
        elif target.removeprefix("../") == "generated/errors":
            assert not anchor
        else:
            found = [path, path.with_name(f"{path.name}.md"), path.with_name(f"{path.name}.rst")]
            assert any(place.exists() for place in found), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", next(place for place in found if place.is_file()).read_text(), re.M)
                assert anchor in [slug(heading) for heading in headings], f"{target}#{anchor}"


def errors(cls: type = BackpackError) -> list[type]:
    """All classes of errors of the package."""
    below = [sub for sub in cls.__subclasses__() if sub.__module__.startswith("backpack.")]
    return [*below, *(error for sub in below for error in errors(sub))]


def test_each_error_is_explained() -> None:
    """Its code, which messages end with, is its own; the text of its section says the way out."""
    codes = [error.code for error in errors()]
    assert len(codes) > 15
    assert len(set(codes)) == len(codes)
    assert [error.__name__ for error in errors() if "Way out:" not in inspect.getdoc(error)] == []


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the table whose first title is given, without code marks."""
    rows = [line for line in TEXTS[page].split(f"\n| {first} |")[1].split("\n\n")[0].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


@pytest.mark.parametrize("page", ["README.md", "docs/cheat_sheet.md"])
def test_tables_of_quantities(page: str) -> None:
    """Each quantity has a row, and its attribute and shape, which are compared with a backward pass."""
    torch.manual_seed(0)
    N, C, M, V = 5, 3, 2, 4
    hbp = LossHessianStrategy.EXACT, BackpropStrategy.SQRT, ExpectationApproximation.BOTEV_MARTENS
    made = {name: getattr(extensions, name) for name in extensions.__all__}
    made = {name: cls("ggn", *hbp) if name == "HBP" else cls(mc_samples=M) if name.endswith("MC") else cls() for name, cls in made.items()}
    model, lossfunc = extend(nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, C))), extend(nn.CrossEntropyLoss())
    with backpack.backpack(*made.values()):
        lossfunc(model(torch.rand(N, 4)), torch.randint(C, (N,))).backward()

    rows = {cells[0].strip("`"): cells for cells in table(page, "class")}
    assert rows.keys() == made.keys()
    for name, cells in rows.items():
        attributes, shape = re.findall(r"`(\w+)`", cells[1]), cells[2].strip("`")
        assert made[name].savefield == attributes[0]
        for p in model.parameters():
            for attribute in attributes if "MC" not in name else attributes[:1]:
                value = getattr(p, attribute)
                if isinstance(value, list):
                    assert len(value) == p.dim()
                elif callable(value) and "->" in shape:
                    assert value(torch.rand(V, *p.shape)).shape == (V, *p.shape)
                else:
                    assert list(value.shape) == eval(shape, {"N": N, "C": C, "M": M, "p": p.shape})  # noqa: S307


def test_costs_in_readme_are_the_measured_ones() -> None:
    """After a new measurement: ``python docs/readme_costs.py``."""
    assert readme_costs.PLACE.search(TEXTS["README.md"])[0] == readme_costs.table()


def test_badges_are_true() -> None:
    claims = dict(re.findall(r"img\.shields\.io/badge/(\w+)-([\w.]+)", TEXTS["README.md"]))
    written = {"python": r'requires-python = ">=(.*?)"', "torch": r'"torch>=(.*?)"', "licence": r'license = "(.*?)"'}
    project = (ROOT / "pyproject.toml").read_text()
    assert claims == {name: re.search(pattern, project)[1] for name, pattern in written.items()}
