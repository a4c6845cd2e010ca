"""Graph nodes that no rule covers are crossed by calling them: samples are followed there, pass by pass, whatever the node has saved.

The truth is plain autograd: sample ``n`` is row ``n`` of what the model returns, and its gradient that of term ``n`` of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from itertools import product
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
from test_extensions import close
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node
from torch.nn import GRU, Conv1d, CrossEntropyLoss, Embedding, L1Loss, Linear, Module, Parameter, ReLU, RMSNorm, Sequential, Sigmoid
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from backpack import backpack, clear, explain, extend, results
from backpack.core import crossings
from backpack.core.crossings import crossings_of
from backpack.core.graph import HOOKED, operation, shape_of
from backpack.core.known_ways import known_crossings
from backpack.core.samples import Layout, along
from backpack.extensions import KFAC, KFLR, BatchGrad, BatchL2Grad, DiagGGNExact, DiagGGNMC, DiagHessian, SumGradSquared, Variance
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import BackpackError, LossNotExtendedError, UnattributedError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("error", "ignore:indexing with dtype torch.uint8")

DOUBLE = {"dtype": torch.float64}


class Net(Module):
    """A layer, something that moves its rows, and a layer.

    Attributes:
        option: What changes from pass to pass.
    """

    def __init__(self, move: Callable[..., Tensor], between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last, self.move, self.between, self.option = Linear(4, 4, **DOUBLE), Linear(4, 3, **DOUBLE), move, between, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.move(self.between(self.first(x)), self.option))


def pass_over(model: Module, x: Tensor, y: Tensor) -> None:
    """Run a pass, and compare with plain autograd, row by row of the output."""
    model.zero_grad()
    with backpack(BatchGrad(), DiagGGNExact()):
        F.cross_entropy(model(x), y).backward()
    out, parameters = model(x), [parameter for parameter in model.parameters() if parameter.requires_grad]
    terms = F.cross_entropy(out, y, reduction="none") / len(y)

    def gradients(of: Iterable[Tensor]) -> list[Tensor]:
        rows = [torch.autograd.grad(number, parameters, retain_graph=True, allow_unused=True, materialize_grads=True) for number in of]
        return [torch.stack(parts) for parts in zip(*rows, strict=True)]

    jacobians = [gradients(row) for row in out]
    for i, (parameter, rows) in enumerate(zip(parameters, gradients(terms), strict=True)):
        close(parameter.grad, rows.sum(0))
        close(parameter.grad_batch, rows)
        diagonal = torch.zeros_like(parameter)
        for jacobian, p in zip(jacobians, out.detach().softmax(1), strict=True):
            diagonal += torch.einsum("c...,cd,d...->...", jacobian[i], p.diag() - p.outer(p), jacobian[i]) / len(y)
        close(parameter.diag_ggn_exact, diagonal)


# --- nodes that are of one kind and shape, and move samples in another way ----------------------------------------------------------------------


class Roll(Function):
    """A function that is named like one of torch's own, and keeps to itself by how far it rolls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.roll(by, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.roll(-ctx.by, 0), None


class Tanh(Function):
    """A function that is named like one that treats every entry alone, and swaps samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0)


class Expand(Tanh):
    """A function that is named like one whose node is not called."""


def zeros(rows: int) -> Tensor:
    return torch.zeros(rows, 4, **DOUBLE)


def put(h: Tensor, places: Any, values: Tensor) -> Tensor:
    h = h.clone()
    h[places] = values
    return h


ROWS = torch.arange(5)
MOVES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cat, two constants": lambda h, k: torch.cat([zeros(k), h[:3], zeros(2 - k)]),
    "cat, two constants, two rows of a sample": lambda h, k: torch.cat([zeros(k), h[:4], zeros(2 - k)]).view(3, 2, 4).sum(1),
    "cat, constants first and last": lambda h, k: torch.cat([zeros(1 + k), h[:3], zeros(2 - k), h[3:]]),
    "cat, constant first or last": lambda h, k: torch.cat([h[:3], zeros(2)] if k % 2 else [zeros(2), h[:3]]),
    "cat, no constant": lambda h, k: torch.cat([h[k:], h[:k] * 2]),
    "stack": lambda h, k: torch.stack([*zeros(k), h[0], h[1], h[2], *zeros(2 - k)]),
    "slice": lambda h, k: h[k : k + 3],
    "slice with a step": lambda h, k: h[k % 2 :: 2][:2],
    "select": lambda h, k: h.view(5, 2, 2)[:, :, k % 2].repeat(1, 2),
    "select of samples": lambda h, k: torch.stack([h, h, h])[k],
    "split": lambda h, k: h[:3].split(1)[k],
    "split with sizes": lambda h, k: h.split([k, 3, 2 - k])[1],
    "unbind": lambda h, k: torch.stack([h[k:][:3], 2 * h[:3].detach()]).unbind()[0],
    "flip": lambda h, k: h.flip([0, 1][: k % 2 + 1]),
    "roll": lambda h, k: h.roll(k, 0),
    "pad": lambda h, k: F.pad(h[:3], (0, 0, k, 2 - k)),
    "pad and cut": lambda h, k: F.pad(h, (0, 0, k - 1, 1 - k)),
    "diagonal": lambda h, k: h[:, :, None].expand(5, 4, 7).diagonal(k, 0, 2).T,
    "repeat": lambda h, k: h.repeat(3, 1)[5 * k : 5 * k + 5],
    "expand": lambda h, k: h[:, None].expand(5, 3, 4)[:, k],
    "permute": lambda h, k: h.reshape(5, 2, 2).permute([0, 1, 2] if k % 2 else [0, 2, 1]).reshape(5, 4),
    "as_strided": lambda h, k: torch.as_strided(h, (3, 4), (4, 1), 4 * k),
    "index": lambda h, k: h[(ROWS + k) % 5],
    "index_select": lambda h, k: h.index_select(0, (ROWS + k) % 5),
    "gather": lambda h, k: h.gather(0, ((ROWS + k) % 5)[:, None].expand(5, 4)),
    "take": lambda h, k: h.take(torch.arange(20).roll(4 * k).view(5, 4)),
    "masked_select": lambda h, k: h.masked_select(((ROWS >= k) & (ROWS < k + 3))[:, None]).view(3, 4),
    "masked_fill": lambda h, k: h.masked_fill((ROWS == k)[:, None], 0.0),
    "scatter": lambda h, k: zeros(5).scatter(0, ((ROWS + k) % 5)[:, None].expand(5, 4), h),
    "index_add": lambda h, k: zeros(5).index_add(0, (ROWS + k) % 5, h),
    "index_copy": lambda h, k: zeros(5).index_copy(0, (ROWS[:3] + k) % 5, h[:3]),
    "index_put": lambda h, k: put(zeros(5), slice(k, k + 2), h[3:]),
    "slice_scatter": lambda h, k: torch.slice_scatter(zeros(5), h[:2], 0, k, k + 2),
    "select_scatter": lambda h, k: torch.select_scatter(zeros(5), h[4], 0, k),
    "diag_embed": lambda h, k: h.diag_embed(k % 2, 1, 2).sum(2)[:, :4],
    "where": lambda h, k: torch.where((ROWS < k)[:, None], h, h * 2),
    "rot90": lambda h, k: torch.rot90(h[:4], 2 * k),
    "tril": lambda h, k: h[:, None].expand(5, 3, 4).tril(k - 1).sum(1),
    "a function's own": Roll.apply,
}


@pytest.mark.parametrize("move", MOVES)
def test_where_samples_go_is_told_anew_where_it_may_change(move: str) -> None:
    """Tensors have the same shapes in all passes."""
    torch.manual_seed(0)
    model, x = extend(Net(MOVES[move])), torch.randn(5, 4, **DOUBLE)
    for model.option in (1, 2, 0, 1):
        rows = len(model(x))
        pass_over(model, x, torch.arange(rows) % 3)


class Filled(Net):
    """Fills a number that is learned into a part of some rows."""

    def __init__(self) -> None:
        super().__init__(lambda h, k: h.masked_fill((ROWS % 4 == k)[:, None] & (ROWS[:4] < 2), self.number))
        self.number = Parameter(torch.tensor(0.3, **DOUBLE))


def test_which_samples_use_a_number_that_is_filled_in_is_told_anew() -> None:
    """In the first passes it is a single one, another one each time."""
    torch.manual_seed(0)
    model, x = extend(Filled()), torch.randn(5, 4, **DOUBLE)
    for model.option in (1, 2, 0, 4, 1):
        pass_over(model, x, torch.arange(5) % 3)


@pytest.mark.parametrize("function", [Tanh, Expand, *(type(name, (Tanh,), {}) for name in ("Convolution", "NativeLayerNorm", "LeakyRelu"))])
def test_functions_that_are_named_like_those_of_torch(function: type[Function]) -> None:
    torch.manual_seed(0)
    model, x, y = extend(Net(lambda h, _: function.apply(h))), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3
    pass_over(model, x, y)
    with backpack(DiagHessian()), pytest.raises(UnsupportedError, match=f"{function.__name__}Backward.* a curved operation"):
        F.cross_entropy(model(x), y).backward()


class HalveBackward(Function):
    """A function that is named like the derivative of another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


@pytest.mark.parametrize("returned", [False, True], ids=["backward", "grad"])
def test_functions_that_are_named_like_derivatives(returned: bool) -> None:
    torch.manual_seed(0)
    model, x, y = extend(Linear(4, 3, **DOUBLE)), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3
    found = []
    for function in (Tensor.clone, HalveBackward.apply):
        with backpack(BatchGrad(), DiagGGNExact()):
            loss = F.cross_entropy(function(model(x)), y)
            torch.autograd.grad(loss, [*model.parameters()]) if returned else loss.backward()
        found.append((model.weight.grad_batch, model.weight.diag_ggn_exact))
        clear(model)
    close(found[1][0], found[0][0] / 2)
    close(found[1][1], found[0][1] / 4)
    with backpack(BatchGrad()):
        (grad,) = torch.autograd.grad(HalveBackward.apply(model(x)).square().sum(), model.weight)
    close(model.weight.grad_batch.sum(0), grad)


# --- rows that belong to one sample, and those of which nothing is known ------------------------------------------------------------------------


class Loop(Module):
    """Something that is done to each row, with two layers in front and one behind, and parameters of all rows."""

    def __init__(self, function: Callable[[Loop, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.function = Linear(4, 4, **DOUBLE), Linear(4, 4, **DOUBLE), Linear(4, 3, **DOUBLE), function
        self.gains, self.vector = (Parameter(torch.rand(*shape, **DOUBLE)) for shape in ((2,), (4,)))
        self.recurrent = GRU(4, 4, batch_first=True, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x).tanh()))


def each(function: Callable[[Loop, Tensor, int], Tensor]) -> Callable[[Loop, Tensor], Tensor]:
    return lambda net, h: torch.stack([function(net, row, i) for i, row in enumerate(h)])


def at_rows(net: Loop, h: Tensor, rows: Any, change: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
    return put(h, rows, change(net.inner(h[rows])))


LOOPS: dict[str, Callable[[Loop, Tensor], Tensor]] = {
    "norm": each(lambda net, u, i: u / u.norm()),
    "norm, axis kept": each(lambda net, u, i: u / u.norm(keepdim=True)),
    "functions of numbers": each(lambda net, u, i: u * (u.sum().sin() * u.norm()).tanh()),
    "module on a number": each(lambda net, u, i: u * torch.nn.functional.softplus(net.inner(u).sum())),
    "numbers of one row, stacked": each(lambda net, u, i: u * torch.stack([u[:2].sum(), u[2:].sum()]).softmax(0)[0]),
    "numbers of all rows, stacked": lambda net, h: torch.stack([u.square().sum() for u in h])[:, None] * h,
    "number, expanded": each(lambda net, u, i: u.norm().expand(4) + u),
    "number, joined": each(lambda net, u, i: torch.cat([u[:3], u.norm()[None]])),
    "number times a number of all": each(lambda net, u, i: u * (u.sum() * net.gains[0])),
    "number times a number that is computed": lambda net, h: each(lambda net, u, i, g=net.gains[0] * net.gains[1]: u * (u.sum() * g))(net, h),
    "standardized": each(lambda net, u, i: (u - u.mean()) / u.std()),
    "product with a vector of all": each(lambda net, u, i: u * torch.dot(u, net.vector)),
    "norm with a vector of all": each(lambda net, u, i: u * (net.vector * u).norm()),
    "outer product": each(lambda net, u, i: torch.outer(u, u).sum(1) / u.norm()),
    "layer": each(lambda net, u, i: net.inner(u.tanh()) / u.norm()),
    "first entries": each(lambda net, u, i: u[: i % 4 + 1].mean() * u),
    "recurrent, mean over time": lambda net, h: torch.cat([net.recurrent(u.view(1, 1, 4).expand(1, 3, 4) * STEPS)[0].mean(1) for u in h]),
    "recurrent, one step": lambda net, h: torch.cat([net.recurrent(u.view(1, 1, 4).expand(1, 3, 4) * STEPS)[0][:, i % 3] for i, u in enumerate(h)]),
    "sequences, lengths": lambda net, h: torch.stack([u[: i % 3 + 1].mean(0) for i, u in enumerate(net.inner(h[:, None] * STEPS).sin())]),
    "sequences, lengths, axis kept": lambda net, h: torch.cat([sequences(net, h)[i : i + 1, : i % 3 + 1].amax(1) for i in range(len(h))]),
    "sequences, steps": lambda net, h: torch.stack([sequences(net, h)[i, i % 3] for i in range(len(h))]),
    "sequences, attention": lambda net, h: torch.stack([z[: i % 3 + 1].sum(1).softmax(0) @ z[: i % 3 + 1] for i, z in enumerate(sequences(net, h))]),
    "sequences, cumulated": lambda net, h: torch.stack([z.tanh().cumsum(0)[-1] for z in sequences(net, h)]),
    "sequences, others times the first": lambda net, h: torch.stack([z[0] + rest(z, i, z[:1]) for i, z in enumerate(sequences(net, h))]),
    "sequences, others with a vector of all": lambda net, h: torch.stack([z[0] + rest(z, i, net.vector) for i, z in enumerate(sequences(net, h))]),
    "sequences, others with a vector that is computed": lambda net, h: torch.stack(
        [z[0] + rest(z, i, v) for v in [net.vector.sin()[None]] for i, z in enumerate(sequences(net, h))]
    ),
    "sequences, others times a mean": lambda net, h: torch.stack([z[0] + rest(z, i, z.mean(0)) for i, z in enumerate(sequences(net, h))]),
    "one row by a mask": lambda net, h: at_rows(net, h, torch.arange(len(h)) < 1),
    "no row by a mask": lambda net, h: at_rows(net, h, torch.arange(len(h)) < 0),
    "one row by an index": lambda net, h: at_rows(net, h, -1),
    "one row by a list, added": lambda net, h: put(h, [0], h[[0]] + net.inner(h[[0]]).sin()),
    "experts for rows behind an axis of length one": lambda net, h: sum(
        torch.zeros_like(h).index_add(0, rows, net.inner(h[None, rows].view(-1, 4)).sin() * (1 + e))
        for e, rows in enumerate((torch.arange(len(h)).flip(0)[:2], torch.arange(1), torch.arange(len(h))[1:2]))
    ),
    "experts for rows, and their gates": lambda net, h: sum(
        torch.zeros_like(h).index_add(0, rows, h[rows].sin() * net.inner(h).softmax(1)[rows][:, e : e + 1])
        for e, rows in enumerate((torch.arange(1, len(h) + 1) % 4 == e).nonzero()[:, 0] for e in range(4))
    ),
    "steps in front, a layer for rows of one sample": lambda net, h: at_rows(
        net, h * STEPS[:, None], (torch.arange(3)[:, None] < 2) & (torch.arange(len(h)) == len(h) - 1)
    ).sum(0),
    "steps in front, a long sequence": lambda net, h: pad_packed_sequence(
        net.recurrent(pack_padded_sequence(h[:, None] * STEPS, [3, *[1] * 9][: len(h)], batch_first=True))[0]
    )[0].sum(0),
    "rows twice": lambda net, h: torch.cat([h[:1], h[1:] * 2])[torch.arange(len(h)).flip(0)],
    "constants added to rows": lambda net, h: net.inner(h).index_add(0, torch.tensor([0, 0]), STEPS[:2].expand(2, 4)).sin(),
    "constants added to entries": lambda net, h: net.inner(h).scatter_add(1, torch.tensor([[3, 3]] * len(h)), STEPS[:1].expand(len(h), 2)).sin(),
    "constants added in place": lambda net, h: net.inner(h).index_add_(1, torch.tensor([2]), STEPS[:1].expand(len(h), 1)).sin(),
    "kernels of each sample": lambda net, h: F.conv1d(h.reshape(1, -1, 2), net.inner(h).view(-1, 1, 2)[..., :1], groups=2 * len(h)).view(-1, 4),
    "a derivative that is zero": lambda net, h: net.inner(h).sgn() + h,
    "numbers that are rolled": lambda net, h: torch.stack([torch.stack([v.sin().roll(2) for v in u]) for u in net.inner(h)]) + h,
    "sign of a vector of all": lambda net, h: torch.copysign(net.inner(h), net.vector) + net.vector,
    "distances": lambda net, h: torch.cdist(net.inner(h), net.last.weight[:, :4].sin()).repeat(1, 2)[:, :4],
    "distances to nothing": lambda net, h: net.inner(h) + torch.cdist(h, net.vector[None][:0]).sum(1, keepdim=True),
    "a number, by its place": each(lambda net, u, i: u * u.sum().index_select(0, torch.tensor(0))),
    "a number, by its number": each(lambda net, u, i: u * u.sum().gather(0, torch.tensor(0))),
    "a number of all for one row": lambda net, h: h * h.sum(1).index_copy(0, torch.tensor([0]), net.gains[0].sin())[:, None],
    "a number of all, added to one row": lambda net, h: h * h.sum(1).scatter_add(0, torch.tensor(0), net.gains.sum())[:, None],
    "distances, one by one": each(lambda net, u, i: torch.cdist(net.inner(u)[None], net.inner.weight.sin())[0]),
}
STEPS = torch.arange(1, 4, **DOUBLE)[:, None]


def sequences(net: Loop, h: Tensor) -> Tensor:
    return net.inner(h[:, None] * STEPS).tanh()


def rest(steps: Tensor, i: int, factor: Tensor) -> Tensor:
    """All steps but the first one, of which there are none in some sequences."""
    return (steps[1 : i % 3 + 1] * factor).sum(0)


@pytest.mark.parametrize(("loop", "samples"), [*product(LOOPS, [1, 2, 5]), ("recurrent, one step", len(STEPS))])
def test_loops_over_samples(loop: str, samples: int) -> None:
    torch.manual_seed(0)
    model, x, y = extend(Loop(LOOPS[loop])), torch.randn(samples, 4, **DOUBLE), torch.arange(samples) % 3
    unused = [
        p for p, g in zip(model.parameters(), torch.autograd.grad(model(x).sum(), model.parameters(), allow_unused=True), strict=True) if g is None
    ]
    for parameter in unused:
        parameter.requires_grad_(False)
    pass_over(model, x, y)


@pytest.mark.parametrize("mix", [lambda net, h: h / h.norm(), lambda net, h: torch.stack([h[0], *(h[0].norm() * u for u in h[1:])])])
def test_numbers_of_other_samples_are_refused(mix: Callable[[Loop, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = extend(Loop(mix))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=r"first\.weight"):
        F.cross_entropy(model(torch.randn(3, 4, **DOUBLE)), torch.arange(3)).backward()
    assert results(model) == {}


class Prototypes(Module):
    """Classes are the nearer the more likely."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.prototypes = Linear(4, 4, **DOUBLE), Parameter(torch.randn(3, 4, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.first(x), self.prototypes)


@pytest.mark.parametrize("ignored", [[0, 4], [1, 2, 3], [0, 1, 2, 3]])
def test_distances_where_some_samples_do_not_count(ignored: list[int]) -> None:
    """Torch's batching rule for the derivative of distances returns the first column for all: that of the first sample, say."""
    torch.manual_seed(0)
    model, x, y = extend(Prototypes()), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3
    y[ignored] = -100
    with backpack(BatchGrad(), DiagGGNExact()):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    out = model(x)
    for parameter in model.parameters():
        terms = F.cross_entropy(out, y, reduction="none")
        close(parameter.grad_batch, torch.stack([torch.autograd.grad(term, parameter, retain_graph=True)[0] for term in terms]))
        diagonal = torch.zeros_like(parameter)
        for row in out[y >= 0]:
            jacobian = torch.stack([torch.autograd.grad(number, parameter, retain_graph=True)[0] for number in row])
            probs = row.detach().softmax(0)
            diagonal += torch.einsum("c...,cd,d...->...", jacobian, probs.diag() - probs.outer(probs), jacobian)
        close(parameter.diag_ggn_exact, diagonal)


def test_convolutions_with_kernels_of_each_sample_have_no_diagonal_of_the_hessian() -> None:
    """Where input and kernel are of one layer: samples are groups, of which a single one has another number."""
    model = extend(Loop(LOOPS["kernels of each sample"]))
    with backpack(DiagHessian()), pytest.raises(UnsupportedError, match=r"ConvolutionBackward0.*second derivative is not known"):
        F.cross_entropy(model(torch.randn(3, 4, **DOUBLE)), torch.arange(3)).backward()
    assert results(model) == {}


# --- complex numbers, between real parameters and a real loss ------------------------------------------------------------------------------------


class Complex(Module):
    """Something that is done to complex numbers, with a layer in front and one behind, and matrices that are made of real parameters."""

    def __init__(self, function: Callable[[Complex, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = Linear(4, 8, **DOUBLE), Linear(4, 3, **DOUBLE), function
        self.pairs, self.kernels, self.vectors = (Parameter(torch.randn(*shape, 2, **DOUBLE)) for shape in ((4, 4), (4, 4, 3), (5, 4)))
        self.register_buffer("fourier", torch.fft.fft(torch.eye(4, **DOUBLE)))
        with catch_warnings():
            simplefilter("ignore")  # torch says that complex modules are new
            self.layer = Linear(4, 4, dtype=torch.complex128).requires_grad_(False)
            self.convolution = Conv1d(4, 4, 3, dtype=torch.complex128).requires_grad_(False)
        self.tanh, self.sigmoid, self.norm = torch.nn.Tanh(), Sigmoid(), RMSNorm(4, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.function(self, torch.view_as_complex(self.first(x).view(-1, 4, 2)))
        return self.last(torch.tanh(z.real + z.imag / 2))

    @property
    def matrix(self) -> Tensor:
        return torch.view_as_complex(self.pairs)


COMPLEX: dict[str, Callable[[Complex, Tensor], Tensor]] = {
    "learned matrix": lambda net, z: z @ net.matrix,
    "learned matrix, Linear": lambda net, z: F.linear(z, net.matrix, torch.view_as_complex(net.vectors)[0]),
    "learned matrix, einsum": lambda net, z: torch.einsum("ni,io->no", z, net.matrix),
    "learned matrix, positions": lambda net, z: F.linear(torch.stack([z, 2 * z.conj()], 1), net.matrix).sum(1),
    "learned matrix, of real numbers": lambda net, z: torch.complex(z.real, 0 * z.real) @ net.matrix.mH,
    "learned kernel": lambda net, z: F.conv1d(z[:, :, None].expand(-1, -1, 5), torch.view_as_complex(net.kernels)).mean(-1),
    "learned table": lambda net, z: z * torch.view_as_complex(net.vectors)[torch.arange(len(z)) % 5],
    "constant matrix": lambda net, z: torch.fft.fft(z) @ net.fourier,
    "constant matrix, part of a sum": lambda net, z: torch.addmm(z, z, net.fourier, alpha=0.5),
    "products of samples": lambda net, z: torch.bmm(z[:, None], z[:, :, None] * z[:, None]).squeeze(1),
    "sample by sample": lambda net, z: torch.stack([net.matrix @ row for row in z]),
    "sample by sample, matrices of their own": lambda net, z: torch.stack([torch.view_as_complex(row.abs().sum() * net.pairs[0]) for row in z]),
    "layer": lambda net, z: net.layer(z),
    "convolution": lambda net, z: net.convolution(z[:, :, None].expand(-1, -1, 5)).mean(-1),
    "tanh": lambda net, z: net.tanh(z / 4),
    "sigmoid": lambda net, z: net.sigmoid(z / 4),
    "norm": lambda net, z: net.norm(z),
    "singular vectors": lambda net, z: 1j * torch.linalg.svd(matrices(net, z))[0].abs().sum(-1),
    "singular vectors, sample by sample": lambda net, z: 1j * torch.stack([torch.linalg.svd(m)[0].abs().sum(-1) for m in matrices(net, z)]),
    "eigenvectors": lambda net, z: 1j * torch.linalg.eig(matrices(net, z))[1].abs().sum(-1),
    "eigenvectors, sample by sample": lambda net, z: torch.stack([v.abs().sum(-1) + e for e, v in map(torch.linalg.eig, matrices(net, z))]),
    "eigenvectors of symmetric matrices": lambda net, z: 1j * torch.linalg.eigh(matrices(net, z) + matrices(net, z).mH)[1].abs().square()[..., 0],
}


def matrices(net: Complex, z: Tensor) -> Tensor:
    return z[:, :, None] * net.fourier + torch.eye(4, **DOUBLE) * torch.arange(1, 5)


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("function", COMPLEX)
def test_complex_numbers(function: str, samples: int) -> None:
    torch.manual_seed(0)
    model, x, y = extend(Complex(COMPLEX[function])), torch.randn(samples, 4, **DOUBLE), torch.arange(samples) % 3
    used = torch.autograd.grad(model(x).sum(), [model.pairs, model.kernels, model.vectors], allow_unused=True)
    for parameter, gradient in zip([model.pairs, model.kernels, model.vectors], used, strict=True):
        parameter.requires_grad_(gradient is not None)
    pass_over(model, x, y)


class Fourier(Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian, KFAC, KFLR])
def test_losses_of_complex_numbers_have_no_curvature(extension: type[BackpropExtension]) -> None:
    model, lossfunc = extend(Sequential(Linear(4, 4, **DOUBLE), Fourier())), extend(L1Loss())
    x, y = torch.randn(3, 4, **DOUBLE), torch.randn(3, 4, dtype=torch.complex128)
    with backpack(extension()), pytest.raises(UnsupportedError, match="L1Loss takes complex predictions"):
        lossfunc(model(x), y).backward()
    assert results(model) == {}
    with backpack(BatchGrad()):
        lossfunc(model(x), y).backward()
    for n in range(3):
        (expected,) = torch.autograd.grad((model(x)[n] - y[n]).abs().sum() / 12, model[0].weight)
        close(model[0].weight.grad_batch[n], expected)


# --- other memory -------------------------------------------------------------------------------------------------------------------------------


def test_scattered_by_place_in_memory() -> None:
    """Torch's own formula reads columns by their place in memory, where they lie side by side."""

    class Scattered(Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.part, self.layer = (
                Parameter(torch.randn(3, 3, **DOUBLE)),
                Parameter(torch.randn(2, 2, **DOUBLE)),
                Linear(4, 1, **DOUBLE),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).tanh() * torch.as_strided_scatter(self.base, self.part, (2, 2), (3, 1), 4).flatten()

    torch.manual_seed(0)
    for samples in (1, 2, 5):
        pass_over(extend(Scattered()), torch.randn(samples, 4, **DOUBLE), torch.arange(samples) % 3)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_nested_tensors_are_refused(extension: type[BackpropExtension]) -> None:
    class Padded(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Linear(4, 4), Linear(4, 3)

        def forward(self, x: list[Tensor]) -> Tensor:
            return self.last(torch.nested.to_padded_tensor(self.first(torch.nested.nested_tensor(x, layout=torch.jagged)), 0.0).tanh().sum(1))

    torch.manual_seed(0)
    model, x = extend(Padded()), [torch.randn(rows, 4) for rows in (1, 3, 2)]
    with backpack(extension()), pytest.raises(UnsupportedError, match=r"LinearBackward0 .*nested tensor.*first\.weight.*exclude="):
        F.cross_entropy(model(x), torch.arange(3)).backward()
    assert results(model) == {}
    with backpack(extension(exclude=[model.first])):
        F.cross_entropy(model(x), torch.arange(3)).backward()
    assert results(model).keys() == {"last.weight", "last.bias"}


# --- functions with several outputs ---------------------------------------------------------------------------------------------------------------


class Scan(Function):
    """All states of a recurrence, and the last one; the backward pass reckons with both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        states = [x[:, 0]]
        for step in x.unbind(1)[1:]:
            states.append(decay * states[-1] + step)
        ctx.decay = decay
        return torch.stack(states, 1), states[-1].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, last: Tensor) -> tuple[Tensor, None]:
        steps = []
        for part in grad.unbind(1)[::-1]:
            last = last + part
            steps.append(last)
            last = last * ctx.decay
        return torch.stack(steps[::-1], 1), None


class Parts(Function):
    """Two outputs; the backward pass wants to know which of them is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Tensor | None:
        assert one is None or other is None
        return 2 * one if other is None else 3 * other


OUTPUTS: dict[str, Callable[[Tensor, None], Tensor]] = {
    "both": lambda h, _: sum(out.reshape(5, -1, 2).mean(1) for out in Scan.apply(h.view(5, 2, 2), 0.5)).repeat(1, 2),
    "first": lambda h, _: Scan.apply(h.view(5, 2, 2), 0.5)[0].flatten(1),
    "last": lambda h, _: Scan.apply(h.view(5, 2, 2), 0.5)[1].repeat(1, 2),
    "no zeros, first": lambda h, _: Parts.apply(h)[0],
    "no zeros, last": lambda h, _: Parts.apply(h)[1],
}


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_functions_of_which_an_output_is_not_used(outputs: str) -> None:
    torch.manual_seed(0)
    pass_over(extend(Net(OUTPUTS[outputs])), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3)


class Stop(Function):
    """A function without a derivative, which it says by returning nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("between", [True, False])
def test_where_no_gradient_arrives(between: bool) -> None:
    """There is none of any sample; what would have to be carried there is missing, and said to be."""
    torch.manual_seed(0)
    model, x, y = extend(Net(lambda h, _: Stop.apply(h), torch.clone if between else lambda h: h)), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3
    with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance()):
        F.cross_entropy(model(x), y).backward()
    found = results(model)
    for name in ("first.weight", "first.bias"):
        assert model.get_parameter(name).grad is None
        assert found[name].keys() == {"grad_batch", "batch_l2", "sum_grad_squared", "variance"}
        assert all(value.count_nonzero() == 0 for value in found[name].values())
    assert found["last.weight"]["variance"].count_nonzero() > 0
    clear(model)
    for extension in (DiagGGNExact, KFAC):
        with backpack(extension()), pytest.raises(LossNotExtendedError if between else UnattributedError, match=r"first\.weight"):
            F.cross_entropy(model(x), y).backward()
        assert results(model) == {}
        with backpack(extension(exclude=[model.first])):
            F.cross_entropy(model(x), y).backward()
        assert results(model).keys() == {"last.weight", "last.bias"}
        clear(model)


class Changed(Function):
    """The identity, which changes the gradient of each entry alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("N", [1, 5])
@pytest.mark.parametrize("change", [lambda g: -3 * g, lambda g: g.mul_(-3)], ids=["out of place", "in place"])
def test_changes_of_the_gradient_that_are_linear(change: Callable[[Tensor], Tensor], N: int, dtype: torch.dtype) -> None:
    """Reversed and scaled: so are all columns."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 4, dtype=dtype), torch.arange(N) % 3
    model = extend(Net(lambda h, _: Changed.apply(h, change), lambda h: h)).to(dtype)
    other = extend(Net(lambda h, _: h, lambda h: h)).to(dtype)
    other.load_state_dict(model.state_dict())
    for net in (model, other):
        assert not explain(net, F.cross_entropy, x, y, [BatchGrad(), DiagGGNExact()]).refused
        with backpack(BatchGrad(), DiagGGNExact()):
            F.cross_entropy(net(x), y).backward()
    rtol = 8 * torch.finfo(dtype).eps
    close(model.first.weight.grad_batch, -3 * other.first.weight.grad_batch, rtol)
    close(model.first.weight.diag_ggn_exact, 9 * other.first.weight.diag_ggn_exact, rtol)


class Spike(torch.autograd.Function):
    """One where the input is positive, with a smooth derivative; in single precision, whatever the input, as in packages for spiking nets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1 / (1 + (3 * ctx.saved_tensors[0]).square()) * grad


@pytest.mark.parametrize("N", [1, 2, 3, 5])
def test_gradients_that_arrive_in_lower_precision(N: int) -> None:
    """A linear backward is linear up to the rounding errors of what it is given."""
    torch.manual_seed(0)
    model, x, y = Net(lambda h, _: Spike.apply(h).to(h), lambda h: h), torch.randn(N, 4, **DOUBLE), torch.arange(N) % 3
    logits, weight = model(x), model.first.weight
    probs = logits.softmax(1).detach()
    roots = [(torch.eye(3, **DOUBLE)[c] - probs) * probs[:, c : c + 1].sqrt() / N**0.5 for c in range(3)]
    rows = [torch.autograd.grad(logits[n], weight, root[n], retain_graph=True)[0].square() for root in roots for n in range(N)]
    extend(model)
    with backpack(DiagGGNExact(), KFAC()):
        F.cross_entropy(model(x), y).backward()
    close(weight.diag_ggn_exact, sum(rows), 1e-5)


@pytest.mark.parametrize("change", [lambda g: g.clamp(-0.01, 0.01), torch.relu, torch.sign, lambda g: g / g.norm(dim=1, keepdim=True)])
@pytest.mark.parametrize("N", [1, 5])
def test_changes_of_the_gradient_that_are_not_linear(N: int, change: Callable[[Tensor], Tensor]) -> None:
    """They are no derivatives: curvature is refused, while gradients of samples are what each adds to ``.grad``."""
    torch.manual_seed(0)
    model, x, y = extend(Net(lambda h, _: Changed.apply(h, change), lambda h: h)), torch.randn(N, 4, **DOUBLE), torch.arange(N) % 3
    for extension in (DiagGGNExact, DiagGGNMC, KFAC):
        with backpack(extension()), pytest.raises(UnsupportedError, match="backward of Changed .* is not linear"):
            F.cross_entropy(model(x), y).backward()
        assert results(model) == {}
    refused = explain(model, F.cross_entropy, x, y, [DiagGGNExact(), BatchGrad()]).refused
    assert {(row.parameter, row.extension) for row in refused} == {(f"first.{name}", "DiagGGNExact") for name in ("weight", "bias")}
    assert all("is not linear" in row.reason for row in refused)
    model.zero_grad()
    with backpack(BatchGrad()):
        F.cross_entropy(model(x), y).backward()
    close(model.first.weight.grad_batch.sum(0), model.first.weight.grad)
    grads = [torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / N, model.first.weight)[0] for n in range(N)]
    close(model.first.weight.grad_batch, torch.stack(grads))


# --- functions that differentiate in their backward pass -----------------------------------------------------------------------------------------


class Again(Function):
    """Drops the graph of a block, and makes it anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Callable[[Tensor], Tensor], how: str) -> Tensor:
        ctx.block, ctx.how = block, how
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x + ctx.block(x)
        if ctx.how == "grad":
            return torch.autograd.grad(y, x, grad)[0], None, None
        torch.autograd.backward(y, grad, inputs=[x] if ctx.how == "backward, chosen" else None)
        return x.grad, None, None


class Reversible(Module):
    """A layer that is hidden in a function, perhaps behind another one."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = Linear(4, 4, **DOUBLE) if behind else None, Linear(4, 4, **DOUBLE), Linear(4, 3, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone().requires_grad_() if self.first is None else self.first(x).tanh()
        return self.last(Again.apply(h, self.block, "backward"))


@pytest.mark.parametrize("how", ["grad", "backward", "backward, chosen"])
def test_functions_that_differentiate_without_parameters(how: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 4, **DOUBLE)
    pass_over(extend(Net(lambda h, _: Again.apply(h, lambda x: torch.tanh(x @ weight), how))), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3)


def test_functions_that_differentiate_with_respect_to_inputs_alone() -> None:
    """What is computed with parameters inside, and does not ask for their gradients, is as constant for autograd as for quantities."""
    torch.manual_seed(0)
    frozen = extend(Linear(4, 4, **DOUBLE))
    for how in ("grad", "backward, chosen"):
        pass_over(extend(Net(lambda h, _, how=how: Again.apply(h, frozen, how))), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3)
        assert frozen.weight.grad is None


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_hidden_parameters_are_refused(extension: type[BackpropExtension], behind: bool) -> None:
    """Their gradients are added by a pass inside of the pass; nothing is sent through it before."""
    torch.manual_seed(0)
    model, x, y = extend(Reversible(behind)), torch.randn(5, 4, **DOUBLE), torch.arange(5) % 3
    with (
        backpack(extension()),
        pytest.raises(UnsupportedError, match=r"AgainBackward calls backward .*block\.weight, block\.bias.*use_reentrant=False"),
    ):
        F.cross_entropy(model(x), y).backward()
    assert model.block.weight.grad is model.block.bias.grad is None
    assert results(model) == {}
    F.cross_entropy(model(x), y).backward()
    expected = model.block.weight.grad
    model.zero_grad()
    if behind:
        refused = explain(model, torch.nn.CrossEntropyLoss(), x, y, [extension()]).quantities[0].refused
        assert "first.weight" in refused
        assert model.block.weight.grad is None
    else:
        with backpack(extension(exclude=[model.block])):
            F.cross_entropy(model(x), y).backward()
        close(model.block.weight.grad, expected)
        assert results(model).keys() == {"last.weight", "last.bias"}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_models_that_are_given_nested_tensors(layout: torch.layout) -> None:
    """They run as before they were extended; quantities are refused."""
    torch.manual_seed(0)
    plain = Sequential(Linear(3, 4), ReLU())
    with catch_warnings():
        simplefilter("ignore")  # torch calls them a prototype
        x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)], layout=layout)
    model = extend(deepcopy(plain))
    for net in (plain, model):
        net(x).to_padded_tensor(0.0).sum().backward()
    close(model[0].weight.grad, plain[0].weight.grad)
    with backpack(BatchGrad()), pytest.raises(BackpackError):
        model(x).to_padded_tensor(0.0).sum().backward()
    assert results(model) == {}


SELECTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda h, rows: h[rows],
    "index, negative": lambda h, rows: h[rows - len(h)],
    "index, mask": lambda h, rows: h[torch.zeros(len(h), dtype=torch.bool).index_fill(0, rows, True)],
    "index, bytes": lambda h, rows: h[torch.zeros(len(h), dtype=torch.uint8).index_fill(0, rows, 1)],
    "index, other axis": lambda h, rows: h.T[:, rows],
    "index of columns": lambda h, rows: h[:, rows % 3],
    "select": lambda h, rows: h.index_select(0, rows),
    "select one": lambda h, rows: h.index_select(0, rows[0]),
    "select, other axis": lambda h, rows: h.T.index_select(-1, rows),
    "gather": lambda h, rows: h.gather(0, rows[:, None].expand(-1, 3)),
    "gather of columns": lambda h, rows: h.gather(1, (rows[:1, None] % 3).expand(len(h), 3)),
    "add": lambda h, rows: torch.zeros(8, 3).index_add(0, rows, h[: len(rows)]),
    "add to itself": lambda h, rows: h.index_add(0, rows, h[: len(rows)].sin()),
    "copy": lambda h, rows: torch.zeros(8, 3).index_copy(0, rows, h[: len(rows)]),
    "copy, other axis": lambda h, rows: torch.zeros(3, 8).index_copy(1, rows, h[: len(rows)].T),
    "copy into itself": lambda h, rows: h.index_copy(0, rows, h[: len(rows)].sin()),
    "scatter": lambda h, rows: torch.zeros(8, 3).scatter_add(0, rows[:, None].expand(-1, 3), h[: len(rows)]),
    "scatter, other axis": lambda h, rows: torch.zeros(3, 8).scatter_add(1, rows.expand(3, -1), h[: len(rows)].T),
    "scatter a part": lambda h, rows: torch.zeros(8, 3).scatter_add(0, rows[:, None].expand(-1, 3), h),
    "largest": lambda h, rows: torch.zeros(8, 3).scatter_reduce(0, rows[:, None].expand(-1, 3), h[: len(rows)], "sum", include_self=False),
}


@pytest.mark.parametrize("labels", [(0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 3, 0, 1, 2, 3), (3, 0, -1, 2, 1, 1, -1, 0), (1,) * 8])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 0, 5, 2], [1, 1], [2, 3, 6, 6, 7, 7, 7, 0]])
@pytest.mark.parametrize("name", SELECTED)
def test_rows_that_are_selected_by_number(name: str, rows: list[int], labels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from the numbers of the rows is what columns that are sent through the node tell."""
    leaf = torch.randn(8, 3, requires_grad=True)
    out = SELECTED[name](leaf * 1, torch.tensor(rows))
    axis = 1 if "other axis" in name else 0
    compare_with_columns(out, Layout(axis, labels[: out.shape[axis]], 4), monkeypatch)


MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]).bool()
LENGTHS = torch.tensor([3, 5, 1, 4, 2])
INDEXED: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda h: h[MASK[: len(h)]],
    "mask of bytes": lambda h: h[MASK[: len(h)].byte()],
    "mask, steps in front": lambda h: h.transpose(0, 1)[MASK[: len(h)].T],
    "places": lambda h: h[MASK[: len(h)].nonzero(as_tuple=True)],
    "places in another order, some twice": lambda h: h[(torch.tensor([1, 0, 4, 1, 0]) % len(h) - len(h), torch.tensor([4, -1, 0, 4, -4]))],
    "last steps": lambda h: h[ROWS[: len(h)], LENGTHS[: len(h)] - 1],
    "last steps, counted from behind": lambda h: h[ROWS[: len(h)], -LENGTHS[: len(h)]],
    "last steps, axis kept": lambda h: h[ROWS[: len(h), None], LENGTHS[: len(h), None] - 1],
    "last steps, rows by a mask": lambda h: h[ROWS[: len(h)] >= 0, LENGTHS[: len(h)] - 1],
    "last steps, behind another axis": lambda h: h[:, None][ROWS[: len(h)], 0, LENGTHS[: len(h)] - 1],
    "grid": lambda h: h[ROWS[: len(h), None], torch.tensor([0, -1, 3])],
    "steps": lambda h: h[:, torch.tensor([0, -1, 3])],
    "steps, two axes": lambda h: h[:, torch.tensor([[0, 1], [-1, 3]])],
    "entries of steps": lambda h: h[:, torch.tensor([0, -1, 3]), torch.tensor([2, 0, 1])],
    "entry of each": lambda h: h[ROWS[: len(h)], :, LENGTHS[: len(h)] % 3],
    "entry of each step": lambda h: h[ROWS[: len(h), None], ROWS, LENGTHS[: len(h), None] % 3],
    "packed": lambda h: pack_padded_sequence(h, LENGTHS[: len(h)].sort(descending=True).values, batch_first=True).data,
    "packed, steps in front": lambda h: pack_padded_sequence(h.transpose(0, 1), LENGTHS[: len(h)], enforce_sorted=False).data,
}


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("name", INDEXED)
def test_entries_that_are_selected_by_indices(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from indices is what columns that are sent through the node tell, along each axis."""
    out = INDEXED[name](torch.randn(5, 5, 3, requires_grad=True) * 1)
    for axis, rows in enumerate(out.shape):
        for labels in ([row % samples for row in range(rows)], [-1, *(row * row % samples for row in range(rows - 1))]):
            several = len({*labels} - {-1}) > 1
            with monkeypatch.context() as patch:
                assert compare_with_columns(out, Layout(axis, tuple(labels), samples), patch) or not (several or samples == 1)


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("name", INDEXED)
def test_losses_of_selected_entries(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of their samples, and no numbers are sent to find out which."""
    torch.manual_seed(0)
    select, model = INDEXED[name], extend(Sequential(Linear(4, 4), Sigmoid(), Linear(4, 3))).double()
    x, y = torch.randn(samples, 5, 4, **DOUBLE), torch.randn(samples, 5, 3, **DOUBLE)
    with monkeypatch.context() as patch, backpack(BatchGrad(), DiagGGNExact()):
        for function in ("crossings.probe", "predictions.call_once") if samples > 1 else ():
            patch.setattr(f"backpack.core.{function}", lambda *_: pytest.fail("numbers are sent"))
        F.mse_loss(select(model(x)), select(y)).backward()
    out, owners = select(model(x)).flatten(), select(torch.arange(samples)[:, None, None].expand(samples, 5, 3)).flatten()
    terms = F.mse_loss(out, select(y).flatten(), reduction="none") / len(out)
    for parameter in model.parameters():
        sums = (terms[owners == n].sum() for n in range(samples))
        close(parameter.grad_batch, torch.stack([torch.autograd.grad(term, parameter, retain_graph=True)[0] for term in sums]))
        jacobian = torch.stack([torch.autograd.grad(entry, parameter, retain_graph=True)[0] for entry in out])
        close(parameter.diag_ggn_exact, 2 / len(out) * jacobian.square().sum(0))


def compare_with_columns(out: Tensor, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compare what an operation tells of the samples with what columns tell that are sent through its node; say whether it tells anything."""
    node, states = out.grad_fn, {out.output_nr: layout}
    shapes = tuple(None if n is None else shape_of((n, nr)) for n, nr in node.next_functions)
    known = known_crossings(node, states, shapes)
    monkeypatch.setattr("backpack.core.crossings.known_crossings", lambda *_: None)
    probed = crossings_of(node, states, shapes)
    for ours, told, shape in zip(known or (), probed, shapes, strict=known is not None):
        assert (ours is None) == (told is None)
        if ours is not None:
            assert ours.way is told.way
            assert (ours.arrives is None) == (told.arrives is None)
        if ours is not None and told.arrives is not None:
            samples, expected = (along(torch.tensor(way.arrives.labels), way.arrives.axis, len(shape)).expand(shape) for way in (ours, told))
            seen = (samples >= 0) & (expected >= 0)
            assert torch.equal(samples[seen], expected[seen])
            assert seen.any() == (expected >= 0).any()
    return known is not None


CLASSES = torch.tensor([3, 0, 1, 2, 2, 0, 1, 3]).repeat(3)
REARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened": lambda h: h.flatten(0, 1),
    "flattened features": lambda h: h.flatten(1),
    "unflattened": lambda h: h.unflatten(0, (2, -1)),
    "unflattened features": lambda h: h.unflatten(-1, (3, 2)),
    "other grouping": lambda h: h.reshape(6, 4, 4),
    "one more axis": lambda h: h[:, None],
    "one axis less": lambda h: h[:, :1].squeeze(1),
    "permuted": lambda h: h.permute(-1, 0, 1),
    "transposed": lambda h: h.transpose(0, -1),
    "matrix": lambda h: h[:, 0].t(),
    "selected": lambda h: h.select(-2, 1),
    "selected sample": lambda h: h[1],
    "cut": lambda h: h[:, :-1],
    "cut, samples": lambda h: h[1:],
    "split": lambda h: h.split(2, -1)[0],
    "split, last part": lambda h: h.split([1, 3], 1)[1],
    "split, samples": lambda h: h.split(2)[1],
    "unbound": lambda h: h.unbind(1)[2],
    "joined": lambda h: torch.cat([h, h.sin(), torch.ones_like(h)], -1),
    "joined, samples": lambda h: torch.cat([h, h.sin()]),
    "stacked in front": lambda h: torch.stack([h, h.sin()]),
    "stacked behind": lambda h: torch.stack([h, h.sin()], -1),
    "sum": lambda h: h.sum((0, -1)),
    "sum, kept": lambda h: h.sum(1, keepdim=True),
    "mean": lambda h: h.mean(-2),
    "sum of all": lambda h: h.sum()[None],
    "flipped": lambda h: h.flip(-1),
    "flipped, samples": lambda h: h.flip(0),
    "rolled": lambda h: h.roll(1, 1),
    "rolled, all": lambda h: h.roll(1),
    "padded": lambda h: F.pad(h, (1, 2)),
    "padded, samples": lambda h: F.pad(h, (0, 0, 0, 0, 1, 0)),
    "pooled": lambda h: F.max_pool2d(h, 2),
    "pooled by averages": lambda h: F.adaptive_avg_pool2d(h, (2, 3)),
    "resized": lambda h: F.interpolate(h, scale_factor=2),
    "resized by lines": lambda h: F.interpolate(h[None], scale_factor=2, mode="bilinear")[0],
    "reflected": lambda h: F.pad(h, (1, 1), mode="reflect"),
    "limited": lambda h: h.clamp_min(-0.1).clamp_max(0.1),
    "softmax": lambda h: torch._safe_softmax(h, -1),
    "largest": lambda h: torch.maximum(h, h.sin()),
    "chosen": lambda h: torch.where(h.detach() > 0, h, h.sin()),
    "product": lambda h: torch.baddbmm(h[:, :, :3], h, torch.ones(4, 6, 3)),
    "solved": lambda h: torch.linalg.solve(h[..., :4], h),
    "solved, one matrix": lambda h: torch.linalg.solve(h[:1, :, :4], h),
    "solved, vectors": lambda h: torch.linalg.solve(h[..., :4], h[..., 0]),
    "solved by a triangle": lambda h: torch.linalg.solve_triangular(h[..., :4], h, upper=True),
    "solved by a triangle, transposed": lambda h: torch.linalg.solve_triangular(h[:, None, :, :4], h.mT[:, None], upper=False, left=False),
    "solved by a root": lambda h: torch.cholesky_solve(h, h[..., :4]),
    "inverse": lambda h: torch.linalg.inv(h[..., :4]),
    "root": lambda h: torch.linalg.cholesky(torch.eye(4) + h @ h.mT),
    "exponential": lambda h: torch.linalg.matrix_exp(h[..., :4]),
    "determinant": lambda h: torch.linalg.det(h[..., :4]),
    "logarithm of a determinant": lambda h: torch.linalg.slogdet(h[..., :4])[1],
    "eigenvalues": lambda h: torch.linalg.eigh(h[..., :4] + h[..., :4].mT)[0],
    "singular values": lambda h: torch.linalg.svd(h, full_matrices=False)[1],
    "factors": lambda h: torch.linalg.lu_factor(h[..., :4])[0],
    "triangle": lambda h: torch.linalg.qr(h[..., :4])[1],
    "products up to each": lambda h: h.cumprod(-1),
    "sums of exponentials up to each": lambda h: h.logcumsumexp(1),
    "largest up to each": lambda h: h.cummax(-1)[0],
    "smallest up to each": lambda h: h.cummin(1)[0],
    "sorted": lambda h: h.sort(1)[0],
    "two largest": lambda h: h.topk(2, 1)[0],
    "two largest samples": lambda h: h.topk(2, 0)[0],
    "gated": lambda h: F.glu(h, -1),
    "second": lambda h: h.kthvalue(2, -1)[0],
    "second, kept": lambda h: h.kthvalue(2, 1, keepdim=True)[0],
    "medians": lambda h: h.median(-1)[0],
    "medians of numbers": lambda h: h.nanmedian(1)[0],
    "most frequent": lambda h: h.mode(1)[0],
    "smallest of all": lambda h: torch.aminmax(h, dim=1)[0],
    "line": lambda h: torch.lerp(h, h.sin(), 0.3),
    "line, weights": lambda h: torch.lerp(h[:, :1], h.sin(), h.sigmoid()),
    "sum and product": lambda h: torch.addcmul(h, h[:, :1], h[:1]),
    "sum and ratio": lambda h: torch.addcdiv(h, h[:, :, :1], h.exp()),
    "angle": lambda h: torch.atan2(h, h[:, :1].cos()),
    "length": lambda h: torch.hypot(h, h.cos()),
    "warped": lambda h: F.grid_sample(h[:, None], h.unflatten(-1, (3, 2)).tanh(), align_corners=False),
    "gathered": lambda h: h.gather(1, (torch.arange(96).view(4, 4, 6) % 4)[:, :3]),
    "written": lambda h: h.scatter(2, torch.arange(48).view(4, 4, 3) % 6, h[..., :3].sin()),
    "added at": lambda h: h.scatter_add(2, torch.arange(48).view(4, 4, 3) % 6, h[..., :3].sin()),
    "largest at": lambda h: h.scatter_reduce(1, torch.arange(96).view(4, 4, 6) % 4, h.sin(), "amax"),
    "copied": lambda h: h.index_copy(1, torch.tensor([2, 0]), h[:, :2].sin()),
    "filled": lambda h: h.index_fill(2, torch.tensor([2, 0]), 0.5),
    "masked": lambda h: h.masked_fill(torch.arange(24).view(4, 6) % 5 == 1, 0.5),
    "put": lambda h: h.index_put((torch.arange(4), torch.tensor([1, 0, 3, 1])), h[:, 0].sin()),
    "put, broadcast": lambda h: h.index_put((torch.tensor([3, 1]), torch.tensor([1, 0])), h[0, 0].sin()),
    "put by a mask": lambda h: h.index_put((MASK[:4, :4],), h[:, 0].repeat(3, 1)[: int(MASK[:4, :4].sum())].sin()),
    "put by a mask of rows": lambda h: h.index_put((MASK[0, :4],), h[: int(MASK[0, :4].sum())].sin()),
    "added by numbers": lambda h: h.index_put((torch.tensor([3, 1, 1]),), h[:3].sin(), accumulate=True),
    "put into zeros": lambda h: torch.zeros(4, 6, 4).index_put((torch.arange(4)[:, None], torch.arange(6)), h.mT.sin()),
    "put in columns": lambda h: h.index_put((torch.arange(4)[:, None], torch.arange(4), torch.tensor([[1], [0], [5], [3]])), h[..., 0].cos()),
    "cross product": lambda h: torch.linalg.cross(h[..., :3], h[..., 3:]),
    "sum of numbers": lambda h: h.nansum(1),
    "cross-entropy": lambda h: F.cross_entropy(h.view(16, 6), torch.arange(16) % 6, reduction="none"),
    "cross-entropy of positions": lambda h: F.cross_entropy(h.view(2, 4, 2, 6), CLASSES.view(2, 2, 6), reduction="none"),
    "margins": lambda h: F.multi_margin_loss(h.view(16, 6), torch.arange(16) % 6, reduction="none"),
    "margins of labels": lambda h: F.multilabel_margin_loss(h.view(16, 6), torch.arange(96).view(16, 6) % 7 - 1, reduction="none"),
    "alignments": lambda h: F.ctc_loss(h.log_softmax(-1), ROWS[:4, None] % 5 + 1, torch.full((4,), 4), torch.ones(4).long(), reduction="none"),
    "squares": lambda h: F.mse_loss(h, torch.ones(4, 4, 6), reduction="none"),
    "huber": lambda h: F.huber_loss(h, torch.ones(4, 4, 6), reduction="none"),
    "huber, smooth": lambda h: F.smooth_l1_loss(h, torch.ones(4, 4, 6), reduction="none"),
    "binary": lambda h: F.binary_cross_entropy(h.sigmoid(), torch.ones(4, 4, 6), reduction="none"),
    "binary, logits": lambda h: F.binary_cross_entropy_with_logits(h, torch.ones(4, 4, 6), torch.rand(6), pos_weight=torch.rand(6), reduction="none"),
    "soft margins": lambda h: F.soft_margin_loss(h, torch.ones(4, 4, 6), reduction="none"),
    "kernels of groups": lambda h: F.conv1d(h, h.flatten(1)[:, :6].view(4, 2, 3).sin(), h[:, 0, 0], groups=2),
    "kernels of groups, transposed": lambda h: F.conv_transpose1d(h, h.flatten(1)[:, :6].view(4, 2, 3).sin(), groups=2),
    "entropy": lambda h: torch.xlogy(h.exp(), h[:, :1].exp()),
    "entropy of more": lambda h: torch.special.xlog1py(h, h.exp()),
    "sum of exponentials": lambda h: torch.logaddexp(h, h[:1].sin()),
    "sum of powers": lambda h: torch.logaddexp2(h, h[..., :1].sin()),
    "larger": lambda h: torch.fmax(h, h[..., :1]),
    "smaller": lambda h: torch.fmin(h, h.sin()),
    "scaled by powers": lambda h: torch.ldexp(h, torch.tensor([1, 0, 2, 1, 0, 1])),
    "subtracted": lambda h: 1 - h,
    "slope": lambda h: torch.ops.aten._prelu_kernel(h, h[:1]),
    "random slope": lambda h: F.rrelu(h, training=True),
    "logit": lambda h: torch.logit(h.sigmoid()),
    **{
        f"special function: {name}": lambda h, name=name: getattr(torch.special, name)(h.exp() + 2.1)
        for name in "digamma gammaln i0 i0e i1 i1e sinc log_ndtr entr erfcx".split()
    },
    "special function: polygamma": lambda h: torch.polygamma(1, h.exp()),
    "special function: multigammaln": lambda h: torch.special.multigammaln(h.exp() + 2, 2),
    "special function: ndtri": lambda h: torch.special.ndtri(h.sigmoid()),
    "special function: erfinv": lambda h: torch.erfinv(h.tanh()),
}


@pytest.mark.parametrize("pattern", ["one a row", "blocks", "by turns", "any", "some"])
@pytest.mark.parametrize("name", REARRANGED)
def test_operations_that_tell_where_entries_go(name: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from axes and shapes is what columns that are sent through the node tell, along each axis."""
    torch.manual_seed(0)
    out, told = REARRANGED[name](torch.randn(4, 4, 6, requires_grad=True) * 1), False
    for axis, rows in enumerate(out.shape):
        labels = {
            "one a row": range(rows),
            "blocks": [row // 2 for row in range(rows)],
            "by turns": [row % 2 for row in range(rows)],
            "any": [row * row % 5 for row in range(rows)],
            "some": torch.where(torch.rand(rows) > 0.5, torch.arange(rows), -1).tolist(),
        }[pattern]
        with monkeypatch.context() as patch:
            told = compare_with_columns(out, Layout(axis, tuple(labels), 24), patch) or told
    found_out = ("other grouping", "sum of all", "padded, samples", "rolled, all", "solved, one matrix", "solved, vectors")
    assert told or pattern == "some" or name in found_out or (name.startswith("kernels") and pattern != "blocks")


class Products(Module):
    """A product that is no module's, in front of functions of one sample at a time."""

    def __init__(self, front: Callable[[Module, Tensor], Tensor], each: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix, self.scale, self.layer = Parameter(torch.randn(3, 4)), Parameter(torch.randn(3)), Linear(3, 4)
        self.front, self.each = front, each

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.each(rows) for rows in self.front(self, x)])


@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize(
    "each",
    [lambda y: y * y.sum(), lambda y: y / y.norm(), lambda y: y - y.mean(), lambda y: (y @ y)[None], lambda y: y + y.sum(0, keepdim=True)],
    ids=["sum", "norm", "mean", "dot", "kept axis"],
)
@pytest.mark.parametrize(
    "front",
    [lambda net, x: x @ net.matrix, lambda net, x: F.linear(x, net.layer.weight, net.layer.bias).tanh(), lambda net, x: x * net.scale],
    ids=["matrix", "function", "scale"],
)
def test_functions_of_one_sample_behind_products(front: Callable, each: Callable, samples: int) -> None:
    """What is summed within a sample is its own, also where no module was called with data."""
    net, x = Products(front, each).double(), torch.randn(samples, 3, **DOUBLE)
    losses, parameters = net(x).square().sum(1), tuple(net.parameters())
    expected = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
    extend(net)
    with backpack(BatchGrad()):
        net(x).square().sum().backward()
    for parameter, gradients in zip(parameters, zip(*expected, strict=True), strict=True):
        if gradients[0] is not None:
            close(parameter.grad_batch, torch.stack(gradients))


class Vectors(Module):
    """Rows of two parameters are used by turns: a planar flow, with the logarithm of a determinant that all samples share."""

    def __init__(self, rows: Callable[[Tensor], Iterable[Tensor]]) -> None:
        super().__init__()
        self.w, self.u, self.mix, self.rows = Parameter(torch.randn(4, 3)), Parameter(torch.randn(4, 3)), Parameter(torch.randn(3, 3)), rows

    def forward(self, x: Tensor) -> Tensor:
        logarithms = x.new_zeros(len(x)) + torch.slogdet(self.mix)[1]
        x = x @ self.mix
        for w, u in zip(self.rows(self.w), self.rows(self.u), strict=True):
            x = x + u * torch.tanh(x @ w)[:, None]
        return logarithms - x.square().sum(1)


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("rows", [list, lambda p: [p[i] for i in range(len(p))], lambda p: [p[0], p[-1], p[0]]])
def test_cost_of_vectors_of_a_stack(rows: Callable[[Tensor], Iterable[Tensor]], samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are layers; a stack is filled with zeros once, and what depends on one number is differentiated with respect to that once."""
    torch.manual_seed(0)
    model, x = extend(Vectors(rows).double()), torch.randn(samples, 3, **DOUBLE)
    expected = [torch.autograd.grad(model(x[n : n + 1]).sum() / samples, tuple(model.parameters())) for n in range(samples)]
    monkeypatch.setattr(crossings.Gap, "call_masked", lambda *_: pytest.fail("a layer is crossed sample by sample"))
    called, call = [], crossings.call_node

    def count(node: Node, columns: list[Tensor | None], **more: Any) -> list[Tensor | None]:
        if not more:  # not to find out where samples go
            called.append((operation(node), max(len(c) for c in columns if c is not None)))
        return call(node, columns, **more)

    monkeypatch.setattr(crossings, "call_node", count)
    with backpack(BatchGrad()):
        model(x).mean().backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in expected]))
    assert samples == 1 or [name for name, _ in called].count("Select") in (0, 2)
    assert [columns for name, columns in called if name == "LinalgSlogdet"] == [1]


class Applied(Function):
    """A function of activations, of which the backward is a given one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.given = backward
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.given(grad), None


BACKWARD: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "reversed": (lambda g: -g, True),
    "features mixed": (lambda g: g.cumsum(1), True),
    "rows without a gradient": (lambda g: g * (torch.arange(len(g)) % 3 > 0)[:, None], True),
    "nothing": (torch.zeros_like, True),
    "rows exchanged": (lambda g: g.flip(0), True),
    "centered": (lambda g: g - g.mean(0), False),
    "a little of the next row": (lambda g: g + 1e-12 * g.roll(1, 0), False),
}


@pytest.mark.parametrize("small", [0, 2**14])
@pytest.mark.parametrize("samples", [2, 5, 8])
@pytest.mark.parametrize("name", BACKWARD)
def test_functions_of_activations(name: str, samples: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of large activations are probed by one column after the other, unless they move samples; both tell the same."""
    monkeypatch.setattr(crossings, "_SMALL", small)
    if not small and name in ("reversed", "features mixed", "rows without a gradient", "nothing"):
        monkeypatch.setattr(crossings, "probe", lambda *_: pytest.fail("all columns are sent at once"))
    torch.manual_seed(0)
    (given, alone), first, x = BACKWARD[name], Linear(3, 4, **DOUBLE), torch.randn(samples, 3, **DOUBLE)
    model = extend(Sequential(first, Called(lambda h: Applied.apply(h, given)), Linear(4, 2, **DOUBLE)))
    with backpack(BatchGrad()), nullcontext() if alone else pytest.raises(UnsupportedError, match="AppliedBackward"):
        model(x).square().sum().backward()
    if alone:
        arrived = given(2 * model(x).detach() @ model[2].weight.detach())
        rows = slice(None) if name != "rows exchanged" else torch.arange(samples).flip(0)  # samples are those of the output
        close(first.weight.grad_batch, torch.einsum("no,ni->noi", arrived, x)[rows])
        close(first.bias.grad_batch, arrived[rows])


class Called(Module):
    """A function, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "lengths": lambda h: torch.stack([h[i, : i % 3 + 1].mean(0) for i in range(len(h))]),
    "lengths, from rows": lambda h: torch.stack([u[: i % 3 + 1].mean(0) for i, u in enumerate(h)]),
    "steps": lambda h: torch.stack([h[i, i % 3] for i in range(len(h))]),
    "steps, backwards": lambda h: torch.stack([h[i, -1 - i % 3].sin() for i in reversed(range(len(h)))]).flip(0),
    "axis kept": lambda h: torch.cat([h[i : i + 1, ::2].sum(1) for i in range(len(h))]),
    "features": lambda h: torch.stack([torch.cat([h[i, 1, :2], h[i, 0, 2:]]) for i in range(len(h))]),
}


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_single_samples(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose they are is told by their numbers."""
    call = crossings.call_node

    def check(node: Node, columns: list[Tensor | None], probing: bool = False) -> list[Tensor | None]:
        assert not probing or samples == 1 or operation(node) not in ("Select", "Slice")
        return call(node, columns, probing)

    monkeypatch.setattr(crossings, "call_node", check)
    torch.manual_seed(0)
    first, last = Linear(2, 4, **DOUBLE), Linear(4, 3, **DOUBLE)
    model = extend(Sequential(first, Called(lambda h: PARTS[name](h.tanh())), last))
    pass_over(model, torch.randn(samples, 3, 2, **DOUBLE), torch.arange(samples) % 3)


class Relative(Module):
    """Attention with what a layer makes of positions, or of a buffer, beside keys."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.query, self.last = Linear(2, 4, **DOUBLE), Linear(4, 3, **DOUBLE)
        self.table = Embedding(9, 4, **DOUBLE) if positions else Sequential(Linear(2, 4, **DOUBLE), Sigmoid())
        self.register_buffer("known", torch.arange(5)[:, None] - torch.arange(5) + 4 if positions else torch.randn(5, 5, 2, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        differences = torch.arange(5)[:, None] - torch.arange(5) + 4 if isinstance(self.table, Embedding) else self.known
        scores = torch.einsum("nqd,qkd->nqk", q, self.table(differences))
        return self.last((scores.softmax(-1) @ q).sum(1))


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("positions", [True, False])
def test_relative_positions(positions: bool, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer makes of them is a factor of a layer, and has its Kronecker factors."""
    if samples > 1:
        monkeypatch.setattr(crossings.Gap, "call_masked", lambda *_: pytest.fail("a layer is crossed sample by sample"))
    torch.manual_seed(0)
    model = extend(Relative(positions))
    pass_over(model, torch.randn(samples, 5, 2, **DOUBLE), torch.arange(samples) % 3)
    lossfunc = extend(CrossEntropyLoss())
    with backpack(KFLR()):
        lossfunc(model(torch.randn(samples, 5, 2, **DOUBLE)), torch.arange(samples) % 3).backward()
    weight = model.table.weight if positions else model.table[0].weight
    counts = torch.bincount(model.known.flatten()).double() if positions else torch.einsum("tsi,tsj->ij", model.known, model.known)
    close(weight.kflr[0 if positions else 1], counts)


class TwoSided(Module):
    """Takes and returns two tensors, of which the second one is made of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Linear(4, 4, **DOUBLE), Linear(4, 4, **DOUBLE)

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).tanh(), self.other(table)


class Hooked(Module):
    """A net of such modules."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = Parameter(torch.randn(5, 4, **DOUBLE)), TwoSided(), TwoSided()
        self.last = Sequential(Linear(4, 4, **DOUBLE), Sigmoid(), Linear(4, 3, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        x, table = self.second(*self.first(x, self.table))
        return self.last(x * table[0]) + table.sum(1)[1]


@pytest.mark.parametrize("N", [1, 2, 4])
@pytest.mark.parametrize("pre", [False, True])
def test_full_backward_hooks_of_modules(N: int, pre: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that they hang into the graph return what they are given: nothing is sent through them, and hooks see what they always see."""
    torch.manual_seed(0)
    model, seen = Hooked(), []

    def look(module: Module, *gradients: tuple[Tensor | None, ...]) -> None:
        seen.append([None if gradient is None else gradient.clone() for part in gradients for gradient in part])

    for module in model.modules():
        (module.register_full_backward_pre_hook if pre else module.register_full_backward_hook)(look)
    call_node = crossings.call_node

    def call(node: Node, columns: list[Tensor | None], probing: bool = False) -> list[Tensor | None]:
        assert not (probing and isinstance(node, HOOKED))
        return call_node(node, columns, probing)

    monkeypatch.setattr(crossings, "call_node", call)
    x, y = torch.randn(N, 4, **DOUBLE, requires_grad=True), torch.randint(0, 3, (N,))
    pass_over(extend(model), x, y)
    seen.clear()
    with backpack(BatchGrad(), DiagGGNExact()):
        F.cross_entropy(model(x), y).backward()
    with_quantities, seen[:] = [*seen], []
    F.cross_entropy(model(x), y).backward()
    assert len(seen) == len(with_quantities) > 0
    for expected, found in zip(seen, with_quantities, strict=True):
        assert all((one is None and two is None) or torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def added_to_columns(h: Tensor, x: Tensor) -> Tensor:
    h[..., :2] += x[..., :2].sin()
    return h


def added_to_columns_of_rows(h: Tensor, x: Tensor) -> Tensor:
    h[:, 1, 1:] -= x[:, 0, 1:].cos()
    return h


def written_by_strides(h: Tensor, x: Tensor) -> Tensor:
    return h.transpose(1, 2).contiguous().as_strided(h.shape, (h[0].numel(), 1, 2)) * x


def read_twice_by_strides(h: Tensor, x: Tensor) -> Tensor:
    return h.contiguous().as_strided((len(h), 2, 4), (8, 0, 1)) * x


STRIDED = [added_to_columns, added_to_columns_of_rows, written_by_strides, read_twice_by_strides]


class Moving(Module):
    """Layers around an operation on a part of what the first one makes."""

    def __init__(self, move: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last, self.move = Linear(4, 4, **DOUBLE), Linear(4, 4, **DOUBLE), Linear(8, 3, **DOUBLE), move

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.move(self.first(x), self.second(x)).tanh().flatten(1))


@pytest.mark.parametrize("N", [1, 2, 3, 8])
@pytest.mark.parametrize("move", STRIDED)
def test_parts_that_are_read_and_written_by_strides(move: Callable[[Tensor, Tensor], Tensor], N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column tells where samples go, unless entries are read twice."""
    torch.manual_seed(0)
    if N > 1 and move is not read_twice_by_strides:
        monkeypatch.setattr(crossings, "probe", lambda *_: pytest.fail("all columns are sent at once"))
    pass_over(extend(Moving(move)), torch.randn(N, 2, 4, **DOUBLE), torch.randint(0, 3, (N,)))


@pytest.mark.parametrize("N", [3, 5])
def test_samples_that_are_averaged_in_place(N: int) -> None:
    """What a part gets of several samples has the weight of one."""

    def average(h: Tensor, x: Tensor) -> Tensor:
        eye = torch.eye(N, **DOUBLE)
        h[:, 1].addmm_((eye.roll(1, 0) + eye.roll(-1, 0)) / 2, x[:, 0])
        return h

    model = extend(Moving(average))
    with backpack(BatchGrad()), pytest.raises(BackpackError, match="mix|influence"):
        F.cross_entropy(model(torch.randn(N, 2, 4, **DOUBLE)), torch.zeros(N, dtype=torch.long)).backward()
