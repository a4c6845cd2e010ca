"""From one long vector to tensors shaped like a list of parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from backpack.utils.errors import ArgumentTypeError, ShapeError


def vector_to_parameter_list(vec: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Cut a vector into views that have the shapes of the parameters.

    Args:
        vec: Vector ``[P]``, where ``P`` is the number of entries of all parameters together.
        parameters: Tensors that give the shapes and their order.

    Returns:
        One view of ``vec`` per parameter, of the parameter's shape, without graph.

    Raises:
        ArgumentTypeError: If ``vec`` is no tensor.
        ShapeError: If ``vec`` is no vector of that length.
    """
    if not isinstance(vec, Tensor):
        raise ArgumentTypeError(f"vec must be a torch.Tensor, got {type(vec).__name__}.")
    shapes = [parameter.shape for parameter in parameters]
    sizes = [shape.numel() for shape in shapes]
    if vec.shape != (sum(sizes),):
        raise ShapeError(
            f"vec must have shape [{sum(sizes)}] to fill parameters of shapes {[list(shape) for shape in shapes]}, got {list(vec.shape)}."
        )
    return [part.view(shape) for part, shape in zip(vec.data.split(sizes), shapes, strict=True)]
