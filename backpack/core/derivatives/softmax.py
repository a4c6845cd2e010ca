"""Softmax and its relatives along an axis other than the samples': products with their full Jacobian and Hessian."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor
from torch.nn import LogSoftmax, Module, Softmax, Softmax2d, Softmin

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Samples
from backpack.core.derivatives.registry import register
from backpack.utils.errors import MixedSamplesError
from backpack.utils.subsampling import subsample


class NormalizedExponentialDerivatives(BaseDerivatives):
    """A function of the probabilities ``p = softmax(+-x)``, which its output determines."""

    keeps = frozenset({"output"})

    def applies(self, module: Module) -> bool:
        return module.output.dim() + self._axis(module) > 0

    def hessian_is_zero(self, module: Module) -> bool:
        return False

    def hessian_is_diagonal(self, module: Module) -> bool:
        return False

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

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return self._jac_t(subsample(module.output, subsampling=subsampling), mat, self._axis_of_features(module))


def _centered(probabilities: Tensor, mat: Tensor, axis: int) -> Tensor:
    """Multiply by ``diag(p) - p p^T``.

    Returns:
        ``[V, *output]``.
    """
    weighted = probabilities * mat
    return weighted - probabilities * weighted.sum(axis, keepdim=True)


@register(Softmax)
class SoftmaxDerivatives(NormalizedExponentialDerivatives):
    """``p = softmax(x)`` with Jacobian ``diag(p) - p p^T``."""

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)  # symmetric

    def _jac_t(self, output: Tensor, mat: Tensor, axis: int) -> Tensor:
        return _centered(output, mat, axis)

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        # differentiate p * (g - p^T g) in the direction of the columns, in which p changes by `change`
        p, g, axis = module.output, g_out[0], self._axis_of_features(module)
        change = _centered(p, mat, axis)
        return change * (g - (p * g).sum(axis, keepdim=True)) - p * (change * g).sum(axis, keepdim=True)


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

    def _residual_mat_prod(self, module: LogSoftmax, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        axis = self._axis_of_features(module)
        return -g_out[0].sum(axis, keepdim=True) * _centered(module.output.exp(), mat, axis)
