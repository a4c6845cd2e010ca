"""The two hooks of earlier releases, for code that installs or calls them itself. ``extend`` and ``backpack`` do without."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from backpack.backward import keeps_tensors, running
from backpack.context import CTX
from backpack.core.calls import KEY
from backpack.core.recording import recorder_of
from backpack.extending import _register_hooks, memory_cleanup
from backpack.extensions.module_extension import Grads
from backpack.utils.nested import tensors_in


def hook_store_io(module: Module, input: tuple, output: Any) -> None:
    """Record a call of a module: a forward hook.

    A call that the hooks of ``extend`` have recorded is not recorded again.

    Args:
        module: The module.
        input: Its arguments.
        output: What it returned.
    """
    if recorder_of(module) is None:
        _register_hooks(module)
    recorder = recorder_of(module)
    marks = [mark for tensor in tensors_in(output) if tensor.grad_fn is not None for mark in tensor.grad_fn.metadata.get(KEY, ())]
    if all(mark.call.recorder is not recorder for mark in marks):
        recorder.at_once(module, input, {}, output)


def hook_run_extensions(module: Module, g_inp: Grads, g_out: Grads) -> None:
    """Run the module extensions of the active extensions and the extension hook, and give recorded tensors back: a full backward hook.

    Inside of a pass under ``backpack`` there is nothing to do, since the pass does all that itself.

    Args:
        module: The module.
        g_inp: Gradients with respect to the inputs.
        g_out: Gradient with respect to the output.
    """
    if running():
        return
    for extension in CTX.get_active_exts():
        extension(module, g_inp, g_out)
    CTX.get_extension_hook()(module)
    if not keeps_tensors():
        memory_cleanup(module)
