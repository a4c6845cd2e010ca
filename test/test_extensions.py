"""Every extension on every case against the oracle; where a tag of the case says so, the extension must refuse, or may refuse but not err."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cache

import pytest
import torch
from cases import CASES
from oracle import Oracle, Problem, clip, identity
from table import every_second
from torch import Tensor, einsum
from torch.nn import LSTM, Module

from backpack import backpack, extend, extensions
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder import hbp
from backpack.utils.errors import LossValueError

pytestmark = pytest.mark.filterwarnings("error")

MC = 2  # Monte-Carlo samples of every sampled quantity
Value = Tensor | list[Tensor] | Callable[[Tensor], Tensor]
Check = Callable[[Oracle, dict[str, Value]], None]


# --- comparing --------------------------------------------------------------------------------------------------------------------------------


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    """Compare relative to the largest entry."""
    assert actual.shape == expected.shape
    assert not actual.requires_grad
    error = (actual - expected).abs().amax()
    assert error <= rtol * expected.abs().amax() + 1e-14, f"error {error:.2e}, largest expected entry {expected.abs().amax():.2e}"


def all_close(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    for name, value in values.items():
        close(value, expected[name])


def tensors(expected: Callable[[Oracle], dict[str, Tensor]]) -> Check:
    return lambda oracle, values: all_close(values, expected(oracle))


def factors(expected: Callable[[Oracle], dict[str, list[Tensor]]]) -> Check:
    return lambda oracle, values: all_factors_close(values, expected(oracle))


def all_factors_close(values: dict[str, list], expected: dict[str, list]) -> None:
    assert values.keys() == expected.keys()
    for name, value in values.items():
        factors_close(value, expected[name])


def factors_close(value: list, expected: list) -> None:
    """Compare factors, or one list of factors a group."""
    assert type(value) is list
    for actual, factor in zip(value, expected, strict=True):
        factors_close(actual, factor) if isinstance(factor, list) else close(actual, factor)


def kronecker_close(oracle: Oracle, values: dict[str, list[Tensor]], hessian: Tensor) -> None:
    """Two factors for matrices that inputs are multiplied with; the exact block for other parameters."""
    all_factors_close(values, oracle.kronecker(hessian))


def products(expected: Callable[[Oracle], dict[str, Tensor]]) -> Check:
    """The value is a function that multiplies with a block, for stacked vectors and for a single one."""

    def check(oracle: Oracle, values: dict[str, Value]) -> None:
        blocks = expected(oracle)
        assert values.keys() == blocks.keys()
        for name, product in values.items():
            mat = torch.randn(2, *oracle.params[name].shape, dtype=torch.float64)
            result = einsum("pq,vq->vp", blocks[name], mat.flatten(1)).reshape(mat.shape)
            close(product(mat).detach(), result)
            close(product(mat[0]).detach(), result[0])

    return check


def grams(oracle: Oracle, values: dict[str, Tensor], expected: Tensor, columns: int) -> None:
    """The columns of all parameters, squared, are the GGN of each sample."""
    assert values.keys() == oracle.params.keys()
    for name, value in values.items():
        assert value.shape == (columns, len(expected), *oracle.params[name].shape)
    S = torch.cat([value.reshape(*value.shape[:2], -1) for value in values.values()], dim=2)
    close(einsum("vnp,vnq->npq", S, S), expected)


def total_width(oracle: Oracle) -> int:
    return sum(oracle.outputs[term.head][0].numel() for term in oracle.problem.terms)


def for_some_order_of_draws(check: Callable[[Oracle, dict[str, Value], Tensor], None]) -> Check:
    """Compare with the labels that the generator yields; if the loss has several terms, in whichever order they were drawn."""

    def check_all(oracle: Oracle, values: dict[str, Value]) -> None:
        failures = []
        for hessian in oracle.sampled_hessians(MC):
            try:
                return check(oracle, values, hessian)
            except AssertionError as failure:
                failures.append(failure)
        raise failures[0]

    return check_all


# --- the extensions ---------------------------------------------------------------------------------------------------------------------------


class Expect(Enum):
    """What an extension does on a case."""

    EXACT = "exact"
    REFUSED = "refused"
    EITHER = "exact or refused"


def exact(tags: frozenset[str]) -> Expect:  # noqa: ARG001
    return Expect.EXACT


def ggn(tags: frozenset[str]) -> Expect:
    return Expect.REFUSED if "not convex" in tags else Expect.EITHER if "maybe not convex" in tags else Expect.EXACT


def hessian_diagonal(tags: frozenset[str]) -> Expect:
    if "curved" in tags:
        return Expect.REFUSED
    return Expect.EITHER if "opaque" in tags else Expect.EXACT


def kronecker(tags: frozenset[str]) -> Expect:
    if "two orientations" in tags:
        return Expect.REFUSED
    return Expect.EITHER if "other parameters" in tags else ggn(tags)


def average(tags: frozenset[str]) -> Expect:
    if "chain" not in tags or tags & {"extra axes", "groups", "reused", "other parameters"}:
        return Expect.REFUSED
    return Expect.EITHER if "special loss" in tags else Expect.EXACT


def average_of_ggn(tags: frozenset[str]) -> Expect:
    return ggn(tags) if average(tags) is Expect.EXACT else average(tags)


def average_with_residual(tags: frozenset[str]) -> Expect:
    return Expect.EITHER if "dense residual" in tags else average(tags)


def average_with_positive_residual(tags: frozenset[str]) -> Expect:
    return ggn(tags) if average_with_residual(tags) is Expect.EXACT else average_with_residual(tags)


def product(tags: frozenset[str]) -> Expect:
    return Expect.EITHER if "chain" not in tags or tags & {"reused", "special loss"} else Expect.EXACT


def product_of_ggn(tags: frozenset[str]) -> Expect:
    return ggn(tags) if product(tags) is Expect.EXACT else product(tags)


def positive_product(tags: frozenset[str]) -> Expect:
    if "chain" not in tags or tags & {"reused", "dense residual"}:
        return Expect.REFUSED
    return product_of_ggn(tags)


@dataclass(frozen=True)
class Quantity:
    """What there is to know about an extension: how to make it, its field, how to check its values, what it does on which case."""

    make: Callable[[], BackpropExtension]
    field: str
    check: Check
    expect: Callable[[frozenset[str]], Expect] = exact
    batches: tuple[int, ...] = (1, 3)
    refusal: tuple[type[Exception], ...] = (NotImplementedError, LossValueError)


def make_hbp(curvature: str, loss: str, backprop: str) -> Callable[[], BackpropExtension]:
    return lambda: extensions.HBP(curvature, loss, backprop, hbp.ExpectationApproximation.BOTEV_MARTENS)


SUM, EXACT = hbp.LossHessianStrategy.SUM, hbp.LossHessianStrategy.EXACT
SQRT, AVERAGE = hbp.BackpropStrategy.SQRT, hbp.BackpropStrategy.BATCH_AVERAGE
GGN, HESSIAN, PCH_ABS, PCH_CLIP = hbp.Curvature.GGN, hbp.Curvature.HESSIAN, hbp.Curvature.PCH_ABS, hbp.Curvature.PCH_CLIP


def sum_batch(per_sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.sum(0) for name, value in per_sample.items()}


def recursion(residual: Callable[[Tensor], Tensor] | None) -> Callable[[Oracle], dict[str, list[Tensor]]]:
    return lambda oracle: oracle.recursion(residual, average=True)


def make_pchmp(modify: str, residual: Callable[[Tensor], Tensor]) -> Quantity:
    check = products(lambda oracle: oracle.recursion(residual, average=False))
    refusal = (NotImplementedError, ValueError)  # a residual that is no diagonal is a ValueError
    return Quantity(lambda: extensions.PCHMP(modify=modify), "pchmp", check, positive_product, refusal=refusal)


QUANTITIES = {
    "BatchGrad": Quantity(extensions.BatchGrad, "grad_batch", tensors(lambda o: o.grad_batch)),
    "BatchL2Grad": Quantity(extensions.BatchL2Grad, "batch_l2", tensors(lambda o: o.batch_l2)),
    "SumGradSquared": Quantity(extensions.SumGradSquared, "sum_grad_squared", tensors(lambda o: o.sum_grad_squared)),
    "Variance": Quantity(extensions.Variance, "variance", tensors(lambda o: o.variance)),
    "DiagGGNExact": Quantity(extensions.DiagGGNExact, "diag_ggn_exact", tensors(lambda o: sum_batch(o.diag_ggn_batch(o.hessian_exact))), ggn),
    "BatchDiagGGNExact": Quantity(extensions.BatchDiagGGNExact, "diag_ggn_exact_batch", tensors(lambda o: o.diag_ggn_batch(o.hessian_exact)), ggn),
    "DiagGGNMC": Quantity(
        lambda: extensions.DiagGGNMC(mc_samples=MC),
        "diag_ggn_mc",
        for_some_order_of_draws(lambda o, values, H: all_close(values, sum_batch(o.diag_ggn_batch(H)))),
        ggn,
    ),
    "BatchDiagGGNMC": Quantity(
        lambda: extensions.BatchDiagGGNMC(mc_samples=MC),
        "diag_ggn_mc_batch",
        for_some_order_of_draws(lambda o, values, H: all_close(values, o.diag_ggn_batch(H))),
        ggn,
    ),
    "SqrtGGNExact": Quantity(
        extensions.SqrtGGNExact, "sqrt_ggn_exact", lambda o, values: grams(o, values, o.ggn_per_sample(o.hessian_exact), total_width(o)), ggn
    ),
    "SqrtGGNMC": Quantity(
        lambda: extensions.SqrtGGNMC(mc_samples=MC),
        "sqrt_ggn_mc",
        for_some_order_of_draws(lambda o, values, H: grams(o, values, o.ggn_per_sample(H), MC * len(o.problem.terms))),
        ggn,
    ),
    "DiagHessian": Quantity(extensions.DiagHessian, "diag_h", tensors(lambda o: sum_batch(o.diag_h_batch)), hessian_diagonal),
    "BatchDiagHessian": Quantity(extensions.BatchDiagHessian, "diag_h_batch", tensors(lambda o: o.diag_h_batch), hessian_diagonal),
    "KFAC": Quantity(
        lambda: extensions.KFAC(mc_samples=MC),
        "kfac",
        for_some_order_of_draws(kronecker_close),
        kronecker,
    ),
    "KFLR": Quantity(extensions.KFLR, "kflr", lambda o, values: kronecker_close(o, values, o.hessian_exact), kronecker),
    "KFRA": Quantity(extensions.KFRA, "kfra", factors(recursion(None)), average_of_ggn),
    "HBP, square root": Quantity(make_hbp(GGN, EXACT, SQRT), "hbp", lambda o, values: kronecker_close(o, values, o.hessian_exact), kronecker),
    "HBP, GGN": Quantity(make_hbp(GGN, SUM, AVERAGE), "hbp", factors(recursion(None)), average_of_ggn),
    "HBP, Hessian": Quantity(make_hbp(HESSIAN, SUM, AVERAGE), "hbp", factors(recursion(identity)), average_with_residual),
    "HBP, PCH clip": Quantity(make_hbp(PCH_CLIP, SUM, AVERAGE), "hbp", factors(recursion(clip)), average_with_positive_residual),
    "HBP, PCH abs": Quantity(make_hbp(PCH_ABS, SUM, AVERAGE), "hbp", factors(recursion(torch.abs)), average_with_positive_residual),
    "HMP": Quantity(extensions.HMP, "hmp", products(lambda o: o.hessian_blocks), product),
    "GGNMP": Quantity(extensions.GGNMP, "ggnmp", products(lambda o: o.ggn_blocks(o.hessian_exact)), product_of_ggn),
    "PCHMP, clip": make_pchmp("clip", clip),
    "PCHMP, abs": make_pchmp("abs", torch.abs),
}


@cache
def oracle_of(case: str, batch: int) -> Oracle:
    return Oracle(CASES[case].build(batch))


def run(problem: Problem, *active: BackpropExtension, seed: int = 0, **options: object) -> None:
    """Extend everything and run a backward pass with extensions."""
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*active, **options):
        problem.loss(problem.outputs(seed)).backward()


def collect(problem: Problem, field: str) -> dict[str, Value]:
    return {name: getattr(param, field) for name, param in problem.model.named_parameters() if hasattr(param, field)}


# --- tests ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 3])
def test_against_oracle(case: str, batch: int) -> None:
    """Each extension alone that refuses the case, or cannot be beside the others."""
    together = together_on(case, batch)
    check_each(case, batch, {name: quantity for name, quantity in QUANTITIES.items() if name not in together})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 3])
def test_alone_against_oracle(case: str, batch: int) -> None:
    """Each extension alone that can be beside the others, too."""
    check_each(case, batch, together_on(case, batch))


def together_on(case: str, batch: int) -> dict[str, Quantity]:
    """Quantities that are exact on a case and can be computed in one pass: of those that save to one attribute, one."""
    exact = {name: q for name, q in QUANTITIES.items() if q.expect(CASES[case].tags) is Expect.EXACT and batch in q.batches}
    return {name: quantity for name, quantity in exact.items() if not name.startswith(("HBP", "PCHMP, abs"))}


def check_each(case: str, batch: int, quantities: dict[str, Quantity]) -> None:
    """Check some extensions in a pass of its own each: one test for all, as tens of thousands of tests cost more than what they run."""
    failures: dict[str, Exception] = {}
    for extension, quantity in quantities.items():
        try:
            check_alone(quantity, case, batch)
        except Exception as failure:  # noqa: BLE001
            failures[extension] = failure
    if failures:
        raise AssertionError(f"{len(failures)} extensions fail: {failures}") from next(iter(failures.values()))


def check_alone(quantity: Quantity, case: str, batch: int) -> None:
    problem, expect = CASES[case].build(batch), quantity.expect(CASES[case].tags)
    try:
        run(problem, quantity.make())
    except quantity.refusal:
        if expect is Expect.EXACT:
            raise
        assert not collect(problem, quantity.field), "a refused pass left results behind"
        return
    assert expect is not Expect.REFUSED, "a value where there is no definition"
    quantity.check(oracle_of(case, batch), collect(problem, quantity.field))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 3])
def test_gradient_is_that_of_autograd(case: str, batch: int) -> None:
    """Neither recording nor extensions change the gradient, frozen parameters stay bare, per-sample gradients add up."""
    problem, plain = CASES[case].build(batch), CASES[case].build(batch)
    plain.loss(plain.outputs()).backward()
    convex = not any("not convex" in tag for tag in CASES[case].tags)
    run(problem, extensions.BatchGrad(), extensions.BatchL2Grad(), *[extensions.DiagGGNExact()][:convex])
    for param, expected in zip(problem.model.parameters(), plain.model.parameters(), strict=True):
        if not param.requires_grad:
            assert param.grad is None
            assert not vars(param)
        else:
            assert torch.equal(param.grad, expected.grad)
            close(param.grad_batch.sum(0), param.grad)


@pytest.mark.parametrize("case", every_second(CASES))
@pytest.mark.parametrize("batch", [1, 3])
def test_all_extensions_at_once(case: str, batch: int) -> None:
    """Extensions do not disturb each other, and the sampled ones share one draw."""
    problem, oracle, active = CASES[case].build(batch), oracle_of(case, batch), together_on(case, batch)
    run(problem, *(quantity.make() for quantity in active.values()))
    for quantity in active.values():
        quantity.check(oracle, collect(problem, quantity.field))


@pytest.mark.parametrize("case", every_second(CASES))
def test_results_belong_to_the_user(case: str) -> None:
    """Whoever overwrites a result, in the extension hook or later, changes neither the gradient nor other results."""
    problem, plain = CASES[case].build(3), CASES[case].build(3)
    plain.loss(plain.outputs()).backward()
    names = ["BatchGrad", "SumGradSquared", "Variance", "BatchDiagGGNExact", "SqrtGGNExact", "DiagGGNMC", "KFAC", "KFLR", "BatchDiagHessian"]
    active = {name: QUANTITIES[name] for name in names if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT}
    oracle, found = oracle_of(case, 3), {}
    labels = {param: name for name, param in problem.model.named_parameters()}

    def hook(module: Module) -> None:
        for param in module.parameters(recurse=False):
            for quantity in active.values():
                value = vars(param).get(quantity.field)
                if value is not None and (quantity.field, labels[param]) not in found:
                    found[quantity.field, labels[param]] = deepcopy(value)
                    for tensor in flat([value]):
                        tensor.fill_(torch.nan)

    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*(quantity.make() for quantity in active.values()), extension_hook=hook):
        problem.loss(problem.outputs()).backward()
    for quantity in active.values():
        quantity.check(oracle, {name: found[quantity.field, name] for name in labels.values() if (quantity.field, name) in found})
    for param, expected in zip(problem.model.parameters(), plain.model.parameters(), strict=True):
        assert param.grad is expected.grad or torch.equal(param.grad, expected.grad)


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("case", ["net: Conv1d", "bare linear", "Embedding"])
def test_results_of_equal_extensions_are_apart(case: str, memory: int | None) -> None:
    """Two extensions that read the same factors write tensors of their own."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(QUANTITIES["KFLR"].make(), QUANTITIES["HBP, square root"].make(), memory=memory):
        problem.loss(problem.outputs()).backward()
    for name in ("KFLR", "HBP, square root"):
        values = collect(problem, QUANTITIES[name].field)
        QUANTITIES[name].check(oracle, values)
        for factor in flat(list(values.values())):
            factor.fill_(torch.nan)


IN_SINGLE_PRECISION = {
    "BatchGrad": lambda oracle: oracle.grad_batch,
    "Variance": lambda oracle: oracle.variance,
    "DiagGGNExact": lambda oracle: sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)),
    "DiagHessian": lambda oracle: sum_batch(oracle.diag_h_batch),
    "KFLR": lambda oracle: oracle.kronecker(oracle.hessian_exact),
}


def single(value: object) -> object:
    """Round numbers to single precision, also inside a tuple."""
    if isinstance(value, tuple):
        return tuple(map(single, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def single_problem(case: str) -> Problem:
    """Round parameters and data of a row to single precision."""
    problem = CASES[case].build(3)
    for module in (problem.model, *problem.losses):
        module.float()
    problem.x = single(problem.x)
    for term in problem.terms:
        term.target, term.scale = single(term.target), single(term.scale)
    return problem


def draws(problem: Problem) -> bool:
    """Say whether the forward pass draws random numbers, which differ between data types."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    problem.outputs(seed=0)
    return not torch.equal(before, torch.get_rng_state())


def flat(value: Tensor | list) -> Iterator[Tensor]:
    """Go through all tensors of a value."""
    if isinstance(value, Tensor):
        yield value.detach()
    else:
        for one in value:
            yield from flat(one)


@pytest.mark.parametrize("case", every_second(CASES))
def test_single_precision(case: str) -> None:
    """In single precision, all that is exact holds up to 5e-5 of the largest entry.

    Rounding is 6e-8 of a number, and these small nets lose less than two digits to cancellation: the largest error of all rows is 6e-6. Three
    things are no error of ours, and are reckoned with:

    * a variance is a difference, so that its rounding is relative to the second moment that is subtracted from;
    * where the truth is zero, as for the bias of keys in an attention, rounding is relative to the other parameters;
    * ``RMSNorm`` adds the rounding unit of its data type by default, so that its value itself depends on the data type, by up to 2e-5.

    Rows that draw random numbers are compared in evaluation mode.
    """
    warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")  # torch uses another library instead
    problem, oracle = single_problem(case), oracle_of(case, 3)
    if draws(problem):
        truth = CASES[case].build(3)
        truth.model.eval()
        problem.model.eval()
        assert not draws(problem)
        oracle = Oracle(truth)
    names = [name for name in IN_SINGLE_PRECISION if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    if any(isinstance(module, LSTM) for module in problem.model.modules()):
        names.remove("DiagHessian")  # in this precision a layer is one fused operation, whose second derivative is not known
    run(problem, *(QUANTITIES[name].make() for name in names))
    for name in names:
        expected, values = IN_SINGLE_PRECISION[name](oracle), collect(problem, QUANTITIES[name].field)
        assert values.keys() == expected.keys()
        largest = {p: [one.abs().amax() for one in flat(value)] for p, value in expected.items()}
        floor = 1e-7 * max(max(sizes) for sizes in largest.values())
        for p, value in values.items():
            moment = oracle.sum_grad_squared[p].amax() / oracle.N if name == "Variance" else 0.0
            for actual, truth, size in zip(flat(value), flat(expected[p]), largest[p], strict=True):
                assert actual.dtype == torch.float32
                assert actual.shape == truth.shape
                error = (actual.double() - truth).abs().amax()
                assert error <= 5e-5 * max(size, moment) + floor, f"{name} of {p}: error {error:.2e}, largest expected entry {size:.2e}"


@pytest.mark.parametrize("case", ["MSE, mean", "residual", "GELU", "LayerNorm", "net: Conv2d", "transformer: attention"])
def test_autocast(case: str) -> None:
    """Under autocast, layers see other tensors than their modules: the graph knows. Results have the parameters' type and bfloat16's precision."""
    problem, truth = CASES[case].build(3, torch.float32), CASES[case].build(3)
    truth.model.load_state_dict(problem.model.state_dict())
    truth.x = problem.x.double()
    for term, other in zip(truth.terms, problem.terms, strict=True):
        term.target = other.target.double() if other.target.is_floating_point() else other.target
    oracle = Oracle(truth)
    for module in (problem.model, *problem.losses):
        extend(module)
    with torch.autocast("cpu", torch.bfloat16):
        loss = problem.loss([out.float() for out in problem.outputs()])
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    for field, truths in (("grad_batch", oracle.grad_batch), ("diag_ggn_exact", sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)))):
        values = collect(problem, field)
        assert values.keys() == truths.keys()
        for name, value in values.items():
            assert value.dtype == torch.float32
            close(value.double(), truths[name], rtol=0.1)


@pytest.mark.parametrize("index", [[0], [2, 0], [1, 1, 2], [-1, 0]], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        *("CE, mean", "CE, 3-d, sum", "BCE, both weights, mean", "MSE, 3-d, mean", "linear twice", "samples second", "extra axis"),
        *("F.cross_entropy, smoothing, weights, 3-d, mean", "folded F.cross_entropy, mean", "log_softmax, classes last"),
    ],
)
def test_subsampling(case: str, index: list[int]) -> None:
    """A list of samples picks per-sample quantities, in its order, with repetition, and normalized as for the full batch."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    run(problem, extensions.BatchGrad(subsampling=index), extensions.SqrtGGNExact(subsampling=index))
    all_close(collect(problem, "grad_batch"), {name: value[index] for name, value in oracle.grad_batch.items()})
    expected = oracle.ggn_per_sample(oracle.hessian_exact)[index]
    grams(oracle, collect(problem, "sqrt_ggn_exact"), expected, total_width(oracle))


@pytest.mark.parametrize("index", [[0], [2, 0], [1, 1, 2]], ids=str)
@pytest.mark.parametrize(
    "case", ["CE, mean", "CE, ignored, 3-d, sum", "BCE, both weights, mean", "MSE, mean", "samples second", "folded F.cross_entropy, mean"]
)
def test_subsampled_draw(case: str, index: list[int]) -> None:
    """Labels are drawn for the chosen samples only, each repetition on its own."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    run(problem, extensions.SqrtGGNMC(mc_samples=MC, subsampling=index))
    (hessian,) = oracle.sampled_hessians(MC, index)
    grams(oracle, collect(problem, "sqrt_ggn_mc"), oracle.ggn_per_sample(hessian, index), MC)


@pytest.mark.parametrize(
    "case",
    [
        *("MSE, mean", "CE, sum", "CE, weights, 3-d, mean", "CE, smoothing, ignored, mean", "BCE, both weights, mean", "two losses on two heads"),
        *("F.cross_entropy, smoothing, mean", "folded F.cross_entropy, mean"),
    ],
)
def test_sampled_quantities_are_unbiased(case: str) -> None:
    """The mean over many draws lies within five standard errors of the exact value, and these are small enough to see a factor of two."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    exact = oracle.hessian_exact
    diagonal, kfac = sum_batch(oracle.diag_ggn_batch(exact)), oracle.kronecker(exact)
    draws: list[dict[str, Tensor]] = []
    for seed in range(40):
        run(problem, extensions.DiagGGNMC(mc_samples=50), extensions.KFAC(mc_samples=50), seed=seed)
        draws.append({name: (p.diag_ggn_mc.flatten(), p.kfac[0].flatten()) for name, p in problem.model.named_parameters()})
    for name in oracle.params:
        for i, expected in enumerate((diagonal[name].flatten(), kfac[name][0].flatten())):
            samples = torch.stack([draw[name][i] for draw in draws])
            error = samples.std(0) / len(samples) ** 0.5
            assert error.amax() < 0.1 * expected.abs().amax()
            assert ((samples.mean(0) - expected).abs() <= 5 * error + 1e-12).all()


def test_same_seed_same_draw() -> None:
    """Sampled extensions that run one after the other under one seed draw the same labels."""
    problem = CASES["CE, mean"].build(3)
    run(problem, extensions.DiagGGNMC(mc_samples=MC))
    run(problem, extensions.BatchDiagGGNMC(mc_samples=MC))
    for param in problem.model.parameters():
        close(param.diag_ggn_mc_batch.sum(0), param.diag_ggn_mc)


@pytest.mark.parametrize("extension", QUANTITIES)
def test_results_are_overwritten(extension: str) -> None:
    """A second pass on the same model replaces the results of the first."""
    quantity, problem, oracle = QUANTITIES[extension], CASES["Tanh"].build(1), oracle_of("Tanh", 1)
    active = quantity.make()
    for _ in range(2):
        run(problem, active)
        quantity.check(oracle, collect(problem, quantity.field))


def test_short_names() -> None:
    """The short names give the same memory; what was written last has precedence."""
    problem = CASES["CE, mean"].build(3)
    run(problem, extensions.Variance(), extensions.DiagGGNMC())
    for param in problem.model.parameters():
        assert type(param.variance) is Tensor and param.variance.data_ptr() == param.var.data_ptr()
        assert param.diag_ggn is param.diag_ggn_mc
    run(problem, extensions.DiagGGNExact())
    for param in problem.model.parameters():
        assert param.diag_ggn is param.diag_ggn_exact


@pytest.mark.parametrize("case", ["stack of matrices", "stack of matrices, broadcast", "stack of matrices on positions"])
def test_stacks_of_matrices_have_factors(case: str) -> None:
    """A pair for each matrix, however it is written."""
    problem = CASES[case].build(3)
    run(problem, QUANTITIES["KFLR"].make())
    oracle = Oracle(CASES[case].build(3))
    factors_close(problem.model.stack.kflr, oracle.kronecker(oracle.hessian_exact)["stack"])
