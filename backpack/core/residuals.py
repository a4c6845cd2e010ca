"""Second derivatives of graph nodes that no rule covers, as columns with signs: what a node adds to the Hessian of each sample.

A node ``z = f(x, y, ...)`` with gradient ``g`` adds ``sum_k g_k Hess f_k``, a matrix over the entries of all its inputs. It is a sum of signed
squares of columns, each of which lives on several inputs at once.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.autograd.graph import Node
from torch.func import vjp, vmap

from backpack.core.crossings import Gap
from backpack.core.graph import operation, saved, shape_of, tensor_at
from backpack.core.linear import SAME_ENTRIES, TRANSPOSES
from backpack.core.node_functions import Product, axes_of, coupling, is_known, is_plain_attention, product
from backpack.core.samples import Layout, along, label_tensor, plain_layout, settle, shape_of_one
from backpack.core.slots import Edge
from backpack.core.ways import SPLIT
from backpack.utils.columns import ScatteredColumns, unit_columns
from backpack.utils.eigen import eigh
from backpack.utils.paired_columns import PairedColumns, PartOfPairs, floored, signs_of_pairs, sizes_of, units_of
from backpack.utils.precision import wide

_SURE = frozenset("Rsqrt Reciprocal Exp Exp2 Sigmoid Softmax Sign".split())
_TOGETHER = 2**18
"""Entries of rows of matrices that are computed together: one by one, those of attention take twice as long as their eigenvectors."""


class Born(NamedTuple):
    """Columns of a node's second derivative on one of its inputs.

    Attributes:
        number: Which of the next edges.
        columns: ``[V, *full]``, where the input may have been broadcast to ``full``; split, ``[V, N, *full]``, if there is no layout.
        layout: Where the samples lie in ``full``.
    """

    number: int
    columns: ScatteredColumns | PartOfPairs
    layout: Layout | None


def is_solvable(gap: Gap) -> bool:
    """Say whether ``residual`` knows the second derivative of a node.

    Args:
        gap: The node, which is curved.

    Returns:
        Whether it does.
    """
    if set(gap.states) != {0} or not is_known(node := gap.node) or has_complex(gap) or not is_plain_attention(node):
        return False
    layouts = _layouts(gap)
    if (found := _product_of(gap)) is not None:
        return _is_even(found, layouts) and not _has_samples_in_groups(node, layouts) and _is_of_one(gap, found, layouts)
    axes = axes_of(node)
    if not axes or gap.states[0] is SPLIT:
        return True
    places = [(layout, len(n[2])) for layout, n in zip(layouts, gap.nexts, strict=False) if n is not None]
    known = all(layout is not None and (layout.of_one or layout.axis - ndim not in axes) for layout, ndim in places)
    return known and len({layout for layout, _ in places}) == 1


def _has_samples_in_groups(node: Node, layouts: list[Layout | None]) -> bool:
    # whether a convolution has kernels for each sample: another number of groups than that of one sample
    grouped = operation(node) == "Convolution" and saved(node, "groups") > 1
    return grouped and layouts[0] is not None and layouts[0].axis == 1 and layouts[0].samples > 1


def _is_even(found: Product, layouts: list[Layout | None]) -> bool:
    # whether samples have as many rows each, so that all are factorized at once
    of_factors = [layouts[number] for number in (*found.numbers, -1)]
    if all(layout is not None and layout.of_one for layout in of_factors):
        return len({max(layout.labels, default=0) for layout in of_factors}) == 1
    return all(layout is None or len(set(map(layout.labels.count, range(layout.samples)))) <= 1 for layout in layouts)


def _is_of_one(gap: Gap, found: Product, layouts: list[Layout | None]) -> bool:
    # whether the part of a sample is the product of its own parts: not so of `diag(h) @ x`, which sums over an axis of samples
    return found.made(shape_of_one(gap.nexts[i][2], layouts[i]) for i in found.numbers) == shape_of_one(shape_of((gap.node, 0)), layouts[-1])


def _product_of(gap: Gap) -> Product | None:
    # a product of two factors; an element-wise one if a factor is broadcast, which is smaller: else entries are blocks of their own
    shapes = {n[2] for n in gap.nexts if n is not None}
    if operation(gap.node) != "Mul" or len(shapes) < 2:
        return product(gap.node)
    found = Product(torch.mul, (0, 1), ("self", "other"))
    return found if _is_even(found, _layouts(gap)) else None


def has_complex(gap: Gap) -> bool:
    """Say whether complex numbers go in or come out.

    Args:
        gap: The node.

    Returns:
        Whether they do.
    """
    edges = [(gap.node, 0), *(n[:2] for n in gap.nexts if n is not None)]
    return any(tensor_at(edge).dtype.is_complex for edge in edges)


def residual(gap: Gap, grad: Tensor) -> tuple[Tensor, list[Born]]:
    """Factorize the second derivative of a node.

    Args:
        gap: The node.
        grad: Gradient of its output; with a leading axis of samples where the columns are split.

    Returns:
        Signs ``[V, N]``, and the columns on each input.
    """
    found = _product_of(gap)
    return _of_blocks(gap, grad) if found is None else _of_product(gap, grad, found)


def columns_of(gap: Gap) -> int:
    """Count the columns that ``residual`` returns, from shapes alone; for a function that is linear in one of its inputs, at most so many.

    Args:
        gap: The node, whose second derivative is known.

    Returns:
        Number of columns, ``V``.
    """
    found, layouts = _product_of(gap), _layouts(gap)
    sizes = {i: prod(n[2]) for i, n in enumerate(gap.nexts) if n is not None}
    if found is not None:
        return 2 * min(_share(sizes[i], layouts[i]) for i in found[1])
    if not axes_of(gap.node):  # all inputs are broadcast to one shape
        sizes = dict.fromkeys(sizes, prod(shape_of((gap.node, 0))))
    return _share(sum(sizes.values()), layouts[-1])


def _share(entries: int, layout: Layout | None) -> int:
    """Count the entries of the sample that has most.

    Args:
        entries: Number of entries.
        layout: Where the samples lie; ``None`` if all use the same.

    Returns:
        Their number.
    """
    if layout is None or not layout.labels:
        return entries
    return entries * (1 if layout.plain else max(Counter(layout.labels).values())) // len(layout.labels)


def _layouts(gap: Gap) -> list[Layout | None]:
    """List where the samples lie.

    Args:
        gap: The node.

    Returns:
        The layout of each input and, last, of the output; ``None`` where all samples use the same tensor.
    """
    state = gap.states[0]
    arrives = [None if crossing is None or crossing.arrives is None else settle(crossing.arrives) for crossing in gap.crossings]
    return [*arrives, None if state is SPLIT else settle(state)]


def _of_blocks(gap: Gap, grad: Tensor) -> tuple[Tensor, list[Born]]:
    """Factorize a second derivative that couples entries along some axes, block by block.

    Args:
        gap: The node.
        grad: See ``residual``.

    Returns:
        See ``residual``.
    """
    function, values, numbers, axes, parts = coupling(gap.node, [i for i, n in enumerate(gap.nexts) if n is not None])
    split = gap.states[0] is SPLIT
    layout = plain_layout(len(grad)) if split else _layouts(gap)[numbers[0]] if axes else gap.states[0]
    values = [value.expand(len(grad), *value.shape) if split else value for value in values]
    count, coupled = len(values), [axis % values[0].dim() for axis in axes]
    kept = [n for axis, n in enumerate(values[0].shape) if axis not in coupled]
    lengths = [values[0].shape[axis] for axis in coupled]
    size = count * prod(lengths)

    def gradient(*at: Tensor) -> tuple[Tensor, ...]:
        return vjp(function, *at)[1](grad)

    multiply = vjp(gradient, *values)[1]
    units = torch.eye(size, dtype=grad.dtype, device=grad.device)
    units = units.reshape(size, count, *(n if axis in coupled else 1 for axis, n in enumerate(values[0].shape)))

    def row(unit: Tensor) -> Tensor:
        return torch.stack(multiply(tuple(part.expand(values[0].shape) for part in unit)))

    if not values[0].numel():
        rows = grad.new_zeros(size, count, *values[0].shape)
    else:
        rows = vmap(row, chunk_size=max(1, _TOGETHER // values[0].numel()))(units) if parts is not None else torch.stack(list(map(row, units)))
    matrices = rows.movedim([2 + axis for axis in coupled], list(range(2, 2 + len(coupled)))).reshape(size, size, prod(kept)).movedim(2, 0)

    if (settled := settle(layout)).of_one:
        labels = torch.full((prod(kept),), max(settled.labels, default=0), dtype=torch.int64, device=grad.device)
    else:
        axis = sum(axis not in coupled for axis in range(layout.axis))
        labels = along(label_tensor(settled.labels, grad.device), axis, len(kept)).expand(kept).flatten()
    flat = [value.movedim(coupled, list(range(len(coupled)))).reshape(prod(lengths), prod(kept)) for value in values]
    sized = flat if parts is None else list(flat[0].split([part.numel() for part in parts]))
    sure = [_is_sure(gap.nexts[number]) for number in numbers]
    eigenvalues, vectors = _eigenvectors(wide(matrices), _sizes_in_blocks(sized, sure, labels, layout.samples))

    # the blocks of one sample need columns of their own
    turns, most = _turns(labels, layout.samples)
    signs = grad.new_zeros(most, layout.samples, size)
    signs[turns, labels] = eigenvalues.sign().to(grad.dtype)
    roots = (vectors * eigenvalues.abs().sqrt().unsqueeze(1)).mT.to(grad.dtype)

    def arranged(columns: Tensor, number: int) -> Tensor:
        columns = columns.mT.reshape(len(columns), *(lengths if parts is None else columns.shape[2:]), *kept)
        columns = columns.movedim(list(range(1, 1 + len(coupled))), [1 + axis for axis in coupled])
        return columns if parts is None else columns.reshape(*columns.shape[: 1 + split], *gap.nexts[number][2])

    pieces = roots.split([prod(lengths)] * count if parts is None else [part.numel() for part in parts], 2)
    signed = eigenvalues.sign()
    columns = [
        ScatteredColumns(piece, signed, turns, most, partial(arranged, number=nr), grad.dtype) for nr, piece in zip(numbers, pieces, strict=True)
    ]
    born = [Born(number, part, None if split else layout) for number, part in zip(numbers, columns, strict=True)]
    return signs.movedim(2, 1).reshape(most * size, layout.samples), born


def _eigenvectors(matrices: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """Factorize blocks, in units in which the values are of one size: else columns of different signs would cancel almost, at the parameters.

    Args:
        matrices: Symmetric, ``[B, M, M]``, where the entries of one value stand side by side.
        units: Of the entries, ``[B, M]``.

    Returns:
        ``e [B, M]`` and ``v [B, M, M]`` so that the blocks are ``v diag(e) v^T``.
    """
    if matrices.shape[-1] == 1:
        return matrices[:, 0], torch.ones_like(matrices)
    matrices = matrices * units.unsqueeze(1) * units.unsqueeze(2)
    linear = matrices.shape[-1] == 2 and not matrices[:, 0, 0].any()  # noqa: PLR2004 (two variables)
    eigenvalues, vectors = _linear_in_first(matrices) if linear else eigh(matrices)
    return eigenvalues, vectors / units.unsqueeze(2)


def _sizes_in_blocks(values: list[Tensor], sure: list[bool], labels: Tensor, samples: int) -> Tensor:
    """Return what ``sizes_of`` does for blocks, of which a sample may have several.

    Args:
        values: Values of each input, ``[entries, B]``.
        sure: Of each, whether its size is what it seems to be.
        labels: Sample of each block.
        samples: Number of samples.

    Returns:
        Unit of each entry, ``[B, M]``.
    """
    counts = labels.bincount(minlength=samples)
    squares = [torch.zeros(samples, dtype=wide(v).dtype, device=v.device).index_add(0, labels, wide(v).square().mean(0)) / counts for v in values]
    units = floored([units_of(total) for total in squares], sure)
    return torch.stack([unit[labels] for unit, v in zip(units, values, strict=True) for _ in v], 1)


def _is_sure(edge: Edge) -> bool:
    # whether a value is small only where what it is made of is large, or tells that it is; a sum may be zero but for rounding errors
    node = edge[0]
    while operation(node) in SAME_ENTRIES | TRANSPOSES | {"Expand"}:
        node = node.next_functions[0][0]
    if operation(node) == "Pow":
        exponent = saved(node, "exponent")
        return not isinstance(exponent, Tensor) and exponent < 0
    return operation(node) in _SURE


def _linear_in_first(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Factorize blocks ``[[0, h], [h, k]]`` into columns that are the same where the zero is: there they cancel exactly.

    Args:
        matrices: ``[B, 2, 2]``.

    Returns:
        As ``_eigenvectors``: ``(a, b)`` with a positive and ``(a, c)`` with a negative sign, where ``a (b - c) = h`` and ``b^2 - c^2 = k``.
    """
    h, k = matrices[:, 0, 1], matrices[:, 1, 1]
    size = torch.maximum(h.abs(), k.abs())
    root, filled = size.sqrt(), torch.where(size == 0, 1.0, size.sqrt())
    difference = torch.where(h < 0, -root, root)
    total = difference.sign() * k / filled
    one, a = torch.ones_like(h), h.abs() / filled
    return torch.stack([one, -one], 1), torch.stack([a, a, (total + difference) / 2, (total - difference) / 2], 1).unflatten(1, (2, 2))


def _turns(labels: Tensor, samples: int) -> tuple[Tensor, int]:
    """Number the blocks of each sample.

    Args:
        labels: Sample of each block.
        samples: Number of samples.

    Returns:
        How many blocks of the same sample stand in front of each one, and the largest number of blocks of a sample.
    """
    counts = labels.bincount(minlength=samples)
    order = labels.argsort(stable=True)
    turns = torch.empty_like(labels)
    turns[order] = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels[order]]
    return turns, int(counts.max()) if samples else 0


def _of_product(gap: Gap, grad: Tensor, found: Product) -> tuple[Tensor, list[Born]]:
    """Factorize the second derivative of a product, whose matrix couples the two factors of a sample and nothing else.

    Args:
        gap: The node.
        grad: See ``residual``.
        found: What it computes.

    Returns:
        See ``residual``.
    """
    function, numbers = found.function, found.numbers
    layouts = _layouts(gap)
    grad = grad if layouts[-1] is None else _samples_first(grad, layouts[-1])
    shapes = [shape_of_one(gap.nexts[number][2], layouts[number]) for number in numbers]
    few = int(prod(shapes[1]) < prod(shapes[0]))  # a column for each entry of the smaller factor
    size = prod(shapes[few])

    def other(unit: Tensor, g: Tensor) -> Tensor:
        return vjp(lambda big: function(unit, big) if few == 0 else function(big, unit), g.new_zeros(shapes[1 - few]))[1](g)[0]

    def form(some: slice) -> tuple[Tensor, Tensor]:
        units = unit_columns(Size([1, *shapes[few]]), grad, some)
        partners = vmap(lambda unit: vmap(lambda g: other(unit, g))(grad))(units.squeeze(1))
        return units.expand(-1, len(grad), *shapes[few]), partners

    values = [(saved(gap.node, name), layouts[number]) for name, number in zip(found.names, numbers, strict=True)]
    sizes = [sizes_of(value.unsqueeze(0) if layout is None else _samples_first(value, layout)) for value, layout in values]
    sizes = floored(sizes, [_is_sure(gap.nexts[number]) for number in numbers])
    columns, layout = PairedColumns(size, form, sizes[1 - few] / sizes[few]), layouts[-1]
    born = []
    for number, place in zip(numbers, (few, 1 - few), strict=True):
        at = layouts[number]
        born.append(Born(number, columns.part(place) if at is None else columns.part(place, partial(_samples_back, layout=at)), at))
    return signs_of_pairs(size, len(grad) if layout is None else layout.samples, grad), born


def _whole(layout: Layout) -> bool:
    return layout.of_one and layout.samples > 0


def _samples_first(tensor: Tensor, layout: Layout) -> Tensor:
    """Put the samples in front.

    Args:
        tensor: The tensor.
        layout: Where the samples lie; each has as many rows.

    Returns:
        ``[N, *shape]`` with the rows of one sample on the axis; ``[1, *shape]`` if all belong to the same.
    """
    if _whole(layout):
        return tensor.unsqueeze(0)
    order = label_tensor(layout.labels, tensor.device).argsort(stable=True)
    rows = len(order) // max(layout.samples, 1)
    return tensor.index_select(layout.axis, order).unflatten(layout.axis, (layout.samples, rows)).movedim(layout.axis, 0)


def _samples_back(columns: Tensor, layout: Layout) -> Tensor:
    """Undo ``_samples_first``.

    Args:
        columns: ``[V, N, *shape]`` with the rows of one sample on the axis.
        layout: Where the samples lie.

    Returns:
        ``[V, *shape]``.
    """
    if _whole(layout):
        return columns.squeeze(1)
    order = label_tensor(layout.labels, columns.device).argsort(stable=True)
    axis = 1 + layout.axis
    return columns.movedim(1, axis).flatten(axis, axis + 1).index_select(axis, order.argsort())
