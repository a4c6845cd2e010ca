"""Quantities of parameters of which a factor of a product is made: nothing of the size of the factor is formed for all samples on the way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.sum_of_products import SumOfProducts
from backpack.core.flow import Columns, Flow
from backpack.core.made import Made, MadeUse
from backpack.core.networks import Network
from backpack.core.plan import Plan
from backpack.core.reader import Reader
from backpack.core.slots import Edge
from backpack.core.terms import Term
from backpack.core.walk import Need
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.combining import CentredSquares, Noted, Part, PerSample, Sum
from backpack.extensions.rules import ColumnRule, FromGradient, Rule, find_faster, signs_of, stack
from backpack.extensions.spared import gradient_at
from backpack.utils.precision import wide

Finish = Callable[[Columns, Parameter], Any]


def goes_by_blocks(extension: BackpropExtension, rule: Rule, adds: bool) -> bool:
    """Say whether a quantity of all samples is made of those of blocks.

    Args:
        extension: The extension.
        rule: How it reads columns.
        adds: Whether other columns come by themselves.

    Returns:
        Whether it is: unless samples are chosen, or a user reads columns in another way, or makes something else of them.
    """
    plain = type(rule) is ColumnRule and rule.subsampling is None and (extension.adds_up or not adds)
    return plain and isinstance(extension.combined_by(), Sum | PerSample | CentredSquares)


def stands_alone(made: Made | MadeUse, plan: Plan) -> bool:
    """Say whether parameters have no other uses, which would have to be added.

    Args:
        made: What lies between them and a factor.
        plan: The plan.

    Returns:
        Whether they have none.
    """
    return all(uses == plan.uses.get(parameter) for parameter, uses in made.uses.items())


def read_in_blocks(edge: Edge, plan: Plan, flow: Flow, extensions: Iterable[BackpropExtension], samples: int) -> Made | None:
    """Foresee whether quantities of the parameters behind a factor are read without forming what all samples contribute.

    Args:
        edge: Edge of the factor.
        plan: The plan.
        flow: The flow.
        extensions: The extensions that read it.
        samples: Number of samples.

    Returns:
        What lies behind the factor, if they are.
    """
    made, adds = Made.at(edge, plan), flow.needs is Need.CURVATURE
    known = made is not None and stands_alone(made, plan) and all(goes_by_blocks(e, e.rule_at(samples), adds) for e in extensions)
    return made if known else None


def _of_samples(source: Any, block: slice) -> Any:
    # the source of the columns of some samples
    signs = getattr(source, "signs", None)
    return source if signs is None else source._replace(signs=signs[:, block])


class _Gathered:
    """A quantity of samples that come block by block, united like the parts of a mini-batch."""

    def __init__(self, extension: BackpropExtension, parameter: Parameter, finish: Finish, samples: int) -> None:
        self._extension, self._parameter, self._finish, self._samples = extension, parameter, finish, samples
        self.kept: Part | None = None

    def add(self, columns: Columns, block: slice) -> None:
        """Take the next block.

        Args:
            columns: ``{source: [V, n, *parameter]}``.
            block: Its samples.
        """
        value = self._finish({_of_samples(source, block): c for source, c in columns.items()}, self._parameter)
        value, extra = (value.value, value.extra()) if isinstance(value, Noted) else (value, None)
        part = Part(value, block.stop - block.start, extra)
        self.kept = self._extension.combination.gathered(self.kept, part, block.start, self._samples)

    @property
    def value(self) -> Any:
        """The quantity, with what has to be known beside it."""
        return self.kept.value if self.kept.extra is None else Noted(self.kept.value, self.kept.extra)


def sum_of(terms: list[Term | Network]) -> SumOfProducts | None:
    """Read the factors of terms.

    Args:
        terms: Terms of one use.

    Returns:
        The sum; ``None`` if some have further positions, or are no matrices.
    """
    parts = []
    for term in terms:
        sides = term.sides()
        if sides is None:
            return None
        rows, inputs, scale, turned = sides
        left, right = wide(stack(rows)), wide(inputs)[None]
        parts.append((*((right, left) if turned else (left, right)), None if scale is None else wide(scale)))
    alike = len({(left.shape[2], right.shape[2]) for left, right, _ in parts}) == 1
    return SumOfProducts(parts, signs_of(sides[0]), terms[0].shape) if alike else None


class OfSquares(BackpropExtension):
    """A quantity, each entry of which is made of the squares of that entry of columns: in parameters and in what is made of them entry by entry."""

    def of_terms(self, terms: list[Term | Network]) -> Any:
        return self._of_term(terms[0]) if len(terms) == 1 else self._of_sum(terms)

    def _of_sum(self, terms: list[Term | Network]) -> Any:
        # only what adds over the samples: else, it is as large as what is formed
        read = terms[0].read()
        known = not isinstance(self.combination, PerSample) and find_faster(self, read.use.call.derivatives, read.name) is not None
        products = sum_of(terms) if known else None
        if products is None:
            return NotImplemented
        squares = products.squares()
        return self.of_moments(squares, products.total, read.use.layout.samples)

    def of_moments(self, squares: Tensor, total: Callable[[], Tensor], samples: int) -> Any:
        """Make the quantity from sums over samples and columns.

        Args:
            squares: Sum of the squares, with the signs of columns, ``[*parameter]``.
            total: Returns the sum of the columns themselves, ``[*parameter]``.
            samples: Number of samples.

        Returns:
            The quantity; the sum of the squares, by default.
        """
        return squares

    def _of_term(self, term: Term | Network) -> Any:
        use, name, place, factor = term.read()
        scale = 1.0 if factor is None else factor
        function = find_faster(self, use.call.derivatives, name)
        value = NotImplemented if function is None else function(self, use, name)
        if isinstance(value, FromGradient):
            value = value.function(gradient_at(use, name))
        if value is NotImplemented:
            return value
        lead = [use.layout.samples] if isinstance(self.combination, PerSample) else []

        def placed(part: Tensor) -> Tensor:
            return place(part.reshape(*lead, *use.parameters[name].shape))

        if isinstance(value, Noted):
            return Noted(placed(value.value) * scale**2, lambda: placed(value.extra()) * scale)
        return placed(value) * scale**2


class ReadsMade(Reader):
    """Reads quantities off factors that are made of parameters: what the collector knows of them, apart from all else that it does."""

    _plan: Plan
    _values: dict[tuple[int, BackpropExtension], Any]
    cut: Container[Flow]
    finishes: dict[BackpropExtension, Finish]

    def at_made(self, flow: Flow, made: MadeUse) -> bool:
        adds = flow in self.cut or flow.needs is Need.CURVATURE  # what is born behind the factor arrives by itself
        readers = {p: [e for e in self._readers(flow, p) if (id(p), e) not in self._values] for p in made.uses}
        by_blocks = all(goes_by_blocks(e, self._rule(e, made.samples), adds) for e in chain(*readers.values()))
        if not by_blocks or not stands_alone(made, self._plan):
            return False
        for parameter, extension, value in self._made(made, readers) if any(readers.values()) else ():
            if adds:
                self.keep(parameter, extension, value)
            else:
                self._values[id(parameter), extension] = value
        return True

    def _made(self, made: MadeUse, readers: dict[Parameter, list[BackpropExtension]]) -> Iterator[tuple[Parameter, BackpropExtension, Any]]:
        """Compute the quantities of all parameters.

        Args:
            made: The use of the parameters, of some samples.
            readers: Parameters, and the extensions that read them.

        Yields:
            Parameter, extension, and the quantity with what has to be known beside it.
        """
        made.carry()
        for parameter, columns in made.formed.items():
            for extension in readers[parameter]:
                yield parameter, extension, self.finishes[extension](columns, parameter)
        others = [(parameter, extension) for parameter in made.others for extension in readers[parameter]]
        for parameter, terms in made.terms.items():
            for extension in readers[parameter]:
                value = extension.of_terms(terms)
                if value is not NotImplemented:
                    yield parameter, extension, value
                elif len(terms) == 1:
                    yield parameter, extension, self.finishes[extension](terms[0].formed(), parameter)
                else:
                    others.append((parameter, extension))
        gathered = {(p, e): _Gathered(e, p, self.finishes[e], made.samples) for p, e in others}
        wanted = {parameter for parameter, _ in others}
        for block in made.blocks(wanted) if gathered else ():
            columns = made.columns(block, wanted)
            for (parameter, _), part in gathered.items():
                if parameter in columns:
                    part.add(columns[parameter], block)
        yield from ((*key, part.value) for key, part in gathered.items() if part.kept is not None)

    @abstractmethod
    def keep(self, parameter: Parameter, extension: BackpropExtension, part: Any) -> None:
        """Keep what some of the columns have left at a parameter.

        Args:
            parameter: The parameter.
            extension: The extension.
            part: Its result for these columns.
        """

    @abstractmethod
    def _readers(self, flow: Flow, parameter: Parameter) -> list[BackpropExtension]: ...

    @abstractmethod
    def _rule(self, extension: BackpropExtension, samples: int) -> Rule: ...
