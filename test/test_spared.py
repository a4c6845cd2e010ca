"""Gradients that are sums over samples, where contributions of samples are formed anyway: the same numbers, with all hooks, and no second product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import CASES
from table import Case, every_second
from test_extensions import QUANTITIES, close, collect, oracle_of, run
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

from backpack import backpack, extend, extensions
from backpack.extensions import spared

FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
ACTIVE = [("BatchL2Grad",), ("Variance",), FIRST_ORDER]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare autograd the products of all layers, not only of those with many positions."""
    monkeypatch.setattr(spared, "POSITIONS", 1)


def gradients(case: Case, batch: int) -> list[Tensor | None]:
    problem = case.build(batch)
    problem.loss(problem.outputs()).backward()
    return [param.grad for param in problem.model.parameters()]


@pytest.mark.parametrize("case", every_second(CASES))
@pytest.mark.parametrize("active", ACTIVE, ids="-".join)
@pytest.mark.usefixtures("everywhere")
def test_every_case(case: str, active: tuple[str, ...]) -> None:
    for batch in (1, 3):
        problem = CASES[case].build(batch)
        run(problem, *(QUANTITIES[name].make() for name in active))
        for name in active:
            QUANTITIES[name].check(oracle_of(case, batch), collect(problem, QUANTITIES[name].field))
        for param, expected in zip(problem.model.parameters(), gradients(CASES[case], batch), strict=True):
            assert param.grad is expected or expected is not None
            if expected is not None:
                close(param.grad, expected, 1e-12)


@pytest.mark.parametrize("case", every_second(CASES))
@pytest.mark.usefixtures("everywhere")
def test_products_one_by_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of samples that are formed in the same memory, added and squared there, are those of all samples at once."""
    monkeypatch.setattr("backpack.core.derivatives.affine._ALONE", 1)
    monkeypatch.setattr("backpack.core.derivatives.affine_squares._EACH", 1)
    monkeypatch.setattr("backpack.core.derivatives.affine_squares.by_gram_matrices", lambda *_: False)
    for small in (1, 2**18):
        monkeypatch.setattr("backpack.core.derivatives.affine.SMALL", small)
        problem = CASES[case].build(3)
        run(problem, *(QUANTITIES[name].make() for name in FIRST_ORDER[1:]))
        for name in FIRST_ORDER[1:]:
            QUANTITIES[name].check(oracle_of(case, 3), collect(problem, QUANTITIES[name].field))
        for param, expected in zip(problem.model.parameters(), gradients(CASES[case], 3), strict=True):
            if expected is not None:
                close(param.grad, expected, 1e-12)


def make_net(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """A convolution, large enough to be spared, and a layer without positions, which is not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3, groups=1), nn.Flatten(), nn.Linear(128, 3)).to(dtype)
    return net, torch.randn(4, 2, 12, 12, dtype=dtype)


def plain(prepare: Callable[[nn.Module], object] = lambda net: None) -> list[Tensor | None]:
    net, x = make_net()
    prepare(net)
    net(x).square().sum().backward()
    return [param.grad for param in net.parameters()]


def given_by_autograd(net: nn.Module, x: Tensor, *exts: object, **options: object) -> list[bool]:
    """Say for the weights of both convolutions whether autograd has computed their gradient."""
    found = {}
    with backpack(*exts, **options):
        y = x
        for i, layer in enumerate(net):
            y = layer(y)
            if isinstance(layer, nn.Conv2d):
                y.grad_fn.register_hook(lambda inputs, _, i=i: found.update({i: inputs[1] is not None}))
        y.square().sum().backward()
    return [found[0], found[2]]


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_no_second_product(name: str) -> None:
    net, x = make_net()
    assert given_by_autograd(extend(net), x, getattr(extensions, name)()) == [False, False]
    for param, expected in zip(net.parameters(), plain(), strict=True):
        close(param.grad, expected, 1e-12)


def test_where_it_is_left_to_autograd() -> None:
    net, x = make_net()
    extend(net)
    left = partial(given_by_autograd, net, x)
    assert left(extensions.BatchGrad(subsampling=[0])) == [True, True]
    assert left(extensions.BatchGrad(), extension_hook=lambda module: None) == [True, True]
    assert left(extensions.BatchGrad(exclude=[net[0].weight])) == [True, False]
    assert left(extensions.BatchGrad(exclude=[net[0].weight]), extensions.Variance(exclude=[net[2].weight])) == [False, False]
    assert left(extensions.BatchGrad(exclude=["0.bias"])) == [False, False]
    half, x = make_net(torch.bfloat16)
    assert given_by_autograd(extend(half), x, extensions.BatchGrad()) == [True, True]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_of_modules_see_the_gradient_of_the_weight() -> None:
    net, x = make_net()
    seen: list[bool] = []
    extend(net)[2].register_backward_hook(lambda module, inputs, outputs: seen.append(inputs[1] is not None))
    with backpack(extensions.BatchGrad()):
        net(x).square().sum().backward()
    assert seen == [True]


def test_chosen_leaves_are_autograds() -> None:
    net, x = make_net()
    extend(net)
    with backpack(extensions.BatchGrad()):
        net(x).square().sum().backward(inputs=[net[0].weight, net[4].weight])
    assert net[0].bias.grad is None
    assert net[2].weight.grad is None
    assert torch.equal(net[0].weight.grad, plain()[0])


def test_gradients_accumulate() -> None:
    net, x = make_net()
    extend(net)
    for _ in range(3):
        with backpack(extensions.BatchGrad()):
            net(x).square().sum().backward()
    for param, expected in zip(net.parameters(), plain(), strict=True):
        close(param.grad, 3 * expected, 1e-12)


def test_graph_may_be_kept() -> None:
    net, x = make_net()
    extend(net)
    loss = net(x).square().sum()
    with backpack(extensions.BatchGrad()):
        loss.backward(retain_graph=True)
        loss.backward()
    for param, expected in zip(net.parameters(), plain(), strict=True):
        close(param.grad, 2 * expected, 1e-12)
    with backpack(extensions.BatchGrad()), pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_hooks_run(name: str) -> None:
    """Hooks of a parameter, of the node that accumulates its gradient, and of tensors between layers see what they always see."""

    def prepare(net: nn.Module) -> list[str]:
        seen: list[str] = []
        net[0].weight.register_hook(lambda grad: seen.append("tensor") or 2 * grad)
        weight = net[2].weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"accumulated {p.grad is not None}"))
        weight.expand_as(weight).grad_fn.next_functions[0][0].register_hook(lambda *_: seen.append("node"))
        net[1].register_full_backward_hook(lambda *_: seen.append("module"))
        return seen

    net, x = make_net()
    seen, expected_seen = prepare(extend(net)), []
    expected = plain(lambda net: expected_seen.append(prepare(net)))
    x.requires_grad_()
    with backpack(getattr(extensions, name)()):
        net(x).square().sum().backward()
    assert sorted(seen) == sorted(expected_seen[0])
    for param, value in zip(net.parameters(), expected, strict=True):
        close(param.grad, value, 1e-12)
    assert x.grad is not None


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_of_several_parameters_run_once(mode: str) -> None:
    net, x = make_net()
    seen: list[object] = []
    torch.autograd.graph.register_multi_grad_hook(tuple(extend(net).parameters()), seen.append, mode=mode)
    with backpack(extensions.BatchGrad()):
        net(x).square().sum().backward()
    (grads,) = seen
    for grad, expected in zip(grads, plain(), strict=True) if mode == "all" else ():
        close(grad, expected, 1e-12)


def products(root: Node, name: str) -> set[Node]:
    """Nodes of an operation, upstream of another one."""
    found, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [following for following, _ in node.next_functions]
    return {node for node in found if node.name().startswith(name)}


@pytest.mark.parametrize("how", ["changed", "retained"])
@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_gradient_of_a_transposed_weight(how: str, reachable: bool, name: str) -> None:
    """What functional code does with a tensor between a product and its weight counts in the gradient; the product saves it only for its input."""
    net = nn.Linear(4, 3, dtype=torch.float64)
    x, seen = torch.randn(3, 40, 4, dtype=torch.float64, requires_grad=reachable), []

    def forward(x: Tensor) -> Tensor:
        turned = net.weight.t()
        turned.register_hook(lambda grad: 2 * grad) if how == "changed" else turned.retain_grad()
        seen.append(turned)
        return x @ turned + net.bias

    net.forward = forward
    net(x).square().sum().backward()
    expected, net.weight.grad, input_grad, x.grad = net.weight.grad, None, x.grad, None
    extend(net)
    by_autograd = []
    with backpack(getattr(extensions, name)()):
        loss = net(x).square().sum()
        (product,) = products(loss.grad_fn, "Mm")
        product.register_hook(lambda inputs, _: by_autograd.append(inputs[1] is not None))
        loss.backward()
    assert by_autograd == [not reachable]
    close(net.weight.grad, expected, 1e-12)
    if reachable:
        close(x.grad, input_grad, 1e-12)
    if how == "retained":
        close(seen[1].grad, seen[0].grad, 1e-12)


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_attention_takes_no_second_product(name: str) -> None:
    torch.manual_seed(0)
    net, x = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64), torch.randn(3, 40, 8, dtype=torch.float64, requires_grad=True)
    net(x, x, x, need_weights=False)[0].square().sum().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    extend(net)
    by_autograd = []
    with backpack(getattr(extensions, name)()):
        loss = net(x, x, x, need_weights=False)[0].square().sum()
        for kind, number in (("Mm", 1), ("Addmm", 2)):
            (product,) = products(loss.grad_fn, kind)
            product.register_hook(lambda inputs, _, number=number: by_autograd.append(inputs[number] is not None))
        loss.backward()
    assert by_autograd == [False, False]
    for param, value in zip(net.parameters(), expected, strict=True):
        close(param.grad, value, 1e-12)


def test_products_in_checkpoints_are_left_to_autograd() -> None:
    """There, the weight that a product has saved is computed again, and nothing that happens to it is hooked."""
    net = nn.Linear(4, 3, dtype=torch.float64)
    x = torch.randn(3, 40, 4, dtype=torch.float64, requires_grad=True)

    def product(x: Tensor) -> Tensor:
        turned = net.weight.t()
        turned.register_hook(lambda grad: 2 * grad)
        return x @ turned + net.bias

    net.forward = lambda x: checkpoint(product, x, use_reentrant=False)
    net(x).square().sum().backward()
    expected, net.weight.grad = net.weight.grad, None
    extend(net)
    with backpack(extensions.Variance()):
        net(x).square().sum().backward()
    close(net.weight.grad, expected, 1e-12)


def test_frozen_parts_and_other_leaves() -> None:
    net, x = make_net()
    net[0].bias.requires_grad_(False)
    net[2].weight.requires_grad_(False)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    extend(net)
    with backpack(extensions.BatchGrad()):
        net(x * scale).square().sum().backward()
    values = [net[0].weight.grad, net[2].bias.grad, scale.grad]
    for p in (*net.parameters(), scale):
        p.grad = None
    net(x * scale).square().sum().backward()
    for value, expected in zip(values, [net[0].weight.grad, net[2].bias.grad, scale.grad], strict=True):
        close(value, expected, 1e-12)
    assert net[0].bias.grad is None


def test_exceptions_leave_nothing() -> None:
    net, x = make_net()
    extend(net)
    out = net[:2](x)
    out.register_hook(lambda grad: 1 / 0)
    with backpack(extensions.BatchGrad()), pytest.raises(ZeroDivisionError):
        net[2:](out).square().sum().backward()
    assert not any(hasattr(param, "grad_batch") for param in net.parameters())
    with backpack(extensions.BatchGrad()):
        net.zero_grad()
        net(x).square().sum().backward()
    for param, expected in zip(net.parameters(), plain(), strict=True):
        close(param.grad, expected, 1e-12)


class Between(nn.Module):
    """A hook on what the model makes of its weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight, self.bias = how, nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.how == "turned" else self.weight.view_as(self.weight)
        weight.register_hook(lambda grad: 2 * grad)
        return torch.addmm(self.bias, x, weight) if self.how == "turned" else nn.functional.linear(x, weight, self.bias)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("how", ["turned", "view", "module"])
def test_variance_where_hooks_change_the_gradient(how: str) -> None:
    """It is that of what samples contribute, alone as beside their gradients."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2) if how == "module" else Between(how)
    if how == "module":
        model.register_backward_hook(lambda _, inner, __: tuple(None if grad is None else 2 * grad for grad in inner))
    model, x = extend(nn.Sequential(model.double())), torch.randn(4, 3, dtype=torch.float64)
    for extension in (extensions.BatchGrad(), extensions.Variance()):
        with backpack(extension):
            model(x).square().sum().backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.variance, parameter.grad_batch.var(0, correction=0))
