"""Half precision: what is squared leaves its range, and sums of many squares its digits."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in which squares can be added: ``float32`` instead of half precision, anything else as it is.

    Args:
        tensor: Floating-point numbers.

    Returns:
        The same numbers.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
