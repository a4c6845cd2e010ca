"""BatchL2Grad: the squared norm of each sample's gradient."""

from __future__ import annotations

import torch
from torch import Size, Tensor
from torch.nn import Parameter

from backpack.core.derivatives.affine import LARGE, AffineDerivatives
from backpack.core.derivatives.affine_squares import by_gram_matrices, norms_at_output, squared_norms
from backpack.core.derivatives.embedding import LookupDerivatives
from backpack.core.derivatives.tied import TiedDerivatives, cancels
from backpack.core.flow import Columns, Use
from backpack.core.networks import Network
from backpack.core.terms import Term
from backpack.extensions.backprop_extension import SubsamplingExtension
from backpack.extensions.combining import PerSample
from backpack.extensions.firstorder.base import GradientExtension
from backpack.extensions.made import sum_of
from backpack.extensions.rules import faster, find_faster, finish_at_once
from backpack.utils.columns import blocks
from backpack.utils.precision import wide


class BatchL2Grad(SubsamplingExtension, GradientExtension):
    """Squared L2 norms of the per-sample gradients ``[N]``, saved to ``batch_l2``, one vector for each parameter tensor.

    A mean loss has its divisor in the gradients, hence its square in the norms. For a parameter used several times it is the norm of the summed
    uses.
    """

    savefield = "batch_l2"
    combination = PerSample(degree=2)

    def forms_gradients(self, rows: Size, entries: int) -> bool:
        return super().forms_gradients(rows, entries) and not by_gram_matrices(rows, entries, formed=True)

    def of_terms(self, terms: list[Term | Network]) -> Tensor:
        use, name, _, scale = terms[0].read()
        function = find_faster(self, use.call.derivatives, name)
        if function is None:
            return NotImplemented
        if scale is None and len(terms) == 1:
            return function(self, use, name)
        products = sum_of(terms)
        if products is not None:
            return products.norms()
        return _by_blocks(terms[0], use.layout.samples) if len(terms) == 1 else NotImplemented

    def finish(self, state: Columns, parameter: Parameter) -> Tensor:
        gradients = wide(state[0][0])
        return torch.linalg.vector_norm(gradients.reshape(gradients.shape[0], parameter.numel()), dim=1).square()


def _by_blocks(term: Term | Network, samples: int) -> Tensor:
    parts = blocks(samples, term.shape.numel(), LARGE)
    return torch.cat([torch.linalg.vector_norm(wide(term.formed(part)[0][0]).flatten(1), dim=1).square() for part in parts])


@faster(BatchL2Grad, AffineDerivatives, "bias")
def _bias(extension: BatchL2Grad, use: Use, name: str) -> Tensor:
    if use.call.derivatives.vectors(use.call) is None:
        return finish_at_once(extension, use, name)
    return norms_at_output(use.value[0], use.notes).square()


@faster(BatchL2Grad, AffineDerivatives, "weight")
def _weight(extension: BatchL2Grad, use: Use, name: str) -> Tensor:
    return squared_norms(use.call.derivatives, use.call, use.value[0], use.sums, notes=use.notes)


@faster(BatchL2Grad, LookupDerivatives, "weight")
def _lookup(extension: BatchL2Grad, use: Use, name: str) -> Tensor:
    sums, samples, _ = use.call.derivatives.sums_per_sample(use.call, use.value[0])
    return sums.new_zeros(use.layout.samples).index_add_(0, samples, torch.linalg.vector_norm(sums[0], dim=1).square())


@faster(BatchL2Grad, TiedDerivatives, "weight")
def _tied(extension: BatchL2Grad, use: Use, name: str) -> Tensor:
    call, mat = use.call, use.value[0]
    squares, samples, _ = call.derivatives.squares_of_lookups(call, mat, None)
    norms = squared_norms(call.layer.derivatives, call.layer, mat, notes=use.notes)
    total = norms.index_add(0, samples, squares.sum(1))
    return NotImplemented if cancels(total, norms) else total
