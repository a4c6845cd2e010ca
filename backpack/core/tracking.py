"""Tracking: where the samples of the mini-batch lie on each edge of the graph, from where that is known, and who disagrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any

from torch import Size
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.batches import agrees_with_data, batch_of, known_axis, lists_samples, rows_of
from backpack.core.calls import Mark, ModuleCall
from backpack.core.chosen import refuse_choices, refuse_put_rows
from backpack.core.crossings import lies_elsewhere
from backpack.core.downstream import leave_the_rows
from backpack.core.graph import operation, shape_of
from backpack.core.joining import moves_rows
from backpack.core.linear import LINEAR_IN_LOG_PROBABILITIES, is_linear
from backpack.core.loss_nodes import LossNode
from backpack.core.losses import refuse_without_loss
from backpack.core.memory import are_cut
from backpack.core.misplacing import factors_agree, refuse_misplaced
from backpack.core.mixing import is_same_for_all
from backpack.core.origins import is_of_parameter
from backpack.core.refusals import ambiguous, bare, mixing, other_rows, refuse_prediction, sizes, turned, unequal
from backpack.core.returned import Returned, is_turned, refuse_lists_of_one, refuse_other_axes, unlike
from backpack.core.samples import Layout, settle, unite
from backpack.core.slots import Edge
from backpack.core.starts import Start, start_at, start_at_output, start_at_time, start_beside
from backpack.core.walk import Walk
from backpack.core.ways import SPLIT, State, axis_kept, united
from backpack.utils.errors import BackpackError, LossValueError


class Tracking:
    """What is known of the samples while a graph is followed from consumers to producers.

    Attributes:
        walk: The graph.
        losses: Node to the loss that ends there.
        states: Node to output number to state.
        uses: Parameter to number of uses (units and edges of gaps).
        arrivals: Edge to number of consumers that hand columns to it.
        batches: Parameter to size of the mini-batch at its uses.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk, self._second_order = walk, walk.second_order
        self.losses: dict[Node, Start] = {}
        self.states: dict[Node, dict[int, State]] = {}
        self.uses: dict[Parameter, int] = {}
        self.arrivals: dict[Edge, int] = {}
        self.batches: dict[Parameter, int] = {}
        self._samples_at: dict[Node, int] = {}
        self._others: dict[Edge, Layout] = {}  # where samples lie as well, if it is more than one axis
        self._above, self._unsure = set[Node](), set[Node]()
        self._bare, self._curved, self._guessed = dict[Node, set[int]](), dict[Node, Node](), dict[Node, frozenset[Node]]()
        self._covered, self._told, self._doubts = set[Node](), set[Node](), dict[Node, Callable[[], BackpackError]]()
        self._returned, self._joined, self._begun = list[Returned](), set[Edge](), list[tuple[Node, Mark]]()
        self._of_one: ModuleCall | None = None  # a model that was given one sample, and returns several
        self._refused, self._refusals = 0, []

    def _note(self, error: BackpackError) -> None:
        """Go on after a refusal as if the parameters that it is about were left out: there may be others.

        Args:
            error: The refusal.
        """
        self._refusals.append(error)
        self._refused |= self.walk.bits_of(frozenset(map(id, error.about)))

    def _start_at_loss(self, node: Node, marks: Iterable[Mark]) -> bool:
        """Let samples start at the input of a loss.

        Args:
            node: Node at which the loss ends.
            marks: Its marks.

        Returns:
            Whether a rule stands for the piece of the graph.
        """
        start = start_at(self.walk, node, marks, self._second_order, self._curved.get(node))
        if start is None:
            if operation(node) in LINEAR_IN_LOG_PROBABILITIES and all(mark.call.recorder.bare for mark in marks):
                # a cross-entropy that was told other things than its class says: it is one of the softmax below
                self.walk.to_loss.discard(node)
            known = start_at_time(self.walk, node)
            starts = known or start_beside(self.walk, node)
            for edge, layout in starts:
                self._arrive(edge, layout, None, layout.samples)
                if not known:
                    self._guess(edge[0], shape_of(edge), layout.samples)
            return node not in self.states and bool(starts)
        self.losses[node] = start
        self._covered |= start.inside
        self._guessed[start.below[0]] = frozenset((start.below[0],))
        if start.layout.samples > 1 and self._is_open:
            self._doubt(start.below[0], shape_of(start.below), start.layout.samples)
        if not start.sure:
            self._unsure.add(start.below[0])
            shape = shape_of(start.below)
            rows = start.call.rows if isinstance(start.call, LossNode) else shape
            if self.walk.returns_loss and rows.count(start.layout.samples) > 1:
                self._doubt(start.below[0], shape, start.layout.samples)
        self._arrive(start.below, start.layout, None, start.layout.samples)
        return True

    @property
    def _is_open(self) -> bool:
        # whether a model that returns its loss may have been given as many samples as one argument has rows, or as another: labels, say
        return self.walk.returns_loss and len(self.walk.batches - {0}) > 1

    def _start_at_output(self, node: Node, mark: Mark) -> None:
        """Let samples start at the output of a call, if it tells where they lie.

        Args:
            node: Node that made the output.
            mark: Its mark.

        Raises:
            turned: If the model was given samples on another axis than it returns them.
            UnsupportedError: If a loss below counts samples in another way, for second-order quantities.
        """
        call, known = mark.call, self.states.get(node, {}).get(mark.nr)
        if known is not None and len(self.walk.outermost) > 1:
            self._returned += Returned.of(self.walk, node, mark, known, self._samples_at[node])
        told = known is not None or (node in self.states and mark.nr not in self._bare.get(node, ()))  # by what uses it, or other outputs alone
        if told and not call.root:  # only a model has a say then
            if self._of_one is not None and isinstance(known, Layout) and known.samples > 1:
                self._refuse_positions(mark, known)
            return
        if call.root and is_turned(self.walk, node, mark, known, self.losses.values()):
            raise turned(call)
        shape = call.outputs[mark.index].shape
        start = start_at_output(self.walk, node, mark, known is not None)
        if sure := call.root and rows_of(call, self.walk.marks[node]) is not None:
            self._guessed.pop(node, None)  # its rows are the samples, however many it was given
        if start is None:
            self._of_one = call if call.root and isinstance(known, Layout) and known.samples > 1 and batch_of(call) == 1 else self._of_one
            return
        if not sure:
            self._guess(node, shape, start.samples)
        if known is not None:
            if start.samples == self._samples_at[node] and (start.samples <= 1 or (known is not SPLIT and settle(known) == start)):
                return
            if self._second_order:
                refuse_prediction(call, call.outputs[mark.index].shape, start.samples, start.axis)
            elsewhere = known is not SPLIT and start.samples == self._samples_at[node] and known.axis != start.axis  # time first, as long
            apart = known is SPLIT and start.samples > 1  # each sample of what comes later uses all of its rows
            if apart or (not elsewhere and any(other is not node for other in self._outputs_of(call))):
                self._note(unlike(self.walk, call, node, start.samples, self._samples_at[node]))
                return
            if known is not SPLIT:
                return
        if sure and not start.axis and len(self.walk.outermost) > 1:
            self._begun.append((node, mark))
        self.states.setdefault(node, {})[mark.nr] = start
        self._samples_at[node] = start.samples

    def _refuse_positions(self, mark: Mark, layout: Layout) -> None:
        """Refuse rows of a model's output that are positions of the only sample that it was given, whose axis it has dropped.

        Args:
            mark: What a call inside left at an output.
            layout: Where the rows lie there.

        Raises:
            turned: If axes of length one lie in front of them, and nothing says that these are none of samples.
        """
        shape = mark.call.outputs[mark.index].shape
        if not mark.base and layout.axis and set(shape[: layout.axis]) == {1} and known_axis(mark.call) != layout.axis:
            raise turned(self._of_one)

    def _outputs_of(self, call: ModuleCall) -> list[Node]:
        # the nodes of several outputs at which samples are known
        marks = self.walk.marks if len(call.outputs) > 1 else {}
        return [node for node in marks if node in self.states and any(mark.call is call and not mark.base for mark in marks[node])]

    def _compare_outputs(self) -> None:
        """Refuse outputs that tell other numbers of samples than the first one of their model of which it is known, or than what is made of them."""
        errors = [*refuse_other_axes(self.walk, self._returned), *refuse_lists_of_one(self.walk, self._samples_at.values())]
        errors += refuse_choices(self.walk, self._joined, self.states) if self._joined else ()
        errors += refuse_put_rows(self.walk, self._begun)
        for error in errors:
            self._note(error)
        for call in self.walk.outermost:
            first, *others = self._outputs_of(call) or [None]
            for node in others:
                if self._samples_at[node] != self._samples_at[first]:
                    self._note(unlike(self.walk, call, node, self._samples_at[first], self._samples_at[node]))

    def _complete(self, node: Node, marks: Iterable[Mark]) -> None:
        """Know all rows where gradients arrive from places without samples, too: they are those of the model's output, or lie in the usual order.

        Args:
            node: The node.
            marks: Its marks.
        """
        for nr, state in self.states[node].items():
            if state is SPLIT:
                continue
            starts = [start_at_output(self.walk, node, mark, known=True) for mark in marks if mark.nr == nr and mark.call.root]
            if (start := next(filter(None, starts), None)) is not None and start.samples != state.samples:
                self._note(sizes(self.walk, (node, nr), state.samples, start.samples))
                continue
            if start is None and -1 in state.labels:
                start = settle(state) if max(state.labels) >= 0 and settle(state).plain else None
                if start is None:
                    self._note(bare(self.walk, node))
            if start is not None:
                self.states[node][nr] = unite(state, start) or start
                if unite(state, start) is None:
                    self._note(ambiguous(self.walk, (node, nr), state, start))

    def _guess(self, node: Node, shape: Size, samples: int) -> None:
        self._guessed[node] = frozenset((node,))  # at its output, samples are taken to start
        if samples > 1 and (self._is_open or (self.walk.returns_loss and moves_rows(self.walk, node))):
            self._doubt(node, shape, samples)

    def _doubt(self, node: Node, shape: Size, samples: int) -> None:
        """Note that samples could lie elsewhere, as far as shapes tell, if they start at a guess.

        Args:
            node: A node upstream of it.
            shape: Shape of its output.
            samples: Number of samples.
        """
        for start in self._guessed.get(node, ()):
            self._doubts.setdefault(start, partial(other_rows, self.walk, node, f"a tensor of shape {list(shape)}", samples))

    def _open_doubts(self) -> list[BackpackError]:
        # of guesses that nothing confirms; of all, where a model that returns its loss has different numbers of rows inside that could be samples
        starts = frozenset().union(*self._guessed.values()) if self.walk.returns_loss else ()
        numbers = {start: self._samples_at[start] for start in starts if start in self._samples_at}
        if len({*numbers.values()}) > 1:
            self._told.clear()
            for start, samples in numbers.items():
                shape = shape_of((start, min(self.states[start])))
                self._doubts.setdefault(start, partial(other_rows, self.walk, start, f"a tensor of shape {list(shape)}", samples))
        return [doubt() for start, doubt in self._doubts.items() if start not in self._told]

    def _doubt_lengths(self, node: Node, shape: Size) -> None:
        # of the output of a module without a rule, where nothing tells which axes are of features
        if (samples := self._samples_at[node]) > 1 and shape.count(samples) > 1:
            self._doubt(node, shape, samples)

    def _confirm(self, node: Node) -> None:
        self._told |= {start for start in self._guessed[node] if not (self._is_open and leave_the_rows(self.walk, start, self.states[start]))}

    def _compare_factors(self, node: Node) -> None:
        # with what a function was given
        refuse_misplaced(self.walk, node, self.states[node])
        agrees = factors_agree(self.walk, node, self.states[node]) if node in self._guessed else None
        if agrees:
            self._confirm(node)
        elif agrees is False:
            self._doubt(node, shape_of((node, min(self.states[node]))), self._samples_at[node])

    def _compare_with_data(self, node: Node, call: ModuleCall, layout: Layout, axes: int) -> None:
        """Refuse rows that were taken for samples at a guess, where what a module was called with says something else; note whether it confirms them.

        Args:
            node: Node of the output.
            call: A call.
            layout: Where the samples are taken to lie, in input and output.
            axes: Number of axes on which they may.
        """
        given, agrees = call.inputs[0], None
        if self.walk.is_data(given):
            agrees = agrees_with_data([outer for outer in self.walk.outermost if outer.module._modules], given.tensor, layout)
            if agrees:
                self._confirm(node)
            elif agrees is False:
                self._note(other_rows(self.walk, node, f"{call} with a tensor of shape {list(given.shape)}", layout.samples, layout.axis))
        chosen = -1 in layout.labels and len(layout.labels) != layout.samples  # by a mask, which may have chosen any
        others = [other for other in self.walk.calls if other.recorder is call.recorder and all(map(self.walk.is_data, other.tensor_inputs))]
        each = len(others) == layout.samples or any(map(lists_samples, self.walk.outermost))  # called once a sample, it seems
        pieces = (each or are_cut(slot.tensor for other in others for slot in other.tensor_inputs[:1])) and not agrees
        several = call.outputs[0].shape[:axes].count(layout.samples) > 1 or len(self.walk.batches - {0, 1}) > 1
        if pieces or chosen or several:
            self._doubt(node, call.outputs[0].shape, layout.samples)

    def _curved_at(self, node: Node) -> Node | None:
        """Ask whether a node between losses and the root is curved.

        Args:
            node: The node.

        Returns:
            The node, or ``None``.

        Raises:
            LossValueError: If it is only since losses are multiplied by what depends on parameters: it is about these parameters alone.
        """
        walk = self.walk
        if walk.is_linear(node):
            return None
        losses = walk.to_loss | walk.to_function
        if (upstream := {n for n, _ in node.next_functions if walk.reach.get(n)}) & losses and is_linear(node, losses.__contains__):
            factors = reduce(or_, (walk.reach[n] for n in upstream - losses), 0)
            raise LossValueError(
                f"{{names}}: a loss is multiplied by what depends on them ({node.name()}), as by a learned weight, or a focal one, so that "
                "the whole is no sum of known losses. If it is a loss of the prediction alone, make it a module of your own, "
                "`(prediction, target) -> loss`, and extend it. Or leave them out, {exclude}: the factor is a constant of the other quantities then.",
                walk.named(factors),
            )
        return node

    def _arrive(self, edge: Edge, state: State, consumer: Node | None, samples: int, other: Layout | None = None) -> None:
        """Note the state of an edge, seen from one of its consumers; refuse what lies there if two consumers see the samples differently.

        Args:
            edge: The edge.
            state: State of the columns that arrive there.
            consumer: The consumer; ``None`` for a loss.
            samples: Size of the mini-batch.
            other: Where they lie as well, if it is more than one axis.
        """
        node, nr = edge
        if self._samples_at.setdefault(node, samples) != samples:
            self._note(sizes(self.walk, edge, self._samples_at[node], samples))
        self.arrivals[edge] = self.arrivals.get(edge, 0) + 1
        for group in (self._above, self._unsure):
            if consumer in group:
                group.add(node)
        if consumer in self._guessed and self._guessed.setdefault(node, self._guessed[consumer]) is not self._guessed[consumer]:
            self._guessed[node] |= self._guessed[consumer]
        states, before = self.states.setdefault(node, {}), self._others.pop(edge, None)
        if nr not in states:
            states[nr], found = state, [None, other]
        elif (known := states[nr]) is SPLIT or state is SPLIT:
            states[nr], found = SPLIT, []
            layout = state if known is SPLIT else known
            if layout is not SPLIT and layout.samples > 1 and not is_same_for_all(self.walk, node, layout.samples):
                how = f"a tensor of shape {list(shape_of(edge))} that has samples is summed over them, and used with them, too"
                self._note(mixing(self.walk, node, how))
        else:
            found = [known, before] if known is state and other is None else united((known, before), (state, other))
            if len(known.labels) > samples and (samples == 1 or (-1 in known.labels and -1 in state.labels)):
                self._joined.add(edge)  # some rows each
            states[nr] = found[0] if found else SPLIT  # what is made of parameters alone may be used by each sample in another way
            if not found and not (is_of_parameter(self.walk, node) or self._is_of_nodes(node, samples)):
                self._note(ambiguous(self.walk, edge, known, state))
        if found[1:] and found[1] is not None:
            self._others[edge] = found[1]

    def _elsewhere(self, node: Node, states: dict[int, State], shape: Size) -> Layout | None:
        """Say where the samples lie as well that a node hands on.

        Args:
            node: The node.
            states: Where they lie in its outputs.
            shape: Shape of its input.

        Returns:
            The layout; ``None`` if it is one axis alone, as far as is known.
        """
        if (layout := self._others.get((node, 0))) is not None:
            return axis_kept(node, layout, shape)
        return lies_elsewhere(node, states.get(0, SPLIT), self.walk.reach.get, shape)

    def _is_of_nodes(self, node: Node, samples: int) -> bool:
        # whether layers made it of constants, as of the nodes of a graph that all samples use; functions may have multiplied it with data
        return node in self.walk.has_data and is_same_for_all(self.walk, node, samples)

    def _is_for_all(self, node: Node) -> bool:
        # whether a module that was called once made something that all samples use, of which the losses see one
        if not (self._second_order and (marks := self.walk.marks.get(node, ())) and (samples := self._samples_at[node]) > 1):
            return False
        of_one = all(state is not SPLIT and not state.plain and state.of_one for state in self.states[node].values())
        return of_one and all(self._times[mark.call.recorder] == 1 for mark in marks) and is_same_for_all(self.walk, node, samples)

    @cached_property
    def _times(self) -> Counter[Any]:
        # how often each module was called
        return Counter(call.recorder for call in self.walk.calls)

    def _count(self, parameter: Parameter, uses: int, samples: int) -> None:
        """Count uses of a parameter; refuse it if other uses saw a mini-batch of another size.

        Args:
            parameter: The parameter.
            uses: How many.
            samples: Size of the mini-batch there.
        """
        self.uses[parameter] = self.uses.get(parameter, 0) + uses
        if (before := self.batches.setdefault(parameter, samples)) != samples:
            self._note(unequal(self.walk, parameter, before, samples))

    def _refuse_uncovered(self, node: Node) -> None:
        if self._second_order and node in self._above:
            ended = {mark.call for root in self.walk.roots for mark in self.walk.marks.get(root, ())}
            refuse_without_loss(self.walk.named(self.walk.reach[node]), self.walk.calls, ended)
