"""Rows of the table of cases: tables in which rows are looked up, and layers with two inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from cases_nets import Net, graph, layers, parameter
from oracle import Problem, Term
from table import add, classify, labels, layer, regress
from torch import Tensor, nn, randint, randn
from torch.nn import CrossEntropyLoss, Flatten, Linear, Module, MSELoss, Sequential, Tanh
from torch.nn import functional as F

TABLE = ("chain", "other parameters")


def lookup(table: Module, *shape: int, features: int = 6) -> Problem:
    """Put a table in front of a net.

    Args:
        table: Module that takes integers below 5.
        shape: Shape of its input.
        features: What a sample has after it.

    Returns:
        Problem.
    """
    return classify(Sequential(table, Flatten(), Tanh(), Linear(features, 4)), randint(5, shape))


def padded(table: Module) -> Module:
    """Give the padding a row other than zero.

    Args:
        table: Table.

    Returns:
        The same table.
    """
    table.weight.data.normal_()
    return table


add("Embedding", lambda N: lookup(nn.Embedding(5, 2), N, 3), *TABLE)
add("Embedding, one index", lambda N: lookup(nn.Embedding(5, 3), N, features=3), *TABLE)
add("Embedding, padding, two axes", lambda N: lookup(padded(nn.Embedding(5, 2, padding_idx=1)), N, 2, 2, features=8), *TABLE)
add("Embedding, max_norm", lambda N: lookup(nn.Embedding(5, 2, max_norm=0.5), N, 3), *TABLE)
add("Embedding, int32", lambda N: regress(Sequential(nn.Embedding(5, 2), Linear(2, 2)), randint(5, (N, 3), dtype=torch.int32)), *TABLE, "extra axes")
add("EmbeddingBag, sum", lambda N: lookup(nn.EmbeddingBag(5, 3, mode="sum"), N, 4, features=3), *TABLE)
add("EmbeddingBag, mean, padding", lambda N: lookup(padded(nn.EmbeddingBag(5, 3, padding_idx=1)), N, 4, features=3), *TABLE)


def tables(*names: str, **more: Module) -> dict:
    """Make the parts of a net with tables ``[5, 3]`` and a Linear on them."""  # noqa: DOC201
    return {**{name: nn.Embedding(5, 3) for name in names}, "tanh": Tanh(), "b": Linear(3, 4), **more}


def indices(x: Tensor) -> Tensor:
    """Make indices below 5 of an input."""  # noqa: DOC201
    return (2 * x).long().abs() % 5


def positions(net: Net, x: Tensor) -> Tensor:
    """Add tables of tokens and of positions."""  # noqa: DOC201
    return net.b(net.tanh(net.token(indices(x)) + net.position(torch.arange(x.shape[1])[None]))).mean(1)


def tied(N: int) -> Problem:
    """Use one table for the input, and transposed for the output."""  # noqa: DOC201
    model = Sequential(nn.Embedding(4, 3), Tanh(), Linear(3, 4, bias=False))
    model[2].weight = model[0].weight
    return classify(model, randint(4, (N,)))


class Recommender(Module):
    """Words of a sequence are looked up, and what is made of them is compared with all words."""

    def __init__(self, make: Callable[[Recommender, Tensor], Tensor]) -> None:
        """Make the parts.

        Args:
            make: Makes vectors ``[N, *, 3]`` of the words.
        """
        super().__init__()
        self.make, self.table, self.a = make, nn.Embedding(5, 3), Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate.

        Args:
            x: Words ``[N, T]``.

        Returns:
            ``[N, 5]``, or ``[N, 5, *]``.
        """
        vectors = self.make(self, x)
        return (vectors @ self.table.weight.T).movedim(-1, 1)


def recommend(N: int, make: Callable[[Recommender, Tensor], Tensor]) -> Problem:
    """Recommend a word, of sequences in which words come repeatedly."""  # noqa: DOC201
    model, x = Recommender(make), randint(5, (N, 6))
    out = model(x)
    return Problem(model, x, [Term(CrossEntropyLoss(), randint(5, (N, *out.shape[2:])))])


def two_heads(N: int) -> Problem:
    """Look words up for one loss, and compare with all words for another one."""  # noqa: DOC201
    model, x = Recommender(lambda net, x: net.a(x)), 2 * randn(N, 3)

    def output(model: Recommender, x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x), model.a(model.table(indices(x)).tanh().mean(1))

    return Problem(model, x, [Term(CrossEntropyLoss(), labels(N)), Term(MSELoss(), randn(N, 3), 1)], output)


def bag(mode: str, **options: object) -> dict:
    """Make the parts of a net with a bag."""  # noqa: DOC201
    return {"bag": nn.EmbeddingBag(5, 3, mode=mode, **options), "b": Linear(3, 4)}


def bag_of_list(net: Net, x: Tensor, weighted: bool = False) -> Tensor:
    """Hand bags of different lengths over, the last of them empty."""  # noqa: DOC201
    flat = indices(x).flatten()
    offsets = (5 * torch.arange(len(x) + net.bag.include_last_offset)).clamp(max=len(flat))
    return net.b(net.bag(flat, offsets, x.flatten().sin() if weighted else None))


graph("position table", positions, lambda: tables("token", "position"), (3,), "other parameters")
graph(
    "Embedding twice",
    lambda net, x: net.b(net.tanh(net.t(indices(x[:, 0])) + net.t(indices(x[:, 1])))),
    lambda: tables("t"),
    (2,),
    "other parameters",
    "reused",
)
graph("Embedding, samples second", lambda net, x: net.b(net.t(indices(x).T)).mean(0), lambda: tables("t"), (2,), "other parameters")
graph(
    "Embedding, samples folded",
    lambda net, x: net.b(net.t(indices(x).flatten())).view(len(x), 2, 4).sum(1),
    lambda: tables("t"),
    (2,),
    "other parameters",
)
graph(
    "Embedding of one sample for all",
    lambda net, x: net.b(net.a(x) * net.t(torch.tensor([3]))),
    lambda: tables("t", a=Linear(2, 3)),
    (2,),
    "other parameters",
)
RECOMMENDERS: dict[str, Callable[[Recommender, Tensor], Tensor]] = {
    "last word": lambda net, x: net.a(net.table(x[:, -1]).tanh()),
    "mean": lambda net, x: net.a(net.table(x).tanh()).tanh().mean(1),
    "two last words": lambda net, x: net.a(net.table(x).tanh()).tanh()[:, -2:],
    "each word": lambda net, x: net.a(net.table(x).tanh()),
    "two lookups": lambda net, x: net.a(net.table(x[:, :3]).mean(1)).tanh() + net.table(x[:, 3]),
    "two products": lambda net, x: net.a(net.table(x).mean(1)) + (net.table(x[:, 2]).tanh() @ net.table.weight.T).softmax(1) @ net.table.weight,
}
for _name, _make in RECOMMENDERS.items():
    add(f"tied table, {_name}", partial(recommend, make=_make), "reused", "other parameters")
add("tied table, two losses", two_heads, "reused", "other parameters")
add("tied tables", tied, "reused", "nested", "two orientations", "other parameters")
graph("EmbeddingBag of lists", bag_of_list, lambda: bag("mean", include_last_offset=True), (3,), "other parameters", "chain")
graph(
    "EmbeddingBag of lists, weights",
    partial(bag_of_list, weighted=True),
    lambda: bag("sum", padding_idx=0),
    (3,),
    "other parameters",
    "chain",
)
graph(
    "EmbeddingBag, weights with parameters",
    lambda net, x: net.b(net.bag(indices(x), per_sample_weights=net.a(x))),
    lambda: bag("sum") | {"a": Linear(2, 2)},
    (2,),
    "other parameters",
    "curved",
)
graph("EmbeddingBag, max", lambda net, x: net.b(net.bag(indices(x))), lambda: bag("max"), (3,), "other parameters", "curved")

graph(
    "Bilinear, second input",
    lambda net, x: net.bilinear(x[:, :2], net.a(x)),
    lambda: {"a": Linear(3, 3), "bilinear": nn.Bilinear(2, 3, 4)},
    (3,),
    "other parameters",
)
graph(
    "Bilinear, both inputs",
    lambda net, x: net.bilinear(net.tanh(net.a(x)), net.b(x)),
    lambda: {"a": Linear(3, 2), "b": Linear(3, 3), "tanh": Tanh(), "bilinear": nn.Bilinear(2, 3, 4)},
    (3,),
    "other parameters",
)
graph(
    "Bilinear, one tensor twice",
    lambda net, x: net.bilinear(*[0.1 * net.a(x)] * 2),
    lambda: {"a": Linear(3, 3), "bilinear": nn.Bilinear(3, 3, 4)},
    (3,),
    "other parameters",
    "curved",
)
graph(
    "Bilinear, data only",
    lambda net, x: net.b(net.bilinear(x, x)),
    lambda: {"bilinear": nn.Bilinear(3, 3, 2, bias=False), "b": Linear(2, 4)},
    (3,),
    "other parameters",
    "chain",
)
graph(
    "Bilinear, extra axis",
    lambda net, x: net.b(net.bilinear(net.a(x), x).flatten(1)),
    lambda: {"a": Linear(3, 2), "bilinear": nn.Bilinear(2, 3, 2), "b": Linear(4, 4)},
    (2, 3),
    "other parameters",
)

layer("Bilinear", partial(nn.Bilinear, 3, 2, 4), (3,), lambda N: (randn(N, 2, dtype=torch.float64),))
layer("Bilinear, no bias, extra axes", partial(nn.Bilinear, 2, 3, 1, bias=False), (2, 1, 2), lambda N: (randn(N, 2, 1, 3, dtype=torch.float64),))


PLACES = torch.tensor([[0, 3], [-2, 3]])
"""Numbers of rows that all samples look up, one of them counted from the end."""


def attended(net: Net, h: Tensor, x: Tensor) -> Tensor:  # noqa: D103
    scores = h @ h.mT + net.p[PLACES.flatten()].view(2, 2, 3).permute(2, 0, 1)[:, None]  # heads first, as for relative positions
    return scores.softmax(-1).mean(0) @ h


BARE: dict[str, tuple[Callable[[Net, Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "bare positions": (lambda net, h, x: h + net.p, (2, 3)),
    "bare positions, an axis in front": (lambda net, h, x: net.p - h, (1, 2, 3)),
    "bare positions, on the input": (lambda net, h, x: net.a(torch.sin(x + net.p.unsqueeze(0))), (2, 3)),
    "bare positions, in place": (lambda net, h, x: h.sin().add_(net.p[:, :2]), (1, 2, 3)),
    "bare positions, one by one": (lambda net, h, x: torch.stack([sample + net.p for sample in h]), (2, 3)),
    "bare positions, on the input, row by row": (lambda net, h, x: torch.stack([net.a(x[:, t] + net.p[t]).sin() for t in (0, 1)], 1), (5, 3)),
    "bare positions, rows for each sample": (lambda net, h, x: torch.stack([a + net.p[i % 3 : i % 3 + 2] for i, a in enumerate(h)]), (4, 3)),
    "bare positions, the first ones": (lambda net, h, x: h + net.p[:, : h.shape[1]], (1, 4, 3)),
    "bare positions, from the end": (lambda net, h, x: h + net.p[-2:].unsqueeze(0).expand(len(h), -1, -1), (4, 3)),
    "bare positions, overlapping": (lambda net, h, x: h + net.p[:2] + net.p[1:3] - net.p[4], (5, 3)),
    "bare positions, in two parts": (lambda net, h, x: torch.stack([a + b for a, b in zip(h.unbind(1), net.p.split(1), strict=True)], 1), (2, 3)),
    "bare positions, another table added": (lambda net, h, x: h + (net.p[:2] + net.p[2:]), (4, 3)),
    "columns of a bare table": (lambda net, h, x: torch.cat([h[..., :1], h[..., 1:] + net.p[:, 1:]], -1), (2, 3)),
    "bare tokens, expanded": (lambda net, h, x: torch.cat([net.p.expand(len(x), -1, -1), h], 1), (3, 3)),
    "bare tokens, repeated": (lambda net, h, x: torch.cat([h, net.p.repeat(len(x), 1, 1)], 1), (1, 2, 3)),
    "rows of a bare table": (lambda net, h, x: h + net.p[indices(x[..., 0])], (5, 3)),
    "rows of a bare table, from the end": (lambda net, h, x: h * net.p[indices(x[..., 0]) - 5], (5, 3)),
    "rows of a bare table, the same for all": (lambda net, h, x: h + net.p[PLACES[0]], (5, 3)),
    "rows of a bare table, selected": (lambda net, h, x: h + torch.index_select(net.p, 0, indices(x[..., 1]).flatten()).view_as(h), (5, 3)),
    "columns of a bare table, selected": (lambda net, h, x: h + torch.index_select(net.p, -1, torch.tensor([2, 0, 0])), (2, 3)),
    "rows of a bare table, one a sample": (lambda net, h, x: torch.tanh(h * net.p[indices(x[:, 0, 0])].unsqueeze(1)), (5, 3)),
    "rows of a bare table, samples second": (lambda net, h, x: h + net.p[indices(x[..., 0]).T].transpose(0, 1), (5, 3)),
    "rows of a bare table, one by one": (lambda net, h, x: torch.stack([a + net.p[i] for a, i in zip(h, indices(x[..., 0]), strict=True)]), (5, 3)),
    "rows of a bare table, twice": (lambda net, h, x: h + net.p[indices(x[..., 0])] * net.p[PLACES[1]], (5, 3)),
    "rows of a bare table, and an embedding": (lambda net, h, x: h + net.p[PLACES[0]] + F.embedding(indices(x[..., 0]), net.p), (5, 3)),
    "rows of a bare table, between positions": (attended, (5, 3)),
}
"""Activations ``[N, 2, 3]``, a table as a bare parameter, and what becomes of them."""
for _name, (_forward, _shape) in BARE.items():
    graph(
        _name,
        lambda net, x, forward=_forward: net.b(forward(net, net.a(x), x).tanh().mean(1)),
        layers(3, 3, p=parameter(*_shape), b=lambda: Linear(3, 4)),
        (2, 3),
        "reused",
        "nested",
        *(["other parameters"] if _name.startswith("columns") else []),  # refused
    )


MADE: dict[str, Callable[[Net], Tensor]] = {
    "normalized": lambda net: F.normalize(net.p, dim=1),
    "log_softmax": lambda net: net.p.log_softmax(0),
    "standardized": lambda net: (net.p - net.p.mean(0)) / net.p.std(0).clamp(min=0.1),
    "mixed by a buffer": lambda net: net.p + net.mixing.mixing @ net.p,
}
"""Tables ``[5, 3]`` that are made of a parameter."""


class Mixing(Module):
    """A matrix that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.randn(5, 5) / 5)


def ends_of_edges(net: Net, x: Tensor, made: Callable[[Net], Tensor]) -> Tensor:
    """Look up two rows for each sample, one of which is another sample's, too."""  # noqa: DOC201
    table, first = made(net), torch.arange(len(x))
    return net.b((net.a(x) + table[first]).tanh() * table[(2 * first + 1) % 5].tanh())


for _name, _made in MADE.items():
    _parts = layers(3, 3, p=parameter(5, 3), mixing=Mixing, b=lambda: Linear(3, 4))
    graph(f"rows of a table for ends of edges, {_name}", partial(ends_of_edges, made=_made), _parts, (3,), "nested", "other parameters")


def positions_of_two_losses(N: int) -> Problem:  # noqa: D103
    model = Net(lambda net, x: net.b((net.a(x) + net.p).tanh()).mean(1), **layers(3, 3, p=parameter(1, 2, 3), b=lambda: Linear(3, 4))())
    return Problem(model, randn(N, 2, 3), [Term(CrossEntropyLoss(), labels(N)), Term(MSELoss(), randn(N, 4), scale=0.5)])


add("bare positions, two losses", positions_of_two_losses, "graph", "reused", "nested", "special loss")
