"""Module extensions to build upon: a base for each family of quantities.

The library reads its own quantities off flows. Here the same is said in the protocol of module extensions, for extensions that users assemble:
what is carried goes from ``backpropagate`` to ``backpropagate``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Module

from backpack.core.calls import ModuleCall
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.own_names import hidden, reading_own
from backpack.core.derivatives.records import number_of
from backpack.core.flow import Use
from backpack.core.recording import last_call, reading
from backpack.core.samples import plain_layout
from backpack.core.slots import Slot
from backpack.extensions.chains import AverageFlow, MatProdFlow
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.base import CurvatureMatrixProduct
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.flows import Source, require_linear
from backpack.extensions.loss_scale import scaled
from backpack.extensions.module_extension import Grads, ModuleExtension
from backpack.extensions.rules import signed_matrices
from backpack.extensions.secondorder.hbp import HBP
from backpack.extensions.secondorder.hbp_options import BackpropStrategy, LossHessianStrategy
from backpack.extensions.signed_flow import SignedSqrtFlow
from backpack.utils.errors import BackpackError, UnsupportedError
from backpack.utils.subsampling import subsample

Names = Sequence[str] | None


class _Execution:
    """The record of an execution as derivatives read it, which need not be those of the registry; of what they do not need, maybe only the shape."""

    def __init__(self, call: ModuleCall, derivatives: BaseDerivatives) -> None:
        self._call, self.derivatives = call, derivatives

    def without_graph(self) -> _Execution:
        """Copy the record, see ``ModuleCall.without_graph``.

        Returns:
            A record that shares the tensors.
        """
        return _Execution(self._call.without_graph(), self.derivatives)

    def __getattr__(self, name: str) -> Any:
        if (number := number_of(name)) is None:
            return getattr(self._call, name)
        kind, slots = ("output", self._call.outputs) if number < 0 else ("input", self._call.inputs[number:])
        slot = slots[0] if slots and isinstance(slots[0], Slot) else None
        needed = slot is None or kind in self.derivatives.needs(self._call)
        try:
            if needed or not _says_what_it_needs(type(self.derivatives)):
                with reading({self._call.module: self._call}):
                    return getattr(self._call.module, name)
            value = self._call.tensor(name)  # if it is at hand: a dropout that takes part reads more than one that does not
        except (AttributeError, BackpackError):
            if needed:
                raise
            value = None
        return slot.like() if value is None else value


def _says_what_it_needs(cls: type[BaseDerivatives]) -> bool:
    """Tell whether ``keeps`` is about a class itself: what users derive from a class of the library may read more than that does.

    Args:
        cls: Class of derivatives.

    Returns:
        Whether it is.
    """
    return cls.__module__.startswith("backpack.") or "keeps" in vars(cls) or "needs" in vars(cls)


def _execution(module: Module, derivatives: BaseDerivatives) -> tuple[Any, BaseDerivatives]:
    """Return what derivatives read, and derivatives that read it.

    Args:
        module: The module of which a module extension is asked something.
        derivatives: Its derivatives.

    Returns:
        The record of its execution, and derivatives for which names that the module uses for something else stand for that; the module, and the
        derivatives themselves, if it has none.
    """
    call = last_call(module)
    if call is None:
        return module, derivatives
    rule = reading_own(derivatives, hidden(call.module, call))
    return _Execution(call, rule), rule


def _define(extension: ModuleExtension, params: Names, quantity: Callable[..., Any]) -> None:
    """Define the methods for parameters that neither the class nor the instance has.

    Args:
        extension: The module extension.
        params: Names of the parameters.
        quantity: Takes the name of the parameter, followed by the arguments of the method.
    """
    for name in params or ():
        if getattr(extension, name, None) is None:
            setattr(extension, name, partial(quantity, name))


# --- first order ------------------------------------------------------------------------------------------------------------------------------


class _OfGradients(FirstOrderModuleExtension):
    """A function of the per-sample gradients ``[N, *parameter]``."""

    def __init__(self, derivatives: BaseDerivatives | None, params: Names = None) -> None:
        """Choose the derivatives.

        Args:
            derivatives: Derivatives of the module; ``None`` if there is a method for each parameter.
            params: Names of the parameters; a method that is not there is made from the derivatives.
        """
        self.derivatives = derivatives
        if derivatives is not None:
            _define(self, params, self._quantity)
        super().__init__(params)

    def _quantity(self, name: str, ext: Any, module: Module, g_inp: Grads, g_out: Grads, _: Any) -> Tensor:
        (at, rule), chosen = _execution(module, self.derivatives), ext.get_subsampling()
        grad = subsample(g_out[0], subsampling=chosen)
        return self._reduce(rule.param_mjp(name, at, g_inp, g_out, grad, sum_batch=False, subsampling=chosen))

    @abstractmethod
    def _reduce(self, gradients: Tensor) -> Tensor:
        """Make the quantity.

        Args:
            gradients: ``[N, *parameter]``.
        """


class BatchGradBase(_OfGradients):
    """Per-sample gradients ``[N, *parameter]``."""

    def _reduce(self, gradients: Tensor) -> Tensor:
        return gradients


class BatchL2Base(_OfGradients):
    """Squared norms of per-sample gradients ``[N]``."""

    def __init__(self, params: Names, derivatives: BaseDerivatives | None = None) -> None:
        super().__init__(derivatives, params)

    def _reduce(self, gradients: Tensor) -> Tensor:
        return gradients.reshape(len(gradients), gradients.shape[1:].numel()).square().sum(1)


class SGSBase(_OfGradients):
    """Sum of squared per-sample gradients ``[*parameter]``."""

    N_axis: ClassVar[int] = 0

    def _reduce(self, gradients: Tensor) -> Tensor:
        return gradients.square().sum(self.N_axis)


class GradBaseModule(_OfGradients):
    """The gradient ``[*parameter]``."""

    def _reduce(self, gradients: Tensor) -> Tensor:
        return gradients.sum(0)


class VarianceBaseModule(FirstOrderModuleExtension):
    """Variance of per-sample gradients ``[*parameter]``, from their sum and the sum of their squares."""

    def __init__(self, params: Names, grad_extension: ModuleExtension, sgs_extension: ModuleExtension) -> None:
        """Choose where the sums come from.

        Args:
            params: Names of the parameters; a method that is not there is made from the two sums.
            grad_extension: Has a method for each parameter that returns the sum.
            sgs_extension: Has a method for each parameter that returns the sum of squares.
        """
        self.grad_ext, self.sgs_ext = grad_extension, sgs_extension
        _define(self, params, self._quantity)
        super().__init__(params)

    @staticmethod
    def _variance_from(grad: Tensor, sgs: Tensor, N: int) -> Tensor:
        return sgs / N - (grad / N).square()

    def _quantity(self, name: str, ext: Any, module: Module, g_inp: Grads, g_out: Grads, bp: Any) -> Tensor:
        grad, squares = (getattr(part, name)(ext, module, g_inp, g_out, bp) for part in (self.grad_ext, self.sgs_ext))
        return self._variance_from(grad, squares, len(subsample(g_out[0], subsampling=ext.get_subsampling())))


# --- second order -----------------------------------------------------------------------------------------------------------------------------


class MatToJacMat(ModuleExtension):
    """Carries columns ``[V, N, *]``, or a list of such, through modules by transposed Jacobians; losses start them."""

    def __init__(self, derivatives: BaseDerivatives, params: Names = None) -> None:
        """Choose the derivatives.

        Args:
            derivatives: Derivatives of the module.
            params: Names of parameters for which a method exists.
        """
        self.derivatives = derivatives
        super().__init__(params)

    def backpropagate(self, extension: Any, module: Module, g_inp: Grads, g_out: Grads, bpQuantities: Any) -> Any:  # noqa: N803
        """Map columns from the output to the input.

        Args:
            extension: The extension; of a loss it says ``get_loss_hessian_strategy()``, and where this is sampling, ``get_num_mc_samples()``.
            module: The module.
            g_inp: Gradients with respect to the inputs.
            g_out: Gradient with respect to the output.
            bpQuantities: Columns ``[V, N, *output]``, or a list of them; ``None`` for a loss.

        Returns:
            Columns ``[V, N, *input0]``, or a list of them. With subsampling ``N`` counts the chosen samples.
        """
        chosen, (at, rule) = extension.get_subsampling(), _execution(module, self.derivatives)
        if not self.derivatives.is_loss:
            product = partial(rule.jac_t_mat_prod, at, g_inp, g_out, subsampling=chosen)
            return [product(columns) for columns in bpQuantities] if isinstance(bpQuantities, list) else product(bpQuantities)
        if extension.get_loss_hessian_strategy() == LossHessianStrategy.SAMPLING:
            mat = rule._sqrt_hessian_sampled(at, None, g_out, mc_samples=extension.get_num_mc_samples(), subsampling=chosen)
        else:
            mat = rule._sqrt_hessian(at, None, g_out, subsampling=chosen)
        return scaled(mat, at, g_out[0], chosen)

    def _columns(self, name: str, ext: Any, module: Module, g_inp: Grads, g_out: Grads, columns: Tensor) -> Tensor:
        at, rule = _execution(module, self.derivatives)
        return rule.param_mjp(name, at, g_inp, g_out, columns, sum_batch=False, subsampling=ext.get_subsampling())


class SqrtGGNBaseModule(MatToJacMat):
    """Columns of the square root of the generalized Gauss-Newton ``[V, N, *parameter]``."""

    def __init__(self, derivatives: BaseDerivatives, params: Names = None) -> None:
        _define(self, params, self._columns)
        super().__init__(derivatives, params)


class DiagGGNBaseModule(MatToJacMat):
    """Diagonal of the generalized Gauss-Newton: ``[*parameter]``, or for each sample ``[N, *parameter]``."""

    def __init__(self, derivatives: BaseDerivatives, params: Names = None, sum_batch: bool | None = None) -> None:
        """Choose the derivatives.

        Args:
            derivatives: Derivatives of the module.
            params: Names of the parameters.
            sum_batch: Make the methods for parameters that are not there, with or without the sum over samples; ``None`` to make none.
        """
        if sum_batch is not None:
            _define(self, params, self._diagonal)
        self._axes = [0, 1] if sum_batch else [0]
        super().__init__(derivatives, params)

    def _diagonal(self, *args: Any) -> Tensor:
        return self._columns(*args).square().sum(self._axes)


class DiagHBaseModule(MatToJacMat):
    """Diagonal of the Hessian. Carries ``{"matrices": [[V, N, *], ...], "signs": [1.0 or -1.0, ...]}``."""

    PLUS: ClassVar[float] = 1.0
    MINUS: ClassVar[float] = -1.0

    def __init__(self, derivatives: BaseDerivatives, params: Names = None, sum_batch: bool = True) -> None:
        """Choose the derivatives.

        Args:
            derivatives: Derivatives of the module.
            params: Names of the parameters; a method that is not there is made from the derivatives.
            sum_batch: Sum over samples in these methods.
        """
        _define(self, params, self._diagonal)
        self._axes = [0, 1] if sum_batch else [0]
        super().__init__(derivatives, params)

    def backpropagate(self, extension: Any, module: Module, g_inp: Grads, g_out: Grads, bpQuantities: Any) -> Any:  # noqa: N803
        flow, (at, _), chosen = SignedSqrtFlow(), _execution(module, self.derivatives), extension.get_subsampling()
        if self.derivatives.is_loss:
            carried, born = {"matrices": [], "signs": []}, flow.start(at, g_out[0], plain_layout(len(at.input0)))
        else:
            carried = bpQuantities | {"matrices": super().backpropagate(extension, module, g_inp, g_out, bpQuantities["matrices"])}
            residual = flow.residual_at(at, g_out[0], plain_layout(len(g_out[0])))
            born = {} if residual is None else {residual[0]: residual[1][:]}
        new = signed_matrices(born)
        new["matrices"] = [subsample(mat, 1, chosen) for mat in new["matrices"]]
        return {key: [*carried[key], *new[key]] for key in new}

    def _diagonal(self, name: str, ext: Any, module: Module, g_inp: Grads, g_out: Grads, bp: dict[str, list]) -> Tensor:
        parts = [self._columns(name, ext, module, g_inp, g_out, mat).square().sum(self._axes) for mat in bp["matrices"]]
        return sum(sign * part for sign, part in zip(bp["signs"], parts, strict=True))


class HBPBaseModule(MatToJacMat):
    """Kronecker factors, with what the extension's ``get_backprop_strategy()`` carries: columns, or one averaged matrix ``[D, D]``."""

    def __init__(self, derivatives: BaseDerivatives, params: Names = None) -> None:
        _define(self, params, self._factors)
        super().__init__(derivatives, params)

    def backpropagate(self, extension: Any, module: Module, g_inp: Grads, g_out: Grads, bpQuantities: Any) -> Any:  # noqa: N803
        if not BackpropStrategy.is_batch_average(extension.get_backprop_strategy()):
            return super().backpropagate(extension, module, g_inp, g_out, bpQuantities)
        return _carry(AverageFlow(extension.get_curv_type()), _execution(module, self.derivatives)[0], g_out, bpQuantities)

    def _factors(self, name: str, ext: Any, module: Module, g_inp: Grads, g_out: Grads, carried: Tensor) -> list[Tensor]:
        if not isinstance(ext, HBP):
            raise UnsupportedError(f"{type(self).__name__} makes Kronecker factors for HBP and its subclasses, not for {type(ext).__name__}.")
        average, samples = BackpropStrategy.is_batch_average(ext.get_backprop_strategy()), len(g_out[0])
        value, parameter = carried if average else {Source(0): carried}, getattr(module, name)
        use = Use(_execution(module, self.derivatives)[0], {name: parameter}, value, g_out[0], plain_layout(samples))
        return HBP.finish(ext, ext.rule_at(samples).at_call(use, name), parameter).value


class HBPLoss(HBPBaseModule):
    """Start of Hessian backpropagation: exact, sampled or summed, as the extension says."""


class GGNMPBase(MatToJacMat):
    """Functions that multiply with the generalized Gauss-Newton: that of a module's output is carried, that of a parameter saved."""

    CURVATURE: ClassVar[str] = Curvature.GGN

    def __init__(self, derivatives: BaseDerivatives, params: Names = None) -> None:
        _define(self, params, self._product)
        super().__init__(derivatives, params)

    def backpropagate(self, extension: Any, module: Module, g_inp: Grads, g_out: Grads, bpQuantities: Any) -> Any:  # noqa: N803
        return _carry(MatProdFlow(self._curvature(extension)), _execution(module, self.derivatives)[0], g_out, bpQuantities)

    def _curvature(self, extension: Any) -> str:
        return self.CURVATURE

    def _product(self, name: str, ext: Any, module: Module, g_inp: Grads, g_out: Grads, carried: Any) -> Callable[[Tensor], Tensor]:
        parameter, (at, _) = getattr(module, name), _execution(module, self.derivatives)
        if Curvature.require_residual(self._curvature(ext)):
            require_linear(at, name, ext.savefield, parameter)
        use = Use(at, {name: parameter}, carried, g_out[0], plain_layout(len(g_out[0])))
        return CurvatureMatrixProduct.finish(ext, (use, name), parameter)


class HMPBase(GGNMPBase):
    """Functions that multiply with the Hessian."""

    CURVATURE: ClassVar[str] = Curvature.HESSIAN


class PCHMPBase(GGNMPBase):
    """Functions that multiply with the positive-curvature Hessian, modified as the extension's ``get_modification_mode()`` says."""

    def _curvature(self, extension: Any) -> str:
        return f"pch-{extension.get_modification_mode()}"


def _carry(flow: AverageFlow | MatProdFlow, at: Any, g_out: Grads, carried: Any) -> Any:
    grad = g_out[0]
    if at.derivatives.is_loss:
        return flow.start(at, grad, plain_layout(len(at.input0)))
    return flow.through(at, carried, grad, plain_layout(len(grad)))
