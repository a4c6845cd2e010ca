"""Columns in blocks: how many are carried at once, so that they fit into the memory that they may take, and what reads off a block."""

from __future__ import annotations

from functools import reduce
from math import inf, prod
from operator import or_
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.calls import ModuleCall
from backpack.core.checkpoints import checkpointed
from backpack.core.connect import Connection
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives, LookupDerivatives
from backpack.core.flow import Flow
from backpack.core.graph import tensor_at
from backpack.core.plan import Plan
from backpack.core.reader import Blocks
from backpack.core.slots import Edge
from backpack.core.starts import FEW
from backpack.core.units import Unit
from backpack.core.walk import Need
from backpack.core.ways import SPLIT
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.chosen import is_chosen_from
from backpack.extensions.collector import Collector
from backpack.extensions.costs import begun
from backpack.extensions.flows import ColumnFlow, SqrtFlow
from backpack.extensions.made import read_in_blocks
from backpack.extensions.rules import ColumnRule, Rule, find_faster, finish_at_once
from backpack.extensions.secondorder import HBP
from backpack.extensions.sides import edges_below
from backpack.extensions.uses import is_tied
from backpack.utils.errors import UnsupportedError

AUTOMATIC = 128 << 20
"""Bytes that columns may take, unless the user says something else.

Measured on one thread of a CPU, in gradients. All-CNN-C, where all columns take 1200 MiB: KFLR 38 with 128, 64 or 32 MiB, DiagGGNExact 74 with 128 or
64 MiB. 3c3d, where they take 245 MiB: DiagGGNExact 6.8 with 128 MiB, 7.2 with 64 MiB, from 6.4 to 10 at once; KFLR 4.6, 4.6, and from 4.6 to 9. Fresh
memory costs time, on some machines a lot; so does what is done again for each block: unfolding the inputs of convolutions, and Python.
"""
_STEPS = 64
"""Functional operations from which on the Hessian's diagonal may take ``_WIDER`` times as much: in recurrent networks each has columns of its own.

With 128, 512 and 1024 MiB, in gradients, one thread: a GRU of 16 units and 8 steps 1160, 500 and 330; of 32 units and 6 steps 3690, 1070 and 820.
Nets of few such operations are faster with 128 MiB: fully-connected 37, 78 and 79, gated ones (128 units, 3 layers) 319, 672 and 644.
"""
_WIDER = 4


def blocks_for(plan: Plan, collector: Collector, memory: int | None, connection: Connection | None) -> dict[Flow, Blocks]:
    """Choose how many columns are carried at once.

    Args:
        plan: The plan.
        collector: Knows the extensions.
        memory: Bytes that columns may take; ``None`` for the usual bound.
        connection: Of a pass with ``create_graph=True``.

    Returns:
        How to cut the columns of each flow; none where all are carried at once.

    Raises:
        UnsupportedError: If the user has set a bound that cannot be kept.
    """
    widths = {flow: columns(flow, plan) for flow in collector.flows if isinstance(flow, ColumnFlow) and not flow.is_gradient}
    if memory is None and (max(widths.values(), default=0) <= 1 or sum(widths.values()) * bound(plan) <= AUTOMATIC):
        return {}  # nothing to cut
    total, limit = sum(width * Weight(flow, plan, collector).most for flow, width in widths.items()), memory
    if memory is None:
        limit = AUTOMATIC * (_WIDER if len(plan.gaps) > _STEPS and any(flow.needs is Need.CURVATURE for flow in widths) else 1)
    found: dict[Flow, Blocks] = {}
    for flow in widths if total > limit else ():
        reason = _obstacle(flow, plan, collector, connection)
        if reason is None:
            found[flow] = ColumnBlocks(collector, flow, limit, total)
        elif memory is not None:
            names = ", ".join(extension.savefield for extension in collector.readers(flow))
            raise UnsupportedError(
                f"memory={memory}: what is carried for {names} takes about {total} bytes at once, and cannot be carried in parts, since {reason}. "
                "Leave memory out, or take fewer samples at once."
            )
    return found


def bound(plan: Plan) -> float:
    """Bound what a column takes in a chain of modules that use each parameter once, without following it there: that takes longer in small nets.

    Args:
        plan: The plan.

    Returns:
        Bytes, no less than the weight of a column of any flow; infinity for other plans.
    """
    if len(plan.units) < len(plan.states) or max(plan.uses.values()) > 1:
        return inf
    carried = sum(prod(unit.call.outputs[0].shape) for unit in plan.units.values()) * torch.float64.itemsize
    return carried + max(plan.batches.values()) * sum(parameter.numel() * parameter.dtype.itemsize for parameter in plan.uses)


def columns(flow: ColumnFlow, plan: Plan) -> int:
    """Count the columns of a flow.

    Args:
        flow: The flow.
        plan: The plan.

    Returns:
        Those of all losses, and those that are born on the way.
    """
    return sum(width for _, width in {begun(flow, plan, node) for node in plan.losses}) + flow.born(plan)


def _obstacle(flow: ColumnFlow, plan: Plan, collector: Collector, connection: Connection | None) -> str | None:
    """Find out why the columns of a flow cannot be carried in blocks.

    Args:
        flow: The flow.
        plan: The plan.
        collector: Knows the extensions.
        connection: Of a pass with ``create_graph=True``.

    Returns:
        The reason; ``None`` if they can.
    """
    if connection is not None:
        return "a pass with create_graph=True keeps all of it"
    if any(extension.has_module_exts for extension in collector.readers(flow)):
        return "a module extension reads all of it"
    if isinstance(flow, SqrtFlow) and flow.drawn and len(plan.losses) > FEW:
        return f"what is drawn for more than {FEW} losses shares columns"
    if flow.coupled:
        return "samples are chosen repeatedly, or by negative indices, for a Monte-Carlo estimate"
    for extension in collector.readers(flow):
        if type(extension).beside is BackpropExtension.beside and not isinstance(extension.rule_at(max(plan.batches.values())), ColumnRule):
            return f"{type(extension).__name__} has a rule of its own, and no method `beside`"
    nodes = (node for group in (plan.units, plan.composites, plan.gaps) for node in group)
    if any(call.part is not None for call in plan.walk.calls) or any(map(checkpointed, nodes)):
        return "parts of the model are checkpointed, and would have to be kept from the start"
    return None


class Weight:
    """What a column takes.

    Attributes:
        most: Bytes that are alive at once, at most, where several uses of a parameter are put together, or branches meet; no results.
    """

    def __init__(self, flow: ColumnFlow, plan: Plan, collector: Collector) -> None:
        self._flow, self._plan, self._collector = flow, plan, collector
        self._concerned, self._samples = collector.concerned(flow), max(plan.batches.values())
        coupled = [unit.couples for unit in plan.units.values()] if flow.needs is Need.CURVATURE else []
        self._coupled = reduce(or_, coupled, 0) & self._concerned  # at these parameters columns are born, too
        self._unformed = self._behind_factors() if flow.needs is not Need.CURVATURE else set()
        self.most = live = 0
        waiting: dict[Edge, int] = {}
        for node in plan.walk.order:
            given = plan.composites[node].given if node in plan.composites else [(node, nr) for nr in sorted(plan.states.get(node, ()))]
            here = sum(waiting.pop(edge, 0) for edge in given)
            if not here and node not in plan.losses:
                continue
            below = [edge for edge in edges_below(plan, node) if plan.walk.reach[edge[0]] & self._concerned]
            arriving = {edge: self._at(edge) for edge in below if edge not in waiting}
            read, held = self._reading(node)
            live += sum(arriving.values())
            self.most = max(self.most, live + max(read, sum(map(self._at, set(below) - arriving.keys()))))  # what is added to what waits
            leaves = [edge for edge in arriving if edge[0] in plan.walk.leaves]  # read off at once
            live += held - here - sum(map(arriving.pop, leaves))
            waiting |= arriving
            if node in plan.waiting:
                waiting[node, 0] = here
                live += here

    def _behind_factors(self) -> set[Node]:
        # nodes at which nothing is formed for all samples, between factors and the parameters of which they are made
        composites = [part for composite in self._plan.composites.values() for part in composite.parts]
        found, readers = set[Node](), self._collector.readers(self._flow)
        for edge in (edge for unit in (*self._plan.units.values(), *composites) for edge in unit.split.values()):
            made = read_in_blocks(edge, self._plan, self._flow, readers, self._samples)
            found |= {edge[0], *(upstream[0] for gap in made.gaps for upstream in filter(None, gap.upstream))} if made is not None else set()
        return found

    def _at(self, edge: Edge) -> int:
        if edge[0] in self._unformed:
            return 0
        like, split = tensor_at(edge), self._plan.states.get(edge[0], {}).get(edge[1]) is SPLIT or edge[0] in self._plan.walk.leaves
        return prod(like.shape) * like.dtype.itemsize * (self._samples if split else 1)

    def _reading(self, node: Any) -> tuple[int, int]:
        """Count what is formed to read quantities off.

        Args:
            node: The node.

        Returns:
            Bytes at this node, and bytes that stay, until other uses of the parameter are there.
        """
        plan = self._plan
        units = [plan.units[node]] if node in plan.units else plan.composites[node].parts if node in plan.composites else []
        read = held = 0
        for unit in units:
            slot, joins = unit.call.outputs[0], isinstance(unit.call.derivatives, AffineDerivatives | EmbeddingDerivatives)
            read += prod(slot.shape) * slot.dtype.itemsize if node in plan.composites else 0
            for name, parameter in unit.parameters.items():
                read += max((self._formed(unit, name, parameter, extension) for extension in self._collector.readers(self._flow)), default=0)
                held += prod(slot.shape) * slot.dtype.itemsize if joins and plan.uses.get(parameter, 0) > 1 else 0
                held += self._per_sample(parameter) if unit.couples & self._coupled & plan.walk.bits.get(id(parameter), 0) else 0
        return read, held

    def _formed(self, unit: Unit, name: str, parameter: Parameter, extension: BackpropExtension) -> int:
        rule = unit.call.derivatives
        affine = isinstance(rule, AffineDerivatives)
        if extension.ordered or (isinstance(extension, HBP) and (affine or isinstance(rule, LookupDerivatives))):
            return 0  # results, and small
        joined = affine or self._plan.uses.get(parameter) == 1 or (isinstance(rule, EmbeddingDerivatives) and not is_tied(self._plan, parameter))
        fast = find_faster(extension, rule, name) not in (None, finish_at_once) and joined
        fast &= name != "bias" and not self._coupled & self._plan.walk.bits.get(id(parameter), 0)  # formed where there are positions
        return 0 if fast and (extension.get_subsampling() is None or is_chosen_from(unit.call, name)) else self._per_sample(parameter)

    def _per_sample(self, parameter: Parameter) -> int:
        return self._samples * parameter.numel() * parameter.dtype.itemsize


class ColumnBlocks(Blocks):
    """Equal parts of the columns of each source, so that all parts that are carried at once keep within a bound."""

    def __init__(self, collector: Collector, flow: Flow, limit: int, total: int) -> None:
        """Take note of the bound.

        Args:
            collector: Takes what blocks leave.
            flow: The flow.
            limit: Bytes that columns may take.
            total: Bytes that all of them would take.
        """
        self._collector, self._flow, self._limit, self._total = collector, flow, limit, total

    def cut(self, width: int) -> list[slice]:
        most = max(1, width * self._limit // self._total)
        step = -(-width // max(1, -(-width // most)))
        return [slice(start, min(width, start + step)) for start in range(0, width, max(1, step))] or [slice(None)]

    def reader(self) -> BlockReader:
        return BlockReader(self._collector, self._flow)


class BlockReader(Collector):
    """Reads off a block of columns, and leaves it with the collector of the pass."""

    def __init__(self, whole: Collector, flow: Flow) -> None:
        """Begin with nothing.

        Args:
            whole: The collector of the pass.
            flow: The flow.
        """
        vars(self).update(vars(whole))
        self._whole, self._extensions, self._hooks = whole, whole.readers(flow), None
        self._rules, self._states, self._parts, self._values = {}, {}, {}, {}

    def _rule(self, extension: BackpropExtension, samples: int) -> Rule:
        return super()._rule(extension, samples).again()

    def finish(self, parameter: Parameter) -> None:
        for extension, value, state in self._readings(parameter):
            part = value if state is None else self.finishes[extension](state, parameter) if extension.adds_up else state
            self._whole.keep(parameter, extension, part)

    def after_call(self, call: ModuleCall) -> None:
        """Leave this to the collector of the pass: not everything is done."""
