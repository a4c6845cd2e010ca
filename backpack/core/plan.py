"""The plan of a backward pass: which rules are used where, which graph nodes are crossed by calling them, and where the samples lie.

The samples are followed from the outermost module's output (or the loss's input) to each use of each tracked parameter. All refusals that
depend on structure are raised here, before anything runs, in one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.arrangements import Repeated, arrangement
from backpack.core.batches import batch_of, known_axis, lacks_batch
from backpack.core.calls import RANDOM, Mark, ModuleCall
from backpack.core.crossings import Gap
from backpack.core.derivatives.affine import AffineDerivatives, is_bilinear
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.graph import operation, sequence_number, shape_of
from backpack.core.joining import refuse_joined
from backpack.core.linear import is_linear
from backpack.core.losses import refuse_as_loss
from backpack.core.misplacing import refuse_misplaced, refuse_own_rows
from backpack.core.mixing import OfData, mixed_by, mixes, refuse_above, refuse_summed
from backpack.core.node_calls import Composite, Waiting, read
from backpack.core.node_functions import is_known
from backpack.core.origins import STACKS
from backpack.core.refusals import bare, mixing, nowhere, refuse_compiled, refuse_one_row, refuse_other_rows, refuse_second_order, single, unrecorded
from backpack.core.samples import Layout, plain_layout, rows_of_one, seen_through_reshape, settle, unite
from backpack.core.slots import Edge, Slot
from backpack.core.starts import put_in_order, refuse_curved
from backpack.core.tracking import Tracking
from backpack.core.units import Unit, is_vector
from backpack.core.walk import GENERIC, LEFT_OUT, Need, Walk
from backpack.core.ways import SPLIT, State, Way
from backpack.utils.errors import BackpackError, merge


class Plan(Tracking):
    """What one backward pass has to do, node by node.

    Attributes:
        units: Node to the unit whose output it made.
        shared: Node to the unit whose output it made once for all samples, each of which has columns of its own there.
        composites: Node to what it computes inside, for nodes that several rules stand for; ``waiting``: node to what waits there for one.
        gaps: Node to gap, for all gaps from which something needed is reached.
        loose: Parameters that are used outside of all units; ``tables``: what is known of those that are tables, once somebody has asked.
        concerned: Bit set of the parameters that it is about; ``routes``: what is known of ways of columns.
        whole: Whether autograd's gradients of parameters are those of all samples, and of nothing else; ``complete``: whether every node runs.
    """

    whole = complete = False
    tables: dict[Parameter, Tensor] | None = None

    def __init__(self, walk: Walk, need: Need = Need.COLUMNS) -> None:
        super().__init__(walk)
        self._need, self._of_data = need, OfData(walk)
        self.units: dict[Node, Unit] = {}
        self.shared: dict[Node, Unit] = {}
        self.composites: dict[Node, Composite] = {}
        self.waiting: dict[Node, Waiting] = {}
        self.gaps: dict[Node, Gap] = {}
        self.loose, self.routes = list[Parameter](), {}
        self._claimed, self._passed = set[ModuleCall](), set[Node]()
        self.concerned = (1 << len(walk.parameters)) - 1
        if not walk.marks:
            raise unrecorded(self.walk, next(node for node in walk.order if walk.reach[node]))
        self._follow()

    def _follow(self) -> None:
        """Follow the samples from consumers to producers, and choose unit or gap for each node.

        Raises:
            merge: If parameters are refused, one error about all of them.
        """
        self._above.update(self.walk.roots)
        refuse_joined(self.walk)
        for node in self.walk.order:
            if node in self._covered or not self.walk.reach.get(node, 0) & ~self._refused:
                continue
            try:
                self._visit(node)
            except BackpackError as error:
                error.about = error.about or self.walk.named(self.walk.reach[node])
                self._note(error)
        self._compare_outputs()
        doubts = self._open_doubts()  # first: what follows may be due to a wrong guess
        for start in self.losses.values() if len(self.losses) == 1 else ():
            refuse_one_row(self.walk, start.call, start.below, start.layout)
        if doubts or self._refusals:
            raise merge([*doubts, *self._refusals])
        if len(self.losses) > 1:
            put_in_order([self.losses[node] for node in sorted(self.losses, key=sequence_number)])

    def _visit(self, node: Node) -> None:
        """Choose unit or gap for a node, whose consumers have been visited.

        Args:
            node: The node.
        """
        if node in self.walk.leaves:
            self._use_at_leaf(node)
            return
        marks = self.walk.marks.get(node, ())
        if node not in self.states and self._start_at_loss(node, marks):
            return
        for mark in reversed(marks) if not self._second_order or node in self.states or node not in self.walk.to_function else ():
            self._start_at_output(node, mark)
        states = self.states.get(node)
        if states is None:
            for mark in marks:
                if refusal := single(self.walk, node, mark.call) if mark.call.root or not self.states else None:
                    raise refusal
            if node in self._bare or node not in self._passed:
                self._pass_without_samples(node)
            return
        if node in self._bare:
            self._complete(node, marks)
            if not self._bare[node] <= states.keys():  # what arrives at its other outputs goes on upstream, in one gradient with that of samples
                self._pass_without_samples(node)
        if node in self._passed or self._is_for_all(node):  # autograd's gradient there is that of a product which has been read, too
            states.update(dict.fromkeys(states, SPLIT))
        if SPLIT in states.values():
            refuse_summed(self.walk, node, marks, self._samples_at[node])
        if node in self._unsure and any(not mark.base for mark in marks):
            refuse_other_rows(self.walk, node, states.values())
            self._unsure.discard(node)
        if not (self._choose_unit(node, states, marks) or self._choose_shared(node, states, marks) or self._choose_node(node, states)):
            self._cross(node, states)

    def _pass_without_samples(self, node: Node) -> None:
        """Go on above the place where the samples start: between the root and a loss, or along a path that no loss or module covers.

        Args:
            node: The node.
        """
        refuse_above(self.walk, node, self._second_order or any(upstream in self.walk.leaves for upstream, _ in node.next_functions))
        curved = self._curved.get(node) or (self._second_order and self._curved_at(node))
        if curved and node in self.walk.to_loss:
            refuse_as_loss(self.walk.marks.get(node, ()))
            refuse_curved(node, curved)
        for upstream, nr in node.next_functions if LEFT_OUT not in node.metadata else ():
            if upstream is not None:
                self._above.add(upstream)
                self._bare.setdefault(upstream, set()).add(nr)
                if curved:
                    self._curved[upstream] = curved

    def _choose_unit(self, node: Node, states: dict[int, State], marks: Sequence[Mark]) -> bool:
        """Choose the outermost call at a node whose rule can stand for its piece of the graph.

        Args:
            node: The node.
            states: States of its outputs.
            marks: Its marks, innermost first.

        Returns:
            Whether there is one.
        """
        for mark in reversed(marks):
            call, state = mark.call, states.get(mark.nr)
            if node in self._guessed and isinstance(state, Layout) and state.axis == known_axis(call) and (state.samples > 1 or batch_of(call) != 1):
                self._compare_with_data(node, call, state, 2)
            elif node in self._guessed and not call.module._modules and call.found.rule is None and known_axis(call) is None:
                self._doubt_lengths(node, call.outputs[mark.index].shape)
            if lacks_batch(call):
                if isinstance(state, Layout) and not state.of_one and (refusal := single(self.walk, node, call)):
                    self._note(refusal)
                    return True
                continue
            rule = self._rule(call)
            if rule is None or rule.is_loss or not call.inputs or call.odd_types or len(call.outputs) > 1 or call in self._claimed:
                continue
            given, shape = call.inputs[0], call.outputs[0].shape
            others = len(states.keys() | self._bare.get(node, ())) > 1  # of which a rule knows nothing
            if not isinstance(state, Layout) or not isinstance(given, Slot) or others:
                continue
            layout = seen_through_reshape(state, shape_of((node, mark.nr)), shape) if mark.base else state
            layout = layout if rule.any_batch_axis or not isinstance(rule, AffineDerivatives) else rows_of_one(layout, shape)
            axes = len(shape) - rule.feature_axes(call) if rule.any_batch_axis else 1
            free = layout is not None and rule.any_batch_axis and layout.axis < axes
            if layout is None or not shape or (layout.axis != 0 and not free) or (len(shape) == 1 and is_vector(rule, layout)):
                continue
            piece = self.walk.piece(node, call, mark.base)
            if piece is None or not (piece.parameters.keys() <= set(rule.params) or (rule is GENERIC and self._need is Need.MODULES)):
                continue
            needed = [(i, edge) for i, edge in piece.inputs if self.walk.reach[edge[0]]]
            at = slice(layout.axis, layout.axis + 1)
            if len(needed) > 1 or (needed and (needed[0][0] != 0 or given.shape[at] != shape[at])):
                continue
            own = {name: p for name, p in piece.parameters.items() if id(p) in self.walk.bits}
            couples = 0
            for parameter in own.values() if needed else ():
                couples |= self.walk.reach[needed[0][1][0]] & self.walk.bits[id(parameter)]
            if self._need is Need.CURVATURE and self._lacks_terms(call, rule, couples, piece.inside):
                continue
            if node in self._guessed and layout.samples > 1:
                self._compare_with_data(node, call, layout, axes)
            if not needed and layout.samples > 1:
                refuse_misplaced(self.walk, node, states)
            unit = Unit(mark, piece.inside, own)
            unit.arrangement, unit.layout = arrangement(layout) if free else (None, settle(layout))
            if needed:
                unit.below = needed[0][1]
                shape = given.shape if unit.below == given.edge else shape_of(unit.below)
                unit.arrives = layout if shape == given.shape else seen_through_reshape(layout, given.shape, shape)
                if unit.arrives is None or (rule is RANDOM and not piece.is_chain):
                    continue
                unit.couples = couples
                self._arrive(unit.below, unit.arrives, node, layout.samples, self._rows_of((node, mark.nr), layout, unit.arrives))
            call.derivatives = rule
            self._claimed.add(call)
            self._covered |= piece.inside
            self.units[node] = unit
            self._count_uses(node, unit)
            return True
        return False

    def _choose_shared(self, node: Node, states: dict[int, State], marks: Sequence[Mark]) -> bool:
        """Choose a layer whose rule can stand for its piece of the graph where it was called once for all samples.

        Args:
            node: The node.
            states: States of its outputs.
            marks: Its marks, innermost first.

        Returns:
            Whether there is one.
        """
        if self._need is Need.MODULES or node in self._bare or list(states.values()) != [SPLIT]:
            return False
        unit = next(filter(None, (self._shared_call(node, mark) for mark in marks)), None) or self._shared_node(node)
        if unit is None:
            return False
        self.shared[node], samples = unit, self._samples_at[node]
        unit.arrangement, unit.layout = Repeated(samples), plain_layout(samples)
        if unit.below is not None:
            self._arrive(unit.below, SPLIT, node, samples)
        self._count_uses(node, unit)
        return True

    def _shared_call(self, node: Node, mark: Mark) -> Unit | None:
        """Read the call of a module that does the same for all samples.

        Args:
            node: The node.
            mark: What the call has left there.

        Returns:
            The unit; ``None`` if its rule does not hold there, or is that of a user, which need not know of one more axis.
        """
        call, rule, piece = mark.call, mark.call.derivatives, self.walk.piece(node, mark.call, mark.base)
        if piece is None or rule is None or not rule.any_batch_axis or call.odd_types or len(call.outputs) > 1 or call in self._claimed:
            return None
        tracked = {name: p for name, p in piece.parameters.items() if id(p) in self.walk.bits}
        needed = [(i, edge) for i, edge in piece.inputs if self.walk.reach[edge[0]]]
        unit = Unit(mark, piece.inside, tracked)
        if not tracked or piece.parameters.keys() - set(rule.params) or needed[1:] or (needed and needed[0][0] != 0) or not unit.is_ours:
            return None
        unit.below = needed[0][1] if needed else None
        if not self._carries(unit):
            return None
        self._claimed.add(call)
        self._covered |= piece.inside
        return unit

    def _shared_node(self, node: Node) -> Unit | None:
        """Read a function that does the same for all samples, like a layer that is called for one sample.

        Args:
            node: The node.

        Returns:
            The unit; ``None`` if there is no rule, or it takes axes as they are.
        """
        shape = shape_of((node, 0))
        if not shape or operation(node) in STACKS:  # its matrices may belong to an axis each
            return None
        axis = max(len(shape) - 2, 0)
        unit = read(node, {node: {0: Layout(axis, (0,) * shape[axis], 1)}}, self.walk)
        if not isinstance(unit, Unit) or unit.split or not unit.parameters or not unit.call.derivatives.any_batch_axis or not self._carries(unit):
            return None
        self._pass(unit)
        return unit

    def _carries(self, unit: Unit) -> bool:
        # whether a layer that does the same for all samples has no second derivative, where one is asked for: nothing can be born there
        if self._need is Need.COLUMNS or unit.below is None:
            return True
        used = self.walk.bits_of(frozenset(map(id, unit.parameters.values())))
        return unit.call.derivatives.hessian_is_zero(unit.call) and not self.walk.reach[unit.below[0]] & used

    def _choose_node(self, node: Node, states: dict[int, State]) -> bool:
        """Cover a node by a rule where it is read like the call of a module, for example a product with a matrix.

        Returns:
            Whether there is such a rule.
        """
        whole = self._bare.get(node, set()) <= states.keys()
        if self._need is Need.MODULES or not whole or not all(isinstance(state, Layout) for state in states.values()):
            return False
        found = read(node, self.states, self.walk)
        if isinstance(found, Composite):
            stacks = [(self.gaps.get(stack), waiting.own) for stack, waiting in found.waiting.items()]
            if self._need is not Need.COLUMNS or any(gap is None or unite(gap.states[0], own) is None for gap, own in stacks):
                return False  # what lies between the products is curved, or samples lie along time
            self.waiting |= found.waiting
            self._covered |= found.covers
            self.gaps = {n: gap for n, gap in self.gaps.items() if n not in found.covers | found.waiting.keys()}
        elif found is None or (self._need is Need.CURVATURE and self._lacks_terms(found.call, found.call.derivatives, found.couples, found.inside)):
            return False
        samples = self._samples_at[node]
        if samples > 1 and isinstance(found, Unit) and found.below is None:
            self._compare_factors(node)
        units, below = (found.parts, found.below) if isinstance(found, Composite) else ([found], [(found.below, found.arrives)])
        for edge, state in (*below, *((edge, SPLIT) for unit in units for edge in unit.split.values())):
            if edge is not None:
                self._arrive(edge, state, node, samples, self._rows_of((node, 0), states.get(0), state) if isinstance(found, Unit) else None)
        for unit in units:
            self._pass(unit)
            self._count_uses(node, unit)
        (self.composites if isinstance(found, Composite) else self.units)[node] = found
        return True

    def _rows_of(self, edge: Edge, layout: State | None, arrives: State) -> Layout | None:
        # to whom rows belong in front of a layer, if not all behind it have a gradient
        other = self._others.get(edge)
        return other if other is not None and arrives == layout and other.axis == layout.axis else None

    def _pass(self, unit: Unit) -> None:
        self._passed.update(unit.inside)
        for leaf in (n for n in unit.inside & self.walk.leaves.keys() if id(self.walk.leaves[n]) not in self.walk.recorded):
            self._note(unrecorded(self.walk, leaf))

    def _count_uses(self, node: Node, unit: Unit) -> None:
        self._refuse_uncovered(node)
        for parameter in unit.parameters.values():
            self._count(parameter, 1, unit.layout.samples)

    def _rule(self, call: ModuleCall) -> BaseDerivatives | None:
        """Return the rule of a call, or the generic one where the graph's own nodes do not suffice.

        Returns:
            The rule; ``None`` where the graph is to be crossed node by node.
        """
        if call.derivatives is not None or self._need is Need.COLUMNS or call.module._modules or not call.inputs:
            return call.derivatives
        kept = all(isinstance(slot, Slot) and slot.kept for slot in (call.inputs[0], *call.outputs))
        return GENERIC if kept else None

    def _lacks_terms(self, call: ModuleCall, rule: BaseDerivatives, couples: int, nodes: Iterable[Node]) -> bool:
        # whether a rule does not tell the second derivative with respect to parameters, and the graph does
        unknown = rule is GENERIC or (couples and not is_bilinear(call, rule))
        return unknown and all(n in self.walk.leaves or is_known(n) or is_linear(n, self.walk.reach.get) for n in nodes)

    def _cross(self, node: Node, states: dict[int, State]) -> None:
        """Plan the crossing of a gap node.

        Args:
            node: The node.
            states: States of its outputs.
        """
        # a left-out term, or a branch without parameters, is not crossed
        nexts = [(n, nr, shape_of((n, nr))) if n is not None and self.walk.reach.get(n) else None for n, nr in node.next_functions]
        if LEFT_OUT in node.metadata:
            return
        refuse_compiled(self.walk, node)
        gap = self.gaps[node] = Gap(node, states, nexts, self._of_data)
        self._refuse_uncovered(node)
        if node in self._bare and SPLIT in states.values():
            self._note(bare(self.walk, node))
            return
        if self._second_order:
            refuse_second_order(node, self.walk)
        samples = self._samples_at[node]
        if samples > 1 and (None in nexts or operation(node) == "Embedding"):
            self._compare_factors(node)
        for upstream, crossing in zip(nexts, gap.crossings, strict=True):
            if upstream is None or crossing is None:
                continue
            if crossing.way is Way.MASKED and samples > 1 and mixes(self.walk, node, upstream[0], samples):
                self._note(mixing(self.walk, upstream[0], mixed_by(self.walk, node, states, upstream), node))
            self._arrive(upstream[:2], crossing.arrives or SPLIT, node, samples, self._elsewhere(node, states, upstream[2]))

    def _use_at_leaf(self, node: Node) -> None:
        """Count the uses of a parameter, whose leaf this is, outside all units, and refuse those that cannot be attributed."""
        loose = self.arrivals.get((node, 0), 0)
        if node in self._bare and self.states:
            self._note(bare(self.walk, node))
        elif (loose or node in self._bare) and id(self.walk.leaves[node]) not in self.walk.recorded:
            self._note(unrecorded(self.walk, node))
        elif node in self._bare:
            self._note(nowhere(self.walk, node))
        elif loose:
            refuse_own_rows(self.walk, node, self.states[node][0])
            self._refuse_uncovered(node)
            self.loose.append(self.walk.leaves[node])
            self._count(node.variable, loose, self._samples_at[node])
