"""The table of supported layers: each cell is tried with a small net around the layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from table import Layer
from test_derivatives import LAYERS  # with the rows of that file
from torch import Tensor, nn
from torch.nn import Flatten, Linear, Module, MSELoss, Parameter, Sequential, Unflatten

from backpack import backpack, extend, supported
from backpack.core.derivatives.registry import derivatives_for, registered
from backpack.core.plan import Plan
from backpack.core.walk import Need, Walk
from backpack.extensions.support import EXTENSIONS, OTHER, OTHER_LOSS, OTHER_MATRICES, OTHER_VECTORS, How
from backpack.utils.errors import BackpackError

N = 3


class Sine(Module):
    """No parameters, no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Scale(Module):
    """A vector, no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).sin()


class Mix(Module):
    """A matrix, no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * self.matrix).sum(1).sin()


class Fed(Module):
    """A layer with further inputs, or with nothing but an input that cannot be differentiated."""

    def __init__(self, layer: Layer, tested: Module) -> None:
        super().__init__()
        self.layer, self.tested = layer, tested

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.shape == INTEGERS:
            return self.tested(torch.arange(2 * len(x)).reshape(-1, 2) % 3)
        return self.tested(x, *(more.to(x.dtype) if more.is_floating_point() else more for more in self.layer.more(len(x))))


INTEGERS = (-1,)


def nothing(_: int) -> tuple:
    return ()


def examples() -> dict[str, Layer]:
    """A row of each class in the table of layers, with parameters where there are some; and modules without a rule, and with integers as input."""
    found = {OTHER: Layer(Sine, (4,), nothing), OTHER_VECTORS: Layer(Scale, (4,), nothing), OTHER_MATRICES: Layer(Mix, (4,), nothing)}
    found |= {cls.__name__: Layer(partial(cls, 3, 2), INTEGERS, nothing) for cls in (nn.Embedding, nn.EmbeddingBag)}
    for layer in sorted(LAYERS.values(), key=lambda layer: not list(layer.make().parameters())):
        if layer.shape:
            found.setdefault(type(layer.make()).__name__, layer)
    return found


EXAMPLES = examples()
TABLE = supported()


@pytest.mark.parametrize("layer", EXAMPLES)
def test_table_says_what_happens_at_a_layer(layer: str) -> None:
    torch.manual_seed(0)
    example = EXAMPLES[layer]
    shape = (4,) if example.shape == INTEGERS else example.shape
    for name, extension in EXTENSIONS.items():
        tested = example.make().eval()
        fed = tested if example.more is nothing and example.shape != INTEGERS else Fed(example, tested)
        features = torch.Size(shape).numel()
        outputs = fed(torch.randn(N, *shape))[0].numel()
        before = [] if example.shape == INTEGERS else [Linear(4, features), Unflatten(1, shape)]
        model = extend(Sequential(*before, fed, Flatten(), Linear(outputs, 2)))
        lossfunc = extend(MSELoss())
        cell = TABLE[layer][name]
        with backpack(extension):
            loss = lossfunc(model(torch.randn(N, 4)), torch.randn(N, 2))
            if cell.how is How.REFUSED:
                assert cell.reason
                with pytest.raises(BackpackError):
                    loss.backward()
                continue
            used = [unit.call.derivatives for unit in plan_of(loss, extension.flow.needs).units.values() if unit.call.module is tested]
            assert (cell.how is How.RULE) == (used == [derivatives_for(tested)] or returns_input(fed, shape))
            loss.backward()
        for param in model.parameters():
            assert hasattr(param, extension.savefield), (layer, name)


def plan_of(loss: Tensor, need: Need) -> Plan:
    return Plan(Walk([loss.grad_fn], True), need)


def returns_input(module: Module, shape: tuple[int, ...]) -> bool:
    x = torch.randn(N, *shape)
    return module(x).data_ptr() == x.data_ptr()


def classes(out: Tensor) -> Tensor:
    return torch.zeros(len(out), dtype=torch.int64)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "NLLLoss": classes,
    "MultiMarginLoss": classes,
    "CrossEntropyLoss": classes,
    "BCEWithLogitsLoss": torch.ones_like,
    "MSELoss": torch.zeros_like,
    "SmoothL1Loss": torch.zeros_like,
    "HuberLoss": torch.zeros_like,
    "L1Loss": torch.zeros_like,
    "PoissonNLLLoss": torch.ones_like,
    "SoftMarginLoss": torch.ones_like,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_table_says_what_happens_at_a_loss(loss: str) -> None:
    torch.manual_seed(0)
    for name, extension in EXTENSIONS.items():
        model, lossfunc, cell = extend(Sequential(Linear(4, 3), nn.Sigmoid(), Linear(3, 2))), extend(getattr(nn, loss)()), TABLE[loss][name]
        with backpack(extension):
            out = model(torch.randn(N, 4))
            value = lossfunc(out, LOSSES[loss](out.detach()))
            if cell.how is How.REFUSED:
                with pytest.raises(BackpackError):
                    value.backward()
            else:
                value.backward()
                assert all(hasattr(param, extension.savefield) for param in model.parameters())


def test_table_is_complete_and_printable() -> None:
    """A row for each registered class, a column for each quantity; what is refused says why; it can be printed."""
    table = supported()
    assert {cls.__name__ for cls in registered()} - {"_Loss"} | {OTHER_LOSS, OTHER, OTHER_VECTORS, OTHER_MATRICES} == set(table)
    for row in table.values():
        assert list(row) == list(EXTENSIONS)
        assert all((cell.how is How.REFUSED) == bool(cell.reason) for cell in row.values())
    lines = str(table).splitlines()
    assert len(lines) == len(table) + 1
    assert lines[0].split() == list(EXTENSIONS)
    (softmax,) = (line for line in lines if line.startswith("Softmax "))
    assert softmax.split()[1:] == [cell.how.value for cell in table["Softmax"].values()]
    assert table["Linear"]["KFRA"].how is How.RULE
    assert table["Softmax"]["PCHMP"].reason == "its second derivative is dense"
    assert table["CosineEmbeddingLoss"]["DiagGGNExact"].how is How.GRAPH
    assert [table["CTCLoss"][name].how for name in ("BatchGrad", "DiagGGNExact")] == [How.GRAPH, How.REFUSED]


def test_every_layer_of_the_library_is_tried() -> None:
    classes = {cls.__name__ for cls, rule in registered().items() if cls.__module__.startswith(("torch.", "backpack.")) and not rule.is_loss}
    assert classes <= EXAMPLES.keys()
