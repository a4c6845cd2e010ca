"""Hessians of any loss whose value is a sum (or mean) of one term per sample, by automatic differentiation: block by block, as few as there are.

The loss is evaluated again on its recorded inputs and differentiated twice, so that its own reduction, weights and options enter as they
are. Entries that do not meet in the loss (those of an image in a distance, or positions in a cross-entropy) share a Hessian-vector product, as
samples do: ``M`` products with unit vectors give all blocks of ``M`` entries. What does not meet has a zero in the product, no rounding error, where
the vector has zeros: a few pseudo-random vectors that are zero in half of the blocks each, in another half in each pair of blocks, prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import sqrt
from typing import NamedTuple

import torch
from torch import Generator, Size, Tensor
from torch.autograd import grad
from torch.autograd.function import BackwardCFunction
from torch.nn import Module

from backpack.core.derivatives.records import call_arguments, inputs_of, module_of
from backpack.utils.differentiation import lacks_terms, nodes_below, undifferentiable
from backpack.utils.errors import LossValueError, MixedSamplesError, UnsupportedError
from backpack.utils.module_state import kept_state
from backpack.utils.nested import tensors_in
from backpack.utils.precision import largest, largest_of_each, tolerance, tolerances
from backpack.utils.random_state import random_state_kept

_MATRIX, _FEW = 2, 8
"""Blocks are looked for where they have at most one entry in so many of a sample."""
_ROUNDING = 4
"""Rounding errors of second derivatives, in machine epsilons, relative to what they are where predictions are neither certain nor far away."""


class Blocks(NamedTuple):
    """``P`` matrices ``[N, P, M, M]`` along one axis, a negative number, of each sample of the prediction ``[N, *features]``.

    They are those of groups of consecutive entries if the axis is the last one.
    """

    matrices: Tensor
    axis: int
    features: Size

    def cut(self, mat: Tensor) -> Tensor:
        """Cut columns.

        Args:
            mat: ``[V, N, *]``.

        Returns:
            ``[V, N, P, M]``.
        """
        return mat.movedim(self.axis, -1).reshape(*mat.shape[:2], *self.matrices.shape[1:3])

    def joined(self, mat: Tensor) -> Tensor:
        """Put columns together again.

        Args:
            mat: ``[V, N, P, M]``.

        Returns:
            ``[V, N, *]``.
        """
        moved = [*mat.shape[:2], *self.features]
        moved.append(moved.pop(self.axis))
        return mat.reshape(moved).movedim(-1, self.axis)

    def times(self, mat: Tensor) -> Tensor:
        """Multiply by the matrices.

        Args:
            mat: Columns ``[V, N, *]``.

        Returns:
            ``[V, N, *]``, in the type of the columns.
        """
        return self.joined(torch.einsum("npij,vnpj->vnpi", self.matrices, self.cut(mat).to(self.matrices.dtype))).to(mat.dtype)

    def spread(self, roots: Tensor) -> Tensor:
        """Give each column of each block a column of its own.

        Args:
            roots: ``[N, P, M, E]``.

        Returns:
            ``[P * E, N, *]``, those of one block side by side.
        """
        return self.joined(roots.permute(3, 0, 2, 1).diag_embed(dim1=0, dim2=3).flatten(0, 1))

    def in_order(self, columns: Tensor) -> Tensor:
        """Bring what belongs to the entries of the blocks into the order of the entries of a sample.

        Args:
            columns: ``[D, *]``.

        Returns:
            ``[D, *]``.
        """
        if self.axis == -1:
            return columns
        places = torch.arange(len(columns), device=columns.device).reshape(1, 1, *self.features)
        return columns[self.cut(places).flatten().argsort()]


def hessian_blocks(module: Module, alone: bool = False) -> Blocks:
    """Compute the Hessian of (the sum over the entries of) a loss with respect to each sample's slice of its first input, without most of its zeros.

    Args:
        module: A loss with recorded inputs and output.
        alone: Whether it is known that each entry has a term of its own.

    Returns:
        Symmetric matrices: numbers, if each entry has a term of its own, matrices along the first or the last axis of a sample, or whole ones.

    Raises:
        MixedSamplesError: If the Hessian couples different samples.
    """
    point, shape, multiply = module.input0, module.input0.shape, hessian_product(module)
    if alone:
        return _in_blocks(multiply, _frame(point, -1, 1), point)
    sizes = {(1, -1)} | {(shape[axis], axis) for axis in (1 - len(shape), -1) if len(shape) > _MATRIX}
    for size, axis in sorted(pair for pair in sizes if 0 < pair[0] * _FEW <= shape[1:].numel()):
        frame = _frame(point, axis, size)
        if _lie_apart(point, multiply, frame):
            return _in_blocks(multiply, frame, point)
    return Blocks(sample_hessians(module, multiply).unsqueeze(1), -1, shape[1:])


def sample_hessians(module: Module, multiply: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Compute the Hessian of (the sum over the entries of) a loss with respect to each sample's slice of its first input.

    Args:
        module: A loss with recorded inputs and output.
        multiply: What ``hessian_product`` returns for it, if that is at hand.

    Returns:
        Symmetric matrices ``[N, D, D]``, where ``D`` is the number of input entries per sample.

    Raises:
        MixedSamplesError: If the Hessian couples different samples.
    """
    point, multiply = module.input0, multiply or hessian_product(module)
    frame = _frame(point, -1, point.shape[1:].numel())
    blocks = _in_blocks(multiply, frame, point)
    if not _lie_apart(point, multiply, frame) and (_mix(blocks, multiply, point, module) or _mix_elsewhere(module, frame)):
        raise MixedSamplesError(
            f"The Hessian of {module} with respect to its input {tuple(point.shape)} couples entries with different indices on axis 0, "
            "so that no second-order quantity of a sample exists. The loss must be a sum, or a mean, of one term per sample. First-order quantities, "
            "those of the rows of its input, take any loss."
        )
    return blocks.matrices.squeeze(1)


def _frame(point: Tensor, axis: int, size: int) -> Blocks:
    # blocks of so many entries along an axis, without numbers
    places = point.shape[1:].numel() // size if size else 1
    return Blocks(point.new_zeros(()).expand(len(point), places, size, size), axis, point.shape[1:])


def _in_blocks(multiply: Callable[[Tensor], Tensor], frame: Blocks, point: Tensor) -> Blocks:
    # made of products with the unit vectors of the entries of a block, for all blocks at once
    size = frame.matrices.shape[2]
    units = torch.eye(size, dtype=point.dtype, device=point.device).reshape(size, 1, 1, size)
    columns = [multiply(unit) for unit in frame.joined(units.expand(size, *frame.matrices.shape[:3]))]
    matrices = frame.cut(torch.stack(columns)).permute(1, 2, 3, 0) if columns else frame.matrices
    return frame._replace(matrices=(matrices + matrices.mT) / 2)


def _lie_apart(point: Tensor, multiply: Callable[[Tensor], Tensor], frame: Blocks) -> bool:
    # whether nothing lies outside of blocks
    samples, places = frame.matrices.shape[:2]
    numbers = torch.arange(samples * places, device=point.device).reshape(samples, places, 1)
    vector = frame.cut(probe(point).unsqueeze(0))
    for bit in range((numbers.numel() - 1).bit_length() if numbers.numel() else 0):
        half = (numbers >> bit & 1).bool()
        product = multiply(frame.joined(vector * half).squeeze(0))
        if frame.cut(product.unsqueeze(0)).masked_fill(half, 0).any():
            return False
    return True


def _outside(blocks: Blocks, product: Tensor) -> Tensor:
    # how much of the product with the probe blocks do not make ``[N, *]``; what is not finite tells nothing
    return (product - blocks.times(probe(product).unsqueeze(0)).squeeze(0)).abs().nan_to_num(0.0, 0.0)


def _mix(blocks: Blocks, multiply: Callable[[Tensor], Tensor], point: Tensor, module: Module) -> bool:
    # whether blocks are not all, beyond rounding errors
    product = multiply(probe(point))
    return exceeds(_outside(blocks, product), tolerances(product, point.dtype), module)


def exceeds(errors: Tensor, allowed: float | Tensor, module: Module, scale: float = 1.0, size: int = 1) -> bool:
    """Say whether differences are more than rounding errors.

    Args:
        errors: The differences.
        allowed: How large they may be, from the numbers that are compared.
        module: The loss with recorded inputs, of whose Hessian these are.
        scale: Factor of the Hessian.
        size: Size of the matrices of which these are eigenvalues, if they are.

    Returns:
        Whether one is. Where a model is certain of samples, the Hessian is a difference of much larger numbers: errors of its size for others, or
        elsewhere.
    """
    if not (errors > allowed).any():
        return False
    recorded, eps = module.input0, torch.finfo(module.input0.dtype).eps
    most = max(largest(errors), scale * next((largest(multiply(probe(recorded))) for multiply in elsewhere(module)), 0.0))
    return bool((errors > allowed + min(_ROUNDING * eps * sqrt(size), sqrt(eps)) * most).any())


def _mix_elsewhere(module: Module, frame: Blocks) -> bool:
    # whether samples meet where rounding does not tell that they do not
    point = module.input0.detach()
    for multiply in elsewhere(module):
        product = multiply(probe(point))
        if (_outside(_in_blocks(multiply, frame, point), product) > tolerances(product, point.dtype)).any():
            return True
    return False


def elsewhere(module: Module) -> list[Callable[[Tensor], Tensor]]:
    """Return products with the Hessian where predictions are neither certain nor at a margin.

    Args:
        module: The loss with recorded inputs.

    Returns:
        What ``hessian_product`` returns; none where the loss cannot be evaluated.
    """
    vector, found = probe(module.input0.detach()), []
    for point in (vector.sigmoid(), 2 * vector):
        with suppress(Exception), torch.enable_grad():  # losses of one's own may raise anything for what they take for bad predictions
            product = _hessian_product(_call(module, point.requires_grad_())[0][0].sum(), point)
            product(vector)
            found.append(product)
    return found


def probe(inputs: Tensor) -> Tensor:
    """Return a vector that is always the same, and of which no entry is special.

    Args:
        inputs: Have shape and type.

    Returns:
        The vector.
    """
    return torch.randn(inputs.shape, generator=Generator().manual_seed(0)).to(inputs)


def hessian_product(module: Module, weights: Tensor | float = 1.0) -> Callable[[Tensor], Tensor]:
    """Differentiate (the sum over the entries of) a loss twice with respect to its first input.

    Args:
        module: A loss with recorded inputs and output.
        weights: Weights of the entries.

    Returns:
        A function that multiplies a tensor with as many entries as the input by the Hessian, and keeps its shape. It raises the same error.

    Raises:
        UnsupportedError: If the loss cannot be differentiated twice.
    """
    recorded = module.input0
    if recorded.dim() == 0 or not recorded.is_floating_point():
        raise UnsupportedError(
            f"{module} got an input of shape {tuple(recorded.shape)} and type {recorded.dtype}. Second-order quantities need a real "
            "input with the samples on axis 0."
        )
    point = recorded.detach().requires_grad_()
    with _differentiated(module):
        output = _evaluate(module, point)
        product = _hessian_product((output * weights).sum(), point)
        functions = [node.name().removesuffix("Backward") for node in nodes_below([output]) if isinstance(node, BackwardCFunction)]
        if functions and not _is_complete(
            product, lambda at: grad((_call(module, at)[0][0] * weights).sum(), at, materialize_grads=True)[0], recorded
        ):
            raise UnsupportedError(
                f"{module} cannot be differentiated twice: it uses the torch.autograd.Function {functions[0]}, and what torch computes is not what "
                "differences of gradients tell. Let the backward method of that function compute everything from the inputs and outputs that it "
                "has saved, with differentiable operations."
            )

    def multiply(vector: Tensor) -> Tensor:
        with _differentiated(module):
            found = product(vector)
        if not recorded.requires_grad:
            return found
        return undifferentiable(found, recorded, f"The Hessian of {module}", "it comes from automatic differentiation itself")

    return multiply


@contextmanager
def _differentiated(module: Module) -> Iterator[None]:
    # what torch raises while a loss is differentiated tells which one it is
    try:
        with torch.enable_grad():
            yield
    except UnsupportedError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(
            f"{module} cannot be differentiated twice: {error}. Use first-order quantities, which take any loss, or write it in another way."
        ) from error


def _is_complete(product: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor], point: Tensor) -> bool:
    # whether products with the Hessian are differences of gradients, for most samples: some may lie at a kink
    direction, precision = probe(point), torch.finfo(point.dtype).eps
    step = precision ** (1 / 3) * largest_of_each(point.detach()).clamp(min=1.0)
    ahead, behind = (gradient((point.detach() + sign * step * direction).requires_grad_()) for sign in (1, -1))
    expected, found = (ahead - behind) / (2 * step), product(direction)
    noise = 10 * precision * largest_of_each(ahead) / step
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
