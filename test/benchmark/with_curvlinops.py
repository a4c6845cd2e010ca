"""Kronecker factors by curvlinops, beside a gradient."""

from __future__ import annotations

from collections.abc import Callable

from curvlinops import KFACLinearOperator
from torch import Tensor, nn

FISHER = {"KFAC": "mc", "KFLR": "type-2"}
QUANTITIES = tuple(FISHER)


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return what is to be timed."""
    parameters = list(model.parameters())

    def run() -> object:
        model.zero_grad()
        lossfunc(model(x), y).backward()
        factors = KFACLinearOperator(model, lossfunc, parameters, [(x, y)], fisher_type=FISHER[quantity], check_deterministic=False)
        factors.compute_kronecker_factors()
        return factors

    return run
