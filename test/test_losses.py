"""Losses: factors, products and sums of the Hessian against the dense Hessian of the loss's own value, sampled factors against own draws."""

from collections.abc import Callable
from functools import partial
from math import prod, sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Binomial, Categorical, Normal, Poisson
from torch.nn import functional as F
from torch.nn.modules.loss import _Loss

from backpack import backpack, extend
from backpack.core.derivatives.bcewithlogitsloss import BCELossWithLogitsDerivatives
from backpack.core.derivatives.crossentropyloss import CrossEntropyLossDerivatives
from backpack.core.derivatives.loss_generic import GenericLossDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.nll_base import NLLLossDerivatives
from backpack.core.derivatives.registry import derivatives_for, register
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.utils.errors import LossValueError, MixedSamplesError, ShapeError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # of KLDivLoss
DOUBLE = torch.float64
REDUCTIONS = ("mean", "sum", "none")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=DOUBLE)


def classes(*shape: int, num: int, ignored: int | None = None) -> Tensor:
    target = torch.randint(num, shape)
    if ignored is not None:
        target.view(-1)[::2] = ignored
    return target


# name -> (makes the loss for a reduction, makes input and target)
CASES: dict[str, tuple[Callable[[str], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mse": (lambda r: nn.MSELoss(reduction=r), lambda: (normal(3, 4), normal(3, 4))),
    "mse-1-sample": (lambda r: nn.MSELoss(reduction=r), lambda: (normal(1, 4), normal(1, 4))),
    "mse-1d": (lambda r: nn.MSELoss(reduction=r), lambda: (normal(3), normal(3))),
    "mse-4d": (lambda r: nn.MSELoss(reduction=r), lambda: (normal(3, 2, 3, 2), normal(3, 2, 3, 2))),
    "mse-strided": (lambda r: nn.MSELoss(reduction=r), lambda: (normal(4, 3, 2).transpose(0, 1), normal(3, 4, 2))),
    "ce": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(3, 4), classes(3, num=4))),
    "ce-1-sample": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(1, 4), classes(1, num=4))),
    "ce-1d": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(3, 4, 2), classes(3, 2, num=4))),
    "ce-2d": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(2, 3, 2, 3), classes(2, 2, 3, num=3))),
    "ce-strided": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(3, 2, 4).transpose(1, 2), classes(3, 2, num=4))),
    "ce-1-position": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(3, 4, 1), classes(3, 1, num=4))),
    "ce-large": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (30 * normal(3, 4) + 1000, classes(3, num=4))),
    "ce-weight": (
        lambda r: nn.CrossEntropyLoss(weight=torch.tensor([0.5, 0, 2, 3]).double(), reduction=r),
        lambda: (normal(5, 4), classes(5, num=4)),
    ),
    "ce-weight-1d": (lambda r: nn.CrossEntropyLoss(weight=uniform(4), reduction=r), lambda: (normal(3, 4, 2), classes(3, 2, num=4))),
    "ce-default-ignored": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(5, 4), classes(5, num=4, ignored=-100))),
    "ce-ignored": (
        lambda r: nn.CrossEntropyLoss(weight=uniform(4), ignore_index=2, reduction=r),
        lambda: (normal(3, 4, 3), classes(3, 3, num=4, ignored=2)),
    ),
    "ce-ignored-out-of-range": (
        lambda r: nn.CrossEntropyLoss(weight=uniform(4), ignore_index=9, reduction=r),
        lambda: (normal(3, 4, 3), classes(3, 3, num=4, ignored=9)),
    ),
    "ce-all-ignored": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(3, 4), torch.full((3,), -100))),
    "ce-smoothing": (lambda r: nn.CrossEntropyLoss(label_smoothing=0.3, reduction=r), lambda: (normal(3, 4), classes(3, num=4))),
    "ce-everything": (
        lambda r: nn.CrossEntropyLoss(weight=uniform(4), ignore_index=1, label_smoothing=0.3, reduction=r),
        lambda: (normal(3, 4, 3), classes(3, 3, num=4, ignored=1)),
    ),
    "ce-probabilities": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(3, 4), normal(3, 4).softmax(1))),
    "ce-unnormalised": (lambda r: nn.CrossEntropyLoss(reduction=r), lambda: (normal(3, 4, 2), uniform(3, 4, 2))),
    "ce-unnormalised-everything": (
        lambda r: nn.CrossEntropyLoss(weight=uniform(4), label_smoothing=0.3, reduction=r),
        lambda: (normal(3, 4, 2), uniform(3, 4, 2)),
    ),
    "bce": (lambda r: nn.BCEWithLogitsLoss(reduction=r), lambda: (normal(3, 1), classes(3, 1, num=2).double())),
    "bce-1-sample": (lambda r: nn.BCEWithLogitsLoss(reduction=r), lambda: (normal(1, 4), classes(1, 4, num=2).double())),
    "bce-1d": (lambda r: nn.BCEWithLogitsLoss(reduction=r), lambda: (normal(3), classes(3, num=2).double())),
    "bce-soft": (lambda r: nn.BCEWithLogitsLoss(reduction=r), lambda: (normal(3, 4, 2), uniform(3, 4, 2))),
    "bce-large": (lambda r: nn.BCEWithLogitsLoss(reduction=r), lambda: (30 * normal(3, 4), uniform(3, 4))),
    "bce-weight": (lambda r: nn.BCEWithLogitsLoss(weight=uniform(4), reduction=r), lambda: (normal(3, 4), uniform(3, 4))),
    "bce-sample-weight": (lambda r: nn.BCEWithLogitsLoss(weight=uniform(3, 1), reduction=r), lambda: (normal(3, 4), uniform(3, 4))),
    "bce-pos-weight": (lambda r: nn.BCEWithLogitsLoss(pos_weight=5 * uniform(4), reduction=r), lambda: (normal(3, 4), uniform(3, 4))),
    "bce-everything": (
        lambda r: nn.BCEWithLogitsLoss(weight=uniform(3, 1, 2), pos_weight=5 * uniform(4, 1), reduction=r),
        lambda: (normal(3, 4, 2), uniform(3, 4, 2)),
    ),
    "poisson": (lambda r: nn.PoissonNLLLoss(reduction=r), lambda: (normal(3, 4), uniform(3, 4))),
    "poisson-full": (lambda r: nn.PoissonNLLLoss(full=True, reduction=r), lambda: (normal(3, 2, 2), classes(3, 2, 2, num=5).double())),
    "poisson-rate": (lambda r: nn.PoissonNLLLoss(log_input=False, eps=0.1, reduction=r), lambda: (uniform(3, 4), classes(3, 4, num=5))),
    "bce-of-probabilities": (lambda r: nn.BCELoss(weight=uniform(3, 1), reduction=r), lambda: (normal(3, 4).sigmoid(), uniform(3, 4))),
    "huber": (lambda r: nn.HuberLoss(delta=0.7, reduction=r), lambda: (normal(3, 2, 2), normal(3, 2, 2))),
    "huber-1d": (lambda r: nn.HuberLoss(reduction=r), lambda: (normal(3), normal(3))),
    "smooth-l1": (lambda r: nn.SmoothL1Loss(beta=0.7, reduction=r), lambda: (normal(3, 4), normal(3, 4))),
    "smooth-l1-beta-0": (lambda r: nn.SmoothL1Loss(beta=0.0, reduction=r), lambda: (normal(3, 4), normal(3, 4))),
    "gaussian-nll": (lambda r: nn.GaussianNLLLoss(reduction=r), lambda: (normal(3, 4), normal(3, 4), uniform(3, 4))),
    "gaussian-nll-column": (lambda r: nn.GaussianNLLLoss(full=True, reduction=r), lambda: (normal(3, 4), normal(3, 4), uniform(3, 1))),
    "gaussian-nll-one-axis-less": (lambda r: nn.GaussianNLLLoss(reduction=r), lambda: (normal(3, 2, 4), normal(3, 2, 1), uniform(3, 2))),
    "gaussian-nll-clamped": (lambda r: nn.GaussianNLLLoss(eps=0.5, reduction=r), lambda: (normal(3, 4), normal(3, 4), uniform(3, 4))),
    "kl": (lambda r: nn.KLDivLoss(reduction=r), lambda: (normal(3, 4), uniform(3, 4))),
    "kl-log": (lambda r: nn.KLDivLoss(reduction=r, log_target=True), lambda: (normal(3, 4), normal(3, 4))),
    "soft-margin": (lambda r: nn.SoftMarginLoss(reduction=r), lambda: (normal(1, 4), normal(1, 4).sign())),
    "soft-margin-soft": (lambda r: nn.SoftMarginLoss(reduction=r), lambda: (normal(3, 2, 2), normal(3, 2, 2))),
    "hinge-embedding": (lambda r: nn.HingeEmbeddingLoss(0.3, reduction=r), lambda: (normal(3, 4), normal(3, 4).sign())),
    "margin-ranking": (lambda r: nn.MarginRankingLoss(0.3, reduction=r), lambda: (normal(3), normal(3), normal(3).sign())),
    "l1-piecewise-linear": (lambda r: nn.L1Loss(reduction=r), lambda: (normal(3, 4), normal(3, 4))),
    "nll-linear": (lambda r: nn.NLLLoss(reduction=r), lambda: (normal(3, 4), classes(3, num=4))),
    "nll-1d": (
        lambda r: nn.NLLLoss(weight=uniform(4), ignore_index=1, reduction=r),
        lambda: (normal(3, 4, 2), classes(3, 2, num=4, ignored=1)),
    ),
    "multi-label": (lambda r: nn.MultiLabelSoftMarginLoss(reduction=r), lambda: (normal(3, 4), classes(3, 4, num=2).double())),
    "multi-label-weight": (lambda r: nn.MultiLabelSoftMarginLoss(weight=uniform(4), reduction=r), lambda: (normal(3, 2, 4), uniform(3, 2, 4))),
    "derived": (lambda r: Sharpened(reduction=r), lambda: (normal(3, 4), classes(3, num=4))),
    "derived-changed": (lambda r: with_forward(nn.MSELoss(reduction=r), nn.HuberLoss(reduction=r)), lambda: (normal(3, 4), normal(3, 4))),
}


class Sharpened(nn.CrossEntropyLoss):
    """A loss derived from one of torch that must not inherit its closed form."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(2 * input, target)


def with_forward(loss: nn.Module, other: nn.Module) -> nn.Module:
    loss.forward = other.forward
    return loss


LIKELIHOODS = ("mse", "ce", "bce", "poisson", "gaussian-nll", "multi-label")
LINEAR = ("l1", "nll", "kl", "hinge", "margin", "smooth-l1-beta-0")
OURS = [name for name in CASES if not name.startswith(("derived", "bce-of-probabilities", *LINEAR))]
SAMPLED = [name for name in OURS if name.startswith(LIKELIHOODS) and "large" not in name and name != "poisson-rate"]


def record(loss: nn.Module, *inputs: Tensor) -> nn.Module:
    """Evaluate a loss and store what a forward pass of an extended module makes readable."""
    for index, tensor in enumerate(inputs):
        setattr(loss, f"input{index}", tensor)
    loss.output = loss(*inputs).detach()
    return loss


def make(name: str, reduction: str = "mean") -> tuple[nn.Module, NLLLossDerivatives | GenericLossDerivatives]:
    torch.manual_seed(0)
    make_loss, make_inputs = CASES[name]
    loss = record(make_loss(reduction), *make_inputs())
    return loss, derivatives_for(loss)


def dense_hessian(loss: nn.Module, weights: Tensor | None = None) -> Tensor:
    """Hessian ``[*input, *input]`` of the loss's value, or of the weighted sum of its values."""
    others = [getattr(loss, f"input{i}") for i in (1, 2) if hasattr(loss, f"input{i}")]

    def value(x: Tensor) -> Tensor:
        output = loss(x, *others)
        return (output if weights is None else weights * output).sum()

    return torch.autograd.functional.hessian(value, loss.input0)


def blocks_of(hessian: Tensor, num_samples: int) -> Tensor:
    """Blocks ``[N, D, D]`` of a Hessian; what is outside must vanish for the test to make sense."""
    size = prod(hessian.shape[: hessian.dim() // 2]) // num_samples
    matrix = hessian.reshape(num_samples, size, num_samples, size)
    blocks = torch.stack([matrix[n, :, n] for n in range(num_samples)])
    assert matrix.abs().sum() == pytest.approx(blocks.abs().sum().item(), nan_ok=False)
    return blocks


def gram(factor: Tensor) -> Tensor:
    factor = factor.reshape(*factor.shape[:2], -1)
    return torch.einsum("vni,vnj->nij", factor, factor)


def assert_signed(loss: nn.Module, blocks: Tensor) -> None:
    rule = derivatives_for(loss)
    few = rule._least_sqrt_hessian(loss, None, signed=True)
    assert len(few[0]) == rule.least_columns(loss.input0.shape)
    for factor, signs in (rule._signed_sqrt_hessian(loss, None, None), few):
        columns = factor.reshape(*factor.shape[:2], -1)
        given = torch.ones_like(columns[..., 0]) if signs is None else signs
        tolerance = 1e-9 if factor.dtype == DOUBLE else 1e-6
        torch.testing.assert_close(torch.einsum("vni,vn,vnj->nij", columns, given, columns), blocks, rtol=tolerance, atol=1e-3 * tolerance)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_exact_quantities(name: str, reduction: str) -> None:
    loss, derivatives = make(name, reduction)
    inputs, hessian = loss.input0, dense_hessian(loss)
    blocks = blocks_of(hessian, inputs.shape[0])

    factor = derivatives._sqrt_hessian(loss, None, None)
    assert factor.shape == (prod(inputs.shape[1:]), *inputs.shape)
    torch.testing.assert_close(gram(factor), blocks, rtol=1e-9, atol=1e-12)

    few, signs = derivatives._least_sqrt_hessian(loss, None, signed=False)
    assert signs is None
    assert few.shape == (derivatives.least_columns(inputs.shape), *inputs.shape)
    torch.testing.assert_close(gram(few), blocks, rtol=1e-9, atol=1e-12)

    assert_signed(loss, blocks)

    summed = derivatives._sum_hessian(loss, None, None)
    assert summed.shape == 2 * inputs.shape[1:]
    torch.testing.assert_close(summed.reshape(blocks.shape[1:]), blocks.sum(0), rtol=1e-9, atol=1e-12)

    mat = normal(2, *inputs.shape)
    product = torch.einsum("ij,vj->vi", hessian.reshape(inputs.numel(), -1), mat.flatten(1)).reshape(mat.shape)
    torch.testing.assert_close(derivatives._make_hessian_mat_prod(loss, None, None)(mat), product, rtol=1e-9, atol=1e-12)

    picked = [inputs.shape[0] - 1, 0, -1]
    torch.testing.assert_close(derivatives._sqrt_hessian(loss, None, None, subsampling=picked), factor[:, picked], rtol=0, atol=0)


@pytest.mark.parametrize("name", OURS)
def test_closed_forms_agree_with_the_generic_rule(name: str) -> None:
    loss, derivatives = make(name, "sum")
    generic = GenericLossDerivatives()
    torch.testing.assert_close(gram(derivatives._sqrt_hessian(loss, None, None)), gram(generic._sqrt_hessian(loss, None, None)))
    torch.testing.assert_close(derivatives._sum_hessian(loss, None, None), generic._sum_hessian(loss, None, None))


@pytest.mark.parametrize("name", OURS)
def test_unreduced_loss_with_weights(name: str) -> None:
    loss, derivatives = make(name, "none")
    weights = uniform(*loss.output.shape)
    scale = derivatives.position_weights(loss, (weights,)).sqrt()
    blocks = blocks_of(dense_hessian(loss, weights), loss.input0.shape[0])
    torch.testing.assert_close(gram(scale * derivatives._sqrt_hessian(loss, None, None)), blocks, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_position_weight_of_a_reduced_loss_is_the_incoming_gradient(reduction: str) -> None:
    for name in ("mse", "ce-1d", "bce", "huber"):
        loss, derivatives = make(name, reduction)
        assert derivatives.position_weights(loss, (torch.tensor(-3.0),)) == -3


def test_weights_of_samples_in_the_generic_rule() -> None:
    loss, derivatives = make("huber", "none")[0], GenericLossDerivatives()
    factor = derivatives._sqrt_hessian(loss, None, None)
    for weights in (torch.full_like(loss.output, 0.3), uniform(3, 1, 1).expand_as(loss.output)):
        scale = derivatives.position_weights(loss, (weights,)).sqrt()
        torch.testing.assert_close(gram(scale * factor), blocks_of(dense_hessian(loss, weights), 3))
    with pytest.raises(UnsupportedError, match="within one sample"):
        derivatives.position_weights(loss, (uniform(3, 2, 2),))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shapes", [((3, 1), (3, 4)), ((3, 1), (3,)), ((3,), (2, 3)), ((3, 4), (1, 4))])
def test_mse_broadcasts_input_against_target(shapes: tuple[tuple[int, ...], tuple[int, ...]], reduction: str) -> None:
    torch.manual_seed(0)
    loss, derivatives = record(nn.MSELoss(reduction=reduction), *(normal(*shape) for shape in shapes)), MSELossDerivatives()
    weights = torch.rand_like(loss.output)
    scale = derivatives.position_weights(loss, (weights,)).sqrt()
    blocks = blocks_of(dense_hessian(loss, weights), 3)
    torch.testing.assert_close(gram(scale * derivatives._sqrt_hessian(loss, None, None)), blocks)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("make_loss", [nn.HuberLoss, nn.SmoothL1Loss, partial(nn.PoissonNLLLoss, False), nn.PoissonNLLLoss, nn.L1Loss])
def test_other_losses_broadcast_input_against_target(make_loss: Callable[..., nn.Module], reduction: str) -> None:
    torch.manual_seed(0)
    loss = record(make_loss(reduction=reduction), uniform(3, 1), 2 * uniform(3, 4))
    derivatives = derivatives_for(loss)
    torch.testing.assert_close(gram(derivatives._sqrt_hessian(loss, None, None)), blocks_of(dense_hessian(loss), 3))
    weights = uniform(3, 1).expand_as(loss.output) if reduction == "none" else torch.tensor(0.7, dtype=DOUBLE)
    scale = derivatives.position_weights(loss, (weights,)).sqrt()
    blocks = blocks_of(dense_hessian(loss, weights), 3)
    torch.testing.assert_close(gram(scale * derivatives._sqrt_hessian(loss, None, None)), blocks)
    if reduction == "none" and not isinstance(loss, nn.L1Loss) and not getattr(loss, "log_input", False):
        with pytest.raises(UnsupportedError, match="weighted differently"):
            derivatives.position_weights(loss, (uniform(3, 4),))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("make_loss", [nn.L1Loss, partial(nn.SmoothL1Loss, beta=0.0), nn.MSELoss, nn.HuberLoss])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 4)])
def test_modules_that_broadcast_the_prediction(shape: tuple[int, ...], make_loss: Callable[..., nn.Module], reduction: str) -> None:
    """Each entry of ``[N, 1]`` is compared with several: what the graph shows beside the loss is part of it."""
    model, x, target = extend(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()), normal(3, 2), 4 * normal(*shape)
    lossfunc = extend(make_loss(reduction=reduction))
    with backpack(DiagGGNExact(), BatchGrad()):
        lossfunc(model(x), target).sum().backward()
    out = model(x).detach()
    hessian = torch.autograd.functional.hessian(lambda out: lossfunc(out, target).sum(), out).reshape(3, 3)
    for parameter in model.parameters():
        rows = torch.stack([torch.autograd.grad(model(row).sum(), parameter)[0].flatten() for row in x])
        torch.testing.assert_close(parameter.diag_ggn_exact.flatten(), (rows.T @ hessian @ rows).diagonal())
        torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)


# Monte Carlo


def own_draw(loss: nn.Module, inputs: Tensor, mc_samples: int) -> Tensor:
    """Gradients ``[M, N, *]`` of the unweighted likelihood, differentiated per draw; labels come from one call of ``sample``."""
    shape = torch.Size([mc_samples])
    point = inputs.clone().requires_grad_()
    if isinstance(loss, nn.CrossEntropyLoss):
        labels = Categorical(probs=inputs.softmax(1).movedim(1, -1)).sample(shape)
        values = [nn.functional.cross_entropy(point, y, reduction="sum") for y in labels]
    elif isinstance(loss, nn.PoissonNLLLoss):
        labels = Poisson(inputs.exp()).sample(shape)
        values = [(point.exp() - y * point).sum() for y in labels]
    elif isinstance(loss, nn.GaussianNLLLoss):
        labels = Normal(inputs, 1.0).sample(shape)
        values = [(point - y).square().sum() / 2 for y in labels]
    elif isinstance(loss, nn.MSELoss):
        labels = Normal(inputs, torch.tensor(sqrt(0.5), dtype=inputs.dtype)).sample(shape)
        values = [nn.functional.mse_loss(y, point, reduction="sum") for y in labels]
    else:
        labels = Binomial(probs=inputs.sigmoid()).sample(shape)
        values = [nn.functional.binary_cross_entropy_with_logits(point, y, reduction="sum") for y in labels]
    return torch.stack([torch.autograd.grad(value, point)[0] for value in values])


def factor_of_entries(loss: nn.Module) -> Tensor:
    """What multiplies the unweighted curvature of each entry, read off the dense Hessian: independent of the formulas under test."""
    inputs = loss.input0
    diagonal = dense_hessian(loss).reshape(inputs.numel(), -1).diagonal().reshape(inputs.shape)
    if isinstance(loss, nn.MSELoss | nn.GaussianNLLLoss):
        return diagonal / (2 if isinstance(loss, nn.MSELoss) else 1)
    if isinstance(loss, nn.PoissonNLLLoss):
        return diagonal / inputs.exp()
    probs = inputs.softmax(1) if isinstance(loss, nn.CrossEntropyLoss) else inputs.sigmoid()
    return diagonal / (probs * (1 - probs))


@pytest.mark.parametrize("rule", [CrossEntropyLossDerivatives, MSELossDerivatives, BCELossWithLogitsDerivatives])
@pytest.mark.parametrize("classes_last", [False, True])
@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1), (1, 4, 5), (1, 4, 3, 5), (3, 4), (3, 4, 5), (3, 4, 3, 5)], ids=str)
def test_draws_do_not_depend_on_the_layout(shape: tuple[int, ...], classes_last: bool, rule: type[NLLLossDerivatives]) -> None:
    """The closed form draws what the distribution does, which is how existing code compares its numbers."""
    torch.manual_seed(0)
    logits = normal(*shape)
    logits = logits.movedim(1, -1).contiguous().movedim(-1, 1) if classes_last else logits
    for samples in (1, 3):
        torch.manual_seed(1)
        label = rule()._make_distribution(logits).sample(torch.Size([samples]))
        torch.manual_seed(1)
        gradients = rule()._compute_sampled_grads_manual(logits, samples)
        if rule is CrossEntropyLossDerivatives:
            expected = logits.softmax(1) - F.one_hot(label, 4).movedim(-1, 2)
        else:
            expected = 2 * (label - logits) if rule is MSELossDerivatives else logits.sigmoid() - label
        torch.testing.assert_close(gradients.reshape(expected.shape), expected)


@pytest.mark.parametrize("subsampling", [None, [-1, 0, 0]])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("use_autograd", [False, True])
def test_sampled_factor_is_the_gradient_of_a_draw(name: str, use_autograd: bool, reduction: str, subsampling: list[int] | None) -> None:
    loss, _ = make(name, reduction)
    derivatives = type(derivatives_for(loss))(use_autograd=use_autograd)
    picked = list(range(loss.input0.shape[0])) if subsampling is None else subsampling
    torch.manual_seed(1)
    factor = derivatives._sqrt_hessian_sampled(loss, None, None, mc_samples=3, subsampling=subsampling)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    expected = own_draw(loss, loss.input0[picked], 3) * (factor_of_entries(loss)[picked] / 3).sqrt()
    assert torch.equal(state, torch.get_rng_state())  # nothing else is drawn

    # The sign of a column means nothing; all samples of the squared error share it.
    sign = -1 if isinstance(loss, nn.MSELoss) and not use_autograd else 1
    torch.testing.assert_close(factor, sign * expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    "name",
    ["mse-4d", "ce", "ce-everything", "ce-unnormalised-everything", "ce-default-ignored", "bce-everything", "huber", "poisson", "poisson-rate"]
    + ["gaussian-nll-column", "multi-label-weight", "soft-margin-soft", "bce-of-probabilities", "derived"],
)
def test_sampled_factor_is_unbiased(name: str) -> None:
    loss, derivatives = make(name, "none")
    weights = uniform(loss.output.shape[0], *(1 for _ in loss.output.shape[1:])).expand_as(loss.output)
    blocks = blocks_of(dense_hessian(loss, weights), loss.input0.shape[0])
    draws = 20_000
    torch.manual_seed(2)
    factor = derivatives._sqrt_hessian_sampled(loss, None, None, mc_samples=draws) * derivatives.position_weights(loss, (weights,)).sqrt()
    columns = factor.flatten(2) * sqrt(draws)
    squares = columns.unsqueeze(3) * columns.unsqueeze(2)
    error = squares.std(0) / sqrt(draws)
    assert ((squares.mean(0) - blocks).abs() <= 5 * error + 1e-12).all()
    torch.testing.assert_close(gram(factor), squares.mean(0))


@pytest.mark.parametrize("name", ["huber", "smooth-l1", "poisson-rate", "soft-margin-soft", "bce-of-probabilities", "derived"])
@pytest.mark.parametrize("subsampling", [None, [1, 0, 0]])
def test_losses_without_a_distribution_draw_signs(name: str, subsampling: list[int] | None) -> None:
    loss, derivatives = make(name)
    if name == "soft-margin-soft":
        subsampling = None if subsampling is None else [-1, 0]
    picked = list(range(len(loss.input0))) if subsampling is None else subsampling
    torch.manual_seed(1)
    factor = derivatives._sqrt_hessian_sampled(loss, None, None, mc_samples=2, subsampling=subsampling)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    signs = 2 * torch.empty(2, *loss.input0[picked].shape, dtype=DOUBLE).bernoulli_() - 1
    assert torch.equal(state, torch.get_rng_state())  # nothing else is drawn
    blocks = blocks_of(dense_hessian(loss), len(loss.input0))[picked]
    units = blocks.diagonal(dim1=1, dim2=2).sqrt()
    units = units.where(units > 0, 1)
    values, vectors = torch.linalg.eigh(blocks / units.unsqueeze(1) / units.unsqueeze(2))
    expected = torch.einsum("ni,nij,nj,nkj,mnk->mni", units, vectors, values.clamp(min=0).sqrt(), vectors, signs.flatten(2)) / sqrt(2)
    torch.testing.assert_close(factor.flatten(2), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(LINEAR)])
def test_a_linear_loss_draws_nothing(name: str) -> None:
    loss, derivatives = make(name)
    assert derivatives.hessian_is_psd() or name == "smooth-l1-beta-0"
    state = torch.get_rng_state()
    factor = derivatives._sqrt_hessian_sampled(loss, None, None, mc_samples=2, subsampling=[0])
    assert torch.equal(factor, torch.zeros(2, 1, *loss.input0.shape[1:], dtype=DOUBLE))
    assert torch.equal(state, torch.get_rng_state()) or name == "smooth-l1-beta-0"


# The public methods


def test_public_methods_equal_the_mathematics() -> None:
    loss, derivatives = make("ce-everything")
    ones = (torch.ones(()),)
    blocks = blocks_of(dense_hessian(loss), 3)
    torch.testing.assert_close(gram(derivatives.sqrt_hessian(loss, None, ones)), blocks)
    torch.testing.assert_close(gram(derivatives.sqrt_hessian(loss, None, ones, subsampling=[1])), blocks[[1]])
    torch.testing.assert_close(derivatives.sum_hessian(loss, None, None).reshape(12, 12), blocks.sum(0))
    product, vector = derivatives.make_hessian_mat_prod(loss, None, ones), normal(3, 4, 3)
    expected = torch.einsum("nij,nj->ni", blocks, vector.flatten(1)).reshape(vector.shape)
    torch.testing.assert_close(product(vector), expected)
    torch.testing.assert_close(product(vector.unsqueeze(0)), expected.unsqueeze(0))
    with pytest.raises(ShapeError):
        product(normal(4, 3))
    torch.manual_seed(0)
    sampled = derivatives.sqrt_hessian_sampled(loss, None, ones, mc_samples=2, subsampling=[1])
    torch.manual_seed(0)
    torch.testing.assert_close(sampled, derivatives._sqrt_hessian_sampled(loss, None, None, mc_samples=2, subsampling=[1]))


@pytest.mark.parametrize("name", ["mse", "ce", "bce", "huber"])
@pytest.mark.parametrize("method", ["sqrt_hessian", "sqrt_hessian_sampled", "make_hessian_mat_prod", "sum_hessian"])
def test_public_methods_look_at_the_output(name: str, method: str) -> None:
    loss, derivatives = make(name, "none")
    with pytest.raises(LossValueError):
        getattr(derivatives, method)(loss, None, None)
    loss, derivatives = make(name)
    with pytest.warns(UserWarning):
        getattr(derivatives, method)(loss, None, (torch.tensor(2.0),))


def test_convexity_is_claimed_where_it_is_known() -> None:
    assert all(derivatives.hessian_is_psd() for derivatives in (MSELossDerivatives(), CrossEntropyLossDerivatives(), BCELossWithLogitsDerivatives()))
    assert not GenericLossDerivatives().hessian_is_psd()
    for name in CASES:
        loss, derivatives = make(name)
        assert derivatives.hessian_is_psd_at(loss)


# Odd inputs


@pytest.mark.parametrize(
    "name", ["mse", "ce-ignored", "ce-unnormalised", "bce-everything", "huber", "poisson", "poisson-rate", "nll-1d", "multi-label"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empty_batch(name: str, reduction: str) -> None:
    loss, derivatives = make(name, reduction)
    if name == "bce-everything":
        loss.weight = None
    record(loss, loss.input0[:0], loss.input1[:0])
    features = loss.input0.shape[1:]
    assert derivatives._sqrt_hessian(loss, None, None).shape == (prod(features), 0, *features)
    assert derivatives._least_sqrt_hessian(loss, None, signed=False)[0].shape == (derivatives.least_columns(loss.input0.shape), 0, *features)
    assert derivatives._sqrt_hessian_sampled(loss, None, None, mc_samples=2).shape == (2, 0, *features)
    assert derivatives._make_hessian_mat_prod(loss, None, None)(normal(5, 0, *features)).shape == (5, 0, *features)
    assert torch.equal(derivatives._sum_hessian(loss, None, None), torch.zeros(2 * features, dtype=DOUBLE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mse", "ce-1d", "ce-weight-1d", "bce-everything", "huber", "smooth-l1", "poisson", "soft-margin-soft"])
def test_precision_of_the_input_is_kept(name: str, dtype: torch.dtype) -> None:
    loss, derivatives = make(name)
    expected = blocks_of(dense_hessian(loss), loss.input0.shape[0])
    target = loss.input1.to(dtype) if loss.input1.is_floating_point() else loss.input1
    record(loss.to(dtype), loss.input0.to(dtype), target)
    factor = derivatives._sqrt_hessian(loss, None, None)
    product = derivatives._make_hessian_mat_prod(loss, None, None)(torch.ones_like(loss.input0).unsqueeze(0))
    sampled = derivatives._sqrt_hessian_sampled(loss, None, None)
    few, _ = derivatives._least_sqrt_hessian(loss, None, signed=False)
    assert {factor.dtype, few.dtype, product.dtype, sampled.dtype, derivatives._sum_hessian(loss, None, None).dtype} == {dtype}
    tolerance = 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(gram(few.double()), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gram(factor.double()), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(product.double().flatten(), expected.sum(2).flatten(), rtol=tolerance, atol=tolerance)


def test_factor_does_not_underflow_before_the_probabilities_do() -> None:
    loss = record(nn.CrossEntropyLoss(reduction="sum"), torch.tensor([[0.0, 90.0]]), torch.tensor([1]))
    factor = CrossEntropyLossDerivatives()._sqrt_hessian(loss, None, None)
    assert factor[0, 0].tolist() == pytest.approx([sqrt(1 / (1 + torch.tensor(90.0).double().exp().item())), -sqrt(torch.tensor(-90.0).exp().item())])


@pytest.mark.parametrize("method", ["_sqrt_hessian", "_sqrt_hessian_sampled", "_make_hessian_mat_prod", "_sum_hessian"])
@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        (nn.CrossEntropyLoss(), (torch.zeros(3), torch.tensor(1))),
        (nn.CrossEntropyLoss(), (torch.zeros(3), torch.ones(3) / 3)),
        (nn.MSELoss(), (torch.tensor(1.0), torch.tensor(2.0))),
        (nn.BCEWithLogitsLoss(), (torch.tensor(1.0), torch.tensor(0.5))),
        (nn.HuberLoss(), (torch.tensor(1.0), torch.tensor(0.5))),
        (nn.NLLLoss(), (torch.zeros(3), torch.tensor(1))),
        (nn.MultiLabelSoftMarginLoss(), (torch.zeros(3), torch.ones(3))),
        (nn.MultiLabelMarginLoss(), (torch.zeros(3), torch.tensor([1, -1, 0]))),
        (nn.MultiMarginLoss(), (torch.zeros(3), torch.tensor(1))),
        (nn.CosineEmbeddingLoss(), (torch.ones(3), torch.ones(3), torch.tensor(1.0))),
        (nn.TripletMarginLoss(), (torch.ones(3), torch.ones(3), torch.zeros(3))),
    ],
)
def test_input_without_samples_is_refused(loss: nn.Module, inputs: tuple[Tensor, ...], method: str) -> None:
    with pytest.raises(ShapeError, match="samples on axis 0"):
        getattr(derivatives_for(loss), method)(record(loss, *inputs), None, None)


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, -1, 1])), (torch.zeros(3, 3), torch.arange(3))),
        (nn.CrossEntropyLoss(), (torch.zeros(3, 3), -torch.ones(3, 3))),
        (nn.BCEWithLogitsLoss(weight=torch.tensor([1.0, -1, 1])), (torch.zeros(3, 3), torch.zeros(3, 3))),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(0.0)), (torch.zeros(3, 3), 2 * torch.ones(3, 3))),
    ],
)
def test_negative_weights_have_no_square_root(loss: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    record(loss, *inputs)
    derivatives = derivatives_for(loss)
    for factor in (derivatives._sqrt_hessian, derivatives._sqrt_hessian_sampled):
        with pytest.raises(LossValueError, match="negative factor"):
            factor(loss, None, None)
    assert not derivatives.hessian_is_psd_at(loss)
    assert_signed(loss, blocks_of(dense_hessian(loss), 3))
    torch.testing.assert_close(derivatives._sum_hessian(loss, None, None).reshape(3, 3), blocks_of(dense_hessian(loss), 3).sum(0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_a_subclass_enter_all_products(reduction: str) -> None:
    """A user's loss, a cross-entropy of which each sample counts by a number of its own, needs but its weights."""

    class Weighted(CrossEntropyLossDerivatives):
        def _hessian_weight(self, module: nn.Module) -> Tensor:
            return counts[:, None] * super()._hessian_weight(module)

    counts, derivatives = torch.tensor([0.5, 2.0, 3.0], dtype=DOUBLE), Weighted()
    loss = record(nn.CrossEntropyLoss(reduction=reduction), normal(3, 4), torch.tensor([0, 3, 1]))
    blocks = counts[:, None, None] * blocks_of(dense_hessian(loss), 3)
    torch.testing.assert_close(gram(derivatives._sqrt_hessian(loss, None, None)), blocks)
    torch.testing.assert_close(derivatives._sum_hessian(loss, None, None), blocks.sum(0))
    mat = normal(2, 3, 4)
    torch.testing.assert_close(derivatives._make_hessian_mat_prod(loss, None, None)(mat), torch.einsum("nij,vnj->vni", blocks, mat))
    counts = -counts
    assert not derivatives.hessian_is_psd_at(loss)


def test_gradient_and_hessian_of_an_all_ignored_mean_are_zero() -> None:
    loss, derivatives = make("ce-all-ignored")
    point = loss.input0.clone().requires_grad_()
    value = loss(point, loss.input1)
    assert value.isnan()
    assert (torch.autograd.grad(value, point)[0] == 0).all()
    assert (derivatives._sqrt_hessian(loss, None, None) == 0).all()


def test_hessian_is_not_a_number_where_torch_divides_zero_by_zero() -> None:
    loss = record(nn.CrossEntropyLoss(weight=torch.zeros(3)), torch.randn(2, 3), torch.tensor([0, -100]))
    point = loss.input0.clone().requires_grad_()
    gradient = torch.autograd.grad(loss(point, loss.input1), point)[0].isnan().all(1)
    factor = CrossEntropyLossDerivatives()._sqrt_hessian(loss, None, None)
    assert gradient.tolist() == factor.isnan().all(2).all(0).tolist() == [True, False]


# What torch has besides


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        (nn.MultiMarginLoss(), (torch.randn(3, 4), torch.arange(3))),
        (nn.MultiLabelMarginLoss(), (torch.randn(3, 4), torch.tensor(3 * [[0, 1, -1, 0]]))),
    ],
)
def test_piecewise_linear_losses_that_torch_does_not_differentiate_twice(loss: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    record(loss, inputs[0].double(), inputs[1])
    assert not derivatives_for(loss)._sqrt_hessian(loss, None, None).any()
    change = 1e-6 * normal(3, 4)
    differences = [loss(loss.input0 + s * change, loss.input1) - loss.output for s in (1, -1)]
    assert sum(differences).abs() < 1e-12  # linear around the prediction


def unsupported() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    lengths = torch.tensor([2, 2])
    return {
        "CTCLoss": (nn.CTCLoss(), (normal(4, 2, 3).log_softmax(2), torch.tensor([[1, 2], [2, 1]]), 2 * lengths, lengths)),
        "MultiMarginLoss": (nn.MultiMarginLoss(p=2), (normal(3, 4), torch.arange(3))),
    }


@pytest.mark.parametrize("name", ["CTCLoss", "MultiMarginLoss"])
@pytest.mark.parametrize("method", ["_sqrt_hessian", "_sqrt_hessian_sampled", "_signed_sqrt_hessian", "_make_hessian_mat_prod", "_sum_hessian"])
def test_refused_by_name(name: str, method: str) -> None:
    loss, inputs = unsupported()[name]
    with pytest.raises(UnsupportedError, match=name):
        getattr(derivatives_for(loss), method)(record(loss, *inputs), None, None)


NOT_CONVEX: dict[str, Callable[[], nn.Module]] = {
    "cosine": lambda: record(nn.CosineEmbeddingLoss(), normal(3, 4), normal(3, 4), torch.ones(3)),
    "cosine-unlike": lambda: record(nn.CosineEmbeddingLoss(margin=-1.0, reduction="sum"), normal(3, 4), normal(3, 4), -torch.ones(3)),
    "triplet": lambda: record(nn.TripletMarginLoss(9.0), normal(3, 4), normal(3, 4), normal(3, 4)),
    "triplet-distance": lambda: record(
        nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: (x - y).square().sum(1).sqrt(), margin=9.0), *(normal(3, 4) for _ in range(3))
    ),
    "poisson": lambda: record(nn.PoissonNLLLoss(log_input=False), 1 + uniform(3, 4), -uniform(3, 4)),
    "bce": lambda: record(nn.BCELoss(-uniform(4)), uniform(3, 4), uniform(3, 4)),
}


@pytest.mark.parametrize("name", NOT_CONVEX)
def test_losses_of_torch_that_are_not_convex(name: str) -> None:
    torch.manual_seed(0)
    loss = NOT_CONVEX[name]()
    derivatives, blocks = derivatives_for(loss), blocks_of(dense_hessian(loss), 3)
    assert not derivatives.hessian_is_psd_at(loss)
    assert_signed(loss, blocks)
    torch.testing.assert_close(derivatives._sum_hessian(loss, None, None), blocks.sum(0))
    for factor in (derivatives._sqrt_hessian, derivatives._sqrt_hessian_sampled):
        with pytest.raises(LossValueError, match=f"{type(loss).__name__}\\(.*\\) has negative"):
            factor(loss, None, None)


def test_every_loss_of_torch_is_tested() -> None:
    tested = {type(make_loss("mean")) for make_loss, _ in CASES.values()} | {type(make_loss()) for make_loss in NOT_CONVEX.values()}
    tested |= {nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.CTCLoss}
    known = {value for value in vars(nn).values() if isinstance(value, type) and issubclass(value, _Loss)}
    assert {loss.__name__ for loss in known - tested} <= {"NLLLoss2d", "LinearCrossEntropyLoss"}  # an old name; a layer and a loss in one


# Losses of one's own


class Focal(nn.Module):
    """Cross-entropy that gives less weight to what is already right: not convex."""

    def forward(self, logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
        log_probs = logits.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
        return -((1 - log_probs.exp()) ** gamma * log_probs).mean()


class Mixing(nn.Module):
    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - prediction.mean(0) - target).square().mean()


class Random(nn.Module):
    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (torch.rand(()) * (prediction - target).square()).mean()


def test_nonconvex_loss() -> None:
    torch.manual_seed(0)
    loss, derivatives = record(Focal(), 3 * normal(6, 4), classes(6, num=4)), GenericLossDerivatives()
    blocks = blocks_of(dense_hessian(loss), 6)
    assert torch.linalg.eigvalsh(blocks).min() < 0
    torch.testing.assert_close(derivatives.sum_hessian(loss, None, None), blocks.sum(0))
    torch.testing.assert_close(derivatives.make_hessian_mat_prod(loss, None, None)(torch.ones(6, 4).double()), blocks.sum(2))
    for factor in (derivatives.sqrt_hessian, derivatives.sqrt_hessian_sampled):
        with pytest.raises(LossValueError, match="negative eigenvalues"):
            factor(loss, None, None)


def test_further_arguments_reach_the_loss() -> None:
    torch.manual_seed(0)
    loss = Focal()
    loss.input0, loss.input1, loss.input2 = normal(6, 4), classes(6, num=4), 0.0
    loss.output = loss(loss.input0, loss.input1, loss.input2)
    expected = torch.autograd.functional.hessian(lambda x: nn.functional.cross_entropy(x, loss.input1), loss.input0)
    torch.testing.assert_close(gram(GenericLossDerivatives().sqrt_hessian(loss, None, None)), blocks_of(expected, 6))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_mixed_samples_are_refused(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    loss = record(Mixing(), normal(500, 3).to(dtype), normal(500, 3).to(dtype))
    with pytest.raises(MixedSamplesError):
        GenericLossDerivatives().sqrt_hessian(loss, None, None)


def test_loss_that_does_not_repeat_itself_is_refused() -> None:
    with pytest.raises(LossValueError, match="another value"):
        GenericLossDerivatives().sqrt_hessian(record(Random(), normal(3, 2), normal(3, 2)), None, None)


def test_loss_without_second_derivative_is_refused() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad

    class Exponential(nn.Module):
        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            return (Once.apply(prediction) - target).sum()

    with pytest.raises(UnsupportedError, match="twice"):
        GenericLossDerivatives().sum_hessian(record(Exponential(), normal(3, 2), normal(3, 2)), None, None)
    with pytest.raises(UnsupportedError, match="real"):
        GenericLossDerivatives().sum_hessian(record(nn.L1Loss(), torch.zeros(3, 2, dtype=torch.cfloat), torch.ones(3, 2)), None, None)


def test_loss_that_hides_what_it_depends_on_is_refused() -> None:
    class Rows(torch.autograd.Function):
        """The cross-entropy of each row, which keeps the probabilities."""

        @staticmethod
        def forward(ctx, x: Tensor, labels: Tensor) -> Tensor:
            ctx.save_for_backward(x.softmax(1), labels)
            return F.cross_entropy(x, labels, reduction="none")

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            probabilities, labels = ctx.saved_tensors
            return grad[:, None] * (probabilities - F.one_hot(labels, probabilities.shape[1])), None

    class Own(nn.Module):
        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            return (Rows.apply(prediction, target) + prediction.square().sum(1)).mean()

    with pytest.raises(UnsupportedError, match="autograd.Function Rows, and"):
        GenericLossDerivatives().sum_hessian(record(Own(), normal(3, 2), torch.tensor([0, 1, 1])), None, None)


@pytest.mark.parametrize("shape", [(3,), (1,), (0,), (3, 2)])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_loss_of_a_function_that_keeps_its_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    class Distance(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return (x - y).cosh()

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            x, y = ctx.saved_tensors
            return grad * (x - y).sinh(), None

    class Own(nn.Module):
        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            return Distance.apply(prediction, target).sum()

    x, y = normal(*shape).to(dtype), normal(*shape).to(dtype)
    product = GenericLossDerivatives().make_hessian_mat_prod(record(Own(), x, y), None, None)
    torch.testing.assert_close(product(torch.ones(1, *shape, dtype=dtype))[0], (x - y).cosh())


class Averaging(nn.MSELoss):
    """Keeps a running average, as an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean, self.last = 0, torch.zeros(()), []
        self.register_buffer("total", torch.zeros((), dtype=DOUBLE))

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        value = super().forward(prediction, target)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * value
        self.total += value.detach()
        self.last.append(value)
        return value


def test_computing_factors_leaves_the_loss_as_it_was() -> None:
    loss = record(Averaging(), normal(3, 2), normal(3, 2))
    calls, mean, last, total = loss.calls, loss.mean, [*loss.last], loss.total.clone()
    result = derivatives_for(loss).sum_hessian(loss, None, None)
    torch.testing.assert_close(result, torch.eye(2, dtype=DOUBLE))  # 2 / 6 for each of three samples
    assert (loss.calls, loss.last) == (calls, last)
    assert loss.mean is mean
    assert torch.equal(loss.total, total)


def test_computing_factors_leaves_no_trace_and_no_random_numbers() -> None:
    loss, derivatives = make("huber")
    before, state = {name: id(value) for name, value in vars(loss).items()}, torch.get_rng_state()
    derivatives.sqrt_hessian(loss, None, None)
    assert before == {name: id(value) for name, value in vars(loss).items()}
    assert torch.equal(state, torch.get_rng_state())
    assert not loss.input0.requires_grad


class Surprise(nn.Module):
    """Negative log-probability of 0/1 labels under ``p = exp(-x^2)``: a likelihood that the library does not know."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = -Bernoulli(probs=(-x.square()).exp()).log_prob(target)
        return loss.mean() if self.reduction == "mean" else loss.sum()


class SurpriseDerivatives(NLLLossDerivatives):
    def _verify_support(self, module: nn.Module) -> None:
        if module.input0.dim() != 2:
            raise NotImplementedError("only [N, D]")

    def _make_distribution(self, subsampled_input: Tensor) -> Bernoulli:
        return Bernoulli(probs=(-subsampled_input.square()).exp())

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return input.numel()

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        labels = self._make_distribution(subsampled_input).sample(torch.Size([mc_samples]))
        odds = 1 / (subsampled_input.square().exp() - 1)
        return 2 * subsampled_input * (labels - (1 - labels) * odds)

    def hessian_is_psd(self) -> bool:
        return True


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_likelihood_of_a_user(reduction: str) -> None:
    register(Surprise, SurpriseDerivatives)
    torch.manual_seed(0)
    loss = record(Surprise(reduction), uniform(4, 3) + 0.2, torch.ones(4, 3, dtype=DOUBLE))
    derivatives = derivatives_for(loss)
    assert derivatives.use_autograd
    torch.manual_seed(1)
    automatic = derivatives.sqrt_hessian_sampled(loss, None, None, mc_samples=2, subsampling=[2, 0])
    torch.manual_seed(1)
    manual = SurpriseDerivatives(use_autograd=False).sqrt_hessian_sampled(loss, None, None, mc_samples=2, subsampling=[2, 0])
    torch.testing.assert_close(automatic, manual)
    torch.manual_seed(1)
    x = loss.input0[[2, 0]].clone().requires_grad_()
    labels = Bernoulli(probs=(-x.square()).exp()).sample(torch.Size([2]))
    own = torch.stack([torch.autograd.grad(-Bernoulli(probs=(-x.square()).exp()).log_prob(y).sum(), x)[0] for y in labels])
    torch.testing.assert_close(automatic, own / sqrt(2 * (12 if reduction == "mean" else 1)))
    torch.testing.assert_close(gram(derivatives.sqrt_hessian(loss, None, None)), blocks_of(dense_hessian(loss), 4))
    with pytest.raises(NotImplementedError, match="only"):
        derivatives.sqrt_hessian_sampled(record(Surprise(), uniform(4), torch.ones(4).double()), None, None)


def test_sampled_gradients_can_be_differentiated() -> None:
    for derivatives in (MSELossDerivatives(use_autograd=True), CrossEntropyLossDerivatives(), CrossEntropyLossDerivatives(use_autograd=True)):
        point = normal(3, 4).requires_grad_()
        torch.manual_seed(0)
        (derivative,) = torch.autograd.grad(derivatives.compute_sampled_grads(point, 1).sum(0)[:, 0].sum(), point)
        row = 2 * torch.eye(4, dtype=DOUBLE)[0] if isinstance(derivatives, MSELossDerivatives) else None
        probs = point.detach().softmax(1)
        expected = row.expand(3, 4) if row is not None else probs.diag_embed()[:, 0] - probs[:, :1] * probs
        torch.testing.assert_close(derivative, expected)


def test_likelihood_without_its_parts_says_so() -> None:
    loss, _ = make("mse")
    with pytest.raises(UnsupportedError, match="_make_distribution"):
        NLLLossDerivatives()._sqrt_hessian_sampled(loss, None, None)
    with pytest.raises(UnsupportedError, match="use_autograd=True"):
        NLLLossDerivatives(use_autograd=False)._sqrt_hessian_sampled(loss, None, None)
