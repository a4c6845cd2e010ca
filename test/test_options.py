"""Options of the extensions: subsets of samples, choices of HBP, number of draws, names; and inputs and data types of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from cases import CASES
from oracle import LayerUses, Oracle, Problem, clip, flatten_heads, identity, products
from table import classify, default_dtype, every_second
from test_extensions import (
    QUANTITIES,
    Expect,
    all_close,
    all_factors_close,
    close,
    collect,
    ggn,
    grams,
    hessian_diagonal,
    oracle_of,
    run,
    total_width,
)
from torch import Tensor, einsum, nn, randn
from torch.nn import Flatten, Linear, Parameter, Sequential, Sigmoid, Tanh

from backpack import backpack, extend, extensions
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.secondorder.hbp import HBP, BackpropStrategy, Curvature, ExpectationApproximation, LossHessianStrategy
from backpack.utils.errors import ArgumentError, ArgumentTypeError

pytestmark = pytest.mark.filterwarnings("error")

MC = 2
PerSample = dict[str, Tensor]


def per_parameter(values: PerSample, function: Callable[[Tensor], Tensor]) -> PerSample:
    return {name: function(value) for name, value in values.items()}


# --- subsampling ------------------------------------------------------------------------------------------------------------------------------

FIRST_ORDER_AND_GGN: dict[str, tuple[type[BackpropExtension], Callable[[Oracle], PerSample], Callable[[Tensor], Tensor]]] = {
    "grad_batch": (extensions.BatchGrad, lambda o: o.grad_batch, identity),
    "batch_l2": (extensions.BatchL2Grad, lambda o: o.batch_l2, identity),
    "sum_grad_squared": (extensions.SumGradSquared, lambda o: o.grad_batch, lambda g: g.square().sum(0)),
    "variance": (extensions.Variance, lambda o: o.grad_batch, lambda g: (g - g.mean(0)).square().mean(0)),
    "diag_ggn_exact": (extensions.DiagGGNExact, lambda o: o.diag_ggn_batch(o.hessian_exact), lambda d: d.sum(0)),
    "diag_ggn_exact_batch": (extensions.BatchDiagGGNExact, lambda o: o.diag_ggn_batch(o.hessian_exact), identity),
}
HESSIAN = {
    "diag_h": (extensions.DiagHessian, lambda o: o.diag_h_batch, lambda d: d.sum(0)),
    "diag_h_batch": (extensions.BatchDiagHessian, lambda o: o.diag_h_batch, identity),
}
SUBSETS = [[0], [2, 0], [1, 1, 2], [-1, 0], [2, -3, 0, 0, 2]]
SUBSAMPLED = [
    "logreg",
    "CE, mean",
    "CE, ignored, 3-d, sum",
    "CE, smoothing, weights, mean",
    "BCE, both weights, mean",
    "BCE, sample weight, mean",
    "MSE, 4-d, mean",
    "weighted sum of CE, 3-d",
    "two losses on one output",
    "two losses on two heads",
    "model called twice",
    "extra axis",
    "PReLU, extra axis",
    "linear twice",
    "linear twice, side by side",
    "tied branches",
    "residual in place, extra axis",
    "samples second",
    "samples second, square",
    "samples folded",
    "class token",
    "position embedding",
    "bare scalar",
    "layer norm",
    "fused attention",
    "smooth branches",
]


CONVEX = [name for name, case in CASES.items() if ggn(case.tags) is Expect.EXACT]


@pytest.mark.parametrize("case", every_second(sorted(set(CONVEX) - set(SUBSAMPLED))))
def test_subsampling_of_other_cases(case: str) -> None:
    test_subsampling(case, [2, 0, 0])


@pytest.mark.parametrize(("case", "index"), list(product(SUBSAMPLED, SUBSETS)), ids=str)
def test_subsampling(case: str, index: list[int]) -> None:
    """Samples are picked in the order given, with repetition, normalized as for the full batch; others may use all samples beside."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    chosen = FIRST_ORDER_AND_GGN | (HESSIAN if hessian_diagonal(CASES[case].tags) is Expect.EXACT else {})
    run(problem, extensions.SqrtGGNExact(subsampling=index), *(make(subsampling=index) for make, _, _ in chosen.values()))
    for field, (_, samples, reduce) in chosen.items():
        expected = per_parameter(samples(oracle), lambda value, reduce=reduce: reduce(value[index]))
        all_close(collect(problem, field), expected)
    grams(oracle, collect(problem, "sqrt_ggn_exact"), oracle.ggn_per_sample(oracle.hessian_exact)[index], total_width(oracle))


@pytest.mark.parametrize("case", ["CE, mean", "samples second"])
def test_subsets_beside_each_other(case: str) -> None:
    """Extensions with different subsets, or with none, do not disturb each other."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    subsets = dict(zip(FIRST_ORDER_AND_GGN | HESSIAN, [[0], None, [1, 1], [0, 2], [2], None, [-1], [0, 0, 1]], strict=True))
    run(problem, *(make(subsampling=subsets[field]) for field, (make, _, _) in (FIRST_ORDER_AND_GGN | HESSIAN).items()))
    for field, (_, samples, reduce) in (FIRST_ORDER_AND_GGN | HESSIAN).items():
        index = [0, 1, 2] if subsets[field] is None else subsets[field]
        all_close(collect(problem, field), per_parameter(samples(oracle), lambda value, index=index, reduce=reduce: reduce(value[index])))


@pytest.mark.parametrize("case", ["CE, mean", "samples second"])
def test_empty_subset(case: str) -> None:
    """Nothing per sample, sums of nothing."""
    problem, chosen = CASES[case].build(3), FIRST_ORDER_AND_GGN | HESSIAN
    run(problem, extensions.SqrtGGNExact(subsampling=[]), *(make(subsampling=[]) for make, _, _ in chosen.values()))
    for param in problem.model.parameters():
        for field in ("grad_batch", "diag_ggn_exact_batch", "diag_h_batch"):
            assert getattr(param, field).shape == (0, *param.shape)
        assert param.batch_l2.shape == (0,)
        assert param.sqrt_ggn_exact.shape[1:] == (0, *param.shape)
        for field in ("sum_grad_squared", "variance", "diag_ggn_exact", "diag_h"):
            assert torch.equal(getattr(param, field), torch.zeros_like(param))


@pytest.mark.parametrize("index", [*SUBSETS, [1, -2, 1]], ids=str)
@pytest.mark.parametrize("case", ["CE, mean", "CE, ignored, 3-d, sum", "BCE, both weights, mean", "MSE, mean", "linear twice", "samples second"])
def test_subsampled_draw(case: str, index: list[int]) -> None:
    """One draw for the chosen samples only, shared by all that ask for it; repetitions are drawn independently."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    sampled = (extensions.DiagGGNMC, extensions.BatchDiagGGNMC, extensions.SqrtGGNMC)
    run(problem, *(make(mc_samples=MC, subsampling=index) for make in sampled))
    (hessian,) = oracle.sampled_hessians(MC, index)
    jacs = per_parameter(oracle.jac, lambda J: J[index])
    batch = {name: einsum("ndp,nde,nep->np", J, hessian, J).reshape(-1, *oracle.params[name].shape) for name, J in jacs.items()}
    all_close(collect(problem, "diag_ggn_mc_batch"), batch)
    all_close(collect(problem, "diag_ggn_mc"), per_parameter(batch, lambda d: d.sum(0)))
    grams(oracle, collect(problem, "sqrt_ggn_mc"), oracle.ggn_per_sample(hessian, index), MC)


def test_repetitions_are_drawn_independently() -> None:
    problem = CASES["MSE, mean"].build(3)
    run(problem, extensions.SqrtGGNMC(subsampling=[1, 1]))
    for param in problem.model.parameters():
        assert not torch.allclose(param.sqrt_ggn_mc[:, 0], param.sqrt_ggn_mc[:, 1])


# --- options of HBP ---------------------------------------------------------------------------------------------------------------------------

SUM, EXACT, SAMPLING = LossHessianStrategy.SUM, LossHessianStrategy.EXACT, LossHessianStrategy.SAMPLING
SQRT, AVERAGE = BackpropStrategy.SQRT, BackpropStrategy.BATCH_AVERAGE
BOTEV_MARTENS, CHEN = ExpectationApproximation.BOTEV_MARTENS, ExpectationApproximation.CHEN
COMBINATIONS = list(product(Curvature.CHOICES, LossHessianStrategy.CHOICES, BackpropStrategy.CHOICES, ExpectationApproximation.CHOICES))


class SampledHBP(HBP):
    """Square roots by sampling need to know the number of draws."""

    def get_num_mc_samples(self) -> int:
        return MC


@pytest.mark.parametrize("options", COMBINATIONS, ids="-".join)
def test_combinations(options: tuple[str, str, str, str]) -> None:
    """Sums go with averages, square roots with the generalized Gauss-Newton; what exists runs and knows its options."""
    curvature, loss, backprop, approximation = options
    if (loss == SUM) != (backprop == AVERAGE) or (backprop == SQRT and curvature != Curvature.GGN):
        with pytest.raises(ValueError, match="goes with|Square roots"):
            HBP(*options)
        return
    hbp = HBP(*options, savefield="factors")
    assert (hbp.get_curv_type(), hbp.get_loss_hessian_strategy(), hbp.get_backprop_strategy(), hbp.get_ea_strategy()) == options
    assert hbp.savefield == "factors"
    problem = CASES["Sigmoid"].build(3)
    run(problem, hbp)
    for name, param in problem.model.named_parameters():
        assert [len(factor) for factor in param.factors] == list(param.shape), name
        assert all(factor.abs().sum() > 0 for factor in param.factors)


def test_names_of_choices() -> None:
    assert (SUM, EXACT, SAMPLING) == ("sum", "exact", "sampling")
    assert (SQRT, AVERAGE) == ("sqrt", "average")
    assert (BOTEV_MARTENS, CHEN) == ("E[J^T E(H) J]", "E(J^T) E(H) E(J)")
    assert Curvature.CHOICES == ["hessian", "ggn", "pch-abs", "pch-clip"]
    assert BackpropStrategy.is_sqrt(SQRT)
    assert not BackpropStrategy.is_sqrt(AVERAGE)
    assert BackpropStrategy.is_batch_average(AVERAGE)
    assert ExpectationApproximation.should_average_param_jac(CHEN)
    assert not ExpectationApproximation.should_average_param_jac(BOTEV_MARTENS)
    checks = (LossHessianStrategy.check_exists, BackpropStrategy.is_sqrt, ExpectationApproximation.should_average_param_jac)
    for check in (*checks, Curvature.require_residual, Curvature.is_pch):
        with pytest.raises(AttributeError, match="nothing like that"):
            check("nothing like that")


@pytest.mark.parametrize("case", ["CE, mean", "MSE, 3-d, sum", "BCE, both weights, mean", "linear twice", "extra axis", "samples folded"])
def test_sampled_hbp(case: str) -> None:
    """With the number of draws that a subclass names, the same draw as KFAC, and the same factors."""
    problem = CASES[case].build(3)
    run(problem, SampledHBP(Curvature.GGN, SAMPLING, SQRT, BOTEV_MARTENS), extensions.KFAC(mc_samples=MC))
    for param in problem.model.parameters():
        assert all(torch.equal(one, other) for one, other in zip(param.hbp, param.kfac, strict=True))
    QUANTITIES["KFAC"].check(oracle_of(case, 3), collect(problem, "hbp"))


def test_one_draw_unless_a_subclass_says_otherwise() -> None:
    problem = CASES["CE, mean"].build(3)
    run(problem, HBP(Curvature.GGN, SAMPLING, SQRT, BOTEV_MARTENS), extensions.KFAC())
    for param in problem.model.parameters():
        assert all(torch.equal(one, other) for one, other in zip(param.hbp, param.kfac, strict=True))


def mean_inputs(problem: Problem) -> dict[str, list[Tensor]]:
    """Input-side factors by the definition of Chen et al.: the outer product of the input's mean over samples.

    Positions (extra axes, rows of a sample in a folded batch, further uses) are summed over, as in the factors of the mean of outer products.
    One factor for each group.
    """
    with LayerUses() as mode:
        flat = flatten_heads(problem.outputs())
    names = {param: name for name, param in problem.model.named_parameters()}
    factors: dict[str, list[Tensor]] = {}
    for use in (*products(flat), *mode.uses):
        means = [rows.reshape(len(problem.x), -1, rows.shape[-1]).mean(0) for rows in use.inputs()]
        before = factors.get(names[use.weight], [0] * len(means))
        factors[names[use.weight]] = [old + mean.T @ mean for old, mean in zip(before, means, strict=True)]
    return factors


def with_inputs(expected: dict[str, list], inputs: dict[str, list[Tensor]]) -> dict[str, list]:
    """Replace the input-side factors."""
    replaced = dict(expected)
    for name, factors in inputs.items():
        pairs = expected[name] if type(expected[name][0]) is list else [expected[name]]
        pairs = [[pair[0], factor] for pair, factor in zip(pairs, factors, strict=True)]
        replaced[name] = pairs if len(pairs) > 1 else pairs[0]
    return replaced


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize(
    "case",
    ["logreg", "Sigmoid", "CE, 3-d, mean", "linear twice", "residual", "extra axis", "two extra axes", "samples folded"]
    + ["net: Conv2d", "net: ConvTranspose1d", "net: groups, Conv1d"],
)
def test_mean_input_of_square_roots(case: str, N: int) -> None:
    """``E(J^T) E(H) E(J)``: the input-side factor is that of the mean input, the output side does not change."""
    problem, oracle = CASES[case].build(N), oracle_of(case, N)
    run(problem, HBP(Curvature.GGN, EXACT, SQRT, CHEN))
    expected, inputs = oracle.kronecker(oracle.hessian_exact), mean_inputs(CASES[case].build(N))
    all_factors_close(collect(problem, "hbp"), with_inputs(expected, inputs))


@pytest.mark.parametrize("residual", [None, identity], ids=["ggn", "hessian"])
@pytest.mark.parametrize("case", ["logreg", "Sigmoid", "ELU", "CE, weights, mean", "nested containers", "net: Conv2d", "net: ConvTranspose1d"])
def test_mean_input_of_averages(case: str, residual: Callable[[Tensor], Tensor] | None) -> None:
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    run(problem, HBP(Curvature.GGN if residual is None else Curvature.HESSIAN, SUM, AVERAGE, CHEN))
    expected, inputs = oracle.recursion(residual, average=True), mean_inputs(CASES[case].build(3))
    all_factors_close(collect(problem, "hbp"), with_inputs(expected, inputs))


@pytest.mark.parametrize(("curvature", "modify"), [(Curvature.PCH_CLIP, clip), (Curvature.PCH_ABS, torch.abs)], ids=["clip", "abs"])
@pytest.mark.parametrize("case", ["Sigmoid", "ELU", "SiLU", "Tanhshrink"])
def test_residuals_of_a_batch(case: str, curvature: str, modify: Callable[[Tensor], Tensor]) -> None:
    """The residual of a batch is summed over the samples first, and modified then; in these nets it enters once, at the first layer."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    run(problem, HBP(curvature, SUM, AVERAGE, BOTEV_MARTENS))
    without, full = (oracle.recursion(residual, average=True) for residual in (None, identity))
    expected = {name: [pair[0] + modify(full[name][0] - pair[0]), *pair[1:]] for name, pair in without.items()}
    all_factors_close(collect(problem, "hbp"), expected)


# --- draws ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["MSE, mean", "CE, 3-d, mean", "BCE, weight, sum", "two losses on two heads"])
@pytest.mark.parametrize("mc_samples", [1, 5])
def test_number_of_draws(case: str, mc_samples: int) -> None:
    """The mean over the draws is taken: everything with the same number shares one draw, divided by it."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    sampled = (extensions.SqrtGGNMC, extensions.DiagGGNMC, extensions.BatchDiagGGNMC, extensions.KFAC)
    active = [make(mc_samples=mc_samples) for make in sampled]
    assert {extension.get_num_mc_samples() for extension in active} == {mc_samples}
    run(problem, *active)
    orders = oracle.sampled_hessians(mc_samples)
    columns = mc_samples * len(problem.terms)
    S = torch.cat([value.flatten(2) for value in collect(problem, "sqrt_ggn_mc").values()], dim=2)
    gram = einsum("vnp,vnq->npq", S, S)
    (hessian,) = (H for H in orders if torch.allclose(gram, oracle.ggn_per_sample(H)))
    grams(oracle, collect(problem, "sqrt_ggn_mc"), oracle.ggn_per_sample(hessian), columns)
    for param in problem.model.parameters():
        close(param.diag_ggn_mc, param.sqrt_ggn_mc.square().sum((0, 1)), rtol=1e-14)
        close(param.diag_ggn_mc_batch, param.sqrt_ggn_mc.square().sum(0), rtol=1e-14)
    all_factors_close({n: [f[0]] for n, f in collect(problem, "kfac").items()}, {n: [f[0]] for n, f in oracle.kronecker(hessian).items()})


def test_different_numbers_are_drawn_apart() -> None:
    problem = CASES["MSE, mean"].build(3)
    run(problem, extensions.DiagGGNMC(mc_samples=1), extensions.SqrtGGNMC(mc_samples=2))
    for param in problem.model.parameters():
        for columns in (param.sqrt_ggn_mc, param.sqrt_ggn_mc[:1] * 2**0.5, param.sqrt_ggn_mc[1:] * 2**0.5):
            assert not torch.allclose(param.diag_ggn_mc, columns.square().sum((0, 1)))


@pytest.mark.parametrize("case", ["MSE, mean", "CE, mean", "BCE, mean", "two losses on two heads", "functional tanh"])
def test_one_after_the_other(case: str) -> None:
    """Under the same seed the same is drawn, whoever asks."""
    problem = CASES[case].build(3)
    active = (extensions.DiagGGNMC(mc_samples=3), extensions.BatchDiagGGNMC(mc_samples=3), extensions.SqrtGGNMC(mc_samples=3))
    for extension in active:
        run(problem, extension, seed=5)
    for param in problem.model.parameters():
        close(param.diag_ggn_mc, param.sqrt_ggn_mc.square().sum((0, 1)), rtol=1e-14)
        close(param.diag_ggn_mc_batch, param.sqrt_ggn_mc.square().sum(0), rtol=1e-14)


RNG_CASES = ["MSE, mean", "CE, mean", "PReLU, extra axis", "attention", "class token, repeated", "own layer", "layer norm", "samples folded"]


@pytest.mark.parametrize("case", RNG_CASES)
def test_no_random_numbers_are_consumed(case: str) -> None:
    """Neither ``extend`` nor passes with extensions that draw nothing touch the generator."""
    for quantity in [*QUANTITIES.values(), None]:
        problem = CASES[case].build(3)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        for module in (problem.model, *problem.losses):
            extend(module)
        loss = problem.loss([problem.output(problem.model, problem.x)])
        assert torch.equal(torch.get_rng_state(), before)
        sampled = quantity is not None and ("mc" in quantity.field or quantity.field == "kfac")
        with backpack() if quantity is None or sampled else backpack(quantity.make()):
            try:
                loss.backward()
            except (NotImplementedError, ValueError):
                assert case not in {"MSE, mean", "CE, mean"}
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("case", ["MSE, mean", "CE, mean", "BCE, mean", "attention"])
def test_one_draw_is_all_that_is_consumed(case: str) -> None:
    """After a pass the generator stands where one call of ``sample`` leaves it."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    run(problem, extensions.DiagGGNMC(mc_samples=MC), extensions.SqrtGGNMC(mc_samples=MC), extensions.KFAC(mc_samples=MC), extensions.DiagGGNExact())
    state = torch.get_rng_state()
    torch.set_rng_state(oracle._rng_after_forward)
    oracle._sampled_columns(0, MC, [0, 1, 2])
    assert torch.equal(state, torch.get_rng_state())


# --- products with curvature matrices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modify", ["clip", "abs"])
def test_modifications(modify: str) -> None:
    """What happens to negative second derivatives makes a difference, and is what the name says."""
    extension = extensions.PCHMP(modify=modify)
    assert extension.get_modification_mode() == modify
    assert extensions.PCHMP().get_modification_mode() == "clip"
    problem = CASES["Sigmoid"].build(3)
    run(problem, extension, extensions.HMP(), extensions.GGNMP())
    QUANTITIES[f"PCHMP, {modify}"].check(oracle_of("Sigmoid", 3), collect(problem, "pchmp"))
    weight = next(problem.model.parameters())
    vector = torch.ones_like(weight)
    assert not torch.allclose(weight.pchmp(vector), weight.hmp(vector))
    assert not torch.allclose(weight.pchmp(vector), weight.ggnmp(vector))


@pytest.mark.parametrize("case", ["Sigmoid", "PReLU, C parameters", "extra axis, flattened", "logreg", "two losses on one output"])
@pytest.mark.parametrize("V", [None, 1, 3])
def test_number_of_vectors(case: str, V: int | None) -> None:
    """A matrix of any number of columns, or one bare vector."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    try:
        run(problem, extensions.HMP(), extensions.GGNMP())
    except NotImplementedError:
        assert "special loss" in CASES[case].tags
        return
    for field, blocks in (("hmp", oracle.hessian_blocks), ("ggnmp", oracle.ggn_blocks(oracle.hessian_exact))):
        for name, multiply in collect(problem, field).items():
            mat = randn(*([] if V is None else [V]), *oracle.params[name].shape, dtype=torch.float64)
            rows = mat.reshape(-1, oracle.params[name].numel())
            close(multiply(mat).detach(), (rows @ blocks[name]).reshape(mat.shape))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_wrong_shapes(make: type[BackpropExtension]) -> None:
    problem = CASES["Sigmoid"].build(3)
    run(problem, make("product"))
    for param in problem.model.parameters():
        for shape in [(), (1,), (*param.shape, 2), (2, 2, *param.shape), (7,), (*param.shape[:-1], param.shape[-1] + 1), (3, param.numel() + 1)]:
            if shape not in {tuple(param.shape), param.shape[1:]}:
                with pytest.raises(RuntimeError, match="shape"):
                    param.product(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP])
def test_wrong_types(make: type[BackpropExtension]) -> None:
    problem = CASES["Sigmoid"].build(3)
    run(problem, make("product"))
    weight = next(problem.model.parameters())
    wanted = rf"product of 0.weight multiplies tensors \[V, {', '.join(map(str, weight.shape))}\] or .* of torch.float64 on cpu, got "
    for mat, got in (
        (torch.zeros(2, *weight.shape, dtype=torch.float32), rf"\[2, {', '.join(map(str, weight.shape))}\] of torch.float32 on cpu"),
        (torch.zeros_like(weight).to("meta"), "on meta"),
    ):
        with pytest.raises(ArgumentError, match=wanted + ".*" + got):
            weight.product(mat)
    for number in (1.0, [1.0], None):
        with pytest.raises(ArgumentTypeError, match=wanted + rf".*of type {type(number).__name__}"):
            weight.product(number)


@pytest.mark.parametrize("make", [extensions.HMP, extensions.GGNMP, extensions.PCHMP, lambda field: HBP(Curvature.GGN, EXACT, SQRT, CHEN, field)])
def test_savefield(make: Callable[[str], BackpropExtension]) -> None:
    """A name of one's own, and no other."""
    problem = CASES["Sigmoid"].build(3)
    run(problem, make("mine"))
    for param in problem.model.parameters():
        assert vars(param).keys() == {"mine"}


@pytest.mark.parametrize("case", ["Sigmoid", "ReLU, in place", "CE, ignored, 3-d, mean", "dropout, training"])
@pytest.mark.parametrize("later", ["same graph", "next pass", "hessian-vector product"])
def test_products_outlive_the_pass(case: str, later: str) -> None:
    """They work after later passes without them, and when the loss and the graph are gone."""
    problem, oracle = CASES[case].build(3), oracle_of(case, 3)
    for module in (problem.model, *problem.losses):
        extend(module)
    loss = problem.loss(problem.outputs())
    with backpack(extensions.HMP(), extensions.GGNMP()):
        loss.backward(retain_graph=later == "same graph")
    saved = {field: collect(problem, field) for field in ("hmp", "ggnmp")}
    if later == "same graph":
        loss.backward()
    elif later == "next pass":
        with backpack(extensions.BatchGrad()):
            problem.loss(problem.outputs()).backward()
    else:
        parameters = list(problem.model.parameters())
        first = torch.autograd.grad(problem.loss(problem.outputs()), parameters, create_graph=True)
        torch.autograd.grad(first, parameters, first, allow_unused=True)
    del loss
    problem.terms.clear()
    for field, values in saved.items():
        QUANTITIES[field.upper()].check(oracle, values)


# --- data types -------------------------------------------------------------------------------------------------------------------------------

LOW_PRECISION = [
    "MSE, mean",
    "CE, mean",
    "CE, ignored, 3-d, mean",
    "BCE, pos_weight, mean",
    "residual",
    "extra axis",
    "samples second",
    "class token",
]
DETERMINISTIC = [
    name
    for name, quantity in QUANTITIES.items()
    if not ("mc" in quantity.field or quantity.field in {"kfac", "sqrt_ggn_exact", "hmp", "ggnmp", "pchmp"})
]


def tensors_of(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)], ids=str)
@pytest.mark.parametrize("case", LOW_PRECISION)
def test_low_precision(case: str, dtype: torch.dtype, rtol: float) -> None:
    """Quantities are close to those of the same net in double precision: gradients in the type of their parameter, squares in a wider one."""
    for name in DETERMINISTIC:
        quantity = QUANTITIES[name]
        problem, exact = CASES[case].build(3, dtype), CASES[case].build(3)
        exact.model.load_state_dict(problem.model.state_dict())
        exact.x = problem.x.double()
        for term, other in zip(exact.terms, problem.terms, strict=True):
            term.target = other.target.double() if other.target.is_floating_point() else other.target
            for key, buffer in other.module.named_buffers():
                setattr(term.module, key, buffer.double())
        try:
            run(problem, quantity.make())
        except NotImplementedError:
            assert not CASES[case].tags <= {"chain"}
            continue
        run(exact, quantity.make())
        for (key, value), reference in zip(collect(problem, quantity.field).items(), collect(exact, quantity.field).values(), strict=True):
            for actual, expected in zip(tensors_of(value), tensors_of(reference), strict=True):
                assert actual.dtype == (dtype if name == "BatchGrad" else torch.float32), (name, key)
                assert actual.isfinite().all(), (name, key)
                assert (actual.double() - expected).abs().amax() <= rtol * expected.abs().amax() + rtol * 1e-3, (name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["MSE, mean", "CE, mean", "BCE, mean"])
def test_low_precision_of_draws_columns_and_products(case: str, dtype: torch.dtype) -> None:
    problem = CASES[case].build(3, dtype)
    active = ["SqrtGGNExact", "DiagGGNExact", "DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC", "KFAC", "HMP", "GGNMP", "PCHMP, clip"]
    run(problem, *(QUANTITIES[name].make() for name in active))
    rtol = 1e-5 if dtype is torch.float32 else 0.05
    for param in problem.model.parameters():
        for name in active:
            value = getattr(param, QUANTITIES[name].field)
            for part in tensors_of(value(torch.ones_like(param)) if callable(value) else value):
                assert part.dtype == (dtype if name.startswith("Sqrt") or callable(value) else torch.float32)
                assert part.isfinite().all()
        for diagonal, columns in ((param.diag_ggn_exact, param.sqrt_ggn_exact), (param.diag_ggn_mc, param.sqrt_ggn_mc)):
            close(diagonal.double(), columns.double().square().sum((0, 1)), rtol=rtol)


# --- inputs -----------------------------------------------------------------------------------------------------------------------------------


def every_second_entry(x: Tensor) -> Tensor:
    """Lay the tensor out with gaps along the last axis."""
    return torch.stack([x, randn(x.shape, dtype=x.dtype)], dim=-1).flatten(-2)[..., ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every second": every_second_entry,
    "every second sample": lambda x: torch.stack([x, -x], dim=1).flatten(0, 1)[::2],
    "one sample, expanded": lambda x: x[:1].expand(x.shape),
    "one feature, expanded": lambda x: x[..., :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, [1] * x.dim()),
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "requires a gradient": lambda x: x.clone().requires_grad_(),
    "not a leaf": lambda x: 2 * x.clone().requires_grad_(),
    "parameter": lambda x: Parameter(x.clone()),
}
SHAPED = ["Sigmoid", "extra axis", "extra axis, flattened", "two extra axes", "residual on input", "samples second", "samples folded", "dense"]
READ = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagHessian", "KFLR"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SHAPED)
def test_layouts_of_the_input(case: str, layout: str) -> None:
    """How the input lies in memory, and whether it wants a gradient, makes no difference."""
    problem, plain = CASES[case].build(3), CASES[case].build(3)
    problem.x = LAYOUTS[layout](problem.x)
    plain.x = problem.x.detach().clone(memory_format=torch.contiguous_format)
    oracle = Oracle(plain)
    run(problem, *(QUANTITIES[name].make() for name in READ))
    for name in READ:
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))
    if problem.x.requires_grad and problem.x.is_leaf:
        again = CASES[case].build(3)
        again.x = problem.x.detach().clone().requires_grad_()
        again.loss(again.outputs()).backward()
        assert torch.equal(problem.x.grad, again.x.grad)


def channels_last() -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        model = Sequential(Linear(2, 3), Sigmoid(), nn.LeakyReLU(), Linear(3, 1), Tanh(), Flatten(), Linear(12, 4))
        return classify(model, randn(3, 2, 6, 2))


@pytest.mark.parametrize("where", ["input", "weights", "activations"])
def test_channels_last(where: str) -> None:
    """Memory formats and strides of data, parameters and activations make no difference."""
    problem, oracle = channels_last(), Oracle(channels_last())
    if where == "input":
        problem.x = problem.x.to(memory_format=torch.channels_last)
        assert not problem.x.is_contiguous()
    elif where == "weights":
        for module in problem.model:
            if isinstance(module, Linear):
                module.weight = Parameter(module.weight.detach().t().contiguous().t())
    else:
        problem.model[0].register_forward_hook(lambda _module, _args, out: out.to(memory_format=torch.channels_last))
    names = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagHessian", "KFLR"]
    run(problem, *(QUANTITIES[name].make() for name in names))
    for name in names:
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


def test_list_of_samples_that_is_changed_between_passes() -> None:
    """What is drawn follows what is read."""
    model, chosen = extend(Linear(3, 4)), [0, 1]
    x, lossfunc, extension = torch.rand(6, 3), extend(nn.CrossEntropyLoss()), extensions.SqrtGGNMC(subsampling=chosen)
    for _ in range(2):
        with backpack(extension):
            lossfunc(model(x), torch.zeros(6, dtype=torch.long)).backward()
        assert model.weight.sqrt_ggn_mc.shape == (1, 2, 4, 3) and model.weight.sqrt_ggn_mc.flatten(2).any(2).all()
        chosen[:] = [3, 4]
