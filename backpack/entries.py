"""Contexts that a thread has entered, and what is known of each."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

from backpack.core.calls import ORDER
from backpack.core.walk import Walk


class Entry:
    """A context that a thread has entered.

    Attributes:
        context: The context.
        before: The settings before.
        walk: The graph of the pass that is running under it.
        passed: Whether autograd was called inside.
        number: Tells what passes under it have written from everything else.
        turns: Numbers of the passes under all contexts.
    """

    _numbers = count(1)
    turns = count(1)

    def __init__(self, context: Any, before: tuple) -> None:
        self.context, self.before, self.number = context, before, next(Entry._numbers)
        self.walk: Walk | None = None
        self.passed, self._calls = False, repr(ORDER)

    def has_only_forward_passes(self) -> bool:
        """Say whether modules were recorded since, but autograd was not called.

        Returns:
            Whether that is so.
        """
        return not self.passed and repr(ORDER) != self._calls


class _Entered(threading.local):
    """What a thread has entered.

    Attributes:
        contexts: The contexts, the innermost last.
        running: The one under which a pass is running: calls of autograd inside of it are none of ours, but for those under contexts of their own.
    """

    running: Entry | None = None

    def __init__(self) -> None:
        self.contexts: list[Entry] = []


entered = _Entered()


def running() -> bool:
    """Say whether a backward pass with quantities is running in this thread.

    Returns:
        Whether one is.
    """
    return entered.running is not None
