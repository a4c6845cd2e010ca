"""``verify``: correct quantities agree, planted mistakes of all kinds are found, and nothing changes on the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from cases import CASES
from oracle import Problem
from table import TAGS
from test_extensions import QUANTITIES, Expect
from torch import Tensor, nn, rand, randint, randn
from torch.nn import Conv2d, CrossEntropyLoss, Embedding, Flatten, Linear, Module, MSELoss, Parameter, Sequential, Sigmoid, Tanh
from torch.nn import functional as F

import backpack.extensions.rules
from backpack import backpack as context
from backpack import extend, extensions, register, results, verify
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.convnd import ConvNDDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.utils.errors import ArgumentError
from backpack.verification import Report, Row, Verdict, WrongQuantityError

AGREES, WRONG, FAILED, REFUSED, NOT_COMPARED = Verdict.AGREES, Verdict.WRONG, Verdict.FAILED, Verdict.REFUSED, Verdict.NOT_COMPARED
FIRST = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
ALL = [getattr(extensions, name) for name in extensions.__all__ if name != "HBP"]


def everything() -> list[BackpropExtension]:
    return [make() for make in ALL]


def verdicts(report: Report) -> dict[tuple[str, str], Verdict]:
    return {(row.parameter, row.quantity): row.verdict for row in report}


def nothing_wrong(report: Report) -> None:
    assert report.ok and report
    assert [row for row in report if row.verdict in (WRONG, FAILED)] == []


def net() -> tuple[Module, Module, Tensor, Tensor]:
    """All extensions are defined on it."""
    model = Sequential(Conv2d(2, 4, 3), Sigmoid(), Flatten(), Linear(16, 5), Tanh(), Linear(5, 3))
    return model, CrossEntropyLoss(), randn(3, 2, 4, 4), randint(3, (3,))


class Whole(Module):
    """A problem's model, with what makes the input of the loss."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.model, self.output = problem.model, problem.output

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.model, x)


# --- what is right is not accused -------------------------------------------------------------------------------------------------------------


def plain(name: str) -> bool:
    """The loss is one module, not scaled, that returns one number."""
    terms = CASES[name].build(1).terms
    return len(terms) == 1 and isinstance(terms[0].scale, float) and terms[0].scale == 1.0 and getattr(terms[0].module, "reduction", "mean") != "none"


PLAIN = [name for name in CASES if plain(name)]
OF_EACH_TAG = [name for tag in sorted(TAGS) for name in [name for name in PLAIN if tag in CASES[name].tags][:3]]
SOME = dict.fromkeys(["logreg", "frozen middle weight", "dropout, training", "Hardsigmoid", *OF_EACH_TAG, *PLAIN[::9]])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", SOME)
def test_agrees_where_the_library_is_right(case: str, batch: int) -> None:
    """No accusation; first order is always compared; what is called refused, or agrees, is what the table of cases says."""
    problem, tags = CASES[case].build(batch), CASES[case].tags
    (term,) = problem.terms
    target = term.target if isinstance(term.target, tuple) else (term.target,)
    report = verify(Whole(problem), term.module, (problem.x,), target, everything(), entries=4)
    nothing_wrong(report)
    for row in report:
        expected = QUANTITIES["PCHMP, clip" if row.quantity == "PCHMP" else row.quantity].expect(tags)
        assert row.verdict is not REFUSED or expected is not Expect.EXACT
        assert row.verdict is not AGREES or expected is not Expect.REFUSED
        assert row.verdict is not NOT_COMPARED or (row.reason and (row.quantity not in FIRST or row.reason == "takes no part in the output"))


def test_everything_is_compared() -> None:
    """Where all is simple, plain autograd has something to say about all but two quantities; the averages are compared for one sample."""
    model, lossfunc, X, y = net()
    report = verify(model, lossfunc, X, y, everything(), entries=5)
    nothing_wrong(report)
    assert len(report) == len(ALL) * 6
    assert {row.quantity for row in report if row.verdict is not AGREES} == {"KFRA", "PCHMP"}
    assert all(row.error < 1e-12 and row.compared > 0 for row in report if row.verdict is AGREES)
    counts = {row.quantity: row.compared for row in report if row.parameter == "3.weight"}
    assert [counts[name] for name in ("DiagGGNExact", "BatchGrad", "BatchL2Grad", "SqrtGGNMC")] == [5, 10, 2, 50]
    one = verify(model, lossfunc, X[:1], y[:1], extensions.KFRA())
    assert [row.verdict for row in one] == [AGREES] * 6


@pytest.mark.parametrize(
    "lossfunc",
    [
        CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]), label_smoothing=0.1, ignore_index=1),
        CrossEntropyLoss(reduction="sum"),
        MSELoss(),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 1.0])),
    ],
)
@pytest.mark.parametrize("subsampling", [None, [2, 0, 2]])
def test_sampled_and_subsampled(lossfunc: Module, subsampling: list[int] | None) -> None:
    """Sampled quantities are compared for the labels that are drawn; what is subsampled, for these samples."""
    target = randint(3, (4,)) if isinstance(lossfunc, CrossEntropyLoss) else randint(2, (4, 3)).float()
    names = [name for name in QUANTITIES if name.startswith(("Batch", "Diag", "Sqrt", "Variance", "SumGrad")) and name != "BatchL2Grad"]
    chosen = [getattr(extensions, name)(subsampling=subsampling) for name in names if subsampling is None or "MC" not in name]
    chosen += [extensions.DiagGGNMC(5, subsampling), extensions.BatchDiagGGNMC(2), extensions.SqrtGGNMC(1), extensions.KFAC(mc_samples=3)]
    report = verify(Sequential(Linear(3, 4), Tanh(), nn.Dropout(0.4), Linear(4, 3)), lossfunc, randn(4, 3), target, chosen)
    assert {row.verdict for row in report} == {AGREES}


def test_sampled_quantity_of_a_loss_without_known_distribution() -> None:
    report = verify(Linear(3, 2), nn.SmoothL1Loss(), randn(3, 3), randn(3, 2), [extensions.DiagGGNMC(), extensions.DiagGGNExact()])
    assert verdicts(report)["weight", "DiagGGNMC"] is NOT_COMPARED
    assert verdicts(report)["weight", "DiagGGNExact"] is AGREES
    assert "not for SmoothL1Loss" in next(row.reason for row in report if row.quantity == "DiagGGNMC")
