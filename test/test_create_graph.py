"""Quantities of a pass with ``create_graph=True``: their derivatives with respect to the parameters against difference quotients."""

from __future__ import annotations

from collections.abc import Iterator
from warnings import catch_warnings, simplefilter

import pytest
import torch
from cases import CASES
from cases_nets import Net
from oracle import Oracle, Problem
from table import every_second
from test_extensions import QUANTITIES, Expect, close, collect, ggn, kronecker, run
from torch import Tensor
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, Linear, Module, MSELoss
from torch.nn import functional as F

from backpack import backpack, extend
from backpack.extensions import BatchDiagGGNExact, DiagGGNExact
from backpack.utils.errors import DifferentiationError

pytestmark = pytest.mark.filterwarnings("error", "ignore:Using backward:UserWarning")  # of torch, about create_graph

FIRST_ORDER = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"]
SECOND_ORDER = ["DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagGGNMC"]
KRONECKER = ["KFLR", "KFAC"]
STEP = 5e-7
# torch calls the gradient of a padding row zero, though the row takes part, and does not differentiate through renormalized tables and detach()
OTHER_GRADIENT = {"Embedding, max_norm", "functional embedding, padding", "table at two places", "curved: data in between"}
OTHER_GRADIENT |= {"table as head of positions, and looked up twice"}


def names_of(case: str) -> list[str]:
    """All that is exact on a case and may be differentiable."""
    tags = CASES[case].tags
    second = ggn(tags) is Expect.EXACT
    return FIRST_ORDER + (SECOND_ORDER if second else []) + (KRONECKER if kronecker(tags) is Expect.EXACT else [])


def flat(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from flat(part)


def totals(problem: Problem, names: list[str]) -> dict[str, Tensor]:
    """Sum all entries of each quantity with random weights."""
    found = {}
    for name in names:
        generator = torch.Generator().manual_seed(0)
        values = [tensor for value in collect(problem, QUANTITIES[name].field).values() for tensor in flat(value)]
        found[name] = sum((v * torch.randn(v.shape, generator=generator, dtype=v.dtype)).sum() for v in values)
    return found


def check(case: str) -> dict[str, str]:
    """Compare the derivatives of all quantities along a random direction with difference quotients.

    Returns:
        Name to reason, of those that refuse to be differentiated.
    """
    names, problem = names_of(case), CASES[case].build(3)
    params = [p for p in problem.model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params]
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*(QUANTITIES[name].make() for name in names)):
        outputs = problem.outputs(0)  # held, as users do
        problem.loss(outputs).backward(create_graph=True)
    slopes, refused = {}, {}
    for name, total in totals(problem, names).items():
        try:
            gradients = (
                torch.autograd.grad(total, params, retain_graph=True, allow_unused=True, materialize_grads=True) if total.requires_grad else []
            )
        except (DifferentiationError, RuntimeError) as error:
            assert isinstance(error, DifferentiationError) or "is not implemented" in str(error)  # by torch, which says so
            refused[name] = str(error)
            continue
        slopes[name] = sum(((g * v).sum() for g, v in zip(gradients, direction, strict=False)), torch.zeros(()))
    values = []
    for sign in (1, -1):
        moved = CASES[case].build(3)
        with torch.no_grad():
            for parameter, v in zip((p for p in moved.model.parameters() if p.requires_grad), direction, strict=True):
                parameter.add_(v, alpha=sign * STEP)
        run(moved, *(QUANTITIES[name].make() for name in names))
        values.append(totals(moved, names))
    for name, slope in slopes.items():
        quotient = (values[0][name] - values[1][name]) / (2 * STEP)
        scale = max(abs(quotient), abs(values[0][name]), 1e-3)
        assert abs(slope - quotient) <= 1e-5 * scale, f"{name}: slope {slope:.9g}, difference quotient {quotient:.9g}"
    return refused


@pytest.mark.parametrize("case", ["CE, mean", "MSE, mean", "Sigmoid", "net: Conv1d twice", "LayerNorm twice", "linear twice", "residual in place"])
def test_connected(case: str) -> None:
    """Of these, everything but what is drawn can be differentiated."""
    assert {name for name in check(case) if "MC" not in name and name != "KFAC"} == set()


@pytest.mark.parametrize("case", every_second(sorted(CASES.keys() - OTHER_GRADIENT)))
def test_derivatives_of_quantities(case: str) -> None:
    """What can be differentiated is right, what cannot says so."""
    check(case)


PRODUCTS = {
    "HMP": lambda o: o.hessian_blocks,
    "GGNMP": lambda o: o.ggn_blocks(o.hessian_exact),
    "PCHMP, abs": lambda o: o.recursion(torch.abs, average=False),
}


CHAINS = [(name, case) for name in PRODUCTS for case in ("Sigmoid", "net: Conv2d", "MSE, mean", "F.cross_entropy, weights, mean")]


@pytest.mark.parametrize("name, case", [*CHAINS, ("HMP", "own module without parameters"), ("GGNMP", "own module without parameters")])
def test_products_are_linear_functions(name: str, case: str) -> None:
    """The matrix is constant; what it multiplies is differentiated exactly, as often as one likes."""
    problem = CASES[case].build(3)
    matrices = PRODUCTS[name](Oracle(CASES[case].build(3)))
    run(problem, QUANTITIES[name].make())
    for label, function in collect(problem, QUANTITIES[name].field).items():
        matrix, shape = matrices[label], problem.model.get_parameter(label).shape
        v = torch.randn(2, *shape, dtype=matrix.dtype)
        assert not function(v).requires_grad
        v.requires_grad_()
        product = function(v)
        expected = torch.einsum("pq,vq->vp", matrix, v.detach().flatten(1)).reshape(v.shape)
        close(product.detach(), expected, rtol=1e-7)
        (first,) = torch.autograd.grad((product * v).sum() / 2, v, create_graph=True)
        close(first.detach(), expected, rtol=1e-7)
        (second,) = torch.autograd.grad((first * v.detach()).sum(), v)
        close(second, expected, rtol=1e-7)
        close(torch.func.vmap(function)(v.detach()), expected, rtol=1e-7)
        close(torch.func.vjp(function, v.detach())[1](v.detach())[0], expected, rtol=1e-7)
        with catch_warnings():
            simplefilter("ignore")  # of torch, about its own forward mode
            close(torch.func.jvp(function, (torch.zeros_like(v),), (v.detach(),))[1], expected, rtol=1e-7)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_pass_with_a_graph_refuse_to_be_differentiated(name: str) -> None:
    problem = CASES["Sigmoid"].build(3)
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(QUANTITIES[name].make()):
        problem.loss(problem.outputs(0)).backward(create_graph=True)
    for label, function in collect(problem, QUANTITIES[name].field).items():
        v = torch.randn(problem.model.get_parameter(label).shape, dtype=torch.float64)
        with pytest.raises(DifferentiationError, match=f"of {label} was computed.*create_graph"):
            function(v).square().sum().backward()


ENDS = {
    "added": lambda own, x: own.b(own.a(x).tanh()) + x,
    "stacked": lambda own, x: torch.stack([own.b(own.a(row).tanh()) for row in x]),
    "joined": lambda own, x: torch.cat([own.b(own.a(part).tanh()) for part in x.split(1)]),
}


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
@pytest.mark.parametrize("first", [[], ["DiagHessian"], ["BatchDiagHessian"], ["DiagGGNMC"], ["BatchGrad", "KFAC"]], ids="-".join)
@pytest.mark.parametrize("name", ["DiagGGNExact", "SqrtGGNExact", "KFLR"])
@pytest.mark.parametrize("end", ENDS)
def test_what_one_extension_misses_is_missed_by_all(end: str, name: str, first: list[str]) -> None:
    """The prediction, which nobody holds, was computed by functions: the derivative is right, or refused, whoever else has asked for it."""
    torch.manual_seed(0)
    model, lossfunc = extend(Net(ENDS[end], a=Linear(3, 4), b=Linear(4, 3)).double()), extend(CrossEntropyLoss())
    x, y = torch.rand(2, 3).double(), torch.tensor([0, 2])
    slopes = []
    for kept in (True, False):
        active = [QUANTITIES[other].make() for other in (first if not kept else [])] + [QUANTITIES[name].make()]
        with backpack(*active, retain_graph=True):
            out = model(x)
            loss = lossfunc(out, y)
            if not kept:
                del out
            loss.backward(create_graph=True)
        values = [getattr(p, active[-1].savefield) for p in model.parameters()]
        total = sum(factor.square().sum() for value in values for factor in (value if isinstance(value, list) else [value]))
        try:
            slopes.append(torch.autograd.grad(total, model.a.weight)[0])
        except DifferentiationError:
            assert not kept
            return
    close(*slopes)


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("lossfunc", [CrossEntropyLoss, MSELoss, BCEWithLogitsLoss, HuberLoss])
@pytest.mark.parametrize("name", ["DiagGGNExact", "BatchDiagGGNExact", "KFLR"])
def test_derivative_with_respect_to_the_weight_of_a_loss(name: str, lossfunc: type[Module], scale: float) -> None:
    """Curvature is linear in it, be it one, or not."""
    torch.manual_seed(0)
    model, loss, x, weight = Linear(3, 4).double(), lossfunc(), torch.rand(2, 3).double(), torch.tensor(scale).double().requires_grad_()
    extend(model)
    target = torch.tensor([0, 2]) if lossfunc is CrossEntropyLoss else torch.rand(2, 4).double()
    with backpack(made := QUANTITIES[name].make()):
        out = model(x)
        (weight * extend(loss)(out, target)).backward(create_graph=True)
    value = getattr(model.weight, made.savefield)
    total = (value[0] if isinstance(value, list) else value).sum()
    close(torch.autograd.grad(total, weight)[0], (total / scale).detach())


MASKED = {
    "function": lambda out, y, s: (F.cross_entropy(out, y, reduction="none") * torch.tensor([1.0, 0, 1, 0.5]).double()).sum() * s,
    "function, weight inside": lambda out, y, s: (F.cross_entropy(out, y, reduction="none") * (torch.tensor([1.0, 0, 1, 0]).double() * s)).sum(),
    "module": lambda out, y, s: (extend(CrossEntropyLoss(reduction="none"))(out, y) * torch.tensor([1.0, 0, 1, 0.5]).double()).mean() * s,
    "classes": lambda out, y, s: F.cross_entropy(out, y, weight=torch.tensor([1.0, 0, 2]).double()) * s,
    "squares": lambda out, y, s: (F.mse_loss(out, out.detach() + 1, reduction="none") * torch.tensor([[1.0], [0], [1], [0]]).double()).sum() * s,
    "mean of some": lambda out, y, s: (extend(MSELoss(reduction="none"))(out, out.detach() + 1) * (y > 0)[:, None]).mean() * s,
}


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
@pytest.mark.parametrize("way", MASKED)
@pytest.mark.parametrize("name", ["DiagGGNExact", "SqrtGGNExact", "KFLR"])
def test_derivative_with_respect_to_the_weight_of_masked_terms(name: str, way: str) -> None:
    """Terms that are multiplied by zero stay so."""
    torch.manual_seed(0)
    model, x, y = extend(Linear(3, 3).double()), torch.rand(4, 3).double(), torch.tensor([0, 1, 2, 0])
    weight = torch.tensor(2.0).double().requires_grad_()
    with backpack(made := QUANTITIES[name].make()):
        MASKED[way](model(x), y, weight).backward(create_graph=True)
    value = getattr(model.weight, made.savefield)
    total = (value[0] if isinstance(value, list) else value.square() if name == "SqrtGGNExact" else value).sum()
    close(torch.autograd.grad(total, weight)[0], (total / weight).detach())


@pytest.mark.filterwarnings("ignore:.*create_graph=True")
@pytest.mark.parametrize("weights", [[1.0, 0.0, 2.0, 1.0], [1.0, 0.5, 2.0, 1.0]])
def test_weights_of_samples_that_are_differentiated(weights: list[float]) -> None:
    """Curvature is linear in them; where one is zero, that is not what the derivative of its root would tell, and is refused."""
    torch.manual_seed(0)
    model, x, y = extend(Linear(3, 3).double()), torch.rand(4, 3).double(), torch.tensor([0, 1, 2, 0])
    given = torch.tensor(weights).double().requires_grad_()
    with backpack(DiagGGNExact(), BatchDiagGGNExact()):
        (F.cross_entropy(model(x), y, reduction="none") * given).sum().backward(create_graph=True)
    total, rows = model.weight.diag_ggn_exact.sum(), model.weight.diag_ggn_exact_batch.flatten(1).sum(1)
    if all(weights):
        close(torch.autograd.grad(total, given)[0], (rows / given).detach())
    else:
        with pytest.raises(DifferentiationError, match="some of its terms are multiplied by zero"):
            torch.autograd.grad(total, given)
