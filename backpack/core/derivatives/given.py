"""Derivatives of a product with a weight that is given by the views of its inputs and outputs, as several uses of one weight are side by side."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Samples
from backpack.utils.subsampling import subsample


class GivenDerivatives(AffineDerivatives):
    """A product of which the view of the inputs is recorded as ``columns``, and matrices of outputs are their views, ``[V, N, G, O, L]``."""

    def columns(self, module: Any, subsampling: Samples | slice = None) -> Tensor:
        return subsample(module.columns, subsampling=subsampling)

    def rows(self, module: Any, mat: Tensor) -> Tensor:
        return mat

    def output_from_rows(self, module: Any, rows: Tensor) -> Tensor:
        return rows


class Given:
    """A call of such a layer without groups.

    Attributes:
        columns: View of the inputs, ``[N, 1, K, L]``.
        weight: A tensor without data, of the shape ``[O, K]`` of the matrix.
    """

    derivatives = GivenDerivatives()

    def __init__(self, columns: Tensor, weight: Tensor) -> None:
        self.columns, self.weight = columns, weight
