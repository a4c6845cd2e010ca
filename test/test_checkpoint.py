"""Checkpointed parts of a model: every quantity is that of the model without checkpoints, the part runs again once, and memory stays saved."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from cases_nets import Net, layers, parameter
from oracle import Oracle, Problem
from table import classify, default_dtype
from test_extensions import QUANTITIES, collect, run
from torch import Tensor, nn, randn
from torch._subclasses import FakeTensor
from torch.autograd.graph import save_on_cpu
from torch.nn import Linear, ModuleList, Sequential, Tanh
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, GraphExecGroup, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from backpack import backpack, disable, extend, results
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import MixedSamplesError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")

N = 3
EXACT = ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "SqrtGGNExact", "KFAC", "KFLR"]


class Sine(torch.autograd.Function):
    """A function of one's own, with a parameter."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x.sin() * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * x.cos() * scale, (grad * x.sin()).sum(0)


def save_products(_: object, operation: object, *__: object, **___: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def only_bias(layer: Linear) -> Linear:
    layer.weight.requires_grad_(False)
    return layer


Run = Callable[..., Tensor]
selective = partial(create_selective_checkpoint_contexts, save_products)
PARTS: dict[str, tuple[Callable[[Net, Tensor, Run], Tensor], Callable[[], dict]]] = {
    "modules": (lambda net, x, run: net.b(run(lambda h: net.tanh(net.inner(h)), net.a(x))), layers(3, 3, 4, inner=lambda: Linear(3, 3), tanh=Tanh)),
    "first": (lambda net, x, run: net.b(run(lambda h: net.tanh(net.a(h)), x)), layers(3, 3, 4, tanh=Tanh)),
    "functional": (lambda net, x, run: net.b(run(lambda h: net.inner(h).tanh() * h, net.a(x))), layers(3, 3, 4, inner=lambda: Linear(3, 3))),
    "no module": (lambda net, x, run: net.b(run(lambda h: F.linear(h, net.w).tanh(), net.a(x))), layers(3, 3, 4, w=parameter(3, 3))),
    "bare parameter": (lambda net, x, run: net.b(run(lambda h: net.tanh(h) * net.w + net.w, net.a(x))), layers(3, 3, 4, tanh=Tanh, w=parameter(3))),
    "dropout": (
        lambda net, x, run: net.b(run(lambda h: F.dropout(net.drop(net.inner(h)), 0.3), net.a(x))),
        layers(3, 5, 4, inner=lambda: Linear(5, 5), drop=lambda: nn.Dropout(0.3)),
    ),
    "in place": (
        lambda net, x, run: net.b(run(lambda h: net.relu(net.inner(h)), net.a(x))),
        layers(3, 3, 4, inner=lambda: Linear(3, 3), relu=lambda: nn.ReLU(inplace=True)),
    ),
    "module twice": (
        lambda net, x, run: net.b(run(lambda h: net.tanh(net.inner(h)), run(lambda h: net.tanh(net.inner(net.tanh(net.inner(h)))), net.a(x)))),
        layers(3, 3, 4, inner=lambda: Linear(3, 3), tanh=Tanh),
    ),
    "nested": (
        lambda net, x, run: net.b(run(lambda h: net.inner(run(lambda g: net.tanh(net.inner(g)) * g, h)) * h, net.a(x))),
        layers(3, 3, 4, inner=lambda: Linear(3, 3), tanh=Tanh),
    ),
    "operation that is probed": (
        lambda net, x, run: net.b(run(lambda h: net.inner(h)[:, [1, 0, 2]].cumsum(1), net.a(x))),
        layers(3, 3, 4, inner=lambda: Linear(3, 3)),
    ),
    "function of one's own": (
        lambda net, x, run: net.b(run(lambda h: Sine.apply(net.inner(h), net.w), net.a(x))),
        layers(3, 3, 4, inner=lambda: Linear(3, 3), w=parameter(3)),
    ),
    "functional layers": (
        lambda net, x, run: net.b(run(lambda h: F.conv1d(F.layer_norm(net.inner(h), (3,), net.g)[:, None], net.w, padding=1).flatten(1), net.a(x))),
        layers(3, 3, 4, inner=lambda: Linear(3, 3), g=parameter(3), w=parameter(1, 1, 3)),
    ),
    "convolutions": (
        lambda net, x, run: net.b(run(lambda h: net.pool(net.norm(net.conv(h[:, None]))).flatten(1), net.a(x))),
        layers(3, 5, 4, conv=lambda: nn.Conv1d(1, 2, 2), norm=lambda: nn.GroupNorm(1, 2), pool=lambda: nn.MaxPool1d(2), b=lambda: Linear(4, 4)),
    ),
    "attention": (
        lambda net, x, run: net.b(run(lambda h: net.inner(h, h, h)[0], net.a(x.unflatten(1, (3, 1)).expand(-1, -1, 3)))).sum(1),
        layers(3, 3, 4, inner=lambda: nn.MultiheadAttention(3, 1, batch_first=True)),
    ),
    "recurrent": (
        lambda net, x, run: net.b(run(lambda h: net.inner(h)[0][:, -1], net.a(x.unflatten(1, (3, 1)).expand(-1, -1, 3)))),
        layers(3, 3, 4, inner=lambda: nn.GRU(3, 3, batch_first=True)),
    ),
    "nothing is saved": (
        lambda net, x, run: net.b(run(lambda h: net.flat(net.fold(net.a(h))), x)),
        layers(3, 3, 4, a=lambda: only_bias(Linear(3, 3)), fold=lambda: nn.Unflatten(1, (1, 3)), flat=nn.Flatten),
    ),
}
HOW: dict[str, dict[str, object]] = {"": {}, "no early stop": {"early_stop": False}, "selective": {"context_fn": selective}}


def plain(function: Callable, *args: Tensor) -> Tensor:
    return function(*args)


def problem(name: str, run: Run, batch: int = N) -> Problem:
    forward, parts = PARTS[name]
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        return classify(Net(partial(forward, run=run), **parts()), randn(batch, 3))


# torch itself refuses operations in place in a selective checkpoint, and computes wrong gradients of recurrent layers there
CELLS = [(name, how) for name in PARTS for how in HOW if how != "selective" or name not in ("in place", "recurrent")]


@pytest.mark.parametrize("batch", [1, N])
@pytest.mark.parametrize("extension", EXACT)
@pytest.mark.parametrize(("name", "how"), CELLS)
def test_checkpointed_parts_are_exact(name: str, how: str, extension: str, batch: int) -> None:
    quantity, net = QUANTITIES[extension], problem(name, partial(checkpoint, use_reentrant=False, **HOW[how]), batch)
    run(net, quantity.make())
    oracle = Oracle(problem(name, plain, batch))
    quantity.check(oracle, collect(net, quantity.field))
    for key, expected in oracle.grad.items():
        torch.testing.assert_close(net.model.get_parameter(key).grad, expected)


@pytest.mark.parametrize("extension", ["BatchGrad", "Variance", "DiagGGNExact", "KFLR"])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments_of_a_sequence_are_exact(extension: str, segments: int) -> None:
    def forward(net: Net, x: Tensor, run: bool) -> Tensor:
        h = net.a(x)
        return net.b(checkpoint_sequential(net.inner, segments, h, use_reentrant=False) if run else net.inner(h))

    PARTS["sequence"] = forward, layers(3, 3, 4, inner=lambda: Sequential(*(part for _ in range(3) for part in (Linear(3, 3), Tanh()))))
    quantity, net = QUANTITIES[extension], problem("sequence", True)
    run(net, quantity.make())
    quantity.check(Oracle(problem("sequence", False)), collect(net, quantity.field))


def test_runs_again_once() -> None:
    """Planning, reading and crossing share the one time that autograd needs anyway; the part need not end where autograd's needs do."""
    counted: list[str] = []

    def counting(function: Callable, h: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            counted.append("run")
            return function(h)

        return checkpoint(inner, h, use_reentrant=False)

    for name in ("operation that is probed", "functional layers", "function of one's own"):
        net = problem(name, counting)
        counted.clear()
        run(net, BatchGrad(), DiagGGNExact())
        assert len(counted) == 2, name  # forward, and again


@pytest.mark.parametrize("name", ["modules", "functional", "nested"])
@pytest.mark.parametrize("extension", ["BatchGrad", "DiagGGNExact"])
def test_retained_graph(name: str, extension: str) -> None:
    """A second pass over the same graph runs the part once more."""
    quantity, net, oracle = QUANTITIES[extension], problem(name, partial(checkpoint, use_reentrant=False)), Oracle(problem(name, plain))
    for module in (net.model, *net.losses):
        extend(module)
    loss = net.loss(net.outputs())
    for last in (False, True):
        with backpack(quantity.make()):
            loss.backward(retain_graph=not last)
        quantity.check(oracle, collect(net, quantity.field))


def test_group_of_the_user() -> None:
    net = problem("functional", partial(checkpoint, use_reentrant=False))
    with GraphExecGroup():
        run(net, DiagGGNExact())
    QUANTITIES["DiagGGNExact"].check(Oracle(problem("functional", plain)), collect(net, "diag_ggn_exact"))


@contextmanager
def tensor_bytes() -> Iterator[list[int]]:
    """Count what Python holds in tensors before and after."""
    sizes: list[int] = []

    def count() -> int:
        gc.collect()
        # the compiler leaves tensors that have no memory
        storages = (t.untyped_storage() for t in gc.get_objects() if issubclass(type(t), Tensor) and not issubclass(type(t), FakeTensor))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    before = count()
    yield sizes
    sizes.append(count() - before)


def test_memory_stays_saved() -> None:
    """What the calls inside keep between the passes is nothing; in the backward pass, and after it, too, with a retained graph."""
    width, depth = 50, 4
    blocks = extend(ModuleList(Sequential(Linear(width, width), Tanh(), Linear(width, width), nn.GELU()) for _ in range(depth)))
    x, size = torch.randn(200, width), 200 * width * 4
    with tensor_bytes() as sizes:
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False)
    assert sizes[0] <= (depth + 1) * size
    with tensor_bytes() as sizes, backpack(BatchGrad()):
        h.sum().backward(retain_graph=True)
        for p in blocks.parameters():
            del p.grad_batch, p.grad
    assert sizes[0] <= size


@pytest.mark.parametrize("how", ["modules", "no module"])
@pytest.mark.parametrize("extension", ["BatchGrad", "Variance", "DiagGGNExact", "KFAC"])
def test_reentrant_is_refused(extension: str, how: str) -> None:
    """Its graph is hidden: nothing is known of the parameters inside."""
    net = problem(how, partial(checkpoint, use_reentrant=True))
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        run(net, QUANTITIES[extension].make())
    assert all(not vars(p) and p.grad is None for p in net.model.parameters())


@pytest.mark.parametrize("when", ["forward", "backward", "extend"])
def test_changed_between_the_passes(when: str) -> None:
    """A part that is recorded once only never harms the gradient."""
    net = problem("modules", partial(checkpoint, use_reentrant=False))
    if when != "extend":
        extend(net.model)
    with disable() if when == "forward" else nullcontext():
        loss = net.loss(net.outputs())
    extend(net.model)
    with disable() if when == "backward" else nullcontext():
        loss.backward()
    for name, p in net.model.named_parameters():
        torch.testing.assert_close(p.grad, Oracle(problem("modules", plain)).grad[name])


def test_parts_that_do_something_else_when_they_run_again() -> None:
    """The layer is called as a function then, so that its tensors are not there."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = Linear(3, 3), Linear(3, 2), 0

        def part(self, x: Tensor) -> Tensor:
            self.calls += 1
            with disable() if self.calls > 1 else nullcontext():
                return self.a(x).tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.part, x, use_reentrant=False))

    model = extend(Changing())
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=r"^a lies in a checkpointed part.*alike both times"):
        model(randn(4, 3)).sum().backward()
    assert results(model) == {}


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_writing_on_a_part_of_a_tensor(extension: type) -> None:
    """What such an operation has saved cannot be read beforehand, nor twice: refused, and autograd alone goes on."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Linear(3, 3), Linear(3, 2)

        def part(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h[:, :1] *= h[:, 1:2].detach()
            return h.tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.part, x, use_reentrant=False))

    model, lossfunc = extend(Writing()), extend(nn.MSELoss())
    with backpack(extension()), pytest.raises(UnsupportedError, match=r"checkpointed part.*in place on a part of a tensor"):
        lossfunc(model(randn(4, 3)), randn(4, 2)).backward()
    assert results(model) == {}
    lossfunc(model(randn(4, 3)), randn(4, 2)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_recorded_tensors_can_be_read() -> None:
    """After the forward pass, too, for what the rule keeps; the calls that are made again do not take their place."""
    net = problem("modules", partial(checkpoint, use_reentrant=False))
    seen = []
    handle = net.model.inner.register_forward_hook(lambda _, args, __: seen.append(args[0].detach().clone()))
    extend(net.model)
    outputs = net.outputs()
    assert outputs[0].requires_grad
    assert torch.equal(net.model.inner.input0, seen[0])
    handle.remove()


def test_other_hooks_for_saved_tensors() -> None:
    """Tensors that autograd moves elsewhere are no checkpoints."""
    net, oracle = problem("functional", plain), Oracle(problem("functional", plain))
    with save_on_cpu():
        run(net, DiagGGNExact())
    QUANTITIES["DiagGGNExact"].check(oracle, collect(net, "diag_ggn_exact"))


class Scaled(torch.autograd.Function):
    """A product of which the second factor has no gradient."""

    @staticmethod
    def forward(ctx, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return w * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


MADE: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {  # of data, which in a checkpoint nothing shows before it runs again
    "layer": lambda net, x, _: net.a(x),
    "normalization": lambda net, x, _: net.norm(x),
    "table": lambda net, _, rows: net.table(rows),
    "functional table": lambda net, _, rows: F.embedding(rows, net.w),
    "indexed": lambda net, _, rows: net.w[rows],
    "selected": lambda net, _, rows: net.w.index_select(0, rows),
    "scaled": lambda net, x, _: net.w[0] * x,
    "product": lambda net, x, _: x @ net.w,
    "functional layer": lambda net, x, _: F.linear(x, net.w),
    "functional normalization": lambda net, x, _: F.layer_norm(x, (FEATURES,), net.w[0]),
    "interpolated": lambda net, x, _: torch.lerp(net.w[:N], net.w[1:], x),
    "slopes": lambda net, x, _: F.prelu(x, net.w[0]),
    "function of one's own": lambda net, x, _: Scaled.apply(net.w[0], x),
}
MEETS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda h, made, _: h + made.mean(0),
    "scale": lambda h, made, _: h * made.sum(0),
    "matrix": lambda h, made, x: h @ made.T @ x,
}
FEATURES = 4
LEFT = [(), ("a.weight", "norm.weight"), ("a.bias", "norm.bias")]


@pytest.mark.parametrize("run", [lambda part, *given: part(*given), partial(checkpoint, use_reentrant=False)], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("meets", MEETS)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("left", LEFT, ids=str)
def test_samples_that_meet_inside(made: str, meets: str, left: tuple[str, ...], run: Callable[..., Tensor]) -> None:
    """They mix; also where some parameters are left out, or frozen."""
    make = layers(
        *(FEATURES, FEATURES, 2),
        inner=partial(Linear, FEATURES, FEATURES),
        norm=partial(nn.LayerNorm, FEATURES),
        table=partial(nn.Embedding, FEATURES, FEATURES),
        w=parameter(FEATURES, FEATURES),
    )

    def part(net: Net, x: Tensor, rows: Tensor) -> Tensor:
        return MEETS[meets](net.inner(x), MADE[made](net, x, rows), x)

    for frozen in (False, True) if left else (False,):
        net = Net(lambda net, x, rows: net.b(run(partial(part, net), x, rows)), **make())
        for name in left if frozen else ():
            net.get_parameter(name).requires_grad_(False)
        extend(net)
        for extension in (BatchGrad, DiagGGNExact):
            with backpack(extension(exclude=() if frozen else left)), pytest.raises(MixedSamplesError, match="influence one another"):
                F.mse_loss(net(randn(N, FEATURES), torch.tensor([3, 1, 1])), torch.zeros(N, 2)).backward()
            assert results(net) == {}


def test_parts_that_run_again_in_several_threads() -> None:
    """Each thread has a model of its own."""
    found, barrier = [], threading.Barrier(3)

    def work() -> None:
        model = extend(
            Net(lambda net, x: net.b(checkpoint(lambda h: net.a(net.a(net.a(net.a(h)).tanh())).tanh(), x, use_reentrant=False)), **parts())
        )
        x, y = randn(4, 3), torch.zeros(4, 2)
        barrier.wait()
        for _ in range(40):
            model.zero_grad()
            with backpack(BatchGrad()):
                F.mse_loss(model(x), y).backward()
            found.append(all(torch.allclose(p.grad_batch.sum(0), p.grad, atol=1e-5) for p in model.parameters()))

    parts, interval = layers(3, 3, 2), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # often
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [True] * 120
