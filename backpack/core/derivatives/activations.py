"""Element-wise activations of ``torch.nn``: first and second derivative in closed form, one row each.

A rule reads the output where this alone determines the derivative, else the input.
"""

from __future__ import annotations

from math import pi, prod, sqrt

import torch
from torch import Tensor
from torch.nn import (
    CELU,
    ELU,
    GELU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    RReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
)
from torch.nn.functional import softplus

from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.elementwise import ActivationDerivatives, OverwritableDerivatives, PiecewiseLinearDerivatives, in_order_of
from backpack.core.derivatives.registry import register
from backpack.utils.errors import UnsupportedError
from backpack.utils.pages import compute
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample

OUTPUT = frozenset({"output"})


def _where_positive(mat: Tensor, at: Tensor, out: Tensor | None = None) -> Tensor:
    # autograd's own kernel: one pass instead of the three of a mask and a product, in a fifth of the time for one column
    kernel = torch.ops.aten.threshold_backward
    return kernel(mat, at, 0) if out is None else kernel.grad_input(mat, at, 0, grad_input=out)


@register(ReLU)
class ReLUDerivatives(PiecewiseLinearDerivatives):
    """``max(x, 0)``."""

    keeps = OUTPUT

    def slope(self, module: ReLU, at: Tensor) -> Tensor:
        return at > 0

    def _jac_t_mat_prod(
        self, module: ReLU, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None, out: Tensor | None = None
    ) -> Tensor:
        at = in_order_of(mat, subsample(self._recorded(module), subsampling=subsampling))
        return compute(_where_positive, mat.shape, mat, at.expand_as(mat), out)

    def _jac_mat_prod(self, module: ReLU, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)  # the matrix is diagonal


@register(LeakyReLU)
class LeakyReLUDerivatives(OverwritableDerivatives):
    """``x`` where positive, else ``a x``. The output has the sign of the input unless ``a`` is negative."""

    def applies(self, module: LeakyReLU) -> bool:
        return not module.inplace or self._negative_slope(module) >= 0

    def _negative_slope(self, module: LeakyReLU) -> float:
        return module.negative_slope

    def slope(self, module: LeakyReLU, at: Tensor) -> Tensor:
        if not self.applies(module):
            raise UnsupportedError(f"{module} in this mode has no derivative that what is recorded determines. Use GenericDerivatives.")
        return torch.where(at > 0, torch.ones_like(at), self._negative_slope(module))


@register(RReLU)
class RReLUDerivatives(LeakyReLUDerivatives):
    """In evaluation mode a leaky ReLU with the mean slope; the random slopes of training mode are not recorded."""

    def applies(self, module: RReLU) -> bool:
        return not module.training and super().applies(module)

    def _negative_slope(self, module: RReLU) -> float:
        return (module.lower + module.upper) / 2


@register(PReLU)
class PReLUDerivatives(PiecewiseLinearDerivatives, BaseParameterDerivatives):
    """``x`` where positive, else ``a x`` with one parameter ``a``, or one for each channel on axis 1."""

    any_batch_axis = False

    def slope(self, module: PReLU, at: Tensor) -> Tensor:
        return torch.where(at > 0, 1.0, self._like_channels(module.weight[None], at)[0])

    def _weight_jac_t_mat_prod(
        self, module: PReLU, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        inputs = subsample(module.input0, subsampling=subsampling)
        entries = _where_positive(mat, -inputs) * inputs.clamp(max=0)  # what is no number counts where inputs are not positive, as torch has it
        channels = module.weight.numel()
        per_sample = entries.reshape(*mat.shape[:2], channels, prod(mat.shape[2:]) // max(1, channels)).sum(3)
        return per_sample.sum(1) if sum_batch else per_sample

    def _weight_jac_mat_prod(self, module: PReLU, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._like_channels(mat, module.input0) * module.input0.clamp(max=0)

    @staticmethod
    def _like_channels(weights: Tensor, like: Tensor) -> Tensor:
        """Let weights broadcast against axis 1.

        Returns:
            ``[V, 1, C, 1, ...]`` from ``weights`` ``[V, C]``, one axis more than ``like``; ``[V, 1]`` where that has no channels.
        """
        channels = (weights.shape[1], *[1] * (like.dim() - 2)) if like.dim() > 1 else ()
        return weights.reshape(weights.shape[0], 1, *channels)


@register(Hardtanh)
@register(ReLU6)
class HardtanhDerivatives(OverwritableDerivatives):
    """``x``, clamped to an interval."""

    def slope(self, module: Hardtanh, at: Tensor) -> Tensor:
        return (at > module.min_val) & (at < module.max_val)


@register(Hardsigmoid)
class HardsigmoidDerivatives(PiecewiseLinearDerivatives):
    """``x / 6 + 1 / 2``, clamped to [0, 1]."""

    def slope(self, module: Hardsigmoid, at: Tensor) -> Tensor:
        # autograd's own slope: it is 1/6 in single precision, whatever the data type
        return torch.ops.aten.hardsigmoid_backward(torch.ones_like(at), at)


@register(Softshrink)
@register(Hardshrink)
class ShrinkDerivatives(PiecewiseLinearDerivatives):
    """Zero in ``[-lambda, lambda]``, a line of slope one on either side."""

    def slope(self, module: Softshrink | Hardshrink, at: Tensor) -> Tensor:
        return ~((at >= -module.lambd) & (at <= module.lambd))


@register(Threshold)
class ThresholdDerivatives(PiecewiseLinearDerivatives):
    """``x`` above the threshold, else a constant."""

    def slope(self, module: Threshold, at: Tensor) -> Tensor:
        return at > module.threshold


@register(ELU)
class ELUDerivatives(ActivationDerivatives):
    """``x`` where positive, else ``scale alpha (exp(x / tau) - 1)``; times ``scale`` where positive, too.

    The input determines the derivative more precisely than the output, which rounds to ``-alpha``.
    """

    def _constants(self, module: ELU) -> tuple[float, float, float]:
        """Hyper-parameters.

        Returns:
            ``(alpha, scale, tau)``.
        """
        return module.alpha, 1.0, 1.0

    def slope(self, module: ELU, at: Tensor) -> Tensor:
        alpha, scale, tau = self._constants(module)
        return torch.ops.aten.elu_backward(torch.ones_like(at), alpha, scale, 1 / tau, False, at)

    def curvature(self, module: ELU, at: Tensor) -> Tensor:
        alpha, scale, tau = self._constants(module)
        return torch.where(at < 0, scale * alpha / tau**2 * (at.clamp(max=0) / tau).exp(), 0.0)


@register(CELU)
class CELUDerivatives(ELUDerivatives):
    """``x`` where positive, else ``alpha (exp(x / alpha) - 1)``."""

    def _constants(self, module: CELU) -> tuple[float, float, float]:
        return module.alpha, 1.0, module.alpha


@register(SELU)
class SELUDerivatives(ELUDerivatives):
    """A scaled ELU whose constants keep mean and variance of a layer's output (Klambauer et al., 2017)."""

    def _constants(self, module: SELU) -> tuple[float, float, float]:
        return 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0


@register(Sigmoid)
class SigmoidDerivatives(ActivationDerivatives):
    """``1 / (1 + exp(-x))``."""

    keeps = OUTPUT

    def slope(self, module: Sigmoid, at: Tensor) -> Tensor:
        return at * (1 - at)

    def curvature(self, module: Sigmoid, at: Tensor) -> Tensor:
        return at * (1 - at) * (1 - 2 * at)


@register(LogSigmoid)
class LogSigmoidDerivatives(ActivationDerivatives):
    """``-log(1 + exp(-x))``."""

    def slope(self, module: LogSigmoid, at: Tensor) -> Tensor:
        return (-at).sigmoid()

    def curvature(self, module: LogSigmoid, at: Tensor) -> Tensor:
        return -at.sigmoid() * (-at).sigmoid()


@register(Tanh)
class TanhDerivatives(ActivationDerivatives):
    """``tanh(x)``."""

    keeps = OUTPUT

    def slope(self, module: Tanh, at: Tensor) -> Tensor:
        return 1 - at**2

    def curvature(self, module: Tanh, at: Tensor) -> Tensor:
        return -2 * at * (1 - at**2)


@register(Tanhshrink)
class TanhshrinkDerivatives(ActivationDerivatives):
    """``x - tanh(x)``."""

    def slope(self, module: Tanhshrink, at: Tensor) -> Tensor:
        return at.tanh() ** 2

    def curvature(self, module: Tanhshrink, at: Tensor) -> Tensor:
        tanh = at.tanh()
        return 2 * tanh * (1 - tanh**2)


@register(Softsign)
class SoftsignDerivatives(ActivationDerivatives):
    """``x / (1 + |x|)``."""

    def slope(self, module: Softsign, at: Tensor) -> Tensor:
        return (1 + at.abs()) ** -2

    def curvature(self, module: Softsign, at: Tensor) -> Tensor:
        return -2 * at.sign() * (1 + at.abs()) ** -3


@register(Softplus)
class SoftplusDerivatives(ActivationDerivatives):
    """``log(1 + exp(beta x)) / beta``, and ``x`` where ``beta x`` exceeds the threshold."""

    def slope(self, module: Softplus, at: Tensor) -> Tensor:
        scaled = module.beta * at
        return torch.where(scaled > module.threshold, 1.0, scaled.sigmoid())

    def curvature(self, module: Softplus, at: Tensor) -> Tensor:
        scaled = module.beta * at
        return torch.where(scaled >= module.threshold, 0.0, module.beta * scaled.sigmoid() * (-scaled).sigmoid())


@register(SiLU)
class SiLUDerivatives(ActivationDerivatives):
    """``x sigmoid(x)``."""

    def slope(self, module: SiLU, at: Tensor) -> Tensor:
        return at.sigmoid() * (1 + at * (-at).sigmoid())

    def curvature(self, module: SiLU, at: Tensor) -> Tensor:
        sigmoid = at.sigmoid()
        return sigmoid * (-at).sigmoid() * (2 + at * (1 - 2 * sigmoid))


@register(Mish)
class MishDerivatives(ActivationDerivatives):
    """``x tanh(softplus(x))``."""

    def slope(self, module: Mish, at: Tensor) -> Tensor:
        tanh = softplus(at).tanh()
        return tanh + at * (1 - tanh**2) * at.sigmoid()

    def curvature(self, module: Mish, at: Tensor) -> Tensor:
        sigmoid, tanh = at.sigmoid(), softplus(at).tanh()
        first = (1 - tanh**2) * sigmoid  # of the factor tanh(softplus(x))
        second = first * (1 - sigmoid - 2 * tanh * sigmoid)
        return 2 * first + at * second


@register(Hardswish)
class HardswishDerivatives(ActivationDerivatives):
    """``x (x + 3) / 6`` between -3 and 3, zero below, ``x`` above."""

    def slope(self, module: Hardswish, at: Tensor) -> Tensor:
        return torch.where(at <= -3, 0.0, torch.where(at >= 3, 1.0, at / 3 + 0.5))

    def curvature(self, module: Hardswish, at: Tensor) -> Tensor:
        return (at.abs() < 3).to(at.dtype) / 3


@register(GELU)
class GELUDerivatives(ActivationDerivatives):
    """``x`` times the distribution function of the normal distribution, or its approximation by ``tanh``."""

    def slope(self, module: GELU, at: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(torch.ones_like(at), at, approximate=module.approximate)  # one pass instead of eight

    def curvature(self, module: GELU, at: Tensor) -> Tensor:
        x = wide(at).clamp(-40, 40)  # it is zero there, where powers have not yet left the range of numbers
        if module.approximate == "tanh":
            tanh, inner, inner2 = self._tanh(x)
            return ((1 - tanh**2) * (inner + x * (inner2 / 2 - tanh * inner**2))).to(at.dtype)
        return (self._density(x) * (2 - x**2)).to(at.dtype)

    @staticmethod
    def _density(at: Tensor) -> Tensor:
        return (-(at**2) / 2).exp() / sqrt(2 * pi)

    @staticmethod
    def _tanh(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate ``tanh(u)`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``.

        Returns:
            ``tanh(u)``, and first and second derivative of ``u``.
        """
        k, c = sqrt(2 / pi), 0.044715
        return (k * (at + c * at**3)).tanh(), k * (1 + 3 * c * at**2), 6 * k * c * at
