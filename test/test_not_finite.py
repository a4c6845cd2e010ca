"""Numbers that overflow, or are large, in one sample: those of the others are what they are, and nothing fails, or is overlooked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from math import inf, nan
from typing import Any

import pytest
import torch
from cases import CASES as TABLE
from test_extensions import close
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from backpack import backpack, extend
from backpack.extensions import (
    GGNMP,
    HMP,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SumGradSquared,
)
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


PER_SAMPLE = {BatchGrad: 0, BatchL2Grad: 0, BatchDiagGGNExact: 0, SqrtGGNExact: 1, BatchDiagHessian: 0}
SUMS = {name for name in TABLE if name.startswith(("addmm onto", "addmm with", "stack of matrices, activations added", "EmbeddingBag, weights with"))}
"""The product of a parameter and data is one for all samples, with a column for each that is zero at the others: zero times no number is none."""
CHOICES = {name for name in TABLE if name.startswith(("hardest", "EmbeddingBag of lists", "a table beside a constant"))}
"""What a sample is, or which rows it uses, depends on all numbers."""


@pytest.mark.parametrize("case", [name for name in TABLE if name not in SUMS | CHOICES])
def test_other_samples_of_the_table(case: str) -> None:
    """Each has what it has beside a sample of numbers."""
    refused, numbers = (NotImplementedError, LossValueError, RuntimeError), []
    for extension, axis in PER_SAMPLE.items():
        values = []
        for bad in (None, nan):
            problem = TABLE[case].build(N)
            if not problem.x.is_floating_point() or (case.startswith("Bilinear") and extension is BatchDiagHessian):
                return
            with torch.no_grad():
                problem.x[-1] = problem.x[-1] if bad is None else bad
            for module in (problem.model, *problem.losses):
                extend(module)
            with suppress(*refused), backpack(extension()):
                problem.loss(problem.outputs()).backward()
            found = {n: getattr(p, extension().savefield, None) for n, p in problem.model.named_parameters()}
            values.append({name: value.narrow(axis, 0, N - 1) for name, value in found.items() if value is not None})
        numbers += values[0]
        for name in values[0].keys() & values[1].keys():
            close(values[1][name], values[0][name])
    assert numbers


ROWS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "maxima of bags": (lambda: nn.EmbeddingBag(6, 4, mode="max"), torch.tensor([[1, 2, 0], [1, 5, 1], [3, 4, 0]])),
    "bags": (lambda: nn.EmbeddingBag(6, 4, mode="mean", padding_idx=0), torch.tensor([[1, 2, 0], [1, 5, 1], [3, 4, 0]])),
    "padded sequences": (lambda: nn.Embedding(6, 4, padding_idx=0), torch.tensor([[1, 2, 0], [1, 5, 1], [3, 4, 0]])),
    "slopes": (lambda: nn.PReLU(4), torch.tensor([[1, 2, -3, 0], [-1, -2, 3, 4], [nan, inf, -inf, 1.0]]).double()),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_not_finite(name: str) -> None:
    """As autograd has each sample; the row of the padding has no gradient, whatever arrives there."""
    torch.manual_seed(0)
    make, x = ROWS[name]
    layer = make().double()
    model = extend(nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2)).double())
    model(x)
    with torch.no_grad():
        layer.weight[3] = layer.weight[3] if x.is_floating_point() else nan
    with backpack(BatchGrad(), SumGradSquared()):
        model(x).square().sum().backward()
    rows = torch.stack([torch.autograd.grad(model(row[None]).square().sum(), layer.weight)[0] for row in x])
    torch.testing.assert_close(layer.weight.grad_batch, rows, equal_nan=True)
    torch.testing.assert_close(layer.weight.sum_grad_squared, rows.square().sum(0), equal_nan=True)
    assert rows[:-1].isfinite().all()
    assert not rows[-1].isfinite().all()


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


class Mixing(nn.Module):
    """A module without a rule in which each sample sees a bit of another one."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.tanh().roll(1, 0)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("extension", [GGNMP, HMP, KFRA])
def test_a_large_sample_does_not_hide_that_samples_mix(extension: type[BackpropExtension], size: float) -> None:
    torch.manual_seed(0)
    model, lossfunc, x = extend(nn.Sequential(nn.Linear(4, 3), Mixing())), extend(nn.MSELoss()), torch.randn(N, 4)
    x[1] = size
    with backpack(extension()), pytest.raises(UnsupportedError, match="mixes samples"):
        lossfunc(model(x), torch.zeros(N, 3)).backward()
        getattr(model[0].weight, extension().savefield)(torch.ones(1, 3, 4))  # products run the module again


class Written(Function):
    """A cross-entropy, differentiable twice unless its backward takes probabilities for constants."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, complete: bool) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.probabilities = None if complete else logits.softmax(1)
        return -logits.log_softmax(1).gather(1, labels[:, None]).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        probabilities = logits.softmax(1) if ctx.probabilities is None else ctx.probabilities
        return grad_output * (probabilities - F.one_hot(labels, logits.shape[1])), None, None


class WrittenLoss(nn.Module):
    def __init__(self, complete: bool) -> None:
        super().__init__()
        self.complete = complete

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return Written.apply(logits, labels, self.complete)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_a_large_sample_and_a_loss_with_a_derivative_of_its_own(size: float) -> None:
    values, x, y = [], torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    x[1] = size
    for lossfunc in (nn.CrossEntropyLoss(reduction="sum"), WrittenLoss(complete=True), WrittenLoss(complete=False)):
        torch.manual_seed(0)
        model, wrong = extend(nn.Linear(4, 3)), not getattr(lossfunc, "complete", True)
        with pytest.raises(UnsupportedError, match="cannot be differentiated twice") if wrong else nullcontext(), backpack(BatchDiagGGNExact()):
            extend(lossfunc)(model(x), y).backward()
        values.append(getattr(model.weight, "diag_ggn_exact_batch", None))
    assert values.pop() is None
    others = torch.tensor([0, 2, 3, 4, 5])
    close(values[1][others], values[0][others], 1e-5)
