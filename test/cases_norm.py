"""Rows of the table of cases: normalisations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cases_nets import Net, folded, graph, layers, sequence_first
from oracle import Problem
from table import add, classify, layer, regress
from torch import Tensor, nn, rand, randn
from torch.nn import Flatten, Linear, Module, Sequential, Tanh, Unflatten


def spread(module: Module) -> Module:
    """Give parameters and running statistics values of their own, other than zeros and ones.

    Args:
        module: A normalisation.

    Returns:
        The same module, in evaluation mode.
    """
    for parameter in module.parameters():
        parameter.data += 0.4 * randn(parameter.shape)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.add_(rand(buffer.shape) if name == "running_var" else randn(buffer.shape))
    return module.eval()


def between(make: Callable[[], Module], N: int) -> Problem:
    """Put a normalisation of vectors between two layers."""  # noqa: DOC201
    return classify(Sequential(Linear(3, 4), spread(make()), Linear(4, 4)), randn(N, 3))


def on_images(make: Callable[[], Module], shape: tuple[int, ...], N: int) -> Problem:
    """Put a normalisation of channels with positions between two layers."""  # noqa: DOC201
    size = shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1)
    return classify(Sequential(Linear(3, size), Unflatten(1, shape), spread(make()), Flatten(), Linear(size, 4)), randn(N, 3))


DENSE = ("chain", "dense residual")
LEARNED = (*DENSE, "other parameters")

add("LayerNorm", partial(between, partial(nn.LayerNorm, 4)), *LEARNED)
add("LayerNorm, no parameters", partial(between, partial(nn.LayerNorm, 4, elementwise_affine=False, eps=0.1)), *DENSE)
add(
    "LayerNorm, no bias, extra axis",
    lambda N: regress(Sequential(Linear(3, 4), spread(nn.LayerNorm(4, bias=False)), Tanh(), Linear(4, 2)), randn(N, 2, 3)),
    *LEARNED,
    "extra axes",
)
add(
    "LayerNorm, two axes",
    lambda N: regress(Sequential(Linear(3, 2), spread(nn.LayerNorm((2, 2))), Linear(2, 2)), randn(N, 2, 3)),
    *LEARNED,
    "extra axes",
)
add("LayerNorm, first", lambda N: classify(Sequential(spread(nn.LayerNorm(3)), Linear(3, 4)), randn(N, 3)), "chain", "other parameters")
add("LayerNorm, last", lambda N: regress(Sequential(Linear(3, 3), spread(nn.LayerNorm(3))), randn(N, 3)), *LEARNED)
add("RMSNorm", partial(between, partial(nn.RMSNorm, 4)), *LEARNED)
add("RMSNorm, no parameters", partial(between, partial(nn.RMSNorm, 4, eps=0.1, elementwise_affine=False)), *DENSE)
add("GroupNorm", partial(on_images, partial(nn.GroupNorm, 2, 4), (4, 2)), *LEARNED)
add("GroupNorm, no parameters", partial(between, partial(nn.GroupNorm, 2, 4, affine=False, eps=0.1)), *DENSE)
add("InstanceNorm1d, parameters", partial(on_images, partial(nn.InstanceNorm1d, 2, affine=True), (2, 3)), *LEARNED)
add("InstanceNorm2d", partial(on_images, partial(nn.InstanceNorm2d, 2), (2, 2, 2)), *DENSE)
add("InstanceNorm1d, running statistics", partial(on_images, partial(nn.InstanceNorm1d, 2, track_running_stats=True), (2, 3)), "opaque")
add(
    "InstanceNorm1d, training",
    lambda N: classify(Sequential(Linear(3, 4), Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, 0.1, track_running_stats=True), Flatten()), randn(N, 3)),
    *DENSE,
)
add("LocalResponseNorm", partial(on_images, partial(nn.LocalResponseNorm, 2, alpha=0.7, k=0.6), (3, 2)), *DENSE)
add("BatchNorm1d, evaluation", partial(between, partial(nn.BatchNorm1d, 4)), "chain", "other parameters")
add("BatchNorm1d, positions, evaluation", partial(on_images, partial(nn.BatchNorm1d, 2), (2, 2)), "chain", "other parameters")
add("BatchNorm2d, no parameters, evaluation", partial(on_images, partial(nn.BatchNorm2d, 2, affine=False), (2, 2, 2)), "chain")

NORM = partial(nn.LayerNorm, 3)
graph("LayerNorm, samples second", sequence_first, layers(3, 3, 4, tanh=NORM), (2, 3), "other parameters")
graph("LayerNorm, samples folded", folded, layers(3, 3, 4, tanh=NORM), (2, 3), "other parameters")
graph("BatchNorm1d, samples folded", folded, layers(3, 2, 4, tanh=lambda: spread(nn.BatchNorm1d(2))), (2, 3), "other parameters")


def pre_norm(net: Net, x: Tensor) -> Tensor:
    """Use one normalisation twice, around a residual connection."""  # noqa: DOC201
    h = net.a(x)
    return net.c(net.norm(h + net.b(net.norm(h))))


graph("LayerNorm twice", pre_norm, layers(3, 3, 3, 4, norm=NORM), (3,), "reused", "curved", "other parameters")

LAYERS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "LayerNorm": (partial(nn.LayerNorm, 4), (4,)),
    "LayerNorm, extra axis": (partial(nn.LayerNorm, 4, eps=0.1), (2, 4)),
    "LayerNorm, two axes": (partial(nn.LayerNorm, (3, 2)), (2, 3, 2)),
    "LayerNorm, all axes": (partial(nn.LayerNorm, (3, 2)), (3, 2)),
    "LayerNorm, no bias": (partial(nn.LayerNorm, 4, bias=False), (2, 4)),
    "LayerNorm, no parameters": (partial(nn.LayerNorm, 4, elementwise_affine=False), (2, 4)),
    "RMSNorm": (partial(nn.RMSNorm, 4), (2, 4)),
    "RMSNorm, two axes": (partial(nn.RMSNorm, (3, 2), eps=0.1), (2, 3, 2)),
    "RMSNorm, no parameters": (partial(nn.RMSNorm, 4, elementwise_affine=False), (4,)),
    "GroupNorm": (partial(nn.GroupNorm, 2, 4), (4, 2, 2)),
    "GroupNorm, vectors": (partial(nn.GroupNorm, 2, 6, eps=0.1), (6,)),
    "GroupNorm, one group": (partial(nn.GroupNorm, 1, 2), (2, 3)),
    "GroupNorm, no parameters": (partial(nn.GroupNorm, 2, 4, affine=False), (4, 3)),
    "InstanceNorm1d": (partial(nn.InstanceNorm1d, 2), (2, 4)),
    "InstanceNorm1d, parameters": (partial(nn.InstanceNorm1d, 2, affine=True), (2, 4)),
    "InstanceNorm2d": (partial(nn.InstanceNorm2d, 2, affine=True, eps=0.1), (2, 2, 3)),
    "InstanceNorm3d": (partial(nn.InstanceNorm3d, 2, affine=True), (2, 2, 1, 3)),
    "LocalResponseNorm": (partial(nn.LocalResponseNorm, 3, alpha=0.5, beta=0.6, k=2.0), (4, 2)),
    "LocalResponseNorm, even": (partial(nn.LocalResponseNorm, 2, alpha=0.5), (3, 2, 2)),
    "LocalResponseNorm, one channel": (partial(nn.LocalResponseNorm, 3, alpha=0.5), (1, 4)),
    "BatchNorm1d": (partial(nn.BatchNorm1d, 4), (4,)),
    "BatchNorm1d, positions": (partial(nn.BatchNorm1d, 2), (2, 3)),
    "BatchNorm2d": (partial(nn.BatchNorm2d, 2, eps=0.1), (2, 2, 3)),
    "BatchNorm2d, no parameters": (partial(nn.BatchNorm2d, 2, affine=False), (2, 2, 3)),
    "BatchNorm3d": (partial(nn.BatchNorm3d, 2), (2, 2, 1, 3)),
    "SyncBatchNorm": (partial(nn.SyncBatchNorm, 2), (2, 3)),
}
for _name, (_make, _shape) in LAYERS.items():
    layer(_name, lambda make=_make: spread(make()), _shape)
