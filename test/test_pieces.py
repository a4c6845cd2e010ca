"""A rule stands for what the graph shows, and for nothing else: none is lost where a class computes as usual, none is used where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import test_derivatives  # noqa: F401  (adds rows to the table of layers)
import torch
from cases import CASES, LAYERS
from oracle import Oracle, Problem, Term
from table import default_dtype, every_second
from test_extensions import close, sum_batch
from test_silent_errors import expected_by
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Conv1d, Flatten, Linear, Module, MSELoss, Parameter, Sequential, Sigmoid, Tanh
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from backpack import backpack, extend, results
from backpack.core import operations, walk
from backpack.core.derivatives.registry import derivatives_for, registered
from backpack.core.walk import Walk
from backpack.extensions import BatchDiagGGNExact, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, SumGradSquared, Variance
from backpack.utils.errors import OverwrittenError

# --- no rule is lost --------------------------------------------------------------------------------------------------------------------------


def pieces(out: Tensor) -> Iterator[tuple[str, bool, bool]]:
    """Name of each module with a rule in a graph, whether there is a piece that it could stand for, and whether it does."""
    found = Walk([out.grad_fn], second_order=True)
    for node, marks in found.marks.items():
        for mark in marks:
            if mark.call.derivatives is not None:
                with patch.object(walk, "as_described", lambda *_: True):
                    free = found.piece(node, mark.call, mark.base)
                yield repr(mark.call.module), free is not None, found.piece(node, mark.call, mark.base) is not None


def arranged(x: Tensor, memory: str) -> Tensor:
    if memory == "channels last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if memory == "transposed" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


MEMORY = ("", "channels last", "transposed")
MODES = [*product([torch.float64], [3], MEMORY), *product([torch.float32], [1], MEMORY), (torch.float64, 0, "")]


def runs(name: str, modes: list[tuple[torch.dtype, int, str]] = MODES) -> Iterator[tuple[Module, tuple[Tensor, ...]]]:
    """A layer with its inputs: in both modes, with trained and frozen parameters, with and without gradients of the input, which may be a view.

    What torch itself refuses is left out.
    """
    for (dtype, N, memory), training, trained, view in product(modes, (False, True), (False, True), (None, False, True)):
        with default_dtype(dtype):
            torch.default_generator.manual_seed(0)
            module = LAYERS[name].make().to(dtype).train(training).requires_grad_(trained)
            x = arranged(torch.randn(N, *LAYERS[name].shape), memory)
            if view is not None:
                x = x.requires_grad_().sin()
            inputs = x.view(x.shape) if view else x, *(more.to(dtype) if more.is_floating_point() else more for more in LAYERS[name].more(N))
            try:
                module(*inputs)
            except (RuntimeError, IndexError, ValueError):
                continue
            yield module, inputs


@pytest.mark.parametrize("name", every_second(LAYERS))
def test_layers_keep_their_rules(name: str) -> None:
    """In all modes, types and memory formats, also of empty mini-batches where torch computes something."""
    seen = 0
    for module, inputs in runs(name):
        out = extend(module)(*inputs)
        for where, could, does in pieces(out) if out.grad_fn is not None else ():
            assert could == does, where
            seen += could
    assert seen


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "kind", ["ReLU", "ReLU6", "LeakyReLU", "RReLU", "ELU", "CELU", "SELU", "Hardtanh", "Hardsigmoid", "Hardswish", "SiLU", "Mish", "Dropout"]
)
def test_operations_in_place_keep_their_rules(kind: str, inplace: bool) -> None:
    for dtype, view, training in product((torch.float32, torch.bfloat16), (False, True), (False, True)):
        x = torch.randn(3, 2, 4, requires_grad=True).to(dtype).sin()
        module = extend(getattr(nn, kind)(inplace=inplace).train(training))
        found = list(pieces(module(x.view(-1, 4) if view else x)))
        assert all(could == does for _, could, does in found)
        assert found or kind == "Dropout"


@pytest.mark.parametrize("name", CASES)
def test_cases_keep_their_rules(name: str) -> None:
    """All models and losses of the table."""
    for N in (1, 3):
        problem = CASES[name].build(N)
        for module in (problem.model, *problem.losses):
            extend(module)
        for where, could, does in pieces(problem.loss(problem.outputs())):
            assert could == does, where


def test_every_class_is_described() -> None:
    """Losses that consist of plain arithmetic look like any function; subclasses of torch's losses are differentiated as they are."""
    arithmetic = {nn.HingeEmbeddingLoss, nn.KLDivLoss, nn.MarginRankingLoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.MultiLabelSoftMarginLoss}
    ours = {cls for cls, rule in registered().items() if cls.__module__.startswith(("torch.", "backpack.")) and not rule.any_forward}
    assert ours - arithmetic <= operations._TABLE.keys()


# --- no rule is used for something else -------------------------------------------------------------------------------------------------------


def triple(_: Module, __: tuple, out: Tensor) -> Tensor:
    return 3 * out


@pytest.mark.parametrize("name", every_second(LAYERS))
def test_scaled_outputs_have_no_rule(name: str) -> None:
    for module, inputs in runs(name, MODES[:2]):
        if inputs[0].requires_grad:
            handle = extend(module).register_forward_hook(triple, prepend=True)
            assert not any(does for _, _, does in pieces(module(*inputs)))
            handle.remove()


RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "one more axis": lambda out: out.unsqueeze(1),
    "one more axis in front": lambda out: out.unsqueeze(0),
    "as one axis": lambda out: out.view(-1),
    "lengths exchanged": lambda out: out.contiguous().view(out.shape[0], -1, out.shape[1]),
}


@pytest.mark.parametrize("name", every_second(LAYERS))
def test_reshaped_outputs_have_no_rule(name: str) -> None:
    """But for reshapes of each sample, which remain such."""
    for module, inputs in runs(name, MODES[:1]):
        out, is_reshape = module(*inputs), isinstance(module, (nn.Identity, Flatten, nn.Unflatten))
        for reshape in RESHAPES.values() if isinstance(out, Tensor) and out.requires_grad and not is_reshape else ():
            try:
                changes = reshape(out).shape != out.shape
            except (RuntimeError, IndexError):  # not possible with this output
                continue
            handle = extend(module).register_forward_hook(lambda _, __, out, reshape=reshape: reshape(out), prepend=True)
            assert not changes or not any(does for where, _, does in pieces(module(*inputs)) if where == repr(module))
            handle.remove()


def layers(model: Module) -> list[Module]:
    return [layer for layer in model.modules() if isinstance(layer, Linear | Conv1d)]


Interference = Callable[[Module], AbstractContextManager]


def hooks(function: Callable, everywhere: bool = False) -> Interference:
    """Hooks on all layers that run before those of ``extend``."""

    @contextmanager
    def interfere(model: Module) -> Iterator[None]:
        chosen = layers(model)
        if everywhere:
            handles = [register_module_forward_hook(lambda module, args, out: function(module, args, out) if module in chosen else None)]
        else:
            handles = [layer.register_forward_hook(function, prepend=True) for layer in chosen]
        yield
        for handle in handles:
            handle.remove()

    return interfere


def residual(_: Module, args: tuple[Tensor], out: Tensor) -> Tensor | None:
    return out + args[0] if out.shape == args[0].shape else None


def doubled_in_place(_: Module, __: tuple, out: Tensor) -> None:
    out.mul_(2)


def reshaped(_: Module, __: tuple, out: Tensor) -> Tensor | None:
    return {3: lambda: out.unflatten(1, (2, 4)), 4: lambda: out.flatten(1, 2)}.get(out.dim(), lambda: None)()


def another_product(_: Module, __: tuple, out: Tensor) -> Tensor:
    return out @ torch.arange(out.shape[-1] ** 2, dtype=out.dtype).reshape(out.shape[-1], -1).cos()


def turned(_: Module, __: tuple, out: Tensor) -> Tensor:
    return out.transpose(1, 2) if out.dim() == 3 and out.shape[1] == out.shape[2] else out.flip(-1)


class Functions(TorchFunctionMode):
    """Calls layers with other inputs or weights, as simulated quantization does."""

    def __init__(self, of_input: Callable, of_weight: Callable) -> None:
        super().__init__()
        self.of_input, self.of_weight = of_input, of_weight

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if function in (F.linear, F.conv1d):
            args = (self.of_input(args[0]), self.of_weight(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))


class Squared(Parameter):
    """Is squared by every function that multiplies by it."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            if function in (F.linear, F.conv1d):
                args = (args[0], args[1] * args[1], *args[2:])
            return function(*args, **(kwargs or {}))


@contextmanager
def squared(model: Module) -> Iterator[None]:
    for layer in layers(model):
        if not isinstance(layer.weight, Squared):
            with torch.no_grad():
                layer.weight = Squared(layer.weight.detach())
    yield


@contextmanager
def attributes(model: Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Weights are no parameters as long as the model runs."""
    weights = [layer.weight for layer in layers(model)]
    for layer in layers(model):
        weight = layer.weight
        del layer.weight
        layer.weight = make(weight)
    yield
    for layer, weight in zip(layers(model), weights, strict=True):
        del layer.weight
        layer.weight = weight


class Tripled(Module):
    """Parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


@contextmanager
def methods(model: Module, name: str, cls: type[Module], on_object: bool) -> Iterator[None]:
    """Replace a method of a class, or of objects, by one that calls it and triples what it returns."""
    original = getattr(cls, name)

    def replaced(self: Module, *args: Tensor) -> Tensor:
        return 3 * original(self, *args)

    if not on_object:
        with patch.object(cls, name, replaced):
            yield
        return
    chosen = [layer for layer in layers(model) if isinstance(layer, cls)]
    for layer in chosen:
        setattr(layer, name, replaced.__get__(layer))
    yield
    for layer in chosen:
        delattr(layer, name)


def tripled_function(name: str) -> AbstractContextManager:
    original = getattr(F, name)
    return patch.object(F, name, lambda x, weight, *rest: original(x, 3 * weight, *rest))


class Clone(Function):
    """A function that is named like an operation which changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


INTERFERENCES: dict[str, Interference] = {
    "hook": hooks(triple),
    "hook with a function that is named like one of torch": hooks(lambda module, args, out: Clone.apply(out)),
    "global hook": hooks(triple, everywhere=True),
    "hook in place": hooks(doubled_in_place),
    "hook with the input": hooks(residual),
    "hook with a product": hooks(another_product),
    "hook that turns": hooks(turned, everywhere=True),
    "hook that reshapes": hooks(reshaped),
    "mode, weights": lambda _: Functions(lambda x: x, torch.tanh),
    "mode, inputs": lambda _: Functions(lambda x: 2 * x, lambda weight: weight),
    "mode, transposed": lambda _: Functions(lambda x: x, lambda weight: weight.t() if weight.shape[0] == weight.shape[-1] else weight),
    "class of parameters": squared,
    "forward of the class": partial(methods, name="forward", cls=Linear, on_object=False),
    "forward of objects": partial(methods, name="forward", cls=Linear, on_object=True),
    "inner method of the class": partial(methods, name="_conv_forward", cls=Conv1d, on_object=False),
    "inner method of objects": partial(methods, name="_conv_forward", cls=Conv1d, on_object=True),
    "function": lambda _: tripled_function("linear"),
    "attribute": partial(attributes, make=lambda weight: 2 * weight),
    "attribute, view": partial(attributes, make=lambda weight: weight.view_as(weight)),
    "nothing": lambda _: nullcontext(),
}


def build(interfere: Interference, frozen: bool = False) -> Problem:
    """A net with layers that have many positions, two extra axes, a square weight and no bias."""
    torch.manual_seed(0)
    model = Sequential(Conv1d(2, 8, 3), Tanh(), Linear(38, 8), Tanh(), Linear(8, 8, bias=False), Sigmoid(), Flatten(), Linear(64, 3)).double()
    if frozen:
        model[4].requires_grad_(False)

    def run(model: Module, x: Tensor) -> Tensor:
        with interfere(model):
            return model(x)

    x = torch.randn(3, 2, 40, dtype=torch.float64)
    return Problem(model, x, [Term(MSELoss(), torch.randn(3, 3, dtype=torch.float64))], run)


REFUSED = {("attribute", True), ("attribute, view", False), ("attribute, view", True)}
"""Where nothing but the place of the data tells that a layer had another weight."""


@pytest.mark.parametrize(
    ("name", "frozen"), [(name, frozen) for name in INTERFERENCES for frozen in (False, True) if not (frozen and name == "function")]
)
def test_interference(name: str, frozen: bool) -> None:
    """Whatever comes between a layer and its output, quantities are those of what was computed, and so is ``.grad``."""
    problem, oracle = build(INTERFERENCES[name], frozen), Oracle(build(INTERFERENCES[name], frozen))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack():  # rules have been looked up before
        problem.model(problem.x)
    if (name, frozen) not in REFUSED:
        check(problem, oracle)
        return
    with pytest.raises(OverwrittenError, match="after the forward pass"):
        check(problem, oracle)
    assert results(problem.model) == {}


def check(problem: Problem, oracle: Oracle) -> None:
    loss = problem.loss(problem.outputs())
    with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), BatchDiagGGNExact(), DiagGGNExact()):
        loss.backward()
    expected = expected_by(oracle) | {"grad": oracle.grad}
    assert list(results(problem.model)) == list(oracle.params)
    for field, values in expected.items():
        for parameter, value in values.items():
            close(getattr(problem.model.get_parameter(parameter), field), value)


@pytest.mark.parametrize("name", ["hook", "mode, weights", "attribute", "nothing"])
def test_first_order_alone(name: str) -> None:
    """Where the gradient is the sum of what samples contribute, it is left to autograd, too."""
    problem, oracle = build(INTERFERENCES[name]), Oracle(build(INTERFERENCES[name]))
    extend(problem.model)
    loss = problem.loss(problem.outputs())
    with backpack(BatchGrad()):
        loss.backward()
    for parameter, value in oracle.grad_batch.items():
        close(problem.model.get_parameter(parameter).grad_batch, value)
        close(problem.model.get_parameter(parameter).grad, oracle.grad[parameter])


def test_another_weight_that_is_constant() -> None:
    """A weight that the forward pass has not used: what it has used is not at hand, and the parameter gets no gradient."""
    noise = partial(attributes, make=lambda weight: weight.detach().cos())
    problem, oracle = build(noise), Oracle(build(noise))
    for module in (problem.model, *problem.losses):
        extend(module)
    check(problem, oracle)


def test_parametrization_removed_before_backward() -> None:
    """The rule would take the value of the parametrization for the parameter."""
    problem, plain = build(lambda _: nullcontext()), build(lambda _: nullcontext())
    parametrize.register_parametrization(plain.model[4], "weight", Tripled())
    parametrize.register_parametrization(problem.model[4], "weight", Tripled())
    kept = problem.model[4].parametrizations.weight  # else it is deleted, and refused
    for module in (problem.model, *problem.losses):
        extend(module)
    loss, oracle = problem.loss(problem.outputs()), Oracle(plain)
    parametrize.remove_parametrizations(problem.model[4], "weight")
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    diagonals = sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))
    for name, value in oracle.grad_batch.items():
        parameter = kept.original if "parametrizations" in name else problem.model.get_parameter(name)
        close(parameter.grad_batch, value)
        close(parameter.diag_ggn_exact, diagonals[name])


LAST: dict[str, Callable[[], list[Module]]] = {
    "Softmax": lambda: [nn.Softmax(1)],
    "LogSoftmax": lambda: [nn.LogSoftmax(1)],
    "LayerNorm": lambda: [nn.LayerNorm(6)],
    "PReLU": lambda: [nn.PReLU(6)],
    "Tanh": lambda: [Tanh()],
    "Identity": lambda: [nn.Identity()],
    "Linear": lambda: [Linear(6, 6)],
    "Conv1d": lambda: [nn.Unflatten(1, (2, 3)), Conv1d(2, 2, 1)],
    "MaxPool1d": lambda: [nn.Unflatten(1, (2, 3)), nn.MaxPool1d(1)],
    "AvgPool1d": lambda: [nn.Unflatten(1, (2, 3)), nn.AvgPool1d(3, 1, 1)],
    "ConstantPad1d": lambda: [nn.Unflatten(1, (2, 3)), nn.ConstantPad1d((1, -1), 0.5)],
    "Softmax2d": lambda: [nn.Unflatten(1, (2, 3, 1)), nn.Softmax2d()],
}


@pytest.mark.parametrize("name", LAST)
def test_hook_that_keeps_all_entries(name: str) -> None:
    """It may change the shape, and with it what the rule takes for the axes of the layer."""

    def problem(extended: bool) -> Problem:
        torch.manual_seed(0)
        chosen = LAST[name]()
        model = Sequential(Linear(4, 6), *chosen, Sigmoid(), Flatten(), Linear(6, 3)).double()
        found = Problem(model, torch.randn(3, 4, dtype=torch.float64), [Term(MSELoss(), torch.randn(3, 3, dtype=torch.float64))])
        for module in (model, *found.losses) if extended else ():
            extend(module)
        chosen[-1].register_forward_hook(lambda _, __, out: out.view(len(out), 3, 2), prepend=True)
        return found

    found, oracle = problem(extended=True), Oracle(problem(extended=False))
    check(found, oracle)
    loss = found.loss(found.outputs())
    with backpack(DiagHessian()):
        loss.backward()
    for parameter, value in oracle.diag_h_batch.items():
        close(found.model.get_parameter(parameter).diag_h, value.sum(0))


@pytest.mark.parametrize("shape", [(-1,), (3, 1, -1)])
@pytest.mark.parametrize("kind", [MSELoss, nn.CrossEntropyLoss])
def test_hook_that_reshapes_a_loss(kind: type[Module], shape: tuple[int, ...]) -> None:
    """Of which every entry has a weight."""

    def problem(extended: bool) -> Problem:
        torch.manual_seed(0)
        model, loss = Linear(4, 6).double(), kind(reduction="none")
        target = torch.randn(3, 2, 3).double() if kind is MSELoss else torch.randint(2, (3, 3))
        weights = torch.rand(target.shape).double().view(shape)
        found = Problem(model, torch.randn(3, 4).double(), [Term(loss, target, 0, weights)], lambda model, x: model(x).view(3, 2, 3))
        for module in (model, loss) if extended else ():
            extend(module)
        loss.register_forward_hook(lambda _, __, out: out.view(shape), prepend=True)
        return found

    check(problem(extended=True), Oracle(problem(extended=False)))


class Mine(Linear):
    """A layer of the user's own."""


def test_class_patched_after_its_rule_was_found() -> None:
    """And back again."""
    layer, rule = Mine(2, 2), derivatives_for(Linear)
    assert derivatives_for(layer) is rule
    with patch.object(Mine, "forward", lambda self, x: F.linear(x, 2 * self.weight), create=True):
        assert derivatives_for(layer) is None
    with patch.object(Linear, "forward", lambda self, x: F.linear(x, 2 * self.weight)):
        assert derivatives_for(layer) is derivatives_for(Linear(2, 2)) is None
    assert derivatives_for(layer) is rule
    convolution, rule = Conv1d(2, 2, 2), derivatives_for(Conv1d)
    with patch.object(Conv1d, "_conv_forward", lambda self, x, weight, bias: F.conv1d(x, 2 * weight)):
        assert derivatives_for(convolution) is derivatives_for(Conv1d) is None
    assert derivatives_for(convolution) is rule


def causal(self: Conv1d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv1d(F.pad(x, (2, 0)), weight, bias)


def test_inner_method_that_looks_alike() -> None:
    """Padded on one side only, a convolution has the shapes and the operations of the layer, and another Jacobian: ``.grad`` is at stake, too."""
    torch.manual_seed(0)
    layer, x = extend(Conv1d(8, 16, 3, padding=1)).double(), torch.randn(4, 8, 64, dtype=torch.float64)
    layer(x)
    with patch.object(Conv1d, "_conv_forward", causal):
        samples = [torch.autograd.grad(layer(sample[None]).sin().sum(), layer.weight)[0] for sample in x]
        with backpack(BatchGrad()):
            layer(x).sin().sum().backward()
    close(layer.weight.grad_batch, torch.stack(samples))
    close(layer.weight.grad, sum(samples))


def test_modes_and_classes_that_change_nothing() -> None:
    """The default device is a mode of torch, and a class of tensors need not see calls: rules hold."""

    class Image(Tensor):
        pass

    for context, x in ((torch.device("cpu"), torch.randn(3, 2)), (nullcontext(), torch.randn(3, 2).as_subclass(Image))):
        layer = extend(Linear(2, 2))
        with context:
            out = layer(x)
        assert {does for _, _, does in pieces(out)} == {True}
