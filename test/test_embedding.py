"""Derivatives of tables in which rows are looked up, and their options that are about gradients."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from cases_nets import Net
from oracle import Oracle, Problem
from table import classify, default_dtype
from test_derivatives import DOUBLE, SUBSAMPLING, Recorded, V
from test_derivatives import close as equal
from test_extensions import QUANTITIES, close, collect, run
from torch import Tensor, einsum, nn, randint, randn, tensor
from torch.nn import Embedding, EmbeddingBag, Flatten, Linear, Module, Sequential
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.core.derivatives.embedding import EmbeddingBagDerivatives
from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.registry import derivatives_for
from backpack.utils.errors import UnsupportedError
from backpack.utils.kroneckers import kfacs_to_mat

OFFSETS, LIST = tensor([0, 0, 4]), tensor([0, 1, 1, 4, 2, 0, 0])
LAYERS: dict[str, Callable[[], tuple[Module, tuple]]] = {
    "Embedding": lambda: (Embedding(5, 3), (randint(5, (3,)),)),
    "Embedding, positions": lambda: (Embedding(5, 3), (randint(5, (3, 4)),)),
    "Embedding, more axes": lambda: (Embedding(5, 1), (randint(5, (3, 2, 2)),)),
    "Embedding, padding": lambda: (Embedding(3, 2, padding_idx=-1), (randint(3, (3, 4)),)),
    "Embedding, sparse, int32": lambda: (Embedding(3, 2, sparse=True), (randint(3, (3, 4), dtype=torch.int32),)),
    "Embedding, max_norm": lambda: (Embedding(5, 3, max_norm=0.7), (randint(5, (3, 4)),)),
    "EmbeddingBag, sum": lambda: (EmbeddingBag(5, 3, mode="sum"), (randint(5, (3, 4)),)),
    "EmbeddingBag, mean": lambda: (EmbeddingBag(5, 3), (randint(5, (3, 4)),)),
    "EmbeddingBag, mean, padding": lambda: (EmbeddingBag(3, 3, padding_idx=1), (tensor([[0, 1, 1], [1, 1, 1], [2, 2, 0]]),)),
    "EmbeddingBag, weights": lambda: (EmbeddingBag(3, 2, mode="sum", padding_idx=0), (randint(3, (3, 4)), None, randn(3, 4, dtype=DOUBLE))),
    "EmbeddingBag, offsets": lambda: (EmbeddingBag(5, 2, mode="sum"), (LIST, OFFSETS)),
    "EmbeddingBag, offsets, mean": lambda: (EmbeddingBag(5, 2), (LIST, OFFSETS)),
    "EmbeddingBag, offsets and end": lambda: (EmbeddingBag(5, 2, include_last_offset=True), (LIST, tensor([0, 4, 7, 7]))),
    "EmbeddingBag, offsets, weights": lambda: (EmbeddingBag(5, 2, mode="sum", padding_idx=1), (LIST, OFFSETS, randn(7, dtype=DOUBLE))),
}


@pytest.mark.parametrize("large", [2**22, 0], ids=["small", "large"])
@pytest.mark.parametrize("name", LAYERS)
def test_products(name: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the dense Jacobian of autograd, with all samples and with a choice of them; results that are large have their rows placed."""
    monkeypatch.setattr("backpack.core.derivatives.embedding.LARGE", large)
    module, inputs = LAYERS[name]()
    module = module.to(DOUBLE)
    module.weight.data.normal_()
    recorded = Recorded(module, *inputs)
    recorded.N = len(recorded.y)
    entries = [torch.autograd.grad(entry, module.weight, retain_graph=True)[0].to_dense() for entry in module(*inputs).flatten()]
    jacobian, rule = torch.stack(entries).reshape(*recorded.y.shape, -1).flatten(1, -2), derivatives_for(module)
    assert rule.applies(module)
    for subsampling in (None, SUBSAMPLING, [1]):
        samples = range(recorded.N) if subsampling is None else subsampling
        mat = recorded.like_output(len(samples))
        truth = einsum("nop,vno->vnp", jacobian[samples], mat.flatten(2)).reshape(V, len(samples), *module.weight.shape)
        for sum_batch, expected in ((True, truth.sum(1)), (False, truth)):
            with torch.no_grad():  # as in a backward pass
                equal(rule.param_mjp("weight", module, None, None, mat, sum_batch, subsampling), expected)
                equal(rule.param_mjp("weight", module, None, None, mat[1], sum_batch, subsampling), expected[1])
    mat = randn(V, *module.weight.shape, dtype=DOUBLE)
    equal(rule.weight_jac_mat_prod(module, None, None, mat), einsum("nop,vp->vno", jacobian, mat.flatten(1)).reshape(V, *recorded.y.shape))
    if inputs[0].dim() > 1 and isinstance(module, Embedding) and not module.sparse:
        mat = recorded.like_output()
        equal(GenericDerivatives().param_mjp("weight", module, None, None, mat), rule.param_mjp("weight", module, None, None, mat))


@pytest.mark.parametrize("pair", [0, 10**9], ids=["pairs of lookups", "bags"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("EmbeddingBag")])
def test_input_moment_of_bags(name: str, pair: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How often each bag looks up each row is the derivative of a feature with respect to that column of the table."""
    monkeypatch.setattr("backpack.core.derivatives.embedding._PAIR", pair)
    module, inputs = LAYERS[name]()
    module = module.to(DOUBLE)
    Recorded(module, *inputs)
    counts = torch.stack([torch.autograd.grad(entry, module.weight, retain_graph=True)[0][:, 0] for entry in module(*inputs)[:, 0]])
    equal(derivatives_for(module).input_moment(module, 0.5), (counts.T @ counts / 2)[None])


@pytest.mark.parametrize("size", [(0,), (0, 3), (3, 0)], ids=str)
def test_nothing_looked_up(size: tuple[int, ...]) -> None:
    module = extend(Embedding(4, 2, padding_idx=0))
    with backpack(extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.Variance()):
        module(randint(4, size)).sum().backward()
    assert module.weight.grad_batch.shape == (size[0], 4, 2)
    assert not (module.weight.grad_batch.any() or module.weight.batch_l2.any() or module.weight.variance.any())


def test_what_is_left_to_the_graph() -> None:
    """The maximum over a bag, and a list of indices of which torch does not say to which bag its end belongs."""
    for module, inputs in ((EmbeddingBag(4, 2, mode="max"), (randint(4, (3, 2)),)), (EmbeddingBag(5, 2, include_last_offset=True), (LIST, OFFSETS))):
        assert not EmbeddingBagDerivatives().applies(Recorded(module, *inputs).module)


def build(make: Callable[[], Problem]) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(1)
        return make()


def lookup(table: Callable[[], Module]) -> Problem:
    return classify(Sequential(table(), Flatten(), Linear(6, 4)), randint(5, (3, 3)))


def positions(table: Callable[[], Module]) -> Problem:
    return classify(
        Net(
            lambda net, x: net.b(net.token(x) + net.position(torch.arange(3)[None])).mean(1), token=Embedding(5, 2), position=table(), b=Linear(2, 4)
        ),
        randint(5, (3, 3)),
    )


@pytest.mark.parametrize("extension", QUANTITIES)
@pytest.mark.parametrize("make", [lookup, positions], ids=["a rule", "the graph"])
def test_sparse_gradients(make: Callable[..., Problem], extension: str) -> None:
    """Quantities are dense, and those of a dense table."""
    problem, quantity = build(partial(make, partial(Embedding, 5, 2, sparse=True))), QUANTITIES[extension]
    try:
        run(problem, quantity.make())
    except NotImplementedError:
        dense = build(partial(make, partial(Embedding, 5, 2)))
        with pytest.raises(NotImplementedError):
            run(dense, quantity.make())
        return
    quantity.check(Oracle(build(partial(make, partial(Embedding, 5, 2)))), collect(problem, quantity.field))


FREQUENT: dict[str, Callable[[], Problem]] = {
    "rows": lambda: lookup(partial(Embedding, 5, 2, scale_grad_by_freq=True)),
    "positions": lambda: positions(partial(Embedding, 5, 2, scale_grad_by_freq=True)),
    "bags": lambda: classify(Sequential(EmbeddingBag(5, 3, mode="sum", scale_grad_by_freq=True), Linear(3, 4)), randint(5, (3, 3))),
}


@pytest.mark.parametrize("extension", QUANTITIES)
@pytest.mark.parametrize("name", FREQUENT)
def test_gradients_scaled_by_frequency(name: str, extension: str) -> None:
    """Per-sample gradients add up to what autograd calls the gradient; what is no derivative has no second order."""
    problem, quantity = build(FREQUENT[name]), QUANTITIES[extension].make()
    if quantity.expects_backpropagation_quantities():
        with pytest.raises(UnsupportedError, match="scale_grad_by_freq"):
            run(problem, quantity)
        return
    run(problem, extensions.BatchGrad(), *([] if extension == "BatchGrad" else [quantity]))
    for parameter in problem.model.parameters():
        close(parameter.grad_batch.sum(0), parameter.grad)
        g = parameter.grad_batch
        expected = {
            "grad_batch": g,
            "batch_l2": g.flatten(1).square().sum(1),
            "sum_grad_squared": g.square().sum(0),
            "variance": g.var(0, correction=0),
        }
        close(getattr(parameter, quantity.savefield), expected[quantity.savefield])


def test_kronecker_factors_of_a_table() -> None:
    """For one position a sample, and columns that are the same for all samples, their product is the exact block."""
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model, lossfunc, x = extend(Sequential(Embedding(4, 3), Linear(3, 2))), extend(nn.MSELoss()), tensor([0, 2, 2, 2, 3])
        with backpack(extensions.KFLR(), extensions.SqrtGGNExact()):
            lossfunc(model(x), randn(5, 2)).backward()
    counts, outputs = model[0].weight.kflr
    close(counts, tensor([1.0, 0, 3, 1]).double() / 5)
    root = model[0].weight.sqrt_ggn_exact.reshape(-1, 12)
    close(kfacs_to_mat([counts, outputs]), root.T @ root)


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("EmbeddingBag")])
def test_kronecker_factors_of_bags(name: str) -> None:
    """They are those of a linear layer that is given, for each bag, how much of each row is in it."""
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        bag, inputs = LAYERS[name]()
        bag, out = bag.to(DOUBLE), bag.to(DOUBLE)(*inputs)
        contents = torch.stack([torch.autograd.grad(row[0], bag.weight, retain_graph=True)[0][:, 0] for row in out])
        linear, head, y = Linear(*bag.weight.shape, bias=False), extend(Linear(out.shape[1], 2)), randn(len(out), 2)
        linear.weight.data = bag.weight.data.T.clone()
        bag, linear, lossfunc = extend(bag), extend(linear), extend(nn.MSELoss())
        with backpack(extensions.KFLR()):
            lossfunc(head(bag(*inputs)), y).backward()
            lossfunc(head(linear(contents)), y).backward()
    close(bag.weight.kflr[0], linear.weight.kflr[1])
    close(bag.weight.kflr[1], linear.weight.kflr[0])


def _whole(table: nn.Parameter, start: int, end: int) -> Tensor:
    return table if end - start == len(table) else table[start:end]


TABLES: dict[str, Callable[[Callable[[int, int], Tensor], Tensor], Tensor]] = {
    "whole and a part": lambda rows, h: h + rows(0, 4)[:, None] + torch.cat([rows(1, 3)[:, None].expand(-1, h.shape[1], -1), h[:2]]),
    "in a loop over samples": lambda rows, h: torch.stack([one + rows(0, 4) for one in h.unbind(1)], 1),
    "a row for each sample": lambda rows, h: torch.stack([torch.cat([rows(i, i + 1), one]) for i, one in enumerate(h.unbind(1))], 1),
    "twice by a sample": lambda rows, h: torch.cat([h[:, :1] + rows(0, 4)[:, None] + rows(0, 4)[:, None], h[:, 1:]], 1),
    "added to itself": lambda rows, h: h + (rows(0, 4) + rows(0, 4)).unsqueeze(1),
    "joined, in another order": lambda rows, h: h + torch.cat([rows(2, 4), rows(0, 2)]).unsqueeze(1),
}


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", TABLES)
def test_kronecker_factors_of_bare_tables(name: str, samples: int, losses: int) -> None:
    """They are those of an embedding in which the same rows are looked up, samples second."""
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        start, table, lossfuncs = Linear(2, 3), nn.Parameter(randn(4, 3)), [extend(nn.MSELoss()) for _ in range(losses)]
        x, y = randn(4, samples, 2), randn(samples, 3)

        def factors(rows: Callable[[int, int], Tensor]) -> list[Tensor]:
            model = extend(Net(lambda net, x: TABLES[name](rows, net.a(x)).tanh().mean(0), a=start, table=Table(table)))
            with backpack(extensions.KFLR()):
                out = model(x)
                sum(weight * lossfunc(out, y) for weight, lossfunc in enumerate(lossfuncs, 1)).backward()
            return table.kflr

        bare = factors(lambda begin, end: _whole(table, begin, end))
        for one, other in zip(bare, factors(lambda begin, end: F.embedding(torch.arange(begin, end), table)), strict=True):
            close(one, other)


def test_rows_of_a_bare_table_count_for_the_samples_that_see_them() -> None:
    table, linear, lossfunc = nn.Parameter(randn(2, 3)), Linear(3, 2), extend(nn.MSELoss())
    model = extend(Net(lambda net, x: net.a(torch.cat([x[:1] + net.table.p[1:], x[1:] + net.table.p])), a=linear, table=Table(table)))
    with backpack(extensions.KFLR()):
        lossfunc(model(randn(4, 2, 3)), randn(4, 2, 2)).backward()
    assert table.kflr[0].tolist() == [0.75, 1]


def test_factors_in_half_precision_count_every_lookup() -> None:
    table, linear = nn.Parameter(randn(2, 3)), Linear(3, 2)
    model = Net(lambda net, x: net.a(sum(x + net.table.p[:1] for _ in range(300))), a=linear, table=Table(table)).to(torch.bfloat16)
    model, lossfunc = extend(model), extend(nn.MSELoss())
    with backpack(extensions.KFLR()):
        lossfunc(model(randn(4, 3, dtype=torch.bfloat16)), randn(4, 2, dtype=torch.bfloat16)).backward()
    assert table.kflr[0].tolist() == [300, 0]


def test_factors_of_rows_that_are_added_in_place_to_a_part_are_refused() -> None:
    model, lossfunc = extend(Net(_in_place, a=Linear(3, 3), table=Table(nn.Parameter(randn(2, 3))))), extend(nn.MSELoss())
    with backpack(extensions.KFLR()), pytest.raises(UnsupportedError, match=r"table.p of shape \[2, 3\]: used by an operation"):
        lossfunc(model(randn(4, 3, 3)), randn(4, 3, 3)).backward()


def _in_place(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    h[:, 1:] += net.table.p
    return h


class Table(Module):
    """A parameter, as a module."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.p = table


def test_factor_that_is_too_large() -> None:
    model, lossfunc = extend(Sequential(Embedding(2, 40_000), nn.AdaptiveAvgPool1d(1))), extend(nn.MSELoss())
    loss = lossfunc(model(tensor([[0], [1]])), randn(2, 1, 1))
    with pytest.raises(UnsupportedError, match="40,?000 x 40,?000"), backpack(extensions.KFAC()):
        loss.backward()


@pytest.mark.parametrize("make", [lambda: Embedding(5, 3), lambda: EmbeddingBag(5, 3), lambda: EmbeddingBag(5, 3, mode="sum")])
def test_padding_that_is_counted_from_the_end(make: Callable[[], Module]) -> None:
    """Set later on: torch counts it from the end, too."""
    model = Sequential(make(), Linear(3, 2)).to(DOUBLE)
    model[0].padding_idx = -1
    extend(model)
    with backpack(extensions.BatchGrad()):
        model(tensor([[4, 1], [4, 4], [0, 4]])).square().sum().backward()
    close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)
    assert not model[0].weight.grad[4].any()


class Function(Module):
    """Calls a bag as a function."""

    def __init__(self, bag: EmbeddingBag) -> None:
        super().__init__()
        self.weight, self.bag = nn.Parameter(bag.weight.detach().clone()), deepcopy(bag).requires_grad_(False)

    def forward(self, *inputs: Tensor) -> Tensor:
        more = dict(zip(("offsets", "per_sample_weights"), inputs[1:], strict=False))
        options = {name: getattr(self.bag, name) for name in ("mode", "padding_idx", "include_last_offset")}
        return F.embedding_bag(inputs[0], self.weight, **more, **options)


@pytest.mark.parametrize("name", [name for name in LAYERS if "Bag" in name])
def test_bags_as_functions(name: str) -> None:
    """They are read like the module."""
    names = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagHessian", "KFLR"]
    found = []
    bag, inputs = LAYERS[name]()
    last = Linear(bag.embedding_dim, 4).to(DOUBLE)
    for first in (bag.to(DOUBLE), Function(bag)):
        model = extend(nn.ModuleList([first, last]))
        lossfunc = extend(nn.CrossEntropyLoss())
        with backpack(*(getattr(extensions, quantity)() for quantity in names)):
            logits = model[1](model[0](*inputs).tanh())
            lossfunc(logits, torch.arange(len(logits)) % 4).backward()
        found.append([getattr(first.weight, QUANTITIES[quantity].field) for quantity in names])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert found[0][0].any()
