"""What each entry of a small parameter gets from each entry of a node's output: the derivative of the node's backward, which is linear.

Where a node of which nothing is known is crossed by masks, each sample costs a call with all rows. Of a scale, a threshold, or a vector of these,
that is shared by all samples, fewer calls say the same: one for each of its entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.graph import call_node
from backpack.core.samples import Layout, add_rows, along
from backpack.utils.columns import distinct_columns

_CHEAPER = 4
"""How many times as many samples as entries there have to be."""
_WORTH = 2**17
"""Entries of masked columns that take as long as finding out one coefficient; measured on one thread of a CPU."""
_AGREE = 64
"""Rounding errors of the largest terms up to which two ways to the same sum agree."""


def by_coefficients(node: Node, number: int, columns: Tensor, layout: Layout, shape: torch.Size) -> Tensor | None:
    """Send columns through a node to an input that all samples share, for each sample.

    Args:
        node: The node, which has one output.
        number: Number of the input.
        columns: ``[V, *output]``.
        layout: Where the samples lie there.
        shape: Shape of the input.

    Returns:
        ``[V, N, *shape]``; ``None`` if masks are cheaper, or the backward of the node cannot be differentiated, or not rightly.
    """
    entries, rows = shape.numel(), len(layout.labels)
    usual = not (torch.is_grad_enabled() or columns.is_complex() or columns.dtype.itemsize < torch.float32.itemsize or -1 in layout.labels)
    if not usual or entries * _CHEAPER > layout.samples or entries * _WORTH > columns.numel() * layout.samples:
        return None
    point = torch.zeros_like(columns[:1], requires_grad=True)
    try:
        with torch.enable_grad():
            sent = call_node(node, [point])[number].sum_to_size(shape).flatten().unbind()
        mixed = _mixture(columns, layout)
        expected = call_node(node, [mixed])[number].sum_to_size(shape).flatten().unbind()
        found = columns.new_empty(entries, len(columns), rows)
        for place, entry in enumerate(sent):
            (coefficients,) = torch.autograd.grad(entry, point, retain_graph=True)
            terms = mixed * coefficients
            if not (terms.sum() - expected[place]).abs() <= _AGREE * torch.finfo(columns.dtype).eps * terms.abs().sum():
                return None
            found[place] = (columns * coefficients).movedim(1 + layout.axis, 1).reshape(len(columns), rows, -1).sum(2)
    except (RuntimeError, AttributeError):  # once_differentiable, say
        return None
    return add_rows(found.movedim(0, 2), layout).reshape(len(columns), layout.samples, *shape)


def _mixture(columns: Tensor, layout: Layout) -> Tensor:
    # what tells, for all columns and samples at once, what the derivative is, whatever cancels in their sum ``[1, *output]``
    weights = distinct_columns(columns.new_empty(len(columns), len(layout.labels)))
    return (columns * along(weights, layout.axis, columns.dim() - 1)).sum(0, keepdim=True)
