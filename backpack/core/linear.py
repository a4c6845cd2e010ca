"""Which operations are linear, or almost everywhere: they have no second derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from backpack.core.graph import LEAF, MAX_POOLS, operation, saved, sequence_number, tensor_at

RESHAPES = frozenset({"View", "UnsafeView", "ReshapeAlias"})
"""Operations that change nothing but the lengths of axes."""
SAME_ENTRIES = RESHAPES | {"Squeeze", "Unsqueeze"}
"""Those, and operations that add or remove axes of length one."""
TRANSPOSES = frozenset({"T", "Transpose", "Permute"})
"""Operations that change the order of axes."""
LINEAR = RESHAPES | frozenset(
    """Add Sub Rsub Neg Clone Alias Expand Squeeze Unsqueeze Permute Transpose T Cat Stack Slice Select
    Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind Sum Mean Flip Roll Repeat Index IndexSelect Gather AsStrided ToCopy Diagonal
    Tril Triu Cumsum ConstantPadNd Unfold MaskedFill MaskedSelect Scatter SliceScatter Where AvgPool2D AvgPool3D AdaptiveAvgPool2D
    AdaptiveAvgPool3D MaxUnpool2D MaxUnpool3D ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D
    UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D UpsampleNearestExact2D UpsampleNearestExact3D UpsampleLinear1D
    UpsampleBilinear2D UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa UpsampleTrilinear3D
    PixelShuffle PixelUnshuffle ChannelShuffle Im2Col Col2Im Embedding NativeDropout
    BackwardHookFunctionBackward _DDPSinkBackward IndexAdd IndexCopy IndexFill IndexPut ScatterAdd SelectScatter DiagonalScatter DiagEmbed Take Rot90
    Nansum PackPaddedSequence Trace Deg2Rad Rad2Deg MaskedScatter BlockDiag torch::autograd::Copy
    torch::autograd::Identity""".split()
)
"""Operations that are linear, as their derivatives are then."""
_BENT = frozenset(f"{name}Derivative" for name in "Threshold LeakyRelu Hardtanh RreluWithNoise Hardshrink Softshrink".split())
"""Backward passes of operations that are linear almost everywhere: only on the gradient, their first argument, do they depend smoothly."""
PIECEWISE_LINEAR = (
    MAX_POOLS
    | _BENT
    | frozenset(
        """Relu LeakyRelu RreluWithNoise Threshold Hardtanh Hardsigmoid Hardshrink Softshrink Abs Clamp ClampMin ClampMax Maximum Minimum Max Min Amax
    Amin Aminmax FractionalMaxPool2D FractionalMaxPool3D Sort Topk Kthvalue Median Nanmedian Mode Cummax Cummin NanToNum Fmax Fmin
    Sign Sgn Round Floor Ceil Trunc Frac Fmod Remainder Copysign Uniform Normal Bernoulli Cauchy Exponential Geometric LogNormal Random
    Zero Fill FakeQuantizePerTensorAffineCachemask FakeQuantizePerChannelAffineCachemask""".split()
    )
)
"""Operations that are linear almost everywhere."""
LINEAR_IN_LOG_PROBABILITIES = frozenset({"NllLoss", "NllLoss2D"})
"""Operations that make losses of log-probabilities."""
_OF_COMPLEX = frozenset("Complex ViewAsReal ViewAsComplex Conj ConjPhysical FftR2C FftC2C FftC2R".split())
"""Operations that are linear in real and imaginary parts."""
_LINEAR_IN_THE_FIRST = {"Div": 1, "Ldexp": 1, "GridSampler2D": 1, "GridSampler3D": 1, "Lerp": 2}
"""Operations that are linear in so many of their arguments, the first ones, where nothing else varies."""
ON_A_PART = "torch::autograd::CopySlices"
"""Any operation in place on a part of a tensor."""
_ASSIGNMENT = "backpack.assignment"
"""Key in the metadata of such a node that says whether it is an assignment."""
PRODUCTS = frozenset("Mul Mm Bmm Addmm Baddbmm Addmv Mv Dot Vdot Linear Convolution PreluKernel Addcmul Trilinear LinalgCross SparseAddmm".split())
"""Operations that are linear in each of their factors."""


def is_linear(node: Node, varies: Callable[[Node], Any]) -> bool:
    """Say whether a node is linear, almost everywhere, in those of its inputs that vary.

    Args:
        node: A graph node.
        varies: Says, of the node of an input, whether that varies.

    Returns:
        Whether it is.
    """
    name = operation(node)
    if name.removesuffix("Derivative") in LINEAR | _OF_COMPLEX or (name == "ScatterReduce" and saved(node, "reduce") != "prod"):
        return True
    if node.name() == ON_A_PART:
        if _ASSIGNMENT not in node.metadata:
            node.metadata[_ASSIGNMENT] = _is_assignment(node)
        return node.metadata[_ASSIGNMENT]
    varied = [n for n, _ in node.next_functions if n is not None and varies(n)]
    if name in PRODUCTS:
        return len(varied) <= 1
    if name in PIECEWISE_LINEAR:  # the absolute value of complex numbers is curved
        return not any(n is not None and tensor_at((n, nr)).dtype.is_complex for n, nr in node.next_functions)
    first = _LINEAR_IN_THE_FIRST.get(name, 0)
    return first > 0 and not any(n is not None and varies(n) for n, _ in node.next_functions[first:])


class _Custom(TorchFunctionMode):
    """Sees whether Python computes something: a custom function, which may hide what it reads."""

    seen = False

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen = True
        return function(*args, **(kwargs or {}))


def _is_assignment(node: Node) -> bool:
    """Say whether the backward pass of a node is made of gradients alone, and reads no tensor of the forward pass that varies.

    Args:
        node: The node of an operation in place on a part of a tensor, which does not tell what the operation is.

    Returns:
        Whether it is, as with assignments: then the operation is linear, almost everywhere.
    """
    given = tensor_at((node, 0))
    with torch.enable_grad():
        start = torch.zeros(given.shape, dtype=given.dtype, device=given.device, requires_grad=True).clone()
        with _Custom() as custom:
            found = node(start)
    last = sequence_number(start.grad_fn)
    stack, seen = [t.grad_fn for t in (found if isinstance(found, tuple) else (found,)) if t is not None and t.requires_grad], {start.grad_fn}
    while stack and not custom.seen:
        if (at := stack.pop()) in seen:
            continue
        if at.name() == LEAF or sequence_number(at) < last:
            return False
        seen.add(at)
        stack += [n for n, _ in at.next_functions[: 1 if operation(at) in _BENT else None] if n is not None]
    return not custom.seen
