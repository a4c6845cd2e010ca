"""Large tensors in large pages: an operating system that hands out memory in small pieces may take longer than the arithmetic that fills it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from ctypes import CDLL, c_int, c_size_t, c_void_p
from math import prod

import torch
from torch import Tensor

_LARGE = 2**22
"""Bytes from which on large pages are asked for, which torch does only where an environment variable says so.

Measured for products of 64 x 512 x 1152 numbers: 55 ms in fresh memory, 26 ms in fresh memory of large pages, 19 ms in memory that was used before.
"""
_PAGE, _HUGE_PAGES = 4096, 14
_advise = getattr(CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _advise is not None:
    _advise.argtypes = (c_void_p, c_size_t, c_int)


def empty(shape: tuple[int, ...], like: Tensor, order: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Allocate a tensor.

    Args:
        shape: Its shape.
        like: Has its type and device.
        order: How it lies in memory.

    Returns:
        Tensor of any content.
    """
    return _advised(torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=order))


def _advised(result: Tensor) -> Tensor:
    if _advise is not None and result.nbytes >= _LARGE and result.device.type == "cpu":
        start = -(-result.data_ptr() // _PAGE) * _PAGE
        _advise(start, result.data_ptr() + result.nbytes - start, _HUGE_PAGES)  # a hint: it may be refused, and changes no content
    return result


def compute(function: Callable[..., Tensor], shape: tuple[int, ...], one: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute something of two tensors that may be large.

    Args:
        function: Takes the tensors, and ``out``.
        shape: Of the result.
        one: The first tensor.
        other: The second one.
        out: May take the result.

    Returns:
        The result.
    """
    # what is to be differentiated cannot be told where to be
    if torch.is_grad_enabled() or one.dtype != other.dtype:
        return function(one, other)
    if out is not None:
        return function(one, other, out=out)
    if prod(shape) * one.element_size() < _LARGE:
        return function(one, other)
    return function(one, other, out=_advised(torch.empty_like(one)) if one.shape == shape else empty(shape, one))
