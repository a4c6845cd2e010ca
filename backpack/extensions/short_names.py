"""``param.var`` and ``param.diag_ggn``: second names under which two results can be read, as in early code of this field.

They are read where the result is stored, so that nothing is kept twice. ``param.var()`` stays the method of tensors all the same.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Parameter

from backpack.core.owners import owners


class _AlsoMethod(Tensor):
    """A result that is read under the name of a method of its parameter, and is called as such, too: ``weight.var`` and ``weight.var(0)``."""

    __torch_function__ = Parameter.__torch_function__  # what is computed of it is an ordinary tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return Tensor.var(self._parameter(), *args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _ShortName:
    """Reads the field that the last pass has written, the first of several; whatever else has the name is found as before."""

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        self._name, self._fields = name, fields
        self._otherwise = getattr(Parameter, name, None)

    def __get__(self, parameter: Parameter | None, cls: type) -> Any:
        carried = () if parameter is None else [field for field in self._fields if field in vars(parameter)]
        if carried:
            notes = owners.notes(parameter)
            field = max(carried, key=lambda field: getattr(notes.get(field), "turn", 0))
            value = vars(parameter)[field]
            if self._otherwise is not None and type(value) is Tensor:
                value = value.as_subclass(_AlsoMethod)
                value._parameter = ref(parameter)
            return value
        if self._otherwise is None:
            raise AttributeError(self._name if parameter is None else f"The parameter carries none of {list(self._fields)}.")
        return self._otherwise if parameter is None else self._otherwise.__get__(parameter, cls)


def install() -> None:
    """Let parameters know the short names."""
    Parameter.var = _ShortName("var", ("variance",))
    Parameter.diag_ggn = _ShortName("diag_ggn", ("diag_ggn_exact", "diag_ggn_mc"))
