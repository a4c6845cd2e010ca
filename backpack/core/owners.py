"""Which parameters are tracked, and what they are called."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any
from weakref import ref

from torch.nn import Module, Parameter

from backpack.utils.errors import Name

savefields: set[str] = set()
"""Names of all attributes under which extensions save."""


class _Owners:
    """Parameters of extended modules, held weakly, and the names that they got in modules on which ``extend`` was called, the latest last.

    Modules may go, or change, since: names that users write are looked up in what the modules are now.
    """

    def __init__(self) -> None:
        self._released: dict[int, ref] = {}
        self._names: dict[int, tuple[ref, dict[ref | None, list[str]]]] = {}
        self._carriers: dict[int, tuple[ref, dict[str, Any]]] = {}

    def _named(self, parameter: Parameter) -> dict[ref | None, list[str]]:
        key = id(parameter)
        if parameter not in self:
            self._names[key] = ref(parameter, lambda _: self._names.pop(key, None)), {}
        return self._names[key][1]

    def _entries(self) -> Iterator[tuple[int, dict[ref | None, list[str]]]]:
        # a list of keys: a collection of garbage, hence the death of a parameter, may interrupt everything else, even a copy of the dictionary
        for key in list(self._names):
            yield key, self._names.get(key, (None, {}))[1]

    def roots(self) -> set[Module]:
        """List the modules in which parameters have names.

        Returns:
            Those on which ``extend`` was called, as far as they live.
        """
        return {root for _, named in self._entries() for place in list(named) if place is not None and (root := place()) is not None}

    def _current(self) -> Iterator[tuple[int, ref | None, str]]:
        # names in the outermost modules as they are now; of what is in none, as in a copy, the latest that is known
        parts = {root: list(root.named_modules(remove_duplicate=False)) for root in self.roots()}
        inside, lost = {part for own in parts.values() for _, part in own[1:]}, dict(self._entries())
        for root in parts.keys() - inside:
            for path, module in parts[root]:
                for name, parameter in module._parameters.items():
                    if (key := id(parameter)) in self._names:
                        lost.pop(key, None)
                        yield key, ref(root), f"{path}.{name}" if path else name
        yield from ((key, place, name) for key, named in lost.items() for place, own in list(named.items())[-1:] for name in own)

    def add(self, parameter: Parameter, name: str) -> None:
        """Track a parameter that an extended module has got since ``extend``.

        Args:
            parameter: The parameter.
            name: Its name, as far as the module knows.
        """
        self._named(parameter)[None] = [name]

    def name(self, root: Module, chosen: Container[Parameter]) -> None:
        """Track parameters, or name them anew: names that they had in the module before, or in modules inside of it, hold no more.

        Args:
            root: The module on which ``extend`` was called.
            chosen: Which of its parameters to track.
        """
        names: dict[Parameter, list[str]] = {}
        for name, parameter in Module.named_parameters(root, remove_duplicate=False):  # classes override it without the argument
            if parameter in chosen or parameter in self:
                names.setdefault(parameter, []).append(name)
        inside = {None, *map(ref, root.modules())}
        for parameter, own in names.items():
            named = self._named(parameter)
            for place in inside & named.keys():
                del named[place]
            named[ref(root)] = own

    def around(self, module: Module) -> list[Module]:
        """Find the modules in which the parameters of a module have their names.

        Args:
            module: A module.

        Returns:
            Modules that contain it, on which ``extend`` was called; itself if there are none.
        """
        return [root for root in self.roots() - {module} if any(part is module for part in root.modules())] or [module]

    def remove(self, parameter: Parameter) -> None:
        """Track a parameter no more, on demand.

        Args:
            parameter: The parameter.
        """
        key = id(parameter)
        self._names.pop(key, None)
        self._released[key] = ref(parameter, lambda _: self._released.pop(key, None))

    def released(self, parameter: Parameter) -> bool:
        """Say whether a parameter is not tracked because somebody wanted it so.

        Args:
            parameter: The parameter.

        Returns:
            Whether it was given to ``unextend``.
        """
        entry = self._released.get(id(parameter))
        return entry is not None and entry() is parameter

    def ids(self) -> frozenset[int]:
        """List all parameters that are tracked.

        Returns:
            Their ids.
        """
        return frozenset(list(self._names))

    def names(self, parameters: Iterable[Parameter]) -> dict[Parameter, dict[ref | None, list[str]]]:
        """Look up what parameters are called.

        Args:
            parameters: The parameters.

        Returns:
            Parameter to names in each module on which ``extend`` was called; none where it is not tracked.
        """
        return {parameter: dict(self._named(parameter)) if parameter in self else {} for parameter in parameters}

    def rename(self, names: Mapping[Parameter, dict[ref | None, list[str]]]) -> None:
        """Restore what parameters are called, and which are tracked.

        Args:
            names: What ``names`` has returned.
        """
        for parameter, own in names.items():
            self._names.pop(id(parameter), None)
            if own:
                self._named(parameter).update(own)

    def carry(self, parameter: Parameter, field: str, note: Any) -> None:
        """Note that a parameter carries a result.

        Args:
            parameter: The parameter.
            field: Name of the result.
            note: What there is to know about it.
        """
        savefields.add(field)  # an extension may have been told to save elsewhere since it was made
        key = id(parameter)
        if key not in self._carriers:
            self._carriers[key] = ref(parameter, lambda _: self._carriers.pop(key, None)), {}
        self._carriers[key][1][field] = note

    def notes(self, parameter: Parameter) -> dict[str, Any]:
        """Return what was noted about the results that a parameter carries, or did.

        Args:
            parameter: The parameter.

        Returns:
            Name of the result to note.
        """
        entry = self._carriers.get(id(parameter))
        return {} if entry is None or entry[0]() is not parameter else entry[1]

    def carriers(self) -> list[Parameter]:
        """List the parameters that carry results, or did.

        Returns:
            The parameters.
        """
        found = [reference() for reference, _ in filter(None, map(self._carriers.get, list(self._carriers)))]
        return [parameter for parameter in found if parameter is not None]

    def carriers_among(self, used: Mapping[int, Parameter], around: Callable[[], Mapping[int, Parameter]]) -> list[Parameter]:
        """List those of some parameters that carry results, or did.

        Args:
            used: Parameters by id.
            around: Returns others, likewise; called if parameters that are not used carry some.

        Returns:
            The parameters.
        """
        alone = len(self._carriers) <= len(used) and set(self._carriers) <= used.keys()
        return [parameter for key, parameter in (used if alone else {**around(), **used}).items() if key in self._carriers]

    def __contains__(self, parameter: object) -> bool:
        entry = self._names.get(id(parameter))
        return entry is not None and entry[0]() is parameter

    def __getitem__(self, parameter: Parameter) -> str:
        return self.about([parameter])[parameter]

    def about(self, parameters: Iterable[Parameter]) -> dict[Parameter, Name]:
        """Name parameters for messages, as they are called now: all modules are searched, hence once for all of a message.

        Args:
            parameters: The parameters.

        Returns:
            Of those that are tracked, in the order in which they were first, that of their model: the name in the module that was extended last.
        """
        wanted, names = {id(parameter): parameter for parameter in parameters if parameter in self}, {}
        for key, place, name in self._current():
            names.setdefault(key, {}).setdefault(place, name)
        found = {}
        for parameter in (wanted[key] for key in list(self._names) if key in wanted):
            own = names[id(parameter)]
            found[parameter] = Name(own[next((place for place in reversed(self._named(parameter)) if place in own), next(iter(own)))])
        bearers = Counter(found.values())
        for name in found.values():
            name.bearers = bearers[name]
        return found

    def named(self, pattern: str) -> set[int]:
        """Find parameters by the name that they have now, in the outermost extended modules that live; the last one, if they are in none.

        Args:
            pattern: Name of a parameter, or of a module that holds it; ``*`` stands for anything.

        Returns:
            Their ids.
        """
        fits = _expression(pattern).fullmatch
        return {key for key, _, name in self._current() if fits(name)}

    def ending(self, pattern: str, among: Container[int]) -> bool:
        """Say whether some parameters would have a name if the outermost extended module was not around theirs.

        Args:
            pattern: See ``named``.
            among: Ids of the parameters.

        Returns:
            Whether the names of some, or of modules that hold them, end so.
        """
        fits = _expression(f"*.{pattern}").fullmatch
        return any(key in among and fits(name) for key, _, name in self._current())

    def like(self, name: str) -> list[str]:
        """Find names that resemble one that is nobody's.

        Args:
            name: The name.

        Returns:
            A pattern of all that end so; else up to three names of parameters and modules, the most similar first.
        """
        names = {some for _, _, some in self._current()}
        if any(some.endswith(f".{name}") for some in names):
            return [f"*.{name}"]
        return get_close_matches(name, sorted(names | {some.rpartition(".")[0] for some in names}), cutoff=0.75)


def _expression(pattern: str) -> re.Pattern[str]:
    # names of parameters, and of all in a module
    return re.compile(".*".join(map(re.escape, pattern.split("*"))) + r"(\..*)?", re.DOTALL)


owners = _Owners()
