"""Checkpointed parts of a model (``torch.utils.checkpoint``): what is computed again there is computed once, and read as often as needed.

torch runs such a part again when autograd first asks for something that was dropped, and hands each tensor out a single time. Here a tensor
that is read earlier stays until the node that has saved it has run. A call that is recorded in such a part keeps no tensors, or it would keep what
checkpointing is there to drop: when the part runs again, its modules are called again, in the same order, and each call gives its tensors to the
one that was recorded.

Private symbols of torch are known here as in ``graph.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import getclosurevars, unwrap
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils import checkpoint

from backpack.core.calls import ModuleCall
from backpack.core.state import recording
from backpack.utils.errors import UnsupportedError


class _Handles(dict):
    """Handles of a recomputed tensor, which torch cannot take away after the first use."""

    def __setitem__(self, key: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(key, handle)


_kept: WeakSet = WeakSet()
_keeping = threading.Lock()
_recorded: WeakKeyDictionary[Any, list[ref[ModuleCall]]] = WeakKeyDictionary()


class _Again(threading.local):
    """A part that the thread runs again: how many of its calls have been seen."""

    hook: Callable | None = None
    seen = 0


_again = _Again()


@cache
def saved_names(cls: type) -> tuple[str, ...]:
    """List the names under which nodes of a class save tensors.

    Args:
        cls: Class of a graph node.

    Returns:
        Names of attributes that tell how they are stored.
    """
    return tuple(name for name in dir(cls) if name.startswith("_raw_saved_"))


def value_name(node: Node, name: str) -> str:
    """Say under which name a node gives out what it has saved.

    Args:
        node: A graph node.
        name: One of ``saved_names``.

    Returns:
        Name of the attribute.
    """
    return name.removeprefix("_raw_" if isinstance(node, BackwardCFunction) else "_raw")


def _holders(node: Node) -> list[tuple[str, Any]]:
    """List what a node has saved in a checkpointed part.

    Args:
        node: A graph node.

    Returns:
        (name under which it is read, object of torch that stands for it).
    """
    found = []
    for name in saved_names(type(node)):
        saved = getattr(node, name)
        for part in saved if isinstance(saved, (tuple, list)) else (saved,):
            if type(part.data).__module__ == checkpoint.__name__:
                found.append((value_name(node, name), part.data))
    return found


def checkpointed(node: Node) -> bool:
    """Say whether what a node has saved was dropped, to be computed again.

    Args:
        node: A graph node.

    Returns:
        Whether it was.
    """
    return bool(_holders(node))


def keep(node: Node) -> None:
    """Let what a node has saved be read, and the node be called, any number of times before autograd runs it.

    Args:
        node: A graph node.
    """
    holders = _holders(node)
    for _, holder in holders:
        _keep(holder)
    if holders:
        getattr(node, holders[0][0])  # now, and not under vmap: the part is run again if it was not yet


def _keep(holder: Any) -> None:
    if type(holder.handles) is dict:
        holder.handles = _Handles(holder.handles)
        with _keeping:
            _kept.add(holder)


@contextmanager
def once() -> Iterator[None]:
    """Let checkpointed parts run again a single time, for planning a backward pass and for the pass itself.

    Yields:
        Nothing.

    Raises:
        UnsupportedError: If something has to be read twice that Python does not see: what an operation in place on a part of a tensor has saved.
        CheckpointError: If torch finds something else wrong with a part.
    """
    group = getattr(checkpoint, "GraphExecGroup", None)  # of torch 2.9
    own = group is not None and group._get_current_group() is None
    if not own:
        yield
        return
    with group() as key:
        try:
            yield
        except checkpoint.CheckpointError as error:
            if "already unpacked once" not in str(error):
                raise
            raise UnsupportedError(
                "A checkpointed part of the model (torch.utils.checkpoint) writes in place on a part of a tensor, as in `h[:, :1] *= s`, or reads "
                "`ctx.saved_tensors` twice: what such an operation has saved is handed out a single time, and is needed more than once. Compute a "
                "new tensor there (`torch.cat([s * h[:, :1], h[:, 1:]], 1)`), or run that part without checkpointing."
            ) from error
        finally:
            with _keeping:
                for holder in [holder for holder in _kept if key in holder.handles] if len(_kept) else ():
                    holder.handles = dict.fromkeys(holder.handles)
                    _kept.discard(holder)


class Part:
    """A checkpointed part of a model.

    Attributes:
        unpack: torch's hook that runs it again.
        frame: torch's record of it.
    """

    def __init__(self, unpack: Callable, frame: Any) -> None:
        self.unpack, self.frame = unpack, frame

    def restore(self, call: ModuleCall) -> None:
        """Run the part again.

        Args:
            call: A call that was recorded in it.

        Raises:
            UnsupportedError: If the call does not happen then.
        """
        before, recording.on = recording.on, True
        try:
            for holder in [found for reference in self.frame.weak_holders if (found := reference()) is not None][:1]:
                _keep(holder)
                self.unpack(holder)
            if call.part is not None and hasattr(self.frame, "get_inputs"):  # old versions of torch keep them elsewhere
                self._run()
        finally:
            recording.on = before
        if call.part is not None:
            raise UnsupportedError(
                f"{call.path} lies in a checkpointed part of the model (torch.utils.checkpoint), which did not call it when it was run again in "
                "the backward pass. Run that part without checkpointing, or alike both times (no disable() and no extend() in between)."
            )

    def _run(self) -> None:
        # where nothing is saved, torch has no reason to
        target_frame_ref = ref(self.frame)

        def drop(_: Any) -> None:
            target_frame_ref()  # by which the part is known, see ``_find``

        with torch.autograd.graph.saved_tensors_hooks(drop, drop), torch.enable_grad():
            self.frame.recompute_fn(*self.frame.get_inputs())


def _find(hook: Callable) -> tuple[Any, bool]:
    """Find the checkpointed part in which code runs.

    Args:
        hook: The innermost hook for tensors that are saved.

    Returns:
        torch's record of the part, ``None`` if there is none; and whether it runs again.
    """
    names = getclosurevars(unwrap(hook)).nonlocals
    if "target_frame_ref" in names:
        return names["target_frame_ref"](), True
    frame = names.get("frame")
    return (frame if type(frame).__module__ == checkpoint.__name__ else None), False


def pass_on(call: ModuleCall) -> bool:
    """Keep no tensors of a call in a checkpointed part; when the part runs again, give those of the new call to the recorded one.

    Args:
        call: A call that has ended.

    Returns:
        Whether it was recorded before.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    frame, again = _find(hooks[0])
    if frame is None:
        return False
    if not again:
        call.defer(Part(hooks[1], frame))
        _recorded.setdefault(frame, []).append(ref(call))
        return False
    if _again.hook is not hooks[0]:
        _again.hook, _again.seen = hooks[0], 0
    before = _recorded.get(frame, ())
    recorded = before[_again.seen]() if _again.seen < len(before) else None
    _again.seen += 1
    if recorded is not None and recorded.part is not None and recorded.recorder is call.recorder:
        recorded.part = None
        for mine, other in zip(recorded.slots, call.slots, strict=True):
            mine.value, mine.version = other.value, other.version
    return True
