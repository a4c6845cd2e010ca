"""Accumulation: passes over the parts of a mini-batch make up the quantities of the whole, however it is split."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy, deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import CASES
from oracle import Oracle, Problem, Term
from test_extensions import MC, QUANTITIES, Expect, close, collect
from torch import Tensor, einsum, nn
from torch.nn import functional as F

from backpack import backpack, clear, extend, extensions, leave_out, results, unextend, unscale
from backpack.core.owners import owners
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")

N = 5
SPLITS = [(5,), (3, 2), (1, 3, 1), (1, 1, 1, 1, 1), (2, 0, 3)]
SUMMED = [name for name in QUANTITIES if not name.startswith(("KFRA", "HBP, ", "HMP", "GGNMP", "PCHMP")) and not name.endswith(("MC", "KFAC"))]
SUMMED.append("HBP, square root")
REFUSED = ["KFRA", "HBP, GGN", "HBP, Hessian", "HBP, PCH clip", "HMP", "GGNMP", "PCHMP, abs"]
MODELS = [
    "logreg",
    "frozen first layer",
    "extra axis",
    "Tanh",
    "Sigmoid",
    "2 * CE",
    "MSE, 3-d, mean",
    "residual",
    "linear twice",
    "tied branches",
    "bare scalar",
    "position embedding",
    "class token",
    "layer scale",
    "own layer",
    "samples second",
    "samples folded",
    "square matrix, as it is and transposed",
    "stack of matrices",
    "matrix on positions",
    "einsum",
    "net: Conv2d",
    "net: ConvTranspose2d",
    "net: groups, Conv2d, depthwise",
    "net: groups, ConvTranspose1d",
    "net: Conv1d twice",
    "Embedding",
    "Embedding, padding, two axes",
    "Embedding twice",
    "EmbeddingBag, sum",
    "Bilinear, both inputs",
    "LayerNorm, first",
    "GroupNorm",
    "BatchNorm1d, evaluation",
    "transformer: attention",
    "recurrent: LSTM",
]


def slices(split: tuple[int, ...]) -> list[slice]:
    ends = [sum(split[:i]) for i in range(len(split) + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def part(problem: Problem, n: slice, scale: float) -> Problem:
    """Some of the samples of a problem with one term; its loss is multiplied by something."""
    (whole,) = problem.terms
    term, smaller = copy(whole), copy(problem)
    term.target, term.scale = whole.target[n], whole.scale * scale
    smaller.x, smaller.terms = problem.x[n], [term]
    return smaller


def accumulate(problem: Problem, split: tuple[int, ...], *active: BackpropExtension) -> None:
    """Write the quantities of the mean loss over the mini-batch from passes over its parts."""
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*active, accumulate=True):
        for n in slices(split):
            some = part(problem, n, (n.stop - n.start) / N)
            some.loss(some.outputs()).backward()


@pytest.mark.parametrize("split", SPLITS[1:3], ids=str)
@pytest.mark.parametrize("case", MODELS)
def test_parts_make_up_the_whole(case: str, split: tuple[int, ...]) -> None:
    problem = CASES[case].build(N)
    oracle = Oracle(CASES[case].build(N))
    names = [name for name in SUMMED if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    accumulate(problem, split, *(QUANTITIES[name].make() for name in names if name != "HBP, square root"))
    for name in names:
        if name != "HBP, square root":
            QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))
    gradients = {name: value.sum(0) for name, value in oracle.grad_batch.items()}
    for name, parameter in problem.model.named_parameters():
        if name in gradients:
            close(parameter.grad, gradients[name])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split_and_extension(split: tuple[int, ...]) -> None:
    """Also empty parts, one part, one sample each."""
    oracle = Oracle(CASES["Tanh"].build(N))
    for name in SUMMED:
        problem = CASES["Tanh"].build(N)
        accumulate(problem, split, QUANTITIES[name].make())
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


def test_unscaled_losses_of_uneven_parts() -> None:
    """The quantities are those of the sum of the losses: with mean losses, a sample of a small part weighs more."""
    problem, split = CASES["CE, mean"].build(N), (1, 4)
    weights = torch.cat([torch.full((size,), 1 / size, dtype=torch.float64) for size in split])
    term = Term(nn.CrossEntropyLoss(reduction="none"), problem.terms[0].target, scale=weights)
    oracle = Oracle(Problem(CASES["CE, mean"].build(N).model, problem.x, [term]))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*(QUANTITIES[name].make() for name in SUMMED[:-1]), accumulate=True):
        for n in slices(split):
            some = part(problem, n, 1.0)
            some.loss(some.outputs()).backward()
    for name in SUMMED[:-1]:
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


@pytest.mark.parametrize("split", SPLITS[:4], ids=str)
def test_sampled_quantities(split: tuple[int, ...]) -> None:
    """Draws differ between splits; but all quantities are those of the square root, which is the draw of each part on its own."""
    problem, alone = CASES["Tanh"].build(N), CASES["Tanh"].build(N)
    columns: dict[str, list[Tensor]] = {}
    for n in slices(split):
        oracle = Oracle(part(alone, n, (n.stop - n.start) / N))
        for hessian in oracle.sampled_hessians(MC):
            for name, value in oracle.diag_ggn_batch(hessian).items():
                columns.setdefault(name, []).append(value)
    names = ["SqrtGGNMC", "DiagGGNMC", "BatchDiagGGNMC", "KFAC", "KFLR"]
    accumulate(problem, split, *(QUANTITIES[name].make() for name in names))
    for name, parameter in problem.model.named_parameters():
        root, expected = parameter.sqrt_ggn_mc, torch.cat(columns[name])
        assert root.shape == (MC, N, *parameter.shape)
        close(root.square().sum(0), expected)
        close(parameter.diag_ggn_mc_batch, expected)
        close(parameter.diag_ggn_mc, expected.sum(0))
        if parameter.dim() == 1:
            close(parameter.kfac[0], einsum("vni,vnj->ij", root, root))
    for layer in problem.model:
        if isinstance(layer, nn.Linear):
            close(layer.weight.kfac[0], layer.bias.kfac[0])
            close(layer.weight.kfac[1], layer.weight.kflr[1])


@pytest.mark.parametrize("index", [[1], [1, 0, 1], [-1]], ids=str)
def test_subsampling(index: list[int]) -> None:
    """In each part the same places are chosen, and their number is what a variance divides by."""
    problem, oracle = CASES["Tanh"].build(N), Oracle(CASES["Tanh"].build(N))
    names = ["BatchGrad", "Variance", "DiagHessian", "SqrtGGNExact"]
    accumulate(problem, (3, 2), *(getattr(extensions, name)(subsampling=index) for name in names))
    chosen = [range(5)[n][i] for n in slices((3, 2)) for i in index]
    for name, parameter in problem.model.named_parameters():
        gradients = oracle.grad_batch[name][chosen]
        close(parameter.grad_batch, gradients)
        close(parameter.variance, gradients.var(0, correction=0))
        close(parameter.diag_h, oracle.diag_h_batch[name][chosen].sum(0))
    U = torch.cat([p.sqrt_ggn_exact.flatten(2) for p in problem.model.parameters()], 2)
    close(einsum("vnp,vnq->npq", U, U), oracle.ggn_per_sample(oracle.hessian_exact)[chosen])


class Scaled(nn.Module):
    """Has a parameter that is no weight of an affine layer, of which deviations from the mean are squared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_variance_far_from_zero() -> None:
    """The mean is a million times the deviation: sums of squares would lose all digits in double precision, deviations from the mean do not."""
    model = extend(Scaled().double())
    x = 1e7 + torch.randn(8, 1, dtype=torch.float64)
    for settings in ({}, {"subsampling": [0, 1]}):
        with backpack(extensions.Variance(**settings), accumulate=True):
            for part_of_x in x.split(2):
                model(part_of_x).sum().backward()
        close(model.scale.variance, x.var(0, correction=0), rtol=1e-7)


def test_accumulates_within_a_context_only() -> None:
    """A context begins anew; so does one whose results were cleared."""
    problem = CASES["Tanh"].build(N)
    accumulate(problem, (3, 2), extensions.BatchGrad())
    accumulate(problem, (3, 2), extensions.BatchGrad())
    expected = Oracle(CASES["Tanh"].build(N)).grad_batch
    for name, value in collect(problem, "grad_batch").items():
        close(value, expected[name])
    with backpack(extensions.BatchGrad(), extensions.Variance(), accumulate=True):
        for _ in range(3):
            problem.loss(problem.outputs()).backward()
            assert all(p.grad_batch.shape[0] == N for p in problem.model.parameters())
            clear(problem.model)
            assert not results(problem.model)
            assert not any(owners.notes(p) for p in problem.model.parameters())


def test_models_that_are_extended_again() -> None:
    """What ``unextend`` has taken away begins anew, as after ``clear``; so it does not where only a part of the other passes is known of a model."""
    problem = CASES["Tanh"].build(N)
    parameters = list(extend(problem.model).parameters())
    with backpack(extensions.BatchGrad(), accumulate=True):
        for again, samples in ((lambda: None, N), (lambda: extend(problem.model), 2 * N), (lambda: extend(unextend(problem.model)), N)):
            again()
            problem.loss(problem.outputs()).backward()
            assert all(p.grad_batch.shape[0] == samples for p in parameters)
        extend(unextend(problem.model[0]))
        with pytest.raises(UnsupportedError, match=r"0\.weight.*or its result was deleted.*clear\(model\), the whole of it.*exclude="):
            problem.loss(problem.outputs()).backward()


def test_models_that_come_and_go() -> None:
    """A new model may lie where a dead one did: it begins anew."""
    base, seen, again = extend(nn.Linear(3, 2).double()), set(), 0
    x = torch.randn(N, 3, dtype=torch.float64)
    with backpack(extensions.BatchGrad(), accumulate=True):
        for _ in range(60):
            model = deepcopy(base)
            with backpack(extensions.BatchGrad()):  # so that the parameter carries something
                model(x).square().sum().backward()
            model(x).square().sum().backward()
            close(model.weight.grad_batch, einsum("no,ni->noi", 2 * model(x).detach(), x))
            again += id(model.weight) in seen
            seen.add(id(model.weight))
            del model
    assert again


@pytest.mark.parametrize("first", [False, True], ids=["after a part", "before all parts"])
@pytest.mark.parametrize("how", ["grad of inputs", "grad of parameters", "backward for inputs", "grad of inputs, batched", "graph of it"])
def test_passes_that_add_nothing_to_the_gradient(how: str, first: bool) -> None:
    """An adversarial example, the norm of a gradient: the quantities are those of ``.grad``."""
    problem, names = CASES["Tanh"].build(N), ["BatchGrad", "Variance", "DiagGGNExact"]
    for module in (problem.model, *problem.losses):
        extend(module)
    parameters = list(problem.model.parameters())

    def other() -> None:
        some = part(problem, slice(1, 4), 3.0)
        some.x = some.x.clone().requires_grad_()
        loss = some.loss(some.outputs())
        if how == "backward for inputs":
            loss.backward(inputs=[some.x])
        elif how == "grad of inputs, batched":
            torch.autograd.grad(loss, some.x, torch.ones(2, dtype=torch.float64), is_grads_batched=True)
        else:
            torch.autograd.grad(loss, parameters if how == "grad of parameters" else some.x, create_graph=how == "graph of it")

    with backpack(*(QUANTITIES[name].make() for name in names), accumulate=True):
        if first:
            other()
            assert not results(problem.model)
        for n in slices((3, 2)):
            some = part(problem, n, (n.stop - n.start) / N)
            some.loss(some.outputs()).backward()
            if not first:
                other()
    for name in names:
        QUANTITIES[name].check(Oracle(CASES["Tanh"].build(N)), collect(problem, QUANTITIES[name].field))


def test_gradients_of_some_parameters() -> None:
    """Of a pass that accumulates the gradients of chosen parameters, nothing is added to the quantities of others that it crosses."""
    problem, oracle = CASES["Tanh"].build(N), Oracle(CASES["Tanh"].build(N))
    for module in (problem.model, *problem.losses):
        extend(module)
    chosen, *_ = problem.model.named_parameters()
    with backpack(extensions.SumGradSquared(), accumulate=True):
        problem.loss(problem.outputs()).backward()
        problem.loss(problem.outputs()).backward(inputs=[chosen[1]])
    for name, parameter in problem.model.named_parameters():
        close(parameter.sum_grad_squared, (2 if name == chosen[0] else 1) * oracle.grad_batch[name].square().sum(0))
        close(parameter.grad, (2 if name == chosen[0] else 1) * oracle.grad_batch[name].sum(0))


def test_context_inside_that_would_overwrite_is_refused() -> None:
    problem = CASES["Tanh"].build(N)
    extend(problem.model)
    with backpack(extensions.SumGradSquared(), accumulate=True):
        problem.loss(problem.outputs()).backward()
        before = {p: p.sum_grad_squared.clone() for p in problem.model.parameters()}
        own = extensions.SumGradSquared()
        own.savefield = "own"
        with backpack(own, extensions.BatchGrad()):
            problem.loss(problem.outputs()).backward()
        for active in (extensions.SumGradSquared(), extensions.SumGradSquared(exclude=[problem.model[0]])):
            with backpack(active), pytest.raises(UnsupportedError, match=r"sum_grad_squared is accumulated by a context around"):
                problem.loss(problem.outputs()).backward()
        problem.loss(problem.outputs()).backward()
        for parameter, value in before.items():
            close(parameter.sum_grad_squared, 2 * value)
        clear(problem.model)
        with backpack(extensions.SumGradSquared()):
            problem.loss(problem.outputs()).backward()
    for parameter, value in before.items():
        close(parameter.sum_grad_squared, value)


@pytest.mark.parametrize("how", ["backward for inputs", "batched", "frozen"])
def test_context_inside_that_computes_nothing_deletes_nothing(how: str) -> None:
    """The parts before it would be missing in the sum, with no word about it."""
    problem = CASES["Tanh"].build(N)
    extend(problem.model)
    with backpack(extensions.SumGradSquared(), accumulate=True):
        for n in slices((3, 2)):
            some = part(problem, n, (n.stop - n.start) / N)
            some.loss(some.outputs()).backward()
            some.x = some.x.clone().requires_grad_()
            problem.model.requires_grad_(how != "frozen")
            with backpack(extensions.SumGradSquared()):
                loss = some.loss(some.outputs())
                if how == "batched":
                    torch.autograd.grad(loss, some.x, torch.ones(2, dtype=torch.float64), is_grads_batched=True)
                else:
                    loss.backward(inputs=[some.x])
            problem.model.requires_grad_(requires_grad=True)
    QUANTITIES["SumGradSquared"].check(Oracle(CASES["Tanh"].build(N)), collect(problem, "sum_grad_squared"))


@pytest.mark.parametrize("inside", [False, True], ids=["accumulates", "inside of one that accumulates"])
def test_a_failed_pass_leaves_nothing_of_earlier_contexts(inside: bool) -> None:
    """What no context accumulates would look like the result of the pass."""
    problem = CASES["Tanh"].build(N)
    extend(problem.model)
    weight = problem.model[0].weight
    with backpack(extensions.Variance()):
        problem.loss(problem.outputs()).backward()
    with backpack(extensions.BatchGrad(), accumulate=True):
        problem.loss(problem.outputs()).backward()
        with backpack(extensions.Variance(), accumulate=not inside), pytest.raises(UnsupportedError, match=r"leave_out"):
            (problem.loss(problem.outputs()) + weight.sum()).backward()
    assert {field for fields in results(problem.model).values() for field in fields} == {"grad_batch"}


def test_two_models_in_turn() -> None:
    """A pass over one model leaves what was accumulated for the other alone."""
    one, other = CASES["Tanh"].build(N), CASES["logreg"].build(N)
    for problem in (one, other):
        extend(problem.model)
    with backpack(extensions.Variance(), extensions.SumGradSquared(), accumulate=True):
        for n in slices((3, 2)):
            for problem in (one, other):
                some = part(problem, n, (n.stop - n.start) / N)
                some.loss(some.outputs()).backward()
    for problem, case in ((one, "Tanh"), (other, "logreg")):
        for name in ("Variance", "SumGradSquared"):
            QUANTITIES[name].check(Oracle(CASES[case].build(N)), collect(problem, QUANTITIES[name].field))


def test_variance_beside_a_penalty_and_earlier_gradients() -> None:
    """Neither what ``.grad`` held before, nor a term that is left out, enters the mean."""
    problem = CASES["Tanh"].build(N)
    extend(problem.model)
    for parameter in problem.model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    with backpack(extensions.Variance(), accumulate=True):
        for i, n in enumerate(slices((3, 2))):
            some = part(problem, n, (n.stop - n.start) / N)
            loss = some.loss(some.outputs())
            if i:
                loss = loss + leave_out(sum(p.square().sum() for p in problem.model.parameters()))
            loss.backward()
            for parameter in problem.model.parameters():
                parameter.grad.mul_(3.0)  # in place, as optimizers do
    QUANTITIES["Variance"].check(Oracle(CASES["Tanh"].build(N)), collect(problem, "variance"))


def test_a_failed_pass_changes_nothing() -> None:
    problem = CASES["Tanh"].build(N)
    extend(problem.model)
    seen: list[nn.Module] = []

    def fail(module: nn.Module) -> None:
        seen.append(module)
        if len(seen) > 7:
            raise RuntimeError("hook")

    with backpack(extensions.Variance(), extensions.BatchGrad(), extension_hook=fail, accumulate=True):
        problem.loss(problem.outputs()).backward()
        before = {p: (p.variance.clone(), p.grad_batch.clone()) for p in problem.model.parameters()}
        seen.extend([problem.model] * 5)
        with pytest.raises(RuntimeError, match="hook"):
            problem.loss(problem.outputs()).backward()
        for parameter, (variance, grad_batch) in before.items():
            assert torch.equal(parameter.variance, variance)
            assert torch.equal(parameter.grad_batch, grad_batch)
        seen.clear()
        problem.loss(problem.outputs()).backward()
    for parameter, (variance, grad_batch) in before.items():
        close(parameter.variance, variance)  # the same samples twice
        close(parameter.grad_batch, torch.cat([grad_batch, grad_batch]))


# --- refused ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_parts_is_refused(name: str) -> None:
    extension = QUANTITIES[name].make()
    with pytest.raises(UnsupportedError, match=f"{extension.savefield}: .*{type(extension).__name__}.* parts"):
        backpack(extension, accumulate=True)


def test_average_of_inputs_is_refused() -> None:
    hbp = extensions.secondorder.hbp
    extension = extensions.HBP(
        hbp.Curvature.GGN, hbp.LossHessianStrategy.EXACT, hbp.BackpropStrategy.SQRT, hbp.ExpectationApproximation.CHEN, savefield="mean_inputs"
    )
    with pytest.raises(UnsupportedError, match="mean_inputs: "):
        backpack(extension, accumulate=True)


class Norms(extensions.BatchGrad):
    """Makes something else of per-sample gradients, so that what is known of these holds no more."""

    def finish(self, state: dict, parameter: nn.Parameter) -> Tensor:
        return super().finish(state, parameter).norm()


def test_subclass_with_another_meaning_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Norms .*`combination`"):
        backpack(Norms(), accumulate=True)


class Routed(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return (self.one if first else self.other)(x)


@pytest.mark.parametrize("extension", [extensions.BatchGrad, extensions.Variance, extensions.BatchL2Grad])
@pytest.mark.parametrize("again", [False, True])
def test_unused_parameter(extension: type[BackpropExtension], again: bool) -> None:
    """A part that does not use a parameter counts in a mean and in a list of samples; nothing is known of it."""
    model = extend(Routed())
    with backpack(extension(), accumulate=True):
        model(torch.rand(3, 3), True).sum().backward()
        before = results(model)
        with pytest.raises(UnsupportedError, match=r'one.weight, one.bias, other.weight, other.bias: .*exclude=\["'):
            model(torch.rand(2, 3), False).sum().backward()
        assert results(model).keys() == before.keys()
        assert model.other.weight.grad is None
        if again:
            model(torch.rand(2, 3), True).sum().backward()


def test_unused_parameter_in_a_sum() -> None:
    model, x = extend(Routed().double()), torch.rand(5, 3, dtype=torch.float64)
    with backpack(extensions.SumGradSquared(), accumulate=True):
        for n, first in ((slice(0, 2), True), (slice(2, 3), False), (slice(3, 5), True)):
            model(x[n], first).sum().backward()
    close(model.one.weight.sum_grad_squared, x[[0, 1, 3, 4]].square().sum(0).expand(2, 3))
    close(model.other.weight.sum_grad_squared, x[2].square().expand(2, 3))


def both(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[0](x).sum() + model[1](x).sum()


PARTIAL = {
    "the whole, a part": (lambda m, x: m(x), lambda m, x: m[1](x)),
    "a part, the whole": (lambda m, x: m[1](x), lambda m, x: m(x)),
    "two, one of them": (both, lambda m, x: m[1](x)),
    "one, two": (lambda m, x: m[1](x), both),
    "one, the other, both": (lambda m, x: m[0](x), lambda m, x: m[1](x), both),
}


@pytest.mark.parametrize("extension", [extensions.BatchGrad, extensions.Variance, extensions.SumGradSquared])
@pytest.mark.parametrize("order", PARTIAL)
def test_part_of_a_model(order: str, extension: type[BackpropExtension]) -> None:
    """Whatever the order: what passes do not have in common is refused, before ``.grad`` changes; sums over samples are exact."""
    model, x = extend(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()), torch.rand(6, 3, dtype=torch.float64)
    *first, last = PARTIAL[order]
    calls = [(call, x[i : i + 1 + i % 2]) for i, call in enumerate((*first, last))]
    with backpack(extension(), accumulate=True):
        for call, part in calls[:-1]:
            call(model, part).sum().backward()
        before, gradients = results(model), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if extension is not extensions.SumGradSquared:
            with pytest.raises(UnsupportedError, match=r"one has not reached these parameters.*exclude=\[.*0.weight"):
                calls[-1][0](model, calls[-1][1]).sum().backward()
            assert results(model) == before
            assert gradients.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
            assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if name in gradients)
            return
        calls[-1][0](model, calls[-1][1]).sum().backward()
    for parameter in model.parameters():
        squares = torch.zeros_like(parameter)
        for call, part in calls:
            for n in range(len(part)):
                (gradient,) = torch.autograd.grad(call(model, part[n : n + 1]).sum(), [parameter], allow_unused=True)
                squares += 0 if gradient is None else gradient.square()
        close(parameter.sum_grad_squared, squares)


def test_frozen_between_passes() -> None:
    """Refused before it runs, so that ``.grad`` is the sum of the gradients that are there."""
    problem = CASES["Tanh"].build(N)
    extend(problem.model)
    with backpack(extensions.BatchGrad(), accumulate=True):
        problem.loss(problem.outputs()).backward()
        problem.model[0].requires_grad_(False)
        with pytest.raises(UnsupportedError, match="0.weight, 0.bias: of the passes"):
            problem.loss(problem.outputs()).backward()
    for parameter in problem.model.parameters():
        close(parameter.grad, parameter.grad_batch.sum(0))


def test_results_that_a_hook_deletes() -> None:
    """What is deleted in each pass is not missed in the next one."""
    problem, oracle = CASES["Tanh"].build(N), Oracle(CASES["Tanh"].build(N))
    extend(problem.model)

    def delete(module: nn.Module) -> None:
        if module is problem.model[0]:
            del module.weight.grad_batch

    with backpack(extensions.BatchGrad(), extension_hook=delete, accumulate=True):
        for n in slices((3, 2)):
            some = part(problem, n, (n.stop - n.start) / N)
            some.loss(some.outputs()).backward()
    expected = {name: value for name, value in oracle.grad_batch.items() if name != "0.weight"}
    found = collect(problem, "grad_batch")
    assert found.keys() == expected.keys()
    for name, value in found.items():
        close(value, expected[name])


def test_changed_shape_is_refused() -> None:
    """The number of columns depends on the number of outputs, here positions."""
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    with backpack(extensions.SqrtGGNExact(), accumulate=True):
        lossfunc(model(torch.rand(2, 4, 3)), torch.rand(2, 4, 2)).backward()
        with pytest.raises(UnsupportedError, match=r"weight\.sqrt_ggn_exact.*\[8, 2, 2, 3\] and \[10, 2, 2, 3\]|bias\.sqrt"):
            lossfunc(model(torch.rand(2, 5, 3)), torch.rand(2, 5, 2)).backward()
        assert model.weight.sqrt_ggn_exact.shape == (8, 2, 2, 3)


_TABLE, _VECTOR, _SQUARE = (7, 3), (1, 3), (3, 3)
_INDEX, _ROWS, _SEQUENCES = torch.tensor([0, 1, 1, 6]), torch.rand(4, 3), torch.rand(4, 6, 5)


@pytest.mark.parametrize(
    ("shape", "one", "other"),
    [
        (_SQUARE, lambda w: F.linear(_ROWS, w), lambda w: _ROWS @ w),
        (_TABLE, lambda w: F.embedding(_INDEX, w), lambda w: F.linear(_ROWS, w)),
        (_TABLE, lambda w: F.embedding(_INDEX, w), lambda w: F.one_hot(_INDEX, 7).to(w.dtype) @ w),
        (_VECTOR, lambda w: F.linear(_ROWS, w), lambda w: _ROWS * w),
        ((6, 6, 1), lambda w: F.conv1d(_SEQUENCES, w), lambda w: F.conv_transpose1d(_SEQUENCES, w)),
        ((6, 3, 2), lambda w: F.conv1d(_SEQUENCES, w, groups=2), lambda w: F.conv1d(_SEQUENCES[:, :3], w)),
    ],
    ids=["transposed", "table", "one-hot", "vector", "conv", "groups"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_factors_of_different_structure_are_refused(shape: tuple[int, ...], one: Callable, other: Callable, turned: bool) -> None:
    """As in one pass; before anything is computed: the results are those of the passes before, and so is the gradient."""
    model, lossfunc = extend(_OnOneParameter(torch.rand(shape))), extend(nn.MSELoss(reduction="sum"))
    first, last = (other, one) if turned else (one, other)
    with backpack(extensions.KFLR(), accumulate=True):
        for output in (model(first), model(first)):
            lossfunc(output, torch.zeros_like(output)).backward()
        before, gradient = deepcopy(model.weight.kflr), model.weight.grad.clone()
        loss = lossfunc(output := model(last), torch.zeros_like(output))
        with pytest.raises(UnsupportedError, match=r"kflr of weight.* in another way.*exclude="):
            loss.backward()
    assert all(map(torch.equal, flat(model.weight.kflr), flat(before)))
    assert torch.equal(model.weight.grad, gradient)


def test_factors_of_different_structure_beside_rules_of_a_user() -> None:
    """What such rules will make is not foreseen: the results of the pass are compared."""
    extension = extensions.KFLR()
    extension.set_module_extension(nn.Identity, ModuleExtension(params=[]))
    model, lossfunc = extend(_OnOneParameter(torch.rand(_SQUARE))), extend(nn.MSELoss(reduction="sum"))
    with backpack(extension, accumulate=True):
        lossfunc(model(lambda w: F.linear(_ROWS, w)), torch.zeros(4, 3)).backward()
        before = deepcopy(model.weight.kflr)
        with pytest.raises(UnsupportedError, match=r"weight\.kflr: passes that accumulate .* in another way"):
            lossfunc(model(lambda w: _ROWS @ w), torch.zeros(4, 3)).backward()
    assert all(map(torch.equal, model.weight.kflr, before))


@pytest.mark.parametrize(
    ("shape", "one", "other"),
    [
        (_SQUARE, lambda w: F.linear(_ROWS, w), lambda w: _ROWS @ w.t()),
        (_TABLE, lambda w: F.embedding(_INDEX, w), lambda w: F.embedding(_INDEX[:2], w)),
        ((6, 3, 2), lambda w: F.conv1d(_SEQUENCES, w, groups=2), lambda w: F.conv1d(_SEQUENCES[:, :, :3], w, groups=2)),
        ((3,), lambda w: _ROWS * w, lambda w: torch.zeros_like(_ROWS) + w),
    ],
    ids=["linear", "table", "groups", "vector"],
)
def test_factors_of_different_operations_are_united(shape: tuple[int, ...], one: Callable, other: Callable) -> None:
    model, lossfunc, each, samples = extend(_OnOneParameter(torch.rand(shape))), extend(nn.MSELoss(reduction="sum")), [], []
    with backpack(extensions.KFLR()):
        for function in (one, other):
            output = model(function)
            lossfunc(output, torch.zeros_like(output)).backward()
            each.append(flat(model.weight.kflr))
            samples.append(len(output))
    with backpack(extensions.KFLR(), accumulate=True):
        for function in (one, other):
            output = model(function)
            lossfunc(output, torch.zeros_like(output)).backward()
    for k, found in enumerate(flat(model.weight.kflr)):
        is_mean = len(each[0]) > 1 and k % 2 == (0 if shape == _TABLE else 1)
        parts = [factors[k] * n / sum(samples) if is_mean else factors[k] for factors, n in zip(each, samples, strict=True)]
        close(found, sum(parts))


def flat(factors: list) -> list[Tensor]:
    return [f for part in factors for f in (part if isinstance(part, list) else [part])]


class _OnOneParameter(nn.Module):
    """Whatever function of one parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(self.weight)


def test_create_graph_is_refused() -> None:
    model = extend(nn.Linear(3, 2))
    with backpack(extensions.BatchGrad(), accumulate=True), pytest.raises(UnsupportedError, match="create_graph"):
        model(torch.rand(2, 3)).sum().backward(create_graph=True)
    assert not results(model)


def test_rule_of_a_user_lacks_what_a_variance_needs() -> None:
    class Rule(extensions.firstorder.base.FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight", "bias"])

        def weight(self, ext, module, g_inp, g_out, bpQuantities) -> Tensor:  # noqa: ANN001, N803
            return torch.zeros_like(module.weight)

        def bias(self, ext, module, g_inp, g_out, bpQuantities) -> Tensor:  # noqa: ANN001, N803
            return torch.zeros_like(module.bias)

    extension = extensions.Variance()
    extension.set_module_extension(nn.Linear, Rule())
    model = extend(nn.Linear(3, 2))
    with backpack(extension, accumulate=True):
        model(torch.rand(2, 3)).sum().backward()
        with pytest.raises(UnsupportedError, match=r"variance comes without"):
            model(torch.rand(2, 3)).sum().backward()


# --- scaled losses ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["Tanh", "net: groups, Conv2d, depthwise", "Embedding", "einsum"])
def test_unscale(case: str) -> None:
    """Each quantity has its degree: what a multiplied loss yields is brought back to the loss itself."""
    oracle = Oracle(CASES[case].build(N))
    problem = CASES[case].build(N)
    names = [name for name in SUMMED[:-1] if QUANTITIES[name].expect(CASES[case].tags) is Expect.EXACT]
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(*(QUANTITIES[name].make() for name in names)):
        (problem.loss(problem.outputs()) * 1024.0).backward()
    unscale(problem.model, 1024.0)
    for name in names:
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))
    with pytest.raises(ArgumentError, match="unscaled before"):
        unscale(problem.model, 1024.0)
    for name in names:
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


def test_unscale_passes_over_what_it_has_done() -> None:
    """Extensions that are active now and then: their results are divided once."""
    problem, oracle = CASES["Tanh"].build(N), Oracle(CASES["Tanh"].build(N))
    for module in (problem.model, *problem.losses):
        extend(module)
    for active in ([extensions.BatchL2Grad(), extensions.DiagGGNExact()], [extensions.BatchL2Grad()], [extensions.BatchL2Grad()]):
        with backpack(*active):
            (problem.loss(problem.outputs()) * 1024.0).backward()
        unscale(problem.model, 1024.0)
    for name in ("BatchL2Grad", "DiagGGNExact"):
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))
    with pytest.raises(ArgumentError, match="unscaled before"):
        unscale(problem.model, 1024.0)


def test_unscale_results_of_two_contexts() -> None:
    """Whether the loss of the earlier one was multiplied is not known, unless unscale was called after it: with 1.0, say."""
    problem, oracle = CASES["Tanh"].build(N), Oracle(CASES["Tanh"].build(N))
    for module in (problem.model, *problem.losses):
        extend(module)

    def run(extension: BackpropExtension, scale: float, passes: int = 1) -> None:
        with backpack(extension):
            for _ in range(passes):
                (problem.loss(problem.outputs()) * scale).backward()

    run(extensions.DiagGGNExact(), 1.0)
    run(extensions.BatchL2Grad(), 1024.0)
    before = {p: (p.diag_ggn_exact.clone(), p.batch_l2.clone()) for p in problem.model.parameters()}
    with pytest.raises(UnsupportedError, match=r"diag_ggn_exact was written in an earlier context than .*batch_l2, and not unscaled.*with 1.0 where"):
        unscale(problem.model, 1024.0)
    for parameter, (diagonal, norms) in before.items():
        assert torch.equal(parameter.diag_ggn_exact, diagonal) and torch.equal(parameter.batch_l2, norms)
    clear(problem.model)
    run(extensions.DiagGGNExact(), 1.0)
    unscale(problem.model, 1.0)
    run(extensions.BatchL2Grad(), 1024.0, passes=2)
    unscale(problem.model, 1024.0)
    for name in ("BatchL2Grad", "DiagGGNExact"):
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


@pytest.mark.parametrize(
    ("name", "replace"),
    [
        ("BatchGrad", lambda value: value.sum(0)),
        ("BatchGrad", lambda value: value.flatten(1).norm(dim=1).max()),
        ("Variance", Tensor.sqrt),
        ("DiagGGNExact", Tensor.max),
        ("KFLR", lambda value: value[0]),
    ],
)
def test_results_that_a_hook_has_replaced(name: str, replace: Callable[[Any], Any]) -> None:
    """How they add up, and scale, is not known; under a name of the user's own, they are left alone."""
    problem, extension = CASES["Tanh"].build(N), getattr(extensions, name)()
    for module in (problem.model, *problem.losses):
        extend(module)
    field = extension.savefield

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            setattr(parameter, target, replace(getattr(parameter, field)))
            if target != field:
                delattr(parameter, field)

    for target in (field, "replaced"):
        for accumulate in (True, False):
            clear(problem.model)
            refused = pytest.raises(UnsupportedError, match=f"{field} was replaced .* under a name of your own")
            with refused if target == field else nullcontext():
                with backpack(extension, extension_hook=hook, accumulate=accumulate):
                    for _ in range(1 + accumulate):
                        problem.loss(problem.outputs()).backward()
                unscale(problem.model, 2.0)
    parameter = next(problem.model.parameters())
    value = parameter.replaced
    with backpack(extension):
        problem.loss(problem.outputs()).backward()
    close(value, replace(getattr(parameter, field)))  # not bit by bit: products depend on where the numbers lie in memory


@pytest.mark.parametrize("name", ["BatchGrad", "KFLR"])
def test_results_that_were_replaced_twice(name: str) -> None:
    """The second one may lie in memory where the first one was."""
    problem, extension = CASES["Tanh"].build(N), getattr(extensions, name)()
    for module in (problem.model, *problem.losses):
        extend(module)
    parameter = next(problem.model.parameters())
    for _ in range(50):
        with backpack(extension):
            problem.loss(problem.outputs()).backward()
        for _ in range(2):
            value = getattr(parameter, extension.savefield)
            setattr(parameter, extension.savefield, [2 * part for part in value] if isinstance(value, list) else 2 * value)
            del value
        with pytest.raises(UnsupportedError, match="was replaced"):
            unscale(problem.model, 2.0)


def test_factors_that_were_replaced_in_their_list() -> None:
    problem, extension = CASES["Tanh"].build(N), extensions.KFLR()
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(extension):
        problem.loss(problem.outputs()).backward()
    next(problem.model.parameters()).kflr[1] = torch.eye(2)
    with pytest.raises(UnsupportedError, match="was replaced"):
        unscale(problem.model, 2.0)


@pytest.mark.parametrize("scale", [0.0, -2.0, float("nan"), float("inf"), "2"])
def test_unscale_refuses_other_factors(scale: object) -> None:
    model = extend(nn.Linear(3, 2))
    with backpack(extensions.BatchGrad()):
        model(torch.rand(2, 3)).sum().backward()
    with pytest.raises(ArgumentError, match="scale"):
        unscale(model, scale)


@pytest.mark.parametrize("name", REFUSED)
def test_unscale_what_has_no_parts(name: str) -> None:
    problem, oracle = CASES["Sigmoid"].build(1), Oracle(CASES["Sigmoid"].build(1))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(QUANTITIES[name].make()):
        (problem.loss(problem.outputs()) * 8.0).backward()
    unscale(problem.model, 8.0)
    QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


def test_steps_between_passes_are_warned_of() -> None:
    """Quantities of several values of a parameter are added, unless what was there is cleared."""
    model = extend(nn.Linear(3, 2))

    def step() -> None:
        model(torch.rand(4, 3)).sum().backward()
        with torch.no_grad():
            model.bias.sub_(model.bias.grad)

    with warnings.catch_warnings(), backpack(extensions.BatchGrad(), accumulate=True):
        warnings.simplefilter("error")
        step()
        clear(model)
        step()
        with pytest.raises(UserWarning, match=r"bias was changed between passes that accumulate.*clear\(model\)"):
            step()
        assert model.bias.grad_batch.shape == (4, 2)
        warnings.simplefilter("ignore")
        step()
    assert model.bias.grad_batch.shape == (8, 2)


def test_unscaled_results_cannot_be_added_to() -> None:
    model, x = extend(nn.Linear(3, 2)), torch.rand(4, 3)
    with backpack(extensions.BatchGrad(), accumulate=True):
        model(x).sum().backward()
        unscale(model, 2.0)
        before = model.bias.grad_batch.clone()
        with pytest.raises(UnsupportedError, match=r"bias\.grad_batch was unscaled between passes that accumulate"):
            model(x).sum().backward()
        assert torch.equal(model.bias.grad_batch, before)


def test_unscale_refuses_what_it_does_not_know() -> None:
    """Nothing is changed then."""
    problem = CASES["logreg"].build(N)
    extend(problem.model)
    norms = Norms()
    norms.savefield = "norms"
    with backpack(extensions.BatchL2Grad(), norms):
        problem.loss(problem.outputs()).backward()
    before = {p: p.batch_l2.clone() for p in problem.model.parameters()}
    with pytest.raises(UnsupportedError, match=r"\.norms: .*Norms"):
        unscale(problem.model, 2.0)
    assert all(torch.equal(p.batch_l2, value) for p, value in before.items())
