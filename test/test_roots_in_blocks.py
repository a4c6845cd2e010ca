"""Residuals, and Hessians of losses, that are factorized block by block: their columns, and the quantities for which they are carried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases_nets import Net
from oracle import Oracle, Problem
from table import classify, default_dtype
from test_derivatives import LAYERS, Recorded, setup
from test_extensions import QUANTITIES, check_each, close, run
from torch import Tensor, nn, randn
from torch.nn import LayerNorm, Linear, Module, Sequential
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend, extensions, register
from backpack.core import residuals
from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads
from backpack.core.derivatives.blocks import has_root
from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.normalization import LayerNormDerivatives
from backpack.core.derivatives.registry import derivatives_for
from backpack.core.derivatives.softmax import LogSoftmaxDerivatives, SoftminDerivatives
from backpack.extensions import flows
from backpack.utils.columns import ScatteredColumns

ROOTS = [name for name, case in LAYERS.items() if has_root(derivatives_for(case.make()))]


def assert_root(derivatives: BaseDerivatives, recorded: Recorded) -> None:
    """Put the columns together, and compare with the whole matrix of each sample from the definition."""
    columns, signs = derivatives.residual_root(recorded.module, recorded.g_out)
    count, size, entries = columns.shape
    assert signs.shape == (count, size)
    assert size == entries * derivatives.columns_of_an_entry(recorded.module)
    block, number = torch.cartesian_prod(torch.arange(count), torch.arange(size)).unbind(1)
    columns = columns[block, number].unflatten(0, (count, size))
    blocks = torch.einsum("bem,be,ben->bmn", columns, signs, columns)
    shape, axis = recorded.x.shape, derivatives.axis_of_blocks(recorded.module)
    places = torch.arange(shape.numel()).reshape(shape).movedim(axis, -1).reshape(count, entries)
    found = torch.zeros(shape.numel(), shape.numel(), dtype=blocks.dtype)
    found[places.unsqueeze(2), places.unsqueeze(1)] = blocks.detach()
    expected = torch.block_diag(*GenericDerivatives().residual(recorded.module, None, recorded.g_out).detach())
    largest = float(columns.detach().square().sum(1).max()) if count else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * largest + 1e-14)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", ROOTS)
def test_root_of_a_residual(name: str, samples: int) -> None:
    assert_root(*setup(name, samples))


@pytest.mark.parametrize("make", [nn.Softmax, nn.Softmin, nn.LogSoftmax])
@pytest.mark.parametrize("classes", [1, 4])
def test_root_of_a_normalized_exponential_without_curvature(make: Callable[[int], Module], classes: int) -> None:
    recorded = Recorded(make(1), randn(3, classes, 2).double())
    recorded.g_out = (torch.zeros(3, classes, 2, dtype=torch.float64),)
    assert_root(derivatives_for(recorded.module), recorded)


@pytest.mark.parametrize("make", [LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("kind", ["constant", "no gradient", "one entry", "two entries", "gradient along the output"])
def test_root_of_a_residual_where_something_is_zero(make: Callable[[int], Module], kind: str) -> None:
    size = {"one entry": 1, "two entries": 2}.get(kind, 5)
    x = torch.ones(3, size) * torch.arange(3.0)[:, None] if kind == "constant" else randn(3, size)
    recorded = Recorded(make(size).double(), x.double())
    if kind == "gradient along the output":
        recorded.g_out = (recorded.y.detach().clone(),)
    elif kind == "no gradient":
        recorded.g_out = (torch.zeros(3, size, dtype=torch.float64),)
    assert_root(derivatives_for(recorded.module), recorded)


@pytest.mark.parametrize("rule", [LayerNormDerivatives, SoftminDerivatives, LogSoftmaxDerivatives])
def test_root_of_another_product(rule: type[BaseDerivatives]) -> None:
    """A subclass with a second derivative of its own does not inherit the root of that of its parent."""

    class Other(rule):
        def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
            return 2 * super()._residual_mat_prod(module, g_inp, g_out, mat)

    assert has_root(rule())
    assert not has_root(Other())


def attention(net: Net, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(2, (2, 2)).transpose(1, 2) for layer in (net.q, net.k, net.v))
    return net.out((net.normalize(q @ k.mT) @ v).transpose(1, 2).flatten(2)).mean(1)


def attends(normalize: Module) -> Module:
    return Net(attention, q=Linear(3, 4), k=Linear(3, 4), v=Linear(3, 4), normalize=normalize, out=Linear(4, 4))


def time_first(net: Net, x: Tensor) -> Tensor:
    return net.out(net.normalize(net.a(x.transpose(0, 1)))).mean(0)


def folded(net: Net, x: Tensor) -> Tensor:
    return net.out(net.normalize(net.a(x.flatten(0, 1)))).unflatten(0, x.shape[:2]).mean(1)


IMAGES = {
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(3, alpha=0.7, k=0.6),
    "Softmax2d": nn.Softmax2d,
    "LogSoftmax": lambda: nn.LogSoftmax(1),
    "Softmax, columns": lambda: nn.Softmax(2),
}
NETS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "attention": (lambda: attends(nn.Softmax(-1)), (4, 3)),
    "attention, heads": (lambda: attends(nn.Softmin(1)), (4, 3)),
    "samples on axis 1": (lambda: Net(time_first, a=Linear(3, 4), normalize=nn.Softmax(2), out=Linear(4, 4)), (4, 3)),
    "folded positions": (lambda: Net(folded, a=Linear(3, 4), normalize=nn.LogSoftmax(1), out=Linear(4, 4)), (4, 3)),
    **{name: (lambda make=make: Sequential(nn.Conv2d(2, 3, 2), make(), nn.Flatten(), Linear(12, 4)), (2, 3, 3)) for name, make in IMAGES.items()},
}


@pytest.mark.parametrize("memory", [1 << 30, 2000])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_diagonal_of_the_hessian(name: str, samples: int, memory: int) -> None:
    make, shape = NETS[name]
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(2)
        problem = classify(make(), randn(samples, *shape))
    expected = Oracle(problem).diag_h_batch
    run(problem, extensions.BatchDiagHessian(), memory=memory)
    for parameter, truth in zip(problem.model.parameters(), expected.values(), strict=True):
        close(parameter.diag_h_batch, truth)


# --- losses -----------------------------------------------------------------------------------------------------------------------------------

LOSSES = [
    *("MSE, mean", "MSE, 3-d, sum", "CE, mean", "CE, 3-d, sum", "CE, weights, 3-d, mean", "CE, ignored, 3-d, mean", "CE, probabilities, 3-d, sum"),
    *("BCE, one output, mean", "BCE, 3-d, mean", "BCE, both weights, mean", "BCELoss, weight, 3-d, mean", "HuberLoss, mean"),
    *("PoissonNLLLoss, mean", "SoftMarginLoss, sum", "2 * MSE", "weighted sum of MSE", "weighted sum of CE, 3-d", "weighted sum of BCE, pos_weight"),
    *("negative MSE", "CE, negative weights", "negative CE, negative weights", "BCE, negative weights", "negative F.mse_loss", "own loss"),
    *("two losses on one output", "two losses on two heads", "samples second", "samples folded", "log_softmax, classes last"),
    *("NLLLoss of LogSoftmax, 3-d, mean", "folded F.cross_entropy, mean", "folded F.mse_loss", "F.mse_loss of softmax", "curved: samples folded"),
    *("weighted sum of F.cross_entropy, weights, 3-d", "matrix on positions", "samples of different size", "residual", "derived loss, mean"),
    *("F.mse_loss, broadcast", "NLLLoss, 3-d, ignored, mean", "own loss of entries", "own loss of entries, not convex", "own loss of positions"),
    *("own loss of positions, not convex", "own loss of positions, classes last, weighted", "own loss of neighbours", "own loss, registered"),
]
READERS = {name: QUANTITIES[name] for name in ("DiagGGNExact", "BatchDiagGGNExact", "KFLR", "DiagHessian", "BatchDiagHessian", "DiagGGNMC")}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", LOSSES)
def test_roots_of_losses_in_blocks(case: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "FORMED", 1)
    check_each(case, batch, READERS)


@pytest.mark.parametrize("extension", ["DiagGGNExact", "KFLR", "DiagHessian"])
@pytest.mark.parametrize("kind", ["MSE", "MSE, positions", "CE", "CE, function"])
def test_roots_of_losses_are_never_formed_together(kind: str, extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    formed, take = [], ScatteredColumns.__getitem__

    def took(columns: ScatteredColumns, part: slice) -> Tensor:
        formed.append((len(columns), len(taken := take(columns, part))))
        return taken

    def results(memory: int, least: int) -> list[Tensor]:
        monkeypatch.setattr(flows, "FORMED", least)
        torch.manual_seed(3)
        model, mse, ce = extend(Sequential(Linear(3, 6), nn.ReLU(), Linear(6, 5)).double()), extend(nn.MSELoss()), extend(nn.CrossEntropyLoss())
        out, x = QUANTITIES[extension].make(), torch.rand(3, 2, 3).double()
        with backpack(out, memory=memory):
            if kind == "MSE":
                loss = mse(model(x[:, 0]), torch.rand(3, 5).double())
            elif kind == "MSE, positions":
                loss = mse(model(x), torch.rand(3, 2, 5).double())
            elif kind == "CE":
                loss = ce(model(x).transpose(1, 2), torch.randint(5, (3, 2)))
            else:
                loss = nn.functional.nll_loss(model(x).log_softmax(2).transpose(1, 2), torch.randint(5, (3, 2)))
            loss.backward()
        return [value for p in model.parameters() for value in tree_leaves(getattr(p, out.savefield))]

    expected = results(1 << 30, 1 << 20)
    monkeypatch.setattr(ScatteredColumns, "__getitem__", took)
    for value, truth in zip(results(400, 1), expected, strict=True):
        close(value, truth, 1e-10)
    columns = formed[0][0]
    assert columns == {"MSE": 5, "MSE, positions": 10}.get(kind, 8)
    assert sum(some for _, some in formed) == columns
    assert max(some for _, some in formed) < columns


class Halved(MSELossDerivatives):
    """A rule of a user, with a root of its own."""

    def _sqrt_hessian(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._sqrt_hessian(*args, **kwargs) / 2


def test_rules_of_users_are_asked_for_their_root(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loss(nn.MSELoss):
        pass

    register(Loss, Halved())
    monkeypatch.setattr(flows, "FORMED", 1)
    found = []
    for cls in (nn.MSELoss, Loss):
        torch.manual_seed(0)
        model, lossfunc = extend(Linear(3, 4)), extend(cls())
        with backpack(extensions.DiagGGNExact()):
            lossfunc(model(torch.rand(2, 3)), torch.rand(2, 4)).backward()
        found.append(model.weight.diag_ggn_exact)
    torch.testing.assert_close(found[1], found[0] / 4)


def test_columns_in_another_order_have_no_rows() -> None:
    scales, matrix, shape = torch.rand(6).double() + 1, torch.rand(3, 2).double(), torch.Size([2, 3])
    for turns, order in ((torch.arange(6) % 3, True), (torch.arange(6) // 2, False)):
        values = scales.reshape(6, 1, 1)
        columns = ScatteredColumns(values, torch.ones(6, 1), turns, 3, lambda full: full.reshape(len(full), *shape), scales.dtype)
        product = columns.times(matrix, lambda c: c, torch.Size([2, 2]))
        assert (product is not None) == order
        if product is not None:
            close(product[:], columns[:] @ matrix)


@pytest.mark.parametrize("together", [1, 100])
def test_rows_of_attention_are_computed_in_parts(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def attended(net: Net, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unsqueeze(1) for layer in (net.q, net.k, net.v))
        return net.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)).mean(1)

    def make() -> Problem:
        with torch.random.fork_rng(), default_dtype(torch.float64):
            torch.manual_seed(2)
            layers = {name: Linear(3, 2) for name in ("q", "k", "v")}
            return classify(Net(attended, **layers, out=Linear(2, 4)), randn(3, 4, 3))

    monkeypatch.setattr(residuals, "_TOGETHER", together)
    problem = make()
    run(problem, extensions.BatchDiagHessian())
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        expected = Oracle(make()).diag_h_batch
    for parameter, truth in zip(problem.model.parameters(), expected.values(), strict=True):
        close(parameter.diag_h_batch, truth)
