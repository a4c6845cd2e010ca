"""Rows that are chosen, put elsewhere, or told apart between modules that are called one after the other: which of them are of the same sample?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import or_

from torch.autograd.graph import Node

from backpack.core.batches import batch_of
from backpack.core.calls import Mark
from backpack.core.downstream import users
from backpack.core.graph import operation, shape_of
from backpack.core.linear import RESHAPES
from backpack.core.origins import FACTORS
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.core.ways import SPLIT, State
from backpack.utils.errors import UnsupportedError

_CHOOSES = frozenset({"Index", "IndexSelect", "Gather"})
_PUTS = frozenset("IndexAdd IndexCopy IndexPut IndexPutImpl IndexReduce ScatterAdd Scatter ScatterReduce MaskedScatter".split())

States = Mapping[Node, Mapping[int, State]]


def refuse_choices(walk: Walk, joined: Iterable[Edge], states: States) -> Iterator[UnsupportedError]:
    """Refuse rows of which several modules, or losses, choose as many each, by numbers: these may be other samples, as those of two tasks are.

    Slices are parts of samples that lie side by side, like views. What meets again, in an operation that needs as many rows, is of the same samples.

    Args:
        walk: The graph.
        joined: Where consumers use some of the rows each.
        states: Where the samples lie.

    Yields:
        The errors.
    """
    given = walk.batches | {batch_of(call) for call in walk.outermost}
    for edge in joined:
        state = states[edge[0]][edge[1]]
        if state is SPLIT or len(state.labels) == state.samples or len(state.labels) not in given:
            continue
        choices = _choices(walk, edge, states)
        if len(choices) > 1 and not _meet(walk, choices):
            yield UnsupportedError(
                f"Rows of a tensor of shape {list(shape_of(edge))} are chosen by numbers or masks, {state.samples} for each of several heads or "
                f"losses: whether {{names}} see {state.samples} samples of several rows each, or {len(state.labels)} samples, is not known. Let "
                "every head return all rows, and choose by torch.where, or by weights in the loss; extend one module that returns the loss; or leave "
                "these parameters out: {exclude}.",
                walk.named(walk.reach[edge[0]]),
            )


def _choices(walk: Walk, edge: Edge, states: States) -> list[Node]:
    # what chooses all samples in their order, behind operations on some of the rows
    found, stack, seen = [], [edge], {edge[0]}
    while stack:
        node, nr = stack.pop()
        for user, _, number in users(walk, node):
            state = states.get(user, {}).get(0, SPLIT)
            if number != nr or user in seen or state is SPLIT:
                continue
            seen.add(user)
            if not state.plain:
                stack.append((user, 0))
            elif operation(user) in _CHOOSES:
                found.append(user)
    return found


def _meet(walk: Walk, choices: list[Node]) -> bool:
    # whether they all do, downstream, but not in numbers, nor where they are laid one behind the other
    rows, group = shape_of((choices[0], 0))[:1], {choice: 1 << place for place, choice in enumerate(choices)}
    groups = [*group.values()]
    for node in reversed(walk.order):
        shape = shape_of((node, 0))
        if not shape or (operation(node) == "Cat" and shape[:1] != rows):
            continue
        given = {group[n] for n, _ in node.next_functions if n in group}
        if given:
            group[node] = bits = reduce(or_, given, group.get(node, 0))
        if len(given) > 1:
            met = reduce(or_, (part for part in groups if part & bits))
            groups = [*(part for part in groups if not part & bits), met]
    return len(groups) == 1


def refuse_put_rows(walk: Walk, begun: Iterable[tuple[Node, Mark]]) -> Iterator[UnsupportedError]:
    """Refuse rows that were taken for samples, and become parts of the rows of something that has a row for each sample of another module.

    So do what experts return for those samples that are sent to them, and positions that are told apart again by a reshape.

    Args:
        walk: The graph.
        begun: Outputs of outermost modules at which samples start.

    Yields:
        The errors.
    """
    visited: dict[int, set[Node]] = {}  # for others with as many rows
    for node, mark in begun:
        rows = shape_of((node, mark.nr))[0]
        others, stack, seen = walk.batches - {0, rows}, [(node, mark.nr)], visited.setdefault(rows, set())
        while stack and others:
            at, nr = stack.pop()
            given = shape_of((at, nr))
            same = (given, given[1:]) if rows == 1 else (given,)  # an assignment leaves out the axis of a single row
            for user, _, number in users(walk, at):
                made, name = shape_of((user, 0)), operation(user)
                if number != nr or user in seen or not made:
                    continue
                seen.add(user)
                if made in same or (made[0] == rows and name not in FACTORS):
                    stack.append((user, 0))
                elif made[0] in others and ((name in _PUTS and made[0] > 1) or (name in RESHAPES and made[0] < rows)):  # samples may become rows
                    yield UnsupportedError(
                        f"{mark.call} returns {rows} rows, which are put into a tensor of shape {list(made)} outside of any module, while another "
                        f"module returns {made[0]} rows: which of the rows are of the same sample is not known. Extend one module that calls "
                        "both, and returns its predictions or its loss; or leave these parameters out of all extensions: {exclude}.",
                        walk.named(walk.reach[node]),
                    )
                    stack.clear()
                    break
