"""Kinds of maps without curvature: those with a constant Jacobian among them, hence linear maps without parameters, hence reshapes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives, Grads, Samples
from backpack.core.derivatives.records import call_arguments, inputs_of
from backpack.utils.errors import MixedSamplesError, UnsupportedError


class FlatDerivatives(BaseDerivatives):
    """The second derivative of the output with respect to the input vanishes (almost everywhere)."""

    def hessian_is_zero(self, module: Module) -> bool:
        return True

    def hessian_is_diagonal(self, module: Module) -> bool:
        return True

    def hessian_diagonal(self, module: Module, g_in: Grads, g_out: Grads) -> Tensor:
        return g_out[0].new_zeros(module.input0.shape)

    def _residual_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return torch.zeros_like(mat)


class ConstantJacobianDerivatives(FlatDerivatives):
    """The output is affine in the input, with the same Jacobian for every sample."""

    same_jacobian = True


class LinearMapDerivatives(ConstantJacobianDerivatives):
    """A linear map without parameters that treats samples alike.

    Hence its own forward pass multiplies by the Jacobian, with the columns taken for further samples, and vector-Jacobian products of that pass
    by its transposed.
    """

    keeps = frozenset()

    def has_batching_rule(self, module: Module) -> bool:
        """Tell whether ``torch.vmap`` can run the backward pass for many columns at once.

        Returns:
            ``False`` where it would loop over them.
        """
        return True

    def _map(self, module: Module, batch: Tensor) -> Tensor:
        """Apply the linear part of the module, its forward pass by default, with the other arguments of the call.

        Returns:
            ``[N, ...]`` from ``batch`` ``[N, ...]``, for any ``N``.

        Raises:
            UnsupportedError: If one of these is a tensor that was not kept.
        """
        others = inputs_of(module, 1)
        if any(isinstance(value, Tensor) and value.is_meta for value in others):
            raise UnsupportedError(f"{module} was called with tensors of which {type(self).__name__} keeps nothing. Let `keeps` name the input.")
        positional, named = call_arguments(module, [batch, *others])
        return module.forward(*positional, **named)

    def _checked_map(self, module: Module, batch: Tensor) -> Tensor:
        result = self._map(module, batch)
        if result.shape != (batch.shape[0], *module.output.shape[1:]):
            raise MixedSamplesError(
                f"{module} maps {list(batch.shape)} to {list(result.shape)}, hence it does not treat entries of axis 0 as samples. "
                "Keep the samples on axis 0."
            )
        return result

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        result = self._checked_map(module, mat.flatten(0, 1))
        return result.reshape(*mat.shape[:2], *result.shape[1:])

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        columns, features = mat.flatten(0, 1), module.input0.shape[1:]
        if not len(columns):  # not all functions of torch can be differentiated then
            return mat.new_zeros(*mat.shape[:2], *features)
        # it is the same for all samples and at all points: if one sample runs forward, all columns can run backward
        single = self.has_batching_rule(module)
        _, pull_back = vjp(partial(self._checked_map, module), mat.new_zeros(()).expand(1 if single else columns.shape[0], *features))
        product = vmap(lambda column: pull_back(column)[0])(columns.unsqueeze(1)) if single else pull_back(columns)[0]
        return product.reshape(*mat.shape[:2], *features)


class ReshapeDerivatives(ConstantJacobianDerivatives):
    """The module keeps the entries of each sample and their order, and changes at most the shape."""

    keeps = frozenset()

    def applies(self, module: Module) -> bool:
        given = module.input0
        return isinstance(given, Tensor) and given.shape[:1] == module.output.shape[:1]

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return mat.reshape(mat.shape[0], *module.output.shape)

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return mat.reshape(*mat.shape[:2], *module.input0.shape[1:])
