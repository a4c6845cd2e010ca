"""
Explain and verify
==================

Before a run, ``explain`` tells what serves each parameter, what is refused, and what it costs. Afterwards, ``verify`` computes the numbers again from
their definitions, by plain autograd, on your own model. Here it finds a mistake that was planted in a rule.
"""

# %%
# A model that somebody else wrote
# --------------------------------
# A small vision transformer on digits: patches, a class token, positions and their scales, attention, and a gate that
# nobody has a module for.
import matplotlib.pyplot as plt
import torch
from _common import GREEN, GREY, ORANGE, digits, save
from matplotlib.patches import Patch
from torch import Tensor, nn

import backpack as bp
from backpack import explain, extend, verify
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian, Variance
from backpack.verification.report import Verdict


class Softsquare(nn.Module):
    """``x / sqrt(1 + x^2)``, a sigmoid without exponentials."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.square()).rsqrt()


class Transformer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Linear(16, width)
        self.token = nn.Parameter(torch.randn(1, 1, width) / 4)
        self.positions = nn.Parameter(torch.randn(1, 5, width) / 4)
        self.scales = nn.Parameter(torch.ones(5, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.squash = Softsquare()
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.reshape(-1, 2, 4, 2, 4).transpose(2, 3).flatten(3).flatten(1, 2)
        h = torch.cat([self.token.expand(len(images), -1, -1), self.patches(patches)], dim=1) + self.positions
        h = h * self.scales
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.squash(self.gate(self.norm(h))) * self.value(self.norm(h))
        return self.head(h[:, 0])


X, y, *_ = digits()
X, y = X[:6], y[:6]
torch.manual_seed(0)
model, lossfunc = extend(Transformer()), extend(nn.CrossEntropyLoss())
EXTENSIONS = [BatchGrad(), Variance(), DiagGGNExact(), DiagHessian(), KFAC()]

# %%
# What would happen
# -----------------
# No quantity has been computed when this table is printed. Kronecker factors of some parameters do not exist; the line that leaves them out is in it.
explanation = explain(model, lossfunc, X, y, EXTENSIONS)
print(explanation)
refused = sorted({row.parameter for row in explanation.refused})
assert refused == ["scales"]

# %%
# What did happen
# ---------------
# Numbers of a few samples and entries, compared with plain autograd in double precision.
EXTENSIONS[-1] = KFAC(exclude=refused)
right = verify(model, lossfunc, X, y, EXTENSIONS)
print("\n".join(str(right).splitlines()[:6]), "\n... and so on:", sum(row.verdict is Verdict.AGREES for row in right.rows), "results agree")
assert right.ok


# %%
# A planted mistake
# -----------------
# Someone makes the activation fast, and gets a power in its derivative wrong.
@bp.register(Softsquare)
class SoftsquareDerivatives(ElementwiseDerivatives):
    keeps = frozenset({"input"})

    def hessian_is_zero(self, module: nn.Module) -> bool:
        return False

    def df(self, module: nn.Module, g_inp: tuple, g_out: tuple, subsampling: list[int] | None = None) -> Tensor:
        x = module.input0 if subsampling is None else module.input0[subsampling]
        return (1 + x.square()) ** -1  # -3/2 it should be

    def d2f(self, module: nn.Module, g_inp: tuple, g_out: tuple) -> Tensor:
        return -3 * module.input0 * (1 + module.input0.square()) ** -2.5


torch.manual_seed(0)
wrong = verify(Transformer(), nn.CrossEntropyLoss(), X, y, EXTENSIONS)
accused = [row for row in wrong.rows if row.verdict is Verdict.WRONG]
print(len(accused), "of", len(wrong.rows), "results are wrong")

# %%
# First order is right: its numbers come from the gradient that autograd carries itself. All that second-order quantities say of parameters
# upstream of the activation is accused, and nothing else.
assert {row.quantity for row in accused} == {"DiagGGNExact", "DiagHessian", "KFAC"}
assert not {row.parameter for row in accused} & {"head.weight", "head.bias", "value.weight", "value.bias"}

names = [name for name, _ in model.named_parameters()]
quantities = ["BatchGrad", "Variance", "DiagGGNExact", "DiagHessian", "KFAC"]
COLORS = {Verdict.AGREES: GREEN, Verdict.WRONG: ORANGE}
figure, axes = plt.subplots(1, 2, figsize=(10.5, 5.2), sharey=True)
for axis, (title, report) in zip(axes, (("Without a rule", right), ("With a wrong rule", wrong)), strict=True):
    for row in report.rows:
        if row.parameter in names:
            axis.scatter(quantities.index(row.quantity), names.index(row.parameter), s=90, marker="s", color=COLORS.get(row.verdict, GREY))
    axis.set_xticks(range(len(quantities)), quantities, rotation=35, ha="right")
    axis.set(title=title, xlim=(-0.6, len(quantities) - 0.4))
axes[0].set_yticks(range(len(names)), names)
axes[0].invert_yaxis()
handles = [Patch(color=GREEN, label="agrees"), Patch(color=ORANGE, label="wrong"), Patch(color=GREY, label="not compared, or left out")]
figure.legend(handles=handles, loc="outside lower center", ncols=3)
save(figure, "verify_explain")
