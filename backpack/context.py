"""CTX: settings of the active context, one set for each thread; and ``disable``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar
from warnings import warn
from weakref import WeakSet

from torch.nn import Module

from backpack.core.recording import remove_recorder
from backpack.core.state import recording
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.utils.hooks import no_op


class _Settings(threading.local):
    """Settings of the innermost context that a thread has entered."""

    extensions: tuple[BackpropExtension, ...] = ()
    debug: bool = False
    hook: Callable[[Module], None] = staticmethod(no_op)
    retain_graph: bool = False
    inside: bool = False


_settings = _Settings()
_extended: WeakSet[Module] = WeakSet()


class _Attributes(type):
    """The settings as attributes of the class: ``CTX.active_exts``, ``CTX.debug``, ``CTX.extension_hook``, ``CTX.retain_graph``."""

    active_exts = property(lambda cls: cls.get_active_exts(), lambda cls, value: cls.set_active_exts(value))
    debug = property(lambda cls: cls.get_debug(), lambda cls, value: cls.set_debug(value))
    extension_hook = property(lambda cls: cls.get_extension_hook(), lambda cls, value: cls.set_extension_hook(value))
    retain_graph = property(lambda cls: cls.get_retain_graph(), lambda cls, value: cls.set_retain_graph(value))


class CTX(metaclass=_Attributes):
    """Settings of the active context. They belong to the thread that entered it.

    Attributes:
        hook_handles: Handles of the user's own, removed with the hooks of the extended modules.
    """

    hook_handles: ClassVar[list[Any]] = []

    @staticmethod
    def set_active_exts(active_exts: Iterable[BackpropExtension]) -> None:
        """Set the active extensions, of the context that the thread has entered.

        Args:
            active_exts: Extensions.
        """
        active_exts = tuple(active_exts)
        if active_exts and not _settings.inside:
            warn("Extensions run in backward passes inside of `with backpack(...)` only, and no context is entered.", stacklevel=2)
        _settings.extensions = active_exts

    @staticmethod
    def get_active_exts() -> tuple[BackpropExtension, ...]:
        """Return the active extensions.

        Returns:
            Extensions.
        """
        return _settings.extensions

    @staticmethod
    def exchange(
        extensions: Iterable[BackpropExtension], debug: bool, hook: Callable[[Module], None], retain_graph: bool, inside: bool = True
    ) -> tuple:
        """Set all settings at once.

        Args:
            extensions: Active extensions.
            debug: Debug mode.
            hook: The extension hook.
            retain_graph: Whether recorded tensors survive a backward pass.
            inside: Whether a context is entered.

        Returns:
            The settings before, in the same order.
        """
        before = _settings.extensions, _settings.debug, _settings.hook, _settings.retain_graph, _settings.inside
        _settings.extensions, _settings.debug, _settings.hook, _settings.retain_graph = tuple(extensions), debug, hook, retain_graph
        _settings.inside = inside
        return before

    @staticmethod
    def add_extended(module: Module) -> None:
        """Remember an extended module, while it lives, for ``remove_hooks``.

        Args:
            module: The module.
        """
        _extended.add(module)

    @staticmethod
    def add_hook_handle(hook_handle: Any) -> None:
        """Remember a handle of the user's own for ``remove_hooks``.

        Args:
            hook_handle: Has a method ``remove``.
        """
        CTX.hook_handles.append(hook_handle)

    @staticmethod
    def remove_hooks() -> None:
        """Remove the hooks of all extended modules, and those whose handles were added. The flags ``_backpack_extend`` stay."""
        for module in _extended:
            remove_recorder(module)
        _extended.clear()
        for handle in CTX.hook_handles:
            handle.remove()
        CTX.hook_handles.clear()

    @staticmethod
    def is_extension_active(*extension_classes: type[BackpropExtension]) -> bool:
        """Say whether an extension of one of the classes is active.

        Args:
            *extension_classes: Classes.

        Returns:
            Whether there is one.
        """
        return any(isinstance(extension, extension_classes) for extension in _settings.extensions)

    @staticmethod
    def get_debug() -> bool:
        """Say whether debug mode is on.

        Returns:
            Whether it is.
        """
        return _settings.debug

    @staticmethod
    def set_debug(debug: bool) -> None:
        """Switch debug mode.

        Args:
            debug: On or off.
        """
        _settings.debug = debug

    @staticmethod
    def get_extension_hook() -> Callable[[Module], None]:
        """Return the extension hook.

        Returns:
            A function of a module.
        """
        return _settings.hook

    @staticmethod
    def set_extension_hook(extension_hook: Callable[[Module], None]) -> None:
        """Set the extension hook.

        Args:
            extension_hook: A function of a module.
        """
        _settings.hook = extension_hook

    @staticmethod
    def get_retain_graph() -> bool:
        """Say whether recorded tensors survive a backward pass.

        Returns:
            Whether they do.
        """
        return _settings.retain_graph

    @staticmethod
    def set_retain_graph(retain_graph: bool) -> None:
        """Let recorded tensors survive a backward pass.

        Args:
            retain_graph: Whether they do.
        """
        _settings.retain_graph = retain_graph


class _Recording(type):
    """Whether calls are recorded, as an attribute of the class: ``disable.store_io``."""

    store_io = property(lambda _: recording.on, lambda _, value: setattr(recording, "on", value))


class disable(threading.local, metaclass=_Recording):  # noqa: N801
    """Context in which extended modules record nothing. A backward pass over such a graph, with active extensions, is refused."""

    def __init__(self) -> None:
        """Prepare to be entered, by any thread, any number of times."""
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(recording.on)
        recording.on = False

    def __exit__(self, *_: Any) -> None:
        recording.on = self._before.pop()

    @staticmethod
    def should_store_io() -> bool:
        """Say whether extended modules record their forward passes.

        Returns:
            Whether they do.
        """
        return recording.on
