"""Graph nodes of tables in which rows are looked up by functions, read like calls of their modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import Node

from backpack.core.checkpoints import checkpointed
from backpack.core.derivatives.embedding import EmbeddingBagDerivatives, EmbeddingDerivatives, LookupDerivatives
from backpack.core.graph import operation, saved, shape_of
from backpack.core.leaves import way_to_leaf
from backpack.core.node_calls import NodeCall, States, reads
from backpack.core.node_layers import same_precision, single
from backpack.core.samples import Layout
from backpack.core.units import Unit
from backpack.core.walk import Walk

_EMBEDDING, _BAG, _MODES, _MAXIMUM = EmbeddingDerivatives(), EmbeddingBagDerivatives(), ("sum", "mean"), 2


def _lookup(node: Node, rule: LookupDerivatives, layout: Layout | None, walk: Walk, padding: int | None = None, **read: Callable) -> Unit | None:
    """Read an operation that looks up rows of a table.

    Args:
        node: The node.
        rule: Its rule.
        layout: Where the samples lie in its output.
        walk: The graph.
        padding: Number of the row that is constant; negative, or ``None``, for none.
        read: What else the rule reads: the numbers of the rows, for example.

    Returns:
        The unit; ``None`` where the samples lie along the features.
    """
    if layout is None or layout.axis >= len(shape_of((node, 0))) - 1:
        return None
    call = NodeCall(
        node,
        rule,
        weight=lambda: torch.empty(shape_of(node.next_functions[0]), dtype=call.outputs[0].dtype, device="meta"),
        padding_idx=lambda: None if padding is None or padding < 0 else padding,
        **read,
    )
    return same_precision(node, call, None, {"weight": 0}, layout, walk)


@reads("Embedding")
def _embedding(node: Node, states: States, walk: Walk) -> Unit | None:
    layout = None if saved(node, "scale_grad_by_freq") else single(states[node])
    return _lookup(node, _EMBEDDING, layout, walk, saved(node, "padding_idx"), input0=lambda: saved(node, "indices"))


@reads("EmbeddingBag")
def _embedding_bag(node: Node, states: States, walk: Walk) -> Unit | None:
    """Read ``torch.nn.functional.embedding_bag``: sums or means of rows over bags, each of which is a sample, or one of its rows.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.

    Returns:
        The unit; ``None`` for maxima, weights that depend on parameters, and bags that do not end with the list.
    """
    offsets, numbers, (_, weights) = saved(node, "offsets"), saved(node, "indices"), node.next_functions
    if saved(node, "mode") == _MAXIMUM or saved(node, "scale_grad_by_freq") or walk.is_tracked(weights[0]) or checkpointed(node):
        return None
    if len(offsets) > shape_of((node, 0))[0] and int(offsets[-1]) != len(numbers):
        return None
    read = {"input0": lambda: numbers, "input1": lambda: offsets, "input2": lambda: saved(node, "per_sample_weights")}
    return _lookup(node, _BAG, single(states[node]), walk, saved(node, "padding_idx"), **read, mode=lambda: _MODES[saved(node, "mode")])


@reads("Index", "IndexSelect")
def _index(node: Node, states: States, walk: Walk) -> Unit | None:
    """Read ``table[numbers]``, where the table is a parameter.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.

    Returns:
        The unit; ``None`` if something else is selected, or if what is would have to be computed again.
    """
    shape = shape_of(node.next_functions[0])
    if len(shape) != 2 or way_to_leaf(node.next_functions[0], False) is None or checkpointed(node):  # noqa: PLR2004
        return None
    given = saved(node, "indices") if operation(node) == "Index" else (None,) * (saved(node, "dim") % 2) + (saved(node, "index"),)
    if given[0] is None or given[0].dtype not in (torch.long, torch.int) or any(more is not None for more in given[1:]):
        return None
    return _lookup(node, _EMBEDDING, single(states[node]), walk, input0=lambda: given[0] % shape[0])
