"""Rows of the table of cases: graphs in which a weight is not what a module's class suggests, in which samples are routed, or parts run again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cases_nets import Net, graph, layers, parameter
from torch import Tensor
from torch.autograd import Function
from torch.func import functional_call
from torch.nn import LayerNorm, Linear, Module, ModuleList, Sequential, Tanh
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint

CHAIN = ("nested", "other parameters")


def doubled(net: Net, x: Tensor) -> Tensor:
    """Call a layer with twice its weight."""
    return net.b(functional_call(net.a, {name: 2 * p for name, p in net.a.named_parameters()}, (x,)).tanh())


def own_parameters(net: Net, x: Tensor) -> Tensor:
    """Call a layer with its own parameters."""
    return net.b(net.tanh(functional_call(net.a, dict(net.a.named_parameters()), (x,))))


def experts(net: Net, x: Tensor) -> Tensor:
    """Send each token to one expert; some get none."""
    h = net.a(x).flatten(0, 1)
    weight, chosen = net.gate(h).softmax(1).max(1)
    out = torch.zeros_like(h)
    for number, expert in enumerate(net.experts):
        rows = (chosen == number).nonzero()[:, 0]
        out = out.index_add(0, rows, expert(h[rows]) * weight[rows, None])
    return net.b(out.view(x.shape).sum(1))


def mixture(gate: list[float]) -> dict:
    """Make four experts, of which the last one is never chosen where the gate says so."""
    parts = {"a": Linear(3, 3), "gate": Linear(3, 4), "experts": ModuleList(Sequential(Linear(3, 3), Tanh()) for _ in range(4)), "b": Linear(3, 4)}
    with torch.no_grad():
        parts["gate"].bias.copy_(torch.tensor(gate))
    return parts


def experts_with_gates(net: Net, x: Tensor) -> Tensor:
    """Send a token of the first sample, all of the second one, and the others to experts that cut features out of what they compute."""
    h, length = net.a(x), x.shape[1]
    rows, numbers = h.flatten(0, 1), torch.arange(x.shape[:2].numel())
    out = torch.zeros_like(rows)
    for chosen in (numbers[:1], numbers[length : 2 * length], torch.cat([numbers[1:length], numbers[2 * length :]])):
        up, gate = net.up(rows[chosen]).chunk(2, -1)
        out = out.index_add(0, chosen, up * gate.sigmoid() + net.up(rows[chosen])[..., ::2])
    return net.b((out.view(h.shape) + h).sum(1))


def choices_of_experts(net: Net, x: Tensor) -> Tensor:
    """Multiply what experts make of a token of each sample with one of as many weights as there are samples: both tell on which axis these lie."""
    rows, numbers = net.a(x).flatten(0, 1), torch.arange(len(x))
    weights, out = net.gate(rows).softmax(1), torch.zeros_like(rows)
    for turn, expert in enumerate((net.one, net.other)):
        tokens, choices = x.shape[1] * numbers + turn, (numbers + turn) % 3
        out = out.index_add(0, tokens, expert(rows[tokens]).tanh() * weights[tokens, choices, None])
    return net.b(out.view(len(x), -1, 3).sum(1))


def checkpointed(net: Net, x: Tensor) -> Tensor:
    """Run a part again in the backward pass."""
    return net.b(checkpoint(lambda h: net.tanh(net.inner(h)), net.a(x), use_reentrant=False))


def checkpointed_functional(net: Net, x: Tensor) -> Tensor:
    """Run a part again that is more than modules."""
    return net.b(checkpoint(lambda h: net.inner(h).tanh() * h * net.scale, net.a(x), use_reentrant=False))


class Largest(Module):
    """Give each node the largest entries of what its edges bring: a module without rule, with more rows in than out."""

    def forward(self, edges: Tensor, nodes: Tensor, size: int) -> Tensor:
        return edges.new_zeros(size, edges.shape[1]).scatter_reduce(0, nodes[:, None].expand_as(edges), edges, "amax", include_self=False)


def messages(net: Net, x: Tensor) -> Tensor:
    """Pass messages along the five edges of graphs of three nodes each."""
    first = 3 * torch.arange(len(x))[:, None]
    sources, targets = ((first + torch.tensor(ends)).flatten() for ends in ([0, 1, 2, 0, 1], [1, 2, 0, 2, 0]))
    h = net.a(x).tanh().flatten(0, 1)
    h = net.largest(h[sources], targets, len(h)).sin()
    return net.b(h.view(x.shape[0], 3, -1).sum(1))


class Product(Function):
    """The product of two parameters, which it keeps."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        one, other = ctx.saved_tensors
        return g * other, g * one


graph(
    "weight that a function makes",
    lambda net, x: net.b(F.linear(net.a(x), Product.apply(net.p, net.q)).tanh()),
    layers(3, 3, 4, p=parameter(3, 3), q=parameter(3, 3)),
    (3,),
    *CHAIN,
    "curved",
)
graph("messages along edges", messages, layers(2, 3, 4, largest=Largest), (3, 2))
graph("weight of functional_call", doubled, layers(3, 3, 4), (3,), *CHAIN)
graph("parameters of functional_call", own_parameters, layers(3, 3, 4, tanh=Tanh), (3,), "chain")
graph("experts without tokens", experts, partial(mixture, [0.0, 0.0, 0.0, -50.0]), (2, 3), *CHAIN)
graph(
    "as many choices of experts as samples",
    choices_of_experts,
    lambda: {"a": Linear(3, 3), "gate": Linear(3, 3), "one": Linear(3, 3), "other": Linear(3, 3), "b": Linear(3, 4)},
    (2, 3),
    *CHAIN,
)
graph("experts that cut features out", experts_with_gates, layers(3, 3, 4, up=partial(Linear, 3, 6)), (5, 3), *CHAIN)
graph("prototypes", lambda net, x: net.b(torch.cdist(net.a(x), net.points)), layers(3, 3, 4, points=parameter(3, 3)), (3,), *CHAIN, "curved")
graph(
    "parameter through a layer",
    lambda net, x: net.b(net.a(x) + net.norm(net.point)),
    layers(3, 3, 4, norm=lambda: LayerNorm(3), point=parameter(3)),
    (3,),
    *CHAIN,
    "curved",
)
graph("checkpoint", checkpointed, layers(3, 3, 4, inner=lambda: Linear(3, 3), tanh=Tanh), (3,), "chain")
graph("checkpoint, functional", checkpointed_functional, layers(3, 3, 4, inner=lambda: Linear(3, 3), scale=parameter(3)), (3,), *CHAIN)
for _name, _parametrization in (("weight norm", partial(weight_norm, dim=1)), ("orthogonal", orthogonal)):
    graph(
        _name,
        lambda net, x: net.b(net.tanh(net.a(x))),
        lambda parametrized=_parametrization: {"a": parametrized(Linear(3, 3)), "tanh": Tanh(), "b": Linear(3, 4)},
        (3,),
        *CHAIN,
        "curved",
    )
graph(
    "merged update of low rank",
    lambda net, x: net.b(F.linear(net.a(x), net.w + net.up @ net.down).tanh()),
    layers(3, 3, 4, w=parameter(3, 3), up=parameter(3, 2), down=parameter(2, 3)),
    (3,),
    *CHAIN,
)
