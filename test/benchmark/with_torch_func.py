"""Per-sample gradients by ``torch.func``, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable

import torch._dynamo  # noqa: F401  vmap loads it at its first call, which is no memory of the quantity
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

FINISH: dict[str, Callable[[Tensor], Tensor]] = {
    "BatchGrad": lambda gradients: gradients,
    "BatchL2Grad": lambda gradients: gradients.flatten(1).square().sum(1),
    "SumGradSquared": lambda gradients: gradients.square().sum(0),
    "Variance": lambda gradients: gradients.var(0, correction=0),
}
QUANTITIES = tuple(FINISH)


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return what is to be timed; it forms no ``.grad``."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(functional_call(model, parameters, x.unsqueeze(0)), y.unsqueeze(0)) / len(batch)

    batch, gradients = x, vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    return lambda: {name: FINISH[quantity](values) for name, values in gradients(parameters, x, y).items()}
