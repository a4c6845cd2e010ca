"""``verify``: runs the library and plain autograd on copies of a model, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack.backward import backpack
from backpack.extending import extend, unextend
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import ArgumentError, ArgumentTypeError, BackpackError
from backpack.verification.definitions import DEFINITIONS, Comparison, Malformed
from backpack.verification.layers import Layers, uses
from backpack.verification.reference import Incomparable, Reference
from backpack.verification.report import Report, Row, Verdict

_FLOOR = 1e3
"""Rounding errors, in units of the machine epsilon and of the largest number of a quantity in the model, that are allowed anywhere."""


def verify(
    model: Module,
    lossfunc: Callable[..., Tensor],
    X: Any,
    y: Any,
    extensions: BackpropExtension | Iterable[BackpropExtension],
    *,
    output: Callable[[Any], Tensor] | None = None,
    samples: int = 2,
    entries: int = 8,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> Report:
    """Compute quantities of your model again, from their definitions and by plain autograd, for some samples and entries, and compare.

    Works on copies: nothing changes on the model, the loss, the extensions and the random generators. The copies are in double precision, so that
    a difference is a mistake and no rounding. Each copy runs on the same seed, in the model's own mode; the model need not be extended.

    Quantities that are sums over samples need the gradients of all of them: give a mini-batch of a few samples.

    Args:
        model: The model.
        lossfunc: Loss of output and ``y``: a module; for first-order quantities, any function that does not use the model.
        X: What the model is called with: ``model(*X)`` for a tuple, ``model(**X)`` for a dictionary, else ``model(X)``.
        y: What the loss is called with after the output, likewise.
        extensions: Extensions, as they would be given to ``backpack``.
        output: Returns the tensor that enters the loss, ``[[N, *]]``, from what the model returns, for example
            ``lambda out: out.logits.transpose(1, 2)``; ``None`` if that is the tensor.
        samples: How many samples are compared, of quantities that keep samples apart.
        entries: How many entries of each parameter are compared: half of them where the gradient is largest, half at random.
        seed: Seed of each run, and of the choice of samples and entries.
        rtol: Largest difference allowed, relative to the largest right number that is compared for the same parameter; ``None`` for ten times the
            square root of the machine epsilon, of the least precise type in which the model computes.
        atol: Largest difference allowed in addition; ``None`` for a thousand times the machine epsilon, relative to the largest right number of all
            parameters, so that parameters without influence are not accused of rounding errors.
        dtype: Data type of the copies; ``None`` for that of the model.

    Returns:
        A report with a verdict for each parameter and quantity. It prints as a table; it is true if something was compared and nothing is wrong.

    Raises:
        ArgumentError: If an argument cannot be used, or the model gives two different results for one seed.

    Example:
        >>> report = verify(model, torch.nn.CrossEntropyLoss(), X, y, [BatchGrad(), DiagGGNExact()])
        >>> print(report)
        >>> report.raise_if_wrong()
    """
    active = [extensions] if isinstance(extensions, BackpropExtension) else list(extensions)
    _check(model, lossfunc, output, active, samples, entries, rtol, atol)
    setting = _Setting(model, lossfunc, X, y, output, seed, dtype)
    generator = Generator().manual_seed(seed)
    with setting.isolated():
        precision = setting.precision()
        model, lossfunc, _ = setting.copy(None)
        layers = Layers(model)
        with sdpa_kernel(SDPBackend.MATH):  # the one kernel that can be differentiated twice
            z, loss = setting.forward(model, lossfunc)
        rewind = setting.keep_random_state()
        layers.remove()
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        reference = Reference(trainable, layers.probes, z, loss, precision, entries, generator)
        rows: list[Row] = []
        for extension in active:
            comparison = Comparison(extension, reference, layers, lossfunc, rewind, (), entries)
            comparison.positions = torch.randperm(len(comparison.samples), generator=generator)[:samples].sort().values.tolist()
            rows += _judge(comparison, setting, rtol, atol)
    return Report(tuple(rows))


def _check(model: Any, lossfunc: Any, output: Any, extensions: list[Any], samples: Any, entries: Any, rtol: Any, atol: Any) -> None:
    """Check arguments.

    Args:
        model: Must be a module.
        lossfunc: Must be callable.
        output: Must be callable or ``None``.
        extensions: Must be instances.
        samples: Must be positive.
        entries: Must be positive.
        rtol: Must be positive or ``None``.
        atol: Must not be negative.

    Raises:
        ArgumentError: If a value cannot be used.
        ArgumentTypeError: If a type cannot be used.
    """
    if not isinstance(model, Module):
        raise ArgumentTypeError(f"verify() needs a torch.nn.Module, got {model!r} of type {type(model).__name__}.")
    for name, function in (("lossfunc", lossfunc), ("output", output)):
        if function is not None and (not callable(function) or isinstance(function, type)):
            raise ArgumentTypeError(f"verify() needs a function or a module as {name}, got {function!r}.")
    if lossfunc is None:
        raise ArgumentTypeError("verify() needs a loss function, got None.")
    for extension in extensions:
        backpack(extension)
    if not extensions:
        raise ArgumentError("verify() needs at least one extension, for example [BatchGrad(), DiagGGNExact()].")
    for name, count in (("samples", samples), ("entries", entries)):
        if type(count) is not int or count < 1:
            raise ArgumentError(f"verify() needs a positive integer as {name}, got {count!r}.")
    if rtol is not None and not 0 < rtol < inf:
        raise ArgumentError(f"verify() needs a positive rtol, got {rtol!r}.")
    if atol is not None and not 0 <= atol < inf:
        raise ArgumentError(f"verify() needs an atol that is not negative, got {atol!r}.")


class _Setting:
    """How a copy of the model is made and run."""

    def __init__(
        self,
        model: Module,
        lossfunc: Callable[..., Tensor],
        X: Any,
        y: Any,
        output: Callable[[Any], Tensor] | None,
        seed: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._model, self._lossfunc, self._output, self._seed, self._dtype = model, lossfunc, output, seed, dtype
        self._X, self._y = X, y
        self._first_output: Tensor | None = None
        tensors = [*model.parameters(), *model.buffers()]
        self._devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Leave random generators, default types and active extensions as they are.

        Yields:
            Nothing.
        """
        before = torch.get_default_dtype()
        with torch.random.fork_rng(self._devices), torch.enable_grad(), backpack():
            try:
                torch.set_default_dtype(self._dtype or before)  # what a model creates while it runs goes with its parameters
                yield
            finally:
                torch.set_default_dtype(before)

    def copy(self, extension: BackpropExtension | None) -> tuple[Module, Callable[..., Tensor], BackpropExtension | None]:
        """Copy model and loss, and an extension, which may name parameters of the model.

        Args:
            extension: The extension.

        Returns:
            The copies, which are not extended.

        Raises:
            ArgumentError: If the model cannot be copied.
        """
        try:
            model, lossfunc, extension = deepcopy((self._model, self._lossfunc, extension))
        except RuntimeError as error:
            raise ArgumentError(f"verify() works on a copy of the model, but copy.deepcopy(model) failed: {error}") from error
        for module in (model, lossfunc):
            if isinstance(module, Module):
                unextend(module)
                module.to(self._dtype)
        return model, lossfunc, extension

    def forward(self, model: Module, lossfunc: Callable[..., Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Run a copy.

        Args:
            model: The model.
            lossfunc: The loss.

        Returns:
            What enters the loss, and the loss as a function of it.

        Raises:
            ArgumentError: If it is no tensor with samples, if the copy still uses parameters of something else, or if two copies differ.
        """
        torch.manual_seed(self._seed)
        z = _call(model, (), self._given(self._X))
        z = z if self._output is None else self._output(z)
        if not isinstance(z, Tensor) or not z.dim() or not len(z):
            what = f"a tensor of shape {list(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise ArgumentError(f"verify() needs a tensor [N, ...] that enters the loss, got {what}. Write output=lambda out: out.logits, say.")
        if not z.requires_grad:
            raise ArgumentError("verify() found no parameter that requires a gradient and takes part in the output of the model.")
        self._refuse_foreign(z, model, lossfunc, "The model")
        if self._first_output is None:
            self._first_output = z.detach().clone()
        elif z.shape != self._first_output.shape or not torch.allclose(z.detach(), self._first_output, rtol=1e-3, equal_nan=True):
            raise ArgumentError("The model gives two different outputs after torch.manual_seed with the same seed, so that nothing can be compared.")
        arguments = self._given(self._y)

        def loss(output: Tensor) -> Tensor:
            value = _call(lossfunc, (output,), arguments)
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ArgumentError(f"verify() needs a loss that returns one number, got {what}. Use reduction='mean' or 'sum', or a function.")
            self._refuse_foreign(value, model, lossfunc, "The loss")
            return value

        return z, loss

    def _refuse_foreign(self, tensor: Tensor, model: Module, lossfunc: Any, what: str) -> None:
        if tensor.grad_fn is None:
            return
        own = {id(p) for module in (model, lossfunc) if isinstance(module, Module) for p in module.parameters()}
        names = {id(p): name for name, p in self._model.named_parameters()}
        leaves = [leaf for leaf in uses(tensor) if isinstance(leaf, Parameter) and id(leaf) not in own]
        if leaves:
            foreign = [names.get(id(leaf), f"one of shape {list(leaf.shape)}") for leaf in leaves]
            raise ArgumentError(
                f"{what} uses parameters that do not belong to the copies on which verify() works: {', '.join(foreign)}. Some function holds on to "
                "them: let it take them as an argument, or be a method of the model or of a loss module."
            )

    def _given(self, value: Any) -> Any:
        """Copy what a model or a loss is called with, and convert its floating-point numbers.

        Args:
            value: Tensors in tuples, lists and dictionaries, and anything else.

        Returns:
            The same with new tensors.
        """
        if isinstance(value, Tensor):
            new = value.detach().clone()
            new = new.to(self._dtype) if self._dtype is not None and new.is_floating_point() else new
            return new.requires_grad_(value.requires_grad)
        if isinstance(value, Mapping):
            return {key: self._given(entry) for key, entry in value.items()}
        if type(value) in (tuple, list):
            return type(value)(map(self._given, value))
        return value

    def precision(self) -> float:
        """Run a copy and observe how precise it is: some models compute in single precision inside, whatever they are given.

        Returns:
            The largest machine epsilon of what the forward pass keeps.
        """
        found = []

        def see(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                found.append(torch.finfo(tensor.dtype).eps)
            return tensor.detach()

        model, lossfunc, _ = self.copy(None)
        with saved_tensors_hooks(see, lambda tensor: tensor):
            z, loss = self.forward(model, lossfunc)
            loss(z)
        return max([*found, torch.finfo(z.dtype).eps])

    def keep_random_state(self) -> Callable[[], None]:
        """Remember where the random generators stand.

        Returns:
            A function that sets them back.
        """
        state, states = torch.get_rng_state(), [(device, torch.cuda.get_rng_state(device)) for device in self._devices]

        def rewind() -> None:
            torch.set_rng_state(state)
            for device, there in states:
                torch.cuda.set_rng_state(there, device)

        return rewind

    def run(self, extension: BackpropExtension) -> tuple[Module, dict[str, Any], set[str]]:
        """Let the library compute a quantity.

        Args:
            extension: The extension.

        Returns:
            The copy, which values that are functions need; value of each parameter that has one; names of those that are left out.
        """
        model, lossfunc, extension = self.copy(extension)
        extend(model)
        if isinstance(lossfunc, Module):
            extend(lossfunc)
        with backpack(extension):
            z, loss = self.forward(model, lossfunc)
            loss(z).backward()
        excluded, field = extension.excluded(), extension.savefield
        named = dict(model.named_parameters())
        values = {name: vars(p)[field] for name, p in named.items() if field in vars(p)}
        return model, values, {name for name, p in named.items() if id(p) in excluded}


def _call(function: Callable, first: tuple, given: Any) -> Any:
    """Call a model or a loss.

    Args:
        function: The model or the loss.
        first: Its first arguments.
        given: Further arguments: several in a tuple, named ones in a dictionary.

    Returns:
        What it returns.
    """
    if isinstance(given, dict):
        return function(*first, **given)
    return function(*first, *given) if isinstance(given, tuple) else function(*first, given)


def _judge(at: Comparison, setting: _Setting, rtol: float | None, atol: float | None) -> list[Row]:
    """Run an extension and compare its values.

    Args:
        at: The comparison.
        setting: Runs it.
        rtol: As for ``verify``.
        atol: As for ``verify``.

    Returns:
        A row for each parameter that requires a gradient, or for none of them.

    Raises:
        ArgumentError: If the model or the extension cannot be used.
    """
    quantity, reference = type(at.extension).__name__, at.reference
    try:
        _model, values, excluded = setting.run(at.extension)
    except ArgumentError:
        raise
    except BackpackError as error:
        return [Row("(all)", quantity, 0, 0.0, Verdict.REFUSED, str(error).splitlines()[0])]
    except Exception as error:
        return [Row("(all)", quantity, 0, 0.0, Verdict.FAILED, f"{type(error).__name__}: {error}".splitlines()[0])]
    rows: list[Row] = []
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in [*reference.parameters, *(name for name in values if name not in reference.parameters)]:
        row = Row(name, quantity, 0, 0.0, Verdict.NOT_COMPARED)
        try:
            pairs[name] = _pairs(at, name, values, excluded)
        except Malformed as difference:
            row = row._replace(verdict=Verdict.WRONG, error=inf, reason=str(difference))
        except BackpackError as error:
            row = row._replace(verdict=Verdict.REFUSED, reason=str(error).splitlines()[0])
        except (Incomparable, RuntimeError) as reason:  # autograd cannot differentiate everything twice
            row = row._replace(reason=str(reason).splitlines()[0])
        rows.append(row)
    scale = max((right.abs().max().item() for found in pairs.values() for _, right in found), default=0.0)
    rtol = 10 * reference.precision**0.5 if rtol is None else rtol
    atol = _FLOOR * reference.precision * scale if atol is None else atol
    return [_compared(row, pairs[row.parameter], rtol, atol) if row.parameter in pairs else row for row in rows]


def _pairs(at: Comparison, name: str, values: dict[str, Any], excluded: set[str]) -> list[tuple[Tensor, Tensor]]:
    """Find the numbers to compare.

    Args:
        at: The comparison.
        name: Name of the parameter.
        values: Value of each parameter that has one.
        excluded: Names of parameters that the extension leaves out.

    Returns:
        What they are, and what they should be.

    Raises:
        Incomparable: If there are none.
        Malformed: If a value is missing, or should not be there.
    """
    kind = type(at.extension)
    if name in excluded or name not in at.reference.parameters:
        if name in values:
            raise Malformed("written on a parameter that is " + ("excluded" if name in excluded else "frozen"))
        raise Incomparable("excluded")
    if kind not in DEFINITIONS:
        raise Incomparable(f"{kind.__name__} is no class of backpack.extensions, its definition is not known")
    if name not in values:
        if name not in at.reference.used:
            raise Incomparable("takes no part in the output")
        raise Malformed("nothing was written")
    found = [(actual, right.detach()) for actual, right in DEFINITIONS[kind](at, name, values[name])]
    if not all(right.isfinite().all() for _, right in found):
        raise Incomparable("plain autograd gives numbers that are not finite")
    if not sum(right.numel() for _, right in found):
        raise Incomparable("there are no numbers")
    return [pair for pair in found if pair[1].numel()]


def _compared(row: Row, pairs: list[tuple[Tensor, Tensor]], rtol: float, atol: float) -> Row:
    """Compare numbers.

    Args:
        row: The row.
        pairs: What they are, and what they should be.
        rtol: Largest difference allowed, relative to the largest right number.
        atol: Largest difference allowed in addition.

    Returns:
        The row with a verdict.
    """
    errors = []
    for actual, right in pairs:
        largest = right.abs().max().item() + atol / rtol
        difference = (actual - right).abs().max().item() if actual.isfinite().all() else inf
        errors.append(difference / largest if largest else inf if difference else 0.0)
    zero = not any(right.count_nonzero() for _, right in pairs)
    verdict = Verdict.AGREES if max(errors) <= rtol else Verdict.WRONG
    reason = "all compared numbers are zero" if zero and verdict is Verdict.AGREES else ""
    return row._replace(compared=sum(right.numel() for _, right in pairs), error=max(errors), verdict=verdict, reason=reason)
