"""Parameters that an extension leaves out: nothing is written there, nothing is refused on their account, and the others stay exact."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cases import CASES
from cases_nets import Cube, Net, layers, parameter
from oracle import Oracle, Problem
from table import classify, default_dtype, regress
from test_extensions import QUANTITIES, Expect, all_close, collect, run
from torch import Tensor, nn, randn
from torch.nn import Linear, Module, Sequential, Tanh
from torch.nn.functional import mse_loss
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from backpack import backpack, clear, extend
from backpack.core.recording import recorder_of
from backpack.extensions import HMP, KFAC, KFLR, KFRA, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, Variance
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension
from backpack.utils.errors import ArgumentError, BackpackError

pytestmark = pytest.mark.filterwarnings("error")

N = 3
EXCLUDED = {
    "CE, mean": ["0.weight", "2.bias"],
    "residual": ["b.weight"],
    "linear twice": ["a.weight"],
    "class token": ["token"],
    "transformer: attention": ["*in_proj_weight"],
    "two losses on two heads": ["*weight"],
}


def freeze(problem: Problem, excluded: Callable[[str], bool]) -> Problem:
    for name, param in problem.model.named_parameters():
        if excluded(name):
            param.requires_grad_(False)
    return problem


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(pattern[1:]) if pattern.startswith("*") else name == pattern


@cache
def truth(case: str, pattern: str) -> Oracle:
    """To leave a parameter out, and to freeze it, are the same for the others."""
    return Oracle(freeze(CASES[case].build(N), matches(pattern)))


def excluding(active: Any, *entries: Any) -> Any:
    """Leave something out, whatever the constructor is: those of the extensions hand it on."""
    active._exclude = entries
    return active


CELLS = [(extension, case, pattern) for case, patterns in EXCLUDED.items() for pattern in patterns for extension in QUANTITIES]
CELLS = [cell for cell in CELLS if N in QUANTITIES[cell[0]].batches and not cell[0].startswith("HBP")]


@pytest.mark.parametrize(("extension", "case", "pattern"), CELLS)
@pytest.mark.parametrize("beside", [False, True])
def test_others_are_exact(extension: str, case: str, pattern: str, beside: bool) -> None:
    """Alone, or beside an extension that leaves nothing out."""
    quantity, problem = QUANTITIES[extension], CASES[case].build(N)
    others = [BatchL2Grad() if extension != "BatchL2Grad" else BatchGrad(), *[DiagGGNExact()][: extension != "DiagGGNExact"]] if beside else []
    try:
        run(problem, excluding(quantity.make(), pattern), *others)
    except quantity.refusal:
        assert quantity.expect(CASES[case].tags) is not Expect.EXACT
        assert not collect(problem, quantity.field)
        return
    quantity.check(truth(case, pattern), collect(problem, quantity.field))
    for other in others:
        assert len(collect(problem, other.savefield)) == len(truth(case, "nothing").params)


MAKE = {name: type(quantity.make()) for name, quantity in QUANTITIES.items() if not name.startswith("HBP")}


@pytest.mark.parametrize("extension", MAKE)
def test_every_constructor_takes_it(extension: str) -> None:
    problem, quantity = CASES["CE, mean"].build(N), QUANTITIES[extension]
    run(problem, MAKE[extension](exclude=[problem.model[0]]))
    names = set(collect(problem, quantity.field))
    assert names == {name for name, _ in problem.model.named_parameters() if not name.startswith("0.")}


def test_hbp_takes_it() -> None:
    problem = CASES["CE, mean"].build(N)
    active = QUANTITIES["HBP, GGN"].make()
    again = type(active)(
        active.get_curv_type(), active.get_loss_hessian_strategy(), active.get_backprop_strategy(), active.get_ea_strategy(), exclude=["0"]
    )
    run(problem, again)
    assert not any(name.startswith("0.") for name in collect(problem, "hbp"))


# --- what can be excluded ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pick", "left"),
    [
        (lambda model: [model[0].weight], {"0.bias", "2.weight", "2.bias"}),
        (lambda model: [model[0]], {"2.weight", "2.bias"}),
        (lambda model: model[0].parameters(), {"2.weight", "2.bias"}),
        (lambda model: (model[0].weight, "2"), {"0.bias"}),
        (lambda model: {"0.weight"}, {"0.bias", "2.weight", "2.bias"}),
        (lambda model: ["*.bias"], {"0.weight", "2.weight"}),
        (lambda model: [model], set()),
        (lambda model: [], {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (lambda model: set(), {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (lambda model: {}.keys(), {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (lambda model: model[1].parameters(), {"0.weight", "0.bias", "2.weight", "2.bias"}),
    ],
)
def test_parameters_modules_and_names(pick: Callable, left: set[str]) -> None:
    problem = CASES["CE, mean"].build(N)
    run(problem, BatchGrad(exclude=pick(problem.model)))
    assert set(collect(problem, "grad_batch")) == left
    assert all(param.grad is not None for param in problem.model.parameters())


@pytest.mark.parametrize("name", ["a", "b", "a.weight", "b.weight"])
def test_each_name_of_a_shared_parameter(name: str) -> None:
    problem = CASES["tied branches"].build(N)
    run(problem, BatchGrad(exclude=[name]))
    assert "a.weight" not in collect(problem, "grad_batch")


def test_names_begin_at_a_full_stop() -> None:
    """What begins alike is not meant."""
    with default_dtype(torch.float64):
        problem = classify(Net(lambda net, x: net.head2(net.head(x)), head=Linear(3, 3), head2=Linear(3, 4)), randn(N, 3))
    run(problem, BatchGrad(exclude=["head"]))
    assert set(collect(problem, "grad_batch")) == {"head2.weight", "head2.bias"}


@pytest.mark.parametrize("name", ["0.weigth", "eight", "0.w", ""])  # other models that live have names, too
def test_unknown_name(name: str) -> None:
    problem = CASES["CE, mean"].build(N)
    with pytest.raises(ArgumentError, match="BatchGrad: exclude='.*' names no parameter"):
        run(problem, BatchGrad(exclude=[name]))
    assert all(param.grad is None for param in problem.model.parameters())


def written(model: Module, name: str) -> set[str]:
    """Tell of which parameters there are results where a name is left out; these are exact."""
    x = randn(N, 3)
    with backpack(BatchGrad(exclude=[name])):
        model(x).square().sum().backward()
    found = {name: p for name, p in model.named_parameters() if hasattr(p, "grad_batch")}
    for p in found.values():
        expected = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), [p])[0] for n in range(N)]
        torch.testing.assert_close(p.grad_batch, torch.stack(expected))
    return set(found)


def nested() -> Sequential:
    return Sequential(Linear(3, 3), Sequential(Linear(3, 3), Tanh()))


NAMED = {
    "encoder first": lambda model: (extend(model[1]), extend(model)),
    "encoder afterwards": lambda model: (extend(model), extend(model[1])),
    "encoder, model, encoder": lambda model: (extend(model[1]), extend(model), extend(model[1])),
    "layer in a model that is gone": lambda model: (extend(Sequential(model[1][0])), extend(model)),
    "layer afterwards": lambda model: (extend(model), extend(model[1][0])),
    "all in something larger": lambda model: (extend(model[1]), extend(Sequential(Tanh(), model[1])), extend(model)),
}


@pytest.mark.parametrize("order", NAMED)
def test_names_are_those_in_the_model(order: str) -> None:
    """A part of a model that was, or is, extended on its own has its names in the model, so that they mean nothing else there."""
    model = nested()
    NAMED[order](model)
    for name, _ in nested().named_parameters():
        assert written(model, name) == {other for other, _ in model.named_parameters()} - {name}
    assert written(model, "1") == {"0.weight", "0.bias"}
    assert written(model, "*0.weight") == {"0.bias", "1.0.bias"}
    with backpack(KFLR()), pytest.raises(BackpackError, match=r" 1\.0\.weight, 1\.0\.bias.* 0\.weight|0\.bias, 1\.0\.weight"):
        model(randn(N, 3)).sum().backward()
    assert [recorder_of(module).path for module in (model[0], model[1][0])] == ["0", "1.0"]


def test_names_in_a_wrapper() -> None:
    """Names are those in the outermost module; who writes what they were before is told so."""
    model = extend(Sequential(OrderedDict(peculiar=Linear(3, 3), other=Tanh())))
    assert written(model, "peculiar.weight") == {"peculiar.bias"}
    wrapper = extend(Sequential(model, Linear(3, 2)))
    assert written(wrapper, "0.peculiar.weight") == {"0.peculiar.bias", "1.weight", "1.bias"}
    with pytest.raises(ArgumentError, match=r'Did you mean `exclude=\["\*.peculiar.weight"'):
        written(wrapper, "peculiar.weight")


def test_names_of_modules_that_changed_places() -> None:
    model = extend(Net(lambda net, x: net.b(torch.tanh(net.a(x))), **layers(3, 3, 3)()))
    model.a, model.b = model.b, model.a
    extend(model)
    assert written(model, "a.weight") == {"a.bias", "b.weight", "b.bias"}


def test_names_in_two_models() -> None:
    """A part of two models has its names in both."""
    shared = Linear(3, 3)
    one, other = extend(Sequential(shared, Linear(3, 2))), extend(Sequential(Linear(3, 3), Tanh(), shared))
    assert written(one, "2.weight") == {"0.bias", "1.weight", "1.bias"}
    assert written(one, "1.weight") == {"0.weight", "0.bias", "1.bias"}
    assert written(other, "2.weight") == {"0.weight", "0.bias", "2.bias"}


def replaced(model: Sequential, place: int, layer: Module | None = None) -> Module:
    """Take a layer out of a model, behind the back of ``extend``."""
    before, model[place] = model[place], layer or Linear(3, 3)
    return before


def come_and_gone() -> tuple[Module, ...]:
    model = extend(nested())
    extend(Sequential(model[1][0]))
    return (model,)


def taken_before() -> tuple[Module, ...]:
    old = extend(Sequential(Linear(3, 3), Linear(3, 2)))
    return extend(Sequential(Linear(3, 3), replaced(old, 0))), extend(old)


def taken_afterwards() -> tuple[Module, ...]:
    layer, old = Linear(3, 3), extend(Sequential(Linear(3, 3), Linear(3, 2)))
    model = extend(Sequential(Linear(3, 3), layer))
    replaced(old, 0, layer)
    extend(old)
    replaced(old, 0)
    return model, old


def taken_and_put() -> tuple[Module, ...]:
    old, model = extend(Sequential(Linear(3, 3), Linear(3, 2))), extend(Sequential(Linear(3, 3), Linear(3, 3)))
    replaced(model, 1, replaced(old, 0))
    return model, old


def exchanged() -> tuple[Module, ...]:
    model = extend(nested())
    model[0], model[1][0] = model[1][0], model[0]
    return (model,)


def copied() -> tuple[Module, ...]:
    model = extend(nested())
    model.append(copy.deepcopy(model[0]))
    return (model,)


def nested_afterwards() -> tuple[Module, ...]:
    model, encoder = extend(Sequential(Linear(3, 3), Tanh())), extend(Sequential(Linear(3, 3), Tanh()))
    replaced(model, 1, encoder)
    return (model,)


def pruned() -> tuple[Module, ...]:
    model = extend(nested())
    prune.random_unstructured(model[0], "weight", amount=0.4)
    return (model,)


def parametrized() -> tuple[Module, ...]:
    model = extend(nested())
    register_parametrization(model[0], "weight", Tanh())
    return (model,)


MOVED = [come_and_gone, taken_before, taken_afterwards, taken_and_put, exchanged, copied, nested_afterwards, pruned, parametrized]


@pytest.mark.parametrize("make", MOVED)
def test_names_are_those_of_now(make: Callable[[], tuple[Module, ...]]) -> None:
    """What a parameter was called in a module that is gone, or does not hold it there any more, means nothing."""
    model, *_others = make()
    names = {name for name, _ in model.named_parameters()}
    for name in names:
        assert written(model, name) == names - {name}


@pytest.mark.parametrize("make", MOVED)
def test_messages_say_what_parameters_are_called_now(make: Callable[[], tuple[Module, ...]]) -> None:
    model, *_others = make()
    with backpack(KFAC()), pytest.raises(BackpackError) as caught:
        model(randn(N, 3)).sum().backward()
    assert caught.value.about == {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("make", [pruned, parametrized])
def test_weight_that_a_layer_makes_can_be_left_out_as_told(make: Callable[[], tuple[Module, ...]]) -> None:
    """What it is made of is called otherwise than it was when the model was extended."""
    (model,), x = make(), randn(N, 3)
    with backpack(KFLR()), pytest.raises(BackpackError) as caught:
        mse_loss(model(x), x).backward()
    ((parameter, name),) = caught.value.about.items()
    assert name.startswith("0.") and parameter is model.get_parameter(name)
    with backpack(KFLR(exclude=[name])):
        mse_loss(model(x), x).backward()
    assert {parameter for parameter in model.parameters() if not hasattr(parameter, "kflr")} == {parameter}


def test_names_of_what_is_in_no_model_any_more() -> None:
    """Those that messages show."""
    layer = extend(Sequential(Tanh(), Linear(3, 3)))[1]
    with backpack(KFAC()), pytest.raises(BackpackError) as caught:
        layer(randn(N, 3)).sum().backward()
    assert set(caught.value.about.values()) == {"1.weight", "1.bias"}
    assert written(layer, "1.weight") == {"bias"}


class Powers(Module):
    """Two products with matrices, of which some have no Kronecker factors."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.W, self.V, self.power = parameter(3, 3)(), parameter(3, 3)(), power

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.W if self.power == 1 else self.W**self.power)).tanh() @ (self.V if self.power == 1 else self.V**self.power)


@pytest.mark.parametrize(("power", "other"), [(2.0, 1.0), (2.0, 2.0)])
def test_names_that_several_models_of_a_pass_have(power: float, other: float) -> None:
    """To leave out a name takes it out of all of them, which is said where that is more than is refused; parameters can be told apart."""
    with default_dtype(torch.float64):
        one, two, x = extend(Powers(other)), extend(Powers(power)), randn(N, 3)
    with backpack(KFLR()), pytest.raises(BackpackError) as caught:
        mse_loss(two(one(x)), x).backward()
    refused = {parameter for model in (one, two) if model.power != 1 for parameter in model.parameters()}
    assert caught.value.about.keys() == refused
    (said,) = re.findall(r"^kflr: W, V of shape \[3, 3\]: used by .*, and leave them out here: (.*)\. \[", str(caught.value))
    assert said.startswith('`exclude=["W", "V"]`') and ("the keys of `error.about`" in said) == (other == 1)
    with backpack(KFLR(exclude=caught.value.about), BatchGrad()):
        mse_loss(two(one(x)), x).backward()
    assert [hasattr(p, "kflr") for p in one.parameters()] == [other == 1] * 2 and not any(hasattr(p, "kflr") for p in two.parameters())


def test_names_of_two_models_are_written_once() -> None:
    layer, x = Linear(3, 3), randn(N, 3)
    one, two = (extend(Sequential(layer, Linear(3, 3))) for _ in range(2))
    with backpack(BatchGrad(), accumulate=True):
        mse_loss(one(x), x).backward()
        with pytest.raises(BackpackError, match=r'^1\.weight, 1\.bias: of the passes .*`exclude=\["1\.weight", "1\.bias"\]`\. ') as caught:
            mse_loss(two(x), x).backward()
    assert caught.value.about.keys() == {*one[1].parameters(), *two[1].parameters()}


class Brackets(Module):
    """Names in which other characters than letters occur."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"rel[1]": Linear(3, 3), "rel1": Linear(3, 3), "a?": Linear(3, 3), "ab": Linear(3, 3), "(+|^$": Linear(3, 3)})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


@pytest.mark.parametrize("name", ["rel[1]", "rel1", "a?", "ab", "(+|^$"])
def test_characters_without_a_meaning(name: str) -> None:
    """Only the star stands for anything."""
    model = extend(Brackets())
    everything = {name for name, _ in model.named_parameters()}
    assert written(model, f"parts.{name}.weight") == everything - {f"parts.{name}.weight"}
    assert written(model, f"parts.{name}") == {other for other in everything if not other.startswith(f"parts.{name}.")}
    assert written(model, f"*{name[1:]}.bias") == everything - {f"parts.{name}.bias"}


@pytest.mark.parametrize("wrong", ["0.weight", Linear(2, 2), Linear(2, 2).weight, None, 3, [3], [None], [torch.zeros(2)], [["0.weight"]]])
def test_what_cannot_be_excluded(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="KFAC: exclude must be a list of parameters, modules and names"):
        KFAC(exclude=wrong)


def test_positional_signatures_stay() -> None:
    for make in (lambda: BatchGrad([0], [Linear(1, 1)]), lambda: KFAC(1, []), lambda: KFLR([]), lambda: Variance([0], [])):
        with pytest.raises(TypeError, match="positional"):
            make()


def test_module_that_is_not_in_the_graph() -> None:
    """A parameter or module that takes no part is no mistake: other passes may use it."""
    problem = CASES["CE, mean"].build(N)
    run(problem, BatchGrad(exclude=[Linear(2, 2), Linear(2, 2).weight]))
    assert len(collect(problem, "grad_batch")) == len(list(problem.model.parameters()))


# --- results of earlier passes, hooks, users' rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True])
def test_stale_results_are_removed(beside: bool) -> None:
    problem = CASES["CE, mean"].build(N)
    run(problem, BatchGrad())
    run(problem, BatchGrad(exclude=["0.weight"]), *[DiagGGNExact()][:beside])
    assert set(collect(problem, "grad_batch")) == {"0.bias", "2.weight", "2.bias"}


def test_hook_runs_for_modules_that_are_left_out() -> None:
    problem, seen = CASES["CE, mean"].build(N), []
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(BatchGrad(exclude=[problem.model[0]]), extension_hook=seen.append):
        problem.loss(problem.outputs()).backward()
    assert {problem.model[0], problem.model[2]} <= set(seen)


class OfLinear(FirstOrderModuleExtension):
    """A user's rule that does not like to be asked for biases."""

    def __init__(self) -> None:
        super().__init__(["weight", "bias"])

    def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        return torch.einsum("no,ni->noi", g_out[0], module.input0)

    def bias(self, *_: Any) -> Tensor:
        raise AssertionError("asked for something that is left out")


def test_rule_of_a_user() -> None:
    problem = CASES["CE, mean"].build(N)
    run(problem, FirstOrderBackpropExtension("mine", {Linear: OfLinear()}, exclude=["*.bias"]))
    all_close(collect(problem, "mine"), {k: v for k, v in Oracle(CASES["CE, mean"].build(N)).grad_batch.items() if "bias" not in k})


def test_shared_parameter_of_a_user() -> None:
    """A rule of a user cannot add uses, but it need not for what is left out."""
    problem = CASES["tied branches"].build(N)
    run(problem, FirstOrderBackpropExtension("mine", {Linear: OfLinear()}, exclude=["a", "b", "c.bias"]))
    assert set(collect(problem, "mine")) == {"c.weight"}


def test_missing_rule_of_a_user() -> None:
    problem = CASES["CE, mean"].build(N)
    with pytest.raises(NotImplementedError, match="does not have an extension"):
        run(problem, FirstOrderBackpropExtension("mine", {}, fail_mode="ERROR"))
    run(problem, FirstOrderBackpropExtension("mine", {}, fail_mode="ERROR", exclude=[problem.model]))


# --- refusals ---------------------------------------------------------------------------------------------------------------------------------


def mixing() -> Problem:
    return classify(Sequential(Linear(3, 3), nn.BatchNorm1d(3), Linear(3, 4)), randn(N, 3))


def curved() -> Problem:
    return classify(Net(lambda net, x: net.b(Cube.apply(net.a(x))), **layers(3, 3, 4)()), randn(N, 3))


def coupled() -> Problem:
    return classify(Net(lambda net, x: net.b(net.norm(net.norm(net.a(x)))), **layers(3, 3, 4, norm=lambda: nn.LayerNorm(3))()), randn(N, 3))


def branching() -> Problem:
    return classify(Net(lambda net, x: net.c(net.a(x) + net.tanh(net.b(x))), **layers(3, 3, 3, 4, tanh=Tanh)()), randn(N, 3))


def gated() -> Problem:
    return regress(Net(lambda net, x: net.b(net.a(x) * net.gates), **layers(3, 3, 2, gates=parameter(2, 3))()), randn(N, 2, 3))


def two_ways() -> Problem:
    return classify(Net(lambda net, x: net.b(net.a(net.tanh(net.a(x)) @ net.a.weight)), **layers(3, 3, 4, tanh=Tanh)()), randn(N, 3))


def penalised() -> Problem:
    problem = CASES["CE, mean"].build(N)
    loss = problem.loss
    problem.loss = lambda outputs: loss(outputs) + problem.model[2].bias.square().sum()
    return problem


REFUSED = {
    "mixing": (mixing, BatchGrad, {"0.weight", "0.bias"}),
    "penalty": (penalised, BatchGrad, {"2.bias"}),
    "curved": (curved, DiagHessian, {"a.weight", "a.bias"}),
    "coupled": (coupled, DiagHessian, {"norm.weight", "norm.bias"}),
    "gated": (gated, KFLR, {"gates"}),
    "two ways": (two_ways, KFLR, {"a.weight"}),
    "factors of an average": (lambda: CASES["extra axis, flattened"].build(N), KFRA, {"0.weight", "0.bias"}),
    "branching": (branching, HMP, {"a.weight", "a.bias", "b.weight", "b.bias"}),
    "used twice": (lambda: CASES["linear twice, in sequence"].build(N), HMP, {"0.weight", "0.bias"}),
}


def arguments_in(error: BackpackError) -> list[str]:
    """Read the argument that a message shows."""
    _, found, rest = str(error).partition("`exclude=[")
    assert found, error
    return [name.strip('"') for name in rest.partition("]`")[0].split(", ")]


def run_as_told(make: Callable[[], Problem], extension: Callable, most: int = 10) -> tuple[Problem, set[str]]:
    """Do what messages say until nothing is refused."""
    excluded: set[str] = set()
    for _ in range(most):
        problem = make()
        try:
            run(problem, extension(exclude=sorted(excluded)))
        except BackpackError as error:
            more = set(arguments_in(error))
            assert more - excluded, error
            excluded |= more
        else:
            return problem, excluded
    raise AssertionError(excluded)


@pytest.mark.parametrize("name", REFUSED)
def test_messages_show_the_argument(name: str) -> None:
    make, extension, expected = REFUSED[name]

    def build() -> Problem:
        with torch.random.fork_rng(), default_dtype(torch.float64):
            torch.manual_seed(0)
            return make()

    problem, excluded = run_as_told(build, extension)
    assert excluded == expected
    field = extension().savefield
    oracle = Oracle(freeze(build(), excluded.__contains__))
    check = next(q.check for q in QUANTITIES.values() if q.field == field)
    check(oracle, collect(problem, field))


def fields(model: Module, extension: BatchGrad) -> list[str]:
    """Compute per-sample gradients; name the parameters that have them, and delete them."""
    with backpack(extension):
        model(randn(N, 3)).sum().backward()
    found = [name for name, p in model.named_parameters() if hasattr(p, "grad_batch")]
    clear(model)
    return found


@pytest.mark.parametrize("first", ["extension", "model", "alone"])
@pytest.mark.parametrize("kind", ["module", "parameters", "wrapper"])
@pytest.mark.parametrize("made", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_copies(first: str, kind: str, made: Callable) -> None:
    """A copy leaves out the same, and what is copied along with it, in whatever order; so does a copy of a copy; a pickle what is in it."""
    parts = {"first": Linear(3, 4), "between": Tanh(), "last_of_a_copy": Linear(4, 2)}  # a name that no model of another test has
    model = extend(Sequential(OrderedDict(parts)))
    entries = {"module": [model[0]], "parameters": list(model[0].parameters()), "wrapper": [Sequential(model[0])]}[kind]
    extension, others = BatchGrad(exclude=[*entries, "last_of_a_copy.bias"]), ["last_of_a_copy.weight"]
    for _ in range(3):
        if first == "alone":
            extension = made(extension)
        elif first == "model":
            model, extension = made((model, extension))
        else:
            extension, model = made((extension, model))
        gc.collect()
        expected = others if made is copy.deepcopy or first != "alone" else ["first.weight", "first.bias", *others]
        assert fields(model, extension) == fields(model, copy.copy(extension)) == expected
        assert len(extension.excluded()) <= 3 + 2 * 4


def functional() -> Problem:
    torch.manual_seed(0)
    return classify(Net(lambda net, x: net.b(net.a(x).sin()), **layers(3, 3, 4)()).double(), randn(N, 3, dtype=torch.float64))


def test_functions_behind_what_is_left_out_are_crossed_for_others() -> None:
    """A recursion over modules cannot go through a function, but beside it other quantities do."""
    problem, oracle = functional(), Oracle(functional())
    chosen = [KFRA(exclude=["a"]), HMP(exclude=["a"]), *(QUANTITIES[name].make() for name in ("BatchGrad", "DiagGGNExact", "DiagHessian"))]
    run(problem, *chosen)
    for name in ("BatchGrad", "DiagGGNExact", "DiagHessian"):
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))
    assert set(collect(problem, "kfra")) == {"b.weight", "b.bias"} == set(collect(problem, "hmp"))
    net = problem.model
    head = Oracle(Problem(nn.Sequential(net.b), net.a(problem.x).sin().detach(), problem.terms))
    for name in ("KFRA", "HMP"):
        found = collect(problem, QUANTITIES[name].field)
        QUANTITIES[name].check(head, {key.replace("b.", "0."): value for key, value in found.items()})


def test_names_of_another_model_are_refused_where_those_of_this_one_end_so() -> None:
    """In a model around it, a net has longer names: short ones would silently leave out nothing, as long as a net of its own lives."""
    alone, inner, lossfunc = extend(Sequential(Linear(3, 2))), Sequential(Linear(3, 2)), extend(nn.CrossEntropyLoss())
    model = extend(nn.ModuleDict({"net": inner}))
    x, y = randn(4, 3), torch.tensor([0, 1, 1, 0])
    for name in ("0", "0.weight", "0.*"):
        with pytest.raises(ArgumentError, match=re.escape(f"exclude='{name}' names parameters of another")), backpack(BatchGrad(exclude=[name])):
            lossfunc(model["net"](x), y).backward()
        assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())
        with backpack(BatchGrad(exclude=[f"*.{name}"])):
            lossfunc(model["net"](x), y).backward()
        assert not hasattr(inner[0].weight, "grad_batch")
    with backpack(BatchGrad(exclude=["0.weight"])):
        lossfunc(alone(x), y).backward()
    assert not hasattr(alone[0].weight, "grad_batch")
    with backpack(BatchGrad(exclude=[alone[0].weight])):  # that of the other one, on purpose
        lossfunc(model["net"](x), y).backward()
    assert inner[0].weight.grad_batch.shape == (4, 2, 3)
