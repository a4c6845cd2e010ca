"""Every error that the library raises on purpose, in one small hierarchy.

Each class derives from ``BackpackError`` and from the built-in class that existing code catches. ``code`` is a stable short name under
which the documentation explains the refusal; it ends each message.
"""

from __future__ import annotations

from warnings import warn

from torch.nn import Module


class BackpackError(Exception):
    """Base of all errors that backpack raises on purpose."""

    code = "error"

    def __str__(self) -> str:
        """Return the message followed by the code under which the documentation explains it.

        Returns:
            The message.
        """
        return f"{self.args[0] if self.args else type(self).__name__} [backpack:{self.code}]"


class ArgumentError(BackpackError, ValueError):
    """An argument has a value that the function cannot use."""

    code = "argument"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type that the function cannot use."""

    code = "argument-type"


class ShapeError(BackpackError, RuntimeError):
    """A tensor has not the shape that a product needs."""

    code = "shape"


class UnsupportedError(BackpackError, NotImplementedError):
    """The quantity is undefined here, or no exact rule for it exists."""

    code = "unsupported"


class MixedSamplesError(UnsupportedError):
    """Samples of the mini-batch influence one another, so that no per-sample quantity exists."""

    code = "mixed-samples"


class UnattributedError(UnsupportedError):
    """A parameter is used in a place that no rule can split into samples."""

    code = "unattributed"


class BranchingError(UnsupportedError):
    """The quantity has no exact rule on a graph that branches, or that leaves the modules."""

    code = "branching"


class NotRecordedError(BackpackError, AttributeError):
    """An extended module or its parameters took part in a graph, but its forward pass was not recorded."""

    code = "not-recorded"


class LossNotExtendedError(BackpackError, AssertionError):
    """A second-order quantity was asked for, but no loss function that is extended, or known by its graph, lies below the parameter."""

    code = "loss-not-extended"


class LossValueError(BackpackError, ValueError):
    """The loss, or what was done to it after it was computed, does not allow the quantity."""

    code = "loss"


class OverwrittenError(BackpackError, RuntimeError):
    """A tensor that a rule needs was changed in place after the forward pass of its module."""

    code = "overwritten"


class DifferentiationError(BackpackError, RuntimeError):
    """A quantity was differentiated that is not connected to the graph."""

    code = "not-differentiable"


def exclusion(*names: str) -> str:
    """Write the argument that leaves parameters out of an extension.

    Args:
        *names: Names of the parameters.

    Returns:
        Code, for messages.
    """
    return f"`exclude={list(names)}`".replace("'", '"')


def batch_norm_raise_error_if_train(module: Module, raise_error: bool = True) -> None:
    """Raise, or warn, if a batch normalization is in training mode, where it mixes samples.

    Args:
        module: A batch normalization.
        raise_error: Raise (``True``) or only emit a ``UserWarning`` (``False``).

    Raises:
        MixedSamplesError: If the module is in training mode and ``raise_error`` is set.
    """
    if not module.training:
        return
    message = (
        f"{type(module).__name__} in training mode normalizes with statistics of the whole mini-batch, so that no per-sample quantity exists. "
        "Call .eval() on it, or use GroupNorm or LayerNorm."
    )
    if raise_error:
        raise MixedSamplesError(message)
    warn(message, stacklevel=2)
