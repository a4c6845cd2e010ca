"""Gradients of parameters that are sums of what each sample contributes: where that is formed anyway, autograd is spared its own product.

Autograd is asked for everything else, and for the node of the layer itself, so that its hooks run. What was summed is then handed to the tensor that
the layer multiplies by, its parameter or what functional code has made of it (``w.t()``), with all hooks on the way to the parameter and behind it.
"""

from __future__ import annotations

import torch
from torch import Size, Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from backpack.core.calls import ModuleCall
from backpack.core.checkpoints import checkpointed
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.flow import Use
from backpack.core.graph import LEAF
from backpack.core.plan import Plan
from backpack.core.units import Unit
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.sides import rows_of

POSITIONS = 32
"""Positions of a sample from which on it is cheaper to add up the contributions of samples than to multiply once more.

Measured for 256 x 256, 192 x 864 and 512 x 784 weights on one thread: as long with 16 positions while contributions are in the cache, with 40
when they are not; with 1024 positions the sum takes a thirtieth of the time.
"""
_TYPES = (torch.float32, torch.float64)
"""Types in which a sum over samples loses nothing against autograd's."""


class Spared:
    """The gradients of one pass that are not left to autograd.

    Attributes:
        edges: What autograd is asked for in their place; ``None`` for all.
    """

    def __init__(self, plan: Plan, extensions: dict[BackpropExtension, int]) -> None:
        """Choose the layers.

        Args:
            plan: The plan.
            extensions: Extensions that read the gradient, and bit sets of the parameters that concern them; none if all is left to autograd.
        """
        self._factors: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._parameters: set[Parameter] = set()
        self.edges: tuple[GradientEdge, ...] | None = None
        units = []
        for node, unit in plan.units.items() if extensions else ():
            rows = _rows(plan, unit)
            if rows is None or rows[3] < POSITIONS:
                continue
            weight = unit.parameters["weight"]
            bit, entries = plan.walk.bits[id(weight)], weight.numel()
            if any(bits & bit and extension.forms_gradients(rows, entries) for extension, bits in extensions.items()):
                units.append((node, unit))
                self._parameters.update(unit.parameters.values())
        if units:
            others = [node for node, leaf in plan.walk.leaves.items() if leaf not in self._parameters]
            self.edges = tuple(GradientEdge(node, 0) for node in others + _ends(plan, units, self._parameters))

    def prepare(self, use: Use) -> None:
        """Let those who form what samples contribute at a use keep the sum, if it is wanted.

        Args:
            use: The use, with the gradient as its value.
        """
        if self._parameters and any(parameter in self._parameters for parameter in use.parameters.values()):
            use.sums = {}

    def take(self, use: Use) -> None:
        """Take the gradients at a use: sums that were kept, or products like autograd's.

        Args:
            use: The use, of which everything has been read.
        """
        for name, parameter in use.parameters.items() if use.sums is not None else ():
            self._factors.append(_factor(use.call, name, parameter))
            self._gradients.append(gradient_at(use, name))

    def accumulate(self) -> None:
        """Hand the gradients over."""
        if self._factors:
            torch.autograd.backward(self._factors, self._gradients)


def untouched(call: ModuleCall, parameter: Parameter) -> bool:
    """Say whether no hook of a tensor, or of a module, can change the gradient of a parameter on its way from a layer.

    Args:
        call: The layer.
        parameter: The parameter.

    Returns:
        Whether none can.
    """
    if parameter._backward_hooks:
        return False
    if call.module is None:  # code in between may have hooked what it has made of the parameter
        return any(getattr(node, "variable", None) is parameter for node, _ in call.node.next_functions)
    return not (call.module._backward_hooks and call.module._is_full_backward_hook is False)


def gradient_at(use: Use, name: str) -> Tensor:
    """Return what all samples contribute to a gradient at a use: a sum that was kept, or a product like autograd's.

    Args:
        use: The use, with the gradient as its value.
        name: Name of the parameter there.

    Returns:
        Tensor of the shape of the parameter.
    """
    sums = {} if use.sums is None else use.sums
    if name not in sums:
        sums[name] = use.call.derivatives._param_mjp(name, use.call, None, (use.grad,), use.grad[None])[0]
    return sums[name].reshape(use.parameters[name].shape)


def _factor(call: ModuleCall, name: str, parameter: Parameter) -> Tensor:
    """Return what a layer multiplies by, or adds, in the shape of the parameter and connected to it.

    Args:
        call: The layer.
        name: Name of the parameter there.
        parameter: The parameter.

    Returns:
        A view.
    """
    with torch.inference_mode(False), torch.enable_grad():  # backward may be called in either
        weight = call.weight if call.module is None and name == "weight" else parameter
        return (parameter if weight.grad_fn is None else weight).view_as(parameter)  # a node may have saved none, for want of a use


def _ends(plan: Plan, units: list[tuple[Node, Unit]], spared: set[Parameter]) -> list[Node]:
    """Choose the layers' nodes that autograd has to be asked for, so that it runs all: gradients it is asked for stay in memory until the end.

    Args:
        plan: The plan.
        units: Nodes and layers, consumers before producers.
        spared: Their parameters.

    Returns:
        Nodes upstream of which there is nothing else that it is asked for.
    """
    walk, ends = plan.walk, []
    asked = walk.bits_of(frozenset(walk.bits) - {id(parameter) for parameter in spared})
    for node, unit in reversed(units):
        if unit.below is None or not walk.reach[unit.below[0]] & asked:
            ends.append(node)
            asked |= walk.bits_of(frozenset(map(id, unit.parameters.values())))
    return ends


def _rows(plan: Plan, unit: Unit) -> Size | None:
    """Return the shape of the output of a layer whose gradients can be sums over samples.

    Args:
        plan: The plan.
        unit: The layer.

    Returns:
        ``[N, G, O, L]``; ``None`` if it is no affine layer that is used once, at several positions, without backward hooks, of its own or its
            parameters', with a rule of the library, outside of checkpoints and in full precision; or if functional code may have hooked a tensor
            between layer and parameters that is out of reach.
    """
    call = unit.call
    several = unit.arrangement is not None or len(call.outputs[0].shape) > 2  # noqa: PLR2004
    affine = isinstance(call.derivatives, AffineDerivatives) and unit.is_ours  # whatever a user writes, .grad is autograd's
    if not several or not unit.layout.plain or "weight" not in unit.parameters or unit.split or not affine:
        return None
    types = {call.outputs[0].dtype, *(parameter.dtype for parameter in unit.parameters.values())}
    if len(types) > 1 or types.isdisjoint(_TYPES) or any(plan.uses[parameter] > 1 for parameter in unit.parameters.values()):
        return None
    if getattr(call, "origin", None) is not None or (call.module is not None and call.module._backward_hooks):
        return None
    if any(parameter._backward_hooks for parameter in unit.parameters.values()):  # some wait for the gradients of several parameters in one pass
        return None
    if call.module is None and len(unit.inside) > 1 + len(unit.parameters) and not _in_reach(unit):  # x @ w.t()
        return None
    return rows_of(unit)


def _in_reach(unit: Unit) -> bool:
    """Say whether all that lies between a node and the parameters lies behind the weight that the node has saved.

    Args:
        unit: The node.

    Returns:
        Whether it does.
    """
    node = unit.call.node
    if checkpointed(node):  # where what was saved is computed again, and connected to nothing
        return False
    way = {node}
    with torch.inference_mode(False), torch.enable_grad():
        behind = unit.call.weight.grad_fn
    while behind is not None and behind not in way:
        way.add(behind)
        behind = behind.next_functions[0][0] if behind.next_functions else None
    return all(inner in way or inner.name() == LEAF for inner in unit.inside)
