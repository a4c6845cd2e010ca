"""The one table of cases, and what its rows are made with: small models with input and loss, and tags that say where a quantity is not simply exact.

Everything first order, the GGN diagonal and the GGN's square root are exact on every case. Tags speak of the rest:

* ``graph``: the model is more than a ``Sequential``.
* ``chain``: the graph is a sequence of calls of modules, so that KFRA, HBP averages and curvature products are exact. Without it the averages
  are refused, and the products exact or refused.
* ``extra axes``: a ``Linear`` sees more than two axes, so that the averages are refused.
* ``positions``: a convolution uses its weight at several positions, so that Kronecker factors are no exact blocks for one sample.
* ``groups``: a convolution has groups, so that the averages are refused.
* ``reused``: a parameter is used several times, so that the averages are refused, and the products exact or refused.
* ``nested``: the Hessian has terms that mix two uses of parameters, or the residual of a module is dense.
* ``opaque``: an operation in place on a view hides in the graph what it does: the diagonal of the Hessian is exact or refused.
* ``curved``: the second derivative of an operation is not known, so that the diagonal of the Hessian is refused.
* ``dense residual``: the residual of a module is no diagonal, so that no positive-curvature Hessian exists.
* ``other parameters``: some parameter belongs neither to a ``Linear`` nor to a known layer: Kronecker factors are refused, or they are the
  exact block of this parameter; the averages are refused.
* ``two orientations``: a weight is used as it is and transposed, so that Kronecker factors are refused.
* ``not convex``: the loss has a Hessian with negative eigenvalues, so that everything that needs its square root is refused. With ``maybe`` in
  front, it depends on the data.
* ``special loss``: the loss is a sum of several terms, or not reduced by its module: averages and products are exact or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from oracle import Problem, Term
from torch import Tensor, randint, randn
from torch.nn import CrossEntropyLoss, Module, MSELoss


def every_second(names: Iterable[str]) -> list[Any]:
    """Names to parametrize a test with that takes long: every second one is slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if place % 2 else name for place, name in enumerate(names)]


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: Name.
        make: Builds the problem for a batch size.
        tags: See the top of this file.
    """

    name: str
    make: Callable[[int], Problem]
    tags: frozenset[str]

    def build(self, N: int = 3, dtype: torch.dtype = torch.float64) -> Problem:
        """Build the problem, the same at every call.

        Args:
            N: Batch size.
            dtype: Data type of parameters and data.

        Returns:
            A new problem.
        """
        with torch.random.fork_rng(), default_dtype(dtype):
            torch.default_generator.manual_seed(0)
            return self.make(N)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors in another data type than usual.

    Args:
        dtype: Data type.

    Yields:
        Nothing.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


TAGS = {
    "graph",
    "chain",
    "extra axes",
    "groups",
    "positions",
    "reused",
    "nested",
    "opaque",
    "curved",
    "dense residual",
    "other parameters",
    "two orientations",
    "special loss",
    "not convex",
    "maybe not convex",
}
CASES: dict[str, Case] = {}


def add(name: str, make: Callable[[int], Problem], *tags: str) -> None:
    """Add a row to the table.

    Args:
        name: Name.
        make: Builds the problem for a batch size.
        tags: See the top of this file.
    """
    assert name not in CASES, name
    assert TAGS.issuperset(tags), tags
    CASES[name] = Case(name, make, frozenset(tags))


def bits(*shape: int) -> Tensor:
    """Draw zeros and ones.

    Args:
        shape: Shape.

    Returns:
        Floating point numbers.
    """
    return randint(2, shape).to(torch.get_default_dtype())


def labels(*shape: int, classes: int = 4) -> Tensor:
    """Draw classes.

    Args:
        shape: Shape.
        classes: Number of classes.

    Returns:
        Integers.
    """
    return randint(classes, shape)


def classify(model: Module, x: Tensor, **kwargs: object) -> Problem:
    """Put a cross-entropy with 4 classes behind a model.

    Args:
        model: Model with output ``[N, 4]``.
        x: Input.
        kwargs: Passed to ``Problem``.

    Returns:
        Problem.
    """
    return Problem(model, x, [Term(CrossEntropyLoss(), labels(len(x)))], **kwargs)


def regress(model: Module, x: Tensor, **kwargs: object) -> Problem:
    """Put a mean squared error with random targets behind a model.

    Args:
        model: Model.
        x: Input.
        kwargs: Passed to ``Problem``.

    Returns:
        Problem.
    """
    problem = Problem(model, x, [], **kwargs)
    problem.terms.append(Term(MSELoss(), randn(problem.outputs()[0].shape)))
    return problem


class Layer(NamedTuple):
    """A module without loss around it, for tests of its derivatives.

    Attributes:
        make: Makes the module.
        shape: Shape of one sample of its input.
        more: Draws further inputs for a batch size.
    """

    make: Callable[[], Module]
    shape: tuple[int, ...]
    more: Callable[[int], tuple[Tensor, ...]]


LAYERS: dict[str, Layer] = {}
"""At least one row for each module class that has a rule, and one for each of its options that changes the rule."""


def layer(name: str, make: Callable[[], Module], shape: tuple[int, ...], more: Callable[[int], tuple[Tensor, ...]] = lambda _: ()) -> None:
    """Add a row to the table of layers.

    Args:
        name: Name.
        make: Makes the module.
        shape: Shape of one sample of its input.
        more: Draws further inputs for a batch size.
    """
    assert name not in LAYERS, name
    LAYERS[name] = Layer(make, shape, more)
