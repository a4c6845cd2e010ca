"""Import paths of earlier releases: one table that says where what they offered lives now.

A path of old is a module without a file: it looks a name up in its home when the name is asked for. The table is about paths only: the classes that
such a path offers for single layers (``SqrtGGNReLU``, ...) are made by a rule in ``extensions.layer_extensions``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import product
from re import split
from types import ModuleType
from typing import Any

from backpack.utils.errors import BackpackError

_WITH_PARAMETERS = (
    "batchnorm_nd,conv1d,conv2d,conv3d,convnd,conv_transpose1d,conv_transpose2d,conv_transpose3d,conv_transposend,embedding,linear,lstm,rnn"
)
_LAYERS = f"{_WITH_PARAMETERS},activations,custom_module,dropout,flatten,losses,pad,padding,permute,pooling,slicing"

HOMES: dict[str, list[str]] = {
    "torch.nn": ["core.layers"],
    "core.derivatives.activations": ["core.derivatives.{elu,leakyrelu,logsigmoid,relu,selu,sigmoid,tanh}"],
    "core.derivatives.avgpoolnd": ["core.derivatives.{avgpool1d,avgpool2d,avgpool3d}"],
    "core.derivatives.conv_transposend": ["core.derivatives.{conv_transpose1d,conv_transpose2d,conv_transpose3d}"],
    "core.derivatives.convnd": ["core.derivatives.{conv1d,conv2d,conv3d}"],
    "core.derivatives.linear_maps": ["core.derivatives.{flatten,pad,permute,scale_module,slicing,sum_module,zeropad2d}"],
    "core.derivatives.maxpoolnd": ["core.derivatives.{maxpool1d,maxpool2d,maxpool3d}"],
    "core.derivatives.recurrent": ["core.derivatives.{lstm,rnn}"],
    "extensions.module_extensions": [
        "extensions.mat_to_mat_jac_base",
        "extensions.firstorder.batch_grad.batch_grad_base",
        "extensions.firstorder.batch_l2_grad.batch_l2_base",
        "extensions.firstorder.gradient",
        "extensions.firstorder.gradient.base",
        "extensions.firstorder.sum_grad_squared.sgs_base",
        "extensions.firstorder.variance.variance_base",
        "extensions.secondorder.diag_ggn.diag_ggn_base",
        "extensions.secondorder.diag_hessian.diag_h_base",
        "extensions.secondorder.hbp.hbpbase",
        "extensions.secondorder.sqrt_ggn.base",
        "extensions.curvmatprod.ggnmp.ggnmpbase",
        "extensions.curvmatprod.hmp.hmpbase",
        "extensions.curvmatprod.pchmp.pchmpbase",
    ],
    "extensions.layer_extensions": [
        "extensions.firstorder.{batch_grad,batch_l2_grad,gradient,sum_grad_squared,variance}.{" + _WITH_PARAMETERS + "}",
        "extensions.secondorder.{diag_ggn,diag_hessian,hbp,sqrt_ggn}.{" + _LAYERS + "}",
        "extensions.curvmatprod.{ggnmp,hmp,pchmp}.{" + _LAYERS + "}",
    ],
    "extensions.secondorder.hbp_options": ["extensions.secondorder.hbp.hbp_options"],
}
"""Home to the paths that lead there, all inside of this package but for torch; braces list alternatives."""


class MovedError(BackpackError, ImportError):
    """An old import path leads to something that this version does not have.

    Way out: the message names where it should live; everything public is in ``backpack`` and ``backpack.extensions``.
    """

    code = "moved"


class _Moved(ModuleType):
    """A module that finds its names in another one."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(name, f"An import path of earlier releases. What it offered lives in ``{home}``.")
        self.__spec__ = ModuleSpec(name, None, origin=home)
        self._home = home

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by whoever goes through all modules: no reason to import anything
            raise AttributeError(name)
        try:
            home = import_module(self._home)
        except ModuleNotFoundError as error:
            raise MovedError(f"{self.__name__}.{name} should live in {self._home}, which this version does not have.") from error
        try:
            return getattr(home, name)
        except AttributeError as error:
            raise MovedError(
                f"cannot import name {name!r} from {self.__name__}: {self._home} has nothing of that name. If it is for a layer of your own: that "
                "has all quantities as it is, and faster with derivatives, by backpack.register(MyLinear, LinearDerivatives), say."
            ) from error

    def __dir__(self) -> list[str]:
        return dir(import_module(self._home))


def paths() -> Iterator[tuple[str, str]]:
    """List the old import paths.

    Yields:
        (old path, home), parents before children.
    """
    for home, patterns in HOMES.items():
        for pattern in patterns:
            for parts in product(*(part.split(",") for part in split("[{}]", pattern))):
                yield "backpack." + "".join(parts), home if home.startswith("torch") else "backpack." + home


def install() -> None:
    """Make the old import paths known to Python."""
    for path, home in paths():
        parent, _, name = path.rpartition(".")
        sys.modules[path] = module = _Moved(path, home)
        setattr(sys.modules[parent], name, module)
