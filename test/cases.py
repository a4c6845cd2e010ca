"""All rows of the table: each family of layers has a file of its own, which is imported here."""

import cases_conv  # noqa: F401
import cases_nets  # noqa: F401
from table import CASES, LAYERS

__all__ = ["CASES", "LAYERS"]
