"""Memory of large results: an operating system that hands it out in small pieces, and zeroes it, may take longer than the arithmetic that fills it.

Hence large pages are asked for, and what results of the pass before have taken is used again, if nothing else refers to it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_int, c_size_t, c_void_p
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage

LARGE = 2**22
"""Bytes from which on large pages are asked for, which torch does only where an environment variable says so.

Measured for products of 64 x 512 x 1152 numbers: 55 ms in fresh memory, 26 ms in fresh memory of large pages, 19 ms in memory that was used before.
"""
_PAGE, _HUGE_PAGES = 4096, 14
_advise = getattr(CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _advise is not None:
    _advise.argtypes = (c_void_p, c_size_t, c_int)
_SMALL = 2**17
"""Bytes below which memory that was freed is never given back to the operating system, as far as allocators do as glibc's."""
_references = getattr(torch._C, "_storage_Use_Count", None)


class _Before(threading.local):
    """Memory of results of the pass before that nothing refers to any more, while a pass is running.

    Attributes:
        free: Size in bytes to what is there of this size.
        due: Size to the number of results of this size that the pass has not written yet, if it writes as many as the one before.
    """

    def __init__(self) -> None:
        self.free: dict[int, list[UntypedStorage]] = {}
        self.due: dict[int, int] = {}


_before = _Before()


@contextmanager
def reusing(stale: list[Any]) -> Iterator[None]:
    """Let results be written where those of the pass before are, as far as nothing else refers to these: no tensor, view, graph, array or process.

    Args:
        stale: Results of the pass before, tensors or lists of them, of which this is the last reference; it is emptied.
    """
    outer = _before.free, _before.due
    _before.free, _before.due = {}, {}
    while stale:
        _offer(stale)
    try:
        yield
    finally:
        _before.free, _before.due = outer


def _offer(stale: list[Any]) -> None:
    """Take the last result off a list, and note its memory if nothing else refers to that.

    Args:
        stale: The results.
    """
    value = stale.pop()
    if isinstance(value, list):
        stale.extend(value)
    if type(value) is not Tensor or value.layout is not torch.strided or value.nbytes < _SMALL or not value.is_cpu or _references is None:
        return
    storages, value = [value.untyped_storage()], None
    size, alone = storages[0].nbytes(), _references(storages[0]._cdata) == 1 and _count(storages) == _ALONE
    if alone and storages[0].resizable() and not storages[0].is_shared():  # memory of arrays cannot be resized
        _before.free.setdefault(size, []).extend(storages)
        _before.due[size] = len(_before.free[size])


def _count(storages: list[Any]) -> int:
    return sys.getrefcount(storages[0])


_ALONE = _count([object()])


def written(value: Any) -> None:
    """Give memory of the pass before back: as much as a result takes that is there now; all of it, if results of this size are not to be expected.

    Args:
        value: What was written, a tensor or a list.
    """
    if not _before.due:
        return
    if isinstance(value, list):
        for part in value:
            written(part)
    elif type(value) is Tensor and value.layout is torch.strided and value.nbytes >= _SMALL:
        if _before.due.get(size := value.untyped_storage().nbytes()):
            _before.due[size] -= 1
            del _before.free[size][_before.due[size] :]
        else:  # the mini-batch is another one
            _before.free, _before.due = {}, {}


def empty(shape: tuple[int, ...], like: Tensor, order: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Allocate a tensor.

    Args:
        shape: Its shape.
        like: Has its type and device.
        order: How it lies in memory.

    Returns:
        Tensor of any content.
    """
    return _found(torch.empty, shape, like, memory_format=order)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor.

    Args:
        tensor: The tensor.

    Returns:
        Its copy.
    """
    return empty(tuple(tensor.shape), tensor).copy_(tensor)


def concatenated(tensors: list[Tensor]) -> Tensor:
    """Put tensors side by side along axis 0.

    Args:
        tensors: The tensors, of the same further axes.

    Returns:
        All of them: where they are, if they are all that is there.
    """
    first = tensors[0]
    if any(tensor.requires_grad or tensor.dtype != first.dtype for tensor in tensors):
        return torch.cat(tensors)
    shape = (sum(map(len, tensors)), *first.shape[1:])
    if _is_all(tensors):
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage(), 0, shape)  # axes of length one have any stride
    return torch.cat(tensors, out=empty(shape, first))


def _is_all(tensors: list[Tensor]) -> bool:
    # whether tensors fill their memory one behind the other
    place = tensors[0].untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != place or not tensor.nbytes:
            return False
        place += tensor.nbytes
    storages = [tensor.untyped_storage() for tensor in tensors]
    return len({storage.data_ptr() for storage in storages}) == 1 and place == storages[0].data_ptr() + storages[0].nbytes()


def _found(create: Callable[..., Tensor], what: Any, like: Tensor, **options: Any) -> Tensor:
    """Allocate a tensor where a result of the pass before is that nothing refers to, or else in large pages.

    Args:
        create: Makes a tensor.
        what: Its first argument.
        like: Has the type and the device.
        **options: Further arguments.

    Returns:
        Tensor of any content.
    """
    if _before.free and like.device.type == "cpu":
        nowhere = create(what, dtype=like.dtype, device="meta", **options)
        if free := _before.free.get(nowhere.nbytes):
            return torch.empty(0, dtype=like.dtype).set_(free.pop(), 0, nowhere.shape, nowhere.stride())
    result = create(what, dtype=like.dtype, device=like.device, **options)
    if _advise is not None and result.nbytes >= LARGE and result.device.type == "cpu":
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
    size = prod(shape) * one.element_size()
    if size < LARGE and size not in _before.free:
        return function(one, other)
    return function(one, other, out=_found(torch.empty_like, one, one) if one.shape == shape else empty(shape, one))
