"""What the public products do around the mathematics: check shapes, and treat one vector as a matrix of one column.

A matrix carries one axis more than the tensor that its columns belong to, for instance ``[V, *output]``; a vector has that tensor's axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from backpack.utils.differentiation import version_of
from backpack.utils.errors import ArgumentTypeError, OverwrittenError, ShapeError
from backpack.utils.subsampling import check_indices


def check_shape(mat: Tensor, like: Tensor | Sequence[int], diff: int = 1, what: str = "the matrix") -> None:
    """Check that all axes but the first ``diff`` are those of ``like``.

    Args:
        mat: The matrix.
        like: The expected shape of a column, or a tensor of that shape.
        diff: Number of leading axes in front of ``like``.
        what: Name of the matrix, for the message.

    Raises:
        ShapeError: If the shapes do not fit.
    """
    like = like.shape if isinstance(like, Tensor) else like
    if mat.dim() != diff + len(like) or tuple(mat.shape[diff:]) != tuple(like):
        leading = ", ".join(["V", "N"][:diff])
        raise ShapeError(f"{what} must have shape [{leading}, {', '.join(map(str, like))}], got {list(mat.shape)}.")


def apply_checked(product: Callable[[Tensor], Tensor], mat: Tensor, takes: Sequence[int], gives: Sequence[int], name: str) -> Tensor:
    """Apply a product of matrices to a matrix or to one vector, with checks before and after.

    Args:
        product: Maps ``[V, *takes]`` to ``[V, *gives]``.
        mat: Matrix ``[V, *takes]`` or vector ``[*takes]``.
        takes: Shape of one column of the argument.
        gives: Shape of one column of the result.
        name: Name of the product, for messages.

    Returns:
        Matrix ``[V, *gives]``, or vector ``[*gives]`` if ``mat`` was one. A mismatch raises ``ShapeError``.

    Raises:
        ArgumentTypeError: If the argument is no tensor.
        OverwrittenError: If the product changes it.
    """
    if not isinstance(mat, Tensor):
        raise ArgumentTypeError(f"The argument of {name} must be a tensor [V, {', '.join(map(str, takes))}], got {type(mat).__name__}.")
    if mat.dim() == len(takes):
        return apply_checked(product, mat.unsqueeze(0), takes, gives, name).squeeze(0)
    check_shape(mat, takes, what=f"The argument of {name} (or one such vector without V)")
    version, result = version_of(mat), product(mat) if len(mat) else mat.reshape(0, *gives)
    if version_of(mat) != version:
        raise OverwrittenError(f"{name} changes its argument in place, which others read, too. Let it work out of place, or on a copy.")
    check_shape(result, gives, what=f"The result of {name}")
    return result


def subsampled(shape: Sequence[int], subsampling: Sequence[int] | None) -> tuple[int, ...]:
    """Shape of a batch that is restricted to samples.

    Args:
        shape: ``(N, ...)``.
        subsampling: Indices of samples, or ``None`` for all.

    Returns:
        ``(len(subsampling), ...)``, or ``shape`` itself.

    Raises:
        ArgumentError: If these are no indices of samples.
    """
    if subsampling is None:
        return tuple(shape)
    check_indices(subsampling, shape[0])
    return len(subsampling), *shape[1:]
