"""Origins: whether what a node computes is made of parameters alone, or of data, as far as the graph, shapes and memory tell."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.graph import operation, saved, saved_tensors, shape_of
from backpack.core.linear import PIECEWISE_LINEAR, PRODUCTS
from backpack.core.memory import place_of
from backpack.core.slots import Edge
from backpack.core.walk import Walk
from backpack.core.ways import ELEMENTWISE, STATIC
from backpack.utils.differentiation import search

LOOKUPS = frozenset("Embedding Index IndexSelect".split())
"""Operations that select rows of a table."""
# all that these depend on is in the graph, but for settings and random numbers, if each of their inputs is
_OF_INPUTS = ELEMENTWISE | PRODUCTS | STATIC - {"MaskedFill"} | {"NativeLayerNorm"}
_OF_INPUTS |= frozenset(
    """Div Maximum Minimum Softmax LogSoftmax SafeSoftmax Logsumexp Logcumsumexp Norm LinalgVectorNorm Prod Cumprod Var Std VarMean StdMean Amax
    Amin""".split()
)
_OF_INPUTS |= {f"Linalg{name}" for name in "Slogdet Det InvEx SolveEx CholeskyEx Eigh Svd Qr MatrixExp SolveTriangular LuFactorEx Lu".split()}
MATRIX_PRODUCTS = PRODUCTS - {"Mul", "Addcmul", "PreluKernel", "LinalgCross"}
"""Operations that sum over products."""
FACTORS = {"Mm": ("self", "mat2"), "Bmm": ("self", "mat2"), "Addmm": ("mat1", "mat2"), "Baddbmm": ("batch1", "batch2")}
"""Names of what products of matrices have saved."""
STACKS = frozenset({"Bmm", "Baddbmm"})
"""Those of stacks of matrices."""
_MATRIX, _INTEGERS, _EXACT = 2, (torch.long, torch.int), (torch.float, torch.double)
_FEW = 4
"""Numbers of positions below which samples could look like them."""
_ROUNDINGS = 64
"""Rounding errors, of the largest entry, up to which waves are waves."""
_ENTRYWISE = frozenset("Add Sub Rsub Mul Div Where MaskedFill Index IndexSelect".split())


def is_of_parameter(walk: Walk, node: Node, samples: int | None = None) -> bool:
    """Say whether a node makes something of parameters, and of what is known to be constant, so of no data.

    Args:
        walk: The graph.
        node: The node.
        samples: Number of samples, if other constants and rows of a table count, too, as long as there are not as many.

    Returns:
        Whether it does.
    """
    known = walk.memo.setdefault(samples, {None: (False, True, samples is not None)})
    first, stack, waiting = node, [node], set[Node]()
    while stack:
        node = stack[-1]
        upstream = [n if walk.is_tracked(n) else None for n, _ in node.next_functions]
        found = [known[n] for n in upstream if n in known]
        if node in known or not all(pure or few for _, pure, few in found):
            known.setdefault(node, (True, False, False))
            stack.pop()
            while stack and stack[-1] not in waiting and not any(known[node][1:]):  # what lies beside it does not matter any more
                stack.pop()
        elif len(found) < len(upstream):
            waiting.add(node)
            stack += [n for n in upstream if n not in known]
        else:
            known[stack.pop()] = _origin(walk, node, samples, upstream, found)
    return any(known[first][1:])


def _origin(
    walk: Walk, node: Node, samples: int | None, upstream: list[Node | None], found: list[tuple[bool, bool, bool]]
) -> tuple[bool, bool, bool]:
    # whether something takes part that is not known to be constant; whether all is made of parameters, and without as many rows as samples
    given, pure, few = (any(one[0] for one in found), *(all(one[i] for one in found) for i in (1, 2)))
    if node in walk.leaves:
        return False, True, samples is not None
    if operation(node) == "Embedding":
        given = samples is None or ((numbers := looked_up(walk, node)) is not None and samples in numbers.shape[:2])
        return given, pure and not given, few and not given
    data = None in upstream or operation(node) not in _OF_INPUTS
    pure = pure and (not data or (operation(node) in _OF_INPUTS and _reads_constants(walk, node)))
    data = data and few and not _uses_constants(walk, node) and not _multiplies_by_fewer(walk, node, samples)
    given = data or given
    return given, pure, few and not (data and operation(node) not in _ENTRYWISE) and not (given and any(r % samples == 0 for r in rows_made(node)))


def _uses_constants(walk: Walk, node: Node) -> bool:
    # whether what takes part beside the graph is known to be constant, or to have no rows of its own
    if operation(node) in _ENTRYWISE and any(walk.is_tracked(n) and shape_of((n, nr)) == shape_of((node, 0)) for n, nr in node.next_functions):
        return True
    return _reads_constants(walk, node)


def _multiplies_by_fewer(walk: Walk, node: Node, samples: int) -> bool:
    # whether a product of entries has a constant factor of which no axis could hold the samples
    constants = [t for t in saved_tensors(node, results=False) if not is_made(walk, t)] if operation(node) == "Mul" else []
    return bool(constants) and all(size % samples for tensor in constants for size in tensor.shape)


def _reads_constants(walk: Walk, node: Node) -> bool:
    # whether what takes part beside the graph is known to be constant, or a number
    # frozen parameters are others; what has a graph without tracked parameters comes with it
    given = saved_tensors(node, results=False)
    others = [tensor for tensor in given if not (tensor.requires_grad and (tensor.grad_fn is not None or is_made(walk, tensor)))]
    others += [tensor for n, _ in node.next_functions if n is not None and not walk.is_tracked(n) for tensor in _made_from(n)]
    if operation(node) in PIECEWISE_LINEAR:  # the places of maxima
        others = [tensor for tensor in others if tensor is None or tensor.is_floating_point()]
    if not others:
        norm = operation(node) == "NativeLayerNorm"  # has saved its weight, or has none
        return not isinstance(node, BackwardCFunction) and all(walk.is_tracked(n) or (norm and n is None) for n, _ in node.next_functions)
    return _are_constant(walk, others)


def _are_constant(walk: Walk, tensors: Iterable[Tensor | None]) -> bool:
    return all(tensor is not None and (not tensor.dim() or is_constant(walk, tensor)) for tensor in tensors)


def _made_from(node: Node) -> list[Tensor | None]:
    # what made something that has a graph without tracked parameters, ``None`` for what nothing tells: inputs that require a gradient, or
    # parameters that are excluded, or of a model that is not extended, and what layers with such parameters were given
    found: list[Tensor | None] = []
    for n in search([node]):
        if hasattr(n, "variable"):
            found.append(n.variable)
            continue
        try:
            given = [tensor for tensor in saved_tensors(n, results=False) if not tensor.requires_grad]
        except RuntimeError:  # an earlier pass, of another model, has freed them
            return [None]
        found += given or [None] * any(upstream is None for upstream, _ in n.next_functions)
    return found


def is_made(walk: Walk, tensor: Tensor) -> bool:
    """Say whether a tensor is a parameter, or was made of tracked ones.

    Args:
        walk: The graph.
        tensor: A tensor that a node has saved, or a module was called with.

    Returns:
        Whether it is or was.
    """
    return isinstance(tensor, Parameter) or walk.is_tracked(tensor.grad_fn)


def is_constant(walk: Walk, tensor: Tensor | None) -> bool:
    """Say whether a tensor is known to be the same for all samples.

    Args:
        walk: The graph.
        tensor: A tensor that a node has saved, or a module was called with.

    Returns:
        Whether it is a buffer, or a parameter, of an outermost module, or a view of one; a sparse one has no views.
    """
    if tensor is None or tensor.layout == torch.strided:
        return place_of(tensor) in walk.constant_places
    return any(tensor is buffer for call in walk.outermost for buffer in call.module.buffers())


def rows_made(node: Node) -> torch.Size:
    """Return the lengths of the axes of what a node makes on which samples lie, usually.

    Args:
        node: The node.

    Returns:
        The first two; without that of features.
    """
    shape = shape_of((node, 0))
    return shape[:-1][:2] or shape


def looked_up(walk: Walk, node: Node) -> Tensor | None:
    """Return the numbers for which rows are looked up, if samples may lie on one of their first two axes.

    Args:
        walk: The graph.
        node: A node.

    Returns:
        Indices; ``None`` if the node looks nothing up, for a single axis of positions, relative positions, numbers in a buffer, or with an axis of
        length one in front.
    """
    found = saved(node, "indices") if operation(node) in ("Embedding", "Index") else None
    given = [index for index in (found if isinstance(found, tuple) else (found,)) if index is not None]
    if len(given) != 1 or given[0].dim() < _MATRIX or given[0].dtype not in _INTEGERS:
        return None
    return None if len(given[0]) == 1 or is_constant(walk, given[0]) or is_relative(given[0]) else given[0]


def is_relative(numbers: Tensor | None) -> bool:
    """Say whether numbers are those of relative positions, as far as they tell: each depends on the difference of its two places.

    Args:
        numbers: Any tensor.

    Returns:
        Whether they are; not where they are few, or all the same, as data may be.
    """
    if numbers is None or numbers.dim() != _MATRIX or min(numbers.shape) < _FEW or numbers.is_floating_point():
        return False
    return torch.equal(numbers[1:, 1:], numbers[:-1, :-1]) and bool((numbers != numbers[0, 0]).any())


def are_positions(numbers: Tensor | None, samples: int) -> bool:
    """Say whether rows are made of positions, as far as they tell.

    Args:
        numbers: Any tensor.
        samples: Number of samples.

    Returns:
        Whether they are: relative ones; numbers that grow evenly; points of a grid, or waves, unless as many as samples, which may lie so, too.
    """
    if numbers is None or numbers.layout != torch.strided or numbers.is_nested or numbers.dtype not in (*_INTEGERS, *_EXACT):
        return False
    if numbers.numel() <= 1 or is_relative(numbers.squeeze()):
        return True
    if numbers.dtype in _INTEGERS:
        places, steps = numbers.flatten(), numbers.flatten().diff()
        even = numbers.squeeze().dim() == 1 and bool(steps[0] and (steps == steps[0]).all())
        return even and (len(places) >= _FEW or torch.equal(places, torch.arange(len(places)).to(places)))
    rows = numbers.reshape(-1, numbers.shape[-1]).double()
    if len(rows) < _FEW or len(rows) == samples or not (rows != rows[0]).any():
        return False
    errors = torch.finfo(numbers.dtype).eps * _ROUNDINGS * rows.abs().amax(0)
    inner, around = rows[1:-1], rows[2:] + rows[:-2]
    ratios = (around * inner).sum(0) / inner.square().sum(0)  # sin(a t + b) and its like are solutions of a linear recurrence
    return bool(((around - ratios * inner).abs() <= errors).all()) or _is_grid(rows, samples, errors)


def _is_grid(rows: Tensor, samples: int, errors: Tensor) -> bool:
    # whether points lie evenly on lines that lie evenly, none of as many as there are samples
    steps = rows.diff(dim=0)
    breaks = ((steps - steps[0]).abs() > errors).any(1).nonzero()
    length = int(breaks[0]) + 1 if len(breaks) else len(rows)
    if length in (1, samples) or len(rows) % length or not (steps[0].abs() > errors).any():
        return False
    lines = rows.unflatten(0, (-1, length))
    return len(lines) == 1 or bool(((lines.diff(dim=1) - steps[0]).abs() <= errors).all() and _is_grid(lines[:, 0], samples, errors))


def brings_rows(walk: Walk, node: Node, samples: int) -> bool:
    """Say whether a node may bring in data of samples, as far as shapes tell.

    Args:
        walk: The graph.
        node: The node.
        samples: Number of samples.

    Returns:
        Whether some input depends on no tracked parameter, and what the node makes has as many rows as there are samples, and others than its other
        inputs have; or several rows for each sample, if that input is not known to be constant, or positions; or rows are looked up for as many
        numbers, which are no positions. Multiples of the identity bring nothing into a product.
    """
    if operation(node) in LOOKUPS:
        return _looks_up_data(walk, node, samples)
    tracked = [(n, nr) for n, nr in node.next_functions if walk.is_tracked(n)]
    rows, shape = rows_made(node), shape_of((node, 0))
    product = operation(node) in MATRIX_PRODUCTS
    if len(tracked) == len(node.next_functions) or not (product or not any(_has_rows_of(walk, node, edge, samples) for edge in tracked)):
        return False
    if _multiplies_by_fewer(walk, node, samples):
        return False
    if product and any(_is_scaling(t) for t in saved_tensors(node, results=False)):
        return False
    if samples in rows:
        return True
    if operation(node) in FACTORS:  # a factor that is tracked brings its own rows, or columns
        rows = [*shape[:-2], *(size for size, (n, _) in zip(shape[-2:], node.next_functions[-2:], strict=True) if not walk.is_tracked(n))]
    if not any(size and size % samples == 0 for size in rows):
        return False
    given = list(saved_tensors(node, results=False))
    known = [is_made(walk, t) or is_constant(walk, t) or are_positions(t, samples) for t in given]
    made = [t.grad_fn for t, is_known in zip(given, known, strict=True) if not is_known]
    return not given or not all(n is not None and _are_constant(walk, _made_from(n)) for n in made)


def _has_rows_of(walk: Walk, node: Node, edge: Edge, samples: int) -> bool:
    # whether what a node makes has the rows of an input: its shape, but for columns that are joined; or a place for each of its entries
    given, made = shape_of(edge), shape_of((node, 0))
    if operation(node) == "Cat":
        axis = saved(node, "dim") % len(made)
        return axis > 0 and given[:axis] == made[:axis] and operation(edge[0]) not in ("Expand", "Repeat")
    if operation(node) in ("IndexPut", "Scatter") and edge != node.next_functions[0]:
        return _writes_all_once(node, given) and not _looks_up_data(walk, node, samples)
    return given == made


def _writes_all_once(node: Node, given: torch.Size) -> bool:
    # whether each entry is written to a place of its own, and none is broadcast
    if operation(node) == "Scatter":
        return True
    made, indices = shape_of((node, 0)), saved(node, "indices")
    chosen = [index for index in indices if index is not None]
    if all(index.dtype in _INTEGERS for index in chosen):
        places = torch.broadcast_shapes(*(index.shape for index in chosen)).numel()
        return given.numel() == places * torch.Size(n for n, index in zip_longest(made, indices) if index is None).numel()
    return len(indices) == 1 and given.numel() == int(chosen[0].sum()) * made[chosen[0].dim() :].numel()


def _is_scaling(tensor: Tensor) -> bool:
    # whether a constant is a multiple of the identity
    square = tensor.layout == torch.strided and tensor.dim() == _MATRIX and len(tensor) == tensor.shape[1] > 1
    return square and not tensor.requires_grad and torch.equal(tensor, tensor[0, 0].expand(len(tensor)).diag())


def selects_rows(walk: Walk, node: Node) -> bool:
    """Say whether a node selects rows of a table, maybe for samples.

    Args:
        walk: The graph.
        node: The node.

    Returns:
        Whether it does; not where their numbers are those of a buffer, as the ends of the edges of a graph are.
    """
    return operation(node) in LOOKUPS and not all(is_constant(walk, t) for t in saved_tensors(node, results=False))


def _looks_up_data(walk: Walk, node: Node, samples: int) -> bool:
    numbers = [t for t in saved_tensors(node) if t.dtype in _INTEGERS and not is_constant(walk, t)]
    rows = [t.shape[:2] for t in numbers if t.dim() > 1 and len(t) != 1 and not is_relative(t)]
    # positions have no gaps, in whatever order they come
    return any(samples in shape for shape in rows) or any(t.shape == (samples,) and (t.sort().values.diff() != 1).any() for t in numbers)
