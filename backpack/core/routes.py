"""Routes: the nodes upstream of where columns are put, and what is to be done there."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.graph import outputs_of
from backpack.core.plan import Plan
from backpack.utils.differentiation import search


class Step(NamedTuple):
    """A node on a route: what stands for it, which of the plan's groups that is in, and how many outputs the node has."""

    node: Node
    what: Any
    group: int
    outputs: int


class Route(NamedTuple):
    """The steps in the order of the plan, and the number of uses of each parameter: among them, and where the route begins."""

    steps: list[Step]
    uses: dict[Parameter, int]


def route(plan: Plan, starts: frozenset[Node]) -> Route:
    """Find the way of columns, once for all blocks that begin at the same nodes.

    Args:
        plan: The plan.
        starts: The nodes.

    Returns:
        The route.
    """
    if starts not in plan.routes:
        groups, upstream = (plan.units, plan.shared, plan.composites, plan.gaps, plan.waiting), {*search(starts)}
        nodes = [node for node in plan.walk.order if node in upstream]
        steps = [Step(node, group[node], i, len(outputs_of(node))) for node in nodes for i, group in enumerate(groups) if node in group]
        uses: Counter[Parameter] = Counter(p for step in steps for unit in step.what.parts for p in unit.parameters.values())
        edges = (edge for step in steps for edge in step.what.upstream if edge is not None)
        uses.update(plan.walk.leaves[edge[0]] for edge in edges if edge[0] in plan.walk.leaves)  # the input itself is a parameter
        uses.update(plan.walk.leaves[node] for node in starts if node in plan.walk.leaves)
        plan.routes[starts] = Route(steps, {p: uses[p] for p in plan.uses if p in uses})
    return plan.routes[starts]
