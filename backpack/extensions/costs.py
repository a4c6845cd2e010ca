"""What quantities cost: arithmetic and memory traffic, counted in multiplications, from shapes alone.

The unit is a multiply-add of a matrix product. Everything else is converted by the numbers below, measured on one thread of a CPU (40
multiply-adds a nanosecond) on the nets of the benchmark; on a GPU, products and memory are about as far apart. On these nets it is
good to a factor of 1.7, but for the smallest, where Python takes most of the time: there, estimates are up to three times too low.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from math import prod

from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.calls import ModuleCall
from backpack.core.crossings import Gap
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.blocks import BlockLossDerivatives
from backpack.core.derivatives.loss_generic import GenericLossDerivatives, RowLossDerivatives
from backpack.core.flow import Flow
from backpack.core.graph import operation, outputs_of, saved, shape_of
from backpack.core.loss_nodes import LossNode
from backpack.core.node_functions import axes_of, product
from backpack.core.passing import behind_views
from backpack.core.plan import Plan
from backpack.core.residuals import columns_of
from backpack.core.slots import Edge
from backpack.core.terms import carries_terms
from backpack.core.units import Unit
from backpack.core.walk import Walk
from backpack.core.ways import SPLIT, Way
from backpack.extensions.at_layers import OfLayers
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.chains import AverageFlow, ChainFlow
from backpack.extensions.firstorder import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from backpack.extensions.flows import RootFlow, SqrtFlow, carried_for, is_long
from backpack.extensions.made import read_in_blocks
from backpack.extensions.secondorder import HBP, BatchDiagHessian, DiagHessian
from backpack.extensions.secondorder.diag_ggn import BatchDiagGGN, DiagGGN
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGN
from backpack.extensions.sides import Sides, edges_below, sides
from backpack.extensions.signed_flow import SignedSqrtFlow, curved_in
from backpack.extensions.spared import POSITIONS

ENTRY = 12
"""An entry of a tensor that is read or written where it is in a cache, or nearly."""
SQUARE = 2
"""An entry that is squared and added in blocks that stay in a cache."""
FRESH = 50
"""An entry of a result: memory that has to be provided first."""
BORN = 1000
"""An entry of a column that is born at a curved operation: written, sorted by samples and signs."""
EIGENVECTORS = 10
"""A multiple of the cube of a side, for the eigenvectors of a matrix."""
NODE, HOOK = 2_000_000, 10_000_000
"""A node of the graph, forward and backward; a hook, which runs in Python."""
PASSED_ON = 25_000_000
"""What was born at one operation, passed on at another one: each comes in a pass of its own."""

_FACTORS = {"Mm": (0, 1), "Bmm": (0, 1), "Addmm": (1, 2), "Baddbmm": (1, 2), "Convolution": (0, 1)}


def products_in(node: Node) -> tuple[int, int]:
    """Count the multiplications of a node's operation.

    Args:
        node: A graph node.

    Returns:
        Those of the forward pass, and how many times as many the backward pass has.
    """
    name = operation(node)
    if name.startswith("ScaledDotProduct"):
        query, key = shape_of((node, 0)), node.next_functions[1][0]
        return 2 * prod(query) * (shape_of(node.next_functions[1])[-2] if key is not None else query[-2]), 2
    if name not in _FACTORS:
        return 0, 0
    edges = [node.next_functions[i] for i in _FACTORS[name]]
    known = [upstream is not None for upstream, _ in edges]
    output = prod(shape_of((node, 0)))
    if name == "Convolution":
        weight = shape_of(edges[1]) if known[1] else saved(node, "weight").shape
        positions = prod(saved(node, "input").shape) if saved(node, "transposed") and saved(node, "input") is not None else output
        return positions * prod(weight[1:]), sum(known)
    if not any(known):
        return 0, 0
    return output * (shape_of(edges[0])[-1] if known[0] else shape_of(edges[1])[-2]), sum(known)


def gradient(walk: Walk) -> float:
    """Estimate the cost of the forward and the backward pass.

    Args:
        walk: The graph.

    Returns:
        Multiplications.
    """
    total = 0.0
    for node in walk.order:
        products, times = products_in(node)
        total += products * (1 + times) + NODE + 2 * ENTRY * sum(prod(output.shape) for output in outputs_of(node))
    return total


def begun(flow: Flow, plan: Plan, node: Node) -> tuple[Hashable, int]:
    """Count the columns that start at a loss.

    Args:
        flow: The flow.
        plan: The plan.
        node: Node of the loss.

    Returns:
        What is the same for losses that share columns, and columns of a sample.
    """
    start = plan.losses[node]
    if isinstance(flow, SqrtFlow) and flow.drawn:
        return (start.call.turns[1], flow.mc_samples), flow.mc_samples
    # the rows of one sample have columns of their own
    rows = 1 if start.layout.plain else max(Counter(start.layout.labels).values(), default=1)
    shape = start.call.inputs[0].shape
    width = rows * (start.call.derivatives.least_columns(shape) if isinstance(flow, RootFlow) and flow.least else prod(shape[1:]))
    return (start.call.turns[0], width) if isinstance(flow, SqrtFlow) else node, width


class Costs:
    """Costs of one extension along a plan.

    Attributes:
        carried: Multiplications for what its flow carries.
        read: Parameter (by id) to multiplications for what is read off at its uses.
    """

    def __init__(self, plan: Plan, extension: BackpropExtension, crossed: list[Gap]) -> None:
        self._plan, self._extension, self._flow = plan, extension, carried_for(extension.flow, [extension], plan)
        self.carried, self.read = 0.0, dict.fromkeys(map(id, plan.uses), 0.0)
        self._samples = max(plan.batches.values(), default=1)
        self._births: dict[Node, dict[Hashable, int]] = {}
        self._whole = self._without_columns()
        self._entry: dict[Node, float] = {}  # what an entry of a sample's columns takes, at nodes behind a factor that is made of parameters
        if self._flow is None:
            self.carried = float(HOOK * len(plan.units))
            return
        called = {gap.node for gap in crossed}
        for node in plan.walk.order:
            self._visit(node, node in called)

    def _without_columns(self) -> set[Node]:
        # layers at which the Hessian of a loss is read off whole, and what lies between both
        found, reads = set[Node](), isinstance(self._flow, RootFlow) and self._flow.least and isinstance(self._extension, OfLayers)
        for start in self._plan.losses.values() if reads else ():
            gaps, (node, _) = behind_views(self._plan, start.below)
            layer = node in self._plan.units and isinstance(self._plan.units[node].call.derivatives, AffineDerivatives)
            if layer and isinstance(start.call.derivatives, BlockLossDerivatives) and is_long(start.call):
                found |= {node, *(gap.node for gap in gaps)}
        return found

    def _visit(self, node: Node, called: bool) -> None:
        """Add what happens at a node, whose consumers have been visited.

        Args:
            node: The node.
            called: Whether it is crossed by calling it.
        """
        plan, births = self._plan, self._births.get(node, {})
        columns = 1 if self._flow.is_gradient or isinstance(self._flow, ChainFlow) else sum(births.values())
        if node in plan.losses:
            self.carried += 0 if self._flow.is_gradient else HOOK + self._at_loss(plan.losses[node].call)
            births = dict([begun(self._flow, plan, node)])
        elif node in plan.units or node in plan.shared:
            births = self._at_unit(node, plan.units.get(node) or plan.shared[node], columns, births)
        elif node in plan.composites:
            for unit in plan.composites[node].parts:
                self._at_unit(node, unit, columns, births)
        elif node in plan.gaps:
            gap = plan.gaps[node]
            self._at_gap(gap, columns if called and node not in self._whole else 0)
            if isinstance(self._flow, SignedSqrtFlow) and curved_in(plan.walk, plan.concerned, gap):
                births = {**births, node: self._at_birth(gap)}
        self.carried += PASSED_ON * max(0, len(births) - 1)
        for upstream, _ in edges_below(plan, node):
            self._births.setdefault(upstream, {}).update(births)

    @staticmethod
    def _at_loss(call: ModuleCall | LossNode) -> float:
        """Count what second derivatives take where a loss is differentiated automatically, and not entry by entry.

        Args:
            call: The loss.

        Returns:
            Multiplications of a product for each class, and of a decomposition for each sample, or position.
        """
        if type(call.derivatives) not in {GenericLossDerivatives, RowLossDerivatives}:
            return 0.0
        shape = call.inputs[0].shape
        classes = min(shape[1:2] + shape[-1:])
        return 4 * classes * (NODE + ENTRY * prod(shape)) + EIGENVECTORS * prod(shape) * classes**2

    def _at_gap(self, gap: Gap, columns: int) -> None:
        products, times = products_in(gap.node)
        entries = sum(prod(shape_of((gap.node, nr))) for nr in gap.states)
        split = SPLIT in gap.states.values() or any(crossing is not None and crossing.way is Way.MASKED for crossing in gap.crossings)
        entry = self._entry.get(gap.node, FRESH)
        each = self._samples * (products * times * (entry > 0) + entry * entries) if split else products * times + 2 * ENTRY * entries
        self.carried += columns * each + HOOK * (columns > 0)
        for upstream in gap.nexts:
            if upstream is not None and upstream[0] in self._plan.walk.leaves:
                parameter = self._plan.walk.leaves[upstream[0]]
                self.read[id(parameter)] += self._reading(Sides(None, (1, parameter.numel())), parameter, columns)

    def _at_birth(self, gap: Gap) -> int:
        """Add what the second derivative of an operation takes.

        Args:
            gap: Its node.

        Returns:
            The number of columns that are born.
        """
        born, shapes = columns_of(gap), [upstream[2] for upstream in gap.nexts if upstream is not None]
        self.carried += BORN * born * sum(map(prod, shapes))
        if product(gap.node) is None and (axes := axes_of(gap.node)):
            side = prod(shapes[0][axis] for axis in axes)
            self.carried += EIGENVECTORS * prod(shapes[0]) * side**2  # a matrix for each index of the other axes
        return born

    def _at_unit(self, node: Node, unit: Unit, columns: int, births: dict[Hashable, int]) -> dict[Hashable, int]:
        """Add what happens at a unit.

        Args:
            node: Its node.
            unit: The unit.
            columns: Number of columns that arrive.
            births: Where they were born, and how many.

        Returns:
            The same for the columns at its input.
        """
        rule, call = unit.call.derivatives, unit.call
        self.carried += HOOK
        if unit.below is not None and not self._flow.is_gradient:
            outputs, inputs = prod(call.outputs[0].shape), prod(shape_of(unit.below))
            products = self._products(unit)
            if isinstance(self._flow, AverageFlow):
                samples = max(1, unit.layout.samples)
                self.carried += (outputs + inputs) // samples * (products // samples + ENTRY * inputs // samples)
            else:
                self.carried += columns * (products + ENTRY * (inputs + outputs) / 2)
            if isinstance(self._flow, SignedSqrtFlow) and not rule.hessian_is_zero(call):
                births = {**births, node: inputs // max(1, unit.layout.samples)}
        for name, edge in unit.split.items():  # what parameters make, of which each sample has columns
            products = self._products(unit) if name == "weight" else 0
            self.carried += columns * (products + self._behind(edge) * self._samples * prod(shape_of(edge)))
        for name, parameter in unit.parameters.items():
            if parameter in self._plan.uses:
                self.read[id(parameter)] += self._reading(sides(unit, name, parameter), parameter, 1 if node in self._whole else columns)
        return births

    def _behind(self, edge: Edge) -> float:
        """Find out how a factor that is made of parameters is read, and take note of the nodes behind it.

        Args:
            edge: Edge of the factor.

        Returns:
            What an entry of a sample's columns takes: nothing if these are not formed, less in blocks that stay in a cache.
        """
        made = read_in_blocks(edge, self._plan, self._flow, [self._extension], self._samples)
        if made is None:
            return FRESH
        entry = 0 if all(carries_terms(gap.node) for gap in made.gaps) else 2 * ENTRY
        self._entry |= {gap.node: entry for gap in made.gaps}
        return entry

    @staticmethod
    def _products(unit: Unit) -> int:
        if not isinstance(unit.call.derivatives, AffineDerivatives):
            return 0
        return prod(unit.call.outputs[0].shape) * unit.call.weight.numel() // max(1, prod(sides(unit, "bias", unit.call.weight).outputs))

    def _reading(self, use: Sides, parameter: Parameter, columns: int) -> float:
        """Count what is read off at a use.

        Args:
            use: How it sees the parameter.
            parameter: The parameter.
            columns: Number of columns.

        Returns:
            Multiplications.
        """
        extension, samples = self._extension, self._plan.batches[parameter]
        (groups, outputs), positions, entries = use.outputs, use.positions, samples * parameter.numel()
        at_output = ENTRY * columns * samples * positions * groups * outputs
        result = FRESH * columns * entries if isinstance(extension, BatchGrad | SqrtGGN) else 0
        result += FRESH * entries if isinstance(extension, BatchDiagGGN | BatchDiagHessian) else 0
        if isinstance(self._flow, ChainFlow) and not isinstance(extension, HBP):
            return 0.0
        if isinstance(extension, HBP):
            moment = 0 if use.inputs is None or len(use.inputs) < 3 else samples * positions * prod(use.inputs)
            return at_output + columns * samples * groups * outputs**2 + moment
        if use.inputs is None or len(use.inputs) < 3:
            return at_output + result
        products = 0 if self._flow.is_gradient and positions >= POSITIONS else positions * entries  # else in place of autograd's own
        if isinstance(extension, BatchL2Grad):
            length = use.inputs[-1]
            gram = samples * positions**2 * (length + outputs) * groups
            return ENTRY * samples * groups * (outputs + length) if positions == 1 else min(gram, products + SQUARE * entries)
        if isinstance(extension, SumGradSquared | Variance | DiagGGN | BatchDiagGGN | DiagHessian | BatchDiagHessian):
            return result + (at_output + entries if positions == 1 else columns * (products + SQUARE * entries))
        return result + columns * products
