"""Derivatives, and ``backpropagate``, that users hand over with module extensions of the library's second-order extensions: they are asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import sqrt
from typing import Any

import pytest
import torch
from backpack.core.derivatives.relu import ReLUDerivatives
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.secondorder.diag_ggn.diag_ggn_base import DiagGGNBaseModule
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from backpack.extensions.secondorder.hbp.losses import HBPLoss
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from test_extensions import close
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import Linear, Module, Sequential

from backpack import backpack, extend, extensions
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.core.derivatives.mseloss import MSELossDerivatives
from backpack.core.derivatives.nll_base import NLLLossDerivatives
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.errors import NotRecordedError, OverwrittenError, ShapeError, UnsupportedError


class Distance(nn.modules.loss._Loss):
    """A loss of one's own."""

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean()


class Wide(NLLLossDerivatives):
    """Declares another distribution than that of the loss, and a root that is ten times as large."""

    def __init__(self) -> None:
        super().__init__(use_autograd=True)

    def _make_distribution(self, subsampled_input: Tensor) -> Normal:
        return Normal(subsampled_input, torch.tensor(0.1).double())

    @staticmethod
    def _get_mean_normalization(input: Tensor) -> int:
        return input.numel()

    def hessian_is_psd(self) -> bool:
        return True

    def _sqrt_hessian(self, module: Module, g_inp: Any, g_out: Any, subsampling: Any = None) -> Tensor:
        samples, size = module.input0.shape
        return 10 * sqrt(2 / (samples * size)) * torch.eye(size).double().unsqueeze(1).expand(size, samples, size)

    def _sum_hessian(self, module: Module, g_inp: Any, g_out: Any) -> Tensor:
        return 100 * 2 / 3 * torch.eye(3).double()


class TenTimes(MSELossDerivatives):
    """Another root."""

    def _sqrt_hessian(self, *args: Any, **kwargs: Any) -> Tensor:
        return 10 * super()._sqrt_hessian(*args, **kwargs)


class Straight(ReLUDerivatives):
    """Another slope."""

    def _jac_t_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        return 10 * super()._jac_t_mat_prod(*args, **kwargs)


class Scaled(Module):
    """A layer of one's own."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 2, size).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.factor


class ScaledDerivatives(BaseParameterDerivatives):
    """Passes columns on as if there were no activation, ten times as large."""

    def hessian_is_zero(self, module: Module) -> bool:
        return True

    def _jac_t_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: Any = None) -> Tensor:
        return 10 * mat

    def _factor_jac_t_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, sum_batch: bool = True, subsampling: Any = None) -> Tensor:
        products = mat * torch.tanh(module.input0)
        return products.sum(1) if sum_batch else products


class OfScaled(ModuleExtension):
    """The same, as methods."""

    def __init__(self) -> None:
        super().__init__(params=["factor"])

    def factor(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: Tensor) -> Tensor:
        return (columns * torch.tanh(module.input0)).square().sum((0, 1))

    def backpropagate(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: Tensor) -> Tensor:
        return 10 * columns


class WithDerivatives(MatToJacMat):
    """Derivatives, and a method."""

    def __init__(self) -> None:
        super().__init__(ScaledDerivatives(), params=["factor"])

    factor = OfScaled.factor


class OfDistance(ModuleExtension):
    """Where quantities start: ten times as large as it is."""

    def backpropagate(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: None) -> Tensor:
        assert columns is None
        samples, size = module.input0.shape
        return 10 * sqrt(2 / (samples * size)) * torch.eye(size).double().unsqueeze(1).expand(size, samples, size)


def made(base: type, rule: object) -> ModuleExtension:
    return base(derivatives=rule)


def data(samples: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(samples, 3, generator=generator).double(), torch.rand(samples, 3, generator=generator).double()


def model(*inside: Module) -> Sequential:
    torch.manual_seed(0)
    return extend(Sequential(Linear(3, 4), *inside, Linear(4, 3)).double())


def value(parameter: Any, extension: extensions.KFLR) -> Tensor:
    found = getattr(parameter, extension.savefield)
    return found[0] if isinstance(found, list) else found


EXACT: dict[str, tuple[Callable, type, int]] = {
    "DiagGGNExact": (extensions.DiagGGNExact, DiagGGNBaseModule, 100),
    "BatchDiagGGNExact": (extensions.BatchDiagGGNExact, DiagGGNBaseModule, 100),
    "SqrtGGNExact": (extensions.SqrtGGNExact, SqrtGGNBaseModule, 10),
    "KFLR": (extensions.KFLR, HBPLoss, 100),
    "KFRA": (extensions.KFRA, HBPLoss, 100),
}


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("name", EXACT)
def test_loss_of_ones_own(name: str, samples: int) -> None:
    make, base, factor = EXACT[name]
    (x, y), usual, handed = data(samples), make(), make()
    handed.set_module_extension(Distance, made(base, Wide()))
    net, found = model(nn.Sigmoid()), []
    for extension, loss in ((usual, nn.MSELoss()), (handed, Distance())):
        lossfunc = extend(loss)
        with backpack(extension):
            (0.3 * lossfunc(net(x), y)).backward()
        found.append([value(p, extension).clone() for p in net.parameters()])
    for plain, ours in zip(*found, strict=True):
        close(ours, factor * plain)


@pytest.mark.parametrize("name", ["DiagGGNExact", "SqrtGGNExact", "KFLR"])
@pytest.mark.parametrize(("cls", "rule"), [(nn.MSELoss, TenTimes()), (nn.ReLU, Straight())], ids=["loss", "activation"])
def test_classes_that_the_library_knows(cls: type[Module], rule: object, name: str) -> None:
    make, base, factor = EXACT[name]
    (x, y), usual, handed = data(), make(), make()
    handed.set_module_extension(cls, made(HBPBaseModule if name == "KFLR" and cls is nn.ReLU else base, rule), overwrite=True)
    net, lossfunc = model(nn.ReLU()), extend(nn.MSELoss())
    first, last = net[0].weight, net[2].weight
    with backpack(usual):
        lossfunc(net(x), y).backward()
    plain = [value(p, usual).clone() for p in (first, last)]
    with backpack(handed):
        lossfunc(net(x), y).backward()
    close(value(first, handed), factor * plain[0])
    close(value(last, handed), (factor if cls is nn.MSELoss else 1) * plain[1])


@pytest.mark.parametrize("make", [extensions.DiagGGNMC, extensions.KFAC])
def test_distribution_of_ones_own(make: Callable) -> None:
    """Labels are drawn from it, within ten standard errors: of a normal one, the expected square of the gradient is one over the variance."""
    (x, y), draws = data(), 20000
    extension = make(mc_samples=draws)
    extension.set_module_extension(Distance, made(HBPLoss if make is extensions.KFAC else DiagGGNBaseModule, Wide()))
    net, lossfunc = model(nn.Sigmoid()), extend(Distance())
    with backpack(extension):
        lossfunc(net(x), y).backward()
    found = value(net[2].bias, extension)
    found = found.diagonal() if found.dim() > 1 else found
    expected = 100 / 3  # five samples, over 15 entries
    assert (found - expected).abs().max() < 10 * expected * sqrt(2 / draws)


@pytest.mark.parametrize("chosen", [WithDerivatives, OfScaled], ids=["derivatives", "backpropagate"])
def test_layer_of_ones_own(chosen: Callable[[], ModuleExtension]) -> None:
    (x, y), net, lossfunc, extension = data(), model(Scaled()), extend(nn.MSELoss()), extensions.DiagGGNExact()
    extension.set_module_extension(Scaled, chosen())
    with backpack(extension):
        lossfunc(net(x), y).backward()
    root = (2 / y.numel()) ** 0.5 * net[2].weight.detach()  # [3, 4], the same for all samples
    hidden = net[0](x).detach()
    close(net[1].factor.diag_ggn_exact, root.square().sum(0) * hidden.tanh().square().sum(0))
    close(net[0].bias.diag_ggn_exact, 100 * root.square().sum(0) * len(x))
    close(net[0].weight.diag_ggn_exact, 100 * root.square().sum(0).outer(x.square().sum(0)))


@pytest.mark.parametrize("name", ["DiagGGNExact", "SqrtGGNExact", "BatchDiagGGNExact"])
def test_where_quantities_start(name: str) -> None:
    make, _, factor = EXACT[name]
    (x, y), usual, handed, net, found = data(), make(), make(), model(nn.Sigmoid()), []
    handed.set_module_extension(Distance, OfDistance())
    for extension in (usual, handed):
        lossfunc = extend(Distance())
        with backpack(extension):
            (0.3 * lossfunc(net(x), y)).backward()
        found.append([value(p, extension).clone() for p in net.parameters()])
    for plain, ours in zip(*found, strict=True):
        close(ours, factor * plain)


class OfGradients(OfDistance):
    """Reads what arrives: one, whatever the loss is multiplied by."""

    def backpropagate(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: None) -> Tensor:
        return g_out[0].sqrt() * super().backpropagate(ext, module, g_inp, g_out, columns)


@pytest.mark.parametrize("chosen", [OfDistance, OfGradients])
@pytest.mark.parametrize("name", ["DiagGGNExact", "DiagGGNMC"])
def test_columns_of_users_are_neither_drawn_nor_scaled_twice(name: str, chosen: type[OfDistance]) -> None:
    (x, y), usual, handed, net, lossfunc = data(), extensions.DiagGGNExact(), getattr(extensions, name)(), model(nn.Sigmoid()), extend(Distance())
    handed.set_module_extension(Distance, chosen())
    found = []
    for extension in (usual, handed):
        with backpack(extension):
            (0.3 * lossfunc(net(x), y)).backward()
        found.append([value(p, extension).clone() for p in net.parameters()])
    for plain, ours in zip(*found, strict=True):
        close(ours, 100 * plain)


@pytest.mark.parametrize("bent", [False, True])
def test_rules_of_the_library_that_are_handed_over_are_its_own(bent: bool) -> None:
    """Beside other extensions, too, which a rule of a user's is not."""
    (x, y), net, lossfunc = data(), model(nn.ReLU()), extend(Distance())
    handed, usual = extensions.DiagGGNExact(), extensions.KFLR()
    handed.set_module_extension(nn.ReLU, made(DiagGGNBaseModule, (Straight if bent else ReLUDerivatives)()), overwrite=True)
    with backpack(handed, usual), pytest.raises(UnsupportedError, match="say something else for each") if bent else nullcontext():
        lossfunc(net(x), y).backward()
    assert hasattr(net[0].weight, "kflr") is not bent


def test_other_passes_have_the_rule_of_the_library() -> None:
    """Those on the same graph, too, and after a pass that was refused."""
    (x, y), net, lossfunc = data(), model(nn.ReLU()), extend(Distance())
    handed, usual, other = extensions.DiagGGNExact(), extensions.DiagGGNExact(), extensions.KFLR()
    handed.set_module_extension(Distance, made(DiagGGNBaseModule, Wide()))
    loss, found = lossfunc(net(x), y), []
    for active in ([usual], [handed], [usual], [handed, other], [usual]):
        with backpack(*active):
            if other in active:
                with pytest.raises(UnsupportedError, match=r"Distance.*DiagGGNExact \(Wide\) and KFLR \(nothing\).*backpack.register\(Distance"):
                    loss.backward(retain_graph=True)
            else:
                loss.backward(retain_graph=True)
                found.append(net[0].weight.diag_ggn_exact.clone())
    plain, tenfold, again, after = found
    close(tenfold, 100 * plain)
    assert torch.equal(again, plain)
    assert torch.equal(after, plain)


def test_extensions_that_were_told_the_same() -> None:
    (x, y), net, lossfunc = data(), model(nn.ReLU()), extend(Distance())
    active, plain = [extensions.DiagGGNExact(), extensions.BatchDiagGGNExact()], extensions.DiagGGNExact()
    with backpack(plain):
        lossfunc(net(x), y).backward()
    expected = net[0].weight.diag_ggn_exact
    for extension in active:
        extension.set_module_extension(Distance, made(DiagGGNBaseModule, Wide()))
    with backpack(*active, extensions.BatchGrad()):
        lossfunc(net(x), y).backward()
    close(net[0].weight.diag_ggn_exact, 100 * expected)
    close(net[0].weight.diag_ggn_exact_batch.sum(0), 100 * expected)


class OfUnnamed(ModuleExtension):
    """Does not name the parameter."""

    def backpropagate(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: Tensor) -> Tensor:
        return columns


@pytest.mark.parametrize(
    ("make", "chosen"),
    [
        (extensions.DiagGGNExact, OfUnnamed),
        (lambda: extensions.DiagGGNExact(subsampling=[0]), OfScaled),
        (extensions.DiagHessian, OfScaled),
        (extensions.GGNMP, OfScaled),
    ],
    ids=["parameters without a name", "chosen samples", "signed columns", "functions"],
)
def test_what_would_not_be_called_is_refused(make: Callable, chosen: type[ModuleExtension]) -> None:
    (x, y), net, lossfunc, extension = data(), model(Scaled()), extend(nn.MSELoss()), make()
    extension.set_module_extension(Scaled, chosen())
    said = rf"1: {chosen.__name__}\.backpropagate would not be called.*backpack.register\(Scaled"
    with backpack(extension), pytest.raises(UnsupportedError, match=said):
        lossfunc(net(x), y).backward()
    assert not any(hasattr(p, extension.savefield) for p in net.parameters())


class Slope(ElementwiseDerivatives):
    """Reads the input, where the rule of the library reads the output; has a setting."""

    keeps = frozenset({"input"})

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def df(self, module: Module, g_inp: Any, g_out: Any, subsampling: Any = None) -> Tensor:
        return self.factor * (1 - module.input0.tanh().square())

    def hessian_is_zero(self, module: Module) -> bool:
        return False


@pytest.mark.parametrize("inside", [True, False])
def test_what_the_rule_of_the_library_does_not_read(inside: bool) -> None:
    (x, y), net, lossfunc = data(), model(nn.Tanh()), extend(nn.MSELoss())
    usual, handed = extensions.DiagGGNExact(), extensions.DiagGGNExact()
    handed.set_module_extension(nn.Tanh, made(DiagGGNBaseModule, Slope(3.0)), overwrite=True)
    with backpack(usual):
        lossfunc(net(x), y).backward()
    expected = net[0].weight.diag_ggn_exact
    loss = None if inside else lossfunc(net(x), y)
    with backpack(handed):
        (lossfunc(net(x), y) if inside else loss).backward()
    close(net[0].weight.diag_ggn_exact, 9 * expected)


def test_what_cannot_be_found_is_said() -> None:
    """The output of a layer that kept its input, where a parameter has changed since."""

    class Output(BaseParameterDerivatives):
        def hessian_is_zero(self, module: Module) -> bool:
            return True

        def _jac_t_mat_prod(self, module: Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: Any = None) -> Tensor:
            return mat @ module.weight * module.output.mean()

    (x, y), net, lossfunc, extension = data(), model(nn.Tanh()), extend(nn.MSELoss()), extensions.DiagGGNExact()
    extension.set_module_extension(Linear, made(DiagGGNBaseModule, Output()), overwrite=True)
    loss = lossfunc(net(x), y)
    net[0].weight.data = net[0].weight.data.clone()
    with backpack(extension), pytest.raises(NotRecordedError, match=r"output of 0 was not kept.*Output may\. Run the forward pass in the context"):
        loss.backward()


@pytest.mark.parametrize("settings", [(3.0, 3.0), (1.0, 3.0)], ids=str)
def test_settings_tell_rules_apart(settings: tuple[float, float]) -> None:
    (x, y), net, lossfunc = data(), model(nn.Tanh()), extend(nn.MSELoss())
    active = [extensions.DiagGGNExact(), extensions.BatchDiagGGNExact()]
    for extension, factor in zip(active, settings, strict=True):
        extension.set_module_extension(nn.Tanh, made(DiagGGNBaseModule, Slope(factor)), overwrite=True)
    loss = lossfunc(net(x), y)
    with backpack(*active):
        if settings[0] != settings[1]:
            with pytest.raises(UnsupportedError, match=r"DiagGGNExact \(Slope\) and BatchDiagGGNExact \(Slope\)"):
                loss.backward()
        else:
            loss.backward()
            close(net[0].weight.diag_ggn_exact_batch.sum(0), net[0].weight.diag_ggn_exact)


class OfBias(ModuleExtension):
    """Sums over the positions of a sample, of columns with signs."""

    any_layout = True

    def bias(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: dict) -> Tensor:
        return sum(sign * mat.sum(1).square().sum((0, 1)) for mat, sign in zip(columns["matrices"], columns["signs"], strict=True))


class TimeFirst(Module):
    """Has samples on axis 1 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = Linear(3, 4), nn.Tanh(), Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x.transpose(0, 1)))).sum(0)


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("reads", [True, False])
def test_signs_belong_to_samples(reads: bool, steps: int) -> None:
    torch.manual_seed(0)
    net, lossfunc, extension = extend(TimeFirst().double()), extend(nn.MSELoss()), extensions.DiagHessian()
    x, y = torch.rand(5, steps, 3).double(), data()[1]
    with backpack(extensions.DiagHessian()):
        lossfunc(net(x), y).backward()
    expected = net.a.weight.diag_h
    extension.set_module_extension(Linear, OfBias(["bias"]) if reads else ModuleExtension())
    with backpack(extension):
        if reads:
            with pytest.raises(UnsupportedError, match="not, or not known to be, those of axis 0"):
                lossfunc(net(x), y).backward()
        else:
            lossfunc(net(x), y).backward()
            close(net.a.weight.diag_h, expected)


@pytest.mark.parametrize("sent", [None, 1.0, lambda columns: columns[:1], lambda columns: columns[0], lambda columns: [columns]])
def test_what_backpropagate_returns_is_checked(sent: Any) -> None:
    class Returns(OfScaled):
        def backpropagate(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: Tensor) -> Any:
            return sent(columns) if callable(sent) else sent

    (x, y), net, lossfunc, extension = data(), model(Scaled()), extend(nn.MSELoss()), extensions.DiagGGNExact()
    extension.set_module_extension(Scaled, Returns())
    with backpack(extension), pytest.raises(ShapeError, match=r"1: Returns.backpropagate has to return columns of the input, \[3, 5, 4\], got"):
        lossfunc(net(x), y).backward()
    assert not any(hasattr(p, "diag_ggn_exact") for p in net.parameters())


@pytest.mark.parametrize("place", ["layer", "loss"])
def test_changes_in_place_are_refused(place: str) -> None:
    """Others carry, or read, the same columns, or the gradient."""

    class Careless(OfScaled if place == "layer" else OfDistance):
        def backpropagate(self, ext: Any, module: Module, g_inp: Any, g_out: Any, columns: Any) -> Tensor:
            if place == "loss":
                g_out[0].mul_(2)
                return super().backpropagate(ext, module, g_inp, g_out, columns)
            return columns.mul_(10)

    (x, y), net, lossfunc, extension = data(), model(Scaled()), extend(Distance()), extensions.DiagGGNExact()
    extension.set_module_extension(Scaled if place == "layer" else Distance, Careless())
    with backpack(extension), pytest.raises(OverwrittenError, match="Careless, at .* changes in place what it is given"):
        lossfunc(net(x), y).backward()
    assert not any(hasattr(p, "diag_ggn_exact") for p in net.parameters())


@pytest.mark.parametrize("chosen", [lambda: made(DiagGGNBaseModule, TenTimes()), OfDistance], ids=["derivatives", "backpropagate"])
@pytest.mark.parametrize("lossfunc", [nn.functional.mse_loss, nn.MSELoss()], ids=["function", "module that is not extended"])
def test_losses_that_are_functions(lossfunc: Callable, chosen: Callable[[], ModuleExtension]) -> None:
    (x, y), net, extension = data(), model(nn.ReLU()), extensions.DiagGGNExact()
    extension.set_module_extension(nn.MSELoss, chosen(), overwrite=True)
    with backpack(extension), pytest.raises(UnsupportedError, match=r"would not be asked.*Extend the loss: lossfunc = extend\(MSELoss"):
        lossfunc(net(x), y).backward()
    with backpack(extension):
        extend(nn.MSELoss())(net(x), y).backward()
    found = net[0].weight.diag_ggn_exact
    with backpack(extensions.DiagGGNExact()):
        lossfunc(net(x), y).backward()
    close(found, 100 * net[0].weight.diag_ggn_exact)
