"""Graphs of results that may be differentiated: how to go through them, refusals where results cannot be, and a square root."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from backpack.utils.errors import DifferentiationError, UnsupportedError

_NORMS = frozenset(f"Native{kind}NormBackward0" for kind in ("Layer", "Batch"))
_COMPILERS = ("torch._functorch._aot_autograd", "torch.cuda.graphs")
_DERIVED_NORMS = [f"Native{kind}NormBackwardBackward0" for kind in ("Layer", "Batch")]


class _Undifferentiable(torch.autograd.Function):
    """The identity, whose derivative is refused."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, what: str, reason: str) -> Tensor:
        ctx.what, ctx.reason = what, reason
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise DifferentiationError(
            f"{ctx.what} was computed in a backward pass with create_graph=True, but it cannot be differentiated: {ctx.reason}. Use .detach() if "
            "it is meant to be constant."
        )


def undifferentiable(value: Any, anchor: Tensor, what: str, reason: str) -> Any:
    """Let a result that is not connected to the graph raise when it is differentiated, rather than count as constant.

    Args:
        value: The result: a tensor, a list of such, or something else, which is returned as it is.
        anchor: A tensor that requires a gradient.
        what: Name of the result, for the message.
        reason: Why it cannot be differentiated, for the message.

    Returns:
        The result.
    """
    if isinstance(value, list):
        return [undifferentiable(part, anchor, what, reason) for part in value]
    return _Undifferentiable.apply(value, anchor, what, reason) if isinstance(value, Tensor) else value


def nodes_of(tensors: Iterable[Tensor | GradientEdge]) -> list[Node]:
    """Return where the graph of tensors begins.

    Args:
        tensors: Any tensors, or their graph edges.

    Returns:
        The nodes of those that have one.
    """
    nodes = [tensor.node if isinstance(tensor, GradientEdge) else tensor.grad_fn for tensor in tensors]
    return [node for node in nodes if node is not None]


def search(starts: Iterable[Node], follow: Callable[[Node], Iterable[Node | None]] | None = None) -> Iterator[Node]:
    """Go through a graph.

    Args:
        starts: Where to begin.
        follow: Says where to go on from a node, when that has been looked at; ``None`` for all that lies upstream.

    Yields:
        Each node once.
    """
    waiting, seen = [*starts], {None}
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            yield node
            waiting += [upstream for upstream, _ in node.next_functions] if follow is None else follow(node)


def nodes_below(tensors: Iterable[Tensor | GradientEdge]) -> Iterator[Node]:
    """Go through the graph of tensors.

    Args:
        tensors: Any tensors, or their graph edges.

    Returns:
        Each node once.
    """
    return search(nodes_of(tensors))


def nodes_between(tensors: Iterable[Tensor], ends: Iterable[Tensor]) -> Iterator[Node]:
    """Go through what is differentiated where tensors are differentiated with respect to others.

    Args:
        tensors: Any tensors.
        ends: The others.

    Returns:
        Each node once that lies between them.
    """
    edges = {(edge.node, edge.output_nr) for edge in map(get_gradient_edge, (tensor for tensor in ends if tensor.requires_grad))}
    consumers, last = defaultdict[Node, list[Node]](list), []
    for node in search(nodes_of(tensors)):
        for edge in node.next_functions:
            (last if edge in edges else consumers[edge[0]]).append(node)
    return search(last, lambda node: consumers[node])


def lacks_terms(gradients: Iterable[Tensor]) -> bool:
    """Say whether derivatives of gradients would lack terms, as a custom function took part that is marked as ``once_differentiable``.

    It leaves a node that raises, but leads nowhere: it is never run, and passes for a zero. It leaves none where the gradient that it was given
    does not require a gradient: begin the backward pass with one that does.

    Args:
        gradients: Results of a backward pass with ``create_graph=True``.

    Returns:
        Whether they would.
    """
    return any(node.name() == "torch::autograd::Error" for node in nodes_below(gradients))


@contextmanager
def complete_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Refuse custom functions whose gradients torch cannot differentiate, or would differentiate as if parts of them were constant.

    Args:
        tensors: Whose gradients are computed meanwhile, to be differentiated.

    Yields:
        Nothing.

    Raises:
        UnsupportedError: When such a function takes part in the backward pass.
    """
    nodes = [node for node in nodes_below(tensors) if isinstance(node, BackwardCFunction)]
    handles = [node.register_hook(partial(_refuse_incomplete, node)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_incomplete(node: Any, given: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
    name = node.name().removesuffix("Backward")
    kept = [t for t in {id(t): t for t in (*node.saved_tensors, *vars(node).values())}.values() if isinstance(t, Tensor)]
    constants = [t for t in kept if not t.requires_grad and t.is_floating_point()]
    labels = sum(not t.requires_grad and not t.is_floating_point() and t.dtype != torch.bool for t in kept)  # most likely inputs, as masks are not
    allowed = sum(upstream is None for upstream, _ in node.next_functions) - labels
    # what looks like an input that is not kept was computed from it
    lost = {tuple(n._input_metadata[nr].shape) for n, nr in node.next_functions if n is not None} - {tuple(t.shape) for t in kept if t.requires_grad}
    if len(constants) > max(0, allowed) or any(tuple(t.shape) in lost for t in constants):
        raise UnsupportedError(
            f"Gradients are differentiated here, but the torch.autograd.Function {name} keeps a tensor for its backward pass that is no input and no "
            "output of it, which torch takes for a constant: terms would be missing. Keep its inputs (ctx.save_for_backward), and compute the "
            "rest of them in backward; let masks be of type bool, and constants be inputs."
        )
    if any(g is not None and g.requires_grad for g in incoming) and any(g is not None and not g.requires_grad and g.any() for g in given):
        raise UnsupportedError(
            f"Gradients are differentiated here, but the backward pass of the torch.autograd.Function {name} returns one that has no graph, computed "
            "under torch.no_grad() or detached: terms would be missing. Write it with differentiable operations."
        )


def refuse_biased_norms(nodes: Iterable[Node], made: bool = False) -> None:
    """Refuse to differentiate gradients through a normalization that has a bias, but no weight: torch takes the bias for a constant there.

    Args:
        nodes: Nodes of a graph.
        made: Refuse only where the bias was computed from something.

    Raises:
        UnsupportedError: If such a normalization is among them, and its bias requires a gradient.
    """
    for node in nodes:
        bias = node.next_functions[2][0] if node.name() in _NORMS and node._saved_weight is None else None
        if bias is not None and (bias.next_functions or not made):
            raise UnsupportedError(
                f"A normalization with a bias and without weight took part ({node.name()}, as of F.layer_norm(x, shape, None, bias)), of which torch "
                "differentiates gradients as if the bias were constant. Give it a weight of ones, or add the bias to its output."
            )


def refuse_wrong_second_derivatives(nodes: Iterable[Node]) -> None:
    """Refuse to differentiate gradients where torch's derivatives of them are wrong.

    Args:
        nodes: Nodes of what depends on the parameters.

    Raises:
        UnsupportedError: If a normalization with a bias and without weight, or the fused operation of ``weight_norm``, took part.
    """
    nodes = list(nodes)
    refuse_biased_norms(nodes)
    if any(node.name() == "WeightNormInterfaceBackward0" and node.next_functions[0][0] is not None for node in nodes):
        raise UnsupportedError(
            "The fused operation of torch.nn.utils.parametrizations.weight_norm took part, whose second derivatives are wrong in torch: it takes the "
            "norms for constants. Compute the weight by single operations, g * v / v.norm(dim=1, keepdim=True), say."
        )


THIRD = "torch's third derivatives through LayerNorm, InstanceNorm and BatchNorm take mean and deviation for constants, and are wrong"
"""What is wrong where ``passes_derived_norms`` says so, and gradients are differentiated twice more."""


def passes_derived_norms(nodes: Iterable[Node]) -> bool:
    """Say whether a gradient through a normalization took part, of which torch's second derivatives are wrong.

    Args:
        nodes: Nodes of a graph.

    Returns:
        Whether one did: of a layer normalization, or of a batch normalization with the statistics of what it was given.
    """
    names = ((node, node.name()) for node in nodes)
    return any(name == _DERIVED_NORMS[0] or (name == _DERIVED_NORMS[1] and node._saved_train) for node, name in names)


def refuse_wrong_third_derivatives(nodes: Iterable[Node]) -> None:
    """Refuse to differentiate gradients of gradients where torch's derivatives of them are wrong.

    Args:
        nodes: Nodes of what is differentiated twice more.

    Raises:
        UnsupportedError: If a gradient through a normalization took part.
    """
    if passes_derived_norms(nodes):
        raise UnsupportedError(
            f"The gradient of a normalization took part, as in forces or gradient penalties, and is differentiated twice more here: {THIRD}. "
            "Compute the normalization by single operations, (x - x.mean(-1, keepdim=True)) / deviation, say, or use GroupNorm or RMSNorm."
        )


def guarded(products: tuple[Tensor, ...], gradients: Iterable[Tensor], anchor: Tensor, what: str) -> tuple[Tensor, ...]:
    """Let products that were made by differentiating gradients raise when they are differentiated, where torch would be wrong.

    Args:
        products: The products.
        gradients: The gradients.
        anchor: A tensor that requires a gradient.
        what: Name of the products, for the message.

    Returns:
        The products.
    """
    if not passes_derived_norms(nodes_below(gradients)):
        return products
    return tuple(undifferentiable(product, anchor, what, THIRD) for product in products)


def square_root(value: Tensor) -> Tensor:
    """Take the square root; where that is zero, so is its derivative, rather than infinite.

    Args:
        value: Numbers that are not negative.

    Returns:
        Their roots.
    """
    if not value.requires_grad:
        return value.sqrt()
    positive = value > 0
    return value.where(positive, 1).sqrt().where(positive, 0)


def compiled(node: Node) -> bool:
    """Say whether a node stands for a whole part of the model, made by ``torch.compile`` or replayed as a CUDA graph.

    Args:
        node: A graph node.

    Returns:
        Whether it does.
    """
    return isinstance(node, BackwardCFunction) and type(node)._forward_cls.__module__.startswith(_COMPILERS)


def version_of(tensor: Tensor) -> int:
    """Count how often a tensor was changed in place.

    Args:
        tensor: Any tensor.

    Returns:
        Number of changes; 0 for tensors of inference mode, which do not count.
    """
    try:
        return tensor._version
    except RuntimeError:
        return 0
