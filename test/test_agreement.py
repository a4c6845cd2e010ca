"""Products that users write for layers like those of the library: asked for, compared with what is read in another way, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import sqrt
from typing import Any

import pytest
import torch
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.relu import ReLUDerivatives
from test_extensions import close
from torch import Tensor, nn

from backpack import backpack, extend, extensions, register
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.extensions.module_extensions import DiagGGNBaseModule
from backpack.utils.errors import ArgumentError, UnsupportedError


class Masked(nn.Linear):
    """Some weights count for nothing."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mask", torch.arange(self.weight.numel()).view_as(self.weight) % 3 > 0)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


@register(Masked)
class MaskedDerivatives(LinearDerivatives):
    """Writes products, and leaves the rest to the class of another layer."""

    def _weight_jac_t_mat_prod(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return super()._weight_jac_t_mat_prod(module, *args, **kwargs) * module.mask

    def _jac_t_mat_prod(self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: Any = None) -> Tensor:
        return mat @ (module.weight * module.mask)


class Another(nn.Linear):
    """The same layer."""


@register(Another)
class AnotherDerivatives(LinearDerivatives):
    """The same products, written in another way."""

    def _weight_jac_t_mat_prod(
        self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool = True, subsampling: Any = None
    ) -> Tensor:
        x = module.input0 if subsampling is None else module.input0[subsampling]
        return torch.einsum("vn...o,n...i->voi" if sum_batch else "vn...o,n...i->vnoi", mat, x)


class Larger(nn.Embedding):
    """A table in other units, as in the first transformers."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * sqrt(self.embedding_dim)


@register(Larger)
class LargerDerivatives(EmbeddingDerivatives):
    """In the same units."""

    def _weight_jac_t_mat_prod(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return super()._weight_jac_t_mat_prod(module, *args, **kwargs) * sqrt(module.embedding_dim)


class Words(nn.Module):
    """Sums up what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = Larger(6, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens).sum(1))


def expected(model: nn.Module, x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Per-sample gradients of the sum of losses, and the diagonal of the Gauss-Newton matrix of each sample."""
    gradients, diagonals, parameters = [], [], list(model.parameters())
    for row, label in zip(x, y, strict=True):
        out = model(row[None])
        gradients.append(torch.autograd.grad(nn.functional.cross_entropy(out, label[None]), parameters, retain_graph=True))
        jacobians = [torch.stack(j) for j in zip(*(torch.autograd.grad(o, parameters, retain_graph=True) for o in out[0]), strict=True)]
        p = out[0].detach().softmax(0)
        diagonals.append([torch.einsum("c...,cd,d...->...", j, p.diag() - p.outer(p), j) for j in jacobians])
    return [torch.stack(g) for g in zip(*gradients, strict=True)], [torch.stack(d) for d in zip(*diagonals, strict=True)]


def problem(make: Callable[[], nn.Module], tokens: bool = False, samples: int = 5) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = extend(make().double())
    return model, torch.randint(6, (samples, 3)) if tokens else torch.rand(samples, 4).double(), torch.arange(samples) % 3


def layers(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind(4, 4), nn.Tanh(), kind(4, 3))


READ = ["BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact"]


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize(("make", "tokens"), [(layers(Another), False), (Words, True)], ids=["in another way", "another table"])
def test_products_of_users_are_heard(make: Callable[[], nn.Module], tokens: bool, samples: int) -> None:
    model, x, y = problem(make, tokens, samples)
    with backpack(extensions.BatchGrad(), *(getattr(extensions, name)() for name in READ)):
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    for parameter, rows, diagonals in zip(model.parameters(), *expected(model, x, y), strict=True):
        close(parameter.grad_batch, rows)
        close(parameter.batch_l2, rows.flatten(1).square().sum(1))
        close(parameter.sum_grad_squared, rows.square().sum(0))
        close(parameter.variance, rows.var(0, correction=0) if samples > 1 else torch.zeros_like(parameter))
        close(parameter.diag_ggn_exact, diagonals.sum(0))
        close(parameter.diag_ggn_exact_batch, diagonals)


@pytest.mark.parametrize("extension", [*READ, "DiagHessian", "KFAC", "KFLR", "KFRA"])
def test_layers_that_are_none_of_columns_are_refused(extension: str) -> None:
    model, x, y = problem(layers(Masked))
    with (
        backpack(getattr(extensions, extension)()),
        pytest.raises(UnsupportedError, match="MaskedDerivatives._weight_jac_t_mat_prod .* says something else"),
    ):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert not any(hasattr(p, getattr(extensions, extension)().savefield) for p in model.parameters())


def test_what_asks_for_products_is_right_there() -> None:
    model, x, y = problem(layers(Masked))
    with backpack(extensions.BatchGrad(), extensions.SqrtGGNExact()):
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    for parameter, rows, diagonals in zip(model.parameters(), *expected(model, x, y), strict=True):
        close(parameter.grad_batch, rows)
        close(parameter.sqrt_ggn_exact.square().sum((0, 1)), diagonals.sum(0))


@pytest.mark.parametrize("masked", [False, True])
def test_rules_that_are_handed_over(masked: bool) -> None:
    model, x, y = problem(layers(nn.Linear))
    for layer in model[::2]:
        layer.register_buffer("mask", torch.ones(4).double().index_fill(0, torch.tensor(2), 1 - masked))
    extension = extensions.DiagGGNExact()
    extension.set_module_extension(nn.Linear, DiagGGNBaseModule(MaskedDerivatives()), overwrite=True)
    with backpack(extension), pytest.raises(UnsupportedError, match="says something else") if masked else nullcontext():
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    if not masked:
        for parameter, diagonals in zip(model.parameters(), expected(model, x, y)[1], strict=True):
            close(parameter.diag_ggn_exact, diagonals.sum(0))


class Twice(nn.Linear):
    """Of twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class TwiceColumns(LinearDerivatives):
    """Tells what the weight multiplies."""

    def columns(self, module: nn.Module, subsampling: Any = None) -> Tensor:
        return 2 * super().columns(module, subsampling)

    def _jac_t_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super()._jac_t_mat_prod(*args, **kwargs)

    def _jac_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super()._jac_mat_prod(*args, **kwargs)


class TwiceConv(nn.Conv2d):
    """Of twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class TwiceConvColumns(Conv2DDerivatives):
    """Tells what the kernel multiplies."""

    def columns(self, module: nn.Module, subsampling: Any = None) -> Tensor:
        return 2 * super().columns(module, subsampling)

    def _jac_t_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super()._jac_t_mat_prod(*args, **kwargs)


class Bent(nn.ReLU):
    """Another slope."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(x, 0.5)


class BentSlope(ReLUDerivatives):
    """Tells it."""

    keeps = frozenset({"input"})

    def df(self, module: nn.Module, g_inp: Any, g_out: Any, subsampling: Any = None) -> Tensor:
        x = module.input0 if subsampling is None else module.input0[subsampling]
        return torch.where(x > 0, 1.0, 0.5).to(x)


class FourTimes(nn.MSELoss):
    """In other units."""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return 4 * super().forward(out, target)


class TwiceRoot(MSELossDerivatives):
    """Has a root that is as many times as large."""

    def _sqrt_hessian(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super()._sqrt_hessian(*args, **kwargs)


TOLD: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[], object], tuple[int, ...]]] = {
    "columns": (layers(Twice), nn.CrossEntropyLoss, lambda: register(Twice, TwiceColumns), (4,)),
    "columns of a convolution": (
        lambda: nn.Sequential(TwiceConv(4, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        nn.CrossEntropyLoss,
        lambda: register(TwiceConv, TwiceConvColumns),
        (4, 14, 14),
    ),
    "slope": (lambda: nn.Sequential(nn.Linear(4, 4), Bent(), nn.Linear(4, 3)), nn.CrossEntropyLoss, lambda: register(Bent, BentSlope), (4,)),
    "root": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), FourTimes, lambda: register(FourTimes, TwiceRoot), (4,)),
}


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("name", TOLD)
def test_shortcuts_are_not_taken_where_users_tell_something_else(name: str, samples: int) -> None:
    make, make_loss, tell, shape = TOLD[name]
    tell()
    torch.manual_seed(0)
    model, x = extend(make().double()), torch.randn(samples, *shape).double()
    y = torch.rand(samples, 3).double() if make_loss is FourTimes else torch.arange(samples) % 3
    lossfunc = extend(make_loss(reduction="sum"))
    products = [extensions.GGNMP()] if name in {"columns", "slope"} else []
    with backpack(extensions.BatchGrad(), extensions.DiagHessian(), *(getattr(extensions, quantity)() for quantity in READ), *products):
        lossfunc(model(x), y).backward()
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(lossfunc(model(x[n : n + 1]), y[n : n + 1]), parameters) for n in range(samples)]
    gradients = torch.autograd.grad(lossfunc(model(x), y), parameters, create_graph=True)
    output = model(x)
    hessian = torch.autograd.functional.hessian(lambda out: lossfunc(out, y), output.detach()).reshape(output.numel(), -1)
    jacobians = [torch.stack(j) for j in zip(*(torch.autograd.grad(o, parameters, retain_graph=True) for o in output.flatten()), strict=True)]
    for parameter, row, gradient, jacobian in zip(parameters, zip(*rows, strict=True), gradients, jacobians, strict=True):
        close(parameter.grad_batch, torch.stack(row))
        close(parameter.batch_l2, torch.stack(row).flatten(1).square().sum(1))
        close(parameter.sum_grad_squared, torch.stack(row).square().sum(0))
        close(parameter.diag_ggn_exact, torch.einsum("a...,ab,b...->...", jacobian, hessian, jacobian))
        if products:
            vector = torch.rand_like(parameter)
            close(parameter.ggnmp(vector[None])[0], torch.einsum("a...,a->...", jacobian, hessian @ (jacobian.flatten(1) @ vector.flatten())))
        twice = [torch.autograd.grad(entry, parameter, retain_graph=True)[0].flatten() for entry in gradient.flatten()]
        close(parameter.diag_h, torch.stack(twice).diagonal().reshape(parameter.shape))


@pytest.mark.parametrize("extension", ["DiagGGNMC", "KFAC", "KFRA", "GGNMP"])
def test_what_does_not_follow_from_a_root_is_missing(extension: str) -> None:
    register(FourTimes, TwiceRoot)
    model, x, _ = problem(layers(nn.Linear))
    with backpack(getattr(extensions, extension)()), pytest.raises(UnsupportedError, match="TwiceRoot has no _"):
        extend(FourTimes())(model(x), torch.rand(5, 3).double()).backward()


class Kernel(ReLUDerivatives):
    """Writes a product alone."""

    def _jac_t_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super()._jac_t_mat_prod(*args, **kwargs)


class Steep(nn.ReLU):
    """Another slope."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_slopes_are_compared_with_products() -> None:
    register(Steep, Kernel)
    model, x, y = problem(lambda: nn.Sequential(nn.Linear(4, 4), Steep(), nn.Linear(4, 3)))
    with backpack(extensions.DiagGGNExact()):
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    for parameter, diagonals in zip(model.parameters(), expected(model, x, y)[1], strict=True):
        close(parameter.diag_ggn_exact, diagonals.sum(0))
    with backpack(extensions.KFRA()), pytest.raises(UnsupportedError, match="Kernel._jac_t_mat_prod .* says something else than `df`"):
        extend(nn.CrossEntropyLoss())(model(x), y).backward()


def test_products_on_the_object_are_heard() -> None:
    rule = LinearDerivatives()
    rule._weight_jac_t_mat_prod = lambda *args, **kwargs: 2 * LinearDerivatives._weight_jac_t_mat_prod(rule, *args, **kwargs)
    register(Twice, rule)
    model, x, y = problem(layers(Twice))
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    for _ in range(2):
        with backpack(extensions.BatchL2Grad(), retain_graph=True), pytest.raises(UnsupportedError, match="says something else"):
            loss.backward(retain_graph=True)
    register(Twice, TwiceColumns)


def test_products_on_the_object_are_heard_at_other_layers() -> None:
    rule = EmbeddingDerivatives()
    rule._weight_jac_t_mat_prod = lambda *args, **kwargs: 2 * EmbeddingDerivatives._weight_jac_t_mat_prod(rule, *args, **kwargs)
    register(Larger, rule)
    model, x, y = problem(Words, True)
    with backpack(*(getattr(extensions, name)() for name in READ)):
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    register(Larger, LargerDerivatives)
    for parameter, rows, diagonals in zip(model.parameters(), *expected(model, x, y), strict=True):
        close(parameter.batch_l2, rows.flatten(1).square().sum(1))  # the square root of four features is two
        close(parameter.diag_ggn_exact, diagonals.sum(0))


def test_products_that_only_check_shapes_are_not_to_be_written() -> None:
    class Public(LinearDerivatives):
        def param_mjp(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().param_mjp(*args, **kwargs)

    with pytest.raises(ArgumentError, match="Public overrides param_mjp, .* Write `_param_mjp` instead"):
        register(Twice, Public)


class Threefold(LinearDerivatives):
    """Tells outputs that are three times as large."""

    def rows(self, module: nn.Module, mat: Tensor) -> Tensor:
        return 3 * super().rows(module, mat)


def test_gradients_are_autograds_whatever_users_tell() -> None:
    """Where layers have many positions, sums over samples stand for them, if a rule of the library made them."""
    register(Another, Threefold)
    torch.manual_seed(0)
    model, x = extend(nn.Sequential(Another(4, 3), nn.Tanh())), torch.rand(2, 64, 4)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with backpack(extensions.BatchGrad(), extensions.Variance()):
        model(x).square().sum().backward()
    register(Another, AnotherDerivatives)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        torch.testing.assert_close(parameter.grad_batch.sum(0), 3 * gradient)


class Tied(Words):
    """The table is the weight of the layer that makes the prediction, too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 6, bias=False)
        self.last.weight = self.table.weight


@pytest.mark.parametrize("samples", [1, 5])
def test_tables_of_users_that_are_tied(samples: int) -> None:
    model, x, y = problem(Tied, True, samples)
    with backpack(extensions.BatchGrad(), *(getattr(extensions, name)() for name in READ)):
        extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    (parameter,), ((rows,), (diagonals,)) = model.parameters(), expected(model, x, y)
    close(parameter.grad_batch, rows)
    close(parameter.batch_l2, rows.flatten(1).square().sum(1))
    close(parameter.sum_grad_squared, rows.square().sum(0))
    close(parameter.diag_ggn_exact, diagonals.sum(0))
    close(parameter.diag_ggn_exact_batch, diagonals)
