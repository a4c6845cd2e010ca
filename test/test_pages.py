"""Results in large pages of memory are the same, and behave like any tensor."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import torch
from cases import CASES
from test_extensions import QUANTITIES, Expect, close, collect, oracle_of, run
from torch import nn

from backpack import backpack, extend, extensions
from backpack.utils import pages

WRITTEN = ["BatchGrad", "BatchDiagGGNExact", "SqrtGGNExact"]


@pytest.mark.parametrize("case", CASES)
def test_every_case(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_LARGE", 1)
    names = [name for name in WRITTEN if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    problem = CASES[case].build(3)
    run(problem, *(QUANTITIES[name].make() for name in names))
    for name in names:
        QUANTITIES[name].check(oracle_of(case, 3), collect(problem, QUANTITIES[name].field))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_large_result(dtype: torch.dtype) -> None:
    """More than the limit, which is not lowered here; per-sample gradients of a Linear layer are outer products."""
    torch.manual_seed(0)
    layer, x = extend(nn.Linear(300, 200, dtype=dtype)), torch.randn(64, 300, dtype=dtype)
    with backpack(extensions.BatchGrad()):
        layer(x).sum().backward()
    result = layer.weight.grad_batch
    assert result.dtype == dtype
    assert result.numel() * result.element_size() >= pages._LARGE
    assert torch.equal(result, x[:, None].expand(-1, 200, -1))
    file = io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    assert torch.equal(torch.load(file), result)
    copy = deepcopy(result)
    result.mul_(2).add_(result)
    assert torch.equal(result, 4 * copy)
    assert torch.equal(result.view(-1)[::2], 4 * copy.flatten()[::2])


def test_a_large_result_can_be_differentiated() -> None:
    layer, x = extend(nn.Linear(300, 200, dtype=torch.float64)), torch.randn(16, 300, dtype=torch.float64)
    with backpack(extensions.BatchGrad()):
        torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(layer.weight.grad_batch.sum(), [layer.bias])  # the sum over n, o, k of 2 y_no x_nk
    close(second, 2 * x.sum().expand(200), 1e-12)
