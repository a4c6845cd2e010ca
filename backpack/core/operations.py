"""What autograd's graph shows of each class of modules that has a rule: the operations between its output and its inputs.

A rule describes what the ``forward`` of a class computes. What the graph shows may be something else: a hook that ran before the recorder's has
replaced the output, or a function that ``forward`` calls was patched. Then operations are there that no row of this table knows, and the rule
does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from torch import nn
from torch.nn import Module

from backpack.core.calls import RANDOM, ModuleCall
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing

AGAIN = "again"
"""Stands among the operations for one more use of an input or of a parameter."""
_NEUTRAL = frozenset("View UnsafeView ReshapeAlias Alias Squeeze Unsqueeze Clone ToCopy".split())
"""Operations that keep the entries and their order, and so may stand anywhere."""


class _Names(dict):
    """Name of the type of a node to that of its operation; empty for those that may stand anywhere."""

    def __missing__(self, name: str) -> str:
        short, _, number = name.rpartition("Backward")
        short = short if short and number else name  # a custom function may be called like an operation of torch
        self[name] = short = "" if short in _NEUTRAL else short
        return short


NAMES = _Names()

# Each row is a pattern for the names of the operations, the last one first; of several branches, that of the last factor comes first.
_CIRCULAR = "CopySlices Slice( CopySlices Slice)*( Slice)*"
_BATCH_NORM = "(Native|Cudnn|Miopen)BatchNorm"
_PAD = f"ConstantPadNd|(Reflection|Replication)Pad[123]D|{_CIRCULAR}"
_SMOOTHED = "Add Mul (Div )?(Sum )?MaskedFill Neg Sum (Mul )?LogSoftmax Mul"
_NO_SAMPLES = "(Add (Select )?Mul( Select)?)?"


def _all(pattern: str, *classes: type[Module]) -> dict[type[Module], str]:
    return dict.fromkeys(classes, pattern)


def _in_place(name: str, *classes: type[Module]) -> dict[type[Module], str]:
    return _all(f"{name}|(AsStrided )?CopySlices", *classes)  # in place, on a view


def _dropout(call: ModuleCall) -> str:
    return "(NativeDropout|(Add )?Mul|(AsStrided )?CopySlices)?" if call.derivatives is RANDOM else ""


def _rms_norm(call: ModuleCall) -> str:
    standardized = "Mul Rsqrt Add Mean Pow( again)?"
    return f"FusedRmsNorm|{standardized}" if call.weight is None else f"FusedRmsNorm|Mul( {standardized})?"


_TABLE: dict[type[Module], str | Callable[[ModuleCall], str]] = {
    nn.Linear: "Addmm( T)?|Linear|(Add )?(Mm( T)?|Bmm Expand)|Add",
    **_all(f"Convolution( ({_PAD}))?", nn.Conv1d, nn.Conv2d, nn.Conv3d),
    **_all("Convolution", nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Bilinear: "(Add )?Trilinear( again)?",
    nn.Embedding: "Embedding",
    nn.EmbeddingBag: "EmbeddingBag",
    **_all(f"{_BATCH_NORM}|{_NO_SAMPLES}", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    **_all(f"({_BATCH_NORM}( Repeat)*)?", nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    nn.LayerNorm: "NativeLayerNorm",
    nn.GroupNorm: "NativeGroupNorm",
    nn.RMSNorm: _rms_norm,
    nn.LocalResponseNorm: "(Div Pow Add Mul AvgPool[23]D ConstantPadNd Mul again again)?",
    **_all("Softmax", nn.Softmax, nn.Softmax2d),
    nn.Softmin: "Softmax Neg",
    nn.LogSoftmax: "LogSoftmax",
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
    nn.PReLU: "PreluKernel",
    nn.Hardshrink: "Hardshrink",
    nn.Softshrink: "Softshrink",
    nn.Sigmoid: "Sigmoid",
    nn.LogSigmoid: "LogSigmoid",
    nn.Tanh: "Tanh",
    nn.Tanhshrink: "Sub Tanh again",
    nn.Softsign: "Div Add Abs again",
    nn.Softplus: "Softplus",
    nn.GELU: "Gelu",
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout), _dropout),
    **_all("", nn.Identity, nn.Flatten, nn.Unflatten),
    Permute: "Permute|Transpose",
    ScaleModule: "Mul",
    SumModule: "(Add( Add)*( again)*)?",
    Slicing: "((Index|Select|Slice) ?)*",
    **_all(_PAD, Pad),
    **_all(_CIRCULAR, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    **_all("ReflectionPad[123]D", nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
    **_all("ReplicationPad[123]D", nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    **_all("ConstantPadNd", nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
    **_all("Upsample[A-Z][A-Za-z]*[123]D", nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d),
    nn.ChannelShuffle: "ChannelShuffle",
    nn.PixelShuffle: "PixelShuffle",
    nn.PixelUnshuffle: "PixelUnshuffle",
    nn.Fold: "Col2Im",
    nn.Unfold: "Im2Col",
    **_all("AvgPool[23]D", nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    **_all("MaxPool[23]DWithIndices", nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    **_all("MaxUnpool[23]D", nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d),
    **_all("AdaptiveAvgPool[23]D|(AsStrided )?Mean", nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    **_all("AdaptiveMaxPool[23]D", nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    nn.MSELoss: "MseLoss",
    nn.BCELoss: "BinaryCrossEntropy",
    nn.BCEWithLogitsLoss: "BinaryCrossEntropyWithLogits",
    nn.L1Loss: "((Mean|Sum) )?Abs Sub",
    nn.SmoothL1Loss: "SmoothL1Loss|((Mean|Sum) )?Abs Sub",
    nn.HuberLoss: "HuberLoss",
    nn.SoftMarginLoss: "SoftMarginLoss",
    nn.MultiMarginLoss: "MultiMarginLoss",
    nn.MultiLabelMarginLoss: "MultilabelMarginLoss",
    nn.NLLLoss: "NllLoss(2D)?",
    nn.CrossEntropyLoss: f"({_SMOOTHED} )?NllLoss(2D)?( LogSoftmax)?|(Div )?Neg Sum Mul (Mul )?LogSoftmax",
}


@lru_cache(maxsize=4096)
def _matches(pattern: str, names: str) -> bool:
    return re.fullmatch(pattern, names) is not None


def as_described(call: ModuleCall, names: list[str]) -> bool:
    """Say whether a piece of the graph can be what the rule of a call describes.

    Args:
        call: The call.
        names: The operations of the piece, the last one first.

    Returns:
        Whether it can; also where the class is none of this table, as it belongs to the user.
    """
    pattern = _TABLE.get(call.found.base)
    if pattern is None:
        return True
    return _matches(pattern if isinstance(pattern, str) else pattern(call), " ".join(names))
