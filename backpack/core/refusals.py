"""Refusals of a plan: what is wrong, where, and the way out."""

from __future__ import annotations

from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.calls import Edge
from backpack.core.graph import compiled, shape_of
from backpack.core.owners import owners
from backpack.core.samples import Layout
from backpack.core.walk import Walk
from backpack.utils.errors import MixedSamplesError, NotRecordedError, UnattributedError, UnsupportedError, exclusion

_NOT_COMPILED = 'Run the forward pass of a compiled model under `torch.compiler.set_stance("force_eager")` where you ask for quantities.'
_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
"""Where the classes of sharded modules and of sharded parameters come from."""


def refuse_mixing(walk: Walk, node: Node, how: str) -> None:
    """Refuse samples that influence one another.

    Args:
        walk: The graph.
        node: Node upstream of which the parameters lie.
        how: In which way.

    Raises:
        MixedSamplesError: Always.
    """
    raise MixedSamplesError(
        f"The samples of the mini-batch influence one another: {how}. No per-sample quantity exists for {walk.names(walk.reach[node])}. Use an "
        "operation that treats samples independently (LayerNorm or GroupNorm instead of batch statistics; .eval() for BatchNorm) and inputs "
        f"that have a batch axis, or leave these parameters out of all extensions: {walk.exclusion(walk.reach[node])}."
    )


def refuse_unrecorded(walk: Walk, node: Node) -> None:
    """Refuse parameters of modules that were not recorded.

    Args:
        walk: The graph.
        node: Node upstream of which the parameters lie.

    Raises:
        NotRecordedError: Always.
    """
    raise NotRecordedError(
        f"No forward pass of an extended module was recorded for {walk.names(walk.reach[node])}. It ran before extend(), "
        "under disable(), under no_grad(), with tensors in place of the module's parameters (torch.func.functional_call), or compiled: run it again "
        f"after extend(). {_NOT_COMPILED}"
    )


def refuse_compiled(walk: Walk, node: Node) -> None:
    """Refuse to look into a compiled part of the model.

    Args:
        walk: The graph.
        node: A node upstream of which parameters lie.

    Raises:
        UnsupportedError: If the node stands for such a part.
    """
    if compiled(node):
        raise UnsupportedError(
            f"A part of the model was compiled (torch.compile, or a CUDA graph): for autograd it is the single node {node.name()}, in which neither "
            f"samples nor uses of {walk.names(walk.reach[node])} can be followed. {_NOT_COMPILED}"
        )


def refuse_added(walk: Walk) -> None:
    """Refuse parameters that an extended module has got since, and that would carry nothing.

    Args:
        walk: The graph.

    Raises:
        NotRecordedError: If there is one, and it was not given to ``unextend``.
    """
    foreign = {id(leaf) for leaf in walk.leaves.values() if leaf not in owners and not owners.released(leaf)}
    for call in walk.calls:
        for name, parameter in call.module.named_parameters() if call.root else ():
            if id(parameter) in foreign:
                raise NotRecordedError(
                    f"{name} of {call.path or type(call.module).__name__} belongs to a module that was added after extend(): write `extend(model)` "
                    "again, before the forward pass; or unextend() that module, if it is to carry no quantities."
                )


def refuse_sharded(walk: Walk) -> None:
    """Refuse models whose parameters are spread over the ranks of a distributed program.

    Args:
        walk: The graph.

    Raises:
        UnsupportedError: If a call of such a model is in it.
    """
    flat = ["The model" for leaf in walk.leaves.values() if getattr(leaf, "_is_flat_param", False)]
    roots = [call for call in walk.calls if call.root]
    sharded = flat + [
        f"{name or call.path} ({type(module).__name__})"
        for call in roots
        for name, module in call.module.named_modules()
        if any(cls.__module__.startswith(_SHARDING) for what in (module, *module._parameters.values()) for cls in type(what).__mro__)
    ]
    if sharded:
        raise UnsupportedError(
            f"{sharded[0]} has parameters that are spread over ranks (torch.distributed.fsdp, or DTensor): a rank has a part of them, or has all "
            "of them for the time of a pass only, so that there is nothing to write results on. Use DistributedDataParallel, or call backward "
            "outside of the context."
        )


def refuse_use(walk: Walk, node: Node) -> None:
    """Refuse a use of parameters that belongs to no sample.

    Args:
        walk: The graph.
        node: Node upstream of which the parameters lie.

    Raises:
        UnattributedError: Always.
    """
    raise UnattributedError(
        f"{walk.names(walk.reach[node])} is used outside of everything that has samples (for example a penalty on the "
        "parameters), so that its "
        "gradient there belongs to no sample. To leave a term out of all quantities, and keep it in .grad, write "
        "`loss = loss + backpack.leave_out(penalty)`; to leave the parameters out of an extension, "
        f"{walk.exclusion(walk.reach[node])}."
    )


def refuse_ambiguous(walk: Walk, edge: Edge, one: Layout, other: Layout) -> None:
    """Refuse a tensor whose samples lie differently for two of its consumers.

    Args:
        walk: The graph.
        edge: Edge of the tensor.
        one: Where they lie for one consumer.
        other: Where they lie for another one.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"The samples lie on axis {one.axis} of a tensor of shape {list(shape_of(edge))} for one of its consumers and on axis {other.axis} for "
        f"another ({one.samples} and {other.samples} samples): per-sample quantities of {walk.names(walk.reach[edge[0]])} are ambiguous. "
        f"Leave these parameters out of all extensions: {walk.exclusion(walk.reach[edge[0]])}."
    )


def refuse_sizes(walk: Walk, edge: Edge, one: int, other: int) -> None:
    """Refuse a tensor at which mini-batches of different size meet.

    Args:
        walk: The graph.
        edge: Edge of the tensor.
        one: Number of samples for one consumer.
        other: Number of samples for another one.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"Mini-batches of {one} and of {other} samples meet in a tensor of shape {list(shape_of(edge))}: per-sample quantities of "
        f"{walk.names(walk.reach[edge[0]])} are ambiguous. Call backward for each of them, or leave these parameters out of all "
        f"extensions: {walk.exclusion(walk.reach[edge[0]])}."
    )


def refuse_uses(parameter: Parameter, one: int, other: int) -> None:
    """Refuse a parameter that is used with mini-batches of different size.

    Args:
        parameter: The parameter.
        one: Number of samples for one use.
        other: Number of samples for another one.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{owners[parameter]} is used with mini-batches of {one} and of {other} samples in one backward pass: which samples belong together "
        f"is not known. Call backward for each of them, or leave it out of all extensions: {exclusion(owners[parameter])}."
    )
