"""Downstream: what becomes of rows on the way to the root, node by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch.autograd.graph import Node

from backpack.core.graph import operation, saved, shape_of
from backpack.core.origins import FACTORS
from backpack.core.samples import Layout
from backpack.core.walk import Walk
from backpack.core.ways import BROADCASTING, ELEMENTWISE, SPLIT, State, layout_behind

_LOOKUPS = {"Embedding": lambda node: (0,), "Index": lambda node: [d for d, index in enumerate(saved(node, "indices")) if index is not None]}
_LOOKUPS |= dict.fromkeys(("IndexSelect", "Gather"), lambda node: (saved(node, "dim"),))
"""Operations that select entries by numbers: along which axes."""

_CUTS, _RESHAPES = frozenset({"Select", "Unbind"}), frozenset({"View", "UnsafeView", "ReshapeAlias"})


def users(walk: Walk, node: Node) -> list[tuple[Node, int, int]]:
    """List what uses the outputs of a node.

    Args:
        walk: The graph.
        node: The node.

    Returns:
        Nodes, the place among their arguments, and the number of the output.
    """
    if "users" not in walk.memo:
        found = walk.memo["users"] = defaultdict(list)
        for user in walk.order:
            for place, (upstream, nr) in enumerate(user.next_functions):
                if upstream is not None:
                    found[upstream].append((user, place, nr))
    return walk.memo["users"][node]


def is_looked_up(walk: Walk, node: Node, axis: int) -> bool:
    """Say whether entries of what a node makes are selected by numbers.

    Args:
        walk: The graph.
        node: The node.
        axis: Along which axis.

    Returns:
        Whether they are.
    """
    axes = len(shape_of((node, 0)))
    return any(axis in {a % axes for a in _LOOKUPS[operation(user)](user)} for user, _, _ in users(walk, node) if operation(user) in _LOOKUPS)


def meets(walk: Walk, node: Node, length: int) -> bool:
    """Say whether something that is made of a parameter has several axes of a length: not if these are features, which another parameter brings.

    Args:
        walk: The graph.
        node: Leaf of the parameter.
        length: The length.

    Returns:
        Whether it does.
    """
    stack, seen = [node], walk.memo.setdefault(("met", length), set[Node]())  # other parameters come here, too
    while stack:
        for user, place, _ in users(walk, stack.pop()):
            several = user not in seen and shape_of((user, 0)).count(length) > 1
            others = [n for i, (n, _) in enumerate(user.next_functions) if i != place] if several else []
            if several and not (operation(user) in FACTORS.keys() | {"Convolution"} and any(map(walk.is_tracked, others))):
                seen.clear()
                return True
            if not several and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def leave_the_rows(walk: Walk, node: Node, states: Mapping[int, State]) -> bool:
    """Say whether samples come to lie beside rows that could be samples rather than they, as far as what the model was given tells.

    So do the queries of ``x @ encoder(queries).T``, and what is looked up in them, if a model was called with the ``x`` of other samples.

    Args:
        walk: The graph.
        node: A node where rows were taken for samples.
        states: States of its outputs.

    Returns:
        Whether there is a tensor, from there to the root, that has as many rows as another argument of the model, and samples elsewhere.
    """
    known = walk.memo.setdefault("leaves", {})
    if node not in known:
        known[node] = _leave_the_rows(walk, node, states)
    return known[node]


def _leave_the_rows(walk: Walk, node: Node, states: Mapping[int, State]) -> bool:
    stack, seen = [(node, nr, state) for nr, state in states.items() if state is not SPLIT and not state.of_one], set[tuple[Node, int]]()
    others = walk.batches - {0, *(layout.samples for _, _, layout in stack)}
    if any(shape_of((node, nr))[0] in others and not _is_first(layout) for node, nr, layout in stack):
        return True
    while stack:
        node, nr, layout = stack.pop()
        for user, place, number in users(walk, node) if (node, nr) not in seen else ():
            made = shape_of((user, 0))
            if number != nr or not made or (operation(user) in _CUTS and saved(user, "dim") % len(shape_of((node, nr))) == layout.axis):
                continue  # a number, or a single sample
            behind = _behind(user, place, layout, shape_of((node, nr)), made)
            if made[0] in others and not (behind is not None and _is_first(behind)):
                return True
            if behind is not None:
                stack.append((user, 0, behind))
        seen.add((node, nr))
    return False


def _is_first(layout: Layout) -> bool:
    # whether rows are samples, or so many neighbours are one
    each = len(layout.labels) // max(1, layout.samples)
    return layout.axis == 0 and layout.labels == tuple(label for label in range(layout.samples) for _ in range(each))


def _behind(user: Node, place: int, layout: Layout, given: torch.Size, made: torch.Size) -> Layout | None:
    # where samples lie in what a node makes of one of its arguments; ``None`` where they are summed, or that is not known
    name, axis, last = operation(user), layout.axis - len(given), len(user.next_functions) - 1
    if name in FACTORS:
        kept, summed = (-2, -1) if place == last - 1 else (-1, -2)
        if place < last - 1 or axis == summed:
            return None
        return layout._replace(axis=len(made) + (kept if axis == kept else axis))
    if name in ELEMENTWISE | BROADCASTING:
        return layout._replace(axis=len(made) + axis) if made[axis] == given[axis] else None
    return layout_behind(user, layout, given, made)


def is_reshaped(walk: Walk, node: Node, rows: int) -> bool:
    """Say whether what becomes of the rows of what a node makes is a reshape first, as where positions of samples are told apart again.

    Args:
        walk: The graph.
        node: The node.
        rows: Number of rows.

    Returns:
        Whether it is.
    """
    while found := users(walk, node):
        node = found[0][0]
        if shape_of((node, 0))[:1] != (rows,):
            return operation(node) in _RESHAPES
    return False
