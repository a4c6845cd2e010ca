"""How nodes hand on columns whose operations tell it: no columns have to be sent through them to find out."""

from __future__ import annotations

import torch
from torch.autograd.graph import Node

from backpack.core.graph import HOOKED, operation, saved, shape_of
from backpack.core.samples import Layout, along, label_tensor, layout_of, settle
from backpack.core.selections import SELECTS, numbered_rows, rows_of_slice, selection
from backpack.core.ways import Crossing, Way, rearranged, same_axis, summed

_ADDS = frozenset({"IndexAdd", "IndexCopy", "ScatterAdd", "ScatterReduce"})
_DECOMPOSITIONS = frozenset({"LinalgEig", "LinalgEigh", "LinalgSvd", "LinalgQr"})
"""Operations that make several tensors of each matrix on the last two axes."""


def _of_selected(node: Node, layout: Layout) -> list[Crossing | None] | None:
    """Say how a node carries the samples that selects entries by their numbers.

    Args:
        node: The node.
        layout: Where the samples lie in its output.

    Returns:
        The crossing of its input; ``None`` if it is another node, or has to be found out.
    """
    full = shape_of((node, 0))
    if operation(node) not in SELECTS or not full or not full.numel() or not layout.samples:
        return None
    if layout.samples == 1:
        labels = label_tensor((0,), torch.device("cpu")).expand(shape_of(node.next_functions[0]))
        there = layout_of(labels, labels, 1, layout.axis)  # any axis will do
        return [Crossing(Way.DATA, there, there)]
    chosen = selection(node)
    if chosen is None:
        return None
    if layout.of_one:
        if operation(node) == "Slice":
            return None
        if layout.axis != chosen.axis < len(full) - 1 and not settle(layout).plain:  # those that were not selected may be of other samples
            layout = Layout(chosen.axis, (max(layout.labels),) * full[chosen.axis], layout.samples)
    found = chosen.before(layout)
    return [Crossing(Way.DATA, found[0], found[0]) if found else Crossing(Way.MASKED, None, None)]


def _of_part(node: Node, layout: Layout) -> list[Crossing | None] | None:
    """Say how a node carries the only sample of a part that was cut out, ``x[i]`` or ``x[a:b]``: what was left out is of samples that are not known.

    Args:
        node: The node.
        layout: Where the sample lies in its output, perhaps in some rows.

    Returns:
        The crossing of its input; ``None`` if it is another node, or has to be found out.
    """
    if operation(node) not in ("Select", "Slice") or not layout.of_one or layout.samples <= 1 or not shape_of((node, 0)).numel():
        return None
    shape, rows = shape_of(node.next_functions[0]), saved(node, "index") if operation(node) == "Select" else rows_of_slice(node)
    dim = saved(node, "dim") % len(shape)
    if dim == layout.axis < len(shape) - 1 and (isinstance(rows, slice) or -1 not in layout.labels):  # the usual case
        labels = [-1] * shape[dim]
        labels[rows] = layout.labels if isinstance(rows, slice) else layout.labels[0]
        there = layout._replace(labels=tuple(labels))
        return [Crossing(Way.DATA, there, there, whole=True)]
    known = label_tensor(layout.labels, torch.device("cpu")) >= 0
    axis = layout.axis + (operation(node) == "Select" and layout.axis >= dim) if len(shape) > 1 else 0
    # all other axes are like one of a single row
    seen = torch.zeros([size if place in (dim, axis) else 1 for place, size in enumerate(shape)], dtype=torch.bool)
    seen.movedim(dim, 0)[rows] = along(known, axis, len(shape)).movedim(dim, 0)
    there = layout_of(torch.where(seen, max(layout.labels), 0), seen, layout.samples, layout.axis)
    if there is not None and there.axis not in (dim, axis):
        there = there._replace(labels=there.labels * shape[there.axis])
    return [there and Crossing(Way.DATA, there, there, whole=True)]


def _of_added(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a node carries the samples that adds rows to others by their numbers, or puts entries there.

    Args:
        node: The node.
        layout: Where the samples lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it is another node, or has to be found out.
    """
    full = shape_of((node, 0))
    if operation(node) == "IndexPut" and not layout.of_one and full.numel():
        chosen = selection(node)
        made, there = full[: chosen.axis] + chosen.made + full[chosen.axis + len(chosen.sizes) :], chosen.behind(layout)
        known = (Crossing(Way.DATA, layout, layout), None if there is None or shapes[1] is None else summed(there, made, shapes[1]))
        return None if shapes[1] is not None and there is None else [None if s is None else c for s, c in zip(shapes, known, strict=True)]
    rows = numbered_rows(node) if operation(node) in _ADDS and layout.samples > 1 and full and full.numel() else None
    if rows is None:
        return None
    dim, index = rows[0] % len(full), rows[1]
    crossings: list[Crossing | None] = []
    for number, shape in enumerate(shapes):
        there = layout
        if shape is None:
            crossings.append(None)
            continue
        if len(shape) != len(full) or shape[:dim] + shape[dim + 1 :] != full[:dim] + full[dim + 1 :]:
            return None
        if layout.axis == dim and number:
            if len(index) != shape[dim]:
                return None
            there = layout._replace(labels=tuple(label_tensor(layout.labels, index.device)[index].tolist()))
        crossings.append(Crossing(Way.DATA, there, there))
    return crossings


def _of_groups(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a convolution carries the samples if each has groups of channels of its own, as where it has kernels of its own.

    Args:
        node: The node.
        layout: Where the samples lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it is another node, or a group has channels of several samples.
    """
    groups = saved(node, "groups") if operation(node) == "Convolution" and layout.axis == 1 and not layout.of_one else 1
    channels = len(layout.labels) // groups
    owners = layout.labels[::channels] if groups > 1 else ()
    if not owners or layout.labels != tuple(label for label in owners for _ in range(channels)):
        return None
    crossings: list[Crossing | None] = []
    for number, shape in enumerate(shapes):  # input, kernels, bias
        axis = int(number == 0)
        there = None if shape is None else Layout(axis, tuple(label for label in owners for _ in range(shape[axis] // groups)), layout.samples)
        crossings.append(there and Crossing(Way.DATA, there, there))
    return crossings


def _of_sparse(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a product with a sparse matrix carries the samples to the rows that it multiplies: to those whose numbers tell so.

    Args:
        node: The node.
        layout: Where the samples lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it is another node, or a row is used for several samples.
    """
    name = {"SparseAddmm": "mat1", "Mm": "self"}.get(operation(node))
    matrix = saved(node, name) if name and shapes.count(None) == len(shapes) - 1 and shapes[-1] is not None else None
    if matrix is None or matrix.layout not in (torch.sparse_coo, torch.sparse_csr):
        return None
    there: Layout | None = layout
    if layout.axis == 0:
        matrix = matrix.to_sparse_coo().coalesce()
        rows, columns = matrix.indices()[:, matrix.values() != 0]
        owners = label_tensor(layout.labels, rows.device)[rows]
        columns, owners = columns[owners >= 0], owners[owners >= 0]
        low, high = (owners.new_full((matrix.shape[1],), -1).scatter_reduce(0, columns, owners, how, include_self=False) for how in ("amin", "amax"))
        there = layout._replace(labels=tuple(high.tolist())) if torch.equal(low, high) else None
    return there and [None if shape is None else Crossing(Way.DATA, there, there) for shape in shapes]


def known_crossings(node: Node, states: dict[int, Layout], shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a node carries the samples to its inputs, if its operation tells.

    Args:
        node: The node.
        states: Output number to layout.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it has to be found out.
    """
    if isinstance(node, HOOKED):
        return [Crossing(Way.DATA, states[nr], states[nr]) if nr in states and shape is not None else None for nr, shape in enumerate(shapes)]
    number, layout = next(iter(states.items()))
    if len(states) == 1 and not number:
        known = same_axis(node, layout, shapes) or _of_part(node, layout) or _of_selected(node, layout)
        known = known or _of_added(node, layout, shapes) or _of_groups(node, layout, shapes) or _of_sparse(node, layout, shapes)
        if known is not None:
            return known
    if not all(state == layout for state in states.values()):
        return None
    if operation(node) in _DECOMPOSITIONS and layout.axis < len(shapes[0]) - 2:
        return [Crossing(Way.DATA, layout, layout)]
    return rearranged(node, number, layout, shapes)
