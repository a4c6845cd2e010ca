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
    "no features, LayerNorm": (lambda: nn.Sequential(nn.Linear(3, 0), nn.LayerNorm(0), nn.Linear(0, 2)), (3,)),
    "no features, GroupNorm": (lambda: nn.Sequential(nn.Linear(3, 0), nn.GroupNorm(2, 0), nn.Linear(0, 2)), (3,)),
    "no features, PReLU": (lambda: nn.Sequential(nn.Linear(3, 0), nn.PReLU(0), nn.Linear(0, 2)), (3,)),
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


@pytest.mark.parametrize("name", NAMES)
def test_table_without_features(name: str) -> None:
    model, extension = extend(nn.Sequential(nn.Embedding(5, 0), nn.Flatten(), nn.Linear(0, 2))), getattr(extensions, name)()
    with backpack(extension):
        extend(nn.CrossEntropyLoss())(model(torch.tensor([[1, 2], [3, 4], [0, 1]])), torch.zeros(N, dtype=torch.int64)).backward()
    value = getattr(model[0].weight, extension.savefield)
    if name in ("GGNMP", "HMP"):
        value = value(torch.rand(2, 5, 0))
    shapes = {"BatchL2Grad": [N], "SqrtGGNExact": [2, N, 5, 0], "GGNMP": [2, 5, 0], "HMP": [2, 5, 0]}
    if name in ("KFAC", "KFLR"):
        assert sorted(len(factor) for factor in value) == [0, 5]
    else:
        assert list(value.shape) == shapes.get(name, [N, 5, 0] if name.startswith("Batch") else [5, 0])
        assert not value.any()


@pytest.mark.parametrize("name", ["KFRA", "KFLR"])
@pytest.mark.parametrize("layers", [(3, 0), (3, 0, 2)])
def test_factors_without_outputs(layers: tuple[int, ...], name: str) -> None:
    sizes, extension = (4, *layers), getattr(extensions, name)()
    model = extend(nn.Sequential(*(part for i, o in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(i, o), nn.Tanh()))))
    x = torch.rand(N, 4)
    with backpack(extension):
        extend(nn.MSELoss(reduction="sum"))(model(x), torch.zeros(N, layers[-1])).backward()
    output, input0 = getattr(model[0].weight, extension.savefield)
    torch.testing.assert_close(output, torch.zeros(3, 3))
    torch.testing.assert_close(input0, x.T @ x / N)


NO_COLUMNS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "without empty batches": (lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(16, 3)), torch.rand(N, 1, 3, 3)),
    "table": (lambda: nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 3)), torch.tensor([[1, 2], [3, 4], [0, 1]])),
    "without a rule": (lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.LPPool1d(2, 2), nn.Flatten(), nn.Linear(4, 3)), torch.rand(N, 1, 5)),
}


@pytest.mark.parametrize("net", NO_COLUMNS)
def test_no_columns(net: str) -> None:
    """Products with no vector, also through functions that torch cannot differentiate for an empty batch."""
    make, x = NO_COLUMNS[net]
    model = extend(make())
    with backpack(extensions.GGNMP(), extensions.HMP()):
        extend(nn.CrossEntropyLoss())(model(x), torch.zeros(N, dtype=torch.int64)).backward()
    for parameter in model.parameters():
        for product in (parameter.ggnmp, parameter.hmp):
            assert product(torch.zeros(0, *parameter.shape)).shape == (0, *parameter.shape)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.DiagHessian, extensions.BatchDiagHessian])
def test_losses_of_no_samples_one_by_one(extension: Callable, turned: bool) -> None:
    """On whichever axis there are none."""
    model, out = extend(nn.Linear(3, 2)), extension()
    with backpack(out):
        made = model(torch.randn(0, 4, 3))
        made = made.transpose(0, 1) if turned else made
        (nn.functional.mse_loss(made, torch.zeros(made.shape), reduction="none") * torch.rand(made.shape)).sum().backward()
    for parameter in model.parameters():
        value = getattr(parameter, out.savefield)
        assert value.shape == ((0, *parameter.shape) if extension is extensions.BatchDiagHessian else parameter.shape)
        assert not value.any()
