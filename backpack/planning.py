"""What lies before each pass: its graph is walked, parameters that are new are taken in, and it is planned or refused."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from warnings import warn

import torch
from torch import Tensor, distributed
from torch.autograd.graph import GradientEdge

from backpack.core.adoption import adopt, has_newcomers
from backpack.core.batches import rows_of
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.core.recording import find_inner
from backpack.core.walk import Need, Walk
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.collector import Collector
from backpack.extensions.handed import are_handed, refuse_unasked, take_rules
from backpack.extensions.mapped import mapped
from backpack.utils.differentiation import nodes_of, search
from backpack.utils.errors import (
    ArgumentError,
    BackpackError,
    LossNotExtendedError,
    LossValueError,
    NotRecordedError,
    UnattributedError,
    UnsupportedError,
    merge,
)

_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
"""Where the classes of sharded modules and of sharded parameters come from."""


def walk_from(roots: list[Any], extensions: tuple[BackpropExtension, ...], only: frozenset[int] | None = None) -> Walk:
    """Walk the graph of a pass, and track the parameters that its modules have got since ``extend``.

    Args:
        roots: Tensors, or graph edges, on which autograd is called.
        extensions: Active extensions.
        only: Ids of the parameters that are not left out for another reason than ``exclude=``; ``None`` for all.

    Returns:
        The facts about the graph.

    Raises:
        ArgumentError: If an extension leaves out a name that is nobody's.
        UnsupportedError: If a CUDA graph is being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "A CUDA graph is being captured, but quantities are computed by Python code that looks at each backward pass anew, and would not run "
            "when the graph is replayed. Call backward inside of the context outside of the capture."
        )
    nodes = nodes_of(roots)
    second_order = any(ext.expects_backpropagation_quantities() for ext in extensions)
    modules = bool(_modular(extensions))

    def walk() -> Walk:
        excluded = excluded_by(extensions)
        return Walk(nodes, second_order, excluded if only is None else excluded | (owners.ids() - only), modules)

    try:
        found, unnamed = walk(), False
    except ArgumentError:  # the name may be that of a newcomer
        found, unnamed = Walk(nodes, second_order, modules=modules), True
    if is_distributed():
        refuse_sharded(found)
    if not found.double and (unnamed or has_newcomers(found)) and (adopt(found) or unnamed):
        found = walk()
    if are_handed(extensions) and take_rules(found, extensions):
        found = walk()
    find_inner(found)
    return found


def _modular(extensions: tuple[BackpropExtension, ...]) -> list[BackpropExtension]:
    # those that read modules alone, and no functions
    return [extension for extension in extensions if extension.flow is not None and extension.flow.needs is Need.MODULES]


def refuse_sharded(walk: Walk) -> None:
    """Refuse models whose parameters are spread over the ranks of a distributed program.

    Args:
        walk: The graph.

    Raises:
        UnsupportedError: If a call of such a model is in it.
    """
    flat = ["The model" for leaf in walk.leaves.values() if getattr(leaf, "_is_flat_param", False)]
    roots = [call for call in walk.calls if call.root]
    sharded = flat + [
        f"{name or call.path} ({type(module).__name__})"
        for call in roots
        for name, module in call.module.named_modules()
        if any(cls.__module__.startswith(_SHARDING) for what in (module, *module._parameters.values()) for cls in type(what).__mro__)
    ]
    if sharded:
        raise UnsupportedError(
            f"{sharded[0]} has parameters that are spread over ranks (torch.distributed.fsdp, or DTensor): a rank has a part of them, or has all "
            "of them for the time of a pass only, so that there is nothing to write results on. Use DistributedDataParallel, or call backward "
            "outside of the context."
        )


def refuse_same_graph(walk: Walk, outer: Walk) -> None:
    """Refuse a pass inside of another one, from a hook, that meets the hooks of that one.

    Args:
        walk: Its graph.
        outer: The graph of the other.

    Raises:
        UnsupportedError: If it does.
    """
    if any(node in outer.reach for node in walk.order if node not in walk.leaves):
        raise UnsupportedError(
            "A backward pass under a context of its own was called inside of another one, from a hook, and through the same graph: each would see "
            "the gradients of the other. Call it afterwards, or run the forward pass again for it."
        )


def refuse_graph(walk: Walk, returns: bool) -> None:
    """Refuse graphs in which no quantity is defined, or from which parameters are missing; warn where nothing is extended.

    Args:
        walk: The graph.
        returns: Whether gradients are returned instead of accumulated (``torch.autograd.grad``).

    Raises:
        NotRecordedError: If the loss is extended, but no parameter belongs to an extended module.
        UnsupportedError: If the graph contains derivatives of derivatives, parts of it are hidden, or a left-out term depends on activations.
    """
    if walk.double and not (returns and walk.to_loss.isdisjoint(walk.roots)):  # of a product with second derivatives, there are none
        raise UnsupportedError(
            "backward was called on a graph that contains derivatives which no extended model has returned, so that it takes derivatives of "
            "derivatives: a gradient penalty, say, or a loss that is made of derivatives (score matching, differential equations). Quantities are "
            "computed of derivatives with respect to data only, with a row for each sample: take these inside of the context, with "
            "torch.autograd.grad(..., create_graph=True), or in the model's forward pass, and return them: torch.func serves there, too, if the "
            "module that calls it is extended, and not only a part of it, which is called. "
            "Of any other term, call backward outside of the context; or leave it out, with backpack.leave_out(penalty), if it was computed in a "
            "forward pass of its own."
        )
    walk.refuse_left_out()
    if walk.hidden:
        raise UnsupportedError(
            "A part of the model is checkpointed with use_reentrant=True, which hides its graph and its parameters: their quantities would be "
            "missing. Write use_reentrant=False (torch.utils.checkpoint recommends it, too)."
        )
    if walk.foreign and not walk.parameters and any(call.is_loss for call in walk.calls):
        raise NotRecordedError(
            f"The loss is extended, but none of the {walk.foreign} parameters that it reaches belongs to an extended module: write "
            "`model = extend(model)` before the forward pass."
        )
    if walk.foreign and not (walk.parameters or returns or all(map(owners.released, walk.leaves.values()))):
        warn(
            f"backward was called inside of backpack(...), but nothing was computed: none of the {walk.foreign} parameters that it reaches belongs "
            "to an extended module. Write `model = extend(model)`, the whole model, before the forward pass, or call backward outside the context.",
            stacklevel=11,  # the line that calls loss.backward()
        )


def make_plan(walk: Walk, roots: list[Any], extensions: tuple[BackpropExtension, ...], returns: bool) -> Plan | None:
    """Plan a pass, or refuse it.

    Args:
        walk: The graph.
        roots: Tensors, or graph edges, on which autograd is called.
        extensions: Active extensions.
        returns: Whether gradients are returned instead of accumulated (``torch.autograd.grad``).

    Returns:
        The plan; ``None`` where there is nothing to be computed.

    Raises:
        LossNotExtendedError: If a second-order quantity is asked for and a path to a parameter has no extended loss.
        LossValueError: If a second-order quantity is asked for and a root is not a scalar.
        NotRecordedError: If no forward pass of an extended module was recorded.
        UnattributedError: If a parameter is used where nothing has samples.
        UnsupportedError: If the graph contains derivatives of derivatives, or parameters are complex.
    """
    refuse_graph(walk, returns)
    for call in walk.calls:
        if call.part is not None:
            call.part.frame.early_stop = False  # its last calls happen after the last tensor that autograd needs
    if walk.double or not walk.parameters:
        return None
    if meta := [walk.names[parameter] for parameter in walk.parameters if parameter.is_meta]:
        raise UnsupportedError(f"{meta[0]} is on the meta device, without numbers: where samples lie can be found out from numbers only.")
    need = max((ext.flow.needs for ext in extensions if ext.flow is not None), default=Need.COLUMNS)
    try:
        plan = Plan(walk, need)
    except (LossNotExtendedError, NotRecordedError, UnattributedError) as error:
        if returns and walk.to_loss.isdisjoint(walk.roots) and not isinstance(error, UnattributedError):
            if not walk.connected and _curves_outputs(walk):  # else the gradients are part of a penalty, perhaps
                warn(
                    "torch.autograd.grad has computed no quantities, only gradients. If none are wanted, as in an inner loop, write "
                    f"`with backpack():` around the call. Otherwise: {error}",
                    stacklevel=9,  # the line that calls torch.autograd.grad
                )
            return None  # for example a product with Jacobians: not a pass over a loss, hence no quantities
        plan = _plan_from_losses(walk, need)
        if plan is None:
            raise error
    if not plan.uses:
        return None
    if walk.second_order and any(isinstance(root, Tensor) and root.numel() != 1 for root in roots):
        shapes = [list(root.shape) for root in roots if isinstance(root, Tensor)]
        raise LossValueError(
            f"Second-order quantities need a scalar, backward was called on shapes {shapes}. Write loss.sum().backward(), or, with weights, "
            "(weights * loss).sum().backward()."
        )
    if unreal := {parameter: walk.names[parameter] for parameter in plan.uses if parameter.is_complex()}:
        raise UnsupportedError(
            "{names}: quantities of complex parameters are not defined. Use real ones and torch.view_as_complex, or leave these parameters out of "
            "all extensions: {exclude}.",
            unreal,
        )
    return plan


def _curves_outputs(walk: Walk) -> bool:
    """Say whether a root is a curved function of rows that outermost modules have returned, as a loss is, and no product with a Jacobian.

    Args:
        walk: The graph.

    Returns:
        Whether it is.
    """
    outputs = {node for node, marks in walk.marks.items() if any(mark.call in walk.outermost and rows_of(mark.call) is not None for mark in marks)}
    behind = search(walk.roots, lambda node: () if node in outputs else [n for n, _ in node.next_functions if walk.is_tracked(n)])
    return any(node in walk.has_data and node not in outputs and not walk.is_linear(node) for node in behind)


def _plan_from_losses(walk: Walk, need: Need) -> Plan | None:
    """Plan a first-order pass of which a parameter lies behind the outputs of models, in a module that returns the loss, say.

    Args:
        walk: The graph.
        need: What the pass needs to know of modules.

    Returns:
        A plan in which samples start at known losses, as for second-order quantities; ``None`` if that is refused, too.
    """
    if walk.second_order or walk.returns_loss:
        return None
    walk.returns_loss = True
    with suppress(BackpackError):
        return Plan(walk, need)
    return None


def asked_in(plan: Plan, extensions: tuple[BackpropExtension, ...], collector: Collector) -> list[tuple]:
    """Ask extensions, and what users say for classes of modules, whether they can do with a plan.

    Args:
        plan: The plan.
        extensions: Active extensions.
        collector: Collects what they make.

    Returns:
        The calls that users' rules are asked for, see ``mapped``.
    """
    collector.check()
    if not any(extension.flow is None or extension.has_module_exts for extension in extensions):
        return []
    refuse_unasked(plan, extensions)
    return mapped(plan, extensions)


def all_refused(
    first: BackpackError, roots: list[Any], extensions: tuple[BackpropExtension, ...], only: frozenset[int] | None, returns: bool
) -> BackpackError:
    """Let what a pass is refused for say all the reasons, also those that show once the first ones are out of the way.

    Args:
        first: The first ones.
        roots: Tensors, or graph edges, on which autograd is called.
        extensions: Active extensions.
        only: See ``walk_from``.
        returns: See ``make_plan``.

    Returns:
        The first error, if it is the only one; else one error about all parameters.
    """
    errors, left_out = [first], set()
    while not left_out >= set(errors[-1].about):
        left_out |= set(errors[-1].about)
        others = tuple(extension.leaving_out(left_out) for extension in extensions)
        try:
            plan = make_plan(walk_from(roots, others, only), roots, others, returns)
            if plan is not None:
                asked_in(plan, others, Collector(plan, others))
        except BackpackError as error:
            errors.append(error)
    whole = first if len(errors) == 1 else merge(errors)
    modular = _modular(extensions)
    others = tuple(extension for extension in extensions if extension not in modular)
    if modular and others and _is_accepted(roots, others, only, returns):
        names = " and ".join(type(extension).__name__ for extension in modular)
        hint = f" Beside {names}, only modules are read, and no functions: in a context without {names}, the other quantities are computed."
        whole = merge(type(part)(part.template + hint, part.about) for part in whole.parts)
    return whole


def _is_accepted(roots: list[Any], extensions: tuple[BackpropExtension, ...], only: frozenset[int] | None, returns: bool) -> bool:
    # whether nothing is refused
    try:
        plan = make_plan(walk_from(roots, extensions, only), roots, extensions, returns)
        if plan is not None:
            asked_in(plan, extensions, Collector(plan, extensions))
    except BackpackError:
        return False
    return True


def excluded_by(extensions: Iterable[BackpropExtension]) -> frozenset[int]:
    """Find the parameters that all extensions leave out.

    Args:
        extensions: The extensions.

    Returns:
        Their ids.
    """
    return frozenset.intersection(*(extension.excluded() for extension in extensions))


def leaf_of(leaf: Any) -> Any:
    """Return a leaf tensor.

    Args:
        leaf: The tensor, or its graph edge.

    Returns:
        The tensor; ``None`` for the edge of something else.
    """
    return getattr(leaf.node, "variable", None) if isinstance(leaf, GradientEdge) else leaf


def is_distributed() -> bool:
    """Say whether the program runs on several ranks.

    Returns:
        Whether it does.
    """
    return distributed.is_available() and distributed.is_initialized()
