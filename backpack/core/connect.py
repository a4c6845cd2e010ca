"""Passes with ``create_graph=True``: recorded tensors are connected to the graph again, so that quantities can be differentiated.

Most of them live on in what autograd has saved for its own backward pass. Others are computed again from those by the module that made them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.calls import ModuleCall
from backpack.core.checkpoints import checkpointed
from backpack.core.graph import operation, saved_tensors
from backpack.core.linear import SAME_ENTRIES
from backpack.core.plan import Plan
from backpack.core.slots import Edge, Slot
from backpack.utils.differentiation import THIRD, passes_derived_norms

# torch.nn.utils.parametrizations.weight_norm: torch 2.13 takes the norm for constant when it differentiates the backward pass
_WRONG_TWICE = frozenset({"WeightNormInterface"})


class Connection:
    """What is known of the graph of one pass.

    Attributes:
        failures: Why what is computed from now on cannot be differentiated; no entry for flows of which all can.
        flow: The flow for which tensors are read; while one is looked for, its record: what is missing then is missing for all flows that read it.
    """

    def __init__(self, plan: Plan) -> None:
        self.failures: dict[Hashable, str] = {}
        self._wrong = THIRD if passes_derived_norms(plan.walk.order) else None
        self.flow: Hashable = None
        self._units = {unit.call: (node, unit) for node, unit in (*plan.units.items(), *plan.shared.items())}
        self._found: dict[Slot, tuple[Tensor | None, str | None]] = {}

    def reason(self, flow: Hashable) -> str | None:
        """Say why what was computed for a flow cannot be differentiated.

        Args:
            flow: The flow.

        Returns:
            The reason; ``None`` if it can.
        """
        return self._wrong or self.failures.get(flow)

    def fail(self, reason: str) -> None:
        """Note that something could not be connected, for the present flow.

        Args:
            reason: What, and why.
        """
        self.failures.setdefault(self.flow, reason)

    def cross(self, node: Node) -> None:
        """Take note of a node that is called in place of autograd.

        Args:
            node: The node.
        """
        if operation(node) in _WRONG_TWICE:
            self.fail(f"torch differentiates {node.name()} wrongly")

    def connect(self, slot: Slot, name: str, call: ModuleCall, tensor: Tensor) -> Tensor:
        """Return a recorded tensor as part of the graph.

        Args:
            slot: Its record.
            name: Its name there.
            call: The call.
            tensor: The tensor, detached.

        Returns:
            The tensor; as it is where it depends on nothing, or cannot be connected.
        """
        if slot not in self._found:
            asking, self.flow = self.flow, slot
            try:
                found = self._find(slot, name, call)
            finally:
                self.flow = asking
            reason = self.failures.pop(slot, None)  # of something that it is made of
            if found is None:
                how = "keep a reference to what the loss is given (z = out / T)" if call.is_loss else "let the model keep a reference to it"
                reason = f"{name} of {call.path}, of shape {list(slot.shape)}, is not at hand any more: {how}"
            self._found[slot] = found, reason
        found, reason = self._found[slot]
        if reason is not None:
            self.fail(reason)
        return tensor if found is None else found

    def _find(self, slot: Slot, name: str, call: ModuleCall) -> Tensor | None:
        if slot.alive is not None:
            return slot.alive
        node, unit = self._units.get(call, (None, None))
        if name == "output":
            edges = [] if unit is None else [(node, unit.nr)]
        elif slot.edge is None:
            return slot.value
        else:
            edges = [slot.edge] if slot.base_edge is None else [slot.edge, slot.base_edge]
        found = None if unit is None else _saved_at(edges, unit.inside, slot.shape)
        return call.recover(name) if found is None else found


def _saved_at(edges: list[Edge], nodes: Iterable[Node], shape: torch.Size) -> Tensor | None:
    """Look for the tensor of an edge, or for a view of all of it, in what nodes have saved.

    Args:
        edges: Where it comes from: the edge, or that of its base.
        nodes: The nodes.
        shape: Its shape.

    Returns:
        The tensor, or ``None``.
    """
    for node in nodes:
        for tensor in saved_tensors(node) if not checkpointed(node) else ():  # what is computed again is connected to nothing
            place = tensor.grad_fn, tensor.output_nr
            while place[0] is not None and place not in edges and operation(place[0]) in SAME_ENTRIES:
                place = place[0].next_functions[0]
            if place in edges and tensor.numel() == shape.numel():
                return tensor.reshape(shape)
    return None
