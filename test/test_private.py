"""Each private symbol of torch that the library uses does what the library takes it to do."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable, grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend
from backpack.core import graph
from backpack.core.checkpoints import checkpointed
from backpack.core.graph import call_node, outputs_of, saved, saved_maxima, sequence_number, setting_reader, shape_of, tensor_at
from backpack.extensions import BatchGrad
from backpack.utils.columns import compare_mixture
from backpack.utils.differentiation import compiled


def test_input_metadata_are_shapes_of_outputs() -> None:
    parts = torch.rand(5, 3, requires_grad=True).split([2, 3])
    assert [tuple(output.shape) for output in outputs_of(parts[0].grad_fn)] == [(2, 3), (3, 3)]
    assert [shape_of((parts[0].grad_fn, nr)) for nr in (0, 1)] == [(2, 3), (3, 3)]
    leaf = torch.autograd.graph.get_gradient_edge(torch.rand(4, 2, requires_grad=True))
    assert shape_of((leaf.node, leaf.output_nr)) == (4, 2)


def test_metadata_of_many_outputs_hold_no_graph() -> None:
    """They are kept with the node, as torch makes them anew at each request, and must not keep it alive."""
    source = torch.rand(45, 3)
    parts, alive = (source.clone().requires_grad_() * source).split(list(range(10))), weakref.ref(source)
    assert [shape_of((parts[4].grad_fn, nr)) for nr in range(10)] == [(rows, 3) for rows in range(10)]
    assert tensor_at((parts[4].grad_fn, 3)) is tensor_at((parts[4].grad_fn, 3))
    gc.disable()
    try:
        del parts, source
        assert alive() is None
    finally:
        gc.enable()


def test_metadata_tell_nested_tensors() -> None:
    parts = [torch.rand(rows, 2, requires_grad=True) for rows in (1, 3)]
    node = (2 * torch.nested.as_nested_tensor(parts, layout=torch.jagged)).grad_fn
    assert node._input_metadata[0].is_nested_tensor
    assert not parts[0].sin().grad_fn._input_metadata[0].is_nested_tensor


def test_base_and_version_of_views() -> None:
    x = torch.rand(2, 3, requires_grad=True) * 1
    view = x.view(6)
    assert view._is_view()
    assert view._base is x
    before = x.detach()._version
    view.add_(1)
    assert x.detach()._version == x._version == before + 1


def test_sequence_numbers_follow_the_forward_pass() -> None:
    x = torch.rand(3, requires_grad=True)
    first, second = x.exp(), x.sin()
    assert sequence_number(first.grad_fn) < sequence_number(second.grad_fn) < sequence_number((first * second).grad_fn)


def test_raw_saved_tensors_show_checkpoints() -> None:
    x = torch.rand(3, requires_grad=True)
    assert checkpointed(checkpoint(torch.tanh, x, use_reentrant=False).grad_fn)
    assert not checkpointed(torch.tanh(x).grad_fn)


COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "different": lambda columns: columns,
    "first and last are zero": lambda columns: columns * torch.tensor([0.0, 1, 1, 1, 0]).double().reshape(-1, 1, 1),
    "first and last are the same": lambda columns: columns[[0, 1, 2, 3, 0]],
    "of different sizes": lambda columns: columns * torch.tensor([1.0, 1e-9, 1e9, 1, 1]).double().reshape(-1, 1, 1),
    "nearly the same": lambda columns: columns[:1] + 1e-5 * columns,
    "all the same": lambda columns: columns[:1].expand_as(columns),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("function", [lambda x: torch.cdist(x, x.detach() + 1), lambda x: x.exp().cumsum(1), lambda x: x.softmax(1)])
def test_batching_rules_are_not_taken_on_trust(function: Callable[[Tensor], Tensor], kind: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of cdist computes the first column only; this is found out, even if it is not known."""
    monkeypatch.setattr(graph, "_TRUSTED", set())
    monkeypatch.setattr(graph, "_TRIED", set())
    if not known:
        monkeypatch.setattr(graph, "_ALONE", frozenset())
    torch.manual_seed(0)
    node = function(torch.rand(3, 4, dtype=torch.float64, requires_grad=True)).grad_fn
    columns = COLUMNS[kind](torch.rand(5, *shape_of((node, 0)), dtype=torch.float64))
    expected = [node(column) for column in columns]
    expected = torch.stack([e[0] if isinstance(e, tuple) else e for e in expected])
    for _ in range(2):
        with torch.no_grad():  # as in a backward pass
            found = call_node(node, [columns])[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("number", [1.0, inf, nan])
def test_what_is_not_finite_proves_no_batching_rule(number: float) -> None:
    factors, columns = torch.tensor([number, 1.0, 2.0]), torch.tensor([[1.0, 2, 3], [3, 1, 2]])
    right = factors * columns
    wrong = torch.stack([right[0], right[1] * torch.tensor([1.0, 1, 1.5])])
    assert compare_mixture([columns], [wrong], lambda column: (factors * column,)) == (False, False)
    assert compare_mixture([columns], [right], lambda column: (factors * column,)) == (True, number == 1)
    same = columns[[0, 1, 0]]  # a rule that turns the order around is right for these only
    assert compare_mixture([same], [(factors * same).flip(0)], lambda column: (factors * column,)) == (True, False)


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 2, 4)])
@pytest.mark.parametrize("piece", [1, 12, 10**6])
def test_columns_are_compared_in_pieces(piece: int, place: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backpack.utils.columns._PIECE", piece)
    columns = torch.randn(4, 2, 3, 5).transpose(1, 3)  # [4, 5, 3, 2]
    wrong = 2 * columns
    assert compare_mixture([columns], [wrong], lambda column: (2 * column,)) == (True, True)
    assert compare_mixture([columns], [wrong.sum(1)], lambda column: (2 * column.sum(0),)) == (True, True)
    assert compare_mixture([columns[:, 0, 0, 0]], [wrong], lambda number: (2 * columns[0] * number,))[0] is False
    wrong[3].transpose(0, 2)[place] += 1
    assert compare_mixture([columns], [wrong], lambda column: (2 * column,)) == (False, False)


def test_comparing_large_columns_takes_little_memory() -> None:
    """Nothing is formed that is larger than one of them in double precision; all of them together would take sixteen times as much."""
    columns = torch.ones(8, 1, 2**20)
    found, taken = 2 * columns, []
    given = {tensor.untyped_storage().data_ptr() for tensor in (columns, found)}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None) -> object:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
                taken.append(out.untyped_storage().nbytes())
            return out

    with Watch():
        assert compare_mixture([columns], [found], lambda column: (2 * column,))[0]
    assert max(taken) <= 2 * columns[0].nbytes


@pytest.mark.parametrize("zeros", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_batching_rules_that_are_right_are_trusted(dtype: torch.dtype, zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if columns of a pass tell nothing, as those of samples without a gradient."""
    monkeypatch.setattr(graph, "_TRUSTED", set())
    monkeypatch.setattr(graph, "_TRIED", set())
    torch.manual_seed(0)
    node = torch.randn(3, 40, dtype=dtype, requires_grad=True).softmax(1).grad_fn
    columns = torch.randn(200, 3, 40).to(dtype)
    columns[:zeros] = 0
    with torch.no_grad():
        call_node(node, [columns])
    assert len(graph._TRUSTED) == 1


def test_batching_rules_that_are_right_for_one_entry_are_not_trusted_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of ``index_copy`` spreads the gradient of a number over the axis."""
    monkeypatch.setattr(graph, "_TRUSTED", set())
    number = torch.rand((), dtype=torch.float64, requires_grad=True)
    for length in (1, 5):
        rows = torch.rand(length, dtype=torch.float64, requires_grad=True)
        columns = torch.rand(3, length, dtype=torch.float64)
        node = rows.index_copy(0, torch.tensor([0]), number).grad_fn
        with torch.no_grad():
            found = call_node(node, [columns])[1]
        torch.testing.assert_close(found.reshape(3, -1).sum(1), columns[:, 0])


def test_batching_rules_that_are_right_for_an_index_with_an_axis_are_not_trusted_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of ``index_reduce`` reads a number of an index that has no axis in another way."""
    monkeypatch.setattr(graph, "_TRUSTED", set())
    torch.manual_seed(0)
    rows, added = (torch.rand(3, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 1))
    columns = torch.rand(5, *rows.shape, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the operation is new
        nodes = [rows.index_reduce(1, torch.tensor(index), added, "mean").grad_fn for index in ([2], 2)]
    for node in nodes:
        with torch.no_grad():
            found = call_node(node, [columns])
        for number, part in enumerate(found):
            torch.testing.assert_close(part.reshape(5, -1), torch.stack([node(column)[number] for column in columns]).reshape(5, -1))


def test_pieces_of_a_tensor_are_summed_column_by_column() -> None:
    """The batching rule of this operation writes where it must not."""
    node = torch.segment_reduce(torch.rand(4, 2, dtype=torch.float64, requires_grad=True), "sum", lengths=torch.tensor([3, 1])).grad_fn
    columns = torch.rand(5, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        found = call_node(node, [columns])[0]
    torch.testing.assert_close(found, columns[:, [0, 0, 0, 1]])


@pytest.mark.parametrize("module", [nn.Embedding, nn.EmbeddingBag])
def test_saved_options_of_tables(module: type[nn.Module]) -> None:
    for scaled in (False, True):
        out = module(3, 2, scale_grad_by_freq=scaled)(torch.tensor([[0, 1]]))
        assert out.grad_fn._saved_scale_grad_by_freq is scaled


def test_saved_numbers_may_be_negative() -> None:
    """Torch reports them as unsigned ones, alone and in lists."""
    x = torch.rand(2, 3, 4, requires_grad=True)
    assert saved(x.softmax(-2).grad_fn, "dim") == -2
    assert saved(x.logsumexp(-2).grad_fn, "dim") == (-2,)
    assert saved(x.permute(0, -1, -2).grad_fn, "dims") == (0, -1, -2)


def test_settings_are_read_as_they_were_given() -> None:
    x = torch.rand(3, 2, requires_grad=True)
    node = torch.addmm(x, x, torch.rand(2, 2), alpha=0.1, beta=3).grad_fn
    assert setting_reader("alpha", "beta")(node) == (0.1, 3)
    assert setting_reader("alpha")(node) == 0.1


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("make", [lambda axes: getattr(nn, f"MaxPool{axes}d"), lambda axes: getattr(nn, f"AdaptiveMaxPool{axes}d")])
def test_saved_positions_of_maxima(make: Callable[[int], type[nn.Module]], axes: int) -> None:
    x = torch.rand(2, 3, *[5] * axes, requires_grad=True)
    maxima, positions = make(axes)(2, return_indices=True)(x)
    nodes = [maxima.grad_fn, *(node for node, _ in maxima.grad_fn.next_functions)]
    assert saved_maxima(nodes).reshape(maxima.shape).equal(positions)
    assert saved_maxima([torch.tanh(x).grad_fn]) is None
    held = checkpoint(make(axes)(2), x, use_reentrant=False).grad_fn
    assert saved_maxima([held, held.next_functions[0][0]]) is None


@pytest.mark.parametrize("retain", [False, True])
def test_keep_graph_is_known_in_hooks(retain: bool) -> None:
    seen = []
    out = torch.rand(3, requires_grad=True).sin().sum()
    out.grad_fn.register_prehook(lambda _: seen.append(torch._C._autograd._get_current_graph_task_keep_graph()))
    out.backward(retain_graph=retain)
    assert seen == [retain]


def test_transformations_are_seen() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch._C._are_functorch_transforms_active())
        return x.sin().sum()

    x = torch.rand(3, 2)
    f(x)
    torch.vmap(f)(x)
    torch.func.grad(f)(x)
    torch.vmap(torch.func.grad(f))(x)
    torch.func.functionalize(f)(x)
    f(x)
    assert seen == [False, True, True, True, True, False]


def test_node_that_autograd_runs() -> None:
    """It is known in its backward pass, but not where it is called by hand."""
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
            seen.append(torch._C._current_autograd_node())
            return g

    out = Spy.apply(torch.rand(3, requires_grad=True))
    out.sum().backward(retain_graph=True)
    out.grad_fn.apply(torch.ones(3))
    assert seen == [out.grad_fn, None]


def test_engine_is_watched_inside_contexts_only() -> None:
    """However a function of autograd was imported, it passes through the engine; outside, the engine is torch's own object."""
    engine = Variable._execution_engine
    model, x = extend(nn.Linear(3, 2)), torch.rand(4, 3)
    with backpack(BatchGrad()):
        assert Variable._execution_engine is not engine
        with backpack(BatchGrad()):
            (weight, _) = grad(model(x).sum(), tuple(model.parameters()))
        assert Variable._execution_engine is not engine
    assert Variable._execution_engine is engine
    torch.testing.assert_close(model.weight.grad_batch.sum(0), weight)


def test_legacy_batched_gradients_pass_by() -> None:
    model, x = extend(nn.Linear(3, 2)), torch.rand(4, 3)
    out = model(x)
    with backpack(BatchGrad()):
        rows = torch.autograd.grad(out.sum(0), model.weight, torch.eye(2), is_grads_batched=True)[0]
    assert not hasattr(model.weight, "grad_batch")
    torch.testing.assert_close(rows[0, 0], x.sum(0))


X, W = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True), torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
LEFT = X.detach()[0]


@pytest.mark.parametrize(
    ("output", "operation", "names", "values"),
    [
        (X[0] @ W, "Mm", ("self", "mat2"), (LEFT, W)),
        (torch.addmm(W[0], X[0], W, alpha=2), "Addmm", ("mat1", "mat2", "alpha", "beta"), (LEFT, W, 2, 1)),
        (torch.bmm(X, W.expand(2, 4, 3)), "Bmm", ("self", "mat2"), (X, W.expand(2, 4, 3))),
        (X.softmax(-1), "Softmax", ("dim",), (-1,)),
        (
            nn.functional.conv1d(X, W.unsqueeze(2), stride=2),
            "Convolution",
            ("input", "weight", "stride", "padding", "dilation", "output_padding", "groups", "transposed"),
            (X, W.unsqueeze(2), (2,), (0,), (1,), (0,), 1, False),
        ),
        (
            nn.functional.layer_norm(X, (4,), W[:, 0]),
            "NativeLayerNorm",
            ("input", "weight", "normalized_shape", "result1"),
            (X, W[:, 0], (4,), X.mean(2, keepdim=True)),
        ),
        (nn.functional.group_norm(X, 3, W[0], eps=0.5), "NativeGroupNorm", ("input", "weight", "group", "eps"), (X, W[0], 3, 0.5)),
        (
            nn.functional.batch_norm(X, LEFT[:, 0], LEFT[:, 1], W[0]),
            "NativeBatchNorm",
            ("input", "weight", "running_mean", "running_var", "training", "eps"),
            (X, W[0], LEFT[:, 0], LEFT[:, 1], False, 1e-5),
        ),
        (
            nn.functional.embedding(torch.tensor([1, 0]), W),
            "Embedding",
            ("indices", "padding_idx", "scale_grad_by_freq"),
            (torch.tensor([1, 0]), -1, False),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_nodes_have_saved(output: torch.Tensor, operation: str, names: tuple[str, ...], values: tuple) -> None:
    """Products and layers are read off their nodes by these names."""
    node = output.grad_fn
    while node.name().partition("Backward")[0] != operation:
        node = next(upstream for upstream, _ in node.next_functions if upstream is not None)
    for name, value in zip(names, values, strict=True):
        found = saved(node, name)
        assert torch.allclose(found.reshape(value.shape), value) if isinstance(value, torch.Tensor) else found == value


def test_class_of_the_forward_pass_is_known_to_nodes_of_custom_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return 2 * grad

    node = Double.apply(torch.rand(3, requires_grad=True)).grad_fn
    assert type(node)._forward_cls is Double
    assert not compiled(node)


def test_tensors_of_inference_mode_have_no_version() -> None:
    with torch.inference_mode():
        x = torch.rand(3)
    assert x.is_inference()
    with pytest.raises(RuntimeError, match="version"):
        x._version  # noqa: B018


def test_hooks_of_a_leaf_run_before_those_of_its_node() -> None:
    """Also if they were registered later: gradients are read there, before anybody changes them."""
    seen, leaf = [], torch.rand(3, requires_grad=True)
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    handles = [node.register_prehook(lambda grads: seen.append("node")), leaf.register_hook(lambda grad: seen.append("leaf"))]
    leaf.sum().backward()
    assert seen == ["leaf", "node"]
    assert len(handles) == 2


def test_how_often_memory_is_referred_to() -> None:
    """Storages count tensors of C++, too; the handle in Python, of which there is one, counts once for all."""
    x = torch.rand(3, 4)
    storage = x.untyped_storage()
    count = torch._C._storage_Use_Count
    assert count(storage._cdata) == 2
    view = x[0]
    assert count(storage._cdata) == 3
    graph = (torch.ones((), requires_grad=True) * x).sum().grad_fn
    del x, view
    assert count(storage._cdata) == 2  # what the graph has saved
    del graph
    assert count(storage._cdata) == 1
    assert not torch.from_numpy(torch.rand(3).numpy()).untyped_storage().resizable()


def test_warnings_about_operations_without_batching_rule_are_the_users_own() -> None:
    """They are off while a node is called for several columns, and on afterwards."""
    node = torch.rand(4, 3, requires_grad=True).tanh().grad_fn
    with torch.no_grad():  # as autograd runs its nodes
        call_node(node, [torch.rand(2, 4, 3)])
    with pytest.warns(UserWarning, match="batching rule"):
        torch.vmap(lambda t: torch.segment_reduce(t, "sum", lengths=torch.tensor([2, 1])))(torch.rand(4, 3))
