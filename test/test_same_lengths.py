"""Mini-batches with as many samples as another axis has entries: exact where the graph tells them apart, else refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, MSELoss, Parameter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, results
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import MixedSamplesError, UnsupportedError

LENGTH = 3


class Scores(Module):
    """Attention with a bias for each pair of positions, made by a layer that is called with their distances."""

    def __init__(self, bias: Module, distances: Tensor) -> None:
        super().__init__()
        self.bias, self.first, self.last, self.distances = bias, Linear(2, 2), Linear(2, 2), distances

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        bias = self.bias(self.distances).sum(-1)
        return self.last(torch.softmax(h @ x.mT + bias, 2) @ h)


def between_positions(*axes: None) -> Tensor:
    places = torch.arange(LENGTH)
    return (places[:, None] - places + LENGTH)[axes]


def table(*axes: None) -> Module:
    return Scores(Embedding(2 * LENGTH, 2), between_positions(*axes))


def network(*axes: None) -> Module:
    return Scores(Linear(1, 2), between_positions(*axes)[..., None].double())


def problem(make: Callable[[], Module], samples: int) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(samples, LENGTH, 2, dtype=torch.float64)
    return Problem(make().double(), x, [Term(MSELoss(), torch.randn_like(x))])


def run(made: Problem) -> None:
    extend(made.model)
    extend(made.losses[0])
    with backpack(BatchGrad(), DiagGGNExact()):
        made.loss(made.outputs()).backward()


def check(make: Callable[[], Module], samples: int) -> None:
    made, oracle = problem(make, samples), Oracle(problem(make, samples))
    run(made)
    for name, parameter in ((name, parameter) for name, parameter in made.model.named_parameters() if parameter.requires_grad):
        close(parameter.grad_batch, oracle.grad_batch[name])
        close(parameter.diag_ggn_exact, sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))[name])


@pytest.mark.parametrize("make", [table, network])
def test_positions_of_a_layer(make: Callable[..., Module]) -> None:
    """Whether three rows without a graph are samples or positions cannot be known; the error names both ways out, and both work."""
    for samples in (1, 2, 4):
        check(make, samples)
    made = problem(make, LENGTH)
    with pytest.raises(MixedSamplesError, match=r"bias returns .*if its axis 0 holds 3 positions.*another size.*shape \[1, 3, 3.*bias\.weight"):
        run(made)
    assert results(made.model) == {}
    check(partial(make, None), LENGTH)


class Kernels(Module):
    """A convolution whose kernels are made for each sample, in groups of channels that are none of the samples' own number."""

    def __init__(self, groups: int, again: bool) -> None:
        super().__init__()
        self.kernels, self.groups, self.again = Linear(2, 6 * LENGTH // groups), groups, again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.convolve, x.detach().requires_grad_(), use_reentrant=False) if self.again else self.convolve(x)

    def convolve(self, x: Tensor) -> Tensor:
        kernels = self.kernels(x.mean(1)).view(-1, LENGTH // self.groups, 1)
        return F.conv1d(x.reshape(1, -1, 2), kernels, groups=self.groups * len(x)).view(len(x), LENGTH, 2, 2).mean(2)


@pytest.mark.parametrize("samples", [1, 2, LENGTH, 6])
@pytest.mark.parametrize("groups", [1, LENGTH])
@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
def test_kernels_of_each_sample(again: bool, groups: int, samples: int) -> None:
    check(lambda: Kernels(groups, again), samples)


class Each(Module):
    """Calls a layer for each sample, with what was computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(2 * sample) for sample in x])


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_as_many_features_as_samples(samples: int) -> None:
    """They are none."""
    check(Each, samples)


class Turned(Each):
    """Calls it for each position."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("samples", [1, 2, LENGTH, 4])
def test_positions_that_share_memory(samples: int) -> None:
    """Entries of the mini-batch are views of one another, so that memory does not tell their samples."""

    def make() -> Problem:
        made = problem(Turned, samples)
        made.x = made.x[:, :1].expand(-1, LENGTH, -1)
        return made

    made, oracle = make(), Oracle(make())
    if samples == LENGTH:
        with pytest.raises(UnsupportedError, match="may have samples elsewhere"):
            run(made)
        assert results(made.model) == {}
        return
    run(made)
    for name, parameter in made.model.named_parameters():
        close(parameter.grad_batch, oracle.grad_batch[name])


class Pairs(Module):
    """A tensor that is used as it is, and transposed."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.weight, self.data = Parameter(torch.randn(LENGTH, LENGTH)), data

    def forward(self, x: Tensor) -> Tensor:
        table = x[..., 0] * self.weight if self.data else self.weight.tanh()
        return x[..., 0] * (table + table.T)


def test_two_orientations_of_a_parameter() -> None:
    """What is made of a parameter alone may be used differently by different samples; what is made of data mixes them."""

    def make(data: bool) -> Problem:
        made = problem(lambda: Pairs(data), LENGTH)
        made.terms[0].target = made.terms[0].target[..., 0]
        return made

    made, oracle = make(False), Oracle(make(False))
    run(made)
    close(made.model.weight.grad_batch, oracle.grad_batch["weight"])
    close(made.model.weight.diag_ggn_exact, sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))["weight"])
    with pytest.raises(UnsupportedError, match=r"axis 0 .*axis 1.*ambiguous.*another size.*exclude"):
        run(make(True))


class Masked(Module):
    """A layer that is called with a mask for each sample, and returns a table that is made of parameters, beside its result, for others to use."""

    def __init__(self, made: Callable[[Masked], Tensor]) -> None:
        super().__init__()
        self.table, self.scale, self.layer, self.made = Embedding(2 * LENGTH, 2), Parameter(torch.rand(1)), Linear(2, 2), made

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.made(self)
        return self.layer(torch.softmax(x @ x.mT + bias + mask, 2) @ x), bias


class Shared(Module):
    """Two such layers, of which the second uses the table of the first."""

    def __init__(self, made: Callable[[Masked], Tensor]) -> None:
        super().__init__()
        self.first, self.last = Masked(made), Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.where(x[:, None, :, 0] > 1, -1.0, 0.0)
        h, bias = self.first(x, mask)
        return self.last(torch.softmax(h @ x.mT + bias.tanh() + mask, 2) @ h)


MADE: dict[str, Callable[[Masked], Tensor]] = {
    "looked up": lambda net: net.table(between_positions()).permute(2, 0, 1)[:1],
    "looked up, scaled by a parameter": lambda net: net.scale * net.table(between_positions()).sum(2)[None],
    "product of parameters": lambda net: torch.softmax(net.table.weight[:LENGTH] @ net.table.weight[LENGTH:].T, 1)[None],
}


def freeze_unused(model: Module) -> Module:
    used = torch.autograd.grad(model(torch.randn(1, LENGTH, 2)).sum(), model.parameters(), allow_unused=True)
    for parameter, gradient in zip(list(model.parameters()), used, strict=True):
        parameter.requires_grad_(gradient is not None)
    return model


@pytest.mark.parametrize("made", MADE)
def test_tables_that_a_module_with_data_makes_of_parameters(made: str) -> None:
    for samples in (1, 2, 4):
        torch.manual_seed(0)
        check(lambda: freeze_unused(Shared(MADE[made])), samples)


@pytest.mark.parametrize(
    "made",
    [
        lambda net, x: net.layer(x).mean(0).softmax(1)[:, :1],
        lambda net, x: net.table((x[:, :, 0] > 0).long()).mean(0)[:, :1],
    ],
)
def test_tables_that_are_made_of_the_mini_batch_are_refused(made: Callable[[Masked, Tensor], Tensor]) -> None:
    class Mean(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            bias = made(self, x)
            return self.layer(torch.softmax(x @ x.mT + bias + mask, 2) @ x), bias.tanh()

    for samples in (2, 4):
        model = Shared(MADE["looked up"])
        model.first = Mean(MADE["looked up"])
        made_problem = problem(lambda model=model: model, samples)
        with pytest.raises(MixedSamplesError, match=r"first.* is summed over the|influence"):
            run(made_problem)
        assert results(made_problem.model) == {}


class Prompted(Module):
    """Adds something to the positions of each sample."""

    def __init__(self, prompt: Callable[[Prompted, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.scale, self.layer, self.last = Embedding(6, 2), Parameter(torch.rand(2)), Linear(2, 2), Linear(2, 2)
        self.moments = Moments()
        self.register_buffer("places", torch.randn(LENGTH, 2))
        self.prompt = prompt

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(x) * self.scale + self.prompt(self, x)))


class Moments(Module):
    """A layer of numbers ``[R]``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.rand(2))

    def forward(self, t: Tensor) -> Tensor:
        return t[:, None] * self.weight


COPIES: dict[str, Callable[[Prompted, Tensor], Tensor]] = {
    "looked up": lambda net, x: net.table(torch.arange(LENGTH))[None].repeat(len(x), 1, 1),
    "looked up, with an axis in front": lambda net, x: net.table(torch.arange(LENGTH)[None]).repeat(len(x), 1, 1),
    "looked up, other axis": lambda net, x: net.table(torch.arange(LENGTH)).unsqueeze(1).repeat(1, len(x), 1).transpose(0, 1),
    "looked up, tile": lambda net, x: net.table(torch.arange(LENGTH)).tile(len(x), 1).view(x.shape),
    "looked up, layer": lambda net, x: net.layer(net.table(torch.arange(LENGTH))).tanh()[None].repeat(len(x), 1, 1),
    "buffer": lambda net, x: net.layer(net.places).sin()[None].repeat(len(x), 1, 1),
    "buffer, each sample scaled": lambda net, x: net.layer(net.places)[None].repeat(len(x), 1, 1) * x.mean((1, 2), keepdim=True),
    "layer of a parameter, stacked": lambda net, x: torch.stack([net.layer(net.table.weight[:LENGTH])] * len(x)),
}


@pytest.mark.parametrize("samples", [1, 2, 4, 5])
@pytest.mark.parametrize("copy", COPIES)
def test_copies_for_all_samples(copy: str, samples: int) -> None:
    check(lambda: freeze_unused(Prompted(COPIES[copy])), samples)


def test_copies_of_as_many_positions_as_samples() -> None:
    """They are exact where they cannot be the samples, else the message says what to write."""
    made = problem(lambda: Prompted(COPIES["looked up"]), LENGTH)
    with pytest.raises(MixedSamplesError, match=r"RepeatBackward0 .*copies what is none of samples: then write expand.*table\.weight"):
        run(made)
    assert results(made.model) == {}
    check(lambda: freeze_unused(Prompted(lambda net, x: net.table(torch.arange(LENGTH))[None].expand(len(x), -1, -1))), LENGTH)


MIXED: dict[str, Callable[[Prompted, Tensor], Tensor]] = {
    "all samples": lambda net, x: net.layer(x).sum(0, keepdim=True).repeat(len(x), 1, 1),
    "all samples, positions in front": lambda net, x: net.layer(x.transpose(0, 1)).amax(1)[None].repeat(len(x), 1, 1),
    "samples one by one": lambda net, x: torch.stack([net.layer(row) for row in x]).amax(0, keepdim=True).repeat(len(x), 1, 1),
    "classes": lambda net, x: net.table((x[:, 0, 0] > 0).long()).amax(0).repeat(len(x), LENGTH, 1),
    "classes, row after row": lambda net, x: torch.stack([net.table(row) for row in (x[..., 0] > 0).long()]).amax(0).repeat(len(x), 1, 1),
    "numbers": lambda net, x: net.moments(x[:, 0, 0].clone()).amax(0).repeat(len(x), LENGTH, 1),
    "pairs": lambda net, x: (net.layer(x).repeat(len(x), 1, 1) * net.layer(x).repeat_interleave(len(x), 0)).view(len(x), len(x), LENGTH, 2).sum(1),
}


@pytest.mark.parametrize("samples", [2, 4, 5])
@pytest.mark.parametrize("mixed", MIXED)
def test_copies_of_samples_are_refused(mixed: str, samples: int) -> None:
    made = problem(lambda: Prompted(MIXED[mixed]), samples)
    with pytest.raises((MixedSamplesError, UnsupportedError), match=r"influence one another|ambiguous"):
        run(made)
    assert results(made.model) == {}


def numbers_of(x: Tensor) -> Tensor:
    return (10 * x[..., 0]).long() % 6


def inside(made: Callable[[Prompted, Tensor], Tensor]) -> Callable[[Prompted, Tensor], Tensor]:
    """Compute in a module inside."""

    class Inside(Module):
        def __init__(self, net: Prompted) -> None:
            super().__init__()
            self.table, self.layer, self.scale = net.table, net.layer, net.scale
            self.register_buffer("places", net.places)

        def forward(self, x: Tensor) -> Tensor:
            return made(self, x).tanh()

    return lambda net, x: net._modules.setdefault("inside", extend(Inside(net)))(x)


TABLES: dict[str, Callable[[Prompted, Tensor], Tensor]] = {
    "counted": lambda net, x: net.table(torch.arange(6)).view(2, LENGTH, 2).sum(0),
    "counted, with an axis in front": lambda net, x: net.table(torch.arange(5, -1, -1)[None])[0, :LENGTH],
    "segments": lambda net, x: net.table(torch.tensor([0, 0, 1, 0, 2, 1])).view(2, LENGTH, 2).sum(0),
    "order of a scan": lambda net, x: net.table(torch.tensor([[0, 4, 2, 1, 5, 3]]))[0, :LENGTH],
    "looked up, scaled": lambda net, x: net.table(torch.arange(LENGTH)) * 2,
    "layer of constants": lambda net, x: net.layer(net.places[:, :2]) + net.places,
    "constants beside parameters": lambda net, x: (net.table.weight[:LENGTH] + net.places).tanh().masked_fill(net.places > 1, 0.0),
    "the same": lambda net, x: F.embedding(torch.ones(6, dtype=torch.long), net.table.weight)[:LENGTH],
    "distances": lambda net, x: net.table((torch.arange(6)[:, None] - torch.arange(6)).abs().clamp(max=4)).sum(1)[1:4],
    "distances, of fewer": lambda net, x: net.table((torch.arange(6)[:, None] - torch.arange(4)).relu()).tanh().sum(1)[:LENGTH],
}


@pytest.mark.parametrize("around", [inside, lambda made: made])
@pytest.mark.parametrize("made", TABLES)
def test_multiples_of_the_samples_as_positions(made: str, around: Callable) -> None:
    for samples in (1, 2, 5):
        check(lambda: freeze_unused(Prompted(around(TABLES[made]))), samples)


SUMMED: dict[str, Callable[[Prompted, Tensor], Tensor]] = {
    "looked up, positions in front": lambda net, x: net.table(numbers_of(x).T).sum(1),
    "function, positions in front": lambda net, x: F.embedding(numbers_of(x).T, net.table.weight).mean(1),
    "layer, positions in front": lambda net, x: net.layer(x.transpose(0, 1)).sum(1),
    "layer, positions in front, copied": lambda net, x: net.layer(x.transpose(0, 1).contiguous()).amax(1),
    "layer, flat": lambda net, x: net.layer(x.view(-1, 2)).view(x.shape).sum(0),
    "function": lambda net, x: F.linear(x, net.layer.weight).sum(0),
    "function, flat": lambda net, x: F.linear(x.view(-1, 2), net.layer.weight).view(x.shape).tanh().sum(0),
    "product": lambda net, x: (x * net.scale).amax(0),
    "product, positions in front": lambda net, x: (x.transpose(0, 1) * net.scale).sum(1),
}


@pytest.mark.parametrize("around", [inside, lambda made: made])
@pytest.mark.parametrize("summed", SUMMED)
def test_sums_over_samples_are_refused(summed: str, around: Callable) -> None:
    """Behind layers, tables and functions of views of what the model was given, with the samples on any axis."""
    for samples in (2, 3, 4):
        made = problem(lambda: Prompted(around(SUMMED[summed])), samples)
        with pytest.raises(MixedSamplesError, match=rf"is summed over the {samples} samples"):
            run(made)
        assert results(made.model) == {}


class Assembled(Module):
    """Data times a matrix that is made of parameters and constants, which need not be buffers."""

    def __init__(self, made: Callable[[Assembled, Tensor], Tensor], first: bool) -> None:
        super().__init__()
        self.entries, self.rows, self.layer = Parameter(torch.randn(6)), Parameter(torch.randn(4, 2)), Linear(4, 4)
        self.made, self.first = made, first

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.made(self, x)
        return self.layer(torch.tanh(x @ matrix.T)) if self.first else F.linear(torch.tanh(self.layer(x)), matrix)


def lower(model: Assembled, x: Tensor) -> Tensor:
    matrix = x.new_zeros(4, 4)
    matrix[torch.tril_indices(4, 4, -1).unbind()] = model.entries
    return matrix


def with_diagonal(model: Assembled, x: Tensor) -> Tensor:
    matrix = lower(model, x)
    matrix[range(4), range(4)] = 1.0
    return matrix


def reflection(model: Assembled, x: Tensor) -> Tensor:
    vector, unit = model.entries[:4, None], torch.eye(4, dtype=x.dtype)
    return unit - (2 * unit) @ vector @ (vector.T @ unit) / vector.square().sum()


def by_mask(model: Assembled, x: Tensor) -> Tensor:
    matrix = x.new_ones(4, 4)
    matrix[torch.ones(4, 4).triu(1).bool()] = model.entries
    return matrix


def lines(model: Assembled, x: Tensor) -> Tensor:
    return x.new_zeros(4, 4).index_put((torch.tensor([2, 1]),), model.rows.reshape(2, 4))


ASSEMBLED = {
    "triangle": lower,
    "triangle with ones": with_diagonal,
    "mask": by_mask,
    "lines": lines,
    "rotation": lambda model, x: torch.matrix_exp(lower(model, x) - lower(model, x).T),
    "scattered": lambda model, x: x.new_zeros(16).scatter(0, torch.tensor([1, 5, 6, 9, 12, 15]), model.entries).view(4, 4),
    "reflection": reflection,
    "columns": lambda model, x: torch.cat([model.rows, model.rows.square().sum(1, keepdim=True), x.new_ones(4, 1)], -1),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("made", ASSEMBLED)
def test_matrices_of_parameters_and_constants(made: str, first: bool) -> None:
    """What is put into constants, or beside them, has rows of its own, however many samples there are."""
    for samples in (1, 2, 3, 4, 6):

        def make(samples: int = samples) -> Problem:
            torch.manual_seed(0)
            x = torch.randn(samples, 4, dtype=torch.float64)
            model = Assembled(ASSEMBLED[made], first).double()
            loss = MSELoss()(model(x), torch.zeros_like(x))
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), strict=True):
                parameter.requires_grad_(gradient is not None)
            return Problem(model, x, [Term(MSELoss(), torch.randn_like(x))])

        problem, oracle = make(), Oracle(make())
        run(problem)
        for name, parameter in ((name, parameter) for name, parameter in problem.model.named_parameters() if parameter.requires_grad):
            close(parameter.grad_batch, oracle.grad_batch[name])
            close(parameter.diag_ggn_exact, sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))[name])


@pytest.mark.parametrize(
    "made",
    [
        lambda model, x: torch.cat([model.entries[:2].expand(4, 2), 2 * x[:, :2]], 1),
        lambda model, x: torch.cat([model.entries[:1].repeat(4, 2), 2 * x[:, :2]], 1),
        lambda model, x: (2 * x).index_put((torch.arange(4), torch.tensor([0])), model.entries[0]),
        lambda model, x: (2 * x).index_put((torch.arange(4),), model.entries[:4]),
        lambda model, x: (2 * x).index_put((torch.arange(4), x.argmax(1)), model.entries[:4]),
        lambda model, x: (2 * x).scatter(1, x.argmax(1, keepdim=True), model.rows[:, :1]),
        lambda model, x: (2 * x) @ lower(model, x),
        lambda model, x: torch.cat([2 * x, model.layer(x)[:, :0]], 1),
    ],
)
def test_copies_of_samples_with_parameters_in_them_are_refused(made: Callable[[Assembled, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(MixedSamplesError, match="influence"):
        run(Problem(Assembled(made, True).double(), x, [Term(MSELoss(), torch.randn_like(x))]))


# --- rows of parameters that look like samples ------------------------------------------------------------------------------------------------

MEMBERS = 4


class Members(Module):
    """Experts, classes or positions on axis 0 of the output, samples on another axis."""

    def __init__(self, make: Callable[[Members, Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.w, self.W, self.head = make, Parameter(torch.randn(MEMBERS, 2)), Parameter(torch.randn(MEMBERS, 2, 2)), Linear(2, 2)
        self.table = Parameter(torch.randn(MEMBERS, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self, x)


ROWS_OF_PARAMETERS: dict[str, Callable[[Members, Tensor], Tensor]] = {
    "product from the left": lambda net, x: net.w @ x.t(),
    "product from the left of a multiple": lambda net, x: net.w @ (2 * x).t(),
    "function of a layer": lambda net, x: F.linear(net.w, x),
    "einsum": lambda net, x: torch.einsum("cd,nd->cn", net.w, x),
    "copies, matrices": lambda net, x: torch.bmm(x.unsqueeze(0).repeat(MEMBERS, 1, 1), net.W),
    "multiples, matrices": lambda net, x: torch.bmm(2 * x.expand(MEMBERS, -1, -1), net.W),
    "stacked, matrices, layer": lambda net, x: net.head(torch.stack([x] * MEMBERS) @ net.W),
    "sum": lambda net, x: net.head(x + net.w[:, None]),
    "difference": lambda net, x: net.head(x[None] - net.w[:, None]),
    "quotient": lambda net, x: net.head(x / net.w[:, None]),
    "maximum": lambda net, x: net.head(torch.maximum(x[None], net.w[:, None])),
    "squared distances": lambda net, x: torch.cdist(net.w, x),
    "columns of a table": lambda net, x: net.table[:, (x[:, 0] > 0).long()],
    "chosen columns of a table": lambda net, x: net.table.index_select(1, (x[:, 0] > 0).long()),
}


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("way", ROWS_OF_PARAMETERS)
def test_rows_of_parameters_are_no_samples(way: str, extension: type) -> None:
    """With another number of samples, the model is refused, or its samples are found on the other axis."""
    model, lossfunc = extend(Members(ROWS_OF_PARAMETERS[way])).double(), extend(MSELoss())
    with pytest.raises((UnsupportedError, MixedSamplesError)), backpack(extension()):
        out = model(torch.randn(MEMBERS, 2).double())
        lossfunc(out, torch.zeros_like(out)).backward()
    assert not any(results(model).values())


def test_message_of_rows_of_parameters() -> None:
    model = extend(Members(ROWS_OF_PARAMETERS["sum"])).double()
    said = r"w: of shape \[4, 2\], would have a row on axis 0 for each of the 4 samples, and what is made of it has(.|\n)*\"w\""
    with pytest.raises(UnsupportedError, match=said), backpack(BatchGrad()):
        model(torch.randn(MEMBERS, 2).double()).square().sum().backward()


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize("way", ["product from the left", "einsum", "function of a layer"])
def test_classes_first_with_another_number_of_samples(way: str, samples: int) -> None:
    torch.manual_seed(0)
    model, x, y = extend(Members(ROWS_OF_PARAMETERS[way])).double(), torch.randn(samples, 2).double(), torch.randint(MEMBERS, (samples,))
    with backpack(BatchGrad()):
        F.cross_entropy(model(x).t(), y, reduction="sum").backward()
    rows = [torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]).t(), y[n : n + 1]), model.w)[0] for n in range(samples)]
    close(model.w.grad_batch, torch.stack(rows))


@pytest.mark.parametrize("make", [lambda net, x: net.head(x + net.w), lambda net, x: F.linear(x * net.w.tanh(), net.W[0].repeat(2, 1))])
def test_a_parameter_with_a_row_for_each_sample(make: Callable[[Members, Tensor], Tensor]) -> None:
    """Codes of samples that are always all there: nothing that they meet is as long, though the output may be."""
    torch.manual_seed(0)
    model = extend(Members(make)).double()
    x = torch.randn(MEMBERS, 2).double()
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    rows = [torch.autograd.grad(model(x)[n].square().sum(), model.w)[0] for n in range(MEMBERS)]
    close(model.w.grad_batch, torch.stack(rows))
