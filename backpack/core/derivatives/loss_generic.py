"""Derivatives of any loss whose value is a sum (or mean) of one term per sample: from blocks of its Hessian, which come from differentiation."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import ClassVar

from torch import Tensor
from torch.nn import CosineEmbeddingLoss, CTCLoss, Module, TripletMarginLoss, TripletMarginWithDistanceLoss
from torch.nn.modules.loss import _Loss

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.blocks import BlockLossDerivatives
from backpack.core.derivatives.loss_hessian import Blocks, elsewhere, exceeds, hessian_blocks, hessian_product, probe
from backpack.core.derivatives.records import module_of
from backpack.core.derivatives.registry import register
from backpack.utils.columns import Entries
from backpack.utils.eigen import eigh, eigh_in_units, square_root
from backpack.utils.errors import LossValueError, UnsupportedError
from backpack.utils.precision import largest, tolerances, wide
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


class GenericLossDerivatives(BlockLossDerivatives):
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
    entries_alone: ClassVar[bool] = False
    """Whether each entry of the prediction has a term of its own, so that nothing needs to be proven."""

    def hessian_is_psd(self) -> bool:
        return False  # nothing is known before it has been computed

    def hessian_is_psd_at(self, module: Module) -> bool:
        if self.hessian_is_psd():
            return True
        matrices = wide(self._blocks(module).matrices)
        values = eigh(matrices.flatten(0, 1))[0].reshape(matrices.shape[:-1]).flatten(1)
        return not exceeds(-values, tolerances(values, module.input0.dtype), module, size=matrices.shape[3])

    def position_weights(self, module: Module, g_out: tuple[Tensor, ...]) -> Tensor:
        weights = super().position_weights(module, g_out)
        if weights.dim():  # the output has as many rows as there are samples: are they those of the samples?
            vector = probe(module.input0)
            product, unweighted = hessian_product(module, g_out[0].detach())(vector), hessian_product(module)(vector)
            if exceeds((product - weights * unweighted).abs(), tolerances(product, module.input0.dtype), module, largest(weights)):
                raise UnsupportedError(
                    f"The entries of the output {list(g_out[0].shape)} of {module} are weighted differently, but they are not the losses of single "
                    "samples. Return one loss a sample, or sum them up inside of the module."
                )
        return weights

    def _blocks(self, module: Module) -> Blocks:
        """Compute the Hessian of each sample.

        Args:
            module: The loss with recorded inputs and output.

        Returns:
            Symmetric matrices.
        """
        self._verify_support(module)
        return hessian_blocks(module, self.entries_alone)

    def _symmetric_root(self, module: Module, subsampling: Samples = None) -> Blocks:
        """Factorize the Hessian of each sample.

        Args:
            module: The loss with recorded inputs and output.
            subsampling: Indices of samples, or ``None`` for all.

        Returns:
            Matrices ``s`` so that a block is ``s s^T``.
        """
        blocks = self._blocks(module)
        matrices = wide(subsample(blocks.matrices, subsampling=subsampling))

        def refuse(values: Tensor) -> None:
            non_negative(values.reshape(matrices.shape[:-1]).flatten(1), module, "eigenvalues", matrices.shape[3])

        return blocks._replace(matrices=square_root(matrices.flatten(0, 1), refuse).reshape(matrices.shape))

    def _signed_root(self, module: Module) -> tuple[Blocks, Tensor]:
        """Factorize the Hessian of each sample, eigenvalues of any sign.

        Args:
            module: The loss with recorded inputs and output.

        Returns:
            Matrices of columns, and the signs of these ``[N, P, M]``.
        """
        blocks = self._blocks(module)
        shape = blocks.matrices.shape
        values, vectors, units = eigh_in_units(wide(blocks.matrices.flatten(0, 1)))
        roots = units.unsqueeze(2) * vectors * values.abs().sqrt().unsqueeze(1)
        return blocks._replace(matrices=roots.reshape(shape)), values.reshape(shape[:-1])

    def _sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        root = self._symmetric_root(module, subsampling)
        return root.in_order(root.spread(root.matrices)).to(module.input0.dtype)

    def _signed_sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> tuple[Tensor, Tensor | None]:
        root, values = self._signed_root(module)
        return root.spread(root.matrices).to(module.input0.dtype), signs_of(values.flatten(1))

    def root_of_blocks(self, module: Module, signed: bool) -> tuple[Tensor | Entries, Tensor | None, int]:
        root, values = self._signed_root(module) if signed else (self._symmetric_root(module), None)
        columns = root.matrices.mT.flatten(0, 1).to(module.input0.dtype)
        return columns, None if values is None else values.sign().flatten(0, 1), root.axis

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
        return self._symmetric_root(module, subsampling).times(mat)

    def _make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        return self._blocks(module).times

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        blocks = self._blocks(module)
        return blocks.in_order(blocks.spread(blocks.matrices.sum(0, keepdim=True))).reshape(2 * module.input0.shape[1:])


class OwnLossDerivatives(GenericLossDerivatives):
    """A module that has no rule, and that looks like a loss: it must be curved, since a linear one may only sum up what a loss returned."""

    def _blocks(self, module: Module) -> Blocks:
        blocks = super()._blocks(module)
        known = not blocks.matrices.numel() or blocks.matrices.any()
        if not known and not any(multiply(probe(module.input0)).any() for multiply in elsewhere(module)):
            raise UnsupportedError(
                f"{module} has no rule and is linear, or piecewise linear, in its first input {list(module.input0.shape)}: the curvature of "
                f"such a loss is zero. If that is meant, say that it is a loss: {how_to_register(module)}"
            )
        return blocks


class EntrywiseLossDerivatives(GenericLossDerivatives):
    """A loss of which the graph shows that no entries of the prediction meet before they are summed."""

    entries_alone: ClassVar[bool] = True


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


def signs_of(values: Tensor) -> Tensor | None:
    """Return the signs of second derivatives.

    Args:
        values: ``[N, V]``.

    Returns:
        ``[V, N]``, or ``None`` if none is negative.
    """
    return values.sign().T if (values < 0).any() else None


def non_negative(values: Tensor, module: Module, what: str, size: int = 1) -> Tensor:
    """Refuse negative second derivatives, which have no real square root.

    Args:
        values: Second derivatives.
        module: The loss with recorded inputs.
        what: What they are.
        size: Size of the matrices of which they are eigenvalues.

    Returns:
        The values, without negative ones that are rounding errors.

    Raises:
        LossValueError: If some are negative.
    """
    if exceeds(-values, tolerances(values, module.input0.dtype), module, size=size):
        raise LossValueError(
            f"The Hessian of {module} has negative {what} (smallest {values.min().item():.3g}, largest {values.max().item():.3g}), so "
            "that it has no real square root. Use a quantity that needs none (DiagHessian, HMP, or backpack.hessianfree), a convex loss, "
            "non-negative weights, or, if the loss is convex, float64."
        )
    return values.clamp(min=0)


register(_Loss, GenericLossDerivatives)
for _loss in (CosineEmbeddingLoss, TripletMarginLoss, TripletMarginWithDistanceLoss):
    register(_loss, RowLossDerivatives)
