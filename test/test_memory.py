"""Nothing is kept longer than the graph: with the garbage collector off, and after every way in which a pass can end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, ref

import pytest
import torch
from cases import CASES
from oracle import Oracle, Problem, Term
from test_extensions import close
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, Dropout, Linear, Module, MSELoss, Parameter, ReLU, Sequential, SiLU, Tanh
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD

from backpack import CTX, backpack, clear, disable, extend, leave_out, results, unextend
from backpack.core.calls import ModuleCall, recording
from backpack.core.owners import owners
from backpack.core.recording import recorder_of
from backpack.extensions import HMP, KFAC, KFRA, BatchGrad, DiagGGNExact, DiagGGNMC, SqrtGGNExact, Variance
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import BackpackError

pytestmark = pytest.mark.usefixtures("no_garbage_collector")


class Residual(Module):
    """In-place activation, residual connection in place, and a functional operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = Linear(6, 6), ReLU(inplace=True), Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.first(x))
        hidden = hidden + x
        hidden += x
        return self.last(F.gelu(hidden))


class Positions(Module):
    """Extra axes, whose outputs are views, and operations in place on them; a bare parameter; a layer used twice; keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.silu, self.offset, self.head = Linear(6, 6), SiLU(inplace=True), Parameter(torch.zeros(6)), Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 2, -1) + self.offset
        x = self.silu(self.layer(self.silu(self.layer(input=x))))
        x += 1
        return self.head(x).sum(1)


MODELS: dict[str, Callable[[], Module]] = {
    "chain": lambda: Sequential(Linear(6, 5), Tanh(), Dropout(0.3), Linear(5, 3)),
    "residual": Residual,
    "positions": Positions,
}


def build(name: str = "chain") -> Problem:
    torch.manual_seed(5)
    model = MODELS[name]().double()
    return Problem(model, torch.randn(4, 6, dtype=torch.float64), [Term(CrossEntropyLoss(), torch.randint(3, (4,)))])


def extended(name: str = "chain") -> Problem:
    problem = build(name)
    extend(problem.model)
    extend(problem.losses[0])
    return problem


def forward(problem: Problem) -> Tensor:
    return problem.terms[0].module(problem.model(problem.x), problem.terms[0].target)


def census() -> dict[str, int]:
    """Count what is alive: tensors, calls, tracked parameters, calls that count as running, and all objects that the collector knows."""
    objects = gc.get_objects()
    tensors = calls = 0
    for thing in objects:  # no closure over the list, which would contain itself then
        tensors += issubclass(type(thing), Tensor)
        calls += type(thing) is ModuleCall
    return {"tensors": tensors, "calls": calls, "tracked": len(owners._names), "open": len(recording.open), "all": len(objects)}


def assert_flat(step: Callable[[], object], times: int, collect: bool = False) -> None:
    """Nothing grows: no tensor and no call, and of all other objects less than one in ten steps.

    Args:
        step: What is done again and again.
        times: How often.
        collect: Run the collector before all objects are counted: ``torch.vmap`` leaves cycles of functions, which hold no tensors.
    """
    for _ in range(5):
        step()
    counts = []
    for _ in range(3):
        for _ in range(times // 2):
            step()
        counts.append(census())
        if collect:
            gc.collect()
            counts[-1]["all"] = len(gc.get_objects())
    growth = {key: counts[2][key] - counts[1][key] for key in counts[0]}
    assert growth.pop("all") <= times // 20 + 5
    assert growth == {"tensors": 0, "calls": 0, "tracked": 0, "open": 0}


# --- forward passes ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_forward_passes_leave_memory_flat(name: str) -> None:
    problem = extended(name)
    assert_flat(lambda: forward(problem), 1000)


def test_the_count_sees_a_leak() -> None:
    problem, kept = extended(), []
    with pytest.raises(AssertionError):
        assert_flat(lambda: kept.append(forward(problem)), 50)
    calls = census()["calls"]
    assert calls >= 50
    kept.clear()
    assert census()["calls"] == 0


@pytest.fixture
def calls_alive(monkeypatch: pytest.MonkeyPatch) -> WeakSet:
    """All calls that are alive, of those that a test makes."""
    alive, init = WeakSet(), ModuleCall.__init__

    def note(self: ModuleCall, *args: Any, **keywords: Any) -> None:
        init(self, *args, **keywords)
        alive.add(self)

    monkeypatch.setattr(ModuleCall, "__init__", note)
    return alive


@pytest.mark.parametrize("case", CASES)
def test_calls_die_with_the_graph(case: str, calls_alive: WeakSet) -> None:
    """Also where nodes hold them: cycles through autograd's own edges are never found."""

    def step(backward: bool) -> None:
        problem = CASES[case].build(2)
        for module in (problem.model, *problem.losses):
            extend(module)
        loss = problem.loss(problem.outputs())
        if backward:
            loss.backward()

    for backward in (False, True):
        step(backward)
        gc.collect()
        assert not len(calls_alive)


class Views(Module):
    """Hands what another module is given over in any way, and returns a view of it, or itself."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self._forward(*args, **keywords)


VIEWS: dict[str, tuple[Callable[..., Any], Callable[[Module, Tensor], Tensor]]] = {
    "itself": (lambda h: h, lambda module, h: module(h)),
    "reshaped": (lambda h: h.flatten(1), lambda module, h: module(h)),
    "turned back": (lambda h: h.mT, lambda module, h: module(h.mT)),
    "keyword": (lambda h: h.flatten(1), lambda module, h: module(h=h)),
    "mapping": (lambda given: given["h"].flatten(1), lambda module, h: module({"h": h})),
    "list": (lambda given: given[0].flatten(1), lambda module, h: module([h])),
    "object": (lambda given: given.h.flatten(1), lambda module, h: module(SimpleNamespace(h=h))),
    "beside another": (lambda h: (2 * h, h), lambda module, h: sum(module(h))),
    "itself, of a function": (lambda h: h, lambda module, h: module(h.tanh())),
    "beside another, of a function": (lambda h: (2 * h, h), lambda module, h: sum(module(h.tanh()))),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("inside", [False, True])
def test_calls_that_return_views_die_with_the_graph(view: str, inside: bool, calls_alive: WeakSet) -> None:
    forward, call = VIEWS[view]

    def step(backward: bool) -> None:
        layer, module, x = Linear(6, 4), Views(forward), torch.randn(3, 2, 6)
        model = Views(lambda x: call(module, layer(x)))
        if inside:
            model.parts = nn.ModuleList([layer, module])
        for each in [model] if inside else [layer, module]:
            extend(each)
        loss = model(x).square().sum()
        if backward:
            with backpack(BatchGrad()):
                loss.backward()
            torch.testing.assert_close(layer.weight.grad_batch.sum(0), layer.weight.grad)

    for backward in (False, True):
        step(backward)
        gc.collect()
        assert not len(calls_alive)


def test_temporary_loss_objects_leave_memory_flat() -> None:
    problem = extended()

    def step() -> None:
        extend(MSELoss())(problem.model(problem.x), torch.zeros(4, 3, dtype=torch.float64))

    assert_flat(step, 500)


def test_temporary_models_leave_memory_flat() -> None:
    x = torch.randn(4, 6)

    def step() -> None:
        extend(Sequential(Linear(6, 4), ReLU(inplace=True), Linear(4, 2)))(x).sum()

    assert_flat(step, 200)


def test_extend_and_unextend_leave_memory_flat() -> None:
    problem = build()

    def step() -> None:
        extend(problem.model)
        problem.model(problem.x)
        unextend(problem.model)

    assert_flat(step, 200)


@pytest.mark.parametrize("context", [torch.no_grad, disable])
def test_forward_passes_that_record_nothing(context: Callable[[], Any]) -> None:
    problem = extended()

    def step() -> None:
        with context():
            forward(problem)

    assert_flat(step, 200)
    with context():
        loss = forward(problem)
    assert census()["calls"] == 0
    del loss


def test_outputs_and_calls_die_with_the_last_reference() -> None:
    problem = extended("residual")
    loss = forward(problem)
    recorded = [ref(call) for call in calls_of(nodes_of(loss))]
    assert len(recorded) == 5
    assert recorder_of(problem.model.last).last is not None
    del loss
    assert all(call() is None for call in recorded)
    assert recorder_of(problem.model.last).last is None


def test_input_dies_with_the_graph() -> None:
    """The mini-batch is not kept on the modules."""
    layer = extend(Linear(6, 3))
    x = torch.randn(4, 6)
    watched = ref(x)
    out = layer(x)
    del x
    assert layer.input0.shape == (4, 6)
    del out
    assert watched() is None


def test_exceptions_in_forward_passes_leave_memory_flat() -> None:
    problem = extended()
    wrong = problem.x[:, :3]

    def step() -> None:
        try:
            problem.model(wrong)
        except RuntimeError as error:
            error.__traceback__ = None

    assert_flat(step, 100)


# --- training ---------------------------------------------------------------------------------------------------------------------------------


def test_training_leaves_memory_flat() -> None:
    """500 steps with three extensions."""
    problem = extended("residual")
    optimizer = SGD(problem.model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        with backpack(Variance(), DiagGGNMC(), KFAC()):
            forward(problem).backward()
        optimizer.step()

    assert_flat(step, 500, collect=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["one context", "hook", "retained", "create_graph", "plain", "columns"])
def test_other_steps_leave_memory_flat(name: str, kind: str) -> None:
    problem = extended(name)
    params = list(problem.model.parameters())

    def step() -> None:
        loss = forward(problem)
        if kind == "hook":
            with backpack(BatchGrad(), extension_hook=lambda module: [clear(module) for _ in module.parameters()]):
                loss.backward()
        elif kind == "retained":
            with backpack(BatchGrad(), DiagGGNExact(), retain_graph=True):
                loss.backward(retain_graph=True)
        elif kind == "create_graph":
            with backpack(BatchGrad()):
                torch.autograd.grad(loss, params, create_graph=True)
            clear(problem.model)
        elif kind == "columns":
            with backpack(SqrtGGNExact(), DiagGGNExact()):
                (loss + leave_out(sum(p.square().sum() for p in params))).backward()
        else:
            loss.backward()

    if kind == "one context":
        with backpack(BatchGrad(), DiagGGNExact()):
            assert_flat(step, 50, collect=True)
    else:
        assert_flat(step, 50, collect=kind != "plain")


def test_failing_steps_leave_memory_flat() -> None:
    problem = extended("residual")
    failing = [True]

    def fail(_: Module) -> None:
        if failing[0]:
            raise ZeroDivisionError

    def step() -> None:
        loss = forward(problem)
        try:
            with backpack(BatchGrad(), DiagGGNExact(), extension_hook=fail):
                loss.backward()
        except ZeroDivisionError as error:
            error.__traceback__ = None

    assert_flat(step, 50, collect=True)
    failing[0] = False
    step()
    close(problem.model.last.weight.grad_batch, Oracle(build("residual")).grad_batch["last.weight"])


REFUSED_STEPS: dict[str, tuple[Callable[[], BackpropExtension], Callable[[Any], Tensor]]] = {
    "a penalty": (BatchGrad, lambda problem: forward(problem) + problem.model.last.bias.sum()),
    "two reasons": (BatchGrad, lambda problem: forward(problem) + sum(p.sum() for p in problem.model.parameters())),
    "a curved loss": (DiagGGNExact, lambda problem: forward(problem).square()),
    "no loss": (DiagGGNExact, lambda problem: problem.model(problem.x).sum()),
    "a branch": (KFRA, forward),
}


@pytest.mark.parametrize("name", REFUSED_STEPS)
def test_refused_steps_leave_memory_flat(name: str) -> None:
    problem, (extension, loss) = extended("residual"), REFUSED_STEPS[name]

    def step() -> None:
        with backpack(extension()), suppress(BackpackError):
            loss(problem).backward()
            raise AssertionError

    assert_flat(step, 50)


# --- after a pass -----------------------------------------------------------------------------------------------------------------------------


def nodes_of(loss: Tensor) -> list[Any]:
    found, todo = {}, [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found[node] = None
            todo += [upstream for upstream, _ in node.next_functions]
    return list(found)


def calls_of(nodes: list[Any]) -> list[ModuleCall]:
    marks = [mark for node in nodes for mark in node.metadata.get("backpack", ())]
    return list(dict.fromkeys(mark.call for mark in marks))


@pytest.mark.parametrize("name", ["chain", "residual"])
def test_after_a_backward_pass(name: str) -> None:
    """Tensors are given back, the calls die with the graph, parameters carry the results and nothing else."""
    problem = extended(name)
    loss = forward(problem)
    nodes = nodes_of(loss)
    calls = calls_of(nodes)
    assert len(calls) == len(list(problem.model.modules())) + 1
    assert any(slot.value is not None for call in calls for slot in call.tensor_inputs)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    assert not recording.open
    assert all(slot.value is None for call in calls for slot in (*call.tensor_inputs, *call.outputs))
    assert all(set(vars(p)) == {"grad_batch", "diag_ggn_exact"} for p in problem.model.parameters())
    watched = [ref(call) for call in calls]
    del calls, nodes, loss
    assert all(call() is None for call in watched)


def fail_in_hook(problem: Problem) -> Any:
    return problem.model[0].weight.register_hook(lambda _: 1 / 0)


@pytest.mark.parametrize("retain", [False, True])
def test_after_an_exception(retain: bool) -> None:
    problem = extended()
    handle = fail_in_hook(problem)
    loss = forward(problem)
    nodes = nodes_of(loss)
    calls = calls_of(nodes)
    with pytest.raises(ZeroDivisionError), backpack(BatchGrad(), KFAC()):
        loss.backward(retain_graph=retain)
    handle.remove()
    assert not recording.open
    assert not CTX.get_active_exts()
    assert all(not vars(p) for p in problem.model.parameters())
    held = [slot.value is not None for call in calls for slot in (*call.tensor_inputs, *call.outputs)]
    assert any(held) == retain
    watched = [ref(call) for call in calls]
    del calls, nodes, loss
    gc.collect()  # the traceback of the exception is a cycle
    assert all(call() is None for call in watched)


def operations(loss: Tensor) -> list[str]:
    """All that runs in a plain backward pass."""
    with torch.profiler.profile() as profile:
        loss.backward(retain_graph=True)
    return sorted(event.name for event in profile.events())


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_on_nodes_are_gone(fails: bool) -> None:
    """A plain pass over the retained graph runs what it ran before: no operation, no draw, no result, no call of the extension hook more."""
    problem, visited = extended(), []
    loss = forward(problem)
    loss.backward(retain_graph=True)
    expected = operations(loss)
    handle = fail_in_hook(problem) if fails else None
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), backpack(BatchGrad(), DiagGGNMC(), extension_hook=visited.append):
        loss.backward(retain_graph=True)
    if fails:
        handle.remove()
    drawn = torch.get_rng_state()
    assert not torch.equal(state, drawn)
    clear(problem.model)
    visited.clear()
    assert operations(loss) == expected
    assert torch.equal(torch.get_rng_state(), drawn)
    assert results(problem.model) == {}
    assert not visited


@pytest.mark.parametrize("call", ["backward", "grad"])
@pytest.mark.parametrize("name", ["chain", "residual"])
def test_plain_pass_gives_recorded_tensors_back(call: str, name: str) -> None:
    """Outside of a context, too, and although ``loss`` is still alive; not if the graph is retained."""
    problem = extended(name)
    loss = forward(problem)
    calls = calls_of(nodes_of(loss))
    params = list(problem.model.parameters())

    def held() -> list[str]:
        slots = [(call, slot) for call in calls for slot in (*call.tensor_inputs, *call.outputs)]
        return [call.path for call, slot in slots if slot.value is not None]

    before = held()
    assert before
    loss.backward(retain_graph=True) if call == "backward" else torch.autograd.grad(loss, params, retain_graph=True)
    torch.autograd.grad(loss, params, create_graph=True)
    assert held() == before
    loss.backward() if call == "backward" else torch.autograd.grad(loss, params)
    assert held() == []
    assert not hasattr(problem.losses[0], "input0")


def test_closures_keep_what_they_read_and_no_longer() -> None:
    """A curvature-matrix product reads recorded tensors later; deleting it gives them back."""
    problem = extended()
    problem.model.eval()
    with backpack(HMP()):
        forward(problem).backward()
    alive = census()
    weight = problem.model[0].weight
    first = weight.hmp(torch.ones_like(weight))
    forward(problem).backward()
    assert torch.equal(weight.hmp(torch.ones_like(weight)), first)
    assert alive["calls"] > 0
    clear(problem.model)
    del first
    assert census()["calls"] == 0


def test_results_do_not_keep_the_graph() -> None:
    problem = extended()
    loss = forward(problem)
    calls = [ref(call) for call in calls_of(nodes_of(loss))]
    with backpack(BatchGrad(), DiagGGNExact(), KFAC(), Variance(), SqrtGGNExact()):
        loss.backward()
    del loss
    assert calls
    assert all(call() is None for call in calls)
    assert all(fields.keys() == {"grad_batch", "diag_ggn_exact", "kfac", "variance", "sqrt_ggn_exact"} for fields in results(problem.model).values())


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("extension", [BatchGrad, SqrtGGNExact, DiagGGNExact, KFAC])
def test_modules_and_parameters_die(extension: type[BackpropExtension], memory: int | None) -> None:
    """Nothing keeps a model: neither ``extend``, nor a context, nor what a pass was made of, in blocks or not."""
    problem = extended()
    with backpack(extension(), memory=memory) as _:
        forward(problem).backward()
    watched = [ref(module) for module in problem.model.modules()] + [ref(p) for p in problem.model.parameters()] + [ref(problem.losses[0])]
    tracked = len(owners._names)
    count = len(list(problem.model.parameters()))
    del problem
    assert all(thing() is None for thing in watched)
    assert len(owners._names) == tracked - count


def own_weight(module: Module) -> None:
    module.weight = Parameter(torch.rand(3, 3))


def own_layer(base: type[Module], prepare: Callable[[Module], object] | None = None) -> type[Module]:
    """Make a class of which methods hold it, and something else."""
    large = torch.zeros(1000)

    class Layer(base):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            if prepare is not None:
                prepare(self)

        def forward(self, x: Tensor) -> Tensor:
            assert super() is not None
            return F.linear(x, self.weight) + large[0]

    return Layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.weight_norm(Linear(3, 3)),
        lambda: parametrizations.spectral_norm(Linear(3, 3)),
        lambda: parametrizations.weight_norm(own_layer(Module, own_weight)()),
        lambda: parametrizations.spectral_norm(own_layer(Linear)(3, 3)),
        lambda: type("Own", (Linear,), {"forward": lambda self, x, scale: F.linear(scale * x, self.weight)})(3, 3),
        lambda: own_layer(Linear)(3, 3),
        lambda: own_layer(Module, own_weight)(*()),
    ],
    ids=["weight norm", "spectral norm", "weight norm, own", "spectral norm, own", "class of its own", "class that is derived", "class without rule"],
)
def test_classes_die_with_their_modules(make: Callable[[], Module]) -> None:
    """A parametrized module has a class of its own, which holds it: nothing that is known of classes may keep them."""
    model = extend(make())
    module, kind, x = ref(model), ref(type(model)), torch.randn(5, 3)
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(MSELoss())(model(x, scale=2) if kind().__name__ == "Own" else model(x), torch.zeros(5, 3)).backward()
    del model
    gc.collect()
    assert module() is None
    assert kind() is None
