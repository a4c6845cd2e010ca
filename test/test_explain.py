"""What ``explain`` says before a run is what the run does, on every row of the table and on models of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import models_hub  # noqa: F401  adds its rows
import pytest
import torch
from cases import CASES
from models import MODELS
from oracle import Problem
from test_extensions import QUANTITIES
from test_models import fresh
from torch import Tensor

from backpack import backpack, extend, results
from backpack.explaining import explain_loss
from backpack.explanation import Explanation, Verdict
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import BackpackError


def told(problem: Problem, extension: BackpropExtension) -> Explanation:
    """Explain a problem, whose output and losses may be more than a call."""
    for module in (problem.model, *problem.losses):
        extend(module)
    return explain_loss(problem.model, problem.loss(problem.outputs()), [extension])


def outcome(problem: Problem, extension: BackpropExtension) -> dict[str, Any] | None:
    """Run a problem; return what it wrote, ``None`` if it was refused."""
    for module in (problem.model, *problem.losses):
        extend(module)
    try:
        with backpack(extension):
            problem.loss(problem.outputs()).backward()
    except (BackpackError, NotImplementedError):
        return None
    return {name: values[extension.savefield] for name, values in results(problem.model).items() if extension.savefield in values}


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from tensors(part)


def check(make: Callable[[], Problem], extension: Callable[..., BackpropExtension]) -> None:
    """Refused is refused; what is not refused is there, in the size that was told; and without the refused, all others are there."""
    explanation = told(make(), extension())
    rows = {row.parameter: row for row in explanation.rows}
    refused, found = [row.parameter for row in explanation.refused], outcome(make(), extension())
    assert (found is None) == bool(refused), [row.reason for row in explanation.refused]
    if refused:
        found = outcome(make(), extension().leaving_out(p for name, p in make().model.named_parameters() if name in ()))
        problem = make()
        found = outcome(problem, extension().leaving_out(p for name, p in problem.model.named_parameters() if name in refused))
        assert found is not None
    there = {name for name, row in rows.items() if row.verdict not in {Verdict.REFUSED, Verdict.NO_GRADIENT}}
    assert set(found) == there
    for name, value in found.items():
        if not callable(value):
            assert rows[name].result == tuple(part.shape for part in tensors(value))
            assert rows[name].bytes == sum(part.numel() * part.element_size() for part in tensors(value))
    assert explanation.quantities[0].cost >= 1


CELLS = [(name, batch) for name in CASES for batch in (1, 3)]


@pytest.mark.parametrize(("case", "batch"), CELLS)
def test_truth(case: str, batch: int) -> None:
    failures = []
    for name, quantity in QUANTITIES.items():
        if batch in quantity.batches:
            try:
                check(lambda: CASES[case].build(batch), quantity.make)
            except Exception as error:
                failures.append((name, type(error).__name__, str(error)[:600]))
    assert not failures, failures


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantity", ["BatchGrad", "SqrtGGNMC", "DiagHessian", "KFLR", "KFRA", "HMP"])
def test_truth_on_models(name: str, quantity: str) -> None:
    check(lambda: fresh(name, 3), QUANTITIES[quantity].make)
