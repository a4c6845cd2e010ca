"""Explanation: what ``backpack.explain`` returns, as data and as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from textwrap import wrap

from torch import Size

from backpack.utils.errors import exclusion

WIDTH = 150
"""Columns of a page."""


class Verdict(Enum):
    """What a quantity is for a parameter."""

    EXACT = "exact"
    MC = "MC"
    OWN = "own"
    REFUSED = "refused"
    EXCLUDED = "left out"
    NO_GRADIENT = "none"


_THERE = {Verdict.EXACT, Verdict.MC, Verdict.OWN}


@dataclass(frozen=True)
class Row:
    """What is said about one parameter and one quantity.

    Attributes:
        parameter: Name of the parameter.
        shape: Its shape.
        extension: Name of the extension's class.
        field: Where the result is saved.
        verdict: Exact, an unbiased Monte-Carlo estimate, by a rule of the user's own, refused, left out, or without a gradient.
        rule: What serves the parameter.
        reason: Why it is refused, or why there is no gradient.
        result: Shapes of the result: one of a tensor, several of a list of factors, none of a function, or where it is not known.
        bytes: Size of the result.
        cost: Estimate of what reading it off costs, in gradients.
    """

    parameter: str
    shape: Size
    extension: str
    field: str
    verdict: Verdict
    rule: str = ""
    reason: str = ""
    result: tuple[Size, ...] = ()
    bytes: int = 0
    cost: float = 0.0


@dataclass(frozen=True)
class Quantity:
    """What is said about one extension.

    Attributes:
        extension: Name of its class.
        field: Where results are saved.
        cost: Estimate of forward and backward pass with this extension alone, in gradients.
        bytes: Size of all results.
        refused: Names of the parameters that are refused.
        crossed: Operations of the graph that are crossed node by node, and how often.
    """

    extension: str
    field: str
    cost: float
    bytes: int
    refused: tuple[str, ...]
    crossed: Counter[str]

    @property
    def exclude(self) -> str:
        """The argument that leaves out what is refused; empty if nothing is."""
        return exclusion(*self.refused).strip("`") if self.refused else ""


@dataclass(frozen=True)
class Explanation:
    """What ``backpack(*extensions)`` would do; prints as a table.

    Attributes:
        rows: One entry for each parameter and quantity.
        quantities: One entry for each extension.
        samples: Number of samples in the mini-batch; ``None`` where uses differ or nothing is computed.
        cost: Estimate of forward and backward pass with everything that is not refused, in gradients.
        together: Why the extensions do not go together, although each of them alone would run; else empty.
    """

    rows: list[Row]
    quantities: list[Quantity]
    samples: int | None
    cost: float
    together: str = ""

    @property
    def refused(self) -> list[Row]:
        """The rows that are refused."""
        return [row for row in self.rows if row.verdict is Verdict.REFUSED]

    @property
    def bytes(self) -> int:
        """Size of all results."""
        return sum(quantity.bytes for quantity in self.quantities)

    def __str__(self) -> str:
        """Write the table.

        Returns:
            Text of at most ``WIDTH`` columns.
        """
        reasons = list(dict.fromkeys(row.reason for row in self.refused))
        lines: list[str] = []
        for shapes in (True, False):
            table = self._table(reasons, shapes)
            if max(map(_width, table)) <= WIDTH:
                break
        for part in _pages(table):
            widths = [max(map(len, column)) for column in zip(*part, strict=True)]
            lines += ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in part] + [""]
        return "\n".join([*lines, *self._footer(reasons)])

    def _table(self, reasons: list[str], shapes: bool) -> list[list[str]]:
        """Write the cells, rows of repeated layers as one.

        Args:
            reasons: Reason of each refusal: cells refer to them by number.
            shapes: Show the shapes of results.

        Returns:
            Lines of cells.
        """
        cells: dict[str, list[Row]] = {}
        for row in self.rows:
            cells.setdefault(row.parameter, []).append(row)
        named = []
        for name, rows in cells.items():
            texts = tuple(_cell(row, reasons, shapes) for row in rows)
            rule = next((row.rule for row in rows if row.rule), "")
            named.append((name.split("."), (str(list(rows[0].shape)), rule, texts), [row.bytes for row in rows]))
        lines = [["parameter", "shape", "rule", *(quantity.extension for quantity in self.quantities)]]
        for name, (shape, rule, texts), sizes in _fold(named):
            shown = [f"{text} {_size(size)}" if size else text for text, size in zip(texts, sizes, strict=True)]
            lines.append([name, shape, rule, *shown])
        lines.append(["results", "", "", *(_size(quantity.bytes) if quantity.bytes else "" for quantity in self.quantities)])
        lines.append(["cost, in gradients", "", "", *(f"~{quantity.cost:.1f}" for quantity in self.quantities)])
        return lines

    def _footer(self, reasons: list[str]) -> list[str]:
        together = f"All together: {_size(self.bytes)} of results, ~{self.cost:.1f} gradients (estimates; 1 is the forward and backward pass alone)."
        lines = [f"{self.samples} samples. {together}" if self.samples is not None else together]
        for names, crossed in _alike(self.quantities):
            if crossed:
                counts = ", ".join(f"{count} {name}" for name, count in crossed)
                lines.append(f"Crossed node by node for {names}: {counts}.")
        for reason in dict.fromkeys(row.reason for row in self.rows if row.verdict is Verdict.NO_GRADIENT):
            names = dict.fromkeys(row.parameter for row in self.rows if row.reason == reason)
            lines.append(f"No gradient, {reason}: {', '.join(names)}.")
        lines += [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
        for quantity in self.quantities:
            left = any(row.field == quantity.field and row.verdict in _THERE for row in self.rows)
            if quantity.refused:
                lines.append(
                    f"All that is not refused: {quantity.extension}({quantity.exclude})" if left else f"Nothing is left of {quantity.extension}."
                )
        lines += [f"Not together: {self.together}"] if self.together else []
        return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)]


def _cell(row: Row, reasons: list[str], shapes: bool) -> str:
    if row.verdict is Verdict.REFUSED:
        return f"refused [{reasons.index(row.reason) + 1}]"
    if not shapes or not row.result:
        return row.verdict.value
    return f"{row.verdict.value} {', '.join(str(list(shape)) for shape in row.result)}"


def _width(line: list[str]) -> int:
    """Return the length of a line.

    Args:
        line: Its cells.

    Returns:
        With two blanks between cells.
    """
    return sum(map(len, line)) + 2 * (len(line) - 1)


def _pages(table: list[list[str]]) -> list[list[list[str]]]:
    """Cut a table that is too wide into several: the first three columns stay.

    Args:
        table: Lines of cells.

    Returns:
        Tables.
    """
    widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
    pages, room = [[]], WIDTH - sum(widths[:3])
    for i, width in enumerate(widths[3:], 3):
        if pages[-1] and sum(widths[j] for j in pages[-1]) + width > room + 2:
            pages.append([])
        pages[-1].append(i)
    return [[[*line[:3], *(line[i] for i in chosen)] for line in table] for chosen in pages]


def _fold(named: list[tuple[list[str], tuple, list[int]]]) -> list[tuple[str, tuple, list[int]]]:
    """Put rows of repeated layers together: ``h.0..11.mlp.weight``.

    Args:
        named: Name in parts, what is equal in rows that may go together, sizes.

    Returns:
        Name, what is equal, sums of the sizes.
    """
    for place in range(max((len(name) for name, _, _ in named), default=0)):
        groups: dict[tuple, list[int]] = {}
        for i, (name, equal, _) in enumerate(named):
            number = place < len(name) and name[place].isdigit()
            groups.setdefault((*name[:place], None, *name[place + 1 :], equal) if number else (i,), []).append(i)
        folded = []
        for members in groups.values():
            if len(members) < 3:
                folded += [(i, named[i]) for i in members]
                continue
            first, equal, _ = named[members[0]]
            numbers = _ranges([int(named[i][0][place]) for i in members])
            sizes = [sum(parts) for parts in zip(*(named[i][2] for i in members), strict=True)]
            folded.append((members[0], ([*first[:place], numbers, *first[place + 1 :]], equal, sizes)))
        named = [row for _, row in sorted(folded, key=lambda entry: entry[0])]
    return [(".".join(name), equal, sizes) for name, equal, sizes in named]


def _ranges(numbers: list[int]) -> str:
    """Write numbers in short.

    Args:
        numbers: In rising order.

    Returns:
        ``"0..3,5"``.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def _alike(quantities: list[Quantity]) -> list[tuple[str, tuple]]:
    found: dict[tuple, list[str]] = {}
    for quantity in quantities:
        found.setdefault(tuple(quantity.crossed.most_common()), []).append(quantity.extension)
    return [(", ".join(names), crossed) for crossed, names in found.items()]


def _size(count: int) -> str:
    """Write a number of bytes.

    Args:
        count: Bytes.

    Returns:
        Text with unit.
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.1f} {units[0]}"
