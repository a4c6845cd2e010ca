"""The two sides of a parameter: which inputs and outputs the uses of it have, as far as shapes tell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives, LookupDerivatives
from backpack.core.graph import operation, shape_of, tensor_at
from backpack.core.linear import SAME_ENTRIES
from backpack.core.mixing import is_made_of_constants
from backpack.core.node_calls import NodeCall
from backpack.core.plan import Plan
from backpack.core.samples import Layout, sum_to
from backpack.core.slots import Edge
from backpack.core.units import Unit
from backpack.core.ways import SPLIT
from backpack.extensions.combining import Structure
from backpack.utils.differentiation import search

_NUMBER = torch.zeros(())
_WEIGHTS = {"Mm": 1, "Addmm": 2, "Convolution": 1}  # which input is multiplied with what all samples are, if not both are activations
_MANY = 1000  # lookups of rows that are added to themselves again and again
_PLACES = frozenset({"Add", "Sub", "Cat", "Stack", "Expand", "Repeat"})  # the last two copy rows for each sample, where these are known behind them
_KEEPS_ROWS = SAME_ENTRIES | set("Expand Repeat ToCopy Alias Clone Slice Select Split SplitWithSizes Unbind".split())


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


class _Lookup(NamedTuple):
    # how many of the samples look up which entries
    samples: int
    entries: Tensor

    @classmethod
    def by(cls, there: Layout, edge: Edge) -> _Lookup:
        samples = there.samples if there.plain else len({*there.labels} - {-1})
        return cls(samples, torch.ones(shape_of(edge), dtype=torch.bool, device=tensor_at(edge).device))


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


def separates(unit: Unit) -> bool:
    """Say whether axes of inputs lie side by side in the weight of a use, as those of outputs do.

    Args:
        unit: The use.

    Returns:
        Whether they do; also where it has none.
    """
    return not isinstance(unit.call.derivatives, AffineDerivatives) or unit.call.derivatives.separates


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


def tables_of(plan: Plan) -> dict[Parameter, Tensor]:
    """Find parameters outside of units, rows of which become part of activations, like an embedding of positions that is added to those of words.

    Args:
        plan: The plan.

    Returns:
        Parameter to how many samples look up each row ``[rows]``, counted once for each edge on which the row reaches activations.
    """
    if plan.tables is None:
        loose = set(plan.loose)
        leaves = {node: p for node, p in plan.walk.leaves.items() if p in loose and as_table(p.shape) is not None}
        looked = _lookups(plan, leaves) if leaves else {}
        plan.tables = {}
        for node, parameter in leaves.items():
            state, lookups = plan.states.get(node, {}).get(0), looked.get((node, 0))
            rows_are_samples = isinstance(state, Layout) and state.samples > 1
            if lookups and not (rows_are_samples and any(lookup.samples > 1 for lookup in lookups)):  # else how many look up each row is not known
                counts = sum(lookup.samples * lookup.entries.view(as_table(parameter.shape)) for lookup in lookups)
                if (counts == counts[:, :1]).all():  # else some of the features alone are used
                    plan.tables[parameter] = counts[:, 0]
    return plan.tables


def _lookups(plan: Plan, leaves: Iterable[Node]) -> dict[Edge, list[_Lookup]]:
    # edges to these leaves, or to rows of them, to the lookups, where nothing else happens to them
    rows = set(leaves)
    for node, gap in reversed(plan.gaps.items()):
        upstream = {n[0] for n in gap.nexts if n is not None}
        if upstream and upstream <= rows:
            rows.add(node)
    looked, placed = defaultdict[Edge, list[_Lookup]](list), Counter[Edge]()
    for unit in units_of(plan):  # the biases of a stack of matrices are added, too
        if "bias" in unit.split and unit.split["bias"][0] in rows:
            looked[unit.split["bias"]].append(_Lookup.by(unit.layout, unit.split["bias"]))
            placed[unit.split["bias"]] += 1
    for node, gap in plan.gaps.items():
        edges = {number: n[:2] for number, n in enumerate(gap.nexts) if n is not None and n[0] in rows}
        given = [(nr, lookup) for nr in gap.states for lookup in looked.pop((node, nr), ())]
        whole = node in rows and all(placed[node, nr] == plan.arrivals.get((node, nr)) for nr in gap.states)
        if edges and operation(node) in _PLACES and SPLIT not in gap.states.values():
            places = {number: gap.crossings[number].returned or next(iter(gap.states.values())) for number in edges}
            found = {number: [_Lookup.by(places[number], edge)] for number, edge in edges.items()}
        elif whole and operation(node) in _PLACES | _KEEPS_ROWS and len(given) <= _MANY:
            found = {number: [] for number in edges}
            for nr, lookup in given:
                returned = gap.call({nr: lookup.entries.to(tensor_at((node, nr)).dtype)[None]})
                for number, edge in edges.items():
                    entries = sum_to(returned[number], shape_of(edge), 1)[0].ne(0)
                    found[number].append(lookup._replace(entries=entries))
        else:
            continue
        for number, edge in edges.items():
            placed[edge] += 1
            looked[edge] += found[number]
    return {edge: lookups for edge, lookups in looked.items() if placed[edge] == plan.arrivals.get(edge)}


def rows_of_weights(plan: Plan) -> set[Parameter]:
    """Find weights of layers that are called once for all samples, and make several rows of the weight of another one: ``W + B @ A``.

    What a module makes of constants that a function multiplies with activations may be keys, of which each row is a position.

    Args:
        plan: The plan.

    Returns:
        The weights. Such rows are no positions: what belongs to two of them is not added up.
    """
    split = [edge[0] for unit in units_of(plan) for name, edge in unit.split.items() if name != "bias"] if plan.shared else []
    apart = {node for node in split if node in plan.walk.has_data}
    made = [plan.shared[node] for node in _upstream(plan, [node for node in split if node not in apart]) if node in plan.shared]
    factors = [gap.nexts[_WEIGHTS[operation(node)]] for node, gap in plan.gaps.items() if operation(node) in _WEIGHTS]
    for node in _upstream(plan, [*apart, *(n[0] for n in factors if n is not None)]):
        unit = plan.shared.get(node) or plan.units.get(node)
        if unit is not None and isinstance(unit.call, NodeCall) and is_made_of_constants(plan.walk, node, unit.layout.samples):
            made.append(unit)
    return {p for unit in made for name, p in unit.parameters.items() if name == "weight" and sides(unit, name, p).positions > 1}


def _upstream(plan: Plan, nodes: list[Node]) -> Iterator[Node]:
    return search(nodes, lambda node: [n for n, _ in edges_below(plan, node)])


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
    tables = {} if mean_input else tables_of(plan)
    for parameter in plan.loose:
        side = Sides(None, (1, parameter.numel()))
        if parameter in tables:
            rows, features = as_table(parameter.shape)
            side = Sides((1, rows), (1, features), structure=structure_by(None))
        found.setdefault(parameter, []).append(side)
    return found
