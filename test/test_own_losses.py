"""Which modules count as losses, seen from the front door: losses of the user's own, and what is refused, by name and with a way out."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import pytest
import torch
from cases_loss import LogCosh
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from backpack import backpack, check_rule, clear, extend, extensions, register, results
from backpack.core.crossings import Gap
from backpack.core.derivatives import GenericLossDerivatives, loss_hessian
from backpack.core.recording import recorder_of
from backpack.utils.errors import LossNotExtendedError, LossValueError, MixedSamplesError, NotRecordedError, ShapeError, UnsupportedError

N, C = 3, 4


def make(loss: nn.Module) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Return an extended net, the extended loss, inputs and classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, C)).double()
    return extend(model), extend(loss.double()), torch.randn(N, 3, dtype=torch.float64), torch.randint(C, (N,))


def expected_diag_ggn(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    output = model(x)
    hessian = torch.autograd.functional.hessian(loss, output.detach()).reshape(output.numel(), -1)
    rows = [torch.autograd.grad(entry, list(model.parameters()), retain_graph=True) for entry in output.flatten()]
    jacobians = [torch.stack([g.flatten() for g in column]) for column in zip(*rows, strict=True)]
    return [(J.T @ hessian @ J).diagonal().reshape(p.shape) for J, p in zip(jacobians, model.parameters(), strict=True)]


def assert_diag_ggn(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, diagonal in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.diag_ggn_exact, diagonal)


class Combined(nn.Module):
    """Contains a known loss, and adds something curved that does not go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits, target) + 0.1 * logits.square().mean()


class TwoHeads(nn.Module):
    """Returns means, and logarithms of variances."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.variance(x)


class Gaussian(nn.Module):
    """The likelihood of both, which it is given as one tensor or as several in one."""

    def forward(self, prediction: Any, target: Tensor) -> Tensor:
        if isinstance(prediction, dict):
            prediction = prediction.values()
        mean, variance = prediction.chunk(2, 1) if isinstance(prediction, Tensor) else prediction
        return (variance + (target - mean).square() * (-variance).exp()).mean()


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("pack", [tuple, list, lambda parts: dict(zip("mv", parts, strict=True))], ids=["tuple", "list", "dict"])
def test_predictions_in_several_tensors(pack: Callable, declared: bool) -> None:
    """The message says why they are refused, and what it says to write is exact."""
    kind = type("Declared", (Gaussian,), {})
    if declared:
        register(kind, GenericLossDerivatives)
    model, lossfunc, x, y = extend(TwoHeads().double()), extend(kind()), torch.randn(N, 3).double(), torch.randn(N, 2).double()
    for extension in (extensions.DiagGGNExact, extensions.DiagHessian):
        with backpack(extension()), pytest.raises(LossNotExtendedError, match=r"is a (tuple|list|dict), .* one tensor .*torch\.cat\(\[") as caught:
            lossfunc(pack(model(x)), y).backward()
        assert "register" not in str(caught.value) and "module of your own" not in str(caught.value)
    with backpack(extensions.DiagHessian()):
        lossfunc(torch.cat(list(model(x)), 1), y).backward()
    for parameter in model.parameters():
        loss = lossfunc(model(x), y)
        (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
        rows = [torch.autograd.grad(entry, parameter, retain_graph=True)[0].flatten() for entry in gradient.flatten()]
        torch.testing.assert_close(parameter.diag_h.flatten(), torch.stack(rows).diagonal())


class CombinedLoss(nn.modules.loss._Loss):
    """The same, declared as a loss by its base class."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return Combined.forward(self, logits, target)


class Sum(nn.Module):
    """Contains known losses, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits, target) + 0.5 * self.cross_entropy(logits, (target + 1) % C)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits / self.temperature - F.one_hot(target, C)).square().mean()


class TemperatureOfFunction(Temperature):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits / self.temperature, target)


class Hinge(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (1 - logits[:, 0] * (target - 1.5)).relu().mean()


class Unreduced(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits - F.one_hot(target, C)).square().sum(1)


class UnreducedFunction(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none")


class TargetFirst(nn.Module):
    def forward(self, target: Tensor, logits: Tensor) -> Tensor:
        return (logits - F.one_hot(target, C)).square().mean()


class FunctionOfTargetFirst(nn.Module):
    def forward(self, target: Tensor, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, target)


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.PoissonNLLLoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.DiagHessian])
def test_swapped_arguments_of_a_loss_that_is_not_symmetric(loss: nn.Module, extension: type) -> None:
    model, loss, x, _ = make(loss)
    with backpack(extension()), pytest.raises((LossValueError, LossNotExtendedError), match="Write the prediction first"):
        loss(torch.rand(N, C, dtype=torch.float64), model(x)).backward()


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.scale * (logits - F.one_hot(target, C)).square().mean()


class Containing(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.part = Scaled(scale)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return 3 * self.part(logits, target)


@pytest.mark.parametrize("make_loss", [Scaled, Containing])
def test_temporary_object(make_loss: Callable[[float], nn.Module]) -> None:
    """Extended where it is called, like losses of torch; first order needs no loss at all."""
    model, _, x, y = make(nn.MSELoss())
    with backpack(extensions.DiagGGNExact(), extensions.BatchGrad()):
        extend(make_loss(0.5))(model(x), y).backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: make_loss(0.5)(logits, y)))
    assert_grad_batch(model, grad_batch_by_loop(model, lambda rows: make_loss(0.5 * len(x[rows]) / N)(model(x[rows]), y[rows])))


class Remembering(Scaled):
    """What it stores holds the graph, which would hold it."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        self.latest = super().forward(logits, target)
        return self.latest


class Both(NamedTuple):
    """A loss, and a number to look at."""

    loss: Tensor
    mae: Tensor


RETURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "mapping of one": (lambda loss, mae: {"loss": loss}, itemgetter("loss")),
    "mapping of two": (lambda loss, mae: {"loss": loss, "mae": mae.detach()}, itemgetter("loss")),
    "mapping with a number": (lambda loss, mae: {"mae": mae.item(), "loss": loss}, itemgetter("loss")),
    "tuple of one": (lambda loss, mae: (loss,), itemgetter(0)),
    "named tuple": (lambda loss, mae: Both(loss, mae.detach()), attrgetter("loss")),
    "loss last": (lambda loss, mae: (mae.detach(), loss), itemgetter(1)),
    "two losses": (Both, attrgetter("loss")),
    "second of two losses": (lambda loss, mae: (mae, loss), itemgetter(1)),
}


def returning(name: str) -> type[nn.Module]:
    """Return a class of losses that make more than a number."""

    class Returns(nn.Module):
        def forward(self, logits: Tensor, target: Tensor) -> Any:
            return RETURNED[name][0](LogCosh()(logits, F.one_hot(target, C)), (logits - F.one_hot(target, C)).abs().mean())

    return Returns


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_loss_inside_of_what_is_returned(name: str, scale: float) -> None:
    cls, get = returning(name), RETURNED[name][1]
    register(cls, GenericLossDerivatives)
    model, loss, x, y = make(cls())
    ambiguous = name in ("loss last", "two losses", "second of two losses")
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian()):
        value = scale * get(loss(model(x), y))
        with pytest.raises(UnsupportedError, match="Returns.*2 tensors.*the loss") if ambiguous else nullcontext():
            value.backward()
    if ambiguous:
        assert results(model) == {}
        return
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: scale * LogCosh()(logits, F.one_hot(y, C))))
    torch.testing.assert_close(model[2].weight.diag_h, model[2].weight.diag_ggn_exact)
    assert check_rule(cls(), torch.randn(N, C), y)


def test_one_tensor_in_a_mapping_looks_like_a_loss() -> None:
    """Also where nobody has said that it is one."""
    model, loss, x, y = make(returning("mapping of one")())
    with backpack(extensions.DiagGGNExact()):
        loss(model(x), y)["loss"].backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: LogCosh()(logits, F.one_hot(y, C))))


@pytest.mark.parametrize("inside", [False, True])
def test_temporary_object_that_stores_what_it_returns(inside: bool) -> None:
    model, _, x, y = make(nn.MSELoss())
    loss = Containing(1.0) if inside else Remembering(1.0)
    loss.part = Remembering(1.0) if inside else None
    extend(loss)
    value, alive = loss(model(x), y), weakref.ref(loss)
    del loss
    assert alive() is None
    with backpack(extensions.DiagGGNExact()), pytest.raises(NotRecordedError, match="Keep a reference"):
        value.backward()


class WeightedMean(nn.Module):
    def forward(self, values: Tensor, weights: Tensor) -> Tensor:
        return (values * weights).mean()


@pytest.mark.parametrize("make_loss", [CombinedLoss, Sum])
def test_diagonal_of_losses_with_parts(make_loss: Callable[[], nn.Module]) -> None:
    model, loss, x, y = make(make_loss())
    with backpack(extensions.DiagGGNExact()):
        loss(model(x), y).backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: loss(logits, y)))


class Masked(nn.Module):
    """An optional argument in front of another one."""

    def forward(self, logits: Tensor, target: Tensor, weight: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        losses = (logits - F.one_hot(target, C)).square()
        losses = losses if weight is None else losses * weight / weight.sum() * weight.numel()
        return (losses if mask is None else losses * mask).mean()


class OnlyByName(nn.Module):
    def forward(self, logits: Tensor, target: Tensor, *, scale: float = 1.0, mask: Tensor) -> Tensor:
        return scale * Masked().forward(logits, target, mask=mask)


class ManyArguments(nn.Module):
    def forward(self, *arguments: Tensor, scale: float = 1.0, **options: Tensor) -> Tensor:
        return scale * Masked().forward(*arguments, **options)


NAMED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]]] = {
    "behind a gap": (Masked, lambda loss, out, y, mask: loss(out, y, mask=mask)),
    "all": (Masked, lambda loss, out, y, mask: loss(mask=mask, target=y, logits=out)),
    "not the mask": (Masked, lambda loss, out, y, mask: loss(out, y, None, mask)),
    "only by name": (OnlyByName, lambda loss, out, y, mask: loss(out, y, mask=mask)),
    "only by name, scaled": (OnlyByName, lambda loss, out, y, mask: loss(out, target=y, mask=mask, scale=3.0)),
    "any number": (ManyArguments, lambda loss, out, y, mask: loss(out, y, mask=mask)),
    "any number, scaled": (ManyArguments, lambda loss, out, y, mask: loss(out, y, None, mask, scale=0.5)),
    "any name": (ManyArguments, lambda loss, out, y, mask: loss(out, mask=mask, scale=2.0, target=y)),
}


@pytest.mark.parametrize("case", NAMED)
def test_arguments_reach_the_loss_by_their_names(case: str) -> None:
    make_loss, call = NAMED[case]
    model, loss, x, y = make(make_loss())
    mask = (torch.arange(N * C).reshape(N, C) % 3 > 0).double()
    with backpack(extensions.DiagGGNExact()):
        call(loss, model(x), y, mask).backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: call(loss, logits, y, mask)))


class ForEachClass(nn.modules.loss._Loss):
    """Its output has one entry a class, which depends on all samples."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits - F.one_hot(target, C)).square().mean(0)


class ForEachSample(ForEachClass):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits - F.one_hot(target, C)).square().mean(1)


@pytest.mark.parametrize("samples", [N, C])
@pytest.mark.parametrize("weights", [torch.tensor([4.0, 1.0, 0.1, 0.0]), torch.full((C,), 0.7)], ids=["different", "alike"])
@pytest.mark.parametrize("make_loss", [ForEachClass, ForEachSample])
@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.DiagHessian, extensions.KFLR])
def test_weights_of_classes_are_none_of_samples(extension: type, make_loss: Callable[[], nn.Module], weights: Tensor, samples: int) -> None:
    """Also where there are as many of them."""
    model, loss, _, _ = make(make_loss())
    x, y = torch.randn(samples, 3, dtype=torch.float64), torch.randint(C, (samples,))
    weights = weights[:samples] if make_loss is ForEachSample else weights

    def value(logits: Tensor) -> Tensor:
        return (loss(logits, y) * weights).sum()

    if make_loss is ForEachClass and weights.unique().numel() > 1:
        with backpack(extension()), pytest.raises(UnsupportedError, match="weighted differently"):
            value(model(x)).backward()
        return
    with backpack(extension()):
        value(model(x)).backward()
    if extension is extensions.DiagGGNExact:
        assert_diag_ggn(model, expected_diag_ggn(model, x, value))


class Gate(nn.Module):
    """A layer without a rule."""

    def forward(self, x: Tensor, shift: float = 0.0, *, slope: float = 1.0) -> Tensor:
        return (slope * x + shift).sin()


def test_arguments_reach_a_layer_by_their_names() -> None:
    """Products with curvature matrices run it again."""
    gate, layer, x = Gate(), nn.Linear(3, C).double(), torch.randn(N, 3, dtype=torch.float64)
    model, y = extend(nn.Sequential(layer, gate)), torch.randint(C, (N,))
    gate.register_forward_pre_hook(lambda module, args, kwargs: (args, {"slope": 2.0}), with_kwargs=True, prepend=True)
    with backpack(extensions.GGNMP(), extensions.SqrtGGNExact()):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    vector = torch.randn(1, *layer.weight.shape, dtype=torch.float64)
    root = layer.weight.sqrt_ggn_exact
    torch.testing.assert_close(layer.weight.ggnmp(vector), torch.einsum("vnij,vn->ij", root, torch.einsum("vnij,ij->vn", root, vector[0]))[None])


class Counting(nn.Module):
    """Changes whatever a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.count, self.total, self.inner = 0, torch.zeros(()), nn.BatchNorm1d(C, affine=False)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        self.steps += 1
        self.total += 1
        self.count += 1
        self.latest, self.total = target, self.total + 1
        self.inner(logits.detach())
        torch.rand(3)
        return (logits - F.one_hot(target, C)).square().mean()


def test_evaluating_again_changes_nothing() -> None:
    model, loss, x, y = make(Counting())
    value = loss(model(x), y)
    random, total, latest = torch.get_rng_state(), loss.total, loss.latest
    state = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian()):
        value.backward()
    assert torch.equal(torch.get_rng_state(), random)
    assert (loss.count, loss.total, loss.latest) == (1, total, latest) and total == 2
    for name, buffer in loss.named_buffers():
        assert torch.equal(buffer, state[name]), name
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: loss(logits, y)))


class Drawing(nn.Module):
    """Has the same value with any random numbers, but another derivative."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (F.gumbel_softmax(100 * logits.softmax(1), tau=9.0, hard=True) - F.one_hot(target, C)).square().mean()


def test_another_derivative_is_noticed_where_the_value_is_the_same() -> None:
    model, loss, x, y = make(Drawing())
    with torch.no_grad():
        model[2].bias[1] += 20
    assert loss(model(x), y) == loss(model(x), y)
    with backpack(extensions.DiagHessian()), pytest.raises(LossValueError, match="random"):
        loss(model(x), y).backward()
    assert all("diag_h" not in vars(p) for p in model.parameters())


class Growing(nn.Module):
    """Another loss at every call."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size, self.count = size, 1

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        return self.size * self.count * (logits - F.one_hot(target, C)).square().mean()


@pytest.mark.parametrize("size", [1.0, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_another_value_is_noticed_however_small_it_is(size: float, dtype: torch.dtype) -> None:
    model, loss, x, y = make(Growing(size))
    with backpack(extensions.DiagGGNExact()), pytest.raises(LossValueError, match="another value"):
        loss(model.to(dtype)(x.to(dtype)), y).backward()


def test_evaluating_again_records_nothing() -> None:
    model, loss, x, y = make(CombinedLoss())
    value = loss(model(x), y)
    before = recorder_of(loss.cross_entropy).last
    with backpack(extensions.DiagGGNExact()):
        value.backward(retain_graph=True)
    assert recorder_of(loss.cross_entropy).last is before is not None


@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.DiagGGNMC, extensions.DiagHessian, extensions.KFRA, extensions.GGNMP])
@pytest.mark.parametrize(
    ("make_loss", "error", "hint"),
    [
        (Combined, LossNotExtendedError, r"register\(Combined, backpack.core.derivatives.GenericLossDerivatives\)"),
        (Unreduced, LossNotExtendedError, r"register\(Unreduced, "),
        (Hinge, UnsupportedError, r"zero.*register\(Hinge, "),
        (Temperature, LossNotExtendedError, "Temperature has parameters"),
    ],
)
def test_what_is_no_loss_by_itself(make_loss: Callable[[], nn.Module], error: type[Exception], hint: str, extension: type) -> None:
    model, loss, x, y = make(make_loss())
    with backpack(extension()), pytest.raises(error, match=hint):
        loss(model(x), y).sum().backward()


def test_prediction_comes_first() -> None:
    model, loss, x, y = make(TargetFirst())
    with backpack(extensions.DiagGGNExact()), pytest.raises(LossNotExtendedError, match="first argument is the prediction"):
        loss(y, model(x)).backward()


@pytest.mark.parametrize("make_loss", [TemperatureOfFunction, UnreducedFunction, FunctionOfTargetFirst])
def test_functions_are_found_in_any_module(make_loss: Callable[[], nn.Module]) -> None:
    """What could not be the module of a loss may still call one of torch's functions."""
    model, loss, x, y = make(make_loss())
    arguments = (lambda logits: (y, logits)) if make_loss is FunctionOfTargetFirst else (lambda logits: (logits, y))
    with backpack(extensions.DiagGGNExact()):
        loss(*arguments(model(x))).sum().backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: loss(*arguments(logits)).sum()))


def test_what_sums_up_is_not_taken_for_the_loss() -> None:
    model, mean, x, y = make(WeightedMean())
    loss, weights = extend(nn.CrossEntropyLoss(reduction="none")), torch.rand(N, dtype=torch.float64)
    with backpack(extensions.DiagGGNExact()):
        mean(loss(model(x), y), weights).backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: mean(F.cross_entropy(logits, y, reduction="none"), weights)))
    clear(model)
    with backpack(extensions.DiagGGNExact()):
        mean(F.cross_entropy(model(x), y, reduction="none"), weights).backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda logits: mean(F.cross_entropy(logits, y, reduction="none"), weights)))
    with backpack(extensions.DiagGGNExact()), pytest.raises(UnsupportedError, match="WeightedMean"):
        mean(model(x).abs().sum(1), weights).backward()


def test_nothing_curved_may_follow_an_own_loss() -> None:
    model, loss, x, _ = make(LogCosh())
    with backpack(extensions.DiagGGNExact()), pytest.raises(LossValueError, match="lies between"):
        loss(model(x), torch.zeros(N, C)).square().backward()


@pytest.mark.parametrize("extension", [extensions.BatchGrad, extensions.DiagGGNExact, extensions.DiagGGNMC, extensions.DiagHessian])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.NLLLoss(), nn.MultiMarginLoss()])
@pytest.mark.parametrize("wrap", [nn.Sequential, lambda layer: layer])
def test_single_sample_without_batch_axis(wrap: Callable, loss: nn.Module, extension: type) -> None:
    model = extend(wrap(nn.Linear(3, C)))
    with backpack(extension()), pytest.raises(ShapeError, match="batch axis of length 1"):
        extend(loss)(model(torch.randn(3)), torch.tensor(1)).backward()


def grad_batch_by_loop(model: nn.Module, loss: Callable[[slice], Tensor]) -> list[Tensor]:
    rows = [torch.autograd.grad(loss(slice(n, n + 1)), list(model.parameters())) for n in range(N)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def assert_grad_batch(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad_batch, rows)


def test_variance_that_depends_on_parameters() -> None:
    model, loss, x, _ = make(nn.GaussianNLLLoss(reduction="sum"))
    target = torch.randn(N, 2, dtype=torch.float64)

    def value(rows: slice = slice(None)) -> Tensor:
        mean, spread = model(x[rows]).chunk(2, dim=1)
        return loss(mean, target[rows], spread.exp())

    with backpack(extensions.DiagGGNExact()), pytest.raises(LossValueError, match="other than the prediction"):
        value().backward()
    with backpack(extensions.BatchGrad()):
        value().backward()
    assert_grad_batch(model, grad_batch_by_loop(model, value))


def test_ctc_has_gradients_only() -> None:
    model, loss, _, _ = make(nn.CTCLoss(reduction="sum"))
    x, target = torch.randn(N, 5, 3, dtype=torch.float64), torch.tensor([[1, 2], [2, 1], [3, 3]])

    def value(rows: slice = slice(None)) -> Tensor:
        lengths = torch.tensor([5, 2]).repeat(len(x[rows]), 1)
        return loss(model(x[rows]).log_softmax(2).transpose(0, 1), target[rows], lengths[:, 0], lengths[:, 1])

    with backpack(extensions.DiagGGNExact()), pytest.raises(UnsupportedError, match=r"CTCLoss.*axis 1"):
        value().backward()
    with backpack(extensions.BatchGrad()):
        value().backward()
    assert_grad_batch(model, grad_batch_by_loop(model, value))


def test_layer_and_loss_in_one() -> None:
    if not hasattr(nn, "LinearCrossEntropyLoss"):  # old torch
        return
    model, loss, x, y = make(nn.LinearCrossEntropyLoss(C, C))
    with backpack(extensions.DiagGGNExact()), pytest.raises(LossValueError, match="LinearCrossEntropyLoss .* has parameters of its own"):
        loss(model(x), y).backward()


class Certain(nn.Module):
    """Cross-entropy by hand."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (out.logsumexp(1) - out.gather(1, y[:, None])[:, 0]).mean()


class SquaredHinge(nn.Module):
    """Curved where a margin is not kept."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (1 - out * (2 * F.one_hot(y, 3) - 1)).relu().square().mean()


class HingeOfClasses(nn.Module):
    """Curved nowhere."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (1 - out * (2 * F.one_hot(y, 3) - 1)).relu().mean()


class Huber(nn.Module):
    """Curved near the targets alone."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(out, 100 * F.one_hot(y, 3).to(out))


class Clipped(nn.Module):
    """As in proximal policy optimization: curved unless all ratios of probabilities are clipped."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        ratio = (F.log_softmax(out, 1).gather(1, y[:, None]) + 20).exp()
        return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()


class Contrast(nn.Module):
    """Each sample against all others."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def confident(gap: float, dtype: torch.dtype, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    y = torch.tensor([0, 1, 2, 0])[:samples]
    layer = nn.Linear(3, 3, dtype=dtype)
    layer.weight.data = gap * torch.eye(3, dtype=dtype)
    layer.bias.data.zero_()
    return layer, (F.one_hot(y, 3) + 0.01 * torch.randn(samples, 3)).to(dtype), y


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("gap", "dtype"), [(10, torch.float32), (16, torch.float32), (30, torch.float32), (22, torch.float64), (50, torch.float64)])
@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.DiagHessian])
def test_models_that_are_certain_of_all_samples(extension: type, gap: float, dtype: torch.dtype, samples: int) -> None:
    """The Hessian is far smaller than what it is a difference of: rounding errors are neither samples that mix nor negative curvature."""
    layer, x, y = confident(gap, dtype, samples)
    with backpack(extension()):
        extend(Certain())(extend(layer)(x), y).backward()
    probs = torch.softmax(layer(x).double(), 1)
    found = getattr(layer.bias, extension().savefield).double()
    torch.testing.assert_close(found, (probs * (1 - probs)).mean(0).detach(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_losses_that_are_flat_where_margins_are_kept() -> None:
    """Zero is the curvature of a curved loss there; a loss that is curved nowhere is asked about, and one that mixes samples does so there, too."""
    layer, x, y = confident(5.0, torch.float64, 4)
    layer.bias.data.fill_(-2)
    flat = ((SquaredHinge(), None), (Huber(), None), (Clipped(), None))
    for loss, expected in (*flat, (HingeOfClasses(), "piecewise linear"), (Contrast(), "couples")):
        with backpack(extensions.DiagGGNExact()), nullcontext() if expected is None else pytest.raises(NotImplementedError, match=expected):
            extend(loss)(extend(layer)(10 * x if expected == "couples" else x), y).backward()
        assert hasattr(layer.weight, "diag_ggn_exact") == (expected is None)
        assert expected is not None or not layer.weight.diag_ggn_exact.any()
        clear(layer)


class Welsch(nn.Module):
    """A robust loss whose curvature is negative for outliers."""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return (1 - torch.exp(-((out - target) ** 2) / 2)).sum()


@pytest.mark.parametrize(("dtype", "residual"), [(torch.float32, 5.0), (torch.float64, 7.0)])
@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.SqrtGGNExact, extensions.KFLR])
def test_little_negative_curvature_of_an_outlier(extension: type, dtype: torch.dtype, residual: float) -> None:
    """It is little beside that of the others, but not beside its own size, and the Jacobian of an outlier is large."""
    model, lossfunc = extend(nn.Linear(1, 1, dtype=dtype)), extend(Welsch())
    x = torch.tensor([[0.1], [0.2], [1000.0]], dtype=dtype)
    target = model(x).detach() - torch.tensor([[0.1], [-0.2], [residual]], dtype=dtype)
    with backpack(extension()), pytest.raises(LossValueError, match="negative eigenvalues"):
        lossfunc(model(x), target).backward()
    assert results(model) == {}


class Attached(nn.Module):
    """Squares, of which one counts much more than the others, and samples that meet."""

    def forward(self, out: Tensor, factors: Tensor) -> Tensor:
        return (factors[:, None] * out.square()).sum() + out[1:].sum(0).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 1e5, 1e10])
@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.BatchDiagHessian])
def test_samples_that_meet_beside_one_that_is_much_larger(extension: type, factor: float, dtype: torch.dtype) -> None:
    model, factors = extend(nn.Linear(2, 2, dtype=dtype)), torch.tensor([factor, 1, 1, 1], dtype=dtype)
    with backpack(extension()), pytest.raises(MixedSamplesError, match="couples"):
        extend(Attached())(model(torch.rand(4, 2, dtype=dtype)), factors).backward()
    assert results(model) == {}


class WritesOnPrediction(nn.Module):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return out.sub_(target).pow(4).sum()


@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.KFLR, extensions.DiagHessian])
def test_losses_that_write_on_the_prediction(extension: type) -> None:
    model, lossfunc, x, _ = make(WritesOnPrediction())
    with backpack(extension()), pytest.raises(UnsupportedError, match="WritesOnPrediction.*in-place operation"):
        lossfunc(model(x), torch.zeros(N, C, dtype=torch.float64)).backward()
    assert results(model) == {}


class Ends(nn.Module):
    """Ends with a function of a parameter, which is no module's."""

    def __init__(self, end: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.matrix, self.kernel = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 1, 3))
        self.cube, self.end = nn.Parameter(torch.randn(2, 4, 4)), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, self.layer(x).tanh())


def slope(net: Ends, h: Tensor) -> Tensor:  # noqa: D103
    point = h.detach().requires_grad_()
    return torch.autograd.grad((point @ net.matrix).tanh().sum(), point, create_graph=True)[0]


ENDS: dict[str, Callable[[Ends, Tensor], Tensor]] = {
    "matrix": lambda net, h: h @ net.matrix,
    "linear": lambda net, h: F.linear(h, net.matrix.T, net.matrix[0]),
    "convolution": lambda net, h: F.conv1d(h[:, None], net.kernel),
    "derivative": slope,
    "bilinear": lambda net, h: F.bilinear(h, h.sin(), net.cube),
    "bilinear, positions": lambda net, h: F.bilinear(h[:, None].cos(), torch.stack([h, h.sin()], 1)[:, :1], net.cube),
    "stack": lambda net, h: torch.baddbmm(net.cube[:, :1], h.expand(2, -1, -1), net.cube).transpose(0, 1),
    "token": lambda net, h: torch.cat([h, net.kernel.repeat(1, len(h), 1)[1]], 1),
}


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("name", ENDS)
def test_functional_layers_at_the_output_are_layers_under_any_loss(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters get no masked columns, at a cost of all samples for each of them."""
    torch.manual_seed(0)
    monkeypatch.setattr(Gap, "call_masked", lambda *_: pytest.fail("a layer is crossed sample by sample"))
    net, x = extend(Ends(ENDS[name]).double()), torch.randn(samples, 3, dtype=torch.float64)
    with backpack(extensions.BatchGrad()):
        net(x).square().flatten(1).logsumexp(1).mean().backward()
    for row, sample in enumerate(x):
        parameters = [p for p in net.parameters() if p.grad is not None]
        loss = net(sample[None]).square().flatten(1).logsumexp(1).sum() / samples
        for p, expected in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            torch.testing.assert_close(p.grad_batch[row], expected)


class Made(nn.Module):
    """A loss of the user's own, made of a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return self.function(prediction, target)


def smoothed(out: Tensor, y: Tensor) -> Tensor:
    log_probs = out.log_softmax(1)
    return -(0.7 * log_probs.gather(1, y.unsqueeze(1)).squeeze(1) + 0.3 * log_probs.mean(1)).mean()


# a cross-entropy by hand, shape of a prediction, the same
CROSS_ENTROPIES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "the function": (F.cross_entropy, (4,), F.cross_entropy),
    "gathered": (lambda out, y: -out.log_softmax(1).gather(1, y.unsqueeze(1)).mean(), (4,), F.cross_entropy),
    "gathered, positions": (lambda out, y: -out.log_softmax(1).gather(1, y.unsqueeze(1)).mean(), (4, 2, 3), F.cross_entropy),
    "indices": (lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].sum() / len(y), (4,), F.cross_entropy),
    "smoothed": (smoothed, (4, 3), lambda out, y: F.cross_entropy(out, y, label_smoothing=0.3)),
    "classes last": (lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), (3, 4), lambda out, y: F.cross_entropy(out.transpose(1, 2), y)),
    "classes last, gathered": (
        lambda out, y: -out.float().double().log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
        (3, 4),
        lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    ),
    "shifted": (
        lambda out, y: F.cross_entropy(out[:, :-1].reshape(-1, 4), y[:, 1:].reshape(-1)),
        (3, 4),
        lambda out, y: F.cross_entropy(out[:, :-1].transpose(1, 2), y[:, 1:]),
    ),
}


def quantities_of(lossfunc: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], samples: int, active: list) -> dict[str, Any]:
    torch.manual_seed(0)
    size = torch.Size(shape).numel()
    model = extend(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, size), nn.Unflatten(1, shape)).double())
    x = torch.rand(samples, 3).double()
    classes_last = shape[0] == 3
    y = torch.randint(4, (samples, *(shape[:-1] if classes_last else shape[1:])))
    torch.manual_seed(1)
    with backpack(*active):
        lossfunc(model(x), y).backward()
    return {f"{name} {e.savefield}": getattr(p, e.savefield) for name, p in model.named_parameters() for e in active if hasattr(p, e.savefield)}


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_cross_entropies_of_ones_own_are_known(name: str, samples: int) -> None:
    """Labels are drawn, as for the function, and not random signs; nothing is differentiated twice."""
    byhand, shape, function = CROSS_ENTROPIES[name]
    made, exact = extend(Made(byhand)), (extensions.DiagGGNExact, extensions.DiagHessian, extensions.BatchDiagGGNExact, extensions.KFLR)
    for kind in (*exact, extensions.DiagGGNMC, extensions.KFAC):
        found, expected = (quantities_of(loss, shape, samples, [kind()]) for loss in (made, function if kind in exact else byhand))
        assert found.keys() == expected.keys()
        assert len(found) == 4
        for key, value in found.items():
            for one, other in zip(*((v if isinstance(v, list) else [v]) for v in (value, expected[key])), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-7 if "float" in name or name == "classes last, gathered" else 1e-14)


@pytest.mark.parametrize("name", ["the function", "classes last", "shifted"])
def test_modules_alone_are_read_with_a_cross_entropy_of_ones_own(name: str) -> None:
    """A flow that reads no functions takes it for a loss of one's own, as before."""
    byhand, shape, function = CROSS_ENTROPIES[name]
    made = extend(Made(byhand))
    found = quantities_of(made, shape, 3, [extensions.KFRA(), extensions.DiagGGNExact()])
    expected = quantities_of(function, shape, 3, [extensions.DiagGGNExact()])
    assert sum("kfra" in key for key in found) == 4
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


OF_LOG_PROBABILITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "function": F.nll_loss,
    "gathered": lambda out, y: -out.gather(1, y[:, None]).mean(),
    "one-hot": lambda out, y: -(out * F.one_hot(y, 4)).sum(1).mean(),
    "divergence": lambda out, y: F.kl_div(out, (0.8 * F.one_hot(y, 4) + 0.05).to(out), reduction="batchmean"),
}


@pytest.mark.parametrize("name", OF_LOG_PROBABILITIES)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("extension", [extensions.DiagGGNExact, extensions.KFLR, extensions.DiagGGNMC, extensions.DiagHessian])
def test_a_loss_of_ones_own_of_log_probabilities(extension: type, inside: bool, name: str) -> None:
    """It has no curvature itself: quantities start at the softmax, as for the function."""

    def quantities(lossfunc: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model = extend(nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(1) if inside else nn.Identity()).double())
        out = model(torch.rand(5, 3).double())
        with backpack(extension()):
            lossfunc(out if inside else out.log_softmax(1), torch.tensor([0, 1, 2, 3, 0])).backward()
        return tree_leaves([getattr(p, extension().savefield) for p in model.parameters()])

    function = OF_LOG_PROBABILITIES[name]
    made = extend(Made(function))
    for found, expected in zip(quantities(made), quantities(function), strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected)


def test_modules_alone_do_not_read_a_loss_of_log_probabilities() -> None:
    model, made = extend(nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(1))), extend(Made(F.nll_loss))
    with pytest.raises(NotImplementedError, match="linear"), backpack(extensions.KFRA()):
        made(model(torch.rand(5, 3)), torch.tensor([0, 1, 2, 3, 0])).backward()
    assert not any(results(model).values())


@pytest.mark.parametrize("function", [lambda out, y: (out - y[:, None]).abs().mean(), lambda out, y: out.relu().sum() + y.sum()])
def test_bent_losses_of_log_probabilities_are_asked_about(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, made = extend(nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(1))), extend(Made(function))
    with pytest.raises(UnsupportedError, match="piecewise linear"), backpack(extensions.DiagGGNExact()):
        made(model(torch.rand(5, 3)), torch.ones(5)).backward()
    assert not any(results(model).values())


@pytest.mark.parametrize("trains", [False, True])
def test_losses_with_parameters_of_their_own(trains: bool) -> None:
    """They are refused as what they could be, models that return their loss; what is advised works, and is exact for the model."""

    class OfStudent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.freedom = nn.Parameter(torch.tensor(3.0).double(), requires_grad=trains)

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return ((self.freedom + 1) / 2 * torch.log1p((out - target).square() / self.freedom)).sum(1).mean()

    torch.manual_seed(0)
    model, lossfunc, x, y = extend(nn.Linear(3, 2).double()), extend(OfStudent()), torch.rand(5, 3).double(), torch.rand(5, 2).double()
    exclude = [lossfunc.freedom]
    with (
        backpack(extensions.DiagHessian(exclude=exclude)),
        pytest.raises(LossNotExtendedError, match=r"parameters of its own.*backpack.register\(OfStudent"),
    ):
        lossfunc(model(x), y).backward()
    register(OfStudent, GenericLossDerivatives)
    lossfunc = extend(OfStudent())
    exclude = [lossfunc.freedom]
    with backpack(extensions.DiagHessian(exclude=exclude), extensions.BatchDiagHessian(exclude=exclude)):
        lossfunc(model(x), y).backward()
    assert not hasattr(lossfunc.freedom, "diag_h")
    assert (lossfunc.freedom.grad is not None) == trains
    weight = model.weight.detach()
    hessian = torch.autograd.functional.hessian(lambda w: lossfunc(F.linear(x, w, model.bias.detach()), y), weight)
    torch.testing.assert_close(model.weight.diag_h, hessian.reshape(6, 6).diagonal().reshape(2, 3))
    torch.testing.assert_close(model.weight.diag_h_batch.sum(0), model.weight.diag_h)
    if trains:
        with backpack(extensions.DiagHessian()), pytest.raises(LossNotExtendedError, match="freedom"):
            lossfunc(model(x), y).backward()


OF_ENTRIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square roots": lambda o, y: (1 + (o - y).square()).sqrt().sum(),
    "cases": lambda o, y: torch.where((o - y).abs() < 1, (o - y).square(), 2 * (o - y).abs() - 1).mean(),
    "targets of several people": lambda o, y: (o - torch.stack([y, 2 * y, y - 1])).exp().mean(),
    "weights of classes": lambda o, y: ((o - y) ** 4 @ torch.arange(1.0, C + 1).to(o)).sum(),
    "a known one and another": lambda o, y: F.mse_loss(o, y) + (o.exp() - y * o).sum(),
    "a part": lambda o, y: (o - y)[:, :1].cosh().sum(),
    "a single output": lambda o, y: (o[:, 0] + y.T).exp().mean(),
    "in another order": lambda o, y: ((o.T.unsqueeze(0) - y.T) ** 4).mean() + o.cosh().sum(),
    "in place": lambda o, y: (o - y).mul_(2).exp().sum(),
    "weights of the prediction": lambda o, y: (o.exp() * o.detach().softmax(1)).sum(),
}
OF_SAMPLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distances": lambda o, y: (1 + (o - y).square().sum(1)).sqrt().sum(),
    "a root of a known one": lambda o, y: (1 + F.mse_loss(o, y, reduction="none").mean(1)).sqrt().sum(),
    "sums": lambda o, y: (o.cumsum(1) - y).square().mean(),
    "two parts": lambda o, y: (o[:, :1].exp() * (1 + o[:, 1:] ** 2)).sum() + 9 * o.square().sum(),
    "norms of parts": lambda o, y: (1 + o[:, 1:].norm(dim=1)).square().sum(),
    "neighbours": lambda o, y: (o * o.roll(1, 1) + 3 * o.square()).sum(),
    "a part that is multiplied": lambda o, y: multiplied(o - y).square().sum(),
}


def multiplied(o: Tensor) -> Tensor:
    o[:, :1].mul_(1 + o[:, 1:2].detach()).add_(o[:, 1:2])
    return o


class OfFunction(nn.Module):
    """A loss that is a function of prediction and target."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return self.function(prediction, target)


@pytest.mark.parametrize("name", [*OF_ENTRIES, *OF_SAMPLES])
@pytest.mark.parametrize("samples", [1, N, C])
def test_losses_of_single_entries_are_read_off_the_graph(samples: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product tells all second derivatives of such a loss; otherwise some more have to prove that samples and entries do not meet."""
    made: list[Tensor] = []
    product = loss_hessian.hessian_product

    def counted(module: nn.Module) -> Callable[[Tensor], Tensor]:
        multiply = product(module)
        return lambda vector: made.append(vector) or multiply(vector)

    monkeypatch.setattr(loss_hessian, "hessian_product", counted)
    model, lossfunc, _, _ = make(OfFunction({**OF_ENTRIES, **OF_SAMPLES}[name]))
    x, y = torch.randn(samples, 3, dtype=torch.float64), torch.rand(samples, C, dtype=torch.float64)
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian()):
        lossfunc(model(x), y).backward()
    assert_diag_ggn(model, expected_diag_ggn(model, x, lambda output: lossfunc.function(output, y)))
    gradients = torch.autograd.grad(lossfunc.function(model(x), y), list(model.parameters()), create_graph=True)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        rows = [torch.autograd.grad(entry, parameter, retain_graph=True)[0].flatten() for entry in gradient.flatten()]
        torch.testing.assert_close(parameter.diag_h, torch.stack(rows).diagonal().reshape(parameter.shape))
    assert (len(made) == 2) == (name in OF_ENTRIES)  # one for each quantity


@pytest.mark.parametrize(
    "function",
    [
        lambda o, y: F.mse_loss(o, y).sqrt(),
        lambda o, y: F.mse_loss(o, y) ** 2,
        lambda o, y: (o * o.flip(0)).sum() + o.square().sum(),
        lambda o, y: (o.exp() * o.sum()).sum(),
        lambda o, y: (o.square() * o.T.reshape(o.shape)).sum(),
        lambda o, y: (o[:2] * o[1:]).square().sum(),
        lambda o, y: (o.unsqueeze(1) - o.detach()).exp().sum() + (o.unsqueeze(1) * o).square().sum(),
    ],
    ids=["root", "square", "other samples", "sum", "another order", "neighbours", "pairs"],
)
def test_losses_of_entries_that_meet_are_refused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, lossfunc, x, _ = make(OfFunction(function))
    with backpack(extensions.DiagGGNExact()), pytest.raises(MixedSamplesError, match="couples entries with different indices on axis 0"):
        lossfunc(model(x), torch.rand(N, C, dtype=torch.float64)).backward()
