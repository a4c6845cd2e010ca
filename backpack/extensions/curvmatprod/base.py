"""Base of extensions that save a function instead of a tensor: a product with a block of a curvature matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.shape_check import apply_checked
from backpack.core.flow import Flow, Use
from backpack.core.owners import owners
from backpack.core.plan import Plan
from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.chains import MatProdFlow
from backpack.extensions.combining import Function
from backpack.extensions.rules import Rule, ValueRule
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.utils.errors import ArgumentError, ArgumentTypeError, UnsupportedError


class CurvatureMatrixProduct(SecondOrderBackpropExtension):
    """Saves a function that multiplies ``[V, *parameter]`` (or a bare ``[*parameter]``) with a diagonal block of a curvature matrix.

    The function reads the recorded tensors of the modules, which therefore live as long as it does, and their parameters: it refuses to go on when
    these have changed since the forward pass. Sequences of modules only.
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

    @property
    def flow(self) -> Flow:
        return MatProdFlow(self._curv_type)

    def rule_at(self, samples: int) -> Rule:
        return ValueRule()

    def check(self, plan: Plan) -> None:
        for unit in plan.units.values():
            rule = unit.call.derivatives
            for name, parameter in unit.parameters.items():
                if parameter in plan.uses and not isinstance(rule, GenericDerivatives) and not hasattr(rule, f"_{name}_jac_mat_prod"):
                    raise UnsupportedError(
                        f"{self.savefield} of {unit.call.path}.{name}: {type(rule).__name__} has no _{name}_jac_mat_prod, the product with the "
                        "Jacobian of the output with respect to this parameter. Implement it, use the products of backpack.hessianfree, or leave it "
                        "out: {exclude}.",
                        {parameter: owners[parameter]},
                    )

    def rule_key(self) -> Any:
        return ("product", self.flow)

    def finish(self, state: tuple[Use, str], parameter: Parameter) -> Callable[[Tensor], Tensor]:
        use, name = state
        rule, call, grad, output_product = use.call.derivatives, use.call.without_graph(), use.grad, use.value
        generic = isinstance(rule, GenericDerivatives)
        jacobian = partial(rule.param_jac_mat_prod, name) if generic else getattr(rule, f"_{name}_jac_mat_prod")

        def product(mat: Tensor) -> Tensor:
            call.refuse_changed()
            columns = output_product(jacobian(call, None, (grad,), mat))
            return rule._param_mjp(name, call, None, (grad,), columns)

        shape, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
        title = f"{self.savefield} of {call.path}.{name}"

        def checked(mat: Tensor) -> Tensor:
            if not isinstance(mat, Tensor) or mat.dtype != dtype or mat.device != device:
                got = f"{list(mat.shape)} of {mat.dtype} on {mat.device}" if isinstance(mat, Tensor) else f"{mat!r} of type {type(mat).__name__}"
                axes = ", ".join(map(str, shape))
                error = ArgumentError if isinstance(mat, Tensor) else ArgumentTypeError
                raise error(f"{title} multiplies tensors [V, {axes}] or [{axes}] of {dtype} on {device}, got {got}.")
            return apply_checked(product, mat, shape, shape, title)

        return checked
