"""What the ranks of the tests of distributed programs run; started by ``test_distributed.py``, which holds the expectations."""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import backpack
from backpack import extend, extensions, results
from backpack.utils.errors import BackpackError

D, C = 3, 4
WRAPPERS = {
    "plain": {},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-5},
}
SIZES = [3, 2, 1, 4]
"""Samples on each rank."""


class Net(nn.Module):
    """Layers, a shared weight, a matrix of its own, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(D, 5), nn.Linear(5, 5, bias=False)
        self.act, self.last = nn.Sigmoid(), nn.Linear(5, C)
        self.matrix = nn.Parameter(torch.randn(5, 5) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.first(x)) @ self.matrix
        return self.last(self.again(hidden) + self.again(hidden.flip(1)))


def model() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(0)
    return Net().double()


def data(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Samples of all ranks."""
    torch.manual_seed(1)
    return [(torch.randn(n, D, dtype=torch.float64), torch.randint(C, (n,))) for n in SIZES[:ranks]]


def all_extensions() -> list[extensions.BackpropExtension]:
    return [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
        extensions.DiagGGNExact(),
        extensions.BatchDiagGGNExact(),
        extensions.DiagHessian(),
        extensions.BatchDiagHessian(),
        extensions.SqrtGGNExact(),
        extensions.KFLR(),
        extensions.DiagGGNMC(),
        extensions.KFAC(),
    ]


def found(net: nn.Module) -> dict:
    """Results and gradients, by the names of the model that is not wrapped."""
    values = results(net)
    for name, parameter in net.named_parameters():
        values.setdefault(name, {})["grad"] = parameter.grad.clone()
    return {name.removeprefix("module."): fields for name, fields in values.items()}


def message(run: Callable[[], object]) -> str:
    """What a refused call says."""
    try:
        run()
    except (BackpackError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def wrapped(rank: int, ranks: int) -> dict:
    """All ways to wrap a model, extended before or after, three passes each; local results of the last, and reduced ones."""
    out = {}
    x, y = data(ranks)[rank]
    for kind, before in product(WRAPPERS, (True, False)):
        net = extend(DistributedDataParallel(model(), **WRAPPERS[kind])) if not before else DistributedDataParallel(extend(model()), **WRAPPERS[kind])
        lossfunc = extend(nn.CrossEntropyLoss())
        for _ in range(3):
            net.zero_grad()
            with backpack.backpack(*all_extensions()):
                lossfunc(net(x), y).backward()
        local = found(net)
        backpack.distributed.reduce(net)
        out[kind, before] = local, found(net), message(lambda net=net: backpack.distributed.reduce(net))
    return out


def mean_over_all(rank: int, ranks: int) -> dict:
    """Mean losses weighted by the number of samples; two micro-batches on each rank, the first without communication."""
    x, y = data(ranks)[rank]
    total = sum(SIZES[:ranks])
    net, lossfunc = DistributedDataParallel(extend(model())), extend(nn.CrossEntropyLoss())
    with backpack.backpack(*all_extensions(), accumulate=True):
        parts = [part for part in (slice(0, 1), slice(1, len(x))) if len(x[part])]
        for part in parts:
            with ExitStack() as stack:
                if part is not parts[-1]:
                    stack.enter_context(net.no_sync())
                (lossfunc(net(x[part]), y[part]) * (len(x[part]) * ranks / total)).backward()
    backpack.distributed.reduce(net)
    return found(net)


def summed(rank: int, ranks: int) -> dict:
    """No wrapper: the loss of all ranks is the sum."""
    x, y = data(ranks)[rank]
    net, lossfunc = extend(model()), extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack.backpack(*all_extensions()):
        lossfunc(net(x), y).backward()
    backpack.distributed.reduce(net, average=False)
    return found(net)


def refused(rank: int, ranks: int) -> dict:
    """Each rank gets an error, nobody waits, nothing is changed."""
    x, y = data(ranks)[rank]
    net, lossfunc = extend(nn.Sequential(nn.Linear(D, C)).double()), extend(nn.CrossEntropyLoss())
    out = {}
    for name, active in {
        "other extensions": [extensions.Variance()] if rank else [extensions.BatchGrad()],
        "one rank excludes": [extensions.Variance(exclude=["0.bias"] if rank else [])],
        "KFRA": [extensions.KFRA()],
        "HMP on one rank": [extensions.BatchGrad(), *([extensions.HMP()] if rank else [])],
    }.items():
        backpack.clear(net)
        with backpack.backpack(*active):
            lossfunc(net(x), y).backward()
        before = results(net)
        out[name] = message(lambda: backpack.distributed.reduce(net))
        assert all(value is before[p][f] for p, fields in results(net).items() for f, value in fields.items())
    backpack.clear(net)
    with backpack.backpack(extensions.Variance(), accumulate=True):
        lossfunc(net(x), y).backward()
        backpack.distributed.reduce(net)
        out["accumulate after"] = message(lambda: lossfunc(net(x), y).backward())
    return out


def unequal(rank: int, ranks: int) -> dict:
    """Layers of other shapes, or types, on the ranks; each gets an error, and nothing is changed."""
    out = {}
    for name, extension, width, kind, kept in (
        ("width", extensions.Variance, C + rank, torch.float64, None),
        ("width, side by side", extensions.BatchGrad, C + rank, torch.float64, None),
        ("precision", extensions.KFLR, C, (torch.float64, torch.float32)[rank], None),
        ("kept", extensions.Variance, C, torch.float64, (None, torch.float32)[rank]),
    ):
        net, (x, y) = extend(nn.Linear(D, width).to(kind)), data(ranks)[rank]
        with backpack.backpack(extension(), dtype=kept):
            extend(nn.CrossEntropyLoss())(net(x.to(kind)), y).backward()
        before = results(net)
        out[name] = message(lambda net=net: backpack.distributed.reduce(net))
        assert all(value is before[p][f] for p, fields in results(net).items() for f, value in fields.items())
    return out


def sharded(rank: int, ranks: int) -> dict:
    """Models whose parameters are spread over ranks, extended before or after."""
    mesh = init_device_mesh("cpu", (ranks,))

    def fsdp(net: nn.Module, **settings: object) -> nn.Module:
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh, **settings)
        return net

    ways = {
        "fully_shard": fsdp,
        "fully_shard, kept": lambda net: fsdp(net, reshard_after_forward=False),
        "tensor parallel": lambda net: parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
        "FSDP": lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        "FSDP, original": lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True),
    }
    out = {}
    for (name, wrap), before, second in product(ways.items(), (True, False), (True, False)):
        net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, C))
        net = wrap(extend(net)) if before else extend(wrap(net))
        lossfunc = extend(nn.CrossEntropyLoss()) if second else nn.CrossEntropyLoss()

        def step(net: nn.Module = net, lossfunc: nn.Module = lossfunc, second: bool = second) -> None:
            with backpack.backpack(extensions.DiagGGNExact() if second else extensions.BatchGrad()):
                lossfunc(net(torch.rand(2, D)), torch.randint(C, (2,))).backward()

        out[name, before, second] = message(step), results(net)
    return out


def main(rank: int, ranks: int, folder: Path, programs: list[str]) -> None:
    """Run programs as one rank, and leave in a file what they return, or what went wrong."""
    try:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning)
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        outcomes = {program: globals()[program](rank, ranks) for program in programs}
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        outcomes = traceback.format_exc()
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))
