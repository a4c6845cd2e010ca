"""Unit: a module call whose rule stands for a piece of the graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.arrangements import Arrangement, Repeated
from backpack.core.calls import Mark
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.graph import call_node, outputs_of, shape_of
from backpack.core.samples import Layout
from backpack.core.slots import Edge


class Unit:
    """A module call whose rule stands for a piece of the graph.

    Attributes:
        call: The call.
        nr: Output number of the node at which the gradient of the output arrives.
        base: Whether that node made the tensor of which the output is a view.
        parameters: Name to parameter, of the trainable ones that the piece uses.
        inside: Nodes of the piece.
        below: Where input 0 comes from, if something there is needed.
        arrives: Where the samples lie there.
        arrangement: How the samples of the output are turned to the front, ``None`` if there is nothing to do.
        layout: To which sample each row on axis 0 belongs then.
        split: Name to edge, of factors that are no parameters themselves but computed from some.
        couples: Bit set of the parameters that the module uses and that are used upstream of it, too.
        rows: Shape in which an affine rule sees its output, set when it is needed.
    """

    __slots__ = ("arrangement", "arrives", "base", "below", "call", "couples", "inside", "layout", "nr", "parameters", "rows", "split")

    def __init__(self, mark: Mark, inside: set[Node], parameters: dict[str, Parameter]) -> None:
        self.call, self.nr, self.base = mark.call, mark.nr, mark.base
        self.inside, self.parameters = inside, parameters
        self.below: Edge | None = None
        self.arrives: Layout | None = None
        self.arrangement: Arrangement | Repeated | None = None
        self.layout: Layout | None = None
        self.split: dict[str, Edge] = {}
        self.couples = 0
        self.rows: torch.Size | None = None

    @property
    def parts(self) -> tuple[Unit]:
        """The units of which it consists: itself."""
        return (self,)

    @property
    def upstream(self) -> tuple[Edge | None, ...]:
        """Where what it hands on goes."""
        return (self.below, *self.split.values())

    @property
    def is_ours(self) -> bool:
        """Whether the rule is one of the library."""
        return type(self.call.derivatives).__module__.startswith("backpack.")

    def slope(self, node: Node) -> Tensor:
        """Return the derivative of an element-wise module, by sending ones through its piece of the graph.

        Args:
            node: Node of the output.

        Returns:
            Shape of the input.
        """
        edge, slot = (node, self.nr), self.call.outputs[0]
        columns = torch.ones(1, *shape_of(edge), dtype=slot.dtype, device=slot.device)
        while edge != self.below:
            returned = call_node(edge[0], [columns if nr == edge[1] else None for nr in range(len(outputs_of(edge[0])))])
            edge, columns = next((n, c) for n, c in zip(edge[0].next_functions, returned, strict=True) if n[0] in self.inside or n == self.below)
        return columns.reshape(slot.shape)


def is_vector(rule: BaseDerivatives, layout: Layout) -> bool:
    """Say whether a tensor of one axis is no mini-batch for a rule, as several of its entries belong to one sample: those may depend on one another.

    Args:
        rule: The rule.
        layout: To which samples the entries belong.

    Returns:
        Whether it is none; a rule that treats entries alone does not care.
    """
    return len({*layout.labels}) < len(layout.labels) and not isinstance(rule, ElementwiseDerivatives)
