"""Derivatives of modules: products with Jacobians and Hessians. Importing the package fills the table in ``registry``."""

from backpack.core.derivatives import (
    activations,
    bcewithlogitsloss,
    crossentropyloss,
    dropout,
    linear,
    linear_maps,
    loss_elementwise,
    loss_generic,
    loss_likelihoods,
    mseloss,
    softmax,
)
from backpack.core.derivatives.loss_generic import GenericLossDerivatives
from backpack.core.derivatives.registry import register

__all__ = ["activations", "bcewithlogitsloss", "crossentropyloss", "dropout", "linear", "linear_maps", "loss_generic", "mseloss", "softmax"]
__all__ += ["GenericLossDerivatives", "loss_elementwise", "loss_likelihoods", "register"]
