"""Columns of their own for the rows, or blocks, of one sample, whose columns were made as if each were a sample."""

from __future__ import annotations

import torch
from torch import Size, Tensor

from backpack.core.arrangements import repetitions
from backpack.core.samples import Layout, label_tensor
from backpack.utils.columns import Entries, ScatteredColumns


def separate_rows(mat: Tensor, signs: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Give the rows of one sample columns of their own, since each row's columns were made as if it were a sample.

    Args:
        mat: ``[V, R, *]``.
        signs: ``[V, R]``; ``None`` if all count positive.
        layout: Says to which of the ``N`` samples each of the ``R`` rows belongs.

    Returns:
        ``[T * V, R, *]`` and signs ``[T * V, N]``, where ``T`` is the number of rows of a sample.
    """
    if layout.plain:
        return mat, signs
    repeated = repetitions(layout.labels)
    turns, rows = torch.tensor([repeated, range(len(repeated))], dtype=torch.int64, device=mat.device)
    full = mat.new_zeros(1 + max(repeated, default=0), *mat.shape)
    full[turns, :, rows] = mat.transpose(0, 1)
    if signs is not None:
        spread = signs.new_zeros(len(full), len(signs), layout.samples)
        spread[turns, :, label_tensor(layout.labels, mat.device)] = signs.T
        signs = spread.flatten(0, 1)
    return full.flatten(0, 1), signs


def scattered(
    values: Tensor | Entries, signs: Tensor, dtype: torch.dtype, shape: Size, layout: Layout, axis: int = -1
) -> tuple[ScatteredColumns, Tensor]:
    """Give the blocks of one sample columns of their own.

    Args:
        values: Columns of each of the ``B`` blocks of which the ``R`` rows consist, ``[B, E, M]``.
        signs: Of these columns ``[B, E]``.
        dtype: Of the result.
        shape: ``[R, *]``.
        layout: Says to which of the ``N`` samples each row belongs.
        axis: The axis along which the blocks lie, negative; they consist of consecutive entries if it is the last one.

    Returns:
        ``[V, R, *]`` and signs ``[V, N]``, where ``V`` counts the columns of the blocks of the sample that has most.
    """
    repeated, device = [0] * shape[0] if layout.plain else repetitions(layout.labels), signs.device
    signs = signs.reshape(shape[0], -1, signs.shape[1]) if shape[0] else signs.new_zeros(0, 0, signs.shape[1])
    each, most = signs.shape[1], (1 + max(repeated, default=0)) * signs.shape[1]
    turns = torch.tensor(repeated, dtype=torch.int64, device=device).unsqueeze(1) * each + torch.arange(each, device=device)
    spread = torch.zeros(most, layout.samples, signs.shape[2], dtype=dtype, device=device)
    spread[turns, label_tensor(layout.labels, device).unsqueeze(1)] = signs.to(dtype)
    moved = list(shape)
    moved.append(moved.pop(axis))
    columns = ScatteredColumns(
        values, signs.flatten(0, 1), turns.flatten(), most, lambda full: full.reshape(len(full), *moved).movedim(-1, axis), dtype
    )
    return columns, spread.transpose(1, 2).flatten(0, 1)
