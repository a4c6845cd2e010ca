"""Compiled models: numbers are right, or refused with a way out that works; and nothing stands in the way of compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import Oracle, Problem
from test_front_door import FIELDS, Net, build, chain, check_step, results
from test_front_door import check as check_fields
from torch import Tensor, nn
from torch.nn import Linear, Module, ReLU, Sequential, Tanh
from torch.nn import functional as F

from backpack import backpack, clear, disable, extend
from backpack.extensions import HMP, KFLR, BatchGrad, DiagGGNExact, DiagHessian, Variance
from backpack.utils.differentiation import compiled
from backpack.utils.errors import BackpackError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning")

Call = Callable[..., Tensor]
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """What one test has compiled is none of the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Each arrangement returns what to call as the model and as the loss. The parameters are those of ``problem.model``.


def model_before(problem: Problem, backend: str) -> tuple[Call, Call]:
    return extend(torch.compile(problem.model, backend=backend)), extend(problem.losses[0])


def model_after(problem: Problem, backend: str) -> tuple[Call, Call]:
    return torch.compile(extend(problem.model), backend=backend), extend(problem.losses[0])


def in_place_before(problem: Problem, backend: str) -> tuple[Call, Call]:
    problem.model.compile(backend=backend)
    return extend(problem.model), extend(problem.losses[0])


def in_place_after(problem: Problem, backend: str) -> tuple[Call, Call]:
    extend(problem.model).compile(backend=backend)
    return problem.model, extend(problem.losses[0])


def layer_before(problem: Problem, backend: str) -> tuple[Call, Call]:
    problem.model[0].compile(backend=backend)
    return extend(problem.model), extend(problem.losses[0])


def layer_after(problem: Problem, backend: str) -> tuple[Call, Call]:
    extend(problem.model)[2].compile(backend=backend)
    return problem.model, extend(problem.losses[0])


def activation(problem: Problem, backend: str) -> tuple[Call, Call]:
    problem.model[1] = torch.compile(Tanh(), backend=backend)
    return extend(problem.model), extend(problem.losses[0])


def layer_inside_of_another_model(problem: Problem, backend: str) -> tuple[Call, Call]:
    return extend(Sequential(torch.compile(problem.model[:2], backend=backend), problem.model[2])), extend(problem.losses[0])


def loss(problem: Problem, backend: str) -> tuple[Call, Call]:
    return extend(problem.model), torch.compile(extend(problem.losses[0]), backend=backend)


def function_as_loss(problem: Problem, backend: str) -> tuple[Call, Call]:
    return extend(problem.model), torch.compile(F.cross_entropy, backend=backend)


def head_and_loss(problem: Problem, backend: str) -> tuple[Call, Call]:
    extend(problem.model)
    return problem.model[:2], torch.compile(lambda hidden, target: F.cross_entropy(problem.model[2](hidden), target), backend=backend)


def everything(problem: Problem, backend: str) -> tuple[Call, Call]:
    model, lossfunc = extend(problem.model), extend(problem.losses[0])
    return (lambda x: x), torch.compile(lambda x, target: lossfunc(model(x), target), backend=backend)


ARRANGEMENTS = [
    model_before,
    model_after,
    in_place_before,
    in_place_after,
    layer_before,
    layer_after,
    activation,
    layer_inside_of_another_model,
    loss,
    function_as_loss,
    head_and_loss,
    everything,
]
EXACT = {
    "eager": {model_before, layer_before, layer_after, activation, layer_inside_of_another_model, loss, function_as_loss},
    "aot_eager": set(),
    "inductor": set(),
}
"""Where quantities exist: with a backend that changes nothing, autograd's graph is that of the model."""


def compare(problem: Problem, oracle: Oracle, *fields: str) -> None:
    """Compare fields of all parameters with the truth, by position: compiled modules have other names."""
    for field in fields:
        for param, expected in zip(problem.model.parameters(), FIELDS[field](oracle).values(), strict=True):
            assert (getattr(param, field) - expected).abs().amax() <= 1e-9 * expected.abs().amax() + 1e-14


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_right_or_refused(arrangement: Callable, backend: str) -> None:
    """No number is missing without an error, which names a way out; this works."""
    oracle = Oracle(build())
    for exts in ((BatchGrad(), Variance()), (DiagGGNExact(),)):
        torch._dynamo.reset()
        problem = build()
        model, lossfunc = arrangement(problem, backend)
        fields = [ext.savefield for ext in exts]
        first_order = fields != ["diag_ggn_exact"]
        exact = arrangement in EXACT[backend] or (first_order and arrangement in (loss, function_as_loss))
        try:
            with backpack(*exts):
                lossfunc(model(problem.x), problem.terms[0].target).backward()
        except BackpackError as refusal:
            assert not exact, refusal
            if (backend, arrangement) != ("eager", head_and_loss):  # a function whose graph tells nothing of a compiler
                assert ("was compiled" if backend != "eager" else "compiled") in str(refusal)
                assert "force_eager" in str(refusal)
            assert results(problem.model) == {}
            assert all(p.grad is None for p in problem.model.parameters())
        else:
            assert exact
            compare(problem, oracle, *fields)
            clear(problem.model)
        with torch.compiler.set_stance("force_eager"), backpack(*exts):
            lossfunc(model(problem.x), problem.terms[0].target).backward()
        compare(problem, oracle, *fields)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [chain, Net])
def test_training_compiled_and_quantities_now_and_then(make: Callable[[], Module], backend: str) -> None:
    """The way to use both: the compiled model for steps, the extended one it was made of for quantities."""
    problem, plain = build(make), build(make)
    model, lossfunc = extend(problem.model), extend(problem.losses[0])
    fast = torch.compile(model, backend=backend)
    for _ in range(2):
        for each in (problem, plain):
            each.model.zero_grad()
        lossfunc(fast(problem.x), problem.terms[0].target).backward()
        plain.loss(plain.outputs()).backward()
        for p, q in zip(model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        with backpack(BatchGrad(), DiagGGNExact()):
            lossfunc(model(problem.x), problem.terms[0].target).backward()
        check_fields(model, "grad_batch", "diag_ggn_exact", make=make)
        clear(model)


@pytest.mark.parametrize("extension", [DiagHessian, KFLR, HMP])
def test_other_flows_refuse(extension: type) -> None:
    problem = build()
    model, lossfunc = activation(problem, "aot_eager")
    with pytest.raises(BackpackError, match="force_eager"), backpack(extension()):
        lossfunc(model(problem.x), problem.terms[0].target).backward()
    assert results(problem.model) == {}
    assert all(p.grad is None for p in problem.model.parameters())


def test_importing_changes_no_class_of_torch() -> None:
    """Names in ``dir(module)`` that cannot be read would break compilation, for models that are not extended, too."""
    assert not [name for name in dir(Module) if name.startswith(("input", "output"))]
    module = Linear(2, 2)
    x = torch.rand(3, 2)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_extended_modules_compile_into_one_graph(backend: str) -> None:
    """The hooks of ``extend`` neither break the graph nor, in whatever context, lead to a second compilation."""

    class InPlace(Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Sequential(Linear(4, 5), nn.ReLU(inplace=True)), Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model, x = extend(InPlace()), torch.rand(2, 4)
    fast = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), model(x))
    with torch.compiler.set_stance("fail_on_recompile"):
        for context in (backpack(BatchGrad()), disable(), backpack(DiagGGNExact(), retain_graph=True)):
            with context:
                torch.testing.assert_close(fast(x), model(x))


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it cannot compile
def test_step_compiled_as_a_whole() -> None:
    """A function with the context and the backward pass inside: right or refused."""
    problem = build()
    model, lossfunc = extend(problem.model), extend(problem.losses[0])

    @torch.compile(backend="eager")
    def step(x: Tensor, target: Tensor) -> None:
        with backpack(BatchGrad()):
            lossfunc(model(x), target).backward()

    try:
        step(problem.x, problem.terms[0].target)
    except BackpackError as refusal:
        assert "force_eager" in str(refusal)
        assert results(model) == {}
    else:
        check_fields(model, "grad_batch")


# --- CUDA graphs ------------------------------------------------------------------------------------------------------------------------------


def test_cuda_graphs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is replayed is a node of a class of ``torch.cuda.graphs``; here one that looks like it, on a CPU."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)

    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": "torch.cuda.graphs"}
    graphed = type("Graphed", (torch.autograd.Function,), methods)
    problem = build()
    model, lossfunc = extend(problem.model), extend(problem.losses[0])
    with pytest.raises(BackpackError, match="CUDA graph.*2.weight"), backpack(BatchGrad()):
        lossfunc(graphed.apply(model[:2](problem.x), *model[2].parameters()), problem.terms[0].target).backward()
    assert results(model) == {}
    for question in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, question, lambda: True)
    with pytest.raises(BackpackError, match="captured"), backpack(BatchGrad()):
        lossfunc(model(problem.x), problem.terms[0].target).backward()
    assert results(model) == {}
    monkeypatch.undo()
    check_step(problem)


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_traced_models(layered: bool, batch_size: int) -> None:
    """They have no modules, so that quantities are followed through their graph."""
    torch.manual_seed(0)
    plain = Sequential(Linear(4, 3), Tanh(), Linear(3, 2)) if layered else Linear(4, 2)
    traced, x, found = torch.jit.trace(plain, torch.rand(5, 4)), torch.rand(batch_size, 4), []
    for model in (plain, traced):
        with backpack(BatchGrad(), DiagGGNExact(), KFLR()):
            F.cross_entropy(extend(model)(x), torch.arange(batch_size) % 2).backward()
        found.append([(p.grad_batch, p.diag_ggn_exact, *p.kflr) for p in model.parameters()])
        clear(model)
    torch.testing.assert_close(*found)


def test_tracing_an_extended_model() -> None:
    """Nothing is recorded in the meantime: torch compares two traces, in which values would have other names."""
    model, x, y = extend(Sequential(Linear(4, 3), ReLU(inplace=True), Sequential(Linear(3, 2)))), torch.rand(5, 4), torch.arange(5) % 2
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), model(x))
    with backpack(BatchGrad()):
        F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_nothing_else_counts_as_compiled() -> None:
    x = torch.rand(2, requires_grad=True)
    double = type("CompiledFunction", (torch.autograd.Function,), {"forward": lambda _, x: 2 * x, "backward": lambda _, g: 2 * g})
    assert not compiled(double.apply(x).grad_fn)
    assert not compiled(x.exp().grad_fn)
    assert compiled(torch.compile(torch.exp, backend="aot_eager")(x).grad_fn)
