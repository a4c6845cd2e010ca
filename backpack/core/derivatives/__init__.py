"""Derivatives of modules: products with Jacobians and Hessians. Importing the package fills the table in ``registry``."""

from backpack.core.derivatives import (
    activations,
    bcewithlogitsloss,
    conv_transposend,
    convnd,
    crossentropyloss,
    dropout,
    linear,
    linear_maps,
    loss_generic,
    mseloss,
    softmax,
)

__all__ = ["activations", "bcewithlogitsloss", "crossentropyloss", "dropout", "linear", "linear_maps", "loss_generic", "mseloss", "softmax"]
__all__ += ["conv_transposend", "convnd"]
