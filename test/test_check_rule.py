"""``check_rule`` accepts every rule of the library, and finds each planted error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_derivatives import LAYERS  # with the rows of that file
from torch import Tensor, nn
from torch.nn import Module, Parameter

from backpack import check_rule
from backpack.core.derivatives.activations import SigmoidDerivatives
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.registry import register
from backpack.utils.errors import ArgumentError, BackpackError, LossValueError


@pytest.mark.parametrize("name", LAYERS)
def test_rules_of_the_library(name: str) -> None:
    layer = LAYERS[name]
    inputs = torch.randn(3, *layer.shape, dtype=torch.float64), *layer.more(3)
    done = check_rule(layer.make().double().eval(), *inputs)
    assert {"jac_t_mat_prod", "jac_t_mat_prod with subsampling", "jac_mat_prod", "hessian_is_zero"} - set(done) <= {"hessian_is_zero"}
    for param, _ in layer.make().named_parameters():
        assert f"param_mjp('{param}', sum_batch=False, subsampling)" in done


LOSSES: dict[str, tuple[Callable[[], Module], tuple[Tensor, Tensor]]] = {
    "MSELoss": (nn.MSELoss, (torch.ones(3, 2), torch.zeros(3, 2))),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(reduction="sum"), (torch.eye(3), torch.tensor([0, 1, 1]))),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, (torch.eye(3), torch.eye(3))),
    "HuberLoss": (lambda: nn.HuberLoss(delta=3.0), (torch.eye(3), torch.zeros(3, 3))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_library(name: str) -> None:
    make, inputs = LOSSES[name]
    done = check_rule(make(), *inputs)
    assert {"sqrt_hessian", "sqrt_hessian_sampled", "make_hessian_mat_prod", "sum_hessian"} <= set(done)


def test_nothing_changes() -> None:
    """Neither the module, nor the random numbers that follow."""
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    before, state = torch.get_rng_state(), vars(linear).copy()
    check_rule(linear, x)
    assert torch.equal(before, torch.get_rng_state())
    assert vars(linear) == state
    assert linear.weight.dtype == torch.float32


# --- planted errors -----------------------------------------------------------------------------------------------------------------------------


class Curved(ElementwiseDerivatives):
    """``sin(x)``, right."""

    keeps = frozenset({"input"})

    def hessian_is_zero(self, module: Module) -> bool:
        return False

    def df(self, module: Module, g_inp: Any, g_out: Any, subsampling: list[int] | None = None) -> Tensor:
        return (module.input0 if subsampling is None else module.input0[subsampling]).cos()

    def d2f(self, module: Module, g_inp: Any, g_out: Any) -> Tensor:
        return -module.input0.sin()


def jac_t_only(self: Curved, module: Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: list[int] | None = None) -> Tensor:
    return 1.01 * mat * self.df(module, g_inp, g_out, subsampling)


def residual(self: Curved, module: Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
    return -module.input0.sin() * g_out[0] * mat


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "a factor": ({"_jac_t_mat_prod": jac_t_only}, "jac_t_mat_prod of"),
    "samples are ignored": (
        {"_jac_t_mat_prod": lambda self, m, i, o, mat, subsampling=None: mat * m.input0.cos()[: mat.shape[1]]},
        "jac_t_mat_prod with subsampling",
    ),
    "a constant": ({"ea_jac_t_mat_jac_prod": lambda self, m, i, o, mat: mat}, "ea_jac_t_mat_jac_prod"),
    "flat": ({"hessian_is_zero": lambda self, m: True}, "hessian_is_zero"),
    "sign of the curvature": ({"d2f": lambda self, m, i, o: m.input0.sin()}, "residual_mat_prod"),
    "only the diagonal": (
        {"hessian_diagonal": lambda self, m, i, o: -m.input0.sin(), "_residual_mat_prod": residual},
        "hessian_diagonal",
    ),
    "shape": ({"df": lambda self, m, i, o, subsampling=None: m.input0.cos()[:, :1].expand(-1, 5)}, "jac_mat_prod"),
    "reads what it does not keep": ({"keeps": frozenset()}, "jac_mat_prod"),
    "an axis": (
        {"_jac_t_mat_prod": lambda self, m, i, o, mat, subsampling=None: mat * torch.ones(2, 3).cumsum(0).double()[: mat.shape[1], :, None]},
        "jac_t_mat_prod",
    ),
}


class Sine(Module):
    """A layer of a user's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.parametrize("error", ERRORS)
def test_planted_errors(error: str) -> None:
    members, says = ERRORS[error]
    module = type("Wrong", (Sine,), {})()
    register(type(module), Curved)
    assert "residual_mat_prod" in check_rule(module, torch.randn(4, 3, 2))
    register(type(module), type("WrongDerivatives", (Curved,), members))
    with pytest.raises(AssertionError, match=rf"{says}.*Wrong(.|\n)*\[backpack:wrong-rule\]") as caught:
        check_rule(module, torch.randn(4, 3, 2))
    assert isinstance(caught.value, BackpackError)


class Transposed(LinearDerivatives):
    """Columns that do not fit the product that was written by hand."""

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool = True, subsampling: list[int] | None = None
    ) -> Tensor:
        x = module.input0 if subsampling is None else module.input0[subsampling]
        return torch.einsum(f"vno,ni->v{'' if sum_batch else 'n'}oi", mat, x)

    def columns(self, module: Module, subsampling: list[int] | None = None) -> Tensor:
        return 2 * super().columns(module, subsampling)


class Scale(Module):
    """A layer of a user's, whose parameter is called neither weight nor bias."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@pytest.mark.parametrize("wrong", [1, 2])
def test_products_with_parameters_of_any_name(wrong: int) -> None:
    class ScaleDerivatives(BaseParameterDerivatives):
        keeps = frozenset({"input"})

        def hessian_is_zero(self, module: Module) -> bool:
            return True

        def _jac_t_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: list[int] | None = None) -> Tensor:
            return mat * module.factor

        def _jac_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
            return mat * module.factor

        def _factor_jac_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
            return wrong * mat[:, None] * module.input0

        def _factor_jac_t_mat_prod(
            self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool = True, subsampling: list[int] | None = None
        ) -> Tensor:
            products = mat * (module.input0 if subsampling is None else module.input0[subsampling])
            return products.sum(1) if sum_batch else products

    module = type("Scale", (Scale,), {})()
    register(type(module), ScaleDerivatives)
    if wrong == 1:
        assert "factor_jac_mat_prod" in check_rule(module, torch.randn(4, 3))
        return
    with pytest.raises(AssertionError, match="factor_jac_mat_prod of ScaleDerivatives"):
        check_rule(module, torch.randn(4, 3))


class WrongBias(LinearDerivatives):
    """Forgets to keep the samples apart."""

    def _bias_jac_t_mat_prod(
        self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool = True, subsampling: list[int] | None = None
    ) -> Tensor:
        return mat.sum(1)


class WrongJacobian(LinearDerivatives):
    """Adds the weight where the identity should be."""

    def _bias_jac_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        return super()._bias_jac_mat_prod(module, g_inp, g_out, mat) * 2


class ScaledBias(LinearDerivatives):
    """Products with the bias agree with each other, but it is not added as it is."""

    def _bias_jac_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        return super()._bias_jac_mat_prod(module, g_inp, g_out, mat) * 2

    def _bias_jac_t_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, **options: Any) -> Tensor:
        return super()._bias_jac_t_mat_prod(module, g_inp, g_out, mat, **options) * 2


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, 2 * self.bias)


def test_bias_that_is_not_added_as_it_is() -> None:
    register(Doubled, ScaledBias)
    with pytest.raises(AssertionError, match="rows of the bias of ScaledBias"):
        check_rule(Doubled(3, 2), torch.randn(4, 3))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Transposed, "weight_jac_mat_prod|columns and rows"),
        (WrongBias, r"param_mjp\('bias', sum_batch=False\).*shape"),
        (WrongJacobian, "bias_jac_mat_prod"),
    ],
)
def test_planted_errors_of_parameters(rule: type, says: str) -> None:
    module = type("MyLinear", (nn.Linear,), {})(3, 2)
    register(type(module), rule)
    with pytest.raises(AssertionError, match=says):
        check_rule(module, torch.randn(4, 3))


IN_PLACE = {
    "jac_mat_prod": {"_jac_mat_prod": lambda self, m, i, o, mat: mat.mul_(self.df(m, i, o))},
    "jac_t_mat_prod": {"_jac_t_mat_prod": lambda self, m, i, o, mat, subsampling=None: mat.mul_(self.df(m, i, o, subsampling))},
    "residual_mat_prod": {"d2f": lambda self, m, i, o: m.input0.sin_().neg_()},
}


@pytest.mark.parametrize("product", IN_PLACE)
def test_planted_operations_in_place(product: str) -> None:
    """The product is right, and what it was made of is lost for others."""
    module = type("Wrong", (Sine,), {})()
    register(type(module), type("InPlace", (Curved,), IN_PLACE[product]))
    with pytest.raises(AssertionError, match=rf"^{product} of InPlace of Wrong\(\) changes in place"):
        check_rule(module, torch.randn(4, 3, 2))


BY_VIEWS = {name: getattr(AffineDerivatives, name) for name in ("_weight_jac_t_mat_prod", "_weight_jac_mat_prod")}


def views(**members: Any) -> type:
    return type("Views", (LinearDerivatives,), members)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (views(vectors=lambda self, m: 2 * m.input0, **BY_VIEWS), "vectors of"),
        (views(input_moment=lambda self, m, scale=1.0: LinearDerivatives.input_moment(self, m)), "input_moment of"),
        (views(transposed=True), "transposed=True of"),
        (
            views(columns=lambda self, m, samples=None: LinearDerivatives.columns(self, m, None if isinstance(samples, slice) else samples)),
            "slice of",
        ),
        (
            views(
                columns=lambda self, m, samples=None: LinearDerivatives.columns(self, m)[samples if isinstance(samples, slice) else ...],
                _weight_jac_t_mat_prod=Transposed._weight_jac_t_mat_prod,
            ),
            "chosen",
        ),
    ],
    ids=["vectors", "input_moment", "transposed", "columns of a slice", "columns of chosen samples"],
)
def test_planted_errors_of_views(rule: type, says: str) -> None:
    """What fast ways to quantities, Kronecker factors and blocks of samples read, beside products."""
    module = type("MyLinear", (nn.Linear,), {})(3, 3)
    register(type(module), rule)
    with pytest.raises(AssertionError, match=says):
        check_rule(module, torch.randn(4, 3))


class WrongLoss(CrossEntropyLossDerivatives):
    """Divides twice."""

    def _make_hessian_mat_prod(self, module: Module, g_inp: Any, g_out: Any) -> Callable[[Tensor], Tensor]:
        product = super()._make_hessian_mat_prod(module, g_inp, g_out)
        return lambda mat: product(mat) / len(module.input0)


class WrongDraw(CrossEntropyLossDerivatives):
    """Draws from something else."""

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        return super()._compute_sampled_grads_manual(0.5 * subsampled_input, mc_samples)


class WrongSigns(CrossEntropyLossDerivatives):
    """Takes some directions for curved downwards."""

    def _signed_sqrt_hessian(self, module: Module, g_inp: Any, g_out: Any) -> tuple[Tensor, Tensor | None]:
        root = self._sqrt_hessian(module, g_inp, g_out)
        return root, -torch.ones(root.shape[:2], dtype=root.dtype)


class WrongFewSigned(CrossEntropyLossDerivatives):
    """Is right without signs only."""

    def _least_sqrt_hessian(self, module: Module, g_out: Any, signed: bool) -> tuple[Tensor, Tensor | None]:
        root, signs = super()._least_sqrt_hessian(module, g_out, signed)
        return (2 * root if signed else root), signs


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (WrongLoss, "make_hessian_mat_prod"),
        (WrongDraw, "sqrt_hessian_sampled"),
        (WrongSigns, "signed_sqrt_hessian"),
        (WrongFewSigned, "signed_sqrt_hessian with few columns"),
    ],
)
def test_planted_errors_of_losses(rule: type, says: str) -> None:
    module = type("MyLoss", (nn.CrossEntropyLoss,), {})()
    register(type(module), rule)
    with pytest.raises(AssertionError, match=rf"{says} of"):
        check_rule(module, 3 * torch.eye(3), torch.tensor([0, 1, 1]))


def test_claim_of_convexity() -> None:
    class Concave(Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return -((x - y) ** 2).sum()

    register(Concave, type("Claims", (CrossEntropyLossDerivatives,), {}))
    with pytest.raises(AssertionError, match="hessian_is_psd"):
        check_rule(Concave(), torch.randn(3, 2), torch.randn(3, 2))


def test_what_cannot_be_checked() -> None:
    with pytest.raises(NotImplementedError, match=r"No rule is registered for Unknown.*backpack\.register\(Unknown, rule\)"):
        check_rule(type("Unknown", (Sine,), {})(), torch.randn(2, 3))
    for nothing in ((), (torch.empty(0, 3),), (None,)):
        with pytest.raises(ValueError, match="needs a tensor with some samples"):
            check_rule(nn.Sigmoid(), *nothing)
    with pytest.raises(NotImplementedError, match="does not apply"):
        check_rule(nn.Dropout(0.5).train(), torch.randn(2, 3))
    with pytest.raises(NotImplementedError, match="Nothing of TanhDerivatives.*type int64"):
        check_rule(nn.Tanh(), torch.randint(3, (3, 2)))
    assert SigmoidDerivatives.keeps == {"output"}
    assert "hessian_diagonal" in check_rule(nn.Sigmoid(), torch.randn(2, 3))


@pytest.mark.parametrize("has_parameter", [False, True])
def test_rule_without_products(has_parameter: bool) -> None:
    """A misspelt method is none: that nothing was compared is an error, and not an empty list."""

    class Layer(Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2)) if has_parameter else None

        def forward(self, x: Tensor) -> Tensor:
            return x**2 if self.scale is None else self.scale * x**2

    @register(Layer)
    class Misspelt(BaseParameterDerivatives):
        def jac_t(self, *_: Any) -> None:
            return None

        def _scale_jac_t_mat_prod(self, module: Module, *_: Any, **__: Any) -> Tensor:
            raise self._missing("product", module)

    with pytest.raises(NotImplementedError, match="Nothing of Misspelt could be compared for Layer.*float32"):
        check_rule(Layer(), torch.rand(3, 2))


@pytest.mark.parametrize("module", [nn.Linear(2, 3), nn.Tanh(), nn.CrossEntropyLoss()])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(module: Module, value: float) -> None:
    """No rule is accused where automatic differentiation gives no numbers; what does not depend on them is compared."""
    x = torch.randn(3, 2)
    x[0, 0] = value
    more = (torch.tensor([0, 1, 1]),) if isinstance(module, nn.CrossEntropyLoss) else ()
    if isinstance(module, nn.Tanh) and value == float("inf"):
        check_rule(module, x)
    else:
        with pytest.raises(ArgumentError, match="not finite"):
            check_rule(module, x, *more)
    assert "jac_t_mat_prod" in check_rule(nn.Flatten(), x)


def test_loss_that_is_no_number() -> None:
    """Not the rule is to blame."""
    with pytest.raises(LossValueError, match="need a scalar loss"):
        check_rule(nn.MSELoss(reduction="none"), torch.randn(2, 3), torch.randn(2, 3))
