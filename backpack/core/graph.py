"""Autograd's graph: its nodes, how to call them, and how each of them carries the samples of the mini-batch to its inputs.

Private symbols of torch's graph live here and in ``calls.py`` only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

from backpack.core.calls import Edge
from backpack.core.samples import Layout, decode, keeps_samples, probe
from backpack.utils.errors import UnsupportedError

LEAF = "torch::autograd::AccumulateGrad"
"""Name of the node of a leaf tensor."""
LINEAR = frozenset(
    """Add Sub Rsub Neg Clone Alias View UnsafeView ReshapeAlias Reshape Expand Squeeze Unsqueeze Permute Transpose T Mt Cat Stack Slice Select
    Split SplitWithSizes Unbind Sum Mean Flip Roll Repeat Index IndexSelect Gather AsStrided ToCopy Diagonal Tril Triu ConstantPadNd Movedim
    Narrow Unfold MaskedFill MaskedSelect Scatter SliceScatter AvgPool2D AdaptiveAvgPool2D UpsampleNearest2D Embedding NativeDropout
    BackwardHookFunction""".split()
)
"""Operations that are linear."""
PIECEWISE_LINEAR = frozenset(
    "Relu LeakyRelu Threshold Hardtanh Abs Clamp ClampMin ClampMax Maximum Minimum Max Min Amax Amin MaxPool2DWithIndices".split()
)
"""Operations that are linear almost everywhere."""
PRODUCTS = frozenset("Mul MulScalar Mm Bmm Addmm Baddbmm Addmv Mv Dot Linear Convolution PreluKernel Addcmul Where".split())
"""Operations that are linear in each of their factors."""
# operations whose way with samples follows from shapes and settings; a sum of products, in which zeros in the data can hide samples, is none
_STATIC = LINEAR - {"Index", "IndexSelect", "Gather", "AsStrided", "MaskedSelect", "Scatter", "Embedding", "BackwardHookFunction"}
_ELEMENTWISE = frozenset(
    """Relu Gelu Silu Tanh Sigmoid LogSigmoid Softplus Elu LeakyRelu Hardtanh Hardswish Hardsigmoid Mish Abs Exp Log Sqrt Rsqrt Square Pow
    Erf Sin Cos Neg Clone ToCopy Mul Div Add Sub NativeDropout Clamp""".split()
)


def operation(node: Node) -> str:
    """Name the operation that a node belongs to.

    Args:
        node: A graph node.

    Returns:
        ``"Mul"`` for ``MulBackward0``.
    """
    return node.name().rpartition("Backward")[0]


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


class Gap:
    """A graph node that no rule covers, crossed by calling it.

    Attributes:
        node: The node.
        states: Output number to state of the incoming columns.
        nexts: For each next edge from which something needed is reached: (node, number, shape).
        crossings: For each next edge: how columns leave, ``None`` where nothing is needed.
    """

    __slots__ = ("crossings", "nexts", "node", "states")

    def __init__(self, node: Node, states: dict[int, State], nexts: list[tuple[Node, int, torch.Size] | None]) -> None:
        self.node, self.states, self.nexts = node, states, nexts
        if SPLIT in states.values():
            self.crossings = [None if n is None else Crossing(SPLIT, None, None) for n in nexts]
        else:
            self.crossings = crossings_of(node, states, tuple(None if n is None else n[2] for n in nexts))


def shape_of(edge: Edge) -> torch.Size:
    """Return the shape of the tensor that an edge stands for.

    Args:
        edge: Node and output number.

    Returns:
        Shape.
    """
    return torch.Size(edge[0]._input_metadata[edge[1]].shape)


def outputs_of(node: Node) -> int:
    """Count the outputs of the operation that a node belongs to.

    Args:
        node: A graph node.

    Returns:
        Their number.
    """
    return len(node._input_metadata)


def call_node(node: Node, columns: list[Tensor | None]) -> list[Tensor | None]:
    """Apply the Jacobian that a graph node stands for, transposed, to columns.

    Args:
        node: The node.
        columns: For each output of the node ``[V, *shape]``, or ``None``.

    Returns:
        For each next edge ``[V, *shape]``, or ``None``.
    """
    apply = node.apply if isinstance(node, BackwardCFunction) else node
    given = [i for i, c in enumerate(columns) if c is not None]
    count = columns[given[0]].shape[0]

    def one(*parts: Tensor) -> tuple:
        full: list[Tensor | None] = [None] * len(columns)
        for i, part in zip(given, parts, strict=True):
            full[i] = part
        out = apply(*full)
        return out if isinstance(out, tuple) else (out,)

    parts = [columns[i] for i in given]
    missing: list[bool] = []

    def defined(*args: Tensor) -> tuple[Tensor, ...]:
        out = one(*args)
        missing[:] = [t is None for t in out]
        return tuple(t for t in out if t is not None)

    try:
        if count == 1:
            return [None if t is None else t[None] for t in one(*(p[0] for p in parts))]
        # operations without a batching rule run one column after the other, for which a warning would be of no use
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)
        found = iter(torch.vmap(defined)(*parts))
    except RuntimeError:  # no batching rule, or data-dependent Python inside: one column after the other
        rows = [defined(*(p[v] for p in parts)) for v in range(count)]
        found = iter([torch.stack(row) for row in zip(*rows, strict=True)])
    return [None if none else next(found) for none in missing]


def _as_list(shape: torch.Size | None) -> list[int] | None:
    return None if shape is None else list(shape)


@cache
def _saved_tensors(cls: type) -> tuple[str, ...]:
    return tuple(name for name in dir(cls) if name.startswith("_raw_saved_"))


def checkpointed(node: Node) -> bool:
    """Say whether what a node has saved belongs to ``torch.utils.checkpoint``, which hands it out a single time.

    Args:
        node: A graph node.

    Returns:
        Whether it does.
    """
    for name in _saved_tensors(type(node)):
        saved = getattr(node, name)
        for part in saved if isinstance(saved, (tuple, list)) else (saved,):
            if type(part.data).__module__ == checkpoint.__module__:
                return True
    return False


def refuse_checkpointed(node: Node) -> None:
    """Refuse to call a node that can be called a single time.

    Args:
        node: A graph node.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{node.name()} lies in a checkpointed part of the model (torch.utils.checkpoint), whose graph can be used a single time, but a "
        "quantity has to "
        "cross it. Run that part without checkpointing, use modules with a rule for all its operations, or ask for first-order quantities only."
    )


@cache
def _static_attributes(cls: type) -> tuple[str, ...]:
    names = dir(cls)
    return tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in names)


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
    metadata, key = node._input_metadata, None
    if operation(node) in _ELEMENTWISE and all(shape in (None, metadata[0].shape) for shape in map(_as_list, shapes)):
        layout = states[0]
        return [None if shape is None else Crossing(Way.DATA, layout, layout) for shape in shapes]
    if checkpointed(node):
        refuse_checkpointed(node)
    if operation(node) in _STATIC:
        attributes = tuple(str(getattr(node, name)) for name in _static_attributes(type(node)))
        key = (node.name(), tuple(torch.Size(m.shape) for m in metadata), shapes, tuple(states.items()), attributes)
        if key in _CROSSINGS:
            return _CROSSINGS[key]
    samples, axis = next((layout.samples, layout.axis) for layout in states.values())
    columns = [probe(m.shape, states[nr], m.dtype, m.device) if nr in states else None for nr, m in enumerate(metadata)]
    crossings: list[Crossing | None] = []
    settled = True
    for shape, returned in zip(shapes, call_node(node, columns), strict=True):
        if shape is None or returned is None:
            crossings.append(None)
            continue
        layout, certain = decode(returned, samples, axis)
        settled = settled and certain
        if layout is None:
            crossings.append(Crossing(Way.MASKED, None, None))
            continue
        kept = keeps_samples(layout, returned.shape[1:], shape)
        if kept is None:
            crossings.append(Crossing(Way.SPLIT, layout, None))
        else:
            crossings.append(Crossing(Way.DATA, layout, Layout(kept, layout.labels, samples)))
    if key is not None and settled:
        if len(_CROSSINGS) > 10_000:
            _CROSSINGS.clear()
        _CROSSINGS[key] = crossings
    return crossings


class _WatchedEngine:
    """Stands in for autograd's engine: the one place through which ``backward`` and ``grad`` pass, however they were imported."""

    def __init__(self, engine: Any, handler: Callable[[Callable[[], Any], tuple, bool, bool, bool], Any]) -> None:
        self._engine, self._handler = engine, handler

    def run_backward(self, roots: tuple, grads: tuple, keep_graph: bool, create_graph: bool, inputs: tuple, *args: Any, **kwargs: Any) -> Any:
        """Hand a call over to the handler.

        Args:
            roots: Tensors or edges.
            grads: Their gradients.
            keep_graph: Whether the graph stays.
            create_graph: Whether the result can be differentiated.
            inputs: What to differentiate with respect to; empty for all leaves.
            *args: More settings of the engine.
            **kwargs: More settings of the engine.

        Returns:
            What the engine returns.
        """
        accumulates = kwargs["accumulate_grad"] if "accumulate_grad" in kwargs else args[1]

        def execute() -> Any:
            return self._engine.run_backward(roots, grads, keep_graph, create_graph, inputs, *args, **kwargs)

        if any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
            return execute()  # is_grads_batched=True
        return self._handler(execute, roots, not accumulates, create_graph, keep_graph)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


_watching = threading.Lock()
_watchers = 0


def watch(handler: Callable[[Callable[[], Any], tuple, bool, bool, bool], Any]) -> None:
    """Let a handler see all calls of autograd's engine, until as many calls of ``unwatch`` have followed.

    Args:
        handler: Called with (the original call, roots, whether it returns gradients, create_graph, retain_graph).
    """
    global _watchers  # noqa: PLW0603
    with _watching:
        _watchers += 1
        if _watchers == 1:
            Variable._execution_engine = _WatchedEngine(Variable._execution_engine, handler)


def unwatch() -> None:
    """Undo one call of ``watch``."""
    global _watchers  # noqa: PLW0603
    with _watching:
        _watchers -= 1
        engine = Variable._execution_engine
        if not _watchers and isinstance(engine, _WatchedEngine):
            Variable._execution_engine = engine._engine
