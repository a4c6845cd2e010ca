"""Rules: what is read off a flow at the uses of a parameter.

A rule has a linear part, added over all uses of the parameter, and is followed by the extension's ``finish``, which may be non-linear. Where a
parameter is used once, a function registered with ``faster`` may do both at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.arrangements import repetitions
from backpack.core.calls import ModuleCall
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.affine_squares import squares_at_output, sum_of_squares
from backpack.core.derivatives.agreement import keeps_product
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.embedding import add_at, place_at
from backpack.core.derivatives.tied import TiedDerivatives, cancels
from backpack.core.flow import Columns, Use, add_columns
from backpack.core.plan import Plan
from backpack.core.samples import add_rows
from backpack.extensions.flows import SqrtFlow, apply_to_all, in_order
from backpack.extensions.signed_flow import SignedSqrtFlow
from backpack.utils.errors import UnsupportedError
from backpack.utils.moment import sum_of_squared_columns
from backpack.utils.pages import concatenated

Subsampling = tuple[int, ...] | None


class Rule(ABC):
    """The linear part of reading a quantity off.

    Attributes:
        takes_rows: Whether it is given the rows of a layer as they come, also where samples have several and could have an axis of them.
    """

    takes_rows: ClassVar[bool] = False

    @abstractmethod
    def at_call(self, use: Use, name: str) -> Any:
        """Return what one use by a module call contributes.

        Args:
            use: The use.
            name: Name of the parameter in its module.
        """

    @abstractmethod
    def at_leaf(self, columns: Columns) -> Any:
        """Return what one use outside all rules contributes.

        Args:
            columns: ``{source: [V, N, *parameter]}``.
        """

    def at_parameter(self, parameter: Parameter, columns: Columns, plan: Plan) -> Any:
        """Return what one use outside all rules contributes, if its place in the graph matters.

        Args:
            parameter: The parameter.
            columns: ``{source: [V, N, *parameter]}``.
            plan: The plan.
        """
        return self.at_leaf(columns)

    @abstractmethod
    def add(self, one: Any, other: Any, parameter: Parameter) -> Any:
        """Add the contributions of two uses.

        Args:
            one: Contribution.
            other: Contribution.
            parameter: The parameter.
        """

    def again(self) -> Rule:
        """Return the rule for further columns at the same uses: what does not depend on columns is read off once."""
        return self


def _owned(result: Tensor, carried: Tensor) -> Tensor:
    # a copy where memory is shared with what is carried on, so that whoever changes the result changes nothing else
    return result.clone() if result.untyped_storage().data_ptr() == carried.untyped_storage().data_ptr() else result


class ColumnRule(Rule):
    """The columns themselves, ``J^T S``: ``{source: [V, N, *parameter]}``, or ``[V, n, *parameter]`` of chosen samples in the order asked for."""

    def __init__(self, flow: Any, subsampling: Subsampling) -> None:
        self.subsampling = subsampling
        repeated = subsampling is not None and len(set(subsampling)) < len(subsampling)
        self._rounds = flow.mc_samples if isinstance(flow, SqrtFlow) and repeated else None

    def at_call(self, use: Use, name: str) -> Columns:
        rule, chosen = use.call.derivatives, self.subsampling
        direct = chosen is not None and use.layout.plain and self._rounds is None
        value = apply_to_all(use.value, lambda mat: mat[:, list(chosen)]) if direct else use.value

        def mjp(mat: Tensor) -> Tensor:
            sampling = list(chosen) if direct else None
            columns = rule._param_mjp(name, use.call, None, (use.grad,), mat, sum_batch=False, subsampling=sampling)
            return _owned(columns.to(use.parameters[name].dtype), mat)  # under autocast the layer's type is another one

        columns = apply_to_all(value, mjp)
        if chosen is None:
            use.keep_sum(name, columns)
        return columns if direct else self.choose({source: add_rows(c, use.layout) for source, c in columns.items()})

    def at_leaf(self, columns: Columns) -> Columns:
        return self.choose(apply_to_all(columns, Tensor.clone))  # they are autograd's, or those of other branches, too

    def add(self, one: Columns, other: Columns, parameter: Parameter) -> Columns:
        return add_columns(one, other)

    def choose(self, columns: Columns) -> Columns:
        """Choose samples.

        Args:
            columns: ``{source: [V, N, *]}``.

        Returns:
            ``{source: [V, len(subsampling), *]}``.
        """
        if self.subsampling is None:
            return columns
        if self._rounds is None:
            return {source: c[:, list(self.subsampling)] for source, c in columns.items()}
        turns = repetitions(self.subsampling)
        return {source: c.unflatten(0, (-1, self._rounds))[turns, :, list(self.subsampling)].movedim(0, 1) for source, c in columns.items()}


class ValueRule(Rule):
    """The flow's own value together with the call, for flows on sequences of modules, where a parameter has a single use."""

    def at_call(self, use: Use, name: str) -> tuple[Use, str]:
        return use, name

    def at_leaf(self, columns: Columns) -> Any:
        raise UnsupportedError("This quantity is defined for parameters of modules that have a rule.")

    def add(self, one: Any, other: Any, parameter: Parameter) -> Any:
        raise UnsupportedError("This quantity is not defined for a parameter that is used more than once: leave it out.")


def stack(columns: Columns) -> Tensor:
    """Put the columns of all sources side by side, in the order of the forward passes.

    Args:
        columns: ``{source: [V, ...]}``.

    Returns:
        ``[sum of V, ...]``.
    """
    ordered = in_order(columns)
    return columns[ordered[0]] if len(ordered) == 1 else concatenated([columns[source] for source in ordered])


def signed_matrices(columns: Columns) -> dict[str, list]:
    """Say columns with signs as module extensions of the Hessian's diagonal receive them.

    Args:
        columns: ``{source: [V, N, *]}``.

    Returns:
        ``"matrices"``, each ``[V, N, *]``, and ``"signs"``, 1.0 or -1.0 for each of them: entries of the other sign are zero.
    """
    parts: dict[str, list] = {"matrices": [], "signs": []}
    for source in in_order(columns):
        mat = columns[source]
        given = source.signs
        for sign in (1.0,) if given is None else (1.0, -1.0):
            chosen = mat if given is None else torch.where((given == sign).reshape(*given.shape, *[1] * (mat.dim() - 2)), mat, 0)
            parts["matrices"].append(chosen)
            parts["signs"].append(sign)
    return parts


def as_published(extension: Any, columns: Columns) -> Any:
    """Say what one of the library's flows carries as a module extension receives it.

    Args:
        extension: The library's extension.
        columns: ``{source: [V, N, *output]}``.

    Returns:
        ``[V, N, *output]``; of the Hessian's diagonal a dictionary of such, and of their signs. With subsampling ``N`` counts the chosen samples.
    """
    choice = ColumnRule(extension.flow, extension.samples(next(iter(columns.values())).shape[1]))
    if not isinstance(extension.flow, SignedSqrtFlow):
        return stack(choice.choose(columns))
    parts = signed_matrices(columns)
    return {"matrices": list(choice.choose(dict(enumerate(parts["matrices"]))).values()), "signs": parts["signs"]}


class FromGradient(NamedTuple):
    """A quantity that needs the gradient of the parameter, too, which autograd computes anyway.

    Attributes:
        function: Maps the gradient to the quantity.
    """

    function: Callable[[Tensor], Any]


Faster = Callable[[Any, Use, str], Any]
_FASTER: list[tuple[type, type[BaseDerivatives], frozenset[str], Faster]] = []
_FOUND: dict[tuple[type, type, str], Faster | None] = {}


def faster(extension: type, derivatives: type[BaseDerivatives], *names: str) -> Callable[[Faster], Faster]:
    """Register a function that computes a quantity at once, for a parameter that is used a single time.

    It is called as ``function(extension, use, name)``, with a use by the chosen samples alone if the extension has some, and may return
    ``NotImplemented`` to decline, or a ``FromGradient``.

    Args:
        extension: The extension class; its subclasses that keep ``finish`` use the function as well.
        derivatives: Class of derivatives whose modules the function knows.
        *names: Names of the parameters.

    Returns:
        A decorator.
    """

    def decorator(function: Faster) -> Faster:
        _FASTER.append((extension, derivatives, frozenset(names), function))
        _FOUND.clear()
        return function

    return decorator


def finish_at_once(extension: Any, use: Use, name: str) -> Any:
    """Finish what a single use of a parameter contributes, for an extension whose results never share memory with it.

    Args:
        extension: The extension.
        use: The use.
        name: Name of the parameter in its module.

    Returns:
        The quantity.
    """
    rule, call = use.call.derivatives, use.call
    columns = {source: rule._param_mjp(name, call, None, (use.grad,), mat, sum_batch=False) for source, mat in use.value.items()}
    use.keep_sum(name, columns)
    return extension.finish(columns, use.parameters[name])


def _reads_alike(cls: type, base: type) -> bool:
    # whether a subclass has made nothing else of the quantity
    return (cls.finish, cls.rule_at) == (base.finish, base.rule_at)


def find_faster(extension: Any, rule: BaseDerivatives, name: str) -> Faster | None:
    """Find the function registered for an extension, a rule and a parameter.

    Args:
        extension: The extension.
        rule: Derivatives of the module.
        name: Name of the parameter.

    Returns:
        The function, ``None`` if there is none.
    """
    key = (type(extension), type(rule), name)
    if key not in _FOUND:
        fitting = [
            function
            for cls, derivatives, names, function in _FASTER
            if isinstance(extension, cls) and _reads_alike(type(extension), cls) and keeps_product(rule, derivatives, name) and name in names
        ]
        _FOUND[key] = fitting[-1] if fitting else None
    return _FOUND[key]


def affine_arguments(use: Use) -> tuple[AffineDerivatives, ModuleCall, Tensor, Tensor | None]:
    """Return the arguments of the functions that square products of an affine layer, with the columns of all sources side by side.

    Args:
        use: A use by an affine layer.

    Returns:
        Derivatives, call, columns ``[V, *output]``, signs ``[V, N]`` or ``None``.
    """
    return use.call.derivatives, use.call, stack(use.value), signs_of(use.value)


def affine_squares_at_once(extension: type) -> None:
    """Let an extension, which sums signed squares of columns over columns and samples, do so without forming the columns at an affine layer.

    Args:
        extension: The extension class.
    """

    def weight(extension: Any, use: Use, name: str) -> Tensor:
        return sum_of_squares(*affine_arguments(use), use.sums, notes=use.notes)

    def bias(extension: Any, use: Use, name: str) -> Tensor:
        rule, call, mat, signs = affine_arguments(use)
        return finish_at_once(extension, use, name) if rule.vectors(call) is None else squares_at_output(mat, signs, use.notes).sum(0)

    def tied(extension: Any, use: Use, name: str) -> Tensor:
        return squares_of_tied(use)

    faster(extension, AffineDerivatives, "weight")(weight)
    faster(extension, TiedDerivatives, "weight")(tied)
    faster(extension, AffineDerivatives, "bias")(bias)


def squares_of_lookups(use: Use) -> tuple[Tensor, Tensor, Tensor]:
    """Square the columns of each sample at those rows of a table that the sample looked up, and add over the columns, with their signs.

    Args:
        use: A use by an embedding.

    Returns:
        ``[U, D]``, and for each of the ``U`` pairs the sample and the row, ``[U]`` both.
    """
    sums, samples, rows = use.call.derivatives.sums_per_sample(use.call, stack(use.value))
    signs = signs_of(use.value)
    return sum_of_squared_columns(sums, None if signs is None else signs[:, samples]), samples, rows


def sum_at_rows(use: Use) -> Tensor:
    """Sum the squares of lookups over all samples.

    Args:
        use: A use by an embedding.

    Returns:
        ``[K, D]``.
    """
    squares, _, rows = squares_of_lookups(use)
    return add_at(squares[None], rows, use.call.weight.shape[0])[0]


def squares_of_tied(use: Use, scale: float = 1.0) -> Tensor:
    """Sum the squares of a table that is the weight of a layer, too, over columns and samples.

    Args:
        use: A use by both.
        scale: Factor of the squares.

    Returns:
        ``[K, D]``; ``NotImplemented`` where lookups and layer cancel, so that digits would be lost.
    """
    rule, call, mat, signs = affine_arguments(use)
    squares, _, rows = rule.squares_of_lookups(call, mat, signs)
    whole = sum_of_squares(call.layer.derivatives, call.layer, mat, signs, scale=scale, notes=use.notes)
    total = whole + add_at(squares[None] * scale, rows, len(whole))[0]
    if signs is not None:
        return total
    return NotImplemented if cancels(total.sum(1), whole.sum(1)) else total.clamp(min=0)  # rounding may take single entries below zero


def place_at_rows(use: Use) -> Tensor:
    """Put the squares of lookups where they belong, zeros elsewhere.

    Args:
        use: A use by an embedding.

    Returns:
        ``[N, K, D]``.
    """
    (squares, samples, rows), (size, features) = squares_of_lookups(use), use.call.weight.shape
    return place_at(squares, samples * size + rows, use.layout.samples * size).reshape(use.layout.samples, size, features)


def signs_of(columns: Columns, subsampling: Iterable[int] | None = None) -> Tensor | None:
    """Return the signs of columns, all sources side by side.

    Args:
        columns: ``{source: [V, N, *]}``.
        subsampling: Samples that were chosen; ``None`` for all.

    Returns:
        ``[sum of V, N]``; ``None`` if all columns count positive.
    """
    sources = in_order(columns)
    if all(source == 0 or source.signs is None for source in sources):
        return None
    chosen = None if subsampling is None else list(subsampling)
    parts = []
    for source in sources:
        if source.signs is None:
            parts.append(columns[source].new_ones(columns[source].shape[:2]))
        else:
            signs = source.signs if chosen is None else source.signs[:, chosen]
            parts.append(signs.to(columns[source].dtype))  # born where a model computes in another precision
    return torch.cat(parts)
