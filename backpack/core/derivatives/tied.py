"""Derivatives of a table that is the weight of a layer, too: rows that were looked up add few numbers to what the layer contributes.

Sample ``n`` has the gradient ``B_n + A_n``, of a product with the weight, and of lookups: ``A_n`` has as many rows as were looked up, and is added to
the other where it has any. So squares are ``B_n^2`` and, in these rows alone, ``2 A_n B_n + A_n^2``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.embedding import add_at
from backpack.core.derivatives.given import GivenDerivatives
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample


class Tied:
    """A call that stands for a layer and for lookups in its weight, with one column.

    Attributes:
        layer: The call of the layer.
        indices: What was looked up ``[N, T]``.
        grads: What is carried to the lookups ``[N, T, D]``.
    """

    def __init__(self, layer: Any, indices: Tensor, grads: Tensor) -> None:
        self.layer, self.indices, self.grads, self.derivatives = layer, indices, grads, TiedDerivatives()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class TiedDerivatives(BaseParameterDerivatives):
    """The rule of ``Tied``; matrices of outputs are those of the layer, views ``[1, N, 1, K, L]``."""

    def _weight_jac_t_mat_prod(
        self, module: Tied, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        layer, (size, features) = module.layer, module.weight.shape
        result = layer.derivatives._param_mjp("weight", layer, g_inp, g_out, mat, sum_batch=sum_batch, subsampling=subsampling)
        places, grads = (subsample(part, subsampling=subsampling) for part in (module.indices, module.grads))
        if not sum_batch:
            places = places + size * torch.arange(len(places), device=places.device).unsqueeze(1)
        flat = result.reshape(-1, features).index_add(0, places.flatten(), grads.reshape(-1, features).to(result.dtype))
        return flat.reshape(result.shape)

    def squares_of_lookups(self, module: Tied, mat: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what lookups add to the squares of the layer.

        Args:
            module: The call.
            mat: Its column.
            signs: Sign of the column for each sample ``[1, N]``; ``None``: positive.

        Returns:
            ``[U, D]``, and for each of the ``U`` pairs the sample and the row, ``[U]`` both.
        """
        rule: GivenDerivatives = module.layer.derivatives
        columns, rows = wide(rule.columns(module.layer).squeeze(1)), rule.rows(module.layer, mat)[0].squeeze(1)
        samples = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        grads, size = wide(module.grads), module.weight.shape[0]
        products = grads * torch.bmm(wide(rows[samples, module.indices]), columns.mT)
        pairs, places = torch.unique(samples * size + module.indices, return_inverse=True)
        sums, crossed = add_at(torch.stack([grads, products]).flatten(1, 2), places.flatten(), len(pairs))
        squares = sums.square().add_(crossed, alpha=2) if not sums.requires_grad else sums.square() + 2 * crossed
        samples, rows = pairs // size, pairs % size
        return squares if signs is None else squares * signs[0, samples].unsqueeze(1), samples, rows

    def sum_of_products(self, module: Tied, mat: Tensor) -> Tensor:
        """Sum over samples.

        Args:
            module: The call.
            mat: Its column.

        Returns:
            ``[K, D]``.
        """
        return wide(self._weight_jac_t_mat_prod(module, None, None, mat)[0])
