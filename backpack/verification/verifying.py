"""``verify``: runs the library and plain autograd on copies of a model, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack.backward import backpack
from backpack.extending import clear
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import ArgumentError, BackpackError, require_function, require_module
from backpack.utils.numbers import as_integer
from backpack.utils.precision import require_type
from backpack.verification.copies import Copies
from backpack.verification.definitions import DEFINITIONS, Comparison, Malformed, Numbers, Raised
from backpack.verification.layers import Layers
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
        lossfunc: Loss of output and ``y``: a module, or a function that does not use the model; for first-order quantities, any such function.
        X: What the model is called with: ``model(*X)`` for a tuple, ``model(**X)`` for a dictionary, else ``model(X)``.
        y: What the loss is called with after the output, likewise.
        extensions: Extensions, as they would be given to ``backpack``.
        output: Returns the tensor that enters the loss, ``[N, *]``, from what the model returns, for example
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
    active = list(extensions) if isinstance(extensions, Iterable) else [extensions]
    _check(model, lossfunc, output, active, samples, entries, seed, rtol, atol)
    require_type(dtype)
    copies = Copies(model, lossfunc, X, y, output, seed, dtype)
    generator = Generator().manual_seed(int(seed))
    with copies.isolated():
        precision = copies.precision()
        model, lossfunc, _ = copies.copy(None)
        layers = Layers(model)
        with sdpa_kernel(SDPBackend.MATH):  # the one kernel that can be differentiated twice
            z, loss = copies.forward(model, lossfunc)
        rewind = copies.keep_random_state()
        layers.remove()
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        reference = Reference(trainable, layers.probes, z, loss, precision, entries, generator)
        rows: list[Row] = []
        for extension in active:
            comparison = Comparison(extension, reference, layers, lossfunc, rewind, [], entries)
            comparison.positions = torch.randperm(len(comparison.samples), generator=generator)[:samples].sort().values.tolist()
            rows += _judge(comparison, copies, rtol, atol)
    return Report(tuple(rows))


def _check(model: Any, lossfunc: Any, output: Any, extensions: list[Any], samples: Any, entries: Any, seed: Any, rtol: Any, atol: Any) -> None:
    """Check arguments.

    Args:
        model: Must be a module.
        lossfunc: Must be callable.
        output: Must be callable or ``None``.
        extensions: Must be instances.
        samples: Must be positive.
        entries: Must be positive.
        seed: Must be an integer.
        rtol: Must be positive or ``None``.
        atol: Must not be negative.

    Raises:
        ArgumentError: If a value cannot be used.
        ArgumentTypeError: If a type cannot be used.
    """
    require_module(model, "verify")
    for name, function in (("lossfunc", lossfunc), ("output", output)):
        if function is not None or name == "lossfunc":
            require_function(function, name, "verify")
    for extension in extensions:
        backpack(extension)
    if not extensions:
        raise ArgumentError("verify() needs at least one extension, for example [BatchGrad(), DiagGGNExact()].")
    for name, count in (("samples", samples), ("entries", entries)):
        if as_integer(count, 1) is None:
            raise ArgumentError(f"verify() needs a positive integer as {name}, got {count!r}.")
    if as_integer(seed) is None:
        raise ArgumentError(f"verify() needs an integer as seed, got {seed!r}.")
    if rtol is not None and not 0 < rtol < inf:
        raise ArgumentError(f"verify() needs a positive rtol, got {rtol!r}.")
    if atol is not None and not 0 <= atol < inf:
        raise ArgumentError(f"verify() needs an atol that is not negative, got {atol!r}.")


def _judge(at: Comparison, copies: Copies, rtol: float | None, atol: float | None) -> list[Row]:
    """Run an extension and compare its values.

    Args:
        at: The comparison.
        copies: Run it.
        rtol: As for ``verify``.
        atol: As for ``verify``.

    Returns:
        A row for each parameter that requires a gradient, or for none of them.

    Raises:
        ArgumentError: If the model or the extension cannot be used.
    """
    quantity, reference = type(at.extension).__name__, at.reference
    try:
        model, values, excluded = copies.run(at.extension)
    except ArgumentError:
        raise
    except BackpackError as error:
        return [Row("(all)", quantity, 0, 0.0, Verdict.REFUSED, str(error).splitlines()[0])]
    except Exception as error:
        return [Row("(all)", quantity, 0, 0.0, Verdict.FAILED, f"{type(error).__name__}: {error}".splitlines()[0])]
    rows: list[Row] = []
    numbers: dict[str, list[Numbers]] = {}
    for name in [*reference.parameters, *(name for name in values if name not in reference.parameters)]:
        row = Row(name, quantity, 0, 0.0, Verdict.NOT_COMPARED)
        try:
            numbers[name] = _numbers(at, name, values, excluded)
        except Malformed as difference:
            row = row._replace(verdict=Verdict.WRONG, error=inf, reason=str(difference))
        except Raised as error:
            row = row._replace(verdict=Verdict.FAILED, reason=str(error).splitlines()[0])
        except BackpackError as error:
            row = row._replace(verdict=Verdict.REFUSED, reason=str(error).splitlines()[0])
        except (Incomparable, RuntimeError) as reason:  # autograd cannot differentiate everything twice
            row = row._replace(reason=str(reason).splitlines()[0])
        rows.append(row)
    clear(model)  # values that are functions hold on to the graph, and the model to them
    scale = max((compared.largest for found in numbers.values() for compared in found), default=0.0)
    rtol = 10 * reference.precision**0.5 if rtol is None else rtol
    atol = _FLOOR * reference.precision * scale if atol is None else atol
    rows = [_compared(row, numbers[row.parameter], rtol, atol) if row.parameter in numbers else row for row in rows]
    if any(row.verdict is Verdict.WRONG for row in rows) and (found := copies.samples(at.extension)) not in (None, len(reference.output)):
        raise ArgumentError(
            f"verify() needs the samples on axis 0 of what enters the loss. Its shape is {list(reference.output.shape)}, and there are {found} "
            "samples. Write output=lambda out: out.transpose(0, 1), say, with a loss function that takes it like that."
        )
    return rows


def _numbers(at: Comparison, name: str, values: dict[str, Any], excluded: set[str]) -> list[Numbers]:
    """Find the numbers to compare.

    Args:
        at: The comparison.
        name: Name of the parameter.
        values: Value of each parameter that has one.
        excluded: Names of parameters that the extension leaves out.

    Returns:
        The numbers.

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
    found = [numbers for numbers in DEFINITIONS[kind](at, name, values[name]) if numbers.right.numel()]
    if not found:
        raise Incomparable("there are no numbers")
    if not all(numbers.right.isfinite().all() for numbers in found):
        raise Incomparable("plain autograd gives numbers that are not finite")
    return found


def _compared(row: Row, found: list[Numbers], rtol: float, atol: float) -> Row:
    """Compare numbers.

    Args:
        row: The row.
        found: The numbers.
        rtol: Largest difference allowed, relative to the largest right number.
        atol: Largest difference allowed in addition.

    Returns:
        The row with a verdict.
    """
    errors = []
    for numbers in found:
        actual, largest = numbers.actual.to(numbers.right), numbers.largest + atol / rtol
        difference = (actual - numbers.right).abs().max().item() if actual.isfinite().all() else inf
        errors.append(difference / largest if largest else inf if difference else 0.0)
    verdict = Verdict.AGREES if max(errors) <= rtol else Verdict.WRONG
    zero = not any(numbers.right.count_nonzero() for numbers in found)
    reason = "all compared numbers are zero" if zero and verdict is Verdict.AGREES else ""
    return row._replace(compared=sum(numbers.right.numel() for numbers in found), error=max(errors), verdict=verdict, reason=reason)
