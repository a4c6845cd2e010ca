"""To which samples the entries of a loss's prediction belong, read off what lies between it and the outputs of modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.batches import rows_of, sample_axis
from backpack.core.crossings import ELEMENTWISE
from backpack.core.graph import call_node, operation, outputs_of, shape_of, tensor_at
from backpack.core.linear import SAME_ENTRIES
from backpack.core.mixing import is_made_of_constants, stands_beside
from backpack.core.origins import FACTORS
from backpack.core.refusals import bare
from backpack.core.samples import Layout, along, layout_of, plain_layout, sum_to
from backpack.core.slots import Edge
from backpack.core.walk import Walk

_DIGITS = 128  # so far integers are exact, and can be told from zero, in every type
_POWERS = [_DIGITS**i for i in range(4)]  # digits for more samples than fit into memory
# selections of entries, none of them twice
_MOVES = SAME_ENTRIES | frozenset(
    """Permute Transpose T Slice Select Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind Index IndexSelect MaskedSelect Flip Roll
    Alias PackPaddedSequence""".split()
)
# selections that may take an entry several times, beside "Index" and "IndexSelect"
_COPIES = frozenset("Expand Repeat Gather Embedding".split())
_JOINS = frozenset({"Cat", "Stack"})
_KEEPS = ELEMENTWISE | frozenset("Mul Div Add Sub Rsub Where MaskedFill Softmax LogSoftmax NativeLayerNorm FusedRmsNorm".split())


def find_samples(walk: Walk, edge: Edge, dim: int | None) -> Layout | None:
    """Find out to which samples the entries of a prediction belong, from the nearest output of a module, of which it is known.

    The positions of the prediction are numbered, and the numbers sent upstream like gradients: selections put them where they come from.

    Args:
        walk: The graph.
        edge: Edge of the prediction.
        dim: Axis of classes, which make one position together; ``None`` if every entry is one.

    Returns:
        The layout; ``None`` where something else lies in between than reshaping, selecting, joining, element-wise operations, normalizations and
        products with matrices of parameters.
    """
    found, shape = _samples_at(walk, edge), shape_of(edge)
    if found is not None and found[0] >= 0:
        return plain_layout(*found)
    if walk.single:
        return _of_one(shape, dim)
    if found is not None:
        return plain_layout(shape[0])
    positions, device = torch.Size(1 if axis == dim else size for axis, size in enumerate(shape)), tensor_at(edge).device
    count = positions.numel()
    powers = [_DIGITS**i for i in range(8) if _DIGITS**i <= max(count, 1)]

    def number() -> Tensor:
        numbers = torch.arange(1, count + 1, device=device).reshape(positions)
        return torch.stack([numbers // power % _DIGITS for power in powers]).expand(-1, *shape)

    parts = _parts_of(walk, edge, number)
    if not parts:
        return _of_copies(walk, edge, dim)
    if len({samples for samples, *_ in parts}) > 1 or (len(parts) > 1 and walk.apart):
        return None
    samples, axis, sent = parts[0]
    if samples < 0:
        return plain_layout(shape[0])
    if sent is None:
        return plain_layout(samples, axis)
    if samples <= 1 or not count:
        return _of_one(shape, dim, samples)
    found_at: list[tuple[Tensor, Tensor]] = []
    for _, axis, sent in parts:
        numbers = sum(part.long() * power for part, power in zip(sent, powers, strict=True))
        owners = along(torch.arange(samples, device=device), axis, numbers.dim()).expand_as(numbers)
        found_at.append((numbers[numbers > 0] - 1, owners[numbers > 0]))
    indices, owners = map(torch.cat, zip(*found_at, strict=True))
    if len(indices) != shape.numel():
        return _of_copies(walk, edge, dim)  # something was selected twice, or comes from elsewhere
    labels = torch.full((count,), -1, device=device)
    labels[indices] = owners
    if (labels[indices] != owners).any():
        return None  # the classes of a position belong to different samples
    return layout_of(labels.reshape(positions), torch.ones(positions, dtype=torch.bool, device=device), samples, 0)


def _of_copies(walk: Walk, edge: Edge, dim: int | None) -> Layout | None:
    """Find out to which samples the entries of a prediction belong where some are copies of one another, as of rows with several labels.

    Args:
        walk: The graph.
        edge: Edge of the prediction.
        dim: Axis of classes; ``None`` if there is none.

    Returns:
        The layout; ``None`` where something else lies in between, or entries come from elsewhere, or for first-order quantities of an output.
    """
    known = not (walk.second_order or walk.returns_loss)  # samples begin at the output then, whatever becomes of it
    found = None if known else _owners_of(walk, edge)
    if found is None:
        return None
    samples, digits = found
    if not shape_of(edge).numel():
        return _of_one(shape_of(edge), dim, samples)
    owners = sum(part.long() * power for part, power in zip(digits, _POWERS, strict=True)) - 1
    labels = owners if dim is None else owners.narrow(dim, 0, 1)
    if (owners < 0).any() or (owners != labels).any():
        return None
    return layout_of(labels, torch.ones_like(labels, dtype=torch.bool), samples, 0)


def _owners_of(walk: Walk, edge: Edge) -> tuple[int, Tensor] | None:
    """Number samples where they begin, and send the numbers downstream, as the nodes' own derivatives do it: to every copy.

    Args:
        walk: The graph.
        edge: Edge of a tensor.

    Returns:
        The number of samples, and the digits of those to which the entries belong, beginning with one, ``[V, *shape]``.
    """
    if (found := _samples_at(walk, edge)) is not None:
        samples, axis = found
        numbers = along(torch.arange(1, samples + 1, device=tensor_at(edge).device), axis, len(shape_of(edge)))
        return None if samples < 0 else (samples, torch.stack([numbers // power % _DIGITS for power in _POWERS]).expand(-1, *shape_of(edge)))
    node, name = edge[0], operation(edge[0])
    ways = [(i, upstream) for i, upstream in enumerate(node.next_functions) if walk.reach.get(upstream[0])]
    if name in _KEEPS:
        return next((_owners_of(walk, upstream) for _, upstream in ways if shape_of(upstream) == shape_of(edge)), None)
    if name in FACTORS:
        return _owners_of_rows(walk, edge)
    if not (name in _JOINS or (name in _MOVES | _COPIES and len(ways) == 1)):
        return None
    parts = [_owners_of(walk, upstream) for _, upstream in ways]
    if None in parts or len({samples for samples, _ in parts}) > 1 or (len(parts) > 1 and walk.apart):
        return None
    zeros = torch.zeros(len(_POWERS), *shape_of(edge), dtype=tensor_at(edge).dtype, device=tensor_at(edge).device, requires_grad=True)
    if not zeros.numel():
        return parts[0][0], zeros
    with torch.enable_grad():
        returned = call_node(node, [zeros if nr == edge[1] else None for nr in range(outputs_of(node))])
        summed = [sum_to(returned[i], shape_of(upstream), 1) for i, upstream in ways]  # expansions leave that to the engine
        (sent,) = torch.autograd.grad(summed, zeros, [digits.to(zeros.dtype) for _, digits in parts])
    return parts[0][0], sent


def _owners_of_rows(walk: Walk, edge: Edge) -> tuple[int, Tensor] | None:
    # the same of a product with a matrix of parameters: its rows, or columns, are those of the other factor

    def is_shared(node: Node) -> bool:
        return bool(walk.batches) and all(is_made_of_constants(walk, node, samples) for samples in walk.batches)

    given = zip((0, -1, -2), ((None, 0), *edge[0].next_functions)[-3:], strict=True)  # what is added, and factors
    varying = [(axis, upstream) for axis, upstream in given if walk.reach.get(upstream[0]) and not is_shared(upstream[0])]
    found = _owners_of(walk, varying[0][1]) if len(varying) == 1 and varying[0][0] else None
    if found is None:
        return None
    samples, digits = found
    owner = digits.narrow(varying[0][0], 0, 1)
    return None if (digits != owner).any() else (samples, owner.expand(-1, *shape_of(edge)))


def _parts_of(walk: Walk, edge: Edge, number: Callable[[], Tensor]) -> list[tuple[int, int, Tensor | None]]:
    """Send numbers upstream, to the nearest outputs of modules of which it is known where samples lie.

    Args:
        walk: The graph.
        edge: Where to begin.
        number: Makes the numbers, ``[V, *shape]``, where they are to be moved.

    Returns:
        For each output the number of samples, their axis, and the numbers that have arrived there, ``None`` if they were not moved; nothing if a path
        leads elsewhere.
    """
    places, parts = [(edge, None)], []
    while places:
        place, sent = places.pop()
        if (found := _samples_at(walk, place)) is not None:
            parts.append((*found, sent))
            continue
        node, name = place[0], operation(place[0])
        ways = [(i, upstream) for i, upstream in enumerate(node.next_functions) if walk.reach.get(upstream[0])]
        if name in _KEEPS:
            ways = [(sent, upstream) for _, upstream in ways if shape_of(upstream) == shape_of(place)][:1]
        elif name in _JOINS or (name in _MOVES and len(ways) == 1):
            sent = (number() if sent is None else sent).to(tensor_at(place).dtype)
            columns = [sent if nr == place[1] else None for nr in range(outputs_of(node))]
            with torch.no_grad():
                returned = call_node(node, columns)
            ways = [(returned[i], upstream) for i, upstream in ways]
        else:
            return []
        if not ways:
            return []
        places += [(upstream, columns) for columns, upstream in ways]
    return parts


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
            if call.root and stands_beside(walk, edge[0], call, shape[0]):
                raise bare(walk, edge[0])
            return (-1, 0) if call.root and size != rows_of(call, walk.marks[edge[0]]) else (size, axis)
    return None
