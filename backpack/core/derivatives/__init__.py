"""Derivatives of modules: products with Jacobians and Hessians. Importing the package fills the table in ``registry``."""

from backpack.core.derivatives import activations, bcewithlogitsloss, crossentropyloss, dropout, linear, linear_maps, mseloss, softmax
from backpack.core.derivatives import loss_elementwise, loss_generic, loss_likelihoods  # isort: skip
from backpack.core.derivatives.loss_generic import GenericLossDerivatives
from backpack.core.derivatives.registry import register

__all__ = ["activations", "bcewithlogitsloss", "crossentropyloss", "dropout", "linear", "linear_maps", "mseloss", "softmax"]
__all__ += ["loss_elementwise", "loss_generic", "loss_likelihoods"]
__all__ += ["GenericLossDerivatives", "register"]
