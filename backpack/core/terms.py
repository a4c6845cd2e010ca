"""Terms: what samples contribute to a factor of a product, which is carried to the parameters behind the factor without being formed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, einsum
from torch.autograd.graph import Node

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Samples
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.flow import Columns, Use
from backpack.core.graph import call_once, has_saved, operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.leaves import turns
from backpack.core.linear import SAME_ENTRIES
from backpack.core.samples import plain_layout
from backpack.core.ways import BROADCASTING, ELEMENTWISE
from backpack.utils.subsampling import subsample

_OF_MATRICES = frozenset({"T", "Transpose", "Permute", "Mm"})
_REDUCING = frozenset("Sum Mean Norm LinalgVectorNorm Var Std Logsumexp Amax Amin Max Min".split())
"""Operations of whose results each is made of entries of its own, along some axes."""
_SUMS = frozenset({"Softmax", "WeightNormInterface"})
"""Operations that return a sum of terms for one."""
_LAYOUTS = {LinearDerivatives.weight_from_matrix: False, MatmulDerivatives.weight_from_matrix: True}


class _Product:
    """A layer that multiplies by a matrix, given by views.

    Attributes:
        inputs: ``[N, 1, K, L]``.
        weight: A tensor without data, of the shape ``[O, K]`` of the matrix.
    """

    def __init__(self, inputs: Tensor, weight: Tensor) -> None:
        self.derivatives, self.inputs, self.weight = _PRODUCT, inputs, weight


class _ProductDerivatives(AffineDerivatives):
    """Its rule: matrices of outputs are rows ``[V, N, 1, O, L]`` already."""

    def columns(self, module: Any, subsampling: Samples | slice = None) -> Tensor:
        return subsample(module.inputs, subsampling=subsampling)

    def rows(self, module: Any, mat: Tensor) -> Tensor:
        return mat

    def output_from_rows(self, module: Any, rows: Tensor) -> Tensor:
        return rows


_PRODUCT = _ProductDerivatives()


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


def _reshaped(place: Callable[[Tensor], Tensor], axes: int, shape: Size, part: Tensor) -> Tensor:
    placed = place(part)
    return placed.reshape(*placed.shape[: placed.dim() - axes], *shape)


class Term(NamedTuple):
    """What samples contribute at an edge behind a factor: ``scale * place(contribution of a use to its weight)``.

    Attributes:
        use: The use, of which each row belongs to a sample of its own.
        name: Name of the weight there.
        dtype: Precision at the edge.
        place: Gives tensors ``[*, *weight]`` the shape ``[*, *edge]``.
        turned: Whether the edge is a matrix that is the transposed weight, with the use of a ``_Product``, or the weight; ``None`` for others.
        scale: Shape of the edge; ``None`` for ones.
    """

    use: Use
    name: str
    dtype: torch.dtype
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
            return cls(Use(call, {name: weight}, use.value, use.grad, use.layout), name, slot.dtype, lambda part: part)
        return cls._product({source: rule.rows(call, mat) for source, mat in use.value.items()}, rule.columns(call), turned)

    @classmethod
    def _product(cls, rows: Columns, inputs: Tensor, turned: bool, scale: Tensor | None = None) -> Term:
        some = next(iter(rows.values()))
        weight = torch.empty(some.shape[3], inputs.shape[2], dtype=some.dtype, device="meta")
        grad = rows[0][0] if 0 in rows else some.new_full((), nan).expand(some.shape[1:])
        use = Use(_Product(inputs, weight), {"weight": weight}, rows, grad, plain_layout(len(inputs)))
        return cls(use, "weight", some.dtype, (lambda part: part.mT) if turned else (lambda part: part), turned, scale)

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

    def sides(self) -> tuple[Columns, Tensor] | None:
        """Read the two factors of which a matrix without further positions is the product.

        Returns:
            ``{source: [V, N, rows of the edge]}`` and ``[N, columns of the edge]``, or the other way round if it is turned; ``None`` for others.
        """
        inputs = self.use.call.inputs if self.turned is not None else None
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
        matrix = None if self.turned is None else factor.mT if self.turned else factor
        if matrix is not None and bool((matrix == matrix[:, :1]).all()):
            return plain._multiplied(matrix[:, :1])
        if matrix is not None and bool((matrix == matrix[:1]).all()):
            return self._product(self.use.value, self.use.call.inputs * matrix[0, :, None], self.turned)
        return self._replace(scale=factor)

    def _multiplied(self, factor: Tensor) -> Term:
        use = self.use
        value = {source: columns * factor for source, columns in use.value.items()}
        return self._replace(use=Use(use.call, use.parameters, value, value[0][0] if 0 in value else use.grad, use.layout))

    def _summed(self, factor: Tensor, shape: Size) -> Columns | None:
        # multiplied by what has the shape of the edge, and summed over rows or columns of a matrix, to a shape that was broadcast
        sides = (*[1] * (2 - len(shape)), *shape)
        if self.turned is None or len(sides) > 2 or 1 not in sides:  # noqa: PLR2004
            return None
        factor = factor if self.scale is None else factor * self.scale
        matrix, kept = (factor.mT, sides[::-1]) if self.turned else (factor, sides)
        inputs, found = self.use.call.inputs.squeeze(1), {}
        for source, mat in self.use.value.items():
            rows = mat.squeeze(2)
            if kept[1] == 1:
                sums = (rows * (matrix @ inputs)).sum(-1)
                sums = sums if kept[0] > 1 else sums.sum(-1)
            else:
                sums = (einsum("ok,vnol->vnkl", matrix, rows) * inputs).sum(-1)
            found[source] = sums.reshape(*mat.shape[:2], *shape)
        return found

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
        return self._product({source: mat.to(dtype) for source, mat in self.use.value.items()}, self.use.call.inputs.to(dtype), self.turned, scale)

    def through(self, node: Node, number: int) -> list[Term | Columns] | None:
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
        if name in _SUMS and self.turned is not None and len(full) == 2:  # noqa: PLR2004
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
            found = self if shape == full else self._replace(turned=None, scale=scale, place=partial(_reshaped, self.place, len(full), shape))
        else:
            found = self._through_matrices(node, number) if self.turned is not None and len(shape) == 2 else None  # noqa: PLR2004
        return None if found is None else [found]

    def _through_matrices(self, node: Node, number: int) -> Term | None:
        if turns((node, 0)):
            return self._product(self.use.value, self.use.call.inputs, not self.turned, self.scale if self.scale is None else self.scale.mT)
        other = saved(node, "self" if number else "mat2") if operation(node) == "Mm" and self.scale is None else None
        if other is None or other.layout != torch.strided:
            return None
        other, rows, inputs = other.mT if number else other, self.use.value, self.use.call.inputs
        if bool(number) is self.turned:
            return self._product(rows, other @ inputs, self.turned)
        return self._product({source: other @ mat for source, mat in rows.items()}, inputs, self.turned)

    def _through_sum(self, node: Node, number: int) -> list[Term | Columns] | None:
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
