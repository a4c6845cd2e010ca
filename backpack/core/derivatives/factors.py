"""Square roots of what the terms of a loss are multiplied by, with derivatives where a graph is wanted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.owners import owners
from backpack.utils.differentiation import search, square_root, undifferentiable


def root_of_factors(factors: Tensor, what: str) -> Tensor:
    """Take the square root of factors.

    Curvature is linear in a factor, its root is not: at zero it has no derivative. Where a factor stays zero, as one that is masked does whatever the
    mask is multiplied by, that is zero.

    Args:
        factors: Numbers that are not negative.
        what: What has them, for the message.

    Returns:
        The roots. Those of factors that are zero, and would not stay so, raise when they are differentiated.
    """
    if not factors.requires_grad or factors.all():
        return factors.sqrt()
    if not _may_move(factors):
        return square_root(factors)
    reason = "some of its terms are multiplied by zero, where the square root has no derivative. Leave these terms out of the sum"
    return undifferentiable(factors.detach().sqrt(), factors, f"The curvature of {what}", reason)


def _may_move(factors: Tensor) -> bool:
    # whether a factor that is zero would change with what it is made of
    nodes = [] if factors.grad_fn is None else search([factors.grad_fn], _upstream)
    leaves = [node.variable for node in nodes if hasattr(node, "variable")] or [factors]
    if any(leaf in owners for leaf in leaves):  # made by the model: autograd is at it
        return True
    some = torch.rand(factors.shape, generator=torch.Generator().manual_seed(0)).to(factors) + 0.5
    slopes = torch.autograd.grad(factors, leaves, some * (factors == 0), retain_graph=True, allow_unused=True)
    return any(slope is not None and slope.any() for slope in slopes)


def _upstream(node: Node) -> list[Node | None]:
    # what the gradient of a node depends on; that of what is linear in log-probabilities does not depend on these, though it has an edge to them
    return [upstream for upstream, _ in node.next_functions[: 1 if node.name().startswith("NllLoss") else None]]
