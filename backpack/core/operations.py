"""What autograd's graph shows of each class of modules that has a rule: the operations between its output and its inputs, and the output's shape.

A rule describes what the ``forward`` of a class computes. What the graph shows may be something else: a hook that ran before the recorder's has
replaced the output, or a function that ``forward`` calls was patched. Then operations are there that no row of this table knows, or the output
has another shape, and the rule does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial

from torch import nn
from torch.autograd.graph import Node
from torch.nn import Module

from backpack.core.calls import RANDOM, ModuleCall
from backpack.core.graph import shape_of
from backpack.core.linear import RESHAPES
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

AGAIN = "again"
"""Stands among the operations for one more use of an input or of a parameter."""
_NEUTRAL = RESHAPES | frozenset("Alias Squeeze Unsqueeze Clone ToCopy".split())
"""Operations that keep the entries and their order, and so may stand anywhere, if the shape at the end is right."""


class _Names(dict):
    """Name of the type of a node to that of its operation; empty for those that may stand anywhere."""

    def __missing__(self, name: str) -> str:
        short, _, number = name.rpartition("Backward")
        short = short if short and number else name  # a custom function may be called like an operation of torch
        self[name] = short = "" if short in _NEUTRAL else short
        return short


NAMES = _Names()

_ABSOLUTE = "((Mean|Sum) )?Abs Sub( Expand)?"  # against a target of another shape
_CIRCULAR = "CopySlices Slice( CopySlices Slice)*( Slice)*"
_BATCH_NORM = "(Native|Cudnn|Miopen)BatchNorm"
_PAD = f"ConstantPadNd|(Reflection|Replication)Pad[123]D|{_CIRCULAR}"
_SMOOTHED = "Add Mul (Div )?(Sum )?MaskedFill Neg Sum (Mul )?LogSoftmax Mul"
_NO_SAMPLES = "(Add (Select )?Mul( Select)?)?"

Pattern = str | Callable[[ModuleCall], str]
Shape = Callable[[ModuleCall, Node], bool]


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


def _all(pattern: Pattern, *classes: type[Module], shape: Shape = _as_given) -> dict[type[Module], tuple[Pattern, Shape]]:
    return dict.fromkeys(classes, (pattern, shape))


_made = partial(_all, shape=_as_made)
_convolved = partial(_all, shape=partial(_as_made, drop=0))  # a single sample is made a mini-batch
_reduced = partial(_all, shape=_as_reduced)
_pooled = partial(_all, shape=partial(_as_made, drop=-2))  # a line is made an image with one row


def _in_place(name: str, *classes: type[Module]) -> dict[type[Module], tuple[Pattern, Shape]]:
    return _all(f"{name}|(AsStrided )?CopySlices", *classes)  # in place, on a view


def _dropout(call: ModuleCall) -> str:
    return "(NativeDropout|(Add )?Mul|(AsStrided )?CopySlices)?" if call.derivatives is RANDOM else ""


def _rms_norm(call: ModuleCall) -> str:
    standardized = "Mul Rsqrt Add Mean Pow( again)?"
    return f"FusedRmsNorm|{standardized}" if call.weight is None else f"FusedRmsNorm|Mul( {standardized})?"


# Each row is a pattern for the names of the operations, the last one first (of several branches, that of the last factor comes first), and the
# shape of the output: that of the input, if nothing else is said.
_TABLE: dict[type[Module], tuple[Pattern, Shape]] = {
    **_all("Addmm( T)?|Linear|(Add )?(Mm( T)?|Bmm Expand)|Add", nn.Linear, shape=_but_last),
    **_convolved(f"Convolution( ({_PAD}))?", nn.Conv1d, nn.Conv2d, nn.Conv3d),
    **_convolved("Convolution", nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    **_all("(Add )?Trilinear( again)?", nn.Bilinear, shape=_but_last),
    **_made("Embedding", nn.Embedding),
    **_made("EmbeddingBag", nn.EmbeddingBag),
    **_all(f"{_BATCH_NORM}|{_NO_SAMPLES}", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    **_all(f"({_BATCH_NORM}( Repeat)*)?", nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    **_all("NativeLayerNorm", nn.LayerNorm),
    **_all("NativeGroupNorm", nn.GroupNorm),
    **_all(_rms_norm, nn.RMSNorm),
    **_all("(Div Pow Add Mul AvgPool[23]D ConstantPadNd Mul again again)?", nn.LocalResponseNorm),
    **_all("Softmax", nn.Softmax, nn.Softmax2d),
    **_all("Softmax Neg", nn.Softmin),
    **_all("LogSoftmax", nn.LogSoftmax),
    **_in_place("Relu", nn.ReLU),
    **_in_place("LeakyRelu", nn.LeakyReLU),
    **_in_place("RreluWithNoise|LeakyRelu", nn.RReLU),
    **_in_place("Hardtanh", nn.Hardtanh, nn.ReLU6),
    **_in_place("Hardsigmoid", nn.Hardsigmoid),
    **_in_place("Hardswish", nn.Hardswish),
    **_in_place("Threshold", nn.Threshold),
    **_in_place("Elu", nn.ELU, nn.SELU),
    **_in_place("Celu|Elu", nn.CELU),
    **_in_place("Silu", nn.SiLU),
    **_in_place("Mish", nn.Mish),
    **_all("PreluKernel", nn.PReLU),
    **_all("Hardshrink", nn.Hardshrink),
    **_all("Softshrink", nn.Softshrink),
    **_all("Sigmoid", nn.Sigmoid),
    **_all("LogSigmoid", nn.LogSigmoid),
    **_all("Tanh", nn.Tanh),
    **_all("Sub Tanh again", nn.Tanhshrink),
    **_all("Div Add Abs again", nn.Softsign),
    **_all("Softplus", nn.Softplus),
    **_all("Gelu", nn.GELU),
    **_all(_dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    **_all("", nn.Identity, nn.Flatten, nn.Unflatten, shape=_any),
    **_made("Permute|Transpose", Permute),
    **_all("Mul", ScaleModule),
    **_all("(Add( Add)*( again)*)?", SumModule),
    **_all("((Index|Select|Slice) ?)*", Slicing, shape=_as_indexed),
    **_made(_PAD, Pad),
    **_made(_CIRCULAR, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    **_made("ReflectionPad[123]D", nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    **_made("ReplicationPad[123]D", nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    **_made("ConstantPadNd", nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    **_made("Upsample[A-Z][A-Za-z]*[123]D", nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d),
    **_all("ChannelShuffle", nn.ChannelShuffle),
    **_made("PixelShuffle", nn.PixelShuffle),
    **_made("PixelUnshuffle", nn.PixelUnshuffle),
    **_made("Col2Im", nn.Fold),
    **_made("Im2Col", nn.Unfold),
    **_pooled("AvgPool[23]D", nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    **_pooled("MaxPool[23]DWithIndices", nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    **_all("MaxUnpool[23]D", nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d, shape=partial(_as_made, drop=-1)),
    **_pooled("AdaptiveAvgPool[23]D|(AsStrided )?Mean", nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    **_pooled("AdaptiveMaxPool[23]D", nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    **_reduced("MseLoss", nn.MSELoss),
    **_reduced("BinaryCrossEntropy", nn.BCELoss),
    **_reduced("BinaryCrossEntropyWithLogits", nn.BCEWithLogitsLoss),
    **_reduced(_ABSOLUTE, nn.L1Loss),
    **_reduced(f"SmoothL1Loss|{_ABSOLUTE}", nn.SmoothL1Loss),
    **_reduced("HuberLoss", nn.HuberLoss),
    **_reduced("SoftMarginLoss", nn.SoftMarginLoss),
    **_reduced("MultiMarginLoss", nn.MultiMarginLoss),
    **_reduced("MultilabelMarginLoss", nn.MultiLabelMarginLoss),
    **_all("NllLoss(2D)?", nn.NLLLoss, shape=_without_classes),
    **_all(f"({_SMOOTHED} )?NllLoss(2D)?( LogSoftmax)?|(Div )?Neg Sum Mul (Mul )?LogSoftmax", nn.CrossEntropyLoss, shape=_without_classes),
}


@lru_cache(maxsize=4096)
def _matches(pattern: str, names: str) -> bool:
    return re.fullmatch(pattern, names) is not None


def as_described(call: ModuleCall, node: Node, names: list[str], base: bool) -> bool:
    """Say whether a piece of the graph can be what the rule of a call describes.

    Args:
        call: The call.
        node: Node of its output.
        names: The operations of the piece, the last one first.
        base: Whether the node has made the tensor of which the output is a view.

    Returns:
        Whether it can; also where the class is none of this table, as it belongs to the user.
    """
    row = _TABLE.get(call.found.base)
    if row is None:
        return True
    pattern, has_shape = row
    if not _matches(pattern if isinstance(pattern, str) else pattern(call), " ".join(names)):
        return False
    return has_shape(call, node) if base or not NAMES[type(node).__name__] else True  # the shape is that of an operation of the layer
