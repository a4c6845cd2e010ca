"""Chosen samples at the weights of layers: they are chosen before anything is formed, and everything is as if of per-sample quantities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases_nets import Net
from test_extensions import close
from torch import Tensor, nn
from torch.nn import Conv1d, Linear, Module, Sequential, Tanh

from backpack import backpack, extend, extensions, register
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.extensions.rules import ColumnRule
from backpack.utils.subsampling import subsample

EXACT = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "BatchDiagHessian"]


def net(forward: Callable, **parts: Callable[[], Module]) -> Callable[[], Module]:
    return lambda: Net(forward, **{name: make() for name, make in parts.items()})


A, B = partial(Linear, 3, 4), partial(Linear, 4, 2)
# the model, and the shape of a sample
MODELS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "layers": (lambda: Sequential(A(), Tanh(), B()), (3,)),
    "positions": (net(lambda own, x: own.b(own.a(x).tanh()).sum(1), a=A, b=B), (5, 3)),
    "time first": (net(lambda own, x: own.b(own.act(own.a(x.transpose(0, 1))).sum(0)), a=A, act=Tanh, b=B), (5, 3)),
    "folded": (net(lambda own, x: own.b(own.a(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2]).sum(1)), a=A, b=B), (2, 3)),
    "convolution, groups": (lambda: Sequential(Conv1d(4, 6, 2, groups=2, padding=1), Tanh(), nn.Flatten(), Linear(30, 2)), (4, 4)),
    "transposed": (lambda: Sequential(nn.ConvTranspose1d(4, 2, 2, stride=2), Tanh(), nn.Flatten(), Linear(12, 2)), (4, 3)),
    "two uses": (net(lambda own, x: own.b(own.a(x).tanh() + own.a(x + 1).sin()), a=A, b=B), (3,)),
    "function": (net(lambda own, x: own.b(nn.functional.linear(x, own.a.weight).tanh()), a=A, b=B), (3,)),
    "normalized": (lambda: Sequential(A(), nn.LayerNorm(4), B()), (3,)),
    "bilinear": (net(lambda own, x: own.b(own.two(x, x.sin()).tanh()), two=partial(nn.Bilinear, 3, 3, 4), b=B), (3,)),
}


def of_all(model: Module, lossfunc: Module, x: Tensor, y: Tensor, **settings: Any) -> dict[str, list[Tensor]]:
    with backpack(*(getattr(extensions, name)(**settings) for name in EXACT)):
        lossfunc(model(x), y).backward()
    fields = {name: getattr(extensions, name)().savefield for name in EXACT}
    return {name: [getattr(p, field) for p in model.parameters() if hasattr(p, field)] for name, field in fields.items()}


@pytest.mark.parametrize("index", [[1], [3, 0], [2, 2, 1], [-1, 0], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_against_quantities_of_each_sample(name: str, index: list[int]) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, lossfunc, x, y = extend(make().double()), extend(nn.CrossEntropyLoss()), torch.rand(4, *shape).double(), torch.tensor([0, 1, 1, 0])
    each = of_all(model, lossfunc, x, y)
    found = of_all(model, lossfunc, x, y, subsampling=index)
    gradients = [g[index] for g in each["BatchGrad"]]
    expected = {
        "BatchGrad": gradients,
        "BatchL2Grad": [g.flatten(1).square().sum(1) for g in gradients],
        "SumGradSquared": [g.square().sum(0) for g in gradients],
        "Variance": [g.var(0, correction=0) for g in gradients],
        **{batch: [d[index] for d in each[batch]] for batch in ("BatchDiagGGNExact", "BatchDiagHessian")},
        **{name: [d[index].sum(0) for d in each[f"Batch{name}"]] for name in ("DiagGGNExact", "DiagHessian")},
    }
    for quantity, values in expected.items():
        assert len(found[quantity]) == len(values) >= 2
        for value, truth in zip(found[quantity], values, strict=True):
            close(value, truth, 1e-8)


@pytest.mark.parametrize("extension", ["BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "DiagGGNMC", "DiagHessian"])
@pytest.mark.parametrize("name", ["layers", "positions", "time first", "convolution, groups"])
def test_nothing_is_formed_for_each_sample(name: str, extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, at_call = [], ColumnRule.at_call
    monkeypatch.setattr(ColumnRule, "at_call", lambda rule, use, name: (seen.append(name), at_call(rule, use, name))[1])
    make, shape = MODELS[name]
    model, lossfunc = extend(make()), extend(nn.CrossEntropyLoss())
    with backpack(getattr(extensions, extension)(subsampling=[2, 0])):
        lossfunc(model(torch.rand(4, *shape)), torch.tensor([0, 1, 1, 0])).backward()
    assert "weight" not in seen


def test_subclasses_that_read_in_another_way_are_heard() -> None:
    class Doubling(ColumnRule):
        def at_call(self, use: Any, name: str) -> Any:
            return {source: 2 * columns for source, columns in super().at_call(use, name).items()}

    class Doubled(extensions.DiagGGNExact):
        def rule_at(self, samples: int) -> Any:
            return Doubling(self.flow, self.samples(samples))

        def rule_key(self) -> Any:
            return self

    torch.manual_seed(0)
    model, lossfunc, x, y = extend(MODELS["layers"][0]()), extend(nn.CrossEntropyLoss()), torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    for index in (None, [1, 3]):
        found = []
        for make in (extensions.DiagGGNExact, Doubled):
            with backpack(make(subsampling=index)):
                lossfunc(model(x), y).backward()
            found.append(model[0].weight.diag_ggn_exact)
        close(found[1], 4 * found[0], 1e-5)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_graph() -> None:
    torch.manual_seed(0)
    model, lossfunc = extend(MODELS["layers"][0]().double()), extend(nn.MSELoss())
    x, y = torch.rand(4, 3).double(), torch.rand(4, 2).double()
    grads = []
    for settings in ({}, {"subsampling": [0, 1, 2, 3]}):
        with backpack(extensions.SumGradSquared(**settings)):
            lossfunc(model(x), y).backward(create_graph=True)
        grads.append(torch.autograd.grad(model[0].weight.sum_grad_squared.sum(), [*model.parameters()]))
    for one, other in zip(*grads, strict=True):
        close(one, other)


class Weighted(Module):
    """Multiplies its input by what it makes of each sample, and by a matrix of positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 3)), torch.zeros(0)

    def forward(self, x: Tensor, mixing: Tensor) -> Tensor:
        self.scale = x[:, :1, :1].detach() * 2
        return mixing @ (x * self.scale) @ self.weight.T


class WeightedDerivatives(AffineDerivatives):
    """A rule of a user, which reads both."""

    def columns(self, module: Module, subsampling: Any = None) -> Tensor:
        return subsample(module.input1 @ (module.input0 * module.scale), subsampling=subsampling).mT.unsqueeze(1)

    def rows(self, module: Module, mat: Tensor) -> Tensor:
        return mat.mT.unsqueeze(2)

    def output_from_rows(self, module: Module, rows: Tensor) -> Tensor:
        return rows[:, :, 0].mT

    def hessian_is_zero(self, module: Module) -> bool:
        return True


@pytest.mark.parametrize("index", [[1, 0], [2], [0, 3], [3, 2, 1, 0]], ids=str)
def test_rules_of_users_are_told_which_samples(index: list[int]) -> None:
    register(Weighted, WeightedDerivatives())
    torch.manual_seed(0)
    mixing, lossfunc, x, y = torch.rand(2, 2).double(), extend(nn.CrossEntropyLoss()), torch.rand(4, 2, 3).double(), torch.tensor([0, 1, 1, 0])
    model = extend(Net(lambda own, x: own.b(own.a(x, mixing).sum(1)), a=Weighted(), b=B()).double())
    each, found = (of_all(model, lossfunc, x, y, **settings) for settings in ({}, {"subsampling": index}))
    for batch, name in (("BatchDiagGGNExact", "DiagGGNExact"), ("BatchDiagHessian", "DiagHessian")):
        for all_of_them, chosen, summed in zip(each[batch], found[batch], found[name], strict=True):
            close(chosen, all_of_them[index])
            close(summed, all_of_them[index].sum(0))
    for gradients, norms, variance in zip(each["BatchGrad"], found["BatchL2Grad"], found["Variance"], strict=True):
        close(norms, gradients[index].flatten(1).square().sum(1))
        close(variance, gradients[index].var(0, correction=0))


@pytest.mark.parametrize("name", ["layers", "positions", "time first"])
def test_several_choices_in_one_pass(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, lossfunc, x, y = extend(make().double()), extend(nn.CrossEntropyLoss()), torch.rand(4, *shape).double(), torch.tensor([0, 1, 1, 0])
    each = of_all(model, lossfunc, x, y)
    chosen = extensions.SumGradSquared(subsampling=[0]), extensions.Variance(subsampling=[1, 2]), extensions.BatchDiagGGNExact(subsampling=[3, 1])
    with backpack(extensions.BatchL2Grad(), *chosen, extensions.DiagGGNExact()):
        lossfunc(model(x), y).backward()
    for parameter, rows, diagonals in zip(model.parameters(), each["BatchGrad"], each["BatchDiagGGNExact"], strict=True):
        close(parameter.batch_l2, rows.flatten(1).square().sum(1), 1e-8)
        close(parameter.sum_grad_squared, rows[0].square(), 1e-8)
        close(parameter.variance, rows[[1, 2]].var(0, correction=0), 1e-8)
        close(parameter.diag_ggn_exact_batch, diagonals[[3, 1]], 1e-8)
        close(parameter.diag_ggn_exact, diagonals.sum(0), 1e-8)
