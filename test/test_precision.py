"""Precision: the data type of each quantity, how far half precision is from the truth, mixed precision with a scaled loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from cases import CASES
from cases_nets import Net
from oracle import Oracle, Problem
from test_extensions import QUANTITIES, Expect, close, collect, flat, run
from torch import Tensor, nn

from backpack import backpack, extend, extensions, unscale
from backpack.utils.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")

LINEAR = ["BatchGrad", "SqrtGGNExact"]
SQUARED = ["BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "BatchDiagHessian", "KFLR", "KFRA"]
MODELS = [
    "logreg",
    "Tanh",
    "Softmax",
    "extra axis",
    "linear twice",
    "net: Conv2d",
    "net: groups, Conv1d",
    "net: ConvTranspose2d",
    "LayerNorm",
    "Embedding",
    "matrix on positions",
    "curved: gelu",
    "curved: quotient",
    "curved: parameters divided by their norm",
]


def truth_of(problem: Problem, case: str, size: int) -> Problem:
    """The same net and data in double precision."""
    exact = CASES[case].build(size)
    exact.model.load_state_dict(problem.model.state_dict())
    exact.x = problem.x.double() if problem.x.is_floating_point() else problem.x
    for term, other in zip(exact.terms, problem.terms, strict=True):
        term.target = other.target.double() if other.target.is_floating_point() else other.target
    return exact


def values_of(problem: Problem, name: str) -> Iterator[tuple[str, Tensor]]:
    for parameter, value in collect(problem, QUANTITIES[name].field).items():
        for part in flat(value):
            yield parameter, part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", MODELS)
def test_models_of_one_precision(case: str, dtype: torch.dtype) -> None:
    """What is linear in gradients has the type of the parameter; what is squared is made, added and kept in ``float32`` at least.

    The error is that of the tensors that are squared, a few times the rounding of the model's type, and grows with its depth.
    """
    for name in LINEAR + SQUARED:
        if QUANTITIES[name].expect(CASES[case].tags) is not Expect.EXACT:
            continue
        problem = CASES[case].build(3, dtype)
        exact = truth_of(problem, case, 3)
        run(problem, QUANTITIES[name].make())
        run(exact, QUANTITIES[name].make())
        largest = max(value.abs().amax() for _, value in values_of(exact, name))
        for (parameter, value), (_, expected) in zip(values_of(problem, name), values_of(exact, name), strict=True):
            assert value.dtype == (dtype if name in LINEAR else torch.promote_types(dtype, torch.float32)), (name, parameter)
            error = (value.double() - expected).abs().amax()
            assert error <= 16 * torch.finfo(dtype).eps * max(expected.abs().amax(), 1e-2 * largest), (name, parameter, error, expected.abs().amax())


@pytest.mark.parametrize("name", ["BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "KFLR"])
@pytest.mark.parametrize("case", ["Tanh", "net: Conv2d", "Embedding", "LayerNorm", "matrix on positions", "linear twice"])
def test_squares_below_the_range_of_half_precision(name: str, case: str) -> None:
    """Gradients of 1e-4 have squares that half precision rounds to zero."""
    if QUANTITIES[name].expect(CASES[case].tags) is not Expect.EXACT:
        name = "SumGradSquared"
    results = []
    for dtype in (torch.float16, torch.float64):
        problem = CASES[case].build(3, torch.float16)
        problem = problem if dtype is torch.float16 else truth_of(problem, case, 3)
        for module in (problem.model, *problem.losses):
            extend(module)
        with backpack(QUANTITIES[name].make()):
            (problem.loss(problem.outputs()) * 2.0**-10).backward()
        results.append([value for _, value in values_of(problem, name)])
    for value, expected in zip(*results, strict=True):
        if expected.abs().amax() > 1e-12:
            close(value.double(), expected, rtol=0.1)


def test_moments_above_the_range_of_half_precision() -> None:
    """A sum of squares over positions is larger than 65504, its mean need not be."""
    model, x = nn.Conv1d(2, 3, 3).half(), 4 * torch.ones(8, 2, 1000, dtype=torch.float16)
    extend(model)
    lossfunc = extend(nn.MSELoss())
    with backpack(extensions.KFLR()):
        lossfunc(model(x).float(), torch.zeros(8, 3, 998)).backward()
    close(model.weight.kflr[1], torch.full((6, 6), 16.0 * 998))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_counts_above_the_digits_of_half_precision(dtype: torch.dtype) -> None:
    model, indices = extend(nn.Embedding(3, 2).to(dtype)), torch.zeros(5, 401, dtype=torch.int64)
    indices[0, 0] = 2
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    with backpack(extensions.KFLR(), extensions.SumGradSquared()):
        lossfunc(model(indices).float(), torch.zeros(5, 401, 2)).backward()
    close(model.weight.kflr[0], torch.tensor([2004 / 5, 0.0, 1 / 5]))
    row = model.weight.detach()[0].float() * 2
    counts = torch.tensor([400.0, 401, 401, 401, 401])
    close(model.weight.sum_grad_squared[0], counts.square().sum() * row.square(), rtol=1e-5)


# --- mixed precision --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case", ["logreg", "MSE, mean", "Tanh", "residual", "linear twice", "matrix on positions", "net: Conv2d", "LayerNorm", "transformer: attention"]
)
def test_autocast_with_a_scaled_loss(case: str, dtype: torch.dtype) -> None:
    """The scaler's factor is taken out of everything, and what is left is the quantity up to the precision of the layers."""
    names = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "KFLR"]
    problem = CASES[case].build(3, torch.float32)
    exact = truth_of(problem, case, 3)
    run(exact, *(QUANTITIES[name].make() for name in names))
    for module in (problem.model, *problem.losses):
        extend(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype):
        loss = problem.loss([out.float() for out in problem.outputs()])
    with backpack(*(QUANTITIES[name].make() for name in names)):
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    unscale(problem.model, scaler.get_scale())
    for parameter in problem.model.parameters():
        close(parameter.grad_batch.sum(0), parameter.grad, rtol=0.02)
        close(parameter.variance, parameter.grad_batch.var(0, correction=0), rtol=0.02)
    for name in names:
        largest = max(value.abs().amax() for _, value in values_of(exact, name))
        for (_, value), (_, expected) in zip(values_of(problem, name), values_of(exact, name), strict=True):
            assert value.dtype == torch.float32
            error = (value.double() - expected).abs().amax()
            assert error <= 16 * torch.finfo(dtype).eps * max(expected.abs().amax(), 1e-2 * largest), (name, error)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", [*SQUARED[:4], "KFLR", "SqrtGGNExact"])
@pytest.mark.parametrize("case", ["Tanh", "net: Conv2d", "matrix on positions"])
def test_backward_pass_inside_of_autocast(case: str, name: str) -> None:
    """Where a user leaves the backward pass inside, contrary to what torch advises, results are the same, digits and types included."""
    found = []
    for inside in (False, True):
        problem = CASES[case].build(3, torch.float32)
        for module in (problem.model, *problem.losses):
            extend(module)
        with torch.autocast("cpu", torch.bfloat16):
            loss = problem.loss([out.float() for out in problem.outputs()])
        with backpack(QUANTITIES[name].make()), torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
            assert torch.is_autocast_enabled("cpu") == inside
        found.append(list(values_of(problem, name)))
    assert len(found[0]) >= 2
    for (parameter, wanted), (other, got) in zip(*found, strict=True):
        assert parameter == other and torch.equal(got, wanted) and got.dtype == wanted.dtype == torch.float32


def test_overflow() -> None:
    """Where the scaler skips the step, quantities are not finite, as the gradients are."""
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with backpack(extensions.BatchGrad(), extensions.SumGradSquared()):
        scaler.scale(lossfunc(model(torch.full((4, 3), 1e20)), torch.zeros(4, 2))).backward()
    scaler.unscale_(optimizer)
    unscale(model, scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert not model.weight.grad.isfinite().all()
    assert not model.weight.sum_grad_squared.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulation_with_a_scaled_loss_and_micro_batches(dtype: torch.dtype) -> None:
    """All three together: losses of uneven parts, weighted, scaled, under autocast."""
    problem = CASES["Tanh"].build(5, torch.float32)
    oracle = Oracle(truth_of(problem, "Tanh", 5))
    model, lossfunc = extend(problem.model), extend(problem.terms[0].module)
    y = problem.terms[0].target
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with backpack(extensions.Variance(), extensions.DiagGGNExact(), accumulate=True):
        for n in (slice(0, 2), slice(2, 5)):
            with torch.autocast("cpu", dtype):
                loss = lossfunc(model(problem.x[n]).float(), y[n])
            scaler.scale(loss * ((n.stop - n.start) / 5)).backward()
    unscale(model, scaler.get_scale())
    truths = {name: value.sum(0) for name, value in oracle.diag_ggn_batch(oracle.hessian_exact).items()}
    for name, parameter in model.named_parameters():
        close(parameter.variance.double(), oracle.variance[name], rtol=32 * torch.finfo(dtype).eps)
        close(parameter.diag_ggn_exact.double(), truths[name], rtol=32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["Tanh", "net: Conv2d", "linear twice", "two losses on one output"])
def test_chosen_type_of_results(case: str, dtype: torch.dtype) -> None:
    """Results are kept in the type that a context asks for, and are those of another context but for rounding; functions stay what they are."""
    names = [name for name in QUANTITIES if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT and not name.startswith("HBP")]
    names = [name for name in names if not name.startswith("PCHMP")]
    problem, plain = CASES[case].build(3, torch.float32), CASES[case].build(3, torch.float32)
    run(plain, *(QUANTITIES[name].make() for name in names))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*(QUANTITIES[name].make() for name in names), dtype=dtype):
        problem.loss(problem.outputs(0)).backward()
    for name in names:
        field = QUANTITIES[name].field
        for value, expected in zip(collect(problem, field).values(), collect(plain, field).values(), strict=True):
            if callable(expected):
                assert callable(value)
                continue
            for found, tensor in zip(flat([value]), flat([expected]), strict=True):
                assert found.dtype is dtype
                assert torch.equal(found, tensor.to(dtype))
    with backpack(extensions.BatchGrad()):
        problem.loss(problem.outputs(0)).backward()
    assert all(p.grad_batch.dtype is torch.float32 for p in problem.model.parameters())


def test_chosen_type_of_accumulated_results() -> None:
    problem = CASES["Tanh"].build(3, torch.float32)
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(extensions.Variance(), extensions.DiagGGNExact(), accumulate=True, dtype=torch.float64):
        for _ in range(2):
            problem.loss(problem.outputs(0)).backward()
    for param in problem.model.parameters():
        assert (param.variance.dtype, param.diag_ggn_exact.dtype) == (torch.float64, torch.float64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, "float32", 32])
def test_types_that_hold_no_results(dtype: object) -> None:
    with pytest.raises(TypeError, match="dtype must be a type of floating-point numbers"):
        backpack(dtype=dtype)


class Product(nn.Module):
    """A product with a matrix, in functional code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


NARROW = {
    "Linear": (lambda: nn.Linear(3, 2), (3,)),
    "Linear, positions": (lambda: nn.Linear(3, 2), (2, 3)),
    "Linear, large": (lambda: nn.Linear(256, 128), (2, 256)),
    "Conv1d, one position": (lambda: nn.Conv1d(3, 2, 4), (3, 4)),
    "Conv1d, grouped": (lambda: nn.Conv1d(4, 2, 3, groups=2), (4, 4)),
    "Conv2d, many positions": (lambda: nn.Conv2d(8, 2, 1), (8, 6, 6)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 2, 1), (3, 2)),
    "product": (Product, (3,)),
    "product on positions": (Product, (2, 3)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_would_stop_growing_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match="stop growing"):
        backpack(extensions.DiagGGNExact(), accumulate=True, dtype=dtype)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 600), (torch.float16, 5000)])
@pytest.mark.parametrize("offsets", [True, False])
def test_large_bags(dtype: torch.dtype, size: int, offsets: bool) -> None:
    """The mean of more entries than can be counted in half precision: here all entries of a bag are the same."""
    layer, index = extend(nn.EmbeddingBag(3, 2, mode="mean").to(dtype)), torch.tensor([[0], [2]]).expand(2, size)
    given = (index.reshape(-1), torch.tensor([0, size])) if offsets else (index,)
    out = layer(*given)
    with backpack(extensions.DiagGGNExact()):
        extend(nn.MSELoss(reduction="sum"))(out, out.detach() + 1).backward()
    torch.testing.assert_close(layer.weight.diag_ggn_exact.double(), torch.tensor([[2.0, 2], [0, 0], [2, 2]]).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast", "grad_dtype", "accumulated"])
@pytest.mark.parametrize("case", NARROW)
def test_variance_much_smaller_than_the_mean(case: str, how: str) -> None:
    """What each sample contributes is exact in half precision here, their sum in ``.grad`` is not: its square must not be what is subtracted."""
    (make, shape), size = NARROW[case], 16
    model = make()
    x = 8.0 + torch.arange(size * torch.Size(shape).numel()).remainder(7).remainder(2).reshape(size, *shape)
    a = torch.zeros(size, *model(x).shape[1:])
    a.flatten(1)[:, :2] = (6.0 + torch.arange(2 * size).remainder(3)).reshape(size, 2)
    truth = [[] for _ in model.parameters()]
    model.double()
    for n in range(size):
        gradients = torch.autograd.grad((model(x[n : n + 1].double()) * a[n : n + 1]).sum(), list(model.parameters()))
        for found, gradient in zip(truth, gradients, strict=True):
            found.append(gradient)
    dtype = torch.float16 if how == "float16" else torch.bfloat16
    model = extend(model.to(torch.float32 if how in {"autocast", "grad_dtype"} else dtype))
    if how == "grad_dtype":
        if not hasattr(Tensor, "grad_dtype"):
            pytest.skip("torch keeps gradients in the type of the parameter")
        for parameter in model.parameters():
            parameter.grad_dtype = dtype
    x = x.to(next(model.parameters()).dtype)
    parts = x.split(7) if how == "accumulated" else [x]
    with backpack(extensions.Variance(), accumulate=how == "accumulated"):
        for part, factor in zip(parts, a.split(len(parts[0])), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                out = model(part)
            (out.float() * factor).sum().backward()
    for parameter, gradients in zip(model.parameters(), truth, strict=True):
        expected = torch.stack(gradients).var(0, correction=0)
        assert expected.amax() > 0.1
        assert parameter.variance.dtype == torch.float32
        close(parameter.variance.double(), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "make", [lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm1d(4).eval()], ids=["layer", "group", "batch"]
)
def test_hessian_of_normalizations_of_mixed_precision(make: Callable) -> None:
    """Refused under autocast, before anything runs; the generalized Gauss-Newton is there."""
    model, y = extend(nn.Sequential(nn.Linear(3, 4), make(), nn.Linear(4, 3))), torch.arange(3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(torch.randn(3, 3)).float(), y)
    with backpack(extensions.DiagHessian()), pytest.raises(UnsupportedError, match="in other precisions than those of its tensors"):
        loss.backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    with backpack(extensions.DiagGGNExact(), extensions.BatchDiagGGNExact()):
        loss.backward()
    for parameter in model.parameters():
        close(parameter.diag_ggn_exact, parameter.diag_ggn_exact_batch.sum(0), rtol=1e-5)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "root mean square": lambda z: z * z.square().mean(1, keepdim=True).rsqrt(),
    "power": lambda z: z * (z.square().mean(1, keepdim=True) + 1e-6).pow(-0.5),
    "inverse": lambda z: z * z.norm(dim=1, keepdim=True).reciprocal(),
    "sign": lambda z: (z * z).sign() * (z * z),
    "pool": lambda z: nn.functional.lp_pool1d(z, 2, 2),
}


@pytest.mark.parametrize("size", [1.0, 1e4, 1e6])
@pytest.mark.parametrize("name", PRODUCTS)
def test_hessian_of_products_of_sizes_that_are_far_apart(name: str, size: float) -> None:
    """Pairs of columns with opposite signs cancel where a factor is small as what it is made of is large, and where it is small as it is."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(4, 4), "last": nn.Linear(2 if name == "pool" else 4, 3)}
    model = Net(lambda own, x: own.last(PRODUCTS[name](own.first(x))), **parts).double()
    with torch.no_grad():
        model.first.weight *= size
        model.first.bias *= size
    x = torch.randn(5, 4)

    def loss(weight: Tensor) -> Tensor:
        out = torch.func.functional_call(model, {"first.weight": weight}, x.to(weight.dtype))
        return nn.functional.mse_loss(out, torch.ones_like(out))

    expected = torch.autograd.functional.hessian(loss, model.first.weight).reshape(16, 16).diag().reshape(4, 4)
    model = extend(model.float())
    with backpack(extensions.DiagHessian()):
        out = model(x)
        nn.functional.mse_loss(out, torch.ones_like(out)).backward()
    close(model.first.weight.diag_h.double(), expected, 1e-5)


def test_weights_of_entries_in_half_precision() -> None:
    torch.manual_seed(0)
    samples = 20000
    x, y, weight = torch.randn(samples, 1).half(), torch.rand(samples, 1).round().half(), torch.full((samples, 1), 0.01).half()
    model, lossfunc = extend(nn.Linear(1, 1)).half(), extend(nn.BCEWithLogitsLoss(weight=weight))
    with backpack(extensions.DiagGGNExact()):
        lossfunc(model(x), y).backward()
    slope = model(x).detach().double().sigmoid()
    expected = (weight.double() / samples * slope * (1 - slope) * x.double() ** 2).sum()
    torch.testing.assert_close(model.weight.diag_ggn_exact.double().sum(), expected, rtol=5e-3, atol=0.0)


def test_large_counts_in_half_precision() -> None:
    torch.manual_seed(0)
    model, lossfunc = extend(nn.Linear(1, 1, bias=False)).half(), extend(nn.PoissonNLLLoss())
    model.weight.data.fill_(12.0)  # the rate is 160000, beyond half precision
    with backpack(extensions.DiagGGNMC(mc_samples=200), extensions.DiagGGNExact()):
        lossfunc(model(torch.ones(64, 1).half()), torch.full((64, 1), 10.0).half()).backward()
    torch.testing.assert_close(model.weight.diag_ggn_mc, model.weight.diag_ggn_exact, rtol=0.05, atol=0.0)


TABLES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "folded": lambda own, x: own.last((own.table(x.flatten()) * own.table.weight[3]).unflatten(0, x.shape).tanh().mean(1)),
    "module": lambda own, x: own.last(own.table(x).tanh().mean(1)),
    "function": lambda own, x: own.last(nn.functional.embedding(x, own.table.weight).tanh().mean(1)),
    "tied": lambda own, x: nn.functional.linear(own.table(x).tanh().mean(1), own.table.weight),
    "one by one": lambda own, x: own.last(torch.stack([own.table(row).tanh().mean(0) for row in x])),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TABLES)
def test_frequent_words(name: str, dtype: torch.dtype) -> None:
    """What a sample adds to a row at 3000 positions is summed in single precision."""
    torch.manual_seed(0)
    model = extend(Net(TABLES[name], table=nn.Embedding(20, 8), last=nn.Linear(8, 4)).to(dtype))
    x = torch.randint(20, (3, 3000))
    x[:, 700:] = 3
    weight, exact = model.table.weight, deepcopy(model).double()
    rows = torch.stack([torch.autograd.grad(exact(x[n : n + 1]).sum() * 1024, exact.table.weight)[0] for n in range(3)])
    with backpack(extensions.BatchGrad(), extensions.SumGradSquared()):
        (model(x).sum() * 1024).backward()
    close(weight.grad_batch.double(), rows, 0.02)
    close(weight.sum_grad_squared.double(), rows.square().sum(0), 0.04)


@pytest.mark.parametrize("name", ["BatchGrad", "BatchL2Grad", "SumGradSquared", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact"])
def test_a_parameter_that_is_used_often(name: str) -> None:
    """What 300 uses contribute is summed in single precision."""
    torch.manual_seed(0)
    steps = 300
    model = Net(lambda own, x: own.last(sum((own.a(x[:, i]) + own.c).tanh() for i in range(steps)) / steps), a=nn.Linear(4, 4), last=nn.Linear(4, 2))
    model.c = nn.Parameter(torch.rand(4))
    model, x, values = model.bfloat16(), torch.randn(3, steps, 4).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float64):
        found = extend(deepcopy(model).to(dtype))
        out, made = found(x.to(dtype)), QUANTITIES[name].make()
        with backpack(made):
            extend(nn.MSELoss())(out, torch.ones_like(out)).backward()
        values.append(getattr(found.c, made.savefield).double())
    close(*values, 0.03)
