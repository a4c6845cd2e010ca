"""Whether rules of users that derive from those of affine layers, and write products of their own, say in two ways the same.

Norms, variances, diagonals and Kronecker factors are read off ``columns`` and ``rows``, and never ask for a product: where a rule computes its
products in another way, to be faster or because the layer is another one, both are compared at each execution that is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import sqrt
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives, Samples
from backpack.utils.columns import distinct_columns
from backpack.utils.errors import UnsupportedError
from backpack.utils.precision import largest

_PRODUCTS = ("_weight_jac_t_mat_prod", "_bias_jac_t_mat_prod", "_param_mjp")
_state = local()


def agreeing(rule: BaseDerivatives) -> BaseDerivatives:
    """Let a rule refuse to show inputs as columns, where it says with its products that they are none.

    Args:
        rule: The rule.

    Returns:
        A rule with the same attributes, of a class derived from that of the rule; the rule itself if it brings no products of its own.
    """
    own = isinstance(rule, AffineDerivatives) and not all(map(_is_of_library, (getattr(type(rule), name) for name in _PRODUCTS)))
    if not own:
        return rule
    other = object.__new__(_agreeing(type(rule)))
    other.__dict__ = rule.__dict__
    return other


def keeps_product(rule: BaseDerivatives, derivatives: type[BaseDerivatives], name: str) -> bool:
    """Say whether what is known of a class of derivatives holds for a rule, of whose products with a parameter nobody asks then.

    Args:
        rule: The rule.
        derivatives: The class.
        name: Name of the parameter.

    Returns:
        Whether it is one of these, and no user has written another product; in rules of affine layers, both are compared.
    """
    product = getattr(type(rule), f"_{name}_jac_t_mat_prod", None)
    return isinstance(rule, derivatives) and (isinstance(rule, AffineDerivatives) or product is None or _is_of_library(product))


def _is_of_library(method: Any) -> bool:
    return method.__module__.startswith("backpack.")


@cache
def _agreeing(cls: type[AffineDerivatives]) -> type[AffineDerivatives]:
    def columns(self: AffineDerivatives, module: Module, subsampling: Samples | slice = None) -> Tensor:
        _compare(self, module)
        return cls.columns(self, module, subsampling)

    def vectors(self: AffineDerivatives, module: Module) -> Tensor | None:
        _compare(self, module)
        return cls.vectors(self, module)

    def param_mjp(self: AffineDerivatives, *args: Any, **kwargs: Any) -> Tensor:
        with unasked():
            return cls._param_mjp(self, *args, **kwargs)

    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {"columns": columns, "vectors": vectors, "_param_mjp": param_mjp, **named})


@contextmanager
def unasked() -> Iterator[None]:
    """Compare nothing for the time being: what a product looks at is its own business.

    Yields:
        Nothing.
    """
    before, _state.asks = getattr(_state, "asks", True), False
    try:
        yield
    finally:
        _state.asks = before


def _compare(rule: AffineDerivatives, module: Module) -> None:
    if not getattr(_state, "asks", True):
        return
    mat = distinct_columns(torch.empty(1, *module.output.shape, dtype=module.input0.dtype, device=module.input0.device))
    for name in (name for name in ("weight", "bias") if getattr(module, name) is not None):
        with unasked():
            read = getattr(AffineDerivatives, f"_{name}_jac_t_mat_prod")(rule, module, None, (mat[0],), mat)
            written = rule._param_mjp(name, module, None, (mat[0],), mat)
        allowed = sqrt(torch.finfo(read.dtype).eps) * max(largest(read), largest(written))
        if read.shape != written.shape or not ((read - written).abs() <= allowed).all():
            raise UnsupportedError(
                f"{rule._title(f'_{name}_jac_t_mat_prod', module)} is another product than that of `columns` and `rows`, off which norms, variances, "
                "diagonals and Kronecker factors are read. Let them say the same, if the layer multiplies columns by its weight; otherwise derive "
                "from BaseParameterDerivatives, and write the products."
            )
