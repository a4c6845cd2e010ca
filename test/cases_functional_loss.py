"""Rows of the table of cases: losses that are called as functions, on samples or on rows folded from them, and losses written by hand."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from cases_loss import WEIGHTS, ignoring_first, signs
from oracle import Problem, Term, call_model
from table import add, bits, labels
from torch import Tensor, nn, rand, randn
from torch.nn import Linear, Module, MSELoss, Sequential, Unflatten
from torch.nn import functional as F

from backpack import extend

SMOOTH = {"label_smoothing": 0.3}
CE, LAST = nn.CrossEntropyLoss(), extend(nn.LogSoftmax(-1))


def behind(
    function: Callable,
    module: Module,
    shape: tuple[int, ...],
    targets: Callable[[int], tuple],
    N: int,
    last: Module | None = None,
    scale: Callable[[int], Tensor] | float = 1.0,
    output: Callable[[Module, Tensor], Tensor] = call_model,
) -> Problem:
    """Put a function behind a small net.

    Args:
        function: The loss.
        module: A loss module whose labels have the same distribution.
        shape: Shape of the output of one sample.
        targets: Makes all arguments but the prediction.
        N: Batch size.
        last: Last module.
        scale: Factor of the loss, or what makes it.
        output: Maps model and input to the prediction.

    Returns:
        Problem.
    """
    layers = [Linear(3, 2), nn.Sigmoid(), Linear(2, torch.Size(shape).numel())]
    layers += [Unflatten(1, shape)] if len(shape) > 1 else []
    layers += [deepcopy(last)] if last is not None else []
    x = 2 * randn(N, 3)
    return Problem(Sequential(*layers), x, [Term(module, targets(N), 0, scale if isinstance(scale, float) else scale(N), function)], output)


def weighted(out: Tensor, y: Tensor, weight: Tensor, **options: object) -> Tensor:  # noqa: D103
    return F.cross_entropy(out, y, weight, **options)


def weights(N: int, *shape: int) -> tuple[Tensor, ...]:  # noqa: D103
    return labels(N, *shape), torch.tensor(WEIGHTS)


def folded(out: Tensor, y: Tensor, **options: object) -> Tensor:
    """Cross-entropy of ``[N, C, T]``, with the time steps in rows."""
    return F.cross_entropy(out.transpose(1, 2).reshape(-1, out.shape[1]), y.flatten(), **options)


def shifted(out: Tensor, y: Tensor, **options: object) -> Tensor:
    """Cross-entropy of all time steps but the last, ``y`` shifted, as in language models."""
    return F.cross_entropy(out.transpose(1, 2)[:, :-1].reshape(-1, out.shape[1]), y[:, 1:].flatten(), **options)


def classes_last(out: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return F.nll_loss(out.transpose(1, 2).log_softmax(-1).transpose(1, 2), y)


def by_hand(out: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return -out.log_softmax(1)[torch.arange(len(y)), y].mean()


def distilled(out: Tensor, teacher: Tensor) -> Tensor:  # noqa: D103
    return F.kl_div(out.log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean") * 4


def extended(make: Callable[..., Module], **options: object) -> Callable[..., Tensor]:
    """A loss module that is extended, behind an extended ``LogSoftmax``."""
    softmax, lossfunc = extend(nn.LogSoftmax(1)), extend(make(**options))
    return lambda out, *targets: lossfunc.to(out.dtype)(softmax(out), *targets)


def reshaped(out: Tensor, y: Tensor) -> Tensor:
    """Log-probabilities ``[N, T, C]`` of a module, folded for a loss module that is extended."""
    return extend(nn.NLLLoss(ignore_index=1))(LAST(out.transpose(1, 2)).reshape(-1, out.shape[1]), y.flatten())


def tempered(out: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return extend(nn.NLLLoss())(3 * (out.log_softmax(1) / 2), y)


def one_number(model: Module, x: Tensor) -> Tensor:
    """A prediction ``[N]``."""
    return model(x).squeeze(1)


def hardest(out: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    losses = F.cross_entropy(out, y, reduction="none")
    return losses.topk(1).values.mean() + losses.sort().values[-2:].sum()


def limited(out: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    losses = F.cross_entropy(out, y, reduction="none")
    return torch.lerp(losses.clamp(max=1.3).sum(), losses.nan_to_num().relu().mean(), 0.3)


def flooded(out: Tensor, y: Tensor) -> Tensor:  # noqa: D103
    return (F.mse_loss(out, y, reduction="none").mean(1) - 1).abs().sum()


def bce(out: Tensor, y: Tensor, weight: Tensor, pos_weight: Tensor, **options: object) -> Tensor:  # noqa: D103
    return F.binary_cross_entropy_with_logits(out, y, weight, pos_weight=pos_weight, **options)


def probabilities(N: int, *shape: int) -> tuple[Tensor]:  # noqa: D103
    return (1.5 * rand(N, 4, *shape).softmax(1),)


Targets = Callable[[int], tuple]
# name -> function, module with the same distribution, shape of the output, further arguments
REDUCED: dict[str, tuple[Callable, Module, tuple[int, ...], Targets]] = {
    "cross_entropy": (F.cross_entropy, CE, (4,), lambda N: (labels(N),)),
    "cross_entropy, ignored": (partial(F.cross_entropy, ignore_index=1), CE, (4,), lambda N: (ignoring_first(labels(N), 1),)),
    "cross_entropy, weights": (weighted, CE, (4,), weights),
    "cross_entropy, weights, 3-d": (weighted, CE, (4, 2), lambda N: weights(N, 2)),
    "cross_entropy, 4-d": (F.cross_entropy, CE, (4, 1, 2), lambda N: (labels(N, 1, 2),)),
    "cross_entropy, 5-d": (F.cross_entropy, CE, (4, 1, 2, 1), lambda N: (labels(N, 1, 2, 1),)),
    "cross_entropy, smoothing": (partial(F.cross_entropy, **SMOOTH), CE, (4,), lambda N: (ignoring_first(labels(N), -100),)),
    "cross_entropy, smoothing, weights, 3-d": (partial(weighted, **SMOOTH), CE, (4, 2), lambda N: weights(N, 2)),
    "cross_entropy, probabilities": (F.cross_entropy, CE, (4,), probabilities),
    "cross_entropy, probabilities, smoothing, 3-d": (partial(F.cross_entropy, **SMOOTH), CE, (4, 2), lambda N: probabilities(N, 2)),
    "mse_loss": (F.mse_loss, MSELoss(), (2, 2), lambda N: (randn(N, 2, 2),)),
    "binary_cross_entropy_with_logits": (bce, nn.BCEWithLogitsLoss(), (3,), lambda N: (bits(N, 3), rand(3), 1 + rand(3))),
    "huber_loss": (partial(F.huber_loss, delta=0.7), nn.HuberLoss(), (2, 2), lambda N: (randn(N, 2, 2),)),
    "smooth_l1_loss": (partial(F.smooth_l1_loss, beta=0.7), nn.SmoothL1Loss(), (4,), lambda N: (randn(N, 4),)),
    "soft_margin_loss": (F.soft_margin_loss, nn.SoftMarginLoss(), (3,), lambda N: (signs(N, 3),)),
}
for _name, (_function, _module, _shape, _targets) in REDUCED.items():
    for _reduction in ("mean", "sum"):
        add(f"F.{_name}, {_reduction}", partial(behind, partial(_function, reduction=_reduction), _module, _shape, _targets), "chain")
for _name in ("cross_entropy, weights, 3-d", "mse_loss", "binary_cross_entropy_with_logits", "huber_loss"):
    _function, _module, _shape, _targets = REDUCED[_name]
    add(
        f"weighted sum of F.{_name}",
        partial(
            behind,
            partial(_function, reduction="none"),
            _module,
            _shape,
            _targets,
            scale=lambda N, shape=_shape[1:] if _module is CE else _shape: rand(N, *shape) + 0.2,
        ),
        "chain",
        "special loss",
    )
for _reduction in ("mean", "sum"):
    _bce = partial(F.binary_cross_entropy, reduction=_reduction)
    add(f"F.binary_cross_entropy, {_reduction}", partial(behind, _bce, nn.BCELoss(), (3,), lambda N: (bits(N, 3),), last=nn.Sigmoid()), "chain")
add("scaled F.cross_entropy", partial(behind, F.cross_entropy, CE, (4,), lambda N: (labels(N),), scale=0.3), "chain")
add("log-likelihood by hand", partial(behind, by_hand, CE, (4,), lambda N: (labels(N),)), "chain")
add("F.nll_loss of log_softmax", partial(behind, lambda out, y: F.nll_loss(out.log_softmax(1), y), CE, (4,), lambda N: (labels(N),)), "chain")
add("F.kl_div of log_softmax", partial(behind, distilled, CE, (4,), lambda N: (randn(N, 4),), output=lambda model, x: model(x) / 2))
add("log_softmax, classes last", partial(behind, classes_last, CE, (4, 3), lambda N: (labels(N, 3),)))
for _reduction in ("mean", "sum"):
    _loss = extended(nn.NLLLoss, weight=torch.tensor(WEIGHTS), ignore_index=1, reduction=_reduction)
    add(f"NLLLoss of LogSoftmax, 3-d, {_reduction}", partial(behind, _loss, CE, (4, 2), lambda N: (ignoring_first(labels(N, 2), 1),)), "chain")
add("scaled NLLLoss of LogSoftmax", partial(behind, extended(nn.NLLLoss), CE, (4,), lambda N: (labels(N),), scale=0.3), "chain")
add("folded NLLLoss of LogSoftmax", partial(behind, reshaped, CE, (4, 3), lambda N: (ignoring_first(labels(N, 3), 1),)))
add("NLLLoss of scaled log-probabilities", partial(behind, tempered, CE, (4,), lambda N: (labels(N),)), "chain")
add("KLDivLoss of LogSoftmax", partial(behind, extended(nn.KLDivLoss, reduction="batchmean"), CE, (4,), probabilities), "chain")
add("negative F.cross_entropy", partial(behind, F.cross_entropy, CE, (4,), lambda N: (labels(N),), scale=-0.5), "chain", "not convex")
add("negative F.mse_loss", partial(behind, F.mse_loss, MSELoss(), (4,), lambda N: (randn(N, 4),), scale=-0.5), "chain", "not convex")
add("F.mse_loss, broadcast", partial(behind, F.mse_loss, MSELoss(), (1,), lambda N: (randn(N, 3),), output=lambda model, x: model(x).expand(-1, 3)))
add("scaled F.mse_loss of numbers", partial(behind, F.mse_loss, MSELoss(), (1,), lambda N: (randn(N),), scale=0.5, output=one_number))
for _name, _scale, _tags in (("weighted", lambda N: rand(N) + 0.2, ()), ("signed", lambda N: torch.arange(N) - 0.5, ("not convex",))):
    _bce = partial(F.binary_cross_entropy_with_logits, reduction="none")
    _numbers = partial(behind, _bce, nn.BCEWithLogitsLoss(), (1,), lambda N: (bits(N),), scale=_scale, output=one_number)
    add(f"{_name} sum of F.binary_cross_entropy_with_logits of numbers", _numbers, "special loss", *_tags)
for _function in (hardest, limited):
    add(f"{_function.__name__} F.cross_entropy", partial(behind, _function, CE, (4,), lambda N: (labels(N),)), "chain", "special loss")
for _function in (F.mse_loss, F.huber_loss, F.smooth_l1_loss):
    _swapped = partial(lambda function, out, y: function(y, out), _function)
    _module = MSELoss() if _function is F.mse_loss else nn.HuberLoss()
    add(f"F.{_function.__name__}, swapped", partial(behind, _swapped, _module, (2, 2), lambda N: (2 * randn(N, 2, 2),)), "chain")
add("MSELoss, swapped", partial(behind, lambda out, y: extend(MSELoss())(y, out), MSELoss(), (2,), lambda N: (randn(N, 2),)), "chain")
add("flooded F.mse_loss", partial(behind, flooded, MSELoss(), (4,), lambda N: (randn(N, 4),)), "chain", "special loss", "maybe not convex")
add(
    "F.mse_loss of softmax",
    partial(behind, F.mse_loss, MSELoss(), (3,), lambda N: (randn(N, 3),), output=lambda model, x: model(x).softmax(1)),
)

for _reduction in ("mean", "sum"):
    _folded = partial(folded, reduction=_reduction, ignore_index=1)
    add(f"folded F.cross_entropy, {_reduction}", partial(behind, _folded, CE, (4, 3), lambda N: (ignoring_first(labels(N, 3), 1),)))
add("folded F.cross_entropy, one row each", partial(behind, folded, CE, (4, 1), lambda N: (labels(N, 1),)))
add("folded F.cross_entropy, smoothing", partial(behind, partial(folded, **SMOOTH), CE, (4, 2), lambda N: (labels(N, 2),)))
add(
    "folded F.mse_loss",
    partial(behind, lambda out, y: F.mse_loss(out.flatten(0, 1), y.flatten(0, 1)), MSELoss(), (2, 3), lambda N: (randn(N, 2, 3),)),
)
add(
    "folded F.huber_loss",
    partial(behind, lambda out, y: F.huber_loss(out.flatten(), y.flatten()), nn.HuberLoss(), (2, 2), lambda N: (randn(N, 2, 2),)),
)


def two_functions(N: int) -> Problem:  # noqa: D103
    terms = [Term(CE, labels(N), 0, 0.7, F.cross_entropy), Term(MSELoss(), randn(N, 4), 0, 1.3, F.mse_loss)]
    return Problem(Sequential(Linear(3, 4)), randn(N, 3), terms)


def function_and_module(N: int) -> Problem:  # noqa: D103
    terms = [Term(CE, labels(N, 2), 0, 0.7, folded), Term(MSELoss(), randn(N, 4, 2), 0)]
    return Problem(Sequential(Linear(3, 5), nn.Sigmoid(), Linear(5, 8), Unflatten(1, (4, 2))), randn(N, 3), terms)


def function_on_features(N: int) -> Problem:
    """A regulariser on hidden features beside the loss."""
    body, head = Sequential(Linear(3, 2), nn.Tanh()), Linear(2, 4)
    terms = [Term(MSELoss(), randn(N, 2), 0, 0.3, F.mse_loss), Term(CE, labels(N), 1, 1.0, F.cross_entropy)]
    return Problem(Sequential(body, head), randn(N, 3), terms, lambda model, x: (h := model[0](x), model[1](h)))


add("two loss functions", two_functions, "chain", "special loss")
add("loss function and extended loss", function_and_module, "special loss")
add("loss function on features", function_on_features, "graph", "special loss")
