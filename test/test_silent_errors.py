"""Errors that nobody notices, collected from other libraries: here each of them is exact, or refused with a reason."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, nn
from torch.nn import AvgPool2d, BatchNorm1d, Conv2d, CrossEntropyLoss, Flatten, Linear, Module, MSELoss, Sequential, Tanh

from backpack import backpack, extend, leave_out, results
from backpack.custom_module.permute import Permute
from backpack.extensions import KFRA, PCHMP, BatchDiagGGNExact, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, SumGradSquared, Variance
from backpack.utils.errors import OverwrittenError

N = 3


def build(make: Callable[[], Module], shape: tuple[int, ...], loss: Callable[[], Module] = MSELoss) -> Problem:
    torch.manual_seed(0)
    problem = Problem(make().double(), torch.randn(N, *shape, dtype=torch.float64), [])
    out = problem.outputs()[0].detach()
    target = torch.randn_like(out) if loss is MSELoss else torch.randint(out.shape[1], (N, *out.shape[2:]))
    problem.terms.append(Term(loss(), target))
    return problem


def check(make: Callable[[], Problem]) -> None:
    """Everything that has been wrong elsewhere equals the oracle, for every parameter."""
    problem, oracle = make(), Oracle(make())
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), BatchDiagGGNExact(), DiagGGNExact()):
        problem.loss(problem.outputs()).backward()
    diagonals = oracle.diag_ggn_batch(oracle.hessian_exact)
    expected = {
        "grad_batch": oracle.grad_batch,
        "batch_l2": oracle.batch_l2,
        "sum_grad_squared": oracle.sum_grad_squared,
        "variance": oracle.variance,
        "diag_ggn_exact_batch": diagonals,
        "diag_ggn_exact": sum_batch(diagonals),
    }
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
    "channels-last memory": (lambda: Sequential(Conv2d(2, 3, 2), Tanh(), Flatten()).to(memory_format=torch.channels_last), (2, 3, 3)),
}


@pytest.mark.parametrize("name", NETS)
def test_nets_that_were_wrong_in_silence_are_exact(name: str) -> None:
    check(lambda: build(*NETS[name]))


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
