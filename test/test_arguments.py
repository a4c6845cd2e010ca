"""What public functions are given: numbers of any origin are taken, and what cannot be used is refused at once, by an error of the library."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from backpack import backpack, distributed, explain, extend, register, unscale, verify
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.registry import registered
from backpack.custom_module.permute import Permute
from backpack.extensions import HMP, KFAC, BatchGrad
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op
from backpack.hessianfree.rop import R_op
from backpack.utils.clip import clip_factors, clip_per_sample
from backpack.utils.errors import ArgumentError, ArgumentTypeError
from backpack.utils.examples import load_mnist_dataset
from backpack.utils.kroneckers import ShiftError, inv_kfacs


def problem() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.CrossEntropyLoss(), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


class Own(nn.Module):
    """Has no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def constant(output: Tensor, target: Tensor) -> Tensor:
    return torch.tensor(3.0)


def sampled(draws: object) -> None:
    model, lossfunc, x, y = problem()
    loss = extend(lossfunc)(extend(model)(x), y)
    assert loss.requires_grad  # while the graph lives, the loss can be read
    CrossEntropyLossDerivatives().sqrt_hessian_sampled(lossfunc, None, None, mc_samples=draws)


def enter(field: str) -> None:
    backpack(FirstOrderBackpropExtension(field, {}))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no number among shifts": (lambda: inv_kfacs([torch.eye(2)] * 2, [None, 1.0]), ShiftError, "one number for all"),
    "no Kronecker factors": (lambda: inv_kfacs(None), ArgumentError, "Expected a list of Kronecker factors, got None"),
    "Kronecker factors of whole numbers": (lambda: inv_kfacs([torch.eye(2).int()]), ArgumentError, "Convert them"),
    "text as shifts": (lambda: inv_kfacs([torch.eye(2)] * 2, "ab"), ShiftError, "one number for all"),
    "clip_factors": (lambda: clip_factors(None, 1.0), ArgumentTypeError, r"clip_factors\(\) needs a torch.nn.Module"),
    "clip_per_sample": (lambda: clip_per_sample([], 1.0), ArgumentTypeError, r"clip_per_sample\(\) needs a torch.nn.Module"),
    "reduce": (lambda: distributed.reduce([]), ArgumentTypeError, r"reduce\(\) needs a torch.nn.Module"),
    "R_op without graph": (lambda: R_op(torch.ones(2), torch.ones(3, requires_grad=True), torch.ones(3)), ArgumentError, "No output has a graph"),
    "L_op without graph": (lambda: L_op(torch.ones(2), torch.ones(3, requires_grad=True), torch.ones(2)), ArgumentError, "No output has a graph"),
    "register": (lambda: register(Own, "x"), ArgumentTypeError, "rule of Own must be derivatives.*'x'"),
    "register, of a class": (lambda: register(Own)(int), ArgumentTypeError, "rule of Own must be derivatives"),
    "explain, class": (
        lambda: explain(problem()[0], nn.CrossEntropyLoss, *problem()[2:], [BatchGrad()]),
        ArgumentTypeError,
        r"Create it first: CrossEntropyLoss\(\)",
    ),
    "explain, no extensions": (lambda: explain(*problem(), None), ArgumentError, "needs instances of extensions"),
    "verify, constant": (lambda: verify(problem()[0], constant, *problem()[2:], BatchGrad()), ArgumentError, "this one is constant"),
    "verify, seed": (lambda: verify(*problem(), BatchGrad(), seed=None), ArgumentError, "an integer as seed"),
    "draws": (lambda: KFAC(mc_samples=True), ArgumentError, "positive integer"),
    "draws, fraction": (lambda: KFAC(mc_samples=np.float64(2)), ArgumentError, "positive integer"),
    "draws of derivatives": (lambda: sampled(0), ArgumentError, "mc_samples must be a positive integer, got 0"),
    "unscale": (lambda: unscale(problem()[0], torch.ones(1)), ArgumentError, "positive number"),
    "a single name": (lambda: ModuleExtension(params="weight"), ArgumentTypeError, r"params=\['weight'\]"),
    "method": (lambda: enter("detach"), ArgumentError, "no use for themselves.*'detach'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
    assert Own not in registered()


@pytest.mark.parametrize("part", [0.4, 0.9, 0.999])
def test_compressed_file_that_is_cut_off(part: float, tmp_path: Path) -> None:
    content = gzip.compress(bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(range(256)) * 3 + bytes(16))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content[: int(part * len(content))])
    with pytest.raises(ArgumentError, match="not a complete compressed file"):
        load_mnist_dataset(tmp_path)


def test_outputs_without_graph() -> None:
    """They depend on nothing."""
    x, v = torch.ones(3, requires_grad=True), torch.tensor([1.0, 2.0, 3.0])
    assert_close(R_op([torch.ones(2), 2 * x], x, v), (torch.zeros(2), 2 * v))
    assert_close(L_op([torch.ones(2), 2 * x], x, [torch.ones(2), v]), (2 * v,))
    assert_close(L_op([torch.ones(()), x.sum()], x, None), (torch.ones(3),))


def test_gradients_that_are_not_there() -> None:
    """``torch.autograd.grad(..., allow_unused=True)`` leaves them out."""
    x, unused, v = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    f = (x**3).sum()
    gradients = torch.autograd.grad(f, [x, unused], create_graph=True, allow_unused=True)
    assert_close(hessian_vector_product(f, [x, unused], [v, v], grad_params=gradients), (torch.tensor([6.0, 12.0]), torch.zeros(2)))


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0)])
def test_numbers_of_any_origin(scale: object) -> None:
    model, lossfunc, x, y = problem()
    assert KFAC(mc_samples=np.int64(2)).get_num_mc_samples() == 2
    with backpack(BatchGrad()):
        (2 * extend(lossfunc)(extend(model)(x), y)).backward()
    unscale(model, scale)
    assert_close(model.weight.grad_batch.sum(0), model.weight.grad / 2)
    assert verify(model, lossfunc, x, y, BatchGrad(), samples=np.int64(2), seed=np.int64(0))


def test_axes_in_a_tuple() -> None:
    x = torch.rand(2, 3, 4)
    assert_close(Permute((0, 2, 1))(x), x.permute(0, 2, 1))
    assert_close(Permute([1, 2], init_transpose=True)(x), x.permute(0, 2, 1))


def test_type_of_results_that_are_functions() -> None:
    """That of the parameter."""
    model, lossfunc, x, y = problem()
    with backpack(HMP(), dtype=torch.float64):
        extend(lossfunc)(extend(model)(x), y).backward()
    assert model.weight.hmp(torch.ones_like(model.weight)).dtype is torch.float32
