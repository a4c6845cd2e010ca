"""Products with transposed Jacobians: one backward pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from backpack.core.state import recording
from backpack.utils.differentiation import complete_gradients, lacks_terms
from backpack.utils.errors import ArgumentError, ArgumentTypeError, UnsupportedError

Tensors = Tensor | Sequence[Tensor]


def L_op(ys: Tensors, xs: Tensors, ws: Tensors | None, retain_graph: bool = True, detach: bool = True) -> tuple[Tensor, ...]:
    """Multiply with the transposed Jacobian, ``sum_j (dy_j / dx_i)^T w_j``.

    Args:
        ys: Outputs: a tensor or a sequence of tensors.
        xs: Inputs, part of the graph of ``ys``: a tensor or a sequence of tensors.
        ws: Vectors, of the shapes of ``ys``.
        retain_graph: Keep the graph of ``ys`` for further passes.
        detach: Return results without graph; else they can be differentiated.

    Returns:
        One tensor per input, of its shape; zeros where no output depends on the input.

    Raises:
        ArgumentError: If the number or the shapes of ``ws`` do not fit ``ys``, no output has a graph, or an input is frozen.
        UnsupportedError: If torch cannot differentiate an operation as often.

    If the outputs are gradients that went through a custom function marked as ``once_differentiable``, terms would be missing: refused.
    """
    ys, xs = as_list(ys), as_list(xs)
    if ws is not None:
        ws = as_list(ws, optional=True)
        check_shapes("ws", ws, "ys", ys)
    refuse_missing_terms(ys)
    return pull_back(ys, xs, ws, retain_graph, detach)


def pull_back(ys: Tensors, xs: Tensors, ws: Tensors | None, retain_graph: bool, detach: bool) -> tuple[Tensor, ...]:
    """Do what ``L_op`` does, for a caller that sees to it that no terms are missing.

    Args:
        ys: See ``L_op``.
        xs: See ``L_op``.
        ws: See ``L_op``.
        retain_graph: See ``L_op``.
        detach: See ``L_op``.

    Returns:
        See ``L_op``.

    Raises:
        ArgumentError: If no output has a graph, or an input is frozen.
        UnsupportedError: See ``L_op``.
        RuntimeError: Whatever else autograd raises.
    """
    ys, xs, ws = as_list(ys), as_list(xs), None if ws is None else as_list(ws, optional=True)
    if not detach:
        refuse_inference_mode()
    frozen = [list(x.shape) for x in xs if not x.requires_grad]
    if frozen or not xs:
        what = f"tensors of shapes {frozen} that do not require gradients" if frozen else "no tensors"
        raise ArgumentError(f"Derivatives are asked for with respect to {what}. Give those that the outputs depend on.")
    connected = [i for i, y in enumerate(ys) if y.requires_grad]
    if not connected:
        raise ArgumentError("No output has a graph in which it depends on anything: it was detached, or computed under torch.no_grad().")
    ys, ws = [ys[i] for i in connected], None if ws is None else [ws[i] for i in connected]
    before, recording.apart = recording.apart, True  # inside of a context, too, this is no pass over a loss
    try:
        with nullcontext() if detach else complete_gradients(ys):
            return torch.autograd.grad(ys, xs, ws, create_graph=not detach, retain_graph=retain_graph, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        missing = re.search(r"derivative for (?:aten::|'_?)(\w+)'? is not implemented", str(error))
        if missing is None:
            raise
        in_attention, kernel = "attention" in missing[1], "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        way_out = f"Run attention {kernel}" if in_attention else "Write it with other operations"
        raise UnsupportedError(f"Gradients are differentiated here, but torch has no derivative of {missing[1]}. {way_out}.") from error
    finally:
        recording.apart = before


def refuse_inference_mode() -> None:
    """Refuse to differentiate gradients where torch makes no graph of them.

    Raises:
        UnsupportedError: Under ``torch.inference_mode()``.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError("Gradients are differentiated here, of which torch.inference_mode() makes no graph. Use torch.no_grad() in its place.")


def refuse_missing_terms(ys: Sequence[Tensor]) -> None:
    """Refuse to differentiate gradients that went through a custom function marked as ``once_differentiable``.

    Args:
        ys: What is to be differentiated.

    Raises:
        UnsupportedError: If terms would be missing.
    """
    if lacks_terms(ys):
        raise UnsupportedError(
            "A product with a Jacobian, a Hessian or a generalized Gauss-Newton matrix differentiates gradients, but they went through a "
            "torch.autograd.Function whose backward is marked as once_differentiable: autograd would take its derivative for zero. Write its "
            "backward with differentiable operations, and without the mark."
        )


def as_list(tensors: Tensors, optional: bool = False) -> list[Tensor]:
    """Put a single tensor into a list.

    Args:
        tensors: A tensor or several.
        optional: Whether torch decides where ``None`` may stand for one.

    Returns:
        All of them.

    Raises:
        ArgumentTypeError: If something else is among them, as the keys of a mapping are.
    """
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for other in several:
        if not (isinstance(other, Tensor) or (other is None and optional)):
            raise ArgumentTypeError(
                f"Products with Jacobians, Hessians and Gauss-Newton matrices need a tensor or a sequence of tensors, got one of type "
                f"{type(tensors).__name__}, with a {type(other).__name__}. Of a mapping, or of nested tensors, give those that matter, as "
                "output['logits']."
            )
    return several


def check_shapes(name: str, vectors: Sequence[Tensor | None], fitting: str, tensors: Sequence[Tensor]) -> None:
    """Refuse vectors that do not fit tensors.

    Args:
        name: Name of the vectors.
        vectors: The vectors; torch decides where ``None`` may stand for one.
        fitting: Name of the tensors.
        tensors: The tensors.

    Raises:
        ArgumentError: If their number or shapes differ.
    """
    got, expected = [None if v is None else list(v.shape) for v in vectors], [list(tensor.shape) for tensor in tensors]
    if len(got) != len(expected) or any(shape not in (None, wanted) for shape, wanted in zip(got, expected, strict=True)):
        raise ArgumentError(f"{name} must have the shapes of {fitting}, {expected}, got {got}.")


def transposed_jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors | None, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """Multiply with the transposed Jacobian: another name of ``L_op``.

    Args:
        f: Outputs.
        x: Inputs.
        v: Vectors, of the shapes of ``f``.
        retain_graph: See ``L_op``.
        detach: See ``L_op``.

    Returns:
        See ``L_op``.
    """
    return L_op(f, x, v, retain_graph, detach)
