"""Models written from their papers, in the usual way: functional and in-place operations, shared weights, dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from oracle import Problem, Term
from table import classify, labels, regress
from torch import Tensor, nn, randint, randn
from torch.nn import Conv2d, CrossEntropyLoss, Embedding, Linear, Module, ModuleList, Parameter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Model(NamedTuple):
    """A row of the table of models.

    Attributes:
        make: Builds the problem for a batch size.
        tags: ``no factors``: a parameter has no Kronecker factors, at least where there are several samples; ``curved``: the diagonal of the
            Hessian is refused for some; ``single``: the model computes in single precision inside; ``slow``: it is left to the slow tests, which
            look at the first order and the GGN.
    """

    make: Callable[[int], Problem]
    tags: frozenset[str]


MODELS: dict[str, Model] = {}


def model(name: str, make: Callable[[int], Problem], *tags: str) -> None:
    """Add a row."""
    assert name not in MODELS, name
    MODELS[name] = Model(make, frozenset(tags))


def language(make: Callable[[], Module], words: int, length: int, scores: Callable[[Module, Tensor], Tensor]) -> Callable[[int], Problem]:
    """Let a model predict a word at each position: scores ``[N, T, V]``, which the loss takes as ``[N, V, T]``."""

    def build(N: int) -> Problem:
        x, terms = randint(words, (N, length)), [Term(CrossEntropyLoss(), labels(N, length, classes=words))]
        return Problem(make().eval(), x, terms, output=lambda net, x: scores(net, x).transpose(1, 2))

    return build


# --- images -----------------------------------------------------------------------------------------------------------------------------------


class PreActivation(Module):
    """A residual block, normalised before activations in place (He et al. 2016)."""

    def __init__(self, channels: int, norm: Callable[[int], Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(channels), norm(channels)
        self.conv1, self.conv2 = Conv2d(channels, channels, 3, padding=1, bias=False), Conv2d(channels, channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.relu(self.norm1(x)))
        h = self.conv2(F.relu_(self.norm2(h)))
        h += x
        return h


class ResNet(Module):
    """Two such blocks."""

    def __init__(self, norm: Callable[[int], Module]) -> None:
        super().__init__()
        self.stem = Conv2d(3, 4, 3, padding=1)
        self.blocks = ModuleList(PreActivation(4, norm) for _ in range(2))
        self.norm, self.head = norm(4), Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(F.relu(self.norm(x), inplace=True), 1).flatten(1))


class DenseNet(Module):
    """A block in which each layer sees the outputs of all layers before it (Huang et al. 2017)."""

    def __init__(self, growth: int, layers: int) -> None:
        super().__init__()
        self.norms = ModuleList(nn.BatchNorm2d(3 + i * growth) for i in range(layers))
        self.convs = ModuleList(Conv2d(3 + i * growth, growth, 3, padding=1, bias=False) for i in range(layers))
        self.transition, self.head = Conv2d(3 + layers * growth, 4, 1), Linear(4 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        h = F.avg_pool2d(self.transition(torch.cat(features, 1)), 2)
        return self.head(h.flatten(1))


class UNet(Module):
    """Down, up, and a skip in between (Ronneberger et al. 2015): one class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.bottom = Conv2d(2, 3, 3, padding=1), Conv2d(3, 4, 3, padding=1)
        self.up, self.right, self.head = nn.ConvTranspose2d(4, 3, 2, stride=2), Conv2d(6, 3, 3, padding=1), Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = F.relu(self.left(x))
        bottom = F.relu(self.bottom(F.max_pool2d(left, 2)))
        return self.head(F.relu(self.right(torch.cat([left, self.up(bottom)], dim=1))))


class Attention(Module):
    """Self-attention with all projections in one matrix, and an optional table of relative positions (Shaw et al. 2018; Liu et al. 2021)."""

    def __init__(self, width: int, heads: int, length: int | None = None) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, Linear(width, 3 * width), Linear(width, width)
        self.table = None
        if length is not None:
            self.table = Parameter(randn(2 * length - 1, heads))
            positions = torch.arange(length)
            self.register_buffer("offsets", positions[:, None] - positions + length - 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.table is None:
            h = F.scaled_dot_product_attention(q, k, v)
        else:
            bias = self.table[self.offsets.flatten()].view(*self.offsets.shape, -1).permute(2, 0, 1)
            h = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
        return self.out(h.transpose(1, 2).flatten(2))


class LayerScale(Module):
    """A factor for each feature (Touvron et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = Parameter(0.1 * randn(width) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class VisionTransformer(Module):
    """Patches, a class token and a table of positions (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 4, heads: int = 2, relative: bool = False) -> None:
        super().__init__()
        self.patches = Conv2d(3, width, 2, stride=2)
        self.token, self.positions = Parameter(randn(1, 1, width)), Parameter(randn(1, 5, width))
        self.norm1, self.norm2, self.norm = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.scale1 = Attention(width, heads, 5 if relative else None), LayerScale(width)
        self.mlp, self.scale2 = nn.Sequential(Linear(width, 6), nn.GELU(), Linear(6, width)), LayerScale(width)
        self.head = Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        x = x + self.scale1(self.attention(self.norm1(x)))
        x = x + self.scale2(self.mlp(self.norm2(x)))
        return self.head(self.norm(x)[:, 0])


class Siamese(Module):
    """One net for two images, compared by distance (Bromley et al. 1993)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), Linear(12, 3))
        self.head = Linear(3, 4)

    def forward(self, pair: Tensor) -> Tensor:
        one, other = self.net(pair[:, 0]), self.net(pair[:, 1])
        return self.head((one - other).abs())


# --- sequences --------------------------------------------------------------------------------------------------------------------------------


class SwiGLU(Module):
    """A gated layer (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = Linear(width, hidden, bias=False), Linear(width, hidden, bias=False), Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class EncoderDecoder(Module):
    """Cross-attention; one table for the words of both sides and for the output (Vaswani et al. 2017; Press & Wolf 2017)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.scale = Embedding(words, width), width**0.5
        self.encoder = nn.TransformerEncoderLayer(width, 2, 6, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 6, batch_first=True)
        self.head = Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.words(source) * self.scale)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=memory.dtype)
        return self.head(self.decoder(self.words(target) * self.scale, memory, tgt_mask=mask))


class RecurrentLanguageModel(Module):
    """Embedding, LSTM and a layer of scores, perhaps with the weight of the embedding (Zaremba et al. 2014)."""

    def __init__(self, words: int, width: int, tied: bool) -> None:
        super().__init__()
        self.words, self.lstm, self.head = Embedding(words, width), nn.LSTM(width, width, batch_first=True), Linear(width, words)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(x))[0])


class Positions(Embedding):
    """A table of positions that is given the words, of which it reads the shape (as in BART, Lewis et al. 2020)."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(torch.arange(words.shape[1]))


class BagOfWords(Module):
    """A mean over words at positions."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.positions, self.head = Embedding(words, width), Positions(length, width), Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.words(x) + self.positions(x)).mean(1))


class LoRA(Module):
    """An update of low rank to a frozen layer (Hu et al. 2022)."""

    def __init__(self, base: Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = Parameter(randn(rank, base.in_features)), Parameter(randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.A.T @ self.B.T)


class Checkpointed(Module):
    """Blocks that are run again in the backward pass instead of keeping their activations (Chen et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = ModuleList(nn.Sequential(Linear(3, 3), nn.Tanh(), Linear(3, 3)) for _ in range(2))
        self.head = Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@dataclass
class Output:
    """What a model returns.

    Attributes:
        scores: Of classes.
        details: Everything else.
    """

    scores: Tensor
    details: dict[str, tuple[Tensor, ...]]


class Packed(Module):
    """Keyword arguments in, a dataclass with a dictionary of tuples out, of which the loss uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = Linear(3, 3), Linear(3, 4), Linear(3, 2)

    def forward(self, x: Tensor, *, scale: Tensor, flip: bool = False) -> Output:
        h = F.relu(self.a(x.flip(1) if flip else x) * scale)
        return Output(self.b(h), {"hidden": (h, self.unused(h))})


WORDS, LENGTH = 7, 3

model("pre-activation ResNet, GroupNorm", lambda N: classify(ResNet(lambda c: nn.GroupNorm(2, c)), randn(N, 3, 4, 4)))
model("pre-activation ResNet, BatchNorm", lambda N: classify(ResNet(nn.BatchNorm2d).eval(), randn(N, 3, 4, 4)))
model("DenseNet block", lambda N: classify(DenseNet(2, 3).eval(), randn(N, 3, 4, 4)))
model("U-Net", lambda N: Problem(UNet(), randn(N, 2, 4, 4), [Term(CrossEntropyLoss(), labels(N, 4, 4, classes=3))]))
model("Vision Transformer", lambda N: classify(VisionTransformer(), randn(N, 3, 4, 4)))
model("Vision Transformer, relative positions", lambda N: classify(VisionTransformer(relative=True), randn(N, 3, 4, 4)))
model("siamese net", lambda N: classify(Siamese(), randn(N, 2, 2, 4, 4)))
model("SwiGLU", lambda N: regress(nn.Sequential(Linear(3, 4), SwiGLU(4, 5), Linear(4, 2)), randn(N, 2, 3)))
model(
    "encoder-decoder, tied",
    language(lambda: EncoderDecoder(WORDS, 4), WORDS, 2 * LENGTH, lambda net, x: net(x[:, :LENGTH], x[:, LENGTH - 1 :])[:, 1:].repeat(1, 2, 1)),
    "no factors",
)
model("LSTM language model", language(lambda: RecurrentLanguageModel(WORDS, 4, False), WORDS, LENGTH, lambda net, x: net(x)))
model(
    "LSTM language model, tied",
    language(lambda: RecurrentLanguageModel(WORDS, 4, True), WORDS, LENGTH, lambda net, x: net(x)),
    "no factors",
)
model("positions of words", lambda N: classify(BagOfWords(WORDS, LENGTH + 1, 4), randint(WORDS, (N, LENGTH + 1))))
model("LoRA", lambda N: classify(nn.Sequential(LoRA(Linear(3, 4), 2), nn.Tanh(), LoRA(Linear(4, 4), 2)), randn(N, 3)))
model("LoRA, extra axis", lambda N: regress(nn.Sequential(LoRA(Linear(3, 4), 2), nn.Tanh(), LoRA(Linear(4, 4), 2)), randn(N, 2, 3)))
model("checkpoint", lambda N: classify(Checkpointed(), randn(N, 3)))
model(
    "dataclass and keywords",
    lambda N: classify(Packed(), randn(N, 3), output=lambda net, x: net(x=x, scale=x.square(), flip=True).scores),
)
