"""``verify``: compares quantities with their definitions, on the user's own model."""

from backpack.verification.report import Report, Row, Verdict, WrongQuantityError
from backpack.verification.verifying import verify

__all__ = ["Report", "Row", "Verdict", "WrongQuantityError", "verify"]
