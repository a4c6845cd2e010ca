"""Rows of the table of cases: fully-connected nets, activations, losses, graphs. Other families of layers have files of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from oracle import Problem, Term
from table import add, bits, classify, labels, regress
from torch import Tensor, cat, nn, rand, randn
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, Flatten, Linear, Module, MSELoss, Parameter, Sequential, Tanh, Unflatten
from torch.nn import functional as F

# --- layers -----------------------------------------------------------------------------------------------------------------------------------


def frozen(module: Module) -> Module:
    """Freeze all parameters.

    Args:
        module: Module.

    Returns:
        The same module.
    """
    return module.requires_grad_(False)


def frozen_weight(module: Linear) -> Linear:
    """Freeze the weight only.

    Args:
        module: Module.

    Returns:
        The same module.
    """
    module.weight.requires_grad_(False)
    return module


def nested() -> Sequential:
    """Put containers into one another."""
    return Sequential(Sequential(Sequential(Linear(3, 3)), Tanh()), Sequential(Linear(3, 2), Sequential(nn.Sigmoid(), Linear(2, 4))))


def twice() -> Sequential:
    """Use one Linear twice in a sequence."""
    linear = Linear(3, 3)
    return Sequential(linear, Tanh(), linear, Tanh(), Linear(3, 4))


add("logreg", lambda N: classify(Linear(3, 4), randn(N, 3)), "chain")
add("logreg, no bias", lambda N: classify(Sequential(Linear(3, 4, bias=False)), randn(N, 3)), "chain")
add("logreg, frozen weight", lambda N: classify(Sequential(frozen_weight(Linear(3, 4))), randn(N, 3)), "chain")
add("frozen first layer", lambda N: classify(Sequential(frozen(Linear(3, 3)), Tanh(), Linear(3, 4)), randn(N, 3)), "chain")
add("frozen middle layer", lambda N: classify(Sequential(Linear(3, 3), Tanh(), frozen(Linear(3, 2)), Tanh(), Linear(2, 4)), randn(N, 3)), "chain")
add("frozen middle weight", lambda N: classify(Sequential(Linear(3, 3), Tanh(), frozen_weight(Linear(3, 4))), randn(N, 3)), "chain")
add("one output", lambda N: regress(Sequential(Linear(3, 2), nn.Sigmoid(), Linear(2, 1)), randn(N, 3)), "chain")
add("extra axis", lambda N: regress(Sequential(Linear(3, 2), nn.Sigmoid(), Linear(2, 2)), randn(N, 2, 3)), "chain", "extra axes")
add("two extra axes", lambda N: regress(Sequential(Linear(3, 2), Tanh(), Linear(2, 1, bias=False)), randn(N, 2, 3, 3)), "chain", "extra axes")
add("extra axis, flattened", lambda N: classify(Sequential(Linear(3, 2), Tanh(), Flatten(), Linear(4, 4)), randn(N, 2, 3)), "chain", "extra axes")
add("flatten", lambda N: classify(Sequential(Flatten(), Linear(6, 3), Tanh(), Linear(3, 4)), randn(N, 2, 3)), "chain")
add(
    "unflatten",
    lambda N: regress(Sequential(Linear(3, 4), Tanh(), Unflatten(1, (2, 2)), Linear(2, 2), Tanh(), Flatten(1)), randn(N, 3)),
    "chain",
    "extra axes",
)
add("identity", lambda N: classify(Sequential(nn.Identity(), Linear(3, 3), nn.Identity(), Tanh(), nn.Identity(), Linear(3, 4)), randn(N, 3)), "chain")
add("dropout, evaluation", lambda N: classify(Sequential(Linear(3, 4), nn.Dropout(), Tanh(), Linear(4, 4)).eval(), randn(N, 3)), "chain")
add("dropout, training", lambda N: classify(Sequential(Linear(3, 5), Tanh(), nn.Dropout(0.3), Linear(5, 4)), randn(N, 3)), "chain")
add(
    "dropout in place",
    lambda N: classify(Sequential(Linear(3, 5), nn.Sigmoid(), Linear(5, 5), nn.Dropout(0.3, inplace=True), Linear(5, 4)), randn(N, 3)),
    "chain",
)
add("nested containers", lambda N: classify(nested(), randn(N, 3)), "chain")
add("non-contiguous input", lambda N: classify(Sequential(Linear(3, 3), Tanh(), Linear(3, 4)), randn(3, N).T), "chain")
add(
    "non-contiguous extra axes",
    lambda N: regress(Sequential(Linear(3, 2), Tanh(), Linear(2, 2)), randn(3, 2, N).permute(2, 1, 0)),
    "chain",
    "extra axes",
)
add(
    "flatten, then in place",
    lambda N: classify(Sequential(Linear(3, 2), Flatten(), nn.SiLU(inplace=True), Linear(4, 4)), randn(N, 2, 3)),
    "chain",
    "extra axes",
)
add("linear twice, in sequence", lambda N: classify(twice(), randn(N, 3)), "chain", "reused", "nested")

ACTIVATIONS: dict[str, Callable[[], Module]] = {
    "ReLU": nn.ReLU,
    "LeakyReLU": partial(nn.LeakyReLU, 0.2),
    "PReLU, 1 parameter": nn.PReLU,
    "PReLU, C parameters": partial(nn.PReLU, 3, 0.4),
    "PReLU, frozen": lambda: frozen(nn.PReLU()),
    "RReLU": partial(nn.RReLU, 0.1, 0.4),
    "ReLU6": nn.ReLU6,
    "ELU": partial(nn.ELU, 1.3),
    "CELU": partial(nn.CELU, 0.5),
    "SELU": nn.SELU,
    "GELU": nn.GELU,
    "GELU, tanh": partial(nn.GELU, "tanh"),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Softplus": nn.Softplus,
    "Softplus, beta 2": partial(nn.Softplus, 2.0, 6.0),
    "Softsign": nn.Softsign,
    "Sigmoid": nn.Sigmoid,
    "LogSigmoid": nn.LogSigmoid,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Hardtanh": partial(nn.Hardtanh, -1.5, 2.0),
    "Tanh": Tanh,
    "Tanhshrink": nn.Tanhshrink,
    "Softshrink": nn.Softshrink,
    "Hardshrink": nn.Hardshrink,
    "Threshold": partial(nn.Threshold, 0.1, 0.7),
    "Softmax": partial(nn.Softmax, 1),
    "Softmax, last axis": partial(nn.Softmax, -1),
    "LogSoftmax": partial(nn.LogSoftmax, 1),
    "ReLU, in place": partial(nn.ReLU, inplace=True),
    "LeakyReLU, in place": partial(nn.LeakyReLU, 0.2, inplace=True),
    "RReLU, in place": partial(nn.RReLU, 0.1, 0.4, inplace=True),
    "ReLU6, in place": partial(nn.ReLU6, inplace=True),
    "ELU, in place": partial(nn.ELU, 1.3, inplace=True),
    "CELU, in place": partial(nn.CELU, 0.5, inplace=True),
    "SELU, in place": partial(nn.SELU, inplace=True),
    "SiLU, in place": partial(nn.SiLU, inplace=True),
    "Mish, in place": partial(nn.Mish, inplace=True),
    "Hardsigmoid, in place": partial(nn.Hardsigmoid, inplace=True),
    "Hardswish, in place": partial(nn.Hardswish, inplace=True),
    "Hardtanh, in place": partial(nn.Hardtanh, -1.5, 2.0, inplace=True),
    "Threshold, in place": partial(nn.Threshold, 0.1, 0.7, inplace=True),
}


def activation(make: Callable[[], Module], N: int) -> Problem:
    """Put an activation between two layers; its input has a spread that reaches all its branches.

    Args:
        make: Makes the activation.
        N: Batch size.

    Returns:
        Problem.
    """
    model = Sequential(Linear(4, 3), make(), Linear(3, 4)).eval()
    return classify(model, 6 * randn(N, 4))


for _name, _make in ACTIVATIONS.items():
    _tags = ["nested", "dense residual"] if "Softmax" in _name else ["other parameters"] if "parameter" in _name else []
    add(_name, partial(activation, _make), "chain", *_tags)

add("in place, extra axis", lambda N: regress(Sequential(Linear(3, 4), nn.ReLU(inplace=True), Linear(4, 2)), randn(N, 2, 3)), "chain", "extra axes")
add(
    "PReLU, extra axis",
    lambda N: regress(Sequential(Linear(3, 4), nn.PReLU(2), Linear(4, 2)), randn(N, 2, 3)),
    "chain",
    "extra axes",
    "other parameters",
)

# --- losses -----------------------------------------------------------------------------------------------------------------------------------


def with_loss(shape: tuple[int, ...], make: Callable[[int], tuple[Module, Tensor]], N: int, scale: Callable[[int], Tensor] | float = 1.0) -> Problem:
    """Put a loss behind a small net.

    Args:
        shape: Shape of the output of one sample.
        make: Makes loss module and target.
        N: Batch size.
        scale: Factor of the loss, or what makes it.

    Returns:
        Problem.
    """
    layers = [Linear(3, 2), nn.Sigmoid(), Linear(2, torch.Size(shape).numel())]
    model = Sequential(*layers, Unflatten(1, shape)) if len(shape) > 1 else Sequential(*layers)
    loss, target = make(N)
    return Problem(model, 2 * randn(N, 3), [Term(loss, target, scale=scale if isinstance(scale, float) else scale(N))])


def ignoring(target: Tensor, ignored: int) -> Tensor:
    """Ignore the last target, unless it is the only one.

    Args:
        target: Classes.
        ignored: Class that is ignored.

    Returns:
        The same tensor, changed, in which the first target is not ignored.
    """
    flat = target.view(-1)
    flat[0] = 0
    if flat.numel() > 1:
        flat[-1] = ignored
    return target


WEIGHTS = (0.3, 1.7, 0.9, 1.1)
LOSSES: dict[str, tuple[tuple[int, ...], Callable[[str, int], tuple[Module, Tensor]]]] = {
    "MSE": ((3,), lambda red, N: (MSELoss(reduction=red), randn(N, 3))),
    "MSE, 3-d": ((2, 3), lambda red, N: (MSELoss(reduction=red), randn(N, 2, 3))),
    "MSE, 4-d": ((2, 1, 2), lambda red, N: (MSELoss(reduction=red), randn(N, 2, 1, 2))),
    "CE": ((4,), lambda red, N: (CrossEntropyLoss(reduction=red), labels(N))),
    "CE, 3-d": ((4, 2), lambda red, N: (CrossEntropyLoss(reduction=red), labels(N, 2))),
    "CE, 4-d": ((4, 2, 1), lambda red, N: (CrossEntropyLoss(reduction=red), labels(N, 2, 1))),
    "CE, weights": ((4,), lambda red, N: (CrossEntropyLoss(torch.tensor(WEIGHTS), reduction=red), labels(N))),
    "CE, weights, 3-d": ((4, 2), lambda red, N: (CrossEntropyLoss(torch.tensor(WEIGHTS), reduction=red), labels(N, 2))),
    "CE, ignored class": ((4,), lambda red, N: (CrossEntropyLoss(ignore_index=1, reduction=red), ignoring(labels(N), 1))),
    "CE, ignored default": ((4,), lambda red, N: (CrossEntropyLoss(reduction=red), ignoring(labels(N), -100))),
    "CE, ignored, 3-d": ((4, 2), lambda red, N: (CrossEntropyLoss(torch.tensor(WEIGHTS), reduction=red), ignoring(labels(N, 2), -100))),
    "CE, smoothing": ((4,), lambda red, N: (CrossEntropyLoss(label_smoothing=0.2, reduction=red), labels(N))),
    "CE, smoothing, weights": (
        (4,),
        lambda red, N: (CrossEntropyLoss(torch.tensor(WEIGHTS), label_smoothing=0.2, reduction=red), labels(N)),
    ),
    "CE, smoothing, ignored": (
        (4, 2),
        lambda red, N: (CrossEntropyLoss(torch.tensor(WEIGHTS), label_smoothing=0.2, reduction=red), ignoring(labels(N, 2), -100)),
    ),
    "CE, probabilities": ((4,), lambda red, N: (CrossEntropyLoss(reduction=red), randn(N, 4).softmax(1))),
    "CE, probabilities, 3-d": ((4, 2), lambda red, N: (CrossEntropyLoss(reduction=red), randn(N, 4, 2).softmax(1))),
    "CE, probabilities, weights": ((4,), lambda red, N: (CrossEntropyLoss(torch.tensor(WEIGHTS), reduction=red), randn(N, 4).softmax(1))),
    "CE, probabilities, smoothing": (
        (4,),
        lambda red, N: (CrossEntropyLoss(torch.tensor(WEIGHTS), label_smoothing=0.2, reduction=red), randn(N, 4).softmax(1)),
    ),
    "CE, not normalized": ((4,), lambda red, N: (CrossEntropyLoss(reduction=red), rand(N, 4) + 0.1)),
    "BCE, one output": ((1,), lambda red, N: (BCEWithLogitsLoss(reduction=red), bits(N, 1))),
    "BCE": ((3,), lambda red, N: (BCEWithLogitsLoss(reduction=red), bits(N, 3))),
    "BCE, 3-d": ((3, 2), lambda red, N: (BCEWithLogitsLoss(reduction=red), bits(N, 3, 2))),
    "BCE, weight": ((3,), lambda red, N: (BCEWithLogitsLoss(rand(3) + 0.1, reduction=red), bits(N, 3))),
    "BCE, sample weight": ((3,), lambda red, N: (BCEWithLogitsLoss(rand(N, 1) + 0.1, reduction=red), bits(N, 3))),
    "BCE, pos_weight": ((3,), lambda red, N: (BCEWithLogitsLoss(pos_weight=rand(3) + 0.1, reduction=red), bits(N, 3))),
    "BCE, both weights": (
        (3,),
        lambda red, N: (BCEWithLogitsLoss(rand(3) + 0.1, pos_weight=rand(3) + 0.1, reduction=red), bits(N, 3)),
    ),
}

for _name, (_shape, _loss) in LOSSES.items():
    for _reduction in ("mean", "sum"):
        add(f"{_name}, {_reduction}", partial(with_loss, _shape, partial(_loss, _reduction)), "chain")
for _name in ("MSE", "CE", "CE, 3-d", "BCE, pos_weight"):
    _shape, _loss = LOSSES[_name]
    add(f"2 * {_name}", partial(with_loss, _shape, partial(_loss, "mean"), scale=2.0), "chain")
    _positions = {"MSE": (1,), "CE": (), "CE, 3-d": (1,), "BCE, pos_weight": (1,)}[_name]
    add(
        f"weighted sum of {_name}",
        partial(with_loss, _shape, partial(_loss, "none"), scale=lambda N, positions=_positions: rand(N, *positions) + 0.2),
        "chain",
        "special loss",
    )

# --- graphs: models that are more than a sequence of modules ------------------------------------------------------------------------------------


class Net(Module):
    """A model given by its parts and a function."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Module | Parameter) -> None:
        """Store the parts under their names.

        Args:
            forward: Function of this object, which has the parts as attributes, and the arguments of the call.
            parts: Modules and parameters.
        """
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Call the function.

        Args:
            args: Passed on.
            kwargs: Passed on.

        Returns:
            What the function returns.
        """
        return self.function(self, *args, **kwargs)


def graph(name: str, forward: Callable, parts: Callable[[], dict], shape: tuple[int, ...], *tags: str, **kwargs: object) -> None:
    """Add a model with a cross-entropy behind it.

    Args:
        name: Name.
        forward: See ``Net``; returns ``[N, 4]``.
        parts: Makes the parts.
        shape: Shape of the input of one sample.
        tags: See the top of this file.
        kwargs: Passed to ``Problem``.
    """
    add(name, lambda N: classify(Net(forward, **parts()), 2 * randn(N, *shape), **kwargs), "graph", *tags)


def layers(*sizes: int, **other: Callable[[], Module | Parameter]) -> Callable[[], dict]:
    """Say which parts a model has.

    Args:
        sizes: Features; the Linear layers in between are called ``a``, ``b``, ``c``, ...
        other: Makes further parts.

    Returns:
        Makes the parts.
    """

    def make() -> dict:
        parts = {letter: Linear(i, o) for letter, i, o in zip("abcdef", sizes[:-1], sizes[1:], strict=False)}
        return parts | {name: make_part() for name, make_part in other.items()}

    return make


def parameter(*shape: int) -> Callable[[], Parameter]:
    """Say which shape a bare parameter has.

    Args:
        shape: Shape.

    Returns:
        Makes the parameter.
    """
    return lambda: Parameter(randn(shape) + 0.5)


class Cube(torch.autograd.Function):
    """A custom function: the third power."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:  # noqa: D102
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class Quadratic(Module):
    """A layer of the user's own, with parameters and without a rule."""

    def __init__(self) -> None:
        """Draw the parameters."""
        super().__init__()
        self.linear_term = Parameter(randn(3, 3))
        self.square_term = Parameter(randn(3))

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate.

        Args:
            x: ``[*, 3]``.

        Returns:
            ``[*, 3]``.
        """
        return x @ self.linear_term + self.square_term**2 * x**2


class Square(Module):
    """A module of the user's own, without parameters and without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate.

        Args:
            x: Any tensor.

        Returns:
            Its square.
        """
        return x**2


def residual(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    return net.c(h + net.tanh(net.b(h)))


def inplace_add(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    h += net.b(net.tanh(h))
    return net.c(h)


def inplace_add_positions(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    h += net.b(net.tanh(h))
    return net.c(h).mean(1)


def inplace_slice(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.a(x)
    h[:, :2] *= 2.5
    h[:, 2] = 0
    return net.b(F.relu_(h))


def dense(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = cat([x, net.tanh(net.a(x))], dim=1)
    return net.out(cat([h, net.sigmoid(net.b(h))], dim=1))


def gated(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    value, gate = net.a(x).chunk(2, dim=1)
    return net.b(value * torch.sigmoid(gate))


def attention(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    q, k, v = net.q(x), net.k(x), net.v(x)
    return net.out((q @ k.transpose(1, 2) / 3**0.5).softmax(-1) @ v).mean(1)


def fused_attention(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    q, k, v = (h.unflatten(-1, (2, 2)).transpose(1, 2) for h in net.qkv(x).chunk(3, dim=-1))
    return net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)


def sequence_first(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.tanh(net.a(x.transpose(0, 1)))
    return net.b(h).transpose(0, 1).mean(1)


def folded(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.tanh(net.a(x.reshape(-1, 3)))
    return net.b(h.view(*x.shape[:2], -1)).sum(1)


def different_sizes(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    return net.a(net.tanh((x * 1e-3 ** torch.arange(len(x))[:, None]) @ net.matrix))


def class_token(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = cat([net.token.expand(len(x), -1, -1), net.a(x)], dim=1)
    return net.c(net.tanh(net.b(h)).mean(1))


def class_token_repeated(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = cat([net.token.repeat(len(x), 1, 1), net.a(x)], dim=1) + net.position
    return net.c(net.tanh(net.b(h)).mean(1))


def prompt_repeated(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = cat([net.tanh(net.b(net.prompt)).repeat(len(x), 1, 1), net.a(x)], dim=1)
    return net.c(net.tanh(h).mean(1))


def prompt_repeated_twice(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    prompt = net.tanh(net.b(net.prompt[:, None])).repeat(1, len(x), 2).transpose(0, 1)
    return net.c(net.tanh(net.a(x)).mean(1) * prompt.unflatten(2, (2, 3)).cumsum(2).sum((1, 2)))


def smooth_branches(net: Net, x: Tensor) -> Tensor:  # noqa: D103
    h = net.tanh(net.a(x))
    h = h + net.sigmoid(net.b(h)) + net.gelu(net.c(h))
    h = cat([h, net.tanh(net.d(h))], dim=1)
    return net.out(h) + net.skip(x)


def tied(N: int) -> Problem:  # noqa: D103
    encoder, decoder = Linear(3, 3), Linear(3, 3)
    decoder.weight = encoder.weight
    return regress(Sequential(encoder, Tanh(), decoder), randn(N, 3))


def tied_branches(N: int) -> Problem:  # noqa: D103
    net = Net(lambda net, x: net.c(net.tanh(net.a(x)) + net.sigmoid(net.b(2 * x))), **layers(3, 3, 3, 4, tanh=Tanh, sigmoid=nn.Sigmoid)())
    net.b.weight = net.a.weight
    return classify(net, randn(N, 3))


graph("functional relu", lambda net, x: net.b(F.relu(net.a(x))), layers(3, 5, 4), (3,))
graph("functional tanh", lambda net, x: net.b(torch.tanh(net.a(x))), layers(3, 3, 4), (3,))
graph(
    "piecewise linear functions",
    lambda net, x: net.c(torch.maximum(net.b(F.leaky_relu(net.a(x), 0.1)).abs(), net.a(x).clamp(-0.5, 0.5))),
    layers(3, 3, 3, 4),
    (3,),
    "reused",
)
graph(
    "linear functions",
    lambda net, x: net.b(3 * net.tanh(net.a(x)).neg().flip(1)[:, 1:] - 1),
    lambda: {"a": Linear(3, 4), "tanh": Tanh(), "b": Linear(3, 4)},
    (3,),
)
graph("residual", residual, layers(3, 3, 3, 4, tanh=Tanh), (3,))
graph("residual on input", lambda net, x: net.b(x + net.tanh(net.a(x))), layers(3, 3, 4, tanh=Tanh), (3,))
graph("residual in place", inplace_add, layers(3, 3, 3, 4, tanh=Tanh), (3,))
graph("residual in place, extra axis", inplace_add_positions, layers(3, 3, 3, 4, tanh=Tanh), (2, 3))
graph("in-place slices", inplace_slice, layers(3, 4, 4), (3,))
graph("functional relu in place, extra axis", lambda net, x: net.b(F.relu_(net.a(x))).sum(1), layers(3, 4, 4), (2, 3))
graph("linear twice", lambda net, x: net.b(F.relu(net.a(F.relu(net.a(x))))), layers(5, 5, 4), (5,), "reused", "nested")
graph("linear twice, side by side", lambda net, x: net.b(net.tanh(net.a(x)) + net.a(x.flip(1))), layers(3, 3, 4, tanh=Tanh), (3,), "reused")
graph("sequence with functional end", lambda net, x: net.b(net.relu(net.a(x))).view(-1, 4), layers(3, 3, 4, relu=nn.ReLU), (3,))
add("tied encoder and decoder", tied, "graph", "chain", "reused", "nested")
add("tied branches", tied_branches, "graph", "reused")
graph(
    "tied and transposed",
    lambda net, x: net.b(F.linear(net.tanh(net.a(x)), net.a.weight.t())),
    lambda: {"a": Linear(3, 2), "tanh": Tanh(), "b": Linear(3, 4)},
    (3,),
    "reused",
    "nested",
    "two orientations",
)
graph(
    "bounds that are parameters",
    lambda net, x: net.b(torch.clamp(net.tanh(net.a(x)), min=net.low, max=net.low + net.width.square())),
    layers(3, 3, 4, tanh=Tanh, low=parameter(), width=parameter(3)),
    (3,),
    "other parameters",
)
graph(
    "bounds that are made of samples",
    lambda net, x: net.b(torch.clamp_min(torch.clamp_max(net.tanh(net.a(x)), net.high), net.a(x).mean(1, keepdim=True) - 0.3)),
    layers(3, 3, 4, tanh=Tanh, high=parameter(3)),
    (3,),
    "other parameters",
    "reused",
)
graph("bare bias", lambda net, x: net.b(net.tanh(net.a(x) + net.bias)), layers(3, 3, 4, tanh=Tanh, bias=parameter(3)), (3,), "other parameters")
graph(
    "bare scalar",
    lambda net, x: net.b(net.tanh(net.a(x) + net.shift)),
    layers(3, 3, 4, tanh=Tanh, shift=parameter()),
    (3,),
    "other parameters",
)
graph(
    "position embedding",
    lambda net, x: net.b(net.tanh(net.a(x) + net.position)).sum(1),
    layers(3, 3, 4, tanh=Tanh, position=parameter(2, 3)),
    (2, 3),
    "other parameters",
)
graph(
    "position embedding on input",
    lambda net, x: net.b(net.tanh(net.a(x + net.position))).sum(1),
    layers(3, 3, 4, tanh=Tanh, position=parameter(1, 2, 3)),
    (2, 3),
    "other parameters",
)
graph("class token", class_token, layers(3, 3, 3, 4, tanh=Tanh, token=parameter(1, 1, 3)), (2, 3), "other parameters")
graph(
    "class token, repeated",
    class_token_repeated,
    layers(3, 3, 3, 4, tanh=Tanh, token=parameter(1, 1, 3), position=parameter(3, 3)),
    (2, 3),
    "other parameters",
)
graph("prompt, repeated", prompt_repeated, layers(3, 3, 3, 4, tanh=Tanh, prompt=parameter(5, 3)), (2, 3), "nested", "other parameters")
graph("prompt, repeated twice", prompt_repeated_twice, layers(3, 3, 3, 4, tanh=Tanh, prompt=parameter(2, 3)), (2, 3), "nested", "other parameters")
graph(
    "layer scale",
    lambda net, x: net.b(x + net.tanh(net.a(x)) * net.gamma),
    layers(3, 3, 4, tanh=Tanh, gamma=parameter(3)),
    (3,),
    "nested",
    "other parameters",
)
graph(
    "temperature",
    lambda net, x: net.b(net.tanh(net.a(x))) / net.temperature,
    layers(3, 3, 4, tanh=Tanh, temperature=parameter()),
    (3,),
    "nested",
    "other parameters",
)
graph(
    "bare linear",
    lambda net, x: net.a(net.tanh(F.linear(x, net.weight, net.bias))),
    layers(3, 4, tanh=Tanh, weight=parameter(3, 3), bias=parameter(3)),
    (3,),
    "nested",
    "other parameters",
)
graph(
    "bare matrix", lambda net, x: net.a(net.tanh(x @ net.matrix)), layers(3, 4, tanh=Tanh, matrix=parameter(3, 3)), (3,), "nested", "other parameters"
)
graph(
    "bare matrix, axis exchanged with itself",
    lambda net, x: net.a(net.tanh(x @ net.matrix.transpose(1, -1))),
    layers(3, 4, tanh=Tanh, matrix=parameter(3, 3)),
    (3,),
    "nested",
    "other parameters",
)
graph("samples of different size", different_sizes, layers(3, 4, tanh=Tanh, matrix=parameter(3, 3)), (3,), "nested", "other parameters")
graph("transpose between squares", lambda net, x: net.b(net.a(x).transpose(1, 2)).mean(1), layers(3, 3, 4), (3, 3))
graph(
    "view and permute",
    lambda net, x: net.c(net.tanh(net.b(net.a(x).view(-1, 2, 3).permute(0, 2, 1)[:, [2, 0, 2]])).reshape(len(x), -1)),
    lambda: {"a": Linear(3, 6), "tanh": Tanh(), "b": Linear(2, 2), "c": Linear(6, 4)},
    (3,),
)
graph("dense", dense, lambda: {"a": Linear(3, 2), "tanh": Tanh(), "b": Linear(5, 2), "sigmoid": nn.Sigmoid(), "out": Linear(7, 4)}, (3,))
graph("gated", gated, lambda: {"a": Linear(3, 4), "b": Linear(2, 4)}, (3,))
graph(
    "product of branches",
    lambda net, x: net.c(net.a(x) * net.b(x)),
    lambda: {"a": Linear(3, 3), "b": Linear(3, 3), "c": Linear(3, 4)},
    (3,),
    "nested",
)
graph("attention", attention, lambda: {"q": Linear(3, 2), "k": Linear(3, 2), "v": Linear(3, 2), "out": Linear(2, 4)}, (3, 3))
graph("fused attention", fused_attention, lambda: {"qkv": Linear(3, 12), "out": Linear(4, 4)}, (3, 3))
graph("samples second", sequence_first, layers(3, 3, 4, tanh=Tanh), (2, 3))
graph("samples second, square", sequence_first, layers(3, 3, 4, tanh=Tanh), (3, 3))
graph("samples second, dropout", sequence_first, layers(3, 3, 4, tanh=lambda: nn.Dropout(0.4)), (2, 3))
graph("samples second, square, dropout", sequence_first, layers(3, 3, 4, tanh=lambda: nn.Dropout(0.4)), (3, 3))
graph("samples folded", folded, layers(3, 2, 4, tanh=Tanh), (2, 3))
graph("samples folded, one feature", folded, layers(3, 1, 4, tanh=Tanh), (2, 3))
graph("custom function", lambda net, x: net.b(Cube.apply(net.a(x))), layers(3, 3, 4), (3,), "curved")
graph("own layer", lambda net, x: net.b(net.own(net.tanh(net.a(x)))), layers(3, 3, 4, tanh=Tanh, own=Quadratic), (3,), "nested", "other parameters")
graph(
    "own layer, first",
    lambda net, x: net.b(net.tanh(net.own(x))),
    lambda: {"own": Quadratic(), "tanh": Tanh(), "b": Linear(3, 4)},
    (3,),
    "nested",
    "other parameters",
)
graph("own module without parameters", lambda net, x: net.b(net.own(net.a(x))), layers(3, 3, 4, own=Square), (3,), "chain", "dense residual")
graph(
    "layer norm",
    lambda net, x: net.b(net.norm(net.a(x))),
    layers(3, 3, 4, norm=lambda: nn.LayerNorm(3)),
    (3,),
    "chain",
    "dense residual",
    "other parameters",
)
graph(
    "bilinear",
    lambda net, x: net.bilinear(net.tanh(net.a(x)), x),
    lambda: {"a": Linear(3, 2), "tanh": Tanh(), "bilinear": nn.Bilinear(2, 3, 4)},
    (3,),
    "chain",
    "other parameters",
)
graph(
    "keyword input",
    lambda net, x: net.b(input=net.tanh(net.a(input=x))),
    layers(3, 3, 4, tanh=Tanh),
    (3,),
    "chain",
    output=lambda model, x: model(x=x),
)
graph(
    "dictionary output",
    lambda net, x: {"logits": net.b(net.tanh(net.a(x)))},
    layers(3, 3, 4, tanh=Tanh),
    (3,),
    "chain",
    output=lambda model, x: model(x)["logits"],
)
graph(
    "smooth branches",
    smooth_branches,
    lambda: (
        {"a": Linear(3, 2), "b": Linear(2, 2), "c": Linear(2, 2), "d": Linear(2, 2), "out": Linear(4, 4), "skip": Linear(3, 4)}
        | {"tanh": Tanh(), "sigmoid": nn.Sigmoid(), "gelu": nn.GELU()}
    ),
    (3,),
)

# --- several losses ---------------------------------------------------------------------------------------------------------------------------


def two_losses(N: int) -> Problem:  # noqa: D103
    model = Sequential(Linear(3, 3), nn.Sigmoid(), Linear(3, 4))
    return Problem(model, randn(N, 3), [Term(CrossEntropyLoss(), labels(N)), Term(MSELoss(), randn(N, 4), scale=0.5)])


def two_heads(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D103
    h = net.tanh(net.a(x))
    return net.b(h), net.c(h)


HEADS = {"a": (3, 3), "b": (3, 4), "c": (3, 2)}


def losses_on_heads(terms: Callable[[int], list[Term]], N: int) -> Problem:  # noqa: D103
    return Problem(Net(two_heads, tanh=Tanh(), **{name: Linear(*size) for name, size in HEADS.items()}), randn(N, 3), terms(N))


def one_loss_module_twice(N: int) -> list[Term]:  # noqa: D103
    loss = MSELoss()
    return [Term(loss, randn(N, 4), 0, 0.7), Term(loss, randn(N, 2), 1, 1.3)]


def model_twice(N: int) -> Problem:  # noqa: D103
    terms = [Term(CrossEntropyLoss(), labels(N), 0), Term(CrossEntropyLoss(), labels(N), 1)]
    return Problem(Sequential(Linear(3, 3), nn.Sigmoid(), Linear(3, 4)), randn(N, 3), terms, lambda model, x: (model(x), model(x.flip(1))))


add("two losses on one output", two_losses, "graph", "chain", "special loss")
add(
    "two losses on two heads",
    partial(losses_on_heads, lambda N: [Term(CrossEntropyLoss(), labels(N), 0), Term(MSELoss(reduction="sum"), randn(N, 2), 1, 0.3)]),
    "graph",
    "special loss",
)
add("one loss module on two heads", partial(losses_on_heads, one_loss_module_twice), "graph", "special loss")
add("model called twice", model_twice, "graph", "reused", "special loss")
