"""BatchGrad: the gradient of each sample."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from backpack.core.flow import Columns
from backpack.extensions.backprop_extension import SubsamplingExtension
from backpack.extensions.combining import PerSample
from backpack.extensions.firstorder.base import GradientExtension


class BatchGrad(SubsamplingExtension, GradientExtension):
    """Per-sample gradients ``[N, *parameter]``, saved to ``grad_batch``.

    Entry ``n`` is the gradient of sample ``n``'s summand of the loss, with the divisor of a mean loss in it: the sum over ``n`` is ``.grad``.
    With ``subsampling``: ``[len(subsampling), *parameter]``, in that order.
    """

    savefield = "grad_batch"
    combination = PerSample(degree=1)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return state[0][0]
