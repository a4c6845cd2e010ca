"""Squares of the per-sample products ``sum_l rows[v, n, :, l] x[n, :, l]^T`` of affine layers, which are not formed, or for few samples at a time.

A layer is given by its derivatives and its module with the recorded input; ``mat`` ``[V, *output]`` are columns at its output.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import prod
from typing import Any

import torch
from torch import Size, Tensor, einsum
from torch.nn import Module

from backpack.core.derivatives.affine import SMALL, AffineDerivatives
from backpack.core.derivatives.sum_of_products import SumOfProducts
from backpack.utils.columns import blocks
from backpack.utils.moment import sum_of_squared_columns
from backpack.utils.pages import compute
from backpack.utils.precision import wide

_PASSES = 24
"""Multiplications of a matrix product that take as long as adding up an entry and its square.

Measured on the layers of a transformer, with 128 positions and 65536 to 262144 entries.
"""
_EACH = 2**15
"""Entries of a product from which on each is added, or squared and added, by itself, in one pass over it instead of two or three.

Measured with 192 x 1728 entries and 100 columns: with 256 positions 0.85 of the time of the whole, products included, with 64 positions 0.7.
"""

_CALLS = 700_000
"""Multiplications of a matrix product that take as long as the calls of operations for a pair of positions."""

_LOST = 2**10
"""Rounding errors of the terms below which a squared norm is not taken from Gram matrices: it keeps three digits in the worst case, five as a rule.

Terms that are independent of each other reach it with eight thousand positions in single precision.
"""


def by_gram_matrices(rows: Size, entries: int, formed: bool = False) -> bool:
    """Tell whether squared norms of per-sample weight gradients are cheaper by Gram matrices of the positions.

    Measured on the layers of 3c3d and All-CNN-C: twice as fast at a third of this limit, 1.3 times as slow at 1.5 times the limit.

    Args:
        rows: Shape ``[N, G, O, L]`` of the output.
        entries: Number of entries of the weight.
        formed: Whether per-sample weight gradients take the place of the product that is the gradient, so that they cost no more than passes over
            them.

    Returns:
        Whether they are.
    """
    _, groups, outputs, positions = rows
    inputs = entries // max(1, groups * outputs)
    return positions * (inputs + outputs) <= inputs * outputs * (min(1, _PASSES / positions) if formed else 1)


def norms_at_output(mat: Tensor, notes: dict[Hashable, Any]) -> Tensor:
    """Norms of a column, once for all parameters of a layer.

    Args:
        mat: A single column ``[1, N, O]``.
        notes: Keeps the result.

    Returns:
        ``[N]``, not to be changed.
    """
    if "norms" not in notes:
        notes["norms"] = torch.linalg.vector_norm(wide(mat[0]), dim=1)
    return notes["norms"]


def squared_norms(
    layer: AffineDerivatives, module: Module, mat: Tensor, sums: dict[str, Tensor] | None = None, *, notes: dict[Hashable, Any]
) -> Tensor:
    """Squared norms of per-sample weight gradients (Goodfellow 2015; with positions, by Gram matrices, Rochette et al. 2019).

    Args:
        layer: Derivatives of the layer.
        module: The layer.
        mat: A single column, the gradient ``[1, *output]``.
        sums: Takes the sum of per-sample weight gradients, if these are formed.
        notes: Keeps what other parameters of the layer need, too.

    Returns:
        ``[N]``.
    """
    vectors = layer.vectors(module)
    if vectors is not None:
        return (torch.linalg.vector_norm(wide(vectors), dim=1) * norms_at_output(mat, notes)).square()
    layer, module, mat = layer.easier(module, mat)
    rows = wide(layer.rows(module, mat)[0])
    samples, groups, outputs, positions = rows.shape
    if positions == 1:
        columns = wide(layer.columns(module))
        norms = [torch.linalg.vector_norm(part.reshape(samples, groups, part.shape[2]), dim=2) for part in (columns, rows)]
        squares = (norms[0] * norms[1]).square()
        return squares.sum(1) if groups > 1 else squares.squeeze(1)
    if by_gram_matrices(rows.shape, module.weight.numel(), sums is not None and "weight" not in sums):
        return _by_gram_matrices(layer, module, rows)
    norms = [torch.linalg.vector_norm(wide(products).flatten(2), dim=2) for _, _, products in _blocks(layer, module, mat, sums)]
    return torch.cat(norms, 1)[0].square_() if norms else rows.new_zeros(samples)


def _by_gram_matrices(layer: AffineDerivatives, module: Module, rows: Tensor) -> Tensor:
    """Squared norms by Gram matrices; where positions cancel, their rounding errors are left over, and products are formed.

    Args:
        layer: Derivatives of the layer.
        module: The layer.
        rows: ``[N, G, O, L]``, of the precision of the result.

    Returns:
        ``[N]``.
    """
    samples, groups, outputs, positions = rows.shape
    entries, sums, terms = module.weight.numel(), [rows.new_empty(0)], [rows.new_empty(0)]
    for n in blocks(samples, positions * (entries // max(1, outputs) + groups * positions), SMALL):
        columns, grads = wide(layer.columns(module, n)), rows[n]
        grams = (columns.mT @ columns).mul_(grads.mT @ grads)
        sums.append(grams.sum((1, 2, 3)))
        terms.append(grams.diagonal(dim1=2, dim2=3).sum((1, 2)))  # squared norms of the products at each position
    squares = torch.cat(sums)
    cancelled = squares < torch.cat(terms).mul_(_LOST * positions * torch.finfo(rows.dtype).eps)
    if cancelled.any():
        chosen = cancelled.nonzero()[:, 0].tolist()
        for n in blocks(len(chosen), entries * (1 + positions), SMALL):
            products = rows[chosen[n]] @ wide(layer.columns(module, chosen[n])).mT
            squares[chosen[n]] = torch.linalg.vector_norm(products.flatten(1), dim=1).square()
    return squares


def squares_at_output(mat: Tensor, signs: Tensor | None, notes: dict[Hashable, Any]) -> Tensor:
    """Sum of element-wise squares of columns, once for all parameters of a layer.

    Args:
        mat: Columns ``[V, N, O]``.
        signs: Factor of each column and sample ``[V, N]``; ``None`` for one.
        notes: Keeps the result.

    Returns:
        ``[N, O]``, not to be changed.
    """
    if "squares" not in notes:
        notes["squares"] = sum_of_squared_columns(mat, signs)
    return notes["squares"]


def sum_of_squares(
    layer: AffineDerivatives,
    module: Module,
    mat: Tensor,
    signs: Tensor | None = None,
    sums: dict[str, Tensor] | None = None,
    scale: float = 1.0,
    *,
    notes: dict[Hashable, Any],
) -> Tensor:
    """Sum of element-wise squares over samples and columns.

    Args:
        layer: Derivatives of the layer.
        module: The layer.
        mat: Columns ``[V, *output]``.
        signs: Factor of each column and sample ``[V, N]``; ``None`` for one.
        sums: Takes the sum of the products themselves, if these are formed.
        scale: Factor.
        notes: Keeps what other parameters of the layer need, too.

    Returns:
        ``[*weight]``.
    """
    vectors = layer.vectors(module)
    if vectors is not None:
        squares, factors = wide(vectors).square(), squares_at_output(mat, signs, notes).t()
        return factors @ squares if scale == 1 else torch.addmm(squares.new_empty(()), factors, squares, beta=0, alpha=scale)
    layer, module, mat = layer.easier(module, mat)
    signs = signs if signs is None else signs.reshape(mat.shape[:2])
    rows = layer.rows(module, mat)
    if rows.shape[4] == 1:
        squares, weights = wide(layer.columns(module)).squeeze(3).square(), sum_of_squared_columns(rows.squeeze(4), signs)
        out = torch.bmm(weights.movedim(0, 2), squares.transpose(0, 1))
    elif _by_pairs(rows.shape, module.weight.numel()):
        parts = zip(wide(rows.squeeze(2)).unbind(3), wide(layer.columns(module)).squeeze(1)[None].unbind(3), strict=True)
        products = SumOfProducts([(left, right, None) for left, right in parts], signs, Size(module.weight.shape))
        out = products.squares().reshape(1, rows.shape[3], -1)
    else:
        squares = None
        for v, n, products in _blocks(layer, module, mat, sums):
            squares = _add_squares(squares, wide(products), None if signs is None else signs[v, n])
        out = _zeros(module, rows) if squares is None else squares[0, 0]
    return layer.weight_from_matrix(module, out if scale == 1 else out.mul_(scale))


def _by_pairs(rows: Size, entries: int) -> bool:
    """Tell whether squares are cheaper by products of positions in pairs than by those of samples, which are formed and squared.

    Measured for 64 x 64 to 2048 x 2048 entries: one column, 128 samples, two positions 0.25 of the time, three 0.45, four as long; 32 samples, two
    positions 0.4; ten columns, 32 samples, two, four and seven positions 0.07, 0.25 and 0.7; eight samples, one column, longer. For 16 x 27 entries,
    ten columns, 32 samples, eight positions: 5 times as long; 64 positions, 1000 columns: 18 times.

    Args:
        rows: Shape ``[V, N, G, O, L]`` of columns at the output.
        entries: Number of entries of the weight.

    Returns:
        Whether they are.
    """
    columns, samples, groups, outputs, positions = rows
    pair = (samples + 24) * entries + 20 * columns * samples * outputs + _CALLS
    return groups == 1 and 0 < positions * (positions + 1) // 2 * pair <= columns * samples * entries * (14 + 2 * positions / 3)


def squares_per_sample(layer: AffineDerivatives, module: Module, mat: Tensor, signs: Tensor | None = None) -> Tensor:
    """Sum of element-wise squares over columns, for each sample.

    Args:
        layer: Derivatives of the layer.
        module: The layer.
        mat: Columns ``[V, *output]``.
        signs: Factor of each column and sample ``[V, N]``; ``None`` for one.

    Returns:
        ``[N, *weight]``.
    """
    if len(mat) == 1:
        layer, module, mat = layer.easier(module, mat)
    rows = layer.rows(module, mat)
    if rows.shape[4] == 1:
        squares, weights = wide(layer.columns(module)).squeeze(3).square(), sum_of_squared_columns(rows.squeeze(4), signs)
        out = compute(torch.mul, (*weights.shape, squares.shape[2]), weights.unsqueeze(3), squares.unsqueeze(2))
    else:
        out = _zeros(module, rows, rows.shape[1])
        for v, n, products in layer.weight_blocks(module, mat) if out.numel() else ():
            squares = wide(products).square_()
            out[n] += squares.sum(0) if signs is None else einsum("vngok,vn->ngok", squares, wide(signs[v, n]))
    return layer.weight_from_matrix(module, out)


def _blocks(layer: AffineDerivatives, module: Module, mat: Tensor, sums: dict[str, Tensor] | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Form products for a few columns and samples at a time, and add them up on the way where that is wanted, while they are in the cache.

    Args:
        layer: Derivatives of the layer.
        module: The layer.
        mat: Columns ``[V, *output]``.
        sums: Takes the sum; ``None`` if nobody wants it.

    Yields:
        What ``AffineDerivatives.weight_blocks`` does; large products are not to be overwritten where the sum is wanted.
    """
    if sums is None or "weight" in sums:
        yield from layer.weight_blocks(module, mat)
        return
    total, kept = None, torch.promote_types(mat.dtype, torch.float32)
    for v, n, products in layer.weight_blocks(module, mat):
        each = _each(products) or (products.sum((0, 1), keepdim=True, dtype=kept),)
        for product in each:
            if total is None:  # a view would keep the block
                total = wide(product.clone() if len(each) > 1 else product)
            else:
                total += product
        yield v, n, products
    sums["weight"] = layer.weight_from_matrix(module, _zeros(module, layer.rows(module, mat)) if total is None else total[0, 0])


def _each(products: Tensor) -> tuple[Tensor, ...]:
    """Split products, if they are large.

    Args:
        products: ``[v, n, G, O, K]``.

    Returns:
        ``[1, 1, G, O, K]`` each, of which a single one is no view, which would take time; none if they are small.
    """
    columns, samples, *matrix = products.shape
    if prod(matrix) < _EACH:
        return ()
    return (products,) if columns == samples == 1 else products.flatten(0, 1)[:, None, None].unbind()


def _zeros(module: Module, rows: Tensor, *lead: int) -> Tensor:
    groups, outputs = rows.shape[2:4]
    entries = module.weight.numel() // (groups * outputs) if groups * outputs else prod(module.weight.shape[1:])
    return wide(rows.new_empty(0)).new_zeros(*lead, groups, outputs, entries)


def _add_squares(total: Tensor | None, products: Tensor, signs: Tensor | None) -> Tensor:
    """Add ``[v, n, G, O, K]``, squared and overwritten, to ``[1, 1, G, O, K]``.

    Args:
        total: Where to add; ``None`` where nothing has been added yet.
        products: What to square.
        signs: Factors ``[v, n]``, or ``None``.

    Returns:
        The total.
    """
    each = _each(products) if signs is None else ()
    for product in each:
        total = compute(torch.mul, product.shape, product, product) if total is None else total.addcmul_(product, product)
    if each:
        return total
    squares = products.square_()
    squares = squares.sum((0, 1), keepdim=True) if signs is None else einsum("vngok,vn->gok", squares, wide(signs))[None, None]
    return squares if total is None else total.add_(squares)
