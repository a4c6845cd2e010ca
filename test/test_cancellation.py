"""Numbers that are much smaller, or larger, than what they are made of: single and half precision keep their digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.core.derivatives import affine_squares
from backpack.core.derivatives.given import Given
from backpack.core.derivatives.sum_of_products import SumOfProducts

pytestmark = pytest.mark.filterwarnings("error")


class Matrix(nn.Module):
    """A product without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(48, 64), (8, 48), (8, 64)),
    "Conv2d": (lambda: nn.Conv2d(48, 64, 3, groups=2), (48, 4, 6), (64, 2, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(48, 64, 1), (48, 8), (64, 8)),
    "matrix": (Matrix, (8, 48), (8, 64)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("level", [0.0, 1e-6, 1e-4, 1e-2])
def test_norms_where_positions_cancel(name: str, level: float) -> None:
    """The sum over positions is far smaller than its terms: its squared norm, too, is as precise as that of the gradient itself."""
    make, given, made = LAYERS[name]
    torch.manual_seed(0)
    model, x, change = nn.Sequential(make()), torch.randn(5, *given), torch.randn(5, *made)
    x[2] = 10 + level * x[2]  # one sample is blank, or nearly so
    change[2] -= change[2].mean([axis for axis, length in enumerate(made) if length != 64], keepdim=True)

    def weight(dtype: torch.dtype, extension: extensions.BatchGrad | extensions.BatchL2Grad) -> nn.Parameter:
        net = extend(deepcopy(model).to(dtype))
        with backpack(extension):
            (net(x.to(dtype)) * change.to(dtype)).sum().backward()
        return net[0].weight

    squares = weight(torch.float32, extensions.BatchL2Grad()).batch_l2
    exact, single = (weight(dtype, extensions.BatchGrad()).grad_batch.double().flatten(1) for dtype in (torch.float64, torch.float32))
    assert (squares >= 0).all()
    bound = 4 * (single - exact).norm(dim=1) + 1e-4 * exact.norm(dim=1)
    assert ((squares.double().sqrt() - exact.norm(dim=1)).abs() <= bound).all()


@pytest.mark.parametrize("bag", [True, False])
def test_variance_of_tables_where_samples_agree(bag: bool) -> None:
    """The gradients of samples that look up a row are nearly the same: their mean is a thousand times their deviation. Row 2 is nobody's."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(4, 2, mode="sum") if bag else nn.Embedding(4, 2)
    index = torch.tensor([[0, 0, 1], [0, 1, 0], [0, 3, 0], [0, 0, 3]]).repeat(100, 1)[:399]
    factors = 1000 + torch.randn(len(index), 2)

    def layer(dtype: torch.dtype, extension: extensions.BatchGrad | extensions.Variance) -> nn.Parameter:
        net = extend(deepcopy(table).to(dtype))
        out = net(index)
        with backpack(extension):
            ((out if bag else out.sum(1)) * factors.to(dtype)).sum().backward()
        return net.weight

    exact = layer(torch.float64, extensions.BatchGrad()).grad_batch.var(0, correction=0)
    assert (exact[0] < 10).all()
    torch.testing.assert_close(layer(torch.float32, extensions.Variance()).variance.double(), exact, rtol=1e-4, atol=0)


FAR: dict[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU,
    "GELU, tanh": lambda: nn.GELU("tanh"),
    "Mish": nn.Mish,
    "gelu": lambda: Function(nn.functional.gelu),
    "gelu, tanh": lambda: Function(lambda x: nn.functional.gelu(x, approximate="tanh")),
    "mish": lambda: Function(nn.functional.mish),
}


class Function(nn.Module):
    """A function that is called without a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FAR)
def test_activations_far_from_zero(name: str, dtype: torch.dtype) -> None:
    """They are linear there: powers and exponentials that overflow belong to terms that vanish."""
    x = torch.tensor([1.0, 12, 35, 300, 6e4, *([] if dtype is torch.float16 else [1e8])]).to(dtype)
    x = torch.cat([x, -x]).unsqueeze(1)
    layer = nn.Linear(1, 1, dtype=dtype)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    model, lossfunc = extend(nn.Sequential(layer, FAR[name]())), extend(nn.MSELoss(reduction="sum"))
    with backpack(extensions.BatchDiagHessian()):
        lossfunc(model(x), model(x).detach() - 0.25).backward()
    at = x.double().clamp(-35, 35).requires_grad_()
    first = torch.autograd.grad(FAR[name]()(at).sum(), at, create_graph=True)[0]
    (second,) = torch.autograd.grad(first.sum(), at)
    expected = 2 * first.detach().square() + 0.5 * second
    torch.testing.assert_close(layer.bias.diag_h_batch.double(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["GGNMP", "HMP"])
@pytest.mark.parametrize("logit", [10.0, 17.0, 25.0])
def test_products_where_a_class_is_certain(name: str, logit: float) -> None:
    layer, extension = extend(nn.Linear(1, 3)), getattr(extensions, name)()
    layer.weight.data.zero_()
    layer.bias.data = torch.tensor([logit, 0.0, 1.0])
    with backpack(extension):
        extend(nn.CrossEntropyLoss())(layer(torch.ones(2, 1)), torch.tensor([0, 1])).backward()
    found = getattr(layer.bias, extension.savefield)(torch.eye(3))
    probs = layer.bias.detach().double().softmax(0)
    torch.testing.assert_close(found.double(), probs.diag() - probs.outer(probs), rtol=1e-5, atol=1e-17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rate", [1.0, 2.0**20 - 1, 2.0**20 + 1, 1e15, 1e18, 1e30])
def test_draws_of_large_counts(rate: float, dtype: torch.dtype) -> None:
    """Counts have no digits left there for what they differ by from their mean; from 2^63 on, there are none."""
    layer = extend(nn.Linear(1, 3, dtype=dtype))
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, math.log(rate))
    with backpack(extensions.SqrtGGNMC(mc_samples=10000)):
        extend(nn.PoissonNLLLoss())(layer(torch.ones(2, 1, dtype=dtype)), torch.ones(2, 3, dtype=dtype)).backward()
    draws = layer.bias.sqrt_ggn_mc.double() * 100 * math.sqrt(6 / rate)  # [V, N, 3], of mean 0 and variance 1
    assert draws.mean().abs() < 0.03
    assert (draws.square().mean() - 1).abs() < 0.05


def gate(h: Tensor) -> Tensor:
    """Normalize by hand, the factor of each sample as a tensor of its own."""
    return h.square().mean(-1, keepdim=True).add(1e-8).rsqrt()


NORMALIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "broadcast": lambda h: h * gate(h),
    "broadcast, from the left": lambda h: gate(h) * h,
    "entry by entry": lambda h: h * gate(h).repeat(1, h.shape[1]),
    "quotient": lambda h: h / gate(h).reciprocal(),
    "products of matrices": lambda h: torch.bmm(h.unsqueeze(2), gate(h).unsqueeze(2)).squeeze(2),
    "samples last": lambda h: (h.T * gate(h).T).T,
    "ragged": lambda h: (h.repeat(2, 1)[1:] * gate(h).repeat(2, 1)[1:])[-len(h) :],
    "attention": lambda h: nn.functional.scaled_dot_product_attention(*(t.unflatten(1, (1, 2, -1)) for t in (h / 5, 5 * gate(h) * h, h))).flatten(1),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_second_derivatives_of_samples_of_several_sizes(name: str) -> None:
    """Columns of different signs are cut in the units of each sample: they would cancel almost, else."""
    torch.manual_seed(0)
    layer, last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    x[1:3] *= torch.tensor([[1e-3], [1e2]])
    found = []
    for dtype in (torch.float32, torch.float64):
        model = extend(nn.Sequential(deepcopy(layer), Function(NORMALIZED[name]), deepcopy(last)).to(dtype))
        with backpack(extensions.BatchDiagHessian()):
            extend(nn.CrossEntropyLoss(reduction="sum"))(model(x.to(dtype)), y).backward()
        found.append(model[0].weight.diag_h_batch.double().flatten(1))
    single, exact = found
    assert ((single - exact).norm(dim=1) <= 5e-5 * exact.norm(dim=1)).all()


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_second_derivatives_of_shared_layers(size: float) -> None:
    """What couples the weight of a layer with its input, which it has made, likewise."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 6, bias=False)
    model = nn.Sequential(layer, nn.Tanh(), Function(lambda h: size * h), layer, Function(lambda h: h / size), nn.Linear(6, 3, bias=False))
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    found = []
    for dtype in (torch.float32, torch.float64):
        net = extend(deepcopy(model).to(dtype))
        with backpack(extensions.BatchDiagHessian()):
            extend(nn.CrossEntropyLoss(reduction="sum"))(net(x.to(dtype)), y).backward()
        found.append(net[0].weight.diag_h_batch.double().flatten(1))
    single, exact = found
    assert ((single - exact).norm(dim=1) <= 5e-6 * exact.norm(dim=1)).all()


NOISY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda h, m: h * m,
    "product, entry by entry": lambda h, m: h * m.repeat(1, 4),
    "product of matrices": lambda h, m: torch.bmm(h.unsqueeze(2), m.unsqueeze(2)).squeeze(2),
    "quotient": lambda h, m: m / (3 + h),
    "attention": lambda h, m: nn.functional.scaled_dot_product_attention(h.unsqueeze(1), (m * h).unsqueeze(1), h.unsqueeze(1)).squeeze(1) + m * h,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NOISY)
def test_second_derivatives_at_a_mean_of_rounding_errors(name: str, dtype: torch.dtype) -> None:
    """The mean of what was normalized is a factor of no size of its own, but its derivative is as large as any other."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return NOISY[name](self.layer(y), y.mean(1, keepdim=True))

    torch.manual_seed(0)
    model, x, y = Gated().to(dtype), torch.randn(5, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    exact, weight = deepcopy(model).double(), model.norm.weight.detach().double()

    def loss(weight: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(exact, {"norm.weight": weight}, x.double()), y.double())

    with backpack(extensions.DiagHessian()):
        extend(nn.MSELoss())(extend(model)(x), y).backward()
    truth = torch.autograd.functional.hessian(loss, weight).diagonal()
    torch.testing.assert_close(model.norm.weight.diag_h.double(), truth, rtol=0, atol=2 * torch.finfo(dtype).eps ** 0.5 * truth.abs().max().item())


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.GaussianNLLLoss()], ids=["MSELoss", "GaussianNLLLoss"])
@pytest.mark.parametrize("quantity", [extensions.DiagGGNMC, extensions.BatchDiagGGNMC, extensions.SqrtGGNMC, extensions.KFAC])
def test_labels_around_a_large_mean(quantity: Callable, loss: nn.Module) -> None:
    """The curvature does not depend on the prediction, nor do the deviations of sampled labels from it."""
    found = []
    for level in (0.0, 1e9):
        layer, extension, given = extend(nn.Linear(1, 2)), quantity(mc_samples=3), [torch.zeros(4, 2)]
        nn.init.zeros_(layer.weight)
        nn.init.constant_(layer.bias, level)
        with backpack(extension):
            value = extend(loss)(layer(torch.ones(4, 1)), *given, *[torch.ones(4, 2)] * isinstance(loss, nn.GaussianNLLLoss))
            torch.manual_seed(0)
            value.backward()
        found.append(getattr(layer.bias, extension.savefield))
    torch.testing.assert_close(*found)


class Weighted(nn.Module):
    """Couples outputs, whose sizes are given."""

    def forward(self, out: Tensor, sizes: Tensor) -> Tensor:
        return ((out * sizes).square().sum(1) + (out * sizes).sum(1).square()).mean()


class Variances(nn.Module):
    """The likelihood of means with logarithms of variances; targets are one deviation away."""

    def forward(self, out: Tensor, sizes: Tensor) -> Tensor:
        mean, log = out.chunk(2, 1)
        target = mean.detach() + torch.exp(log.detach() / 2)
        return (log + (target - mean).square() * torch.exp(-log)).mean()


SIZES: dict[type[nn.Module], tuple[list[float], list[Callable]]] = {
    Weighted: ([1, 2, -3, 4], [extensions.DiagGGNExact, extensions.BatchDiagGGNExact, extensions.DiagHessian, extensions.BatchDiagHessian]),
    Variances: ([0, 0, 0, 0, 0, -5, -10, -14], [extensions.DiagHessian, extensions.BatchDiagHessian]),
}


@pytest.mark.parametrize(("loss", "quantity"), [(loss, quantity) for loss, (_, quantities) in SIZES.items() for quantity in quantities])
def test_own_losses_whose_outputs_are_of_several_sizes(loss: type[nn.Module], quantity: Callable) -> None:
    """The curvature with respect to each output is as precise as the largest one: the outputs may be those of layers of their own."""
    outputs = SIZES[loss][0]
    sizes, found = torch.tensor([1e-6, 1e2, 1e-3, 1.0]), []
    for dtype in (torch.float32, torch.float64):
        layer, extension = extend(nn.Linear(1, len(outputs), dtype=dtype)), quantity()
        nn.init.zeros_(layer.weight)
        layer.bias.data = torch.tensor(outputs, dtype=dtype)
        with backpack(extension):
            extend(loss())(layer(torch.ones(3, 1, dtype=dtype)), sizes.to(dtype)).backward()
        found.append(getattr(layer.bias, extension.savefield).double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0.0)


class Gated(nn.Module):
    """A product of two factors of a sample, one of which is smaller."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum(1, keepdim=True)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(5), lambda: nn.RMSNorm(5), Gated, nn.Tanh], ids=["LayerNorm", "RMSNorm", "product", "Tanh"])
@pytest.mark.parametrize("scale", [1e-28, 1.0, 1e25])
def test_losses_whose_squares_leave_the_range(make: Callable[[], nn.Module], scale: float) -> None:
    """Columns are square roots, whose squares do not: those of the gradients do."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 5), make(), nn.Linear(5, 1)), torch.randn(2, 3)
    results = []
    for dtype, factor in ((torch.float32, scale), (torch.float64, 1.0)):
        net, lossfunc = extend(deepcopy(model).to(dtype)), extend(nn.MSELoss())
        with backpack(extensions.DiagHessian()):
            (factor * lossfunc(net(x.to(dtype)), torch.ones(2, 1, dtype=dtype))).backward()
        results.append(net[0].weight.diag_h.double() / factor)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5 * float(results[1].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("columns", "positions"), [(1, 2), (1, 3), (4, 2), (4, 5)])
def test_squares_by_pairs_of_positions(columns: int, positions: int, signed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where positions cancel, in some entries or in some samples, what is left is squared, not what rounding leaves of the products."""
    torch.manual_seed(0)
    samples, rows, inputs = 64, torch.randn(columns, 64, 1, 6, positions, dtype=dtype), torch.randn(64, 1, 5, positions, dtype=dtype)
    rows[..., 0, 1:], inputs[..., 0, 1:] = 0, 0
    rows[..., 1, 1], inputs[..., :2, 1] = -rows[..., 1, 0] * (1 + 1e-3), inputs[..., :2, 0]
    rows[..., 1, 2:] = 0
    signs = (torch.rand(columns, samples) > 0.5).to(dtype) * 2 - 1 if signed else None
    called = []
    monkeypatch.setattr(affine_squares, "SumOfProducts", lambda *args: (called.append(None), SumOfProducts(*args))[1])
    monkeypatch.setattr(affine_squares, "_by_pairs", lambda *_: True)
    call = Given(inputs, torch.empty(6, 5, dtype=dtype, device="meta"))
    found = affine_squares.sum_of_squares(call.derivatives, call, rows, signs, notes={})
    wide, sign = (rows.double(), inputs.double()), 1.0 if signs is None else signs.double()[..., None, None]
    products, terms = (torch.einsum("vngol,ngkl->vnok", *tensors) for tensors in (wide, [tensor.abs() for tensor in wide]))
    error = (found.double() - (products.square() * sign).sum((0, 1))).abs()
    assert called and (products.abs() < 1e-2 * terms).any()
    assert (error <= 100 * torch.finfo(dtype).eps * (products.abs() * terms).sum((0, 1))).all()  # as if they were formed
