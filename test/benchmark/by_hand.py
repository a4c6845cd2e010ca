"""The floor: the least that an expert writes for exactly this network and quantity, with PyTorch alone; ``extended`` is what hooks cost at least.

Autograd computes the gradients of the outputs of layers; all else is arithmetic on those and on the inputs of layers. What cuts it short: columns of a
softmax are one less than classes; a symmetric matrix is computed by half; sums over samples add up what per-sample gradients were computed for. Of
backpack only ``pages`` is used, which is about memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from problems import Classifier
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, log_softmax, nll_loss, scaled_dot_product_attention, unfold

from backpack.utils import pages

FIRST = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
QUANTITIES = {
    "logreg": ("extended", *FIRST, "DiagGGNMC", "DiagGGNExact", "KFAC", "KFLR"),
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
"""Columns of a convolutional network that are carried at once."""


MIRROR = 500
"""From so many columns on, the half of a symmetric product is copied instead of computed."""


class Layer(NamedTuple):
    """A layer that was called; ``x`` is what its weight is multiplied with."""

    weight: Tensor
    bias: Tensor
    x: Tensor
    out: Tensor


Forward = Callable[[nn.Module, Tensor], tuple[list[Layer], Tensor]]
Call = tuple[nn.Module, Tensor]


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
        return torch.bmm(g[:, :, None], x[:, None, :], out=pages.empty((*g.shape, x.shape[1]), x))
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


Results = dict[Tensor, object]


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


def square(matrix: Tensor, strips: int = 4) -> Tensor:
    """Compute ``matrix^T matrix`` in strips, of which each leaves out what the one before had."""
    size = matrix.shape[1]
    if size < MIRROR:
        return matrix.t() @ matrix
    result, ends = matrix.new_empty(size, size), [size * strip // strips for strip in range(strips + 1)]
    for start, end in zip(ends, ends[1:], strict=False):
        strip = torch.mm(matrix[:, start:end].t(), matrix[:, start:], out=result[start:end, start:])
        result[end:, start:end] = strip[:, end - start :].t()
    return result


def drawn(p: Tensor) -> Tensor:
    """A column for each sample whose square is in the mean the Hessian of the loss: the gradient of a label that is drawn, [N, C]."""
    labels = torch.multinomial(p, 1, replacement=True)
    return p.scatter_add(1, labels, -torch.ones_like(p[:, :1])).div_(len(p) ** 0.5)


def columns(p: Tensor) -> Tensor:
    """The columns of Cholesky's factor of the Hessian of the loss, one less than classes, [C - 1, N, C]."""
    rest = p.flip(1).cumsum(1).flip(1)  # of this class and all behind it
    here, behind = rest[:, :-1], rest[:, 1:]
    factor = -p[:, None, :].expand(-1, p.shape[1] - 1, -1).triu(1)
    factor.diagonal(dim1=1, dim2=2).copy_(behind)
    return (factor * (p[:, :-1] / (here * behind * len(p))).sqrt()[:, :, None]).transpose(0, 1)


def carried(calls: list[Call], s: Tensor) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Carry columns at the output of a sequence, ``[V * N, C]``, to the output of each layer, from the last to the first one."""
    first = next(module for module, _ in calls if hasattr(module, "weight"))
    for module, x in reversed(calls):
        if hasattr(module, "weight"):
            yield module, x, s
            if module is first:
                return
        if isinstance(module, nn.Linear):
            s = s @ module.weight
        elif isinstance(module, nn.Conv2d):
            like = s.new_empty((len(s), *x.shape[1:]))
            arguments = module.stride, module.padding, module.dilation, False, (0, 0), 1
            s = torch.ops.aten.convolution_backward(s, like, module.weight, None, *arguments, (True, False, False))[0]
        elif isinstance(module, nn.ReLU):
            s = s.unflatten(0, (-1, len(x))).mul_(x > 0).flatten(0, 1)
        elif isinstance(module, nn.AvgPool2d):
            s = (s / module.kernel_size**2)[:, :, None, None].repeat(1, 1, module.kernel_size, module.kernel_size)


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return what is to be timed."""
    parameters = list(model.parameters())
    forward = transformer if isinstance(model, Classifier) else sequence

    def run() -> list[object]:
        model.zero_grad()
        layers, out = forward(model, x)
        logs = log_softmax(out, 1)
        loss = nll_loss(logs, y)
        results = first_order(quantity, layers, loss)
        return [results[p] for p in parameters]

    return run
