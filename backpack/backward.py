"""The context manager ``backpack``: catches calls of autograd and runs them with hooks on the graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module, Parameter

from backpack.accumulation import Earlier, combination_of, refuse_overwriting
from backpack.context import CTX
from backpack.core import node_layers, node_lookups, node_products, node_recurrent  # noqa: F401  (layers that it reads off graph nodes)
from backpack.core.calls import Mark
from backpack.core.checkpoints import once
from backpack.core.connect import Connection
from backpack.core.derived import count_as_returned
from backpack.core.engine import Request, refuse_hidden, transformed, unwatch, watch, without_saved_hooks
from backpack.core.owners import owners
from backpack.core.passing import Pass
from backpack.core.plan import Plan
from backpack.core.recording import drop_interrupted, made_by_running
from backpack.core.state import recording
from backpack.core.walk import Walk
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.blocks import blocks_for
from backpack.extensions.collector import Collector
from backpack.extensions.hook_queue import HookQueue
from backpack.extensions.module_extension import ModuleExtension
from backpack.planning import all_refused, asked_in, excluded_by, is_distributed, leaf_of, make_plan, refuse_same_graph, walk_from
from backpack.utils.differentiation import nodes_of
from backpack.utils.errors import ArgumentError, ArgumentTypeError, BackpackError, UnsupportedError
from backpack.utils.hooks import no_op
from backpack.utils.memory import bytes_of
from backpack.utils.pages import reusing
from backpack.utils.precision import require_type, without_autocast

_NEEDED = frozenset(dir(object)) | frozenset("detach clone numel size dim stride to copy_ view".split())
"""Methods of parameters without which they cannot be shown, copied or used; others, as ``diagonal``, may give way to a result."""


class backpack:  # noqa: N801
    """Context in which a backward pass also computes the quantities of the given extensions.

    Contexts replace, they do not merge: inside a nested one only its own extensions are active.

    ``backward(inputs=[w])`` writes quantities of ``w`` alone, as it does with ``.grad``; ``exclude=`` of an extension leaves parameters out of it.

    Example:
        >>> model, lossfunc = extend(model), extend(torch.nn.CrossEntropyLoss())
        >>> with backpack(Variance(), DiagGGNExact()):
        ...     lossfunc(model(X), y).backward()
        >>> for p in model.parameters():
        ...     p.grad, p.variance, p.diag_ggn_exact
    """

    def __init__(
        self,
        *exts: BackpropExtension,
        extension_hook: Callable[[Module], None] | None = None,
        debug: bool = False,
        retain_graph: bool = False,
        accumulate: bool = False,
        dtype: torch.dtype | None = None,
        memory: int | str | None = None,
    ) -> None:
        """Choose the extensions.

        Args:
            *exts: Instances of extensions; none is allowed.
            extension_hook: Called with every extended module of a backward pass, once, when all quantities of its parameters (and of the modules
                inside it) are there. It may read, replace and delete them. Without extensions, it is called when the pass is over. Not called with
                containers that only arrange others (``Sequential``), nor with modules that return their input (``Identity``, ``Dropout`` in
                evaluation mode, ``Flatten`` of ``[N, D]``).
            debug: Print what happens.
            retain_graph: Keep ``module.input0``, ... and ``module.output`` readable after the backward pass, as long as the graph lives, as
                ``backward(retain_graph=True)`` does. In forward passes under this context, all of them are kept, and not only what rules need.
            accumulate: Unite the results of all backward passes under this context, as ``.grad`` does: parameters carry, after each pass, the
                quantities of the sum of the losses so far on all their samples. ``clear(model)`` lets it begin anew.
            dtype: Type of results that are tensors, or lists of tensors. ``None`` stands for the type of the parameter, or ``float32`` for squares of
                numbers that have half precision. Functions (``HMP``, ``GGNMP``, ``PCHMP``) take and return the type of the parameter in any case.
            memory: How much memory second-order quantities may use for the columns that they carry beside the gradient: a number of bytes, or a
                text such as ``"2GiB"`` or ``"500MB"``; ``None`` for 128 MiB. Where all columns would need more, as estimated from shapes, they are
                carried one block after the other. Results do not depend on it, and their own memory is not counted. A block has one column at
                least. Columns cannot be carried in blocks in a pass with ``create_graph=True``, in a model with checkpointed parts, for an extension
                with module extensions, and for a Monte-Carlo estimate whose ``subsampling`` repeats samples or has negative indices.

        Raises:
            UnsupportedError: If an extension is to accumulate whose results for parts of a mini-batch do not make up that of the whole, or results in
                half precision.
            ArgumentError: If something is not an instance of an extension, two of them save to the same field, or one to a
                field of the parameters' own, or the memory is not positive.
            ArgumentTypeError: If the extension hook is not callable, the type is none of floating-point numbers, or the memory is no amount.
        """
        for ext in exts:
            if isinstance(ext, type) and issubclass(ext, BackpropExtension):
                raise ArgumentError(f"backpack() needs instances of extensions, got the class {ext.__name__}. Write {ext.__name__}().")
            if not isinstance(ext, BackpropExtension):
                hint = " Unpack it: backpack(*extensions)." if isinstance(ext, list | tuple) else ""
                raise ArgumentError(
                    f"backpack() needs instances of extensions (backpack.extensions), got {ext!r} of type {type(ext).__name__}.{hint}"
                )
        fields = [ext.savefield for ext in exts]
        for ext, field in zip(exts, fields, strict=True):
            if not isinstance(field, str) or not field or field in _NEEDED or hasattr(type(getattr(Parameter, field, None)), "__set__"):
                raise ArgumentError(f"{type(ext).__name__} must save to a name that parameters have no use for themselves, got savefield={field!r}.")
            if fields.count(field) > 1:
                raise ArgumentError(f"Two active extensions save to {field!r}, so that one would overwrite the other. Use two contexts.")
        if extension_hook is not None and not callable(extension_hook):
            raise ArgumentTypeError(f"extension_hook must be a function of a module, got {extension_hook!r}.")
        require_type(dtype, adds=accumulate)
        for ext in exts if accumulate else ():
            combination_of(ext, ext.savefield)
        self.exts, self.accumulate, self.dtype = exts, accumulate, dtype
        self.memory = None if memory is None else bytes_of(memory)
        self.debug = debug
        self.extension_hook = no_op if extension_hook is None else extension_hook
        self.retain_graph = retain_graph

    def __enter__(self) -> None:
        drop_interrupted()
        before = CTX.exchange(self.exts, self.debug, self.extension_hook, self.retain_graph)
        _entered.contexts.append(Entry(self, (before, recording.keep_all)))
        recording.keep_all = self.retain_graph or any(ext.has_module_exts for ext in self.exts)
        watch(_on_backward)

    def __exit__(self, *exc: Any) -> None:
        contexts = _entered.contexts
        place = max((i for i, entry in enumerate(contexts) if entry.context is self), default=None)
        if place is None:
            raise UnsupportedError(
                "This context of backpack(...) is left in a thread that has not entered it, or has left it before. It is active in the thread that "
                "enters it, until that one leaves it: close generators that contain it there."
            )
        entry = contexts.pop(place)
        unwatch()
        if place < len(contexts):  # generators may leave contexts in another order: those that were entered since go on
            contexts[place].before = entry.before
        else:
            settings, recording.keep_all = entry.before
            CTX.exchange(*settings)


class Entry:
    """A context that a thread has entered.

    Attributes:
        context: The context.
        before: The settings before.
        walk: The graph of the pass that is running under it.
        number: Tells what passes under it have written from everything else.
        turns: Numbers of the passes under all contexts.
    """

    _numbers = count(1)
    turns = count(1)

    def __init__(self, context: backpack, before: tuple) -> None:
        self.context, self.before, self.number = context, before, next(Entry._numbers)
        self.walk: Walk | None = None


class _Entered(threading.local):
    """What a thread has entered.

    Attributes:
        contexts: The contexts, the innermost last.
        running: The one under which a pass is running: calls of autograd inside of it are none of ours, but for those under contexts of their own.
    """

    running: Entry | None = None

    def __init__(self) -> None:
        self.contexts: list[Entry] = []


_entered = _Entered()


def running() -> bool:
    """Say whether a backward pass with quantities is running in this thread.

    Returns:
        Whether one is.
    """
    return _entered.running is not None


def _is_inside() -> bool:
    return _entered.running is not None and _entered.contexts[-1:] in ([], [_entered.running])


def keeps_tensors() -> bool:
    """Say whether recorded tensors survive a backward pass under the active context.

    Returns:
        Whether they do.
    """
    return CTX.get_retain_graph() or any(extension.keeps_calls for extension in CTX.get_active_exts())


def _on_backward(request: Request) -> Any:
    """Run a call of autograd, with quantities if the calling thread has asked for some.

    Args:
        request: The call.

    Returns:
        What the original call returns.
    """
    result = _with_hook(request)
    count_as_returned(request, result)
    return result


def _with_hook(request: Request) -> Any:
    hook, stay = CTX.get_extension_hook(), CTX.get_retain_graph()
    alone = hook is not no_op and not CTX.get_active_exts() and not request.batched
    if _is_inside() or transformed() or not (stay or alone):
        return _with_quantities(request)
    walk = Walk(nodes_of(request.roots))
    for call in walk.calls:
        call.stays = True
    try:
        result = _with_quantities(request)
        if alone and not walk.double:
            CTX.set_extension_hook(no_op)  # passes that the hook takes are its own
            HookQueue(walk, None, hook, CTX.get_debug()).run_all()
        return result
    finally:
        if alone:
            CTX.set_extension_hook(hook)
        for call in walk.calls:
            call.stays = False
            if not (stay or request.retain or call.released):
                call.release()


def _with_quantities(request: Request) -> Any:
    extensions = CTX.get_active_exts()
    if _is_inside() or recording.apart or not extensions or not _entered.contexts or transformed():
        if running() and extensions and not request.returns:
            refuse_hidden(request, excluded_by(extensions))
        return request.execute()
    entry, roots, only, walk = _entered.contexts[-1], list(request.roots), None, None
    if entry.context.accumulate and request.returns:  # adds nothing to .grad, hence nothing to the quantities
        return request.execute()
    if request.inputs:
        only = frozenset(id(leaf_of(leaf)) for leaf in request.inputs)
    outer, _entered.running = _entered.running, entry
    try:
        if request.batched:  # what hooks would see are no gradients
            walk = Walk(nodes_of(roots))
            if not walk.double:
                _remove_stale(walk, (), extensions, entry)
            return request.execute()
        with made_by_running(roots), once():
            try:
                walk = walk_from(roots, extensions, only)
                if outer is not None and outer.walk is not None:
                    refuse_same_graph(walk, outer.walk)
                entry.walk, walk.connected = walk, request.create_graph
                plan = make_plan(walk, roots, extensions, request.returns)
            except BackpackError as error:
                raise all_refused(error, roots, extensions, only, request.returns) from None
            if plan is None:
                if not walk.double and (walk.parameters or not request.inputs):
                    _remove_stale(walk, (), extensions, entry)
                return request.execute()
            plan.complete = not request.inputs
            plan.whole = not (request.returns or request.inputs or walk.left_out)
            with without_autocast(), nullcontext() if request.create_graph else without_saved_hooks():
                return _run(request, plan, extensions, entry, only)
    except BaseException:
        _remove_stale(walk := walk or Walk(nodes_of(roots)), set(walk.parameters), extensions, entry, failed=True)  # they would look like new ones
        raise
    finally:
        _entered.running, entry.walk = outer, None


def _run(request: Request, plan: Plan, extensions: tuple[BackpropExtension, ...], entry: Entry, only: frozenset[int] | None) -> Any:
    """Run autograd with hooks on the nodes at which something is to be read.

    Args:
        request: The call of autograd.
        plan: What is to be read where.
        extensions: Active extensions.
        entry: The active context.
        only: Ids of the parameters that are not left out; ``None`` for all.

    Returns:
        What the original call returns.

    Raises:
        all_refused: If an extension refuses a parameter.
        UnsupportedError: If results that can be differentiated are to be accumulated.
    """
    context = entry.context
    if context.accumulate and request.create_graph:
        raise UnsupportedError("Results of passes with create_graph=True cannot be accumulated: they could not be differentiated.")
    for outer in _entered.contexts[:-1]:
        if outer.context.accumulate:
            refuse_overwriting(plan, extensions, outer.number)
    hook = CTX.get_extension_hook()
    connection = Connection(plan) if request.create_graph else None
    ranks = is_distributed()
    spares = plan.whole and hook is no_op and not (request.create_graph or ranks)  # hooks may read .grad, and ranks wait for it
    hooked, debug, turn = None if hook is no_op else hook, CTX.get_debug(), next(Entry.turns)
    collector = Collector(plan, extensions, hooked, connection, debug, context.accumulate or ranks, context.dtype, spares, entry.number, turn)
    try:
        asked = asked_in(plan, extensions, collector)
    except BackpackError as error:
        raise all_refused(error, list(request.roots), extensions, only, request.returns) from None
    earlier = Earlier(plan, extensions if context.accumulate else (), entry.number)
    earlier.check(hook is not no_op)
    collector.cut = blocks_for(plan, collector, context.memory, connection)
    carry = Pass(plan, collector.flows, collector, connection, collector.cut)
    handles = []
    for extension in extensions:
        extension.saved_quantities.clear()  # of what was left by hand
    try:
        for node, mark, extension, chosen in asked:
            handles.append(node.register_prehook(partial(_at_mapped, carry, collector, node, mark, extension, chosen)))
        handles += carry.install()
        with reusing(_remove_stale(plan.walk, plan.uses, extensions, entry)):
            result = request.execute(collector.spared.edges)
        collector.spared.accumulate()
        earlier.unite(collector.end())
    except BaseException:
        collector.take_back()
        earlier.restore()
        raise
    finally:
        for handle in (*handles, *collector.handles):
            handle.remove()
        collector.cut = ()
        for extension in extensions:
            extension.saved_quantities.clear()
        if not (request.retain or keeps_tensors()):
            for call in plan.walk.calls:
                if not call.released:
                    call.release()
    return result


def _remove_stale(walk: Walk, uses: Iterable[Parameter], extensions: Iterable[BackpropExtension], entry: Entry, failed: bool = False) -> list[Any]:
    """Delete results that a pass will not overwrite: those of earlier contexts, and those of parameters that were frozen since; not what accumulates.

    Args:
        walk: The graph.
        uses: The parameters of which it will write results, or would, if it were not refused.
        extensions: Active extensions.
        entry: The active context.
        failed: Whether the pass has failed, and will write nothing.

    Returns:
        Those of parameters of which the pass will write others.
    """
    stale, fields, used = [], [extension.savefield for extension in extensions], {id(parameter): parameter for parameter in uses}
    accumulating = {active.number for active in _entered.contexts if active.context.accumulate}
    for parameter in owners.carriers_among(used, lambda: walk.models):  # elsewhere, another thread may be writing
        carried, notes = vars(parameter), owners.notes(parameter)
        for field in fields:
            if field not in carried:
                notes.pop(field, None)
                continue
            number, overwritten = getattr(notes.get(field), "context", None), id(parameter) in used
            if (failed or not overwritten) and number in accumulating or not overwritten and number == entry.number and parameter.requires_grad:
                continue
            value = carried.pop(field)
            if overwritten:
                stale.append(value)
            notes.pop(field, None)
    return stale


@torch.no_grad()
def _at_mapped(
    carry: Pass, collector: Collector, node: Node, mark: Mark, extension: BackpropExtension, chosen: ModuleExtension, grads: tuple[Tensor | None, ...]
) -> None:
    """Run a user's rule, right before autograd runs a node.

    Args:
        carry: Knows what flows carry.
        collector: Takes the result.
        node: Node of the module's output.
        mark: The call's mark there.
        extension: The extension.
        chosen: The user's rule.
        grads: Gradients of the node's outputs.
    """
    collector.at_mapped(mark.call, extension, chosen, grads[mark.nr], carry.peek(extension.flow, (node, mark.nr)))
