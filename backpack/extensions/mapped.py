"""Which calls of modules the rules of users stand for, and what they are asked there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module, Parameter

from backpack.core.calls import Mark, ModuleCall
from backpack.core.graph import shape_of
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.core.recording import reading
from backpack.core.samples import Layout, plain_layout, seen_through_reshape, settle
from backpack.core.slots import Slot
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.rules import as_published
from backpack.extensions.saved_quantities import makers
from backpack.extensions.signed_flow import SignedSqrtFlow
from backpack.utils.differentiation import version_of
from backpack.utils.errors import LossNotExtendedError, OverwrittenError, UnsupportedError, merge
from backpack.utils.module_classification import is_loss
from backpack.utils.nested import tensors_in


def mapped(plan: Plan, extensions: Iterable[BackpropExtension]) -> list[tuple[Node, Mark, BackpropExtension, ModuleExtension]]:
    """List the calls for whose module class a user has said what to do.

    Args:
        plan: The plan.
        extensions: The extensions.

    Returns:
        (node of the output, mark, extension, module extension).

    Raises:
        merge: If parameters are used more than once under a user's rule, or by calls whose samples are somewhere else than the rule takes them to be.
        UnsupportedError: If a parameter is used without a call; if a module has several outputs, one that is overwritten after it was used, or its
            samples somewhere else than the rule takes them to be.
    """
    places: dict[ModuleCall, dict[bool, tuple[Node, Mark]]] = {}
    for node, marks in plan.walk.marks.items():
        for mark in marks:
            places.setdefault(mark.call, {}).setdefault(mark.base, (node, mark))
    found, refused = [], []
    taken: set[tuple[BackpropExtension, Parameter]] = set()
    failed: set[tuple[BackpropExtension, Module]] = set()
    asked: dict[BackpropExtension, set[Parameter | None]] = {extension: set() for extension in extensions if extension.flow is None}
    for call, place in places.items():
        # after an operation in place on an output that is a view, only the node of its base is left in the graph
        node, mark = place[min(place)]
        for extension in extensions:
            chosen = extension.module_extension(call.module)
            if extension in asked:
                asked[extension].update(call.module._parameters.values())
            if chosen is not None:
                if len(call.outputs) > 1:
                    raise UnsupportedError(f"{call.path} returns {len(call.outputs)} tensors, {type(chosen).__name__} gets the gradient of one.")
                if len(place) > 1 and plan.walk.consumers[place[True][0]] > 1:
                    raise UnsupportedError(
                        f"What {call.path} returns is used as it was, and overwritten afterwards, so that its gradient comes in two parts, of which "
                        f"{type(chosen).__name__} would be given one. Do the operation out of place, or use the library's own rule."
                    )
                found.append((node, mark, extension, chosen))
                wanted = chosen.wanted(extension, call.module)
                if not wanted and not call.is_loss and (error := _other_rows(plan, node, mark, extension, chosen, None)):
                    raise error
                for parameter in wanted.values():
                    again = (extension, parameter) in taken or plan.uses.get(parameter, 1) > 1
                    error = _used_again(extension, chosen, parameter) if again else _other_rows(plan, node, mark, extension, chosen, parameter)
                    refused += [error] * (error is not None)
                    taken.add((extension, parameter))
            elif extension.flow is None and (extension, call.module) not in failed and not call.is_loss:
                failed.add((extension, call.module))
                extension.fail(call.module, call.path)
    if refused:
        raise merge(refused)
    for extension, heard in asked.items():
        out = extension.excluded()
        if unheard := [p for p in plan.uses if p not in heard and id(p) not in out]:
            extension.fail_at(owners.about(unheard))
        if extension.expects_backpropagation_quantities():
            told = answered(plan, extension)
            for call in places:
                if extension.module_extension(call.module) is not None:
                    _refuse_lost(plan, call, extension, told)
    return found


def _told(slot: Slot, extension: BackpropExtension) -> list[ModuleCall]:
    """List the calls to which what an extension carries is handed on from an input of another one.

    Args:
        slot: The input.
        extension: The extension.

    Returns:
        Those that made it, and will be asked. A call that has returned its input is told by what has used that, and is there, too.
    """
    return [maker for maker in makers(slot) if extension.module_extension(maker.module) is not None]


def _refuse_lost(plan: Plan, call: ModuleCall, extension: BackpropExtension, told: int) -> None:
    """Refuse an input of a call that no call has made which will be asked: what is carried there is lost, although other paths may deliver something.

    Args:
        plan: The plan.
        call: The call, which has a module extension.
        extension: The extension.
        told: Bit set of the parameters at which it makes something of what arrives.

    Raises:
        LossNotExtendedError: If some of these lie upstream of such an input.
    """
    for slot in call.tensor_inputs:
        node = None if slot.edge is None else slot.edge[0]
        lost = plan.walk.reach.get(node, 0) & told
        if lost and not _told(slot, extension):
            raise LossNotExtendedError(
                f"What {extension.savefield!r} carries is lost at an input of {call.path}, on the way to {{names}}: {plan.walk.where(node)} has made "
                "it. Every operation in between must be a module that is extended and has a module extension. Write it as one, or leave these "
                "parameters out: {exclude}.",
                plan.walk.named(lost),
            )


def answered(plan: Plan, extension: BackpropExtension) -> int:
    """Find the parameters for which a module extension says what is made of what an extension carries.

    Args:
        plan: The plan.
        extension: The extension.

    Returns:
        Bit set.
    """
    if not extension.has_module_exts:
        return 0
    modules = {mark.call.module for marks in plan.walk.marks.values() for mark in marks}
    said = ((module, extension.module_extension(module)) for module in modules)
    return plan.walk.bits_of(frozenset(id(p) for module, chosen in said if chosen is not None for p in chosen.wanted(extension, module).values()))


def changed_in_place(name: str, call: ModuleCall) -> OverwrittenError:
    """Refuse a module extension that writes on what it is given.

    Args:
        name: Name of its class.
        call: The call at which it was asked.

    Returns:
        The error.
    """
    return OverwrittenError(
        f"{name}, at {call.path}, changes in place what it is given, of which others are made, the gradient among them. Let it work out of place, or "
        "on a copy."
    )


def _used_again(extension: BackpropExtension, chosen: ModuleExtension, parameter: Parameter) -> UnsupportedError:
    """Refuse a parameter of which a user's rule would see one use of several.

    Args:
        extension: The extension.
        chosen: What a user has said for the class of the module.
        parameter: The parameter.

    Returns:
        The error.
    """
    return UnsupportedError(
        f"{{names}}: used more than once, but {type(chosen).__name__} says only what one use contributes to {extension.savefield!r}. Use the "
        "library's own rule, a copy of the parameter for each use, or leave out {exclude}.",
        owners.about([parameter]),
    )


def _other_rows(
    plan: Plan, node: Node, mark: Mark, extension: BackpropExtension, chosen: ModuleExtension, parameter: Parameter | None
) -> UnsupportedError | None:
    """Refuse to hand a module extension an output whose samples are somewhere else than where it takes them to be.

    Args:
        plan: The plan.
        node: Node of the output.
        mark: The mark of the call there.
        extension: The extension.
        chosen: What a user has said for the class of the module.
        parameter: The parameter; ``None`` if it makes nothing of any.

    Returns:
        The error, if sample ``n`` is not at index ``n`` of axis 0.
    """
    columns = extension.flow is not None and not extension.flow.is_gradient
    signed = isinstance(extension.flow, SignedSqrtFlow) and parameter is not None  # the signs are those of samples
    if (chosen.any_layout or parameter is None) and not signed and not (columns and extension.get_subsampling() is not None):
        return None
    layout, shape = plan.states.get(node, {}).get(mark.nr), mark.call.outputs[0].shape
    if isinstance(layout, Layout) and mark.base:
        layout = seen_through_reshape(layout, shape_of((node, mark.nr)), shape)
    if isinstance(layout, Layout) and settle(layout) == plain_layout(layout.samples):
        return None
    about = {} if parameter is None else owners.about([parameter])
    return UnsupportedError(
        f"{'{names}: ' if about else ''}{type(chosen).__name__} makes {extension.savefield!r} of a call in which the samples of the mini-batch "
        f"are not, or not known to be, those of axis 0: {mark.call} returned {list(shape)}. Put the samples on axis 0, use the library's own rule"
        f"{', or leave out {exclude}' if about else ''}. Or, if the module extension needs not know where samples are, nor gets columns of "
        "chosen ones, or with signs, say so: any_layout = True.",
        about,
    )


def ask(call: ModuleCall, extension: BackpropExtension, chosen: ModuleExtension, grad: Tensor | None, value: Any) -> dict[str, Any]:
    """Run a user's rule at a call, and hand on what it carries.

    Args:
        call: The module call.
        extension: The extension.
        chosen: The user's rule.
        grad: Gradient with respect to the output.
        value: What the extension's flow carries there.

    Returns:
        Name of the parameter to quantity.

    Raises:
        LossNotExtendedError: If the extension carries something of its own, and it has not arrived here.
        UnsupportedError: If something of two losses meets, and the extension has not said how it is united.
        changed_in_place: If the rule changes in place what it is given.
    """
    module, saved, shape = call.module, extension.saved_quantities, call.outputs[0].shape
    carries = extension.flow is None and extension.expects_backpropagation_quantities()
    grad = None if grad is None else grad.reshape(shape)
    if isinstance(value, dict) and not (isinstance(extension.flow, SignedSqrtFlow) and not chosen.wanted(extension, module)):
        columns = {source: mat.reshape(mat.shape[0], *shape) for source, mat in value.items()}
        value = as_published(extension, columns)
    if carries:
        value = saved.retrieve_quantity(call, delete_old=False)
        if value is None and not (call.is_loss or is_loss(module)):
            raise LossNotExtendedError(
                f"Nothing that {extension.savefield!r} carries has arrived at {call.path}: the loss, and every operation between it and "
                "this module, must be an extended module with a module extension whose backpropagate returns something."
            )
    given = (None,) * len(call.inputs), (grad,), value
    tensors = tensors_in(given)
    before = [*map(version_of, tensors)]
    with reading({module: call}):
        results = chosen.compute(extension, module, *given)
        below = carries and any(slot.edge is not None for slot in call.tensor_inputs)
        carried = chosen.backpropagate(extension, module, *given) if below else None
    if before != [*map(version_of, tensors)]:
        raise changed_in_place(type(chosen).__name__, call)
    losses, unite = saved.losses.get(call, frozenset([call])), extension.accumulate_backpropagated_quantities
    told = (_told(slot, extension) for slot in call.tensor_inputs) if carried is not None else ()
    for maker in chain.from_iterable(calls for calls in told if call not in calls):
        if saved.losses.setdefault(maker, losses) != losses:
            if type(extension).accumulate_backpropagated_quantities is BackpropExtension.accumulate_backpropagated_quantities:
                named = ", ".join(sorted(loss.path for loss in saved.losses[maker] | losses))
                raise UnsupportedError(
                    f"What {extension.savefield!r} carries from several losses ({named}) meets at an input of {call.path}. It is not "
                    f"known to add up: square roots stand side by side. Let {type(extension).__name__} define "
                    "accumulate_backpropagated_quantities(existing, other), or call backward for each loss."
                )
            saved.losses[maker] |= losses
        saved.save_quantity(maker, carried, unite)
    return results
