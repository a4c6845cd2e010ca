"""Curvature-matrix products: functions that multiply with a parameter's block of a curvature matrix, without forming it."""

from backpack.extensions.curvmatprod.ggnmp import GGNMP
from backpack.extensions.curvmatprod.hmp import HMP
from backpack.extensions.curvmatprod.pchmp import PCHMP

__all__ = ["GGNMP", "HMP", "PCHMP"]
