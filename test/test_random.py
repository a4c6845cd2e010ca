"""Random models: every quantity is that of the oracle, or it is refused; never wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from oracle import Oracle, Problem
from random_nets import POOLS, STRAIGHT, Drawn, build, names_in, nets, without_checkpoints
from test_extensions import QUANTITIES, all_close, all_factors_close, collect, run
from torch import Tensor

from backpack.utils.errors import OverwrittenError

pytestmark = pytest.mark.filterwarnings("error")

# --- checks -----------------------------------------------------------------------------------------------------------------------------------

FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
GROUPS = {
    "first order and GGN": (*FIRST_ORDER, "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact"),
    "diagonal of the Hessian": ("DiagHessian", "BatchDiagHessian"),
    "Kronecker factors": ("KFLR",),
    "products": ("HMP", "GGNMP"),
}
MODULE_STEPS = {"linear", "flatten", "unflatten", "fit", "dropout", "conv", "conv transposed", "batch norm", *POOLS}
STRAIGHT_STEPS = {"slice", "flip", "rotated", "repeat", "reduce", "reshape", "residual", "cat", "detached"} | STRAIGHT
"""Steps that do not bend, and after which the samples do not lie on the last axis."""
WITHOUT_FACTORS = "bare matrix einsum transposed functional own norm attention recurrent pairs lookup places token loop derivative weight".split()
"""Steps with parameters that may have no Kronecker factors."""


PLACES = {"places, table", "places, net", "places, waves"}
"""What is made once for all samples."""

ANOTHER_SIZE = "use a mini-batch of another size"
"""What refusals say where something else has as many entries as there are samples."""


def must_be_exact(group: str, names: set[str]) -> bool:
    """Say whether a group of extensions has no excuse to refuse a model with these kinds of steps."""
    if any("in place" in name for name in names) or names & {"overwritten slice", "mixed"}:
        return False  # a recorded value may be overwritten, or samples meet
    if names & PLACES - {"places, table"}:
        return False  # numbers that may be those of samples, if there are as many
    if group == "first order and GGN":
        return True
    simple = MODULE_STEPS | {name for name in names if name.startswith("activation") and "Softmax" not in name}
    if group == "Kronecker factors":
        return not any(word in name for name in names for word in WITHOUT_FACTORS)
    if group == "diagonal of the Hessian":
        return names <= simple | STRAIGHT_STEPS
    return names <= simple - {"dropout"}


def check(drawn: Drawn, tally: Counter[str]) -> None:
    """Compare all quantities, group by group, and count what is exact and what is refused."""
    try:
        for plain in (without_checkpoints(build(drawn)), build(drawn)):
            plain.loss(plain.outputs()).backward()
    except RuntimeError as error:
        assert any(text in str(error) for text in ("inplace", "in-place", "written-to", "does not require grad", "is not implemented")), error
        return
    if all(p.grad is None for p in plain.model.parameters()):
        return
    terms, names, oracle = drawn[5], names_in(drawn), Oracle(without_checkpoints(build(drawn)))
    for group, chosen in GROUPS.items():
        if group == "Kronecker factors" and names & {"detached", *PLACES}:
            continue  # the oracle would count the inputs of layers whose output is detached, and takes what one sample uses for its own
        problem = build(drawn)
        try:
            run(problem, *(QUANTITIES[name].make() for name in chosen))
            for name in chosen:
                compare(name, oracle, collect(problem, QUANTITIES[name].field), names)
        except (NotImplementedError, OverwrittenError) as refusal:
            event(f"{group}: refused", str(refusal)[:100])
            special = len(terms) > 1 or len(drawn[4]) > 1 or terms[0][2] == "none"
            may = (group == "products" and special) or ANOTHER_SIZE in str(refusal)
            assert may or not must_be_exact(group, names), f"refused: {refusal}"
            if isinstance(refusal, NotImplementedError) or group != "products":  # products may find out when they are called
                assert not any(collect(problem, QUANTITIES[name].field) for name in chosen), "a refused pass left results behind"
            tally[f"{group}: refused"] += 1
        else:
            event(f"{group}: exact")
            tally[f"{group}: exact"] += 1


def compare(name: str, oracle: Oracle, values: dict[str, Any], names: set[str]) -> None:
    """Compare a quantity with the oracle, for a model with these kinds of steps."""
    if name == "Variance":  # a difference whose rounding is relative to what is subtracted
        values = {p: value + (oracle.grad[p] / oracle.N).square() for p, value in values.items()}
        all_close(values, {p: value / oracle.N for p, value in oracle.sum_grad_squared.items()})
    elif name == "KFLR" and names & {"functional conv", "pairs", "derivative"}:  # they may be read as layers, or have exact blocks
        factors, blocks = oracle.kronecker(oracle.hessian_exact), oracle.ggn_blocks(oracle.hessian_exact)
        all_factors_close(values, {p: [blocks[p]] if len(value) == 1 else factors[p] for p, value in values.items()})
    else:
        QUANTITIES[name].check(oracle, values)


def check_many(examples: int) -> Counter[str]:
    """Check many models, and return what was exact and what refused."""
    tally: Counter[str] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(nets())
    def check_one(drawn: Drawn) -> None:
        check(drawn, tally)

    check_one()
    return tally


LEAST = {"first order and GGN": 0.95, "diagonal of the Hessian": 0.5, "Kronecker factors": 0.8, "products": 0.3}
"""Part of the models on which a group has to be exact."""


def most_are_exact(tally: Counter[str]) -> None:
    print(dict(tally))
    for group, part in LEAST.items():
        exact, refused = tally[f"{group}: exact"], tally[f"{group}: refused"]
        assert exact >= part * (exact + refused), f"{group}: {exact} exact, {refused} refused"


def test_random_models() -> None:
    most_are_exact(check_many(120))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_random_models() -> None:
    most_are_exact(check_many(4000))


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(nets(batches=(0,)))
def test_random_models_without_samples(drawn: Drawn) -> None:
    """First order with a mini-batch of size zero: nothing per sample, and sums of nothing, or a refusal."""
    problem = build(drawn)
    try:
        plain = build(drawn)
        plain.loss(plain.outputs()).backward()
    except (RuntimeError, IndexError):
        return
    if not any(p.requires_grad for p in problem.model.parameters()):
        return
    try:
        run(problem, *(QUANTITIES[name].make() for name in FIRST_ORDER))
    except NotImplementedError:
        return
    for name, expected in plain.model.named_parameters():
        param = problem.model.get_parameter(name)
        if expected.grad is None:
            continue
        assert param.grad_batch.shape == (0, *param.shape)
        assert param.batch_l2.shape == (0,)
        assert torch.equal(param.sum_grad_squared, torch.zeros_like(param))
        assert torch.equal(param.variance, torch.zeros_like(param))


# --- failures that were found, and how they depend on what ran before -------------------------------------------------------------------------


def matrix(size: int) -> Problem:
    return build((0, 2, (size,), (("matrix", size, 3),), (("fit", 0, 3, 0, (2,)),), (("MSE", (2,), "mean", (False,) * 4, 1.0),), "one"))


def norm(size: int) -> Problem:
    return build(
        (0, 2, (size,), (("layer", "layer norm", (size,)),), (("fit", 0, size, 0, (2,)),), (("MSE", (2,), "mean", (False,) * 4, 1.0),), "one")
    )


FIRST: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # sizes differ, so that what one test has left behind cannot serve another
    "one-hot": (4, lambda x: torch.eye(*x.shape, dtype=x.dtype)),
    "one sample of two": (5, lambda x: x * torch.tensor([[0.0], [1.0]], dtype=x.dtype)),
    "a sample without spread": (6, lambda x: torch.where(torch.tensor([[True], [False]]), torch.ones_like(x), x)),
}


@pytest.mark.parametrize("make", [matrix, norm])
@pytest.mark.parametrize("first", FIRST)
def test_data_with_zeros_before(make: Callable[[int], Problem], first: str) -> None:
    """Where the samples of one mini-batch do not mix because of zeros in the data, those of the next one do."""
    size, change = FIRST[first]
    before, problem, oracle = make(size), make(size), Oracle(make(size))
    before.x = change(before.x)
    for one in (before, problem):
        run(one, QUANTITIES["BatchGrad"].make(), QUANTITIES["BatchDiagGGNExact"].make())
    for name in ("BatchGrad", "BatchDiagGGNExact"):
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


@pytest.mark.parametrize("make", [matrix, norm])
@pytest.mark.parametrize(("size", "scale"), [(7, 1e-2), (8, 1e-5), (9, 1e-11)])
def test_samples_of_different_size(make: Callable[[int], Problem], size: int, scale: float) -> None:
    """A sample that is small beside another one is a sample all the same."""
    problem, plain = make(size), make(size)
    problem.x, plain.x = (one.x * torch.tensor([[1.0], [scale]], dtype=torch.float64) for one in (problem, plain))
    run(problem, QUANTITIES["BatchGrad"].make())
    for name, expected in Oracle(plain).grad_batch.items():
        for value, reference in zip(collect(problem, "grad_batch")[name], expected, strict=True):
            all_close({name: value}, {name: reference})
