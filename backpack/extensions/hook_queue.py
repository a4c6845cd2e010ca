"""When the extension hook runs: on each module once, as soon as everything in it is done."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch.nn import Module, Parameter

from backpack.core.plan import Plan
from backpack.core.recording import reading, recorder_of
from backpack.core.walk import Walk
from backpack.utils.module_classification import is_no_op


class HookQueue:
    """Modules that wait for their hook in one backward pass: for all that its plan has them do, or for its end if nothing is computed."""

    def __init__(self, walk: Walk, plan: Plan | None, hook: Callable[[Module], None], debug: bool) -> None:
        self._hook, self._debug = hook, debug
        uses: Container[Parameter] = set(walk.parameters) if plan is None else plan.uses
        calls = sorted(walk.calls, key=lambda call: call.order)
        self._calls = {call.module: call for call in calls}  # the latest ones of this pass
        # autograd has been at a loss, and given its tensors back, before anything else happens
        self._losses = {module: call.without_graph() for module, call in self._calls.items() if call.is_loss}
        modules = {module for module in self._calls if not is_no_op(module)}
        # a module need not be called for its parameters to be used
        inside = {child for module in modules for child in module.modules()} - modules
        modules |= {module for module in inside if recorder_of(module) and any(p in uses for p in module._parameters.values())}
        self._waiting: dict[Module, set] = {}  # for calls, parameters (by id) and modules inside
        for module in sorted(modules, key=lambda module: module not in self._losses):
            self._waiting[module] = {id(p) for p in module.parameters() if p in uses}
            self._waiting[module] |= {child for child in module.modules() if child is not module and child in modules}
        for call in () if plan is None else {unit.call for unit in plan.units.values()}:
            if call.module in self._waiting:
                self._waiting[call.module].add(call)
        self._idle = [module for module, events in self._waiting.items() if not events]
        self._waiters: dict[Any, list[Module]] = {}
        for module, events in self._waiting.items():
            for event in events:
                self._waiters.setdefault(event, []).append(module)

    def happened(self, event: Any) -> None:
        """Run the hooks of modules that wait for nothing else: losses first, and others without a quantity, when anything happens at all.

        Args:
            event: A call, the id of a parameter, or a module.
        """
        idle, self._idle = self._idle, []
        for module in (*idle, *self._waiters.pop(event, ())):
            if module in self._waiting:
                self._waiting[module].discard(event)
                if not self._waiting[module]:
                    self._run(module)

    def run_all(self) -> None:
        """Run the hooks that are left, of containers after those of what is inside."""
        for module in sorted(self._waiting, key=lambda m: len(list(m.modules()))):
            if module in self._waiting:  # its own hook may have run with that of another one
                self._run(module)

    def _run(self, module: Module) -> None:
        del self._waiting[module]
        if self._debug:
            print(f"[DEBUG] Extension hook on {recorder_of(module).path or type(module).__name__}")
        loss = self._losses.pop(module, None)
        with reading(self._calls if loss is None else self._calls | {module: loss}):
            self._hook(module)
        self.happened(module)
