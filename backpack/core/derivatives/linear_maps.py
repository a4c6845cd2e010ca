"""Linear maps without parameters, one row each: what is not said here comes from their kind."""

from __future__ import annotations

from torch import Tensor
from torch.nn import (
    ChannelShuffle,
    CircularPad1d,
    CircularPad2d,
    CircularPad3d,
    ConstantPad1d,
    ConstantPad2d,
    ConstantPad3d,
    Flatten,
    Fold,
    Identity,
    Module,
    PixelShuffle,
    PixelUnshuffle,
    ReflectionPad1d,
    ReflectionPad2d,
    ReflectionPad3d,
    ReplicationPad1d,
    ReplicationPad2d,
    ReplicationPad3d,
    Unflatten,
    Unfold,
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
    ZeroPad1d,
    ZeroPad2d,
    ZeroPad3d,
    functional,
)

from backpack.core.derivatives.basederivatives import Grads, Samples
from backpack.core.derivatives.kinds import LinearMapDerivatives, ReshapeDerivatives
from backpack.core.derivatives.registry import register
from backpack.custom_module.branching import SumModule
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.utils.errors import ArgumentError, UnsupportedError


@register(Identity)
@register(Flatten)
@register(Unflatten)
class FlattenDerivatives(ReshapeDerivatives):
    """Derivatives of reshapes that leave axis 0 alone."""


@register(Permute)
class PermuteDerivatives(LinearMapDerivatives):
    """Derivatives of a permutation of the axes other than axis 0."""


@register(ScaleModule)
class ScaleModuleDerivatives(LinearMapDerivatives):
    """Derivatives of the multiplication by a number; of ``Identity``, which has none, by one."""

    any_batch_axis = True

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return mat * getattr(module, "weight", 1.0)


@register(SumModule)
class SumModuleDerivatives(ReshapeDerivatives):
    """Derivatives of a sum of tensors with respect to any one of them."""

    any_batch_axis = True


@register(Slicing)
class SlicingDerivatives(LinearMapDerivatives):
    """Derivatives of slicing along all axes but axis 0."""

    def _map(self, module: Module, batch: Tensor) -> Tensor:
        self.no_slice_batch_axis(module)
        return module.forward(batch)

    @staticmethod
    def no_slice_batch_axis(module: Slicing) -> None:
        """Make sure that all samples are kept.

        Args:
            module: The slicing module.

        Raises:
            ArgumentError: If the first entry of ``slice_info`` is not ``slice(None)``.
        """
        if module.slice_info[0] != slice(None):
            raise ArgumentError(f"Axis 0 holds the samples, but {module} slices it by {module.slice_info[0]}. Let slice_info begin with slice(None).")


@register(Pad)
class PadDerivatives(LinearMapDerivatives):
    """Derivatives of padding along all axes but axis 0, in any mode."""

    def _map(self, module: Module, batch: Tensor) -> Tensor:
        self.no_pad_batch_axis(module)
        return functional.pad(batch, module.pad, module.mode)  # a constant other than zero is no part of the linear map

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        if module.mode != "constant":
            return super()._jac_t_mat_prod(module, g_inp, g_out, mat, subsampling=subsampling)
        self.no_pad_batch_axis(module)
        return self.unpad(mat, module.pad, module.mode, value=0.0)

    @staticmethod
    def no_pad_batch_axis(module: Pad) -> None:
        """Make sure that no samples are added or removed.

        Args:
            module: The padding module with its recorded input.

        Raises:
            ArgumentError: If axis 0 is padded.
        """
        axis_0 = 2 * (module.input0.dim() - 1)
        if any(module.pad[axis_0:]):
            raise ArgumentError(f"Axis 0 holds the samples, but {module} pads it by {module.pad[axis_0:]}. Pad the other axes only.")

    @staticmethod
    def unpad(tensor: Tensor, pad: tuple[int, ...], mode: str, value: float) -> Tensor:
        """Undo constant padding.

        Args:
            tensor: The padded tensor.
            pad: Amounts, as for ``torch.nn.functional.pad``.
            mode: Must be ``"constant"``.
            value: Filled in where padding by a negative amount has cut entries off.

        Returns:
            The tensor before padding.

        Raises:
            UnsupportedError: For other modes, whose padding depends on the input.
        """
        if mode != "constant":
            raise UnsupportedError(f'Only padding with mode="constant" can be undone by cutting, got mode={mode!r}.')
        return functional.pad(tensor, [-amount for amount in pad], value=value)


@register(CircularPad1d)
@register(CircularPad2d)
@register(CircularPad3d)
@register(ReflectionPad1d)
@register(ReflectionPad2d)
@register(ReflectionPad3d)
@register(ReplicationPad1d)
@register(ReplicationPad2d)
@register(ReplicationPad3d)
class CopyingPadDerivatives(LinearMapDerivatives):
    """Derivatives of padding with copies of the input's entries; negative amounts cut entries off."""

    def applies(self, module: Module) -> bool:
        return module.input0.dim() > len(module.padding) // 2  # else axis 0 is padded, too


@register(ConstantPad1d)
@register(ConstantPad2d)
@register(ConstantPad3d)
@register(ZeroPad1d)
@register(ZeroPad3d)
class ConstantPadDerivatives(CopyingPadDerivatives):
    """Derivatives of padding with a constant, which is no part of the linear map."""

    def _map(self, module: Module, batch: Tensor) -> Tensor:
        return functional.pad(batch, module.padding)

    def _jac_t_mat_prod(self, module: Module, g_inp: Grads, g_out: Grads, mat: Tensor, subsampling: Samples = None) -> Tensor:
        return functional.pad(mat, [-amount for amount in module.padding])


@register(ZeroPad2d)
class ZeroPad2dDerivatives(ConstantPadDerivatives):
    """Derivatives of padding images with zeros."""


@register(Upsample)
@register(UpsamplingBilinear2d)
@register(UpsamplingNearest2d)
class UpsampleDerivatives(LinearMapDerivatives):
    """Derivatives of interpolation, in any mode."""

    def has_batching_rule(self, module: Upsample) -> bool:
        return module.mode != "nearest-exact"


@register(ChannelShuffle)
class ChannelShuffleDerivatives(LinearMapDerivatives):
    """Derivatives of a permutation of the channels."""


@register(PixelShuffle)
@register(PixelUnshuffle)
class PixelShuffleDerivatives(LinearMapDerivatives):
    """Derivatives of exchanging channels for resolution."""

    least_axes = 4


@register(Fold)
class FoldDerivatives(LinearMapDerivatives):
    """Derivatives of adding patches up to images."""

    least_axes = 3


@register(Unfold)
class UnfoldDerivatives(LinearMapDerivatives):
    """Derivatives of cutting images into patches, which may overlap."""

    least_axes = 4
