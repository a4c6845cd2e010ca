"""HMP: products with diagonal blocks of the Hessian."""

from __future__ import annotations

from collections.abc import Iterable

from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.base import CurvatureMatrixProduct


class HMP(CurvatureMatrixProduct):
    """A function ``[V, *parameter] -> [V, *parameter]`` that multiplies with the parameter's block of the Hessian, saved to ``hmp``.

    For sequences of modules only; ``backpack.hessianfree.hvp`` multiplies with the Hessian of anything.
    """

    def __init__(self, savefield: str = "hmp", *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the name.

        Args:
            savefield: Name of the attribute under which parameters carry the function.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(savefield, Curvature.HESSIAN, exclude=exclude)
