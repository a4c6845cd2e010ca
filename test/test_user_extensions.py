"""Rules that users write: module extensions of first and of second order, what happens where there is none, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from backpack.extensions.curvmatprod.hmp.hmpbase import HMPBase
from backpack.extensions.curvmatprod.pchmp.pchmpbase import PCHMPBase
from backpack.extensions.firstorder.batch_grad.batch_grad_base import BatchGradBase
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.secondorder.diag_ggn.diag_ggn_base import DiagGGNBaseModule
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from test_silent_errors import called_twice, shared_parameter
from torch import Tensor, einsum, nn, vmap
from torch.func import vjp
from torch.nn import CrossEntropyLoss, Linear, Module, MSELoss, Parameter, ReLU, Sequential, Tanh

from backpack import backpack, extend, results
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.kinds import LinearMapDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.registry import derivatives_for, register
from backpack.core.flow import Columns, Use
from backpack.custom_module.permute import Permute
from backpack.custom_module.slicing import Slicing
from backpack.extensions import (
    GGNMP,
    HBP,
    HMP,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from backpack.extensions.backprop_extension import FAIL_ERROR, FAIL_SILENT, FAIL_WARN, BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension, GradientExtension
from backpack.extensions.firstorder.batch_grad import batch_grad_base
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.rules import ColumnRule
from backpack.extensions.secondorder.base import ExactGGNExtension, SecondOrderBackpropExtension
from backpack.utils.errors import OverwrittenError, ShapeError, UnsupportedError

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


class Doubled(Module):
    """A layer behind an operation that keeps nothing of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = Linear(4, 4), Tanh(), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x) * 2))


class InputOfTanh(ModuleExtension):
    def backpropagate(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        return bpQuantities * (1 - module.input0.tanh() ** 2) * 2


@pytest.mark.parametrize("inside", [True, False])
def test_tensor_that_the_librarys_rule_does_not_need(inside: bool) -> None:
    """It is kept if the forward pass ran under the context; else the rule is told so."""
    problem = build(Doubled)
    handed = []

    class Last(ModuleExtension):
        def backpropagate(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
            handed.append(module.input0)
            return handed[0]

    class Start(ModuleExtension):
        def backpropagate(self, *_: Any) -> int:
            return 1

    entries = {CrossEntropyLoss: Start(), Linear: Last(), Tanh: InputOfTanh()}
    ext = SecondOrderBackpropExtension("mine", entries)
    for module in (problem.model, *problem.losses):
        extend(module)
    model = problem.model[0]
    expected = model.layer(model.first(problem.x) * 2)
    with pytest.raises(AttributeError, match="retain_graph=True") if not inside else pytest.raises(AssertionError, match="arrived at 0.first"):
        if inside:  # an operation without a module carries nothing, hence the first layer is refused
            with backpack(ext):
                problem.loss(problem.outputs()).backward()
        else:
            loss = problem.loss(problem.outputs())
            with backpack(ext):
                loss.backward()
    assert torch.equal(handed[0], expected)


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


class WithoutCalls(Module):
    """Uses the weight of a layer that it does not call, and the only entry of a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.lent = Linear(4, 4, bias=False), Linear(4, 4, bias=False)
        self.listed = nn.ParameterList([torch.randn(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.called(x)), self.lent.weight) @ self.listed[0]


def test_used_without_a_call_error() -> None:
    """No module extension is asked for the parameters: without a word, their quantities would be missing."""
    problem = build(WithoutCalls)
    names = r"0\.lent\.weight, 0\.listed\.0"
    with pytest.raises(NotImplementedError, match=rf"mine.*{names}.*without a call") as refused:
        run(problem, incomplete(FAIL_ERROR), BatchGrad())
    assert list(refused.value.about.values()) == ["0.lent.weight", "0.listed.0"]
    assert results(problem.model) == {}
    run(problem, gradients(exclude=["0.lent", "0.listed"], fail_mode=FAIL_ERROR), BatchGrad())
    check(problem, "mine", {"0.called.weight": Oracle(build(WithoutCalls)).grad_batch["0.called.weight"]})
    check(problem, "grad_batch", Oracle(build(WithoutCalls)).grad_batch)


def test_used_without_a_call_warning() -> None:
    problem = build(WithoutCalls)
    with pytest.warns(UserWarning, match=r"mine.*0\.lent\.weight, 0\.listed\.0") as warned:
        run(problem, incomplete(FAIL_WARN))
    assert len(warned) == 1
    run(problem, incomplete(FAIL_SILENT))
    check(problem, "mine", {"0.called.weight": Oracle(build(WithoutCalls)).grad_batch["0.called.weight"]})


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


class TurnedAndTwice(Module):
    """Two layers whose samples lie on axis 1, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.again = Linear(4, 4), Linear(4, 4), Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.second(self.first(x.transpose(0, 1))).transpose(0, 1).mean(1)))


def test_refusals_tell_all_parameters_at_once() -> None:
    """Those of all calls and reasons; once they are left out, as the message says, nothing is refused."""
    model, x = extend(TurnedAndTwice()), torch.randn(3, 2, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="more than once") as caught, backpack(gradients()):
        model(x).square().sum().backward()
    error = caught.value
    assert sorted(error.about.values()) == sorted(name for name, _ in model.named_parameters())
    assert {len(part.about) for part in error.parts} == {2} and len(error.parts) == 3
    named = ", ".join(f'"{name}"' for name in error.about.values())
    assert f"All other parameters remain with `exclude=[{named}]`" in str(error)
    extension = gradients(exclude=list(error.about))
    with backpack(extension):
        model(x).square().sum().backward()
    assert results(model) == {}


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


class TimeFirst(Module):
    """Hands a layer its samples on axis 1, which is as long as axis 0, or all positions of all samples as rows."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.body, self.head, self.rows = Linear(4, 4), Linear(4, 3), rows

    def forward(self, x: Tensor) -> Tensor:  # [N, N, 4] -> [N, 3]
        inner = x.flatten(0, 1) if self.rows else x.transpose(0, 1)
        inner = torch.tanh(self.body(inner)).reshape(inner.shape)
        return self.head(inner.reshape(x.shape).mean(1) if self.rows else inner.mean(0))


class BiasAlone(FirstOrderModuleExtension):
    """Per-sample gradients of a bias, where samples are on axis 0."""

    def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        return g_out[0].reshape(len(g_out[0]), -1, g_out[0].shape[-1]).sum(1)


class SumOfAll(FirstOrderModuleExtension):
    """Needs not know where the samples are."""

    any_layout = True

    def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        return g_out[0].flatten(0, -2).sum(0)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_samples_that_are_not_on_axis_0(rows: bool, own: bool) -> None:
    """A module extension takes axis 0 of a layer's output for the samples: it is told, not left to err."""

    def special() -> Problem:
        problem = build(lambda: TimeFirst(rows))
        problem.x = torch.randn(N, N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return problem

    def entry(chosen: type[ModuleExtension], **settings: Any) -> BackpropExtension:
        if own:
            return gradients(module_exts={Linear: chosen(["bias"])}, **settings)
        extension = BatchGrad(**settings)
        extension.set_module_extension(Linear, chosen(["bias"]))
        return extension

    problem, expected, field = special(), Oracle(special()), "mine" if own else "grad_batch"
    with pytest.raises(NotImplementedError, match=r"0\.body\.bias.*BiasAlone.*samples.*axis 0.*any_layout") as refused:
        run(problem, entry(BiasAlone))
    assert list(refused.value.about.values()) == ["0.body.bias"]
    assert results(problem.model) == {}
    run(problem, entry(BiasAlone, exclude=["0.body"]))
    close(getattr(problem.model[0].head.bias, field), expected.grad_batch["0.head.bias"])
    run(problem, entry(SumOfAll))
    close(getattr(problem.model[0].body.bias, field), expected.grad_batch["0.body.bias"].sum(0))


# --- a quantity for all layers ----------------------------------------------------------------------------------------------------------------


class Unit(GradientExtension):
    """Per-sample gradients of length one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__("unit")
        self.in_place = in_place

    def finish(self, state: dict, parameter: Parameter) -> Tensor:
        gradients = state[0][0]
        norms = gradients.flatten(1).norm(dim=1).reshape(-1, *[1] * parameter.dim())
        return gradients.div_(norms) if self.in_place else gradients / norms


class Trace(ExactGGNExtension):
    """The trace of a parameter's block."""

    savefield, sums_columns, in_place = "trace", True, False

    def finish(self, state: dict, parameter: Parameter) -> Tensor:
        return sum((columns.square_() if self.in_place else columns.square()).sum() for columns in state.values())


class TraceInPlace(Trace):
    """The same, where what is given is not needed any more."""

    in_place = True


def check_units(problem: Problem) -> None:
    check(problem, "unit", {name: g / g.flatten(1).norm(dim=1).reshape(-1, *[1] * (g.dim() - 1)) for name, g in truth().grad_batch.items()})


def test_finish_in_place_alone() -> None:
    problem = standard()
    run(problem, Unit(in_place=True), DiagGGNExact())
    check_units(problem)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("other", [BatchGrad, BatchL2Grad, SumGradSquared, Variance])
def test_finish_in_place_in_company(other: type[GradientExtension], first: bool) -> None:
    """Of the gradients that one changes, others are made, before or after."""
    problem = standard()
    with pytest.raises(OverwrittenError, match=r"Unit\.finish.*in place"):
        run(problem, *[Unit(in_place=True), other()][:: 1 if first else -1])
    assert results(problem.model) == {}
    run(problem, *[Unit(in_place=False), other()][:: 1 if first else -1])
    check_units(problem)
    assert len(values(problem, other.savefield)) == len(truth().grad_batch)


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("other", [BatchDiagGGNExact, SqrtGGNExact])
def test_finish_in_place_on_columns(other: type[ExactGGNExtension], memory: int | None) -> None:
    """Also where columns are carried in blocks, and where they wait for those of another loss."""
    for losses in (1, 2):
        problem = standard()
        problem.terms = problem.terms * losses
        for module in (problem.model, *problem.losses):
            extend(module)
        with backpack(other(), TraceInPlace(), memory=memory), pytest.raises(OverwrittenError, match=r"TraceInPlace\.finish.*in place"):
            problem.loss(problem.outputs()).backward()
        assert results(problem.model) == {}
        with backpack(other(), Trace(), memory=memory):
            problem.loss(problem.outputs()).backward()
        oracle = truth()
        expected = {name: losses * g.sum() for name, g in oracle.diag_ggn_batch(oracle.hessian_exact).items()}
        check(problem, "trace", expected)


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


class OfBias(ModuleExtension):
    """The output is the bias plus something else, so that what is carried there is all that is needed."""

    def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, carried: Any) -> Tensor:
        if isinstance(carried, Tensor):
            return carried
        unit = torch.eye(module.out_features, dtype=module.output.dtype)
        return carried(unit[:, None].expand(-1, *module.output.shape)).sum(1)


@pytest.mark.parametrize("make, samples", [(HMP, N), (GGNMP, N), (PCHMP, N), (KFRA, 1)])
def test_rule_reads_what_sequences_of_modules_carry(make: Callable[[], BackpropExtension], samples: int) -> None:
    """Functions; or matrices, which are exact for one sample. The loss is a square, and nothing but the last layer lies before it."""
    torch.manual_seed(0)
    model, lossfunc = extend(Sequential(Linear(4, 3), Tanh(), Linear(3, 2)).double()), extend(MSELoss(reduction="sum"))
    x, y = torch.randn(samples, 4, dtype=torch.float64), torch.randn(samples, 2, dtype=torch.float64)
    ext = make()
    ext.set_module_extension(Linear, OfBias(["bias"]))
    with backpack(ext):
        lossfunc(model(x), y).backward()
    h = torch.tanh(model[0](x)).detach()
    slope, residual = 1 - h**2, -2 * h * (1 - h**2) * (2 * (model(x) - y).detach() @ model[2].weight.detach())
    jacobian = slope[:, None] * model[2].weight.detach()
    ggn = 2 * einsum("noi,noj->ij", jacobian, jacobian)
    extra = {HMP: residual, PCHMP: residual.clamp(min=0)}.get(make)
    close(getattr(model[2].bias, ext.savefield), 2 * samples * torch.eye(2, dtype=torch.float64))
    close(getattr(model[0].bias, ext.savefield), ggn if extra is None else ggn + extra.sum(0).diag())


class OwnLinear(Linear):
    """Without a rule: what a class computes that redefines ``forward`` is not known."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class OfWeightSquared(Linear):
    """Not linear in its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.square(), self.bias)


class WithoutProduct(LinearDerivatives):
    """Has no product with the Jacobian with respect to the bias."""

    _bias_jac_mat_prod = property()


@pytest.mark.parametrize("make, base, first", [(HMP, HMPBase, OwnLinear), (PCHMP, PCHMPBase, OwnLinear), (PCHMP, PCHMPBase, Linear)])
def test_module_extension_answers_for_a_layer_without_a_rule(make: Callable, base: Callable, first: type[Module]) -> None:
    """Products with blocks of curved matrices: what is carried is exact, and for the layer's parameters the user's derivatives know the rest."""
    torch.manual_seed(0)
    last = Linear if make is PCHMP and first is OwnLinear else OwnLinear  # the positive-curvature Hessian upstream of it is not defined
    own = extend(Sequential(first(3, 4), Tanh(), last(4, 2)).double())
    known, lossfunc = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2)).double()), extend(CrossEntropyLoss())
    known.load_state_dict(own.state_dict())
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randint(2, (N,))
    mapped = make()
    mapped.set_module_extension(OwnLinear, base(LinearDerivatives(), ["weight", "bias"]))
    names = [name for name, _ in own.named_parameters() if first is OwnLinear or name.startswith("2")]
    for model, ext in ((own, mapped), (known, make())):
        ext._exclude = tuple(p for name, p in model.named_parameters() if name not in names)
        with backpack(ext):
            lossfunc(model(x), y).backward()
    for name in names:
        ours, theirs = own.get_parameter(name), known.get_parameter(name)
        vectors = torch.randn(2, *ours.shape, dtype=torch.float64)
        product = getattr(ours, mapped.savefield)(vectors)
        close(product, getattr(theirs, mapped.savefield)(vectors))
        if make is HMP:
            (slope,) = torch.autograd.grad(lossfunc(own(x), y), ours, create_graph=True)
            close(product, torch.stack([torch.autograd.grad(slope, ours, vector, retain_graph=True)[0] for vector in vectors]))


@pytest.mark.parametrize(
    "layer, derivatives, reason",
    [(OfWeightSquared, LinearDerivatives, "OfWeightSquared is not linear in weight"), (OwnLinear, WithoutProduct, "no _bias_jac_mat_prod")],
)
def test_module_extension_does_not_answer(layer: type[Module], derivatives: Callable, reason: str) -> None:
    """What the derivatives of a user do not know is refused."""
    model, lossfunc, ext = extend(Sequential(layer(3, 2))), extend(CrossEntropyLoss()), HMP()
    ext.set_module_extension(layer, HMPBase(derivatives(), ["weight", "bias"]))
    with pytest.raises(UnsupportedError, match=reason), backpack(ext):
        lossfunc(model(torch.randn(N, 3)), torch.randint(2, (N,))).backward()


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


def two_losses() -> Problem:
    problem = standard(MSELoss)
    problem.terms.append(Term(MSELoss(reduction="sum"), torch.randn(N, 3, dtype=torch.float64)))
    return problem


def root_of_each(module: Module, _: None) -> Tensor:
    return root_of_squared_error(module, None) * (module.input0.numel() ** 0.5 if module.reduction == "sum" else 1)


def test_losses_that_meet() -> None:
    """Square roots of two Hessians are no root of their sum."""

    class SideBySide(SecondOrderBackpropExtension):
        @staticmethod
        def accumulate_backpropagated_quantities(existing: Tensor, other: Tensor) -> Tensor:
            return torch.cat([existing, other])

    entries = own_entries() | {MSELoss: Carrying(root_of_each, [])}
    problem = two_losses()
    with pytest.raises(NotImplementedError, match=r"'own' carries from several losses \(MSELoss, MSELoss\).*accumulate_backpropagated_quantities"):
        run(problem, SecondOrderBackpropExtension("own", entries))
    assert results(problem.model) == {}
    run(problem, SideBySide("own", entries))
    oracle = Oracle(two_losses())
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


class TwoHeads(Module):
    """Two outputs, each with a loss of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.act, self.head, self.function = Linear(4, 5), Tanh(), Linear(5, 3), function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.head(self.act(h)), self.function(h)


@pytest.mark.parametrize("function", [lambda h: h, lambda h: 2 * h, lambda h: h + h.tanh()], ids=["identity", "scaled", "residual"])
def test_functional_operation_beside_a_path_of_modules(function: Callable[[Tensor], Tensor]) -> None:
    """What passes the modules is not all of it."""

    class SideBySide(SecondOrderBackpropExtension):
        @staticmethod
        def accumulate_backpropagated_quantities(existing: Tensor, other: Tensor) -> Tensor:
            return torch.cat([existing, other])

    model, one, two, x = extend(TwoHeads(function).double()), extend(MSELoss()), extend(MSELoss()), torch.rand(N, 4, dtype=torch.float64)
    complete = model.function(x) is x
    with nullcontext() if complete else pytest.raises(AssertionError, match=r"'own'.*on the way.*body\.weight.*(Mul|Add).*exclude="):
        first, second = model(x)
        with backpack(SideBySide("own", own_entries())):
            (one(first, torch.zeros_like(first)) + two(second, torch.zeros_like(second))).backward()
    if not complete:
        assert results(model) == {}
        first, second = model(x)
        with backpack(SideBySide("own", own_entries(), exclude=[model.body])):
            (one(first, torch.zeros_like(first)) + two(second, torch.zeros_like(second))).backward()
    for layer in (model.body, model.head) if complete else (model.head,):
        columns = [f * (2 / f.numel()) ** 0.5 for f in model(x)]  # of a root of the losses' Hessian, per unit of their derivatives
        squares = torch.zeros_like(layer.bias)
        for output in columns:
            for entry in output.flatten():
                (derivative,) = torch.autograd.grad(entry, layer.bias, retain_graph=True, allow_unused=True)
                squares += 0 if derivative is None else derivative.square()
        close(layer.bias.own, squares)


def test_losses_of_a_container_with_two_outputs() -> None:
    """They do not meet there: the container arranges other modules, which are told."""

    class Two(Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Linear(4, 3), Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    model, one, two, x = extend(Two().double()), extend(MSELoss()), extend(MSELoss()), torch.rand(N, 4, dtype=torch.float64)
    with backpack(SecondOrderBackpropExtension("own", own_entries())):
        first, second = model(x)
        (one(first, torch.zeros_like(first)) + two(second, torch.zeros_like(second))).backward()
    for layer in (model.left, model.right):
        close(layer.weight.own, (2 / 3 * x.square().mean(0)).expand(3, 4))


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


# --- views ------------------------------------------------------------------------------------------------------------------------------------


class View(Module):
    """Layers around a view that no module makes."""

    def __init__(self, view: Callable[[Tensor], Tensor], *before: Module, last: Module | None = None) -> None:
        super().__init__()
        self.before, self.view, self.last = Sequential(*before), view, last or Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.view(self.before(x)))


VIEWS: dict[str, Callable[[], list[Module]]] = {
    "same shape": lambda: [Linear(4, 4), nn.Flatten(), Slicing((slice(None), slice(None))), Linear(8, 3)],
    "flatten": lambda: [Linear(4, 4), nn.Flatten(), Linear(8, 3)],
    "flatten an activation": lambda: [Linear(4, 4), Tanh(), nn.Flatten(), Linear(8, 3)],
    "there and back": lambda: [Linear(4, 4), nn.Flatten(), nn.Unflatten(1, (2, 4)), Tanh(), nn.Flatten(), Linear(8, 3)],
    "to no effect": lambda: [Linear(4, 4), nn.Flatten(), nn.Flatten(), Linear(8, 3)],
    "in place": lambda: [Linear(4, 4), ReLU(inplace=True), nn.Flatten(), Linear(8, 3)],
    "in place twice": lambda: [Linear(4, 4), ReLU(inplace=True), Linear(4, 4), ReLU(inplace=True), nn.Flatten(), Linear(8, 3)],
    "square": lambda: [Linear(4, 2), Permute(0, 2, 1), Permute(0, 2, 1), nn.Flatten(), Linear(4, 3)],
    "by hand, same shape": lambda: [View(lambda x: x.view(N, -1), Linear(4, 4), nn.Flatten())],
    "by hand, there and back": lambda: [
        View(lambda x: x.view(N, -1), Linear(4, 4), nn.Flatten(), nn.Unflatten(1, (2, 4)), nn.Flatten()),
    ],
}


def with_view(layers: Callable[[], list[Module]]) -> Problem:
    torch.manual_seed(3)
    model, x = Sequential(*layers()).double(), torch.randn(N, 2, 4, dtype=torch.float64)
    return Problem(model, x, [Term(MSELoss(), torch.randn(N, 3, dtype=torch.float64))])


def pulled_back(module: Module, columns: Tensor) -> Tensor:
    return vmap(vjp(module.forward, module.input0)[1])(columns)[0]


class OfPositions(Carrying):
    """Linear layers with positions between samples and features."""

    def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Tensor) -> Tensor:
        return einsum("vn...o,n...i->vnoi", columns, module.input0).square().sum((0, 1))

    def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, columns: Tensor) -> Tensor:
        return columns.flatten(2, -2).sum(2).square().sum((0, 1)) if columns.dim() > 3 else columns.square().sum((0, 1))  # noqa: PLR2004


def own_with_views() -> SecondOrderBackpropExtension:
    views = {cls: Carrying(pulled_back, []) for cls in (nn.Flatten, nn.Unflatten, Permute, Slicing, Tanh)}
    relu = Carrying(lambda module, columns: columns * (module.output > 0), [])
    linear = OfPositions(lambda module, columns: columns @ module.weight, ["weight", "bias"])
    loss = Carrying(root_of_squared_error, [])
    extension = SecondOrderBackpropExtension("own", {MSELoss: loss, Linear: linear, ReLU: relu, **views})
    extension.accumulate_backpropagated_quantities = lambda existing, other: existing + other
    return extension


@pytest.mark.parametrize("layers", VIEWS.values(), ids=VIEWS)
def test_views(layers: Callable[[], list[Module]]) -> None:
    """What is sent to a view goes to the module that made it, not to the one that made the base of the view, too."""
    problem = with_view(layers)
    run(problem, own_with_views())
    oracle = Oracle(with_view(layers))
    check(problem, "own", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [View(lambda x: x.flatten(1), Linear(4, 4))],
        lambda: [View(lambda x: x.transpose(1, 2), Linear(4, 2), Permute(0, 2, 1), last=Sequential(nn.Flatten(), Linear(4, 3)))],
    ],
    ids=["another shape", "transposed"],
)
def test_view_that_no_module_has_made(layers: Callable[[], list[Module]]) -> None:
    """Nothing is carried over a view by hand that changes the shape, or the order of the entries."""
    problem = with_view(layers)
    with pytest.raises(AssertionError, match=r"own.*before"):
        run(problem, own_with_views())
    assert results(problem.model) == {}


def test_module_that_returns_its_input() -> None:
    """It may have a rule, but what arrives at its output has arrived at its input then."""
    problem, last = build(lambda: Linear(4, 3), loss=MSELoss), extend(nn.Identity())
    extend(problem.model)
    loss, entries = extend(problem.losses[0]), own_entries() | {nn.Identity: Carrying(lambda _, columns: columns, [])}
    with backpack(SecondOrderBackpropExtension("own", entries)):
        loss(last(problem.model(problem.x)), problem.terms[0].target).backward()
    oracle = Oracle(build(lambda: Linear(4, 3), loss=MSELoss))
    check(problem, "own", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))


# --- derivatives ------------------------------------------------------------------------------------------------------------------------------


def at_library_rules(*layers: type[Module]) -> SecondOrderBackpropExtension:
    """The diagonal of the generalized Gauss-Newton, carried by derivatives of the library."""
    carrying = {cls: MatToJacMat(derivatives_for(cls())) for cls in layers}
    linear = DiagGGNBaseModule(LinearDerivatives(), ["weight", "bias"], sum_batch=True)
    return SecondOrderBackpropExtension("own", {MSELoss: Carrying(root_of_squared_error, []), Linear: linear, **carrying})


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout, nn.AlphaDropout, ReLU, lambda: ReLU(inplace=True), lambda: nn.ReLU6(inplace=True), nn.SiLU, lambda: nn.Dropout(inplace=True)],
)
@pytest.mark.parametrize("train", [False, True])
def test_derivatives_read_what_they_need(layer: Callable[[], Module], train: bool) -> None:
    """Of modules in either mode, and of those that overwrite their input."""
    problem = build(lambda: Linear(4, 4), layer, lambda: Linear(4, 4), lambda: ReLU(inplace=True), lambda: Linear(4, 3), loss=MSELoss)
    problem.model.train(train)
    extension, library = at_library_rules(ReLU, type(problem.model[1])), DiagGGNExact()
    if train and type(problem.model[1]) is nn.AlphaDropout:
        with pytest.raises(NotImplementedError, match="does not record which entries it dropped"):
            run(problem, extension)
        return
    run(problem, extension, library)
    check(problem, "own", values(problem, "diag_ggn_exact"))


def test_dropout_that_was_not_recorded() -> None:
    problem = build(lambda: Linear(4, 4), nn.Dropout, nn.Sigmoid, lambda: Linear(4, 3), loss=MSELoss)
    extend(problem.model)
    loss = extend(problem.losses[0])(problem.model(problem.x), problem.terms[0].target)
    with pytest.raises(AttributeError, match="Enter the context before the forward pass"), backpack(at_library_rules(nn.Dropout, nn.Sigmoid)):
        loss.backward()
    assert results(problem.model) == {}


class Exponential(Linear):
    """A linear layer with something behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp()


class OfExponential(LinearDerivatives):
    """Reads the output, as its base does not."""

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: tuple, g_out: tuple, mat: Tensor, sum_batch: bool = True, subsampling: Any = None
    ) -> Tensor:
        return super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat * module.output, sum_batch, subsampling)


@pytest.mark.parametrize("inside", [False, True])
def test_derivatives_derived_from_those_of_the_library(inside: bool) -> None:
    """They may read both input and output, whether or not the forward pass was under the context."""

    def special() -> Problem:
        return build(lambda: Exponential(4, 4), lambda: Linear(4, 3))

    problem, extension = special(), BatchGrad()
    extension.set_module_extension(Exponential, BatchGradBase(derivatives=OfExponential(), params=["weight"]))
    loss = extend(problem.losses[0])
    extend(problem.model)
    context = backpack(extension)
    with context if inside else nullcontext():
        value = loss(problem.model(problem.x), problem.terms[0].target)
    with context:
        value.backward()
    check(problem, "grad_batch", Oracle(special()).grad_batch)


def test_output_that_is_used_and_then_overwritten() -> None:
    """Its gradient arrives in two parts, at the view that was used and at the tensor that was overwritten."""

    class Reused(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.last = Linear(4, 4), ReLU(inplace=True), Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            before = h.sum(1)
            self.relu(h)
            return self.last(torch.cat([before, h.sum(1)], 1))

    model, own = extend(Reused().double()), BatchGrad()
    own.set_module_extension(Linear, batch_grad_base.BatchGradBase(derivatives=LinearDerivatives(), params=["weight", "bias"]))
    with pytest.raises(UnsupportedError, match="What first returns is used as it was, and overwritten afterwards"), backpack(own):
        model(torch.randn(N, 2, 4, dtype=torch.float64)).square().sum().backward()
    assert results(model) == {}


class Twice(Module):
    """A factor, or a list, in front of what samples lie in."""

    def forward(self, first: float | list[Tensor], x: Tensor | None = None) -> Tensor:
        return first[0] + first[1] if x is None else first * x


class Constant(Module):
    """Takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return 2 * self.shift


@pytest.mark.parametrize("listed", [True, False])
def test_rules_of_modules_whose_first_argument_is_no_tensor(listed: bool) -> None:
    """They cannot stand for the call: the graph does."""

    class Shifted(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.twice, self.constant = Linear(3, 2), Twice(), Constant()

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x + self.constant())
            return self.twice([h, h]) if listed else self.twice(2.0, h)

    for cls in (Twice, Constant):
        register(cls, LinearMapDerivatives)
    model, x = Shifted().double(), torch.rand(4, 3, dtype=torch.float64)
    expected = [torch.autograd.grad(out.sum(), tuple(model.parameters()), retain_graph=True) for out in model(x)]
    extend(model)
    with backpack(BatchGrad()):
        model(x).sum().backward()
    for parameter, gradients in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        close(parameter.grad_batch, torch.stack(gradients))


class OfTwice(Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def instance_of_twice() -> Linear:
    layer = Linear(4, 3)
    layer.forward = lambda x: nn.functional.linear(2 * x, layer.weight, layer.bias)
    return layer


@pytest.mark.parametrize("make", [lambda: OfTwice(4, 3), instance_of_twice], ids=["subclass", "instance"])
def test_subclass_with_another_forward_does_not_use_the_entry_of_its_base(make: Callable[[], Linear]) -> None:
    """What is right for the base class is wrong for it."""

    class Weights(FirstOrderModuleExtension):
        def weight(self, ext: Any, module: Module, g_inp: Any, g_out: Any, bp: Any) -> Tensor:
            return torch.einsum("no,ni->noi", g_out[0], module.input0)

    def extension() -> FirstOrderBackpropExtension:
        return FirstOrderBackpropExtension("mine", {Linear: Weights(["weight"])}, "ERROR")

    model = extend(Sequential(make()))
    with backpack(extension()), pytest.raises(NotImplementedError, match="Extension saving to mine does not have an extension for Module"):
        model(torch.randn(5, 4)).sum().backward()
    assert not hasattr(model[0].weight, "mine")
    model = extend(Sequential(type("Same", (Linear,), {})(4, 3)))
    with backpack(extension(), BatchGrad()):
        model(torch.randn(5, 4)).sum().backward()
    torch.testing.assert_close(model[0].weight.mine, model[0].weight.grad_batch)


def test_rule_that_forgets_samples_without_a_batch_axis() -> None:
    """Where a module is called with the vector of one sample, the graph takes its place; a product of another shape is refused."""

    class Factor(Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x

    class FactorDerivatives(BaseParameterDerivatives):
        keeps = frozenset({"input"})
        always = False

        def hessian_is_zero(self, module: Module) -> bool:
            return True

        def _jac_t_mat_prod(self, module, g_inp, g_out, mat, subsampling=None):
            return module.factor * mat

        def _factor_jac_t_mat_prod(self, module, g_inp, g_out, mat, sum_batch=True, subsampling=None):
            products = mat * (module.input0 if subsampling is None else module.input0[subsampling])
            return products.sum(1) if sum_batch or self.always else products

    class Model(Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self[1](row) for row in self[0](x)])

    register(Factor, FactorDerivatives)
    found, x = [], torch.randn(3, 4)
    for kind in (Sequential, Model):
        torch.manual_seed(0)
        model = extend(kind(Linear(4, 3), Factor()))
        with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), DiagGGNExact()):
            extend(nn.MSELoss())(model(x), torch.zeros(3, 3)).backward()
        found.append(results(model))
    for name, values in found[0].items():
        for field, value in values.items():
            torch.testing.assert_close(value, found[1][name][field])
    model = extend(Sequential(Linear(4, 3), Factor()))
    with backpack(BatchGrad()), pytest.raises(ShapeError, match=r"_factor_jac_t_mat_prod.*must have shape \[V, 5, 3\], got \[1, 5, 2, 3\]"):
        model(torch.randn(5, 2, 4)).sum().backward()
    FactorDerivatives.always = True
    with backpack(BatchGrad()), pytest.raises(ShapeError, match=r"must have shape \[V, 5, 3\], got \[1, 3\]"):
        model(torch.randn(5, 4)).sum().backward()


@pytest.mark.parametrize("place", ["gradient", "columns"])
def test_module_extension_that_writes_on_what_it_is_given(place: str) -> None:
    """It would change the gradient, or what other quantities are made of."""

    class Writes(ModuleExtension):
        def weight(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: Tensor) -> Tensor:
            value = einsum("vno,ni->oi", columns**2, module.input0**2)
            (g_out[0] if place == "gradient" else columns).mul_(2)
            return value

    model, ext = extend(Sequential(Linear(4, 3), Tanh(), Linear(3, 2))), DiagGGNExact()
    ext.set_module_extension(Linear, Writes(["weight"]))
    with backpack(ext, BatchGrad()), pytest.raises(OverwrittenError, match=r"Writes, at [02], changes in place what it is given"):
        extend(CrossEntropyLoss())(model(torch.randn(5, 4)), torch.arange(5) % 2).backward()
    assert results(model) == {}


@pytest.mark.parametrize("place", ["input", "parameter", "shape"])
def test_rule_that_writes_on_its_argument(place: str) -> None:
    """What arrives at a layer belongs to others, too; a product of another shape is none."""

    class Twice(Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x

    class TwiceDerivatives(BaseParameterDerivatives):
        def hessian_is_zero(self, module: Module) -> bool:
            return True

        def _jac_t_mat_prod(self, module, g_inp, g_out, mat, subsampling=None):
            if place == "shape":
                return (module.factor * mat).sum(2)
            return mat.mul_(module.factor) if place == "input" else module.factor * mat

        def _factor_jac_t_mat_prod(self, module, g_inp, g_out, mat, sum_batch=True, subsampling=None):
            at = module.input0 if subsampling is None else module.input0[subsampling]
            products = mat.mul_(at) if place == "parameter" else mat * at
            return products.sum(1) if sum_batch else products

    register(Twice, TwiceDerivatives)
    model = extend(Sequential(Linear(4, 3), Twice(), Tanh(), Linear(3, 2)))
    match = r"must have shape" if place == "shape" else "changes its argument in place"
    with backpack(DiagGGNExact(), BatchGrad()), pytest.raises((OverwrittenError, ShapeError), match=match):
        extend(CrossEntropyLoss())(model(torch.randn(5, 4)), torch.arange(5) % 2).backward()
    assert results(model) == {}


def test_linear_map_with_other_arguments() -> None:
    """They belong to the map: a number, a keyword, a tensor."""

    class Times(Module):
        def forward(self, x: Tensor, k: float | Tensor = 2, *, axis: int = 1) -> Tensor:
            return (x * k).cumsum(axis)

    class Model(Module):
        def __init__(self, k: float | Tensor, axis: int) -> None:
            super().__init__()
            self.first, self.map, self.last, self.given = Linear(4, 3), Times(), Linear(3, 2), (k, axis)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.map(self.first(x).unflatten(1, (3, 1)), self.given[0], axis=self.given[1]).flatten(1).tanh())

    def quantities(model: Module) -> list[Tensor]:
        with backpack(DiagGGNExact(), DiagHessian(), KFLR()):
            extend(CrossEntropyLoss())(model(x), y).backward()
        return [model.first.weight.diag_ggn_exact, model.first.weight.diag_h, *model.first.weight.kflr]

    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 2
    models = [extend(Model(k, axis).double()) for k, axis in ((3, 1), (0.5, 2), (2, 1), (torch.tensor([[2.0], [3.0], [5.0]]).double(), 1))]
    expected = [quantities(model) for model in models]
    register(Times, LinearMapDerivatives)
    for model, values in zip(models, expected, strict=True):
        torch.testing.assert_close(quantities(model), values)


class ThreeTimes(ColumnRule):
    """Columns that are three times as large."""

    def at_call(self, use: Use, name: str) -> Columns:
        return {source: 3 * columns for source, columns in super().at_call(use, name).items()}

    def at_leaf(self, columns: Columns) -> Columns:
        return {source: 3 * part for source, part in super().at_leaf(columns).items()}


def reading(kind: type[BackpropExtension]) -> BackpropExtension:
    """Return an extension that reads columns in another way, and saves elsewhere."""

    class Own(kind):
        def rule_at(self, samples: int) -> ThreeTimes:
            return ThreeTimes(self.flow, self.samples(samples))

    extension = Own()
    extension.savefield = "own"
    return extension


class Halved(Linear):
    """A weight that is made of the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / 2, self.bias)


@pytest.mark.parametrize("layer", [Linear, Halved])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("kind", "factor"), [(BatchGrad, 3), (BatchL2Grad, 9), (SumGradSquared, 9), (Variance, 9), (DiagGGNExact, 9), (SqrtGGNExact, 3), (DiagHessian, 9)]
)
def test_other_ways_to_read_columns_are_nobody_elses(kind: type[BackpropExtension], factor: int, order: int, layer: type[Module]) -> None:
    """In the same pass, the library's quantity is its own, and the user's the user's."""
    problem, extensions = build(lambda: layer(4, 4), Tanh, lambda: layer(4, 3)), [kind(), reading(kind)]
    (term,) = problem.terms
    model, lossfunc = extend(problem.model), extend(term.module)
    with backpack(kind()):
        lossfunc(model(problem.x), term.target).backward()
    field = extensions[0].savefield
    expected = [getattr(p, field).clone() for p in model.parameters()]
    with backpack(*extensions[::order]):
        lossfunc(model(problem.x), term.target).backward()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        close(getattr(parameter, field), value)
        close(parameter.own, factor * value)


def test_what_subclasses_make_of_results_with_notes() -> None:
    """They are given the results themselves."""

    class Deviation(Variance):
        def finish(self, state: Any, parameter: Parameter) -> Tensor:
            return super().finish(state, parameter).sqrt()

    class Traces(KFLR):
        def finish(self, state: Any, parameter: Parameter) -> list[Tensor]:
            return [factor.trace() for factor in super().finish(state, parameter)]

    problem, deviation, traces = standard(), Deviation(), Traces()
    deviation.savefield, traces.savefield = "deviation", "traces"
    (term,) = problem.terms
    model, lossfunc = extend(problem.model), extend(term.module)
    with backpack(Variance(), deviation, KFLR(), traces):
        lossfunc(model(problem.x), term.target).backward()
    for parameter in model.parameters():
        close(parameter.deviation.square(), parameter.variance)
        assert len(parameter.traces) == parameter.dim()
        for trace, factor in zip(parameter.traces, parameter.kflr, strict=True):
            close(trace, factor.trace())


FIRST_ORDER = [BatchGrad, BatchL2Grad, SumGradSquared, Variance]
CURVATURE = [DiagGGNExact, DiagGGNMC, BatchDiagGGNExact, SqrtGGNExact, DiagHessian, BatchDiagHessian]


@pytest.mark.parametrize("base", [*FIRST_ORDER, *CURVATURE])
@pytest.mark.parametrize("memory", [None, 1])
def test_a_subclass_says_which_samples(base: type[BackpropExtension], memory: int | None) -> None:
    class Chosen(base):
        def get_subsampling(self) -> list[int]:
            return [2, 0]

    values = []
    for extension in (Chosen(), base(subsampling=[2, 0])):
        torch.manual_seed(0)
        model, lossfunc = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2)).double()), extend(MSELoss())
        with backpack(extension, memory=memory):
            lossfunc(model(torch.rand(4, 3).double()), torch.rand(4, 2).double()).backward()
        values.append([getattr(p, extension.savefield) for p in model.parameters()])
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("extension", [KFRA, HMP, GGNMP, PCHMP, lambda: HBP("hessian", "sum", "average", "E[J^T E(H) J]")])
def test_full_backward_hooks_that_look_on(extension: Callable[[], BackpropExtension]) -> None:
    """Quantities of sequences are what they are without hooks, which torch puts between modules."""
    values, seen = [], []
    for hooked in (False, True):
        torch.manual_seed(0)
        model, lossfunc = extend(Sequential(Linear(3, 4), Tanh(), Sequential(Linear(4, 4), Tanh()), Linear(4, 2)).double()), extend(MSELoss())
        for module in model if hooked else ():
            module.register_full_backward_hook(lambda module, g_inp, g_out: seen.append(module))
            module.register_full_backward_pre_hook(lambda module, g_out: seen.append(module))
        with backpack(made := extension()):
            lossfunc(model(torch.rand(5, 3).double().requires_grad_()), torch.rand(5, 2).double()).backward()
            found = [getattr(p, made.savefield) for p in model.parameters()]
            values.append([f(torch.ones(1, *p.shape).double()) if callable(f) else f for f, p in zip(found, model.parameters(), strict=True)])
    assert len(seen) == 8  # noqa: PLR2004 (two a module)
    torch.testing.assert_close(*values, rtol=0, atol=0)
