"""Numbers do not depend on how tensors lie in memory: channels last, views with strides, broadcast ones; and mini-batches may be empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from warnings import catch_warnings, simplefilter

import pytest
import torch
from cases import CASES, LAYERS
from cases_norm import spread
from oracle import Oracle, Problem, Term
from table import default_dtype
from test_extensions import QUANTITIES, Expect, Value, close, collect, flat, oracle_of, run
from torch import Tensor, nn, randint, randn
from torch.nn import Linear, Module, MSELoss, Parameter

from backpack import backpack, extend
from backpack.core import crossings
from backpack.core.derivatives import convnd
from backpack.extensions import BatchGrad
from backpack.extensions.secondorder.hbp import HBP, BackpropStrategy, Curvature, ExpectationApproximation, LossHessianStrategy
from backpack.utils.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")

AT_ONCE = [name for name in QUANTITIES if not name.startswith(("HBP", "PCHMP, abs"))]  # these would overwrite the results of others


def exact_on(case: str) -> list[str]:
    """Name extensions that are exact on a row, and that can run at once."""
    return [name for name in AT_ONCE if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]


def run_all(problem: Problem, names: list[str]) -> dict[str, dict[str, Value]]:
    """Run extensions at once and collect their results."""
    run(problem, *(QUANTITIES[name].make() for name in names))
    return {name: collect(problem, QUANTITIES[name].field) for name in names}


# --- channels last ----------------------------------------------------------------------------------------------------------------------------

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
IMAGES = [name for name in CASES if CASES[name].build(1).x.dim() in FORMATS]
IMAGE_LAYERS = [name for name, row in LAYERS.items() if len(row.shape) + 1 in FORMATS]


@pytest.mark.parametrize("case", IMAGES)
def test_channels_last(case: str) -> None:
    problem = CASES[case].build(3)
    memory_format = FORMATS[problem.x.dim()]
    problem.x = problem.x.to(memory_format=memory_format)
    problem.model.to(memory_format=memory_format)
    for name, values in run_all(problem, exact_on(case)).items():
        QUANTITIES[name].check(oracle_of(case, 3), values)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", IMAGES)
def test_columns_that_leave_convolutions_with_channels_last(case: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where that is faster; also assembled from parts."""
    monkeypatch.setattr(convnd, "_faster_with_channels_last", lambda module: True)
    monkeypatch.setattr(convnd, "_PULLED", 1 if batch > 1 else convnd._PULLED)
    problem = CASES[case].build(batch)
    for name, values in run_all(problem, exact_on(case)).items():
        QUANTITIES[name].check(oracle_of(case, batch), values)


class Scaled(Module):
    """A layer behind a factor for each entry of its input: the factor's quantities tell what the layer hands back for each entry."""

    def __init__(self, name: str, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.layer, self.scale = LAYERS[name].make().eval(), Parameter(randn(1, *LAYERS[name].shape))
        self.more, self.memory_format = LAYERS[name].more(3), memory_format

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        assert x.is_contiguous(memory_format=self.memory_format)
        return self.layer(x, *self.more).flatten(1)


def layer_problem(name: str, memory_format: torch.memory_format) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        model = Scaled(name, memory_format).to(memory_format=memory_format)
        x = randn(3, *LAYERS[name].shape).to(memory_format=memory_format)
        with torch.no_grad():
            return Problem(model, x, [Term(MSELoss(), randn(model(x).shape))])


TOGETHER = (
    ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact", "DiagGGNMC"],
    ["DiagHessian", "BatchDiagHessian"],
    ["KFLR", "KFAC"],
)


@pytest.mark.parametrize("name", IMAGE_LAYERS)
def test_layers_channels_last(name: str) -> None:
    """What is exact for contiguous tensors, as other tests show, is the same for channels last."""
    memory_format = FORMATS[len(LAYERS[name].shape) + 1]
    try:
        layer_problem(name, memory_format)
    except RuntimeError as error:  # torch itself cannot run it
        assert "Unsupported memory format" in str(error)
        return
    for names in TOGETHER:
        plain, turned = (layer_problem(name, fmt) for fmt in (torch.contiguous_format, memory_format))
        try:
            expected = run_all(plain, names)
        except NotImplementedError:
            assert names is not TOGETHER[0]
            with pytest.raises(NotImplementedError):
                run_all(turned, names)
            continue
        for extension, values in run_all(turned, names).items():
            assert values.keys() == expected[extension].keys()
            for param, value in values.items():
                for actual, truth in zip(flat(value), flat(expected[extension][param]), strict=True):
                    close(actual, truth)


# --- views ------------------------------------------------------------------------------------------------------------------------------------


def stored_backwards(x: Tensor) -> Tensor:
    """Store a tensor with its axes in reversed order."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def stepped(x: Tensor) -> Tensor:
    """Store a tensor in every second entry along its first and its last axis."""
    gaps = x.repeat_interleave(2, 0).repeat_interleave(2, -1)
    return gaps[::2, ..., ::2] if x.dim() > 1 else gaps[::2]


def expanded(x: Tensor) -> Tensor:
    """Let all samples be the first one, stored once."""
    return x[:1].expand_as(x)


class Inner(Module):
    """A layer whose input is the output of another one, stored in some way, or the data."""

    def __init__(self, make: Callable[[], Module], shape: tuple[int, ...], stored: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.layer, self.stored = spread(make()), stored
        if stored is not None:
            self.front = Linear(shape[-1], shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.stored is None else self.stored(self.front(x))
        assert not x.is_contiguous()
        out = self.layer(x)
        return (out[0] if isinstance(out, tuple) else out).flatten(1)


REPRESENTATIVES: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "Linear": (partial(Linear, 3, 2), (2, 2, 3)),
    "Conv1d": (partial(nn.Conv1d, 2, 2, 2, padding=1), (2, 3)),
    "Conv2d": (partial(nn.Conv2d, 2, 2, 2, stride=2, padding=1, groups=2), (2, 3, 3)),
    "ConvTranspose2d": (partial(nn.ConvTranspose2d, 2, 2, 2), (2, 2, 2)),
    "MaxPool2d": (partial(nn.MaxPool2d, 2, 1), (2, 3, 3)),
    "AvgPool2d": (partial(nn.AvgPool2d, 2), (2, 2, 3)),
    "Tanh": (nn.Tanh, (2, 3)),
    "LayerNorm": (partial(nn.LayerNorm, (2, 3)), (2, 2, 3)),
    "GroupNorm": (partial(nn.GroupNorm, 2, 4), (4, 3)),
    "BatchNorm": (partial(nn.BatchNorm2d, 2), (2, 2, 3)),
    "LSTM": (partial(nn.LSTM, 3, 2, batch_first=True), (3, 3)),
    "Embedding": (partial(nn.Embedding, 5, 2), (2, 3)),
}
WITH_PARAMETERS = [name for name, (make, _) in REPRESENTATIVES.items() if list(make().parameters())]
WAYS = [(name, "data", how) for name in WITH_PARAMETERS for how in (stored_backwards, stepped, expanded)]
WAYS += [(name, "inner", how) for name in REPRESENTATIVES if name != "Embedding" for how in (stored_backwards, stepped)]


@pytest.mark.parametrize(("name", "where", "how"), WAYS, ids=[f"{name}-{where}-{how.__name__}" for name, where, how in WAYS])
def test_views(name: str, where: str, how: Callable[[Tensor], Tensor]) -> None:
    make, shape = REPRESENTATIVES[name]

    def build() -> Problem:
        with torch.random.fork_rng(), default_dtype(torch.float64):
            torch.manual_seed(0)
            x = randint(5, (3, *shape)) if name == "Embedding" else randn(3, *shape)
            model = Inner(make, shape, how if where == "inner" else None)
            x = how(x) if where == "data" else x
            problem = Problem(model, x, [])
            problem.terms.append(Term(MSELoss(), randn(problem.outputs()[0].shape)))
            return problem

    oracle = Oracle(build())
    for names in TOGETHER:
        problem = build()
        try:
            found = run_all(problem, names)
        except NotImplementedError:
            assert names is not TOGETHER[0]
            continue
        for extension, values in found.items():
            QUANTITIES[extension].check(oracle, values)


# --- mini-batches of size zero ----------------------------------------------------------------------------------------------------------------

FAMILIES = [
    *("logreg", "Tanh", "PReLU, 1 parameter", "Softmax", "dropout, training", "MSE, mean", "CE, mean", "BCE, mean", "extra axis", "residual"),
    *("samples second", "matrix on positions", "LayerNorm", "GroupNorm", "BatchNorm1d, evaluation", "net: Conv2d", "net: ConvTranspose2d"),
    *("MaxPool2d", "AvgPool2d", "Upsample, bilinear", "ZeroPad2d", "Embedding", "EmbeddingBag, max", "Bilinear, one tensor twice"),
    *("transformer: attention", "recurrent: LSTM", "curved: parameters divided by their norm"),
]


@pytest.mark.parametrize("case", FAMILIES)
def test_no_samples(case: str) -> None:
    """Shapes are those of a mini-batch of one, with no sample; sums of nothing are zero."""
    problem, single = CASES[case].build(0), CASES[case].build(1)
    names = exact_on(case)
    found, expected = run_all(problem, names), run_all(single, names)
    for extension, values in found.items():
        assert values.keys() == expected[extension].keys()
        for name, value in values.items():
            if not isinstance(value, Tensor | list):  # a product
                mat = randn(2, *problem.model.get_parameter(name).shape, dtype=torch.float64)
                assert torch.equal(value(mat).detach(), torch.zeros_like(mat))
                continue
            per_sample = extension.startswith("Batch") or extension.startswith("Sqrt")
            for actual, one in zip(flat(value), flat(expected[extension][name]), strict=True):
                if per_sample:
                    axis = int(extension.startswith("Sqrt"))
                    assert actual.shape == (*one.shape[:axis], 0, *one.shape[axis + 1 :])
                else:
                    assert torch.equal(actual, torch.zeros_like(one))


@pytest.mark.parametrize("average", [ExpectationApproximation.CHEN, ExpectationApproximation.BOTEV_MARTENS])
def test_no_samples_in_products_of_means(average: str) -> None:
    """The mean over no samples is zero, as for all other quantities."""
    problem = CASES["logreg"].build(0)
    run(problem, HBP(Curvature.GGN, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE, average))
    for parameter in problem.model.parameters():
        for factor in parameter.hbp:
            assert torch.equal(factor, torch.zeros_like(factor))


# --- sparse matrices --------------------------------------------------------------------------------------------------------------------------


class Sparse(Module):
    """What is made of data ``[N, 4]``, or of a graph with as many nodes as there are features, by products with matrices that may be sparse."""

    def __init__(self, how: Callable[[Sparse, Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.first, self.last = how, Linear(4, 3), Linear(3, 2)
        self.matrix, self.bias, self.weights = Parameter(randn(4, 3)), Parameter(randn(3)), Parameter(randn(6))
        self.register_buffer("edges", (randn(4, 4) > 0).double() * randn(4, 4))
        self.register_buffer("ends", randint(4, (2, 6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.how(self, x)))

    def nodes(self, x: Tensor) -> Tensor:
        """Choose a node for each sample."""
        return (x.to_dense() > 0).sum(1) % 4


PRODUCTS: dict[str, Callable[[Sparse, Tensor], Tensor]] = {
    "layer": lambda net, x: net.first(x),
    "matrix": lambda net, x: x @ net.matrix,
    "matrix and bias": lambda net, x: torch.addmm(net.bias, x, net.matrix),
    "turned matrix": lambda net, x: x @ net.first.weight.T,
    "function of a matrix": lambda net, x: x @ (net.bias * net.matrix),
    "graph": lambda net, x: (net.edges @ net.matrix)[net.nodes(x)],
    "graph, several times": lambda net, x: x.to_dense() @ (net.edges @ (net.edges @ net.matrix.sin())),
    "learned graph": lambda net, x: (torch.sparse_coo_tensor(net.ends, net.weights, (4, 4)).coalesce() @ net.matrix)[net.nodes(x)],
}


@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", PRODUCTS)
def test_sparse_matrices(name: str, layout: torch.layout, samples: int) -> None:
    with default_dtype(torch.float64), catch_warnings():
        simplefilter("ignore")  # torch's own about sparse matrices
        torch.manual_seed(samples)
        net = Sparse(PRODUCTS[name])
        problem = Problem(net, randn(samples, 4).relu(), [Term(MSELoss(), randn(samples, 2))])
        oracle = Oracle(problem)
        truth = oracle.grad_batch, oracle.diag_ggn_batch(oracle.hessian_exact), oracle.diag_h_batch, oracle.kronecker(oracle.hessian_exact)
        problem.x, net.edges = problem.x.to_sparse(layout=layout), net.edges.to_sparse(layout=layout)
        names = ["BatchGrad", "BatchDiagGGNExact", *["BatchDiagHessian"] * (name != "learned graph"), *["KFLR"] * (name == "layer")]
        found = run_all(problem, names)
    for quantity, expected in zip(["BatchGrad", "BatchDiagGGNExact", "BatchDiagHessian", "KFLR"], truth, strict=True):
        for parameter, value in found.get(quantity, {}).items():
            for one, other in zip(flat(value), flat(expected[parameter]), strict=True):
                close(one, other)
    assert found["BatchGrad"].keys() >= {"last.weight", "last.bias"} and len(found["BatchGrad"]) > 2


class Graphs(nn.Module):
    """Graphs in one sparse matrix, whose nodes exchange messages."""

    def __init__(self, ends: Tensor, values: Tensor, layout: torch.layout, added: bool) -> None:
        super().__init__()
        matrix = torch.sparse_coo_tensor(ends, values, (7, 7)).coalesce()
        self.matrix, self.added = matrix if layout == torch.sparse_coo else matrix.to_sparse_csr(), added
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor, owners: Tensor) -> Tensor:
        h = self.first(x)
        h = torch.sparse.mm(self.matrix, h.tanh()) if self.added else self.matrix @ h.tanh()
        return self.last(h.new_zeros(3, 4).index_add(0, owners, h.tanh()))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_graphs_in_one_sparse_matrix(layout: torch.layout, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers tell whose nodes are whose, also of nodes without neighbours; a value that is zero joins nothing, any other one does."""
    torch.manual_seed(0)
    ends, owners = torch.tensor([[0, 1, 2, 3, 4, 6, 0], [1, 0, 2, 4, 3, 6, 2]]), torch.tensor([0, 0, 1, 2, 2, 1, 1])
    values, x = torch.tensor([1.0, -1.0, 2.0, 0.5, 1.0, 3.0, 0.0], dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    model = extend(Graphs(ends, values, layout, added))
    expected = [torch.autograd.grad(row.square().sum(), tuple(model.parameters()), retain_graph=True) for row in model(x, owners)]
    with monkeypatch.context() as patched:
        patched.setattr(crossings, "_kept", lambda *_: pytest.fail("columns are sent through a node"))
        with backpack(BatchGrad()):
            model(x, owners).square().sum().backward()
    for parameter, *rows in zip(model.parameters(), *expected, strict=True):
        close(parameter.grad_batch, torch.stack(rows))
    model = extend(Graphs(ends, values + 1e-9, layout, added))
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match="mix|influence"):
        model(x, owners).square().sum().backward()
