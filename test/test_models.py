"""Models as researchers write them, and as they are on the hub, unmodified: every quantity equals its definition, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import models_hub  # noqa: F401  adds its rows
import pytest
import torch
from models import MODELS
from oracle import Oracle, Problem
from table import default_dtype
from test_exclude import arguments_in, freeze
from test_extensions import MC, QUANTITIES, collect, run, sum_batch
from torch import Tensor, einsum

from backpack.extensions import KFAC
from backpack.utils.errors import BackpackError

pytestmark = pytest.mark.filterwarnings("error")

EXPECTED: dict[str, Callable[[Oracle], dict]] = {
    "BatchGrad": lambda o: o.grad_batch,
    "BatchL2Grad": lambda o: o.batch_l2,
    "SumGradSquared": lambda o: o.sum_grad_squared,
    "Variance": lambda o: o.variance,
    "DiagGGNExact": lambda o: sum_batch(o.diag_ggn_batch(o.hessian_exact)),
    "BatchDiagGGNExact": lambda o: o.diag_ggn_batch(o.hessian_exact),
}


def fresh(name: str, batch: int) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        return MODELS[name].make(batch)


@cache
def truth(name: str, batch: int) -> Oracle:
    return Oracle(fresh(name, batch))


def tolerance(name: str) -> float:
    """Relative error: some models compute in single precision inside, whatever their parameters are."""
    return 3e-6 if "single" in MODELS[name].tags else 1e-9


def compare(value: Tensor | list, expected: Tensor | list, rtol: float, floor: float = 0.0) -> None:
    """Compare relative to the largest entry, factors one by one; errors below the floor are those of rounding."""
    if isinstance(expected, list):
        for part, other in zip(value, expected, strict=True):
            compare(part, other, rtol, floor)
        return
    assert value.shape == expected.shape
    assert value.dtype == expected.dtype == torch.float64
    error, largest = (value - expected).abs().amax(), expected.abs().amax()
    assert error <= rtol * largest + 1e-5 * rtol + floor, f"error {error:.2e}, largest expected entry {largest:.2e}"


def compare_all(values: dict, expected: dict, rtol: float, squares: dict | None = None) -> None:
    assert values.keys() == expected.keys()
    for name, value in values.items():
        compare(value, expected[name], rtol, 0.0 if squares is None else 1e-15 * squares[name].abs().amax())


CELLS = [
    pytest.param(name, batch, marks=pytest.mark.slow if "slow" in row.tags else (), id=f"{name}-{batch}")
    for name, row in MODELS.items()
    for batch in (1, 3)
]
FAST = [name for name, row in MODELS.items() if "slow" not in row.tags]


@pytest.mark.parametrize(("name", "batch"), CELLS)
def test_against_oracle(name: str, batch: int) -> None:
    """One extension at a time."""
    for quantity, expected in EXPECTED.items():
        problem = fresh(name, batch)
        run(problem, QUANTITIES[quantity].make())
        oracle = truth(name, batch)
        squares = oracle.sum_grad_squared if quantity == "Variance" else None  # a difference of squares, of which one sample leaves nothing
        compare_all(collect(problem, QUANTITIES[quantity].field), expected(oracle), tolerance(name), squares)


@pytest.mark.parametrize(("name", "batch"), [*((name, 1) for name in FAST), *((name, 3) for name in FAST if "single" not in MODELS[name].tags)])
def test_sampled_factors(name: str, batch: int) -> None:
    """Factors of tables that are output layers, too, and the like, are refused; the others are those of the definition."""
    problem = fresh(name, batch)
    try:
        run(problem, KFAC(mc_samples=MC))
    except BackpackError:
        assert "no factors" in MODELS[name].tags
        return
    assert batch == 1 or "no factors" not in MODELS[name].tags
    oracle = truth(name, batch)
    compare_all(collect(problem, "kfac"), oracle.kronecker(oracle.sampled_hessians(MC)[0]), tolerance(name))


@pytest.mark.parametrize(("name", "batch"), CELLS)
def test_square_root(name: str, batch: int) -> None:
    """The columns of all parameters, squared, are the GGN of each sample, here applied to a few vectors."""
    problem, oracle = fresh(name, batch), truth(name, batch)
    run(problem, QUANTITIES["SqrtGGNExact"].make())
    values = collect(problem, "sqrt_ggn_exact")
    assert values.keys() == oracle.params.keys()
    vectors = {name: torch.randn(p.numel(), 4, dtype=torch.float64) for name, p in oracle.params.items()}
    seen = sum(values[name].flatten(2) @ vector for name, vector in vectors.items())
    moved = einsum("nde,nek->ndk", oracle.hessian_exact, sum(oracle.jac[name] @ vector for name, vector in vectors.items()))
    for key, value in values.items():
        assert value.shape == (oracle.D, oracle.N, *oracle.params[key].shape)
        compare(einsum("vnp,vnk->npk", value.flatten(2), seen), einsum("ndp,ndk->npk", oracle.jac[key], moved), tolerance(name))


def hessian_entries(oracle: Oracle, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Differentiate the loss twice with respect to some entries of the parameters."""
    params = [oracle.params[name] for name in entries]
    first = torch.autograd.grad(oracle.problem.loss(oracle._forward()), params, create_graph=True)
    result = {}
    for (name, places), param, gradient in zip(entries.items(), params, first, strict=True):
        rows = [torch.autograd.grad(g, param, retain_graph=True, materialize_grads=True)[0] for g in gradient.flatten()[places]]
        result[name] = torch.stack([row.flatten()[place] for row, place in zip(rows, places, strict=True)])
    return result


@pytest.mark.parametrize("quantity", ["KFLR", pytest.param("DiagHessian", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAST)
def test_one_argument_away(quantity: str, name: str) -> None:
    """What a refusal says is to be left out is all that is missing: everything else comes out right."""
    excluded: set[str] = set()
    extension, field = type(QUANTITIES[quantity].make()), QUANTITIES[quantity].field
    for _ in range(12):
        problem = fresh(name, 3)
        try:
            run(problem, extension(exclude=sorted(excluded)))
        except BackpackError as error:
            more = set(arguments_in(error))
            assert more - excluded
            excluded |= more
        else:
            break
    tags = MODELS[name].tags
    assert bool(excluded) == (("no factors" if quantity == "KFLR" else "curved") in tags)
    oracle = Oracle(freeze(fresh(name, 3), excluded.__contains__))
    values = collect(problem, field)
    assert values.keys() == oracle.params.keys()
    if quantity == "KFLR":
        compare_all(values, oracle.kronecker(oracle.hessian_exact), tolerance(name))
        return
    entries = {name: torch.randperm(p.numel())[:5] for name, p in oracle.params.items()}
    for key, expected in hessian_entries(oracle, entries).items():
        error = (values[key].flatten()[entries[key]] - expected).abs().amax()
        assert error <= 3 * tolerance(name) * values[key].abs().amax() + 1e-14  # rounding grows with each derivative
