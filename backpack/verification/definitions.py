"""What each extension's value should be: what it is and what plain autograd says, for the chosen samples and entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack.extensions import curvmatprod, firstorder, secondorder
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.curvature import Curvature
from backpack.extensions.secondorder.diag_ggn import BatchDiagGGN, DiagGGN
from backpack.extensions.secondorder.hbp_options import BackpropStrategy, ExpectationApproximation, LossHessianStrategy
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGN
from backpack.utils.differentiation import nodes_below, refuse_wrong_second_derivatives
from backpack.utils.errors import BackpackError, UnsupportedError
from backpack.verification.draws import draw
from backpack.verification.layers import Layer, Layers
from backpack.verification.reference import Incomparable, Reference


class Numbers(NamedTuple):
    """Numbers to be compared.

    Attributes:
        actual: What they are.
        right: What they should be.
        terms: What they are differences of, if they are: rounding errors are relative to these.
    """

    actual: Tensor
    right: Tensor
    terms: Tensor | None = None

    @property
    def largest(self) -> float:
        """The largest number to which errors are relative."""
        return max((tensor.abs().max().item() for tensor in (self.right, self.terms) if tensor is not None and tensor.numel()), default=0.0)


Compared = Iterator[Numbers]


class Malformed(Exception):  # noqa: N818  it is a verdict
    """A value has not the type or the shape of its definition."""


class Raised(Exception):  # noqa: N818  it is a verdict
    """A value that is a function raises an error that is no refusal."""


@dataclass
class Comparison:
    """One extension's results, about to be compared.

    Attributes:
        extension: The extension.
        reference: Knows what is right.
        layers: What the layers of the reference were given; ``None`` if no factors are asked for.
        lossfunc: The loss function.
        rewind: Sets the random generator to where it stood when the loss was evaluated.
        positions: Which samples are compared, as positions along the axis of samples.
        entries: How many entries of a factor are compared.
    """

    extension: BackpropExtension
    reference: Reference
    layers: Layers | None
    lossfunc: Callable[..., Tensor]
    rewind: Callable[[], None]
    positions: list[int]
    entries: int

    @property
    def samples(self) -> list[int]:
        """The samples of the mini-batch that the extension is about."""
        total = len(self.reference.output)
        chosen = self.extension.samples(total)
        return list(range(total) if chosen is None else chosen)

    @property
    def chosen(self) -> list[int]:
        """Those of them that are compared."""
        samples = self.samples
        return [samples[position] for position in self.positions]

    def roots(self) -> tuple[Tensor, list[int]] | None:
        """Return the sampled square root of the loss's Hessian, and its samples; ``None`` where the Hessian is exact."""
        extension = self.extension
        if extension.get_loss_hessian_strategy() != LossHessianStrategy.SAMPLING:
            return None
        self.rewind()
        mc_samples = extension.get_num_mc_samples()
        return draw(self.lossfunc, self.reference.output, self.reference.curvature, mc_samples, self.samples), self.samples


def _tensor_of(value: Any, shape: Sequence[int]) -> Tensor:
    """Check that a value is a tensor of a shape.

    Args:
        value: The value.
        shape: The shape.

    Returns:
        The value.

    Raises:
        Malformed: If it is not.
    """
    if not isinstance(value, Tensor):
        raise Malformed(f"a {type(value).__name__} instead of a tensor of shape {list(shape)}")
    if value.shape != torch.Size(shape):
        raise Malformed(f"shape {list(value.shape)} instead of {list(shape)}")
    return value.detach()


def _entries_of(at: Comparison, name: str, value: Any, *leading: int) -> Tensor:
    """Select the compared entries.

    Args:
        at: The comparison.
        name: Name of the parameter.
        value: ``[*leading, *parameter]``.
        *leading: Leading axes.

    Returns:
        ``[*leading, E]``.
    """
    shape = at.reference.parameters[name].shape
    value = _tensor_of(value, (*leading, *shape))
    return value.reshape(*leading, shape.numel())[..., at.reference.entries[name]]


# --- first order --------------------------------------------------------------------------------------------------------------------------
def _batch_grad(at: Comparison, name: str, value: Any) -> Compared:
    actual = _entries_of(at, name, value, len(at.samples))
    yield Numbers(actual[at.positions], at.reference.sample_gradients(name, at.chosen)[0])


def _batch_l2(at: Comparison, name: str, value: Any) -> Compared:
    actual = _tensor_of(value, (len(at.samples),))
    yield Numbers(actual[at.positions], at.reference.sample_gradients(name, at.chosen)[1])


def _sum_grad_squared(at: Comparison, name: str, value: Any) -> Compared:
    yield Numbers(_entries_of(at, name, value), at.reference.sample_gradients(name, at.samples)[0].square().sum(0))


def _variance(at: Comparison, name: str, value: Any) -> Compared:
    gradients = at.reference.sample_gradients(name, at.samples)[0]
    yield Numbers(_entries_of(at, name, value), (gradients - gradients.mean(0)).square().mean(0), gradients.square().mean(0))


# --- second order -------------------------------------------------------------------------------------------------------------------------
def _ggn_blocks(at: Comparison, name: str) -> Tensor:
    roots, reference = at.roots(), at.reference
    blocks = reference.block(reference.parameters[name], reference.entries[name], roots)
    return blocks[at.samples] if roots is None else blocks


def _diag_ggn(at: Comparison, name: str, value: Any) -> Compared:
    yield Numbers(_entries_of(at, name, value), _ggn_blocks(at, name).sum(0).diagonal())


def _batch_diag_ggn(at: Comparison, name: str, value: Any) -> Compared:
    actual = _entries_of(at, name, value, len(at.samples))
    yield Numbers(actual[at.positions], _ggn_blocks(at, name).diagonal(dim1=1, dim2=2)[at.positions])


def _sqrt_ggn(at: Comparison, name: str, value: Any) -> Compared:
    # columns themselves are unique up to a rotation only: compare their products, entries of blocks
    columns = len(value) if isinstance(value, Tensor) and value.dim() else 0
    root = _entries_of(at, name, value, columns, len(at.samples))[:, at.positions]
    yield Numbers(torch.einsum("vni,vnj->nij", root, root), _ggn_blocks(at, name)[at.positions])


def _twice(reference: Reference) -> Reference:
    # itself, if torch differentiates gradients of its output as it should
    try:
        refuse_wrong_second_derivatives(nodes_below([reference.output]))
    except UnsupportedError as error:
        raise Incomparable(str(error)) from error
    return reference


def _diag_hessian(at: Comparison, name: str, value: Any) -> Compared:
    samples = None if at.extension.get_subsampling() is None else at.samples
    yield Numbers(_entries_of(at, name, value), _twice(at.reference).hessian_diagonal(name, samples).sum(0))


def _batch_diag_hessian(at: Comparison, name: str, value: Any) -> Compared:
    actual = _entries_of(at, name, value, len(at.samples))[at.positions]
    yield Numbers(actual, _twice(at.reference).hessian_diagonal(name, at.chosen))


def _product(at: Comparison, name: str, value: Any, expected: Callable[[Reference], Callable[[str, Tensor], Tensor]]) -> Compared:
    parameter = at.reference.parameters[name]
    if not callable(value):
        raise Malformed(f"a {type(value).__name__} instead of a function")
    vector = torch.randn_like(parameter)
    try:
        actual = value(vector)
    except BackpackError:
        raise
    except Exception as error:
        raise Raised(f"{type(error).__name__}: {error}") from error
    yield Numbers(_entries_of(at, name, actual), expected(at.reference)(name, vector))


def _no_definition(at: Comparison, name: str, value: Any) -> Compared:
    raise Incomparable("the positive-curvature Hessian depends on how the model is divided into modules, which plain autograd does not know")


# --- Kronecker factors --------------------------------------------------------------------------------------------------------------------
def _kronecker(at: Comparison, name: str, value: Any) -> Compared:
    extension, reference, parameter = at.extension, at.reference, at.reference.parameters[name]
    roots = None
    if ExpectationApproximation.should_average_param_jac(extension.get_ea_strategy()):
        raise Incomparable("the product of means over samples has no reference here; verify the mean of products, as KFAC, KFLR and KFRA have it")
    if BackpropStrategy.is_batch_average(extension.get_backprop_strategy()):
        if extension.get_curv_type() != Curvature.GGN or len(reference.output) > 1:
            raise Incomparable("the recursion with averages over the mini-batch is compared where it is KFLR alone: a single sample, Curvature.GGN")
    else:
        roots = at.roots()
    if not isinstance(value, list):
        raise Malformed(f"a {type(value).__name__} instead of a list of matrices")
    layer = at.layers.of(parameter, reference.output)
    if layer is not None:
        yield from _factors(at, layer, name, value, roots)
    elif sum(size > 1 for size in parameter.shape) < 2 and len(value) == 1:
        actual = _tensor_of(value[0], 2 * (parameter.numel(),))
        chosen = reference.entries[name]
        yield Numbers(actual[chosen][:, chosen], reference.block(parameter, chosen, roots).sum(0))
    else:
        raise Incomparable("factors of weights are compared for linear layers, convolutions, embeddings and bags of them, used as such only")


def _factors(at: Comparison, layer: Layer, name: str, value: list, roots: tuple[Tensor, Sequence[int]] | None) -> Compared:
    """Compare the factors of each group.

    Args:
        at: The comparison.
        layer: The layer.
        name: Name of its weight.
        value: Its factors.
        roots: Sampled square root of the loss's Hessian.

    Yields:
        For each group the output factor and, if it is known who sees what the layer has returned, the input factor.

    Raises:
        Malformed: If their number is wrong.
    """
    reference, side = at.reference, isqrt(at.entries - 1) + 1
    outputs = len(layer.probe) // layer.groups
    pairs, counts = [value] if layer.groups == 1 else value, layer.copies(reference.output)
    if len(pairs) != layer.groups or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise Malformed(f"not a list of two factors{'' if layer.groups == 1 else f' for each of {layer.groups} groups'}")
    for group, pair in enumerate(pairs):
        given, output = pair if layer.input_first else pair[::-1]
        offset = group * outputs
        rows = reference.pick(reference.scores(layer.probe)[offset : offset + outputs], side)
        expected = reference.block(layer.probe, [offset + row for row in rows], roots).sum(0)
        yield Numbers(_tensor_of(output, (outputs, outputs))[rows][:, rows], expected)
        if counts is None:
            continue
        scores = layer.input_scores(reference.gradient[name], group)
        chosen = reference.pick(scores, side)
        inputs = layer.inputs(chosen, group, counts)
        if layer.diagonal:
            yield Numbers(_tensor_of(given, (len(scores),))[chosen], inputs.square().sum(1) / len(reference.output))
        else:
            yield Numbers(_tensor_of(given, 2 * (len(scores),))[chosen][:, chosen], inputs @ inputs.T / len(reference.output))


DEFINITIONS: dict[type[BackpropExtension], Callable[[Comparison, str, Any], Compared]] = {
    firstorder.BatchGrad: _batch_grad,
    firstorder.BatchL2Grad: _batch_l2,
    firstorder.SumGradSquared: _sum_grad_squared,
    firstorder.Variance: _variance,
    **dict.fromkeys((DiagGGN, secondorder.DiagGGNExact, secondorder.DiagGGNMC), _diag_ggn),
    **dict.fromkeys((BatchDiagGGN, secondorder.BatchDiagGGNExact, secondorder.BatchDiagGGNMC), _batch_diag_ggn),
    **dict.fromkeys((SqrtGGN, secondorder.SqrtGGNExact, secondorder.SqrtGGNMC), _sqrt_ggn),
    secondorder.DiagHessian: _diag_hessian,
    secondorder.BatchDiagHessian: _batch_diag_hessian,
    **dict.fromkeys((secondorder.HBP, secondorder.KFAC, secondorder.KFLR, secondorder.KFRA), _kronecker),
    curvmatprod.HMP: partial(_product, expected=lambda reference: _twice(reference).hessian_product),
    curvmatprod.GGNMP: partial(_product, expected=lambda reference: reference.ggn_product),
    curvmatprod.PCHMP: _no_definition,
}
"""For these classes themselves; a class derived from one of them may mean something else."""
