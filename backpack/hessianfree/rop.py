"""Products with Jacobians: two backward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack.hessianfree.lop import L_op, Tensors


def R_op(ys: Tensors, xs: Tensors, vs: Tensors, retain_graph: bool = True, detach: bool = True) -> tuple[Tensor, ...]:
    """Multiply with the Jacobian, ``sum_i (dy_j / dx_i) v_i``.

    ``w -> J^T w`` is linear, so the transposed Jacobian of this map is ``J`` itself (J. Townsend, "A new trick for calculating Jacobian vector
    products", 2017).

    Args:
        ys: Outputs: a tensor or a sequence of tensors.
        xs: Inputs, part of the graph of ``ys``: a tensor or a sequence of tensors.
        vs: Vectors, of the shapes of ``xs``.
        retain_graph: Keep the graph of ``ys`` for further passes.
        detach: Return results without graph; else they can be differentiated.

    Returns:
        One tensor per output, of its shape; zeros where the output depends on no input.
    """
    ws = torch.zeros_like(ys, requires_grad=True) if isinstance(ys, Tensor) else [torch.zeros_like(y, requires_grad=True) for y in ys]
    gs = L_op(ys, xs, ws, retain_graph=retain_graph, detach=False)
    return L_op(gs, ws, vs, detach=detach)


jacobian_vector_product = R_op
