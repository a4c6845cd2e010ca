"""The one table from module class to derivatives, looked up along the class hierarchy of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.utils.errors import ArgumentTypeError

Rule = TypeVar("Rule", bound=type[BaseDerivatives])

_RULES: dict[type[Module], BaseDerivatives] = {}
_FOUND: dict[tuple[type[Module], bool], BaseDerivatives | None] = {}


@overload
def register(module_class: type[Module]) -> Callable[[Rule], Rule]: ...


@overload
def register(module_class: type[Module], rule: BaseDerivatives | type[BaseDerivatives]) -> None: ...


def register(module_class: type[Module], rule: BaseDerivatives | type[BaseDerivatives] | None = None) -> Callable[[Rule], Rule] | None:
    """Make a rule known for a module class and for its subclasses that keep its ``forward``.

    With one argument it decorates a class of derivatives; several decorators may be stacked.

    Args:
        module_class: The class of modules that the rule differentiates.
        rule: Derivatives, or a class of derivatives that is constructed without arguments.

    Returns:
        A class decorator if ``rule`` is ``None``, else nothing.

    Raises:
        ArgumentTypeError: If ``module_class`` is not a subclass of ``torch.nn.Module``.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, Module)):
        raise ArgumentTypeError(f"Rules are registered for subclasses of torch.nn.Module, got {module_class!r}. Use @register(MyModule).")
    if rule is None:

        def decorator(rule_class: Rule) -> Rule:
            register(module_class, rule_class)
            return rule_class

        return decorator

    _RULES[module_class] = rule() if isinstance(rule, type) else rule
    _FOUND.clear()
    return None


def derivatives_for(module: Module | type[Module]) -> BaseDerivatives | None:
    """Find the most specific rule along the method resolution order.

    A class that brings its own ``forward`` may compute a different map, hence it does not inherit the rule of a base class, unless the rule
    asks that ``forward`` (``any_forward``): a subclass of one of torch's losses is differentiated automatically.

    Args:
        module: A module or a class of modules.

    Returns:
        The rule, or ``None`` if there is none.
    """
    key = (module, False) if isinstance(module, type) else (type(module), "forward" in vars(module))
    if key not in _FOUND:
        _FOUND[key] = _search(*key)
    return _FOUND[key]


def registered() -> dict[type[Module], BaseDerivatives]:
    """List all rules.

    Returns:
        A copy of the table.
    """
    return dict(_RULES)


def _search(module_class: type[Module], own_forward: bool) -> BaseDerivatives | None:
    for base in module_class.__mro__:
        rule = _RULES.get(base)
        if rule is not None and (rule.any_forward or not own_forward):
            return rule
        own_forward |= "forward" in vars(base)
    return None
