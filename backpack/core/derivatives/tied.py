"""Derivatives of a table that is the weight of a layer, too: rows that were looked up add few numbers to what the layer contributes.

Sample ``n`` has the gradient ``B_n + A_n``, of a product with the weight, and of lookups: ``A_n`` has as many rows as were looked up, and is added to
the other where it has any. So squares are ``B_n^2`` and, in these rows alone, ``2 A_n B_n + A_n^2``.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.embedding import add_at
from backpack.core.derivatives.given import GivenDerivatives
from backpack.utils.precision import wide


class Tied:
    """A call that stands for a layer and for lookups in its weight, with the same columns.

    Attributes:
        layer: The call of the layer.
        indices: What was looked up ``[N, T]``.
        grads: What is carried to the lookups ``[V, N, T, D]``.
    """

    def __init__(self, layer: Any, indices: Tensor, grads: Tensor) -> None:
        self.layer, self.indices, self.grads, self.derivatives = layer, indices, grads, TiedDerivatives()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class TiedDerivatives(BaseParameterDerivatives):
    """The rule of ``Tied``; matrices of outputs are those of the layer, views ``[V, N, 1, K, L]``."""

    def _weight_jac_t_mat_prod(
        self, module: Tied, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        layer, (size, features), places, grads = module.layer, module.weight.shape, module.indices, module.grads
        result = layer.derivatives._param_mjp("weight", layer, g_inp, g_out, mat, sum_batch=sum_batch, subsampling=subsampling)
        if subsampling is not None:
            places, grads = places[list(subsampling)], grads[:, list(subsampling)]
        columns = torch.arange(len(grads), device=places.device).view(-1, 1, 1)
        if not sum_batch:
            places = places + size * torch.arange(len(places), device=places.device).unsqueeze(1)
        places = places + (size if sum_batch else size * len(places)) * columns
        flat = wide(result).reshape(-1, features).index_add(0, places.flatten(), wide(grads).reshape(-1, features))
        return flat.reshape(result.shape).to(result.dtype)

    def squares_of_lookups(self, module: Tied, mat: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what lookups add to the squares of the layer, summed over columns.

        Args:
            module: The call.
            mat: Its columns.
            signs: Signs of the columns for each sample ``[V, N]``; ``None``: positive.

        Returns:
            ``[U, D]``, and for each of the ``U`` pairs the sample and the row, ``[U]`` both.
        """
        rule: GivenDerivatives = module.layer.derivatives
        inputs, rows = wide(rule.columns(module.layer).squeeze(1)), rule.rows(module.layer, mat).squeeze(2)
        samples = torch.arange(rows.shape[1], device=rows.device).unsqueeze(1)
        grads, size = wide(module.grads), module.weight.shape[0]
        products = grads * (wide(rows[:, samples, module.indices]) @ inputs.mT)
        pairs, places = torch.unique(samples * size + module.indices, return_inverse=True)
        sums, crossed = add_at(torch.cat([grads, products]).flatten(1, 2), places.flatten(), len(pairs)).chunk(2)
        samples, rows = pairs // size, pairs % size
        squares = sums.square() + 2 * crossed
        return (squares if signs is None else squares * signs[:, samples].unsqueeze(2)).sum(0), samples, rows

    def sum_of_products(self, module: Tied, mat: Tensor) -> Tensor:
        """Sum over samples.

        Args:
            module: The call.
            mat: Its only column.

        Returns:
            ``[K, D]``.
        """
        return wide(self._weight_jac_t_mat_prod(module, None, None, mat)[0])


def cancels(total: Tensor, part: Tensor) -> bool:
    """Say whether sums have lost digits.

    Args:
        total: Sums of squares.
        part: What they were before those of lookups were added, not negative.

    Returns:
        Whether one is far smaller.
    """
    return bool((total < 10 * sqrt(torch.finfo(total.dtype).eps) * part).any())
