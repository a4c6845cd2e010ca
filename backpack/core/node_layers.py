"""Graph nodes of layers that are called as functions: convolutions and normalisations, read like calls of their modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, einsum
from torch.autograd.graph import Node

from backpack.core.checkpoints import checkpointed
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Samples
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.bilinear import BilinearDerivatives
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.grouped import GroupedDerivatives
from backpack.core.derivatives.matmul import VectorDerivatives
from backpack.core.derivatives.normalization import GroupNormDerivatives, LayerNormDerivatives, standardized
from backpack.core.graph import call_node, operation, outputs_of, saved, shape_of, tensor_at
from backpack.core.leaves import turns, way_to_leaf
from backpack.core.node_calls import LINEAR, Composite, NodeCall, States, layer, reads, unit_of
from backpack.core.samples import Layout, rows_along
from backpack.core.units import Unit
from backpack.core.walk import Walk
from backpack.core.ways import State
from backpack.utils.subsampling import subsample


class SavedLayerNormDerivatives(LayerNormDerivatives):
    """Layer normalisation by the mean and the inverse deviation that the node has saved, taken for further inputs."""

    def statistics(self, module: Any, subsampling: Samples = None) -> tuple[Tensor, Tensor]:
        mean, scale = (subsample(part, subsampling=subsampling).reshape(-1, 1).to(module.input0.dtype) for part in (module.input1, module.input2))
        rows = self._groups(module, subsampling)
        if rows.requires_grad and torch.is_grad_enabled():  # what the node has saved is not connected to the graph, nor does it tell eps
            return standardized(rows, scale**-2 - rows.detach().var(-1, correction=0, keepdim=True))
        return (rows - mean) * scale, scale


class SlopeScaleDerivatives(LayerNormDerivatives):
    """``weight * g`` in front of the Jacobian of a normalisation, in the gradient of its input."""

    def normalised(self, module: Any, subsampling: Samples = None) -> Tensor:
        return subsample(module.input0, subsampling=subsampling)


class SlopeOfFixedNormDerivatives(BatchNormNdDerivatives):
    """Gradient of the input of a batch normalisation in evaluation mode, in which only the deviation is divided by."""

    def normalised(self, module: Any, subsampling: Samples = None) -> Tensor:
        return subsample(module.input0, subsampling=subsampling) * self._running(module)[1]


_CONVOLUTIONS = {(kind, n): kind(n) for kind in (ConvNDDerivatives, ConvTransposeNDDerivatives) for n in (1, 2, 3)}
_LAYER_NORM, _LAYER_NORM_SLOPE, _GROUP_NORM, _BATCH_NORM, _SLOPE_OF_FIXED_NORM, _VECTOR, _BILINEAR = (
    SavedLayerNormDerivatives(),
    SlopeScaleDerivatives(),
    GroupNormDerivatives(),
    BatchNormNdDerivatives(),
    SlopeOfFixedNormDerivatives(),
    VectorDerivatives(),
    BilinearDerivatives(),
)
_OUTER_PRODUCTS = [[1, 3], [0], [1, 2], [2, 3]]  # which axes bilinear adds to its factors, and sums over


def _saved_or_shape(node: Node, name: str, number: int) -> Callable[[], Tensor | None]:
    """Return a function that reads a saved factor.

    Args:
        node: The node.
        name: Under which name it was saved.
        number: Which of the next edges is its own.

    Returns:
        The function: returns the tensor; without data if the node has not needed it; ``None`` if there is no such factor.
    """

    def read() -> Tensor | None:
        tensor, edge = saved(node, name), node.next_functions[number]
        return torch.empty(shape_of(edge), device="meta") if tensor is None and edge[0] is not None else tensor

    return read


def single(states: Mapping[int, State]) -> Layout | None:
    """Read where the samples lie in the output of a node that has one.

    Args:
        states: Output number to layout.

    Returns:
        The layout; ``None`` if others have arrived.
    """
    return states[0] if set(states) == {0} else None


def same_precision(node: Node, call: NodeCall, below: int | None, factors: dict[str, int], layout: Layout, walk: Walk) -> Unit | None:
    """Make a unit unless precisions are mixed, as under autocast.

    Args:
        node: The node.
        call: The layer.
        below: Which of the next edges belongs to the input, if it can be differentiated.
        factors: Name to number of the next edge, of weight and bias.
        layout: Where the samples lie in its output.
        walk: The graph.

    Returns:
        The unit, or ``None``.
    """
    edges = [node.next_functions[number] for number in factors.values()]
    source = (None, 0) if below is None else node.next_functions[below]
    types = {call.outputs[0].dtype, *(tensor_at(edge).dtype for edge in (source, *edges) if edge[0] is not None)}
    given = call.input0 if source[0] is None else None  # of a checkpointed part it would have to be computed again
    if given is not None and given.is_floating_point():
        types.add(given.dtype)
    return None if len(types) > 1 else layer(node, call, below, factors, layout, walk)


@reads("Convolution", "ConvolutionDerivative")
def _convolution(node: Node, states: States, walk: Walk) -> Unit | None:
    back = operation(node) == "ConvolutionDerivative"  # the gradient of the input is the transposed convolution of that of the output
    layout, axes, transposed = single(states[node]), len(shape_of((node, 0))) - 2, saved(node, "transposed") != back
    if layout is None or layout.axis != 0 or axes > 3:
        return None
    source, number = ("grad_output", 2) if back else ("input", 1)
    weight, groups, edge = _saved_or_shape(node, "weight", number), saved(node, "groups"), node.next_functions[number]
    settings = {name: saved(node, name) for name in ("stride", "padding", "dilation", "output_padding")}
    settings = {name: value * axes if len(value) < axes else value for name, value in settings.items()}  # one number is that of all axes
    shape = weight().shape if edge[0] is None else shape_of(edge)
    channels = (shape[0], shape[1] * groups) if transposed else (shape[1] * groups, shape[0])
    settings |= {"in_channels": channels[0], "out_channels": channels[1]}
    given = _saved_or_shape(node, source, 0)
    if back and transposed:
        sizes = zip(shape_of((node, 0))[2:], given().shape[2:], shape[2:], *map(settings.get, ("stride", "padding", "dilation")), strict=True)
        settings["output_padding"] = [made - (n - 1) * s + 2 * p - d * (k - 1) - 1 for made, n, k, s, p, d in sizes]
    call = NodeCall(
        node,
        _CONVOLUTIONS[ConvTransposeNDDerivatives if transposed else ConvNDDerivatives, axes],
        input0=given,
        weight=weight,
        groups=lambda: groups,
        kernel_size=lambda: shape[2:],
        padding_mode=lambda: "zeros",
        **{name: lambda value=value: value for name, value in settings.items()},
    )
    return same_precision(node, call, 0, {"weight": number} if back else {"weight": number, "bias": 2}, layout, walk)


@reads("Mv")
def _product_with_vector(node: Node, states: States, walk: Walk) -> Unit | None:
    """Read ``x @ w``, or ``W @ x`` for a single input.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.

    Returns:
        The unit; ``None`` if both factors are activations, or something would have to be computed again.
    """
    (size,), layout = shape_of((node, 0)), states[node][0]
    rows = None if checkpointed(node) else rows_along(0, size, layout)
    if rows is None:
        return None
    read = {"input0": lambda: saved(node, "self"), "weight": _saved_or_shape(node, "vec", 1)}
    unit = same_precision(node, NodeCall(node, _VECTOR, **read), 0, {"weight": 1}, rows, walk)
    if unit is not None or not layout.of_one:
        return unit
    output = tensor_at((node, 0))
    one = torch.empty(1, size, dtype=output.dtype, device=output.device)
    read = {"input0": lambda: saved(node, "vec")[None], "weight": _saved_or_shape(node, "self", 0)}
    unit = same_precision(node, NodeCall(node, LINEAR, one, **read), 1, {"weight": 0}, layout._replace(labels=(max(layout.labels),)), walk)
    if unit is not None:
        unit.base = True  # what arrives there has no axis for the only row
        unit.arrives = None if unit.below is None else rows_along(0, *shape_of(unit.below), layout)
    return unit


@reads("GroupedMm")
def _grouped_product(node: Node, states: States, walk: Walk) -> Unit | None:
    """Read products of rows with one matrix of a stack each, rows sorted by matrix.

    Args:
        node: The node.
        states: Where the samples lie in the output ``[R, O]``.
        walk: The graph.

    Returns:
        The unit; ``None`` if the matrices are no stack, or do not multiply all rows, or if it would have to be computed again.
    """
    (rows, _), (weight, sizes) = shape_of((node, 0)), (node.next_functions[1], saved(node, "mat2_sym_sizes"))
    layout = rows_along(0, rows, states[node][0]) if len(sizes) == 3 and not checkpointed(node) else None  # noqa: PLR2004
    if layout is None or saved(node, "offs")[-1:].tolist() != [rows]:
        return None
    way, turned = None, False
    if weight[0] is not None:
        way = way_to_leaf(weight, False) or way_to_leaf(weight, True)
        turned = way is not None and turns(weight)
    matrices = _saved_or_shape(node, "mat2", 1)
    call = NodeCall(
        node,
        GroupedDerivatives(sizes[0], transposed=not turned),
        input0=lambda: saved(node, "self"),
        input1=lambda: torch.searchsorted(saved(node, "offs"), torch.arange(rows, device=saved(node, "offs").device), right=True)[:, None],
        weight=lambda: matrices().mT if turned else matrices(),
        matrices=matrices,
    )
    return layer(node, call, 0, {"weight": 1}, layout, walk, ways={} if way is None else {"weight": way})


@reads("Trilinear")
def _bilinear(node: Node, states: States, walk: Walk) -> Composite | None:
    """Read ``torch.nn.functional.bilinear``, a linear layer on the outer products of its inputs, both of which may be differentiated.

    Args:
        node: The node.
        states: Where the samples lie in the output.
        walk: The graph.

    Returns:
        The composite; ``None`` if it is another product of three factors, or samples are in the weight.
    """
    layout, products = single(states[node]), [list(saved(node, name)) for name in ("expand1", "expand2", "expand3", "sumdim")]
    if layout is None or layout.axis != 0 or walk.connected or products != _OUTER_PRODUCTS:
        return None
    given = {"input0": _saved_or_shape(node, "i1", 0), "weight": _saved_or_shape(node, "i2", 1), "input1": _saved_or_shape(node, "i3", 2)}
    unit = unit_of(node, NodeCall(node, _BILINEAR, **given), {"weight": 1}, layout, walk)
    below = [number for number in (0, 2) if walk.reach.get(node.next_functions[number][0])]

    def send(number: int, columns: Tensor) -> Tensor:
        other, turn = ("i1", "vno,oij,ni->vnj") if number else ("i3", "vno,oij,nj->vni")
        return einsum(turn, columns, saved(node, "i2"), saved(node, other))

    def pull(columns: list[Tensor]) -> tuple[Tensor, list[Callable[[slice], Tensor]]]:
        return columns[0], [lambda part, number=number: send(number, columns[0][part]) for number in below]

    edges = [(node.next_functions[number], layout) for number in below]
    return None if unit is None else Composite([unit], pull, edges, [(node, 0)])


@reads("NativeLayerNorm")
def _layer_norm(node: Node, states: States, walk: Walk) -> Unit | None:
    layout, normalized = single(states[node]), torch.Size(saved(node, "normalized_shape"))
    if layout is None or layout.axis >= len(shape_of((node, 0))) - len(normalized):
        return None
    call = NodeCall(
        node,
        _LAYER_NORM,
        input0=lambda: saved(node, "input"),
        weight=_saved_or_shape(node, "weight", 1),
        bias=_saved_or_shape(node, "bias", 2),
        input1=lambda: saved(node, "result1"),
        input2=lambda: saved(node, "result2"),
        normalized_shape=lambda: normalized,
    )
    return same_precision(node, call, 0, {"weight": 1, "bias": 2}, layout, walk)


@reads("NativeLayerNormDerivative")
def _slope_of_layer_norm(node: Node, states: States, walk: Walk) -> Composite | None:
    """Read the gradient of the input of a layer normalisation, the symmetric Jacobian of ``x_hat`` on ``weight * g``, which depends on all three.

    Args:
        node: The node.
        states: Where the samples lie in its outputs.
        walk: The graph.

    Returns:
        The composite; ``None`` if gradients of parameters are used, too, or if something of the node would have to be differentiated.
    """
    layout, normalized = single(states[node]), torch.Size(saved(node, "normalized_shape"))
    if layout is None or layout.axis >= len(shape_of((node, 0))) - len(normalized) or walk.connected:
        return None
    read = {"input0": lambda: saved(node, "grad_out"), "weight": lambda: saved(node, "weight"), "normalized_shape": lambda: normalized}
    unit = same_precision(node, NodeCall(node, _LAYER_NORM_SLOPE, **read), 0, {"weight": 4}, layout, walk)
    below = [number for number in (0, 1) if walk.reach.get(node.next_functions[number][0])]

    def pull(columns: list[Tensor]) -> tuple[Tensor, list[Callable[[slice], Tensor]]]:
        (mat,), given, shape = columns, (saved(node, name) for name in ("input", "mean", "rstd")), list(normalized)
        x, mean, scale = (part.expand(len(mat), *part.shape).contiguous() for part in given)
        inner = torch.ops.aten.native_layer_norm_backward(mat.contiguous(), x, shape, mean, scale, None, None, [True, False, False])[0]
        return inner, [lambda part, number=number: call_node(node, [mat[part], None, None])[number] for number in below]

    return None if unit is None else Composite([unit], pull, [(node.next_functions[number], layout) for number in below], [(node, 0)])


_FACTORS = {"weight": 1, "bias": 2}  # numbers of the next edges


def _norm_of_channels(
    node: Node,
    rule: BaseParameterDerivatives,
    layout: Layout | None,
    walk: Walk,
    source: str = "input",
    factors: dict[str, int] = _FACTORS,
    **settings: str,
) -> Unit | None:
    """Read a normalization with a weight and a bias for each channel, on axis 1.

    Args:
        node: The node.
        rule: Its rule.
        layout: Where the samples lie in its output.
        walk: The graph.
        source: Under which name the node has saved its input.
        factors: Name to number of the next edge, of weight and bias.
        settings: What the rule reads, and under which name the node has saved it.

    Returns:
        The unit; ``None`` where the samples do not lie on axis 0.
    """
    if layout is None or layout.axis != 0:
        return None
    call = NodeCall(
        node,
        rule,
        input0=lambda: saved(node, source),
        weight=_saved_or_shape(node, "weight", factors["weight"]),
        bias=lambda: torch.empty(shape_of((node, 0))[1], device="meta"),
        **{name: partial(saved, node, place) for name, place in settings.items()},
    )
    return same_precision(node, call, 0, factors, layout, walk)


@reads("NativeGroupNorm")
def _group_norm(node: Node, states: States, walk: Walk) -> Unit | Composite | None:
    """Read ``torch.nn.functional.group_norm``; derivatives of its derivatives arrive at mean and deviation, too, and only pass to the input.

    Args:
        node: The node, with outputs ``[N, C, *]``, and mean and inverse deviation ``[N, groups]``.
        states: Where the samples lie in them.
        walk: The graph.

    Returns:
        The unit or composite; ``None`` where the samples do not lie on axis 0, or where something of the node would have to be differentiated.
    """
    layout, *others = set(states[node].values())
    unit = None if others else _norm_of_channels(node, _GROUP_NORM, layout, walk, num_groups="group", eps="eps")
    if unit is None or set(states[node]) == {0}:
        return unit
    if walk.connected:
        return None

    below = [] if unit.below is None else [(unit.below, layout)]

    def pull(columns: list[Tensor]) -> tuple[Tensor, list[Callable[[slice], Tensor]]]:
        return columns[0], [lambda part: call_node(node, [column[part] for column in columns])[0] for _ in below]

    return Composite([unit], pull, below, [(node, nr) for nr in range(len(outputs_of(node)))])


@reads("NativeBatchNorm", "NativeBatchNormDerivative")
def _batch_norm(node: Node, states: States, walk: Walk) -> Unit | None:
    slope = operation(node) == "NativeBatchNormDerivative"  # multiplies the gradient by weight and inverse deviation
    if saved(node, "train" if slope else "training") or saved(node, "running_mean") is None:
        return None
    rule, source, factors = (_SLOPE_OF_FIXED_NORM, "grad_out", {"weight": 2}) if slope else (_BATCH_NORM, "input", _FACTORS)
    statistics = {name: name for name in ("running_mean", "running_var", "eps")}
    return _norm_of_channels(node, rule, single(states[node]), walk, source, factors, **statistics)
