"""Losses of one's own whose Hessian consists of blocks along an axis of the prediction: which are found, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases_loss import Focused, LogCosh, Smooth
from test_extensions import close
from test_losses import DOUBLE, blocks_of, classes, dense_hessian, gram, normal, record
from torch import Tensor, nn

from backpack.core.derivatives.loss_generic import GenericLossDerivatives
from backpack.core.derivatives.loss_hessian import hessian_blocks
from backpack.utils.errors import LossValueError, MixedSamplesError


class Rows(nn.Module):
    """Entries of a row meet in a quadratic form of any sign."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction.sum(-1).square() - 3 * prediction[..., 0].square() + (prediction * target).sum(-1)).sum()


class Between(nn.Module):
    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target).square().mean() + (prediction[1:] * prediction[:-1]).mean()


# name -> loss, prediction, target, entries of a block, axis
CASES: dict[str, tuple[nn.Module, Callable[[], Tensor], Callable[[], Tensor], int, int]] = {
    "entries": (LogCosh(), lambda: normal(3, 2, 3, 4), lambda: normal(3, 2, 3, 4), 1, -1),
    "entries of a vector": (LogCosh(), lambda: normal(3, 8), lambda: normal(3, 8), 1, -1),
    "one sample": (LogCosh(), lambda: normal(1, 8), lambda: normal(1, 8), 1, -1),
    "few entries": (LogCosh(), lambda: normal(3, 7), lambda: normal(3, 7), 7, -1),
    "numbers": (LogCosh(), lambda: normal(9), lambda: normal(9), 1, -1),
    "classes first": (Focused(1, 0), lambda: normal(3, 2, 3, 4), lambda: classes(3, 3, 4, num=2), 2, -3),
    "classes first, not convex": (Focused(1, 2), lambda: 3 * normal(2, 3, 8), lambda: classes(2, 8, num=3), 3, -2),
    "classes last": (Focused(-1, 0), lambda: normal(2, 9, 3), lambda: classes(2, 9, num=3), 3, -1),
    "classes last, not convex": (Focused(-1, 2), lambda: 3 * normal(2, 3, 3, 2), lambda: classes(2, 3, 3, num=2), 2, -1),
    "classes between": (Focused(2, 0), lambda: normal(2, 3, 3, 3), lambda: classes(2, 3, 3, num=3), 27, -1),
    "as many classes as positions": (Focused(1, 0), lambda: normal(2, 8, 8), lambda: classes(2, 8, num=8), 8, -2),
    "rows": (Rows(), lambda: normal(3, 8, 2), lambda: normal(3, 8, 2), 2, -1),
    "neighbours": (Smooth(1.0), lambda: normal(3, 8), lambda: normal(3, 8), 8, -1),
    "neighbours that hardly meet": (Smooth(1e-10), lambda: normal(3, 8), lambda: normal(3, 8), 8, -1),
    "neighbours in rows": (Smooth(1e-10), lambda: normal(3, 8, 3), lambda: normal(3, 8, 3), 3, -1),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_and_what_is_made_of_them(name: str) -> None:
    torch.manual_seed(0)
    module, prediction, target, size, axis = CASES[name]
    loss, rule = record(module, prediction(), target()), GenericLossDerivatives()
    x = loss.input0
    found, hessian = hessian_blocks(loss), blocks_of(dense_hessian(loss), len(x))
    assert found.matrices.shape == (len(x), x.shape[1:].numel() // size, size, size)
    assert found.axis == axis
    mat = normal(5, *x.shape)
    close(rule.make_hessian_mat_prod(loss, None, None)(mat).reshape(5, len(x), -1), torch.einsum("nij,vnj->vni", hessian, mat.reshape(5, len(x), -1)))
    close(rule.sum_hessian(loss, None, None).flatten(), hessian.sum(0).flatten())
    columns, signs = rule._signed_sqrt_hessian(loss, None, None)
    signs = columns.new_ones(columns.shape[:2]) if signs is None else signs
    close(torch.einsum("vni,vn,vnj->nij", columns.reshape(*columns.shape[:2], -1), signs, columns.reshape(*columns.shape[:2], -1)), hessian)
    values = torch.linalg.eigvalsh(hessian)
    psd = bool(values.min() > -1e-8 * values.max())
    assert rule.hessian_is_psd_at(loss) == psd
    if not psd:
        with pytest.raises(LossValueError, match="negative eigenvalues"):
            rule.sqrt_hessian(loss, None, None)
        return
    root = rule.sqrt_hessian(loss, None, None)
    close(gram(root), hessian)
    close(gram(rule.sqrt_hessian(loss, None, None, subsampling=[len(x) - 1, 0])), hessian[[len(x) - 1, 0]])
    close(rule._root_mat_prod(loss, mat).reshape(5, len(x), -1), torch.einsum("vni,mnv->mni", *(m.reshape(*m.shape[:2], -1) for m in (root, mat))))
    draws = rule.sqrt_hessian_sampled(loss, None, None, mc_samples=3, subsampling=[0])
    assert draws.shape == (3, 1, *x.shape[1:])
    torch.manual_seed(1)
    signs = torch.randint(2, (40000, *x.shape), dtype=DOUBLE) * 2 - 1
    factor = rule._root_mat_prod(loss, signs) / 200
    torch.testing.assert_close(gram(factor), hessian, rtol=0, atol=0.05 * hessian.abs().max().item())


def test_blocks_of_no_samples() -> None:
    loss = record(Rows(), normal(0, 8, 2), normal(0, 8, 2))
    assert GenericLossDerivatives().sqrt_hessian(loss, None, None).shape == (16, 0, 8, 2)


def test_blocks_of_numbers_that_are_not_finite() -> None:
    """One sample that overflows says nothing of what it couples."""
    x = normal(3, 8)
    x[1, 2] = float("nan")
    loss = record(LogCosh(), x, normal(3, 8))
    found = GenericLossDerivatives().make_hessian_mat_prod(loss, None, None)(torch.ones(1, 3, 8, dtype=DOUBLE))[0]
    assert found[[0, 2]].isfinite().all()
    assert not found[1].isfinite().all()


def test_samples_that_meet_entry_by_entry_are_refused() -> None:
    loss = record(Between(), normal(3, 8), normal(3, 8))
    with pytest.raises(MixedSamplesError):
        GenericLossDerivatives().sum_hessian(loss, None, None)


def test_single_precision_finds_the_blocks() -> None:
    torch.manual_seed(0)
    for name, (module, prediction, target, size, axis) in CASES.items():
        if "hardly" not in name and "in rows" not in name:
            made = target()
            loss = record(module, prediction().float(), made.float() if made.is_floating_point() else made)
            found = hessian_blocks(loss)
            assert (found.matrices.shape[-1], found.axis) == (size, axis)
