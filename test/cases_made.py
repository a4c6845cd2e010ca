"""Rows of the table of cases: weights that are made of parameters, as by masks, noise, low-rank updates, norms or shifts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases_nets import Net, graph, parameter
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

MADE = ("nested", "other parameters")


def made(name: str, weight: Callable[[Net], Tensor], parts: dict[str, Callable], shape: tuple[int, ...], *tags: str, turned: bool = False) -> None:
    """Add a model whose first layer has a weight that is made of parameters.

    Args:
        name: Name.
        weight: Makes the weight ``[3, 4]`` of parts, ``[4, 3]`` if it is turned.
        parts: What makes the parts.
        shape: Shape of the input of one sample.
        tags: See ``table.py``.
        turned: Whether the product is ``x @ weight``.
    """

    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = (x @ weight(net) if turned else F.linear(x, weight(net))).tanh()
        return net.b(hidden.mean(tuple(range(1, hidden.dim() - 1))) if hidden.dim() > 2 else hidden)

    graph(f"weight: {name}", forward, lambda: {part: make() for part, make in parts.items()} | {"b": Linear(3, 4)}, shape, *MADE, *tags)


def mask(like: Tensor) -> Tensor:
    return torch.ones_like(like.detach()).tril()


def noise(like: Tensor) -> Tensor:
    return torch.ones_like(like.detach()).cumsum(0).cumsum(1).sin()


def by_lengths(net: Net) -> Tensor:
    directions = net.w + 0.5 * net.up @ net.down
    return net.g * directions / directions.norm(dim=1, keepdim=True)


def low_rank_of_length_one(net: Net) -> Tensor:
    weight = net.c + net.up @ net.down
    return net.g * weight / weight.norm(dim=1, keepdim=True)


def reflected(net: Net) -> Tensor:
    weight = net.w
    for v in net.v:
        weight = weight - 2 * torch.outer(weight @ v, v) / (v @ v + 1)
    return weight


def standardized(net: Net) -> Tensor:
    return (net.w - net.w.mean(1, keepdim=True)) / net.w.std(1, keepdim=True)


def shifted(net: Net, x: Tensor) -> Tensor:
    return net.b((F.linear(x, net.w + noise(net.w), 1 + net.one) @ (net.v - noise(net.v))).tanh())


def shifted_kernel(net: Net, x: Tensor) -> Tensor:
    return net.b(F.conv1d(x, net.k + noise(net.k), net.one - 1, padding=1).tanh().mean(2))


def shifted_norm(net: Net, x: Tensor) -> Tensor:
    return net.b(F.layer_norm(net.a(x), (3,), 1 + net.one, net.other - 1).tanh())


def shifted_and_used(net: Net, x: Tensor) -> Tensor:
    weight = net.w + noise(net.w)
    return net.b((F.linear(x, weight).tanh() + x @ net.w.t() + weight.sum(1)).tanh())


def by_torch(norm: Callable[..., Module], **options: int) -> Callable[[], Linear]:
    return lambda: norm(Linear(4, 3), **options).eval()


def masked_kernel(net: Net, x: Tensor) -> Tensor:
    kernel = net.k * mask(net.k)
    return net.b(F.conv1d(x, kernel.exp() - 1, net.k.sum((1, 2)), padding=1).tanh().mean(2))


def scaled_kernels(net: Net, x: Tensor) -> Tensor:
    return net.b(F.conv1d(x, net.k * net.s, padding=1).tanh().mean(2))


def blocks(net: Net, x: Tensor) -> Tensor:
    weight = net.w.view(2, 2, 3, 2) * net.s[:, None, :, None]
    return net.b(F.linear(x, weight.view(4, 6)).tanh())


def in_two_places(net: Net, x: Tensor) -> Tensor:
    weight = net.w * net.g
    return net.b((F.linear(x, weight).tanh() + F.linear(x.cos(), weight)).tanh())


def in_two_layers(net: Net, x: Tensor) -> Tensor:
    return net.b((F.linear(x, net.w * net.g).tanh() + F.linear(x.cos(), net.w.tanh())).tanh())


def biased(net: Net, x: Tensor) -> Tensor:
    return net.b(F.linear(x, net.w * mask(net.w), net.one + net.other + 1).tanh())


MATRIX, ROWS, COLUMNS = {"w": parameter(3, 4)}, {"g": parameter(3, 1)}, {"h": parameter(4)}
FROZEN = {"c": lambda: parameter(3, 4)().requires_grad_(False)}
LOW_RANK = {"up": parameter(3, 2), "down": parameter(2, 4)}
NORMED = {
    "weight norm": by_torch(weight_norm),
    "weight norm of columns": by_torch(weight_norm, dim=1),
    "weight norm of all": by_torch(weight_norm, dim=None),
    "spectral norm": by_torch(spectral_norm),
}
NO_HESSIAN = ("weight norm of columns", "weight norm of all")

made("masked", lambda net: net.w * mask(net.w), MATRIX, (4,))
made("masked, positions", lambda net: net.w * mask(net.w), MATRIX, (2, 4))
made("triangles", lambda net: net.w.tril(1) + 0.5 * net.up.triu() @ net.down, MATRIX | LOW_RANK, (2, 4))
made("masked, turned", lambda net: net.w * mask(net.w), {"w": parameter(4, 3)}, (4,), turned=True)
made("masked, turned twice", lambda net: (net.w.t() * mask(net.w.t())).t() * 0.5, MATRIX, (2, 4))
made("noise", lambda net: net.w + F.softplus(net.s) * noise(net.s), MATRIX | {"s": parameter(3, 4)}, (4,))
made("noise, positions", lambda net: net.w + F.softplus(net.s) * noise(net.s), MATRIX | {"s": parameter(3, 4)}, (3, 4))
made("low rank", lambda net: net.w + 0.5 * net.up @ net.down, MATRIX | LOW_RANK, (4,))
made("low rank, positions", lambda net: net.w + 0.5 * net.up @ net.down, MATRIX | LOW_RANK, (2, 4))
made("three factors", lambda net: (net.up * net.s) @ net.down, LOW_RANK | {"s": parameter(2)}, (2, 4))
TURNED = {"v": parameter(4, 2), "s": parameter(2), "u": parameter(3, 2)}
made("factors transposed", lambda net: (net.v * net.s) @ net.u.t(), TURNED, (4,), turned=True)
made("rows, columns and a number", lambda net: net.w * net.g * net.h / net.n, MATRIX | ROWS | COLUMNS | {"n": parameter()}, (4,))
made("rows of positions", lambda net: net.w * net.g * net.h, MATRIX | ROWS | COLUMNS, (2, 4))
made("masked, rows and columns", lambda net: (net.w * mask(net.w)).tanh() * net.g * net.h, MATRIX | ROWS | COLUMNS, (4,))
made("columns of a masked product", lambda net: (net.up @ net.down * mask(net.w) + net.w) * net.h, MATRIX | LOW_RANK | COLUMNS, (4,))
made("lengths and directions", by_lengths, MATRIX | LOW_RANK | ROWS, (4,))
made("standardized", standardized, MATRIX, (2, 4))
made("standardized, no positions", standardized, MATRIX, (4,))
made("normalized rows", lambda net: F.normalize(net.w, dim=1) + net.w, MATRIX, (4,))
made("normalized columns", lambda net: F.normalize(net.w, dim=0), MATRIX, (4,))
made("of length one", lambda net: net.w / net.w.norm(), MATRIX, (4,))
made("of length one, positions", lambda net: net.w / net.w.norm(), MATRIX, (2, 4))
made("by its largest entries", lambda net: net.w / (net.w.abs().amax(1, keepdim=True) + net.w.abs().max()), MATRIX, (4,))
made("around its mean", lambda net: (net.w.t() - net.w.mean(1) + net.w.sum(0)[:3] * net.w.var()).t(), MATRIX, (4,))
made("of probabilities", lambda net: net.w.softmax(1), MATRIX, (4,))
made("of probabilities, turned", lambda net: net.w.softmax(-2) * net.w.logsumexp(0), {"w": parameter(4, 3)}, (4,), turned=True)
made("symmetric", lambda net: ((net.w + net.w.t()) / 2)[:3] + 0, {"w": parameter(4, 4)}, (4,))
made("antisymmetric", lambda net: net.w.triu(1) - net.w.triu(1).t(), {"w": parameter(3, 3)}, (3,), turned=True)
made("symmetric, positions", lambda net: net.w @ (net.s + net.s.t()), MATRIX | {"s": parameter(4, 4)}, (2, 4))
made("projected", lambda net: net.w - (net.w @ net.c)[:, None] * net.c, MATRIX | {"c": lambda: parameter(4)().requires_grad_(False)}, (4,))
made("of its products", lambda net: net.w @ net.w.t(), {"w": parameter(3, 3)}, (3,))
made("gated by itself", lambda net: net.w * net.w.sigmoid(), MATRIX, (4,))
made("used twice", lambda net: net.w.tanh() + net.w * 2, MATRIX, (4,))
made("Kronecker product", lambda net: torch.kron(net.one, net.other), {"one": parameter(3, 2), "other": parameter(1, 2)}, (4,))
made("of a vector", lambda net: (net.v * 2).view(3, 4).tanh(), {"v": parameter(12)}, (2, 4))
made("one row for all", lambda net: net.h.tanh().expand(3, 4) * noise(net.h.expand(3, 4)), COLUMNS, (4,))
made("constants divided by columns", lambda net: net.c / net.h.exp(), COLUMNS | FROZEN, (4,))
made("norms of single entries", lambda net: net.c * (net.g / (net.g.norm(dim=1, keepdim=True) + 1)), ROWS | FROZEN, (4,))
made("rows below each other", lambda net: torch.cat([net.one.tanh(), net.other * 2]), {"one": parameter(2, 4), "other": parameter(1, 4)}, (4,))
GROUPED = MATRIX | {"s": parameter(3, 2, 1)}
made("groups with scales", lambda net: (net.w.view(3, 2, 2) * net.s).view(3, 4), GROUPED, (4,))
made("groups with scales, positions", lambda net: (net.w.view(3, 2, 2) * net.s).view(3, 4), GROUPED, (2, 4))
TURNED_GROUPS = {"w": parameter(4, 3), "s": parameter(2, 1, 3)}
made("groups of the turned", lambda net: (net.w.view(2, 2, 3) * net.s).flatten(0, 1), TURNED_GROUPS, (4,), turned=True)
made("groups of rows", lambda net: (net.w.view(2, 2, 3) * net.s).view(4, 3).t(), {"w": parameter(4, 3), "s": parameter(2, 1, 1)}, (4,))
SPLINES = {"w": parameter(3, 2, 2), "s": parameter(3, 2), "z": parameter(2, 1)}
made("splines", lambda net: (net.w * net.s[..., None] + net.z).flatten(1), SPLINES, (4,))
made("quantized", lambda net: ((net.w.view(3, 2, 2).sin() - net.z) * net.s).view(3, 4) * net.g, GROUPED | ROWS | {"z": parameter(3, 2, 1)}, (4,))
made("rolled", lambda net: net.w.roll(1, 0) + net.w.flip(1), MATRIX, (2, 4))
made("summed up", lambda net: net.w.cumsum(1).roll(2, 1), MATRIX, (4,))
made("rows that are chosen", lambda net: net.w[torch.tensor([1, 0, 1])] * net.g, {"w": parameter(2, 4)} | ROWS, (4,))
made("columns that are chosen", lambda net: net.w.index_select(1, torch.tensor([1, 0, 1, 1])), {"w": parameter(3, 2)}, (2, 4))
BESIDE = {"one": parameter(3, 1), "other": parameter(3, 3)}
made("columns beside each other", lambda net: torch.cat([net.one * noise(net.one), net.other], 1), BESIDE, (4,))
made("padded", lambda net: F.pad(net.w * noise(net.w), (0, 0, 1, 0)), {"w": parameter(2, 4)}, (4,))
made("with another first row", lambda net: torch.cat([net.w[:1] * noise(net.w[:1]), net.w[1:].sin()]), MATRIX, (4,))
made("stack of rows", lambda net: torch.stack([net.one, net.other, net.one * net.other]), {"one": parameter(4), "other": parameter(4)}, (4,))
made("block diagonal", lambda net: torch.block_diag(net.one.sin(), net.other), {"one": parameter(2, 3), "other": parameter(1, 1)}, (4,))
PRODUCTS = LOW_RANK | {"left": parameter(3, 2), "right": parameter(2, 4)}
made("Hadamard product of low ranks", lambda net: (net.up @ net.down) * (net.left @ net.right), PRODUCTS, (4,))
made("Hadamard product of low ranks, positions", lambda net: (net.up @ net.down) * (net.left @ net.right), PRODUCTS, (2, 4))
made("low rank of length one", low_rank_of_length_one, LOW_RANK | FROZEN | ROWS, (4,))
TRAIN = {"one": parameter(1, 2, 2), "other": parameter(2, 3, 2)}
made("tensor train", lambda net: torch.einsum("iar,rbj->ibaj", net.one, net.other).reshape(3, 4), TRAIN, (4,))
made("Cayley transform", lambda net: torch.linalg.solve(net.s - noise(net.s), net.s + 1)[:3], {"s": parameter(4, 4)}, (4,), "curved")
made("solved from the right", lambda net: torch.linalg.solve(net.s, net.w, left=False), MATRIX | {"s": parameter(4, 4)}, (2, 4), "curved")
made("inverse", lambda net: net.w @ torch.linalg.inv(net.s), MATRIX | {"s": parameter(4, 4)}, (4,), "curved")
made("reflections", reflected, {"w": parameter(3, 4), "v": parameter(6, 4)}, (4,))
made("reflections, positions", reflected, {"w": parameter(3, 4), "v": parameter(6, 4)}, (2, 4))
for label, layer in NORMED.items():
    tags = (*MADE, "curved") if label in NO_HESSIAN else MADE
    graph(f"weight: {label}", lambda net, x: net.b(net.a(x).tanh()), lambda layer=layer: {"a": layer(), "b": Linear(3, 4)}, (4,), *tags)
graph("weight: masked kernel", masked_kernel, lambda: {"k": parameter(3, 2, 3)(), "b": Linear(3, 4)}, (2, 4), *MADE)
KERNELS = {"k": parameter(3, 2, 3), "s": parameter(3, 2, 1)}
graph("weight: scaled kernels", scaled_kernels, lambda: {name: make() for name, make in KERNELS.items()} | {"b": Linear(3, 4)}, (2, 4), *MADE)
graph("weight: blocks with scales", blocks, lambda: {"w": parameter(4, 6)(), "s": parameter(2, 3)(), "b": Linear(4, 4)}, (6,), *MADE)
graph("weight: in two places", in_two_places, lambda: {"w": parameter(3, 4)(), "g": parameter(3, 1)(), "b": Linear(3, 4)}, (4,), *MADE)
graph("weight: in two layers", in_two_layers, lambda: {"w": parameter(3, 4)(), "g": parameter(3, 1)(), "b": Linear(3, 4)}, (4,), *MADE)
graph(
    "weight: biases of two parameters",
    biased,
    lambda: {"w": parameter(3, 4)(), "one": parameter(3)(), "other": parameter(3)(), "b": Linear(3, 4)},
    (4,),
    *MADE,
)
graph("weight: shifted", shifted, lambda: {"w": parameter(3, 4)(), "one": parameter(3)(), "v": parameter(3, 3)(), "b": Linear(3, 4)}, (4,))
graph("weight: shifted kernel", shifted_kernel, lambda: {"k": parameter(3, 2, 3)(), "one": parameter(3)(), "b": Linear(3, 4)}, (2, 4), "positions")
graph(
    "weight: shifted norm",
    shifted_norm,
    lambda: {"a": Linear(4, 3), "one": parameter(3)(), "other": parameter(3)(), "b": Linear(3, 4)},
    (4,),
    *MADE,
)
graph("weight: shifted and used", shifted_and_used, lambda: {"w": parameter(3, 4)(), "b": Linear(3, 4)}, (4,), *MADE)
