"""What ``verify`` found, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from backpack.utils.errors import BackpackError


class WrongQuantityError(BackpackError, AssertionError):
    """A quantity differs from its definition, or was computed with an error that is no refusal.

    Raised by ``raise_if_wrong`` of a report of ``backpack.verify``. Way out: ``backpack.check_rule`` on layers of one's own that lie downstream of
    the parameters that it names.
    """

    code = "wrong-quantity"


class Verdict(Enum):
    """What is said about one quantity of one parameter."""

    AGREES = "agrees"
    WRONG = "WRONG"
    FAILED = "FAILED"
    REFUSED = "refused"
    NOT_COMPARED = "not compared"


class Row(NamedTuple):
    """One quantity of one parameter.

    Attributes:
        parameter: Its name; ``"(all)"`` where a pass ended before any parameter got its result.
        quantity: Class of the extension.
        compared: How many numbers were compared.
        error: The largest difference, relative to the largest of the numbers that are right.
        verdict: What follows from it.
        reason: Why it is so, if there is more to say.
    """

    parameter: str
    quantity: str
    compared: int
    error: float
    verdict: Verdict
    reason: str = ""


_ROUNDING = 1e-12
"""Differences that are smaller are not told apart in print."""

_BAD = (Verdict.WRONG, Verdict.FAILED)


@dataclass(frozen=True)
class Report:
    """All rows; iterates over them, prints as a table, and is true where something was compared and nothing is wrong.

    Attributes:
        rows: One for each parameter and quantity.
    """

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether something was compared, and nothing is wrong or has failed."""
        verdicts = [row.verdict for row in self.rows]
        return Verdict.AGREES in verdicts and not any(verdict in _BAD for verdict in verdicts)

    def __bool__(self) -> bool:
        return self.ok

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def raise_if_wrong(self) -> None:
        """Raise if something is wrong, or has failed; refusals are right.

        Raises:
            WrongQuantityError: Naming all that is wrong.
        """
        wrong = Report(tuple(row for row in self.rows if row.verdict in _BAD))
        if wrong.rows:
            raise WrongQuantityError(f"{len(wrong)} of {len(self)} quantities are not what their definitions say:\n{wrong}\n")

    def __str__(self) -> str:
        cells = [("parameter", "quantity", "compared", "error", "verdict")]
        for row in self.rows:
            seen = row.verdict in (Verdict.AGREES, Verdict.WRONG)
            compared, error = (str(row.compared), _written(row.error)) if seen and row.compared else ("-", "-")
            cells.append((row.parameter, row.quantity, compared, error, f"{row.verdict.value}: {row.reason}" if row.reason else row.verdict.value))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
        lines = []
        for parameter, quantity, compared, error, verdict in cells:
            lines.append(f"{parameter:{widths[0]}}  {quantity:{widths[1]}}  {compared:>{widths[2]}}  {error:>{widths[3]}}  {verdict}")
        return "\n".join(lines)


def _written(error: float) -> str:
    return f"{error:.1e}" if error >= _ROUNDING else f"<{_ROUNDING:.0e}"
