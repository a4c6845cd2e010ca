"""The backward recursions of a layer and direction of an RNN or a GRU, for many columns at once, given what autograd has saved of the steps.

``S`` are the rows of all steps, one step after the other. Only states are a recursion: slopes are tensors ``[S, ..., H]`` of all steps. Sequences
may begin at different steps, or end: row ``r`` of a step goes on in row ``r`` of the next one, if that has as many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Steps(ABC):
    """All steps of a layer in one direction.

    Attributes:
        GATES: How many pre-activations an entry of the state has.
        SUMMED: Whether the terms of inputs and of states are added to each other, so that the same columns arrive at both.
        sizes: Number of rows of each step, as they lie in memory.
        order: Numbers of the steps in the order in which they were computed.
        are_equal: Whether all steps have as many rows.
    """

    GATES: int
    SUMMED = True

    def __init__(self, sizes: Sequence[int], reverse: bool = False) -> None:
        """Take the sizes.

        Args:
            sizes: Number of rows of each step.
            reverse: Whether the last step comes first.
        """
        self.sizes, self.order, self.are_equal = sizes, range(len(sizes))[:: -1 if reverse else 1], len({*sizes}) == 1

    def split(self, *slopes: Tensor) -> tuple[Sequence[Tensor], ...]:
        """Cut slopes of all steps.

        Args:
            *slopes: ``[S, ...]``.

        Returns:
            For each of them, the parts of the steps.
        """
        return tuple(each.split(self.sizes) for each in slopes)

    @abstractmethod
    def step(self, t: int, carried: Sequence[Tensor], inner: Tensor, outer: Tensor) -> list[Tensor | None]:
        """Carry columns from the state after a step to its pre-activations.

        Args:
            t: The step.
            carried: Columns at the state, and what else is handed on from step to step ``[V, R, H]``.
            inner: Filled with columns at the product with the state before the step ``[V, R, G, H]``.
            outer: Filled with columns at the term of the input; the same tensor, if they are the same.

        Returns:
            What arrives before the step, past the product; ``None`` if nothing does.
        """

    def pull_back(self, weight: Tensor, last: Sequence[Tensor], states: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
        """Carry columns from the states to the pre-activations and to the state before the first step.

        Args:
            weight: ``[G H, H]``.
            last: Columns at the state, and at what else is handed on, after the last step of each sequence ``[V, N, H]``.
            states: Columns at the states after each step ``[V, R, H]``, which are added; ``None`` for zeros.

        Returns:
            Columns at the products with the previous states and at the terms of the inputs ``[V, S, G H]``, ``[V, T, R, G H]`` if all steps have as
                many rows; at what was handed to the first step ``[V, R, H]``.
        """
        (V, rows, H), G, carried = last[0].shape, self.GATES, list(last)
        blocks = [last[0].new_empty(V * sum(self.sizes) * G * H) for _ in range(2 - self.SUMMED)]
        inner, outer = self._parts(blocks[0], V, G, H), self._parts(blocks[-1], V, G, H)
        flat = self._parts(blocks[0], V, G * H)  # each step in one piece, as its product with the weight needs it
        for t in reversed(self.order):
            if self.sizes[t] != rows:
                rows = self.sizes[t]
                carried = [_with_rows(columns, rows, end) for columns, end in zip(carried, last, strict=True)]
            if states is not None and (given := states[t]) is not None:
                carried[0] = carried[0] + given
            carried = self.step(t, carried, inner[t], outer[t])
            before = (flat[t].flatten(0, 1) @ weight).view(V, rows, H)
            carried[0] = before if carried[0] is None else before.add_(carried[0])
        if self.are_equal:
            found = [block.view(len(flat), *flat[0].shape).movedim(0, 1) for block in blocks]
        else:
            found = [torch.cat(self._parts(block, V, G * H), 1) for block in blocks]
        return found[0], found[-1], *carried

    def _parts(self, block: Tensor, V: int, *entry: int) -> Sequence[Tensor]:
        """View a block of columns as those of the steps.

        Args:
            block: ``[V S G H]``, step by step.
            V: Number of columns.
            *entry: Shape of what a row has.

        Returns:
            For each step ``[V, R, *entry]``.
        """
        if self.are_equal:
            return block.view(len(self.sizes), V, self.sizes[0], *entry).unbind()
        parts = block.split([V * size * prod(entry) for size in self.sizes])
        return [part.view(V, size, *entry) for part, size in zip(parts, self.sizes, strict=True)]


def _with_rows(columns: Tensor, rows: int, end: Tensor) -> Tensor:
    # rows of sequences that begin later are dropped, those of sequences that end here are appended
    known = columns.shape[1]
    return columns[:, :rows] if known >= rows else torch.cat([columns, end[:, known:rows]], 1)


class ElmanSteps(Steps):
    """``h_t = f(W h_{t-1} + u_t)`` (Elman 1990), with the hyperbolic tangent or the rectifier for ``f``."""

    GATES = 1

    def __init__(self, sizes: Sequence[int], states: Tensor, rectified: bool) -> None:
        """Compute the slopes.

        Args:
            sizes: Number of rows of each step.
            states: ``h_1, ..., h_T [S, H]``.
            rectified: Whether ``f`` is the rectifier.
        """
        super().__init__(sizes)
        (self._slopes,) = self.split((states > 0).to(states.dtype) if rectified else 1 - states.square())

    def step(self, t: int, carried: Sequence[Tensor], inner: Tensor, outer: Tensor) -> list[Tensor | None]:
        torch.mul(carried[0], self._slopes[t], out=inner.squeeze(2))
        return [None]


class GRUSteps(Steps):
    """``h_t = n + z (h_{t-1} - n)`` with ``n = tanh(u_n + r p_n)`` and ``r, z = sigmoid(u + p)``, ``p = W h_{t-1}`` (Cho et al. 2014)."""

    GATES = 3
    SUMMED = False

    def __init__(self, sizes: Sequence[int], reset: Tensor, update: Tensor, new: Tensor, change: Tensor, product: Tensor) -> None:
        """Compute the slopes.

        Args:
            sizes: Number of rows of each step.
            reset: ``r [S, H]``.
            update: ``z``, likewise.
            new: ``n``.
            change: ``h_{t-1} - n``.
            product: ``p_n``.
        """
        super().__init__(sizes)
        to_new, to_update, to_reset = (1 - update) * (1 - new.square()), change * update * (1 - update), product * reset * (1 - reset)
        self._reset, self._update, self._to_new, self._to_update, self._to_reset = self.split(reset, update, to_new, to_update, to_reset)

    def step(self, t: int, carried: Sequence[Tensor], inner: Tensor, outer: Tensor) -> list[Tensor | None]:
        (state,) = carried
        new = torch.mul(state, self._to_new[t], out=outer[:, :, 2])
        torch.mul(new, self._to_reset[t], out=outer[:, :, 0])
        torch.mul(state, self._to_update[t], out=outer[:, :, 1])
        inner[:, :, :2] = outer[:, :, :2]
        torch.mul(new, self._reset[t], out=inner[:, :, 2])
        return [state * self._update[t]]
