"""What the table of cases does not say about pooling, padding and resampling: positions, published helpers, layouts, messages, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import LAYERS
from cases_nets import Net
from cases_pool import between
from oracle import Oracle, Problem, Term
from table import Case, labels
from test_extensions import QUANTITIES, close, collect, run
from torch import Tensor, nn, rand, randn
from torch.nn import CrossEntropyLoss, Flatten, Linear, Module, Sequential, Unflatten
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.core.derivatives.adaptive_avg_pool_nd import AdaptiveAvgPool1dDerivatives, AdaptiveAvgPool2dDerivatives, AdaptiveAvgPool3dDerivatives
from backpack.core.derivatives.avgpoolnd import AvgPool1DDerivatives, AvgPool2DDerivatives, AvgPool3DDerivatives
from backpack.core.derivatives.maxpoolnd import MaxPool1DDerivatives, MaxPool2DDerivatives, MaxPool3DDerivatives
from backpack.core.derivatives.registry import derivatives_for
from backpack.extensions import KFRA, DiagGGNExact, DiagHessian
from backpack.utils.errors import BackpackError, BranchingError, UnsupportedError

IMAGES = ("Pool", "Pad", "Upsampl", "Shuffle", "shuffle", "Fold", "Unfold")
ROWS = [name for name in LAYERS if any(word in name for word in IMAGES)]


def record(module: Module, *inputs: Tensor) -> Module:
    """Store what a derivative reads on the module."""
    for i, value in enumerate(inputs):
        setattr(module, f"input{i}", value)
    module.output = module(*inputs)
    return module


def vjp(module: Module, mat: Tensor, x: Tensor, *inputs: Tensor) -> Tensor:
    """Multiply columns by the transposed Jacobian, one by one."""
    x = x.detach().requires_grad_()
    output = module(x, *inputs)
    return torch.stack([torch.autograd.grad(output, x, column, retain_graph=True)[0] for column in mat])


# --- products -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_layouts_and_single_precision(name: str) -> None:
    """Inputs and columns that are not contiguous, in single precision: close to autograd, in the same precision."""
    row = LAYERS[name]
    module, x, more = row.make(), randn(*row.shape, 3).movedim(-1, 0), row.more(3)
    record(module, x, *more)
    mat = randn(*module.output.shape, 2).movedim(-1, 0)
    result = derivatives_for(module).jac_t_mat_prod(module, None, None, mat)
    assert result.dtype == torch.float32
    close(result, vjp(module, mat, x, *more), rtol=1e-5)


# torch runs no images without channels, and does not differentiate the shuffling of pixels
@pytest.mark.parametrize("name", [name for name in ROWS if "no channels" not in name and "Pixel" not in name])
def test_empty_batch(name: str) -> None:
    row = LAYERS[name]
    module = record(row.make(), rand(0, *row.shape), *row.more(0))
    derivatives = derivatives_for(module)
    assert derivatives.jac_t_mat_prod(module, None, None, rand(2, *module.output.shape)).shape == (2, 0, *row.shape)
    assert derivatives.jac_mat_prod(module, None, None, rand(2, 0, *row.shape)).shape == (2, *module.output.shape)


@pytest.mark.parametrize("name", [name for name in ROWS if "MaxPool" in name])
def test_positions(name: str) -> None:
    """The positions point at the maxima, for chosen samples, too."""
    row = LAYERS[name]
    module = record(row.make(), randn(3, *row.shape))
    axes = int(type(module).__name__[-2])
    for subsampling in (None, [2, 0, 2]):
        positions = derivatives_for(module).get_pooling_idx(module, subsampling)
        samples = slice(None) if subsampling is None else subsampling
        values = module.input0[samples].flatten(-axes).gather(-1, positions.flatten(-axes))
        assert values.reshape(positions.shape).equal(module.output[samples])


def test_published_names() -> None:
    for derivatives, module in (
        (MaxPool1DDerivatives, nn.MaxPool1d),
        (MaxPool2DDerivatives, nn.MaxPool2d),
        (MaxPool3DDerivatives, nn.MaxPool3d),
        (AvgPool1DDerivatives, nn.AvgPool1d),
        (AvgPool2DDerivatives, nn.AvgPool2d),
        (AvgPool3DDerivatives, nn.AvgPool3d),
        (AdaptiveAvgPool1dDerivatives, nn.AdaptiveAvgPool1d),
        (AdaptiveAvgPool2dDerivatives, nn.AdaptiveAvgPool2d),
        (AdaptiveAvgPool3dDerivatives, nn.AdaptiveAvgPool3d),
    ):
        assert type(derivatives_for(module)) is derivatives
        assert isinstance(derivatives(), derivatives)


@pytest.mark.parametrize(
    ("adaptive", "shape"),
    [(nn.AdaptiveAvgPool1d(3), (2, 6)), (nn.AdaptiveAvgPool2d((2, None)), (2, 6, 4)), (nn.AdaptiveAvgPool3d((1, 2, 3)), (1, 2, 4, 3))],
)
def test_parameters_of_average_pooling(adaptive: Module, shape: tuple[int, ...]) -> None:
    """The windows of an adaptive pooling, given to a pooling with fixed windows, make the same output."""
    record(adaptive, randn(3, *shape))
    stride, kernel_size, padding = derivatives_for(adaptive).get_avg_pool_parameters(adaptive)
    fixed = getattr(nn, type(adaptive).__name__.removeprefix("Adaptive"))(kernel_size, stride, padding)
    torch.testing.assert_close(fixed(adaptive.input0), adaptive.output)
    derivatives = derivatives_for(fixed)
    derivatives.check_parameters(fixed)
    assert derivatives.get_avg_pool_parameters(fixed) == (fixed.stride, fixed.kernel_size, fixed.padding)


@pytest.mark.parametrize(
    "module",
    [nn.AvgPool2d(2, divisor_override=3), nn.AvgPool1d(2, ceil_mode=True), nn.AvgPool3d(2, count_include_pad=False), nn.AdaptiveAvgPool1d(2)],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_convolution_says_so(module: Module) -> None:
    derivatives = derivatives_for(module)
    if isinstance(module, nn.AdaptiveAvgPool1d):
        record(module, rand(3, 2, 5))
    with pytest.raises(UnsupportedError):
        derivatives.check_parameters(module)


# --- in nets ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("extension", ["BatchGrad", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "KFLR"])
@pytest.mark.parametrize(
    ("shape", "make"),
    [((2, 5, 5), lambda: nn.FractionalMaxPool2d(2, 3)), ((1, 2, 5, 5), lambda: nn.FractionalMaxPool3d((1, 2, 2), (1, 3, 3)))],
    ids=["2", "3"],
)
def test_random_pooling(shape: tuple[int, ...], make: Callable[[], Module], extension: str, batch: int) -> None:
    """The graph knows what was drawn."""
    quantity = QUANTITIES[extension]
    case = Case("random", partial(between, shape, make), frozenset())
    problem = case.build(batch)
    run(problem, quantity.make())
    quantity.check(Oracle(case.build(batch)), collect(problem, quantity.field))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_maxima(reentrant: bool) -> None:
    """What a checkpoint has saved is not taken from it: the rule pools once more."""

    def forward(net: Net, x: Tensor) -> Tensor:
        images = net.a(x).unflatten(1, (1, 3, 3))
        return net.b(checkpoint(net.pool, images, use_reentrant=reentrant).flatten(1))

    def values(forward: Callable[[Net, Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        net, loss, x = extend(Net(forward, a=Linear(3, 9), pool=nn.MaxPool2d(2, 1), b=Linear(4, 4))), extend(CrossEntropyLoss()), randn(5, 3)
        with backpack(DiagGGNExact()):
            loss(net(x), torch.arange(5) % 4).backward()
        return [param.diag_ggn_exact for param in net.parameters()]

    expected = values(lambda net, x: net.b(net.pool(net.a(x).unflatten(1, (1, 3, 3))).flatten(1)))
    try:
        result = values(forward)
    except BackpackError:
        assert reentrant
        return
    for actual, truth in zip(result, expected, strict=True):
        close(actual, truth, rtol=1e-5)


def test_maxima_before_an_operation_in_place() -> None:
    """The output of a pooling over one axis is a view, below which an operation in place rewrites the graph."""
    torch.manual_seed(0)
    values = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = extend(Sequential(Linear(3, 8), Unflatten(1, (2, 4)), nn.MaxPool1d(2), nn.ELU(inplace=inplace), Flatten(), Linear(4, 4)))
        loss = extend(CrossEntropyLoss())
        with backpack(DiagGGNExact(), DiagHessian()):
            loss(model(randn(5, 3)), torch.arange(5) % 4).backward()
        values.append([(param.diag_ggn_exact, param.diag_h) for param in model.parameters()])
    for plain, overwritten in zip(*values, strict=True):
        for one, other in zip(plain, overwritten, strict=True):
            close(other, one, rtol=1e-5)


# --- messages -----------------------------------------------------------------------------------------------------------------------------------


def test_messages_say_why_a_rule_is_not_used() -> None:
    def message(forward: Callable[[Net, Tensor], Tensor], extension: object, error: type[Exception], **parts: Module) -> str:
        net, loss = extend(Net(forward, a=Linear(3, 4), b=Linear(4, 4), **parts)), extend(CrossEntropyLoss())
        with pytest.raises(error) as info, backpack(extension):
            loss(net(rand(5, 3)), torch.arange(5) % 4).backward()
        return str(info.value)

    pool = nn.MaxPool1d(1, return_indices=True)
    two = message(lambda net, x: net.b(net.pool(net.a(x))[0]), KFRA(), BranchingError, pool=pool)
    assert "MaxPool1d, whose rule stands for calls with a single output, of which axis 0 holds the samples" in two
    assert "no rule" not in two.partition(":")[0]


def test_padding_of_the_sample_axis_is_not_taken_for_padding_of_images() -> None:
    """Rows that padding adds in front of the samples come from none of them."""
    pad = nn.ZeroPad2d((0, 0, 1, 0))
    assert not derivatives_for(pad).applies(record(pad, rand(5, 3)))
    case = Case(
        "padded", lambda N: Problem(Sequential(Linear(3, 4), pad, Linear(4, 4)), randn(N, 3), [Term(CrossEntropyLoss(), labels(N + 1))]), frozenset()
    )
    for name in ("BatchGrad", "DiagGGNExact", "BatchDiagHessian"):
        quantity, problem = QUANTITIES[name], case.build(4)
        run(problem, quantity.make())
        quantity.check(Oracle(case.build(4)), collect(problem, quantity.field))
