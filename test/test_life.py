"""The life of an extended model: conversions, copies, surgery, threads, processes, and thousands of steps."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import reduce
from time import process_time
from typing import Any
from weakref import ref

import pytest
import torch
from oracle import Oracle, Problem, Term, call_model
from test_extensions import close
from test_front_door import CHOICE, FIELDS, Net, build, chain, check, check_step, extended, hook_counts, loss_of, truth, values
from test_memory import census
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, Flatten, Linear, Module, Parameter, Sequential, Tanh
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from backpack import CTX, backpack, clear, extend, results, unextend, unscale
from backpack.core.owners import owners
from backpack.core.state import recording
from backpack.extensions import GGNMP, HBP, HMP, KFAC, PCHMP, BatchGrad, DiagGGNExact, SumGradSquared, Variance
from backpack.utils.errors import ArgumentError, BackpackError, OverwrittenError, UnsupportedError


class Uncalled(Module):
    """Its parameters lie in lists, and in a layer that is never called: no module is called with them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices, self.others = nn.ParameterList([torch.randn(4, 5)]), nn.ParameterDict({"bias": torch.randn(5)})
        self.head, self.flat = Linear(5, 3), Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.flat(x) @ self.matrices[0] + self.others["bias"]), self.head.weight, self.head.bias)


# --- conversions and copies -------------------------------------------------------------------------------------------------------------------


def restore(problem: Problem, make: Callable[[], Module] = chain) -> None:
    """Bring the numbers of the fresh model back."""
    problem.model.load_state_dict(build(make).model.state_dict())


CONVERSIONS: dict[str, Callable[[Module], Any]] = {
    "single and double": lambda model: model.float().double(),
    "half": lambda model: model.half().double(),
    "bfloat16": lambda model: model.to(torch.bfloat16).to(torch.float64),
    "meta and back": lambda model: model.to("meta").to_empty(device="cpu"),
    "train and eval": lambda model: model.eval().train(),
    "share memory": lambda model: model.share_memory(),
    "frozen and back": lambda model: model.requires_grad_(False).requires_grad_(True),
    "assigned": lambda model: model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("make", [chain, Net, Uncalled])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after a pass"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions(conversion: str, used: bool, make: Callable[[], Module]) -> None:
    problem = extended(make)
    names, counts = list(problem.model.state_dict()), hook_counts(problem.model)
    if used:
        check_step(problem, make)
    CONVERSIONS[conversion](problem.model)
    restore(problem, make)
    assert list(problem.model.state_dict()) == names
    assert hook_counts(problem.model) == counts
    check_step(problem, make)


def test_meta_is_refused_by_name() -> None:
    problem = extended()
    problem.model.to("meta")
    with pytest.raises(NotImplementedError, match="weight is on the meta device|bias is on the meta device"), backpack(BatchGrad()):
        problem.losses[0](problem.model(problem.x.to("meta")), problem.terms[0].target.to("meta")).backward()
    assert results(problem.model) == {}


def test_swapped_parameters() -> None:
    """Torch refuses to swap tensors that somebody refers to weakly; without ``extend`` it does, and a model can be extended afterwards."""
    problem = extended()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="swap"):
            problem.model.to(torch.float32)
        plain = build()
        plain.model.to(torch.float32).to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    restore(plain)
    extend(plain.model)
    extend(plain.losses[0])
    check_step(plain)


def test_results_travel_with_a_pickle_and_not_with_a_copy() -> None:
    problem = extended()
    with backpack(BatchGrad(), KFAC()):
        loss_of(problem).backward()
    found = results(pickle.loads(pickle.dumps(problem.model)))
    for name, fields in results(problem.model).items():
        assert torch.equal(found[name]["grad_batch"], fields["grad_batch"])
    assert results(copy.deepcopy(problem.model)) == {}
    assert all("grad_batch" not in vars(p) for p in problem.model.state_dict().values())
    with backpack(HMP()):
        loss_of(problem).backward()
    assert results(copy.deepcopy(problem.model)) == {}
    clear(problem.model)  # a function cannot be pickled
    pickle.dumps(problem.model)


def averaged(model: Module) -> Module:
    return AveragedModel(model).module


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after a pass"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, averaged, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "average", "pickle"])
def test_copies_of_parameters_that_no_module_is_called_with(duplicate: Callable[[Module], Module], used: bool) -> None:
    problem = extended(Uncalled)
    if used:
        check_step(problem, Uncalled)
    problem.model = duplicate(problem.model)
    with backpack(BatchGrad(exclude=["matrices.0", "head"])):
        loss_of(problem).backward()
    assert list(values(problem.model, "grad_batch")) == ["others.bias"]
    check_step(problem, Uncalled)
    problem.model.matrices[0] = Parameter(problem.model.matrices[0].detach().clone())
    with backpack(BatchGrad(exclude=["matrices.0"])):
        loss_of(problem).backward()
    assert list(values(problem.model, "grad_batch")) == ["others.bias", "head.weight", "head.bias"]
    check_step(problem, Uncalled)
    with backpack(BatchGrad(exclude=["matrixes.0"])), pytest.raises(ArgumentError, match=r"Did you mean.*matrices\.0"):
        loss_of(problem).backward()


def test_attention_that_was_copied() -> None:
    """Its output projection is never called."""

    def make() -> Module:
        layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True)
        return Sequential(Linear(4, 8), nn.Unflatten(1, (2, 4)), layer, Flatten(), Linear(8, 3))

    problem = extended(make)
    problem.model = copy.deepcopy(problem.model)
    for _ in range(2):
        with backpack(BatchGrad(), DiagGGNExact()):
            loss_of(problem).backward()
        check(problem.model, "grad_batch", "diag_ggn_exact", make=make)
        problem.model.load_state_dict({name: p.clone() for name, p in problem.model.state_dict().items()}, assign=True)
        assert results(problem.model) == {}


class Turned(Module):
    """Its inner modules are called with the samples on axis 1, and it has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Linear(2, 5), Linear(5, 3)
        self.shift = Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x.unflatten(1, (2, 2)).transpose(0, 1)) + self.shift)).mean(0)


class Copying(Turned):
    """Copies what it knows of."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        other = Copying()
        other.one, other.two, other.shift = (copy.deepcopy(part, memo) for part in (self.one, self.two, self.shift))
        return other


class Thorough(Turned):
    """Copies all that it has, hooks included."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        memo[id(self)] = other = type(self).__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other


class Forgetful(Turned):
    """Leaves its hooks out of its state."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_forward_hooks", "_forward_pre_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**vars(Module()), **state})


class Stateful(Turned):
    """Leaves something else out of its state, as the modules of some trainers do."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None}


def traced() -> Module:
    model = torch.fx.symbolic_trace(Turned())
    for node in model.graph.nodes:
        node.type = None  # annotations that are strings are not pickled
    model.recompile()
    return model


def unpickled(model: Module) -> Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    "make, duplicate", [(traced, d) for d in (copy.deepcopy, averaged, unpickled)] + [(Copying, copy.deepcopy), (Forgetful, unpickled)]
)
def test_copies_that_lose_what_is_installed(make: Callable[[], Module], duplicate: Callable[[Module], Module]) -> None:
    """Their inner modules still have it, and would be taken for models, with the samples on axis 0: refused, until the copy is extended."""
    problem = extended(make)
    check_step(problem, make)
    clear(problem.model)
    problem.model.zero_grad()
    problem.model = copy.deepcopy(duplicate(problem.model))
    for extension in (BatchGrad(), DiagGGNExact()):
        with pytest.raises(AttributeError, match=r"^(one|two) came with a copy.*extend\(model\)"), backpack(extension):
            loss_of(problem).backward()
    assert results(problem.model) == {}
    assert all(p.grad is None for p in problem.model.parameters())
    extend(problem.model)
    check_step(problem, make)


@pytest.mark.parametrize("make", [Turned, Stateful])
def test_copies_of_parts(make: Callable[[], Module]) -> None:
    """Whose class copies as others do may be called part by part, also in a copy."""
    part, x = copy.deepcopy(extended(make).model.one), torch.randn(3, 2, dtype=torch.float64)
    with backpack(BatchGrad()):
        part(x).sum().backward()
    assert torch.equal(part.weight.grad_batch, x[:, None].expand(3, 5, 2))


@pytest.mark.parametrize("copies", [1, 2])
def test_parts_of_copies_that_lose_nothing(copies: int) -> None:
    """Whatever its class has of its own: the copy around a part has its hooks, so that nothing else is the model where the part is called."""
    model, x = extended(Thorough).model, torch.randn(3, 2, dtype=torch.float64)
    for _ in range(copies):
        model = copy.deepcopy(model)
    with backpack(BatchGrad()):
        model.one(x).sum().backward()
    assert torch.equal(model.one.weight.grad_batch, x[:, None].expand(3, 5, 2))


@pytest.mark.parametrize("outer", [Sequential, Copying])
def test_parts_of_a_copy_that_loses_nothing_in_one_that_may(outer: type[Module]) -> None:
    """A part is one of each module around it."""
    model, x = outer(), torch.randn(3, 2)
    model.one = Thorough()
    model = copy.deepcopy(extend(model))
    with pytest.raises(AttributeError, match="extend") if outer is Copying else nullcontext(), backpack(BatchGrad()):
        model.one.one(x).sum().backward()
    assert hasattr(model.one.one.weight, "grad_batch") == (outer is Sequential)


def test_copy_of_a_part_of_a_traced_model() -> None:
    part, x = copy.deepcopy(extended(traced).model.one), torch.randn(3, 2, dtype=torch.float64)
    with pytest.raises(AttributeError, match="extend"), backpack(BatchGrad()):
        part(x).sum().backward()
    extend(part)
    with backpack(BatchGrad()):
        part(x).sum().backward()
    assert torch.equal(part.weight.grad_batch, x[:, None].expand(3, 5, 2))


def test_results_that_came_with_a_pickle() -> None:
    """Nothing else is known about them: they are not unscaled without a word, and do not stay on layers that are frozen now."""
    problem = extended()
    with backpack(BatchGrad(), SumGradSquared()):
        loss_of(problem).backward()
    problem.model = pickle.loads(pickle.dumps(problem.model))
    before = values(problem.model, "grad_batch")["0.weight"].clone()
    with pytest.raises(UnsupportedError, match=r"0\.weight\.grad_batch .*pickle.*clear"):
        unscale(problem.model, 2.0)
    assert torch.equal(values(problem.model, "grad_batch")["0.weight"], before)
    problem.model[0].requires_grad_(False)
    with backpack(BatchGrad()):
        loss_of(problem).backward()
    assert list(values(problem.model, "grad_batch")) == ["2.weight", "2.bias"]
    with backpack(SumGradSquared()):
        loss_of(problem).backward()
    assert list(values(problem.model, "sum_grad_squared")) == ["2.weight", "2.bias"]
    with backpack(BatchGrad(), SumGradSquared()):
        loss_of(problem).backward()
    unscale(problem.model, 2.0)
    close(2 * problem.model[2].weight.grad_batch, truth().grad_batch["2.weight"])


def test_results_that_a_new_process_reads() -> None:
    """No extension was made there, which would say what results are called."""
    problem = extended()
    with backpack(HBP(*CHOICE, savefield="mine")):
        loss_of(problem).backward()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(_fields, pickle.dumps(problem.model)).result(120) == {name: ["mine"] for name, _ in problem.model.named_parameters()}


def _fields(pickled: bytes) -> dict[str, list[str]]:
    return {name: list(fields) for name, fields in results(pickle.loads(pickled)).items()}


# --- surgery ----------------------------------------------------------------------------------------------------------------------------------


def one_by_one(model: Module, x: Tensor) -> Tensor:
    """Call the layers of a model, but never the model."""
    return reduce(lambda hidden, layer: layer(hidden), model, x)


@pytest.mark.parametrize("output", [call_model, one_by_one])
def test_added_module(output: Callable[[Module, Tensor], Tensor]) -> None:
    """A layer that came after ``extend`` is refused by name, rather than left without quantities; then it is extended, or left alone."""
    for replace in (False, True):
        source, problem = build(), build()
        problem.output = output
        extend(problem.model if replace else problem.model[:2])
        problem.model = extend(problem.model[:2]) if not replace else problem.model
        extend(problem.losses[0])
        if replace:
            problem.model[2] = source.model[2]
        else:
            problem.model.append(source.model[2])
        restore(problem)
        for extension in (BatchGrad(), DiagGGNExact()):
            with pytest.raises(AttributeError, match=r"2\.(weight|bias).*added after extend"), backpack(extension):
                loss_of(problem).backward()
        assert results(problem.model) == {}
        assert all(p.grad is None for p in problem.model.parameters())
        unextend(problem.model[2])
        with backpack(BatchGrad()):
            loss_of(problem).backward()
        assert list(values(problem.model, "grad_batch")) == ["0.weight", "0.bias"]
        extend(problem.model)
        check_step(problem)


def test_copy_of_a_model_of_which_a_part_was_left_out() -> None:
    """Which part it was does not travel with the copy: refused by name, rather than left without quantities or given some."""
    problem = extended()
    unextend(problem.model[2])
    problem.model = copy.deepcopy(problem.model)
    with pytest.raises(AttributeError, match=r"2\.(weight|bias).*copy.*unextend"), backpack(BatchGrad()):
        loss_of(problem).backward()
    unextend(problem.model[2])
    with backpack(BatchGrad()):
        loss_of(problem).backward()
    assert list(values(problem.model, "grad_batch")) == ["0.weight", "0.bias"]
    close(problem.model[0].weight.grad_batch, truth().grad_batch["0.weight"])


def test_every_layer_replaced() -> None:
    """Even if no tracked parameter is left in the graph."""
    problem, source = extended(), build()
    problem.model[0], problem.model[2] = source.model[0], source.model[2]
    with pytest.raises(AttributeError, match=r"extend\(model\)"), backpack(BatchGrad()):
        loss_of(problem).backward()
    extend(problem.model)
    check_step(problem)


def test_parametrization_added_after_extend() -> None:
    """``parametrize`` makes modules and replaces parameters: refused, or exact, before and after extending again."""

    def make() -> Module:
        return Sequential(parametrizations.weight_norm(Linear(4, 5)), Tanh(), Linear(5, 3))

    problem = extended()
    parametrizations.weight_norm(problem.model[0])
    restore(problem, make)
    try:
        with backpack(BatchGrad()):
            loss_of(problem).backward()
    except BackpackError as refusal:
        assert "extend(model)" in str(refusal)
        assert results(problem.model) == {}
    else:
        check(problem.model, "grad_batch", make=make)
    extend(problem.model)
    check_step(problem, make)
    with torch.no_grad():
        expected = problem.model[0].weight.clone()
    parametrize.remove_parametrizations(problem.model[0], "weight")
    extend(problem.model)
    assert torch.equal(problem.model[0].weight, expected)
    with backpack(BatchGrad()):
        loss_of(problem).backward()
    plain = build()
    plain.model.load_state_dict(problem.model.state_dict())
    for name, value in Oracle(plain).grad_batch.items():
        close(problem.model.get_parameter(name).grad_batch, value)


def test_only_a_part_is_extended() -> None:
    """What lies in front of an extended head carries nothing; the head is exact."""
    problem = build(Net)
    extend(problem.model.head)
    extend(problem.losses[0])
    with backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward()
    for field in ("grad_batch", "diag_ggn_exact"):
        found = values(problem.model, field)
        assert list(found) == ["head.weight", "head.bias"]
        for name, value in found.items():
            close(value, FIELDS[field](Oracle(build(Net)))[name])


# --- other tensors ----------------------------------------------------------------------------------------------------------------------------


class Marked(Tensor):
    """A subclass that does nothing."""


def test_subclass_of_tensor_as_input() -> None:
    problem = extended(Net)
    problem.x = problem.x.as_subclass(Marked)
    with backpack(BatchGrad(), Variance(), DiagGGNExact()):
        loss_of(problem).backward()
    check(problem.model, "grad_batch", "variance", "diag_ggn_exact", make=Net)


class Shift(Module):
    """The first parameter is added: the input is not saved for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.offset, self.head = Flatten(), Parameter(torch.ones(4)), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(x) + self.offset)


def test_inference_mode() -> None:
    """Nothing is recorded in it; a tensor made in it can be an input wherever torch accepts it."""
    problem = extended(Shift)
    with torch.inference_mode():
        assert not problem.model(problem.x).requires_grad
        problem.x = problem.x.clone()
    assert not hasattr(problem.model, "output")
    with backpack(BatchGrad(), DiagGGNExact()):
        loss_of(problem).backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", make=Shift)
    with backpack(BatchGrad()), pytest.raises(RuntimeError, match="Inference tensors"):
        extend(Linear(4, 3).double())(problem.x)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_backward_without_gradients(context: Callable[[], Any]) -> None:
    """Also where `.grad` is the sum of per-sample gradients."""
    model = extend(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), Flatten(), Linear(192, 3)).double())
    x, y = torch.randn(5, 2, 8, 8, dtype=torch.float64), torch.arange(5) % 3
    parameters = list(model.parameters())
    losses = nn.functional.cross_entropy(model(x), y, reduction="none") / 5
    expected = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    loss = nn.functional.cross_entropy(model(x), y)
    with backpack(BatchGrad()), context():
        loss.backward()
    for parameter, *rows in zip(parameters, *expected, strict=True):
        torch.testing.assert_close(parameter.grad_batch.clone(), torch.stack(rows))
        torch.testing.assert_close(parameter.grad.clone(), sum(rows))


class Table(Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Parameter(torch.randn(2, 4))

    def forward(self, samples: int) -> Tensor:
        return self.table.expand(samples, -1, -1)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("second", [nn.Identity, lambda: nn.Dropout(0.0), lambda: Linear(4, 4)])
def test_view_of_a_parameter_without_gradients(context: Callable[[], Any], second: Callable[[], Module]) -> None:
    """It requires a gradient where nothing records: what it is given to records nothing."""
    table, layer = Table(), second()
    truth = layer(table(3)).detach()
    for module in (table, layer):
        extend(module)
    with context():
        assert torch.equal(layer(table(3)), truth)
    assert not hasattr(layer, "input0") and not hasattr(layer, "output")


# --- several threads and processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multithreading", [False, True])
def test_threads_at_full_speed(multithreading: bool) -> None:
    """Four threads train, each with extensions of its own, one without; nobody waits for anybody."""
    chosen = [(BatchGrad(),), (DiagGGNExact(), Variance()), (), (Variance(), BatchGrad())]
    problems, failures = [extended((chain, Net)[i % 2]) for i in range(4)], []
    for make in (chain, Net):
        truth(make)  # once, and not by two threads that draw from one generator

    def work(i: int) -> None:
        problem, make = problems[i], (chain, Net)[i % 2]
        try:
            with torch.autograd.set_multithreading_enabled(multithreading):
                for _ in range(30):
                    with backpack(*chosen[i]):
                        loss_of(problem).backward()
                    fields = {field for found in results(problem.model).values() for field in found}
                    assert fields == {extension.savefield for extension in chosen[i]}
            check(problem.model, *(extension.savefield for extension in chosen[i]), make=make)
        except Exception as failure:  # noqa: BLE001
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert type(torch.autograd.Variable._execution_engine).__name__ != "_WatchedEngine"


def test_backward_in_another_thread_than_forward() -> None:
    problem = extended()
    loss, failures = loss_of(problem), []

    def work() -> None:
        try:
            with backpack(BatchGrad(), DiagGGNExact()):
                loss.backward()
        except Exception as failure:  # noqa: BLE001
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not failures
    check(problem.model, "grad_batch", "diag_ggn_exact")


class InThreads(Module):
    """Calls layers in a thread of its own, and returns its loss; what it computes of a time step is a row of them."""

    def __init__(self, threads: bool, early: bool) -> None:
        super().__init__()
        self.first, self.last, self.threads, self.early = Linear(4, 5), Linear(5, 3), threads, early

    def call(self, layer: Module, x: Tensor) -> Tensor:
        if not self.threads:
            return layer(x)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(layer, x).result()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(self.call(self.first, x.flatten(0, 1)))
        if self.early:
            return F.cross_entropy(self.last(hidden.unflatten(0, x.shape[:2]).sum(1)), target)
        return F.cross_entropy(self.call(self.last, hidden).unflatten(0, x.shape[:2]).sum(1), target)


@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.parametrize("early", [True, False])
def test_layers_that_are_called_in_other_threads(early: bool, samples: int) -> None:
    """They are parts of the model, as they are without threads: their rows are no samples, but parts of them."""
    torch.manual_seed(0)
    x, target = torch.randn(samples, 3, 4), torch.arange(samples) % 3
    found = []
    for threads in (False, True):
        torch.manual_seed(1)
        model = extend(InThreads(threads, early))
        with backpack(BatchGrad()):
            model(x, target).backward()
        found.append([parameter.grad_batch for parameter in model.parameters()])
    assert all(value.shape[0] == samples for value in found[0])
    torch.testing.assert_close(*found)


class Rows(Dataset):
    """Data that an extended model has made, in the worker process."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __len__(self) -> int:
        return len(self.problem.x)

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        problem = self.problem
        with backpack(SumGradSquared()):
            problem.losses[0](problem.model(problem.x[n : n + 1]), problem.terms[0].target[n : n + 1]).backward()
        return problem.x[n], problem.terms[0].target[n], problem.model[0].bias.sum_grad_squared


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method: str) -> None:
    """A process that begins in the middle of training, by fork or with a pickled model, computes what the first one does."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("no such way to start a process here")
    problem = extended()
    check_step(problem)
    clear(problem.model)
    loader = DataLoader(Rows(problem), batch_size=None, num_workers=1, multiprocessing_context=method)
    with backpack(BatchGrad()):
        rows = list(loader)
        loss_of(problem).backward()
    check(problem.model, "grad_batch")
    scale = len(problem.x)
    for n, (_, _, squared) in enumerate(rows):
        close(squared, (scale * problem.model[0].bias.grad_batch[n]).square())


# --- long runs --------------------------------------------------------------------------------------------------------------------------------


def small() -> tuple[Problem, torch.optim.Optimizer]:
    problem = extended(Net)
    return problem, torch.optim.SGD(problem.model.parameters(), lr=1e-3)


def train(problem: Problem, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        with backpack(Variance(), DiagGGNExact(), KFAC()):
            loss_of(problem).backward()
        optimizer.step()


def check_flat(problem: Problem, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Neither tensors, nor calls, nor hooks, nor any objects that the collector leaves, grow in number."""
    train(problem, optimizer, 10)
    counts = []
    for _ in range(2):
        gc.collect()
        counts.append((census(), hook_counts(problem.model)))
        train(problem, optimizer, steps)
    (before, hooks), (after, hooks_after) = counts
    assert hooks_after == hooks
    assert {key: after[key] for key in ("tensors", "calls", "tracked", "open")} == {
        key: before[key] for key in ("tensors", "calls", "tracked", "open")
    }
    assert after["all"] - before["all"] <= steps // 20 + 5


@pytest.mark.usefixtures("no_garbage_collector")
def test_some_steps_leave_no_object() -> None:
    check_flat(*small(), 300)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_steps() -> None:
    """Memory is flat, and the last thousand steps take as long as the second thousand."""
    problem, optimizer = small()
    times = []
    for _ in range(10):
        start = process_time()
        check_flat(problem, optimizer, 490)
        times.append(process_time() - start)
    assert min(times[-3:]) <= 1.5 * min(times[1:4])
    clear(problem.model)
    restore(problem, Net)
    check_step(problem, Net)


@pytest.mark.parametrize("extension", [HMP, GGNMP, PCHMP])
@pytest.mark.parametrize("functional", [False, True])
def test_functions_do_not_keep_a_model_alive(extension: type, functional: bool) -> None:
    """Products are attributes of parameters: with a graph in them, which leads to the parameter, both would live for ever."""

    def step() -> None:
        problem = extended()
        lossfunc = F.cross_entropy if functional else problem.losses[0]
        with backpack(extension()):
            lossfunc(problem.model(problem.x), problem.terms[0].target).backward()
        for parameter in problem.model.parameters():
            getattr(parameter, extension().savefield)(torch.ones_like(parameter))

    step()
    gc.collect()
    before = census()
    step()
    gc.collect()
    after = census()
    assert (after["tensors"], after["calls"]) == (before["tensors"], before["calls"])


@pytest.mark.parametrize("extension", [HMP, GGNMP])
def test_products_in_nets_deeper_than_calls_may_be_nested(extension: type) -> None:
    first, lossfunc = Linear(2, 2), extend(nn.MSELoss())
    model = extend(Sequential(first, *[nn.ELU() for _ in range(1100)]))
    x, y, vector = torch.randn(3, 2), torch.randn(3, 2), torch.randn(2, 2)
    with backpack(extension()):
        lossfunc(model(x), y).backward()
    out = model(x)
    if extension is HMP:
        (gradient,) = torch.autograd.grad(lossfunc(out, y), first.weight, create_graph=True)
        (expected,) = torch.autograd.grad(gradient, first.weight, vector)
    else:
        columns = torch.zeros_like(out, requires_grad=True)
        (pulled,) = torch.autograd.grad(out, first.weight, columns, create_graph=True)
        (pushed,) = torch.autograd.grad(pulled, columns, vector, retain_graph=True)
        (expected,) = torch.autograd.grad(out, first.weight, 2 / y.numel() * pushed)
    torch.testing.assert_close(getattr(first.weight, extension().savefield)(vector), expected)
    assert expected.abs().min() > 0


def test_differentiable_results_can_be_given_up() -> None:
    """They hold the graph, which holds the parameter that carries them."""

    def step(give_up: bool) -> bool:
        problem = extended()
        with backpack(BatchGrad()):
            torch.autograd.grad(loss_of(problem), list(problem.model.parameters()), create_graph=True)
        if give_up:
            clear(problem.model)
        alive = ref(problem.model[0].weight)
        del problem
        gc.collect()
        return alive() is not None

    assert [step(False), step(True)] == [True, False]


def test_parameters_may_die_while_names_are_looked_up() -> None:
    """The garbage collector runs whenever objects are made, in the middle of a loop over everything that is tracked, too."""
    before, kept = gc.get_threshold(), extended()
    gc.collect()
    gc.disable()
    models = [extend(Sequential(Linear(2, 2))) for _ in range(1000)]
    for model in models:
        model.itself = [model]  # not a child: a cycle of references
    gc.collect(0)  # they are in the next generation now, and alive
    del model, models
    try:
        gc.set_threshold(100, 0, 1000)
        gc.enable()
        found = owners.named("0.weight")
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert id(kept.model[0].weight) in found


class Product(Module):
    """A model that interrupts its own backward pass when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.stage = Linear(4, 5), Linear(5, 3), ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.stage == "backward":
            hidden.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
        if self.stage == "forward":
            signal.raise_signal(signal.SIGINT)
        return self.last(torch.tanh(hidden))


@pytest.mark.parametrize("stage", ["forward", "backward", "extension hook", "loss"])
def test_interrupted_by_a_key(stage: str) -> None:
    """Ctrl-C at any time: nothing is left on parameters, no context is open, and the next step is right."""
    problem = extended(Product)
    counts, engine = hook_counts(problem.model), torch.autograd.Variable._execution_engine

    class Interrupting(CrossEntropyLoss):
        def forward(self, *_: Tensor) -> Tensor:
            raise KeyboardInterrupt

    def hook(_: Module) -> None:
        raise KeyboardInterrupt

    problem.model.stage = stage
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores the key
    if stage == "loss":
        problem.terms[0] = Term(extend(Interrupting()), problem.terms[0].target)
    with pytest.raises(KeyboardInterrupt), backpack(BatchGrad(), KFAC(), extension_hook=hook if stage == "extension hook" else None):
        loss_of(problem).backward()
    problem.model.stage = ""
    problem.terms[0] = Term(extend(CrossEntropyLoss()), problem.terms[0].target)
    assert results(problem.model) == {}
    assert hook_counts(problem.model) == counts
    assert not CTX.get_active_exts()
    assert torch.autograd.Variable._execution_engine is engine
    check_step(problem, Product)
    assert not recording.open


class Steps(Module):
    """Has rows of time steps inside, and does something else first, in between or last."""

    def __init__(self, place: str = "", between: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.first, self.last = Linear(4, 5), Linear(5, 3)
        self.place, self.between = place, between

    def happens(self, place: str) -> None:
        if place == self.place:
            self.between()

    def forward(self, x: Tensor) -> Tensor:
        self.happens("first")
        hidden = torch.tanh(self.first(x.flatten(0, 1)))
        self.happens("between")
        rows = self.last(hidden)
        self.happens("last")
        return rows.unflatten(0, x.shape[:2]).sum(1)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("place", ["first", "between", "last"])
def test_pass_of_another_model_in_a_forward_pass(place: str, samples: int, extension: type) -> None:
    """Neither does the model around forget that it has begun, nor does the one inside become a part of it."""
    torch.manual_seed(0)
    side, field = extend(Steps().double()), extension().savefield
    x, y = torch.randn(2, 2, 4, dtype=torch.float64), torch.tensor([0, 2])

    def step() -> None:
        clear(side)
        with backpack(extension()):
            F.cross_entropy(side(x), y).backward()

    step()
    alone = values(side, field)
    model, plain = extend(Steps(place, step).double()), Steps().double()
    plain.load_state_dict(model.state_dict())
    problem = Problem(plain, torch.randn(samples, 3, 4, dtype=torch.float64), [Term(CrossEntropyLoss(), torch.arange(samples))])
    with backpack(extension()):
        F.cross_entropy(model(problem.x), problem.terms[0].target).backward()
    assert not recording.open
    for found, expected in ((values(model, field), FIELDS[field](Oracle(problem))), (values(side, field), alone)):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            close(value, expected[name])


class Retries(Module):
    """Goes on after something inside was interrupted; has rows of time steps inside."""

    def __init__(self, kind: type[BaseException] | None = None) -> None:
        super().__init__()
        self.inner, self.first, self.last, self.kind = Sequential(Linear(4, 4), Interrupts(kind)), Linear(4, 5), Linear(5, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        with suppress(BaseException):
            self.inner(x)
        return self.last(torch.tanh(self.first(x.flatten(0, 1)))).unflatten(0, x.shape[:2]).sum(1)


class Interrupts(Module):
    """Raises, if it is told what."""

    def __init__(self, kind: type[BaseException] | None) -> None:
        super().__init__()
        self.layer, self.kind = Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.kind is not None:
            raise self.kind
        return x


@pytest.mark.parametrize("kind", [RuntimeError, GeneratorExit])
@pytest.mark.parametrize("samples", [2, 3])
def test_forward_pass_that_goes_on_after_an_interruption(samples: int, kind: type[BaseException]) -> None:
    """torch runs no hooks where something else is raised than an Exception: the module around is recorded, too."""
    torch.manual_seed(0)
    model, plain = extend(Retries(kind).double()), Retries().double()
    plain.load_state_dict(model.state_dict())
    problem = Problem(plain, torch.randn(samples, 3, 4, dtype=torch.float64), [Term(CrossEntropyLoss(), torch.arange(samples))])
    with backpack(BatchGrad()):
        F.cross_entropy(model(problem.x), problem.terms[0].target).backward()
    assert not recording.open
    expected = FIELDS["grad_batch"](Oracle(problem))
    for name, value in values(model, "grad_batch").items():
        close(value, expected[name])


def swapped(old: Module) -> Module:
    """Another module with the same parameters, to which hooks are handed on as quantization does, without their settings."""
    new = copy.deepcopy(old)
    unextend(new)
    for name, parameter in old._parameters.items():
        setattr(new, name, parameter)
    for hook in old._forward_pre_hooks.values():
        new.register_forward_pre_hook(hook)
    for hook in old._forward_hooks.values():
        new.register_forward_hook(hook)
    return new


def test_hooks_handed_on_to_other_modules() -> None:
    """The graph is followed where they were, and when the model has been extended again, rules are used as before."""
    problem = extended(lambda: Sequential(Linear(4, 5), Tanh(), Linear(5, 3)))
    for place, old in enumerate(problem.model):
        problem.model[place] = swapped(old)
    problem.model[1] = swapped(extend(Sequential(Tanh())))
    for _ in range(2):
        check_step(problem, lambda: Sequential(Linear(4, 5), Sequential(Tanh()), Linear(5, 3)))
        extend(problem.model)


def interrupt(kind: type[BaseException]) -> BaseException:
    """Leave a forward pass in the middle, outside of a context; as long as what is returned lives, so do its frames."""

    class Stopped(Module):
        def forward(self, _: Tensor) -> Tensor:
            raise kind

    model = extend(Sequential(Linear(2, 2), Sequential(Stopped())))
    try:
        model(torch.randn(2, 2))
    except BaseException as stop:
        return stop


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_forward_pass_after_an_interrupted_one(kind: type[BaseException]) -> None:
    """Calls of another model, or of a single layer, are outermost again, although somebody holds the traceback."""
    x, target = torch.randn(4, 4, 4), torch.randn(4, 4, 4)
    for make in (lambda: Sequential(Linear(4, 4), Tanh()), lambda: Linear(4, 4)):
        kept = interrupt(kind)
        model, plain = make(), make()
        plain.load_state_dict(model.state_dict())
        out = extend(model)(x)
        assert not recording.open
        with backpack(BatchGrad()):
            (out.transpose(0, 1) * target).sum().backward()
        for parameter, true in zip(model.parameters(), plain.parameters(), strict=True):
            for n in range(4):
                (expected,) = torch.autograd.grad((plain(x[n]) * target[:, n]).sum(), true)
                torch.testing.assert_close(parameter.grad_batch[n], expected)
        assert isinstance(kept, kind)


@pytest.mark.parametrize("context", [nullcontext, lambda: backpack(Variance())])
def test_names_that_modules_share_with_recorded_tensors(context: Callable[[], Any]) -> None:
    """Attributes of a class are never covered, also if the class is used by a module that was extended before."""

    class Titled(Linear):
        input1 = "a title"

        @property
        def output(self) -> str:
            return "a property"

    model = extend(Sequential(Titled(4, 5), nn.Tanh(), Linear(5, 3)))
    with context():
        kept = model(torch.rand(2, 4))
    assert (model[0].input1, model[0].output) == ("a title", "a property")
    assert model[0].input0.shape == (2, 4)
    assert model[2].output.shape == (2, 3)
    assert not hasattr(Module(), "input0")
    kept.sum().backward()


def _write(model: Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


CHANGES = {
    "optimizer": lambda model: SGD(model.parameters(), lr=1e-3).step(),
    "fused optimizer": lambda model: SGD(model.parameters(), lr=1e-3, fused=True).step(),
    "data": _write,
    "a parameter that is no number": lambda model: model[0].bias.data.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_products_after_parameters_have_changed(change: str) -> None:
    """Also by those whose changes autograd does not count."""
    model, lossfunc = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2))), extend(CrossEntropyLoss())
    with backpack(HMP(), GGNMP(), PCHMP()):
        lossfunc(model(torch.randn(5, 3)), torch.tensor([0, 1, 0, 1, 1])).backward()
    weight = model[0].weight
    products = weight.hmp, weight.ggnmp, weight.pchmp
    before = [product(torch.ones(4, 3)) for product in products]
    assert all(torch.equal(product(torch.ones(4, 3)), value) for product, value in zip(products, before, strict=True))
    CHANGES[change](model)
    for product in products:
        with pytest.raises(OverwrittenError, match="were changed after the forward pass"):
            product(torch.ones(4, 3))


def test_products_are_no_part_of_files() -> None:
    """They are functions of what this process holds; copies of a model have no results."""
    model, lossfunc = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2))), extend(CrossEntropyLoss())
    with backpack(HMP()):
        lossfunc(model(torch.randn(5, 3)), torch.tensor([0, 1, 0, 1, 1])).backward()
    product, ones = model[0].weight.hmp, torch.ones(4, 3)
    assert torch.equal(copy.deepcopy({"product": product})["product"](ones), product(ones))
    assert not hasattr(copy.deepcopy(model)[0].weight, "hmp")
    with pytest.raises(ArgumentError, match=r"hmp of 0.weight is a function .* backpack.clear\(model\), or save model.state_dict\(\)"):
        pickle.dumps(model)
    clear(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))[0].weight, model[0].weight)
