"""Permutation of axes as a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from backpack.utils.errors import ArgumentError


class Permute(Module):
    """Module version of ``torch.permute`` and ``torch.transpose`` that leaves the batch axis first.

    After construction (``init_transpose=False``) or the first forward pass (``init_transpose=True``), ``dims`` is a permutation that starts with 0
    and has no negative axes.
    """

    def __init__(self, *dims: int | Sequence[int], init_transpose: bool = False) -> None:
        """Store the permutation.

        Args:
            *dims: For each axis of the output, the axis of the input that it is taken from. With ``init_transpose``, the two axes to exchange.
                Negative axes count from the end. They may also be given in a list or a tuple.
            init_transpose: ``dims`` is a pair of axes. It becomes a permutation in the first forward pass, when the number of axes is known.

        Raises:
            ArgumentError: If ``dims`` is no permutation (no pair), or moves the batch axis. Whether a pair of negative axes moves the batch axis is
                known, and checked, in the first forward pass.
        """
        super().__init__()
        dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
        if init_transpose:
            if len(dims) != 2:
                raise ArgumentError(f"A transposition exchanges two axes, got {dims}.")
            if 0 in dims:
                _refuse_moving_batch(dims)
            self.dims = dims
        else:
            self.dims = _axes(dims, len(dims))
            if sorted(self.dims) != list(range(len(dims))):
                raise ArgumentError(f"{dims} is not a permutation of all axes.")
            if self.dims[:1] != (0,):
                _refuse_moving_batch(dims)
        self.init_transpose = init_transpose

    def forward(self, input: Tensor) -> Tensor:
        """Permute the axes.

        Args:
            input: Tensor with as many axes as ``dims`` (any number in the first forward pass with ``init_transpose``).

        Returns:
            View of the input.
        """
        if self.init_transpose:
            self.dims = self._permutation(input.dim())
            self.init_transpose = False
        return input.permute(self.dims)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.dims)) + (", init_transpose=True" if self.init_transpose else "")

    def _permutation(self, ndim: int) -> tuple[int, ...]:
        first, second = _axes(self.dims, ndim)
        if 0 in {first, second}:
            _refuse_moving_batch(self.dims, ndim)
        permutation = list(range(ndim))
        permutation[first], permutation[second] = second, first
        return tuple(permutation)


def _axes(dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Count axes from the front.

    Args:
        dims: Axes, counted from the end where negative.
        ndim: Number of axes of the tensor.

    Returns:
        The axes, none negative.

    Raises:
        ArgumentError: If the tensor has no such axis.
    """
    if not all(-ndim <= dim < ndim for dim in dims):
        raise ArgumentError(f"Permute({', '.join(map(str, dims))}) names an axis that a tensor with {ndim} axes does not have.")
    return tuple(dim % ndim for dim in dims)


def _refuse_moving_batch(dims: Sequence[int], ndim: int | None = None) -> None:
    of_tensor = "" if ndim is None else f" of a tensor with {ndim} axes"
    raise ArgumentError(f"Permute({', '.join(map(str, dims))}) moves the batch axis{of_tensor}; axis 0 must stay first.")
