"""A plan as far as it concerns some of the parameters: extensions can leave parameters out, and nothing is refused on their account then."""

from __future__ import annotations

from copy import copy

from backpack.core.plan import Plan


def concerning(plan: Plan, bits: int, answered: int = 0) -> Plan:
    """Leave out of a plan what lies upstream of, or at, other parameters only.

    Args:
        plan: The plan of the pass.
        bits: Bit set of the parameters.
        answered: Bit set of those for which only what arrives at their modules matters, as somebody else says what is made of it.

    Returns:
        A plan to be checked; the same one if nothing is left out.
    """
    walk = plan.walk
    if bits == plan.concerned and not answered:
        return plan
    part = copy(plan)
    part.concerned = bits
    part.units = {node: unit for node, unit in plan.units.items() if walk.reach[node] & bits}
    part.shared = {node: unit for node, unit in plan.shared.items() if walk.reach[node] & bits}
    part.gaps = {node: gap for node, gap in plan.gaps.items() if walk.reach[node] & bits}
    part.arrivals = {edge: count for edge, count in plan.arrivals.items() if walk.reach[edge[0]] & bits}
    part.uses = {parameter: count for parameter, count in plan.uses.items() if walk.bits[id(parameter)] & bits & ~answered}
    part.loose = [parameter for parameter in plan.loose if walk.bits[id(parameter)] & bits]
    return part
