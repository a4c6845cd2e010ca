"""Rows of the table of cases: curved functional operations, products of branches, parameters that are used in curved ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from cases_nets import Net, graph, layers, parameter
from torch import Tensor, rand
from torch.nn import Conv1d, Linear, Module, Parameter, PReLU, RMSNorm, Tanh
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

# --- element-wise functions: all others are in test_curved.py -----------------------------------------------------------------------------------

for _name, _function in (
    ("gelu", F.gelu),
    ("tanh and exp", lambda h: h.tanh().exp()),
    ("power", lambda h: (h.square() + 1) ** 0.7),
    ("in place", lambda h: 3 * F.silu(h, inplace=True).cos_().sigmoid_()),
):
    graph(f"curved: {_name}", lambda net, x, f=_function: net.b(f(net.a(x))), layers(3, 3, 4), (3,))
graph(
    "curved: samples second",
    lambda net, x: net.b(F.gelu(net.a(x.transpose(0, 1))).sin()).transpose(0, 1).mean(1),
    layers(3, 3, 4),
    (2, 3),
)
graph(
    "curved: samples folded",
    lambda net, x: net.b(net.a(x.reshape(-1, 3)).tanh().view(*x.shape[:2], -1)).exp().sum(1).log(),
    layers(3, 3, 4),
    (2, 3),
)

# --- products of branches -----------------------------------------------------------------------------------------------------------------------

TWO = layers(3, 3, c=lambda: Linear(3, 3), out=lambda: Linear(3, 4))


def product(net: Net, x: Tensor, function: object = torch.mul) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.out(function(h.sin(), net.c(h)))


for _name, _function in (
    ("product", torch.mul),
    ("product in place", lambda g, h: h.mul_(g)),
    ("product with a product", lambda g, h: g * h * (g + h)),
    ("quotient", lambda g, h: h / (2 + g)),
    ("square of a branch", lambda g, h: h * h + g),
    ("power of a branch", lambda g, h: (g + 3) ** h),
    ("outer product", lambda g, h: (g[:, :, None] * h[:, None, :2]).sum(2)),
    ("matrix product", lambda g, h: (g[:, :, None] @ h[:, None] @ h[:, :, None]).squeeze(2)),
    ("matrix with itself", lambda g, h: torch.bmm(h.reshape(-1, 3, 1), h.reshape(-1, 1, 3)).sum(2) + g),
    ("data in between", lambda g, h: g * 2 * h.detach() + h * h.new_tensor([1.0, -2.0, 0.5]) * g),
):
    graph(f"curved: {_name}", partial(product, function=_function), TWO, (3,))


def swiglu(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.out(h + net.d(F.silu(net.b(h)) * net.c(h))).mean(1)


SWIGLU = layers(3, 3, b=lambda: Linear(3, 2), c=lambda: Linear(3, 2), d=lambda: Linear(2, 3), out=lambda: Linear(3, 4))
graph("curved: SwiGLU", swiglu, SWIGLU, (2, 3))


def highway(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    gate = torch.sigmoid(net.c(h))
    return net.out(torch.lerp(h, torch.tanh(net.c(h)), gate))


graph("curved: highway", highway, TWO, (3,), "reused")


def lstm(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = c = x.new_zeros(len(x), 2)
    for step in x.unbind(1):
        i, f, g, o = (net.a(step) + net.b(h)).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return net.out(h)


graph("curved: LSTM cell", lstm, lambda: {"a": Linear(2, 8), "b": Linear(2, 8), "out": Linear(2, 4)}, (3, 2), "reused")


def heads(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    q, k, v = (part.unflatten(-1, (2, 1)).transpose(1, 2) for part in (net.q(h), net.k(h), net.v(h)))
    scores = (q @ k.mT).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
    return net.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).mean(1)


def fused_heads(net: Net, x: Tensor, **options: object) -> Tensor:  # noqa: D103
    h = net.a(x)
    q, k, v = (part.unflatten(-1, (-1, 1)).transpose(1, 2) for part in (net.q(h), net.k(h), net.v(h)))
    return net.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)).mean(1)


HEADS = {"q": lambda: Linear(2, 2), "out": lambda: Linear(2, 4)}
BOTH = layers(3, 2, k=lambda: Linear(2, 2), v=lambda: Linear(2, 2), **HEADS)
SHARED = layers(3, 2, k=lambda: Linear(2, 1), v=lambda: Linear(2, 1), **HEADS)
graph("curved: causal attention", heads, BOTH, (3, 3))
graph("curved: fused causal attention", partial(fused_heads, is_causal=True), BOTH, (3, 3))
graph("curved: fused attention, shared heads", partial(fused_heads, enable_gqa=True, scale=0.3), SHARED, (3, 3))
MASK = torch.tensor([[0.0, -1, -torch.inf], [0, 0.5, 0], [1, 0, 0]], dtype=torch.float64)
graph("curved: fused attention, mask", lambda net, x: fused_heads(net, x, attn_mask=MASK.to(x.dtype)), BOTH, (3, 3))

# --- parameters that are used in curved ways ----------------------------------------------------------------------------------------------------

BARE = ("other parameters",)

SCALED = layers(3, 3, 4, tanh=Tanh, p=parameter(3))
for _name, _forward in (
    ("layer scale, used twice", lambda net, x: net.b(x + net.tanh(net.p * net.tanh(net.a(x) * net.p)))),
    ("exponential of a parameter", lambda net, x: net.b(net.tanh(net.a(x)) * net.p.exp())),
    ("exponential of a parameter, upstream, too", lambda net, x: net.b(torch.sin(net.a(x) * net.p.exp()) * net.p)),
    ("square of a parameter", lambda net, x: net.b(net.tanh(net.a(x)) + net.p * net.p)),
    ("parameters divided by their norm", lambda net, x: net.b(net.tanh(net.a(x)) * net.p / net.p.norm())),
    ("softmax of a parameter", lambda net, x: net.b(net.tanh(net.a(x)) * net.p.softmax(0))),
    ("parameter on positions", lambda net, x: net.b((net.a(x).unsqueeze(1) * net.p[:2, None].exp()).sum(1))),
):
    graph(f"curved: {_name}", _forward, SCALED, (3,), *BARE)
graph(
    "curved: normalised weight",
    lambda net, x: net.b(net.tanh(F.linear(net.a(x), net.gain.exp() * F.normalize(net.direction)))),
    layers(3, 3, 4, tanh=Tanh, gain=parameter(3, 1), direction=parameter(3, 3)),
    (3,),
    *BARE,
)
graph(
    "curved: weight norm",  # along other axes, torch fuses it
    lambda net, x: net.b(net.tanh(net.c(net.tanh(net.a(x)).unsqueeze(2)).mean(2))),
    layers(3, 3, 4, tanh=Tanh, c=lambda: weight_norm(Conv1d(3, 3, 2, padding=1), dim=1)),
    (3,),
    *BARE,
)
graph(
    "curved: weight computed from one used upstream",
    lambda net, x: net.b(F.linear(net.tanh(net.a(x)), net.a.weight.sin())),
    layers(3, 3, 4, tanh=Tanh),
    (3,),
    "reused",
    *BARE,
)
graph(
    "curved: convolution twice",
    lambda net, x: net.b(net.c(net.c(x).tanh()).mean(2)),
    lambda: {"c": torch.nn.Conv1d(2, 2, 2), "b": Linear(2, 4)},
    (2, 4),
    "reused",
)
graph("curved: linear twice, positions", lambda net, x: net.b(net.a(net.a(x).tanh())).mean(1), layers(3, 3, 4), (2, 3), "reused")
graph(
    "curved: linear three times, folded",
    lambda net, x: net.b(net.a(net.a(net.a(x.reshape(-1, 3)).tanh())).view(x.shape)).mean(1),
    layers(3, 3, 4),
    (2, 3),
    "reused",
)


class Behind(Module):
    """A normalization, and a weight and a bias that follow it.

    Args:
        norm: The normalization.
    """

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.weight, self.bias = norm, Parameter(rand(3)), Parameter(rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.norm(x) + self.bias


for _name, _layer, _shape in (
    ("PReLU", lambda: PReLU(3), (3,)),
    ("PReLU, positions", lambda: PReLU(1), (2, 3)),
    ("RMSNorm", lambda: RMSNorm(3), (3,)),
    ("RMSNorm, positions", lambda: RMSNorm(3), (2, 3)),
    ("LayerNorm, then its weight", lambda: Behind(lambda x: F.layer_norm(x, (3,))), (2, 3)),
    ("GroupNorm, then its weight", lambda: Behind(lambda x: F.group_norm(x, 1)), (3,)),
):
    graph(
        f"curved: {_name} twice",
        lambda net, x: net.b(net.norm(net.c(net.norm(net.a(x)))).reshape(len(x), -1, 3).mean(1)),
        layers(3, 3, 4, c=lambda: Linear(3, 3), norm=_layer),
        _shape,
        "reused",
    )
