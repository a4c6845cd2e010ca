"""Every error that the library raises on purpose, in one small hierarchy.

Each class derives from ``BackpackError`` and from the built-in class that existing code catches. ``code`` is a stable short name under
which the documentation explains the refusal; it ends each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from json import dumps
from warnings import warn

from torch.nn import Module, Parameter


class BackpackError(Exception):
    """Base of all errors that backpack raises on purpose.

    Attributes:
        about: Parameters on whose account it is raised, with their names: once they are left out of the extension, it is not raised.
    """

    code = "error"

    def __init__(self, template: str = "", about: Mapping[Parameter, str] | None = None) -> None:
        """Write the message.

        Args:
            template: The message, in which ``{names}`` stands for the parameters, and ``{exclude}`` for the argument that leaves them out.
            about: Parameters on whose account it is raised, with their names.
        """
        self.template, self.about, self._reasons = template, dict(about or {}), ()
        names = list(dict.fromkeys(self.about.values()))
        short = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        super().__init__(template.replace("{names}", short).replace("{exclude}", exclusion(*self.about.values())))

    @property
    def parts(self) -> tuple[BackpackError, ...]:
        """The errors that it puts together; itself alone where there is one reason."""
        return self._reasons or (
            self,
        )  # not kept: an error that holds itself, and the frames that it has passed, is not freed with the last reference

    def __str__(self) -> str:
        """Return the message followed by the code under which the documentation explains it; each reason has its own.

        Returns:
            The message.
        """
        if self._reasons:
            return self.args[0]
        return f"{self.args[0] or type(self).__name__} [backpack:{self.code}]"


class ArgumentError(BackpackError, ValueError):
    """An argument has a value that the function cannot use.

    Way out: the message names the argument, what was given, and what is allowed. Common cases: ``backpack(BatchGrad)`` instead of
    ``backpack(BatchGrad())``, two extensions that save to the same field, a sample index that the mini-batch does not have.
    """

    code = "argument"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type that the function cannot use.

    Way out: the message names the type that is wanted; ``extend`` takes a module, not its class and not a function, and
    ``set_module_extension`` a class of modules and an instance of a module extension.
    """

    code = "argument-type"


class FailModeError(ArgumentError, AssertionError):
    """The fail mode does not exist.

    Way out: ``"ERROR"``, ``"WARNING"`` or ``"SILENT"``.
    """

    code = "fail-mode"


class ShapeError(BackpackError, RuntimeError):
    """A tensor has not the shape that a product needs.

    Raised by products with Jacobians, curvature matrices and Kronecker factors, before anything is computed.

    Way out: ``mat`` is ``[V, *shape]`` with ``V`` columns, or a single ``[*shape]``; the message shows both shapes.
    """

    code = "shape"


class UnsupportedError(BackpackError, NotImplementedError):
    """The quantity is undefined here, or no exact rule for it exists.

    It is raised before anything runs, for all parameters and reasons at once; ``error.about`` maps the parameters to their names, ``error.parts``
    holds one error a reason. Common cases: Kronecker factors of a weight that is no matrix of a linear map, or that is used in two orientations;
    the Hessian's diagonal behind a function whose second derivative is not known; complex parameters and predictions; curvature of
    gradient penalties; sharded models.

    Way out: leave the parameters out, as in the message (``exclude=``), and keep the rest. Or take a quantity that exists: a diagonal instead
    of factors, the generalized Gauss-Newton instead of the Hessian, a product of ``backpack.hessianfree``, which needs no structure, where
    torch can differentiate twice. Or write a rule: ``backpack.register``. ``backpack.explain`` tells before a run.
    """

    code = "unsupported"


class MixedSamplesError(UnsupportedError):
    """Samples of the mini-batch influence one another, so that no per-sample quantity exists.

    Cause: batch normalization in training mode, any other statistic of the mini-batch, a normalization over axis 0, or a loss whose terms couple
    samples. Also an input without a batch axis, and samples that are not on axis 0 of the output.

    Way out: ``.eval()`` on the batch normalization, or ``GroupNorm`` or ``LayerNorm`` in its place; an axis for the batch; samples on axis 0.
    """

    code = "mixed-samples"


class UnattributedError(UnsupportedError):
    """A parameter is used in a place that no rule can split into samples.

    Cause: most often a penalty on the parameters in the loss, which belongs to no sample.

    Way out: ``loss + backpack.leave_out(penalty)`` leaves a term out of all quantities and keeps it in ``.grad``; ``exclude=`` leaves the
    parameters out.
    """

    code = "unattributed"


class BranchingError(UnsupportedError):
    """The quantity has no exact rule on a graph that branches, or that leaves the modules.

    Cause: ``KFRA``, ``HBP`` with batch averages, ``HMP``, ``GGNMP`` and ``PCHMP`` exist for sequences of modules. A residual connection, an operation
    between modules, or a module that is called twice is none.

    Way out: ``KFAC`` or ``KFLR`` for factors, products of ``backpack.hessianfree`` for products: they take any graph. Or, where nothing branches,
    modules for everything: ``extend(model, use_converter=True)``. Or ``exclude=`` for the parameters in question.
    """

    code = "branching"


class NotRecordedError(BackpackError, AttributeError):
    """An extended module or its parameters took part in a graph, but its forward pass was not recorded.

    Cause: the forward pass ran before ``extend``, under ``disable()`` or under ``no_grad()``, as ``model.forward(X)``, or inside of ``torch.vmap``;
    the model is not extended, but the loss is; the module was deleted in between; or an earlier backward pass over the same graph has given back
    what was recorded. Or ``backward`` was called on a penalty on weights alone, which belongs to no sample. Or an extension hook or a module
    extension reads a ``module.input0`` or ``module.output`` that was not kept.

    Way out: ``model = extend(model)`` first, then the forward pass, as ``model(X)``; keep a reference to the model; ``retain_graph=True`` for all
    passes over a graph but the last; ``backpack.leave_out(penalty).backward()``. Tensors for reading: ``backpack(..., retain_graph=True)`` around
    the forward pass.
    """

    code = "not-recorded"


class LossNotExtendedError(BackpackError, AssertionError):
    """A second-order quantity was asked for, but no loss function that is extended, or known by its graph, lies below the parameter.

    Cause: the loss module is not extended; or the loss was called as a function that leaves no trace in the graph by which it could be known,
    or written by hand.

    Way out: ``lossfunc = extend(lossfunc)`` before it is called. A loss of one's own goes into a module without parameters, which is
    extended. First-order quantities need no loss.
    """

    code = "loss-not-extended"


class LossValueError(BackpackError, ValueError):
    """The loss, or what was done to it after it was computed, does not allow the quantity.

    Cause: between the loss and ``backward`` lies something else than weighted sums (``loss**2``, ``loss.exp()``); ``backward`` was called on more
    than one number; the loss is multiplied by a negative or infinite number, or is not convex, where a root of its Hessian is needed; the
    target depends on trainable parameters; the loss has parameters, or another value each time.

    Way out: call ``backward`` on a weighted sum of losses with non-negative weights, and detach targets. Where a loss is not convex,
    ``DiagHessian``, ``HMP`` and ``backpack.hessianfree`` need no root.
    """

    code = "loss"


class OverwrittenError(BackpackError, RuntimeError):
    """A tensor that a rule needs was changed in place after the forward pass of its module, or in ``finish`` of an extension beside others.

    Way out: do the operation that the message is about out of place. For products with curvature matrices: multiply before the optimizer's step,
    since they are those of the parameters of the forward pass.
    """

    code = "overwritten"


class DifferentiationError(BackpackError, RuntimeError):
    """A quantity was differentiated that is not connected to the graph.

    Cause: Monte-Carlo quantities, ``KFRA``, ``HBP``, Hessian diagonals and products cannot be differentiated, even after a pass with
    ``create_graph=True``. Others cannot where a tensor that is needed again is not there any more.

    Way out: ``.detach()``, if the quantity is meant to be constant. Otherwise keep references to the model's output and to what
    the loss is given until it is differentiated, or take one that can be: first-order quantities, ``DiagGGNExact``,
    ``BatchDiagGGNExact``, ``SqrtGGNExact``, ``KFLR``.
    """

    code = "not-differentiable"


class Name(str):
    """What a parameter is called, among others.

    Attributes:
        bearers: How many of them are called so, each in a model of its own.
    """

    bearers = 1


def exclusion(*names: str) -> str:
    """Write the argument that leaves parameters out of an extension.

    Args:
        *names: Names of the parameters.

    Returns:
        Code, for messages; and what to write instead where other parameters have these names, too.
    """
    code = f"`exclude={dumps(list(dict.fromkeys(names)), ensure_ascii=False)}`"
    if all(names.count(name) == getattr(name, "bearers", names.count(name)) for name in names):
        return code
    return f"{code} (which leaves out what is called so in other models, too: to keep that, give the parameters instead, the keys of `error.about`)"


def merge(errors: Iterable[BackpackError]) -> BackpackError:
    """Put refusals together in one: parameters that are refused for the same reason, and all reasons.

    Args:
        errors: At least one.

    Returns:
        An error of the class of the first one; it shows the argument that leaves out all parameters, if that removes all reasons.
    """
    groups: dict[tuple[type[BackpackError], str], dict[Parameter, str]] = {}
    errors = [error.with_traceback(None) for error in errors]  # the frames there hold the graph, and who has collected the errors
    for error in (part for whole in errors for part in whole.parts):
        groups.setdefault((type(error), error.template), {}).update(error.about)
    parts = [kind(template, about) for (kind, template), about in groups.items()]
    if len(parts) == 1:
        return parts[0]
    about = {parameter: name for part in parts for parameter, name in part.about.items()}
    way_out = f" All other parameters remain with {exclusion(*about.values())}." if all(part.about for part in parts) else ""
    whole = type(parts[0])("\n".join([f"Refused for {len(parts)} reasons.{way_out}", *(f"- {part}" for part in parts)]), about)
    whole._reasons = tuple(parts)
    return whole


def require_module(value: object, function: str) -> None:
    """Refuse anything but a module.

    Args:
        value: What was given.
        function: Name of the function that it was given to.

    Raises:
        ArgumentTypeError: If it is no module.
    """
    if not isinstance(value, Module):
        raise ArgumentTypeError(f"{function}() needs a torch.nn.Module, got {value!r} of type {type(value).__name__}.")


def require_function(value: object, name: str, function: str) -> None:
    """Refuse anything but a function, or an instance that can be called.

    Args:
        value: What was given.
        name: Name of the argument.
        function: Name of the function that it was given to.

    Raises:
        ArgumentTypeError: If it cannot be called, or is a class.
    """
    if not callable(value) or isinstance(value, type):
        hint = f" Create it first: {value.__name__}()." if isinstance(value, type) else ""
        raise ArgumentTypeError(f"{function}() needs a function or a module as {name}, got {value!r}.{hint}")


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
