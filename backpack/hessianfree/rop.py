"""Products with Jacobians: two backward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.hessianfree.lop import Tensors, as_list, check_shapes, pull_back, refuse_inference_mode, refuse_missing_terms
from backpack.utils.differentiation import guarded, nodes_between, refuse_biased_norms, refuse_wrong_third_derivatives


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
    refuse_inference_mode()
    refuse_wrong_third_derivatives(nodes_between(outputs, xs))
    return push_forward(outputs, xs, vs, retain_graph, detach)


def push_forward(ys: Sequence[Tensor], xs: Sequence[Tensor], vs: Sequence[Tensor], retain_graph: bool, detach: bool) -> tuple[Tensor, ...]:
    """Do what ``R_op`` does, for a caller whose outputs are no gradients of gradients.

    Args:
        ys: See ``R_op``.
        xs: See ``R_op``.
        vs: See ``R_op``.
        retain_graph: See ``R_op``.
        detach: See ``R_op``.

    Returns:
        See ``R_op``.
    """
    generator = torch.Generator().manual_seed(0)  # any numbers do, but in zeros nothing would be missed
    floats = [y if y.is_floating_point() or y.is_complex() else y.float() for y in ys]
    ws = [torch.rand(y.shape, generator=generator).to(y).requires_grad_() for y in floats]
    gs = pull_back(ys, xs, ws, retain_graph=retain_graph, detach=False)
    refuse_missing_terms([*gs, *ys])
    refuse_biased_norms(nodes_between([*gs, *ys], xs))
    products = pull_back(gs, ws, vs, retain_graph=True, detach=detach)
    return products if detach else guarded(products, gs, xs[0], "A Jacobian-vector product")


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
