"""Scripts as users of the published interface write them, each with numbers that are known in another way."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from backpack.extensions.firstorder.batch_grad.batch_grad_base import BatchGradBase
from backpack.extensions.secondorder.diag_ggn.diag_ggn_base import DiagGGNBaseModule
from backpack.extensions.secondorder.sqrt_ggn.activations import SqrtGGNReLU, SqrtGGNSigmoid
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from backpack.extensions.secondorder.sqrt_ggn.flatten import SqrtGGNFlatten
from backpack.extensions.secondorder.sqrt_ggn.losses import SqrtGGNCrossEntropyLoss, SqrtGGNMSELoss
from oracle import Oracle, Problem, Term
from test_extensions import close, sum_batch
from torch import Tensor, einsum, nn
from torch.distributions import Poisson
from torch.nn import CrossEntropyLoss, Module, MSELoss, Parameter
from torch.nn import functional as F

from backpack import backpack, convert_module_to_backpack, disable, extend, extensions, memory_cleanup, unextend
from backpack.context import CTX
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.nll_base import NLLLossDerivatives
from backpack.custom_module.branching import Parallel
from backpack.custom_module.scale_module import ScaleModule
from backpack.extensions import KFAC, KFLR, BatchDiagGGNExact, BatchGrad, BatchL2Grad, DiagGGNExact, DiagGGNMC, SqrtGGNExact, SqrtGGNMC, Variance
from backpack.extensions.backprop_extension import FAIL_ERROR, BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import LossHessianStrategy
from backpack.hessianfree.ggnvp import ggn_vector_product
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.kroneckers import kfacs_to_mat

N, C = 5, 3


def data(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    y = torch.randint(C, (N,))
    return torch.randn(N, *(shape or (4,)), dtype=torch.float64), y


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, C)).double()


def oracle(make: Callable[[], Module] = mlp, loss: Callable[[], Module] = CrossEntropyLoss, x: Tensor | None = None) -> Oracle:
    given, y = data()
    return Oracle(Problem(make(), given if x is None else x, [Term(loss(), y)]))


# --- layers and losses of the user's own --------------------------------------------------------------------------------------------------------


class Scale(Module):
    """Multiplies by one trainable number."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = Parameter(torch.tensor([weight], dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight


def scaled_mlp() -> nn.Sequential:
    return nn.Sequential(*list(mlp())[:4], Scale(), *list(mlp())[4:])


class ScaleBatchGrad(FirstOrderModuleExtension):
    """Per-sample gradients by hand."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
        chosen = ext.get_subsampling()
        per_sample = (g_out[0] * module.input0).flatten(start_dim=1).sum(1, keepdim=True)
        return per_sample if chosen is None else per_sample[chosen]


@pytest.mark.parametrize("chosen", [None, [3, 0]], ids=str)
def test_module_extension_for_a_layer_of_ones_own(chosen: list[int] | None) -> None:
    model, lossfunc = extend(scaled_mlp()), extend(CrossEntropyLoss())
    x, y = data()
    extension = BatchGrad(subsampling=chosen)
    extension.set_module_extension(Scale, ScaleBatchGrad())
    with backpack(extension):
        lossfunc(model(x), y).backward()
    expected = oracle(scaled_mlp).grad_batch
    for name, param in model.named_parameters():
        close(param.grad_batch, expected[name] if chosen is None else expected[name][chosen])


class ScaleDerivatives(BaseParameterDerivatives):
    """Derivatives as a user writes them."""

    def hessian_is_zero(self, module: Module) -> bool:
        return True

    def _jac_t_mat_prod(self, module: Module, g_inp: tuple, g_out: tuple, mat: Tensor, subsampling: list[int] | None = None) -> Tensor:
        return mat * module.weight

    def _weight_jac_t_mat_prod(
        self, module: Module, g_inp: tuple, g_out: tuple, mat: Tensor, sum_batch: bool = True, subsampling: list[int] | None = None
    ) -> Tensor:
        x = module.input0 if subsampling is None else module.input0[subsampling]
        return einsum("vni,ni->v" if sum_batch else "vni,ni->vn", mat, x).unsqueeze(-1)


def test_derivatives_of_ones_own_in_extensions_of_the_library() -> None:
    model, lossfunc = extend(scaled_mlp()), extend(CrossEntropyLoss())
    x, y = data()
    active = [BatchGrad(), SqrtGGNExact(), DiagGGNExact(), BatchDiagGGNExact()]
    made = [
        BatchGradBase(derivatives=ScaleDerivatives(), params=["weight"]),
        SqrtGGNBaseModule(derivatives=ScaleDerivatives(), params=["weight"]),
        DiagGGNBaseModule(derivatives=ScaleDerivatives(), params=["weight"], sum_batch=True),
        DiagGGNBaseModule(derivatives=ScaleDerivatives(), params=["weight"], sum_batch=False),
    ]
    for extension, entry in zip(active, made, strict=True):
        extension.set_module_extension(Scale, entry)
    with backpack(*active):
        lossfunc(model(x), y).backward()
    truth = oracle(scaled_mlp)
    diagonals = truth.diag_ggn_batch(truth.hessian_exact)
    for name, param in model.named_parameters():
        close(param.grad_batch, truth.grad_batch[name])
        close(param.diag_ggn_exact_batch, diagonals[name])
        close(param.diag_ggn_exact, diagonals[name].sum(0))
        close(param.sqrt_ggn_exact.square().sum(0), diagonals[name])


class PoissonLoss(Module):
    """A loss that neither torch nor the library knows: counts whose logarithmic rate is predicted."""

    reduction = "mean"

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return (input.exp() - target * input).sum() / len(input)


class PoissonDerivatives(NLLLossDerivatives):
    """Its derivatives."""

    def __init__(self, use_autograd: bool = False) -> None:
        super().__init__(use_autograd=use_autograd)

    def _verify_support(self, module: Module) -> None:
        assert module.reduction == "mean"

    def _make_distribution(self, subsampled_input: Tensor) -> Poisson:
        return Poisson(subsampled_input.exp())

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return len(input)

    def _compute_sampled_grads_manual(self, subsampled_input: Tensor, mc_samples: int) -> Tensor:
        return subsampled_input.exp() - self._make_distribution(subsampled_input).sample(torch.Size([mc_samples]))

    def hessian_is_psd(self) -> bool:
        return True


def test_loss_of_ones_own() -> None:
    """Its module extension tells the library's extension where to start; the estimate is right within its standard error."""
    model, lossfunc = extend(mlp()), extend(PoissonLoss())
    x, _ = data()
    y = torch.randint(4, (N, C)).double()
    sampled, exact, draws = DiagGGNMC(mc_samples=20000), DiagGGNExact(), 20000
    for extension in (sampled, exact):
        extension.set_module_extension(PoissonLoss, DiagGGNBaseModule(derivatives=PoissonDerivatives()))
    with backpack(sampled, exact):
        lossfunc(model(x), y).backward()
    truth = Oracle(Problem(mlp(), x, [Term(PoissonLoss(), y)]))
    for name, param in model.named_parameters():
        expected = truth.diag_ggn_batch(truth.hessian_exact)[name].sum(0)
        close(param.diag_ggn_exact, expected)
        assert (param.diag_ggn_mc - expected).abs().max() < 10 * expected.max() / sqrt(draws)


def test_backpropagate_at_odds_with_the_library_is_refused() -> None:
    class Approximate(DiagGGNBaseModule):
        def backpropagate(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Any) -> Tensor:  # noqa: N803
            return 0.5 * super().backpropagate(ext, module, g_inp, g_out, bpQuantities)

    model, lossfunc, ext = extend(mlp()), extend(CrossEntropyLoss()), DiagGGNExact()
    ext.set_module_extension(nn.Linear, Approximate(ScaleDerivatives()))
    x, y = data()
    with backpack(ext), pytest.raises(NotImplementedError, match="Approximate.backpropagate would not be called"):
        lossfunc(model(x), y).backward()


# --- an eigen-solver on top of the square root --------------------------------------------------------------------------------------------------


class GramLinear(SqrtGGNBaseModule):
    """Saves functions and a Gram matrix instead of the columns."""

    def __init__(self) -> None:
        super().__init__(derivatives=LinearDerivatives(), params=["bias", "weight"])

    def weight(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Tensor) -> dict[str, Any]:  # noqa: N803
        columns = self.derivatives.param_mjp("weight", module, g_inp, g_out, bpQuantities, sum_batch=False, subsampling=ext.get_subsampling())
        return self.pack(ext, columns)

    def bias(self, ext: Any, module: Module, g_inp: tuple, g_out: tuple, bpQuantities: Tensor) -> dict[str, Any]:  # noqa: N803
        columns = self.derivatives.param_mjp("bias", module, g_inp, g_out, bpQuantities, sum_batch=False, subsampling=ext.get_subsampling())
        return self.pack(ext, columns)

    @staticmethod
    def pack(ext: Any, columns: Tensor) -> dict[str, Any]:
        rows = columns.flatten(2).flatten(0, 1)
        ext.gram = rows @ rows.T if ext.gram is None else ext.gram + rows @ rows.T
        return {"V_mat_prod": lambda mat: mat @ rows, "V_t_mat_prod": lambda mat: mat @ rows.T}


class Gram(SecondOrderBackpropExtension):
    """The matrix of inner products of the columns."""

    def __init__(self, strategy: str, mc_samples: int = 1, subsampling: list[int] | None = None) -> None:
        self.strategy, self.mc_samples, self.gram = strategy, mc_samples, None
        super().__init__(
            savefield="gram_functions",
            fail_mode=FAIL_ERROR,
            subsampling=subsampling,
            module_exts={
                MSELoss: SqrtGGNMSELoss(),
                CrossEntropyLoss: SqrtGGNCrossEntropyLoss(),
                nn.Linear: GramLinear(),
                nn.ReLU: SqrtGGNReLU(),
                nn.Sigmoid: SqrtGGNSigmoid(),
                nn.Flatten: SqrtGGNFlatten(),
            },
        )

    def get_loss_hessian_strategy(self) -> str:
        return self.strategy

    def get_num_mc_samples(self) -> int:
        return self.mc_samples


@pytest.mark.parametrize("chosen", [None, [0, 2]], ids=str)
def test_eigenvalues_from_the_gram_matrix(chosen: list[int] | None) -> None:
    model, lossfunc = extend(mlp()), extend(CrossEntropyLoss())
    x, y = data()
    extension = Gram(LossHessianStrategy.EXACT, subsampling=chosen)
    with backpack(extension):
        loss = lossfunc(model(x), y)
        loss.backward()
    evals = torch.linalg.eigvalsh(extension.gram).flip(0)
    truth = oracle()
    dense = truth.ggn_per_sample(truth.hessian_exact).reshape(N, sum(p.numel() for p in model.parameters()), -1)
    dense = dense.sum(0) if chosen is None else dense[chosen].sum(0)
    rank = min(len(evals), len(dense))
    close(evals[:rank], torch.linalg.eigvalsh(dense).flip(0)[:rank], rtol=1e-8)
    assert all(set(p.gram_functions) == {"V_mat_prod", "V_t_mat_prod"} for p in model.parameters())


def test_eigen_solver_under_a_seed_draws_as_the_library_does() -> None:
    model, lossfunc = extend(mlp()), extend(CrossEntropyLoss())
    x, y = data()
    extension = Gram(LossHessianStrategy.SAMPLING, mc_samples=4)
    for active in (extension, SqrtGGNMC(mc_samples=4)):
        torch.manual_seed(0)
        with backpack(active):
            lossfunc(model(x), y).backward()
    rows = torch.cat([p.sqrt_ggn_mc.flatten(2) for p in model.parameters()], dim=2).flatten(0, 1)
    close(extension.gram, rows @ rows.T)


# --- uncertainty --------------------------------------------------------------------------------------------------------------------------------


def test_jacobians_by_single_outputs() -> None:
    """``out[:, i].sum()``, once for each output, without any loss."""
    model, (x, _) = extend(mlp()), data()
    out, rows = model(x), []
    for i in range(out.shape[1]):
        model.zero_grad()
        with backpack(BatchGrad()):
            (out[:, i].sum() if out.shape[1] > 1 else out.sum()).backward(retain_graph=i < out.shape[1] - 1)
        rows.append(torch.cat([p.grad_batch.flatten(start_dim=1) for p in model.parameters()], dim=1))
    expected = torch.cat([jac.flatten(2) for jac in oracle().jac.values()], dim=2)
    close(torch.stack(rows, dim=1), expected)


def test_jacobians_by_the_square_root() -> None:
    """The square root of a summed square error is the Jacobian, times the square root of two."""
    model, lossfunc, (x, _) = extend(mlp()), extend(MSELoss(reduction="sum")), data()
    with backpack(SqrtGGNExact()):
        out = model(x)
        lossfunc(out, torch.zeros_like(out)).backward()
    for name, param in model.named_parameters():
        close(param.sqrt_ggn_exact.movedim(0, 1) / sqrt(2), oracle().jac[name].reshape(N, C, *param.shape))


def test_laplace_approximation_over_batches() -> None:
    """Diagonals and Kronecker factors are added over batches, scaled in place, and deleted."""
    model, lossfunc, (x, y) = extend(mlp()), extend(CrossEntropyLoss(reduction="sum")), data()
    diagonal, factors = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64), None
    for batch in (slice(0, 2), slice(2, N)):
        model.zero_grad()
        with backpack(DiagGGNExact(), KFLR(), KFAC(mc_samples=2)):
            lossfunc(model(x[batch]), y[batch]).backward()
        diagonal += torch.cat([p.diag_ggn_exact.data.flatten() for p in model.parameters()])
        size = len(x[batch])
        found = [[factor.mul_(sqrt(size / N)) for factor in p.kflr] for p in model.parameters()]
        assert [len(p.kfac) for p in model.parameters()] == [len(f) for f in found]
        factors = found if factors is None else [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(factors, found, strict=True)]
        for param in model.parameters():
            for field in ("diag_ggn_exact", "kflr", "kfac"):
                delattr(param, field)
                assert not hasattr(param, field)
    truth = oracle(loss=lambda: CrossEntropyLoss(reduction="sum"))
    expected = sum_batch(truth.diag_ggn_batch(truth.hessian_exact))
    close(diagonal, torch.cat([value.flatten() for value in expected.values()]))
    *_, last = (name for name, _ in model.named_parameters() if "bias" in name)
    close(kfacs_to_mat(factors[-1]), sum(truth_of_bias(batch) * sqrt(len(x[batch]) / N) for batch in (slice(0, 2), slice(2, N))))
    assert last == "5.bias"
    for block in factors:
        assert all(torch.linalg.eigvalsh(factor).min() > -1e-12 for factor in block)


def truth_of_bias(batch: slice) -> Tensor:
    """The Hessian of the loss with respect to the last bias: exact, as the output is linear in it."""
    model, (x, y) = mlp(), data()

    def loss(bias: Tensor) -> Tensor:
        return F.cross_entropy(model[:5](x[batch]) @ model[5].weight.T + bias, y[batch], reduction="sum")

    return torch.autograd.functional.hessian(loss, model[5].bias.detach())


def test_last_layer_only() -> None:
    """Everything before is frozen, or runs without gradients."""
    model, lossfunc, (x, y) = mlp(), extend(CrossEntropyLoss()), data()
    for param in model[:5].parameters():
        param.requires_grad_(False)
    extend(model[5])
    with torch.no_grad():
        features = model[:5](x)
    with backpack(KFLR(), DiagGGNExact()):
        lossfunc(model[5](features), y).backward()
    close(kfacs_to_mat(model[5].bias.kflr), truth_of_bias(slice(None)) / N)
    close(model[5].bias.diag_ggn_exact, truth_of_bias(slice(None)).diagonal() / N)
    assert not hasattr(model[1].weight, "kflr")


# --- a debugger of training -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # of torch, about create_graph
def test_debugger() -> None:
    """Several quantities, a hook that reduces them, fields changed in place and deleted, double backward passes around."""
    model, lossfunc, individual = extend(mlp()), extend(CrossEntropyLoss()), extend(CrossEntropyLoss(reduction="none"))
    (x, y), norms, inner = data(), {}, {}

    def hook(module: Module) -> None:
        if list(module.children()):
            return
        for param in module.parameters(recurse=False):
            if not param.requires_grad or not hasattr(param, "grad_batch"):
                continue
            assert param.grad_batch is param.grad_batch
            norms[param] = param.grad_batch.flatten(1).norm(dim=1)
            param.grad_batch.sub_(param.grad_batch.mean(0))
            param.grad_batch.centred = True
            inner[param] = param.grad_batch.flatten(1) @ param.grad_batch.flatten(1).T
            delattr(param, "grad_batch")
            param.diag_ggn_exact_norm = param.diag_ggn_exact.norm().item()

    context = backpack(BatchGrad(), Variance(), DiagGGNExact(), DiagGGNMC(mc_samples=2), extension_hook=hook)
    context.__enter__()
    out = model(x)
    loss, losses = lossfunc(out, y), individual(out, y)
    assert model[1].input0.shape == x.shape
    assert losses.shape == (N,)
    context.__exit__(None, None, None)

    params = list(model.parameters())
    vector = [torch.ones_like(p) for p in params]
    before = hessian_vector_product(loss, params, vector)
    context.__enter__()
    loss.backward(create_graph=True)
    inside = hessian_vector_product(loss, params, vector, grad_params=[p.grad for p in params])
    context.__exit__(None, None, None)
    after = torch.autograd.grad(sum((g * v).sum() for g, v in zip([p.grad for p in params], vector, strict=True)), params, retain_graph=True)
    truth = oracle()
    for i, (name, param) in enumerate(model.named_parameters()):
        gradients = truth.grad_batch[name].flatten(1)
        centred = gradients - gradients.mean(0)
        close(norms[param].detach(), gradients.norm(dim=1))
        close(inner[param].detach(), centred @ centred.T)
        close(param.variance.detach(), truth.variance[name])
        assert not hasattr(param, "grad_batch")
        assert param.diag_ggn_exact_norm > 0
        for found in (inside[i], after[i]):
            close(found.detach(), before[i].detach(), rtol=1e-8)
        param.grad = None


def test_quantity_of_the_loss_for_each_sample() -> None:
    """A loss with ``reduction="none"`` whose sum is differentiated."""
    model, individual, (x, y) = extend(mlp()), extend(CrossEntropyLoss(reduction="none")), data()
    with backpack(BatchGrad()):
        individual(model(x), y).backward(torch.ones(N, dtype=torch.float64) / N)
    for name, param in model.named_parameters():
        close(param.grad_batch, oracle().grad_batch[name])


def test_remove_hooks_and_extend_again() -> None:
    model, lossfunc, (x, y) = extend(mlp()), extend(CrossEntropyLoss()), data()
    for _ in range(3):
        with backpack(BatchGrad()):
            lossfunc(model(x), y).backward()
        for module in (*model.modules(), lossfunc):
            memory_cleanup(module)
        CTX.remove_hooks()
        lossfunc(model(x), y).backward()
        for module in (*model.modules(), lossfunc):
            module._backpack_extend = False
            extend(module)
        model.zero_grad()
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(x), y).backward()
    truth = oracle()
    for name, param in model.named_parameters():
        close(param.grad_batch, truth.grad_batch[name])
        close(param.diag_ggn_exact, sum_batch(truth.diag_ggn_batch(truth.hessian_exact))[name])


def test_last_layer_alone_after_all_layers() -> None:
    """Layers that were extended once are to carry results, unless they are given to ``unextend``, as the error says."""
    model, lossfunc, (x, y) = extend(mlp()), extend(CrossEntropyLoss()), data()
    with backpack(DiagGGNExact()):
        lossfunc(model(x), y).backward()
    CTX.remove_hooks()
    *body, head = model
    extend(head)
    extend(lossfunc)
    with backpack(DiagGGNExact()), pytest.raises(AttributeError, match=r"unextend\(\)"):
        lossfunc(model(x), y).backward()
    for module in body:
        unextend(module)
    with backpack(DiagGGNExact()):
        lossfunc(model(x), y).backward()
    truth = oracle()
    expected = sum_batch(truth.diag_ggn_batch(truth.hessian_exact))
    found = {name: p.diag_ggn_exact for name, p in model.named_parameters() if hasattr(p, "diag_ggn_exact")}
    last = f"{len(body)}."
    assert found.keys() == {name for name in expected if name.startswith(last)}
    for name, value in found.items():
        close(value, expected[name])


def test_disable_around_a_backward_pass() -> None:
    """Recorded before, so that the quantities are there; a forward pass inside is not recorded."""
    model, lossfunc, (x, y) = extend(mlp()), extend(CrossEntropyLoss()), data()
    loss = lossfunc(model(x), y)
    with backpack(BatchGrad()), disable():
        assert not disable.should_store_io()
        loss.backward()
    close(model[1].weight.grad_batch, oracle().grad_batch["1.weight"])
    with disable():
        loss = lossfunc(model(x), y)
        assert not hasattr(model[1], "input0")
    with backpack(BatchGrad()), pytest.raises(AttributeError):
        loss.backward()


# --- clipping -----------------------------------------------------------------------------------------------------------------------------------


def test_clipped_gradients() -> None:
    """Norms first, then one weighted pass; the same as cutting each sample's gradient."""
    model, lossfunc, individual, (x, y) = extend(mlp()), extend(CrossEntropyLoss(reduction="sum")), CrossEntropyLoss(reduction="none"), data()
    with backpack(BatchL2Grad(), BatchGrad()):
        lossfunc(model(x), y).backward()
    params = list(model.parameters())
    norms = torch.stack([p.batch_l2 for p in params]).sum(0).sqrt()
    bound = norms.median().item()
    factors = (bound / norms).clamp(max=1.0)
    assert 0 < (factors < 1).sum() < N
    clipped = [einsum("n,n...->...", factors, p.grad_batch) for p in params]
    for n in range(N):
        gradients = torch.autograd.grad(individual(model(x), y)[n], params)
        close(torch.cat([g.flatten() for g in gradients]).norm(), norms[n].detach())
    model.zero_grad()
    (individual(model(x), y) * factors.detach()).sum().backward()
    for param, expected in zip(params, clipped, strict=True):
        close(param.grad, expected)


# --- residual networks --------------------------------------------------------------------------------------------------------------------------


class Block(Module):
    """Two convolutions with batch normalization, and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            shortcut = self.downsample(x)
        out += shortcut
        return self.relu(out)


class ResNet(Module):
    """Two blocks; ``flatten`` is given by keyword, a function is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layers = nn.Conv2d(1, 2, 3, padding=1), nn.Sequential(Block(2, 2), Block(2, 3, stride=2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(3, C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(F.relu(self.conv(x)))
        return self.fc(torch.flatten(F.relu(self.pool(x)), start_dim=1))


def resnet() -> ResNet:
    torch.manual_seed(2)
    model = ResNet().double()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(6, 1, 4, 4, dtype=torch.float64))  # sets the running statistics
    return model


@pytest.mark.filterwarnings("ignore:.*relu:UserWarning")  # remains a function
@pytest.mark.parametrize("converted", [False, True])
def test_residual_network(converted: bool) -> None:
    original = resnet()
    params, (x, y) = list(original.named_parameters()), data(1, 4, 4)
    model, lossfunc = extend(original, use_converter=converted), extend(CrossEntropyLoss())
    assert [id(p) for p in model.parameters()] == [id(p) for _, p in params]
    model.train()
    with backpack(BatchGrad()), pytest.raises(NotImplementedError, match="mixed-samples"):
        lossfunc(model(x), y).backward()
    model.load_state_dict(resnet().state_dict(), strict=not converted)
    model.eval()
    reference = resnet().eval()
    close(model(x).detach(), reference(x).detach())
    with backpack(BatchGrad(), Variance(), DiagGGNExact()):
        lossfunc(model(x), y).backward()
    truth = oracle(lambda: resnet().eval(), x=x)
    diagonals = sum_batch(truth.diag_ggn_batch(truth.hessian_exact))
    for name, param in params:
        close(param.grad_batch, truth.grad_batch[name])
        close(param.variance, truth.variance[name])
        close(param.diag_ggn_exact, diagonals[name])


def test_convert_by_hand() -> None:
    model = convert_module_to_backpack(nn.Sequential(nn.Linear(4, C)).double(), True)
    x, _ = data()
    assert isinstance(model, torch.fx.GraphModule)
    assert model(x).shape == (N, C)


def test_branches_of_modules() -> None:
    def branches() -> Module:
        torch.manual_seed(0)
        shortcut, body = ScaleModule(0.5), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(4, 4), Parallel(shortcut, body), nn.Linear(4, C)).double()

    model, lossfunc, (x, y) = extend(branches()), extend(CrossEntropyLoss()), data()
    with backpack(BatchGrad(), DiagGGNExact(), SqrtGGNExact()):
        lossfunc(model(x), y).backward()
    truth = oracle(branches)
    diagonals = truth.diag_ggn_batch(truth.hessian_exact)
    for name, param in model.named_parameters():
        close(param.grad_batch, truth.grad_batch[name])
        close(param.diag_ggn_exact, diagonals[name].sum(0))
        close(param.sqrt_ggn_exact.square().sum(0), diagonals[name])


# --- second-order optimizers --------------------------------------------------------------------------------------------------------------------


def test_damped_step_with_matrix_products() -> None:
    """Conjugate gradients on generalized Gauss-Newton products take the step that the dense matrix gives."""
    model, lossfunc, (x, y) = extend(mlp()), extend(CrossEntropyLoss()), data()
    out = model(x)
    loss = lossfunc(out, y)
    params, damping = list(model.parameters()), 0.1
    grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, retain_graph=True)])

    def matvec(vector: Tensor) -> Tensor:
        return torch.cat([v.flatten() for v in ggn_vector_product(loss, out, model, vector_to_parameter_list(vector, params))]) + damping * vector

    step, residual = torch.zeros_like(grad), grad.clone()
    direction = residual.clone()
    for _ in range(60):
        product = matvec(direction)
        alpha = residual.dot(residual) / direction.dot(product)
        step = step + alpha * direction
        new = residual - alpha * product
        direction, residual = new + new.dot(new) / residual.dot(residual) * direction, new
        if residual.norm() < 1e-12:
            break
    truth = oracle()
    dense = truth.ggn_per_sample(truth.hessian_exact).reshape(N, len(grad), len(grad)).sum(0)
    close(step.detach(), torch.linalg.solve(dense + damping * torch.eye(len(grad), dtype=torch.float64), grad), rtol=1e-7)


class PlainDiagonalStep(torch.optim.Optimizer):
    """Divides by the curvature, as in examples of such optimizers."""

    def __init__(self, parameters: Any, step_size: float, damping: float) -> None:
        super().__init__(parameters, {"step_size": step_size, "damping": damping})

    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad / (param.diag_ggn_mc + group["damping"]), alpha=-group["step_size"])


def test_training_with_an_optimizer() -> None:
    model, lossfunc, (x, y) = extend(mlp()), extend(CrossEntropyLoss()), data()
    optimizer, history = PlainDiagonalStep(model.parameters(), 0.1, 1.0), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = lossfunc(model(x), y)
        with backpack(DiagGGNMC()):
            loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.9 * history[0]


def test_settings_of_extensions() -> None:
    for name in extensions.__all__:
        cls = getattr(extensions, name)
        if name == "HBP":
            continue
        ext = cls()
        assert isinstance(ext, BackpropExtension)
        assert isinstance(ext.savefield, str)
        assert ext.get_subsampling() is None
        assert ext.expects_backpropagation_quantities() == (name not in {"BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"})
        assert type(ext.saved_quantities._saved_quantities) is dict
        assert ext._fail_mode == ("ERROR" if ext.expects_backpropagation_quantities() else "WARNING")
