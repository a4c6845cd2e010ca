"""GGNMP: products with diagonal blocks of the generalized Gauss-Newton."""

from __future__ import annotations

from collections.abc import Iterable

from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.base import CurvatureMatrixProduct


class GGNMP(CurvatureMatrixProduct):
    """A function ``[V, *parameter] -> [V, *parameter]`` that multiplies with the block of the generalized Gauss-Newton, saved to ``ggnmp``.

    For sequences of modules only; ``backpack.hessianfree.ggnvp`` multiplies with the generalized Gauss-Newton of anything.
    """

    def __init__(self, savefield: str = "ggnmp", *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the name.

        Args:
            savefield: Name of the attribute under which parameters carry the function.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(savefield, Curvature.GGN, exclude=exclude)
