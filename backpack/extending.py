"""``extend`` and its opposite; and small functions on extended models and their results."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from backpack.context import CTX, disable
from backpack.core.owners import owners, savefields
from backpack.core.recording import Recorder, recorder_of, remove_recorder
from backpack.core.walk import LEFT_OUT
from backpack.custom_module.graph_utils import convert_module_to_backpack
from backpack.utils.errors import ArgumentTypeError, UnsupportedError, require_module
from backpack.utils.module_classification import copies_itself, is_no_op

FLAG = "_backpack_extend"
M = TypeVar("M", bound=Module)


@overload
def extend(module: M, debug: bool = False, use_converter: Literal[False] = False) -> M: ...


@overload
def extend(module: Module, debug: bool = False, use_converter: bool = False) -> Module: ...


def extend(module: Module, debug: bool = False, use_converter: bool = False) -> Module:
    """Let a module, and all modules inside it, record their forward passes, so that ``backpack`` can compute quantities from them.

    Nothing else changes: neither outputs nor gradients nor the state dictionary. Extending twice is harmless.

    Args:
        module: A model, a layer or a loss function: one of torch's, a class derived from one, or a module of your own without parameters that
            is extended on its own and makes one number of ``(prediction, target, ...)``. Any other class is declared a loss by
            ``backpack.register(MyLoss, backpack.core.derivatives.GenericLossDerivatives)``.
        debug: Print a line for each module visited.
        use_converter: First rewrite the module, by tracing, so that functional operations become modules. Only the quantities that are exact on
            sequences of modules alone (KFRA, HBP, HMP, GGNMP, PCHMP) can profit from it.

    Returns:
        The same object; with ``use_converter``, a new ``torch.fx.GraphModule`` that shares the parameters.

    Raises:
        ArgumentTypeError: If ``module`` is no ``torch.nn.Module``, or ``debug`` or ``use_converter`` no ``bool``.
        UnsupportedError: If it was scripted, or contains a module that was; with ``use_converter``, if a graph would be another function.

    Example:
        >>> model = extend(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)))
        >>> lossfunc = extend(torch.nn.CrossEntropyLoss())
    """
    if not isinstance(module, Module):
        if isinstance(module, type):
            hint = "Create it first: extend(torch.nn.CrossEntropyLoss())."
        elif isinstance(module, list | tuple):
            hint = "Put modules into one: torch.nn.Sequential(*modules)."
        else:
            hint = "Give it the module itself; functions have one in torch.nn: extend(torch.nn.CrossEntropyLoss())."
        raise ArgumentTypeError(f"extend() needs a torch.nn.Module, got {module!r} of type {type(module).__name__}. {hint}")
    for name, value in {"debug": debug, "use_converter": use_converter}.items():
        if not isinstance(value, bool):
            raise ArgumentTypeError(
                f"extend() takes a single module, and {name} is True or False, got {value!r} of type {type(value).__name__}. "
                "Extend each: model, lossfunc = extend(model), extend(lossfunc)."
            )
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.RecursiveScriptModule):
            raise UnsupportedError(
                f"{path or 'The module'} ({child.original_name}) was made by torch.jit.script, and takes no hooks. Extend the module that it was "
                "made of, and call that one where you ask for quantities."
            )
    if use_converter:
        with disable():  # tracing calls the modules, which may be extended
            module = convert_module_to_backpack(module, debug)
    mine = set(module.parameters())
    roots = owners.around(module) if mine else [module]
    paths = {child: path for root in roots for path, child in root.named_modules()}
    # children first, as the extension hook visits them
    for child in reversed(list(module.modules())):
        path = paths[child]
        if debug:
            print(f"[DEBUG] Extending {path or type(module).__name__}: {type(child).__name__}")
        recorder = recorder_of(child)
        # a wrapper may show the flag of its model; hooks are lost, and flags kept, by CTX.remove_hooks() and some copies
        if (child is module or not is_no_op(child)) and (recorder is None or not vars(child).get(FLAG, False)):
            _register_hooks(child, path)
            setattr(child, FLAG, True)
        elif mine and recorder is not None:
            recorder.path = path
    for root in roots:
        owners.name(root, mine)
    recorders = {child: recorder for child in module.modules() if (recorder := recorder_of(child)) is not None}
    for outer in filter(copies_itself, module.modules()):
        for child in recorders.keys() & set(outer.modules()) - {outer}:
            recorders[child].around = ref(outer)
    if module in recorders:
        recorders[module].torn = False
    return module


def _register_hooks(module: Module, path: str = "") -> None:
    """Install the hooks of ``extend`` on one module, in place of those that it has.

    Args:
        module: The module.
        path: What messages call it.
    """
    remove_recorder(module)
    Recorder(path, type(module).__name__, next(module.parameters(), None) is None).install(module)
    CTX.add_extended(module)


def unextend(module: M) -> M:
    """Remove every trace of ``extend`` and of results from a module and all modules inside it.

    Args:
        module: A module; nothing happens where it is not extended.

    Returns:
        The same object.
    """
    require_module(module, "unextend")
    clear(module)
    for child in module.modules():
        remove_recorder(child)
        child.__dict__.pop(FLAG, None)
    for parameter in module.parameters():
        owners.remove(parameter)
    return module


def memory_cleanup(module: Module) -> None:
    """Give back what the last forward pass of a module has recorded: ``module.input0``, ..., ``module.output`` cannot be read any more.

    Args:
        module: A module; its children are not touched.
    """
    require_module(module, "memory_cleanup")
    recorder = recorder_of(module)
    if recorder is not None:
        recorder.forget()


def leave_out(term: Tensor) -> Tensor:
    """Leave a term of the loss out of all quantities; ``.grad`` still contains it.

    For terms that belong to no sample, above all penalties on parameters.

    Args:
        term: What is added to the loss.

    Returns:
        What to add in its place: the term itself, where it has no gradient.

    Raises:
        ArgumentTypeError: If ``term`` is no tensor.

    Example:
        >>> loss = lossfunc(model(X), y) + leave_out(0.1 * sum(p.square().sum() for p in model.parameters()))
    """
    if not isinstance(term, Tensor):
        raise ArgumentTypeError(f"leave_out() needs a tensor, got {term!r} of type {type(term).__name__}.")
    if term.requires_grad and torch.is_grad_enabled():
        term = term.clone()  # a node of its own, even where the term is used elsewhere, and no view, which `loss += ...` would give another one
        term.grad_fn.metadata[LEFT_OUT] = True
    return term


def results(model: Module) -> dict[str, dict[str, Any]]:
    """Collect everything that backward passes have written on the parameters of a model.

    Args:
        model: A module.

    Returns:
        ``{parameter name: {field: value}}``, without parameters that carry nothing.
    """
    require_module(model, "results")
    found = {name: {field: value for field, value in vars(p).items() if field in savefields} for name, p in model.named_parameters()}
    return {name: values for name, values in found.items() if values}


def clear(model: Module) -> None:
    """Delete everything that backward passes have written on the parameters of a model.

    Args:
        model: A module.
    """
    require_module(model, "clear")
    for parameter in model.parameters():
        for field in savefields & vars(parameter).keys():
            parameter.__dict__.pop(field, None)
        owners.notes(parameter).clear()
