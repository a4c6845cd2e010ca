"""Crossings: how a graph node that no rule covers carries the samples of the mini-batch to its inputs."""

from __future__ import annotations

from collections.abc import Callable, Container
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.batches import place_of
from backpack.core.graph import (
    LINEAR,
    PIECEWISE_LINEAR,
    PRODUCTS,
    call_node,
    operation,
    outputs_of,
    saved,
    saved_tensors,
    settings_of,
    shape_of,
    tensor_at,
)
from backpack.core.samples import Layout, after_sum, decode, probe, split, sum_to
from backpack.core.walk import Walk
from backpack.utils.columns import blocks

# operations whose way with samples follows from shapes and settings; a sum of products, in which zeros in the data can hide samples, is none
_STATIC = LINEAR - frozenset(
    """Index IndexSelect IndexAdd IndexCopy IndexFill IndexPut Gather Take AsStrided MaskedSelect Scatter ScatterAdd Where MaxUnpool2D MaxUnpool3D
    Embedding BackwardHookFunctionBackward Nansum PackPaddedSequence""".split()
)
ELEMENTWISE = frozenset(
    """Relu Gelu Silu Tanh Sigmoid LogSigmoid Softplus Elu LeakyRelu Hardtanh Hardswish Hardsigmoid Mish Abs Exp Log Sqrt Rsqrt Square Pow
    Erf Sin Cos Neg Clone ToCopy NativeDropout Clamp Sign Sgn Round Floor Ceil Trunc Frac Deg2Rad Rad2Deg""".split()
)
"""Operations that treat every entry alone."""
LOOKUPS = frozenset("Embedding Index IndexSelect".split())
"""Operations that select rows of a table."""
# all that these depend on is in the graph, but for settings and random numbers, if each of their inputs is
_OF_INPUTS = ELEMENTWISE | PRODUCTS | _STATIC - {"MaskedFill"} | {"Softmax", "NativeLayerNorm"}
MATRIX_PRODUCTS = PRODUCTS - {"Mul", "MulScalar", "Addcmul", "PreluKernel", "LinalgCross"}
"""Operations that sum over products."""
_ENTRYWISE = frozenset("Add Sub Rsub Mul Div Where MaskedFill Index IndexSelect".split())
# the gradient that the node returns has the shape of the output: autograd sums it to that of an input that was broadcast
_BROADCASTING = frozenset("Mul Div Add Sub Expand Fmod Remainder Copysign".split())
# these work on the last two axes, and on each entry of the axes in front alike
_STACKED = frozenset(
    """Bmm ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
    ScaledDotProductCudnnAttention""".split()
)
_MASKED = 2**24
"""Entries of columns that are masked at once."""


def is_of_parameter(walk: Walk, node: Node, samples: int | None = None, is_constant: Callable[[Tensor], bool] | None = None) -> bool:
    """Say whether a node makes something of parameters, and of nothing else, so of no data.

    Args:
        walk: The graph.
        node: The node.
        samples: Number of samples, if constants and rows of a table count, too, as long as there are not as many.
        is_constant: Says of a tensor that a matrix is multiplied with whether it is known to be the same for all samples.

    Returns:
        Whether it does.
    """
    stack, pure, few = [node], True, samples is not None
    given: dict[Node | None, bool] = {None: False}  # whether something else takes part that is not known to be constant
    while stack and (pure or few):
        node = stack[-1]
        upstream = [n if walk.is_tracked(n) else None for n, _ in node.next_functions]
        waits = [n for n in upstream if n not in given]
        stack += waits
        if waits:
            continue
        stack.pop()
        if node in walk.leaves:
            given[node] = False
        elif operation(node) == "Embedding":
            given[node] = samples is None or samples in rows_looked_up(node)
            pure, few = pure and not given[node], few and not given[node]
        else:
            data = None in upstream or operation(node) not in _OF_INPUTS
            pure = pure and not data
            data = data and few and not _uses_constants(walk, node, is_constant)
            given[node] = data or any(given[n] for n in upstream if n is not None)
            few = few and not (data and operation(node) not in _ENTRYWISE) and not (given[node] and any(r % samples == 0 for r in rows_made(node)))
    return pure or few


def _uses_constants(walk: Walk, node: Node, is_constant: Callable[[Tensor], bool]) -> bool:
    # whether what takes part beside the graph is known to be constant, a number, or to have no rows of its own
    if operation(node) in _ENTRYWISE and any(walk.is_tracked(n) and shape_of((n, nr)) == shape_of((node, 0)) for n, nr in node.next_functions):
        return True
    others = [
        tensor for tensor in saved_tensors(node, results=False) if not (is_made(walk, tensor) and tensor.requires_grad)
    ]  # frozen parameters are others
    if operation(node) in PIECEWISE_LINEAR:  # the places of maxima
        others = [tensor for tensor in others if tensor.is_floating_point()]
    if not others:
        return not isinstance(node, BackwardCFunction) and all(walk.is_tracked(n) for n, _ in node.next_functions)
    return all(not tensor.dim() or is_constant(tensor) for tensor in others)


def is_made(walk: Walk, tensor: Tensor) -> bool:
    """Say whether a tensor is a parameter, or was made of tracked ones.

    Args:
        walk: The graph.
        tensor: A tensor that a node has saved, or a module was called with.

    Returns:
        Whether it is or was.
    """
    return isinstance(tensor, Parameter) or walk.is_tracked(tensor.grad_fn)


def rows_made(node: Node) -> torch.Size:
    """Return the lengths of the axes of what a node makes on which samples lie, usually.

    Args:
        node: The node.

    Returns:
        The first two; without that of features.
    """
    shape = shape_of((node, 0))
    return shape[:-1][:2] or shape


def rows_looked_up(node: Node) -> torch.Size:
    """Return the lengths of the axes of indices on which samples lie, usually.

    Args:
        node: Node of an embedding.

    Returns:
        The first two; none for a single axis of positions, or with an axis of length one in front.
    """
    shape = saved(node, "indices").shape
    return shape[:2] if len(shape) > 1 and shape[0] != 1 else shape[:0]


def brings_rows(walk: Walk, node: Node, samples: int) -> bool:
    """Say whether a node may bring in data of samples, as far as shapes tell.

    Args:
        walk: The graph.
        node: The node.
        samples: Number of samples.

    Returns:
        Whether some input depends on no tracked parameter, and what the node makes has as many rows as there are samples, and another shape than
        its other inputs; or rows are looked up for as many numbers, which are no positions.
    """
    if operation(node) in LOOKUPS:
        return _looks_up_data(walk, node, samples)
    tracked = [(n, nr) for n, nr in node.next_functions if walk.is_tracked(n)]
    if len(tracked) == len(node.next_functions) or samples not in rows_made(node):
        return False
    return operation(node) in MATRIX_PRODUCTS or all(shape_of(edge) != shape_of((node, 0)) for edge in tracked)


def _looks_up_data(walk: Walk, node: Node, samples: int) -> bool:
    numbers = [t for t in saved_tensors(node) if t.dtype in (torch.long, torch.int) and place_of(t) not in walk.constant_places]
    rows = [t.shape[:2] for t in numbers if t.dim() > 1 and len(t) != 1]
    # positions have no gaps, in whatever order they come
    return any(samples in shape for shape in rows) or any(t.shape == (samples,) and (t.sort().values.diff() != 1).any() for t in numbers)


class Way(Enum):
    """How the columns on a graph edge hold the samples."""

    DATA = "on an axis of the tensor, as its layout says"
    SPLIT = "split: every sample has columns of its own"
    MASKED = "split, by masking before the node is called"


SPLIT = Way.SPLIT
State = Layout | Way


class Crossing(NamedTuple):
    """How columns leave a gap node towards one of its inputs.

    Attributes:
        way: How they hold the samples then.
        returned: Layout of the gradient that the node returns, before axes along which the input was broadcast are summed.
        arrives: Layout after that sum, if the way is ``DATA``.
    """

    way: Way
    returned: Layout | None
    arrives: Layout | None

    def of_all(self, shape: torch.Size) -> Crossing:
        """Split what is summed within one sample.

        Args:
            shape: Shape of the input.

        Returns:
            How columns leave towards an input that is not made of data.
        """
        summed = self.arrives is not None and (not shape or self.arrives.labels != self.returned.labels)
        return Crossing(SPLIT, self.returned, None) if summed else self


class Gap:
    """A graph node that no rule covers, crossed by calling it.

    Attributes:
        node: The node.
        outputs: Number of its outputs.
        states: Output number to state of the incoming columns.
        nexts: For each next edge from which something needed is reached: (node, number, shape).
        crossings: For each next edge: how columns leave, ``None`` where nothing is needed.
    """

    __slots__ = ("crossings", "nexts", "node", "outputs", "states")

    def __init__(
        self, node: Node, states: dict[int, State], nexts: list[tuple[Node, int, torch.Size] | None], has_data: Container[Node] = frozenset()
    ) -> None:
        self.node, self.outputs, self.states, self.nexts = node, outputs_of(node), states, nexts
        if SPLIT in states.values():
            self.crossings = [None if n is None else Crossing(SPLIT, None, None) for n in nexts]
        else:
            found = crossings_of(node, states, tuple(None if n is None else n[2] for n in nexts))
            # what all samples use by turns is split from here on: a scale that each one multiplies with what is its own
            self.crossings = [c if n is None or c is None or n[0] in has_data else c.of_all(n[2]) for n, c in zip(nexts, found, strict=True)]

    def call(self, columns: dict[int, Tensor]) -> list[Tensor | None]:
        """Call the node.

        Args:
            columns: Output number to ``[V, *shape]``.

        Returns:
            For each next edge ``[V, *shape]``, or ``None``. Where the input was broadcast, the gradient may still have the shape of the output.
        """
        return call_node(self.node, [columns.get(nr) for nr in range(self.outputs)])

    def call_split(self, columns: dict[int, Tensor]) -> list[Tensor | None]:
        """Call the node with split columns.

        Args:
            columns: Output number to ``[V, N, *shape]``.

        Returns:
            For each next edge ``[V, N, *shape]``, or ``None``.
        """
        lead = next(iter(columns.values())).shape[:2]
        returned = self.call({nr: c.flatten(0, 1) for nr, c in columns.items()})
        return [None if c is None or n is None else sum_to(c.unflatten(0, lead), n[2], 2) for c, n in zip(returned, self.nexts, strict=True)]

    def call_masked(self, given: dict[int, Tensor]) -> list[Tensor | None]:
        """Split columns by masks, block of samples by block, and call the node with them.

        Args:
            given: Output number to ``[V, *shape]``.

        Returns:
            For each next edge ``[V, N, *shape]``, or ``None``.
        """
        samples = next(layout.samples for layout in self.states.values())
        size = sum(prod(c.shape) for c in given.values())
        rows = [
            self.call_split({nr: split(c, self.states[nr], block) for nr, c in given.items()})
            for block in blocks(samples, size, _MASKED) or [slice(0, 0)]
        ]
        return [None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*rows, strict=True)]


def _same_axis(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a node carries the samples where that follows from what it is: they stay on their axis.

    Args:
        node: The node.
        layout: Where they lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it has to be found out.
    """
    name, full = operation(node), shape_of((node, 0))
    if name in _BROADCASTING:
        return [None if shape is None else _summed(layout, full, shape) for shape in shapes]
    if name in _STACKED:
        stays = layout.axis < len(full) - 2
    elif name in ("Softmax", "LogSoftmax"):
        stays = not full or layout.axis != saved(node, "dim") % len(full)
    else:
        stays = name in ELEMENTWISE
    same = all(shape is None or shape == full or (len(shape) == len(full) and shape[layout.axis] == full[layout.axis]) for shape in shapes)
    return [None if shape is None else Crossing(Way.DATA, layout, layout) for shape in shapes] if stays and same else None


def _summed(layout: Layout, full: torch.Size, shape: torch.Size) -> Crossing:
    """Say how columns leave that are summed to the shape of an input.

    Args:
        layout: Where the samples lie in what the node returns.
        full: Its shape.
        shape: Shape of the input.

    Returns:
        The crossing.
    """
    arrives = after_sum(layout, full, shape)
    return Crossing(SPLIT if arrives is None else Way.DATA, layout, arrives)


_CROSSINGS: dict[Any, list[Crossing | None]] = {}


def crossings_of(node: Node, states: dict[int, Layout], shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None]:
    """Find out how a node carries the samples to its inputs, by sending known columns through it.

    Args:
        node: The node.
        states: Output number to layout.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input.
    """
    if len(states) == 1 and 0 in states:
        known = _same_axis(node, states[0], shapes)
        if known is not None:
            return known
    tensors, key = [tensor_at((node, nr)) for nr in range(outputs_of(node))], None
    if operation(node) in _STATIC and (operation(node) != "Cat" or shapes.count(None) <= 1):  # it has not saved where its parts begin
        key = (node.name(), tuple(torch.Size(m.shape) for m in tensors), shapes, tuple(states.items()), settings_of(node))
        if key in _CROSSINGS:
            return _CROSSINGS[key]
    samples, axis = next((layout.samples, layout.axis) for layout in states.values())
    columns = [probe(m.shape, states[nr], m.dtype, m.device) if nr in states else None for nr, m in enumerate(tensors)]
    with torch.no_grad():  # as autograd runs its nodes
        gradients = call_node(node, columns)
    crossings: list[Crossing | None] = []
    settled = True
    for shape, returned in zip(shapes, gradients, strict=True):
        if shape is None or returned is None:
            crossings.append(None)
            continue
        layout, certain = decode(returned, samples, axis)
        settled = settled and certain
        if layout is None:
            crossings.append(Crossing(Way.MASKED, None, None))
            continue
        crossings.append(_summed(layout, returned.shape[1:], shape))
    if key is not None and settled:
        if len(_CROSSINGS) > 10_000:
            _CROSSINGS.clear()
        _CROSSINGS[key] = crossings
    return crossings
