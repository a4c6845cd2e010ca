"""Products with Jacobians: two backward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack.hessianfree.lop import Tensors, as_list, check_shapes, pull_back, refuse_missing_terms
from backpack.utils.differentiation import refuse_biased_norms


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

    Raises:
        ArgumentError: If the number or the shapes of ``vs`` do not fit ``xs``, or no output has a graph.
        UnsupportedError: If torch's own derivatives of gradients would be wrong.

    Custom functions marked as ``once_differentiable`` are refused: terms would be missing.
    """
    outputs, xs, vs = as_list(ys), as_list(xs), as_list(vs)
    check_shapes("vs", vs, "xs", xs)
    generator = torch.Generator().manual_seed(0)  # any numbers do, but in zeros nothing would be missed
    floats = [y if y.is_floating_point() or y.is_complex() else y.float() for y in outputs]
    ws = [torch.rand(y.shape, generator=generator).to(y).requires_grad_() for y in floats]
    gs = pull_back(outputs, xs, ws, retain_graph=retain_graph, detach=False)
    refuse_missing_terms([*gs, *outputs])
    refuse_biased_norms([*gs, *outputs])
    return pull_back(gs, ws, vs, retain_graph=True, detach=detach)


def jacobian_vector_product(f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True) -> tuple[Tensor, ...]:
    """Multiply with the Jacobian: another name of ``R_op``.

    Args:
        f: Outputs.
        x: Inputs.
        v: Vectors, of the shapes of ``x``.
        retain_graph: See ``R_op``.
        detach: See ``R_op``.

    Returns:
        See ``R_op``.
    """
    return R_op(f, x, v, retain_graph, detach)
