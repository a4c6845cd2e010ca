"""Autograd's engine, watched while a context is active: calls of ``backward`` and ``grad`` are seen however they were imported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import has_torch_function

from backpack.core.owners import owners
from backpack.utils.differentiation import nodes_below
from backpack.utils.errors import UnsupportedError


class Request(NamedTuple):
    """One call of autograd's engine.

    Attributes:
        execute: The call itself, which takes other edges to ask for than it was given.
        roots: Tensors, or graph edges, on which it is made.
        inputs: What to differentiate with respect to, tensors or edges; empty for all leaves.
        returns: Whether it returns gradients instead of accumulating them (``torch.autograd.grad``).
        create_graph: Whether its result is to be differentiated again.
        retain: Whether the graph stays.
        batched: Whether it stands for several passes at once (``is_grads_batched=True``).
    """

    execute: Callable[..., Any]
    roots: tuple
    inputs: tuple
    returns: bool
    create_graph: bool
    retain: bool
    batched: bool


Handler = Callable[[Request], Any]


class _WatchedEngine:
    """Stands in for autograd's engine: the one place through which ``backward`` and ``grad`` pass, however they were imported."""

    def __init__(self, engine: Any, handler: Handler) -> None:
        self._engine, self._handler = engine, handler

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand a call over to the handler, not compiled, even if the compiler is at work: it would trace the handler with what it knows then.

        Args:
            *args: Arguments of the engine.
            **kwargs: More of them.

        Returns:
            What the engine returns.
        """
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self._run_backward)(*args, **kwargs)
        return self._run_backward(*args, **kwargs)

    def _run_backward(self, roots: tuple, grads: tuple, keep_graph: bool, create_graph: bool, inputs: tuple, *args: Any, **kwargs: Any) -> Any:
        """Hand a call over to the handler.

        Args:
            roots: Tensors or edges.
            grads: Their gradients.
            keep_graph: Whether the graph stays.
            create_graph: Whether the result can be differentiated.
            inputs: What to differentiate with respect to; empty for all leaves.
            *args: More settings of the engine.
            **kwargs: More settings of the engine.

        Returns:
            What the engine returns.
        """
        accumulates = kwargs["accumulate_grad"] if "accumulate_grad" in kwargs else args[1]

        def execute(chosen: tuple | None = None) -> Any:
            return self._engine.run_backward(roots, grads, keep_graph, create_graph, inputs if chosen is None else chosen, *args, **kwargs)

        batched = any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)
        request = Request(execute, roots, inputs, not accumulates, create_graph, keep_graph, batched)
        if accumulates and not batched and _called.node is not None:
            _refuse_hidden(_called.node, [leaf for leaf in _leaves(request) if isinstance(leaf, Parameter)])
        return self._handler(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


_watching = threading.Lock()
_watchers = 0


def watch(handler: Handler) -> None:
    """Let a handler see all calls of autograd's engine, until as many calls of ``unwatch`` have followed.

    Args:
        handler: Called in place of the engine.
    """
    global _watchers  # noqa: PLW0603
    with _watching:
        _watchers += 1
        if _watchers == 1:
            Variable._execution_engine = _WatchedEngine(Variable._execution_engine, handler)


def unwatch() -> None:
    """Undo one call of ``watch``."""
    global _watchers  # noqa: PLW0603
    with _watching:
        _watchers -= 1
        engine = Variable._execution_engine
        if not _watchers and isinstance(engine, _WatchedEngine):
            Variable._execution_engine = engine._engine


class _Called(threading.local):
    """The node of a custom function that this thread calls in place of autograd."""

    node: Node | None = None


_called = _Called()


@contextmanager
def calling(node: Node) -> Iterator[None]:
    """Refuse what adds to gradients of parameters, while a node is called in place of autograd, before it does: seen inside of a context only.

    Args:
        node: Node of a custom function.

    Yields:
        Nothing.
    """
    before, _called.node = _called.node, node
    try:
        yield
    finally:
        _called.node = before


def refuse_hidden(request: Request, excluded: Container[int]) -> None:
    """Refuse a custom function that calls backward in its own backward pass, where tracked parameters have a gradient of which the graph is hidden.

    Args:
        request: A call of backward during a pass.
        excluded: Ids of the parameters that are left out.
    """
    node = torch._C._current_autograd_node()
    if isinstance(node, BackwardCFunction) and node.name() != "BackwardHookFunctionBackward":  # hooks of modules are no functions
        _refuse_hidden(node, [leaf for leaf in _leaves(request) if leaf in owners and id(leaf) not in excluded])


def _refuse_hidden(node: Node, hidden: list[Tensor]) -> None:
    names = [owners[leaf] if leaf in owners else f"one of shape {list(leaf.shape)}" for leaf in hidden]
    if names:
        raise UnsupportedError(
            f"{node.name()} calls backward in its own backward pass, for parameters that autograd's graph does not show ({', '.join(names)}), as "
            "reversible blocks and checkpoints of other packages do: their quantities would be missing, and what is sent through it would be "
            "added to their gradients. Let such blocks be computed without it, or by torch.utils.checkpoint with use_reentrant=False, or call "
            "backward outside of the context."
        )


def _leaves(request: Request) -> list[Tensor]:
    """Find the leaves to which a call of backward adds.

    Args:
        request: The call.

    Returns:
        The leaves.
    """
    if request.inputs:
        return [leaf for leaf in request.inputs if isinstance(leaf, Tensor)]
    return [node.variable for node in nodes_below(request.roots) if hasattr(node, "variable")]


def transformed() -> bool:
    """Whether a transformation of torch.func, a compiler or a tracer is running: all replay the module with tensors of their own.

    Returns:
        Whether to record nothing.
    """
    return is_dynamo_compiling() or _are_functorch_transforms_active() or _is_tracing()


@contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Leave ``saved_tensors_hooks``, where a backward pass was called inside of them: torch.func refuses to run there.

    Yields:
        Nothing.
    """
    hooks = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def intercepted(values: Sequence[Any]) -> bool:
    """Say whether functions of torch may compute something else than usual: under a mode, or for a class of tensors, that sees their calls.

    Args:
        values: Arguments of a function.

    Returns:
        Whether there is such a mode, or one of the values is of such a class; of those of torch itself, only nested tensors change anything.
    """
    if not has_torch_function(values or (None,)):
        return False
    modes = [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]
    if not all(type(mode).__module__.startswith("torch.") for mode in modes):
        return True
    tensors = [value for value in values if isinstance(value, Tensor)]
    classes = {type(tensor) for tensor in tensors} - {Tensor, Parameter}
    foreign = [cls for cls in classes if not cls.__module__.startswith("torch.")]
    return any(tensor.is_nested for tensor in tensors) or any(getattr(cls.__torch_function__, "__func__", None) is not _USUAL for cls in foreign)


_USUAL = Tensor.__torch_function__.__func__
