"""Rules of users that come with module extensions of the library's second-order quantities: in a pass, they stand for the calls of a class.

What is carried is the same for all extensions that read it, so that rules do not belong to one of them: where others, in the same pass, know nothing
of such a rule, or of another one, it has to be registered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from backpack.core.calls import ModuleCall
from backpack.core.derivatives.agreement import agreeing
from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseLossDerivatives, BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.own_names import hidden, reading_own
from backpack.core.loss_nodes import LossNode
from backpack.core.plan import Plan
from backpack.core.recording import reading
from backpack.core.slots import Slot
from backpack.core.walk import Walk
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.flows import SqrtFlow
from backpack.extensions.mapped import changed_in_place
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.differentiation import version_of
from backpack.utils.errors import NotRecordedError, ShapeError, UnsupportedError

_BEFORE: WeakKeyDictionary[ModuleCall, tuple[Any, BaseDerivatives | None]] = WeakKeyDictionary()
"""What calls had before users' rules took their place."""


def are_handed(extensions: Iterable[BackpropExtension]) -> bool:
    """Say whether there is something to take or to give back, as in most programs there never is.

    Args:
        extensions: Active extensions.

    Returns:
        Whether there may be.
    """
    return bool(_BEFORE.data) or any([extension.has_module_exts for extension in extensions])


class _Said:
    """Asks ``backpropagate`` of a module extension, as users write it."""

    def __init__(self, extension: BackpropExtension, chosen: ModuleExtension) -> None:
        self._extension, self._chosen, self.params, self.name = extension, chosen, chosen.params, type(chosen).__name__

    def _sent(self, call: ModuleCall, g_out: Grads, carried: Tensor | None) -> Tensor:
        given = [tensor for tensor in (carried, *g_out) if tensor is not None]
        before = [*map(version_of, given)]
        with reading({call.module: call}):
            sent = self._chosen.backpropagate(self._extension, call.module, (None,) * len(call.inputs), g_out, carried)
        if before != [*map(version_of, given)]:
            raise changed_in_place(self.name, call)
        got = list(sent.shape) if isinstance(sent, Tensor) else [type(sent).__name__]
        expected = [*(got[:1] if carried is None else [len(carried)]), *call.inputs[0].shape]
        if got != expected:
            raise ShapeError(f"{call.path}: {self.name}.backpropagate has to return columns of the input, {expected}, got {got}.")
        return sent


class _SaidOfLayer(_Said, BaseParameterDerivatives):
    def _jac_t_mat_prod(self, module: Any, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return self._sent(module, g_out, mat)


class _SaidOfLoss(_Said, BaseLossDerivatives):
    def _sqrt_hessian(self, module: Any, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        return self._sent(module, tuple(map(torch.ones_like, g_out)), None)  # what the loss is multiplied by is known elsewhere

    def _sqrt_hessian_sampled(self, module: Any, g_inp: Grads, g_out: Grads, mc_samples: int = 1, subsampling: Samples = None) -> Tensor:
        return self._sqrt_hessian(module, g_inp, g_out)


def take_rules(walk: Walk, extensions: Iterable[BackpropExtension]) -> bool:
    """Let users' rules stand for the calls of a pass, and those that stood there before, where another pass has taken others.

    Args:
        walk: The graph.
        extensions: Active extensions.

    Returns:
        Whether there are other rules now, so that the graph has to be walked again.

    Raises:
        UnsupportedError: If extensions that share what is carried were told different things.
    """
    again = [call for call in walk.calls if call in _BEFORE]
    for call in again:
        call.found, call.derivatives = _BEFORE.pop(call)
    readers = _readers(extensions)
    for call in walk.calls:
        told = {extension: _rule(extension, call) for extension in readers}
        rule = next((rule for rule, _ in told.values() if rule is not None), None)
        if rule is None:
            continue
        if len({key for _, key in told.values()}) > 1:
            kinds = {extension: "nothing" if key is None else key[0].__name__ for extension, (_, key) in told.items()}
            names = " and ".join(f"{type(extension).__name__} ({kind})" for extension, kind in kinds.items())
            raise UnsupportedError(
                f"{call.path} ({type(call.module).__name__}): what is carried through it is the same for all quantities of a pass, but module "
                f"extensions say something else for each: {names}. Give all of them the same, register the derivatives "
                f"(backpack.register({type(call.module).__name__}, ...)), or use a context for each."
            )
        _provide(call, rule)
        _BEFORE[call] = call.found, call.derivatives
        call.derivatives = reading_own(agreeing(rule), hidden(call.module, call))
        call.found = call.found._replace(rule=call.derivatives)
        again.append(call)
    return bool(again)


def _readers(extensions: Iterable[BackpropExtension]) -> list[BackpropExtension]:
    # the library's second-order ones
    return [extension for extension in extensions if extension.flow is not None and not extension.flow.is_gradient]


def _is_own(chosen: ModuleExtension) -> bool:
    # whether a user has written how it carries
    return not type(chosen).backpropagate.__module__.startswith("backpack.")


def _brings_rule(chosen: ModuleExtension) -> bool:
    rule = getattr(chosen, "derivatives", None)
    return isinstance(rule, BaseDerivatives) and not type(rule).__module__.startswith("backpack.")


def _provide(call: ModuleCall, rule: BaseDerivatives) -> None:
    """Find what a rule reads that the one before did not.

    Args:
        call: The call.
        rule: The rule.

    Raises:
        NotRecordedError: If it was not kept, and cannot be found.
    """
    needs = rule.needs(call)
    slots = {f"input{i}": slot for i, slot in enumerate(call.inputs) if isinstance(slot, Slot)} if "input" in needs else {}
    for name, slot in {**slots, **({"output": call.outputs[0]} if "output" in needs else {})}.items():
        slot.value = call.at_hand(name)
        if slot.value is None:
            raise NotRecordedError(
                f"{name} of {call.path} was not kept, as the rule of {type(call.module).__name__} does not read it, but {type(rule).__name__} may. "
                "Run the forward pass in the context, or let the derivatives say what they read (keeps = frozenset({'output'}), for instance)."
            )


def _state(rule: Any) -> Hashable:
    # what tells rules, and module extensions, from others: those with the same settings are alike
    plain = (int, float, str, tuple, type(None))
    state = {name: _state(v) if isinstance(v, BaseDerivatives) else repr(v) if isinstance(v, plain) else id(v) for name, v in vars(rule).items()}
    return type(rule), frozenset((name, value) for name, value in state.items() if name not in getattr(rule, "params", ()))


def refuse_unasked(plan: Plan, extensions: Iterable[BackpropExtension]) -> None:
    """Refuse layers for which a user's ``backpropagate`` cannot stand, so that their nodes in the graph would, and losses that are functions.

    Args:
        plan: The plan.
        extensions: Active extensions.

    Raises:
        UnsupportedError: If there is one.
    """
    functions = [start.call for start in plan.losses.values() if isinstance(start.call, LossNode)]
    for extension in _readers(extensions) if functions else ():
        for call in functions:
            chosen = extension.module_extension(call.module)
            if chosen is not None and (_brings_rule(chosen) or _is_own(chosen)):
                raise UnsupportedError(
                    f"{type(chosen).__name__}, of {type(extension).__name__}, would not be asked: {call.path} was called as a function or a module "
                    f"that is not extended. Extend the loss: lossfunc = extend({type(call.module).__name__}(...))."
                )
    asked = {unit.call for unit in plan.units.values()} | {start.call for start in plan.losses.values()}
    for call in plan.walk.calls:
        if isinstance(call.derivatives, _Said) and call not in asked:
            raise UnsupportedError(
                f"{call.path}: {call.derivatives.name}.backpropagate would not be called. It is asked of losses, and of layers with one output, of "
                "which axis 0 holds the samples, whose first input alone depends on parameters, and of whose parameters it names all. Register "
                f"derivatives (backpack.register({type(call.module).__name__}, ...)), or leave backpropagate out."
            )


def _rule(extension: BackpropExtension, call: ModuleCall) -> tuple[BaseDerivatives | None, Any]:
    """Find what a user has handed over for a call.

    Args:
        extension: The extension, one of the library's.
        call: The call.

    Returns:
        The rule, and what tells it from others; ``None`` if it is the library's.

    Raises:
        UnsupportedError: If it cannot be asked.
    """
    chosen = extension.module_extension(call.module)
    if chosen is None:
        return None, None
    if not _is_own(chosen):
        return (chosen.derivatives, _state(chosen.derivatives)) if _brings_rule(chosen) else (None, None)
    if not isinstance(extension.flow, SqrtFlow) or extension.get_subsampling() is not None:
        raise UnsupportedError(
            f"{call.path}: {type(chosen).__name__}.backpropagate would not be called, as {type(extension).__name__} carries something else than "
            f"columns of all samples. Register derivatives (backpack.register({type(call.module).__name__}, ...)), write an extension of your own "
            "(SecondOrderBackpropExtension with module_exts), or leave backpropagate out."
        )
    is_loss = call.is_loss or (call.root and call.recorder.bare and call.outputs[0].shape.numel() == 1)
    return (_SaidOfLoss if is_loss else _SaidOfLayer)(extension, chosen), _state(chosen)
