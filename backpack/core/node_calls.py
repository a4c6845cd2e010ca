"""Operations in the graph that are read like calls of modules: a product with a matrix is a Linear layer, wherever the matrix comes from.

Such a node needs no call of a module to be covered by a rule: its own saved tensors supply the input and the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.calls import Edge, Mark
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.graph import LEAF, checkpointed, operation, saved, shape_of, tensor_at
from backpack.core.samples import Layout, arrangement
from backpack.core.walk import Unit, Walk

_TRANSPOSES = frozenset({"T", "Transpose", "Permute"})
_LINEAR, _MATMUL = LinearDerivatives(), MatmulDerivatives()


class NodeCall:
    """A graph node, read like the record of a module call: tensors come from what the node has saved.

    Attributes:
        derivatives: The rule.
        inputs: The input: shape, dtype and device.
        outputs: The output, likewise.
        module: There is none.
        path: Name of the node, for messages.
    """

    module = None
    is_loss = released = False
    order = 0

    def __init__(self, node: Node, rule: BaseParameterDerivatives, **read: Callable[[], Any]) -> None:
        self.derivatives, self._read = rule, read
        self.outputs = [tensor_at((node, 0))]
        self.path = node.name()

    @property
    def output(self) -> Tensor:
        """A tensor without data that has the shape of the output."""
        slot = self.outputs[0]
        return torch.empty(slot.shape, dtype=slot.dtype, device="meta")

    def __getattr__(self, name: str) -> Any:
        if name not in self._read:
            raise AttributeError(name)
        return self._read[name]()

    def __repr__(self) -> str:
        return self.path


class NodeUse(NamedTuple):
    """What a node does, said as a call.

    Attributes:
        call: The call.
        below: Which of the next edges belongs to the input.
        factors: Name to number of the next edge, of weight and bias.
    """

    call: NodeCall
    below: int
    factors: dict[str, int]


def read(node: Node, layout: Layout, walk: Walk) -> tuple[Unit | None, list[Node]]:
    """Read a node like the call of a module.

    Args:
        node: The node.
        layout: Where the samples lie in its output.
        walk: The graph.

    Returns:
        The unit, ``None`` if no rule stands for the node; and the nodes between it and the parameters that it uses.
    """
    reader = _READERS.get(operation(node))
    use = None if reader is None or checkpointed(node) else reader(node, layout)
    if use is None:
        return None, []
    unit, passed = Unit(Mark(use.call, 0, 0, False), {node}, {}), []
    for name, number in use.factors.items():
        edge = node.next_functions[number]
        if not walk.reach[edge[0]]:
            continue
        leaf = _leaf_behind(edge, turned=name == "weight" and not use.call.derivatives.transposed)
        if leaf is not None:
            unit.parameters[name] = walk.leaves[leaf]
            passed += [edge[0], leaf]
        elif edge[0] in walk.has_data:
            return None, []  # a product of two activations
        else:
            unit.split[name] = edge
    unit.arrangement, unit.layout = arrangement(layout)
    below = node.next_functions[use.below]
    if below[0] is not None and walk.reach[below[0]]:
        unit.below, unit.arrives = below, layout
        for bits in [walk.bits[id(p)] for p in unit.parameters.values()] + [walk.reach[edge[0]] for edge in unit.split.values()]:
            unit.couples |= walk.reach[below[0]] & bits
    return unit, passed


def _leaf_behind(edge: Edge, turned: bool) -> Node | None:
    """Return the leaf that an edge leads to.

    Args:
        edge: The edge.
        turned: Whether exactly one transposition of a matrix has to lie in between.

    Returns:
        The leaf's node; ``None`` if something else lies there.
    """
    node = edge[0]
    if turned:
        stays = operation(node) == "Permute" and saved(node, "dims")[0] in (0, 2**64 - 2)  # torch reports negative numbers as unsigned ones
        if operation(node) not in _TRANSPOSES or len(shape_of(edge)) != 2 or stays:
            return None
        node = node.next_functions[0][0]
    return node if node is not None and node.name() == LEAF else None


def _product(node: Node, layout: Layout, first: str, bias: bool) -> NodeUse | None:
    """Read ``x @ W``, perhaps with a bias and for a stack of matrices, as a layer with input ``x [[*, N, K]]`` and weight ``W``.

    Args:
        node: The node.
        layout: Where the samples lie in the output.
        first: Under which name the node has saved the left factor.
        bias: Whether the first of the next edges is that of a term that is added.

    Returns:
        The layer; ``None`` if the samples do not lie along the rows.
    """
    shape = shape_of((node, 0))
    if layout.axis != len(shape) - 2 or (bias and (saved(node, "alpha") != 1 or saved(node, "beta") != 1)):
        return None
    edges = node.next_functions[bias:]
    weight = edges[1]
    turned = weight[0] is not None and _leaf_behind(weight, True) is not None

    def matrix() -> Tensor:
        value = saved(node, "mat2")
        if value is None:  # the input needs no gradient
            value = torch.empty(shape_of(weight), device="meta")
        return value.mT if turned else value

    call = NodeCall(node, _LINEAR if turned else _MATMUL, input0=lambda: saved(node, first), weight=matrix)
    factors = {"weight": 1 + bias} if weight[0] is not None else {}
    if bias and node.next_functions[0][0] is not None:
        if shape_of(node.next_functions[0]) != shape[-1:]:
            return None
        factors["bias"] = 0
    return NodeUse(call, int(bias), factors)


_READERS: dict[str, Callable[[Node, Layout], NodeUse | None]] = {
    "Mm": lambda node, layout: _product(node, layout, "self", False),
    "Bmm": lambda node, layout: _product(node, layout, "self", False),
    "Addmm": lambda node, layout: _product(node, layout, "mat1", True),
}
