"""The backward recursions of a layer and direction of an RNN or a GRU, for many columns at once, given what autograd has saved of the steps.

``S`` are the rows of all steps, one step after the other. Only states are a recursion: slopes are tensors ``[S, ..., H]`` of all steps. Sequences
may begin at different steps, or end: row ``r`` of a step goes on in row ``r`` of the next one, if that has as many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Steps(ABC):
    """All steps of a layer in one direction.

    Attributes:
        GATES: How many pre-activations an entry of the state has.
        SUMMED: Whether the terms of inputs and of states are added to each other, so that the same columns arrive at both.
        sizes: Number of rows of each step, as they lie in memory.
        order: Numbers of the steps in the order in which they were computed.
    """

    GATES: int
    SUMMED = True

    def __init__(self, sizes: Sequence[int], reverse: bool = False) -> None:
        """Take the sizes.

        Args:
            sizes: Number of rows of each step.
            reverse: Whether the last step comes first.
        """
        self.sizes, self.order = sizes, range(len(sizes))[:: -1 if reverse else 1]

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
        (V, _, H), G, carried = last[0].shape, self.GATES, list(last)
        blocks = [last[0].new_empty(V * sum(self.sizes) * G * H) for _ in range(2 - self.SUMMED)]
        # each step in one piece, as its product with the weight needs it
        cut = [[part.view(V, -1 if len(part) else 0, G, H) for part in block.split([V * size * G * H for size in self.sizes])] for block in blocks]
        inner, outer = cut[0], cut[-1]
        for t in reversed(self.order):
            carried = [_with_rows(columns, self.sizes[t], end) for columns, end in zip(carried, last, strict=True)]
            if states is not None and (given := states[t]) is not None:
                carried[0] = carried[0] + given
            carried = self.step(t, carried, inner[t], outer[t])
            before = (inner[t].flatten(2).flatten(0, 1) @ weight).view(V, self.sizes[t], H)
            carried[0] = before if carried[0] is None else before.add_(carried[0])
        found = [self._joined(block, parts) for block, parts in zip(blocks, cut, strict=True)]
        return found[0], found[-1], *carried

    def _joined(self, block: Tensor, parts: list[Tensor]) -> Tensor:
        if len({*self.sizes}) == 1:
            return block.view(len(parts), *parts[0].shape).flatten(3).movedim(0, 1)
        return torch.cat(parts, 1).flatten(2)


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
