"""Element-wise modules overwrite columns only where nobody else holds them, and the numbers are right either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import all_close, all_factors_close
from torch import Tensor
from torch.nn import (
    AdaptiveAvgPool2d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Flatten,
    Identity,
    Linear,
    Module,
    Parameter,
    PReLU,
    ReLU,
    Sequential,
    Sigmoid,
)

from backpack import backpack, extend, results
from backpack.core import carry
from backpack.core.derivatives.activations import ReLUDerivatives
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.registry import register
from backpack.core.flow import Columns, add_in_place
from backpack.extensions import KFLR, BatchDiagGGNExact, BatchDiagHessian
from backpack.extensions.module_extension import ModuleExtension


class Branches(Module):
    """The output of an activation is used twice."""

    def __init__(self, other: Callable[[], Module]) -> None:
        super().__init__()
        self.first, self.relu, self.one, self.other = Linear(4, 3), ReLU(), Linear(3, 3), other()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.first(x))
        return self.one(hidden) + self.other(hidden)


class Skips(Module):
    """Columns go past a layer, to an activation, and to a layer that has been read by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu = Linear(4, 3), ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden + self.relu(hidden)


class Double(Module):
    """A user's function."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Shift(Module):
    """A user's layer, whose rule hands on the columns that were read off there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


@register(Shift)
class ShiftDerivatives(BaseParameterDerivatives):
    """Its Jacobians are identities."""

    def hessian_is_zero(self, module: Shift) -> bool:
        return True

    def _jac_t_mat_prod(self, module: Shift, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Any = None) -> Tensor:
        return mat

    def _weight_jac_t_mat_prod(
        self, module: Shift, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Any = None
    ) -> Tensor:
        return mat.sum(1) if sum_batch else mat


class Cube(Module):
    """A user's activation."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


@register(Cube)
class CubeDerivatives(ElementwiseDerivatives):
    """With a product that writes into new memory, whatever others do."""

    def hessian_is_zero(self, module: Cube) -> bool:
        return False

    def df(self, module: Cube, g_inp: Grads, g_out: Grads, subsampling: Any = None) -> Tensor:
        return 3 * module.input0**2

    def d2f(self, module: Cube, g_inp: Grads, g_out: Grads) -> Tensor:
        return 6 * module.input0

    def _jac_t_mat_prod(self, module: Cube, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Any = None) -> Tensor:
        return mat * self.df(module, g_inp, g_out)


MODELS: dict[str, tuple[Callable[[], Module], list[bool]]] = {
    "sequence": (lambda: Sequential(Linear(4, 3), ReLU(), Linear(3, 5), Sigmoid(), Dropout(0.5), Linear(5, 3)), [True, True, True]),
    "convolution": (lambda: Sequential(Conv2d(1, 2, 2), ReLU(), Conv2d(2, 2, 1), ReLU(), Flatten(), Linear(2, 3)), [True, False]),
    "two layers": (lambda: Branches(lambda: Linear(3, 3)), [True]),  # their sum is new
    "residual": (lambda: Branches(Double), [True]),
    "skip": (lambda: Branches(Identity), [True]),
    "both skip": (Skips, [False]),
    "no layer but the loss": (lambda: Sequential(Linear(4, 3), ReLU()), [False]),
    "pooled": (lambda: Sequential(Conv2d(1, 3, 1), ReLU(), AdaptiveAvgPool2d(1), Flatten()), [True]),
    "cube": (lambda: Sequential(Linear(4, 3), ReLU(), Cube(), Linear(3, 3)), [False]),
    "with a parameter": (lambda: Sequential(Linear(4, 3), PReLU(), Linear(3, 3)), [False]),
    "shift": (lambda: Sequential(Linear(4, 3), ReLU(), Shift(), Linear(3, 3)), [False]),
}


def build(name: str, samples: int) -> Problem:
    torch.manual_seed(0)
    x = torch.rand(samples, 1, 2, 2, dtype=torch.float64) if name in ("convolution", "pooled") else torch.rand(samples, 4, dtype=torch.float64)
    return Problem(MODELS[name][0]().double(), x, [Term(CrossEntropyLoss(), torch.randint(3, (samples,)))])


def watch(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each product with slopes whether it takes the place of the columns."""
    seen: list[bool] = []
    for rule in (ElementwiseDerivatives, ReLUDerivatives):

        def product(*arguments: Any, given: Callable[..., Tensor] = rule._jac_t_mat_prod, out: Tensor | None = None, **options: Any) -> Tensor:
            seen.append(out is not None and out is arguments[4])
            return given(*arguments, out=out, **options)

        monkeypatch.setattr(rule, "_jac_t_mat_prod", product)
    return seen


def run(problem: Problem, *extensions: Any, create_graph: bool = False) -> dict[str, dict[str, Any]]:
    extend(problem.model)
    extend(problem.losses[0])
    with backpack(*extensions):
        torch.autograd.grad(problem.loss(problem.outputs()), list(problem.model.parameters()), create_graph=create_graph)
    return results(problem.model)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_columns_are_overwritten_where_nobody_else_holds_them(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, oracle = watch(monkeypatch), Oracle(build(name, samples))
    found = run(build(name, samples), BatchDiagGGNExact())
    assert seen == MODELS[name][1][::-1]
    all_close({key: fields["diag_ggn_exact_batch"] for key, fields in found.items()}, oracle.diag_ggn_batch(oracle.hessian_exact))
    if name != "shift":
        all_close({key: fields["diag_h_batch"] for key, fields in run(build(name, samples), BatchDiagHessian()).items()}, oracle.diag_h_batch)
    seen.clear()
    found = run(build(name, samples), KFLR(), BatchDiagGGNExact())  # the one holds columns that the other one lets go
    assert seen == MODELS[name][1][::-1]
    all_factors_close({key: fields["kflr"] for key, fields in found.items()}, oracle.kronecker(oracle.hessian_exact))
    seen.clear()
    run(build(name, samples), BatchDiagGGNExact(), create_graph=True)
    assert not any(seen)


@pytest.mark.parametrize(
    ("name", "in_place"), [("two layers", [True]), ("residual", [False, True]), ("skip", [True]), ("both skip", [True]), ("sequence", [])]
)
def test_branches_meet_in_memory_that_nobody_else_holds(name: str, in_place: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is summed in place is also checked for each kind of branch, in the test above."""
    seen = []

    def added(old: Columns, new: Columns, own: set, fresh: bool) -> Columns:
        total = add_in_place(old, new, own, fresh)
        seen.extend(total[source] is old[source] or total[source] is new[source] for source in old.keys() & new.keys())
        return total

    monkeypatch.setattr(carry, "add_in_place", added)
    run(build(name, 3), BatchDiagGGNExact())
    assert seen == in_place
    seen.clear()
    run(build(name, 3), BatchDiagGGNExact(), create_graph=True)
    assert not seen


def test_what_a_users_rule_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeps(ModuleExtension):
        def compute(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> dict[str, Any]:  # noqa: N803
            given.append((bpQuantities, bpQuantities.clone()))
            return {}

    seen, given, extension = watch(monkeypatch), [], BatchDiagGGNExact()
    extension.set_module_extension(Sigmoid, Keeps())
    problem = build("sequence", 3)
    problem.model.eval()
    run(problem, extension)
    ((kept, copy),) = given
    assert torch.equal(kept, copy)
    assert kept.shape[1:] == (3, 5)
    assert True in seen
    assert False in seen
