"""What curved graph nodes compute, as functions of the tensors that they have saved: their second derivatives follow by automatic differentiation.

Three kinds of operations are known: those that act on each entry alone, those that couple the entries along some axes, and products of two factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import inf, log, pi
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.functional import logsigmoid

from backpack.core.graph import has_saved, operation, saved, saves_tensor, shape_of, tensor_at
from backpack.core.linear import LINEAR, LINEAR_IN_LOG_PROBABILITIES, PIECEWISE_LINEAR
from backpack.utils.precision import wide

# Keys are names of nodes. Each has the name of a function, and the names of its arguments, which are those of what the node has saved, or
# stand in front of it; - is saved nowhere, as the function is linear in it alone; ? may be None.
_ENTRYWISE = {
    **{
        f"{name.title().replace('_', '')}0": (name, "self")
        for name in """silu mish hardswish log_sigmoid log log2 log10 sin cos sinh cosh asin acos atan asinh acosh atanh erf erfc erfinv lgamma
        digamma sinc i0""".split()
    },
    **{f"Special{name.title()}0": (f"special_{name}", "self") for name in ("entr", "i1")},
    "Log1P0": ("log1p", "self"),
    "Polygamma0": ("polygamma", "n self"),
    "Mvlgamma0": ("mvlgamma", "self p"),
    "Gelu0": ("gelu", "self approximate"),
    "Softplus0": ("softplus", "self beta threshold"),
    "Elu0": ("elu", "self alpha scale input_scale"),
    "Celu0": ("celu", "self alpha"),
    "Logit0": ("logit", "self eps"),
    **{f"Pow{i}": ("pow", "self exponent") for i in range(3)},
    **{name.title() + "0": (name, "self other") for name in "mul div atan2 hypot xlogy logaddexp logaddexp2".split()},
    "Lerp0": ("lerp", "self=- end=- weight"),
    "Lerp1": ("lerp", "self end weight"),
    "Addcmul0": ("addcmul", "self=- tensor1 tensor2 value"),
    "Addcdiv0": ("addcdiv", "self=- tensor1 tensor2 value"),
    "PreluKernel0": ("_prelu_kernel", "self weight"),
    # losses of each entry
    **{f"{name.title().replace('_', '')}0": (name, "self target reduction") for name in ("mse_loss", "soft_margin_loss")},
    "HuberLoss0": ("huber_loss", "self target reduction delta"),
    "SmoothL1Loss0": ("smooth_l1_loss", "self target reduction beta"),
    "BinaryCrossEntropy0": ("binary_cross_entropy", "self target weight=? reduction"),
    "BinaryCrossEntropyWithLogits0": ("binary_cross_entropy_with_logits", "self target weight=? pos_weight=? reduction"),
    # derivatives, of which derivatives are taken
    **{f"{name.title()}Backward0": (f"{name}_backward", "grad_output output") for name in ("tanh", "sigmoid")},
    "GeluBackward0": ("gelu_backward", "grad_output self approximate"),
    "SoftplusBackward0": ("softplus_backward", "grad_output self beta threshold"),
    "EluBackward0": ("elu_backward", "grad_output alpha scale input_scale is_result self_or_result"),
    "LogSigmoidBackward0": ("log_sigmoid_backward", "grad_output self buffer"),
}
# where the argument is clamped: the function is linear beyond, and torch's second derivative not a number
_CURVED_WITHIN = {"gelu": (-40, 40), "gelu_backward": (-40, 40), "mish": (-inf, 40)}
# where one argument is much smaller, or minus infinity: torch's second derivative is not a number, and that of these functions zero
_STABLE = {
    "logaddexp": lambda self, other: self - logsigmoid(self - other),
    "logaddexp2": lambda self, other: self - logsigmoid((self - other) * log(2)) / log(2),
}
# whose first derivative torch takes for zero where they are: so is the second one, which is not finite, and harmless for what is always zero
_NORMS = frozenset({"norm", "linalg_vector_norm"})
_ZERO_AT_ZERO = _NORMS | {"std"}
_SMOOTH = 3  # the power from which on torch knows the second derivative of norms where an entry is zero: that of this entry is zero, or taken for it
# second derivative in terms of the result, and of numbers that the node has saved
_OF_RESULT: dict[str, Callable[..., Tensor]] = {
    "Tanh0": lambda y: -2 * y * (1 - y * y),
    "Sigmoid0": lambda y: y * (1 - y) * (1 - 2 * y),
    "Exp0": lambda y: y,
    "Exp20": lambda y: y * torch.log(torch.full_like(y, 2.0)).square(),
    "Expm10": lambda y: y + 1,
    "Sqrt0": lambda y: -0.25 / y**3,
    "Rsqrt0": lambda y: 0.75 * y**5,
    "Reciprocal0": lambda y: 2 * y**3,
    "Tan0": lambda y: 2 * y * (1 + y * y),
    "SpecialNdtri0": lambda y: 2 * pi * y * (y * y).exp(),
    "Elu1": lambda y, alpha, scale, input_scale: input_scale**2 * torch.where(y > 0, 0.0, y + scale * alpha),  # in place
    "Celu1": lambda y, alpha: torch.where(y > 0, 0.0, y + alpha) / alpha**2,
}
_NUMBERS = {"Elu1": ("alpha", "scale", "input_scale"), "Celu1": ("alpha",)}
_ALONG_AXES = {
    "LogSoftmax0": ("log_softmax", "self=result dim"),
    "Logsumexp0": ("logsumexp", "self dim keepdim"),
    "Norm1": ("norm", "self p dim keepdim"),
    "LinalgVectorNorm0": ("linalg_vector_norm", "self ord dim keepdim"),
    "Prod1": ("prod", "self dim keepdim"),
    "Cumprod0": ("cumprod", "self dim"),
    "Logcumsumexp0": ("logcumsumexp", "self dim"),
    "Var0": ("var", "self dim correction keepdim"),
    "Std0": ("std", "self dim correction keepdim"),
    "Glu0": ("glu", "self dim"),
}
_CONVOLUTION = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
# a function, the numbers of the next edges of its two factors, and their names
_OF_TWO = {
    "Mm0": (torch.mm, (0, 1), ("self", "mat2")),
    "Bmm0": (torch.bmm, (0, 1), ("self", "mat2")),
    "Mv0": (torch.mv, (0, 1), ("self", "vec")),
    "Dot0": (torch.dot, (0, 1), ("self", "tensor")),
    "Vdot0": (torch.vdot, (0, 1), ("self", "other")),
    "Addmm0": (torch.mm, (1, 2), ("mat1", "mat2")),
    "Baddbmm0": (torch.bmm, (1, 2), ("batch1", "batch2")),
    "Addmv0": (torch.mv, (1, 2), ("mat", "vec")),
    "Convolution0": (torch.convolution, (0, 1), ("input", "weight")),
    "LinalgCross0": (torch.linalg.cross, (0, 1), ("self", "other")),
}
_SOFTMAX = frozenset({"Softmax0", "SafeSoftmax0"})
_ATTENTION = frozenset(f"ScaledDotProduct{kind}0" for kind in "FlashAttentionForCpu FlashAttention EfficientAttention CudnnAttention".split())
_WEIGHT_NORM = frozenset({"WeightNormInterface0"})
_KNOWN = _WEIGHT_NORM | _SOFTMAX | _ATTENTION | _ENTRYWISE.keys() | _OF_RESULT.keys() | _ALONG_AXES.keys() | _OF_TWO.keys()


class Coupling(NamedTuple):
    """A function whose second derivative couples entries along some axes only.

    Attributes:
        function: Of the values.
        values: Tensors of one and the same shape.
        numbers: For each value, number of its next edge.
        axes: The axes, negative.
        parts: If a single value holds several inputs side by side on its last axis: the axes that each has in place of it.
    """

    function: Callable[..., Tensor]
    values: list[Tensor]
    numbers: list[int]
    axes: tuple[int, ...]
    parts: list[torch.Size] | None = None


class Product(NamedTuple):
    """A function that is linear in each of two factors.

    Attributes:
        function: Of the factors.
        numbers: Numbers of their next edges.
        names: Names under which the node has saved them.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    numbers: tuple[int, int]
    names: tuple[str, str]

    def made(self, shapes: Iterable[torch.Size]) -> torch.Size | None:
        """Say which shape the product has.

        Args:
            shapes: Those of the factors.

        Returns:
            The shape; ``None`` if the factors do not fit.
        """
        try:
            return self.function(*(torch.empty(shape, device="meta") for shape in shapes)).shape
        except RuntimeError:
            return None


def _key(node: Node) -> str:
    return node.name().replace("Backward", "", 1)  # a second one is that of the derivative of a derivative


def is_known(node: Node) -> bool:
    """Say whether the second derivative of a node is known.

    Args:
        node: The node.

    Returns:
        Whether it is.
    """
    if _key(node) in _WEIGHT_NORM and (saved(node, "dim") or not axes_of(node)):
        return False  # the norms are not those of the entries at an index of the first axis
    if _key(node) in _ENTRYWISE and has_saved(node, "reduction") and saved(node, "reduction"):
        return False  # a sum or a mean
    return operation(node) in LINEAR | PIECEWISE_LINEAR | LINEAR_IN_LOG_PROBABILITIES or _key(node) in _KNOWN


def product(node: Node) -> Product | None:
    """Read a node as a product of two factors.

    Args:
        node: The node.

    Returns:
        The product; ``None`` if it is none.
    """
    if _key(node) not in _OF_TWO:
        return None
    function, numbers, names = _OF_TWO[_key(node)]
    if operation(node) == "Convolution":
        stride, padding, dilation, transposed, extra, groups = (saved(node, name) for name in _CONVOLUTION)
        return Product(lambda x, w: function(x, w, None, stride, padding, dilation, transposed, extra, groups), numbers, names)
    if operation(node) == "LinalgCross":
        return Product(partial(function, dim=saved(node, "dim")), numbers, names)
    scale = saved(node, "alpha") if numbers == (1, 2) else 1
    return Product(lambda x, w: scale * function(x, w), numbers, names)


def axes_of(node: Node) -> tuple[int, ...]:
    """Return the axes of a node's input along which its second derivative couples entries.

    Args:
        node: The node.

    Returns:
        The axes, negative.
    """
    if _key(node) in _ATTENTION:
        return (-2, -1)
    if _key(node) in _WEIGHT_NORM:
        return tuple(range(1 - len(shape_of((node, 0))), 0))
    if _key(node) not in _SOFTMAX | _ALONG_AXES.keys():
        return ()
    ndim = len(shape_of(node.next_functions[0]))
    dims = saved(node, "dim")
    dims = (dims,) if isinstance(dims, int) else dims or range(ndim)
    return tuple(sorted({dim % ndim - ndim for dim in dims})) if ndim else ()


def coupling(node: Node, active: Collection[int]) -> Coupling:
    """Read a node as a function of what it has saved.

    Args:
        node: A node that is known, neither linear nor a product.
        active: Numbers of the next edges that are variables; others are constants.

    Returns:
        The function, of values in the precision of the result. Those of an entry-wise function have the shape of the result.
    """
    key, like = _key(node), tensor_at((node, 0))
    if key in _OF_RESULT:
        result = saved(node, "result")
        second = _OF_RESULT[key](result, *(saved(node, name) for name in _NUMBERS.get(key, ())))
        return Coupling(lambda x: 0.5 * second * (x - result) ** 2, [result], [0], ())  # another function with this second derivative
    if key in _SOFTMAX | _ALONG_AXES.keys() and not shape_of(node.next_functions[0]):
        return Coupling(torch.clone, [torch.zeros((), dtype=like.dtype, device=like.device)], [0], ())  # along no axis: none of them is curved
    if key in _SOFTMAX:
        axes, result = axes_of(node), saved(node, "result")
        return Coupling(lambda x: _softmax_around(x, result, axes), [torch.zeros_like(result)], [0], axes)
    if key in _ATTENTION:
        return _attention(node, active)
    if key in _WEIGHT_NORM:
        directions, lengths = saved(node, "v"), saved(node, "g")
        axes = axes_of(node)
        return _side_by_side(lambda v, g: v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=True)), [directions, lengths], active, len(axes))
    name, names = _ENTRYWISE[key] if key in _ENTRYWISE else _ALONG_AXES[key]
    names = [argument.partition("=") for argument in names.split()]
    given = {argument: None if source == "-" else saved(node, source.strip("?") or argument) for argument, _, source in names}
    if name == "hypot":
        given = _both_sides(node, given)
    # the gradient does not depend on what is not saved: the function is linear in it, or it is a constant in a term without variables
    missing = [(argument, source) for argument, _, source in names if given[argument] is None and source != "?"]
    unsaved = {argument for argument, source in missing if source == "-" or saves_tensor(node, source or argument)}
    given |= dict.fromkeys(unsaved, torch.zeros((), dtype=like.dtype, device=like.device))
    shape = torch.Size(like.shape) if key in _ENTRYWISE else shape_of(node.next_functions[0])
    given = {argument: v.to(like.dtype).expand(shape) if isinstance(v, Tensor) else v for argument, v in given.items()}
    if name in _CURVED_WITHIN:
        given["self"] = given["self"].clamp(*_CURVED_WITHIN[name])
    axes = axes_of(node)
    if "dim" in given:  # counted from the end, as an axis of samples may be put in front
        given["dim"] = axes[0] if isinstance(given["dim"], int) else axes
    tensors = [argument for argument in given if isinstance(given[argument], Tensor)]
    reached = {argument: number for number, argument in enumerate(tensors) if number in active}
    variables = {argument: number for argument, number in reached.items() if argument not in unsaved} or reached

    flat = getattr(torch.ops.aten, name)(**given | {"keepdim": True}) == 0 if name in _ZERO_AT_ZERO else None
    other = None if flat is None or not flat.any() else torch.arange(1, shape.numel() + 1, device=like.device).reshape(shape)

    power = given.get("p", given.get("ord")) if name in _NORMS else None
    still = given["self"] == 0 if power is not None and power not in (1, 2) and 0 < power < _SMOOTH else None

    def function(*values: Tensor) -> Tensor:
        arguments = given | dict(zip(variables, values, strict=True))
        arguments |= {argument: wide(v) for argument, v in arguments.items() if isinstance(v, Tensor)}
        if other is not None:
            arguments["self"] = torch.where(flat, other.to(arguments["self"].dtype), arguments["self"])
        if still is not None and still.any():
            powers = _powers_of_others(arguments["self"], still & ~flat, power)
            return powers.sum(arguments["dim"], arguments["keepdim"]).pow(1 / power).to(like.dtype)
        return _STABLE.get(name, getattr(torch.ops.aten, name))(**arguments).to(like.dtype)

    return Coupling(function, [given[argument] for argument in variables], list(variables.values()), axes)


def _powers_of_others(values: Tensor, fixed: Tensor, power: float) -> Tensor:
    """Take powers of absolute values; in some places, where they have no finite derivatives, zeros that have none.

    Args:
        values: Any numbers.
        fixed: Where these places are.
        power: The power.

    Returns:
        The shape of the values.
    """
    return torch.where(fixed, 1.0, values).abs().pow(power).masked_fill(fixed, 0.0)


def _both_sides(node: Node, given: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Compute, for ``hypot``, the absolute value of a constant from the result: nothing else of it is saved, and it matters.

    Args:
        node: The node.
        given: What is saved of the two sides.

    Returns:
        Both sides.
    """
    result, known = saved(node, "result"), [side for side in given.values() if side is not None]
    missing = ((result - known[0]) * (result + known[0])).clamp(min=0).sqrt() if len(known) == 1 else None
    return {argument: missing if side is None else side for argument, side in given.items()}


def _softmax_around(change: Tensor, result: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the softmax of ``x + change`` where that of ``x`` is known; zeros where it is zero, as of keys that are all masked."""
    weights = result * change.exp()
    total = weights.sum(axes, keepdim=True)
    return weights / torch.where(result.sum(axes, keepdim=True) > 0, total, 1.0)


def _side_by_side(function: Callable[..., Tensor], inputs: list[Tensor], active: Collection[int], axes: int) -> Coupling:
    """Read a function of inputs of several shapes as one of a single value.

    Args:
        function: Of the inputs.
        inputs: The inputs, in the order of the next edges.
        active: See ``coupling``.
        axes: Number of last axes along which it couples entries.

    Returns:
        The function of ``[*, entries]``.
    """
    numbers = [number for number in range(len(inputs)) if number in active]
    parts = [inputs[number].shape[-axes:] for number in numbers]

    def cut(packed: Tensor) -> Tensor:
        given, pieces = list(inputs), packed.split([part.numel() for part in parts], -1)
        for number, piece, part in zip(numbers, pieces, parts, strict=True):
            given[number] = piece.unflatten(-1, part)
        return function(*given)

    return Coupling(cut, [torch.cat([inputs[number].flatten(-axes) for number in numbers], -1)], numbers, (-1,), parts)


def _attention(node: Node, active: Collection[int]) -> Coupling:
    """Read a kernel of attention as a function of queries ``[*, H, g, T, E]``, keys and values ``[*, H, 1, T, E]``, side by side ``[*, H, entries]``.

    Args:
        node: The node. Each head of keys and values belongs to ``g`` heads of queries.
        active: See ``coupling``.

    Returns:
        See ``coupling``.
    """
    query, key, value = (saved(node, name) for name in ("query", "key", "value"))
    scale, bias = saved(node, "scale"), _bias(node)
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (scale * query @ key.mT).flatten(-4, -3)
        if saved(node, "is_causal"):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        scores = scores if bias is None else scores + bias
        masked = (scores == -torch.inf).all(-1, keepdim=True)  # without a key, the kernel returns zeros
        weights = scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)
        return (weights.unflatten(-3, query.shape[-4:-2]) @ value).flatten(-4, -3)

    return _side_by_side(function, [query.unflatten(-3, (key.shape[-3], -1)), key.unsqueeze(-3), value.unsqueeze(-3)], active, 3)


def _bias(node: Node) -> Tensor | None:
    """Return what a kernel of attention adds to the scores."""
    name = next((name for name in ("attn_mask", "attn_bias") if has_saved(node, name)), None)
    return None if name is None else saved(node, name)


def is_plain_attention(node: Node) -> bool:
    """Say whether a kernel of attention has heads, or groups of them, that fit together, no dropout, and a bias that is no variable.

    Args:
        node: The node.

    Returns:
        Whether it is so; also if it is no such kernel.
    """
    if _key(node) not in _ATTENTION:
        return True
    query, key, value = (saved(node, name).shape for name in ("query", "key", "value"))
    grouped = len(query) > 2 and query[:-3] == key[:-3] and query[-3] % key[-3] == 0  # noqa: PLR2004 (without axes in front)
    return grouped and key[:-2] == value[:-2] and saved(node, "dropout_p") == 0 and all(edge is None for edge, _ in node.next_functions[3:])
