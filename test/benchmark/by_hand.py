"""The floor: the least that an expert writes for exactly this network and quantity, with PyTorch alone; ``extended`` is what hooks cost at least.

Autograd computes the gradients of the outputs of layers; all else is arithmetic on those and on the inputs of layers. What cuts it short: a softmax
has one column less than classes; a symmetric matrix is computed by half; where per-sample gradients are computed, their sum is the gradient. Of
backpack only ``pages`` is used, which is about memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.fx.experimental.symbolic_shapes  # noqa: F401  autograd.grad loads it at its first call with columns, which is no memory of the quantity
from problems import Classifier
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, log_softmax, nll_loss, scaled_dot_product_attention, unfold

from backpack.utils import pages

FIRST = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
EXACT = ("DiagGGNExact", "DiagHessian", "KFLR")
QUANTITIES = {
    "logreg": ("extended", *FIRST, "DiagGGNMC", "DiagGGNExact", "KFAC", "KFLR"),
    "deep": ("extended", *FIRST, "DiagGGNMC"),
    "mlp": ("extended", *FIRST, "DiagGGNMC", "DiagGGNExact", "DiagHessian", "KFAC", "KFLR"),
    "3c3d": ("extended",),
    "All-CNN-C": ("extended", "DiagGGNExact", "KFLR"),
    "ResNet": ("extended",),
    "LSTM": ("extended",),
    "transformer": ("extended", *FIRST, "DiagGGNMC", "KFAC"),
    "GPT-2": ("extended",),
}
"""What is written here for which problem."""
BLOCK = 10
"""Columns that are carried at once."""
MIRROR = 2**16
"""Entries of a matrix from which on half of its square is copied from the other half."""
Results = dict[Tensor, object]


class Layer(NamedTuple):
    """A layer that was called; ``x`` is what its weight is multiplied with."""

    weight: Tensor
    bias: Tensor
    x: Tensor
    out: Tensor


class Call(NamedTuple):
    """A module of a sequence that was called; ``kept`` is what its curvature needs."""

    module: nn.Module
    shape: torch.Size
    kept: Tensor | None


def sequence(model: nn.Sequential, x: Tensor) -> tuple[list[Layer], Tensor]:
    """Call the modules of a sequence."""
    layers = []
    for module in model:
        out = module(x)
        if isinstance(module, nn.Linear):
            layers.append(Layer(module.weight, module.bias, x.detach(), out))
        x = out
    return layers, x


def transformer(model: Classifier, x: Tensor) -> tuple[list[Layer], Tensor]:
    """Compute what the modules of the classifier compute."""
    layers: list[Layer] = []

    def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layers.append(Layer(weight, bias, x.detach(), out := linear(x, weight, bias)))
        return out

    def norm(x: Tensor, module: nn.LayerNorm) -> Tensor:
        out, mean, deviation = torch.native_layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
        layers.append(Layer(module.weight, module.bias, (x.detach() - mean) * deviation, out))
        return out

    for block in model.encoder.layers:
        attention = block.self_attn
        qkv = affine(norm(x, block.norm1), attention.in_proj_weight, attention.in_proj_bias).unflatten(-1, (3, attention.num_heads, -1))
        mixed = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(-2)
        x = x + affine(mixed, attention.out_proj.weight, attention.out_proj.bias)
        hidden = gelu(affine(norm(x, block.norm2), block.linear1.weight, block.linear1.bias))
        x = x + affine(hidden, block.linear2.weight, block.linear2.bias)
    return layers, affine(x.mean(1), model.head.weight, model.head.bias)


def by_sample(x: Tensor, g: Tensor) -> Iterator[Tensor]:
    """Gradients of a weight that is used at all positions, one sample after the other, in the same memory, which stays in the cache."""
    buffer = x.new_empty(g.shape[-1], x.shape[-1])
    for one, other in zip(x, g, strict=True):
        yield torch.mm(other.t(), one, out=buffer)


def sum_of_squares(x: Tensor, g: Tensor) -> Tensor:
    """Squares of the gradients of a matrix, summed over samples."""
    if g.dim() == 2:
        return g.square().t() @ x.square()
    squares = x.new_zeros(g.shape[-1], x.shape[-1])
    for gradient in by_sample(x, g):
        squares.addcmul_(gradient, gradient)
    return squares


def finish(quantity: str, per_sample: Tensor) -> Tensor:
    """A quantity from per-sample gradients; of the variance the squares."""
    if quantity == "BatchL2Grad":
        return per_sample.square().sum(1)
    return per_sample if quantity == "BatchGrad" else per_sample.square().sum(0)


def without_positions(quantity: str, x: Tensor, g: Tensor) -> Tensor:
    """A quantity of a matrix that is used once for each sample."""
    if quantity == "BatchGrad":
        return torch.mul(g[:, :, None], x[:, None, :], out=pages.empty((*g.shape, x.shape[1]), x))
    if quantity == "BatchL2Grad":
        return torch.linalg.vector_norm(g, dim=1).mul_(torch.linalg.vector_norm(x, dim=1)).square_()
    return sum_of_squares(x, g)


def with_positions(quantity: str, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a matrix that is used at all positions, and a quantity."""
    if quantity == "BatchGrad":
        per_sample = torch.bmm(g.transpose(1, 2), x, out=pages.empty((len(g), g.shape[-1], x.shape[-1]), x))
        return per_sample.sum(0), per_sample
    total = x.new_zeros(g.shape[-1], x.shape[-1])
    squares, norms = torch.zeros_like(total), []
    for gradient in by_sample(x, g):
        total.add_(gradient)
        if quantity == "BatchL2Grad":
            norms.append(gradient.flatten().dot(gradient.flatten()))
        else:
            squares.addcmul_(gradient, gradient)
    return total, torch.stack(norms) if norms else squares


def first_order(quantity: str, layers: list[Layer], loss: Tensor) -> Results:
    """Set all gradients; return a quantity of first order."""
    once = [layer for layer in layers if layer.out.dim() == 2]  # there, sums over samples cost less than what is summed
    wanted = [layer.out for layer in layers] + [p for layer in once for p in (layer.weight, layer.bias)]
    gradients = torch.autograd.grad(loss, wanted)
    for p, gradient in zip(wanted[len(layers) :], gradients[len(layers) :], strict=True):
        p.grad = gradient
    results: Results = {}
    for (weight, bias, x, out), g in zip(layers, gradients, strict=False):
        per_sample = g
        if out.dim() == 2:
            results[weight] = without_positions(quantity, x, g)
        else:
            per_sample = g.sum(1)
            bias.grad = per_sample.sum(0)
            if weight.dim() == 1:
                scales = (g * x).sum(1)
                weight.grad, results[weight] = scales.sum(0), finish(quantity, scales)
            else:
                weight.grad, results[weight] = with_positions(quantity, x, g)
        results[bias] = finish(quantity, per_sample)
    if quantity == "Variance":
        samples = len(layers[0].x)
        for p, squares in results.items():
            squares.div_(samples).addcmul_(p.grad, p.grad, value=-1 / samples**2)
    return results


def square(matrix: Tensor, divisor: int = 1, strips: int = 4) -> Tensor:
    """Compute ``matrix^T matrix / divisor`` in strips, of which each leaves out what those before had."""
    if matrix.numel() < MIRROR:
        strips = 1
    size = matrix.shape[1]
    result, ends = matrix.new_empty(size, size), [size * strip // strips for strip in range(strips + 1)]
    for start, end in zip(ends, ends[1:], strict=False):
        strip = result[start:end, start:].addmm_(matrix[:, start:end].t(), matrix[:, start:], beta=0, alpha=1 / divisor)
        result[end:, start:end] = strip[:, end - start :].t()
    return result


def drawn(p: Tensor) -> Tensor:
    """A column for each sample whose square is in the mean the Hessian of the loss: the gradient of a label that is drawn, [N, C]."""
    labels = torch.multinomial(p, 1, replacement=True)
    return p.scatter_add(1, labels, -torch.ones_like(p[:, :1])).div_(len(p) ** 0.5)


def factor(p: Tensor) -> Tensor:
    """The columns of Cholesky's factor of the Hessian of the loss, one less than classes, [C - 1, N, C]."""
    rest = p.flip(1).cumsum(1).flip(1)  # of this class and all behind it
    here, behind = rest[:, :-1], rest[:, 1:]
    columns = -p[:, None, :].expand(-1, p.shape[1] - 1, -1).triu(1)
    columns.diagonal(dim1=1, dim2=2).copy_(behind)
    return (columns * (p[:, :-1] / (here * behind * len(p))).sqrt()[:, :, None]).transpose(0, 1)


@torch.no_grad()
def called(module: nn.Module, x: Tensor, out: Tensor) -> Call:
    """Keep of a call what is needed: the slopes of a ReLU, and what a weight is multiplied with, of a convolution ``[N, L, K]``."""
    kept = None
    if isinstance(module, nn.Linear):
        kept = x
    elif isinstance(module, nn.Conv2d):
        kept = unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).transpose(1, 2).contiguous()
    elif isinstance(module, nn.ReLU):
        kept = out.sign().contiguous(memory_format=torch.channels_last) if out.dim() == 4 else out.sign()
    return Call(module, x.shape, kept)


def carried(calls: list[Call], s: Tensor) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Carry columns at the output of a sequence, ``[V * N, C]``, to the output of each layer, from the last to the first one."""
    for module, shape, kept in reversed(calls):
        if hasattr(module, "weight"):
            yield module, kept, s
            if module is calls[0].module:
                return
        if isinstance(module, nn.Linear):
            s = s @ module.weight
        elif isinstance(module, nn.Conv2d):
            like = torch.empty((len(s), *shape[1:]), dtype=s.dtype, device=s.device, memory_format=torch.channels_last)  # tells a shape
            arguments = module.stride, module.padding, module.dilation, False, (0, 0), 1
            s = torch.ops.aten.convolution_backward(s, like, module.weight, None, *arguments, (True, False, False))[0]
        elif isinstance(module, nn.ReLU):
            s.unflatten(0, (-1, len(kept))).mul_(kept)
        elif isinstance(module, nn.AvgPool2d):
            size = module.kernel_size
            s = (s / size**2)[:, :, None, None].expand(-1, -1, size, size).contiguous(memory_format=torch.channels_last)


def of_matrix(x: Tensor, squares: Tensor) -> list[Tensor]:
    """The diagonal of weight and bias from that of the outputs, [N, O], of a matrix that is used once for each sample."""
    return [squares.t() @ x.square(), squares.sum(0)]


def of_convolution(x: Tensor, s: Tensor) -> list[Tensor]:
    """The diagonal of weight and bias, of a convolution."""
    s = s.permute(0, 2, 3, 1).flatten(1, 2).unflatten(0, (-1, len(x)))  # [V, N, L, O], as it lies in memory
    squares = x.new_zeros(s.shape[-1], x.shape[-1])
    buffer = torch.empty_like(squares)
    for n, column in enumerate(x):
        for one in s[:, n]:
            torch.mm(one.t(), column, out=buffer)
            squares.addcmul_(buffer, buffer)
    return [squares, s.sum(2).square().sum((0, 1))]


def summed(calls: list[Call], s: Tensor, kronecker: bool) -> dict[nn.Module, list[Tensor]]:
    """Carry columns in blocks; add up the diagonals of weight and bias, or the Kronecker factor of the outputs."""
    totals: dict[nn.Module, list[Tensor]] = {}
    for block in s.split(BLOCK * len(calls[0].kept)):
        for module, x, at in carried(calls, block):
            if kronecker:
                parts = [square(at if at.dim() == 2 else at.sum((2, 3)))]
            elif at.dim() == 2:
                first, *others = at.split(len(x))
                squares = first.square()
                for other in others:
                    squares.addcmul_(other, other)
                parts = of_matrix(x, squares)
            else:
                parts = of_convolution(x, at)
            totals[module] = [one.add_(other) for one, other in zip(totals[module], parts, strict=True)] if module in totals else parts
    return totals


@torch.no_grad()
def exact(quantity: str, calls: list[Call], p: Tensor) -> Results:
    """A quantity of second order of a sequence, from the probabilities of the classes; with ReLU, the Hessian is the GGN."""
    kronecker, (last, _, x) = quantity == "KFLR", calls[-1]
    kept = {call.module: call.kept for call in calls if hasattr(call.module, "weight")}
    if isinstance(last, nn.Linear):  # there, the Hessian is known without columns
        if kronecker:
            totals = {last: [torch.diag(p.sum(0)).addmm_(p.t(), p, alpha=-1).div_(len(p))]}
        else:
            totals = {last: of_matrix(x, torch.addcmul(p, p, p, value=-1).div_(len(p)))}
        if calls := calls[:-1]:
            totals |= summed(calls, factor(p).flatten(0, 1) @ last.weight, kronecker)
    else:
        totals = summed(calls, factor(p).flatten(0, 1), kronecker)
    results: Results = {}
    for module, x in kept.items():
        if kronecker:
            output = totals[module]
            results[module.weight], results[module.bias] = [*output, square(x.flatten(0, -2), len(p))], output
        else:
            results[module.weight], results[module.bias] = totals[module][0].view_as(module.weight), totals[module][1]
    return results


@torch.no_grad()
def sampled(quantity: str, layers: list[Layer], out: Tensor, p: Tensor) -> Results:
    """A quantity of second order from one label for each sample."""
    results: Results = {}
    kronecker, s, inner = quantity == "KFAC", drawn(p), [layer.out for layer in layers[:-1]]
    columns = (*torch.autograd.grad(out, inner, s), s) if inner else (s,)
    for (weight, bias, x, _), s in zip(layers, columns, strict=True):
        bias_s = s if s.dim() == 2 else s.sum(1)
        results[bias] = [square(bias_s)] if kronecker else bias_s.square().sum(0)
        if weight.dim() == 1:
            weight_s = (s * x).sum(1)
            results[weight] = [square(weight_s)] if kronecker else weight_s.square().sum(0)
        else:
            results[weight] = [*results[bias], square(x.flatten(0, -2), len(p))] if kronecker else sum_of_squares(x, s)
    return results


def hooked(model: nn.Module) -> None:
    """Be called at the output of each module and when its gradient arrives, and keep the inputs of those with parameters, for no further use."""

    def nothing(gradients: tuple[Tensor, ...]) -> None:
        pass

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
        node = (out[0] if isinstance(out, tuple) else out).grad_fn
        if node is not None:
            if module._parameters:
                node.metadata["input"] = inputs[0].detach()
            node.register_prehook(nothing)

    for module in model.modules():
        if module._parameters or not module._modules:
            module.register_forward_hook(keep)


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return what is to be timed; all gradients are set, too."""
    parameters = list(model.parameters())

    def gradient() -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    def by_layers() -> list[object]:
        model.zero_grad()
        layers, out = (transformer if isinstance(model, Classifier) else sequence)(model, x)
        logs = log_softmax(out, 1)
        loss = nll_loss(logs, y)
        if quantity in FIRST:
            results = first_order(quantity, layers, loss)
        else:
            loss.backward(retain_graph=True)
            results = sampled(quantity, layers, out, logs.detach().exp())
        return [results[p] for p in parameters]

    def by_columns() -> list[object]:
        model.zero_grad()
        calls, out = [], x
        for module in model:
            given, out = out, module(out)
            if calls or hasattr(module, "weight"):  # what is before the first layer needs no columns
                calls.append(called(module, given.detach(), out.detach()))
        logs = log_softmax(out, 1)
        nll_loss(logs, y).backward()
        results = exact(quantity, calls, logs.detach().exp())
        return [results[p] for p in parameters]

    if quantity == "extended":
        hooked(model)
        return gradient
    return by_columns if quantity in EXACT else by_layers
