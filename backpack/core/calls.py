"""ModuleCall: one execution of one module, as two forward hooks of the module see it.

A call keeps detached tensors (same storage, no graph) and belongs to the graph node that made its output: it lives as long as the graph
does, and gives its tensors back as soon as autograd gives back its own. Nothing is kept on modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from operator import is_
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.elementwise import RANDOM, ElementwiseDerivatives
from backpack.core.derivatives.kinds import FlatDerivatives
from backpack.core.derivatives.own_names import hidden, reading_own
from backpack.core.derivatives.records import named_arguments, number_of
from backpack.core.derivatives.registry import find
from backpack.core.options import Options
from backpack.core.slots import Slot, contents_of, places_of, recorded, same_data, shown, version_of, versions_of, was_given
from backpack.core.state import recording
from backpack.utils.errors import NotRecordedError, OverwrittenError
from backpack.utils.nested import tensors_in

KEY = "backpack"
"""Key of the calls in the metadata of a graph node."""

ORDER = count()
_ANY_MODULE = vars(Module()).keys()
_BOTH, _NOTHING = frozenset({"input", "output"}), frozenset()
_NONE: Mapping[str, Any] = MappingProxyType({})


def _keeps_nothing(module: Module) -> bool:
    return all([k in _ANY_MODULE or isinstance(v, (int, float, str, NoneType)) for part in module.modules() for k, v in vars(part).items()])


class Mark(NamedTuple):
    """What a call leaves on a graph node: this node made output ``index`` as its own output ``nr``, or made the tensor it is a view of."""

    call: ModuleCall
    index: int
    nr: int
    base: bool


class ModuleCall:
    """One execution of one module.

    Reads like the module itself: parameters come from the module; options, other tensors of the module, ``input0``, ``input1``, ... and
    ``output`` from this execution. An input or output that the rule does not need is not kept: only its shape and dtype can be read then.

    Attributes:
        kind: The module's class.
        found: What is known of it.
        derivatives: The rule of the module's class, or ``None``.
        order: Position among all calls, in the order of the forward passes; ``turns``: those of losses with which one shares columns.
        root: Whether no other extended module was running; ``outer`` is the order of the one that was.
        inputs: One entry an argument: ``Slot`` for tensors, the value itself for others.
        keywords: Names of the last of them, if the module was called with names.
        tensor_inputs: Those that are tensors.
        outputs: One ``Slot`` a tensor of the output.
        slope: Derivative of a random element-wise module, set when it is needed.
        maxima: Positions of the maxima of a max-pooling, set when they are needed.
        scratch: What rules compute of the recorded tensors and need again, as long as a backward pass is at the call.
        versions: How often each parameter and buffer of the module had been changed in place.
        places: Where the data of its parameters were.
        released: Whether tensors that the rule needs have been given back.
        stays: Whether tensors are kept when autograd gives back its own, in the pass that is running.
        seen: The positional arguments, as long as the module runs.
        detached: Numbers of the outputs that have no graph.
        origin: The checkpointed part in which the call lies.
        part: The same, as long as its tensors are yet to be computed again.
    """

    slope: Tensor | None = None
    maxima: Tensor | None = None
    scratch: dict[str, Any] | None = None
    seen: tuple | None = None
    part: Any = None
    origin: Any = None
    versions: Sequence[int | None] = ()
    places: Sequence[int] = ()
    detached: frozenset[int] = frozenset()
    released, stays, turns = False, False, (0, 0)
    _constants: Mapping[str, Tensor | None] = _NONE
    input0, input1, output = map(recorded, ("input0", "input1", "output"))  # what is read most, found at once

    def __init__(self, module: Module, recorder: Any, args: tuple, kwargs: dict[str, Any], ruled: bool) -> None:
        """Begin the record of a call.

        Args:
            module: The module.
            recorder: Its recorder.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            ruled: Whether the rule of its class may hold.
        """
        self.kind, self.found = type(module), find(module)
        rule = self.found.rule if ruled else None
        self.derivatives: BaseDerivatives | None = rule
        self.recorder, self.order, running = recorder, next(ORDER), recording.open
        self.root, self.outer = not running, running[-1].order if running else None
        self.outputs: list[Slot] = []
        self._module = ref(module)
        if rule is not None:
            self._needs = rule.needs(module)
        else:
            self._needs = _NOTHING if module._modules and not (self.root and recorder.bare) else _BOTH
        self._keeps = _BOTH if recording.keep_all else self._needs
        options = recorder.options
        if options is None or not options.hold(module):
            recorder.options = options = Options(module)
        self._options = options
        parameters, constants = module._parameters, options.constants(module) if options.tensors else module._buffers
        if parameters or constants:
            if constants and rule is not None:
                self._constants = {name: t if t is None or not t.requires_grad else t.detach() for name, t in constants.items()}
            self.versions = versions_of(parameters, constants)
        self.see(module, args, kwargs)
        if not self.found.ours:
            self.found = self.found._replace(rule=reading_own(self.found.rule, hidden(module, self)))
            self.derivatives = self.found.rule if ruled else None

    def see(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record the arguments, in the order of the signature; those not given, between given ones, have their default values.

        Args:
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        keep = "input" in self._keeps
        clone = keep and vars(module).get("inplace") is True
        named = named_arguments(self.kind, len(args), tuple(kwargs)) | kwargs if kwargs else {}
        self.inputs, self.tensor_inputs, self.keywords = [*args, *named.values()], [], tuple(named)
        for i, arg in enumerate(self.inputs):
            if isinstance(arg, Tensor):
                self.inputs[i] = slot = Slot(arg, keep, clone, True)
                self.tensor_inputs.append(slot)

    @property
    def path(self) -> str:
        """Name of the module, for messages."""
        return self.recorder.path or self.recorder.kind

    @property
    def is_loss(self) -> bool:
        """Whether the module is a loss function."""
        return self.derivatives is not None and self.derivatives.is_loss

    @property
    def module(self) -> Module:
        """The module.

        Raises:
            NotRecordedError: If the module does not exist any more.
        """
        module = self._module if isinstance(self._module, Module) else self._module()
        if module is None:
            raise NotRecordedError(f"The module {self.path}, which is needed again, was deleted after its forward pass. Keep a reference to it.")
        return module

    @property
    def as_called(self) -> Module:
        """The module with the options, and with the tensors other than parameters, that it had: a stand-in, if it has others now."""
        module, options, constants = self.module, self._options, self._constants
        now = options.constants(module) if constants else constants
        same = options.hold(module) and len(now) == len(constants) and all(map(is_, now.values(), constants.values()))
        return module if same else options.restored(module, constants)

    @property
    def odd_types(self) -> bool:
        """Whether no rule holds, as they are complex, or differ in precision (autocast): what was computed is not what the tensors say then."""
        first = self.inputs[0] if self.inputs else None
        if self.released or not isinstance(first, Slot):  # refused later, where the tensors are asked for; no rule stands for such a call
            return False
        kind, given = self.outputs[0].dtype, first.dtype
        if kind.is_complex or given.is_complex or (given != kind and given.is_floating_point):
            return True
        return any([p is not None and p.dtype != kind for p in self.module._parameters.values()])

    @property
    def slots(self) -> list[Slot]:
        """The inputs and outputs that are tensors."""
        return [*self.tensor_inputs, *self.outputs]

    def attach(self, output: Any) -> None:
        """Hand the call over to the graph nodes that made the output.

        Args:
            output: What the module returned.
        """
        module = self._module()
        if self.versions:
            self.places = places_of(module._parameters)
        is_loss = self.root and self.recorder.bare if self.derivatives is None else self.derivatives.is_loss
        if is_loss and (self.kind.__module__.startswith("torch.nn") or _keeps_nothing(module)):
            self._module = module  # often a temporary object, `extend(MSELoss())(...)`, which does not store what it returns
        keep = "output" in self._keeps
        sources = [slot.edge[0] for slot in self.tensor_inputs if slot.edge is not None]
        tensors = [output] if isinstance(output, Tensor) else tensors_in(output)
        for index, tensor in enumerate(tensors):
            node = tensor.grad_fn
            self.outputs.append(Slot(tensor, keep))
            if node is None:
                self.detached |= {index}
            if node is None or node in sources:
                continue  # what it was given: a node that holds the call would be held by it
            node.metadata.setdefault(KEY, []).append(Mark(self, index, tensor.output_nr, False))
            base = same_data(tensor) if tensor._is_view() else None
            if base is not None and base.grad_fn is not None and not was_given(base, self.inputs):
                # an operation in place on a view rewrites the graph below its base: then only the base's node runs
                node = base.grad_fn
                node.metadata.setdefault(KEY, []).append(Mark(self, index, base.output_nr, True))
            if self._keeps and len(tensors) == 1:
                node.register_hook(self._on_executed)
        for slot in self.slots if self._keeps is not self._needs else ():
            slot.kept = ("output" if slot in self.outputs else "input") in self._needs
        rule = self.derivatives
        if rule is not None and type(rule).applies is not BaseDerivatives.applies and tensors and not rule.applies(self):
            self.derivatives = RANDOM if isinstance(rule, FlatDerivatives) and isinstance(rule, ElementwiseDerivatives) else None

    def _on_executed(self, *_: Any) -> None:
        if not (torch._C._autograd._get_current_graph_task_keep_graph() or (self.stays and self.origin is None)):
            self.release()
        elif self.origin is not None:
            self.defer(self.origin)

    def defer(self, part: Any) -> None:
        """Keep no tensors: they are computed again.

        Args:
            part: The checkpointed part in which the call lies.
        """
        self.origin = self.part = part
        for slot in self.slots:
            slot.value = None

    def release(self) -> None:
        """Give the recorded tensors back."""
        self.maxima = self.part = self.scratch = None
        for slot in (*self.tensor_inputs, *self.outputs):
            slot.value = None
            self.released |= slot.kept

    def without_graph(self) -> ModuleCall:
        """Copy the record for somebody who reads it after the backward pass, maybe on behalf of a parameter, to which the graph leads.

        Returns:
            A record that shares the tensors, and keeps them when this one gives them back.
        """
        if self.part is not None:
            self.part.restore(self)
        other = object.__new__(ModuleCall)
        other.__dict__ |= {**vars(self), "scratch": None, "contents": contents_of(self.module._parameters)}
        other.inputs, other.outputs = ([s.without_graph() if isinstance(s, Slot) else s for s in slots] for slots in (self.inputs, self.outputs))
        other.tensor_inputs = [slot for slot in other.inputs if isinstance(slot, Slot)]
        return other

    def tensor(self, name: str) -> Any:
        """Return a recorded input or output.

        Args:
            name: ``"output"`` or ``"input{i}"``.

        Returns:
            Detached tensor, ``None`` if it was not kept; for an argument that is no tensor, its value.

        Raises:
            AttributeError: If the call has no such input or output.
        """
        if self.part is not None:
            self.part.restore(self)
        number = number_of(name)
        slots, index = (self.outputs, 0) if number < 0 else (self.inputs, number)
        if index >= len(slots):
            raise AttributeError(f"{self.path} was called without {name}.")
        if not isinstance(slot := slots[index], Slot):
            return slot
        value = slot.read(name, self)
        if value is not None and recording.connection is not None:
            return recording.connection.connect(slot, name, self, value)
        return value

    def replay(self) -> Any:
        """Compute the output again, for a rule that makes it from nothing but inputs and parameters.

        Returns:
            The output; ``None`` if an input is not at hand, a parameter has changed, or the module has no such rule.
        """
        if self.derivatives is None or self.derivatives is RANDOM or self._changed:
            return None
        inputs = [self.at_hand(f"input{i}") for i in range(len(self.inputs))]
        if any(inputs[i] is None and isinstance(slot, Slot) for i, slot in enumerate(self.inputs)):
            return None
        module = self.as_called
        if vars(module).get("inplace") is True:
            inputs = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
        with torch.set_grad_enabled(recording.connection is not None):
            return tensors_in(type(module).forward(module, *inputs))[0]

    def recover(self, name: str) -> Any:
        """Find a tensor that was not kept with the call that made it, or compute it, where that is possible.

        Args:
            name: ``"output"`` or ``"input{i}"``.

        Returns:
            The tensor, or ``None``.
        """
        if name == "output":
            return self.replay()
        slot = self.inputs[number_of(name)]
        edge = slot.edge if isinstance(slot, Slot) else None
        for mark in edge[0].metadata.get(KEY, ()) if edge is not None else ():
            if mark.nr == edge[1] and not mark.base and mark.call is not self and len(mark.call.outputs) == 1:
                try:
                    return mark.call.at_hand("output")
                except OverwrittenError:
                    return mark.call.replay()
        return None

    def at_hand(self, name: str) -> Any:
        """Return a recorded input or output, or recover it.

        Args:
            name: ``"output"`` or ``"input{i}"``.

        Returns:
            Detached tensor, ``None`` if it cannot be recovered; for an argument that is no tensor, its value.
        """
        value = self.tensor(name)
        return self.recover(name) if value is None else value

    @property
    def moved(self) -> bool:
        """Whether a parameter holds other data than in the forward pass (``p.data = ...``, or in place): autograd may have kept the old ones."""
        parameters = self.module._parameters
        return list(self.places) != places_of(parameters) or list(self.versions[: len(parameters)]) != versions_of(parameters, {})

    @property
    def _changed(self) -> bool:
        module = self.module
        return self.moved or list(self.versions) != versions_of(module._parameters, self._constants or self._options.constants(module))

    def refuse_changed(self) -> None:
        """Refuse to go on if a parameter or a buffer of the module was changed in place since.

        Raises:
            OverwrittenError: If one was.
        """
        if self._changed or contents_of(self.module._parameters) != self.contents:
            raise OverwrittenError(
                f"The parameters or buffers of {self.path} were changed after the forward pass, so that a product with a curvature matrix there is "
                "not defined any more. Multiply before the optimizer's step, or run forward and backward again."
            )

    def _constant(self, name: str) -> Tensor | None:
        constant = self._constants[name]
        if constant is not None and version_of(constant) != self.versions[list(self._constants).index(name) - len(self._constants)]:
            raise OverwrittenError(
                f"{name} of {self.path} was changed in place after the forward pass, but the rule of {self.recorder.kind} needs its old value. "
                f"Put another tensor in its place (module.{name} = ...), or change it after backward."
            )
        return constant

    def __repr__(self) -> str:
        return f"{self.recorder.path} ({self.recorder.kind})" if self.recorder.path else self.recorder.kind

    def __getattr__(self, name: str) -> Any:
        return ModuleCall.own(self, name) if number_of(name) is None else shown(self, name)

    def own(self, name: str) -> Any:
        """Return what the module had under a name when it was called.

        Args:
            name: Name of an attribute.

        Returns:
            Its value.

        Raises:
            AttributeError: If there was none.
        """
        if name in self._options:
            return self._options[name]
        if name in self._constants:
            return self._constant(name)
        # not self.module: where that raises an AttributeError, Python would come back here
        parameters = ModuleCall.module.fget(self)._parameters
        return parameters[name] if name in parameters else getattr(ModuleCall.as_called.fget(self), name)
