"""Rules that users write: module extensions of first and of second order, what happens where there is none, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from test_silent_errors import called_twice, shared_parameter
from torch import Tensor, einsum, nn
from torch.nn import CrossEntropyLoss, Linear, Module, MSELoss, Parameter, ReLU, Sequential, Tanh

from backpack import backpack, extend, results
from backpack.extensions import BatchGrad, DiagGGNExact, Variance
from backpack.extensions.backprop_extension import FAIL_ERROR, FAIL_SILENT, FAIL_WARN, BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension

N = 5


class Scale(Module):
    """A module of the user's: one factor for each feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def build(*layers: Callable[[], Module], loss: type[Module] = CrossEntropyLoss) -> Problem:
    torch.manual_seed(2)
    model = Sequential(*(make() for make in layers)).double()
    target = torch.randint(3, (N,)) if loss is CrossEntropyLoss else torch.randn(N, 3, dtype=torch.float64)
    return Problem(model, torch.randn(N, 4, dtype=torch.float64), [Term(loss(), target)])


def standard(loss: type[Module] = CrossEntropyLoss) -> Problem:
    return build(lambda: Linear(4, 4), lambda: Scale(4), Tanh, lambda: Linear(4, 3), loss=loss)


@cache
def truth(loss: type[Module] = CrossEntropyLoss) -> Oracle:
    return Oracle(standard(loss))


def run(problem: Problem, *extensions: BackpropExtension) -> None:
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*extensions):
        problem.loss(problem.outputs()).backward()


def weight_gradients(ext: BackpropExtension, module: Module, g_inp: tuple, g_out: tuple, bp: Any) -> Tensor:
    rows = slice(None) if ext.get_subsampling() is None else ext.get_subsampling()
    return einsum("no,ni->noi", g_out[0][rows], module.input0[rows])


class OfLinear(FirstOrderModuleExtension):
    """Per-sample gradients of a linear layer."""

    def __init__(self) -> None:
        super().__init__(params=["weight", "bias"])

    def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        return weight_gradients(ext, module, g_inp, g_out, bpQuantities)

    def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        return g_out[0] if ext.get_subsampling() is None else g_out[0][ext.get_subsampling()]


class OfScale(FirstOrderModuleExtension):
    """Per-sample gradients of the user's own layer."""

    def __init__(self) -> None:
        super().__init__(["factor"])

    def factor(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        return g_out[0] * module.input0


def gradients(**settings: Any) -> FirstOrderBackpropExtension:
    return FirstOrderBackpropExtension("mine", **{"module_exts": {Linear: OfLinear(), Scale: OfScale()}, **settings})


def values(problem: Problem, field: str) -> dict[str, Any]:
    return {name: fields[field] for name, fields in results(problem.model).items() if field in fields}


def check(problem: Problem, field: str, expected: dict[str, Tensor]) -> None:
    found = values(problem, field)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        close(value, expected[name])


# --- first order ------------------------------------------------------------------------------------------------------------------------------


def test_method_for_each_parameter() -> None:
    problem = standard()
    run(problem, gradients())
    check(problem, "mine", truth().grad_batch)


def test_beside_the_librarys_own() -> None:
    problem = standard()
    run(problem, Variance(), gradients(), DiagGGNExact())
    check(problem, "mine", truth().grad_batch)
    check(problem, "variance", truth().variance)
    check(problem, "diag_ggn_exact", sum_batch(truth().diag_ggn_batch(truth().hessian_exact)))


def test_signature() -> None:
    """Called positionally as (extension, module, g_inp, g_out, bpQuantities); the module shows the tensors of this execution."""
    seen: list[tuple] = []

    class Spy(FirstOrderModuleExtension):
        def weight(self, *args: Any) -> str:
            seen.append((*args, args[1].input0.clone(), args[1].output.clone()))
            return "anything"

    problem, ext = build(lambda: Linear(4, 3)), BatchGrad()
    ext.set_module_extension(Linear, Spy(params=["weight"]))
    run(problem, ext)
    ((extension, module, g_inp, g_out, bp, input0, output),) = seen
    oracle = Oracle(build(lambda: Linear(4, 3)))
    assert extension is ext
    assert module is problem.model[0]
    assert isinstance(g_inp, tuple)
    assert isinstance(g_out, tuple)
    assert len(g_out) == 1
    close(g_out[0], oracle.loss_grad)
    assert bp is None
    assert torch.equal(input0, problem.x)
    close(output, oracle.outputs[0].detach())


def test_entry_replaces_the_librarys_rule_for_its_class_only() -> None:
    """What is not named keeps the library's rule; parameters that the user's rule leaves out, too."""
    ext, problem = BatchGrad(), standard()

    class Negative(FirstOrderModuleExtension):
        def weight(self, *args: Any) -> Tensor:
            return -weight_gradients(*args)

    ext.set_module_extension(Linear, Negative(["weight"]))
    run(problem, ext)
    expected = {name: -g if name in ("0.weight", "3.weight") else g for name, g in truth().grad_batch.items()}
    check(problem, "grad_batch", expected)


def test_entries_belong_to_an_instance() -> None:
    one, other = BatchGrad(), BatchGrad()
    one.set_module_extension(Scale, OfScale())
    other.set_module_extension(Scale, OfScale())  # no collision
    given = {Linear: OfLinear()}
    extension = FirstOrderBackpropExtension("mine", given)
    extension.set_module_extension(Scale, OfScale())
    assert list(given) == [Linear]  # the user's dictionary is not changed


def test_overwrite() -> None:
    class Zero(FirstOrderModuleExtension):
        def factor(self, *_: Any) -> float:
            return 0.0

    ext = gradients()
    with pytest.raises(ValueError, match="Scale"):
        ext.set_module_extension(Scale, Zero(["factor"]))
    ext.set_module_extension(Scale, Zero(["factor"]), overwrite=True)
    problem = standard()
    run(problem, ext)
    assert problem.model[1].factor.mine == 0.0
    close(problem.model[0].weight.mine, truth().grad_batch["0.weight"])


class ScaleOfScale(Scale):
    """A subclass that keeps the map."""


def test_subclass_uses_the_entry_of_its_base_unless_it_has_its_own() -> None:
    def special() -> Problem:
        return build(lambda: Linear(4, 3), lambda: ScaleOfScale(3))

    problem = special()
    run(problem, gradients())
    check(problem, "mine", Oracle(special()).grad_batch)

    class Own(FirstOrderModuleExtension):
        def factor(self, *_: Any) -> str:
            return "own"

    ext, problem = gradients(), special()
    ext.set_module_extension(ScaleOfScale, Own(["factor"]))
    run(problem, ext)
    assert problem.model[1].factor.mine == "own"


@pytest.mark.parametrize(
    "result", [lambda: {"a": 1}, lambda: [torch.ones(2), "b"], lambda: len, lambda: (1, 2)], ids="dict list function tuple".split()
)
def test_results_need_not_be_tensors(result: Callable[[], Any]) -> None:
    given = result()

    class Anything(FirstOrderModuleExtension):
        def weight(self, *_: Any) -> Any:
            return given

    problem = build(lambda: Linear(4, 3))
    run(problem, FirstOrderBackpropExtension("mine", {Linear: Anything(["weight"])}))
    assert values(problem, "mine")["0.weight"] is given
    assert list(values(problem, "mine")) == ["0.weight"]


def test_method_on_the_instance() -> None:
    class Late(FirstOrderModuleExtension):
        def __init__(self) -> None:
            self.weight = weight_gradients
            super().__init__(["weight"])

    problem = build(lambda: Linear(4, 3))
    run(problem, FirstOrderBackpropExtension("mine", {Linear: Late()}))
    check(problem, "mine", {"0.weight": Oracle(build(lambda: Linear(4, 3))).grad_batch["0.weight"]})


def test_frozen_and_missing_parameters_are_skipped() -> None:
    def frozen() -> Problem:
        problem = build(lambda: Linear(4, 4, bias=False), lambda: Linear(4, 3))
        problem.model[1].weight.requires_grad_(False)
        return problem

    problem = frozen()
    run(problem, gradients())
    check(problem, "mine", Oracle(frozen()).grad_batch)


@pytest.mark.parametrize("chosen", [[0], [3, 0], [1, 1, 2]], ids=str)
def test_subsampling_is_the_users_business(chosen: list[int]) -> None:
    ext = FirstOrderBackpropExtension("mine", {Linear: OfLinear()}, FAIL_SILENT, subsampling=chosen)
    assert ext.get_subsampling() is chosen
    problem = standard()
    run(problem, ext)
    check(problem, "mine", {name: g[chosen] for name, g in truth().grad_batch.items() if "factor" not in name})


def test_empty_extension() -> None:
    """Without parameters, an entry says that there is nothing to do; not even to warn."""
    problem = standard()
    run(problem, gradients(module_exts={Linear: OfLinear(), Scale: FirstOrderModuleExtension()}, fail_mode=FAIL_ERROR))
    assert list(values(problem, "mine")) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_extra_axes_and_operation_in_place() -> None:
    """With extra axes the output of a linear layer is a view; an operation in place replaces the node that made it."""

    class Any3d(FirstOrderModuleExtension):
        def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bp: Any) -> Tensor:
            return einsum("nto,nti->noi", g_out[0], module.input0)

    def special() -> Problem:
        problem = build(lambda: Linear(4, 6), lambda: ReLU(inplace=True), lambda: Linear(6, 3), loss=MSELoss)
        problem.x = torch.randn(N, 2, 4, dtype=torch.float64)
        problem.terms[0].target = torch.randn(N, 2, 3, dtype=torch.float64)
        return problem

    torch.manual_seed(9)
    problem = special()
    run(problem, FirstOrderBackpropExtension("mine", {Linear: Any3d(["weight"])}))
    torch.manual_seed(9)
    expected = Oracle(special()).grad_batch
    check(problem, "mine", {name: expected[name] for name in ("0.weight", "2.weight")})


def test_rule_sees_each_passs_own_tensors() -> None:
    """Two forward passes, then both backward passes: the first one still reads its own input."""
    problem, ext = build(lambda: Linear(4, 3)), gradients()
    extend(problem.model)
    lossfunc, target = problem.terms[0].module, problem.terms[0].target
    first = lossfunc(problem.model(problem.x), target)
    lossfunc(problem.model(2 * problem.x), target)
    with backpack(ext):
        first.backward()
    check(problem, "mine", Oracle(build(lambda: Linear(4, 3))).grad_batch)


# --- no entry ---------------------------------------------------------------------------------------------------------------------------------


def incomplete(fail_mode: str) -> FirstOrderBackpropExtension:
    return FirstOrderBackpropExtension("mine", {Linear: OfLinear()}, fail_mode=fail_mode)


def check_others(problem: Problem) -> None:
    check(problem, "mine", {name: g for name, g in truth().grad_batch.items() if "factor" not in name})


def test_no_entry_error() -> None:
    problem = standard()
    with pytest.raises(NotImplementedError, match=r"^Extension saving to mine .*Scale.*1"):
        run(problem, incomplete(FAIL_ERROR))
    assert results(problem.model) == {}
    assert all(p.grad is None for p in problem.model.parameters())  # nothing has run


def test_no_entry_warning() -> None:
    problem = standard()
    with pytest.warns(UserWarning, match=r"^Extension saving to mine .*Scale") as warned:
        run(problem, incomplete(FAIL_WARN))
    assert len(warned) == 1  # neither for the activation nor for the loss
    check_others(problem)


def test_no_entry_silent() -> None:
    problem = standard()
    run(problem, incomplete(FAIL_SILENT))  # warnings are errors
    check_others(problem)


def test_fail_modes() -> None:
    assert (FAIL_ERROR, FAIL_WARN, FAIL_SILENT) == ("ERROR", "WARNING", "SILENT")
    assert FirstOrderBackpropExtension("mine")._fail_mode == FAIL_WARN
    assert SecondOrderBackpropExtension("mine")._fail_mode == FAIL_ERROR
    with pytest.raises(AssertionError, match="WARNING"):
        FirstOrderBackpropExtension("mine", {}, fail_mode="WARN")


# --- refusals ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [ModuleExtension, FirstOrderModuleExtension])
def test_missing_method(base: type[ModuleExtension]) -> None:
    class Incomplete(base):
        def bias(self, *_: Any) -> int:
            return 0

    with pytest.raises(NotImplementedError, match="weight"):
        Incomplete(params=["bias", "weight"])


def test_abstract() -> None:
    class Undecided(BackpropExtension):
        pass

    with pytest.raises(TypeError, match="expects_backpropagation_quantities"):
        Undecided("mine", {})


@pytest.mark.parametrize("make", [shared_parameter, called_twice])
def test_parameter_with_two_uses(make: Callable[[], Module]) -> None:
    """A rule for one use does not say what two uses give."""
    problem = build(make, loss=MSELoss)
    problem.terms[0].target = torch.randn(N, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="more than once"):
        run(problem, gradients())
    assert results(problem.model) == {}


class TwoOutputs(Module):
    """Returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, x + self.weight


class AddPair(Module):
    """Adds a pair."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_module_with_several_outputs() -> None:
    problem = build(TwoOutputs, AddPair, lambda: Linear(4, 3))
    with pytest.raises(NotImplementedError, match="2 tensors"):
        run(problem, gradients(module_exts={TwoOutputs: OfLinear(), Linear: OfLinear()}))
    assert results(problem.model) == {}


def test_exception_in_a_rule() -> None:
    """Its type survives; nothing stays behind; the next step is right."""

    class Broken(FirstOrderModuleExtension):
        def weight(self, *_: Any) -> None:
            raise ZeroDivisionError("mine")

    problem, ext = standard(), gradients()
    broken = gradients(module_exts={Linear: Broken(["weight"]), Scale: OfScale()})
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(problem, BatchGrad(), broken)
    assert results(problem.model) == {}
    run(problem, BatchGrad(), ext)
    check(problem, "mine", truth().grad_batch)
    check(problem, "grad_batch", truth().grad_batch)


def test_check_of_hyper_parameters_comes_first() -> None:
    class Strict(OfLinear):
        def check_hyperparameters_module_extension(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple) -> None:
            if module.out_features == 3:
                raise NotImplementedError(f"three outputs, {g_out[0].shape[0]} samples")

        def weight(self, *args: Any) -> Tensor:
            raise AssertionError("must not be reached")

    problem = build(lambda: Linear(4, 3))
    with pytest.raises(NotImplementedError, match="three outputs, 5 samples"):
        run(problem, gradients(module_exts={Linear: Strict()}))


# --- second order -----------------------------------------------------------------------------------------------------------------------------


def test_rule_reads_the_librarys_columns() -> None:
    """Beside a flow of the library, a rule receives the columns ``[V, *output]`` that arrive at the module."""

    class Diagonal(ModuleExtension):
        def factor(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Tensor) -> Tensor:
            assert columns.shape[1:] == module.output.shape
            return (columns * module.input0).square().sum((0, 1))

    ext, problem = DiagGGNExact(), standard()
    ext.set_module_extension(Scale, Diagonal(["factor"]))
    run(problem, ext)
    check(problem, "diag_ggn_exact", sum_batch(truth().diag_ggn_batch(truth().hessian_exact)))


class Carrying(ModuleExtension):
    """A user's own generalized Gauss-Newton: ``backpropagate`` maps the columns from output to input, and counts how often."""

    def __init__(self, jacobian_t: Callable[[Module, Tensor], Tensor], params: list[str]) -> None:
        self.jacobian_t, self.count = jacobian_t, 0
        super().__init__(params)

    def backpropagate(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Any:  # noqa: N803
        self.count += 1
        return self.jacobian_t(module, bpQuantities)

    def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Tensor) -> Tensor:
        return einsum("vno,ni->oi", columns.square(), module.input0.square())

    def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Tensor) -> Tensor:
        return columns.square().sum((0, 1))

    def factor(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Tensor) -> Tensor:
        return (columns * module.input0).square().sum((0, 1))


def root_of_squared_error(module: Module, _: None) -> Tensor:
    size = module.input0.shape[1]
    return (2 / module.input0.numel()) ** 0.5 * torch.eye(size, dtype=torch.float64).unsqueeze(1).expand(size, N, size)


def own_entries() -> dict[type[Module], Carrying]:
    return {
        MSELoss: Carrying(root_of_squared_error, []),
        Linear: Carrying(lambda module, columns: columns @ module.weight, ["weight", "bias"]),
        Scale: Carrying(lambda module, columns: columns * module.factor, ["factor"]),
        Tanh: Carrying(lambda module, columns: columns * (1 - module.output.square()), []),
    }


def test_flow_of_the_users_own() -> None:
    """What ``backpropagate`` returns reaches the module upstream; the first layer, whose input needs no gradient, is not asked."""
    problem, entries = standard(MSELoss), own_entries()
    run(problem, SecondOrderBackpropExtension("own", entries))
    oracle = truth(MSELoss)
    check(problem, "own", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))
    assert {cls: entry.count for cls, entry in entries.items()} == {MSELoss: 1, Linear: 1, Scale: 1, Tanh: 1}


class Fork(Module):
    """A branch without an operation between modules: both layers read the same tensor, a module adds what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.merge = Linear(4, 4), Linear(4, 3), Linear(4, 3), Add()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.merge(self.left(x), self.right(x))


class Add(Module):
    """Adds two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize("own", [False, True])
def test_branches_are_accumulated(own: bool) -> None:
    class Accumulating(SecondOrderBackpropExtension):
        def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
            return (existing[0] + other[0],)

    class Packed(Carrying):
        """Carries a tuple, which only the extension knows how to add."""

        def backpropagate(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Any:  # noqa: N803
            return (super().backpropagate(ext, module, g_inp, g_out, bpQuantities and bpQuantities[0]),)

        def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Any) -> Tensor:
            return super().weight(ext, module, g_inp, g_out, columns[0])

        def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Any) -> Tensor:
            return super().bias(ext, module, g_inp, g_out, columns[0])

    kind, entries = (Packed if own else Carrying), own_entries()
    entries[Add] = Carrying(lambda _, columns: columns, [])  # the container has none: its children do the work
    entries = {cls: kind(entry.jacobian_t, list(entry.params)) for cls, entry in entries.items()}
    problem = build(Fork, loss=MSELoss)
    extension = (Accumulating if own else SecondOrderBackpropExtension)("own", entries)
    run(problem, extension)
    oracle = Oracle(build(Fork, loss=MSELoss))
    check(problem, "own", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))


@pytest.mark.parametrize(("missing", "refusal"), [(Tanh, NotImplementedError), (Linear, NotImplementedError), (MSELoss, AssertionError)])
def test_nothing_arrives(missing: type[Module], refusal: type[Exception]) -> None:
    problem, entries = standard(MSELoss), own_entries()
    del entries[missing]
    with pytest.raises(refusal, match="own"):
        run(problem, SecondOrderBackpropExtension("own", entries))
    assert results(problem.model) == {}


def test_functional_operation_in_between() -> None:
    class Functional(Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Linear(4, 4), Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    problem = build(Functional, loss=MSELoss)
    with pytest.raises(AssertionError, match="own.*body"):
        run(problem, SecondOrderBackpropExtension("own", own_entries()))
    assert results(problem.model) == {}


def test_default_backpropagate_warns() -> None:
    class ParametersOnly(ModuleExtension):
        def weight(self, *_: Any) -> int:
            return 1

    entries = own_entries() | {Linear: ParametersOnly(["weight"])}
    problem = build(lambda: Linear(4, 4), lambda: Linear(4, 3), loss=MSELoss)
    with pytest.warns(UserWarning, match="backpropagate"), pytest.raises(AssertionError):
        run(problem, SecondOrderBackpropExtension("own", entries))


def test_one_layer() -> None:
    """The first layer is the last one: only the loss is asked to hand something on."""
    problem, entries = build(lambda: Linear(4, 3), loss=MSELoss), own_entries()
    run(problem, SecondOrderBackpropExtension("own", {cls: entries[cls] for cls in (MSELoss, Linear)}))
    oracle = Oracle(build(lambda: Linear(4, 3), loss=MSELoss))
    check(problem, "own", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))


def test_modules_of_a_frozen_beginning_are_not_asked() -> None:
    def frozen() -> Problem:
        problem = build(lambda: Linear(4, 4), nn.Sigmoid, lambda: Linear(4, 3), loss=MSELoss)
        problem.model[0].requires_grad_(False)
        return problem

    problem = frozen()
    run(problem, SecondOrderBackpropExtension("own", own_entries()))  # there is no entry for Sigmoid
    oracle = Oracle(frozen())
    check(problem, "own", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))
