"""What errors say to whoever makes a common mistake: the thing that is meant, by its name, and a way out that works when it is followed."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, leave_out, results, unextend
from backpack.custom_module.branching import Parallel
from backpack.extensions import GGNMP, HBP, HMP, KFAC, KFLR, KFRA, PCHMP, BatchGrad, DiagGGNExact, DiagHessian
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension, FirstOrderModuleExtension
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackpackError,
    BranchingError,
    LossNotExtendedError,
    LossValueError,
    MixedSamplesError,
    NotRecordedError,
    UnsupportedError,
)

N = 5
X, Y = torch.randn(N, 4), torch.arange(N) % 3


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def message(error: type[Exception], function: Callable[[], Any]) -> str:
    with pytest.raises(error) as info:
        function()
    return str(info.value)


def refusal(error: type[Exception], model: nn.Module, extension: BackpropExtension, loss: Callable[[Tensor], Tensor] | None = None) -> str:
    output = extend(model)(X)
    with backpack(extension):
        return message(error, (extend(nn.CrossEntropyLoss())(output, Y) if loss is None else loss(output)).backward)


# --- arguments --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [list, tuple])
def test_extensions_in_a_list(many: type) -> None:
    said = message(ArgumentError, lambda: backpack(many([BatchGrad(), KFAC()])))
    assert "backpack(*extensions)" in said
    backpack(*many([BatchGrad(), KFAC()]))


def test_what_is_extended() -> None:
    assert "torch.nn.Sequential" in message(ArgumentTypeError, lambda: extend([nn.Linear(4, 3), nn.Linear(3, 2)]))
    assert "the module itself" in message(ArgumentTypeError, lambda: extend(mlp().parameters()))
    assert "torch.nn.CrossEntropyLoss()" in message(ArgumentTypeError, lambda: extend(F.cross_entropy))


@pytest.mark.parametrize("arguments", [(nn.CrossEntropyLoss(),), (False, nn.CrossEntropyLoss())])
def test_one_module_at_a_time_is_extended(arguments: tuple) -> None:
    assert "model, lossfunc = extend(model), extend(lossfunc)" in message(ArgumentTypeError, lambda: extend(mlp(), *arguments))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_scripted_module(place: str) -> None:
    plain, scripted = mlp(), torch.jit.script(mlp())
    model = scripted if place == "outside" else nn.Sequential(plain, scripted)
    said = message(UnsupportedError, lambda: extend(model))
    assert "torch.jit.script" in said and ("1 (" in said) == (place == "inside")
    assert not any(child._forward_hooks for child in plain.modules())  # nothing is half extended


class Tilted(nn.Linear):
    """Has a parameter whose name, alone, is that of no other extended model."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.tilt = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.tilt


@pytest.mark.parametrize("name", ["0.wieght", "tilt", "head.weight", "zebra"])
def test_unknown_names_are_completed(name: str) -> None:
    gc.collect()  # models of other tests have names, too
    model = extend(nn.Sequential(mlp(), Tilted()))
    said = message(ArgumentError, lambda: KFAC(exclude=[name]).excluded())
    assert ('"*.tilt"' in said) == (name == "tilt")
    assert ('"0.weight"' in said or '"0.0.weight"' in said) >= (name == "0.wieght")
    assert "Did you mean" not in said or name != "zebra"
    if name == "tilt":
        with backpack(BatchGrad(exclude=["*.tilt"])):
            F.cross_entropy(model(X), Y).backward()
        assert {name for name, p in model.named_parameters() if not hasattr(p, "grad_batch")} == {"1.tilt"}


class OfLinear(FirstOrderModuleExtension):
    def weight(self, *_: Any) -> str:
        return "mine"


def test_entries_of_an_extension() -> None:
    entry, extension = OfLinear(["weight"]), BatchGrad()
    assert "OfLinear()" in message(ArgumentTypeError, lambda: extension.set_module_extension(nn.Linear, OfLinear))
    assert "nn.Linear" in message(ArgumentTypeError, lambda: extension.set_module_extension(nn.Linear(2, 2), entry))
    assert "'Linear'" in message(ArgumentTypeError, lambda: extension.set_module_extension("Linear", entry))
    assert "ModuleExtension" in message(ArgumentTypeError, lambda: FirstOrderBackpropExtension("mine", {nn.Linear: print}))
    assert not extension.has_module_exts
    extension.set_module_extension(nn.Linear, entry)


@pytest.mark.parametrize("base", [FirstOrderBackpropExtension, BackpropExtension])
def test_a_warning_advises_what_is_not_the_case_yet(base: type) -> None:
    made = type("Mine", (base,), {"expects_backpropagation_quantities": lambda _: False})("mine", {nn.Tanh: OfLinear()})
    model = extend(mlp())
    if made._fail_mode == "WARNING":
        with pytest.warns(UserWarning) as warned, backpack(made):
            F.cross_entropy(model(X), Y).backward()
        assert all("fail_mode='SILENT'" in str(one.message) for one in warned)
    else:
        said = refusal(NotImplementedError, model, made)
        assert "fail_mode='WARNING'" in said and "'SILENT'" in said


# --- the loss ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("curve", [lambda loss: loss**2, torch.sqrt], ids=["square", "root"])
def test_loss_that_was_transformed(curve: Callable, functional: bool) -> None:
    """An operation is not taken for the loss; the products that are advised exist."""
    model, lossfunc = mlp(), F.mse_loss if functional else extend(nn.MSELoss())
    said = refusal(LossValueError, model, KFAC(), lambda out: curve(lossfunc(out, torch.ones(N, 3))))
    name = said.split()[0]
    assert name in {"PowBackward0", "SqrtBackward0"} and said.count(name) == 1 and "backpack.hessianfree" in said
    parameters = list(model.parameters())
    hessian_vector_product(curve(lossfunc(model(X), torch.ones(N, 3))), parameters, [torch.ones_like(p) for p in parameters])


def test_losses_that_are_multiplied_in_a_tensor() -> None:
    def written(out: Tensor) -> Tensor:
        losses = torch.zeros(N)
        for i in range(N):
            losses[i] = F.cross_entropy(out[i : i + 1], Y[i : i + 1])
            losses[i] *= losses[i].clone()
        return losses.mean()

    assert "torch.stack" in refusal(LossValueError, mlp(), DiagGGNExact(), written)
    model = extend(mlp())
    with backpack(DiagGGNExact()):
        torch.stack([F.cross_entropy(row, y) for row, y in zip(model(X).split(1), Y.split(1), strict=True)]).mean().backward()


def test_negative_loss() -> None:
    said = refusal(LossValueError, mlp(), DiagGGNExact(), lambda out: -extend(nn.CrossEntropyLoss())(out, Y))
    assert "DiagHessian" in said
    model = extend(mlp())
    with backpack(DiagHessian()):
        (-extend(nn.CrossEntropyLoss())(model(X), Y)).backward()


class Hinge(nn.Module):
    """A loss that torch does not have."""

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (1 - scores.gather(1, labels[:, None])).relu().square().mean()


def test_loss_written_by_hand() -> None:
    model, hinge = extend(mlp()), Hinge()
    assert "a loss written by hand" in refusal(LossNotExtendedError, model, DiagGGNExact(), lambda out: hinge.forward(out, Y))
    with backpack(DiagGGNExact(), BatchGrad()):
        extend(hinge)(model(X), Y).backward()
    assert all(hasattr(p, "diag_ggn_exact") for p in model.parameters())


def test_both_sides_of_a_loss_depend_on_parameters() -> None:
    model, zeros = extend(mlp()), torch.zeros(N, 3)
    assert "difference of two" in refusal(LossValueError, model, DiagGGNExact(), lambda out: F.mse_loss(out, model(2 * X)))
    with backpack(DiagGGNExact()):
        F.mse_loss(model(X) - model(2 * X), zeros).backward()
    weight = model[2].weight
    inner = torch.tanh(model[0](X)) - torch.tanh(model[0](2 * X))
    torch.testing.assert_close(weight.diag_ggn_exact, (2 / zeros.numel() * inner.square().sum(0)).expand(3, -1))


class Uncertain(nn.Module):
    """Learns how much two losses count."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_variances = mlp(), nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("weigh", [lambda losses, v: (-v).exp() * losses, lambda losses, v: losses / v.exp()], ids=["product", "quotient"])
@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_learned_weights_of_losses(extended: bool, weigh: Callable[[Tensor, Tensor], Tensor], penalty: float) -> None:
    """Nothing but the weights has to be left out: the rest is what it is for constant ones."""
    terms = [extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())] if extended else [F.cross_entropy, F.mse_loss]
    model = extend(Uncertain())

    def backward(weights: Tensor, **options: object) -> None:
        out = model(X)
        with backpack(DiagGGNExact(**options), KFAC(mc_samples=2, **options)):
            losses = torch.stack([terms[0](out, Y), terms[1](out, torch.ones_like(out))])
            (weigh(losses, weights) + penalty * weights).sum().backward()

    with pytest.raises(LossValueError, match="a loss is multiplied by what depends on them") as error:
        backward(model.log_variances)
    assert 'exclude=["log_variances"]' in str(error.value) and "net." not in str(error.value)
    assert "belongs to no sample" not in str(error.value)
    backward(model.log_variances, exclude=["log_variances"])
    found = [p.diag_ggn_exact for p in model.net.parameters()]
    backward(model.log_variances.detach())
    for one, other in zip(found, model.net.parameters(), strict=True):
        torch.testing.assert_close(one, other.diag_ggn_exact)


def test_mini_batches_of_different_size() -> None:
    model = extend(mlp())
    parts = [(X[:2], Y[:2]), (X[2:], Y[2:])]
    with backpack(BatchGrad()):
        said = message(UnsupportedError, sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in parts).backward)
    assert "accumulate=True" in said
    with backpack(BatchGrad(), accumulate=True):
        for x, y in parts:
            F.cross_entropy(model(x), y, reduction="sum").backward()
    gradient = torch.autograd.grad(F.cross_entropy(model(X[3:4]), Y[3:4]), [model[2].weight])[0]
    torch.testing.assert_close(model[2].weight.grad_batch[3], gradient)


# --- the model --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", [KFRA, GGNMP])
def test_rules_that_do_not_hold_under_autocast(extension: type) -> None:
    model = extend(mlp())
    with torch.autocast("cpu", torch.bfloat16):
        loss = extend(nn.CrossEntropyLoss())(model(X), Y)
    with backpack(extension()):
        said = message(BranchingError, loss.backward)
    assert "autocast" in said and "axis 0" not in said


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_nothing_is_extended(extension: type) -> None:
    """A warning, as other models may be trained under a context as well; it shows the user's line, and is not given for products by hand."""
    model = mlp()
    with backpack(extension()):
        with pytest.warns(UserWarning, match=r"none of the 4 parameters.*extend\(model\)") as warned:
            F.cross_entropy(model(X), Y).backward()
        torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()))
        F.cross_entropy(extend(model)(X), Y).backward()
        F.cross_entropy(torch.zeros(N, 3, requires_grad=True), Y).backward()
        F.cross_entropy(unextend(extend(mlp()))(X), Y).backward()
    assert [one.filename for one in warned] == [__file__]
    assert all(hasattr(p, extension().savefield) for p in model.parameters())


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_penalty_with_a_pass_of_its_own(extension: type) -> None:
    model = extend(mlp())

    def penalty() -> Tensor:
        return 0.01 * model[0].weight.square().sum() + model[2].weight.norm()

    with backpack(extension()):
        F.cross_entropy(model(X), Y).backward()
        found = results(model)
        leave_out(penalty()).backward()
        assert results(model) == found
        said = message(NotRecordedError, penalty().backward)
    assert said.startswith("0.weight, 2.weight: backward was called on what is made of parameters alone")
    assert "leave_out(penalty).backward()" in said


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize(("call", "cause"), [(lambda layer: layer.forward(X), "model.forward"), (lambda layer: torch.vmap(layer)(X), "torch.vmap")])
def test_calls_that_pass_hooks_by(call: Callable[[nn.Module], Tensor], cause: str, extension: type) -> None:
    layer = extend(nn.Linear(4, 3))
    with backpack(extension()):
        said = message(NotRecordedError, F.cross_entropy(call(layer), Y).backward)
    assert cause in said
    assert "as model(X) of the whole mini-batch" in said


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_what_is_trained_lies_around_what_is_extended(extension: type) -> None:
    """Of a frozen model that is extended, behind a prompt or another model, nothing is computed either."""
    model, prompt = extend(mlp()).requires_grad_(False), nn.Linear(4, 4)
    with backpack(extension()):
        with pytest.warns(UserWarning, match=r"none of the 2 parameters.*the whole model"):
            F.cross_entropy(model(prompt(X)), Y).backward()
        F.cross_entropy(model(unextend(extend(nn.Linear(4, 4)))(X)), Y).backward()
        F.cross_entropy(model(X.clone().requires_grad_()), Y).backward()
    assert results(prompt) == results(model) == {}


class ComplexFactor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.factor).real


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_complex_parameters_can_be_left_out(extension: type) -> None:
    model, plain = ComplexFactor(), ComplexFactor()
    plain.load_state_dict(model.state_dict())
    assert 'exclude=["factor"]' in refusal(UnsupportedError, model, extension())
    plain.factor.requires_grad_(False)
    for net, left_out in ((model, ["factor"]), (plain, [])):
        with backpack(extension(exclude=left_out)):
            F.cross_entropy(extend(net)(X), Y).backward()
    field = extension().savefield
    torch.testing.assert_close(getattr(model.layer.weight, field), getattr(plain.layer.weight, field))
    assert not hasattr(model.factor, field)


@pytest.mark.parametrize("extension", [KFRA, GGNMP])
def test_branches(extension: type) -> None:
    """Modules for everything do not help where the graph branches, which is said; what is advised works."""
    model = nn.Sequential(Parallel(nn.Linear(4, 3), nn.Linear(4, 3)), nn.Linear(3, 3))
    said = refusal(BranchingError, model, extension())
    assert "several inputs" in said and "without branches" in said and "KFLR" in said
    with backpack(KFLR(), DiagGGNExact()):
        F.cross_entropy(model(X), Y).backward()


def test_names_come_in_the_order_of_the_model() -> None:
    """Not in that in which nodes of the graph were visited, which differs from run to run."""
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 3))
    with backpack(KFAC()), pytest.raises(LossNotExtendedError) as info:
        extend(model)(X).exp().mean().backward()
    assert list(info.value.about.values()) == [name for name, _ in model.named_parameters()]


class Shifted(nn.Module):
    """Element-wise, but nobody has said so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square() + x


@pytest.mark.parametrize("make", [PCHMP, lambda: HBP("hessian", "sum", "average", "E[J^T E(H) J]")], ids=["PCHMP", "HBP"])
def test_module_that_may_be_element_wise(make: Callable[[], BackpropExtension]) -> None:
    """Of a module without a rule it is not said that its second derivative is dense."""
    for layer, hint in ((Shifted(), "backpack.register(Shifted, "), (nn.Softmax(1), "1 has a dense second derivative")):
        said = refusal(BackpackError, nn.Sequential(nn.Linear(4, 3), layer, nn.Linear(3, 3)), make())
        assert hint in said
        assert ("dense" in said) == isinstance(layer, nn.Softmax)


class Words(nn.Module):
    """Returns a row for each word, merged with those of other samples, or not."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.head, self.merged = nn.Linear(1, 3), merged

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x.unsqueeze(2))
        return out.reshape(-1, 3) if self.merged else out


def test_samples_merged_with_positions() -> None:
    """What is advised works."""
    words = torch.arange(X.numel()) % 3
    said = refusal(MixedSamplesError, Words(True), BatchGrad(), lambda out: F.cross_entropy(out, words))
    assert "return [N, T, C], and reshape in the call of the loss" in said and "LayerNorm" not in said
    model = extend(Words(False))
    with backpack(BatchGrad()):
        F.cross_entropy(model(X).reshape(-1, 3), words).backward()
    assert len(model.head.weight.grad_batch) == N


class Compares(nn.Module):
    """Returns rows, or the loss that compares each of them with each."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.body, self.inside = nn.Linear(4, 3), inside

    def forward(self, x: Tensor) -> Tensor:
        rows = self.body(x)
        return contrast(rows) if self.inside else rows


def contrast(rows: Tensor) -> Tensor:
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def cosines(rows: Tensor) -> Tensor:
    logits, numbers = rows @ torch.roll(rows, 1, 1).T, torch.arange(len(rows))
    return F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)


@pytest.mark.parametrize(
    ("inside", "extension", "loss"), [(True, BatchGrad, torch.clone), (False, DiagGGNExact, contrast), (False, DiagGGNExact, cosines)]
)
def test_losses_that_compare_samples(inside: bool, extension: type, loss: Callable) -> None:
    """What is advised works."""
    said = refusal(BackpackError, Compares(inside), extension(), loss)
    assert "first-order quantities only" in said and "let the model return these, and compute the loss of them outside" in said
    model = extend(Compares(False))
    with backpack(BatchGrad()):
        contrast(model(X)).backward()
    torch.testing.assert_close(model.body.weight.grad_batch.sum(0), model.body.weight.grad)


class Warped(nn.Module):
    """Aligns two letters with four steps in time."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        steps, lengths = prediction[:, None, :].expand(-1, 4, -1).transpose(0, 1).log_softmax(2), torch.full((len(target),), 4)
        return F.ctc_loss(steps, target, lengths, lengths // 2)


class Likelihood(nn.Module):
    """Cox' partial likelihood: of each sample among those that are left."""

    def forward(self, risk: Tensor, _: Tensor) -> Tensor:
        return (risk.logcumsumexp(0) - risk).mean()


@pytest.mark.parametrize(
    ("lossfunc", "target", "reason"), [(Warped(), torch.ones(N, 2).long(), "is not implemented"), (Likelihood(), Y, "couples entries")]
)
def test_losses_without_curvature(lossfunc: nn.Module, target: Tensor, reason: str) -> None:
    """What is advised works."""
    said = refusal(BackpackError, mlp(), DiagGGNExact(), lambda out: extend(lossfunc)(out, target))
    assert reason in said and re.search("First-order quantities.* take any loss", said, re.IGNORECASE)
    model = extend(mlp())
    with backpack(BatchGrad()):
        lossfunc(model(X), target).backward()
    torch.testing.assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)


class Steps(nn.Module):
    """Takes and returns steps on axis 0, or on axis 1."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(2, 4, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])


def test_steps_on_the_first_axis() -> None:
    """What is advised works."""
    model, x = extend(Steps(batch_first=False)), torch.randn(6, 5, 2)
    with backpack(BatchGrad()):
        said = message(UnsupportedError, model(x).square().sum().backward)
    assert "axis 0 of a tensor" in said and "and in another order for another one" in said and "set batch_first=True" in said
    model = extend(Steps(batch_first=True))
    with backpack(BatchGrad()):
        model(x.transpose(0, 1)).square().sum().backward()
    assert len(model.head.weight.grad_batch) == x.shape[1]


@pytest.mark.parametrize("encoder", [False, True])
def test_samples_that_attend_to_one_another(encoder: bool) -> None:
    """Attention that takes samples from axis 1 is named, and what is advised works."""

    class Attends(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.body = (
                nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)
                if encoder
                else nn.MultiheadAttention(4, 2, batch_first=batch_first)
            )
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.body(x) if encoder else self.body(x, x, x)[0]).mean(1))

    x, name = torch.randn(6, 5, 4), r"body.self_attn" if encoder else "body"
    model = extend(Attends(batch_first=False))
    with backpack(BatchGrad()):
        said = message(MixedSamplesError, model(x).square().sum().backward)
    assert f"{name} (MultiheadAttention) takes its samples from axis 1" in said and "give it batch_first=True" in said
    model = extend(Attends(batch_first=True))
    with backpack(BatchGrad()):
        model(x).square().sum().backward()
    assert len(model.head.weight.grad_batch) == len(x)


class Functional(nn.Module):
    """Calls its first layer as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.first.weight, self.first.bias).tanh())


def test_refusals_name_extensions_that_read_modules_only() -> None:
    """What works alone is refused beside them, also where they leave the parameter out."""
    model, x, y = extend(Functional()), torch.randn(2, 3), torch.tensor([0, 3])
    beside = (KFAC(), HMP(exclude=["first"]))
    for others, expected in (((KFAC(),), None), (beside, "first.weight.*a context without HMP"), ((HMP(),), "^((?!without HMP).)*$")):
        with backpack(*others), nullcontext() if expected is None else pytest.raises(UnsupportedError, match=expected):
            F.cross_entropy(model(x), y).backward()


class Product(nn.Module):
    """A layer of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_factors_do_not_depend_on_what_else_is_computed() -> None:
    """Beside products, what a module of one's own computes is not read: its weight would have one factor instead of two."""
    model, x, y = extend(nn.Sequential(Product(), nn.Tanh(), nn.Linear(5, 4))), torch.randn(2, 3), torch.tensor([0, 3])
    lossfunc = extend(nn.CrossEntropyLoss())
    for others in ((), (BatchGrad(),), (DiagHessian(),)):
        with backpack(KFLR(), *others):
            lossfunc(model(x), y).backward()
        assert [len(factor) for factor in model[0].weight.kflr] == [5, 3]
    with backpack(KFLR(), GGNMP()), pytest.raises(UnsupportedError, match=r"kflr: 0.weight of shape \[5, 3\].*a context without GGNMP"):
        lossfunc(model(x), y).backward()
