"""Settings of Sphinx, and the pages and tables that are written from the package itself at build time."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from inspect import getdoc
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase

from docutils.nodes import Element, SkipNode
from latex2mathml.converter import convert

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["TQDM_DISABLE"] = "1"  # progress bars are for terminals; tqdm, which torch imports, reads this once

import drawings  # noqa: E402

import backpack.extensions  # noqa: E402
from backpack.core.derivatives.registry import registered  # noqa: E402
from backpack.extensions.support import EXTENSIONS, OTHER_LOSS  # noqa: E402
from backpack.utils.errors import BackpackError  # noqa: E402

project = "backpack"
author = "the backpack developers"
copyright = f"2026, {author}"
version = release = backpack.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["myst_parser", "sphinx_gallery.gen_gallery"]
templates_path = ["_templates"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # formulas are there without a network, and without a script

autodoc_member_order = "bysource"
viewcode_follow_imported_members = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",  # kept between builds: only scripts that have changed run again
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"_common\.py$",
    "within_subsection_order": "gallery_settings.ReadingOrder",
    "reset_modules": ("matplotlib", "gallery_settings.forget"),
    "capture_repr": (),
    "min_reported_time": 1,
    "write_computation_times": False,
    "show_signature": False,
}

FAMILIES = {
    "per_sample_gradients": ("firstorder",),
    "gauss_newton": ("secondorder.diag_ggn", "secondorder.sqrt_ggn"),
    "hessian": ("secondorder.diag_hessian",),
    "kronecker": ("secondorder.hbp",),
    "products": ("curvmatprod",),
}
"""Page of a family of quantities to where its classes are defined."""

KINDS = {
    "linear": "Linear layers",
    "conv": "Convolutions",
    "activation": "Activations",
    "pooling": "Pooling",
    "padding": "Padding",
    "batchnorm": "Normalizations",
    "instancenorm": "Normalizations",
    "normalization": "Normalizations",
    "dropout": "Dropout",
    "sparse": "Embeddings",
    "channelshuffle": "Shapes",
    "flatten": "Shapes",
    "fold": "Shapes",
    "pixelshuffle": "Shapes",
    "upsampling": "Shapes",
    "loss": "Losses",
}
"""File of torch.nn.modules to what its layers are called; those of this package go under its name."""


def page(title: str, introduction: str, body: Iterator[str]) -> str:
    """A page in reStructuredText."""
    return "\n".join([title, "=" * len(title), "", introduction, "", *body])


def quantities(places: Iterable[str]) -> Iterator[str]:
    """A table with a link and a summary of each quantity of a family."""
    homes = tuple(f"backpack.extensions.{place}" for place in places)
    names = [name for name in backpack.extensions.__all__ if getattr(backpack.extensions, name).__module__.startswith(homes)]
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


def kind(cls: type) -> str:
    """What a layer, or a loss, is called together with others."""
    return "backpack" if cls.__module__.startswith("backpack.") else KINDS[cls.__module__.rpartition(".")[2]]


def support(losses: bool) -> Iterator[str]:
    """A table of layers, or of losses, and quantities; equal columns are one, so are equal rows of one kind; notes say why something is refused."""
    table, columns, rows = backpack.supported(), {}, {}
    for name in EXTENSIONS:
        columns.setdefault(tuple(row[name] for row in table.values()), []).append(name)
    kinds = {cls.__name__: kind(cls) for cls in registered()} | {OTHER_LOSS: "Losses"}
    order = [*dict.fromkeys(KINDS.values()), "backpack", ""]
    for layer in sorted(table, key=lambda layer: order.index(kinds.get(layer, ""))):
        if losses == (kinds.get(layer) == "Losses"):
            cells = tuple(table[layer][names[0]] for names in columns.values())
            rows.setdefault((kinds.get(layer, ""), cells), []).append(layer)
    reasons = list(dict.fromkeys(cell.reason for _, cells in rows for cell in cells if cell.reason))
    notes = dict(zip(reasons, ascii_lowercase, strict=False))
    yield from [".. list-table::", "   :header-rows: 1", "   :class: supported", ""]
    yield from row_of(["", *("\n".join(f"| {name}" for name in names) for names in columns.values())])
    for (title, cells), names in rows.items():
        said = (f"{cell.how.value} :sup:`{notes[cell.reason]}`" if cell.reason else cell.how.value for cell in cells)
        yield from row_of([f"**{title}**: " * bool(title) + ", ".join(short(names)), *said])
    yield from ["", *(f"| :sup:`{note}` {reason}" for reason, note in notes.items()), ""]


def short(names: Iterable[str]) -> Iterator[str]:
    """Names of layers; ``Conv1d``, ``Conv2d``, ``Conv3d`` become ``Conv1d/2d/3d``."""
    for stem, same in groupby(names, key=lambda name: re.sub(r"\dd$", "*", name)):
        first, *others = same
        yield "/".join([first, *(name[len(stem) - 1 :] for name in others)])


def row_of(cells: Iterable[str]) -> Iterator[str]:
    """A row of a ``list-table``."""
    for number, cell in enumerate(cells):
        first, *others = cell.split("\n")
        yield from [f"   {' ' if number else '*'} - {first}", *(f"       {line}" for line in others)]


def write_pages(*_: object) -> None:
    """Write the pages that the package itself describes."""
    folder = HERE / "generated"
    folder.mkdir(exist_ok=True)
    drawings.write(folder)
    for family, places in FAMILIES.items():
        (folder / f"{family}.inc").write_text("\n".join(quantities(places)))
    introduction = "Each message ends with a code, ``[backpack:code]``, under which this page explains it. All classes derive from ``BackpackError``."
    (folder / "supported_layers.inc").write_text("\n".join(support(losses=False)))
    (folder / "supported_losses.inc").write_text("\n".join(support(losses=True)))
    (folder / "errors.rst").write_text(page("Errors", introduction, refusals()))


def formula(display: str) -> Callable[[object, Element], None]:
    """Write formulas, in a line or on their own, as MathML."""

    def visit(translator: object, node: Element) -> None:
        translator.body.append(convert(node.astext(), display=display))
        raise SkipNode

    return visit


def setup(app: object) -> None:
    """Write the pages before Sphinx looks for sources."""
    app.add_html_math_renderer("mathml", (formula("inline"), None), (formula("block"), None))
    app.connect("config-inited", write_pages)
