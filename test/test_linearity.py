"""A layer with a user's rule that is curved in its own parameter: first order and the Gauss-Newton are right, the Hessian is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import Oracle, Problem
from table import classify, default_dtype
from test_extensions import QUANTITIES, collect, run
from torch import Tensor, nn, randn
from torch.nn import Linear, Module, Parameter, Sequential, Tanh
from torch.utils.checkpoint import checkpoint

from backpack import backpack, check_rule, extend, register, results
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.extensions import DiagHessian
from backpack.utils.subsampling import subsample


class Exponential(Module):
    """``exp(f) x``."""

    def __init__(self) -> None:
        super().__init__()
        self.f = Parameter(randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.f.exp() * x


class Factor(Exponential):
    """``f x``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.f * x


class OfExponential(BaseParameterDerivatives):
    """Right, as far as it goes."""

    keeps = frozenset({"input"})

    def slope(self, module: Module) -> Tensor:
        return module.f.exp()

    def inner(self, module: Module) -> Tensor | float:
        return module.f.exp()

    def hessian_is_zero(self, module: Module) -> bool:
        return True

    def _jac_t_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: list[int] | None = None) -> Tensor:
        return self.slope(module) * mat

    def _jac_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        return self.slope(module) * mat

    def _f_jac_t_mat_prod(
        self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool = True, subsampling: list[int] | None = None
    ) -> Tensor:
        products = mat * subsample(module.input0, subsampling=subsampling) * self.inner(module)
        return products.sum(1) if sum_batch else products

    def _f_jac_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        return mat.unsqueeze(1) * module.input0 * self.inner(module)


class OfFactor(OfExponential):
    def slope(self, module: Module) -> Tensor:
        return module.f

    def inner(self, module: Module) -> Tensor | float:
        return 1.0


def build(layer: type[Exponential], rule: type[OfExponential] | None, N: int) -> Problem:
    layer = type(f"My{layer.__name__}", (layer,), {"forward": layer.forward})
    if rule is not None:
        register(layer, rule)
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        return classify(Sequential(Linear(3, 3), Tanh(), layer(), Linear(3, 4)), randn(N, 3))


HESSIAN = ["DiagHessian", "BatchDiagHessian", "HMP", "PCHMP, abs", "PCHMP, clip"]


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("extension", [*HESSIAN, "BatchGrad", "DiagGGNExact", "GGNMP"])
@pytest.mark.parametrize(("layer", "rule"), [(Factor, OfFactor), (Exponential, OfExponential), (Exponential, None), (Factor, None)])
def test_exact_or_refused(layer: type, rule: type | None, extension: str, N: int) -> None:
    quantity, problem = QUANTITIES[extension], build(layer, rule, N)
    wanted = (extension in HESSIAN and rule is OfExponential) or (rule is None and extension in {"HMP", "PCHMP, abs", "PCHMP, clip"})
    if wanted:
        with pytest.raises(NotImplementedError, match="not linear in f|has no rule") as error:
            run(problem, quantity.make())
        assert not collect(problem, quantity.field)
        assert 'exclude=["2.f"]' in str(error.value)
    else:
        run(problem, quantity.make())
        quantity.check(Oracle(build(layer, rule, N)), collect(problem, quantity.field))


@pytest.mark.parametrize("extension", ["HBP, Hessian", "HBP, PCH abs"])
def test_averages_behind_a_curved_parameter_are_refused(extension: str) -> None:
    problem = build(Exponential, OfExponential, 1)
    with pytest.raises(NotImplementedError):
        run(problem, QUANTITIES[extension].make())
    assert not collect(problem, "hbp")


def test_layer_whose_curved_parameter_is_left_out() -> None:
    """Without its parameter, the layer is linear in what is left."""
    problem, oracle = build(Exponential, OfExponential, 3), Oracle(build(Exponential, OfExponential, 3))
    run(problem, type(QUANTITIES["BatchDiagHessian"].make())(exclude=["2.f"]))
    values = collect(problem, "diag_h_batch")
    assert values.keys() == oracle.params.keys() - {"2.f"}
    for name, value in values.items():
        torch.testing.assert_close(value, oracle.diag_h_batch[name])


class Forgetful(OfExponential):
    """A rule that never looks at the input."""

    keeps = frozenset()

    def _f_jac_t_mat_prod(
        self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool = True, subsampling: list[int] | None = None
    ) -> Tensor:
        products = mat * self.inner(module)
        return products.sum(1) if sum_batch else products


class OfShift(Forgetful):
    def slope(self, module: Module) -> Tensor:
        return torch.ones_like(module.f)


@pytest.mark.parametrize(("forward", "linear"), [(lambda self, x: x + self.f.exp(), False), (lambda self, x: x + self.f, True)])
def test_input_not_kept(forward: Callable, linear: bool) -> None:
    layer = type("Shifted", (Exponential,), {"forward": forward})
    rule = type("OfShifted", (OfShift,), {"inner": (lambda self, module: 1.0) if linear else (lambda self, module: module.f.exp())})
    problem = build(layer, rule, 3)
    if linear:
        run(problem, QUANTITIES["BatchDiagHessian"].make())
        QUANTITIES["BatchDiagHessian"].check(Oracle(build(layer, rule, 3)), collect(problem, "diag_h_batch"))
    else:
        with pytest.raises(NotImplementedError, match="not linear in f"):
            run(problem, QUANTITIES["BatchDiagHessian"].make())


def test_asking_for_linearity_leaves_no_trace() -> None:
    """Neither random numbers nor records of the model notice."""
    problem = build(Factor, OfFactor, 3)
    run(problem, QUANTITIES["DiagHessian"].make())
    state = torch.get_rng_state()
    run(problem, QUANTITIES["DiagHessian"].make())
    assert torch.equal(state, torch.get_rng_state())


def test_check_rule_reports_it() -> None:
    reports = {}
    for layer, rule in ((Factor, OfFactor), (Exponential, OfExponential)):
        kind = type("Checked", (layer,), {"forward": layer.forward})
        register(kind, rule)
        reports[layer] = check_rule(kind(), randn(4, 3))
    assert "linear in 'f'" in reports[Factor]
    assert "not linear in 'f': quantities of the Hessian are refused" in reports[Exponential]
    done = check_rule(nn.Linear(3, 2), randn(4, 3))
    assert {"linear in 'weight'", "linear in 'bias'"} <= set(done)


class SameLinear(nn.Linear):
    """A user's class, though it computes the same."""


class Squared(nn.Linear):
    """Not linear in its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight**2, self.bias)


@pytest.mark.parametrize("layer", [nn.Linear, SameLinear, Squared])
def test_layers_inside_of_checkpoints(layer: type[nn.Linear]) -> None:
    """What they were given is not at hand before it is computed again."""
    if layer is Squared:
        register(Squared, LinearDerivatives)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(3, 4), layer(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor, checkpointed: bool) -> Tensor:
            def part(h: Tensor) -> Tensor:
                return self.layer(self.first(h).tanh()).tanh()

            return self.last(checkpoint(part, x, use_reentrant=False) if checkpointed else part(x))

    torch.manual_seed(0)
    model, x, y, found = extend(Model().double()), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2, []
    for checkpointed in (False, True):
        with backpack(DiagHessian()), pytest.raises(NotImplementedError, match="not linear in weight") if layer is Squared else nullcontext():
            extend(nn.CrossEntropyLoss())(model(x, checkpointed), y).backward()
        found.append(results(model))
    for name, values in found[0].items():
        torch.testing.assert_close(values["diag_h"], found[1][name]["diag_h"])
    assert len(found[0]) == len(found[1]) == 6 * (layer is not Squared)
