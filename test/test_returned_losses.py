"""Models that return their loss: where the samples lie can only be told from the modules inside; exact, or refused, never rows taken for samples."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_extensions import close
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, results
from backpack.extensions import BatchDiagGGNExact, BatchGrad, BatchL2Grad, Variance
from backpack.utils.errors import BackpackError, UnattributedError, UnsupportedError


class Model(nn.Module):
    """Two layers; how they are applied, and to what, is what the cases are about."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 4)

    def scores(self, x: Tensor) -> Tensor:
        """Scores of four classes."""
        return self.head(self.body(x).tanh())


class Rows(Model):
    """``[N, 4]``; one row a sample."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), y)


class Positions(Model):
    """``[N, T, 4]``, flattened for the loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x).flatten(0, 1), y.flatten())


class Shifted(Model):
    """``[N, T, 4]``, without its last position: another view of what was given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x[:, :-1]).transpose(1, 2), y[:, 1:])


class Functional(Model):
    """``[N, 4]``, without calling the last layer."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.body(x).tanh(), self.head.weight, self.head.bias), y)


class InPlace(Model):
    """``[N, T, 4]``, with an activation in place on the view that a layer returns of its product with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.activation(self.body(x))).flatten(0, 1), y.flatten())


class Weighted(Model):
    """``[N, T, 4]``, mixed by weights of positions, which come first among the arguments."""

    def forward(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((weights @ self.scores(x)).mean(1), y[:, 0])


class Nested(Model):
    """``[N, 4]`` in a mapping, the loss over parts of the mini-batch."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        parts = zip(self.body(batch["x"]).tanh().chunk(self.parts), batch["y"].chunk(self.parts), strict=True)
        return sum(F.cross_entropy(self.head(h), part, reduction="sum") for h, part in parts) / len(batch["y"])


class TimeFirst(Model):
    """``[N, T, 4]``, computed as ``[T, N, 4]``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x.transpose(0, 1)).mean(0), y[:, 0])


class TimeFirstCopy(Model):
    """The same, with a copy, of which nobody can tell that it is one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x.transpose(0, 1).contiguous()).mean(0), y[:, 0])


class Chunks(Model):
    """``[N, 4]``; the loss over parts of the mini-batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(self.body(x).tanh().chunk(2), y.chunk(2), strict=True)
        return sum(F.cross_entropy(self.head(h), part, reduction="sum") for h, part in parts) / len(y)


class Sequences(Model):
    """``[N, T, 4]``; the loss of one sequence after the other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return sum(F.cross_entropy(self.head(h), one) for h, one in zip(self.body(x).tanh(), y, strict=True)) / len(y)


class Einsum(Model):
    """``[N, 4]``, the last product with the samples on another axis."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.einsum("nd,cd->nc", self.body(x).tanh(), self.head.weight) + self.head.bias, y)


class Turned(Model):
    """``[N, 4]``, the last product of turned matrices."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((self.head.weight @ self.body(x).tanh().T).T + self.head.bias, y)


class Tokens(Model):
    """``[N, T, 4]``; the loss over parts of all tokens."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(self.body(x).tanh().flatten(0, 1).split(2), y.flatten().split(2), strict=True)
        return sum(F.cross_entropy(self.head(h), part, reduction="sum") for h, part in parts) / y.numel()


class Bag(Model):
    """``[N, T, 4]``; a sample is a bag of rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x.flatten(0, 1)).view(len(x), -1, 4).mean(1), y[:, 0])


class Cast(Model):
    """``[N, T, 4]`` in another precision, so that nobody can tell where the rows come from."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x.float().double()).flatten(0, 1), y.flatten())


class TimeFirstFunctional(Model):
    """``[N, T, 4]``, computed as ``[T, N, 4]``, without calling the first layer."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = (x.transpose(0, 1) @ self.body.weight.T + self.body.bias).tanh()
        return F.cross_entropy(self.head(h).flatten(0, 1), y.T.flatten())


class Learned(TimeFirst):
    """The same of an input that has a gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.detach().requires_grad_(), y)


class Masked(Model):
    """``[N, T, 4]``; the loss of as many positions as there are samples, of a copy of what was given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = torch.zeros_like(y, dtype=torch.bool)
        chosen[0, :2] = chosen[2, 2] = True
        return F.cross_entropy(self.head(self.body(x * 1.0).tanh()[chosen]), y[chosen])


class Sorted(Model):
    """``[N, 4]`` in another order."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return F.cross_entropy(self.scores(x[order]), y[order])


class TwoHeads(Model):
    """``[N, T, 4]``; one layer is given a view, which tells nothing of the other, which is given a copy in another order."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x[:, 0]), y[:, 0] % 3) + F.cross_entropy(self.head(x.transpose(0, 1)[..., :3] * 0.5).mean(0), y[:, 0])


def given(cls: type[Model], samples: int, length: int) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (samples,) if cls in (Rows, Functional, Einsum, Turned, Chunks, Sorted) else (samples, length)
    return cls().double(), torch.randn(*shape, 4, dtype=torch.float64), torch.randint(4, shape)


def check(cls: type[Model], samples: int, length: int, extensions: tuple) -> None:
    model, x, y = given(cls, samples, length)
    alone = [torch.autograd.grad(model(x[n : n + 1], y[n : n + 1]) / samples, tuple(model.parameters())) for n in range(samples)]
    curvatures = [ggn_diagonal(model, samples, x[n : n + 1], y[n : n + 1]) for n in range(samples)]
    extend(model)
    with backpack(*extensions):
        model(x, y).backward()
    for i, parameter in enumerate(model.parameters()):
        expected = torch.stack([gradients[i] for gradients in alone])
        for extension in extensions:
            found = getattr(parameter, extension.savefield)
            if isinstance(extension, BatchGrad):
                close(found, expected)
            elif isinstance(extension, Variance):
                close(found, expected.var(0, correction=0))
            else:
                close(found, torch.stack([diagonals[i] for diagonals in curvatures]))


def ggn_diagonal(model: Model, samples: int, *given: Tensor) -> list[Tensor]:
    """The generalized Gauss-Newton of the cross-entropies of one sample, from Jacobians of its scores."""
    taken: list[Tensor] = []
    original = F.cross_entropy

    def take(scores: Tensor, labels: Tensor, **options: str) -> Tensor:
        taken.append(scores.movedim(1, -1).flatten(0, -2))
        return original(scores, labels, **options)

    F.cross_entropy = take
    try:
        model(*given)
    finally:
        F.cross_entropy = original
    rows = torch.cat(taken)
    diagonals = [torch.zeros_like(p) for p in model.parameters()]
    for row in rows:
        p = row.softmax(0).detach()
        hessian = (p.diag() - p.outer(p)) / (len(rows) * samples)
        jacobians = [torch.autograd.grad(entry, tuple(model.parameters()), retain_graph=True) for entry in row]
        for i, diagonal in enumerate(diagonals):
            jacobian = torch.stack([columns[i] for columns in jacobians])
            diagonal.add_(torch.einsum("c...,cd,d...->...", jacobian, hessian, jacobian))
    return diagonals


def sample_gradients(model: Model, losses: list[Tensor]) -> list[Tensor]:
    gradients = [torch.autograd.grad(loss / len(losses), tuple(model.parameters()), allow_unused=True, materialize_grads=True) for loss in losses]
    return [torch.stack(of_parameter) for of_parameter in zip(*gradients, strict=True)]


@pytest.mark.parametrize("length", [2, 3])
def test_samples_of_another_argument(length: int) -> None:
    """The first argument need not be that with the samples: which one the first layer is given tells."""
    torch.manual_seed(0)
    model, weights, x = Weighted().double(), torch.randn(length, length, dtype=torch.float64), torch.randn(3, length, 4, dtype=torch.float64)
    y = torch.randint(4, (3, length))
    expected = sample_gradients(model, [model(weights, x[n : n + 1], y[n : n + 1]) for n in range(3)])
    curvatures = [ggn_diagonal(model, 3, weights, x[n : n + 1], y[n : n + 1]) for n in range(3)]
    extend(model)
    with backpack(BatchGrad(), BatchDiagGGNExact()):
        model(weights, x, y).backward()
    for i, (parameter, gradients) in enumerate(zip(model.parameters(), expected, strict=True)):
        close(parameter.grad_batch, gradients)
        close(parameter.diag_ggn_exact_batch, torch.stack([diagonals[i] for diagonals in curvatures]))


class Crossed(Model):
    """``[T, N, 4]``, with labels ``[N, T]``."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known = known

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.scores(x)
        return F.cross_entropy(scores.movedim(0, -1), y) if self.known else (scores.sum(-1).T - y).square().mean()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("samples", "length"), [(3, 5), (5, 3), (2, 4)])
def test_a_sequence_time_first_beside_labels(samples: int, length: int, known: bool) -> None:
    """What the first layer is given confirms no rows of it where another argument has its first two axes in the other order."""
    torch.manual_seed(0)
    model = extend(Crossed(known).double())
    x, y = torch.randn(length, samples, 4, dtype=torch.float64), torch.randint(4, (samples, length))
    with pytest.raises(BackpackError, match="could be others"), backpack(BatchGrad(), Variance()):
        model(x, y).backward()


class Towers(nn.Module):
    """A layer for ``[N, 4]``, and one for ``[K, 4]`` that all of these are compared with, as shared negatives are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.left, self.right, self.how = nn.Linear(4, 3), nn.Linear(4, 3), how

    def forward(self, *given: Any) -> Tensor:
        x, others = (given[0][name] for name in "xy") if len(given) == 1 else given
        left, right = self.left(x), self.right(others)
        if self.how == "apart":  # labelled samples, and others
            return left.square().mean() + right.square().mean()
        return (left @ right.T if self.how == "product" else (right[:, None] * left).sum(-1)).square().mean()


@pytest.mark.parametrize("wrap", [lambda x, y: (x, y), lambda x, y: ({"x": x, "y": y},), lambda x, y: (Closed(x, y),)])
@pytest.mark.parametrize("how", ["product", "sum", "apart"])
@pytest.mark.parametrize(("samples", "number"), [(3, 5), (5, 3), (1, 3), (3, 1)])
def test_arguments_that_say_different_numbers_of_samples(samples: int, number: int, how: str, wrap: Callable[[Tensor, Tensor], tuple]) -> None:
    """A number of rows that one argument confirms is none where another one confirms another."""
    torch.manual_seed(0)
    model = extend(Towers(how).double())
    given = wrap(torch.randn(samples, 4, dtype=torch.float64), torch.randn(number, 4, dtype=torch.float64))
    with pytest.raises(BackpackError), backpack(BatchGrad()):
        model(*given).backward()
    assert not results(model)


class Closed:
    """Shows nothing of what it holds."""

    __slots__ = ("_get",)

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._get = {"x": x, "y": y}.__getitem__

    def __getitem__(self, name: str) -> Tensor:
        return self._get(name)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mapping", [dict, UserDict])
def test_samples_in_a_mapping(mapping: type, parts: int) -> None:
    """Tensors in it are counted, and compared, like arguments."""
    torch.manual_seed(0)
    model, batch = Nested(parts).double(), mapping(x=torch.randn(4, 4, dtype=torch.float64), y=torch.randint(4, (4,)))
    expected = sample_gradients(model, [model({"x": batch["x"][n : n + 1], "y": batch["y"][n : n + 1]}) for n in range(4)])
    extend(model)
    with backpack(BatchGrad()):
        model(batch).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


FIRST = (BatchGrad(), Variance())
SECOND = (BatchDiagGGNExact(),)


@pytest.mark.parametrize("cls", [Rows, Positions, Shifted, Functional, InPlace, Einsum, Turned, Cast])
@pytest.mark.parametrize(("samples", "length"), [(1, 2), (1, 4), (2, 3), (3, 2), (5, 3)])
def test_one_row_a_sample(cls: type[Model], samples: int, length: int) -> None:
    """Where modules inside return as many rows as the model is given samples, these are the samples."""
    check(cls, samples, length, FIRST + SECOND)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "linear": lambda h, w, b, y: (F.linear(h, w, b).flatten(0, 1), y.flatten()),
    "of rows": lambda h, w, b, y: (F.linear(h.flatten(0, 1), w, b), y.flatten()),
    "time first": lambda h, w, b, y: (F.linear(h.transpose(0, 1), w, b).flatten(0, 1), y.T.flatten()),
    "parts": lambda h, w, b, y: (F.linear(torch.cat([h[:, 1:].flatten(0, 1), h[:, 0]]), w, b), torch.cat([y[:, 1:].flatten(), y[:, 0]])),
    "other order": lambda h, w, b, y: ((h.flatten(0, 1).flip(0) @ (w / 2).T + b).tanh(), y.flatten().flip(0)),
    "einsum": lambda h, w, b, y: ((torch.einsum("cd,ntd->ntc", w, h) + b).flatten(0, 1), y.flatten()),
    "columns": lambda h, w, b, y: ((w @ h.flatten(0, 1).T).T + b, y.flatten()),
    "twice": lambda h, w, b, y: (F.linear(F.linear(F.linear(h, w, b), w.T), w).flatten(0, 1), y.flatten()),
    "normalized": lambda h, w, b, y: (F.rms_norm(F.linear(F.layer_norm(h, (3,)), w, b), (4,)).flatten(0, 1), y.flatten()),
    "frozen": lambda h, w, b, y: (F.linear(h.flatten(0, 1), w.detach(), b), y.flatten()),
}
"""How rows of all positions, and labels, are made of what a layer returns, and of the matrix and bias of one that is not called."""


def of_rows(way: str) -> type[Model]:
    class Product(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight.requires_grad_(way != "frozen")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(*PRODUCTS[way](self.body(x).tanh(), self.head.weight, self.head.bias, y))

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return (p for p in super().parameters(recurse) if p.requires_grad)

    return Product


@pytest.mark.parametrize("way", PRODUCTS)
@pytest.mark.parametrize(("samples", "length"), [(1, 3), (2, 2), (3, 2), (5, 3), (5, 1)])
def test_rows_of_a_product_are_those_of_its_factor(way: str, samples: int, length: int) -> None:
    """A matrix that is not a layer's, behind all modules: of a table of words that is the output layer, too."""
    check(of_rows(way), samples, length, FIRST + SECOND)


def test_rows_of_a_product_in_the_loss() -> None:
    """``linear_cross_entropy`` takes the matrix itself."""
    torch.manual_seed(0)

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear_cross_entropy(self.layer(self.table(x[:, :-1])).flatten(0, 1), self.table.weight, x[:, 1:].flatten())

    model, x = Writer().double(), torch.randint(7, (3, 5))
    expected = sample_gradients(model, [model(x[n : n + 1]) for n in range(3)])
    extend(model)
    with backpack(BatchGrad()):
        model(x).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_products_of_samples_with_samples(length: int) -> None:
    """Rows are those of both factors: every sample takes part in the losses of all others."""

    class Contrastive(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x).tanh().flatten(0, 1)
            return F.cross_entropy(h @ h.T, torch.arange(len(h)))

    model = extend(Contrastive().double())
    with pytest.raises(BackpackError), backpack(*SECOND):
        model(torch.randn(3, length, 4, dtype=torch.float64)).backward()
    assert results(model) == {}


@pytest.mark.parametrize("cls", [Chunks, Sequences, Tokens])
@pytest.mark.parametrize(("samples", "length"), [(1, 3), (3, 2), (3, 4), (4, 3), (5, 2)])
def test_layer_called_on_parts(cls: type[Model], samples: int, length: int) -> None:
    """Of the last layer, which is called for a few samples or positions at a time, to save memory, rows are those that it was given."""
    check(cls, samples, length, FIRST + SECOND)


class Own(nn.Linear):
    """A layer without a rule: it has a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / 2, self.bias)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("change", [lambda x: x.transpose(0, 1), lambda x: 2 * x.transpose(0, 1)], ids=["view", "copy"])
@pytest.mark.parametrize("samples", [2, 3, 4])
def test_layers_without_a_rule_that_are_given_time_first(samples: int, change: Callable[[Tensor], Tensor], inside: bool) -> None:
    """As many steps as samples could be either; of another number, no rows are samples."""

    class Time(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Own(4, 5), nn.Sequential(Own(5, 2)) if inside else Own(5, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.last(self.first(change(x)).tanh()).mean(0) - y).square().sum()

    model, x, y = extend(Time()), torch.randn(samples, 3, 4), torch.randn(samples, 2)
    with pytest.raises(BackpackError, match="Let the model return its predictions"), backpack(BatchGrad()):
        model(x, y).backward()
    assert results(model) == {}


@pytest.mark.parametrize("samples", [3, 4])
def test_layers_without_a_rule_behind_one_that_has(samples: int) -> None:
    """What the first layer is given tells the samples, however many steps there are."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), Own(5, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.last(self.first(x).tanh()).mean(1) - y).square().sum()

    model, x, y = Steps().double(), torch.randn(samples, 3, 4).double(), torch.randn(samples, 2).double()
    expected = [torch.autograd.grad(model(x[n : n + 1], y[n : n + 1]), tuple(model.parameters())) for n in range(samples)]
    extend(model)
    with backpack(BatchGrad()):
        model(x, y).backward()
    for parameter, gradients in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        close(parameter.grad_batch, torch.stack(gradients))


class Holder(nn.Module):
    """Holds a model where ``torch.nn`` does not look for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = (model,)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self._held[0](x.flatten(0, -2)), y.flatten())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_models_that_are_not_registered(length: int) -> None:
    """The rows of a model inside are the samples where they are as many."""
    torch.manual_seed(0)
    inside, x, y = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)), torch.randn(3, length, 4), torch.randint(4, (3, length))
    model = extend(Holder(extend(inside)))
    if length > 1:
        with pytest.raises(BackpackError, match="Let the model return its predictions"), backpack(*FIRST):
            model(x, y).backward()
        assert results(inside) == {}
        return
    losses = [F.cross_entropy(inside(x[n]), y[n]) / 3 for n in range(3)]
    expected = [torch.autograd.grad(loss, tuple(inside.parameters())) for loss in losses]
    with backpack(*FIRST):
        model(x, y).backward()
    for parameter, gradients in zip(inside.parameters(), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(gradients))


@pytest.mark.parametrize("cls", [Rows, Positions, Shifted])
@pytest.mark.parametrize("length", [3, 4])
def test_as_many_positions_as_samples(cls: type[Model], length: int) -> None:
    """What the first layer is given is a view of what the model is given, which tells samples and positions apart."""
    check(cls, length, length, FIRST + SECOND)


@pytest.mark.parametrize(("samples", "length"), [(1, 3), (2, 3), (3, 2), (4, 1)])
def test_neighbours_of_one_sample(samples: int, length: int) -> None:
    """What the loss has a row for is a sample, of which a layer was given several neighbouring rows."""
    check(Bag, samples, length, FIRST + SECOND)


@pytest.mark.parametrize(
    ("cls", "samples", "length"),
    [
        (TimeFirst, 3, 3),
        (TimeFirstCopy, 3, 3),
        (TimeFirstFunctional, 3, 3),
        (Learned, 3, 3),
        (Cast, 3, 3),
        (Sequences, 3, 3),
        (Tokens, 2, 4),
        (Masked, 3, 5),
        (Sorted, 4, 0),
        (TwoHeads, 3, 3),
    ],
)
@pytest.mark.parametrize("extensions", [FIRST, SECOND], ids=["first", "second"])
def test_rows_that_may_be_something_else(cls: type[Model], samples: int, length: int, extensions: tuple) -> None:
    """Rows are refused that are not as many as samples, that come from elsewhere, or that could as well be positions."""
    model, x, y = given(cls, samples, length)
    extend(model)
    with pytest.raises(BackpackError), backpack(*extensions):
        model(x, y).backward()
    assert results(model) == {}


class Prototypes(nn.Module):
    """A loss by hand, of the products of what two layers make of samples and of prototypes."""

    def __init__(self, number: int, made: Callable[[Prototypes], Tensor]) -> None:
        super().__init__()
        self.made, self.embed, self.key, self.table = made, nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(number, 2)
        self.rows, self.attribute = nn.Parameter(torch.randn(number, 2)), torch.randn(number, 2, dtype=torch.float64)
        self.register_buffer("grid", torch.randn(number, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.embed(x).tanh() @ self.key(self.made(self)).T - y).square().sum()


MADE: dict[str, Callable[[Prototypes], Tensor]] = {
    "parameter": lambda net: net.rows,
    "function of a parameter": lambda net: net.rows.tanh(),
    "table": lambda net: net.table.weight,
    "looked up": lambda net: net.table(torch.arange(len(net.rows))),
    "buffer": lambda net: net.grid,
    "attribute": lambda net: net.attribute,
}


UNKNOWN = [(name, number) for name in ("buffer", "attribute", "looked up") for number in (3, 4)]
"""Here a layer was given what could be data, too."""


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize("name", MADE)
def test_rows_that_are_the_same_for_all_samples(name: str, number: int, differentiated: bool) -> None:
    """As many prototypes as samples are no samples; where they are left out, the others are exact."""
    torch.manual_seed(0)
    model, x, y = Prototypes(number, MADE[name]).double(), torch.randn(3, 2, dtype=torch.float64), torch.randn(3, number, dtype=torch.float64)
    expected = [3 * gradients for gradients in sample_gradients(model, [model(x[n : n + 1], y[n : n + 1]) for n in range(3)])]
    extend(model)
    if (name, number) in UNKNOWN:
        with pytest.raises(BackpackError, match=r"key\.bias.*used outside of everything that has samples"), backpack(BatchGrad()):
            model(x.requires_grad_(differentiated), y).backward()
        assert results(model) == {}
    else:
        with backpack(BatchGrad()):
            model(x.requires_grad_(differentiated), y).backward()
        for parameter, gradients in zip(model.parameters(), expected, strict=True):
            if parameter.grad is not None:
                close(parameter.grad_batch, gradients)
    with backpack(BatchGrad(exclude=["key.weight", "key.bias", "rows", "table.weight"])):
        model(x, y).backward()
    close(model.embed.weight.grad_batch, expected[[name for name, _ in model.named_parameters()].index("embed.weight")])


@dataclass
class Batch:
    """What a model is given as a whole."""

    x: Tensor
    y: Tensor


WRAPS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, y: {"x": x, "y": y},
    lambda x, y: [x, y],
    Batch,
    lambda x, y: SimpleNamespace(x=x, y=y),
]


def unwrap(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the two tensors of a mini-batch."""
    return tuple(batch.values()) if isinstance(batch, dict) else tuple(batch) if isinstance(batch, list) else (batch.x, batch.y)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("number", [3, 4])
def test_prototypes_beside_samples_in_one_argument(number: int, known: bool, wrap: Callable[[Tensor, Tensor], Any]) -> None:
    """Samples in a mapping, a list, a data class or an object are data, too, beside which prototypes are the same for all."""

    class Batched(Prototypes):
        def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
            x, y = unwrap(batch)
            hidden = self.embed(x)
            scores = hidden @ self.key(self.grid).T
            return F.mse_loss(scores, y, reduction="sum") if known else (scores - y).square().sum(), hidden

    torch.manual_seed(0)
    model, x, y = Batched(number, MADE["buffer"]).double(), torch.randn(3, 2, dtype=torch.float64), torch.randn(3, number, dtype=torch.float64)
    expected = torch.stack([torch.autograd.grad(model(wrap(x[n : n + 1], y[n : n + 1]))[0], model.key.weight)[0] for n in range(3)])
    extend(model)
    try:
        with backpack(BatchGrad()):
            model(wrap(x, y))[0].backward()
    except BackpackError:
        assert not known and results(model) == {}
    else:
        close(model.key.weight.grad_batch, expected)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("samples", "length"), [(1, 1), (2, 1), (1, 4), (3, 2), (3, 3)])
def test_outputs_time_first_of_samples_in_one_argument(samples: int, length: int, wrap: Callable[[Tensor, Tensor], Any]) -> None:
    """What lies on axis 0 of an output beside the loss is steps, not samples."""

    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
            x, y = unwrap(batch)
            out = self.head(self.hidden(x).tanh())
            return F.cross_entropy(out.flatten(0, 1), y.flatten()), out.transpose(0, 1)

    torch.manual_seed(0)
    model, x, y = Batched().double(), torch.randn(samples, length, 3, dtype=torch.float64), torch.randint(2, (samples, length))
    expected = sample_gradients(model, [model(wrap(x[n : n + 1], y[n : n + 1]))[0] for n in range(samples)])
    extend(model)
    if samples == length:
        with backpack(BatchGrad()):
            model(wrap(x, y))[0].backward()
        for parameter, gradients in zip(model.parameters(), expected, strict=True):
            close(parameter.grad_batch, gradients)
        return
    shapes = rf"given a tensor of shape \[{samples}, {length}, 3\] and returns \[{length}, {samples}, 2\]"
    with pytest.raises(BackpackError, match=shapes), backpack(BatchGrad()):
        model(wrap(x, y))[0].backward()
    assert results(model) == {}


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_time_first_inside_of_a_model_that_is_given_an_object(samples: int) -> None:
    """The object tells that there are fewer samples than a layer inside has rows."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, batch: SimpleNamespace) -> Tensor:
            hidden = self.hidden(batch.x.transpose(0, 1)).tanh()
            return F.cross_entropy(self.head(hidden.transpose(0, 1)).mean(1), batch.y)

    torch.manual_seed(0)
    model, x, y = Steps().double(), torch.randn(samples, 3, 3, dtype=torch.float64), torch.randint(2, (samples,))
    expected = sample_gradients(model, [model(SimpleNamespace(x=x[n : n + 1], y=y[n : n + 1])) for n in range(samples)])
    extend(model)
    with backpack(BatchGrad()):
        model(SimpleNamespace(x=x, y=y)).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("extension", [BatchGrad, BatchDiagGGNExact])
def test_losses_of_samples_beside_flattened_features(extension: type, width: int) -> None:
    """As many features as samples are no samples: each of the losses is one of positions."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(3, width), nn.Linear(width, 2)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.hidden(x).tanh()
            rows = zip(hidden.reshape(-1, width).split(2), y.flatten().split(2), strict=True)
            return sum(F.cross_entropy(self.head(h), labels) for h, labels in rows), hidden.reshape(-1, width)

    torch.manual_seed(0)
    model = extend(Flat())
    with pytest.raises(BackpackError), backpack(extension()):
        model(torch.randn(2, 2, 3), torch.randint(2, (2, 2)))[0].backward()
    assert results(model) == {}


@dataclass
class Leaf:
    """A part of a structure that refers to the whole."""

    x: Tensor
    whole: Any = None


@pytest.mark.parametrize("kind", [dict, list, Leaf, SimpleNamespace])
def test_arguments_that_contain_themselves(kind: type) -> None:
    """A tree whose nodes know their parents, say, is looked through once."""

    class Net(nn.Linear):
        def forward(self, batch: Any, y: Tensor) -> Tensor:
            x = batch["x"] if kind is dict else batch[0] if kind is list else batch.x
            return F.cross_entropy(super().forward(x), y)

    torch.manual_seed(0)
    x, y, model = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 1, 1]), Net(4, 2).double()
    batch: Any = {"x": x} if kind is dict else [x] if kind is list else kind(x=x)
    if kind is dict:
        batch["whole"] = batch
    elif kind is list:
        batch.append(batch)
    else:
        batch.whole = {"whole": batch}
        batch.whole["again"] = batch.whole
    expected = torch.autograd.grad(model(batch, y), model.weight)[0]
    extend(model)
    with backpack(BatchGrad()):
        model(batch, y).backward()
    close(model.weight.grad_batch.sum(0), expected)
    assert model.weight.grad_batch.shape == (3, 2, 4)


class Pieces(nn.Module):
    """A head on frozen features, called with as many rows as samples each time: of pieces of all positions, or of each position."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut, self.features, self.head = cut, nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.features(x).tanh()
        features, labels = (hidden.flatten(0, 1).split(len(x)), y.flatten().split(len(x))) if self.cut else (hidden.unbind(1), y.unbind(1))
        return sum(F.cross_entropy(self.head(part), of_part) for part, of_part in zip(features, labels, strict=True))


@pytest.mark.parametrize("length", [2, 4])
def test_pieces_of_frozen_features(length: int) -> None:
    """Pieces of positions have other samples in each call; those of single positions have the same."""
    torch.manual_seed(0)
    x, y = torch.randn(3, length, 3, dtype=torch.float64), torch.randint(2, (3, length))
    for extension in (BatchGrad, BatchDiagGGNExact):
        model = extend(Pieces(cut=True)).double()
        with pytest.raises(BackpackError, match="could be others"), backpack(extension()):
            model(x, y).backward()
        assert results(model) == {}
    model = Pieces(cut=False).double()
    losses = [model(x[n : n + 1], y[n : n + 1]) / 3 for n in range(3)]
    expected = torch.stack([torch.autograd.grad(loss, model.head.weight)[0] for loss in losses])
    extend(model)
    with backpack(BatchGrad()):
        model(x, y).backward()
    close(model.head.weight.grad_batch, expected)


def test_penalty_on_what_a_layer_makes_of_parameters() -> None:
    """It is called from outside of the model, and returns as many rows as there are samples."""
    model, lossfunc = extend(Prototypes(3, MADE["parameter"])), extend(nn.MSELoss())
    model.forward = lambda x: model.embed(x) @ model.key(model.rows).T
    for x in (torch.randn(3, 2), torch.randn(3, 2, requires_grad=True)):
        with pytest.raises(BackpackError, match=r"used outside of everything that has samples.*leave_out"), backpack(BatchGrad()):
            keys = model.key(model.rows)
            (lossfunc(model(x), torch.ones(3, 3)) + (keys @ keys.T - torch.eye(3)).square().sum()).backward()
        assert results(model) == {}


@pytest.mark.parametrize("labels", [torch.arange(3), torch.tensor([0, 2, 2])])
def test_labels_that_count_the_samples(labels: Tensor) -> None:
    """What a model is given are samples, also if it could be numbers of positions."""

    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(3, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.layer(x * 2) * self.table(y)).tanh().square().sum()

    torch.manual_seed(0)
    model, x = Conditional().double(), torch.randn(3, 2, dtype=torch.float64)
    alone = [torch.autograd.grad(model(x[n : n + 1], labels[n : n + 1]), tuple(model.parameters())) for n in range(3)]
    extend(model)
    with backpack(BatchGrad()):
        model(x, labels).backward()
    for i, parameter in enumerate(model.parameters()):
        close(parameter.grad_batch, torch.stack([of_one[i] for of_one in alone]))


@pytest.mark.parametrize("extension", [BatchGrad, Variance, BatchDiagGGNExact])
@pytest.mark.parametrize("lossfunc", [F.mse_loss, extend(nn.MSELoss())], ids=["function", "module"])
@pytest.mark.parametrize("made", [lambda net: net.rows, lambda net: net.rows.tanh(), lambda net: net.key(net.rows)], ids=["row", "tanh", "layer"])
@pytest.mark.parametrize("number", [3, 4])
def test_penalty_that_is_a_known_loss(number: int, made: Callable[[Prototypes], Tensor], lossfunc: Callable, extension: type) -> None:
    model = extend(Prototypes(number, MADE["parameter"]))
    model.forward = model.embed.forward
    with pytest.raises(BackpackError, match=r"used outside of everything that has samples.*leave_out"), backpack(extension()):
        out = model(torch.randn(3, 2))
        (extend(nn.MSELoss())(out, torch.ones(3, 2)) + lossfunc(made(model), torch.ones(number, 2))).backward()
    assert results(model) == {}


class Angles(nn.Module):
    """A loss with parameters of its own, which returns one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(8 * F.linear(F.normalize(z), F.normalize(self.weight)), y)


@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_losses_with_parameters(samples: int, apart: bool) -> None:
    """Behind the output of the model, samples of first-order quantities start at the known loss inside, too."""
    torch.manual_seed(0)
    net, head = nn.Sequential(nn.Linear(2, 3), nn.Tanh()).double(), Angles().double()
    x, y = torch.randn(samples, 2, dtype=torch.float64), torch.randint(4, (samples,))
    parameters = [*net.parameters(), *head.parameters()]
    alone = [torch.autograd.grad(head(net(x[n : n + 1]), y[n : n + 1]) / samples, parameters) for n in range(samples)]
    extend(net)
    extend(head)
    with backpack(BatchGrad()):
        (head(net(x), y) + (apart * net(2 * x).sum())).backward()
    if apart:
        alone = [
            [g + more for g, more in zip(of_one, (*torch.autograd.grad(net(2 * x[n : n + 1]).sum(), parameters[:-1]), 0.0), strict=True)]
            for n, of_one in enumerate(alone)
        ]
    for i, parameter in enumerate(parameters):
        close(parameter.grad_batch, torch.stack([of_one[i] for of_one in alone]))


def windows() -> Tensor:
    return torch.randn(6, dtype=torch.float64).unfold(0, 4, 1)


@pytest.mark.parametrize(
    "make",
    [windows, lambda: torch.randn(4, dtype=torch.float64).expand(3, 4), lambda: torch.randn(3, 8, dtype=torch.float64).split(4, 1)[1]],
    ids=["windows", "expanded", "columns"],
)
def test_inputs_that_share_memory(make: Callable[[], Tensor]) -> None:
    """Windows of a series, one row for all samples, some columns of a table."""
    torch.manual_seed(0)
    model, x, y = Rows().double(), make(), torch.tensor([0, 3, 1])
    expected = sample_gradients(model, [model(x[n : n + 1], y[n : n + 1]) for n in range(3)])
    extend(model)
    with backpack(BatchGrad()):
        model(x, y).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


def test_inputs_that_are_parts_of_one_tensor() -> None:
    """Two mini-batches, and two columns, of one tensor: each has its own samples."""

    class Pair(Model):
        def forward(self, p: Tensor, q: Tensor) -> Tensor:
            return (self.body(p) * self.head.weight[0].mul(1.0) * self.body(q)).tanh().sum()

    torch.manual_seed(0)
    for p, q in (torch.randn(6, 4, dtype=torch.float64).chunk(2), torch.randn(3, 8, dtype=torch.float64).split(4, 1)):
        model = Pair().double()
        expected = [torch.autograd.grad(model(p[n : n + 1], q[n : n + 1]), model.body.weight)[0] for n in range(3)]
        extend(model)
        with backpack(BatchGrad(exclude=["head.*"])):
            model(p, q).backward()
        close(model.body.weight.grad_batch, torch.stack(expected))


def test_temperature_in_front() -> None:
    """A first argument of length one does not make one sample of the mini-batch."""

    class Scaled(Model):
        def forward(self, beta: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(beta * self.scores(x), y, reduction="sum") / 3

    torch.manual_seed(0)
    model, beta, x, y = Scaled().double(), torch.tensor([0.7], dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])
    expected = sample_gradients(model, [3 * model(beta, x[n : n + 1], y[n : n + 1]) for n in range(3)])
    extend(model)
    with backpack(BatchGrad(), Variance()):
        model(beta, x, y).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)
        close(parameter.variance, gradients.var(0, correction=0))


@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layer_in_front(batch_first: bool) -> None:
    """It is crossed node by node, but it is known where it has the samples: so their number is told from that of the classes."""

    class Recurrent(Model):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(4, 4, batch_first=batch_first)

        def forward(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
            out = self.cell(x if batch_first else x.transpose(0, 1))[0]
            return F.cross_entropy(self.scores(out.mean(1 if batch_first else 0)), y[:, 0], weights, reduction="sum") / 3

    torch.manual_seed(0)
    model, x, y = Recurrent().double(), torch.randn(3, 5, 4, dtype=torch.float64), torch.randint(4, (3, 5))
    weights = torch.rand(4, dtype=torch.float64)
    expected = sample_gradients(model, [3 * model(weights, x[n : n + 1], y[n : n + 1]) for n in range(3)])
    extend(model)
    with backpack(BatchGrad()):
        model(weights, x, y).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


@pytest.mark.parametrize("samples", [1, 2])
def test_attention_in_front(samples: int) -> None:
    """A mini-batch of one sample leaves no doubt, whatever has a single row."""

    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.scores = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x.transpose(0, 1)
            return F.cross_entropy(self.scores(self.attention(h, h, h)[0].mean(0)), y)

    torch.manual_seed(0)
    model, x, y = Attentive().double(), torch.randn(samples, 3, 4, dtype=torch.float64), torch.randint(3, (samples,))
    expected = sample_gradients(model, [model(x[n : n + 1], y[n : n + 1]) for n in range(samples)])
    extend(model)
    with backpack(BatchGrad()):
        model(x, y).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


class Shift(nn.Module):
    """A parameter is added behind the mean, and the samples are counted by nobody."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer, self.shift, self.first = nn.Linear(4, 3), nn.Parameter(torch.randn(3)), first

    def forward(self, x: Tensor) -> Tensor:
        loss, shift = self.layer(x).logsumexp(1).mean(), self.shift.sum()
        return shift + loss if self.first else loss + shift


@pytest.mark.parametrize("first", [True, False])
def test_reasons_are_the_same_in_any_order(first: bool) -> None:
    """Whether some module has samples is known when the whole graph was seen."""
    model = extend(Shift(first))
    with pytest.raises(BackpackError) as caught, backpack(BatchGrad()):
        model(torch.randn(2, 4)).backward()
    assert str(caught.value).startswith("shift: used outside of everything that has samples")


def forward_scores(net: Joined, z: Tensor, y: Tensor) -> Tensor:
    steps = torch.stack([z, z.sin(), z.cos()], 1)
    scores, path = steps[:, 0], steps[:, 0].gather(1, y[:, None]).squeeze(1)
    for step in range(1, 3):
        scores = torch.logsumexp(scores[:, :, None] + net.table, 1) + steps[:, step]
        path = path + steps[:, step].gather(1, y[:, None]).squeeze(1) + net.table[y, y]
    return (scores.logsumexp(1) - path).mean()


JOINED: dict[str, Callable[[Joined, Tensor, Tensor], Tensor]] = {
    "centers": lambda net, z, y: (z.exp() - net.table[y]).square().sum(1).mean(),
    "centers, by a function": lambda net, z, y: F.mse_loss(z, net.table[y]) + F.huber_loss(net.table[y], z, reduction="sum") / len(z),
    "variances": lambda net, z, y: (0.5 * (z.sin() / net.scale.exp()).square() + net.scale).sum(1).mean(),
    "a number for all": lambda net, z, y: (z.logsumexp(1) * net.scale[0].exp()).mean(),
    "beside a known loss": lambda net, z, y: F.cross_entropy(z, y) + F.mse_loss(net.table[y], z.detach()) + (z @ net.table).square().sum(1).mean(),
    "transitions": forward_scores,
}


class Joined(nn.Module):
    """A loss by hand, to which parameters belong that are behind the last module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 3), JOINED[name]
        self.table, self.scale = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.layer(x), y)


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
@pytest.mark.parametrize("name", list(JOINED))
def test_parameters_behind_the_last_module(name: str, samples: int) -> None:
    torch.manual_seed(0)
    model, x, y = Joined(name).double(), torch.randn(samples, 4, dtype=torch.float64), torch.randint(3, (samples,))
    expected = sample_gradients(model, [model(x[n : n + 1], y[n : n + 1]) for n in range(samples)])
    extend(model)
    if (name, samples) == ("beside a known loss", 3):  # as many classes as samples
        with pytest.raises(BackpackError), backpack(BatchGrad()):
            model(x, y).backward()
        return
    with backpack(BatchGrad(), BatchL2Grad()):
        model(x, y).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        if parameter.grad is not None:
            close(parameter.grad_batch, gradients)
            close(parameter.batch_l2, gradients.flatten(1).square().sum(1))


@pytest.mark.parametrize("samples", [2, 3])
def test_parameters_that_meet_means_of_samples(samples: int) -> None:
    """They belong to no sample, also where there are as many samples as features."""

    class Means(Shift):
        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h.logsumexp(1).mean() + (h.mean(0, keepdim=self.first) - self.shift).square().sum()

    for first in (True, False):
        with pytest.raises(UnattributedError, match="shift"), backpack(BatchGrad()):
            model = extend(Means(first))
            model(torch.randn(samples, 4)).backward()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("others", [3, 5])
def test_a_parameter_tells_nothing_of_rows_that_are_compared(others: int, scaled: bool) -> None:
    """Samples that meet a parameter are guessed like those of a layer, and refused where these are."""

    class Contrast(Shift):
        def forward(self, x: Tensor, negatives: Tensor) -> Tensor:
            h, rows = self.layer(x), self.layer(negatives)
            return -((h * self.shift if self.first else h) @ rows.t()).log_softmax(1).mean()

    model = extend(Contrast(scaled))
    with pytest.raises(BackpackError), backpack(BatchGrad()):
        model(torch.randn(3, 4), torch.randn(others, 4)).backward()
    assert results(model) == {}


def test_a_doubt_comes_before_what_follows_from_a_wrong_guess() -> None:
    """As many positions as samples, time first: attention would mix the samples if rows were these."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x.transpose(0, 1))
            return self.layer(self.attention(h, h, h, need_weights=False)[0]).square().mean()

    model = extend(Encoder())
    with pytest.raises(BackpackError) as caught, backpack(BatchGrad()):
        model(torch.randn(3, 3, 4)).backward()
    first = caught.value.parts[0]
    assert "so that samples can only be told from the modules inside" in str(first)


def test_loss_with_an_axis_of_its_own() -> None:
    """Its only entry is no sample."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.layer(x), y).reshape(1)

    model, x, y = Scored().double(), torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    expected = sample_gradients(model, [model(x[n : n + 1], y[n : n + 1]).squeeze() for n in range(5)])
    extend(model)
    with backpack(BatchGrad()):
        model(x, y).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


@pytest.mark.parametrize("order", ["loss, states", "states, loss", "loss, [states]", "loss, scores, states", "states, scores"])
@pytest.mark.parametrize(("samples", "length"), [(4, 5), (5, 5), (1, 5), (5, 1)])
def test_states_without_a_graph(order: str, samples: int, length: int) -> None:
    """What a model keeps for the next mini-batch, with time first, does not tell how many samples there are."""

    class Recurrent(Model):
        def forward(self, x: Tensor, y: Tensor) -> tuple:
            scores, states = self.scores(x).mean(1), self.body(x).detach().transpose(0, 1)
            found = {"loss": F.cross_entropy(scores, y), "scores": scores, "states": states, "[states]": [states, states]}
            return tuple(found[name] for name in order.split(", "))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = dict(zip(order.split(", "), model(x, y), strict=True))
        return found["loss"] if "loss" in found else F.cross_entropy(found["scores"], y)

    model, x, y = given(Recurrent, samples, length)
    expected = sample_gradients(model, [loss(x[n : n + 1], y[n : n + 1, 0]) for n in range(samples)])
    extend(model)
    with backpack(BatchGrad()):
        loss(x, y[:, 0]).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


class Ensemble(nn.Module):
    """Two critics in one parameter, as in reinforcement learning; what they say is returned without a graph, critics first."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.Parameter(torch.randn(2, 4))

    def forward(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        values = self.critics @ data["x"].T
        return F.smooth_l1_loss(values, data["y"].expand_as(values), reduction="none").mean(1).sum(), values.detach()


@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_rows_without_a_graph_are_no_samples(samples: int, kind: type) -> None:
    """Rows of critics were taken for samples; they are none, whatever the loss takes."""
    model = extend(Ensemble())
    with backpack(BatchGrad()), pytest.raises(BackpackError):
        model(kind(x=torch.randn(samples, 4), y=torch.randn(samples)))[0].backward()
    assert results(model) == {}


CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda h, classes: h @ classes.T,
    "layer": F.linear,
    "contraction": lambda h, classes: torch.einsum("nd,kd->nk", h, classes),
    "distances": torch.cdist,
    "differences": lambda h, classes: (h[:, None] - classes[None]).square().sum(2),
    "attention": lambda h, classes: ((h @ classes.T).softmax(1) @ classes)[:, :3],
}


class Classes(nn.Module):
    """Compares samples with what a layer makes of classes, of which there are three."""

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compare, self.body, self.of_classes = compare, nn.Linear(4, 5), nn.Linear(6, 5)
        self.register_buffer("classes", torch.randn(3, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.compare(self.body(x), self.of_classes(F.normalize(self.classes))) - y).square().sum()


@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.parametrize("way", CLASSES)
def test_as_many_classes_as_samples(way: str, samples: int) -> None:
    """Rows of classes are none of samples, however many: what meets all samples further down is refused."""
    model = extend(Classes(CLASSES[way]).double())
    x, y = torch.randn(samples, 4, dtype=torch.float64), torch.randn(samples, 3, dtype=torch.float64)
    with backpack(BatchGrad()), pytest.raises(BackpackError):
        model(x, y).backward()
    assert results(model) == {}
    rows = [torch.autograd.grad(model(x[n : n + 1], y[n : n + 1]), list(model.body.parameters())) for n in range(samples)]
    with backpack(BatchGrad(exclude=[model.of_classes])):
        model(x, y).backward()
    for parameter, *expected in zip(model.body.parameters(), *rows, strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(expected))


class Offset(nn.Module):
    """Adds one row for all samples, ``[1, T, 3]``, to what a layer makes of ``[N, T, 4]``; the loss has an axis, or all samples stand in one row."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed, self.body, self.head = packed, nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        h = (self.body(x) + offset).tanh()
        if self.packed:
            scores = self.head(h.flatten(0, 1)[None])
            return F.cross_entropy(scores.transpose(1, 2), torch.zeros_like(scores[..., 0]).long(), reduction="sum")
        return self.head(h).square().sum().reshape(1)


@pytest.mark.parametrize("packed", [False, True])
def test_one_row_beside_the_samples(packed: bool) -> None:
    """It was taken for the mini-batch: a mask, or position numbers, that are the same for all samples."""
    torch.manual_seed(0)
    model, x, offset = Offset(packed).double(), torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(1, 2, 3, dtype=torch.float64)
    rows = [torch.autograd.grad(model(x[n : n + 1], offset), list(model.parameters())) for n in range(3)]
    extend(model)
    with backpack(BatchGrad()):
        model(x, offset).backward()
    for parameter, *expected in zip(model.parameters(), *rows, strict=True):
        close(parameter.grad_batch, torch.stack(expected))


class Flattened(Model):
    """``[N, T, 4]``, of which rows are all positions from the first layer on, or from the second on; labels are given as a row, too."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x.flatten(0, 1)) if self.first else self.head(self.body(x).flatten(0, 1).tanh()), y)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_labels_of_positions_are_no_samples(samples: int, first: bool) -> None:
    """Positions of the only sample were taken for samples, since there are as many labels."""
    model, x, y = extend(Flattened(first)), torch.randn(samples, 3, 4), torch.randint(4, (3 * samples,))
    for extension in FIRST + SECOND:
        with backpack(extension), pytest.raises(BackpackError, match="returns its loss"):
            model(x, y).backward()
    assert results(model) == {}


BARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w,
    "scaled": lambda x, w: x * w[0],
    "contraction": lambda x, w: torch.einsum("nti,io->nto", x, w),
    "first position": lambda x, w: F.linear(x[:, 0], w),
    "time first": lambda x, w: (x @ w).transpose(0, 1),
    "scaled, time first": lambda x, w: (x * w[0]).transpose(0, 1),
    "contraction, time first": lambda x, w: torch.einsum("nti,io->tno", x, w),
    "given time first": lambda x, w: x.transpose(0, 1) @ w,
}
"""What functions make of data and of a matrix, where no module is called inside."""


class Functions(nn.Module):
    """No module inside; labels lie as the prediction does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.predict, self.matrix = BARE[way], nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.predict(x, self.matrix), y, reduction="sum")


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("way", BARE)
def test_functions_alone(way: str, samples: int) -> None:
    """Positions were taken for samples, as there are as many of them, or as labels had them first."""
    torch.manual_seed(0)
    model, x = Functions(way).double(), torch.randn(samples, 3, 4, dtype=torch.float64)
    y = torch.randn_like(BARE[way](x, model.matrix))
    first = "first" in way and "position" not in way
    expected = [torch.autograd.grad(model(x[n : n + 1], y.narrow(int(first), n, 1)), model.matrix)[0] for n in range(samples)]
    extend(model)
    for extension in FIRST + SECOND:
        if first:
            with backpack(extension), pytest.raises(BackpackError, match="returns its loss"):
                model(x, y).backward()
            continue
        with backpack(extension):
            model(x, y).backward()
    assert (results(model) == {}) == first
    if not first:
        close(model.matrix.grad_batch, torch.stack(expected))


class Gates(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.randn(4))

    def forward(self, h: Tensor) -> Tensor:
        return (h * self.gates).tanh()


class Gated(nn.Module):
    """``[N, T, 4]``, of which such a layer is given all positions."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat, self.scales, self.layer = flat, nn.Parameter(torch.randn(4)), Gates()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x * self.scales
        return F.mse_loss(self.layer(h.flatten(0, 1) if self.flat else h), y if self.flat else y.view_as(h))


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_labels_of_positions_behind_a_layer_without_rule(samples: int, flat: bool) -> None:
    """As above, where no layer with a rule is given anything."""
    torch.manual_seed(0)
    model, x, y = Gated(flat).double(), torch.randn(samples, 2, 4, dtype=torch.float64), torch.randn(samples * 2, 4, dtype=torch.float64)
    parts = [model(x[n : n + 1], y[2 * n : 2 * n + 2]) for n in range(samples)]
    expected = sample_gradients(model, parts)
    extend(model)
    for extension in (BatchDiagGGNExact(), BatchGrad()):
        if flat:
            with backpack(extension), pytest.raises(BackpackError, match="returns its loss|as many rows as it was given"):
                model(x, y).backward()
            continue
        with backpack(extension):
            model(x, y).backward()
    assert (results(model) == {}) == flat
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        if not flat:
            close(parameter.grad_batch, gradients)


class Codebook(nn.Module):
    """Quantizes ``[N, T, 3]``, and returns the loss of that beside a reconstruction; codes are looked up for all positions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = nn.Linear(2, 3), nn.Embedding(6, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        nearest = torch.cdist(z.flatten(0, 1), self.codes.weight).argmin(1)
        q = self.codes(nearest).view_as(z)
        return self.decode(z + (q - z).detach()), F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_loss_beside_predictions(samples: int) -> None:
    """Neighbouring rows of a module inside are those of one sample, as the loss has them; not known where there are as many of each."""
    torch.manual_seed(0)
    model, x = Codebook().double(), torch.randn(samples, 3, 2, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        made, other = model(x)
        return F.mse_loss(made, x) + other

    expected = sample_gradients(model, [loss(x[n : n + 1]) for n in range(samples)])
    extend(model)
    if samples == 3:
        with backpack(BatchGrad()), pytest.raises(BackpackError):
            loss(x).backward()
        assert results(model) == {}
        return
    with backpack(BatchGrad(), Variance()):
        loss(x).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)
        close(parameter.variance, gradients.var(0, unbiased=False))


@pytest.mark.parametrize("operation", [torch.maximum, torch.minimum, torch.fmod, lambda h, p: h.clamp(max=p)], ids=["max", "min", "fmod", "clamp"])
@pytest.mark.parametrize("excluded", [["shift"], ["shift", "body.*"]], ids=["parameter", "parameter and layer"])
def test_excluded_parameter_beside_a_comparison(operation: Callable[[Tensor, Tensor], Tensor], excluded: list[str]) -> None:
    """What excluded parameters make is not known to be constant, and has no type to ask for."""

    class Compares(Model):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.bound = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4) + 0.5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.scores(operation(x + self.shift, self.bound)), y)

    torch.manual_seed(0)
    model, x, y = Compares().double(), torch.randn(5, 4, dtype=torch.float64), torch.randint(4, (5,))
    expected = sample_gradients(model, [model(x[n : n + 1], y[n : n + 1]) for n in range(5)])
    extend(model)
    with backpack(BatchGrad(exclude=excluded)):
        model(x, y).backward()
    for (name, parameter), gradients in zip(model.named_parameters(), expected, strict=True):
        if name == "shift" or (name.startswith("body") and len(excluded) > 1):
            assert not hasattr(parameter, "grad_batch")
        else:
            close(parameter.grad_batch, gradients)


@pytest.mark.parametrize("length", [2, 4])
def test_sequence_without_batch_axis(length: int) -> None:
    """One sequence, of which entries are returned: no rows could be those of samples."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].flatten()

    model = extend(Recurrent())
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=r"without a batch axis|no axis is known"):
        model(torch.randn(length, 3)).square().sum().backward()
    assert results(model) == {}


@pytest.mark.parametrize("distance", [F.l1_loss, F.mse_loss, lambda h, t: (h - t).abs().square().mean()], ids=["l1", "squares", "by hand"])
@pytest.mark.parametrize("behind", [lambda h: h, torch.relu, lambda h: h.sin() * 2], ids=["nothing", "relu", "sine"])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalization_as_a_function_of_the_last_layer(distance: Callable, behind: Callable, training: bool) -> None:
    """It mixes samples like the module does; with running statistics it does not."""

    class Normalizes(Model):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            mean, variance = (None, None) if training else (torch.zeros(4).double(), torch.ones(4).double())
            return distance(behind(F.batch_norm(self.scores(x), mean, variance, training=training)), t)

    torch.manual_seed(0)
    model, x, t = Normalizes().double(), torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    if training:
        with backpack(BatchGrad()), pytest.raises(BackpackError, match=r"mixes|statistics of all|influence one another"):
            extend(model)(x, t).backward()
        assert results(model) == {}
        return
    expected = sample_gradients(model, [model(x[n : n + 1], t[n : n + 1]) for n in range(3)])
    with backpack(BatchGrad()):
        extend(model)(x, t).backward()
    for parameter, gradients in zip(model.parameters(), expected, strict=True):
        close(parameter.grad_batch, gradients)


class Queries(Model):
    """``[N, K]``: the samples are given as they are, and a layer is given what they are compared with, or looked up in."""

    def __init__(self, way: str, order: str) -> None:
        super().__init__()
        self.way, self.order = way, order

    def forward(self, *given: Tensor) -> Tensor:
        named = dict(zip(self.order, given, strict=True))
        x, y, queries = named["x"], named["y"], self.body(named["q"])
        if self.way == "lookup":
            return F.mse_loss((x[:, :3] * queries[x[:, 3].long() % len(queries)]).sum(1), y[:, 0])
        if self.way == "distances":
            return F.mse_loss((x[:, None, :3] - queries).square().sum(-1), y)
        scores = x[:, :3] @ queries.T
        return F.mse_loss(scores, y) if self.way == "product" else (scores - y).square().mean()


@pytest.mark.parametrize("extensions", [(BatchGrad, Variance), (BatchDiagGGNExact,)])
@pytest.mark.parametrize("order", ["xqy", "qxy", "xyq"])
@pytest.mark.parametrize(("samples", "number"), [(5, 4), (3, 6), (8, 2)])
@pytest.mark.parametrize("way", ["product", "product by hand", "distances", "lookup"])
def test_what_a_layer_is_given_need_not_be_the_samples(way: str, samples: int, number: int, order: str, extensions: tuple[type, ...]) -> None:
    """Other arguments, labels among them, have another length."""
    model = extend(Queries(way, order).double())
    given = {"x": torch.rand(samples, 4).double(), "q": torch.rand(number, 4).double(), "y": torch.rand(samples, number).double()}
    with pytest.raises(UnsupportedError), backpack(*(extension() for extension in extensions)):
        model(*(given[name] for name in order)).backward()
    assert not any(results(model).values())


class BesideTables(Model):
    """Layers are given the samples; tables of other lengths take part."""

    def forward(self, x: Tensor, y: Tensor, *tables: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x) + sum(table.mean() for table in tables), y)


@pytest.mark.parametrize("tables", [(7,), (7, 7), (7, 3)])
def test_samples_beside_tables(tables: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x, y = extend(BesideTables().double()), torch.rand(5, 4).double(), torch.randint(4, (5,))
    others = [torch.rand(length, 3).double() for length in tables]
    with backpack(BatchGrad()):
        model(x, y, *others).backward()
    rows = [torch.autograd.grad(model(x[n : n + 1], y[n : n + 1], *others) / 5, model.body.weight)[0] for n in range(5)]
    close(model.body.weight.grad_batch, torch.stack(rows))


class OfImages(Model):
    """Images of different sizes in a list, taken one by one as mini-batches of one."""

    def forward(self, images: list[Tensor], labels: list[Tensor]) -> Tensor:
        losses = [F.cross_entropy(self.scores(image.mean((1, 2))[None].expand(1, 4)), y) for image, y in zip(images, labels, strict=True)]
        return sum(losses) / len(images)


@pytest.mark.parametrize("extensions", [(BatchGrad, Variance), (BatchDiagGGNExact,)])
@pytest.mark.parametrize("samples", [2, 5])
def test_a_list_of_single_images(samples: int, extensions: tuple[type, ...]) -> None:
    """All would be one sample, as each has one channel, which looks like a mini-batch of one."""
    model = extend(OfImages().double())
    images = [torch.rand(1, 3 + n, 4).double() for n in range(samples)]
    with pytest.raises(UnsupportedError, match="given a list of"), backpack(*(extension() for extension in extensions)):
        model(images, [torch.randint(4, (1,)) for _ in range(samples)]).backward()
    assert not any(results(model).values())


def test_a_list_of_one_image() -> None:
    model = extend(OfImages().double())
    with backpack(BatchGrad()):
        model([torch.rand(1, 3, 4).double()], [torch.tensor([2])]).backward()
    close(model.head.weight.grad_batch[0], model.head.weight.grad)


class TablesFirst(Model):
    """Weights of classes, and other tables, come before what the samples are."""

    def forward(self, weights: Tensor, smoothing: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x) @ smoothing, y, weights, reduction="sum")


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_tables_in_front_of_the_samples(samples: int) -> None:
    torch.manual_seed(0)
    model, x, y = extend(TablesFirst().double()), torch.rand(samples, 4).double(), torch.randint(4, (samples,))
    tables = torch.rand(4).double(), torch.rand(4, 4).double()
    with backpack(BatchGrad()):
        model(*tables, x, y).backward()
    rows = [torch.autograd.grad(model(*tables, x[n : n + 1], y[n : n + 1]), model.body.weight)[0] for n in range(samples)]
    close(model.body.weight.grad_batch, torch.stack(rows))
