"""Settings of Sphinx, and the two pages that are written from the package itself at build time."""

import sys
from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import backpack.extensions  # noqa: E402
from backpack.utils.errors import BackpackError  # noqa: E402

project = "backpack"
author = "the backpack developers"
copyright = f"2026, {author}"
version = release = backpack.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
templates_path = ["_templates"]
exclude_patterns = ["_build"]
html_theme = "furo"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

FAMILIES = {"firstorder": "First order", "secondorder": "Second order", "curvmatprod": "Products with curvature matrices"}


def page(title: str, introduction: str, body: Iterator[str]) -> str:
    """A page in reStructuredText."""
    return "\n".join([title, "=" * len(title), "", introduction, "", *body])


def quantities() -> Iterator[str]:
    """A table with a link and a summary of each quantity, for each family of quantities."""
    for family, title in FAMILIES.items():
        package = f"backpack.extensions.{family}"
        names = [name for name in backpack.extensions.__all__ if getattr(backpack.extensions, name).__module__.startswith(package)]
        yield from [title, "-" * len(title), "", getdoc(sys.modules[package]) or "", ""]
        yield from [".. autosummary::", "", *(f"   backpack.extensions.{name}" for name in names), ""]


def subclasses(cls: type) -> Iterator[type]:
    """All subclasses, parents before children."""
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


def refusals() -> Iterator[str]:
    """A section for each error: its code, its class, how existing code catches it, and what it means."""
    for cls in subclasses(BackpackError):
        builtin = [base.__name__ for base in cls.__mro__ if base.__module__ == "builtins"]
        caught = ", ".join(f"``{name}``" for name in builtin[: builtin.index("Exception")])
        yield from [f".. _error-{cls.code}:", "", cls.code, "-" * len(cls.code), ""]
        yield from [f":class:`{cls.__module__}.{cls.__name__}`, also caught as {caught}", "", getdoc(cls) or "", ""]


def write_pages(*_: object) -> None:
    """Write the pages that the package itself describes."""
    folder = HERE / "generated"
    folder.mkdir(exist_ok=True)
    (folder / "quantities.rst").write_text(page("Quantities", "What ``backpack(...)`` accepts.", quantities()))
    introduction = "Each message ends with a code in brackets, under which this page explains it. All classes derive from ``BackpackError``."
    (folder / "errors.rst").write_text(page("Errors", introduction, refusals()))


def setup(app: object) -> None:
    """Write the pages before Sphinx looks for sources."""
    app.connect("config-inited", write_pages)
