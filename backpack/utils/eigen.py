"""Eigenvalues of symmetric matrices of which some may not be finite: where gradients overflow, results are not finite, too, but nothing fails."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose symmetric matrices; ``torch.linalg.eigh`` raises if a single one has an entry that is not finite.

    Args:
        matrices: ``[[B, M, M]]``.

    Returns:
        Eigenvalues ``[[B, M]]``, not a number where the matrix is not finite, and eigenvectors ``[[B, M, M]]``.
    """
    broken = ~matrices.isfinite().all(2).all(1).unsqueeze(1)
    values, vectors = torch.linalg.eigh(matrices.masked_fill(broken.unsqueeze(2), 0.0))
    return values.masked_fill(broken, nan), vectors
