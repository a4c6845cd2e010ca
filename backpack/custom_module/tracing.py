"""Tracing of a model by ``torch.fx``, refused where a graph would be another function."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.node import Target
from torch.fx.proxy import Attribute
from torch.nn import AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, FeatureAlphaDropout, Module, Parameter
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from backpack.custom_module.branching import Parallel, SumModule, _Branch, _Rows, _Sum
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.utils.errors import UnsupportedError
from backpack.utils.module_state import kept_state
from backpack.utils.random_state import random_state_kept

LEAVES = (ScaleModule, SumModule, _Sum, _Rows, Parallel, _Branch, ReduceTuple, Permute, Pad, Slicing)
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

    proxy_buffer_attributes = True  # operations on buffers belong into the graph: they run in each forward pass

    def trace(self, root: Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> Graph:
        self._modes = _modes()
        try:
            return super().trace(root, concrete_args)
        except UnsupportedError:
            raise
        except Exception as error:  # user code may fail in any way when it is traced
            raise UnsupportedError(
                f"The forward pass cannot be traced: {type(error).__name__}: {error}. Use the model without conversion."
            ) from error

    def create_node(self, kind: str, target: Target, *args: Any, **kwargs: Any) -> Node:
        if _modes() != self._modes:
            raise UnsupportedError(
                f"The forward pass switches gradients or autocast for a part of it (at {target}), which a graph does not show. "
                "Use the model without conversion, or call .detach() in place of no_grad()."
            )
        return super().create_node(kind, target, *args, **kwargs)

    def is_layer(self, module: Module) -> bool:
        """Tell whether a module is one of torch or of this package, which need no conversion.

        Args:
            module: The module.

        Returns:
            Whether it is.
        """
        return isinstance(module, LEAVES) or super().is_leaf_module(module, "")

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return self.is_layer(m) or is_adapted(m)

    def proxy(self, node: Node) -> Proxy:
        return _AugmentedProxy(node, self)


def copy_structure(module: Module) -> Module:
    """Copy a module and its children, but share all parameters, buffers and other tensors that are attributes.

    Args:
        module: The module.

    Returns:
        The copy.
    """
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor)]
    return deepcopy(module, {id(tensor): tensor for tensor in tensors})


def is_adapted(module: Module) -> bool:
    """Tell whether a call of a module is more, or something else, than the ``forward`` of its class.

    Args:
        module: The module.

    Returns:
        Whether it has hooks that are not those of ``extend``, parametrizations, or a ``forward`` of its own.
    """
    groups = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = [hook for group in groups for hook in group.values()]
    return (
        "forward" in vars(module)
        or is_parametrized(module)
        or not all(str(getattr(hook, "__module__", "")).startswith("backpack.") for hook in hooks)
    )


def trace_twice(root: Module) -> Graph:
    """Trace a model twice in a row, without a trace on its buffers, its attributes and the random generators.

    Args:
        root: The model. Tensors that the forward pass has made of nothing are attached to it.

    Returns:
        The graph.

    Raises:
        UnsupportedError: If the graph shows one of many functions.
    """
    with kept_state(root), random_state_kept(root.parameters()) as drawn:
        (graph, values, made), (again, values_again, _) = _trace_once(root), _trace_once(root)
        if drawn():
            raise UnsupportedError(
                f"The forward pass of {type(root).__name__} draws random numbers outside of modules and of functions of its input, which a graph "
                "would show as constants. Use the model without conversion."
            )
        same_nodes = [*map(without_training, graph.nodes)] == [*map(without_training, again.nodes)]
        if not same_nodes or not all(map(_equal, values, values_again)):
            raise UnsupportedError(
                f"The forward pass of {type(root).__name__} does something else when it runs again: it depends on what the call before has left "
                "behind, or on another thing that changes, and a graph would show one case. Use the model without conversion."
            )
    vars(root).update(made)
    return graph


def _trace_once(root: Module) -> tuple[Graph, list[Tensor], dict[str, Any]]:
    """Trace a model.

    Args:
        root: The model.

    Returns:
        The graph, copies of the buffers and constants that it reads, and the attributes that tracing has made for constants, which are removed.
    """
    before = set(vars(root))
    graph = BackpackTracer().trace(root)
    names = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    read = [operator.attrgetter(name)(root) for name in names]
    values = [value.clone().to_dense() for value in read if isinstance(value, Tensor) and not isinstance(value, Parameter)]
    return graph, values, {name: vars(root).pop(name) for name in names if name in vars(root).keys() - before}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(one.isclose(other, rtol=0, atol=0, equal_nan=True).all())


def without_training(node: Node) -> tuple[object, ...]:
    """Describe a node; dropout functions without their training flag.

    Args:
        node: The node.

    Returns:
        A description that is equal for equal nodes of different graphs.
    """
    kwargs = {**node.kwargs, "training": None} if node.target in DROPOUTS else node.kwargs
    return node.op, node.name, node.target, str(node.args), str(kwargs)
