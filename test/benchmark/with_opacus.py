"""Per-sample gradients by opacus, and norms by its ghost clipping (one for each sample, over all parameters)."""

from __future__ import annotations

from collections.abc import Callable

from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn

QUANTITIES = ("BatchGrad", "BatchL2Grad")


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Wrap the model; return what is to be timed."""
    model = ModuleValidator.fix(model).to(x.device)  # attention and LSTM become modules of opacus
    if norms := quantity == "BatchL2Grad":
        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="mean", max_grad_norm=1.0, use_ghost_clipping=True)
    else:
        wrapped = GradSampleModule(model, loss_reduction="mean")

    def run() -> object:
        wrapped.zero_grad()
        lossfunc(wrapped(x), y).backward()
        return wrapped.get_norm_sample() if norms else [p.grad_sample for p in wrapped.parameters()]

    return run
