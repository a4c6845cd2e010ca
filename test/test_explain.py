"""What ``explain`` says before a run is what the run does, on every row of the table and on models of the hub."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import models_hub  # noqa: F401  adds its rows
import pytest
import torch
from cases import CASES
from models import MODELS
from oracle import Problem, Term
from table import regress
from test_exclude import arguments_in
from test_extensions import QUANTITIES
from test_models import fresh
from torch import Tensor
from torch.nn import LSTM, BatchNorm1d, CrossEntropyLoss, Dropout, Linear, Module, MSELoss, Parameter, ReLU, Sequential, Tanh
from torch.nn.functional import cross_entropy, linear, mse_loss

from backpack import backpack, explain, extend, results, unextend
from backpack.core.recording import recorder_of
from backpack.explaining import explain_loss
from backpack.explanation import Explanation, Verdict
from backpack.extensions import HMP, KFAC, KFLR, KFRA, BatchGrad, DiagGGNExact, DiagGGNMC
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.collector import Collector
from backpack.utils.errors import ArgumentError, BackpackError


def told(problem: Problem, extension: BackpropExtension) -> Explanation:
    """Explain a problem, whose output and losses may be more than a call."""
    for module in (problem.model, *problem.losses):
        extend(module)
    return explain_loss(problem.model, problem.loss(problem.outputs()), [extension])


def outcome(problem: Problem, extension: BackpropExtension) -> dict[str, Any] | None:
    """Run a problem; return what it wrote, ``None`` if it was refused."""
    for module in (problem.model, *problem.losses):
        extend(module)
    try:
        with backpack(extension):
            problem.loss(problem.outputs()).backward()
    except (BackpackError, NotImplementedError):
        return None
    return {name: values[extension.savefield] for name, values in results(problem.model).items() if extension.savefield in values}


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from tensors(part)


def check(make: Callable[[], Problem], extension: Callable[..., BackpropExtension]) -> None:
    """Refused is refused; what is not refused is there, in the size that was told; and without the refused, all others are there."""
    explanation = told(make(), extension())
    rows = {row.parameter: row for row in explanation.rows}
    refused, found = [row.parameter for row in explanation.refused], outcome(make(), extension())
    assert (found is None) == bool(refused), [row.reason for row in explanation.refused]
    if refused:
        problem = make()
        found = outcome(problem, extension().leaving_out(p for name, p in problem.model.named_parameters() if name in refused))
        assert found is not None
    there = {name for name, row in rows.items() if row.verdict not in {Verdict.REFUSED, Verdict.NO_GRADIENT}}
    assert set(found) == there
    for name, value in found.items():
        if not callable(value):
            assert rows[name].result == tuple(part.shape for part in tensors(value))
            assert rows[name].bytes == sum(part.numel() * part.element_size() for part in tensors(value))
    assert explanation.quantities[0].cost >= 1


NAMES = list(QUANTITIES)


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)))
def test_a_run_does_what_was_told(number: int, case: str) -> None:
    """One extension a case, in turn."""
    name = NAMES[number % len(NAMES)]
    check(lambda: CASES[case].build(QUANTITIES[name].batches[-1]), QUANTITIES[name].make)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_all_runs_do_what_was_told(case: str, batch: int) -> None:
    """Every extension on every case."""
    for quantity in QUANTITIES.values():
        if batch in quantity.batches:
            check(lambda: CASES[case].build(batch), quantity.make)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantity", ["SqrtGGNMC", *[pytest.param(name, marks=pytest.mark.slow) for name in ("DiagHessian", "KFLR")]])
def test_runs_of_models_do_what_was_told(name: str, quantity: str) -> None:
    check(lambda: fresh(name, 3), QUANTITIES[quantity].make)


# --- what is left as it was -------------------------------------------------------------------------------------------------------------------


class Untidy(Module):
    """Draws random numbers, changes buffers, and is not extended."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = Linear(4, 6), BatchNorm1d(6), Dropout(0.5), Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.unused, self.frozen = Linear(2, 2), Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls = self.calls + random.random() * 0 + 1
        return self.frozen(self.last(self.drop(self.norm(self.first(x))))) * scale


def test_nothing_changes() -> None:
    model, lossfunc, X, y = Untidy(), CrossEntropyLoss(), torch.rand(5, 4), torch.randint(3, (5,))
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    state, python, attributes = torch.get_rng_state(), random.getstate(), {module: set(vars(module)) for module in model.modules()}
    explain(model, lossfunc, {"x": X, "scale": 2.0}, y, [BatchGrad(), DiagGGNMC(), KFAC()])
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        before, value, version = buffers[name]
        assert buffer is before and torch.equal(buffer, value) and buffer._version == version
    for module in (*model.modules(), lossfunc):
        assert not module._forward_hooks and not module._forward_pre_hooks and "_backpack_extend" not in vars(module)
        assert module is lossfunc or set(vars(module)) == attributes[module]
    assert not any(vars(p) or p.grad is not None for p in model.parameters())
    with backpack(BatchGrad()), pytest.raises(BackpackError, match="not-recorded"):
        extend(lossfunc)(model(X), y).backward()


def test_names_stay_those_of_before() -> None:
    """Also of a part that was extended on its own, in a model that is not."""
    encoder = extend(Sequential(Linear(4, 3), Tanh()))
    model, lossfunc, X, y = Sequential(Linear(4, 4), encoder), CrossEntropyLoss(), torch.rand(5, 4), torch.randint(3, (5,))
    rows = explain(model, lossfunc, X, y, [BatchGrad(exclude=["0.weight"])]).rows
    assert [row.parameter for row in rows if row.verdict is Verdict.EXCLUDED] == ["0.weight"]
    assert recorder_of(encoder[0]).path == "0"
    with backpack(BatchGrad(exclude=["0.weight"])):
        encoder(X).sum().backward()
    assert set(results(encoder)) == {"0.bias"}


def test_extended_stays_extended() -> None:
    """Also inside a context, whose extensions are none of explain's business; and after an exception."""
    model, lossfunc, X, y = extend(Linear(4, 3)), extend(CrossEntropyLoss()), torch.rand(5, 4), torch.randint(3, (5,))
    with backpack(BatchGrad()):
        explanation = explain(model, lossfunc, X, y, [KFAC()])
        assert results(model) == {}
        with pytest.raises(ArgumentError, match="one entry"):
            explain(model, lambda out, _: out, X, y, [KFAC()])
        lossfunc(model(X), y).backward()
    assert [row.verdict for row in explanation.rows] == [Verdict.MC, Verdict.MC]
    assert model.weight.grad_batch.shape == (5, 3, 4)


def test_nothing_is_taken_for_left_out_afterwards() -> None:
    """A layer that came after ``extend`` is refused as before, and a model that is not extended is warned of."""
    X, y, lossfunc = torch.rand(5, 4), torch.randint(3, (5,)), extend(CrossEntropyLoss())
    model, plain, left_out = extend(Sequential(Linear(4, 4), Linear(4, 3))), Sequential(Linear(4, 3)), unextend(extend(Linear(4, 4)))
    model[0] = Linear(4, 4)
    for explained in (model, plain, Sequential(left_out, plain)):
        explain(explained, lossfunc, X, y, [BatchGrad()])
    with backpack(BatchGrad()):
        with pytest.raises(BackpackError, match=r"0\.weight belongs to a module that is not extended"):
            lossfunc(model(X), y).backward()
        with pytest.warns(UserWarning, match="nothing was computed"):
            cross_entropy(plain(X), y).backward()
        model[0] = left_out
        lossfunc(model(X), y).backward()
    assert set(results(model)) == {"1.weight", "1.bias"}


def test_rows_of_one_model_by_hand() -> None:
    """Verdicts, reasons and sizes of one model, by hand."""
    model = Untidy().eval()
    rows = {
        row.parameter: row
        for row in explain(model, CrossEntropyLoss(), torch.rand(5, 4), torch.randint(3, (5,)), BatchGrad(exclude=[model.norm])).rows
    }
    assert [row.parameter for row in rows.values()] == [name for name, _ in model.named_parameters()]
    assert rows["first.weight"].result == ((5, 6, 4),) and rows["first.weight"].bytes == 4 * 5 * 6 * 4
    assert rows["first.weight"].rule == "Linear" and rows["first.weight"].verdict is Verdict.EXACT
    assert rows["norm.weight"].verdict is Verdict.EXCLUDED
    assert "does not depend" in rows["unused.weight"].reason and "frozen" in rows["frozen.bias"].reason
    assert rows["unused.weight"].verdict is rows["frozen.bias"].verdict is Verdict.NO_GRADIENT


@pytest.mark.parametrize("extension", [KFAC, KFLR, KFRA, BatchGrad])
def test_sizes_in_half_precision(extension: Callable[[], BackpropExtension]) -> None:
    """Kronecker factors are in single precision there."""

    def make() -> Problem:
        model, x = Sequential(Linear(3, 4), ReLU(), Linear(4, 2)).bfloat16(), torch.rand(5, 3, dtype=torch.bfloat16)
        return Problem(model, x, [Term(CrossEntropyLoss(), torch.randint(2, (5,)))])

    check(make, extension)


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="names no parameter"):
        explain(Linear(4, 3), CrossEntropyLoss(), torch.rand(5, 4), torch.randint(3, (5,)), [BatchGrad(exclude=["wieght"])])


def test_loss_that_is_a_parameter_is_an_error() -> None:
    model = Linear(1, 1, bias=False)
    with pytest.raises(ArgumentError, match="loss"):
        explain(model, lambda out, y: model.weight, torch.rand(3, 1), torch.zeros(3), [BatchGrad()])


def test_what_does_not_go_together_is_told_once() -> None:
    """What each extension refuses alone is told there; what only the company of another one brings is told in one place."""
    model, X, y = Sequential(Linear(4, 3), Linear(3, 3)), torch.rand(5, 4), torch.randint(3, (5,))
    explanation = explain(model, CrossEntropyLoss(), X, y, [BatchGrad(), KFAC(), DiagGGNMC()])
    assert not explanation.together and not explanation.refused
    alone = {quantity.extension: quantity.cost for quantity in explanation.quantities}
    assert max(alone.values()) < explanation.cost < sum(alone.values())
    ce = extend(CrossEntropyLoss())
    explanation = explain(model, lambda out, y: ce(out, y) ** 2, X, y, [BatchGrad(), KFAC()])
    assert {row.extension for row in explanation.refused} == {"KFAC"}
    assert all("PowBackward0" in row.reason for row in explanation.refused)


def test_computed_weights_cost_more() -> None:
    """The gradient of a weight that is normalized is formed for each sample; not so if each entry is treated alone, or a constant is added."""

    class Computed(Linear):
        def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
            super().__init__(300, 300)
            self.made = made

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.made(self.weight), self.bias)

    def cost(layer: Module) -> float:
        return explain(layer, MSELoss(), torch.rand(64, 300), torch.rand(64, 300), [DiagGGNMC()]).quantities[0].cost

    plain, added, masked, normalized, twice, mixed = map(
        cost,
        (
            Linear(300, 300),
            Computed(lambda w: w + torch.zeros(300, 300)),
            Computed(lambda w: w * torch.ones(300, 300).tril()),
            Computed(lambda w: w / w.norm(dim=1, keepdim=True)),
            Computed(lambda w: w + w.mean() + torch.relu(w)),
            Computed(lambda w: torch.matrix_exp(w - w.t())),
        ),
    )
    assert added < 1.2 * plain
    assert plain < min(masked, normalized, twice)
    assert max(masked, normalized, twice) < 5 * plain
    assert mixed > 10 * plain


@pytest.mark.parametrize("positions", [(), (4,)], ids=str)
def test_many_classes_are_cheap_at_the_last_layer(positions: tuple[int, ...]) -> None:
    """What is read off the Hessian of the loss costs no columns; layers below cost them still."""

    class Last(Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).movedim(-1, 1)

    def costs(classes: int, layers: int) -> list[float]:
        model = Last(*(Linear(100, 100) for _ in range(layers - 1)), Linear(100, classes))
        x, target = torch.rand(64, *positions, 100), torch.randint(classes, (64, *positions))
        told = explain(model, CrossEntropyLoss(), x, target, [DiagGGNExact(), KFLR()])
        return [quantity.cost for quantity in told.quantities]

    few, many, deep = costs(3, 1), costs(300, 1), costs(300, 2)
    assert max(few + many) < 10
    assert min(deep) > 20


class Curved(Module):
    """A loss of one's own: of each entry of a prediction, or of what is between these."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        difference = prediction - target
        return (difference if self.apart else difference - difference[:, :1]).cosh().mean()


def test_losses_of_ones_own_cost_what_couples_classes() -> None:
    """A product for each class, and a decomposition for each sample, unless entries have terms of their own."""

    def cost(apart: bool, classes: int) -> float:
        return explain(Linear(50, classes), Curved(apart), torch.rand(64, 50), torch.rand(64, classes), [DiagGGNMC()]).quantities[0].cost

    assert max(cost(True, 10), cost(True, 400)) < 4
    assert 2 * cost(True, 10) < cost(False, 10) < cost(False, 100) / 4
    assert cost(False, 400) > 200


def test_several_targets() -> None:
    """They are further arguments of the loss, as in ``verify``."""
    X, y = torch.rand(5, 4), (torch.randint(3, (5,)), torch.rand(5, 2))
    explanation = explain(Linear(4, 5), lambda out, a, b: cross_entropy(out[:, :3], a) + mse_loss(out[:, 3:], b), X, y, [BatchGrad()])
    assert not explanation.refused
    assert not explain(Linear(4, 5), cross_entropy, X, {"target": y[0], "reduction": "sum"}, [BatchGrad()]).refused


def test_repeated_layers_are_one_line() -> None:
    model = Sequential(Linear(4, 4), *(Sequential(Linear(4, 4), Tanh()) for _ in range(12)), Linear(4, 3))
    text = str(explain(model, CrossEntropyLoss(), torch.rand(5, 4), torch.randint(3, (5,)), [BatchGrad(), KFAC(), HMP()]))
    assert "1..12.0.weight" in text
    assert max(map(len, text.splitlines())) <= 150 and len(text.splitlines()) < 20


# --- all refusals at once ---------------------------------------------------------------------------------------------------------------------


class ThreeWays(Module):
    """Gates, a matrix that is used in two orientations, a vector whose factor would be too large, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.last = Parameter(torch.randn(2, 3)), Linear(3, 2)
        self.first, self.matrix, self.large = Linear(3, 3), Parameter(torch.randn(3, 3)), Parameter(torch.ones(2**15 + 1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) * self.gates + self.large.mean())
        return self.last(torch.tanh(h @ self.matrix) @ self.matrix.T)


def three_ways() -> Problem:
    return regress(ThreeWays(), torch.randn(3, 2, 3))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (three_ways, {"gates", "matrix", "large"}),
        (lambda: fresh("GPT-2", 3), {"transformer.wte.weight"}),
    ],
)
def test_factors_are_refused_at_once(make: Callable[[], Problem], expected: set[str]) -> None:
    """One error names all parameters and both reasons; the argument that it shows first is enough."""
    problem = make()
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(KFAC(), BatchGrad()), pytest.raises(BackpackError, match=r"\[backpack:unsupported\]") as caught:
        problem.loss(problem.outputs()).backward()
    assert expected == set(arguments_in(caught.value))
    assert set(caught.value.about.values()) == set(arguments_in(caught.value))
    assert all(list(part.about.values()) for part in caught.value.parts)
    assert results(problem.model) == {}
    with backpack(KFAC(exclude=arguments_in(caught.value)), BatchGrad()):
        problem.loss(problem.outputs()).backward()
    names = {name for name, p in problem.model.named_parameters() if p.requires_grad and p.grad is not None}
    assert {name for name, values in results(problem.model).items() if "kfac" in values} == names - set(arguments_in(caught.value))


def test_plans_are_refused_at_once() -> None:
    """Samples that mix, a penalty on two parameters, and a loss that is curved: three reasons in one error, which are told apart."""
    model, lossfunc = extend(Sequential(Linear(4, 3), BatchNorm1d(3), Linear(3, 3), Tanh(), Linear(3, 2))), extend(MSELoss())
    X, y = torch.randn(5, 4), torch.randn(5, 2)

    def loss() -> Tensor:
        return lossfunc(model(X), y) + model[4].weight.square().sum() + model[4].bias.square().sum()

    with backpack(BatchGrad()), pytest.raises(BackpackError) as caught:
        loss().backward()
    reasons = {part.code: set(part.about.values()) for part in caught.value.parts}
    assert reasons == {"unattributed": {"4.weight", "4.bias"}, "mixed-samples": {"0.weight", "0.bias"}}
    said = str(caught.value)
    assert said.count("[backpack:unattributed]") == said.count("[backpack:mixed-samples]") == 1 and said.endswith(
        f"[backpack:{caught.value.parts[-1].code}]"
    )
    assert set(arguments_in(caught.value)) == {"4.weight", "4.bias", "0.weight", "0.bias"}
    with backpack(BatchGrad(exclude=arguments_in(caught.value))):
        loss().backward()
    assert {name for name, values in results(model).items()} == {"1.weight", "1.bias", "2.weight", "2.bias"}


def of_batches() -> Module:
    """Samples mix at the first layer; the second one has no rule for Hessians and products there, as its statistics are those of the mini-batch."""
    return Sequential(Linear(4, 6), BatchNorm1d(6), ReLU(), Linear(6, 3))


class Sliced(Module):
    """A factor that a penalty is about, and a matrix of which some columns are used."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.matrix, self.last = Parameter(torch.rand(4)), Parameter(torch.rand(4, 8)), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(linear(x * self.factor, self.matrix[:, :4]))


@pytest.mark.parametrize("quantity", ["DiagHessian", "BatchDiagHessian", "KFRA", "HMP", "GGNMP", "KFAC"])
def test_reasons_behind_others_are_told_at_once(quantity: str) -> None:
    """What an extension refuses is told beside what any would refuse: the argument that is shown first is enough, and leaves the rest as it is."""
    make = QUANTITIES[quantity].make
    penalized = quantity == "KFAC"
    model, lossfunc = extend(Sliced() if penalized else of_batches()), extend(MSELoss())
    X, y = torch.randn(5, 4), torch.randn(5, 3)

    def loss() -> Tensor:
        return lossfunc(model(X), y) + (model.factor.square().sum() if penalized else 0)

    with backpack(make()), pytest.raises(BackpackError) as caught:
        loss().backward()
    expected = {"factor", "matrix"} if penalized else {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(arguments_in(caught.value)) == expected == set(caught.value.about.values())
    assert len(caught.value.parts) > 1
    assert results(model) == {}
    extension = make().leaving_out(caught.value.about)
    with backpack(extension):
        loss().backward()
    assert set(results(model)) == {name for name, _ in model.named_parameters()} - expected
    refused = {row.parameter for row in explain(model, lossfunc, X, y, [make()]).rows if row.verdict is Verdict.REFUSED}
    assert refused == expected - {"factor"}  # the penalty is no part of it


@pytest.mark.parametrize("finish", [lambda g: g.sum().item(), lambda g: None, lambda g: {"g": g}, lambda g: g[g > 0], lambda g: g.numpy()])
def test_results_of_users_that_need_numbers(finish: Callable[[Tensor], object]) -> None:
    """Their sizes are not known; all else is."""

    class Own(BatchGrad):
        def finish(self, state: Any, parameter: Parameter) -> object:
            return finish(super().finish(state, parameter))

    explanation = explain(Linear(3, 2), CrossEntropyLoss(), torch.randn(4, 3), torch.arange(4) % 2, [Own()])
    assert [row.parameter for row in explanation.rows] == ["weight", "bias"]
    assert not explanation.refused


def test_what_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a quantity not written, one error would name all parameters, and nothing would stay."""
    model, lossfunc = extend(Sequential(Linear(4, 3), Linear(3, 3))), extend(MSELoss())
    monkeypatch.setattr(Collector, "_write", lambda self, parameter, extension, value: None)
    with backpack(BatchGrad()), pytest.raises(BackpackError, match="unattributed") as caught:
        lossfunc(model(torch.rand(5, 4)), torch.rand(5, 3)).backward()
    assert set(arguments_in(caught.value)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_overwritten_tensor_of_which_only_the_shape_is_read() -> None:
    """While the graph stays, whoever has overwritten a tensor still holds it: no reason to refuse."""
    problem, other = (fresh("pre-activation ResNet, GroupNorm", 3) for _ in range(2))
    for module in (problem.model, *problem.losses):
        extend(module)
    with backpack(KFLR()):
        problem.loss(problem.outputs()).backward(retain_graph=True)
    for name, value in outcome(other, KFLR()).items():
        assert all(map(torch.equal, value, results(problem.model)[name]["kflr"]))


def test_text_tells_refusals_and_what_gets_no_gradient() -> None:
    """Reasons are numbered, what is left of an extension can be copied from the text, and wide tables are cut."""

    class Mixing(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head, self.unused = Linear(4, 3), BatchNorm1d(3), Linear(3, 3), Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.first(x)))

    data = torch.rand(5, 4), torch.randint(3, (5,))
    chosen = [BatchGrad(), KFAC(), DiagGGNMC(), HMP(exclude=["first", "norm"])]
    explanation = explain(Mixing(), CrossEntropyLoss(), *data, chosen)
    text = " ".join(str(explanation).split())
    assert max(map(len, str(explanation).splitlines())) <= 150
    assert "refused [1]" in text and "[1] The samples of the mini-batch influence one another" in text
    assert not any(line.startswith("[2]") for line in str(explanation).splitlines())
    assert 'All that is not refused: BatchGrad(exclude=["first.weight", "first.bias"])' in text
    assert explanation.quantities[0].exclude == 'exclude=["first.weight", "first.bias"]' and explanation.quantities[3].exclude == ""
    assert "No gradient" in text and text.index("unused.bias.") > text.index("No gradient")
    assert "Nothing is left of KFRA." in str(explain(Mixing(), CrossEntropyLoss(), *data, [KFRA(exclude=["norm", "head"])]))


@pytest.mark.parametrize("extension", [BatchGrad, KFLR, DiagGGNMC])
def test_fused_recurrent_layers(extension: Callable[[], BackpropExtension]) -> None:
    """In single precision they are one node with several products inside."""

    class Last(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = LSTM(3, 2, batch_first=True), Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x)[0][:, -1])

    check(lambda: Problem(Last(), torch.rand(4, 5, 3), [Term(CrossEntropyLoss(), torch.randint(3, (4,)))]), extension)
