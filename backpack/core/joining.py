"""Joining: outputs of several calls of a model, one below the other, of which nothing tells whether their rows are different samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from backpack.core.calls import ModuleCall
from backpack.core.graph import has_saved, operation, saved, shape_of
from backpack.core.linear import PRODUCTS, RESHAPES
from backpack.core.loss_nodes import FUNCTIONS
from backpack.core.node_functions import is_known
from backpack.core.origins import STACKS
from backpack.core.walk import Walk
from backpack.core.ways import ELEMENTWISE
from backpack.utils.errors import UnsupportedError

_OF_ROWS = FUNCTIONS.keys() | frozenset("NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss NativeLayerNorm NativeGroupNorm".split())
_ENTRYWISE = ELEMENTWISE | {"Mul", "Div", "Addcmul"}
_OF_ENTRIES = _ENTRYWISE | RESHAPES | {"Add", "Sub", "Squeeze", "Select", "Unbind"}
"""What may make an entry of a row, as `out[0, 0]`, but no loss."""
_FIRST = frozenset({"Convolution", "Cdist", "EuclideanDist"})
"""Operations that treat each row of the first thing that they are given alone."""
_FILLS = frozenset({"torch::autograd::CopySlices", "IndexCopy"})
_TAKES = frozenset("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind Slice Select IndexSelect Gather Flip Roll".split())
_TAKES |= frozenset("Softmax LogSoftmax Logsumexp Norm LinalgVectorNorm Prod Var Std Cumsum Cumprod Max Min Amax Amin Sort Topk Median".split())
_TAKES |= {"Kthvalue", "Cummax", "Cummin", "Mode"}
"""Operations along an axis, which compare rows, or tell them apart, if it is that of rows."""
_CHOOSES = frozenset("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Slice IndexSelect Gather Flip Roll".split())
"""Those of them that may leave rows of several calls below one another, in another order."""


class _Rows(NamedTuple):
    calls: frozenset[ModuleCall]
    stacked: bool
    joined: bool
    order: Node | None = None  # what has chosen some of them, or put them in another order
    bare: bool = False  # whether it is a single row, without an axis of rows
    united: bool = False  # whether rows i of several calls have become one


def refuse_joined(walk: Walk) -> None:
    """Refuse such outputs, if all that follows treats each of the rows alone: rows ``i`` of all calls would be taken for one sample.

    Args:
        walk: The graph.

    Raises:
        UnsupportedError: If models were called with other data each time, and what they returned was joined.
    """
    found: dict[Node, _Rows | None] = {}  # None where rows of different calls have been compared
    for node in reversed(walk.order if walk.apart else ()):
        roots = [mark.call for mark in walk.marks.get(node, ()) if mark.call.root and not mark.call.is_loss]
        if not walk.reach.get(node) or roots:
            if calls := frozenset(walk.apart[root] for root in roots if root in walk.apart) or _passed_on(roots, found):
                found[node] = _Rows(calls, False, False)
            continue
        given = [found[n] for n, _ in node.next_functions if n in found]
        upstream = [rows for rows in given if rows is not None]
        if given:
            alone = len(upstream) == len(given) or (upstream and shape_of((node, 0)).numel() == 1)  # losses may be added, whatever they are of
            found[node] = _unite(node, upstream) if alone and _keeps_rows(node, found) else None
    for root in walk.roots:
        rows = found.get(root)
        if rows is not None and rows.joined:
            calls = sorted(rows.calls, key=lambda call: call.order)
            raise UnsupportedError(
                f"{calls[0]} was called {len(calls)} times, with different data, and what it returned, of shapes "
                f"{[list(call.outputs[0].shape) for call in calls]}, was joined: whether rows of other calls are other samples, or rows i of all "
                "calls are sample i, is not known. Call the model once for all samples; or extend a module that makes these calls, and returns "
                "what it has joined; or call backward for each loss (backpack(..., accumulate=True)).",
                walk.named(walk.reach[root]),
            )


def _passed_on(models: list[ModuleCall], found: dict[Node, _Rows | None]) -> frozenset[ModuleCall]:
    # the call whose rows, alone, other models were given; else these tell the samples
    edges = [slot.edge for call in models for slot in call.tensor_inputs if slot.edge is not None]
    given = {found[node] for node, _ in edges if node in found}
    alone = all(rows is not None and not (rows.joined or rows.united) for rows in given)
    return next(iter(given)).calls if len(given) == 1 and alone else frozenset()


def _unite(node: Node, upstream: list[_Rows]) -> _Rows | None:
    """Put rows together.

    Args:
        node: A node that treats each row alone, or puts rows below one another.
        upstream: What is known of its inputs.

    Returns:
        What is known of its output; ``None`` where rows of different calls belong to one sample, as each meets another, or all meet those of one.
    """
    name, shape = operation(node), shape_of((node, 0))
    calls, joined = frozenset().union(*(rows.calls for rows in upstream)), [rows for rows in upstream if rows.joined]
    below = len(calls) > 1 and shape[:1] == (sum(call.outputs[0].shape[:1].numel() for call in calls),)
    joins = name in ("Cat", "Stack")
    if len({rows.order for rows in joined}) > 1 and shape.numel() > 1 and not (joins and saved(node, "dim") in (0, -len(shape))):
        return None  # each row meets another one
    if joins:
        if saved(node, "dim") not in (0, -len(shape)):
            return joined[0] if joined else upstream[0] if len(calls) == 1 else _Rows(calls, False, False, united=True)
        if any(rows.united for rows in upstream) and sum(len(rows.calls) for rows in upstream) > len(calls):
            return None
        below = len(calls) > 1 and (name == "Cat" or all(rows.bare for rows in upstream))
        return _Rows(calls, name == "Stack" or any(rows.stacked for rows in upstream), bool(joined) or below)
    if name in _FILLS:
        return _Rows(calls, False, bool(joined) or below)
    if name in RESHAPES and upstream[0].stacked:
        return _Rows(calls, not below, bool(joined) or below)
    if len(upstream) == 1 or len(calls) == 1:
        rows = upstream[0]._replace(bare=_is_bare(node, upstream[0]))
        return rows._replace(order=node) if _chooses(node) else rows
    return _Rows(frozenset().union(*(rows.calls for rows in joined or upstream)), False, bool(joined), united=not joined)


def _turns(node: Node) -> bool:
    # whether an operation moves the first axis elsewhere: behind others, which are longer than one
    name, shape = operation(node), shape_of((node, 0))
    axes = len(shape)
    if name == "Permute":
        dims = [dim % axes for dim in saved(node, "dims")]
        return shape[: dims.index(0)].numel() > 1 if dims else False
    return name == "T" or (name == "Transpose" and bool({saved(node, "dim0"), saved(node, "dim1")} & {0, -axes}))


def _chooses(node: Node) -> bool:
    # whether an operation takes some rows, or all of them in another order, each as a whole
    name, axes = operation(node), len(shape_of((node, 0)))
    if name == "Index":
        rows, *others = saved(node, "indices")
        return rows is not None and rows.dtype.itemsize > 1 and rows.dim() == 1 and not others
    dims = saved(node, "dims" if name in ("Flip", "Roll") else "dim") if name in _CHOOSES else ()
    return any(dim % max(1, axes) == 0 for dim in ((dims,) if isinstance(dims, int) else dims))


def _is_bare(node: Node, rows: _Rows) -> bool:
    # whether what an operation makes of the only row of each call has no axis of rows, as out[0], out.squeeze(0) and list(out); losses are no rows
    given, shape = shape_of(next(edge for edge in node.next_functions if edge[0] is not None)), shape_of((node, 0))
    if shape.numel() == 1 and operation(node) not in _OF_ENTRIES:
        return False
    if rows.bare or given[:1] != (1,) or any(call.outputs[0].shape[:1] != (1,) for call in rows.calls):
        return rows.bare and shape[:1] != (1,)
    dim = saved(node, "dim") if len(shape) < len(given) and has_saved(node, "dim") else ()
    return shape[:1] != (1,) or any(axis % len(given) == 0 for axis in ((dim,) if isinstance(dim, int) else dim or ()))


def _leaves_several(rows: _Rows | None, shape: torch.Size) -> bool:
    # whether rows of different calls are below one another still, or may be put there
    return rows is not None and (not rows.joined or shape[0] > max(call.outputs[0].shape[:1].numel() for call in rows.calls))


def moves_rows(walk: Walk, start: Node) -> bool:
    """Say whether what was taken for samples, rows that a node has made, becomes columns on the way to the root, or meets all other rows.

    Args:
        walk: The graph.
        start: The node.

    Returns:
        Whether it does, as classes do in ``x @ classes.T``.
    """
    rows = {start}
    for node in reversed(walk.order):
        edges, name, shape = node.next_functions, operation(node), shape_of((node, 0))
        places = [place for place, (upstream, _) in enumerate(edges) if upstream in rows]
        if not places:
            continue
        if _turns(node) or (name in ("Mm", "Addmm", "EuclideanDist", "Cdist") and len(edges) - 1 in places):
            return True
        if name == "Unsqueeze" and saved(node, "dim") in (0, -len(shape)):
            return True
        if shape.numel() > 1:
            rows.add(node)
    return False


def _keeps_rows(node: Node, found: dict[Node, _Rows | None]) -> bool:
    """Say whether a node treats each row alone, or puts rows below one another.

    Args:
        node: The node.
        found: Nodes that have rows.

    Returns:
        Whether it does; not so if it is not known.
    """
    name, shape = operation(node), shape_of((node, 0))
    edges = [(place, edge) for place, edge in enumerate(node.next_functions) if edge[0] in found]
    given, rows = shape_of(edges[0][1]), found[edges[0][1][0]]
    if not (name in _OF_ROWS | _FILLS | _FIRST or is_known(node)):
        return False
    if name in RESHAPES:
        return not given or not shape or shape[0] >= given[0]
    if _turns(node):
        return False
    if _chooses(node):
        return _leaves_several(rows, shape)
    if name == "Index":
        chosen = saved(node, "indices")[0]
        return chosen is None or chosen.dtype.itemsize == 1 or len(saved(node, "indices")) > 1
    if name in STACKS:
        return True  # the products are one for each row
    if name in PRODUCTS - _ENTRYWISE | _FIRST:
        return len(edges) == 1 and (name in ("Dot", "Mv") or edges[0][0] == (0 if name in _FIRST else len(node.next_functions) - 2))
    if name in _TAKES or (name in ("Sum", "Mean") and shape.numel() > 1):
        if rows is not None and (rows.bare or _is_bare(node, rows)):
            return True  # along the entries of a single row, or there is but one
        dims = next((saved(node, key) for key in ("dim", "dims") if has_saved(node, key)), None)
        dims = (dims,) if isinstance(dims, int) else dims
        return bool(dims) and all(dim % max(1, len(given)) for dim in dims)
    return True
