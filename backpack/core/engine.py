"""Autograd's engine, watched while a context is active: calls of ``backward`` and ``grad`` are seen however they were imported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

Handler = Callable[[Callable[..., Any], tuple, bool, bool, bool, bool], Any]


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

        if any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
            return execute()  # is_grads_batched=True
        return self._handler(execute, roots, not accumulates, bool(inputs), create_graph, keep_graph)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


_watching = threading.Lock()
_watchers = 0


def watch(handler: Handler) -> None:
    """Let a handler see all calls of autograd's engine, until as many calls of ``unwatch`` have followed.

    Args:
        handler: Called with (the original call, which takes other edges to ask for than it was given, roots, whether it returns gradients,
            whether leaves were chosen, create_graph, retain_graph).
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


def transformed() -> bool:
    """Whether a transformation of torch.func, or a compiler, is running: both replay the module with tensors of their own.

    Returns:
        Whether to record nothing.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active()
