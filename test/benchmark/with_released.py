"""The released BackPACK: the same interface; what is no sequence of modules must be converted."""

from __future__ import annotations

from collections.abc import Callable

import with_backpack
from torch import Tensor, nn

from backpack import extend

QUANTITIES = with_backpack.QUANTITIES


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Convert the model if need be; return what is to be timed."""
    if not (isinstance(model, nn.Sequential) and all(type(layer).__module__.startswith("torch.nn") for layer in model)):
        model = extend(model, use_converter=True)
    return with_backpack.step(quantity, model, lossfunc, x, y)
