"""Rows of the table of cases: products with matrices, attention, transformers, recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
from cases_nets import Net, graph, layers, parameter
from oracle import Problem
from table import add, classify
from torch import Tensor, nn, randn
from torch.nn import Linear, Module, Tanh
from torch.nn import functional as F

# --- products with matrices -------------------------------------------------------------------------------------------------------------------

BOTH = ("nested", "other parameters")
graph("matrix on positions", lambda net, x: net.a(net.tanh(x @ net.matrix).mean(1)), layers(2, 4, tanh=Tanh, matrix=parameter(3, 2)), (2, 3), *BOTH)
graph(
    "matrix on folded positions",
    lambda net, x: net.a(net.tanh((x.reshape(-1, 3) @ net.matrix + net.bias).reshape(len(x), -1))),
    layers(4, 4, tanh=Tanh, matrix=parameter(3, 2), bias=parameter(2)),
    (2, 3),
    *BOTH,
)
graph(
    "matrix, samples second",
    lambda net, x: net.a(net.tanh(x.transpose(0, 1) @ net.matrix).mean(0)),
    layers(2, 4, tanh=Tanh, matrix=parameter(3, 2)),
    (2, 3),
    *BOTH,
)
for _name, _transform, _back in (
    ("of a transform", torch.fft.rfft, partial(torch.fft.irfft, n=2)),
    ("of a complex transform", torch.fft.fft, lambda h: torch.view_as_real(torch.fft.ifft(h).conj().resolve_conj()).sum(-1)),
    ("of parts", lambda h: torch.complex(h, h.flip(1)), lambda h: torch.view_as_real(h)[..., 1]),
):
    graph(
        f"complex matrices, {_name}",
        lambda net, x, to=_transform, back=_back: net.a(
            back(torch.einsum("bix,iox->box", to(net.b(x).transpose(1, 2)), torch.view_as_complex(net.w))).tanh().flatten(1)
        ),
        layers(4, 4, b=lambda: Linear(3, 3), w=parameter(3, 2, 2, 2)),
        (2, 3),
        "nested",
        "other parameters",
    )


def long_convolution(net: Net, x: Tensor) -> Tensor:
    """Let each channel have a kernel that is a sum of waves, which decay."""
    waves = (-net.r.exp()[..., None] * torch.arange(x.shape[2])).exp()
    kernels = torch.einsum("cs,cst->ct", net.w, waves)[:, None]
    return net.a(F.conv1d(F.pad(x, (x.shape[2] - 1, 0)), kernels, groups=len(kernels)).tanh().mean(2))


for _name, _channels, _states in (("channels", 3, 2), ("states", 2, 3)):
    graph(
        f"long convolution, as many {_name} as samples",
        long_convolution,
        layers(_channels, 4, w=parameter(_channels, _states), r=parameter(_channels, _states)),
        (_channels, 4),
        *BOTH,
    )


graph(
    "convolution of rows of a sample, one channel",
    lambda net, x: net.b(net.c(net.a(x).reshape(-1, 2, 2)).reshape(len(x), -1).tanh()),
    layers(3, 8, c=lambda: nn.Conv1d(2, 1, 2), b=lambda: Linear(2, 4)),
    (3,),
    "reused",
    *BOTH,
)


def own_kernels(net: Net, x: Tensor) -> Tensor:
    """Let each sample have kernels of its own, which mix those of all, as a group of one convolution."""
    kernels = torch.einsum("nk,koit->noit", net.gate(x.mean(2)).softmax(1), net.w).flatten(0, 1)
    return net.a(F.conv1d(net.b(x).flatten(0, 1)[None], kernels, groups=len(x)).view(len(x), 2, -1).tanh().mean(2))


_parts = layers(2, 4, gate=partial(Linear, 2, 2), b=partial(Linear, 4, 4), w=parameter(2, 2, 2, 3))
graph("kernels of each sample", own_kernels, _parts, (2, 4), *BOTH)
for _name, _number, _distances in (
    ("points", 4, torch.cdist),
    ("points, products", 26, lambda z, p: torch.cdist(z, p, compute_mode="use_mm_for_euclid_dist")),
    ("points, sums", 4, partial(torch.cdist, p=1.0)),
    ("points on the left", 4, lambda z, p: torch.cdist(p, z).T),
    ("points, another axis in front", 4, lambda z, p: torch.cdist(z[None], p[None])[0]),
    ("points, another axis in front, on the left", 4, lambda z, p: torch.cdist(p[None], z[None], p=3.0)[0].T),
    ("directions", 4, lambda z, p: F.cosine_similarity(z[:, None], p[None], dim=-1)),
    ("points, two by two", 4, lambda z, p: torch.cdist(z.view(-1, 2, 3), p).flatten(1)),
):
    graph(
        f"distances to {_name}",
        lambda net, x, distances=_distances: net.a(distances(net.b(x), net.p)),
        layers(8 if "two" in _name else _number, 4, b=partial(Linear, 2, 6 if "two" in _name else 3), p=parameter(_number, 3)),
        (2,),
        "nested",
        "other parameters",
        *["curved"] * (_name != "directions"),
    )
for _name, _select, _shape in (
    ("matrices of a stack", lambda p, i: p[i], (4, 2, 3)),
    ("along the second axis", lambda p, i: p[:, i].movedim(0, -2), (2, 4, 3)),
    ("by two numbers", lambda p, i: p[i % 2, i], (2, 4, 3)),
    ("of the transposed", lambda p, i: p.mT[:, i].movedim(0, -1), (4, 3)),
    ("of each matrix", lambda p, i: p.index_select(1, i.flatten()).unflatten(1, i.shape).movedim(0, -1), (3, 4)),
):
    graph(
        f"entries that are selected, {_name}",
        lambda net, x, select=_select: net.a(
            (net.b(x)[..., None, :] * select(net.p, i := x.sum(2).mul(3).long() % 4).reshape(*i.shape, -1, 3)).tanh().sum((1, 2))
        ),
        layers(3, 4, b=lambda: Linear(3, 3), p=parameter(*_shape)),
        (2, 3),
        "nested",
        "other parameters",
    )
for _name, _function, _factor in (
    ("on positions", lambda net, x: net.b(x).tanh() @ net.v, {}),
    ("samples second", lambda net, x: (net.b(x).tanh().transpose(0, 1) @ net.v).T, {}),
    ("that is computed", lambda net, x: net.b(x).tanh() @ net.v.exp(), {}),
    ("that is selected", lambda net, x: net.b(x).tanh() @ net.m[1], {"m": parameter(2, 3)}),
    ("of each sample", lambda net, x: torch.stack([rows @ net.v for rows in net.b(x).tanh()]), {}),
    ("twice", lambda net, x: (h := net.b(x)) @ net.v + (h + (h @ net.v)[..., None]).tanh() @ net.v, {}),
):
    graph(
        f"vector {_name}",
        lambda net, x, function=_function: net.a(function(net, x).tanh()),
        layers(2, 4, b=lambda: Linear(3, 3), **_factor or {"v": parameter(3)}),
        (2, 3),
        "nested",
        "reused",
        "other parameters",
    )
for _name, _function in (
    ("vector of each sample", lambda net, h: torch.stack([torch.mv(net.w, row) for row in h])),
    ("vector of each sample, twice", lambda net, h: torch.stack([net.w @ (net.w @ row).tanh() for row in h])),
    ("vector of each sample, transposed", lambda net, h: torch.stack([net.w.t() @ h[i] for i in range(len(h))])),
    ("samples last, with a bias", lambda net, h: torch.addmm(net.s, net.w, h.t()).t()),
    ("samples last, with a bias, coupled", lambda net, h: torch.addmm(net.s, net.w, (h @ net.w.t()).tanh().t()).t()),
):
    graph(
        f"matrix and {_name}",
        lambda net, x, function=_function: net.a(function(net, net.b(x)).tanh()),
        layers(3, 4, b=lambda: Linear(3, 3), w=parameter(3, 3), **({"s": parameter(3, 1)} if "bias" in _name else {})),
        (3,),
        "nested",
        "reused",
        "other parameters",
    )
for _name, _rows in (
    ("one after the other", list),
    ("by numbers", lambda p: [p[0], p[-2], p[2]]),
    ("as slices", lambda p: [p[i : i + 1].squeeze(0) for i in range(3)]),
    ("more than once", lambda p: [p[0], p[2], p[0]]),
):
    graph(
        f"vectors of a stack, {_name}",
        lambda net, x, rows=_rows: net.a(
            reduce(lambda h, vectors: h + vectors[1] * torch.tanh(h @ vectors[0])[..., None], zip(rows(net.m), rows(net.p), strict=True), net.b(x))
        ),
        layers(3, 4, b=lambda: Linear(3, 3), m=parameter(3, 3), p=parameter(3, 3)),
        (3,),
        "nested",
        "reused",
        "other parameters",
    )
graph(
    "stack of matrices",
    lambda net, x: net.a(net.tanh(torch.bmm(x.transpose(0, 1), net.stack)).sum(0)),
    layers(2, 4, tanh=Tanh, stack=parameter(2, 3, 2)),
    (2, 3),
    *BOTH,
)
graph(
    "stack of matrices, broadcast",
    lambda net, x: net.a(net.tanh(x @ net.stack).sum(0)),
    layers(2, 4, tanh=Tanh, stack=parameter(2, 3, 2)),
    (3,),
    *BOTH,
)
graph(
    "stack of matrices on positions",
    lambda net, x: net.a(net.tanh(torch.bmm(net.b(x).permute(2, 0, 1).reshape(2, -1, 1), net.stack)).reshape(2, len(x), 2, 2).sum((0, 2))),
    lambda: {"a": Linear(2, 4), "b": Linear(3, 2), "tanh": Tanh(), "stack": parameter(2, 1, 2)()},
    (2, 3),
    *BOTH,
)
for _name, _bias, _shape in (
    ("biases", lambda net: net.bias, (2, 1, 2)),
    ("biases without an axis of rows", lambda net: net.bias[:, None], (2, 2)),
    ("biases of one stack of several", lambda net: net.bias[:2].unsqueeze(1), (3, 2)),
    ("biases that are computed", lambda net: net.bias.exp()[:, None], (2, 2)),
):
    graph(
        f"stack of matrices, {_name}",
        lambda net, x, bias=_bias: net.a(net.tanh(torch.baddbmm(bias(net), net.b(x).transpose(0, 1), net.stack)).sum(0)),
        layers(2, 4, tanh=Tanh, stack=parameter(2, 3, 2), bias=parameter(*_shape), b=lambda: Linear(3, 3)),
        (2, 3),
        "nested",
        *(["other parameters"] if "computed" in _name else []),
    )
graph(
    "stack of frozen matrices, biases",
    lambda net, x: net.a(net.tanh(torch.baddbmm(net.bias, x.transpose(0, 1), torch.ones_like(net.bias).expand(2, 3, 2))).sum(0)),
    layers(2, 4, tanh=Tanh, bias=parameter(2, 1, 2)),
    (2, 3),
    "nested",
)
graph(
    "stack of matrices, activations added",
    lambda net, x: net.a(net.tanh(torch.baddbmm(net.c(x).transpose(0, 1), net.b(x).transpose(0, 1), net.stack)).sum(0)),
    layers(2, 4, tanh=Tanh, stack=parameter(2, 3, 2), b=lambda: Linear(3, 3), c=lambda: Linear(3, 2)),
    (2, 3),
    *BOTH,
)
graph(
    "matrix that is computed",
    lambda net, x: net.a(net.tanh(F.linear(x, net.matrix * net.scale, net.bias.exp()))),
    layers(2, 4, tanh=Tanh, matrix=parameter(2, 3), scale=parameter(2, 1), bias=parameter(2)),
    (3,),
    *BOTH,
)
graph(
    "matrix of low rank",
    lambda net, x: net.a(x) + net.tanh(x) @ (net.down @ net.up),
    layers(3, 4, tanh=Tanh, down=parameter(3, 2), up=parameter(2, 4)),
    (3,),
    *BOTH,
)
graph(
    "rows of a matrix",
    lambda net, x: net.a(net.tanh(F.linear(x, net.matrix[:2]) + F.linear(x.flip(1), net.matrix[1:]))),
    layers(2, 4, tanh=Tanh, matrix=parameter(3, 3)),
    (3,),
    *BOTH,
)
graph(
    "square matrix, as it is and transposed",
    lambda net, x: net.a(net.tanh(x @ net.matrix) @ net.matrix.T),
    layers(3, 4, tanh=Tanh, matrix=parameter(3, 3)),
    (3,),
    "reused",
    "nested",
    "two orientations",
)
graph(
    "transposed matrix used twice",
    lambda net, x: net.a(twice(net, x, net.matrix.T)),
    layers(3, 4, tanh=Tanh, matrix=parameter(3, 3)),
    (3,),
    "reused",
    *BOTH,
)
graph(
    "einsum",
    lambda net, x: net.a(net.tanh(torch.einsum("nti,oi->no", x, net.matrix))),
    layers(2, 4, tanh=Tanh, matrix=parameter(2, 3)),
    (2, 3),
    *BOTH,
)


def twice(net: Net, x: Tensor, matrix: Tensor) -> Tensor:  # noqa: D103
    return net.tanh(x @ matrix) @ matrix


# --- attention and transformers ---------------------------------------------------------------------------------------------------------------


class SelfAttention(Module):
    """Multi-head attention of a sequence to itself."""

    def __init__(self, **options: object) -> None:
        """Make the attention.

        Args:
            options: Passed on.
        """
        super().__init__()
        self.need_weights = options.pop("need_weights", False)
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Attend.

        Args:
            x: ``[N, T, 4]``, or ``[T, N, 4]``.

        Returns:
            Tensor of the same shape.
        """
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def sequence(make: Callable[[], Module], N: int, T: int = 2, batch_first: bool = True, features: int = 2) -> Problem:
    """Put a module between two layers, and the mean over positions behind.

    Args:
        make: Makes a module that maps sequences to sequences.
        N: Batch size.
        T: Length of the sequences.
        batch_first: Whether the samples lie on axis 0 inside.
        features: Number of features of the sequences.

    Returns:
        Problem.
    """

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        h = net.own(h if batch_first else h.transpose(0, 1))
        h = h[0] if isinstance(h, tuple) else h
        return net.b(h.mean(1 if batch_first else 0))

    return classify(Net(forward, a=Linear(3, features), own=make(), b=Linear(features, 4)), randn(N, T, 3))


TRANSFORMER = {"d_model": 4, "nhead": 2, "dim_feedforward": 3}
for _name, _make, _first in (
    ("attention", partial(SelfAttention, batch_first=True), True),
    ("attention, sequence first", SelfAttention, False),
    ("attention, weights", partial(SelfAttention, batch_first=True, need_weights=True), True),
    ("attention, no bias", partial(SelfAttention, batch_first=True, bias=False), True),
    ("attention, more keys", partial(SelfAttention, batch_first=True, add_bias_kv=True, add_zero_attn=True), True),
    ("encoder layer", partial(nn.TransformerEncoderLayer, **TRANSFORMER, dropout=0.0, batch_first=True), True),
    ("encoder layer, dropout", partial(nn.TransformerEncoderLayer, **TRANSFORMER, dropout=0.2, batch_first=True, activation="gelu"), True),
    (
        "encoder layer, norm first",
        partial(nn.TransformerEncoderLayer, **TRANSFORMER, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"),
        True,
    ),
    ("encoder layer, sequence first", partial(nn.TransformerEncoderLayer, **TRANSFORMER, dropout=0.0), False),
):
    add(f"transformer: {_name}", lambda N, make=_make, first=_first: sequence(make, N, 2, first, 4), "graph", "other parameters")


def translate(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.b(net.own(h, net.tanh(h[:, :2])).mean(1))


for _name, _make in (
    ("decoder layer", partial(nn.TransformerDecoderLayer, **TRANSFORMER, dropout=0.0, batch_first=True)),
    (
        "encoder and decoder",
        partial(nn.Transformer, 4, 2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=3, dropout=0.0, batch_first=True),
    ),
):
    graph(
        f"transformer: {_name}",
        translate,
        lambda make=_make: {"a": Linear(3, 4), "own": make(), "tanh": Tanh(), "b": Linear(4, 4)},
        (3, 3),
        "other parameters",
    )

# --- recurrent networks -----------------------------------------------------------------------------------------------------------------------

for _name, _make, _first in (
    ("RNN", partial(nn.RNN, 2, 2, batch_first=True), True),
    ("RNN, relu, sequence first", partial(nn.RNN, 2, 2, nonlinearity="relu"), False),
    ("RNN, two layers", partial(nn.RNN, 2, 2, num_layers=2, batch_first=True), True),
    ("LSTM", partial(nn.LSTM, 2, 2, batch_first=True), True),
    ("LSTM, sequence first, no bias", partial(nn.LSTM, 2, 2, bias=False), False),
    ("LSTM, both directions", partial(nn.LSTM, 2, 1, bidirectional=True, batch_first=True), True),
    ("LSTM, two layers, dropout", partial(nn.LSTM, 2, 2, num_layers=2, dropout=0.4, batch_first=True), True),
    ("LSTM, projection", partial(nn.LSTM, 2, 3, proj_size=2, batch_first=True), True),
    ("GRU", partial(nn.GRU, 2, 2, batch_first=True), True),
    ("GRU, both directions, sequence first", partial(nn.GRU, 2, 1, bidirectional=True), False),
):
    add(f"recurrent: {_name}", lambda N, make=_make, first=_first: sequence(make, N, 3, first), "graph", "reused", "nested", "other parameters")


def given_states(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    first = h.mean(1)[None]
    return net.b(net.own(h, (first, first.tanh()))[0][:, -1])


def own_loop(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    state = x.new_zeros(len(x), 2)
    for row in net.a(x).unbind(1):
        state = net.own(row, state)
        state = state[0] if isinstance(state, tuple) else state
    return net.b(state)


def own_lstm_loop(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    states = None
    for row in net.a(x).unbind(1):
        states = net.own(row, states)
    return net.b(states[0] + states[1])


def packed(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    lengths = [3, 2, 1][: len(x)]
    out, last = net.own(nn.utils.rnn.pack_padded_sequence(net.a(x), lengths, batch_first=True))
    padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    return net.b(padded.sum(1) + last[0])


for _name, _forward, _own in (
    ("given states", given_states, partial(nn.LSTM, 2, 2, batch_first=True)),
    ("RNNCell", own_loop, partial(nn.RNNCell, 2, 2)),
    ("GRUCell", own_loop, partial(nn.GRUCell, 2, 2)),
    ("LSTMCell", own_lstm_loop, partial(nn.LSTMCell, 2, 2)),
    ("packed GRU", packed, partial(nn.GRU, 2, 2, batch_first=True)),
):
    graph(
        f"recurrent: {_name}",
        _forward,
        lambda own=_own: {"a": Linear(3, 2), "own": own(), "b": Linear(2, 4)},
        (3, 3),
        "reused",
        "nested",
        "other parameters",
    )
