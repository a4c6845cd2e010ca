"""``explain``: what a backward pass with extensions would do, before it is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack.backward import backpack
from backpack.core.calls import ModuleCall
from backpack.core.crossings import Gap
from backpack.core.graph import operation
from backpack.core.node_calls import NodeCall
from backpack.core.owners import owners
from backpack.core.passing import Pass
from backpack.core.plan import Plan
from backpack.core.recording import recorder_of, remove_recorder
from backpack.core.state import recording
from backpack.core.units import Unit
from backpack.core.walk import GENERIC, Walk
from backpack.core.ways import SPLIT, Crossing, Way
from backpack.explanation import Explanation, Quantity, Row, Verdict
from backpack.extending import FLAG, extend
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.collector import Collector
from backpack.extensions.combining import Noted
from backpack.extensions.costs import Costs, begun, gradient
from backpack.extensions.flows import Source, SqrtFlow
from backpack.extensions.kronecker import KroneckerState, OutputSide
from backpack.extensions.secondorder import HBP
from backpack.extensions.sides import sides_of, units_of
from backpack.planning import asked_in, make_plan, walk_from
from backpack.trial import try_rules
from backpack.utils.errors import ArgumentError, BackpackError, require_function, require_module
from backpack.utils.nested import call_with, tensors_in
from backpack.utils.precision import wide
from backpack.utils.random_state import random_state_kept


def explain(model: Module, lossfunc: Any, X: Any, y: Any, extensions: Iterable[BackpropExtension]) -> Explanation:
    """Tell what ``with backpack(*extensions): lossfunc(model(X), y).backward()`` would do, without doing it.

    Runs the forward pass, walks the graph that it leaves, plans the backward pass for each extension, and tries what depends on the data on a
    single sample. No backward pass is run, and nothing is written: random numbers, buffers, hooks, results and gradients are as before. Model
    and loss are extended for the time being, if they are not.

    Args:
        model: The model.
        lossfunc: A loss module, or a function of (what the model returns, ``y``) that calls some.
        X: What the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        y: What ``lossfunc`` is called with after the output, likewise.
        extensions: The extensions.

    Returns:
        A row for each parameter and extension, printable as a table.

    Raises:
        ArgumentError: If ``lossfunc`` does not return a tensor with one entry that can be differentiated, or something else than extensions is given.
        ArgumentTypeError: If the model is no module, or the loss no function.

    Example:
        >>> print(explain(model, torch.nn.CrossEntropyLoss(), X, y, [BatchGrad(), KFAC()]))
    """
    require_module(model, "explain")
    require_function(lossfunc, "lossfunc", "explain")
    extensions = list(extensions) if isinstance(extensions, Iterable) else [extensions]
    backpack(*extensions)  # checks them
    modules = [model, *([lossfunc] if isinstance(lossfunc, Module) else [])]
    with _extended(modules), _untouched(modules), backpack(), torch.enable_grad():
        loss = call_with(lossfunc, (call_with(model, (), X),), y)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise ArgumentError(f"explain() needs a loss of one entry that was computed from trainable parameters, lossfunc returned {loss!r}.")
        return explain_loss(model, loss, extensions)


@contextmanager
def _extended(modules: list[Module]) -> Iterator[None]:
    """Extend modules for a while, as far as they are not.

    Args:
        modules: The modules.

    Yields:
        Nothing.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules() if recorder_of(part) is None)
    names = owners.names(parameter for module in modules for parameter in module.parameters())
    paths = {recorder: recorder.path for module in modules for part in module.modules() if (recorder := recorder_of(part)) is not None}
    try:
        for module in modules:
            extend(module)
        yield
    finally:
        for part in parts:
            remove_recorder(part)
            part.__dict__.pop(FLAG, None)
        for recorder, path in paths.items():
            recorder.path = path
        owners.rename(names)


@contextmanager
def _untouched(modules: list[Module]) -> Iterator[None]:
    """Let modules work on copies of their buffers for a while, and give random numbers back.

    Args:
        modules: The modules.

    Yields:
        Nothing.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    before = {part: dict(part._buffers) for part in parts}
    copies: dict[int, Tensor] = {}
    for part in parts:
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        with random_state_kept(parameter for module in modules for parameter in module.parameters()):
            yield
    finally:
        for part, buffers in before.items():
            part._buffers.clear()
            part._buffers.update(buffers)


def explain_loss(model: Module, loss: Tensor, extensions: list[BackpropExtension]) -> Explanation:
    """Tell what ``loss.backward()`` would do with extensions.

    Args:
        model: The extended model whose parameters are listed.
        loss: What an extended loss has returned.
        extensions: The extensions.

    Returns:
        The explanation.
    """
    walk = Walk([loss.grad_fn])
    unit, graph = gradient(walk), _Graph(loss, {mark.call: mark.call.derivatives for marks in walk.marks.values() for mark in marks})
    studies = [_Study(model, graph, extension, unit) for extension in extensions]
    rows = [row for study in studies for row in study.rows]
    quantities = [study.quantity(unit) for study in studies]
    carried: dict[Any, float] = {}
    for extension, study in zip(extensions, studies, strict=True):
        carried[extension.flow or extension] = max(carried.get(extension.flow or extension, 0.0), study.carried)
    batches = {number for study in studies if study.plan is not None for number in study.plan.batches.values()}
    cost = 1 + (sum(carried.values()) + sum(sum(study.read.values()) for study in studies)) / unit
    together = ""
    active = [study.active for study in studies if study.plan is not None]
    if len(active) > 1:
        try:
            graph.plan(active, {})
        except BackpackError as error:
            together = str(error)
    return Explanation(rows, quantities, batches.pop() if len(batches) == 1 else None, cost, together)


class _Graph(NamedTuple):
    """A graph that is planned again and again.

    Attributes:
        loss: The root.
        derivatives: Call to rule, before any plan has chosen another one.
    """

    loss: Tensor
    derivatives: dict[ModuleCall, Any]

    def plan(self, extensions: list[BackpropExtension], rules: dict[int, str]) -> tuple[Plan | None, Collector | None]:
        """Plan a backward pass, and try it.

        Args:
            extensions: The extensions.
            rules: Takes, for each parameter by id, what serves it, even where it is refused afterwards.

        Returns:
            Plan and collector; ``None`` if there is nothing to be computed.
        """
        for call, derivatives in self.derivatives.items():
            call.derivatives = derivatives
        recording.on, on = False, recording.on
        try:
            walk = walk_from([self.loss], tuple(extensions))
            plan = make_plan(walk, [self.loss], tuple(extensions), False)
            if plan is None:
                return None, None
            rules |= {id(p): rule for p, rule in _rules(plan).items()}
            collector = Collector(plan, extensions)
            asked_in(plan, tuple(extensions), collector)
            try_rules(self.loss, plan, collector)
            return plan, collector
        finally:
            recording.on = on


class _Study:
    """What becomes of one extension: its plan, without all that is refused.

    Attributes:
        active: The extension, which leaves out what is refused.
        rows: One entry for each parameter of the model.
        plan: The plan; ``None`` if nothing is left.
        carried: Multiplications for what is carried.
        read: Parameter (by id) to multiplications for what is read off.
    """

    def __init__(self, model: Module, graph: _Graph, extension: BackpropExtension, unit: float) -> None:
        self._model, self._extension, self.active = model, extension, extension
        self._left_out, self._reasons, self._rules = extension.excluded(), {}, {}
        self.plan: Plan | None = None
        while True:
            try:
                self.plan, collector = graph.plan([self.active], self._rules)
                break
            except BackpackError as error:
                for part in error.parts:
                    for parameter in part.about or model.parameters():
                        self._reasons.setdefault(id(parameter), str(part))
                if all(id(parameter) in self.active.excluded() for parameter in error.about):
                    break
                self.active = self.active.leaving_out(error.about)
        self.carried, self.read, self._crossed = 0.0, {}, Counter()
        if self.plan is not None:
            crossed = Pass(self.plan, collector.flows, collector).crossed()
            costs = Costs(self.plan, self.active, crossed)
            self.carried, self.read = costs.carried, costs.read
            self._crossed.update(_lower(gap.node) for gap in crossed)
            self._sides = sides_of(self.plan, isinstance(extension, HBP) and extension.averages_inputs)
        self.rows = list(self._say(unit))

    def _say(self, unit: float) -> Iterator[Row]:
        """Say what becomes of each parameter.

        Args:
            unit: Multiplications of a gradient.

        Yields:
            One row a parameter.
        """
        extension = self._extension
        for name, parameter in self._model.named_parameters():
            common = (name, parameter.shape, type(extension).__name__, extension.savefield)
            rule = self._rules.get(id(parameter), "")
            if not parameter.requires_grad:
                yield Row(*common, Verdict.NO_GRADIENT, reason="as it is frozen")
            elif id(parameter) in self._left_out:
                yield Row(*common, Verdict.EXCLUDED, rule)
            elif id(parameter) in self._reasons:
                yield Row(*common, Verdict.REFUSED, rule, self._reasons[id(parameter)])
            elif self.plan is None or parameter not in self.plan.uses:
                yield Row(*common, Verdict.NO_GRADIENT, reason="as the loss does not depend on it")
            else:
                results = self._results(parameter)
                size = sum(result.numel() * result.element_size() for result in results)
                shapes = tuple(result.shape for result in results)
                yield Row(*common, self._verdict, rule, result=shapes, bytes=size, cost=self.read[id(parameter)] / unit)

    @property
    def _verdict(self) -> Verdict:
        flow = self._extension.flow
        if flow is None:
            return Verdict.OWN
        return Verdict.MC if isinstance(flow, SqrtFlow) and flow.mc_samples is not None else Verdict.EXACT

    def _results(self, parameter: Parameter) -> list[Tensor]:
        """Make the result without data, by the extension itself.

        Args:
            parameter: The parameter.

        Returns:
            Tensors on the meta device: one, or the factors; none where that is not known.
        """
        extension, flow, plan = self.active, self._extension.flow, self.plan
        if flow is None or not (flow.crosses_gaps or isinstance(extension, HBP)):
            return []

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=parameter.dtype, device="meta")

        if isinstance(extension, HBP):
            use = self._sides[parameter][0]
            if not flow.crosses_gaps:
                return [wide(empty(*use.outputs[1:] * 2)), *([] if use.inputs is None else [wide(empty(*use.inputs[1:]))])]
            rule = next((u.call.derivatives for u in units_of(plan) for p in u.parameters.values() if p is parameter), None)
            inputs = None if use.inputs is None else wide(empty(*use.inputs))
            state: Any = KroneckerState(inputs, OutputSide({Source(0): empty(1, 1, *use.outputs)}), rule)
        else:
            samples = extension.samples(plan.batches[parameter])
            number = plan.batches[parameter] if samples is None else len(samples)
            starts = [] if flow.is_gradient else [(start.call, begun(flow, plan, node)[1]) for node, start in plan.losses.items()]
            widths = {flow.source(call, columns): columns for call, columns in starts} or {0: 1}
            state = {source: empty(columns, number, *parameter.shape) for source, columns in widths.items()}
        try:
            result = extension.finish(state, parameter)
            return tensors_in(result.value if isinstance(result, Noted) else result)
        except Exception:  # noqa: BLE001 (a user's function, which has never seen tensors without numbers)
            if type(extension).__module__.startswith("backpack."):
                raise
            return []

    def quantity(self, unit: float) -> Quantity:
        """Say what becomes of the extension.

        Args:
            unit: Multiplications of a gradient.

        Returns:
            The summary.
        """
        name, field = type(self._extension).__name__, self._extension.savefield
        refused = tuple(row.parameter for row in self.rows if row.verdict is Verdict.REFUSED)
        return Quantity(name, field, 1 + (self.carried + sum(self.read.values())) / unit, sum(row.bytes for row in self.rows), refused, self._crossed)


def _lower(node: Any) -> str:
    return operation(node).removesuffix("Backward").lower()


def _rules(plan: Plan) -> dict[Parameter, str]:
    """Say what serves each parameter.

    Args:
        plan: The plan.

    Returns:
        Parameter to text.
    """
    uses: dict[Parameter, Counter[str]] = {}
    for parameter, text in _uses(plan):
        uses.setdefault(parameter, Counter())[text] += 1
    return {p: " + ".join(f"{count} x {text}" if count > 1 else text for text, count in texts.items()) for p, texts in uses.items()}


def _uses(plan: Plan) -> Iterator[tuple[Parameter, str]]:
    """Go through the uses of all parameters.

    Args:
        plan: The plan.

    Yields:
        Parameter, and what serves it there.
    """
    leaves = plan.walk.leaves
    for unit in units_of(plan):
        yield from ((parameter, _rule(unit)) for parameter in unit.parameters.values())
    for gap in plan.gaps.values():
        for upstream, crossing in zip(gap.nexts, gap.crossings, strict=True):
            if upstream is not None and crossing is not None and upstream[0] in leaves:
                yield leaves[upstream[0]], _crossing(gap, crossing)
    for unit in units_of(plan):
        yield from ((leaves[node], f"columns of each sample at {_rule(unit)}") for node, *_ in unit.split.values() if node in leaves)


def _crossing(gap: Gap, crossing: Crossing) -> str:
    name = _lower(gap.node)
    if SPLIT in gap.states.values():
        return f"columns of each sample through {name}"
    return f"{name}, called for each sample" if crossing.way is Way.MASKED else f"un-summed gradient at {name}"


def _rule(unit: Unit) -> str:
    call = unit.call
    if isinstance(call, NodeCall):
        return f"{_lower(call.node)}, read off the graph"
    name = type(call.module).__name__
    return f"{name}, by torch.func" if call.derivatives is GENERIC else name
