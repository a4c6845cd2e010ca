"""Samples that have other numbers of rows: nodes of graphs, sets, bags of instances. Rules that sum over rows see as many of each sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases_nets import Net, parameter
from oracle import Oracle, Problem, Term
from table import default_dtype
from test_extensions import QUANTITIES, close, collect, run
from test_lstm import NAMES
from torch import Tensor, nn
from torch.nn import Linear

from backpack import backpack, extend, extensions
from backpack.core import arrangements
from backpack.core.samples import Layout, plain_layout
from backpack.utils.errors import UnsupportedError

# to which sample each row belongs: rows of one sample need not stand side by side, and there may be one, or none
OWNERS = {
    "one after the other": [0, 0, 0, 1, 2, 2],
    "mixed up": [2, 0, 2, 1, 0, 2, 2],
    "a sample without rows": [2, 0, 0, 2, 2],
    "in another order": [2, 0, 1],
    "as many, mixed up": [0, 1, 1, 2, 0, 2],
    "one sample": [0, 0, 0],
    "little else than zeros": [*range(5), *[5] * 20],
}


def pooled(net: Net, x: Tensor, owners: Tensor) -> Tensor:  # noqa: D103
    h = net.b(net.act(net.a(x)))
    return net.d(h.new_zeros(int(owners.max()) + 1, h.shape[1]).index_add(0, owners, h).tanh())


def of_positions(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Every row has positions, too."""
    h = net.b(net.act(net.a(x[:, None] * torch.tensor([[1.0], [-2.0]]))))
    return net.d(h.new_zeros(int(owners.max()) + 1, *h.shape[1:]).index_add(0, owners, h).tanh().sum(1))


def behind_positions(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Rows lie on axis 1."""
    h = net.b(net.act(net.a(x * torch.tensor([[[1.0]], [[-2.0]]]))))
    return net.d(h.new_zeros(2, int(owners.max()) + 1, h.shape[2]).index_add(1, owners, h).tanh().sum(0))


def stacked(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """A stack of matrices, which are groups, and no positions."""
    h = net.act(net.a(x))
    h = torch.bmm(h.expand(2, -1, -1), net.stack).sin().sum(0)
    return net.d(h.new_zeros(int(owners.max()) + 1, h.shape[1]).index_add(0, owners, h).tanh())


def stacked_one_by_one(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """All of a product belongs to one sample, or to two."""
    h, N = net.act(net.a(x)), int(owners.max()) + 1
    alone = [torch.bmm(h[owners == n].expand(2, -1, -1), net.stack).sin().sum((0, 1)) for n in range(N)]
    pairs = [torch.bmm(h[owners // 2 == n].expand(2, -1, -1), net.stack).cos().sum(0) for n in range(-(-N // 2))]
    places = [owners[owners // 2 == n] for n in range(-(-N // 2))]
    return net.d(torch.stack(alone).tanh() + h.new_zeros(N, 3).index_add(0, torch.cat(places), torch.cat(pairs)))


def as_functions(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Products are read off the graph; one weight is computed from others, and has no Kronecker factors."""
    h = (net.act(x @ net.a.weight.mT + net.a.bias)) @ (net.b.weight * net.b.bias.exp()[:, None]).mT
    return net.d(h.new_zeros(int(owners.max()) + 1, h.shape[1]).index_add(0, owners, h).tanh())


def twice(net: Net, x: Tensor, owners: Tensor) -> Tensor:  # noqa: D103
    h = net.b(net.act(net.b(net.act(net.a(x)))))
    return net.d(h.new_zeros(int(owners.max()) + 1, h.shape[1]).index_add(0, owners, h).tanh())


def normalized(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Rows of zeros have no standard deviation."""
    h = net.b(net.norm(net.a(x)))
    return net.d(h.new_zeros(int(owners.max()) + 1, 3).index_add(0, owners, h))


def masked(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Rows of others are multiplied by zero."""
    h = net.b(net.act(net.a(x)))
    return net.d(torch.stack([(h * (owners == n)[:, None]).sum(0) for n in range(int(owners.max()) + 1)]).tanh())


def masked_numbers(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Every row is a number."""
    h = net.act(net.a(x))[:, 0]
    sums = [(h * (owners == n)).sum() + torch.where(owners == n, h.sin(), 0.0).sum() for n in range(int(owners.max()) + 1)]
    return net.d(torch.stack(sums)[:, None] * torch.tensor([1.0, 2.0, -1.0]))


def masked_behind_a_layer(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """The layer is called for each sample, with the rows of all."""
    h = net.act(net.a(x))
    return net.d(torch.cat([(net.b(h) * 2 * (owners == n).to(h)[:, None]).sum(0, keepdim=True) for n in range(int(owners.max()) + 1)]).tanh())


def masked_products(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """The same, of products that are read off the graph; masks stand in front."""
    h = net.act(net.a(x))
    masks = [(owners == n).to(h)[:, None] for n in range(int(owners.max()) + 1)]
    return net.d(torch.stack([(mask * (h @ net.b.weight.mT + net.b.bias)).sin().sum(0) for mask in masks]))


def one_by_one(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """A layer is called with the rows of one sample, and another one with those of two."""
    h, N = net.act(net.a(x)), int(owners.max()) + 1
    pairs = [net.d(net.b(h[(owners == n) | (owners == n + 1)]).sin())[owners[(owners == n) | (owners == n + 1)] == n].sum(0) for n in range(N)]
    return net.d(torch.stack([net.b(h[owners == n]).tanh().sum(0) for n in range(N)])) + torch.stack(pairs)


def chosen(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Constants are put in the place of rows of others."""
    h = net.b(net.act(net.a(x)))
    sums = [torch.where((owners == n)[:, None], h, 0.0).sum(0) for n in range(int(owners.max()) + 1)]
    largest = [h.masked_fill((owners != n)[:, None], -9.0).logsumexp(0) for n in range(int(owners.max()) + 1)]
    return net.d(torch.stack(sums).tanh() + torch.stack(largest).sin())


def types(x: Tensor) -> Tensor:
    """Integers, from 0 to 3, that tell what kind of thing a row is."""
    return (x[:, :3] > 0).sum(1)


def looked_up(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Rows are looked up; those of the first type are constant."""
    h = net.act(net.table(types(x)) + net.other(types(-x)[:, None].expand(-1, 2)).sin().sum(1))
    return net.d(h.new_zeros(int(owners.max()) + 1, h.shape[1]).index_add(0, owners, h).tanh())


def looked_up_one_by_one(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """Tables are used for each sample alone, with an axis of samples, and without one."""
    samples = [types(x[owners == n]) for n in range(int(owners.max()) + 1)]
    rows = [net.table(t).sin() + net.table(t.flip(0)[None])[0] * net.other(t) for t in samples if len(t) or not net.skips]
    return net.d(torch.stack([x.new_zeros(3) if net.skips and not len(t) else rows.pop(0).sum(0) for t in samples]))


def looked_up_and_multiplied(net: Net, x: Tensor, owners: Tensor) -> Tensor:
    """A table is the weight of a layer, too."""
    h = net.act(net.table(types(x)) * net.other(types(-x))) @ net.table.weight.mT
    return net.d(h.new_zeros(int(owners.max()) + 1, h.shape[1]).index_add(0, owners, h).tanh())


FORWARDS = [pooled, of_positions, behind_positions, stacked, as_functions, twice, normalized]
FORWARDS += [masked, masked_numbers, masked_behind_a_layer, masked_products, one_by_one, stacked_one_by_one, chosen]
FORWARDS += [looked_up, looked_up_one_by_one, looked_up_and_multiplied]
WITHOUT_FACTORS = {as_functions: "b.weight of shape", looked_up_and_multiplied: "table.weight: used in two ways"}


def build(forward: Callable[..., Tensor], owners: list[int]) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(1)
        parts = {"a": Linear(3, 3), "act": nn.Tanh(), "b": Linear(3, 3), "d": Linear(3, 4)}
        if forward is masked_numbers:
            del parts["b"]
        if forward in (stacked, stacked_one_by_one):
            parts["stack"] = parameter(2, 3, 3)()
        if "looked" in forward.__name__:
            features = 4 if forward is looked_up_and_multiplied else 3
            parts = {"table": nn.Embedding(4, 3, padding_idx=0), "other": nn.Embedding(4, 3), "act": nn.Tanh(), "d": Linear(features, 4)}
        if forward is normalized:
            parts["norm"] = nn.LayerNorm(3, eps=0.0)
        net = Net(partial(call, forward, torch.tensor(owners)), **parts)
        net.skips = True  # torch cannot differentiate twice where nothing is looked up
        target = torch.arange(max(owners) + 1) % 4
        return Problem(net, torch.randn(len(owners), 3), [Term(nn.CrossEntropyLoss(), target)])


def call(forward: Callable[..., Tensor], owners: Tensor, net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return forward(net, x, owners)


@pytest.mark.parametrize("extension", [*NAMES, "DiagHessian", "BatchDiagHessian"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("owners", OWNERS)
def test_against_oracle(extension: str, forward: Callable[..., Tensor], owners: str) -> None:
    problem, quantity = build(forward, OWNERS[owners]), QUANTITIES[extension]
    if forward in WITHOUT_FACTORS and quantity.field in ("kflr", "kfac"):
        with pytest.raises(UnsupportedError, match=WITHOUT_FACTORS[forward]):
            run(problem, quantity.make())
        return
    run(problem, quantity.make())
    quantity.check(Oracle(build(forward, OWNERS[owners])), collect(problem, quantity.field))


@pytest.mark.parametrize("extension", NAMES)
def test_where_nothing_is_looked_up(extension: str) -> None:
    problem, truth = (build(looked_up_one_by_one, OWNERS["a sample without rows"]) for _ in range(2))
    problem.model.skips = truth.model.skips = False
    run(problem, QUANTITIES[extension].make())
    QUANTITIES[extension].check(Oracle(truth), collect(problem, QUANTITIES[extension].field))


@pytest.mark.parametrize("forward", FORWARDS)
def test_whole_and_in_pieces(forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["BatchGrad", "BatchL2Grad", "Variance", "SumGradSquared", "DiagGGNExact", "SqrtGGNMC", "BatchDiagGGNExact"]
    found = []
    for most in (4, 0):
        monkeypatch.setattr(arrangements, "_MOST_PADDING", most)
        monkeypatch.setattr(arrangements, "_SHORT", 0)
        arrangements.ragged.cache_clear()
        problem = build(forward, OWNERS["mixed up"])
        run(problem, *(QUANTITIES[name].make() for name in names), memory=None if most else 500)
        found.append([collect(problem, QUANTITIES[name].field) for name in names])
    arrangements.ragged.cache_clear()
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("index", [[2, 0], [1, 1, 2]], ids=str)
def test_subsampling(index: list[int]) -> None:
    problem, oracle = build(pooled, OWNERS["mixed up"]), Oracle(build(pooled, OWNERS["mixed up"]))
    run(problem, extensions.BatchGrad(subsampling=index), extensions.BatchDiagGGNExact(subsampling=index), extensions.BatchL2Grad(subsampling=index))
    expected = oracle.diag_ggn_batch(oracle.hessian_exact)
    for name, param in problem.model.named_parameters():
        close(param.grad_batch, oracle.grad_batch[name][index])
        close(param.batch_l2, oracle.grad_batch[name][index].flatten(1).square().sum(1))
        close(param.diag_ggn_exact_batch, expected[name][index])


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_results_with_a_graph() -> None:
    problem, oracle = build(pooled, OWNERS["mixed up"]), Oracle(build(pooled, OWNERS["mixed up"]))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(extensions.BatchGrad()):
        problem.loss(problem.outputs()).backward(create_graph=True)
    weight = problem.model.a.weight
    close(weight.grad_batch.detach(), oracle.grad_batch["a.weight"])
    (found,) = torch.autograd.grad(weight.grad_batch.square().sum(), weight)
    out = pooled(problem.model, problem.x, torch.tensor(OWNERS["mixed up"]))
    losses = nn.functional.cross_entropy(out, problem.terms[0].target, reduction="none") / len(out)
    grads = [torch.autograd.grad(loss, weight, create_graph=True)[0] for loss in losses]
    (expected,) = torch.autograd.grad(sum(grad.square().sum() for grad in grads), weight)
    close(found, expected)


def test_places() -> None:
    turn = arrangements.ragged(Layout(0, (1, 0, 1), 2))
    assert turn.front(torch.tensor([[1.0], [2.0], [3.0]])).tolist() == [[[2.0], [0.0]], [[1.0], [3.0]]]
    assert turn.front(torch.tensor([[[1.0], [2.0], [3.0]]]), 1).tolist() == [[[[2.0], [0.0]], [[1.0], [3.0]]]]
    positions = turn.front(torch.tensor([[[1.0], [4.0]], [[2.0], [5.0]], [[3.0], [6.0]]]))
    assert positions.tolist() == [[[[2.0], [0.0]], [[5.0], [0.0]]], [[[1.0], [3.0]], [[4.0], [6.0]]]]
    assert arrangements.ragged(Layout(0, (2, 0), 30)) == arrangements.Ragged(1, (2, 0), plain_layout(30))
    cut = arrangements.ragged(Layout(0, (1, *[5] * 40, *range(6, 20)), 20))
    assert cut.layout == Layout(0, (1, *[5] * 6, *range(6, 20)), 20)
    assert (cut.length, cut.places) == (7, (0, *range(7, 47), *range(49, 147, 7)))
    assert arrangements.ragged(Layout(0, (), 3)) is None
