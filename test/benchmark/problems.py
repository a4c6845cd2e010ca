"""The problems of the benchmark: a function for each makes a model, inputs and targets of the cross-entropy. Needs PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Problem = tuple[nn.Module, Tensor, Tensor]


def logreg() -> Problem:
    """Flatten, Linear 784-10; N = 128."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), torch.rand(128, 1, 28, 28), torch.randint(10, (128,))


def deep() -> Problem:
    """50 times Linear 8-8, with ReLU in between: little but Python, which takes (ratio - 1) * gradient / 99 for each module; N = 4."""
    layers = [layer for _ in range(50) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.rand(4, 8), torch.randint(8, (4,))


def mlp() -> Problem:
    """784-512-512-10 with ReLU; N = 128."""
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.rand(128, 784), torch.randint(10, (128,))


def c3d3() -> Problem:
    """Three convolutions with pooling, three Linear (DeepOBS), shapes of CIFAR-10; N = 64."""
    layers: list[nn.Module] = []
    for channels, outputs, kernel, padding in ((3, 64, 5, 0), (64, 96, 3, 0), (96, 128, 3, 1)):
        layers += [nn.Conv2d(channels, outputs, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.rand(64, 3, 32, 32), torch.randint(10, (64,))


def all_cnn_c() -> Problem:
    """Nine convolutions and the mean over positions (DeepOBS), shapes of CIFAR-100; N = 16."""
    layers: list[nn.Module] = []
    sizes = ((3, 96, 3, 1, 1), (96, 96, 3, 1, 1), (96, 96, 3, 2, 1), (96, 192, 3, 1, 1), (192, 192, 3, 1, 1), (192, 192, 3, 2, 1))
    for channels, outputs, kernel, stride, padding in (*sizes, (192, 192, 3, 1, 0), (192, 192, 1, 1, 0), (192, 100, 1, 1, 0)):
        layers += [nn.Conv2d(channels, outputs, kernel, stride, padding), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(6), nn.Flatten()), torch.rand(16, 3, 32, 32), torch.randint(100, (16,))


class Residual(nn.Module):
    """Two convolutions with GroupNorm beside a shortcut."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs)
        self.relu = nn.ReLU()
        self.shortcut = nn.Identity() if channels == outputs else nn.Conv2d(channels, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, channels, H, W]`` to ``[N, outputs, H / stride, W / stride]``."""
        return self.relu(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


def resnet() -> Problem:
    """ResNet-20 with GroupNorm, shapes of CIFAR-10; N = 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    for channels, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [Residual(channels, outputs, stride), Residual(outputs, outputs, 1), Residual(outputs, outputs, 1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), torch.rand(32, 3, 32, 32), torch.randint(10, (32,))


class Characters(nn.Module):
    """A language model of 83 characters, as in DeepOBS."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(83, 128), nn.LSTM(128, 128, batch_first=True), nn.Linear(128, 83)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[N, T]`` to ``[N, 83, T]``."""
        return self.head(self.lstm(self.embedding(tokens))[0]).transpose(1, 2)


def lstm() -> Problem:
    """Language model of 83 characters: Embedding, LSTM of width 128, Linear; T = 50, N = 50."""
    return Characters(), torch.randint(83, (50, 50)), torch.randint(83, (50, 50))


class Classifier(nn.Module):
    """Four layers of a transformer, width 256, four heads, and a Linear on the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.encoder, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, 256]`` to ``[N, 10]``."""
        return self.head(self.encoder(x).mean(1))


def transformer() -> Problem:
    """Four layers of ``nn.TransformerEncoder``, width 256, mean over positions, Linear; T = 128, N = 8."""
    return Classifier(), torch.rand(8, 128, 256), torch.randint(10, (8,))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.gelu, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, width]`` to the same."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """GPT-2; the table of tokens is the matrix of the output layer, too."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width, heads) for _ in range(layers))), nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``[N, T]`` to ``[N, tokens, T]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))).transpose(1, 2)


def gpt2() -> Problem:
    """GPT-2 small: 12 layers, width 768, 50257 tokens, tied to the output layer; T = 64, N = 2."""
    return GPT2(12, 768, 12, 50257, 1024), torch.randint(50257, (2, 64)), torch.randint(50257, (2, 64))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "logreg": logreg,
    "deep": deep,
    "mlp": mlp,
    "3c3d": c3d3,
    "All-CNN-C": all_cnn_c,
    "ResNet": resnet,
    "LSTM": lstm,
    "transformer": transformer,
    "GPT-2": gpt2,
}
