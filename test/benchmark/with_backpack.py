"""Every extension of backpack; ``extended`` is the extended model outside of any context."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.extensions.secondorder.hbp import HBP, BackpropStrategy, Curvature, ExpectationApproximation, LossHessianStrategy

QUANTITIES = ("extended", *extensions.__all__)
PRODUCTS = ("GGNMP", "HMP", "PCHMP")


def create(quantity: str) -> extensions.BackpropExtension:
    """Make an extension; the one that must be told what to do averages the Hessian over samples."""
    if quantity == "HBP":
        return HBP(Curvature.HESSIAN, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE, ExpectationApproximation.BOTEV_MARTENS)
    return getattr(extensions, quantity)()


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Extend the model and the loss; return what is to be timed."""
    model, lossfunc = extend(model), extend(lossfunc)
    parameters = dict(model.named_parameters())
    vectors = {name: torch.rand_like(p) for name, p in parameters.items()} if quantity in PRODUCTS else {}

    def gradient() -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    def run() -> list[object]:
        with backpack(extension := create(quantity)):
            gradient()
        missing = [name for name, p in parameters.items() if not hasattr(p, extension.savefield)]
        if missing:
            raise NotImplementedError(f"Nothing is computed for {missing[0]} and {len(missing) - 1} more.")
        results = {name: getattr(p, extension.savefield) for name, p in parameters.items()}
        return [results[name](vector) for name, vector in vectors.items()] or list(results.values())

    return gradient if quantity == "extended" else run
