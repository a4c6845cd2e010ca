"""The two sides of a parameter: which inputs and outputs the uses of it have, as far as shapes tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Size
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives, LookupDerivatives
from backpack.core.plan import Plan
from backpack.core.slots import Edge
from backpack.core.units import Unit
from backpack.extensions.combining import Structure

_NUMBER = torch.zeros(())


class Sides(NamedTuple):
    """How a use sees its parameter.

    Attributes:
        inputs: Shape of the input-side Kronecker factor: ``[G, K, K]``, ``[1, K]`` if it is diagonal, ``None`` if there is none.
        outputs: Shape of the columns of a sample at the output, summed over positions: ``[G, O]``.
        positions: Number of positions that share the parameter in a sample.
        structure: How the two sides lie in the parameter, ``None`` if there is one.
    """

    inputs: tuple[int, ...] | None
    outputs: tuple[int, int]
    positions: int = 1
    structure: Structure | None = None


def units_of(plan: Plan) -> Iterator[Unit]:
    """Go through all units of a plan, also those inside of nodes that several rules stand for.

    Args:
        plan: The plan.

    Yields:
        The units.
    """
    yield from plan.units.values()
    yield from plan.shared.values()
    for composite in plan.composites.values():
        yield from composite.parts


def edges_below(plan: Plan, node: Node) -> Iterator[Edge]:
    """Go through the edges to which a node hands on what is carried.

    Args:
        plan: The plan.
        node: Any node of its graph.

    Yields:
        Edges; none where nothing is carried.
    """
    if node in plan.losses:
        yield plan.losses[node].below
    elif node in plan.units or node in plan.shared:
        unit = plan.units.get(node) or plan.shared[node]
        yield from (edge for edge in (unit.below, *unit.split.values()) if edge is not None)
    elif node in plan.composites:
        yield from plan.composites[node].upstream
    elif node in plan.waiting:
        yield from plan.waiting[node].upstream
    elif node in plan.gaps:
        yield from (n[:2] for n in plan.gaps[node].nexts if n is not None)


def rows_of(unit: Unit) -> Size:
    """Find out the shape in which an affine rule sees its output, once for all that ask.

    Args:
        unit: A use by an affine layer.

    Returns:
        ``[N, G, O, L]``.
    """
    if unit.rows is None:
        shape, turn = unit.call.outputs[0].shape, unit.arrangement
        # views of a number make no copies, and take a fifth of the time of the meta device, of which some turns have need, as they copy
        output = _NUMBER.expand(1, *shape) if turn is None else turn.front(torch.empty(1, *shape, device="meta"), 1)
        unit.rows = unit.call.derivatives.rows(unit.call, output).shape[1:]
    return unit.rows


def structure_by(rule: BaseDerivatives | None, groups: int = 1) -> Structure:
    """Say how the two sides of a weight lie in it.

    Args:
        rule: The rule of the layer; if it is no affine one, it is that of a table, whose first axis belongs to one-hot vectors.
        groups: Number of groups.

    Returns:
        The structure.
    """
    affine = isinstance(rule, AffineDerivatives)
    return Structure(int(not rule.transposed), groups, rule.weight_layout) if affine else Structure(0)


def sides(unit: Unit, name: str, parameter: Parameter, mean_input: bool = False) -> Sides:
    """Look at a parameter from one of its uses.

    Args:
        unit: The use.
        name: Name of the parameter there.
        parameter: The parameter.
        mean_input: Whether the mean input of the samples is taken instead of each of them.

    Returns:
        What the use sees.
    """
    rule = unit.call.derivatives
    if isinstance(rule, LookupDerivatives) and not mean_input:
        rows, features = parameter.shape
        return Sides((1, rows) if isinstance(rule, EmbeddingDerivatives) else (1, rows, rows), (1, features), structure=structure_by(rule))
    if not isinstance(rule, AffineDerivatives):
        return Sides(None, (1, parameter.numel()))
    rows, groups, outputs, positions = rows_of(unit)
    positions = positions * rows // max(1, unit.layout.samples)
    if name == "bias":
        return Sides(None, (1, groups * outputs), positions)
    length = parameter.numel() // max(1, groups * outputs)
    return Sides((groups, length, length), (groups, outputs), positions, structure_by(rule, groups))


def sides_of(plan: Plan, mean_input: bool = False) -> dict[Parameter, list[Sides]]:
    """Look at all parameters that a plan is about, from all of their uses.

    Args:
        plan: The plan.
        mean_input: Whether the mean input of the samples is taken instead of each of them.

    Returns:
        One entry a use; those outside of all units are one.
    """
    found: dict[Parameter, list[Sides]] = {}
    for unit in units_of(plan):
        for name, parameter in unit.parameters.items():
            if parameter in plan.uses:
                found.setdefault(parameter, []).append(sides(unit, name, parameter, mean_input))
    for parameter in plan.loose:
        found.setdefault(parameter, []).append(Sides(None, (1, parameter.numel())))
    return found
