"""What sort of module is this: a loss, a log-likelihood, a mere container?"""

from __future__ import annotations

from torch.fx import GraphModule
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Module, MSELoss, Sequential
from torch.nn.modules.loss import _Loss

from backpack.custom_module.branching import Parallel, _Branch
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
    return isinstance(module, Sequential | _Branch | Parallel | ReduceTuple | GraphModule)
