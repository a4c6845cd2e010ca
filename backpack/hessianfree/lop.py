"""Products with transposed Jacobians: one backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = Tensor | Sequence[Tensor]


def L_op(ys: Tensors, xs: Tensors, ws: Tensors | None, retain_graph: bool = True, detach: bool = True) -> tuple[Tensor, ...]:
    """Multiply with the transposed Jacobian, ``sum_j (dy_j / dx_i)^T w_j``.

    Args:
        ys: Outputs: a tensor or a sequence of tensors.
        xs: Inputs, part of the graph of ``ys``: a tensor or a sequence of tensors.
        ws: Vectors, of the shapes of ``ys``.
        retain_graph: Keep the graph of ``ys`` for further passes.
        detach: Return results without graph; else they can be differentiated.

    Returns:
        One tensor per input, of its shape; zeros where no output depends on the input.
    """
    return torch.autograd.grad(ys, xs, grad_outputs=ws, create_graph=not detach, retain_graph=retain_graph, allow_unused=True, materialize_grads=True)


transposed_jacobian_vector_product = L_op
