"""Networks: what samples contribute to a matrix, as a product of small tensors that is multiplied out no sooner than at the parameters behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import nan, prod
from typing import NamedTuple

import torch
from opt_einsum import contract_path
from torch import Size, Tensor

from backpack.core.derivatives.given import Given
from backpack.core.flow import Columns, Use
from backpack.core.labels import Labels, Operand, aligned, contracted, equation, replaced
from backpack.core.samples import plain_layout

_POSITIONS, _SAMPLES, _COLUMNS = range(3)
_FIRST = 3
"""Of the labels of other axes."""
_ROWS = _COLUMNS, _SAMPLES
Change = Callable[[Tensor, Labels, int], tuple[Tensor, Labels]]


class Reading(NamedTuple):
    """What is multiplied entry by entry: ``scale * place(contribution of a use to its weight)``.

    Attributes:
        use: The use, of which each row belongs to a sample of its own.
        name: Name of the weight there.
        place: Gives tensors ``[*, *weight]`` the shape ``[*, *edge]``.
        scale: Shape of the edge; ``None`` for ones.
    """

    use: Use
    name: str
    place: Callable[[Tensor], Tensor]
    scale: Tensor | None


class Network(NamedTuple):
    """Product of rows, inputs and other tensors, summed over the axes that the edge does not have, and over positions.

    Attributes:
        rows: ``{source: [V, N, *left, L]}``.
        inputs: ``[N, *right, L]``.
        left: Labels of axes of rows, none of which are those of inputs.
        right: Labels of axes of inputs.
        others: Others.
        axes: Labels of the axes of the edge, cut or joined in any way.
        shape: Shape of the edge.
    """

    rows: Columns
    inputs: Tensor
    left: Labels
    right: Labels
    others: tuple[Operand, ...]
    axes: Labels
    shape: Size

    @classmethod
    def of(cls, rows: Columns, inputs: Tensor, turned: bool = False) -> Network:
        """Make that of a matrix.

        Args:
            rows: ``{source: [V, N, O, L]}``.
            inputs: ``[N, K, L]``.
            turned: Whether the matrix is ``[K, O]``, instead of ``[O, K]``.

        Returns:
            The network.
        """
        shape = Size([next(iter(rows.values())).shape[2], inputs.shape[1]])
        left, right = _FIRST, _FIRST + 1
        return cls(rows, inputs, (left,), (right,), (), (right, left) if turned else (left, right), shape[::-1] if turned else shape)

    @property
    def dtype(self) -> torch.dtype:
        """Precision at the edge."""
        return self.inputs.dtype

    def _sizes(self) -> dict[int, int]:
        some = next(iter(self.rows.values()))
        found = dict(zip((*self.left, *self.right), (*some.shape[2:-1], *self.inputs.shape[1:-1]), strict=True))
        return found | dict(chain.from_iterable(zip(other.labels, other.tensor.shape, strict=True) for other in self.others))

    def _fresh(self) -> int:
        return max(self._sizes(), default=_FIRST) + 1

    def _changed(self, change: Change) -> Network:
        # all tensors, which are given with labels and the number of axes in front of those
        rows, left = {}, self.left
        for source, columns in self.rows.items():
            rows[source], left = change(columns, self.left, 2)
        inputs, right = change(self.inputs, self.right, 1)
        others = tuple(Operand(*change(*other, 0)) for other in self.others)
        return self._replace(rows=rows, inputs=inputs, left=left, right=right, others=others)

    def _cut(self) -> tuple[Network, list[Labels]] | None:
        # labels for each axis of the edge; nothing if axes of tensors are no parts of them
        if not self.shape.numel():
            return None
        found, waiting, groups, sizes = self, list(self.axes), [], self._sizes()
        for size in self.shape:
            group: list[int] = [waiting.pop(0)] if size == 1 and waiting and sizes[waiting[0]] == 1 else []
            missing = size
            while missing > 1:
                label = waiting.pop(0)
                if sizes[label] > missing and sizes[label] % missing == 0:
                    found, new = found._split(label, missing)
                    waiting[:0] = new
                    label, sizes = waiting.pop(0), found._sizes()
                if missing % sizes[label]:
                    return None
                missing //= sizes[label]
                group.append(label)
            groups.append(tuple(group))
        return found, groups  # what is left over has length one

    def _split(self, label: int, size: int) -> tuple[Network, Labels]:
        new = self._fresh(), self._fresh() + 1

        def change(tensor: Tensor, labels: Labels, lead: int) -> tuple[Tensor, Labels]:
            return (tensor.unflatten(lead + labels.index(label), (size, -1)), replaced(labels, label, new)) if label in labels else (tensor, labels)

        return self._changed(change)._replace(axes=replaced(self.axes, label, new)), new

    def to(self, dtype: torch.dtype) -> Network:
        """Change the precision.

        Args:
            dtype: The precision.

        Returns:
            The network.
        """
        return self if self.dtype == dtype else self._changed(lambda tensor, labels, _: (tensor.to(dtype), labels))

    def times(self, factor: Tensor) -> Network:
        """Multiply it.

        Args:
            factor: Shape of the edge.

        Returns:
            The network, in which as few tensors as possible are multiplied, by as few numbers as possible.
        """
        sizes = self._sizes()
        factor, labels = factor.reshape([sizes[label] for label in self.axes]), list(self.axes)
        for axis in reversed(range(len(labels) if factor.numel() else 0)):
            first, last = factor.select(axis, 0), factor.select(axis, -1)
            if torch.equal(first, last) and bool((factor == first.unsqueeze(axis)).all()):
                factor = first
                labels.pop(axis)
        if not labels and bool(factor == 1):
            return self
        return self._multiplied(Operand(factor, tuple(labels)))

    def _multiplied(self, other: Operand) -> Network:
        if {*other.labels} <= {*self.right}:
            return self._replace(inputs=self.inputs * aligned(other, self.right).unsqueeze(-1))
        if {*other.labels} <= {*self.left}:
            return self._replace(rows={source: rows * aligned(other, self.left).unsqueeze(-1) for source, rows in self.rows.items()})
        for number, one in enumerate(self.others):
            if {*other.labels} == {*one.labels}:
                product = Operand(one.tensor * aligned(other, one.labels), one.labels)
                return self._replace(others=(*self.others[:number], product, *self.others[number + 1 :]))
        return self._replace(others=(*self.others, other))

    def summed(self, factor: Tensor, shape: Size) -> Network | Columns | None:
        """Multiply it, and sum it to a shape that was broadcast.

        Args:
            factor: Shape of the edge.
            shape: The other shape.

        Returns:
            The sum, which is formed if it has no axes of inputs, or none of rows; ``None`` if axes of tensors are no parts of the summed ones.
        """
        cut = self.times(factor)._cut()
        if cut is None:
            return None
        sizes = *[1] * (len(self.shape) - len(shape)), *shape
        axes = tuple(chain.from_iterable(group for group, size in zip(cut[1], sizes, strict=True) if size > 1))
        found = cut[0]._replace(axes=axes, shape=shape)
        return found.formed() if {*axes} <= {*found.left} or {*axes} <= {*found.right} else found

    def reshaped(self, shape: Size) -> Network:
        """Give the edge another shape.

        Args:
            shape: The shape.

        Returns:
            The network.
        """
        return self._replace(shape=shape)

    def permuted(self, dims: Sequence[int]) -> Network | None:
        """Exchange axes of the edge.

        Args:
            dims: For each of its axes, the axis that it becomes.

        Returns:
            The network; ``None`` if axes of tensors are no parts of them.
        """
        cut = self._cut()
        if cut is None:
            return None
        order = sorted(range(len(dims)), key=dims.__getitem__)
        return cut[0]._replace(axes=tuple(chain.from_iterable(cut[1][axis] for axis in order)), shape=Size(self.shape[axis] for axis in order))

    def matmul(self, other: Tensor, number: int) -> Network | None:
        """Multiply matrices, or stacks of them, with those that are the same for all samples.

        Args:
            other: The others, with which the product ``[*, A, B]`` was made of ``[*, A, R]`` and ``[*, R, B]``.
            number: Whether the others were the first or the second ones: 1 or 0.

        Returns:
            The network of the derivative with respect to these; ``None`` if axes of tensors are no parts of the edge's axes.
        """
        cut = self._cut()
        if cut is None:
            return None
        (found, (*stack, rows, columns)), sizes, new = cut, cut[0]._sizes(), cut[0]._fresh()
        own, width = (rows, other.shape[-1]) if number else (columns, other.shape[-2])
        lead = tuple(chain.from_iterable(stack))
        labels = (*lead, *own, new) if number else (*lead, new, *own)
        operand = Operand(other.reshape([width if label == new else sizes[label] for label in labels]), labels)
        axes, shape = ((*lead, new, *columns) if number else (*lead, *rows, new)), [*self.shape]
        shape[-2 if number else -1] = width
        found = found._replace(axes=axes, shape=Size(shape))
        held = {*own} <= {*found.left}, {*own} <= {*found.right}
        if lead or not any(held) or any({*own} & {*one.labels} for one in found.others):
            return found._replace(others=(*found.others, operand))
        if held[0] and (number or not held[1]):
            left = (*(label for label in found.left if label not in own), new)
            rows = {source: contracted([(mat, found._ends[0]), operand], (*_ROWS, *left, _POSITIONS)) for source, mat in found.rows.items()}
            return found._replace(rows=rows, left=left)
        right = (*(label for label in found.right if label not in own), new)
        return found._replace(inputs=contracted([(found.inputs, found._ends[1]), operand], (_SAMPLES, *right, _POSITIONS)), right=right)

    def along(self, axis: int, function: Callable[[Tensor], Tensor | None], alone: bool, shape: Size) -> Network | None:
        """Apply a linear function to all vectors along an axis of the edge.

        Args:
            axis: The axis.
            function: Takes and returns vectors side by side, ``[size, *]``.
            alone: Whether entries are only moved, so that the function can be applied to each tensor that has the axis.
            shape: New shape of the edge.

        Returns:
            The network; ``None`` if the axis is not that of a single tensor, as it would have to be.
        """
        cut = self._cut()
        if cut is None:
            return None
        found, group, sizes = cut[0], cut[1][axis], cut[0]._sizes()
        group = tuple(label for label in group if sizes[label] > 1) or group[:1]
        if len(group) != 1:
            return None
        (label,), new = group, (found._fresh(),)
        holders = [labels for labels in (found.left, found.right, *(other.labels for other in found.others)) if label in labels]
        if len(holders) > 1 and not alone:
            return None

        def change(tensor: Tensor, labels: Labels, lead: int) -> tuple[Tensor, Labels]:
            if label not in labels:
                return tensor, labels
            at = lead + labels.index(label)
            vectors = tensor.movedim(at, 0)
            mapped = function(vectors.reshape(len(vectors), -1))
            return mapped.reshape(-1, *vectors.shape[1:]).movedim(0, at), replaced(labels, label, new)

        return found._changed(change)._replace(axes=replaced(found.axes, label, new), shape=shape)

    def merged(self, other: Network) -> Network | None:
        """Add another one, if it differs by a factor of each entry.

        Args:
            other: Another one at the same edge.

        Returns:
            Their sum; ``None`` if it is none.
        """
        same = self.rows is other.rows and self.inputs is other.inputs and self.axes == other.axes
        if not (same and self.is_entrywise and other.is_entrywise):
            return None
        one, two = (self.inputs.new_ones(()) if scale is None else scale for scale in (self._scale(), other._scale()))
        return self._replace(others=()).times((one + two).expand(self.shape))

    def joined(self, others: Sequence[Network]) -> Network | None:
        """Add products of rows and inputs that nothing else has come to.

        Args:
            others: Others at the same edge.

        Returns:
            One with more positions; ``None`` if some are no such matrices.
        """
        nets = [self, *others]
        turned = {net.axes == (*net.right, *net.left) for net in nets}
        shapes = {(net.inputs.shape[1:-1], *((source, part.shape[2:-1]) for source, part in net.rows.items())) for net in nets}
        if len(shapes) > 1 or len(turned) > 1 or any(net.others or not net._is_matrix for net in nets):
            return None
        rows = {source: torch.cat([net.rows[source] for net in nets], -1) for source in self.rows}
        return self._replace(rows=rows, inputs=torch.cat([net.inputs for net in nets], -1))

    @property
    def _is_matrix(self) -> bool:
        return self.axes in ((*self.left, *self.right), (*self.right, *self.left))

    @property
    def is_entrywise(self) -> bool:
        """Whether each entry is one of the product of rows and inputs, times a number."""
        return {*self.left, *self.right} == {*self.axes} and all({*other.labels} <= {*self.axes} for other in self.others)

    def _scale(self) -> Tensor | None:
        if not self.others:
            return None
        sizes = self._sizes()
        return prod(aligned(other, self.axes) for other in self.others).expand([sizes[label] for label in self.axes]).reshape(self.shape)

    def _flat(self) -> tuple[Columns, Tensor]:
        return {source: columns.flatten(2, -2) for source, columns in self.rows.items()}, self.inputs.flatten(1, -2)

    def read(self) -> Reading:
        """Read it as the use of a layer, if it is made entry by entry.

        Returns:
            The use of a ``Given``.
        """
        sizes, order = self._sizes(), (*self.left, *self.right)
        rows, inputs = self._flat()
        some = next(iter(rows.values()))
        weight = torch.empty(some.shape[2], inputs.shape[1], dtype=some.dtype, device="meta")
        grad = rows[0][0].unsqueeze(1) if 0 in rows else some.new_full((), nan).expand(some.shape[1], 1, *some.shape[2:])
        value = {source: columns.unsqueeze(2) for source, columns in rows.items()}
        use = Use(Given(inputs.unsqueeze(1), weight), {"weight": weight}, value, grad, plain_layout(len(inputs)))

        def place(part: Tensor) -> Tensor:
            lead = part.shape[:-2]
            apart = part.reshape(*lead, *(sizes[label] for label in order))
            placed = apart.permute(*range(len(lead)), *(len(lead) + order.index(label) for label in self.axes))
            return placed.reshape(*lead, *self.shape)

        return Reading(use, "weight", place, self._scale())

    def sides(self) -> tuple[Columns, Tensor, Tensor | None, bool] | None:
        """Read the two factors of which a matrix without further positions is the product.

        Returns:
            ``{source: [V, N, A]}`` and ``[N, B]``, the scale, ``[A, B]`` or ``[B, A]`` if the matrix is turned, whether it is; ``None`` for others.
        """
        turned = self.axes != (*self.left, *self.right)
        if self.inputs.shape[-1] != 1 or not (self.is_entrywise and self._is_matrix):
            return None
        (rows, inputs), scale = self._flat(), self._scale()
        height, width = next(iter(rows.values())).shape[2], inputs.shape[1]
        scale = scale if scale is None else scale.reshape((width, height) if turned else (height, width))
        return {source: columns[..., 0] for source, columns in rows.items()}, inputs[..., 0], scale, turned

    def formed(self, part: slice = slice(None)) -> Columns:
        """Form it.

        Args:
            part: Samples.

        Returns:
            ``{source: [V, n, *edge]}``, which nobody else holds.
        """
        if self.is_entrywise:
            use, name, place, scale = self.read()
            products = use.per_sample(name, use.parameters[name].shape, part)
            return {source: place(columns) if scale is None else place(columns).mul_(scale) for source, columns in products.items()}
        found, (rows, inputs) = {}, self._ends
        for source, columns in self.rows.items():
            formed = contracted([(columns[:, part], rows), (self.inputs[part], inputs), *self.others], (*_ROWS, *self.axes))
            found[source] = formed.reshape(*formed.shape[:2], *self.shape)
        return found

    @property
    def _ends(self) -> tuple[Labels, Labels]:
        return (*_ROWS, *self.left, _POSITIONS), (_SAMPLES, *self.right, _POSITIONS)

    @property
    def width(self) -> int:
        """Number of entries that are formed for a sample and a column."""
        if self.is_entrywise:
            return self.shape.numel()
        columns, sizes = max(map(len, self.rows.values())), self._sizes() | {_SAMPLES: 1, _POSITIONS: self.inputs.shape[-1]}
        labels = [*self._ends, *(other.labels for other in self.others)]
        shapes = (tuple({_COLUMNS: columns, **sizes}[label] for label in each) for each in labels)
        info = contract_path(equation(labels, (*_ROWS, *self.axes)), *shapes, shapes=True)[1]
        return -(-int(info.largest_intermediate) // columns)
