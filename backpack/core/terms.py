"""Terms: what samples contribute to a factor of a product, which is carried to the parameters behind the factor without being formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import nan, prod
from typing import NamedTuple

import torch
from torch import Size, Tensor, einsum
from torch.autograd.graph import Node

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.given import Given
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.flow import Columns, Use
from backpack.core.graph import call_once, has_saved, operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.leaves import turns
from backpack.core.linear import SAME_ENTRIES
from backpack.core.samples import plain_layout
from backpack.core.ways import BROADCASTING, ELEMENTWISE

_OF_MATRICES = frozenset({"T", "Transpose", "Permute", "Mm"})
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
    return name in ELEMENTWISE | BROADCASTING | SAME_ENTRIES | _OF_MATRICES | {"Mv", "Dot", "Vdot"}


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


def _as_it_is(part: Tensor) -> Tensor:
    return part


def _turned(part: Tensor) -> Tensor:
    return part.mT


def _reshaped(place: Callable[[Tensor], Tensor], axes: int, shape: Size, part: Tensor) -> Tensor:
    placed = place(part)
    return placed.reshape(*placed.shape[: placed.dim() - axes], *shape)


def _sum_to(columns: Tensor, kept: Sequence[int], shape: Size) -> Tensor:
    # axes behind the first two, where one entry is kept of them
    return columns.sum_to_size(*columns.shape[:2], *kept).reshape(*columns.shape[:2], *shape)


class Term(NamedTuple):
    """What samples contribute at an edge behind a factor: ``scale * place(contribution of a use to its weight)``.

    Attributes:
        use: The use, of which each row belongs to a sample of its own.
        name: Name of the weight there.
        dtype: Precision at the edge.
        shape: Shape of the edge.
        place: Gives tensors ``[*, *weight]`` the shape ``[*, *edge]``.
        turned: Whether the edge has the entries of the transposed weight, with the use of a ``Given``, or of the weight; ``None`` for others.
        scale: Shape of the edge; ``None`` for ones.
    """

    use: Use
    name: str
    dtype: torch.dtype
    shape: Size
    place: Callable[[Tensor], Tensor]
    turned: bool | None = None
    scale: Tensor | None = None

    @classmethod
    def of(cls, use: Use, name: str, slot: Tensor) -> Term:
        """Read what a use contributes to a factor.

        Args:
            use: The use, of which each row belongs to a sample of its own.
            name: Name of the factor there.
            slot: Tensor that has its shape and precision.

        Returns:
            The term.
        """
        rule, call, shape = use.call.derivatives, use.call, Size(slot.shape)
        turned = _LAYOUTS.get(rule.weight_layout) if name == "weight" and isinstance(rule, AffineDerivatives) and len(shape) == 2 else None  # noqa: PLR2004
        if turned is None:
            weight = torch.empty(shape, dtype=slot.dtype, device="meta")
            return cls(Use(call, {name: weight}, use.value, use.grad, use.layout), name, slot.dtype, shape, _as_it_is)
        return cls._product({source: rule.rows(call, mat) for source, mat in use.value.items()}, rule.columns(call), turned)

    @classmethod
    def _product(cls, rows: Columns, inputs: Tensor, turned: bool, scale: Tensor | None = None, shape: Size | None = None) -> Term:
        some = next(iter(rows.values()))
        weight = torch.empty(some.shape[3], inputs.shape[2], dtype=some.dtype, device="meta")
        grad = rows[0][0] if 0 in rows else some.new_full((), nan).expand(some.shape[1:])
        use = Use(Given(inputs, weight), {"weight": weight}, rows, grad, plain_layout(len(inputs)))
        matrix, place = (weight.shape[::-1], _turned) if turned else (weight.shape, _as_it_is)
        if shape is None or shape == matrix:
            return cls(use, "weight", some.dtype, matrix, place, turned, scale)
        return cls(use, "weight", some.dtype, shape, partial(_reshaped, place, 2, shape), turned, scale)

    @classmethod
    def spread(cls, columns: Columns, node: Node, number: int) -> Term | None:
        """Carry columns, of which each sample has few, to a matrix of which a node made as few.

        Args:
            columns: ``{source: [V, N, *shape]}``.
            node: The node.
            number: Number of the next edge.

        Returns:
            The term; ``None`` if the node does something else.
        """
        name, shape, few = operation(node), shape_of(node.next_functions[number]), shape_of((node, 0))
        if len(shape) != 2 or outputs_of(node) > 1 or tensor_at((node, 0)).dtype.is_complex:  # noqa: PLR2004
            return None
        if name == "Mv" and number == 0:
            vector = saved(node, "vec")
            return cls._outer(columns, vector, turned=False)
        if name not in _REDUCING:
            return None
        slope = call_once(node, [torch.ones(few, dtype=tensor_at((node, 0)).dtype, device=tensor_at((node, 0)).device)])[number]
        return cls._along(columns, slope, saved(node, "dim") if has_saved(node, "dim") else None)

    @classmethod
    def _outer(cls, columns: Columns, vector: Tensor, turned: bool) -> Term:
        # columns of each sample, one for each row of the matrix (for each of its columns, if it is turned), times a vector that is the same for all
        rows = {source: c.reshape(*c.shape[:2], 1, -1, 1) for source, c in columns.items()}
        samples = next(iter(columns.values())).shape[1]
        return cls._product(rows, vector.expand(samples, -1).reshape(samples, 1, -1, 1), turned)

    @classmethod
    def _along(cls, columns: Columns, slope: Tensor, dims: int | tuple[int, ...] | None) -> Term:
        # columns that are repeated along some axes of a matrix, all if none are named, and multiplied by another
        axes = {axis % 2 for axis in ((dims,) if isinstance(dims, int) else dims or (0, 1))}
        turned = axes == {0}
        height, width = slope.shape[::-1] if turned else slope.shape
        rows = {source: c.reshape(*c.shape[:2], -1).expand(-1, -1, height) for source, c in columns.items()}
        return cls._outer(rows, slope.new_ones(width), turned)._times(slope)

    @property
    def matrix(self) -> Size | None:
        """Shape of the matrix that has the entries of the edge in their order; ``None`` if it is not known to be a product."""
        shape = self.use.parameters[self.name].shape
        return None if self.turned is None else shape[::-1] if self.turned else shape

    def sides(self) -> tuple[Columns, Tensor] | None:
        """Read the two factors of which a matrix without further positions is the product.

        Returns:
            ``{source: [V, N, rows of the matrix]}`` and ``[N, columns of the matrix]``, or the other way round if it is turned; ``None`` for others.
        """
        inputs = self.use.call.columns if self.turned is not None else None
        if inputs is None or inputs.shape[3] != 1:
            return None
        return {source: rows[:, :, 0, :, 0] for source, rows in self.use.value.items()}, inputs[:, 0, :, 0]

    def merged(self, other: Term) -> Term | None:
        """Add another term, if it differs by its scale.

        Args:
            other: Another one at the same edge.

        Returns:
            Their sum; ``None`` if it is none.
        """
        if self.use is not other.use or self.turned is None or self.turned != other.turned:
            return None
        one, two = (1.0 if term.scale is None else term.scale for term in (self, other))
        return self._multiplied(one + two) if isinstance(one + two, float) else self._replace(scale=one + two)

    def formed(self, part: slice = slice(None)) -> Columns:
        """Form it.

        Args:
            part: Samples.

        Returns:
            ``{source: [V, n, *edge]}``, which nobody else holds.
        """
        found = self.use.per_sample(self.name, self.use.parameters[self.name].shape, part)
        for source, columns in found.items():
            placed = self.place(columns.to(self.dtype, copy=self.turned is None))  # what is no product may be a view of what is carried
            found[source] = placed if self.scale is None else placed.mul_(self.scale)
        return found

    def _times(self, factor: Tensor) -> Term:
        # without a scale, if rows or inputs can be multiplied instead
        factor = factor if self.scale is None else factor * self.scale
        if not factor.numel():
            return self
        first, plain = factor.reshape(-1)[0], self._replace(scale=None)
        if bool((factor == first).all()):
            return plain if bool(first == 1) else plain._multiplied(first)
        matrix = None if self.turned is None else self._as_weight(factor)
        if matrix is not None and bool((matrix == matrix[:, :1]).all()):
            return plain._multiplied(matrix[:, :1])
        if matrix is not None and bool((matrix == matrix[:1]).all()):
            return self._product(self.use.value, self.use.call.columns * matrix[0, :, None], self.turned, shape=self.shape)
        return self._replace(scale=factor)

    def _as_weight(self, factor: Tensor) -> Tensor:
        # what has the shape of the edge, with the axes of the weight of the product
        factor = factor.reshape(self.matrix)
        return factor.mT if self.turned else factor

    def _multiplied(self, factor: Tensor) -> Term:
        use = self.use
        value = {source: columns * factor for source, columns in use.value.items()}
        return self._replace(use=Use(use.call, use.parameters, value, value[0][0] if 0 in value else use.grad, use.layout))

    def _summed(self, factor: Tensor, shape: Size) -> Columns | Groups:
        # multiplied by what has the shape of the edge, and summed to a shape that was broadcast
        sides, axes = (*[1] * (len(self.shape) - len(shape)), *shape), self._axes()
        by_rows, by_columns = (axes is not None and all(sides[axis] == 1 for axis in axes[number]) for number in (1, 0))
        if not (by_rows or by_columns):
            return Groups(self, factor, shape, axes)
        factor = self._as_weight(factor if self.scale is None else factor * self.scale)
        inputs, found = self.use.call.columns.squeeze(1), {}
        for source, mat in self.use.value.items():
            rows = mat.squeeze(2)
            sums = (rows * (factor @ inputs)).sum(-1) if by_rows else (einsum("ok,vnol->vnkl", factor, rows) * inputs).sum(-1)
            apart = sums.unflatten(2, [self.shape[axis] for axis in axes[not by_rows]])
            found[source] = _sum_to(apart, [sides[axis] for axis in axes[not by_rows]], shape)
        return found

    def _axes(self) -> tuple[range, range] | None:
        # axes of the edge that belong to the outputs of a product, and to its inputs
        for cut in range(1, len(self.shape)) if self.turned is not None else ():
            if (prod(self.shape[:cut]), prod(self.shape[cut:])) == self.matrix:
                sides = range(cut), range(cut, len(self.shape))
                return sides[::-1] if self.turned else sides
        return None

    def to(self, dtype: torch.dtype) -> Term:
        """Change the precision.

        Args:
            dtype: The precision.

        Returns:
            The term.
        """
        if self.dtype == dtype:
            return self
        scale = self.scale if self.scale is None else self.scale.to(dtype)
        if self.turned is None:
            return self._replace(dtype=dtype, scale=scale)
        rows = {source: mat.to(dtype) for source, mat in self.use.value.items()}
        return self._product(rows, self.use.call.columns.to(dtype), self.turned, scale, self.shape)

    def through(self, node: Node, number: int) -> list[Carried] | None:
        """Carry it from the first output of a node to one of its inputs.

        Args:
            node: The node.
            number: Number of the next edge.

        Returns:
            Terms, or what has been formed of them, where that is small, of which it is the sum; ``None`` if the node does something else.
        """
        name, edge, slot = operation(node), node.next_functions[number], tensor_at((node, 0))
        shape, full, dtype = shape_of(edge), shape_of((node, 0)), tensor_at(edge).dtype
        if slot.dtype.is_complex or dtype.is_complex:
            return None
        if name in _SUMS and self.matrix == full:
            return self.to(dtype)._through_sum(node, number)
        if outputs_of(node) > 1:
            return None
        if name in ELEMENTWISE | BROADCASTING:
            slope = slopes(node, number)
            if slope is None:
                return None
            term, slope = self.to(dtype), slope.to(dtype)
            found = term._times(slope) if shape == full else term._summed(slope, shape)
        elif name in SAME_ENTRIES:
            scale = self.scale if self.scale is None else self.scale.reshape(shape)
            found = self if shape == full else self._replace(shape=shape, scale=scale, place=partial(_reshaped, self.place, len(full), shape))
        else:
            found = self._through_matrices(node, number) if self.matrix == full else None
        return None if found is None else [found]

    def _through_matrices(self, node: Node, number: int) -> Term | None:
        if turns((node, 0)):
            return self._product(self.use.value, self.use.call.columns, not self.turned, self.scale if self.scale is None else self.scale.mT)
        other = saved(node, "self" if number else "mat2") if operation(node) == "Mm" and self.scale is None else None
        if other is None or other.layout != torch.strided:
            return None
        other, rows, inputs = other.mT if number else other, self.use.value, self.use.call.columns
        if bool(number) is self.turned:
            return self._product(rows, other @ inputs, self.turned)
        return self._product({source: other @ mat for source, mat in rows.items()}, inputs, self.turned)

    def _through_sum(self, node: Node, number: int) -> list[Carried] | None:
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
        unit, rate = unit.to(self.dtype), rate.to(self.dtype)  # norms of half precision are single
        sums = self._summed(unit, Size(1 if axis == nr else size for nr, size in enumerate(unit.shape)))
        if operation(node) != "Softmax" and number == 1:
            return [sums]
        return [self._times(rate.expand_as(unit)), self._along(sums, -rate if operation(node) == "Softmax" else -rate * unit, axis)]


class Groups(NamedTuple):
    """What samples contribute at an edge of which the tensor was broadcast: a term, multiplied, and summed over what was repeated.

    Attributes:
        term: The term.
        factor: Shape of its edge.
        shape: Shape of the edge of the tensor.
        axes: Axes of the outputs and of the inputs of which the term is a product; ``None`` for others.
    """

    term: Term
    factor: Tensor
    shape: Size
    axes: tuple[range, range] | None

    @property
    def width(self) -> int:
        """Number of entries that are formed for a sample and a column."""
        return (self.term.shape if self._sides() is None else self.shape).numel()

    def _sides(self) -> tuple[Columns, Tensor] | None:
        return None if self.axes is None else self.term.sides()

    def formed(self, part: slice) -> Columns:
        """Form it.

        Args:
            part: Samples.

        Returns:
            ``{source: [V, n, *edge]}``, which nobody else holds.
        """
        full, sides = self.term.shape, self._sides()
        kept = (*[1] * (len(full) - len(self.shape)), *self.shape)
        if sides is None:
            return {source: _sum_to(columns.mul_(self.factor), kept, self.shape) for source, columns in self.term.formed(part).items()}
        outer, inner = map(list, self.axes)
        samples, columns = len(full), len(full) + 1
        inputs = sides[1][part].unflatten(1, [full[axis] for axis in inner])
        factor = self.factor if self.term.scale is None else self.factor * self.term.scale
        within = [samples, *outer, *(axis for axis in inner if kept[axis] != 1)]
        summed, found = einsum(factor, [*range(samples)], inputs, [samples, *inner], within), {}
        for source, mat in sides[0].items():
            rows, own = mat[:, part].unflatten(2, [full[axis] for axis in outer]), [axis for axis in range(samples) if kept[axis] != 1]
            formed = einsum(rows, [columns, samples, *outer], summed, within, [columns, samples, *own])
            found[source] = formed.reshape(*formed.shape[:2], *self.shape)
        return found


Carried = Term | Columns | Groups
