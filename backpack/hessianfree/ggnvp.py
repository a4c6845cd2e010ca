"""Products with the generalized Gauss-Newton matrix ``J^T H J`` (N. Schraudolph, "Fast curvature matrix-vector products", 2002)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module

from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import Tensors, as_list, check_shapes, pull_back
from backpack.hessianfree.rop import R_op
from backpack.utils.differentiation import nodes_below
from backpack.utils.errors import ArgumentError


def ggn_vector_product(loss: Tensor, output: Tensor, model: Module, v: Tensors) -> tuple[Tensor, ...]:
    """Multiply with the generalized Gauss-Newton matrix of all trainable parameters of a model.

    Args:
        loss: Scalar loss, computed from ``output``; it is differentiated as it is, so its reduction sets the scaling.
        output: Output of the model.
        model: The model.
        v: Vectors, of the shapes of the trainable parameters, in their order.

    Returns:
        One tensor per trainable parameter, of its shape.
    """
    return ggn_vector_product_from_plist(loss, output, [p for p in model.parameters() if p.requires_grad], v)


def ggn_vector_product_from_plist(loss: Tensor, output: Tensor, plist: Iterable[Tensor], v: Tensors) -> tuple[Tensor, ...]:
    """Multiply with the generalized Gauss-Newton matrix of the given parameters.

    Args:
        loss: Scalar loss, computed from ``output``; it is differentiated as it is, so its reduction sets the scaling.
        output: Output of the model.
        plist: The parameters.
        v: Vectors, of the shapes of the parameters.

    Returns:
        One tensor per parameter, of its shape; zeros where ``output`` does not depend on the parameter.

    Raises:
        ArgumentError: If the number or the shapes of ``v`` do not fit the parameters, or ``loss`` was not computed from ``output``.

    Custom functions marked as ``once_differentiable`` are refused: terms would be missing.
    """
    plist, v, edge = list(plist), as_list(v), get_gradient_edge(output)
    check_shapes("v", v, "the parameters", plist)
    if loss is not output and not any((edge.node, edge.output_nr) in node.next_functions for node in nodes_below([loss])):
        raise ArgumentError(
            f"The loss was not computed from this output of shape {list(output.shape)}: the product would be zero. Give the tensor that went into "
            "the loss, output = model(X) and loss = lossfunc(output, y), not that of another call."
        )
    return pull_back(output, plist, hessian_vector_product(loss, [output], R_op(output, plist, v)), retain_graph=True, detach=True)
