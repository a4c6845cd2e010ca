"""Losses that are called as functions, also inside a model, and rows of a loss that are folded from samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import MC, all_close, collect, factors_close, grams, sum_batch
from torch import Tensor, nn, randint, randn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from backpack import backpack, extend, extensions
from backpack.utils.errors import BackpackError, LossNotExtendedError, LossValueError, ShapeError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("error")

N, C, T = 3, 4, 5
QUANTITIES = {
    "grad_batch": (extensions.BatchGrad, lambda o: o.grad_batch),
    "diag_ggn_exact": (extensions.DiagGGNExact, lambda o: sum_batch(o.diag_ggn_batch(o.hessian_exact))),
    "diag_ggn_exact_batch": (extensions.BatchDiagGGNExact, lambda o: o.diag_ggn_batch(o.hessian_exact)),
    "diag_h_batch": (extensions.BatchDiagHessian, lambda o: o.diag_h_batch),
}


@pytest.fixture(autouse=True)
def double() -> None:
    """Compute in double precision, the same numbers in every test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Tagger(nn.Module):
    """Scores ``[N, T, C]`` for each step of a sequence, mixed over steps by a recurrent layer; with labels, it computes its loss."""

    def __init__(self, loss: Callable | None = None) -> None:
        super().__init__()
        self.cell, self.head = nn.RNN(3, 3, batch_first=True), nn.Linear(3, C)
        self.loss = loss

    def forward(self, x: Tensor, *targets: Tensor) -> Tensor:
        scores = self.head(self.cell(x)[0])
        return self.loss(scores, *targets) if targets else scores


def steps(N: int = N) -> Tensor:
    return randn(N, T, 3)


def check(model: nn.Module, loss: Callable[[Tensor], Tensor], batch: int = N, inside: bool = False) -> None:
    """Compare quantities with the definition, with the loss outside, or inside of the model."""
    x = steps(batch)
    oracle = Oracle(Problem(model, x, [Term(nn.CrossEntropyLoss(), (), function=loss)]))
    extend(model)
    for field, (make, expected) in QUANTITIES.items():
        if field == "diag_h_batch" and isinstance(model, Tagger):
            continue  # gates are curved
        with backpack(make()):
            (model(x, torch.empty(0)) if inside else loss(model(x))).backward()
        all_close({name: getattr(p, field) for name, p in model.named_parameters()}, expected(oracle))
    with backpack(extensions.SqrtGGNExact(), extensions.KFLR()):
        (model(x, torch.empty(0)) if inside else loss(model(x))).backward()
    values = {name: p.sqrt_ggn_exact for name, p in model.named_parameters()}
    width = max(value.shape[0] for value in values.values())
    grams(oracle, values, oracle.ggn_per_sample(oracle.hessian_exact), width)
    for name, factors in oracle.kronecker(oracle.hessian_exact).items():
        factors_close(model.get_parameter(name).kflr, factors)


def stepwise() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Sigmoid(), nn.Linear(2, C))


EXTENDED = nn.CrossEntropyLoss(ignore_index=1)


def by_steps(out: Tensor) -> Tensor:
    return torch.stack([step.log_softmax(1) for step in out.unbind(1)], 2)


def of_experts(out: Tensor) -> Tensor:
    return (out[..., :2].log_softmax(-1) + out[..., 2:].log_softmax(-1) / 2).transpose(1, 2)


def by_class(y: Tensor) -> Tensor:
    return y.T[..., None].expand(-1, -1, C).double()


def normalized(out: Tensor, dim: int) -> Tensor:
    return out - out.logsumexp(dim, keepdim=True)


def packed(sequences: Tensor) -> Tensor:
    lengths = [sequences.shape[1] - n % 2 for n in range(len(sequences))]
    return nn.utils.rnn.pack_padded_sequence(sequences, torch.tensor(lengths), batch_first=True, enforce_sorted=False).data


def with_teacher(kl_div: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    teacher = nn.Linear(C, C, dtype=torch.float64)  # trainable, but nobody has extended it
    return lambda out, y: kl_div(out.log_softmax(-1), teacher(out.detach()).softmax(-1))


FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda out, y: F.cross_entropy(out.reshape(-1, C), y.flatten(), ignore_index=1),
    "rows, extended": lambda out, y: EXTENDED(out.reshape(-1, C), y.flatten()),
    "rows by time": lambda out, y: F.cross_entropy(out.transpose(0, 1).reshape(-1, C), y.T.flatten()),
    "rows by time, extended": lambda out, y: EXTENDED(out.transpose(0, 1).flatten(0, 1), y.T.flatten()),
    "shifted": lambda out, y: F.cross_entropy(out[..., :-1, :].reshape(-1, C), y[:, 1:].flatten()),
    "shifted, extended": lambda out, y: EXTENDED(out[..., :-1, :].reshape(-1, C), y[:, 1:].flatten()),
    "masked": lambda out, y: F.cross_entropy(out[y != 2], y[y != 2]),
    "masked, extended": lambda out, y: EXTENDED(out[y != 2], y[y != 2]),
    "masked, but for one sample": lambda out, y: F.cross_entropy(out[1:, 2:][y[1:, 2:] > -1], y[1:, 2:].flatten(), reduction="sum"),
    "masked, all": lambda out, y: F.cross_entropy(out[y < 0], y[y < 0], reduction="sum"),
    "packed": lambda out, y: F.cross_entropy(packed(out), packed(y)),
    "packed, extended": lambda out, y: EXTENDED(packed(out), packed(y)),
    "chosen": lambda out, y: F.cross_entropy(out.flatten(0, 1)[[3, 0, 1]], y.flatten()[[3, 0, 1]]),
    "in single precision": lambda out, y: F.cross_entropy((out * 1.0).to(torch.float64).view(-1, C), y.flatten()),
    "one step": lambda out, y: F.cross_entropy(out[:, -1], y[:, -1]),
    "samples last": lambda out, y: F.cross_entropy(out.permute(1, 2, 0), y.T),
    "samples last, classes first": lambda out, y: -(out.permute(2, 1, 0).log_softmax(0) * F.one_hot(y.T, C).permute(2, 0, 1)).sum() / N,
    "scaled and added": lambda out, y: F.cross_entropy((out / 2 + 1).view(-1, C), y.view(-1), reduction="sum") / 7,
    "two heads": lambda out, y: (F.cross_entropy(out[..., 0].clone(), y[:, 0]) + F.cross_entropy(out.split(1, -1)[1].squeeze(-1), y[:, 1])) / 2,
    "log-probabilities by steps": lambda out, y: F.nll_loss(by_steps(out), y, ignore_index=1),
    "log-probabilities by steps, extended": lambda out, y: extend(nn.NLLLoss(ignore_index=1))(by_steps(out), y),
    "joined, extended": lambda out, y: extend(nn.NLLLoss())(torch.cat([part.log_softmax(-1) for part in out.split(2, 1)], 1).mT, y),
    "product of experts": lambda out, y: F.nll_loss(of_experts(out), y % 2),
    "product of experts, extended": lambda out, y: extend(nn.NLLLoss())(of_experts(out), y % 2),
    "teacher": with_teacher(lambda *given: F.kl_div(*given, reduction="batchmean")),
    "teacher, extended": with_teacher(extend(nn.KLDivLoss(reduction="batchmean"))),
    "categorical": lambda out, y: -Categorical(logits=out).log_prob(y).mean(),
    "categorical, weighted": lambda out, y: -(torch.arange(1.0, T + 1) * Categorical(logits=out).log_prob(y)).sum(),
    "categorical, teacher": lambda out, y: kl_divergence(Categorical(logits=2 * out.detach()), Categorical(logits=out)).mean(),
    "normalized, samples last, classes first": lambda out, y: -(normalized(out.permute(2, 1, 0), 0) * F.one_hot(y.T, C).permute(2, 0, 1)).sum() / N,
    "normalized, extended": lambda out, y: extend(nn.NLLLoss())(normalized(out, -1).transpose(1, 2), y),
    "squares": lambda out, y: F.mse_loss(out.reshape(-1, C), out.detach().reshape(-1, C) + y.view(-1, 1)),
    "squares of all": lambda out, y: F.mse_loss(out.flatten(), out.detach().flatten().roll(1)),
    "squares, time first": lambda out, y: F.mse_loss(out.transpose(0, 1), by_class(y)),
    "squares, samples last, extended": lambda out, y: extend(nn.MSELoss())(out.permute(1, 2, 0), by_class(y).mT),
    "squares, time first, weighted": lambda out, y: (y.T[..., None] * F.mse_loss(by_class(y), out.transpose(0, 1), reduction="none")).sum(),
    "two classes, time first": lambda out, y: F.binary_cross_entropy_with_logits(out.transpose(0, 1), (by_class(y) > 1).double()),
    "two classes, samples last": lambda out, y: F.binary_cross_entropy_with_logits(out.permute(2, 1, 0), (by_class(y) > 1).double().permute(2, 0, 1)),
    "Huber, samples last": lambda out, y: F.huber_loss(out.permute(2, 1, 0), by_class(y).permute(2, 0, 1), delta=0.7),
    "several labels": lambda out, y: F.cross_entropy(out.repeat_interleave(2, 0).flatten(0, 1), torch.stack([y, 1 - y % 2], 1).flatten()),
    "several labels, extended": lambda out, y: EXTENDED(out.repeat_interleave(2, 0).flatten(0, 1), torch.stack([y, 1 - y % 2], 1).flatten()),
    "several labels by copies": lambda out, y: F.cross_entropy(out[:, None].expand(-1, 3, -1, -1).reshape(-1, C), torch.stack([y] * 3, 1).view(-1)),
    "repeated, extended": lambda out, y: EXTENDED(out.repeat(2, 1, 1).view(-1, C), torch.cat([y, y % 2]).flatten()),
    "chosen repeatedly": lambda out, y: F.cross_entropy((2 * out).flatten(0, 1)[[3, 0, 3, 1]], y.flatten()[[3, 0, 1, 1]]),
    "chosen repeatedly, extended": lambda out, y: EXTENDED(out[:, [0, 1, 1]].flip(0).flatten(0, 1), y[:, [0, 1, 3]].flip(0).flatten()),
    "squares of copies": lambda out, y: F.mse_loss(torch.cat([out, out[[-1, 0]]]), torch.zeros(len(y) + 2, T, C)),
    "gathered": lambda out, y: F.mse_loss(out.gather(0, y[:, :1, None].expand(-1, 2, C) % len(y)), torch.zeros(len(y), 2, C), reduction="sum"),
    "class of zeros": lambda out, y: F.cross_entropy(torch.cat([torch.zeros_like(out[..., :1]), out], -1).reshape(-1, C + 1), y.flatten()),
    "class of zeros, by time": lambda out, y: F.cross_entropy(F.pad(out, (0, 1)).transpose(0, 1).reshape(-1, C + 1), y.T.flatten()),
    "resized, extended": lambda out, y: EXTENDED(F.interpolate(out.mT, scale_factor=2).mT.reshape(-1, C), y.repeat_interleave(2, 1).flatten()),
    "pooled": lambda out, y: F.cross_entropy(F.avg_pool1d(out.mT, 2, 1).mT.reshape(-1, C), y[:, 1:].flatten()),
    "means of steps": lambda out, y: F.cross_entropy(out[:, 1:].unflatten(1, (2, -1)).mean(2).reshape(-1, C), y[:, :2].flatten()),
    "running sums": lambda out, y: F.mse_loss(out.cumsum(1).flatten(0, 1), torch.zeros(y.numel(), C)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("picked", [[200, 200], [72, 200, 72, 299], range(-300, 300), [0, 127, 128, 128, 129, 255, 256, 257]])
def test_copies_of_many_samples(picked: list[int], dtype: torch.dtype) -> None:
    """Numbers of samples are exact, whatever the type and the number of rows."""
    model, x, picked = extend(nn.Linear(3, C).to(dtype)), randn(300, 3).to(dtype), torch.tensor([*picked])
    with backpack(extensions.BatchDiagGGNExact()):
        F.mse_loss(model(x)[picked], torch.zeros(len(picked), C, dtype=dtype), reduction="sum").backward()
    counts = torch.bincount(picked % 300, minlength=300)
    value = model.bias.diag_ggn_exact_batch
    torch.testing.assert_close(value, (2 * counts[:, None]).expand(-1, C).to(value.dtype), rtol=1e-2, atol=0)


@pytest.mark.parametrize("loss", [F.mse_loss, extend(nn.MSELoss())])
def test_pairs_of_samples_in_first_order(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A gradient needs no loss: rows of several samples, one below the other, are traced back to the output, whether the loss is extended or not."""
    model, x, pairs = extend(nn.Linear(3, C)), randn(N, 3), torch.tensor([[0, 1], [1, 2], [2, 0]])
    with backpack(extensions.BatchGrad()):
        out = model(x)
        rows = out[pairs].flatten(0, 1)
        (gradient,) = torch.autograd.grad(loss(rows, torch.zeros_like(rows)), out, retain_graph=True)
        loss(rows, torch.zeros_like(rows)).backward()
    torch.testing.assert_close(model.weight.grad_batch, gradient[:, :, None] * x[:, None])


def test_no_copies() -> None:
    model, x, y = extend(nn.Linear(3, C)), randn(N, 3), randint(C, (N,))
    for empty in (lambda out: out.repeat(0, 1), lambda out: out[:, None].expand(-1, 0, -1).flatten(0, 1), lambda out: out[:0].repeat(2, 1)):
        found = []
        for none in (lambda out, empty=empty: F.cross_entropy(empty(out), y[:0], reduction="sum"), lambda _: 0):
            with backpack(extensions.DiagGGNExact()):
                out = model(x)
                (F.cross_entropy(out, y) + none(out)).backward()
            found.append(model.weight.diag_ggn_exact)
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("make", [stepwise, Tagger])
@pytest.mark.parametrize("fold", FOLDS)
def test_rows_belong_to_the_samples_that_they_are_made_of(fold: str, make: Callable[[], nn.Module], batch: int) -> None:
    y = randint(C, (batch, T))
    y[0, 0], y[0, 1] = 1, 2
    extend(EXTENDED)
    check(make(), lambda out: FOLDS[fold](out, y), batch)


@pytest.mark.parametrize("name", "reciprocal log1p log2 log10 expm1 exp2 tan asin acos atan asinh atanh erfc nan_to_num sigmoid".split())
def test_rows_of_functions_of_single_entries(name: str) -> None:
    """They are followed, whatever the function."""
    model, x, y = nn.Linear(3, C).double(), randn(N, T, 3).double(), randint(C, (N, T))

    def loss(rows: slice) -> Tensor:
        return F.cross_entropy(getattr(torch, name)(model(x[rows]).sigmoid() / 2 + 0.2).view(-1, C), y[rows].flatten(), reduction="sum")

    extend(model)
    found = []
    for rows in (slice(None), *(slice(n, n + 1) for n in range(N))):
        with backpack(extensions.BatchDiagGGNExact()):
            loss(rows).backward()
        found.append(model.weight.diag_ggn_exact_batch)
    torch.testing.assert_close(found[0], torch.cat(found[1:]))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fold", FOLDS)
def test_loss_inside(fold: str, batch: int) -> None:
    """The model returns nothing but its loss: an inner module tells where the samples lie."""
    y = randint(C, (batch, T))
    y[0, 0], y[0, 1] = 1, 2
    extend(EXTENDED)
    model = Tagger()
    model.loss = lambda scores, _: FOLDS[fold](scores, y)
    check(model, lambda out: FOLDS[fold](out, y), batch, inside=True)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.nll_loss(normalized(out, 1), y) + 0.1 * out.logsumexp(1).square().mean(),
        lambda out, y: (out.logsumexp(1, keepdim=True) - out).gather(1, y[:, None]).mean(),
        lambda out, y: (out - 2 * out.logsumexp(1, keepdim=True)).gather(1, y[:, None]).mean(),
        lambda out, y: torch.sub(out, out.logsumexp(1, keepdim=True), alpha=2).gather(1, y[:, None]).mean(),
        lambda out, y: (out - out.logsumexp((0, 1), keepdim=True)).gather(1, y[:, None]).mean(),
        lambda out, y: (out - (2 * out).logsumexp(1, keepdim=True)).gather(1, y[:, None]).mean(),
        lambda out, y: -Categorical(logits=out).entropy().mean(),
        lambda out, y: (one := out.logsumexp(1, keepdim=True), (out - one).gather(1, y[:, None]).sum() + one.square().sum())[1],
    ],
)
def test_what_resembles_log_probabilities(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Only what is linear in them is a cross-entropy."""
    model, x, y = extend(nn.Linear(3, C)), randn(N, 3), randint(C, (N,))
    with pytest.raises((LossNotExtendedError, LossValueError)), backpack(extensions.DiagGGNExact()):
        loss(model(x), y).backward()
    assert not hasattr(model.weight, "diag_ggn_exact")


@pytest.mark.parametrize("make", [extensions.KFAC, extensions.DiagGGNMC, extensions.HMP, extensions.KFLR])
def test_draws_of_log_probabilities(make: type) -> None:
    """The same random numbers as those of a ``log_softmax``."""
    model, x, y, found = extend(nn.Linear(3, C)), randn(N, 3), randint(C, (N,)), []
    for loss in (lambda out: F.cross_entropy(out, y), lambda out: -Categorical(logits=out).log_prob(y).mean()):
        torch.manual_seed(1)
        with backpack(make()):
            loss(model(x)).backward()
        value = getattr(model.weight, make().savefield)
        found.append(value(torch.ones(2, C, 3)) if callable(value) else value)
    torch.testing.assert_close(*found)


def test_one_loss_a_sample() -> None:
    """A model that returns the loss of each sample."""
    y, model = randint(C, (N, T)), Tagger()
    model.loss = lambda scores, _: F.cross_entropy(scores.transpose(1, 2), y, reduction="none").mean(1)
    x = steps()
    oracle = Oracle(Problem(model, x, [Term(nn.CrossEntropyLoss(), (), function=lambda out: F.cross_entropy(out.transpose(1, 2), y))]))
    extend(model)
    with backpack(extensions.BatchDiagGGNExact()):
        model(x, y).mean().backward()
    all_close({name: p.diag_ggn_exact_batch for name, p in model.named_parameters()}, oracle.diag_ggn_batch(oracle.hessian_exact))


class Functional(nn.Module):
    """Parameters without modules: nothing tells where the samples are but the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(randn(3, 2)), nn.Parameter(randn(2, C))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = (x @ self.a).tanh() @ self.b
        return out if y is None else F.cross_entropy(out, y)


def test_no_module_inside() -> None:
    x, y, model = randn(N, 3), randint(C, (N,)), Functional()
    oracle = Oracle(Problem(model, x, [Term(nn.CrossEntropyLoss(), y)]))
    extend(model)
    with backpack(extensions.BatchDiagGGNExact(), extensions.KFLR()):
        model(x, y).backward()
    all_close({name: p.diag_ggn_exact_batch for name, p in model.named_parameters()}, oracle.diag_ggn_batch(oracle.hessian_exact))
    for name, factors in oracle.kronecker(oracle.hessian_exact).items():
        factors_close(model.get_parameter(name).kflr, factors)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"weight": torch.tensor([0.2, 1.0, 0.7, 2.0])}, {"reduction": "sum"}], ids=str)
def test_same_draw_as_the_module(options: dict) -> None:
    """The function draws what the extended module draws."""
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()}
    model, x, y = extend(stepwise()), steps(), randint(C, (N, T))
    results = []
    for loss in (extend(nn.CrossEntropyLoss(**options)), lambda out, y: F.cross_entropy(out, y, **options)):
        torch.manual_seed(1)
        with backpack(extensions.SqrtGGNMC(mc_samples=MC), extensions.KFAC(mc_samples=MC)):
            loss(model(x).transpose(1, 2), y).backward()
        results.append([(p.sqrt_ggn_mc, *p.kfac) for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


# --- refusals ---------------------------------------------------------------------------------------------------------------------------------


def target(out: Tensor) -> Tensor:
    return torch.zeros(out.shape[0], dtype=torch.int64)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], type[BackpackError], str]] = {
    "exp": (lambda out: F.cross_entropy(out, target(out)).exp(), LossValueError, "ExpBackward0 lies between the loss"),
    "square": (lambda out: F.mse_loss(out, torch.zeros_like(out), reduction="none").square().sum(), LossValueError, "PowBackward0 lies between"),
    "product": (lambda out: F.mse_loss(out, out.detach() + 1) * F.cross_entropy(out, target(out)), LossValueError, "MulBackward0 lies between"),
    "curved in part": (
        lambda out: -(out.log_softmax(1) * (1 + out.log_softmax(1).exp())).mean(),
        LossNotExtendedError,
        r"lossfunc = extend\(torch.nn.CrossEntropyLoss\(\)\)",
    ),
    "entropy": (lambda out: -((lp := out.log_softmax(1)) * lp.exp()).sum() + F.nll_loss(lp, target(out)), LossNotExtendedError, "No loss is known"),
    "absolute": (lambda out: F.l1_loss(out, torch.zeros_like(out)), LossNotExtendedError, "No loss is known.*mse_loss"),
    "by hand": (lambda out: (out - 1).square().mean(), LossNotExtendedError, r"`lossfunc\(model\(X\), y\).backward\(\)`"),
    "nll of scores": (lambda out: F.nll_loss(out, target(out)), LossNotExtendedError, "No loss is known"),
    "mean over samples": (lambda out: F.mse_loss(out.mean(0), torch.zeros(C)), UnsupportedError, "samples|Axis 0"),
    "mean over all": (lambda out: F.mse_loss(out.mean(), torch.tensor(0.0)), ShapeError, "needs 1 axes"),
    "one row": (lambda out: F.cross_entropy(out[0], torch.tensor(1)), ShapeError, "needs 2 axes"),
    "over samples": (lambda out: -out.log_softmax(0).mean(), UnsupportedError, "axis 0"),
    "depends on its target": (lambda out: F.mse_loss(out, 2 * out), LossValueError, "other than the prediction"),
    "weights with samples on axis 1": (
        lambda out: F.binary_cross_entropy_with_logits(out.T, torch.zeros_like(out.T), weight=torch.ones(len(out))),
        UnsupportedError,
        "axis 0",
    ),
    "running sums": (lambda out: F.mse_loss(out.cumsum(0).repeat(2, 1), torch.zeros(2 * len(out), C)), UnsupportedError, "cannot be read off"),
    "padded copies": (lambda out: F.mse_loss(F.pad(out.repeat(2, 1), (0, 0, 0, 1)), torch.zeros(2 * len(out) + 1, C)), UnsupportedError, "read off"),
    "copies meet": (
        lambda out: F.mse_loss(out.repeat(2, 1) + out.repeat_interleave(2, 0), torch.zeros(6 * len(out) // 3, C)),
        UnsupportedError,
        "samples",
    ),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [extensions.DiagGGNExact, extensions.BatchDiagHessian, extensions.KFAC, extensions.HMP])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("width", [N, C])
def test_losses_of_which_nothing_is_known_are_refused(case: str, make: type, inside: bool, width: int) -> None:
    """By name, with nothing left behind, also where the number of samples is that of the outputs."""
    loss, error, message = REFUSED[case]
    model = extend(Wrapped(loss) if inside else nn.Linear(3, C))
    with backpack(make()), pytest.raises(error, match=message):
        (model(randn(width, 3)) if inside else loss(model(randn(width, 3)))).backward()
    assert all(not vars(p) for p in model.parameters())


NEGATIVE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "cross-entropy": (
        lambda out: F.cross_entropy(out, target(out), weight=-torch.ones(C), reduction="sum"),
        r"of cross_entropy \(LogSoftmaxBackward0\)",
    ),
    "module": (lambda out: extend(nn.CrossEntropyLoss(weight=-torch.ones(C), reduction="sum"))(out, target(out)), "of CrossEntropyLoss,"),
    "squares": (lambda out: -F.mse_loss(out, torch.zeros_like(out)), r"mse_loss \(MseLossBackward0\) is multiplied"),
    "two classes": (
        lambda out: F.binary_cross_entropy_with_logits(out, torch.zeros_like(out), weight=-torch.ones(C)),
        r"of binary_cross_entropy_with_logits \(",
    ),
    "probabilities": (
        lambda out: F.binary_cross_entropy(out.sigmoid(), torch.zeros_like(out), weight=-torch.ones(C)),
        r"of binary_cross_entropy \(",
    ),
}


@pytest.mark.parametrize("case", NEGATIVE)
def test_named_as_it_was_called(case: str) -> None:
    """Messages know functions, modules and graph nodes, and no classes of rules."""
    loss, message = NEGATIVE[case]
    model = extend(nn.Linear(3, C))
    with backpack(extensions.DiagGGNExact()), pytest.raises(LossValueError, match=message) as raised:
        loss(model(randn(N, 3))).backward()
    assert "Derivatives" not in str(raised.value)


class Wrapped(nn.Module):
    """A loss inside."""

    def __init__(self, loss: Callable) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(3, C), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x))


@pytest.mark.parametrize("make", [extensions.BatchGrad, extensions.Variance])
def test_first_order_reads_no_losses(make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backpack.core.starts._start_of_node", None)
    model = extend(stepwise())
    with backpack(make()):
        F.cross_entropy(model(randn(N, 3)), randint(C, (N,))).backward()
    assert len(collect(Problem(model, randn(N, 3), []), make().savefield)) == 4


@pytest.mark.parametrize("loss", [lambda out: -out.log_softmax(-1).mean(), lambda out: F.mse_loss(out.transpose(0, 1), torch.zeros(T, N, C))])
def test_chains_need_classes_on_axis_1(loss: Callable[[Tensor], Tensor]) -> None:
    model = extend(nn.Sequential(nn.Linear(3, T * C), nn.Unflatten(1, (T, C))))
    loss = loss(model(randn(N, 3)))
    with backpack(extensions.KFRA()), pytest.raises(UnsupportedError, match="classes on axis 1"):
        loss.backward()


EVERY = [
    *(extensions.DiagGGNExact, extensions.BatchDiagGGNExact, extensions.SqrtGGNExact, extensions.KFLR, extensions.KFRA, extensions.DiagHessian),
    *(extensions.DiagGGNMC, extensions.SqrtGGNMC, extensions.KFAC, extensions.HMP, extensions.GGNMP, extensions.PCHMP),
]


class Likelihood(nn.Module):
    """A user's loss around one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.NLLLoss()

    def forward(self, log_probs: Tensor, y: Tensor) -> Tensor:
        return self.loss(log_probs, y)


LIKELIHOODS: dict[str, tuple[list[nn.Module], Callable[[], nn.Module]]] = {
    "NLLLoss": ([nn.LogSoftmax(1)], nn.NLLLoss),
    "KLDivLoss": ([nn.LogSoftmax(1)], lambda: nn.KLDivLoss(reduction="batchmean")),
    "reshaped": ([nn.LogSoftmax(-1), nn.Unflatten(1, (2, 2)), nn.Flatten()], nn.NLLLoss),
    "wrapped": ([nn.LogSoftmax(1)], Likelihood),
}


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("case", LIKELIHOODS)
def test_softmax_and_likelihood_are_a_cross_entropy(case: str, make: type) -> None:
    layers, lossfunc = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, C)], LIKELIHOODS[case][1]()
    x, labels = randn(N, 3), randint(C, (N,))
    y = F.one_hot(labels, C).double() if case == "KLDivLoss" else labels
    found = []
    for outputs, loss, target in (([], nn.CrossEntropyLoss(), labels), (LIKELIHOODS[case][0], lossfunc, y)):
        model, extension = extend(nn.Sequential(*layers, *outputs)), make()
        torch.manual_seed(1)
        with backpack(extension):
            extend(loss)(model(x), target).backward()
        values = [getattr(p, extension.savefield) for p in model.parameters()]
        values = [v(torch.ones(2, *p.shape)) if callable(v) else v for p, v in zip(model.parameters(), values, strict=True)]
        found.append([factor for value in values for factor in (value if isinstance(value, list) else [value])])
        assert any(factor.ne(0).any() for factor in found[-1])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


PAST: dict[str, Callable[[Tensor], Tensor]] = {
    "stack": lambda out: torch.stack([out.log_softmax(1), out.sigmoid().log()], 2),
    "cat": lambda out: torch.cat([out[:, :2].log_softmax(1), out[:, 2:]], 1).unsqueeze(2).expand(-1, -1, 2),
    "sum": lambda out: (out.log_softmax(1) + out.softmax(1).log()).unsqueeze(2).expand(-1, -1, 2),
}


@pytest.mark.parametrize("make", [extensions.DiagGGNExact, extensions.KFAC, extensions.DiagHessian])
@pytest.mark.parametrize("loss", [F.nll_loss, nn.NLLLoss()], ids=["function", "module"])
@pytest.mark.parametrize("case", PAST)
def test_likelihoods_of_which_a_part_is_behind_no_softmax_are_refused(case: str, loss: Callable, make: type) -> None:
    """The curvature of the softmax would be a part of that of the cross-entropy."""
    model = extend(nn.Linear(3, C))
    lossfunc = extend(loss) if isinstance(loss, nn.Module) else loss
    with backpack(make()), pytest.raises(LossNotExtendedError, match="No loss is known on a path"):
        lossfunc(PAST[case](model(randn(N, 3))), randint(C, (N, 2))).backward()
    assert not any(vars(p) for p in model.parameters())


@pytest.mark.parametrize("detached", [True, False])
def test_gradients_that_are_handed_to_the_output_of_a_model(detached: bool) -> None:
    model, lossfunc = extend(nn.Linear(3, C)), extend(nn.CrossEntropyLoss())
    x, y = randn(N, 3), randint(C, (N,))
    with backpack(extensions.BatchGrad()):
        out = model(x)
        copy = out.detach().requires_grad_() if detached else out
        (grad,) = torch.autograd.grad(lossfunc(copy, y), copy)
        out.backward(grad)
    torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)
    with backpack(extensions.DiagGGNExact()), pytest.raises(LossNotExtendedError, match=r"on the output of Linear itself.*which loss.*detached copy"):
        model(x).backward(grad)


class Inverse(nn.Module):
    """Divides by its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_ones(()) / x


BETWEEN = {
    "layer": [],
    "sigmoid": [nn.Sigmoid()],
    "softmax before a layer": [nn.LogSoftmax(1), nn.Linear(C, C)],
    "inverse": [nn.LogSoftmax(1), Inverse()],
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_likelihoods_behind_anything_else_have_no_curvature(between: list[nn.Module]) -> None:
    model, x, y = extend(nn.Sequential(nn.Linear(3, C), *between).double()), randn(N, 3), randint(C, (N,))
    with backpack(extensions.DiagGGNExact()):
        extend(nn.NLLLoss())(model(x), y).backward()
    assert not any(p.diag_ggn_exact.any() for p in model.parameters())


def test_targets_that_depend_on_parameters_are_refused_behind_a_softmax() -> None:
    model = extend(nn.Sequential(nn.Linear(3, C), nn.LogSoftmax(1)))
    out = model(randn(N, 3))
    with backpack(extensions.DiagGGNExact()), pytest.raises(LossValueError, match="an input other than the prediction depends on trainable"):
        extend(nn.KLDivLoss(reduction="sum"))(out, out.exp()).backward()
