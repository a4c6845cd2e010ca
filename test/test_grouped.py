"""Rows that are multiplied with one matrix of a stack each, by one operation, as in a mixture of experts: it exists in single precision only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases_nets import Net, parameter
from oracle import Problem
from table import classify, default_dtype
from test_extensions import QUANTITIES, run
from test_lstm import NAMES, agree, planned
from torch import Tensor
from torch.nn import Linear
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions
from backpack.core.graph import operation
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder import hbp
from backpack.utils.errors import UnsupportedError

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped(rows: Tensor, stack: Tensor, chosen: Tensor) -> Tensor:
    """Multiply sorted rows with the matrices that they have chosen."""
    return F.grouped_mm(rows, stack, offs=torch.bincount(chosen, minlength=len(stack)).cumsum(0).int())


def one_by_one(rows: Tensor, stack: Tensor, chosen: Tensor) -> Tensor:
    """Do the same by definition."""
    return torch.cat([rows[chosen == e] @ stack[e] for e in range(len(stack))])


def routed(net: Net, x: Tensor, product: Product, stacks: Callable[[Net], list[Tensor]], idle: int = 3) -> Tensor:
    """Let each position choose one of three experts; nobody chooses the one that is idle."""
    h = net.a(x)
    rows = h.reshape(-1, h.shape[-1])
    number = torch.arange(len(rows))
    chosen = (number * 7 + number // 3) % 3
    chosen = torch.where(chosen == idle, 0, chosen)
    order = chosen.argsort(stable=True)
    out = rows[order]
    for stack in stacks(net):
        out = product(out, stack, chosen[order]).tanh()
    out = torch.zeros_like(rows).index_copy(0, order, out).reshape(h.shape)
    return net.b(out if x.dim() == 2 else out.mean(1))


def one_by_one_too(net: Net, x: Tensor, product: Product) -> Tensor:
    """Use the stack in another way, too."""
    return net.b(product(torch.tanh(net.a(x) @ net.w[1] @ net.w[0]), net.w, torch.arange(len(x)) // 2).tanh())


def sorted_samples(net: Net, x: Tensor, product: Product) -> Tensor:
    """Multiply samples as they come."""
    return net.b(product(net.a(x), net.w, torch.arange(len(x)) // 2).tanh())


def parts() -> dict:  # noqa: D103
    return {"a": Linear(3, 8), "w": parameter(3, 8, 8)(), "b": Linear(8, 4)}


CASES: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "positions": (partial(routed, stacks=lambda net: [net.w]), (4, 3)),
    "one position": (partial(routed, stacks=lambda net: [net.w]), (3,)),
    "transposed": (partial(routed, stacks=lambda net: [net.w.transpose(1, 2)]), (4, 3)),
    "twice": (partial(routed, stacks=lambda net: [net.w, net.w]), (4, 3)),
    "idle": (partial(routed, stacks=lambda net: [net.w], idle=1), (5, 3)),
    "computed": (partial(routed, stacks=lambda net: [net.w.sin()]), (4, 3)),
    "sorted": (sorted_samples, (3,)),
    "one by one, too": (one_by_one_too, (3,)),
}
CASES = CASES if hasattr(F, "grouped_mm") else {}  # new in torch 2.10


def build(name: str, N: int, dtype: torch.dtype = torch.float32, product: Product = grouped) -> Problem:
    """Build a model, with the same numbers in all precisions."""
    forward, shape = CASES[name]
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.default_generator.manual_seed(0)
        problem = classify(Net(partial(forward, product=product), **parts()), torch.randn(N, *shape))
    problem.model.to(dtype)
    problem.x = problem.x.to(dtype)
    return problem


@pytest.mark.parametrize("extension", [*NAMES, "DiagHessian", "BatchDiagHessian"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("N", [1, 3])
def test_against_oracle(extension: str, name: str, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle sees products with one matrix after the other, in double precision."""
    problem, quantity = build(name, N), QUANTITIES[extension]
    if name == "computed" and extension in ("KFLR", "KFAC"):
        with pytest.raises(UnsupportedError, match="w of shape .* Kronecker factors"):
            run(problem, quantity.make())
        return
    agree(monkeypatch, quantity, problem, build(name, N, torch.float64, one_by_one))


@pytest.mark.parametrize("name", CASES)
def test_products_are_read(name: str) -> None:
    plan = planned(build(name, 3))
    assert "GroupedMm" in {operation(node) for node in plan.units}
    assert "GroupedMm" not in map(operation, plan.gaps)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("make", [extensions.BatchGrad, extensions.BatchDiagGGNExact, extensions.BatchDiagHessian])
def test_chosen_samples(name: str, make: Callable[..., BackpropExtension]) -> None:
    every, some = build(name, 4), build(name, 4)
    run(every, make())
    run(some, make(subsampling=[3, 0]))
    for whole, part in zip(every.model.parameters(), some.model.parameters(), strict=True):
        torch.testing.assert_close(getattr(part, make().savefield), getattr(whole, make().savefield)[[3, 0]])


@pytest.mark.filterwarnings("error", "ignore:Using backward:UserWarning")  # of torch, about create_graph
@pytest.mark.parametrize("name", CASES)
def test_results_can_be_differentiated(name: str) -> None:
    """The gradient of a norm of results is that of the same model by definition."""
    found = []
    for problem in (build(name, 3), build(name, 3, torch.float64, one_by_one)):
        for module in (problem.model, *problem.losses):
            extend(module)
        with backpack(extensions.BatchL2Grad(), extensions.DiagGGNExact()):
            problem.loss(problem.outputs()).backward(create_graph=True)
        total = sum(p.batch_l2.square().sum() + p.diag_ggn_exact.square().sum() for p in problem.model.parameters())
        found.append(torch.autograd.grad(total, [problem.model.w, problem.model.a.weight]))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["positions", "twice", "idle"])
@pytest.mark.parametrize("product", [grouped, one_by_one])
def test_no_mean_inputs_of_experts(name: str, product: Product) -> None:
    """Which rows of two samples go together is not known where experts see some of them."""
    options = (hbp.LossHessianStrategy.EXACT, hbp.BackpropStrategy.SQRT, hbp.ExpectationApproximation.CHEN)
    with pytest.raises(UnsupportedError, match="Mean inputs .* an expert for its rows"):
        run(build(name, 3, product=product), extensions.HBP(hbp.Curvature.GGN, *options))


def test_checkpointed() -> None:
    """What would have to be computed again is crossed node by node."""
    problem, truth = build("positions", 3), build("positions", 3)
    inner = problem.model.forward
    problem.model.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    run(problem, extensions.BatchGrad())
    run(truth, extensions.BatchGrad())
    for part, whole in zip(problem.model.parameters(), truth.model.parameters(), strict=True):
        torch.testing.assert_close(part.grad_batch, whole.grad_batch)
