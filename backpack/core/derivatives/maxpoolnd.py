"""Max-pooling selects entries: its Jacobian gathers them, and its transposed one scatters. Max-unpooling is the same, transposed."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import (
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MaxUnpool1d,
    MaxUnpool2d,
    MaxUnpool3d,
    Module,
    functional,
)

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.kinds import FlatDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.pages import empty
from backpack.utils.subsampling import subsample


def _gather(mat: Tensor, positions: Tensor, axes: int) -> Tensor:
    """Read entries off the last axes.

    Args:
        mat: ``[V, *lead, *large]``.
        positions: ``[*lead, *small]``, indices into the flattened ``large``.
        axes: Number of axes of ``large`` and ``small``.

    Returns:
        ``[V, *lead, *small]``.
    """
    lead, size = prod(positions.shape[:-axes]), prod(positions.shape[-axes:])
    flat = mat.reshape(mat.shape[0], lead, prod(mat.shape[-axes:]))
    return flat.gather(2, positions.reshape(lead, size).expand(len(mat), -1, -1)).reshape(mat.shape[0], *positions.shape)


def _scatter(mat: Tensor, positions: Tensor, large: tuple[int, ...]) -> Tensor:
    """Add entries to places of the last axes, the transposed of ``_gather``.

    Args:
        mat: ``[V, *lead, *small]``.
        positions: ``[*lead, *small]``, indices into the flattened ``large``.
        large: Shape of the last axes of the result.

    Returns:
        ``[V, *lead, *large]``.
    """
    small, lead = positions.shape[-len(large) :], positions.shape[: -len(large)]
    index = positions.reshape(prod(lead), prod(small)).expand(len(mat), -1, -1)
    out = empty((len(mat), prod(lead), prod(large)), mat).zero_().scatter_add_(2, index, mat.reshape(index.shape))
    return out.reshape(len(mat), *lead, *large)


class MaxPoolNDDerivatives(FlatDerivatives):
    """Maxima over windows of the last ``N`` axes, which may overlap: an entry that is chosen by several of them gets the sum."""

    keeps = frozenset({"input"})
    reads_maxima = True

    def __init__(self, N: int) -> None:
        """Choose the number of pooled axes.

        Args:
            N: 1, 2 or 3.
        """
        self._axes = N
        self._pool = (functional.max_pool1d_with_indices, functional.max_pool2d_with_indices, functional.max_pool3d_with_indices)[N - 1]

    def get_pooling_idx(self, module: Module, subsampling: Samples = None) -> Tensor:
        """Find the maxima by pooling the recorded input once more.

        Args:
            module: The layer with its recorded input.
            subsampling: Samples to select; ``None`` for all.

        Returns:
            ``[N, *channels, *pooled]``: positions of the maxima among the entries of the pooled axes of the input.
        """
        return self._run(module, subsample(module.input0, subsampling=subsampling))[1]

    def _run(self, module: Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self._pool(batch, module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)

    def _positions(self, module: Module, subsampling: Samples = None) -> Tensor:
        # the graph remembers them: pooling again takes as long as two or three columns
        known = getattr(module, "maxima", None)
        if known is None:
            return self.get_pooling_idx(module, subsampling)
        return subsample(known.reshape(module.output.shape), subsampling=subsampling)

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return _gather(mat, self._positions(module), self._axes)

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return _scatter(mat, self._positions(module, subsampling), module.input0.shape[-self._axes :])

    def ea_jac_t_mat_jac_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        features = module.input0.shape[1:]
        pooled, channels = features[-self._axes :].numel(), features[: -self._axes].numel()
        index = self._positions(module).reshape(-1, channels, mat.shape[0] // channels)
        index = (index + pooled * torch.arange(channels, device=index.device).unsqueeze(1)).flatten(1)
        total = mat.new_zeros(features.numel(), features.numel()).index_put_((index.unsqueeze(2), index.unsqueeze(1)), mat, accumulate=True)
        return total / index.shape[0]


@register(MaxPool1d)
class MaxPool1DDerivatives(MaxPoolNDDerivatives):
    """Derivatives of max-pooling over one axis."""

    def __init__(self) -> None:
        super().__init__(1)


@register(MaxPool2d)
class MaxPool2DDerivatives(MaxPoolNDDerivatives):
    """Derivatives of max-pooling over two axes."""

    def __init__(self) -> None:
        super().__init__(2)


@register(MaxPool3d)
class MaxPool3DDerivatives(MaxPoolNDDerivatives):
    """Derivatives of max-pooling over three axes."""

    def __init__(self) -> None:
        super().__init__(3)


class AdaptiveMaxPoolNDDerivatives(MaxPoolNDDerivatives):
    """Maxima over windows that divide the pooled axes into given numbers of parts."""

    def __init__(self, N: int) -> None:
        super().__init__(N)
        self._pool = (
            functional.adaptive_max_pool1d_with_indices,
            functional.adaptive_max_pool2d_with_indices,
            functional.adaptive_max_pool3d_with_indices,
        )[N - 1]

    def _run(self, module: Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self._pool(batch, module.output_size)


register(AdaptiveMaxPool1d, AdaptiveMaxPoolNDDerivatives(1))
register(AdaptiveMaxPool2d, AdaptiveMaxPoolNDDerivatives(2))
register(AdaptiveMaxPool3d, AdaptiveMaxPoolNDDerivatives(3))


class MaxUnpoolNDDerivatives(FlatDerivatives):
    """Entries are put to the positions that the second argument says, among zeros."""

    keeps = frozenset({"input"})

    def __init__(self, N: int) -> None:
        """Choose the number of pooled axes.

        Args:
            N: 1, 2 or 3.
        """
        self._axes = N

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return _scatter(mat, module.input1, module.output.shape[-self._axes :])

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return _gather(mat, subsample(module.input1, subsampling=subsampling), self._axes)


register(MaxUnpool1d, MaxUnpoolNDDerivatives(1))
register(MaxUnpool2d, MaxUnpoolNDDerivatives(2))
register(MaxUnpool3d, MaxUnpoolNDDerivatives(3))
