"""Products with the Hessian: two backward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from backpack.hessianfree.lop import Tensors, as_list, check_shapes, pull_back, refuse_missing_terms
from backpack.utils.differentiation import guarded, nodes_below, nodes_between, refuse_wrong_second_derivatives, refuse_wrong_third_derivatives
from backpack.utils.errors import ArgumentError


def hessian_vector_product(
    f: Tensor, params: Tensors, v: Tensors, grad_params: Sequence[Tensor | None] | None = None, detach: bool = True
) -> tuple[Tensor, ...]:
    """Multiply with the Hessian of a scalar, by differentiating its gradient.

    The Hessian is symmetric, so it is the transposed Jacobian of the gradient (B. Pearlmutter, "Fast exact multiplication by the Hessian", 1994).

    Args:
        f: Scalar.
        params: Tensors that ``f`` depends on: a tensor or an iterable of tensors. Where one is computed from another one, derivatives are total, as
            autograd's are.
        v: Vectors, of the shapes of ``params``.
        grad_params: The gradients of ``f`` with respect to ``params``, made with ``create_graph=True``, if they are already there. They are
            computed again if one of them is ``None`` or has no graph, or a custom function took part.
        detach: Return results without graph; else they can be differentiated.

    Returns:
        One tensor per parameter, of its shape; zeros where ``f`` is linear in the parameter.

    Raises:
        ArgumentError: If ``f`` is not a single number, the number or the shapes of ``v`` or ``grad_params`` do not fit ``params``, or one is frozen.
        UnsupportedError: If torch's own second derivatives would be wrong.

    Custom functions marked as ``once_differentiable`` are refused: terms would be missing.
    """
    params, v = as_list(params), as_list(v)
    check_shapes("v", v, "params", params)
    if f.numel() != 1:
        raise ArgumentError(f"f must be a scalar, got shape {list(f.shape)}.")
    if grad_params is not None:
        grad_params = as_list(grad_params, optional=True)
        check_shapes("grad_params", grad_params, "params", params)
    if grad_params is None or not all(gradient is not None and gradient.requires_grad for gradient in grad_params) or _has_custom_function(f):
        # an incoming gradient that takes part in the graph, so that no function marked as once_differentiable goes unnoticed
        grad_params = pull_back(f, params, torch.ones_like(f, requires_grad=True), retain_graph=True, detach=False)
    refuse_missing_terms([*grad_params, f])
    refuse_wrong_second_derivatives(nodes_between([*grad_params, f], params))
    refuse_wrong_third_derivatives(nodes_between([f], params))
    # a gradient without graph is that of a parameter that f does not depend on
    pairs = [(gradient, vector) for gradient, vector in zip(grad_params, v, strict=True) if gradient.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(param) for param in params)
    products = pull_back([gradient for gradient, _ in pairs], params, [vector for _, vector in pairs], retain_graph=True, detach=detach)
    return products if detach else guarded(products, grad_params, params[0], "A Hessian-vector product")


def _has_custom_function(f: Tensor) -> bool:
    return any(isinstance(node, BackwardCFunction) for node in nodes_below([f]))
