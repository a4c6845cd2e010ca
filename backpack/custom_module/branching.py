"""Modules for graphs that branch and merge."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, broadcast_tensors
from torch.nn import Flatten, Module

from backpack.utils.errors import ShapeError


class SummandError(ShapeError, AssertionError):
    """The summands are not tensors of one shape.

    Way out: ``SumModule`` adds without broadcasting; expand what it is given.
    """

    code = "summands"


class SumModule(Module):
    """Sum of any number of tensors of the same shape."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Add all inputs.

        Args:
            *inputs: Tensors of the same shape.

        Returns:
            Their sum.

        Raises:
            SummandError: If there is no input, if one is no tensor, or if the shapes differ.
        """
        kinds = [list(summand.shape) if isinstance(summand, Tensor) else type(summand).__name__ for summand in inputs]
        if not all(isinstance(summand, Tensor) and summand.shape == inputs[0].shape for summand in inputs) or not inputs:
            raise SummandError(f"SumModule adds tensors of the same shape, got {kinds}. Expand tensors first, or add them without SumModule.")
        return sum(inputs[1:], start=inputs[0])


class _Sum(Module):
    """What ``x + y`` becomes in a converted model, of which no shapes are known: a sum of tensors that are broadcast first, where they have to be."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = SumModule()

    def forward(self, input: Any, other: Any) -> Any:
        """Add two things.

        Args:
            input: A tensor, or something else that the model was given.
            other: What can be added to it.

        Returns:
            Their sum.
        """
        if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
            return input + other
        if input.shape != other.shape:  # outside of the module that adds, whose inputs are to have the shape of its output
            input, other = broadcast_tensors(input, other)
        return self.sum(input, other)


class _Rows(Module):
    """What ``x.view(x.size(0), -1)`` and ``x.view(-1, 320)`` become in a converted model: a ``Flatten``, where they keep samples apart."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = Flatten()

    def forward(self, input: Tensor, rows: int | None = None, columns: int = -1) -> Tensor:
        """Make a matrix.

        Args:
            input: A tensor.
            rows: Number of rows, ``-1`` for what the columns leave; by default, that of samples.
            columns: Number of columns, ``-1`` for what the rows leave.

        Returns:
            The matrix.
        """
        rows = len(input) if rows is None else rows
        if input.dim() > 1 and rows in (-1, len(input)) and columns in (-1, input.shape[1:].numel()):
            return self.flatten(input)
        return input.reshape(rows, columns)


class _Branch(Module):
    """Several modules that receive the same input; returns the tuple of their outputs."""

    def __init__(self, *modules: Module | OrderedDict[str, Module]) -> None:
        """Store the modules as children.

        Args:
            *modules: The modules, or one ``OrderedDict`` of named modules.
        """
        super().__init__()
        named = modules[0].items() if len(modules) == 1 and isinstance(modules[0], OrderedDict) else enumerate(modules)
        for name, module in named:
            self.add_module(str(name), module)

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        """Apply all modules to the input.

        Args:
            input: Tensor that each module accepts.

        Returns:
            Output of each module.
        """
        # not children(), which lists a module only once
        return tuple(module(input) for module in self._modules.values())


class Parallel(Module):
    """Feed the same input to several modules and merge their outputs: ``merge(branch_1(x), branch_2(x), ...)``."""

    def __init__(self, *modules: Module | OrderedDict[str, Module], merge_module: Module | None = None) -> None:
        """Store the branches and what merges them.

        Args:
            *modules: The branches, or one ``OrderedDict`` of named branches.
            merge_module: Called with one argument per branch; a ``SumModule`` by default.
        """
        super().__init__()
        self.branch = _Branch(*modules)
        self.merge = SumModule() if merge_module is None else merge_module

    def forward(self, input: Tensor) -> Tensor:
        """Apply all branches and merge what they return.

        Args:
            input: Tensor that each branch accepts.

        Returns:
            Output of the merging module.
        """
        return self.merge(*self.branch(input))
