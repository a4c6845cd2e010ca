"""Second derivatives of groups that are divided by their deviation, as columns with signs."""

from __future__ import annotations

import torch
from torch import Size, Tensor

from backpack.utils.columns import norms


class ResidualRoot:
    """Columns of ``-s^2 (a C + (x_hat k^T + k x_hat^T) / M)`` with ``k = h - 3/2 a x_hat``, formed where they are needed, ``[R, M + 2, M]``.

    ``C`` is its own square root, and the two last columns are the sum and the difference of vectors of the same length.
    """

    def __init__(self, x_hat: Tensor, scale: Tensor, h: Tensor, a: Tensor, centred: bool) -> None:
        """Factorize.

        Args:
            x_hat: Normalised groups ``[R, M]``.
            scale: Inverse deviations ``[R, 1]``.
            h: ``[R, M]``.
            a: ``[R, 1]``.
            centred: Whether ``C`` subtracts the mean.
        """
        (rows, size), k = x_hat.shape, h - 1.5 * a * x_hat
        stretch = (norms(k) / norms(x_hat)).sqrt().unsqueeze(1)
        usable = (stretch > 0) & stretch.isfinite()
        one, other = x_hat * stretch.where(usable, 0), k / stretch.where(usable, torch.inf)
        self.shape = Size([rows, size + 2, size])
        self._last = torch.stack([one + other, one - other], 1) * (scale / (2 * size) ** 0.5).unsqueeze(2)
        self._scale, self._mean = scale * a.abs().sqrt(), 1 / max(1, size) if centred else 0

    def __getitem__(self, at: tuple[Tensor, Tensor]) -> Tensor:
        group, number = at
        columns, last = self._scale.new_full((len(group), self.shape[2]), -self._mean), number >= self.shape[2]
        columns[~last, number[~last]] += 1
        columns *= self._scale[group]
        columns[last] = self._last[group[last], number[last] - self.shape[2]]
        return columns
