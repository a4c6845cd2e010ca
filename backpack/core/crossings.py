"""Crossings: how a graph node that no rule covers carries the samples of the mini-batch to its inputs."""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.graph import call_node, operation, outputs_of, saved, settings_of, shape_of, tensor_at
from backpack.core.linear import LINEAR, SAME_ENTRIES
from backpack.core.samples import Layout, after_sum, along, arrangement, decode, label_tensor, layout_of, probe, settle, split, sum_to
from backpack.utils.columns import blocks

STATIC = LINEAR - frozenset(
    """Index IndexSelect IndexAdd IndexCopy IndexFill IndexPut Gather Take AsStrided MaskedSelect MaskedScatter Scatter ScatterAdd Where
    MaxUnpool2D MaxUnpool3D Embedding BackwardHookFunctionBackward Nansum PackPaddedSequence""".split()
)
"""Operations whose way with samples follows from shapes and settings: no sum of products, in which zeros in the data can hide samples."""
ELEMENTWISE = frozenset(
    """Relu Gelu Silu Tanh Sigmoid LogSigmoid Softplus Elu LeakyRelu Hardtanh Hardswish Hardsigmoid Mish Abs Exp Log Sqrt Rsqrt Pow
    Erf Sin Cos Sinh Cosh Neg Clone ToCopy NativeDropout Clamp Sign Sgn Round Floor Ceil Trunc Frac Deg2Rad Rad2Deg""".split()
)
"""Operations that treat every entry alone."""
# the gradient that the node returns has the shape of the output: autograd sums it to that of an input that was broadcast
_BROADCASTING = frozenset("Mul Div Add Sub Expand Fmod Remainder".split())
# these work on the last two axes, and on each entry of the axes in front alike
_STACKED = frozenset(
    """Bmm ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
    ScaledDotProductCudnnAttention""".split()
)
_SELECTS = frozenset({"Index", "IndexSelect", "Gather"})
_ADDS = frozenset({"IndexAdd", "ScatterAdd", "ScatterReduce"})
_MASKED = 2**24
"""Entries of columns that are masked at once."""


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

    def of_all(self, node: Node, shape: torch.Size, of_data: Container[Node]) -> Crossing:
        """Split what is summed within one sample, towards an input that is the same for all samples, even if no other one uses it.

        Args:
            node: Node that made the input.
            shape: Shape of the input.
            of_data: Has the node if the input is made of data, which may be that of this sample. What was broadcast to a row for each sample is not,
                unless an axis of length one stands in front of these rows: then they may be positions.

        Returns:
            How columns leave.
        """
        if self.arrives is None or (shape and self.arrives.labels == self.returned.labels):  # nothing is summed
            return self
        axis = self.returned.axis
        rows_of_all = self.returned.samples > 1 and arrangement(self.returned)[1].plain and (axis == 0 or prod(shape[:axis]) > 1)
        return Crossing(SPLIT, self.returned, None) if rows_of_all or node not in of_data else self


class Gap:
    """A graph node that no rule covers, crossed by calling it.

    Attributes:
        node: The node.
        parts: The units that stand for it: none.
        outputs: Number of its outputs.
        states: Output number to state of the incoming columns.
        nexts: For each next edge from which something needed is reached: (node, number, shape).
        crossings: For each next edge: how columns leave, ``None`` where nothing is needed.
    """

    __slots__ = ("crossings", "nexts", "node", "outputs", "states")
    parts = ()

    def __init__(self, node: Node, states: dict[int, State], nexts: list[tuple[Node, int, torch.Size] | None], of_data: Container[Node]) -> None:
        self.node, self.outputs, self.states, self.nexts = node, outputs_of(node), states, nexts
        if SPLIT in states.values():
            self.crossings = [None if n is None else Crossing(SPLIT, None, None) for n in nexts]
        else:
            found = crossings_of(node, states, tuple(None if n is None else n[2] for n in nexts))
            # what all samples use by turns is split from here on: a scale that each one multiplies with what is its own
            self.crossings = [c if n is None or c is None else c.of_all(n[0], n[2], of_data) for n, c in zip(nexts, found, strict=True)]

    @property
    def upstream(self) -> list[tuple[Node, int, torch.Size] | None]:
        """Where what it hands on goes."""
        return [n for n, crossing in zip(self.nexts, self.crossings, strict=True) if crossing is not None]

    @property
    def hides_samples(self) -> bool:
        """Whether the derivative for some input is exactly zero for all samples, or all but one: where they lie there is not known."""
        known = max((len(set(state.labels) - {-1}) for state in self.states.values() if state is not SPLIT), default=0)
        for crossing in self.crossings:
            labels = () if crossing is None or crossing.arrives is None else crossing.arrives.labels
            if -1 in labels and len(set(labels)) <= min(known, 2):  # of one sample at most
                return True
        return False

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


def _rearranged(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a node carries the samples that reshapes, turns or cuts: no column of the tensor's size is needed, nor memory for it.

    Args:
        node: The node.
        layout: Where the samples lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it is another node, or has to be found out.
    """
    name, full, axis = operation(node), shape_of((node, 0)), layout.axis
    if len(shapes) != 1 or shapes[0] is None or layout.of_one or not full.numel():
        return None
    there: Layout | None = layout
    if name in SAME_ENTRIES:
        there = _reshaped(layout, full, shapes[0])
        if there is None:
            return None
    elif name in ("Permute", "Transpose", "T"):
        order = list(range(len(full)))
        if name == "Permute":
            order = [dim % len(full) for dim in saved(node, "dims")]
        elif order:
            one, other = (0, -1) if name == "T" else (saved(node, "dim0"), saved(node, "dim1"))
            order[one], order[other] = order[other], order[one]
        there = layout._replace(axis=order[axis])
    elif name == "Select":
        there = layout._replace(axis=axis + (axis >= saved(node, "dim") % len(shapes[0])))
    elif name != "Slice" or saved(node, "dim") % len(full) == axis:
        return None
    return [Crossing(Way.DATA, there, there)]


def _reshaped(layout: Layout, full: torch.Size, shape: torch.Size) -> Layout | None:
    # where samples lie before a tensor was reshaped; None if it has to be found out
    axis, behind = layout.axis, len(full) - layout.axis
    if full[: axis + 1] == shape[: axis + 1]:
        return layout
    if full[axis:] == shape[-behind:]:
        return layout._replace(axis=len(shape) - behind)
    same = next((i for i, (one, other) in enumerate(zip(full[:axis:-1], reversed(shape), strict=False)) if one != other), min(behind - 1, len(shape)))
    if not same:
        return None
    one, other = (torch.Size((*s[: len(s) - same], 1)) for s in (full, shape))  # features stay together
    labels = along(label_tensor(layout.labels, torch.device("cpu")), axis, len(one)).expand(one).reshape(other)
    found = layout_of(labels, labels >= 0, layout.samples, axis)
    return None if found is None or found.axis == len(other) - 1 else found


def _of_rows(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a node carries the samples that selects rows, or adds rows to others, by their numbers.

    Args:
        node: The node.
        layout: Where the samples lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it is another node, or has to be found out.
    """
    name, full = operation(node), shape_of((node, 0))
    rows = _rows(node) if name in _SELECTS or name in _ADDS else None
    if rows is None or layout.samples < 2 or not full or not full.numel():
        return None
    dim, index = rows[0] % len(full), rows[1]
    if name in _SELECTS and layout.axis != dim < len(full) - 1 and layout.of_one and not settle(layout).plain:
        layout = Layout(dim, (max(layout.labels),) * full[dim], layout.samples)  # of one sample: those that were not selected may be of others
    crossings: list[Crossing | None] = []
    for number, shape in enumerate(shapes):
        there = layout
        if shape is None:
            crossings.append(None)
            continue
        if shape[:dim] + shape[dim + 1 :] != full[:dim] + full[dim + 1 :]:
            return None
        if layout.axis == dim and name in _SELECTS:
            labels = _labels_of_selected(label_tensor(layout.labels, index.device), index % shape[dim], shape[dim], layout.samples)
            if labels is None:
                crossings.append(Crossing(Way.MASKED, None, None))
                continue
            there = layout._replace(labels=labels)
        elif layout.axis == dim and number:
            if len(index) != shape[dim]:
                return None
            there = layout._replace(labels=tuple(label_tensor(layout.labels, index.device)[index].tolist()))
        crossings.append(Crossing(Way.DATA, there, there))
    return crossings


def _rows(node: Node) -> tuple[int, Tensor] | None:
    # an axis, and the numbers of rows along it, if nothing but those tells where an entry goes
    if operation(node) == "Index":
        dims = [(dim, index) for dim, index in enumerate(saved(node, "indices")) if index is not None]
        dim, index = dims[0]
        return (dim, index.nonzero()[:, 0] if index.dtype in (torch.bool, torch.uint8) else index) if len(dims) == 1 and index.dim() == 1 else None
    dim, index = saved(node, "dim"), saved(node, "index")
    if index is None:  # nothing was added but constants
        return None
    if index.dim() > 1:
        others = [axis for axis in range(index.dim()) if axis != dim % index.dim()]
        if any(not index.shape[axis] or (index.shape[axis] > 1 and index.stride(axis)) for axis in others):
            return None
        index = index.movedim(dim, -1)[(0,) * len(others)]
    return dim, index.reshape(-1)


def _labels_of_selected(labels: Tensor, index: Tensor, rows: int, samples: int) -> tuple[int, ...] | None:
    # to which samples rows belong of which some were selected; None if they are used by several
    known = labels >= 0
    low, high = (
        labels.new_full((rows,), start).scatter_reduce(0, index[known], labels[known], how) for start, how in ((samples, "amin"), (-1, "amax"))
    )
    return None if ((low != high) & (high >= 0)).any() else tuple(high.tolist())


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


def _completed(layout: Layout, state: Layout) -> Layout:
    """Give rows whose sample a derivative of zero hides to the only sample of the output, or to that in the same place, if others lie as there.

    Args:
        layout: Where the samples lie in what a node returns; the label of such a row is -1.
        state: Where they lie in its output.

    Returns:
        The layout, with labels where they are known.
    """
    if state.of_one and -1 not in state.labels and state.labels:
        return layout._replace(labels=state.labels[:1] * len(layout.labels))
    as_there = len(layout.labels) == len(state.labels) and all(one in (-1, other) for one, other in zip(layout.labels, state.labels, strict=True))
    return layout._replace(labels=state.labels) if as_there and not layout.of_one else layout


def _hides_places(node: Node, shapes: tuple[torch.Size | None, ...]) -> bool:
    # where the parts of a concatenation begin, of which several need no gradient; which entries use a number that is filled in
    return (operation(node) == "Cat" and shapes.count(None) > 1) or (operation(node) == "MaskedFill" and shapes[1:].count(None) < len(shapes) - 1)


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
        known = _same_axis(node, states[0], shapes) or _of_rows(node, states[0], shapes) or _rearranged(node, states[0], shapes)
        if known is not None:
            return known
    tensors, key = [tensor_at((node, nr)) for nr in range(outputs_of(node))], None
    if operation(node) in STATIC and not _hides_places(node, shapes):
        key = (node.name(), tuple(torch.Size(m.shape) for m in tensors), shapes, tuple(states.items()), settings_of(node))
        if key in _CROSSINGS:
            return _CROSSINGS[key]
    samples, axis = next((layout.samples, layout.axis) for layout in states.values())
    columns = [probe(m.shape, states[nr], m.dtype, m.device) if nr in states else None for nr, m in enumerate(tensors)]
    with torch.no_grad():  # as autograd runs its nodes
        gradients = call_node(node, columns, probing=True)
    crossings: list[Crossing | None] = []
    settled = True
    for shape, returned in zip(shapes, gradients, strict=True):
        if shape is None or returned is None:
            crossings.append(None)
            continue
        layout, certain = decode(returned, samples, axis)
        settled = settled and certain
        if layout is not None and operation(node) not in LINEAR:
            layout = _completed(layout, next(iter(states.values())))
        if layout is None:
            crossings.append(Crossing(Way.MASKED, None, None))
            continue
        crossings.append(_summed(layout, returned.shape[1:], shape))
    if key is not None and settled:
        if len(_CROSSINGS) > 10_000:
            _CROSSINGS.clear()
        _CROSSINGS[key] = crossings
    return crossings
