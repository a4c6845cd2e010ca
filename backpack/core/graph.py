"""The plan of a backward pass: autograd's graph, walked once from the root.

Finds the loss calls, the module calls whose rule can be used, every use of every tracked parameter, and the gap nodes in between that have
to be crossed by calling them; follows the samples from the outermost module's output (or the loss's input) to each of these places. All
refusals that depend on structure are raised here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from backpack.core.calls import KEY, Edge, Mark, ModuleCall, Slot, owners
from backpack.core.derivatives.elementwise import RecordedSlopeDerivatives
from backpack.core.samples import Layout, decode, first_axis, keeps_samples, probe, seen_through_reshape
from backpack.utils.errors import (
    LossNotExtendedError,
    LossValueError,
    MixedSamplesError,
    NotRecordedError,
    UnattributedError,
    UnsupportedError,
)

LEFT_OUT = "backpack.left_out"
_LEAF = "torch::autograd::AccumulateGrad"
_LINEAR = frozenset(
    f"{name}Backward{version}"
    for version in range(3)
    for name in """Add Sub Rsub Neg Clone Alias View UnsafeView ReshapeAlias Reshape Expand Squeeze Unsqueeze Permute Transpose T Mt Cat Stack Slice Select
    Split SplitWithSizes Unbind Sum Mean Flip Roll Repeat Index IndexSelect Gather AsStrided ToCopy Div Mul MulScalar DivScalar Diagonal Tril Triu
    ConstantPadNd Movedim Narrow Unfold Detach Dot Mv Sumto""".split()
) | {"CopySlices", "AsStridedBackward0"}
_STATIC = _LINEAR - {"IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "CopySlices"} | frozenset(
    f"{name}Backward{version}"
    for version in range(2)
    for name in """Relu Gelu Silu Tanh Sigmoid Softmax LogSoftmax Mm Addmm Bmm Baddbmm Linear Pow Exp Log Sqrt Rsqrt Where MaskedFill Clamp ClampMin
    LeakyRelu Elu Softplus NativeLayerNorm NativeGroupNorm NativeBatchNorm Convolution NativeDropout Square Abs Erf Cos Sin Hardtanh Mish
    ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention FusedRmsNorm Mseloss""".split()
)


_ELEMENTWISE = frozenset(
    f"{name}Backward{version}"
    for version in range(2)
    for name in """Relu Gelu Silu Tanh Sigmoid LogSigmoid Softplus Elu LeakyRelu Hardtanh Hardswish Hardsigmoid Mish Abs Exp Log Sqrt Rsqrt Square Pow
    Erf Sin Cos Neg Clone ToCopy Mul Div Add Sub NativeDropout Clamp""".split()
)


class Way(Enum):
    """How the columns on a graph edge hold the samples."""

    DATA = "on an axis of the tensor, as its layout says"
    SPLIT = "split: every sample has columns of its own"
    MASKED = "split, by masking before the node is called"


SPLIT = Way.SPLIT
State = Layout | Way


class Unit:
    """A module call whose rule stands for a piece of the graph.

    Attributes:
        call: The call.
        nr: Output number of the node at which the gradient of the output arrives.
        base: Whether that node made the tensor of which the output is a view.
        parameters: Name to parameter, of the trainable ones that the piece uses.
        inside: Nodes of the piece.
        below: Where input 0 comes from, if something there is needed.
        arrives: Where the samples lie there.
        layout: Where the samples lie in the output.
        couples: Whether a parameter of the module is also used upstream of it.
    """

    __slots__ = ("arrives", "base", "below", "call", "couples", "inside", "layout", "nr", "parameters")

    def __init__(self, mark: Mark, inside: set[Node], parameters: dict[str, Parameter]) -> None:
        self.call, self.nr, self.base = mark.call, mark.nr, mark.base
        self.inside, self.parameters = inside, parameters
        self.below: Edge | None = None
        self.arrives: Layout | None = None
        self.layout: Layout | None = None
        self.couples = False


class _Piece(NamedTuple):
    """The piece of the graph between a call's output and its inputs: nodes, parameters by name, (number, edge) of the inputs that it uses."""

    inside: set[Node]
    parameters: dict[str, Parameter]
    inputs: list[tuple[int, Edge]]

    @property
    def is_chain(self) -> bool:
        """Whether every node of the piece leads to a single other one."""
        edges = {edge for _, edge in self.inputs}
        return all(sum(n in self.inside or (n, nr) in edges for n, nr in node.next_functions) == 1 for node in self.inside)


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
            self.crossings = _crossings(node, states, tuple(None if n is None else n[2] for n in nexts))


def shape_of(edge: Edge) -> torch.Size:
    """Return the shape of the tensor that an edge stands for.

    Args:
        edge: Node and output number.

    Returns:
        Shape.
    """
    return torch.Size(edge[0]._input_metadata[edge[1]].shape)


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


class Plan:
    """What one backward pass has to do, node by node.

    Attributes:
        units: Node to the unit whose output it made.
        losses: Node to the marks of the loss calls whose output it made.
        gaps: Node to gap, for all gaps from which something needed is reached.
        states: Node to output number to state.
        uses: Parameter to number of uses (units and edges of gaps).
        calls: Every recorded call in the graph.
        marks: Node to what calls left on it.
        arrivals: Edge to number of consumers that hand columns to it.
        double: Whether the graph contains derivatives of derivatives.
        reach: Node to bit set of the tracked parameters upstream of it.
    """

    def __init__(self, roots: Iterable[Node], second_order: bool) -> None:
        self.units: dict[Node, Unit] = {}
        self.losses: dict[Node, Mark] = {}
        self.gaps: dict[Node, Gap] = {}
        self.states: dict[Node, dict[int, State]] = {}
        self.uses: dict[Parameter, int] = {}
        self.calls: dict[ModuleCall, None] = {}
        self.reach: dict[Node, int] = {}
        self.double = False
        self.arrivals: dict[Edge, int] = {}
        self._samples_at: dict[Node, int] = {}
        self._samples_of: dict[Parameter, int] = {}
        self._leaves: dict[Node, Tensor] = {}
        self._parameters: list[Parameter] = []
        self._bits: dict[int, int] = {}
        self.marks: dict[Node, list[Mark]] = {}
        self._edges_into: dict[Node, int] = {}
        self._has_data: set[Node] = set()
        self._to_loss: set[Node] = set()
        self._above: set[Node] = set()
        self._bare: set[Node] = set()
        self._covered: set[Node] = set()
        self._claimed: set[ModuleCall] = set()
        self._second_order = second_order
        order = self._walk(list(roots))
        if self._parameters and not self.double:
            self._follow(order, list(roots))
            self._check_starts()

    # ---------------------------------------------------------------------------------------------------------------- walk
    def _walk(self, roots: list[Node]) -> list[Node]:
        """Visit every node once, and collect what lies upstream of it.

        Args:
            roots: Nodes of the root tensors.

        Returns:
            The nodes, consumers before producers.
        """
        order, stack, edges_into, reach = [], list(roots), self._edges_into, self.reach
        nexts: dict[Node, list[Node]] = {}
        while stack:
            node = stack[-1]
            if node in reach:
                stack.pop()
            elif node in nexts:  # all upstream nodes are done
                stack.pop()
                order.append(node)
                self._gather(node, nexts[node])
            else:
                metadata = node.metadata
                nexts[node] = upstream = [] if LEFT_OUT in metadata else [n for n, _ in node.next_functions if n is not None]
                if KEY in metadata:
                    self.marks[node] = metadata[KEY]
                for n in upstream:
                    edges_into[n] = edges_into.get(n, 0) + 1
                    if n not in nexts:
                        stack.append(n)
        order.reverse()
        return order

    def _gather(self, node: Node, nexts: list[Node]) -> None:
        """Collect, at a node whose upstream is known, what lies upstream.

        Args:
            node: The node.
            nexts: The nodes that follow it upstream.
        """
        name = node.name()
        if name == _LEAF:
            parameter = node.variable
            tracked = parameter in owners
            if tracked:
                self._bits[id(parameter)] = 1 << len(self._parameters)
                self._parameters.append(parameter)
            self._leaves[node] = parameter
            self.reach[node] = self._bits[id(parameter)] if tracked else 0
            return
        if name.count("Backward") > 1:
            self.double = True
        reach, has_data, to_loss = 0, self._has_data, self._to_loss
        for upstream in nexts:
            reach |= self.reach[upstream]
            if upstream in has_data:
                has_data.add(node)
            if upstream in to_loss:
                to_loss.add(node)
        self.reach[node] = reach
        if node in self.marks:
            for mark in self.marks[node]:
                self.calls[mark.call] = None
                if mark.call.is_loss:
                    to_loss.add(node)
                elif mark.call.has_data:
                    has_data.add(node)

    # -------------------------------------------------------------------------------------------------------------- follow
    def _follow(self, order: list[Node], roots: list[Node]) -> None:
        """Follow the samples from consumers to producers, and choose unit or gap for each node.

        Args:
            order: The nodes, consumers first.
            roots: Nodes of the root tensors.
        """
        self._above.update(roots)
        for node in order:
            if node in self._covered or node not in self.reach:
                continue
            if node in self._leaves:
                self._use_at_leaf(node)
                continue
            if not self.reach[node]:
                continue
            marks = self.marks.get(node, ())
            if any(self._start_at_loss(node, mark) for mark in marks if mark.call.is_loss and not mark.base):
                continue
            for mark in marks:
                self._start_at_output(node, mark)
            states = self.states.get(node)
            if states is None:
                self._pass_without_samples(node)
                continue
            for mark in marks if SPLIT in states.values() else ():
                self._check_split_call(node, mark)
            unit = self._choose_unit(node, states, marks)
            if unit is None:
                self._cross(node, states)

    def _start_at_loss(self, node: Node, mark: Mark) -> bool:
        """Let samples start on axis 0 of a loss's input.

        Args:
            node: Node that made the loss value.
            mark: Its mark.

        Returns:
            Whether the rule of the loss stands for its piece of the graph.

        Raises:
            LossValueError: If the target depends on parameters and a second-order quantity is asked for.
        """
        call = mark.call
        piece = self._piece(node, call)
        prediction = call.inputs[0].edge
        if piece is None or piece.parameters or prediction is None or not call.inputs[0].shape or node in self.states:
            return False
        if any(slot.edge is not None and self.reach.get(slot.edge[0]) for slot in call.tensor_inputs[1:]):
            if self._second_order:
                raise LossValueError(
                    f"{call.path}: an input other than the prediction depends on trainable parameters, so that the curvature of the loss with "
                    "respect to its prediction is not all of it. Detach the target."
                )
            return False
        self.losses[node] = mark
        self._covered |= piece.inside
        self._arrive(prediction, first_axis(call.inputs[0].shape[0]), False, call.inputs[0].shape[0])
        return True

    def _start_at_output(self, node: Node, mark: Mark) -> None:
        """Let samples start on axis 0 of the outermost module's output; inside, where nothing is known yet, of any call's output.

        Args:
            node: Node that made the output.
            mark: Its mark.

        Raises:
            UnsupportedError: If a loss below counts samples in another way and a second-order quantity is asked for.
        """
        call, shape = mark.call, mark.call.outputs[mark.index].shape
        states = self.states.setdefault(node, {})
        known = states.get(mark.nr)
        batch = next((slot.shape[0] for slot in call.tensor_inputs if slot.shape), None)
        if not mark.base and not call.is_loss and shape and (shape[0] == batch or (known is None and not call.root)):
            start = first_axis(shape[0])
            if known is None:
                states[mark.nr] = start
                self._samples_at[node] = start.samples
            elif call.root and call.module._modules and known != start and shape[0] > 1:
                if self._second_order:
                    raise UnsupportedError(
                        f"The loss takes its samples from axis 0 of a tensor that is not laid out like the output {list(shape)} of {call.path} "
                        f"({batch} samples on axis 0). Give the loss that output with the samples on axis 0: for example [N, C, T] instead of [N * T, C]."
                    )
                states[mark.nr] = start
                self._samples_at[node] = start.samples
        if not states:
            del self.states[node]

    def _check_split_call(self, node: Node, mark: Mark) -> None:
        """Refuse a module that is called with the mini-batch, but whose output is summed over samples afterwards.

        A module called without the mini-batch, say with position numbers, may well be used by all samples.

        Args:
            node: Node that made the output.
            mark: Its mark.
        """
        samples = self._samples_at[node]
        for slot in mark.call.tensor_inputs if samples > 1 else ():
            batched = slot.shape[:1] == (samples,) and (slot.dtype.is_floating_point or len(slot.shape) > 1)
            if batched and (slot.edge is None or slot.edge[0] in self._has_data):
                self._refuse_mixing(node, f"what {mark.call.path} returns for an input of shape {list(slot.shape)} is summed over samples")

    def _pass_without_samples(self, node: Node) -> None:
        """Go on above the place where the samples start: between the root and a loss, or along a path that no loss or module covers.

        Args:
            node: The node.
        """
        if node in self._to_loss:
            self._check_linear(node)
        for upstream, _ in node.next_functions if LEFT_OUT not in node.metadata else ():
            if upstream is not None:
                self._above.add(upstream)
                self._bare.add(upstream)

    def _check_linear(self, node: Node) -> None:
        """Refuse a curved operation between a loss and the root, for second-order quantities.

        Args:
            node: Node from which a loss is reached.

        Raises:
            LossValueError: If the node is not linear in what depends on parameters.
        """
        active = [n for n, _ in node.next_functions if n is not None and (n in self._to_loss or self.reach[n])]
        product = node.name().startswith(("Mul", "Div", "Dot", "Mv")) and len(active) > 1
        if self._second_order and (node.name() not in _LINEAR or product or (node.name().startswith("Div") and node.next_functions[0][0] not in active)):
            raise LossValueError(
                f"{node.name()} lies between the extended loss and the tensor on which backward was called. Second-order quantities are exact only "
                "for weighted sums of losses (a * L1 + b * L2, .sum(), .mean()): the curvature of anything else is not that of its loss."
            )

    def _choose_unit(self, node: Node, states: dict[int, State], marks: Iterable[Mark]) -> Unit | None:
        """Choose the outermost call at a node whose rule can stand for its piece of the graph.

        Args:
            node: The node.
            states: States of its outputs.
            marks: Its marks, innermost first.

        Returns:
            The unit, or ``None`` where the node is crossed as a gap.
        """
        for mark in reversed(list(marks)):
            call, state = mark.call, states.get(mark.nr)
            if call.derivatives is None or call.is_loss or len(call.outputs) > 1 or call in self._claimed or not isinstance(state, Layout):
                continue
            if not isinstance(call.inputs[0], Slot) or len(call.inputs[0].shape) < call.derivatives.least_axes:
                continue
            layout = seen_through_reshape(state, shape_of((node, mark.nr)), call.outputs[0].shape) if mark.base else state
            if layout is None or (layout.axis != 0 and not (call.derivatives.any_batch_axis and layout.axis < len(call.outputs[0].shape) - 1)):
                continue
            piece = self._piece(node, call)
            if piece is None or not set(piece.parameters) <= set(call.derivatives.params):
                continue
            needed = [(i, edge) for i, edge in piece.inputs if self.reach[edge[0]]]
            if len(needed) > 1 or (needed and needed[0][0] != 0):
                continue
            unit = Unit(mark, piece.inside, {name: p for name, p in piece.parameters.items() if p in owners})
            unit.layout = layout
            if needed:
                unit.below = needed[0][1]
                shape = shape_of(unit.below)
                unit.arrives = layout if shape == call.inputs[0].shape else seen_through_reshape(layout, call.inputs[0].shape, shape)
                if unit.arrives is None or (isinstance(call.derivatives, RecordedSlopeDerivatives) and not piece.is_chain):
                    continue
                unit.couples = any(self.reach[unit.below[0]] & self._bits[id(p)] for p in unit.parameters.values())
                self._arrive(unit.below, unit.arrives, node in self._above, layout.samples)
            self._claimed.add(call)
            self._covered |= piece.inside
            self.units[node] = unit
            self._refuse_uncovered(node)
            for parameter in unit.parameters.values():
                self._count(parameter, 1, layout.samples)
            return unit
        return None

    def _piece(self, node: Node, call: ModuleCall) -> _Piece | None:
        """Collect the nodes between a call's output and its inputs.

        Args:
            node: Node of the output.
            call: The call.

        Returns:
            The piece; ``None`` if it is connected to anything but the inputs and own parameters.
        """
        slots = [(i, slot) for i, slot in enumerate(call.inputs) if isinstance(slot, Slot)]
        sources = {edge: i for i, slot in slots for edge in (slot.base_edge, slot.edge) if edge is not None}
        own = {id(p): name for name, p in call.module._parameters.items() if p is not None}
        piece, stack, edges = _Piece({node}, {}, []), [node], {node: self._edges_into.get(node, 0)}
        while stack:
            for upstream, nr in stack.pop().next_functions:
                if upstream is None:
                    continue
                if (upstream, nr) in sources:
                    entry = (sources[upstream, nr], (upstream, nr))
                    if entry not in piece.inputs:
                        piece.inputs.append(entry)
                    continue
                if upstream in self._leaves:
                    name = own.get(id(self._leaves[upstream]))
                    if name is None:
                        return None
                    piece.parameters[name] = self._leaves[upstream]
                    continue
                edges[upstream] = edges.get(upstream, 0) + 1
                if upstream not in piece.inside:
                    piece.inside.add(upstream)
                    stack.append(upstream)
        for inner, count in edges.items():
            if count != self._edges_into.get(inner, 0):
                return None
        return piece

    def _cross(self, node: Node, states: dict[int, State]) -> None:
        """Plan the crossing of a gap node.

        Args:
            node: The node.
            states: States of its outputs.
        """
        # a left-out term, or a branch without parameters, is not crossed
        nexts = [(n, nr, shape_of((n, nr))) if n is not None and self.reach.get(n) else None for n, nr in node.next_functions]
        if LEFT_OUT in node.metadata:
            return
        gap = self.gaps[node] = Gap(node, states, nexts)
        self._refuse_uncovered(node)
        if node in self._bare and SPLIT in states.values():
            self._refuse_use(node)
        if self._second_order and checkpointed(node):
            refuse_checkpointed(node)
        for upstream, crossing in zip(nexts, gap.crossings, strict=True):
            if upstream is None or crossing is None:
                continue
            if crossing.way is Way.MASKED and upstream[0] in self._has_data:
                shapes = [list(shape_of((node, nr))) for nr in states]
                self._refuse_mixing(upstream[0], f"{node.name()} mixes them (outputs {shapes}, input {list(upstream[2])})")
            self._arrive(upstream[:2], crossing.arrives or SPLIT, node in self._above, self._samples_at[node])

    def _arrive(self, edge: Edge, state: State, above: bool, samples: int) -> None:
        """Note the state of an edge, seen from one of its consumers.

        Args:
            edge: The edge.
            state: State of the columns that arrive there.
            above: Whether a path without a loss leads there.
            samples: Size of the mini-batch.

        Raises:
            UnsupportedError: If two consumers see the samples differently.
        """
        node, nr = edge
        if self._samples_at.setdefault(node, samples) != samples:
            raise UnsupportedError(
                f"Mini-batches of {self._samples_at[node]} and of {samples} samples meet in a tensor of shape {list(shape_of(edge))}: per-sample quantities of "
                f"{self.names(self.reach[node])} are ambiguous. Call backward for each of them."
            )
        self.arrivals[edge] = self.arrivals.get(edge, 0) + 1
        if above:
            self._above.add(node)
        states = self.states.setdefault(node, {})
        known = states.setdefault(nr, state)
        if SPLIT in (known, state):
            states[nr] = SPLIT
            layout = state if known is SPLIT else known
            if layout is not SPLIT and layout.samples > 1 and node in self._has_data:
                self._refuse_mixing(node, f"a tensor of shape {list(shape_of(edge))} that has samples is summed over them, and used with them, too")
        elif known is not state and known != state and not known.samples == state.samples == 1:
            raise UnsupportedError(
                f"The samples lie on axis {known.axis} of a tensor of shape {list(shape_of(edge))} for one of its consumers and on axis {state.axis} for "
                f"another ({known.samples} and {state.samples} samples): per-sample quantities of {self.names(self.reach[node])} are ambiguous."
            )

    def _use_at_leaf(self, node: Node) -> None:
        """Count the uses of a parameter outside all units, and refuse those that cannot be attributed.

        Args:
            node: Leaf node of a parameter.
        """
        if not self.reach[node]:
            return
        if node in self._bare:
            self._refuse_use(node)
        loose = self.arrivals.get((node, 0), 0)
        if loose:
            self._refuse_uncovered(node)
            self._count(node.variable, loose, self._samples_at[node])

    def _count(self, parameter: Parameter, uses: int, samples: int) -> None:
        """Count uses of a parameter.

        Args:
            parameter: The parameter.
            uses: How many.
            samples: Size of the mini-batch there.

        Raises:
            UnsupportedError: If other uses saw a mini-batch of another size.
        """
        self.uses[parameter] = self.uses.get(parameter, 0) + uses
        before = self._samples_of.setdefault(parameter, samples)
        if before != samples:
            raise UnsupportedError(
                f"{owners[parameter]} is used with mini-batches of {before} and of {samples} samples in one backward pass: which samples belong together "
                "is not known. Call backward for each of them."
            )

    # ------------------------------------------------------------------------------------------------------------ refusals
    def names(self, bits: int) -> str:
        """Name parameters.

        Args:
            bits: Bit set of parameters.

        Returns:
            Their names, for messages.
        """
        names = [owners[p] for i, p in enumerate(self._parameters) if bits >> i & 1]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _refuse_mixing(self, node: Node, how: str) -> None:
        raise MixedSamplesError(
            f"The samples of the mini-batch influence one another: {how}. No per-sample quantity exists for {self.names(self.reach[node])}. Use an "
            "operation that treats samples independently (LayerNorm or GroupNorm instead of batch statistics; .eval() for BatchNorm)."
        )

    def _refuse_use(self, node: Node) -> None:
        if not self.marks:
            raise NotRecordedError(
                f"No forward pass of an extended module was recorded in this graph, but it uses {self.names(self.reach[node])}. The forward pass ran "
                "before extend(), under disable() or under no_grad(): run it again after extend()."
            )
        raise UnattributedError(
            f"{self.names(self.reach[node])} is used outside of everything that has samples (for example a penalty on the parameters), so that its "
            "gradient there belongs to no sample. To leave a term out of all quantities, and keep it in .grad, write "
            "`loss = loss + backpack.leave_out(penalty)`."
        )

    def _refuse_uncovered(self, node: Node) -> None:
        if self._second_order and node in self._above:
            raise LossNotExtendedError(
                f"{self.names(self.reach[node])} is reached from the tensor on which backward was called by a path without an extended loss. Second-order "
                "quantities start at the loss: write `lossfunc = extend(torch.nn.CrossEntropyLoss())`, and `backpack.leave_out(term)` for a term to be ignored."
            )

    def _check_starts(self) -> None:
        """Refuse a graph that uses tracked parameters but in which nothing was recorded.

        Raises:
            NotRecordedError: If there is no record at all.
        """
        if not self.marks and self._parameters:
            self._refuse_use(next(node for node, bits in self.reach.items() if bits))


def _as_list(shape: torch.Size | None) -> list[int] | None:
    return None if shape is None else list(shape)


@lru_cache(maxsize=None)
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
        f"{node.name()} lies in a checkpointed part of the model (torch.utils.checkpoint), whose graph can be used a single time, but a quantity has to "
        "cross it. Run that part without checkpointing, use modules with a rule for all its operations, or ask for first-order quantities only."
    )


@lru_cache(maxsize=None)
def _static_attributes(cls: type) -> tuple[str, ...]:
    names = dir(cls)
    return tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in names)


_CROSSINGS: dict[Any, list[Crossing | None]] = {}


def _crossings(node: Node, states: dict[int, Layout], shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None]:
    """Find out how a node carries the samples to its inputs, by sending known columns through it.

    Args:
        node: The node.
        states: Output number to layout.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input.
    """
    metadata, key = node._input_metadata, None
    if node.name() in _ELEMENTWISE and all(shape in (None, metadata[0].shape) for shape in map(_as_list, shapes)):
        layout = states[0]
        return [None if shape is None else Crossing(Way.DATA, layout, layout) for shape in shapes]
    if checkpointed(node):
        refuse_checkpointed(node)
    if node.name() in _STATIC:
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
