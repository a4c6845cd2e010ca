"""What a thread is recording: switches, and the calls that are running."""

from __future__ import annotations

import threading
from typing import Any

from torch.nn import Module


class _Recording(threading.local):
    """What a thread is recording.

    Attributes:
        on: Whether calls are recorded at all.
        apart: Whether calls of autograd are no passes of the user's: no quantities are computed, and none are deleted.
        keep_all: Whether calls keep all tensors, as rules of users may read any of them.
        read_from: Module to the call whose tensors it shows; ``None`` for the last ones.
        open: The calls whose forward pass has begun and not ended.
        connection: Connects recorded tensors to the graph again, in a pass with ``create_graph=True``.
    """

    on = True
    apart = False
    keep_all = False
    connection: Any = None
    read_from: dict[Module, Any] | None = None

    def __init__(self) -> None:
        self.open: list[Any] = []


recording = _Recording()
