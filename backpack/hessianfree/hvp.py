"""Products with the Hessian: two backward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.hessianfree.lop import L_op, Tensors
from backpack.utils.errors import ArgumentError


def hessian_vector_product(
    f: Tensor, params: Tensors, v: Tensors, grad_params: Sequence[Tensor] | None = None, detach: bool = True
) -> tuple[Tensor, ...]:
    """Multiply with the Hessian of a scalar, by differentiating its gradient.

    The Hessian is symmetric, so it is the transposed Jacobian of the gradient (B. Pearlmutter, "Fast exact multiplication by the Hessian", 1994).

    Args:
        f: Scalar.
        params: Tensors that ``f`` depends on: a tensor or an iterable of tensors.
        v: Vectors, of the shapes of ``params``.
        grad_params: The gradients of ``f`` with respect to ``params``, made with ``create_graph=True``, if they are already there.
        detach: Return results without graph; else they can be differentiated.

    Returns:
        One tensor per parameter, of its shape; zeros where ``f`` is linear in the parameter.

    Raises:
        ArgumentError: If the number or the shapes of ``v`` or ``grad_params`` do not fit ``params``.
    """
    params, v = _as_list(params), _as_list(v)
    _check_shapes("v", v, params)
    gradients = L_op(f, params, None, detach=False) if grad_params is None else _as_list(grad_params)
    _check_shapes("grad_params", gradients, params)
    # a gradient without graph is constant and contributes nothing
    pairs = [(gradient, vector) for gradient, vector in zip(gradients, v, strict=True) if gradient.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(param) for param in params)
    return L_op([gradient for gradient, _ in pairs], params, [vector for _, vector in pairs], detach=detach)


def _as_list(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _check_shapes(name: str, tensors: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    got, expected = ([list(tensor.shape) for tensor in ts] for ts in (tensors, params))
    if got != expected:
        raise ArgumentError(f"{name} must have the shapes of params, {expected}, got {got}.")
