"""backpack: what the gradient alone hides, computed during the ordinary ``loss.backward()``."""

from backpack import compat, distributed, extensions
from backpack.accumulation import unscale
from backpack.backward import backpack
from backpack.context import CTX, disable
from backpack.core.derivatives.check import check_rule
from backpack.core.derivatives.registry import register
from backpack.custom_module.graph_utils import convert_module_to_backpack
from backpack.explaining import explain
from backpack.extending import _register_hooks, clear, extend, leave_out, memory_cleanup, results, unextend
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.support import supported
from backpack.hooks import hook_run_extensions, hook_store_io
from backpack.utils.hooks import no_op
from backpack.utils.module_classification import is_no_op
from backpack.verification import verify

compat.install()

__version__ = "0.1.0"

__all__ = [
    "CTX",
    "BackpropExtension",
    "_register_hooks",
    "backpack",
    "check_rule",
    "clear",
    "convert_module_to_backpack",
    "disable",
    "distributed",
    "explain",
    "extend",
    "extensions",
    "hook_run_extensions",
    "hook_store_io",
    "is_no_op",
    "leave_out",
    "memory_cleanup",
    "no_op",
    "register",
    "results",
    "supported",
    "unextend",
    "unscale",
    "verify",
]
