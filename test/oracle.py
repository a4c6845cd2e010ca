"""The truth that the tests compare with: every quantity from its definition, by plain autograd loops; imports nothing of backpack.

Sample ``n`` is entry ``n`` of axis 0 of every tensor that enters a loss. The outputs of all heads are flattened and set side by side to
``[N, D]``. With ``J_n`` the Jacobian of row ``n`` w.r.t. a parameter and ``H_n`` the Hessian of the loss w.r.t. row ``n``, everything about
first order and the GGN follows from ``J_n``, ``H_n`` and the gradient of the loss w.r.t. row ``n``. How the model is built (functional
operations, re-use, in-place operations) plays no role here. Letters: ``n`` sample, ``d``/``e`` output, ``p``/``q`` entry of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import gcd, prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import GradientEdge, Node
from torch.distributions import Binomial, Categorical, Normal, Poisson
from torch.nn import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    EmbeddingBag,
    GaussianNLLLoss,
    Hardsigmoid,
    Module,
    MSELoss,
    MultiLabelSoftMarginLoss,
    Parameter,
    PoissonNLLLoss,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@dataclass
class Term:
    """One summand of the loss: ``scale * module(outputs[head], target)``, summed over what the module does not reduce.

    Attributes:
        module: Loss function, the module that the tests extend.
        target: Target, or all arguments after the prediction.
        head: Which output of the model enters.
        scale: Factor, a number or a tensor that broadcasts against what the module returns. The number 1 is not multiplied.
        function: Called in place of the module, which says then from what distribution labels are drawn; nothing is extended.
    """

    module: Module
    target: Tensor | tuple[Tensor, ...]
    head: int = 0
    scale: float | Tensor = 1.0
    function: Callable | None = None

    def __call__(self, outputs: list[Tensor]) -> Tensor:
        """Evaluate.

        Args:
            outputs: All outputs of the model.

        Returns:
            A scalar.
        """
        evaluate = self.function or self.module
        value = evaluate(outputs[self.head], *(self.target if isinstance(self.target, tuple) else (self.target,)))
        if isinstance(self.scale, Tensor) or self.scale != 1.0:
            value = self.scale * value
        return value.sum() if value.dim() else value


def call_model(model: Module, x: Tensor) -> Tensor:
    """Call a model on its input, the usual way to get its output.

    Args:
        model: Model.
        x: Input.

    Returns:
        Output.
    """
    return model(x)


@dataclass
class Problem:
    """A model, its input and its loss.

    Attributes:
        model: Model.
        x: Input, samples on axis 0.
        terms: Summands of the loss.
        output: Maps model and input to the tensor, or the tuple of tensors, that enter the losses; samples on axis 0.
    """

    model: Module
    x: Tensor
    terms: list[Term]
    output: Callable[[Module, Tensor], Tensor | tuple[Tensor, ...]] = call_model

    @property
    def losses(self) -> list[Module]:
        """The loss modules, each once."""
        return list(dict.fromkeys(term.module for term in self.terms if term.function is None))

    def outputs(self, seed: int = 0) -> list[Tensor]:
        """Run the model.

        Args:
            seed: Seed of the generator before the forward pass, so that dropout masks are the same at every run.

        Returns:
            All outputs.
        """
        torch.default_generator.manual_seed(seed)
        outputs = self.output(self.model, self.x)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def loss(self, outputs: list[Tensor]) -> Tensor:
        """Add the terms in their order.

        Args:
            outputs: All outputs of the model.

        Returns:
            A scalar.
        """
        total = self.terms[0](outputs)
        for term in self.terms[1:]:
            total = total + term(outputs)
        return total


class Product(NamedTuple):
    """One product of an input with a matrix, or of a stack: input, parameter, whether its input side comes first, output or its edge.

    Of a matrix that is part of a parameter, also its rows there, those of a stack counted through, or columns; and whether inputs lie along these.
    """

    x: Tensor
    weight: Tensor
    transposed: bool
    out: GradientEdge | Tensor
    part: range | None = None
    axis: int = 0
    cuts_inputs: bool = False

    def outputs(self, per_output: Tensor) -> Tensor:
        """Sum over positions.

        Args:
            per_output: ``[A, B, numel of out]``.

        Returns:
            ``[A, B, G, O]``.
        """
        whole = self.weight.shape[-1] if self.transposed else self.weight.shape[0]
        size = len(self.part) if self.part is not None and not self.cuts_inputs else whole
        summed = per_output.reshape(*per_output.shape[:2], *self.x.shape[:-1], size).sum(-2)
        return summed.unsqueeze(2) if self.x.dim() == 2 else summed

    def inputs(self) -> list[Tensor]:
        """Return what the weights of each group are multiplied with, one row for each sample and position: ``[N * L, K]``."""
        return [self.x] if self.x.dim() == 2 else list(self.x)


def products(root: Tensor) -> list[Product]:
    """Find the products of inputs with parameters in a graph, whoever computes them: ``F.linear``, ``x @ W``, recurrent and attention layers.

    Args:
        root: End of the graph.

    Returns:
        One entry a product with a parameter that requires a gradient.
    """
    found, seen, stack = [], set(), [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [upstream for upstream, _ in node.next_functions]
        left = {"MmBackward0": "_saved_self", "BmmBackward0": "_saved_self", "AddmmBackward0": "_saved_mat1", "BaddbmmBackward0": "_saved_batch1"}
        left = left.get(node.name())
        if node.name() == "MvBackward0":  # with the vector of a sample
            behind = node.next_functions[0][0]
            turned = behind is not None and behind.name() in ("TBackward0", "TransposeBackward0")
            behind = behind.next_functions[0][0] if turned else behind
            if hasattr(behind, "variable"):
                found.append(Product(node._saved_vec[None], behind.variable, turned, GradientEdge(node, 0)))
        leaf = node.next_functions[-1][0] if left is not None else None
        turned = leaf is not None and leaf.name() in ("TBackward0", "TransposeBackward0", "PermuteBackward0")
        turned = turned and len(leaf._input_metadata[0].shape) == 2 and not keeps_axes(leaf)
        leaf = leaf.next_functions[0][0] if turned else leaf
        shape = None
        while leaf is not None and left == "_saved_self" and leaf.name() in ("ExpandBackward0", "ViewBackward0", "ReshapeAliasBackward0"):
            # torch.matmul of a stack
            shape, leaf = shape or torch.Size(leaf._input_metadata[0].shape), leaf.next_functions[0][0]
        if hasattr(leaf, "variable") and shape in (None, leaf.variable.shape):
            found.append(Product(getattr(node, left), leaf.variable, not turned, GradientEdge(node, 0)))
        elif left is not None:
            out, x = GradientEdge(node, 0), getattr(node, left)
            first, last = (GradientEdge(*edge) if edge[0] is not None else None for edge in node.next_functions[-2:])
            of_last = part_of_a_parameter(last, x, out) or rearranged(last, x, out)
            left_hand = left != "_saved_batch1" and not of_last
            found += rearranged(first, node._saved_mat2, out, on_the_left=True) if left_hand else of_last
    return found


def keeps_axes(node: Node) -> bool:
    """Tell whether an exchange of axes exchanges one with itself."""
    shape = torch.Size(node._input_metadata[0].shape)
    numbers = torch.arange(float(shape.numel())).reshape(shape)
    return torch.equal(node(numbers), numbers)


def leaf_behind(matrix: GradientEdge | None) -> tuple[Parameter, Tensor, Tensor] | None:
    """Send numbers from a matrix to the only parameter behind it.

    Args:
        matrix: Its edge.

    Returns:
        The parameter, the numbers that were sent, and what has arrived; ``None`` if there is no such parameter.
    """
    node = None if matrix is None else matrix.node
    while node is not None and len(upstream := [n for n, _ in node.next_functions if n is not None]) == 1:
        (node,) = upstream
    like = None if matrix is None else matrix.node._input_metadata[matrix.output_nr]
    if not hasattr(node, "variable") or like.dtype.is_complex:
        return None
    shape = torch.Size(like.shape)
    sent = torch.arange(1, 1 + shape.numel(), dtype=node.variable.dtype).reshape(shape)
    (arrived,) = torch.autograd.grad([matrix], [node.variable], [sent], retain_graph=True)
    return node.variable, sent, arrived


@dataclass
class RearrangedUse:
    """A product with a stack of matrices that has the entries of a parameter in another order.

    Attributes:
        x: What is multiplied, ``[stack, R, K]``.
        weight: The parameter.
        out: Edge of the output, ``[stack, R, O]``, or ``[stack, O, R]`` with the matrices on the left.
        rows: Which of all outputs of the stack belong to each group ``[G, O']``.
        order: In which order each group has the features ``[K]``.
        transposed: Whether features come before outputs in the parameter.
        on_the_left: Whether the matrices are on the left.
        samples: How many samples have a stack of inputs each, ``[samples * stack, ...]``; their rows are joined in ``x``, not in ``out``.
    """

    x: Tensor
    weight: Tensor
    out: GradientEdge
    rows: Tensor
    order: Tensor
    transposed: bool
    on_the_left: bool
    samples: int = 1

    def outputs(self, per_output: Tensor) -> Tensor:
        """Sum over positions: ``[A, B, numel of out]`` to ``[A, B, G, O']``."""
        stack, positions = len(self.x), self.x.shape[1] // self.samples
        shape = (self.samples, stack, *((-1, positions) if self.on_the_left else (positions, -1)))
        return per_output.reshape(*per_output.shape[:2], *shape).sum((2, -1 if self.on_the_left else -2)).flatten(2)[..., self.rows]

    def inputs(self) -> list[Tensor]:
        """Return what the weights of each group are multiplied with, one row for each sample and position: ``[N * L, K]``."""
        outputs = self.weight.numel() // (len(self.x) * self.x.shape[2])
        return [self.x[rows[0] // outputs][:, self.order] for rows in self.rows]


def rearranged(matrix: GradientEdge | None, x: Tensor, out: GradientEdge, on_the_left: bool = False) -> list[RearrangedUse]:
    """Find out how the entries of a stack of matrices lie in a parameter: with as few groups as keep outputs together.

    Args:
        matrix: Edge of the stack.
        x: What it multiplies.
        out: Edge of the product.
        on_the_left: Whether the stack is the left factor.

    Returns:
        The product; none if the entries are not those of a parameter.
    """
    found = leaf_behind(matrix)
    if found is None:
        return []
    weight, sent, arrived = found
    samples = sent.numel() // weight.numel()
    if sent.dim() == 3 and samples > 1 and len(sent) % samples == 0:  # a stack that is repeated for each sample
        parts = torch.block_diag(*sent[: len(sent) // samples].reshape(1, -1).expand(samples, 1, -1)).view(samples, *sent.shape)
        arrived, *others = (torch.autograd.grad([matrix], [weight], [part], retain_graph=True)[0] for part in parts)
        if not all(torch.equal(arrived, other) for other in others):
            return []
        sent = sent[: len(sent) // samples]
    scale = arrived.sum() / sent.sum()  # a multiple of the parameter multiplies multiples of the inputs
    if arrived.numel() == sent.numel() and scale != 0 and torch.allclose(arrived / scale, (arrived / scale).round()):
        arrived, x = (arrived / scale).round(), x * scale
    if not torch.equal(arrived.flatten().sort().values, sent.flatten()):
        return []
    sizes = [1] * (3 - sent.dim()) + [*sent.shape]
    number, features = arrived.flatten().long() - 1, sizes[1 + on_the_left]
    stack, k = number // (sizes[1] * sizes[2]), number % features if on_the_left else number // sizes[2] % features
    o = number // sizes[2] % sizes[1] if on_the_left else number % sizes[2]
    rows, total = stack * sizes[2 - on_the_left] + o, len(number)
    for groups in (g for g in range(1, total + 1) if total // features % g == 0):
        of_group = total // features // groups
        last = weight.shape[-1] == 1  # a side of length one comes last, or first
        for transposed in (last,) if of_group == 1 < features else (not last,) if features == 1 < of_group else (False, True):
            r, c = (part.reshape(groups, *(features, -1) if transposed else (-1, features)) for part in (rows, k))
            r, c = (r.mT, c.mT) if transposed else (r, c)
            of_one = r // sizes[2 - on_the_left]  # the matrix of the stack
            if all(torch.equal(part, one.expand_as(part)) for part, one in ((r, r[..., :1]), (c, c[:1, :1]), (of_one, of_one[:, :1]))):
                given = (x.mT if on_the_left else x).reshape(samples, sizes[0], -1, features).transpose(0, 1).flatten(1, 2)
                return [RearrangedUse(given, weight, out, r[..., 0], c[0, 0], transposed, on_the_left, samples)]
    return []


def part_of_a_parameter(matrix: GradientEdge | None, x: Tensor, out: GradientEdge) -> list[Product]:
    """Find out which part of a parameter a matrix is: where numbers that are sent there arrive.

    Args:
        matrix: Its edge.
        x: What it multiplies.
        out: Edge of the product.

    Returns:
        The product; none if the matrix is no part of a parameter.
    """
    found = leaf_behind(matrix)
    if found is None or found[0].dim() < 2 or found[1].dim() != 2:
        return []
    weight, sent, arrived = found
    transposed = weight.dim() == 3 and torch.equal(arrived[arrived.flatten(1).any(1)], sent[None])
    rows = (arrived.mT if transposed else arrived).flatten(0, -2)
    (places,) = rows.any(1).nonzero(as_tuple=True)
    if torch.equal(rows[places], sent.T):
        assert len(places) == places[-1] - places[0] + 1
        return [Product(x, weight, transposed, out, range(int(places[0]), int(places[-1]) + 1))]
    for axis in (0, 1) if weight.dim() == 2 else ():
        (places,) = arrived.any(1 - axis).nonzero(as_tuple=True)
        part = arrived.index_select(axis, places)
        for turned in (False, True):
            if torch.equal(part, sent.T if turned else sent):
                return [Product(x, weight, not turned, out, range(int(places[0]), int(places[-1]) + 1), axis, turned is bool(axis))]
    return []


def in_blocks(uses: list[Product], outputs: list[Tensor], times: list[float]) -> tuple[Tensor, list[Tensor]]:
    """Tell apart the blocks of rows, or columns, of which all parts of a weight consist.

    Args:
        uses: Products with parts of it.
        outputs: What belongs to their outputs ``[N, D, 1, rows of the part]``.
        times: How often their inputs count.

    Returns:
        What belongs to the outputs of each block ``[N, D, G, O]``, and what they are multiplied with ``[*, K]`` each.
    """
    rows = uses[0].weight.numel() // uses[0].x.shape[-1]
    if uses[0].cuts_inputs:
        rows = uses[0].weight.shape[uses[0].axis]
    parts = [use.part or range(rows) for use in uses]
    size = gcd(rows, *(end for part in parts for end in (part.start, part.stop)))
    if uses[0].cuts_inputs:
        seen = [[(use, out, t) for use, out, t in zip(uses, outputs, times, strict=True) if g * size in use.part] for g in range(rows // size)]
        none = torch.zeros_like(outputs[0][:, :, 0])
        T = torch.stack([sum((out[:, :, 0] for _, out, _ in of_block), none) for of_block in seen], 2)
        starts = [[(use.x * t, g * size - use.part.start) for use, _, t in of_block] for g, of_block in enumerate(seen)]
        return T, [torch.cat([x[:, at : at + size] for x, at in given]) if given else T.new_zeros(1, size) for given in starts]
    T = sum(F.pad(out.flatten(2), (part.start, rows - part.stop)) for part, out in zip(parts, outputs, strict=True)).unflatten(2, (-1, size))
    given = [[x * t for x in use.inputs()] * (rows // size) for use, t in zip(uses, times, strict=True)]  # of a stack one each, else the same for all
    inputs = [[x[g] for x, part in zip(given, parts, strict=True) if g * size in part] for g in range(rows // size)]
    return T, [torch.cat(given) if given else T.new_zeros(1, uses[0].x.shape[-1]) for given in inputs]


CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass
class ConvolutionUse:
    """One use of a weight by a convolution.

    Attributes:
        func: The function.
        x: Input, without graph.
        weight: The parameter.
        options: Further arguments after the bias.
        named: Further arguments by name.
        out: Output.
    """

    func: Callable
    x: Tensor
    weight: Tensor
    options: tuple
    named: dict[str, object]
    out: Tensor
    transposed = False

    @property
    def groups(self) -> int:
        """Number of groups, which follows from the number of channels."""
        if self.func in CONVOLUTIONS:
            return self.x.shape[1] // self.weight.shape[1]
        return self.out.shape[1] // self.weight.shape[1]

    def outputs(self, per_output: Tensor) -> Tensor:
        """Sum over positions.

        Args:
            per_output: ``[A, B, numel of out]``.

        Returns:
            ``[A, B, G, O]``, where sample axis and positions have been summed over.
        """
        summed = per_output.reshape(*per_output.shape[:2], *self.out.shape).movedim(3, 2).flatten(3).sum(3)
        return summed.unflatten(2, (self.groups, -1))

    def inputs(self) -> list[Tensor]:
        """Return what the weights of each group are multiplied with, one row for each sample and position: ``[N * L, K]``."""
        weight = self.weight.detach().clone().requires_grad_()
        out = self.func(self.x, weight, None, *self.options, **self.named)
        return multiplied(out.movedim(1, -1), weight, self.func in TRANSPOSED, self.groups)


def multiplied(out: Tensor, weight: Tensor, transposed: bool, groups: int) -> list[Tensor]:
    """Find out what weights are multiplied with, by differentiating one output channel of each group.

    Args:
        out: Output, channels last: ``[..., G * O]``.
        weight: The weight in its graph.
        transposed: The output channels are the weight's second axis instead of its first.
        groups: Number of groups.

    Returns:
        For each group one row for each sample and position: ``[N * L, K]``.
    """
    result = []
    for g in range(groups):
        (rows,) = jacobian(out[..., g * out.shape[-1] // groups].reshape(-1, 1), [weight])
        rows = rows.reshape(-1, *weight.shape)
        used = rows[:, :, 0].unflatten(1, (groups, -1))[:, g] if transposed else rows[:, g * len(weight) // groups]
        assert used.count_nonzero() == rows.count_nonzero()
        result.append(used.flatten(1))
    return result


def is_or_views(tensor: Tensor, param: Tensor) -> bool:
    """Tell whether a tensor is a parameter, what reshapes that undo each other make of it, or that beside a constant."""
    made = tensor.grad_fn
    if made is not None and made.name() in ("AddBackward0", "SubBackward0") and made.next_functions[-1][0] is None:
        return getattr(made.next_functions[0][0], "variable", None) is param and tensor.shape == param.shape
    return tensor is param or (tensor._base is param and (tensor.shape, tensor.stride()) == (param.shape, param.stride()))


def _cuts(index: object) -> bool:
    return all(isinstance(i, int | slice) for i in (index if isinstance(index, tuple) else (index,)))


class LayerUses(TorchFunctionMode):
    """Records convolutions, ``F.bilinear``, linear in the outer products of its inputs, and ``F.embedding``, linear in one-hot vectors.

    Where an embedding is padded, the vector is zero.
    """

    def __init__(self) -> None:
        """Start with an empty record."""
        super().__init__()
        self.uses: list[Product | ConvolutionUse] = []
        self.lookups: list[tuple[Tensor, Tensor, Tensor]] = []
        self.cuts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.scales: list[Tensor] = []

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:  # noqa: D105
        out = func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values(), None)
        if func in (F.layer_norm, F.rms_norm):
            self.scales += [tensor for tensor in given[1:] if isinstance(tensor, Tensor)]
        elif func is F.bilinear:
            outer = given[0].unsqueeze(-1) * given[1].unsqueeze(-2)
            self.uses.append(Product(outer.detach().flatten(-2).flatten(0, -2), given[2], False, out))
        elif func is F.embedding:
            indices, weight, padding = given[:3]
            one_hot = F.one_hot(indices.long(), len(weight)).to(weight.dtype)
            self.lookups.append((one_hot if padding is None else one_hot * (indices != padding).unsqueeze(-1), weight, out))
        elif func is Tensor.__getitem__ and isinstance(given[0], Parameter) and _cuts(given[1]):
            sizes = [size if size > 1 and axis < given[0].dim() - 1 else 1 for axis, size in enumerate(given[0].shape)]
            rows = torch.arange(prod(sizes)).view(sizes).expand(given[0].shape)[given[1]][..., 0].reshape(-1)
            self.cuts.append((F.one_hot(rows, prod(sizes)).to(out.dtype), given[0], out))
        elif func in (Tensor.__getitem__, torch.index_select, Tensor.index_select) and isinstance(given[0], Parameter) and given[0].dim() == 2:
            numbers = given[1] if func is Tensor.__getitem__ else given[2] if given[1] == 0 else None
            if not isinstance(numbers, Tensor | list) or (numbers := torch.as_tensor(numbers)).dtype == torch.bool:
                return out
            self.lookups.append((F.one_hot(numbers.long() % len(given[0]), len(given[0])).to(out.dtype), given[0], out))
        elif func in (*CONVOLUTIONS, *TRANSPOSED):
            options = {name: value for name, value in (kwargs or {}).items() if name != "bias"}
            self.uses.append(ConvolutionUse(func, args[0].detach().clone(), args[1], args[3:], options, out))
        else:
            return out
        return out.clone()


class TwiceDifferentiableHardsigmoid(Module):
    """Equals ``nn.Hardsigmoid``, of which torch has no second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate.

        Args:
            x: Any tensor.

        Returns:
            Tensor of the same shape.
        """
        point = x.detach().requires_grad_()
        with torch.enable_grad():  # torch's own slope, which it rounds to single precision
            value = F.hardsigmoid(point)
            (slope,) = torch.autograd.grad(value.sum(), point)
        return value.detach() + slope * (x - point.detach())


class LoopOverBags(Module):
    """Equals ``nn.EmbeddingBag``, of which torch has no second derivative."""

    def __init__(self, bag: EmbeddingBag) -> None:
        """Take over weight and options.

        Args:
            bag: The module that is replaced.
        """
        super().__init__()
        self.weight, self.mode, self.padding = bag.weight, bag.mode, bag.padding_idx
        self.include_last_offset = bag.include_last_offset

    def forward(self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Evaluate.

        Args:
            indices: Rows to look up, ``[N, L]``, or ``[sum of lengths]`` with offsets.
            offsets: Where bags begin; the last one may be the end of the last bag.
            per_sample_weights: Weight of each row that is looked up.

        Returns:
            ``[N, D]``.
        """
        starts = list(range(0, indices.numel(), indices.shape[1])) if offsets is None else offsets.tolist()
        ends = [*starts[1:], indices.numel()]
        if self.include_last_offset and offsets is not None:
            starts, ends = starts[:-1], ends[:-1]
        bags, counts = [], []
        for start, end in zip(starts, ends, strict=True):
            entries = [i for i in range(start, end) if indices.flatten()[i] != self.padding]
            numbers, divisor = indices.flatten()[entries].long(), max(len(entries), 1) if self.mode == "mean" else 1
            weights = self.weight.new_ones(len(entries)) if per_sample_weights is None else per_sample_weights.flatten()[entries]
            if self.mode == "max":
                bags.append(self.weight[numbers].amax(0))
            elif weights.requires_grad:
                bags.append((self.weight[numbers] * weights[:, None]).sum(0))
            else:  # a product with a matrix
                counts.append((F.one_hot(numbers, len(self.weight)) * weights[:, None]).sum(0) / divisor)
        return torch.stack(counts) @ self.weight if counts else torch.stack(bags)


class SeparateNorms(TorchFunctionMode):
    """Weight norm in single operations: torch's own takes the norms for constants when it is differentiated twice."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:  # noqa: D105
        if func is not torch._weight_norm:
            return func(*args, **kwargs or {})
        v, g, dim = args
        return g * v / v.norm(dim=[axis for axis in range(v.dim()) if axis != dim], keepdim=True)


def flatten_heads(outputs: list[Tensor]) -> Tensor:
    """Set the outputs of all heads side by side.

    Args:
        outputs: Tensors with samples on axis 0.

    Returns:
        ``[N, D]``.
    """
    return torch.cat([out.reshape(out.shape[0], -1) for out in outputs], dim=1)


def jacobian(flat: Tensor, tensors: list[Tensor] | list[GradientEdge]) -> list[Tensor]:
    """Differentiate every entry of a matrix w.r.t. tensors of its graph.

    Args:
        flat: ``[N, D]``.
        tensors: Tensors, or edges, of the graph.

    Returns:
        For each tensor the Jacobian ``[N, D, numel]``.
    """
    entries = [grad(entry, tensors, retain_graph=True, allow_unused=True) for entry in flat.flatten()]
    jacobians = []
    for tensor, column in zip(tensors, zip(*entries, strict=True), strict=True):
        zeros = torch.zeros_like(tensor if isinstance(tensor, Tensor) else next(g for g in column if g is not None))
        jacobians.append(torch.stack([(zeros if g is None else g).flatten() for g in column]).reshape(*flat.shape, -1))
    return jacobians


def identity(residual: Tensor) -> Tensor:
    """Keep a residual as it is: the Hessian.

    Args:
        residual: Any tensor.

    Returns:
        The same tensor.
    """
    return residual


def clip(residual: Tensor) -> Tensor:
    """Remove negative curvature from a diagonal residual.

    Args:
        residual: Diagonal matrices.

    Returns:
        The same without negative entries.
    """
    return residual.clamp(min=0)


class Oracle:
    """All quantities of one problem. Results are dictionaries from parameter name to value."""

    def __init__(self, problem: Problem) -> None:
        """Run forward and backward once.

        Args:
            problem: Problem; its model must not be extended.
        """
        self.problem = problem
        for module in list(problem.model.modules()):
            for name, child in module.named_children():
                if isinstance(child, Hardsigmoid):
                    setattr(module, name, TwiceDifferentiableHardsigmoid())
                elif isinstance(child, EmbeddingBag):
                    setattr(module, name, LoopOverBags(child))
        self.outputs = self._forward()
        self._widths = [out[0].numel() for out in self.outputs]
        self._flat = flatten_heads(self.outputs)
        self.N, self.D = self._flat.shape
        trainable = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
        used = grad(problem.loss(self.outputs), list(trainable.values()), retain_graph=True, allow_unused=True)
        self.grad = {name: g for name, g in zip(trainable, used, strict=True) if g is not None}
        self.params: dict[str, Parameter] = {name: trainable[name] for name in self.grad}

    def _forward(self) -> list[Tensor]:
        """Run the model, with operations that can be differentiated twice, and note where the random generator stands afterwards.

        Returns:
            All outputs.
        """
        with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH), SeparateNorms():
            outputs = self.problem.outputs()
            self._rng_after_forward = torch.get_rng_state()
        return outputs

    # --- Jacobians, loss gradient and loss Hessian ------------------------------------------------------------------------------------

    @cached_property
    def jac(self) -> dict[str, Tensor]:
        """``J_n`` of every parameter: ``[N, D, numel]``."""
        return dict(zip(self.params, jacobian(self._flat, list(self.params.values())), strict=True))

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Undo the flattening of the outputs.

        Args:
            flat: ``[N, D]``.

        Returns:
            Tensors of the shapes of the outputs.
        """
        return [part.reshape(out.shape) for part, out in zip(flat.split(self._widths, dim=1), self.outputs, strict=True)]

    def _derivatives(self, loss: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, Tensor]:
        """Differentiate a function of the outputs twice.

        Args:
            loss: Function of the outputs.

        Returns:
            Gradient ``[N, D]`` and per-sample Hessian ``[N, D, D]``.
        """
        flat = self._flat.detach().clone().requires_grad_()
        (first,) = grad(loss(self._split(flat)), flat, create_graph=True)
        hessian = torch.zeros(self.N, self.D, self.N, self.D, dtype=flat.dtype)
        if first.requires_grad:
            for n in range(self.N):
                for d in range(self.D):
                    (hessian[n, d],) = grad(first[n, d], flat, retain_graph=True)
        per_sample = torch.stack([hessian[n, :, n] for n in range(self.N)])
        assert hessian.count_nonzero() == per_sample.count_nonzero(), "the loss mixes samples"
        return first.detach(), per_sample

    @cached_property
    def loss_grad(self) -> Tensor:
        """Gradient of the loss w.r.t. the outputs: ``[N, D]``."""
        return self._derivatives(self.problem.loss)[0]

    @cached_property
    def term_hessians(self) -> list[Tensor]:
        """``H_n`` of every term of the loss, ``[N, D, D]`` each."""
        return [self._derivatives(term)[1] for term in self.problem.terms]

    @cached_property
    def hessian_exact(self) -> Tensor:
        """``H_n`` of the loss: ``[N, D, D]``."""
        return sum(self.term_hessians)

    def sampled_hessians(self, mc_samples: int, index: list[int] | None = None, seed: int | None = None) -> list[Tensor]:
        """Monte-Carlo estimates of ``H_n``, from labels drawn from the model's distribution.

        The generator starts where the forward pass left it. One call of ``sample`` per term; since the order of the terms in time is not
        part of the definition, there is one estimate for each order.

        Args:
            mc_samples: Number of samples.
            index: Samples of the mini-batch to use; all if ``None``.
            seed: Seed before the draw instead of the state after the forward pass.

        Returns:
            Estimates, ``[len(index), D, D]`` each.
        """
        index = list(range(self.N)) if index is None else index
        estimates = []
        with torch.random.fork_rng():
            for order in permutations(range(len(self.problem.terms))):
                torch.set_rng_state(self._rng_after_forward) if seed is None else torch.default_generator.manual_seed(seed)
                columns = torch.cat([self._sampled_columns(i, mc_samples, index) for i in order])
                estimates.append(torch.einsum("mnd,mne->nde", columns, columns))
        return estimates

    def _sampled_columns(self, i: int, mc_samples: int, index: list[int]) -> Tensor:
        """Draw labels for one term of the loss and differentiate the negative log-likelihood.

        The expected square of this gradient is the likelihood's Fisher information; its quotient with the Hessian's diagonal gives the
        weight (reduction, class weights, scale of the loss, ...) of each entry. A loss that has no likelihood, or whose Hessian depends on the
        label, gets the symmetric root of ``H``, in units in which its diagonal is one, times random signs.

        Args:
            i: Index of the term.
            mc_samples: Number of samples.
            index: Samples of the mini-batch.

        Returns:
            ``[mc_samples, len(index), D]``.
        """
        term = self.problem.terms[i]
        out = self.outputs[term.head].detach()[index]
        size = torch.Size([mc_samples])
        if isinstance(term.module, MSELoss):
            gradient = 2 * (out - Normal(out, torch.full_like(out, sqrt(0.5))).sample(size))
            fisher = torch.full_like(out, 2.0)
        elif type(term.module) is CrossEntropyLoss:
            probs = out.softmax(1).movedim(1, -1)
            labels = Categorical(probs=probs).sample(size)
            gradient = (probs - F.one_hot(labels, probs.shape[-1])).movedim(-1, 2)
            fisher = (probs * (1 - probs)).movedim(-1, 1)
        elif isinstance(term.module, BCEWithLogitsLoss | MultiLabelSoftMarginLoss):
            probs = out.sigmoid()
            gradient = probs - Binomial(probs=probs).sample(size)
            fisher = probs * (1 - probs)
        elif isinstance(term.module, PoissonNLLLoss) and term.module.log_input:
            fisher = out.exp()
            gradient = fisher - Poisson(fisher).sample(size)
        elif isinstance(term.module, GaussianNLLLoss):
            gradient = out - Normal(out, torch.ones_like(out)).sample(size)
            fisher = torch.ones_like(out)
        else:
            return self._signed_columns(i, mc_samples, index)
        heads = [torch.zeros(mc_samples, len(index), width, dtype=out.dtype) for width in self._widths]
        curvature = self.term_hessians[i][index].diagonal(dim1=1, dim2=2).split(self._widths, dim=1)[term.head]
        weight = (curvature / fisher.reshape(curvature.shape).clamp_min(1e-300)).sqrt()
        heads[term.head] = gradient.reshape(mc_samples, *curvature.shape) * weight / sqrt(mc_samples)
        return torch.cat(heads, dim=2)

    def _signed_columns(self, i: int, mc_samples: int, index: list[int]) -> Tensor:
        """Draw signs for the symmetric root of one term's Hessian, in units of its diagonal; the model has a single head.

        Args:
            i: Index of the term.
            mc_samples: Number of samples.
            index: Samples of the mini-batch.

        Returns:
            ``[mc_samples, len(index), D]``.
        """
        signs = 2 * torch.empty(mc_samples, len(index), self.D, dtype=self._flat.dtype).bernoulli_() - 1
        hessian = self.term_hessians[i][index]
        units = hessian.diagonal(dim1=1, dim2=2).sqrt()
        units = units.where(units > 0, 1)
        values, vectors = torch.linalg.eigh(hessian / units.unsqueeze(1) / units.unsqueeze(2))
        roots = values.where(values > 1e-12 * values.abs().max(), 0).sqrt()
        return torch.einsum("ni,nij,nj,nkj,mnk->mni", units, vectors, roots, vectors, signs) / sqrt(mc_samples)

    # --- first order ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def grad_batch(self) -> dict[str, Tensor]:
        """Gradient of each sample's summand: ``[N, *p]``."""
        return {name: torch.einsum("ndp,nd->np", J, self.loss_grad).reshape(-1, *self.params[name].shape) for name, J in self.jac.items()}

    @cached_property
    def batch_l2(self) -> dict[str, Tensor]:
        """Squared norm of each sample's gradient: ``[N]``."""
        return {name: g.reshape(self.N, -1).square().sum(1) for name, g in self.grad_batch.items()}

    @cached_property
    def sum_grad_squared(self) -> dict[str, Tensor]:
        """Second moment, not centred and not divided by N."""
        return {name: g.square().sum(0) for name, g in self.grad_batch.items()}

    @cached_property
    def variance(self) -> dict[str, Tensor]:
        """Centred variance, divided by N."""
        return {name: (g - g.mean(0)).square().mean(0) for name, g in self.grad_batch.items()}

    # --- GGN --------------------------------------------------------------------------------------------------------------------------

    def diag_ggn_batch(self, hessian: Tensor) -> dict[str, Tensor]:
        """Diagonal of each sample's GGN.

        Args:
            hessian: ``H_n`` or an estimate, ``[N, D, D]``.

        Returns:
            ``[N, *p]`` each.
        """
        return {name: torch.einsum("ndp,nde,nep->np", J, hessian, J).reshape(-1, *self.params[name].shape) for name, J in self.jac.items()}

    def ggn_blocks(self, hessian: Tensor) -> dict[str, Tensor]:
        """GGN block of each parameter.

        Args:
            hessian: ``H_n`` or an estimate, ``[N, D, D]``.

        Returns:
            ``[numel, numel]`` each.
        """
        return {name: torch.einsum("ndp,nde,neq->pq", J, hessian, J) for name, J in self.jac.items()}

    def ggn_per_sample(self, hessian: Tensor, index: list[int] | None = None) -> Tensor:
        """GGN of each sample on all parameters together, in their order.

        Args:
            hessian: ``H_n`` or an estimate, ``[len(index), D, D]``.
            index: Samples of the mini-batch; all if ``None``.

        Returns:
            ``[len(index), P, P]``.
        """
        J = torch.cat(list(self.jac.values()), dim=2)
        J = J if index is None else J[index]
        return torch.einsum("ndp,nde,neq->npq", J, hessian, J)

    # --- Hessian ----------------------------------------------------------------------------------------------------------------------

    @cached_property
    def hessian_blocks_per_sample(self) -> dict[str, Tensor]:
        """Hessian block of each parameter, of the loss as a function of one sample's outputs only: ``[N, numel, numel]``."""
        blocks = {name: torch.zeros(self.N, p.numel(), p.numel(), dtype=p.dtype) for name, p in self.params.items()}
        for n in range(self.N):
            others_detached = self._flat.detach().clone()
            others_detached[n] = self._flat[n]
            loss = self.problem.loss(self._split(others_detached))
            first = grad(loss, list(self.params.values()), create_graph=True, materialize_grads=True)
            for (name, param), gradient in zip(self.params.items(), first, strict=True):
                if gradient.requires_grad:
                    for p, entry in enumerate(gradient.flatten()):
                        (second,) = grad(entry, param, retain_graph=True, allow_unused=True, materialize_grads=True)
                        blocks[name][n, p] = second.flatten()
        return blocks

    @cached_property
    def diag_h_batch(self) -> dict[str, Tensor]:
        """Diagonal of each sample's Hessian: ``[N, *p]``."""
        return {name: block.diagonal(dim1=1, dim2=2).reshape(-1, *self.params[name].shape) for name, block in self.hessian_blocks_per_sample.items()}

    @cached_property
    def hessian_blocks(self) -> dict[str, Tensor]:
        """Hessian block of each parameter: ``[numel, numel]``."""
        return {name: block.sum(0) for name, block in self.hessian_blocks_per_sample.items()}

    # --- Kronecker factors ------------------------------------------------------------------------------------------------------------

    def kronecker(self, hessian: Tensor) -> dict[str, list[Tensor]]:
        """Kronecker factors of KFAC (sampled ``H_n``) and KFLR (exact ``H_n``).

        Weights ``W`` of ``x W^T`` have ``[B, A]``, matrices ``W`` of ``x @ W`` have ``[A, B]``, with ``A = 1/N sum x x^T`` over all rows of all
        uses and ``B = sum_n T_n^T H_n T_n``, where ``T_n`` is the Jacobian of sample n's outputs w.r.t. the sum of all rows of all uses. A
        stack of matrices has one such list a matrix, a convolution one a group, a weight in parts one a block of rows. What is made once for
        all samples counts for each of them.
        Tables of embeddings have ``[diag A, B]``, of the rows that are not padding; so have other parameters with two axes, rows of which
        each sample looks up: those that are cut out, or else all. Any other parameter, and those of normalizations, have their exact block.

        Args:
            hessian: ``H_n`` or an estimate, ``[N, D, D]``.

        Returns:
            List of factors, or of such lists, each.
        """
        with LayerUses() as mode:
            flat = flatten_heads(self._forward())
        assert torch.equal(flat, self._flat)
        uses_of_all = [*products(flat), *mode.uses]
        factors = {name: [block] for name, block in self.ggn_blocks(hessian).items()}
        for name, param in self.params.items():
            uses = [use for use in uses_of_all if is_or_views(use.weight, param)]
            cuts = {(use.axis, use.cuts_inputs) for use in uses if isinstance(use, Product)}
            if uses and len(cuts) <= 1:  # else it is used in two ways, and has none
                tracked = jacobian(flat, [use.out for use in uses])
                outputs, times = [use.outputs(jac) for use, jac in zip(uses, tracked, strict=True)], [self._times(jac) for jac in tracked]
                if any(getattr(use, "part", None) for use in uses):
                    T, A = in_blocks(uses, outputs, times)
                else:
                    T, inputs = sum(outputs), [[a * t for a in use.inputs()] for use, t in zip(uses, times, strict=True)]
                    A = [torch.cat(rows) for rows in zip(*inputs, strict=True)]
                B = torch.einsum("ndgp,nde,negq->gpq", T, hessian, T)
                pairs = [[b, a.T @ a / self.N] for b, a in zip(B, A, strict=True)]
                pairs = [pair[::-1] for pair in pairs] if uses[0].transposed else pairs
                factors[name] = pairs[0] if len(pairs) == 1 else pairs
            table = not uses and not any(scale is param for scale in mode.scales) and len(sizes := [size for size in param.shape if size > 1]) == 2
            found = [(*lookup, self._times) for lookup in mode.lookups] + [(*cut, self._seen) for cut in mode.cuts * table]
            lookups = [(x.flatten(0, -2), z) for x, weight, z, _ in found if weight is param]
            times = [of for _, weight, _, of in found if weight is param]
            if lookups:
                tracked = jacobian(flat, [z for _, z in lookups])
                places = zip(tracked, lookups, strict=True)
                T = sum((jac.reshape(*jac.shape[:2], len(x), z.shape[-1]) * x.sum(1)[:, None]).sum(2) for jac, (x, z) in places)
                inputs = torch.cat([x * of(jac) for (x, _), jac, of in zip(lookups, tracked, times, strict=True)])
                factors[name] = [inputs.square().sum(0) / self.N, torch.einsum("ndp,nde,neq->pq", T, hessian, T)]
            elif table:
                T = jacobian(flat, [param])[0].reshape(self.N, -1, *sizes).sum(2)
                factors[name] = [param.new_ones(sizes[0]).detach(), torch.einsum("ndp,nde,neq->pq", T, hessian, T)]
        return factors

    def _times(self, jac: Tensor) -> float:
        # the root of how many samples a row belongs to: an output that several samples depend on, ``[N, D, *out]``, is there for all
        return self.N**0.5 if ((jac != 0).any(1).sum(0) > 1).any() else 1.0

    def _seen(self, jac: Tensor) -> float:
        # the root of how many samples see rows that are cut out of a table
        return sqrt((jac != 0).flatten(1).any(1).sum())

    # --- recursions along a chain of modules ------------------------------------------------------------------------------------------

    @cached_property
    def chain(self) -> list[tuple[Module, Tensor, Tensor]]:
        """Every call of a leaf module, in order: module, input (a leaf of its own graph), output. The calls must form a chain."""
        calls: list[tuple[Module, Tensor, Tensor]] = []
        leaves: list[Tensor] = []

        def before(_: Module, args: tuple, kwargs: dict[str, object]) -> tuple[tuple, dict]:
            first = next((name for name, value in kwargs.items() if not args and isinstance(value, Tensor)), None)
            x = args[0] if args else kwargs[first]
            leaves.append(x.detach().clone().requires_grad_(x.is_floating_point()))
            return (leaves[-1].clone(), *args[1:]), {name: value for name, value in kwargs.items() if name != first}

        def after(module: Module, _: tuple[Tensor], output: Tensor) -> None:
            calls.append((module, leaves.pop(), output))

        handles = []
        for module in self.problem.model.modules():
            if not list(module.children()):
                handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        (out,) = self._forward()
        for handle in handles:
            handle.remove()
        for (_, _, z), (_, x, _) in zip(calls[:-1], calls[1:], strict=True):
            assert torch.equal(z, x), "not a chain"
        assert torch.equal(out, self.outputs[0])
        assert torch.equal(calls[-1][2], out), "not a chain"
        return calls

    def recursion(self, residual: Callable[[Tensor], Tensor] | None, average: bool) -> dict[str, Tensor | list[Tensor]]:
        """Propagate ``H`` from output to input of each module: ``J^T H J``, plus the modified residual ``sum_k dL/dz_k d2 z_k/dx dx``.

        Args:
            residual: What is done to the residuals ``[N, D, D]``, or to their sum; ``None`` leaves them out.
            average: Propagate one matrix for the mini-batch, starting with the sum of ``H_n``, with the mean of ``J_n^T H J_n`` and the
                modified sum of the residuals, and return Kronecker factors; otherwise one matrix per sample, and return blocks.

        Returns:
            Blocks ``[numel, numel]``, or lists of Kronecker factors of the parameters of ``Linear`` modules and convolutions without groups.
        """
        names = {param: name for name, param in self.params.items()}
        result: dict[str, Tensor | list[Tensor]] = {}
        H, g = self.hessian_exact, self.loss_grad
        if average:
            H = H.sum(0, keepdim=True)
        for module, x, z in reversed(self.chain):
            for local, param in module.named_parameters(recurse=False):
                if param not in names:
                    continue
                assert names[param] not in result, "parameter used twice"
                if average:
                    outputs = z.shape[1]  # all else are positions, summed over
                    B = H[0].unflatten(1, (outputs, -1)).unflatten(0, (outputs, -1)).sum((1, 3))
                    result[names[param]] = [B]
                    if local == "weight":
                        (rows,) = multiplied(z.movedim(1, -1), param, "ConvTranspose" in type(module).__name__, 1)
                        result[names[param]].append(rows.T @ rows / self.N)
                else:
                    (J_param,) = jacobian(z.flatten(1), [param])
                    result[names[param]] = torch.einsum("ndp,nde,neq->pq", J_param, H, J_param)
            if not x.is_floating_point():
                break
            J = torch.stack([grad(column.sum(), x, retain_graph=True)[0].flatten(1) for column in z.flatten(1).T], dim=1)
            H = torch.einsum("ndi,nde,nej->nij", J, H.expand(self.N, -1, -1), J)
            H = H.mean(0, keepdim=True) if average else H
            (g_x,) = grad(z, x, g.reshape(z.shape), create_graph=True)
            g_x = g_x.flatten(1)
            if residual is not None and g_x.requires_grad:
                rows = [grad(column.sum(), x, retain_graph=True, materialize_grads=True)[0].flatten(1) for column in g_x.T]
                second = torch.stack(rows, dim=1)
                H = H + residual(second.sum(0) if average else second)
            g = g_x.detach()
        return result
