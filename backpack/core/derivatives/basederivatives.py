"""What derivatives of a module offer: products with Jacobians and Hessians, for modules, modules with parameters and losses.

A public product checks shapes and accepts one vector in place of a matrix; the underscore method of the same name is mathematics only and is
what a rule implements and what the engine calls. Arguments mean the same everywhere:

- ``module``: a module that carries the recorded ``input0`` and ``output``, or the record of one execution, which offers these, too.
- ``g_inp``, ``g_out``: tuples of gradients with respect to inputs and outputs, or ``None`` where only Jacobians are asked for.
- ``mat``: a matrix of ``V`` columns, ``[V, ...]``, or in the public methods one vector ``[...]``.
- ``subsampling``: indices of the samples that ``mat`` is about, which then has ``len(subsampling)`` of them; ``None`` means all, duplicates
  count. Samples lie on axis 0 of input and output, and ``N`` below is their number in ``mat``.

A matrix of a wrong shape raises ``ShapeError``, a product that a class does not have ``UnsupportedError``.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar
from warnings import warn

from torch import Size, Tensor
from torch.nn import Module

from backpack.core.derivatives.records import shapes_of
from backpack.core.derivatives.shape_check import apply_checked, subsampled
from backpack.utils.errors import ArgumentError, LossValueError, ShapeError, UnsupportedError
from backpack.utils.numbers import as_integer

Grads = tuple[Tensor | None, ...] | None
Samples = Sequence[int] | None


class BaseDerivatives(ABC):  # noqa: B024 (each product is optional)
    """Products with the Jacobian and the Hessian of a module's output with respect to its first input.

    Attributes:
        keeps: Which recorded tensors the products read, a subset of ``{"input", "output"}``; of the others only shape, dtype and device.
        is_loss: Whether the module is a loss function.
        least_axes: Least number of axes of a mini-batch, one more for each of the ``feature_axes`` beyond the first; with fewer, it is one sample.
        params: Names of the parameters that have a rule.
        any_forward: The rule asks the module's own ``forward``, so that subclasses that replace it inherit the rule all the same.
        any_batch_axis: The rule stays right if the axes in front of the ``feature_axes`` (the last, by default) are permuted, in the recorded
            tensors and the matrices alike, so that any of them may be the sample axis.
        same_jacobian: The Jacobian is the same matrix for every sample.
        reads_maxima: The products read the positions of maxima, ``maxima``, which autograd may have saved.
    """

    keeps: ClassVar[frozenset[str]] = frozenset({"input", "output"})
    any_batch_axis: ClassVar[bool] = False
    any_forward: ClassVar[bool] = False
    least_axes: ClassVar[int] = 1
    is_loss: ClassVar[bool] = False
    params: ClassVar[tuple[str, ...]] = ()
    same_jacobian: ClassVar[bool] = False
    reads_maxima: ClassVar[bool] = False

    def applies(self, module: Module) -> bool:
        """Tell whether the products hold for this execution of the module.

        Returns:
            ``False`` where the map is not covered by the rule, for instance a random one.
        """
        return True

    def feature_axes(self, module: Module) -> int:
        """Return the number of axes at the end of the output that are not to be permuted, where ``any_batch_axis`` holds."""
        return 1

    def needs(self, module: Module) -> frozenset[str]:
        """Tell which recorded tensors the products of this module read.

        Returns:
            ``keeps``, unless a rule chooses by the module's options.
        """
        return self.keeps

    def jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Multiply by the Jacobian of the output with respect to the input.

        Returns:
            ``[V, *output]`` from ``mat`` ``[V, *input0]``.
        """
        product = partial(self._jac_mat_prod, module, g_inp, g_out)
        return apply_checked(product, mat, *shapes_of(module), self._title("jac_mat_prod", module))

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        raise self._missing("_jac_mat_prod", module)

    def jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        """Multiply by the transposed Jacobian of the output with respect to the input.

        Returns:
            ``[V, *input0]`` from ``mat`` ``[V, *output]``.
        """
        product = partial(self._jac_t_mat_prod, module, g_inp, g_out, subsampling=subsampling)
        gives, takes = (subsampled(shape, subsampling) for shape in shapes_of(module))
        return apply_checked(product, mat, takes, gives, self._title("jac_t_mat_prod", module))

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        raise self._missing("_jac_t_mat_prod", module)

    def ea_jac_t_mat_jac_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Multiply by the Jacobians from both sides and average over samples, ``1/N sum_n J_n^T mat J_n``.

        This default applies the transposed Jacobian twice, to the columns of ``mat`` and to the rows of the result.

        Returns:
            ``[D_in, D_in]`` from ``mat`` ``[D_out, D_out]``, over the flattened input and output of one sample.
        """
        samples = [0] if self.same_jacobian else None
        num_samples = 1 if self.same_jacobian else module.output.shape[0]

        def jac_t(columns: Tensor) -> Tensor:  # [V, N, D_out] -> [V, N, D_in]
            shaped = columns.reshape(columns.shape[0], num_samples, *module.output.shape[1:])
            product = self._jac_t_mat_prod(module, g_inp, g_out, shaped, subsampling=samples)
            return product.reshape(columns.shape[0], num_samples, module.input0.shape[1:].numel())

        jac_t_mat = jac_t(mat.T.unsqueeze(1).expand(-1, num_samples, -1))
        product = jac_t(jac_t_mat.permute(2, 1, 0))  # in this order it need not be transposed
        return product.squeeze(1) if self.same_jacobian else product.mean(1)

    def hessian_is_zero(self, module: Module) -> bool:
        """Tell whether the second derivative of the output with respect to the input vanishes (almost everywhere).

        Raises:
            UnsupportedError: If the rule does not say.
        """
        raise self._missing("hessian_is_zero", module)

    def hessian_is_diagonal(self, module: Module) -> bool:
        """Tell whether only second derivatives with respect to one and the same input entry occur.

        Raises:
            UnsupportedError: If the rule does not say.
        """
        raise self._missing("hessian_is_diagonal", module)

    def hessian_diagonal(self, module: Module, g_in: Grads, g_out: Grads) -> Tensor:
        """Diagonal ``[*input0]`` of the residual ``sum_k Hess(z_k) dL/dz_k``, already multiplied by ``g_out[0] = dL/dz``.

        Raises:
            UnsupportedError: If no rule exists.
        """
        raise self._missing("hessian_diagonal", module)

    def hessian_is_psd(self) -> bool:
        """Tell whether the Hessian is positive semi-definite for every input.

        Raises:
            UnsupportedError: If the rule does not say.
        """
        raise UnsupportedError(f"{type(self).__name__} does not say whether its Hessian is positive semi-definite: implement hessian_is_psd.")

    def residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Multiply by the residual ``sum_k Hess(z_k) dL/dz_k`` of each sample.

        Returns:
            ``[V, *input0]`` from ``mat`` ``[V, *input0]``.
        """
        product = partial(self._residual_mat_prod, module, g_inp, g_out)
        shape = module.input0.shape
        return apply_checked(product, mat, shape, shape, self._title("residual_mat_prod", module))

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        raise self._missing("_residual_mat_prod", module)

    @staticmethod
    def _reshape_like(mat: Tensor, shape: Sequence[int]) -> Tensor:
        return mat.reshape(-1, *shape)

    @classmethod
    def reshape_like_input(cls, mat: Tensor, module: Module, subsampling: Samples = None) -> Tensor:
        """Give each column of a matrix the shape of the input.

        Returns:
            ``[V, *input0]``.
        """
        return cls._reshape_like(mat, subsampled(module.input0.shape, subsampling))

    @classmethod
    def reshape_like_output(cls, mat: Tensor, module: Module) -> Tensor:
        """Give each column of a matrix the shape of the output.

        Returns:
            ``[V, *output]``.
        """
        return cls._reshape_like(mat, module.output.shape)

    def _title(self, product: str, module: Module) -> str:
        return f"{type(self).__name__}.{product} (input {list(module.input0.shape)}, output {list(module.output.shape)})"

    def _missing(self, method: str, module: Module) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__} has no {method}, asked for {module}. Implement it, or use GenericDerivatives, which has all products."
        )


class BaseParameterDerivatives(BaseDerivatives):
    """Products with the Jacobians of the output with respect to the parameters as well.

    A rule implements ``_{name}_jac_t_mat_prod(module, g_inp, g_out, mat, sum_batch=True, subsampling=None)`` for each parameter; ``params``
    follows from these methods.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the names of the parameters that have a rule."""
        super().__init_subclass__(**kwargs)
        suffix = "_jac_t_mat_prod"
        cls.params = tuple(sorted(name[1 : -len(suffix)] for name in dir(cls) if name.startswith("_") and name.endswith(suffix) and name != suffix))

    def param_mjp(
        self, param_str: str, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        """Multiply by the transposed Jacobian of the output with respect to a parameter.

        Returns:
            ``[V, *param]`` from ``mat`` ``[V, *output]``; ``[V, N, *param]`` with the samples kept apart if not ``sum_batch``.
        """
        product = partial(self._param_mjp, param_str, module, g_inp, g_out, sum_batch=sum_batch, subsampling=subsampling)
        takes = subsampled(module.output.shape, subsampling)
        gives = (*(() if sum_batch else takes[:1]), *self._parameter(module, param_str).shape)
        return apply_checked(product, mat, takes, gives, self._title(f"param_mjp for {param_str}", module))

    def _param_mjp(
        self, param_str: str, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        rule = getattr(self, name := f"_{param_str}_jac_t_mat_prod", None)
        if rule is None:
            raise self._missing(name, module)
        product = partial(rule, module, g_inp, g_out, sum_batch=sum_batch, subsampling=subsampling)
        if type(self).__module__.startswith("backpack."):
            return product(mat)
        gives = (*(() if sum_batch else mat.shape[1:2]), *self._parameter(module, param_str).shape)  # of a user
        return apply_checked(product, mat, mat.shape[1:], gives, self._title(name, module))

    def weight_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Multiply by the Jacobian of the output with respect to the weight.

        Returns:
            ``[V, *output]`` from ``mat`` ``[V, *weight]``.
        """
        product = partial(self._weight_jac_mat_prod, module, g_inp, g_out)
        return apply_checked(product, mat, self._parameter(module, "weight").shape, module.output.shape, self._title("weight_jac_mat_prod", module))

    def _weight_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        raise self._missing("_weight_jac_mat_prod", module)

    def bias_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Multiply by the Jacobian of the output with respect to the bias.

        Returns:
            ``[V, *output]`` from ``mat`` ``[V, *bias]``.
        """
        product = partial(self._bias_jac_mat_prod, module, g_inp, g_out)
        return apply_checked(product, mat, self._parameter(module, "bias").shape, module.output.shape, self._title("bias_jac_mat_prod", module))

    def _bias_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        raise self._missing("_bias_jac_mat_prod", module)

    def _parameter(self, module: Module, name: str) -> Tensor:
        parameter = getattr(module, name, None)
        if not isinstance(parameter, Tensor):
            raise ArgumentError(f"{type(self).__name__}: {module} has no parameter {name!r}.")
        return parameter


class BaseLossDerivatives(BaseDerivatives):
    """Second derivatives of a scalar loss with respect to its first input, the prediction ``[N, *features]``.

    The public methods take the loss alone, unscaled: they raise ``LossValueError`` if it is no scalar, and warn if the incoming gradient is
    not one. The underscore methods do not look at ``g_out``; scaling is up to the caller.
    """

    is_loss = True

    def hessian_is_psd(self) -> bool:
        return True

    def hessian_is_psd_at(self, module: Module) -> bool:
        """Return whether the Hessian is known to be positive semi-definite for the recorded inputs, weights and targets."""
        return self.hessian_is_psd()

    def _verify_support(self, module: Module) -> None:
        """Refuse hyper-parameters and inputs for which the formulas do not hold.

        Raises:
            ShapeError: If the input has no axis for the samples.
        """
        if module.input0.dim() < self.least_axes:
            raise ShapeError(
                f"{module} got an input of shape {list(module.input0.shape)}, but needs {self.least_axes} axes or more, samples on axis 0. Add a "
                "batch axis of length 1 to an unbatched input, and to its target."
            )

    def sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        """Symmetric factor of the loss Hessian.

        Returns:
            ``[V, N, *features]``. For each ``n``, ``S[:, n]^T S[:, n]`` is the Hessian of the loss in sample ``n``, its ``reduction``
            included.
        """
        self._check_scalar(module, g_out)
        return self._sqrt_hessian(module, g_inp, g_out, subsampling=subsampling)

    def _sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads, subsampling: Samples = None) -> Tensor:
        raise self._missing("_sqrt_hessian", module)

    def _signed_sqrt_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> tuple[Tensor, Tensor | None]:
        """Symmetric factor of a loss Hessian that may have negative eigenvalues.

        Returns:
            ``S [V, N, *features]`` and signs ``s [V, N]`` (``None``: positive); the Hessian is ``S[:, n]^T diag(s[:, n]) S[:, n]``.
        """
        return self._sqrt_hessian(module, g_inp, g_out), None

    def least_columns(self, shape: Size) -> int:
        """Return the number of columns of ``_least_sqrt_hessian`` for an input of this shape: one for each entry of a sample, by default."""
        return shape[1:].numel()

    def _least_sqrt_hessian(self, module: Module, g_out: Grads, signed: bool) -> tuple[Tensor, Tensor | None]:
        """Return what ``_signed_sqrt_hessian`` does, or ``_sqrt_hessian`` without signs; but any factor will do, one with few columns best."""
        return self._signed_sqrt_hessian(module, None, g_out) if signed else (self._sqrt_hessian(module, None, g_out), None)

    def sqrt_hessian_sampled(self, module: Module, g_inp: Grads, g_out: Grads, mc_samples: int = 1, subsampling: Samples = None) -> Tensor:
        """Unbiased estimate of the symmetric factor of the loss Hessian, from gradients at sampled targets.

        Returns:
            ``[M, N, *features]`` for ``M = mc_samples``, divided by ``sqrt(M)``. For each ``n`` the expectation of ``S[:, n]^T S[:, n]`` is
            the Hessian of the loss in sample ``n``, its ``reduction`` included.

        Raises:
            ArgumentError: If ``mc_samples`` is no positive integer.
        """
        self._check_scalar(module, g_out)
        if as_integer(mc_samples, 1) is None:
            raise ArgumentError(f"{self._title('sqrt_hessian_sampled', module)}: mc_samples must be a positive integer, got {mc_samples!r}.")
        return self._sqrt_hessian_sampled(module, g_inp, g_out, mc_samples=mc_samples, subsampling=subsampling)

    def _sqrt_hessian_sampled(self, module: Module, g_inp: Grads, g_out: Grads, mc_samples: int = 1, subsampling: Samples = None) -> Tensor:
        raise self._missing("_sqrt_hessian_sampled", module)

    def make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        """Function that multiplies by the loss Hessian.

        Returns:
            Maps ``[V, *input0]`` to ``[V, *input0]``.
        """
        self._check_scalar(module, g_out)
        product = self._make_hessian_mat_prod(module, g_inp, g_out)
        shape, title = module.input0.shape, self._title("make_hessian_mat_prod", module)
        return lambda mat: apply_checked(product, mat, shape, shape, title)

    def _make_hessian_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads) -> Callable[[Tensor], Tensor]:
        raise self._missing("_make_hessian_mat_prod", module)

    def sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        """Loss Hessian, summed over the samples.

        Returns:
            ``[*features, *features]``, the ``reduction`` included.
        """
        self._check_scalar(module, g_out)
        return self._sum_hessian(module, g_inp, g_out)

    def _sum_hessian(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        raise self._missing("_sum_hessian", module)

    def position_weights(self, module: Module, g_out: tuple[Tensor, ...]) -> Tensor:
        """Weights that the incoming gradient of the loss's output puts on the entries of its input.

        The factor's columns are multiplied by their square roots, which is right where the entries of a column have one weight. The default
        knows that of samples only; a loss with one term an entry, or a position, overrides it.

        Returns:
            Tensor that can be broadcast against ``input0``.

        Raises:
            UnsupportedError: If the weights differ within a sample.
        """
        incoming, num_samples, features = g_out[0], module.input0.shape[0], module.input0.shape[1:]
        first = incoming.flatten()[:1]
        if incoming.dim() == 0 or (incoming == first).all():
            return first.sum()  # of one entry, or of none where the batch is empty
        per_sample = incoming.reshape(incoming.shape[0], -1)
        if incoming.shape[0] != num_samples or not (per_sample == per_sample[:, :1]).all():
            raise UnsupportedError(
                f"The output {list(incoming.shape)} of {module} is weighted differently within one sample (input {list(module.input0.shape)}). "
                'Use reduction="mean" or "sum", or one weight a sample.'
            )
        return per_sample[:, 0].reshape(-1, *(1 for _ in features))

    def _check_scalar(self, module: Module, g_out: Grads) -> None:
        if module.output.numel() != 1:
            raise LossValueError(
                f'Second-order quantities need a scalar loss, but {module} returned shape {list(module.output.shape)}. Use reduction="mean" or "sum".'
            )
        if g_out is not None and g_out[0] is not None and not bool((g_out[0] == 1).all()):
            warn(f"The output of {module} was scaled: it receives a gradient other than one. The result is that of the unscaled loss.", stacklevel=3)
