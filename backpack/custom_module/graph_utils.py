"""Conversion of a model into a ``torch.fx.GraphModule`` that consists of modules, as far as that is possible.

The structure of the model is copied, its parameters and buffers are shared, and the copy is traced. Then the graph is rewritten, and new modules
are attached to the copy. An operation without a module stays a function, which is always exact, and is reported by a warning.
"""

from __future__ import annotations

import operator
from warnings import warn

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Target
from torch.nn import LSTM, RNN, Module, Sequential

from backpack.custom_module.function_rules import ModuleGraph, get_free_name
from backpack.custom_module.recurrent import check_recurrent, make_rnn_backpack
from backpack.custom_module.tracing import DROPOUTS, OUT_OF_PLACE, BackpackTracer, copy_structure, is_adapted, trace_twice, without_training
from backpack.utils.errors import UnsupportedError, require_module

# what never returns memory of its input: used to judge whether an in-place operation can be seen elsewhere
FRESH_FUNCTIONS: set[Target] = {*OUT_OF_PLACE.values(), torch.add, torch.sub, torch.mul, torch.cat, "add", "sub", "mul"}
FRESH_FILES = {"torch.nn.modules.activation", "torch.nn.modules.pooling"}


def convert_module_to_backpack(module: Module, debug: bool) -> GraphModule:
    """Convert a model into one that uses modules instead of functions.

    Sums, differences and scalings (``+``, ``-``, ``*`` by a ``float``), ``flatten``, ``view`` and ``reshape`` that make a matrix, ``permute``,
    ``transpose``, indexing, ``dropout``, activations and pooling become modules; recurrent layers are split into single layers; in-place operations
    become ordinary ones where nothing else can see the difference; modules that are called several times get a copy for each call. A model that is
    itself a layer is put into a ``Sequential``.
    Modules that have hooks, or a ``forward`` that was put on the instance, are kept as they are: these are part of what they compute.

    The given model is left as it is. The result shares its parameters and buffers, in the same order, and its training flags; from then on, it is
    switched by its own ``.train()`` and ``.eval()``.

    Args:
        module: The model, traceable by ``torch.fx``.
        debug: Print each step.

    Returns:
        The converted model. For what could not be converted, and for behaviour that depends on the training flag, a ``UserWarning`` is emitted.

    Raises:
        UnsupportedError: If a module with parameters is called several times, if a recurrent layer cannot be split, if the forward pass switches
            gradients or autocast for a part of it, or if it draws random numbers or changes from call to call, so that a graph would show one of
            many functions. The message names the place.
    """
    require_module(module, "convert_module_to_backpack")
    tracer = BackpackTracer()
    # the root of a trace is not called, only the forward of its class is; that of a GraphModule only reports errors
    own_call = type(module).__call__ is not Module.__call__ and not isinstance(module, GraphModule)
    if own_call or tracer.is_leaf_module(module, ""):
        module = Sequential(module)
    return _Conversion(module, debug).run()


class _Conversion(ModuleGraph):
    """One conversion: the copy of the model, its graph, and the passes that rewrite both."""

    def __init__(self, module: Module, debug: bool) -> None:
        """Copy and trace the model.

        Args:
            module: The model.
            debug: Print each step.
        """
        self.original = module
        root = copy_structure(module)
        super().__init__(root, trace_twice(root), debug)

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

    def _layer(self, node: Node) -> Module | None:
        module = self._module(node)
        return module if module is not None and BackpackTracer().is_layer(module) and not is_adapted(module) else None

    def _owner(self, target: str) -> tuple[Module, str]:
        path, _, name = target.rpartition(".")
        return self.root.get_submodule(path), name

    def _transform_dropout(self) -> None:
        """Replace dropout functions that follow the training flag; found by tracing the model in both modes."""
        nodes = list(self.graph.nodes)
        try:
            in_training, in_evaluation = (list(trace_twice(copy_structure(self.original).train(mode)).nodes) for mode in (True, False))
        except UnsupportedError:  # in a mode that nobody asked for: this, too, is a difference
            in_training = in_evaluation = []
        expected = [without_training(node) for node in nodes]
        if any([without_training(node) for node in others] != expected for others in (in_training, in_evaluation)):
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
                owner.add_module(name, copy_structure(module))
                node.target = node.target.rpartition(".")[0] + "." * ("." in node.target) + name
                self.log(f"{node.target} = {module}, called repeatedly")
            elif node.op == "call_module":
                seen.add(node.target)

    def _transform_inplace(self) -> None:
        """Replace in-place operations by ordinary ones where nothing else can see the difference; elsewhere they stay as they are."""
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        for node in self.graph.nodes:
            module = self._layer(node)
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
        if node.op != "call_module":
            return node.target not in FRESH_FUNCTIONS
        module = self._layer(node)
        if module is None:
            return True
        is_fresh = type(module).__module__ in FRESH_FILES or any(True for _ in module.parameters(recurse=False))
        return getattr(module, "inplace", False) or not is_fresh

    def _transform_recurrent(self) -> None:
        """Split recurrent layers with several layers into single ones."""
        for node in self.graph.nodes:
            module = self._layer(node)
            if isinstance(module, RNN | LSTM) and module.num_layers > 1:
                check_recurrent(node, module)
                setattr(*self._owner(node.target), make_rnn_backpack(module))
                self.log(f"{node.target} = one module per layer of {module}")

    def _check_backpack_compatible(self) -> None:
        for node in self.graph.nodes:
            if node.op not in {"placeholder", "output", "call_module"}:
                warn(f"{node.name} ({node.op} of {node.target}) is no module and stays in the graph as it is.", stacklevel=4)
            elif (module := self._module(node)) is not None and is_adapted(module) and not BackpackTracer().is_layer(module):
                warn(
                    f"{node.target} ({type(module).__name__}) has hooks, or a forward of its own, which are part of what it computes: it stays as it "
                    "is. To have it converted, remove them before.",
                    stacklevel=4,
                )


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
