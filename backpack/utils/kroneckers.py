"""Kronecker products: as dense matrices, as products with vectors and matrices, and their inverses.

A list of factors ``[F1, F2, ...]`` stands for ``F1 (x) F2 (x) ...``, whose last factor varies fastest. A factor is a matrix ``[R, C]``, or a
vector ``[D]`` that stands for the diagonal matrix with these entries. Products are contracted factor by factor; the Kronecker product itself is
never formed. A list of such lists, as a grouped convolution has it, stands for the block-diagonal matrix of their Kronecker products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import reduce
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from backpack.utils.eigen import eigh, rounding
from backpack.utils.errors import ArgumentError, DifferentiationError, ShapeError
from backpack.utils.numbers import is_number
from backpack.utils.precision import wide
from backpack.utils.unsqueeze import kfacmp_unsqueeze_if_missing_dim

Shift = float | Iterable[float] | None
Factors = Iterable[Tensor] | Iterable[Sequence[Tensor]]
MAX_INVERSE_EIGENVALUE = 1e8


class ShiftError(ArgumentError, AssertionError):
    """The number of shifts is not the number of factors, or they are no numbers.

    Way out: one number for all factors, or a list with one for each.
    """

    code = "shift"


def is_tensor_of_order(order: int, tensor: Tensor) -> bool:
    """Tell whether a tensor has a number of axes.

    Args:
        order: The number of axes.
        tensor: The tensor.

    Returns:
        Whether ``tensor`` has ``order`` axes.
    """
    return tensor.dim() == order


def all_tensors_of_order(order: int, tensors: Iterable[Tensor]) -> bool:
    """Tell whether all tensors have the same, given number of axes.

    Args:
        order: The number of axes.
        tensors: The tensors.

    Returns:
        Whether each of ``tensors`` has ``order`` axes.
    """
    return all(is_tensor_of_order(order, tensor) for tensor in tensors)


def is_vector(tensor: Tensor) -> bool:
    """Tell whether a tensor has one axis.

    Args:
        tensor: The tensor.

    Returns:
        Whether it is a vector.
    """
    return is_tensor_of_order(1, tensor)


def is_matrix(tensor: Tensor) -> bool:
    """Tell whether a tensor has two axes.

    Args:
        tensor: The tensor.

    Returns:
        Whether it is a matrix.
    """
    return is_tensor_of_order(2, tensor)


def get_letters(max_letters: int = 26) -> list[str]:
    """Return distinct letters for an ``einsum`` equation.

    Args:
        max_letters: How many.

    Returns:
        The first letters of the alphabet, capital letters after the 26th.

    Raises:
        ArgumentError: If there are not so many letters.
    """
    if not 0 <= max_letters <= len(ascii_letters):
        raise ArgumentError(f"max_letters must lie between 0 and {len(ascii_letters)}, got {max_letters}.")
    return list(ascii_letters[:max_letters])


def two_kfacs_to_mat(A: Tensor, B: Tensor) -> Tensor:
    """Form the Kronecker product of two factors.

    Args:
        A: Matrix ``[R1, C1]``, or the diagonal ``[D1]`` of one.
        B: Matrix ``[R2, C2]``, or the diagonal ``[D2]`` of one.

    Returns:
        The matrix ``[R1 R2, C1 C2]``.
    """
    return kfacs_to_mat([A, B])


def kfacs_to_mat(factors: Factors) -> Tensor:
    """Form the Kronecker product of all factors.

    Args:
        factors: Matrices ``[Ri, Ci]``, or diagonals ``[Di]``; or one list of them for each group.

    Returns:
        The matrix ``[R1 R2 ..., C1 C2 ...]``; with groups, such matrices along the diagonal.
    """
    factors = _listed(factors)
    if _has_groups(factors):
        return torch.block_diag(*map(kfacs_to_mat, factors))
    return reduce(torch.kron, (factor.diag() if is_vector(factor) else factor.contiguous() for factor in _checked(factors)))


def kfac_mat_prod_einsum_equation(num_factors: int, diagonal: Collection[int] = ()) -> str:
    """Build the ``einsum`` equation of a product with a Kronecker product.

    The operands are the multiplied tensor ``[C1, C2, ..., K]``, then the factors; the result has shape ``[R1, R2, ..., K]``.

    Args:
        num_factors: Number of factors.
        diagonal: Positions of the factors that are given by their diagonal.

    Returns:
        The equation.
    """
    *letters, columns = get_letters(2 * num_factors + 1)
    ins = letters[num_factors:]
    outs = [ins[i] if i in diagonal else letters[i] for i in range(num_factors)]
    factors = [ins[i] if i in diagonal else outs[i] + ins[i] for i in range(num_factors)]
    return f"{','.join([''.join(ins) + columns, *factors])}->{''.join(outs)}{columns}"


def kfac_mat_prod(factors: Factors) -> Callable[[Tensor], Tensor]:
    """Return the multiplication with the Kronecker product of the factors.

    Args:
        factors: Matrices ``[Ri, Ci]``, or diagonals ``[Di]``, which need not be square; or one list of them for each group.

    Returns:
        Function that maps ``[C1 C2 ..., K]`` to ``[R1 R2 ..., K]``, and a vector ``[C1 C2 ...]`` to a vector ``[R1 R2 ...]``; with groups, their
        rows follow one another. It raises ``ShapeError`` for other shapes.
    """
    factors = _listed(factors)
    if _has_groups(factors):
        return _of_groups([_checked(group) for group in factors])
    factors = _checked(factors)
    rows, cols = [factor.shape[0] for factor in factors], [factor.shape[-1] for factor in factors]
    equation = kfac_mat_prod_einsum_equation(len(factors), [i for i, factor in enumerate(factors) if is_vector(factor)])

    @kfacmp_unsqueeze_if_missing_dim(mat_dim=2)
    def multiply(mat: Tensor) -> Tensor:
        if mat.shape[0] != prod(cols):
            shapes = [list(factor.shape) for factor in factors]
            raise ShapeError(f"Kronecker factors of shapes {shapes} multiply matrices with {prod(cols)} rows, got shape {list(mat.shape)}.")
        return torch.einsum(equation, mat.reshape(*cols, mat.shape[1]), *factors).reshape(prod(rows), mat.shape[1])

    return multiply


def _of_groups(groups: list[list[Tensor]]) -> Callable[[Tensor], Tensor]:
    products = [kfac_mat_prod(group) for group in groups]
    sizes = [prod(factor.shape[-1] for factor in group) for group in groups]

    def multiply(mat: Tensor) -> Tensor:
        if mat.shape[:1] != (sum(sizes),):
            raise ShapeError(f"Kronecker factors of groups of {sizes} columns multiply matrices with {sum(sizes)} rows, got shape {list(mat.shape)}.")
        return torch.cat([product(part) for product, part in zip(products, mat.split(sizes), strict=True)])

    return multiply


def apply_kfac_mat_prod(factors: Factors, mat: Tensor) -> Tensor:
    """Multiply a matrix or vector with the Kronecker product of the factors.

    Args:
        factors: Matrices ``[Ri, Ci]``, or diagonals ``[Di]``, which need not be square; or one list of them for each group.
        mat: Matrix ``[C1 C2 ..., K]`` or vector ``[C1 C2 ...]``.

    Returns:
        Matrix ``[R1 R2 ..., K]`` or vector ``[R1 R2 ...]``.
    """
    return kfac_mat_prod(factors)(mat)


def inv_kfac_mat_prod(factors: Factors, shift: Shift = None) -> Callable[[Tensor], Tensor]:
    """Return the multiplication with the inverse of the Kronecker product of shifted factors.

    Args:
        factors: Symmetric matrices ``[Di, Di]``, or diagonals ``[Di]``; or one list of them for each group.
        shift: What to add to the diagonal of the factors, see ``inv_kfacs``.

    Returns:
        Function that maps ``[D1 D2 ..., K]`` to the same shape, and a vector ``[D1 D2 ...]`` to a vector. The factors are inverted once.
    """
    return kfac_mat_prod(inv_kfacs(factors, shift))


def apply_inv_kfac_mat_prod(factors: Factors, mat: Tensor, shift: Shift = None) -> Tensor:
    """Multiply a matrix or vector with the inverse of the Kronecker product of shifted factors.

    Args:
        factors: Symmetric matrices ``[Di, Di]``, or diagonals ``[Di]``; or one list of them for each group.
        mat: Matrix ``[D1 D2 ..., K]`` or vector ``[D1 D2 ...]``.
        shift: What to add to the diagonal of the factors, see ``inv_kfacs``.

    Returns:
        Matrix ``[D1 D2 ..., K]`` or vector ``[D1 D2 ...]``.
    """
    return inv_kfac_mat_prod(factors, shift)(mat)


def inv_kfacs(factors: Factors, shift: Shift = None) -> list[Tensor] | list[list[Tensor]]:
    """Invert symmetric factors by their eigen-decomposition, after a shift of the diagonal.

    The inverse of a Kronecker product is the Kronecker product of the inverses. Inverse eigenvalues are clamped to ``[-1e8, 1e8]``, so that a
    singular factor gives a large but finite result; negative eigenvalues that are rounding errors count as zero.

    Args:
        factors: Symmetric, or Hermitian, matrices ``[Di, Di]``, or diagonals ``[Di]``; or one list of them for each group.
        shift: Added to the diagonal of every factor (a number), of each factor (a list, or a tensor, with one number per factor), or of none
            (``None``). All groups get the same.

    Returns:
        The inverses ``(Fi + shift_i I)^{-1}``, of the same shapes; with groups, one list of them for each.

    Raises:
        ArgumentError: If there is no list of factors, or if they are of whole numbers.
        ShapeError: If a factor is not square.
        ShiftError: If the number of shifts is not the number of factors, or one of them is no number.
    """
    factors = _listed(factors)
    with suppress(TypeError):  # a single number
        shift = list(shift)
    if _has_groups(factors):
        return [inv_kfacs(group, shift) for group in factors]
    factors = _checked(factors)
    if not isinstance(shift, list):
        shift = [0.0 if shift is None else shift] * len(factors)
    if len(shift) != len(factors) or not all(map(is_number, shift)):
        raise ShiftError(f"Got {len(shift)} shifts for {len(factors)} Kronecker factors, {shift}; give one number for all, or one per factor.")
    return [_invert(factor, value) for factor, value in zip(factors, shift, strict=True)]


def _invert(factor: Tensor, shift: float) -> Tensor:
    if not (factor.is_floating_point() or (factor.is_complex() and is_matrix(factor))):
        raise ArgumentError(f"Kronecker factors of {factor.dtype} cannot be inverted. Convert them: factor.to(torch.get_default_dtype()).")
    if factor.dtype != wide(factor).dtype:
        largest = torch.finfo(factor.dtype).max
        return _invert(wide(factor), shift).clamp(-largest, largest).to(factor.dtype)
    if is_vector(factor):
        return _inverses(factor, shift)[1]
    if factor.shape[0] != factor.shape[1]:
        raise ShapeError(f"Only symmetric Kronecker factors can be inverted, got shape {list(factor.shape)}.")
    values, vectors = eigh(factor.detach().unsqueeze(0))
    (values, inverses), vectors = _inverses(values.squeeze(0), shift), vectors.squeeze(0)
    inverse = (vectors * inverses) @ vectors.mH
    return _Inverse.apply(factor, inverse, values, inverses, vectors) if factor.requires_grad else inverse


def _inverses(values: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    # eigenvalues with the shift, and their inverses: below zero, rounding errors of a positive semidefinite factor would be large and negative there
    values = values.masked_fill((values < 0) & (values >= -rounding(values.detach().unsqueeze(0)).squeeze(0)), 0) + shift
    return values, (1 / values).clamp(-MAX_INVERSE_EIGENVALUE, MAX_INVERSE_EIGENVALUE)


class _Inverse(torch.autograd.Function):
    """The inverse of a matrix, as it was computed: eigenvectors of equal eigenvalues have no derivative, which that of the inverse does not need."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, inverse: Tensor, values: Tensor, inverses: Tensor, vectors: Tensor) -> Tensor:
        result = inverse.clone()
        ctx.save_for_backward(result, values, inverses, vectors)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, values, inverses, vectors = ctx.saved_tensors
        clamped = inverses.abs() >= MAX_INVERSE_EIGENVALUE
        if not clamped.any():
            return -inverse.mH @ grad @ inverse.mH, None, None, None, None
        # differences of inverses over those of eigenvalues (Daleckii and Krein), which are constant where both are clamped
        slopes = (inverses.unsqueeze(1) - inverses) / (values.unsqueeze(1) - values)
        slopes = slopes.masked_fill(clamped.unsqueeze(1) & clamped, 0).where(clamped.unsqueeze(1) | clamped, -inverses.unsqueeze(1) * inverses)
        if torch.is_grad_enabled():
            raise DifferentiationError("The inverse of a singular Kronecker factor cannot be differentiated twice. Add a shift to its diagonal.")
        return vectors @ (slopes * (vectors.mH @ grad @ vectors)) @ vectors.mH, None, None, None, None


def _listed(factors: Factors) -> list:
    if isinstance(factors, Tensor) and factors.dim() < 3:
        raise ShapeError(f"Expected a list of Kronecker factors, got a tensor of shape {list(factors.shape)}. Write [factor].")
    if not isinstance(factors, Iterable):
        raise ArgumentError(f"Expected a list of Kronecker factors, got {factors!r}. A parameter that an extension leaves out has none.")
    return list(factors)


def _has_groups(factors: list) -> bool:
    return bool(factors) and all(isinstance(factor, list | tuple) for factor in factors)


def _checked(factors: Iterable[Tensor]) -> list[Tensor]:
    factors = list(factors)
    if not factors or not all(isinstance(factor, Tensor) and (is_matrix(factor) or is_vector(factor)) for factor in factors):
        got = [list(factor.shape) if isinstance(factor, Tensor) else type(factor).__name__ for factor in factors]
        raise ShapeError(f"Expected at least one Kronecker factor, each a matrix or the diagonal of one, got {got}.")
    return factors
