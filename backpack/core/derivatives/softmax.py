"""Softmax and its relatives along an axis other than the samples': products with their full Jacobian and Hessian."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Size, Tensor
from torch.nn import LogSoftmax, Module, Softmax, Softmax2d, Softmin

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.blocks import BlockCurvedDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.errors import MixedSamplesError
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample


class NormalizedExponentialDerivatives(BlockCurvedDerivatives):
    """A function of the probabilities ``p = softmax(+-x)``, which its output determines.

    The residual of each of them is ``sum_i c_i (e_i - p) (e_i - p)^T`` with the unit vectors ``e_i``.
    """

    keeps = frozenset({"output"})

    def applies(self, module: Module) -> bool:
        return module.output.dim() + self._axis(module) > 0

    def axis_of_blocks(self, module: Module) -> int:
        return self._axis_of_features(module)

    def _dim(self, module: Module) -> int | None:
        return module.dim

    def _axis(self, module: Module) -> int:
        # negative, so that it is the same in a matrix; where there is none, it is torch's choice, which it warns about
        ndim, dim = module.output.dim(), self._dim(module)
        dim = int(ndim not in {0, 1, 3}) if dim is None else dim
        return dim if dim < 0 else dim - ndim

    def _axis_of_features(self, module: Module) -> int:
        """Axis of the output along which probabilities add up to one.

        Returns:
            The axis, negative.

        Raises:
            MixedSamplesError: If the axis is the one of the samples.
        """
        if not self.applies(module):
            raise MixedSamplesError(
                f"{module} normalizes over axis 0 of a tensor of shape {list(module.output.shape)}, which holds the samples, so that these "
                "influence one another. Normalize over another axis, and add a batch axis to an unbatched input."
            )
        return self._axis(module)

    @abstractmethod
    def _jac_t(self, output: Tensor, mat: Tensor, axis: int) -> Tensor:
        """Multiply by the transposed Jacobian.

        Args:
            output: ``[*output]``.
            mat: ``[V, *output]``.
            axis: The axis of the probabilities.

        Returns:
            ``[V, *input0]``.
        """

    @abstractmethod
    def _curvature(self, output: Tensor, grad: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """Compute what the residual is made of.

        Args:
            output: ``[*output]``.
            grad: Gradient of the output, likewise.
            axis: The axis of the probabilities.

        Returns:
            ``c`` and ``p``, likewise.
        """

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        axis = self._axis_of_features(module)
        c, p = self._curvature(module.output, g_out[0], axis)
        weighted = c * (mat - (p * mat).sum(axis, keepdim=True))
        return weighted - p * weighted.sum(axis, keepdim=True)

    def residual_root(self, module: Module, g_out: Grads) -> tuple[_CenteredUnits, Tensor]:
        axis = self._axis_of_features(module)
        c, p = (value.movedim(axis, -1).flatten(0, -2) for value in self._curvature(wide(module.output), wide(g_out[0]), axis))
        return _CenteredUnits(c.abs().sqrt(), p), c.sign()

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return self._jac_t(subsample(module.output, subsampling=subsampling), mat, self._axis_of_features(module))


def _centered(probabilities: Tensor, mat: Tensor, axis: int) -> Tensor:
    """Multiply by ``diag(p) - p p^T``.

    Returns:
        ``[V, *output]``.
    """
    weighted = probabilities * mat
    return weighted - probabilities * weighted.sum(axis, keepdim=True)


class _CenteredUnits:
    """Columns ``s_i (e_i - p)`` of blocks, formed where they are needed, ``[B, M, M]``."""

    def __init__(self, scales: Tensor, probabilities: Tensor) -> None:
        """Take note of what they are made of.

        Args:
            scales: ``s [B, M]``.
            probabilities: ``p [B, M]``.
        """
        self._scales, self._probabilities = scales, probabilities
        self.shape = Size([*scales.shape, scales.shape[1]])

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor:
        block, number = at
        columns = -self._probabilities[block]
        columns[torch.arange(len(number), device=number.device), number] += 1
        return columns.mul_(self._scales[at].unsqueeze(1))


@register(Softmax)
class SoftmaxDerivatives(NormalizedExponentialDerivatives):
    """``p = softmax(x)`` with Jacobian ``diag(p) - p p^T``."""

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)  # symmetric

    def _jac_t(self, output: Tensor, mat: Tensor, axis: int) -> Tensor:
        return _centered(output, mat, axis)

    def _curvature(self, output: Tensor, grad: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        return _centered(output, grad, axis), output


@register(Softmin)
class SoftminDerivatives(SoftmaxDerivatives):
    """``softmax(-x)``: the sign cancels from the second derivative."""

    def _jac_t(self, output: Tensor, mat: Tensor, axis: int) -> Tensor:
        return -_centered(output, mat, axis)


@register(Softmax2d)
class Softmax2dDerivatives(SoftmaxDerivatives):
    """Softmax over the channels of images."""

    def _dim(self, module: Softmax2d) -> int:
        return -3


@register(LogSoftmax)
class LogSoftmaxDerivatives(NormalizedExponentialDerivatives):
    """``log(p) = x - logsumexp(x)`` with Jacobian ``I - 1 p^T``."""

    def _jac_mat_prod(self, module: LogSoftmax, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat - (module.output.exp() * mat).sum(self._axis_of_features(module), keepdim=True)

    def _jac_t(self, output: Tensor, mat: Tensor, axis: int) -> Tensor:
        return mat - output.exp() * mat.sum(axis, keepdim=True)

    def _curvature(self, output: Tensor, grad: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        probabilities = output.exp()
        return -grad.sum(axis, keepdim=True) * probabilities, probabilities
