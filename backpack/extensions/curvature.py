"""Kinds of curvature matrices, and what each needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from backpack.core.calls import ModuleCall
from backpack.utils.errors import ArgumentError, LossValueError


class ResidualModifications:
    """What is done to the diagonal residual of a module's Hessian."""

    @staticmethod
    def nothing(residual: Tensor) -> Tensor:
        """Keep the residual.

        Args:
            residual: Any shape.

        Returns:
            The same tensor.
        """
        return residual

    @staticmethod
    def to_zero(residual: Tensor) -> None:
        """Drop the residual.

        Args:
            residual: Any shape.
        """

    @staticmethod
    def remove_negative_values(residual: Tensor) -> Tensor:
        """Set negative entries to zero.

        Args:
            residual: Any shape.

        Returns:
            Tensor of the same shape.
        """
        return residual.clamp(min=0)

    @staticmethod
    def to_abs(residual: Tensor) -> Tensor:
        """Take absolute values.

        Args:
            residual: Any shape.

        Returns:
            Tensor of the same shape.
        """
        return residual.abs()


class Curvature:
    """The curvature matrices: Hessian, generalized Gauss-Newton, positive-curvature Hessian (Chen et al. 2018)."""

    HESSIAN = "hessian"
    GGN = "ggn"
    PCH_ABS = "pch-abs"
    PCH_CLIP = "pch-clip"
    CHOICES: ClassVar[list[str]] = [HESSIAN, GGN, PCH_ABS, PCH_CLIP]
    REQUIRE_PSD_LOSS_HESSIAN: ClassVar[dict[str, bool]] = {HESSIAN: False, GGN: True, PCH_ABS: True, PCH_CLIP: True}
    REQUIRE_RESIDUAL: ClassVar[dict[str, bool]] = {HESSIAN: True, GGN: False, PCH_ABS: True, PCH_CLIP: True}
    RESIDUAL_MODS: ClassVar[dict[str, Callable[[Tensor], Tensor | None]]] = {
        HESSIAN: ResidualModifications.nothing,
        GGN: ResidualModifications.to_zero,
        PCH_ABS: ResidualModifications.to_abs,
        PCH_CLIP: ResidualModifications.remove_negative_values,
    }

    @classmethod
    def require_residual(cls, curv_type: str) -> bool:
        """Say whether second derivatives of modules enter.

        Args:
            curv_type: One of ``CHOICES``.

        Returns:
            Whether they do.
        """
        return cls.REQUIRE_RESIDUAL[cls._known(curv_type)]

    @classmethod
    def is_pch(cls, curv_type: str) -> bool:
        """Say whether a curvature is a positive-curvature Hessian.

        Args:
            curv_type: One of ``CHOICES``.

        Returns:
            Whether it is.
        """
        return cls._known(curv_type) in {cls.PCH_ABS, cls.PCH_CLIP}

    @classmethod
    def modify_residual(cls, residual: Tensor | None, curv_type: str) -> Tensor | None:
        """Apply what a curvature does to residuals.

        Args:
            residual: Diagonal residual, or ``None`` where there is none.
            curv_type: One of ``CHOICES``.

        Returns:
            The modified residual; ``None`` stays ``None``.
        """
        return None if residual is None else cls.RESIDUAL_MODS[cls._known(curv_type)](residual)

    @classmethod
    def check_loss_hessian(cls, loss_hessian_is_psd: bool, curv_type: str, loss: str = "The loss") -> None:
        """Refuse a loss whose Hessian is not positive semidefinite where that is needed.

        Args:
            loss_hessian_is_psd: Whether it is.
            curv_type: One of ``CHOICES``.
            loss: Name of the loss, for the message.

        Raises:
            LossValueError: If it is needed and absent.
        """
        if cls.REQUIRE_PSD_LOSS_HESSIAN[cls._known(curv_type)] and not loss_hessian_is_psd:
            raise LossValueError(
                f"{loss}: the curvature '{curv_type}' needs a loss whose Hessian is positive semidefinite (and not scaled by a negative number). "
                "Use HMP, DiagHessian or backpack.hessianfree, a convex loss, or non-negative weights."
            )

    @classmethod
    def check_loss(cls, call: ModuleCall, weights: Tensor, curv_type: str) -> None:
        """Refuse a loss call whose Hessian is not positive semidefinite where that is needed.

        Args:
            call: The loss call.
            weights: What the loss is multiplied by.
            curv_type: One of ``CHOICES``.
        """
        if cls.REQUIRE_PSD_LOSS_HESSIAN[cls._known(curv_type)]:
            psd = bool((weights >= 0).all()) and call.derivatives.hessian_is_psd_at(call)
            cls.check_loss_hessian(psd, curv_type, call.path)

    @classmethod
    def _known(cls, curv_type: str) -> str:
        if curv_type not in cls.CHOICES:
            raise UnknownChoiceError(f"Unknown curvature {curv_type!r}. Choose one of {cls.CHOICES}.")
        return curv_type


class UnknownChoiceError(ArgumentError, AttributeError):
    """A choice was given by a name that does not exist.

    Way out: the message lists the names; they are attributes of the class that it names.
    """

    code = "unknown-choice"
