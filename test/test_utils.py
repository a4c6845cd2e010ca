"""Functions on tensors: selection, views, Kronecker products, diagonals of a linear layer, and the helpers of the examples."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES
from table import every_second
from test_extensions import QUANTITIES, Expect, collect, oracle_of, run
from torch import Tensor
from torch.func import functional_call, jacrev
from torch.fx import symbolic_trace
from torch.nn import BCEWithLogitsLoss, Conv1d, CrossEntropyLoss, Flatten, Identity, L1Loss, Linear, Module, MSELoss, ReLU, Sequential, Sigmoid

from backpack import backpack, extend
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.extensions import KFLR
from backpack.utils import examples, kroneckers, linear
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.errors import ArgumentError, DifferentiationError
from backpack.utils.hooks import no_op
from backpack.utils.module_classification import is_loss, is_nll, is_no_op
from backpack.utils.moment import second_moment, sum_of_squared_columns
from backpack.utils.subsampling import subsample
from backpack.utils.unsqueeze import kfacmp_unsqueeze_if_missing_dim


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) - 0.3


def test_no_op_accepts_anything() -> None:
    assert no_op(1, key=2) is None


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("indices", [[0], [2, 0, 2], [-1, 1], (1, 0), torch.tensor([2, 1]), []])
def test_subsample(dim: int, indices: list[int]) -> None:
    tensor = rand(4, 5, 3).transpose(0, 1)
    chosen = [tensor.select(dim, int(i)) for i in indices]
    expected = torch.stack(chosen, dim) if chosen else tensor.narrow(dim, 0, 0)
    assert torch.equal(subsample(tensor, dim, indices), expected)


def test_subsample_nothing_is_no_copy() -> None:
    tensor = rand(3)
    assert subsample(tensor) is tensor


MASK, WRONG = torch.tensor([True, False, True]), ["", "01", b"\0", [1.7], torch.tensor([0.5]), [3], [-4], torch.tensor([3]), torch.tensor([[0]])]


@pytest.mark.parametrize("wrong", [*WRONG, MASK, MASK.numpy(), MASK.tolist(), {0, 1}, [None], 1, torch.tensor(1)], ids=repr)
def test_subsample_takes_indices(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="list of indices of 3 samples, got"):
        subsample(rand(2, 3), 1, wrong)


@pytest.mark.parametrize("given", [[np.int64(2), 0], np.array([2, 0]), torch.tensor([2, 0], dtype=torch.int32), range(2, -1, -2)], ids=repr)
def test_subsample_takes_anything_with_integers(given: Any) -> None:
    tensor = rand(3, 2)
    assert torch.equal(subsample(tensor, subsampling=given), tensor[[2, 0]])


@pytest.mark.parametrize("dim", [2, -3])
def test_subsample_along_an_axis_that_exists(dim: int) -> None:
    with pytest.raises(ArgumentError, match=f"no axis {dim}"):
        subsample(rand(3, 2), dim, [0])


def test_vector_to_parameter_list() -> None:
    params = list(Sequential(Linear(2, 3), Linear(3, 1)).parameters())
    vec = rand(2 * 13).requires_grad_()[::2]
    parts = vector_to_parameter_list(vec, iter(params))
    assert [part.shape for part in parts] == [param.shape for param in params]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), vec)
    assert not any(part.requires_grad for part in parts)
    parts[1].zero_()
    assert not vec[6:9].any()


def test_vector_to_parameter_list_errors() -> None:
    with pytest.raises(TypeError, match="list"):
        vector_to_parameter_list([1.0], [rand(1)])
    with pytest.raises(RuntimeError, match=r"\[7\].*\[\[2, 3\], \[1\]\].*\[8\]"):
        vector_to_parameter_list(rand(8), [rand(2, 3), rand(1)])


# Kronecker products

FACTOR_SHAPES = [[(3, 3)], [(2, 3), (4, 1)], [(1, 2), (3, 3), (2, 1)], [(4,), (2, 3)], [(3, 2), (2,), (2,)]]


def dense(factors: list[Tensor]) -> Tensor:
    """Kronecker product by its definition, entry by entry."""
    result = torch.ones(1, 1, dtype=torch.float64)
    for factor in factors:
        matrix = torch.diag(factor) if factor.dim() == 1 else factor
        result = torch.cat([torch.cat([a * matrix for a in row], dim=1) for row in result], dim=0)
    return result


@pytest.mark.parametrize("shapes", FACTOR_SHAPES, ids=str)
def test_kronecker_products(shapes: list[tuple[int, ...]]) -> None:
    factors = [rand(*shape) for shape in shapes]
    matrix = dense(factors)
    assert torch.equal(kroneckers.kfacs_to_mat(iter(factors)), matrix)
    for mat in (rand(matrix.shape[1], 5), rand(5, matrix.shape[1]).T, rand(matrix.shape[1], 1), rand(matrix.shape[1], 0), rand(matrix.shape[1])):
        torch.testing.assert_close(kroneckers.apply_kfac_mat_prod(factors, mat), matrix @ mat)


def test_two_kfacs_to_mat() -> None:
    A, B = rand(2, 3), rand(3, 1)
    assert torch.equal(kroneckers.two_kfacs_to_mat(A, B), dense([A, B]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inverses_in_half_precision(dtype: torch.dtype) -> None:
    factors = [rand(3, 5), rand(2)]
    factors = [(factors[0] @ factors[0].T + torch.eye(3)).to(dtype), (factors[1] + 1).to(dtype), torch.zeros(2, dtype=dtype)]
    found, expected = (kroneckers.inv_kfacs([F.to(kind) for F in factors]) for kind in (dtype, torch.float64))
    for F, true in zip(found[:2], expected, strict=False):
        assert F.dtype == dtype
        torch.testing.assert_close(F.double(), true, rtol=0.02, atol=0.02)
    assert found[2].isfinite().all()


@pytest.mark.parametrize("shift", [None, 0.1, [0.3, 0.1, 2.0], (0.1, 0.2, 0.3)], ids=str)
def test_inverse_kronecker_products(shift: float | list[float] | None) -> None:
    factors = [A @ A.T + 0.1 * torch.eye(len(A)) for A in (rand(3, 5), rand(1, 2))] + [rand(2) + 1]
    shifts = shift if isinstance(shift, list | tuple) else [shift or 0.0] * 3
    shifted = [(torch.diag(F) if F.dim() == 1 else F) + s * torch.eye(len(F)) for F, s in zip(factors, shifts, strict=True)]
    inverse = torch.linalg.inv(dense(shifted))
    for mat in (rand(6, 4), rand(6)):
        torch.testing.assert_close(kroneckers.apply_inv_kfac_mat_prod(factors, mat, shift), inverse @ mat)
    for F, result in zip(shifted, kroneckers.inv_kfacs(factors, shift=shift), strict=True):
        torch.testing.assert_close(torch.diag(result) if result.dim() == 1 else result, torch.linalg.inv(F))


@pytest.mark.parametrize("make", [torch.tensor, iter, tuple, np.array], ids=["tensor", "iterator", "tuple", "array"])
@pytest.mark.parametrize("groups", [False, True])
def test_one_shift_a_factor_in_any_container(make: Callable[[list[float]], Any], groups: bool) -> None:
    """As many eigenvalues as factors: a shift for each factor is none for each eigenvalue."""
    factors, shift = [A @ A.T + 0.1 * torch.eye(2, dtype=A.dtype) for A in (rand(2, 2), rand(2, 2))], [0.5, 2.0]
    expected = [torch.linalg.inv(F + s * torch.eye(2, dtype=F.dtype)) for F, s in zip(factors, shift, strict=True)]
    inverses = kroneckers.inv_kfacs([factors, factors], make(shift)) if groups else [kroneckers.inv_kfacs(factors, make(shift))]
    for inverse in inverses:
        torch.testing.assert_close(inverse, expected)
    torch.testing.assert_close(kroneckers.inv_kfacs(factors[:1], torch.tensor(0.5)), expected[:1])
    with pytest.raises(AssertionError, match="2 shifts for 2"):
        kroneckers.inv_kfacs(factors, torch.tensor([[0.5, 2.0], [0.5, 2.0]]))


@pytest.mark.parametrize("groups", [1, 2])
def test_kronecker_products_of_grouped_convolutions(groups: int) -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(4, 6, 2, groups=groups)
    model = extend(torch.nn.Sequential(conv, torch.nn.Flatten(), torch.nn.Linear(6, 3)).double())
    with backpack(KFLR()):
        extend(torch.nn.CrossEntropyLoss())(model(rand(3, 4, 2)), torch.tensor([0, 1, 2])).backward()
    for param in (conv.weight, conv.bias):
        factors, size = param.kflr, param.numel()
        each = factors if groups > 1 and param is conv.weight else [factors]
        matrix, offset = torch.zeros(size, size, dtype=torch.float64), 0
        for block in map(dense, each):
            matrix[offset : offset + len(block), offset : offset + len(block)] = block
            offset += len(block)
        assert offset == size
        torch.testing.assert_close(kroneckers.kfacs_to_mat(factors), matrix)
        for mat in (rand(size, 3), rand(size)):
            torch.testing.assert_close(kroneckers.apply_kfac_mat_prod(factors, mat), matrix @ mat)
        inverse = kroneckers.inv_kfacs(factors, shift=0.1)
        shifted = [dense([F + 0.1 * torch.eye(len(F), dtype=F.dtype) for F in group]) for group in each]
        torch.testing.assert_close(torch.linalg.inv(torch.block_diag(*shifted)), kroneckers.kfacs_to_mat(inverse))
        mat = rand(size, 2)
        torch.testing.assert_close(kroneckers.apply_inv_kfac_mat_prod(factors, mat, 0.1), torch.linalg.solve(torch.block_diag(*shifted), mat))


@pytest.mark.parametrize("diagonal", [False, True])
def test_inverse_of_singular_factor_is_clamped(diagonal: bool) -> None:
    factor = torch.tensor([2.0, 0.0], dtype=torch.float64)
    (inverse,) = kroneckers.inv_kfacs([factor if diagonal else torch.diag(factor)])
    expected = torch.tensor([0.5, 1e8], dtype=torch.float64)
    torch.testing.assert_close(inverse, expected if diagonal else torch.diag(expected))


@pytest.mark.parametrize("shift", [None, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_inverse_of_a_factor_of_few_samples(dtype: torch.dtype, shift: float | None) -> None:
    """It is positive, as the factor is but for rounding errors, some of which are below zero."""
    torch.manual_seed(0)
    x = 30 * torch.randn(8, 64, dtype=dtype)
    (inverse,) = kroneckers.inv_kfacs([x.mH @ x / 8], shift)
    values, scale = torch.linalg.eigvalsh(inverse), inverse.abs().max()
    assert inverse.dtype == dtype
    assert (values >= -1e-5 * scale).all()


def test_inverse_of_complex_factor() -> None:
    x = torch.randn(3, 4, dtype=torch.complex128)
    factor = x @ x.mH + torch.eye(3)
    torch.testing.assert_close(kroneckers.inv_kfacs([factor])[0], torch.linalg.inv(factor))


def test_inverses_of_what_is_not_finite() -> None:
    assert kroneckers.inv_kfacs([torch.full((2, 2), torch.nan)], 0.1)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_below_zero_count_as_zero(dtype: torch.dtype) -> None:
    """In a diagonal as in the matrix."""
    diagonal = torch.tensor([4.0, -torch.finfo(dtype).eps], dtype=dtype, requires_grad=True)
    inverse, of_matrix = kroneckers.inv_kfacs([diagonal, diagonal.diag()])
    torch.testing.assert_close(inverse, torch.tensor([0.25, 1e8], dtype=dtype))
    torch.testing.assert_close(of_matrix, inverse.diag())
    for value in (inverse, of_matrix):
        (slope,) = torch.autograd.grad(value.sum(), diagonal)
        torch.testing.assert_close(slope, torch.tensor([-1 / 16, 0.0], dtype=dtype))


def test_complex_factors_of_no_entries() -> None:
    (inverse,) = kroneckers.inv_kfacs([torch.zeros(0, 0, dtype=torch.cdouble)])
    assert (inverse.shape, inverse.dtype) == ((0, 0), torch.cdouble)


@pytest.mark.parametrize("negative", [1.0, 1e-4])
def test_inverses_of_indefinite_factors(negative: float) -> None:
    factor = torch.tensor([[1.0, 0.0], [0.0, -negative]])
    torch.testing.assert_close(kroneckers.inv_kfacs([factor])[0], torch.tensor([[1.0, 0.0], [0.0, -1 / negative]]))


def test_kronecker_errors() -> None:
    A, B = rand(2, 3), rand(4, 4)
    with pytest.raises(RuntimeError, match=r"\[\[2, 3\], \[4, 4\]\].*12 rows.*\[8, 2\]"):
        kroneckers.apply_kfac_mat_prod([A, B], rand(8, 2))
    with pytest.raises(RuntimeError, match=r"2 or 1 axes.*\[12, 1, 1\]"):
        kroneckers.apply_kfac_mat_prod([A, B], rand(12, 1, 1))
    with pytest.raises(RuntimeError, match=r"\[2, 3\]"):
        kroneckers.inv_kfacs([A])
    with pytest.raises(AssertionError, match="3 shifts for 2"):
        kroneckers.inv_kfacs([B, B], [0.1, 0.2, 0.3])
    with pytest.raises(RuntimeError, match=r"\[\[2, 3\], \[2, 2, 2\]\]"):
        kroneckers.kfacs_to_mat([A, rand(2, 2, 2)])
    with pytest.raises(RuntimeError, match=r"groups of \[12, 4\] columns.*16 rows.*\[8, 2\]"):
        kroneckers.apply_kfac_mat_prod([[A, B], [B]], rand(8, 2))
    with pytest.raises(RuntimeError, match=r"\[\[2, 3\], 'list'\]"):
        kroneckers.kfacs_to_mat([A, [A, B]])
    for use in (kroneckers.kfacs_to_mat, kroneckers.kfac_mat_prod, kroneckers.inv_kfacs):  # not the rows of one
        with pytest.raises(RuntimeError, match=r"\[4, 4\]. Write \[factor\]"):
            use(B)
    for empty in ([], [[]]):
        with pytest.raises(RuntimeError, match="at least one"):
            kroneckers.kfac_mat_prod(empty)


def test_kronecker_helpers() -> None:
    assert kroneckers.is_vector(rand(2)) and not kroneckers.is_vector(rand(1, 2))
    assert kroneckers.is_matrix(rand(2, 1)) and not kroneckers.is_matrix(rand(2))
    assert kroneckers.is_tensor_of_order(0, torch.tensor(1.0))
    assert kroneckers.all_tensors_of_order(order=2, tensors=[rand(1, 2), rand(2, 2)])
    assert not kroneckers.all_tensors_of_order(order=2, tensors=[rand(1, 2), rand(2)])
    assert len(set(kroneckers.get_letters())) == 26
    assert len(set(kroneckers.get_letters(52))) == 52
    with pytest.raises(ValueError, match="53"):
        kroneckers.get_letters(53)


def test_unsqueeze_missing_dim() -> None:
    @kfacmp_unsqueeze_if_missing_dim(mat_dim=3)
    def double(mat: Tensor) -> Tensor:
        assert mat.dim() == 3
        return 2 * mat

    for mat in (rand(2, 3, 4), rand(2, 3), rand(2, 1)):
        assert torch.equal(double(mat), 2 * mat)
    with pytest.raises(RuntimeError, match=r"3 or 2 axes.*\[2\]"):
        double(rand(2))


def test_module_classification() -> None:
    containers = [Sequential(ReLU()), Parallel(ReLU(), ReLU()), Parallel(ReLU()).branch, ReduceTuple(), symbolic_trace(ReLU())]
    assert all(is_no_op(module) for module in containers)
    assert not any(is_no_op(module) for module in (ReLU(), Identity(), SumModule(), Linear(1, 1), MSELoss()))
    assert all(is_loss(module) for module in (MSELoss(), L1Loss(), CrossEntropyLoss()))
    assert not is_loss(Linear(1, 1))
    assert all(is_nll(module) for module in (MSELoss(), CrossEntropyLoss(), BCEWithLogitsLoss()))
    assert not is_nll(L1Loss())


# Diagonals of a linear layer


@pytest.mark.parametrize("shape", [(4,), (1,), (3, 2), (2, 2, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("sum_batch", [True, False])
def test_linear_diagonals(shape: tuple[int, ...], sum_batch: bool) -> None:
    layer = Linear(3, 2).double()
    layer.input0 = rand(3, *shape).movedim(0, -1)
    S = rand(5, *shape, 2)
    params = {name: param.detach() for name, param in layer.named_parameters()}
    results = {"weight": linear.extract_weight_diagonal(layer, S, sum_batch), "bias": linear.extract_bias_diagonal(layer, S, sum_batch)}
    for name, result in results.items():
        expected = []
        for n, x in enumerate(layer.input0):
            J = jacrev(lambda p, x=x: functional_call(layer, p, x))(params)[name].reshape(-1, params[name].numel())
            expected.append((S[:, n].reshape(5, -1) @ J).square().sum(0).reshape(params[name].shape))
        torch.testing.assert_close(result, sum(expected) if sum_batch else torch.stack(expected))


def test_linear_diagonals_check_shapes() -> None:
    layer = Linear(3, 2).double()
    layer.input0 = rand(4, 3)
    with pytest.raises(RuntimeError, match=r"\['V', 4, 2\].*\[5, 3, 2\]"):
        linear.extract_weight_diagonal(layer, rand(5, 3, 2))
    with pytest.raises(RuntimeError, match=r"\['V', 4, 2\].*\[5, 4, 3\]"):
        linear.extract_bias_diagonal(layer, rand(5, 4, 3))
    layer.input0 = rand(3)
    with pytest.raises(RuntimeError, match="'N'"):
        linear.extract_weight_diagonal(layer, rand(5, 2))


# Helpers of the examples


def write_idx(path: Path, data: Tensor) -> None:
    header = bytes([0, 0, 8, data.dim()]) + b"".join(size.to_bytes(4, "big") for size in data.shape)
    content = header + bytes(data.flatten().tolist())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize(("folder", "suffix"), [("", ""), ("", ".gz"), ("MNIST/raw", ""), ("MNIST/raw", ".gz")])
def test_mnist_files(tmp_path: Path, folder: str, suffix: str) -> None:
    images, labels = torch.randint(256, (10, 28, 28)), torch.arange(10)
    write_idx(tmp_path / folder / f"train-images-idx3-ubyte{suffix}", images)
    write_idx(tmp_path / folder / f"train-labels-idx1-ubyte{suffix}", labels)
    X, y = examples.load_one_batch_mnist(batch_size=4, shuffle=False, root=tmp_path)
    torch.testing.assert_close(X, ((images[:4] / 255 - 0.1307) / 0.3081).unsqueeze(1))
    assert y.tolist() == [0, 1, 2, 3]
    X_flat, _ = examples.load_one_batch_mnist(batch_size=4, shuffle=False, flat=True, root=str(tmp_path))
    assert torch.equal(X_flat, X.reshape(4, 784))
    shuffled = [(X, y) for X, y in examples.get_mnist_dataloader(batch_size=3, root=tmp_path)]
    assert [len(y) for _, y in shuffled] == [3, 3, 3, 1]
    assert sorted(torch.cat([y for _, y in shuffled]).tolist()) == list(range(10))
    for X, y in shuffled:
        torch.testing.assert_close(X, ((images[y] / 255 - 0.1307) / 0.3081).unsqueeze(1))


def test_mnist_test_set(tmp_path: Path) -> None:
    write_idx(tmp_path / "t10k-images-idx3-ubyte", torch.zeros(2, 28, 28, dtype=torch.long))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", torch.tensor([7, 3]))
    assert [int(y) for _, y in examples.load_mnist_dataset(tmp_path, train=False)] == [7, 3]


def test_mnist_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\b.*MNIST/raw/train-images-idx3-ubyte\.gz"):
        examples.load_mnist_dataset(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    write_idx(path, torch.zeros(2, 3, 3, dtype=torch.long))
    complete = path.read_bytes()
    for content in (complete[:-1], complete[:9], complete[:2], b"", b"\x00\x00\x0d" + complete[3:]):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match="train-images-idx3-ubyte is not a complete IDX file"):
            examples.load_mnist_dataset(tmp_path)


def ggn(model: Module, loss: Module, X: Tensor, y: Tensor) -> Tensor:
    """GGN by its definition, from dense Jacobian and Hessian."""
    params = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    jacobians = jacrev(lambda p: functional_call(model, p, X))(params)
    output = model(X).detach()
    J = torch.cat([jacobians[name].reshape(output.numel(), -1) for name in params], dim=1)
    H = torch.autograd.functional.hessian(lambda f: loss(f, y), output).reshape(output.numel(), output.numel())
    return J.T @ H @ J


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_autograd_diag_ggn_exact(N: int, reduction: str) -> None:
    model = Sequential(Linear(3, 2), Sigmoid(), Linear(2, 4)).double()
    model[0].bias.requires_grad_(False)
    loss, X, y = CrossEntropyLoss(reduction=reduction), rand(N, 3), torch.randint(4, (N,))
    G = ggn(model, loss, X, y)
    torch.testing.assert_close(examples.autograd_diag_ggn_exact(X, y, model, loss), G.diag())
    for idx in ([4, 0, 17], torch.tensor([4, 0]), 3, torch.tensor(3), []):
        expected = G.diag()[torch.as_tensor(idx, dtype=torch.long).reshape(-1)]
        torch.testing.assert_close(examples.autograd_diag_ggn_exact(X, y, model, loss, idx=idx), expected)
    for index, column in examples._autograd_ggn_exact_columns(X, y, model, loss, idx=[2, 5]):
        torch.testing.assert_close(column, G[:, index])


def test_second_moment_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the blocks are copies: the numbers are those of the whole product, also for views, and the gradient is that of the whole product."""
    torch.manual_seed(0)
    for rows, size in ((7, 5), (4, 4), (3, 1), (0, 5)):
        matrix = torch.rand(2, size, rows, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(2, size, size, dtype=torch.float64)
        expected = torch.einsum("gkr,glr->gkl", matrix, matrix)
        (derivative,) = torch.autograd.grad((expected * weights).sum(), matrix)
        for block in (1, 2, 4, 9):
            monkeypatch.setattr("backpack.utils.moment._ROWS", 0)
            monkeypatch.setattr("backpack.utils.moment._BLOCK", block)
            moment = second_moment(matrix.mT)
            torch.testing.assert_close(moment, expected)
            torch.testing.assert_close(second_moment(matrix[:1].mT, 0.3), 0.3 * expected[:1])
            torch.testing.assert_close(second_moment(matrix.mT, 0.3), 0.3 * expected)
            torch.testing.assert_close(torch.autograd.grad((moment * weights).sum(), matrix)[0], derivative)


@pytest.mark.parametrize("each", [1, 2**14])
@pytest.mark.parametrize("columns", [0, 1, 4])
def test_squares_of_columns(columns: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one or all at once: the same numbers and gradients, in memory of their own, and in single precision if the columns are in half."""
    monkeypatch.setattr("backpack.utils.moment._EACH", each)
    torch.manual_seed(0)
    for shape in ((3,), (3, 2), (1, 2, 2)):
        matrix = torch.rand(columns, *shape, dtype=torch.float64, requires_grad=True)
        signs = torch.randint(-1, 2, (columns, shape[0]))
        factors = signs.double().reshape(*signs.shape, *[1] * (len(shape) - 1))
        for given, expected in ((None, (matrix**2).sum(0)), (signs.double(), (factors * matrix**2).sum(0))):
            result = sum_of_squared_columns(matrix, given)
            torch.testing.assert_close(result, expected)
            derivatives = [torch.autograd.grad(value.sin().sum(), matrix)[0] for value in (result, expected)]
            torch.testing.assert_close(*derivatives)
            half = sum_of_squared_columns(matrix.detach().half() * 1000, given)
            torch.testing.assert_close(half, 1e6 * expected.detach().float(), rtol=4e-3, atol=1e3)


@pytest.mark.parametrize("case", every_second(CASES))
def test_squares_one_by_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What adds the squares of large columns one by one is compared with the oracle on small ones."""
    monkeypatch.setattr("backpack.utils.moment._EACH", 1)
    squares = ["SumGradSquared", "DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "BatchDiagHessian"]
    names = [name for name in squares if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    problem = CASES[case].build(3)
    run(problem, *(QUANTITIES[name].make() for name in names))
    for name in names:
        QUANTITIES[name].check(oracle_of(case, 3), collect(problem, QUANTITIES[name].field))


def test_factors_share_no_memory() -> None:
    """The factor of a bias equals the output side of the weight, and changing one leaves the other as it is."""
    torch.manual_seed(0)
    for layer, x in ((Linear(3, 2), torch.rand(4, 3)), (Conv1d(3, 2, 2), torch.rand(4, 3, 2))):
        model, lossfunc = extend(Sequential(layer, Flatten())), extend(CrossEntropyLoss())
        with backpack(KFLR()):
            lossfunc(model(x), torch.tensor([0, 1, 1, 0])).backward()
        side = layer.bias.kflr[0].clone()
        torch.testing.assert_close(side, layer.weight.kflr[0])
        layer.weight.kflr[0].zero_()
        torch.testing.assert_close(layer.bias.kflr[0], side)


@pytest.mark.parametrize(
    "factor",
    [
        torch.diag(torch.arange(1.0, 5.0)),
        torch.eye(4),
        torch.block_diag(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.ones(2, 2)),
        torch.arange(8.0).view(2, 4).T @ torch.arange(8.0).view(2, 4),
    ],
    ids=["diagonal", "identity", "blocks", "rank two"],
)
def test_inverses_are_differentiable(factor: Tensor) -> None:
    """Also where entries are zero, and eigenvalues the same."""
    factor = factor.double().requires_grad_()
    weights = torch.arange(16.0).view(4, 4).cos().double()
    (found,) = torch.autograd.grad((kroneckers.inv_kfacs([factor], shift=0.3)[0] * weights).sum(), factor)
    (expected,) = torch.autograd.grad((torch.linalg.inv(factor + 0.3 * torch.eye(4)) * weights).sum(), factor)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [None, 1e-9, 0.1])
def test_inverses_do_not_depend_on_the_graph(shift: float | None, dtype: torch.dtype) -> None:
    """A factor of fewer samples than features is singular: rounding errors count as zero there, too."""
    torch.manual_seed(0)
    for factor in (torch.randn(8, 16), torch.ones(1, 4), torch.zeros(2, 4)):
        matrix = (factor.T @ factor).to(dtype)
        attached = matrix.clone().requires_grad_()
        (found,), (expected,) = kroneckers.inv_kfacs([attached], shift), kroneckers.inv_kfacs([matrix], shift)
        torch.testing.assert_close(found.detach(), expected, rtol=0, atol=0)
        (gradient,) = torch.autograd.grad(found.sum(), attached)
        assert gradient.isfinite().all()


def test_derivatives_of_inverses() -> None:
    torch.manual_seed(0)
    factor = torch.randn(5, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kroneckers.inv_kfacs([x.T @ x], 0.1)[0], factor.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: kroneckers.inv_kfacs([x.T @ x], 0.1)[0], factor)
    # where an eigenvalue is clamped, its inverse is constant, and the others are not
    scales = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64, requires_grad=True)
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    weights = torch.randn(4, 4, dtype=torch.float64)
    (inverse,) = kroneckers.inv_kfacs([(basis[:, :3] * scales) @ basis[:, :3].T])
    (found,) = torch.autograd.grad((inverse * weights).sum(), scales, create_graph=False, retain_graph=True)
    expected = -torch.einsum("ik,ij,jk->k", basis[:, :3], weights, basis[:, :3]) / scales.detach().square()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(DifferentiationError, match="singular"):
        torch.autograd.grad((inverse * weights).sum(), scales, create_graph=True)


def test_inverse_of_a_complex_number() -> None:
    torch.testing.assert_close(kroneckers.inv_kfacs([torch.tensor([[2.0 + 0j]])])[0], torch.tensor([[0.5 + 0j]]))
