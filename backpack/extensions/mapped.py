"""Which calls of modules the rules of users stand for."""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import Node
from torch.nn import Module, Parameter

from backpack.core.calls import Mark, ModuleCall
from backpack.core.plan import Plan
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.errors import UnsupportedError


def mapped(plan: Plan, extensions: Iterable[BackpropExtension]) -> list[tuple[Node, Mark, BackpropExtension, ModuleExtension]]:
    """List the calls for whose module class a user has said what to do.

    Args:
        plan: The plan.
        extensions: The extensions.

    Returns:
        (node of the output, mark, extension, module extension).

    Raises:
        UnsupportedError: If a parameter is used more than once under a user's rule, a module has several outputs, or what a user says to be
            carried is at odds with a flow of the library.
    """
    places: dict[ModuleCall, dict[bool, tuple[Node, Mark]]] = {}
    for node, marks in plan.walk.marks.items():
        for mark in marks:
            places.setdefault(mark.call, {}).setdefault(mark.base, (node, mark))
    found = []
    taken: set[tuple[BackpropExtension, Parameter]] = set()
    failed: set[tuple[BackpropExtension, Module]] = set()
    for call, place in places.items():
        # after an operation in place on an output that is a view, only the node of its base is left in the graph
        node, mark = place[min(place)]
        for extension in extensions:
            chosen = extension.module_extension(call.module)
            if chosen is not None:
                _refuse_unheard(call, extension, chosen)
                found.append((node, mark, extension, chosen))
                for name, parameter in _parameters(call, extension, chosen):
                    if (extension, parameter) in taken or plan.uses.get(parameter, 1) > 1:
                        raise UnsupportedError(
                            f"{call.path}.{name} is used more than once, but {type(chosen).__name__} says only what one use contributes "
                            f"to {extension.savefield!r}. Use the library's own rule, or a copy of the parameter for each use."
                        )
                    taken.add((extension, parameter))
            elif extension.flow is None and (extension, call.module) not in failed and not call.is_loss:
                failed.add((extension, call.module))
                extension.fail(call.module, call.path)
    return found


def _refuse_unheard(call: ModuleCall, extension: BackpropExtension, chosen: ModuleExtension) -> None:
    """Refuse a module extension that would not be told everything, or not be asked.

    Args:
        call: The call.
        extension: The extension.
        chosen: What a user has said for the class of the module.

    Raises:
        UnsupportedError: If the module has several outputs, or is carried through by the library's own rule.
    """
    if len(call.outputs) > 1:
        raise UnsupportedError(f"{call.path} returns {len(call.outputs)} tensors, {type(chosen).__name__} gets the gradient of one.")
    own = not type(chosen).backpropagate.__module__.startswith("backpack.")
    if own and call.derivatives is not None and extension.flow is not None and not extension.flow.is_gradient:
        raise UnsupportedError(
            f"{call.path}: {type(chosen).__name__}.backpropagate would not be called, as {type(extension).__name__} carries through "
            f"{type(call.module).__name__} by the library's own rule. Write an extension of your own (SecondOrderBackpropExtension with "
            "module_exts) to carry something else, or leave backpropagate out."
        )


def _parameters(call: ModuleCall, extension: BackpropExtension, chosen: ModuleExtension) -> list[tuple[str, Parameter]]:
    named = [(name, getattr(call.module, name, None)) for name in chosen.params]
    return [(name, p) for name, p in named if p is not None and id(p) not in extension.excluded()]
