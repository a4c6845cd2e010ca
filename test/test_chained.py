"""Modules that are called one after the other, outside of any module: whose rows are the samples, where they disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_extensions import close
from test_model_outputs import results
from torch import Tensor, nn
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import cross_entropy

from backpack import backpack, extend
from backpack.extensions import KFLR, BatchGrad, BatchL2Grad, DiagGGNExact, Variance
from backpack.utils.errors import MixedSamplesError, UnsupportedError


def mlp(*sizes: int) -> Sequential:
    return Sequential(Linear(sizes[0], 5), Tanh(), Linear(5, sizes[1]))


class Parts(nn.Module):
    """Parts that are called apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rnn, self.positions, self.draws = mlp(4, 3), mlp(3, 2), nn.GRU(3, 3), nn.Embedding(6, 3), mlp(3, 3)
        self.forward_first = nn.GRU(3, 3, batch_first=True)
        self.double()


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# parts, x [N, M, 4] -> prediction, of which the samples are rows for the last part, and something else for the first one
OTHER_AXES: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "draws first": lambda net, x: net.b(net.a(x[:, 0])[None] + noise(x.shape[1], len(x), 3)),
    "draws first, averaged": lambda net, x: net.b(net.a(x[:, 0])[None] + noise(x.shape[1], len(x), 3)).mean(0),
    "views stacked": lambda net, x: net.b(torch.stack([net.a(x[:, i]) for i in range(x.shape[1])])).mean(0),
    "axes exchanged": lambda net, x: net.b(net.a(x).transpose(0, 1)).transpose(0, 1).mean(1),
    "draws of a network": lambda net, x: net.b(net.a(x[:, 0])[None] + net.draws(noise(x.shape[1], len(x), 3))),
    "leaf modules": lambda net, x: net.b[2](net.a[0](x[:, 0])[None] + noise(x.shape[1], len(x), 5)),
}


@pytest.mark.parametrize("extensions", [(BatchGrad, Variance), (BatchL2Grad,), (DiagGGNExact, KFLR)])
@pytest.mark.parametrize(("samples", "others"), [(4, 1), (4, 2), (3, 4), (3, 3)])
@pytest.mark.parametrize("way", OTHER_AXES)
def test_samples_on_another_axis_of_a_later_part(way: str, samples: int, others: int, extensions: tuple[type, ...]) -> None:
    net, lossfunc = extend(Parts()), extend(nn.MSELoss())
    out = OTHER_AXES[way](net, torch.rand(samples, others, 4).double())
    with backpack(*(extension() for extension in extensions)), pytest.raises((UnsupportedError, MixedSamplesError)):
        lossfunc(out, torch.zeros_like(out)).backward()
    assert results(net) == {}


def test_message_of_other_axes() -> None:
    net = extend(Parts())
    out = OTHER_AXES["draws first"](net, torch.rand(4, 1, 4).double())
    said = r"a\.2 \(Linear\) returns \[4, 3\], and b\.\d \(\w+\), which comes later, \[1, 4, \d\].* 4 for the one and 1 for(.|\n)*a\.0\.weight"
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=said):
        out.square().mean().backward()


# parts, x [N, M, 4] -> prediction [N, 2]
AGREE: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "draws behind the samples": lambda net, x: net.b(net.a(x[:, 0])[:, None] + noise(7, x.shape[1], 3)[:1]).mean(1),
    "rows of a sample": lambda net, x: net.b(net.a(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)),
    "time first": lambda net, x: net.b(net.a(x.transpose(0, 1)).mean(0)),
    "time first, recurrent": lambda net, x: net.b(net.rnn(net.a(x.transpose(0, 1)))[0].mean(0)),
    "flattened for one part": lambda net, x: net.b(net.a(x.flatten(0, 1)).view(*x.shape[:2], 3)).mean(1),
    "flattened in front of a recurrent layer": lambda net, x: net.b(net.forward_first(net.a(x.flatten(0, 1)).view(*x.shape[:2], 3))[0][:, -1]),
    "positions": lambda net, x: net.b(net.a(x) + net.positions(torch.arange(x.shape[1]))).mean(1),
    "positions beside what is no part": lambda net, x: net.b(x[..., :3] + net.positions(torch.arange(x.shape[1]))).mean(1),
    "pieces": lambda net, x: net.b(torch.cat([net.a(part) for part in x[:, 0].split(1)])),
}


@pytest.mark.parametrize(("samples", "others"), [(4, 1), (4, 2), (3, 5), (1, 3)])
@pytest.mark.parametrize("way", AGREE)
def test_samples_that_are_followed_through_parts(way: str, samples: int, others: int) -> None:
    torch.manual_seed(0)
    net, x, y = extend(Parts()), torch.rand(samples, others, 4).double(), torch.randint(2, (samples,))
    with backpack(BatchGrad()):
        cross_entropy(AGREE[way](net, x), y, reduction="sum").backward()
    used = {name: p for name, p in net.named_parameters() if p.grad is not None}
    rows = [torch.autograd.grad(cross_entropy(AGREE[way](net, x[n : n + 1]), y[n : n + 1]), [*used.values()]) for n in range(samples)]
    assert len(used) >= 4
    for parameter, *expected in zip(used.values(), *rows, strict=True):
        close(parameter.grad_batch, torch.stack(expected))
