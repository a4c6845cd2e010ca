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


def ggn_vector_product(loss: Tensor, output: Tensors, model: Module, v: Tensors) -> tuple[Tensor, ...]:
    """Multiply with the generalized Gauss-Newton matrix of all trainable parameters of a model.

    Args:
        loss: Scalar loss, computed from ``output``; it is differentiated as it is, so its reduction sets the scaling.
        output: Output of the model, a tensor or a sequence of tensors.
        model: The model.
        v: Vectors, of the shapes of the trainable parameters, in their order.

    Returns:
        One tensor per trainable parameter, of its shape.
    """
    return ggn_vector_product_from_plist(loss, output, [p for p in model.parameters() if p.requires_grad], v)


def ggn_vector_product_from_plist(loss: Tensor, output: Tensors, plist: Iterable[Tensor], v: Tensors) -> tuple[Tensor, ...]:
    """Multiply with the generalized Gauss-Newton matrix of the given parameters.

    Args:
        loss: Scalar loss, computed from ``output``; it is differentiated as it is, so its reduction sets the scaling.
        output: Output of the model, a tensor or a sequence of tensors.
        plist: The parameters.
        v: Vectors, of the shapes of the parameters.

    Returns:
        One tensor per parameter, of its shape; zeros where ``output`` does not depend on the parameter.

    Raises:
        ArgumentError: If the number or the shapes of ``v`` do not fit the parameters, or ``loss`` was not computed from ``output``.

    Custom functions marked as ``once_differentiable`` are refused: terms would be missing.
    """
    plist, v, outputs = list(plist), as_list(v), as_list(output)
    check_shapes("v", v, "the parameters", plist)
    for part in outputs:
        edge = get_gradient_edge(part)
        if loss is not part and not any((edge.node, edge.output_nr) in node.next_functions for node in nodes_below([loss])):
            raise ArgumentError(
                f"The loss was not computed from this output of shape {list(part.shape)}: the product would be zero. Give the tensor that went into "
                "the loss, output = model(X) and loss = lossfunc(output, y), not that of another call."
            )
    return pull_back(outputs, plist, hessian_vector_product(loss, outputs, R_op(outputs, plist, v)), retain_graph=True, detach=True)
