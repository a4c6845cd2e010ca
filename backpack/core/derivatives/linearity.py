"""Is the output of a module linear in a parameter? Rules say how it changes with the parameter, once: the Hessian needs to know that this is all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack.core.derivatives.records import call_arguments, module_of
from backpack.utils.nested import tensors_in
from backpack.utils.precision import largest, tolerance


def is_linear_in(name: str, execution: Any) -> bool:
    """Differentiate the output of a module twice with respect to a parameter, in a random direction.

    Args:
        name: Name of the parameter.
        execution: The record of an execution. An input that was not kept is replaced by random numbers: the rule does not look at it.

    Returns:
        Whether the second derivative is zero, up to rounding; also no if it cannot be computed.
    """
    module = module_of(execution)
    at = module.get_parameter(name).detach()

    def run(parameter: Tensor) -> Tensor:
        state = {key: buffer.clone() for key, buffer in module.named_buffers()} | {name: parameter}
        given = [_given(execution, i) for i in range(len(execution.inputs))]
        return tensors_in(functional_call(module, state, *call_arguments(execution, given)))[0]

    def gradient(parameter: Tensor) -> Tensor:
        output, pull_back = vjp(run, parameter)
        return pull_back(torch.rand(output.shape, dtype=output.dtype, device=output.device) - 0.5)[0]

    devices = [at.device] if at.is_cuda else []
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices), torch.enable_grad():
            first, product = vjp(gradient, at)
            (second,) = product(torch.rand_like(at) + 0.5)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((second.abs() <= tolerance(first, at.dtype) / max(1.0, largest(at))).all())


def _given(execution: Any, number: int) -> Any:
    """Return an argument of the execution that the module may change in place; of one that would have to be computed again, what is like it."""
    deferred = getattr(execution, "part", None) is not None and hasattr(execution.inputs[number], "dtype")
    value = execution.inputs[number] if deferred else getattr(execution, f"input{number}")
    if not (deferred or isinstance(value, Tensor)):
        return value
    if not (deferred or value.is_meta):
        return value.clone()
    make, device = torch.rand if value.dtype.is_floating_point else torch.zeros, next(execution.module.parameters()).device
    return make(value.shape, dtype=value.dtype, device=device)
