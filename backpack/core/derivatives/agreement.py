"""Rules of users that derive from those of the library, and say something else: whatever is read off them has to know.

The library's rules are told little (the columns of an affine layer, the derivative of an activation), from which all follows, and take shortcuts
besides. Where a user's rule tells something else, shortcuts of the class that it derives from are not taken. Where it writes a product of its own,
to be faster or because the layer is another one, this is compared with what is told, at each execution of which that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from threading import local
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseLossDerivatives, BaseParameterDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.utils.columns import distinct_columns
from backpack.utils.errors import ArgumentError, UnsupportedError
from backpack.utils.precision import largest

_CHECKED = frozenset(
    """jac_mat_prod jac_t_mat_prod param_mjp weight_jac_mat_prod bias_jac_mat_prod residual_mat_prod sqrt_hessian sqrt_hessian_sampled
    make_hessian_mat_prod sum_hessian""".split()
)
"""Products that check shapes, and call those with an underscore in front, which rules write."""
_AGREES, _DERIVED = "__agrees__", "__derived__"
_COMPARED: WeakKeyDictionary[Module, set] = WeakKeyDictionary()
_state = local()


class _Kind(NamedTuple):
    """What all follows from in a kind of rules.

    Attributes:
        told: Names of the methods.
        follows: Names of those that the kind itself makes of these, or refuses, and its rules may write again, as shortcuts.
    """

    told: frozenset[str]
    follows: frozenset[str]


_KINDS: dict[type[BaseDerivatives], _Kind] = {
    AffineDerivatives: _Kind(
        frozenset({"columns", "rows", "output_from_rows"}),
        frozenset(
            """vectors easier fills_blocks weight_blocks sum_of_products sum_at_diagonal input_moment _weight_jac_t_mat_prod _bias_jac_t_mat_prod
            _weight_jac_mat_prod _bias_jac_mat_prod""".split()
        ),
    ),
    ElementwiseDerivatives: _Kind(
        frozenset({"df", "d2f", "slope", "curvature"}),
        frozenset({"_jac_mat_prod", "_jac_t_mat_prod", "ea_jac_t_mat_jac_prod", "hessian_diagonal", "_residual_mat_prod"}),
    ),
    BaseLossDerivatives: _Kind(
        frozenset({"_sqrt_hessian"}),
        frozenset("_signed_sqrt_hessian _least_sqrt_hessian least_columns _sqrt_hessian_sampled _make_hessian_mat_prod _sum_hessian".split()),
    ),
}


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("backpack.")


def _written(rule: BaseDerivatives) -> frozenset[str]:
    # what users have written, in classes or on the object
    written = {*getattr(rule, "__dict__", ())}.union(*(vars(cls) for cls in type(rule).__mro__[:-1] if not _is_ours(cls)))
    return frozenset(name for name in written if not name.startswith("__"))


def keeps_product(rule: BaseDerivatives, derivatives: type[BaseDerivatives], name: str) -> bool:
    """Say whether what is known of a class of derivatives holds for a rule, of whose products with a parameter nobody asks then.

    Args:
        rule: The rule.
        derivatives: The class.
        name: Name of the parameter.

    Returns:
        Whether it is one of these, and no user has written a method of the class again; in rules of affine layers, both are compared.
    """
    if not isinstance(rule, derivatives):
        return False
    methods = {method for method in _written(rule) if callable(getattr(rule, method))}
    return isinstance(rule, AffineDerivatives) or methods.isdisjoint({*dir(derivatives), f"_{name}_jac_t_mat_prod"})


def agreeing(rule: BaseDerivatives) -> BaseDerivatives:
    """Let a rule of a user's say the same in all ways in which it is read, or refuse.

    Args:
        rule: The rule.

    Returns:
        A rule with the same attributes, of a class derived from that of the rule; the rule itself if there is nothing to mend.

    Raises:
        ArgumentError: If it overrides a product that only checks shapes.
    """
    cls, kind, written = type(rule), next((kind for kind in _KINDS if isinstance(rule, kind)), None), _written(rule)
    if _AGREES in vars(cls):
        return rule
    if unasked_for := sorted(written & _CHECKED):
        name = unasked_for[0]
        raise ArgumentError(f"{cls.__name__} overrides {name}, which checks shapes and calls _{name}. Write `_{name}` instead.")
    own = {name for name, value in getattr(rule, "__dict__", {}).items() if callable(value) and hasattr(cls, name)}
    if not (own or (kind and written and hasattr(rule, "__dict__"))):
        return rule
    if _DERIVED not in vars(cls):  # nothing global keeps classes of users
        setattr(cls, _DERIVED, {})
    derived = vars(cls)[_DERIVED]
    if written not in derived:
        named = {"__module__": "rules" if _is_ours(cls) else cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        methods = {} if kind is None else _mended(cls, kind, written)
        derived[written] = type(cls.__name__, (cls,), methods | named | {_AGREES: True}) if methods or own else None
    if derived[written] is None:
        return rule
    other = object.__new__(derived[written])
    other.__dict__ = rule.__dict__
    return other


def _mended(cls: type[BaseDerivatives], kind: type[BaseDerivatives], written: frozenset[str]) -> dict[str, Callable]:
    told, follows = _KINDS[kind]
    draws = {"_sqrt_hessian_sampled"} if "_make_distribution" in written else frozenset()
    methods = {name: getattr(kind, name) for name in follows - written - draws} if told & written else {}
    methods = {name: method for name, method in methods.items() if getattr(cls, name) is not method}
    if kind is AffineDerivatives and written & {"_param_mjp", "_weight_jac_t_mat_prod", "_bias_jac_t_mat_prod", "vectors"}:
        read = {name: methods.get(name, getattr(cls, name)) for name in ("columns", "rows", "vectors", "input_moment")}
        methods |= {name: _after(_compare_products, method) for name, method in read.items()} | {"_param_mjp": _quiet(cls._param_mjp)}
    if kind is ElementwiseDerivatives and written & {"_jac_mat_prod", "_jac_t_mat_prod"}:
        methods |= {"df": _after(_compare_slopes, cls.df)}
    if kind is ElementwiseDerivatives and "_residual_mat_prod" in written:
        given = methods.get("hessian_diagonal", cls.hessian_diagonal)
        methods |= {"hessian_diagonal": _after(_compare_residuals, given), "_residual_mat_prod": _quiet(cls._residual_mat_prod)}
    return methods


def _after(compare: Callable[..., None], method: Callable) -> Callable:
    def compared(self: BaseDerivatives, module: Module, *args: Any, **kwargs: Any) -> Any:
        done, key = _compared(module), (compare, type(self))
        if getattr(_state, "asks", True) and key not in done:
            with unasked():
                compare(self, module, *args)
            done.add(key)  # it is read block by block, and nothing of it changes
        return method(self, module, *args, **kwargs)

    return compared


def _compared(module: Module) -> set:
    # what has been compared at an execution
    try:
        return _COMPARED.setdefault(module, set())
    except TypeError:  # a view of it that nobody else holds
        return set()


def _quiet(method: Callable) -> Callable:
    def asked(self: BaseDerivatives, *args: Any, **kwargs: Any) -> Any:
        with unasked():
            return method(self, *args, **kwargs)

    return asked


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


def _column(module: Module) -> Tensor:
    known = next((tensor for tensor in (module.input0, module.output) if not tensor.is_meta), module.output)  # one of which the rule keeps entries
    return distinct_columns(torch.empty(1, *module.output.shape, dtype=known.dtype, device=known.device))


def _compare_products(rule: AffineDerivatives, module: Module, *_: Any) -> None:
    mat = _column(module)
    for name in (name for name in ("weight", "bias") if getattr(module, name) is not None):
        read = getattr(AffineDerivatives, f"_{name}_jac_t_mat_prod")(rule, module, None, (mat[0],), mat)
        _refuse_difference(rule, module, f"_{name}_jac_t_mat_prod", "`columns` and `rows`", read, rule._param_mjp(name, module, None, (mat[0],), mat))
    if (vectors := rule.vectors(module)) is not None:
        _refuse_difference(rule, module, "vectors", "`columns`", rule.columns(module)[:, 0, :, 0], vectors)


def _compare_slopes(rule: ElementwiseDerivatives, module: Module, *_: Any) -> None:
    mat = _column(module)
    read = mat * rule.df(module, None, (mat[0],))
    for name in ("_jac_t_mat_prod", "_jac_mat_prod"):
        _refuse_difference(rule, module, name, "`df`", read, getattr(rule, name)(module, None, (mat[0],), mat.clone()))


def _compare_residuals(rule: ElementwiseDerivatives, module: Module, g_in: Any, g_out: Any) -> None:
    mat = _column(module)
    read = mat * rule.hessian_diagonal(module, g_in, g_out)
    _refuse_difference(rule, module, "_residual_mat_prod", "`hessian_diagonal`", read, rule._residual_mat_prod(module, g_in, g_out, mat.clone()))


def _refuse_difference(rule: BaseDerivatives, module: Module, name: str, others: str, read: Tensor, written: Tensor) -> None:
    allowed = sqrt(torch.finfo(read.dtype).eps) * max(largest(read), largest(written))
    if read.shape != written.shape or ((read - written).abs() > allowed).any():  # what is not finite tells nothing
        kind = BaseParameterDerivatives if isinstance(rule, BaseParameterDerivatives) else BaseDerivatives
        raise UnsupportedError(
            f"{rule._title(name, module)} says something else than {others}, off which other quantities are read: norms, variances, diagonals, "
            f"Kronecker factors, products. Let them say the same, if the layer is of this kind; otherwise derive from {kind.__name__}, and write "
            "the products."
        )
