"""Roots of cross-entropies with one column less than classes: who carries them, that they are as good as the usual ones, and who gets these."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, getcontext
from math import inf
from typing import Any, ClassVar

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import QUANTITIES, close, collect, run
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, Linear, Module, Sequential
from torch.nn.functional import cross_entropy

from backpack import backpack, check_rule, extend, extensions, register
from backpack.core.derivatives.check import RuleError
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.linear_maps import LinearMapDerivatives
from backpack.core.derivatives.registry import derivatives_for
from backpack.explaining import explain_loss
from backpack.extensions import flows
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.rules import stack
from backpack.extensions.secondorder import hbp
from backpack.utils.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("error", "ignore:Using backward:UserWarning")  # of torch, about create_graph
LONG = flows.LONG


# --- how many are carried ---------------------------------------------------------------------------------------------------------------------


class Seen(Module):
    """The identity, with a rule that counts columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


@register(Seen)
class SeenDerivatives(LinearMapDerivatives):
    columns: ClassVar[list[int]] = []

    def _jac_t_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: Any = None) -> Tensor:
        self.columns.append(len(mat))
        return mat


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of columns of each product with the Jacobian of ``Seen``."""
    monkeypatch.setattr(SeenDerivatives, "columns", [])
    return SeenDerivatives.columns


def net(classes: int = 5, width: int = 6, activation: Callable[[], Module] = nn.ReLU) -> Sequential:
    return Sequential(Linear(4, width), activation(), Seen(), Linear(width, classes)).double()


def step(*active: BackpropExtension, classes: int = 5, width: int = 6, samples: int = 3, loss: Module | None = None, **options: Any) -> Sequential:
    """Run one backward pass of a net."""
    torch.manual_seed(0)
    model, lossfunc = extend(net(classes, width)), extend(CrossEntropyLoss() if loss is None else loss)
    with backpack(*active, **options):
        lossfunc(model(torch.randn(samples, 4).double()), torch.randint(classes, (samples,))).backward()
    return model


class Largest(extensions.DiagGGNExact):
    """Something else, of one's own."""

    savefield = "largest"

    def finish(self, state: dict, parameter: nn.Parameter) -> Tensor:
        return stack(state).abs().amax((0, 1))


class AnotherRule(extensions.KFLR):
    """Another linear part."""

    def rule_at(self, samples: int) -> Any:
        return super().rule_at(samples)


class Fourth(Largest):
    """Something of one's own for which any root will do."""

    any_root = True

    def finish(self, state: dict, parameter: nn.Parameter) -> Tensor:
        return stack(state).square().sum(0).square().sum(0)


class Reads(ModuleExtension):
    def weight(self, extension: Any, module: Module, g_inp: Any, g_out: Any, columns: Tensor) -> Tensor:
        return columns


def with_module_extension() -> BackpropExtension:
    extension = extensions.DiagGGNExact()
    extension.set_module_extension(Linear, Reads(params=["weight"]))
    return extension


def mean_inputs() -> BackpropExtension:
    options = hbp.LossHessianStrategy.EXACT, hbp.BackpropStrategy.SQRT, hbp.ExpectationApproximation.CHEN
    return hbp.HBP(hbp.Curvature.GGN, *options)


ANY = {
    "DiagGGNExact": extensions.DiagGGNExact,
    "BatchDiagGGNExact": extensions.BatchDiagGGNExact,
    "KFLR": extensions.KFLR,
    "HBP": mean_inputs,
    "DiagHessian": extensions.DiagHessian,
    "BatchDiagHessian": extensions.BatchDiagHessian,
    "of one's own": Fourth,
    "chosen samples": lambda: extensions.DiagGGNExact(subsampling=[2, 0]),
    "excluded": lambda: extensions.DiagHessian(exclude=["0.bias"]),
}
USUAL = {
    "SqrtGGNExact": extensions.SqrtGGNExact,
    "finish of one's own": Largest,
    "rule of one's own": AnotherRule,
    "module extension": with_module_extension,
}


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("name", ANY)
def test_one_column_less(name: str, classes: int, seen: list[int]) -> None:
    step(ANY[name](), classes=classes)
    assert seen == [classes - 1]


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_ones_for_those_who_read_them(name: str, seen: list[int]) -> None:
    step(USUAL[name]())
    assert seen == [5]


@pytest.mark.parametrize("name", USUAL)
def test_one_propagation_for_all(name: str, seen: list[int]) -> None:
    """Whoever comes first."""
    others = [extensions.BatchDiagGGNExact(), *([] if name == "rule of one's own" else [extensions.KFLR()])]
    step(USUAL[name](), *others)
    step(*others, USUAL[name]())
    step(*others)
    assert seen == [5, 5, 4]


def test_only_where_they_are_long_enough(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> None:
    monkeypatch.setattr(flows, "LONG", LONG)
    step(extensions.DiagGGNExact())
    step(extensions.DiagGGNExact(), width=LONG // 16, samples=8)
    assert seen == [5, 4]


def test_drawn_ones_are_counted_by_draws(seen: list[int]) -> None:
    step(extensions.KFAC(mc_samples=7), extensions.DiagGGNMC(mc_samples=7))
    assert seen == [7]


class Outer(Module):
    """Multiplies entries of a sample with two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.seen, self.last = Linear(3, 4), Seen(), Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.seen(self.first(x))
        return self.last((h[:, :, None] * h[:, None, :2]).flatten(1))


def test_products_with_what_is_broadcast(seen: list[int]) -> None:
    """Two columns for each entry of the smaller factor are born, not for each product."""
    torch.manual_seed(0)
    model, x, y = extend(Outer()).double(), torch.randn(3, 3, dtype=torch.float64), torch.tensor([0, 4, 1])
    with backpack(extensions.DiagHessian()):
        extend(CrossEntropyLoss())(model(x), y).backward()
    assert seen == [4 + 2 * 2]  # those of the loss, one less than classes
    plain = Outer().double()
    plain.load_state_dict(model.state_dict())
    oracle = Oracle(Problem(plain, x, [Term(CrossEntropyLoss(), y)]))
    for name, parameter in model.named_parameters():
        close(parameter.diag_h, oracle.diag_h_batch[name].sum(0))


def test_published_columns() -> None:
    """Those of the usual root: for a bias of the last layer, the root itself."""
    model = step(extensions.DiagGGNExact(), extensions.SqrtGGNExact(), samples=3)
    torch.manual_seed(0)
    model_again = net()
    p = model_again(torch.randn(3, 4).double()).softmax(1).detach()
    expected = (p.sqrt().T.unsqueeze(2) * (torch.eye(5).double().unsqueeze(1) - p)) / 3**0.5
    close(model[3].bias.sqrt_ggn_exact, expected)


def test_losses_without_a_module(seen: list[int]) -> None:
    torch.manual_seed(0)
    model, x, y = extend(net(activation=nn.Tanh)), torch.randn(3, 4).double(), torch.randint(5, (3,))
    for function in (cross_entropy, lambda out, y: nn.functional.nll_loss(out.log_softmax(1), y)):
        with backpack(extensions.DiagGGNExact()):
            function(model(x), y).backward()
    assert seen == [4, 4]


def test_other_losses_have_the_usual_ones(seen: list[int]) -> None:
    torch.manual_seed(0)
    model, lossfunc, x = extend(net()), extend(nn.MSELoss()), torch.randn(3, 4).double()
    with backpack(extensions.DiagGGNExact()):
        lossfunc(model(x), torch.randn(3, 5).double()).backward()
    assert seen == [5]


# --- what is told of them ---------------------------------------------------------------------------------------------------------------------


def total(extension: BackpropExtension) -> int:
    """Bytes that all columns take, as the refusal of too narrow a bound tells: of a pass whose columns cannot be cut."""
    torch.manual_seed(0)
    model, lossfunc = extend(net()), extend(CrossEntropyLoss())
    with backpack(extension, memory=1), pytest.raises(UnsupportedError, match="bytes at once") as refusal:
        lossfunc(model(torch.randn(3, 4).double()), torch.randint(5, (3,))).backward(create_graph=True)
    return int(str(refusal.value).split("takes about ")[1].split()[0])


def test_memory_is_counted_with_what_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    few = total(extensions.DiagGGNExact())
    monkeypatch.setattr(flows, "LONG", inf)
    assert 5 * few == 4 * total(extensions.DiagGGNExact())


def test_cost_is_counted_with_what_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, lossfunc = extend(net(2, width=2000)), extend(CrossEntropyLoss())
    loss = lossfunc(model(torch.randn(64, 4).double()), torch.randint(2, (64,)))
    few = explain_loss(model, loss, [extensions.DiagGGNExact()]).cost
    monkeypatch.setattr(flows, "LONG", inf)
    usual = explain_loss(model, loss, [extensions.DiagGGNExact()]).cost
    assert 1 < few < usual
    assert 0.45 < (few - 1) / (usual - 1) < 0.9  # hooks cost the same


# --- as good as the usual ones ----------------------------------------------------------------------------------------------------------------


def truth(logits: list[float]) -> list[list[Decimal]]:
    """Compute ``diag(p) - p p^T`` with fifty digits."""
    getcontext().prec = 50
    parts = [(Decimal(value) - Decimal(max(logits))).exp() for value in logits]
    p = [part / sum(parts) for part in parts]
    return [[a * sum(p[:i] + p[i + 1 :]) if i == j else -a * b for j, b in enumerate(p)] for i, a in enumerate(p)]


def errors(root: Tensor, logits: Tensor) -> list[float]:
    """Errors of all entries of ``S^T S`` relative to these, where they are no smaller than what the type can say.

    Args:
        root: ``[V, N, C]``.
        logits: ``[N, C]``.
    """
    least, found = Decimal(torch.finfo(logits.dtype).tiny), []
    for n, row in enumerate(logits.tolist()):
        columns = [[Decimal(value) for value in column] for column in root[:, n].tolist()]
        for i, line in enumerate(truth(row)):
            said = [sum(column[i] * column[j] for column in columns) for j in range(len(row))]
            found += [float(abs(value - true) / abs(true)) for value, true in zip(said, line, strict=True) if abs(true) > least]
            assert all(abs(value - true) <= least for value, true in zip(said, line, strict=True) if abs(true) <= least)
    return found


def loss_at(logits: Tensor, loss: Module | None = None) -> Module:
    loss = CrossEntropyLoss(reduction="sum") if loss is None else loss
    loss.input0, loss.input1 = logits, torch.zeros(len(logits), *logits.shape[2:], dtype=torch.int64)
    loss.output = loss(logits, loss.input1)
    return loss


@pytest.mark.parametrize("classes", [2, 3, 6, 20])
@pytest.mark.parametrize("scale", [1, 10, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturation(dtype: torch.dtype, scale: int, classes: int) -> None:
    """Every entry, relative to itself, however unlikely classes are."""
    logits = (scale * torch.randn(8, classes)).to(dtype)
    rule, loss = CrossEntropyLossDerivatives(), loss_at(logits)
    few, usual = rule._least_sqrt_hessian(loss, None, signed=False)[0], rule._sqrt_hessian(loss, None, None)
    assert few.shape == (classes - 1, 8, classes)
    assert max(errors(few, logits), default=0.0) <= 1.5 * max(errors(usual, logits), default=0.0) + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1e-9, 5.0, 16.0, 17.0, 20.0, 36.0, 40.0, 80.0])
def test_nearly_certain(dtype: torch.dtype, gap: float) -> None:
    """One class takes almost all: in all places, and with all others in front of it."""
    for place in range(4):
        logits = torch.tensor([[-gap, -gap - 3, -2 * gap, -gap]], dtype=dtype)
        logits[0, place] = 0
        root = CrossEntropyLossDerivatives()._least_sqrt_hessian(loss_at(logits), None, signed=False)[0]
        assert max(errors(root, logits)) < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_impossible_classes(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -inf, 1.0], [-inf, -inf, 2.0], [1.0, -inf, -inf], [60000.0, 0.0, -60000.0]], dtype=dtype)
    rule, loss = CrossEntropyLossDerivatives(), loss_at(logits)
    few, usual = rule._least_sqrt_hessian(loss, None, signed=False)[0], rule._sqrt_hessian(loss, None, None)
    assert few.dtype == dtype
    assert few.isfinite().all()
    gram = [torch.einsum("vni,vnj->nij", root.double(), root.double()) for root in (few, usual)]
    torch.testing.assert_close(*gram, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert not few[:, 1:].any()


def test_not_finite() -> None:
    """As with the usual root, nothing is finite in a sample of which something is not a number, and all is in others."""
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 2.0, 1.0], [inf, 0.0, 0.0]])
    root = CrossEntropyLossDerivatives()._least_sqrt_hessian(loss_at(logits), None, signed=False)[0]
    squares = root.square().sum(0)
    assert squares.isfinite().all(1).tolist() == [False, True, False]
    assert not squares[[0, 2]].isfinite().any()


@pytest.mark.parametrize("name", [name for name in ANY if name != "of one's own"])
def test_a_single_class_has_no_curvature(name: str, seen: list[int]) -> None:
    model = step(ANY[name](), classes=1)
    assert seen == [1]
    field = ANY[name]().savefield
    found = {n: getattr(p, field) for n, p in model.named_parameters() if hasattr(p, field)}
    assert len(found) == 3 + (name != "excluded")
    for value in found.values():
        output = value[0] if isinstance(value, list) else value
        assert output.numel()
        assert not output.any()


class Positions(Module):
    """A prediction at each position, by functional operations and a layer that is used twice."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Conv1d(2, 3, 3, padding=1), nn.Conv1d(3, 3, 1), nn.Conv1d(3, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(torch.tanh(self.twice(self.first(x)))) * 3)


NETS = {
    "sigmoid": (lambda classes: Sequential(Linear(4, 3), nn.Sigmoid(), Linear(3, 3), nn.ReLU(), Linear(3, classes)), (4,), ()),
    "convolution": (lambda classes: Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), Linear(8, classes)), (1, 3, 3), ()),
    "positions": (Positions, (2, 4), (4,)),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("classes", [1, 2, 3])
@pytest.mark.parametrize("net", NETS)
def test_few_classes(net: str, classes: int, batch: int) -> None:
    """All that takes any root, against the oracle; with ignored targets, weights and smoothing."""
    make, given, positions = NETS[net]

    def problem() -> Problem:
        torch.manual_seed(0)
        loss = CrossEntropyLoss(weight=torch.rand(classes).double(), ignore_index=0 if classes == 3 else -100, label_smoothing=0.1)
        target = torch.randint(classes, (batch, *positions)).index_fill_(0, torch.tensor([batch - 1]), classes - 1)
        return Problem(make(classes).double(), torch.randn(batch, *given).double(), [Term(loss, target)])

    oracle = Oracle(problem())
    for name in ("DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "BatchDiagHessian", "KFLR", "HBP, square root"):
        quantity, one = QUANTITIES[name], problem()
        run(one, quantity.make())
        quantity.check(oracle, collect(one, quantity.field))


@pytest.mark.parametrize("options", [{}, {"memory": 1}, {"memory": 1000}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_with_and_without_the_usual_root(classes: int, scale: float, options: dict) -> None:
    """Nets whose outputs saturate, and all that reads columns; with signs, the root is that of columns with weights of both signs, too."""

    def results(beside: list[BackpropExtension]) -> list[Tensor]:
        torch.manual_seed(0)
        model, x, y = extend(net(classes)), torch.randn(4, 4).double(), torch.randint(classes, (4,))
        lossfunc = extend(CrossEntropyLoss(reduction="none"))
        weights = torch.tensor([0.3, 0.0, 2.0, 1.0]).double()
        with backpack(extensions.BatchDiagGGNExact(), extensions.KFLR(), *beside, **options):
            (lossfunc(scale * model(x), y) * weights).sum().backward()
        return [value for p in model.parameters() for value in (p.diag_ggn_exact_batch, *p.kflr)]

    for few, usual in zip(results([]), results([extensions.SqrtGGNExact()]), strict=True):
        assert few.isfinite().all()
        close(few, usual, 1e-12)


@pytest.mark.parametrize("scale", [1.0, 40.0, 2000.0])
def test_results_can_be_differentiated(scale: float) -> None:
    """Twice, and where probabilities are zero; the usual root, which is carried beside that of ``SqrtGGNExact``, has the same derivatives."""

    def derivatives(beside: list[BackpropExtension]) -> list[Tensor]:
        torch.manual_seed(0)
        model, lossfunc = extend(net(activation=nn.Tanh)), extend(CrossEntropyLoss())
        parameters = list(model.parameters())
        with backpack(extensions.DiagGGNExact(), extensions.KFLR(), *beside):
            logits = scale * model(torch.randn(3, 4).double())
            lossfunc(logits, torch.tensor([0, 1, 4])).backward(create_graph=True)
        total = sum((value * torch.rand_like(value)).sum() for p in parameters for value in (p.diag_ggn_exact, *p.kflr))
        first = torch.autograd.grad(total, parameters, create_graph=True)
        second = torch.autograd.grad(sum((part * torch.rand_like(part)).sum() for part in first), parameters)
        for p in parameters:
            p.grad = None
        return [*(part.detach() for part in first), *second]

    for few, usual in zip(derivatives([]), derivatives([extensions.SqrtGGNExact()]), strict=True):
        assert few.isfinite().all()
        close(few, usual, 1e-10)


# --- rules of users ---------------------------------------------------------------------------------------------------------------------------


class Doubled(CrossEntropyLoss):
    """Twice the cross-entropy."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


class DoubledDerivatives(CrossEntropyLossDerivatives):
    """Replaces the usual root alone."""

    def _sqrt_hessian(self, *args: Any, **options: Any) -> Tensor:
        return 2**0.5 * super()._sqrt_hessian(*args, **options)


class DoubledWithSigns(CrossEntropyLossDerivatives):
    """Replaces the root with signs alone."""

    def _signed_sqrt_hessian(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        root, signs = super()._signed_sqrt_hessian(*args)
        return 2**0.5 * root, signs


@pytest.mark.parametrize(
    ("rule", "name", "field"), [(DoubledDerivatives, "DiagGGNExact", "diag_ggn_exact"), (DoubledWithSigns, "DiagHessian", "diag_h")]
)
def test_a_rule_that_replaces_the_usual_root_is_heard(rule: type, name: str, field: str, seen: list[int]) -> None:
    class Loss(Doubled):
        pass

    register(Loss, rule)
    assert isinstance(derivatives_for(Loss()), rule)
    model, plain = step(getattr(extensions, name)(), loss=Loss()), step(getattr(extensions, name)())
    assert seen == [5, 4]
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        close(getattr(p, field), 2 * getattr(other, field))


class Swapped(CrossEntropyLossDerivatives):
    """Wrong with few columns alone."""

    def _least_sqrt_hessian(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        root, signs = super()._least_sqrt_hessian(*args, **options)
        return root.flip(2), signs


def test_check_rule_looks_at_few_columns() -> None:
    class Loss(CrossEntropyLoss):
        pass

    arguments = torch.randn(3, 4), torch.tensor([0, 3, 1])
    assert "sqrt_hessian with few columns" in check_rule(Loss(), *arguments)
    register(Loss, Swapped)
    with pytest.raises(RuleError, match="sqrt_hessian with few columns .* is wrong"):
        check_rule(Loss(), *arguments)


def test_columns_of_module_extensions_are_the_usual_ones() -> None:
    """They are published."""
    usual, read = step(extensions.SqrtGGNExact()), step(with_module_extension())
    columns = read[3].weight.diag_ggn_exact
    close(columns, usual[3].bias.sqrt_ggn_exact)
