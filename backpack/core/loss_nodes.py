"""Losses that are called as functions: the graph nodes at which second-order quantities can start, read like calls of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from backpack.core.derivatives.crossentropyloss import LogProbabilitiesDerivatives
from backpack.core.derivatives.registry import derivatives_for
from backpack.core.graph import operation, saved, shape_of, tensor_at
from backpack.core.slots import Edge
from backpack.core.state import recording

REDUCTIONS = ("none", "mean", "sum")
"""By the numbers that operations save."""
_LOG_PROBABILITIES = LogProbabilitiesDerivatives()
FUNCTIONS: dict[str, tuple[str, type[nn.Module], tuple[str, ...]]] = {
    "LogSoftmax": ("cross_entropy", nn.CrossEntropyLoss, ()),
    "MseLoss": ("mse_loss", nn.MSELoss, ()),
    "BinaryCrossEntropyWithLogits": ("binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss, ("weight", "pos_weight")),
    "BinaryCrossEntropy": ("binary_cross_entropy", nn.BCELoss, ("weight",)),
    "HuberLoss": ("huber_loss", nn.HuberLoss, ("delta",)),
    "SmoothL1Loss": ("smooth_l1_loss", nn.SmoothL1Loss, ("beta",)),
    "SoftMarginLoss": ("soft_margin_loss", nn.SoftMarginLoss, ()),
}
"""Operations at which second-order quantities can start: the function that is called, the module that does the same, and those of its options,
beside the reduction, that the operation saves.
"""
_SYMMETRIC = frozenset({"MseLoss", "HuberLoss", "SmoothL1Loss"})
"""Those of them whose two arguments may be swapped."""


def function_at(node: Node) -> str:
    """Name the operation at which second-order quantities may start.

    Args:
        node: A graph node.

    Returns:
        One of ``FUNCTIONS``, ``"LogSoftmax"`` also for ``x - x.logsumexp(dim, keepdim=True)``, as in ``Categorical``; else ``""``.
    """
    name = operation(node)
    return "LogSoftmax" if normalizer(node) is not None else name if name in FUNCTIONS else ""


def normalizer(node: Node) -> Node | None:
    """Find what makes a difference a vector of log-probabilities.

    Args:
        node: A graph node.

    Returns:
        The node of the logarithm of the sum of exponentials that is subtracted from its argument; ``None`` if it is none.
    """
    if operation(node) != "Sub" or len(node.next_functions) == 1:  # minus a number
        return None
    prediction, (below, _) = node.next_functions
    if below is None or operation(below) != "Logsumexp" or below.next_functions[0] != prediction or saved(node, "alpha") != 1:
        return None
    return below if saved(below, "keepdim") and len(saved(below, "dim")) == 1 else None


def weighs_entries(node: Node) -> bool:
    """Say whether a loss has weights of entries, which stand for certain axes.

    Args:
        node: A node that ``function_at`` finds.

    Returns:
        Whether it has.
    """
    return any(isinstance(saved(node, name), Tensor) for name in FUNCTIONS[function_at(node)][2])


def classes_of(node: Node) -> int:
    """Say on which axis the classes lie.

    Args:
        node: A node that ``function_at`` calls a ``"LogSoftmax"``.

    Returns:
        The axis, which may be negative.
    """
    below = normalizer(node)
    return saved(node, "dim") if below is None else saved(below, "dim")[0]


def log_probabilities(node: Node) -> Tensor:
    """Return what a softmax has computed.

    Args:
        node: See ``classes_of``.

    Returns:
        Logarithms of probabilities.
    """
    below = normalizer(node)
    return saved(node, "result") if below is None else saved(below, "self") - saved(below, "result")


def title(node: Node) -> str:
    """Describe an operation.

    Args:
        node: Its graph node.

    Returns:
        Name of the node, with that of the function if it is a loss, and what it stands for where that cannot be guessed.
    """
    name = function_at(node)
    if node.name().endswith("CopySlices"):
        return f"{node.name()} (an operation in place on a part of a tensor: write it out of place, with torch.where, or torch.stack)"
    return f"{FUNCTIONS[name][0]} ({node.name()})" if name else node.name()


def prediction_first(node: Node, reach: Mapping[Node, int]) -> tuple[tuple[Node | None, int], ...]:
    """Return where the arguments of a loss that was called as a function come from.

    Args:
        node: Its graph node.
        reach: Node to bit set of the tracked parameters upstream of it.

    Returns:
        The prediction, and others; where only the second argument of a symmetric loss depends on parameters, that is the prediction.
    """
    edges = node.next_functions if normalizer(node) is None else node.next_functions[:1]
    return edges[::-1] if operation(node) in _SYMMETRIC and not reach.get(edges[0][0]) else edges


class LossNode:
    """A graph node, read like the record of a loss module's call.

    Attributes:
        module: A module that does the same, without hooks.
        derivatives: The rule.
        inputs: The prediction without its data, samples on axis 0, classes on axis 1.
        path: Names of the function and of the node, for messages.
        order: Position among all losses; ``turns``: those of the first ones with which it shares columns, and columns that are drawn.
        axes: How the saved tensor is permuted to get there.
        of_classes: Whether it is the sum of log-probabilities, weighted by what arrives; others treat entries alone.
        incoming: Gradient that has arrived at log-probabilities ``[N, C, *]``.
    """

    is_loss, released, order, turns, keywords = True, False, 0, (0, 0), ()
    incoming: Tensor | None = None

    def __init__(self, node: Node, edge: Edge, axes: tuple[int, ...]) -> None:
        self._node, self.axes, self.path, self.of_classes = node, axes, title(node), function_at(node) == "LogSoftmax"
        self._names = ("self", "target") if edge == node.next_functions[0] else ("target", "self")
        shape, like = shape_of(edge), tensor_at(edge)
        _, make, options = FUNCTIONS[function_at(node)]
        if self.of_classes:
            self.module, self.derivatives = make(reduction="sum"), _LOG_PROBABILITIES
        else:
            self.module = make(reduction=REDUCTIONS[saved(node, "reduction")], **{name: saved(node, name) for name in options})
            self.derivatives = derivatives_for(self.module)
        self.inputs = [torch.empty([shape[axis] for axis in axes], dtype=like.dtype, device="meta")]

    @property
    def input0(self) -> Tensor:
        """The prediction; log-probabilities in place of logits."""
        value = log_probabilities(self._node) if self.of_classes else saved(self._node, self._names[0])
        return (value if recording.connection is not None else value.detach()).permute(self.axes)

    @property
    def input1(self) -> Tensor:
        """The target."""
        target = saved(self._node, self._names[1]).detach()
        return target.permute(self.axes) if self.turned else target

    @property
    def output(self) -> Tensor:
        """The value, which the node has not saved."""
        return self.module.forward(self.input0, self.input1)

    @property
    def turned(self) -> bool:
        """Whether its axes are in another order than those of the saved tensor."""
        return self.axes != tuple(range(len(self.axes)))

    @property
    def rows(self) -> list[int]:
        """Lengths of the axes on which samples could lie."""
        return [size for axis, size in enumerate(self.inputs[0].shape) if axis != 1 or not self.of_classes]

    def back(self, columns: Tensor) -> Tensor:
        """Undo the permutation of the prediction's axes.

        Args:
            columns: ``[V, *shape]``.

        Returns:
            ``[V, *shape of the saved tensor]``.
        """
        return columns.permute(0, *(1 + self.axes.index(axis) for axis in range(len(self.axes))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __repr__(self) -> str:
        return self.path
