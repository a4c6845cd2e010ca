"""Sampled square roots of the loss's Hessian, with the labels that the library draws from the same state of the random generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor
from torch.distributions import Binomial, Categorical, Normal
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Module, MSELoss, NLLLoss
from torch.nn import functional as F

from backpack.verification.reference import Incomparable

_CATEGORICAL = (CrossEntropyLoss, NLLLoss)  # log-probabilities are as good as logits


def draw(loss: Module, output: Tensor, curvature: Callable[[Tensor], Tensor], draws: int, samples: Sequence[int]) -> Tensor:
    """Draw labels from the model's distribution, and differentiate the negative log-likelihood.

    Its expected square is the Fisher information of the likelihood; the quotient with the Hessian of the loss is the weight of each term: reduction,
    weights of classes, targets that are ignored.

    Args:
        loss: The loss function.
        output: What the model returned, ``[N, *]``.
        curvature: Multiplies with the Hessian of the loss.
        draws: Number of draws ``M`` for each sample.
        samples: Indices of the samples, ``K`` of them.

    Returns:
        Columns ``[M, K, D]`` whose squares, added over ``M``, have the Hessian as expected value.

    Raises:
        Incomparable: If the distribution that belongs to the loss is not known here.
    """
    output, samples, size = output.detach(), list(samples), torch.Size([draws])
    z, probe = output[samples], torch.ones_like(output)
    if type(loss) is MSELoss:
        gradient = 2 * (z - Normal(z, torch.full_like(z, 0.5).sqrt()).sample(size))
        fisher = torch.full_like(output, 2.0)
    elif type(loss) is BCEWithLogitsLoss:
        probs = output.sigmoid()
        gradient, fisher = probs[samples] - Binomial(probs=probs[samples]).sample(size), probs * (1 - probs)
    elif type(loss) in _CATEGORICAL:
        probs = output.softmax(1)
        classes = probs[samples].movedim(1, -1)
        labels = Categorical(probs=classes).sample(size)
        gradient = (classes - F.one_hot(labels, classes.shape[-1])).movedim(-1, 2)
        fisher = probs * (1 - probs)
        # one class of each position says what its weight is, the same for all
        probe = F.one_hot(fisher.argmax(1), probs.shape[1]).movedim(-1, 1).to(output.dtype)
    else:
        raise Incomparable(
            f"the distribution of labels is known for MSELoss, CrossEntropyLoss, NLLLoss and BCEWithLogitsLoss only, not for {type(loss).__name__}: "
            "verify the exact quantity, and the loss with backpack.check_rule"
        )
    weight = torch.where(probe > 0, curvature(probe).reshape(output.shape) / fisher, 0)
    weight = weight.sum(1, keepdim=True) if type(loss) in _CATEGORICAL else weight
    return (gradient * weight[samples].clamp(min=0).sqrt() / sqrt(draws)).reshape(draws, len(samples), output[0].numel())
