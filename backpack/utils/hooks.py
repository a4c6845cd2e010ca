"""The extension hook that does nothing."""

from __future__ import annotations


def no_op(*args: object, **kwargs: object) -> None:
    """Accept anything and do nothing.

    Args:
        *args: Ignored.
        **kwargs: Ignored.
    """
