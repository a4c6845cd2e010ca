"""How the quantities of parts of a mini-batch make up that of the whole: micro-batches in time, or the ranks of a distributed program.

Part ``i`` has the loss ``l_i`` on ``N_i`` samples. The whole is ``L = sum_i l_i`` on all ``N = sum_i N_i`` samples, whose gradient is what autograd
accumulates in ``.grad``: with it, each quantity is that of ``L``, whatever the ``N_i``. The gradients ``g_n`` and Hessians of a sample are the same
in ``l_i`` and ``L``, hence

- sums over samples add, and what is kept for each sample is put side by side;
- a mean over samples is the mean of the parts' means, weighted by ``N_i``;
- the variance ``v_i`` about the mean ``m_i`` becomes ``1/N sum_i N_i (v_i + (m_i - m)^2)`` about ``m = 1/N sum_i N_i m_i`` (Chan et al. 1979).

Where the loss is multiplied by ``a``, a quantity of degree ``d`` is multiplied by ``a^d``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Size, Tensor

from backpack.utils.nested import tensors_in
from backpack.utils.pages import empty


class Noted(NamedTuple):
    """A result together with what has to be known of it, beside its value, when it is combined with others.

    Attributes:
        value: The result.
        extra: See the ``Combination``; or a function that returns it, called where results are to be united.
    """

    value: Any
    extra: Any


class Note(NamedTuple):
    """What there is to know about a result that a parameter carries.

    Attributes:
        extension: Whose result it is.
        samples: Number of samples it is made of.
        extra: See the ``Combination``; ``None`` where it was not kept.
        done: What was done to it since.
        context: Number of the context under which it was written.
        turn: Number of the pass that has written it; where passes accumulate, of the last one that it contains.
        version: How often the parameter had been changed in place, where passes accumulate.
        mark: Tells the result, see ``mark_of``.
        partial: Whether ``subsampling`` leaves out samples, or repeats some.
    """

    extension: Any
    samples: int
    extra: Any = None
    done: frozenset[str] = frozenset()
    context: int = 0
    turn: int = 0
    version: int = 0
    mark: Any = None
    partial: bool = False


def mark_of(value: Any) -> Any:
    """Return what tells a result from others, and does not keep it: no id, which another one may have when the result is gone.

    Args:
        value: The result.

    Returns:
        A mark; in lists, one for each entry.
    """
    if isinstance(value, list | tuple):
        return [mark_of(part) for part in value]
    try:
        return ref(value)
    except TypeError:  # a number, say, of a module extension
        return lambda: value


def is_marked(value: Any, mark: Any) -> bool:
    """Say whether something is the result of which a mark was taken.

    Args:
        value: A result.
        mark: The mark.

    Returns:
        Whether it is.
    """
    if isinstance(mark, list):
        return isinstance(value, list | tuple) and len(value) == len(mark) and all(map(is_marked, value, mark))
    return mark is not None and mark() is value


class Part(NamedTuple):
    """The quantity of one part.

    Attributes:
        value: The quantity.
        samples: Number of samples it is made of.
        extra: See the ``Combination``.
    """

    value: Any
    samples: int
    extra: Any = None


class Parts(ABC):
    """The same quantity of all parts, of which one is at hand.

    Attributes:
        some: One part.
        samples: Number of samples in all parts.
    """

    def __init__(self, some: Part, samples: int) -> None:
        self.some, self.samples = some, samples

    @abstractmethod
    def total(self, function: Callable[[Part], Tensor]) -> Tensor:
        """Add something over all parts.

        Args:
            function: What to add, of a part.
        """

    def average(self, function: Callable[[Part], Tensor]) -> Tensor:
        """Return the average of something over all parts, weighted by their samples.

        Args:
            function: What to average, of a part.
        """
        return self.total(lambda part: function(part) * part.samples) / max(self.samples, 1)

    @abstractmethod
    def side_by_side(self, axis: int) -> Tensor:
        """Return what is kept for each sample.

        Args:
            axis: Of the samples.
        """


class MicroBatches(Parts):
    """Parts that are all at hand."""

    def __init__(self, *parts: Part) -> None:
        """Unite parts.

        Args:
            *parts: The parts.
        """
        super().__init__(parts[0], sum(part.samples for part in parts))
        self._parts = parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def total(self, function: Callable[[Part], Tensor]) -> Tensor:
        first, *others = map(function, self._parts)
        return sum(others, first)

    def average(self, function: Callable[[Part], Tensor]) -> Tensor:
        (first, share), *others = ((function(part), part.samples / max(self.samples, 1)) for part in self._parts)
        result = torch.mul(first, share, out=empty(tuple(first.shape), first))
        for value, weight in others:
            result.add_(value, alpha=weight)
        return result

    def side_by_side(self, axis: int) -> Tensor:
        values = [part.value for part in self._parts]
        if len({value.dtype for value in values}) > 1:
            return torch.cat(values, axis)
        shape = [*values[0].shape]
        shape[axis] = sum(value.shape[axis] for value in values)
        return torch.cat(values, axis, out=empty(tuple(shape), values[0]))


class Combination(ABC):
    """What becomes of a quantity when the loss is scaled, and when parts are united.

    Attributes:
        unites: Whether the whole can be made of its parts.
        additive: Whether a part in which the parameter is not used contributes nothing.
    """

    unites: bool = True
    additive: bool = False

    def lacks(self, part: Part, union: bool) -> bool:
        """Say whether something is not known of a part, as of the result of a user's rule.

        Args:
            part: The part.
            union: Whether it is to be united with others, or only scaled.

        Returns:
            Whether it is.
        """
        return False

    def fits(self, one: Part, other: Part) -> bool:
        """Say whether two parts can be united.

        Args:
            one: A part.
            other: A part.

        Returns:
            Whether they can.
        """
        return self.shapes(one) == self.shapes(other)

    def shapes(self, part: Part) -> list[Size]:
        """Return the shapes that parts have in common.

        Args:
            part: The part.

        Returns:
            Those of its tensors, without axes of samples.
        """
        return [tensor.shape for tensor in tensors_in(part.value)]

    @abstractmethod
    def scaled(self, part: Part, factor: float) -> Part:
        """Return the quantity of a multiple of the loss.

        Args:
            part: The quantity.
            factor: By what the loss is multiplied.
        """

    @abstractmethod
    def united(self, parts: Parts) -> Part:
        """Return the quantity of the whole.

        Args:
            parts: The quantities of its parts.
        """

    def gathered(self, kept: Part | None, part: Part, start: int, samples: int) -> Part:
        """Unite a part with those that come before it, where they come one after the other.

        Args:
            kept: What they have left; ``None`` for the first one.
            part: The part, which is not kept itself.
            start: Number of its first sample.
            samples: Number of samples in all parts.

        Returns:
            What they leave together.
        """
        return part if kept is None else self.united(MicroBatches(kept, part))


class Sum(Combination):
    """A sum over samples."""

    additive = True

    def __init__(self, degree: int) -> None:
        """Set the degree.

        Args:
            degree: In the loss.
        """
        self._degree = degree

    def scaled(self, part: Part, factor: float) -> Part:
        return part._replace(value=part.value * factor**self._degree)

    def united(self, parts: Parts) -> Part:
        return Part(parts.total(lambda part: part.value), parts.samples)


class PerSample(Combination):
    """Something for each sample."""

    def __init__(self, degree: float, axis: int = 0) -> None:
        """Say where the samples are.

        Args:
            degree: In the loss.
            axis: Of the samples.
        """
        self._degree, self._axis = degree, axis

    def shapes(self, part: Part) -> list[Size]:
        return [shape[: self._axis] + shape[self._axis + 1 :] for shape in super().shapes(part)]

    def scaled(self, part: Part, factor: float) -> Part:
        return part._replace(value=part.value * factor**self._degree)

    def united(self, parts: Parts) -> Part:
        return Part(parts.side_by_side(self._axis), parts.samples)

    def gathered(self, kept: Part | None, part: Part, start: int, samples: int) -> Part:
        if kept is None:
            shape = [*part.value.shape]
            shape[self._axis] = samples
            kept = Part(empty(Size(shape), part.value), samples)
        kept.value.narrow(self._axis, start, part.samples).copy_(part.value)
        return kept


class CentredSquares(Combination):
    """A variance over samples, of degree two; the extra is the sum of what varies."""

    def lacks(self, part: Part, union: bool) -> bool:
        return union and part.extra is None

    def scaled(self, part: Part, factor: float) -> Part:
        return part._replace(value=part.value * factor**2, extra=part.extra if part.extra is None else part.extra * factor)

    def united(self, parts: Parts) -> Part:
        whole, samples = parts.total(lambda part: part.extra), max(parts.samples, 1)
        mean = whole / samples

        def squares(part: Part) -> Tensor:
            return ((part.extra / max(part.samples, 1) - mean).square_() + part.value) * part.samples

        return Part(parts.total(squares) / samples, parts.samples, whole)


class Structure(NamedTuple):
    """How the two sides of a parameter lie in it.

    Attributes:
        mean: Place of the input side, a mean over samples, among the factors.
        groups: Number of groups of channels that do not meet.
        layout: What uses have in common whose matrices lie in the parameter alike.
    """

    mean: int
    groups: int = 1
    layout: Hashable = None


class Factors(Combination):
    """Kronecker factors: sums over samples, of degree one, and means over samples, of degree zero.

    Each value is a list of factors, or one such list a group. The extra is the ``Structure``, ``None`` for one side.
    """

    def __init__(self, unites: bool) -> None:
        """Say whether factors of parts make up those of the whole.

        Args:
            unites: Whether they do.
        """
        self.unites = unites

    def lacks(self, part: Part, union: bool) -> bool:
        return part.extra is None and (len(part.value) > 1 or isinstance(part.value[0], list))

    def fits(self, one: Part, other: Part) -> bool:
        return one.extra == other.extra and super().fits(one, other)

    def scaled(self, part: Part, factor: float) -> Part:
        factors = [given if self._is_mean(k, part) else given * factor for k, given in enumerate(_flat(part))]
        return part._replace(value=_like(part, factors))

    def united(self, parts: Parts) -> Part:
        def unite(k: int) -> Tensor:
            if self._is_mean(k, parts.some):
                return parts.average(lambda part: _flat(part)[k])
            return parts.total(lambda part: _flat(part)[k])

        factors = [unite(k) for k in range(len(_flat(parts.some)))]
        return parts.some._replace(value=_like(parts.some, factors), samples=parts.samples)

    @staticmethod
    def _is_mean(k: int, part: Part) -> bool:
        return part.extra is not None and k % 2 == part.extra.mean


class Function(Combination):
    """A product with a matrix of degree one. It keeps what a pass has recorded, so that no whole is made of several."""

    unites = False

    def scaled(self, part: Part, factor: float) -> Part:
        return part._replace(value=lambda mat: part.value(mat) * factor)

    def united(self, parts: Parts) -> Part:
        raise AssertionError("Functions are refused before.")


def _flat(part: Part) -> list[Tensor]:
    return [factor for group in part.value for factor in group] if isinstance(part.value[0], list) else part.value


def _like(part: Part, factors: list[Tensor]) -> list:
    return [factors[k : k + 2] for k in range(0, len(factors), 2)] if isinstance(part.value[0], list) else factors
