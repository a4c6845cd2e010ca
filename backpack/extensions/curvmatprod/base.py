"""Base of extensions that save a function instead of a tensor: a product with a block of a curvature matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor
from torch.autograd import Function as AutogradFunction
from torch.nn import Parameter

from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.shape_check import apply_checked
from backpack.core.flow import Flow, Use
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.core.state import recording
from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.chains import MatProdFlow
from backpack.extensions.combining import Function
from backpack.extensions.rules import Rule, ValueRule
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.utils.differentiation import undifferentiable
from backpack.utils.errors import ArgumentError, ArgumentTypeError, UnsupportedError


class _Symmetric(AutogradFunction):
    """A product with a symmetric matrix, which is constant: it is its own derivative, and its own transposed."""

    @staticmethod
    def forward(mat: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        return product(mat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.product = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Symmetric.apply(grad, ctx.product), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], mat: Tensor, product: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        mat = mat.movedim(in_dims[0], 0)
        return _Symmetric.apply(mat.flatten(0, 1), product).unflatten(0, mat.shape[:2]), 0

    @staticmethod
    def jvp(ctx: Any, mat: Tensor, _: None) -> Tensor:
        return _Symmetric.apply(mat, ctx.product)


class CurvatureMatrixProduct(SecondOrderBackpropExtension):
    """Saves a function that multiplies ``[V, *parameter]`` (or a bare ``[*parameter]``) with a diagonal block of a curvature matrix.

    The function reads the recorded tensors of the modules, which therefore live as long as it does, and their parameters: it refuses to go on when
    these have changed since the forward pass. It can be differentiated with respect to what it multiplies; the matrix is constant. Sequences of
    modules only.
    """

    combination = Function()
    keeps_calls = True

    def __init__(self, savefield: str, curv_type: str, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the matrix.

        Args:
            savefield: Name of the attribute under which parameters carry the function.
            curv_type: One of ``Curvature.CHOICES``.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(savefield, exclude=exclude)
        self._curv_type = curv_type

    @cached_property
    def flow(self) -> Flow:
        """The product with the curvature matrix of what is behind."""
        return MatProdFlow(self._curv_type)

    def rule_at(self, samples: int) -> Rule:
        return ValueRule()

    def check(self, plan: Plan) -> None:
        for unit in plan.units.values():
            for name, parameter in unit.parameters.items():
                if parameter in plan.uses:
                    _jacobian(unit.call, name, parameter, self.savefield)

    def rule_key(self) -> Any:
        return ("product", self.flow)

    def finish(self, state: tuple[Use, str], parameter: Parameter) -> Callable[[Tensor], Tensor]:
        use, name = state
        rule, call, grad, output_product = use.call.derivatives, use.call.without_graph(), use.grad, use.value
        jacobian = _jacobian(call, name, parameter, self.savefield)

        def product(mat: Tensor) -> Tensor:
            call.refuse_changed()
            columns = output_product(jacobian(call, None, (grad,), mat))
            return rule._param_mjp(name, call, None, (grad,), columns)

        shape, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
        anchor = ref(parameter) if recording.connection is not None else None  # weak: the parameter carries the function
        title, reason = f"{self.savefield} of {call.path}.{name}", f"{type(self).__name__} is none of those that can be"

        def checked(mat: Tensor) -> Tensor:
            if not isinstance(mat, Tensor) or mat.dtype != dtype or mat.device != device:
                got = f"{list(mat.shape)} of {mat.dtype} on {mat.device}" if isinstance(mat, Tensor) else f"{mat!r} of type {type(mat).__name__}"
                axes = ", ".join(map(str, shape))
                error = ArgumentError if isinstance(mat, Tensor) else ArgumentTypeError
                raise error(f"{title} multiplies tensors [V, {axes}] or [{axes}] of {dtype} on {device}, got {got}.")
            result = apply_checked(lambda columns: _Symmetric.apply(columns, product), mat, shape, shape, title)
            at = None if anchor is None else anchor()
            return result if at is None else undifferentiable(result, at, title, reason)

        return _Product(checked, title)


class _Product:
    """What is saved: a function of what it multiplies, which lives in this process alone."""

    def __init__(self, product: Callable[[Tensor], Tensor], title: str) -> None:
        """Hold the function.

        Args:
            product: Multiplies and checks.
            title: What it is, for the message.
        """
        self._product, self._title = product, title

    def __call__(self, mat: Tensor) -> Tensor:
        return self._product(mat)

    def __repr__(self) -> str:
        return f"<{self._title}>"

    def __deepcopy__(self, memo: dict) -> _Product:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            f"{self._title} is a function of tensors that the forward pass has left, and no part of a file or of another process. Delete the "
            "results first: backpack.clear(model), or save model.state_dict(), which has none."
        )


def _jacobian(call: Any, name: str, parameter: Parameter, quantity: str) -> Callable[..., Tensor]:
    """Find the product with the Jacobian of a layer's output with respect to a parameter.

    Args:
        call: The record of its execution.
        name: Name of the parameter.
        parameter: The parameter.
        quantity: For the message.

    Returns:
        Takes the record, gradients with respect to inputs and output, and ``[V, *parameter]``.

    Raises:
        UnsupportedError: If the layer's derivatives do not have it.
    """
    rule = call.derivatives
    if isinstance(rule, GenericDerivatives):
        return partial(rule.param_jac_mat_prod, name)
    if not hasattr(rule, f"_{name}_jac_mat_prod"):
        raise UnsupportedError(
            f"{quantity} of {call.path}.{name}: {type(rule).__name__} has no _{name}_jac_mat_prod, the product with the Jacobian of the output with "
            "respect to this parameter. Implement it, use the products of backpack.hessianfree, or leave it out: {exclude}.",
            owners.about([parameter]),
        )
    return getattr(rule, f"_{name}_jac_mat_prod")
