"""Square roots of the generalized Gauss-Newton, exact and Monte-Carlo."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from backpack.core.flow import Columns
from backpack.extensions.combining import PerSample
from backpack.extensions.rules import stack
from backpack.extensions.secondorder.base import ExactGGNExtension, GGNExtension, SampledGGNExtension


class SqrtGGN(GGNExtension):
    """Square root of the generalized Gauss-Newton (Dangel et al. 2022, "ViViT").

    ``[V, N, *parameter]``: with the parameters' tensors flattened to ``[V * N, numel]`` and concatenated to ``U``, the matrix is ``U^T U``. The
    columns of several losses stand side by side along ``V``, in the order of their forward passes, zero for parameters that a loss does not use.
    """

    ordered = True
    combination = PerSample(degree=0.5, axis=1)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return stack(state)


class SqrtGGNExact(ExactGGNExtension, SqrtGGN):
    """Exact square root, ``[C, N, *parameter]``, saved to ``sqrt_ggn_exact``; ``C`` is the number of inputs of the loss for a sample."""

    savefield = "sqrt_ggn_exact"


class SqrtGGNMC(SampledGGNExtension, SqrtGGN):
    """Monte-Carlo square root, ``[mc_samples, N, *parameter]``, saved to ``sqrt_ggn_mc``: ``U^T U`` is right in expectation."""

    savefield = "sqrt_ggn_mc"
