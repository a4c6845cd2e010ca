"""The conversion keeps what a model computes, its parameters and its modes, leaves the model itself alone, and replaces functions by modules."""

import random
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import MethodType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

from backpack import backpack, extend
from backpack.custom_module import function_rules
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.graph_utils import convert_module_to_backpack
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions import GGNMP, HMP, KFRA, BatchGrad, DiagGGNExact, DiagHessian


class Lambda(nn.Module):
    """A model with two linear layers, whose forward pass is given as a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.relu, self.inplace = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.ReLU(inplace=True)
        self.double()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


class OneInput(Lambda):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) - 0.3


def operations(converted: GraphModule) -> list[str]:
    """Nodes that are no modules."""
    return [str(node.target) for node in converted.graph.nodes if node.op not in {"placeholder", "output", "call_module"}]


def convert(model: nn.Module, warns: bool = False) -> GraphModule:
    """Convert, and check that a warning says so if a part could not be converted."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        converted = convert_module_to_backpack(model, False)
    assert all(entry.category is UserWarning for entry in record)
    assert bool(record) == warns, [str(entry.message) for entry in record]
    return converted


def assert_same(model: nn.Module, converted: GraphModule, X: Tensor) -> None:
    """Same output and gradients, same parameters in the same order."""
    params = list(model.parameters())
    assert [id(p) for p in converted.parameters()] == [id(p) for p in params]
    seed = torch.initial_seed()
    torch.manual_seed(seed)
    expected = model(X.clone())
    torch.manual_seed(seed)
    result = converted(X.clone())
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)
    for p, q in zip(*(torch.autograd.grad(y.square().sum(), params, allow_unused=True) for y in (result, expected)), strict=True):
        torch.testing.assert_close(p, q)


def test_without_functions_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2), nn.Sigmoid())).double()
    converted = convert(model)
    assert_same(model, converted, rand(5, 4))
    assert isinstance(converted, GraphModule)
    assert list(converted.state_dict()) == list(model.state_dict())


def test_layer_is_wrapped() -> None:
    model = nn.Linear(4, 3).double()
    assert_same(model, convert(model), rand(1, 4))


def test_debug_prints_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    convert_module_to_backpack(OneInput(lambda m, x: m.b(m.a(x) * 0.5)), True)
    assert "scale_module0" in capsys.readouterr().out
    convert(OneInput(lambda m, x: m.b(m.a(x) * 0.5)))
    assert not capsys.readouterr().out


# One operation each: the function, the name and the settings of the module that replaces it

CONVERTED = {
    "x * float": (lambda x: x * 0.5, "scale_module0", {"weight": 0.5}),
    "float * x": (lambda x: 0.5 * x, "scale_module0", {"weight": 0.5}),
    "torch.mul": (lambda x: torch.mul(x, 0.5), "scale_module0", {"weight": 0.5}),
    "torch.mul, keywords": (lambda x: torch.mul(input=x, other=0.5), "scale_module0", {"weight": 0.5}),
    "torch.multiply": (lambda x: torch.multiply(x, 0.5), "scale_module0", {"weight": 0.5}),
    ".mul": (lambda x: x.mul(0.5), "scale_module0", {"weight": 0.5}),
    ".multiply": (lambda x: x.multiply(0.5), "scale_module0", {"weight": 0.5}),
    "*=": (lambda x: scale_in_place(x, 0.5), "scale_module0", {"weight": 0.5}),
    "x + x": (lambda x: x + x, "sum_module0", {}),
    "torch.add": (lambda x: torch.add(x, x), "sum_module0", {}),
    "torch.add, alpha": (lambda x: torch.add(x, x, alpha=3), "scale_module0", {"weight": 3.0}),
    "torch.add, keywords": (lambda x: torch.add(input=x, other=x, alpha=0.5), "sum_module0", {}),
    ".add": (lambda x: x.add(x, alpha=0.5), "sum_module0", {}),
    "x - x": (lambda x: x * 3.0 - x, "scale_module1", {"weight": -1.0}),
    "torch.sub": (lambda x: torch.sub(x, x, alpha=2.0), "scale_module0", {"weight": -2.0}),
    ".sub": (lambda x: x.sub(x, alpha=0.5), "sum_module0", {}),
    "torch.flatten": (lambda x: torch.flatten(x, 1), "flatten0", {"start_dim": 1, "end_dim": -1}),
    "torch.flatten, keywords": (lambda x: torch.flatten(x, start_dim=1, end_dim=2), "flatten0", {"start_dim": 1, "end_dim": 2}),
    ".view, size": (lambda x: x.view(x.size(0), -1), "flatten0.flatten", {"start_dim": 1, "end_dim": -1}),
    ".view, size by name": (lambda x: x.view((x.size(dim=0), -1)), "flatten0.flatten", {"start_dim": 1, "end_dim": -1}),
    ".view, sizes": (lambda x: x.view(x.size()[0], -1), "flatten0.flatten", {"start_dim": 1, "end_dim": -1}),
    ".view, columns": (lambda x: x.view(-1, 12), "flatten0.flatten", {"start_dim": 1, "end_dim": -1}),
    ".reshape": (lambda x: x.reshape(x.shape[0], -1), "flatten0.flatten", {"start_dim": 1, "end_dim": -1}),
    "torch.reshape": (lambda x: torch.reshape(x, shape=(-1, 12)), "flatten0.flatten", {"start_dim": 1, "end_dim": -1}),
    ".flatten": (lambda x: x.flatten(end_dim=1), "flatten0", {"start_dim": 0, "end_dim": 1}),
    "[:, 0]": (lambda x: x[:, 0], "slicing0", {"slice_info": (slice(None), 0)}),
    "[:, ..., 1:]": (lambda x: x[:, ..., 1:], "slicing0", {"slice_info": (slice(None), ..., slice(1, None))}),
    "[0]": (lambda x: x[0], "reduce_tuple0", {"index": 0}),
    "torch.permute": (lambda x: torch.permute(x, (0, 2, 1)), "permute0", {"dims": (0, 2, 1)}),
    "torch.permute, keywords": (lambda x: torch.permute(input=x, dims=(0, -1, 1)), "permute0", {"dims": (0, 2, 1)}),
    ".permute": (lambda x: x.permute(0, 2, 1), "permute0", {"dims": (0, 2, 1)}),
    ".permute, list": (lambda x: x.permute([0, 2, 1]), "permute0", {"dims": (0, 2, 1)}),
    ".permute, keywords": (lambda x: x.permute(dims=(0, 2, 1)), "permute0", {"dims": (0, 2, 1)}),
    "torch.transpose": (lambda x: torch.transpose(x, 1, 2), "permute0", {"init_transpose": True}),
    ".transpose": (lambda x: x.transpose(-1, -2), "permute0", {"init_transpose": True}),
    ".transpose, keywords": (lambda x: x.transpose(dim0=-1, dim1=1), "permute0", {"init_transpose": True}),
}


def scale_in_place(x: Tensor, factor: float) -> Tensor:
    x *= factor
    return x


@pytest.mark.parametrize(("function", "name", "settings"), CONVERTED.values(), ids=CONVERTED)
def test_functions_become_modules(function: Callable[[Tensor], Tensor], name: str, settings: dict[str, object]) -> None:
    model = OneInput(lambda m, x: function(m.b(m.relu(m.a(x)))))
    converted = convert(model)
    assert operations(converted) == []
    assert {key: getattr(converted.get_submodule(name), key) for key in settings} == settings
    assert_same(model, converted, rand(2, 3, 4))
    assert_same(model, converted, rand(1, 3, 4))


LAYERS = {
    "relu": (F.relu, torch.relu, lambda x: x.relu(), partial(F.relu, inplace=True)),
    "relu6": (F.relu6,),
    "leaky_relu": (F.leaky_relu, partial(F.leaky_relu, negative_slope=0.3), lambda x: F.leaky_relu(x, 0.2, True)),
    "elu": (F.elu, lambda x: F.elu(x, 0.3)),
    "celu": (F.celu, torch.celu, lambda x: F.celu(x, 0.3)),
    "selu": (F.selu, torch.selu),
    "gelu": (F.gelu, partial(F.gelu, approximate="tanh")),
    "silu": (F.silu,),
    "mish": (F.mish,),
    "softplus": (F.softplus, lambda x: F.softplus(x, 2.0, 0.1)),
    "softsign": (F.softsign,),
    "sigmoid": (F.sigmoid, torch.sigmoid, lambda x: x.sigmoid()),
    "logsigmoid": (F.logsigmoid,),
    "hardsigmoid": (F.hardsigmoid,),
    "hardswish": (F.hardswish,),
    "hardtanh": (F.hardtanh, lambda x: F.hardtanh(x, -0.1, 0.2)),
    "tanh": (F.tanh, torch.tanh, lambda x: x.tanh()),
    "tanhshrink": (F.tanhshrink,),
    "softshrink": (F.softshrink, lambda x: F.softshrink(x, 0.1)),
    "hardshrink": (F.hardshrink, lambda x: x.hardshrink(0.1)),
    "threshold": (lambda x: F.threshold(x, 0.1, 0.2), lambda x: torch.threshold(x, 0.1, 0.2)),
    "softmax": (lambda x: F.softmax(x, 1), lambda x: torch.softmax(x, dim=-1), lambda x: x.softmax(2)),
    "log_softmax": (lambda x: F.log_softmax(x, dim=1), lambda x: torch.log_softmax(x, -1), lambda x: x.log_softmax(-1)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), lambda x: torch.max_pool1d(x, 2, 1), lambda x: F.max_pool1d(x, 3, 2, 1, 1, True)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), lambda x: F.avg_pool1d(x, 3, 1, 1, False)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, (1, 2), ceil_mode=True)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, (1, 2)), lambda x: F.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 2),),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: F.adaptive_avg_pool2d(x, (2, None))),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 2),),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (1, 2)),),
    "max_pool3d": (lambda x: F.max_pool3d(x[:, None], (1, 2, 2)),),
    "avg_pool3d": (lambda x: F.avg_pool3d(x[:, None], (1, 1, 2)),),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x[:, None], 1),),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x[:, None], (1, 2, 2)),),
}


def test_table_of_layers_is_whole() -> None:
    assert LAYERS.keys() == function_rules.LAYERS.keys()


@pytest.mark.parametrize(("name", "function"), [(name, function) for name, functions in LAYERS.items() for function in functions])
def test_functions_become_layers(name: str, function: Callable[[Tensor], Tensor]) -> None:
    model = OneInput(lambda m, x: function(m.b(m.a(x))))
    converted = convert(model)
    assert operations(converted) == []
    assert type(converted.get_submodule(f"{name}0")) is function_rules.LAYERS[name]
    assert_same(model, converted, rand(2, 3, 4))
    assert_same(model, converted, rand(1, 3, 4))


class OfFunctions(nn.Module):
    """As one writes it."""

    def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.out, self.flatten = nn.Conv2d(1, 2, 3), nn.Linear(8, 3), flatten

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.out(self.flatten(F.relu(F.max_pool2d(torch.tanh(self.conv(x)), 2)))), dim=1)


@pytest.mark.parametrize("flatten", [lambda x: torch.flatten(x, 1), lambda x: x.view(x.size(0), -1), lambda x: x.view(-1, 2 * 2 * 2)])
def test_what_needs_sequences_takes_functions(flatten: Callable[[Tensor], Tensor]) -> None:
    """Products with curvature matrices are those of the same layers in a sequence; without conversion, the error names it."""
    torch.manual_seed(0)
    model = extend(OfFunctions(flatten).double())
    for extension in (GGNMP(), HMP(), KFRA()):
        with backpack(extension), pytest.raises(NotImplementedError, match="use_converter=True"):
            F.nll_loss(model(rand(4, 1, 6, 6)), torch.randint(3, (4,))).backward()
    same = nn.Sequential(model.conv, nn.Tanh(), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), model.out, nn.LogSoftmax(1))
    X, y, found = rand(4, 1, 6, 6), torch.randint(3, (4,)), []
    v = torch.randn(1, *model.conv.weight.shape, dtype=torch.float64)
    for net in (extend(model, use_converter=True), extend(same)):
        lossfunc = extend(nn.NLLLoss())
        with backpack(GGNMP(), HMP(), KFRA()):
            lossfunc(net(X), y).backward()
        weight = model.conv.weight
        found.append([weight.ggnmp(v), weight.hmp(v), *weight.kfra])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


LEFT_ALONE = {
    "x * int": lambda m, x: m.a(x) * 2,
    "x * x": lambda m, x: m.a(x) * m.b(x),
    "x * parameter": lambda m, x: m.a(x) * m.b.bias,
    "x + float": lambda m, x: m.a(x) + 1.0,
    "1 + x": lambda m, x: 1 + m.a(x),
    "x - 1": lambda m, x: m.a(x) - 1,
    "1 - x": lambda m, x: 1 - m.a(x),
    "x + parameter": lambda m, x: m.a(x) + m.b.bias,
    "sizes": lambda m, x: m.a(x).reshape(x.shape[0] * x.size(1), x.size(-1) + 0),
    "sum of sizes": lambda m, x: m.a(x) * (x.size(0) + x.size(1)),
    "functional twice": lambda m, x: F.normalize(m.b(F.normalize(m.a(x)))),
    "softmax in another type": lambda m, x: m.a(x).softmax(-1, torch.float32).double(),
    "computed setting": lambda m, x: F.leaky_relu(m.a(x), 1 / x.size(0)),
    "pooling with as many settings": lambda m, x: torch.max_pool2d(m.a(x), 2, 2, 1, 1, True),
    "in-place function": lambda m, x: torch.relu_(m.a(x)),
    "view twice": lambda m, x: m.b(m.a(x).view(-1, 2, 2).view(-1, 3, 4)).view(2, 3, 4),
    "view in another type": lambda m, x: m.a(x).view(torch.int64).view(torch.float64),
    "batch axis moves": lambda m, x: m.a(x).permute(1, 0, 2).transpose(0, 1).transpose(0, 2),
    "transposed parameter": lambda m, x: m.a(x) @ m.b.weight.transpose(-1, -2),
    "computed index": lambda m, x: m.a(x)[:, x.size(0) - 1],
    "slice of the batch": lambda m, x: m.a(x)[:1],
    "dropout that is always on": lambda m, x: F.dropout(m.a(x), 0.5, training=True),
    "in-place method": lambda m, x: m.a(x).mul_(0.5).add_(x),
    "other augmented assignment": lambda m, x: divide_in_place(m.a(x), 3.0),
}


def divide_in_place(x: Tensor, divisor: float) -> Tensor:
    y = x
    x /= divisor
    return x * y


@pytest.mark.parametrize("function", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_has_no_module_stays_and_warns(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = OneInput(function)
    used = [p for p in model.parameters() if any(q is p for q in convert(model, warns=True).parameters())]
    converted, X = convert(model, warns=True), rand(2, 3, 4)
    assert operations(converted) != []
    made = (ScaleModule, SumModule, ReduceTuple, Permute, Slicing, nn.Flatten, *function_rules.LAYERS.values())
    assert not any(isinstance(m, made) for m in converted.modules())
    assert [id(p) for p in converted.parameters()] == [id(p) for p in used]
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    assert torch.equal(converted(X), expected)


def test_each_remaining_node_is_named() -> None:
    with pytest.warns(UserWarning) as record:
        convert_module_to_backpack(OneInput(lambda m, x: F.normalize(m.b(m.a(x).view(-1, 1, 4)))), False)
    messages = [str(entry.message) for entry in record]
    assert len(messages) == 2 and "view" in messages[0] and "normalize" in messages[1]


def of_samples(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 2, 4), (1, 2, 4), (4, 4), (2, 4)])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x).view(-1, 4),
        lambda m, x: m.a(x).view(x.size(1), -1),
        lambda m, x: m.a(x).reshape(2 * x.size(0), -1),
        lambda m, x: m.a(x).view(2, -1),
        lambda m, x: m.a(x).reshape((-1, 2)),
        lambda m, x: m.a(x).sum(-1).view(-1, 1).view(x.shape[0], -1) + x.size(0),
        lambda m, x: of_samples(m.a(x).flatten()),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is no module:UserWarning")
def test_matrices_that_are_no_flattened_samples(function: Callable[[nn.Module, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    model, X = OneInput(function), rand(*shape)
    assert torch.equal(convert_module_to_backpack(model, False)(X), model(X))


BROADCAST = {
    "one column": lambda m, x: m.a(x) + m.b(x)[:, :1],
    "other order": lambda m, x: m.b(x)[..., :1] + m.a(x),
    "mean": lambda m, x: m.a(x) - m.b(x).mean(-1, keepdim=True),
    "both": lambda m, x: (m.a(x)[:, :, None] - m.b(x)[:, None]).square().sum(1),
    "same shapes": lambda m, x: m.a(x) + m.b(x),
}


@pytest.mark.parametrize("function", BROADCAST.values(), ids=BROADCAST)
@pytest.mark.filterwarnings("ignore:.* is no module:UserWarning")
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_summands_are_broadcast(function: Callable[[nn.Module, Tensor], Tensor], samples: int) -> None:
    model, X, target, lossfunc = OneInput(function), rand(samples, 3, 4), rand(samples, 3, 4), extend(nn.MSELoss())
    converted = convert_module_to_backpack(model, False)
    assert any(isinstance(module, SumModule) for module in converted.modules())
    assert torch.equal(converted(X), model(X))
    found = []
    for net in (model, converted):
        extend(net)
        with backpack(BatchGrad(), DiagGGNExact(), DiagHessian()):
            lossfunc(net(X), target).backward()
        found.append([(p.grad_batch, p.diag_ggn_exact, p.diag_h) for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    for p, (grad_batch, *_) in zip((p for p in model.parameters() if p.grad is not None), found[1], strict=True):
        for n in range(samples):
            (expected,) = torch.autograd.grad((model(X)[n] - target[n]).square().sum() / target.numel(), p)
            torch.testing.assert_close(grad_batch[n], expected)


def test_numbers_that_the_model_was_given_are_summands() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor, shift: float, factor: float) -> Tensor:
            return x + shift - factor

    converted, x = convert_module_to_backpack(Shifted(), False), rand(2, 3)
    torch.testing.assert_close(converted(x, 1.5, 0.25), x + 1.25)
    torch.testing.assert_close(converted(x, x, x), x)
    with pytest.raises(NotImplementedError, match=r"integers \(int\)"):
        converted(x, 1.5, 1)


# Whole models


class Block(nn.Module):
    """Residual block in the usual form; the shortcut is defined before the modules that are called before it."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.downsample = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(nn.Conv2d(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels_out), nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.conv, self.bn, self.relu, self.pool = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Block(3, 3, 1), Block(3, 4, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.relu(self.bn(self.conv(x)))))
        return self.fc(F.dropout(torch.flatten(self.avgpool(x), 1), p=0.3, training=self.training))


@pytest.mark.parametrize("training", [True, False])
def test_residual_network(training: bool) -> None:
    model = ResNet().train(training)
    names = [name for name, _ in model.named_parameters()]
    before, modules = deepcopy(model.state_dict()), {name: (id(m), m.training, getattr(m, "inplace", None)) for name, m in model.named_modules()}
    converted = convert(model)
    assert operations(converted) == []
    assert {name: (id(m), m.training, getattr(m, "inplace", None)) for name, m in model.named_modules()} == modules  # the model is left alone
    assert [name for name, _ in converted.named_parameters()] == names
    assert list(converted.state_dict()) == list(before)
    assert not any(m.inplace for m in converted.modules() if isinstance(m, nn.ReLU))
    assert all(m.training == training for m in converted.modules())

    for mode in (training, not training, training):  # the result follows its own mode, including the functional dropout
        converted.train(mode)
        model.load_state_dict(before)
        expected, X = deepcopy(model).train(mode), rand(3, 1, 12, 12)
        torch.manual_seed(1)
        y = expected(X)
        torch.manual_seed(1)
        torch.testing.assert_close(converted(X), y, rtol=0, atol=1e-13)
        assert model.training == training  # the modes of model and result are independent ...
        for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(buffer, other, msg=name)  # ... but they share parameters and buffers
    model.load_state_dict(before)
    assert_same(model.eval(), converted.eval(), rand(1, 1, 12, 12))


def test_different_modes_of_parts_are_kept() -> None:
    model = ResNet().train()
    model.bn.eval()
    converted = convert(model)
    assert not converted.bn.training and converted.training and converted.blocks.get_submodule("0.bn1").training


# In-place operations


def shared_input(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.inplace(h)
    return m.b(y) + h


def ignored_result(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    m.inplace(h)
    return m.b(h)


def through_a_view(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    view = h[:, 0]
    h += m.b(x)
    return view


def through_an_attribute(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    transposed = h.mT
    transposed *= 2.0
    return m.b(h)


def old_name(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    y = h
    h *= 2.0
    return m.b(h) + y


def mixed(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.inplace(m.b(x))  # private
    z = m.inplace(h)  # seen below
    return y + h + z


@pytest.mark.parametrize("function", [shared_input, ignored_result, through_a_view, through_an_attribute, old_name, mixed])
def test_inplace_operations_whose_effect_is_seen_elsewhere_stay(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = OneInput(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = convert_module_to_backpack(model, False)
    assert_same(model, converted, rand(2, 3, 4))
    assert model.inplace.inplace


def test_private_inplace_operations_become_ordinary() -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        h += x
        h -= m.b(x)
        h *= 0.5
        return m.inplace(h)

    model = OneInput(function)
    converted = convert(model)
    assert operations(converted) == [] and not any(m.inplace for m in converted.modules() if isinstance(m, nn.ReLU))
    assert_same(model, converted, rand(2, 4))


# Training flag


def test_dropout_functions_follow_the_mode() -> None:
    model = OneInput(lambda m, x: m.b(F.alpha_dropout(F.dropout(m.a(x), 0.4, m.training), training=m.training)))
    converted = convert(model)
    assert converted.dropout0.p == 0.4 and operations(converted) == []
    for mode in (True, False):
        assert_same(model.train(mode), converted.train(mode), rand(2, 4))


def test_dropout_function_in_a_part_with_another_mode() -> None:
    model = nn.Sequential(OneInput(lambda m, x: F.dropout(m.b(m.a(x)), 0.4, m.training)), nn.Identity())
    model[0].eval()
    converted = convert(model)
    assert converted.training and not converted.dropout0.training
    assert_same(model, converted, rand(2, 4))
    assert_same(model.train(), converted.train(), rand(2, 4))


@pytest.mark.parametrize("training", [True, False])
def test_other_dependence_on_the_mode_warns(training: bool) -> None:
    def raises(m: nn.Module, x: Tensor) -> Tensor:
        if m.training != training:
            raise ValueError
        return m.b(m.a(x))

    for function in (lambda m, x: m.b(m.a(x)) if m.training else m.b(m.relu(m.a(x))), raises):
        model = OneInput(function).train(training)
        with pytest.warns(UserWarning, match="depends on the training flag"):
            converted = convert_module_to_backpack(model, False)
        assert_same(model, converted, rand(2, 4))


@pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.set_grad_enabled(False)])
def test_contexts_inside_the_forward_pass_are_refused(context: Callable[[], object]) -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        with context():
            return m.b(h) + h

    with pytest.raises(NotImplementedError, match=r"switches gradients or autocast .*at b\b"):
        convert(OneInput(function))
    with torch.no_grad():  # around everything, this is fine
        convert(OneInput(lambda m, x: m.b(m.a(x))))


def test_control_flow_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"cannot be traced: .*control flow.*without conversion"):
        convert(OneInput(lambda m, x: m.a(x) if x.sum() > 0 else m.b(x)))


# What is no part of the class's forward pass


class Called(OneInput):
    """Doubles what its forward pass returns."""

    def __call__(self, *args: Tensor) -> Tensor:
        return 2.0 * super().__call__(*args)


def two_layers(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x) * 0.5)


def patched(model: nn.Module) -> None:
    model.forward = MethodType(lambda m, x: m.b(m.a(x).exp()), model)


ADAPTED = {
    "forward hook": lambda model: model.register_forward_hook(lambda m, args, out: 2.0 * out),
    "forward pre-hook": lambda model: model.register_forward_pre_hook(lambda m, args: 2.0 * args[0]),
    "backward hook": lambda model: model.register_full_backward_hook(lambda m, g_inp, g_out: (2.0 * g_inp[0],)),
    "backward pre-hook": lambda model: model.register_full_backward_pre_hook(lambda m, g_out: (2.0 * g_out[0],)),
    "forward": patched,
}


@pytest.mark.parametrize("inside", [False, True], ids=["root", "container"])
@pytest.mark.parametrize("adapt", ADAPTED.values(), ids=ADAPTED)
def test_modules_that_are_adapted_stay(adapt: Callable[[nn.Module], object], inside: bool) -> None:
    model = part = OneInput(two_layers)
    if inside:
        model = nn.Sequential(nn.Linear(4, 4).double(), part)
    adapt(part)
    with pytest.warns(UserWarning, match=rf"^{int(inside)} \(OneInput\) has hooks, or a forward of its own"):
        converted = convert_module_to_backpack(model, False)
    X = rand(3, 4).requires_grad_()
    assert_same(model, converted, X)
    gradients = [torch.autograd.grad(net(X).square().sum(), X)[0] for net in (model, converted)]
    torch.testing.assert_close(*gradients)


def test_hooks_that_look_are_called_once_in_each_forward_pass() -> None:
    model, seen = nn.Sequential(OneInput(two_layers)), []
    model[0].register_forward_hook(lambda m, args, out: seen.append(out))
    with pytest.warns(UserWarning, match="remove them before"):
        converted = convert_module_to_backpack(model, False)
    assert seen == []
    out = converted(rand(3, 4))
    assert len(seen) == 1 and seen[0] is out


def test_hooks_of_extend_are_no_adaptation() -> None:
    model = extend(nn.Sequential(OneInput(two_layers)))
    assert operations(extend(model, use_converter=True)) == []


def test_call_of_the_class() -> None:
    model = Called(two_layers)
    converted = convert(model)
    assert operations(converted) == []
    assert_same(model, converted, rand(3, 4))


@pytest.mark.parametrize("kind", ["weight_norm", "parametrization", "pruning"])
def test_weights_that_hooks_compute(kind: str) -> None:
    """They are computed in each forward pass, from parameters that are there."""
    model = OneInput(lambda m, x: m.b(m.a(x)) @ m.w)
    model.w = nn.Parameter(rand(4, 4))
    if kind == "weight_norm":
        with pytest.warns(FutureWarning):
            weight_norm(model, "w")
    elif kind == "parametrization":
        parametrizations.weight_norm(model, "w")
    else:
        prune.random_unstructured(model, "w", 0.5)
    converted = convert(model, warns=kind != "parametrization")  # torch counts a class that it has parametrized as its own
    assert_same(model, converted, rand(3, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert_same(model, converted, rand(3, 4))


# Buffers, and what changes from call to call


class Buffered(OneInput):
    """A model with tensors that are no parameters."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__(function)
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))
        self.cache, self.listed, self.calls, self.last = self.mean * 2, [self.mean * 3], 0, None


def averaged(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return m.b(h * m.mean)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_change_in_each_forward_pass_and_not_before(training: bool) -> None:
    model = Buffered(averaged).train(training)
    expected = deepcopy(model)
    converted = convert(model, warns=True)
    assert torch.equal(model.mean, expected.mean)
    for _ in range(3):
        X = rand(5, 4)
        torch.testing.assert_close(converted(X), expected(X), rtol=0, atol=1e-14)
        torch.testing.assert_close(model.mean, expected.mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x) + 2.0 * m.mean,
        lambda m, x: m.a(x) - m.mean[:2].repeat(2),
        lambda m, x: m.a(x) + m.b.bias.exp(),
        lambda m, x: m.a(x) + m.b.weight.T[0],
        lambda m, x: m.a(x) * m.mean[0] + torch.ones(4, dtype=torch.float64),
        lambda m, x: m.a(x) + F.relu(m.cache) + m.listed[0],
    ],
)
def test_what_is_computed_from_parameters_and_buffers_is_no_summand(function: Callable[..., Tensor]) -> None:
    """It need not have the shape that modules need."""
    model, X = Buffered(function), rand(3, 4)
    converted = convert(model, warns=True)
    torch.testing.assert_close(converted(X), model(X), rtol=0, atol=1e-14)
    model.mean.mul_(2)
    torch.testing.assert_close(converted(X), model(X), rtol=0, atol=1e-14)


def drop(draw: Callable[[], float], m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x)) if draw() < 0.5 else m.a(x)


DRAWN = {
    "noise": lambda m, x: m.a(x) + torch.randn(4, dtype=torch.float64),
    "torch": partial(drop, lambda: torch.rand(1)),
    "python": partial(drop, random.random),
    "numpy": partial(drop, lambda: np.random.rand(1)),
}


@pytest.mark.parametrize("function", DRAWN.values(), ids=DRAWN)
def test_draws_outside_of_modules_are_refused(function: Callable[..., Tensor]) -> None:
    model = OneInput(function)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(NotImplementedError, match="OneInput draws random numbers .*without conversion"):
        convert(model)
    assert torch.equal(torch.get_rng_state(), state[0]) and (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]


def test_draws_inside_of_the_graph_are_kept() -> None:
    model, X = OneInput(lambda m, x: m.b(F.dropout(m.a(x) + torch.randn_like(x), 0.5))), rand(3, 4)
    converted = convert(model, warns=True)
    assert not torch.equal(converted(X), converted(X))
    assert_same(model, converted, X)


def test_draws_in_the_other_mode_warn() -> None:
    model = OneInput(lambda m, x: m.b(m.a(x)) + torch.randn(4, dtype=torch.float64) if m.training else m.b(m.a(x))).eval()
    with pytest.warns(UserWarning, match="depends on the training flag"):
        assert_same(model, convert_module_to_backpack(model, False), rand(3, 4))


def with_the_last(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x) if m.last is None else m.a(x) + m.last
    m.last = h.detach()
    return h


def every_other(m: nn.Module, x: Tensor) -> Tensor:
    m.calls += 1
    return m.a(x) if m.calls % 2 else m.b(x)


def decaying(m: nn.Module, x: Tensor) -> Tensor:
    m.cache.mul_(0.9)
    return m.a(x) * m.cache


def decaying_list(m: nn.Module, x: Tensor) -> Tensor:
    m.listed[0] *= 0.9
    return m.a(x) * m.listed[0]


def new_mean(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h * m.mean


@pytest.mark.parametrize("function", [with_the_last, every_other, decaying, decaying_list, new_mean])
def test_what_changes_from_call_to_call_is_refused(function: Callable[..., Tensor]) -> None:
    model = Buffered(function)
    before = deepcopy(model)
    with pytest.raises(NotImplementedError, match="Buffered does something else when it runs again: .*without conversion"):
        convert(model)
    assert (model.calls, model.last) == (0, None)
    assert torch.equal(model.cache, before.cache) and torch.equal(model.listed[0], before.listed[0])


def test_failed_conversion_leaves_the_model_as_it_is() -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        m.cache.mul_(0.9)
        return x if x.sum() > 0 else averaged(m, x)

    model = Buffered(function)
    before = deepcopy(model)
    with pytest.raises(NotImplementedError, match="cannot be traced: TraceError: .*without conversion"):
        convert(model)
    assert torch.equal(model.mean, before.mean) and torch.equal(model.cache, before.cache)


def test_differences_of_integers_are_refused() -> None:
    """They wrap around, or have more digits than a ``float``."""
    model = OneInput(lambda m, x: m.b(m.a(x)) * (x.byte() - (2 * x).byte()))
    converted = convert(model, warns=True)
    with pytest.raises(NotImplementedError, match=r"`byte \+ -1 \* byte_1` is computed with integers \(torch.uint8\).*without conversion"):
        converted(3 * torch.ones(2, 4, dtype=torch.float64))


# Modules called several times


def test_repeated_modules_get_a_copy_for_each_call() -> None:
    model = OneInput(lambda m, x: m.relu(m.b(m.relu(m.a(m.relu(x))))))
    converted = convert(model)
    targets = [node.target for node in converted.graph.nodes if node.op == "call_module"]
    assert len(set(targets)) == len(targets) == 5
    assert len({id(converted.get_submodule(target)) for target in targets}) == 5
    assert_same(model, converted, rand(2, 4))


def test_repeated_modules_in_nested_containers_share_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)).double()
    model.append(nn.Sequential(model[1], nn.Linear(4, 4)).double()).append(model[2][0])
    converted = convert(model)
    X, expected = rand(5, 4), deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(converted(X), expected(X))
    torch.testing.assert_close(model[1].running_mean, expected[1].running_mean)
    assert [id(p) for p in converted.parameters()] == [id(p) for p in model.parameters()]


def test_repeated_module_with_parameters_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"^a \(Linear\) has parameters and is called several times"):
        convert(OneInput(lambda m, x: m.a(m.relu(m.a(x)))))


# Recurrent layers


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.lstm, self.fc = nn.Linear(4, 3), layer, nn.Linear(2, 5)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function(self.lstm, self.embed(x)))


def output(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


def last_output(layer: nn.Module, x: Tensor) -> Tensor:
    out, _ = layer(x)
    return out[:, -1]


def rnn_state(layer: nn.Module, x: Tensor) -> Tensor:
    _, h = layer(x)
    return h[-1]


def lstm_state(layer: nn.Module, x: Tensor) -> Tensor:
    _, (h, c) = layer(x)
    return h[-1] + c[-1]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(
    ("kind", "function"), [(nn.RNN, output), (nn.LSTM, output), (nn.RNN, rnn_state), (nn.LSTM, lstm_state), (nn.LSTM, last_output)]
)
def test_recurrent_layers_are_split(kind: type[nn.Module], function: Callable[..., Tensor], layers: int, dropout: float) -> None:
    if layers == 1 and dropout:
        dropout = 0.0
    model = Recurrent(kind(3, 2, layers, batch_first=True, dropout=dropout), function)
    state = torch.get_rng_state()
    converted = convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert operations(converted) == []
    if layers > 1:
        chain = [f"lstm_{i}" for i in range(layers)]
        assert [name for name, m in converted.lstm.named_children() if isinstance(m, kind)] == chain
        assert [name for name, m in converted.lstm.named_children() if isinstance(m, ReduceTuple)] == [f"reduce_tuple_{i}" for i in range(layers - 1)]
        drops = [f"dropout_{i}" for i in range(layers - 1)] if dropout else []
        assert [name for name, m in converted.lstm.named_children() if isinstance(m, nn.Dropout)] == drops
        assert converted.lstm.get_submodule(chain[1]).weight_ih_l0 is model.lstm.weight_ih_l1
    assert model.lstm.num_layers == layers
    assert_same(model.eval(), converted.eval(), rand(4, 6, 4))
    assert_same(model, converted, rand(1, 6, 4))
    if not dropout:
        assert_same(model.train(), converted.train(), rand(4, 6, 4))


def test_recurrent_layer_with_time_first() -> None:
    model = Recurrent(nn.LSTM(3, 2, 2), output)
    assert_same(model, convert(model), rand(6, 4, 4))


def test_split_layers_keep_the_mode() -> None:
    model = Recurrent(nn.LSTM(3, 2, 2, dropout=0.5), output).eval()
    converted = convert(model)
    assert not any(m.training for m in converted.modules())
    assert_same(model, converted, rand(6, 4, 4))


@pytest.mark.parametrize(
    ("layer", "function", "reason"),
    [
        (nn.LSTM(3, 2, 2, bias=False), output, "no bias"),
        (nn.LSTM(3, 1, 2, bidirectional=True), output, "bidirectional"),
        (nn.LSTM(3, 4, 2, proj_size=2), output, "projection"),
        (nn.RNN(3, 2, 2, nonlinearity="relu"), output, "nonlinearity"),
        (nn.RNN(3, 2, 2), lambda layer, x: layer(x, x[:2, :, :2])[0], "initial state"),
        (nn.RNN(3, 2, 2), lambda layer, x: layer(x, hx=x[:2, :, :2])[0], "initial state"),
        (nn.RNN(3, 2, 2), lambda layer, x: layer(x)[1][0], "layers other than the last"),
        (nn.RNN(3, 2, 2), lambda layer, x: layer(x)[1].sum(0), "layers other than the last"),
        (nn.LSTM(3, 2, 2), lambda layer, x: layer(x)[1][1][0], "layers other than the last"),
        (nn.LSTM(3, 2, 2), lambda layer, x: layer(x)[1][0].mean(0), "layers other than the last"),
        (nn.LSTM(3, 2, 2), lambda layer, x: torch.cat(layer(x)[1])[0], "layers other than the last"),
    ],
)
def test_recurrent_layers_that_cannot_be_split_are_refused(layer: nn.Module, function: Callable[..., Tensor], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^lstm .*{reason}"):
        convert(Recurrent(layer, function))


def test_recurrent_layer_with_a_hook_stays() -> None:
    model = Recurrent(nn.RNN(3, 2, 2), output)
    model.lstm.register_forward_hook(lambda m, args, out: (2.0 * out[0], out[1]))
    assert_same(model, convert(model), rand(6, 4, 4))


# The model itself


def test_parameters_buffers_and_attributes_are_shared() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4).double()
            self.scale = nn.Parameter(rand(4))
            self.register_buffer("shift", rand(4), persistent=False)
            self.fc2 = nn.Linear(4, 4).double()
            self.fc2.weight = self.fc.weight  # tied
            self.cache = (self.scale * 2).detach()
            self.non_leaf = self.scale * 2
            self.layers = [self.fc, self.fc2]

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x * self.scale + self.shift

    model = Model()
    converted = convert(model, warns=True)
    assert_same(model, converted, rand(3, 4))
    assert converted.shift is model.shift
    assert list(converted.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        model.scale.mul_(2)
    assert_same(model, converted, rand(3, 4))


def test_buffers_of_any_kind() -> None:
    model = OneInput(lambda m, x: torch.sparse.mm(m.adjacent, m.a(x)) * m.undefined.isnan())
    model.register_buffer("adjacent", rand(3, 3).to_sparse())
    model.register_buffer("undefined", torch.tensor(torch.nan))
    converted, X = convert(model, warns=True), rand(3, 4)
    torch.testing.assert_close(converted(X), model(X))
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    assert convert(model)(X.float()).shape == (3, 4)


def test_frozen_parameters_stay_frozen() -> None:
    model = OneInput(lambda m, x: m.b(m.a(x) * 2.0))
    model.a.requires_grad_(False)
    converted = convert(model)
    assert [p.requires_grad for p in converted.parameters()] == [False, False, True, True]


def test_modules_of_the_package_are_kept_and_names_stay_unique() -> None:
    model = nn.Sequential(
        Parallel(nn.Linear(4, 4), nn.Identity()), ScaleModule(0.5), Permute(1, -1, init_transpose=True), Slicing((slice(None), 0))
    ).double()
    converted = convert(model)
    assert_same(model, converted, rand(2, 3, 4))
    model = OneInput(lambda m, x: (m.a(x) * 2.0 + m.b(x) * 3.0) * 4.0)
    model.scale_module1 = nn.Identity()
    converted = convert(model)
    assert [getattr(converted, f"scale_module{i}").weight for i in (0, 2, 3)] == [2.0, 3.0, 4.0]
    twice = convert(converted)
    assert_same(model, converted, rand(2, 4))
    assert_same(model, twice, rand(2, 4))


def test_several_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(2, 3).double()

        def forward(self, x: Tensor, y: Tensor, factor: float = 2.0) -> Tensor:
            return (self.a(x) - self.b(y)) * factor

    model, x, y = Model(), rand(5, 4), rand(5, 2)
    converted = convert(model, warns=True)
    torch.testing.assert_close(converted(x, y), model(x, y))
    torch.testing.assert_close(converted(x, y, factor=3.0), model(x, y, 3.0))


def test_flatten_from_an_axis_that_is_computed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(x.dim() - 1))

    model, x = Model(), torch.randn(2, 3)
    with pytest.warns(UserWarning):
        converted = convert_module_to_backpack(model, debug=False)
    torch.testing.assert_close(converted(x), model(x))
