"""Rows of the table of cases: layers that are called as functions with parameters of the model."""

from __future__ import annotations

from functools import partial

from cases_nets import Net, graph, layers, parameter
from torch import Tensor
from torch.nn import Linear, Tanh
from torch.nn import functional as F

CHAIN = ("nested", "other parameters")
IMAGE = {"a": lambda: Linear(3, 9), "tanh": Tanh, "kernel": parameter(2, 1, 2, 2), "shift": parameter(2), "b": lambda: Linear(2, 4)}


def parts(*without: str, **more: object) -> dict:  # noqa: D103
    return {name: make() for name, make in (IMAGE | more).items() if name not in without}


def image(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.a(x).reshape(-1, 1, 3, 3)


def convolution(net: Net, x: Tensor, **options: object) -> Tensor:  # noqa: D103
    return net.b(net.tanh(F.conv2d(image(net, x), net.kernel, net.shift, **options)).flatten(2).mean(2))


def transposed_convolution(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.tanh(F.conv_transpose2d(image(net, x), net.kernel.transpose(0, 1), net.shift, stride=2, output_padding=1)).flatten(2).mean(2))


def first_convolution(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.tanh(F.conv1d(x, net.kernel, stride=2)).sum(2))


def folded_convolution(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = F.conv2d(image(net, x.reshape(-1, 3)), net.kernel, net.shift).tanh().mean((2, 3))
    return net.b(h.reshape(len(x), -1, 2).sum(1))


for _name, _options in (("", {}), (", stride and padding", {"stride": 2, "padding": 1}), (", same", {"padding": "same"})):
    graph(f"functional convolution{_name}", partial(convolution, **_options), parts, (3,), *CHAIN)
graph("functional transposed convolution", transposed_convolution, parts, (3,), *CHAIN)
graph("functional convolution, samples folded", folded_convolution, parts, (2, 3), *CHAIN)
graph("functional convolution, data", first_convolution, lambda: parts("a", "shift", kernel=parameter(2, 2, 2)), (2, 4), *CHAIN)
graph(
    "functional convolution, kernel scaled",
    lambda net, x: net.b(net.tanh(F.conv2d(image(net, x), net.kernel * net.gain, groups=1)).sum((2, 3))),
    lambda: parts("shift", gain=parameter(2, 1, 1, 1)),
    (3,),
    *CHAIN,
)
graph(
    "functional convolution, kernel reshaped and back",
    lambda net, x: net.b(net.tanh(F.conv2d(image(net, x), net.kernel.squeeze(1).unsqueeze(1), net.shift.view(2, 1).view(2))).sum((2, 3))),
    parts,
    (3,),
    *CHAIN,
)
NORM = {"scale": parameter(3), "shift": parameter(3)}
graph("functional layer norm", lambda net, x: net.b(F.layer_norm(net.a(x), (3,), net.scale, net.shift)), layers(3, 3, 4, **NORM), (3,), *CHAIN)
graph(
    "functional layer norm, samples second",
    lambda net, x: net.b(F.layer_norm(net.a(x).transpose(0, 1), (3,), net.scale, net.shift).sum(0)),
    layers(3, 3, 4, **NORM),
    (2, 3),
    *CHAIN,
)
graph("functional layer norm, no parameters", lambda net, x: net.b(F.layer_norm(net.a(x), (3,))), layers(3, 3, 4), (3,), "nested")
graph(
    "functional group norm",
    lambda net, x: net.b(F.group_norm(net.a(x).reshape(-1, 2, 3), 1, net.scale, net.shift).flatten(1)),
    layers(3, 6, scale=parameter(2), shift=parameter(2), b=lambda: Linear(6, 4)),
    (3,),
    *CHAIN,
)
graph(
    "functional batch norm",
    lambda net, x: net.b(F.batch_norm(net.a(x), x.new_full((3,), 0.1), x.new_full((3,), 0.5), net.scale, net.shift)),
    layers(3, 3, 4, **NORM),
    (3,),
    *CHAIN,
)
graph(
    "functional rms norm",
    lambda net, x: net.b(F.rms_norm(net.a(x), (3,), net.scale)),
    layers(3, 3, 4, scale=parameter(3)),
    (3,),
    "other parameters",
)


def lookup(net: Net, x: Tensor, **options: object) -> Tensor:  # noqa: D103
    return net.a(F.embedding(x.mul(3).long() % 4, net.table, **options).tanh().sum(1))


for _name, _options in (("", {}), (", padding", {"padding_idx": 1})):
    graph(f"functional embedding{_name}", partial(lookup, **_options), lambda: {"a": Linear(2, 4), "table": parameter(4, 2)()}, (3,), *CHAIN)


def entries(net: Net, x: Tensor) -> Tensor:
    """Entries of one tensor that are taken out one by one, some twice, some along another axis, with something else in between."""
    h = net.a(x).reshape(-1, 3, 2)
    turned = h.transpose(0, 1).contiguous()
    total = turned[0] + turned[1].tanh() + h[:, 0] - 2 * h[:, 0] + h.sum(1)
    return net.b(total + h.select(-2, -1) + turned[-1].tanh() + h.select(-1, 1)[:, :2])


graph("entries of a tensor", entries, layers(3, 6, b=lambda: Linear(2, 4)), (3,))
