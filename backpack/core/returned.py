"""What outermost modules have returned, and where that disagrees: outputs of one of them, or modules that are given what others have returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from torch import Size
from torch.autograd.graph import Node

from backpack.core.batches import (
    batch_of,
    counts_others,
    given_to,
    known_axis,
    leading_shape,
    lengths_of,
    lists_samples,
    nested_in,
    rows_of,
    sample_axis,
    turns,
)
from backpack.core.calls import Mark, ModuleCall
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.downstream import is_reshaped
from backpack.core.memory import place_of
from backpack.core.mixing import comes_from_data
from backpack.core.samples import Layout
from backpack.core.starts import Start
from backpack.core.walk import Walk
from backpack.core.ways import SPLIT, State
from backpack.utils.errors import UnsupportedError
from backpack.utils.nested import lists_in, opened

_MATRIX = 2


class Returned(NamedTuple):
    """What an outermost module has returned, and where the samples lie in it, seen from a later one or a loss.

    Attributes:
        node: Node that made it.
        mark: Mark of the call.
        rows: Number of samples, as the module tells.
        samples: Their number, seen from there.
        state: Where they lie, seen from there.
    """

    node: Node
    mark: Mark
    rows: int
    samples: int
    state: State

    @property
    def shape(self) -> Size:
        """Shape of the output."""
        return self.mark.call.outputs[self.mark.index].shape

    @classmethod
    def of(cls, walk: Walk, node: Node, mark: Mark, state: State, samples: int) -> list[Returned]:
        """Take note of an output.

        Args:
            walk: The graph.
            node: Node that made it.
            mark: What a call has left there.
            state: Where the samples lie.
            samples: Number of samples.

        Returns:
            The note; none if the call has no say.
        """
        rows = None if mark.base or mark.call.is_loss or not mark.call.root else rows_of(mark.call, walk.marks[node])
        return [] if rows is None else [cls(node, mark, rows, samples, state)]


def refuse_other_axes(walk: Walk, returned: Collection[Returned]) -> Iterator[UnsupportedError]:
    """Refuse modules of which the rows are no samples for a later one, which returns them on another axis.

    An encoder returns ``[N, D]``; a decoder that is given ``K`` draws for each of them, ``[K, N, D]``, has ``K`` rows. One module that does both is
    refused, as it was given ``N`` rows and has returned ``K``.

    Args:
        walk: The graph.
        returned: What all outermost modules have returned.

    Yields:
        The errors.
    """
    if not returned:
        return
    agree = [one for one in returned if one.rows == one.samples and one.state is not SPLIT and walk.was_given_data(one.mark.call)]
    refused = 0
    outputs = [(call, rows_of(call), call.outputs[0].shape) for call in walk.outermost if call.outputs]
    for one in returned:
        told = any(other.samples == one.samples and (one.rows == 1 or one.rows not in other.shape[1:-1]) for other in agree)
        if told or _is_followed(walk, one) or not walk.reach[one.node] & ~refused:
            continue
        kept = [(call, shape) for call, rows, shape in outputs if call.order > one.mark.call.order and rows == one.samples and _keeps(shape, one)]
        if kept and comes_from_data(walk, one.node, one.samples):
            (later, shape), refused = kept[0], refused | walk.reach[one.node]
            yield UnsupportedError(
                f"{one.mark.call} returns {list(one.shape)}, and {later}, which comes later, {list(shape)}: samples lie on axis 0 of what each of "
                f"them returns, but these are {one.rows} for the one and {one.samples} for the other, which has the {one.rows} on another axis. Let "
                "both have samples on axis 0 (draws, views, steps on axis 1), or extend one module that calls both and returns them there; or leave "
                "these parameters out of all extensions: {exclude}.",
                walk.named(walk.reach[one.node]),
            )


def is_turned(walk: Walk, node: Node, mark: Mark, known: State | None, losses: Iterable[Start]) -> bool:
    """Say whether the rows of a model's output are something else than the samples that it was given, which lie on another axis.

    Args:
        walk: The graph.
        node: Node that made the output.
        mark: Mark of the call there.
        known: Where samples lie there, seen from a loss or a later module; ``None`` if they are not known.
        losses: All losses: axis 1 of what is given to a cross-entropy has classes.

    Returns:
        Whether they are: where both lengths are exchanged; where a loss has taken rows for samples that are neither what was given, nor parts of it;
        or where they are as many as another argument is long, such as times, and no layer was given that, or so many of something else.
    """
    call = mark.call
    shape, first = call.outputs[mark.index].shape, batch_of(call)
    if first is None and all(tensor.is_floating_point() for tensor in nested_in(call)):  # no numbers of nodes, or of words
        first = next(iter(leading_shape(call)), None)
    owns = call.module._modules or walk.bits.keys() & map(id, call.module._parameters.values())
    if owns and known is None and turns(call):
        return True
    at_rows = known is None or (isinstance(known, Layout) and not known.axis and shape[:1] == (known.samples,))
    if not first or not at_rows or first not in shape[1:] or shape[0] == first:
        return False
    inside = first in shape[1:-1]
    if known is not None and inside and known.samples == 1:
        return True
    classes = any(start.below == (node, mark.nr) and isinstance(start.call.derivatives, CrossEntropyLossDerivatives) for start in losses)
    parts = not inside and (classes or shape[0] == 1 or shape[0] % first == 0)  # of samples, and features that are as many
    if known is not None and not parts and counts_others(call, shape, walk.marks[node]):
        return True
    if not owns or shape[1] != first or first == 1 or shape[0] not in lengths_of(call):
        return False
    arguments = {place_of(tensor) for tensor in given_to(call) if tensor.shape[:1] == shape[:1]} - {0}
    given = [inner.tensor_inputs[0] for inner in walk.calls if not inner.root and inner.tensor_inputs]
    return not any(slot.shape[:1] == shape[:1] and (slot.shape[1:2] != (first,) or place_of(slot.tensor) in arguments) for slot in given)


def _is_followed(walk: Walk, one: Returned) -> bool:
    # whether rows are samples, or parts of samples, also for what comes later; or recurrent layers say where they lie
    if one.state is SPLIT:
        return one.rows == one.samples == 1
    if one.state.axis != sample_axis(one.mark.call, one.mark.index):
        return any(call.order > one.mark.call.order and call.inputs and known_axis(call) is not None for call in walk.calls)
    return one.rows == 1 or len({*one.state.labels} - {-1}) > 1 or (one.samples == 1 and is_reshaped(walk, one.node, one.rows))


def _keeps(shape: Sequence[int], one: Returned) -> bool:
    # whether a tensor has the rows on another axis than the first; the last one is rather that of features
    features = one.state is not SPLIT or len(shape) > _MATRIX
    return one.rows in (shape[1:-1] if features else shape[1:])


def refuse_lists_of_one(walk: Walk, numbers: Iterable[int]) -> Iterator[UnsupportedError]:
    """Refuse a model that returns its loss and calls a layer for each entry of a list, as a mini-batch of one: all of them would be one sample.

    Args:
        walk: The graph.
        numbers: Numbers of samples that were found.

    Yields:
        The error.
    """
    if not walk.returns_loss or {*numbers} != {1}:
        return
    lists = [(call, len(value)) for call in walk.outermost if lists_samples(call) for given in call.inputs for value in lists_in(opened(given))]
    times = Counter(call.recorder for call in walk.calls if not call.root and walk.was_given_data(call))
    for call, length in lists:
        if length > 1 and length in times.values():
            bits = reduce(or_, (walk.reach[root] for root in walk.roots))
            yield UnsupportedError(
                f"{call} returns its loss, and was given a list of {length}, for each entry of which a layer was called with a single row: these "
                f"may be {length} samples, or all be of one. Let the model return its predictions, with the samples on axis 0, and compute the loss "
                "of them; or call it, and backward, for each of them (backpack(..., accumulate=True)).",
                walk.named(bits),
            )
            return


def unlike(walk: Walk, call: ModuleCall, node: Node, one: int, other: int) -> UnsupportedError:
    """Refuse outputs of one model that tell different samples.

    Args:
        walk: The graph.
        call: Call of the model.
        node: Node of one output.
        one: Number of samples of one output.
        other: Of the other.

    Returns:
        The error.
    """
    rows = f"of {one} and of {other} samples" if one != other else "that have samples in another order, or sums over them"
    return UnsupportedError(
        f"{call} returns outputs {rows}, as far as modules and losses tell: which rows of {{names}} belong together is not known. Return a row "
        "for each sample, in the order of the first output, and let a mask or weights in the loss choose some; call backward for each output "
        "(backpack(..., accumulate=True) unites the results); or leave these parameters out: {exclude}.",
        walk.named(walk.reach[node]),
    )
