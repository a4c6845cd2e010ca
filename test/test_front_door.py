"""``extend``, ``backpack``, ``disable`` and their companions: what they promise, what they leave alone, and how they refuse bad input."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.nn import CrossEntropyLoss, Linear, Module, MSELoss, Parameter, ReLU, Sequential, Tanh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

import backpack as package
from backpack import CTX, backpack, clear, disable, explain, extend, extensions, memory_cleanup, results, unextend
from backpack.core.owners import owners
from backpack.core.state import recording
from backpack.extensions import HBP, HMP, KFAC, BatchGrad, BatchL2Grad, DiagGGNExact, DiagGGNMC, SqrtGGNExact, SumGradSquared, Variance
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import BackpropStrategy, Curvature, ExpectationApproximation, LossHessianStrategy
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils.errors import BackpackError, NotRecordedError, UnsupportedError

N = 6

FIELDS: dict[str, Callable[[Oracle], dict[str, Tensor]]] = {
    "grad_batch": lambda oracle: oracle.grad_batch,
    "batch_l2": lambda oracle: oracle.batch_l2,
    "variance": lambda oracle: oracle.variance,
    "diag_ggn_exact": lambda oracle: sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)),
}


class Net(Module):
    """Containers inside a container with a forward of its own; functional operations and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Sequential(Linear(4, 5), Tanh(), Linear(5, 4))
        self.head = Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(x + self.body(x)))


def chain() -> Module:
    return Sequential(Linear(4, 5), Tanh(), Linear(5, 3))


def build(make: Callable[[], Module] = chain, samples: int = N) -> Problem:
    """A model with its data, the same numbers at each call."""
    torch.manual_seed(3)
    x, target = torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
    return Problem(make().double(), x[:samples], [Term(CrossEntropyLoss(), target[:samples])])


@cache
def truth(make: Callable[[], Module] = chain) -> Oracle:
    return Oracle(build(make))


def extended(make: Callable[[], Module] = chain) -> Problem:
    problem = build(make)
    extend(problem.model)
    extend(problem.terms[0].module)
    return problem


def loss_of(problem: Problem) -> Tensor:
    return problem.loss(problem.outputs())


def values(model: Module, field: str) -> dict[str, Any]:
    return {name: fields[field] for name, fields in results(model).items() if field in fields}


def check(model: Module, *fields: str, make: Callable[[], Module] = chain) -> None:
    """Compare fields of all parameters with the truth."""
    for field in fields:
        found, expected = values(model, field), FIELDS[field](truth(make))
        assert found.keys() == expected.keys()
        for name, value in found.items():
            close(value.detach(), expected[name])


def one_by_one(problem: Problem) -> dict[str, Tensor]:
    """Per-sample gradients from mini-batches of one sample; sees all that the user's hooks do."""
    params = dict(problem.model.named_parameters())
    rows = []
    for n in range(len(problem.x)):
        loss = problem.terms[0].module(problem.model(problem.x[n : n + 1]), problem.terms[0].target[n : n + 1])
        rows.append(torch.autograd.grad(loss / len(problem.x), list(params.values())))
    return dict(zip(params, map(torch.stack, zip(*rows, strict=True)), strict=True))


def check_step(problem: Problem, make: Callable[[], Module] = chain) -> None:
    """The next step is right: quantities, and gradients bit by bit."""
    clear(problem.model)
    problem.model.zero_grad()
    with backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", make=make)
    plain = build(make)
    plain.loss(plain.outputs()).backward()
    for name, param in problem.model.named_parameters():
        if param.requires_grad:
            assert torch.equal(param.grad, plain.model.get_parameter(name).grad)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hook_counts(module: Module) -> dict[str, list[int]]:
    return {name: [len(getattr(child, group)) for group in HOOKS] for name, child in module.named_modules()}


# --- extend -----------------------------------------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    for name in "backpack extend disable memory_cleanup convert_module_to_backpack CTX BackpropExtension extensions no_op is_no_op".split():
        assert hasattr(package, name)


def test_extend_returns_the_same_object_and_marks_it() -> None:
    model, lossfunc = Net(), MSELoss()
    assert extend(model) is model
    assert extend(lossfunc) is lossfunc
    for module in (model, model.body[0], model.body[1], model.body[2], model.head, lossfunc):
        assert module._backpack_extend is True
    assert not hasattr(model.body, "_backpack_extend")  # computes nothing of its own


def test_extend_is_idempotent() -> None:
    problem = extended()
    counts = hook_counts(problem.model)
    assert extend(problem.model) is problem.model
    extend(problem.model[0])
    assert hook_counts(problem.model) == counts
    visited = []
    with backpack(BatchGrad(), DiagGGNExact(), extension_hook=visited.append):
        loss_of(problem).backward()
    assert len(visited) == len(set(visited)) == 4
    check(problem.model, "grad_batch", "diag_ggn_exact")


def test_extend_a_part_then_the_whole() -> None:
    problem = build(Net)
    for part in (problem.model.head, problem.model, problem.losses[0]):
        extend(part)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", make=Net)


def test_extend_debug(capsys: pytest.CaptureFixture) -> None:
    extend(Net(), debug=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6  # one for each module
    assert lines[-1].endswith("Net")  # children first
    assert sum("body.0: Linear" in line for line in lines) == 1
    extend(Net())
    assert capsys.readouterr().out == ""


class Residual(Module):
    """Nothing but modules and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Sequential(Linear(4, 5), Tanh(), Linear(5, 4)), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.body(x))


@pytest.mark.parametrize("before", [False, True], ids=["fresh", "already extended"])
def test_use_converter(before: bool) -> None:
    problem = build(Residual)
    params = list(problem.model.parameters())
    if before:
        extend(problem.model)
    converted = extend(problem.model, use_converter=True)
    assert isinstance(converted, torch.fx.GraphModule)
    assert [id(p) for p in converted.parameters()] == [id(p) for p in params]
    extend(problem.losses[0])
    with backpack(BatchGrad(), DiagGGNExact()):
        problem.losses[0](converted(problem.x), problem.terms[0].target).backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", make=Residual)
    assert not recording.open


def contents(model: Module) -> list[dict[str, Any]]:
    """Everything that a module consists of; dictionaries are copied."""
    return [{key: dict(v) if isinstance(v, dict) else v for key, v in vars(module).items()} for module in model.modules()]


def test_unextend_leaves_no_trace() -> None:
    problem = build(Net)
    problem.model.head.register_forward_hook(lambda *_: None)
    problem.model.head.register_forward_pre_hook(lambda *_: None)
    before = contents(problem.model)
    extend(problem.model)
    extend(problem.losses[0])
    with backpack(BatchGrad(), KFAC()):
        loss_of(problem).backward()
    loss = loss_of(problem)
    assert unextend(problem.model) is problem.model
    assert contents(problem.model) == before
    assert all(not vars(p) for p in problem.model.parameters())
    assert all(p not in owners for p in problem.model.parameters())
    with pytest.raises(AttributeError):
        problem.model.head.input0  # noqa: B018
    with backpack(BatchGrad()), pytest.raises(AttributeError, match="extend"):  # the loss is extended, the model forgotten
        loss.backward()
    unextend(problem.losses[0])
    with backpack(BatchGrad()):  # nothing is extended any more: nothing to do
        loss_of(problem).backward()
    assert results(problem.model) == {}
    unextend(problem.model)  # harmless
    extend(problem.model)
    extend(problem.losses[0])
    problem.model.zero_grad()
    check_step(problem, Net)


def test_unextend_a_part() -> None:
    """The rest of the model is exact as before, the part carries nothing."""
    problem = extended()
    unextend(problem.model[2])
    with backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward()
    for field in ("grad_batch", "diag_ggn_exact"):
        found = values(problem.model, field)
        assert list(found) == ["0.weight", "0.bias"]
        for name, value in found.items():
            close(value, FIELDS[field](truth())[name])
    extend(problem.model)
    check_step(problem)


def test_unextend_a_module_that_shares_a_parameter() -> None:
    """The parameter still belongs to a module that is extended: refused, or exact, but not forgotten."""
    first, second = Linear(3, 3), Linear(3, 3)
    second.weight = first.weight
    model = extend(Sequential(first, Tanh(), second).double())
    x, target = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
    model(x)
    unextend(second)
    with backpack(BatchGrad()):
        F.mse_loss(model(x), target).backward()
    close(first.weight.grad_batch.sum(0), first.weight.grad)


def test_names_and_state_are_unchanged() -> None:
    plain, model = Net(), extend(Net())
    assert list(model.state_dict()) == list(plain.state_dict())
    for listing in (Module.named_parameters, Module.named_buffers, Module.named_modules):
        assert [name for name, _ in listing(model)] == [name for name, _ in listing(plain)]
    assert repr(model) == repr(plain)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.head.weight, plain.head.weight)


@pytest.mark.parametrize("make", [chain, Net])
def test_nothing_changes_outside_of_a_context(make: Callable[[], Module]) -> None:
    """Outputs, gradients and random numbers, bit by bit; no fields; no views, hence operations in place work."""
    plain, problem = build(make), extended(make)
    state = torch.get_rng_state()
    for _ in range(2):
        losses = [loss_of(p) for p in (plain, problem)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for p, q in zip(plain.model.parameters(), problem.model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert not vars(q)
    torch.set_rng_state(state)
    loss_of(problem)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    loss_of(plain)
    assert torch.equal(after, torch.get_rng_state())
    with torch.no_grad():
        assert not problem.model(problem.x).add_(1).requires_grad
    assert not problem.model(problem.x)._is_view()


def copy_by_pickle(model: Module) -> Module:
    return pickle.loads(pickle.dumps(model))


def copy_by_save(model: Module) -> Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy_by_pickle, copy_by_save])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after a pass"])
def test_copies(duplicate: Callable[[Module], Module], used: bool) -> None:
    """A copy is an extended model of its own, exact, and independent of the original."""
    problem = extended(Net)
    if used:
        with backpack(BatchGrad()):
            loss_of(problem).backward()
        clear(problem.model)
        problem.model.zero_grad()
    twin = build(Net)
    twin.model, twin.terms[0].module = duplicate(problem.model), problem.losses[0]
    assert hook_counts(twin.model) == hook_counts(problem.model)
    check_step(twin, Net)
    assert results(problem.model) == {}
    assert all(p.grad is None for p in problem.model.parameters())
    unextend(twin.model)
    assert all(counts == [0, 0, 0, 0] for counts in hook_counts(twin.model).values())
    check_step(problem, Net)


def test_replaced_parameter() -> None:
    """The parameter that is used counts, also where replacements come and go between two forward passes."""
    problem = extended()
    loss_of(problem).backward()
    old, layer = problem.model[0].weight, problem.model[0]
    for _ in range(20):
        layer.weight = Parameter(torch.zeros(5, 4, dtype=torch.float64))
        layer.weight = Parameter(old.detach().clone())
        check_step(problem)
    assert "grad_batch" not in vars(old)


def test_parameter_assigned_by_a_state_dictionary() -> None:
    problem = extended()
    problem.model.load_state_dict({name: p.clone() for name, p in problem.model.state_dict().items()}, assign=True)
    check_step(problem)


class Wrapper(Module):
    """Shows the attributes of the model inside, and puts rows of its own in front of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.prompt = Linear(4, 3), nn.Embedding(2, 4)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x: Tensor) -> Tensor:
        prompts = self.prompt(torch.arange(2)[None]).repeat(len(x), 1, 1)
        return self.base(torch.cat([prompts, x[:, None]], 1)).tanh().mean(1)


def test_wrapper_that_shows_attributes_of_its_model() -> None:
    """It is extended, although the model inside says that it is."""
    problem = extended(Wrapper)
    assert vars(problem.model)["_backpack_extend"]
    check_step(problem, Wrapper)


def test_extend_after_removing_all_hooks() -> None:
    """``CTX.remove_hooks()`` leaves the flags; ``extend`` asks for the hooks, too."""
    problem = extended()
    extend(problem.model)
    removed = Linear(2, 2)
    calls = []
    CTX.add_hook_handle(removed.register_forward_hook(lambda *_: calls.append(1)))
    CTX.remove_hooks()
    removed(torch.ones(1, 2))
    assert not calls
    assert all(counts == [0, 0, 0, 0] for counts in hook_counts(problem.model).values())
    assert problem.model._backpack_extend
    with backpack(BatchGrad()), pytest.raises(AttributeError, match="extend"):
        loss_of(problem).backward()
    explain(problem.model, problem.losses[0], problem.x, problem.terms[0].target, [BatchGrad()])
    assert all(counts == [0, 0, 0, 0] for counts in hook_counts(problem.model).values())
    for module in (problem.model, *problem.losses):
        extend(module)
    check_step(problem)


# --- contexts ---------------------------------------------------------------------------------------------------------------------------------


def settings() -> tuple:
    return CTX.get_active_exts(), CTX.get_debug(), CTX.get_extension_hook(), CTX.get_retain_graph()


def test_context_sets_and_restores() -> None:
    before, extension = settings(), BatchGrad()
    context = backpack(extension, extension_hook=print, debug=True, retain_graph=True)
    assert (context.exts, context.extension_hook, context.debug, context.retain_graph) == ((extension,), print, True, True)
    with context as entered:
        assert entered is None
        assert settings() == ((extension,), True, print, True)
        assert CTX.is_extension_active(BatchGrad)
        assert CTX.is_extension_active(Variance, BatchGrad)
        assert not CTX.is_extension_active(Variance)
    assert settings() == before == ((), False, package.no_op, False)
    with pytest.raises(ZeroDivisionError), context:
        raise ZeroDivisionError
    assert settings() == before


def test_settings_outside_of_contexts() -> None:
    """Those that existing code sets by itself hold until they are set again."""
    try:
        CTX.set_debug(True)
        CTX.set_retain_graph(True)
        assert settings() == ((), True, package.no_op, True)
    finally:
        CTX.set_debug(False)
        CTX.set_retain_graph(False)
    assert settings() == ((), False, package.no_op, False)


def test_nested_contexts_replace() -> None:
    problem, seen = extended(), []
    with backpack(BatchGrad(), extension_hook=lambda m: seen.append(("outer", m))):
        outer = settings()
        with backpack(Variance(), extension_hook=lambda m: seen.append(("inner", m))):
            loss_of(problem).backward()
        assert settings() == outer
        assert {field for fields in results(problem.model).values() for field in fields} == {"variance"}
        assert len(seen) == 4  # once for each module
        assert {name for name, _ in seen} == {"inner"}
        with backpack():
            loss_of(problem).backward()  # no extensions: nothing happens
        assert len(seen) == 4
        loss_of(problem).backward()
    check(problem.model, "variance", "grad_batch")
    assert {name for name, _ in seen[4:]} == {"outer"}


def test_nested_contexts_draw_once() -> None:
    """The random numbers of a nested context are those of a single one."""
    problem, draws = extended(), []
    for around in (nullcontext(), backpack(BatchGrad())):
        torch.manual_seed(0)
        loss = loss_of(problem)
        with around, backpack(DiagGGNMC(mc_samples=2)):
            loss.backward()
        draws.append((problem.model[0].weight.diag_ggn_mc, torch.get_rng_state()))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_context_entered_by_hand() -> None:
    problem, context = extended(), backpack(BatchGrad())
    context.__enter__()
    try:
        loss_of(problem).backward()
    finally:
        context.__exit__(None, None, None)
    check(problem.model, "grad_batch")
    assert not CTX.get_active_exts()


def test_same_context_twice() -> None:
    problem, context = extended(), backpack(BatchGrad())
    with context, context:
        pass
    assert not CTX.get_active_exts()
    for _ in range(2):
        with context:
            loss_of(problem).backward()
        check(problem.model, "grad_batch")
        clear(problem.model)
    with context:
        with context:
            pass
        loss_of(problem).backward()  # still inside of the outer one
    check(problem.model, "grad_batch")


def test_context_that_was_not_entered() -> None:
    """Neither here, nor once more, nor in another thread: an error says so, and what is active stays so."""
    problem, before, failures, shared = extended(), settings(), [], backpack(BatchGrad())

    def training() -> Any:
        with shared:
            while True:
                yield

    def close(one: Any) -> None:
        try:
            one.close()
        except UnsupportedError as error:
            failures.append(str(error))

    context = backpack(Variance())
    with pytest.raises(UnsupportedError, match="has not entered it"):
        context.__exit__(None, None, None)
    with context:
        pass
    with pytest.raises(UnsupportedError, match="has left it before"):
        context.__exit__(None, None, None)
    assert settings() == before
    one = training()
    next(one)
    thread = threading.Thread(target=close, args=(one,))
    thread.start()
    thread.join(60)
    assert len(failures) == 1 and "thread that has not entered it" in failures[0]
    loss_of(problem).backward()
    check(problem.model, "grad_batch")
    shared.__exit__(None, None, None)
    assert settings() == before
    assert type(torch.autograd.Variable._execution_engine).__name__ != "_WatchedEngine"


def test_contexts_that_are_left_in_another_order() -> None:
    """Training loops that are generators: the one that goes on keeps its extensions, and nothing is active in the end."""
    problem, before = extended(), settings()

    def training(*active: extensions.BackpropExtension, **options: Any) -> Any:
        with backpack(*active, **options):
            while True:
                yield

    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
        open_ones = [training(BatchGrad(), debug=True), training(Variance(), retain_graph=True), training(DiagGGNExact())]
        inside = [(next(one), settings())[1] for one in open_ones]
        left = [0, 1, 2]
        for i in order:
            open_ones[i].close()
            left.remove(i)
            assert settings() == (inside[left[-1]] if left else before)
        assert type(torch.autograd.Variable._execution_engine).__name__ != "_WatchedEngine"
        assert not recording.keep_all
    one, other = training(BatchGrad()), training(SumGradSquared())
    next(one), next(other)
    one.close()
    loss_of(problem).backward()
    other.close()
    assert {field for fields in results(problem.model).values() for field in fields} == {"sum_grad_squared"}
    close(problem.model[0].weight.sum_grad_squared, truth().grad_batch["0.weight"].square().sum(0))


def test_no_extensions() -> None:
    problem = extended()
    with backpack(retain_graph=True):
        loss_of(problem).backward()
    assert results(problem.model) == {}


@pytest.mark.parametrize("retain", [False, True])
def test_hook_without_extensions(retain: bool) -> None:
    """Each module once, containers behind what is inside, while what they have recorded is there; then it is given back."""
    problem, seen = extended(Net), []
    inputs = note_tensors(problem.model)

    def hook(module: Module) -> None:
        seen.append(module)
        if module in inputs and not isinstance(module, (Net, Sequential)):
            assert torch.equal(module.input0, inputs[module][0])
        assert all(parameter.grad is not None for parameter in module.parameters())

    loss = loss_of(problem)
    with backpack(extension_hook=hook):
        loss.backward(retain_graph=retain)
    modules = [module for module in problem.model.modules() if not isinstance(module, Sequential)]
    assert len(seen) == len(modules) + 1
    assert set(seen) == {*modules, problem.losses[0]}
    assert seen.index(problem.model) > max(seen.index(module) for module in modules if module is not problem.model)
    assert hasattr(problem.model.head, "input0") == retain
    seen.clear()
    with backpack():
        loss_of(problem).backward()
    assert seen == []


@pytest.mark.parametrize("extensions", [(), (BatchGrad(),)], ids=["alone", "beside an extension"])
def test_hook_that_calls_autograd(extensions: tuple) -> None:
    """Its passes are its own: the hook does not run in them; they may have a context."""
    problem, seen = extended(), []

    def hook(module: Module) -> None:
        seen.append(module)
        if isinstance(module, Linear):
            with torch.enable_grad():
                loss = module(torch.ones(2, module.in_features, dtype=module.weight.dtype)).sum()
            (gradient,) = torch.autograd.grad(loss, module.bias)
            assert torch.equal(gradient, torch.full_like(gradient, 2))
            with torch.enable_grad(), backpack(BatchL2Grad()):
                torch.autograd.grad(module(torch.ones(2, module.in_features, dtype=module.weight.dtype)).sum(), module.bias)
            close(module.bias.batch_l2, torch.full_like(gradient[:2], len(gradient)))

    with backpack(*extensions, extension_hook=hook):
        for _ in range(2):
            seen.clear()
            loss_of(problem).backward()
            assert set(seen) == {*problem.model, *problem.losses} and len(seen) == len(set(seen))


@pytest.mark.parametrize("where", ["extension", "tensor", "parameter", "module"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_passes_from_hooks(where: str, create_graph: bool, own: bool) -> None:
    """Under a context of their own they are passes as any other, without one they have no quantities; the pass outside goes on."""
    problem, other, passes = extended(), extended(), []

    def hook(*_: object) -> None:
        if not passes:
            passes.append(None)
            with torch.enable_grad(), backpack(BatchGrad()) if own else nullcontext():
                loss_of(other).backward()

    if where == "tensor":
        problem.model[0].register_forward_hook(lambda module, args, out: (out.register_hook(hook), None)[1])
    if where == "parameter":
        problem.model[2].weight.register_post_accumulate_grad_hook(hook)
    if where == "module":
        problem.model[2].register_full_backward_hook(hook)
    with warnings.catch_warnings(), backpack(BatchGrad(), DiagGGNExact(), **({"extension_hook": hook} if where == "extension" else {})):
        warnings.simplefilter("ignore")  # torch advises against backward with create_graph=True
        loss_of(problem).backward(create_graph=create_graph)
    assert passes
    for model in (problem.model, other.model) if own else (problem.model,):
        check(model, "grad_batch")
    assert own or (results(other.model) == {} and all(p.grad is not None for p in other.model.parameters()))
    assert hasattr(problem.model[0].weight, "diag_ggn_exact") and not hasattr(other.model[0].weight, "diag_ggn_exact")
    check_step(problem)


def test_pass_from_a_hook_through_the_same_graph() -> None:
    problem, passes = extended(), []

    def hook(_: Tensor) -> None:
        if not passes:
            passes.append(None)
            with backpack(BatchGrad()):
                torch.autograd.grad(loss, problem.model[0].weight, retain_graph=True)

    problem.model[2].register_forward_hook(lambda module, args, out: (out.register_hook(hook), None)[1])
    loss = loss_of(problem)
    with pytest.raises(BackpackError, match="inside of another one"), backpack(DiagGGNExact()):
        loss.backward()
    assert results(problem.model) == {}
    problem.model.zero_grad()
    check_step(problem)


def test_extensions_by_hand() -> None:
    """They run inside of a context; outside, where nothing runs, there is a warning."""
    problem = extended()
    with pytest.warns(UserWarning, match="no context is entered"):
        CTX.set_active_exts([BatchGrad()])
    CTX.set_active_exts(())
    with backpack():
        CTX.set_active_exts([BatchGrad()])
        loss_of(problem).backward()
    check(problem.model, "grad_batch")
    assert CTX.get_active_exts() == ()


def test_debug_prints(capsys: pytest.CaptureFixture) -> None:
    problem = extended()
    with backpack(BatchGrad(), debug=True, extension_hook=lambda _: None):
        loss_of(problem).backward()
    out = capsys.readouterr().out
    assert all(out.count(f"grad_batch of {name}\n") == 1 for name, _ in problem.model.named_parameters())
    assert out.count("xtension hook") == 4
    with backpack(BatchGrad()):
        loss_of(problem).backward()
    assert capsys.readouterr().out == ""


def test_disable() -> None:
    context = disable()
    assert disable.should_store_io()
    with context:
        with disable(), context:
            assert not disable.should_store_io()
        assert not disable.should_store_io()
    assert disable.should_store_io()
    with pytest.raises(ZeroDivisionError), context:
        raise ZeroDivisionError
    assert disable.should_store_io()


def test_disable_around_the_backward_pass() -> None:
    """It is about forward passes only."""
    problem = extended()
    loss = loss_of(problem)
    with backpack(BatchGrad(), DiagGGNExact()), disable():
        loss.backward()
    check(problem.model, "grad_batch", "diag_ggn_exact")


def test_threads_do_not_see_each_other() -> None:
    """Two threads enter contexts (also one and the same), one is in ``disable``, a third one is in none; they take turns step by step."""
    turns, shared, failures = threading.Barrier(3), backpack(BatchGrad()), []
    problems = [extended(), extended(Net), extended()]

    def work(number: int) -> None:
        try:
            problem, make = problems[number], (chain, Net, chain)[number]
            context = (shared, shared, nullcontext())[number]
            turns.wait(10)
            with context:
                turns.wait(10)
                assert len(CTX.get_active_exts()) == (1, 1, 0)[number]
                loss = loss_of(problem)
                with (nullcontext(), disable(), nullcontext())[number]:
                    turns.wait(10)
                    assert disable.should_store_io() == (number != 1)
                    loss.backward()
                turns.wait(10)
                if number < 2:
                    check(problem.model, "grad_batch", make=make)
                with backpack(Variance()) if number == 0 else nullcontext():
                    turns.wait(10)
                    loss_of(problem).backward()
                turns.wait(10)
                fields = {field for values in results(problem.model).values() for field in values}
                assert fields == ({"variance", "grad_batch"}, {"grad_batch"}, set())[number]
            assert not CTX.get_active_exts()
        except Exception as failure:  # noqa: BLE001
            failures.append(failure)
            turns.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not CTX.get_active_exts()


# --- recorded tensors -------------------------------------------------------------------------------------------------------------------------


def test_recorded_tensors_can_be_read() -> None:
    problem = extended()
    output = problem.model(problem.x)
    loss = problem.losses[0](output, problem.terms[0].target)
    first, lossfunc = problem.model[0], problem.losses[0]
    assert torch.equal(first.input0, problem.x)
    assert first.input0.shape == (N, 4)
    assert torch.equal(first.output, F.linear(problem.x, first.weight, first.bias))
    assert torch.equal(problem.model[1].output, first.output.tanh())
    assert torch.equal(problem.model[2].input0, problem.model[1].output)
    assert torch.equal(lossfunc.input0, output)
    assert torch.equal(lossfunc.input1, problem.terms[0].target)
    assert torch.equal(lossfunc.output, loss)
    assert not first.input0.requires_grad
    for missing in ("input1", "input7", "input8", "outputs"):
        assert not hasattr(first, missing)
    del output, loss
    assert not hasattr(first, "input0")  # they live as long as the graph


@pytest.mark.parametrize("keep", ["nothing", "context", "backward", "both"])
@pytest.mark.parametrize("computes", [True, False])
def test_recorded_tensors_after_a_backward_pass(keep: str, computes: bool) -> None:
    problem = extended()
    loss = loss_of(problem)
    with backpack(*[BatchGrad()] * computes, retain_graph=keep in ("context", "both")):
        loss.backward(retain_graph=keep in ("backward", "both"))
    for module in (problem.model[0], problem.losses[0]):
        assert hasattr(module, "input0") == (keep != "nothing")
    assert hasattr(problem.model[0], "output") == (keep != "nothing")
    if keep != "nothing":
        assert torch.equal(problem.model[0].input0, problem.x)
        assert torch.equal(problem.model[2].input0, problem.model[0](problem.x).tanh())
    if keep in ("nothing", "context"):
        with pytest.raises(RuntimeError):
            loss.backward()
    else:
        with backpack(DiagGGNExact()):
            loss.backward()
        check(problem.model, "diag_ggn_exact")
        assert not hasattr(problem.model[0], "input0")


class Between(Module):
    """A layer behind an operation that keeps nothing of its result."""

    def __init__(self, layer: Module, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.inplace = Linear(4, 4), layer, Linear(4, 3), inplace

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer((self.first(x) + 1).unsqueeze(1)).squeeze(1)
        return self.last(hidden.mul_(2) if self.inplace else hidden)


def note_tensors(model: Module) -> dict[Module, tuple[Tensor, Tensor]]:
    """What each module is given and returns, as plain hooks see it."""
    seen = {}
    for module in model.modules():
        module.register_forward_hook(lambda m, args, output: seen.update({m: (args[0].detach().clone(), output.detach().clone())}))
    return seen


def comparison(seen: dict[Module, tuple[Tensor, Tensor]]) -> tuple[Callable[[Module], None], set[Module]]:
    """A hook that compares what can be read on a module with what was seen, and the modules on which it did."""
    read = set()

    def compare(module: Module) -> None:
        if module in seen:
            assert torch.equal(module.input0, seen[module][0])
            assert torch.equal(module.output, seen[module][1])
            read.add(module)

    return compare, read


def test_recorded_tensors_of_neighbours() -> None:
    """What a layer does not keep is read where another one does, or computed from that."""
    layers = [
        Linear(4, 4),
        nn.Sigmoid(),
        ReLU(),
        nn.Unflatten(1, (1, 4)),
        nn.AvgPool1d(2, 1),
        nn.ConstantPad1d(1, 0.5),
        nn.Flatten(),
        ReLU(),
        Linear(5, 3),
    ]
    problem = extended(lambda: Sequential(*layers))
    compare, read = comparison(note_tensors(problem.model))

    loss = loss_of(problem)
    with backpack(BatchGrad(), extension_hook=compare):
        loss.backward(retain_graph=True)
    for module in layers:
        compare(module)
    assert read == set(layers)


LAYERS = [ReLU, Tanh, nn.Sigmoid, lambda: nn.Softmax(2), nn.GELU, nn.Dropout, lambda: nn.AvgPool1d(3, 1, 1), lambda: nn.ConstantPad1d(0, 1.0)]


@pytest.mark.parametrize("layer", LAYERS)
def test_recorded_tensors_under_a_context_that_keeps_them(layer: Callable[[], Module]) -> None:
    """All of them are kept, for the hook and for afterwards, and the quantities are the same."""
    problem = extended(lambda: Between(layer()))
    compare, read = comparison(note_tensors(problem.model))

    torch.manual_seed(0)
    with backpack(BatchGrad(), DiagGGNExact(), retain_graph=True, extension_hook=compare):
        loss = loss_of(problem)
        loss.backward()
    for module in problem.model.modules():
        compare(module)
    assert read == set(problem.model.modules())
    found = results(problem.model)
    torch.manual_seed(0)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward()
    for name, fields in results(problem.model).items():
        for field, value in fields.items():
            assert torch.equal(found[name][field], value)


@pytest.mark.parametrize("layer", [ReLU, nn.Dropout, nn.AvgPool1d])
def test_kept_tensors_that_no_rule_needs_may_be_overwritten(layer: type[Module]) -> None:
    def make() -> Module:
        return Between(layer(1) if layer is nn.AvgPool1d else layer().eval(), inplace=layer is not ReLU)

    problem = extended(make)
    with backpack(BatchGrad(), DiagGGNExact(), retain_graph=True):
        loss = loss_of(problem)
        loss.backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", make=make)
    del loss


@pytest.mark.parametrize("name", ["input0", "input1", "own"])
def test_recorded_tensor_that_is_not_there(name: str) -> None:
    """The hook is told what to do; asking whether it is there, and asking for something else, is as ever."""
    problem, asked = extended(lambda: Between(Tanh())), []

    def ask(module: Module) -> None:
        if module is problem.model.layer:
            asked.append(hasattr(module, "input0"))
            getattr(module, name)

    loss = loss_of(problem)
    with pytest.raises(AttributeError, match="layer.*retain_graph=True" if name == "input0" else f"no attribute '{name}'") as caught:
        with backpack(BatchGrad(), extension_hook=ask):
            loss.backward()
    assert isinstance(caught.value, BackpackError) == (name == "input0")
    assert asked == [False]
    assert results(problem.model) == {}


def test_recorded_tensors_are_the_last_calls() -> None:
    layer = extend(Linear(4, 3))
    first, second = torch.randn(2, 4), torch.randn(5, 4)
    kept = layer(first)
    later = layer(second)
    assert torch.equal(layer.input0, second)
    del later
    assert not hasattr(layer, "input0")
    del kept


def test_nothing_is_recorded_without_gradients() -> None:
    layer = extend(Linear(4, 3))
    kept = []
    with torch.no_grad():
        kept.append(layer(torch.randn(2, 4)))
    with disable():
        kept.append(layer(torch.randn(2, 4)))
    assert not hasattr(layer, "input0")
    assert not hasattr(layer, "output")


def test_memory_cleanup() -> None:
    """Per module; children are not touched."""
    problem = extended()
    loss = loss_of(problem)
    memory_cleanup(problem.model)
    assert hasattr(problem.model[0], "input0")
    memory_cleanup(problem.model[0])
    assert not hasattr(problem.model[0], "input0")
    assert not hasattr(problem.model[0], "output")
    assert hasattr(problem.model[2], "input0")
    memory_cleanup(problem.model[0])
    memory_cleanup(Linear(2, 2))
    with backpack(BatchGrad()), pytest.raises(NotRecordedError, match=r"What 0 had recorded .*memory_cleanup\(\)"):
        loss.backward()
    assert results(problem.model) == {}
    check_step(problem)


class Names(Module):
    """Everything is called like the tensors that an extended module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.output = Linear(4, 3)
        self.input0 = Parameter(torch.ones(4))
        self.register_buffer("input1", torch.full((4,), 2.0))
        self.input2 = "mine"

    @property
    def input3(self) -> str:
        return "a property"

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x * self.input0 + self.input1)


def test_names_of_the_users_survive() -> None:
    problem = extended(Names)
    loss = loss_of(problem)
    for _ in range(2):
        assert isinstance(problem.model.output, Linear)
        assert isinstance(problem.model.input0, Parameter)
        assert torch.equal(problem.model.input1, torch.full((4,), 2.0).double())
        assert (problem.model.input2, problem.model.input3) == ("mine", "a property")
        memory_cleanup(problem.model)
    loss.backward()
    check_step(problem, Names)
    assert set(problem.model.state_dict()) == {"output.weight", "output.bias", "input0", "input1"}
    del problem.model.input2
    assert not hasattr(Linear(2, 2), "output")


# --- results ----------------------------------------------------------------------------------------------------------------------------------


def test_results_and_clear() -> None:
    problem = extended()
    assert results(problem.model) == {}
    problem.model[0].bias.note = "kept"
    with backpack(BatchGrad(), Variance()):
        loss_of(problem).backward()
    found = results(problem.model)
    assert list(found) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, param in problem.model.named_parameters():
        assert found[name] == {"grad_batch": param.grad_batch, "variance": param.variance}
    assert list(results(problem.model[2])) == ["weight", "bias"]
    del problem.model[0].weight.variance
    assert set(results(problem.model)["0.weight"]) == {"grad_batch"}
    clear(problem.model)
    assert results(problem.model) == {}
    assert problem.model[0].bias.note == "kept"
    assert problem.model[0].bias.grad is not None
    clear(problem.model)


def test_a_result_is_one_writable_tensor() -> None:
    problem = extended()
    with backpack(BatchGrad(), KFAC()):
        loss_of(problem).backward()
    weight = problem.model[0].weight
    assert weight.grad_batch is weight.grad_batch
    weight.grad_batch.sub_(weight.grad_batch.mean(0))
    weight.grad_batch.note = "mine"
    assert weight.grad_batch.note == "mine"
    assert weight.grad_batch.abs().amax() > 0
    close(weight.grad_batch.sum(0), torch.zeros(5, 4, dtype=torch.float64))
    factor = weight.kfac[0].clone()
    weight.kfac[0].mul_(2)
    assert torch.equal(weight.kfac[0], 2 * factor)
    assert torch.equal(weight.grad, truth().grad["0.weight"])  # no memory is shared with it


def test_overwritten_never_accumulated() -> None:
    problem = extended()
    for _ in range(2):
        with backpack(BatchGrad(), DiagGGNExact(), Variance()):
            for _ in range(2):
                loss_of(problem).backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", "variance")
    close(problem.model[0].weight.grad, 4 * truth().grad["0.weight"])
    problem.model.zero_grad()
    check(problem.model, "grad_batch")


def test_parameters_that_a_pass_does_not_reach_carry_nothing_stale() -> None:
    """Results of an earlier context do not look like those of this one."""
    problem = extended(Net)
    with backpack(BatchGrad()):
        loss_of(problem).backward()
    with backpack(BatchGrad()):
        problem.model.body.requires_grad_(False)
        loss_of(problem).backward()
    assert list(values(problem.model, "grad_batch")) == ["head.weight", "head.bias"]
    close(problem.model.head.weight.grad_batch, truth(Net).grad_batch["head.weight"])


def test_frozen_parameters_are_skipped() -> None:
    def frozen() -> Module:
        model = chain()
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        return model

    problem = extended(frozen)
    with backpack(BatchGrad(), Variance(), DiagGGNExact()):
        loss_of(problem).backward()
    check(problem.model, "grad_batch", "variance", "diag_ggn_exact", make=frozen)
    assert list(results(problem.model)) == ["0.bias", "2.weight"]


def test_frozen_first_layer() -> None:
    def frozen() -> Module:
        model = chain()
        model[0].requires_grad_(False)
        return model

    check_step(extended(frozen), frozen)


class Wide(Module):
    """A convolution at so many positions that gradients are sums of per-sample gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Conv1d(1, 2, 1), nn.Conv1d(2, 2, 1), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.repeat(1, 20).unsqueeze(1)))
        return self.head(self.last(h).square().reshape(len(x), 2, 20, 4).mean(2).sum(1))


@pytest.mark.parametrize("part", ["whole", "weight"])
@pytest.mark.parametrize(("make", "name"), [(chain, "0"), (chain, "2"), (Net, "body.2"), (Wide, "first"), (Wide, "last")])
@pytest.mark.parametrize("field", FIELDS)
def test_frozen_between_forward_and_backward(field: str, make: Callable[[], Module], name: str, part: str) -> None:
    """Torch leaves ``.grad`` alone then: the parameter is as if it were frozen before, others are exact, results of earlier passes are gone."""
    active = {"grad_batch": BatchGrad, "batch_l2": BatchL2Grad, "variance": Variance, "diag_ggn_exact": DiagGGNExact}[field]
    problem = extended(make)
    with backpack(active()):
        loss_of(problem).backward()
    problem.model.zero_grad()
    loss = loss_of(problem)
    frozen = problem.model.get_submodule(name)
    (frozen if part == "whole" else frozen.weight).requires_grad_(False)
    with backpack(active()):
        loss.backward()
    found, expected = values(problem.model, field), FIELDS[field](truth(make))
    left = [key for key, p in problem.model.named_parameters() if p.requires_grad]
    assert list(found) == left
    for key, p in problem.model.named_parameters():
        if key in left:
            close(found[key], expected[key])
            close(p.grad, truth(make).grad[key])
        else:
            assert p.grad is None


def test_frozen_between_two_passes_of_a_context() -> None:
    """What an earlier pass has written does not look like that of this one; where passes accumulate, it is the sum so far."""
    for accumulate in (False, True):
        problem = extended()
        with backpack(SumGradSquared(), accumulate=accumulate):
            loss_of(problem).backward()
            first = problem.model[0].weight.sum_grad_squared
            problem.model[0].requires_grad_(False)
            loss_of(problem).backward()
        names = [name for name, _ in problem.model.named_parameters()]
        assert list(values(problem.model, "sum_grad_squared")) == (names if accumulate else names[2:])
        if accumulate:
            assert problem.model[0].weight.sum_grad_squared is first
            close(first, truth().grad_batch["0.weight"].square().sum(0))
        close(problem.model[2].weight.sum_grad_squared, (1 + accumulate) * truth().grad_batch["2.weight"].square().sum(0))


def test_short_names() -> None:
    problem = extended()
    weight, bias = problem.model[0].weight, problem.model[0].bias
    assert torch.equal(weight.var(), weight.detach().var())
    assert torch.equal(weight.var(0, correction=0), weight.detach().var(0, correction=0))
    assert not hasattr(weight, "diag_ggn")
    with backpack(Variance(), DiagGGNMC()):
        loss_of(problem).backward()
    assert type(weight.variance) is Tensor and weight.variance.data_ptr() == weight.var.data_ptr()
    assert torch.equal(Parameter(weight.variance), weight.var)
    assert weight.diag_ggn is weight.diag_ggn_mc
    with backpack(DiagGGNExact()):
        loss_of(problem).backward()
    assert weight.diag_ggn is weight.diag_ggn_exact
    close(weight.diag_ggn, FIELDS["diag_ggn_exact"](truth())["0.weight"])
    close(bias.var, truth().variance["0.bias"])
    with backpack(DiagGGNMC()):
        loss_of(problem).backward()
    assert weight.diag_ggn is weight.diag_ggn_mc  # the exact one is of an earlier context
    with backpack(DiagGGNMC(), DiagGGNExact()):
        loss_of(problem).backward()
    assert weight.diag_ggn is weight.diag_ggn_exact
    with backpack(DiagGGNMC()):
        with backpack(DiagGGNExact()):
            loss_of(problem).backward()
        loss_of(problem).backward()
    assert weight.diag_ggn is weight.diag_ggn_mc  # the outer context has run last
    clear(problem.model)
    assert torch.equal(weight.var(), weight.detach().var())
    assert not hasattr(weight, "diag_ggn")
    assert torch.equal(torch.var(weight), weight.detach().var())


def test_a_short_name_that_is_a_method_is_one_still() -> None:
    """A model may normalise its weights by their variance, and somebody may log it."""

    class Standardized(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight / (self.weight.var(1, keepdim=True) + 0.1), self.bias)

    def make() -> Module:
        return Sequential(Standardized(4, 5), Tanh(), Linear(5, 3))

    problem = extended(make)
    weight = problem.model[0].weight
    for _ in range(2):
        with backpack(Variance()):
            loss_of(problem).backward()
        check(problem.model, "variance", make=make)
        assert torch.equal(weight.var(0, correction=0), weight.detach().var(0, correction=0))
    found = weight.var
    assert isinstance(found, Tensor) and torch.equal(found, weight.variance)
    for made in (found + 0, found[0], copy.deepcopy(found), copy_by_pickle(found)):
        assert type(made) is Tensor
    assert repr(found) == repr(weight.variance)
    found.mul_(2)
    close(weight.variance, 2 * truth(make).variance["0.weight"])
    with backpack(Variance()):
        torch.autograd.grad(loss_of(problem), weight, create_graph=True)
    gradients = [torch.autograd.grad(value.sum(), weight, retain_graph=True)[0] for value in (weight.var, weight.variance)]
    assert gradients[0].any() and torch.equal(*gradients)


# --- extension hook ---------------------------------------------------------------------------------------------------------------------------


class TwoHeads(Module):
    """A container whose body is used twice, and whose second head is used by one loss only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = Net(), Linear(3, 3), Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(self.body(x)), self.right(self.body(2 * x))


@pytest.mark.parametrize("input_requires_grad", [False, True])
@pytest.mark.parametrize("active", [[BatchGrad], [BatchGrad, DiagGGNExact], [SqrtGGNExact, Variance], [KFAC]], ids=lambda a: a[-1].__name__)
def test_extension_hook(active: list[type], input_requires_grad: bool) -> None:
    """Once for each extended module, when all quantities of its parameters are there, containers after their children."""
    model, losses = extend(TwoHeads().double()), [extend(MSELoss()), extend(MSELoss())]
    visited = []
    exts = [cls() for cls in active]

    def hook(module: Module) -> None:
        assert all(hasattr(p, ext.savefield) for p in module.parameters() for ext in exts)
        assert {child for child in module.children() if hasattr(child, "_backpack_extend")} <= set(visited)
        visited.append(module)

    x = torch.randn(N, 4, dtype=torch.float64, requires_grad=input_requires_grad)
    left, right = model(x)
    with backpack(*exts, extension_hook=hook):
        (losses[0](left, torch.zeros_like(left)) + losses[1](right, torch.ones_like(right))).backward()
    expected = [m for m in model.modules() if not isinstance(m, Sequential)]
    assert len(visited) == len(expected) + 2
    assert set(visited) == {*expected, *losses}


def test_extension_hook_may_replace_and_delete() -> None:
    """Each parameter's per-sample gradients are freed as soon as they have been reduced."""
    problem, alive = extended(), []

    def hook(module: Module) -> None:
        for param in module.parameters(recurse=False):
            param.norm_of_samples = param.grad_batch.flatten(1).square().sum(1)
            del param.grad_batch
        alive.append(len(values(problem.model, "grad_batch")))

    with backpack(BatchGrad(), BatchL2Grad(), extension_hook=hook):
        loss_of(problem).backward()
    assert max(alive) <= 2  # of four parameters
    assert values(problem.model, "grad_batch") == {}
    check(problem.model, "batch_l2")
    for name, param in problem.model.named_parameters():
        close(param.norm_of_samples, truth().batch_l2[name])


def test_extension_hook_sees_recorded_tensors() -> None:
    problem, seen = extended(), []
    with backpack(BatchGrad(), extension_hook=lambda m: seen.append(m.input0.shape) if isinstance(m, Linear) else None):
        loss_of(problem).backward()
    assert seen == [(N, 5), (N, 4)]


class Wave(Module):
    """Has no rule, and no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sin()


class Nothing(ModuleExtension):
    """A rule of a user's that carries something without a meaning."""

    def backpropagate(self, *_: Any) -> int:
        return 0


def carried_by_users() -> SecondOrderBackpropExtension:
    entries = {cls: Nothing() for cls in (Linear, Tanh, Wave, CrossEntropyLoss)}
    extension = SecondOrderBackpropExtension("own", entries)
    extension.accumulate_backpropagated_quantities = lambda existing, other: existing
    return extension


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("make", [BatchGrad, DiagGGNExact, KFAC, carried_by_users])
def test_extension_hook_of_the_loss_comes_first(make: Callable[[], BackpropExtension], checkpointed: bool) -> None:
    """It has nothing to wait for; its tensors are there, although autograd has given back its own, and those of modules without a rule."""
    model, loss = extend(Sequential(Linear(4, 5), Tanh(), Wave(), Linear(5, 3))).double(), extend(CrossEntropyLoss())
    seen: dict[Module, Any] = {}

    def hook(module: Module) -> None:
        seen[module] = module.input0.clone(), module.output.clone()

    x, y = torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
    with backpack(make(), extension_hook=hook):
        output = model(x)
        value = checkpoint(loss, output, y, use_reentrant=False) if checkpointed else loss(output, y)
        value.backward()
    assert list(seen)[0] is loss
    assert seen.keys() == {loss, model, *model} - {model}
    assert torch.equal(seen[loss][0], output)
    assert torch.equal(seen[loss][1], value)
    for first, second in pairwise(model):
        assert torch.equal(seen[first][1], seen[second][0])
    assert not hasattr(loss, "input0")


def test_extension_hook_sees_recorded_tensors_of_its_own_pass() -> None:
    """Also if the model was called again before the backward pass, and the other graph is alive."""
    problem, seen = extended(), {}

    def hook(module: Module) -> None:
        seen[module] = module.input0.clone(), problem.model[0].input0.clone()

    first = loss_of(problem)
    given = {module: module.input0.clone() for module in (problem.model[0], problem.model[2])}
    own = problem.x
    problem.x = problem.x + 1
    second = loss_of(problem)
    with backpack(BatchGrad(), extension_hook=hook):
        first.backward(retain_graph=True)
    for module, tensor in given.items():
        assert torch.equal(seen[module][0], tensor)
        assert torch.equal(seen[module][1], own)
    assert torch.equal(problem.model[0].input0, problem.x)
    with backpack(BatchGrad(), extension_hook=hook):
        second.backward(retain_graph=True)
    assert torch.equal(seen[problem.model[0]][0], problem.x)


def test_exception_in_an_extension_hook() -> None:
    problem = extended()

    def hook(module: Module) -> None:
        if module is problem.model[0]:
            raise KeyError("mine")

    counts = hook_counts(problem.model)
    with pytest.raises(KeyError, match="mine"), backpack(BatchGrad(), Variance(), extension_hook=hook):
        loss_of(problem).backward()
    assert results(problem.model) == {}
    assert hook_counts(problem.model) == counts
    assert not CTX.get_active_exts()
    check_step(problem)


# --- autograd ---------------------------------------------------------------------------------------------------------------------------------


def test_several_backward_passes() -> None:
    problem = extended()
    loss = loss_of(problem)
    for _ in range(3):
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward(retain_graph=True)
        check(problem.model, "grad_batch", "diag_ggn_exact")
        clear(problem.model)
        loss.backward(retain_graph=True)
    with backpack(Variance()):
        loss.backward()
    check(problem.model, "variance")
    close(problem.model[0].bias.grad, 7 * truth().grad["0.bias"])


@pytest.mark.parametrize("active", [[BatchGrad], [DiagGGNExact], [HMP], [BatchGrad, KFAC]], ids=lambda a: a[-1].__name__)
def test_other_calls_of_autograd(active: list[type]) -> None:
    """Gradients and Hessian-vector products before, inside and after a context, over the same graph, are those of a plain model."""
    plain, problem = build(), extended()
    vector = [torch.randn_like(p) for p in plain.model.parameters()]
    root = loss_of(plain)
    expected_grad = torch.autograd.grad(root, list(plain.model.parameters()), retain_graph=True)
    expected = hessian_vector_product(root, list(plain.model.parameters()), vector)
    params = list(problem.model.parameters())
    output = problem.model(problem.x)
    loss = problem.losses[0](output, problem.terms[0].target)

    def others() -> None:
        for got, wanted in zip(hessian_vector_product(loss, params, vector), expected, strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(torch.autograd.grad(loss, params, retain_graph=True), expected_grad, strict=True):
            assert torch.equal(got, wanted)
        first = torch.autograd.grad(loss, params, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), params, retain_graph=True)
        for column in range(3):
            torch.autograd.grad(output[:, column].sum(), params, retain_graph=True)
        torch.autograd.grad(output, params, torch.ones_like(output), retain_graph=True)
        torch.autograd.grad(sum(p.square().sum() for p in params), params)
        torch.autograd.grad(output, params, torch.ones(2, *output.shape).double(), is_grads_batched=True, retain_graph=True)

    others()
    assert results(problem.model) == {}
    with backpack(*(cls() for cls in active)):
        others()
        clear(problem.model)
        loss.backward(retain_graph=True)
        fields = {name: list(values) for name, values in results(problem.model).items()}
    for field in set(FIELDS) & set(next(iter(fields.values()))):
        check(problem.model, field)
    others()
    assert {name: list(values) for name, values in results(problem.model).items()} == fields
    assert all(fields.values())


def test_batched_gradients_leave_nothing_stale() -> None:
    """Several passes at once have no quantities: those of an earlier context do not look like theirs, other models are left alone."""
    problem, other = extended(), extended(Net)
    for one in (problem, other):
        with backpack(BatchGrad(), Variance()):
            loss_of(one).backward()
    with backpack(BatchGrad()):
        output = problem.model(problem.x)
        vectors = torch.ones(2, *output.shape, dtype=torch.float64)
        torch.autograd.grad(output, list(problem.model.parameters()), vectors, is_grads_batched=True)
        assert values(problem.model, "grad_batch") == {}
        check(problem.model, "variance")
        check(other.model, "grad_batch", "variance", make=Net)
        loss_of(problem).backward()
        torch.autograd.functional.jacobian(problem.model, problem.x, vectorize=True)
    check(problem.model, "grad_batch")


def test_quantities_of_autograd_grad() -> None:
    problem = extended()
    with backpack(BatchGrad(), DiagGGNExact()):
        torch.autograd.grad(loss_of(problem), list(problem.model.parameters()))
    check(problem.model, "grad_batch", "diag_ggn_exact")
    assert all(p.grad is None for p in problem.model.parameters())


def test_backward_without_a_loss() -> None:
    problem, oracle = extended(), truth()
    with backpack(BatchGrad()):
        problem.model(problem.x)[:, 1].sum().backward()
    for name, value in values(problem.model, "grad_batch").items():
        close(value.flatten(1), oracle.jac[name][:, 1])


@pytest.mark.parametrize("returned", [False, True])
def test_quantities_of_chosen_parameters(returned: bool) -> None:
    """Those that are asked for have results, and no others, also where the pass crosses their layers."""
    problem = extended()
    weight = problem.model[2].weight
    with backpack(BatchGrad(), DiagGGNExact()):
        torch.autograd.grad(loss_of(problem), [weight]) if returned else loss_of(problem).backward(inputs=[weight])
    for field in ("grad_batch", "diag_ggn_exact"):
        found = values(problem.model, field)
        assert list(found) == ["2.weight"]
        close(found["2.weight"], FIELDS[field](truth())["2.weight"])
    assert problem.model[0].weight.grad is None


@pytest.mark.parametrize("returned", [False, True])
def test_gradients_of_inputs_have_no_quantities(returned: bool) -> None:
    """An adversarial example between pass and step leaves what belongs to ``.grad``, also under another context."""
    problem = extended()
    x = (2 * problem.x).requires_grad_()
    with backpack(BatchGrad()):
        loss_of(problem).backward()
        torch.autograd.grad(problem.terms[0]([problem.model(x)]), x)
    with backpack(BatchGrad()):
        loss = problem.terms[0]([problem.model(x)])
        torch.autograd.grad(loss, x) if returned else loss.backward(inputs=[x])
    check(problem.model, "grad_batch")


class Tied(Module):
    """A parameter that is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.middle = Parameter(torch.randn(3, 4)), Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.middle(torch.tanh(F.linear(x, self.weight)))), self.weight)


def test_backward_with_inputs_of_a_parameter_with_two_uses() -> None:
    """If autograd stops before the second use, there is no result, rather than half of it."""
    problem = extended(Tied)
    with backpack(BatchGrad()):
        loss_of(problem).backward(inputs=[problem.model.middle.bias])
    found = values(problem.model, "grad_batch")
    assert "middle.bias" in found
    assert "weight" not in found
    close(found["middle.bias"], truth(Tied).grad_batch["middle.bias"])
    check_step(problem, Tied)


def test_create_graph() -> None:
    """What is drawn cannot be differentiated, which is refused, rather than taken for constant."""
    problem = extended()
    params = list(problem.model.parameters())
    with backpack(BatchGrad(), Variance(), DiagGGNExact(), KFAC(), HBP(*CHOICE)):
        grads = torch.autograd.grad(loss_of(problem), params, create_graph=True)
    check(problem.model, "grad_batch", "variance", "diag_ggn_exact")
    weight = problem.model[0].weight
    for value in (*weight.kfac, *weight.hbp):
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            torch.autograd.grad(value.sum() + sum(g.sum() for g in grads), params, retain_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            value.square().sum().backward(retain_graph=True)
        assert not value.detach().requires_grad
    (slope,) = torch.autograd.grad(weight.grad_batch.sum(), weight, retain_graph=True)
    (expected,) = torch.autograd.grad(grads[0].sum(), weight, retain_graph=True)
    close(slope, expected)
    torch.autograd.grad(sum(g.square().sum() for g in grads), params)


def test_only_tensors_are_left_out() -> None:
    with pytest.raises(TypeError, match=r"leave_out\(\) needs a tensor, got 3.0 of type float"):
        package.leave_out(3.0)
    with torch.no_grad():  # there is nothing to be left out
        assert package.leave_out(Parameter(torch.ones(()))).grad_fn is None


def test_values_that_a_user_has_put_where_another_quantity_would_be() -> None:
    """They would look like those of a pass that does not come by."""

    class Switched(Net):
        def forward(self, x: Tensor, head: bool = True) -> Tensor:
            return super().forward(x) if head else self.body(x)

    model, x = extend(Switched()), torch.rand(3, 4)
    with backpack(Variance()):
        model(x).sum().backward()
    unused = model.head.weight
    unused.grad_batch = torch.zeros(3, 3, 4)
    with backpack(BatchGrad()):
        model(x, head=False).sum().backward()
    assert not hasattr(unused, "grad_batch") and hasattr(unused, "variance")
    assert model.body[0].weight.grad_batch.any()


def test_penalty_on_the_gradient() -> None:
    """Derivatives of derivatives have no quantities: refused, with a way out."""
    problem = extended()
    params = list(problem.model.parameters())
    loss = loss_of(problem)
    penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, params, create_graph=True))
    with backpack(BatchGrad()), pytest.raises(NotImplementedError, match="leave_out"):
        (loss + penalty).backward(retain_graph=True)
    assert results(problem.model) == {}
    assert all(p.grad is None for p in params)
    # it reaches the parameters through the activations, as the loss does
    with backpack(BatchGrad()), pytest.raises(NotImplementedError, match="forward pass of its own"):
        (loss + package.leave_out(penalty)).backward()
    assert results(problem.model) == {}
    with backpack(BatchGrad()):
        (loss_of(problem) + package.leave_out(penalty)).backward()
    check(problem.model, "grad_batch")


@pytest.mark.parametrize("place", ["first", "last", "twice"])
def test_left_out_terms_in_operations_in_place(place: str) -> None:
    problem = extended()
    penalty = package.leave_out(sum(p.square().sum() for p in problem.model.parameters()))
    loss, other = (loss_of(problem), penalty) if place == "last" else (penalty, loss_of(problem))
    loss += other
    loss += package.leave_out(3 * next(problem.model.parameters()).sum()) if place == "twice" else 0
    with backpack(BatchGrad()):
        loss.backward()
    check(problem.model, "grad_batch")


def test_left_out_term_that_shares_activations() -> None:
    """Its gradient and that of the loss arrive in one sum at the modules: exact for the loss alone, or refused."""
    problem = extended()
    output = problem.model(problem.x)
    loss = problem.losses[0](output, problem.terms[0].target) + package.leave_out(output.square().mean())
    try:
        with backpack(BatchGrad()):
            loss.backward()
    except NotImplementedError:
        assert results(problem.model) == {}
    else:
        check(problem.model, "grad_batch")


@pytest.mark.parametrize("leave", [False, True])
def test_anomaly_mode(leave: bool) -> None:
    problem = extended(Net)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        loss = loss_of(problem)
        with backpack(BatchGrad(), DiagGGNExact()):
            (loss + package.leave_out(problem.model.head.weight.sum()) if leave else loss).backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", make=Net)


def test_transformations_of_functions() -> None:
    problem = extended()
    params = dict(problem.model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(problem.model, params, (x[None],)), target[None])

    with backpack(BatchGrad()):
        rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, problem.x, problem.terms[0].target)
    for name, row in rows.items():
        close(row.detach() / N, truth().grad_batch[name])
    assert results(problem.model) == {}
    check_step(problem)


# --- hooks of the user's own ------------------------------------------------------------------------------------------------------------------


def spy_on(problem: Problem) -> list[tuple[str, Any]]:
    """Register every sort of hook; returns what they see."""
    model, seen = problem.model, []

    def note(kind: str, result: Any = None) -> Callable:
        def hook(*args: Any) -> Any:
            last = args[-1][0] if isinstance(args[-1], tuple) else args[-1]
            seen.append((kind, None if last is None else last.detach().clone()))
            return result

        return hook

    model[0].register_forward_pre_hook(note("forward pre"))
    model[0].register_forward_hook(note("forward"))
    model[1].register_full_backward_pre_hook(note("backward pre"))
    model[1].register_full_backward_hook(note("backward"))
    model[2].weight.register_hook(note("parameter"))
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad.clone())))
    model[2].register_forward_hook(lambda m, args, out: out.register_hook(note("tensor")) and None)
    return seen


@pytest.mark.parametrize("first", ["hooks", "extend"])
def test_hooks_that_look(first: str) -> None:
    """They see what they see without us, in the same order, and the quantities are exact."""
    plain, problem = build(), build()
    expected = spy_on(plain)
    loss_of(plain).backward()
    seen = spy_on(problem) if first == "hooks" else None
    extend(problem.model)
    extend(problem.losses[0])
    seen = spy_on(problem) if seen is None else seen
    with backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward()
    assert [kind for kind, _ in seen] == [kind for kind, _ in expected]
    assert len(seen) == 7
    for (_, got), (_, wanted) in zip(seen, expected, strict=True):
        assert got is wanted is None or torch.equal(got, wanted)
    check(problem.model, "grad_batch", "diag_ggn_exact")


CHANGES: dict[str, Callable[[Module], Any]] = {
    "input": lambda model: model[2].register_forward_pre_hook(lambda m, args: (args[0].sin() + args[0],)),
    "first input": lambda model: model[0].register_forward_pre_hook(lambda m, args: (args[0].square(),)),
    "input of the model": lambda model: model.register_forward_pre_hook(lambda m, args: (args[0].square(),)),
    "output": lambda model: model[0].register_forward_hook(lambda m, args, out: 2 * out),
    "output of an activation": lambda model: model[1].register_forward_hook(lambda m, args, out: out.square()),
    "input, in place": lambda model: model[0].register_forward_hook(lambda m, args, out: out.mul_(3)),
    "gradient of an input": lambda model: model[1].register_full_backward_hook(lambda m, g_inp, g_out: (2 * g_inp[0],)),
    "gradient of an output": lambda model: model[2].register_full_backward_pre_hook(lambda m, g_out: (2 * g_out[0],)),
    "gradient of a tensor": lambda model: model[1].register_forward_hook(lambda m, args, out: out.register_hook(lambda g: g * 3) and None),
}


@pytest.mark.parametrize("first", ["hooks", "extend"])
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_that_change_something(change: str, first: str) -> None:
    """Per-sample gradients are those of the model as its hooks make it."""
    plain, problem = build(), build()
    CHANGES[change](plain.model)
    if first == "hooks":
        CHANGES[change](problem.model)
    extend(problem.model)
    if first == "extend":
        CHANGES[change](problem.model)
    with backpack(BatchGrad()):
        loss_of(problem).backward()
    expected = one_by_one(plain)
    for name, param in problem.model.named_parameters():
        close(param.grad_batch, expected[name])
        close(param.grad_batch.sum(0), param.grad)


@pytest.mark.parametrize("late", ["hook", "in place", "hook in place"])
def test_activation_that_changes_after_extend(late: str) -> None:
    """A hook that gives an activation something else, and one that overwrites its input from now on."""
    torch.manual_seed(0)
    model, x = extend(Sequential(Linear(3, 4), nn.ELU(inplace="hook" in late), Linear(4, 2))).double(), torch.rand(5, 3).double() - 0.5
    if "hook" in late:
        model[1].register_forward_pre_hook(lambda m, args: (2 * args[0],))
    if "in place" in late:
        model[1].inplace = True
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(nn.MSELoss(reduction="sum"))(model(x), torch.zeros(5, 2).double()).backward()
    weight = model[0].weight
    rows = [model(row[None])[0] for row in x]
    jacobians = torch.stack([torch.stack([torch.autograd.grad(out, weight, retain_graph=True)[0] for out in row]) for row in rows])
    close(weight.grad_batch, 2 * torch.einsum("nc,ncij->nij", torch.stack(rows).detach(), jacobians))
    close(weight.diag_ggn_exact, 2 * jacobians.square().sum((0, 1)))


def test_retained_gradients() -> None:
    problem, plain = extended(), build()
    got, wanted = (p.model[0](p.x) for p in (problem, plain))
    for p, hidden, active in ((problem, got, [BatchGrad()]), (plain, wanted, [])):
        hidden.retain_grad()
        with backpack(*active):
            p.losses[0](p.model[2](p.model[1](hidden)), p.terms[0].target).backward()
    assert torch.equal(got.grad, wanted.grad)
    check(problem.model, "grad_batch")


# --- bad input --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [(Linear, r"extend\(torch.nn"), (F.relu, "module"), (lambda x: x, "Module"), (None, "NoneType"), (torch.ones(2), "Tensor"), ("model", "str")],
    ids="class function lambda None tensor string".split(),
)
def test_extend_refuses(given: Any, says: str) -> None:
    for kind in (ValueError, TypeError, BackpackError):
        with pytest.raises(kind, match=says):
            extend(given)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "results": results,
    "clear": clear,
    "unextend": unextend,
    "memory_cleanup": memory_cleanup,
    "unscale": lambda given: package.unscale(given, 2.0),
    "explain": lambda given: package.explain(given, F.mse_loss, torch.ones(2, 3), torch.ones(2, 3), [BatchGrad()]),
    "verify": lambda given: package.verify(given, F.mse_loss, torch.ones(2, 3), torch.ones(2, 3), [BatchGrad()]),
    "check_rule": lambda given: package.check_rule(given, torch.ones(2, 3)),
    "convert_module_to_backpack": lambda given: package.convert_module_to_backpack(given, False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("given", [Linear, 3, [Linear(3, 3)]], ids=str)
def test_functions_of_modules_refuse_anything_else(name: str, given: Any) -> None:
    for kind in (TypeError, BackpackError):
        with pytest.raises(kind, match=rf"^{name}\(\) needs a torch.nn.Module, got .* of type {type(given).__name__}"):
            FUNCTIONS[name](given)


@pytest.mark.parametrize(
    ("given", "says"),
    [(BatchGrad, r"BatchGrad\(\)"), (Linear, "Linear"), (Linear(2, 2), "Linear"), ("grad_batch", "str"), (None, "NoneType"), ([BatchGrad()], "list")],
    ids="class other module string None list".split(),
)
def test_context_refuses(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        backpack(Variance(), given)


def test_context_refuses_a_collision_of_names() -> None:
    for pair in ((BatchGrad(), BatchGrad()), (HMP(savefield="same"), HMP("same")), (DiagGGNMC(1), DiagGGNMC(2))):
        with pytest.raises(ValueError, match=pair[0].savefield):
            backpack(*pair)
    backpack(HMP(), HMP("other"))


@pytest.mark.parametrize("field", [3, None, "", "grad", "data", "shape", "requires_grad", "_backward_hooks"], ids=repr)
def test_context_refuses_fields_that_are_no_free_names(field: Any) -> None:
    """``data`` would be the parameter itself."""
    renamed = BatchGrad()
    renamed.savefield = field
    for extension in (HMP(field), renamed):
        with pytest.raises(ValueError, match=f"{type(extension).__name__}.*savefield={field!r}"):
            backpack(Variance(), extension)
    copy.deepcopy(extend(Linear(1, 1)))  # the names of all fields go with copies


def test_field_chosen_after_construction() -> None:
    problem, renamed = build(), BatchGrad()
    renamed.savefield = "gradients_of_another_day"
    with backpack(renamed):
        extend(problem.model)
        problem.loss(problem.outputs()).backward()
    expected = Oracle(build()).grad_batch
    assert {name: list(fields) for name, fields in results(problem.model).items()} == {name: [renamed.savefield] for name in expected}
    for name, fields in results(problem.model).items():
        close(fields[renamed.savefield], expected[name])
    clear(problem.model)
    assert not any(vars(parameter) for parameter in problem.model.parameters())


def test_context_refuses_a_hook_that_is_no_function() -> None:
    with pytest.raises(TypeError, match="extension_hook"):
        backpack(BatchGrad(), extension_hook="print")


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNMC, SqrtGGNExact, Variance, SumGradSquared])
@pytest.mark.parametrize("subsampling", [3, "01", "", b"\0", [0.5], [True], [None], torch.tensor([0])], ids=repr)
def test_subsampling_must_be_indices(extension: type, subsampling: Any) -> None:
    with pytest.raises(ValueError, match=f"{extension.__name__}: subsampling"):
        extension(subsampling=subsampling)


def test_subsampling_by_numpy() -> None:
    problem = extended()
    with backpack(BatchGrad(subsampling=[np.int64(2), np.int32(0)])):
        loss_of(problem).backward()
    for name, value in values(problem.model, "grad_batch").items():
        close(value, truth().grad_batch[name][[2, 0]])


@pytest.mark.parametrize("extension", [BatchGrad, Variance, DiagGGNExact, DiagGGNMC, SqrtGGNExact])
@pytest.mark.parametrize("subsampling", [[0, N], [-N - 1]], ids=str)
def test_subsampling_out_of_range(extension: type, subsampling: list[int]) -> None:
    """Refused before any gradient is accumulated."""
    problem = extended()
    with pytest.raises(ValueError, match=f"{extension.__name__}.*out of range for {N} samples"), backpack(extension(subsampling=subsampling)):
        loss_of(problem).backward()
    assert results(problem.model) == {}
    assert all(p.grad is None for p in problem.model.parameters())
    check_step(problem)


@pytest.mark.parametrize("mc_samples", [0, -1, 1.5, True, "2", None], ids=repr)
@pytest.mark.parametrize("extension", [DiagGGNMC, extensions.BatchDiagGGNMC, extensions.SqrtGGNMC, KFAC])
def test_number_of_draws(extension: type, mc_samples: Any) -> None:
    with pytest.raises(ValueError, match="mc_samples"):
        extension(mc_samples=mc_samples)


CHOICE = (Curvature.GGN, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE, ExpectationApproximation.BOTEV_MARTENS)


@pytest.mark.parametrize("position", range(4))
def test_hbp_refuses_unknown_options(position: int) -> None:
    HBP(*CHOICE)
    options = [*CHOICE]
    options[position] = "something"
    with pytest.raises(AttributeError, match=r"something.*'"):
        HBP(*options)


def test_hbp_refuses_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="goes with"):
        HBP(Curvature.GGN, LossHessianStrategy.EXACT, *CHOICE[2:])
    with pytest.raises(ValueError, match="ggn"):
        HBP(Curvature.HESSIAN, LossHessianStrategy.EXACT, BackpropStrategy.SQRT, CHOICE[3])


def test_modification_of_the_positive_curvature_hessian() -> None:
    with pytest.raises(KeyError, match="clip"):
        extensions.PCHMP(modify="negative")


def assert_as_before(problem: Problem, counts: dict[str, list[int]], make: Callable[[], Module] = chain) -> None:
    """Nothing is left behind by a failure, and the next step is right."""
    assert results(problem.model) == {}
    assert all(not vars(p) for p in problem.model.parameters())
    assert hook_counts(problem.model) == counts
    assert not CTX.get_active_exts()
    check_step(problem, make)
    assert not recording.open


def test_loss_not_extended() -> None:
    problem = build()
    extend(problem.model)
    counts = hook_counts(problem.model)
    with pytest.raises(AssertionError, match=r"2\.(bias|weight).*extend\("), backpack(BatchGrad(), DiagGGNExact()):
        problem.outputs()[0].square().mean().backward()
    assert all(p.grad is None for p in problem.model.parameters())
    extend(problem.losses[0])
    assert_as_before(problem, counts)


def test_loss_is_no_scalar() -> None:
    problem = extended()
    lossfunc = extend(CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match=rf"scalar.*\[{N}\].*sum"), backpack(DiagGGNExact()):
        lossfunc(problem.model(problem.x), problem.terms[0].target).backward(torch.ones(N).double())
    assert_as_before(problem, hook_counts(problem.model))
    with backpack(BatchGrad()):  # first order is defined
        lossfunc(problem.model(problem.x), problem.terms[0].target).backward(torch.full((N,), 1 / N, dtype=torch.float64))
    check(problem.model, "grad_batch")


def before_extend(problem: Problem) -> Tensor:
    loss = loss_of(problem)
    extend(problem.model)
    extend(problem.losses[0])
    return loss


def under_disable(problem: Problem) -> Tensor:
    extend(problem.model)
    extend(problem.losses[0])
    with disable():
        return loss_of(problem)


@pytest.mark.parametrize("forward", [before_extend, under_disable])
@pytest.mark.parametrize("extension", [BatchGrad, Variance, DiagGGNExact, KFAC, HMP])
def test_forward_pass_was_not_recorded(forward: Callable[[Problem], Tensor], extension: type) -> None:
    problem = build()
    loss = forward(problem)
    with pytest.raises(AttributeError, match=r"2\.(bias|weight).*extend\(\).*disable\(\)"), backpack(extension()):
        loss.backward()
    assert all(p.grad is None for p in problem.model.parameters())
    assert_as_before(problem, hook_counts(problem.model))


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_only_the_loss_was_recorded(extension: type) -> None:
    problem = extended()
    with disable():
        output = problem.model(problem.x)
    loss = problem.losses[0](output, problem.terms[0].target)
    with pytest.raises(AttributeError, match=r"2\.(bias|weight).*disable\(\)"), backpack(extension()):
        loss.backward()
    assert_as_before(problem, hook_counts(problem.model))


ALL = [getattr(extensions, name) for name in extensions.__all__ if name != "HBP"]


def numbers(value: Any, param: Parameter) -> list[Tensor]:
    """The tensors of a result; of a function, what it returns."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, Tensor) else value(torch.ones_like(param)).detach()]


@pytest.mark.parametrize("extension", ALL, ids=lambda cls: cls.__name__)
def test_batch_of_size_zero(extension: type) -> None:
    """As for autograd's own gradient: what is summed over samples is zero, what has a sample axis is empty there."""
    problem, field = build(samples=0), extension().savefield
    extend(problem.model)
    extend(problem.losses[0])
    full = extended()
    with backpack(extension()):
        loss_of(problem).backward()
        loss_of(full).backward()
    for param, reference in zip(problem.model.parameters(), full.model.parameters(), strict=True):
        assert torch.equal(param.grad, torch.zeros_like(param))
        pairs = zip(numbers(getattr(param, field), param), numbers(getattr(reference, field), reference), strict=True)
        for value, other in pairs:
            axis = {"sqrt_ggn_exact": 1, "sqrt_ggn_mc": 1, "grad_batch": 0, "batch_l2": 0}.get(field, 0 if field.endswith("_batch") else None)
            shape = [0 if i == axis else size for i, size in enumerate(other.shape)]
            assert torch.equal(value, torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("make", [chain, Net])
def test_batch_of_size_one(make: Callable[[], Module]) -> None:
    problem, oracle = build(make, samples=1), Oracle(build(make, samples=1))
    extend(problem.model)
    extend(problem.losses[0])
    with backpack(BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact()):
        loss_of(problem).backward()
    for field, expected in FIELDS.items():
        for name, value in values(problem.model, field).items():
            if field == "variance":
                assert value.abs().amax() <= 1e-15  # rounding of numbers of size one
            else:
                close(value, expected(oracle)[name])


def integers(problem: Problem) -> Tensor:
    return problem.losses[0](problem.model(torch.ones(N, 4, dtype=torch.int64)), problem.terms[0].target)


def complex_numbers(problem: Problem) -> Tensor:
    return problem.losses[0](problem.model(problem.x.to(torch.complex128)), problem.terms[0].target)


def wrong_width(problem: Problem) -> Tensor:
    return problem.losses[0](problem.model(problem.x[:, :3]), problem.terms[0].target)


def target_too_large(problem: Problem) -> Tensor:
    return problem.losses[0](problem.model(problem.x), problem.terms[0].target + 3)


def target_negative(problem: Problem) -> Tensor:
    return problem.losses[0](problem.model(problem.x), problem.terms[0].target - 50)


def target_of_other_length(problem: Problem) -> Tensor:
    return problem.losses[0](problem.model(problem.x), problem.terms[0].target[1:])


@pytest.mark.parametrize("make", [chain, Net])
@pytest.mark.parametrize("forward", [integers, complex_numbers, wrong_width, target_too_large, target_negative, target_of_other_length])
def test_bad_data(forward: Callable[[Problem], Tensor], make: Callable[[], Module]) -> None:
    """Torch's own error comes through unchanged."""
    problem = extended(make)
    counts = hook_counts(problem.model)
    with pytest.raises((RuntimeError, IndexError, ValueError)) as plain:
        forward(build(make))
    with pytest.raises(plain.type) as raised, backpack(BatchGrad(), DiagGGNExact()):
        forward(problem).backward()
    assert str(raised.value) == str(plain.value)
    assert_as_before(problem, counts, make)


def test_integers_that_select() -> None:
    """Integer inputs are fine where the module takes them."""
    embedding = extend(nn.Embedding(5, 3).double())
    indices = torch.tensor([[0, 1], [1, 1], [4, 2]])
    with backpack(BatchGrad()):
        embedding(indices).square().sum((1, 2)).mean().backward()
    for n, row in enumerate(indices):
        (expected,) = torch.autograd.grad(embedding(row).square().sum() / 3, embedding.weight)
        close(embedding.weight.grad_batch[n], expected)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("extension", [BatchGrad, Variance, BatchL2Grad])
def test_complex_parameters(extension: type) -> None:
    layer = extend(Linear(4, 3).to(torch.complex128))
    loss = layer(torch.randn(N, 4, dtype=torch.complex128)).abs().square().sum()
    with pytest.raises(NotImplementedError, match="weight.*complex"), backpack(extension()):
        loss.backward()
    assert results(layer) == {}
    assert layer.weight.grad is None


def test_complex_numbers_inside() -> None:
    """Between real parameters and a real loss there may be complex operations."""

    class Spectrum(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(self.layer(x)).abs()

    check_step(extended(Spectrum), Spectrum)


class Moody(Module):
    """Fails when it is told to."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("mine")
        return 2 * x


class WithMoody(Module):
    """A container whose inner part may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Sequential(Linear(4, 5), Moody())
        self.head = Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, RuntimeError])
def test_exception_in_a_forward_pass(error: type[BaseException]) -> None:
    """Its type survives; no call counts as running afterwards."""
    problem = extended(WithMoody)
    counts = hook_counts(problem.model)
    problem.model.body[1].error = error
    with pytest.raises(error, match="mine"), backpack(BatchGrad()):
        loss_of(problem)
    del problem.model.body[1].error
    try:
        assert_as_before(problem, counts, WithMoody)
    finally:
        recording.open.clear()  # a failure here is none of the other tests


@pytest.mark.parametrize("where", ["forward", "forward pre", "tensor", "parameter", "full backward", "accumulated"])
@pytest.mark.parametrize("first", ["hooks", "extend"])
@pytest.mark.parametrize("retain", [False, True])
def test_exception_in_a_users_hook(where: str, first: str, retain: bool) -> None:
    """Its type survives; parameters and modules are as before; the next step is right."""
    problem = build()
    broken = [False]

    def fail(*_: Any) -> None:
        if broken[0]:
            raise ZeroDivisionError("mine")

    def install() -> None:
        model = problem.model
        {
            "forward": lambda: model[1].register_forward_hook(fail),
            "forward pre": lambda: model[2].register_forward_pre_hook(fail),
            "tensor": lambda: model[1].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None),
            "parameter": lambda: model[0].weight.register_hook(fail),
            "full backward": lambda: model[1].register_full_backward_hook(fail),
            "accumulated": lambda: model[2].weight.register_post_accumulate_grad_hook(fail),
        }[where]()

    if first == "hooks":
        install()
    extend(problem.model)
    extend(problem.losses[0])
    if first == "extend":
        install()
    counts = hook_counts(problem.model)
    broken[0] = True
    with pytest.raises(ZeroDivisionError, match="mine"), backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward(retain_graph=retain)
    broken[0] = False
    assert results(problem.model) == {}
    assert hook_counts(problem.model) == counts
    assert not recording.open
    check_step(problem)


def test_failed_pass_does_not_leave_results_of_this_pass() -> None:
    """Where a pass fails in the middle, what it has written is gone; what others wrote under other names stays."""
    problem = extended()
    with backpack(Variance()):
        loss_of(problem).backward()
    handle = problem.model[0].weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError), backpack(BatchGrad()):
        loss_of(problem).backward()
    handle.remove()
    assert {field for fields in results(problem.model).values() for field in fields} == {"variance"}
    check(problem.model, "variance")


def test_deleted_module() -> None:
    """A module that is gone before the backward pass is named."""
    problem = extended()
    lossfunc, target = problem.losses[0], problem.terms[0].target
    extra = extend(Linear(3, 3).double())
    loss = lossfunc(extra(problem.model(problem.x)), target)
    del extra
    with backpack(BatchGrad()):
        try:
            loss.backward()
        except AttributeError as error:
            assert "Linear" in str(error)
            assert results(problem.model) == {}
        else:
            close(problem.model[2].bias.grad_batch.sum(0), problem.model[2].bias.grad)


def test_messages_end_with_a_code() -> None:
    with pytest.raises(BackpackError, match=r"\[backpack:argument-type\]$"):
        extend(3)


def test_data_loader_of_dictionaries() -> None:
    """Keyword arguments are recorded like positional ones."""

    class Keywords(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(4, 3)

        def forward(self, *, scale: Tensor, x: Tensor) -> Tensor:
            return self.layer(input=x) * scale

    problem = build()
    batch = default_collate([{"x": x, "scale": x[:1]} for x in problem.x])
    model, lossfunc = extend(Keywords().double()), extend(CrossEntropyLoss())
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(target=problem.terms[0].target, input=model(**batch)).backward()
    weight, (x, target) = model.layer.weight.detach(), (problem.x, problem.terms[0].target)

    def output(n: int, weight: Tensor) -> Tensor:
        return F.linear(x[n], weight, model.layer.bias.detach()) * x[n, 0]

    gradients = [jacobian(lambda w, n=n: F.cross_entropy(output(n, w), target[n]) / N, weight) for n in range(N)]
    close(model.layer.weight.grad_batch, torch.stack(gradients))
    # the output is linear in the weight, so that the generalized Gauss-Newton is the Hessian
    whole = hessian(lambda w: sum(F.cross_entropy(output(n, w), target[n]) for n in range(N)) / N, weight)
    close(model.layer.weight.diag_ggn_exact.flatten(), whole.reshape(weight.numel(), -1).diagonal())


def test_in_place_activation_and_residual() -> None:
    """Full backward hooks would make these fail in the forward pass already."""

    class InPlace(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.last = Linear(4, 4), ReLU(inplace=True), Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden += x
            return self.last(self.relu(hidden))

    check_step(extended(InPlace), InPlace)


def test_results_do_not_outlive_a_gradient_of_a_graph_that_was_not_recorded() -> None:
    """``torch.autograd.grad`` computes no quantities there, and leaves none of other data."""
    model, x = extend(Sequential(Linear(3, 3), Tanh())), torch.rand(4, 3)
    with backpack(BatchGrad()):
        model(x).sum().backward()
    assert results(model)
    with disable():
        loss = model(2 * x).sum()
    with backpack(BatchGrad()):
        torch.autograd.grad(loss, list(model.parameters()))
    assert results(model) == {}
