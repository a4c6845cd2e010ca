"""The flows: what travels backward beside the gradient, and how modules map it.

A flow is a value: extensions that need the same one share a single propagation (and the same Monte-Carlo draw).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.arrangements import repetitions
from backpack.core.calls import ModuleCall
from backpack.core.derivatives.blocks import BlockLossDerivatives
from backpack.core.derivatives.linearity import is_linear_in
from backpack.core.flow import Columns, Flow
from backpack.core.graph import shape_of
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.core.samples import Layout
from backpack.core.units import Unit
from backpack.core.walk import GENERIC
from backpack.extensions.loss_scale import scaled
from backpack.extensions.separate import scattered, separate_rows
from backpack.utils.errors import UnsupportedError
from backpack.utils.pages import concatenated

LONG = 2**16
"""Entries of a column, at all modules that it passes, from which on it takes longer to carry one more than to make a root that has one less.

Measured on one thread of a CPU, with ten classes: 0.04 of the time of a pass more with a quarter of that, 0.01 to 0.07 less with that.
"""
FORMED = 2**20
"""Entries of all columns with which a flow starts, from which on they are formed where they are needed."""
_KNOWN = ("backpack.", "torch.")  # whose rules and layers are linear in their parameters


class Source(NamedTuple):
    """Where columns were born.

    Attributes:
        order: Position of the call in the forward passes.
        signs: ``[V, N]``, for columns that count negative for some samples; ``None`` if all count positive.
        which: Tells the columns from others that were born there: how many they are, or which part of them.
    """

    order: int
    signs: Tensor | None = None
    which: Hashable = None


def in_order(sources: Iterable) -> list:
    """Sort sources by the order of the forward passes.

    Args:
        sources: The sources.

    Returns:
        Sorted list.
    """
    sources = list(sources)
    return sources if len(sources) == 1 else sorted(sources, key=lambda source: source.order)


def apply_to_all(columns: Columns, function: Callable[[Tensor], Tensor]) -> Columns:
    """Apply a function that treats columns independently to the columns of all sources at once.

    Args:
        columns: ``{source: [V, ...]}``.
        function: Maps ``[V, ...]`` to ``[V, ...]``.

    Returns:
        The images, source by source.
    """
    if len(columns) == 1:
        return {source: function(part) for source, part in columns.items()}
    sources = in_order(columns)
    parts = [columns[source] for source in sources]
    return dict(zip(sources, function(concatenated(parts)).split([*map(len, parts)]), strict=True))


class ColumnFlow(Flow):
    """Columns ``[V, N, *]``, mapped by transposed Jacobians."""

    def through(self, call: ModuleCall, value: Columns, grad: Tensor, layout: Layout, over: bool = False) -> Columns:
        rule = call.derivatives
        ours = type(rule).__module__.startswith("backpack.")  # what users write is checked
        product = partial(rule._jac_t_mat_prod if ours else rule.jac_t_mat_prod, call, None, (grad,))
        return apply_to_all(value, lambda mat: product(mat, out=mat) if over else product(mat))

    def born(self, plan: Plan) -> int:
        """Estimate how many columns are born on the way.

        Args:
            plan: The plan.

        Returns:
            Columns of a sample: none, by default.
        """
        return 0

    def part(self, source: Source, block: slice) -> Source:
        return Source(source.order, None if source.signs is None else source.signs[block], (source.which, block.start))

    def check(self, plan: Plan) -> None:
        """Accept every plan: the graph's own nodes carry columns exactly."""


class GradientFlow(ColumnFlow):
    """The gradient itself, as a single column. It is carried only where autograd would sum over samples."""

    is_gradient = differentiable = True

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Columns:
        raise AssertionError("The gradient comes from autograd.")


GRADIENT = GradientFlow()
"""The only one."""


@dataclass(frozen=True)
class RootFlow(ColumnFlow):
    """Columns that start as a square root of the loss's Hessian.

    Attributes:
        least: Whether to take a root with few columns, since any will do. It is no other flow: where one reader needs the usual root, all get it.
    """

    least: bool = field(default=False, compare=False, kw_only=True)

    @property
    def drawn(self) -> bool:
        """Whether labels are drawn in place of a root."""
        return False

    def source(self, call: ModuleCall, width: int) -> Source:
        """Tell the columns of a loss that all count positive. Losses of other samples share columns, as samples of one loss do.

        What is drawn is independent, so that losses of the same samples can, too: products of what belongs to two of them are zero in the mean.

        Args:
            call: The loss call.
            width: Number of its columns.

        Returns:
            The source.
        """
        return Source(call.turns[self.drawn], None, width)

    def _in_blocks(self, call: ModuleCall, layout: Layout, scale: Callable[[Tensor], Tensor], signed: bool) -> Columns | None:
        """Factorize a Hessian that consists of blocks, of which a root would be mostly zeros: columns are formed where they are needed.

        Args:
            call: The loss call.
            layout: Says to which sample each row belongs.
            scale: Multiplies a column ``[1, R, *]`` by the square root of what the loss is multiplied by, with its sign.
            signed: Whether the Hessian may have negative eigenvalues.

        Returns:
            The columns; ``None`` if they are to be formed at once, because they are few, readers need the usual ones, or the rule knows no blocks.
        """
        loss, shape = call.derivatives, call.inputs[0].shape
        if not (self.least and is_long(call)):
            return None
        if not (isinstance(loss, BlockLossDerivatives) and type(loss).__module__.startswith(_KNOWN)):
            return None
        values, signs, axis = loss.root_of_blocks(call, signed)
        count, _, size = values.shape
        factors = scale(torch.ones(1, *shape, dtype=values.dtype, device=values.device)).movedim(axis, -1).reshape(count, 1, size)
        signs = factors[..., 0].sign().expand(values.shape[:2]) if signs is None else signs * factors[..., 0].sign()
        values = values * factors.abs()
        mat, spread = scattered(values, signs, values.dtype, shape, layout, axis)
        return {Source(call.order, spread) if signed else self.source(call, len(mat)): mat}


@dataclass(frozen=True)
class SqrtFlow(RootFlow):
    """A square root ``S`` of the loss's Hessian, ``[V, N, *]``, mapped by transposed Jacobians: that of the generalized Gauss-Newton.

    Attributes:
        mc_samples: Number of Monte-Carlo samples; ``None`` for the exact square root.
        subsampling: Samples for which it is drawn; ``None`` for all.
    """

    mc_samples: int | None = None
    subsampling: tuple[int, ...] | None = None

    @property
    def drawn(self) -> bool:
        """Whether labels are drawn, as often as was said."""
        return self.mc_samples is not None

    @property
    def differentiable(self) -> bool:
        """Whether it is; what is drawn is not, since the distribution depends on the parameters, too."""
        return not self.drawn

    @property
    def coupled(self) -> bool:
        """Whether they are: where a sample was chosen twice, its further columns are columns of their own."""
        chosen = self.subsampling if self.mc_samples is not None else None
        return chosen is not None and (len(set(chosen)) < len(chosen) or min(chosen, default=0) < 0)

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Columns:
        columns = self._in_blocks(call, layout, lambda one: scaled(one, call, grad), signed=False)
        if columns is not None:
            return columns
        mat = scaled(self._factor(call, grad, layout), call, grad)
        # rows of one sample that are drawn can share a column, like losses
        mat = mat if self.drawn else separate_rows(mat, None, layout)[0]
        return {self.source(call, len(mat)): mat}

    def _factor(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Tensor:
        """Return the square root, zero for samples that were not asked for.

        Args:
            call: The loss call.
            grad: Gradient that arrives at the loss.
            layout: Says to which of the ``N`` samples each of the ``R`` rows belongs.

        Returns:
            ``[V, R, *]``; with Monte-Carlo samples and repeated indices, the columns of repetitions stand side by side.
        """
        chosen, loss = self.subsampling, call.derivatives
        if self.mc_samples is None:
            return loss._least_sqrt_hessian(call, (grad,), signed=False)[0] if self.least else loss._sqrt_hessian(call, None, (grad,))
        if chosen is None:
            return loss._sqrt_hessian_sampled(call, None, (grad,), mc_samples=self.mc_samples)
        rows: dict[int, list[int]] = {}
        for row, sample in enumerate(layout.labels):
            rows.setdefault(sample, []).append(row)
        samples = tuple(index % layout.samples for index in chosen)
        rounds = repetitions(samples)
        places = [(turn, row) for sample, turn in zip(samples, rounds, strict=True) for row in rows.get(sample, ())]
        mat = loss._sqrt_hessian_sampled(call, None, (grad,), mc_samples=self.mc_samples, subsampling=[row for _, row in places])
        full = mat.new_zeros(1 + max(rounds, default=0), mat.shape[0], *call.inputs[0].shape)
        for position, (turn, row) in enumerate(places):
            full[turn, :, row] = mat[:, position]
        return full.flatten(0, 1)


def is_long(call: ModuleCall) -> bool:
    """Say whether the columns with which a flow starts at a loss are so many that they are formed where they are needed, if any root will do.

    Args:
        call: The loss call.

    Returns:
        Whether they are.
    """
    shape = call.inputs[0].shape
    return call.derivatives.least_columns(shape) * shape.numel() >= FORMED


def carried_for(flow: Flow | None, readers: Iterable[Any], plan: Plan) -> Flow | None:
    """Choose the root with which a flow starts.

    Args:
        flow: The flow; ``None`` for an extension that has none.
        readers: The extensions that read it.
        plan: The plan.

    Returns:
        The flow, with few columns if its readers allow it and they are long enough, or many.
    """
    if not isinstance(flow, RootFlow) or flow.drawn:
        return flow
    long, entries = any(is_long(start.call) for start in plan.losses.values()), 0
    for unit in plan.units.values() if not long else ():
        if unit.below is not None and plan.walk.reach[unit.below[0]] & plan.concerned:
            entries += prod(shape_of(unit.below))
            if long := entries >= LONG:
                break
    return replace(flow, least=True) if long and all(reader.takes_any_root for reader in readers) else flow


def refuse_coupled(plan: Plan, quantity: str, is_solved: Callable[[Unit], bool] = lambda unit: False, way_out: str = "") -> None:
    """Refuse parameters that a module multiplies with something that depends on them.

    Args:
        plan: The plan.
        quantity: For the message.
        is_solved: Says of which of these units the quantity is known all the same.
        way_out: One more thing that can be done.

    Raises:
        UnsupportedError: If there is one.
    """
    for unit in plan.units.values():
        coupled, generic = unit.couples & plan.concerned, unit.call.derivatives is GENERIC
        if not (coupled or generic):
            continue
        names = ", ".join(name for name, parameter in unit.parameters.items() if parameter in plan.uses)
        if generic and names:
            raise UnsupportedError(
                f"{quantity} of {unit.call.path} ({names}): {type(unit.call.module).__name__} has no rule, so that its second derivative "
                "with respect to its own parameters is not known to be zero. Use the generalized Gauss-Newton, or leave them out: {exclude}.",
                {p: plan.walk.names[p] for p in unit.parameters.values() if p in plan.uses},
            )
        if coupled and not is_solved(unit):
            raise UnsupportedError(
                f"{quantity} of {unit.call.path} ({names}) has terms that couple several uses of the same parameter, one upstream of the "
                f"other. No exact rule exists for them: {way_out}use the generalized Gauss-Newton, or Hessian-vector products "
                "(backpack.hessianfree.hvp.hessian_vector_product), or leave these parameters out: {exclude}.",
                plan.walk.named(coupled),
            )


def refuse_curved(plan: Plan, quantity: str) -> None:
    """Refuse parameters in which the output of a layer with a user's rule is not linear.

    Args:
        plan: The plan.
        quantity: For the message.

    Raises:
        UnsupportedError: If there is one.
    """
    for unit in plan.units.values():
        for name, parameter in unit.parameters.items() if unit.call.module is not None else ():
            if parameter in plan.uses:
                require_linear(unit.call, name, quantity, parameter)


def require_linear(call: Any, name: str, quantity: str, parameter: Parameter) -> None:
    """Refuse a parameter in which the output of a layer with a user's rule, or of a user's layer, is not linear.

    Args:
        call: The record of an execution.
        name: Name of the parameter.
        quantity: For the message.
        parameter: The parameter.

    Raises:
        UnsupportedError: If it is not linear.
    """
    rule, module = call.derivatives, call.module
    if (type(rule).__module__.startswith(_KNOWN) and type(module).__module__.startswith(_KNOWN)) or is_linear_in(name, call):
        return
    raise UnsupportedError(
        f"{quantity} of {call.path}.{name}: the output of {type(module).__name__} is not linear in {name}, as far as can be told, "
        f"so that there are terms of which {type(rule).__name__} does not know. Leave the layer without a rule, so that the graph takes "
        "its place in the diagonal of the Hessian, use the generalized Gauss-Newton, or leave it out: {exclude}.",
        owners.about([parameter]),
    )
