"""Recurrent layers with several layers, split into a chain of single ones."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch.fx import Node
from torch.nn import LSTM, RNN, Dropout, Sequential

from backpack.custom_module.reduce_tuple import ReduceTuple
from backpack.utils.errors import UnsupportedError


def check_recurrent(node: Node, module: RNN | LSTM) -> None:
    """Refuse what a chain of single layers cannot do.

    Args:
        node: Call of the layer.
        module: The layer.

    Raises:
        UnsupportedError: If the layer has options, or is used in a way, that the chain does not support.
    """
    reasons = {
        "has no bias": not module.bias,
        "is bidirectional": module.bidirectional,
        "has a nonlinearity other than tanh": isinstance(module, RNN) and module.nonlinearity != "tanh",
        "has a projection": module.proj_size > 0,
        "receives an initial state": any(state is not None for state in (*node.args[1:], node.kwargs.get("hx"))),
        "returns states of layers other than the last (only the state's index -1 can be read)": not _reads_last_state_only(node, module),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedError(
                f"{node.target} ({module}) has several layers and {reason}, so it cannot be split. Use the model without conversion."
            )


def _reads_last_state_only(node: Node, module: RNN | LSTM) -> bool:
    def items(tuples: Iterable[Node]) -> list[tuple[Node, object]]:
        # who reads the given values, and at which index (None: as a whole)
        return [(user, user.args[1] if user.target is operator.getitem else None) for value in tuples for user in value.users]

    outputs = items([node])
    states = [user for user, index in outputs if index == 1]
    if not all(index in (0, 1) for _, index in outputs):
        return False
    if isinstance(module, LSTM):
        hidden_and_cell = items(states)
        if not all(index in (0, 1) for _, index in hidden_and_cell):
            return False
        states = [user for user, _ in hidden_and_cell]
    return all(index == -1 for _, index in items(states))


def make_rnn_backpack(module: RNN | LSTM) -> Sequential:
    """Split a recurrent layer into a chain of single layers that share its parameters.

    Args:
        module: The layer.

    Returns:
        The chain. It returns the output and the state of its last layer.
    """
    kind, chain = type(module), Sequential()
    for i in range(module.num_layers):
        input_size = module.hidden_size if i else module.input_size
        layer = kind(input_size, module.hidden_size, batch_first=module.batch_first, device="meta")  # no random numbers are drawn
        for name, _ in list(layer.named_parameters()):
            setattr(layer, name, getattr(module, name.replace("_l0", f"_l{i}")))
        chain.add_module(f"lstm_{i}", layer)  # the published name, of an RNN, too: keys of saved states
        if i < module.num_layers - 1:
            chain.add_module(f"reduce_tuple_{i}", ReduceTuple(0))
            if module.dropout > 0:
                chain.add_module(f"dropout_{i}", Dropout(module.dropout))
    return chain.train(module.training)
