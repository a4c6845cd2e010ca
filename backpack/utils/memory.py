"""Amounts of memory, as users write them."""

from __future__ import annotations

import re

from backpack.utils.errors import ArgumentError, ArgumentTypeError

_UNITS = {"b": 1} | {f"{letter}{end}": base**i for i, letter in enumerate("kmgt", 1) for end, base in (("b", 1000), ("ib", 1024))}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?b)\s*", re.IGNORECASE)


def bytes_of(amount: int | str) -> int:
    """Read an amount of memory.

    Args:
        amount: Number of bytes, or a text with a unit: ``"2GiB"`` (1024^3 bytes each), ``"500MB"`` (1000^2 bytes each).

    Returns:
        Bytes.

    Raises:
        ArgumentTypeError: If it is neither an integer nor a text.
        ArgumentError: If it is no amount, or none at all.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise ArgumentTypeError(f'memory must be a number of bytes, or a text such as "2GiB" or "500MB", got {amount!r}.')
    if isinstance(amount, str):
        found = _AMOUNT.fullmatch(amount)
        if found is None or found[2].lower() not in _UNITS:
            raise ArgumentError(f'memory={amount!r} is no amount of memory. Write a number and B, kB, MB, GB, TB, KiB, MiB, GiB or TiB: "2GiB".')
        count = int(float(found[1]) * _UNITS[found[2].lower()])
    else:
        count = amount
    if count <= 0:
        raise ArgumentError(
            f"memory must be positive, got {amount!r}. None chooses a bound, and what is larger than everything carried bounds nothing."
        )
    return count
