"""The one table from module class to derivatives, looked up along the class hierarchy of a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import getattr_static
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, overload
from weakref import ref

from torch.nn import Module

from backpack.core.derivatives.agreement import agreeing
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.utils.class_table import ClassTable
from backpack.utils.errors import ArgumentTypeError

Rule = TypeVar("Rule", bound=type[BaseDerivatives])


class Found(NamedTuple):
    """What was found for a class of modules, as long as its methods are the same: the rule, the class that it was registered for, and whose it is.

    There is no such class where the rule asks the module's own ``forward``; ``ours`` says whether the rule, if there is one, is the library's.
    """

    read: Callable[[type[Module]], Any]
    methods: Any
    rule: BaseDerivatives | None
    base: type[Module] | None
    ours: bool


_RULES: dict[type[Module], tuple[BaseDerivatives, dict[str, Any]]] = {}
_PLAIN = (FunctionType, classmethod, staticmethod, property)
_NOT_COMPUTING = frozenset(
    """reset_parameters reset_running_stats from_pretrained convert_sync_batchnorm _check_input_dim _check_non_zero_input_channels
    _fill_padding_idx_with_zero""".split()
)


@overload
def register(module_class: type[Module]) -> Callable[[Rule], Rule]: ...


@overload
def register(module_class: type[Module], rule: BaseDerivatives | type[BaseDerivatives]) -> None: ...


def register(module_class: type[Module], rule: BaseDerivatives | type[BaseDerivatives] | None = None) -> Callable[[Rule], Rule] | None:
    """Make a rule known for a module class and for its subclasses that keep its ``forward``, and the methods that ``forward`` may call.

    A subclass that overrides another method of ``module_class``, which ``torch.nn.Module`` does not have, may compute a different map: if it
    does not, register the rule for it as well.

    With one argument it decorates a class of derivatives; several decorators may be stacked.

    Args:
        module_class: The class of modules that the rule differentiates.
        rule: Derivatives, or a class of derivatives that is constructed without arguments.

    Returns:
        A class decorator if ``rule`` is ``None``, else nothing.

    Raises:
        ArgumentTypeError: If ``module_class`` is not a subclass of ``torch.nn.Module``, or ``rule`` is none.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, Module)):
        raise ArgumentTypeError(f"Rules are registered for subclasses of torch.nn.Module, got {module_class!r}. Use @register(MyModule).")
    if rule is None:

        def decorator(rule_class: Rule) -> Rule:
            register(module_class, rule_class)
            return rule_class

        return decorator

    rule = rule() if isinstance(rule, type) and issubclass(rule, BaseDerivatives) else rule
    if not isinstance(rule, BaseDerivatives):
        raise ArgumentTypeError(f"The rule of {module_class.__name__} must be derivatives (backpack.core.derivatives.basederivatives), got {rule!r}.")
    methods = {name: getattr_static(module_class, name) for name in _METHODS[ref(module_class)]}
    _RULES[module_class] = agreeing(rule), methods
    for table in _FOUND:
        table.clear()
    return None


def derivatives_for(module: Module | type[Module]) -> BaseDerivatives | None:
    """Find the most specific rule along the method resolution order.

    A class, or a module, that brings its own ``forward``, or another of the methods with which a base class computes (``_conv_forward``), may
    compute a different map, as may one of which these were replaced since the rule was registered, hence it does not inherit the rule of that base
    class, unless the rule asks the ``forward`` that is there (``any_forward``): a subclass of one of torch's losses is differentiated automatically.

    Args:
        module: A module or a class of modules.

    Returns:
        The rule, or ``None`` if there is none.
    """
    return find(module).rule


def registered() -> dict[type[Module], BaseDerivatives]:
    """List all rules.

    Returns:
        A copy of the table.
    """
    return {module_class: rule for module_class, (rule, _) in _RULES.items()}


def find(module: Module | type[Module]) -> Found:
    """Look a rule up, with what it describes.

    Args:
        module: A module or a class of modules.

    Returns:
        What was found.
    """
    if isinstance(module, type):
        module_class, replaced = module, False
    else:
        module_class = type(module)
        replaced = not module.__dict__.keys().isdisjoint(_METHODS[ref(module_class)])
    found = _FOUND[replaced][ref(module_class)]
    if found.read(module_class) != found.methods:
        found = _FOUND[replaced].put(module_class, _search(module_class, replaced))
    return found


def computes_like(module: Module, base: type[Module]) -> bool:
    """Say whether a module of a class, or of a subclass, computes what the class says, which may leave that to subclasses.

    Args:
        module: The module.
        base: The class.

    Returns:
        Whether neither a subclass nor the module brings another ``forward``, or another method that it may call.
    """
    kind, methods = type(module), _METHODS[ref(base)]
    if getattr_static(base, "forward") is getattr_static(Module, "forward"):
        return True
    same = kind is base or all(getattr_static(kind, name) is getattr_static(base, name) for name in methods)
    return same and module.__dict__.keys().isdisjoint(methods)


def _search(module_class: type[Module], replaced: bool) -> Found:
    candidates = [(base, *_RULES[base]) for base in module_class.__mro__ if base in _RULES]
    # a descriptor of another kind may give something new each time, or nothing, when the class is asked
    plain = {name for _, _, methods in candidates for name, method in methods.items() if isinstance(method, _PLAIN)}
    read = attrgetter(*plain | {"forward"} if candidates else ["__bases__"])  # a traced module has a forward that its class does not
    now = read(module_class)
    if candidates and not all(getattr(method, "__module__", "").startswith("torch.") for method in (now if isinstance(now, tuple) else (now,))):
        read = partial(_identities, read)  # methods of a class may hold it, as those that call super() do
        now = read(module_class)
    for base, rule, methods in candidates:
        if not replaced and all(getattr_static(module_class, name) is method for name, method in methods.items()):
            return Found(read, now, rule, base, _is_ours(rule))
        if rule.any_forward:
            return Found(read, now, rule, None, _is_ours(rule))
    return Found(read, now, None, None, ours=True)


def _identities(read: Callable[[type[Module]], Any], module_class: type[Module]) -> tuple[int, ...]:
    found = read(module_class)
    return tuple(map(id, found if isinstance(found, tuple) else (found,)))


def _is_ours(rule: BaseDerivatives) -> bool:
    return type(rule).__module__.startswith("backpack.")


def _methods(cls: type[Module]) -> frozenset[str]:
    """Name what may take part in the forward pass of a class.

    Args:
        cls: The class.

    Returns:
        Names of functions and properties that ``torch.nn.Module`` does not have, but for those known not to take part.
    """
    owned = [vars(base) for base in cls.__mro__ if base not in Module.__mro__]
    names = {name for members in owned for name, value in members.items() if hasattr(type(value), "__get__") or callable(value)}
    return frozenset({"forward"} | names.difference(dir(Module), _NOT_COMPUTING))


_METHODS = ClassTable(_methods)
_FOUND = [ClassTable(partial(_search, replaced=replaced)) for replaced in (False, True)]
