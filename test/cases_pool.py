"""Rows of the table of cases: pooling, padding, resampling and other linear maps of images; what keeps input or output; functional relatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from cases_nets import Net, graph, layers
from oracle import Problem
from table import add, classify, layer
from torch import Tensor, nn, randn
from torch.nn import Flatten, Linear, Module, Sequential, Unflatten
from torch.nn import functional as F

# --- layers -----------------------------------------------------------------------------------------------------------------------------------

SHAPES = {1: (2, 7), 2: (2, 5, 4), 3: (2, 4, 3, 3)}
"""Shapes with channels, by number of spatial axes."""


def options(name: str, rows: dict[str, Callable[[], Module]], shape: tuple[int, ...]) -> None:
    """Add rows for the options of a module.

    Args:
        name: Name of the class.
        rows: What the option is called, and what makes the module.
        shape: Shape of one sample of the input.
    """
    for option, make in rows.items():
        layer(f"{name}, {option}" if option else name, make, shape)


def positions(N: int, d: int, shape: tuple[int, ...]) -> Tensor:
    """Draw positions of maxima.

    Args:
        N: Batch size.
        d: Number of spatial axes.
        shape: Shape of one sample after pooling by two.

    Returns:
        ``[N, *shape]``.
    """
    images = randn(N, shape[0], *(2 * size for size in shape[1:]))
    return getattr(nn, f"MaxPool{d}d")(2, return_indices=True)(images)[1]


for _d, _shape in SHAPES.items():
    _sizes = tuple(range(2, 2 + _d))  # another one for each axis
    _max: type[Module] = getattr(nn, f"MaxPool{_d}d")
    options(
        _max.__name__,
        {
            "": lambda new=_max: new(2),
            "overlapping": lambda new=_max: new(2, 1),
            "padding": lambda new=_max: new(3, 2, 1),
            "dilation": lambda new=_max: new(2, 1, dilation=2),
            "ceil_mode": lambda new=_max: new(2, 2, ceil_mode=True),
            "gaps": lambda new=_max: new(1, 2),
            "sizes": lambda new=_max, sizes=_sizes: new(sizes[0] if len(sizes) == 1 else sizes[::-1], stride=1),
        },
        _shape,
    )
    layer(f"{_max.__name__}, no channels", lambda new=_max: new(2), _shape[1:])
    _avg: type[Module] = getattr(nn, f"AvgPool{_d}d")
    options(
        _avg.__name__,
        {
            "": lambda new=_avg: new(2),
            "overlapping": lambda new=_avg: new(3, 1),
            "padding": lambda new=_avg: new(3, 2, 1),
            "padding not counted": lambda new=_avg: new(3, 2, 1, count_include_pad=False),
            "ceil_mode": lambda new=_avg: new(2, 2, ceil_mode=True),
            "ceil_mode, padding": lambda new=_avg: new(2, 2, 1, ceil_mode=True),
            "gaps": lambda new=_avg: new(1, 2),
        },
        _shape,
    )
    if _d > 1:
        layer(f"{_avg.__name__}, divisor", lambda new=_avg: new(2, divisor_override=3), _shape)
    layer(f"{_avg.__name__}, no channels", lambda new=_avg: new(2), _shape[1:])
    for _kind in ("Avg", "Max"):
        _new: type[Module] = getattr(nn, f"Adaptive{_kind}Pool{_d}d")
        _mixed = (2,) if _d == 1 else (None, 1) if _d == 2 else (3, None, 2)
        options(
            _new.__name__,
            {
                "one": lambda new=_new: new(1),
                "two": lambda new=_new: new(2),
                "more than there are": lambda new=_new: new(6),
                "sizes": lambda new=_new, sizes=_mixed: new(sizes),
            },
            _shape,
        )
        layer(f"{_new.__name__}, no channels", lambda new=_new: new(2), _shape[1:])
    _unpool: type[Module] = getattr(nn, f"MaxUnpool{_d}d")
    _small = (2, *(size // 2 for size in _shape[1:]))
    layer(_unpool.__name__, lambda new=_unpool: new(2), _small, lambda N, d=_d, small=_small: (positions(N, d, small),))

    for _kind in ("Zero", "Constant", "Reflection", "Replication", "Circular"):
        _new = getattr(nn, f"{_kind}Pad{_d}d")
        _value = (0.7,) if _kind == "Constant" else ()
        options(
            _new.__name__,
            {
                "": lambda new=_new, value=_value: new(1, *value),
                "sides": lambda new=_new, value=_value, d=_d: new((0, 2, 1, 0, 1, 1)[: 2 * d], *value),
                "negative": lambda new=_new, value=_value, d=_d: new((2, -1, -1, 1, 0, -1)[: 2 * d], *value),
            },
            _shape,
        )
        layer(f"{_new.__name__}, no channels", lambda new=_new, value=_value: new(1, *value), _shape[1:])

    _modes = ("nearest", "nearest-exact", *{1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[_d])
    for _mode in _modes:
        options(
            f"Upsample, {_d} axes, {_mode}",
            {
                "factor": lambda mode=_mode: nn.Upsample(scale_factor=2, mode=mode),
                "fraction": lambda mode=_mode: nn.Upsample(scale_factor=0.7, mode=mode, recompute_scale_factor=True),
                "size": lambda mode=_mode, d=_d: nn.Upsample((3, 6, 5)[:d], mode=mode),
            },
            _shape,
        )
        if "nearest" not in _mode:
            layer(f"Upsample, {_d} axes, {_mode}, corners", lambda mode=_mode: nn.Upsample(scale_factor=1.5, mode=mode, align_corners=True), _shape)

layer("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(scale_factor=2), (2, 3, 2))
layer("UpsamplingNearest2d, size", lambda: nn.UpsamplingNearest2d((2, 5)), (2, 3, 2))
layer("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), (2, 3, 2))
layer("UpsamplingBilinear2d, size", lambda: nn.UpsamplingBilinear2d((4, 5)), (2, 3, 2))
layer("PixelShuffle", lambda: nn.PixelShuffle(2), (8, 2, 3))
layer("PixelShuffle, further axis", lambda: nn.PixelShuffle(2), (2, 4, 2, 3))
layer("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), (2, 4, 6))
layer("ChannelShuffle", lambda: nn.ChannelShuffle(2), (6, 2))
layer("ChannelShuffle, images", lambda: nn.ChannelShuffle(3), (6, 2, 3))
layer("Fold", lambda: nn.Fold((4, 3), 2), (8, 6))
layer("Fold, options", lambda: nn.Fold((5, 4), (2, 1), dilation=2, padding=1, stride=(2, 1)), (4, 18))
layer("Unfold", lambda: nn.Unfold(2), (2, 4, 3))
layer("Unfold, options", lambda: nn.Unfold((2, 1), dilation=2, padding=1, stride=(2, 1)), (2, 5, 4))

# --- nets -------------------------------------------------------------------------------------------------------------------------------------


def between(shape: tuple[int, ...], make: Callable[[], Module], N: int) -> Problem:
    """Put a module for images between two fully-connected layers.

    Args:
        shape: Shape of one image.
        make: Makes the module.
        N: Batch size.

    Returns:
        Problem.
    """
    middle = Sequential(Unflatten(1, shape), make(), Flatten())
    features = torch.Size(shape).numel()
    width = middle(randn(1, features)).shape[1]
    return classify(Sequential(Linear(3, features), nn.Sigmoid(), *middle, Linear(width, 4)), randn(N, 3))


NETS: dict[str, tuple[tuple[int, ...], Callable[[], Module]]] = {
    "MaxPool1d": ((2, 4), lambda: nn.MaxPool1d(3, 1, padding=1)),
    "MaxPool2d": ((2, 3, 3), lambda: nn.MaxPool2d(2, ceil_mode=True)),
    "MaxPool2d, overlapping": ((1, 3, 3), lambda: nn.MaxPool2d(2, 1)),
    "MaxPool2d, dilation": ((1, 3, 3), lambda: nn.MaxPool2d(2, 1, dilation=2, padding=1)),
    "MaxPool3d": ((1, 2, 3, 2), lambda: nn.MaxPool3d(2, 1)),
    "AdaptiveMaxPool1d": ((2, 4), lambda: nn.AdaptiveMaxPool1d(3)),
    "AdaptiveMaxPool2d": ((2, 3, 2), lambda: nn.AdaptiveMaxPool2d((2, None))),
    "AdaptiveMaxPool3d": ((1, 2, 3, 2), lambda: nn.AdaptiveMaxPool3d((1, 2, 2))),
    "AvgPool1d": ((2, 4), lambda: nn.AvgPool1d(3, 1, padding=1, count_include_pad=False)),
    "AvgPool2d": ((2, 3, 3), lambda: nn.AvgPool2d(2, ceil_mode=True)),
    "AvgPool2d, divisor": ((1, 3, 3), lambda: nn.AvgPool2d(2, 1, divisor_override=3)),
    "AvgPool3d": ((1, 2, 3, 2), lambda: nn.AvgPool3d(2, 1)),
    "AdaptiveAvgPool1d": ((2, 5), lambda: nn.AdaptiveAvgPool1d(2)),
    "AdaptiveAvgPool2d": ((2, 3, 2), lambda: nn.AdaptiveAvgPool2d(1)),
    "AdaptiveAvgPool2d, uneven": ((1, 3, 2), lambda: nn.AdaptiveAvgPool2d((2, None))),
    "AdaptiveAvgPool3d": ((1, 2, 3, 2), lambda: nn.AdaptiveAvgPool3d((1, 2, 2))),
    "ZeroPad2d": ((1, 2, 3), lambda: nn.ZeroPad2d((1, 0, -1, 1))),
    "ConstantPad1d": ((2, 3), lambda: nn.ConstantPad1d((1, 2), 0.7)),
    "ReflectionPad2d": ((1, 2, 3), lambda: nn.ReflectionPad2d((1, 2, 1, 0))),
    "ReplicationPad3d": ((1, 1, 2, 2), lambda: nn.ReplicationPad3d((1, 0, 0, 1, 0, 0))),
    "CircularPad2d": ((1, 2, 3), lambda: nn.CircularPad2d((1, 2, 0, -1))),
    "Upsample": ((1, 2, 2), lambda: nn.Upsample(scale_factor=1.5)),
    "Upsample, exact": ((1, 2, 2), lambda: nn.Upsample((3, 2), mode="nearest-exact")),
    "Upsample, bilinear": ((1, 2, 2), lambda: nn.Upsample((3, 4), mode="bilinear", align_corners=True)),
    "UpsamplingBilinear2d": ((1, 2, 2), lambda: nn.UpsamplingBilinear2d(scale_factor=2)),
    "PixelShuffle": ((4, 1, 2), lambda: nn.PixelShuffle(2)),
    "PixelUnshuffle": ((1, 2, 4), lambda: nn.PixelUnshuffle(2)),
    "ChannelShuffle": ((4, 2), lambda: nn.ChannelShuffle(2)),
    "Fold": ((4, 4), lambda: nn.Fold((3, 3), 2)),
    "Unfold": ((1, 3, 3), lambda: nn.Unfold(2)),
}
for _name, (_shape, _make) in NETS.items():
    add(_name, partial(between, _shape, _make), "chain")

CURVED = ("chain", "nested", "dense residual")
add("LPPool1d", partial(between, (2, 4), lambda: nn.LPPool1d(3, 2)), *CURVED)
add("LPPool2d", partial(between, (1, 3, 3), lambda: nn.LPPool2d(2, 2, 1)), *CURVED)
add("LPPool3d", partial(between, (1, 2, 2, 2), lambda: nn.LPPool3d(1, 2)), *CURVED)

for _name, _make in {
    "LeakyReLU": partial(nn.LeakyReLU, 0.2),
    "LeakyReLU, negative": partial(nn.LeakyReLU, -0.2),
    "RReLU": nn.RReLU,
    "ReLU6": nn.ReLU6,
    "Hardtanh": nn.Hardtanh,
}.items():
    add(
        f"{_name}, then in place",
        lambda N, make=_make: classify(Sequential(Linear(3, 4), make(), nn.SiLU(inplace=True), Linear(4, 4)).eval(), 3 * randn(N, 3)),
        "chain",
    )

# --- graphs -----------------------------------------------------------------------------------------------------------------------------------


def with_indices(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.pool(net.sigmoid(net.a(x)).unflatten(1, (1, 3, 3)))[0].flatten(1))


def unpooled(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    maxima, indices = net.pool(net.sigmoid(net.a(x)).unflatten(1, (2, 4)))
    return net.c(net.unpool(net.b(maxima.flatten(1)).unflatten(1, (2, 2)), indices, output_size=[4]).flatten(1))


def functional(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[Callable[[Net, Tensor], Tensor], Callable[[], dict]]:
    """Put a function of images between two fully-connected layers.

    Args:
        function: Function of images with one channel.
        shape: Shape of one image.

    Returns:
        Forward pass, and what makes the parts.
    """
    width = function(randn(1, 1, *shape)).numel()
    size = torch.Size(shape).numel()

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(function(net.sigmoid(net.a(x)).unflatten(1, (1, *shape))).flatten(1))

    return forward, lambda: {"a": Linear(3, size), "sigmoid": nn.Sigmoid(), "b": Linear(width, 4)}


def rectified(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.b(torch.where(h > 0, h, -0.3 * h))


def half_curved(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.b(torch.where(h > 0, h, h.tanh()))


def samples_last(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.relu(net.a(x).transpose(0, 1)).transpose(0, 1))


graph(
    "maxima with indices",
    with_indices,
    layers(3, 9, sigmoid=nn.Sigmoid, pool=lambda: nn.MaxPool2d(2, 1, return_indices=True), b=lambda: Linear(4, 4)),
    (3,),
)
graph(
    "adaptive maxima with indices",
    with_indices,
    layers(3, 9, sigmoid=nn.Sigmoid, pool=lambda: nn.AdaptiveMaxPool2d(2, return_indices=True), b=lambda: Linear(4, 4)),
    (3,),
)
graph(
    "max-unpooling",
    unpooled,
    lambda: (
        {"a": Linear(3, 8), "b": Linear(4, 4), "c": Linear(8, 4)}
        | {"sigmoid": nn.Sigmoid(), "pool": nn.MaxPool1d(2, return_indices=True), "unpool": nn.MaxUnpool1d(2)}
    ),
    (3,),
)
smooth = partial(F.interpolate, antialias=True)
for _name, _shape, _function in (
    ("max_pool1d", (4,), lambda h: F.max_pool1d(h, 2, 1)),
    ("max_pool3d", (2, 2, 3), lambda h: F.max_pool3d(h, 2, 1)),
    ("adaptive_max_pool", (3, 4), lambda h: F.adaptive_max_pool1d(F.adaptive_max_pool2d(h, (1, 4))[:, :, 0], 3)),
    ("adaptive_max_pool3d", (2, 2, 3), lambda h: F.adaptive_max_pool3d(h, (1, 2, 2))),
    ("max_unpool2d", (4, 4), lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2)),
    ("avg_pool3d", (2, 2, 3), lambda h: F.adaptive_avg_pool3d(F.avg_pool3d(h, 2, 1, 1), (1, 2, 3))),
    ("adaptive_avg_pool", (3, 4), lambda h: F.adaptive_avg_pool1d(F.adaptive_avg_pool2d(h, (1, 4))[:, :, 0], 3)),
    ("pad", (2, 3), lambda h: F.pad(F.pad(h, (1, 0, 0, 1), "replicate"), (1, 1, 1, 0), "reflect")),
    ("pad one axis", (3,), lambda h: F.pad(F.pad(h, (1, 0), "replicate"), (1, 1), "reflect")),
    ("pad three axes", (1, 2, 2), lambda h: F.pad(F.pad(h, (0, 0, 0, 1, 1, 0), "replicate"), (1, 0, 0, 0, 0, 0), "reflect")),
    ("interpolate one axis", (3,), lambda h: F.interpolate(F.interpolate(h, 4, mode="linear"), 5)),
    ("interpolate two axes", (2, 2), lambda h: F.interpolate(F.interpolate(h, (3, 2), mode="bilinear"), (3, 3), mode="bicubic")),
    ("interpolate smoothly", (4, 3), lambda h: smooth(smooth(h, (3, 2), mode="bilinear"), (2, 2), mode="bicubic")),
    ("interpolate exactly", (2, 2), lambda h: F.interpolate(F.interpolate(h, (3, 2), mode="nearest-exact"), (3, 3))),
    ("interpolate three axes", (1, 2, 2), lambda h: F.interpolate(F.interpolate(h, (1, 3, 2), mode="trilinear"), (1, 3, 3))),
    ("shuffle", (2, 4), lambda h: F.pixel_shuffle(F.channel_shuffle(F.pixel_unshuffle(h, 2), 2), 2)),
    ("unfold", (3, 3), lambda h: F.fold(F.unfold(h, 2), (3, 3), 2)),
):
    graph(f"functional {_name}", *functional(_function, _shape), (3,))


class Power(torch.autograd.Function):
    """A custom function of a tensor and a number."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, exponent: int, x: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x)
        ctx.exponent = exponent
        return x**exponent

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> tuple[None, Tensor]:  # noqa: D102
        (x,) = ctx.saved_tensors
        return None, ctx.exponent * g * x ** (ctx.exponent - 1)


graph("custom function with a number", lambda net, x: net.b(Power.apply(3, net.a(x))), layers(3, 3, 4), (3,), "curved")
graph("where", rectified, layers(3, 3, 4), (3,))
graph("where, one branch curved", half_curved, layers(3, 3, 4), (3,))
graph("samples last", samples_last, layers(3, 3, 4, relu=nn.LeakyReLU), (3,))
