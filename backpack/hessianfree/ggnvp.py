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
        ArgumentError: If the number or the shapes of ``v`` do not fit the parameters, ``loss`` was not computed from ``output``, or one of several
            outputs from another one.

    Custom functions marked as ``once_differentiable`` are refused: terms would be missing.
    """
    plist, v = list(plist), as_list(v)
    outputs = [part for part in as_list(output) if part.requires_grad]  # what depends on nothing adds nothing
    check_shapes("v", v, "the parameters", plist)
    for number, part in enumerate(outputs):
        if loss is not part and not _is_made_of(loss, part):
            raise ArgumentError(
                f"The loss was not computed from this output of shape {list(part.shape)}: the product would be zero. Give the tensor that went into "
                "the loss, output = model(X) and loss = lossfunc(output, y), not that of another call."
            )
        for other, whole in enumerate(outputs):
            if other != number and (get_gradient_edge(whole) == get_gradient_edge(part) or _is_made_of(whole, part)):
                raise ArgumentError(
                    f"Output {other} of shape {list(whole.shape)} was computed from output {number} of shape {list(part.shape)}, so that autograd "
                    "cannot hold one while it differentiates with respect to the other. Give only outputs that go into the loss; if both do, compute "
                    "the loss of copies, and give these: output = [part.clone() for part in model(X)]."
                )
    return pull_back(outputs, plist, hessian_vector_product(loss, outputs, R_op(outputs, plist, v)), retain_graph=True, detach=True)


def _is_made_of(tensor: Tensor, part: Tensor) -> bool:
    edge = get_gradient_edge(part)
    return any((edge.node, edge.output_nr) in node.next_functions for node in nodes_below([tensor]))
