"""What lies between the weight of a product and the parameter that it comes from: the whole of it, or a part."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import gcd, prod
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.derivatives.rearranged import Axes, RearrangedDerivatives
from backpack.core.derivatives.weight_parts import PartDerivatives
from backpack.core.graph import LEAF, has_saved, operation, outputs_of, saved, shape_of
from backpack.core.linear import SAME_ENTRIES, TRANSPOSES
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.utils.differentiation import search

_RESHAPES = SAME_ENTRIES | {"ToCopy"}
_REARRANGES = TRANSPOSES | _RESHAPES | {"Clone", "Expand", "Alias"}
_ONE = frozenset({"Select", "Unbind"})
_CUTS = _ONE | {"Slice", "Split", "SplitWithSizes"}
_JOINS = _REARRANGES | _CUTS | {"Cat", "Stack"}
SHIFTS = frozenset({"Add", "Sub"})
"""Operations that may add a constant to a parameter, as where its rounded values are used."""
_MOST = 32
"""Number of blocks up to which rows of unequal parts are cut into blocks."""


def way_to_leaf(edge: Edge, turned: bool) -> list[Node] | None:
    """Return the nodes between an edge and the leaf to which it leads, through reshapes that undo each other, constants added, changes of precision.

    Args:
        edge: The edge.
        turned: Whether exactly one transposition of a matrix, or of those of a stack, has to lie in between.

    Returns:
        The nodes, last that of the leaf; ``None`` if something else lies there.
    """
    way: list[Node] = []
    if turned:
        if not turns(edge):
            return None
        way.append(edge[0])
        edge = edge[0].next_functions[0]
    (node, _), shape = edge, shape_of(edge)
    while node is not None:
        # torch.matmul expands what needs no more
        if operation(node) in _RESHAPES or (operation(node) == "Expand" and shape_of(node.next_functions[0]) == shape_of((node, 0))):
            upstream = node.next_functions[0]
        elif (upstream := _shifted(node)) is None:
            break
        way.append(node)
        node = upstream[0]
    return [*way, node] if node is not None and node.name() == LEAF and shape_of((node, 0)) == shape else None


def _shifted(node: Node) -> Edge | None:
    # to what a node adds a constant of its shape, or from what it subtracts one
    found = [(number, edge) for number, edge in enumerate(node.next_functions) if edge[0] is not None]
    if operation(node) not in SHIFTS or len(found) != 1 or shape_of(found[0][1]) != shape_of((node, 0)):
        return None
    ((number, edge),) = found
    return None if number and (operation(node) != "Add" or saved(node, "alpha") != 1) else edge


class Multiple(NamedTuple):
    """A multiple of a parameter, as with an equalized learning rate: ``weight * scale``, ``weight / sqrt(inputs)``.

    Attributes:
        way: The nodes between it and the leaf, which is the last one.
        axes: Which axes of the parameter a product ``x @ matrix`` sums over.
        factors: The nodes that multiply by a number, or divide by one.
    """

    way: list[Node]
    axes: Axes
    factors: list[Node]

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """Multiply inputs instead of the parameter.

        Args:
            inputs: Any tensor.

        Returns:
            Its multiple.
        """
        for node in self.factors:
            number = _number(node)
            inputs = inputs / number if operation(node) == "Div" else inputs * number
        return inputs


def multiple_of_leaf(edge: Edge) -> Multiple | None:
    """Say of which parameter a matrix is a multiple, perhaps transposed.

    Args:
        edge: The edge.

    Returns:
        The multiple; ``None`` if something else lies there, or no number.
    """
    way, turned, factors, (node, _) = [], False, [], edge
    while node.name() != LEAF:
        if operation(node) in TRANSPOSES and turns((node, 0)):
            turned = not turned
        elif _number(node) is not None:
            factors.append(node)
        else:
            return None
        way.append(node)
        node = next(n for n, _ in node.next_functions if n is not None)
    shape = shape_of((node, 0))
    return None if not factors else Multiple([*way, node], Axes(shape, shape, [], inputs=[int(turned)], outputs=[int(not turned)]), factors)


def _number(node: Node) -> Tensor | float | None:
    # by which a node multiplies its only input, or divides it
    if operation(node) == "Neg":
        return -1.0
    given = [n is not None for n, _ in node.next_functions]
    if operation(node) not in ("Mul", "Div") or sum(given) != 1 or (has_saved(node, "rounding_mode") and saved(node, "rounding_mode")):
        return None
    number = saved(node, "other" if given[0] else "self") if operation(node) == "Mul" or given[0] else None
    return None if isinstance(number, Tensor) and number.dim() else number


def turns(edge: Edge) -> bool:
    """Say whether a matrix, or those of a stack, are transposed.

    Args:
        edge: Edge to them.

    Returns:
        Whether the two last axes, and no other ones, are exchanged there.
    """
    node, axes = edge[0], len(shape_of(edge))
    if operation(node) not in TRANSPOSES or axes < 2:  # noqa: PLR2004
        return False
    if operation(node) == "Permute":
        return [dim % axes for dim in saved(node, "dims")] == [*range(axes - 2), axes - 1, axes - 2]
    return operation(node) == "T" or {saved(node, "dim0") % axes, saved(node, "dim1") % axes} == {axes - 1, axes - 2}


def joins_leaves(node: Node, walk: Walk, bias: bool = False) -> bool:
    """Say whether entries of parameters are only moved, or laid beside constants, like weights of further classes beside those of known ones.

    Args:
        node: A node.
        walk: The graph.
        bias: Whether what it makes is a bias, in which no samples lie.

    Returns:
        Whether they are: a constant is a buffer, or a frozen parameter, as far as shapes tell.
    """
    for n in search([node]):
        if n.name() != LEAF and (operation(n) not in _JOINS or not (bias or _is_beside_own(n, walk))):
            return False
    return True


def _is_beside_own(node: Node, walk: Walk) -> bool:
    # whether a part that depends on no parameter has the shape of a constant that an outermost module owns
    parts, shape = [edge for edge in node.next_functions if edge[0] is not None], list(shape_of((node, 0)))
    if len(parts) == len(node.next_functions):
        return True
    if operation(node) != "Cat" or len(parts) != len(node.next_functions) - 1:
        return False
    axis = saved(node, "dim") % len(shape)
    shape[axis] -= sum(shape_of(edge)[axis] for edge in parts)
    modules = [call.module for call in walk.outermost]
    return any([*t.shape] == shape for m in modules for own in (m.buffers(), m.parameters()) for t in own if not t.requires_grad)


class Part(NamedTuple):
    """A part of a parameter, as the rows, or columns, of a matrix.

    Attributes:
        way: The nodes between it and the leaf, which is the last one.
        turned: Whether it is transposed there.
        rows: Which of the rows it holds, those of a stack of matrices counted through.
        total: How many there are.
        groups: Number of equal blocks of rows of which all parts of the parameter consist.
        axis: Along which axis of the parameter these lie.
    """

    way: list[Node]
    turned: bool
    rows: range
    total: int
    groups: int
    axis: int


def part_of_leaf(edge: Edge, walk: Walk) -> Part | None:
    """Say for which part of a parameter an edge stands: rows or columns of a matrix, entries of a bias, or a matrix of a stack.

    Args:
        edge: The edge.
        walk: The graph.

    Returns:
        The part; ``None`` if something else lies there, or all of a parameter, or if blocks would be too many.
    """
    way: list[Node] = []
    turned = False
    while operation(edge[0]) == "ToCopy" or (len(shape_of(edge)) == 2 and turns(edge)):  # noqa: PLR2004
        turned ^= operation(edge[0]) != "ToCopy"
        way.append(edge[0])
        edge = edge[0].next_functions[0]
    entries = _cut(edge[0])
    if entries is None or not entries[edge[1]] or entries[edge[1]].step != 1:
        return None
    part, behind, one = entries[edge[1]], _behind(edge[0]), operation(edge[0]) in _ONE
    turned ^= len(behind) > 1
    shape, axis = shape_of((behind[-1], 0)), _axis_of(edge[0])
    ends = _ends(walk)[behind[-1], axis]
    if len(shape) == 3 if not one else len(shape) != 3:  # noqa: PLR2004
        return None
    groups = shape[axis] // gcd(shape[axis], *ends)
    if groups > max(_MOST, 2 * len(ends)) and not one:
        return None
    size = 1 if not one else shape[1] if turned else shape[2]
    return Part([*way, edge[0], *behind], turned, range(part.start * size, part.stop * size), shape[axis] * size, groups, axis)


def _axis_of(node: Node) -> int:
    # along which axis of its input a node cuts
    return saved(node, "dim") % len(shape_of(node.next_functions[0]))


def _cut(node: Node) -> list[range] | None:
    """Say which entries along an axis of a leaf the outputs of a node hold: the first one, or the second of a matrix.

    Args:
        node: The node.

    Returns:
        Them, for each output; ``None`` if it does something else.
    """
    name = operation(node)
    if name not in _CUTS or _behind(node)[-1].name() != LEAF:
        return None
    shape, axis = shape_of(node.next_functions[0]), _axis_of(node)
    if axis and (len(shape) != 2 or name in _ONE):  # noqa: PLR2004
        return None
    entries = range(shape[axis])
    if name == "Slice":
        return [entries[saved(node, "start") : saved(node, "end") : saved(node, "step")]]
    if name in _ONE:
        return [entries[i : i + 1] for i in (entries if name == "Unbind" else [saved(node, "index") % len(entries)])]
    sizes = saved(node, "split_sizes") if name == "SplitWithSizes" else [saved(node, "split_size")] * len(outputs_of(node))
    return [entries[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def _behind(node: Node) -> list[Node]:
    # what a node cuts, perhaps behind a node that transposes all matrices of a stack
    edge = node.next_functions[0]
    return [edge[0], edge[0].next_functions[0][0]] if len(shape_of(edge)) == 3 and turns(edge) else [edge[0]]  # noqa: PLR2004


def _ends(walk: Walk) -> dict[tuple[Node, int], set[int]]:
    # where parts of leaves begin and end, along an axis
    if walk.ends is None:
        walk.ends = {}
        for node in walk.order:
            for part in _cut(node) or () if node not in walk.leaves else ():
                walk.ends.setdefault((_behind(node)[-1], _axis_of(node)), set()).update((part.start, part.stop))
    return walk.ends


def part_of(weight: Edge, bias: Edge | None, walk: Walk) -> tuple[PartDerivatives | RearrangedDerivatives, dict[str, list[Node]]] | None:
    """Say how a product with a part of a weight, and perhaps of a bias, or with a weight in another shape, is a layer with the weight itself.

    Args:
        weight: Edge of the matrix, or of a stack.
        bias: Edge of the bias; ``None`` if there is none.
        walk: The graph.

    Returns:
        The rule, and the nodes between each factor and its leaf; ``None`` if it is no such layer, or simply one.
    """
    if way_to_leaf(weight, False):
        return None
    bias, part = bias if bias is not None and walk.reach.get(bias[0]) else None, part_of_leaf(weight, walk)
    if part is None:
        found = axes_of(weight, left=False)
        rule = None if found is None else RearrangedDerivatives(found[0], len(shape_of(weight)) > 2, left=False)  # noqa: PLR2004
        return None if rule is None or not (bias is None or rule.keeps_order) else (rule, {"weight": found[1]})
    beside = part_of_leaf(bias, walk) if bias is not None and len(shape_of(bias)) == 1 else None
    if beside is None and bias is not None and way_to_leaf(bias, False):
        return None
    if beside is not None and (beside.rows, beside.total) != (part.rows, part.total):
        return None
    size = part.total // part.groups
    own, shape = slice(part.rows.start // size, part.rows.stop // size), shape_of((part.way[-1], 0))
    if bias is not None and len(shape) == 2 and part.turned is bool(part.axis):  # noqa: PLR2004  inputs are cut, and outputs are not
        return None
    rule = PartDerivatives(shape, part.groups, own, not part.turned, beside is not None, part.axis)
    return rule, {"weight": part.way} | ({} if beside is None else {"bias": beside.way})


def stack_of_all(edge: Edge, parts: tuple[int, ...]) -> tuple[list[Node], Edge] | None:
    """Find the stack of matrices that is repeated for each sample, as ``torch.matmul`` does where samples have a stack of inputs.

    Args:
        edge: Edge of the matrices of all samples.
        parts: Number of samples, and of matrices of each.

    Returns:
        The nodes that repeat the stack, and its edge; ``None`` if these are no repeated ones.
    """
    way, node = [], edge[0]
    while operation(node) in _RESHAPES | {"Clone"}:
        way.append(node)
        node = node.next_functions[0][0]
    matrices = shape_of(edge)[1:]
    if operation(node) != "Expand" or shape_of((node, 0)) != (*parts, *matrices):
        return None
    way.append(node)
    edge = node.next_functions[0]
    while shape_of(edge) == (1, *parts[1:], *matrices) and operation(edge[0]) in _RESHAPES:
        way.append(edge[0])
        edge = edge[0].next_functions[0]
    return (way, edge) if shape_of(edge) == (*parts[1:], *matrices) else None


def axes_of(edge: Edge, left: bool) -> tuple[Axes, list[Node]] | None:
    """Say how the axes of matrices are made of those of a parameter.

    Args:
        edge: Edge of a matrix, or of a stack of them.
        left: Whether they are the left factor of a product: then it sums over their last axis.

    Returns:
        The axes, and the nodes up to the leaf; ``None`` if something else is done with the parameter.
    """
    way, node = [], edge[0]
    while node is not None and operation(node) in _REARRANGES:
        way.append(node)
        node = node.next_functions[0][0]
    if node is None or node.name() != LEAF or len(shape_of(edge)) not in (2, 3):
        return None
    shape = shape_of((node, 0))
    sizes = dict(enumerate(shape))
    order, axes = [*sizes], [[axis] for axis in sizes]  # of the parameter, and of what is made of it
    for made in reversed(way):
        axes = _rearranged(made, axes, order, sizes)
        if axes is None:
            return None
    order = [axis for axis in order if sizes[axis] > 1]
    *stack, first, last = [[order.index(axis) for axis in axes_] for axes_ in ([a for a in part if sizes[a] > 1] for part in axes)]
    return Axes(shape, [sizes[axis] for axis in order], *(stack or [[]]), *((last, first) if left else (first, last))), [*way, node]


def _rearranged(node: Node, axes: list[list[int]], order: list[int], sizes: dict[int, int]) -> list[list[int]] | None:
    """Follow axes through an operation.

    Args:
        node: Its node.
        axes: Of what each axis of the input consists.
        order: Order of these axes in the parameter, which may be cut into shorter ones.
        sizes: Their lengths.

    Returns:
        Of what each axis of the output consists; ``None`` if it repeats entries, or cuts axes unevenly.
    """
    name, count = operation(node), len(axes)
    if name == "Permute":
        return [axes[dim % count] for dim in saved(node, "dims")]
    if name in TRANSPOSES:
        one, other = (0, 1) if name == "T" else (saved(node, "dim0") % count, saved(node, "dim1") % count)
        places = [*range(count)]
        places[one], places[other] = other, one
        return [axes[place] for place in places]
    shape, left = shape_of((node, 0)), [axis for part in axes for axis in part if sizes[axis] != 1]
    if shape.numel() != prod(sizes.values()) or not shape.numel():
        return None
    found: list[list[int]] = []
    for size in shape:
        part: list[int] = []
        while (missing := size // prod(sizes[axis] for axis in part)) > 1:
            axis = left.pop(0)
            if sizes[axis] > missing:
                if sizes[axis] % missing:
                    return None
                rest = max(sizes) + 1
                sizes[axis], sizes[rest] = missing, sizes[axis] // missing
                order.insert(order.index(axis) + 1, rest)
                left.insert(0, rest)
            elif missing % sizes[axis]:
                return None
            part.append(axis)
        found.append(part)
    return found
