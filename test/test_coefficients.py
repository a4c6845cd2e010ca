"""Small parameters that all samples share in a node of which nothing is known: crossed once for each of their entries, if that is less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_extensions import close
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend
from backpack.core import coefficients, crossings
from backpack.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact
from backpack.utils.errors import UnsupportedError


class Quantize(Function):
    """Rounds to multiples of a learned step (Esser et al. 2020)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        return grad, (grad * ((x / step).round() - x / step)).sum().reshape(step.shape)


class Swish(Function):
    """A learned slope for each feature."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(x, slope)
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = ctx.saved_tensors
        s = torch.sigmoid(slope * x)
        return grad * (s + slope * x * s * (1 - s)), (grad * x * x * s * (1 - s)).sum_to_size(slope.shape)


class Once(Swish):
    """Has no second derivative."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return Swish.backward(ctx, grad)


class Cut(Swish):
    """Has a wrong one."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = ctx.saved_tensors
        s = torch.sigmoid(slope * x)
        wrong = grad * 0.5 + grad.detach() * 0.5
        return grad * (s + slope * x * s * (1 - s)), (wrong * x * x * s * (1 - s)).sum_to_size(slope.shape)


class Clipped(Swish):
    """Is not linear where gradients are large."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return Swish.backward(ctx, grad.clamp(-1, 1))


class Net(nn.Module):
    """A function with a parameter between two layers."""

    def __init__(self, function: type[Function], shape: tuple[int, ...], folded: bool) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(4, 3), nn.Linear(3, 2), nn.Parameter(torch.full(shape, 0.3))
        self.function, self.folded = function, folded

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.folded:
            hidden = hidden.flatten(0, 1)
        hidden = self.function.apply(hidden, self.p)
        return self.b(hidden.reshape(*x.shape[:2], 3) if self.folded else hidden)


CASES: dict[str, tuple[type[Function], tuple[int, ...], bool, bool]] = {
    "a step": (Quantize, (), False, True),
    "a step, one axis": (Quantize, (1,), False, True),
    "slopes": (Swish, (3,), False, True),
    "slopes, an axis of samples": (Swish, (1, 3), False, True),
    "slopes, rows of samples": (Swish, (3,), True, True),
    "not differentiable": (Once, (3,), False, False),
    "not rightly": (Cut, (3,), False, False),
}


@pytest.mark.parametrize("samples", [1, 3, 13])
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function, shape, folded, differentiable = CASES[name]
    found, by_coefficients = [], crossings.by_coefficients
    monkeypatch.setattr(coefficients, "_WORTH", 1)
    monkeypatch.setattr(crossings, "by_coefficients", lambda *args: (found.append(by_coefficients(*args)), found[-1])[1])
    torch.manual_seed(0)
    net, lossfunc = extend(Net(function, shape, folded).double()), extend(nn.MSELoss(reduction="sum"))
    x, y = torch.randn(samples, *([2] * folded), 4).double(), torch.randn(samples, *([2] * folded), 2).double()
    with backpack(BatchGrad(), DiagGGNExact(), BatchDiagGGNExact()):
        lossfunc(net(x), y).backward()
    enough = samples >= 4 * net.p.numel()
    assert [result is not None for result in found] == [enough and differentiable] * len(found)
    assert bool(found) == (samples > 1)
    for parameter in net.parameters():
        rows = [torch.autograd.grad((net(x[n : n + 1]) - y[n : n + 1]).square().sum(), parameter)[0] for n in range(samples)]
        close(parameter.grad_batch, torch.stack(rows))
        outputs = [net(x[n : n + 1]).flatten() for n in range(samples)]
        squares = [sum(2 * torch.autograd.grad(entry, parameter, retain_graph=True)[0].square() for entry in out) for out in outputs]
        close(parameter.diag_ggn_exact_batch, torch.stack(squares))
        close(parameter.diag_ggn_exact, torch.stack(squares).sum(0))


def test_calls_do_not_grow_with_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, backward = [], Quantize.backward
    monkeypatch.setattr(Quantize, "backward", staticmethod(lambda ctx, grad: (calls.append(grad), backward(ctx, grad))[1]))
    counts = []
    for samples in (400, 800):
        net, x = extend(Net(Quantize, (1,), False)), torch.randn(samples, 4)
        with backpack(BatchGrad()):
            net(x).square().sum().backward()
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] < 40


@pytest.mark.parametrize("function", [Once, Swish])
def test_masks_of_other_inputs_are_not_kept(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node sends to an input that has samples of its own is as large as the mini-batch, for each sample."""
    sizes, cat = [], torch.cat
    monkeypatch.setattr(crossings, "_MASKED", 1)
    monkeypatch.setattr(crossings.torch, "cat", lambda parts, *args: (sizes.append(sum(p.numel() for p in parts)), cat(parts, *args))[1])
    net, x = extend(Net(function, (3,), False)), torch.randn(10, 4)
    with backpack(BatchGrad()):
        net(x).square().sum().backward()
    assert max(sizes, default=0) < 10 * 10 * 3
    assert net.p.grad_batch.shape == (10, 3)


def test_what_cancels_in_the_sum_over_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that clips: gradients of both signs are clipped alike, so that their sum is that of a linear one."""
    monkeypatch.setattr(coefficients, "_WORTH", 1)
    torch.manual_seed(0)
    net, x = extend(Net(Clipped, (), False).double()), torch.randn(1, 4).double().expand(12, 4)
    signs = torch.tensor([1.0, -1.0]).double().repeat(6).unsqueeze(1)
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match="linear"):
        (100 * net(x) * signs).sum().backward()
    assert not hasattr(net.p, "grad_batch")


class Slopes(nn.Module):
    """Many slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = nn.Linear(4, 50), nn.Parameter(torch.full((50,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return Swish.apply(self.a(x), self.p)


class Sizes(TorchDispatchMode):
    """Notes how large tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def test_coefficients_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coefficients, "_WORTH", 1)
    net, x, sizes = extend(Slopes()), torch.randn(400, 4), Sizes()
    loss = net(x).square().sum()
    with backpack(BatchGrad()), sizes:
        loss.backward()
    assert sizes.largest <= 25 * 400 * 50  # twenty columns or so that tell where samples lie; there are fifty entries
