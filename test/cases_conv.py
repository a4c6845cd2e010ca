"""Rows of the table of cases: convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from warnings import catch_warnings, simplefilter

import torch
from oracle import Problem
from table import add, classify, layer, regress
from torch import Tensor, nn, randn
from torch.nn import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Flatten, Linear, Module, Sequential, Sigmoid, Tanh

with catch_warnings():  # torch says once in a process that it copies the input here
    simplefilter("ignore")
    Conv1d(1, 1, 2, padding="same")(randn(1, 1, 2))

# --- products of single layers ----------------------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "Conv1d": (lambda: Conv1d(2, 3, 2), (2, 4)),
    "Conv1d, one position": (lambda: Conv1d(2, 3, 3), (2, 3)),
    "Conv1d, kernel 1": (lambda: Conv1d(2, 3, 1), (2, 3)),
    "Conv1d, kernel 1, stride": (lambda: Conv1d(2, 3, 1, stride=2), (2, 4)),
    "Conv1d, no bias": (lambda: Conv1d(2, 3, 2, bias=False), (2, 4)),
    "Conv1d, stride that does not divide": (lambda: Conv1d(2, 2, 2, stride=3, padding=1), (2, 6)),
    "Conv1d, all numbers": (lambda: Conv1d(4, 6, 2, stride=2, padding=3, dilation=2, groups=2), (4, 5)),
    "Conv1d, valid": (lambda: Conv1d(2, 2, 2, padding="valid"), (2, 4)),
    "Conv1d, same": (lambda: Conv1d(2, 2, 3, padding="same", dilation=2), (2, 4)),
    "Conv1d, same, even kernel": (lambda: Conv1d(2, 2, 4, padding="same"), (2, 4)),
    "Conv1d, many positions": (lambda: Conv1d(1, 2, 3, padding=1), (1, 9)),
    **{
        f"Conv1d, {mode}": (partial(Conv1d, 2, 2, 3, padding=2, stride=2, padding_mode=mode), (2, 5)) for mode in ("reflect", "replicate", "circular")
    },
    "Conv2d": (lambda: Conv2d(2, 3, 2), (2, 3, 4)),
    "Conv2d, kernel 1, one position": (lambda: Conv2d(3, 2, 1), (3, 1, 1)),
    "Conv2d, positions for a kernel of their own": (lambda: Conv2d(8, 1, 1), (8, 13, 13)),
    "Conv2d, rectangular": (lambda: Conv2d(2, 2, (3, 1), stride=(1, 2), padding=(2, 0), dilation=(2, 1)), (2, 3, 3)),
    "Conv2d, groups": (lambda: Conv2d(4, 2, (2, 1), groups=2, bias=False), (4, 3, 2)),
    "Conv2d, depthwise": (lambda: Conv2d(2, 4, 3, padding=1, groups=2), (2, 3, 3)),
    "Conv2d, same, even kernel": (lambda: Conv2d(1, 2, (2, 3), padding="same", dilation=(1, 2)), (1, 3, 3)),
    "Conv2d, same, reflect": (lambda: Conv2d(1, 2, (2, 3), padding="same", padding_mode="reflect"), (1, 3, 3)),
    "Conv2d, replicate": (lambda: Conv2d(2, 2, 3, padding=(1, 2), stride=2, padding_mode="replicate", groups=2), (2, 3, 3)),
    "Conv2d, circular": (lambda: Conv2d(1, 2, (2, 3), padding=(1, 2), padding_mode="circular"), (1, 3, 3)),
    "Conv3d": (lambda: Conv3d(2, 1, 2, stride=(1, 2, 1), padding=(1, 0, 0)), (2, 2, 3, 2)),
    "Conv3d, groups": (lambda: Conv3d(2, 2, (1, 2, 2), groups=2, dilation=(1, 1, 2)), (2, 2, 2, 3)),
    "Conv3d, reflect": (lambda: Conv3d(1, 2, (1, 2, 3), padding="same", padding_mode="reflect"), (1, 2, 2, 3)),
    "ConvTranspose1d": (lambda: ConvTranspose1d(2, 3, 2), (2, 3)),
    "ConvTranspose1d, one position": (lambda: ConvTranspose1d(2, 3, 3, padding=1), (2, 1)),
    "ConvTranspose1d, no bias": (lambda: ConvTranspose1d(2, 3, 2, bias=False), (2, 3)),
    "ConvTranspose1d, all numbers": (
        lambda: ConvTranspose1d(4, 6, 2, stride=3, padding=1, output_padding=2, dilation=2, groups=2),
        (4, 3),
    ),
    "ConvTranspose1d, much padding": (lambda: ConvTranspose1d(1, 2, 2, padding=2), (1, 5)),
    "ConvTranspose1d, further positions": (lambda: ConvTranspose1d(2, 3, 2, stride=2, dilation=4, padding=1, output_padding=3), (2, 3)),
    "ConvTranspose1d, gaps": (lambda: ConvTranspose1d(2, 2, 1, stride=3, output_padding=2), (2, 3)),
    "ConvTranspose2d": (lambda: ConvTranspose2d(2, 3, 2), (2, 2, 3)),
    "ConvTranspose2d, rectangular": (
        lambda: ConvTranspose2d(2, 2, (3, 1), stride=(1, 2), padding=(2, 0), output_padding=(0, 1), dilation=(2, 1)),
        (2, 3, 2),
    ),
    "ConvTranspose2d, groups": (lambda: ConvTranspose2d(4, 2, (2, 1), groups=2, stride=2), (4, 2, 2)),
    "ConvTranspose2d, depthwise": (lambda: ConvTranspose2d(2, 4, 3, padding=1, groups=2), (2, 2, 2)),
    "ConvTranspose3d": (lambda: ConvTranspose3d(2, 1, 2, stride=(1, 2, 1), padding=(1, 0, 0)), (2, 2, 2, 1)),
    "ConvTranspose3d, groups": (lambda: ConvTranspose3d(2, 4, (1, 2, 2), groups=2, dilation=(1, 1, 2)), (2, 1, 2, 2)),
}
for _name, (_make, _shape) in LAYERS.items():
    layer(_name, _make, _shape)

# --- nets -------------------------------------------------------------------------------------------------------------------------------------


class Sized(Module):
    """Asks a transposed convolution for an output size."""

    def __init__(self, conv: Module, size: Sequence[int], keyword: bool) -> None:
        super().__init__()
        self.conv, self.size, self.keyword = conv, list(size), keyword

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, output_size=self.size) if self.keyword else self.conv(x, self.size)


def net(shape: tuple[int, ...], *makers: Callable[[], Module], channels_last: bool = False) -> Callable[[int], Problem]:
    """Put a curved activation behind each layer, and a Linear with a cross-entropy at the end.

    Args:
        shape: Shape of one sample.
        makers: Make the layers.
        channels_last: Memory format of input and weights.

    Returns:
        What makes the problem.
    """

    def make(N: int) -> Problem:
        layers = [part for layer in makers for part in (layer(), Tanh())]
        x = randn(N, *shape)
        with torch.no_grad():
            width = Sequential(*layers)(x).flatten(1).shape[1]
        model = Sequential(*layers, Flatten(), Linear(width, 4))
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return classify(model, x)

    return make


def twice(N: int) -> Problem:
    conv = Conv1d(2, 2, 3, padding=1)
    return regress(Sequential(conv, Tanh(), conv, Flatten(), Linear(6, 2)), randn(N, 2, 3))


NETS: dict[str, Callable[[int], Problem]] = {
    "Conv1d": net((2, 4), lambda: Conv1d(2, 2, 2), lambda: Conv1d(2, 2, 2, stride=2, padding=1)),
    "Conv1d, one position": net((2, 3), lambda: Conv1d(2, 3, 3)),
    "Conv1d, many positions": net((1, 9), lambda: Conv1d(1, 1, 3, padding=1)),
    "Conv2d": net((1, 3, 4), lambda: Conv2d(1, 2, 2), lambda: Conv2d(2, 2, (2, 1), dilation=(1, 2), bias=False)),
    "Conv2d, same, even kernel": net((1, 3, 2), lambda: Conv2d(1, 2, (2, 1), padding="same"), lambda: Conv2d(2, 1, 2, padding="same")),
    "Conv2d, circular": net((1, 3, 3), lambda: Conv2d(1, 1, 1), lambda: Conv2d(1, 2, 2, stride=2, padding=1, padding_mode="circular")),
    "Conv2d, reflect": net((1, 3, 3), lambda: Conv2d(1, 1, 1), lambda: Conv2d(1, 2, 3, padding="same", stride=1, padding_mode="reflect")),
    "Conv2d, channels last": net((2, 3, 3), lambda: Conv2d(2, 3, 2), lambda: Conv2d(3, 2, 2), channels_last=True),
    "Conv2d, global average": lambda N: classify(
        Sequential(Conv2d(1, 3, 2), Sigmoid(), nn.Flatten(2), Linear(4, 1), Flatten(), Linear(3, 4)), randn(N, 1, 3, 3)
    ),
    "Conv3d": net((1, 2, 3, 2), lambda: Conv3d(1, 2, 2, padding=(0, 0, 1))),
    "ConvTranspose1d": net((2, 2), lambda: ConvTranspose1d(2, 2, 2, stride=2, padding=1, output_padding=1), lambda: ConvTranspose1d(2, 1, 2)),
    "ConvTranspose2d": net((1, 2, 2), lambda: ConvTranspose2d(1, 2, (2, 1), stride=(1, 2)), lambda: ConvTranspose2d(2, 1, 2, bias=False)),
    "ConvTranspose3d": net((2, 1, 2, 1), lambda: ConvTranspose3d(2, 1, 2, padding=(0, 1, 0))),
    "ConvTranspose2d, channels last": net(
        (2, 2, 2), lambda: ConvTranspose2d(2, 3, 2, padding=1), lambda: ConvTranspose2d(3, 2, 2), channels_last=True
    ),
    "output_size": net(
        (1, 2), lambda: Sized(ConvTranspose1d(1, 2, 2, stride=3), (6,), False), lambda: Sized(ConvTranspose1d(2, 1, 1, 2), (12,), True)
    ),
}
for _name, _problem in NETS.items():
    add(f"net: {_name}", _problem, "chain", *([] if "one position" in _name else ["positions"]), *(["extra axes"] if "average" in _name else []))
GROUPS: dict[str, Callable[[int], Problem]] = {
    "Conv1d": net((4, 3), lambda: Conv1d(4, 2, 2, groups=2)),
    "Conv1d, one position": net((4, 2), lambda: Conv1d(4, 2, 2, groups=2)),
    "Conv2d, depthwise": net((2, 2, 3), lambda: Conv2d(2, 4, 2, padding=(1, 0), groups=2)),
    "ConvTranspose1d": net((2, 2), lambda: ConvTranspose1d(2, 4, 2, stride=2, groups=2)),
}
for _name, _problem in GROUPS.items():
    add(f"net: groups, {_name}", _problem, "chain", "positions", "groups")
add("net: Conv1d twice", twice, "chain", "positions", "reused", "nested")
