"""The context manager ``backpack``: catches calls of autograd and runs them with hooks on the graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Module

import backpack.core.node_layers  # noqa: F401  (layers that it reads off graph nodes)
from backpack.accumulation import Earlier, combination_of
from backpack.context import CTX
from backpack.core.calls import Mark
from backpack.core.checkpoints import once
from backpack.core.connect import Connection
from backpack.core.engine import refuse_hidden, transformed, unwatch, watch
from backpack.core.owners import owners
from backpack.core.passing import Pass
from backpack.core.plan import Plan
from backpack.core.refusals import refuse_added, refuse_graph, refuse_sharded
from backpack.core.state import recording
from backpack.core.walk import Need, Walk
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.blocks import blocks_for
from backpack.extensions.collector import Collector
from backpack.extensions.mapped import mapped
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    LossNotExtendedError,
    LossValueError,
    NotRecordedError,
    UnattributedError,
    UnsupportedError,
)
from backpack.utils.hooks import no_op
from backpack.utils.memory import bytes_of
from backpack.utils.precision import without_autocast


class backpack:  # noqa: N801
    """Context in which a backward pass also computes the quantities of the given extensions.

    Contexts replace, they do not merge: inside a nested one only its own extensions are active.

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
                inside it) are there. It may read, replace and delete them.
            debug: Print what happens.
            retain_graph: Keep ``module.input0``, ... readable after the backward pass; ``backward(retain_graph=True)`` implies it.
            accumulate: Unite the results of all backward passes under this context, as ``.grad`` does: parameters carry, after each pass, the
                quantities of the sum of the losses so far on all their samples. ``clear(model)`` lets it begin anew.
            dtype: Type in which results are kept; ``None`` for that of the parameter, and at least ``float32`` for what is squared.
            memory: What the columns that are carried beside the gradient may take at once: bytes, or a text such as ``"2GiB"`` or ``"500MB"``. Where
                all of them would take more, as far as shapes tell, they are carried in blocks, of one column at least; the results are the same, and
                not counted. ``None`` stands for 128 MiB. All at once are columns in a pass with ``create_graph=True``, in a model with checkpointed
                parts, of an extension with module extensions, and Monte-Carlo estimates for samples that are chosen repeatedly.

        Raises:
            UnsupportedError: If an extension is to accumulate whose results for parts of a mini-batch do not make up that of the whole.
            ArgumentError: If something is not an instance of an extension, two of them save to the same field, or the memory is not positive.
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
        for ext in exts:
            if fields.count(ext.savefield) > 1:
                raise ArgumentError(f"Two active extensions save to {ext.savefield!r}, so that one would overwrite the other. Use two contexts.")
        if extension_hook is not None and not callable(extension_hook):
            raise ArgumentTypeError(f"extension_hook must be a function of a module, got {extension_hook!r}.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentTypeError(f"dtype must be a type of floating-point numbers, torch.float64, say, got {dtype!r}.")
        for ext in exts if accumulate else ():
            combination_of(ext, ext.savefield)
        self.exts, self.accumulate, self.dtype = exts, accumulate, dtype
        self.memory = None if memory is None else bytes_of(memory)
        self.debug = debug
        self.extension_hook = no_op if extension_hook is None else extension_hook
        self.retain_graph = retain_graph

    def __enter__(self) -> None:
        recording.open.clear()  # calls that were interrupted, by a key, say
        before = CTX.exchange(self.exts, self.debug, self.extension_hook, self.retain_graph)
        _entered.contexts.append(((before, recording.keep_all), set(), self.accumulate, self.dtype, self.memory))
        recording.keep_all = any(ext.has_module_exts for ext in self.exts)
        watch(_on_backward)

    def __exit__(self, *exc: Any) -> None:
        unwatch()
        (before, recording.keep_all), *_ = _entered.contexts.pop()
        CTX.exchange(*before)


class _Entered(threading.local):
    """Contexts that a thread has entered: settings before, and (id of parameter, field) of what passes under them have written.

    Attributes:
        contexts: One entry a context; last, whether the passes accumulate, and the type of their results.
        running: Whether a pass is running: calls of autograd inside of it are none of ours.
    """

    running = False

    def __init__(self) -> None:
        self.contexts: list[tuple[tuple, set[tuple[int, str]], bool]] = []


_entered = _Entered()


def running() -> bool:
    """Say whether a backward pass with quantities is running in this thread.

    Returns:
        Whether one is.
    """
    return _entered.running


def keeps_tensors() -> bool:
    """Say whether recorded tensors survive a backward pass under the active context.

    Returns:
        Whether they do.
    """
    return CTX.get_retain_graph() or any(extension.keeps_calls for extension in CTX.get_active_exts())


def _on_backward(execute: Callable[..., Any], roots: Iterable[Any], returns: bool, some: tuple, create_graph: bool, retain: bool) -> Any:
    """Run a call of autograd, with quantities if the calling thread has asked for some.

    Args:
        execute: The original call.
        roots: Tensors, or graph edges, on which it is made.
        returns: Whether it returns gradients instead of accumulating them (``torch.autograd.grad``).
        some: Leaves, if only the gradients of some are computed.
        create_graph: Whether its result is to be differentiated again.
        retain: Whether the graph stays.

    Returns:
        What the original call returns.
    """
    if _entered.running or not CTX.get_active_exts() or not _entered.contexts or transformed():
        if _entered.running and not returns and CTX.get_active_exts():
            refuse_hidden(roots, some, _excluded(CTX.get_active_exts()))
        return execute()
    _entered.running = True
    try:
        extensions = CTX.get_active_exts()
        with once():
            plan = make_plan(list(roots), extensions, returns)
            if plan is None:
                return execute()
            plan.complete = not some
            plan.whole = not (returns or some or plan.walk.leaves_out)
            with without_autocast():
                return _run(execute, plan, extensions, create_graph, retain)
    finally:
        _entered.running = False


def _run(execute: Callable[..., Any], plan: Plan, extensions: tuple[BackpropExtension, ...], create_graph: bool, retain: bool) -> Any:
    """Run autograd with hooks on the nodes at which something is to be read.

    Args:
        execute: The original call.
        plan: What is to be read where.
        extensions: Active extensions.
        create_graph: Whether the result is to be differentiated again.
        retain: Whether the graph stays.

    Returns:
        What the original call returns.

    Raises:
        UnsupportedError: If results that can be differentiated are to be accumulated.
    """
    _, written, accumulates, dtype, memory = _entered.contexts[-1]
    if accumulates and create_graph:
        raise UnsupportedError("Results of passes with create_graph=True cannot be accumulated: they could not be differentiated.")
    hook = CTX.get_extension_hook()
    connection = Connection(plan) if create_graph else None
    ranks = _distributed()
    spares = plan.whole and hook is no_op and not (create_graph or ranks)  # hooks may read .grad, and ranks wait for it
    collector = Collector(plan, extensions, None if hook is no_op else hook, connection, CTX.get_debug(), accumulates or ranks, dtype, spares)
    collector.check()
    earlier = Earlier(extensions if accumulates else (), written)
    collector.cut = blocks_for(plan, collector, memory, connection)
    carry = Pass(plan, collector.flows, collector, connection, collector.cut)
    handles = []
    for extension in extensions:
        extension.saved_quantities.clear()  # of what was left by hand
    try:
        for node, mark, extension, chosen in mapped(plan, extensions) if any(ext.flow is None or ext.has_module_exts for ext in extensions) else ():
            handles.append(node.register_prehook(_mapped_hook(carry, collector, node, mark, extension, chosen)))
        handles += carry.install()
        _remove_stale(plan, extensions, written)
        result = execute(collector.spared.edges)
        collector.spared.accumulate()
        new = collector.end()
        earlier.unite(plan, new)
        written |= new
    except BaseException:
        collector.take_back()
        earlier.restore()
        raise
    finally:
        for handle in (*handles, *collector.handles):
            handle.remove()
        for extension in extensions:
            extension.saved_quantities.clear()
        if not (retain or keeps_tensors()):
            for call in plan.walk.calls:
                if not call.released:
                    call.release()
    return result


def _remove_stale(plan: Plan, extensions: Iterable[BackpropExtension], written: set[tuple[int, str]]) -> None:
    """Delete results of earlier contexts that this pass will not overwrite.

    Args:
        plan: The plan.
        extensions: Active extensions.
        written: What passes under this context have written.
    """
    fields = [extension.savefield for extension in extensions]
    models: set[int] | None = None
    for parameter in owners.carriers():
        carried = vars(parameter)
        for field in fields:
            if field not in carried:
                owners.notes(parameter).pop(field, None)
                continue
            if parameter not in plan.uses:
                if models is None:
                    models = {id(p) for call in plan.walk.calls if call.root for p in call.module.parameters()}
                if id(parameter) not in models or (id(parameter), field) in written:
                    continue
            del carried[field]
            owners.notes(parameter).pop(field, None)


def make_plan(roots: list[Any], extensions: tuple[BackpropExtension, ...], returns: bool) -> Plan | None:
    """Plan a pass, or refuse it.

    Args:
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
        UnsupportedError: If the graph contains derivatives of derivatives, parameters are complex, or a CUDA graph is being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "A CUDA graph is being captured, but quantities are computed by Python code that looks at each backward pass anew, and would not run "
            "when the graph is replayed. Call backward inside of the context outside of the capture."
        )
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    nodes = [node for node in nodes if node is not None]
    second_order = any(ext.expects_backpropagation_quantities() for ext in extensions)
    walk = Walk(nodes, second_order, _excluded(extensions))
    if _distributed():
        refuse_sharded(walk)
    refuse_graph(walk, returns)
    for call in walk.calls:
        if call.part is not None:
            call.part.frame.early_stop = False  # its last calls happen after the last tensor that autograd needs
    if walk.double:
        return None
    if walk.foreign:
        refuse_added(walk)
    if not walk.parameters:
        return None
    if meta := [owners[parameter] for parameter in walk.parameters if parameter.is_meta]:
        raise UnsupportedError(f"{meta[0]} is on the meta device, without numbers: where samples lie can be found out from numbers only.")
    need = max((ext.flow.needs for ext in extensions if ext.flow is not None), default=Need.COLUMNS)
    try:
        plan = Plan(walk, nodes, second_order, need)
    except (LossNotExtendedError, NotRecordedError, UnattributedError):
        if returns and walk.to_loss.isdisjoint(nodes):  # for example a Hessian-vector product: not a pass over a loss, hence no quantities
            return None
        raise
    if not plan.uses:
        return None
    if second_order and any(isinstance(root, Tensor) and root.numel() != 1 for root in roots):
        shapes = [list(root.shape) for root in roots if isinstance(root, Tensor)]
        raise LossValueError(f"Second-order quantities need a scalar, backward was called on shapes {shapes}. Write loss.sum().backward().")
    if unreal := {parameter: owners[parameter] for parameter in plan.uses if parameter.is_complex()}:
        raise UnsupportedError(
            "{names}: quantities of complex parameters are not defined. Use real ones and torch.view_as_complex, or leave these parameters out of "
            "all extensions: {exclude}.",
            unreal,
        )
    return plan


def _excluded(extensions: Iterable[BackpropExtension]) -> frozenset[int]:
    return frozenset.intersection(*(extension.excluded() for extension in extensions))


def _distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _mapped_hook(carry: Pass, collector: Collector, node: Node, mark: Mark, extension: BackpropExtension, chosen: ModuleExtension) -> Callable:
    """Return a node hook that runs a user's rule.

    Args:
        carry: Knows what flows carry.
        collector: Takes the result.
        node: Node of the module's output.
        mark: The call's mark there.
        extension: The extension.
        chosen: The user's rule.

    Returns:
        The hook.
    """

    def hook(grads: tuple[Tensor | None, ...]) -> None:
        with torch.no_grad():
            edge = node, mark.nr
            collector.at_mapped(mark.call, edge, extension, chosen, grads[mark.nr], carry.peek(extension.flow, edge))

    return hook
