"""Random models, drawn by hypothesis from a small grammar.

A model is a tuple of steps; a step is a name followed by its settings, and branches contain steps. Sizes, data and parameters are drawn, too. A
failure prints the steps: ``Net(steps, heads)`` builds the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from cases_nets import ACTIVATIONS
from cases_norm import spread
from hypothesis import strategies as st
from oracle import Problem, Term, call_model
from table import default_dtype
from torch import Tensor, nn, randn
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Linear, Module, MSELoss, Parameter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Step = tuple[Any, ...]
Steps = tuple[Step, ...]
MODULES = [name for name in ACTIVATIONS if name not in {"PReLU, C parameters", "Softmax", "LogSoftmax", "Hardsigmoid, in place"}]


class Quarter(torch.autograd.Function):
    """Keeps the value and changes the gradient, as quantization and adversarial training do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 4


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky relu": partial(F.leaky_relu, negative_slope=0.1),
    "abs": torch.abs,
    "clamp": partial(torch.clamp, min=-0.5, max=0.7),
    "scale": lambda x: 2.5 * x,
    "shift": lambda x: 1 - x,
    "clone": torch.clone,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
    "square": torch.square,
    "sine": torch.sin,
    "power": lambda x: x**3 / 3,
    "masked": lambda x: x.masked_fill(x > 0.6, 0.1),
    "rounded": lambda x: x + (x.round() - x).detach(),
    "error function": torch.erf,
    "quarter of the gradient": Quarter.apply,
}
STRAIGHT = {"relu", "leaky relu", "abs", "clamp", "scale", "shift", "clone"}
"""Functions that are linear almost everywhere."""
REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "maximum": torch.amax,
    "first": lambda x, axis: x.select(axis, 0),
    "last of pieces": lambda x, axis: x.unbind(axis)[-1],
    "logarithm of a sum": torch.logsumexp,
    "spread": lambda x, axis: x.var(axis, correction=0),
    "median": lambda x, axis: x.median(axis).values,
    "second largest": lambda x, axis: x.topk(min(2, x.shape[axis]), axis).values.select(axis, -1),
}
ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "flip": lambda x, axis: x.flip(axis),
    "softmax": torch.softmax,
    "log softmax": torch.log_softmax,
    "rotated": lambda x, axis: x.roll(1, axis),
    "cumulated": torch.cumsum,
    "centered": lambda x, axis: x - x.mean(axis, keepdim=True),
    "delayed": lambda x, axis: torch.cat([torch.zeros_like(x.narrow(axis, 0, 1)), x.narrow(axis, 0, x.shape[axis] - 1)], axis),
    "sorted": lambda x, axis: x.sort(axis).values,
    "gathered": lambda x, axis: x.gather(axis, x.argsort(axis)),
    "largest so far": lambda x, axis: x.cummax(axis).values,
    "normalized": lambda x, axis: x / (1 + x.square().sum(axis, keepdim=True)).sqrt(),
}
"""Functions along an axis that keep the shape."""


# --- layers -----------------------------------------------------------------------------------------------------------------------------------


class Lookup(Module):
    """An embedding of three classes of numbers."""

    def __init__(self, size: int, padding: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(3, size, padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x > -0.5).long() + (x > 0.5).long())


class Returning(Module):
    """A module that returns more than one tensor, of which the first is used."""

    def __init__(self, module: Module, copies: int) -> None:
        super().__init__()
        self.module, self.copies = module, copies

    def forward(self, x: Tensor) -> Tensor:
        return self.module(*[x] * self.copies)[0]


class Pairs(Module):
    """A Bilinear of a tensor and a function of it."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(size, size, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x.tanh())


class Loop(Module):
    """A cell that is called for each entry of an axis."""

    def __init__(self, kind: str, size: int, axis: int) -> None:
        super().__init__()
        self.cell, self.axis = nn.Linear(size, size) if kind == "Linear" else getattr(nn, kind)(size, size), axis

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unbind(self.axis)
        state = torch.zeros_like(parts[0]).flatten(0, -2)
        states = []
        for part in parts:
            rows = part.flatten(0, -2)
            state = torch.tanh(self.cell(state) + rows) if isinstance(self.cell, Linear) else self.cell(rows, state)
            states.append(state.reshape(part.shape))
        return torch.stack(states, self.axis)


class Places(Module):
    """What is known of the places along an axis: looked up, made by a net of coordinates, or waves, which are scaled by a parameter."""

    def __init__(self, kind: str, length: int, size: int, view: tuple[int, ...], multiplied: bool) -> None:
        super().__init__()
        self.kind, self.length, self.view, self.multiplied = kind, length, view, multiplied
        makers = {"table": lambda: nn.Embedding(length, size), "net": lambda: nn.Sequential(Linear(1, 2), nn.Tanh(), Linear(2, size))}
        self.maker = makers.get(kind, lambda: Linear(size, size))()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.length)
        if self.kind != "table":
            places = places.to(x.dtype).unsqueeze(1)
        if self.kind == "waves":
            places = torch.sin(places * torch.arange(1, self.view[-1] + 1))
        made = self.maker(places).reshape(self.view)
        return x * made if self.multiplied else x + made


class Own(Module):
    """A layer of a user's own, without rule."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.matrix, self.scale = Parameter(randn(size, size)), Parameter(randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix) * self.scale


BY_AXES = {
    "conv": (nn.Conv1d, nn.Conv2d),
    "conv transposed": (nn.ConvTranspose1d, nn.ConvTranspose2d),
    "max pool": (nn.MaxPool1d, nn.MaxPool2d),
    "average pool": (nn.AvgPool1d, nn.AvgPool2d),
    "adaptive pool": (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    "adaptive max pool": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
}
LAYERS: dict[str, Callable[..., Module]] = {
    **{name: lambda axes, *settings, classes=classes, **options: classes[axes - 1](*settings, **options) for name, classes in BY_AXES.items()},
    "layer norm": partial(nn.LayerNorm, eps=0.1),  # of one or two entries, too: not too close to singular
    "group norm": partial(nn.GroupNorm, eps=0.1),
    "batch norm": lambda axes, channels: (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[axes](channels),
    "lookup": Lookup,
    "attention layer": lambda *settings, **options: Returning(nn.MultiheadAttention(*settings, **options), 3),
    "recurrent": lambda name, *settings, **options: Returning(getattr(nn, name)(*settings, **options), 1),
    "pairs": Pairs,
    "own": Own,
    "loop": Loop,
    "places": Places,
    "weight normalization": lambda *settings: nn.utils.parametrizations.weight_norm(Linear(*settings)),
}
"""Makes layers from their settings."""
POOLS = {"max pool", "average pool", "adaptive pool", "adaptive max pool"}
FRONT = {"conv", "conv transposed", "functional conv", "group norm", "batch norm", *POOLS}
"""Layers that want the samples on axis 0."""
SEQUENCES = {"attention layer", "recurrent"}
GROWING = {"conv", "conv transposed", "functional conv", "lookup", "recurrent", "pairs", "weight normalization"}
INNER = {"loop", "places"}
"""Layers that want an axis between."""


def possible_layers(at: At) -> list[str]:
    """Name the layers that fit to a tensor."""
    axes = len(at.shape) - 2
    names = [name for name in LAYERS if name not in FRONT | SEQUENCES | INNER and at.axis != axes + 1]
    names += sorted(INNER) * (len(at.shape) > 2 and at.axis != axes + 1)
    if at.axis == 0:
        names += [*["conv"] * 3, *FRONT] if axes in (1, 2) else ["group norm"] + ["batch norm"] * (axes == 0)
    if axes == 1 and at.axis < 2:
        names += sorted(SEQUENCES)
    many = {"weight normalization": at.size, "group norm": prod(at.shape)}
    return [name for name in names if (name not in GROWING or prod(at.shape) <= 16) and many.get(name, 2) > 1]  # of one entry, a norm keeps nothing


def draw_layer(draw: st.DrawFn, at: At, name: str) -> Step:
    """Draw the settings of a layer."""
    axes, size, sizes, flags = len(at.shape) - 2, at.size, st.integers(1, 2), st.booleans()
    match name:
        case "conv" | "conv transposed" | "functional conv":
            channels, least = at.shape[1], min(at.shape[2:])
            groups = draw(st.sampled_from([1, channels]))
            out, stride, bias, dilation = groups * draw(sizes), draw(sizes), draw(flags), draw(sizes)
            padding = draw(st.integers(0, 1)) if name != "conv transposed" else 0
            kernel = draw(st.integers(1, 3 if axes == 1 else 2))
            kernel = kernel if name == "conv transposed" or dilation * (kernel - 1) < least + 2 * padding else 1
            options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
            return axes, channels, out, kernel, *sorted(options.items())
        case "max pool" | "average pool":
            kernel = draw(st.integers(1, min(2, *at.shape[2:])))
            return axes, kernel, ("padding", draw(st.integers(0, kernel // 2))), ("stride", draw(sizes))
        case "adaptive pool" | "adaptive max pool":
            return axes, draw(sizes)
        case "layer norm":
            return (at.shape[draw(st.integers(at.axis + 1, len(at.shape) - 1)) :],)
        case "group norm":
            return draw(st.sampled_from([groups for groups in (1, at.shape[1]) if groups < prod(at.shape)])), at.shape[1]
        case "batch norm":
            return axes, at.shape[1]
        case "lookup":
            return draw(sizes), draw(st.sampled_from([None, None, 1]))
        case "attention layer":
            return size, draw(st.sampled_from([1, size])), ("batch_first", at.axis == 0), ("bias", draw(flags))
        case "recurrent":
            kind = draw(st.sampled_from(["GRU", "LSTM", "RNN"]))
            return kind, size, draw(sizes), ("batch_first", at.axis == 0), ("bidirectional", draw(flags)), ("num_layers", draw(sizes))
        case "pairs" | "weight normalization":
            return size, draw(sizes)
        case "loop" | "places":
            axis = draw(st.sampled_from(at.others[:-1]))
            if name == "loop":
                return draw(st.sampled_from(["Linear", "GRUCell", "RNNCell"])), size, axis
            view = tuple(length if i in (axis, axes + 1) else 1 for i, length in enumerate(at.shape))
            return draw(st.sampled_from(["table", "table", "net", "waves"])), at.shape[axis], size, view, draw(flags)
    return (size,)


def make_layer(name: str, *settings: Any) -> Module:
    """Make a layer; settings with a name come last."""
    options = {one[0]: one[1] for one in settings if isinstance(one, tuple) and one and isinstance(one[0], str)}
    layer = LAYERS[name](*settings[: len(settings) - len(options)], **options)
    return spread(layer) if "norm" in name else layer


def shape_after(name: str, settings: Step, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Find out which shape a layer returns."""
    with torch.random.fork_rng(), torch.no_grad():
        return tuple(make_layer("conv" if name == "functional conv" else name, *settings)(torch.zeros(shape)).shape)


# --- models -----------------------------------------------------------------------------------------------------------------------------------


class Net(Module):
    """Interprets steps; ``checkpoints`` says whether parts under a checkpoint are run twice."""

    checkpoints = True

    def __init__(self, steps: Steps, heads: tuple[Step, ...]) -> None:
        super().__init__()
        self.linears, self.others, self.bare, self.layers = nn.ModuleList(), nn.ModuleList(), nn.ParameterList(), nn.ModuleList()
        self.steps = self._chain(steps)
        self.heads = [self._make(head) for head in heads]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.steps(x.clone())  # operations in place must not reach the data
        return tuple(head(h) for head in self.heads)

    def _chain(self, steps: Steps) -> Callable[[Tensor], Tensor]:
        functions = [self._make(step) for step in steps]

        def apply(x: Tensor) -> Tensor:
            for function in functions:
                x = function(x)
            return x

        return apply

    def _linear(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        self.linears.append(linear)
        return linear

    def _other(self, module: Module) -> Callable[[Tensor], Tensor]:
        self.others.append(module)
        return partial(self._call, len(self.others) - 1)

    def _call(self, number: int, x: Tensor) -> Tensor:
        return self.others[number](x)  # looked up at each call: the oracle exchanges modules

    def _make(self, step: Step) -> Callable[[Tensor], Tensor]:
        match step:
            case ("linear", size, out, bias, frozen):
                return self._linear(Linear(size, out, bias).requires_grad_(not frozen))
            case ("used again", number):
                return self.linears[number]
            case ("tied", number):
                linear = Linear(*reversed(self.linears[number].weight.shape))
                linear.weight = self.linears[number].weight
                return self._linear(linear)
            case ("transposed", number):
                return lambda x: F.linear(x, self.linears[number].weight.t())
            case ("activation", name):
                return self._other(ACTIVATIONS[name]().eval())
            case ("function", name):
                return FUNCTIONS[name]
            case ("along", name, axis):
                return lambda x: ALONG[name](x, axis)
            case ("dropout", training):
                return self._other(nn.Dropout(0.4).train(training))
            case ("functional conv", *settings):
                return self._convolution(LAYERS["conv"](*settings[:4], **dict(settings[4:])))
            case ("layer", name, *settings):
                self.layers.append(make_layer(name, *settings))
                return partial(self._call_layer, len(self.layers) - 1)
            case ("again", number):
                return partial(self._call_layer, number)
            case ("functional linear", size, out, biased):
                weight, bias = Parameter(randn(out, size)), Parameter(randn(out)) if biased else None
                self.bare.extend([weight] if bias is None else [weight, bias])
                return lambda x: F.linear(x, weight, bias)
            case ("matrix on the left", size, out):
                self.bare.append(matrix := Parameter(randn(out, size)))
                return lambda x: matrix @ x
            case ("einsum", size, out):
                self.bare.append(matrix := Parameter(randn(out, size)))
                return lambda x: torch.einsum("...i,oi->...o", x, matrix)
            case ("flatten",):
                return self._other(nn.Flatten())
            case ("unflatten", axis, sizes):
                return self._other(nn.Unflatten(axis, sizes))
            case ("reshape", axis, sizes):
                return lambda x: x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
            case ("new axis", axis, size):
                return lambda x: x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
            case ("repeat", axis):
                return lambda x: torch.cat([x, x], axis)
            case ("permute", axes):
                return lambda x: x.permute(axes)
            case ("reduce", name, axis):
                return lambda x: REDUCTIONS[name](x, axis)
            case ("slice", axis, start, stop):
                return lambda x: x.narrow(axis, start, stop - start)
            case ("folded", size, out):
                layer = self._linear(Linear(size, out))
                return lambda x: torch.relu(layer(x.reshape(-1, size))).view(*x.shape[:-1], out)
            case ("overwritten slice", size):
                return partial(_overwrite, self._linear(Linear(size, size)))
            case ("halves", axis):
                return lambda x: _product_of_halves(x, axis)
            case ("attention",):
                return lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x
            case ("fused attention", causal):
                return lambda x: F.scaled_dot_product_attention(x, x.tanh(), x, is_causal=causal)
            case ("outer",):
                return lambda x: torch.einsum("...i,...j->...ij", x, x.tanh())
            case ("token", axis, shape):
                return partial(_prepend, self._parameter(randn(shape)), axis)
            case ("contract", steps):
                branch = self._chain(steps)
                return lambda x: torch.einsum("...i,...i->...", x, branch(x))
            case ("checkpoint", steps):
                branch = self._chain(steps)
                return lambda x: checkpoint(branch, x, use_reentrant=False) if self.checkpoints else branch(x)
            case ("mixed", how, axis, steps):
                branch = self._chain(steps)
                return lambda x: MIXED[how](x, branch(x), axis)
            case ("derivative", steps):
                return partial(_derivative, self._chain(steps))
            case ("bare", how, shape):
                return partial(self._bare, len(self.bare.append(Parameter(randn(shape) + 0.5))) - 1, how)
            case ("matrix", size, out):
                return partial(self._bare, len(self.bare.append(Parameter(randn(size, out)))) - 1, "matrix")
            case ("residual" | "product" | "choice" | "detached" as how, steps):
                branch = self._chain(steps)
                return lambda x: _unite(how, x, branch(x))
            case ("residual in place", size, steps):
                layer, branch = self._linear(Linear(size, size)), self._chain(steps)
                return lambda x: _add_in_place(layer(x), branch)
            case ("cat", axis, steps):
                branch = self._chain(steps)
                return lambda x: torch.cat([x, branch(x)], axis)
            case ("fit", old_axis, size, new_axis, shape):
                if old_axis == new_axis == 0:
                    flat, layer, end = self._other(nn.Flatten()), self._linear(Linear(size, prod(shape))), self._other(nn.Unflatten(1, shape))
                    return lambda x: end(layer(flat(x)))
                layer = self._linear(Linear(size, prod(shape)))
                return lambda x: layer(x.movedim(old_axis, 0).flatten(1)).unflatten(1, shape).movedim(0, new_axis)
        raise AssertionError(step)

    def _parameter(self, value: Tensor) -> Parameter:
        self.bare.append(parameter := Parameter(value))
        return parameter

    def _call_layer(self, number: int, x: Tensor) -> Tensor:
        return self.layers[number](x)

    def _convolution(self, layer: nn.Conv1d | nn.Conv2d) -> Callable[[Tensor], Tensor]:
        """Take over the parameters of a convolution."""
        self.bare.extend(layer.parameters())
        options = (layer.stride, layer.padding, layer.dilation, layer.groups)
        function = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
        weight, bias = layer.weight, layer.bias
        return lambda x: function(x, weight, bias, *options)

    def _bare(self, number: int, how: str, x: Tensor) -> Tensor:
        parameter = self.bare[number]
        match how:
            case "add":
                return x + parameter
            case "add in place":
                return x.clone().add_(parameter)
            case "add expanded":
                return x + parameter.expand(x.shape)
            case "multiply":
                return parameter * x
            case "divide":
                return x / (parameter.square() + 1)
            case "shrink":
                return x * torch.sigmoid(parameter)
        return x @ parameter


def _overwrite(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    h = layer(x)
    h[..., :1] *= 2.5
    return F.relu_(h)


def _product_of_halves(x: Tensor, axis: int) -> Tensor:
    a, b = x.chunk(2, axis)
    return torch.cat([a * torch.sigmoid(b), b], axis)


def _add_in_place(h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    h += branch(torch.tanh(h))
    return h


def _prepend(token: Tensor, axis: int, x: Tensor) -> Tensor:
    return torch.cat([token.expand(x.narrow(axis, 0, 1).shape), x], axis)


def _derivative(branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()
    with torch.enable_grad():
        energy = (x + branch(x.clone())).square().sum() / 8
    return torch.autograd.grad(energy, x, create_graph=True)[0]


MIXED: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "mean": lambda x, y, axis: x + y.mean(axis, keepdim=True),
    "sum": lambda x, y, axis: x * y.sum(axis, keepdim=True),
    "largest": lambda x, y, axis: x - y.amax(axis, keepdim=True),
    "first": lambda x, y, axis: x + y.narrow(axis, 0, 1),
    "flipped": lambda x, y, axis: x * y.flip(axis),
    "rolled": lambda x, y, axis: x + y.roll(1, axis),
    "sorted": lambda x, y, axis: x + y.sort(axis).values,
    "cumulated": lambda x, y, axis: x + y.cumsum(axis),
    "softmax": lambda x, y, axis: x * y.softmax(axis),
    "standardized": lambda x, y, axis: x + (y - y.mean(axis, keepdim=True)) / (1 + y.var(axis, correction=0, keepdim=True)),
    "matrix": lambda x, y, axis: _by_matrix(x.movedim(axis, 0), y.movedim(axis, 0)).movedim(0, axis),
}
"""Functions by which samples meet."""


def _by_matrix(x: Tensor, y: Tensor) -> Tensor:
    return ((x.flatten(1) @ y.flatten(1).T) @ x.flatten(1)).view(x.shape)


def _unite(how: str, x: Tensor, y: Tensor) -> Tensor:
    match how:
        case "residual":
            return x + y
        case "product":
            return x * y
        case "choice":
            return torch.where(x > 0, x, y)
    return x + y.detach()


BRANCHES = {"mixed", "residual", "product", "choice", "detached", "residual in place", "cat", "contract", "checkpoint", "derivative"}


def names_in(drawn: Drawn) -> set[str]:
    """Name what occurs in a problem."""
    return set(kinds(drawn[3])) | ({"derivative"} if drawn[6] == "derived" else set())


def kinds(steps: Steps) -> Iterator[str]:
    """Name what occurs in a model, branches included."""
    for step in steps:
        match step:
            case ("layer", "places", *settings):
                yield f"places, {settings[0]}"
            case ("function" | "layer" | "along", name, *_) | ("reduce", "spread" | "logarithm of a sum" as name, _):
                yield name
            case ("activation" | "bare" as what, name, *_):
                yield f"{what}, {name}"
            case (name, *_):
                yield name
        if step[0] in BRANCHES:
            yield from kinds(step[-1])


# --- drawing them -----------------------------------------------------------------------------------------------------------------------------


SEQUENCE = -1
"""Depth of a model that is a sequence of modules."""


@dataclass
class At:
    """What is known while a model is drawn: shape of the tensor, where its samples lie, sizes of the linear layers, and of the other ones.

    The shape has 1 instead of the number of samples; ``mixes`` says whether samples may meet.
    """

    shape: tuple[int, ...]
    axis: int
    linears: list[tuple[int, int]]
    layers: list[tuple[tuple[int, ...], int, tuple[int, ...]]]
    mixes: bool = False

    @property
    def others(self) -> list[int]:
        return [i for i in range(len(self.shape)) if i != self.axis]

    @property
    def size(self) -> int:
        return self.shape[-1]


def options(at: At, depth: int) -> list[str]:
    """Name the steps that are possible; of a sequence only modules."""
    if depth == SEQUENCE:
        chain = ["batch norm", "conv", "conv", "conv transposed", "group norm", "layer norm", *POOLS]
        layers = [name for name in possible_layers(at) if name in chain]
        return sorted([*["linear", "activation"] * 2, *["flatten", "unflatten"] * (len(at.shape) > 2), *layers])
    names = ["activation", "activation", "function", "function", "dropout", "permute", "along", "along", "slice", "new axis", "bare", "bare"]
    if at.axis != len(at.shape) - 1:
        names += ["linear", "linear", "linear", "matrix", "reshape", "overwritten slice", "folded", "unflatten", "functional linear", "einsum"]
        names += ["matrix on the left"] * (at.axis < len(at.shape) - 2)
        names += ["used again"] * 2 * any(i == at.size for i, _ in at.linears)
        names += ["tied"] * any(i == at.size for i, _ in at.linears)
        names += ["transposed"] * any(o == at.size for _, o in at.linears)
    if prod(at.shape) <= 8:
        names += ["repeat", "token"] + ["cat"] * (depth > 0)
        names += ["outer"] * (at.axis != len(at.shape) - 1)
    if len(at.shape) > 2:
        names += ["reduce", "reduce"] + ["flatten"] * (at.axis == 0) + ["attention", "fused attention"] * (at.axis == 0 and len(at.shape) == 3)
    if any(at.shape[i] % 2 == 0 for i in at.others):
        names += ["halves"]
    names += possible_layers(at) + ["again"] * 2 * any(layer[:2] == (at.shape, at.axis) for layer in at.layers)
    if depth:
        names += ["contract"] * (len(at.shape) > 2 and at.axis != len(at.shape) - 1)
        names += ["residual", "residual", "product", "choice", "detached", "checkpoint", "derivative"]
        names += ["mixed"] * 4 * at.mixes
        names += ["residual in place"] * (at.axis != len(at.shape) - 1)
    return sorted(names)


def draw_step(draw: st.DrawFn, at: At, depth: int) -> Step:
    """Draw one step, and note what it does to the tensor."""
    name = draw(st.sampled_from(options(at, depth)))
    axis = draw(st.sampled_from(at.others))
    shape = list(at.shape)
    sizes = st.integers(1, 3)
    match name:
        case "linear":
            step = (name, at.size, draw(sizes), draw(st.booleans()), draw(st.sampled_from([False, False, False, True])))
            at.linears.append(step[1:3])
            shape[-1] = step[2]
        case "used again" | "tied":
            number = draw(st.sampled_from([k for k, (i, _) in enumerate(at.linears) if i == at.size]))
            step = (name, number)
            shape[-1] = at.linears[number][1]
            if name == "tied":
                at.linears.append(at.linears[number])
        case "transposed":
            step = (name, draw(st.sampled_from([k for k, (_, o) in enumerate(at.linears) if o == at.size])))
            shape[-1] = at.linears[step[1]][0]
        case "activation":
            step = (name, draw(st.sampled_from(MODULES)))
            if "Softmax" in step[1] and at.axis == len(shape) - 1:
                step = ("along", "softmax", axis)
        case "function":
            step = (name, draw(st.sampled_from(sorted(FUNCTIONS))))
        case "along":
            step = (name, draw(st.sampled_from(sorted(ALONG))), axis)
        case "dropout":
            step = (name, draw(st.booleans()))
        case "functional conv":
            step = (name, *draw_layer(draw, at, name))
            shape = shape_after(name, step[1:], at.shape)
        case "again":
            step = (name, draw(st.sampled_from([k for k, layer in enumerate(at.layers) if layer[:2] == (at.shape, at.axis)])))
            shape = at.layers[step[1]][2]
        case _ if name in LAYERS:
            settings = draw_layer(draw, at, name)
            step = ("layer", name, *settings)
            shape = shape_after(name, settings, at.shape)
            at.layers.append((at.shape, at.axis, shape))
        case "functional linear":
            step = (name, at.size, draw(sizes), draw(st.booleans()))
            shape[-1] = step[2]
        case "matrix on the left":
            step = (name, shape[-2], draw(sizes))
            shape[-2] = step[2]
        case "flatten" | "attention" | "outer":
            step = (name,)
            shape = {"flatten": [1, prod(shape)], "outer": [*shape, at.size]}.get(name, shape)
        case "fused attention":
            step = (name, draw(st.booleans()))
        case "token":
            step = (name, axis, tuple(1 if i in (axis, at.axis) else length for i, length in enumerate(shape)))
            shape[axis] += 1
        case "contract":
            step = (name, draw_branch(draw, at, depth))
            del shape[-1]
        case "unflatten" | "reshape":
            factor = draw(st.sampled_from([f for f in (1, 2, 3) if at.shape[axis] % f == 0]))
            step = (name, axis, (factor, at.shape[axis] // factor))
            shape[axis : axis + 1] = step[2]
        case "new axis":
            where = draw(st.integers(0, len(shape)))
            step = (name, where, draw(st.integers(1, 2)))
            shape.insert(where, step[2])
        case "repeat":
            step = (name, axis)
            shape[axis] *= 2
        case "permute":
            step = (name, tuple(draw(st.permutations(range(len(shape))))))
            shape = [at.shape[i] for i in step[1]]
        case "reduce":
            step = (name, draw(st.sampled_from(sorted(REDUCTIONS))), axis)
            del shape[axis]
        case "slice":
            stop = draw(st.integers(1, at.shape[axis]))
            step = (name, axis, draw(st.integers(0, stop - 1)), stop)
            shape[axis] = stop - step[2]
        case "folded":
            step = (name, at.size, draw(sizes))
            at.linears.append(step[1:])
            shape[-1] = step[2]
        case "overwritten slice":
            step = (name, at.size)
            at.linears.append((at.size, at.size))
        case "halves":
            step = (name, draw(st.sampled_from([i for i in at.others if at.shape[i] % 2 == 0])))
        case "bare":
            kept = [size if draw(st.booleans()) else 1 for size in at.shape]
            start = draw(st.integers(0, max(i for i, size in enumerate([2, *kept]) if size > 1)))  # leading ones may be missing
            how = draw(st.sampled_from(["add", "add", "add in place", "add expanded", "multiply", "multiply", "divide", "shrink"]))
            step = (name, how, tuple(kept[start:]))
        case "matrix" | "einsum":
            step = (name, at.size, draw(sizes))
            shape[-1] = step[2]
        case "residual in place":
            at.linears.append((at.size, at.size))
            step = (name, at.size, draw_branch(draw, at, depth))
        case "mixed":
            step = (name, draw(st.sampled_from(sorted(MIXED))), at.axis, draw_branch(draw, at, depth))
        case "cat":
            step = (name, axis, draw_branch(draw, at, depth))
            shape[axis] *= 2
        case _:
            step = (name, draw_branch(draw, at, depth))
    at.axis = new_axis(step, at)
    at.shape = tuple(shape)
    return step


def new_axis(step: Step, at: At) -> int:
    """Say where the samples lie after a step, if they lay at ``at.axis`` before."""
    match step:
        case ("new axis", where, _):
            return at.axis + (where <= at.axis)
        case ("permute", axes):
            return axes.index(at.axis)
        case ("reduce", _, axis):
            return at.axis - (axis < at.axis)
        case ("unflatten" | "reshape", axis, sizes):
            return at.axis + (len(sizes) - 1) * (axis < at.axis)
    return at.axis


def draw_branch(draw: st.DrawFn, at: At, depth: int) -> Steps:
    """Draw steps that end with the shape they began with."""
    inner = At(at.shape, at.axis, at.linears, at.layers, at.mixes)
    steps = draw_steps(draw, inner, 2, depth - 1)
    if inner.shape != at.shape or inner.axis != at.axis:
        steps += (fit(inner, at.axis, tuple(at.shape[i] for i in at.others)),)
    return steps


def draw_steps(draw: st.DrawFn, at: At, most: int, depth: int) -> Steps:
    """Draw some steps."""
    return tuple(draw_step(draw, at, depth) for _ in range(draw(st.integers(0, most))))


def fit(at: At, axis: int, shape: tuple[int, ...]) -> Step:
    """Bring a tensor into a shape, with samples on an axis."""
    at.linears.append((prod(at.shape), prod(shape)))
    return ("fit", at.axis, prod(at.shape), axis, shape)


@st.composite
def losses(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draw settings of a loss on outputs of a shape."""
    kind = draw(st.sampled_from(["MSE", "CE", "BCE"]))
    reduction = draw(st.sampled_from(["mean", "mean", "sum", "none"]))
    flags = tuple(draw(st.booleans()) for _ in range(4))
    return (kind, shape, reduction, flags, draw(st.sampled_from([1.0, 1.0, 0.3, 2.0])))


def make_term(head: int, N: int, kind: str, shape: tuple[int, ...], reduction: str, flags: tuple[bool, ...], scale: float) -> Term:
    """Build a loss with its target; the flags switch its options on."""
    weighted, smoothed, soft, ignored = flags
    if kind == "MSE":
        module, target, weights = MSELoss(reduction=reduction), randn(N, *shape), (N, *shape)
    elif kind == "BCE":
        weight = torch.rand(shape[-1]) + 0.1 if weighted else None
        pos_weight = torch.rand(shape[-1]) + 0.1 if smoothed else None
        module, target, weights = BCEWithLogitsLoss(weight, pos_weight=pos_weight, reduction=reduction), torch.rand(N, *shape), (N, *shape)
    else:
        weight = torch.rand(shape[0]) + 0.1 if weighted else None
        weights = (N, *shape[1:])
        module = CrossEntropyLoss(weight, label_smoothing=0.2 * smoothed, reduction=reduction)
        target = randn(N, *shape).softmax(1) if soft else torch.randint(shape[0], weights)
        if ignored and not soft and target.numel() > 1:
            target.view(-1)[-1] = -100
    return Term(module, target, head, torch.rand(weights) + 0.2 if reduction == "none" else scale)


Drawn = tuple[int, int, tuple[int, ...], Steps, tuple[Step, ...], tuple[tuple[Any, ...], ...], str]


@st.composite
def nets(draw: st.DrawFn, batches: tuple[int, ...] = (1, 2, 3), mixing: bool = False) -> Drawn:
    """Draw everything about a problem: seed, batch size, shape of the input, steps, heads, losses, what these are given.

    In a sixth of the models, if asked, samples may meet.
    """
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2) | st.tuples(*[st.integers(1, 2), *[st.integers(2, 4)] * 2])))
    at = At((1, *shape), 0, [], [], mixing and draw(st.integers(0, 5)) == 0)
    depth = draw(st.sampled_from([2, 2, 2, SEQUENCE]))
    steps = draw_steps(draw, at, 6, depth)
    count, ends = draw(
        st.sampled_from([(1, "one"), *[(1, "one"), (1, "twice"), (2, "each"), (2, "joined"), (2, "stacked"), (1, "derived")] * (depth != SEQUENCE)])
    )
    out = [tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))) for _ in range(count)]
    if ends in ("joined", "stacked"):
        out = out[:1] * 2
    heads = tuple(fit(at, 0, one) for one in out)
    first = out[0]
    out = {"twice": out * 2, "joined": [(2 * first[0], *first[1:])], "stacked": [(2, *first)], "derived": [shape]}.get(ends, out)
    return draw(st.integers(0, 99)), draw(st.sampled_from(batches)), shape, steps, heads, tuple(draw(losses(one)) for one in out), ends


def join(how: Callable[..., Tensor], model: Module, x: Tensor) -> Tensor:
    """Make one tensor of the outputs of two heads, for one loss."""
    return how(model(x), 1)


def derive(model: Module, x: Tensor) -> Tensor:
    """Differentiate the output of a model with respect to its input, behind it."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x)[0].square().sum() / 2, x, create_graph=True, materialize_grads=True)[0]


def build(drawn: Drawn) -> Problem:
    """Build what was drawn, the same at every call."""
    seed, N, shape, steps, heads, terms, ends = drawn
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.default_generator.manual_seed(seed)
        x = randn(N, *shape)
        built = [make_term(min(head, len(heads) - 1), N, *term) for head, term in enumerate(terms)]
        output = {"joined": partial(join, torch.cat), "stacked": partial(join, torch.stack), "derived": derive}.get(ends, call_model)
        return Problem(Net(steps, heads), x, built, output)


def without_checkpoints(problem: Problem) -> Problem:
    """Let everything be run once: torch does not notice there that something is overwritten which it needs, and the oracle changes the graph."""
    problem.model.checkpoints = False
    return problem
