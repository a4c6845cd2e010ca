"""Products with Jacobians, Hessians and generalized Gauss-Newton matrices, compared with the dense matrices."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.functional import hessian, jacobian
from torch.nn import CrossEntropyLoss, Linear, Module, ModuleList, MSELoss, RNNCell, Sequential, Tanh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm

from backpack import backpack, clear, extend, results
from backpack.extensions import BatchGrad, DiagGGNExact
from backpack.hessianfree.ggnvp import ggn_vector_product, ggn_vector_product_from_plist
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op, transposed_jacobian_vector_product
from backpack.hessianfree.rop import R_op, jacobian_vector_product
from backpack.utils.errors import ArgumentError, ArgumentTypeError, DifferentiationError, UnsupportedError


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) - 0.3


def map_a(x: Tensor, z: Tensor) -> Tensor:
    return (x.exp() @ z).sin()


def map_b(x: Tensor) -> Tensor:
    return (x**3).sum(1)


@pytest.fixture
def inputs() -> list[Tensor]:
    return [rand(2, 3).requires_grad_(), rand(3, 2).requires_grad_(), rand(2).requires_grad_()]  # the last one is never used


@pytest.mark.parametrize("detach", [True, False])
def test_products_with_jacobian_and_transpose(inputs: list[Tensor], detach: bool) -> None:
    x, z, unused = inputs
    ys = [map_a(x, z), map_b(x)]
    J_ax, J_az = jacobian(map_a, (x, z))
    J_bx = jacobian(map_b, x)
    v_x, v_z, v_unused, w_a, w_b = rand(2, 3), rand(3, 2), rand(2), rand(2, 2), rand(2)

    Jv = R_op(ys, inputs, [v_x, v_z, v_unused], detach=detach)
    torch.testing.assert_close(Jv[0].detach(), torch.einsum("abij,ij->ab", J_ax, v_x) + torch.einsum("abij,ij->ab", J_az, v_z))
    torch.testing.assert_close(Jv[1].detach(), torch.einsum("aij,ij->a", J_bx, v_x))
    JTw = L_op(ys, inputs, [w_a, w_b], detach=detach)
    torch.testing.assert_close(JTw[0].detach(), torch.einsum("abij,ab->ij", J_ax, w_a) + torch.einsum("aij,a->ij", J_bx, w_b))
    torch.testing.assert_close(JTw[1].detach(), torch.einsum("abij,ab->ij", J_az, w_a))
    assert torch.equal(JTw[2], torch.zeros_like(unused))
    assert [result.requires_grad for result in (Jv[0], Jv[1], JTw[0], JTw[1])] == [not detach] * 4


def test_products_can_be_differentiated(inputs: list[Tensor]) -> None:
    x = inputs[0]
    y, v = map_b(x), rand(2, 3)
    (Jv,) = jacobian_vector_product(y, x, v, detach=False)
    torch.testing.assert_close(torch.autograd.grad(Jv.sum(), x)[0], 6 * x.detach() * v)
    (JTw,) = transposed_jacobian_vector_product(y, x, torch.ones_like(y), detach=False)
    torch.testing.assert_close(torch.autograd.grad(JTw.sum(), x)[0], 6 * x.detach())


def test_bare_tensors_and_lists_agree(inputs: list[Tensor]) -> None:
    x = inputs[0]
    y, v, w = map_b(x), rand(2, 3), rand(2)
    assert torch.equal(jacobian_vector_product(y, x, v)[0], jacobian_vector_product(f=[y], x=[x], v=[v])[0])
    assert torch.equal(transposed_jacobian_vector_product(f=y, x=x, v=w)[0], transposed_jacobian_vector_product([y], [x], [w])[0])
    assert torch.equal(transposed_jacobian_vector_product(y, x, w)[0], transposed_jacobian_vector_product([y], [x], [w])[0])


def test_output_that_depends_on_no_input_gives_zeros(inputs: list[Tensor]) -> None:
    y = map_b(inputs[0])
    assert torch.equal(R_op(y, inputs[1:], [rand(3, 2), rand(2)])[0], torch.zeros_like(y))


def test_graph_can_be_freed(inputs: list[Tensor]) -> None:
    y = map_b(inputs[0])
    L_op(y, inputs[0], rand(2), retain_graph=False)
    with pytest.raises(RuntimeError, match="second time"):
        L_op(y, inputs[0], rand(2))


# Hessian


def scalar(x: Tensor, z: Tensor) -> Tensor:
    return (map_a(x, z) ** 2).sum()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("detach", [True, False])
def test_hessian_vector_product(inputs: list[Tensor], given: bool, detach: bool) -> None:
    H = hessian(scalar, tuple(inputs[:2]))
    f = scalar(*inputs[:2])
    v = [rand(2, 3), rand(3, 2), rand(2)]
    gradients = torch.autograd.grad(f, inputs, create_graph=True, allow_unused=True, materialize_grads=True) if given else None
    Hv = hessian_vector_product(f, iter(inputs), v, grad_params=gradients, detach=detach)
    for i in range(2):
        torch.testing.assert_close(Hv[i].detach(), sum(torch.einsum("abij,ij->ab", H[i][j], v[j]) for j in range(2)))
    assert torch.equal(Hv[2], torch.zeros(2, dtype=torch.float64))
    assert Hv[0].requires_grad == (not detach)


def test_hessian_vector_product_of_bare_tensor(inputs: list[Tensor]) -> None:
    x, v = inputs[0], rand(2, 3)
    torch.testing.assert_close(hessian_vector_product((x**3).sum(), x, v)[0], 6 * x.detach() * v)


def test_hessian_of_linear_function_is_zero(inputs: list[Tensor]) -> None:
    x, z, _ = inputs
    assert torch.equal(hessian_vector_product((2 * x).sum(), [x], [rand(2, 3)])[0], torch.zeros(2, 3, dtype=torch.float64))
    Hx, Hz = hessian_vector_product((2 * x).sum() + (z**2).sum(), [x, z], [rand(2, 3), torch.ones(3, 2, dtype=torch.float64)])
    assert torch.equal(Hx, torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(Hz, torch.full((3, 2), 2.0, dtype=torch.float64))
    assert not hessian_vector_product((z**2).sum(), x, rand(2, 3))[0].any()


def test_hessian_vector_product_checks_shapes(inputs: list[Tensor]) -> None:
    f = scalar(*inputs[:2])
    with pytest.raises(ValueError, match=r"v must .*\[\[2, 3\], \[3, 2\]\], got \[\[2, 3\]\]"):
        hessian_vector_product(f, inputs[:2], [rand(2, 3)])
    with pytest.raises(ValueError, match=r"v must .*got \[\[2, 3\], \[2, 3\]\]"):
        hessian_vector_product(f, inputs[:2], [rand(2, 3), rand(2, 3)])
    with pytest.raises(ValueError, match=r"grad_params must .*got \[\[2, 3\]\]"):
        hessian_vector_product(f, inputs[:2], [rand(2, 3), rand(3, 2)], grad_params=[rand(2, 3)])


def test_hessian_vector_product_does_not_take_gradients_without_graph_for_constant(inputs: list[Tensor]) -> None:
    x, v = inputs[0], rand(2, 3)
    f = (x**3).sum()
    (gradient,) = torch.autograd.grad(f, x, retain_graph=True)
    torch.testing.assert_close(hessian_vector_product(f, x, v, grad_params=[gradient])[0], 6 * x.detach() * v)
    with pytest.raises(ArgumentError, match=r"scalar, got shape \[2\]"):
        hessian_vector_product(map_b(x), x, v)


# Custom functions


class Cube(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class CubeOnce(Cube):
    backward = staticmethod(once_differentiable(Cube.backward))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_custom_functions_are_exact_or_refused(inputs: list[Tensor], given: bool, power: int) -> None:
    x, z, _ = inputs
    v = [rand(2, 3), rand(3, 2)]

    def map_c(f: type[Function]) -> Tensor:
        return f.apply(x.exp()) @ z

    def hvp(f: type[Function]) -> Tensor:
        value = (map_c(f) ** power).sum()
        gradients = torch.autograd.grad(value, (x, z), create_graph=True) if given else None
        return hessian_vector_product(value, (x, z), v, grad_params=gradients)

    def ggn(f: type[Function]) -> Tensor:
        out = map_c(f)
        return ggn_vector_product_from_plist((out**2).sum(), out, (x, z), v)

    w = rand(2, 2)
    for ours, theirs in zip(L_op(map_c(CubeOnce), (x, z), w), L_op((3 * x).exp() @ z, (x, z), w), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(R_op(map_c(Cube), (x, z), v)[0], R_op((3 * x).exp() @ z, (x, z), v)[0])
    H = hessian(lambda x, z: (((3 * x).exp() @ z) ** power).sum(), (x, z))
    torch.testing.assert_close(hvp(Cube)[0], sum(torch.einsum("abij,ij->ab", H[0][j], v[j]) for j in range(2)))
    with pytest.raises(UnsupportedError, match="once_differentiable"):
        hvp(CubeOnce)
    with pytest.raises(UnsupportedError, match="once_differentiable"):
        R_op(map_c(CubeOnce), (x, z), v)
    with pytest.raises(UnsupportedError, match="once_differentiable"):
        ggn(CubeOnce)
    with pytest.raises(UnsupportedError, match="once_differentiable"):
        L_op(torch.autograd.grad((map_c(CubeOnce) ** 2).sum(), x, create_graph=True), x, rand(2, 3))


def test_function_with_constant_gradient_that_is_marked_is_refused(inputs: list[Tensor]) -> None:
    x, v = inputs[0], rand(2, 3)
    f = CubeOnce.apply(x).sum() + (x**2).sum()  # the gradient of the first term has no graph
    for gradients in (None, torch.autograd.grad(f, x, create_graph=True)):
        with pytest.raises(UnsupportedError, match="once_differentiable"):
            hessian_vector_product(f, x, v, grad_params=gradients)
    f = Cube.apply(x).sum() + (x**2).sum()
    torch.testing.assert_close(hessian_vector_product(f, x, v)[0], (6 * x.detach() + 2) * v)


class CubeWithoutGraph(Cube):
    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        with torch.no_grad():
            return Cube.backward(ctx, g)


class CubeOfIntermediate(Function):
    """Keeps the square, of which torch does not know that it depends on the input."""

    @staticmethod
    def forward(ctx, x: Tensor, sign: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x**2, sign)
        return x**3

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        return 3 * ctx.saved_tensors[0] * g, None


class CubeOfShape(CubeOfIntermediate):
    """Has an input that it does not keep."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x**2, None)
        return x**3


class CubeOfAttribute(Cube):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.square = x**2
        return x**3

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 3 * ctx.square * g


@pytest.mark.parametrize(
    ("cube", "reason"),
    [
        (CubeWithoutGraph.apply, "CubeWithoutGraph returns one that has no graph"),
        (CubeOfIntermediate.apply, "CubeOfIntermediate keeps a tensor .* no input and no"),
        (lambda x: CubeOfIntermediate.apply(x, torch.ones(1)), "no input and no"),
        (lambda x: CubeOfIntermediate.apply(x, torch.arange(2)), "no input and no"),
        (lambda x: CubeOfShape.apply(x, torch.ones(5)), "no input and no"),
        (CubeOfAttribute.apply, "no input and no"),
    ],
)
def test_functions_whose_derivatives_torch_takes_for_constants_are_refused(inputs: list[Tensor], cube: Callable, reason: str) -> None:
    x, z, _ = inputs
    v = [rand(2, 3), rand(3, 2)]
    out = cube(x.exp()) @ z
    for product in (
        lambda: hessian_vector_product(out.sum(), (x, z), v),
        lambda: R_op(out, (x, z), v),
        lambda: ggn_vector_product_from_plist((out**2).sum(), out, (x, z), v),
        lambda: L_op(out, (x, z), rand(2, 2).requires_grad_(), detach=False),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            product()
    torch.testing.assert_close(L_op(out, x, v[0] @ v[1])[0], L_op((3 * x).exp() @ z, x, v[0] @ v[1])[0])
    H = hessian(lambda z: (((3 * x).exp() @ z) ** 2).sum(), z)  # the function is not on the way
    torch.testing.assert_close(hessian_vector_product((out**2).sum(), z, v[1])[0], torch.einsum("abij,ij->ab", H, v[1]))


class Masked(Function):
    """Keeps a constant input and what is no differentiable function of one."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.mask = x > 1
        return x * ctx.mask * scale

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.mask * ctx.saved_tensors[0], None


class Distance(Function):
    """Keeps an input and a target."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return (x - y) ** 2

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return 2 * (x - y) * g, None


class Rounded(Function):
    """Has no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return torch.zeros_like(g)


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (lambda x: Masked.apply(x, torch.full((3,), 2.0, dtype=x.dtype)), lambda x: x * (x > 1) * 2),
        (lambda x: Distance.apply(x, torch.ones_like(x)), lambda x: (x - 1) ** 2),
        (lambda x: x.sin() + Rounded.apply(x), lambda x: x.sin() + x.round()),
    ],
)
def test_functions_that_keep_constants_are_exact(inputs: list[Tensor], function: Callable, same: Callable) -> None:
    x, z, _ = inputs
    v = [rand(2, 3), rand(3, 2)]
    out, truth = (((f(x.exp()) @ z) ** 2) for f in (function, same))
    for product in (lambda y: hessian_vector_product(y.sum(), (x, z), v), lambda y: R_op(y, (x, z), v)):
        for ours, expected in zip(product(out), product(truth), strict=True):
            torch.testing.assert_close(ours, expected)


# Generalized Gauss-Newton matrix


def dense_ggn(model: Module, loss: Module, X: Tensor, y: Tensor) -> Tensor:
    params = [param for param in model.parameters() if param.requires_grad]
    output = model(X)
    rows = [torch.autograd.grad(entry, params, retain_graph=True, allow_unused=True, materialize_grads=True) for entry in output.flatten()]
    J = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    H = hessian(lambda f: loss(f, y), output.detach()).reshape(output.numel(), -1)
    return J.T @ H @ J


@pytest.mark.parametrize("N", [1, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss_cls", [CrossEntropyLoss, MSELoss])
def test_ggn_vector_product(N: int, reduction: str, loss_cls: type[Module]) -> None:
    model = Sequential(Linear(3, 4), Tanh(), Linear(4, 2)).double()
    model[0].bias.requires_grad_(False)
    model.register_parameter("unused", torch.nn.Parameter(rand(2)))
    X, loss = rand(N, 3), loss_cls(reduction=reduction)
    y = torch.randint(2, (N,)) if loss_cls is CrossEntropyLoss else rand(N, 2)
    params = [param for param in model.parameters() if param.requires_grad]
    v = [rand(*param.shape) for param in params]
    output = model(X)
    result = ggn_vector_product(loss(output, y), output, model, v)
    expected = dense_ggn(model, loss, X, y) @ torch.cat([part.flatten() for part in v])
    assert [part.shape for part in result] == [param.shape for param in params]
    torch.testing.assert_close(torch.cat([part.flatten() for part in result]), expected)
    assert not any(part.requires_grad for part in result)


def test_ggn_vector_product_of_several_outputs() -> None:
    """That of the outputs side by side."""
    first, second = Linear(3, 2).double(), Linear(3, 4).double()
    params, X, y = [*first.parameters(), *second.parameters()], rand(4, 3), torch.randint(2, (4,))
    v = [rand(*param.shape) for param in params]

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return CrossEntropyLoss()(a * b[:, :2].tanh(), y) + b.square().sum()

    outputs = first(X), second(X)
    joint = torch.cat(outputs, 1)
    result = ggn_vector_product_from_plist(loss(*outputs), outputs, params, v)
    expected = ggn_vector_product_from_plist(loss(joint[:, :2], joint[:, 2:]), joint, params, v)
    for part, other in zip(result, expected, strict=True):
        torch.testing.assert_close(part, other)
    with pytest.raises(ArgumentError, match=r"not computed from this output of shape \[4, 4\]"):
        ggn_vector_product_from_plist(CrossEntropyLoss()(outputs[0], y), outputs, params, v)


@pytest.mark.parametrize("used", [True, False])
def test_ggn_vector_product_where_an_output_is_computed_from_another(used: bool) -> None:
    """Autograd's gradient with respect to one contains that of the other: refused, and exact for copies."""
    first, second = Linear(3, 2).double(), Linear(2, 4).double()
    params, X = [*first.parameters(), *second.parameters()], rand(5, 3)
    v = [rand(*param.shape) for param in params]

    def forward(*params: Tensor) -> tuple[Tensor, Tensor]:
        code = (X @ params[0].T + params[1]).tanh()
        return code, code @ params[2].T + params[3]

    def loss(code: Tensor, rebuilt: Tensor) -> Tensor:
        return rebuilt.square().square().sum() + ((code * rebuilt[:, :2]).exp().sum() if used else 0)

    outputs = forward(*params)
    with pytest.raises(ArgumentError, match=r"(?s)Output 1 of shape \[5, 4\] was computed from output 0 of shape \[5, 2\].*clone"):
        ggn_vector_product_from_plist(loss(*outputs), outputs, params, v)
    with pytest.raises(ArgumentError, match="Output 1 .* was computed from output 0"):
        ggn_vector_product_from_plist(outputs[1].square().sum(), [outputs[1], outputs[1]], params, v)
    given = [part.clone() for part in outputs][0 if used else 1 :]
    result = ggn_vector_product_from_plist(loss(*given) if used else loss(rand(5, 2), *given), given, params, v)
    point = tuple(param.detach() for param in params)
    made, tangents = torch.autograd.functional.jvp(forward, point, tuple(v))
    curved = torch.autograd.functional.hvp(loss, made, tangents)[1]
    assert curved[0].any() == used
    for part, other in zip(result, torch.autograd.functional.vjp(forward, point, curved)[1], strict=True):
        torch.testing.assert_close(part, other)


def test_outputs_that_are_no_floating_point_numbers_have_no_derivative() -> None:
    x = rand(3).requires_grad_()
    product, none = R_op((x.square(), torch.arange(2)), x, torch.ones(3).double())
    torch.testing.assert_close(product, 2 * x.detach())
    assert torch.equal(none, torch.zeros(2))


def test_ggn_vector_product_of_an_output_without_a_graph() -> None:
    """It is a constant."""
    layer, X, constant = Linear(3, 2).double(), rand(4, 3), rand(4, 2)
    params, v, output = list(layer.parameters()), [rand(2, 3), rand(2)], layer(X)
    result, expected = (ggn_vector_product_from_plist((output * constant).square().sum(), given, params, v) for given in ([constant, output], output))
    torch.testing.assert_close(result, expected)
    with pytest.raises(ArgumentError, match="No output has a graph"):
        ggn_vector_product_from_plist((output * constant).square().sum(), constant, params, v)


def test_ggn_vector_product_from_plist_accepts_bare_vector_and_unused_parameters() -> None:
    model = Linear(3, 2).double()
    X, y, v, other = rand(4, 3), rand(4, 2), rand(2, 3), rand(5).requires_grad_()
    output = model(X)
    loss = MSELoss(reduction="sum")(output, y)
    expected = 2 * v @ X.T @ X  # the map is linear, and the loss has Hessian 2 I
    torch.testing.assert_close(ggn_vector_product_from_plist(loss, output, iter([model.weight]), v)[0], expected)
    torch.testing.assert_close(ggn_vector_product_from_plist(loss, output, [other, model.weight], [rand(5), v])[1], expected)
    assert torch.equal(ggn_vector_product_from_plist(loss, output, [other], [rand(5)])[0], torch.zeros(5, dtype=torch.float64))
    assert torch.equal(ggn_vector_product_from_plist(output.sum(), output, [model.weight], [v])[0], torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("extended_loss", [False, True])
@pytest.mark.parametrize("product", ["hvp", "hvp of the output", "jvp", "vjp", "ggn"])
def test_products_inside_of_a_context_leave_results_alone(product: str, extended_loss: bool) -> None:
    """They are no passes over a loss: nothing is computed, overwritten or deleted."""
    model, X, y = extend(Sequential(Linear(3, 4), Tanh(), Linear(4, 2)).double()), rand(4, 3), torch.randint(2, (4,))
    lossfunc = extend(CrossEntropyLoss()) if extended_loss else CrossEntropyLoss()
    params = list(model.parameters())
    v, w = [rand(*param.shape) for param in params], rand(4, 2)
    products = {
        "hvp": lambda output, loss: hessian_vector_product(loss, params, v),
        "hvp of the output": lambda output, loss: hessian_vector_product(loss, [output], [w]),
        "jvp": lambda output, loss: R_op(output, params, v),
        "vjp": lambda output, loss: L_op(output, params, w),
        "ggn": lambda output, loss: ggn_vector_product(loss, output, model, v),
    }
    output = model(X)
    outside = products[product](output, lossfunc(output, y))
    for extensions in ([BatchGrad()], [BatchGrad(), DiagGGNExact()]):
        clear(model)
        with backpack(*extensions):
            output = model(X)
            loss = lossfunc(output, y)
            products[product](output, loss)
            assert results(model) == {}
            loss.backward(retain_graph=True)
            before = results(model)
            found = products[product](output, loss)
            after = results(model)
        for name, fields in before.items():
            assert len(fields) == len(extensions)
            assert fields.keys() == after[name].keys() and all(after[name][field] is value for field, value in fields.items())
        assert all(torch.equal(one, other) for one, other in zip(found, outside, strict=True))


def test_vectors_have_to_fit(inputs: list[Tensor]) -> None:
    """Torch takes too many for a mistake nowhere, and too few somewhere inside."""
    x, z, _ = inputs
    y, (v_x, v_z, w) = map_a(x, z), (rand(2, 3), rand(3, 2), rand(2, 2))
    loss = (y**3).sum()
    for wrong in ([v_x], [v_x, v_z, v_z], [v_z, v_x], v_x):
        with pytest.raises(ArgumentError, match=r"v must have the shapes of the parameters, \[\[2, 3\], \[3, 2\]\], got"):
            ggn_vector_product_from_plist(loss, y, [x, z], wrong)
        with pytest.raises(ArgumentError, match=r"vs must have the shapes of xs, \[\[2, 3\], \[3, 2\]\], got"):
            R_op(y, [x, z], wrong)
    for wrong in (v_x, [w, w], []):
        with pytest.raises(ArgumentError, match=r"ws must have the shapes of ys, \[\[2, 2\]\], got"):
            L_op(y, [x, z], wrong)
    for iterables in (R_op(iter([y]), iter([x, z]), iter([v_x, v_z])), R_op(y, [x, z], [v_x, v_z])):
        torch.testing.assert_close(iterables[0], torch.autograd.functional.jvp(map_a, (x, z), (v_x, v_z))[1])
    for some in (L_op(iter([loss]), iter([x, z]), None), L_op([loss], (x, z), [None])):
        torch.testing.assert_close(some, torch.autograd.grad(loss, (x, z), retain_graph=True))


def test_mappings_are_refused(inputs: list[Tensor]) -> None:
    """Their keys are no tensors."""
    x, z, _ = inputs
    y, v = {"logits": map_a(x, z)}, rand(2, 3)
    for product in (
        lambda: ggn_vector_product_from_plist((y["logits"] ** 2).sum(), y, [x], v),
        lambda: R_op(y, x, v),
        lambda: L_op([y], x, None),
        lambda: hessian_vector_product((y["logits"] ** 2).sum(), x, {"x": v}),
    ):
        with pytest.raises(ArgumentTypeError, match=r"got one of type (dict, with a str|list, with a dict).*output\['logits'\]"):
            product()


def test_output_of_another_call_is_refused() -> None:
    """The loss does not depend on it, which would count as a curvature of zero."""
    model, X, y = Linear(3, 2).double(), rand(4, 3), rand(4, 2)
    v, (output, other) = [rand(2, 3), rand(2)], (model(X), model(X))
    loss = MSELoss()(output, y)
    with pytest.raises(ArgumentError, match=r"not computed from this output of shape \[4, 2\].*another call"):
        ggn_vector_product(loss, other, model, v)
    left, right = output.tensor_split(2, 1)
    with pytest.raises(ArgumentError, match=r"not computed from this output of shape \[4, 1\]"):
        ggn_vector_product((left**2).sum(), right, model, v)
    trainable = output.detach().requires_grad_()
    torch.testing.assert_close(ggn_vector_product_from_plist((trainable**2).sum(), trainable, [trainable], [output.detach()])[0], 2 * output.detach())
    for square in (lambda out: (out**2).sum(), lambda out: (out.relu_() ** 2).sum()):  # in place, too: the tensor that goes into the loss
        output = model(X)
        value = square(output)
        x = torch.cat([X, torch.ones(4, 1, dtype=X.dtype)], 1)
        active = (output != 0).to(X.dtype)
        expected = 2 * (active * (x @ torch.cat([v[0], v[1][:, None]], 1).T)).T @ x
        torch.testing.assert_close(torch.cat([part.reshape(2, -1) for part in ggn_vector_product(value, output, model, v)], 1), expected)


def test_second_derivatives_of_a_fused_weight_norm_are_refused() -> None:
    """Torch takes the norms for constants: its Hessian is not symmetric. With other axes it computes the norms by single operations."""
    x = torch.rand(3, 4)
    for dim in (0, None):
        layer = weight_norm(Linear(4, 2), dim=dim)
        loss, directions = layer(x).square().sum(), layer.parametrizations.weight.original1
        with pytest.raises(UnsupportedError, match="weight_norm") if dim == 0 else nullcontext():
            hessian_vector_product(loss, directions, torch.rand(2, 4))
    directions.requires_grad_(False)
    hessian_vector_product(layer(x).square().sum(), layer.bias, torch.rand(2))


NORMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layer": (lambda x, weight, bias: F.layer_norm(x, (3,), weight, bias), 3),
    "batch": (lambda x, weight, bias: F.batch_norm(x, torch.zeros(4), torch.ones(4), weight, bias), 4),
    "instance": (lambda x, weight, bias: F.instance_norm(x, weight=weight, bias=bias), 4),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalizations_with_a_bias_and_without_weight(name: str) -> None:
    """Torch takes the bias for a constant where it differentiates gradients; not so beside a weight, also a frozen one."""
    normalize, size = NORMS[name]
    x, weight, bias, v = torch.rand(2, 4, 3), torch.ones(size), torch.rand(size, requires_grad=True), torch.rand(size)
    out = normalize(x, weight, bias)
    product = hessian_vector_product(out.square().sum(), bias, v)[0]
    torch.testing.assert_close(product, 2 * out.numel() / size * v)
    torch.testing.assert_close(L_op(normalize(x, None, bias), bias, torch.ones_like(out))[0], torch.full((size,), out.numel() / size))
    out = normalize(x, None, bias)
    for multiply in (
        lambda: R_op(out, bias, v),
        lambda: hessian_vector_product(out.square().sum(), bias, v),
        lambda: ggn_vector_product_from_plist(out.square().sum(), out, [bias], [v]),
    ):
        with pytest.raises(UnsupportedError, match="bias were constant"):
            multiply()


@pytest.mark.parametrize(("operation", "way_out"), [("attention", "under torch.nn.attention.sdpa_kernel"), ("hardsigmoid", "with other operations")])
def test_gradients_that_torch_does_not_differentiate(operation: str, way_out: str) -> None:
    """The operation is named, and the way out works."""
    x, layer = torch.rand(2, 3, 4), Linear(4, 4)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None]),
        "hardsigmoid": F.hardsigmoid,
    }

    def value() -> Tensor:
        return functions[operation](layer(x)).square().sum()

    v = [torch.rand(4, 4), torch.rand(4)]
    with pytest.raises(UnsupportedError, match=f"no derivative of \\w*{operation}\\w*backward.*{way_out}"):
        hessian_vector_product(value(), list(layer.parameters()), v)
    with sdpa_kernel(SDPBackend.MATH):
        functions["hardsigmoid"] = lambda h: (h / 6 + 0.5).clamp(0, 1)
        hessian_vector_product(value(), list(layer.parameters()), v)


def composed_norm(x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()


NORMALIZED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "layer": (lambda x: F.layer_norm(x, x.shape[-1:]), False),
    "instance": (lambda x: F.instance_norm(x[:, None])[:, 0], False),
    "group": (lambda x: F.group_norm(x, 1), True),
    "single operations": (composed_norm, True),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_third_derivatives_through_normalizations(name: str) -> None:
    """Torch's are wrong for some: products of forces are refused, if they need them, and so are derivatives of products."""
    norm, right = NORMALIZED[name]
    torch.manual_seed(0)
    layer, head = Linear(4, 4).double(), Linear(4, 1).double()
    x, params = torch.randn(3, 4, dtype=torch.float64), [*layer.parameters(), *head.parameters()]
    v = [torch.randn_like(p) for p in params]

    def forces(norm: Callable[[Tensor], Tensor]) -> Tensor:
        at = x.clone().requires_grad_()
        return torch.autograd.grad(head(norm(layer(at)).tanh()).sum(), at, create_graph=True)[0]

    def plain(norm: Callable[[Tensor], Tensor]) -> Tensor:
        return head(norm(layer(x)).tanh()).square().sum()

    def slope(products: tuple[Tensor, ...]) -> Tensor:
        return torch.autograd.grad(sum(p.square().sum() for p in products), layer.weight)[0]

    for loss in (lambda norm: forces(norm).square().sum(), plain):
        products = hessian_vector_product(loss(composed_norm), params, v)
        if right or loss is plain:
            torch.testing.assert_close(hessian_vector_product(loss(norm), params, v), products)
        else:
            with pytest.raises(UnsupportedError, match="third derivatives"):
                hessian_vector_product(loss(norm), params, v)
    weight = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)  # behind them, they are constants
    expected = hessian_vector_product((forces(composed_norm) @ weight).cosh().sum(), weight, torch.ones_like(weight))
    torch.testing.assert_close(hessian_vector_product((forces(norm) @ weight).cosh().sum(), weight, torch.ones_like(weight)), expected)
    outputs = forces(composed_norm), forces(norm)
    expected = ggn_vector_product_from_plist(outputs[0].square().sum(), outputs[0], params, v)
    torch.testing.assert_close(ggn_vector_product_from_plist(outputs[1].square().sum(), outputs[1], params, v), expected)
    expected = slope(hessian_vector_product(plain(composed_norm), params, v, detach=False))
    products = hessian_vector_product(plain(norm), params, v, detach=False)
    if right:
        torch.testing.assert_close(slope(products), expected)
    else:
        with pytest.raises(DifferentiationError, match="third derivatives"):
            slope(products)


def test_inference_mode() -> None:
    """It makes no graph of gradients, which would count as zero."""
    layer, x = Linear(3, 2), torch.randn(4, 3)
    out, params = layer(x).tanh(), list(layer.parameters())
    loss, v = out.square().sum(), [torch.ones_like(p) for p in params]
    expected = L_op(out, params, torch.ones_like(out))
    with torch.inference_mode():
        for product in (lambda: hessian_vector_product(loss, params, v), lambda: R_op(out, params, v)):
            with pytest.raises(UnsupportedError, match="inference_mode"):
                product()
        torch.testing.assert_close(L_op(out, params, torch.ones_like(out)), expected)


def test_gauss_newton_product_behind_an_operation_with_wrong_second_derivatives() -> None:
    """It takes first derivatives of the model alone."""
    torch.manual_seed(0)
    layer, x = weight_norm(Linear(3, 2)).double(), torch.randn(4, 3, dtype=torch.float64)
    params = list(layer.parameters())
    v = [torch.randn_like(p) for p in params]
    out = layer(x)
    loss = out.tanh().square().sum()
    jacobians = [torch.stack([torch.autograd.grad(y, p, retain_graph=True)[0].flatten() for y in out.flatten()]) for p in params]
    moved = sum(j @ w.flatten() for j, w in zip(jacobians, v, strict=True))
    hessian = torch.autograd.functional.hessian(lambda z: z.tanh().square().sum(), out.detach()).reshape(out.numel(), -1)
    expected = [(j.T @ (hessian @ moved)).view_as(p) for j, p in zip(jacobians, params, strict=True)]
    torch.testing.assert_close(ggn_vector_product(loss, out, layer, v), expected)
    with pytest.raises(UnsupportedError, match="weight_norm"):
        hessian_vector_product(loss, params, v)


def test_gauss_newton_product_of_many_outputs() -> None:
    """As many as time steps; the product is that of all of them in one tensor."""
    torch.manual_seed(0)
    cell, head = RNNCell(2, 3).double(), Linear(3, 2).double()
    model, h = ModuleList([cell, head]), torch.zeros(4, 3, dtype=torch.float64)
    outputs = []
    for x in torch.randn(6, 4, 2, dtype=torch.float64):
        h = cell(x, h)
        outputs.append(head(h))
    v = [torch.randn_like(p) for p in model.parameters()]
    whole = torch.stack(outputs)
    loss, other = sum(out.cosh().sum() for out in outputs), whole.cosh().sum()
    torch.testing.assert_close(ggn_vector_product(loss, outputs, model, v), ggn_vector_product(other, whole, model, v))
    with pytest.raises(ArgumentError, match="was computed from output 0"):
        ggn_vector_product(loss + h.sum(), [h, outputs[-1]], model, v)


def largest_of_bags(table: Tensor) -> Tensor:
    return F.embedding_bag(torch.tensor([[0, 1], [2, 1]]), table, mode="max")


@pytest.mark.parametrize("function", [lambda x: torch.cdist(x, x + 1), F.pdist, largest_of_bags])
def test_operations_that_torch_differentiates_once(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"torch has no derivative of \w+_backward"):
        hessian_vector_product(function(x).square().sum(), [x], [torch.ones_like(x)])


def test_wrong_derivatives_between_parameters() -> None:
    """Where one is computed from another one, what lies between them is differentiated, too; what lies in front of both is not."""
    torch.manual_seed(0)
    first, second = weight_norm(Linear(3, 3)).double(), weight_norm(Linear(3, 2)).double()
    x = first(torch.randn(4, 3, dtype=torch.float64))
    y = second(x)
    loss = y.tanh().square().sum()
    v = torch.ones_like(x)
    expected = torch.autograd.functional.hvp(lambda z: second(z).tanh().square().sum(), x.detach(), v)[1]
    torch.testing.assert_close(hessian_vector_product(loss, x, v)[0], expected)
    parameter = second.parametrizations.weight.original1
    for params in ([parameter], [x, parameter], [y, parameter]):
        with pytest.raises(UnsupportedError, match="weight_norm"):
            hessian_vector_product(loss, params, [torch.ones_like(p) for p in params])


def test_outputs_that_are_complex() -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 3, dtype=torch.float64).unbind()
    factor = torch.tensor([1 + 2j, 0.5j, 3.0], dtype=torch.complex128)
    x.requires_grad_()
    torch.testing.assert_close(R_op([x * x * factor], [x], [v])[0], (2 * x * factor * v).detach())


def test_a_single_parameter_is_no_list_of_its_rows() -> None:
    layer, x = Linear(3, 4).double(), torch.randn(5, 3, dtype=torch.float64)
    output = layer(x).sigmoid()
    loss, v = output.square().sum(), torch.randn(4, 3, dtype=torch.float64)
    expected = ggn_vector_product_from_plist(loss, output, [layer.weight], [v])[0]
    torch.testing.assert_close(ggn_vector_product_from_plist(loss, output, layer.weight, v)[0], expected)
    assert expected.abs().min() > 0
    with pytest.raises(ArgumentError, match=r"v must have the shapes of the parameters, \[\[4, 3\]\], got \[\[3\], \[3\]"):
        ggn_vector_product_from_plist(loss, output, layer.weight, list(v))


def test_what_cannot_be_differentiated_is_named() -> None:
    layer = Linear(3, 4)
    layer.bias.requires_grad_(False)
    output = layer(torch.randn(5, 3))
    loss, weight, vectors = output.square().sum(), layer.weight, [torch.ones(4, 3), torch.ones(4)]
    frozen = r"with respect to tensors of shapes \[\[4\]\] that do not require gradients"
    for product in (
        lambda: hessian_vector_product(loss, layer.parameters(), vectors),
        lambda: R_op(output, [weight, layer.bias], vectors),
        lambda: L_op(output, layer.bias, output),
    ):
        with pytest.raises(ArgumentError, match=frozen):
            product()
    with pytest.raises(ArgumentError, match="with respect to no tensors"):
        hessian_vector_product(loss, [], [])
    for wrong in (
        lambda: hessian_vector_product(loss, [weight], [None]),
        lambda: ggn_vector_product(loss, (output, None), layer, vectors[:1]),
        lambda: ggn_vector_product_from_plist(loss, output, [weight, None], vectors),
    ):
        with pytest.raises(ArgumentTypeError, match="with a NoneType"):
            wrong()
