"""What must be refused on the way from the parameters to the root of the graph, and graphs too special for the table of cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CASES
from cases_nets import Net, layers, parameter
from oracle import Oracle, Problem, Term
from table import classify, default_dtype
from test_extensions import QUANTITIES, Expect, close, collect, run
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, Linear, Module, Sequential, Tanh
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from backpack import backpack, disable, extend
from backpack.extensions import BatchGrad, BatchL2Grad, DiagGGNExact
from backpack.utils.errors import UnattributedError

pytestmark = pytest.mark.filterwarnings("error")

FIRST_ORDER = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"]
SQUARE_ROOT = ["DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact", "SqrtGGNMC", "KFAC", "KFLR"]
SECOND_ORDER = [name for name in QUANTITIES if name not in FIRST_ORDER]
PER_SAMPLE = [*FIRST_ORDER, "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagHessian", "BatchDiagHessian"]
N = 3


def small(case: str = "CE, mean") -> Problem:
    return CASES[case].build(N)


def extend_all(problem: Problem) -> None:
    for module in (problem.model, *problem.losses):
        extend(module)


def assert_nothing_left(problem: Problem) -> None:
    """No results on the parameters, and a plain backward pass works and gives the plain gradient."""
    for param in problem.model.parameters():
        assert not vars(param)
        param.grad = None
    problem.loss(problem.outputs()).backward()
    for name, param in problem.model.named_parameters():
        assert torch.equal(param.grad, Oracle(small()).grad[name])


# --- between the root and the loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", ["BatchGrad", "Variance", "DiagGGNExact", "DiagHessian", "KFAC", "KFRA", "HMP"])
def test_regularizer_is_unattributed(extension: str) -> None:
    """A use of a parameter that belongs to no sample is refused by name, before anything is written."""
    problem = small()
    extend_all(problem)
    loss = problem.loss(problem.outputs()) + 0.1 * problem.model[2].bias.square().sum()
    with pytest.raises(UnattributedError, match=r"2\.bias"), backpack(QUANTITIES[extension].make()):
        loss.backward()
    assert_nothing_left(problem)


@pytest.mark.parametrize("extension", SECOND_ORDER)
@pytest.mark.parametrize(
    "curve", [torch.square, torch.exp, lambda loss: loss * loss.detach() + loss * loss, torch.sqrt], ids="square exp product sqrt".split()
)
def test_curved_function_of_the_loss(extension: str, curve: Callable[[Tensor], Tensor]) -> None:
    problem = small()
    extend_all(problem)
    loss = curve(problem.loss(problem.outputs()))
    with pytest.raises((NotImplementedError, ValueError)), backpack(QUANTITIES[extension].make()):
        loss.backward()
    assert_nothing_left(problem)


def test_curved_function_of_the_loss_in_first_order() -> None:
    """Per-sample gradients are those of the linearized loss."""
    problem, oracle = small(), Oracle(small())
    extend_all(problem)
    loss = problem.loss(problem.outputs())
    with backpack(BatchGrad()):
        loss.square().backward()
    for name, value in collect(problem, "grad_batch").items():
        close(value, 2 * loss.item() * oracle.grad_batch[name])


def negative() -> Problem:
    problem = small("Sigmoid")
    problem.terms[0].scale = -0.5
    return problem


@pytest.mark.parametrize("extension", SQUARE_ROOT)
def test_negative_loss_has_no_square_root(extension: str) -> None:
    problem = negative()
    with pytest.raises((NotImplementedError, ValueError)):
        run(problem, QUANTITIES[extension].make())
    assert not collect(problem, QUANTITIES[extension].field)


@pytest.mark.parametrize("extension", [*FIRST_ORDER, "DiagHessian", "BatchDiagHessian", "HMP"])
def test_negative_loss_elsewhere(extension: str) -> None:
    problem = negative()
    run(problem, QUANTITIES[extension].make())
    QUANTITIES[extension].check(Oracle(negative()), collect(problem, QUANTITIES[extension].field))


@pytest.mark.parametrize("extension", ["BatchGrad", "DiagGGNExact", "SqrtGGNExact", "DiagHessian", "KFLR", "KFRA", "HMP"])
@pytest.mark.parametrize("how", ["gradient", "mean of stack", "view", "sum", "division"])
def test_linear_function_of_the_loss(extension: str, how: str) -> None:
    """The root's gradient, means, sums, views and quotients between loss and root scale the quantities exactly."""
    problem, expected = small(), small()
    extend_all(problem)
    loss = problem.loss(problem.outputs())
    expected.terms[0].scale = {"gradient": 2.5, "mean of stack": 0.5, "view": 1.0, "sum": 2.0, "division": 0.25}[how]
    root = {
        "gradient": lambda: loss,
        "mean of stack": lambda: torch.stack([loss, torch.zeros_like(loss)]).mean(),
        "view": lambda: loss.view(1, 1).squeeze(),
        "sum": lambda: loss + loss,
        "division": lambda: (loss - 3) / 4,
    }[how]()
    with backpack(QUANTITIES[extension].make()):
        root.backward(torch.tensor(2.5).double() if how == "gradient" else None)
    QUANTITIES[extension].check(Oracle(expected), collect(problem, QUANTITIES[extension].field))


@pytest.mark.parametrize("extension", SECOND_ORDER)
@pytest.mark.parametrize("case", ["CE, mean", "MSE, 3-d, mean", "BCE, both weights, mean", "residual", "logreg"])
def test_loss_not_extended(extension: str, case: str) -> None:
    """A loss module that is not extended calls a function that is known by its graph."""
    quantity = QUANTITIES[extension]
    problem, truth = (CASES[case].build(max(quantity.batches)) for _ in range(2))
    extend(problem.model)
    try:
        with backpack(quantity.make()):
            problem.loss(problem.outputs()).backward()
    except quantity.refusal:
        assert quantity.expect(CASES[case].tags) is not Expect.EXACT
        assert not collect(problem, quantity.field)
        return
    quantity.check(Oracle(truth), collect(problem, quantity.field))


@pytest.mark.parametrize("extension", SECOND_ORDER)
def test_loss_by_hand(extension: str) -> None:
    """The error shows what to write, and what is known."""
    problem = small()
    extend_all(problem)
    loss = (problem.outputs()[0] - F.one_hot(problem.terms[0].target)).square().mean()
    with (
        pytest.raises(AssertionError, match=r"cross_entropy, mse_loss.*`lossfunc = extend\(.*`lossfunc\(model\(X\), y\)"),
        backpack(QUANTITIES[extension].make()),
    ):
        loss.backward()
    assert_nothing_left(problem)


@pytest.mark.parametrize("extension", SECOND_ORDER)
def test_second_loss_not_extended(extension: str) -> None:
    """A part of the loss that no extended module computes must not be dropped silently."""
    problem = small()
    extend_all(problem)
    (out,) = problem.outputs()
    with pytest.raises((AssertionError, NotImplementedError)), backpack(QUANTITIES[extension].make()):
        (problem.loss([out]) + out.square().mean()).backward()
    assert_nothing_left(problem)


@pytest.mark.parametrize("extension", FIRST_ORDER)
def test_any_loss_in_first_order(extension: str) -> None:
    problem = small()
    extend(problem.model)
    with backpack(QUANTITIES[extension].make()):
        F.cross_entropy(problem.outputs()[0], problem.terms[0].target).backward()
    QUANTITIES[extension].check(Oracle(small()), collect(problem, QUANTITIES[extension].field))


def test_single_output_without_loss() -> None:
    problem = small()
    extend(problem.model)
    with backpack(BatchGrad()):
        problem.outputs()[0][:, 1].sum().backward()
    jac = Oracle(small()).jac
    for name, value in collect(problem, "grad_batch").items():
        close(value.flatten(1), jac[name][:, 1])


def unreduced(case: str) -> Problem:
    problem = small(case)
    problem.terms[0].module.reduction = "none"
    return problem


@pytest.mark.parametrize("extension", SECOND_ORDER)
@pytest.mark.parametrize("case", ["CE, mean", "MSE, mean"])
def test_vector_valued_root_in_second_order(extension: str, case: str) -> None:
    problem = unreduced(case)
    extend_all(problem)
    loss = problem.terms[0].module(problem.outputs()[0], problem.terms[0].target)
    with pytest.raises(ValueError), backpack(QUANTITIES[extension].make()):
        loss.backward(torch.ones_like(loss))
    assert not collect(problem, QUANTITIES[extension].field)


@pytest.mark.parametrize("extension", FIRST_ORDER)
@pytest.mark.parametrize("case", ["CE, mean", "MSE, mean"])
def test_vector_valued_root_in_first_order(extension: str, case: str) -> None:
    problem, expected = unreduced(case), unreduced(case)
    extend_all(problem)
    loss = problem.terms[0].module(problem.outputs()[0], problem.terms[0].target)
    weights = torch.linspace(0.5, 2, loss.numel()).double().reshape(loss.shape)
    with backpack(QUANTITIES[extension].make()):
        loss.backward(weights)
    expected.terms[0].scale = weights
    QUANTITIES[extension].check(Oracle(expected), collect(problem, QUANTITIES[extension].field))


# --- recording --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", QUANTITIES)
@pytest.mark.parametrize("how", ["disable", "before extend"])
def test_forward_not_recorded(extension: str, how: str) -> None:
    problem = small()
    if how == "disable":
        extend_all(problem)
        with disable():
            loss = problem.loss(problem.outputs())
    else:
        loss = problem.loss(problem.outputs())
        extend_all(problem)
    with pytest.raises(AttributeError), backpack(QUANTITIES[extension].make()):
        loss.backward()
    assert_nothing_left(problem)


@pytest.mark.parametrize("extension", ["BatchGrad", "DiagGGNExact"])
def test_part_of_the_forward_not_recorded(extension: str) -> None:
    """One of two uses is missing in the record: the graph still has it, so the quantity is exact, or refused."""
    problem = small()
    extend_all(problem)
    (out,) = problem.outputs()
    with disable():
        (other,) = problem.outputs()
    try:
        with backpack(QUANTITIES[extension].make()):
            problem.loss([out + other]).backward()
    except NotImplementedError:
        assert_nothing_left(problem)
        return
    twice = small()
    twice.output = lambda model, x: model(x) + model(x)
    QUANTITIES[extension].check(Oracle(twice), collect(problem, QUANTITIES[extension].field))


@pytest.mark.parametrize("extension", QUANTITIES)
def test_forward_outside_the_context(extension: str) -> None:
    problem = small("Sigmoid")
    problem.x.requires_grad_()
    extend_all(problem)
    loss = problem.loss(problem.outputs())
    with backpack(QUANTITIES[extension].make()):
        loss.backward()
    oracle = Oracle(small("Sigmoid"))
    if N in QUANTITIES[extension].batches:
        QUANTITIES[extension].check(oracle, collect(problem, QUANTITIES[extension].field))
    expected = small("Sigmoid")
    (gradient,) = torch.autograd.grad(expected.loss([expected.model(expected.x.requires_grad_())]), expected.x)
    close(problem.x.grad, gradient)


@pytest.mark.parametrize("extension", ["BatchGrad", "DiagGGNExact", "DiagHessian", "KFRA", "HMP"])
@pytest.mark.parametrize("call", ["torch.autograd.backward", "torch.autograd.grad"])
def test_other_ways_to_run_backward(extension: str, call: str) -> None:
    problem = small()
    extend_all(problem)
    loss = problem.loss(problem.outputs())
    with backpack(QUANTITIES[extension].make()):
        torch.autograd.backward(loss) if call == "torch.autograd.backward" else torch.autograd.grad(loss, list(problem.model.parameters()))
    QUANTITIES[extension].check(Oracle(small()), collect(problem, QUANTITIES[extension].field))


def test_part_of_the_graph() -> None:
    """A parameter that the loss does not reach gets nothing."""
    problem = small()
    extend_all(problem)
    a, sigmoid, b = problem.model
    with backpack(BatchGrad(), DiagGGNExact()):
        problem.loss([b(sigmoid(a(problem.x)).detach())]).backward()
    oracle = Oracle(small())
    assert not any(vars(param) for param in a.parameters())
    close(b.weight.grad_batch, oracle.grad_batch["2.weight"])
    close(b.weight.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)["2.weight"].sum(0))


class Halt(Exception):
    """Raised on purpose."""


def halt(_: object) -> None:
    raise Halt


@pytest.mark.parametrize("extension", QUANTITIES)
def test_failing_extension_hook_leaves_nothing(extension: str) -> None:
    problem = small()
    extend_all(problem)
    with pytest.raises(Halt), backpack(QUANTITIES[extension].make(), extension_hook=halt):
        problem.loss(problem.outputs()).backward()
    assert_nothing_left(problem)


@pytest.mark.parametrize("extension", QUANTITIES)
def test_failing_tensor_hook_leaves_nothing(extension: str) -> None:
    problem = small()
    extend_all(problem)
    handle = problem.model[0].bias.register_hook(halt)
    with pytest.raises(Halt), backpack(QUANTITIES[extension].make()):
        problem.loss(problem.outputs()).backward()
    handle.remove()
    assert_nothing_left(problem)


# --- samples ----------------------------------------------------------------------------------------------------------------------------------


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "centered": lambda h: h - h.mean(0),
    "normalized": lambda h: (h - h.mean(0)) / (h.var(0) + 0.1),
    "cumulated": lambda h: h.cumsum(0),
    "softmax": lambda h: h.softmax(0),
    "attention over samples": lambda h: (h @ h.T).softmax(1) @ h,
    "neighbour": lambda h: h + h.roll(1, 0),
    "maximum": lambda h: h - h.amax(0, keepdim=True),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
}


@pytest.mark.parametrize("extension", PER_SAMPLE)
@pytest.mark.parametrize("place", ["inside", "at the end"])
@pytest.mark.parametrize("mixing", MIXING)
def test_mixed_samples(extension: str, mixing: str, place: str) -> None:
    """Where samples influence one another there are no per-sample quantities upstream."""
    mix = MIXING[mixing]
    forward = (lambda net, x: net.b(mix(net.tanh(net.a(x))))) if place == "inside" else (lambda net, x: mix(net.b(net.tanh(net.a(x)))))
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        problem = classify(Net(forward, **layers(3, 3, 4, tanh=Tanh)()), torch.randn(N, 3))
    with pytest.raises(NotImplementedError):
        run(problem, QUANTITIES[extension].make())
    assert not collect(problem, QUANTITIES[extension].field)


@pytest.mark.parametrize("extension", PER_SAMPLE)
def test_batch_norm_module_in_training(extension: str) -> None:
    with default_dtype(torch.float64):
        problem = classify(Sequential(Linear(3, 3), nn.BatchNorm1d(3), Linear(3, 4)), torch.randn(N, 3))
    with pytest.raises(NotImplementedError):
        run(problem, QUANTITIES[extension].make())


@pytest.mark.parametrize("extension", PER_SAMPLE)
def test_two_batches_of_different_size(extension: str) -> None:
    problem = small()
    problem.output = lambda model, x: (model(x), model(x[:2]))
    problem.terms.append(Term(CrossEntropyLoss(), problem.terms[0].target[:2], head=1))
    with pytest.raises(NotImplementedError):
        run(problem, QUANTITIES[extension].make())
    assert not collect(problem, QUANTITIES[extension].field)


# --- graphs on which a value must be exact, but may be refused --------------------------------------------------------------------------------


def normalized_weight(net: Net, x: Tensor) -> Tensor:
    return net.b(F.linear(x, net.weight / net.weight.norm(dim=1, keepdim=True)))


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return net.b(checkpoint(lambda h: torch.tanh(net.a(h)), x, use_reentrant=False))


def routed(net: Net, x: Tensor) -> Tensor:
    chosen = x[:, 0] > x[:, 1].mean()
    out = net.a(x)
    out[chosen] = net.tanh(net.b(x[chosen]))
    return out


def single_module(module: Callable[[], Module], after: Callable[[Tensor], Tensor] = lambda h: h) -> tuple[Callable, Callable]:
    return lambda net, x: net.b(after(net.inner(x))), lambda: {"inner": module(), "b": Linear(4, 4)}


SPECIAL: dict[str, tuple[Callable[[Net, Tensor], Tensor], Callable[[], dict], tuple[int, ...]]] = {
    "samples flipped": (lambda net, x: net.b(net.tanh(net.a(x)).flip(0)), layers(3, 3, 4, tanh=Tanh), (3,)),
    "samples permuted": (lambda net, x: net.b(net.tanh(net.a(x))[[2, 0, 1]]), layers(3, 3, 4, tanh=Tanh), (3,)),
    "samples permuted in between": (lambda net, x: net.b(net.a(x).roll(1, 0).tanh()).roll(-1, 0), layers(3, 3, 4), (3,)),
    "samples unbound": (lambda net, x: torch.cat([net.b(net.tanh(net.a(row))) for row in x.split(1)]), layers(3, 3, 4, tanh=Tanh), (3,)),
    "samples one by one": (lambda net, x: torch.stack([net.b(net.tanh(net.a(row))) for row in x]), layers(3, 3, 4, tanh=Tanh), (3,)),
    "samples repeated": (lambda net, x: net.b(net.tanh(net.a(x.repeat(2, 1)))).view(2, len(x), 4).sum(0), layers(3, 3, 4, tanh=Tanh), (3,)),
    "samples interleaved": (
        lambda net, x: net.b(net.tanh(net.a(x.repeat_interleave(2, 0)))).view(len(x), 2, 4).prod(1),
        layers(3, 3, 4, tanh=Tanh),
        (3,),
    ),
    "samples last": (lambda net, x: net.b((net.matrix @ x.T).T.tanh()), lambda: {"matrix": parameter(3, 3)(), "b": Linear(3, 4)}, (3,)),
    "routed": (routed, layers(3, 4, tanh=Tanh, b=lambda: Linear(3, 4)), (3,)),
    "normalized weight": (normalized_weight, lambda: {"weight": parameter(3, 3)(), "b": Linear(3, 4)}, (3,)),
    "weight norm": (
        lambda net, x: net.b(net.tanh(net.a(x))),
        lambda: {"a": weight_norm(Linear(3, 3)), "tanh": Tanh(), "b": Linear(3, 4)},
        (3,),
    ),
    "bias used twice": (lambda net, x: net.b(torch.tanh(net.a(x) + net.a.bias)), layers(3, 3, 4), (3,)),
    "weight also as a number": (lambda net, x: net.b(net.a(x) * net.a.weight.sum()), layers(3, 3, 4), (3,)),
    "weight of the next layer": (lambda net, x: net.b(net.tanh(net.a(x)) + net.b.weight[0]), layers(3, 3, 4, tanh=Tanh), (3,)),
    "sigmoid of a parameter": (lambda net, x: net.b(net.a(x) * torch.sigmoid(net.gate)), layers(3, 3, 4, gate=parameter(3)), (3,)),
    "gate used twice": (lambda net, x: net.b(net.a(x) * net.gate + (1 - net.gate) * x), layers(3, 3, 4, gate=parameter(3)), (3,)),
    "row of a table": (lambda net, x: net.b(net.a(x) + net.table[(x[:, 0] > 0).long()]), layers(3, 3, 4, table=parameter(2, 3)), (3,)),
    "functional embedding": (
        lambda net, x: net.b(F.embedding((x > 0).long(), net.table).sum(1)),
        lambda: {"table": parameter(2, 3)(), "b": Linear(3, 4)},
        (3,),
    ),
    "embedding": (lambda net, x: net.b(net.table((x > 0).long()).flatten(1)), lambda: {"table": nn.Embedding(2, 2), "b": Linear(6, 4)}, (3,)),
    "functional conv": (
        lambda net, x: net.b(F.conv1d(x, net.kernel).flatten(1)),
        lambda: {"kernel": parameter(2, 2, 2)(), "b": Linear(4, 4)},
        (2, 3),
    ),
    "addmm": (
        lambda net, x: net.b(torch.addmm(net.bias, x, net.matrix).tanh()),
        lambda: {"matrix": parameter(3, 3)(), "bias": parameter(3)(), "b": Linear(3, 4)},
        (3,),
    ),
    "einsum": (lambda net, x: net.b(torch.einsum("nd,de->ne", x, net.matrix).tanh()), lambda: {"matrix": parameter(3, 3)(), "b": Linear(3, 4)}, (3,)),
    "bilinear form": (
        lambda net, x: net.b(torch.einsum("nd,de,ne->n", x, net.matrix, x)[:, None]),
        lambda: {"matrix": parameter(3, 3)(), "b": Linear(1, 4)},
        (3,),
    ),
    "functional layer norm": (
        lambda net, x: net.b(F.layer_norm(x, (3,), net.gamma, net.beta)),
        lambda: {"gamma": parameter(3)(), "beta": parameter(3)(), "b": Linear(3, 4)},
        (3,),
    ),
    "functional dropout": (lambda net, x: net.b(F.dropout(net.a(x), 0.3)), layers(3, 5, 4), (3,)),
    "checkpoint": (checkpointed, layers(3, 3, 4), (3,)),
    "detached branch": (lambda net, x: net.b(net.tanh(net.a(x)) + net.a(x).detach()), layers(3, 3, 4, tanh=Tanh), (3,)),
    "conv1d": (*single_module(lambda: nn.Conv1d(2, 2, 2), lambda h: h.flatten(1)), (2, 3)),
    "conv2d": (*single_module(lambda: nn.Conv2d(2, 1, 2), lambda h: h.flatten(1)), (2, 3, 3)),
    "batch norm in evaluation": (*single_module(lambda: nn.BatchNorm1d(4).eval()), (4,)),
    "group norm": (*single_module(lambda: nn.GroupNorm(2, 4)), (4,)),
    "gru": (*single_module(lambda: nn.GRU(2, 4, batch_first=True), lambda h: h[0][:, -1]), (3, 2)),
    "lstm, samples second": (lambda net, x: net.b(net.inner(x.transpose(0, 1))[0][-1]), lambda: {"inner": nn.LSTM(2, 4), "b": Linear(4, 4)}, (3, 2)),
    "multi-head attention": (
        lambda net, x: net.b(net.inner(x, x, x)[0]).sum(1),
        lambda: {"inner": nn.MultiheadAttention(4, 2, batch_first=True), "b": Linear(4, 4)},
        (3, 4),
    ),
    "transformer layer": (
        lambda net, x: net.b(net.inner(x)).mean(1),
        lambda: {"inner": nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True), "b": Linear(4, 4)},
        (2, 4),
    ),
    "cosine": (lambda net, x: F.normalize(net.b(net.a(x)), dim=1), layers(3, 3, 4), (3,)),
    "sorted features": (lambda net, x: net.b(net.a(x).sort(dim=1).values), layers(3, 3, 4), (3,)),
    "index put": (
        lambda net, x: net.b(torch.zeros_like(x).index_copy(1, torch.tensor([2, 0]), net.a(x))),
        lambda: {"a": Linear(3, 2), "b": Linear(3, 4)},
        (3,),
    ),
    "constant times branch": (lambda net, x: net.b(net.a(x) * x), layers(3, 3, 4), (3,)),
    "mask": (lambda net, x: net.b(net.a(x).masked_fill(x > 0, 0.0)), layers(3, 3, 4), (3,)),
}


def special(name: str) -> Problem:
    forward, parts, shape = SPECIAL[name]
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(3)
        return classify(Net(forward, **parts()), torch.randn(N, *shape))


@pytest.mark.parametrize("extension", PER_SAMPLE)
@pytest.mark.parametrize("name", SPECIAL)
def test_exact_or_refused(extension: str, name: str) -> None:
    """On graphs outside of the table a wrong number is the only failure."""
    quantity, problem = QUANTITIES[extension], special(name)
    try:
        run(problem, quantity.make())
    except NotImplementedError:
        assert not collect(problem, quantity.field), "a refused pass left results behind"
        return
    quantity.check(Oracle(special(name)), collect(problem, quantity.field))


class Folded(nn.Module):
    """A transposed weight that is computed once, and used twice: in a product in the middle, and in the one that makes the output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.w.t()
        return torch.tanh(x @ turned) @ turned.t()


class Force(nn.Module):
    """The gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 5).double(), nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.c(torch.sin(self.a(x))).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("make", [Folded, Force])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_weight_that_is_turned_once_and_used_twice(make: type[nn.Module], samples: int) -> None:
    """Autograd's gradient of what is used twice holds both uses, of which one has been read elsewhere; also where it is that of a single sample."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(samples, 4, dtype=torch.float64)
    used = [p for p in model.parameters() if p is not getattr(getattr(model, "c", None), "bias", None)]
    expected = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), used) for n in range(samples)]
    extend(model)
    with backpack(BatchGrad(), BatchL2Grad()):
        model(x).square().sum().backward()
    for i, p in enumerate(used):
        close(p.grad_batch, torch.stack([gradients[i] for gradients in expected]))
        close(p.batch_l2, p.grad_batch.flatten(1).square().sum(1))
