"""The backward recursions of a layer and direction of an RNN or a GRU, for many columns at once, given what autograd has saved of the steps.

Steps are numbered in the order in which they were computed. Slopes are tensors ``[T, R, H]`` of all steps, so that only the states are a recursion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Steps(ABC):
    """All steps of a layer in one direction.

    Attributes:
        GATES: How many pre-activations an entry of the state has.
        number: How many steps there are.
    """

    GATES: int
    number: int

    @abstractmethod
    def step(self, t: int, state: Tensor, inner: Tensor, outer: Tensor) -> Tensor | None:
        """Carry columns from the state after a step to its pre-activations.

        Args:
            t: The step.
            state: Columns ``[V, R, H]``.
            inner: Filled with columns at the product with the state before the step ``[V, R, G, H]``.
            outer: Filled with columns at the term of the input; the same tensor, if they are the same.

        Returns:
            What arrives at the state before the step past the product; ``None`` if nothing does.
        """

    def pull_back(self, weight: Tensor, last: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Carry columns from the states to the pre-activations and to the state before the first step.

        Args:
            weight: ``[G H, H]``.
            last: Columns at the state after the last step ``[V, R, H]``.
            states: Columns at the states after all steps ``[V, T, R, H]``, of which the last ones are in ``last``, too; ``None`` for zeros.

        Returns:
            Columns at the products with the previous states and at the terms of the inputs ``[V, T, R, G H]``; at the first state ``[V, R, H]``.
        """
        (V, R, H), T, state = last.shape, self.number, last
        inner = last.new_empty(T, V, R, self.GATES, H)  # each step in one piece, as its product with the weight needs it
        outer = torch.empty_like(inner) if self.GATES > 1 else inner
        for t in reversed(range(T)):
            past = self.step(t, state, inner[t], outer[t])
            before = (inner[t].view(V * R, self.GATES * H) @ weight).view(V, R, H)
            if past is not None:
                before += past
            state = before if states is None or not t else before.add_(states[:, t - 1])
        return inner.flatten(3).movedim(0, 1), outer.flatten(3).movedim(0, 1), state


class ElmanSteps(Steps):
    """``h_t = f(W h_{t-1} + u_t)`` (Elman 1990), with the hyperbolic tangent or the rectifier for ``f``."""

    GATES = 1

    def __init__(self, states: Tensor, rectified: bool) -> None:
        """Compute the slopes.

        Args:
            states: ``h_1, ..., h_T [T, R, H]``.
            rectified: Whether ``f`` is the rectifier.
        """
        self.number = len(states)
        self._slopes = (states > 0).to(states.dtype) if rectified else 1 - states.square()

    def step(self, t: int, state: Tensor, inner: Tensor, outer: Tensor) -> None:
        torch.mul(state, self._slopes[t], out=inner.squeeze(2))


class GRUSteps(Steps):
    """``h_t = n + z (h_{t-1} - n)`` with ``n = tanh(u_n + r p_n)`` and ``r, z = sigmoid(u + p)``, ``p = W h_{t-1}`` (Cho et al. 2014)."""

    GATES = 3

    def __init__(self, reset: Tensor, update: Tensor, new: Tensor, change: Tensor, product: Tensor) -> None:
        """Compute the slopes.

        Args:
            reset: ``r [T, R, H]``.
            update: ``z``, likewise.
            new: ``n``.
            change: ``h_{t-1} - n``.
            product: ``p_n``.
        """
        self.number, self._reset, self._update = len(reset), reset, update
        self._to_new = (1 - update) * (1 - new.square())
        self._to_update = change * update * (1 - update)
        self._to_reset = product * reset * (1 - reset)

    def step(self, t: int, state: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        new = torch.mul(state, self._to_new[t], out=outer[:, :, 2])
        torch.mul(new, self._to_reset[t], out=outer[:, :, 0])
        torch.mul(state, self._to_update[t], out=outer[:, :, 1])
        inner[:, :, :2] = outer[:, :, :2]
        torch.mul(new, self._reset[t], out=inner[:, :, 2])
        return state * self._update[t]
