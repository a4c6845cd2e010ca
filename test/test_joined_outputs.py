"""Outputs that are joined behind the model for one loss: each row, or position, is one of the sample that its output has there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend, results
from backpack.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact, DiagHessian, SqrtGGNExact
from backpack.utils.errors import BackpackError, UnsupportedError

Outputs = tuple[Tensor, ...]
# each takes outputs [N, 3] and labels [N, number of outputs]
JOINED: dict[str, Callable[[Outputs, Tensor], tuple[Tensor, Tensor]]] = {
    "rows": lambda outs, y: (torch.cat(outs), y.T.flatten()),
    "stacked": lambda outs, y: (torch.stack(outs, 1).flatten(0, 1), y.flatten()),
    "stacked in front": lambda outs, y: (torch.stack(outs).flatten(0, 1), y.T.flatten()),
    "classes": lambda outs, y: (torch.stack(outs, -1), y),
    "reshaped": lambda outs, y: (torch.cat(outs, 1).view(-1, 3), y.flatten()),
    "in another order": lambda outs, y: (torch.cat(outs).flip(0), y.T.flatten().flip(0)),
    "temperature": lambda outs, y: (torch.cat([out * 1.0 for out in outs]) / 1.0, y.T.flatten()),
    "rows in two steps": lambda outs, y: (torch.cat([*torch.cat(outs[:-1]).unbind(), *outs[-1]]).view(-1, 3), y.T.flatten()),
}
LOSSES = {"module": lambda: extend(nn.CrossEntropyLoss()), "function": lambda: F.cross_entropy}


class Heads(nn.Module):
    """A body, and heads with smooth activations."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 5), nn.ModuleList(nn.Linear(5, 3) for _ in range(heads))

    def forward(self, x: Tensor) -> Outputs:
        hidden = self.body(x).tanh()
        return tuple(head(hidden) for head in self.heads)


def problem(heads: int, samples: int) -> Problem:
    torch.manual_seed(0)
    y = torch.randint(3, (samples, heads))
    terms = [Term(nn.CrossEntropyLoss(), y[:, i], head=i) for i in range(heads)]
    return Problem(Heads(heads).double(), torch.randn(samples, 4, dtype=torch.float64), terms)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", JOINED)
@pytest.mark.parametrize(("heads", "samples"), [(2, 1), (2, 3), (3, 2), (3, 3)])
def test_one_loss_of_several_outputs(heads: int, samples: int, way: str, loss: str) -> None:
    """It is the mean of their losses."""
    made, oracle = problem(heads, samples), Oracle(problem(heads, samples))
    y = torch.stack([term.target for term in made.terms], 1)
    extend(made.model)
    with backpack(BatchGrad(), BatchDiagGGNExact(), DiagGGNExact(), DiagHessian(), SqrtGGNExact()):
        LOSSES[loss]()(*JOINED[way](made.model(made.x), y)).backward()
    ggn = oracle.diag_ggn_batch(oracle.hessian_exact)
    for name, parameter in made.model.named_parameters():
        close(parameter.grad_batch, oracle.grad_batch[name] / heads)
        close(parameter.diag_ggn_exact_batch, ggn[name] / heads)
        close(parameter.diag_ggn_exact, sum_batch(ggn)[name] / heads)
        close(parameter.sqrt_ggn_exact.square().sum((0, 1)), sum_batch(ggn)[name] / heads)
        close(parameter.diag_h, sum_batch(oracle.diag_h_batch)[name] / heads)


@pytest.mark.parametrize("loss", LOSSES)
def test_samples_of_several_calls_are_not_joined(loss: str) -> None:
    """A model that was called with other samples each time: which belong together is not known."""
    made = problem(2, 3)
    extend(made.model)
    with pytest.raises(BackpackError), backpack(DiagGGNExact()):
        out = torch.cat([made.model(made.x)[0], made.model(made.x + 1)[1]])
        LOSSES[loss]()(out, torch.tensor([0, 1, 2, 2, 1, 0])).backward()
    assert results(made.model) == {}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("sizes", [(5, 3), (2, 4)])
def test_samples_of_mini_batches_of_other_sizes_are_not_joined(sizes: tuple[int, int], copies: int, loss: str) -> None:
    """Of two models, whose rows are their own samples for quantities that need no loss."""
    torch.manual_seed(0)
    models, batches = [extend(nn.Linear(4, 3).double()) for _ in sizes], [torch.randn(size, 4, dtype=torch.float64) for size in sizes]
    y = torch.randint(3, (sum(sizes), copies))

    def value() -> Tensor:
        out = torch.cat([model(x) for model, x in zip(models, batches, strict=True)])
        return LOSSES[loss]()(out if copies == 1 else out.repeat_interleave(copies, 0), y.flatten())

    with backpack(DiagGGNExact()), pytest.raises(BackpackError):
        value().backward()
    assert all(results(model) == {} for model in models)
    with backpack(BatchGrad()):
        value().backward()
    for model, x, labels in zip(models, batches, y.split(sizes), strict=True):
        rows = F.cross_entropy(model(x).repeat_interleave(copies, 0), labels.flatten(), reduction="none").view(len(x), copies).sum(1) / y.numel()
        close(model.weight.grad_batch, torch.stack([torch.autograd.grad(row, model.weight, retain_graph=True)[0] for row in rows]))


@pytest.mark.parametrize("loss", LOSSES)
def test_constants_are_not_joined(loss: str) -> None:
    """Rows that were made of something else than the model's output are of no sample."""
    made = problem(2, 3)
    extend(made.model)
    with pytest.raises(BackpackError), backpack(DiagGGNExact()):
        out = torch.cat([made.model(made.x)[0], made.model.body.bias[:3].expand(3, 3)])
        LOSSES[loss]()(out, torch.tensor([0, 1, 2, 2, 1, 0])).backward()
    assert results(made.model) == {}


PIECES: dict[str, Callable[[nn.Module, nn.Module, Tensor], Tensor]] = {
    "both models": lambda body, head, x: torch.cat([head(body(part)) for part in x.split(2)]),
    "the second": lambda body, head, x: torch.cat([head(part) for part in body(x).split(2)]),
    "the second, slices": lambda body, head, x: torch.cat([head(h[:2]), head(h[2:])]) if (h := body(x)) is not None else h,
    "the second, of other sizes": lambda body, head, x: torch.cat([head(part) for part in body(x).split([1, 3])]),
}
WHOLE: dict[str, Callable[[nn.Module, nn.Module, Tensor], Tensor]] = {
    "one after the other": lambda body, head, x: head(body(x)),
    "joined in between": lambda body, head, x: head(torch.cat([body(part) for part in x.split(2)])),
    "same samples": lambda body, head, x: head(body(x)) + head(body(2 * x)),
}


def chained() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(2, 4), nn.Tanh()).double()), extend(nn.Linear(4, 3).double()), torch.randn(4, 2, dtype=torch.float64)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("way", PIECES)
def test_pieces_of_chained_models(way: str, extension: type) -> None:
    """Rows of other pieces are other samples, or not: that is not known."""
    body, head, x = chained()
    with backpack(extension()), pytest.raises(BackpackError):
        F.cross_entropy(PIECES[way](body, head, x), torch.tensor([0, 1, 2, 0])).backward()
    assert results(body) == results(head) == {}


@pytest.mark.parametrize("way", WHOLE)
def test_chained_models(way: str) -> None:
    body, head, x = chained()
    parameters = [*body.parameters(), *head.parameters()]
    losses = F.cross_entropy(WHOLE[way](body, head, x), torch.tensor([0, 1, 2, 0]), reduction="none")
    expected = [torch.autograd.grad(loss / 4, parameters, retain_graph=True) for loss in losses]
    with backpack(BatchGrad()):
        F.cross_entropy(WHOLE[way](body, head, x), torch.tensor([0, 1, 2, 0])).backward()
    for parameter, *rows in zip(parameters, *expected, strict=True):
        close(parameter.grad_batch, torch.stack(rows))


def filled(outs: list[Tensor]) -> Tensor:
    out = outs[0].new_empty(len(outs), 3)
    for n, row in enumerate(outs):
        out[n] = row[0]
    return out


ONE_BY_ONE: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "first rows": lambda outs: torch.stack([out[0] for out in outs]),
    "squeezed": lambda outs: torch.stack([out.squeeze(0) for out in outs]),
    "squeezed, all axes": lambda outs: torch.stack([out.squeeze() for out in outs]),
    "reshaped": lambda outs: torch.stack([out.view(-1) for out in outs]),
    "unbound": lambda outs: torch.stack([row for out in outs for row in out]),
    "indexed": lambda outs: torch.stack([out[0, :] for out in outs]),
    "mean of a row": lambda outs: torch.stack([out.mean(0) for out in outs]),
    "with an axis again": lambda outs: torch.cat([out[0].unsqueeze(0) for out in outs]),
    "normalized": lambda outs: torch.stack([out[0].softmax(-1) for out in outs]),
    "functions": lambda outs: torch.stack([2 * out[0].tanh() + 1 for out in outs]),
    "entries": lambda outs: torch.stack([out[0, 0] for out in outs])[:, None].expand(-1, 3),
    "entries, squeezed": lambda outs: torch.stack([out[:, 1].squeeze() + 1 for out in outs])[:, None].expand(-1, 3),
    "filled in": filled,
    "products": lambda outs: (rows := torch.cat(outs)) * torch.bmm(rows.unsqueeze(1), rows.unsqueeze(2)).flatten(1),
    "products, constant in front": lambda outs: torch.bmm(torch.ones(len(outs), 3, 3).double(), torch.cat(outs).unsqueeze(2)).flatten(1),
}


@pytest.mark.parametrize("way", ONE_BY_ONE)
@pytest.mark.parametrize("samples", [2, 3])
def test_samples_that_a_model_is_given_one_by_one(samples: int, way: str) -> None:
    """Rows of several calls, as of ``torch.cat``: all of them would be taken for one sample."""
    model, x, y = extend(nn.Linear(4, 3).double()), torch.randn(samples, 4, dtype=torch.float64), torch.randn(samples, 3, dtype=torch.float64)
    with backpack(BatchGrad()), pytest.raises(UnsupportedError, match=f"called {samples} times, with different data"):
        F.mse_loss(ONE_BY_ONE[way]([model(row[None]) for row in x]), y).backward()
    assert results(model) == {}


@pytest.mark.parametrize("bare", [False, True])
def test_losses_of_one_sample_each_are_added(bare: bool) -> None:
    """Stacked or not: several losses in one backward pass are of the same samples."""
    model, x, y = extend(nn.Linear(4, 3).double()), torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 2])
    with backpack(BatchGrad()):
        pairs = zip(x, y, strict=True)
        losses = [F.cross_entropy(model(row[None])[0], label) if bare else F.cross_entropy(model(row[None]), label[None]) for row, label in pairs]
        torch.stack(losses).mean().backward()
    close(model.weight.grad_batch, model.weight.grad[None])


VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "difference": lambda one, other: one - other,
    "difference of rows": lambda one, other: (one[0] - other[0])[None],
    "mean": lambda one, other: torch.stack([one, other]).mean(0),
    "mean of rows": lambda one, other: torch.stack([one[0], other[0]]).mean(0, keepdim=True),
}


@pytest.mark.parametrize("way", VIEWS)
def test_views_of_a_single_sample(way: str) -> None:
    model, x = extend(nn.Linear(4, 3).double()), torch.randn(2, 4, dtype=torch.float64)
    with backpack(BatchGrad()):
        F.mse_loss(VIEWS[way](model(x[:1]), model(x[1:])), torch.ones(1, 3, dtype=torch.float64)).backward()
    close(model.weight.grad_batch, model.weight.grad[None])
