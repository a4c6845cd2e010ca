"""Mixing: which inputs of a node may have samples, and which are the same for all of them, as far as the graph, shapes and memory tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from numbers import Number

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack.core.batches import holds_samples, nested_in
from backpack.core.calls import Mark, ModuleCall
from backpack.core.graph import operation, saved, saved_tensors, shape_of
from backpack.core.memory import place_of
from backpack.core.origins import (
    LOOKUPS,
    MATRIX_PRODUCTS,
    are_positions,
    brings_rows,
    is_constant,
    is_made,
    is_of_parameter,
    is_relative,
    looked_up,
    selects_rows,
)
from backpack.core.refusals import mixing, refuse_compiled
from backpack.core.samples import Layout
from backpack.core.slots import Slot
from backpack.core.walk import Walk
from backpack.utils.differentiation import search
from backpack.utils.nested import tensors_in

_STATISTICS = frozenset({"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"})
"""Operations that use the statistics of the mini-batch in training mode."""


def mixes(walk: Walk, node: Node, upstream: Node, samples: int) -> bool:
    """Say whether a node mixes samples, where each one has columns of its own behind it.

    Args:
        walk: The graph.
        node: The node.
        upstream: Where one of its inputs comes from.
        samples: Size of the mini-batch.

    Returns:
        Whether that input may have samples: not so if it is made without data, of constants, or of what is copied for all.
    """
    if _is_bare(walk, upstream, samples):
        return False
    calls, brings = _data_of(walk, samples, upstream)
    if brings:
        return True
    if operation(node) in MATRIX_PRODUCTS and _are_given_constants(walk, calls, samples):
        return False
    given = [slot for call in calls for slot in call.tensor_inputs if walk.is_data(slot)]
    if upstream in walk.has_data and operation(node) != "Repeat":
        return True
    times = Counter(call.module for call in calls if walk.was_given_data(call))  # once a sample
    rows = [slot.shape[:-1] if slot.dtype.is_floating_point and len(slot.shape) > 1 else slot.shape for slot in given]
    return max(times.values(), default=0) >= samples or any(samples in shape for shape in rows)


def is_given_data(walk: Walk, node: Node, layout: Layout) -> bool:
    """Say whether modules were called with data from which a factor of a product was computed.

    Args:
        walk: The graph.
        node: The node that made the factor.
        layout: Where the samples lie in the product.

    Returns:
        Whether they were; not if these are constants, or positions, unless others may use them for other samples, as in a loop.
    """
    return node in walk.has_data and (layout.of_one or comes_from_data(walk, node, layout.samples))


def comes_from_data(walk: Walk, node: Node, samples: int) -> bool:
    """Say whether a node was computed from data, neither constants nor positions, with which modules were called, or functions with some of samples.

    Args:
        walk: The graph.
        node: The node.
        samples: Number of samples.

    Returns:
        Whether they were.
    """
    calls, brings = _data_of(walk, samples, node)
    return brings or not _are_given_constants(walk, calls, samples)


def multiplies_data(walk: Walk, node: Node, samples: int) -> bool:
    """Say whether what a node makes was multiplied with data of samples, or added to them, as far as shapes tell, where no module was given any.

    Args:
        walk: The graph.
        node: The node.
        samples: Size of the mini-batch.

    Returns:
        Whether it may have been; rows that are selected from parameters, maybe for samples, are none of them.
    """
    made = [n for n in _upstream(walk, node) if operation(n) not in LOOKUPS] if samples > 1 else []
    return any(brings_rows(walk, n, samples) for n in made) and not is_made_of_constants(walk, node, samples)


def stands_beside(walk: Walk, node: Node, call: ModuleCall, samples: int) -> bool:
    """Say whether an output of a module stands beside the samples, maybe with as many rows: like a standard deviation beside means.

    Args:
        walk: The graph.
        node: Node that made it.
        call: Call of the module.
        samples: Number of rows.

    Returns:
        Whether it does; what is the only output of the only model has samples, whatever it is made of.
    """
    if not call.root or len(walk.outermost) > 1:
        return is_shared(walk, node, samples)
    return len(call.outputs) > 1 and samples > 1 and _has_data(walk) and _is_bare(walk, node, samples, copies=False)


def _has_data(walk: Walk) -> bool:
    # whether an outermost module was given data, or an object that may hold some
    if "data" not in walk.memo:
        others = (value for call in walk.outermost for value in call.inputs if not (value is None or isinstance(value, Slot | Number | str)))
        walk.memo["data"] = any(map(walk.was_given_data, walk.outermost)) or not all(map(tensors_in, others))
    return walk.memo["data"]


def _is_bare(walk: Walk, node: Node, samples: int, copies: bool = True) -> bool:
    # whether a node makes something of parameters and constants alone, looks nothing up, and, if asked, copies nothing for each sample
    if not is_made_of_constants(walk, node, samples):
        return False
    for n in _upstream(walk, node):
        name, shape = operation(n), shape_of((n, 0))
        edges, rows = n.next_functions, next((size for size in shape if size != 1), 1)
        one = name in ("Expand", "Repeat") and shape != shape_of(edges[0])
        copied = rows == samples and (one or (name in ("Stack", "Cat") and len(edges) == samples and len({*edges}) == 1))
        if selects_rows(walk, n) if copies else copied or name in LOOKUPS:
            return False
    return True


def is_made_of_constants(walk: Walk, node: Node, samples: int) -> bool:
    """Say whether a node makes something of parameters, and of what is known to be no sample, alone.

    Args:
        walk: The graph.
        node: The node.
        samples: Size of the mini-batch.

    Returns:
        Whether it does.
    """
    return is_of_parameter(walk, node, samples)


def is_same_for_all(walk: Walk, node: Node, samples: int) -> bool:
    """Say whether a node makes the same for all samples, though modules may have been called with it that know nothing of where it comes from.

    Args:
        walk: The graph.
        node: The node.
        samples: Size of the mini-batch.

    Returns:
        Whether it does.
    """
    return is_made_of_constants(walk, node, samples) and (node not in walk.has_data or _is_bare(walk, node, samples))


def is_shared(walk: Walk, node: Node, samples: int) -> bool:
    """Say whether rows stand beside the samples, maybe as many of them: made of parameters and constants, like prototypes.

    Args:
        walk: The graph.
        node: Node that made them.
        samples: Number of rows.

    Returns:
        Whether there is data, but none of it takes part, nor anything of unknown origin, as far as calls of modules tell.
    """
    if samples <= 1 or not _has_data(walk):
        return False
    if _is_bare(walk, node, samples, copies=False):
        return True
    calls = {mark.call for mark in walk.marks.get(node, ()) if mark.call.root}
    if any(maker in walk.has_data for call in calls for slot in call.tensor_inputs for maker in slot.makers):
        return False
    if not calls:  # what outermost modules were given tells
        calls, brings = _data_of(walk, samples, node)
        if brings:
            return False
    tensors = [slot.tensor for call in calls for slot in call.tensor_inputs if walk.is_data(slot)]
    if any(map(nested_in, calls)):
        return False
    return all(is_constant(walk, tensor) or _is_found_inside(walk, tensor) for tensor in tensors)


def _is_found_inside(walk: Walk, tensor: Tensor | None) -> bool:
    # whether it is torch.arange(n), or a tensor that is an attribute of a module, and was not given to an outermost one
    place = place_of(tensor)
    if place in walk.given_places:
        return False
    if tensor.dim() == 1 and not (tensor.is_floating_point() or tensor.is_complex()) and torch.equal(tensor, torch.arange(len(tensor)).to(tensor)):
        return True
    values = (value for call in walk.outermost for module in call.module.modules() for value in vars(module).values())
    return any(isinstance(value, Tensor) and place_of(value) == place for value in values)


def mixed_by(walk: Walk, node: Node, outputs: Iterable[int], upstream: tuple[Node, int, torch.Size]) -> str:
    """Say which node mixes samples.

    Args:
        walk: The graph.
        node: The node.
        outputs: Numbers of its outputs.
        upstream: Where one of its inputs comes from, and its shape.

    Returns:
        A part of a sentence, for ``mixing``.
    """
    how = f"{walk.where(node)} mixes them (outputs {[list(shape_of((node, nr))) for nr in outputs]}, input {list(upstream[2])})"
    if upstream[0] in walk.derived:
        return how + ", as that input was made of derivatives, to which other samples contribute: a weight after a step of an inner loop, say"
    if operation(node) == "Repeat":
        return how + ", or copies what is none of samples: then write expand"
    hint = (
        ", or one of its inputs is the same for all samples: then make that of a buffer of the model, used as it is, without frozen layers in "
        "between, look rows of a table up with torch.nn.functional.embedding(numbers, weight), give it an axis of samples with expand, or use a "
        "mini-batch of another size"
    )
    return how + hint * (operation(node) in MATRIX_PRODUCTS or operation(node).startswith("Linalg"))


def refuse_above(walk: Walk, node: Node, opaque: bool) -> None:
    """Refuse what lies behind the place where samples start, though no sample arrives there.

    Args:
        walk: The graph.
        node: A node upstream of which parameters lie.
        opaque: Whether what lies upstream of it has to be seen.

    Raises:
        UnsupportedError: If that is compiled.
        mixing: If it normalizes with statistics of the mini-batch, in a model that returns its loss, of which nothing says where the loss begins.
    """
    if opaque:
        refuse_compiled(walk, node)
    rows = shape_of((node, 0))[:1] if walk.returns_loss and operation(node) in _STATISTICS else ()
    if rows and rows[0] > 1 and rows[0] in walk.batches and saved(node, "training"):
        raise mixing(walk, node, f"{walk.where(node)} normalizes with the statistics of all {rows[0]} of them")


def refuse_summed(walk: Walk, node: Node, marks: Iterable[Mark], samples: int) -> None:
    """Refuse what was computed from the mini-batch, but is summed over samples afterwards.

    What is made without the mini-batch, say of position numbers, may well be used by all samples.

    Args:
        walk: The graph.
        node: A node of which the output is summed over samples.
        marks: What calls left there.
        samples: Size of the mini-batch.

    Raises:
        mixing: If it was computed from the mini-batch, as far as calls of modules, and views of what the model was given, tell.
    """
    if samples <= 1:
        return
    for call, slot in ((mark.call, slot) for mark in marks for slot in mark.call.tensor_inputs):
        rows = slot.shape[:-1] or slot.shape if slot.dtype.is_floating_point else slot.shape if len(slot.shape) > 1 else ()
        known = _holds_samples(walk, slot.tensor, samples)
        if walk.is_data(slot):
            batched = samples in rows[:2] and rows[0] != 1 and not (is_constant(walk, slot.tensor) or is_relative(slot.tensor))
        else:
            batched = rows[:1] == (samples,) and any(maker in walk.has_data and maker in _upstream(walk, node) for maker in slot.makers)
        if (known or batched) and not is_made_of_constants(walk, node, samples):
            how = f"what {call.path} returns for an input of shape {list(slot.shape)} is summed over the {samples} samples"
            if not known and walk.is_data(slot):
                raise mixing(walk, node, how + _unknown_rows(slot.shape, rows.index(samples)))
            raise mixing(walk, node, how + " (if it depends on the shape alone, give it the shape)")
    numbers = looked_up(walk, node)
    rows = () if numbers is None else numbers.shape[:2]
    if samples in rows or any(_holds_samples(walk, tensor, samples) for tensor in saved_tensors(node)):
        how = f"what {node.name()} computes of data is summed over the {samples} samples"
        raise mixing(walk, node, how + (_unknown_rows(numbers.shape, rows.index(samples)) if samples in rows else ""))


def _unknown_rows(shape: torch.Size, axis: int) -> str:
    """Say what to do where rows could be samples.

    Args:
        shape: Shape of a tensor that was not made of parameters.
        axis: An axis with as many rows as there are samples.

    Returns:
        The end of a sentence.
    """
    return (
        f", and where that comes from is not recorded (if its axis {axis} holds {shape[axis]} positions instead, use a mini-batch of another size, "
        f"or let the model use a tensor of shape {[1, *shape]})"
    )


def _data_of(walk: Walk, samples: int, node: Node) -> tuple[set[ModuleCall], bool]:
    # calls from which a node was computed, and whether functions may have been given data of samples
    def ended(n: Node) -> list[ModuleCall]:
        return [mark.call for mark in walk.marks.get(n, ())]

    def follow(n: Node) -> Iterator[Node]:
        layer = next((call for call in ended(n) if not call.module._modules), None)  # its inputs tell, whatever its nodes make of them
        upstream = [u for u, _ in n.next_functions] if layer is None else [u for slot in layer.tensor_inputs for u in slot.makers]
        return filter(walk.is_tracked, upstream)

    nodes = [*search([node], follow)]
    return {call for n in nodes for call in ended(n)}, any(not ended(n) and brings_rows(walk, n, samples) for n in nodes)


def _are_given_constants(walk: Walk, calls: Iterable[ModuleCall], samples: int) -> bool:
    # whether modules were called with nothing but what depends on parameters, constants, and positions
    given = [slot.tensor for call in calls for slot in call.tensor_inputs if walk.is_data(slot)]
    given += [tensor for call in calls for tensor in nested_in(call) if not walk.is_tracked(tensor.grad_fn)]
    return all(is_constant(walk, tensor) or are_positions(tensor, samples) for tensor in given)


class OfData(Container[Node]):
    """Nodes upstream of which a module was called with data, or a function with what the model was given.

    Args:
        walk: The graph.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk, self._reads = walk, {}

    def __contains__(self, node: object) -> bool:
        return node in self._walk.has_data or any(map(self._reads_data, _upstream(self._walk, node)))

    def _reads_data(self, node: Node) -> bool:
        if node not in self._reads:
            self._reads[node] = any(place_of(t) and place_of(t) in self._walk.given_places for t in saved_tensors(node))
        return self._reads[node]


def _upstream(walk: Walk, node: Node) -> Iterator[Node]:
    # nodes from which a node was computed, and from which a parameter is reached; itself among them
    return search([node], lambda n: [upstream for upstream, _ in n.next_functions if walk.is_tracked(upstream)])


def _holds_samples(walk: Walk, tensor: Tensor | None, samples: int) -> bool:
    return tensor is not None and not is_made(walk, tensor) and holds_samples(tensor, walk.outermost, samples)
