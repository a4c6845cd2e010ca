"""PCHMP: products with diagonal blocks of the positive-curvature Hessian."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.base import CurvatureMatrixProduct
from backpack.utils.errors import ArgumentError


class ModificationError(ArgumentError, KeyError):
    """The modification of residuals does not exist.

    Way out: ``"clip"`` or ``"abs"``.
    """

    code = "pch-modification"


class PCHMP(CurvatureMatrixProduct):
    """A function that multiplies with the block of the positive-curvature Hessian (Chen, Chou & Hsieh 2018), saved to ``pchmp``.

    Second derivatives of element-wise modules enter after negative values were set to zero (``"clip"``) or made positive (``"abs"``), for each
    sample, whereas batch averages of ``HBP`` modify their sum over samples. For sequences of modules only; those with a dense second derivative
    (softmax, layer normalization) are refused.
    """

    MODIFICATIONS: ClassVar[dict[str, str]] = {"abs": Curvature.PCH_ABS, "clip": Curvature.PCH_CLIP}

    def __init__(self, savefield: str = "pchmp", modify: str = "clip", *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose name and modification.

        Args:
            savefield: Name of the attribute under which parameters carry the function.
            modify: ``"clip"`` or ``"abs"``.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.

        Raises:
            ModificationError: If the modification does not exist.
        """
        if modify not in self.MODIFICATIONS:
            raise ModificationError(f"Unknown modification {modify!r}. Choose one of {list(self.MODIFICATIONS)}.")
        super().__init__(savefield, self.MODIFICATIONS[modify], exclude=exclude)
        self._modify = modify

    def get_modification_mode(self) -> str:
        """Return what happens to negative second derivatives.

        Returns:
            ``"clip"`` or ``"abs"``.
        """
        return self._modify
