"""Recording: the two forward hooks of an extended module, and what can be read on the module afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Module, Parameter

from backpack.core.calls import KEY, ORDER, ModuleCall
from backpack.core.checkpoints import pass_on
from backpack.core.engine import intercepted, transformed
from backpack.core.options import Options
from backpack.core.owners import owners, savefields
from backpack.core.slots import Slot
from backpack.core.state import recording
from backpack.core.walk import Walk
from backpack.utils.differentiation import nodes_below
from backpack.utils.errors import NotRecordedError
from backpack.utils.module_classification import loses_hooks


def drop_interrupted() -> None:
    """Forget calls that have begun and do not run any more: interrupted by a key, say, of which hooks are not told."""
    while recording.open:
        frame, begun = sys._getframe(1), recording.open[-1].frame
        while frame is not None and frame is not begun:
            frame = frame.f_back
        if frame is not None:
            return
        recording.open.pop()


@contextmanager
def made_by_running(roots: Iterable[Any]) -> Iterator[None]:
    """Let calls be outermost for a pass that is made in the forward pass of another module, if that has made them itself.

    Args:
        roots: Tensors, or graph edges, on which autograd is called.

    Yields:
        Nothing.
    """
    running = {call.order for call in recording.open}
    marks = [mark for node in nodes_below(roots) for mark in node.metadata.get(KEY, ())] if running else ()
    calls = [mark.call for mark in marks if mark.call.outer in running]
    for call in calls:
        call.root = True
    try:
        yield
    finally:
        for call in calls:
            call.root = False


def find_inner(walk: Walk) -> None:
    """Let calls be inner ones that a forward pass has made in threads of its own, where nothing tells that a module around them is running.

    They began after it, and lead to what it has returned.

    Args:
        walk: The graph.
    """
    calls: dict[Module, list[ModuleCall]] = {}
    roots = [call for call in walk.calls if call.root and not call.is_loss]
    for call in roots if len(roots) > 1 else ():
        calls.setdefault(call.module, []).append(call)
    for module in calls if len(calls) > 1 else ():
        parts = [part for part in module.modules() if part is not module and part in calls]
        for outer in calls[module] if parts else ():
            later = {call for part in parts for call in calls[part] if call.order > outer.order}
            ends = [GradientEdge(node, 0) for node, marks in walk.marks.items() if later and any(mark.call is outer for mark in marks)]
            for node in nodes_below(ends):
                for mark in walk.marks.get(node, ()):
                    if mark.call in later:
                        mark.call.root = False


class _Running(NamedTuple):
    """A call whose forward pass has begun and not ended.

    Attributes:
        recorder: Its recorder.
        order: Position among all calls.
        frame: The frame of Python in which it runs.
        call: Its record; ``None`` if it is recorded when it is over.
    """

    recorder: Recorder
    order: int
    frame: FrameType
    call: ModuleCall | None


class Recorder:
    """The two forward hooks of one extended module.

    Attributes:
        path: Name of the module.
        kind: Name of its class.
        bare: Whether it has no parameters, nor does any module inside it.
        known: Whether a pass has tracked all parameters inside it, since ``extend``, or since it came with a copy or a pickle.
        options: Those with which the module was called last.
        around: The innermost module around it whose class makes copies by rules of its own; ``None`` for none.
        torn: Whether it came with a copy or a pickle in which the module around it may lack its recorder, as far as its class tells.
    """

    __slots__ = ("_last", "around", "bare", "kind", "known", "options", "path", "torn")

    def __init__(self, path: str, kind: str, bare: bool, torn: bool = False) -> None:
        self.path, self.kind, self.bare, self.torn, self.known = path, kind, bare, torn, False
        self._last: ref | None = None
        self.options: Options | None = None
        self.around: ref | None = None

    def __reduce__(self) -> tuple:
        around = None if self.around is None else self.around()
        return _again, (self.path, self.kind, self.bare, sorted(savefields), self.is_torn() or (around is not None and loses_hooks(around)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        again, arguments = self.__reduce__()
        other, around = again(*arguments), None if self.around is None else memo.get(id(self.around()))
        if isinstance(around, Module):  # that is copied, too: it will tell whether it has lost anything
            other.around = ref(around)
        return other

    def is_torn(self) -> bool:
        """Say whether the module around it may lack its recorder: not so if that is at hand and has one.

        Returns:
            Whether it may.
        """
        around = self.around() if self.torn and self.around is not None else None
        recorder = None if around is None else recorder_of(around)
        return self.torn and (recorder is None or recorder.is_torn())

    @property
    def last(self) -> ModuleCall | None:
        """The latest call that is still alive."""
        return None if self._last is None else self._last()

    def forget(self) -> None:
        """Forget the latest call and give its tensors back."""
        if self.last is not None:
            self.last.release()
        self._last = None

    def know(self, module: Module) -> bool:
        """Track the parameters of the module, which may have been replaced, or copied with the module, since ``extend``.

        Args:
            module: The module.

        Returns:
            Whether all are parameters; not so in ``torch.func.functional_call``, where a weight may be computed from something, nor where a class of
            parameters sees the calls of functions and may change what they compute.
        """
        leaves = True
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter.grad_fn is not None:  # also of one that was tracked before it was computed, in place
                leaves = False
                continue
            if type(parameter) is not Parameter and intercepted((parameter,)):
                leaves = False
            if parameter not in owners and not parameter.is_inference():
                owners.add(parameter, f"{self.path}.{name}" if self.path else name)
        return leaves

    def before(self, module: Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        """Begin a call of a module that contains others, or that changes its input in place: read where the input comes from before it does.

        Args:
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments; ``None`` where somebody has handed the hook on to another module, with other settings.
        """
        if kwargs is not None and not transformed() and recording.on and torch.is_grad_enabled():
            if recording.open:
                drop_interrupted()
            call = ModuleCall(module, self, args, kwargs, ruled=self.know(module) and not intercepted(args))
            call.seen = args
            recording.open.append(_Running(self, call.order, sys._getframe(1), call))

    def begin(self, module: Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        """Note that a module runs that is recorded when it is over: it may hold others where ``torch.nn`` does not look for them.

        Args:
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments; ``None`` where somebody has handed the hook on to another module, with other settings.
        """
        if kwargs is not None and not transformed() and recording.on and torch.is_grad_enabled():
            if recording.open:
                drop_interrupted()
            recording.open.append(_Running(self, next(ORDER), sys._getframe(1), None))

    def after(self, module: Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        """End a call that has begun; also reached, without an output, where the forward pass raises.

        Args:
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            output: What it returned.
        """
        if transformed():
            return
        if recording.open and recording.open[-1].recorder is not self:  # hooks of those inside that were interrupted have not run
            drop_interrupted()
        if recording.open and recording.open[-1].recorder is self:
            call = recording.open.pop().call
            if call is None:
                self.at_once(module, args, kwargs, output)
            elif output is not None:
                if args is not call.seen:  # a hook that ran after ours has given the module something else
                    call.see(module, args, kwargs)
                    if vars(module).get("inplace") is True:
                        call.derivatives = None  # what it was given has been overwritten since
                elif len(module._forward_pre_hooks) > 1 and not module._modules and not self.options.hold(module):
                    call.derivatives = None  # such a hook has set an option
                call.seen = None
                self._end(module, call, output)

    def at_once(self, module: Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        """Record a call when it is over.

        Args:
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            output: What it returned; ``None``, also, where somebody has handed the hook on to another module, with other settings.
        """
        if output is None or transformed() or not (recording.on and torch.is_grad_enabled()):
            return
        if isinstance(output, Tensor) and not output.requires_grad:
            return
        if recording.open and not self.path:  # one with a path is called by others, as a rule
            drop_interrupted()
        call = ModuleCall(module, self, args, kwargs, ruled=self.know(module) and not intercepted(args))
        if vars(module).get("inplace") is True:
            call.derivatives = None  # switched on after extend()
        self._end(module, call, output)

    def _end(self, module: Module, call: ModuleCall, output: Any) -> None:
        call.attach(output)
        if pass_on(call):
            return
        if self._last is None:
            _show_recorded_tensors(type(module))
        self._last = ref(call)

    def install(self, module: Module) -> None:
        """Install the hooks.

        Args:
            module: The module to record.
        """
        early, ours = module._modules or vars(module).get("inplace") is True, type(module).__module__.startswith("torch.nn")
        if ours and not early:
            module.register_forward_hook(self.at_once, with_kwargs=True, prepend=True)
            return
        module.register_forward_pre_hook(self.before if early else self.begin, with_kwargs=True)
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True, prepend=True)


def _again(path: str, kind: str, bare: bool, fields: list[str], torn: bool = False) -> Recorder:
    savefields.update(fields)  # a process that reads a pickle may have made no extension
    return Recorder(path, kind, bare, torn)


def recorder_of(module: Module) -> Recorder | None:
    """Return the recorder of a module.

    Args:
        module: Any module.

    Returns:
        ``None`` if the module is not extended.
    """
    for hook in module._forward_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Recorder):
            return owner
    return None


def remove_recorder(module: Module) -> None:
    """Remove the hooks of the recorder of a module, if it has one, also those of a copied module, for which no handles exist.

    Args:
        module: Any module.
    """
    recorder = recorder_of(module)
    if recorder is None:
        return
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is recorder]:
            del hooks[key]
            for group in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs, module._forward_hooks_always_called):
                group.pop(key, None)


def last_call(module: Module) -> ModuleCall | None:
    """Return the call to which ``input0``, ... and ``output`` of a module belong.

    Args:
        module: Any module.

    Returns:
        The latest one that is alive, unless ``reading`` says something else; ``None`` if there is none.
    """
    call = (recording.read_from or {}).get(module)
    if call is not None:
        return call
    recorder = recorder_of(module)
    return None if recorder is None else recorder.last


class _RecordedTensor:
    """``module.input0``, ``module.output``: views onto the last call of an extended module, readable while its graph lives.

    Not a data descriptor: what a user stores under the same name in the instance, or registers as parameter, buffer or child, is found first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Module | None, cls: type | None = None) -> Any:
        if module is None:
            return self
        call = last_call(module)
        registered = any(self.name in module.__dict__.get(group, ()) for group in ("_parameters", "_buffers", "_modules"))
        value = None if call is None or registered or call.released else call.at_hand(self.name)
        if value is None:
            raise AttributeError(self.name)  # Module.__getattr__ takes over
        return value


@contextmanager
def reading(calls: dict[Module, ModuleCall]) -> Iterator[None]:
    """Let ``input0``, ... and ``output`` of modules be those of certain calls, even if the modules were called again since.

    Args:
        calls: Module to call.

    Yields:
        Nothing.

    Raises:
        NotRecordedError: If one is read that is not at hand.
        AttributeError: If something else is read that a module does not have.
    """
    before = recording.read_from
    recording.read_from = calls
    try:
        yield
    except AttributeError as error:
        call = calls.get(error.obj) if isinstance(error.obj, Module) else None
        tensors = [] if call is None else ["output", *(f"input{i}" for i, slot in enumerate(call.inputs) if isinstance(slot, Slot))]
        if error.name not in tensors or call.released:
            raise
        raise NotRecordedError(
            f"{error.name} of {call.path} is not at hand: the library's rule does not need it, or it was changed in place since. "
            "Enter the context before the forward pass: one with retain_graph=True, or with module extensions, keeps all inputs and outputs."
        ) from error
    finally:
        recording.read_from = before


def _show_recorded_tensors(cls: type[Module]) -> None:
    """Let modules of a class show recorded tensors, under the names that the class does not use itself.

    Only classes of modules that were extended: on ``torch.nn.Module``, names that cannot be read would break ``torch.compile`` for everybody.

    Args:
        cls: The class.
    """
    for name in ("output", *(f"input{i}" for i in range(8))):
        if not hasattr(cls, name):
            setattr(cls, name, _RecordedTensor(name))
