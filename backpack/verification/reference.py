"""The definitions of all quantities, by plain autograd, for a few samples and entries; nothing here knows the rest of the package.

With the output ``z`` of the model, ``[N, *]``, and the loss ``L(z)``, the gradient of sample ``n`` is ``J_n^T dL/dz_n``, and its summand of the
generalized Gauss-Newton is ``J_n^T H_n J_n``, where ``J_n`` is the Jacobian of ``z_n`` with respect to a parameter, and ``H_n`` the Hessian of
the loss with respect to ``z_n``. Entry ``(i, j)`` of the latter is ``u_i^T H_n u_j`` with the columns ``u_i = J_n e_i``: they are found by
differentiating ``J^T w`` once more with respect to ``w``, so that the Jacobian is never formed. The Hessian comes from differentiating twice the loss
as a function of one sample's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor, autograd, einsum

_FEW = 256
"""Numbers of an output for which a backward pass each is affordable."""
_JOINS = ("StackBackward", "CatBackward", "AddBackward")
"""Operations that put log-probabilities of several softmaxes together."""


def grad(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Return what ``torch.autograd.grad`` does, dense: gradients of some tables are sparse."""
    return tuple(g.to_dense() if g is not None and g.is_sparse else g for g in autograd.grad(*args, **kwargs))


class Incomparable(Exception):  # noqa: N818  it is no error
    """Plain autograd cannot say what is right; the message says why."""


def with_softmax(output: Tensor, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor] | None:
    """Let a loss that is linear in log-probabilities begin with the softmax that has made them: without it, it has no curvature.

    Log-probabilities are as good as logits, since their softmax is the same.

    Args:
        output: What enters the loss, ``[N, *]``, in its graph.
        loss: The loss.

    Returns:
        The loss; if it is linear in the logarithm of a softmax, what is the same at the output, and begins with the softmax; ``None`` if it cannot be
        told of which classes.
    """
    nodes, seen, joined = [output.grad_fn], set(), False
    while nodes and "LogSoftmaxBackward" not in nodes[-1].name():
        node = nodes.pop()
        upstream = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(upstream)
        joins = len(upstream) > 1 and node.name().startswith(_JOINS)
        nodes += upstream if joins or len(upstream) == 1 else []
        joined |= joins
    if not nodes:
        return loss
    here = output.detach()
    slopes = [grad(loss(point), point, materialize_grads=True)[0] for point in (here.clone().requires_grad_(), (here / 2).requires_grad_())]
    if not torch.equal(*slopes):
        return loss
    axes = [axis for axis in range(1, here.dim()) if torch.allclose(here.exp().sum(axis), here.new_ones(()))]
    return (lambda point: loss(point.log_softmax(axes[0]))) if axes and not joined else None


class Reference:
    """A model and its loss at one mini-batch.

    Attributes:
        output: What the model returned, in its graph, ``[N, *]``.
        parameters: All parameters that require a gradient.
        used: Names of those that take part in it.
        gradient: Gradient of the loss with respect to each.
        entries: Indices of the flattened parameters that are compared: half of them where the gradient is largest, half at random.
        precision: Machine epsilon of the least precise number type in the graph.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        probes: Iterable[Tensor],
        output: Tensor,
        loss: Callable[[Tensor], Tensor],
        precision: float,
        entries: int,
        generator: Generator,
    ) -> None:
        """Differentiate the loss once.

        Args:
            parameters: All that require a gradient, by name.
            probes: Further tensors in the graph of the output to which columns may be asked for.
            output: What the model returned, ``[N, *]``.
            loss: Maps it to a number.
            precision: Machine epsilon.
            entries: How many entries of each parameter are compared.
            generator: Chooses them.
        """
        curved = with_softmax(output, loss)
        self._unclear, loss = curved is None, curved or loss
        self.output, self.precision, self._loss, self._generator = output, precision, loss, generator
        self._point = output.detach().requires_grad_()
        (self._slope,) = grad(loss(self._point), self._point, create_graph=True, materialize_grads=True)
        found = grad(output, list(parameters.values()), self._slope.detach(), retain_graph=True, allow_unused=True)
        self.parameters, self.used = parameters, {name for name, g in zip(parameters, found, strict=True) if g is not None}
        self.gradient = {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)}
        self.entries = {name: self.pick(g.abs().flatten(), entries) for name, g in self.gradient.items()}
        self._tensors = [*self.parameters.values(), *probes]
        self._blocks: dict[tuple[Tensor, tuple[int, ...]], Tensor] = {}
        self._first: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._differentiable: dict[int | None, dict[str, Tensor]] = {}

    def pick(self, scores: Tensor, count: int) -> list[int]:
        """Choose indices: half of them where a score is largest, half at random.

        Args:
            scores: ``[K]``.
            count: How many, at most.

        Returns:
            Indices in order.
        """
        if len(scores) <= count:
            return list(range(len(scores)))
        largest = scores.topk(count // 2).indices.tolist()
        others = torch.randint(len(scores), (2 * count,), generator=self._generator).tolist()
        return sorted(list(dict.fromkeys([*largest, *others]))[:count])

    # --------------------------------------------------------------------------------------------------------------------- first order
    def sample_gradients(self, name: str, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return gradients of samples' summands of the loss.

        Args:
            name: Name of a parameter.
            samples: Indices.

        Returns:
            Chosen entries ``[K, E]`` and squared norms ``[K]``.
        """
        for n in set(samples) - self._first.keys():
            arriving = torch.zeros_like(self.output)
            arriving[n] = self._slope[n].detach()
            found = grad(self.output, list(self.parameters.values()), arriving, retain_graph=True, materialize_grads=True)
            named = zip(self.parameters, found, strict=True)
            self._first[n] = {key: (g.flatten()[None, self.entries[key]], g.square().sum()[None]) for key, g in named}
        chosen, norms = zip(self._no_samples(name), *(self._first[n][name] for n in samples), strict=True)
        return torch.cat(chosen), torch.cat(norms)

    def _no_samples(self, name: str) -> tuple[Tensor, Tensor]:
        gradient = self.gradient[name]
        return gradient.new_empty(0, len(self.entries[name])), gradient.new_empty(0)

    # ------------------------------------------------------------------------------------------------------------- Gauss-Newton
    @cached_property
    def _transposed(self) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """A random ``w`` like the output, and ``J^T w`` as a function of it."""
        w = torch.randn(self.output.shape, generator=self._generator, dtype=self.output.dtype).to(self.output.device).requires_grad_()
        return w, dict(zip(self._tensors, grad(self.output, self._tensors, w, create_graph=True, materialize_grads=True), strict=True))

    @cached_property
    def _largest(self) -> float:
        """The largest entry of ``J^T w``, to which rounding errors are compared."""
        return max((product.abs().max().item() for product in self._transposed[1].values() if product.numel()), default=0.0)

    def scores(self, tensor: Tensor) -> Tensor:
        """Say how much the entries of a parameter, or of a probe, matter to the output.

        Args:
            tensor: The parameter or probe.

        Returns:
            Numbers that are not negative, ``[numel]``.
        """
        return self._transposed[1][tensor].detach().abs().flatten()

    def columns(self, tensor: Tensor, indices: Sequence[int]) -> Tensor:
        """Return columns of the Jacobian of the output.

        Args:
            tensor: A parameter or probe.
            indices: Entries of the flattened parameter.

        Returns:
            ``[E, N, D]``.
        """
        try:
            w, products = self._transposed
            entries = products[tensor].flatten()[list(indices)]
            found = torch.stack([_derivative(entry, w) for entry in entries]).reshape(len(entries), len(w), -1)
        except RuntimeError:  # some operation has no second derivative
            return self._columns_from_rows(tensor, indices)
        terms = found.flatten(1) * w.detach().flatten()
        if ((terms.sum(1) - entries.detach()).abs() > self.precision**0.5 * terms.abs().sum(1) + 1e3 * self.precision * self._largest).any():
            return self._columns_from_rows(tensor, indices)  # some operation forgets, in its backward pass, what it depends on
        return found

    def _columns_from_rows(self, tensor: Tensor, indices: Sequence[int]) -> Tensor:
        """Do the same with a backward pass for each number of the output, if they are few.

        Args:
            tensor: A parameter or probe.
            indices: Entries of the flattened parameter.

        Returns:
            ``[E, N, D]``.

        Raises:
            Incomparable: If they are many.
        """
        if self.output.numel() > _FEW:
            raise Incomparable(
                f"autograd cannot differentiate some operation of the model twice, and the output has {self.output.numel()} > {_FEW} numbers: "
                "give fewer samples"
            )
        rows = [grad(number, tensor, retain_graph=True, materialize_grads=True)[0].flatten()[list(indices)] for number in self.output.flatten()]
        return torch.stack(rows, dim=1).reshape(len(indices), len(self.output), -1)

    def curvature(self, direction: Tensor) -> Tensor:
        """Multiply with the Hessian of the loss with respect to the output.

        Args:
            direction: Like the output, flattened or not.

        Returns:
            ``[N, D]``.

        Raises:
            Incomparable: If the loss begins with a softmax of which nothing else is known.
        """
        if self._unclear:
            raise Incomparable("the loss is linear in log-probabilities that were changed, or joined, on their way: let them enter it as they are")
        return _derivative((self._slope * direction.reshape(self._slope.shape)).sum(), self._point).reshape(len(self._point), -1)

    def block(self, tensor: Tensor, indices: Sequence[int], roots: tuple[Tensor, Sequence[int]] | None = None) -> Tensor:
        """Return entries of samples' blocks of the generalized Gauss-Newton.

        Args:
            tensor: A parameter or probe.
            indices: Entries of the flattened parameter.
            roots: Columns ``s [M, K, D]`` such that ``sum_m s s^T`` takes the place of the Hessian of the loss, and the ``K`` samples that
                they belong to; ``None`` for the Hessian itself.

        Returns:
            ``[N, E, E]``, or ``[K, E, E]``.
        """
        if roots is not None:
            draws, samples = roots
            products = einsum("ind,mnd->inm", self.columns(tensor, indices)[:, list(samples)], draws)
            return einsum("inm,jnm->nij", products, products)
        key = (tensor, tuple(indices))
        if key not in self._blocks:
            columns = self.columns(tensor, indices)
            self._blocks[key] = einsum("ind,jnd->nij", columns, torch.stack([self.curvature(column) for column in columns]))
        return self._blocks[key]

    def ggn_product(self, name: str, vector: Tensor) -> Tensor:
        """Multiply with a parameter's block of the generalized Gauss-Newton.

        Args:
            name: Name of the parameter.
            vector: Of the parameter's shape.

        Returns:
            Chosen entries ``[E]``.
        """
        w, products = self._transposed
        image = _derivative((products[self.parameters[name]] * vector).sum(), w)
        (found,) = grad(self.output, self.parameters[name], self.curvature(image).reshape(self.output.shape), retain_graph=True)
        return found.flatten()[self.entries[name]]

    # ----------------------------------------------------------------------------------------------------------------------- Hessian
    def _gradients(self, n: int | None) -> dict[str, Tensor]:
        """Differentiate the loss, as a function of all samples' outputs or of one's, so that it can be done again.

        Args:
            n: The sample; ``None`` for all.

        Returns:
            Gradient of each parameter in its graph.
        """
        if n not in self._differentiable:
            alone = torch.arange(len(self.output), device=self.output.device).reshape(-1, *[1] * (self.output.dim() - 1)) == n
            output = self.output if n is None else torch.where(alone, self.output, self.output.detach())
            found = grad(self._loss(output), list(self.parameters.values()), create_graph=True, materialize_grads=True)
            self._differentiable[n] = dict(zip(self.parameters, found, strict=True))
        return self._differentiable[n]

    def hessian_diagonal(self, name: str, samples: Sequence[int] | None) -> Tensor:
        """Return entries of the Hessian's diagonal.

        Args:
            name: Name of the parameter.
            samples: Indices of samples; ``None`` for the Hessian of the whole loss.

        Returns:
            ``[K, E]``, or ``[1, E]``.
        """
        rows = [self._no_samples(name)[0]]
        for n in [None] if samples is None else samples:
            first = self._gradients(n)[name].flatten()
            rows.append(torch.stack([_derivative(first[i], self.parameters[name]).flatten()[i] for i in self.entries[name]])[None])
        return torch.cat(rows)

    def hessian_product(self, name: str, vector: Tensor) -> Tensor:
        """Multiply with a parameter's block of the Hessian.

        Args:
            name: Name of the parameter.
            vector: Of the parameter's shape.

        Returns:
            Chosen entries ``[E]``.
        """
        return _derivative((self._gradients(None)[name] * vector).sum(), self.parameters[name]).flatten()[self.entries[name]]


def _derivative(value: Tensor, tensor: Tensor) -> Tensor:
    """Differentiate a number, which may be constant.

    Args:
        value: The number.
        tensor: A tensor of its graph, or none.

    Returns:
        Gradient without graph.
    """
    if not value.requires_grad:
        return torch.zeros_like(tensor)
    return grad(value, tensor, retain_graph=True, materialize_grads=True)[0]
