"""Bases of second-order extensions: quantities made of what the loss sends back beside the gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.affine_squares import squares_per_sample
from backpack.core.derivatives.embedding import LookupDerivatives
from backpack.core.derivatives.normalization import ScaleShiftDerivatives
from backpack.core.flow import Flow, Use
from backpack.core.samples import add_rows
from backpack.extensions.at_layers import OfLayers
from backpack.extensions.backprop_extension import BackpropExtension, Excluded
from backpack.extensions.combining import Sum
from backpack.extensions.flows import SqrtFlow
from backpack.extensions.rules import affine_arguments, affine_squares_at_once, faster, finish_at_once, place_at_rows, sum_at_rows
from backpack.extensions.secondorder.hbp_options import LossHessianStrategy
from backpack.utils.errors import ArgumentError
from backpack.utils.numbers import as_integer

_EXACT = SqrtFlow()


class SecondOrderBackpropExtension(BackpropExtension):
    """A quantity that needs a loss and something beside the gradient."""

    def expects_backpropagation_quantities(self) -> bool:
        return True


class OfDiagonals(OfLayers):
    """A diagonal of a curvature matrix, to which a matrix at the output of an affine layer, that couples no positions, adds what needs no columns."""

    def takes_matrix(self, use: Use) -> bool:
        return self.adds_up and self.takes_any_root  # unless a user reads the columns, or a subclass has made something else of its quantity

    def of_matrix(self, use: Use, name: str) -> Tensor:
        (use,), chosen, summed = use.parts, self.get_subsampling(), isinstance(self.combination, Sum)
        result = use.call.derivatives.sum_at_diagonal(use.call, name, use.value[0], summed and chosen is None)
        if summed and chosen is None:
            return result
        result = add_rows(result[None], use.layout)[0]
        result = result if chosen is None else result[list(chosen)]
        return result.sum(0) if summed else result


class GGNExtension(SecondOrderBackpropExtension):
    """A quantity of the generalized Gauss-Newton, read off a square root of the loss's Hessian.

    Attributes:
        loss_hessian_strategy: Exact square root, or a Monte-Carlo estimate.
    """

    VALID_LOSS_HESSIAN_STRATEGIES: ClassVar[list[str]] = [LossHessianStrategy.EXACT, LossHessianStrategy.SAMPLING]

    def __init__(
        self,
        loss_hessian_strategy: str,
        savefield: str,
        subsampling: list[int] | None = None,
        mc_samples: int = 1,
        *,
        exclude: Iterable[Excluded] = (),
    ) -> None:
        """Choose the square root.

        Args:
            loss_hessian_strategy: One of ``VALID_LOSS_HESSIAN_STRATEGIES``.
            savefield: Name of the attribute under which parameters carry the result.
            subsampling: Indices of the samples; ``None`` for all.
            mc_samples: Number of Monte-Carlo samples, unless ``get_num_mc_samples`` is overridden.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.

        Raises:
            ArgumentError: If the strategy is unknown, or the number of Monte-Carlo samples is not a positive integer.
        """
        super().__init__(savefield, subsampling=subsampling, exclude=exclude)
        if loss_hessian_strategy not in self.VALID_LOSS_HESSIAN_STRATEGIES:
            raise ArgumentError(
                f"{type(self).__name__}: loss_hessian_strategy must be one of {self.VALID_LOSS_HESSIAN_STRATEGIES}, got {loss_hessian_strategy!r}."
            )
        self.loss_hessian_strategy, self._mc_samples = loss_hessian_strategy, checked_draws(mc_samples, self)

    @property
    def flow(self) -> Flow:
        """The square root: other labels are drawn for a subset than for the mini-batch, hence a flow of its own. Users may change their list."""
        if self.loss_hessian_strategy == LossHessianStrategy.EXACT:
            return _EXACT
        chosen = self.get_subsampling()
        return SqrtFlow(self.get_num_mc_samples(), None if chosen is None else tuple(chosen))

    def get_loss_hessian_strategy(self) -> str:
        """Return how the Hessian of the loss enters.

        Returns:
            One of ``VALID_LOSS_HESSIAN_STRATEGIES``.
        """
        return self.loss_hessian_strategy

    def get_num_mc_samples(self) -> int:
        """Return the number of Monte-Carlo samples.

        Returns:
            Their number, where the square root is sampled.
        """
        return self._mc_samples


class ExactGGNExtension(GGNExtension):
    """A quantity of the generalized Gauss-Newton, from the exact square root of the loss's Hessian: comes before the quantity among its bases."""

    savefield: str

    def __init__(self, subsampling: list[int] | None = None, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the samples.

        Args:
            subsampling: Indices of the samples; ``None`` for all. The divisor of a mean loss stays that of the mini-batch.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(LossHessianStrategy.EXACT, self.savefield, subsampling, exclude=exclude)


class SampledGGNExtension(GGNExtension):
    """A Monte-Carlo estimate of a quantity of the generalized Gauss-Newton: comes before the quantity among its bases."""

    savefield: str

    def __init__(self, mc_samples: int = 1, subsampling: list[int] | None = None, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the number of draws.

        Args:
            mc_samples: Labels drawn for each sample.
            subsampling: Indices of the samples; ``None`` for all. The divisor of a mean loss stays that of the mini-batch.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(LossHessianStrategy.SAMPLING, self.savefield, subsampling, mc_samples, exclude=exclude)


def checked_draws(mc_samples: int, extension: SecondOrderBackpropExtension) -> int:
    """Check the number of Monte-Carlo samples.

    Args:
        mc_samples: The number.
        extension: Who is given it, for the message.

    Returns:
        The number.

    Raises:
        ArgumentError: If it is not a positive integer.
    """
    number = as_integer(mc_samples, 1)
    if number is None:
        raise ArgumentError(f"{type(extension).__name__}: mc_samples must be a positive integer, got {mc_samples!r}.")
    return number


def squares_at_once(summed: type[SecondOrderBackpropExtension], per_sample: type[SecondOrderBackpropExtension]) -> None:
    """Let two extensions, which sum signed squares of columns, do so without forming the columns where the structure of a layer allows it.

    Args:
        summed: The extension that sums over samples, too.
        per_sample: The extension that keeps samples apart.
    """
    affine_squares_at_once(summed)
    faster(per_sample, AffineDerivatives, "weight")(lambda extension, use, name: squares_per_sample(*affine_arguments(use)))
    faster(per_sample, AffineDerivatives, "bias")(finish_at_once)
    for extension in (summed, per_sample):  # no columns are kept until all is done
        faster(extension, ScaleShiftDerivatives, "weight", "bias")(finish_at_once)
    faster(summed, LookupDerivatives, "weight")(lambda extension, use, name: sum_at_rows(use))
    faster(per_sample, LookupDerivatives, "weight")(lambda extension, use, name: place_at_rows(use))
