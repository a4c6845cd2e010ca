"""What passes under one context have written so far, to be united with the results of the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from warnings import warn

from torch.nn import Module, Parameter

from backpack.core.owners import owners, savefields
from backpack.core.plan import Plan
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.combining import Combination, MicroBatches, Note, Part, is_marked, mark_of
from backpack.utils.differentiation import version_of
from backpack.utils.errors import ArgumentError, UnsupportedError, require_module
from backpack.utils.numbers import is_number

_UNSCALED = "unscaled"


def combination_of(extension: BackpropExtension, what: object, union: bool = True) -> Combination:
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


def part_of(value: Any, note: Note, what: object, union: bool = True) -> Part:
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
    if not is_marked(value, note.mark):
        raise UnsupportedError(
            f"{what} was replaced after it had been written, by an extension hook, say: how what is there scales with the loss, and whether parts "
            "of it make up that of the whole, is not known. Keep it under a name of your own instead, and delete the result if it is not needed."
        )
    part = Part(value, note.samples, note.extra)
    if combination_of(note.extension, what, union).lacks(part, union):
        raise UnsupportedError(
            f"{what} comes without what is needed here: it was made by a module extension, or by a pass that neither accumulates "
            "nor is part of a distributed program (torch.distributed was not initialized)."
        )
    return part


def carried(model: Module, union: bool, doing: str) -> list[tuple[str, Parameter, str, Note, Part]]:
    """List all results that a model carries and to which something was not done yet.

    Args:
        model: A module.
        union: Whether they are to be united with others, or only scaled.
        doing: What is to be done to them.

    Returns:
        For each: what it is called, parameter, field, what is known about it, and the result; in an order that depends on the names only.

    Raises:
        ArgumentError: If it was done to all of them before.
        UnsupportedError: If nothing is known about a result.
    """
    found, done = [], []
    for name, parameter in model.named_parameters():
        notes = owners.notes(parameter)
        for field in sorted(savefields & vars(parameter).keys()):
            what, note = f"{name}.{field}", notes.get(field)
            if note is None:
                raise UnsupportedError(
                    f"{what} was not written by a backward pass of this process: it came with a pickle, say, without what is to be known about it "
                    f"before it can be {doing}. Do so before the model is saved, or clear(model)."
                )
            if doing in note.done:
                done.append(what)
            else:
                found.append((what, parameter, field, note, part_of(vars(parameter)[field], note, what, union)))
    if done and not found:
        raise ArgumentError(f"{done[0]} was {doing} before: the next backward pass writes new results.")
    return found


def unscale(model: Module, scale: float) -> None:
    """Divide the loss by a number, after the fact: in all quantities that a model carries, each according to its degree in the loss.

    For passes over a multiplied loss, as with ``torch.amp.GradScaler``: after ``scaler.unscale_(optimizer)``, which divides ``.grad``, call
    ``backpack.unscale(model, scaler.get_scale())``. Where the gradients have overflown, and the scaler skips the step, the quantities are not finite.
    What was unscaled after an earlier pass, and not written since, stays as it is. Call it after each context in which results are written:
    with 1.0 where the loss was not multiplied.

    Args:
        model: A module.
        scale: What the loss was multiplied by: a number, also of numpy, or a tensor without axes.

    Raises:
        ArgumentError: If the scale is no positive finite number, or all quantities were unscaled before.
        UnsupportedError: If it is not known how a quantity depends on the scale, or results of several contexts are there that were not unscaled.
    """
    require_module(model, "unscale")
    if not is_number(scale) or not 0 < float(scale) < float("inf"):
        raise ArgumentError(f"unscale() needs the positive number by which the loss was multiplied, got scale={scale!r}.")
    found = carried(model, union=False, doing=_UNSCALED)
    (newest, what), (oldest, other) = (choose((note.context, what) for what, _, _, note, _ in found) if found else (0, "") for choose in (max, min))
    if newest > oldest:
        raise UnsupportedError(
            f"{other} was written in an earlier context than {what}, and not unscaled: that its loss was multiplied by the same number is not known. "
            "Call unscale(model, scale) after each context, with 1.0 where the loss was not multiplied; or clear(model) before the next one."
        )
    for what, parameter, field, note, part in found:
        store(parameter, field, combination_of(note.extension, what, union=False).scaled(part, 1 / float(scale)), note, _UNSCALED)


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
    known = note._replace(samples=part.samples, extra=part.extra, done=note.done.union(done), mark=mark_of(part.value))
    owners.carry(parameter, field, known)


def _written(parameter: Parameter, fields: list[str], context: int) -> Iterator[tuple[str, Note]]:
    """Go through what a parameter carries of passes under a context.

    Args:
        parameter: The parameter.
        fields: Names of results.
        context: Number of the context.

    Yields:
        Field, and what is known about the result.
    """
    notes = owners.notes(parameter)
    for field in fields:
        note = notes.get(field)
        if note is not None and note.context == context and field in vars(parameter):
            yield field, note


def refuse_overwriting(plan: Plan, extensions: Iterable[BackpropExtension], context: int) -> None:
    """Refuse a pass that would overwrite, or delete, what a context around its own accumulates.

    Args:
        plan: The plan of the pass.
        extensions: Active extensions.
        context: Number of the context that accumulates.

    Raises:
        UnsupportedError: If it would.
    """
    for parameter in owners.carriers():
        for field, _ in _written(parameter, [extension.savefield for extension in extensions], context):
            if parameter in plan.uses or id(parameter) in plan.walk.models:
                raise UnsupportedError(
                    f"{owners[parameter]}.{field} is accumulated by a context around this one, which would replace it. Leave that context, or "
                    "clear(model), first; or let the extension inside save elsewhere (`extension.savefield = ...`)."
                )


def _shapes(value: Any) -> list:
    return list(map(_shapes, value)) if isinstance(value, list) else list(value.shape)


class _What(NamedTuple):
    """What messages call a result: as its parameter is called when one is written."""

    parameter: Parameter
    field: str

    def __str__(self) -> str:
        return f"{owners[self.parameter]}.{self.field}"


class Earlier:
    """Results of earlier passes under a context, to be united with those of one more."""

    def __init__(self, plan: Plan, extensions: Iterable[BackpropExtension], context: int) -> None:
        """Take note of them.

        Args:
            plan: The plan of the pass.
            extensions: Those that accumulate.
            context: Number of the context.
        """
        self._extensions, self._plan = list(extensions), plan
        self._found: dict[tuple[int, str], tuple[Parameter, Any, Note]] = {}
        self._parameters: dict[int, Parameter] = {}
        if not self._extensions:
            return
        fields = [extension.savefield for extension in self._extensions]
        for parameter in owners.carriers():
            for field, note in _written(parameter, fields, context):
                self._found[id(parameter), field] = parameter, vars(parameter)[field], note
        self._parameters = plan.walk.models | {id(p): p for p in plan.uses}
        turns = {note.turn for (key, _), (_, _, note) in self._found.items() if key in self._parameters}
        self._parameters |= {key: parameter for (key, _), (parameter, _, note) in self._found.items() if note.turn in turns}

    def check(self, hooked: bool) -> None:
        """Refuse a pass, before it runs, whose results could not be united with them.

        Args:
            hooked: Whether an extension hook may delete results of the pass.

        Raises:
            UnsupportedError: If a parameter is used in another way than before, so that its results are of different structure.
        """
        if not self._found:
            return
        coming = set()
        for extension in self._extensions:
            field, excluded = extension.savefield, extension.excluded()
            certain = not hooked and extension.flow is not None
            coming |= {(id(p), field) for p in self._plan.uses if id(p) not in excluded and (certain or (id(p), field) in self._found)}
        pairs = self._pairs(coming)
        foreseen = {ext.savefield: {} if ext.has_module_exts else ext.foreseen(self._plan) for ext in self._extensions}
        for (key, field), _, before in pairs:
            parameter = self._parameters[key]
            if parameter in foreseen[field] and foreseen[field][parameter] != before.extra:
                raise UnsupportedError(
                    f"{field} of {{names}}: passes that accumulate use this parameter in another way (transposed, say, in a functional operation, as "
                    "the table of an Embedding, or with other groups), so that their results are of different structure. Call clear(model) in "
                    "between, take a diagonal (DiagGGNExact, DiagGGNMC), or leave it out: {exclude}.",
                    owners.about([parameter]),
                )
        if changed := [self._found[key][0] for key, *_ in pairs if self._found[key][2].version != version_of(self._found[key][0])]:
            warn(
                f"{owners[changed[0]]} was changed between passes that accumulate, by a step of an optimizer, say: quantities of both values are "
                "added, or stand side by side. Write clear(model) after the step for those of the new value.",
                stacklevel=2,
            )

    def _pairs(self, coming: set[tuple[int, str]]) -> list[tuple[tuple[int, str], Combination, Part]]:
        """Find what belongs together.

        Args:
            coming: (id of parameter, field) of the results of the pass.

        Returns:
            For each result that is to be united with another: its key, its combination, and what there was before.

        Raises:
            UnsupportedError: If a parameter has not been reached by all passes, where that matters; or something was done to a result since.
        """
        keys = [key for key in dict.fromkeys((*self._found, *coming)) if key[0] in self._parameters]
        latest: dict[str, int] = {}
        for key in keys:
            latest[key[1]] = max(latest.get(key[1], 0), self._turn_of(key))
        pairs, behind = [], {}
        by_field = {extension.savefield: extension for extension in self._extensions}
        for key in keys:
            parameter, field = self._parameters[key[0]], key[1]
            what = _What(parameter, field)
            combination = combination_of(by_field[field], what)
            if not combination.additive and (key not in coming or self._turn_of(key) < latest[field]):
                behind.setdefault(parameter, []).append(field)
            elif key in self._found and key in coming:
                _, value, note = self._found[key]
                if note.done:
                    raise UnsupportedError(f"{what} was {', '.join(note.done)} between passes that accumulate. Do so after the last one.")
                pairs.append((key, combination, part_of(value, note, what)))
        if behind:
            fields = ", ".join(sorted(set().union(*behind.values())))
            raise UnsupportedError(
                f"{{names}}: of the passes that accumulate {fields}, one has not reached these parameters, or its result was deleted, so that for "
                "its samples nothing is known. To begin anew, call clear(model), the whole of it; or leave these parameters out: {exclude}.",
                {p: name for p, name in owners.about(self._parameters.values()).items() if p in behind},
            )
        return pairs

    def _turn_of(self, key: tuple[int, str]) -> int:
        return self._found[key][2].turn if key in self._found else 0

    def restore(self) -> None:
        """Undo what a pass that failed has done to them."""
        for (_, field), (parameter, value, note) in self._found.items():
            setattr(parameter, field, value)
            owners.carry(parameter, field, note)

    def unite(self, written: set[tuple[int, str]]) -> None:
        """Unite them with the results of the pass.

        Args:
            written: (id of parameter, field) of what the pass has written.

        Raises:
            UnsupportedError: If results do not fit together.
        """
        if not self._extensions:
            return
        written = {key for key in written if key[0] in self._parameters and key[1] in vars(self._parameters[key[0]])}  # hooks may delete results
        united = []
        for (key, field), combination, before in self._pairs(written):
            parameter = self._parameters[key]
            what, note = _What(parameter, field), owners.notes(parameter)[field]
            parts = MicroBatches(before, part_of(vars(parameter)[field], note, what))
            if not combination.fits(*parts):
                one, other = (str(_shapes(part.value)) for part in parts)
                why = f"of shapes {one} and {other}" if one != other else "of different structure: they use the parameter in another way"
                raise UnsupportedError(f"{what}: passes that accumulate have results {why}.")
            partial = note.partial or self._found[key, field][2].partial
            united.append((parameter, field, combination.united(parts), note._replace(partial=partial)))
        for entry in united:
            store(*entry)
