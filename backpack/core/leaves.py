"""What lies between the weight of a product and the parameter that it comes from: the whole of it, or a part."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from torch.autograd.graph import Node

from backpack.core.derivatives.weight_parts import PartDerivatives
from backpack.core.graph import LEAF, operation, outputs_of, saved, shape_of
from backpack.core.linear import SAME_ENTRIES
from backpack.core.slots import Edge
from backpack.core.walk import Walk

_TRANSPOSES = frozenset({"T", "Transpose", "Permute"})
_RESHAPES = SAME_ENTRIES | {"ToCopy"}
_ONE = frozenset({"Select", "Unbind"})
_CUTS = _ONE | {"Slice", "Split", "SplitWithSizes"}
_MOST = 32
"""Number of blocks up to which rows of unequal parts are cut into blocks."""


def way_to_leaf(edge: Edge, turned: bool) -> list[Node] | None:
    """Return the nodes between an edge and the leaf to which it leads, perhaps through reshapes that undo each other, and a change of precision.

    Args:
        edge: The edge.
        turned: Whether exactly one transposition of a matrix has to lie in between.

    Returns:
        The nodes, last that of the leaf; ``None`` if something else lies there.
    """
    way: list[Node] = []
    if turned:
        if not _turns(edge):
            return None
        way.append(edge[0])
        edge = edge[0].next_functions[0]
    (node, _), shape = edge, shape_of(edge)
    while node is not None and (
        operation(node) in _RESHAPES or (operation(node) == "Expand" and shape_of(node.next_functions[0]) == shape_of((node, 0)))
    ):  # torch.matmul expands what needs no more
        way.append(node)
        node = node.next_functions[0][0]
    return [*way, node] if node is not None and node.name() == LEAF and shape_of((node, 0)) == shape else None


def _turns(edge: Edge) -> bool:
    # whether a matrix is transposed there
    node = edge[0]
    if operation(node) not in _TRANSPOSES or len(shape_of(edge)) != 2:
        return False
    if operation(node) == "Permute":
        return saved(node, "dims")[0] not in (0, -2)
    return operation(node) != "Transpose" or (saved(node, "dim0") - saved(node, "dim1")) % 2 != 0


class Part(NamedTuple):
    """A part of a parameter, as the rows of a matrix.

    Attributes:
        way: The nodes between it and the leaf, which is the last one.
        turned: Whether it is transposed there.
        rows: Which of the rows it holds, those of a stack of matrices counted through.
        total: How many there are.
        groups: Number of equal blocks of rows of which all parts of the parameter consist.
    """

    way: list[Node]
    turned: bool
    rows: range
    total: int
    groups: int


def part_of_leaf(edge: Edge, walk: Walk) -> Part | None:
    """Say for which part of a parameter an edge stands: rows of a matrix that is transposed then, entries of a bias, or a matrix of a stack.

    Args:
        edge: The edge.
        walk: The graph.

    Returns:
        The part; ``None`` if something else lies there, or all of a parameter, or if blocks would be too many.
    """
    way: list[Node] = []
    turned = _turns(edge)
    while operation(edge[0]) == "ToCopy" or (turned and not way):
        way.append(edge[0])
        edge = edge[0].next_functions[0]
    entries = _cut(edge[0])
    if entries is None or not entries[edge[1]] or entries[edge[1]].step != 1:
        return None
    leaf, (start, stop) = edge[0].next_functions[0], (entries[edge[1]].start, entries[edge[1]].stop)
    shape, one = shape_of(leaf), operation(edge[0]) in _ONE
    if len(shape) != (3 if one else 2 if turned else 1):
        return None
    ends = _ends(walk)[leaf[0]]
    groups = shape[0] // gcd(shape[0], *ends)
    if groups > max(_MOST, 2 * len(ends)) and not one:
        return None
    size = 1 if not one else shape[1] if turned else shape[2]
    return Part([*way, edge[0], leaf[0]], turned, range(start * size, stop * size), shape[0] * size, groups)


def _cut(node: Node) -> list[range] | None:
    """Say which entries along the first axis of a leaf the outputs of a node hold.

    Args:
        node: The node.

    Returns:
        Them, for each output; ``None`` if it does something else.
    """
    name = operation(node)
    if name not in _CUTS or node.next_functions[0][0].name() != LEAF:
        return None
    shape = shape_of(node.next_functions[0])
    if saved(node, "dim") not in (0, -len(shape)):
        return None
    entries = range(shape[0])
    if name == "Slice":
        return [entries[saved(node, "start") : saved(node, "end") : saved(node, "step")]]
    if name in _ONE:
        return [entries[i : i + 1] for i in (entries if name == "Unbind" else [saved(node, "index") % len(entries)])]
    sizes = saved(node, "split_sizes") if name == "SplitWithSizes" else [saved(node, "split_size")] * outputs_of(node)
    return [entries[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def _ends(walk: Walk) -> dict[Node, set[int]]:
    # where parts of leaves begin and end
    if walk.ends is None:
        walk.ends = {}
        for node in walk.order:
            for part in _cut(node) or () if node not in walk.leaves else ():
                walk.ends.setdefault(node.next_functions[0][0], set()).update((part.start, part.stop))
    return walk.ends


def block_of(weight: Edge, bias: Edge | None, walk: Walk) -> tuple[PartDerivatives, dict[str, list[Node]]] | None:
    """Say how a product with a part of a weight, and perhaps of a bias, is a layer with all of it.

    Args:
        weight: Edge of the matrix.
        bias: Edge of the bias; ``None`` if there is none.
        walk: The graph.

    Returns:
        The rule, and the nodes between each factor and its leaf; ``None`` if it is no such layer.
    """
    part, ways = part_of_leaf(weight, walk), {}
    if part is None or len(shape_of(weight)) < 2:  # noqa: PLR2004
        return None
    if bias is not None and walk.reach.get(bias[0]):
        beside = part_of_leaf(bias, walk)
        if beside is not None and (beside.rows, beside.total) == (part.rows, part.total):
            ways["bias"] = beside.way
        elif beside is not None or way_to_leaf(bias, False):
            return None
    size = part.total // part.groups
    own = slice(part.rows.start // size, part.rows.stop // size)
    return PartDerivatives(shape_of((part.way[-1], 0)), part.groups, own, not part.turned, "bias" in ways), ways | {"weight": part.way}
