"""Random models, drawn by hypothesis from a small grammar: every quantity is that of the oracle, or it is refused; never wrong.

A model is a tuple of steps; a step is a name followed by its settings, and branches contain steps. Sizes, data and parameters are drawn, too. A
failure prints the steps: ``Net(steps, heads)`` builds the model again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from cases_nets import ACTIVATIONS
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from oracle import Oracle, Problem, Term
from table import default_dtype
from test_extensions import QUANTITIES, all_close, collect, run
from torch import Tensor, nn, randn
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Linear, Module, MSELoss, Parameter
from torch.nn import functional as F

from backpack.utils.errors import OverwrittenError

pytestmark = pytest.mark.filterwarnings("error")

Step = tuple[Any, ...]
Steps = tuple[Step, ...]
MODULES = [name for name in ACTIVATIONS if name not in {"PReLU, C parameters", "Softmax", "LogSoftmax", "Hardsigmoid, in place"}]
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky relu": partial(F.leaky_relu, negative_slope=0.1),
    "abs": torch.abs,
    "clamp": partial(torch.clamp, min=-0.5, max=0.7),
    "scale": lambda x: 2.5 * x,
    "shift": lambda x: 1 - x,
    "clone": torch.clone,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
    "square": torch.square,
    "sine": torch.sin,
    "power": lambda x: x**3 / 3,
}
STRAIGHT = {"relu", "leaky relu", "abs", "clamp", "scale", "shift", "clone"}
"""Functions that are linear almost everywhere."""
REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "maximum": torch.amax,
    "first": lambda x, axis: x.select(axis, 0),
    "last of pieces": lambda x, axis: x.unbind(axis)[-1],
}


# --- models -----------------------------------------------------------------------------------------------------------------------------------


class Net(Module):
    """Interprets steps."""

    def __init__(self, steps: Steps, heads: tuple[Step, ...]) -> None:
        super().__init__()
        self.linears, self.others, self.bare = nn.ModuleList(), nn.ModuleList(), nn.ParameterList()
        self.steps = self._chain(steps)
        self.heads = [self._make(head) for head in heads]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.steps(x.clone())  # operations in place must not reach the data
        return tuple(head(h) for head in self.heads)

    def _chain(self, steps: Steps) -> Callable[[Tensor], Tensor]:
        functions = [self._make(step) for step in steps]

        def apply(x: Tensor) -> Tensor:
            for function in functions:
                x = function(x)
            return x

        return apply

    def _linear(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        self.linears.append(linear)
        return linear

    def _other(self, module: Module) -> Callable[[Tensor], Tensor]:
        self.others.append(module)
        return partial(self._call, len(self.others) - 1)

    def _call(self, number: int, x: Tensor) -> Tensor:
        return self.others[number](x)  # looked up at each call: the oracle exchanges modules

    def _make(self, step: Step) -> Callable[[Tensor], Tensor]:
        match step:
            case ("linear", size, out, bias, frozen):
                return self._linear(Linear(size, out, bias).requires_grad_(not frozen))
            case ("used again", number):
                return self.linears[number]
            case ("tied", number):
                linear = Linear(*reversed(self.linears[number].weight.shape))
                linear.weight = self.linears[number].weight
                return self._linear(linear)
            case ("transposed", number):
                return lambda x: F.linear(x, self.linears[number].weight.t())
            case ("activation", name):
                return self._other(ACTIVATIONS[name]().eval())
            case ("function", name):
                return FUNCTIONS[name]
            case ("softmax", axis):
                return lambda x: x.softmax(axis)
            case ("dropout", training):
                return self._other(nn.Dropout(0.4).train(training))
            case ("layer norm", size):
                return self._other(nn.LayerNorm(size, eps=0.1))  # of one or two entries, too: not too close to singular
            case ("flatten",):
                return self._other(nn.Flatten())
            case ("unflatten", axis, sizes):
                return self._other(nn.Unflatten(axis, sizes))
            case ("reshape", axis, sizes):
                return lambda x: x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
            case ("new axis", axis, size):
                return lambda x: x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
            case ("repeat", axis):
                return lambda x: torch.cat([x, x], axis)
            case ("permute", axes):
                return lambda x: x.permute(axes)
            case ("reduce", name, axis):
                return lambda x: REDUCTIONS[name](x, axis)
            case ("slice", axis, start, stop):
                return lambda x: x.narrow(axis, start, stop - start)
            case ("flip", axis):
                return lambda x: x.flip(axis)
            case ("folded", size, out):
                layer = self._linear(Linear(size, out))
                return lambda x: torch.relu(layer(x.reshape(-1, size))).view(*x.shape[:-1], out)
            case ("overwritten slice", size):
                return partial(_overwrite, self._linear(Linear(size, size)))
            case ("halves", axis):
                return lambda x: _product_of_halves(x, axis)
            case ("attention",):
                return lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x
            case ("bare", how, shape):
                return partial(self._bare, len(self.bare.append(Parameter(randn(shape) + 0.5))) - 1, how)
            case ("matrix", size, out):
                return partial(self._bare, len(self.bare.append(Parameter(randn(size, out)))) - 1, "matrix")
            case ("residual" | "product" | "choice" | "detached" as how, steps):
                branch = self._chain(steps)
                return lambda x: _unite(how, x, branch(x))
            case ("residual in place", size, steps):
                layer, branch = self._linear(Linear(size, size)), self._chain(steps)
                return lambda x: _add_in_place(layer(x), branch)
            case ("cat", axis, steps):
                branch = self._chain(steps)
                return lambda x: torch.cat([x, branch(x)], axis)
            case ("fit", old_axis, size, new_axis, shape):
                if old_axis == new_axis == 0:
                    flat, layer, end = self._other(nn.Flatten()), self._linear(Linear(size, prod(shape))), self._other(nn.Unflatten(1, shape))
                    return lambda x: end(layer(flat(x)))
                layer = self._linear(Linear(size, prod(shape)))
                return lambda x: layer(x.movedim(old_axis, 0).flatten(1)).unflatten(1, shape).movedim(0, new_axis)
        raise AssertionError(step)

    def _bare(self, number: int, how: str, x: Tensor) -> Tensor:
        parameter = self.bare[number]
        match how:
            case "add":
                return x + parameter
            case "add in place":
                return x.clone().add_(parameter)
            case "add expanded":
                return x + parameter.expand(x.shape)
            case "multiply":
                return parameter * x
            case "divide":
                return x / (parameter.square() + 1)
            case "shrink":
                return x * torch.sigmoid(parameter)
        return x @ parameter


def _overwrite(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    h = layer(x)
    h[..., :1] *= 2.5
    return F.relu_(h)


def _product_of_halves(x: Tensor, axis: int) -> Tensor:
    a, b = x.chunk(2, axis)
    return torch.cat([a * torch.sigmoid(b), b], axis)


def _add_in_place(h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    h += branch(torch.tanh(h))
    return h


def _unite(how: str, x: Tensor, y: Tensor) -> Tensor:
    match how:
        case "residual":
            return x + y
        case "product":
            return x * y
        case "choice":
            return torch.where(x > 0, x, y)
    return x + y.detach()


def kinds(steps: Steps) -> Iterator[str]:
    """Name what occurs in a model, branches included."""
    for step in steps:
        yield step[1] if step[0] == "function" else f"{step[0]}, {step[1]}" if step[0] in {"activation", "bare"} else step[0]
        if step[0] in {"residual", "product", "choice", "detached", "residual in place", "cat"}:
            yield from kinds(step[-1])


# --- drawing them -----------------------------------------------------------------------------------------------------------------------------


SEQUENCE = -1
"""Depth of a model that is a sequence of modules."""


@dataclass
class At:
    """What is known while a model is drawn: shape of the tensor, where its samples lie, sizes of the layers so far.

    The shape has 1 instead of the number of samples.
    """

    shape: tuple[int, ...]
    axis: int
    linears: list[tuple[int, int]]

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.shape)) if i != self.axis]

    @property
    def size(self) -> int:
        return self.shape[-1]


def options(at: At, depth: int) -> list[str]:
    """Name the steps that are possible; of a sequence only modules."""
    if depth == SEQUENCE:
        return ["linear", "activation"] + ["flatten", "unflatten"] * (len(at.shape) > 2)
    names = ["activation", "activation", "function", "function", "dropout", "permute", "flip", "slice", "new axis", "bare", "bare", "softmax"]
    if at.axis != len(at.shape) - 1:
        names += ["linear", "linear", "linear", "matrix", "layer norm", "reshape", "overwritten slice", "folded", "unflatten"]
        names += ["used again"] * 2 * any(i == at.size for i, _ in at.linears)
        names += ["tied"] * any(i == at.size for i, _ in at.linears)
        names += ["transposed"] * any(o == at.size for _, o in at.linears)
    if prod(at.shape) <= 8:
        names += ["repeat"] + ["cat"] * (depth > 0)
    if len(at.shape) > 2:
        names += ["reduce", "reduce"] + ["flatten"] * (at.axis == 0) + ["attention"] * (at.axis == 0 and len(at.shape) == 3)
    if any(at.shape[i] % 2 == 0 for i in at.others):
        names += ["halves"]
    if depth:
        names += ["residual", "residual", "product", "choice", "detached"] + ["residual in place"] * (at.axis != len(at.shape) - 1)
    return sorted(names)


def draw_step(draw: st.DrawFn, at: At, depth: int) -> Step:
    """Draw one step, and note what it does to the tensor."""
    name = draw(st.sampled_from(options(at, depth)))
    axis = draw(st.sampled_from(at.others))
    shape = list(at.shape)
    sizes = st.integers(1, 3)
    match name:
        case "linear":
            step = (name, at.size, draw(sizes), draw(st.booleans()), draw(st.sampled_from([False, False, False, True])))
            at.linears.append(step[1:3])
            shape[-1] = step[2]
        case "used again" | "tied":
            number = draw(st.sampled_from([k for k, (i, _) in enumerate(at.linears) if i == at.size]))
            step = (name, number)
            shape[-1] = at.linears[number][1]
            if name == "tied":
                at.linears.append(at.linears[number])
        case "transposed":
            step = (name, draw(st.sampled_from([k for k, (_, o) in enumerate(at.linears) if o == at.size])))
            shape[-1] = at.linears[step[1]][0]
        case "activation":
            step = (name, draw(st.sampled_from(MODULES)))
            if "Softmax" in step[1] and at.axis == len(shape) - 1:
                step = ("softmax", axis)
        case "function":
            step = (name, draw(st.sampled_from(sorted(FUNCTIONS))))
        case "softmax" | "flip":
            step = (name, axis)
        case "dropout":
            step = (name, draw(st.booleans()))
        case "layer norm":
            step = (name, at.size)
        case "flatten" | "attention":
            step = (name,)
            shape = [1, prod(shape)] if name == "flatten" else shape
        case "unflatten" | "reshape":
            factor = draw(st.sampled_from([f for f in (1, 2, 3) if at.shape[axis] % f == 0]))
            step = (name, axis, (factor, at.shape[axis] // factor))
            shape[axis : axis + 1] = step[2]
        case "new axis":
            where = draw(st.integers(0, len(shape)))
            step = (name, where, draw(st.integers(1, 2)))
            shape.insert(where, step[2])
        case "repeat":
            step = (name, axis)
            shape[axis] *= 2
        case "permute":
            step = (name, tuple(draw(st.permutations(range(len(shape))))))
            shape = [at.shape[i] for i in step[1]]
        case "reduce":
            step = (name, draw(st.sampled_from(sorted(REDUCTIONS))), axis)
            del shape[axis]
        case "slice":
            stop = draw(st.integers(1, at.shape[axis]))
            step = (name, axis, draw(st.integers(0, stop - 1)), stop)
            shape[axis] = stop - step[2]
        case "folded":
            step = (name, at.size, draw(sizes))
            at.linears.append(step[1:])
            shape[-1] = step[2]
        case "overwritten slice":
            step = (name, at.size)
            at.linears.append((at.size, at.size))
        case "halves":
            step = (name, draw(st.sampled_from([i for i in at.others if at.shape[i] % 2 == 0])))
        case "bare":
            kept = [size if draw(st.booleans()) else 1 for size in at.shape]
            start = draw(st.integers(0, max(i for i, size in enumerate([2, *kept]) if size > 1)))  # leading ones may be missing
            how = draw(st.sampled_from(["add", "add", "add in place", "add expanded", "multiply", "multiply", "divide", "shrink"]))
            step = (name, how, tuple(kept[start:]))
        case "matrix":
            step = (name, at.size, draw(sizes))
            shape[-1] = step[2]
        case "residual in place":
            at.linears.append((at.size, at.size))
            step = (name, at.size, draw_branch(draw, at, depth))
        case "cat":
            step = (name, axis, draw_branch(draw, at, depth))
            shape[axis] *= 2
        case _:
            step = (name, draw_branch(draw, at, depth))
    at.axis = new_axis(step, at)
    at.shape = tuple(shape)
    return step


def new_axis(step: Step, at: At) -> int:
    """Say where the samples lie after a step, if they lay at ``at.axis`` before."""
    match step:
        case ("new axis", where, _):
            return at.axis + (where <= at.axis)
        case ("permute", axes):
            return axes.index(at.axis)
        case ("reduce", _, axis):
            return at.axis - (axis < at.axis)
        case ("unflatten" | "reshape", axis, sizes):
            return at.axis + (len(sizes) - 1) * (axis < at.axis)
    return at.axis


def draw_branch(draw: st.DrawFn, at: At, depth: int) -> Steps:
    """Draw steps that end with the shape they began with."""
    inner = At(at.shape, at.axis, at.linears)
    steps = draw_steps(draw, inner, 2, depth - 1)
    if inner.shape != at.shape or inner.axis != at.axis:
        steps += (fit(inner, at.axis, tuple(at.shape[i] for i in at.others)),)
    return steps


def draw_steps(draw: st.DrawFn, at: At, most: int, depth: int) -> Steps:
    """Draw some steps."""
    return tuple(draw_step(draw, at, depth) for _ in range(draw(st.integers(0, most))))


def fit(at: At, axis: int, shape: tuple[int, ...]) -> Step:
    """Bring a tensor into a shape, with samples on an axis."""
    at.linears.append((prod(at.shape), prod(shape)))
    return ("fit", at.axis, prod(at.shape), axis, shape)


@st.composite
def losses(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draw settings of a loss on outputs of a shape."""
    kind = draw(st.sampled_from(["MSE", "CE", "BCE"]))
    reduction = draw(st.sampled_from(["mean", "mean", "sum", "none"]))
    flags = tuple(draw(st.booleans()) for _ in range(4))
    return (kind, shape, reduction, flags, draw(st.sampled_from([1.0, 1.0, 0.3, 2.0])))


def make_term(head: int, N: int, kind: str, shape: tuple[int, ...], reduction: str, flags: tuple[bool, ...], scale: float) -> Term:
    """Build a loss with its target; the flags switch its options on."""
    weighted, smoothed, soft, ignored = flags
    if kind == "MSE":
        module, target, weights = MSELoss(reduction=reduction), randn(N, *shape), (N, *shape)
    elif kind == "BCE":
        weight = torch.rand(shape[-1]) + 0.1 if weighted else None
        pos_weight = torch.rand(shape[-1]) + 0.1 if smoothed else None
        module, target, weights = BCEWithLogitsLoss(weight, pos_weight=pos_weight, reduction=reduction), torch.rand(N, *shape), (N, *shape)
    else:
        weight = torch.rand(shape[0]) + 0.1 if weighted else None
        weights = (N, *shape[1:])
        module = CrossEntropyLoss(weight, label_smoothing=0.2 * smoothed, reduction=reduction)
        target = randn(N, *shape).softmax(1) if soft else torch.randint(shape[0], weights)
        if ignored and not soft and target.numel() > 1:
            target.view(-1)[-1] = -100
    return Term(module, target, head, torch.rand(weights) + 0.2 if reduction == "none" else scale)


Drawn = tuple[int, int, tuple[int, ...], Steps, tuple[Step, ...], tuple[tuple[Any, ...], ...]]


@st.composite
def nets(draw: st.DrawFn, batches: tuple[int, ...] = (1, 2, 3)) -> Drawn:
    """Draw everything about a problem: seed, batch size, shape of the input, steps, heads, losses."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    at = At((1, *shape), 0, [])
    depth = draw(st.sampled_from([2, 2, 2, SEQUENCE]))
    steps = draw_steps(draw, at, 6, depth)
    count = 1 if depth == SEQUENCE else draw(st.sampled_from([1, 1, 1, 2]))
    out = [tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))) for _ in range(count)]
    heads = tuple(fit(at, 0, one) for one in out)
    return draw(st.integers(0, 99)), draw(st.sampled_from(batches)), shape, steps, heads, tuple(draw(losses(one)) for one in out)


def build(drawn: Drawn) -> Problem:
    """Build what was drawn, the same at every call."""
    seed, N, shape, steps, heads, terms = drawn
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(seed)
        x = randn(N, *shape)
        return Problem(Net(steps, heads), x, [make_term(head, N, *term) for head, term in enumerate(terms)])


# --- checks -----------------------------------------------------------------------------------------------------------------------------------

FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
GROUPS = {
    "first order and GGN": (*FIRST_ORDER, "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact"),
    "diagonal of the Hessian": ("DiagHessian", "BatchDiagHessian"),
    "Kronecker factors": ("KFLR",),
    "products": ("HMP", "GGNMP"),
}
MODULE_STEPS = {"linear", "flatten", "unflatten", "fit", "dropout"}
STRAIGHT_STEPS = {"slice", "flip", "repeat", "reduce", "reshape", "residual", "cat", "detached"} | STRAIGHT
"""Steps that do not bend, and after which the samples do not lie on the last axis."""


def must_be_exact(group: str, names: set[str]) -> bool:
    """Say whether a group of extensions has no excuse to refuse a model with these kinds of steps."""
    if any("in place" in name for name in names) or names & {"overwritten slice"}:
        return False  # a recorded value may be overwritten
    if group == "first order and GGN":
        return True
    simple = MODULE_STEPS | {name for name in names if name.startswith("activation") and "Softmax" not in name}
    if group == "Kronecker factors":
        return not names & {"matrix", "transposed"} and not any(name.startswith("bare") or "layer norm" in name for name in names)
    if group == "diagonal of the Hessian":
        return names <= simple | STRAIGHT_STEPS
    return names <= simple - {"dropout"}


def check(drawn: Drawn, tally: Counter[str]) -> None:
    """Compare all quantities, group by group, and count what is exact and what is refused."""
    try:
        plain = build(drawn)
        plain.loss(plain.outputs()).backward()
    except RuntimeError as error:
        assert any(text in str(error) for text in ("inplace", "in-place", "written-to", "does not require grad")), error
        return
    if not any(p.requires_grad for p in plain.model.parameters()):
        return
    steps, terms = drawn[3], drawn[5]
    names, oracle = set(kinds(steps)), Oracle(build(drawn))
    for group, chosen in GROUPS.items():
        if group == "Kronecker factors" and "detached" in names:
            continue  # the oracle would count the inputs of layers whose output is detached
        problem = build(drawn)
        try:
            run(problem, *(QUANTITIES[name].make() for name in chosen))
            for name in chosen:
                compare(name, oracle, collect(problem, QUANTITIES[name].field))
        except (NotImplementedError, OverwrittenError) as refusal:
            event(f"{group}: refused", str(refusal)[:100])
            special = len(terms) > 1 or terms[0][2] == "none"
            assert not must_be_exact(group, names) or (group == "products" and special), f"refused: {refusal}"
            if isinstance(refusal, NotImplementedError) or group != "products":  # products may find out when they are called
                assert not any(collect(problem, QUANTITIES[name].field) for name in chosen), "a refused pass left results behind"
            tally[f"{group}: refused"] += 1
        else:
            event(f"{group}: exact")
            tally[f"{group}: exact"] += 1


def compare(name: str, oracle: Oracle, values: dict[str, Any]) -> None:
    """Compare a quantity with the oracle."""
    if name == "Variance":  # a difference whose rounding is relative to what is subtracted
        values = {p: value + (oracle.grad[p] / oracle.N).square() for p, value in values.items()}
        all_close(values, {p: value / oracle.N for p, value in oracle.sum_grad_squared.items()})
    else:
        QUANTITIES[name].check(oracle, values)


def check_many(examples: int) -> Counter[str]:
    """Check many models, and return what was exact and what refused."""
    tally: Counter[str] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(nets())
    def check_one(drawn: Drawn) -> None:
        check(drawn, tally)

    check_one()
    return tally


LEAST = {"first order and GGN": 0.95, "diagonal of the Hessian": 0.5, "Kronecker factors": 0.8, "products": 0.3}
"""Part of the models on which a group has to be exact."""


def most_are_exact(tally: Counter[str]) -> None:
    print(dict(tally))
    for group, part in LEAST.items():
        exact, refused = tally[f"{group}: exact"], tally[f"{group}: refused"]
        assert exact >= part * (exact + refused), f"{group}: {exact} exact, {refused} refused"


def test_random_models() -> None:
    most_are_exact(check_many(200))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_random_models() -> None:
    most_are_exact(check_many(4000))


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(nets(batches=(0,)))
def test_random_models_without_samples(drawn: Drawn) -> None:
    """First order with a mini-batch of size zero: nothing per sample, and sums of nothing, or a refusal."""
    problem = build(drawn)
    try:
        plain = build(drawn)
        plain.loss(plain.outputs()).backward()
    except (RuntimeError, IndexError):
        return
    if not any(p.requires_grad for p in problem.model.parameters()):
        return
    try:
        run(problem, *(QUANTITIES[name].make() for name in FIRST_ORDER))
    except NotImplementedError:
        return
    for name, expected in plain.model.named_parameters():
        param = problem.model.get_parameter(name)
        if expected.grad is None:
            continue
        assert param.grad_batch.shape == (0, *param.shape)
        assert param.batch_l2.shape == (0,)
        assert torch.equal(param.sum_grad_squared, torch.zeros_like(param))
        assert torch.equal(param.variance, torch.zeros_like(param))


# --- failures that were found, and how they depend on what ran before -------------------------------------------------------------------------


def matrix(size: int) -> Problem:
    return build((0, 2, (size,), (("matrix", size, 3),), (("fit", 0, 3, 0, (2,)),), (("MSE", (2,), "mean", (False,) * 4, 1.0),)))


def norm(size: int) -> Problem:
    return build((0, 2, (size,), (("layer norm", size),), (("fit", 0, size, 0, (2,)),), (("MSE", (2,), "mean", (False,) * 4, 1.0),)))


FIRST: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # sizes differ, so that what one test has left behind cannot serve another
    "one-hot": (4, lambda x: torch.eye(*x.shape, dtype=x.dtype)),
    "one sample of two": (5, lambda x: x * torch.tensor([[0.0], [1.0]], dtype=x.dtype)),
    "a sample without spread": (6, lambda x: torch.where(torch.tensor([[True], [False]]), torch.ones_like(x), x)),
}


@pytest.mark.parametrize("make", [matrix, norm])
@pytest.mark.parametrize("first", FIRST)
def test_data_with_zeros_before(make: Callable[[int], Problem], first: str) -> None:
    """Where the samples of one mini-batch do not mix because of zeros in the data, those of the next one do."""
    size, change = FIRST[first]
    before, problem, oracle = make(size), make(size), Oracle(make(size))
    before.x = change(before.x)
    for one in (before, problem):
        run(one, QUANTITIES["BatchGrad"].make(), QUANTITIES["BatchDiagGGNExact"].make())
    for name in ("BatchGrad", "BatchDiagGGNExact"):
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


@pytest.mark.parametrize("make", [matrix, norm])
@pytest.mark.parametrize(("size", "scale"), [(7, 1e-2), (8, 1e-5), (9, 1e-11)])
def test_samples_of_different_size(make: Callable[[int], Problem], size: int, scale: float) -> None:
    """A sample that is small beside another one is a sample all the same."""
    problem, plain = make(size), make(size)
    problem.x, plain.x = (one.x * torch.tensor([[1.0], [scale]], dtype=torch.float64) for one in (problem, plain))
    run(problem, QUANTITIES["BatchGrad"].make())
    for name, expected in Oracle(plain).grad_batch.items():
        for value, reference in zip(collect(problem, "grad_batch")[name], expected, strict=True):
            all_close({name: value}, {name: reference})
