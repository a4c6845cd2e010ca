"""What passes under one context have written so far, to be united with the results of the next one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Module, Parameter

from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.combining import Combination, MicroBatches, Note, Part
from backpack.utils.errors import ArgumentError, UnsupportedError, exclusion

_UNSCALED = "unscaled"


def combination_of(extension: BackpropExtension, what: str, union: bool = True) -> Combination:
    """Return how results behave under scaling and union.

    Args:
        extension: Whose results.
        what: What they are called, for the message.
        union: Whether they are to be united, or only scaled.

    Returns:
        The combination.

    Raises:
        UnsupportedError: If it is not known, or there is no union.
    """
    combination = extension.combined_by()
    if combination is None:
        raise UnsupportedError(
            f"{what}: how {type(extension).__name__} scales with the loss, and whether its results for parts of a mini-batch make up that of the "
            "whole, is not known. Set its attribute `combination`, see backpack.extensions.combining."
        )
    if union and not combination.unites:
        raise UnsupportedError(
            f"{what}: results of {type(extension).__name__} for parts of a mini-batch do not make up that of the whole, as they are products of "
            "averages, or functions. Take a single pass over the whole, or DiagGGN, KFAC, KFLR."
        )
    return combination


def part_of(value: Any, note: Note, what: str, union: bool = True) -> Part:
    """Return a result as a part of something larger.

    Args:
        value: The result.
        note: What is known about it.
        what: What it is called, for the message.
        union: Whether it is to be united with others, or only scaled.

    Returns:
        The part.

    Raises:
        UnsupportedError: If something about it is not known.
    """
    part = Part(value, note.samples, note.extra)
    if combination_of(note.extension, what, union).lacks(part, union):
        raise UnsupportedError(
            f"{what} comes without what is needed here: it was made by a module extension, or by a pass that neither accumulates "
            "nor is part of a distributed program (torch.distributed was not initialized)."
        )
    return part


def carried(model: Module, union: bool) -> list[tuple[str, Parameter, str, Note, Part]]:
    """List all results that a model carries.

    Args:
        model: A module.
        union: Whether they are to be united with others, or only scaled.

    Returns:
        For each: what it is called, parameter, field, what is known about it, and the result; in an order that depends on the names only.
    """
    found = []
    for name, parameter in model.named_parameters():
        notes = owners.notes(parameter)
        for field in sorted(notes.keys() & vars(parameter).keys()):
            what, note = f"{name}.{field}", notes[field]
            found.append((what, parameter, field, note, part_of(vars(parameter)[field], note, what, union)))
    return found


def unscale(model: Module, scale: float) -> None:
    """Divide the loss by a number, after the fact: in all quantities that a model carries, each according to its degree in the loss.

    For passes over a multiplied loss, as with ``torch.amp.GradScaler``: after ``scaler.unscale_(optimizer)``, which divides ``.grad``, call
    ``backpack.unscale(model, scaler.get_scale())``. Where the gradients have overflown, and the scaler skips the step, the quantities are not finite.

    Args:
        model: A module.
        scale: What the loss was multiplied by.

    Raises:
        ArgumentError: If the scale is no positive finite number, or a quantity was unscaled before.
        UnsupportedError: If it is not known how a quantity depends on the scale.
    """
    if not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        raise ArgumentError(f"unscale() needs the positive number by which the loss was multiplied, got scale={scale!r}.")
    results = carried(model, union=False)
    for what, _, _, note, _ in results:
        if _UNSCALED in note.done:
            raise ArgumentError(f"{what} was {_UNSCALED} before: the next backward pass writes new results.")
    for what, parameter, field, note, part in results:
        store(parameter, field, combination_of(note.extension, what, union=False).scaled(part, 1 / scale), note, _UNSCALED)


def store(parameter: Parameter, field: str, part: Part, note: Note, *done: str) -> None:
    """Let a parameter carry a result.

    Args:
        parameter: The parameter.
        field: Name of the result.
        part: The result.
        note: What was known about the one that it replaces.
        *done: What was done to it.
    """
    setattr(parameter, field, part.value)
    owners.carry(parameter, field, note._replace(samples=part.samples, extra=part.extra, done=note.done.union(done)))


class Earlier:
    """Results of earlier passes under a context."""

    def __init__(self, extensions: Iterable[BackpropExtension], written: set[tuple[int, str]]) -> None:
        """Take note of them.

        Args:
            extensions: Those that accumulate.
            written: (id of parameter, field) of what earlier passes have written.
        """
        self._found: dict[tuple[int, str], tuple[Parameter, Any, Note]] = {}
        fields = [extension.savefield for extension in extensions]
        for parameter in owners.carriers() if written and fields else ():
            for field in fields:
                if (id(parameter), field) in written and field in vars(parameter):
                    self._found[id(parameter), field] = parameter, vars(parameter)[field], owners.notes(parameter)[field]

    def restore(self) -> None:
        """Undo what a pass that failed has done to them."""
        for (_, field), (parameter, value, note) in self._found.items():
            setattr(parameter, field, value)
            owners.carry(parameter, field, note)

    def unite(self, plan: Plan, written: set[tuple[int, str]]) -> None:
        """Unite them with the results of a pass.

        Args:
            plan: The plan of the pass.
            written: (id of parameter, field) of what the pass has written.

        Raises:
            UnsupportedError: If a parameter has a result in one of them only, where that matters; or if results do not fit together.
        """
        found = self._found
        if not found:
            return
        parameters = {id(p): p for call in plan.walk.calls if call.root for p in call.module.parameters()} | {id(p): p for p in plan.uses}
        fields = {field for key, field in found if key in parameters}
        written = {(key, field) for key, field in written if key in parameters and field in vars(parameters[key])}  # hooks may delete results
        united = []
        for key, field in {(key, field) for key, field in (*found, *written) if key in parameters and field in fields}:
            parameter = parameters[key]
            what, note = f"{owners[parameter]}.{field}", owners.notes(parameter)[field]
            combination = combination_of(note.extension, what)
            if (key, field) in found and (key, field) in written:
                _, value, before = found[key, field]
                if before.done:
                    raise UnsupportedError(f"{what} was {', '.join(before.done)} between passes that accumulate. Do so after the last one.")
                parts = MicroBatches(part_of(value, before, what), part_of(vars(parameter)[field], note, what))
                if not combination.fits(*parts):
                    raise UnsupportedError(f"{what}: passes that accumulate have results of shapes {' and '.join(str(_shape(p)) for p in parts)}.")
                united.append((parameter, field, combination.united(parts), note))
            elif not combination.additive:
                raise UnsupportedError(
                    f"{what}: of the passes that accumulate, one has not reached the parameter, so that for its samples nothing is known. "
                    f"Leave it out: {exclusion(owners[parameter])}."
                )
        for entry in united:
            store(*entry)


def _shape(part: Part) -> list[int]:
    return list(part.value.shape)
