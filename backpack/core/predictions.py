"""To which samples the entries of a loss's prediction belong, read off what lies between it and the outputs of modules."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack.core.batches import rows_of, sample_axis
from backpack.core.graph import call_once, operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.linear import SAME_ENTRIES
from backpack.core.mixing import is_made_of_constants, stands_beside
from backpack.core.origins import FACTORS
from backpack.core.refusals import bare
from backpack.core.samples import Layout, along, label_tensor, layout_of, plain_layout, sum_to
from backpack.core.selections import rows_of_slice
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.core.ways import ALONG_AXES, BROADCASTING, ELEMENTWISE, layout_behind

_DIGITS = 128  # so far integers are exact, and can be told from zero, in every type
# selections of entries, none of them twice
_MOVES = SAME_ENTRIES | frozenset(
    """Permute Transpose T Slice Select Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind Index IndexSelect MaskedSelect Flip Roll
    Alias PackPaddedSequence""".split()
)
# selections that may take an entry several times, beside "Index" and "IndexSelect"
_COPIES = frozenset("Expand Repeat Gather Embedding".split())
_ELSE = _COPIES | ALONG_AXES  # what samples are followed through where they do not begin at the output of a model anyway
_JOINS = frozenset({"Cat", "Stack"})
_KEEPS = ELEMENTWISE | BROADCASTING - {"Expand"} | frozenset("MaskedFill Softmax LogSoftmax NativeLayerNorm FusedRmsNorm".split())

# the number of samples, -1 if every row is one; where they lie, ``None`` if on no axis; the digits of their numbers, from one on, for each entry of a
# tensor, none if they lie on an axis, ``None`` if that is where they began
_Owners = tuple[int, Layout | None, list[Tensor] | None]


def find_samples(walk: Walk, edge: Edge, dim: int | None) -> Layout | None:
    """Find out to which samples the entries of a prediction belong, from the nearest output of a module, of which it is known.

    Args:
        walk: The graph.
        edge: Edge of the prediction.
        dim: Axis of classes, which make one position together; ``None`` if every entry is one.

    Returns:
        The layout; ``None`` where something else lies in between than reshaping, selecting, joining, element-wise operations and normalizations, or
        copies, products with matrices of parameters, and what sums, pads, pools or resizes along axes without samples, where these do not begin at
        the output of a model anyway.
    """
    found, shape = _samples_at(walk, edge), shape_of(edge)
    if found is not None and found[0] >= 0:
        return plain_layout(*found)
    if walk.single:
        return _of_one(shape, dim)
    owners = _owners_of(walk, edge)
    if owners is None:
        return None
    samples, layout, digits = owners
    if samples < 0:
        return plain_layout(shape[0])
    if layout is not None:
        return layout if digits is None or layout.axis != dim else None  # the classes of a position belong to different samples
    if samples <= 1 or not shape.numel():
        return _of_one(shape, dim, samples)
    numbers = sum(_thin(part).long() * _DIGITS**power for power, part in enumerate(digits)) - 1
    labels = numbers if dim is None else numbers.narrow(dim, 0, 1)
    if (numbers < 0).any() or (numbers != labels).any():
        return None  # something comes from elsewhere, or the classes of a position belong to different samples
    labels = labels.expand(*(1 if axis == dim else size for axis, size in enumerate(shape)))
    return layout_of(labels, torch.ones_like(labels, dtype=torch.bool), samples, 0)


def _thin(tensor: Tensor) -> Tensor:
    # without copies along axes that take no memory: there may be as many as words in a language
    for axis, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(axis, 0, min(1, tensor.shape[axis]))
    return tensor


def _owners_of(walk: Walk, edge: Edge) -> _Owners | None:
    """Follow the samples downstream from where they begin: by their axis, and by numbers that are sent where they leave it.

    Args:
        walk: The graph.
        edge: Edge of a tensor.

    Returns:
        Whose its entries are; ``None`` where one cannot tell.
    """
    known = not (walk.second_order or walk.returns_loss)  # samples begin at the output then, whatever becomes of it
    steps: list[tuple[Edge, int | None, list[tuple[int, Edge]]]] = []
    before: dict[Edge, _Owners] = walk.memo.setdefault("owners", {})
    owners: _Owners | None
    found = None
    while edge not in before and (found := _samples_at(walk, edge)) is None:
        node, name, axis = edge[0], operation(edge[0]), None
        ways = [(i, upstream) for i, upstream in enumerate(node.next_functions) if walk.reach.get(upstream[0])]
        if name in _JOINS and ways:
            break
        same = [way for way in ways if shape_of(way[1]) == shape_of(edge)] if name in _KEEPS else []
        if name in _KEEPS and not known:  # those may be copied along axes, and what meets them may be made of parameters alone
            ways = [way for way in ways if way[1][0] in walk.has_data] or ways
            same = [way for way in same if way in ways]
        if same:
            ways = same[:1]
        elif name in FACTORS and not known:
            axis, ways = _by_rows(walk, ways, len(node.next_functions) - 1)
        elif name not in _MOVES and (known or name not in _ELSE | _KEEPS):
            return None
        if len(ways) != 1 or (known and shape_of(edge).numel() > shape_of(ways[0][1]).numel()):
            return None
        steps.append((edge, axis, [] if same else ways))
        edge = ways[0][1]
    if edge in before:
        owners = before[edge]
    elif found is not None:
        owners = (found[0], plain_layout(*found) if found[0] >= 0 else None, None)
    else:
        parts = [_owners_of(walk, upstream) for _, upstream in ways]
        if None in parts or len({samples for samples, *_ in parts}) > 1 or (len(parts) > 1 and walk.apart):
            return None
        owners = _moved(edge, ways, parts)
    for edge, axis, ways in reversed(steps):
        if ways:
            owners = owners and (_moved(edge, ways, [owners]) if axis is None else _multiplied(edge, ways[0][1], axis, owners))
        if owners is not None and owners[1] is not None:  # what numbers say takes memory
            before[edge] = owners
    return owners


def _digits(owners: _Owners, edge: Edge) -> list[Tensor]:
    # of the numbers, beginning with one
    samples, layout, digits = owners
    if layout is None:
        return digits or []
    shape, tensor, axis = shape_of(edge), tensor_at(edge), layout.axis
    longest = max(range(len(shape)), key=lambda other: (other != axis, shape[other]))  # of classes, as a rule: copies along it take no memory
    places = [1 if other == longest != axis else size for other, size in enumerate(shape)]
    numbers = along(label_tensor(layout.labels, tensor.device) + 1, axis, len(shape)).expand(places).contiguous()
    powers = range(1 + sum(samples >= _DIGITS**power for power in (1, 2, 3)))
    return [(numbers // _DIGITS**power % _DIGITS).to(tensor.dtype).expand(shape) for power in powers]


def _moved(edge: Edge, ways: list[tuple[int, Edge]], parts: list[_Owners]) -> _Owners | None:
    """Follow an axis through a node, or send numbers through one that selects, joins or copies entries, as its own derivative does it: to every copy.

    Args:
        edge: Edge of what the node makes.
        ways: Places, among its arguments, and edges of what it is made of.
        parts: Whose the entries of these are.

    Returns:
        Whose its entries are, those that are joined from constants among them; ``None`` where one cannot tell.
    """
    samples, layout, _ = parts[0]
    if samples < 0:
        return parts[0]
    node, shape, like = edge[0], shape_of(edge), tensor_at(edge)
    if operation(node) in _KEEPS:
        given = shape_of(ways[0][1])
        if layout is None:
            return samples, None, [part.expand(shape) for part in _digits(parts[0], ways[0][1])]
        axis = layout.axis + len(shape) - len(given)
        return (samples, layout._replace(axis=axis), []) if given[layout.axis] == shape[axis] else None
    if layout is not None and all(part[1] == layout for part in parts):
        label = _cut_out(edge, layout) if len(shape) > 1 else None
        whole = None if label is None else Layout(0, (label,) * shape[0], samples)
        behind = whole or layout_behind(node, layout, shape_of(ways[0][1]), shape)
        if behind is not None:
            return samples, behind, []
    if operation(node) not in _MOVES | _COPIES | _JOINS:  # numbers would be summed
        return (samples, None, [torch.ones((1,) * len(shape), dtype=like.dtype, device=like.device).expand(shape)]) if samples == 1 else None
    column = torch.zeros((1,) * len(shape), dtype=like.dtype, device=like.device, requires_grad=True).expand(shape)
    given = [_digits(part, upstream) for part, (_, upstream) in zip(parts, ways, strict=True)]
    if not column.numel():
        return samples, None, [column for _ in given[0]]
    with torch.enable_grad():
        returned = call_once(node, [column if nr == edge[1] else None for nr in range(len(outputs_of(node)))])
        summed = [sum_to(returned[i], shape_of(upstream), 0) for i, upstream in ways]  # expansions leave that to the engine
        columns = [[_thin(part).to(like.dtype).contiguous().expand_as(part) for part in one] for one in zip(*given, strict=True)]
        return samples, None, [torch.autograd.grad(summed, column, one, retain_graph=True)[0] for one in columns]


def _cut_out(edge: Edge, layout: Layout) -> int | None:
    # the only sample of which something was cut out along the axis of samples
    node, name, axes = edge[0], operation(edge[0]), len(shape_of(edge))
    if name not in ("Select", "Unbind", "Slice") or saved(node, "dim") % (axes + (name != "Slice")) != layout.axis:
        return None
    if name == "Slice":
        labels = {*layout.labels[rows_of_slice(node)]}
        return labels.pop() if len(labels) == 1 else None
    return layout.labels[edge[1] if name == "Unbind" else saved(node, "index")]


def _by_rows(walk: Walk, ways: list[tuple[int, Edge]], last: int) -> tuple[int | None, list[tuple[int, Edge]]]:
    # the axis along which a product with a matrix of parameters mixes entries, and the other factor, whose rows, or columns, are those of the product

    def is_shared(edge: Edge) -> bool:
        return bool(walk.batches) and all(is_made_of_constants(walk, edge[0], samples) for samples in walk.batches)

    for axis, factor in ((-1, last - 1), (-2, last)):
        if all(i == factor or is_shared(edge) for i, edge in ways):
            return axis, [way for way in ways if way[0] == factor]
    return None, []


def _multiplied(edge: Edge, factor: Edge, axis: int, owners: _Owners) -> _Owners | None:
    # whose the entries of a product are, of which a factor has owners; they are the same along an axis
    samples, layout, _ = owners
    if samples < 0:
        return owners
    if layout is not None and not layout.of_one:
        return None if layout.axis == axis % len(shape_of(factor)) else (samples, layout, [])
    digits = _digits(owners, factor)
    ones = [part.narrow(axis, 0, 1) for part in digits]
    same = all(bool((part == one).all()) for part, one in zip(digits, ones, strict=True))
    return (samples, None, [one.expand(shape_of(edge)) for one in ones]) if same else None


def _of_one(shape: torch.Size, dim: int | None, samples: int = 1) -> Layout:
    """Give all entries of a prediction to the only sample: any axis would do.

    Args:
        shape: Shape of the prediction.
        dim: Axis of classes; ``None`` if there is none.
        samples: Number of samples, one or none.

    Returns:
        The layout.
    """
    axis = next(axis for axis in range(len(shape)) if axis != dim)
    return Layout(axis, (0,) * shape[axis], samples)


def _samples_at(walk: Walk, edge: Edge) -> tuple[int, int] | None:
    """Count the samples of a tensor, if it is the output of a module.

    Args:
        walk: The graph.
        edge: Edge of the tensor.

    Returns:
        Their number, and the axis on which they lie; -1 if it is the output of an outermost module whose input has another number of rows, so that
        every row is one; ``None`` if it is no output, or that of an inner module, with something else than samples on the axis.

    Raises:
        bare: If it is made of parameters and constants.
    """
    for mark in reversed(walk.marks.get(edge[0], ())):
        call, shape = mark.call, mark.call.outputs[mark.index].shape
        axis = sample_axis(call, mark.index)
        size = shape[axis] if axis < len(shape) else None
        if mark.nr == edge[1] and not mark.base and not call.is_loss and shape and (call.root or size in walk.batches):
            if (call.root or not walk.second_order) and stands_beside(walk, edge[0], call, shape[0]):
                if call.root:
                    raise bare(walk, edge[0])
                continue
            return (-1, 0) if call.root and size != rows_of(call, walk.marks[edge[0]]) else (size, axis)
    return None
