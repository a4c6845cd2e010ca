"""Products with transposed Jacobians: one backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.utils.differentiation import lacks_terms
from backpack.utils.errors import UnsupportedError

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

    If the outputs are gradients that went through a custom function marked as ``once_differentiable``, terms would be missing: refused.
    """
    refuse_missing_terms(as_list(ys))
    return pull_back(ys, xs, ws, retain_graph, detach)


def pull_back(ys: Tensors, xs: Tensors, ws: Tensors | None, retain_graph: bool, detach: bool) -> tuple[Tensor, ...]:
    """Do what ``L_op`` does, for a caller that sees to it that no terms are missing.

    Args:
        ys: See ``L_op``.
        xs: See ``L_op``.
        ws: See ``L_op``.
        retain_graph: See ``L_op``.
        detach: See ``L_op``.

    Returns:
        See ``L_op``.
    """
    return torch.autograd.grad(ys, xs, grad_outputs=ws, create_graph=not detach, retain_graph=retain_graph, allow_unused=True, materialize_grads=True)


def refuse_missing_terms(ys: Sequence[Tensor]) -> None:
    """Refuse to differentiate gradients that went through a custom function marked as ``once_differentiable``.

    Args:
        ys: What is to be differentiated.

    Raises:
        UnsupportedError: If terms would be missing.
    """
    if lacks_terms(ys):
        raise UnsupportedError(
            "A product with a Jacobian, a Hessian or a generalized Gauss-Newton matrix differentiates gradients, but they went through a "
            "torch.autograd.Function whose backward is marked as once_differentiable: autograd would take its derivative for zero. Write its "
            "backward with differentiable operations, and without the mark."
        )


def as_list(tensors: Tensors) -> list[Tensor]:
    """Put a single tensor into a list.

    Args:
        tensors: A tensor or several.

    Returns:
        All of them.
    """
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


transposed_jacobian_vector_product = L_op
