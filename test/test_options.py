"""Options of the extensions: subsets of samples, choices of HBP, number of draws, names; and inputs and data types of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from cases import CASES, Net, add_in_order, regress  # noqa: F401
