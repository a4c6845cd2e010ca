"""The least that a library with hooks does, for nets of Linear layers: it finds the layers' nodes, reads a quantity off them, and checks nothing.

Whether a rule holds, where the samples lie, whether a weight is used twice or changed in place, whether something is left behind: nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.linalg import vector_norm

QUANTITIES = dict.fromkeys(("logreg", "mlp", "deep"), ("BatchL2Grad", "SumGradSquared"))
KEY = "call"

Results = dict[nn.Parameter, Tensor]
Call = list


def record(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    """Leave module and input on the node of the output, until that has run."""
    node = out.grad_fn
    if node is not None:
        call = node.metadata[KEY] = [module, inputs[0].detach()]
        node.register_hook(lambda *_: call.clear())


def nodes_of(root: Node) -> set[Node]:
    """All nodes of a graph: hooks have to find those that calls left something on."""
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [upstream for upstream, _ in node.next_functions if upstream is not None]
    return seen


@torch.no_grad()
def read(quantity: str, call: Call, results: Results, grads: tuple[Tensor, ...]) -> None:
    """Read a quantity off a layer when the gradient of its output has arrived."""
    (layer, x), (grad,) = call, grads
    if quantity == "BatchL2Grad":
        norms = vector_norm(grad, dim=1)
        results[layer.weight], results[layer.bias] = (vector_norm(x, dim=1) * norms).square_(), norms.square()
    else:
        squares = grad.square()
        results[layer.weight], results[layer.bias] = squares.T @ x.square(), squares.sum(0)


def step(quantity: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return what is to be timed; all gradients are set, too."""
    parameters = list(model.parameters())
    for module in (*model.modules(), lossfunc):
        if not module._modules:
            module.register_forward_hook(record)

    def run() -> list[Tensor]:
        model.zero_grad()
        results: Results = {}
        loss = lossfunc(model(x), y)
        calls = [(node, node.metadata[KEY]) for node in nodes_of(loss.grad_fn) if KEY in node.metadata]
        handles = [
            node.register_prehook(lambda grads, call=call: read(quantity, call, results, grads))
            for node, call in calls
            if isinstance(call[0], nn.Linear)
        ]
        loss.backward()
        for handle in handles:
            handle.remove()
        return [results[p] for p in parameters]

    return run
