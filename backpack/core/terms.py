"""Terms: what samples contribute to a factor of a product, which is carried to the parameters behind the factor without being formed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.autograd.graph import Node

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.flow import Columns, Use
from backpack.core.graph import call_node, call_once, has_saved, operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.linear import SAME_ENTRIES, TRANSPOSES
from backpack.core.networks import Network, Reading
from backpack.core.ways import BROADCASTING, ELEMENTWISE

_MATMULS = frozenset({"Mm", "Bmm"})
_MOVING = frozenset({"Slice", "Cat", "Roll", "Flip", "ConstantPadNd"})
"""Operations that move vectors of entries along an axis, or leave some of them out."""
_ALONG = _MOVING | {"Index", "IndexSelect", "Cumsum"}
"""Linear operations along an axis."""
_LAID = frozenset({"Stack", "BlockDiag"})
"""Operations that lay tensors beside each other, along a new axis or several ones."""
_INVERSES = frozenset({"LinalgInvEx", "LinalgSolveEx"})
_REDUCING = frozenset("Sum Mean Norm LinalgVectorNorm Var Std Logsumexp Amax Amin Max Min".split())
"""Operations of whose results each is made of entries of its own, along some axes."""
_SUMS = frozenset({"Softmax", "WeightNormInterface"})
"""Operations that return a sum of terms for one."""
_LAYOUTS = {LinearDerivatives.weight_from_matrix: False, MatmulDerivatives.weight_from_matrix: True}


def carries_terms(node: Node) -> bool:
    """Say whether a node can carry terms, as far as its name tells.

    Args:
        node: The node.

    Returns:
        Whether it can.
    """
    name = operation(node)
    if name in _REDUCING | _SUMS:
        return len(shape_of(node.next_functions[0])) == 2  # noqa: PLR2004
    return name in ELEMENTWISE | BROADCASTING | SAME_ENTRIES | TRANSPOSES | _MATMULS | _ALONG | _LAID | _INVERSES | {"Mv", "Dot", "Vdot"}


def slopes(node: Node, number: int) -> Tensor | None:
    """Return the derivative of each entry that a node makes with respect to the one entry of an input that it is made of.

    Args:
        node: A node with one output that treats entries alone; inputs may be broadcast.
        number: Number of the next edge of the input.

    Returns:
        Shape of the output; ``None`` if the node does not tell.
    """
    slot = tensor_at((node, 0))
    ones = torch.ones(slot.shape, dtype=slot.dtype, device=slot.device)
    found = ones if operation(node) == "Expand" else call_once(node, [ones])[number]  # of which the node returns the sum
    return None if found is None or found.shape != ones.shape else found


def _reshaped(place: Callable[[Tensor], Tensor], axes: int, shape: Size, part: Tensor) -> Tensor:
    placed = place(part)
    return placed.reshape(*placed.shape[: placed.dim() - axes], *shape)


class Term(NamedTuple):
    """What samples contribute at an edge behind a factor that is no matrix: ``scale * place(contribution of a use to its weight)``.

    Attributes:
        use: The use, of which each row belongs to a sample of its own.
        name: Name of the weight there.
        dtype: Precision at the edge.
        whole: Shape before it is summed.
        shape: Shape of the edge.
        place: Gives tensors ``[*, *weight]`` the shape ``[*, *whole]``.
        scale: ``[*whole]``; ``None`` for ones.
    """

    use: Use
    name: str
    dtype: torch.dtype
    whole: Size
    shape: Size
    place: Callable[[Tensor], Tensor]
    scale: Tensor | None = None

    @property
    def width(self) -> int:
        """Number of entries that are formed for a sample and a column."""
        return self.whole.numel()

    def formed(self, part: slice = slice(None)) -> Columns:
        """Form it.

        Args:
            part: Samples.

        Returns:
            ``{source: [V, n, *edge]}``, which nobody else holds.
        """
        found = self.use.per_sample(self.name, self.use.parameters[self.name].shape, part)
        kept = (*[1] * (len(self.whole) - len(self.shape)), *self.shape)
        for source, columns in found.items():
            placed = self.place(columns.to(self.dtype, copy=True))  # may be a view of what is carried
            placed = placed if self.scale is None else placed.mul_(self.scale)
            lead = placed.shape[:2]
            found[source] = placed if self.is_entrywise else placed.sum_to_size(*lead, *kept).reshape(*lead, *self.shape)
        return found

    @property
    def is_entrywise(self) -> bool:
        """Whether each entry is one of the contribution, times a number."""
        return self.whole == self.shape

    def read(self) -> Reading:
        """Read it as the use of a layer, if it is made entry by entry.

        Returns:
            The use.
        """
        return Reading(self.use, self.name, self.place, self.scale)

    def sides(self) -> None:
        """Say that it is not known to be a product."""

    def to(self, dtype: torch.dtype) -> Term:
        """Change the precision.

        Args:
            dtype: The precision.

        Returns:
            The term.
        """
        return self._replace(dtype=dtype, scale=self.scale if self.scale is None else self.scale.to(dtype))

    def times(self, factor: Tensor) -> Term:
        """Multiply it.

        Args:
            factor: Shape of the edge.

        Returns:
            The term.
        """
        return self._replace(scale=factor if self.scale is None else factor * self.scale)

    def summed(self, factor: Tensor, shape: Size) -> Term:
        """Multiply it, and sum it to a shape that was broadcast.

        Args:
            factor: Shape of the edge.
            shape: The other shape.

        Returns:
            The term.
        """
        return self.times(factor)._replace(shape=shape)

    def reshaped(self, shape: Size) -> Term:
        """Give the edge another shape.

        Args:
            shape: The shape.

        Returns:
            The term.
        """
        scale = self.scale if self.scale is None else self.scale.reshape(shape)
        return self._replace(whole=shape, shape=shape, scale=scale, place=partial(_reshaped, self.place, len(self.shape), shape))


Carried = Term | Network | Columns


def start(use: Use, name: str, slot: Tensor) -> Term | Network:
    """Read what a use contributes to a factor.

    Args:
        use: The use, of which each row belongs to a sample of its own.
        name: Name of the factor there.
        slot: Tensor that has its shape and precision.

    Returns:
        What it contributes.
    """
    rule, call, shape = use.call.derivatives, use.call, Size(slot.shape)
    turned = _LAYOUTS.get(rule.weight_layout) if name == "weight" and isinstance(rule, AffineDerivatives) and len(shape) == 2 else None  # noqa: PLR2004
    if turned is not None:
        rows = {source: rule.rows(call, mat).squeeze(2) for source, mat in use.value.items()}
        return Network.of(rows, rule.columns(call).squeeze(1), turned)
    weight = torch.empty(shape, dtype=slot.dtype, device="meta")
    return Term(Use(call, {name: weight}, use.value, use.grad, use.layout), name, slot.dtype, shape, shape, lambda part: part)


def spread(columns: Columns, node: Node, number: int) -> Network | Columns | None:
    """Carry columns, of which each sample has few, to a matrix of which a node made as few.

    Args:
        columns: ``{source: [V, N, *shape]}``.
        node: The node.
        number: Number of the next edge.

    Returns:
        What arrives there; ``None`` if the node does something else.
    """
    name, shape, few = operation(node), shape_of(node.next_functions[number]), shape_of((node, 0))
    if name == "Mv" and number == 1 and not tensor_at((node, 0)).dtype.is_complex:
        return {source: c @ saved(node, "self") for source, c in columns.items()}
    if len(shape) != 2 or len(outputs_of(node)) > 1 or tensor_at((node, 0)).dtype.is_complex:  # noqa: PLR2004
        return None
    if name == "Mv" and number == 0:
        return _outer(columns, saved(node, "vec"), turned=False)
    if name not in _REDUCING:
        return None
    slope = call_once(node, [torch.ones(few, dtype=tensor_at((node, 0)).dtype, device=tensor_at((node, 0)).device)])[number]
    return _repeated(columns, slope, saved(node, "dim") if has_saved(node, "dim") else None)


def _outer(columns: Columns, vector: Tensor, turned: bool) -> Network:
    # columns of each sample, one for each row of the matrix (for each of its columns, if it is turned), times a vector that is the same for all
    rows = {source: c.reshape(*c.shape[:2], -1, 1) for source, c in columns.items()}
    samples = next(iter(columns.values())).shape[1]
    return Network.of(rows, vector.expand(samples, -1).reshape(samples, -1, 1), turned)


def _repeated(columns: Columns, slope: Tensor, dims: int | tuple[int, ...] | None) -> Network:
    # columns that are repeated along some axes of a matrix, all if none are named, and multiplied by another
    axes = {axis % 2 for axis in ((dims,) if isinstance(dims, int) else dims or (0, 1))}
    turned = axes == {0}
    height, width = slope.shape[::-1] if turned else slope.shape
    rows = {source: c.reshape(*c.shape[:2], -1).expand(-1, -1, height) for source, c in columns.items()}
    return _outer(rows, slope.new_ones(width), turned).times(slope)


def through(term: Term | Network, node: Node, number: int) -> list[Carried] | None:
    """Carry what arrives at the first output of a node to one of its inputs.

    Args:
        term: What arrives.
        node: The node.
        number: Number of the next edge.

    Returns:
        Of what it is the sum there, formed where that is small; ``None`` if the node does something else.
    """
    name, edge, slot = operation(node), node.next_functions[number], tensor_at((node, 0))
    shape, full, dtype = shape_of(edge), shape_of((node, 0)), tensor_at(edge).dtype
    if slot.dtype.is_complex or dtype.is_complex or (isinstance(term, Term) and not term.is_entrywise):
        return None
    if name in _SUMS and isinstance(term, Network) and len(full) == 2:  # noqa: PLR2004
        return _through_sum(term.to(dtype), node, number)
    if len(outputs_of(node)) > 1:
        return None
    found = None
    if name in ELEMENTWISE | BROADCASTING:
        slope = slopes(node, number)
        if slope is not None:
            term, slope = term.to(dtype), slope.to(dtype)
            found = term.times(slope) if shape == full else term.summed(slope, shape)
    elif name in SAME_ENTRIES:
        found = term if shape == full else term.reshaped(shape)
    elif isinstance(term, Network):
        found = _through_axes(term, node, number)
    return None if found is None else [found]


def _through_axes(net: Network, node: Node, number: int) -> Network | None:
    name, shape, full = operation(node), shape_of(node.next_functions[number]), shape_of((node, 0))
    if name in TRANSPOSES:
        dims = [*range(len(full))]
        if name == "Permute":
            dims = [dim % len(full) for dim in saved(node, "dims")]
        elif dims:
            one, two = (0, len(full) - 1) if name == "T" else (saved(node, f"dim{which}") % len(full) for which in range(2))
            dims[one], dims[two] = dims[two], dims[one]
        return net.permuted(dims)
    if name in _MATMULS:
        other = saved(node, "self" if number else "mat2")
        return net.matmul(other, number) if other.layout == torch.strided else None
    if name in _LAID:
        return _through_laid(net, node, number)
    if name in _INVERSES:
        return _through_inverse(net, node, number) if len(full) == len(shape) == 2 else None  # noqa: PLR2004
    axis = _axis(node) if name in _ALONG else None
    if axis is None or len(shape) != len(full) or any(i != axis and shape[i] != full[i] for i in range(len(full))):
        return None
    return net.along(axis, partial(_mapped, node, number, axis), name in _MOVING, shape)


def _through_inverse(net: Network, node: Node, number: int) -> Network | None:
    """Carry it from ``X``, the inverse of a matrix ``A``, or what solves ``A X = B``, or ``X A = B``, to ``A`` or ``B``.

    Returns:
        As ``through``: with ``H = A^-T G``, or ``G A^-T``, that is ``H`` for ``B``, and ``-H X^T``, or ``-X^T H``, for ``A``.
    """
    if operation(node) == "LinalgInvEx":
        inverse = saved(node, "inverse")
        found = net.matmul(-inverse, 1)
        return found and found.matmul(inverse, 0)
    matrix, result, left = saved(node, "A"), saved(node, "result"), saved(node, "left")
    sign = 1 if number else -1
    found = net.along(1 - left, lambda vectors: torch.linalg.solve(matrix.mT if left else matrix, sign * vectors), False, net.shape)
    return found if number or found is None else found.matmul(result, 0 if left else 1)


def _through_laid(net: Network, node: Node, number: int) -> Network | None:
    # blocks of a matrix, or slices of a stack
    if operation(node) == "Stack":
        axis = saved(node, "dim") % len(net.shape)
        return net.along(axis, partial(Tensor.narrow, dim=0, start=number, length=1), True, shape_of(node.next_functions[number]))
    shapes = [None if upstream is None else shape_of((upstream, nr)) for upstream, nr in node.next_functions]
    if None in shapes or len(shapes[number]) != 2:  # noqa: PLR2004
        return None  # a constant one, of which nobody knows the size
    found = net
    for axis, length in enumerate(shapes[number]):
        first = sum(shape[axis] if len(shape) == 2 else 1 for shape in shapes[:number])  # noqa: PLR2004
        wanted = Size([length, net.shape[1]] if axis == 0 else shapes[number])
        found = found and found.along(axis, partial(Tensor.narrow, dim=0, start=first, length=length), True, wanted)
    return found


def _axis(node: Node) -> int | None:
    # the only axis along which a node does something
    name, axes = operation(node), len(shape_of((node, 0)))
    if name == "Index":
        indices = saved(node, "indices")
        found = [axis for axis, index in enumerate(indices) if index is not None]
        return found[0] if len(found) == 1 and indices[found[0]].dim() == 1 else None
    if name == "ConstantPadNd":
        pad = saved(node, "pad")
        found = [axes - 1 - at // 2 for at, size in enumerate(pad) if size]
    else:
        dims = saved(node, "dims" if name in ("Roll", "Flip") else "dim")
        found = [dim % axes for dim in ((dims,) if isinstance(dims, int) else dims)]
    return found[0] if len({*found}) == 1 else None


def _mapped(node: Node, number: int, axis: int, vectors: Tensor) -> Tensor:
    # vectors ``[size, *]``, that are laid side by side into what the node takes
    shape, count = list(shape_of((node, 0))), vectors.shape[1]
    size = shape.pop(axis)
    width = Size(shape).numel()
    rounded = torch.nn.functional.pad(vectors, (0, -count % width))
    returned = call_node(node, [rounded.reshape(size, -1, *shape).movedim(0, axis + 1)])[number]
    return returned.movedim(axis + 1, 0).flatten(1)[:, :count]


def _through_sum(net: Network, node: Node, number: int) -> list[Carried] | None:
    """Carry it through a softmax ``p`` of rows or columns, or to the directions ``v``, or the lengths, of ``g v / |v|``.

    Returns:
        As ``through``: ``p * (G - sum(p * G))``; ``s * (G - u * sum(u * G))`` with ``u = v / |v|`` and ``s = g / |v|``, or ``sum(u * G)``.
    """
    axis = saved(node, "dim") % 2
    if operation(node) == "Softmax":
        unit = rate = saved(node, "result")
    else:
        axis, norms = 1 - axis, saved(node, "result1")  # of which the lengths are those
        unit, rate = saved(node, "v") / norms, saved(node, "g") / norms
    unit, rate = unit.to(net.dtype), rate.to(net.dtype)  # norms of half precision are single
    sums = net.summed(unit, Size(1 if axis == nr else size for nr, size in enumerate(unit.shape)))
    if operation(node) != "Softmax" and number == 1:
        return None if sums is None else [sums]
    if not isinstance(sums, dict):
        return None
    return [net.times(rate.expand_as(unit)), _repeated(sums, -rate if operation(node) == "Softmax" else -rate * unit, axis)]
