"""The oracle itself: against formulas by hand where they are short, and against itself where two definitions must agree."""

import pytest
import torch
from cases import CASES
from oracle import Oracle, Problem, Term, clip, identity
from table import default_dtype
from torch import Tensor, einsum, nn, randn

N = 5
ALIVE = 1e-6  # a gradient below this would hide errors
CHAINS = [name for name, case in CASES.items() if "chain" in case.tags and not case.tags & {"reused", "special loss"}]
FULLY_CONNECTED = [name for name in CHAINS if not CASES[name].tags & {"extra axes", "positions", "groups", "other parameters"}]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def kronecker_product(B: Tensor, A: Tensor | None = None) -> Tensor:
    return B if A is None else einsum("op,ij->oipj", B, A).reshape(len(B) * len(A), -1)


def regression(reduction: str) -> tuple[Oracle, Tensor, Tensor, float]:
    """Linear regression with two outputs: oracle, inputs, residuals and the factor in front of each square."""
    with default_dtype(torch.float64):
        torch.manual_seed(1)
        model, x, y = nn.Linear(3, 2), randn(N, 3), randn(N, 2)
    oracle = Oracle(Problem(model, x, [Term(nn.MSELoss(reduction=reduction), y)]))
    return oracle, x, (model(x) - y).detach(), 1 / (2 * N) if reduction == "mean" else 1.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_regression(reduction: str) -> None:
    oracle, x, r, c = regression(reduction)
    grad_batch = 2 * c * r[:, :, None] * x[:, None, :]
    close(oracle.grad_batch["weight"], grad_batch)
    close(oracle.grad_batch["bias"], 2 * c * r)
    close(oracle.batch_l2["weight"], 4 * c**2 * r.square().sum(1) * x.square().sum(1))
    close(oracle.sum_grad_squared["weight"], 4 * c**2 * r.square().T @ x.square())
    close(oracle.variance["bias"], (2 * c * r).var(0, unbiased=False))
    diagonal = 2 * c * x.square()[:, None, :].expand(N, 2, 3)
    close(oracle.diag_ggn_batch(oracle.hessian_exact)["weight"], diagonal)
    close(oracle.diag_h_batch["weight"], diagonal)
    block = 2 * c * torch.kron(torch.eye(2).double(), x.T @ x)
    close(oracle.ggn_blocks(oracle.hessian_exact)["weight"], block)
    close(oracle.hessian_blocks["weight"], block)
    B, A = oracle.kronecker(oracle.hessian_exact)["weight"]
    close(B, 2 * c * N * torch.eye(2).double())
    close(A, x.T @ x / N)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logistic_regression(reduction: str) -> None:
    with default_dtype(torch.float64):
        torch.manual_seed(2)
        model, x, y = nn.Linear(3, 4), randn(N, 3), torch.randint(4, (N,))
    oracle = Oracle(Problem(model, x, [Term(nn.CrossEntropyLoss(reduction=reduction), y)]))
    c = 1 / N if reduction == "mean" else 1.0
    p = model(x).detach().softmax(1)
    H = c * (torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
    g = c * (p - torch.eye(4).double()[y])
    close(oracle.hessian_exact, H)
    close(oracle.grad_batch["weight"], g[:, :, None] * x[:, None, :])
    close(oracle.diag_ggn_batch(H)["weight"], c * (p * (1 - p))[:, :, None] * x.square()[:, None, :])
    close(oracle.ggn_blocks(H)["weight"], einsum("noq,ni,nj->oiqj", H, x, x).reshape(12, 12))
    close(oracle.ggn_per_sample(H)[:, 12:, 12:], H)
    close(oracle.hessian_blocks["bias"], H.sum(0))
    B, A = oracle.kronecker(H)["weight"]
    close(B, H.sum(0))
    close(A, x.T @ x / N)


def test_scale_and_sum_of_losses() -> None:
    with default_dtype(torch.float64):
        model, x, y = nn.Linear(3, 2), randn(N, 3), randn(N, 2)
    loss = nn.MSELoss(reduction="sum")
    oracle = Oracle(Problem(model, x, [Term(loss, y, scale=3.0), Term(loss, -y, scale=0.5)]))
    r = (model(x) - y).detach(), (model(x) + y).detach()
    close(oracle.grad_batch["bias"], 6 * r[0] + r[1])
    close(oracle.hessian_blocks["bias"], 7 * N * torch.eye(2).double())


def test_hessian_diagonal_of_two_scalar_layers() -> None:
    """For (v tanh(w x) - y)^2 the second derivatives can be written down."""
    with default_dtype(torch.float64):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False))
        x, y = randn(N, 1), randn(N, 1)
    oracle = Oracle(Problem(model, x, [Term(nn.MSELoss(reduction="sum"), y)]))
    w, v = (p.item() for p in model.parameters())
    t, r = (w * x).tanh(), v * (w * x).tanh() - y
    dt, d2t = (1 - t**2) * x, -2 * t * (1 - t**2) * x**2
    close(oracle.diag_h_batch["0.weight"].flatten(1), 2 * ((v * dt) ** 2 + r * v * d2t))
    close(oracle.diag_h_batch["2.weight"].flatten(1), 2 * t**2)
    close(oracle.recursion(clip, average=False)["0.weight"], (2 * ((v * dt) ** 2 + (r * v * d2t).clamp(min=0))).sum(0, keepdim=True))
    close(oracle.recursion(torch.abs, average=False)["0.weight"], (2 * ((v * dt) ** 2 + (r * v * d2t).abs())).sum(0, keepdim=True))


IGNORED = {f"F.cross_entropy, {kind}, {reduction}" for kind in ("ignored", "smoothing") for reduction in ("mean", "sum")}  # the first target is


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_are_alive_and_add_up(name: str, batch: int) -> None:
    """Samples sum to the gradient, and no case is blind: apart from the bias of the keys and idle experts, every parameter has a gradient."""
    oracle = Oracle(CASES[name].build(batch))
    assert oracle.params
    for parameter, per_sample in oracle.grad_batch.items():
        close(per_sample.sum(0), oracle.grad[parameter])
        idle = parameter == "k.bias" or parameter.startswith("experts.") or (batch == 1 and name in IGNORED)
        assert idle or per_sample.abs().amax() > ALIVE


@pytest.mark.parametrize("name", CASES)
def test_building_twice_gives_the_same(name: str) -> None:
    first, second = (CASES[name].build(3) for _ in range(2))
    for a, b in zip(first.outputs(), second.outputs(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.loss(first.outputs()), second.loss(second.outputs()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_recursion_without_modification_is_ggn_and_hessian(name: str) -> None:
    oracle = Oracle(CASES[name].build(3))
    for residual, expected in ((None, oracle.ggn_blocks(oracle.hessian_exact)), (identity, oracle.hessian_blocks)):
        blocks = oracle.recursion(residual, average=False)
        assert blocks.keys() == expected.keys()
        for parameter, block in blocks.items():
            close(block, expected[parameter])


@pytest.mark.slow
@pytest.mark.parametrize("name", FULLY_CONNECTED)
def test_kronecker_factors_of_one_sample_are_exact(name: str) -> None:
    """On one sample the Kronecker product of the factors is the block itself."""
    oracle = Oracle(CASES[name].build(1))
    ggn = oracle.ggn_blocks(oracle.hessian_exact)
    for factors, blocks in (
        (oracle.kronecker(oracle.hessian_exact), ggn),
        (oracle.recursion(None, average=True), ggn),
        (oracle.recursion(identity, average=True), oracle.hessian_blocks),
    ):
        for parameter, block in blocks.items():
            close(kronecker_product(*factors[parameter]), block)


UNDEFINED = {"tied and transposed", "columns of a bare table"}  # factors of two shapes, or of some of the features


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNDEFINED])
def test_bias_factor_is_exact_block(name: str) -> None:
    oracle = Oracle(CASES[name].build(3))
    blocks = oracle.ggn_blocks(oracle.hessian_exact)
    for parameter, factors in oracle.kronecker(oracle.hessian_exact).items():
        if len(factors) == 1:
            close(factors[0], blocks[parameter])
        else:
            pairs = factors if isinstance(factors[0], list) else [factors]
            assert sum(B.shape[0] * A.shape[0] for B, A in pairs) == blocks[parameter].shape[0]


@pytest.mark.parametrize(
    "name", ["MSE, mean", "CE, weights, 3-d, sum", "CE, smoothing, ignored, mean", "BCE, both weights, mean", "two losses on two heads"]
)
def test_sampled_hessian_has_the_right_mean(name: str) -> None:
    oracle = Oracle(CASES[name].build(3))
    draws = torch.stack([oracle.sampled_hessians(50, seed=seed)[0] for seed in range(40)])
    error = draws.std(0) / len(draws) ** 0.5
    exact = oracle.hessian_exact
    assert error.amax() < 0.06 * exact.abs().amax()
    assert ((draws.mean(0) - exact).abs() <= 5 * error + 1e-12).all()
