"""Rules of users read the attributes of their module, also those that have the names of what a record of an execution has itself."""

from __future__ import annotations

import pytest
import torch
from test_extensions import close
from test_silent_errors import build, check
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, Linear, Module, MSELoss, Parameter, Sequential

from backpack import backpack, check_rule, extend, extensions
from backpack.core.calls import ModuleCall
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.registry import register
from backpack.core.recording import last_call
from backpack.extensions import GGNMP, DiagGGNExact
from backpack.extensions.module_extensions import BatchGradBase, GGNMPBase
from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
from backpack.utils.errors import OverwrittenError
from backpack.utils.subsampling import subsample

NAMES = {"order", "root", "slope", "found", "path", "module", "inputs", "places"}


class Power(Module):
    """``slope * places * x ** order + root``, all of it under names that calls use for something else."""

    root, found = 0.5, 1.0

    def __init__(self, order: int = 3) -> None:
        super().__init__()
        self.order, self.inputs, self.module = order, [1, 2], nn.Identity()
        self.register_buffer("slope", torch.tensor(0.75))
        self.register_buffer("places", torch.tensor(1.25))

    @property
    def path(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.path * self.slope * self.places * self.found * x**self.order / self.inputs[1] + self.root)


@register(Power)
class PowerDerivatives(ElementwiseDerivatives):
    keeps = frozenset({"input"})

    def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        return self.factor(module) * module.order * subsample(module.input0, subsampling=subsampling) ** (module.order - 1)

    def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        return self.factor(module) * module.order * (module.order - 1) * module.input0 ** (module.order - 2)

    def hessian_is_zero(self, module: Module) -> bool:
        return module.order == 1

    def factor(self, module: Module) -> Tensor:
        assert isinstance(module.module, nn.Identity)
        assert module.root == Power.root
        return module.path * module.slope * module.places * module.found / module.inputs[1]


class Scaled(Linear):
    """A layer whose scale has the name of a number that calls have."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.order, self.released, self.inputs = 2.5, True, sizes[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.order * super().forward(x)


@register(Scaled)
class ScaledDerivatives(LinearDerivatives):
    """That of a layer, with the scale at each product."""

    def columns(self, module: Module, subsampling: Samples = None) -> Tensor:
        assert module.released is True
        return module.order * super().columns(module, subsampling)

    def vectors(self, module: Module) -> Tensor | None:
        inputs = super().vectors(module)
        return None if inputs is None else module.order * inputs

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return module.order * super()._jac_mat_prod(module, g_inp, g_out, mat)

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return module.order * super()._jac_t_mat_prod(module, g_inp, g_out, mat, subsampling=subsampling)


class Doubled(CrossEntropyLoss):
    """A loss whose options have such names, too."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)
        self.order, self.module, self.is_loss = 2.0, nn.Identity(), False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.order * super().forward(self.module(x), y)


@register(Doubled)
class DoubledDerivatives(CrossEntropyLossDerivatives):
    def _hessian_weight(self, module: Module) -> Tensor:
        assert module.is_loss is False
        return module.order * super()._hessian_weight(module)


class SamplesInside(Module):
    """Samples lie on axis 1 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.transpose(0, 1)).transpose(0, 1)


def net() -> Module:
    return Sequential(Linear(3, 3), Power(), Linear(3, 2))


def test_these_are_names_of_calls() -> None:
    model = extend(Sequential(Linear(2, 2), Power()))
    out = model(torch.rand(3, 2))  # a call lives as long as the graph
    call = last_call(model[1])
    assert out.requires_grad
    assert all(name in vars(call) or hasattr(ModuleCall, name) for name in NAMES)
    assert call.order != Power().order
    assert repr(model[1]) in str(call) or "Power" in str(call)


@pytest.mark.parametrize(("make", "shape"), [(net, (3,)), (net, (4, 3)), (SamplesInside, (4, 3))])
def test_option_buffer_parameter_child_and_property(make: type[Module], shape: tuple[int, ...]) -> None:
    check(lambda: build(make, shape))


def test_frozen_parameter() -> None:
    problem = build(net, (3,))
    found = {}
    for frozen in (False, True):
        model, lossfunc = extend(problem.model), extend(MSELoss())
        if frozen:
            del model[1].places
            model[1].places = Parameter(torch.tensor(1.25, dtype=torch.float64), requires_grad=False)
        with backpack(DiagGGNExact()):
            lossfunc(model(problem.x), problem.terms[0].target).backward()
        found[frozen] = [p.diag_ggn_exact for p in model.parameters() if p.requires_grad]
    for with_buffer, with_parameter in zip(found[False], found[True], strict=True):
        close(with_parameter, with_buffer)


def test_value_at_the_time_of_the_call() -> None:
    check(lambda: build(net, (3,)), lambda problem: setattr(problem.model[1], "order", 7))


def test_buffer_that_is_overwritten_after_the_forward_pass() -> None:
    model, lossfunc = extend(net()), extend(MSELoss())
    loss = lossfunc(model(torch.rand(4, 3)), torch.rand(4, 2))
    model[1].slope.mul_(2)
    with backpack(DiagGGNExact()), pytest.raises(OverwrittenError, match="slope"):
        loss.backward()


@pytest.mark.parametrize("shape", [(3,), (4, 3)])
def test_rule_with_parameters(shape: tuple[int, ...]) -> None:
    check(lambda: build(lambda: Sequential(Scaled(3, 4), nn.Tanh(), Scaled(4, 2)), shape))


def test_rules_are_checked_with_what_they_read() -> None:
    assert "jac_t_mat_prod" in check_rule(Power(), torch.randn(4, 3))


def test_derivatives_of_a_module_extension() -> None:
    model, lossfunc = extend(Sequential(Scaled(3, 4), nn.Tanh(), Linear(4, 2)).double()), extend(MSELoss())
    extension = extensions.BatchGrad()
    extension.set_module_extension(Scaled, BatchGradBase(ScaledDerivatives(), ["weight"]))
    x, y = torch.rand(3, 3, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    with backpack(extension):
        lossfunc(model(x), y).backward()
    for n in range(3):
        single = nn.functional.mse_loss(model(x)[n], y[n]) / 3
        for p, grad in zip(model.parameters(), torch.autograd.grad(single, list(model.parameters())), strict=True):
            close(p.grad_batch[n], grad)


class Numbered(Linear):
    """Has names that begin like those of recorded tensors."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.output1, self.input = 2.0, 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.output1 * self.input * super().forward(x)


class NumberedDerivatives(LinearDerivatives):
    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        return module.output1 * module.input * super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch, subsampling)


def test_names_like_those_of_recorded_tensors() -> None:
    extension = extensions.BatchGrad()
    extension.set_module_extension(Numbered, BatchGradBase(NumberedDerivatives(), ["weight"]))
    model, X = extend(Numbered(3, 2)), torch.rand(4, 3)
    with backpack(extension):
        model(X).sum().backward()
    close(model.weight.grad_batch, 3 * X.unsqueeze(1).expand(4, 2, 3))


@pytest.mark.parametrize("by_module_extension", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_products(samples: int, by_module_extension: bool) -> None:
    model, lossfunc = extend(Sequential(Scaled(3, 4), nn.Tanh(), Scaled(4, 2)).double()), extend(MSELoss())
    x, y = torch.rand(samples, 3, dtype=torch.float64), torch.rand(samples, 2, dtype=torch.float64)
    out = model(x)
    loss, extension = lossfunc(out, y), GGNMP()
    if by_module_extension:
        extension.set_module_extension(Scaled, GGNMPBase(ScaledDerivatives(), ["weight"]))
    with backpack(extension):
        loss.backward(retain_graph=True)
    for p in model.parameters():
        v = torch.randn_like(p)
        close(p.ggnmp(v), ggn_vector_product_from_plist(loss, out, [p], [v])[0])


def test_loss() -> None:
    check(lambda: build(lambda: Sequential(Linear(3, 4), nn.Tanh(), Linear(4, 3)), (3,), Doubled))
    assert "sqrt_hessian" in check_rule(Doubled(), torch.randn(4, 3), torch.tensor([0, 2, 1, 1]))


def test_class_of_the_rule_is_the_users() -> None:
    model = extend(net())
    out = model(torch.rand(2, 3))
    rule = last_call(model[1]).derivatives
    assert out.requires_grad
    assert isinstance(rule, PowerDerivatives)
    assert not isinstance(rule, AffineDerivatives)
    assert (type(rule).__name__, type(rule).__module__) == ("PowerDerivatives", PowerDerivatives.__module__)


class Selective(Module):
    """Shows some of its parameters, by a method with fewer arguments than that of torch, as losses of reinforcement learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale, self.hidden_target = Linear(3, 2), Parameter(torch.randn(3)), Linear(3, 2).requires_grad_(False)

    def named_parameters(self, prefix: str = "", recurse: bool = True):  # noqa: ANN201
        return (item for item in super().named_parameters(prefix, recurse) if not item[0].startswith("hidden"))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cumprod(self.scale * x, 1)) - self.hidden_target(x)


def test_method_that_lists_parameters() -> None:
    model, x, y = extend(Selective().double()), torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    rows = [torch.autograd.grad(torch.nn.functional.mse_loss(model(x[n : n + 1]), y[n : n + 1]) / 4, list(model.parameters())) for n in range(4)]
    with backpack(extensions.BatchGrad(), DiagGGNExact(), extensions.KFAC(exclude=["scale"])):
        extend(MSELoss())(model(x), y).backward()
    for (name, parameter), *expected in zip(model.named_parameters(), *rows, strict=True):
        assert not name.startswith("hidden")
        close(parameter.grad_batch, torch.stack(expected))
    outputs = [torch.autograd.grad(entry, list(model.parameters()), retain_graph=True) for entry in model(x).flatten()]
    for parameter, *entries in zip(model.parameters(), *outputs, strict=True):
        close(parameter.diag_ggn_exact, torch.stack(entries).square().sum(0) * 2 / 8)
