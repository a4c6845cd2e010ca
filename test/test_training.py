"""Other doors of autograd, and hooks that change gradients: what quantities are then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Oracle, Problem
from test_extensions import close, sum_batch
from test_front_door import FIELDS, N, Net, Tied, build, chain, check, check_step, extended, loss_of, results, truth, values
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss, Linear, Module, Parameter, Sequential
from torch.nn import functional as F
from torch.nn.utils import parametrize

from backpack import backpack, clear, extend
from backpack.extensions import GGNMP, HMP, KFLR, KFRA, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, SumGradSquared, Variance
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.errors import BackpackError, MixedSamplesError

EXACT = ("grad_batch", "batch_l2", "variance", "diag_ggn_exact")


class Functional(Module):
    """A matrix used twice, once turned around, a norm, and an operation that nothing but the graph knows."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm, self.head = Parameter(torch.randn(4, 4)), nn.LayerNorm(4), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(F.linear(torch.tanh(x @ self.matrix), self.matrix) + x.sin()))


# --- what autograd saves ----------------------------------------------------------------------------------------------------------------------

SAVING: dict[str, Callable[[], Any]] = {
    "on the CPU": torch.autograd.graph.save_on_cpu,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda packed: packed[0]),
    "mutation allowed": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.parametrize("make", [chain, Net, Tied, Functional])
@pytest.mark.parametrize(
    ("saving", "around"),
    # torch gives the tensors back at the end of the context that allows mutations
    [(saving, around) for saving in SAVING for around in ("forward", "both") if (saving, around) != ("mutation allowed", "forward")],
)
def test_hooks_on_saved_tensors(saving: str, make: Callable[[], Module], around: str) -> None:
    problem = extended(make)
    exts = (BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact(), DiagHessian())
    with SAVING[saving]():
        loss = loss_of(problem)
        if around == "both":
            with backpack(*exts):
                loss.backward()
    if around == "forward":
        with backpack(*exts):
            loss.backward()
    check(problem.model, *EXACT, make=make)
    for name, value in sum_batch(truth(make).diag_h_batch).items():
        close(problem.model.get_parameter(name).diag_h, value)


# --- several passes ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chain, Net, Tied, Functional])
def test_several_forward_passes_before_one_backward_pass(make: Callable[[], Module]) -> None:
    """Each graph has its own records: the first is not that of the last forward pass, whatever was called in between."""
    problem, other = extended(make), torch.randn(2 * N, 4, dtype=torch.float64)
    first = loss_of(problem)
    unused = problem.losses[0](problem.model(other), torch.zeros(2 * N, dtype=torch.int64))
    with torch.no_grad():
        problem.model(other)
    with backpack(BatchGrad(), DiagGGNExact()):
        first.backward()
    check(problem.model, "grad_batch", "diag_ggn_exact", make=make)
    del unused


@pytest.mark.parametrize("make", [chain, Net])
def test_sum_of_losses_of_two_forward_passes(make: Callable[[], Module]) -> None:
    """Equally large mini-batches in one backward pass: samples are added in pairs, for which .grad is the witness; uneven ones are refused."""
    problem = extended(make)
    with backpack(BatchGrad()):
        (loss_of(problem) + loss_of(problem)).backward()
    for name, value in values(problem.model, "grad_batch").items():
        close(value, 2 * FIELDS["grad_batch"](Oracle(build(make)))[name])
        close(value.sum(0), problem.model.get_parameter(name).grad)
    clear(problem.model)
    problem.model.zero_grad()
    few = problem.losses[0](problem.model(problem.x[:2]), problem.terms[0].target[:2])
    with pytest.raises(NotImplementedError, match=f"mini-batches of ({N} and of 2|2 and of {N}) samples"), backpack(BatchGrad()):
        (loss_of(problem) + few).backward()
    assert results(problem.model) == {}
    check_step(problem, make)


def test_losses_of_some_samples_beside_one_of_all() -> None:
    """Heads that are given features of all samples, and of some: rows of the one are not those of the other."""

    class Heads(Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.all, self.some = Linear(4, 3), Linear(3, 3), Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).tanh()
            return self.all(h), self.some(h[:2])

    model, lossfunc = extend(Heads()), extend(CrossEntropyLoss())
    y = torch.zeros(4, dtype=torch.long)
    of_all, of_some = model(torch.rand(4, 4))
    message = r"Mini-batches of (4 and of 2|2 and of 4) samples meet.*body\.weight, body\.bias are ambiguous"
    with pytest.raises(NotImplementedError, match=message), backpack(BatchGrad()):
        (lossfunc(of_all, y) + lossfunc(of_some, y[:2])).backward()
    assert results(model) == {}


# --- parameters that are not the model's own --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda p: p.detach().clone().requires_grad_(), lambda p: Parameter(p.detach().clone())], ids=["tensor", "Parameter"]
)
@pytest.mark.parametrize("extension", [BatchGrad, Variance, DiagGGNExact, KFLR, HMP])
def test_functional_call_with_other_leaves(extension: type, wrap: Callable[[Tensor], Tensor]) -> None:
    """They are no parameters of an extended model: refused, in words, not left without quantities."""
    problem = extended()
    others = {name: wrap(p.detach().clone()) for name, p in problem.model.named_parameters()}
    loss = problem.losses[0](torch.func.functional_call(problem.model, others, (problem.x,)), problem.terms[0].target)
    with pytest.raises(BackpackError, match="functional_call"), backpack(extension()):
        loss.backward()
    assert results(problem.model) == {}
    assert all(not vars(other) and other.grad is None for other in others.values())
    check_step(problem)


def test_functional_call_with_functions_of_parameters() -> None:
    """Then it is the model's own parameters that matter."""
    problem = extended()
    same = {name: p * 1 for name, p in problem.model.named_parameters()}
    loss = problem.losses[0](torch.func.functional_call(problem.model, same, (problem.x,)), problem.terms[0].target)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    check(problem.model, "grad_batch", "diag_ggn_exact")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("active", [BatchGrad, DiagGGNExact])
def test_functional_call_with_adapted_weights(active: Callable, inside: bool) -> None:
    """After a step of an inner loop, samples of one loop influence those of the other, unless the step is a constant."""

    def loss(create_graph: bool) -> Tensor:
        lossfunc, target, named = problem.losses[0], problem.terms[0].target, dict(problem.model.named_parameters())
        gradients = torch.autograd.grad(lossfunc(problem.model(problem.x), target), named.values(), create_graph=create_graph)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
        return lossfunc(torch.func.functional_call(problem.model, adapted, (problem.x,)), target)

    problem = extended()
    outside = None if inside else loss(True)
    with pytest.raises(MixedSamplesError, match=r"computed.*inner loop.*without create_graph.*exclude="), backpack(active()):
        (loss(True) if inside else outside).backward()
    with backpack(active()):
        loss(False).backward()
    assert active().savefield in results(problem.model)["0.weight"]


def test_functional_call_without_gradients() -> None:
    problem = extended()
    constant = {name: p.detach() for name, p in problem.model.named_parameters()}
    x = problem.x.clone().requires_grad_()
    with backpack(BatchGrad()):
        problem.losses[0](torch.func.functional_call(problem.model, constant, (x,)), problem.terms[0].target).backward()
    assert results(problem.model) == {}
    assert x.grad is not None


@pytest.mark.parametrize("active", [BatchGrad, DiagGGNExact])
def test_functional_call_with_what_other_leaves_make(active: Callable) -> None:
    """It is an input as any other; results of an earlier context are deleted, as they would look like those of this pass."""
    problem = extended()
    check_step(problem)
    direction = torch.ones((), dtype=torch.float64, requires_grad=True)
    moved = {name: p.detach() + direction * torch.ones_like(p) for name, p in problem.model.named_parameters()}
    with backpack(active()):
        problem.losses[0](torch.func.functional_call(problem.model, moved, (problem.x,)), problem.terms[0].target).backward()
    assert direction.grad is not None
    field = active().savefield
    assert not any(field in fields for fields in results(problem.model).values())


# --- hooks that change gradients --------------------------------------------------------------------------------------------------------------


def on_output(change: Callable[[Tensor], Tensor]) -> Callable[[Module], Any]:
    return lambda model: model[1].register_forward_hook(lambda m, args, out: out.register_hook(change) and None)


def triple(g: Tensor) -> Tensor:
    return 3 * g


def clip(g: Tensor) -> Tensor:
    return g / g.norm(dim=1, keepdim=True).clamp_min(0.01)


def limit(g: Tensor) -> Tensor:
    return g.clamp(-0.01, 0.01)


# what installs the hook, and how it changes the gradient at the output of the activation
INNER: dict[str, tuple[Callable[[Module], Any], Callable[[Tensor], Tensor]]] = {
    "tensor": (on_output(triple), triple),
    "tensor, each sample clipped": (on_output(clip), clip),
    "reversed": (on_output(torch.neg), torch.neg),
    "module": (lambda model: model[1].register_full_backward_hook(lambda m, g_inp, g_out: (2 * g_inp[0],)), torch.clone),
    "module, before": (lambda model: model[1].register_full_backward_pre_hook(lambda m, g_out: (limit(g_out[0]),)), limit),
    "node": (
        lambda model: model[1].register_forward_hook(lambda m, args, out: out.grad_fn.register_prehook(lambda g: (triple(*g),)) and None),
        triple,
    ),
}


class Squared(Module):
    """Has no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().square()


@pytest.mark.parametrize("extension", [KFRA(), GGNMP(), HMP()], ids=lambda extension: type(extension).__name__)
def test_forward_hooks_of_a_module_that_runs_again(extension: BackpropExtension) -> None:
    """They are called again, as part of it; not so after they were removed. What has no rule is not run again for other quantities."""
    torch.manual_seed(0)
    model, lossfunc, x, y = (
        Sequential(Linear(4, 4), Squared(), Linear(4, 3)).double(),
        CrossEntropyLoss(),
        torch.rand(5, 4).double(),
        torch.arange(5) % 3,
    )
    extend(model), extend(lossfunc)
    calls = []
    for used, removed in ((BatchGrad(), False), (DiagGGNExact(), False), (extension, False), (extension, True)):
        seen: list[Tensor] = []
        handle = model[1].register_forward_hook(lambda m, args, out, seen=seen: seen.append(out))
        loss = lossfunc(model(x), y)
        if removed:
            handle.remove()
        with backpack(used):
            loss.backward()
        if callable(product := getattr(model[0].weight, used.savefield)):
            product(torch.ones(1, 4, 4).double())
        handle.remove()
        calls.append(len(seen))
    assert calls[0] == calls[1] == calls[3] == 1 < calls[2]


def residual_of_activation(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What the second derivative of the one activation adds to the diagonal of the Hessian, for a changed gradient at its output."""
    problem = build()
    before = problem.model[0](problem.x)
    after = torch.tanh(before)
    (g,) = torch.autograd.grad(problem.loss([problem.model[2](after)]), after)
    terms = (change(g) * (-2 * after * (1 - after.square()))).detach()
    zeros = {name: torch.zeros_like(p) for name, p in problem.model.named_parameters()}
    return zeros | {"0.weight": terms.T @ problem.x.square(), "0.bias": terms.sum(0)}


@pytest.mark.parametrize("change", INNER)
def test_hooks_inside_change_what_is_made_of_gradients(change: str) -> None:
    """First-order quantities, and the Hessian's terms of curved operations; the rest of curvature is that of what the forward pass has computed."""
    problem = extended()
    INNER[change][0](problem.model)
    with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), DiagGGNExact(), DiagHessian()):
        loss_of(problem).backward()
    oracle, residual = Oracle(build()), residual_of_activation(INNER[change][1])
    diagonal = FIELDS["diag_ggn_exact"](oracle)
    for name, value in residual_of_activation(torch.clone).items():
        close(diagonal[name] + value, oracle.diag_h_batch[name].sum(0))
    for name, p in problem.model.named_parameters():
        close(p.grad_batch.sum(0), p.grad)
        close(p.batch_l2, p.grad_batch.flatten(1).square().sum(1))
        close(p.sum_grad_squared, p.grad_batch.square().sum(0))
        close(p.variance, p.grad_batch.var(0, correction=0), 1e-8)
        close(p.diag_h, diagonal[name] + residual[name])
    check(problem.model, "diag_ggn_exact")


def test_hooks_on_the_output_of_the_model() -> None:
    """They lie downstream of all curved operations but the loss; also for products."""
    problem = extended()
    with backpack(DiagHessian(), HMP()):
        outputs = problem.outputs()
        outputs[0].register_hook(triple)
        problem.loss(outputs).backward()
    diagonal, residual = FIELDS["diag_ggn_exact"](Oracle(build())), residual_of_activation(triple)
    for name, p in problem.model.named_parameters():
        close(p.diag_h, diagonal[name] + residual[name])
        units = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        close(p.hmp(units).detach().reshape(p.numel(), -1).diagonal().reshape(p.shape), diagonal[name] + residual[name])


def test_hooks_on_the_loss_scale_it() -> None:
    problem = extended()
    with backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), KFLR()):
        loss = loss_of(problem)
        loss.register_hook(triple)
        loss.backward()
    oracle = Oracle(build())
    for name, p in problem.model.named_parameters():
        close(p.grad_batch, 3 * oracle.grad_batch[name])
        close(p.diag_ggn_exact, 3 * FIELDS["diag_ggn_exact"](oracle)[name])
        close(p.diag_h, 3 * oracle.diag_h_batch[name].sum(0))
    for name, factors in oracle.kronecker(oracle.hessian_exact).items():
        close(problem.model.get_parameter(name).kflr[0], 3 * factors[0])


def accumulate_node(parameter: Parameter) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def _times_five(parameter: Parameter) -> None:
    parameter.grad.mul_(5)


kept: list[Any] = []
AT_PARAMETERS: dict[str, Callable[[Parameter], Any]] = {
    "tensor": lambda p: p.register_hook(lambda g: 5 * g),
    "after accumulation": lambda p: p.register_post_accumulate_grad_hook(_times_five),
    "node, before": lambda p: kept.append(accumulate_node(p)) or kept[-1].register_prehook(lambda g: (5 * g[0],)),
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("where", AT_PARAMETERS)
def test_hooks_of_parameters_change_nothing_but_grad(where: str, alone: bool) -> None:
    """They act on a sum over samples, of which quantities are taken before."""
    problem = extended()
    for p in problem.model.parameters():
        AT_PARAMETERS[where](p)
    with backpack(Variance()) if alone else backpack(BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact()):
        loss_of(problem).backward()
    check(problem.model, *(("variance",) if alone else EXACT))
    for name, p in problem.model.named_parameters():
        close(p.grad, 5 * Oracle(build()).grad[name])
    kept.clear()


class Doubled(Module):
    """A parametrization, with a hook on the tensor that it makes."""

    def forward(self, weight: Tensor) -> Tensor:
        weight = 2 * weight
        if weight.requires_grad:
            weight.register_hook(lambda g: 5 * g)
        return weight


def test_hooks_between_a_parameter_and_its_layer_count_as_the_parameters() -> None:
    """What is computed from parameters alone has no samples: hooks there see a sum, too."""

    def make() -> Module:
        model = Sequential(Linear(4, 5), nn.Tanh(), Linear(5, 3))
        parametrize.register_parametrization(model[0], "weight", Doubled())
        return model

    def problem_without_hook() -> Problem:
        problem = build(make)
        problem.model[0].parametrizations.weight[0].forward = lambda weight: 2 * weight
        return problem

    problem = extended(make)
    with backpack(BatchGrad(), Variance(), DiagGGNExact()):
        loss_of(problem).backward()
    oracle, name = Oracle(problem_without_hook()), "0.parametrizations.weight.original"
    for field in ("grad_batch", "variance", "diag_ggn_exact"):
        close(getattr(problem.model.get_parameter(name), field), FIELDS[field](oracle)[name])
    close(problem.model.get_parameter(name).grad, 5 * oracle.grad[name])


# --- vectors in place of a loss ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[1.0] * N, [0.0, 2.0, -1.0, 0.5, 3.0, 1.0]])
@pytest.mark.parametrize("make", [chain, Net, Functional])
def test_gradient_of_a_vector(make: Callable[[], Module], weights: list[float]) -> None:
    """``backward(gradient=...)`` of one loss a sample: first order, each sample with its weight, also negative ones and zero."""
    problem, vector = extended(make), torch.tensor(weights, dtype=torch.float64)
    losses = F.cross_entropy(problem.model(problem.x), problem.terms[0].target, reduction="none")
    with backpack(BatchGrad(), Variance()):
        losses.backward(gradient=vector)
    for name, expected in FIELDS["grad_batch"](Oracle(build(make))).items():
        value = problem.model.get_parameter(name)
        rows = N * expected * vector.reshape(-1, *[1] * (expected.dim() - 1))  # the oracle's is the mean
        close(value.grad_batch, rows)
        assert (value.variance - rows.var(0, correction=0)).abs().amax() <= 1e-9 * rows.square().mean(0).amax() + 1e-14
        close(value.grad_batch.sum(0), value.grad)


def test_several_roots() -> None:
    """``torch.autograd.backward`` of two tensors at once is that of their sum."""
    problem = extended(Net)
    output = problem.model(problem.x)
    with backpack(BatchGrad()):
        torch.autograd.backward([output[:, 0].sum(), output[:, 1]], [None, torch.full((N,), 2.0, dtype=torch.float64)])
    oracle = Oracle(build(Net))
    for name, value in values(problem.model, "grad_batch").items():
        close(value.flatten(1), oracle.jac[name][:, 0] + 2 * oracle.jac[name][:, 1])


def test_root_as_an_edge_of_the_graph() -> None:
    """Torch differentiates from where a tensor comes from, without the tensor; so do we."""
    problem = extended()
    loss = loss_of(problem)
    edge = torch.autograd.graph.get_gradient_edge(loss)
    with backpack(BatchGrad()):
        torch.autograd.grad(edge, list(problem.model.parameters()), torch.ones_like(loss))
    check(problem.model, "grad_batch")


# --- found by random models -------------------------------------------------------------------------------------------------------------------


class BiasOnly(Module):
    """Of the first layer, called as a function on data, only the bias is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.head = Parameter(torch.randn(5, 4), requires_grad=False), Parameter(torch.randn(5)), Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(x, self.weight, self.bias)))


class BiasOnlyOfPositions(BiasOnly):
    """The same with two positions a sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.stack([x, x.sin()], 1)).sum(1)


@pytest.mark.parametrize("make", [BiasOnly, BiasOnlyOfPositions])
def test_bias_of_a_function_whose_weight_is_frozen(make: Callable[[], Module]) -> None:
    """Its node has saved nothing, neither input nor weight."""
    problem = extended(make)
    with backpack(BatchGrad(), BatchL2Grad(), Variance(), DiagGGNExact(), KFLR()):
        loss_of(problem).backward()
    check(problem.model, *EXACT, make=make)
    oracle = Oracle(build(make))
    (block,) = problem.model.bias.kflr
    close(block, oracle.ggn_blocks(oracle.hessian_exact)["bias"])
    clear(problem.model)
    problem.model.zero_grad()
    check_step(problem, make)
