"""Clipping: each sample's gradient on its own, over all parameters together."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from cases import CASES
from test_extensions import close, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from backpack import backpack, clear, extend
from backpack.extensions import BatchGrad, BatchL2Grad
from backpack.utils.clip import clip_factors, clip_per_sample
from backpack.utils.errors import ArgumentError, ArgumentTypeError

N = 4


def clipped(case: str, max_norm: float) -> tuple[Tensor, dict[str, Tensor]]:
    """One sample after the other, each gradient clipped by torch."""
    problem = CASES[case].build(N)
    (term,) = problem.terms
    total: dict[str, Tensor] = {}
    norms = []
    for n in range(N):
        problem.model.zero_grad()
        one = problem.x[n : n + 1]
        (term.module(problem.output(problem.model, one), term.target[n : n + 1]) / N).backward()
        norms.append(nn.utils.clip_grad_norm_(problem.model.parameters(), max_norm))
        for name, parameter in problem.model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad
    return torch.stack(norms), total


@pytest.mark.parametrize(
    "case", ["Tanh", "frozen first layer", "linear twice", "tied branches", "net: Conv2d", "Embedding", "position embedding", "bare scalar"]
)
@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_clipped_gradient(case: str, quantile: float) -> None:
    norms, _ = clipped(case, 1e9)
    bound = norms.quantile(quantile).item() * 0.9
    _, truth = clipped(case, bound)
    problem = CASES[case].build(N)
    run(problem, BatchGrad())
    close(clip_per_sample(problem.model, bound), (bound / norms).clamp(max=1), rtol=1e-5)  # torch adds 1e-6 to norms
    found = {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        close(gradient, truth[name], rtol=1e-4)


@pytest.mark.parametrize("replace", [lambda value: value.flatten(1).norm(dim=1), Tensor.max, lambda value: value.sum(0)])
def test_what_a_hook_has_put_in_the_place_of_gradients(replace: Callable[[Tensor], Tensor]) -> None:
    """Is no gradient of a sample."""
    model = extend(nn.Linear(5, 3))

    def hook(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.grad_batch = replace(parameter.grad_batch)

    with backpack(BatchGrad(), extension_hook=hook):
        cross_entropy(model(torch.randn(N, 5)), torch.arange(N) % 3).backward()
    before = model.weight.grad.clone()
    for clip in (clip_factors, clip_per_sample):
        with pytest.raises(ArgumentError, match=r"shape \[3, 5\] carries grad_batch of shape .* an extension hook, say, has replaced"):
            clip(model, 1.0)
    assert torch.equal(model.weight.grad, before)


@pytest.mark.parametrize("case", ["Tanh", "net: Conv2d", "linear twice"])
def test_two_passes(case: str) -> None:
    """Norms in the first pass, weighted losses in the second: no per-sample gradient is ever formed."""
    norms, _ = clipped(case, 1e9)
    bound = norms.median().item()
    _, truth = clipped(case, bound)
    problem = CASES[case].build(N)
    run(problem, BatchL2Grad())
    factors = clip_factors(problem.model, bound)
    (term,) = problem.terms
    problem.model.zero_grad()
    losses = type(term.module)(reduction="none")(problem.output(problem.model, problem.x), term.target)
    (factors @ losses.reshape(N, -1).mean(1) / N).backward()
    for name, parameter in problem.model.named_parameters():
        close(parameter.grad, truth[name], rtol=1e-4)


def test_zero_gradients_stay() -> None:
    model = extend(nn.Linear(3, 2))
    with backpack(BatchGrad()):
        (model(torch.zeros(3, 3)) * 0).sum().backward()
    assert torch.equal(clip_per_sample(model, 1.0), torch.ones(3))
    assert torch.equal(model.weight.grad, torch.zeros(2, 3))


def test_norms_of_rounding_errors_below_zero() -> None:
    """What a user, or another program, has left in the field may be the rounding error of a zero."""
    model = nn.Linear(3, 2, bias=False)
    model.weight.batch_l2 = torch.tensor([-1e-8, 4.0])
    close(clip_factors(model, 1.0), torch.tensor([1.0, 0.5]))


def test_parameters_without_norms_are_refused() -> None:
    """A parameter that is left out of the norm would not be protected."""
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match="No parameter carries"):
        clip_factors(model, 1.0)
    with backpack(BatchGrad(exclude=["1.bias"])):
        model(torch.rand(3, 3)).sum().backward()
    before = {p: p.grad.clone() for p in model.parameters()}
    with pytest.raises(ArgumentError, match=r"1\.bias has a gradient"):
        clip_per_sample(model, 1.0)
    with pytest.raises(ArgumentError, match="positive"):
        clip_factors(model, 0.0)
    with backpack(BatchGrad(exclude=["1.bias"]), BatchL2Grad()):
        model(torch.rand(3, 3)).sum().backward()
    before = {p: p.grad.clone() for p in model.parameters()}
    with pytest.raises(ArgumentError, match=r"1\.bias carries no grad_batch"):
        clip_per_sample(model, 1.0)
    assert all(torch.equal(p.grad, gradient) for p, gradient in before.items())


@pytest.mark.parametrize("function", [clip_factors, clip_per_sample])
def test_bounds_that_are_no_numbers(function: Callable) -> None:
    """Numbers of numpy, and in tensors, are some."""
    model = extend(nn.Linear(3, 2))
    with backpack(BatchGrad()):
        model(torch.rand(4, 3)).sum().backward()
    for wrong in ("1", None, [1.0], torch.ones(4), torch.tensor(1j), numpy.ones(4)):
        with pytest.raises(ArgumentTypeError, match="max_norm must be a number, got"):
            function(model, wrong)
    for number in (numpy.float32(0.5), numpy.float64(0.5), torch.tensor(0.5)):
        close(function(model, number), function(model, 0.5))


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    rows = [torch.autograd.grad(cross_entropy(model(x[n : n + 1]), y[n : n + 1]), list(model.parameters())) for n in range(len(x))]
    return {name: torch.stack(column) for (name, _), column in zip(model.named_parameters(), zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("first, second", [(BatchL2Grad, BatchGrad), (BatchGrad, BatchL2Grad)])
def test_results_of_an_earlier_context_do_not_count(first: type, second: type) -> None:
    """They are about another mini-batch, whose norms may be much smaller."""
    torch.manual_seed(0)
    model, y = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()), torch.tensor([0, 1, 1, 0])
    small, large = 0.01 * torch.randn(4, 3, dtype=torch.float64), 10 * torch.randn(4, 3, dtype=torch.float64)
    for extension, x in ((first(), small), (second(), large)):
        model.zero_grad()
        with backpack(extension):
            cross_entropy(model(x), y, reduction="sum").backward()
    gradients = per_sample(model, large, y)
    expected = (0.1 / sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()).clamp(max=1)
    assert expected.min() < 0.5
    close(clip_factors(model, 0.1), expected)
    if second is BatchL2Grad:  # the per-sample gradients are those of the earlier mini-batch
        with pytest.raises(ArgumentError, match=r"0\.weight carries no grad_batch of the last pass"):
            clip_per_sample(model, 0.1)
        return
    close(clip_per_sample(model, 0.1), expected)
    for name, parameter in model.named_parameters():
        close(parameter.grad, torch.einsum("n,n...->...", expected, gradients[name]))


def test_parameters_that_only_an_earlier_context_knows_are_refused() -> None:
    model, x = extend(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()), torch.rand(3, 3, dtype=torch.float64)
    for extension in (BatchGrad(), BatchL2Grad(exclude=["0"])):
        with backpack(extension):
            model(x).sum().backward()
    for function in (clip_factors, clip_per_sample):
        with pytest.raises(ArgumentError, match=r"0\.weight has a gradient.*earlier context"):
            function(model, 1.0)
    model.zero_grad()  # they do not take part any more
    model[1](x[:, :2]).sum().backward()
    expected = sum(p.batch_l2 for p in model[1].parameters()).rsqrt().clamp(max=1)
    close(clip_factors(model, 1.0), expected)


def test_chosen_samples_in_another_order() -> None:
    """Norms of all samples do not belong to gradients of chosen ones."""
    model, x = extend(nn.Linear(3, 2).double()), torch.rand(3, 3, dtype=torch.float64) ** 4
    with backpack(BatchGrad(subsampling=[2, 0, 1]), BatchL2Grad()):
        model(x).square().sum().backward()
    norms = sum(p.grad_batch.flatten(1).square().sum(1) for p in model.parameters()).sqrt()
    close(clip_per_sample(model, 0.5), (0.5 / norms).clamp(max=1))
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    with backpack(BatchGrad(), dtype=torch.float32):
        model(x).square().sum().backward()
    clip_per_sample(model, 0.5)
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name], rtol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("chosen", [[0], [0, 1, 1], [0, -3, 1]])
def test_some_of_the_samples_are_refused(chosen: list[int], accumulate: bool) -> None:
    """The gradient of all of them is not made of their gradients."""
    model, x = extend(nn.Linear(3, 2)), torch.randn(3, 3)
    with backpack(BatchGrad(subsampling=chosen), accumulate=accumulate):
        model(x).square().sum().backward()
        if accumulate and chosen == [0]:
            model(x[:1]).square().sum().backward()
    before = model.weight.grad.clone()
    with pytest.raises(ArgumentError, match=r"weight carries grad_batch of some of the samples only.*BatchGrad\(\)"):
        clip_per_sample(model, 1.0)
    assert torch.equal(model.weight.grad, before)
    assert len(clip_factors(model, 1.0)) == len(model.weight.grad_batch)  # factors of the chosen ones


def test_different_samples_are_refused() -> None:
    """Two choices of samples in one pass, and two mini-batches in one pass."""
    model, x = extend(nn.Linear(3, 2)), torch.randn(4, 3)
    for chosen, said in (([3, 2, 0, 1], "4 chosen"), ([2], "1 chosen")):
        with backpack(BatchGrad(subsampling=chosen), BatchL2Grad(exclude=["bias"])):
            model(x).square().sum().backward()
        with pytest.raises(ArgumentError, match=rf"different samples: weight\.batch_l2 of 4, bias\.grad_batch of {said}"):
            clip_factors(model, 1.0)
    models = nn.ModuleList(extend(nn.Linear(3, 2)) for _ in range(2))
    with backpack(BatchGrad()):
        sum(one(some).square().sum() for one, some in zip(models, (x, x[:2]), strict=True)).backward()
    for function in (clip_factors, clip_per_sample):
        with pytest.raises(ArgumentError, match=r"0\.bias\.grad_batch of 4, 1\.bias\.grad_batch of 2"):
            function(models, 1.0)


class Heads(nn.Module):
    """A body, and heads of which each pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(self.body(x).tanh())


def of_two_heads(samples: int, *, cleared: bool = False, zeroed: bool = True, returned: bool = False) -> Heads:
    """Take a pass with each head, in one context."""
    torch.manual_seed(0)
    model = extend(Heads().double())
    with backpack(BatchGrad(), BatchL2Grad()):
        for head, number in (("one", 5), ("two", samples)):
            if cleared:
                clear(model)
            if zeroed:
                model.zero_grad()
            loss = model(torch.randn(number, 3, dtype=torch.float64), head).square().sum()
            if returned:
                torch.autograd.grad(loss, [*model.body.parameters(), *getattr(model, head).parameters()])
            else:
                loss.backward()
    return model


@pytest.mark.parametrize("samples", [5, 3])
@pytest.mark.parametrize("how", [{}, {"zeroed": False}, {"returned": True}], ids=str)
@pytest.mark.parametrize("function", [clip_factors, clip_per_sample])
def test_results_of_another_pass_of_the_context_are_refused(function: Callable, how: dict[str, bool], samples: int) -> None:
    """Nobody knows whether they are about other samples, or about more parameters of the same ones."""
    model = of_two_heads(samples, **how)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(ArgumentError, match=r"one\.weight carries .*of an earlier pass .*clear\(model\)"):
        function(model, 1.0)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("samples", [5, 3])
def test_parameters_that_the_last_pass_has_not_reached(samples: int) -> None:
    """They take no part, and get no gradient; one that they have kept would not be clipped."""
    model = of_two_heads(samples, cleared=True)
    used = [*model.body.parameters(), *model.two.parameters()]
    gradients = [p.grad_batch for p in used]
    expected = sum(g.flatten(1).square().sum(1) for g in gradients).rsqrt().clamp(max=1)
    assert expected.min() < 0.9
    close(clip_factors(model, 1.0), expected)
    close(clip_per_sample(model, 1.0), expected)
    for parameter, gradient in zip(used, gradients, strict=True):
        close(parameter.grad, torch.einsum("n,n...->...", expected, gradient))
    assert all(p.grad is None for p in model.one.parameters())
    model = of_two_heads(samples, cleared=True, zeroed=False)
    with pytest.raises(ArgumentError, match=r"one\.weight has a gradient"):
        clip_per_sample(model, 1.0)


def test_last_pass_of_contexts_that_lie_inside_one_another() -> None:
    """The outer context may have the last word."""
    model, y = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()), torch.tensor([0, 1, 1, 0])
    small, large = 0.01 * torch.randn(4, 3, dtype=torch.float64), 10 * torch.randn(4, 3, dtype=torch.float64)
    with backpack(BatchGrad()):
        with backpack(BatchL2Grad()):
            cross_entropy(model(small), y, reduction="sum").backward()
        cross_entropy(model(large), y, reduction="sum").backward()
    expected = (0.1 / sum(g.flatten(1).square().sum(1) for g in per_sample(model, large, y).values()).sqrt()).clamp(max=1)
    close(clip_factors(model, 0.1), expected)
    close(clip_per_sample(model, 0.1), expected)


@pytest.mark.parametrize("parts", [(4,), (2, 2), (1, 3)], ids=str)
def test_passes_that_accumulate_count_as_one(parts: tuple[int, ...]) -> None:
    model, x, y = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()), torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    with backpack(BatchGrad(), accumulate=True):
        for some, labels in zip(x.split(parts), y.split(parts), strict=True):
            cross_entropy(model(some), labels, reduction="sum").backward()
    expected = (0.1 / sum(g.flatten(1).square().sum(1) for g in per_sample(model, x, y).values()).sqrt()).clamp(max=1)
    close(clip_per_sample(model, 0.1), expected)
