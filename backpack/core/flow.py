"""What is carried backward: flows are handed to the engine from above."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.arrangements import Arrangement, Ragged, Repeated, ragged
from backpack.core.calls import ModuleCall
from backpack.core.crossings import Gap
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.records import number_of
from backpack.core.plan import Plan
from backpack.core.residuals import Born
from backpack.core.samples import Layout, add_rows
from backpack.core.units import Unit
from backpack.core.walk import Need, Walk

Columns = dict[Hashable, Tensor]
"""Columns of each source, ``[V, ...]``. Columns of one source add where branches meet; those of different sources stand side by side."""


def add_columns(one: Columns, other: Columns) -> Columns:
    """Add columns source by source.

    Args:
        one: ``{source: [V, ...]}``.
        other: ``{source: [V, ...]}``.

    Returns:
        The sum; columns of sources that only one of them has as they are.
    """
    return {**one, **{source: one[source] + c if source in one else c for source, c in other.items()}}


def add_in_place(old: Columns, new: Columns, own: set[Hashable], fresh: bool) -> Columns:
    """Add columns source by source, in memory that nobody else holds, where there is some.

    Args:
        old: ``{source: [V, ...]}``.
        new: ``{source: [V, ...]}``.
        own: Sources of ``old`` whose memory nobody else holds; becomes those of the sum.
        fresh: Whether nobody else holds the memory of ``new``.

    Returns:
        The sum; columns of sources that only one of them has as they are.
    """
    total = {**old, **new}
    for source in old.keys() & new.keys():
        one, other = old[source], new[source]
        total[source] = other.add_(one) if fresh else one.add_(other) if source in own else one + other
        own.add(source)
    if fresh:
        own.update(new)
    return total


class Flow(ABC):
    """What travels backward beside the gradient.

    Attributes:
        coupled: Whether some columns, if there are any, are of use only together with others.
    """

    crosses_gaps: bool = True
    coupled: bool = False
    differentiable: bool = False
    is_gradient: bool = False
    needs: Need = Need.COLUMNS

    @abstractmethod
    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Any:
        """Return the value at the input of a loss.

        Args:
            call: The loss call.
            grad: Gradient that arrives at the loss value.
            layout: Says to which sample each row of the input belongs.
        """

    @abstractmethod
    def through(self, call: ModuleCall, value: Any, grad: Tensor, layout: Layout, over: bool = False) -> Any:
        """Map a value from the output of a module to its input.

        Args:
            call: The module call, samples first.
            value: Value at the output, samples first.
            grad: Gradient that arrives at the output ``[R, *out]``.
            layout: Says to which sample each of the ``R`` rows belongs.
            over: Whether columns may be overwritten, which nobody else holds: the module is element-wise.
        """

    def merge(self, old: Any, new: Any) -> Any:
        """Unite values that arrive from two consumers.

        Args:
            old: Value that arrived before.
            new: Value that arrives now.

        Returns:
            Columns added source by source.
        """
        return add_columns(old, new)

    def at_gap(self, walk: Walk, concerned: int, gap: Gap, grad: Tensor) -> tuple[Hashable, list[Born]] | None:
        """Return what is born at a graph node that no rule covers: nothing, by default.

        Args:
            walk: The graph.
            concerned: Bit set of the parameters at which the flow is read.
            gap: The node.
            grad: Gradient of its output; with a leading axis of samples where the columns are split.

        Returns:
            The source, and its columns on the inputs.
        """
        return None

    def bears_at(self, walk: Walk, concerned: int, gap: Gap) -> bool:
        """Say whether something may be born at a graph node that no rule covers.

        Args:
            walk: The graph.
            concerned: Bit set of the parameters at which the flow is read.
            gap: The node.

        Returns:
            Whether it may: not, by default.
        """
        return False

    def part(self, source: Hashable, block: slice) -> Hashable:
        """Return the source of some of the columns of a source: the same, by default.

        Args:
            source: The source.
            block: Which of its columns.

        Returns:
            Their source.
        """
        return source

    def at_unit(self, walk: Walk, concerned: int, unit: Unit, use: Use) -> Iterable[tuple[Hashable, Tensor, dict[str, Tensor]]]:
        """Return what is born at a unit on its input, or on its input and its parameters together: nothing, by default.

        Args:
            walk: The graph.
            concerned: Bit set of the parameters at which the flow is read.
            unit: The unit.
            use: Its use of parameters.

        Returns:
            For each birth the source, its columns on the input ``[V, R, *in]``, and on parameters ``[V, N, *parameter]`` by name.
        """
        return ()

    def needs_gradient(self, plan: Plan) -> bool:
        """Say whether ``at_gap`` needs the gradient of each sample at nodes where the columns are split.

        Args:
            plan: The plan, as far as it concerns the flow.

        Returns:
            Whether it does.
        """
        return False

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Refuse a plan that the flow cannot follow exactly.

        Args:
            plan: The plan.
        """


class Use:
    """One use of parameters by a module call, samples first.

    Attributes:
        call: The call.
        parameters: Name to parameter.
        value: What the flow carries at the output: for columns ``{source: [V, R, *out]}``.
        grad: Gradient at the output ``[R, *out]``.
        layout: Says to which of the ``N`` samples each of the ``R`` rows belongs.
        notes: What was computed for one parameter and is the same for the others, which share this dictionary.
        sums: Name to what all samples contribute to the gradient of a parameter, from those who form it for each; ``None`` if it is not wanted.
    """

    __slots__ = ("_parts", "call", "grad", "layout", "notes", "parameters", "sums", "value")

    def __init__(
        self,
        call: ModuleCall,
        parameters: dict[str, Parameter],
        value: Any,
        grad: Tensor,
        layout: Layout,
        notes: dict[Hashable, Any] | None = None,
        parts: list[Use] | None = None,
    ) -> None:
        self.call, self.parameters, self.value, self.grad, self.layout = call, parameters, value, grad, layout
        self.notes = {} if notes is None else notes
        self.sums: dict[str, Tensor] | None = None
        self._parts = parts

    @property
    def parts(self) -> list[Use]:
        """Uses that stand for it where rows of a sample are summed: with an axis of rows, if that is cheaper than a result for each; else itself."""
        if self._parts is None:
            rule, turn = self.call.derivatives, None
            if not self.layout.plain and isinstance(rule, AffineDerivatives) and rule.any_batch_axis:
                turn = ragged(self.layout)
            if turn is None:
                return [self]  # which is not kept: it would refer to itself
            value = {source: turn.front(columns, 1) for source, columns in self.value.items()}
            even = Use(BatchFirst(self.call, turn), self.parameters, value, turn.front(self.grad), turn.layout)
            even.sums, self._parts = self.sums, [even]
        return self._parts

    def per_sample(self, name: str, shape: torch.Size, part: slice = slice(None)) -> Columns:
        """Return the columns of each sample at a factor that is computed from parameters.

        Args:
            name: Name of the factor.
            shape: Its shape.
            part: Some of the samples, where each row belongs to a sample of its own.

        Returns:
            ``{source: [V, n, *shape]}``.
        """
        rule, (use,) = self.call.derivatives, self.parts
        chosen = None if part == slice(None) else list(range(part.start, part.stop))
        columns = {
            s: rule._param_mjp(name, use.call, None, (use.grad,), c[:, part], sum_batch=False, subsampling=chosen) for s, c in use.value.items()
        }
        summed = columns if chosen is not None else {s: add_rows(c, use.layout) for s, c in columns.items()}
        return {s: c.reshape(*c.shape[:2], *shape) for s, c in summed.items()}

    def keep_sum(self, name: str, contributions: Columns) -> None:
        """Keep what all samples contribute to the gradient of a parameter, if it is wanted and has not been kept.

        Args:
            name: Name of the parameter.
            contributions: The gradient of each sample ``[1, N, *parameter]``.
        """
        if self.sums is not None and name not in self.sums:
            self.sums[name] = contributions[0][0].sum(0)


class BatchFirst:
    """A call with the samples, of inputs and output, turned to the front, which are read once."""

    def __init__(self, call: ModuleCall, arrangement: Arrangement | Ragged | Repeated) -> None:
        self._call, self._arrangement = call, arrangement

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._call, name)
        if isinstance(value, Tensor) and number_of(name) is not None:
            value = self.__dict__[name] = self._arrangement.front(value)
        return value


def cast(columns: Columns, dtype: torch.dtype) -> Columns:
    """Give columns a precision.

    Args:
        columns: The columns.
        dtype: The precision.

    Returns:
        The same, where they have it.
    """
    return {source: c if c.dtype == dtype else c.to(dtype) for source, c in columns.items()}


def reshaped(columns: Columns, shape: torch.Size) -> Columns:
    """Give columns the shape of another tensor with as many entries.

    Args:
        columns: ``{source: [V, *]}``.
        shape: Its shape.

    Returns:
        ``{source: [V, *shape]}``.
    """
    return {source: c if c.shape[1:] == shape else c.reshape(c.shape[0], *shape) for source, c in columns.items()}


def is_apart(result: Columns, value: Columns) -> bool:
    """Say whether columns have memory of their own, in which there is nothing else.

    Args:
        result: The columns.
        value: What they were made of.

    Returns:
        Whether they have.
    """
    given = {columns.untyped_storage().data_ptr() for columns in value.values()}
    stores = [(columns, columns.untyped_storage()) for columns in result.values()]
    return all(store.data_ptr() not in given and store.nbytes() == columns.nbytes for columns, store in stores)
