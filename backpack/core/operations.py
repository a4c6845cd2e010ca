"""What autograd's graph shows of each class of modules that has a rule: its operations, what they were told, and the shape of the output.

A rule describes what the ``forward`` of a class computes. What the graph shows may be something else: a hook that ran before the recorder's has
replaced the output, or a function that ``forward`` calls was patched. Then operations are there that no row of this table knows, one was told other
things than the layer says, or the output has another shape, and the rule does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial

from torch import nn
from torch.autograd.graph import Node
from torch.nn import Module

from backpack.core.calls import RANDOM, ModuleCall
from backpack.core.graph import shape_of
from backpack.core.linear import SAME_ENTRIES
from backpack.core.settings import (
    CONVOLVED,
    ENTRIES,
    SUM,
    SUM_OF_PRODUCT,
    Check,
    Constant,
    along,
    factor,
    mean_slope,
    of_bags,
    of_channels,
    of_classes,
    of_neighbours,
    of_table,
    padded,
    reduced,
    resized,
    root_of_mean,
    same,
    sizes,
    smoothed,
    told,
)
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

AGAIN = "again"
"""Stands among the operations for one more use of an input or of a parameter."""
_ELU, _SELU = ("alpha", "scale", "input_scale"), (1.6732632423543772848170429916717, 1.0507009873554804934193352949, 1)
_MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")
_NEUTRAL = SAME_ENTRIES | {"Alias", "Clone", "ToCopy"}
"""Operations that keep the entries and their order, and so may stand anywhere, if the shape at the end is right."""


class _Names(dict):
    """Name of the type of a node to that of its operation; empty for those that may stand anywhere."""

    def __missing__(self, name: str) -> str:
        short, _, number = name.rpartition("Backward")
        short = short if short and number else name  # a custom function may be called like an operation of torch
        self[name] = short = "" if short in _NEUTRAL else short
        return short


NAMES = _Names()

_CIRCULAR = "CopySlices Slice( CopySlices Slice)*( Slice)*"
_BATCH_NORM = "(Native|Cudnn|Miopen)BatchNorm"
_PADS = {"zeros": "ConstantPadNd", "constant": "ConstantPadNd", "circular": _CIRCULAR} | {
    mode: f"{name}Pad[123]D" for mode, name in (("reflect", "Reflection"), ("replicate", "Replication"))
}
_SMOOTHED = "(Add Mul (Div )?(Sum )?MaskedFill Neg Sum (Mul )?LogSoftmax Mul )?"
_NO_SAMPLES = "(Add (Select )?Mul( Select)?)?"

Pattern = str | Callable[[ModuleCall], str]
Shape = Callable[[ModuleCall, Node], bool]
Told = Check | Constant
Row = tuple[Pattern, Shape, dict[str, Told]]


def _as_given(call: ModuleCall, node: Node) -> bool:
    return call.outputs[0].shape == call.inputs[0].shape


def _but_last(call: ModuleCall, node: Node) -> bool:
    return call.outputs[0].shape[:-1] == call.inputs[0].shape[:-1]


def _as_indexed(call: ModuleCall, node: Node) -> bool:
    return call.outputs[0].shape == call.as_called.forward(call.inputs[0].like()).shape


def _any(call: ModuleCall, node: Node) -> bool:
    return True  # the rule is that of reshapes


def _as_made(call: ModuleCall, node: Node, drop: int | None = None) -> bool:
    """Compare the shape of the output with that which the last operation has made.

    Args:
        call: The call.
        node: Node of the output.
        drop: The axis that is there for the operation only, if its output has one more than the input.

    Returns:
        Whether they agree.
    """
    while not NAMES[type(node).__name__]:
        node = node.next_functions[0][0]
    shape = [*shape_of((node, 0))]
    if drop is not None and len(shape) > len(call.inputs[0].shape):
        del shape[drop]
    return [*call.outputs[0].shape] == shape


def _as_reduced(call: ModuleCall, node: Node) -> bool:
    return call.outputs[0].shape.numel() == 1 or _as_made(call, node)


def _without_classes(call: ModuleCall, node: Node) -> bool:
    shape, given = call.outputs[0].shape, call.inputs[0].shape
    return shape.numel() == 1 or shape == given[:1] + given[2:]


def _all(pattern: Pattern, *classes: type[Module], shape: Shape = _as_given, **settings: Told) -> dict[type[Module], Row]:
    return dict.fromkeys(classes, (pattern, shape, settings))


_made = partial(_all, shape=_as_made)
_convolved = partial(_all, shape=partial(_as_made, drop=0), Convolution=CONVOLVED)  # a single sample is made a mini-batch
_reduced = partial(_all, shape=_as_reduced)
_pooled = partial(_all, shape=partial(_as_made, drop=-2))  # a line is made an image with one row


def _in_place(name: str, *classes: type[Module], **settings: Told) -> dict[type[Module], Row]:
    return _all(f"{name}|(AsStrided )?CopySlices", *classes, **settings)  # in place, on a view


def _padded(call: ModuleCall) -> str:
    return _PADS[call.mode]


def _convolution(call: ModuleCall) -> str:
    return f"Convolution( ({_PADS[call.padding_mode]}))?"


def _title(mode: str) -> str:
    return mode.title().replace("-", "")


def _resized(call: ModuleCall) -> str:
    return f"Upsample{_title(call.mode)}[123]D"


def _absolute(call: ModuleCall) -> str:
    return {"mean": "Mean ", "sum": "Sum ", "none": ""}[call.reduction] + "Abs Sub( Expand)?"  # against a target of another shape


def _smooth(call: ModuleCall) -> str:
    return f"SmoothL1Loss|{_absolute(call)}"


def _cross_entropy(call: ModuleCall) -> str:
    return f"{_SMOOTHED}NllLoss(2D)?( LogSoftmax)?|{'Div ' if call.reduction == 'mean' else ''}Neg Sum Mul (Mul )?LogSoftmax"


def _dropout(call: ModuleCall) -> str:
    return "(NativeDropout|(Add )?Mul|(AsStrided )?CopySlices)?" if call.derivatives is RANDOM else ""


def _rms_norm(call: ModuleCall) -> str:
    standardized = "Mul Rsqrt Add Mean Pow( again)?"
    return f"FusedRmsNorm|{standardized}" if call.weight is None else f"FusedRmsNorm|Mul( {standardized})?"


def _pooling(name: str, *classes: type[Module], names: tuple[str, ...], numbers: tuple[str, ...]) -> dict[type[Module], Row]:
    rows = {}
    for axes, cls in enumerate(classes, 1):
        key = name.replace("#", str(max(2, axes)))
        rows |= _pooled(key, cls, **{key: sizes(*names, axes=axes, numbers=numbers)})
    return rows


_LIKELIHOOD = dict.fromkeys(("NllLoss", "NllLoss2D"), reduced("ignore_index", data=("weight",)))
_LOGITS = "BinaryCrossEntropyWithLogits"
_PADDED = {"ConstantPadNd": padded} | {f"{name}Pad{axes}D": padded for name in ("Reflection", "Replication") for axes in (1, 2, 3)}
_RESIZED = {f"Upsample{_title(mode)}{axes}D": resized for mode in _MODES for axes in (1, 2, 3)}
_WINDOWS = ("kernel_size", "stride", "padding")


# Each row is a pattern for the names of the operations, the last one first (of several branches, that of the last factor comes first), the shape of
# the output, that of the input if nothing else is said, and by name of an operation what it is told beside its inputs.
_TABLE: dict[type[Module], Row] = {
    **_all("Addmm( T)?|Linear|(Add )?(Mm( T)?|Bmm Expand)|Add", nn.Linear, shape=_but_last, Addmm=SUM_OF_PRODUCT, Add=SUM),
    **_convolved(_convolution, nn.Conv1d, nn.Conv2d, nn.Conv3d, **_PADDED),
    **_convolved("Convolution", nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    **_all("(Add )?Trilinear( again)?", nn.Bilinear, shape=_but_last, Add=SUM),
    **_made("Embedding", nn.Embedding, Embedding=told(("padding_idx", "scale_grad_by_freq"), of_table)),
    **_made("EmbeddingBag", nn.EmbeddingBag, EmbeddingBag=told(("padding_idx", "scale_grad_by_freq", "mode"), of_bags)),
    **_all(
        f"{_BATCH_NORM}|{_NO_SAMPLES}", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, **of_channels("running_mean", "running_var")
    ),
    **_all(f"({_BATCH_NORM}( Repeat| Expand)*)?", nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, **of_channels()),
    **_all("NativeLayerNorm", nn.LayerNorm, NativeLayerNorm=ENTRIES),
    **_all("NativeGroupNorm", nn.GroupNorm, NativeGroupNorm=told(("group", "eps"), lambda call: (call.num_groups, call.eps))),
    **_all(_rms_norm, nn.RMSNorm, FusedRmsNorm=ENTRIES, Rsqrt=root_of_mean),
    **_all("(Div Pow Add Mul AvgPool[23]D ConstantPadNd Mul again again)?", nn.LocalResponseNorm, **of_neighbours()),
    **_all("Softmax", nn.Softmax, Softmax=along(lambda call: call.dim)),
    **_all("Softmax", nn.Softmax2d, Softmax=along(lambda call: -3)),
    **_all("Softmax Neg", nn.Softmin, Softmax=along(lambda call: call.dim)),
    **_all("LogSoftmax", nn.LogSoftmax, LogSoftmax=along(lambda call: call.dim)),
    **_in_place("Relu", nn.ReLU),
    **_in_place("LeakyRelu", nn.LeakyReLU, LeakyRelu=same("negative_slope")),
    **_in_place("RreluWithNoise|LeakyRelu", nn.RReLU, RreluWithNoise=same("lower", "upper", "training"), LeakyRelu=mean_slope),
    **_in_place("Hardtanh", nn.Hardtanh, nn.ReLU6, Hardtanh=same("min_val", "max_val")),
    **_in_place("Hardsigmoid", nn.Hardsigmoid),
    **_in_place("Hardswish", nn.Hardswish),
    **_in_place("Threshold", nn.Threshold, Threshold=same("threshold")),
    **_in_place("Elu", nn.ELU, Elu=told(_ELU, lambda call: (call.alpha, 1, 1))),
    **_in_place("Elu", nn.SELU, Elu=told(_ELU, lambda call: _SELU)),
    **_in_place("Celu|Elu", nn.CELU, Celu=same("alpha"), Elu=told(_ELU, lambda call: (call.alpha, 1, 1 / call.alpha))),
    **_in_place("Silu", nn.SiLU),
    **_in_place("Mish", nn.Mish),
    **_all("PreluKernel", nn.PReLU),
    **_all("Hardshrink", nn.Hardshrink, Hardshrink=same("lambd")),
    **_all("Softshrink", nn.Softshrink, Softshrink=same("lambd")),
    **_all("Sigmoid", nn.Sigmoid),
    **_all("LogSigmoid", nn.LogSigmoid),
    **_all("Tanh", nn.Tanh),
    **_all("Sub Tanh again", nn.Tanhshrink),
    **_all("Div Add Abs again", nn.Softsign),
    **_all("Softplus", nn.Softplus, Softplus=same("beta", "threshold")),
    **_all("Gelu", nn.GELU, Gelu=same("approximate")),
    **_all(_dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    **_all("", nn.Identity, nn.Flatten, nn.Unflatten, shape=_any),
    **_made("Permute", Permute, Permute=told(("dims",), lambda call: (tuple(call.dims),))),
    **_all("Mul", ScaleModule, Mul=factor("weight")),
    **_all("(Add( Add)*( again)*)?", SumModule, Add=SUM),
    **_all("((Index|Select|Slice) ?)*", Slicing, shape=_as_indexed),
    **_made(_padded, Pad, **_PADDED),
    **_made(_CIRCULAR, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    **_made("ReflectionPad[123]D", nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, **_PADDED),
    **_made("ReplicationPad[123]D", nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, **_PADDED),
    **_made("ConstantPadNd", nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, **_PADDED),
    **_made(_resized, nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d, **_RESIZED),
    **_all("ChannelShuffle", nn.ChannelShuffle, ChannelShuffle=same("groups")),
    **_made("PixelShuffle", nn.PixelShuffle, PixelShuffle=same("upscale_factor")),
    **_made("PixelUnshuffle", nn.PixelUnshuffle, PixelUnshuffle=same("downscale_factor")),
    **_made("Col2Im", nn.Fold, Col2Im=sizes("kernel_size", "dilation", "padding", "stride")),
    **_made("Im2Col", nn.Unfold, Im2Col=sizes("kernel_size", "dilation", "padding", "stride")),
    **_pooling("AvgPool#D", nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, names=_WINDOWS, numbers=("ceil_mode", "count_include_pad", "divisor_override")),
    **_pooling("MaxPool#DWithIndices", nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, names=(*_WINDOWS, "dilation"), numbers=("ceil_mode",)),
    **_all("MaxUnpool[23]D", nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d, shape=partial(_as_made, drop=-1)),
    **_pooled("AdaptiveAvgPool[23]D|(AsStrided )?Mean", nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    **_pooled("AdaptiveMaxPool[23]D", nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    **_reduced("MseLoss", nn.MSELoss, MseLoss=reduced()),
    **_reduced("BinaryCrossEntropy", nn.BCELoss, BinaryCrossEntropy=reduced(data=("weight", "target"))),
    **_reduced(_LOGITS, nn.BCEWithLogitsLoss, **{_LOGITS: reduced(data=("weight", "pos_weight", "target"))}),
    **_reduced(_absolute, nn.L1Loss),
    **_reduced(_smooth, nn.SmoothL1Loss, SmoothL1Loss=reduced("beta")),
    **_reduced("HuberLoss", nn.HuberLoss, HuberLoss=reduced("delta")),
    **_reduced("SoftMarginLoss", nn.SoftMarginLoss, SoftMarginLoss=reduced()),
    **_reduced("MultiMarginLoss", nn.MultiMarginLoss, MultiMarginLoss=reduced("p", "margin", data=("weight",))),
    **_reduced("MultilabelMarginLoss", nn.MultiLabelMarginLoss, MultilabelMarginLoss=reduced()),
    **_all("NllLoss(2D)?", nn.NLLLoss, shape=_without_classes, **_LIKELIHOOD),
    **_all(_cross_entropy, nn.CrossEntropyLoss, shape=_without_classes, **_LIKELIHOOD, LogSoftmax=along(of_classes), Mul=smoothed),
}


@lru_cache(maxsize=4096)
def _matches(pattern: str, names: str) -> bool:
    return re.fullmatch(pattern, names) is not None


def as_described(call: ModuleCall, node: Node, names: list[str], base: bool, inside: Iterable[Node]) -> bool:
    """Say whether a piece of the graph can be what the rule of a call describes.

    Args:
        call: The call.
        node: Node of its output.
        names: The operations of the piece, the last one first.
        base: Whether the node has made the tensor of which the output is a view.
        inside: The nodes of the piece; none if what they were told does not matter, as of a loss that only says where the samples lie.

    Returns:
        Whether it can; also where the class is none of this table, as it belongs to the user.
    """
    row = _TABLE.get(call.found.base)
    if row is None:
        return True
    pattern, has_shape, settings = row
    if not _matches(pattern if isinstance(pattern, str) else pattern(call), " ".join(names)):
        return False
    if (base or not NAMES[type(node).__name__]) and not has_shape(call, node):  # else the shape is that of an operation of the layer
        return False
    for inner in inside if settings else ():
        check = settings.get(NAMES[type(inner).__name__])
        if check is not None and not (check.read(inner) == check.value if type(check) is Constant else check(call, inner)):
            return False
    return True
