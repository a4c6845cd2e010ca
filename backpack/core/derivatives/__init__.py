"""Derivatives of modules: products with Jacobians and Hessians. Importing the package fills the table in ``registry``."""

from backpack.core.derivatives import (
    activations,
    adaptive_avg_pool_nd,
    avgpoolnd,
    bcewithlogitsloss,
    crossentropyloss,
    dropout,
    linear,
    linear_maps,
    loss_generic,
    maxpoolnd,
    mseloss,
    softmax,
)

__all__ = [
    "activations",
    "adaptive_avg_pool_nd",
    "avgpoolnd",
    "bcewithlogitsloss",
    "crossentropyloss",
    "dropout",
    "linear",
    "linear_maps",
    "loss_generic",
    "maxpoolnd",
    "mseloss",
    "softmax",
]
