"""Collector: reads the quantities of all active extensions off their flows, and writes them on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial, reduce
from itertools import chain
from operator import and_, or_
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from backpack.core.calls import ModuleCall
from backpack.core.concern import concerning
from backpack.core.connect import Connection
from backpack.core.flow import Columns, Flow, Use
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.extensions.at_layers import OfLayers
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.chosen import of_chosen
from backpack.extensions.combining import Note, Noted, mark_of
from backpack.extensions.flows import GRADIENT, carried_for
from backpack.extensions.hook_queue import HookQueue
from backpack.extensions.made import ReadsMade
from backpack.extensions.mapped import answered, ask
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.positions import Contribution, join
from backpack.extensions.rules import FromGradient, Rule, find_faster
from backpack.extensions.spared import Spared, gradient_at, untouched
from backpack.extensions.uses import joins
from backpack.utils.differentiation import undifferentiable, version_of
from backpack.utils.errors import BackpackError, UnattributedError, merge
from backpack.utils.pages import written
from backpack.utils.precision import in_type


class Collector(ReadsMade):
    """Quantities of one backward pass.

    Attributes:
        cut: Flows whose columns are carried in blocks.
        handles: Of hooks that wait for gradients of parameters.
        finishes: What makes the quantity of each extension of a linear part.
    """

    def __init__(
        self,
        plan: Plan,
        extensions: Iterable[BackpropExtension],
        hook: Callable[[Module], None] | None = None,
        connection: Connection | None = None,
        debug: bool = False,
        combines: bool = False,
        dtype: torch.dtype | None = None,
        spares: bool = False,
        context: int = 0,
        turn: int = 0,
    ) -> None:
        self._plan, self._extensions, self._combines, self._context, self._turn = plan, list(extensions), combines, context, turn
        self._connection, self._debug, self._dtype = connection, debug, dtype
        self._of_flow: dict[Flow, list[BackpropExtension]] = {}
        for extension in self._extensions:
            if extension.flow is not None:
                self._of_flow.setdefault(extension.flow, []).append(extension)
        self._of_flow = {carried_for(flow, readers, plan): readers for flow, readers in self._of_flow.items()}
        every = (1 << len(plan.walk.parameters)) - 1
        for extension in self._extensions:
            extension.refuse_elsewhere(lambda: plan.walk.models)
        self._concerned = {extension: every & ~plan.walk.bits_of(extension.excluded()) for extension in self._extensions}
        self._by_all = all(bits == every for bits in self._concerned.values())
        self._bits = {flow: reduce(or_, [self._concerned[ext] for ext in readers]) for flow, readers in self._of_flow.items()}
        needing = [bits for flow, bits in self._bits.items() if flow.needs_gradient(concerning(plan, bits))]
        if needing:
            self._bits[GRADIENT] = reduce(or_, needing, self._bits.get(GRADIENT, 0))
        self.cut: Container[Flow] = ()
        self._kept: dict[tuple[int, BackpropExtension], Any] = {}
        self.spared = Spared(plan, {ext: self._concerned[ext] for ext in self._of_flow.get(GRADIENT, ()) if spares})
        self._keys = {extension: (extension.rule_key(), type(extension).rule_at) for extension in self._extensions}
        self._chosen = {extension: extension.get_subsampling() for extension in self._extensions}
        keys = list(self._keys.values())
        self.finishes = {ext: ext.finish_beside if keys.count(key) > 1 else ext.finish for ext, key in self._keys.items()}
        self._rules: dict[tuple[BackpropExtension, int], Rule] = {}
        self._states: dict[tuple[int, Any], Any] = {}
        self._parts: dict[tuple[int, Flow], list[Contribution]] = {}
        self._values: dict[tuple[int, BackpropExtension], Any] = {}
        # the extension hook may read what modules have recorded, which is given back before the gradient is there
        self._after_gradients = plan.whole and hook is None
        self.handles: list[RemovableHandle] = []
        self._late: list[tuple[Parameter, BackpropExtension, Any]] = []
        self._written: list[tuple[Parameter, str]] = []
        self._hooks = None if hook is None else HookQueue(plan.walk, plan, hook, debug)
        self.watches_calls = hook is not None
        samples = set(plan.batches.values()) | {start.layout.samples for start in plan.losses.values()}
        for extension in chain.from_iterable(self._of_flow.values()):
            for number in samples:
                extension.samples(number)  # refuses indices that are out of range, before anything runs

    @property
    def flows(self) -> list[Flow]:
        """The flows that the extensions read, each once, and the gradient if one of them needs it."""
        return list(self._bits)

    def check(self) -> None:
        """Refuse the plan where a flow, or an extension, has no definition at the parameters that concern it.

        Raises:
            merge: One error about all of them.
        """
        refusals: list[BackpackError] = []
        said = {extension: answered(self._plan, extension) for extension in self._extensions}
        left: dict[Flow | None, int] = {}
        for flow, readers in self._of_flow.items():
            by_all = reduce(and_, [said[extension] | ~self._concerned[extension] for extension in readers])
            left[flow] = self._left(flow, self.concerned(flow), by_all, refusals)
        for extension, by_it in said.items():
            self._left(extension, self._concerned[extension] & left.get(extension.flow, -1), by_it, refusals)
        if refusals:
            raise merge(refusals)

    def _left(self, checked: Flow | BackpropExtension, bits: int, said: int, refusals: list[BackpackError]) -> int:
        """Find out for which parameters a flow or an extension is not refused.

        Args:
            checked: The flow, or the extension.
            bits: Bit set of the parameters that concern it.
            said: Bit set of those for which module extensions say what is made of what it carries.
            refusals: Takes the refusals.

        Returns:
            Bit set of the others.
        """
        while bits:
            try:
                checked.check(concerning(self._plan, bits, bits & said))
                break
            except BackpackError as error:
                error.about = error.about or self._plan.walk.named(bits)
                refusals.append(error)
                bits &= ~self._plan.walk.bits_of(frozenset(map(id, error.about)))
        return bits

    def concerned(self, flow: Flow) -> int:
        return self._bits[flow]

    def readers(self, flow: Flow) -> list[BackpropExtension]:
        """List what reads a flow.

        Args:
            flow: The flow.

        Returns:
            The extensions.
        """
        return self._of_flow.get(flow, [])

    def _readers(self, flow: Flow, parameter: Parameter) -> list[BackpropExtension]:
        readers = self._of_flow.get(flow, [])
        if self._by_all:
            return readers
        bit = self._plan.walk.bits[id(parameter)]
        return [extension for extension in readers if self._concerned[extension] & bit]

    # --------------------------------------------------------------------------------------------------------------- uses
    def at_call(self, flow: Flow, use: Use) -> None:
        if flow.is_gradient:
            self.spared.prepare(use)
        for name, parameter in use.parameters.items():
            readers, uses = self._readers(flow, parameter), self._plan.uses[parameter]
            if not readers:
                continue
            if (uses > 1 or not use.layout.plain) and joins(use, self._plan, parameter):
                self._parts.setdefault((id(parameter), flow), []).append(Contribution.of(use, name, self._plan))
            else:
                self._read(flow, readers, use, name, parameter, uses == 1)
        self.spared.take(use)

    def _read(self, flow: Flow, readers: list[BackpropExtension], use: Use, name: str, parameter: Parameter, alone: bool) -> None:
        """Read what extensions need off a use.

        Args:
            flow: The flow.
            readers: The extensions.
            use: The use.
            name: Name of the parameter there.
            parameter: The parameter.
            alone: Whether there is no other use.
        """
        done: set[Any] = set()
        parts = [use] if use.layout.plain else use.parts
        plain = parts[0].layout.plain and len(parts) == 1
        if self._connection is not None:
            self._connection.flow = flow
        for extension in readers:
            place, key = (id(parameter), extension), self._keys[extension]
            if place in self._values:
                continue
            whole = flow not in self.cut or extension.adds_up
            chosen = extension.samples(use.layout.samples)
            part = parts[0] if chosen is None else of_chosen(parts[0], name, chosen) if plain and not flow.coupled else None
            if alone and whole and (id(parameter), key) not in self._states and part is not None and plain:
                function = find_faster(extension, use.call.derivatives, name)
                value = NotImplemented if function is None else function(extension, part, name)
                if isinstance(value, FromGradient) and not (chosen is None and self._after_gradients and untouched(use.call, parameter)):
                    value = value.function(gradient_at(use if chosen is None else part, name))
                if value is not NotImplemented:
                    self._values[place] = value
                    continue
            if key not in done:
                done.add(key)
                rule = self._rule(extension, use.layout.samples)
                for part in [use] if rule.takes_rows else parts:
                    self._add(parameter, rule, key, rule.at_call(part, name))

    def at_layer(self, flow: Flow, use: Use) -> bool:
        asked = [(extension, p, name) for name, p in use.parameters.items() for extension in self._readers(flow, p)]
        if not all(isinstance(extension, OfLayers) and extension.takes_matrix(use) and self._plan.uses[p] == 1 for extension, p, _ in asked):
            return False
        for extension, parameter, name in asked:
            self.keep(parameter, extension, extension.of_matrix(use, name))
        return True

    def at_leaf(self, flow: Flow, parameter: Parameter, columns: Columns) -> None:
        samples = next(iter(columns.values())).shape[1]
        done: set[Any] = set()
        for extension in self._readers(flow, parameter):
            rule, key = self._rule(extension, samples), self._keys[extension]
            if key not in done and (id(parameter), extension) not in self._values:
                done.add(key)
                self._add(parameter, rule, key, rule.at_parameter(parameter, columns, self._plan))

    def _rule(self, extension: BackpropExtension, samples: int) -> Rule:
        if (extension, samples) not in self._rules:
            self._rules[extension, samples] = extension.rule_at(samples)
        return self._rules[extension, samples]

    def _add(self, parameter: Parameter, rule: Rule, key: Any, state: Any) -> None:
        place = (id(parameter), key)
        self._states[place] = rule.add(self._states[place], state, parameter) if place in self._states else state

    # ------------------------------------------------------------------------------------------------------------- results
    def finish(self, parameter: Parameter) -> None:
        late, waiting = len(self._late), []
        for extension, value, state in self._readings(parameter):
            if isinstance(value, FromGradient):
                waiting.append((extension, value))
                continue
            kept = self._kept.pop((id(parameter), extension), None)
            if state is not None:
                if kept is not None and not extension.adds_up:
                    state, kept = extension.beside(kept, state), None  # noqa: PLW2901
                if extension.ordered and len(self._plan.losses) > 1:
                    self._late.append((parameter, extension, state))
                    continue
                value = self.finishes[extension](state, parameter)  # noqa: PLW2901
            self._write(parameter, extension, value if kept is None else kept.add_(value))
        for extension in [e for key, e in self._kept if key == id(parameter)]:  # all of it was read off without columns
            kept = self._kept.pop((id(parameter), extension))
            self._write(parameter, extension, kept if extension.adds_up else self.finishes[extension](kept, parameter))
        if waiting:
            # a hook of the tensor comes before all hooks of the node, which may change the gradient
            self.handles.append(parameter.register_hook(partial(self._at_gradient, parameter, waiting)))
        elif len(self._late) == late:
            self._happened(id(parameter))

    def keep(self, parameter: Parameter, extension: BackpropExtension, part: Any) -> None:
        """Keep what a block of columns has left at a parameter.

        Args:
            parameter: The parameter.
            extension: The extension.
            part: Its result for these columns, if results add up; else their linear part.
        """
        key = id(parameter), extension
        before = self._kept.get(key)
        if extension.adds_up:
            self._kept[key] = part if before is None else before.add_(part)
        else:
            self._kept[key] = extension.beside(before, part)

    def _readings(self, parameter: Parameter) -> Iterator[tuple[BackpropExtension, Any, Any]]:
        """Go through what was read off at a parameter.

        Args:
            parameter: The parameter, whose last use has been noted.

        Yields:
            An extension, and its value; or, if that is yet to be made of it, the linear part.
        """
        states = {}
        for flow in self._of_flow if self._parts else ():
            parts = self._parts.pop((id(parameter), flow), ())
            for use, count in join(parts):
                self._read(flow, self._readers(flow, parameter), use, parts[0].name, parameter, count == self._plan.uses[parameter])
        for extension in self._extensions:
            key = (id(parameter), extension)
            if key in self._values:
                yield extension, self._values.pop(key), None
                continue
            rule_key = self._keys[extension]
            if rule_key not in states:
                states[rule_key] = self._states.pop((id(parameter), rule_key), None)
            if states[rule_key] is not None and self._concerned[extension] & self._plan.walk.bits[id(parameter)]:
                yield extension, None, states[rule_key]

    def _at_gradient(self, parameter: Parameter, waiting: list[tuple[BackpropExtension, FromGradient]], grad: Tensor | None) -> None:
        for extension, value in waiting:
            self._write(parameter, extension, value.function(torch.zeros_like(parameter) if grad is None else grad))
        if all(late is not parameter for late, _, _ in self._late):
            self._happened(id(parameter))

    def _write(self, parameter: Parameter, extension: BackpropExtension, value: Any) -> None:
        extra = None
        if isinstance(value, Noted):
            value, extra = value
            if callable(extra):
                extra = extra() if self._combines else None
        if self._dtype is not None:
            value = in_type(value, self._dtype)
        if self._connection is not None:
            connects = extension.flow is not None and extension.flow.differentiable
            reason = self._connection.reason(extension.flow) if connects else f"{type(extension).__name__} is none of those that can be"
            if reason is not None:
                with torch.enable_grad():
                    value = undifferentiable(value, parameter, extension.savefield, reason)
        if self._debug:
            print(f"[DEBUG] {type(extension).__name__} saves {extension.savefield} of {owners[parameter]}")
        setattr(parameter, extension.savefield, value)
        written(value)
        batch, chosen = self._plan.batches.get(parameter, 0), self._chosen[extension]
        partial = chosen is not None and sorted(index % max(batch, 1) for index in chosen) != list(range(batch))
        version = version_of(parameter) if self._combines else 0
        mark = ref(value) if isinstance(value, Tensor) else mark_of(value)
        note = Note(extension, batch if chosen is None else len(chosen), extra, frozenset(), self._context, self._turn, version, mark, partial)
        owners.carry(parameter, extension.savefield, note)
        self._written.append((parameter, extension.savefield))

    def _happened(self, event: Any) -> None:
        if self._hooks is not None:
            self._hooks.happened(event)

    def after_call(self, call: ModuleCall) -> None:
        self._happened(call)

    def end(self) -> set[tuple[int, str]]:
        """Write what had to wait for the end of the pass, and run the hooks of modules that have been waiting for nothing.

        Returns:
            (id of parameter, field) of everything that was written.

        Raises:
            UnattributedError: If a parameter that was used lacks a quantity.
        """
        sources = {}
        for _, extension, state in self._late:
            sources.setdefault(extension, {}).update({source: c.shape[0] for source, c in state.items()})
        for parameter, extension, state in self._late:
            some = next(iter(state.values()))
            full = {s: state[s] if s in state else some.new_zeros(v, *some.shape[1:]) for s, v in sources[extension].items()}
            self._write(parameter, extension, self.finishes[extension](full, parameter))
        if self._hooks is not None:
            self._hooks.run_all()
        written = {(id(parameter), field) for parameter, field in self._written}
        for extension in chain.from_iterable(self._of_flow.values()) if self._plan.complete else ():
            bits = self._concerned[extension]
            missing = [p for p in self._plan.uses if self._plan.walk.bits[id(p)] & bits and (id(p), extension.savefield) not in written]
            if missing:
                raise UnattributedError(
                    f"{{names}}: nothing of which {extension.savefield!r} could be made has arrived there, although a loss was computed with it (a "
                    "function in between returns no gradient, say). Leave them out: {exclude}.",
                    {p: self._plan.walk.names[p] for p in missing},
                )
        return written

    def take_back(self) -> None:
        """Remove everything that this pass has written."""
        for parameter, field in self._written:
            parameter.__dict__.pop(field, None)

    # --------------------------------------------------------------------------------------------------------------- users
    def at_mapped(self, call: ModuleCall, extension: BackpropExtension, chosen: ModuleExtension, grad: Tensor | None, value: Any) -> None:
        """Run a user's rule.

        Args:
            call: The module call.
            extension: The extension.
            chosen: The user's rule.
            grad: Gradient with respect to the output.
            value: What the extension's flow carries there.
        """
        for name, result in ask(call, extension, chosen, grad, value).items():
            parameter = getattr(call.module, name)
            if self._connection is not None:
                with torch.enable_grad():
                    result = undifferentiable(result, parameter, extension.savefield, f"{type(chosen).__name__} gets no graph")  # noqa: PLW2901
            self._values[id(parameter), extension] = result
