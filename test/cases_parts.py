"""Rows of the table of cases: products with parts of a weight, as in attention to another sequence, with matrices of a stack, and in ``einsum``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from math import prod

import torch
from cases_nets import Net, graph, layers, parameter
from torch import Tensor
from torch.nn import Linear, Module, MultiheadAttention, Parameter, Tanh, TransformerDecoderLayer
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


def routed_data(net: Net, x: Tensor) -> Tensor:
    """Send data to experts, of which the first one gets a single sample."""
    first, out = torch.arange(len(x)) == 0, x.new_zeros(*x.shape[:2], 3)
    gates = F.linear(x.mean(1), net.gate).sigmoid()
    for i, mask in enumerate((first, ~first)):
        out[mask] += (x[mask] @ net.stack[i]) * gates[mask, i, None, None]
    return net.b(out.tanh().mean(1))


def sorted_tokens(net: Net, x: Tensor, expert: Callable[[Net, Tensor, int], Tensor]) -> Tensor:
    """Sort tokens by the expert to which they are sent; the last one gets none, and tokens of a sample go to several."""
    h = net.a(x).flatten(0, 1)
    chosen = (torch.arange(len(h)) * 5) % 7 % 3
    order = chosen.argsort(stable=True)
    parts = h[order].split(chosen.bincount(minlength=4).tolist())
    out = torch.cat([expert(net, part, i) for i, part in enumerate(parts)]).tanh()
    return net.b(torch.zeros_like(h).index_add(0, order, out).view_as(x).mean(1))


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
for _name, _size, _function in (
    ("outputs", (), lambda net, h: torch.tanh(h @ net.w[:, :2]) @ net.w[:, 2:4].t() + h @ net.w[:, 3:]),
    ("inputs", (), lambda net, h: F.linear(h[..., :1], net.w[:, :1]) + F.linear(h, net.w[:, 3:]) + F.linear(h[..., 1:], net.w[:, 1:3])),
    ("split", (), lambda net, h: sum(F.linear(h, part) for part in net.w.split(3, 1))),
    ("that are rows", (6, 3), lambda net, h: h @ net.w.t()[:3].tanh() + h[..., :2] @ net.v[:2] + h @ net.v[1:4] + h @ net.v[3:]),
    (
        "with a bias",
        (6,),
        lambda net, h: F.linear(torch.addmm(net.v[:2], h.flatten(0, -2), net.w[:, :2]).tanh(), net.w[:, 2:4], net.b.bias[:3]),
    ),
):
    graph(
        f"columns of a weight, {_name}",
        lambda net, x, function=_function: net.b(function(net, net.a(x)).tanh().view(len(x), -1, 3).mean(1)),
        layers(3, 3, w=parameter(3, 6), **({"v": parameter(*_size)} if _size else {}), b=lambda: Linear(3, 4)),
        (2, 3),
        *USES,
    )
for _turned in (True, False):
    _stack = layers(3, 3, stack=parameter(2, 3, 3), shifts=parameter(2, 3), b=lambda: Linear(3, 4))
    graph(f"matrices of a stack{', turned' * _turned}", partial(experts, turned=_turned), _stack, (3,), *USES)
    _stack = layers(3, 3, stack=parameter(2, 3, 3), **({"shifts": parameter(2, 3)} if _turned else {}), b=lambda: Linear(3, 4))
    graph(f"matrices of a stack, for some samples each{', turned' * _turned}", partial(routed, turned=_turned), _stack, (3,), *USES)
for _name, _expert in (
    ("", lambda net, h, i: h @ net.stack[i]),
    (", turned", lambda net, h, i: F.linear(h, net.stack[i], net.shifts[i])),
    (", turned twice", lambda net, h, i: F.linear(h, net.stack[i].t(), net.shifts[i])),
):
    _stack = layers(3, 3, stack=parameter(4, 3, 3), **({"shifts": parameter(4, 3)} if _name else {}), b=lambda: Linear(3, 4))
    graph(f"matrices of a stack, for sorted tokens{_name}", partial(sorted_tokens, expert=_expert), _stack, (4, 3), *USES)
graph(
    "matrices of a stack, for data of some samples each",
    routed_data,
    layers(stack=parameter(2, 3, 3), gate=parameter(2, 3), b=lambda: Linear(3, 4)),
    (2, 3),
    *USES,
)
graph("matrices of a stack, and all of it", stack_in_two_ways, layers(3, 3, stack=parameter(3, 3, 3), b=lambda: Linear(3, 4)), (3,), *USES)
graph(
    "rows of a weight, decoder with time first",
    decoder,
    lambda: {"a": Linear(3, 4), "d": TransformerDecoderLayer(4, 2, 3, dropout=0.0), "tanh": Tanh(), "b": Linear(4, 4)},
    (3, 3),
    "other parameters",
)


class Known(Module):
    """Constants beside a weight: as many rows in all as make up several for each sample, as far as shapes tell."""

    def __init__(self, *shape: int, frozen: bool = False) -> None:
        super().__init__()
        rows = torch.linspace(-1, 1, prod(shape), dtype=torch.get_default_dtype()).view(shape)
        if frozen:
            self.rows = Parameter(rows, requires_grad=False)
        else:
            self.register_buffer("rows", rows)

    def forward(self, new: Tensor) -> Tensor:
        return torch.cat([self.rows, new])


def beside(name: str, forward: Callable[[Net, Tensor], Tensor], known: tuple[int, ...], weight: tuple[int, ...], *sizes: int, **more: object) -> None:
    """Add a model with a weight that is joined with a constant.

    Args:
        name: Name.
        forward: Takes the model and its input.
        known: Shape of the constant.
        weight: Shape of the weight.
        sizes: Shape of the input.
        more: Further parts.
    """
    parts = layers(3, 3, known=lambda: Known(*known, frozen="frozen" in name), w=parameter(*weight), **{"b": lambda: Linear(4, 4), **more})
    graph(f"a {name} beside a constant", forward, parts, sizes, *USES)


def classes(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = F.linear(net.a(x).tanh(), net.known(net.w), torch.cat([x.new_ones(57), net.s]))
    return net.b(torch.cat([h[..., :1], h[..., -3:]], -1))


beside("weight", classes, (57, 3), (3, 3), 3, s=parameter(3))
beside("weight and a bias, one by one,", lambda net, x: torch.stack([classes(net, sample) for sample in x]), (57, 3), (3, 3), 3, s=parameter(3))
beside("weight for positions", lambda net, x: net.b((net.a(x) @ net.known(net.w).t().contiguous())[..., -4:]).tanh().mean(1), (56, 3), (4, 3), 2, 3)
beside("weight, frozen,", lambda net, x: net.b(torch.einsum("bd,kd->bk", net.a(x), net.known(net.w[:4]))[:, -4:].tanh()), (56, 3), (5, 3), 3)
beside("kernel", lambda net, x: net.b(F.conv1d(net.a(x).mT, net.known(net.w))[:, -4:].tanh().mean(-1)), (57, 3, 1), (3, 3, 1), 2, 3)
beside(
    "table",
    lambda net, x: net.b(net.a(F.embedding(59 - (2 * x.sigmoid()).long(), net.known(net.w))).tanh().mean(1)),
    (58, 3),
    (2, 3),
    3,
    b=lambda: Linear(3, 4),
)


def through(equation: str, shape: tuple[int, ...], weight: tuple[int, ...]) -> tuple[Callable, Callable[[], dict]]:
    """Put an ``einsum`` with a parameter between two Linear layers.

    Args:
        equation: Of a tensor of samples, and a parameter.
        shape: Shape of the tensor, for one sample.
        weight: Shape of the parameter.

    Returns:
        The function and the parts of a model.
    """
    size = torch.einsum(equation, torch.zeros(1, *shape), torch.zeros(weight)).numel()

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(torch.einsum(equation, net.a(x).reshape(-1, *shape), net.w).reshape(len(x), -1).tanh())

    return forward, layers(3, torch.Size(shape).numel(), w=parameter(*weight), b=lambda: Linear(size, 4))


for _equation, _given, _weight in (
    ("bi,oi->bo", (3,), (2, 3)),
    ("bi,io->bo", (3,), (3, 2)),
    ("btd,dhk->bthk", (2, 3), (3, 2, 2)),
    ("btd,hdk->bhtk", (2, 3), (2, 3, 2)),
    ("btd,hkd->bhtk", (2, 3), (2, 2, 3)),
    ("bthk,hkd->btd", (2, 2, 2), (2, 2, 3)),
    ("bhtk,khd->btd", (2, 2, 3), (3, 2, 2)),
    ("bi,eio->beo", (3,), (2, 3, 2)),
    ("bei,eio->beo", (2, 3), (2, 3, 2)),
    ("bei,eoi->beo", (2, 3), (2, 2, 3)),
    ("bei,ieo->beo", (2, 3), (3, 2, 2)),
    ("bid,iod->bo", (2, 3), (2, 2, 3)),
    ("bti,io->bto", (2, 3), (3, 1)),
    ("bei,eip->bep", (2, 3), (2, 3, 1)),
    ("bi,pi->bp", (3,), (1, 3)),
    ("bthd,otgdh->btgo", (2, 3, 2), (3, 2, 2, 2, 3)),
    ("bci,oc->boi", (3, 2), (2, 3)),
    ("bhij,ojhi->bo", (2, 2, 2), (3, 2, 2, 2)),
):
    graph(f"einsum {_equation}", *through(_equation, _given, _weight), (3,), *USES)
for _name, _made in (
    ("weight on the left", lambda net, h: (net.w @ h.mT).mT),
    ("weight on the left, flat", lambda net, h: (net.w @ h.flatten(0, 1).t()).t().unflatten(0, (-1, 2))),
    ("weight on the left, positions first", lambda net, h: (net.w @ h.transpose(0, 1).flatten(0, 1).t()).t().unflatten(0, (2, -1)).transpose(0, 1)),
    ("weight in several notations", lambda net, h: torch.einsum("oi,bti->bto", net.w, F.linear(h, net.w).sin()) + (net.w @ h.mT).mT),
    ("stack in several notations", lambda net, h: torch.bmm(h.flatten(0, 1)[None], net.w[None])[0].unflatten(0, (-1, 2)).sin() @ net.w),
    ("multiple of a weight", lambda net, h: F.linear(h, net.w * 0.5)),
    ("negative multiple of a weight that is turned", lambda net, h: h @ -(net.w.T / 3)),
    ("multiple of a weight, and the weight", lambda net, h: F.linear(F.linear(h, 2 * net.w).tanh(), net.w)),
    ("multiple of a weight, used twice", lambda net, h: reduce(lambda made, w: F.linear(made, w).tanh(), [net.w * 2] * 2, h)),
    ("multiple of a weight, and its entries", lambda net, h: torch.stack([F.linear(h, w) * w[0] for w in [net.w * 2]]).sum(0)),
    ("weight in another shape", lambda net, h: F.linear(h, net.w.flatten().view(3, 3), net.s)),
):
    graph(
        _name,
        lambda net, x, made=_made: net.b(made(net, net.a(x)).tanh().mean(1)),
        layers(3, 3, w=parameter(3, 3), b=lambda: Linear(3, 4), **({"s": parameter(3)} if "shape" in _name else {})),
        (2, 3),
        *USES,
    )
for _name, _made, _shape in (
    ("product", lambda h, w: h @ w, (2, 3, 2)),
    ("of as many matrices as samples", lambda h, w: h @ w, (3, 3, 2)),
    ("transposed", lambda h, w: h @ w.mT, (2, 2, 3)),
    ("on the left", lambda h, w: (w @ h.mT).mT, (2, 2, 3)),
    ("on the left, transposed", lambda h, w: (w.mT @ h.mT).mT, (2, 3, 2)),
    ("with one axis less", lambda h, w: h @ w.unflatten(1, (2, 2)).transpose(0, 1), (3, 4)),
    ("of inputs of all", lambda h, w: h.mean(1, keepdim=True) @ w, (2, 3, 2)),
    ("computed", lambda h, w: h @ w.tanh(), (2, 3, 2)),
    ("for several axes", lambda h, w: h[:, None].sin() @ w, (2, 3, 2)),
):
    graph(
        f"stack for stacks of inputs, {_name}",
        lambda net, x, made=_made: net.b(made(net.a(x).unflatten(1, (-1, 2)), net.w).flatten(1).tanh()),
        layers(3, 3, w=parameter(*_shape), b=lambda n=4 * (3 if "samples" in _name else 2): Linear(n, 4)),
        (6 if "samples" in _name else 4, 3),
        *USES,
    )


def one_by_one(attention: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """Let a model attend to data, one sample after the other: products of what belongs to one sample are none with weights."""
    return lambda net, x: torch.cat([net.b(attention(net, sample).mean(-2).tanh()) for sample in x.split(1)])


PROJECTIONS = layers(3, q=parameter(3, 3), k=parameter(3, 3), v=parameter(3, 3), b=lambda: Linear(3, 4))
for _name, _project in (
    ("linear", F.linear),
    ("product", torch.matmul),
    ("einsum", partial(torch.einsum, "bti,oi->bto")),
    ("weight on the left", lambda x, w: (w @ x[0].mT).mT[None]),
):
    graph(
        f"attention to data, one by one, {_name}",
        one_by_one(lambda net, x, p=_project: torch.softmax(p(x[:, :1].cos(), net.q) @ p(x.cos(), net.k).mT, -1) @ p(x.sin(), net.v)),
        PROJECTIONS,
        (2, 3),
        *USES,
    )
graph(
    "attention to data, one by one, module",
    one_by_one(lambda net, x: net.m(x[0], x[0], x[0])[0][None]),
    lambda: {"m": MultiheadAttention(3, 1), "b": Linear(3, 4)},
    (2, 3),
    *USES,
)
