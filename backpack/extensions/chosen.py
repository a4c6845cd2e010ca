"""Uses by chosen samples: what an extension with ``subsampling`` reads off a layer as if the mini-batch had no others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack.core.calls import ModuleCall
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.flow import BatchFirst, Columns, Use
from backpack.core.samples import plain_layout
from backpack.extensions.flows import Source


class _Some(NamedTuple):
    """Takes the place of an arrangement.

    Attributes:
        index: Numbers of the samples.
    """

    index: Tensor

    def front(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Choose samples.

        Args:
            tensor: ``[*lead axes, N, *]``.
            lead: Number of leading axes.

        Returns:
            ``[*lead axes, n, *]``.
        """
        return tensor.index_select(lead, self.index.to(tensor.device))


class _OfSome(BatchFirst):
    """A call of which the chosen samples are read; nothing that was computed of all is."""

    scratch = None


def is_chosen_from(call: Any, name: str) -> bool:
    """Say whether samples are chosen before anything is formed of them.

    Args:
        call: A call.
        name: Name of a parameter.

    Returns:
        Whether it is the weight of an affine layer with a rule of the library: those of users may read what has no samples, or has them elsewhere.
    """
    call = call._call if type(call) is BatchFirst else call
    affine = isinstance(call, ModuleCall) and isinstance(call.derivatives, AffineDerivatives)
    return name == "weight" and affine and type(call.derivatives).__module__.startswith("backpack.")


def of_chosen(use: Use, name: str, samples: tuple[int, ...]) -> Use | None:
    """Choose samples of a use of the weight of an affine layer.

    Args:
        use: The use, a sample a row.
        name: Name of the parameter.
        samples: Numbers of the samples.

    Returns:
        The use by these; ``None`` if it is none of a layer's weight.
    """
    if not samples or not is_chosen_from(use.call, name):
        return None
    key = ("chosen", samples)
    if key not in use.notes:
        index = torch.tensor(samples, device=use.grad.device)
        value: Columns = {}
        for source, columns in use.value.items():
            signed = isinstance(source, Source) and source.signs is not None
            value[source._replace(signs=source.signs[:, index]) if signed else source] = columns.index_select(1, index)
        call = _OfSome(use.call, _Some(index))
        use.notes[key] = Use(call, use.parameters, value, use.grad.index_select(0, index), plain_layout(len(samples)))
    return use.notes[key]
