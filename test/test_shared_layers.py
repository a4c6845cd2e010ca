"""Layers that are called once for all samples, with positions or other constants: quantities are those of a call with a copy for each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Oracle
from table import classify, default_dtype
from test_extensions import QUANTITIES, close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from backpack import backpack, clear, explain, extend, extensions, register, results
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.extensions import KFLR, SqrtGGNExact
from backpack.utils.errors import BackpackError, UnsupportedError
from backpack.utils.kroneckers import kfacs_to_mat

pytestmark = pytest.mark.filterwarnings("error", "ignore:Using backward:UserWarning")  # of torch, about create_graph

T, WORDS = 4, 7
CURVED = {"DiagHessian", "BatchDiagHessian"}
CHAINS = ("KFRA", "HBP", "HMP", "GGNMP", "PCHMP")  # of sequences of modules
NAMES = [name for name in QUANTITIES if name not in CURVED and not name.startswith(CHAINS)]


class Functions(nn.Module):
    """Layers that are called as functions, and a class with a forward pass of its own, as BART has for its positions."""

    class Positions(nn.Embedding):
        """Leaves room in front."""

        def forward(self, positions: Tensor) -> Tensor:
            return super().forward(positions + 1)

    def __init__(self, expanded: bool | None) -> None:
        super().__init__()
        self.expanded = expanded
        self.word, self.position, self.head = nn.Embedding(WORDS, 3), self.Positions(T + 1, 3), nn.Linear(3, 4)
        self.table, self.turned, self.matrix = (nn.Parameter(torch.randn(*shape)) for shape in ((T, 3), (3, 2), (3, 3)))
        self.bias, self.scale, self.shift = (nn.Parameter(torch.randn(3)) for _ in range(3))
        self.register_buffer("points", torch.randn(T, 2))

    def forward(self, x: Tensor) -> Tensor:
        positions, points = torch.arange(T), self.points
        if self.expanded is not None:
            positions, points = (c.expand(len(x) if self.expanded else 1, *c.shape) for c in (positions, points))
        hidden = F.layer_norm(F.linear(points, self.turned, self.bias).tanh() @ self.matrix, (3,), self.scale, self.shift)
        return self.head((self.word(x) + self.position(positions) + F.embedding(positions, self.table) + hidden).tanh().sum(1))


class Net(nn.Module):
    """Words, positions and functions of constants; one table is used at two places, one layer is given a single vector."""

    def __init__(self, expanded: bool | None) -> None:
        super().__init__()
        self.expanded = expanded
        self.word, self.position, self.twice, self.head = nn.Embedding(WORDS, 3), nn.Embedding(T + 1, 3), nn.Embedding(T, 3), nn.Linear(3, 4)
        self.grid, self.trunk = nn.Linear(2, 3), nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 3), nn.ELU(inplace=True), nn.Linear(3, 3, bias=False))
        self.vector = nn.Linear(2, 3)
        self.register_buffer("points", torch.randn(T, 2))

    def forward(self, x: Tensor) -> Tensor:
        positions, points, point = torch.arange(T), self.points, self.points[:1]
        if self.expanded is not None:  # with an axis of length one in front, or of as many samples
            positions, points, point = (c.expand(len(x) if self.expanded else 1, *c.shape) for c in (positions, points, point))
        elif len(x) % 2:
            point = point[0]  # without any axis but that of features
        hidden = self.word(x) + self.position(positions) + self.grid(points) + self.trunk(points) + self.vector(point) - 2 * self.twice(positions)
        return self.head((hidden.tanh() * self.twice(positions)).sum(1))


def build(expanded: bool | None, N: int, net: type[nn.Module] = Net) -> Any:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        problem = classify(net(expanded), torch.randint(WORDS, (N, T)))
    for module in (problem.model, *problem.losses):
        extend(module)
    return problem


def values(
    expanded: bool | None, N: int, extension: Any, create_graph: bool = False, net: type[nn.Module] = Net, **options: Any
) -> dict[str, list[Tensor]]:
    problem = build(expanded, N, net)
    torch.manual_seed(1)
    with backpack(extension, **options):
        problem.loss(problem.outputs()).backward(create_graph=create_graph)
    found = {name: tree_leaves(getattr(p, extension.savefield)) for name, p in problem.model.named_parameters()}
    found |= {f"gradient of {name}": [p.grad] for name, p in problem.model.named_parameters()}
    clear(problem.model)
    problem.model.zero_grad()  # a graph that a parameter holds, which is in it, is never given back
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("expanded", [None, False], ids=["no axis", "an axis of length one"])
@pytest.mark.parametrize("net", [Net, Functions])
def test_as_if_expanded(name: str, expanded: bool | None, net: type[nn.Module]) -> None:
    for N in (1, 2, 3, T):
        found, expected = (values(how, N, QUANTITIES[name].make(), net=net) for how in (expanded, True))
        for key, value in found.items():
            for part, wanted in zip(value, expected[key], strict=True):
                close(part, wanted)


@pytest.mark.parametrize("name", ["BatchGrad", "Variance", "DiagGGNExact", "KFLR", "SqrtGGNExact"])
@pytest.mark.parametrize("net", [Net, Functions])
def test_options(name: str, net: type[nn.Module]) -> None:
    """Bounded memory, graphs of results, and samples that are chosen."""
    cls = getattr(extensions, name)
    expected = values(True, 3, cls(), net=net)
    for found in (values(None, 3, cls(), net=net, memory=2000), values(None, 3, cls(), create_graph=True, net=net)):
        for key, value in found.items():
            for part, wanted in zip(value, expected[key], strict=True):
                close(part.detach(), wanted)
    if name not in ("Variance", "KFLR"):
        found, expected = (values(how, 3, cls(subsampling=[2, 0]), net=net) for how in (None, True))
        for key, value in found.items():
            for part, wanted in zip(value, expected[key], strict=True):
                close(part, wanted)


@pytest.mark.parametrize("name", ["BatchGrad", "BatchL2Grad", "Variance", "DiagGGNExact", "KFLR"])
@pytest.mark.parametrize("net", [Net, Functions])
def test_derivatives_of_results(name: str, net: type[nn.Module]) -> None:
    found = []
    for expanded in (None, True):
        problem, extension = build(expanded, 3, net), getattr(extensions, name)()
        with backpack(extension):
            problem.loss(problem.outputs()).backward(create_graph=True)
        parameters = list(problem.model.parameters())
        total = sum(part.pow(3).sum() for p in parameters for part in tree_leaves(getattr(p, extension.savefield)))
        clear(problem.model)
        problem.model.zero_grad()
        found.append(torch.autograd.grad(total, parameters))
    for derivative, expected in zip(*found, strict=True):
        close(derivative, expected)


@pytest.mark.parametrize("net", [Net, Functions])
def test_against_the_oracle(net: type[nn.Module]) -> None:
    problem, oracle = build(None, 3, net), Oracle(build(None, 3, net))
    with backpack(extensions.BatchGrad(), extensions.BatchDiagGGNExact(), extensions.KFLR()):
        problem.loss(problem.outputs()).backward()
    diagonals, factors = oracle.diag_ggn_batch(oracle.hessian_exact), oracle.kronecker(oracle.hessian_exact)
    for name, parameter in problem.model.named_parameters():
        close(parameter.grad_batch, oracle.grad_batch[name])
        close(parameter.diag_ggn_exact_batch, diagonals[name])
        for factor, expected in zip(parameter.kflr, factors[name], strict=True):
            close(factor, expected)


class Smooth(Net):
    """Of which second derivatives are known."""

    def __init__(self, expanded: bool | None) -> None:
        super().__init__(expanded)
        self.trunk[2] = nn.Tanh()


@pytest.mark.parametrize("options", [{}, {"memory": 2000}], ids=["at once", "in blocks"])
@pytest.mark.parametrize("N", [1, 3, T])
def test_with_the_diagonal_of_the_hessian(N: int, options: dict[str, Any]) -> None:
    """It needs second derivatives, and leaves other quantities as they are."""
    problem, oracle = build(None, N, Smooth), Oracle(build(None, N, Smooth))
    with backpack(extensions.BatchDiagHessian(), extensions.DiagGGNExact(), extensions.KFLR(), **options):
        problem.loss(problem.outputs()).backward()
    diagonals, factors = oracle.diag_ggn_batch(oracle.hessian_exact), oracle.kronecker(oracle.hessian_exact)
    for name, parameter in problem.model.named_parameters():
        close(parameter.diag_h_batch, oracle.diag_h_batch[name])
        close(parameter.diag_ggn_exact, diagonals[name].sum(0))
        for factor, expected in zip(parameter.kflr, factors[name], strict=True):
            close(factor, expected)


class Guided(nn.Module):
    """A condition that some samples drop: they get what a layer makes of a constant, or of a constant at each position."""

    def __init__(self, dropped: Tensor, positions: int | None, expanded: bool, learned: bool) -> None:
        super().__init__()
        shape = (1, 2) if positions is None else (positions, 2)
        self.layer, self.null, self.head = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)), nn.Linear(3, 4)
        self.constant = nn.Parameter(torch.randn(shape)) if learned else nn.Buffer(torch.randn(shape))
        self.dropped, self.expanded, self.positions = dropped, expanded, positions

    def forward(self, x: Tensor) -> Tensor:
        constant = self.constant[:, None] if self.positions else self.constant  # [T, N, D] or [N, D]
        if self.expanded:
            constant = constant.expand(*constant.shape[:-2], len(x), 2)
        hidden = torch.where(self.dropped[:, None], self.null(constant), self.layer(x))
        return self.head(hidden.mean(0) if self.positions else hidden)


@pytest.mark.parametrize("learned", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("positions", [None, 3])
@pytest.mark.parametrize("users", [0, 1, 2, 5])
def test_what_few_samples_use_is_there_for_all(users: int, positions: int | None, learned: bool) -> None:
    """A constant that is broadcast to all samples, of which a mask lets one through, is no row of that one."""
    found = []
    for expanded in (False, True):
        dropped = torch.zeros(5, dtype=torch.bool)
        dropped[[3, 0, 4, 1, 2][:users]] = True
        with torch.random.fork_rng(), default_dtype(torch.float64):
            torch.manual_seed(0)
            problem = classify(Guided(dropped, positions, expanded, learned), torch.randn(5, 2))
        for module in (problem.model, *problem.losses):
            extend(module)
        with backpack(*(getattr(extensions, name)() for name in ("BatchGrad", "BatchDiagGGNExact", "SqrtGGNExact"))):
            problem.loss(problem.outputs()).backward()
        with backpack(extensions.KFLR(exclude=[problem.model.constant] if learned else ())):
            problem.loss(problem.outputs()).backward()
        found.append([getattr(p, field) for p in problem.model.parameters() for field in ("grad_batch", "diag_ggn_exact_batch", "sqrt_ggn_exact")])
        found[-1] += [factor for p in problem.model.null.parameters() for factor in p.kflr]
    for value, expected in zip(*found, strict=True):
        close(value, expected)


class Memory(nn.Module):
    """Attends to what a layer makes of rows that all samples share, for all samples at once or for each of them."""

    def __init__(self, rows: int, loop: bool, learned: bool) -> None:
        super().__init__()
        self.memory, self.loop = nn.Parameter(torch.randn(rows, 2)) if learned else nn.Buffer(torch.randn(rows, 2)), loop
        self.query, self.key, self.head = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.attend(x[n : n + 1]) for n in range(len(x))]) if self.loop else self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        keys = self.key(self.memory)
        return self.head((self.query(x) @ keys.T).softmax(-1) @ keys)


@pytest.mark.parametrize("learned", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("chosen", [[1], [2, 0], [0, 1, 2]])
def test_factors_of_what_all_samples_share_in_a_loss_of_some(chosen: list[int], rows: int, loop: bool, learned: bool) -> None:
    """The layer was called for all samples, also if the loss sees a single one; of one row, factors are exact."""
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        model, x, y = Memory(rows, loop, learned), torch.randn(3, 2), torch.tensor([0, 3, 1])
        logits = model(x)[chosen]
        roots = [p.sqrt().diag() - p.outer(p.sqrt()) for p in logits.detach().softmax(-1)]
        columns = [(logit, column) for logit, root in zip(logits, roots, strict=True) for column in root.T]
        diagonal = sum(torch.autograd.grad(logit, model.key.weight, column, retain_graph=True)[0] ** 2 for logit, column in columns)
        extend(model)
        lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(extensions.KFLR(exclude=[model.memory] if learned else ())):
        lossfunc(model(x)[chosen], y[chosen]).backward()
    outputs, inputs = model.key.weight.kflr
    close(inputs, model.memory.T @ model.memory)
    if rows == 1:
        close(torch.outer(outputs.diagonal(), inputs.diagonal()), diagonal)


class Latents(nn.Module):
    """Attends from rows of a table, which are copied for each sample, after a layer, to positions."""

    def __init__(self, copied: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.table, self.copied = nn.Parameter(torch.randn(2, 4)), copied
        self.norm, self.attention, self.head = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.copied(self.table, len(x))
        return self.head((queries + self.attention(self.norm(queries), x, x)[0]).mean(1))


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize(
    "copied", [lambda t, n: t.expand(n, -1, -1), lambda t, n: t[None].repeat(n, 1, 1), lambda t, n: F.embedding(torch.arange(2), t).expand(n, -1, -1)]
)
def test_factors_of_latents(copied: Callable[[Tensor, int], Tensor], samples: int) -> None:
    """They are those of rows that each sample looks up."""
    found = []
    for function in (copied, lambda t, n: F.embedding(torch.arange(2).repeat(n, 1), t)):
        with torch.random.fork_rng(), default_dtype(torch.float64):
            torch.manual_seed(0)
            model, x, y = Latents(function), torch.randn(samples, 3, 4), torch.arange(samples) % 3
            with backpack(KFLR()):
                F.cross_entropy(extend(model)(x), y).backward()
        found.append(tree_leaves([p.kflr for p in model.parameters()]))
    for factor, expected in zip(*found, strict=True):
        close(factor, expected)


class Kept(nn.Module):
    """Keeps what one of its parts makes for all samples: of a parameter, of a constant, of numbers."""

    def __init__(self, made: Callable[[Kept], Tensor]) -> None:
        super().__init__()
        self.made, self.layer, self.function, self.table = made, nn.Linear(3, 4), nn.Linear(3, 4), nn.Embedding(3, 4)
        self.seed, self.grid = nn.Parameter(torch.randn(3, 3)), nn.Buffer(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.made(self)
        return x @ self.kept.T


KEPT: dict[str, Callable[[Kept], Tensor]] = {
    "layer of a parameter": lambda net: net.layer(net.seed),
    "layer of a buffer": lambda net: net.layer(net.grid),
    "layer of a table": lambda net: net.layer(net.table(torch.arange(3))[:, :3]),
    "table": lambda net: net.table(torch.arange(3)),
    "function of a parameter": lambda net: F.linear(net.seed, net.function.weight, net.function.bias),
    "function of a table": lambda net: net.table(torch.arange(3)).tanh(),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("N", [2, 3])
def test_penalty_on_what_is_there_for_all_samples(name: str, N: int) -> None:
    """It belongs to none of them."""
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        model, x, y = Kept(KEPT[name]), torch.randn(N, 4), torch.randn(N, 3)
    used = [p for p in model.parameters() if torch.autograd.grad(model(x).sum(), p, allow_unused=True)[0] is not None]
    alone = [torch.autograd.grad((model(x[n : n + 1]) - y[n : n + 1]).square().sum(), used) for n in range(N)]
    extend(model)
    with pytest.raises(BackpackError, match="used outside of everything that has samples"), backpack(extensions.BatchGrad()):
        ((model(x) - y).square().sum() + model.kept.square().sum()).backward()
    assert results(model) == {}
    with backpack(extensions.BatchGrad()):
        (model(x) - y).square().sum().backward()
    for i, parameter in enumerate(used):
        close(parameter.grad_batch, torch.stack([gradients[i] for gradients in alone]))


def test_rules_of_users_get_no_further_axis() -> None:
    """The graph takes the place of one that knows of two axes only."""

    class OfTwoAxes(LinearDerivatives):
        def rows(self, module: nn.Module, mat: Tensor) -> Tensor:
            assert mat.dim() == 3
            return super().rows(module, mat)

    class Scaled(nn.Linear):
        """A layer of a user."""

    register(Scaled, OfTwoAxes())
    problem, expected = build(None, 3), build(None, 3)
    problem.model.grid.__class__ = Scaled
    for made in (problem, expected):
        with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            made.loss(made.outputs()).backward()
    for parameter, other in zip(problem.model.parameters(), expected.model.parameters(), strict=True):
        close(parameter.grad_batch, other.grad_batch)
        close(parameter.diag_ggn_exact, other.diag_ggn_exact)


def test_explained() -> None:
    problem = build(None, 3)
    table = explain(problem.model, problem.losses[0], problem.x, problem.terms[0].target, [extensions.KFAC(), extensions.BatchGrad()])
    assert "refused" not in str(table)


def test_parameters_that_were_replaced_are_refused() -> None:
    problem = build(None, 3)
    loss = problem.loss(problem.outputs())
    problem.model.trunk[3].weight.data = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(BackpackError, match="Other data were put into a parameter of trunk.3"), backpack(extensions.KFLR()):
        loss.backward()


MAKES_A_WEIGHT = "of shape .*(makes the weight of another layer|without a rule)"


class Updated(nn.Module):
    """A layer whose weight is frozen, but for what a product adds to it."""

    def __init__(self, made: Callable[[Tensor, Tensor], Tensor], *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.made, self.base = made, nn.Parameter(torch.randn(5, 4), requires_grad=False)
        self.left, self.right, self.out = *(nn.Parameter(torch.randn(shape)) for shape in shapes), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.base + self.made(self.left, self.right)).tanh())


@pytest.mark.parametrize("made", [torch.matmul, lambda left, right: (right.T @ left.T).T])
def test_rows_of_a_weight_are_no_positions(made: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The factors of an update of low rank had little to do with its block."""
    model = extend(Updated(made, (5, 2), (2, 4)))
    for kept, other in (("left", "right"), ("right", "left")):
        with backpack(KFLR(exclude=[other])), pytest.raises(UnsupportedError, match=f"{kept} {MAKES_A_WEIGHT}"):
            F.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 2])).backward()
    with backpack(KFLR(exclude=["left", "right"])):
        F.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 2])).backward()
    assert len(model.out.weight.kflr) == 2


class Update(nn.Module):
    """What is added to a weight that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("given", [lambda base: base, lambda base: base * 1, lambda base: base.detach(), torch.zeros_like])
def test_rows_of_a_weight_that_a_module_makes(given: Callable[[Tensor], Tensor], samples: int) -> None:
    """Whatever it was given, and of a single sample, too."""
    update = Update()
    model = extend(Updated(lambda left, right: left @ right, (5, 2), (2, 4)))
    model.update = extend(update)
    model.forward = lambda x: model.out(F.linear(x, model.update(given(model.base))).tanh())
    with backpack(KFLR(exclude=[update.left])), pytest.raises(UnsupportedError, match=f"right {MAKES_A_WEIGHT}"):
        F.cross_entropy(model(torch.randn(samples, 4)), torch.arange(samples)).backward()
    assert results(model) == {}


def test_a_weight_that_is_made_in_one_row_has_factors() -> None:
    torch.manual_seed(0)
    model = extend(Updated(lambda left, right: (left.detach() @ right).view(5, 4), (1, 2), (2, 20)).double())
    with backpack(KFLR(), SqrtGGNExact()):
        F.cross_entropy(model(torch.randn(1, 4, dtype=torch.float64)), torch.tensor([1])).backward()
    root = model.right.sqrt_ggn_exact.flatten(0, 1).flatten(1)
    close(kfacs_to_mat(model.right.kflr), root.T @ root)
