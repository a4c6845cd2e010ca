"""Several uses of a parameter by affine layers are one use with more positions, so that what is fast for one use is fast for many.

Where uses see some of the samples each, as in a loop over samples, they are one use with more rows. Likewise lookups in a table. Products with
parts of a weight are one use of all of it, in groups.

Lookups in the weight of an affine layer are uses of it, too: their gradient ``sum_e onehot_e d_e^T`` is that of a layer with the gradients ``d_e`` in
place of its inputs, and one-hot vectors, formed if need be, in place of the gradients of its outputs. Likewise products with the transposed weight,
as in derivatives of networks with respect to their inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from itertools import accumulate, islice, pairwise
from math import nan, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack.core.arrangements import ragged
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.conv_transposend import ConvTransposeNDDerivatives
from backpack.core.derivatives.embedding import EmbeddingDerivatives
from backpack.core.derivatives.given import GivenDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.matmul import MatmulDerivatives
from backpack.core.derivatives.tied import Tied
from backpack.core.derivatives.weight_parts import PartDerivatives
from backpack.core.flow import Columns, Use
from backpack.core.plan import Plan
from backpack.core.samples import Layout, plain_layout
from backpack.extensions.uses import is_tied

_LINEAR = LinearDerivatives()


class Contribution(NamedTuple):
    """What one use contributes.

    Attributes:
        use: The use.
        name: Name of the parameter in the layer.
        rule: Says how the weight is laid out.
        columns: View of the input ``[N, G, K, L]``, of indices ``[N, 1, 1, L]``; ``None`` for a bias.
        rows: View of the columns at the output ``{source: [V, N, G, O, L]}``.
        weight: The weight as the layer sees it; ``None`` for a bias.
        own: The groups of which there are views, ``None`` for all.
        table: The same as lookups, where they were made uses of a layer that has the table as its weight: views are there for their shapes then.
    """

    use: Use
    name: str
    rule: AffineDerivatives
    columns: Tensor | None
    rows: Columns
    weight: Tensor | None
    own: slice | None = None
    table: Contribution | None = None

    @classmethod
    def of(cls, use: Use, name: str, plan: Plan) -> Contribution:
        """Read the views, which live longer than what the call has recorded.

        Args:
            use: The use.
            name: Name of the parameter.
            plan: The plan.

        Returns:
            The contribution.
        """
        rule, call = use.call.derivatives, use.call
        if isinstance(rule, EmbeddingDerivatives):
            positions = prod(call.input0.shape[1:])
            rows = {source: mat.reshape(*mat.shape[:2], 1, positions, mat.shape[-1]).mT for source, mat in use.value.items()}
            table = cls(use, name, rule, call.input0.reshape(len(call.input0), 1, 1, positions), rows, call.weight)
            if not (use.layout.plain and is_tied(plan, use.parameters[name])):
                return table
            rows = {s: mat.new_zeros(()).expand(*mat.shape[:3], len(call.weight), positions) for s, mat in rows.items()}
            return cls(use, name, _LINEAR, table.some[0], rows, call.weight, None, table)
        values = use.value
        if isinstance(rule, ConvTransposeNDDerivatives) and name == "weight" and values.keys() == {0}:  # the gradient: factors have their own sides
            rule, call, mat = rule.turned(call, values[0]) or (rule, call, values[0])
            values = {0: mat}
        part = isinstance(rule, PartDerivatives)
        view, columns = (rule.own_rows, rule.own_columns) if part else (rule.rows, rule.columns)
        inputs = (None, None) if name == "bias" else (columns(call), call.weight)
        return cls(use, name, rule, inputs[0], {source: view(call, mat) for source, mat in values.items()}, inputs[1], rule.own if part else None)

    @property
    def some(self) -> Tensor:
        """The rows of one of the sources."""
        return next(iter(self.rows.values()))

    @property
    def groups(self) -> int:
        """Number of groups, which some rules read off the weight: a bias has none."""
        return self.some.shape[2] if self.own is None else self.rule.groups(self.use.call)

    @property
    def kind(self) -> tuple:
        """What parts that go together have in common."""
        first = int(not self.use.layout.plain)  # else the number of rows need not be the same
        rows = (*self.some.shape[1 + first : 2], self.groups, self.some.shape[3])
        inputs = None if self.columns is None else self.columns.shape[2]
        table = isinstance(self.rule, EmbeddingDerivatives)
        layout = self.use.call.padding_idx if table else self.rule.weight_layout
        return (table, layout, inputs, rows, first)

    def turned(self, other: Contribution) -> Contribution:
        """Take gradients of outputs for inputs, and these for gradients, as a layer has them that multiplies by the transposed weight.

        Args:
            other: A use as such a layer.

        Returns:
            The contribution; as it is, if it is laid out in another way, or has several columns.
        """
        one = sum(map(len, self.rows.values())) == 1 and self.columns is not None and self.columns.shape[:2] == self.some.shape[1:3]
        if not one or self.kind[:2] != (False, MatmulDerivatives.weight_from_matrix) or self.groups != 1:
            return self
        rows = {source: self.columns[None] for source in self.rows}
        return self._replace(rule=other.rule, weight=other.weight, columns=self.some[0], rows=rows)

    @property
    def lookups(self) -> tuple[Tensor, Tensor]:
        """What was looked up in the table ``[N, L]``, and what is carried to it ``[V, N, L, D]``."""
        indices, padding = self.columns[:, 0, 0], self.use.call.padding_idx
        grads = self.some.squeeze(2).mT
        return indices, grads if padding is None else grads.masked_fill((indices == padding % len(self.weight)).unsqueeze(2), 0)

    def as_layer(self) -> Contribution:
        """Make one-hot vectors of lookups, with a single column, which takes the place of inputs.

        Returns:
            The contribution.
        """
        if self.table is None:
            return self
        indices, grads = self.table.lookups
        rows = {s: torch.zeros_like(row).scatter_(3, indices[None, :, None, None].long(), 1) for s, row in self.rows.items()}
        return self._replace(columns=grads[0].mT.unsqueeze(1), rows=rows, table=None)

    def as_rows(self) -> Contribution:
        """Take each position for a row of its own.

        Returns:
            The contribution, with a single position.
        """
        columns = None if self.columns is None else _as_rows(self.columns)
        return self._replace(columns=columns, rows={source: _as_rows(mat) for source, mat in self.rows.items()})

    def among_all(self) -> Contribution:
        """Give all groups views.

        Returns:
            The contribution, with zeros for those that it does not see.
        """
        if self.own is None:
            return self
        fill = partial(self.rule.among_all, axis=-3)
        columns = None if self.columns is None else fill(self.columns)
        return self._replace(columns=columns, rows={source: fill(mat) for source, mat in self.rows.items()}, own=None)

    def joined(self, columns: Tensor | None, rows: Columns, layout: Layout, parts: list[Use] | None = None, apart: bool = False) -> Use:
        """Return a use like this one of other views.

        Args:
            columns: View of the input; ``None`` for a bias.
            rows: View of the columns at the output.
            layout: Says to which sample each row belongs.
            parts: Uses that stand for it where rows of a sample are summed, if others are cheaper.
            apart: Whether positions of two samples do not go together.

        Returns:
            The use.
        """
        if isinstance(self.rule, EmbeddingDerivatives):
            rows = {source: mat.squeeze(2).mT for source, mat in rows.items()}
        some = next(iter(rows.values()))
        grad = rows[0][0] if 0 in rows else some.new_full((), nan).expand(some.shape[1:])  # no rule reads it
        return Use(Positions(self, columns, apart), self.use.parameters, rows, grad, layout, parts=parts)


class Positions:
    """A call that stands for all uses: what its rule reads are the views, side by side along the positions, or one below the other."""

    def __init__(self, part: Contribution, columns: Tensor | None, apart: bool) -> None:
        self.call, self.weight, self.columns, self.derivatives = part.use.call, part.weight, columns, part.rule
        if isinstance(part.rule, EmbeddingDerivatives):
            self.input0, self.padding_idx = columns[:, 0, 0], part.use.call.padding_idx
        else:
            self.derivatives = PositionDerivatives(part.rule, part.groups, apart)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)


class PositionDerivatives(GivenDerivatives):
    """The rule of ``Positions``."""

    def __init__(self, rule: AffineDerivatives, groups: int, apart: bool) -> None:
        """Take over how the weight is laid out.

        Args:
            rule: Rule of each of the uses.
            groups: Number of groups.
            apart: Whether positions of two samples do not go together.
        """
        self._rule, self._groups, self.apart = rule, groups, apart
        self.transposed, self.in_parts = rule.transposed, rule.in_parts

    @property
    def weight_layout(self) -> Hashable:
        return self._rule.weight_layout

    def groups(self, module: Positions) -> int:
        return self._groups

    def weight_from_matrix(self, module: Positions, matrix: Tensor) -> Tensor:
        return self._rule.weight_from_matrix(module, matrix)


def join(parts: Iterable[Contribution]) -> list[tuple[Use, int]]:
    """Join the uses of a parameter that go together.

    Args:
        parts: One entry a use.

    Returns:
        For each kind of use: the joint use, and how many it stands for.
    """
    parts, groups = list(parts), dict[tuple, list[Contribution]]()
    layer = next((part for part in parts if part.kind[:2] == (False, LinearDerivatives.weight_from_matrix)), None)
    for part in parts if layer is None else (part.turned(layer) for part in parts):
        groups.setdefault(part.kind, []).append(part)
    joint = []
    for group in groups.values():
        if not group[0].use.layout.plain:
            joint.append((_below_each_other(group), len(group)))
            continue
        tables, layers = [part.table for part in group if part.table is not None], [part for part in group if part.table is None]
        # a product for each lookup is dearer than one for each row of the table where there are more lookups than rows
        few = tables and layers and _are_alike(group) and sum(table.columns.shape[-1] for table in tables) <= len(layers[0].weight)
        if tables and not few and {sum(map(len, part.rows.values())) for part in group} == {1}:
            tables, layers = [], [part.as_layer() for part in group]
        if tables and few:
            joint.append((_with_lookups(_beside_each_other(layers), tables), len(group)))
        else:
            joint += [(_beside_each_other(parts), len(parts)) for parts in (tables, layers) if parts]  # noqa: PLW2901
    return joint


def _are_alike(parts: list[Contribution]) -> bool:
    # whether all have the same columns, of one source
    widths = {(source, len(mat)) for part in parts for source, mat in part.rows.items()}
    return len(widths) == 1 and all(part.own is None for part in parts)


def _with_lookups(layer: Use, tables: list[Contribution]) -> Use:
    # a layer, and lookups in its weight
    indices, grads = ([part.lookups[i] for part in tables] for i in (0, 1))
    call = Tied(layer.call, torch.cat(indices, 1).long(), torch.cat(grads, 2))
    return Use(call, layer.parameters, layer.value, layer.grad, layer.layout)


def _beside_each_other(parts: list[Contribution]) -> Use:
    # joins uses that see all samples
    side_by_side = _along_positions if all(part.own is None for part in parts) else partial(_in_groups, parts=parts)
    columns = None if parts[0].columns is None else side_by_side([part.columns for part in parts])
    return parts[0].joined(columns, {source: side_by_side(_of_source(parts, source)) for source in _sources(parts)}, parts[0].use.layout)


def _below_each_other(parts: list[Contribution]) -> Use:
    """Join uses that see some of the samples each.

    Args:
        parts: The uses.

    Returns:
        The joint use, with positions for rows where these are summed.
    """
    counts = [part.some.shape[-1] for part in parts]
    labels = tuple(label for part, count in zip(parts, counts, strict=True) for label in part.use.layout.labels for _ in range(count))
    layout, uses, flat = parts[0].use.layout._replace(labels=labels), None, [part.as_rows() for part in parts]
    if any(part.own is not None for part in flat):
        joint = _groups_apart(flat, layout)
        if joint is not None:
            return joint
        flat = [part.among_all() for part in flat]
    first = flat[0]
    columns = None if first.columns is None else torch.cat([part.columns for part in flat])
    rows = {source: torch.cat(_of_source(flat, source), 1) for source in _sources(flat)}
    turn = None if layout.plain else ragged(layout)
    if turn is not None:
        positions = {source: turn.front(mat, 1).squeeze(-1) for source, mat in rows.items()}
        uses = [first.joined(None if columns is None else turn.front(columns).squeeze(-1), positions, turn.layout)]
    return first.joined(columns, rows, layout, uses)


def _groups_apart(parts: list[Contribution], layout: Layout) -> Use | None:
    """Join uses that see some of the samples and some of the groups each: what a sample has in one group are its positions there.

    Args:
        parts: The uses, with a single position.
        layout: To which sample each of their rows belongs.

    Returns:
        The joint use; ``None`` if most of it would be zeros.
    """
    first, groups, remaining, cells = parts[0], parts[0].groups, iter(layout.labels), list[int]()
    for part in parts:
        seen = range(groups)[part.own or slice(None)]
        cells += [label * groups + group for label in islice(remaining, part.some.shape[1]) for group in seen]
    turn = ragged(Layout(0, tuple(cells), layout.samples * groups), groups)
    if turn is None or not turn.layout.plain:
        return None

    def placed(views: list[Tensor]) -> Tensor:
        # ``[..., R, own groups, K, 1]`` to ``[..., N, G, K, L]``
        flat, lead = torch.cat([view.flatten(-4, -3) for view in views], -3).squeeze(-1), views[0].dim() - 4
        return turn.front(flat, lead).unflatten(lead, (layout.samples, groups)).mT

    columns = None if first.columns is None else placed([part.columns for part in parts])
    rows = {source: placed(_of_source(parts, source)) for source in _sources(parts)}
    return first.joined(columns, rows, plain_layout(layout.samples), apart=not layout.plain)


def _sources(parts: list[Contribution]) -> dict[Hashable, None]:
    return dict.fromkeys(source for part in parts for source in part.rows)


def _of_source(parts: list[Contribution], source: Hashable) -> list[Tensor]:
    # rows of one source ``[V, R, G, O, L]``, zeros where it has not been
    width = next(len(part.rows[source]) for part in parts if source in part.rows)
    return [part.rows.get(source, part.some.new_zeros(()).expand(width, *part.some.shape[1:])) for part in parts]


def _as_rows(view: Tensor) -> Tensor:
    # ``[..., R, G, K, L]`` to ``[..., R * L, G, K, 1]``
    return view.movedim(-1, -3).flatten(-4, -3).unsqueeze(-1)


def _in_groups(views: list[Tensor], parts: list[Contribution]) -> Tensor:
    """Put views of some of the groups each side by side, filled up with zeros where there are fewer positions.

    Args:
        views: ``[..., own groups, K, L]`` each.
        parts: The contributions that they belong to.

    Returns:
        ``[..., G, K, most of L]``.
    """
    groups, owns = parts[0].groups, [(0 if part.own is None else part.own.start, view) for part, view in zip(parts, views, strict=True)]
    found = [[view.select(-3, g - start).mT for start, view in owns if 0 <= g - start < view.shape[-3]] for g in range(groups)]
    *lead, _, entries, _ = views[0].shape
    whole = views[0].new_zeros(*lead, groups, max(sum(view.shape[-2] for view in of_group) for of_group in found), entries)
    for g, of_group in enumerate(found):
        ends = accumulate((view.shape[-2] for view in of_group), initial=0)
        for view, (start, stop) in zip(of_group, pairwise(ends), strict=True):
            whole[..., g, start:stop, :] = view
    return whole.mT


def _along_positions(parts: list[Tensor]) -> Tensor:
    """Put views side by side, in the order in which the first one lies in memory: a transposed copy of outputs for words takes long.

    Args:
        parts: ``[..., K, L]`` each.

    Returns:
        ``[..., K, sum of L]``.
    """
    if len(parts) == 1:
        return parts[0]
    if parts[0].stride(-2) < parts[0].stride(-1):
        return torch.cat([part.mT for part in parts], dim=-2).mT
    return torch.cat(parts, dim=-1)
