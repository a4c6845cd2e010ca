"""Derivatives of batch normalisation in evaluation mode, where it is an affine map of each channel. With batch statistics it mixes samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, SyncBatchNorm

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.kinds import ConstantJacobianDerivatives
from backpack.core.derivatives.normalization import ScaleShiftDerivatives
from backpack.core.derivatives.records import module_of
from backpack.core.derivatives.registry import register
from backpack.utils.differentiation import version_of
from backpack.utils.errors import MixedSamplesError, OverwrittenError, batch_norm_raise_error_if_train
from backpack.utils.subsampling import subsample


@register(BatchNorm1d)
@register(BatchNorm2d)
@register(BatchNorm3d)
@register(SyncBatchNorm)
class BatchNormNdDerivatives(ConstantJacobianDerivatives, ScaleShiftDerivatives):
    """The running statistics of each channel, on axis 1, normalise it."""

    def applies(self, module: Module) -> bool:
        return not module.training and module.running_mean is not None

    def _running(self, module: Module) -> tuple[Tensor, Tensor]:
        """Return the running statistics.

        Returns:
            Mean and inverse deviation, ``[1, C, 1, ...]`` both.

        Raises:
            MixedSamplesError: If the module (not the record of an execution, which was asked then) uses statistics of the mini-batch.
            OverwrittenError: If the statistics have changed since the execution.
        """
        if isinstance(module, Module):
            batch_norm_raise_error_if_train(module)
        if module.running_mean is None:
            raise MixedSamplesError(f"{module} normalizes with statistics of the whole mini-batch. Use track_running_stats=True, or GroupNorm.")
        mean, scale = module.running_mean, (module.running_var + module.eps).rsqrt()
        try:
            getattr(module, "num_batches_tracked", None)
        except OverwrittenError as error:
            if _was_trained(module):
                raise OverwrittenError(
                    f"num_batches_tracked of {module.path} was changed in place after the forward pass, by one in training mode, it seems: that "
                    f"overwrites running_mean and running_var, whose old values the rule of {module.kind.__name__} needs. Call backward first, or "
                    "run that forward pass on a copy of the module."
                ) from error
        return self._spread(module, mean[None])[0], self._spread(module, scale[None])[0]

    def normalised(self, module: Module, subsampling: Samples = None) -> Tensor:
        mean, scale = self._running(module)
        return (subsample(module.input0, subsampling=subsampling) - mean) * scale

    def _jac_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)  # diagonal

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return mat * self._scaled(module, self._running(module)[1][None])


def _was_trained(record: Any) -> bool:
    """Say whether running statistics may have changed since: torch counts no changes that it makes in training mode, but for that of the counter.

    Args:
        record: The record of an execution since which the counter has changed.

    Returns:
        Whether they may; not so where the counter was set to zero once, and nothing else was done to it.
    """
    module = module_of(record)
    counter, names = module.num_batches_tracked, [*module._parameters, *module._buffers]
    return bool(counter) or version_of(counter) > record.versions[names.index("num_batches_tracked")] + 1
