"""What a user gets: version, typing marker, complete distribution, public names, documented methods, a quiet import."""

import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import backpack
import backpack.extensions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "backpack"
MODULES = sorted({"backpack", *(info.name for info in pkgutil.walk_packages([str(PACKAGE)], "backpack."))})


def python(*arguments: str) -> str:
    """Run a fresh interpreter in the checkout; return what it printed, errors and warnings included."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_version_agrees_with_metadata() -> None:
    try:
        installed = metadata.version("backpack")
    except metadata.PackageNotFoundError:
        pytest.skip("the package runs from a checkout that is not installed")
    assert backpack.__version__ == installed


def test_distribution_is_complete(tmp_path: Path) -> None:
    """What setuptools would ship is exactly the package's sources and its typing marker."""
    python("setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib"))
    shipped = {path.relative_to(tmp_path / "lib") for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    assert shipped == {path.relative_to(ROOT) for path in [*PACKAGE.rglob("*.py"), PACKAGE / "py.typed"]}


@pytest.mark.parametrize("module", [backpack, backpack.extensions], ids=lambda module: module.__name__)
def test_public_names_exist(module: object) -> None:
    assert len(set(module.__all__)) == len(module.__all__) > 0
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", MODULES)
def test_public_methods_are_documented(name: str) -> None:
    """Each public method of each public class has a docstring, its own or one that it inherits."""
    classes = [
        cls for cls in vars(import_module(name)).values() if inspect.isclass(cls) and cls.__module__ == name and not cls.__name__.startswith("_")
    ]
    methods = {(cls, key): getattr(cls, key) for cls in classes for key in vars(cls) if not key.startswith("_")}
    documented = {place: inspect.getdoc(method) for place, method in methods.items() if inspect.isroutine(method) or isinstance(method, property)}
    assert [f"{cls.__name__}.{key}" for (cls, key), text in documented.items() if not text] == []


def test_import_is_quiet_and_needs_no_extras() -> None:
    """No warnings of ours (torch and numpy answer for their own), nothing printed, nothing of the optional packages."""
    blocked = ["sklearn", "matplotlib", "tqdm", "scipy", "torchvision", "hypothesis", "pytest"]
    code = (
        f"import sys, warnings, torch, numpy, einops, opt_einsum; sys.modules.update(dict.fromkeys({blocked})); "
        f"warnings.simplefilter('error'); import {', '.join(MODULES)}"
    )
    assert python("-c", code) == ""
