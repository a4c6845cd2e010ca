"""A long campaign of random models, run by ``make fuzz``: random steps, extensions, precisions, memory layouts and calls of autograd.

Every quantity is that of the oracle, or it is refused. ``FUZZ_MINUTES`` says for how long (10 by default), ``FUZZ_SEED`` where to begin; the
report tells how many models were tried, and a failure prints the trial, smallest first: ``check(Trial(...), Counter())`` repeats it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import test_extensions
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from oracle import Oracle, Problem
from random_nets import Drawn, build, kinds, names_in, nets, without_checkpoints
from test_exclude import excluding
from test_extensions import QUANTITIES, close, collect
from test_random import ANOTHER_SIZE, GROUPS, PLACES, compare, must_be_exact
from torch import Tensor
from torch.nn import Linear, Parameter

from backpack import backpack, clear, extend
from backpack.extensions import flows, spared
from backpack.utils.errors import OverwrittenError

GROUP = {name: group for group, chosen in GROUPS.items() for name in chosen}
SAMPLED = dict.fromkeys(["DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC"], "first order and GGN") | {"KFAC": "Kronecker factors"}
POOL = sorted(GROUP | SAMPLED)
SETTINGS = settings(
    max_examples=50,  # models that are drawn before the generator is seeded anew
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    database=None,
    deadline=None,
)


class Trial(NamedTuple):
    """A model, and everything that is done with it.

    Attributes:
        drawn: Model, data and losses.
        names: The extensions, all active in one pass.
        single: Whether everything is in single precision.
        layout: How the data lie in memory.
        door: How autograd is called.
        frozen: Which parameters are frozen, counted modulo their number.
        apart: Which parameters are excluded, or not asked for, where autograd is asked for some; counted likewise.
        given: What the input is: data, or something with a graph of its own.
        late: Whether the model runs before the context is entered.
        positions: From how many positions on gradients may be sums over samples.
        long: From how many entries of a column on there may be fewer of them.
    """

    drawn: Drawn
    names: tuple[str, ...]
    single: bool
    layout: str
    door: str
    frozen: tuple[int, ...]
    apart: tuple[int, ...] = ()
    given: str = "data"
    late: bool = True
    positions: int = spared.POSITIONS
    long: int = flows.LONG


def identity(x: Tensor) -> Linear:
    """Make a layer that returns its input."""
    layer = Linear(x.shape[-1], x.shape[-1]).to(x)
    layer.load_state_dict({"weight": torch.eye(x.shape[-1]), "bias": torch.zeros(x.shape[-1])})
    return layer


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "strided": lambda x: torch.stack([x, -x], -1)[..., 0],
    "samples last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
}
keep = lru_cache(1)(lambda model: model)  # what recorded a pass has to live until it ends
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda x: x,
    "leaf": lambda x: x.clone().requires_grad_(),
    "parameter": Parameter,
    "of a leaf": lambda x: -(-x).requires_grad_(),
    "of another model": lambda x: identity(x)(x),
    "of another extended model": lambda x: keep(extend(identity(x)))(x),
    "of a frozen layer": lambda x: identity(x).requires_grad_(requires_grad=False)(x.clone().requires_grad_()),
}
DOORS: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "backward": lambda loss, _: loss.backward(),
    "grad": lambda loss, asked: torch.autograd.grad(loss, asked, allow_unused=True),
    "twice": lambda loss, _: (loss.backward(retain_graph=True), loss.backward()),
    "inputs": lambda loss, asked: loss.backward(inputs=asked),
}


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    """Draw a trial."""
    names = draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=5, unique=True))
    layout, door = draw(st.sampled_from(sorted(LAYOUTS))), draw(st.sampled_from(sorted(DOORS)))
    frozen, apart = (tuple(draw(st.lists(st.integers(0, 9), max_size=2))) for _ in range(2))
    given, late = draw(st.sampled_from(["data"] * 4 + sorted(GIVEN))), draw(st.booleans())
    single, positions = draw(st.sampled_from([False, False, True])), draw(st.sampled_from([spared.POSITIONS, 1]))
    long = draw(st.sampled_from([flows.LONG, 0]))
    return Trial(draw(nets(batches=(1, 2, 3, 4), mixing=True)), tuple(names), single, layout, door, frozen, apart, given, late, positions, long)


def counted(problem: Problem, numbers: tuple[int, ...]) -> list[Tensor]:
    """List the parameters with some numbers."""
    params = list(problem.model.parameters())
    return [params[number % len(params)] for number in numbers if params]


def make(trial: Trial, frozen: tuple[int, ...] = ()) -> Problem:
    """Build the model of a trial, in double precision, and freeze more parameters."""
    problem = build(trial.drawn)
    for param in counted(problem, trial.frozen + frozen):
        param.requires_grad_(False)
    if trial.layout != "channels last" or "group norm" not in kinds(trial.drawn[3]):  # torch 2.13 crashes if the norm's weight is frozen
        problem.x = LAYOUTS[trial.layout](problem.x)
    problem.x = GIVEN[trial.given](problem.x).detach()  # dropout draws in the order of memory, which a layer in front may change
    return problem


def lower(problem: Problem) -> Problem:
    """Convert everything to single precision."""
    problem.model.float()
    problem.x = problem.x.float()
    for term in problem.terms:
        term.module.float()
        term.scale = term.scale.float() if isinstance(term.scale, Tensor) else term.scale
        term.target = term.target.float() if term.target.is_floating_point() else term.target
    return problem


def prepare(trial: Trial) -> Problem:
    """Build the model, in its precision, and its input."""
    problem = lower(make(trial)) if trial.single else make(trial)
    problem.x = GIVEN[trial.given](problem.x)
    return problem


def gradients(problem: Problem) -> dict[str, Tensor]:
    """Compute the gradients of a model that is not extended."""
    problem.loss(problem.outputs()).backward()
    return {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}


def close_in_single(actual: Tensor, expected: Tensor) -> None:
    """Compare in the precision of the trial; rounding may be relative to something larger than the result."""
    assert actual.shape == expected.shape
    assert not actual.requires_grad
    assert (actual - expected).abs().amax() <= 1e-3 * expected.abs().amax() + 1e-3


def check(trial: Trial, tally: Counter[str]) -> None:
    """Compare all quantities of a trial with the oracle, and count what came of it."""
    try:
        right = gradients(without_checkpoints(make(trial)))
        others = gradients(without_checkpoints(make(trial, trial.apart)))
        rough = gradients(prepare(trial))
    except RuntimeError as error:
        assert any(text in str(error) for text in ("inplace", "in-place", "written-to", "does not require grad", "is not implemented")), error
        tally["torch refuses the model"] += 1
        return
    if not others:
        tally["nothing to differentiate"] += 1
        return
    if trial.single and any((rough[name] - g).abs().amax() > 1e-5 * (1 + g.abs().amax()) or g.abs().amax() > 1e2 for name, g in right.items()):
        tally["too much rounding"] += 1
        return
    outside = trial.late and trial.drawn[6] == "derived"  # a derivative that is taken outside of the context
    if outside and trial.door == "grad":
        tally["a product with second derivatives, perhaps"] += 1
        return
    steps = names_in(trial.drawn)
    factors = not (steps & {"detached", "functional conv", "pairs", "derivative", *PLACES})  # see test_random.py
    factors &= not {"lookup", "again"} <= steps  # the output of the first lookup may be read for indices only, which is like detaching it
    factors &= "own" not in steps or not {"HMP", "GGNMP"} & set(trial.names)  # products read a module without rule as a whole
    names = [name for name in trial.names if factors or name not in ("KFAC", "KFLR")]
    problem = prepare(trial)
    for module in (problem.model, *problem.losses):
        extend(module)
    apart, some = counted(problem, trial.apart), trial.door in ("grad", "inputs")
    asked = {name: p for name, p in problem.model.named_parameters() if p.requires_grad and not (some and any(p is other for other in apart))}
    loss = problem.loss(problem.outputs()) if trial.late else None
    try:
        patched = patch.object(spared, "POSITIONS", trial.positions), patch.object(flows, "LONG", trial.long)
        active = [QUANTITIES[name].make() for name in names]
        with backpack(*(active if some else [excluding(one, *apart) for one in active])), patched[0], patched[1]:
            DOORS[trial.door](problem.loss(problem.outputs()) if loss is None else loss, list(asked.values()))
        values = {name: collect(problem, QUANTITIES[name].field) for name in names}
        products = {name: value for name, value in values.items() if name in ("HMP", "GGNMP")}
        for name in products:
            for parameter, product in values[name].items():
                product(torch.ones_like(problem.model.get_parameter(parameter)))
    except (NotImplementedError, OverwrittenError) as refusal:
        special = len(trial.drawn[5]) > 1 or len(trial.drawn[4]) > 1 or trial.drawn[5][0][2] == "none" or "extended" in trial.given
        may = [name for name in names if not must_be_exact(GROUP.get(name) or SAMPLED[name], steps) or (name in ("HMP", "GGNMP") and special)]
        assert may or outside or ANOTHER_SIZE in str(refusal), f"refused: {refusal}"
        tally["refused"] += 1
        return
    computed = {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}
    assert computed.keys() == (right.keys() & asked if trial.door != "grad" else set())
    for name, value in computed.items():
        (close_in_single if trial.single else close)(value, right[name] * (2 if trial.door == "twice" else 1))
    oracle = Oracle(without_checkpoints(make(trial, trial.apart)))
    with patch.object(test_extensions, "close", close_in_single) if trial.single else nullcontext():
        for name in names:
            if trial.single and name in ("HMP", "GGNMP", "SqrtGGNMC", "DiagGGNMC", "BatchDiagGGNMC", "KFAC"):
                continue  # their checks draw in double precision
            if name.startswith("Sqrt") and trial.frozen + trial.apart and len(trial.drawn[5]) > 1:
                continue  # a loss that no trainable parameter reaches has no columns
            if trial.door == "twice" and (name in SAMPLED or name in ("HMP", "GGNMP")):
                continue  # the second pass draws anew
            compare(name, oracle, values[name], steps)
            tally[name] += 1
    tally["exact"] += 1
    clear(problem.model)


def one_round(number: int, end: float) -> tuple[Counter[str], str | None]:
    """Try some models.

    Args:
        number: The seed.
        end: When to stop, unless something was found.

    Returns:
        What came of the models; the smallest trial that failed, and how, ``None`` if none did.
    """
    tally: Counter[str] = Counter()
    failed: list[Trial] = []

    @seed(number)
    @settings(SETTINGS)
    @given(trials())
    def run(trial: Trial) -> None:
        if time.monotonic() > end and not failed:
            return
        tally["models"] += 1
        try:
            check(trial, tally)
        except Exception:
            failed[:] = [trial]
            raise

    try:
        run()
    except Exception as failure:  # noqa: BLE001
        return tally, f"seed {number}: {failed}\n" + "".join(traceback.format_exception(failure)[-4:])
    return tally, None


def campaign(minutes: float, first: int) -> tuple[Counter[str], list[str]]:
    """Try models until the time is over, in another process, since a model can make torch crash.

    Args:
        minutes: How long.
        first: The first seed.

    Returns:
        What came of the models, and a text for each round with a failure.
    """
    end, tally, failures = time.monotonic() + 60 * minutes, Counter(), []
    pool = ProcessPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    for number in count(first):
        if time.monotonic() > end:
            break
        try:
            some, failure = pool.submit(one_round, number, end).result()
            tally += some
        except BrokenProcessPool:
            pool, failure = ProcessPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)), f"seed {number}: the process died"
        if failure is not None:
            failures.append(failure)
            print(failure, flush=True)
    pool.shutdown()
    return tally, failures


if __name__ == "__main__":
    minutes, first = float(os.environ.get("FUZZ_MINUTES", "10")), int(os.environ.get("FUZZ_SEED", str(int(time.time()))))
    print(f"fuzzing for {minutes:g} minutes from seed {first}", flush=True)
    tally, failures = campaign(minutes, first)
    print(f"{tally['models']} models, {len(failures)} rounds with a failure")
    for what, count in sorted(tally.items()):
        print(f"  {what}: {count}")
    sys.exit(bool(failures))
