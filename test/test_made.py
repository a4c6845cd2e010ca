"""Weights that are made of parameters: blocks of samples, what need not be formed, what is left to the nodes, and what others read beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES
from table import Case
from test_extensions import QUANTITIES, close, collect, oracle_of, run
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, Linear, Module, Parameter, Sequential
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core import made
from backpack.core.made import MadeUse
from backpack.extensions import collector
from backpack.extensions.firstorder import batch_l2_grad

pytestmark = pytest.mark.filterwarnings("error")
NAMES = [name for name, case in CASES.items() if name.startswith("weight: ") and "curved" not in case.tags]
OF_COLUMNS = [
    *("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"),
    *("DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "DiagHessian", "BatchDiagHessian"),
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[MadeUse | None]:
    """What was read at once; ``None`` where it was left to the nodes."""
    uses: list[MadeUse | None] = []
    at_made = collector.Collector.at_made

    def note(self: Any, flow: Any, use: MadeUse) -> bool:
        done = at_made(self, flow, use)
        uses.append(use if done else None)
        return done

    monkeypatch.setattr(collector.Collector, "at_made", note)
    return uses


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_one_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples one by one leave what all of them leave at once."""
    monkeypatch.setattr(made, "_BLOCK", 1)
    monkeypatch.setattr(batch_l2_grad, "LARGE", 1)
    for batch in (1, 3):
        for quantity in map(QUANTITIES.get, OF_COLUMNS):
            problem = CASES[name].build(batch)
            run(problem, quantity.make())
            quantity.check(oracle_of(name, batch), collect(problem, quantity.field))


@pytest.mark.parametrize("name", NAMES)
def test_columns_in_blocks(name: str) -> None:
    """With little memory, columns come in blocks, too."""
    for quantity in map(QUANTITIES.get, ("DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagHessian", "BatchDiagHessian")):
        problem = CASES[name].build(3)
        run(problem, quantity.make(), memory=1)
        quantity.check(oracle_of(name, 3), collect(problem, quantity.field))


@pytest.mark.parametrize("name", NAMES)
def test_beside_what_needs_the_nodes(name: str) -> None:
    """Where a Hessian, or some of the samples are asked for, too, the nodes carry columns: quantities are the same."""
    names = ["BatchGrad", "BatchL2Grad", "Variance", "DiagGGNExact", "DiagHessian"]
    problem, oracle = CASES[name].build(3), oracle_of(name, 3)
    run(problem, *(QUANTITIES[quantity].make() for quantity in names))
    for quantity in names:
        QUANTITIES[quantity].check(oracle, collect(problem, QUANTITIES[quantity].field))
    problem = CASES[name].build(3)
    run(problem, extensions.BatchGrad(subsampling=[2, 0]), extensions.BatchL2Grad())
    for parameter, value in collect(problem, "grad_batch").items():
        close(value, oracle.grad_batch[parameter][[2, 0]])
    QUANTITIES["BatchL2Grad"].check(oracle, collect(problem, "batch_l2"))


# what arrives as a term, as something small, and what is formed in blocks
WAYS = {
    "masked": [({"w"}, set(), set())],
    "masked, turned twice": [({"w"}, set(), set())],
    "noise": [({"w", "s"}, set(), set())],
    "low rank, positions": [({"w", "up", "down"}, set(), set())],
    "three factors": [({"up", "down"}, {"s"}, set())],
    "factors transposed": [({"v", "u"}, {"s"}, set())],
    "rows, columns and a number": [({"w"}, {"g", "h", "n"}, set())],
    "rows of positions": [({"w"}, {"g", "h"}, set())],
    "masked, rows and columns": [({"w"}, {"g", "h"}, set())],
    "lengths and directions": [({"w"}, {"g"}, {"up", "down"})],
    "standardized": [({"w"}, set(), set())],
    "standardized, no positions": [({"w"}, set(), set())],
    "used twice": [({"w"}, set(), set())],
    "normalized rows": [({"w"}, set(), set())],
    "normalized columns": [({"w"}, set(), set())],
    "by its largest entries": [({"w"}, set(), set())],
    "around its mean": [({"w"}, set(), set())],
    "of probabilities, turned": [({"w"}, set(), set())],
    "antisymmetric": [({"w"}, set(), set())],
    "symmetric, positions": [({"w", "s"}, set(), set())],
    "projected": [({"w"}, set(), set())],
    "of its products": [({"w"}, set(), set())],
    "weight norm": [({"a.parametrizations.weight.original1"}, {"a.parametrizations.weight.original0"}, set())],
    "weight norm of columns": [({"a.parametrizations.weight.original1"}, {"a.parametrizations.weight.original0"}, set())],
    "spectral norm": [({"a.parametrizations.weight.original"}, set(), set())],
    "Kronecker product": [(set(), {"other"}, {"one"})],
    "groups with scales, positions": [({"w"}, set(), {"s"})],
    "groups of the turned": [({"w"}, set(), {"s"})],
    "groups of rows": [({"w"}, {"s"}, set())],
    "quantized": [({"w"}, {"g"}, {"s", "z"})],
    "blocks with scales": [({"w"}, set(), {"s"})],
    "scaled kernels": [({"k"}, set(), {"s"})],
    "rolled": [({"w"}, set(), set())],
    "summed up": [({"w"}, set(), set())],
    "rows that are chosen": [({"w"}, {"g"}, set())],
    "columns that are chosen": [({"w"}, set(), set())],
    "columns beside each other": [({"one", "other"}, set(), set())],
    "padded": [({"w"}, set(), set())],
    "with another first row": [({"w"}, set(), set())],
    "stack of rows": [({"one", "other"}, set(), set())],
    "block diagonal": [({"one", "other"}, set(), set())],
    "Hadamard product of low ranks": [(set(), set(), {"up", "down", "left", "right"})],
    "low rank of length one": [(set(), {"g"}, {"up", "down"})],
    "tensor train": [({"other"}, set(), {"one"})],
    "Cayley transform": [({"s"}, set(), set())],
    "solved from the right": [({"w", "s"}, set(), set())],
    "inverse": [({"w", "s"}, set(), set())],
    "reflections": [({"w"}, set(), {"v"})],
    "of a vector": [({"v"}, set(), set())],
    "one row for all": [(set(), {"h"}, set())],
    "masked kernel": None,
    "in two layers": None,
    "biases of two parameters": [({"w"}, set(), set()), ({"one", "other"}, set(), set())],
}


@pytest.mark.parametrize("name", WAYS)
def test_what_is_formed(name: str, seen: list[MadeUse | None]) -> None:
    problem = CASES[f"weight: {name}"].build(3)
    run(problem, extensions.BatchL2Grad(), extensions.SumGradSquared())
    if WAYS[name] is None:  # another use of the parameter is to be added
        assert None in seen
        return
    names = {parameter: label for label, parameter in problem.model.named_parameters()}
    assert [tuple({names[p] for p in part} for part in (use.terms, use.formed, use.others)) for use in seen] == WAYS[name]


@pytest.mark.parametrize("name", ["masked", "noise"])
def test_left_to_the_nodes(name: str, seen: list[MadeUse | None]) -> None:
    """Chosen samples; and gradients, where the Hessian has something behind the weight that is made of them."""
    run(CASES[f"weight: {name}"].build(3), extensions.DiagGGNExact(subsampling=[0]))
    assert not any(seen)
    run(CASES[f"weight: {name}"].build(3), extensions.DiagHessian(), extensions.BatchGrad())
    assert len([use for use in seen[1:] if use is not None]) == (2 if name == "masked" else 1)


class Own(extensions.BatchGrad):
    """Something of one's own, of which nobody knows how it is made of blocks."""

    savefield = "own"

    def finish(self, state: dict, parameter: Parameter) -> Tensor:
        return state[0][0].amax(0)


class Norms(extensions.BatchL2Grad):
    """Another norm."""

    savefield = "norms"

    def finish(self, state: dict, parameter: Parameter) -> Tensor:
        return state[0][0].flatten(1).abs().sum(1)


@pytest.mark.parametrize("name", ["masked", "noise", "standardized", "three factors"])
def test_quantities_of_ones_own(name: str) -> None:
    name = f"weight: {name}"
    problem, oracle = CASES[name].build(3), oracle_of(name, 3)
    run(problem, Own(), Norms(), extensions.SumGradSquared())
    for label, parameter in problem.model.named_parameters():
        close(parameter.own, oracle.grad_batch[label].amax(0))
        close(parameter.norms, oracle.grad_batch[label].flatten(1).abs().sum(1))
    QUANTITIES["SumGradSquared"].check(oracle, collect(problem, "sum_grad_squared"))


def test_an_excluded_parameter_is_left_alone(seen: list[MadeUse | None]) -> None:
    case: Case = CASES["weight: low rank"]
    problem, oracle = case.build(3), oracle_of(case.name, 3)
    run(problem, extensions.BatchGrad(exclude=["w"]), extensions.BatchL2Grad(exclude=["w", "up"]))
    assert collect(problem, "grad_batch").keys() == {"up", "down", "b.weight", "b.bias"}
    assert collect(problem, "batch_l2").keys() == {"down", "b.weight", "b.bias"}
    for name, value in collect(problem, "grad_batch").items():
        close(value, oracle.grad_batch[name])
    for name, value in collect(problem, "batch_l2").items():
        close(value, oracle.batch_l2[name])
    assert all(seen)


class Masked(Module):
    """A layer with a mask, in a model that computes in mixed precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Parameter(torch.randn(4, 3)), Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * torch.ones_like(self.weight).tril(), self.bias * 2)


def test_mixed_precision(seen: list[MadeUse | None]) -> None:
    """Under autocast, the products are formed in half precision and summed in single precision."""
    torch.manual_seed(0)
    model, lossfunc, x, y = extend(Sequential(Masked(), Linear(4, 3))), extend(CrossEntropyLoss()), torch.randn(5, 3), torch.randint(3, (5,))
    with backpack(extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.Variance()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = lossfunc(model(x), y)
        loss.backward()
    found = {name: (p.grad_batch, p.batch_l2, p.variance) for name, p in model.named_parameters()}
    with backpack(extensions.BatchGrad()):
        lossfunc(model(x), y).backward()
    for name, parameter in model.named_parameters():
        expected = parameter.grad_batch
        wanted = expected, expected.flatten(1).square().sum(1), expected.var(0, correction=0)
        for value, exact in zip(found[name], wanted, strict=True):
            assert value.dtype == torch.float32
            close(value, exact, 0.05)
    assert all(seen)


@pytest.mark.parametrize("samples", [0, 1])
def test_few_samples(samples: int) -> None:
    model, lossfunc = extend(Sequential(Masked(), Linear(4, 3))), extend(CrossEntropyLoss(reduction="sum"))
    with backpack(extensions.BatchGrad(), extensions.SumGradSquared()):
        lossfunc(model(torch.randn(samples, 3)), torch.zeros(samples, dtype=torch.long)).backward()
    for parameter in model.parameters():
        assert parameter.grad_batch.shape == (samples, *parameter.shape)
        close(parameter.sum_grad_squared, parameter.grad_batch.square().sum(0), 1e-6)


class Curved(Module):
    """A layer with a curved weight, which may have no inputs."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight, self.scale = Parameter(torch.randn(4, inputs).double()), Parameter(torch.randn(4, 1).double())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.exp() / self.scale.exp())


@pytest.mark.parametrize("inputs", [0, 1, 3])
@pytest.mark.parametrize("samples", [0, 1, 3])
def test_diagonals_of_few_entries(inputs: int, samples: int) -> None:
    """The Hessian diagonal of an empty mini-batch, of empty weights, and of single columns."""
    torch.manual_seed(0)
    model, lossfunc = extend(Sequential(Curved(inputs), nn.Tanh(), Linear(4, 3).double())), extend(CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(samples, inputs).double(), torch.arange(samples) % 3
    with backpack(extensions.DiagHessian(), extensions.BatchDiagHessian()):
        lossfunc(model(x), y).backward()
    for name, parameter in model.named_parameters():

        def loss(value: Tensor, name: str = name) -> Tensor:
            return lossfunc(torch.func.functional_call(model, {name: value}, (x,)), y)

        entries = parameter.numel()
        hessian = torch.autograd.functional.hessian(loss, parameter.detach().clone()).reshape(entries, entries) if entries * samples else None
        expected = torch.zeros_like(parameter).detach() if hessian is None else hessian.diagonal().reshape(parameter.shape)
        assert parameter.diag_h.shape == parameter.shape
        assert parameter.diag_h_batch.shape == (samples, *parameter.shape)
        torch.testing.assert_close(parameter.diag_h, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parameter.diag_h_batch.sum(0), expected, rtol=1e-9, atol=1e-12)


def test_nothing_is_left_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lossfunc = extend(Sequential(Masked(), nn.Tanh(), Masked())), extend(CrossEntropyLoss())
    model[2].weight = Parameter(torch.randn(4, 4))

    def fail(self: MadeUse) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(MadeUse, "carry", fail)
    with pytest.raises(RuntimeError, match="out of memory"), backpack(extensions.BatchGrad()):
        lossfunc(model(torch.randn(3, 3)), torch.tensor([0, 1, 2])).backward()
    assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())


HALF = ["weight norm", "spectral norm", "of probabilities", "normalized rows", "standardized, no positions", "quantized", "low rank of length one"]
HALF += ["Hadamard product of low ranks", "tensor train", "block diagonal", "summed up", "rows that are chosen", "reflections"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Norms are saved in single precision there."""
    problem, oracle = CASES[f"weight: {name}"].build(3), oracle_of(f"weight: {name}", 3)
    model = extend(problem.model.to(dtype))
    with backpack(extensions.BatchL2Grad(), extensions.SumGradSquared()):
        extend(problem.losses[0])(model(problem.x.to(dtype)), problem.terms[0].target).backward()
    for parameter, gradients in oracle.grad_batch.items():
        found = dict(model.named_parameters())[parameter]
        for value, expected in ((found.batch_l2, gradients.flatten(1).square().sum(1)), (found.sum_grad_squared, gradients.square().sum(0))):
            torch.testing.assert_close(value.double(), expected, rtol=0.2, atol=0.1 * expected.max().item())


MADE_IN_FRONT = {
    "divided by norms of rows": lambda w, x: F.linear(x, F.normalize(w, dim=1)),
    "divided by the norm": lambda w, x: F.linear(x, w / w.norm()),
    "times a vector": lambda w, x: F.linear(x, w / (w @ w.detach()[0]).norm()),
    "joined": lambda w, x: F.linear(x, torch.cat([w[:, :1], w[:, 1:].tanh()], 1)),
    "table": lambda w, x: F.embedding((x[:, 0] > 0).long(), w / w.norm()),
}


class Chosen(Module):
    """Rows that a test chooses, none if none fulfils it, go through a curved branch behind a weight that is made."""

    def __init__(self, name: str, least: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.branch, self._make, self._least = Parameter(torch.randn(3, 3)), Linear(3, 3), MADE_IN_FRONT[name], least
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self._make(self.w, x)
        rows = (h.sum(1) > self._least).nonzero().flatten()
        return h.index_add(0, rows, self.branch(h[rows].tanh()).sigmoid())


@pytest.mark.parametrize("least", [1e3, 0.0])
@pytest.mark.parametrize("name", MADE_IN_FRONT)
def test_branches_that_no_row_takes(name: str, least: float) -> None:
    """As idle experts: no columns are born there."""
    model, x, y = extend(Chosen(name, least)), torch.randn(5, 3).double(), torch.randn(5, 3).double()
    with backpack(extensions.DiagHessian(), extensions.BatchDiagHessian()):
        F.mse_loss(model(x), y, reduction="sum").backward()
    for parameter in model.parameters():
        rows = []
        for n in range(len(x)):
            (slope,) = torch.autograd.grad(F.mse_loss(model(x[n : n + 1]), y[n : n + 1], reduction="sum"), parameter, create_graph=True)
            entries = [torch.autograd.grad(entry, parameter, retain_graph=True)[0].flatten()[i] for i, entry in enumerate(slope.flatten())]
            rows.append(torch.stack(entries).reshape(parameter.shape))
        close(parameter.diag_h_batch, torch.stack(rows))
        close(parameter.diag_h, sum(rows))


class Subtracted(Module):
    """A function of the input and a parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.function = Parameter(torch.randn(*shape)), function
        self.register_buffer("constant", torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.constant)


@pytest.mark.parametrize(
    "function",
    [lambda x, w, c: F.linear(x, c - w), lambda x, w, c: x @ (c - w).T, lambda x, w, c: F.linear(x, torch.rsub(w, c))],
    ids=["linear", "product", "rsub"],
)
def test_weight_that_is_subtracted_from_a_constant(function: Callable) -> None:
    model, x = extend(Subtracted(function, 4, 3).double()), torch.randn(5, 3, dtype=torch.float64)
    alone = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), model.weight)[0] for n in range(len(x))]
    with backpack(extensions.BatchGrad()):
        model(x).square().sum().backward()
    torch.testing.assert_close(model.weight.grad_batch, torch.stack(alone))
