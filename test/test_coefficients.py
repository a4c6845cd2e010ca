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


class Nearly(Swish):
    """Has one that is wrong by a thousandth."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = ctx.saved_tensors
        s = torch.sigmoid(slope * x)
        wrong = grad * 0.999 + grad.detach() * 0.001
        return grad * (s + slope * x * s * (1 - s)), (wrong * x * x * s * (1 - s)).sum_to_size(slope.shape)


class Lazy(Swish):
    """Returns nothing for the parameter where nothing arrives."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        of_input, of_parameter = Swish.backward(ctx, grad)
        return of_input, of_parameter if grad.detach().any() else None


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
    "not quite rightly": (Nearly, (3,), False, False),
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
    for samples in (400, 400, 800):  # the first time, batching rules are tried
        net, x = extend(Net(Quantize, (1,), False)), torch.randn(samples, 4)
        with backpack(BatchGrad()):
            net(x).square().sum().backward()
        counts.append(len(calls))
        calls.clear()
    assert counts[1] == counts[2] < 40


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


@pytest.mark.parametrize("samples", [1, 5, 12])
def test_backwards_that_return_none_at_times(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the sum over samples is zero, masks tell; where a sample has no gradient, nothing does."""
    monkeypatch.setattr(coefficients, "_WORTH", 1)
    torch.manual_seed(0)
    net, x = extend(Net(Lazy, (), False).double()), torch.randn(samples, 4).double()
    signs = torch.tensor([1.0, 0.0])[torch.arange(samples) % 2].double().unsqueeze(1)
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match="Lazy .* returns None at times"):
        (net(x) * signs).sum().backward()
    assert not hasattr(net.p, "grad_batch")


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
def test_results_that_can_be_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coefficients, "_WORTH", 1)
    torch.manual_seed(0)
    net, x = extend(Net(Swish, (), False).double()), torch.randn(12, 4).double()
    with backpack(BatchGrad()):
        net(x).square().sum().backward(create_graph=True)
    rows = [torch.autograd.grad(net(x[n : n + 1]).square().sum(), net.p, create_graph=True)[0] for n in range(12)]
    (found,) = torch.autograd.grad(net.p.grad_batch.square().sum(), net.a.weight)
    (expected,) = torch.autograd.grad(torch.stack(rows).square().sum(), net.a.weight)
    close(found, expected)
    net.zero_grad()


def test_half_precision_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of both signs cancel, up to what a wrong second derivative would change."""
    monkeypatch.setattr(coefficients, "_WORTH", 1)
    torch.manual_seed(0)
    net, x = extend(Net(Cut, (), False).bfloat16()), torch.randn(64, 4).bfloat16()
    signs = torch.randn(64, 1).sign().bfloat16()
    with backpack(BatchGrad()):
        (net(x) * signs).sum().backward()
    rows = [torch.autograd.grad((net(x[n : n + 1]) * signs[n]).sum(), net.p)[0] for n in range(64)]
    torch.testing.assert_close(net.p.grad_batch, torch.stack(rows), rtol=0.1, atol=0.02)


class Normalized(Function):
    """A softmax, whose backward gives what cancels for columns that are the same for all entries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.softmax(-1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return result * (grad - (result * grad).sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_what_cancels_is_no_sign_of_something_else(seed: int, dtype: torch.dtype) -> None:
    """The sum of probabilities is one: its derivative is made of rounding errors, and a backward that is linear does not look so."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 7), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(x) + 0.37 * Normalized.apply(self.a(x)).sum(1, keepdim=True)

    torch.manual_seed(seed)
    net, x = extend(Sums().to(dtype)), torch.randn(5, 4).to(dtype)
    with backpack(DiagGGNExact()):
        extend(nn.MSELoss(reduction="sum"))(net(x), torch.zeros(5, 2).to(dtype)).backward()
    assert net.a.weight.diag_ggn_exact.max() < 1e-10
    close(net.b.weight.diag_ggn_exact, 2 * x.square().sum(0).expand(2, 4), 1e-5)
