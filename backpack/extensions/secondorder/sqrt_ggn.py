"""Square roots of the generalized Gauss-Newton, exact and Monte-Carlo."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from backpack.core.flow import Columns
from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.combining import PerSample
from backpack.extensions.rules import stack
from backpack.extensions.secondorder.base import GGNExtension
from backpack.extensions.secondorder.hbp_options import LossHessianStrategy


class SqrtGGN(GGNExtension):
    """Square root of the generalized Gauss-Newton (Dangel et al. 2022, "ViViT").

    ``[V, N, *parameter]``: with the parameters' tensors flattened to ``[V * N, numel]`` and concatenated to ``U``, the matrix is ``U^T U``. The
    columns of several losses stand side by side along ``V``, in the order of their forward passes, zero for parameters that a loss does not use.
    """

    ordered = True
    combination = PerSample(degree=0.5, axis=1)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return stack(state)


class SqrtGGNExact(SqrtGGN):
    """Exact square root, ``[C, N, *parameter]``, saved to ``sqrt_ggn_exact``; ``C`` is the number of inputs of the loss for a sample."""

    def __init__(self, subsampling: list[int] | None = None, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the samples.

        Args:
            subsampling: Indices of the samples; ``None`` for all. The divisor stays that of the mini-batch.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(LossHessianStrategy.EXACT, "sqrt_ggn_exact", subsampling, exclude=exclude)


class SqrtGGNMC(SqrtGGN):
    """Monte-Carlo square root, ``[mc_samples, N, *parameter]``, saved to ``sqrt_ggn_mc``: ``U^T U`` is right in expectation."""

    def __init__(self, mc_samples: int = 1, subsampling: list[int] | None = None, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the number of draws.

        Args:
            mc_samples: Labels drawn for each sample.
            subsampling: Indices of the samples; ``None`` for all. The divisor stays that of the mini-batch.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(LossHessianStrategy.SAMPLING, "sqrt_ggn_mc", subsampling, mc_samples, exclude=exclude)
