"""Columns that are carried in blocks: the same numbers, within the memory that they may take; and what cannot be carried so."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from weakref import finalize

import pytest
import torch
from cases import CASES
from oracle import Problem
from table import every_second
from test_extensions import MC, QUANTITIES, Expect, close, collect, flat, oracle_of, run
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, LayerNorm, LeakyReLU, Linear, Module, ReLU, Sequential, Sigmoid, Tanh
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions
from backpack.core.carry import Carry
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.flow import Flow
from backpack.core.passing import Pass
from backpack.core.plan import Plan
from backpack.extensions import blocks
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.collector import Collector
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.rules import ColumnRule, Rule, stack
from backpack.extensions.secondorder.diag_ggn import DiagGGNExact
from backpack.utils.columns import ScatteredColumns
from backpack.utils.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from backpack.utils.memory import bytes_of
from backpack.utils.paired_columns import PartOfPairs

ROWS = """net: Conv1d|net: Conv2d, reflect|net: ConvTranspose2d|net: groups, Conv1d|net: Conv1d twice|logreg|frozen middle layer|one output|
two extra axes|dropout, training|linear twice, in sequence|PReLU, 1 parameter|RReLU|Tanh|Softmax, last axis|SiLU, in place|
MSE, 4-d, sum|CE, ignored, 3-d, sum|BCE, both weights, mean|weighted sum of CE, 3-d|functional tanh|residual|
residual in place, extra axis|in-place slices|linear twice, side by side|tied encoder and decoder|bare bias|bare scalar|
position embedding|class token, repeated|layer scale|bare matrix|transpose between squares|dense|gated|fused attention|
samples second, dropout|samples folded|custom function|own layer|layer norm|bilinear|smooth branches|two losses on one output|
two losses on two heads|one loss module on two heads|model called twice|curved: gelu|curved: samples folded|
curved: product with a product|curved: matrix product|curved: LSTM cell|curved: fused causal attention|
curved: layer scale, used twice|curved: exponential of a parameter, upstream, too|curved: weight computed from one used upstream|
curved: convolution twice|curved: linear three times, folded|Embedding, padding, two axes|Embedding twice|tied tables|
functional convolution, samples folded|functional layer norm, samples second|own loss, not convex|CE, negative weights|
negative CE, negative weights|folded F.cross_entropy, mean|two loss functions|weight norm|GroupNorm|LayerNorm twice|
BatchNorm1d, evaluation|MaxPool2d, overlapping|max-unpooling|where, one branch curved|stack of matrices on positions|
matrix that is computed|transformer: encoder layer|recurrent: LSTM|recurrent: LSTM, both directions|recurrent: GRU|
kernel of a convolution and a transposed one|weight of a Linear and a convolution|norm as module and function|GRU called twice"""
NAMES = [name.strip() for name in ROWS.replace("\n", "").split("|")]
CARRIED = [
    *("DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "HBP, square root", "DiagHessian", "BatchDiagHessian"),
    *("DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC"),
]


# --- the same numbers -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", every_second(NAMES))
def test_one_column_at_a_time(case: str, batch: int) -> None:
    """Every extension whose flow has columns, against the oracle."""
    for name in CARRIED:
        quantity, problem = QUANTITIES[name], CASES[case].build(batch)
        expect = quantity.expect(CASES[case].tags)
        try:
            run(problem, quantity.make(), memory=1)
        except quantity.refusal:
            assert expect is not Expect.EXACT
            assert not collect(problem, quantity.field)
            continue
        assert expect is not Expect.REFUSED
        quantity.check(oracle_of(case, batch), collect(problem, quantity.field))


def assert_same(problem: Problem, other: Problem, fields: list[str]) -> None:
    for field in fields:
        values, expected = collect(problem, field), collect(other, field)
        assert values
        assert values.keys() == expected.keys()
        for name, value in values.items():
            for one, two in zip(flat(value), flat(expected[name]), strict=True):
                close(one, two, 1e-10)


@pytest.mark.parametrize("memory", [500, 2500])
@pytest.mark.parametrize("case", NAMES)
def test_blocks_of_all_sizes_together(case: str, memory: int) -> None:
    """All extensions in one pass agree with a pass in one block, also in the order of the columns, and in what is drawn."""
    problem, whole = CASES[case].build(3), CASES[case].build(3)
    chosen = [name for name in CARRIED if not name.startswith("HBP") and QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    for given, bound in ((problem, memory), (whole, 1 << 40)):
        run(given, *(QUANTITIES[name].make() for name in chosen), memory=bound)
    assert_same(problem, whole, [QUANTITIES[name].field for name in chosen])
    for one, two in zip(problem.model.parameters(), whole.model.parameters(), strict=True):
        assert one.grad is two.grad or torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("subsampling", [[0], [2, 0], [-1, 0], [1, 1, 2], []], ids=str)
@pytest.mark.parametrize(
    "case", ["CE, ignored, 3-d, sum", "tied branches", "samples folded", "layer norm", "smooth branches", "two losses on two heads"]
)
def test_chosen_samples(case: str, subsampling: list[int]) -> None:
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    made = [getattr(extensions, name)(subsampling=subsampling) for name in ("DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "BatchDiagHessian")]
    run(problem, *made, memory=1)
    for field, expected in (("diag_ggn_exact", oracle.diag_ggn_batch(oracle.hessian_exact)), ("diag_h", oracle.diag_h_batch)):
        for name, value in expected.items():
            close(collect(problem, field)[name], value[subsampling].sum(0))
            close(collect(problem, f"{field}_batch")[name], value[subsampling]) if subsampling else None


@pytest.mark.parametrize("case", ["CE, mean", "samples second"])
def test_chosen_samples_of_a_draw(case: str) -> None:
    problem, whole = CASES[case].build(3), CASES[case].build(3)
    for given, bound in ((problem, 1), (whole, None)):
        made = [make(mc_samples=5, subsampling=[2, 0]) for make in (extensions.BatchDiagGGNMC, extensions.SqrtGGNMC)]
        run(given, *made, memory=bound)
    assert_same(problem, whole, ["diag_ggn_mc_batch", "sqrt_ggn_mc"])


class Deviation(DiagGGNExact):
    """The root of the diagonal, which does not add up."""

    def finish(self, state: dict, parameter: nn.Parameter) -> Tensor:
        return super().finish(state, parameter).sqrt()


def test_a_quantity_of_ones_own_need_not_add_up() -> None:
    problem, oracle = CASES["net: Conv1d"].build(3), oracle_of("net: Conv1d", 3)
    run(problem, Deviation(), memory=1)
    for name, diagonal in oracle.diag_ggn_batch(oracle.hessian_exact).items():
        close(collect(problem, "diag_ggn_exact")[name], diagonal.sum(0).sqrt())


# --- within the memory ------------------------------------------------------------------------------------------------------------------------


def deep(activation: Callable[[], Module], double: bool = True) -> tuple[Module, Module, Tensor, Tensor]:
    """A net whose columns take ``2 * 8 * 64 * 8`` bytes each, where they are mapped from one activation to the next."""
    torch.manual_seed(1)
    layers = [Linear(5, 64), activation(), Linear(64, 64), activation(), Linear(64, 64), activation(), Linear(64, 16)]
    model = Sequential(*layers).to(torch.float64 if double else torch.float32)
    return extend(model), extend(CrossEntropyLoss()), torch.rand(8, 5, dtype=model[0].weight.dtype), torch.randint(16, (8,))


COLUMN = 2 * 8 * 64 * 8


class Probe:
    """Counts the bytes of all columns that were handed to an edge and are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive, self.most, self.widest, self.passes = 0, 0, 0, 0
        self.known: set[int] = set()
        deposit, started = Carry.deposit, Carry.run

        def counted(carry: Carry, flow: object, edge: object, value: object, layout: object = None, own: bool = False) -> None:
            for columns in value.values() if not flow.is_gradient else ():
                if id(columns) in self.known:  # handed on as they are
                    continue
                self.known.add(id(columns))
                size = columns.numel() * columns.element_size()
                self.alive += size
                self.most, self.widest = max(self.most, self.alive), max(self.widest, len(columns))
                finalize(columns, self.free, id(columns), size)
            deposit(carry, flow, edge, value, layout, own)

        def ran(carry: Carry) -> None:
            self.passes += 1
            started(carry)

        monkeypatch.setattr(Carry, "deposit", counted)
        monkeypatch.setattr(Carry, "run", ran)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


@pytest.mark.parametrize("quantity", ["DiagGGNExact", "BatchDiagGGNExact", "KFLR", "SqrtGGNExact", "DiagHessian"])
@pytest.mark.parametrize("number", [1, 3, 8])
def test_live_columns_are_bounded(monkeypatch: pytest.MonkeyPatch, quantity: str, number: int) -> None:
    probe = Probe(monkeypatch)
    model, lossfunc, X, y = deep(ReLU)
    with backpack(getattr(extensions, quantity)(), memory=number * COLUMN):
        lossfunc(model(X), y).backward()
    assert 0 < probe.most <= number * COLUMN
    assert probe.widest <= number
    assert not probe.alive


class Calls(Module):
    """Calls a function, of which the graph alone knows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(Module):
    """A layer beside a path without one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = Linear(64, 64), ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.layer(x))


@pytest.mark.parametrize("columns", [1, 4])
def test_columns_that_wait_for_others_are_counted(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While those of a branch arrive beside those that wait, there are three: at the layer's output, at its input, and past it."""
    made, (_, lossfunc, X, y) = [], deep(ReLU)
    model = extend(Sequential(Linear(5, 64), *(Residual() for _ in range(4)), Linear(64, 16)).double())
    column, run_all = 8 * 64 * 8, Carry.run

    def ran(carry: Carry) -> None:
        made.append(1)
        run_all(carry)

    monkeypatch.setattr(Carry, "run", ran)
    for memory, passes in ((3 * 15 * column, 0), (3 * 15 * column - 1, 1), (3 * columns * column, -(-15 // columns) - 1)):
        made.clear()
        with backpack(extensions.DiagGGNExact(), memory=memory):
            lossfunc(model(X), y).backward()
        assert len(made) == passes


def test_columns_that_are_born_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curved activation adds a column for each of its entries: they are carried in blocks, too, and beside what is on its way."""
    bound = 30 * COLUMN
    probe = Probe(monkeypatch)
    for memory in (None, bound):
        model, lossfunc, X, y = deep(Tanh)
        probe.most = 0
        with backpack(extensions.DiagHessian(), memory=memory):
            lossfunc(model(X), y).backward()
        assert (probe.most <= bound) is (memory == bound)
        diagonals = [p.diag_h for p in model.parameters()]
        if memory is None:
            expected = diagonals
    for one, two in zip(diagonals, expected, strict=True):
        close(one, two)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [Linear(3, 4), nn.GroupNorm(2, 4), Linear(4, 2)],  # pairs of entries, of which each has four columns
        lambda: [Linear(3, 4), Calls(lambda x: x.unsqueeze(1)), nn.RMSNorm(4), LayerNorm(4), Calls(lambda x: x.squeeze(1)), Linear(4, 2)],
        lambda: [layer := Linear(3, 3), Tanh(), layer, Linear(3, 2)],
        lambda: [Linear(3, 3), LeakyReLU(), Calls(lambda x: x / x.square().sum(1, keepdim=True)), Linear(3, 2)],  # broadcast
        lambda: [Linear(3, 3), Calls(lambda x: torch.bmm(x.unsqueeze(2), x.unsqueeze(1))[:, 0]), Linear(3, 2)],
    ],
    ids=["groups", "norms", "layer twice", "quotient", "product"],
)
def test_columns_that_are_born_are_counted(make: Callable[[], list[Module]], monkeypatch: pytest.MonkeyPatch) -> None:
    counts, bear, count = Counter(), Pass._bear, blocks.columns

    def born(self: Pass, flow: Flow, source: object, parts: list) -> None:
        counts["born"] += len(parts[0][0])
        bear(self, flow, source, parts)

    def counted(flow: Flow, plan: Plan) -> int:
        counts["counted"] = count(flow, plan)
        return counts["counted"]

    monkeypatch.setattr(Pass, "_bear", born)
    monkeypatch.setattr(blocks, "columns", counted)
    torch.manual_seed(0)
    model, lossfunc = extend(Sequential(*make()).double()), extend(CrossEntropyLoss())
    with backpack(extensions.DiagHessian(), memory=1 << 30):
        lossfunc(model(torch.rand(4, 3).double()), torch.tensor([0, 1, 1, 0])).backward()
    assert counts["born"] == counts["counted"]


@pytest.mark.parametrize("layer", [Tanh, lambda: LayerNorm((2, 10)), lambda: Calls(torch.sin), lambda: Calls(lambda x: x.softmax(1))])
def test_columns_that_are_born_are_never_formed_together(layer: Callable[[], Module], monkeypatch: pytest.MonkeyPatch) -> None:
    formed, take = [], ScatteredColumns.__getitem__

    def took(columns: ScatteredColumns, part: slice) -> Tensor:
        formed.append((len(columns), len(taken := take(columns, part))))
        return taken

    monkeypatch.setattr(ScatteredColumns, "__getitem__", took)
    results = []
    for memory in (1 << 30, 6 * 3 * 20 * 8):
        torch.manual_seed(0)
        model, lossfunc = extend(Sequential(Linear(3, 10), LeakyReLU(), layer(), Linear(10, 2)).double()), extend(CrossEntropyLoss())
        x, y = torch.rand(3, 2, 3).double(), torch.randint(2, (3, 2))
        with backpack(extensions.BatchDiagHessian(), memory=memory):
            lossfunc(model(x).movedim(2, 1), y).backward()
        results.append(model[0].weight.diag_h_batch)
        born = formed[0][0]
        assert born >= 20
        assert sum(some for _, some in formed) == born
        assert max(some for _, some in formed) == born if memory == 1 << 30 else max(some for _, some in formed) <= 6
        formed.clear()
    assert results[0].ne(0).all()
    close(*results, 1e-10)


class Twice(Module):
    """A layer that is called twice, in sequence, for each position or for all of them together."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.layer, self.folded = Linear(10, 10), folded

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1) if self.folded else x
        return self.layer(self.layer(rows).tanh()).view(x.shape)


@pytest.mark.parametrize(
    "layer",
    [lambda: Twice(folded=False), lambda: Twice(folded=True), lambda: Calls(lambda x: torch.bmm(x, (2 * x).mT).sum(2, keepdim=True).expand(x.shape))],
    ids=["layer twice", "layer twice, folded", "product"],
)
@pytest.mark.parametrize("most", [1, 3, 6])
def test_pairs_of_columns_are_never_formed_together(layer: Callable[[], Module], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    formed, whole, take, cut = [], [], PartOfPairs.__getitem__, blocks.ColumnBlocks.cut

    def took(columns: PartOfPairs, part: slice) -> Tensor:
        whole.append(len(columns))
        formed.append(len(taken := take(columns, part)))
        return taken

    def parts(given: blocks.ColumnBlocks, width: int) -> list[slice]:
        return [slice(start, min(width, start + most)) for start in range(0, width, most)]

    monkeypatch.setattr(PartOfPairs, "__getitem__", took)
    results = []
    for memory in (1 << 30, 1):
        torch.manual_seed(0)
        model, lossfunc = extend(Sequential(Linear(3, 10), layer(), Linear(10, 2)).double()), extend(CrossEntropyLoss())
        x, y = torch.rand(3, 2, 3).double(), torch.randint(2, (3, 2))
        monkeypatch.setattr(blocks.ColumnBlocks, "cut", parts if memory == 1 else cut)
        with backpack(extensions.BatchDiagHessian(), memory=memory):
            lossfunc(model(x).movedim(2, 1), y).backward()
        results.append([p.diag_h_batch for p in model.parameters()])
        assert set(whole) == {40}
        assert sum(formed) == 2 * 40
        assert max(formed) == (most if memory == 1 else 40)
        formed.clear()
    for one, other in zip(*results, strict=True):
        close(one, other, 1e-10)


def test_columns_that_are_born_at_a_weight_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each sample, while they wait for other uses of the weight: more than all that is carried otherwise."""
    most, at_leaf, memory = [], Collector.at_leaf, 20 * 3 * 100 * 8

    def taken(collector: Collector, flow: Flow, parameter: nn.Parameter, columns: dict[object, Tensor]) -> None:
        most.append(sum(part.nbytes for part in columns.values()))
        at_leaf(collector, flow, parameter, columns)

    monkeypatch.setattr(Collector, "at_leaf", taken)
    results = []
    for bound in (memory, 1 << 30):
        torch.manual_seed(0)
        model, lossfunc = extend(Sequential(layer := Linear(10, 10), Tanh(), layer, Linear(10, 2)).double()), extend(CrossEntropyLoss())
        with backpack(extensions.DiagHessian(), memory=bound):
            lossfunc(model(torch.rand(3, 10).double()), torch.tensor([0, 1, 1])).backward()
        assert max(most) <= memory // 2 if bound == memory else max(most) == memory  # put together with those of other uses
        results.append(layer.weight.diag_h)
        most.clear()
    close(*results)


def test_several_flows_and_losses_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(monkeypatch)
    model, lossfunc, X, y = deep(ReLU)
    with backpack(extensions.DiagGGNExact(), extensions.DiagHessian(), extensions.DiagGGNMC(mc_samples=9), memory=12 * COLUMN):
        (lossfunc(model(X), y) + 2 * lossfunc(model(X), y)).backward()
    assert probe.most <= 12 * COLUMN


def test_nothing_is_cut_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(monkeypatch)
    model, lossfunc, X, y = deep(ReLU)
    whole = 15 * (COLUMN * 3 // 2)  # one column less than classes, before and after a layer and an activation
    for memory in (None, whole, "1MB"):
        with backpack(extensions.DiagGGNExact(), extensions.BatchGrad(), memory=memory):
            lossfunc(model(X), y).backward()
    assert probe.passes == 0
    with backpack(extensions.DiagGGNExact(), memory=whole - 1):
        lossfunc(model(X), y).backward()
    assert probe.passes == 1


@pytest.mark.parametrize("case", NAMES)
def test_what_columns_of_a_chain_take_is_bounded_without_following_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Weight(blocks.Weight):
        def __init__(self, flow: Flow, plan: Plan, collector: Collector) -> None:
            super().__init__(flow, plan, collector)
            seen.append((self.most, blocks.bound(plan)))

    monkeypatch.setattr(blocks, "Weight", Weight)
    chosen = [name for name in CARRIED if not name.startswith("HBP") and QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    run(CASES[case].build(3), *(QUANTITIES[name].make() for name in chosen), memory=1 << 40)
    assert seen
    assert all(most <= bound for most, bound in seen)
    if case in ("net: Conv2d, reflect", "logreg", "PReLU, 1 parameter"):
        assert all(isfinite(bound) for _, bound in seen)


class HalfWay(Module):
    """Computes in single precision in the middle, where columns are born."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Linear(3, 4), Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.first(x).float()
        return self.last((middle * middle.sigmoid()).double())


def test_columns_that_are_born_in_another_precision() -> None:
    torch.manual_seed(0)
    model, lossfunc, X, y = extend(HalfWay().double()), extend(CrossEntropyLoss()), torch.rand(5, 2, 3).double(), torch.randint(2, (5, 2))
    found = []
    for memory in (1 << 30, 1):
        with backpack(extensions.DiagHessian(), memory=memory):
            lossfunc(model(X).movedim(2, 1), y).backward()
        found.append(model.first.weight.diag_h)
    assert found[0].ne(0).all()
    close(*found, 1e-10)


def test_what_does_not_depend_on_columns_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Module] = []
    moment = AffineDerivatives.input_moment
    monkeypatch.setattr(AffineDerivatives, "input_moment", lambda rule, module, *args: calls.append(module) or moment(rule, module, *args))
    model, lossfunc, X, y = deep(ReLU)
    with backpack(extensions.KFLR(), memory=1):
        lossfunc(model(X), y).backward()
    assert len(calls) == 4


SCRIPT = """
import re, resource, sys, torch
from pathlib import Path
from torch import nn
from backpack import backpack, extend, extensions
torch.set_num_threads(1)
def peak():
    if sys.platform == "linux":  # where what getrusage tells begins with that of the process from which this one was started
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
layers = [nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 60, 3, 4), nn.ReLU()]
model = extend(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()))
lossfunc, X, y = extend(nn.CrossEntropyLoss()), torch.rand(8, 3, 32, 32), torch.randint(60, (8,))
lossfunc(model(X), y).backward()
with backpack(getattr(extensions, sys.argv[1])(), memory=1):  # what is loaded at the first use
    lossfunc(model(X[:1]), y[:1]).backward()
before = peak()
with backpack(getattr(extensions, sys.argv[1])(), memory=sys.argv[2]):
    lossfunc(model(X), y).backward()
print(peak() - before)
"""


@pytest.mark.parametrize(
    "quantity", ["DiagGGNExact", *[pytest.param(name, marks=pytest.mark.slow) for name in ("BatchDiagGGNExact", "KFLR", "DiagHessian")]]
)
def test_the_memory_of_the_process(quantity: str) -> None:
    """All columns of this net take 180 MiB: what rules need beside columns for a moment is less than 78 MiB."""
    taken = {}
    for memory in ("1GiB", "32MiB"):
        command = [sys.executable, "-c", SCRIPT, quantity, memory]
        taken[memory] = int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1]).stdout)
    assert taken["1GiB"] > 180 << 20
    assert taken["32MiB"] < 110 << 20


# --- what goes on around it -------------------------------------------------------------------------------------------------------------------


FIELDS = ["diag_ggn_exact", "diag_ggn_exact_batch", "sqrt_ggn_exact", "kflr", "diag_h", "diag_h_batch"]


def exact() -> list[BackpropExtension]:
    names = ("DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR", "DiagHessian", "BatchDiagHessian")
    return [getattr(extensions, name)() for name in names]


def test_results_of_several_passes_unite() -> None:
    kinds = [extensions.DiagGGNExact, extensions.BatchDiagGGNExact, extensions.KFLR, extensions.DiagHessian]
    results = []
    for memory, parts in ((1, 2), (None, 1)):
        model, _, X, y = deep(Sigmoid)
        lossfunc = extend(CrossEntropyLoss(reduction="sum"))
        with backpack(*(kind() for kind in kinds), accumulate=True, memory=memory):
            for x, target in zip(X.chunk(parts), y.chunk(parts), strict=True):
                lossfunc(model(x), target).backward()
        results.append([getattr(p, kind().savefield) for p in model.parameters() for kind in kinds])
    for one, two in zip(*results, strict=True):
        for a, b in zip(flat(one), flat(two), strict=True):
            close(a, b)


def test_hooks_find_whole_results() -> None:
    """The extension hook runs once for each module, when the results of all blocks are there, and may take them away."""
    model, lossfunc, X, y = deep(Sigmoid)
    seen: dict[Module, list] = {}

    def hook(module: Module) -> None:
        assert module not in seen
        seen[module] = [vars(p).pop(field) for p in module.parameters(recurse=False) for field in FIELDS]

    with backpack(*exact(), extension_hook=hook, memory=1):
        lossfunc(model(X), y).backward()
    other, _, _, _ = deep(Sigmoid)
    with backpack(*exact()):
        lossfunc(other(X), y).backward()
    assert set(model) <= seen.keys()
    for module, expected in zip(model, other, strict=True):
        values = [getattr(p, field) for p in expected.parameters() for field in FIELDS]
        for one, two in zip(flat(seen[module]), flat(values), strict=True):
            close(one, two, 1e-10)


@pytest.mark.parametrize("call", [1, 2, 7, 30])
def test_an_exception_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Wherever it is raised, in a block or in the last one: no results, no columns, and earlier results that accumulate are as they were."""
    probe = Probe(monkeypatch)
    model, lossfunc, X, y = deep(Sigmoid)
    kinds = [extensions.DiagGGNExact, extensions.DiagHessian]
    context = backpack(*(kind() for kind in kinds), accumulate=True, memory=8 * COLUMN)
    with context:
        lossfunc(model(X), y).backward()
        before = [getattr(p, kind().savefield).clone() for p in model.parameters() for kind in kinds]
        rule, count = LinearDerivatives._jac_t_mat_prod, iter(range(1, 1000))

        def fails(*args: object, **kwargs: object) -> Tensor:
            if next(count) == call:
                raise KeyboardInterrupt
            return rule(*args, **kwargs)

        loss = lossfunc(model(X), y)
        with monkeypatch.context() as patch:
            patch.setattr(LinearDerivatives, "_jac_t_mat_prod", fails)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        after = [getattr(p, kind().savefield) for p in model.parameters() for kind in kinds]
        for one, two in zip(after, before, strict=True):
            assert torch.equal(one, two)
    del loss
    assert not probe.alive
    fresh, _, _, _ = deep(Sigmoid)
    with backpack(*(kind() for kind in kinds), memory=8 * COLUMN), monkeypatch.context() as patch:
        count = iter(range(1, 1000))
        patch.setattr(LinearDerivatives, "_jac_t_mat_prod", fails)
        with pytest.raises(KeyboardInterrupt):
            lossfunc(fresh(X), y).backward()
    assert not any(hasattr(p, kind().savefield) for p in fresh.parameters() for kind in kinds)


def test_a_graph_that_stays_can_be_passed_again() -> None:
    model, lossfunc, X, y = deep(Sigmoid)
    loss, results = lossfunc(model(X), y), []
    for memory in (1, 7 * COLUMN, None):
        with backpack(*exact(), memory=memory):
            loss.backward(retain_graph=True)
        results.append([getattr(p, field) for p in model.parameters() for field in FIELDS])
    for one, two, three in zip(*map(flat, results), strict=True):
        close(one, three, 1e-10)
        close(two, three, 1e-10)


def test_results_have_the_type_that_was_asked_for() -> None:
    model, lossfunc, X, y = deep(ReLU, double=False)
    with backpack(*exact(), memory=1, dtype=torch.float64):
        lossfunc(model(X), y).backward()
    for p in model.parameters():
        assert {tensor.dtype for field in FIELDS for tensor in flat(getattr(p, field))} == {torch.float64}


# --- refusals ---------------------------------------------------------------------------------------------------------------------------------


AMOUNTS = {1: 1, 5_000: 5_000, "2GiB": 2 << 30, "500MB": 500_000_000, " 1.5 kib ": 1536, "64 kB": 64_000, "7B": 7, "1TiB": 1 << 40, ".5MiB": 1 << 19}


@pytest.mark.parametrize("amount", AMOUNTS)
def test_amounts_of_memory_in_words(amount: int | str) -> None:
    assert bytes_of(amount) == AMOUNTS[amount]
    assert backpack(memory=amount).memory == AMOUNTS[amount]


@pytest.mark.parametrize("amount", [0, -1, "abc", "", "2", "GiB", "-2GiB", "2XiB", "0MB", "0.1B", "1e9B", "2 Gi", "2iB"])
def test_what_is_no_amount(amount: int | str) -> None:
    with pytest.raises(ArgumentError, match="memory"):
        backpack(memory=amount)


@pytest.mark.parametrize("amount", [True, False, 2.0, [1], torch.float32])
def test_what_is_neither_number_nor_text(amount: object) -> None:
    with pytest.raises(ArgumentTypeError, match="memory must be a number of bytes"):
        backpack(memory=amount)


def assert_one_block(monkeypatch: pytest.MonkeyPatch, step: Callable[..., None], reason: str) -> None:
    """A bound that a user sets and that cannot be kept is refused; by itself, the library carries all columns at once."""
    with pytest.raises(UnsupportedError, match=reason):
        step(memory=1)
    step(memory=1 << 30)
    monkeypatch.setattr(blocks, "AUTOMATIC", 1)
    probe = Probe(monkeypatch)
    step()
    assert probe.passes == 0


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # of torch, about create_graph, once in a process
def test_differentiable_results_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lossfunc, X, y = deep(ReLU)

    def step(**options: object) -> None:
        with backpack(extensions.DiagGGNExact(), **options):
            lossfunc(model(X), y).backward(create_graph=True)
        torch.autograd.grad(model[2].weight.diag_ggn_exact.sum(), model[4].weight)

    assert_one_block(monkeypatch, step, "create_graph=True")


def test_checkpointed_parts_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lossfunc, X, y = deep(ReLU)

    class Checkpointed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = model[:4], model[4:]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    outer = extend(Checkpointed())

    def step(**options: object) -> None:
        with backpack(extensions.DiagGGNExact(), **options):
            lossfunc(outer(X), y).backward()

    assert_one_block(monkeypatch, step, "checkpointed")


class Shape(ModuleExtension):
    """Saves the shape of what the library carries."""

    def weight(self, ext: object, module: Module, g_inp: object, g_out: object, carried: Tensor) -> Tensor:
        return torch.tensor(carried.shape)


def test_module_extensions_get_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lossfunc, X, y = deep(ReLU)

    def step(**options: object) -> None:
        extension = extensions.DiagGGNExact()
        extension.set_module_extension(Linear, Shape(["weight"]))
        with backpack(extension, **options):
            lossfunc(model(X), y).backward()
        assert model[2].weight.diag_ggn_exact.tolist() == [16, 8, 64]

    assert_one_block(monkeypatch, step, "module extension")


def test_repeated_draws_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lossfunc, X, y = deep(ReLU)

    def step(**options: object) -> None:
        with backpack(extensions.BatchDiagGGNMC(mc_samples=MC, subsampling=[1, 1]), **options):
            lossfunc(model(X), y).backward()
        assert model[2].weight.diag_ggn_mc_batch.shape == (2, 64, 64)

    assert_one_block(monkeypatch, step, "repeatedly")


class Sums(Rule):
    """A rule of a user's own: the sum of all columns."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def at_call(self, use: object, name: str) -> Tensor:
        return self.at_leaf(self._rule.at_call(use, name))

    def at_leaf(self, columns: dict) -> Tensor:
        return stack(columns).sum((0, 1))

    def add(self, one: Tensor, other: Tensor, parameter: nn.Parameter) -> Tensor:
        return one + other


class SumOfColumns(DiagGGNExact):
    """A quantity with a rule of its own."""

    def rule_at(self, samples: int) -> Rule:
        return Sums(ColumnRule(self.flow, None))

    def rule_key(self) -> object:
        return "sum of columns"

    def finish(self, state: Tensor, parameter: nn.Parameter) -> Tensor:
        return state


class SumInBlocks(SumOfColumns):
    """It says how blocks go together."""

    def beside(self, kept: Tensor | None, state: Tensor) -> Tensor:
        return state if kept is None else kept + state


def test_a_rule_of_ones_own_says_how_blocks_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lossfunc, X, y = deep(ReLU)

    def step(kind: type[BackpropExtension] = SumOfColumns, **options: object) -> None:
        with backpack(kind(), **options):
            lossfunc(model(X), y).backward()

    assert_one_block(monkeypatch, step, "rule of its own")
    expected = [p.diag_ggn_exact for p in model.parameters()]
    step(SumInBlocks, memory=1)
    for p, value in zip(model.parameters(), expected, strict=True):
        close(p.diag_ggn_exact, value, 1e-10)
