"""Rows of the table of cases: parameters with several uses, of one kind or of several, folded batches, frozen parts of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from cases_nets import Net, add, graph, layers, parameter
from table import classify
from torch import Tensor, randn
from torch.nn import (
    GRU,
    RNN,
    BatchNorm1d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Embedding,
    GroupNorm,
    Linear,
    Module,
    MultiheadAttention,
    Sequential,
    Tanh,
)
from torch.nn import functional as F

USES = ("reused", "nested", "other parameters")


def between(middle: Callable[[], Module], width: int, *shape: int) -> tuple[Callable, Callable]:
    """Put a module on images, or sequences, between two Linear layers.

    Args:
        middle: Makes the module.
        width: Channels of its output.
        shape: Shape of its input, for one sample.

    Returns:
        The function and the parts of a model.
    """

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(net.middle(net.a(x).reshape(-1, *shape)).tanh().flatten(2).mean(2))

    return forward, lambda: {"a": Linear(3, torch.Size(shape).numel()), "middle": middle(), "b": Linear(width, 4)}


def tied(first: Module, second: Module, *names: str) -> Module:
    """Let a module have parameters of another one.

    Args:
        first: The module that gives.
        second: The module that takes.
        names: Names of parameters.

    Returns:
        One after the other, and Tanh in between.
    """
    for name in names:
        setattr(second, name, getattr(first, name))
    return Sequential(first, Tanh(), second)


def frozen(module: Module, *names: str) -> Module:
    """Freeze parameters.

    Args:
        module: Module.
        names: Names of parameters.

    Returns:
        The module, in evaluation mode.
    """
    for name in names:
        getattr(module, name).requires_grad_(False)
    return module.eval()


# --- kernels ----------------------------------------------------------------------------------------------------------------------------------


def both_directions() -> Module:
    return tied(Conv2d(2, 2, 3, padding=1, bias=False), ConvTranspose2d(2, 2, 3, padding=1, bias=False), "weight")


def down_and_up() -> Module:
    return tied(Conv2d(2, 2, 2, stride=2, bias=False), ConvTranspose2d(2, 2, 2, stride=2, bias=False), "weight")


def both_directions_as_functions(net: Net, x: Tensor) -> Tensor:
    h = F.conv2d(net.a(x).reshape(-1, 2, 3, 3), net.kernel, padding=1).tanh()
    return net.b(F.conv_transpose2d(h, net.kernel, padding=1).mean((2, 3)))


graph("kernel of a convolution and a transposed one, strides", *between(down_and_up, 2, 2, 4, 2), (3,), *USES, "two orientations")
graph("kernel of a convolution and a transposed one", *between(both_directions, 2, 2, 3, 3), (3,), *USES, "two orientations")
graph(
    "kernel of a convolution and a transposed one, functions",
    both_directions_as_functions,
    lambda: {"a": Linear(3, 18), "kernel": parameter(2, 2, 3, 3)(), "b": Linear(2, 4)},
    (3,),
    *USES,
    "two orientations",
)
graph(
    "kernel of two convolutions",
    *between(lambda: tied(Conv2d(2, 2, 3, padding=1), Conv2d(2, 2, 3, stride=2), "weight", "bias"), 2, 2, 4, 4),
    (3,),
    *USES,
    "positions",
)
graph(
    "kernel of two convolutions with groups",
    *between(lambda: tied(Conv1d(4, 4, 2, groups=2), Conv1d(4, 4, 2, groups=2, dilation=2), "weight"), 4, 4, 5),
    (3,),
    *USES,
    "positions",
    "groups",
)
graph(
    "kernel of a module and a function",
    lambda net, x: net.b((net.c(net.a(x).reshape(-1, 2, 3)) + F.conv1d(net.a(x).reshape(-1, 2, 3) * 0.3, net.c.weight)).tanh().mean(2)),
    lambda: {"a": Linear(3, 6), "c": Conv1d(2, 2, 2), "b": Linear(2, 4)},
    (3,),
    *USES,
    "positions",
)
graph(
    "weight of a Linear and a convolution",
    lambda net, x: net.b(F.conv1d(net.a(x).reshape(-1, 3, 2), net.c.weight.unsqueeze(2)).mean(2) + net.c(x)),
    lambda: {"a": Linear(3, 6), "c": Linear(3, 3), "b": Linear(3, 4)},
    (3,),
    *USES,
)

# --- batches folded into another axis ---------------------------------------------------------------------------------------------------------


def folded(net: Net, x: Tensor, axis: int = 0) -> Tensor:
    h = net.c(net.a(x.movedim(0, axis)).reshape(-1, 1, 3, 3)).tanh().mean((2, 3))
    return net.b((h.reshape(len(x), -1, 2) if axis == 0 else h.reshape(-1, len(x), 2).movedim(1, 0)).sum(1))


for _name, _axis in (("first", 0), ("second", 1)):
    graph(
        f"convolution of folded samples, samples {_name}",
        partial(folded, axis=_axis),
        lambda: {"a": Linear(3, 9), "c": Conv2d(1, 2, 2), "b": Linear(2, 4)},
        (2, 3),
        "nested",
        "positions",
        "other parameters",
    )

# --- frozen parameters of layers --------------------------------------------------------------------------------------------------------------

for _name, _make in {
    "Conv1d weight": lambda: frozen(Conv1d(2, 2, 2), "weight"),
    "Conv1d bias": lambda: frozen(Conv1d(2, 2, 2), "bias"),
    "ConvTranspose1d weight": lambda: frozen(ConvTranspose1d(2, 2, 2), "weight"),
    "GroupNorm weight": lambda: frozen(GroupNorm(1, 2), "weight"),
    "BatchNorm1d weight": lambda: frozen(BatchNorm1d(2), "weight"),
    "BatchNorm1d bias": lambda: frozen(BatchNorm1d(2), "bias"),
}.items():
    graph(f"frozen {_name}", *between(_make, 2, 2, 3), (3,), "nested", "positions", "other parameters")

# --- vectors and matrices ---------------------------------------------------------------------------------------------------------------------

MATRIX, VECTOR = {"m": parameter(3, 3)}, {"v": parameter(3)}
for _name, _forward, _parts in (
    ("weight and bias of a norm", lambda net, x: net.b(F.layer_norm(net.a(x), (3,), net.v, net.v)), layers(3, 3, 4, **VECTOR)),
    (
        "bias of a Linear and weight of a norm",
        lambda net, x: net.b(F.layer_norm(F.linear(net.a(x), net.m, net.v), (3,), net.v)),
        layers(3, 3, 4, **MATRIX, **VECTOR),
    ),
    (
        "bias of two products",
        lambda net, x: net.b(F.linear(net.a(x), net.m, net.v).tanh() @ net.other + net.v),
        layers(3, 3, 4, other=parameter(3, 3), **MATRIX, **VECTOR),
    ),
    (
        "bias of two products with matrices",
        lambda net, x: net.b(torch.addmm(net.v, torch.addmm(net.v, net.a(x), net.m).tanh(), net.other)),
        layers(3, 3, 4, other=parameter(3, 3), **MATRIX, **VECTOR),
    ),
    ("both factors of a product of weights", lambda net, x: net.b((net.a(x) @ (net.m @ net.m.T)).tanh()), layers(3, 3, 4, **MATRIX)),
    (
        "addmm with factors",
        lambda net, x: net.b(torch.addmm(net.v, net.a(x), net.m, alpha=2.0, beta=0.5).tanh()),
        layers(3, 3, 4, **MATRIX, **VECTOR),
    ),
    ("addmm onto activations", lambda net, x: net.b(torch.addmm(net.a(x), x, net.m).tanh()), layers(3, 3, 4, **MATRIX)),
    ("addmm onto a row", lambda net, x: net.b(torch.addmm(net.v, net.a(x), net.m).tanh()), layers(3, 3, 4, v=parameter(1, 3), **MATRIX)),
    ("matrix on the left", lambda net, x: net.b((net.m @ net.a(x).T).T.tanh()), layers(3, 3, 4, **MATRIX)),
    ("matrix from pieces", lambda net, x: net.b(sum(F.linear(net.a(x), w).tanh() for w in net.m.chunk(2))), layers(3, 3, 4, m=parameter(6, 3))),
    ("matrix from rows", lambda net, x: net.b(F.linear(net.a(x), net.m[[2, 0, 2]]).tanh()), layers(3, 3, 4, **MATRIX)),
    (
        "class token twice",
        lambda net, x: net.b(torch.cat([net.m.expand(len(x), 2, 3), net.a(x)[:, None], net.m.expand(len(x), -1, -1)], 1).tanh().mean(1)),
        layers(3, 3, 4, m=parameter(1, 1, 3)),
    ),
    (
        "norm as module and function",
        lambda net, x: net.b(net.n(net.a(x)) + F.batch_norm(net.a(x), net.n.running_mean, net.n.running_var, net.n.weight, net.n.bias)),
        layers(3, 3, 4, n=lambda: BatchNorm1d(3).eval()),
    ),
):
    graph(_name, _forward, _parts, (3,), *USES, *(("curved",) if _name == "bias of a Linear and weight of a norm" else ()))

# --- tables, attention, recurrent layers ------------------------------------------------------------------------------------------------------


def indices(x: Tensor) -> Tensor:
    return x.mul(3).long().abs() % 4


def head_of_table(width: int) -> None:
    add(
        f"table as head, width {width}",
        lambda N: classify(Net(lambda net, x: F.linear(net.e(indices(x)).mean(1).tanh(), net.e.weight), e=Embedding(4, width)), randn(N, 3)),
        "graph",
        *USES,
        "two orientations",
    )


head_of_table(3)
head_of_table(4)
graph(
    "table as head of positions, and looked up twice",
    lambda net, x: F.linear((net.e(indices(x)) + net.e(indices(x[:, :1]))).tanh(), net.e.weight).mean(1),
    layers(e=lambda: Embedding(4, 3, padding_idx=1)),
    (2,),
    *USES,
    "two orientations",
)
graph(
    "table as head of positions",
    lambda net, x: F.linear(net.e(indices(x)).tanh(), net.e.weight).mean(1),
    layers(e=lambda: Embedding(4, 3)),
    (2,),
    *USES,
    "two orientations",
)
graph(
    "table at two places",
    lambda net, x: net.b((net.e(indices(x)).mean(1) * 1.3 + net.e(indices(x[:, 0]))).tanh()),
    layers(e=lambda: Embedding(4, 3, padding_idx=1), b=lambda: Linear(3, 4)),
    (3,),
    *USES,
)
graph(
    "table of as many positions as samples",
    lambda net, x: net.b((net.a(x) + net.e(torch.arange(3))).tanh().mean(1)),
    layers(3, 3, 4, e=lambda: Embedding(3, 3)),
    (3, 3),
    *USES,
)
for _name, _attention in (
    ("attention to another sequence", lambda: MultiheadAttention(4, 2, batch_first=True)),
    ("attention to features of another width", lambda: MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)),
):
    graph(
        _name,
        lambda net, x: net.b(net.m(net.a(x), *(2 * [x if net.m.kdim == 3 else net.a(x[:, :1])]), need_weights=False)[0].mean(1)),
        lambda make=_attention: {"a": Linear(3, 4), "m": make(), "b": Linear(4, 4)},
        (2, 3),
        *USES,
    )
graph(
    "GRU called twice",
    lambda net, x: net.b(net.g(net.g(net.a(x))[0])[0][:, -1]),
    lambda: {"a": Linear(3, 2), "g": GRU(2, 2, batch_first=True), "b": Linear(2, 4)},
    (2, 3),
    *USES,
)
graph(
    "weight of an RNN and a function",
    lambda net, x: net.b(F.linear(net.g(net.a(x))[0].mean(1), net.g.weight_hh_l0)),
    lambda: {"a": Linear(3, 2), "g": RNN(2, 2, batch_first=True), "b": Linear(2, 4)},
    (2, 3),
    *USES,
)
graph(
    "weight times each sample",
    lambda net, x: net.b(torch.stack([torch.mv(net.weight, h) for h in net.a(x)]).tanh()),
    layers(3, 3, 4, weight=parameter(3, 3)),
    (3,),
    *USES,
)
graph(
    "transformed weight times each sample",
    lambda net, x: net.b(torch.stack([*map(partial(torch.mv, net.weight.tanh().T), net.a(x))]).tanh()),
    layers(3, 3, 4, weight=parameter(3, 3)),
    (3,),
    *USES,
)
for _name, _bias in (
    ("positions", lambda net: net.table),
    ("positions and heads", lambda net: net.table[None] * net.gain),
    ("relative positions", lambda net: net.e(torch.arange(3)[None, :, None] - torch.arange(3) + 2).sum(-1)),
):
    graph(
        f"attention with scores of {_name}, as many as samples",
        lambda net, x, bias=_bias: net.b(((net.a(x) @ x.mT + bias(net)).softmax(2) @ net.c(x)).tanh().mean(1)),
        lambda name=_name: (
            {"a": Linear(3, 3), "c": Linear(3, 2), "b": Linear(2, 4)}
            | ({"e": Embedding(5, 2)} if "relative" in name else {"table": parameter(3, 3)()} | ({"gain": parameter(1)()} if "heads" in name else {}))
        ),
        (3, 3),
        *USES,
    )
