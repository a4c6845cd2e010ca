"""Axes of length zero other than that of the samples: quantities are empty, or zero, where gradients are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions

pytestmark = pytest.mark.filterwarnings("error", "ignore:Initializing zero-element tensors")

N = 3


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "no outputs": (lambda: nn.Sequential(nn.Linear(3, 0), nn.Tanh(), nn.Linear(0, 2)), (3,)),
    "no outputs, positions": (lambda: nn.Sequential(nn.Linear(3, 0), nn.Tanh(), nn.Linear(0, 2), Total()), (4, 3)),
    "no inputs": (lambda: nn.Sequential(nn.Linear(0, 2), nn.Tanh(), nn.Linear(2, 2)), (0,)),
    "no positions, Linear": (lambda: nn.Sequential(nn.Linear(3, 2), Total()), (0, 3)),
    "no positions, LayerNorm": (lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), Total()), (0, 3)),
    "no positions, RMSNorm": (lambda: nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2), Total()), (0, 3)),
    "no positions, GroupNorm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(0, 2)), (4, 0)),
}
NAMES = """BatchGrad BatchL2Grad SumGradSquared Variance DiagGGNExact DiagGGNMC BatchDiagGGNExact DiagHessian BatchDiagHessian SqrtGGNExact
KFLR KFAC GGNMP HMP""".split()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("net", NETS)
def test_quantities(net: str, name: str) -> None:
    make, shape = NETS[net]
    model, lossfunc, extension = extend(make()), extend(nn.CrossEntropyLoss()), getattr(extensions, name)()
    with backpack(extension):
        lossfunc(model(torch.rand(N, *shape)), torch.zeros(N, dtype=torch.int64)).backward()
    for parameter in model.parameters():
        value = getattr(parameter, extension.savefield)
        if name in ("GGNMP", "HMP"):
            value = value(torch.rand(2, *parameter.shape))
            assert value.shape == (2, *parameter.shape)
        parts = value if isinstance(value, list) else [value]
        assert all(part.isfinite().all() for part in parts)
        assert parameter.grad.any() or not any(part.any() for part in parts) or name in ("KFLR", "KFAC")
        if name in ("KFLR", "KFAC"):
            assert torch.Size([len(part) for part in parts]).numel() == parameter.numel()
        elif name in ("SumGradSquared", "Variance", "DiagGGNExact", "DiagGGNMC", "DiagHessian"):
            assert value.shape == parameter.shape
