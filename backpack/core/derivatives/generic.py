"""Products for any module that treats samples independently, by re-running it on one sample at a time with ``torch.func``.

The re-run must give the recorded output again. This refuses modules that mix samples, draw random numbers or have changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch.autograd import grad
from torch.func import functional_call, vjp, vmap
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack.core.derivatives.basederivatives import BaseParameterDerivatives, Grads, Samples
from backpack.core.derivatives.records import call_arguments, inputs_of, module_of
from backpack.core.derivatives.shape_check import apply_checked
from backpack.utils.columns import compare_mixture, unit_columns
from backpack.utils.differentiation import complete_gradients, lacks_terms, nodes_below, refuse_biased_norms
from backpack.utils.errors import UnsupportedError
from backpack.utils.module_state import kept_state
from backpack.utils.precision import tolerances
from backpack.utils.random_state import random_state_kept
from backpack.utils.subsampling import subsample


class GenericDerivatives(BaseParameterDerivatives):
    """All products of a module whose samples lie on axis 0 of its first input and of its output.

    Of several outputs, the first counts. Jacobians with respect to inputs are those with respect to ``input0``; of the other inputs, tensors
    whose axis 0 is as long as that of ``input0`` are taken to hold samples as well, and anything else is passed on as it is. Parameters are
    named as in ``module.named_parameters()``, so those of submodules have dots in their names.
    """

    def hessian_is_zero(self, module: Module) -> bool:
        return False

    def hessian_is_diagonal(self, module: Module) -> bool:
        return False

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return _Replay(module).jac_mat_prod(mat)

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return _Replay(module, subsampling=subsampling).jac_t_mat_prod(mat)

    def _param_mjp(
        self, param_str: str, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, sum_batch: bool = True, subsampling: Samples = None
    ) -> Tensor:
        return _Replay(module, param_str, shared=sum_batch, subsampling=subsampling).jac_t_mat_prod(mat)

    def param_jac_mat_prod(self, param_str: str, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        """Multiply by the Jacobian of the output with respect to a parameter.

        Returns:
            ``[V, *output]`` from ``mat`` ``[V, *param]``.
        """
        replay = _Replay(module, param_str)
        return apply_checked(
            replay.jac_mat_prod, mat, replay.at.shape, module.output.shape, self._title(f"param_jac_mat_prod for {param_str}", module)
        )

    def _weight_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return _Replay(module, "weight").jac_mat_prod(mat)

    def _bias_jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return _Replay(module, "bias").jac_mat_prod(mat)

    def residual(self, module: Module, g_inp: Grads, g_out: Grads) -> Tensor:
        """Residual ``sum_k Hess(z_k) dL/dz_k`` of each sample.

        Returns:
            Symmetric matrices ``[N, D, D]`` over the ``D`` entries of a sample's input.
        """
        product = self._residual_mat_prod(module, g_inp, g_out, unit_columns(module.input0.shape, module.input0))
        return product.reshape(*product.shape[:2], len(product)).movedim(0, 2)

    def hessian_diagonal(self, module: Module, g_in: Grads, g_out: Grads) -> Tensor:
        return self.residual(module, g_in, g_out).diagonal(dim1=1, dim2=2).reshape(module.input0.shape)

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return _Replay(module).residual_mat_prod(g_out[0], mat)

    def _parameter(self, module: Module, name: str) -> Tensor:
        return _parameter(module_of(module), name)


class _Replay:
    """The forward pass of a recorded module, run again for each sample, as a function of the first input or of one parameter."""

    def __init__(self, module: Module, param_str: str | None = None, shared: bool = True, subsampling: Samples = None) -> None:
        """Choose the variable.

        Args:
            module: The module with its recorded inputs and output.
            param_str: Name of a parameter, or ``None`` for the first input.
            shared: The variable is the parameter, or (``False``) one parameter per sample, all with the same value.
            subsampling: Samples to run; ``None`` for all.

        Raises:
            UnsupportedError: If the module's input and output were not kept.
        """
        self.record, self.module = module, module_of(module)
        self.param_str = param_str
        recorded = inputs_of(module)
        is_split = [isinstance(value, Tensor) and value.shape[:1] == recorded[0].shape[:1] for value in recorded]
        self.inputs = [subsample(value, subsampling=subsampling) if split else value for value, split in zip(recorded, is_split, strict=True)]
        self.output = subsample(module.output, subsampling=subsampling)
        if self.inputs[0].is_meta or self.output.is_meta:
            raise UnsupportedError(f"Input and output of {type(self.module).__name__} were not kept, so that it cannot run again.")
        self.axes = [0 if split else None for split in is_split]
        self.param_axis = None if shared else 0
        if param_str is None:
            self.at = self.inputs[0]
        else:
            param = _parameter(self.module, param_str)
            self.at = param if shared else param.expand(self.output.shape[0], *param.shape)

    def jac_t_mat_prod(self, mat: Tensor) -> Tensor:
        output, pull_back = vjp(self._run, self.at)
        self._compare(output)
        return self._columns(pull_back, mat)

    def jac_mat_prod(self, mat: Tensor) -> Tensor:
        output, pull_back = vjp(self._run, self.at)
        self._compare(output)
        self._refuse_missing_terms()
        # the transposed of a linear function; not every operation can be differentiated in forward mode
        _, push_forward = vjp(lambda cotangent: pull_back(cotangent)[0], torch.zeros_like(output))
        return self._columns(push_forward, mat)

    def residual_mat_prod(self, grad_output: Tensor, mat: Tensor) -> Tensor:
        def gradient(at: Tensor) -> tuple[Tensor, Tensor]:
            output, pull_back = vjp(self._run, at)
            return pull_back(grad_output)[0], output

        _, product, output = vjp(gradient, self.at, has_aux=True)
        self._compare(output)
        self._refuse_missing_terms()
        return self._columns(product, mat)

    def _columns(self, product: Callable[[Tensor], tuple[Tensor, ...]], mat: Tensor) -> Tensor:
        def one(column: Tensor) -> Tensor:
            return product(column)[0]

        try:
            columns = _each(one, (0,), mat)
            same = len(mat) <= 1 or compare_mixture([mat], [columns], lambda column: (one(column),))[0]
            return columns if same else torch.stack([one(column) for column in mat])
        except RuntimeError as error:
            raise UnsupportedError(f"{type(self.module).__name__} cannot be differentiated: {error}") from error

    def _run(self, variable: Tensor) -> Tensor:
        def one(param: Tensor | None, *sample: Any) -> Tensor:
            # the module may change its inputs in place: it gets copies
            batch = [value if axis is None else value.unsqueeze(0).clone() for value, axis in zip(sample, self.axes, strict=True)]
            return self._call(param, batch).squeeze(0)

        is_input = self.param_str is None
        param, inputs = (None, [variable, *self.inputs[1:]]) if is_input else (variable, self.inputs)
        try:
            # this attention kernel is the one that can be differentiated twice; the user's random numbers must not notice this run
            with sdpa_kernel(SDPBackend.MATH), random_state_kept([self.output]) as drawn:
                output = _each(one, (None if is_input else self.param_axis, *self.axes), param, *inputs)
                random = drawn()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UnsupportedError(f"{type(self.module).__name__} cannot run on a single sample ({error}). {_ADVICE}") from error
        if random:
            raise UnsupportedError(
                f"{type(self.module).__name__} draws random numbers, which are others when it runs again on one sample at a time: it is another "
                f"function then, even where its output is the same. {_ADVICE}"
            )
        return output

    def _call(self, param: Tensor | None, batch: list[Any]) -> Tensor:
        with kept_state(self.module):
            output = functional_call(self.module, {} if self.param_str is None else {self.param_str: param}, *call_arguments(self.record, batch))
        while not isinstance(output, Tensor):
            output = output[0]
        return output

    def _refuse_missing_terms(self) -> None:
        def see(at: Tensor) -> Tensor:
            batch = [value.clone() if isinstance(value, Tensor) else value for value in self.inputs]
            output = self._call(None, [at.clone(), *batch[1:]]) if self.param_str is None else self._call(at, batch)
            incoming = torch.ones_like(output) + 0 * output  # takes part in the graph
            with complete_gradients([output]):
                gradients = grad(output, at, incoming, create_graph=True, materialize_grads=True) if output.requires_grad else ()
            if lacks_terms(gradients):
                raise UnsupportedError(
                    f"{type(self.module).__name__} cannot be differentiated twice: it calls a torch.autograd.Function whose backward is marked as "
                    "once_differentiable. Write it with differentiable operations, and without the mark."
                )
            refuse_biased_norms(nodes_below([output]), made=self.param_str is None)  # parameters are constants of its input
            return output

        # vmap may lose the mark, and what is marked passes for a constant
        with random_state_kept([self.output]):
            vjp(see, self.at)

    def _compare(self, output: Tensor) -> None:
        if output.shape == self.output.shape:
            again = output.to(self.output.dtype)
            alike = (again - self.output).abs() <= tolerances(self.output, again.dtype)
            if (alike | (again == self.output) | (again.isnan() & self.output.isnan())).all():
                return
        raise UnsupportedError(
            f"{type(self.module).__name__} gave the output {list(self.output.shape)} on the mini-batch, but gives another one "
            f"{list(output.shape)} when it runs again on one sample at a time: it mixes samples or was changed since. {_ADVICE}"
        )


_ADVICE = (
    "Per-sample quantities need a module that treats the entries of axis 0 alike and independently. If it does, register derivatives for its class."
)


def _parameter(module: Module, name: str) -> Tensor:
    parameters = dict(Module.named_parameters(module, remove_duplicate=False))
    if name not in parameters:
        raise UnsupportedError(f"{type(module).__name__} has no parameter {name!r}, only {', '.join(map(repr, parameters)) or 'none at all'}.")
    return parameters[name]


def _each(function: Callable[..., Tensor], axes: tuple[int | None, ...], *args: Any) -> Tensor:
    """Apply a function to slices of its arguments and stack the results, by a loop where an operation cannot be vectorized.

    Returns:
        ``[N, ...]``, where ``N`` is the length of axis 0 of the arguments whose entry in ``axes`` is 0; the others are not cut.
    """
    length = next(len(arg) for arg, axis in zip(args, axes, strict=True) if axis == 0)
    try:
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # about operations that vmap loops over
            return vmap(function, in_dims=axes)(*args)
    except RuntimeError:
        return torch.stack([function(*(arg if axis is None else arg[i] for arg, axis in zip(args, axes, strict=True))) for i in range(length)])
