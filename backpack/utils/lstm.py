"""The backward recursion of one layer and direction of an LSTM, for many columns at once.

With pre-activations ``a [T, R, 4, H]`` of ``R`` sequences and gates ``i, f, o = sigmoid(a)``, ``g = tanh(a)`` in the order ``i, f, g, o``:
``c_t = f c_{t-1} + i g`` and ``h_t = o tanh(c_t)`` (Hochreiter & Schmidhuber 1997; Gers et al. 2000). Outputs are known, so that the
pre-activations of all steps are two products with matrices, and only the cells are a recursion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backpack.utils.recurrent import Steps


def previous(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Return the state before each step.

    Args:
        states: State after each step ``[T, R, H]``.
        first: State before the first step ``[R, H]``.
        reverse: Whether the last step comes first.

    Returns:
        ``[T, R, H]``.
    """
    return torch.cat([states[1:], first[None]] if reverse else [first[None], states[:-1]])


class LSTMSteps(Steps):
    """All steps of a layer in one direction, and their slopes; cells are handed on, too."""

    GATES = 4

    def __init__(self, sizes: Sequence[int], gates: Tensor, before: Tensor, squashed: Tensor, reverse: bool = False) -> None:
        """Compute the slopes.

        Args:
            sizes: Number of rows of each step.
            gates: ``i, f, g, o`` of all steps ``[S, 4, H]``.
            before: Cell before each step ``[S, H]``.
            squashed: ``tanh(c_t)``, likewise.
            reverse: Whether the last step comes first.
        """
        super().__init__(sizes, reverse)
        slopes = torch.empty_like(gates)
        i, f, g, o = gates.unbind(1)
        # autograd's kernels, one pass each: the slope of the sigmoid is f - f^2, of tanh 1 - g^2
        by_sigmoid, by_tanh = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
        for number, (factor, gate) in enumerate(((g, i), (before, f), (None, g), (squashed, o))):
            if factor is None:
                by_tanh.grad_input(i, gate, grad_input=slopes[:, number])
            else:
                by_sigmoid.grad_input(factor, gate, grad_input=slopes[:, number])
        self._keeps, self._to_cell, self._of_cell, self._of_state = self.split(f, by_tanh(o, squashed), *slopes.split((3, 1), 1))

    @classmethod
    def run(cls, gates: Tensor, first_cell: Tensor, reverse: bool) -> LSTMSteps:
        """Run the recursion of the cells.

        Args:
            gates: Pre-activations ``[T, R, 4 H]``, which are overwritten.
            first_cell: Cell before the first step ``[R, H]``.
            reverse: Whether the last step comes first.

        Returns:
            The steps.
        """
        gates = gates.unflatten(2, (4, -1))
        i, f, g, o = gates.unbind(2)
        gates[:, :, :2].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        cells, new, state = torch.empty_like(first_cell.expand_as(i)), i * g, first_cell
        for t in range(len(gates))[:: -1 if reverse else 1]:
            state = torch.addcmul(new[t], f[t], state, out=cells[t])
        flat = (each.flatten(0, 1) for each in (gates, previous(cells, first_cell, reverse), cells.tanh()))
        return cls([len(first_cell)] * len(gates), *flat, reverse)

    def step(self, t: int, carried: Sequence[Tensor], inner: Tensor, outer: Tensor) -> list[Tensor | None]:
        state, cell = carried
        cell = torch.addcmul(cell, state, self._to_cell[t])
        by_cell, by_state = inner.split((3, 1), 2)
        torch.mul(cell.unsqueeze(2), self._of_cell[t], out=by_cell)
        torch.mul(state.unsqueeze(2), self._of_state[t], out=by_state)
        return [None, cell * self._keeps[t]]
