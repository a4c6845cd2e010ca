"""Errors that nobody notices, collected from other libraries: here each of them is exact, or refused with a reason."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, nn
from torch.nn import AvgPool2d, BatchNorm1d, Conv2d, CrossEntropyLoss, Flatten, Linear, Module, MSELoss, Sequential, Tanh

from backpack import backpack, extend, leave_out, results
from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.kinds import LinearMapDerivatives
from backpack.core.derivatives.registry import register
from backpack.custom_module.permute import Permute
from backpack.custom_module.slicing import Slicing
from backpack.extensions import (
    GGNMP,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    SumGradSquared,
    Variance,
)
from backpack.utils.errors import BackpackError, NotRecordedError, OverwrittenError, UnattributedError, UnsupportedError

N = 3


def build(make: Callable[[], Module], shape: tuple[int, ...], loss: Callable[[], Module] = MSELoss) -> Problem:
    torch.manual_seed(0)
    problem = Problem(make().double(), torch.randn(N, *shape, dtype=torch.float64), [])
    out = problem.outputs()[0].detach()
    target = torch.randn_like(out) if loss is MSELoss else torch.randint(out.shape[1], (N, *out.shape[2:]))
    problem.terms.append(Term(loss(), target))
    return problem


def expected_by(oracle: Oracle) -> dict[str, dict[str, Tensor]]:
    """What first-order quantities and diagonals of the generalized Gauss-Newton are, by field and parameter."""
    diagonals = oracle.diag_ggn_batch(oracle.hessian_exact)
    return {
        "grad_batch": oracle.grad_batch,
        "batch_l2": oracle.batch_l2,
        "sum_grad_squared": oracle.sum_grad_squared,
        "variance": oracle.variance,
        "diag_ggn_exact_batch": diagonals,
        "diag_ggn_exact": sum_batch(diagonals),
    }


def check(make: Callable[[], Problem], meanwhile: Callable[[Problem], object] = lambda problem: None, hessian: bool = True) -> None:
    """Everything that has been wrong elsewhere equals the oracle, for every parameter; what happens after the forward pass changes nothing."""
    problem, oracle = make(), Oracle(make())
    for module in (problem.model, *problem.losses):
        extend(module)
    extensions = [BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), BatchDiagGGNExact(), DiagGGNExact()]
    with backpack(*extensions, *([BatchDiagHessian()] if hessian else [])):
        loss = problem.loss(problem.outputs())
        meanwhile(problem)
        loss.backward()
    expected = expected_by(oracle) | ({"diag_h_batch": oracle.diag_h_batch} if hessian else {})
    names = [name for name, _ in problem.model.named_parameters()]
    assert list(results(problem.model)) == names
    for field, values in expected.items():
        for name, param in problem.model.named_parameters():
            close(getattr(param, field), values[name])
    for name, param in problem.model.named_parameters():
        close(param.grad, oracle.grad_batch[name].sum(0))


# --- measured in the released library -----------------------------------------------------------------------------------------------------------


def shared_parameter() -> Module:
    model = Sequential(Linear(4, 4), Tanh(), Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def called_twice() -> Module:
    layer = Linear(4, 4)
    return Sequential(layer, Tanh(), layer)


class Positions(Module):
    """Embeds positions, whose numbers have a batch axis of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.embedding(torch.arange(x.shape[1])[None])))


class WithStates(Module):
    """A recurrent layer that is given its first states, which depend on the input."""

    def __init__(self, layer: Module, states: int) -> None:
        super().__init__()
        self.layer, self.start, self.states = layer, Linear(2, 3), states

    def forward(self, x: Tensor) -> Tensor:
        start = torch.tanh(self.start(x[:, 0]))[None]
        return self.layer(x, start if self.states == 1 else (start, 0.5 * start))[0]


class HalvedConvolution(nn.Conv1d):
    """Keeps ``forward``, but computes another map: the learning rate is equalized."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, 0.5 * weight, bias)


class PaddedConvolution(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.conv1d(nn.functional.pad(input, (2, 0), mode="replicate"), weight, bias)


class TripledNorm(nn.InstanceNorm1d):
    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        return 3 * super()._apply_instance_norm(input)


def patched_convolution() -> Module:
    layer = nn.Conv1d(2, 3, 3)
    layer._conv_forward = HalvedConvolution._conv_forward.__get__(HalvedConvolution(2, 3, 3))
    return layer


def on_sequence(layer: Module) -> Module:
    return Sequential(layer, Tanh(), nn.AdaptiveAvgPool1d(2), Flatten(), Linear(6, 2))


NETS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "two modules share a parameter": (shared_parameter, (4,)),
    "a module called twice": (called_twice, (4,)),
    "position numbers without a batch": (Positions, (4, 3)),
    "transposed between layers with as many features as positions": (lambda: Sequential(Linear(3, 3), Permute(0, 2, 1), Linear(3, 3)), (3, 3)),
    "grouped convolution": (lambda: Sequential(Conv2d(2, 4, 2, groups=2), Flatten()), (2, 3, 3)),
    "circular padding": (lambda: Sequential(Conv2d(2, 2, 3, padding=1, padding_mode="circular"), Flatten()), (2, 3, 3)),
    "padding by name": (lambda: Sequential(Conv2d(2, 2, (3, 1), padding="same"), Flatten()), (2, 3, 3)),
    "divisor of average pooling": (lambda: Sequential(Conv2d(1, 2, 2), AvgPool2d(2, divisor_override=3), Flatten(), Linear(2, 2)), (1, 3, 3)),
    "states of an LSTM": (lambda: WithStates(nn.LSTM(2, 3, batch_first=True), 2), (3, 2)),
    "state of an RNN": (lambda: WithStates(nn.RNN(2, 3, batch_first=True), 1), (3, 2)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), (3, 4)),
    "another convolution in a subclass": (lambda: on_sequence(HalvedConvolution(2, 3, 3)), (2, 40)),
    "another padding in a subclass": (lambda: on_sequence(PaddedConvolution(2, 3, 3)), (2, 6)),
    "another convolution in a module": (lambda: on_sequence(patched_convolution()), (2, 40)),
    "another normalization in a subclass": (lambda: on_sequence(Sequential(nn.Conv1d(2, 3, 2), TripledNorm(3, affine=True))), (2, 5)),
    "channels-last memory": (lambda: Sequential(Conv2d(2, 3, 2), Tanh(), Flatten()).to(memory_format=torch.channels_last), (2, 3, 3)),
}

WITHOUT_HESSIAN = ["another normalization in a subclass"]  # the second derivative of a normalization that has lost its rule is not known


@pytest.mark.parametrize("name", NETS)
def test_nets_that_were_wrong_in_silence_are_exact(name: str) -> None:
    check(lambda: build(*NETS[name]), hessian=name not in WITHOUT_HESSIAN)


def mlp() -> Module:
    return Sequential(Linear(4, 3), Tanh(), Linear(3, 3))


@pytest.mark.parametrize("index", [1, -100])
def test_ignored_targets(index: int) -> None:
    """Nine of twelve targets are ignored; -100 is what torch ignores unless told otherwise."""

    def problem() -> Problem:
        made = build(lambda: Sequential(Linear(4, 4 * 3), nn.Unflatten(1, (3, 4))), (4,), lambda: CrossEntropyLoss(ignore_index=index))
        made.terms[0].target = torch.full((N, 4), index)
        made.terms[0].target[0, 1], made.terms[0].target[1, 3], made.terms[0].target[1, 0] = 0, 2, 0
        return made

    check(problem)


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian, KFRA])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameter_with_other_data_after_the_forward_pass(extension: type, frozen: bool) -> None:
    """Autograd has kept what the rule would read: refused; where nothing is read, nothing changes."""
    found = []
    for layer in (None, 0, 2):
        problem = build(mlp, (4,))
        problem.model[2].weight.requires_grad_(not frozen)
        for module in (problem.model, *problem.losses):
            extend(module)
        loss = problem.loss(problem.outputs())
        if layer is not None:
            weight = problem.model[layer].weight
            weight.data = 2 * weight.data
        with backpack(extension()):
            if layer == 2:
                with pytest.raises(OverwrittenError, match=r"parameter of 2 after the forward pass"):
                    loss.backward()
                assert results(problem.model) == {}
            else:
                loss.backward()
                found.append(getattr(problem.model[0].bias, extension().savefield))
    for one, other in zip(*([value] if isinstance(value, Tensor) else value for value in found), strict=True):
        close(one, other)


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian, KFLR, KFRA])
@pytest.mark.parametrize("keeping", ["copies", "allow mutation"])
def test_parameter_changed_in_place_where_autograd_has_kept_a_copy(extension: type, keeping: str) -> None:
    """Autograd computes with the old numbers, and the rule would with the new ones: refused where it reads them."""
    if keeping == "copies":
        context = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy)
    else:
        context = torch.autograd.graph.allow_mutation_on_saved_tensors()
    found = []
    with context:
        for layer in (None, 0, 2):
            problem = build(mlp, (4,))
            for module in (problem.model, *problem.losses):
                extend(module)
            loss = problem.loss(problem.outputs())
            if layer is not None:
                with torch.no_grad():
                    problem.model[layer].weight.mul_(2)
            with backpack(extension()):
                if layer == 2:
                    with pytest.raises(OverwrittenError, match=r"parameter of 2 after the forward pass"):
                        loss.backward()
                    assert results(problem.model) == {}
                else:
                    loss.backward()
                    found.append(getattr(problem.model[0].bias, extension().savefield))
    for one, other in zip(*([value] if isinstance(value, Tensor) else value for value in found), strict=True):
        close(one, other)


class TrainedBatch(Module):
    """Its input is a parameter, whose per-sample gradient is carried through the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.batch, self.layer = nn.Parameter(torch.rand(N, 3)), Linear(3, 2)

    def forward(self) -> Tensor:
        return self.layer(self.batch)


def test_gradient_of_an_input_with_other_data_after_the_forward_pass() -> None:
    model = extend(TrainedBatch())
    loss = extend(CrossEntropyLoss())(model(), torch.zeros(N, dtype=torch.long))
    model.layer.weight.data = 2 * model.layer.weight.data
    with backpack(BatchGrad()), pytest.raises(OverwrittenError, match="parameter of layer after the forward pass"):
        loss.backward()
    assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())


def test_labels_that_are_changed_in_place() -> None:
    """The loss's Hessian is that of the labels that it was given."""
    model, y = extend(Linear(3, 2)), torch.ones(N, dtype=torch.long)
    loss = extend(CrossEntropyLoss())(model(torch.rand(N, 3)), y)
    y.zero_()
    with backpack(DiagGGNExact()), pytest.raises(OverwrittenError, match=r"input1 of module CrossEntropyLoss of shape.* in place"):
        loss.backward()
    assert results(model) == {}


def test_two_losses_on_one_output() -> None:
    def problem() -> Problem:
        made = build(mlp, (4,))
        made.terms.append(made.terms[0])
        return made

    check(problem)
    one, two = (Oracle(make()) for make in (lambda: build(mlp, (4,)), problem))
    for name, diagonal in two.diag_ggn_batch(two.hessian_exact).items():
        close(diagonal, 2 * one.diag_ggn_batch(one.hessian_exact)[name])


@pytest.mark.parametrize("loss", [MSELoss, CrossEntropyLoss])
def test_scaled_loss(loss: type[Module]) -> None:
    def problem() -> Problem:
        made = build(mlp, (4,), loss)
        made.terms[0].scale = 2.0
        return made

    check(problem)


def test_weight_decay() -> None:
    """A penalty on parameters belongs to no sample: refused, with the way to leave it out; then ``.grad`` has it, the quantities have not."""
    problem, oracle = build(mlp, (4,)), Oracle(build(mlp, (4,)))
    extend(problem.model)
    extend(problem.losses[0])

    def penalty() -> Tensor:
        return 0.1 * sum(p.square().sum() for p in problem.model.parameters())

    with backpack(BatchGrad()), pytest.raises(NotImplementedError, match=r"leave_out.*unattributed"):
        (problem.loss(problem.outputs()) + penalty()).backward()
    assert results(problem.model) == {}
    problem.model.zero_grad()
    with backpack(BatchGrad(), DiagGGNExact()):
        (problem.loss(problem.outputs()) + leave_out(penalty())).backward()
    for name, param in problem.model.named_parameters():
        close(param.grad_batch, oracle.grad_batch[name])
        close(param.grad, oracle.grad_batch[name].sum(0) + 0.2 * param.detach())
        close(param.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[name].sum(0))


def test_forward_passes_without_backward() -> None:
    """Fifty of them leave nothing behind, without any help of the garbage collector."""
    model, lossfunc = extend(mlp()), extend(CrossEntropyLoss())
    x, y = torch.randn(N, 4), torch.randint(3, (N,))
    lossfunc(model(x), y)
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(obj), Tensor) for obj in gc.get_objects())
        for _ in range(50):
            lossfunc(model(x), y)
        assert sum(issubclass(type(obj), Tensor) for obj in gc.get_objects()) == before
    finally:
        gc.enable()
    assert not any("output" in vars(module) or "input0" in vars(module) for module in model.modules())


# --- options of a module that are others in its next call, or after it -----------------------------------------------------------------------------


class Calls(Module):
    """A module is called several times, each time with other options, and is left with those of the last call."""

    def __init__(self, module: Module, *options: dict[str, object], before: Module | None = None) -> None:
        super().__init__()
        self.module, self.options, self.before = module, options, nn.Identity() if before is None else before

    def forward(self, x: Tensor) -> Tensor:
        x, outputs = self.before(x), []
        for options in self.options:
            for name, value in options.items():
                setattr(self.module, name, value)
            outputs.append(torch.tanh(self.module(x)).flatten(1))
        return torch.cat(outputs, 1)


def statistics(mean: float, variance: float) -> dict[str, Tensor]:
    mean, variance = torch.tensor([mean, 2 * mean, 0.5]), torch.tensor([variance, 1.0, 2 * variance])
    return {"running_mean": mean.double(), "running_var": variance.double()}


class Mask(Module):
    """Multiplies by a tensor that is neither a parameter nor a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class MaskDerivatives(LinearMapDerivatives):
    """The rule reads it."""

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return mat * module.mask


register(Mask, MaskDerivatives)


CALLS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "dilation": (lambda: Calls(nn.Conv1d(2, 3, 3), *({"dilation": (d,), "padding": (d,)} for d in (1, 2, 3))), (2, 5)),
    "stride": (lambda: Calls(nn.ConvTranspose1d(2, 2, 2), *({"stride": (d,)} for d in (1, 2))), (2, 3)),
    "padding mode": (lambda: Calls(nn.Conv1d(2, 3, 3, 1, 1), *({"padding_mode": m} for m in ("circular", "reflect", "zeros"))), (2, 5)),
    "slope": (lambda: Calls(nn.LeakyReLU(), *({"negative_slope": s} for s in (0.1, 0.9)), before=Linear(4, 3)), (4,)),
    "beta": (lambda: Calls(nn.Softplus(), *({"beta": s} for s in (0.5, 2.0)), before=Linear(4, 3)), (4,)),
    "pyramid": (lambda: Calls(AvgPool2d(1), *({"kernel_size": k, "stride": k} for k in (1, 2, [3, 2])), before=Conv2d(1, 2, 2)), (1, 4, 4)),
    "epsilon": (lambda: Calls(nn.LayerNorm(3), *({"eps": e} for e in (0.1, 1.0)), before=Linear(4, 3)), (4,)),
    "groups": (lambda: Calls(nn.GroupNorm(2, 4), *({"num_groups": g} for g in (1, 2)), before=Linear(3, 4)), (3,)),
    "domains": (lambda: Calls(BatchNorm1d(3).eval(), statistics(0.3, 2.0), statistics(-1.0, 0.5), before=Linear(4, 3)), (4,)),
    "masks": (lambda: Calls(Mask(), *({"mask": torch.tensor([m, 1.0, 0.0]).double()} for m in (0.3, 2.0)), before=Linear(4, 3)), (4,)),
    "softmax": (lambda: Calls(nn.Softmax(1), *({"dim": d} for d in (2, 1)), before=Conv2d(1, 2, 2)), (1, 3, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_of_a_module_has_its_own_options(name: str) -> None:
    check(lambda: build(*CALLS[name]))


def test_weight_that_is_another_tensor_in_each_call() -> None:
    """Each call of a frozen layer under the older form of spectral normalization goes on with its power iteration."""
    torch.manual_seed(0)
    layer = nn.utils.spectral_norm(Linear(3, 3)).requires_grad_(False)
    model, lossfunc = extend(Calls(layer, {}, {}, before=Linear(4, 3)).double()), extend(MSELoss(reduction="sum"))
    out, weight = model(torch.randn(N, 4, dtype=torch.float64)), model.before.weight
    expected = sum(2 * torch.autograd.grad(entry, weight, retain_graph=True)[0] ** 2 for entry in out.flatten())
    with backpack(DiagGGNExact()):
        lossfunc(out, torch.zeros_like(out)).backward()
    close(weight.diag_ggn_exact, expected)


def change(number: int, **options: object) -> Callable[[Problem], None]:
    return lambda problem: [setattr(problem.model[number], name, value) for name, value in options.items()]


def between(module: Callable[[], Module]) -> Callable[[], Problem]:
    return lambda: build(lambda: Sequential(Linear(4, 3), module(), Linear(3, 2)), (4,))


class Default(nn.LeakyReLU):
    """Its slope is an attribute of the class, until one is set."""

    negative_slope = 0.1

    def __init__(self) -> None:
        super().__init__()
        del self.negative_slope


class Shifted(Module):
    """Without a rule: where a rule is needed, it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.power = nn.Parameter(torch.rand(3)), 2

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift) ** self.power


CHANGES: dict[str, tuple[Callable[[], Problem], Callable[[Problem], object]]] = {
    "slope": (between(lambda: nn.LeakyReLU(0.1)), change(1, negative_slope=0.9)),
    "epsilon": (between(lambda: nn.LayerNorm(3)), change(1, eps=1.0)),
    "statistics": (between(lambda: BatchNorm1d(3).eval()), change(1, **statistics(1.0, 2.0))),
    "no statistics": (between(lambda: BatchNorm1d(3).eval()), change(1, running_mean=None, running_var=None)),
    "a default": (between(Default), change(1, negative_slope=0.9)),
    "a list": (
        lambda: build(lambda: Sequential(Conv2d(1, 2, 2), AvgPool2d([2, 2], 1, [1, 0])), (1, 4, 4)),
        lambda problem: problem.model[1].padding.reverse(),
    ),
    "dilation of many positions": (
        lambda: build(lambda: Sequential(nn.Conv1d(2, 3, 3, padding=2, dilation=2), Tanh(), Flatten()), (2, 40)),
        change(0, dilation=(1,), padding=(1,)),
    ),
    "windows": (lambda: build(lambda: Sequential(Conv2d(1, 2, 2), AvgPool2d(3, 1)), (1, 4, 4)), change(1, padding=1)),
    "mode": (lambda: build(lambda: Sequential(Conv2d(1, 2, 2), nn.Upsample((3, 3))), (1, 3, 3)), change(1, mode="bilinear")),
    "reduction": (
        lambda: build(mlp, (4,), lambda: CrossEntropyLoss(reduction="sum")),
        lambda problem: vars(problem.losses[0]).update(reduction="mean"),
    ),
    "weights": (lambda: build(mlp, (4,), CrossEntropyLoss), lambda problem: setattr(problem.losses[0], "weight", torch.tensor([5, 1, 0.1]).double())),
    "smoothing": (
        lambda: build(mlp, (4,), lambda: CrossEntropyLoss(torch.tensor([5, 1, 0.1]).double(), label_smoothing=0.1)),
        lambda problem: vars(problem.losses[0]).update(label_smoothing=0.5),
    ),
    "no weights": (
        lambda: build(mlp, (4,), lambda: CrossEntropyLoss(torch.tensor([5, 1, 0.1]).double())),
        lambda problem: setattr(problem.losses[0], "weight", None),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_that_change_after_the_forward_pass(name: str) -> None:
    check(*CHANGES[name])


def test_padding_index_that_changes_after_the_forward_pass() -> None:
    table, head = extend(nn.Embedding(4, 2, padding_idx=1)).double(), extend(Linear(2, 2)).double()
    x = torch.tensor([[0, 1, 2], [1, 1, 3]])
    loss = extend(MSELoss())(head(torch.tanh(table(x))), torch.zeros(2, 3, 2, dtype=torch.float64))
    table.padding_idx = 2
    with backpack(BatchGrad()):
        loss.backward()
    close(table.weight.grad_batch.sum(0), table.weight.grad)
    assert table.weight.grad[2].any()
    assert not table.weight.grad[1].any()


LOSSES: dict[str, tuple[Module, list[dict[str, object]]]] = {
    "weight": (CrossEntropyLoss(), [{"weight": torch.tensor(w).double()} for w in ([1.0, 2.0, 3.0], [5.0, 1.0, 0.1])]),
    "reduction": (CrossEntropyLoss(), [{"reduction": r} for r in ("none", "sum", "mean")]),
    "ignored": (CrossEntropyLoss(), [{"ignore_index": i} for i in (0, 1)]),
    "delta": (nn.HuberLoss(), [{"delta": d} for d in (0.1, 10.0)]),
    "positive weights": (nn.BCEWithLogitsLoss(), [{"pos_weight": torch.tensor(w).double()} for w in ([1.0, 2.0, 3.0], [5.0, 1.0, 0.1])]),
    "margin": (nn.SoftMarginLoss(), [{"reduction": r} for r in ("sum", "mean")]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_call_of_a_loss_has_its_own_options(name: str) -> None:
    """The curvature of the sum, as autograd has it, is that of each call as it was; here also with the options of before set again afterwards."""
    torch.manual_seed(0)
    loss, options = LOSSES[name]
    model, x = extend(Linear(4, 3).double()), torch.randn(5, 4, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 1, 0]) if isinstance(loss, CrossEntropyLoss) else torch.rand(5, 3, dtype=torch.float64)

    def total(out: Tensor, restore: bool) -> Tensor:
        value = 0.0
        for some in options:
            before = {name: getattr(loss, name) for name in some}
            for key, option in some.items():
                setattr(loss, key, option)
            value = value + (loss(out, y) * torch.arange(1.0, 6.0).double() if loss.reduction == "none" else loss(out, y)).sum()
            for key, option in before.items() if restore else ():
                setattr(loss, key, option)
        return value

    out = model(x).detach()
    expected = torch.autograd.functional.hessian(lambda z: total(z, False), out).diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum(0)
    extend(loss)
    for restore in (False, True):
        for extension in (DiagGGNExact(), DiagHessian()):
            with backpack(extension):
                total(model(x), restore).backward()
            close(getattr(model.bias, extension.savefield), expected)


def test_product_that_is_taken_after_options_have_changed() -> None:
    def make() -> Problem:
        return build(lambda: Sequential(Linear(4, 3), nn.LeakyReLU(0.1), BatchNorm1d(3).eval(), Shifted()), (4,))

    problem, oracle = make(), Oracle(make())
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(GGNMP()):
        problem.loss(problem.outputs()).backward()
    change(1, negative_slope=0.9)(problem)
    change(2, eps=1.0, **statistics(1.0, 2.0))(problem)
    change(3, power=3)(problem)
    bias = problem.model[0].bias
    close(bias.ggnmp(torch.eye(3).double()).detach(), oracle.ggn_blocks(oracle.hessian_exact)["0.bias"])


def test_buffers_of_a_functional_call() -> None:
    """They are in the module as long as the call takes."""
    torch.manual_seed(0)
    problem, mine = between(lambda: BatchNorm1d(3).eval())(), statistics(0.3, 2.0)
    expected = between(lambda: BatchNorm1d(3).eval())()
    change(1, **mine)(expected)
    oracle, model = Oracle(expected), extend(problem.model)
    out = torch.func.functional_call(model, {f"1.{name}": value for name, value in mine.items()}, (problem.x,))
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(problem.losses[0])(out, problem.terms[0].target).backward()
    for name, param in model.named_parameters():
        close(param.grad_batch, oracle.grad_batch[name])
        close(param.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[name].sum(0))


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_buffer_that_is_overwritten_after_the_forward_pass(name: str) -> None:
    problem = between(lambda: BatchNorm1d(3).eval())()
    for module in (problem.model, *problem.losses):
        extend(module)
    loss = problem.loss(problem.outputs())
    getattr(problem.model[1], name).add_(1)
    with backpack(BatchGrad()), pytest.raises(OverwrittenError, match=rf"{name} of 1 was changed in place.*BatchNorm1d"):
        loss.backward()
    assert results(problem.model) == {}


@pytest.mark.parametrize("zero", [False, True])
def test_statistics_that_torch_overwrites_uncounted(zero: bool) -> None:
    """A forward pass in training mode between the passes: torch's own gradient is wrong then."""
    problem = between(lambda: BatchNorm1d(3).eval())()
    for module in (problem.model, *problem.losses):
        extend(module)
    loss = problem.loss(problem.outputs())
    problem.model[1].train()(torch.randn(5, 3, dtype=torch.float64))
    if zero:
        problem.model[1].num_batches_tracked.zero_()
    with backpack(BatchGrad()), pytest.raises(OverwrittenError, match=r"num_batches_tracked of 1 was changed in place.*overwrites running_mean"):
        loss.backward()


def test_counter_that_is_set_to_zero() -> None:
    """No rule reads how many mini-batches the running statistics are made of."""
    problem = between(lambda: BatchNorm1d(3).eval())()
    for module in (problem.model, *problem.losses):
        extend(module)
    problem.model[1].num_batches_tracked.add_(7)
    loss = problem.loss(problem.outputs())
    problem.model[1].num_batches_tracked.zero_()
    with backpack(BatchGrad()):
        loss.backward()
    close(problem.model[0].weight.grad_batch, Oracle(problem).grad_batch["0.weight"])


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian])
def test_results_of_earlier_passes_where_torch_refuses(extension: type) -> None:
    """A graph of which autograd has given the tensors back."""
    model = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 3)))
    X, y = torch.randn(5, 3), torch.arange(5) % 3
    dead = nn.functional.cross_entropy(model(X), y)
    dead.backward()
    with backpack(extension()):
        nn.functional.cross_entropy(model(X), y).backward()
        assert len(results(model)) == 4  # noqa: PLR2004
        with pytest.raises(RuntimeError):
            dead.backward()
    assert results(model) == {}


def replaced(model: Sequential) -> torch.Tensor:
    model[2] = Linear(4, 3)
    return model(torch.randn(5, 3)).square().sum()


def penalized(model: Sequential) -> torch.Tensor:
    hidden = model[0](torch.randn(5, 3))
    return model[2](hidden).square().sum() + leave_out(hidden.norm())


@pytest.mark.parametrize(("use", "error"), [(replaced, NotRecordedError), (penalized, UnsupportedError)])
def test_results_of_earlier_passes_where_nothing_is_planned(use: Callable[[Sequential], torch.Tensor], error: type[Exception]) -> None:
    """A pass that is refused as soon as its graph has been seen."""
    model = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 3)))
    with backpack(BatchGrad()):
        model(torch.randn(5, 3)).square().sum().backward()
        loss = use(model)
        assert "grad_batch" in vars(model[0].weight)
        with pytest.raises(error):
            loss.backward()
    assert results(model) == {}


@pytest.mark.parametrize("lossfunc", [nn.functional.mse_loss, extend(MSELoss()), lambda out, y: (out - y).square().mean()])
def test_penalty_in_a_loss_whose_gradient_is_returned(lossfunc: Callable) -> None:
    """Refused as by ``backward``, whatever computes the loss."""
    model, x, y = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2))), torch.randn(5, 3), torch.randn(5, 2)
    with backpack(Variance()):
        lossfunc(model(x), y).backward()
        loss = lossfunc(model(x), y) + model[0].weight.norm()
        with pytest.raises(UnattributedError, match=r"0\.weight: used outside of everything that has samples"):
            torch.autograd.grad(loss, list(model.parameters()))
    assert results(model) == {}


def test_results_of_earlier_contexts_where_a_returned_gradient_has_none() -> None:
    """A row of the Jacobian is no gradient of a loss, so that there is no curvature; that of an earlier loss would look like its."""
    model, x, y = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2))), torch.randn(5, 3, requires_grad=True), torch.randn(5, 2)
    with backpack(DiagGGNExact()):
        nn.functional.mse_loss(model(x), y).backward()
        torch.autograd.grad(model(x)[0, 0], list(model.parameters()))
        assert len(results(model)) == 4  # noqa: PLR2004
    with backpack(DiagGGNExact()):
        torch.autograd.grad(model(x)[0, 0], x)
        assert len(results(model)) == 4  # noqa: PLR2004
        torch.autograd.grad(model(x)[0, 0], list(model.parameters()))
        assert results(model) == {}


def of_fourth_powers(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, y) + (out - y).pow(4).mean()


@pytest.mark.parametrize("lossfunc", [lambda out, y: (out - y).square().mean(), lambda out, _: out.logsumexp(1).sum(), of_fourth_powers])
def test_losses_of_ones_own_whose_gradient_is_returned(lossfunc: Callable) -> None:
    """What ``backward`` refuses is warned of, at the line that asks for it: it may be a step of an inner loop, which is to have no curvature."""
    model, x, y = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2))), torch.randn(5, 3), torch.randn(5, 2)
    named = list(model.parameters())
    with backpack(DiagGGNExact(), BatchGrad()):
        with pytest.warns(UserWarning, match="computed no quantities.*`with backpack\\(\\):`.*No loss is known.*0\\.weight") as seen:
            torch.autograd.grad(lossfunc(model(x), y), named)
        assert [warning.filename for warning in seen] == [__file__]
        assert results(model) == {}
        with backpack():
            torch.autograd.grad(lossfunc(model(x), y), named)
        torch.autograd.grad(lossfunc(model(x), y), named, create_graph=True)  # part of something else
        torch.autograd.grad(2 * model(x)[:, 0].sum() + named[0].square().sum(), named)  # no function of the output but a linear one
    with backpack(BatchGrad()):
        torch.autograd.grad(lossfunc(model(x), y), named)
    assert len(results(model)) == len(named)


LISTS: dict[str, Callable[[int], Any]] = {
    "a tensor": lambda k: (slice(None), torch.arange(3) + k),
    "an array": lambda k: (slice(None), np.arange(3) + k),
    "a list": lambda k: (slice(None), [k, k + 1, k + 2]),
    "a long list": lambda k: (slice(None), [(i + k) % 5 for i in range(60)]),
    "a slice": lambda k: (slice(None), slice(k, k + 3)),
}


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("what", LISTS)
def test_indices_that_change_between_calls(what: str, twice: bool) -> None:
    """Another attribute in the next call, or by the time of the backward pass."""

    class Twice(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.index, self.tanh = Linear(3, 5), Slicing(LISTS[what](0)), Tanh()

        def forward(self, x: Tensor) -> Tensor:
            h = self.tanh(self.layer(x))
            self.index.slice_info = LISTS[what](0)
            first = self.index(h)
            self.index.slice_info = LISTS[what](2)
            return self.index(h) * (1 + first.detach()) + first if twice else first

    problem, oracle = build(Twice, (3,)), Oracle(build(Twice, (3,)))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(BatchGrad(), DiagGGNExact()):
        problem.loss(problem.outputs()).backward()
    for name, param in problem.model.named_parameters():
        close(param.grad_batch, oracle.grad_batch[name])
        close(param.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[name].sum(0))


def test_containers_that_hold_themselves() -> None:
    """Are no options."""
    model = extend(Sequential(Linear(3, 4), Tanh()))
    model[1].tree, model[1].chain = {}, []
    model[1].tree["parent"] = model[1].tree
    model[1].chain.append(model[1].chain)
    with backpack(BatchGrad()):
        model(torch.randn(2, 3)).sum().backward()
    assert model[0].weight.grad_batch.shape == (2, 4, 3)


@pytest.mark.parametrize("change", [lambda cfg, b: cfg.update(power=b), lambda cfg, b: {"power": b}])
def test_dictionaries_that_change_between_calls(change: Callable[[dict, int], dict | None]) -> None:
    class Power(Module):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = {"power": 2}

        def forward(self, x: Tensor) -> Tensor:
            return x ** self.cfg["power"]

    class PowerDerivatives(ElementwiseDerivatives):
        keeps = frozenset({"input"})

        def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
            return module.cfg["power"] * module.input0 ** (module.cfg["power"] - 1)

    register(Power, PowerDerivatives)
    model = Sequential(Linear(3, 4), Power(), Linear(4, 3)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 3
    named = dict(model.named_parameters())
    losses = nn.functional.cross_entropy(model(x), y, reduction="none") / 5
    expected = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    extend(model)
    loss = nn.functional.cross_entropy(model(x), y)
    model[1].cfg = change(model[1].cfg, 3) or model[1].cfg
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    found = model[0].bias.diag_ggn_exact
    for parameter, *rows in zip(named.values(), *expected, strict=True):
        torch.testing.assert_close(parameter.grad_batch, torch.stack(rows))
    model[1].cfg = {"power": 2}
    with backpack(DiagGGNExact()):
        nn.functional.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(found, model[0].bias.diag_ggn_exact)


class Remembers(Module):
    """Keeps its last output as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.last = 2 * x
        return self.last


def test_buffers_with_a_graph() -> None:
    """A call that held the output would hold itself, and nobody would collect the two."""
    register(Remembers, LinearMapDerivatives)
    model, lossfunc, x = extend(Sequential(Linear(4, 3), Remembers())), extend(MSELoss()), torch.randn(N, 4)

    def step() -> None:
        lossfunc(model(x), torch.zeros(N, 3))

    step()
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(obj), Tensor) for obj in gc.get_objects())
        for _ in range(50):
            step()
        assert sum(issubclass(type(obj), Tensor) for obj in gc.get_objects()) == before
    finally:
        gc.enable()


def test_the_hook_gets_the_module_itself() -> None:
    problem, seen = between(lambda: nn.LeakyReLU(0.1))(), []
    for module in (problem.model, *problem.losses):
        extend(module)
    loss = problem.loss(problem.outputs())
    change(1, negative_slope=0.9)(problem)
    change(2, training=False)(problem)
    with backpack(BatchGrad(), extension_hook=seen.append):
        loss.backward()
    assert any(module is problem.model[2] for module in seen)
    assert problem.model[1].negative_slope == 0.9


# --- noted in its interface -------------------------------------------------------------------------------------------------------------------


def test_residual_of_the_positive_curvature_hessian_enters_once() -> None:
    """With one weight behind a curved activation, the product is known by hand."""
    model, lossfunc = extend(Sequential(Linear(1, 1, bias=False), Tanh()).double()), extend(MSELoss(reduction="sum"))
    x, y = torch.tensor([[0.7]], dtype=torch.float64), torch.tensor([[1.5]], dtype=torch.float64)
    with backpack(PCHMP(modify="abs")):
        lossfunc(model(x), y).backward()
    t = torch.tanh(model[0].weight.detach() * x)
    slope, curvature, grad = 1 - t**2, -2 * t * (1 - t**2), 2 * (t - y)
    expected = (2 * slope**2 + (grad * curvature).abs()) * x**2
    close(model[0].weight.pchmp(torch.ones(1, 1, dtype=torch.float64)).detach(), expected)


def test_child_called_output() -> None:
    class Named(Module):
        def __init__(self) -> None:
            super().__init__()
            self.input0, self.output = Linear(4, 3), Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(torch.tanh(self.input0(x)))

    check(lambda: build(Named, (4,)))


def test_failed_pass_leaves_nothing_for_the_next() -> None:
    """The same extension is used again after an exception in the middle."""
    problem, ext = build(mlp, (4,)), DiagGGNExact()
    extend(problem.model)
    extend(problem.losses[0])
    out = problem.outputs()[0]
    loss = problem.loss([out])
    handle = problem.model[0].weight.register_hook(lambda _: 1 / 0)
    with backpack(ext), pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    assert results(problem.model) == {}
    with backpack(ext):
        problem.loss(problem.outputs()).backward()
    oracle = Oracle(build(mlp, (4,)))
    for name, param in problem.model.named_parameters():
        close(param.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[name].sum(0))


def test_refused_pass_leaves_nothing_of_those_before() -> None:
    """Its parameters carry nothing that could be taken for its results; others keep theirs, and so do contexts that accumulate."""
    model, other, lossfunc = extend(Sequential(Linear(2, 4), Tanh(), Linear(4, 1)).double()), extend(Linear(2, 3).double()), extend(MSELoss())
    x, y = torch.randn(N, 2, dtype=torch.float64, requires_grad=True), torch.randn(N, 3, dtype=torch.float64)
    with backpack(BatchGrad()):
        lossfunc(other(x), y).backward()
        lossfunc(model(x), y[:, :1]).backward()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), model[0].bias, create_graph=True)
        assert "0.weight" in results(model)
        with pytest.raises(UnsupportedError, match="derivatives of derivatives"):
            (lossfunc(out, y[:, :1]) + slope.square().sum()).backward()
    assert results(model) == {}
    assert set(results(other)) == {"weight", "bias"}
    with backpack(BatchGrad(), accumulate=True):
        lossfunc(other(x), y).backward()
        before = other.weight.grad_batch
        with pytest.raises(BackpackError, match="influence"):
            lossfunc(other(x) - other(x).mean(0), y).backward()
        with backpack(BatchGrad()), pytest.raises(BackpackError, match="influence"):
            lossfunc(other(x) - other(x).mean(0), y).backward()
    assert other.weight.grad_batch is before


def test_target_with_gradient() -> None:
    """Its curvature is not that of the prediction: per-sample gradients are exact, second-order quantities refused."""
    model, lossfunc = extend(mlp().double()), extend(MSELoss())
    x = torch.randn(N, 4, dtype=torch.float64)

    def loss() -> Tensor:
        out = model(x)
        return lossfunc(out, 0.5 * out + 1)

    with backpack(BatchGrad()):
        loss().backward()
    for param in model.parameters():
        close(param.grad_batch.sum(0), param.grad)
    with backpack(DiagGGNExact()), pytest.raises(ValueError, match="target"):
        loss().backward()


def test_mini_batch_statistics() -> None:
    """Samples that influence one another have no per-sample gradients."""
    model, lossfunc = extend(Sequential(Linear(4, 3), BatchNorm1d(3), Linear(3, 2))), extend(MSELoss())
    x, y = torch.randn(N, 4), torch.randn(N, 2)
    for ext in (BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact(), DiagHessian()):
        with backpack(ext), pytest.raises(NotImplementedError, match="mixed-samples"):
            lossfunc(model(x), y).backward()
    assert results(model) == {}


OPTIONS: dict[str, Callable[[float], Any]] = {
    "array": lambda k: np.full(2, k),
    "tuple": lambda k: (torch.full((2,), k),),
    "list": lambda k: [0, [np.full(2, k)]],
    "dictionary": lambda k: {"k": (torch.full((2,), k), "name")},
}


def only_array(value: Any) -> Any:
    while isinstance(value, (dict, list, tuple)):
        value = [*value.values()][0] if isinstance(value, dict) else next(v for v in reversed(value) if not isinstance(v, str))
    return value


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_that_are_changed_in_place_between_calls(kind: str) -> None:
    """Each call has those that it had, also where arrays and tensors lie in containers."""

    class Frequency(Module):
        def __init__(self) -> None:
            super().__init__()
            self.option = OPTIONS[kind](2.0)

        def forward(self, x: Tensor) -> Tensor:
            return (x * float(only_array(self.option)[1])).sin()

    class FrequencyDerivatives(ElementwiseDerivatives):
        keeps = frozenset({"input"})

        def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
            k, at = float(only_array(module.option)[1]), module.input0 if subsampling is None else module.input0[subsampling]
            return k * (k * at).cos()

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wave = Linear(3, 4), Frequency()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for k in (2.0, 0.5, 3.0):
                only_array(self.wave.option)[1] = k
                h = self.wave(h)
            return h

    model, x, y, found = extend(Model().double()), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 4, []
    for rule in (False, True):
        if rule:
            register(Frequency, FrequencyDerivatives)
        for _ in range(2):
            with backpack(DiagGGNExact()):
                extend(CrossEntropyLoss())(model(x), y).backward()
            found.append(model.first.weight.diag_ggn_exact)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@pytest.mark.parametrize("function", [torch.sin, torch.exp, lambda x: x**3, lambda x: x * x.tanh()], ids=["sin", "exp", "cube", "gate"])
def test_element_wise_rule_that_does_not_apply(function: Callable[[Tensor], Tensor]) -> None:
    """The graph takes its place, second derivative included; it is not taken for a random mask."""

    class Wave(Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    class WaveDerivatives(ElementwiseDerivatives):
        def applies(self, module: Module) -> bool:
            return False

        def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
            raise NotImplementedError

    register(Wave, WaveDerivatives)
    check(lambda: build(lambda: Sequential(Linear(4, 5), Wave(), Linear(5, 3)), (4,)))


def test_rule_is_not_inherited_where_a_class_attribute_that_is_called_differs() -> None:
    """A function of torch's is no method, and may be what a subclass replaces."""

    class Function(Module):
        function = torch.sin

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    class FunctionDerivatives(ElementwiseDerivatives):
        keeps = frozenset({"input"})

        def df(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
            return (module.input0 if subsampling is None else module.input0[subsampling]).cos()

        def d2f(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
            return -module.input0.sin()

        def hessian_is_zero(self, module: Module) -> bool:
            return False

    register(Function, FunctionDerivatives)
    for function in (torch.sin, torch.exp):
        kind = type("Sub", (Function,), {} if function is torch.sin else {"function": function})
        check(lambda kind=kind: build(lambda: Sequential(Linear(4, 5), kind(), Linear(5, 3)), (4,)))


@pytest.mark.parametrize("width", [3, 4])
def test_without_batch_axis(width: int) -> None:
    """A layer that is given one sample without a batch axis has no samples, though the loss counts the features of its output as such."""
    for layer, x in ((Linear(3, width), torch.randn(3)), (nn.Conv1d(3, width, 2), torch.randn(3, 5)), (nn.Embedding(5, width), torch.tensor(2))):
        for lossfunc in (MSELoss(), extend(MSELoss())):
            model = extend(Sequential(layer))
            with backpack(BatchGrad()), pytest.raises(NotImplementedError, match="without a batch axis"):
                out = model(x)
                lossfunc(out, torch.zeros_like(out)).backward()
            assert results(model) == {}


def test_double_precision_of_averaged_factors() -> None:
    model, lossfunc = extend(Sequential(Linear(4, 3), Tanh(), Linear(3, 2)).double()), extend(MSELoss())
    with backpack(KFRA()):
        lossfunc(model(torch.randn(N, 4, dtype=torch.float64)), torch.randn(N, 2, dtype=torch.float64)).backward()
    assert {factor.dtype for param in model.parameters() for factor in param.kfra} == {torch.float64}


def test_exact_zeros_under_dropout() -> None:
    """A zero in the output may be an entry that was dropped, or one whose input was zero: the slope is the mask in both cases."""

    def problem() -> Problem:
        made = build(lambda: Sequential(Linear(4, 5), nn.ReLU(), nn.Dropout(0.4), Linear(5, 3)), (4,))
        made.model.train()
        return made

    check(problem)


def test_tracked_weight_that_was_computed_in_place_from_the_bias() -> None:
    """It is no parameter any more, so that the rule of the layer, which knows of one use of the bias, does not hold."""
    torch.manual_seed(0)
    model, x, y = extend(nn.Linear(3, 3).double()), torch.rand(4, 3, dtype=torch.float64), torch.randint(3, (4,))
    bias = model.bias.detach().clone()
    model(x)
    model.weight.requires_grad_(False).copy_(model.bias[:, None] * model.bias)
    with backpack(BatchGrad(), DiagGGNExact()):
        extend(CrossEntropyLoss())(model(x), y).backward()

    def output(b: Tensor) -> Tensor:
        return x @ (b[:, None] * b).T + b

    jacobian = torch.autograd.functional.jacobian(output, bias)
    slope = torch.autograd.functional.jacobian(lambda z: nn.functional.cross_entropy(z, y), output(bias))
    torch.testing.assert_close(model.bias.grad_batch, torch.einsum("nzb,nz->nb", jacobian, slope))
    hessian = torch.autograd.functional.hessian(lambda z: nn.functional.cross_entropy(z, y), output(bias))
    torch.testing.assert_close(model.bias.diag_ggn_exact, torch.einsum("nzb,nzny,nyb->b", jacobian, hessian, jacobian))
