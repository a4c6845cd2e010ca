"""BatchGrad: the gradient of each sample."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from backpack.core.flow import Columns
from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.combining import PerSample
from backpack.extensions.firstorder.base import GradientExtension


class BatchGrad(GradientExtension):
    """Per-sample gradients ``[N, *parameter]``, saved to ``grad_batch``.

    Entry ``n`` is the gradient of sample ``n``'s summand of the loss, with the divisor of a mean loss in it: the sum over ``n`` is ``.grad``.
    With ``subsampling``: ``[len(subsampling), *parameter]``, in that order.
    """

    combination = PerSample(degree=1)

    def __init__(self, subsampling: list[int] | None = None, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the samples.

        Args:
            subsampling: Indices of the samples; ``None`` for all.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__("grad_batch", subsampling=subsampling, exclude=exclude)

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        return state[0][0]
