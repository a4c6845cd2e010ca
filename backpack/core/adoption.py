"""Parameters that extended modules have got since ``extend``: with a copy, a pickle, a state dictionary, or by assignment."""

from __future__ import annotations

from backpack.core.owners import owners, savefields
from backpack.core.recording import recorder_of
from backpack.core.walk import Walk
from backpack.utils.errors import NotRecordedError
from backpack.utils.module_classification import is_no_op


def has_newcomers(walk: Walk) -> bool:
    """Say whether a graph may use parameters that are not tracked yet, or whose results are not known.

    Args:
        walk: The graph.

    Returns:
        Whether it may.
    """
    return bool(walk.foreign) or any([not (call.recorder.known or call.recorder.bare) for call in walk.calls if call.root])


def adopt(walk: Walk) -> bool:
    """Track the parameters of all extended modules that were called, or lie inside one that was; modules that are called have tracked their own.

    Results that parameters have brought with them, of which nothing else is known, are noted: a pass deletes them where they are stale.

    Args:
        walk: The graph.

    Returns:
        Whether there was one that the graph may use.

    Raises:
        NotRecordedError: If the graph uses a parameter of a module that is not extended, and was not given to ``unextend``; or if an outermost
            module came with a copy in which the module around it may have lost its recorder, and would be taken for the model.
    """
    foreign, found = {id(leaf) for leaf in walk.leaves.values() if leaf.requires_grad and leaf not in owners and not owners.released(leaf)}, False
    calls = [call for call in walk.calls if call.root and (foreign or not call.recorder.bare)]  # a loss may have been deleted since
    for call in calls:
        if call.recorder.is_torn():
            raise NotRecordedError(
                f"{call.path} came with a copy of a module, or of a part of one, whose class makes copies in its own way, as torch.fx.GraphModule "
                "does. What extend() has installed may be missing there, and where the samples lie in a module around this one would not be known. "
                "Write `extend(model)` again for the module that you call, before the forward pass."
            )
    called = [(call.recorder.path, call.module) for call in calls]
    for prefix, root in (*called, *(("", root) for root in (owners.roots() if foreign else ()))):  # the layers of a root may be called one by one
        for path, module in root.named_modules(prefix=prefix):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                for field in savefields & vars(parameter).keys() - owners.notes(parameter).keys():
                    owners.carry(parameter, field, None)
                if parameter in owners or owners.released(parameter) or parameter.grad_fn is not None or parameter.is_inference():
                    continue
                if recorder_of(module) is not None or is_no_op(module):
                    owners.add(parameter, f"{path}.{name}" if path else name)
                    found = True
                elif id(parameter) in foreign:
                    raise NotRecordedError(
                        f"{path}.{name} belongs to a module that is not extended: it was added after extend(), or left out, by unextend(), of the "
                        "model of which this is a copy. Write `extend(model)` again, before the forward pass; or unextend() that module, if it is to "
                        "carry no quantities."
                    )
    for call in calls:
        call.recorder.known = True
    return found
