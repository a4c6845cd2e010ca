"""Results in large pages of memory, or where those of the pass before were, are the same, and behave like any tensor."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from cases import CASES
from table import every_second
from test_extensions import QUANTITIES, Expect, close, collect, oracle_of, run
from torch import nn
from torch.utils._pytree import tree_leaves

from backpack import backpack, extend, extensions
from backpack.utils import pages

WRITTEN = ["BatchGrad", "BatchDiagGGNExact", "SqrtGGNExact", "DiagGGNExact", "KFLR"]


@pytest.mark.parametrize("case", every_second(CASES))
def test_every_case(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes whose results lie where those of the pass before were, of which what is not overwritten is no number."""
    monkeypatch.setattr(pages, "LARGE", 1)
    monkeypatch.setattr(pages, "_SMALL", 1)
    names = [name for name in WRITTEN if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    problem = CASES[case].build(3)
    run(problem, *(QUANTITIES[name].make() for name in names))
    for name in names:
        for part in tree_leaves(list(collect(problem, QUANTITIES[name].field).values())):
            part.fill_(torch.nan)
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
    assert result.numel() * result.element_size() >= pages.LARGE
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


# --- memory of the pass before ----------------------------------------------------------------------------------------------------------------

WIDE = 300, 200


def two_layers(inputs: int = 64) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(*WIDE), nn.Linear(WIDE[1], WIDE[0]))), torch.randn(inputs, WIDE[0])


def gradients(model: nn.Module, x: torch.Tensor, extension: type = extensions.BatchGrad, **options: object) -> None:
    with backpack(extension(), **options):
        model(x).square().sum().backward()


def shared(result: torch.Tensor) -> torch.Tensor:
    """What another process sees."""
    descriptor, size = result.untyped_storage()._share_fd_cpu_()
    return result.new_empty(0).set_(torch.UntypedStorage._new_shared_fd_cpu(os.dup(descriptor), size)).view(result.shape)


def left() -> int:
    return sum(len(free) for free in pages._before.free.values())


def places(model: nn.Module) -> set[int]:
    return {layer.weight.grad_batch.data_ptr() for layer in model}


def test_results_lie_where_those_of_the_pass_before_were() -> None:
    model, x = two_layers()
    gradients(model, x)
    before = places(model)
    gradients(model, x)
    assert places(model) == before


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda result: result,
    "list": lambda result: [result],
    "view": lambda result: result[3:4, 0],
    "detached": lambda result: result.detach(),
    "data": lambda result: result.data,
    "other type": lambda result: result.view(torch.int32),
    "array": lambda result: result.numpy(),
    "part of an array": lambda result: result.numpy()[2:, 1],
    "storage": lambda result: result.untyped_storage(),
    "capsule": torch.utils.dlpack.to_dlpack,
    "graph": lambda result: (torch.ones((), requires_grad=True) * result.detach()).sum(),
    "parameter": nn.Parameter,
    "future": lambda result: (future := torch.futures.Future()).set_result(result) or future,
    "function": lambda result: lambda: result,
    "other process": shared,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_referred_to_stays(holder: str) -> None:
    model, x = two_layers()
    gradients(model, x)
    weight = model[0].weight
    held, place, other = HOLDERS[holder](weight.grad_batch), weight.grad_batch.data_ptr(), model[1].weight.grad_batch.data_ptr()
    numbers = weight.grad_batch.clone()
    for _ in range(3):
        gradients(model, 2 * x)
        assert other in places(model)  # nothing refers to it
        assert holder == "other process" or place not in places(model)
    if isinstance(held, torch.Tensor) and held.shape == numbers.shape:
        assert torch.equal(held if held.dtype == x.dtype else held.view(x.dtype), numbers)


def test_other_memory_is_left_alone() -> None:
    """That of an array, which somebody has put in the place of a result."""
    model, x = two_layers()
    gradients(model, x)
    array = model[0].weight.grad_batch.numpy().copy()
    numbers = array.copy()
    model[0].weight.grad_batch = torch.from_numpy(array)
    gradients(model, 2 * x)
    assert (array == numbers).all()


@pytest.mark.parametrize("second", [48, 80])
def test_mini_batches_of_another_size(second: int) -> None:
    """Memory of the pass before is given back as soon as the first result has another size."""
    model, x = two_layers()
    gradients(model, x)
    seen = []
    gradients(model, torch.randn(second, WIDE[0]), extension_hook=lambda _: seen.append(left()))
    assert seen == [0, 0]
    assert model[0].weight.grad_batch.shape == (second, *reversed(WIDE))


@pytest.mark.parametrize("extension", [extensions.BatchGrad, extensions.SumGradSquared, extensions.KFAC], ids=lambda extension: extension.__name__)
def test_memory_is_given_back_step_by_step(extension: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never is there more memory of the pass before than results are missing, wherever those of this pass lie."""
    monkeypatch.setattr(pages, "_SMALL", 1)
    (model, x), seen = two_layers(), []
    lossfunc, parts = extend(nn.CrossEntropyLoss()), {}

    def hook(module: nn.Module) -> None:
        seen.append((left(), sum(number for p, number in parts.items() if not hasattr(p, extension().savefield))))

    for _ in range(2):
        with backpack(extension(), extension_hook=hook):
            lossfunc(model(x), torch.arange(len(x))).backward()
        parts = {p: len(tree_leaves(getattr(p, extension().savefield))) for p in model.parameters()}
    assert all(there <= missing for there, missing in seen)
    assert seen[3][0] > 0
    assert pages._before.free == pages._before.due == {}


def test_an_error_in_a_pass() -> None:
    model, x = two_layers()
    gradients(model, x)

    def hook(module: nn.Module) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        gradients(model, x, extension_hook=hook)
    assert pages._before.free == pages._before.due == {}
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


def test_passes_inside_of_passes() -> None:
    """Each has its own memory of the pass before."""
    (model, x), (inner, _) = two_layers(), two_layers()
    for _ in range(2):
        gradients(inner, 2 * x)
        gradients(model, x)
    expected = [p.grad_batch.clone() for p in (*model.parameters(), *inner.parameters())]
    for _ in range(2):
        gradients(model, x, extension_hook=torch.enable_grad()(lambda _: gradients(inner, 2 * x)))
    for p, numbers in zip((*model.parameters(), *inner.parameters()), expected, strict=True):
        assert torch.equal(p.grad_batch, numbers)


def test_where_references_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_references", None)
    model, x = two_layers()
    gradients(model, x)
    held = model[0].weight.grad_batch.untyped_storage()
    numbers = model[0].weight.grad_batch.clone()
    gradients(model, 2 * x)
    assert torch.equal(torch.empty(0).set_(held).view(numbers.shape), numbers)
