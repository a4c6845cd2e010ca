"""Spectral normalization, which divides a weight by its largest singular value: as a hook, or as a parametrization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from backpack.core.graph import operation, saved

_RESHAPED = frozenset("View UnsafeView Permute Clone".split())


def singular_vectors(modules: Iterable[Module], nodes: Iterable[Node], leaves: Mapping[Node, Tensor]) -> Iterator[Tensor]:
    """Find the singular vectors with which weights were multiplied: copies of buffers, as training mode overwrites these in each forward pass.

    Args:
        modules: Modules that may carry the hook, or hold the parametrization.
        nodes: Nodes of the graph.
        leaves: Node to parameter.

    Yields:
        The vectors.
    """
    weights = {id(weight) for module in modules for weight in _normalized(module)}
    for node in nodes if weights else ():
        product = node.next_functions[1][0] if operation(node) in ("Dot", "Vdot") else None
        if product is None or operation(product) != "Mv":
            continue
        matrix = product.next_functions[0][0]
        while matrix is not None and operation(matrix) in _RESHAPED:
            matrix = matrix.next_functions[0][0]
        if matrix in leaves and id(leaves[matrix]) in weights:
            yield from (saved(node, "self"), saved(product, "vec"))


def _normalized(module: Module) -> Iterator[Tensor]:
    yield from (getattr(module, f"{hook.name}_orig") for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm))
    if isinstance(module, ParametrizationList) and any(isinstance(part, _SpectralNorm) for part in module):
        yield module.original
