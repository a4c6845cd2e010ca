"""Convolutions: unfolding and other functions on tensors, and executions that the table of cases has no row for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases_conv import LAYERS
from oracle import Oracle, Problem, Term
from table import default_dtype, every_second
from torch import Tensor, einsum, nn, randn
from torch.func import functional_call, jacrev

from backpack import backpack, extend, extensions
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives, weight_jac_t_save_memory
from backpack.core.derivatives.registry import derivatives_for
from backpack.utils import conv, conv_transpose
from backpack.utils.errors import ArgumentError, MixedSamplesError, ShapeError

DOUBLE = torch.float64


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def made(name: str, N: int = 3) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    with default_dtype(DOUBLE):
        return make(), randn(N, *shape)


def utils_of(module: nn.Module) -> object:
    return conv_transpose if module.transposed else conv


# --- functions on tensors ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_weight_times_unfolded_input_is_the_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = made(name)
    derivatives = derivatives_for(module)
    unfolded = conv_transpose.unfold_by_conv_transpose(x, module) if module.transposed else conv.unfold_by_conv(x, module)
    matrix = derivatives.matrix_from_weight(module, module.weight[None])
    close(derivatives.weight_from_matrix(module, matrix)[0], module.weight)
    out = einsum("gok,ngkl->ngol", matrix[0], unfolded.unflatten(1, (module.groups, -1)))
    expected = module(x) if module.bias is None else module(x) - module.bias.reshape(-1, *[1] * (x.dim() - 2))
    close(out.reshape(expected.shape), expected)
    module.input0, module.output = x, expected
    close(derivatives.get_unfolded_input(module), unfolded)
    if not module.transposed:
        close(conv.unfold_input(module, x), unfolded)
    columns = derivatives.columns(module)
    for many, entries in ((0, 9999), (9999, 9999), (9999, 0)):  # without patches, with copies of them, with lookups
        monkeypatch.setattr("backpack.utils.conv._MANY", many)
        monkeypatch.setattr("backpack.utils.conv._WIDE", many)
        monkeypatch.setattr("backpack.utils.conv._ENTRIES", entries)
        assert derivatives.get_unfolded_input(module).equal(unfolded)
        close(derivatives.input_moment(module, 0.5), 0.5 * einsum("ngkl,ngml->gkm", columns, columns))


@pytest.mark.parametrize("name", LAYERS)
def test_diagonals(name: str) -> None:
    """Diagonals of ``(J^T S)(J^T S)^T`` from the Jacobian of each sample's output."""
    module, x = made(name)
    utils, S = utils_of(module), randn(2, *module(x).shape, dtype=DOUBLE)
    params = {name: param.detach() for name, param in module.named_parameters()}
    jacobians = jacrev(lambda p: functional_call(module, p, (x,)))(params)
    unfolded, grad = utils.get_weight_gradient_factors(x, S[0], module)
    close(grad, S[0].flatten(2))
    extract = {"weight": lambda s: utils.extract_weight_diagonal(module, unfolded, S, s), "bias": lambda s: utils.extract_bias_diagonal(module, S, s)}
    for param, jacobian in jacobians.items():
        J = jacobian.reshape(len(x), -1, *params[param].shape)
        expected = einsum("no...,vno->vn...", J, S.flatten(2)).square().sum(0)
        close(extract[param](False), expected)
        close(extract[param](True), expected.sum(0))


@pytest.mark.parametrize("utils", [conv, conv_transpose])
def test_diagonals_refuse_shapes_that_do_not_fit(utils: object) -> None:
    module = (nn.ConvTranspose1d if utils is conv_transpose else nn.Conv1d)(2, 3, 2)
    unfolded, S = randn(4, 4, 5), randn(2, 4, 3, 5)
    assert utils.extract_weight_diagonal(module, unfolded, S).shape == module.weight.shape
    for wrong in (S[0], S[:, :3], S[:, :, :2], S[..., :4]):
        with pytest.raises(ShapeError):
            utils.extract_weight_diagonal(module, unfolded, wrong)
    with pytest.raises(ShapeError):
        utils.extract_bias_diagonal(module, S[:, :, :2])


def test_modules_and_functions_by_number_of_axes() -> None:
    for n in (1, 2, 3):
        assert conv.get_conv_module(n) is getattr(nn, f"Conv{n}d")
        assert conv.get_conv_function(n) is getattr(nn.functional, f"conv{n}d")
        assert conv_transpose.get_conv_transpose_module(n) is getattr(nn, f"ConvTranspose{n}d")
        assert conv_transpose.get_conv_transpose_function(n) is getattr(nn.functional, f"conv_transpose{n}d")
        assert isinstance(ConvNDDerivatives(n), type(derivatives_for(getattr(nn, f"Conv{n}d"))).__base__)
        assert isinstance(ConvTransposeNDDerivatives(n), type(derivatives_for(getattr(nn, f"ConvTranspose{n}d"))).__base__)
    for function in (conv.get_conv_module, conv.get_conv_function, conv_transpose.get_conv_transpose_module):
        with pytest.raises(ArgumentError, match="N=4"):
            function(4)


@pytest.mark.parametrize(("stride", "padding", "kernel", "dilation", "size"), [(2, 1, 3, 1, 6), (3, 0, 2, 2, 11), (1, 2, 3, 1, 4), (4, 1, 3, 1, 12)])
def test_output_padding_that_restores_the_input_size(stride: int, padding: int, kernel: int, dilation: int, size: int) -> None:
    module = nn.Conv1d(2, 3, kernel, stride, padding, dilation)
    x = randn(1, 2, size, requires_grad=True)
    out = module(x)
    settings = (module.stride, module.padding, module.kernel_size)
    extra = conv._grad_input_padding(out, x.shape, *settings, dilation=module.dilation)
    back = nn.functional.conv_transpose1d(out, module.weight, None, stride, padding, extra, 1, dilation)
    torch.testing.assert_close(back, torch.autograd.grad(out, x, out)[0])
    with pytest.raises(ValueError, match=str(size + stride)):
        conv._grad_input_padding(out, [size + stride], *settings, dilation=module.dilation)
    if dilation == 1:
        with pytest.warns(UserWarning, match="assuming 1"):
            assert conv._grad_input_padding(out, [size], *settings) == extra


# --- executions -------------------------------------------------------------------------------------------------------------------------------


def results(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | list[Tensor]]:
    loss = extend(nn.CrossEntropyLoss())
    with backpack(extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.Variance(), extensions.DiagGGNExact(), extensions.KFLR()):
        loss(extend(model)(x), y).backward()
    fields = ("grad_batch", "batch_l2", "variance", "diag_ggn_exact")
    values = {f"{name} {field}": getattr(p, field) for name, p in model.named_parameters() for field in fields}
    return values | {f"{name} {i}": factor for name, p in model.named_parameters() for i, factor in enumerate(p.kflr)}


def classifier(*layers: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(width, 3))


def test_saving_memory_changes_nothing() -> None:
    torch.manual_seed(0)
    model, x, y = classifier(nn.Conv2d(2, 3, 2), width=12).to(DOUBLE), randn(4, 2, 3, 3, dtype=DOUBLE), torch.tensor([0, 1, 2, 0])
    expected = results(model, x, y)
    with weight_jac_t_save_memory():
        saved = results(model, x, y)
        with weight_jac_t_save_memory(save_memory=False):
            assert not ConvNDDerivatives._SAVE_MEMORY
        assert ConvNDDerivatives._SAVE_MEMORY
    assert not ConvNDDerivatives._SAVE_MEMORY
    for name, value in expected.items():
        close(saved[name], value)


@pytest.mark.parametrize("make", [lambda: nn.LazyConv1d(3, 2), lambda: nn.LazyConvTranspose1d(3, 2)], ids=["conv", "transposed"])
def test_lazy_modules(make: object) -> None:
    """A module that learns its number of channels from the first input, extended before it does."""
    lazy = make()
    width = 3 * (4 if isinstance(lazy, nn.LazyConvTranspose1d) else 2)
    x, y = randn(4, 2, 3), torch.tensor([0, 1, 2, 0])
    model = extend(nn.Sequential(lazy, nn.Flatten(), nn.Linear(width, 3)))
    values = results(model, x, y)
    known = type(lazy)(2, 3, 2)
    known.load_state_dict(lazy.state_dict())
    for name, value in results(nn.Sequential(known, nn.Flatten(), model[2]), x, y).items():
        torch.testing.assert_close(values[name], value)


@pytest.mark.parametrize("name", ["Conv1d, all numbers", "Conv2d", "Conv2d, same, reflect", "Conv2d, circular", "Conv3d", "ConvTranspose2d, groups"])
def test_empty_batch(name: str) -> None:
    """All per-sample quantities of no samples are empty, all sums zero."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    model = classifier(layer, width=layer(randn(1, *shape)).numel())
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))
    quantities = [extensions.BatchGrad(), extensions.Variance(), extensions.BatchL2Grad(), extensions.DiagGGNExact(), extensions.KFLR()]
    with backpack(*quantities):
        loss(extend(model)(torch.empty(0, *shape)), torch.empty(0, dtype=torch.long)).backward()
    for param in layer.parameters():
        assert param.grad_batch.shape == (0, *param.shape)
        assert param.batch_l2.shape == (0,)
        assert param.diag_ggn_exact.equal(torch.zeros_like(param))
        assert param.variance.equal(torch.zeros_like(param))
        for pair in param.kflr if type(param.kflr[0]) is list else [param.kflr]:
            assert not any(factor.any() for factor in pair)


@pytest.mark.parametrize("name", ["Conv1d, all numbers", "Conv2d, same, reflect", "ConvTranspose2d, groups"])
def test_no_columns(name: str) -> None:
    module, x = made(name)
    module.input0, module.output = x, module(x).detach()
    derivatives, none = derivatives_for(module), x.new_empty(0, *module.output.shape)
    assert derivatives.jac_t_mat_prod(module, None, None, none).shape == (0, *x.shape)
    assert derivatives.jac_mat_prod(module, None, None, x[None][:0]).shape == none.shape
    assert derivatives.weight_jac_mat_prod(module, None, None, module.weight[None][:0]).shape == none.shape
    assert derivatives.param_mjp("weight", module, None, None, none).shape == (0, *module.weight.shape)
    assert derivatives.param_mjp("weight", module, None, None, none, sum_batch=False).shape == (0, len(x), *module.weight.shape)


def test_blocks_of_samples_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few samples and columns are treated at a time, the results are the same."""
    torch.manual_seed(0)
    x, y = randn(5, 4, 3, 3, dtype=DOUBLE), torch.tensor([0, 1, 2, 0, 1])
    model = classifier(nn.Conv2d(4, 2, 2, groups=2, padding=1), nn.Tanh(), nn.ConvTranspose2d(2, 3, 2, stride=2), width=192).to(DOUBLE)
    expected = results(model, x, y)
    for samples, columns, unfolded in ((1, 1, 9999), (300, 1, 9999), (1, 300, 9999), (300, 300, 9999), (300, 300, 0), (1, 300, 0)):
        for module in ("affine", "affine_squares", "convnd"):
            monkeypatch.setattr(f"backpack.core.derivatives.{module}.SMALL", samples)
        for module in ("affine", "convnd"):
            monkeypatch.setattr(f"backpack.core.derivatives.{module}.LARGE", columns)
        monkeypatch.setattr("backpack.core.derivatives.convnd._UNFOLDED", unfolded)
        monkeypatch.setattr("backpack.core.derivatives.convnd._PULLED", columns)
        monkeypatch.setattr("backpack.core.derivatives.convnd._AT_ONCE", samples)
        monkeypatch.setattr("backpack.core.derivatives.convnd._PATCHES", samples)
        monkeypatch.setattr("backpack.core.derivatives.affine_squares._EACH", samples)
        monkeypatch.setattr("backpack.core.derivatives.affine._ALONE", samples)
        for name, value in results(model, x, y).items():
            close(value, expected[name])


@pytest.mark.parametrize("layer", [lambda: nn.Conv2d(8, 2, 1), lambda: nn.Conv2d(8, 4, 2, groups=2)])
@pytest.mark.parametrize("N", [1, 3])
def test_samples_as_groups(layer: Callable[[], nn.Conv2d], N: int) -> None:
    """With this many positions, products of samples are further groups of torch's kernel."""
    torch.manual_seed(0)
    conv, x = layer(), randn(N, 8, 14, 14, dtype=DOUBLE)
    model = extend(nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(conv.out_channels, 1)).to(DOUBLE))
    quantities = [extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.SumGradSquared(), extensions.Variance()]
    with backpack(*quantities, extensions.DiagGGNExact(), extensions.BatchDiagGGNExact()):
        extend(nn.MSELoss(reduction="sum"))(model(x), torch.zeros(N, 1, dtype=DOUBLE)).backward()
    outputs = [model(row[None]).squeeze() for row in x]
    slopes = torch.stack([torch.autograd.grad(out, conv.weight)[0] for out in outputs])
    grads = 2 * torch.stack(outputs).detach().reshape(N, 1, 1, 1, 1) * slopes
    close(conv.weight.grad_batch, grads)
    close(conv.weight.batch_l2, grads.square().flatten(1).sum(1))
    close(conv.weight.sum_grad_squared, grads.square().sum(0))
    close(conv.weight.variance, grads.var(0, unbiased=False))
    close(conv.weight.diag_ggn_exact, 2 * slopes.square().sum(0))
    close(conv.weight.diag_ggn_exact_batch, 2 * slopes.square())


def test_strides_of_transposed_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their inputs are not unfolded with zeros in between: columns at their outputs are, as many as there are entries of the input."""
    torch.manual_seed(0)
    x, y = randn(3, 2, 2, 2, dtype=DOUBLE), torch.tensor([0, 1, 2])
    model = classifier(nn.ConvTranspose2d(2, 4, 2, stride=2), nn.Tanh(), nn.ConvTranspose2d(4, 2, (3, 2), 2, 1, 1, groups=2), width=112).to(DOUBLE)
    expected = results(model, x, y)
    for layer in (model[0], model[2]):
        monkeypatch.setattr(derivatives_for(layer), "turned", lambda *args: None)  # as if positions were further ones
    by_inputs = results(model, x, y)
    monkeypatch.undo()
    monkeypatch.setattr(ConvTransposeNDDerivatives, "columns", None)
    for name, value in results(model, x, y).items():
        close(value, expected[name])
        close(value, by_inputs[name])


def test_autocast() -> None:
    """Under autocast a layer is read off its graph node, with the tensors that the kernel saw, behind the cast of its parameters."""
    torch.manual_seed(0)
    model, x, y = classifier(nn.Conv1d(2, 3, 2), nn.Conv1d(3, 2, 2), width=4), randn(3, 2, 4), torch.tensor([0, 1, 2])
    loss = extend(nn.CrossEntropyLoss())
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(extend(model)(x), y)
    with backpack(extensions.BatchGrad()):
        value.backward(retain_graph=True)
    for param in model[:2].parameters():
        torch.testing.assert_close(param.grad_batch.sum(0).float(), param.grad, rtol=0.05, atol=0.01)
    with backpack(extensions.KFLR()):
        value.backward()
    truth = [param.kflr for param in model.parameters()]
    with backpack(extensions.KFLR()):
        loss(model(x), y).backward()
    for param, mixed in zip(model.parameters(), truth, strict=True):
        for factor, expected in zip(mixed, param.kflr, strict=True):
            assert factor.dtype == torch.float32
            assert (factor - expected).abs().amax() <= 0.05 * expected.abs().amax()


def test_input_without_batch_axis() -> None:
    """The first axis of what enters the loss holds the samples: they must not be output channels that share their inputs."""
    with default_dtype(DOUBLE):
        model, x, target = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.ConvTranspose1d(3, 3, 2)), randn(2, 4), randn(1, 3, 4)
    oracle = Oracle(Problem(nn.Sequential(*model, nn.Unflatten(0, (1, 3))), x, [Term(nn.MSELoss(), target)]))
    loss, quantities = extend(nn.MSELoss()), (extensions.BatchGrad(), extensions.DiagGGNExact())
    with backpack(*quantities):
        loss(extend(model)(x).unsqueeze(0), target).backward()
    for name, param in model.named_parameters():
        close(param.grad_batch, oracle.grad_batch[name])
        close(param.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[name].sum(0))
    with pytest.raises(MixedSamplesError), backpack(*quantities):
        loss(model(x), target[0]).backward()


def changed(module: nn.Module, **attributes: object) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(shape))


CHANGED: dict[str, Callable[[], nn.Module]] = {
    "stride": lambda: changed(nn.Conv2d(4, 3, 3), stride=2),
    "stride, one number": lambda: changed(nn.Conv2d(4, 3, 3), stride=(2,)),
    "padding": lambda: changed(nn.Conv2d(4, 3, 3), padding=1),
    "dilation": lambda: changed(nn.Conv2d(4, 3, 3), dilation=2),
    "transposed, stride": lambda: changed(nn.ConvTranspose2d(4, 3, 3), stride=2),
    "one side padded": lambda: changed(nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate"), _reversed_padding_repeated_twice=[2, 0, 1, 1]),
    "padding in a mode, of which torch has a copy": lambda: changed(nn.Conv2d(4, 3, 3, padding=(1, 0), padding_mode="circular"), padding=(0, 1)),
    "padding in a mode, by name": lambda: changed(nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), padding="same"),
    "kernel turned": lambda: changed(nn.Conv2d(4, 3, (1, 3)), weight=weight(3, 4, 3, 1)),
    "transposed, kernel turned": lambda: changed(nn.ConvTranspose2d(4, 3, (1, 3)), weight=weight(4, 3, 3, 1)),
    "kernel grown": lambda: changed(nn.Conv2d(4, 3, 1), weight=weight(3, 4, 3, 3)),
    "channels pruned": lambda: changed(nn.Conv2d(4, 3, 3, bias=False), weight=weight(2, 4, 3, 3)),
    "transposed, channels pruned": lambda: changed(nn.ConvTranspose2d(4, 3, 3, bias=False), weight=weight(4, 2, 3, 3)),
}


@pytest.mark.parametrize("side", [5, 8])
@pytest.mark.parametrize("name", every_second(CHANGED))
def test_settings_that_were_changed(name: str, side: int) -> None:
    """What torch convolves with counts, whatever the attributes say."""

    def build() -> Problem:
        torch.manual_seed(0)
        with default_dtype(DOUBLE):
            model, x = nn.Sequential(CHANGED[name](), nn.Tanh(), nn.Flatten()), randn(2, 4, side, side)
            return Problem(model, x, [Term(nn.MSELoss(), torch.zeros_like(model(x)))])

    problem, oracle = build(), Oracle(build())
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.KFLR()):
        problem.loss(problem.outputs()).backward()
    diagonals, factors = oracle.diag_ggn_batch(oracle.hessian_exact), oracle.kronecker(oracle.hessian_exact)
    for path, parameter in problem.model.named_parameters():
        close(parameter.grad, oracle.grad[path])
        close(parameter.grad_batch, oracle.grad_batch[path])
        close(parameter.diag_ggn_exact, diagonals[path].sum(0))
        for found, expected in zip(parameter.kflr, factors[path], strict=True):
            close(found, expected)


@pytest.mark.parametrize(("stride", "dilation", "extra"), [(1, 2, 1), (2, 3, 2)])
def test_output_padding_of_a_stride_or_more(stride: int, dilation: int, extra: int) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(2, 3, 3, stride=stride, dilation=dilation, output_padding=extra)
    model, lossfunc = extend(nn.Sequential(layer, nn.Flatten()).double()), extend(nn.MSELoss(reduction="sum"))
    x = torch.randn(4, 2, 5, dtype=torch.float64)
    out = model(x)
    jacobian = torch.autograd.functional.jacobian(lambda w: functional_call(model, {"0.weight": w}, (x,)), layer.weight.detach())
    with backpack(extensions.DiagGGNExact()):
        lossfunc(out, torch.zeros_like(out)).backward()
    torch.testing.assert_close(layer.weight.diag_ggn_exact, 2 * jacobian.square().sum((0, 1)))
