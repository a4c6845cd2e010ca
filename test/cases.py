"""All rows of the table: each family of layers has a file of its own, which is imported here."""

import cases_conv  # noqa: F401
import cases_curved  # noqa: F401
import cases_embedding  # noqa: F401
import cases_functional  # noqa: F401
import cases_functional_loss  # noqa: F401
import cases_graphs  # noqa: F401
import cases_loss  # noqa: F401
import cases_made  # noqa: F401
import cases_nets  # noqa: F401
import cases_norm  # noqa: F401
import cases_parts  # noqa: F401
import cases_pool  # noqa: F401
import cases_sequence  # noqa: F401
import cases_shared  # noqa: F401
from table import CASES, LAYERS

__all__ = ["CASES", "LAYERS"]
