"""The walk: autograd's graph, each node once, and what lies upstream of it; the pieces of it that module calls stand for."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.batches import batch_of, given_to, is_single, lengths_of, nested_in, of_others, rows_of
from backpack.core.calls import KEY, Mark, ModuleCall
from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.graph import LEAF, kind_of, operation
from backpack.core.linear import LINEAR_IN_LOG_PROBABILITIES, is_linear
from backpack.core.loss_nodes import FUNCTIONS, normalizer, title
from backpack.core.losses import completes_softmax, take_for_loss
from backpack.core.memory import place_of
from backpack.core.operations import AGAIN, NAMES, as_described
from backpack.core.owners import owners
from backpack.core.slots import Edge, Slot
from backpack.core.spectral_norm import singular_vectors
from backpack.utils.differentiation import search
from backpack.utils.errors import UnsupportedError

LEFT_OUT = "backpack.left_out"
"""Key in the metadata of a node whose term is left out of all quantities."""
GENERIC = GenericDerivatives()


class Need(IntEnum):
    """What a pass needs to know of a module that has no rule."""

    COLUMNS = 0  # transposed Jacobians: the graph's own nodes supply them
    CURVATURE = 1  # its second derivative, too
    MODULES = 2  # all of its derivatives: the graph's nodes are of no use


class Piece(NamedTuple):
    """The piece of the graph between a call's output and its inputs: nodes, parameters by name, (number, edge) of the inputs that it uses."""

    inside: set[Node]
    parameters: dict[str, Parameter]
    inputs: list[tuple[int, Edge]]

    @property
    def is_chain(self) -> bool:
        """Whether every node of the piece leads to a single other one."""
        edges = {edge for _, edge in self.inputs}
        return all(sum(n in self.inside or (n, nr) in edges for n, nr in node.next_functions) == 1 for node in self.inside)


class Walk:
    """Facts about a graph.

    Attributes:
        roots: Nodes of the root tensors; ``second_order``: whether second-order quantities are asked for.
        excluded: Ids of the parameters that are left out of all extensions. ``modules``: Whether some of these read modules alone.
        order: The nodes, consumers before producers.
        parameters: The tracked parameters that the graph uses.
        bits: Id of a tracked parameter to its bit.
        leaves: Node to leaf tensor.
        reach: Node to bit set of the tracked parameters upstream of it.
        marks: Node to what calls left on it.
        calls: Every recorded call in the graph.
        has_data: Nodes upstream of which a module was called with data.
        to_loss: Nodes upstream of which, or at which, a loss call ends.
        to_function: Nodes upstream of which there is, perhaps, a loss that was called as a function; noted for second-order quantities.
        passed: Nodes at which a loss ends that is taken for a function, as it is linear in log-probabilities.
        consumers: Node to number of edges that lead to it.
        foreign: Number of parameters in the graph that belong to no extended module.
        derived: Nodes at or downstream of derivatives of derivatives, up to what outermost modules return; ``double``: whether a root is one.
        hidden: Whether a part of the graph is hidden in a reentrant checkpoint.
        left_out: Nodes where terms begin that are left out of all quantities.
        connected: Whether results shall have a graph, so that every node is crossed.
        recurrent: The layers of RNNs and GRUs; ``ends``: where parts of leaves begin and end; both found when one is read, as what is in ``memo``.
    """

    def __init__(self, roots: list[Node], second_order: bool = False, excluded: frozenset[int] = frozenset(), modules: bool = False) -> None:
        self.roots, self.second_order, self.excluded, self.modules = roots, second_order, excluded, modules
        self.parameters: list[Parameter] = []
        self.bits: dict[int, int] = {}
        self.leaves: dict[Node, Tensor] = {}
        self.reach: dict[Node, int] = {}
        self.marks: dict[Node, list[Mark]] = {}
        self.calls: dict[ModuleCall, None] = {}
        self.has_data, self.to_loss, self.to_function, self.passed, self.derived = (set[Node]() for _ in range(5))
        self.hidden, self.foreign, self.connected, self.recurrent, self.ends, self.memo = False, 0, False, None, None, {}
        self.consumers: dict[Node, int] = {}
        self.order = self._visit(roots)
        self.double = not self.derived.isdisjoint(roots)

    def _visit(self, roots: list[Node]) -> list[Node]:
        """Visit every node once, and collect what lies upstream of it.

        Args:
            roots: Nodes of the root tensors.

        Returns:
            The nodes, consumers before producers, leaves last.
        """
        order, stack, edges_into, reach = [], list(roots), self.consumers, self.reach
        nexts: dict[Node, list[Node]] = {}
        left_out: list[Node] = []
        while stack:
            node = stack[-1]
            if node in reach:
                stack.pop()
            elif node in nexts:  # all upstream nodes are done
                stack.pop()
                order.append(node)
                self._gather(node, nexts[node])
            else:
                metadata = node.metadata
                upstream = [n for n, _ in node.next_functions if n is not None]
                if LEFT_OUT in metadata:
                    left_out += upstream
                    upstream = []
                nexts[node] = upstream
                if KEY in metadata:
                    self.marks[node] = metadata[KEY]
                for n in upstream:
                    edges_into[n] = edges_into.get(n, 0) + 1
                    if n not in nexts:
                        stack.append(n)
        self.left_out = left_out
        return sorted(reversed(order), key=self.leaves.__contains__)

    def refuse_left_out(self) -> None:
        """Refuse a left-out term that depends on activations: its gradient would arrive in one sum with that of the loss.

        Raises:
            UnsupportedError: If there is one.
        """
        for node in search(self.left_out):
            if node not in self.leaves and self.reach.get(node):
                raise UnsupportedError(
                    f"A term given to backpack.leave_out() depends on activations that the loss uses, too ({node.name()}, upstream of which lies "
                    "{names}), so that their gradients cannot be told apart. Compute the term in a forward pass of its own, "
                    "or call backward for it outside of the context.",
                    self.named(self.reach[node]),
                )

    def _gather(self, node: Node, nexts: list[Node]) -> None:
        """Collect, at a node whose upstream is known, what lies upstream.

        Args:
            node: The node.
            nexts: The nodes that follow it upstream.
        """
        if not nexts and node.name() == LEAF:
            parameter, bit = node.variable, 0
            owned = parameter in owners
            if not parameter.requires_grad:  # frozen since the forward pass: nothing arrives there any more
                pass
            elif owned and id(parameter) not in self.excluded:
                self.bits[id(parameter)] = bit = 1 << len(self.parameters)
                self.parameters.append(parameter)
            else:
                self.foreign += isinstance(parameter, Parameter) and not owned
            self.leaves[node], self.reach[node] = parameter, bit
            return
        name = type(node).__name__  # cheaper than node.name(), and the same but for types that torch does not register
        if name == "CppFunction":
            name = node.name()
        double, hidden = kind_of(name)
        self.derived.update((node,) if double else ())
        self.hidden |= hidden
        reach = 0
        for upstream in nexts:
            reach |= self.reach[upstream]
        self.reach[node] = reach
        for known in (self.has_data, self.to_loss, self.to_function, self.derived):
            if known and not known.isdisjoint(nexts):
                known.add(node)
        if self.second_order and reach and (NAMES[name] in FUNCTIONS or (NAMES[name] == "Sub" and normalizer(node))):
            self.to_function.add(node)
        for mark in self.marks.get(node, ()):
            self.calls[mark.call] = None
            if mark.call.root and not mark.call.is_loss:
                self.derived.discard(node)
            if self.second_order and completes_softmax(mark.call, self.reach, self.is_linear):
                self.passed.add(node)
            if node in self.passed:
                continue
            if mark.call.is_loss or (self.second_order and node not in self.to_loss and take_for_loss(mark.call, node, self.modules)):
                if not mark.base:  # else it ends further down
                    self.to_loss.add(node)
            elif node not in self.has_data and self.was_given_data(mark.call):
                self.has_data.add(node)

    def is_tracked(self, node: Node | None) -> bool:
        """Say whether something depends on tracked parameters, and does not only have a graph, as inputs that require a gradient do.

        Args:
            node: The node that made it; ``None`` if it has no graph.

        Returns:
            Whether it does.
        """
        return bool(self.reach.get(node))

    def is_data(self, slot: Slot) -> bool:
        """Say whether a module was called with a tensor that depends on no tracked parameter.

        Args:
            slot: The tensor.

        Returns:
            Whether it does not.
        """
        return not any(map(self.is_tracked, slot.makers))

    def was_given_data(self, call: ModuleCall) -> bool:
        """Say whether a module was called with such a tensor, also in a mapping, a list or a data class.

        Args:
            call: Its call.

        Returns:
            Whether it was.
        """
        return any(map(self.is_data, call.tensor_inputs)) or any(not self.is_tracked(tensor.grad_fn) for tensor in nested_in(call))

    def is_linear(self, node: Node) -> bool:
        """Say whether a node between a loss and the root is linear, almost everywhere, in what depends on parameters.

        Args:
            node: The node.

        Returns:
            Whether it is.
        """
        if operation(node) in LINEAR_IN_LOG_PROBABILITIES and node not in self.to_loss:
            return True
        return is_linear(node, lambda n: n in self.to_loss or self.reach[n])

    def piece(self, node: Node, call: ModuleCall, base: bool = False) -> Piece | None:
        """Collect the nodes between a call's output and its inputs.

        Args:
            node: Node of the output.
            call: The call.
            base: Whether the node is that of the tensor of which the output is a view.

        Returns:
            The piece; ``None`` if it is connected to anything but the inputs and own parameters, or holds other operations than the rule stands for.
        """
        sources = {}
        for i, slot in enumerate(call.inputs):
            if isinstance(slot, Slot) and slot.edge is not None:
                sources |= {slot.edge: i} if slot.base_edge is None else {slot.base_edge: i, slot.edge: i}
        module = call.module
        own = {id(p): name for name, p in module._parameters.items()}
        piece, stack, names, edges = Piece({node}, {}, []), [node], [], {}
        while stack:
            inner = stack.pop()
            if name := NAMES[type(inner).__name__]:
                names.append(name)
            for edge in inner.next_functions:
                upstream = edge[0]
                if upstream is None:
                    continue
                if edge in sources:
                    entry = (sources[edge], edge)
                    if entry in piece.inputs:
                        names.append(AGAIN)
                    else:
                        piece.inputs.append(entry)
                elif upstream in self.leaves:
                    name = own.get(id(self.leaves[upstream]))
                    if name is None:
                        return None
                    if name in piece.parameters:
                        names.append(AGAIN)
                    piece.parameters[name] = self.leaves[upstream]
                elif upstream in piece.inside:
                    edges[upstream] += 1
                else:
                    piece.inside.add(upstream)
                    stack.append(upstream)
                    edges[upstream] = 1
        for inner, count in edges.items():
            if count != self.consumers[inner]:
                return None
        if len(piece.parameters) < len(own) and call.derivatives is not None:
            for name in call.derivatives.params:
                parameter = module._parameters.get(name)
                if parameter is not None and parameter.requires_grad and name not in piece.parameters:
                    return None  # the module had another one, or none of this name, when it ran
        return piece if as_described(call, node, names, base, piece.inside if self.second_order or not call.is_loss else ()) else None

    @cached_property
    def outermost(self) -> list[ModuleCall]:
        """Calls of outermost modules that are no losses."""
        return [call for call in self.calls if call.root and not call.is_loss]

    @cached_property
    def names(self) -> dict[Parameter, str]:
        """Names of the tracked parameters, for errors; in the order of the model, whatever the graph was visited in."""
        return owners.about(self.parameters)

    @cached_property
    def models(self) -> dict[int, Parameter]:
        """Parameters of the outermost modules, used or not, and those that the graph uses without a call, by id."""
        return {id(p): p for call in self.calls if call.root for p in call.module.parameters()} | {id(p): p for p in self.parameters}

    @cached_property
    def batches(self) -> set[int]:
        """Numbers of samples that outermost modules have returned; with which they may have been called, where they return none."""
        rows = {call: rows_of(call) for call in self.outermost}
        return set().union(*(lengths_of(call) if number is None else {number} for call, number in rows.items()))

    @cached_property
    def single(self) -> bool:
        """Whether the mini-batch is one sample, to which everything belongs."""
        return bool(self.outermost) and all(map(is_single, self.outermost)) and not self.apart

    @cached_property
    def apart(self) -> dict[ModuleCall, ModuleCall]:
        """Calls of outermost modules for other samples each, maybe, and for each the first one with the same data."""
        return of_others(self.outermost, self.is_data) if len(self.outermost) > 1 else {}

    @cached_property
    def returns_loss(self) -> bool:
        """Whether no outermost module has returned as many rows as it was given samples."""
        lengths = {call: {length for slot in call.outputs for length in slot.shape[:-1] or slot.shape} for call in self.outermost}
        return not any(rows_of(call) is not None or batch_of(call) in found for call, found in lengths.items())

    @cached_property
    def given_places(self) -> set[int]:
        """Addresses of what outermost modules were given, which may be samples, in any layout."""
        return {place_of(tensor) for call in self.outermost for tensor in given_to(call)} | {0}

    @cached_property
    def constant_places(self) -> set[int]:
        """Addresses of what outermost modules own, or copy of it to normalize weights, without those of what one was given."""
        modules = [module for call in self.outermost for module in call.module.modules()]
        owned = {place_of(tensor) for module in modules for own in (module._buffers, module._parameters) for tensor in own.values()}
        return (owned | {*map(place_of, singular_vectors(modules, self.order, self.leaves))}) - self.given_places

    @cached_property
    def recorded(self) -> set[int]:
        """Ids of the parameters of all modules of which a call was recorded."""
        seen: set = set()  # a module inside of others is visited once
        return {id(p) for call in self.calls if not call.is_loss for _, m in call.module.named_modules(seen) for p in m._parameters.values()}

    def where(self, node: Node) -> str:
        """Describe a node.

        Args:
            node: A graph node.

        Returns:
            Its name, and that of the module which ends there.
        """
        call = next((mark.call for mark in self.marks.get(node, ()) if not mark.base), None)
        if call is None or (module := call.module)._modules:
            return title(node)
        if call.found.rule is None:
            why = "which has no rule"
        elif call.derivatives is None:
            mode = f"in {'training' if call.training else 'evaluation'} mode"
            why = "whose rule does not hold here, " + ("as its weights were computed, or a hook acts" if call.found.rule.applies(call) else mode)
        elif call.odd_types:
            why = "which computes in other precisions than those of its tensors, as under autocast, or with complex numbers: its rule does not hold"
        elif sum(slot.edge is not None for slot in call.tensor_inputs) > 1:
            why = "which has several inputs that may depend on parameters"
        elif self.piece(node, call) is None:
            why = f"which has computed something else than {type(module).__name__} does: a hook or a patched function, say, is part of the graph"
        else:
            why = "whose rule stands for calls with a single output, of which axis 0 holds the samples"
        return f"{node.name()} of {call.path} ({type(module).__name__}, {why})"

    def named(self, bits: int) -> dict[Parameter, str]:
        """Name parameters.

        Args:
            bits: Bit set of parameters.

        Returns:
            Parameter to name, for errors, in the order of the model.
        """
        return {p: name for p, name in self.names.items() if self.bits[id(p)] & bits}

    def bits_of(self, ids: frozenset[int]) -> int:
        """Return the bit set of parameters.

        Args:
            ids: Their ids; those of parameters that the graph does not use count nothing.

        Returns:
            Bit set.
        """
        return sum(self.bits[key] for key in ids if key in self.bits)
