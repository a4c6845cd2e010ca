"""What a loss is multiplied by on its way to the root, and how that enters the square root of its Hessian."""

from __future__ import annotations

from torch import Tensor

from backpack.core.calls import ModuleCall
from backpack.core.derivatives.factors import root_of_factors
from backpack.utils.errors import LossValueError
from backpack.utils.subsampling import subsample


def position_weights(call: ModuleCall, grad: Tensor) -> Tensor | None:
    """Return what the loss is multiplied by on its way to the root.

    Args:
        call: The loss call.
        grad: Gradient of the root with respect to the loss value.

    Returns:
        Broadcastable to the input of the loss; ``None`` for one.

    Raises:
        LossValueError: If it is not finite.
    """
    if grad.numel() == 1 and not grad.requires_grad and grad.item() == 1.0:
        return None
    if not grad.isfinite().all():
        raise LossValueError(
            f"{call.path} is scaled by a number that is not finite on its way to the tensor on which backward was called. Multiply it by a "
            "finite one, or leave it out of the sum."
        )
    return call.derivatives.position_weights(call, (grad,))


def scaled(mat: Tensor, call: ModuleCall, grad: Tensor, subsampling: list[int] | None = None) -> Tensor:
    """Let a square root of a loss's Hessian be that of what the loss is multiplied by.

    Args:
        mat: ``[V, N, *]``, or with the chosen samples.
        call: The loss call.
        grad: Gradient of the root with respect to the loss value.
        subsampling: The chosen samples; ``None`` for all.

    Returns:
        Same shape.

    Raises:
        LossValueError: If some factor is negative.
    """
    weights = position_weights(call, grad)
    if weights is None:
        return mat
    if (weights < 0).any():
        raise LossValueError(
            f"{call.path} is multiplied by a negative number: the generalized Gauss-Newton has no square root then. DiagHessian, HMP and "
            "backpack.hessianfree need none."
        )
    return mat * subsample(root_of_factors(weights, call.path).expand(call.inputs[0].shape), subsampling=subsampling)
