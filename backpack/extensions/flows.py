"""The flows: what travels backward beside the gradient, and how modules map it.

A flow is a value: extensions that need the same one share a single propagation (and the same Monte-Carlo draw).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backpack.core.calls import ModuleCall
from backpack.core.derivatives.linearity import is_linear_in
from backpack.core.flow import Columns, Flow
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.core.samples import Layout
from backpack.core.walk import GENERIC, Need, Unit
from backpack.extensions.curvature import Curvature
from backpack.extensions.loss_scale import position_weights, scaled
from backpack.utils.errors import BranchingError, LossValueError, UnsupportedError, exclusion


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

    is_gradient = True

    def start(self, call: ModuleCall, grad: Tensor) -> Columns:
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

    def start(self, call: ModuleCall, grad: Tensor) -> Columns:
        return {Source(call.order): scaled(self._factor(call, grad), call, grad)}

    def _factor(self, call: ModuleCall, grad: Tensor) -> Tensor:
        """Return the square root, zero for samples that were not asked for.

        Args:
            call: The loss call.
            grad: Gradient that arrives at the loss.

        Returns:
            ``[V, N, *]``; with Monte-Carlo samples and repeated indices, the columns of repetitions stand side by side.
        """
        chosen, loss = self.subsampling, call.derivatives
        if self.mc_samples is None:
            return loss._sqrt_hessian(call, None, (grad,))
        sampling = None if chosen is None else list(chosen)
        mat = loss._sqrt_hessian_sampled(call, None, (grad,), mc_samples=self.mc_samples, subsampling=sampling)
        if chosen is None:
            return mat
        chosen = tuple(index % call.inputs[0].shape[0] for index in chosen)
        rounds = repetitions(chosen)
        full = mat.new_zeros(1 + max(rounds, default=0), mat.shape[0], *call.inputs[0].shape)
        for position, (sample, turn) in enumerate(zip(chosen, rounds, strict=True)):
            full[turn, :, sample] = mat[:, position]
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


def refuse_coupled(plan: Plan, quantity: str, is_solved: Callable[[Unit], bool] = lambda unit: False) -> None:
    """Refuse parameters that a module multiplies with something that depends on them.

    Args:
        plan: The plan.
        quantity: For the message.
        is_solved: Says of which of these units the quantity is known all the same.

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
        if unit.couples & plan.concerned and not is_solved(unit):
            raise UnsupportedError(
                f"{quantity} of {unit.call.path} ({names}) has terms that couple several uses of the same parameter, one upstream of the "
                "other. No exact rule "
                "exists for them: use the generalized Gauss-Newton, or Hessian-vector products (backpack.hessianfree.hvp.hessian_vector_product), "
                f"or leave these parameters out: {plan.walk.exclusion(unit.couples & plan.concerned)}."
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
        rule, module = unit.call.derivatives, unit.call.module
        if module is None or all(type(part).__module__.startswith(("backpack.", "torch.")) for part in (rule, module)):
            continue
        for name, parameter in unit.parameters.items():
            if parameter in plan.uses and not is_linear_in(name, unit.call):
                raise UnsupportedError(
                    f"{quantity} of {unit.call.path}.{name}: the output of {type(module).__name__} is not linear in {name}, as far as can be told, "
                    f"so that there are terms of which {type(rule).__name__} does not know. Leave the layer without a rule, so that the graph takes "
                    f"its place in the diagonal of the Hessian, use the generalized Gauss-Newton, or leave it out: {exclusion(owners[parameter])}."
                )


class ChainFlow(Flow):
    """A flow that is exact on sequences of modules only."""

    crosses_gaps = False
    needs = Need.MODULES
    quantity = "This quantity"

    def merge(self, old: object, new: object) -> object:
        raise BranchingError(f"{self.quantity} is exact on sequences of modules only, but a tensor here has several consumers.")

    def check(self, plan: Plan) -> None:
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

    def start(self, call: ModuleCall, grad: Tensor) -> Tensor:
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

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if Curvature.require_residual(self.curvature):
            refuse_curved(plan, self.quantity)


Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MatProdFlow(ChainFlow):
    """A function that multiplies ``[V, *out]`` with a curvature matrix of a module's output.

    Attributes:
        curvature: One of ``Curvature.CHOICES``.
    """

    curvature: str = Curvature.GGN
    quantity = "A curvature-matrix product (HMP, GGNMP, PCHMP)"

    def start(self, call: ModuleCall, grad: Tensor) -> Product:
        weights = position_weights(call, grad)
        Curvature.check_loss(call, grad if weights is None else weights, self.curvature)
        call.keep = True
        product = call.derivatives._make_hessian_mat_prod(call, None, (grad,))
        return product if weights is None else lambda mat: product(mat) * weights

    def through(self, call: ModuleCall, value: Product, grad: Tensor, layout: Layout) -> Product:
        rule = call.derivatives
        call.keep = True
        residual: Product | None = None
        if Curvature.require_residual(self.curvature) and not rule.hessian_is_zero(call):
            residual = self._residual(call, grad)

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
            refuse_curved(plan, self.quantity)
