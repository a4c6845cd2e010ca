"""Trials of rules: what only a run would refuse is tried on the first sample, so that ``explain`` tells it without a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from backpack.core.calls import RANDOM
from backpack.core.crossings import Gap
from backpack.core.flow import BatchFirst, Flow
from backpack.core.graph import tensor_at
from backpack.core.plan import Plan
from backpack.core.starts import Start
from backpack.core.units import Unit
from backpack.core.walk import GENERIC, Need
from backpack.extensions.chains import ChainFlow
from backpack.extensions.collector import Collector
from backpack.extensions.curvature import Curvature
from backpack.extensions.flows import SqrtFlow
from backpack.extensions.loss_scale import position_weights
from backpack.utils.columns import distinct_columns
from backpack.utils.errors import BackpackError

_LARGEST = 2**27
"""Entries of the Hessians of a loss that are computed in order to see whether they have a square root."""


@contextmanager
def _about(plan: Plan, bits: int) -> Iterator[None]:
    """Say on account of which parameters something is refused, where the refusal itself does not.

    Args:
        plan: The plan.
        bits: Bit set of the parameters.

    Yields:
        Nothing.

    Raises:
        BackpackError: What is raised inside.
    """
    try:
        yield
    except BackpackError as error:
        if not error.about:
            raise type(error)(f"{error.args[0]} Leave them out: {{exclude}}.", plan.walk.named(bits)) from error
        raise


def try_rules(loss: Tensor, plan: Plan, collector: Collector) -> None:
    """Start all flows at their losses, and try the rules of all units on zeros for one sample.

    Args:
        loss: The root.
        plan: The plan.
        collector: Knows flows and extensions.
    """
    for flow in collector.flows:
        bits = collector.concerned(flow)
        for node, start in plan.losses.items() if not flow.is_gradient else ():
            reached = plan.walk.reach[node] & bits
            if reached:
                (grad,) = torch.autograd.grad(loss, [GradientEdge(node, start.nr)], retain_graph=True)
                with _about(plan, reached), torch.no_grad():
                    _start(flow, start, start.take(grad))
        for node, unit in plan.units.items():
            if unit.call.derivatives is not RANDOM and plan.walk.reach[node] & bits and unit.layout.samples:
                with torch.no_grad():
                    _try_unit(flow, plan, unit, bits)
        for node, gap in plan.gaps.items() if flow.crosses_gaps and not flow.is_gradient else ():
            if isinstance(node, BackwardCFunction) and plan.walk.reach[node] & bits:
                with _about(plan, plan.walk.reach[node] & bits), torch.no_grad():
                    _try_gap(gap)


def _try_gap(gap: Gap) -> None:
    """Send columns through a custom function, which tell whether its backward is linear.

    Args:
        gap: Its node.
    """
    tensors = [(nr, tensor_at((gap.node, nr))) for nr in gap.states]
    gap.call({nr: distinct_columns(torch.empty(2, *t.shape, dtype=t.dtype, device=t.device)) for nr, t in tensors})


def _start(flow: Flow, start: Start, grad: Tensor) -> None:
    """Start a flow, as cheaply as can be where the Hessian of the loss is known to have a square root.

    Args:
        flow: The flow.
        start: The loss.
        grad: Gradient that arrives at its value.
    """
    call = start.call
    samples, size = call.inputs[0].shape[0], call.inputs[0].shape[1:].numel()
    if call.derivatives.hessian_is_psd():
        if isinstance(flow, SqrtFlow):
            replace(flow, mc_samples=1).start(call, grad, start.layout)
            return
        weights = position_weights(call, grad)
        if isinstance(flow, ChainFlow):
            Curvature.check_loss(call, grad if weights is None else weights, flow.curvature)
    elif samples * size * size <= _LARGEST:
        flow.start(call, grad, start.layout)


def _try_unit(flow: Flow, plan: Plan, unit: Unit, bits: int) -> None:
    """Try the rule of a unit.

    Args:
        flow: The flow that would pass.
        plan: The plan.
        unit: The unit.
        bits: Bit set of the parameters at which the flow is read.
    """
    call, rule = unit.call, unit.call.derivatives
    view = call if unit.arrangement is None else BatchFirst(call, unit.arrangement)
    slot = call.outputs[0]
    grad = torch.zeros((), dtype=slot.dtype, device=slot.device).expand(slot.shape)
    grad = grad if unit.arrangement is None else unit.arrangement.front(grad)
    chosen = None if rule is GENERIC else list(range(len(grad)))[:1]  # an expert may have got no token
    first = grad if chosen is None else grad[:1]
    below = 0 if unit.below is None else plan.walk.reach[unit.below[0]] & bits
    if below and not flow.is_gradient:
        with _about(plan, below):
            rule._jac_t_mat_prod(view, None, (first,), first[None], subsampling=chosen)
            curved = Curvature.require_residual(flow.curvature) if isinstance(flow, ChainFlow) else flow.needs is Need.CURVATURE
            if curved and not rule.hessian_is_zero(view):
                if rule.hessian_is_diagonal(view):
                    rule.hessian_diagonal(view, None, (grad,))
                else:
                    zeros = torch.zeros((), dtype=slot.dtype, device=slot.device).expand(1, *view.input0.shape)
                    rule._residual_mat_prod(view, None, (grad,), zeros)
    for name, parameter in unit.parameters.items():
        own = plan.walk.bits[id(parameter)] & bits
        if own:
            with _about(plan, own):
                rule._param_mjp(name, view, None, (first,), first[None], sum_batch=True, subsampling=chosen)
