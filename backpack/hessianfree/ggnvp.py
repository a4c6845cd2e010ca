"""Products with the generalized Gauss-Newton matrix ``J^T H J`` (N. Schraudolph, "Fast curvature matrix-vector products", 2002)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Module

from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import Tensors, as_list, check_shapes, pull_back
from backpack.hessianfree.rop import push_forward
from backpack.utils.differentiation import nodes_below, nodes_of, search
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


def ggn_vector_product_from_plist(loss: Tensor, output: Tensors, plist: Tensor | Iterable[Tensor], v: Tensors) -> tuple[Tensor, ...]:
    """Multiply with the generalized Gauss-Newton matrix of the given parameters.

    Args:
        loss: Scalar loss, computed from ``output``; it is differentiated as it is, so its reduction sets the scaling.
        output: Output of the model, a tensor or a sequence of tensors.
        plist: The parameters: one, or an iterable of several.
        v: Vectors, of the shapes of the parameters.

    Returns:
        One tensor per parameter, of its shape; zeros where ``output`` does not depend on the parameter.

    Raises:
        ArgumentError: If the number or the shapes of ``v`` do not fit the parameters, ``loss`` was not computed from ``output``, or one of several
            outputs from another one.

    Custom functions marked as ``once_differentiable`` are refused: terms would be missing.
    """
    plist, v = as_list(plist), as_list(v)
    outputs = [part for part in as_list(output) if part.requires_grad]  # what depends on nothing adds nothing
    check_shapes("v", v, "the parameters", plist)
    edges = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, outputs)]
    below, made = {edge for node in nodes_below([loss]) for edge in node.next_functions}, [_made_of(part, {*edges}) for part in outputs]
    for number, part in enumerate(outputs):
        if loss is not part and edges[number] not in below:
            raise ArgumentError(
                f"The loss was not computed from this output of shape {list(part.shape)}: the product would be zero. Give the tensor that went into "
                "the loss, output = model(X) and loss = lossfunc(output, y), not that of another call."
            )
        for other, whole in enumerate(outputs):
            if other != number and (edges[other] == edges[number] or edges[number] in made[other]):
                raise ArgumentError(
                    f"Output {other} of shape {list(whole.shape)} was computed from output {number} of shape {list(part.shape)}, so that autograd "
                    "cannot hold one while it differentiates with respect to the other. Give only outputs that go into the loss; if both do, compute "
                    "the loss of copies, and give these: output = [part.clone() for part in model(X)]."
                )
    moved = push_forward(outputs, plist, v, retain_graph=True, detach=True)
    return pull_back(outputs, plist, hessian_vector_product(loss, outputs, moved), retain_graph=True, detach=True)


def _made_of(tensor: Tensor, edges: set[tuple[Node, int]]) -> set[tuple[Node, int]]:
    # of which of these edges a tensor was made: the first ones on each way
    nodes = search(nodes_of([tensor]), lambda node: [n for n, nr in node.next_functions if (n, nr) not in edges])
    return {edge for node in nodes for edge in node.next_functions} & edges
