"""Diagonals of ``(J^T S)(J^T S)^T`` for the parameters of ``torch.nn.Linear``, where ``J`` is the Jacobian of its output.

Further axes between batch and features are positions that share the parameters: summed before squaring.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Linear

from backpack.utils.errors import ShapeError


def extract_weight_diagonal(module: Linear, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Compute the diagonal for the weight.

    Args:
        module: The layer, whose attribute ``input0`` holds its input ``[N, *, I]``.
        S: Columns with respect to the layer's output, ``[V, N, *, O]``.
        sum_batch: Sum over the samples.

    Returns:
        ``sum_{v[,n]} (sum_* S[v,n,*,o] x[n,*,i])^2``, of shape ``[O, I]``, or ``[N, O, I]`` without the sum over samples.
    """
    x = module.input0
    _check(module, S, x.shape[:-1])
    if x.dim() == 2:
        return torch.einsum(f"vno,ni->{'' if sum_batch else 'n'}oi", S.square(), x.square())
    JS = torch.einsum("vnmo,nmi->vnoi", S.flatten(2, -2), x.flatten(1, -2))
    return JS.square().sum([0, 1] if sum_batch else 0)


def extract_bias_diagonal(module: Linear, S: Tensor, sum_batch: bool = True) -> Tensor:
    """Compute the diagonal for the bias.

    Args:
        module: The layer.
        S: Columns with respect to the layer's output, ``[V, N, *, O]``.
        sum_batch: Sum over the samples.

    Returns:
        ``sum_{v[,n]} (sum_* S[v,n,*,o])^2``, of shape ``[O]``, or ``[N, O]`` without the sum over samples.
    """
    _check(module, S, S.shape[1:-1])
    JS = S if S.dim() == 3 else S.flatten(2, -2).sum(2)
    return JS.square().sum([0, 1] if sum_batch else 0)


def _check(module: Linear, S: Tensor, leading: torch.Size) -> None:
    """Refuse shapes that do not fit, or that have no batch axis.

    Args:
        module: The layer.
        S: Columns, expected as ``[V, *leading, O]``.
        leading: All axes of the input but the last: batch axis first.

    Raises:
        ShapeError: If the shapes do not fit.
    """
    if not leading or S.shape[1:] != (*leading, module.out_features):
        expected = ["V", *(leading or ["N"]), module.out_features]
        raise ShapeError(f"{module} with an input of leading axes {list(leading)} needs S of shape {expected}, got {list(S.shape)}.")
