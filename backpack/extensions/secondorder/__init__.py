"""Second-order extensions: diagonals, square roots and Kronecker factors of the generalized Gauss-Newton and the Hessian.

They start at a loss function, extended or known by its graph, called with a mini-batch and followed by nothing but weighted sums up to the
tensor on which ``backward`` is called. With a mean loss they contain its divisor, once.
"""

from backpack.extensions.secondorder.diag_ggn import BatchDiagGGNExact, BatchDiagGGNMC, DiagGGNExact, DiagGGNMC
from backpack.extensions.secondorder.diag_hessian import BatchDiagHessian, DiagHessian
from backpack.extensions.secondorder.hbp import HBP, KFAC, KFLR, KFRA
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGNExact, SqrtGGNMC

__all__ = [
    "HBP",
    "KFAC",
    "KFLR",
    "KFRA",
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "SqrtGGNExact",
    "SqrtGGNMC",
]
