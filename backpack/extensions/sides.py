"""The two sides of a parameter: which inputs and outputs the uses of it have, as far as shapes tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Size
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives, LookupDerivatives
from backpack.core.graph import operation, shape_of
from backpack.core.linear import SAME_ENTRIES
from backpack.core.plan import Plan
from backpack.core.samples import Layout
from backpack.core.slots import Edge
from backpack.core.units import Unit
from backpack.core.ways import State
from backpack.extensions.combining import Structure

_NUMBER = torch.zeros(())
_PLACES = frozenset({"Add", "Sub", "Cat", "Stack"})
_KEEPS_ROWS = SAME_ENTRIES | {"Expand", "Repeat", "ToCopy", "Alias", "Clone"}


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


def as_table(shape: Size) -> tuple[int, int] | None:
    """Read the shape of a parameter like that of a table, the last of two axes that of features.

    Args:
        shape: Shape, perhaps with further axes of length one.

    Returns:
        Number of rows and of features; ``None`` if there are not two axes.
    """
    sizes = [size for size in shape if size != 1]
    return (sizes[0], sizes[1]) if len(sizes) == 2 else None  # noqa: PLR2004


def _is_of_all(state: State) -> bool:
    # whether there are rows of all samples, not of one, as in a loop
    return isinstance(state, Layout) and (state.plain or len({*state.labels} - {-1}) == state.samples)


def tables_of(plan: Plan) -> dict[Parameter, tuple[int, int]]:
    """Find parameters outside of units, rows of which become part of activations, like an embedding of positions that is added to those of words.

    Args:
        plan: The plan.

    Returns:
        Parameter to number of rows and of features. Each sample looks up all rows, once for each edge that leads to the parameter.
    """
    placed, loose = Counter[Edge](), set(plan.loose)
    for node, gap in plan.gaps.items():
        name = operation(node)
        if name in _PLACES:
            places = all(map(_is_of_all, gap.states.values()))
        else:
            kept = name in _KEEPS_ROWS or (name == "Slice" and shape_of((node, 0)) == shape_of(node.next_functions[0]))
            places = kept and placed[node, 0] == plan.arrivals.get((node, 0))
        if places:
            placed.update(n[:2] for n in gap.nexts if n is not None)
    shapes = {}
    for node, parameter in plan.walk.leaves.items():
        state = plan.states.get(node, {}).get(0)
        of_all = not isinstance(state, Layout) or state.samples <= 1  # else rows are samples
        if of_all and placed[node, 0] and placed[node, 0] == plan.arrivals.get((node, 0)):
            shapes[parameter] = as_table(parameter.shape)
    return {parameter: shape for parameter, shape in shapes.items() if shape is not None and parameter in loose}


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
    alone = len(plan.losses) == 1  # columns of several losses arrive one after the other, each as if there was another lookup
    tables = tables_of(plan) if plan.loose and alone and not mean_input else {}
    for parameter in plan.loose:
        rows, features = tables.get(parameter, (None, parameter.numel()))
        table = rows is not None
        found.setdefault(parameter, []).append(Sides((1, rows) if table else None, (1, features), structure=structure_by(None) if table else None))
    return found
