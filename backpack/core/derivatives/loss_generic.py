"""Derivatives of any loss whose value is a sum (or mean) of one term per sample: the per-sample Hessian by automatic differentiation.

The loss is evaluated again on its recorded inputs and differentiated twice, so that its own reduction, weights and options enter as they
are. ``D`` Hessian-vector products with the unit vectors of a sample's ``D`` input entries, applied to all samples at once, give all blocks
of the Hessian; one more product with a fixed pseudo-random vector proves that nothing lies outside the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod, sqrt
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.autograd import grad
from torch.autograd.function import BackwardCFunction
from torch.nn import CosineEmbeddingLoss, CTCLoss, Module, TripletMarginLoss, TripletMarginWithDistanceLoss
from torch.nn.modules.loss import _Loss

from backpack.core.derivatives.basederivatives import BaseLossDerivatives, Grads, Samples
from backpack.core.derivatives.records import call_arguments, inputs_of, module_of
from backpack.core.derivatives.registry import register
from backpack.utils.differentiation import lacks_terms, nodes_below, undifferentiable
from backpack.utils.eigen import eigh, eigh_in_units, square_root
from backpack.utils.errors import LossValueError, MixedSamplesError, UnsupportedError
from backpack.utils.module_state import kept_state
from backpack.utils.nested import tensors_in
from backpack.utils.precision import largest, tolerance, tolerances, wide
from backpack.utils.random_state import random_state_kept
from backpack.utils.subsampling import subsample


def random_signs(mc_samples: int, like: Tensor) -> Tensor:
    """Draw one sign for every entry of every sample and draw; nothing else is drawn.

    Args:
        mc_samples: Number of draws ``M``.
        like: A tensor ``[N, *]`` that gives shape, data type and device.

    Returns:
        Entries 1 and -1, ``[M, N, *]``.
    """
    return like.new_empty(mc_samples, *like.shape).bernoulli_().mul_(2).sub_(1)


class GenericLossDerivatives(BaseLossDerivatives):
    """Hessian factors of an arbitrary twice differentiable loss, called as ``loss(input, target, ...)``.

    The exact factor is the symmetric root of each sample's Hessian ``H``, in units ``u`` in which the diagonal is one: ``diag(u) (H / u u^T)^(1/2)``.
    The sampled one is its product with random signs, whose second moment is ``H``: no distribution of labels is known. All comparisons (samples do
    not mix, the Hessian is positive semidefinite, a second evaluation gives the same value) allow the square root of the machine epsilon, relative to
    the sample's numbers, and, for a mini-batch of which the model is certain, rounding errors of the size that the Hessian has elsewhere; smaller
    negative eigenvalues are set to zero.

    A loss class of one's own needs nothing if it derives from one of torch's loss classes, or if it is extended on its own, without
    parameters, and returns one number from a prediction and a target. Any other takes part with ``register(MyLoss, GenericLossDerivatives)``.
    """

    any_forward: ClassVar[bool] = True

    def hessian_is_psd(self) -> bool:
        return False  # nothing is known before it has been computed

    def hessian_is_psd_at(self, module: Module) -> bool:
        if self.hessian_is_psd():
            return True
        values, _ = eigh(wide(self._blocks(module)))
        return not exceeds(-values, tolerances(values, module.input0.dtype), module)

    def position_weights(self, module: Module, g_out: tuple[Tensor, ...]) -> Tensor:
        weights = super().position_weights(module, g_out)
        if weights.dim():  # the output has as many rows as there are samples: are they those of the samples?
            probe = _probe(module.input0)
            (product,) = hessian_products(module, [probe], g_out[0].detach())
            (unweighted,) = hessian_products(module, [probe])
            if exceeds((product - weights * unweighted).abs(), tolerances(product, module.input0.dtype), module, largest(weights)):
                raise UnsupportedError(
                    f"The entries of the output {list(g_out[0].shape)} of {module} are weighted differently, but they are not the losses of single "
                    "samples. Return one loss a sample, or sum them up inside of the module."
                )
        return weights

    def _blocks(self, module: Module) -> Tensor:
        """Compute the Hessian of each sample.

        Args:
            module: The loss with recorded inputs and output.

        Returns:
            Symmetric matrices ``[N, D, D]``.
        """
        self._verify_support(module)
        return sample_hessians(module)

    def _sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        blocks = wide(subsample(self._blocks(module), subsampling=subsampling))
        return _columns(square_root(blocks, lambda values: non_negative(values, module, "eigenvalues")), module.input0)

    def _signed_sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> tuple[Tensor, Tensor | None]:
        values, vectors, units = eigh_in_units(wide(self._blocks(module)))
        return _columns(units.unsqueeze(2) * vectors * values.abs().sqrt().unsqueeze(1), module.input0), signs_of(values)

    def _sqrt_hessian_sampled(self, module: Module, g_inp: Grads, g_out: Grads, mc_samples: int = 1, subsampling: Samples = None) -> Tensor:
        signs = random_signs(mc_samples, subsample(module.input0, subsampling=subsampling))
        return self._root_mat_prod(module, signs, subsampling) / sqrt(mc_samples)

    def _root_mat_prod(self, module: Module, mat: Tensor, subsampling: Samples = None) -> Tensor:
        """Multiply by the exact factor of each sample's Hessian.

        Args:
            module: The loss with recorded inputs.
            mat: ``[M, N, *]``.
            subsampling: Indices of samples, or ``None`` for all.

        Returns:
            ``[M, N, *]``.
        """
        factor = self._sqrt_hessian(module, None, None, subsampling=subsampling)
        return torch.einsum("mnv,vn...->mn...", mat.reshape(*mat.shape[:2], factor.shape[0]), factor)

    def _make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        hessian = self._blocks(module)
        return lambda mat: torch.einsum("nij,vnj->vni", hessian, mat.reshape(mat.shape[0], *hessian.shape[:2])).reshape(mat.shape)

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        return self._blocks(module).sum(0).reshape(2 * module.input0.shape[1:])


class OwnLossDerivatives(GenericLossDerivatives):
    """A module that has no rule, and that looks like a loss: it must be curved, since a linear one may only sum up what a loss returned."""

    def _blocks(self, module: Module) -> Tensor:
        blocks = super()._blocks(module)
        if blocks.numel() and not blocks.any() and not any(multiply([_probe(module.input0)])[0].any() for multiply in _elsewhere(module)):
            raise UnsupportedError(
                f"{module} has no rule and is linear, or piecewise linear, in its first input {list(module.input0.shape)}: the curvature of "
                f"such a loss is zero. If that is meant, say that it is a loss: {how_to_register(module)}"
            )
        return blocks


class RowLossDerivatives(GenericLossDerivatives):
    """A loss that takes a vector without a batch axis for a single sample."""

    least_axes = 2


@register(CTCLoss)
class NoSampleAxisDerivatives(GenericLossDerivatives):
    """A loss of torch that has its samples on another axis than the first, and classes derived from it."""

    def _verify_support(self, module: Module) -> None:
        raise UnsupportedError(
            f"{module} takes its samples from axis 1 of its input [T, N, C], so that second-order quantities, which start at axis 0 of a "
            "loss's input, are not defined. First-order quantities are. For others, write a loss of your own whose input is [N, T, C], in "
            "operations that can be differentiated twice: torch's own ctc_loss cannot."
        )


def how_to_register(module: Module) -> str:
    """Return the line that says that a module is a loss.

    Args:
        module: The module.

    Returns:
        Python code.
    """
    return f"`backpack.register({type(module_of(module)).__name__}, backpack.core.derivatives.GenericLossDerivatives)`"


def _columns(factor: Tensor, inputs: Tensor) -> Tensor:
    """Arrange the columns of each sample's factor.

    Args:
        factor: ``[N, D, V]``.
        inputs: Input of the loss.

    Returns:
        ``[V, N, *]``.
    """
    return factor.movedim(2, 0).reshape(factor.shape[2], factor.shape[0], *inputs.shape[1:]).to(inputs.dtype)


def signs_of(values: Tensor) -> Tensor | None:
    """Return the signs of second derivatives.

    Args:
        values: ``[N, V]``.

    Returns:
        ``[V, N]``, or ``None`` if none is negative.
    """
    return values.sign().T if (values < 0).any() else None


def non_negative(values: Tensor, module: Module, what: str) -> Tensor:
    """Refuse negative second derivatives, which have no real square root.

    Args:
        values: Second derivatives.
        module: The loss with recorded inputs.
        what: What they are.

    Returns:
        The values, without negative ones that are rounding errors.

    Raises:
        LossValueError: If some are negative.
    """
    if exceeds(-values, tolerances(values, module.input0.dtype), module):
        raise LossValueError(
            f"The Hessian of {module} has negative {what} (smallest {values.min().item():.3g}, largest {values.max().item():.3g}), so "
            "that it has no real square root. Use a quantity that needs none (DiagHessian, HMP, or backpack.hessianfree), a convex loss, "
            "non-negative weights, or, if the loss is convex, float64."
        )
    return values.clamp(min=0)


def sample_hessians(module: Module) -> Tensor:
    """Compute the Hessian of (the sum over the entries of) a loss with respect to each sample's slice of its first input.

    Args:
        module: A loss with recorded inputs and output.

    Returns:
        Symmetric matrices ``[N, D, D]``, where ``D`` is the number of input entries per sample.

    Raises:
        MixedSamplesError: If the Hessian couples different samples.
    """
    recorded = module.input0
    blocks, deviation, allowed = _in_blocks(recorded, lambda vectors: hessian_products(module, vectors))
    differs = len(recorded) > 1 and (deviation > allowed).any()
    if differs and (exceeds(deviation, allowed, module) or _couples_elsewhere(module)):
        raise MixedSamplesError(
            f"The Hessian of {module} with respect to its input {tuple(recorded.shape)} couples entries with different indices on axis 0, "
            "so that no second-order quantity of a sample exists. The loss must be a sum, or a mean, of one term per sample. First-order quantities, "
            "those of the rows of its input, take any loss."
        )
    return (blocks + blocks.mT) / 2


def _in_blocks(point: Tensor, multiply: Callable[[list[Tensor]], list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    # blocks of the samples, what a product has beside them, and how much of that may be rounding, for each sample
    samples, features = point.shape[0], prod(point.shape[1:])
    probe = _probe(point).reshape(samples, features)
    units = torch.eye(features, dtype=point.dtype, device=point.device)
    *columns, probed = multiply([*(unit.expand(samples, -1) for unit in units), probe])
    blocks = torch.stack(columns, 2) if columns else point.new_zeros(samples, 0, 0)
    return blocks, (probed - torch.einsum("nij,nj->ni", blocks, probe)).abs(), tolerances(probed, point.dtype)


def exceeds(errors: Tensor, allowed: float | Tensor, module: Module, scale: float = 1.0) -> bool:
    """Say whether differences are more than rounding errors.

    Args:
        errors: The differences.
        allowed: How large they may be, from the numbers that are compared.
        module: The loss with recorded inputs, of whose Hessian these are.
        scale: Factor of the Hessian.

    Returns:
        Whether one is. Where a model is certain of all samples, the Hessian is a difference of much larger numbers: errors of its size elsewhere.
    """
    if not (errors > allowed).any():
        return False
    recorded = module.input0
    sizes = [largest(multiply([_probe(recorded)])[0]) for multiply in _elsewhere(module)]
    rounding = 8 * prod(recorded.shape[1:]) * torch.finfo(recorded.dtype).eps * scale * max(sizes, default=0.0)
    return bool((errors > allowed + rounding).any())


def _couples_elsewhere(module: Module) -> bool:
    found = (_in_blocks(module.input0.detach(), multiply) for multiply in _elsewhere(module))
    return any((deviation > allowed).any() for _, deviation, allowed in found)


def _elsewhere(module: Module) -> list[Callable[[list[Tensor]], list[Tensor]]]:
    # products with the Hessian where predictions are neither certain nor at a margin; none where the loss cannot be evaluated
    probe, found = _probe(module.input0.detach()), []
    for point in (probe.sigmoid(), 2 * probe):
        with suppress(Exception), torch.enable_grad():  # losses of one's own may raise anything for what they take for bad predictions
            product = _hessian_product(_call(module, point.requires_grad_())[0][0].sum(), point)
            product(probe)
            found.append(lambda vectors, product=product: [product(vector) for vector in vectors])
    return found


def _probe(inputs: Tensor) -> Tensor:
    return torch.randn(inputs.shape, generator=Generator().manual_seed(0)).to(inputs)


def hessian_products(module: Module, vectors: Iterable[Tensor], weights: Tensor | float = 1.0) -> list[Tensor]:
    """Multiply by the Hessian of (the sum over the entries of) a loss with respect to its first input.

    Args:
        module: A loss with recorded inputs and output.
        vectors: Tensors that have as many entries as the input.
        weights: Weights of the entries.

    Returns:
        Products, in the shapes of the vectors.

    Raises:
        UnsupportedError: If the loss cannot be differentiated twice.
    """
    recorded = module.input0
    if recorded.dim() == 0 or not recorded.is_floating_point():
        raise UnsupportedError(
            f"{module} got an input of shape {tuple(recorded.shape)} and type {recorded.dtype}. Second-order quantities need a real "
            "input with the samples on axis 0."
        )
    with torch.enable_grad():
        point = recorded.detach().requires_grad_()
        try:
            output = _evaluate(module, point)
            product = _hessian_product((output * weights).sum(), point)
            products = [product(vector) for vector in vectors]
        except RuntimeError as error:
            known = isinstance(error, UnsupportedError)
            raise (
                error
                if known
                else UnsupportedError(
                    f"{module} cannot be differentiated twice: {error}. Use first-order quantities, which take any loss, or write it in another way."
                )
            ) from error
        functions = [node.name().removesuffix("Backward") for node in nodes_below([output]) if isinstance(node, BackwardCFunction)]
        if functions and not _is_complete(
            product, lambda at: grad((_call(module, at)[0][0] * weights).sum(), at, materialize_grads=True)[0], recorded
        ):
            raise UnsupportedError(
                f"{module} cannot be differentiated twice: it uses the torch.autograd.Function {functions[0]}, and what torch computes is not what "
                "differences of gradients tell. Let the backward method of that function compute everything from the inputs and outputs that it "
                "has saved, with differentiable operations."
            )
    if recorded.requires_grad:
        return undifferentiable(products, recorded, f"The Hessian of {module}", "it comes from automatic differentiation itself")
    return products


def _is_complete(product: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor], point: Tensor) -> bool:
    # whether products with the Hessian are differences of gradients, for most samples: some may lie at a kink
    direction, precision = _probe(point), torch.finfo(point.dtype).eps
    step = precision ** (1 / 3) * max(1.0, largest(point))
    ahead, behind = (gradient((point.detach() + sign * step * direction).requires_grad_()) for sign in (1, -1))
    expected, found = (ahead - behind) / (2 * step), product(direction)
    noise = 10 * precision * largest(ahead) / step
    size = max(largest(expected), largest(found))
    curved = (expected.abs().maximum(found.abs()) > noise + 0.01 * size).unsqueeze(-1).flatten(1).any(1)
    off = ((expected - found).abs() > noise + max(1e-3, precision**0.25) * size).unsqueeze(-1).flatten(1).any(1)
    return not 2 * off.sum() > curved.sum()


def _call(module: Module, point: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    # what a loss returns, and what it returns with other random numbers, if it draws some
    args, named = call_arguments(module, [point, *inputs_of(module, first=1)])
    loss = module_of(module)
    with kept_state(loss), random_state_kept([point]) as drawn:
        # The forward method, not the call: the hooks that record a forward pass are not for this one.
        return tensors_in(loss.forward(*args, **named)), tensors_in(loss.forward(*args, **named)) if drawn() else []


def _evaluate(module: Module, point: Tensor) -> Tensor:
    returned, again = _call(module, point)
    if len(returned) > 1 and [i for i, tensor in enumerate(returned) if tensor.requires_grad] != [0]:
        raise UnsupportedError(
            f"{module} returns {len(returned)} tensors, and which of them is the loss is not known: it must be the first one, and the only one that "
            "depends on the prediction. Detach the others, or return the loss alone."
        )
    output, recorded = returned[0], tensors_in(module.output)[0].detach()
    value = output.detach()
    coarse = max(value.dtype, recorded.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    same = value.shape == recorded.shape
    if same and output.requires_grad and again:  # with other random numbers, the same value may have another derivative
        first, second = (grad(output.sum(), point, retain_graph=True, materialize_grads=True)[0] for output in (output, again[0]))
        same = torch.allclose(first, second, rtol=0.0, atol=tolerance(first, first.dtype), equal_nan=True)
    if not (same and torch.allclose(value, recorded.to(value.dtype), rtol=0.0, atol=tolerance(recorded, coarse), equal_nan=True)):
        raise LossValueError(
            f"{module} gives another value when it is evaluated again on the same input, so that its Hessian is not the one of the "
            "recorded value. Remove what is random or changes with each call."
        )
    return output


def _hessian_product(value: Tensor, point: Tensor) -> Callable[[Tensor], Tensor]:
    (gradient,) = grad(value, point, torch.ones_like(value, requires_grad=True), create_graph=True)
    if lacks_terms([gradient]):
        raise RuntimeError("the backward pass of one of its functions is marked as once_differentiable")
    return lambda vector: grad(gradient, point, vector.reshape(point.shape), retain_graph=True, materialize_grads=True)[0].reshape(vector.shape)


register(_Loss, GenericLossDerivatives)
for _loss in (CosineEmbeddingLoss, TripletMarginLoss, TripletMarginWithDistanceLoss):
    register(_loss, RowLossDerivatives)
