"""Joining: outputs of several calls of a model, one below the other, of which nothing tells whether their rows are different samples."""

from __future__ import annotations

from typing import NamedTuple

from torch.autograd.graph import Node

from backpack.core.calls import ModuleCall
from backpack.core.crossings import ELEMENTWISE
from backpack.core.graph import has_saved, operation, saved, shape_of
from backpack.core.linear import LINEAR, PIECEWISE_LINEAR, PRODUCTS
from backpack.core.loss_nodes import FUNCTIONS
from backpack.core.walk import Walk
from backpack.utils.errors import UnsupportedError

_KNOWN = LINEAR | PIECEWISE_LINEAR | ELEMENTWISE | PRODUCTS | FUNCTIONS.keys()
_KNOWN |= frozenset("Div NllLoss NllLoss2D MultiMarginLoss Softmax Logsumexp Norm LinalgVectorNorm Prod Var Std torch::autograd::CopySlices".split())
_ENTRYWISE = ELEMENTWISE | {"Mul", "Div", "Addcmul"}
_VIEWS = frozenset("View UnsafeView ReshapeAlias".split())
_TAKES = frozenset("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind Slice Select Narrow IndexSelect Gather Flip Roll".split())
_TAKES |= {"Softmax", "LogSoftmax", "Logsumexp", "Norm", "LinalgVectorNorm", "Prod", "Var", "Std", "Cumsum"}
"""Operations along an axis, which compare rows, or tell them apart, if it is that of rows."""


class _Rows(NamedTuple):
    calls: frozenset[ModuleCall]
    intact: bool
    joined: bool


def refuse_joined(walk: Walk) -> None:
    """Refuse such outputs, if all that follows treats each of the rows alone: rows ``i`` of all calls would be taken for one sample.

    Args:
        walk: The graph.

    Raises:
        UnsupportedError: If models were called with other data each time, and what they returned was joined.
    """
    found: dict[Node, _Rows] = {}
    for node in reversed(walk.order if walk.apart else ()):
        calls = frozenset(mark.call for mark in walk.marks.get(node, ()) if mark.call in walk.apart)
        if calls:
            found[node] = _Rows(calls, True, False)
            continue
        upstream = [found[n] for n, _ in node.next_functions if n in found]
        if not upstream:
            continue
        calls, intact = frozenset().union(*(rows.calls for rows in upstream)), all(rows.intact for rows in upstream) and _keeps_rows(node, found)
        shape, shapes = shape_of((node, 0)), [call.outputs[0].shape for call in calls if call.outputs[0].shape]
        here = len(calls) > 1 and len(shape) <= max(map(len, shapes), default=0) and shape[:1] == (sum(given[0] for given in shapes),)
        found[node] = _Rows(calls, intact, here or any(rows.joined for rows in upstream))
    for root in walk.roots:
        if root in found and found[root].intact and found[root].joined:
            calls = found[root].calls
            call = next(iter(calls))
            raise UnsupportedError(
                f"{call} was called {len(calls)} times, with different data, and what it returned, of shapes "
                f"{[list(call.outputs[0].shape) for call in calls]}, was joined: whether rows of other calls are other samples, or rows i of all "
                "calls are sample i, is not known. Call the model once for all samples; or extend a module that makes these calls, and returns "
                "what it has joined; or call backward for each loss (backpack(..., accumulate=True)).",
                walk.named(walk.reach[root]),
            )


def _keeps_rows(node: Node, found: dict[Node, _Rows]) -> bool:
    """Say whether a node treats each row alone, or puts rows below one another.

    Args:
        node: The node.
        found: Nodes that have rows.

    Returns:
        Whether it does; not so if it is not known.
    """
    name, shape = operation(node) or node.name(), shape_of((node, 0))
    edges = [(place, edge) for place, edge in enumerate(node.next_functions) if edge[0] in found]
    given = shape_of(edges[0][1])
    if name not in _KNOWN:
        return False
    if name in _VIEWS:
        return not given or not shape or shape[0] >= given[0]
    if name in ("T", "Transpose", "Permute", "Mt", "Movedim"):
        return len(given) == len(shape) > 0 and given[0] == shape[0] and name == "Permute" and saved(node, "dims")[0] == 0
    if name == "Index":
        rows = saved(node, "indices")[0]
        return rows is None or rows.dtype.itemsize == 1 or len(saved(node, "indices")) > 1
    if name in PRODUCTS - _ENTRYWISE:
        return len(edges) == 1 and (name in ("Dot", "Mv") or edges[0][0] == len(node.next_functions) - 2)
    if name in _TAKES or (name in ("Sum", "Mean") and shape.numel() > 1):
        dims = saved(node, "dim") if has_saved(node, "dim") else None
        dims = (dims,) if isinstance(dims, int) else dims
        return bool(dims) and all(dim % max(1, len(given)) for dim in dims)
    return True
