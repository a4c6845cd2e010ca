"""Systems of equations with one matrix for all samples: what each contributes to the derivative of the matrix, a product, without masks."""

from __future__ import annotations

import torch
from torch import Tensor, einsum
from torch.autograd.graph import Node

from backpack.core.graph import call_node, operation, saved, shape_of
from backpack.core.samples import Layout, add_rows

_MATRIX = 2


def to_matrix(node: Node, columns: Tensor, layout: Layout) -> Tensor | None:
    """Send columns from what solves ``A X = B``, or ``X A = B``, to ``A``: ``-(A^{-T} C) X^T``, or ``-X^T (C A^{-T})``, for each sample.

    Args:
        node: A node.
        columns: ``C [V, *output]``.
        layout: Where the samples lie there.

    Returns:
        ``[V, N, *A]``; ``None`` if it is another node, or the samples are not the right-hand sides.
    """
    triangular = operation(node) == "LinalgSolveTriangular"
    if not (triangular or operation(node) == "LinalgSolveEx") or len(shape_of((node, 0))) != _MATRIX or columns.is_complex():
        return None
    left = saved(node, "left")
    if layout.axis != left:
        return None
    sides = call_node(node, [columns])[1]
    if sides is None:
        return None
    solution = saved(node, "result")
    products = einsum("vdk,ek->vkde", sides, solution) if left else einsum("kd,vke->vkde", solution, sides)
    found = add_rows(products.neg_(), layout)
    if not triangular:
        return found
    return (torch.triu if saved(node, "upper") else torch.tril)(found, *([1 if saved(node, "upper") else -1] * saved(node, "unitriangular")))
