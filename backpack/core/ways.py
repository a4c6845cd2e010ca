"""How columns hold the samples, and which operations leave them along an axis, or on one that their settings tell."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from enum import Enum
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from backpack.core.arrangements import arrangement
from backpack.core.graph import has_saved, operation, saved, shape_of
from backpack.core.linear import LINEAR, SAME_ENTRIES
from backpack.core.samples import Layout, after_sum, seen_through_reshape, unite
from backpack.core.selections import SELECTS, numbered_rows, selection

STATIC = LINEAR - frozenset(
    """Index IndexSelect IndexAdd IndexCopy IndexFill IndexPut Gather Take AsStrided MaskedSelect MaskedScatter Scatter ScatterAdd Where
    MaxUnpool2D MaxUnpool3D Embedding BackwardHookFunctionBackward Nansum PackPaddedSequence""".split()
)
"""Operations whose way with samples follows from shapes and settings: no sum of products, in which zeros in the data can hide samples."""
ELEMENTWISE = frozenset(
    """Relu Gelu Silu Tanh Sigmoid LogSigmoid Softplus Elu LeakyRelu Hardtanh Hardswish Hardsigmoid Mish Abs Exp Log Sqrt Rsqrt Pow
    Erf Sin Cos Sinh Cosh Neg Alias Clone ToCopy NativeDropout Clamp ClampMin ClampMax Sign Sgn Round Floor Ceil Trunc Frac Deg2Rad Rad2Deg
    Reciprocal Log1P Log2 Log10 Expm1 Exp2 Tan Asin Acos Atan Asinh Acosh Atanh Erfc Celu Threshold Hardshrink Softshrink NanToNum
    Complex Conj ResolveConj Angle Erfinv Lgamma Digamma Polygamma Mvlgamma I0 Sinc Logit RreluWithNoise
    SpecialI0E SpecialI1 SpecialI1E SpecialNdtri SpecialLogNdtr SpecialEntr SpecialErfcx Tril Triu""".split()
)
"""Operations that treat every entry alone."""
_OF_ENTRIES = ELEMENTWISE | frozenset(
    "MaskedFill MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss".split()
)
"""These, and others that depend on a mask or a target."""
BROADCASTING = frozenset(
    """Mul Div Add Sub Rsub Expand Fmod Remainder Maximum Minimum Fmax Fmin Where Lerp Addcmul Addcdiv Atan2 Hypot Xlogy SpecialXlog1Py Logaddexp
    Logaddexp2 Ldexp Polar PreluKernel""".split()
)
"""Operations that treat entries alone, whose inputs are broadcast: what the node returns has the shape of the output, until autograd sums it."""
_CLAMPS = frozenset({"Clamp", "ClampMin", "ClampMax"})
# these work on the last two axes, and on each entry of the axes in front alike
_STACKED = frozenset(
    """Bmm Baddbmm ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
    ScaledDotProductCudnnAttention LinalgSolveEx LinalgSolveTriangular LinalgInvEx LinalgCholeskyEx LinalgMatrixExp CholeskySolve
    Cdist EuclideanDist""".split()
)
_OF_CHANNELS = frozenset(f"{kind}BatchNorm{derivative}" for kind in ("Native", "Cudnn", "Miopen") for derivative in ("", "Derivative"))
"""These treat every entry of axis 1 alone, which holds those of all samples in an instance normalization."""
_PARTS = frozenset({"Split", "SplitWithSizes", "UnsafeSplit"})
OF_ONE = frozenset({"Select", "Mul", "Where", "MaskedFill"})
"""Operations that may take what belongs to one sample out of a tensor of all."""


class Way(Enum):
    """How the columns on a graph edge hold the samples."""

    DATA = "on an axis of the tensor, as its layout says"
    SPLIT = "split: every sample has columns of its own"
    MASKED = "split, by masking before the node is called"


SPLIT = Way.SPLIT
State = Layout | Way


class Crossing(NamedTuple):
    """How columns leave a gap node towards one of its inputs.

    Attributes:
        way: How they hold the samples then.
        returned: Layout of the gradient that the node returns, before axes along which the input was broadcast are summed.
        arrives: Layout after that sum, if the way is ``DATA``.
        whole: Whether nothing is summed: axes of length one are all that the input lacks.
    """

    way: Way
    returned: Layout | None
    arrives: Layout | None
    whole: bool = False

    def of_all(self, node: Node, shape: torch.Size, of_data: Container[Node]) -> Crossing:
        """Split what is summed within one sample, towards an input that is the same for all samples, even if no other one uses it.

        Args:
            node: Node that made the input.
            shape: Shape of the input.
            of_data: Has the node if the input is made of data, which may be that of this sample. What was broadcast to a row for each sample is not,
                unless an axis of length one stands in front of these rows: then they may be positions.

        Returns:
            How columns leave.
        """
        if self.arrives is None or self.whole or (shape and self.arrives.labels == self.returned.labels):  # nothing is summed
            return self
        axis = self.returned.axis
        rows_of_all = self.returned.samples > 1 and arrangement(self.returned)[1].plain and (axis == 0 or prod(shape[:axis]) > 1)
        return Crossing(SPLIT, self.returned, None) if rows_of_all or node not in of_data else self


def same_axis(node: Node, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a node carries the samples where that follows from what it is: they stay on their axis.

    Args:
        node: The node.
        layout: Where they lie in its output.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it has to be found out.
    """
    name, full = operation(node), shape_of((node, 0))
    if name in BROADCASTING or (name in _CLAMPS and len(shapes) > 1):  # bounds that are tensors are broadcast
        return [None if shape is None else summed(layout, full, shape) for shape in shapes]
    if name in _OF_CHANNELS and layout.axis == 1:
        there = {1: layout._replace(axis=0), len(full): layout}
        return [None if shape is None else Crossing(Way.DATA, there[len(shape)], there[len(shape)]) for shape in shapes]
    if name in _STACKED:
        stays = layout.axis < len(full) - 2
    elif name in ("Softmax", "SafeSoftmax", "LogSoftmax", "SoftmaxBackwardData", "LogSoftmaxBackwardData"):
        stays = not full or layout.axis != saved(node, "dim") % len(full)
    else:
        stays = name.removesuffix("Derivative") in _OF_ENTRIES  # derivatives of derivatives, too
    same = all(shape is None or shape == full or (len(shape) == len(full) and shape[layout.axis] == full[layout.axis]) for shape in shapes)
    return [None if shape is None else Crossing(Way.DATA, layout, layout) for shape in shapes] if stays and same else None


def _axis_of_reduced(node: Node, axis: int, axes: int) -> int | None:
    dims = saved(node, "dim") if has_saved(node, "dim") else ()
    dims = (dims,) if isinstance(dims, int) else dims or range(axes)
    kept = [other for other in range(axes) if other not in [dim % axes for dim in dims]]
    if kept and saved(node, "keepdim"):
        return axis if axis in kept else None
    return kept[axis] if axis < len(kept) else None


def _axis_of_swapped(one: int, other: int, axis: int, axes: int) -> int:
    return {one % axes: other % axes, other % axes: one % axes}.get(axis, axis)


def _axis_unless(dims: Iterable[int], axis: int, axes: int) -> int | None:
    return None if axis in [dim % axes for dim in dims] else axis


def _axis_in_front(last: int, _: Node, axis: int, axes: int) -> int | None:
    return axis if axis < axes - last else None


_AXES: dict[str, Callable[[Node, int, int], int | None]] = {
    "Permute": lambda node, axis, axes: saved(node, "dims")[axis] % axes,
    "Transpose": lambda node, axis, axes: _axis_of_swapped(saved(node, "dim0"), saved(node, "dim1"), axis, axes),
    "T": lambda _, axis, axes: _axis_of_swapped(0, -1, axis, axes),
    "Stack": lambda node, axis, axes: None if axis == (dim := saved(node, "dim") % (axes + 1)) else axis - (axis > dim),
    **dict.fromkeys(("ViewAsReal", "ViewAsComplex"), lambda _, axis, axes: axis if axis < axes else None),
    **dict.fromkeys(("FftR2C", "FftC2R", "FftC2C"), lambda node, axis, axes: _axis_unless(saved(node, "dim"), axis, axes)),
    **dict.fromkeys("GridSampler2D GridSampler3D NllLoss MultiMarginLoss MultilabelMarginLoss".split(), lambda _, axis, axes: None if axis else 0),
    "NllLoss2D": lambda _, axis, axes: axis + (axis > 0),
    "CtcLoss": lambda _, axis, axes: axis + 1,
    "ConstantPadNd": lambda node, axis, axes: _axis_in_front(len(saved(node, "pad")) // 2, node, axis, axes),
    **dict.fromkeys(("Select", "Unbind"), lambda node, axis, axes: axis + (axis >= saved(node, "dim") % axes)),
    **dict.fromkeys("LinalgDet LinalgSlogdet LinalgEigh LinalgSvd LinalgQr LinalgLuFactorEx".split(), partial(_axis_in_front, 2)),
    **dict.fromkeys(
        (
            *_PARTS,
            *"""Slice Cat Cumsum Cumprod Cummax Cummin Logcumsumexp Sort Topk Glu LinalgCross Gather Scatter ScatterAdd ScatterReduce IndexCopy
            IndexFill""".split(),
        ),
        lambda node, axis, axes: _axis_unless((saved(node, "dim"),), axis, axes),
    ),
    **dict.fromkeys(("Flip", "Roll"), lambda node, axis, axes: _axis_unless(saved(node, "dims") or range(axes), axis, axes)),
    **{
        f"{name}{axes}D{end}{derivative}": partial(_axis_in_front, axes)
        for axes in (1, 2, 3)
        for name in """MaxPool AdaptiveMaxPool FractionalMaxPool AvgPool AdaptiveAvgPool ReflectionPad ReplicationPad UpsampleNearest
        UpsampleNearestExact UpsampleLinear UpsampleBilinear UpsampleBicubic UpsampleTrilinear""".split()
        for end in ("", "WithIndices", "Aa")
        for derivative in ("", "Derivative")
    },
    **dict.fromkeys(
        """Sum Nansum Mean Logsumexp Norm LinalgVectorNorm Prod Var Std VarMean StdMean Max Min Amax Amin Aminmax Kthvalue Median Nanmedian
        Mode""".split(),
        _axis_of_reduced,
    ),
}
# from an axis of the output, and the number of axes of the inputs, to that axis of these whose entries lie along it; ``None`` if there is none
ALONG_AXES = frozenset(_AXES)
"""Operations that leave the entries along some axes apart, which their settings tell."""


def rearranged(node: Node, number: int, layout: Layout, shapes: tuple[torch.Size | None, ...]) -> list[Crossing | None] | None:
    """Say how a node carries the samples that reshapes, turns, cuts, joins, pools or sums along other axes.

    Args:
        node: The node.
        number: Number of one of its outputs.
        layout: Where the samples lie in this one, and in others.
        shapes: Shape of each needed input, ``None`` for others.

    Returns:
        The crossing of each needed input; ``None`` if it is another node, or has to be found out.
    """
    name, full, given = operation(node), shape_of((node, number)), [shape for shape in shapes if shape is not None]
    if not full.numel() or not given:
        return None
    there: Layout | None = None
    if name in SAME_ENTRIES and not layout.of_one:
        there = seen_through_reshape(layout, full, given[0])
    elif name in _AXES and not layout.of_one and given[0] and (axis := _AXES[name](node, layout.axis, len(given[0]))) is not None:
        there = layout._replace(axis=axis)
    if there is None or any(len(shape) != len(given[0]) or shape[there.axis] != len(there.labels) for shape in given):
        return None
    return [None if shape is None else Crossing(Way.DATA, there, there) for shape in shapes]


def layout_behind(node: Node, layout: Layout, given: torch.Size, made: torch.Size) -> Layout | None:
    """Say where the samples lie in what a node makes that reshapes, turns, cuts, selects, joins, or sums, pads, pools or resizes along other axes.

    Args:
        node: The node.
        layout: Where they lie in each tensor that it is given.
        given: Shape of one of these.
        made: Shape of what it makes.

    Returns:
        The layout; ``None`` if it is another node, or has to be found out.
    """
    name = operation(node)
    if layout.of_one or not made.numel():
        return None
    if name in SAME_ENTRIES:
        return seen_through_reshape(layout, given, made)
    if name in SELECTS:
        chosen = selection(node)
        if chosen is not None:
            there = chosen.behind(layout)
            return None if there is None or there.of_one else there
    axes = range(len(made)) if name in _AXES else ()
    axis = next((axis for axis in axes if _AXES[name](node, axis, len(given)) == layout.axis), None)
    return None if axis is None or made[axis] != len(layout.labels) else layout._replace(axis=axis)


def united(ones: Iterable[Layout | None], others: Iterable[Layout | None]) -> list[Layout]:
    """Put together what two consumers of a tensor know of its samples, who may see them on more than one axis.

    Args:
        ones: Where one sees them.
        others: Where the other one does.

    Returns:
        All that both know, first what they see on the same axis; nothing if they contradict each other.
    """
    pairs = [(one, other) for one in ones for other in others if one is not None and other is not None]
    pairs.sort(key=lambda pair: pair[0].axis != pair[1].axis)
    return [*dict.fromkeys(both for pair in pairs if (both := unite(*pair)) is not None)]


def axis_kept(node: Node, layout: Layout, shape: torch.Size) -> Layout | None:
    """Say where the samples lie in the input of a node if they do along the axis that the output has them on.

    Of a single sample it may be another one, as well: ``x[:1, t]`` takes a row, and a step.

    Args:
        node: The node.
        layout: Where the samples lie in its output.
        shape: Shape of the input.

    Returns:
        The layout; ``None`` if the operation does not tell.
    """
    name, full = operation(node), shape_of((node, 0))
    if not full or not full.numel():
        return None
    if name == "Slice" and layout.axis == (rows := numbered_rows(node))[0] % len(shape):
        labels = torch.full((shape[layout.axis],), -1).index_copy(0, rows[1], torch.tensor(layout.labels))
        return layout._replace(labels=tuple(labels.tolist()))
    if name in SAME_ENTRIES:
        return seen_through_reshape(layout, full, shape)
    stays = name in ELEMENTWISE or (name in BROADCASTING and shape == full)
    axis = layout.axis if stays else _AXES[name](node, layout.axis, len(shape)) if name in _AXES else None
    return None if axis is None or shape[axis] != len(layout.labels) else layout._replace(axis=axis)


def summed(layout: Layout, full: torch.Size, shape: torch.Size) -> Crossing:
    """Say how columns leave that are summed to the shape of an input.

    Args:
        layout: Where the samples lie in what the node returns.
        full: Its shape.
        shape: Shape of the input.

    Returns:
        The crossing.
    """
    arrives = after_sum(layout, full, shape)
    return Crossing(SPLIT if arrives is None else Way.DATA, layout, arrives, full.numel() == shape.numel())
