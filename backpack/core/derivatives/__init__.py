"""Derivatives of modules: products with Jacobians and Hessians. Importing the package fills the table in ``registry``."""

from backpack.core.derivatives import (
    activations,
    adaptive_avg_pool_nd,
    avgpoolnd,
    batchnorm_nd,
    bcewithlogitsloss,
    bilinear,
    crossentropyloss,
    dropout,
    embedding,
    linear,
    linear_maps,
    loss_generic,
    maxpoolnd,
    mseloss,
    normalization,
    softmax,
)

__all__ = [
    "activations",
    "adaptive_avg_pool_nd",
    "avgpoolnd",
    "batchnorm_nd",
    "bcewithlogitsloss",
    "bilinear",
    "crossentropyloss",
    "dropout",
    "embedding",
    "linear",
    "linear_maps",
    "loss_generic",
    "maxpoolnd",
    "mseloss",
    "normalization",
    "softmax",
]
