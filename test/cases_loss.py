"""Rows of the table of cases: losses other than the three of ``cases_nets.py``, not convex ones, and losses of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from oracle import Problem, Term
from table import add, bits, labels
from torch import Tensor, nn, rand, randint, randn
from torch.nn import Linear, Module, Sequential, Unflatten

from backpack.core.derivatives import GenericLossDerivatives, register


class LogCosh(Module):
    """A loss of the user's own, convex, recognised by itself."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Evaluate.

        Args:
            prediction: ``[N, *]``.
            target: ``[N, *]``.

        Returns:
            A scalar.
        """
        return (prediction - target).cosh().log().mean()


class Focused(Module):
    """A loss of the user's own with one term a position, convex if what is already right counts as much."""

    def __init__(self, axis: int, gamma: float) -> None:
        """Store the options.

        Args:
            axis: Axis of the classes.
            gamma: How much less it counts.
        """
        super().__init__()
        self.axis, self.gamma = axis, gamma

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Evaluate.

        Args:
            logits: ``[N, *]``.
            target: ``[N, *]`` without the axis of the classes.

        Returns:
            The mean over samples and positions.
        """
        log_probs = logits.log_softmax(self.axis).gather(self.axis, target.unsqueeze(self.axis)).squeeze(self.axis)
        return -((1 - log_probs.exp()) ** self.gamma * log_probs).mean()


class Smooth(Module):
    """A loss of the user's own in which neighbours meet, however little."""

    def __init__(self, weight: float) -> None:
        """Store the weight.

        Args:
            weight: Of the differences of neighbours.
        """
        super().__init__()
        self.weight = weight

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Evaluate.

        Args:
            prediction: ``[N, *]``.
            target: ``[N, *]``.

        Returns:
            A scalar.
        """
        return ((prediction - target) ** 4).mean() + self.weight * prediction.diff(dim=-1).square().mean()


class Ranking(Module):
    """A loss of the user's own without a target: each first entry is to exceed the second one."""

    def forward(self, scores: Tensor) -> Tensor:
        """Evaluate.

        Args:
            scores: ``[N, 2]``.

        Returns:
            The mean over samples.
        """
        return -nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


class Cauchy(Module):
    """A loss of the user's own, not convex far from the target, that uses a module."""

    def __init__(self) -> None:
        """Create the module."""
        super().__init__()
        self.flatten = nn.Flatten()

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Evaluate.

        Args:
            prediction: ``[N, *]``.
            target: ``[N, *]``.

        Returns:
            A scalar.
        """
        return self.flatten(prediction - target).square().sum(1).log1p().sum()


class Sharpened(nn.CrossEntropyLoss):
    """A loss derived from one of torch, with another value."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Evaluate.

        Args:
            input: Logits.
            target: Classes.

        Returns:
            A scalar, or one number a sample.
        """
        return super().forward(2 * input, target) + 0.1 * super().forward(input.pow(3), target)


class Registered(Module):
    """A loss of the user's own that is declared to be one; it returns one number a sample."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Evaluate.

        Args:
            prediction: ``[N, C]``.
            target: ``[N, C]``.

        Returns:
            ``[N]``.
        """
        return (1 + (prediction - target).square().sum(1)).sqrt()


register(Registered, GenericLossDerivatives)


def behind(
    last: Module | None, shape: tuple[int, ...], make: Callable[[int], tuple], N: int, scale: Callable[[int], Tensor] | float = 1.0
) -> Problem:
    """Put a loss behind a small net that ends in some module.

    Args:
        last: Last module.
        shape: Shape of the output of one sample.
        make: Makes loss module and further arguments.
        N: Batch size.
        scale: Factor of the loss, or what makes it.

    Returns:
        Problem.
    """
    layers = [Linear(3, 2), nn.Sigmoid(), Linear(2, torch.Size(shape).numel())]
    layers += [Unflatten(1, shape)] if len(shape) > 1 else []
    layers += [deepcopy(last)] if last is not None else []
    loss, *others = make(N)
    x = 2 * randn(N, 3)
    return Problem(Sequential(*layers), x, [Term(loss, tuple(others), scale=scale if isinstance(scale, float) else scale(N))])


def ignoring_first(target: Tensor, ignored: int) -> Tensor:
    """Ignore the first target.

    Args:
        target: Classes.
        ignored: Class that is ignored.

    Returns:
        The same tensor, changed.
    """
    target.view(-1)[0] = ignored
    return target


def signs(*shape: int) -> Tensor:
    """Draw signs.

    Args:
        shape: Shape.

    Returns:
        Entries 1 and -1.
    """
    return 2 * bits(*shape) - 1


def counts(*shape: int) -> Tensor:
    """Draw counts.

    Args:
        shape: Shape.

    Returns:
        Floating point numbers.
    """
    return randint(4, shape).to(torch.get_default_dtype())


WEIGHTS = (0.3, 1.7, 0.9, 1.1)
Make = Callable[[str, int], tuple]
# name -> last module, shape of the output, makes the loss for a reduction and a batch size
LOSSES: dict[str, tuple[Module | None, tuple[int, ...], Make]] = {
    "BCELoss": (nn.Sigmoid(), (3,), lambda red, N: (nn.BCELoss(reduction=red), bits(N, 3))),
    "BCELoss, weight, 3-d": (nn.Sigmoid(), (3, 2), lambda red, N: (nn.BCELoss(rand(N, 1, 2), reduction=red), rand(N, 3, 2))),
    "NLLLoss": (None, (4,), lambda red, N: (nn.NLLLoss(torch.tensor(WEIGHTS), reduction=red), labels(N))),
    "NLLLoss, 3-d, ignored": (None, (4, 2), lambda red, N: (nn.NLLLoss(ignore_index=1, reduction=red), ignoring_first(labels(N, 2), 1))),
    "L1Loss": (None, (2, 2), lambda red, N: (nn.L1Loss(reduction=red), randn(N, 2, 2))),
    "SmoothL1Loss": (None, (4,), lambda red, N: (nn.SmoothL1Loss(beta=0.7, reduction=red), randn(N, 4))),
    "HuberLoss": (None, (2, 2), lambda red, N: (nn.HuberLoss(delta=0.7, reduction=red), randn(N, 2, 2))),
    "PoissonNLLLoss": (None, (3,), lambda red, N: (nn.PoissonNLLLoss(full=True, reduction=red), counts(N, 3))),
    "PoissonNLLLoss, rate": (nn.Softplus(), (3,), lambda red, N: (nn.PoissonNLLLoss(log_input=False, full=True, reduction=red), counts(N, 3))),
    "GaussianNLLLoss": (None, (3,), lambda red, N: (nn.GaussianNLLLoss(full=True, reduction=red), randn(N, 3), rand(N, 3))),
    "GaussianNLLLoss, one variance": (None, (2, 2), lambda red, N: (nn.GaussianNLLLoss(eps=0.5, reduction=red), randn(N, 2, 2), rand(N, 2))),
    "KLDivLoss": (None, (3,), lambda red, N: (nn.KLDivLoss(reduction=red), randn(N, 3).softmax(1))),
    "KLDivLoss, log target": (None, (3,), lambda red, N: (nn.KLDivLoss(reduction=red, log_target=True), randn(N, 3).log_softmax(1))),
    "SoftMarginLoss": (None, (3,), lambda red, N: (nn.SoftMarginLoss(reduction=red), signs(N, 3))),
    "MultiLabelSoftMarginLoss": (None, (4,), lambda red, N: (nn.MultiLabelSoftMarginLoss(torch.tensor(WEIGHTS), reduction=red), bits(N, 4))),
    "HingeEmbeddingLoss": (None, (3,), lambda red, N: (nn.HingeEmbeddingLoss(0.5, reduction=red), signs(N, 3))),
    "MarginRankingLoss": (None, (3,), lambda red, N: (nn.MarginRankingLoss(0.5, reduction=red), randn(N, 3), signs(N, 3))),
    "derived loss": (None, (4,), lambda red, N: (Sharpened(reduction=red), labels(N))),
}
TAGS = {"derived loss": ("maybe not convex",)}

for _name, (_last, _shape, _make) in LOSSES.items():
    for _reduction in ("mean", "sum"):
        if "KLDiv" not in _name or _reduction == "sum":  # torch warns of its mean
            add(f"{_name}, {_reduction}", partial(behind, _last, _shape, partial(_make, _reduction)), "chain", *TAGS.get(_name, ()))
_last, _shape, _make = LOSSES["KLDivLoss"]
add("KLDivLoss, batchmean", partial(behind, _last, _shape, partial(_make, "batchmean")), "chain")

for _name, _positions in {
    "BCELoss": (3,),
    "HuberLoss": (2, 2),
    "PoissonNLLLoss": (1,),
    "GaussianNLLLoss": (3,),
    "MultiLabelSoftMarginLoss": (),
}.items():
    _last, _shape, _make = LOSSES[_name]
    add(
        f"weighted sum of {_name}",
        partial(behind, _last, _shape, partial(_make, "none"), scale=lambda N, positions=_positions: rand(N, *positions) + 0.2),
        "chain",
        "special loss",
    )

add("own loss", partial(behind, None, (2, 2), lambda N: (LogCosh(), randn(N, 2, 2))), "chain")
add(
    "own loss, registered", partial(behind, None, (3,), lambda N: (Registered(), randn(N, 3)), scale=lambda N: rand(N) + 0.2), "chain", "special loss"
)
add("own loss without a target", partial(behind, None, (2,), lambda N: (Ranking(),)), "chain")
add("own loss, not convex", partial(behind, None, (3,), lambda N: (Cauchy(), 5 + randn(N, 3))), "chain", "not convex")
add("own loss of entries", partial(behind, None, (3, 3), lambda N: (LogCosh(), randn(N, 3, 3))), "chain")
add("own loss of entries, not convex", partial(behind, None, (8,), lambda N: (Cauchy(), 5 + randn(N, 8))), "chain", "not convex")
add("own loss of positions", partial(behind, None, (2, 2, 4), lambda N: (Focused(1, 0), randint(2, (N, 2, 4)))), "chain")
add("own loss of positions, not convex", partial(behind, None, (2, 8), lambda N: (Focused(1, 2), randint(2, (N, 8)))), "chain", "maybe not convex")
add(
    "own loss of positions, classes last, weighted",
    partial(behind, None, (8, 2), lambda N: (Focused(-1, 0), randint(2, (N, 8))), scale=-0.7),
    "chain",
    "not convex",
)
add("own loss of neighbours", partial(behind, None, (8,), lambda N: (Smooth(0.3), randn(N, 8))), "chain")
add("CosineEmbeddingLoss", partial(behind, None, (3,), lambda N: (nn.CosineEmbeddingLoss(), randn(N, 3), torch.ones(N))), "chain", "not convex")
add(
    "TripletMarginLoss",
    partial(behind, None, (3,), lambda N: (nn.TripletMarginLoss(margin=9.0), randn(N, 3), randn(N, 3))),
    "chain",
    "not convex",
)
add("negative MSE", partial(behind, None, (3,), lambda N: (nn.MSELoss(), randn(N, 3)), scale=-1.0), "chain", "not convex")
add(
    "CE, negative weights",
    partial(behind, None, (4, 2), lambda N: (nn.CrossEntropyLoss(-torch.tensor(WEIGHTS), reduction="sum"), labels(N, 2))),
    "chain",
    "not convex",
)
add(
    "negative CE, negative weights",
    partial(behind, None, (4,), lambda N: (nn.CrossEntropyLoss(-torch.tensor(WEIGHTS), reduction="sum"), labels(N)), scale=-0.5),
    "chain",
    "not convex",
)
add(
    "BCE, negative weights",
    partial(behind, None, (3,), lambda N: (nn.BCEWithLogitsLoss(torch.tensor((0.4, -0.3, 2.0))), bits(N, 3))),
    "chain",
    "not convex",
)
