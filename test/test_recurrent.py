"""RNNs, GRUs and LSTMs whose steps are several graph nodes and are read together, against the oracle; and what is followed node by node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases_nets import Net, parameter
from oracle import Oracle, Problem, Term
from table import classify, default_dtype
from test_extensions import QUANTITIES, close, collect, run
from test_lstm import NAMES
from torch import Tensor, nn
from torch.nn import GRU, LSTM, RNN, Linear, Module
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions
from backpack.core import node_calls
from backpack.core.graph import operation
from backpack.core.plan import Plan
from backpack.core.walk import Walk
from backpack.utils.errors import UnsupportedError

Forward = Callable[[Net, Tensor], Tensor]


def passed(net: Net, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and last states, without cells."""
    out, hidden = net.own(*given)
    return out, hidden[0] if isinstance(hidden, tuple) else hidden


def outputs(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x))[0].mean(1))


def of_data(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(x)[0].sum(1))


def one_output(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x))[0][:, 1])


def sequence_first(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x).transpose(0, 1))[0][-1])


def last_state(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(passed(net, net.a(x))[1][-1])


def last_states(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(passed(net, net.a(x))[1].transpose(0, 1).flatten(1))


def last_cell(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, (_, cell) = net.own(net.a(x))
    return net.b(out[:, 0] + cell[0])


def given_cell(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.b(net.own(h, (h.mean(1)[None], h.sin().sum(1)[None]))[0].sum(1))


def state_and_cell(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    first = net.a(x).mean(1)[None]
    return net.b(net.own(net.a(x), (first, first))[1][0][0])


def both(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, hidden = passed(net, net.a(x))
    return net.b(out[:, 0] + hidden[0].sin())


def all_of_it(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, hidden = passed(net, net.a(x))
    return net.b(out.mean(1) * hidden[-2:].transpose(0, 1).flatten(1).sin() + hidden[0].sum(1, keepdim=True))


def queried(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, hidden = passed(net, net.a(x))
    return net.b(((out @ hidden[-1].unsqueeze(2)).softmax(1) * out).sum(1))


def given_state(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.b(net.own(h, h.mean(1)[None])[0].sum(1))


def learned_state(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x), net.hidden.expand(1, len(x), 2).contiguous())[1][0])


def continued(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    out, states = net.own(h)
    return net.b(net.own(out, states)[0].sum(1))


def folded(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out = net.own(net.a(x).repeat_interleave(2, 0))[0]
    return net.b(out.reshape(len(x), 2, -1, 2).sum((1, 2)))


def in_turn(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(net.a(x).repeat(2, 1, 1))[1][0].reshape(2, len(x), -1).sum(0))


def by_hand(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h, states = x.new_zeros(len(x), 2), []
    for u in torch.unbind(x.transpose(0, 1) @ net.own.weight_ih_l0.t() + net.own.bias_ih_l0):
        h = torch.tanh(torch.addmm(net.own.bias_hh_l0, h, net.own.weight_hh_l0.t()) + u)
        states.append(h)
    return net.b(torch.stack(states).sum(0))


def cells(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h, states = x.new_zeros(len(x), 2), []
    for u in x.unbind(1):
        h = net.cell(u, h)
        states.append(h)
    return net.b(torch.stack(states).sum(0))


def in_a_checkpoint(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(checkpoint(lambda h: net.own(h)[0].mean(1), net.a(x), use_reentrant=False))


def packing(x: Tensor, lengths: tuple[int, ...] = (2, 3, 1)) -> PackedSequence:
    """Pack sequences, of which the longest is as long as can be, in another order than the samples."""
    chosen = torch.tensor(lengths[: len(x)])
    return pack_padded_sequence(x, (chosen + x.shape[1] - chosen.max()).clamp(min=1), batch_first=True, enforce_sorted=False)


def packed(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(passed(net, packing(net.a(x)))[1][-1])


def packed_outputs(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, lengths = pad_packed_sequence(passed(net, packing(net.a(x)))[0], batch_first=True)
    return net.b(out.sum(1) / lengths[:, None])


def packed_data(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, hidden = passed(net, packing(x, (3, 3, 2)))
    return net.b(out.data[: len(x)][out.unsorted_indices] * hidden.transpose(0, 1).flatten(1))


def packed_all_of_it(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, hidden = passed(net, packing(net.a(x), (3, 1, 1)))
    out = pad_packed_sequence(out, batch_first=True)[0]
    return net.b(out.sum(1) * hidden[-2:].transpose(0, 1).flatten(1).sin() + hidden[0].sum(1, keepdim=True))


def packed_alike(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, hidden = passed(net, packing(net.a(x), (3, 3, 3)))
    return net.b(pad_packed_sequence(out, batch_first=True)[0].sum(1) + hidden[-1].sin())


def packed_with_states(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    first = h.mean(1).repeat(1 + net.own.bidirectional, 1, 1)
    return net.b(passed(net, packing(h), (first, first.sin()) if isinstance(net.own, LSTM) else first)[1].sum(0))


def packed_with_cell(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.b(net.own(packing(net.a(x)))[1][1][0])


def packed_twice(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    out, states = net.own(packing(net.a(x)))
    return net.b(passed(net, out, states)[1][0] if isinstance(states, Tensor) else passed(net, out)[1][0])


def packed_rows(net: Net, x: Tensor) -> Tensor:
    """Every sample has two sequences."""
    return net.b(passed(net, packing(net.a(x).repeat_interleave(2, 0), (2, 3, 1, 1, 3, 2)))[1][0].reshape(len(x), 2, -1).sum(1))


def some_states(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    """Two steps are stacked: the first one belongs to nothing."""
    h, states = x.new_zeros(len(x), 2), []
    for u in torch.unbind(x.transpose(0, 1) @ net.own.weight_ih_l0.t()):
        h = torch.tanh(torch.addmm(net.own.bias_hh_l0, h, net.own.weight_hh_l0.t()) + u)
        states.append(h)
    return net.b(torch.stack(states[-2:]).sum(0))


def another_weight(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    """The weight of the last step is another one."""
    h, states = x.new_zeros(len(x), 2), []
    for t, u in enumerate(torch.unbind(x.transpose(0, 1) @ net.own.weight_ih_l0.t())):
        h = torch.tanh(torch.addmm(net.own.bias_hh_l0, h, (net.other if t == len(x[0]) - 1 else net.own.weight_hh_l0).t()) + u)
        states.append(h)
    return net.b(torch.stack(states).sum(0))


def inputs_in_another_order(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h, states = x.new_zeros(len(x), 2), []
    terms = torch.unbind(x.transpose(0, 1) @ net.own.weight_ih_l0.t())
    for u in (terms[1], terms[0], *terms[2:]):
        h = torch.tanh(torch.addmm(net.own.bias_hh_l0, h, net.own.weight_hh_l0.t()) + u)
        states.append(h)
    return net.b((torch.stack(states) * torch.arange(1.0, 1 + len(states), dtype=x.dtype)[:, None, None]).sum(0))


def states_in_another_order(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h, states = x.new_zeros(len(x), 2), []
    for u in torch.unbind(x.transpose(0, 1) @ net.own.weight_ih_l0.t()):
        h = torch.tanh(torch.addmm(net.own.bias_hh_l0, h, net.own.weight_hh_l0.t()) + u)
        states.insert(0, h)
    return net.b((torch.stack(states) * torch.arange(1.0, 1 + len(states), dtype=x.dtype)[:, None, None]).sum(0))


def the_same_term_for_all(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h, states = net.a(x)[:, 0], []
    for u in torch.unbind(net.terms[: x.shape[1]]):
        h = torch.tanh(torch.addmm(net.own.bias_hh_l0, h, net.own.weight_hh_l0.t()) + u)
        states.append(h)
    return net.b(torch.stack(states).sum(0))


def used_elsewhere(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    """What lies between the steps is used elsewhere, too."""
    terms = x.transpose(0, 1) @ net.own.weight_ih_l0.t()
    h, states, more = x.new_zeros(len(x), 2), [], 0.0
    for u in torch.unbind(terms):
        product = torch.addmm(net.own.bias_hh_l0, h, net.own.weight_hh_l0.t())
        h, more = torch.tanh(product + u), more + product
        states.append(h)
    return net.b(torch.stack(states).sum(0) + more)


def twice_the_sum(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h, states = x.new_zeros(len(x), 2), []
    for u in torch.unbind(x.transpose(0, 1) @ net.own.weight_ih_l0.t()):
        h = torch.tanh(torch.add(torch.addmm(net.own.bias_hh_l0, h, net.own.weight_hh_l0.t(), beta=0.5, alpha=2), u, alpha=3))
        states.append(h)
    return net.b(torch.stack(states).sum(0))


def tied(own: Module) -> Module:  # noqa: D103
    own.bias_hh_l0 = own.bias_ih_l0
    return own


def frozen(*names: str) -> Callable[[Module], Module]:  # noqa: D103
    def freeze(own: Module) -> Module:
        for name in names:
            getattr(own, name).requires_grad_(False)
        return own

    return freeze


def layer(cls: type[Module], inputs: int = 2, hidden: int = 2, change: Callable = lambda own: own, **options: object) -> Callable[[], Module]:
    return lambda: change(cls(inputs, hidden, **{"batch_first": True, **options}))


rnn, relu, gru, lstm = partial(layer, RNN), partial(layer, RNN, nonlinearity="relu"), partial(layer, GRU), partial(layer, LSTM)
# how the layer is used, the layer, how many layers are read together
NETS: dict[str, tuple[Forward, Callable[[], Module], int]] = {
    "RNN": (outputs, rnn(), 1),
    "ReLU": (outputs, relu(), 1),
    "GRU": (outputs, gru(), 1),
    "RNN, more inputs than states": (outputs, rnn(2, 1), 1),
    "GRU, more states than inputs": (outputs, gru(2, 3), 1),
    "RNN of data": (of_data, rnn(3), 1),
    "GRU of data": (of_data, gru(3), 1),
    "RNN, one output": (one_output, rnn(), 1),
    "GRU, sequence first": (sequence_first, gru(batch_first=False), 1),
    "RNN, last state": (last_state, rnn(), 1),
    "GRU, last state": (last_state, gru(), 1),
    "RNN without biases": (outputs, rnn(bias=False), 1),
    "GRU without biases": (last_state, gru(bias=False), 1),
    "RNN of two layers": (outputs, rnn(num_layers=2), 2),
    "GRU of two layers": (outputs, gru(num_layers=2), 2),
    "GRU of two layers, last states": (last_states, gru(num_layers=2), 2),
    "RNN, both directions": (outputs, rnn(bidirectional=True), 2),
    "GRU, both directions": (outputs, gru(bidirectional=True), 2),
    "GRU of two layers, both directions": (outputs, gru(num_layers=2, bidirectional=True), 4),
    "GRU, both directions, last states": (last_states, gru(bidirectional=True), 2),
    "RNN of two layers, last state": (last_state, rnn(num_layers=2), 2),
    "GRU of two layers, both directions, last state": (last_state, gru(num_layers=2, bidirectional=True), 4),
    "RNN, outputs and last state": (both, rnn(), 1),
    "GRU, outputs and last state": (both, gru(), 1),
    "GRU, both directions, outputs and last states": (all_of_it, gru(bidirectional=True), 2),
    "RNN of two layers, both directions, outputs and last states": (all_of_it, rnn(num_layers=2, bidirectional=True), 4),
    "GRU, last state as a query": (queried, gru(), 1),
    "LSTM": (outputs, lstm(), 1),
    "LSTM, more inputs than states": (outputs, lstm(2, 1), 1),
    "LSTM of data": (of_data, lstm(3), 1),
    "LSTM, one output": (one_output, lstm(), 1),
    "LSTM, sequence first": (sequence_first, lstm(batch_first=False), 1),
    "LSTM, last state": (last_state, lstm(), 1),
    "LSTM without biases": (outputs, lstm(bias=False), 1),
    "LSTM of two layers, last state": (last_state, lstm(num_layers=2), 2),
    "LSTM of two layers, last states": (last_states, lstm(num_layers=2), 2),
    "LSTM of two layers, both directions, outputs and last states": (all_of_it, lstm(num_layers=2, bidirectional=True), 4),
    "LSTM, last state as a query": (queried, lstm(), 1),
    "LSTM, last cell": (last_cell, lstm(), 0),
    "LSTM, given cell": (given_cell, lstm(), 1),
    "LSTM, the same for state and cell": (state_and_cell, lstm(), 1),
    "LSTM called twice": (continued, lstm(), 1),
    "LSTM, two rows a sample": (folded, lstm(), 1),
    "LSTM, tied biases": (outputs, lstm(change=tied), 1),
    "LSTM, terms of inputs frozen": (of_data, lstm(3, change=frozen("weight_ih_l0", "bias_ih_l0")), 1),
    "LSTM, weight frozen": (outputs, lstm(change=frozen("weight_hh_l0")), 0),
    "LSTM, projected": (outputs, lstm(2, 3, proj_size=2), 0),
    "LSTM in a checkpoint": (in_a_checkpoint, lstm(), 0),
    "RNN, given state": (given_state, rnn(), 1),
    "GRU, given state": (given_state, gru(), 1),
    "RNN, learned state": (learned_state, rnn(), 1),
    "GRU, learned state": (learned_state, gru(), 1),
    "GRU called twice": (continued, gru(), 2),
    "GRU, two rows a sample": (folded, gru(), 1),
    "RNN, two rows a sample, in turn": (in_turn, rnn(), 1),
    "GRU, evaluation": (outputs, gru(change=Module.eval), 1),
    "GRU, tied biases": (outputs, gru(change=tied), 1),
    "GRU, terms of inputs frozen": (of_data, gru(3, change=frozen("weight_ih_l0", "bias_ih_l0")), 1),
    "RNN, terms of inputs frozen": (of_data, rnn(3, change=frozen("weight_ih_l0", "bias_ih_l0")), 1),
    "GRU, bias frozen": (outputs, gru(change=frozen("bias_hh_l0")), 1),
    "GRU, weight frozen": (outputs, gru(change=frozen("weight_hh_l0")), 0),
    "RNN, weight frozen": (last_state, rnn(change=frozen("weight_hh_l0")), 0),
    "GRU, products frozen": (outputs, gru(change=frozen("weight_hh_l0", "bias_hh_l0")), 0),
    "by hand": (by_hand, rnn(3), 0),
    "cells": (cells, rnn(3), 0),
    "in a checkpoint": (in_a_checkpoint, gru(), 0),
    "RNN, packed": (packed, rnn(), 1),
    "ReLU, packed": (packed, relu(), 1),
    "GRU, packed": (packed, gru(), 1),
    "LSTM, packed": (packed, lstm(), 1),
    "GRU of two layers, both directions, packed": (packed, gru(num_layers=2, bidirectional=True), 4),
    "RNN, packed, outputs": (packed_outputs, rnn(), 1),
    "GRU without biases, packed, outputs": (packed_outputs, gru(bias=False), 1),
    "LSTM of two layers, packed, outputs": (packed_outputs, lstm(num_layers=2), 2),
    "RNN, both directions, packed, outputs": (packed_outputs, rnn(bidirectional=True), 2),
    "RNN, packed data": (packed_data, rnn(3), 1),
    "GRU, both directions, packed data": (packed_data, gru(3, bidirectional=True), 2),
    "LSTM, packed data, terms of inputs frozen": (packed_data, lstm(3, change=frozen("weight_ih_l0", "bias_ih_l0")), 1),
    "RNN, both directions, packed, outputs and last states": (packed_all_of_it, rnn(bidirectional=True), 2),
    "GRU of two layers, both directions, packed, outputs and last states": (packed_all_of_it, gru(num_layers=2, bidirectional=True), 4),
    "LSTM, both directions, packed, outputs and last states": (packed_all_of_it, lstm(bidirectional=True), 2),
    "GRU, packed, as long as each other": (packed_alike, gru(), 1),
    "LSTM, packed, as long as each other": (packed_alike, lstm(), 1),
    "RNN, packed, given state": (packed_with_states, rnn(), 1),
    "LSTM, packed, given state and cell": (packed_with_states, lstm(), 1),
    "GRU, both directions, packed, given state": (packed_with_states, gru(bidirectional=True), 1),
    "GRU called twice, packed": (packed_twice, gru(), 2),
    "LSTM called twice, packed": (packed_twice, lstm(), 2),
    "GRU, two packed rows a sample": (packed_rows, gru(), 1),
    "RNN, packed, tied biases": (packed, rnn(change=tied), 1),
    "LSTM, packed, last cell": (packed_with_cell, lstm(), 0),
    "GRU, packed, weight frozen": (packed, gru(change=frozen("weight_hh_l0")), 0),
    "some states": (some_states, rnn(3), 0),
    "another weight": (another_weight, rnn(3), 0),
    "inputs in another order": (inputs_in_another_order, rnn(3), 0),
    "states in another order": (states_in_another_order, rnn(3), 0),
    "the same term for all": (the_same_term_for_all, rnn(3), 0),
    "used elsewhere": (used_elsewhere, rnn(3), 0),
    "other factors": (twice_the_sum, rnn(3), 0),
}
BUT_FOR_A_BEGINNING = ["GRU, both directions, packed, given state"]  # where sequences begin at different steps, from states that need a gradient
WITHOUT_FACTORS = {"other factors": "own.weight_hh_l0"}
MORE: dict[Forward, dict[str, Callable[[], Module]]] = {
    learned_state: {"hidden": parameter(1, 1, 2)},
    the_same_term_for_all: {"terms": parameter(7, 2)},
    another_weight: {"other": parameter(2, 2)},
    cells: {"cell": lambda: nn.GRUCell(3, 2)},
}


def build(name: str, N: int, T: int = 3) -> Problem:
    forward, own, _ = NETS[name]
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(1)
        more = {part: make() for part, make in MORE.get(forward, {}).items()}
        problem = classify(Net(forward, a=Linear(3, 2), own=own(), b=nn.LazyLinear(4), **more), torch.randn(N, T, 3))
        problem.outputs()
    for part, param in problem.model.named_parameters():
        param.requires_grad_(param.requires_grad and part in used(problem))
    return problem


def used(problem: Problem) -> set[str]:
    named = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(problem.loss(problem.outputs()), list(named.values()), allow_unused=True)
    return {name for name, grad in zip(named, grads, strict=True) if grad is not None}


def planned(problem: Problem, connected: bool = False) -> Plan:
    """Plan a pass for second-order quantities."""
    for module in (problem.model, *problem.losses):
        extend(module)
    walk = Walk([problem.loss(problem.outputs()).grad_fn], True)
    walk.connected = connected
    return Plan(walk)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("N", [1, 3])
def test_layers_are_read(name: str, N: int) -> None:
    plan, layers = planned(build(name, N)), NETS[name][2] + (N == 1 and name in BUT_FOR_A_BEGINNING)
    assert len(plan.composites) == layers
    steps = {"Tanh", "Relu", "Sub", "UnsafeSplit", "Sigmoid"}
    assert layers == 0 or name in ("LSTM called twice", *BUT_FOR_A_BEGINNING) or steps.isdisjoint(map(operation, plan.gaps))
    assert not planned(build(name, N), connected=True).composites


@pytest.mark.parametrize("extension", NAMES)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("N", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_against_oracle(extension: str, name: str, N: int) -> None:
    problem, quantity = build(name, N), QUANTITIES[extension]
    if name in WITHOUT_FACTORS and quantity.field in ("kflr", "kfac"):
        with pytest.raises(UnsupportedError, match=f"{WITHOUT_FACTORS[name]}.*without a rule"):
            run(problem, quantity.make())
        return
    run(problem, quantity.make())
    quantity.check(Oracle(build(name, N)), collect(problem, quantity.field))


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize(
    "name",
    [
        *("RNN", "GRU", "GRU, last state", "GRU, both directions", "RNN of two layers", "RNN, outputs and last state", "LSTM"),
        *("GRU, packed", "RNN, both directions, packed, outputs", "LSTM, both directions, packed, outputs and last states"),
    ],
)
def test_sequences_of_one_step_and_of_many(name: str, T: int) -> None:
    for extension in ("BatchL2Grad", "SumGradSquared", "DiagGGNExact", "KFLR"):
        problem, quantity = build(name, 3, T), QUANTITIES[extension]
        run(problem, quantity.make())
        quantity.check(Oracle(build(name, 3, T)), collect(problem, quantity.field))


@pytest.mark.parametrize(
    "name",
    [
        *("RNN", "GRU", "GRU, given state", "GRU, two rows a sample", "LSTM", "RNN, both directions"),
        *("GRU, both directions, outputs and last states", "RNN, packed", "LSTM of two layers, packed, outputs"),
        "GRU of two layers, both directions, packed, outputs and last states",
    ],
)
def test_layers_and_steps_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All quantities in one pass, at once and in blocks, also those that draw, are those that steps give."""
    names = ["BatchGrad", "Variance", "DiagGGNExact", "SqrtGGNMC", "KFAC", "KFLR", "BatchDiagGGNMC", "DiagHessian"]
    found = []
    for memory, read in ((None, True), (500, True), (None, False)):
        if not read:
            for state in ("Tanh", "Relu", "Add", "Mul"):
                monkeypatch.delitem(node_calls._READERS, state)
        problem = build(name, 3)
        run(problem, *(QUANTITIES[extension].make() for extension in names if "Hessian" not in extension), memory=memory)
        found.append([collect(problem, QUANTITIES[extension].field) for extension in names])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("name", ["RNN", "GRU"])
def test_curvature_and_graphs_need_the_steps(name: str) -> None:
    oracle = Oracle(build(name, 3))
    problem = build(name, 3)
    run(problem, extensions.BatchDiagHessian())
    QUANTITIES["BatchDiagHessian"].check(oracle, collect(problem, "diag_h_batch"))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(extensions.BatchDiagGGNExact()):
        problem.loss(problem.outputs()).backward(create_graph=True)
    weight = problem.model.own.weight_hh_l0
    close(weight.diag_ggn_exact_batch.detach(), oracle.diag_ggn_batch(oracle.hessian_exact)["own.weight_hh_l0"])
    (grad,) = torch.autograd.grad(weight.diag_ggn_exact_batch.sum(), weight)
    assert grad.ne(0).any()


@pytest.mark.parametrize("index", [[2, 0], [1, 1, 2]], ids=str)
def test_subsampling(index: list[int]) -> None:
    problem, oracle = build("GRU", 3), Oracle(build("GRU", 3))
    run(problem, extensions.BatchGrad(subsampling=index), extensions.BatchDiagGGNExact(subsampling=index))
    expected = oracle.diag_ggn_batch(oracle.hessian_exact)
    for name, param in problem.model.named_parameters():
        close(param.grad_batch, oracle.grad_batch[name][index])
        close(param.diag_ggn_exact_batch, expected[name][index])


def test_two_losses() -> None:
    def two() -> Problem:
        problem = build("GRU", 3)
        problem.terms = [Term(problem.terms[0].module, problem.terms[0].target, head) for head in (0, 1)]
        problem.output = lambda net, x: (net.b(net.own(net.a(x))[0].mean(1)), net.b(net.own(net.a(x))[1][0]))
        return problem

    for extension in ("BatchGrad", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR"):
        problem = two()
        run(problem, QUANTITIES[extension].make())
        QUANTITIES[extension].check(Oracle(two()), collect(problem, QUANTITIES[extension].field))


@pytest.mark.parametrize("extension", ["BatchGrad", "DiagGGNExact", "KFLR"])
@pytest.mark.parametrize("name", ["RNN", "GRU"])
def test_samples_along_time_are_refused(extension: str, name: str) -> None:
    problem = build(name, 3)
    problem.model.own.batch_first = False
    with pytest.raises(UnsupportedError):
        run(problem, QUANTITIES[extension].make())
    assert not collect(problem, QUANTITIES[extension].field)


def test_no_samples() -> None:
    problem = build("GRU", 1)
    problem.x, problem.terms[0].target = problem.x[:0], problem.terms[0].target[:0]
    problem.terms[0].module.reduction = "sum"
    run(problem, extensions.BatchGrad(), extensions.DiagGGNExact())
    for param in problem.model.parameters():
        assert param.grad_batch.shape == (0, *param.shape)
        assert not param.diag_ggn_exact.any()


def with_hooks(own: RNN, x: Tensor) -> Tensor:
    """Write the steps out; hooks act on the gradient from step to step."""
    h, states = x.new_zeros(len(x), 2), []
    for u in torch.unbind(x.transpose(0, 1) @ own.weight_ih_l0.t() + own.bias_ih_l0):
        h = torch.tanh(torch.addmm(own.bias_hh_l0, h, own.weight_hh_l0.t()) + u)
        h.register_hook(lambda grad: grad * 0.5)
        states.append(h)
    return torch.stack(states)


class Clipped(RNN):
    """Has a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return with_hooks(self, x)


def replaced(own: RNN) -> RNN:
    own.forward = partial(with_hooks, own)
    return own


@pytest.mark.parametrize("kind", ["in the model", "in a class", "in an object"])
def test_hooks_of_steps_that_are_written_out(kind: str) -> None:
    """First-order quantities are made of the gradients as the hooks leave them."""
    make = {"in the model": RNN, "in a class": Clipped, "in an object": lambda *sizes: replaced(RNN(*sizes))}[kind]

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b((with_hooks(net.own, x) if kind == "in the model" else net.own(x)).sum(0))

    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(1)
        problem = classify(Net(forward, own=make(3, 2), b=Linear(2, 4)), torch.randn(4, 3, 3))
    run(problem, extensions.BatchGrad())
    for param in problem.model.parameters():
        close(param.grad_batch.sum(0), param.grad)


def test_second_pass_over_the_same_graph() -> None:
    problem = build("GRU", 3)
    for module in (problem.model, *problem.losses):
        extend(module)
    loss, found = problem.loss(problem.outputs()), []
    for retain in (True, False):
        with backpack(extensions.BatchDiagGGNExact()):
            loss.backward(retain_graph=retain)
        found.append(problem.model.own.weight_hh_l0.diag_ggn_exact_batch)
    assert torch.equal(*found)
