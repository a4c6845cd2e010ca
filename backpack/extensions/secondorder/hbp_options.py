"""Choices of Hessian backpropagation (Dangel et al. 2020)."""

from __future__ import annotations

from typing import ClassVar

from backpack.extensions.curvature import UnknownChoiceError


class _Choice:
    """A set of names."""

    CHOICES: ClassVar[list[str]] = []

    @classmethod
    def check_exists(cls, name: str) -> None:
        """Refuse an unknown name.

        Args:
            name: The name.

        Raises:
            UnknownChoiceError: If it is none of ``CHOICES``.
        """
        if name not in cls.CHOICES:
            raise UnknownChoiceError(f"Unknown {cls.__name__} {name!r}. Choose one of {cls.CHOICES}.")


class LossHessianStrategy(_Choice):
    """How the Hessian of the loss enters: exact square root, sampled square root, or summed over the mini-batch."""

    EXACT = "exact"
    SAMPLING = "sampling"
    SUM = "sum"
    CHOICES: ClassVar[list[str]] = [EXACT, SAMPLING, SUM]


class BackpropStrategy(_Choice):
    """What is carried: a square root for each sample, or one matrix averaged over the mini-batch."""

    SQRT = "sqrt"
    BATCH_AVERAGE = "average"
    CHOICES: ClassVar[list[str]] = [BATCH_AVERAGE, SQRT]

    @classmethod
    def is_batch_average(cls, strategy: str) -> bool:
        """Say whether a matrix averaged over the mini-batch is carried.

        Args:
            strategy: One of ``CHOICES``.

        Returns:
            Whether it is.
        """
        cls.check_exists(strategy)
        return strategy == cls.BATCH_AVERAGE

    @classmethod
    def is_sqrt(cls, strategy: str) -> bool:
        """Say whether square roots are carried.

        Args:
            strategy: One of ``CHOICES``.

        Returns:
            Whether they are.
        """
        cls.check_exists(strategy)
        return strategy == cls.SQRT


class ExpectationApproximation(_Choice):
    """Where the average over samples is taken: of whole products, or of each factor."""

    BOTEV_MARTENS = "E[J^T E(H) J]"
    CHEN = "E(J^T) E(H) E(J)"
    CHOICES: ClassVar[list[str]] = [BOTEV_MARTENS, CHEN]

    @classmethod
    def should_average_param_jac(cls, strategy: str) -> bool:
        """Say whether Jacobians of parameters are averaged over samples before they are multiplied.

        Args:
            strategy: One of ``CHOICES``.

        Returns:
            Whether they are.
        """
        cls.check_exists(strategy)
        return strategy == cls.CHEN
