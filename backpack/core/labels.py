"""Tensors whose axes have labels, so that their products can be multiplied out in any order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from string import ascii_letters
from typing import NamedTuple

from opt_einsum import contract_path
from torch import Size, Tensor, einsum

Labels = tuple[int, ...]
_PAIR = 2


class Operand(NamedTuple):
    """A tensor with labels.

    Attributes:
        tensor: The tensor.
        labels: Labels of its axes.
    """

    tensor: Tensor
    labels: Labels


def aligned(operand: Operand, labels: Labels) -> Tensor:
    """Give a tensor the axes that another one has.

    Args:
        operand: The tensor.
        labels: Labels of the other one.

    Returns:
        The tensor with these axes in their order, of which some may have length one.
    """
    present = [label for label in labels if label in operand.labels]
    tensor = operand.tensor.permute([operand.labels.index(label) for label in present])
    sizes = dict(zip(present, tensor.shape, strict=True))
    return tensor.reshape([sizes.get(label, 1) for label in labels])


def replaced(labels: Labels, label: int, new: Labels) -> Labels:
    """Replace a label.

    Args:
        labels: Labels.
        label: One of them, or another one.
        new: What is put in its place.

    Returns:
        The labels.
    """
    return tuple(chain.from_iterable(new if each == label else (each,) for each in labels))


def equation(operands: Sequence[Labels], axes: Labels) -> str:
    """Write down a product.

    Args:
        operands: Labels of each tensor, at most 52 different ones.
        axes: Labels of the result.

    Returns:
        What ``torch.einsum`` understands.
    """
    letters = dict(zip(dict.fromkeys(chain.from_iterable(operands)), ascii_letters, strict=False))
    *given, wanted = ("".join(letters[label] for label in labels) for labels in (*operands, axes))
    return f"{','.join(given)}->{wanted}"


def contracted(operands: Sequence[tuple[Tensor, Labels]], axes: Labels) -> Tensor:
    """Multiply tensors out.

    Args:
        operands: Tensors with labels.
        axes: Labels of the result; over others it is summed.

    Returns:
        The product.
    """
    formula, tensors = equation([labels for _, labels in operands], axes), [tensor for tensor, _ in operands]
    if len(tensors) <= _PAIR:
        return einsum(formula, *tensors)
    for places, pair in _steps(formula, tuple(tensor.shape for tensor in tensors)):
        tensors.append(einsum(pair, *[tensors.pop(place) for place in places]))
    return tensors[0]


@lru_cache(maxsize=1024)
def _steps(formula: str, shapes: tuple[Size, ...]) -> list[tuple[tuple[int, ...], str]]:
    # in which order tensors are multiplied, which takes longer to find out than small products do: places from the last one on, and their product
    _, path = contract_path(formula, *shapes, shapes=True)
    return [(places, pair) for places, _, pair, *_ in path.contraction_list]
