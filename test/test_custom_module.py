"""The modules for functional operations compute what the functions compute, and refuse what they cannot represent."""

from collections import OrderedDict

import pytest
import torch
from torch import Tensor
from torch.nn import Identity, Linear, Module, ReLU, Tanh
from torch.nn import functional as F

from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) - 0.3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sum(count: int) -> None:
    inputs = [rand(1, 3).T for _ in range(count)]
    expected = torch.stack(inputs).sum(0)
    torch.testing.assert_close(SumModule()(*inputs), expected)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [((rand(2, 1), rand(2, 3)), r"\[\[2, 1\], \[2, 3\]\]"), ((rand(2), 1.0), r"\[\[2\], 'float'\]"), ((1.0, rand(2)), "'float'"), ((), r"\[\]")],
)
def test_sum_refuses_anything_but_tensors_of_one_shape(inputs: tuple[object, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        SumModule()(*inputs)


class Concatenate(Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, dim=1)


def test_parallel() -> None:
    linear, x = Linear(3, 3).double(), rand(2, 3)
    torch.testing.assert_close(Parallel(linear, Identity(), Tanh())(x), linear(x) + x + x.tanh())
    torch.testing.assert_close(Parallel(linear, linear)(x), 2 * linear(x))  # the same module twice
    torch.testing.assert_close(Parallel(linear, Tanh(), merge_module=Concatenate())(x), torch.cat([linear(x), x.tanh()], dim=1))


def test_parallel_with_names() -> None:
    parallel = Parallel(OrderedDict(main=Linear(3, 3), skip=Identity()))
    assert [name for name, _ in parallel.named_parameters()] == ["branch.main.weight", "branch.main.bias"]
    assert isinstance(parallel.merge, SumModule)
    parallel = Parallel(Linear(3, 3), merge_module=Concatenate())
    assert [name for name, _ in parallel.named_parameters()] == ["branch.0.weight", "branch.0.bias"]
    assert isinstance(parallel.merge, Concatenate)


@pytest.mark.parametrize("padding", [(1, 2), [0, 1, 2, 0], (-1, 1)])
def test_pad(padding: tuple[int, ...]) -> None:
    x = rand(2, 3, 4, 5).transpose(2, 3)
    assert torch.equal(Pad(padding)(x), F.pad(x, padding))
    assert torch.equal(Pad(padding, value=2.0)(x), F.pad(x, padding, value=2.0))
    pad = Pad(padding, "reflect")
    assert (pad.pad, pad.mode, pad.value) == (padding, "reflect", 0.0)
    assert torch.equal(Pad((1, 1), "circular")(x[0]), F.pad(x[0], (1, 1), mode="circular"))


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (0, 3, 1, 2), (0, -1, 1, -2), (-4, -3, -1, -2)])
def test_permute(dims: tuple[int, ...]) -> None:
    x, permute = rand(2, 3, 4, 5), Permute(*dims)
    assert torch.equal(permute(x), x.permute(dims))
    inverse = torch.argsort(torch.tensor(permute.dims)).tolist()
    assert torch.equal(permute(x).permute(inverse), x)


@pytest.mark.parametrize("dims", [(1, 2), (-1, -2), (1, -1), (2, 2)])
@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 3, 4, 5)])
def test_transpose(dims: tuple[int, int], shape: tuple[int, ...]) -> None:
    x, permute = rand(*shape), Permute(*dims, init_transpose=True)
    assert (permute.dims, permute.init_transpose) == (dims, True)
    for _ in range(2):
        assert torch.equal(permute(x), x.transpose(*dims))
        assert not permute.init_transpose
        assert torch.equal(x.permute(permute.dims), x.transpose(*dims))
        assert min(permute.dims) == 0


@pytest.mark.parametrize("dims", [(1, 0), (-1, 0), (-2, 0, 2)])
def test_permute_refuses_to_move_the_batch_axis(dims: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{dims[0]}, {dims[1]}.*moves the batch axis"):
        Permute(*dims)


def test_permute_refuses_what_is_no_permutation() -> None:
    with pytest.raises(ValueError, match="not a permutation"):
        Permute(0, 1, -2)
    with pytest.raises(ValueError, match=r"Permute\(0, 2\).*2 axes"):
        Permute(0, 2)
    with pytest.raises(ValueError, match="moves the batch axis"):
        Permute()


def test_transpose_refuses_to_move_the_batch_axis() -> None:
    for dims in ((0, 1), (1, 0), (-1, 0)):
        with pytest.raises(ValueError, match="moves the batch axis"):
            Permute(*dims, init_transpose=True)
    with pytest.raises(ValueError, match=r"Permute\(-1, -2\) moves the batch axis of a tensor with 2 axes"):
        Permute(-1, -2, init_transpose=True)(rand(2, 3))
    with pytest.raises(ValueError, match=r"Permute\(1, 3\).*3 axes"):
        Permute(1, 3, init_transpose=True)(rand(2, 3, 4))
    with pytest.raises(ValueError, match="two axes"):
        Permute(0, 1, 2, init_transpose=True)


@pytest.mark.parametrize("index", [0, 1, -1])
def test_reduce_tuple(index: int) -> None:
    entries = (rand(2), rand(3), rand(1))
    assert ReduceTuple(index)(entries) is entries[index]
    assert ReduceTuple()(entries) is entries[0]


@pytest.mark.parametrize("weight", [2.0, -0.5, 0.0])
def test_scale(weight: float) -> None:
    x = rand(1, 3)
    assert torch.equal(ScaleModule(weight)(x), weight * x)
    assert torch.equal(ScaleModule()(x), x)
    assert not list(ScaleModule(weight).parameters())


@pytest.mark.parametrize("weight", [2, True, torch.tensor(2.0), None])
def test_scale_refuses_anything_but_floats(weight: object) -> None:
    with pytest.raises(ValueError, match=type(weight).__name__):
        ScaleModule(weight)


@pytest.mark.parametrize("slice_info", [(slice(None), 1), (slice(None), slice(1, None, 2), ..., 0), (slice(None), None)], ids=str)
def test_slicing(slice_info: tuple[object, ...]) -> None:
    x = rand(2, 3, 4)
    assert torch.equal(Slicing(slice_info)(x), x[slice_info])


def test_descriptions_show_the_settings() -> None:
    modules = [Pad((1, 1)), Permute(1, -1, init_transpose=True), ReduceTuple(1), ScaleModule(0.5), Slicing((slice(None), 0)), ReLU()]
    assert [str(module) for module in modules[:4]] == [
        "Pad(pad=(1, 1), mode='constant', value=0.0)",
        "Permute(1, -1, init_transpose=True)",
        "ReduceTuple(index=1)",
        "ScaleModule(weight=0.5)",
    ]
