"""Rows of the table of cases: products with parts of a weight, as attention to another sequence has them, and with matrices of a stack."""

from __future__ import annotations

from functools import partial

import torch
from cases_nets import Net, graph, layers, parameter
from torch import Tensor
from torch.nn import Linear, Tanh, TransformerDecoderLayer
from torch.nn import functional as F

USES = ("reused", "nested", "other parameters")
SIX = layers(3, 3, w=parameter(6, 3), b=lambda: Linear(6, 4))
SHIFTED = layers(3, 3, w=parameter(6, 3), s=parameter(6), b=lambda: Linear(6, 4))


def two_and_four(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    (q, kv), (s, t) = net.w.split([2, 4]), net.s.split([2, 4])
    return net.b(torch.cat([F.linear(net.a(x), q, s), F.linear(x.cos(), kv, t)], -1).tanh())


def chunks(net: Net, x: Tensor, bias: bool = True) -> Tensor:  # noqa: D103
    biases = net.s.chunk(3) if bias else [None] * 3
    q, k, v = (F.linear(given, w, s) for given, w, s in zip((net.a(x), x[:, :1], x.sin()), net.w.chunk(3), biases, strict=True))
    return net.b(torch.cat([q.mean(1), k.mean(1).tanh(), v.mean(1)], -1))


def slices(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = F.linear(net.a(x), net.w[-4:], net.s[-4:]).tanh()
    return net.b(torch.cat([F.linear(h[:, :3], net.w[:2]), h], -1))


def overlapping(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(torch.cat([F.linear(x, net.w[:4]), F.linear(net.a(x).tanh(), net.w[2:])], -1)[..., :6].mean(1))


def whole_and_part(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(F.linear(F.linear(net.a(x), net.w[:3]).tanh(), net.w))


def rows_of_one(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(F.linear(net.a(x), net.w[2:4], net.s[2:4]).tanh())


def experts(net: Net, x: Tensor, turned: bool) -> Tensor:  # noqa: D103
    h = net.a(x)
    for w, s in zip(net.stack.unbind(), net.shifts, strict=True):
        h = torch.tanh(F.linear(h, w, s) if turned else torch.addmm(s, h, w))
    return net.b(h)


def routed(net: Net, x: Tensor, turned: bool = True) -> Tensor:  # noqa: D103
    h, chosen = net.a(x), torch.arange(len(x)) % 2
    out = torch.zeros_like(h)
    for i in range(2):
        out[chosen == i] = F.linear(h[chosen == i], net.stack[i], net.shifts[i]) if turned else h[chosen == i] @ net.stack[i]
    return net.b(out.tanh())


def stack_in_two_ways(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = torch.bmm(net.a(x).expand(3, -1, -1), net.stack)
    return net.b((h[0] @ net.stack[1] + h[1] @ net.stack[-1]).tanh() + h[2])


def decoder(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x).transpose(0, 1)
    return net.b(net.d(h[:2], h[1:]).mean(0))


graph("rows of a weight, two and four", two_and_four, SHIFTED, (3,), *USES)
graph("rows of a weight, two and four, positions", lambda n, x: two_and_four(n, x).mean(1), SHIFTED, (2, 3), *USES)
graph("rows of a weight, chunks", chunks, SHIFTED, (3, 3), *USES)
graph("rows of a weight, no bias", partial(chunks, bias=False), SIX, (3, 3), *USES)
graph("rows of a weight, slices", slices, SHIFTED, (3,), *USES)
graph("rows of a weight, overlapping", overlapping, SIX, (2, 3), *USES)
graph("rows of a weight, and all of it", whole_and_part, SIX, (3,), *USES)
graph("rows of a weight, of some", rows_of_one, layers(3, 3, w=parameter(6, 3), s=parameter(6), b=lambda: Linear(2, 4)), (3,), *USES)
for _turned in (True, False):
    _stack = layers(3, 3, stack=parameter(2, 3, 3), shifts=parameter(2, 3), b=lambda: Linear(3, 4))
    graph(f"matrices of a stack{', turned' * _turned}", partial(experts, turned=_turned), _stack, (3,), *USES)
    _stack = layers(3, 3, stack=parameter(2, 3, 3), **({"shifts": parameter(2, 3)} if _turned else {}), b=lambda: Linear(3, 4))
    graph(f"matrices of a stack, for some samples each{', turned' * _turned}", partial(routed, turned=_turned), _stack, (3,), *USES)
graph("matrices of a stack, and all of it", stack_in_two_ways, layers(3, 3, stack=parameter(3, 3, 3), b=lambda: Linear(3, 4)), (3,), *USES)
graph(
    "rows of a weight, decoder with time first",
    decoder,
    lambda: {"a": Linear(3, 4), "d": TransformerDecoderLayer(4, 2, 3, dropout=0.0), "tanh": Tanh(), "b": Linear(4, 4)},
    (3, 3),
    "other parameters",
)
