"""Which calls of modules the rules of users stand for."""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import Node
from torch.nn import Module

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
    found, taken = [], set()
    failed: set[tuple[BackpropExtension, Module]] = set()
    for call, place in places.items():
        # after an operation in place on an output that is a view, only the node of its base is left in the graph
        node, mark = place[min(place)]
        module = call.module
        for extension in extensions:
            chosen = extension.module_extension(module)
            if chosen is not None:
                if len(call.outputs) > 1:
                    raise UnsupportedError(f"{call.path} returns {len(call.outputs)} tensors, {type(chosen).__name__} gets the gradient of one.")
                own = not type(chosen).backpropagate.__module__.startswith("backpack.")
                if own and call.derivatives is not None and extension.flow is not None and not extension.flow.is_gradient:
                    raise UnsupportedError(
                        f"{call.path}: {type(chosen).__name__}.backpropagate would not be called, as {type(extension).__name__} carries through "
                        f"{type(module).__name__} by the library's own rule. Write an extension of your own (SecondOrderBackpropExtension with "
                        "module_exts) to carry something else, or leave backpropagate out."
                    )
                found.append((node, mark, extension, chosen))
                for name in chosen.params:
                    parameter = getattr(module, name, None)
                    if parameter is None or id(parameter) in extension.excluded():
                        continue
                    if (extension, id(parameter)) in taken or plan.uses.get(parameter, 1) > 1:
                        raise UnsupportedError(
                            f"{call.path}.{name} is used more than once, but {type(chosen).__name__} says only what one use contributes "
                            f"to {extension.savefield!r}. Use the library's own rule, or a copy of the parameter for each use."
                        )
                    taken.add((extension, id(parameter)))
            elif extension.flow is None and (extension, module) not in failed and not call.is_loss:
                failed.add((extension, module))
                extension.fail(module, call.path)
    return found
