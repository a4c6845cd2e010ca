"""Numbers that overflow in one sample: its quantities are not finite, those of the others are what they are, and nothing fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from math import inf, nan

import pytest
import torch
from test_extensions import close
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend
from backpack.extensions import GGNMP, HMP, BatchDiagGGNExact, BatchDiagGGNMC, BatchDiagHessian, DiagGGNExact, DiagGGNMC, DiagHessian
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import LossValueError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")

N = 3


class Coupled(nn.Module):
    """A loss without a rule, whose Hessian couples the outputs of a sample; it is negative where they are close to the target."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y).square().sum(1) - self.shift).square().sum()


def samples(extension: type[BackpropExtension], change: Callable[[Tensor], Tensor], lossfunc: nn.Module, bad: float | None) -> list[Tensor]:
    """Compute a quantity of each sample, with a bad one if wanted: the last, so that labels of the others are drawn before its own."""
    torch.manual_seed(0)
    model, lossfunc = extend(nn.Linear(4, 3).double()), extend(lossfunc)
    change = extend(deepcopy(change)) if isinstance(change, nn.Module) else change
    x, y = torch.rand(N, 4).double(), torch.rand(N, 3).double()
    if bad is not None:
        x[-1] = bad
    with backpack(extension()):
        lossfunc(change(model(x)), y).backward()
    return [getattr(p, extension().savefield) for p in model.parameters()]


CURVED: dict[str, Callable[[Tensor], Tensor]] = {
    "normalized": lambda h: F.normalize(h, dim=1),
    "softmax": lambda h: h.softmax(1),
    "layer norm": nn.LayerNorm(3).double(),
    "Softmax": nn.Softmax(1),
}


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize(
    ("extension", "change", "loss"),
    [
        *[(BatchDiagHessian, change, nn.MSELoss) for change in CURVED],
        *[(extension, "softmax", Coupled) for extension in (BatchDiagGGNExact, BatchDiagGGNMC, BatchDiagHessian)],
        *[(BatchDiagGGNMC, "softmax", loss) for loss in (nn.MSELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss)],
    ],
)
def test_one_sample(extension: type[BackpropExtension], change: str, loss: type[nn.Module], bad: float) -> None:
    for value, expected in zip(*(samples(extension, CURVED[change], loss(), number) for number in (bad, None)), strict=True):
        close(value[:-1], expected[:-1])
        assert not value[-1].isfinite().any()


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagGGNMC, DiagHessian])
@pytest.mark.parametrize("scale", [nan, inf])
@pytest.mark.parametrize(
    ("lossfunc", "path"),
    [
        (nn.CrossEntropyLoss(), "CrossEntropyLoss"),
        (F.cross_entropy, r"cross_entropy \(LogSoftmaxBackward0\)"),
        (lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1, reduction="none").sum(), r"cross_entropy \(LogSoftmaxBackward0\)"),
    ],
)
def test_scale_of_a_loss(extension: type[BackpropExtension], lossfunc: Callable[[Tensor, Tensor], Tensor], path: str, scale: float) -> None:
    lossfunc = extend(lossfunc) if isinstance(lossfunc, nn.Module) else lossfunc
    model, said = extend(nn.Linear(4, 3)), rf"{path} is scaled by a number that is not finite.*Multiply it by a finite one"
    with backpack(extension()), pytest.raises(LossValueError, match=said):
        (scale * lossfunc(model(torch.rand(2, 4)), torch.tensor([0, 2]))).backward()
    assert not hasattr(model.weight, extension().savefield)


@pytest.mark.parametrize("bad", [nan, inf])
def test_no_labels_are_drawn_from_logits_that_are_not_finite(bad: float) -> None:
    model, x = extend(nn.Linear(4, 3)), torch.rand(2, 4)
    x[1, 0] = bad
    lossfunc, y = extend(nn.CrossEntropyLoss()), torch.tensor([0, 2])
    said = r"CrossEntropyLoss: the probabilities of the classes are not finite.*\(DiagGGNExact, KFLR\), or call backward outside of the context"
    with backpack(DiagGGNMC()), pytest.raises(LossValueError, match=said):
        lossfunc(model(x), y).backward()
    with backpack(DiagGGNExact()):
        lossfunc(model(x), y).backward()
    assert not model.weight.diag_ggn_exact.isfinite().any()


def test_scaler_where_no_labels_can_be_drawn() -> None:
    """A pass without quantities lets it skip the step."""
    model, lossfunc, scaler = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss()), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()
    loss = lossfunc(model(torch.full((2, 4), inf)), torch.tensor([0, 2]))
    with backpack(*([DiagGGNMC()] if loss.isfinite() else [])):
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0  # noqa: PLR2004


class Masked(nn.Module):
    """A module without a rule that forbids a class; its samples mix if the mini-batch is centred."""

    def __init__(self, number: float, centred: bool) -> None:
        super().__init__()
        self.number, self.centred = number, centred

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0) if self.centred else 2 * x).masked_fill(torch.tensor([False, False, True]), self.number)


@pytest.mark.parametrize("number", [nan, inf, -inf])
@pytest.mark.parametrize("extension", [GGNMP, HMP])
def test_does_not_hide_samples_that_mix(extension: type[BackpropExtension], number: float) -> None:
    """Where a module runs again on single samples, what is finite must be the same, and only that can be told."""
    lossfunc = extend(nn.CrossEntropyLoss())
    for centred in (False, True):
        layer = nn.Linear(4, 3).double()
        model = extend(nn.Sequential(layer, Masked(number, centred)))
        with pytest.raises(UnsupportedError, match="mixes samples") if centred else nullcontext(), backpack(extension()):
            lossfunc(model(torch.rand(N, 4).double()), torch.zeros(N, dtype=torch.long)).backward()
            found = getattr(layer.bias, extension().savefield)(torch.eye(3).double())
    if number == -inf:
        assert found.isfinite().all()


def test_does_not_hide_negative_curvature_of_the_others() -> None:
    for bad in (None, nan):
        with pytest.raises(LossValueError, match="negative"):
            samples(BatchDiagGGNExact, CURVED["softmax"], Coupled(shift=100.0), bad)


class Distances(nn.Module):
    """Depends on how far points lie from one another, and from themselves, which is nowhere."""

    def __init__(self, length: Callable[[Tensor], Tensor], safe: bool) -> None:
        super().__init__()
        self.first, self.last, self.length, self.safe = nn.Linear(3, 3), nn.Linear(3, 2), length, safe

    def forward(self, x: Tensor) -> Tensor:
        points = self.first(x)
        apart = points.unsqueeze(2) - points.unsqueeze(1)
        itself = torch.eye(x.shape[1], dtype=torch.bool).unsqueeze(-1)
        if not self.safe:
            return self.last((self.length(apart) * apart.sin()).sum((1, 2)))
        # plain automatic differentiation gets no 0 / 0 to see
        return self.last((self.length(torch.where(itself, torch.arange(1, 4), apart)) * torch.where(itself, 0.0, apart.sin())).sum((1, 2)))


@pytest.mark.parametrize("samples", [1, N])
@pytest.mark.parametrize(
    "length",
    [
        lambda x: x.norm(dim=-1, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, ord=3, dim=-1, keepdim=True),
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-8),
        lambda x: F.normalize(x, dim=-1),
        lambda x: x.std(-1, keepdim=True),
    ],
    ids=["norm", "cubes", "clamped", "normalized", "deviation"],
)
def test_norms_of_what_is_always_zero(length: Callable[[Tensor], Tensor], samples: int) -> None:
    """Their second derivative is not finite there, but multiplied with zero."""
    torch.manual_seed(0)
    plain = Distances(length, safe=True).double()
    model, x, y = extend(Distances(length, safe=False).double()), torch.randn(samples, 4, 3).double(), torch.arange(samples) % 2
    model.load_state_dict(plain.state_dict())
    with backpack(DiagHessian()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    parameters = tuple(plain.parameters())
    first = torch.autograd.grad(F.cross_entropy(plain(x), y), parameters, create_graph=True)
    for found, parameter, gradient in zip(model.parameters(), parameters, first, strict=True):
        rows = [torch.autograd.grad(entry, parameter, retain_graph=True)[0].flatten()[i] for i, entry in enumerate(gradient.flatten())]
        close(found.diag_h, torch.stack(rows).reshape(parameter.shape))
