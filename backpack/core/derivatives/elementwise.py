"""Maps that act on each entry alone: two functions ``df`` and ``d2f`` of the recorded tensors supply all products."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Samples
from backpack.core.derivatives.kinds import FlatDerivatives
from backpack.utils.moment import second_moment
from backpack.utils.pages import compute
from backpack.utils.subsampling import subsample


def in_order_of(mat: Tensor, factor: Tensor) -> Tensor:
    """Let what many columns are multiplied with lie in memory as they do.

    Args:
        mat: Columns ``[V, *factor]``.
        factor: ``[N, *]``.

    Returns:
        The factor, with channels last where the columns have them so.
    """
    last = torch.channels_last
    image = factor.dim() == 4 and mat.dim() == 5 and len(mat) > 0  # noqa: PLR2004
    return factor.contiguous(memory_format=last) if image and mat[0].is_contiguous(memory_format=last) else factor


class ElementwiseDerivatives(BaseDerivatives):
    """Input and output have the same shape, and an output entry depends on the input entry at its place only."""

    any_batch_axis = True

    def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        """First derivative ``[*output]`` of each output entry with respect to its input entry.

        Raises:
            UnsupportedError: If the class does not define it.
        """
        raise self._missing("df", module)

    def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        """Second derivative ``[*output]`` of each output entry with respect to its input entry, not multiplied by ``g_out``.

        Raises:
            UnsupportedError: If the class does not define it.
        """
        raise self._missing("d2f", module)

    def hessian_is_diagonal(self, module: Module) -> bool:
        return True

    def hessian_diagonal(self, module: Module, g_in: Grads, g_out: Grads) -> Tensor:
        return self.d2f(module, g_in, g_out) * g_out[0]

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat * self.df(module, g_inp, g_out)

    def _jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None, out: Tensor | None = None
    ) -> Tensor:
        """Multiply by the transposed Jacobian of the output with respect to the input.

        Args:
            module: The module.
            g_inp: Not used.
            g_out: Not used.
            mat: ``[V, *output]``.
            subsampling: Samples that ``mat`` is about; ``None`` for all.
            out: May take the result, and may be ``mat``.

        Returns:
            ``[V, *input0]``.
        """
        return compute(torch.mul, mat.shape, mat, in_order_of(mat, self.df(module, g_inp, g_out, subsampling=subsampling)), out)

    def ea_jac_t_mat_jac_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        df = self.df(module, g_inp, g_out)
        moment = second_moment(df.reshape(1, df.shape[0], mat.shape[0]), 1 / max(1, df.shape[0]))[0]
        return compute(torch.mul, mat.shape, mat, moment, moment)

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat * self.hessian_diagonal(module, g_inp, g_out)


class ActivationDerivatives(ElementwiseDerivatives):
    """Derivatives in closed form, as functions of the one recorded tensor that ``keeps`` names.

    They agree with automatic differentiation at kinks, too.
    """

    keeps = frozenset({"input"})

    @abstractmethod
    def slope(self, module: Module, at: Tensor) -> Tensor:
        """First derivative.

        Args:
            module: The activation, for its hyper-parameters.
            at: The recorded input, or output, perhaps of some samples only.

        Returns:
            ``[N, ...]``, or a mask of that shape.
        """

    @abstractmethod
    def curvature(self, module: Module, at: Tensor) -> Tensor:
        """Second derivative.

        Args:
            module: The activation, for its hyper-parameters.
            at: The recorded input, or output.

        Returns:
            ``[N, ...]``.
        """

    def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        at = subsample(self._recorded(module), subsampling=subsampling)
        return self.slope(module, at).to(at.dtype)

    def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        return self.curvature(module, self._recorded(module))

    def hessian_is_zero(self, module: Module) -> bool:
        return False

    def _recorded(self, module: Module) -> Tensor:
        return module.output if "output" in self.needs(module) else module.input0


class PiecewiseLinearDerivatives(FlatDerivatives, ActivationDerivatives):
    """An activation whose second derivative vanishes almost everywhere."""

    def curvature(self, module: Module, at: Tensor) -> Tensor:
        return torch.zeros_like(at)


class OverwritableDerivatives(PiecewiseLinearDerivatives):
    """An activation whose slope follows from its output as well as from its input.

    It reads what autograd keeps: the input, or the output where this has overwritten the input.
    """

    def needs(self, module: Module) -> frozenset[str]:
        return frozenset({"output"}) if module.inplace else self.keeps


class RecordedSlopeDerivatives(FlatDerivatives, ElementwiseDerivatives):
    """An element-wise, piecewise linear map that is random (dropout in training mode): the graph knows its slope, and the call carries it."""

    any_batch_axis = False  # the slope lies as the call's tensors do
    keeps = frozenset()

    def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        return subsample(module.slope, subsampling=subsampling)

    def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        return torch.zeros_like(module.slope)


RANDOM = RecordedSlopeDerivatives()
"""Rule of element-wise modules that are random."""
