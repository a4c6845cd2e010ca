"""Autograd's graph: its nodes, what they are and have saved, and how to call them.

Private symbols of torch live here, in ``calls.py``, ``slots.py``, ``checkpoints.py``, ``engine.py`` and two files of ``utils`` only, see
``test/test_architecture.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, is_tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules._functions import BackwardHookFunction

from backpack.core.checkpoints import checkpointed, keep, saved_names, value_name
from backpack.core.engine import calling
from backpack.core.slots import Edge
from backpack.utils.columns import are_linear, compare_mixture, distinct_columns
from backpack.utils.errors import UnsupportedError

LEAF = "torch::autograd::AccumulateGrad"
"""Name of the node of a leaf tensor."""
_AS_IT_IS = frozenset({"Expand", "_DDPSinkBackward"})
"""Nodes that are not called: a sum over samples would be in the way, or DistributedDataParallel would take it for the backward pass."""
HOOKED = BackwardHookFunction._backward_cls
"""Nodes that full backward hooks of modules hang into the graph: they return what they are given."""
_STRIDED = frozenset({"AsStridedScatter"})
"""Nodes that read what they are given by its place in memory, and must not be given a part of something larger."""
_ALONE = _STRIDED | {"Cdist", "Roll", "SegmentReduce"}
"""Nodes whose batching rules return something else, as is known: they are called for one column after the other."""
_TRUSTED: set[tuple] = set()
"""Kinds of nodes whose batching rules have been compared with plain calls."""
_TRIED: set[tuple] = set()
"""Those for which columns were made, as those of a pass proved nothing."""
_OUTPUTS, _SEVERAL, _MANY = "backpack.outputs", 2, 8
MAX_POOLS = frozenset({"MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"})
"""Poolings that save the positions of the maxima."""


def operation(node: Node) -> str:
    """Name the operation that a node belongs to.

    Args:
        node: A graph node.

    Returns:
        ``"Mul"`` for ``MulBackward0``, ``"TanhDerivative"`` for ``TanhBackwardBackward0``; the whole name for other nodes, and
        for a custom function, which may be called like one of torch's. What repeats axes of length one of a leaf, and no others, does what ``expand``
        does.
    """
    name, _, number = node.name().rpartition("Backward")
    if name == "Repeat" and node.next_functions[0][0].name() == LEAF:
        sizes = zip(shape_of(node.next_functions[0])[::-1], shape_of((node, 0))[::-1], strict=False)
        return "Expand" if all(size in (1, made) for size, made in sizes) else name
    if not (name and number):
        return node.name()
    return f"{name.removesuffix('Backward')}Derivative" if name.endswith("Backward") else name


def _custom(node: BackwardCFunction) -> str:
    # what messages call a custom function
    return f"{node.name().removesuffix('Backward')} (a torch.autograd.Function)"


@cache
def kind_of(name: str) -> tuple[bool, bool]:
    """Say what kind of node one is.

    Args:
        name: Name of its type.

    Returns:
        Whether it is a derivative of a derivative, and whether it hides a part of the graph.
    """
    derivative = name[-1:].isdigit() and ("BackwardBackward" in name or "BackwardDataBackward" in name)  # others are functions of users
    return derivative, name == "CheckpointFunctionBackward"


def shape_of(edge: Edge) -> torch.Size:
    """Return the shape of the tensor that an edge stands for.

    Args:
        edge: Node and output number.

    Returns:
        Shape.

    Raises:
        UnsupportedError: If it is a nested tensor, which has none.
    """
    outputs = edge[0].metadata.get(_OUTPUTS) or edge[0]._input_metadata  # which torch makes at each request
    if outputs[edge[1]].is_nested_tensor:
        raise UnsupportedError(
            f"What {edge[0].name()} belongs to returns a nested tensor (torch.nested), in which samples have no axis that could be followed to "
            "{names}. Use padded tensors with masks, call backward outside of the context, or leave these parameters out: {exclude}."
        )
    if len(outputs) > _MANY:
        edge[0].metadata[_OUTPUTS] = outputs
    return torch.Size(outputs[edge[1]].shape)


def tensor_at(edge: Edge) -> Any:
    """Return what is known of the tensor that an edge stands for.

    Args:
        edge: Node and output number.

    Returns:
        Object with ``shape``, ``dtype`` and ``device``.
    """
    return (edge[0].metadata.get(_OUTPUTS) or edge[0]._input_metadata)[edge[1]]


def saved(node: Node, name: str) -> Any:
    """Return a tensor, or a setting, that a node has saved for its backward pass.

    Args:
        node: The node.
        name: Under which name.

    Returns:
        The value.
    """
    if saves_tensor(node, name):
        keep(node)
    return _signed(getattr(node, f"_saved_{name}"))


def setting_reader(*names: str) -> Callable[[Node], Any]:
    """Make a reader of what nodes have saved, other than tensors: without a call of a Python function.

    Args:
        *names: Under which names.

    Returns:
        A function that returns the value, or the tuple of values. Negative numbers may be reported as unsigned ones.
    """
    return attrgetter(*(f"_saved_{name}" for name in names))


def _signed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_signed, value))
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value  # torch reports negative numbers as unsigned ones


def sequence_number(node: Node) -> int:
    """Return the position of a node among all nodes of its thread, in the order in which they were made.

    Args:
        node: A graph node.

    Returns:
        The number.
    """
    return node._sequence_nr()


def has_saved(node: Node, name: str) -> bool:
    """Say whether a node of this kind saves something under a name.

    Args:
        node: The node.
        name: The name.

    Returns:
        Whether it does.
    """
    return hasattr(type(node), f"_saved_{name}")


def saves_tensor(node: Node, name: str) -> bool:
    """Say whether what a node of this kind saves under a name is a tensor: none where it is not needed.

    Args:
        node: The node.
        name: The name.

    Returns:
        Whether it is.
    """
    return hasattr(type(node), f"_raw_saved_{name}")


def outputs_of(node: Node) -> list[Any]:
    """Describe the outputs of the operation that a node belongs to.

    Args:
        node: A graph node.

    Returns:
        For each an object with ``shape``, ``dtype`` and ``device``.
    """
    return node._input_metadata


def _in_memory(tensor: Tensor) -> Tensor:
    # derivatives may be sparse, or zeros without memory (that of sgn, say)
    return tensor.to_dense() if tensor.is_sparse else tensor.clone() if tensor._is_zerotensor() else tensor


def call_once(node: Node, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Apply the Jacobian that a graph node of torch's own stands for, transposed, to what is no column of many.

    Args:
        node: The node.
        gradients: For each output of the node a tensor of its shape, or ``None``.

    Returns:
        For each next edge a tensor of its shape, or ``None``.
    """
    keep(node)
    out = node(*gradients)
    return [None if t is None else _in_memory(t) for t in (out if isinstance(out, tuple) else (out,))]


def call_node(node: Node, columns: list[Tensor | None], probing: bool = False) -> list[Tensor | None]:
    """Apply the Jacobian that a graph node stands for, transposed, to columns.

    Args:
        node: The node.
        columns: For each output of the node ``[V, *shape]``, or ``None``.
        probing: Whether they only tell where something lies, so that the backward of a custom function may be any.

    Returns:
        For each next edge ``[V, *shape]``, or ``None``. Where the input was broadcast, the gradient may still have the shape of the output.

    Raises:
        UnsupportedError: If the backward of a custom function is not linear.
    """
    name = operation(node)
    if name in _AS_IT_IS or isinstance(node, HOOKED):
        return columns
    custom = isinstance(node, BackwardCFunction)
    own = custom or name in _STRIDED  # the backward of a custom function may write on what it is given, too
    apply = node.apply if custom else node
    given = [i for i, c in enumerate(columns) if c is not None]
    count = columns[given[0]].shape[0]
    if count == 1 and not own:  # the usual case, and every microsecond counts in a recurrent network
        return [None if t is None else t[None] for t in call_once(node, [None if c is None else c[0] for c in columns])]
    keep(node)

    def one(*parts: Tensor) -> tuple:
        full = _zeros(node) if custom and len(given) < len(columns) else [None] * len(columns)
        for i, part in zip(given, parts, strict=True):
            full[i] = part.clone(memory_format=torch.contiguous_format) if own else part
        with calling(node) if custom else nullcontext():
            out = apply(*full)
        out = out if isinstance(out, tuple) else (out,)
        if not custom:
            return tuple(None if t is None else _in_memory(t) for t in out)
        # a custom function returns something for every argument, but edges lead to tensors only
        needed = iter([gradient for gradient, wanted in zip(out, node.needs_input_grad, strict=False) if wanted])
        return tuple(None if upstream is None else next(needed) for upstream, _ in node.next_functions)

    parts = [columns[i] for i in given]
    missing: list[bool] = []

    def defined(*args: Tensor) -> tuple[Tensor, ...]:
        out = one(*args)
        lacks = [t is None for t in out]
        if missing and missing != lacks:
            raise UnsupportedError(f"The backward of {_custom(node)} returns None at times, and a gradient at others. Let it return zeros.")
        missing[:] = lacks
        return tuple(t for t in out if t is not None)

    found: Sequence[Tensor] = ()
    try:
        # batching rules take for constant what a node has saved, say the mean of a normalization; without columns, some fail
        separate = torch.is_grad_enabled() or count < _SEVERAL or name in _ALONE
        if not separate:
            found = _batched(defined, parts)
            indices = (getattr(node, name) for name in _indices(type(node)))  # rules may be right for some sizes only
            shapes = [*(p.shape[1:] for p in parts), *(shape_of(edge) for edge in node.next_functions if edge[0] is not None)]
            key = type(node), node.name(), *(tuple([size == 1 for size in shape]) for shape in (*shapes, *(i.shape for i in indices if is_tensor(i))))
            if custom or key not in _TRUSTED:  # what a custom function has saved may be anything
                same, proven = compare_mixture(parts, found, defined)
                if same and not proven and key not in _TRIED:  # zeros prove nothing, as those of samples without a gradient: others do
                    _TRIED.add(key)
                    others = [distinct_columns(p) for p in parts]
                    proven = all(compare_mixture(others, _batched(defined, others), defined))
                _TRUSTED.update([key] if proven else [])
                separate = not same
    except RuntimeError:  # no batching rule, or data-dependent Python inside
        separate = True
    if separate:  # one column after the other; of none, one tells the shapes
        rows = [defined(*row) for row in zip(*(p if count else p.new_zeros(1, *p.shape[1:]) for p in parts), strict=True)]
        found = [torch.stack(row)[:count] for row in zip(*rows, strict=True)]
    if custom and count and not probing and not are_linear(parts, found, defined):
        raise UnsupportedError(
            f"The backward of {_custom(node)} is not linear in the gradient, as if it clipped, "
            "normalized or drew something, so that it is no derivative that could carry curvature. First-order quantities remain: the contributions "
            "of the samples to .grad. For others, let it be linear, or let a hook change the gradient behind it."
        )
    remaining = iter(found)
    return [None if none else next(remaining) for none in missing]


def _batched(function: Callable[..., tuple[Tensor, ...]], columns: list[Tensor]) -> tuple[Tensor, ...]:
    # torch.vmap without what it does for arguments of any kind, which takes ten times as long as to turn a tensor around
    _load_rules()
    vmap, count = torch._C._functorch, columns[0].shape[0]
    vmap._set_vmap_fallback_warning_enabled(False)  # operations without a batching rule run one column after the other: a warning would be of no use
    level = vmap._vmap_increment_nesting(count, "error")
    try:
        return tuple([vmap._remove_batch_dim(t, level, count, 0) for t in function(*(vmap._add_batch_dim(c, 0, level) for c in columns))])
    finally:
        vmap._vmap_decrement_nesting()
        vmap._set_vmap_fallback_warning_enabled(True)


@cache
def _load_rules() -> None:
    torch.vmap(torch.neg)(torch.zeros(1))  # some batching rules are registered when it is called first


def _zeros(node: Node) -> list[Tensor | None]:
    """Make the gradients that autograd hands to a custom function where none has arrived.

    Args:
        node: Node of the function.

    Returns:
        Zeros for each output; ``None`` for each if the function sets by itself whether it takes zeros, which cannot be read but from its code.
    """
    function = type(node)._forward_cls
    if any("set_materialize_grads" in part.__code__.co_names for part in (function.forward, function.setup_context) if hasattr(part, "__code__")):
        return [None] * len(outputs_of(node))
    return [torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in outputs_of(node)]


def saved_tensors(node: Node, results: bool = True) -> Iterator[Tensor]:
    """Go through the tensors that a node has saved, connected to the graph.

    Args:
        node: A graph node.
        results: Also those that it has computed.

    Yields:
        The tensors; those of a checkpointed part are computed again for it.
    """
    keep(node)
    for name in saved_names(type(node)):
        value = getattr(node, value_name(node, name)) if results or "_saved_result" not in name else None
        yield from (part for part in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(part, Tensor))


def reads_data(nodes: Iterable[Node]) -> bool:
    """Say whether nodes have saved a constant that has axes, as those do that multiply with data, or compare with targets.

    Args:
        nodes: Graph nodes.

    Returns:
        Whether one has.
    """
    return any(tensor.dim() and not tensor.requires_grad for node in nodes for tensor in saved_tensors(node))


def saved_maxima(nodes: Iterable[Node]) -> Tensor | None:
    """Return the positions of the maxima, which a max-pooling has saved for autograd.

    Args:
        nodes: Graph nodes.

    Returns:
        The positions; ``None`` if no max-pooling is among the nodes, or what it has saved is not at hand.
    """
    for node in nodes:
        if operation(node) in MAX_POOLS and not checkpointed(node):
            return node._saved_result1
    return None


@cache
def _indices(cls: type) -> tuple[str, ...]:
    return tuple(name.removeprefix("_raw") for name in saved_names(cls) if "ind" in name)


@cache
def _setting_names(cls: type) -> tuple[str, ...]:
    return tuple(name for name in dir(cls) if name.startswith("_saved_") and not hasattr(cls, f"_raw{name}"))


def settings_of(node: Node) -> tuple[str, ...]:
    """Return everything that a node has saved other than tensors.

    Args:
        node: The node.

    Returns:
        Texts that can be compared.
    """
    return tuple(str(getattr(node, name)) for name in _setting_names(type(node)))
