"""
A layer of your own
===================

A layer that backpack has never seen works at once, through automatic differentiation. Ten lines of mathematics make it fast. Here are a layer
and an activation: they work, then they get rules, the rules are proved right, and the time that they save is measured.
"""

# %%
# Gaussian bumps
# --------------
# An activation that answers to inputs near zero only, and a layer that scales each feature. Both are easily written, and neither has a rule.
import statistics
import time

import matplotlib.pyplot as plt
import torch
from _common import BLUE, GREEN, GREY, ORANGE, save
from sklearn.datasets import load_wine
from torch import Tensor, nn
from tqdm import tqdm

import backpack as bp
from backpack import backpack, extend
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian, Variance
from backpack.utils.subsampling import subsample


class Bump(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (-x.square() / 2).exp()


class Scale(nn.Module):
    """Multiplies each feature by a number that is learned."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


data = load_wine()
X, y = torch.from_numpy(data.data).float(), torch.from_numpy(data.target)
X = (X - X.mean(0)) / X.std(0)
torch.manual_seed(0)
model = extend(nn.Sequential(nn.Linear(13, 64), Scale(64), Bump(), nn.Linear(64, 64), Scale(64), Bump(), nn.Linear(64, 3)))
lossfunc = extend(nn.CrossEntropyLoss())

# %%
# Without a rule
# --------------
# All of these are exact already.
QUANTITIES = {"BatchGrad": BatchGrad, "Variance": Variance, "DiagGGNExact": DiagGGNExact, "KFAC": KFAC, "DiagHessian": DiagHessian}


def compute(quantity: type) -> dict:
    torch.manual_seed(1)  # KFAC draws labels
    with backpack(quantity()):
        lossfunc(model(X), y).backward()
    return bp.results(model)


def seconds(*quantities: type) -> float:
    def once() -> float:
        start = time.process_time()
        with backpack(*(quantity() for quantity in quantities)):
            lossfunc(model(X), y).backward()
        return time.process_time() - start

    return statistics.median(once() for _ in range(15))


def measure() -> dict[str, float]:
    """The cost of each quantity in gradients, forward and backward pass together."""
    return {name: seconds(quantity) / seconds() for name, quantity in tqdm(QUANTITIES.items(), desc="measuring")}


without = {name: compute(quantity) for name, quantity in QUANTITIES.items()}
cost_without = measure()

# %%
# Two rules
# ---------
# For an activation: its first and second derivative. For a layer with a parameter: products with its transposed Jacobians, for the input and for the
# parameter; ``mat`` has one column for each ``v``, ``[V, N, features]``.


@bp.register(Bump)
class BumpDerivatives(ElementwiseDerivatives):
    keeps = frozenset({"input", "output"})

    def df(self, module, g_inp, g_out, subsampling=None):
        x, bump = (subsample(tensor, subsampling=subsampling) for tensor in (module.input0, module.output))
        return -x * bump

    def d2f(self, module, g_inp, g_out):
        return (module.input0.square() - 1) * module.output

    def hessian_is_zero(self, module):
        return False


@bp.register(Scale)
class ScaleDerivatives(BaseParameterDerivatives):
    keeps = frozenset({"input"})

    def hessian_is_zero(self, module):
        return True

    def _jac_t_mat_prod(self, module, g_inp, g_out, mat, subsampling=None):
        return mat * module.factor

    def _factor_jac_t_mat_prod(self, module, g_inp, g_out, mat, sum_batch=True, subsampling=None):
        products = mat * subsample(module.input0, subsampling=subsampling)
        return products.sum(1) if sum_batch else products


# %%
# Right or wrong?
# ---------------
# ``check_rule`` compares every product of a rule with automatic differentiation. A mistake does not get through: here is one.
print(len(bp.check_rule(Bump(), torch.randn(4, 3))), "products of Bump,", len(bp.check_rule(Scale(3), torch.randn(4, 3))), "of Scale are right")


class Wrong(Bump):
    """The same activation, with a rule of its own."""


@bp.register(Wrong)
class WrongDerivatives(BumpDerivatives):
    def d2f(self, module, g_inp, g_out):
        return module.input0.square() * module.output  # forgets a term


try:
    bp.check_rule(Wrong(), torch.randn(4, 3))
    raise SystemExit("the mistake got through")
except AssertionError as error:
    print("Wrong:", str(error).splitlines()[0])

# %%
# With the rules
# --------------
# The same numbers, sooner.
model = extend(bp.unextend(model))
for name, quantity in QUANTITIES.items():
    for parameter, fields in compute(quantity).items():
        for field, value in fields.items():
            torch.testing.assert_close(value, without[name][parameter][field], rtol=1e-3, atol=1e-5)
cost_with = measure()
for name in QUANTITIES:
    print(f"{name:14} {cost_without[name]:5.1f} gradients without, {cost_with[name]:5.1f} with the rules")
assert cost_with["DiagHessian"] < cost_without["DiagHessian"]

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=[1, 1.3])
line = torch.linspace(-4, 4, 200)
bump = Bump()(line)
for values, colour, label in ((bump, BLUE, "Bump"), (-line * bump, ORANGE, "df"), ((line.square() - 1) * bump, GREEN, "d2f")):
    left.plot(line, values, color=colour, label=label)
left.axhline(0, color="black", linewidth=0.6)
left.set(title="An activation and its derivatives", xlabel="input", ylabel="output")
left.legend()
places = torch.arange(len(QUANTITIES))
right.hlines(places, list(cost_with.values()), list(cost_without.values()), color=GREY, linewidth=1)
right.plot(list(cost_without.values()), places, "o", color=GREY, markersize=10, label="without rules")
right.plot(list(cost_with.values()), places, "o", color=BLUE, markersize=10, label="with rules")
right.set(
    title="What each quantity costs", xlabel="time [gradients]", xscale="log", xlim=(0.9, 110), yticks=places.tolist(), yticklabels=list(QUANTITIES)
)
right.invert_yaxis()
right.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
right.minorticks_off()
right.grid(axis="x", alpha=0.3)
right.legend()
save(figure, "custom_layer")
