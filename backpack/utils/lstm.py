"""The backward recursion of one layer and direction of an LSTM, for many columns at once.

With pre-activations ``a [T, R, 4, H]`` of ``R`` sequences and gates ``i, f, o = sigmoid(a)``, ``g = tanh(a)`` in the order ``i, f, g, o``:
``c_t = f c_{t-1} + i g`` and ``h_t = o tanh(c_t)`` (Hochreiter & Schmidhuber 1997; Gers et al. 2000). Outputs are known, so that the
pre-activations of all steps are two products with matrices, and only the cells are a recursion.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


class LSTMSteps:
    """All steps of a layer in one direction, and their slopes."""

    def __init__(self, gates: Tensor, before: Tensor, squashed: Tensor, weight_hh: Tensor, reverse: bool = False) -> None:
        """Compute the slopes.

        Args:
            gates: ``i, f, g, o`` of all steps ``[T, R, 4, H]``.
            before: Cell before each step ``[T, R, H]``.
            squashed: ``tanh(c_t)``, likewise.
            weight_hh: ``[4 H, H]``.
            reverse: Whether the last step comes first.
        """
        self._weight, self._order, slopes = weight_hh, range(len(gates))[:: -1 if reverse else 1], torch.empty_like(gates)
        i, f, g, o = gates.unbind(2)
        # autograd's kernels, one pass each: the slope of the sigmoid is f - f^2, of tanh 1 - g^2
        by_sigmoid, by_tanh = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
        for number, (factor, gate) in enumerate(((g, i), (before, f), (None, g), (squashed, o))):
            if factor is None:
                by_tanh.grad_input(i, gate, grad_input=slopes[:, :, number])
            else:
                by_sigmoid.grad_input(factor, gate, grad_input=slopes[:, :, number])
        self._keeps, self._to_cell = f.unbind(), by_tanh(o, squashed).unbind()
        self._slopes = slopes.split((3, 1), 2)

    @classmethod
    def run(cls, gates: Tensor, first_cell: Tensor, weight_hh: Tensor, reverse: bool) -> LSTMSteps:
        """Run the recursion of the cells.

        Args:
            gates: Pre-activations ``[T, R, 4 H]``, which are overwritten.
            first_cell: Cell before the first step ``[R, H]``.
            weight_hh: ``[4 H, H]``.
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
        return cls(gates, previous(cells, first_cell, reverse), cells.tanh(), weight_hh, reverse)

    def pull_back(self, outputs: Tensor, hidden: Tensor, cell: Tensor, complete: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Carry columns from the outputs to the pre-activations and to the states before the first step.

        Args:
            outputs: Columns at the outputs of all steps ``[V, T, R, H]``.
            hidden: At the state after the last step ``[V, R, H]``.
            cell: At the cell after the last step ``[V, R, H]``.
            complete: Whether ``hidden`` includes what is in ``outputs``.

        Returns:
            Columns at the pre-activations ``[V, T, R, 4 H]``, at the first state and at the first cell ``[V, R, H]``.
        """
        (V, T, R, H), steps = outputs.shape, outputs.unbind(1)
        columns = outputs.new_empty(T, V, R, 4, H)  # each step in one piece, as its product with the weight needs it
        flat, (of_cell, of_hidden) = columns.view(T, V * R, 4 * H).unbind(), columns.split((3, 1), 3)
        for t in reversed(self._order):
            hidden = hidden if complete else hidden + steps[t]
            complete = False  # before the last step
            cell = torch.addcmul(cell, hidden, self._to_cell[t])
            torch.mul(cell.unsqueeze(2), self._slopes[0][t], out=of_cell[t])
            torch.mul(hidden.unsqueeze(2), self._slopes[1][t], out=of_hidden[t])
            hidden = (flat[t] @ self._weight).view(V, R, H)
            cell = cell * self._keeps[t]
        return columns.flatten(3).movedim(0, 1), hidden, cell
