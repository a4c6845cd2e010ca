"""Derivatives of recurrent layers, for those who ask for them; a backward pass reads the layers' products with matrices off the graph."""

from __future__ import annotations

from typing import ClassVar

from backpack.core.derivatives.generic import GenericDerivatives


class RNNDerivatives(GenericDerivatives):
    """Products of ``torch.nn.RNN`` with samples on axis 0, for any number of layers and directions, and given states."""

    params: ClassVar[tuple[str, ...]] = ("bias_hh_l0", "bias_ih_l0", "weight_hh_l0", "weight_ih_l0")


class LSTMDerivatives(RNNDerivatives):
    """Products of ``torch.nn.LSTM``, likewise; the first output counts."""
