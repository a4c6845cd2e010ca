"""Normalisations: what weight and bias do is written once for all of them, and what mean and variance do once for those of a sample's own entries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from fractions import Fraction
from itertools import chain
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import GroupNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, LayerNorm, LocalResponseNorm, Module, RMSNorm
from torch.nn.functional import avg_pool2d, pad

from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.blocks import BlockCurvedDerivatives
from backpack.core.derivatives.registry import register
from backpack.core.derivatives.shape_check import subsampled
from backpack.utils.eigen import signed_root
from backpack.utils.errors import UnsupportedError
from backpack.utils.norm_residual import ResidualRoot
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample

_ONE, _SOME = 1 << 16, 1 << 20
"""Entries of a column from which on columns are multiplied one by one, and of smaller columns that are multiplied together."""


class ScaleShiftDerivatives(BaseParameterDerivatives):
    """``weight * x_hat + bias``: the normalised input is scaled and shifted, entry by entry, by parameters that vary along some axes only."""

    keeps = frozenset({"input"})

    @abstractmethod
    def normalised(self, module: Module, subsampling: Samples = None) -> Tensor:
        """Normalise the input.

        Args:
            module: The layer with its recorded input.
            subsampling: Samples to select; ``None`` for all.

        Returns:
            ``x_hat [N, *output]``.
        """

    def parameter_axis(self, module: Module) -> int:
        """First of the axes of the output along which weight and bias vary: that of the channels, by default.

        Returns:
            The axis.
        """
        return 1

    def _spread(self, module: Module, parameters: Tensor) -> Tensor:
        """Let parameters broadcast against matrices.

        Returns:
            ``[V, 1, ..., *param, 1, ...]`` from ``parameters`` ``[V, *param]``, one axis more than the output.
        """
        before, shape = self.parameter_axis(module), parameters.shape[1:]
        after = module.output.dim() - before - len(shape)
        return parameters.reshape(parameters.shape[0], *[1] * before, *shape, *[1] * after)

    def _scaled(self, module: Module, mat: Tensor) -> Tensor:
        return mat if module.weight is None else mat * self._spread(module, module.weight[None])

    def _summed(self, module: Module, param: Tensor, mat: Tensor, sum_batch: bool) -> Tensor:
        """Sum over the axes along which a parameter does not vary.

        Returns:
            ``[V, *param]`` if ``sum_batch``, else ``[V, N, *param]``.
        """
        start = self.parameter_axis(module)
        axes = [1 + i for i in range(0 if sum_batch else 1, module.output.dim()) if not start <= i < start + param.dim()]
        return mat.sum(axes) if axes else mat

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        return self._summed(module, module.weight, mat * self.normalised(module, subsampling), sum_batch)

    def _bias_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        return self._summed(module, module.bias, mat, sum_batch)

    def _weight_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._spread(module, mat) * self.normalised(module)

    def _bias_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._spread(module, mat).expand(-1, *module.output.shape)


class GroupStatisticsDerivatives(ScaleShiftDerivatives, BlockCurvedDerivatives):
    """Each group of ``M`` consecutive entries of a sample is divided by its standard deviation, after its mean was subtracted.

    With ``s`` the inverse deviation and ``C`` the projection that subtracts the mean, ``x_hat = s C x`` has the symmetric Jacobian
    ``s (C - x_hat x_hat^T / M)`` in each group.

    Attributes:
        centred: Whether the mean is subtracted. If not, the deviation is that from zero, and ``C`` the identity.
    """

    centred: ClassVar[bool] = True

    @abstractmethod
    def group_size(self, module: Module) -> int:
        """Number of entries that are normalised together.

        Returns:
            ``M``.
        """

    def statistics(self, module: Module, subsampling: Samples = None) -> tuple[Tensor, Tensor]:
        """Normalise the groups of all samples.

        Args:
            module: The layer with its recorded input.
            subsampling: Samples to select; ``None`` for all.

        Returns:
            ``x_hat [R, M]`` and inverse deviations ``s [R, 1]``, where ``R`` counts the groups of all samples.
        """
        rows = self._groups(module, subsampling)
        if rows.requires_grad and torch.is_grad_enabled():  # the deviation that torch returns is not connected to the graph
            return standardized(rows, module.eps)
        x_hat, _, scale = torch.native_layer_norm(rows, rows.shape[1:], None, None, module.eps)
        return x_hat, scale

    def _statistics(self, module: Module, subsampling: Samples = None) -> tuple[Tensor, Tensor]:
        """Normalise the groups of all samples, once while a backward pass is at the module: for its parameters, for its input and for all flows.

        Returns:
            What ``statistics`` does.
        """
        scratch = getattr(module, "scratch", None) if subsampling is None else None
        if scratch is None:
            return self.statistics(module, subsampling)
        if "statistics" not in scratch:
            scratch["statistics"] = self.statistics(module)
        return scratch["statistics"]

    def _groups(self, module: Module, subsampling: Samples) -> Tensor:
        inputs, size = subsample(module.input0, subsampling=subsampling), self.group_size(module)
        return inputs.reshape(inputs.numel() // max(1, size), size)

    def normalised(self, module: Module, subsampling: Samples = None) -> Tensor:
        return self._statistics(module, subsampling)[0].reshape(subsampled(module.output.shape, subsampling))

    def _without_mean(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows

    def _jac_of_normalised(self, x_hat: Tensor, scale: Tensor, mat: Tensor) -> Tensor:
        """Multiply by the (symmetric) Jacobian of the normalised input.

        Returns:
            ``[V, N, *]`` from ``mat`` ``[V, N, *]``.
        """
        if not mat.numel():
            return mat.clone()
        rows = mat.reshape(mat.shape[0], *x_hat.shape)
        if x_hat.requires_grad or not self.centred:
            along = (rows * x_hat).mean(-1, keepdim=True)
            return torch.addcmul(self._without_mean(rows), along, x_hat, value=-1).mul_(scale).reshape(mat.shape)
        # layer normalisation of what is normalised already: one pass, a third of the time of the formula
        flat, copies = rows.flatten(0, 1), x_hat.expand_as(rows).reshape(-1, x_hat.shape[1])
        mean, deviation = copies.new_zeros(len(copies), 1), copies.new_ones(len(copies), 1)
        norm_backward = torch.ops.aten.native_layer_norm_backward
        projected = norm_backward(flat, copies, copies.shape[1:], mean, deviation, None, None, [True, False, False])[0]
        return projected.reshape(rows.shape).mul_(scale).reshape(mat.shape)

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        x_hat, scale = self._statistics(module)
        return _by_columns(lambda columns: self._scaled(module, self._jac_of_normalised(x_hat, scale, columns)), mat)

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        x_hat, scale = self._statistics(module, subsampling)
        return _by_columns(lambda columns: self._jac_of_normalised(x_hat, scale, self._scaled(module, columns)), mat)

    def _second_order(self, module: Module, g_out: Grads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Vectors of which the residual ``-s^2 (a C + (x_hat h^T + h x_hat^T) / M - 3 a x_hat x_hat^T / M)`` of a group is made.

        It is the derivative of the gradient ``s (h - a x_hat)`` with respect to ``x``.

        Returns:
            ``x_hat [R, M]``, ``s [R, 1]``, gradient with respect to ``x_hat`` without its mean ``h [R, M]``, ``a = h^T x_hat / M [R, 1]``.
        """
        x_hat, scale = self._statistics(module)
        h = self._without_mean(self._scaled(module, g_out[0][None]).reshape(x_hat.shape))
        return x_hat, scale, h, (h * x_hat).mean(-1, keepdim=True)

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        x_hat, scale, h, a = self._second_order(module, g_out)
        rows = mat.reshape(mat.shape[0], *x_hat.shape)
        along_x, along_h = (rows * x_hat).mean(-1, keepdim=True), (rows * h).mean(-1, keepdim=True)
        change = along_x * h + a * self._without_mean(rows) + (along_h - 3 * a * along_x) * x_hat
        return (-scale.square() * change).reshape(mat.shape)

    def columns_of_an_entry(self, module: Module) -> Fraction:
        return 1 + Fraction(2, max(1, self.group_size(module)))

    def residual_root(self, module: Module, g_out: Grads) -> tuple[ResidualRoot, Tensor]:
        x_hat, scale, h, a = map(wide, self._second_order(module, g_out))
        signs = torch.cat([-a.sign().expand_as(x_hat), -torch.ones_like(a), torch.ones_like(a)], 1)
        return ResidualRoot(x_hat, scale, h, a, self.centred), signs

    def hessian_diagonal(self, module: Module, g_in: Grads, g_out: Grads) -> Tensor:
        x_hat, scale, h, a = self._second_order(module, g_out)
        size = max(1, x_hat.shape[1])
        diagonal = 2 * x_hat * h / size + a * ((1 - 1 / size if self.centred else 1) - 3 * x_hat.square() / size)
        return (-scale.square() * diagonal).reshape(module.input0.shape)


def standardized(rows: Tensor, eps: Tensor | float) -> tuple[Tensor, Tensor]:
    """Standardize rows by operations that can be differentiated.

    Args:
        rows: ``[R, M]``.
        eps: Added to the variance.

    Returns:
        Rows without their mean, times the inverse deviation, ``[R, M]``; the inverse deviation ``[R, 1]``.
    """
    variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    return (rows - mean) * scale, scale


def _by_columns(product: Callable[[Tensor], Tensor], mat: Tensor) -> Tensor:
    """Apply a product to all columns at once if they are small, else in parts, so that what is made on the way stays in cache, and is small.

    Returns:
        ``[V, *]`` from ``mat`` ``[V, *]``.
    """
    # measured: one by one is twice as fast for 10 columns with 2**18 entries, and half as fast with 2**13
    size = mat[:1].numel()
    step = 1 if size >= _ONE else _SOME // max(1, size)
    if step >= len(mat):
        return product(mat)
    parts = map(product, mat.split(step))
    if torch.is_grad_enabled():
        return torch.cat(list(parts))
    first = next(parts)
    result = first.new_empty(mat.shape)
    for to, part in zip(result.split(step), chain([first], parts), strict=True):
        to.copy_(part)
    return result


@register(LayerNorm)
class LayerNormDerivatives(GroupStatisticsDerivatives):
    """The last axes are normalised together, at each index of the axes in front of them."""

    any_batch_axis = True
    least_axes = 2

    def feature_axes(self, module: LayerNorm) -> int:
        return len(module.normalized_shape)

    def parameter_axis(self, module: LayerNorm) -> int:
        return module.output.dim() - len(module.normalized_shape)

    def group_size(self, module: LayerNorm) -> int:
        return prod(module.normalized_shape)


@register(RMSNorm)
class RMSNormDerivatives(LayerNormDerivatives):
    """The root of the mean square stands in place of the standard deviation."""

    centred = False

    def statistics(self, module: RMSNorm, subsampling: Samples = None) -> tuple[Tensor, Tensor]:
        rows = self._groups(module, subsampling)
        accurate = wide(rows)  # as torch does for half precision
        eps = torch.finfo(accurate.dtype).eps if module.eps is None else module.eps
        scale = (accurate.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (accurate * scale).to(rows.dtype), scale.to(rows.dtype)


@register(GroupNorm)
class GroupNormDerivatives(GroupStatisticsDerivatives):
    """Groups of channels are normalised together, at all positions."""

    least_axes = 2

    def group_size(self, module: GroupNorm) -> int:
        return prod(module.input0.shape[1:]) // module.num_groups


@register(InstanceNorm1d)
class InstanceNorm1dDerivatives(GroupStatisticsDerivatives):
    """Each channel is normalised over all its positions, unless with running statistics, which is left to the graph."""

    least_axes = 3

    def applies(self, module: InstanceNorm1d) -> bool:
        return module.training or not module.track_running_stats

    def statistics(self, module: InstanceNorm1d, subsampling: Samples = None) -> tuple[Tensor, Tensor]:
        # what was recorded in a forward pass was asked then, and the mode may have changed since
        if isinstance(module, Module) and not self.applies(module):
            raise UnsupportedError(f"{module} in evaluation mode uses running statistics, for which no rule exists. Use GenericDerivatives.")
        return super().statistics(module, subsampling)

    def group_size(self, module: InstanceNorm1d) -> int:
        return prod(module.input0.shape[2:])


@register(InstanceNorm2d)
class InstanceNorm2dDerivatives(InstanceNorm1dDerivatives):
    """The same for images; with an axis less, the input is a single image."""

    least_axes = 4


@register(InstanceNorm3d)
class InstanceNorm3dDerivatives(InstanceNorm1dDerivatives):
    """The same for volumes; with an axis less, the input is a single volume."""

    least_axes = 5


@register(LocalResponseNorm)
class LocalResponseNormDerivatives(BlockCurvedDerivatives):
    """``x / d^beta`` with ``d = k + alpha A x^2``, where ``A`` takes the mean over a window of channels around each channel."""

    keeps = frozenset({"input"})
    least_axes = 3

    def hessian_is_diagonal(self, module: LocalResponseNorm) -> bool:
        return module.input0.shape[1] == 1

    def axis_of_blocks(self, module: LocalResponseNorm) -> int:
        return 1 - module.input0.dim()

    @staticmethod
    def _mean(module: LocalResponseNorm, tensor: Tensor, transposed: bool = False) -> Tensor:
        """Multiply by ``A``, or by its transposed, which looks the other way where the window is not symmetric.

        Returns:
            ``[V, N, C, *]`` from ``tensor`` ``[V, N, C, *]``.
        """
        before, after = module.size // 2, (module.size - 1) // 2
        images = tensor.reshape(prod(tensor.shape[:2]), 1, tensor.shape[2], prod(tensor.shape[3:]))
        padded = pad(images, (0, 0, after, before) if transposed else (0, 0, before, after))
        return avg_pool2d(padded, (module.size, 1), 1).reshape(tensor.shape)

    def _recorded(self, module: LocalResponseNorm, subsampling: Samples = None) -> tuple[Tensor, Tensor]:
        """Compute ``d``.

        Returns:
            ``x`` and ``d``, both ``[1, N, C, *]``.
        """
        x = subsample(module.input0, subsampling=subsampling)[None]
        return x, module.k + module.alpha * self._mean(module, x.square())

    def _jac_mat_prod(self, module: LocalResponseNorm, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        x, d = self._recorded(module)
        return d.pow(-module.beta) * (mat - 2 * module.alpha * module.beta * x / d * self._mean(module, x * mat))

    def _jac_t_mat_prod(self, module: LocalResponseNorm, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        x, d = self._recorded(module, subsampling)
        mat = d.pow(-module.beta) * mat
        return mat - 2 * module.alpha * module.beta * x * self._mean(module, x / d * mat, transposed=True)

    def _residual_mat_prod(self, module: LocalResponseNorm, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        # differentiate the transposed product above, at mat = g, in the direction of the columns, in which d changes by `change`
        x, d = self._recorded(module)
        factor, change = 2 * module.alpha * module.beta, 2 * module.alpha * self._mean(module, x * mat)
        g = d.pow(-module.beta - 1) * g_out[0]
        moved = mat - (module.beta + 1) * x / d * change
        return -module.beta * g * change - factor * (mat * self._mean(module, x * g, True) + x * self._mean(module, moved * g, True))

    def _residual_of_channels(self, module: LocalResponseNorm, g_out: Grads) -> Tensor:
        """Compute the residual of each position: channels meet, positions do not.

        Returns:
            ``[N, *, C, C]``.
        """
        units = torch.eye(module.input0.shape[1], dtype=g_out[0].dtype, device=g_out[0].device)
        units = units.reshape(len(units), 1, len(units), *[1] * (module.input0.dim() - 2)).expand(-1, *module.input0.shape)
        return self._residual_mat_prod(module, None, g_out, units).movedim((0, 2), (-1, -2))

    def residual_root(self, module: LocalResponseNorm, g_out: Grads) -> tuple[Tensor, Tensor]:
        return signed_root(wide(self._residual_of_channels(module, g_out)).flatten(0, -3))

    def hessian_diagonal(self, module: LocalResponseNorm, g_in: Grads, g_out: Grads) -> Tensor:
        return self._residual_of_channels(module, g_out).diagonal(dim1=-1, dim2=-2).movedim(-1, 1)
