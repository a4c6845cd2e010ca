"""LSTMs in single precision, whose layers are single nodes of the graph on a CPU, against the oracle, which sees products with matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import test_extensions
import torch
from cases_nets import Net, parameter
from oracle import Oracle, Problem, Term
from table import classify, default_dtype
from test_extensions import QUANTITIES, Quantity, collect, run
from torch import Tensor, nn
from torch.nn import LSTM, Linear, Module
from torch.utils._pytree import tree_leaves

from backpack import backpack, clear, extend, extensions
from backpack.core.graph import operation
from backpack.core.plan import Plan
from backpack.core.walk import Walk
from backpack.utils.errors import DifferentiationError, MixedSamplesError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("error", "ignore:Using backward:UserWarning")  # of torch, about create_graph

Forward = Callable[[Net, Tensor], Tensor]


def outputs(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x))[0].mean(1))


def sequence_first(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x).transpose(0, 1))[0][-1])


def last_states_of_sequence(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return last_states(net, x.transpose(0, 1))


def last_states_of_sorted(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return last_states(net, x.flip(0).transpose(0, 1)).flip(0)


def last_states(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    _, (hidden, cell) = net.own(net.a(x))
    return net.b(hidden[-1] + cell.mean(0))


def last_cell(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x))[1][1][0])


def everything(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, (hidden, cell) = net.own(net.a(x))
    return net.b(out[:, 0] + hidden[0] * cell[0])


def given_states(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    first = h.mean(1)[None]
    return net.b(net.own(h, (first, first.tanh()))[0][:, -1])


def learned_states(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x), (net.hidden.expand(1, len(x), 2), net.cell.expand(1, len(x), 2).contiguous()))[0][:, 1])


def continued(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    out, states = net.own(h)
    return net.b(net.own(out, states)[1][0][0])


def folded(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out = net.own(net.a(x).repeat_interleave(2, 0))[0]
    return net.b(out.reshape(len(x), 2, -1, 2).sum((1, 2)))


def in_turn(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out = net.own(net.a(x).repeat(2, 1, 1))[1][0][0]
    return net.b(out.reshape(2, len(x), -1).sum(0))


def in_any_order(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    rows = torch.tensor([0, *reversed(range(len(x)))])
    out = net.own(net.a(x)[rows])[0].sum(1)
    return net.b(torch.zeros(len(x), 2, dtype=x.dtype).index_add(0, rows, out))


def computed_weights(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    weights, none = [net.scale * net.own.weight_ih_l0, net.own.weight_hh_l0.flip(0)], x.new_zeros(1, len(x), 2)
    return net.b(torch.lstm(net.a(x), (none, none), weights, False, 1, 0.0, True, False, True)[0].sum(1))


def tied(lstm: LSTM) -> LSTM:  # noqa: D103
    lstm.bias_hh_l0 = lstm.bias_ih_l0
    lstm.weight_hh_l0 = lstm.weight_ih_l0
    return lstm


def frozen(lstm: LSTM) -> LSTM:  # noqa: D103
    for param in (lstm.weight_ih_l0, lstm.bias_hh_l0):
        param.requires_grad_(False)
    return lstm


def lstm(inputs: int = 2, hidden: int = 2, change: Callable[[LSTM], Module] = lambda own: own, **options: object) -> Callable[[], Module]:
    return lambda: change(LSTM(inputs, hidden, **{"batch_first": True, **options}))


LAYER = "MkldnnRnnLayer"
# how the layer is used, the layer, how many nodes it makes
NETS: dict[str, tuple[Forward, Callable[[], Module], int]] = {
    "outputs": (outputs, lstm(), 1),
    "more inputs than states": (outputs, lambda: LSTM(2, 1, batch_first=True), 1),
    "sequence first": (sequence_first, lstm(batch_first=False), 1),
    "no bias": (outputs, lstm(bias=False), 1),
    "two layers": (outputs, lstm(num_layers=2), 2),
    "dropout": (outputs, lstm(num_layers=2, dropout=0.4), 2),
    "both directions": (outputs, lstm(hidden=1, bidirectional=True), 2),
    "two layers, both directions, last states": (last_states, lstm(num_layers=2, bidirectional=True), 4),
    "last states": (last_states, lstm(), 1),
    "last states, sequence first": (last_states_of_sequence, lstm(batch_first=False), 1),
    "last states, sequence first, in another order": (last_states_of_sorted, lstm(batch_first=False), 1),
    "last cell": (last_cell, lstm(), 1),
    "outputs and last states": (everything, lstm(), 1),
    "given states": (given_states, lstm(), 1),
    "learned states": (learned_states, lstm(), 1),
    "called twice": (continued, lstm(), 2),
    "two rows a sample": (folded, lstm(), 1),
    "two rows a sample, in turn": (in_turn, lstm(), 1),
    "rows in any order": (in_any_order, lstm(), 1),
    "evaluation": (outputs, lstm(change=Module.eval), 1),
    "tied weights": (outputs, lstm(change=tied), 1),
    "some weights frozen": (outputs, lstm(change=frozen), 1),
    "computed weights": (computed_weights, lstm(bias=False), 1),
}
MORE: dict[Forward, dict[str, tuple[int, ...]]] = {learned_states: {"hidden": (1, 1, 2), "cell": (1, 1, 2)}, computed_weights: {"scale": (1,)}}
NAMES = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "KFLR", "KFAC"]
NAMES += [f"{batch}DiagGGN{kind}" for batch in ("", "Batch") for kind in ("Exact", "MC")] + ["SqrtGGNExact", "SqrtGGNMC"]


def build(name: str, N: int, dtype: torch.dtype = torch.float32, T: int = 3) -> Problem:
    """Build the problem, with the same numbers in either precision."""
    forward, own, _ = NETS[name]
    with torch.random.fork_rng(), default_dtype(torch.float32):
        torch.manual_seed(1)
        more = {part: parameter(*shape)() for part, shape in MORE.get(forward, {}).items()}
        problem = classify(Net(forward, a=Linear(3, 2), own=own(), b=nn.LazyLinear(4), **more), torch.randn(N, T, 3))
        problem.outputs()
    problem.model.to(dtype)
    problem.x = problem.x.to(dtype)
    return problem


def planned(problem: Problem) -> Plan:
    """Plan a pass for second-order quantities."""
    for module in (problem.model, *problem.losses):
        extend(module)
    return Plan(Walk([problem.loss(problem.outputs()).grad_fn], True))


def single_precision(actual: Tensor, expected: Tensor, slack: float = 1e-14) -> None:
    """Compare relative to the largest entry."""
    assert actual.dtype == torch.float32
    error = (actual - expected).abs().amax()
    assert error <= 2e-5 * expected.abs().amax() + slack, f"error {error:.2e}, largest expected entry {expected.abs().amax():.2e}"


def agree(monkeypatch: pytest.MonkeyPatch, quantity: Quantity, problem: Problem, truth: Problem) -> None:
    """Compare with the oracle in double precision."""
    oracle = Oracle(truth)
    # a variance is a difference of larger numbers, of which nothing is left for a single sample
    slack = 1e-6 * max(g.square().max().item() for g in oracle.grad.values()) if quantity.field == "variance" else 1e-14
    monkeypatch.setattr(test_extensions, "close", partial(single_precision, slack=slack))
    run(problem, quantity.make())
    quantity.check(oracle, collect(problem, quantity.field))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("N", [1, 3])
def test_layers_are_read(name: str, N: int) -> None:
    """Each layer in each direction is one node, and products stand for it."""
    plan = planned(build(name, N))
    assert [operation(node) for node in plan.composites] == [LAYER] * NETS[name][2]
    assert LAYER not in map(operation, plan.gaps)


@pytest.mark.parametrize("extension", NAMES)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("N", [1, 3])
def test_against_oracle(extension: str, name: str, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, quantity = build(name, N), QUANTITIES[extension]
    if name == "computed weights" and extension in ("KFLR", "KFAC"):
        with pytest.raises(UnsupportedError, match="own.weight_ih_l0.*Kronecker"):
            run(problem, quantity.make())
        return
    agree(monkeypatch, quantity, problem, build(name, N, torch.float64))


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("name", ["outputs", "last states, sequence first", "two layers, both directions, last states"])
def test_sequences_of_one_step_and_of_many(name: str, N: int, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for extension in ("BatchL2Grad", "SumGradSquared", "DiagGGNExact", "KFLR"):
        agree(monkeypatch, QUANTITIES[extension], build(name, N, T=T), build(name, N, torch.float64, T))


@pytest.mark.parametrize("name", ["outputs", "outputs and last states", "two rows a sample"])
def test_flows_side_by_side(name: str) -> None:
    """Quantities that are computed together are those that are computed one after the other."""
    names = ["BatchGrad", "Variance", "DiagGGNExact", "SqrtGGNMC", "KFLR"]
    together = build(name, 3)
    run(together, *(QUANTITIES[extension].make() for extension in names))
    for extension in names:
        alone, quantity = build(name, 3), QUANTITIES[extension]
        run(alone, quantity.make())
        for (_, param), other in zip(together.model.named_parameters(), alone.model.parameters(), strict=True):
            values = (getattr(p, quantity.field) for p in (param, other))
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-7)


def test_two_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one loss arrive at the outputs only, those of the other one at the last states only."""

    def two(dtype: torch.dtype) -> Problem:
        problem = build("outputs", 3, dtype)
        problem.terms = [Term(problem.terms[0].module, problem.terms[0].target, head) for head in (0, 1)]

        def heads(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
            out, (hidden, cell) = net.own(net.a(x))
            return net.b(out.mean(1)), net.b(hidden[0] - cell[0])

        problem.output = heads
        return problem

    for extension in ("BatchGrad", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR"):
        agree(monkeypatch, QUANTITIES[extension], two(torch.float32), two(torch.float64))


@pytest.mark.parametrize("index", [[2, 0], [1, 1, 2]], ids=str)
def test_subsampling(index: list[int]) -> None:
    problem, oracle = build("both directions", 3), Oracle(build("both directions", 3, torch.float64))
    run(problem, extensions.BatchGrad(subsampling=index), extensions.BatchDiagGGNExact(subsampling=index))
    expected = oracle.diag_ggn_batch(oracle.hessian_exact)
    for name, param in problem.model.named_parameters():
        single_precision(param.grad_batch, oracle.grad_batch[name][index])
        single_precision(param.diag_ggn_exact_batch, expected[name][index])


@pytest.mark.parametrize("extension", ["DiagHessian", "KFRA", "HMP", "GGNMP"])
def test_curved_layers_are_refused(extension: str) -> None:
    problem = build("outputs", 3)
    with pytest.raises(NotImplementedError):
        run(problem, QUANTITIES[extension].make())
    assert not collect(problem, QUANTITIES[extension].field)


@pytest.mark.parametrize("extension", ["BatchGrad", "DiagGGNExact", "KFLR"])
def test_samples_along_time_are_refused(extension: str) -> None:
    """A layer that takes the first axis for time lets the samples of a mini-batch influence one another."""
    problem = build("outputs", 3)
    problem.model.own.batch_first = False
    with pytest.raises(MixedSamplesError, match=LAYER):
        run(problem, QUANTITIES[extension].make())


def frozen_in_between(dtype: torch.dtype) -> Problem:
    problem = build("outputs", 3, dtype)
    problem.model.own.requires_grad_(False)
    return problem


@pytest.mark.parametrize("extension", ["BatchGrad", "KFLR"])
def test_frozen_layer(extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns pass a layer that has no trainable weights."""
    agree(monkeypatch, QUANTITIES[extension], frozen_in_between(torch.float32), frozen_in_between(torch.float64))


def test_states_that_are_summed_are_refused() -> None:
    """The state of one sample is added to that of the others."""
    problem = build("last states", 3)
    problem.output = lambda net, x: net.b(net.own(net.a(x))[1][0][0].sum(0) + x[:, 0, :2])
    with pytest.raises(MixedSamplesError):
        run(problem, extensions.BatchGrad())


def test_lower_precision_is_crossed() -> None:
    """Gates recomputed in half precision would not be those of the layer: its own node carries the columns."""
    problem = build("outputs", 3)
    problem.model.to(torch.bfloat16)
    problem.x = problem.x.bfloat16()
    assert not planned(problem).composites


def test_no_samples() -> None:
    problem = build("outputs", 1)
    problem.x, problem.terms[0].target = problem.x[:0], problem.terms[0].target[:0]
    problem.terms[0].module.reduction = "sum"
    run(problem, extensions.BatchGrad(), extensions.DiagGGNExact())
    for param in problem.model.parameters():
        assert param.grad_batch.shape == (0, *param.shape)
        assert not param.diag_ggn_exact.any()


@pytest.mark.parametrize("extension", [extensions.BatchGrad, extensions.DiagGGNExact, extensions.KFLR])
def test_create_graph(extension: type) -> None:
    """Quantities behind the fused operation are what they are without a graph, but cannot be differentiated."""
    found = []
    for create_graph in (False, True):
        problem = build("two layers", 2)
        for module in (problem.model, *problem.losses):
            extend(module)
        with backpack(extension()):
            problem.loss(problem.outputs(0)).backward(create_graph=create_graph)
        found.append([torch.cat([t.flatten() for t in tree_leaves(getattr(p, extension().savefield))]) for p in problem.model.parameters()])
    for (name, _), value, expected in zip(problem.model.named_parameters(), *reversed(found), strict=True):
        torch.testing.assert_close(value.detach(), expected)
        if not name.startswith("b."):
            with pytest.raises(DifferentiationError, match="MkldnnRnnLayerBackward0 is one fused operation"):
                value.sum().backward(retain_graph=True)
    clear(problem.model)
    problem.model.zero_grad()  # a graph that a parameter holds, which is in it, is never given back
