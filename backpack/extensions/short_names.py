"""``param.var`` and ``param.diag_ggn``: second names under which two results can be read, as in early code of this field.

They are read where the result is stored, so that nothing is kept twice. ``param.var`` stays the method of tensors where no variance was computed.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter


class _ShortName:
    """Reads the first field that a parameter carries; whatever else has the name is found as before."""

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        self._name, self._fields = name, fields
        self._otherwise = getattr(Parameter, name, None)

    def __get__(self, parameter: Parameter | None, cls: type) -> Any:
        if parameter is None:
            if self._otherwise is None:
                raise AttributeError(self._name)
            return self._otherwise
        for field in self._fields:
            if field in vars(parameter):
                return vars(parameter)[field]
        if self._otherwise is None:
            raise AttributeError(f"The parameter carries none of {list(self._fields)}.")
        return self._otherwise.__get__(parameter, cls)


def install() -> None:
    """Let parameters know the short names."""
    Parameter.var = _ShortName("var", ("variance",))
    Parameter.diag_ggn = _ShortName("diag_ggn", ("diag_ggn_exact", "diag_ggn_mc"))
