"""Normalisations where they mix samples, change their mode, or hold no rule; and weights that are normalised themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import LAYERS
from cases_nets import Net
from cases_norm import spread
from oracle import Oracle, Problem
from table import classify, default_dtype, regress
from test_derivatives import Recorded, setup
from test_extensions import QUANTITIES, close, collect, run
from torch import nn, randn
from torch.nn import BatchNorm1d, LayerNorm, Linear, Module, Sequential, Tanh
from torch.nn.utils import parametrizations

from backpack import backpack, extend, extensions
from backpack.core.crossings import Gap
from backpack.core.derivatives import normalization
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.normalization import GroupStatisticsDerivatives, InstanceNorm1dDerivatives, LocalResponseNormDerivatives
from backpack.core.derivatives.registry import derivatives_for
from backpack.utils.errors import MixedSamplesError, OverwrittenError, UnsupportedError


def build(make: Callable[[], Problem]) -> Problem:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(1)
        return make()


def batch_norm(**options: bool) -> Sequential:
    return Sequential(Linear(3, 3), BatchNorm1d(3, **options), Linear(3, 4))


@pytest.mark.parametrize("extension", QUANTITIES)
@pytest.mark.parametrize(
    "make", [batch_norm, lambda: batch_norm(track_running_stats=False).eval()], ids=["training", "evaluation without running statistics"]
)
def test_batch_statistics_are_refused(make: Callable[[], Module], extension: str) -> None:
    problem = build(lambda: classify(make(), randn(3, 3)))
    with pytest.raises(MixedSamplesError, match=r"of 1 \(BatchNorm1d.* mode\).*0\.weight.*GroupNorm.*\.eval\(\).*exclude="):
        run(problem, QUANTITIES[extension].make())
    assert not collect(problem, QUANTITIES[extension].field)


SPECIAL: dict[str, Callable[[], Problem]] = {
    "batch norm in training, on data": lambda: classify(Sequential(BatchNorm1d(3), Linear(3, 4)), randn(3, 3)),
    "batch norm in training, all before it frozen": lambda: classify(
        Sequential(Linear(3, 3).requires_grad_(False), BatchNorm1d(3), Linear(3, 4)), randn(3, 3)
    ),
    "one matrix for LayerNorm": lambda: regress(Net(lambda net, x: net.norm(net.a(x)), a=Linear(3, 3), norm=LayerNorm((3, 3))), randn(3, 3)),
    "samples on a normalised axis": lambda: classify(
        Net(lambda net, x: net.b(net.norm(net.a(x).transpose(0, 1))).mean(0), a=Linear(3, 3), b=Linear(3, 4), norm=LayerNorm((3, 3))), randn(3, 2, 3)
    ),
    "one sequence for InstanceNorm": lambda: regress(Net(lambda net, x: net.norm(net.a(x)), a=Linear(3, 3), norm=nn.InstanceNorm1d(3)), randn(3, 3)),
    "weight norm": lambda: classify(Sequential(parametrizations.weight_norm(Linear(3, 3)), Tanh(), Linear(3, 4)), randn(3, 3)),
    "weight norm, conv": lambda: classify(Sequential(parametrizations.weight_norm(nn.Conv1d(2, 2, 2)), nn.Flatten(), Linear(4, 4)), randn(3, 2, 3)),
    "spectral norm": lambda: classify(Sequential(parametrizations.spectral_norm(Linear(3, 3)), Tanh(), Linear(3, 4)).eval(), randn(3, 3)),
    "spectral norm, conv": lambda: classify(
        Sequential(parametrizations.spectral_norm(nn.Conv1d(2, 2, 2)), nn.Flatten(), Linear(4, 4)).eval(), randn(3, 2, 3)
    ),
    "spectral norm by hooks": lambda: classify(Sequential(nn.utils.spectral_norm(Linear(3, 3)), Tanh(), Linear(3, 4)).eval(), randn(3, 3)),
    "weight norm by hooks": lambda: classify(Sequential(nn.utils.weight_norm(Linear(3, 3)), Tanh(), Linear(3, 4)), randn(3, 3)),
    "weight norm by hooks, conv": lambda: classify(Sequential(nn.utils.weight_norm(nn.Conv1d(2, 2, 2)), nn.Flatten(), Linear(4, 4)), randn(3, 2, 3)),
}
EXACT = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNExact", "BatchDiagGGNExact", "SqrtGGNExact")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("extension", QUANTITIES)
@pytest.mark.parametrize("name", SPECIAL)
def test_exact_or_refused(extension: str, name: str) -> None:
    """Without a rule first order and the GGN are exact, or the samples mix; all else is exact or refused."""
    quantity, problem = QUANTITIES[extension], build(SPECIAL[name])
    try:
        run(problem, quantity.make())
    except NotImplementedError as error:
        mixed = name in ("one matrix for LayerNorm", "samples on a normalised axis")
        assert isinstance(error, MixedSamplesError) if mixed else extension not in EXACT
        assert not collect(problem, quantity.field)
        return
    quantity.check(Oracle(build(SPECIAL[name])), collect(problem, quantity.field))


POWER: dict[str, Callable[[Callable], Problem]] = {
    "linear": lambda norm: regress(Sequential(norm(Linear(3, 6)), Tanh(), Linear(6, 2)), randn(3, 3)),
    "conv": lambda norm: regress(Sequential(norm(nn.Conv1d(3, 6, 2)), nn.Flatten(), Linear(6, 2)), randn(3, 3, 2)),
    "conv, one length": lambda norm: regress(Sequential(norm(nn.Conv1d(3, 3, 2)), nn.Flatten(), Linear(3, 2)), randn(3, 3, 2)),
    "transposed conv": lambda norm: regress(Sequential(norm(nn.ConvTranspose1d(3, 6, 2)), nn.Flatten()), randn(3, 3, 2)),
    "twice": lambda norm: regress(Net(lambda net, x: net.a(net.a(x).tanh()), a=norm(Linear(3, 3), n_power_iterations=2)), randn(3, 3)),
}


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm], ids=["hook", "parametrization"])
@pytest.mark.parametrize("name", POWER)
def test_power_iterations_of_spectral_norm(name: str, norm: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies weights with copies of buffers, which the next call overwrites; their lengths are multiples of the mini-batch."""
    monkeypatch.setattr(Gap, "call_masked", None)  # the weight is no data, so that the layer is called once
    problem = build(lambda: POWER[name](norm))
    model, lossfunc = extend(problem.model), extend(nn.MSELoss(reduction="sum"))
    out = model(problem.x)
    parameters = dict(model.named_parameters())
    losses = out.flatten(1).square().sum(1)
    expected = [torch.autograd.grad(loss, parameters.values(), retain_graph=True) for loss in losses]
    slopes = [torch.autograd.grad(entry, parameters.values(), retain_graph=True) for entry in out.flatten()]
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        lossfunc(out, torch.zeros_like(out)).backward()
    for parameter, gradients, jacobian in zip(parameters.values(), zip(*expected, strict=True), zip(*slopes, strict=True), strict=True):
        close(parameter.grad_batch, torch.stack(gradients))
        close(parameter.diag_ggn_exact, 2 * torch.stack(jacobian).square().sum(0))


@pytest.mark.parametrize("norm", [lambda: BatchNorm1d(3), lambda: nn.InstanceNorm1d(3, track_running_stats=True)], ids=["batch", "instance"])
def test_the_mode_of_the_forward_pass_counts(norm: Callable[[], Module]) -> None:
    """A module that is switched to training mode after its forward pass in evaluation mode has used running statistics."""
    make = lambda: regress(Sequential(Linear(2, 2), spread(norm())), randn(3, 3, 2))  # noqa: E731
    problem = build(make)
    for module in (problem.model, *problem.losses):
        extend(module)
    loss = problem.loss(problem.outputs())
    problem.model.train()
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    oracle = Oracle(build(make))
    for name, parameter in problem.model.named_parameters():
        close(parameter.grad_batch, oracle.grad_batch[name])
        close(parameter.diag_ggn_exact, oracle.diag_ggn_batch(oracle.hessian_exact)[name].sum(0))


def test_products_refuse_running_statistics_that_have_changed() -> None:
    problem = build(lambda: classify(batch_norm().eval(), randn(3, 3)))
    run(problem, extensions.HMP(), extensions.GGNMP())
    problem.model.train()(problem.x)
    first, norm = problem.model[0].weight, problem.model[1].weight
    for parameter, product in ((first, first.hmp), (first, first.ggnmp), (norm, norm.hmp)):
        with pytest.raises(OverwrittenError, match="buffers"):
            product(parameter.detach())


def test_direct_use_refuses_statistics_that_the_rule_does_not_hold_for() -> None:
    recorded, mat = Recorded(BatchNorm1d(3), randn(4, 3)), randn(2, 4, 3)
    for product in (BatchNormNdDerivatives().jac_t_mat_prod, BatchNormNdDerivatives().jac_mat_prod):
        with pytest.raises(MixedSamplesError, match=r"\.eval\(\)"):
            product(recorded.module, None, None, mat)
    recorded = Recorded(BatchNorm1d(3, track_running_stats=False).eval(), randn(4, 3))
    with pytest.raises(MixedSamplesError, match="track_running_stats"):
        BatchNormNdDerivatives().param_mjp("weight", recorded.module, None, None, mat)
    recorded = Recorded(nn.InstanceNorm1d(3, track_running_stats=True).eval(), randn(4, 3, 2))
    with pytest.raises(UnsupportedError, match="running statistics"):
        InstanceNorm1dDerivatives().jac_t_mat_prod(recorded.module, None, None, randn(2, 4, 3, 2))


DENSE = [
    name for name, case in LAYERS.items() if isinstance(derivatives_for(case.make()), (GroupStatisticsDerivatives, LocalResponseNormDerivatives))
]


@pytest.mark.parametrize("name", DENSE)
def test_diagonal_of_a_dense_residual(name: str) -> None:
    derivatives, recorded = setup(name, 3)
    expected = GenericDerivatives().hessian_diagonal(recorded.module, None, recorded.g_out)
    torch.testing.assert_close(derivatives.hessian_diagonal(recorded.module, None, recorded.g_out), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: LayerNorm(512), lambda: nn.RMSNorm(512)], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("graph", [False, True])
def test_columns_with_many_entries(make: Callable[[], Module], graph: bool) -> None:
    """They are multiplied one by one, with the same result as for a part of the samples."""
    module, x, mat, part = spread(make()).requires_grad_(False).double(), randn(130, 512).double(), randn(2, 130, 512).double(), [0, 77, 129]
    rule = derivatives_for(module)
    Recorded(module, x)
    with torch.set_grad_enabled(graph):
        results = [product(module, None, None, mat)[:, part] for product in (rule.jac_t_mat_prod, rule.jac_mat_prod)]
    Recorded(module, x[part])
    for result, product in zip(results, (rule.jac_t_mat_prod, rule.jac_mat_prod), strict=True):
        close(result, product(module, None, None, mat[:, part]))


def test_many_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied in parts, the last of which is smaller."""
    recorded, mat = Recorded(LayerNorm(4).double().requires_grad_(False), randn(3, 4).double()), randn(7, 3, 4).double()
    products = [getattr(derivatives_for(recorded.module), f"{name}_mat_prod") for name in ("jac", "jac_t")]
    expected = [product(recorded.module, None, None, mat) for product in products]
    monkeypatch.setattr(normalization, "_SOME", 24)
    for graph in (False, True):
        with torch.set_grad_enabled(graph):
            for product, result in zip(products, expected, strict=True):
                close(product(recorded.module, None, None, mat), result)


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm2d", "BatchNorm2d"])
def test_channels_last(name: str) -> None:
    derivatives, recorded = setup(name, 3)
    module, mat = recorded.module.requires_grad_(False), recorded.like_output()
    expected = derivatives.jac_t_mat_prod(module, None, None, mat), derivatives.residual_mat_prod(module, None, recorded.g_out, mat)
    module.input0, module.output = (t.to(memory_format=torch.channels_last) for t in (module.input0, module.output))
    mat = mat.transpose(2, -1).contiguous().transpose(2, -1)
    close(derivatives.jac_t_mat_prod(module, None, None, mat), expected[0])
    close(derivatives.residual_mat_prod(module, None, recorded.g_out, mat), expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_default_eps_of_rms_norm(dtype: torch.dtype) -> None:
    """It is that of the type in which torch computes."""
    recorded = Recorded(nn.RMSNorm(4).to(dtype), (1e-4 * randn(3, 4)).to(dtype))
    torch.testing.assert_close(derivatives_for(recorded.module).normalised(recorded.module), recorded.y)


@pytest.mark.parametrize("name", [name for name in LAYERS if "Norm" in name])
def test_empty_batch(name: str) -> None:
    module = LAYERS[name].make()
    module.input0 = torch.empty(0, *LAYERS[name].shape)
    module.output = torch.empty(0, *LAYERS[name].shape)
    mat = torch.empty(2, 0, *LAYERS[name].shape)
    derivatives = derivatives_for(module)
    assert derivatives.jac_t_mat_prod(module, None, None, mat).shape == mat.shape
    for param, parameter in module.named_parameters():
        assert derivatives.param_mjp(param, module, None, None, mat, sum_batch=False).shape == (2, 0, *parameter.shape)
        assert not derivatives.param_mjp(param, module, None, None, mat).any()


@pytest.mark.parametrize("norm", [lambda: LayerNorm(3), lambda: nn.GroupNorm(1, 3), lambda: nn.RMSNorm(3)], ids=["layer", "group", "root"])
def test_normalised_once_for_all_quantities(norm: Callable[[], Module], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Problem:
        return classify(Sequential(Linear(3, 3), norm(), Linear(3, 4)), randn(5, 3))

    for rule in {type(derivatives_for(norm())), GroupStatisticsDerivatives}:
        if "statistics" in vars(rule):
            given = rule.statistics
            monkeypatch.setattr(rule, "statistics", lambda *args, given=given: seen.append(args[1]) or given(*args))
    names, seen, problem, oracle = ["DiagGGNExact", "DiagHessian", "Variance"], [], build(make), Oracle(build(make))
    run(problem, *(QUANTITIES[name].make() for name in names))
    assert len(seen) == 1
    assert seen[0].scratch is None
    for name in names:
        QUANTITIES[name].check(oracle, collect(problem, QUANTITIES[name].field))


@pytest.mark.parametrize(("layer", "shape"), [(nn.InstanceNorm2d(3), (3, 4, 4)), (nn.InstanceNorm3d(3), (3, 2, 2, 2))])
def test_channels_in_place_of_samples(layer: Module, shape: tuple[int, ...]) -> None:
    """Instances without a batch axis are a single sample."""
    torch.manual_seed(0)
    model, x = extend(nn.Sequential(Linear(shape[-1], shape[-1], bias=False), layer).double()), torch.randn(shape, dtype=torch.float64)
    out, weight = model(x), model[0].weight
    with backpack(extensions.DiagGGNExact()):
        extend(nn.MSELoss(reduction="sum"))(out, torch.zeros_like(out)).backward()
    jacobian = torch.autograd.functional.jacobian(lambda w: layer(nn.functional.linear(x, w)), weight.detach())
    torch.testing.assert_close(weight.diag_ggn_exact, 2 * jacobian.square().flatten(0, len(shape) - 1).sum(0))
