"""The house rules that can be read off the source: layers, cycles, lazy imports, length of files, private symbols of torch."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "backpack"

# Longest prefix wins. A module imports from its own layer and from those below.
LAYERS = {
    "backpack.custom_module": 0,
    "backpack.custom_module.graph_utils": 1,
    "backpack.custom_module.tracing": 1,  # runs models of the user's
    "backpack.utils.errors": 0,  # every layer raises these
    "backpack.verification.draws": 0,  # these know plain autograd only
    "backpack.verification.layers": 0,
    "backpack.verification.reference": 0,
    "backpack.utils": 1,
    "backpack.hessianfree": 1,
    "backpack.core.owners": 1,  # what is known of parameters, and of threads: these import nothing but names of errors
    "backpack.core.state": 1,
    "backpack.core.derivatives": 2,
    "backpack.core.samples": 2,
    "backpack.core": 3,
    "backpack.extensions.at_layers": 4,
    "backpack.extensions.backprop_extension": 4,
    "backpack.extensions.combining": 4,
    "backpack.extensions.module_extension": 4,
    "backpack.extensions.saved_quantities": 4,
    "backpack.extensions.loss_scale": 4,
    "backpack.extensions.flows": 4,
    "backpack.extensions.chains": 4,
    "backpack.extensions.chosen": 4,
    "backpack.extensions.signed_flow": 4,
    "backpack.extensions.rules": 4,
    "backpack.extensions.kronecker": 4,
    "backpack.extensions.handed": 4,
    "backpack.extensions.hook_queue": 4,
    "backpack.extensions.sides": 4,
    "backpack.extensions.positions": 4,
    "backpack.extensions.uses": 4,
    "backpack.extensions.spared": 4,
    "backpack.extensions.curvature": 4,
    "backpack.extensions.collector": 4,
    "backpack.extensions.made": 4,
    "backpack.extensions.mapped": 4,
    "backpack.extensions.separate": 4,
    "backpack.extensions.short_names": 4,
    "backpack.extensions.firstorder": 5,
    "backpack.extensions.secondorder": 5,
    "backpack.extensions.curvmatprod": 5,
    "backpack.extensions": 5,
    "backpack": 6,
}
MAX_LINES = 400
PRIVATE = re.compile(r"_input_metadata|_base|_version|_saved_(?!quantities)\w+|torch\._\w+(\..*)?")
KNOWS_PRIVATE = {
    f"backpack.{name}" for name in "core.graph core.calls core.slots core.checkpoints core.engine utils.differentiation utils.pages".split()
}
LAZY = {"backpack.compat"}  # forwards old import paths when they are asked for


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
IS_PACKAGE = {module_name(path) for path in PACKAGE.rglob("__init__.py")}


def layer(module: str) -> int:
    prefix = module
    while prefix not in LAYERS:
        prefix = prefix.rpartition(".")[0]
    return LAYERS[prefix]


def imported(module: str, source: str) -> Iterator[tuple[str, int]]:
    """Modules of the package that ``source`` imports, with the line, wherever the statement stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            candidates = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + (module in IS_PACKAGE)
                base = ".".join([*parts[:keep], *filter(None, [node.module])])
            candidates = [(base, alias.name) for alias in node.names]
        else:
            continue
        for base, name in candidates:
            if base.split(".")[0] == "backpack":
                yield (f"{base}.{name}" if f"{base}.{name}" in SOURCES else base), node.lineno


def upward_imports(module: str, source: str) -> list[str]:
    return [f"line {line}: {target}" for target, line in imported(module, source) if layer(target) > layer(module)]


def find_cycle(sources: dict[str, str]) -> list[str]:
    graph = {module: {target for target, _ in imported(module, source)} - {module} for module, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def lazy_imports(source: str) -> list[str]:
    """Import statements inside functions, and calls of the import machinery anywhere."""
    tree = ast.parse(source)
    inside = {
        node.lineno
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    called = {node.lineno for node in calls if re.search(r"\bimport_module$|^__import__$", ast.unparse(node.func))}
    return [f"line {line}" for line in sorted(inside | called)]


def private_symbols(source: str) -> list[str]:
    """Private symbols of torch: as an attribute, as an import, or as the name that is handed to ``getattr``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names = [node.attr, ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [f"line {node.lineno}: {name}" for name in names if PRIVATE.fullmatch(name)]
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_imports_run_downwards(module: str) -> None:
    assert not upward_imports(module, SOURCES[module])


def test_no_import_cycles() -> None:
    assert not find_cycle(SOURCES)


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - LAZY))
def test_no_imports_inside_functions(module: str) -> None:
    assert not lazy_imports(SOURCES[module])


@pytest.mark.parametrize("module", SOURCES)
def test_files_are_short(module: str) -> None:
    assert len(SOURCES[module].splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - KNOWS_PRIVATE))
def test_private_symbols_of_torch_are_isolated(module: str) -> None:
    assert not private_symbols(SOURCES[module])


def test_table_of_layers_has_no_stale_rows() -> None:
    assert [prefix for prefix in LAYERS if prefix not in SOURCES] == []


# The checks themselves find what they look for.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("backpack.utils.errors", "from backpack.utils import kroneckers"),
        ("backpack.core.graph", "import backpack.extensions.flows"),
        ("backpack.core.derivatives.linear", "from ...extensions import KFAC"),
        ("backpack.core.derivatives", "from ...context import CTX"),
        ("backpack.extensions.flows", "def f():\n    from backpack import extend"),
    ],
)
def test_finds_upward_imports(module: str, source: str) -> None:
    assert upward_imports(module, source)


def test_finds_cycles() -> None:
    sources = {"backpack.a": "import backpack.b", "backpack.b": "from backpack.c import x", "backpack.c": "import backpack.a"}
    assert set(find_cycle(sources)) == set(sources)


@pytest.mark.parametrize(
    "source", ["def f():\n    import torch", "class A:\n    def f(self):\n        from torch import nn", "importlib.import_module('torch')"]
)
def test_finds_lazy_imports(source: str) -> None:
    assert lazy_imports(source)


@pytest.mark.parametrize(
    "source",
    [
        "x = node._input_metadata",
        "getattr(node, '_saved_self')",
        "y = output._base.grad_fn",
        "t._version",
        "torch._C._autograd.f()",
        "from torch._C import Node",
    ],
)
def test_finds_private_symbols(source: str) -> None:
    assert private_symbols(source)
