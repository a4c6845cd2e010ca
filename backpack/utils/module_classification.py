"""What sort of module is this: a loss, a log-likelihood, a mere container?"""

from __future__ import annotations

from torch.fx import GraphModule
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Module, MSELoss, Sequential
from torch.nn.modules.loss import _Loss

from backpack.custom_module.branching import Parallel, _Branch, _Rows, _Sum
from backpack.custom_module.reduce_tuple import ReduceTuple


def is_loss(module: Module) -> bool:
    """Tell whether a module is a loss function of torch, or derived from one.

    Args:
        module: The module.

    Returns:
        Whether it is a loss.
    """
    return isinstance(module, _Loss)


def is_nll(module: Module) -> bool:
    """Tell whether a module is a loss that is known as a negative log-likelihood.

    Args:
        module: The module.

    Returns:
        Whether it is one.
    """
    return isinstance(module, MSELoss | CrossEntropyLoss | BCEWithLogitsLoss)


def is_no_op(module: Module) -> bool:
    """Tell whether a module only arranges its children, or picks from a tuple, and computes nothing.

    Args:
        module: The module.

    Returns:
        Whether it is such a container.
    """
    return isinstance(module, Sequential | _Branch | Parallel | _Rows | _Sum | ReduceTuple | GraphModule)


_COPYING = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")


def copies_itself(module: Module) -> bool:
    """Tell whether copies and pickles of a module are made by rules of its class, and not by those of all objects, or of torch's layers.

    Args:
        module: The module.

    Returns:
        Whether they are; for example those of a ``torch.fx.GraphModule``.
    """
    own = [cls for cls in type(module).__mro__ if not cls.__module__.startswith(("builtins", "torch.nn."))]
    return any(name in vars(cls) for cls in own for name in _COPYING)


def loses_hooks(module: Module) -> bool:
    """Tell whether copies and pickles of a module that copies itself may lack its hooks.

    Args:
        module: The module.

    Returns:
        Whether they may; not so where its class only says what the state of a module is, and that contains the hooks.
    """
    cls = type(module)
    if hasattr(cls, "__deepcopy__") or cls.__reduce__ is not object.__reduce__ or cls.__reduce_ex__ is not object.__reduce_ex__:
        return True
    return "_forward_hooks" not in module.__getstate__()
