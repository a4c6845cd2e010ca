"""``verify``: correct quantities agree, planted mistakes of all kinds are found, and nothing changes on the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from cases import CASES
from oracle import Problem
from table import TAGS
from test_extensions import QUANTITIES, Expect
from torch import Tensor, nn, rand, randint, randn
from torch.nn import Conv2d, CrossEntropyLoss, Embedding, Flatten, Linear, Module, MSELoss, Parameter, Sequential, Sigmoid, Tanh
from torch.nn import functional as F

from backpack import backpack as context
from backpack import explain, extend, extensions, register, results, verify
from backpack.core.derivatives import crossentropyloss
from backpack.core.derivatives.activations import SigmoidDerivatives
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.utils.errors import ArgumentError
from backpack.verification import Report, Row, Verdict, WrongQuantityError
from backpack.verification.copies import Copies

AGREES, WRONG, FAILED, REFUSED, NOT_COMPARED = Verdict.AGREES, Verdict.WRONG, Verdict.FAILED, Verdict.REFUSED, Verdict.NOT_COMPARED
FIRST = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
ALL = [getattr(extensions, name) for name in extensions.__all__ if name != "HBP"]


def everything() -> list[BackpropExtension]:
    return [make() for make in ALL]


def verdicts(report: Report) -> dict[tuple[str, str], Verdict]:
    return {(row.parameter, row.quantity): row.verdict for row in report}


def nothing_wrong(report: Report) -> None:
    assert report.ok and report
    assert [row for row in report if row.verdict in (WRONG, FAILED)] == []


def net() -> tuple[Module, Module, Tensor, Tensor]:
    """All extensions are defined on it."""
    model = Sequential(Conv2d(2, 4, 3), Sigmoid(), Flatten(), Linear(16, 5), Tanh(), Linear(5, 3))
    return model, CrossEntropyLoss(), randn(3, 2, 4, 4), randint(3, (3,))


class Whole(Module):
    """A problem's model, with what makes the input of the loss."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.model, self.output = problem.model, problem.output

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.model, x)


# --- what is right is not accused -------------------------------------------------------------------------------------------------------------


def plain(name: str) -> bool:
    """The loss is one module, not scaled, that returns one number."""
    terms = CASES[name].build(1).terms
    return (
        len(terms) == 1
        and terms[0].function is None
        and isinstance(terms[0].scale, float)
        and terms[0].scale == 1.0
        and getattr(terms[0].module, "reduction", "mean") != "none"
    )


PLAIN = [name for name in CASES if plain(name)]
OF_EACH_TAG = [name for tag in sorted(TAGS) for name in [name for name in PLAIN if tag in CASES[name].tags][:3]]
SOME = dict.fromkeys(["logreg", "frozen middle weight", "dropout, training", "Hardsigmoid", *OF_EACH_TAG, *PLAIN[::9]])


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", SOME)
def test_agrees_where_the_library_is_right(case: str, batch: int) -> None:
    """No accusation; first order is always compared; what is called refused, or agrees, is what the table of cases says."""
    problem, tags = CASES[case].build(batch), CASES[case].tags
    (term,) = problem.terms
    target = term.target if isinstance(term.target, tuple) else (term.target,)
    report = verify(Whole(problem), term.module, (problem.x,), target, everything(), entries=4)
    nothing_wrong(report)
    for row in report:
        expected = QUANTITIES["PCHMP, clip" if row.quantity == "PCHMP" else row.quantity].expect(tags)
        assert row.verdict is not REFUSED or expected is not Expect.EXACT
        assert row.verdict is not AGREES or expected is not Expect.REFUSED
        assert row.verdict is not NOT_COMPARED or (row.reason and (row.quantity not in FIRST or row.reason == "takes no part in the output"))


def test_everything_is_compared() -> None:
    """Where all is simple, plain autograd has something to say about all but two quantities; the averages are compared for one sample."""
    model, lossfunc, X, y = net()
    report = verify(model, lossfunc, X, y, everything(), entries=5)
    nothing_wrong(report)
    assert len(report) == len(ALL) * 6
    assert {row.quantity for row in report if row.verdict is not AGREES} == {"KFRA", "PCHMP"}
    assert all(row.error < 1e-12 and row.compared > 0 for row in report if row.verdict is AGREES)
    counts = {row.quantity: row.compared for row in report if row.parameter == "3.weight"}
    assert [counts[name] for name in ("DiagGGNExact", "BatchGrad", "BatchL2Grad", "SqrtGGNMC")] == [5, 10, 2, 50]
    one = verify(model, lossfunc, X[:1], y[:1], extensions.KFRA())
    assert [row.verdict for row in one] == [AGREES] * 6


@pytest.mark.parametrize(
    "lossfunc",
    [
        CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]), label_smoothing=0.1, ignore_index=1),
        CrossEntropyLoss(reduction="sum"),
        MSELoss(),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 1.0])),
    ],
)
@pytest.mark.parametrize("subsampling", [None, [2, 0, 2]])
def test_sampled_and_subsampled(lossfunc: Module, subsampling: list[int] | None) -> None:
    """Sampled quantities are compared for the labels that are drawn; what is subsampled, for these samples."""
    target = randint(3, (4,)) if isinstance(lossfunc, CrossEntropyLoss) else randint(2, (4, 3)).float()
    names = [name for name in QUANTITIES if name.startswith(("Batch", "Diag", "Sqrt", "Variance", "SumGrad")) and name != "BatchL2Grad"]
    chosen = [getattr(extensions, name)(subsampling=subsampling) for name in names if subsampling is None or "MC" not in name]
    chosen += [extensions.DiagGGNMC(5, subsampling), extensions.BatchDiagGGNMC(2), extensions.SqrtGGNMC(1), extensions.KFAC(mc_samples=3)]
    report = verify(Sequential(Linear(3, 4), Tanh(), nn.Dropout(0.4), Linear(4, 3)), lossfunc, randn(4, 3), target, chosen)
    assert {row.verdict for row in report} == {AGREES}


def test_no_samples() -> None:
    """A subsampling may be empty: sums over samples are zero, the others have no numbers."""
    names = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "DiagGGNMC", "SqrtGGNMC", "DiagHessian", "BatchDiagHessian"]
    report = verify(Linear(3, 2), CrossEntropyLoss(), randn(4, 3), randint(2, (4,)), [getattr(extensions, name)(subsampling=[]) for name in names])
    sums = {"SumGradSquared", "DiagGGNExact", "DiagGGNMC", "DiagHessian"}
    assert {row.quantity: row.reason for row in report} == {
        name: "all compared numbers are zero" if name in sums else "there are no numbers" for name in names if name != "Variance"
    } | {"Variance": "plain autograd gives numbers that are not finite"}
    assert {row.quantity for row in report if row.verdict is AGREES} == sums


def test_sampled_quantity_of_a_loss_without_known_distribution() -> None:
    report = verify(Linear(3, 2), nn.SmoothL1Loss(), randn(3, 3), randn(3, 2), [extensions.DiagGGNMC(), extensions.DiagGGNExact()])
    assert verdicts(report)["weight", "DiagGGNMC"] is NOT_COMPARED
    assert verdicts(report)["weight", "DiagGGNExact"] is AGREES
    assert "not for SmoothL1Loss" in next(row.reason for row in report if row.quantity == "DiagGGNMC")


class Matrix(Module):
    """Multiplies with a matrix from the right, as some libraries do."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = Parameter(randn(width, outputs)), Parameter(randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


LIKELIHOODS = {
    "NLLLoss": (lambda: [nn.LogSoftmax(1)], nn.NLLLoss(weight=torch.tensor([0.5, 2.0, 1.0])), lambda: randint(3, (5,))),
    "function": (lambda: [nn.LogSoftmax(1)], F.nll_loss, lambda: randint(3, (5,))),
    "KLDivLoss": (lambda: [nn.LogSoftmax(1)], nn.KLDivLoss(reduction="sum"), lambda: rand(5, 3).softmax(1)),
    "steps": (lambda: [nn.Unflatten(1, (3, 1)), nn.LogSoftmax(1)], nn.NLLLoss(), lambda: randint(3, (5, 1))),
}


@pytest.mark.parametrize("case", LIKELIHOODS)
def test_losses_of_log_probabilities_begin_with_the_softmax(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after, lossfunc, target = LIKELIHOODS[case]
    model, X, y = Sequential(Linear(4, 3), Tanh(), Linear(3, 3), *after()), randn(5, 4), target()
    chosen = [extensions.DiagGGNExact(), extensions.KFLR(), extensions.DiagHessian(), extensions.DiagGGNMC(), extensions.BatchGrad()]
    report = verify(model, lossfunc, X, y, chosen)
    nothing_wrong(report)
    drawn = type(lossfunc) is nn.NLLLoss
    assert all((row.verdict is AGREES) is (drawn or row.quantity != "DiagGGNMC") for row in report)
    assert not any(row.reason == "all compared numbers are zero" for row in report)
    monkeypatch.setattr("backpack.core.walk.completes_softmax", lambda *_: False)  # as if the loss began alone
    assert verify(model, lossfunc, X, y, chosen[:1]).ok is (case == "function")


@pytest.mark.parametrize("options", [{"mode": "sum"}, {"padding_idx": 1}, {"max_norm": 0.5}], ids=str)
def test_factors_of_bags(options: dict[str, object]) -> None:
    bag = nn.EmbeddingBag(5, 3, **options).double()
    model, x, y = Sequential(bag, Tanh(), Linear(3, 2).double()), randint(5, (4, 6)), randint(2, (4,))
    report = verify(model, CrossEntropyLoss(), x, y, [extensions.KFLR(), extensions.KFAC()])
    assert [row.verdict for row in report] == 6 * [AGREES]


def test_sparse_gradients() -> None:
    chosen = [e for e in everything() if not isinstance(e, (extensions.KFRA, extensions.PCHMP))]
    model = Sequential(Embedding(6, 3, sparse=True), Flatten(), Linear(6, 2))
    assert {row.verdict for row in verify(model, CrossEntropyLoss(), randint(6, (4, 2)), randint(2, (4,)), chosen)} == {AGREES}


def test_log_probabilities_that_were_changed_are_not_compared() -> None:
    model, chosen = Sequential(Linear(4, 3), nn.LogSoftmax(1)), [extensions.DiagGGNExact(), extensions.BatchGrad(), extensions.DiagHessian()]
    report = verify(model, nn.NLLLoss(), randn(5, 4), randint(3, (5,)), chosen, output=lambda out: out / 2)
    assert [row.verdict for row in report] == 2 * [NOT_COMPARED] + 4 * [AGREES]
    assert "let them enter it as they are" in next(iter(report)).reason


class Halves(Module):
    """A softmax for each half of the outputs; the log-probabilities of both are joined, as those of several steps are."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.join = Linear(4, 6), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(*(half.log_softmax(1) for half in self.layer(x).tensor_split(2, 1)))


@pytest.mark.parametrize("join", [lambda a, b: torch.stack([a, b], 2), torch.add], ids=["stack", "add"])
@pytest.mark.parametrize("lossfunc", [nn.NLLLoss(), F.nll_loss], ids=["module", "function"])
def test_log_probabilities_of_several_softmaxes_are_not_compared(lossfunc: Callable, join: Callable[[Tensor, Tensor], Tensor]) -> None:
    y = randint(3, (5, 2) if join is not torch.add else (5,))
    report = verify(Halves(join), lossfunc, randn(5, 4), y, [extensions.DiagGGNExact(), extensions.BatchGrad(), extensions.DiagHessian()])
    assert [row.verdict for row in report] == 2 * [NOT_COMPARED] + 4 * [AGREES]


@pytest.mark.parametrize("layer", [Linear(4, 3), Sequential(Linear(4, 3), nn.LogSoftmax(1), Linear(3, 3))], ids=["layer", "softmax before a layer"])
def test_losses_of_anything_else_have_no_curvature(layer: Module) -> None:
    report = verify(layer, nn.NLLLoss(), randn(5, 4), randint(3, (5,)), [extensions.DiagGGNExact(), extensions.DiagGGNMC()])
    nothing_wrong(report)
    assert all(row.reason == "all compared numbers are zero" for row in report)


def test_kronecker_factors_of_layers() -> None:
    """Groups, transposed convolutions, embeddings with padding, matrices from the right, several positions, re-use, hooks of the user's own."""
    convolutions = Sequential(
        nn.ConvTranspose2d(2, 4, 2, groups=2),
        nn.Tanh(),
        Conv2d(4, 6, 2, groups=2, stride=2, padding=1, bias=False, padding_mode="circular"),
        Flatten(),
    )
    convolutions[2].register_forward_hook(lambda module, inputs, output: 3 * output)
    twice = Linear(3, 3)
    sequences = Sequential(Embedding(6, 3, padding_idx=0), twice, nn.Tanh(), twice, Matrix(3, 2), Flatten())
    kinds = [extensions.KFLR(), extensions.KFAC(2)]
    for model, X in ((convolutions, randn(3, 2, 4, 4)), (sequences, torch.tensor([[0, 1, 2], [3, 0, 0], [1, 1, 5]]))):
        report = verify(model, MSELoss(), X, randn(model(X).shape), kinds)
        assert {row.verdict for row in report} == {AGREES}
        assert len(report) == 2 * len(list(model.parameters()))


class Forward(Module):
    """A layer and its derivative, taken forward: one call, and two products with the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(2, 3)

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        return sum(torch.func.jvp(self.layer, (x,), (direction,)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch, in forward mode
def test_factors_of_weights_of_which_calls_are_not_all_uses() -> None:
    report = verify(Forward(), CrossEntropyLoss(), (randn(1, 2), randn(1, 2)), randint(3, (1,)), [extensions.KFLR(), extensions.BatchGrad()])
    assert [row.verdict for row in report] == [NOT_COMPARED, AGREES, AGREES, AGREES]


class Positions(Module):
    """Layers that are called once for all samples: added, multiplied, behind one another, and one that is called with samples, too."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.table, self.inner, self.head = Linear(3, 3), Embedding(9, 3), Linear(3, 3), Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = self.table(torch.arange(x.shape[1]))
        hidden = self.key(x) + places + self.inner(torch.ones(1, 3, dtype=x.dtype))
        return self.head((hidden @ self.key(places).mT).tanh() @ x).mean(1)


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_factors_of_layers_that_are_called_once_for_all_samples(samples: int) -> None:
    """All samples see what they were given: their input factor is that of an expanded input."""
    chosen = [extensions.KFLR(), extensions.KFAC(), extensions.DiagGGNExact(), extensions.BatchGrad()]
    report = verify(Positions().double(), CrossEntropyLoss(), randn(samples, 4, 3), torch.arange(samples) % 2, chosen)
    assert {row.verdict for row in report} == {AGREES}
    assert len(report) == 7 * len(chosen)
    one_number = verify(Positions().double(), MSELoss(), randn(samples, 4, 3), randn(samples), extensions.KFLR(), output=lambda out: out[:, 0])
    assert {row.verdict for row in one_number} == {AGREES}


class Bias(Module):
    """Scores of attention with a bias of each pair of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = Embedding(1, 2), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table(torch.zeros(x.shape[1], x.shape[1], dtype=torch.long)).permute(2, 0, 1)
        return self.head(((x @ x.mT).unsqueeze(1) + bias).softmax(-1).matmul(x.unsqueeze(1)).mean((1, 2)))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_input_factor_of_what_nobody_uses(samples: int) -> None:
    """The softmax of a single score is one: nothing tells whether the bias is that of one sample, or of all."""
    report = verify(Bias().double(), CrossEntropyLoss(), randn(samples, 1, 4), torch.arange(samples) % 3, [extensions.KFLR()])
    nothing_wrong(report)
    assert verdicts(report) == dict.fromkeys([("table.weight", "KFLR"), ("head.weight", "KFLR"), ("head.bias", "KFLR")], AGREES)


class Tokens(Module):
    """A weight that multiplies its input entry by entry, and a bias: of the shape of products with it, or of none."""

    def __init__(self, bias: int, dtype: torch.dtype, largest: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype, self.largest = Parameter(randn(3, 3)), Parameter(randn(bias, 3)), dtype, largest

    def forward(self, x: Tensor) -> Tensor:
        out = (x.unsqueeze(-1) * self.weight + self.bias).to(self.dtype)
        return out.amax(1) if self.largest else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [1, 3])
def test_modules_that_own_a_weight_and_compute_something_else(bias: int, dtype: torch.dtype) -> None:
    """What they return is compared with products of their weight only where it could be one."""
    report = verify(Sequential(Linear(3, 3), Tokens(bias, dtype)).double(), MSELoss(), randn(2, 3), randn(2, 3, 3).to(dtype), extensions.BatchGrad())
    assert {row.verdict for row in report} == {AGREES}
    largest = Tokens(bias, dtype, largest=True).double()  # of the shape of the product
    for samples in (1, 3):
        assert {row.verdict for row in verify(largest, MSELoss(), randn(samples, 3), randn(samples, 3).to(dtype), extensions.BatchGrad())} == {AGREES}


class Changing(Module):
    """A table and a convolution have other options in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.head = Embedding(4, 2), nn.Conv1d(2, 2, 3), Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = 0.0
        for i in (1, 2):
            self.table.padding_idx, self.conv.dilation, self.conv.padding = i, (i,), (i,)
            out = out + torch.tanh(self.conv(self.table(x).mT))
        return self.head(out.mean(2))


def test_each_call_of_a_layer_has_its_own_options() -> None:
    X = torch.tensor([[0, 1, 2, 3], [1, 1, 2, 3]])
    report = verify(Changing().double(), CrossEntropyLoss(), X, torch.tensor([0, 1]), [extensions.KFLR(), extensions.BatchGrad()])
    assert {row.verdict for row in report} == {AGREES}


class Tied(Module):
    """One matrix for two layers, and for nothing else; a parameter without use; one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.unused, self.frozen = Linear(3, 3), Linear(3, 3), Linear(3, 2), Linear(3, 4)
        self.other.weight = self.one.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> dict[str, Tensor]:
        return {"scores": self.frozen(self.other(torch.tanh(self.one(x))) * scale + shift)}


@pytest.mark.parametrize(
    "X", [randn(3, 3), (randn(3, 3),), {"x": randn(3, 3), "scale": randn(3, 3), "shift": randn(3)}], ids=["one", "several", "named"]
)
def test_tied_frozen_unused(X: Tensor | tuple | dict) -> None:
    report = verify(Tied(), CrossEntropyLoss(), X, randint(4, (3,)), everything(), output=lambda out: out["scores"])
    nothing_wrong(report)
    table = verdicts(report)
    assert {name for name, _ in table} == {"one.weight", "one.bias", "other.bias", "unused.weight", "unused.bias", "(all)"}
    for quantity in (*FIRST, "DiagGGNExact", "SqrtGGNMC", "KFLR"):
        assert {table[name, quantity] for name in ("one.weight", "one.bias", "other.bias")} == {AGREES}
    assert [(row.verdict, row.reason) for row in report if row.parameter == "unused.bias" and row.quantity == "BatchGrad"] == [
        (NOT_COMPARED, "takes no part in the output")
    ]


class Attention(Module):
    """The biases of keys have no influence: all their numbers are rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = Linear(4, 4), Linear(4, 4), Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)).sum(1)


@pytest.mark.parametrize("dtype", [torch.float64, None])
def test_rounding_errors_are_no_mistakes(dtype: torch.dtype | None) -> None:
    model, X, y = Attention(), randn(3, 5, 4), randint(4, (3,))
    model.key.bias.grad = grad = randn(4)
    report = verify(model, CrossEntropyLoss(), X, y, [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.KFLR()], dtype=dtype)
    nothing_wrong(report)
    assert all(row.verdict is AGREES for row in report)
    assert model.key.bias.grad is grad


class Rounding(Module):
    """Computes in single precision, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Linear(4, 5), Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).float().softmax(-1).to(x.dtype))


def test_precision_of_the_model_sets_the_tolerance() -> None:
    model, X, y = Rounding(), randn(3, 4), randint(3, (3,))
    nothing_wrong(verify(model, CrossEntropyLoss(), X, y, [extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.KFLR()]))
    report = verify(model, CrossEntropyLoss(), X, y, extensions.DiagGGNExact(), rtol=1e-15, atol=0.0)
    assert verdicts(report)["one.weight", "DiagGGNExact"] is WRONG


class Force(Module):
    """The gradient of a potential with respect to what it is given, by ``torch.func``, which does not run under hooks of saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = Sequential(Linear(2, 4), Tanh(), Linear(4, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda point: self.potential(point).squeeze()))(x)


def test_models_that_differentiate_by_torch_func() -> None:
    report = verify(Force(), MSELoss(), randn(3, 2), randn(3, 2), [extensions.BatchGrad(), extensions.DiagGGNExact()])
    assert [row.verdict for row in report] == 6 * [AGREES]


# --- planted mistakes -------------------------------------------------------------------------------------------------------------------------


def tampered(value: object) -> object:
    """A little too large, whatever it is."""
    if isinstance(value, Tensor):
        return value * 1.0001
    if isinstance(value, list):
        return [*value[:-1], tampered(value[-1])]
    return lambda vector: tampered(value(vector))


def short(value: object) -> object:
    """A shape that is wrong."""
    if isinstance(value, Tensor):
        return value[..., None]
    if isinstance(value, list):
        return value[:-1]
    return lambda vector: short(value(vector))


COMPARED = [cls for cls in ALL if cls.__name__ not in ("KFRA", "PCHMP")]


@pytest.mark.parametrize("cls", COMPARED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("wrong", [tampered, short, lambda value: None], ids=["number", "shape", "type"])
def test_any_mistake_in_any_quantity_is_found(cls: type, wrong: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library goes wrong for one parameter: that one is accused, no other."""
    run = Copies.run

    def run_wrongly(self: Copies, extension: BackpropExtension) -> tuple:
        model, values, excluded = run(self, extension)
        return model, values | {"3.weight": wrong(values["3.weight"])}, excluded

    monkeypatch.setattr(Copies, "run", run_wrongly)
    model, lossfunc, X, y = net()
    report = verify(model, lossfunc, X, y, [cls()])
    assert [(row.parameter, row.quantity) for row in report if row.verdict is not AGREES] == [("3.weight", cls.__name__)]
    assert verdicts(report)["3.weight", cls.__name__] is WRONG
    assert not report.ok and not report
    with pytest.raises(WrongQuantityError, match=r"1 of 6 .*\n.*\n3\.weight +" + cls.__name__):
        report.raise_if_wrong()


def accused(report: Report) -> set[str]:
    assert {row.verdict for row in report} <= {WRONG, AGREES}
    return {row.parameter for row in report if row.verdict is WRONG}


def test_wrong_jac_t_of_a_user() -> None:
    """All that lies upstream of it is wrong, what lies downstream is right."""

    class Sine(Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    @register(Sine)
    class SineDerivatives(ElementwiseDerivatives):
        keeps = frozenset({"input"})
        wrong = 1.01

        def hessian_is_zero(self, module: Module) -> bool:
            return False

        def df(self, module: Module, g_inp: object, g_out: object, subsampling: list[int] | None = None) -> Tensor:
            return module.input0.cos() * self.wrong

        def d2f(self, module: Module, g_inp: object, g_out: object) -> Tensor:
            return -module.input0.sin()

    arguments = Sequential(Linear(4, 5), Sine(), Linear(5, 3)), MSELoss(), randn(3, 4), randn(3, 3)
    for cls in (extensions.DiagGGNExact, extensions.DiagGGNMC, extensions.KFLR, extensions.SqrtGGNExact, extensions.DiagHessian, extensions.GGNMP):
        assert accused(verify(*arguments, cls())) == {"0.weight", "0.bias"}
    assert accused(verify(*arguments, extensions.BatchGrad())) == set()  # autograd's own gradient
    SineDerivatives.wrong = 1.0
    assert accused(verify(*arguments, [extensions.DiagGGNExact(), extensions.DiagHessian()])) == set()
    SineDerivatives.d2f = lambda *_: torch.zeros(3, 5, dtype=torch.float64)
    assert accused(verify(*arguments, extensions.DiagHessian())) == {"0.weight", "0.bias"}


def test_wrong_weight_product_of_a_user() -> None:
    class Scale(Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    @register(Scale)
    class ScaleDerivatives(BaseParameterDerivatives):
        params = ("weight",)
        keeps = frozenset({"input"})

        def hessian_is_zero(self, module: Module) -> bool:
            return True

        def _jac_t_mat_prod(self, module: Module, g_inp: object, g_out: object, mat: Tensor, subsampling: list[int] | None = None) -> Tensor:
            return mat * module.weight

        def _weight_jac_t_mat_prod(
            self, module: Module, g_inp: object, g_out: object, mat: Tensor, sum_batch: bool = True, subsampling: list[int] | None = None
        ) -> Tensor:
            x = module.input0 if subsampling is None else module.input0[subsampling]
            product = mat * x.abs()  # the mistake
            return product.sum(1) if sum_batch else product

    report = verify(Sequential(Linear(4, 4), Scale()), MSELoss(), randn(3, 4), randn(3, 4), [extensions.BatchGrad(), extensions.SqrtGGNExact()])
    assert accused(report) == {"1.weight"}


def test_wrong_module_extension_of_a_user() -> None:
    """It is found inside an extension of the library; an extension of the user's own has no definition here."""

    class TwiceTheGradient(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["bias"])

        def bias(self, ext: object, module: Module, g_inp: object, g_out: tuple[Tensor], backproped: object) -> Tensor:
            return 2 * g_out[0]

    extension = extensions.BatchGrad()
    extension.set_module_extension(Linear, TwiceTheGradient())

    class Own(extensions.BatchGrad):
        def finish(self, state: object, parameter: Parameter) -> Tensor:
            return super().finish(state, parameter).norm()

    arguments = Sequential(Conv2d(1, 2, 2), Flatten(), Linear(8, 3)), MSELoss(), randn(3, 1, 3, 3), randn(3, 3)
    assert "2.bias" in {row.parameter for row in verify(*arguments, extension) if row.verdict is WRONG}
    report = verify(*arguments, Own())
    assert {(row.verdict, row.reason) for row in report} == {(NOT_COMPARED, "Own is no class of backpack.extensions, its definition is not known")}
    assert not report.ok
    report.raise_if_wrong()


PLANTED = {
    "weights of affine layers": (AffineDerivatives, "_weight_jac_t_mat_prod", extensions.BatchGrad, {"0.weight", "3.weight", "5.weight"}),
    "convolutions": (ConvNDDerivatives, "_jac_t_mat_prod", extensions.DiagGGNExact, set()),
    "linear": (LinearDerivatives, "_jac_t_mat_prod", extensions.DiagGGNExact, {"0.weight", "0.bias", "3.weight", "3.bias"}),
    "inputs": (AffineDerivatives, "input_moment", extensions.KFLR, {"3.weight", "5.weight"}),
    "patches": (ConvNDDerivatives, "input_moment", extensions.KFLR, {"0.weight"}),
    "exact root of the loss": (CrossEntropyLossDerivatives, "_sqrt_hessian", extensions.SqrtGGNExact, None),
    "root with few columns": (crossentropyloss, "_few_columns", extensions.DiagGGNExact, None),
    "sampled root of the loss": (CrossEntropyLossDerivatives, "_sqrt_hessian_sampled", extensions.KFAC, None),
    "product with the loss": (CrossEntropyLossDerivatives, "_make_hessian_mat_prod", extensions.GGNMP, None),
    "curvature of an activation": (SigmoidDerivatives, "d2f", extensions.DiagHessian, {"0.weight", "0.bias"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_rule_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, cls, parameters = PLANTED[name]
    model, lossfunc, X, y = net()
    assert accused(verify(model, lossfunc, X, y, cls())) == set()
    right = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args, **kwargs: tampered(right(*args, **kwargs)))
    expected = {name for name, _ in model.named_parameters()} if parameters is None else parameters
    assert accused(verify(model, lossfunc, X, y, cls())) == expected


def test_missing_failing_and_unwanted_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lossfunc, X, y = net()
    model[3].bias.requires_grad_(False)
    run = Copies.run

    def values(change: Callable[[dict], dict]) -> Callable:
        def run_wrongly(self: Copies, extension: BackpropExtension) -> tuple:
            copy, found, excluded = run(self, extension)
            return copy, change(found), excluded

        return run_wrongly

    cases = {
        "nothing was written": lambda found: {name: value for name, value in found.items() if name != "0.weight"},
        "written on a parameter that is frozen": lambda found: found | {"3.bias": found["0.bias"]},
        "written on a parameter that is excluded": lambda found: found | {"5.bias": found["0.bias"]},
        "": lambda found: found | {"0.weight": torch.full_like(found["0.weight"], torch.nan)},
    }
    for reason, change in cases.items():
        monkeypatch.setattr(Copies, "run", values(change))
        report = verify(model, lossfunc, X, y, extensions.Variance(exclude=[model[5].bias]))
        assert [row.reason for row in report if row.verdict is WRONG] == [reason]

    def fail(*_: object) -> None:
        raise ZeroDivisionError("no such thing\nand more")

    monkeypatch.setattr(Copies, "run", fail)
    report = verify(model, lossfunc, X, y, [extensions.BatchGrad()])
    assert list(report) == [Row("(all)", "BatchGrad", 0, 0.0, FAILED, "ZeroDivisionError: no such thing")]
    with pytest.raises(WrongQuantityError, match="no such thing"):
        report.raise_if_wrong()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ\nand more"), ZeroDivisionError("shapes differ")])
@pytest.mark.parametrize("product", [extensions.GGNMP, extensions.HMP])
def test_error_inside_of_a_product(product: type[BackpropExtension], error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that only a product uses, after the pass: its error is no fault of autograd's, and does not leave ``verify``."""

    def fail(*_: object) -> Tensor:
        raise error

    monkeypatch.setattr(LinearDerivatives, "_jac_mat_prod", fail)
    report = verify(Sequential(Linear(3, 4), Sigmoid(), Linear(4, 3)), MSELoss(), randn(2, 3), randn(2, 3), [product()])
    failed = {row.parameter: row.reason for row in report if row.verdict is FAILED}
    assert failed == dict.fromkeys(("0.weight", "0.bias"), f"{type(error).__name__}: shapes differ")
    assert {row.verdict for row in report if row.parameter not in failed} == {AGREES}
    assert not report
    with pytest.raises(WrongQuantityError, match="shapes differ"):
        report.raise_if_wrong()


def test_what_autograd_cannot_do() -> None:
    """Where the backward pass of a function has no derivative, or forgets one, the Jacobian is formed if it is small."""

    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return torch.from_numpy(2 * g.detach().numpy())

    class Doubling(Module):
        def forward(self, x: Tensor) -> Tensor:
            return Forgetful.apply(x)

    for between in (nn.Hardsigmoid(), Doubling()):
        model, chosen = Sequential(Linear(3, 4), between, Linear(4, 3)), [extensions.DiagGGNExact(), extensions.KFLR(), extensions.SqrtGGNMC()]
        report = verify(model, CrossEntropyLoss(), randn(3, 3), randint(3, (3,)), chosen)
        assert {row.verdict for row in report} == {AGREES}
        report = verify(model, MSELoss(), randn(100, 3), randn(100, 3), extensions.DiagGGNExact())
        assert verdicts(report)["0.weight", "DiagGGNExact"] is NOT_COMPARED
        assert "300 > 256" in next(row.reason for row in report if row.parameter == "0.weight")


def test_what_autograd_differentiates_wrongly() -> None:
    """Torch takes the norms of a fused weight norm for constants when it differentiates twice."""
    model = Sequential(nn.utils.parametrizations.weight_norm(Linear(3, 4)), Tanh(), Linear(4, 3))
    report = verify(model, CrossEntropyLoss(), randn(3, 3), randint(3, (3,)), [extensions.DiagHessian(), extensions.DiagGGNExact()])
    assert {row.verdict for row in report if row.quantity == "DiagGGNExact"} == {AGREES}
    assert {(row.verdict, "weight_norm" in row.reason) for row in report if row.quantity == "DiagHessian"} == {(NOT_COMPARED, True)}


# --- refusals ---------------------------------------------------------------------------------------------------------------------------------


def test_refusals_are_reported() -> None:
    model, X, y = Sequential(Linear(3, 4), nn.BatchNorm1d(4), Linear(4, 2)), randn(3, 3), randint(2, (3,))
    report = verify(model, CrossEntropyLoss(), X, y, [extensions.BatchGrad(), extensions.DiagGGNExact()])
    assert [(row.parameter, row.quantity, row.verdict) for row in report] == [("(all)", name, REFUSED) for name in ("BatchGrad", "DiagGGNExact")]
    assert all("BatchNorm1d" in row.reason and "\n" not in row.reason for row in report)
    assert not report.ok
    report.raise_if_wrong()

    def by_hand(output: Tensor, labels: Tensor) -> Tensor:
        return (output - F.one_hot(labels, 2)).square().mean()

    report = verify(model.eval(), by_hand, X, y, [extensions.BatchGrad(), extensions.DiagGGNExact()])
    assert report.ok
    assert verdicts(report)["(all)", "DiagGGNExact"] is REFUSED


# --- the model stays as it is -----------------------------------------------------------------------------------------------------------------


def snapshot(model: Module, lossfunc: Module) -> dict[str, object]:
    modules = [*model.modules(), *lossfunc.modules()]
    return {
        "state": {name: (id(value), value._version, value.clone()) for name, value in model.state_dict(keep_vars=True).items()},
        "gradients": {name: (p.grad, p.requires_grad) for name, p in model.named_parameters()},
        "results": {name: {field: id(value) for field, value in fields.items()} for name, fields in results(model).items()},
        "modes": [module.training for module in modules],
        "hooks": [[dict(hooks) for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)] for m in modules],
        "attributes": [sorted(vars(module)) for module in modules],
        "random": torch.get_rng_state(),
        "default": (torch.get_default_dtype(), torch.is_grad_enabled()),
    }


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Busy(Module):
    """A model with a state that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Sequential(Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), Linear(4, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.broken:
            raise ZeroDivisionError("broken")
        return self.layers(x)


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_nothing_changes(extended: bool, broken: bool) -> None:
    model, lossfunc, X, y = Busy(), CrossEntropyLoss(), randn(3, 3, requires_grad=True), randint(3, (3,))
    model.layers[2].eval()
    model.layers[0].weight.register_hook(lambda g: None)
    model.layers[3].register_forward_hook(lambda *_: None)
    lossfunc(model(X), y).backward()
    if extended:
        extend(model), extend(lossfunc)
        with context(extensions.BatchGrad(), extensions.DiagGGNMC()):
            lossfunc(model(X), y).backward()
        assert results(model)
    model.broken = broken
    chosen, before, grad = [extensions.BatchGrad(), extensions.KFAC(), extensions.HMP()], snapshot(model, lossfunc), X.grad.clone()
    with torch.no_grad(), context(extensions.Variance()):
        if broken:
            with pytest.raises(ZeroDivisionError):
                verify(model, lossfunc, X, y, chosen)
        else:
            nothing_wrong(verify(model, lossfunc, X, y, chosen))
    assert same(before, snapshot(model, lossfunc))
    assert torch.equal(X.grad, grad)
    model.broken = False
    with context(extensions.BatchL2Grad()):
        lossfunc(extend(model)(X), y).backward()
    assert hasattr(model.layers[0].weight, "batch_l2")


def test_nothing_is_left_behind() -> None:
    """Copies and their graphs die."""

    def tensors() -> int:
        gc.collect()
        return sum(type(entry) in (Tensor, Parameter) for entry in gc.get_objects())

    model, lossfunc, X, y = net()
    verify(model, lossfunc, X, y, everything())
    before = tensors()
    verify(model, lossfunc, X, y, everything())
    assert tensors() == before


def test_excluded_parameters_and_modules_are_those_of_the_copy() -> None:
    model, lossfunc, X, y = net()
    extend(model)
    for exclude in ([model[0], model[3].weight], ["0", "3.weight"]):
        table = verdicts(verify(model, lossfunc, X, y, extensions.BatchGrad(exclude=exclude)))
        assert {name for (name, _), verdict in table.items() if verdict is NOT_COMPARED} == {"0.weight", "0.bias", "3.weight"}
        assert {name for (name, _), verdict in table.items() if verdict is AGREES} == {"3.bias", "5.weight", "5.bias"}


# --- report and arguments ---------------------------------------------------------------------------------------------------------------------


def test_report_is_a_table() -> None:
    rows = (
        Row("weight", "BatchGrad", 16, 1.2e-16, AGREES),
        Row("bias", "BatchGrad", 6, 1.2e-7, AGREES),
        Row("a.long.name", "KFLR", 9, 0.5, WRONG),
        Row("(all)", "KFRA", 0, 0.0, REFUSED, "not here"),
        Row("bias", "PCHMP", 0, 0.0, NOT_COMPARED, "why"),
    )
    report = Report(rows)
    assert str(report).splitlines() == [
        "parameter    quantity   compared    error  verdict",
        "weight       BatchGrad        16   <1e-12  agrees",
        "bias         BatchGrad         6  1.2e-07  agrees",
        "a.long.name  KFLR              9  5.0e-01  WRONG",
        "(all)        KFRA              -        -  refused: not here",
        "bias         PCHMP             -        -  not compared: why",
    ]
    assert tuple(report) == report.rows == rows and len(report) == 5
    assert not report.ok and Report(rows[:1]).ok and not Report(rows[3:]).ok
    with pytest.raises(AssertionError, match=r"(?s)1 of 5 .*a\.long\.name  KFLR"):
        report.raise_if_wrong()


def test_same_seed_same_report() -> None:
    model, lossfunc, X, y = net()
    chosen = [extensions.BatchGrad(), extensions.KFAC()]
    assert verify(model, lossfunc, X, y, chosen, seed=3) == verify(model, lossfunc, X, y, chosen, seed=3)


class Unstable(Module):
    """Depends on how often any copy was called."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(rand(3))

    def forward(self, x: Tensor) -> Tensor:
        Unstable.calls += 1
        return self.weight * x * Unstable.calls


class Clinging(Module):
    """Holds on to its parameter in a function, which copies share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(rand(3))
        self.function = lambda x: self.weight * x

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_arguments() -> None:
    model, lossfunc, X, y = Linear(3, 2), CrossEntropyLoss(), randn(3, 3), randint(2, (3,))
    grad = extensions.BatchGrad()
    with torch.no_grad():
        penalty = next(iter(deepcopy(model).parameters()))
    wrong: dict[str, tuple] = {
        "needs a torch.nn.Module": (Linear, lossfunc, X, y, grad),
        "as lossfunc": (model, CrossEntropyLoss, X, y, grad),
        "as lossfunc, got None": (model, None, X, y, grad),
        "Write BatchGrad\\(\\)": (model, lossfunc, X, y, [extensions.BatchGrad]),
        "needs instances of extensions": (model, lossfunc, X, y, 3),
        "at least one extension": (model, lossfunc, X, y, []),
        "one number, got shape \\[3\\]": (model, CrossEntropyLoss(reduction="none"), X, y, grad),
        "could not run the model": (model, lossfunc, randn(3, 4), y, grad),
        "no parameter that requires a gradient": (deepcopy(model).requires_grad_(False), lossfunc, X, y, grad),
        "got a dict": (Tied(), lossfunc, X, y, grad),
        "got a tensor of shape \\[0, 2\\]": (model, lossfunc, X[:0], y[:0], grad),
        "two different outputs": (Unstable(), MSELoss(), X, randn(3, 3), grad),
        "The model uses parameters .*: weight": (Clinging().double(), MSELoss(), X, randn(3, 3), grad),
        "The loss uses parameters .*: weight": (model.double(), lambda out, y: out.sum() + model.weight.sum(), X, y, grad),
        "one of shape \\[2, 3\\]": (model, lambda out, y: out.sum() + penalty.sum(), X, y, grad),
        "out of range": (model, lossfunc, X, y, extensions.BatchGrad(subsampling=[3])),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            verify(*arguments)
    for name, value in {"samples": 0, "entries": 1.5, "rtol": 0.0, "atol": -1.0, "output": 3, "dtype": "x"}.items():
        with pytest.raises(ArgumentError, match=name):
            verify(model, lossfunc, X, y, grad, **{name: value})


class OwnLoss(Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.part(x), y)


def test_model_that_returns_its_loss() -> None:
    """It has no output that could be followed; what the message names works."""
    model, X, y, grad = OwnLoss(), randn(4, 3), randint(2, (4,)), extensions.BatchGrad()
    with pytest.raises(ArgumentError, match=r"got a tensor of shape \[\].*give the part that makes this tensor.*explain\(\) takes it whole"):
        verify(model, lambda loss, y: loss, (X, y), None, grad)
    nothing_wrong(verify(model.part, F.cross_entropy, X, y, grad))
    assert explain(model, lambda loss, y: loss, (X, y), None, grad).samples == 4


def test_model_that_cannot_be_copied() -> None:
    """It keeps tensors of an earlier graph: the reason is that of ``copy.deepcopy``, and their places are named."""
    model = Sequential(Linear(3, 2))
    model[0].last = [model(torch.rand(1, 3))]
    model.register_buffer("state", model(torch.rand(1, 3)))
    with pytest.raises(ArgumentError, match=r"verify\(\) works on a copy of the model.*graph leaves.*kept in state, 0\.last: detach them"):
        verify(model, MSELoss(), torch.rand(4, 3), torch.rand(4, 2), extensions.BatchGrad())


class Steps(Module):
    """Returns its steps on axis 0, and samples behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x), self.layer(x.tanh()), self.layer(2 * x)])


@pytest.mark.parametrize("quantity", [extensions.BatchGrad, extensions.Variance, extensions.KFLR])
def test_samples_behind_steps(quantity: type[BackpropExtension]) -> None:
    """They are no mistake of the library."""
    X, y = randn(5, 2), randn(5, 3, 2)
    with pytest.raises(ArgumentError, match=r"shape is \[3, 5, 2\], and there are 5 samples\. Write output="):
        verify(Steps(), lambda out, y: F.mse_loss(out.transpose(0, 1), y), X, y, quantity())
    assert [row.verdict for row in verify(Steps(), F.mse_loss, X, y, quantity(), output=lambda out: out.transpose(0, 1))] == [AGREES, AGREES]


class Spectral(Module):
    """A filter with complex parameters, as in neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.filter = Linear(5, 2), Parameter(randn(3, dtype=torch.cfloat))
        self.register_buffer("phase", randn(3, dtype=torch.cfloat))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        assert torch.view_as_real(self.filter * self.phase * shift).dtype == x.dtype
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter * self.phase * shift, n=5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None])
def test_complex_numbers_remain_complex(dtype: torch.dtype | None) -> None:
    """Parameters that are left out, buffers and inputs are converted with the rest, and keep their imaginary parts."""
    X = (rand(4, 5), randn(4, 3, dtype=torch.cfloat))
    quantities = [extensions.BatchGrad(exclude=["filter"]), extensions.KFAC(exclude=["filter"])]
    report = verify(Spectral(), MSELoss(), X, rand(4, 2), quantities, dtype=dtype)
    nothing_wrong(report)
    assert [row.parameter for row in report if row.verdict is AGREES] == ["head.weight", "head.bias"] * 2
