"""Derivatives of modules: products with Jacobians and Hessians. Importing the package fills the table in ``registry``."""

from backpack.core.derivatives import (  # noqa: F401  (each fills the table)
    activations,
    adaptive_avg_pool_nd,
    avgpoolnd,
    batchnorm_nd,
    bcewithlogitsloss,
    bilinear,
    conv_transposend,
    convnd,
    crossentropyloss,
    dropout,
    embedding,
    linear,
    linear_maps,
    loss_elementwise,
    loss_generic,
    loss_likelihoods,
    maxpoolnd,
    mseloss,
    normalization,
    softmax,
)
from backpack.core.derivatives.loss_generic import GenericLossDerivatives
from backpack.core.derivatives.registry import register

__all__ = ["GenericLossDerivatives", "register"]
