"""The rules by which the conversion replaces functions and methods of tensors by modules.

A rule has the signature of the operation, after the graph under conversion. It returns the node of the replacement, or ``None`` to leave the
operation as it is. A call that does not fit the signature is left as it is, too.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from inspect import signature
from types import EllipsisType

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import Argument, Target, map_arg
from torch.nn import Flatten, Module
from torch.nn import functional as F

from backpack.custom_module.branching import _Rows, _Sum
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule, _ScaledSummand
from backpack.custom_module.slicing import Slicing
from backpack.utils.errors import ArgumentError

# methods and attributes of a tensor that are no tensors, and attributes that are
NUMBER_METHODS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "item", "tolist", "get_device", "element_size"}
TENSOR_ATTRIBUTES = {"T", "mT", "H", "mH", "data", "real", "imag"}
# functions, and methods of the same name, whose settings are those of a layer, in the same order
LAYERS: dict[str, type[Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "celu": nn.CELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "sigmoid": nn.Sigmoid,
    "logsigmoid": nn.LogSigmoid,
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "tanh": nn.Tanh,
    "tanhshrink": nn.Tanhshrink,
    "softshrink": nn.Softshrink,
    "hardshrink": nn.Hardshrink,
    "threshold": nn.Threshold,
    "softmax": nn.Softmax,
    "log_softmax": nn.LogSoftmax,
    **{f"{kind}_pool{n}d": getattr(nn, f"{kind.title()}Pool{n}d") for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": getattr(nn, f"Adaptive{kind.title()}Pool{n}d") for kind in ("max", "avg") for n in (1, 2, 3)},
}
_IN_ORDER = 4  # positional settings of torch.max_pool2d that are those of MaxPool2d


class ModuleGraph:
    """A graph, the module that its nodes call into, and which of its nodes are no tensors."""

    def __init__(self, root: Module, graph: Graph, debug: bool) -> None:
        """Store the graph.

        Args:
            root: The module that ``graph`` was traced from. New modules are attached to it.
            graph: The graph.
            debug: Print each change.
        """
        self.root = root
        self.graph = graph
        self.debug = debug
        self._constants: set[Node] = set()

    def call(self, module: Module, *args: Node, prefix: str | None = None) -> Node:
        """Attach a new module to the root, in its mode, and call it at the current place of the graph.

        Args:
            module: The module.
            *args: Its inputs.
            prefix: Beginning of its name; that of its class by default.

        Returns:
            The node of the call.
        """
        name = get_free_name(self.root, prefix or re.sub("(?<!^)(?=[A-Z])", "_", type(module).__name__).lower())
        self.log(f"{name} = {module}")
        self.root.add_module(name, module.train(self.root.training))
        return self.graph.call_module(name, args)

    def is_tensor(self, value: object) -> bool:
        """Tell whether an argument is a tensor that the model computes from its input: not a size, nor made of parameters and buffers alone.

        Args:
            value: Argument of a node.

        Returns:
            Whether it is one.
        """
        return isinstance(value, Node) and value not in self._constants

    def log(self, message: str) -> None:
        """Print a message if this was asked for.

        Args:
            message: The message.
        """
        if self.debug:
            print(f"[convert] {message}")

    def replace(self, node: Node, new: Node) -> None:
        """Put a node into the place of another.

        Args:
            node: The old node.
            new: The new node.
        """
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def replace_functions(self) -> None:
        """Replace functions and methods by the modules that the rules name."""
        for node in list(self.graph.nodes):
            if self._is_constant(node):
                self._constants.add(node)
            elif node.op in {"call_function", "call_method"} and node.target in RULES and _fits(RULES[node.target], node):
                with self.graph.inserting_before(node):
                    new = RULES[node.target](self, *node.args, **node.kwargs)
                if new is not None:
                    inputs = node.all_input_nodes
                    self.replace(node, new)
                    self._drop_numbers(inputs)

    def _drop_numbers(self, nodes: list[Node]) -> None:
        for node in nodes:
            if node in self._constants and not node.users and node.op != "placeholder":
                inputs = node.all_input_nodes
                self.graph.erase_node(node)
                self._drop_numbers(inputs)

    def _is_constant(self, node: Node) -> bool:
        """Tell whether a node stands for a parameter, a buffer, a size, a number or another thing that is no tensor.

        Args:
            node: The node.

        Returns:
            ``True`` only if this is known, or if it is computed from such things alone.
        """
        if node.op == "placeholder":
            return isinstance(node.args[0], int | float) if node.args else False
        if node.op == "call_method" and node.target in NUMBER_METHODS:
            return True
        if node.op == "get_attr" or node.target is getattr and node.args[1] not in TENSOR_ATTRIBUTES:
            return True
        return node.op in {"call_function", "call_method"} and node.all_input_nodes != [] and self._constants.issuperset(node.all_input_nodes)


Rule = Callable[..., Node | None]
RULES: dict[Target, Rule] = {}


def _rule(*targets: Target) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def _fits(rule: Rule, node: Node) -> bool:
    try:
        signature(rule).bind(None, *node.args, **node.kwargs)
    except TypeError:
        return False
    return True


@_rule(operator.mul, torch.mul, torch.multiply, "mul", "multiply")
def _transform_mul(graph: ModuleGraph, input: Argument, other: Argument) -> Node | None:
    tensor, factor = (other, input) if isinstance(input, float) else (input, other)
    # an int would have to become a float, which changes the type of integer tensors
    if not graph.is_tensor(tensor) or not isinstance(factor, float):
        return None
    return graph.call(ScaleModule(factor), tensor)


@_rule(operator.add, torch.add, "add")
def _transform_add(graph: ModuleGraph, input: Argument, other: Argument, *, alpha: float = 1) -> Node | None:
    if not graph.is_tensor(input) or not graph.is_tensor(other) or not isinstance(alpha, int | float):
        return None
    if alpha != 1:
        other = graph.call(_ScaledSummand(float(alpha), f"`{input} + {alpha} * {other}`"), other, prefix="scale_module")
    return graph.call(_Sum(), input, other, prefix="sum_module")


@_rule(operator.sub, torch.sub, torch.subtract, "sub", "subtract")
def _transform_sub(graph: ModuleGraph, input: Argument, other: Argument, *, alpha: float = 1) -> Node | None:
    return _transform_add(graph, input, other, alpha=-alpha) if isinstance(alpha, int | float) else None


@_rule(torch.flatten, "flatten")
def _transform_flatten(graph: ModuleGraph, input: Argument, start_dim: int = 0, end_dim: int = -1) -> Node | None:
    if not graph.is_tensor(input) or not _are_ints(start_dim, end_dim):
        return None
    return graph.call(Flatten(start_dim, end_dim), input)


@_rule(torch.reshape, "reshape", "view")
def _transform_reshape(graph: ModuleGraph, input: Argument, *sizes: Argument, shape: tuple[Argument, ...] = ()) -> Node | None:
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes or shape
    if not graph.is_tensor(input) or len(sizes) != 2 or any(map(graph.is_tensor, sizes)) or sum(size == -1 for size in sizes) != 1:
        return None
    return graph.call(_Rows(), input, *([] if _is_length(sizes[0], input) else sizes), prefix="flatten")


@_rule(operator.getitem)
def _transform_getitem(graph: ModuleGraph, input: Argument, index: Argument) -> Node | None:
    if not graph.is_tensor(input):
        return None
    if _are_ints(index):
        return graph.call(ReduceTuple(index), input)
    if isinstance(index, tuple) and index[:1] == (slice(None),) and all(map(_is_constant_index, index)):
        return graph.call(Slicing(index), input)
    return None


@_rule(torch.permute, "permute")
def _transform_permute(graph: ModuleGraph, input: Argument, *axes: int | tuple[int, ...], dims: tuple[int, ...] = ()) -> Node | None:
    axes = axes or dims
    return _permute(graph, input, axes if len(axes) != 1 or _are_ints(*axes) else axes[0])


@_rule(torch.transpose, "transpose")
def _transform_transpose(graph: ModuleGraph, input: Argument, dim0: int, dim1: int) -> Node | None:
    return _permute(graph, input, (dim0, dim1), init_transpose=True)


def _permute(graph: ModuleGraph, input: Argument, dims: Iterable[int], init_transpose: bool = False) -> Node | None:
    if not graph.is_tensor(input) or not _are_ints(*dims):
        return None
    try:
        return graph.call(Permute(*dims, init_transpose=init_transpose), input)
    except ArgumentError:  # moves the batch axis: only the function may do so
        return None


def _transform_layer(name: str) -> Rule:
    def transform(graph: ModuleGraph, input: Argument, *settings: Argument, **named: Argument) -> Node | None:
        computed: list[Node] = []
        map_arg((settings, named), computed.append)
        if not graph.is_tensor(input) or computed or len(settings) > _IN_ORDER:
            return None
        given = {key: value for key, value in named.items() if value is not None and key != "_stacklevel"}
        try:
            layer = LAYERS[name](*settings, **given)
        except TypeError:  # an option that the layer does not have, as another type of the result
            return None
        return graph.call(layer, input, prefix=name)

    return transform


for _name in LAYERS:
    # a function of torch.nn.functional may choose between two, and show the one that it has chosen
    _targets = {getattr(space, name, None) for space in (torch, F) for name in (_name, f"_{_name}")}
    _rule(*(_targets - {None}), *([_name] if hasattr(Tensor, _name) else []))(_transform_layer(_name))


def _are_ints(*values: object) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _is_length(size: Argument, tensor: Node) -> bool:
    """Tell whether an argument is the length of axis 0: ``x.size(0)``, ``x.size()[0]`` or ``x.shape[0]``.

    Args:
        size: The argument.
        tensor: The tensor.

    Returns:
        Whether it is.
    """
    if not isinstance(size, Node):
        return False
    if size.target == "size":
        return (*size.args, *size.kwargs.values()) == (tensor, 0)
    shape = size.args[0] if size.target is operator.getitem and size.args[1] == 0 else None
    return isinstance(shape, Node) and (shape.target, shape.args) in [("size", (tensor,)), (getattr, (tensor, "shape"))]


def _is_constant_index(index: object) -> bool:
    if isinstance(index, slice):
        return all(_is_constant_index(bound) for bound in (index.start, index.stop, index.step))
    return index is None or isinstance(index, EllipsisType) or _are_ints(index)


def get_free_name(module: Module, prefix: str) -> str:
    """Find a name that a module does not use yet.

    Args:
        module: The module.
        prefix: Beginning of the name.

    Returns:
        The prefix with the first free index.
    """
    i = 0
    while hasattr(module, f"{prefix}{i}"):
        i += 1
    return f"{prefix}{i}"
