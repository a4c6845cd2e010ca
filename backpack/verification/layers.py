"""What Kronecker factors are defined by: the inputs of layers, and a probe, a bias of zeros, that is added to their outputs.

The output factor of a weight is the block of a bias that is added to all outputs of all its uses. The input factor is the second moment of what a
row of the weight is multiplied with, ``x_k``: the layer's output if a single entry of the weight is one, all others zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad
from torch.func import functional_call
from torch.nn import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    EmbeddingBag,
    Linear,
    Module,
    Parameter,
)

_CONVOLUTIONS = (Conv1d, Conv2d, Conv3d)
_TRANSPOSED = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
_TURNS = ("TBackward", "TransposeBackward", "PermuteBackward")
"""Operations that are no use of a weight themselves: what comes of them may be used more than once."""


def _kind(module: Module) -> type[Module] | None:
    return next((cls for cls in (*_CONVOLUTIONS, *_TRANSPOSED, Linear, Embedding, EmbeddingBag) if isinstance(module, cls)), None)


class Layer:
    """All calls of layers of one kind with the same weight.

    Attributes:
        groups: Number of groups.
        diagonal: Whether the factor of the input is a diagonal.
        input_first: Whether the factor of the input comes first.
        probe: What is added to the output of each call, ``[groups * O]``.
        calls: Module and arguments of each call.
        results: What each call has returned, with the probe.
    """

    def __init__(self, module: Module, outputs: int) -> None:
        """Describe a layer.

        Args:
            module: The first module that is called with the weight.
            outputs: Number of its output channels.
        """
        self.weight = module.weight
        self.kind = _kind(module)
        self.groups = getattr(module, "groups", 1) if self.kind in (*_CONVOLUTIONS, *_TRANSPOSED) else 1
        self.diagonal, self.input_first = self.kind is Embedding, self.kind in (None, Embedding, EmbeddingBag)
        self.probe = torch.zeros(outputs, dtype=self.weight.dtype, device=self.weight.device, requires_grad=True)
        self.calls: list[tuple[Module, tuple, dict[str, Any]]] = []
        self.results: list[Tensor] = []

    def add_probe(self, output: Tensor, module: Module, args: tuple) -> Tensor:
        """Add the bias of zeros.

        Args:
            output: Of a call.
            module: The module that was called.
            args: Arguments of the call.

        Returns:
            The same numbers.
        """
        if self.kind is Embedding and module.padding_idx is not None:
            return output + self.probe * (args[0] != module.padding_idx).unsqueeze(-1)
        return output + self.probe.reshape(-1, *[1] * (self.weight.dim() - 2 if self.kind in (*_CONVOLUTIONS, *_TRANSPOSED) else 0))

    def input_scores(self, gradient: Tensor, group: int) -> Tensor:
        """Say which inputs matter.

        Args:
            gradient: Of the weight.
            group: Which group.

        Returns:
            ``[K]``.
        """
        by_output = gradient.abs()
        if self.kind in _TRANSPOSED:
            return by_output.unflatten(0, (self.groups, -1))[group].sum(1).flatten()
        if self.input_first:
            return by_output.sum(1)
        return by_output.unflatten(0, (self.groups, -1))[group].sum(0).flatten()

    def copies(self, output: Tensor) -> list[int] | None:
        """Say how often a call would have to be made if each sample had rows of its own.

        Args:
            output: What the model returned, in its graph, ``[N, *]``.

        Returns:
            For each call 1, or the number of samples if several of them use the same entry of what it has returned: then all see it. ``None`` if
            nobody uses any of it, as scores of a single position in front of a softmax: nothing tells it then.
        """
        rows, numbers, counts = output.reshape(len(output), -1), torch.arange(len(output)), [1] * len(self.results)
        totals = rows @ torch.linspace(1, 2, rows.shape[1]).to(rows)
        for bit in range((len(output) - 1).bit_length()):  # in which any two samples differ at least once
            used = []
            for value in (0, 1):
                chosen = totals[(numbers >> bit) & 1 == value].sum()
                used.append([g != 0 for g in grad(chosen, self.results, retain_graph=True, materialize_grads=True)])
            if not any((one | other).any() for one, other in zip(*used, strict=True)):
                return None
            counts = [len(output) if (one & other).any() else count for one, other, count in zip(*used, counts, strict=True)]
        return counts

    def inputs(self, indices: Sequence[int], group: int, counts: Sequence[int]) -> Tensor:
        """Return what rows of the weight are multiplied with, at all samples and positions of all calls.

        Args:
            indices: Which entries ``k`` of a row.
            group: Which group.
            counts: How often to count each call.

        Returns:
            ``[K, positions]``.
        """
        with torch.no_grad():
            found = [torch.stack([self._input(k, group, *call).flatten() for k in indices]) for call in self.calls]
            return torch.cat([inputs.repeat(1, count) for inputs, count in zip(found, counts, strict=True)], dim=1)

    def _input(self, k: int, group: int, module: Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if self.kind is Embedding:
            return ((args[0] == k) & (k != module.padding_idx)).to(self.weight.dtype)
        if self.kind in (None, Linear):
            return args[0][..., k]
        unit, bare = torch.zeros_like(self.weight, memory_format=torch.contiguous_format), copy(module)
        bare._forward_hooks, bare._forward_pre_hooks = {}, {}
        if self.kind is EmbeddingBag:
            unit[k, 0], bare.max_norm = 1, None
            return functional_call(bare, {"weight": unit}, args, kwargs)[:, 0]
        if self.kind in _TRANSPOSED:
            channel, place = divmod(k, unit[0, 0].numel())
            unit.unflatten(0, (self.groups, -1))[group, channel, 0].view(-1)[place] = 1
        else:
            unit.unflatten(0, (self.groups, -1))[group, 0].view(-1)[k] = 1
        state = {"weight": unit} | ({} if module.bias is None else {"bias": torch.zeros_like(module.bias)})
        return functional_call(bare, state, args, kwargs).unflatten(1, (self.groups, -1))[:, group, 0]


class Layers:
    """The layers of a model, observed during one forward pass."""

    def __init__(self, model: Module) -> None:
        """Install hooks.

        Args:
            model: The model.
        """
        self._found: dict[Parameter, Layer] = {}
        self._handles = [
            module.register_forward_hook(self._observe, with_kwargs=True, prepend=True)
            for module in model.modules()
            if isinstance(module._parameters.get("weight"), Parameter)
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def probes(self) -> list[Tensor]:
        """The probes of all layers."""
        return [layer.probe for layer in self._found.values()]

    def _observe(self, module: Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor | None:
        weight = module.weight
        if not weight.requires_grad or not args or not isinstance(output, Tensor) or not self._known(module, args, output):
            return None
        if weight not in self._found:
            grouped = module.groups if isinstance(module, _TRANSPOSED) else 0
            outputs = weight.shape[1] * grouped if grouped else output.shape[-1] if weight.dim() == 2 else len(weight)
            self._found[weight] = Layer(module, outputs)
        layer = self._found[weight]
        if layer.kind is not _kind(module):
            return None  # a weight in two roles: not all of its uses are counted
        given = tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in args)
        layer.calls.append((copy(module), given, kwargs))  # with the options of this call
        layer.results.append(layer.add_probe(output, module, args))
        return layer.results[-1]

    @staticmethod
    def _known(module: Module, args: tuple, output: Tensor) -> bool:
        """Tell whether a call is that of a layer whose factors have a definition.

        Args:
            module: The module.
            args: Its arguments.
            output: Its output.

        Returns:
            Whether it is one of torch's, or any other that computes ``x @ weight`` and perhaps adds ``bias``.
        """
        kind = _kind(module)
        if kind is not None:
            return type(module).forward is kind.forward and getattr(module, "mode", None) != "max"
        x, weight = args[0], module.weight
        if weight.dim() != 2 or not isinstance(x, Tensor) or x.dtype != weight.dtype or not x.shape or x.shape[-1] != len(weight):
            return False
        bias = module._parameters.get("bias")
        if bias is not None and (bias.shape != weight.shape[1:] or bias.dtype != weight.dtype):
            return False
        with torch.no_grad():
            product = x @ weight if bias is None else x @ weight + bias
            return (output.shape, output.dtype) == (product.shape, product.dtype) and torch.allclose(output, product)

    def of(self, weight: Tensor, output: Tensor) -> Layer | None:
        """Find the layer of a parameter.

        Args:
            weight: The parameter.
            output: End of the graph.

        Returns:
            ``None`` if it is the weight of none, or is also used elsewhere.
        """
        layer = self._found.get(weight)
        return layer if layer is not None and uses(output).get(weight) == len(layer.calls) else None


def uses(output: Tensor) -> dict[Tensor, int]:
    """Count how often the leaves of a graph are used.

    Args:
        output: End of the graph.

    Returns:
        Leaf to number of uses.
    """
    counts: dict[Tensor, int] = {}
    seen, stack = set(), [output.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:
            if hasattr(node, "variable"):
                counts[node.variable] = counts.get(node.variable, 0) + 1
            elif node is not None and node not in seen:
                if not node.name().startswith(_TURNS):
                    seen.add(node)
                stack.append(node)
    return counts
