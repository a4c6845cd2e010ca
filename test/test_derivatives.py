"""Jacobian and Hessian products of every registered class, and the generic ones, against dense matrices from plain automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import LAYERS
from table import Layer, layer
from torch import Tensor, einsum, nn, rand, randn
from torch.autograd.function import once_differentiable
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack import backpack, extend
from backpack.core.derivatives.activations import LeakyReLUDerivatives, RReLUDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseLossDerivatives, BaseParameterDerivatives
from backpack.core.derivatives.dropout import AlphaDropoutDerivatives, DropoutDerivatives
from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.linear_maps import PadDerivatives, SlicingDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.derivatives.registry import derivatives_for, register, registered
from backpack.core.derivatives.softmax import LogSoftmaxDerivatives, SoftmaxDerivatives
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import ArgumentError, ArgumentTypeError, MixedSamplesError, NotRecordedError, ShapeError, UnsupportedError

DOUBLE = torch.float64
V = 4
SUBSAMPLING = [2, 0, 2]
KINKS = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, 0.5, -0.5, 40.0, -40.0, 1e-3, -1e-3]


VECTOR, IMAGE = (17,), (2, 3, 3)  # of an activation: long enough for all kinks

ACTIVATIONS: dict[str, Callable[[], Module]] = {
    "ReLU": nn.ReLU,
    "LeakyReLU": lambda: nn.LeakyReLU(0.1),
    "LeakyReLU, slope 0": lambda: nn.LeakyReLU(0.0),
    "LeakyReLU, negative": lambda: nn.LeakyReLU(-0.1),
    "RReLU": lambda: nn.RReLU(0.1, 0.4),
    "PReLU": nn.PReLU,
    "PReLU, negative": lambda: nn.PReLU(init=-0.3),
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-0.5, 2.0),
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Hardshrink": nn.Hardshrink,
    "Softshrink": nn.Softshrink,
    "Threshold": lambda: nn.Threshold(0.5, -7.0),
    "ELU": lambda: nn.ELU(0.7),
    "ELU, negative": lambda: nn.ELU(-0.7),
    "CELU": lambda: nn.CELU(0.5),
    "SELU": nn.SELU,
    "Sigmoid": nn.Sigmoid,
    "LogSigmoid": nn.LogSigmoid,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
    "Softsign": nn.Softsign,
    "Softplus": nn.Softplus,
    "Softplus, options": lambda: nn.Softplus(beta=3.0, threshold=6.0),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "GELU": nn.GELU,
    "GELU, tanh": lambda: nn.GELU(approximate="tanh"),
}
ROWS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    **{f"{name} {list(shape)}": (make, shape) for name, make in ACTIVATIONS.items() for shape in (VECTOR, IMAGE)},
    "ReLU scalar": (nn.ReLU, ()),
    "PReLU scalar": (nn.PReLU, ()),
    "PReLU, channels": (lambda: nn.PReLU(2), (2,)),
    "PReLU, channels of images": (lambda: nn.PReLU(2), (2, 3, 3)),
    "Linear": (lambda: nn.Linear(4, 3), (4,)),
    "Linear, no bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "Linear, one output": (lambda: nn.Linear(4, 1), (4,)),
    "Linear, extra axis": (lambda: nn.Linear(4, 3), (2, 4)),
    "Linear, extra axes": (lambda: nn.Linear(4, 3), (2, 3, 4)),
    "Linear, extra axis of length 1": (lambda: nn.Linear(4, 3), (1, 4)),
    "Softmax": (lambda: nn.Softmax(1), (4,)),
    "Softmax, last": (lambda: nn.Softmax(-1), (3, 4)),
    "Softmax, middle": (lambda: nn.Softmax(1), (3, 4)),
    "LogSoftmax": (lambda: nn.LogSoftmax(1), (4,)),
    "LogSoftmax, middle": (lambda: nn.LogSoftmax(-2), (3, 2, 2)),
    "Softmin": (lambda: nn.Softmin(-1), (2, 4)),
    "Softmax2d": (nn.Softmax2d, (3, 2, 2)),
    "Identity": (nn.Identity, (2, 3)),
    "Flatten": (nn.Flatten, (2, 3, 2)),
    "Flatten, nothing to do": (nn.Flatten, (3,)),
    "Flatten, partly": (lambda: nn.Flatten(-2), (2, 3, 2)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 3)), (6, 2)),
    "Permute": (lambda: Permute(0, 3, 1, 2), (2, 3, 4)),
    "Permute, transpose": (lambda: Permute(-1, -2, init_transpose=True), (2, 3, 4)),
    "ScaleModule": (lambda: ScaleModule(-1.5), (2, 3)),
    "SumModule": (SumModule, (2, 3)),
    "Slicing": (lambda: Slicing((slice(None), slice(0, 3, 2), 1)), (4, 3)),
    "Slicing, repeated": (lambda: Slicing((slice(None), [0, 2, 2], None)), (4, 3)),
    "Pad": (lambda: Pad((1, 2, 0, 1)), (3, 2)),
    "Pad, value": (lambda: Pad((1, 2), value=-float("inf")), (3, 2)),
    "Pad, cut": (lambda: Pad((1, -1)), (3, 2)),
    "Pad, reflect": (lambda: Pad((1, 2), mode="reflect"), (2, 4)),
    "Pad, circular": (lambda: Pad((1, 2), mode="circular"), (2, 4)),
    "Dropout": (nn.Dropout, (2, 3)),
    "Dropout1d": (nn.Dropout1d, (2, 3)),
    "Dropout2d": (nn.Dropout2d, (2, 3, 2)),
    "Dropout3d": (nn.Dropout3d, (2, 1, 3, 2)),
    "AlphaDropout": (nn.AlphaDropout, (2, 3)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (2, 3, 2)),
}
for _name, (_make, _shape) in ROWS.items():
    layer(_name, _make, _shape)
# torch's second derivative is missing (Hardsigmoid), or takes the other side at a kink than the first (PReLU)
ONCE_ONLY = {name for name in LAYERS if name.startswith(("Hardsigmoid", "PReLU"))}
BATCHES = [(name, size) for name in LAYERS for size in (1, 3)]


class Call:
    """What the engine hands to rules in place of a module: inputs and output of one execution, everything else from the module."""

    def __init__(self, module: Module, **tensors: Tensor) -> None:
        self.module, self.tensors = module, tensors

    def __getattr__(self, name: str) -> object:
        if name in self.tensors:
            return self.tensors[name]
        if name.startswith("input"):
            raise AttributeError(name)
        return getattr(self.module, name)


class Recorded:
    """A module with ``input0`` and ``output`` set by hand, and its dense derivatives."""

    def __init__(self, module: Module, *inputs: Tensor) -> None:
        self.module, self.inputs, self.N = module, inputs, inputs[0].shape[0]
        for i, value in enumerate(inputs):
            setattr(module, f"input{i}", value)
        module.output = module(*(value.clone() if isinstance(value, Tensor) else value for value in inputs)).detach()
        self.x, self.y = inputs[0], module.output
        self.g_out = (randn(self.y.shape, dtype=self.y.dtype),)

    def function(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # other attention kernels cannot be differentiated twice
            return self.module(x.clone(), *self.inputs[1:])

    def per_sample(self, matrix: Tensor, rows: torch.Size, columns: torch.Size) -> Tensor:
        """Cut the blocks ``[N, D_rows, D_columns]`` of the samples out of a derivative of the whole batch; all others must be zero."""
        full = matrix.reshape(self.N, rows[1:].numel(), self.N, columns[1:].numel())
        blocks = full.diagonal(dim1=0, dim2=2).movedim(2, 0)
        assert full.count_nonzero() == blocks.count_nonzero()
        return blocks

    def jac(self) -> Tensor:
        return self.per_sample(jacobian(self.function, self.x), self.y.shape, self.x.shape)

    def param_jac(self, name: str) -> Tensor:
        """Compute ``[N, D_out, *param]``."""
        param = self.module.get_parameter(name)
        dense = jacobian(lambda value: functional_call(self.module, {name: value}, self.inputs), param)
        return dense.reshape(self.N, self.y.shape[1:].numel(), *param.shape)

    def residual(self) -> Tensor:
        if isinstance(self.module, nn.Hardsigmoid):  # piecewise linear; torch cannot differentiate it twice
            return self.x.new_zeros(self.N, self.x[0].numel(), self.x[0].numel())
        dense = hessian(lambda x: (self.function(x) * self.g_out[0]).sum(), self.x)
        return self.per_sample(dense, self.x.shape, self.x.shape)

    def like_output(self, samples: int | None = None) -> Tensor:
        return randn(V, self.N if samples is None else samples, *self.y.shape[1:], dtype=self.y.dtype)

    def like_input(self) -> Tensor:
        return randn(V, *self.x.shape, dtype=self.x.dtype)


def setup(name: str, batch_size: int) -> tuple[BaseDerivatives, Recorded]:
    module = LAYERS[name].make().to(DOUBLE).eval()
    x = 2 * randn(batch_size, *LAYERS[name].shape, dtype=DOUBLE)
    kinks = torch.tensor(KINKS, dtype=DOUBLE)[: x[0].numel()]
    x.view(batch_size, -1)[-1, : len(kinks)] = kinks  # exact kinks in the last sample
    return derivatives_for(module), Recorded(module, x, *LAYERS[name].more(batch_size))


def close(result: Tensor, truth: Tensor) -> None:
    assert result.dtype == truth.dtype
    torch.testing.assert_close(result, truth.reshape(result.shape), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "batch_size"), BATCHES)
def test_jac_mat_prod(name: str, batch_size: int) -> None:
    derivatives, recorded = setup(name, batch_size)
    mat = recorded.like_input()
    truth = einsum("noi,vni->vno", recorded.jac(), mat.reshape(*mat.shape[:2], -1)).reshape(V, *recorded.y.shape)
    close(derivatives.jac_mat_prod(recorded.module, None, None, mat), truth)
    close(derivatives.jac_mat_prod(recorded.module, None, None, mat[1]), truth[1])
    if name not in ONCE_ONLY:
        close(GenericDerivatives().jac_mat_prod(recorded.module, None, None, mat), truth)


@pytest.mark.parametrize("subsampling", [None, SUBSAMPLING, [1]], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_jac_t_mat_prod(name: str, subsampling: list[int] | None) -> None:
    for batch_size in (1, 3) if subsampling is None else (3,):
        derivatives, recorded = setup(name, batch_size)
        samples = range(batch_size) if subsampling is None else subsampling
        mat = recorded.like_output(len(samples))
        truth = einsum("noi,vno->vni", recorded.jac()[samples], mat.reshape(*mat.shape[:2], -1)).reshape(V, len(samples), *recorded.x.shape[1:])
        for rule in (derivatives, GenericDerivatives()):
            close(rule.jac_t_mat_prod(recorded.module, None, None, mat, subsampling=subsampling), truth)
            close(rule.jac_t_mat_prod(recorded.module, None, None, mat[1], subsampling), truth[1])


@pytest.mark.parametrize(("name", "batch_size"), BATCHES)
def test_ea_jac_t_mat_jac_prod(name: str, batch_size: int) -> None:
    derivatives, recorded = setup(name, batch_size)
    jac = recorded.jac()
    mat = randn(jac.shape[1], jac.shape[1], dtype=DOUBLE)  # not symmetric
    truth = einsum("nai,ab,nbj->ij", jac, mat, jac) / batch_size
    close(derivatives.ea_jac_t_mat_jac_prod(recorded.module, None, None, mat), truth)
    close(GenericDerivatives().ea_jac_t_mat_jac_prod(recorded.module, None, None, mat), truth)


@pytest.mark.parametrize(("name", "batch_size"), BATCHES)
def test_second_derivatives(name: str, batch_size: int) -> None:
    derivatives, recorded = setup(name, batch_size)
    module, g_out = recorded.module, recorded.g_out
    truth = recorded.residual()
    off_diagonal = truth - truth.diagonal(dim1=1, dim2=2).diag_embed()
    assert derivatives.hessian_is_zero(module) == (not truth.any())
    assert derivatives.hessian_is_diagonal(module) == (not off_diagonal.any())
    if derivatives.hessian_is_diagonal(module):
        close(derivatives.hessian_diagonal(module, None, g_out), truth.diagonal(dim1=1, dim2=2).reshape(recorded.x.shape))

    mat = recorded.like_input()
    product = einsum("nij,vnj->vni", truth, mat.reshape(*mat.shape[:2], -1)).reshape(mat.shape)
    rules = [derivatives]
    if name not in ONCE_ONLY:
        generic = GenericDerivatives()
        close(generic.residual(module, None, g_out), truth)
        close(generic.hessian_diagonal(module, None, g_out), truth.diagonal(dim1=1, dim2=2).reshape(recorded.x.shape))
        rules.append(generic)
    for rule in rules:
        close(rule.residual_mat_prod(module, None, g_out, mat), product)
        close(rule.residual_mat_prod(module, None, g_out, mat[2]), product[2])


WITH_PARAMETERS = [name for name, case in LAYERS.items() if list(case.make().parameters())]


@pytest.mark.parametrize("subsampling", [None, SUBSAMPLING, [1]], ids=str)
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_param_mjp(name: str, subsampling: list[int] | None) -> None:
    for batch_size in (1, 3) if subsampling is None else (3,):
        derivatives, recorded = setup(name, batch_size)
        samples = range(batch_size) if subsampling is None else subsampling
        mat = recorded.like_output(len(samples))
        for param, _ in recorded.module.named_parameters():
            truth = einsum("no...,vno->vn...", recorded.param_jac(param)[samples], mat.reshape(*mat.shape[:2], -1))
            for rule in (derivatives, GenericDerivatives()):
                for sum_batch, expected in ((True, truth.sum(1)), (False, truth)):
                    args = (sum_batch, subsampling)
                    close(rule.param_mjp(param, recorded.module, None, None, mat, *args), expected)
                    close(rule.param_mjp(param, recorded.module, None, None, mat[1], *args), expected[1])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_param_jac_mat_prod(name: str, batch_size: int) -> None:
    derivatives, recorded = setup(name, batch_size)
    for param_str, param in recorded.module.named_parameters():
        mat = randn(V, *param.shape, dtype=DOUBLE)
        truth = einsum("nop,vp->vno", recorded.param_jac(param_str).flatten(2), mat.flatten(1)).reshape(V, *recorded.y.shape)
        for rule in (derivatives, GenericDerivatives()):
            product = getattr(rule, f"{param_str}_jac_mat_prod")
            close(product(recorded.module, None, None, mat), truth)
            close(product(recorded.module, None, None, mat[1]), truth[1])
        close(GenericDerivatives().param_jac_mat_prod(param_str, recorded.module, None, None, mat), truth)


def test_every_registered_class_has_a_case() -> None:
    modules = {
        cls for cls, rule in registered().items() if cls.__module__.startswith(("torch.", "backpack.")) and not isinstance(rule, BaseLossDerivatives)
    }
    indexed = {nn.Embedding, nn.EmbeddingBag}  # their inputs are integers: test_embedding.py
    assert {type(case.make()) for case in LAYERS.values()} == modules - indexed


@pytest.mark.parametrize("name", LAYERS)
def test_only_what_a_rule_keeps_is_read(name: str) -> None:
    """Products are the same for a record whose tensors that are not kept exist by shape and dtype only."""
    derivatives, recorded = setup(name, 3)
    mat, g_out = recorded.like_output(), recorded.g_out

    def products(module: Module | Call) -> list[Tensor]:
        results = [derivatives._jac_t_mat_prod(module, None, g_out, mat), derivatives._residual_mat_prod(module, None, g_out, recorded.x[None])]
        results += [derivatives._jac_mat_prod(module, None, g_out, recorded.x[None])]
        return results + [derivatives._param_mjp(param, module, None, g_out, mat) for param, _ in module.named_parameters()]

    expected = products(recorded.module)
    needs = derivatives.needs(recorded.module)
    kept = {**{f"input{i}": "input" in needs for i in range(len(recorded.inputs))}, "output": "output" in needs}
    tensors = {attribute: getattr(recorded.module, attribute) for attribute in kept}
    for attribute in kept:
        delattr(recorded.module, attribute)
    call = Call(recorded.module, **{attribute: tensor if kept[attribute] else tensor.to("meta") for attribute, tensor in tensors.items()})
    for result, truth in zip(products(call), expected, strict=True):
        close(result, truth)
    close(GenericDerivatives()._jac_t_mat_prod(Call(recorded.module, **tensors), None, None, mat), expected[0])
    assert derivatives.applies(call)


def permutable(case: Layer) -> bool:
    module = case.make()
    rule = derivatives_for(module)
    return rule.any_batch_axis and len(case.shape) > rule.feature_axes(module)


@pytest.mark.parametrize("name", [name for name, case in LAYERS.items() if permutable(case)])
def test_any_batch_axis(name: str) -> None:
    """Moving an axis of input, output and matrices to the front commutes with the products."""
    derivatives, recorded = setup(name, 3)
    module, mat = recorded.module, recorded.like_output()
    expected = derivatives._jac_t_mat_prod(module, None, None, mat)
    params = {param: derivatives._param_mjp(param, module, None, None, mat) for param, _ in module.named_parameters()}
    module.output = recorded.y.movedim(1, 0)
    for i, value in enumerate(recorded.inputs):
        setattr(module, f"input{i}", value.movedim(1, 0))
    close(derivatives._jac_t_mat_prod(module, None, None, mat.movedim(2, 1)), expected.movedim(2, 1))
    for param, truth in params.items():
        close(derivatives._param_mjp(param, module, None, None, mat.movedim(2, 1)), truth)


@pytest.mark.parametrize("make", [nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.RReLU], ids=lambda make: make.__name__)
def test_inplace_activations_need_the_output_only(make: type[Module]) -> None:
    x = torch.tensor([KINKS], dtype=DOUBLE)
    truth = jacobian(make().eval(), x).reshape(len(KINKS), len(KINKS)).diagonal()
    module = make(inplace=True).eval()
    overwritten = x.clone()
    module.output = module(overwritten)
    module.input0 = overwritten
    close(derivatives_for(module).jac_t_mat_prod(module, None, None, torch.ones_like(x)), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if "SELU" not in name])
def test_activations_agree_with_autograd_in_low_precision(name: str, dtype: torch.dtype) -> None:
    module = ACTIVATIONS[name]().to(dtype).eval()
    x = torch.cat([torch.tensor(KINKS), 2 * randn(20)])[None].to(dtype).requires_grad_()
    y = module(x)
    (truth,) = torch.autograd.grad(y.sum(), x)
    module.input0, module.output = x.detach(), y.detach()
    result = derivatives_for(module).jac_t_mat_prod(module, None, None, torch.ones_like(x))
    assert result.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.detach(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["Linear", "Linear, extra axes", "Softmax, middle", "Flatten", "Pad", "GELU [2, 3, 3]"])
def test_strides_do_not_matter(name: str) -> None:
    derivatives, recorded = setup(name, 3)
    module, mat = recorded.module, recorded.like_output()

    def strided(tensor: Tensor) -> Tensor:
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)

    products = [lambda mat: derivatives.jac_t_mat_prod(module, None, None, mat)]
    products += [lambda mat, p=p: derivatives.param_mjp(p, module, None, None, mat, sum_batch=False) for p, _ in module.named_parameters()]
    expected = [product(mat) for product in products]
    module.input0, module.output = strided(recorded.x), strided(recorded.y)
    for product, truth in zip(products, expected, strict=True):
        close(product(strided(mat)), truth)


def test_empty_batch() -> None:
    module = nn.Linear(4, 3)
    module.input0, module.output = rand(0, 4), rand(0, 3)
    derivatives = LinearDerivatives()
    assert derivatives.param_mjp("weight", module, None, None, rand(2, 0, 3)).equal(torch.zeros(2, 3, 4))
    assert derivatives.param_mjp("weight", module, None, None, rand(2, 0, 3), sum_batch=False).shape == (2, 0, 3, 4)
    assert derivatives.jac_t_mat_prod(module, None, None, rand(2, 0, 3)).shape == (2, 0, 4)


@pytest.mark.parametrize("samples", [0, 2])
def test_stacks_of_inputs_of_an_empty_batch(samples: int) -> None:
    """The stack of matrices that is repeated for each sample has no entry then."""
    model = nn.Linear(4, 4)
    model.stack = nn.Parameter(rand(2, 2, 5))
    extend(model)
    with backpack(BatchGrad(), DiagGGNExact()):
        nn.functional.mse_loss(model(rand(samples, 4)).view(samples, 2, 1, 2) @ model.stack, rand(samples, 2, 1, 5), reduction="sum").backward()
    assert model.stack.grad_batch.shape == (samples, 2, 2, 5)
    assert model.stack.diag_ggn_exact.any() == (samples > 0)


def test_wrong_shapes_are_refused() -> None:
    module = nn.Linear(4, 3)
    recorded = Recorded(module, rand(5, 4))
    derivatives = LinearDerivatives()
    with pytest.raises(ShapeError, match=r"\[V, 5, 3\], got \[2, 5, 4\]"):
        derivatives.jac_t_mat_prod(module, None, None, rand(2, 5, 4))
    with pytest.raises(ShapeError):
        derivatives.jac_t_mat_prod(module, None, None, rand(2, 5, 3), subsampling=[0])
    with pytest.raises(ShapeError):
        derivatives.jac_mat_prod(module, None, None, rand(2, 4, 4))
    with pytest.raises(ShapeError):
        derivatives.param_mjp("weight", module, None, None, rand(2, 2, 5, 3))
    with pytest.raises(ShapeError):
        derivatives.weight_jac_mat_prod(module, None, None, rand(4, 3))
    with pytest.raises(ShapeError):
        derivatives.bias_jac_mat_prod(module, None, None, rand(2, 3, 1))
    with pytest.raises(ShapeError):
        derivatives.residual_mat_prod(module, None, recorded.g_out, rand(2, 5, 3))


@pytest.mark.parametrize("chosen", [[99], [-4], "a", "", [0.5]], ids=repr)
def test_samples_that_do_not_exist_are_refused(chosen: object) -> None:
    """Also where the Jacobian is that of every sample, so that nothing is looked up."""
    layer = extend(nn.Linear(4, 2))
    output = layer(torch.rand(3, 4))
    mat = torch.rand(5, len(chosen), 2)
    for product in (LinearDerivatives().jac_t_mat_prod, partial(LinearDerivatives().param_mjp, "bias")):
        with pytest.raises(ValueError, match="indices of 3 samples"):
            product(layer, None, None, mat, subsampling=chosen)
    del output


def test_wrong_arguments_are_named() -> None:
    layer = extend(nn.Linear(4, 2, bias=False))
    output, rule, mat = layer(torch.rand(3, 4)), LinearDerivatives(), torch.rand(5, 3, 2)
    with pytest.raises(ArgumentTypeError, match=r"jac_t_mat_prod.*must be a tensor \[V, 3, 2\], got NoneType"):
        rule.jac_t_mat_prod(layer, None, None, None)
    for name in ("bias", "wieght"):
        with pytest.raises(ArgumentError, match=f"Linear.*no parameter '{name}'"):
            rule.param_mjp(name, layer, None, None, mat)
    with pytest.raises(ArgumentError, match="no parameter 'bias'"):
        rule.bias_jac_mat_prod(layer, None, None, torch.rand(5, 2))
    del output


def test_a_wrong_result_of_a_rule_is_refused() -> None:
    class Wrong(BaseParameterDerivatives):
        def _weight_jac_t_mat_prod(self, module, g_inp, g_out, mat, sum_batch=True, subsampling=None):
            return mat.new_zeros(mat.shape[0], *module.weight.shape)  # forgets that samples are kept apart

    module = nn.Linear(4, 3)
    recorded = Recorded(module, rand(5, 4))
    with pytest.raises(ShapeError, match="result of Wrong"):
        Wrong().param_mjp("weight", module, None, None, rand(2, *recorded.y.shape), sum_batch=False)


def test_reading_the_output_of_a_module_in_place_leaves_its_record_alone() -> None:
    """An output that was not kept is computed once more, from a copy of the input that was."""
    linear, silu = nn.Linear(4, 3), extend(nn.SiLU(inplace=True))
    last = silu(linear(rand(5, 4))) * 1  # nobody holds the output of silu
    close(silu.output, last.detach())
    close(silu.output, last.detach())
    close(nn.functional.silu(silu.input0), last.detach())


def test_missing_rules_are_refused() -> None:
    module = nn.Linear(4, 3)
    recorded = Recorded(module, rand(5, 4))
    derivatives, like_input, like_output = BaseParameterDerivatives(), rand(1, 5, 4), rand(1, 5, 3)
    for call in (
        lambda: derivatives.jac_mat_prod(module, None, None, like_input),
        lambda: derivatives.jac_t_mat_prod(module, None, None, like_output),
        lambda: derivatives.ea_jac_t_mat_jac_prod(module, None, None, rand(3, 3)),
        lambda: derivatives.residual_mat_prod(module, None, recorded.g_out, like_input),
        lambda: derivatives.hessian_diagonal(module, None, recorded.g_out),
        lambda: derivatives.param_mjp("weight", module, None, None, like_output),
        lambda: derivatives.weight_jac_mat_prod(module, None, None, rand(1, 3, 4)),
        lambda: derivatives.bias_jac_mat_prod(module, None, None, rand(1, 3)),
        lambda: derivatives.hessian_is_zero(module),
        lambda: derivatives.hessian_is_diagonal(module),
        derivatives.hessian_is_psd,
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_missing_rules_of_a_loss_are_refused() -> None:
    """By name, except for what is said of a Hessian of which nothing is known."""

    class Unknown(BaseLossDerivatives):
        def _verify_support(self, module):
            pass

    loss, mat = nn.MSELoss(), rand(1, 5, 3)
    loss.input0, loss.input1, loss.output = rand(5, 3), rand(5, 3), rand(())
    for name, product in {
        "_sqrt_hessian": lambda rule: rule.sqrt_hessian(loss, None, None),
        "_sqrt_hessian_sampled": lambda rule: rule.sqrt_hessian_sampled(loss, None, None),
        "_make_hessian_mat_prod": lambda rule: rule.make_hessian_mat_prod(loss, None, None)(mat),
        "_sum_hessian": lambda rule: rule.sum_hessian(loss, None, None),
    }.items():
        with pytest.raises(UnsupportedError, match=f"Unknown.*{name}.*MSELoss"):
            product(Unknown())


@pytest.mark.parametrize("name", [*ACTIVATIONS, "Dropout", "AlphaDropout"])
def test_slopes(name: str) -> None:
    """First and second derivative of each entry."""
    module = ACTIVATIONS.get(name, getattr(nn, name.partition(",")[0]))().to(DOUBLE).eval()
    x = (2 * randn(4, 5, dtype=DOUBLE)).requires_grad_()
    once = name == "Hardsigmoid"  # which torch does not differentiate twice; it is made of lines
    (df,) = torch.autograd.grad(module(x).sum(), x, create_graph=not once)
    d2f = torch.zeros_like(x) if once else torch.autograd.grad(df.sum() + 0 * x.sum(), x)[0]
    module.input0, module.output = x.detach(), module(x).detach()
    rule = derivatives_for(module)
    close(rule.df(module, None, None).detach(), df.detach())
    close(rule.df(module, None, None, subsampling=[2, 0, 2]).detach(), df.detach()[[2, 0, 2]])
    close(rule.d2f(module, None, None).detach(), d2f.detach())


@pytest.mark.parametrize("groups", [1, 2])
def test_products_of_a_matrix(groups: int) -> None:
    """The rule of ``x @ W``, and of stacks of matrices, in both directions."""
    x, weight = randn(3, groups, 5, 4, dtype=DOUBLE), randn(groups, 4, 2, dtype=DOUBLE)
    if groups == 1:
        x, weight = x[:, 0], weight[0]
    for tensor in (x, weight):
        tensor.requires_grad_()
    output = x @ weight
    module, rule = SimpleNamespace(input0=x.detach(), weight=weight.detach(), output=output.detach()), MatmulDerivatives()
    mats, columns = [randn(V, *tensor.shape, dtype=DOUBLE) for tensor in (x, weight)], randn(V, *output.shape, dtype=DOUBLE)
    close(rule._jac_mat_prod(module, None, None, mats[0]), torch.stack([mat @ module.weight for mat in mats[0]]))
    close(rule._weight_jac_mat_prod(module, None, None, mats[1]), torch.stack([module.input0 @ mat for mat in mats[1]]))
    pulled = [torch.autograd.grad(output, (x, weight), column, retain_graph=True) for column in columns]
    for result, truth in zip((rule._jac_t_mat_prod, rule._weight_jac_t_mat_prod), zip(*pulled, strict=True), strict=True):
        close(result(module, None, None, columns), torch.stack(truth))


@pytest.mark.parametrize("module", [nn.Flatten(), nn.Dropout().eval()], ids=lambda m: type(m).__name__)
def test_layers_that_return_their_input_are_not_recorded(module: Module) -> None:
    output, rule = extend(module)(rand(5, 4).requires_grad_()), derivatives_for(module)
    for product in (rule.jac_mat_prod, rule.jac_t_mat_prod):
        with pytest.raises(NotRecordedError, match=f"{type(module).__name__}.*returns its input"):
            product(module, None, None, output.unsqueeze(0))


def test_reshape_helpers() -> None:
    module = nn.Linear(4, 3)
    recorded = Recorded(module, rand(5, 4))
    for mat, result in (
        (out := recorded.like_output(), LinearDerivatives.reshape_like_output(out.flatten(), module)),
        (given := recorded.like_input(), LinearDerivatives.reshape_like_input(given.flatten(1), module)),
        (some := given[:, :2], LinearDerivatives.reshape_like_input(some.flatten(1), module, subsampling=[0, 0])),
    ):
        assert torch.equal(result, mat)


def test_linear_additional_dims() -> None:
    module = nn.Linear(4, 3)
    Recorded(module, rand(5, 2, 6, 4))
    assert LinearDerivatives._get_additional_dims(module) == (2, 6)


# --- rules that do not hold everywhere --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_in_training_mode(p: float) -> None:
    module = nn.Dropout(p)
    x = (rand(3, 50, dtype=DOUBLE) + 0.1).requires_grad_()
    y = module(x)
    (truth,) = torch.autograd.grad(y.sum(), x)
    module.input0, module.output = x.detach(), y.detach()
    close(DropoutDerivatives().jac_t_mat_prod(module, None, None, torch.ones_like(x)).detach(), truth)
    assert DropoutDerivatives().applies(module) == (p == 0)


def test_alpha_dropout_in_training_mode() -> None:
    module = nn.AlphaDropout(0.4)
    Recorded(module, rand(3, 50))
    assert not AlphaDropoutDerivatives().applies(module)
    with pytest.raises(UnsupportedError):
        AlphaDropoutDerivatives().jac_t_mat_prod(module, None, None, rand(3, 50))


@pytest.mark.parametrize(
    ("derivatives", "module"),
    [
        (LeakyReLUDerivatives(), nn.LeakyReLU(-0.1, inplace=True)),
        (RReLUDerivatives(), nn.RReLU()),
        (RReLUDerivatives(), nn.RReLU(-0.2, 0.1, inplace=True).eval()),
    ],
)
def test_slopes_that_the_record_does_not_determine(derivatives: BaseDerivatives, module: Module) -> None:
    Recorded(module, randn(3, 5))
    assert not derivatives.applies(module)
    with pytest.raises(UnsupportedError):
        derivatives.jac_mat_prod(module, None, None, rand(3, 5))


@pytest.mark.parametrize("make", [nn.Softmax, nn.LogSoftmax])
@pytest.mark.parametrize(("dim", "shape"), [(0, (3, 4)), (-2, (3, 4)), (None, (3, 4, 2))])
@pytest.mark.filterwarnings("ignore:Implicit dimension")
def test_softmax_over_the_samples(make: type[Module], dim: int | None, shape: tuple[int, ...]) -> None:
    module = make(dim)
    recorded = Recorded(module, rand(shape))
    derivatives = derivatives_for(module)
    for product in (derivatives.jac_mat_prod, derivatives.jac_t_mat_prod, derivatives.residual_mat_prod):
        with pytest.raises(MixedSamplesError):
            product(module, None, recorded.g_out, rand(shape))


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize(("make", "derivatives"), [(nn.Softmax, SoftmaxDerivatives()), (nn.LogSoftmax, LogSoftmaxDerivatives())])
def test_softmax_without_axis(make: type[Module], derivatives: BaseDerivatives) -> None:
    recorded = Recorded(make(), randn(3, 4, 2, 2, dtype=DOUBLE))
    mat = recorded.like_output()
    truth = einsum("noi,vno->vni", recorded.jac(), mat.reshape(*mat.shape[:2], -1)).reshape(mat.shape)
    close(derivatives.jac_t_mat_prod(recorded.module, None, None, mat), truth)


def test_reshapes_of_the_sample_axis_do_not_apply() -> None:
    for module, shape in ((nn.Flatten(0), (3, 4)), (nn.Flatten(-2), (3, 4)), (nn.Unflatten(0, (3, 2)), (6, 4))):
        Recorded(module, rand(shape))
        assert not derivatives_for(module).applies(module)


def test_sample_axis_is_not_padded_or_sliced() -> None:
    module = Pad((0, 0, 1, 0))
    Recorded(module, rand(3, 4))
    for product, mat in ((PadDerivatives().jac_mat_prod, rand(3, 4)), (PadDerivatives().jac_t_mat_prod, rand(4, 4))):
        with pytest.raises(ArgumentError):
            product(module, None, None, mat)

    module = Slicing((slice(0, 2),))
    Recorded(module, rand(3, 4))
    for product, mat in ((SlicingDerivatives().jac_mat_prod, rand(3, 4)), (SlicingDerivatives().jac_t_mat_prod, rand(2, 4))):
        with pytest.raises(ArgumentError):
            product(module, None, None, mat)

    module = Slicing((slice(None), [0, 1], slice(None), [0, 1]))  # puts the indexed axis first
    Recorded(module, rand(3, 2, 4, 2))
    with pytest.raises(MixedSamplesError):
        SlicingDerivatives().jac_mat_prod(module, None, None, rand(3, 2, 4, 2))


def test_unpad() -> None:
    x = rand(2, 3, 4)
    padded = nn.functional.pad(x, (1, 2, 0, 1), value=7.0)
    assert PadDerivatives.unpad(padded, (1, 2, 0, 1), "constant", 7.0).equal(x)
    with pytest.raises(UnsupportedError):
        PadDerivatives.unpad(padded, (1, 2, 0, 1), "reflect", 0.0)


# --- the table --------------------------------------------------------------------------------------------------------------------------------


def test_lookup_follows_the_class_hierarchy_but_not_past_a_new_forward() -> None:
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    class Below(Other):
        pass

    assert isinstance(derivatives_for(Same), LinearDerivatives)
    assert isinstance(derivatives_for(Same(2, 3)), LinearDerivatives)
    assert derivatives_for(Other) is derivatives_for(Other(2, 3)) is derivatives_for(Below(2, 3)) is derivatives_for(nn.Module) is None
    patched = nn.Linear(2, 3)
    patched.forward = lambda x: x
    assert derivatives_for(patched) is None

    class Helped(nn.Conv2d):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)

        def extra_repr(self) -> str:
            return "mine"

        def helper(self) -> None:
            pass

    class Padded(Helped):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight, bias)

    class Checked(nn.BatchNorm1d):
        def _check_input_dim(self, input: Tensor) -> None:
            assert input.dim() > 1

    assert derivatives_for(Helped) is derivatives_for(Helped(2, 3, 2)) is derivatives_for(nn.LazyConv2d) is derivatives_for(nn.Conv2d)
    assert derivatives_for(Padded) is derivatives_for(Padded(2, 3, 2)) is None
    convolution = nn.Conv2d(2, 3, 2)
    convolution._conv_forward = convolution._conv_forward
    assert derivatives_for(convolution) is None
    assert derivatives_for(Checked) is derivatives_for(nn.BatchNorm1d)

    class Mine(BaseDerivatives):
        pass

    register(Other, Mine)
    assert isinstance(derivatives_for(Below), Mine)
    assert isinstance(registered()[Other], Mine)
    instance = Mine()
    register(Below, instance)
    assert derivatives_for(Below(2, 3)) is instance

    @register(Same)
    class Decorated(BaseDerivatives):
        pass

    assert isinstance(derivatives_for(Same), Decorated)


@pytest.mark.parametrize("wrong", [nn.Linear(2, 3), int, "Linear"])
def test_only_module_classes_are_registered(wrong: object) -> None:
    with pytest.raises(ArgumentTypeError):
        register(wrong)


def test_names_of_parameters_follow_from_the_methods() -> None:
    class Mine(BaseParameterDerivatives):
        def _scale_jac_t_mat_prod(self) -> None: ...

        def _jac_t_mat_prod(self) -> None: ...

    assert Mine.params == ("scale",)
    assert set(LinearDerivatives.params) == {"weight", "bias"}


# --- the generic products ---------------------------------------------------------------------------------------------------------------------


class Gated(Module):
    """Two inputs that hold samples, one that does not, a buffer, a submodule, a functional operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(rand(2))
        self.register_buffer("shift", rand(2))

    def forward(self, x: Tensor, gate: Tensor, matrix: Tensor, flag: bool | None) -> Tensor:
        assert flag is None
        return (self.linear(x.mul_(1.0)) * gate.sigmoid() * self.scale + self.shift).tanh() @ matrix


class Tied(Module):
    """One parameter in two places, a loop over what the input says, which cannot be vectorized."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).tanh())
        return y**2 if x.isfinite().all().item() else y**3


class TwoOutputs(Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x**3).sum(1), x


GENERIC: dict[str, Callable[[], tuple[Module, tuple]]] = {
    "gated": lambda: (Gated(), (randn(4, 5, 3), randn(4, 5, 2), randn(2, 3), None)),
    "tied": lambda: (Tied(), (randn(4, 3),)),
    "LayerNorm": lambda: (nn.LayerNorm(4), (randn(4, 3, 4),)),
    "BatchNorm in evaluation": lambda: (nn.BatchNorm1d(3).eval(), (randn(4, 3),)),
    "Conv": lambda: (nn.Conv2d(2, 3, 2, padding="same", padding_mode="reflect"), (randn(3, 2, 3, 3),)),
    "Transformer": lambda: (nn.TransformerEncoderLayer(4, 2, 3, batch_first=True).eval(), (randn(3, 2, 4),)),
    "sequential": lambda: (nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)), (randn(3, 3),)),
    "GRU": lambda: (FirstOutput(nn.GRU(3, 2, batch_first=True)), (randn(3, 2, 3),)),
}


class FirstOutput(Module):
    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


def record_generic(name: str) -> Recorded:
    module, inputs = GENERIC[name]()
    return Recorded(module.to(DOUBLE), *(value.to(DOUBLE) if isinstance(value, Tensor) else value for value in inputs))


@pytest.mark.parametrize("name", GENERIC)
def test_generic_products(name: str) -> None:
    recorded, derivatives = record_generic(name), GenericDerivatives()
    module = recorded.module
    before = [value.clone() for value in recorded.inputs if isinstance(value, Tensor)], {k: b.clone() for k, b in module.named_buffers()}
    jac, mat = recorded.jac(), recorded.like_output()
    close(
        derivatives.jac_t_mat_prod(module, None, None, mat),
        einsum("noi,vno->vni", jac, mat.reshape(*mat.shape[:2], -1)).reshape(V, *recorded.x.shape),
    )
    mat = recorded.like_input()
    close(
        derivatives.jac_mat_prod(module, None, None, mat), einsum("noi,vni->vno", jac, mat.reshape(*mat.shape[:2], -1)).reshape(V, *recorded.y.shape)
    )
    close(derivatives.residual(module, None, recorded.g_out), recorded.residual())

    mat = recorded.like_output(3)
    for param, _ in module.named_parameters():
        truth = einsum("no...,vno->vn...", recorded.param_jac(param)[SUBSAMPLING], mat.reshape(*mat.shape[:2], -1))
        close(derivatives.param_mjp(param, module, None, None, mat, sum_batch=False, subsampling=SUBSAMPLING), truth)
        close(derivatives.param_mjp(param, module, None, None, mat, subsampling=SUBSAMPLING), truth.sum(1))
    for tensor, old in zip(filter(torch.is_tensor, recorded.inputs), before[0], strict=True):
        assert tensor.equal(old)
    for buffer, old in before[1].items():
        assert module.get_buffer(buffer).equal(old)


class Counting(Module):
    """Keeps what it has seen in plain attributes, buffers, lists and dictionaries, by assignment and in place."""

    def __init__(self, inner: Module | None = None) -> None:
        super().__init__()
        self.inner, self.calls, self.mean, self.log, self.nested = inner, 0, torch.zeros(3, dtype=DOUBLE), [], {"last": [None]}
        self.sum = torch.zeros((), dtype=DOUBLE)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        self.sum += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.log.append(x)
        self.nested["last"][0] = self.new = x
        y = x * x.sigmoid()
        return y if self.inner is None else self.inner(y)


class Fails(Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise ValueError
        return x


@pytest.mark.parametrize("inner", [None, Fails(), Counting()])
def test_generic_products_leave_the_module_as_it_was(inner: Module | None) -> None:
    module = Counting(inner)
    recorded = Recorded(module, randn(4, 3, dtype=DOUBLE))

    def state() -> list:
        parts = [part for part in module.modules() if isinstance(part, Counting)]
        names = [[(name, id(value)) for name, value in vars(part).items()] for part in parts]
        return [names, [(p.calls, p.sum.item(), p.steps.item(), p.mean.tolist(), [*map(id, p.log)], id(p.nested["last"][0])) for p in parts]]

    before = state()
    products = (
        lambda: GenericDerivatives().jac_t_mat_prod(module, None, None, recorded.like_output()),
        lambda: GenericDerivatives().jac_mat_prod(module, None, None, recorded.like_input()),
        lambda: GenericDerivatives().residual(module, None, recorded.g_out),
    )
    for product in products:
        with pytest.raises(UnsupportedError) if isinstance(inner, Fails) else nullcontext():
            product()
        assert state() == before
    if not isinstance(inner, Fails):
        close(GenericDerivatives().residual(module, None, recorded.g_out), recorded.residual())


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class CubeOnce(Cube):
    backward = staticmethod(once_differentiable(Cube.backward))


class Calls(Module):
    def __init__(self, function: type[torch.autograd.Function], of_weight: bool = False) -> None:
        super().__init__()
        self.function, self.weight, self.of_weight = function, nn.Parameter(rand(3, dtype=DOUBLE)), of_weight

    def forward(self, x: Tensor) -> Tensor:
        return x**2 * self.function.apply(self.weight) if self.of_weight else self.function.apply(x * self.weight)


def test_generic_products_know_what_cannot_be_differentiated_twice() -> None:
    rule, x = GenericDerivatives(), randn(4, 3, dtype=DOUBLE)

    def products(function: type[torch.autograd.Function], of_weight: bool = False) -> list[Callable[[], None]]:
        module, truth = Calls(function, of_weight), Recorded(Calls(Cube, of_weight), x)
        module.load_state_dict(truth.module.state_dict())
        Recorded(module, x)
        jac, mat, param = truth.jac(), truth.like_input(), randn(V, 3, dtype=DOUBLE)
        return [
            lambda: close(rule.jac_mat_prod(module, None, None, mat), einsum("noi,vni->vno", jac, mat)),
            lambda: close(rule.residual(module, None, truth.g_out), truth.residual()),
            lambda: close(rule.param_jac_mat_prod("weight", module, None, None, param), einsum("noi,vi->vno", truth.param_jac("weight"), param)),
            lambda: close(rule.jac_t_mat_prod(module, None, None, mat), einsum("noi,vno->vni", jac, mat)),
        ]

    for product in products(Cube):
        product()
    *second, first = products(CubeOnce)
    first()
    for product in second:
        with pytest.raises(UnsupportedError, match="once_differentiable"):
            product()
    along, residual, by_weight, transposed = products(CubeOnce, of_weight=True)
    for product in (along, residual, transposed):  # the function does not act on the variable
        product()
    with pytest.raises(UnsupportedError, match="once_differentiable"):
        by_weight()


class Normalized(Module):
    """A normalization with a bias, which may depend on the input, and without weight."""

    def __init__(self, adaptive: bool) -> None:
        super().__init__()
        self.bias, self.adaptive = nn.Parameter(rand(3, dtype=DOUBLE)), adaptive

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (3,), None, self.bias * x[0].exp() if self.adaptive else self.bias)


@pytest.mark.parametrize("adaptive", [False, True])
def test_generic_products_know_what_torch_forgets(adaptive: bool) -> None:
    """Torch takes such a bias for a constant where it differentiates gradients."""
    rule, truth = GenericDerivatives(), Recorded(Normalized(adaptive), randn(1, 3, dtype=DOUBLE))
    jac, mat = truth.jac(), truth.like_input()
    close(rule.jac_t_mat_prod(truth.module, None, None, mat), einsum("noi,vno->vni", jac, mat))
    if not adaptive:
        close(rule.jac_mat_prod(truth.module, None, None, mat), einsum("noi,vni->vno", jac, mat))
    else:
        with pytest.raises(UnsupportedError, match="bias were constant"):
            rule.jac_mat_prod(truth.module, None, None, mat)
    with pytest.raises(UnsupportedError, match="bias were constant"):
        rule.param_jac_mat_prod("bias", truth.module, None, None, mat[:, 0])


def test_generic_products_use_the_first_output() -> None:
    module, x = TwoOutputs(), randn(3, 4, dtype=DOUBLE)
    module.input0, module.output = x, module(x)[0]
    mat = randn(V, 3, dtype=DOUBLE)
    close(GenericDerivatives().jac_t_mat_prod(module, None, None, mat), mat[:, :, None] * 3 * x**2)


class Centered(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("make", [Centered, lambda: nn.BatchNorm1d(4), lambda: nn.Dropout(0.5), lambda: nn.RNN(4, 2)])
def test_generic_products_refuse_what_is_not_per_sample(make: Callable[[], Module]) -> None:
    module = FirstOutput(make()) if isinstance(make(), nn.RNN) else make()
    recorded = Recorded(module, randn(3, 4) if not isinstance(module, FirstOutput) else randn(3, 2, 4))
    mat = recorded.like_output()
    state = torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with pytest.raises(UnsupportedError):
        GenericDerivatives().jac_t_mat_prod(module, None, None, mat)
    assert torch.get_rng_state().equal(state)
    assert all(module.get_buffer(name).equal(old) for name, old in buffers.items())


class Chosen(Module):
    """Passes the derivative of a random choice off as that of the rounded one, which is the same with any random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gumbel_softmax(x, hard=True)


def test_generic_products_refuse_random_derivatives() -> None:
    module, x = Chosen(), torch.tensor([[40.0, 0.0, 1.0], [0.0, 2.0, 60.0]], dtype=DOUBLE)
    recorded, rule = Recorded(module, x), GenericDerivatives()
    assert torch.equal(module(x), recorded.y)
    columns, rows, state = recorded.like_output(), recorded.like_input(), torch.get_rng_state()
    for product in (
        lambda: rule.jac_t_mat_prod(module, None, None, columns),
        lambda: rule.jac_mat_prod(module, None, None, rows),
        lambda: rule.residual(module, None, recorded.g_out),
    ):
        with pytest.raises(UnsupportedError, match="draws random numbers"):
            product()
    assert torch.get_rng_state().equal(state)


def test_generic_products_refuse_a_module_that_has_changed() -> None:
    module = nn.BatchNorm1d(4).eval()
    recorded = Recorded(module, randn(3, 4))
    module.running_mean += 1
    with pytest.raises(UnsupportedError, match="changed since"):
        GenericDerivatives().param_mjp("weight", module, None, None, recorded.like_output())


def test_generic_products_refuse_a_record_without_tensors() -> None:
    call = Call(nn.Linear(4, 3), input0=torch.empty(3, 4, device="meta"), output=torch.empty(3, 3, device="meta"))
    with pytest.raises(UnsupportedError, match="not kept"):
        GenericDerivatives().jac_t_mat_prod(call, None, None, randn(3, 3))


def test_generic_products_name_unknown_parameters() -> None:
    module = nn.Linear(4, 3)
    recorded = Recorded(module, randn(3, 4))
    with pytest.raises(UnsupportedError, match="'weights', only 'weight', 'bias'"):
        GenericDerivatives().param_mjp("weights", module, None, None, recorded.like_output())


def test_results_carry_a_graph_only_under_grad_mode() -> None:
    """Products are differentiable where grad mode is on and only there."""
    for derivatives in (LinearDerivatives(), GenericDerivatives()):
        module = nn.Linear(4, 3).to(DOUBLE)
        recorded = Recorded(module, randn(3, 4, dtype=DOUBLE))
        mat = recorded.like_output().requires_grad_()
        with torch.no_grad():
            assert not derivatives._jac_t_mat_prod(module, None, None, mat).requires_grad
            assert not derivatives._param_mjp("weight", module, None, None, mat, sum_batch=False).requires_grad
        result = derivatives._jac_t_mat_prod(module, None, None, mat)
        (gradient,) = torch.autograd.grad(result.square().sum(), mat)
        close(gradient, 2 * mat.detach() @ module.weight.detach() @ module.weight.detach().T)


class Distances(Module):
    """Distances to rows of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.weight)


@pytest.mark.parametrize("columns", [1, 4])
def test_generic_products_do_not_trust_batching_rules(columns: int) -> None:
    """That of the derivative of distances is wrong: it returns the first column for all."""
    module, x, rule = extend(Distances()).double(), randn(3, 4).double().requires_grad_(), GenericDerivatives()
    with backpack(retain_graph=True):
        output = module(x)
    mat = randn(columns, 3, 5).double()
    mat[0] = mat[-1]
    found = rule.jac_t_mat_prod(module, None, (torch.ones_like(output),), mat)
    torch.testing.assert_close(found, torch.stack([torch.autograd.grad(output, x, column, retain_graph=True)[0] for column in mat]))
    found = rule.param_mjp("weight", module, None, (torch.ones_like(output),), mat)
    torch.testing.assert_close(found, torch.stack([torch.autograd.grad(output, module.weight, column, retain_graph=True)[0] for column in mat]))
