"""Slot: what a call of a module keeps of one of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from backpack.core.derivatives.records import number_of
from backpack.utils.differentiation import version_of
from backpack.utils.errors import OverwrittenError
from backpack.utils.nested import opened, tensors_in

Edge = tuple[Node, int]
"""Where a tensor comes from: (graph node, which of its outputs)."""
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class Slot:
    """One tensor of a call: kept (detached), or only its shape, type, device and a weak reference.

    Attributes:
        kept: Whether it was kept because a rule needs it; not so where somebody may want to read it.
    """

    __slots__ = ("base_edge", "device", "dtype", "edge", "kept", "origin", "shape", "value", "version")

    def __init__(self, tensor: Tensor, keep: bool, clone: bool = False, given: bool = False) -> None:
        """Record a tensor: few calls, since this happens once a tensor in every forward pass.

        Args:
            tensor: The tensor.
            keep: Whether to keep it.
            clone: Whether to keep a copy.
            given: Whether it was given to a module: note where it comes from; for a view, also where its base does, to which an operation in
                place would lead.
        """
        try:
            self.shape = tensor.shape
        except RuntimeError:  # a nested tensor has none
            self.shape = torch.Size()
        self.dtype, self.device, self.origin, self.kept = tensor.dtype, tensor.device, ref(tensor), keep
        self.edge: Edge | None = None
        self.base_edge: Edge | None = None
        self.value: Tensor | None = None
        if given and tensor.requires_grad:
            node = tensor.grad_fn
            self.edge = get_gradient_edge(tensor).node if node is None else node, tensor.output_nr
            base = same_data(tensor) if tensor._is_view() else None
            if base is not None and base.grad_fn is not None:
                self.base_edge = base.grad_fn, base.output_nr
        if keep:
            self.value = tensor = tensor.detach().clone() if clone else tensor.detach()
        try:
            self.version = tensor._version
        except RuntimeError:  # inference mode does not count
            self.version = 0

    @property
    def makers(self) -> list[Node]:
        """The node that made the tensor, and that of its base, which stays in the graph where an operation in place replaces the other."""
        return [edge[0] for edge in (self.edge, self.base_edge) if edge is not None]

    @property
    def alive(self) -> Tensor | None:
        """The tensor that was recorded, part of the graph; ``None`` if nobody holds it any more, or it was changed since."""
        tensor = self.origin()
        return tensor if tensor is not None and version_of(tensor) == self.version else None

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that was recorded, detached if it was kept; ``None`` if it was not, and nobody holds it any more."""
        return self.value if self.kept else self.origin()

    def read(self, name: str, call: Any) -> Tensor | None:
        """Return the recorded tensor, detached; a sparse one with all its zeros, as rules expect it.

        Args:
            name: Its name, for the error.
            call: The call, for the error.

        Returns:
            The tensor; ``None`` if it was not kept, and nobody else holds it as it was.

        Raises:
            OverwrittenError: If a rule needs it, and it was changed in place since it was recorded.
        """
        tensor = self.origin() if self.value is None and not self.kept else self.value
        if tensor is None:
            return None
        if (version := version_of(tensor)) != self.version:
            if not self.kept:
                return None
            raise OverwrittenError(
                f"{name} of module {call.path} of shape {list(self.shape)} was changed in place after the forward pass (version {self.version}, now "
                f"{version}), but a rule needs its old value. Do the operation out of place."
            )
        tensor = tensor if tensor is self.value else tensor.detach()
        return tensor.to_dense() if tensor.layout in _SPARSE else tensor

    def without_graph(self) -> Slot:
        """Copy the record without saying where the tensor comes from.

        Returns:
            A record that shares the tensor.
        """
        other = copy(self)
        other.edge = other.base_edge = None
        return other

    def like(self) -> Tensor:
        """Return a tensor without data that has the recorded shape and dtype.

        Returns:
            Tensor on the meta device.
        """
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def same_data(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which another one is a view with the same entries in the same order.

    Args:
        tensor: A view.

    Returns:
        The base; ``None`` if there is no such tensor.
    """
    base = tensor._base
    return base if tensor.numel() == base.numel() and tensor.is_contiguous() and base.is_contiguous() else None


def was_given(base: Tensor, inputs: Sequence[Any]) -> bool:
    """Say whether a module was given a tensor, or a view of it: its call leads there, and must not be held by the node that made the tensor.

    Nobody would find that cycle, which goes through autograd's own edges.

    Args:
        base: The tensor.
        inputs: What the module was called with: slots, and other values.

    Returns:
        Whether it was.
    """
    given = (tensor for value in inputs for tensor in ([value.origin()] if isinstance(value, Slot) else tensors_in(opened(value))))
    return any(tensor is base or (tensor is not None and tensor._base is base) for tensor in given)


def shown(call: Any, name: str) -> Any:
    """Return what a call was given or has returned, as rules read it.

    Args:
        call: The call.
        name: ``"output"`` or ``"input{i}"``.

    Returns:
        Detached tensor; if it was not kept, one of its shape and type without data; for an argument that is no tensor, its value.
    """
    value = call.tensor(name)
    if value is not None:
        return value
    slot = call.outputs[0] if name == "output" else call.inputs[number_of(name)]
    return slot.like() if isinstance(slot, Slot) else None


def recorded(name: str) -> property:
    """Let a tensor of calls be an attribute.

    Args:
        name: ``"output"`` or ``"input{i}"``.

    Returns:
        The attribute.
    """
    return property(partial(shown, name=name))


def versions_of(parameters: Mapping[str, Tensor | None], constants: Mapping[str, Tensor | None]) -> list[int | None]:
    """Count how often tensors of a module were changed in place, once a call in every forward pass.

    Args:
        parameters: Name to parameter.
        constants: Name to other tensor.

    Returns:
        Numbers of changes, in this order.
    """
    try:
        versions = [None if t is None else t._version for t in parameters.values()]
        return versions + [None if t is None else t._version for t in constants.values()] if constants else versions
    except RuntimeError:  # inference mode does not count
        return [None if t is None else version_of(t) for t in (*parameters.values(), *constants.values())]


def contents_of(parameters: Mapping[str, Tensor | None]) -> list[str]:
    """Return what tells whether parameters have changed, also by those who do not count: optimizers with ``fused=True``, operations on ``p.data``.

    Args:
        parameters: Name to parameter.

    Returns:
        Their norms, as text: those that are no numbers are to be like themselves.
    """
    held = [p.detach() for p in parameters.values() if p is not None]
    return [torch.linalg.vector_norm(p, dtype=torch.cdouble if p.is_complex() else torch.double).item().hex() for p in held]


def places_of(parameters: Mapping[str, Tensor | None]) -> list[int]:
    """Return where the data of parameters are.

    Args:
        parameters: Name to parameter.

    Returns:
        Addresses; none in a transformation, whose tensors have no data.
    """
    try:
        return [p.data_ptr() for p in parameters.values() if p is not None]
    except RuntimeError:
        return []
