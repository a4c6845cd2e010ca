"""Curved modules, and losses, whose second derivative consists of blocks with a root each: the whole matrix of a sample is never formed."""

from __future__ import annotations

from abc import abstractmethod
from fractions import Fraction

from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseLossDerivatives, Grads
from backpack.utils.columns import Entries


class BlockCurvedDerivatives(BaseDerivatives):
    """The residual couples the entries along one axis of the input, or groups of consecutive entries of a sample, and no others."""

    def hessian_is_zero(self, module: Module) -> bool:
        return False

    def hessian_is_diagonal(self, module: Module) -> bool:
        return False

    @abstractmethod
    def residual_root(self, module: Module, g_out: Grads) -> tuple[Entries, Tensor]:
        """Factorize the residual ``sum_k Hess(z_k) dL/dz_k``, already multiplied by ``g_out[0] = dL/dz``, block by block.

        Returns:
            ``E`` columns of each of ``B`` blocks ``[B, E, M]``, perhaps formed where they are needed, and their signs ``[B, E]``. Blocks are in the
                order of the input ``[N, *, M]``, where the axis of the blocks was moved to the end.
        """

    def axis_of_blocks(self, module: Module) -> int:
        """Axis of the input along which the blocks lie: the last one if they are groups of consecutive entries.

        Returns:
            The axis, negative, so that it is the same in a matrix.
        """
        return -1

    def columns_of_an_entry(self, module: Module) -> Fraction:
        """Count the columns of a block.

        Returns:
            ``E / M``.
        """
        return Fraction(1)


class BlockLossDerivatives(BaseLossDerivatives):
    """The Hessian of a sample consists of blocks along one axis of the prediction."""

    @abstractmethod
    def root_of_blocks(self, module: Module, signed: bool) -> tuple[Tensor | Entries, Tensor | None, int]:
        """Factorize the Hessian block by block, with few columns, as ``_least_sqrt_hessian`` does whole.

        Args:
            module: The loss with recorded inputs.
            signed: Whether it may have negative eigenvalues.

        Returns:
            ``E`` columns of each of ``B`` blocks ``[B, E, M]``; their signs ``[B, E]``, ``None`` if all count positive; and the negative axis
                of the prediction along which they lie. Blocks are in the order of the prediction ``[N, *, M]``, where that axis was moved to
                the end. Columns may be formed where they are needed: what stands for them has ``dtype`` and ``device``, and is multiplied by
                a factor for each block, ``[B, 1, M]``.
        """


def has_root(rule: BaseDerivatives) -> bool:
    """Say whether a rule factorizes its residual: not where a subclass has another product with it.

    Args:
        rule: The rule.

    Returns:
        Whether it does.
    """
    own = next((vars(kind) for kind in type(rule).__mro__ if "_residual_mat_prod" in vars(kind)), {})
    return "residual_root" in own
