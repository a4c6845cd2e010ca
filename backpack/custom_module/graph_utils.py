"""Conversion of a model into a ``torch.fx.GraphModule`` that consists of modules, as far as that is possible.

The structure of the model is copied, its parameters and buffers are shared, and the copy is traced. Then the graph is rewritten, and new modules
are attached to the copy. An operation without a module stays a function, which is always exact, and is reported by a warning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer
from torch.fx.node import Target
from torch.fx.proxy import Attribute, TraceError
from torch.nn import LSTM, RNN, AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, FeatureAlphaDropout, Module, Sequential
from torch.nn import functional as F

from backpack.custom_module.branching import Parallel, SumModule, _Branch
from backpack.custom_module.function_rules import ModuleGraph, get_free_name
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.recurrent import check_recurrent, make_rnn_backpack
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.utils.errors import UnsupportedError, require_module

LEAVES = (ScaleModule, SumModule, Parallel, _Branch, ReduceTuple, Permute, Pad, Slicing)
DROPOUTS: dict[Target, type[Module]] = {
    F.dropout: Dropout,
    F.dropout1d: Dropout1d,
    F.dropout2d: Dropout2d,
    F.dropout3d: Dropout3d,
    F.alpha_dropout: AlphaDropout,
    F.feature_alpha_dropout: FeatureAlphaDropout,
}
OUT_OF_PLACE: dict[Target, Target] = {operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul}
OTHER_AUGMENTED = (operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor)
# what never returns memory of its input: used to judge whether an in-place operation can be seen elsewhere
FRESH_FUNCTIONS: set[Target] = {*OUT_OF_PLACE.values(), torch.add, torch.sub, torch.mul, torch.cat, "add", "sub", "mul"}
FRESH_FILES = {"torch.nn.modules.activation", "torch.nn.modules.pooling"}


def convert_module_to_backpack(module: Module, debug: bool) -> GraphModule:
    """Convert a model into one that uses modules instead of functions.

    Sums, differences and scalings (``+``, ``-``, ``*`` by a ``float``), ``flatten``, ``permute``, ``transpose``, indexing, ``dropout``, activations
    and pooling become modules; recurrent layers are split into single layers; in-place operations become ordinary ones where nothing else can see
    the difference; modules that are called several times get a copy for each call. A model that is itself a layer is put into a ``Sequential``.

    The given model is left as it is. The result shares its parameters and buffers, in the same order, and its training flags; from then on, it is
    switched by its own ``.train()`` and ``.eval()``.

    Args:
        module: The model, traceable by ``torch.fx``.
        debug: Print each step.

    Returns:
        The converted model. For what could not be converted, and for behaviour that depends on the training flag, a ``UserWarning`` is emitted.

    Raises:
        UnsupportedError: If a module with parameters is called several times, if a recurrent layer cannot be split, or if the forward pass switches
            gradients or autocast for a part of it. The message names the place.
    """
    require_module(module, "convert_module_to_backpack")
    tracer = BackpackTracer()
    if tracer.is_leaf_module(module, ""):
        module = Sequential(module)
    return _Conversion(module, debug).run()


class _Augmented:
    """Record augmented assignments (``x += y``) as what they are; ``torch.fx`` would record ordinary operations."""


def _record(operation: Callable[[Any, Any], Any]) -> Callable[[Proxy, Any], Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", operation, (self, other), {})


for _operation in (*OUT_OF_PLACE, *OTHER_AUGMENTED):
    setattr(_Augmented, f"__{_operation.__name__}__", _record(_operation))


class _AugmentedAttribute(_Augmented, Attribute):
    """An attribute of a traced value, such as ``x.T``."""


class _AugmentedProxy(_Augmented, Proxy):
    """A traced value."""

    def __getattr__(self, name: str) -> Attribute:
        return _AugmentedAttribute(self, name)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


class BackpackTracer(Tracer):
    """Tracer that does not look into the modules of this package, and refuses contexts that a graph would forget."""

    def trace(self, root: Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> Graph:
        self._modes = _modes()
        try:
            return super().trace(root, concrete_args)
        except TraceError as error:
            raise UnsupportedError(f"The forward pass cannot be traced: {error}. Use the model without conversion.") from error

    def create_node(self, kind: str, target: Target, *args: Any, **kwargs: Any) -> Node:
        if _modes() != self._modes:
            raise UnsupportedError(
                f"The forward pass switches gradients or autocast for a part of it (at {target}), which a graph does not show. "
                "Use the model without conversion, or call .detach() in place of no_grad()."
            )
        return super().create_node(kind, target, *args, **kwargs)

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: Node) -> Proxy:
        return _AugmentedProxy(node, self)


class _Conversion(ModuleGraph):
    """One conversion: the copy of the model, its graph, and the passes that rewrite both."""

    def __init__(self, module: Module, debug: bool) -> None:
        """Copy and trace the model.

        Args:
            module: The model.
            debug: Print each step.
        """
        self.original = module
        root = _copy_structure(module)
        super().__init__(root, BackpackTracer().trace(root), debug)

    def run(self) -> GraphModule:
        """Apply all passes.

        Returns:
            The converted model.
        """
        self._transform_dropout()
        self._remove_unused_items()
        self._transform_repeated_modules()
        self._transform_inplace()
        self._transform_recurrent()
        self.replace_functions()
        self._check_backpack_compatible()
        converted = GraphModule(self.root, self.graph)
        _restore_order(converted, self.root)
        return converted

    def _module(self, node: Node) -> Module | None:
        return self.root.get_submodule(node.target) if node.op == "call_module" else None

    def _owner(self, target: str) -> tuple[Module, str]:
        path, _, name = target.rpartition(".")
        return self.root.get_submodule(path), name

    def _transform_dropout(self) -> None:
        """Replace dropout functions that follow the training flag; found by tracing the model in both modes."""
        nodes = list(self.graph.nodes)
        try:
            in_training, in_evaluation = (list(BackpackTracer().trace(_copy_structure(self.original).train(mode)).nodes) for mode in (True, False))
        except Exception:  # user code may fail in any way when it is traced in a mode that nobody asked for: this, too, is a difference
            in_training = in_evaluation = []
        expected = [_without_training(node) for node in nodes]
        if any([_without_training(node) for node in others] != expected for others in (in_training, in_evaluation)):
            warn("The forward pass depends on the training flag; the converted module will stay in the mode that the model is in now.", stacklevel=4)
            return
        for node, on, off in zip(nodes, in_training, in_evaluation, strict=True):
            if node.target in DROPOUTS and on.kwargs["training"] != off.kwargs["training"]:
                dropout = DROPOUTS[node.target](node.kwargs["p"], inplace=node.kwargs["inplace"])
                with self.graph.inserting_before(node):
                    self.replace(node, self.call(dropout, *node.args))
                dropout.train(node.kwargs["training"])

    def _remove_unused_items(self) -> None:
        """Drop the nodes of entries that are unpacked from a tuple but never read."""
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)

    def _transform_repeated_modules(self) -> None:
        """Give each call a module of its own.

        Raises:
            UnsupportedError: If a module with parameters is called several times.
        """
        seen = set()
        for node in self.graph.nodes:
            if node.op == "call_module" and node.target in seen:
                module = self._module(node)
                if any(True for _ in module.parameters()):
                    raise UnsupportedError(
                        f"{node.target} ({type(module).__name__}) has parameters and is called several times, so it cannot become one module per "
                        "call. Use the model without conversion."
                    )
                owner, name = self._owner(node.target)
                name = get_free_name(owner, f"{name}_")
                owner.add_module(name, _copy_structure(module))
                node.target = node.target.rpartition(".")[0] + "." * ("." in node.target) + name
                self.log(f"{node.target} = {module}, called repeatedly")
            elif node.op == "call_module":
                seen.add(node.target)

    def _transform_inplace(self) -> None:
        """Replace in-place operations by ordinary ones where nothing else can see the difference; elsewhere they stay as they are."""
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        for node in self.graph.nodes:
            module = self._module(node)
            if getattr(module, "inplace", False) and self._is_private(node, order):
                module.inplace = False
            elif node.op == "call_function" and node.target in OUT_OF_PLACE and self._is_private(node, order):
                node.target = OUT_OF_PLACE[node.target]

    def _is_private(self, inplace: Node, order: dict[Node, int]) -> bool:
        """Tell whether only the result of an in-place operation is read after it, not its input under another name.

        Args:
            inplace: The operation.
            order: Position of each node.

        Returns:
            Whether the memory that is overwritten belongs to this operation only.
        """
        same_memory, todo = {inplace}, list(inplace.all_input_nodes[:1])
        while todo:
            node = todo.pop()
            if node.op == "get_attr" or any(order[user] > order[inplace] for user in node.users):
                return False
            if node not in same_memory:
                same_memory.add(node)
                todo += [user for user in node.users if user not in same_memory and self._may_alias(user)]
                todo += node.all_input_nodes if self._may_alias(node) else []
        return True

    def _may_alias(self, node: Node) -> bool:
        """Tell whether a node may return memory of its inputs.

        Args:
            node: The node.

        Returns:
            ``False`` only where this is excluded.
        """
        module = self._module(node)
        if module is None:
            return node.target not in FRESH_FUNCTIONS
        is_fresh = type(module).__module__ in FRESH_FILES or any(True for _ in module.parameters(recurse=False))
        return getattr(module, "inplace", False) or not is_fresh

    def _transform_recurrent(self) -> None:
        """Split recurrent layers with several layers into single ones."""
        for node in self.graph.nodes:
            module = self._module(node)
            if isinstance(module, RNN | LSTM) and module.num_layers > 1:
                check_recurrent(node, module)
                setattr(*self._owner(node.target), make_rnn_backpack(module))
                self.log(f"{node.target} = one module per layer of {module}")

    def _check_backpack_compatible(self) -> None:
        for node in self.graph.nodes:
            if node.op not in {"placeholder", "output", "call_module"}:
                warn(f"{node.name} ({node.op} of {node.target}) is no module and stays in the graph as it is.", stacklevel=4)


def _copy_structure(module: Module) -> Module:
    """Copy a module and its children, but share all parameters, buffers and other tensors that are attributes.

    Args:
        module: The module.

    Returns:
        The copy.
    """
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor)]
    return deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _without_training(node: Node) -> tuple[object, ...]:
    """Describe a node; dropout functions without their training flag.

    Args:
        node: The node.

    Returns:
        A description that is equal for equal nodes of different graphs.
    """
    kwargs = {**node.kwargs, "training": None} if node.target in DROPOUTS else node.kwargs
    return node.op, node.name, node.target, str(node.args), str(kwargs)


def _restore_order(new: Module, old: Module) -> None:
    """Bring parameters and children, which ``torch.fx`` lists in the order of their use, into the order of the model; likewise its flags.

    Args:
        new: The converted model, or one of the containers that ``torch.fx`` made for it.
        old: What it was made from.
    """
    for new_entries, old_entries in ((new._parameters, old._parameters), (new._buffers, old._buffers), (new._modules, old._modules)):
        order = [name for name in old_entries if name in new_entries]
        for name in order:
            new_entries[name] = new_entries.pop(name)
    new._non_persistent_buffers_set.update(old._non_persistent_buffers_set & new._buffers.keys())
    new.training = old.training
    for name, child in new._modules.items():
        if child is not old._modules[name]:
            _restore_order(child, old._modules[name])
