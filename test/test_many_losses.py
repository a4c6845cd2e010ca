"""Losses in a loop, of samples or steps, share columns: a pass costs about as much as with one loss of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_extensions import close
from torch import Tensor, nn
from torch.nn import functional as F

from backpack import backpack, extend
from backpack.core.starts import FEW
from backpack.extensions import KFAC, KFLR, BatchDiagGGNExact, DiagGGNExact, DiagGGNMC, SqrtGGNExact, SqrtGGNMC
from backpack.utils.errors import UnsupportedError

SAMPLES, STEPS, CLASSES = 6, 3, 4
Loss = Callable[[Tensor, Tensor], Tensor]


def total(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum")


LOOPS: dict[str, Loss] = {
    "samples": lambda out, y: sum(total(o, target) for o, target in zip(out, y, strict=True)),
    "rows": lambda out, y: sum(total(out[n : n + 1], y[n : n + 1]) for n in range(SAMPLES)),
    "pairs": lambda out, y: sum(total(out[n : n + 2], y[n : n + 2]) for n in range(0, SAMPLES, 2)),
    "uneven": lambda out, y: total(out[:1], y[:1]) + total(out[1:4], y[1:4]) + total(out[4:], y[4:]),
    "weighted": lambda out, y: sum(w * total(out[n], y[n]) for n, w in enumerate(torch.linspace(0.5, 2, SAMPLES))),
    "two rounds": lambda out, y: sum(0.5 * total(out[n], y[n]) for _ in range(2) for n in range(SAMPLES)),
}


def made() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    return extend(model), torch.randn(SAMPLES, STEPS, 5, dtype=torch.float64), torch.randint(CLASSES, (SAMPLES, STEPS))


def at_once(out: Tensor, y: Tensor, name: str) -> Tensor:
    losses = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").unflatten(0, y.shape)
    return (losses * torch.linspace(0.5, 2, SAMPLES)[:, None]).sum() if name == "weighted" else losses.sum()


@pytest.mark.parametrize("memory", [None, "2KiB"])
@pytest.mark.parametrize("name", LOOPS)
def test_losses_of_other_samples_share_columns(name: str, memory: str | None) -> None:
    """Exact quantities are those of one loss, with as many columns; only several losses of the same samples have more."""
    model, x, y = made()
    extensions = {"diag_ggn_exact": DiagGGNExact(), "diag_ggn_exact_batch": BatchDiagGGNExact(), "sqrt_ggn_exact": SqrtGGNExact(), "kflr": KFLR()}
    with backpack(*extensions.values()):
        at_once(model(x), y, name).backward()
    expected = {(name, p): getattr(p, name) for p in model.parameters() for name in extensions}
    with backpack(*extensions.values(), memory=memory):
        LOOPS[name](model(x), y).backward()
    for (field, parameter), value in expected.items():
        found = getattr(parameter, field)
        if field == "sqrt_ggn_exact":
            assert len(found) == len(value) * (2 if name == "two rounds" else 1)
            close(*(torch.einsum("vni,vnj->nij", root.flatten(2), root.flatten(2)) for root in (found, value)))
            continue
        for one, other in zip(found, value, strict=True) if field == "kflr" else [(found, value)]:
            close(one, other)


@pytest.mark.parametrize("steps", [FEW, FEW + 2])
def test_many_losses_share_what_is_drawn(steps: int) -> None:
    """Its mean is right, as what is drawn for two losses is independent; a few losses have columns of their own, which are less noisy."""
    torch.manual_seed(1)
    model, x, y, drawn = extend(nn.Linear(2, 3).double()), torch.randn(2, steps, 2, dtype=torch.float64), torch.randint(3, (2, steps)), 20_000

    def loss(out: Tensor) -> Tensor:
        return sum(F.cross_entropy(out[:, t], y[:, t]) for t in range(steps))

    with backpack(SqrtGGNMC(mc_samples=7)):
        loss(model(x)).backward()
    assert len(model.weight.sqrt_ggn_mc) == (7 if steps > FEW else 7 * steps)
    with backpack(DiagGGNExact(), DiagGGNMC(mc_samples=drawn), KFLR(), KFAC(mc_samples=drawn)):
        loss(model(x)).backward()
    pairs = [(model.weight.diag_ggn_mc, model.weight.diag_ggn_exact), *zip(model.weight.kfac, model.weight.kflr, strict=True)]
    for estimate, exact in pairs:
        assert (estimate - exact).abs().max() < 0.05 * exact.abs().max()


def test_what_is_shared_is_not_cut() -> None:
    """The numbers would depend on the budget."""
    model, x, y = made()
    with backpack(SqrtGGNMC(mc_samples=50), memory="2KiB"), pytest.raises(UnsupportedError, match="more than 4 losses shares columns"):
        LOOPS["samples"](model(x), y).backward()
