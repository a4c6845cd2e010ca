"""Derivatives of tables in which rows are looked up by integers: ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``.

There is no input to differentiate with respect to. No rule forms one-hot vectors: columns are added at the rows that were looked up.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module

from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.registry import register
from backpack.utils.moment import second_moment
from backpack.utils.pages import LARGE, empty
from backpack.utils.precision import wide
from backpack.utils.subsampling import subsample

_PAIR = 2000
"""Multiplications of a matrix product that take as long as adding what two lookups of a bag have in common, measured on one thread of a CPU."""


def add_at(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Add rows that have the same place.

    Args:
        rows: ``[V, E, D]``.
        places: Numbers ``[E]`` below ``count``.
        count: Number of places.

    Returns:
        ``[V, count, D]``.
    """
    (columns, _, features), dtype, rows = rows.shape, rows.dtype, wide(rows)  # in half precision, sums of many would stop growing
    if columns > 1:
        places = torch.arange(columns, device=places.device)[:, None] * count + places
    rows, places, total = rows.flatten(0, 1), places.flatten(), columns * count
    few = total * features * rows.element_size() >= LARGE and rows.device.type == "cpu" and not torch.is_grad_enabled()
    found, places = torch.unique(places, return_inverse=True) if few else (None, places)
    # what autograd uses: one pass over the rows, in parallel, where index_add_ takes one step a row
    added = torch.ops.aten.embedding_dense_backward(rows, places, total if found is None else len(found), -1, False)
    return (added if found is None else place_at(added, found, total)).reshape(columns, count, features).to(dtype)


def place_at(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Place rows among rows of zeros.

    Args:
        rows: ``[U, D]``.
        places: Different numbers ``[U]`` below ``count``.
        count: Number of places.

    Returns:
        ``[count, D]``.
    """
    return empty((count, rows.shape[1]), rows).zero_().index_copy_(0, places, rows)


def _is_same_for_all(indices: Tensor) -> bool:
    # whether one sample was expanded to all, as where a table is read once
    return len(indices) > 1 and indices.stride(0) == 0 and indices.numel() > 0


def _add_for_each(rows: Tensor, places: Tensor, count: int) -> Tensor:
    # add rows ``[V, N, E, D]`` that have the same place ``[E]``: ``[V, N, count, D]``. Samples are features, of which ``add_at`` takes all at once
    columns, samples, _, features = rows.shape
    added = add_at(rows.permute(2, 0, 1, 3).flatten(1).unsqueeze(0), places, count)
    return added.reshape(count, columns, samples, features).permute(1, 2, 0, 3)


class Lookups(NamedTuple):
    """Entry ``e`` adds row ``indices[e]`` of the weight, times ``factors[e]`` (``None``: one), to the output of sample ``samples[e]``."""

    samples: Tensor
    indices: Tensor
    factors: Tensor | None

    def weighted(self, rows: Tensor) -> Tensor:
        """Multiply by the factors.

        Args:
            rows: ``[V, E, D]``.

        Returns:
            ``[V, E, D]``.
        """
        if self.factors is None:
            return rows
        factors = self.factors[:, None]
        return rows.masked_fill(~factors, 0) if factors.dtype == torch.bool else rows * factors.to(rows.dtype)


class LookupDerivatives(BaseParameterDerivatives):
    """The output is made of rows of the weight ``[K, D]``."""

    keeps = frozenset({"input"})

    @abstractmethod
    def lookups(self, module: Module, subsampling: Samples = None) -> Lookups:
        """List what was looked up.

        Args:
            module: The layer with its recorded input.
            subsampling: Samples to select, which are numbered anew; ``None`` for all.

        Returns:
            ``E`` entries.
        """

    @abstractmethod
    def rows(self, module: Module, mat: Tensor, lookups: Lookups) -> Tensor:
        """View of a matrix of outputs.

        Args:
            module: The layer.
            mat: ``[V, *output]``, with any number of samples.
            lookups: What its samples looked up.

        Returns:
            For each entry the row to which it was added ``[V, E, D]``.
        """

    @abstractmethod
    def output_from_rows(self, module: Module, rows: Tensor, lookups: Lookups) -> Tensor:
        """Add what was looked up, the transposed of ``rows``.

        Args:
            module: The layer with its recorded output.
            rows: ``[V, E, D]``.
            lookups: What was looked up.

        Returns:
            ``[V, *output]``.
        """

    @abstractmethod
    def input_moment(self, module: Module, scale: float = 1.0) -> Tensor:
        """Sum the outer products of the vectors that the weight is multiplied with: one-hot vectors, or weighted sums of them.

        Args:
            module: The layer with its recorded input.
            scale: Factor.

        Returns:
            ``[1, K, K]``, or its diagonal ``[1, K]`` if all else is zero.
        """

    @abstractmethod
    def sums_over_positions(self, module: Module, mat: Tensor) -> Tensor:
        """Add the columns of all positions of a sample that use the weight.

        Args:
            module: The layer with its recorded input.
            mat: ``[V, *output]``.

        Returns:
            ``[V, N, D]``.
        """

    def sums_per_sample(self, module: Module, mat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transposed Jacobian of each sample with respect to those rows of the weight that the sample looked up.

        Args:
            module: The layer with its recorded input.
            mat: ``[V, *output]``.

        Returns:
            ``[V, U, D]``, and for each of the ``U`` pairs the sample ``[U]`` and the row of the weight ``[U]``.
        """
        lookups, size = self.lookups(module), module.weight.shape[0]
        pairs, places = torch.unique(lookups.samples * size + lookups.indices, return_inverse=True)
        rows = wide(lookups.weighted(self.rows(module, mat, lookups)))
        return add_at(rows, places, len(pairs)), pairs // size, pairs % size

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        lookups, size, samples = self.lookups(module, subsampling), module.weight.shape[0], mat.shape[1]
        rows = lookups.weighted(self.rows(module, mat, lookups))
        if sum_batch:
            return add_at(rows, lookups.indices, size)
        return add_at(rows, lookups.samples * size + lookups.indices, samples * size).reshape(mat.shape[0], samples, *module.weight.shape)

    def _weight_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        lookups = self.lookups(module)
        return self.output_from_rows(module, lookups.weighted(mat[:, lookups.indices]), lookups)


@register(Embedding)
class EmbeddingDerivatives(LookupDerivatives):
    """Each index is replaced by a row of the weight. Rows at ``padding_idx`` are constant.

    ``scale_grad_by_freq`` is left to the graph: what autograd calls gradient is none of the loss then.
    """

    any_batch_axis = True

    def applies(self, module: Embedding) -> bool:
        return not module.scale_grad_by_freq

    def lookups(self, module: Embedding, subsampling: Samples = None) -> Lookups:
        indices = subsample(module.input0, subsampling=subsampling).long()
        samples = torch.arange(len(indices), device=indices.device).repeat_interleave(prod(indices.shape[1:]))
        indices = indices.reshape(-1)
        return Lookups(samples, indices, None if module.padding_idx is None else indices != module.padding_idx % len(module.weight))

    def _weight_jac_t_mat_prod(
        self, module: Embedding, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        if subsampling is not None or not _is_same_for_all(module.input0):
            return super()._weight_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch, subsampling)
        (one, rows), size = self._rows_of_all(module, mat), len(module.weight)
        return add_at(rows.sum(1), one.indices, size) if sum_batch else _add_for_each(rows, one.indices, size).contiguous()

    def sums_per_sample(self, module: Embedding, mat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not _is_same_for_all(module.input0):
            return super().sums_per_sample(module, mat)
        one, rows = self._rows_of_all(module, mat)
        found, places = torch.unique(one.indices, return_inverse=True)
        samples = torch.arange(mat.shape[1], device=mat.device)
        return _add_for_each(wide(rows), places, len(found)).flatten(1, 2), samples.repeat_interleave(len(found)), found.repeat(len(samples))

    def _rows_of_all(self, module: Embedding, mat: Tensor) -> tuple[Lookups, Tensor]:
        # what one sample looks up, as all do, and the rows to which it was added, weighted ``[V, N, E, D]``
        one = self.lookups(module, [0])
        rows = mat.reshape(*mat.shape[:2], -1, mat.shape[-1])
        return one, one.weighted(rows)

    def rows(self, module: Embedding, mat: Tensor, lookups: Lookups) -> Tensor:
        return mat.reshape(mat.shape[0], len(lookups.indices), mat.shape[-1])

    def output_from_rows(self, module: Embedding, rows: Tensor, lookups: Lookups) -> Tensor:
        return rows.reshape(rows.shape[0], *module.output.shape)

    def input_moment(self, module: Embedding, scale: float = 1.0) -> Tensor:
        lookups, size = self.lookups(module), module.weight.shape[0]
        used = lookups.indices if lookups.factors is None else lookups.indices[lookups.factors]
        counts = torch.bincount(used, minlength=size).to(torch.promote_types(module.weight.dtype, torch.float32))
        return counts.div_(1 / scale).unsqueeze(0)  # rounds once, as whole numbers are divided

    def sums_over_positions(self, module: Embedding, mat: Tensor) -> Tensor:
        lookups = self.lookups(module)
        rows = lookups.weighted(self.rows(module, mat, lookups))
        return rows.reshape(*mat.shape[:2], prod(mat.shape[2:-1]), mat.shape[-1]).sum(2)


@register(EmbeddingBag)
class EmbeddingBagDerivatives(LookupDerivatives):
    """Sums or means of rows over bags, which are the samples: rows of a matrix of indices, or pieces of a list of them.

    The maximum, and weights that depend on parameters, are left to the graph.
    """

    def applies(self, module: EmbeddingBag) -> bool:
        if module.mode == "max" or module.scale_grad_by_freq or module.input0.is_nested:
            return False
        # torch itself is not sure what belongs to the last bag if it does not end with the list
        return not module.include_last_offset or module.input0.dim() == 2 or int(self._given(module)[0][-1]) == len(module.input0)

    @staticmethod
    def _given(module: EmbeddingBag) -> tuple[Tensor | None, Tensor | None]:
        """Tell optional inputs apart by their type, since a keyword argument may have the position of the other.

        Returns:
            Offsets and weights of the entries.
        """
        more = [x for x in (getattr(module, name, None) for name in ("input1", "input2")) if x is not None]
        return next((x for x in more if not x.is_floating_point()), None), next((x for x in more if x.is_floating_point()), None)

    def lookups(self, module: EmbeddingBag, subsampling: Samples = None) -> Lookups:
        (offsets, weights), bags = self._given(module), module.output.shape[0]
        indices, factors = module.input0.reshape(-1).long(), None if weights is None else weights.reshape(-1)
        entries = torch.arange(len(indices), device=indices.device)
        if offsets is None:
            samples = entries // max(module.input0.shape[1], 1)
        else:  # the last of the bags that begin here or before: others that begin here are empty
            samples = torch.searchsorted(offsets[:bags].long(), entries, right=True) - 1
        if module.padding_idx is not None:
            used = indices != module.padding_idx % len(module.weight)
            samples, indices, factors = samples[used], indices[used], None if factors is None else factors[used]
        if module.mode == "mean":
            factors = torch.bincount(samples, minlength=bags)[samples].double().reciprocal().to(module.weight.dtype)
        if subsampling is None:
            return Lookups(samples, indices, factors)
        chosen = torch.as_tensor(subsampling, dtype=torch.long, device=samples.device)
        samples, entries = (chosen[:, None] % max(bags, 1) == samples).nonzero(as_tuple=True)
        return Lookups(samples, indices[entries], None if factors is None else factors[entries])

    def rows(self, module: EmbeddingBag, mat: Tensor, lookups: Lookups) -> Tensor:
        return mat[:, lookups.samples]

    def output_from_rows(self, module: EmbeddingBag, rows: Tensor, lookups: Lookups) -> Tensor:
        return add_at(rows, lookups.samples, module.output.shape[0])

    def input_moment(self, module: EmbeddingBag, scale: float = 1.0) -> Tensor:
        lookups, size = self.lookups(module), module.weight.shape[0]
        factors = torch.ones_like(lookups.indices) if lookups.factors is None else lookups.factors
        factors = factors.to(torch.promote_types(module.weight.dtype, torch.float32))
        places, bags = lookups.samples * size + lookups.indices, module.output.shape[0]
        beside = torch.bincount(lookups.samples, minlength=bags)[lookups.samples]  # lookups of the same bag, which follow one another
        if int(beside.sum()) * _PAIR <= bags * size**2:
            one = torch.arange(len(beside), device=beside.device).repeat_interleave(beside)
            first = torch.searchsorted(lookups.samples, lookups.samples) - beside.cumsum(0) + beside
            two = torch.arange(len(one), device=one.device) + first[one]
            pairs = lookups.indices[one] * size + lookups.indices[two]
            return factors.new_zeros(size * size).index_add_(0, pairs, factors[one] * factors[two] * scale).view(1, size, size)
        sums = factors.new_zeros(bags * size).index_add_(0, places, factors).unflatten(0, (bags, size))
        return second_moment(sums.unsqueeze(0), scale)

    def sums_over_positions(self, module: EmbeddingBag, mat: Tensor) -> Tensor:
        return mat
