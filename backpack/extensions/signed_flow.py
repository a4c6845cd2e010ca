"""The flow of the Hessian's diagonal: signed square roots of all its terms, each carried from where it was born."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from itertools import combinations
from math import prod
from operator import or_
from typing import Any

from torch import Tensor

from backpack.core.arrangements import repetitions
from backpack.core.calls import ModuleCall
from backpack.core.crossings import Gap
from backpack.core.derivatives.affine import is_bilinear
from backpack.core.derivatives.blocks import has_root
from backpack.core.derivatives.records import number_of
from backpack.core.flow import Columns, Use
from backpack.core.graph import operation, shape_of
from backpack.core.linear import LINEAR_IN_LOG_PROBABILITIES, PRODUCTS, is_linear
from backpack.core.node_calls import unfused
from backpack.core.node_functions import product
from backpack.core.plan import Plan
from backpack.core.residuals import Born, columns_of, has_complex, is_solvable, residual
from backpack.core.samples import Layout, add_rows, label_tensor
from backpack.core.units import Unit
from backpack.core.walk import Need, Walk
from backpack.core.ways import SPLIT
from backpack.extensions.flows import RootFlow, Source, refuse_coupled, refuse_curved
from backpack.extensions.loss_scale import position_weights
from backpack.extensions.separate import scattered, separate_rows
from backpack.utils.columns import ScatteredColumns, unit_columns
from backpack.utils.eigen import signed_root
from backpack.utils.errors import UnsupportedError
from backpack.utils.paired_columns import PairedColumns, PartOfPairs, floored, signs_of_pairs, sizes_of
from backpack.utils.precision import wide


@dataclass(frozen=True)
class SignedSqrtFlow(RootFlow):
    """Square roots, with signs, of all terms of the Hessian: of the loss's Hessian and of every curved operation's residual.

    An operation ``z -> f(z)`` with gradient ``g`` at its output adds ``sum_k g_k Hess f_k`` at its inputs. Its columns are born there and stay apart
    from those of other operations: ``H = sum_births J^T (S diag(signs) S^T) J``, which is exact on branching graphs. A column may be born on several
    inputs at once: its parts have one source, so that they are added where they meet again.
    """

    needs = Need.CURVATURE

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Columns:
        weights, loss = position_weights(call, grad), call.derivatives
        scale = (lambda one: one) if weights is None else lambda one: one * weights.abs().sqrt() * weights.sign()
        columns = self._in_blocks(call, layout, scale, signed=True)
        if columns is not None:
            return columns
        mat, signs = loss._least_sqrt_hessian(call, (grad,), signed=True) if self.least else loss._signed_sqrt_hessian(call, None, (grad,))
        if weights is not None and mat.numel():
            mat = mat * weights.abs().sqrt()
            # every column lives at a single position of the loss, so that its largest entry has the sign of that position
            shape = *mat.shape[:2], mat.shape[2:].numel()
            place = mat.abs().reshape(shape).argmax(2, keepdim=True)
            sign = weights.expand(mat.shape[1:]).sign().reshape(shape[1:]).expand(shape).gather(2, place).squeeze(2)
            signs = sign if signs is None else sign * signs
        mat, signs = separate_rows(mat, signs, layout)
        return {Source(call.order, signs): mat}

    @staticmethod
    def residual_at(call: ModuleCall, grad: Tensor, layout: Layout) -> tuple[Source, Tensor | ScatteredColumns] | None:
        """Factorize the second derivative of a module with respect to its input.

        Args:
            call: The module call, samples first.
            grad: Gradient at the output.
            layout: Says to which sample each row belongs.

        Returns:
            The source, and columns on the input ``[V, R, *in]``, perhaps formed where they are needed; ``None`` if there is none.
        """
        rule = call.derivatives
        if rule.hessian_is_zero(call):
            return None
        if rule.hessian_is_diagonal(call):
            residual = rule.hessian_diagonal(call, None, (grad,)).reshape(-1, 1)
            mat, signs = scattered(residual.abs().sqrt().unsqueeze(2), residual.sign(), grad.dtype, call.input0.shape, layout)
        elif has_root(rule):
            mat, signs = scattered(*rule.residual_root(call, (grad,)), grad.dtype, call.input0.shape, layout, rule.axis_of_blocks(call))
        else:
            units = unit_columns(call.input0.shape, grad)
            root = signed_root(wide(rule._residual_mat_prod(call, None, (grad,), units)).flatten(2).movedim(0, 2))
            mat, signs = scattered(*root, grad.dtype, call.input0.shape, layout)
        return Source(call.order, signs), mat

    def at_gap(self, walk: Walk, concerned: int, gap: Gap, grad: Tensor) -> tuple[Source, list[Born]] | None:
        if _is_cut_off(gap) or not curved_in(walk, concerned, gap):
            return None
        signs, born = residual(gap, grad)
        if any(_is_hidden(gap, part) for part in born):
            raise _hidden(walk, concerned, gap)
        return Source(0, signs), born

    def bears_at(self, walk: Walk, concerned: int, gap: Gap) -> bool:
        return bool(curved_in(walk, concerned, gap))

    def at_unit(self, walk: Walk, concerned: int, unit: Unit, use: Use) -> Iterator[tuple[Source, Any, dict[str, PartOfPairs]]]:
        own = self.residual_at(use.call, use.grad, use.layout)
        if own is not None:
            yield *own, {}
        if not _coupled(walk, concerned, unit):
            return
        # the layer is linear in its weight, and in its input: with an entry of the input in its place, the gradient of the weight is the other factor
        call, grad, layout = use.call, use.grad, use.layout
        size, rows = call.input0.shape[1:].numel(), len(grad)

        def form(some: slice) -> tuple[Tensor, Tensor]:
            units = unit_columns(call.input0.shape, grad, some)
            count = len(units)
            grads, at = grad.expand(count, *grad.shape).flatten(0, 1), _AtInput(call, units.flatten(0, 1), count)
            return units, call.derivatives._param_mjp("weight", at, None, (grads,), grads[None], sum_batch=False)[0].unflatten(0, (count, rows))

        turns = None if layout.plain else repetitions(layout.labels)
        of_weight, of_input = floored([sizes_of(call.weight.unsqueeze(0)), sizes_of(call.input0)], [False, False])
        columns = PairedColumns(size, form, of_weight / of_input, turns)
        _, signs = separate_rows(grad.new_zeros(2 * size, rows), signs_of_pairs(size, rows, grad), layout)
        yield Source(call.order, signs), columns.part(0), {"weight": columns.part(1, partial(add_rows, layout=layout))}

    def born(self, plan: Plan) -> int:
        samples = max(1, *plan.batches.values())
        units = [u for u in plan.units.values() if u.below is not None and plan.walk.reach[u.below[0]] & plan.concerned]
        gaps = [gap for gap in plan.gaps.values() if not _is_cut_off(gap) and curved_in(plan.walk, plan.concerned, gap)]
        entries = sum(prod(shape_of(u.below)) * _columns_of_an_entry(plan, u) for u in units)
        return int(entries) // samples + sum(map(columns_of, gaps))

    def needs_gradient(self, plan: Plan) -> bool:
        return any(SPLIT in gap.states.values() and curved_in(plan.walk, plan.concerned, gap) for gap in plan.gaps.values())

    def check(self, plan: Plan) -> None:
        for gap in plan.gaps.values():
            curved = curved_in(plan.walk, plan.concerned, gap)
            if curved and gap.hides_samples and operation(gap.node) in PRODUCTS:  # others tell whether they are curved at this point
                raise _hidden(plan.walk, plan.concerned, gap)
            if curved and not _is_cut_off(gap) and not is_solvable(gap):
                what = "computes with complex numbers" if has_complex(gap) else "is, or may hide, a curved operation"
                way_out = unfused(gap.node) or "Write it with elementary operations or a module that has a rule"
                raise UnsupportedError(
                    f"{plan.walk.where(gap.node)} {what} whose second derivative is not known, on the way to "
                    f"{{names}}: the diagonal of the Hessian has no exact rule for it. {way_out}, use the generalized Gauss-Newton, or "
                    "Hessian-vector products "
                    "(backpack.hessianfree.hvp.hessian_vector_product), or leave these parameters out: {exclude}.",
                    plan.walk.named(curved),
                )
        refuse_coupled(
            plan,
            "The diagonal of the Hessian",
            lambda unit: is_bilinear(unit.call, unit.call.derivatives),
            "if it is a normalization, let its weight and bias follow it (`weight * F.layer_norm(x, shape) + bias`), ",
        )
        refuse_curved(plan, "The diagonal of the Hessian")


def _columns_of_an_entry(plan: Plan, unit: Unit) -> Fraction:
    # how many columns are born at a unit, for each entry of its input
    call, rule, coupled = unit.call, unit.call.derivatives, 2 if _coupled(plan.walk, plan.concerned, unit) else 0
    if rule.hessian_is_zero(call):
        return Fraction(coupled)
    return coupled + (rule.columns_of_an_entry(call) if has_root(rule) else Fraction(1))


def _is_cut_off(gap: Gap) -> bool:
    # whether nothing arrives, as behind a mask of everything
    return all(state is not SPLIT and set(state.labels) == {-1} for state in gap.states.values())


def _is_hidden(gap: Gap, part: Born) -> bool:
    # whether columns are born in rows whose sample is not known, because a derivative is zero there
    crossing = gap.crossings[part.number]
    if part.layout is None or crossing is None or crossing.arrives is None or -1 not in crossing.arrives.labels:
        return gap.hides_samples and bool(part.columns[:].any())
    columns = part.columns[:]
    unknown, rows = label_tensor(crossing.arrives.labels, columns.device) < 0, columns.movedim(1 + part.layout.axis, 0)
    return bool((rows if gap.hides_samples or len(rows) != len(unknown) else rows[unknown]).any())


def _hidden(walk: Walk, concerned: int, gap: Gap) -> UnsupportedError:
    return UnsupportedError(
        f"The derivative of {walk.where(gap.node)} is exactly zero here, as where parameters are initialized with zeros, so that samples cannot be "
        "followed through it. Its second derivative is not zero, or may not be: the diagonal of the Hessian of {names} is not known at this very "
        "point. Start anywhere else, use the generalized Gauss-Newton, or leave these parameters out: {exclude}.",
        walk.named(curved_in(walk, concerned, gap)),
    )


class _AtInput:
    """A call with another input, of more rows."""

    scratch = None

    def __init__(self, call: ModuleCall, input0: Tensor, times: int) -> None:
        self._call, self.input0, self._times = call, input0, times

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._call, name)
        return value.expand(self._times, *value.shape).flatten(0, 1) if isinstance(value, Tensor) and number_of(name) is not None else value


def curved_in(walk: Walk, concerned: int, gap: Gap) -> int:
    """Find the parameters to whose diagonal blocks of the Hessian the second derivative of a graph node adds something.

    Args:
        walk: The graph.
        concerned: Bit set of the parameters in question.
        gap: The node.

    Returns:
        Bit set: none for (piecewise) linear operations, for products those on which several factors depend, else all that are concerned.
    """
    name = operation(gap.node)
    factors = product(gap.node) if name in PRODUCTS else None  # without a summand
    nexts = gap.nexts if factors is None else [gap.nexts[number] for number in factors.numbers]
    reached = [walk.reach[n[0]] & concerned for n in nexts if n is not None]
    if name in PRODUCTS:
        return reduce(or_, (a & b for a, b in combinations(reached, 2)), 0)
    linear = name in LINEAR_IN_LOG_PROBABILITIES or is_linear(gap.node, lambda n: walk.reach.get(n, 0) & concerned)
    return 0 if linear else reduce(or_, reached, 0)


def _coupled(walk: Walk, concerned: int, unit: Unit) -> bool:
    """Say whether the product of a layer's weight and its input has a second derivative, because a parameter is in both.

    Args:
        walk: The graph.
        concerned: Bit set of the parameters in question.
        unit: The layer.

    Returns:
        Whether it has.
    """
    if not unit.couples & concerned or not is_bilinear(unit.call, unit.call.derivatives):
        return False
    in_weight = walk.reach[unit.split["weight"][0]] if "weight" in unit.split else 0
    if "weight" in unit.parameters:
        in_weight = walk.bits[id(unit.parameters["weight"])]
    return bool(in_weight & walk.reach[unit.below[0]] & concerned)
