"""The flows: what travels backward beside the gradient, and how modules map it.

A flow is a value: extensions that need the same one share a single propagation (and the same Monte-Carlo draw).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import or_

import torch
from torch import Tensor

from backpack.core.calls import ModuleCall
from backpack.core.crossings import Gap
from backpack.core.flow import Columns, Flow
from backpack.core.graph import LINEAR, PIECEWISE_LINEAR, PRODUCTS, operation
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.core.samples import Layout, label_tensor
from backpack.core.starts import LossNode
from backpack.core.walk import GENERIC, Need
from backpack.extensions.curvature import Curvature
from backpack.extensions.loss_scale import position_weights, scaled
from backpack.utils.errors import BranchingError, LossValueError, UnsupportedError, exclusion
from backpack.utils.precision import wide


class Source:
    """Where columns were born.

    Attributes:
        order: Position of the call in the forward passes.
        signs: ``[V, N]``, for columns that count negative for some samples; ``None`` if all count positive.
    """

    __slots__ = ("order", "signs")

    def __init__(self, order: int, signs: Tensor | None = None) -> None:
        self.order, self.signs = order, signs


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
    sizes = [part.shape[0] for part in columns.values()]
    return dict(zip(columns, function(torch.cat(list(columns.values()))).split(sizes), strict=True))


class ColumnFlow(Flow):
    """Columns ``[V, N, *]``, mapped by transposed Jacobians."""

    def through(self, call: ModuleCall, value: Columns, grad: Tensor, layout: Layout) -> Columns:
        return apply_to_all(value, lambda mat: call.derivatives._jac_t_mat_prod(call, None, (grad,), mat))

    def check(self, plan: Plan) -> None:
        """Accept every plan: the graph's own nodes carry columns exactly."""


@dataclass(frozen=True)
class GradientFlow(ColumnFlow):
    """The gradient itself, as a single column. It is carried only where autograd would sum over samples."""

    is_gradient = differentiable = True

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Columns:
        raise AssertionError("The gradient comes from autograd.")


@dataclass(frozen=True)
class SqrtFlow(ColumnFlow):
    """A square root ``S`` of the loss's Hessian, ``[V, N, *]``, mapped by transposed Jacobians: that of the generalized Gauss-Newton.

    Attributes:
        mc_samples: Number of Monte-Carlo samples; ``None`` for the exact square root.
        subsampling: Samples for which it is drawn; ``None`` for all.
    """

    mc_samples: int | None = None
    subsampling: tuple[int, ...] | None = None

    @property
    def differentiable(self) -> bool:
        """Whether it is; what is drawn is not, since the distribution depends on the parameters, too."""
        return self.mc_samples is None

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Columns:
        mat = scaled(self._factor(call, grad, layout), call, grad)
        # sampled rows are independent, so that those of one sample can share a column
        return {Source(call.order): _separate_rows(mat, None, layout)[0] if self.mc_samples is None else mat}

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
            return loss._sqrt_hessian(call, None, (grad,))
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


def repetitions(indices: tuple[int, ...]) -> list[int]:
    """Count how often each index occurred before.

    Args:
        indices: Sample indices.

    Returns:
        One number an index.
    """
    seen: Counter[int] = Counter()
    result = []
    for index in indices:
        result.append(seen[index])
        seen[index] += 1
    return result


@dataclass(frozen=True)
class SignedSqrtFlow(ColumnFlow):
    """Square roots, with signs, of all terms of the Hessian: of the loss's Hessian and of every curved module's residual.

    A module ``z -> f(z)`` with gradient ``g`` at its output adds ``sum_k g_k Hess f_k`` at its input. Its columns are born there and stay apart
    from those of other modules: ``H = sum_births J^T (S diag(signs) S^T) J``, which is exact on branching graphs.
    """

    needs = Need.CURVATURE

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Columns:
        weights = position_weights(call, grad)
        mat, signs = call.derivatives._signed_sqrt_hessian(call, None, (grad,))
        if weights is not None:
            mat = mat * weights.abs().sqrt()
            # every column lives at a single position of the loss, so that its largest entry has the sign of that position
            place = (mat.abs().flatten(2).argmax(2), weights.expand_as(mat[0]).sign().flatten(1))
            sign = place[1].expand(mat.shape[0], -1, -1).gather(2, place[0].unsqueeze(2)).squeeze(2)
            signs = sign if signs is None else sign * signs
        mat, signs = _separate_rows(mat, signs, layout)
        return {Source(call.order, signs): mat}

    def through(self, call: ModuleCall, value: Columns, grad: Tensor, layout: Layout) -> Columns:
        result = super().through(call, value, grad, layout)
        rule = call.derivatives
        if rule.hessian_is_zero(call):
            return result
        if rule.hessian_is_diagonal(call):
            residual = rule.hessian_diagonal(call, None, (grad,))
            flat = residual.reshape(len(residual), residual.shape[1:].numel())
            mat = torch.diag_embed(flat.abs().sqrt()).movedim(-1, 0).reshape(flat.shape[1], *residual.shape)
            signs = flat.sign().T
        else:
            shape = call.input0.shape
            size = shape[1:].numel()
            unit = torch.eye(size, dtype=grad.dtype, device=grad.device).reshape(size, 1, *shape[1:]).expand(size, *shape)
            values, vectors = torch.linalg.eigh(wide(rule._residual_mat_prod(call, None, (grad,), unit)).flatten(2).movedim(0, 2))
            mat = (vectors * values.abs().sqrt().unsqueeze(1)).movedim(2, 0).reshape(size, *shape).to(grad.dtype)
            signs = values.sign().T.to(grad.dtype)
        mat, signs = _separate_rows(mat, signs, layout)
        result[Source(call.order, signs)] = mat
        return result

    def check(self, plan: Plan) -> None:
        for gap in plan.gaps.values():
            curved = _curved_in(plan, gap)
            if curved:
                raise UnsupportedError(
                    f"{plan.walk.where(gap.node)} is, or may hide, a curved operation between modules, on the way to {plan.walk.names(curved)}: "
                    "the diagonal of the Hessian has no exact rule for it. Use a module for it (torch.nn.GELU() instead of "
                    "torch.nn.functional.gelu), the generalized Gauss-Newton, or Hessian-vector products "
                    f"(backpack.hessianfree.hvp.hessian_vector_product), or leave these parameters out: {plan.walk.exclusion(curved)}."
                )
        refuse_coupled(plan, "The diagonal of the Hessian")


def _separate_rows(mat: Tensor, signs: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Give the rows of one sample columns of their own, since each row's columns were made as if it were a sample.

    Args:
        mat: ``[V, R, *]``.
        signs: ``[V, R]``; ``None`` if all count positive.
        layout: Says to which of the ``N`` samples each of the ``R`` rows belongs.

    Returns:
        ``[T * V, R, *]`` and signs ``[T * V, N]``, where ``T`` is the number of rows of a sample.
    """
    if layout.plain:
        return mat, signs
    repeated = repetitions(layout.labels)
    turns, rows = torch.tensor([repeated, range(len(repeated))], dtype=torch.int64, device=mat.device)
    full = mat.new_zeros(1 + max(repeated, default=0), *mat.shape)
    full[turns, :, rows] = mat.transpose(0, 1)
    if signs is not None:
        spread = signs.new_zeros(len(full), len(signs), layout.samples)
        spread[turns, :, label_tensor(layout.labels, mat.device)] = signs.T
        signs = spread.flatten(0, 1)
    return full.flatten(0, 1), signs


def _curved_in(plan: Plan, gap: Gap) -> int:
    """Find the parameters to whose diagonal blocks of the Hessian the second derivative of a graph node adds something.

    Args:
        plan: The plan.
        gap: The node.

    Returns:
        Bit set: none for (piecewise) linear operations, for products those on which several factors depend, else all that are concerned.
    """
    name = operation(gap.node)
    if name in LINEAR or name in PIECEWISE_LINEAR:
        return 0
    reached = [plan.walk.reach[n[0]] & plan.concerned for n in gap.nexts if n is not None]
    if name in PRODUCTS:
        return reduce(or_, (a & b for a, b in combinations(reached, 2)), 0)
    if name in ("Div", "DivScalar") and all(n is None for n in gap.nexts[1:]):
        return 0
    return reduce(or_, reached, 0)


def refuse_coupled(plan: Plan, quantity: str) -> None:
    """Refuse parameters that a module multiplies with something that depends on them.

    Args:
        plan: The plan.
        quantity: For the message.

    Raises:
        UnsupportedError: If there is one.
    """
    for unit in plan.units.values():
        names = ", ".join(name for name, parameter in unit.parameters.items() if parameter in plan.uses)
        way_out = f"or leave them out: {exclusion(*(owners[p] for p in unit.parameters.values() if p in plan.uses))}."
        if unit.call.derivatives is GENERIC and names:
            raise UnsupportedError(
                f"{quantity} of {unit.call.path} ({names}): {type(unit.call.module).__name__} has no rule, so that its second derivative "
                "with respect to its "
                f"own parameters is not known to be zero. Use the generalized Gauss-Newton, {way_out}"
            )
        if unit.couples & plan.concerned:
            raise UnsupportedError(
                f"{quantity} of {unit.call.path} ({names}) has terms that couple several uses of the same parameter, one upstream of the "
                "other. No exact rule "
                "exists for them: use the generalized Gauss-Newton, or Hessian-vector products (backpack.hessianfree.hvp.hessian_vector_product), "
                f"or leave these parameters out: {plan.walk.exclusion(unit.couples & plan.concerned)}."
            )


class ChainFlow(Flow):
    """A flow that is exact on sequences of modules only."""

    crosses_gaps = False
    needs = Need.MODULES
    quantity = "This quantity"

    def merge(self, old: object, new: object) -> object:
        raise BranchingError(f"{self.quantity} is exact on sequences of modules only, but a tensor here has several consumers.")

    def check(self, plan: Plan) -> None:
        for start in plan.losses.values():
            if isinstance(start.call, LossNode) and start.call.turned:
                raise UnsupportedError(f"{self.quantity}: {start.call.path} needs the samples on axis 0, and the classes on axis 1.")
        if plan.gaps:
            node = next(iter(plan.gaps))
            bits = plan.walk.reach[node] & plan.concerned
            raise BranchingError(
                f"{self.quantity} is exact on sequences of modules only, but {plan.walk.where(node)} lies between modules, on the way to "
                f"{plan.walk.names(bits)}. Use modules for all operations, the generalized Gauss-Newton quantities "
                f"(DiagGGN, KFLR, KFAC), or the matrix-free products of backpack.hessianfree, or leave these parameters out: "
                f"{plan.walk.exclusion(bits)}."
            )
        for (node, _), count in plan.arrivals.items():
            if count > 1:
                bits = plan.walk.reach[node] & plan.concerned
                raise BranchingError(
                    f"{self.quantity} is exact on sequences of modules only, but {plan.walk.names(bits)} is reached "
                    f"through {count} branches. Use the generalized Gauss-Newton quantities (DiagGGN, KFLR, KFAC), or the matrix-free products of "
                    f"backpack.hessianfree, or leave these parameters out: {plan.walk.exclusion(bits)}."
                )
        for unit in plan.units.values():
            if any(plan.uses.get(p, 0) > 1 for p in unit.parameters.values()):
                raise BranchingError(
                    f"{self.quantity} of {unit.call.path}: a parameter is used more than once, for which no exact rule exists. "
                    f"Leave it out: {exclusion(*(owners[p] for p in unit.parameters.values() if plan.uses.get(p, 0) > 1))}."
                )
            if unit.arrangement is not None or not unit.layout.plain:
                raise UnsupportedError(f"{self.quantity} of {unit.call.path} needs the samples on axis 0 of its output, one row each.")


@dataclass(frozen=True)
class AverageFlow(ChainFlow):
    """A batch-averaged matrix ``[D, D]`` for the ``D`` features of a sample (Botev et al. 2017; Chen et al. 2018).

    Attributes:
        residual: Add the batch-summed diagonal residual of curved modules (Hessian instead of generalized Gauss-Newton).
    """

    curvature: str = Curvature.GGN
    quantity = "The batch-averaged curvature (KFRA, HBP)"

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Tensor:
        if grad.numel() != 1:
            raise UnsupportedError(f"{call.path}: {self.quantity} needs reduction='mean' or 'sum', got a loss value of shape {list(grad.shape)}.")
        Curvature.check_loss(call, grad, self.curvature)
        mat = call.derivatives._sum_hessian(call, None, (grad,))
        size = call.inputs[0].shape[1:].numel()
        return mat.reshape(size, size) * grad

    def through(self, call: ModuleCall, value: Tensor, grad: Tensor, layout: Layout) -> Tensor:
        rule = call.derivatives
        if not layout.samples:
            return value.new_zeros(2 * (call.input0.shape[1:].numel(),))
        result = rule.ea_jac_t_mat_jac_prod(call, None, (grad,), value)
        if Curvature.require_residual(self.curvature) and not rule.hessian_is_zero(call):
            if not rule.hessian_is_diagonal(call):
                raise UnsupportedError(f"{self.quantity} of the Hessian needs element-wise modules, {call.path} has a dense second derivative.")
            residual = rule.hessian_diagonal(call, None, (grad,)).flatten(1).sum(0)
            result = result + torch.diag(Curvature.modify_residual(residual, self.curvature))
        return result


Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MatProdFlow(ChainFlow):
    """A function that multiplies ``[V, *out]`` with a curvature matrix of a module's output.

    Attributes:
        curvature: One of ``Curvature.CHOICES``.
    """

    curvature: str = Curvature.GGN
    quantity = "A curvature-matrix product (HMP, GGNMP, PCHMP)"

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Product:
        weights = position_weights(call, grad)
        Curvature.check_loss(call, grad if weights is None else weights, self.curvature)
        product = call.derivatives._make_hessian_mat_prod(call, None, (grad,))
        return product if weights is None else lambda mat: product(mat) * weights

    def through(self, call: ModuleCall, value: Product, grad: Tensor, layout: Layout) -> Product:
        rule, call = call.derivatives, call.without_graph()
        residual = self._residual(call, grad) if Curvature.require_residual(self.curvature) and not rule.hessian_is_zero(call) else None

        def product(mat: Tensor) -> Tensor:
            call.refuse_changed()
            # an operation in place on a view acts on the view's base: the module that made the view, Flatten say, is not called then
            columns = mat.reshape(mat.shape[0], *call.inputs[0].shape)
            out = rule._jac_t_mat_prod(call, None, (grad,), value(rule._jac_mat_prod(call, None, (grad,), columns)))
            return (out if residual is None else out + residual(columns)).reshape(mat.shape)

        return product

    def _residual(self, call: ModuleCall, grad: Tensor) -> Product:
        rule = call.derivatives
        if not Curvature.is_pch(self.curvature):
            return lambda mat: rule._residual_mat_prod(call, None, (grad,), mat)
        if not rule.hessian_is_diagonal(call):
            raise LossValueError(
                f"{call.path}: the positive-curvature Hessian (PCHMP) is defined for element-wise modules, this one has a dense second derivative."
            )
        diagonal = Curvature.modify_residual(rule.hessian_diagonal(call, None, (grad,)), self.curvature)
        return lambda mat: diagonal * mat

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if Curvature.require_residual(self.curvature):
            refuse_coupled(plan, self.quantity)
