"""A rule stands for operations with the settings of its layer, and not for the same operations with other ones: these are followed as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close
from test_pieces import check, pieces
from test_silent_errors import expected_by
from torch import Tensor, nn
from torch.nn import Conv1d, Conv2d, Flatten, Linear, Module, MSELoss, Sequential, Tanh, Unflatten
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import LossNotExtendedError, LossValueError

Replaced = Callable[[Module, Tensor], Tensor]
LINES, IMAGES = (4, 9), (4, 3, 3)


def batch_norm(m: Module, x: Tensor, eps: float = 1e-5, mean: float = 0.0) -> Tensor:
    return F.batch_norm(x, m.running_mean + mean if mean else m.running_mean, m.running_var, m.weight, m.bias, False, 0.1, eps)


# a layer; what is computed in its place, by the same operations; the shape of a sample
LAYERS: dict[str, tuple[Callable[[], Module], Replaced, tuple[int, ...]]] = {
    "LeakyReLU": (lambda: nn.LeakyReLU(0.1), lambda m, x: F.leaky_relu(x, 0.5), (36,)),
    "RReLU": (lambda: nn.RReLU().eval(), lambda m, x: F.rrelu(x, 0.5, 0.7), (36,)),
    "ELU": (nn.ELU, lambda m, x: F.elu(x, 0.3), (36,)),
    "ELU, that of SELU": (nn.ELU, lambda m, x: F.selu(x), (36,)),
    "SELU": (nn.SELU, lambda m, x: F.elu(x), (36,)),
    "CELU": (nn.CELU, lambda m, x: F.celu(x, 0.3), (36,)),
    "Softplus": (nn.Softplus, lambda m, x: F.softplus(x, 2), (36,)),
    "Softplus, threshold": (nn.Softplus, lambda m, x: F.softplus(x, 1, 0.1), (36,)),
    "Hardtanh": (nn.Hardtanh, lambda m, x: F.hardtanh(x, -0.2, 1), (36,)),
    "ReLU6": (nn.ReLU6, lambda m, x: F.hardtanh(x, 0, 0.2), (36,)),
    "Threshold": (lambda: nn.Threshold(0.1, 0), lambda m, x: F.threshold(x, -0.3, 0), (36,)),
    "Hardshrink": (nn.Hardshrink, lambda m, x: F.hardshrink(x, 0.1), (36,)),
    "Softshrink": (nn.Softshrink, lambda m, x: F.softshrink(x, 0.1), (36,)),
    "GELU": (nn.GELU, lambda m, x: F.gelu(x, approximate="tanh"), (36,)),
    "Softmax": (lambda: nn.Softmax(1), lambda m, x: x.softmax(2), IMAGES),
    "Softmax2d": (nn.Softmax2d, lambda m, x: x.softmax(3), IMAGES),
    "Softmin": (lambda: nn.Softmin(-1), lambda m, x: F.softmin(x, 1), IMAGES),
    "LogSoftmax": (lambda: nn.LogSoftmax(1), lambda m, x: x.log_softmax(2), IMAGES),
    "LayerNorm, axes": (lambda: nn.LayerNorm(9, elementwise_affine=False), lambda m, x: F.layer_norm(x, (4, 9)), LINES),
    "RMSNorm, axes": (lambda: nn.RMSNorm(9, elementwise_affine=False), lambda m, x: F.rms_norm(x, (4, 9)), LINES),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda m, x: F.group_norm(x, 2, m.weight, m.bias, 0.3), LINES),
    "GroupNorm, groups": (lambda: nn.GroupNorm(2, 4), lambda m, x: F.group_norm(x, 4, m.weight, m.bias), LINES),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4), lambda m, x: F.instance_norm(x, eps=0.3), LINES),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4).eval(), partial(batch_norm, eps=0.3), LINES),
    "BatchNorm1d, statistics": (lambda: nn.BatchNorm1d(4).eval(), partial(batch_norm, mean=0.5), LINES),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3, 0.5), lambda m, x: F.local_response_norm(x, 3, 0.5, 0.2), LINES),
    "LocalResponseNorm, alpha": (lambda: nn.LocalResponseNorm(3, 0.5), lambda m, x: F.local_response_norm(x, 3, 0.9), LINES),
    "LocalResponseNorm, size": (lambda: nn.LocalResponseNorm(3, 0.5), lambda m, x: F.local_response_norm(x, 2, 0.5), LINES),
    "Linear": (lambda: Linear(36, 5), lambda m, x: torch.addmm(m.bias, x, m.weight.t(), beta=0.5, alpha=2), (36,)),
    "Conv1d": (lambda: Conv1d(4, 2, 3, padding=1), lambda m, x: F.conv1d(x, m.weight, m.bias, padding=2, dilation=2), LINES),
    "Conv1d, by name": (lambda: Conv1d(4, 2, 4, padding="same"), lambda m, x: F.conv1d(F.pad(x, (1, 0)), m.weight, m.bias, padding=1), LINES),
    "Conv1d, mode": (
        lambda: Conv1d(4, 2, 3, padding=1, padding_mode="reflect"),
        lambda m, x: F.conv1d(F.pad(x, (1, 1), "replicate"), m.weight, m.bias),
        LINES,
    ),
    "Conv2d, padding": (
        lambda: Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
        lambda m, x: F.conv2d(F.pad(x, (2, 0, 1, 1), "reflect"), m.weight, m.bias),
        IMAGES,
    ),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 2, 3, padding=1), lambda m, x: F.conv_transpose1d(x, m.weight, m.bias, 1, 2, 0, 1, 2), LINES),
    "AvgPool1d": (lambda: nn.AvgPool1d(3, 1, 1), lambda m, x: F.avg_pool1d(x, 3, 1, 1, count_include_pad=False), LINES),
    "AvgPool2d": (lambda: nn.AvgPool2d(3, 1, 1), lambda m, x: F.avg_pool2d(x, (1, 3), 1, (0, 1)), IMAGES),
    "MaxPool1d": (lambda: nn.MaxPool1d(3, 1, 1), lambda m, x: F.max_pool1d(x, 5, 1, 2), LINES),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 1, 1), lambda m, x: F.max_pool2d(x, (1, 3), 1, (0, 1)), IMAGES),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "Upsample, corners": (
        lambda: nn.Upsample((5, 5), mode="bilinear"),
        lambda m, x: F.interpolate(x, (5, 5), mode="bilinear", align_corners=True),
        IMAGES,
    ),
    "Upsample, scale": (lambda: nn.Upsample((5, 5), mode="bilinear"), lambda m, x: F.interpolate(x, scale_factor=1.9, mode="bilinear"), IMAGES),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), lambda m, x: F.channel_shuffle(x, 4), (8, 3, 3)),
    "ReflectionPad1d": (lambda: nn.ReflectionPad1d(1), lambda m, x: F.pad(x, (2, 0), "reflect"), LINES),
    "ZeroPad1d": (lambda: nn.ZeroPad1d((1, -2)), lambda m, x: F.pad(x, (-2, 1)), LINES),
    "Pad": (lambda: Pad((1, 1)), lambda m, x: F.pad(x, (2, 0)), LINES),
    "Pad, mode": (lambda: Pad((1, 1), "reflect"), lambda m, x: F.pad(x, (1, 1), "replicate"), LINES),
    "Unfold": (lambda: nn.Unfold(3, padding=1), lambda m, x: F.unfold(x, 3, 2, 2), IMAGES),
    "Permute": (lambda: Permute(0, 2, 1), lambda m, x: x.permute(0, 1, 2), (6, 6)),
    "ScaleModule": (lambda: ScaleModule(2.0), lambda m, x: x * 3.0, (36,)),
}


def build(name: str) -> tuple[Problem, Module]:
    """A net with a layer in its middle that computes something else."""
    make, replaced, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    layer.register_forward_hook(lambda module, args, out: replaced(module, args[0]), prepend=True)
    size = torch.Size(shape).numel()
    model = Sequential(Linear(5, size), Unflatten(1, shape), layer, Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    model(x)
    return Problem(model, x, [Term(MSELoss(), torch.randn(3, 3, dtype=torch.float64))]), layer


def let_ours_be_last(module: Module) -> None:
    """Let the hook that has been registered before ``extend`` run first."""
    module._forward_hooks.move_to_end(next(iter(module._forward_hooks)))


@pytest.mark.parametrize("name", LAYERS)
def test_hook_before_ours(name: str) -> None:
    (problem, _), (plain, _) = build(name), build(name)
    oracle = Oracle(plain)
    for module in (problem.model, *problem.losses):
        extend(module)
    let_ours_be_last(problem.model[2])
    check(problem, oracle)


# --- losses -----------------------------------------------------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
LABELS, SHARES = torch.tensor([0, 2, 1]), torch.rand(3, 3, dtype=torch.float64)
# a loss, what is computed in its place, its target
LOSSES: dict[str, tuple[Callable[[], Module], Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "MSELoss": (MSELoss, lambda x, y: F.mse_loss(x, y, reduction="sum"), SHARES),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, lambda x, y: F.binary_cross_entropy_with_logits(x, y, WEIGHTS), SHARES),
    "BCEWithLogitsLoss, positive": (
        lambda: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=2 * WEIGHTS),
        SHARES,
    ),
    "BCEWithLogitsLoss, target": (
        lambda: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        lambda x, y: F.binary_cross_entropy_with_logits(x, 1 - y, pos_weight=WEIGHTS),
        SHARES,
    ),
    "HuberLoss": (nn.HuberLoss, lambda x, y: F.huber_loss(x, y, delta=0.2), SHARES),
    "SmoothL1Loss": (nn.SmoothL1Loss, lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), SHARES),
    "SoftMarginLoss": (nn.SoftMarginLoss, lambda x, y: F.soft_margin_loss(x, y, reduction="sum"), SHARES.round() * 2 - 1),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, lambda x, y: F.cross_entropy(x, y, reduction="sum"), LABELS),
    "CrossEntropyLoss, weights": (nn.CrossEntropyLoss, lambda x, y: F.cross_entropy(x, y, WEIGHTS), LABELS),
    "CrossEntropyLoss, other weights": (lambda: nn.CrossEntropyLoss(WEIGHTS), lambda x, y: F.cross_entropy(x, y, WEIGHTS**2), LABELS),
    "CrossEntropyLoss, ignored": (nn.CrossEntropyLoss, lambda x, y: F.cross_entropy(x, y, ignore_index=2), LABELS),
    "CrossEntropyLoss, smoothed": (
        lambda: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x, y, WEIGHTS, label_smoothing=0.6),
        LABELS,
    ),
    "CrossEntropyLoss, shares": (nn.CrossEntropyLoss, lambda x, y: F.cross_entropy(x, y, reduction="sum"), SHARES),
}


def build_loss(name: str) -> Problem:
    """A net, at the loss of which something else is computed."""
    make, replaced, target = LOSSES[name]
    torch.manual_seed(0)
    model, loss = Sequential(Linear(5, 4), Tanh(), Linear(4, 3)).double(), make().double()
    loss.register_forward_hook(lambda module, args, out: replaced(*args), prepend=True)
    return Problem(model, torch.randn(3, 5, dtype=torch.float64), [Term(loss, target)])


@pytest.mark.parametrize("name", LOSSES)
def test_hook_of_a_loss(name: str) -> None:
    problem, oracle = build_loss(name), Oracle(build_loss(name))
    for module in (problem.model, *problem.losses):
        extend(module)
    let_ours_be_last(problem.losses[0])
    check(problem, oracle)


@pytest.mark.parametrize(
    ("make", "replaced", "target", "error"),
    [
        (nn.L1Loss, lambda x, y: F.l1_loss(x, y, reduction="sum"), SHARES, "No loss is known"),
        (nn.MultiMarginLoss, lambda x, y: F.multi_margin_loss(x, y, p=2), LABELS, "something else than its class"),
    ],
)
def test_losses_of_which_the_graph_tells_nothing_are_refused(make: Callable[[], Module], replaced: Callable, target: Tensor, error: str) -> None:
    lossfunc, model = extend(make()), extend(Linear(5, 3).double())
    lossfunc.register_forward_hook(lambda module, args, out: replaced(*args), prepend=True)
    loss = lossfunc(model(torch.randn(3, 5, dtype=torch.float64)), target)
    with backpack(DiagGGNExact()), pytest.raises((LossNotExtendedError, LossValueError), match=error):
        loss.backward()


# --- other ways to compute something else -----------------------------------------------------------------------------------------------------


def with_activation(layer: Module) -> Problem:
    torch.manual_seed(0)
    model = Sequential(Linear(5, 6), layer, Linear(6, 3)).double()
    return Problem(model, torch.randn(3, 5, dtype=torch.float64), [Term(MSELoss(), torch.randn(3, 3, dtype=torch.float64))])


@pytest.mark.parametrize("name", ["leaky_relu", "gelu", "mse_loss"])
def test_patched_function(name: str) -> None:
    original = getattr(F, name)
    replaced = {
        "leaky_relu": lambda x, negative_slope, inplace: original(x, 0.6, inplace),
        "gelu": lambda x, **_: original(x, approximate="tanh"),
        "mse_loss": lambda x, y, **_: original(x, y, reduction="sum"),
    }[name]

    def run(model: Module, x: Tensor) -> Tensor:
        with patch.object(F, name, replaced):
            return model(x)

    layer = nn.GELU if name == "gelu" else nn.LeakyReLU
    problem, plain = (with_activation(layer()) for _ in range(2))
    for one in (problem, plain):
        one.output = run
    with patch.object(F, name, replaced):
        oracle = Oracle(plain)
        for module in (problem.model, *problem.losses):
            extend(module)
        check(problem, oracle)


class Fixed(nn.LeakyReLU):
    """Its slope is an option of the class."""

    negative_slope = 0.1

    def __init__(self) -> None:
        Module.__init__(self)
        self.inplace = False


class Config:
    slope = 0.1


class Asked(nn.LeakyReLU):
    """Its slope is that of a configuration."""

    def __init__(self) -> None:
        Module.__init__(self)
        self.inplace, self.config = False, Config()

    negative_slope = property(lambda self: self.config.slope)


def set_of_class(layer: Module) -> None:
    type(layer).negative_slope = 0.9


def set_of_configuration(layer: Module) -> None:
    layer.config.slope = 0.9


@pytest.mark.parametrize(("cls", "change"), [(Fixed, set_of_class), (Asked, set_of_configuration)])
def test_option_that_is_none_of_the_object(cls: type[Module], change: Callable[[Module], None]) -> None:
    """It is asked at the backward pass, where it may be another one."""
    problem, oracle = with_activation(cls()), Oracle(with_activation(cls()))
    expected = expected_by(oracle)
    for module in (problem.model, *problem.losses):
        extend(module)
    loss = problem.loss(problem.outputs())
    with patch.object(cls, "negative_slope", cls.negative_slope):
        change(problem.model[1])
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
    for field in ("grad_batch", "diag_ggn_exact"):
        for parameter, value in expected[field].items():
            close(getattr(problem.model.get_parameter(parameter), field), value)


@pytest.mark.parametrize(("view", "first"), [(False, False), (False, True), (True, False)])
def test_option_that_hooks_set(view: bool, first: bool) -> None:
    """In place, where the record begins before the hook; on a view, where the graph does not show the operation."""

    def build() -> Problem:
        layers = [Unflatten(1, (2, 3)), nn.LeakyReLU(0.1, inplace=True), Flatten()]
        return with_activation(Sequential(*layers) if view else layers[1])

    def hooked(layer: Module) -> None:
        layer.register_forward_pre_hook(lambda module, args: setattr(module, "negative_slope", 0.6))
        layer.register_forward_hook(lambda module, args, out: setattr(module, "negative_slope", 0.1), prepend=first)

    def activation(model: Module) -> Module:
        return next(module for module in model.modules() if isinstance(module, nn.LeakyReLU))

    problem, plain = build(), build()
    hooked(activation(plain.model))
    oracle = Oracle(plain)
    for module in (problem.model, *problem.losses):
        extend(module)
    hooked(activation(problem.model))
    check(problem, oracle)


def test_copies_of_what_is_saved() -> None:
    """Hooks may keep tensors elsewhere: where they lie tells nothing then."""
    model, loss = nn.BatchNorm1d(3).double().eval(), nn.CrossEntropyLoss(WEIGHTS)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out = extend(loss)(extend(model)(torch.randn(2, 3, dtype=torch.float64, requires_grad=True)), LABELS[:2])
    assert [does for _, could, does in pieces(out) if could] == [True, True]


@pytest.mark.parametrize("name", ["LeakyReLU", "Conv1d", "MaxPool1d", "GroupNorm", "LayerNorm, axes"])
def test_checkpointed(name: str) -> None:
    """Numbers are compared, and the part is run again a single time, in the backward pass."""
    (problem, layer), (plain, _) = build(name), build(name)
    oracle, runs = Oracle(plain), []
    for module in (problem.model, *problem.losses):
        extend(module)
    let_ours_be_last(layer)
    layer.register_forward_pre_hook(lambda module, args: runs.append(1))
    first, rest = problem.model[:1], problem.model[1:]
    problem.output = lambda model, x: checkpoint(rest, first(x), use_reentrant=False)
    check(problem, oracle)
    assert len(runs) == 2
