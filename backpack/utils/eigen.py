"""Eigenvalues of symmetric matrices of which some may not be finite: where gradients overflow, results are not finite, too, but nothing fails."""

from __future__ import annotations

from collections.abc import Callable
from math import nan, sqrt

import torch
from torch import Tensor


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose symmetric matrices; ``torch.linalg.eigh`` raises if a single one has an entry that is not finite.

    Args:
        matrices: ``[B, M, M]``.

    Returns:
        Eigenvalues ``[B, M]``, not a number where the matrix is not finite, and eigenvectors ``[B, M, M]``.
    """
    if matrices.shape[1] == 1:
        return (matrices.real if matrices.is_complex() else matrices).squeeze(2), torch.ones_like(matrices)
    broken = ~matrices.isfinite().all(2).all(1).unsqueeze(1)
    matrices = matrices.masked_fill(broken.unsqueeze(2), 0.0)
    scales = matrices.detach().abs()
    scales = scales.amax((1, 2), keepdim=True) if scales.numel() else scales.new_ones(len(scales), 1, 1)
    scaled = matrices / scales.where(scales > 0, 1.0)
    # LAPACK fails, or returns no numbers, where some of a matrix are too small to be normal
    tiny = (scaled.abs() < torch.finfo(scaled.dtype).tiny) & (scaled != 0)
    scaled = scaled.masked_fill(tiny, 0.0) if tiny.any() else scaled
    try:
        values, vectors = torch.linalg.eigh(scaled)
    except torch.linalg.LinAlgError:  # in single precision, it may not converge for a matrix that is no problem in double precision
        found = torch.linalg.eigh(scaled.to(torch.complex128 if scaled.is_complex() else torch.float64))
        values, vectors = found[0].to(scales.dtype), found[1].to(scaled.dtype)
    return (values * scales.squeeze(2)).masked_fill(broken, nan), vectors


def signed_root(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Factorize symmetric matrices.

    Args:
        matrices: ``[B, M, M]``.

    Returns:
        Columns ``[B, M, M]``, one in each row, and their signs ``[B, M]``: a matrix is the sum of their signed squares.
    """
    values, vectors = eigh(matrices)
    return (vectors * values.abs().sqrt().unsqueeze(1)).mT, values.sign()


def eigh_in_units(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose symmetric matrices in units in which their diagonal is one: entries that are small beside others keep their digits.

    Errors of ``eigh`` are relative to the largest entry of a matrix, those here to the entries on the diagonal.

    Args:
        matrices: ``[B, M, M]``.

    Returns:
        ``e [B, M]``, orthogonal ``v [B, M, M]`` and units ``u [B, M]`` so that a matrix is ``diag(u) v diag(e) v^T diag(u)``.
    """
    squares = matrices.diagonal(dim1=1, dim2=2).abs()
    if matrices.numel():  # a zero on the diagonal is no unit of the numbers beside it
        squares = torch.maximum(squares, sqrt(torch.finfo(matrices.dtype).eps) * matrices.abs().amax(2))
    units = torch.where(squares > 0, squares, 1.0).sqrt()
    return *eigh(matrices / units.unsqueeze(1) / units.unsqueeze(2)), units


def square_root(matrices: Tensor, non_negative: Callable[[Tensor], None]) -> Tensor:
    """Factorize positive semidefinite matrices, in the units of ``eigh_in_units``.

    Negative eigenvalues that are rounding errors beside the largest one may be none in other units: such matrices keep theirs.

    Args:
        matrices: ``[B, M, M]``.
        non_negative: Refuses eigenvalues ``[B, M]`` of the matrices themselves that are negative, and no rounding errors.

    Returns:
        ``s [B, M, M]`` so that a matrix is ``s s^T``, the symmetric root if all numbers on the diagonal are the same.
    """
    if matrices.shape[1] == 1:
        if (matrices < 0).any():
            non_negative(matrices.squeeze(2))
        return matrices.clamp(min=0).sqrt()
    values, vectors, units = eigh_in_units(matrices)
    indefinite = (values < -rounding(values)).any(1, keepdim=True)
    if indefinite.any():
        plain, basis = eigh(matrices)
        non_negative(plain)
        values, units = torch.where(indefinite, plain, values), torch.where(indefinite, 1.0, units)
        vectors = torch.where(indefinite.unsqueeze(2), basis, vectors)
    root = values.masked_fill(values <= rounding(values), 0).sqrt()
    return units.unsqueeze(2) * ((vectors * root.unsqueeze(1)) @ vectors.mT)


def rounding(values: Tensor) -> Tensor:
    """Bound the rounding errors of eigenvalues.

    Args:
        values: ``[B, M]``.

    Returns:
        ``[B, 1]``.
    """
    return values.shape[1] * torch.finfo(values.dtype).eps * values.abs().amax(1, keepdim=True) if values.numel() else values
