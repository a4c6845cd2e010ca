"""Flows that are exact on sequences of modules only: batch-averaged matrices, and products with curvature matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack.core.calls import ModuleCall
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.elementwise import ActivationDerivatives
from backpack.core.flow import Flow
from backpack.core.graph import HOOKED, shape_of
from backpack.core.loss_nodes import LossNode
from backpack.core.plan import Plan
from backpack.core.samples import Layout
from backpack.core.walk import GENERIC, Need
from backpack.extensions.curvature import Curvature
from backpack.extensions.flows import refuse_coupled, refuse_curved
from backpack.extensions.loss_scale import position_weights
from backpack.utils.errors import BranchingError, LossValueError, UnsupportedError

LARGEST = 2**30
"""Entries of the largest matrix that is formed: 4 GiB in single precision."""


def too_large(side: int, copies: int, dtype: torch.dtype) -> str | None:
    """Describe square matrices that are not formed, because they are larger than a computer's memory before long.

    Args:
        side: Number of their rows.
        copies: How many of them there are at a time.
        dtype: Type of their entries.

    Returns:
        Size and memory; ``None`` if they are formed.
    """
    if copies * side**2 <= LARGEST:
        return None
    memory = copies * side**2 * max(4, dtype.itemsize) / 2**30
    return f"{f'{copies} matrices' if copies > 1 else 'a matrix'} of {side:,} x {side:,} numbers, {memory:,.1f} GiB"


def dense_residuals(plan: Plan) -> Iterator[tuple[str, dict[Parameter, str]]]:
    """Find modules whose second derivative is neither zero nor diagonal, or not known to be, on the way to parameters.

    Args:
        plan: The plan.

    Yields:
        What the module is, and the parameters upstream of it with their names.
    """
    for unit in plan.units.values():
        rule, call = unit.call.derivatives, unit.call
        bits = 0 if unit.below is None else plan.walk.reach[unit.below[0]] & plan.concerned
        if bits and not rule.hessian_is_zero(call) and not rule.hessian_is_diagonal(call):
            hint = f"if it is, or is linear, register derivatives of its class that say so: backpack.register({call.recorder.kind}, ...)"
            what = f"and {call} is not known to be one: {hint}" if rule is GENERIC else f"but {call.path} has a dense second derivative"
            yield what, plan.walk.named(bits)


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
                raise UnsupportedError(
                    f"{self.quantity}: {start.call.path} needs the samples on axis 0, and the classes on axis 1. Give them so, or leave "
                    "them out: {exclude}.",
                    plan.walk.named(plan.walk.reach[start.below[0]] & plan.concerned),
                )
        for node in (node for node in plan.gaps if not isinstance(node, HOOKED)):
            bits = plan.walk.reach[node] & plan.concerned
            raise BranchingError(
                f"{self.quantity} is exact on sequences of modules only, but {plan.walk.where(node)} lies between modules, on the way to "
                "{names}. Use modules for all operations, without branches (extend(model, use_converter=True) writes many of them; write "
                "extend(model) again after one was replaced), or the generalized Gauss-Newton quantities (DiagGGN, KFLR, KFAC) or the matrix-free "
                "products of backpack.hessianfree, which take any graph, or leave these parameters out: {exclude}.",
                plan.walk.named(bits),
            )
        for (node, _), count in plan.arrivals.items():
            if count > 1:
                bits = plan.walk.reach[node] & plan.concerned
                raise BranchingError(
                    f"{self.quantity} is exact on sequences of modules only, but {count} branches lead "
                    "to {names}. Use the generalized Gauss-Newton quantities (DiagGGN, KFLR, KFAC), or the matrix-free products of "
                    "backpack.hessianfree, or leave these parameters out: {exclude}.",
                    plan.walk.named(bits),
                )
        for node, unit in plan.units.items():
            if again := [p for p in unit.parameters.values() if plan.uses.get(p, 0) > 1]:
                raise BranchingError(
                    f"{self.quantity} of {unit.call.path}: a parameter is used more than once, for which no exact rule exists. "
                    "Leave it out: {exclude}.",
                    {p: plan.walk.names[p] for p in again},
                )
            if unit.arrangement is not None or not unit.layout.plain:
                bits = plan.walk.reach[node] & plan.concerned
                raise UnsupportedError(
                    f"{self.quantity} of {unit.call.path} needs the samples on axis 0 of its output, one row each. Leave it out: {{exclude}}.",
                    plan.walk.named(bits),
                )


@dataclass(frozen=True)
class AverageFlow(ChainFlow):
    """A batch-averaged matrix ``[D, D]`` for the ``D`` features of a sample (Botev et al. 2017; Chen et al. 2018).

    Attributes:
        curvature: One of ``Curvature.CHOICES``; all but the generalized Gauss-Newton add the batch-summed diagonal residual of curved modules.
    """

    curvature: str = Curvature.GGN
    quantity = "The batch-averaged curvature (KFRA, HBP)"

    def start(self, call: ModuleCall, grad: Tensor, layout: Layout) -> Tensor:
        Curvature.check_loss(call, grad, self.curvature)
        mat = call.derivatives._sum_hessian(call, None, (grad,))
        size = call.inputs[0].shape[1:].numel()
        return mat.reshape(size, size) * grad

    def through(self, call: ModuleCall, value: Tensor, grad: Tensor, layout: Layout, over: bool = False) -> Tensor:
        rule = call.derivatives
        if not layout.samples:
            return value.new_zeros(2 * (call.input0.shape[1:].numel(),))
        result = rule.ea_jac_t_mat_jac_prod(call, None, (grad,), value)
        if Curvature.require_residual(self.curvature) and not rule.hessian_is_zero(call):
            residual = rule.hessian_diagonal(call, None, (grad,)).flatten(1).sum(0)
            result = result + torch.diag(Curvature.modify_residual(residual, self.curvature))
        return result

    def check(self, plan: Plan) -> None:
        super().check(plan)
        self._refuse_large(plan)
        for node, start in plan.losses.items():
            shape, bits = shape_of((node, start.nr)), plan.walk.reach[node] & plan.concerned
            weighted = isinstance(start.call, LossNode) and start.call.of_classes  # position by position, by what arrives
            if shape.numel() != 1 and bits and not weighted:
                raise UnsupportedError(
                    f"{start.call.path}: {self.quantity} needs reduction='mean' or 'sum', got a loss value of shape {list(shape)}. "
                    "Choose one of these, or leave them out: {exclude}.",
                    plan.walk.named(bits),
                )
        if Curvature.require_residual(self.curvature):
            refuse_curved(plan, self.quantity)
            for what, about in dense_residuals(plan):
                raise UnsupportedError(f"{self.quantity} of the Hessian needs element-wise modules, {what}. Leave them out: {{exclude}}.", about)

    def _refuse_large(self, plan: Plan) -> None:
        """Refuse modules and losses whose features are so many that matrices of them would not fit into memory.

        Args:
            plan: The plan.

        Raises:
            UnsupportedError: If there is one.
        """
        places = [(start.call, start.below, start.call.inputs[:1]) for start in plan.losses.values()]
        places += [(unit.call, unit.below, [unit.call.inputs[0], *unit.call.outputs]) for unit in plan.units.values() if unit.below is not None]
        for call, below, tensors in places:
            bits, rule = plan.walk.reach[below[0]] & plan.concerned, call.derivatives
            default = not call.is_loss and type(rule).ea_jac_t_mat_jac_prod is BaseDerivatives.ea_jac_t_mat_jac_prod
            features = max(tensor.shape[1:].numel() for tensor in tensors)
            copies = tensors[0].shape[0] if default and not rule.same_jacobian else 1
            matrix = too_large(features, copies, tensors[0].dtype)
            if bits and matrix:
                raise UnsupportedError(
                    f"{self.quantity} would form {matrix}, at {call}, which has {features:,} features a sample: more than {LARGEST:,} numbers are "
                    "not formed. KFAC and KFLR need no such matrix; or leave out what lies upstream of it: {exclude}.",
                    plan.walk.named(bits),
                )


Product = Callable[[Tensor], Tensor]


def _diagonal(entries: Callable[[], Tensor]) -> Product:
    """Multiply with a diagonal matrix, which is computed when the first product is asked for.

    Args:
        entries: Computes its diagonal, in the shape of a column.

    Returns:
        The product.
    """
    once = cache(entries)
    return lambda mat: mat * once()


def _jacobian(call: ModuleCall, grad: Tensor) -> tuple[Product, Product]:
    """Multiply with the Jacobian of a module's output with respect to its input.

    Args:
        call: The record of its execution.
        grad: Gradient with respect to the output.

    Returns:
        The product, and that with the transposed Jacobian.
    """
    rule = call.derivatives
    if isinstance(rule, ActivationDerivatives):
        return (_diagonal(lambda: rule.df(call, None, (grad,))),) * 2
    return partial(rule._jac_mat_prod, call, None, (grad,)), partial(rule._jac_t_mat_prod, call, None, (grad,))


class _Through(NamedTuple):
    """Multiply with a curvature matrix of a module's input: by a loop over the modules behind it, which may be more than Python nests calls.

    Attributes:
        call: The record of the module's execution.
        value: Multiplies with the curvature matrix of its output.
        forward: Multiplies with its Jacobian.
        backward: Multiplies with the transposed Jacobian.
        residual: Multiplies with its own second derivative; ``None`` if that is zero.
    """

    call: ModuleCall
    value: Product
    forward: Product
    backward: Product
    residual: Product | None

    def __call__(self, mat: Tensor) -> Tensor:
        product, passed = self, []
        while isinstance(product, _Through):
            if product.call.versions:
                product.call.refuse_changed()
            # an operation in place on a view acts on the view's base: the module that made the view, Flatten say, is not called then
            columns = mat.reshape(mat.shape[0], *product.call.inputs[0].shape)
            passed.append((product, mat.shape, None if product.residual is None else columns))
            product, mat = product.value, product.forward(columns)
        out = product(mat)
        for product, shape, columns in reversed(passed):
            out = product.backward(out)
            out = (out if product.residual is None else out + product.residual(columns)).reshape(shape)
        return out


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

    def through(self, call: ModuleCall, value: Product, grad: Tensor, layout: Layout, over: bool = False) -> Product:
        rule, call = call.derivatives, call.without_graph()
        residual = self._residual(call, grad) if Curvature.require_residual(self.curvature) and not rule.hessian_is_zero(call) else None
        return _Through(call, value, *_jacobian(call, grad), residual)

    def _residual(self, call: ModuleCall, grad: Tensor) -> Product:
        rule = call.derivatives
        if not (Curvature.is_pch(self.curvature) or isinstance(rule, ActivationDerivatives)):
            return partial(rule._residual_mat_prod, call, None, (grad,))
        return _diagonal(lambda: Curvature.modify_residual(rule.hessian_diagonal(call, None, (grad,)), self.curvature))

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if Curvature.require_residual(self.curvature):
            refuse_coupled(plan, self.quantity)
            refuse_curved(plan, self.quantity)
        if Curvature.is_pch(self.curvature):
            for what, about in dense_residuals(plan):
                raise LossValueError(
                    f"The positive-curvature Hessian (PCHMP) is defined for element-wise modules, {what}. Leave them out: {{exclude}}.",
                    about,
                )
