"""Every function whose second derivative is known, alone behind a layer, against the dense Hessian; and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from cases_nets import Net, layers
from oracle import Oracle, Problem, Term
from table import classify, default_dtype
from test_extensions import QUANTITIES, collect, run
from torch import Tensor, nn, randn
from torch.autograd.graph import Node
from torch.nn import Linear
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, explain, extend
from backpack.core import node_functions
from backpack.core.crossings import Gap
from backpack.core.residuals import columns_of, residual
from backpack.extensions import BatchDiagHessian, BatchGrad, DiagHessian
from backpack.utils.errors import UnsupportedError

POSITIVE = torch.tensor([0.3, 1.7, 0.6], dtype=torch.float64)


def options(name: str) -> dict[str, float]:
    return {"value": 0.3} if name.startswith("addc") else {}


# of (0, 1)
INSIDE = """acos asin atanh digamma erfinv erfc lgamma log log10 log1p log2 logit rsqrt sqrt tan reciprocal""".split()
EVERYWHERE = "asinh atan cos cosh erf exp exp2 expm1 i0 sigmoid sin sinc sinh square tanh".split()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: lambda h, name=name: getattr(torch, name)(0.3 + 0.4 * h.sigmoid()) for name in INSIDE},
    **{name: getattr(torch, name) for name in EVERYWHERE},
    "special, i1": torch.special.i1,
    **{f"special, {name}": lambda h, name=name: getattr(torch.special, name)(0.3 + 0.4 * h.sigmoid()) for name in "entr ndtri".split()},
    "polygamma": lambda h: torch.polygamma(2, 0.3 + h.sigmoid()),
    "mvlgamma": lambda h: torch.mvlgamma(1.3 + h.sigmoid(), 3),
    **{name: getattr(F, name) for name in "gelu silu mish softplus elu selu celu hardswish logsigmoid".split()},
    "acosh": lambda h: torch.acosh(1.5 + h.sigmoid()),
    "gelu, tanh": lambda h: F.gelu(h, approximate="tanh"),
    "softplus, settings": lambda h: F.softplus(h, 2.0, 1.0),
    "elu, settings": lambda h: F.elu(h, 0.7),
    "celu, settings": lambda h: F.celu(h, 0.7),
    "elu, in place": lambda h: F.elu_(2 * h, 0.7),
    "selu, in place": lambda h: F.selu_(2 * h),
    "celu, in place": lambda h: F.celu_(2 * h, 0.5),
    "pow": lambda h: h.sigmoid() ** -1.5,
    "pow, exponent": lambda h: 1.7**h,
    "pow, both": lambda h: h.sigmoid() ** h.tanh(),
    "pow, exponents are data": lambda h: h.sigmoid() ** torch.tensor([1, 2, 3]),
    "atan2": lambda h: torch.atan2(h, h.flip(1) + 3),
    "hypot": lambda h: torch.hypot(h, h.flip(1)),
    "xlogy": lambda h: torch.xlogy(h, 1 + h.flip(1).square()),
    "logaddexp": lambda h: torch.logaddexp(h, h.flip(1)),
    "logaddexp2": lambda h: torch.logaddexp2(h, h.flip(1)),
    "lerp": lambda h: torch.lerp(h, h.flip(1), h.roll(1, 1)),
    "addcmul": lambda h: torch.addcmul(h, h.flip(1), h.roll(1, 1), value=0.3),
    "addcdiv": lambda h: torch.addcdiv(h, h.flip(1), 5 + h.roll(1, 1), value=0.3),
    **{
        f"{name}, constants at {places}": lambda h, name=name, places=places, more=more: (
            h
            * getattr(torch, name)(*(POSITIVE if str(i) in places else 1.5 + h.roll(i, 1).tanh() for i in range(2 + ("2" in more))), **options(name))
        )
        for more, names in {"0 1": "atan2 hypot xlogy logaddexp pow div", "0 1 2 01 02 12": "lerp addcmul addcdiv"}.items()
        for name in names.split()
        for places in more.split()
    },
    **{
        f"{name} of each row": lambda h, f=f: torch.stack([f(row) for row in h])
        for name, f in {
            "norm": lambda u: u / u.norm(),
            "std": lambda u: (u - u.mean()) / u.std(),
            "softmax": lambda u: u.softmax(0) * u.logsumexp(0),
            "dot": lambda u: u * torch.dot(u, u.sin()),
            "mv": lambda u: torch.mv(torch.outer(u, u), u),
            "product": lambda u: torch.outer(u, u).sum(1) * u.sum().exp(),
        }.items()
    },
    **{
        f"derivative of {f.__name__}": lambda h, f=f: torch.autograd.grad(f(h).square().sum(), h, create_graph=True)[0]
        for f in (torch.tanh, torch.sigmoid, F.gelu, F.softplus, F.elu, F.celu, F.selu, F.logsigmoid, F.leaky_relu, F.silu, F.mish)
    },
    "mse_loss": lambda h: F.mse_loss(h, h.sin(), reduction="none"),
    "huber_loss": lambda h: F.huber_loss(POSITIVE.expand_as(h), h, reduction="none", delta=0.3),
    "smooth_l1_loss": lambda h: F.smooth_l1_loss(h, h.flip(1), reduction="none", beta=0.4),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, POSITIVE.sub(1).expand_as(h), reduction="none"),
    "binary_cross_entropy": lambda h: F.binary_cross_entropy(h.sigmoid(), h.sin().square(), reduction="none"),
    "binary_cross_entropy, weights": lambda h: F.binary_cross_entropy(h.sigmoid(), POSITIVE.div(2).expand_as(h), POSITIVE, reduction="none"),
    "binary_cross_entropy_with_logits": lambda h: torch.distributions.Bernoulli(logits=h).log_prob(h.detach().sign().relu()),
    "binary_cross_entropy_with_logits, weights": lambda h: F.binary_cross_entropy_with_logits(
        h, POSITIVE.div(2).expand_as(h), POSITIVE, pos_weight=1 / POSITIVE, reduction="none"
    ),
    "cross_entropy of each row": lambda h: h * F.cross_entropy(h, h.argmax(1), POSITIVE, label_smoothing=0.1, reduction="none")[:, None],
    "exp of a row by a mask": lambda h: h.index_put((torch.arange(len(h)) == 0,), h[:1].exp()),
    "lerp by a number": lambda h: torch.lerp(h.sin(), h.flip(1), 0.3),
    "lerp by a scalar": lambda h: torch.lerp(h.sin(), h.flip(1), torch.full((), 0.3)),
    "quantile": lambda h: h + h.sin().quantile(0.3, 1, keepdim=True),
    "nanquantile": lambda h: h + h.sin().nanquantile(0.3, 1, keepdim=True),
    "div, broadcast": lambda h: h / (5 + h[:, :1]),
    "div of a number": lambda h: 3 / (5 + h),
    "div of data": lambda h: h.detach() / (5 + h),
    "mul, broadcast": lambda h: h * h[:, 1:2],
    "softmax": lambda h: h.softmax(1),
    "log_softmax": lambda h: h.log_softmax(-1),
    "softmin": lambda h: F.softmin(h, 1),
    "softmax on folded rows": lambda h: torch.cat([h, h.flip(1)]).view(2, -1, 3).softmax(0).sum(0),
    "softmax, masked": lambda h: F.softmax(h.masked_fill(torch.tensor([False, True, False]), -torch.inf), 1),
    "logsumexp": lambda h: h + h.logsumexp(1, keepdim=True),
    "logsumexp, two axes": lambda h: h[:, :, None].mul(h[:, None]).logsumexp((1, 2))[:, None] + h,
    "norm": lambda h: h / h.norm(dim=1, keepdim=True),
    "norm, order": lambda h: h + torch.linalg.vector_norm(h, 3, dim=1)[:, None],
    **{
        f"norm of order {p}, with zeros": lambda h, p=p: (r := h.relu()) / (2 + r.norm(p, 1, keepdim=True)) + r.sin().norm(p, 1)[:, None]
        for p in (0.5, 1, 1.5, 2, 3)
    },
    "prod": lambda h: h + h.prod(1, keepdim=True),
    "cumprod": lambda h: h.cumprod(1),
    "cumsum": lambda h: h.cumsum(1),
    "logcumsumexp": lambda h: h.logcumsumexp(-1),
    "var": lambda h: h + h.var(1, keepdim=True),
    "std": lambda h: h + h.std(1, correction=0)[:, None],
    **{
        f"{name}, three axes, counted from the end": lambda h, f=f: f(h[:, :, None] * (1 + h[:, None].sin()), -2)
        for name, f in {
            "logsumexp": torch.logsumexp,
            "norm": lambda z, dim: z.norm(dim=dim),
            "norm, order": lambda z, dim: torch.linalg.vector_norm(z, 3, dim=dim),
            "normalize": lambda z, dim: F.normalize(z, dim=dim).sum(1),
            "cosine_similarity": lambda z, dim: F.cosine_similarity(z, z.flip(1).sin(), dim=dim),
            "var": torch.var,
            "std": torch.std,
        }.items()
    },
    "glu": lambda h: h + F.glu(torch.cat([h, h.flip(1)], 1), -1),
    "cross": lambda h: torch.linalg.cross(h, h.sin()),
    "cross, broadcast": lambda h: torch.linalg.cross(h[:, None].sin(), torch.stack([h, h.flip(1).exp()], 1)).sum(1),
    "baddbmm": lambda h: torch.baddbmm(h[:, None], h[:, None], h[:, :, None] * h[:, None], alpha=0.5)[:, 0],
}
OF_PARAMETERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **{
        f"{name}, no axis": lambda h, W, b, f=f: h * W[0, 0].exp() * f(W[0, 0] * b[0])
        for name, f in {
            "softmax": lambda p: p.softmax(0),
            "log_softmax": lambda p: p + p.log_softmax(-1),
            "logsumexp": lambda p: p.logsumexp(0),
            "norm": lambda p: p.norm(),
            "cumprod": lambda p: p.cumprod(0),
            "prod": lambda p: p.prod(0),
            "cosine_similarity": lambda p: p * F.cosine_similarity(p, p + 1, dim=0),
        }.items()
    },
    "prelu": lambda h, W, b: F.prelu(h, b[:1]),
    "mv": lambda h, W, b: h * torch.mv(W, W[0]),
    "dot": lambda h, W, b: h * torch.dot(b, b.flip(0)),
    "vdot": lambda h, W, b: h * torch.vdot(b, b.flip(0)),
    "vdot with a constant": lambda h, W, b: F.linear(h, W / torch.vdot(torch.arange(3.0, dtype=W.dtype), W @ W[1])),  # spectral_norm
    "addmv": lambda h, W, b: h * torch.addmv(b, W, W[1], alpha=2),
    "mm": lambda h, W, b: h @ (W @ W),
    "addmm": lambda h, W, b: h @ torch.addmm(b, W, W.T, alpha=0.5),
    "convolution": lambda h, W, b: h * F.conv1d(W[None], (W * b)[None, :, :2], padding="same")[0, 0],
    "transposed convolution": lambda h, W, b: h * F.conv_transpose1d(W[None], W[:, None, :2].cos(), groups=3)[0, :, 1],
    "softmax": lambda h, W, b: h @ W.softmax(0),
    "norm": lambda h, W, b: F.linear(h, W / W.norm(dim=1, keepdim=True)) + W.norm(),
    "cross": lambda h, W, b: h * torch.linalg.cross(W, b[None]).sum(0),
    "cross with data": lambda h, W, b: torch.linalg.cross(h, b[None] * W[:1]),
    "exp": lambda h, W, b: h @ (W.exp() / (1 + b.square())),
}


INDEX = torch.tensor([2, 0, 0])
SPARSE = torch.tensor([[0, 2, 0], [1, 0, 0.5], [0, 0, 3]], dtype=torch.float64).to_sparse()
WINDOW = torch.hann_window(4, dtype=torch.float64)
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "istft": lambda h: torch.istft(torch.stft(h.sin().repeat(1, 3), 4, 2, window=WINDOW, return_complex=True), 4, 2, window=WINDOW)[:, :3] + h,
    "index_add": lambda h: h.index_add(1, INDEX, 2 * h, alpha=3),
    "index_add of rows": lambda h: torch.zeros_like(h).index_add(0, torch.arange(len(h)).repeat_interleave(2), h.sin().repeat_interleave(2, 0)),
    "index_copy": lambda h: h.index_copy(1, torch.tensor([1, 0]), h[:, 1:].sin()),
    "index_fill": lambda h: h.sin().index_fill(1, torch.tensor([1]), 2.0),
    "index_put": lambda h: h.index_put((torch.arange(len(h)), torch.arange(len(h)) % 3), h[:, 0].sin()),
    "index_put, accumulate": lambda h: h.index_put((torch.arange(len(h)), torch.arange(len(h)) % 2), h[:, 2].sin(), accumulate=True),
    "assignment at indices": lambda h: operator.setitem(z := h * 1, (slice(None), [0, 2]), h[:, [1, 1]].sin()) or z,
    "scatter_add": lambda h: h.scatter_add(1, INDEX.expand(len(h), 3), h.sin()),
    "select_scatter": lambda h: torch.select_scatter(h, h[:, 1].sin(), 1, 0),
    "diagonal_scatter": lambda h: torch.diagonal_scatter(h[:, :, None] * h[:, None], h, 0, 1, 2).sum(2),
    "diag_embed": lambda h: h.sin().diag_embed().sum(1),
    "complex of two parts": lambda h: torch.view_as_real(torch.fft.fft(torch.complex(h.sin(), h.flip(1)))).sum(-1),
    "nll_loss": lambda h: h.sin() + F.nll_loss(h, h.argmax(1), reduction="none")[:, None],
    "trace": lambda h: torch.stack([u * u.diag().trace() for u in h.sin()]),
    "copy": lambda h: torch.empty_like(h).copy_(h.sin()),
    "copy of one column": lambda h: torch.empty_like(h).copy_(h[:, :1].sin()),
    "assignment of everything": lambda h: operator.setitem(z := torch.zeros_like(h), slice(None), h.sin()) or z,
    "masked_scatter": lambda h: h.masked_scatter(torch.tensor([True, False, True]), h.cos()[:, [1, 2]]),
    "take": lambda h: h.sin().take(torch.arange(h.numel()).view(h.shape).flip(1)),
    "rot90": lambda h: torch.rot90(h.sin()[:, :, None], 2, (1, 2))[:, :, 0],
    "block_diag": lambda h: torch.block_diag(*h.sin()).view(len(h), len(h), 3).sum(1),
    "fake_quantize": lambda h: h.sin() + torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -7, 8),
    "nansum": lambda h: h.sin().nansum(1, keepdim=True) + h,
    "packed sequence": lambda h: nn.utils.rnn.pack_padded_sequence(h.sin(), [3] * len(h), batch_first=True).data.view(3, -1).T,
    "sort": lambda h: h.sin().sort(1).values,
    "topk": lambda h: h + h.sin().topk(2, 1).values.sum(1, keepdim=True),
    "kthvalue": lambda h: h + h.sin().kthvalue(2, 1, keepdim=True).values,
    "median": lambda h: h + h.sin().median(1, keepdim=True).values,
    "nanmedian": lambda h: h + h.sin().nanmedian(1, keepdim=True).values,
    "mode": lambda h: h + torch.cat([h, h[:, :1]], 1).sin().mode(1, keepdim=True).values,
    "cummax": lambda h: h.sin().cummax(1).values,
    "cummin": lambda h: h.sin().cummin(1).values,
    "aminmax": lambda h: h + torch.sub(*h.sin().aminmax(dim=1, keepdim=True)),
    **{f"fm{which}": lambda h, f=f: f(h.sin(), h.flip(1).tanh()) for which, f in (("ax", torch.fmax), ("in", torch.fmin))},
    **{
        name: lambda h, name=name: h * getattr(torch, name)(3 * h.sin()) + getattr(torch, name)(h)
        for name in "sign sgn round floor ceil trunc frac deg2rad rad2deg".split()
    },
    **{f"{name} alone": lambda h, name=name: getattr(torch, name)(3 * h.sin()) for name in "sign round floor".split()},
    "signed square root": lambda h: h.sign() * (h.abs() + 0.01).sqrt(),
    "round, decimals": lambda h: h.sin() * torch.round(h, decimals=1),
    **{
        f"{name} {what}": lambda h, name=name, g=g: getattr(torch, name)(h.sin(), g(h)).square()
        for name in ("fmod", "remainder", "copysign")
        for what, g in {
            "of a number": lambda h: 0.4,
            "of data": lambda h: POSITIVE,
            "of itself": lambda h: 0.3 + h.flip(1).cos(),
            "broadcast": lambda h: 0.3 + h[:, :1].cos(),
        }.items()
    },
    **{
        f"{name} with a constant": lambda h, name=name: getattr(torch, name)(POSITIVE, 0.3 + h.sin()).square() + h
        for name in ("fmod", "remainder", "copysign")
    },
    "sparse matrix": lambda h: torch.sparse.mm(SPARSE, h.sin().T).T + h,
    "sparse matrix, added": lambda h: torch.sparse.addmm(POSITIVE.expand(3, -1)[:, :1].expand(-1, len(h)), SPARSE, h.sin().T, alpha=2).T,
    "ldexp": lambda h: torch.ldexp(h.sin(), torch.tensor([2, 0, -1])),
    "cross with data": lambda h: torch.linalg.cross(h.sin(), h.detach().flip(1)) + torch.cross(POSITIVE.expand_as(h), h.sin(), 1),
    "complex": lambda h: torch.view_as_real(torch.view_as_complex(torch.stack([h, h.sin()], 2)) * torch.polar(POSITIVE, POSITIVE)).sum(2),
    "fft": lambda h: torch.fft.fft(h.sin()).real + torch.fft.irfft(torch.fft.rfft(h.tanh()).conj() * POSITIVE[:2], n=3),
    **{f"scatter {how}": lambda h, how=how: h.scatter_reduce(1, (h > 0).long(), h.sin(), how) for how in "sum mean amax amin".split()},
    "drawn": lambda h: h.sin() * (h * 1).uniform_(1, 2).sign() + (h * 1).log_normal_().sign() + (h * 1).fill_(2.0),
    "sampled": lambda h: F.grid_sample(h[:, None, None].sin(), POSITIVE.view(1, 1, 3, 1).repeat(len(h), 1, 1, 2), align_corners=True)[:, 0, 0],
}
"""(Piecewise) linear operations behind or beside curved ones."""


ALL = {name: lambda net, x, f=function: net.b(f(net.a(x))) for name, function in FUNCTIONS.items()}
ALL |= {f"{name} of parameters": lambda net, x, f=f: net.b(f(net.a(x).tanh(), net.a.weight, net.a.bias)) for name, f in OF_PARAMETERS.items()}


def build(name: str, N: int) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        forward = ALL.get(name) or (lambda net, x: net.b(LINEAR[name](net.a(x))))
        return classify(Net(forward, **layers(3, 3, 4)()), randn(N, 3))


def keys(node: Node | None, found: set[str]) -> set[str]:
    if node is not None:
        found.add(node.name().replace("Backward", "", 1))
        for upstream, _ in node.next_functions:
            keys(upstream, found)
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("name", [*ALL, *LINEAR])
def test_diagonal_behind_a_curved_function(name: str, N: int) -> None:
    problem = build(name, N)
    run(problem, BatchDiagHessian())
    QUANTITIES["BatchDiagHessian"].check(Oracle(build(name, N)), collect(problem, "diag_h_batch"))


@pytest.mark.parametrize("samples", [8, 4096])
@pytest.mark.parametrize(("function", "slope"), [(torch.div, lambda d: 1 / d), (torch.xlogy, torch.log)])
def test_no_digits_are_lost_where_a_function_is_linear(function: Callable, slope: Callable[[Tensor], Tensor], samples: int) -> None:
    """Large residuals add to a block of the Hessian that is zero there; the rest is known by hand."""
    torch.manual_seed(0)
    net, x = Net(lambda net, x: function(net.a(x), 2 + net.b(x).sigmoid()), **layers(4, 4, 4)()).float(), torch.randn(samples, 4)
    out = net(x).detach()
    extend(net)
    with backpack(DiagHessian()):
        extend(nn.MSELoss(reduction="sum"))(net(x), out + 1e4 * torch.randn(samples, 4)).backward()
    expected = 2 * torch.einsum("nk,ni->ki", slope(2 + net.b(x).sigmoid()).double() ** 2, x.double() ** 2)
    torch.testing.assert_close(net.a.weight.diag_h.double(), expected, rtol=1e-5, atol=0)


def test_every_known_function_has_a_row() -> None:
    found: set[str] = set()
    for name in ALL:
        problem = build(name, 3)
        keys(problem.loss(problem.outputs()).grad_fn, found)
    elsewhere = {"SafeSoftmax0", "Bmm0", "Norm1"}  # rows of the table of cases
    elsewhere |= node_functions._WEIGHT_NORM  # below
    kernels = {key for key in node_functions._KNOWN if key.startswith("ScaledDotProduct")}
    assert node_functions._KNOWN - found - elsewhere - kernels == set()


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("convolve", [F.conv1d, F.conv2d, F.conv3d])
@pytest.mark.parametrize("extension", [DiagHessian, BatchDiagHessian])
def test_fused_weight_norm(extension: type[DiagHessian | BatchDiagHessian], convolve: Callable, N: int, frozen: int | None) -> None:
    """Torch itself takes the norms for constants when it differentiates twice, so that the truth is the same function in single operations."""

    def by_hand(v: Tensor, g: Tensor) -> Tensor:
        return g * v / v.flatten(1).norm(dim=1).view(g.shape)

    extent = [1] * ([F.conv1d, F.conv2d, F.conv3d].index(convolve) + 1)

    found = []
    for function in (by_hand, torch._weight_norm):
        torch.manual_seed(0)
        parts = {"v": nn.Parameter(randn(3, 3, *(2 * n for n in extent)).double()), "g": nn.Parameter(randn(3, 1, *extent).double())}
        net = Net(
            lambda net, x, f=function: net.b(convolve(net.a(x).reshape(-1, 3, *extent), f(net.p.v, net.p.g), padding=1).flatten(2).mean(2).tanh()),
            **layers(3, 3, 4, p=lambda parts=parts: nn.ParameterDict(parts))(),
        ).double()
        if frozen is not None:
            list(parts.values())[frozen].requires_grad_(False)
        extend(net)
        with backpack(extension()):
            extend(nn.CrossEntropyLoss())(net(randn(N, 3).double()), torch.arange(N)).backward()
        found.append([getattr(p, extension().savefield) for p in net.parameters() if p.requires_grad])
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected)


def test_fused_weight_norm_of_the_last_axis() -> None:
    refused(lambda net, x: net.b(F.linear(net.a(x), torch._weight_norm(net.a.weight, net.a.bias[None], 1))), "WeightNormInterface")


def refused(forward: Callable, match: str, **parts: nn.Module) -> None:
    problem = classify(Net(forward, a=Linear(3, 3), b=Linear(3, 4), **parts), randn(3, 3))
    with pytest.raises(NotImplementedError, match=match) as error:
        run(problem, DiagHessian(), BatchGrad())
    assert "hessian_vector_product" in str(error.value)
    assert "exclude=" in str(error.value)
    for parameter in problem.model.parameters():
        assert not hasattr(parameter, "diag_h")
        assert not hasattr(parameter, "grad_batch")


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def test_refusals_name_the_operation() -> None:
    refused(lambda net, x: net.b(Cube.apply(net.a(x))), "CubeBackward")
    refused(lambda net, x: net.b(torch.fft.fft(net.a(x)).abs()), "AbsBackward0")
    refused(lambda net, x: net.b(net.a(x).scatter_reduce(1, (x > 0).long(), net.a(x).sin(), "prod")), "ScatterReduceBackward0")
    refused(lambda net, x: net.b(torch.fft.fft(net.a(x)).square().real), "PowBackward0")
    refused(lambda net, x: net.b(net.a(x) + sum(torch.var_mean(net.a(x), 1, keepdim=True))), "VarMeanBackward0")
    refused(lambda net, x: torch.diag(net.a(x)[:, 0]) @ net.b(net.a(x)), "MmBackward0")  # sums over an axis of samples
    refused(lambda net, x: net.b(net.a(x) * torch.stack([F.mse_loss(u, 0 * u) for u in net.a(x)])[:, None]), "MseLossBackward0")  # means
    refused(lambda net, x: net.b(net.norm(net.norm(net.a(x)))), r"couple several uses .*`weight \* F.layer_norm", norm=nn.LayerNorm(3))


def test_without_gradient_of_its_own() -> None:
    """Rounded quotients have no derivative, and so no second one."""
    problem = classify(
        Net(lambda net, x: net.b(torch.div(net.a(x), 1 + net.a(x).square().detach(), rounding_mode="floor") + net.a(x)), **layers(3, 3, 4)()),
        randn(3, 3),
    )
    run(problem, BatchDiagHessian())
    assert collect(problem, "diag_h_batch").keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_beside_other_quantities() -> None:
    """Births belong to the Hessian alone: per-sample gradients and the Gauss-Newton of the same pass are what they are without."""
    together, alone = build("exp of parameters", 3), build("exp of parameters", 3)
    run(together, BatchGrad(), BatchDiagHessian(), QUANTITIES["DiagGGNExact"].make(), QUANTITIES["Variance"].make())
    run(alone, BatchGrad(), QUANTITIES["DiagGGNExact"].make(), QUANTITIES["Variance"].make())
    for field in ("grad_batch", "diag_ggn_exact", "variance"):
        torch.testing.assert_close(collect(together, field), collect(alone, field))
    QUANTITIES["BatchDiagHessian"].check(Oracle(build("exp of parameters", 3)), collect(together, "diag_h_batch"))


@pytest.mark.parametrize("name", ["exp of parameters", "mul, broadcast", "mm of parameters"])
def test_subsampling(name: str) -> None:
    problem, oracle = build(name, 3), Oracle(build(name, 3))
    run(problem, BatchDiagHessian(subsampling=[2, 0, 2]))
    for key, value in collect(problem, "diag_h_batch").items():
        torch.testing.assert_close(value, oracle.diag_h_batch[key][[2, 0, 2]])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("quantity", "field"), [("KFLR", "kflr"), ("BatchDiagHessian", "diag_h_batch"), ("BatchGrad", "grad_batch")])
def test_layers_for_rows_of_one_sample(quantity: str, field: str, rows: int) -> None:
    """Steps lie in front of the samples, and some of one sample go through a layer of their own, as to an expert."""

    def make() -> Problem:
        def forward(net: Net, x: Tensor) -> Tensor:
            steps = net.a(x).transpose(0, 1)
            chosen = (torch.arange(3)[:, None] < rows) & (torch.arange(2) == 1)
            steps = steps.index_put((chosen,), net.norm(net.expert(steps[chosen])).tanh())
            return net.b(steps.sum(0))

        torch.manual_seed(0)
        parts = {"a": Linear(4, 2), "expert": Linear(2, 2), "norm": nn.LayerNorm(2), "b": Linear(2, 4)}
        return classify(Net(forward, **parts).double(), randn(2, 3, 4, dtype=torch.float64))

    problem = make()
    run(problem, QUANTITIES[quantity].make())
    QUANTITIES[quantity].check(Oracle(make()), collect(problem, field))


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_fully_masked_rows(kernel: str) -> None:
    """A row of scores without any key has weights zero, and no derivative: that of attention in modules, and of the fused kernel."""
    x, mask = randn(2, 3, 4, dtype=torch.float64), torch.tensor([[True, False, False]] * 3)
    mask[1] = False

    def make(dropout: float) -> Problem:
        def forward(net: Net, x: Tensor) -> Tensor:
            h = net.a(x)[:, None]
            return net.b(F.scaled_dot_product_attention(h, h.sin(), h.cos(), attn_mask=mask, dropout_p=dropout)[:, 0]).mean(1)

        torch.manual_seed(0)
        return classify(Net(forward, a=Linear(4, 2), b=Linear(2, 4)).double(), x)

    dropout = 0.0 if kernel == "flash" else 1e-9
    problem = make(dropout)
    assert ("ScaledDotProductFlashAttentionForCpu0" in keys(problem.outputs()[0].grad_fn, set())) == (kernel == "flash")
    run(problem, BatchDiagHessian())
    with sdpa_kernel(SDPBackend.MATH):
        QUANTITIES["BatchDiagHessian"].check(Oracle(make(dropout)), collect(problem, "diag_h_batch"))


@pytest.mark.parametrize("name", ALL)
def test_columns_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of costs know from shapes how many columns are born."""
    seen = []

    def counting(gap: Gap, grad: Tensor) -> tuple:
        signs, born = residual(gap, grad)
        seen.append((gap.node.name(), columns_of(gap), len(signs), *(len(part.columns) for part in born)))
        return signs, born

    monkeypatch.setattr("backpack.extensions.signed_flow.residual", counting)
    run(build(name, 3), DiagHessian())
    assert seen or name == "cumsum"
    for node, expected, *columns in seen:
        least = 2 * expected // 3 if "Addc" in node else expected  # these are linear in one of three inputs
        assert set(columns) == {least} or ("constants" in name and max(columns) <= expected), node


def test_births_cost_something() -> None:
    """A curved operation makes the Hessian's diagonal much dearer than a linear one, and eigenvectors of its blocks do so again.

    On one thread of a CPU these take 70, 350 and 8 gradients.
    """
    x, y = randn(32, 100), torch.randint(5, (32,))
    costs = []
    for function in (torch.sinh, lambda h: h.softmax(1), torch.neg):
        net = Net(lambda net, x, f=function: net.b(f(net.a(x))), **layers(100, 200, 5)())
        costs.append(explain(net, nn.CrossEntropyLoss(), x, y, [DiagHessian()]).cost)
    for cost, measured in zip(costs, (70, 350, 8), strict=True):
        assert measured / 3 < cost < 3 * measured


FLAT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cos": lambda x, p: (x * p).cos(),
    "cosh": lambda x, p: (x * p).cosh(),
    "variance": lambda x, p: (x * p).var(1, keepdim=True) + x,
    "addcmul": lambda x, p: torch.addcmul(x, x * p, x * p),
    "product": lambda x, p: torch.stack([x * p, x * p], 2).prod(2),
    "matrices": lambda x, p: torch.baddbmm(x[:, None], (x * p)[:, None], p.diag().expand(len(x), -1, -1))[:, 0],
}


@pytest.mark.parametrize("at", [0.0, 1e-7])
@pytest.mark.parametrize("name", FLAT)
def test_derivatives_that_are_zero_hide_no_samples(name: str, at: float) -> None:
    """Where the first derivative is exactly zero, the second one is not: exact, or refused where the samples cannot be followed."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.full((4,), at, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return FLAT[name](x, self.p)

    torch.manual_seed(0)
    model, x, y = extend(Flat()), torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    try:
        with backpack(DiagHessian()):
            F.mse_loss(model(x), y).backward()
    except UnsupportedError as error:
        assert not at and "exactly zero" in str(error) and not hasattr(model.p, "diag_h")
        return
    truth = torch.autograd.functional.hessian(lambda p: F.mse_loss(FLAT[name](x, p), y), model.p.detach()).diagonal()
    assert truth.any()
    torch.testing.assert_close(model.p.diag_h, truth)


ORDER = torch.tensor([2, 0, 4, 3, 1])
ROWS_OF_ZEROS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "permuted": (lambda h: h[ORDER], lambda z: z[ORDER.argsort()]),
    "permuted, time first": (lambda h: h.transpose(0, 1)[:, ORDER], lambda z: z[:, ORDER.argsort()].transpose(0, 1)),
    "permuted, flat": (lambda h: h[ORDER].flatten(0, 1), lambda z: z.unflatten(0, (5, 2))[ORDER.argsort()]),
    "time first, flat": (lambda h: h.transpose(0, 1).flatten(0, 1), lambda z: z.unflatten(0, (2, 5)).transpose(0, 1)),
}


@pytest.mark.parametrize("zeros", [(1,), (0, 3), (0, 1, 2)])
@pytest.mark.parametrize("order", ROWS_OF_ZEROS)
@pytest.mark.parametrize(
    "function",
    [lambda h: h.var(-1), lambda h: h.prod(-1), lambda h: torch.stack([rows.var(-1) for rows in h])],
    ids=["variance", "product", "variance, in a loop"],
)
def test_rows_of_zeros_keep_their_samples(function: Callable[[Tensor], Tensor], order: str, zeros: tuple[int, ...]) -> None:
    """Samples whose derivative is exactly zero have a second derivative of their own, in whichever order their rows lie."""
    there, back = ROWS_OF_ZEROS[order]
    net = Net(lambda net, x: net.b(back(function(there(net.a(x))))), a=Linear(2, 3), b=Linear(2, 4)).double()
    nn.init.zeros_(net.a.bias)
    x = randn(5, 2, 2, dtype=torch.float64)
    x[list(zeros)] = 0
    problem = classify(net, x)
    run(problem, BatchDiagHessian())
    QUANTITIES["BatchDiagHessian"].check(Oracle(problem), collect(problem, "diag_h_batch"))


def test_layers_to_which_only_zeros_arrive() -> None:
    """A mask hides the last states of a recurrent layer for all samples: nothing is born there, and it is known of nothing where it lies."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.RNN(3, 2, batch_first=True), nn.RNN(2, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.first(x)[0], torch.ones(2, dtype=torch.long), batch_first=True)
            return self.second(packed)[1].masked_fill(torch.tensor(True), 0.0).movedim(1, 0)

    def make() -> Problem:
        torch.manual_seed(0)
        return Problem(Masked().double(), randn(2, 2, 3, dtype=torch.float64), [Term(nn.MSELoss(), torch.ones(2, 1, 2, dtype=torch.float64))])

    problem = make()
    run(problem, BatchDiagHessian())
    QUANTITIES["BatchDiagHessian"].check(Oracle(make()), collect(problem, "diag_h_batch"))


@pytest.mark.parametrize("N", [1, 3])
def test_attention_of_scale_zero(N: int) -> None:
    """Queries have no influence there; the scale is zero, and not that of the default."""

    def attend(net: Net, x: Tensor) -> Tensor:
        h = net.first(x).tanh()
        return net.out(F.scaled_dot_product_attention(net.q(h)[:, None], h[:, None], net.v(h)[:, None], scale=0.0)[:, 0]).sum(1)

    def build() -> Problem:
        parts = layers(first=lambda: Linear(3, 2), q=lambda: Linear(2, 2), v=lambda: Linear(2, 2), out=lambda: Linear(2, 4))
        with default_dtype(torch.float64):
            torch.manual_seed(0)
            return classify(Net(attend, **parts()), randn(N, 4, 3))

    problem, oracle = build(), Oracle(build())
    run(problem, DiagHessian())
    QUANTITIES["DiagHessian"].check(oracle, collect(problem, "diag_h"))
    assert not problem.model.q.weight.diag_h.any()
