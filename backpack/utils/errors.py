"""Every error that the library raises on purpose, in one small hierarchy.

Each class derives from ``BackpackError`` and from the built-in class that existing code catches. ``code`` is a stable short name under
which the documentation explains the refusal; it ends each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from warnings import warn

from torch.nn import Module, Parameter


class BackpackError(Exception):
    """Base of all errors that backpack raises on purpose.

    Attributes:
        about: Parameters on whose account it is raised, with their names: once they are left out of the extension, it is not raised.
        parts: The errors that it puts together; itself alone where there is one reason.
    """

    code = "error"

    def __init__(self, template: str = "", about: Mapping[Parameter, str] | None = None) -> None:
        """Write the message.

        Args:
            template: The message, in which ``{names}`` stands for the parameters, and ``{exclude}`` for the argument that leaves them out.
            about: Parameters on whose account it is raised, with their names.
        """
        self.template, self.about, self.parts = template, dict(about or {}), [self]
        names = list(self.about.values())
        short = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        super().__init__(template.replace("{names}", short).replace("{exclude}", exclusion(*names)))

    def __str__(self) -> str:
        """Return the message followed by the code under which the documentation explains it.

        Returns:
            The message.
        """
        return f"{self.args[0] or type(self).__name__} [backpack:{self.code}]"


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


def merge(errors: Iterable[BackpackError]) -> BackpackError:
    """Put refusals together in one: parameters that are refused for the same reason, and all reasons.

    Args:
        errors: At least one.

    Returns:
        An error of the class of the first one; it shows the argument that leaves out all parameters, if that removes all reasons.
    """
    groups: dict[tuple[type[BackpackError], str], dict[Parameter, str]] = {}
    for error in (part for whole in errors for part in whole.parts):
        groups.setdefault((type(error), error.template), {}).update(error.about)
    parts = [kind(template, about) for (kind, template), about in groups.items()]
    if len(parts) == 1:
        return parts[0]
    about = {parameter: name for part in parts for parameter, name in part.about.items()}
    way_out = f" All other parameters remain with {exclusion(*about.values())}." if all(part.about for part in parts) else ""
    whole = type(parts[0])("\n".join([f"Refused for {len(parts)} reasons.{way_out}", *(f"- {part}" for part in parts)]), about)
    whole.parts = parts
    return whole


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
