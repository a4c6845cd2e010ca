"""What Kronecker factors are made of, at the uses of a parameter."""

from __future__ import annotations

import torch
from torch import Tensor, einsum
from torch.nn import Parameter

from backpack.core.arrangements import repetitions
from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.agreement import keeps_product
from backpack.core.derivatives.embedding import LookupDerivatives
from backpack.core.flow import Columns, Use, add_columns
from backpack.core.plan import Plan
from backpack.core.samples import Layout, add_rows
from backpack.extensions.flows import apply_to_all
from backpack.extensions.positions import PositionDerivatives
from backpack.extensions.rules import Rule, stack
from backpack.extensions.sides import as_table, tables_of
from backpack.utils.errors import UnsupportedError
from backpack.utils.moment import second_moment
from backpack.utils.pages import copied
from backpack.utils.precision import wide


class OutputSide:
    """Columns at the output, of which weight and bias of a layer have the same second moment.

    Attributes:
        columns: ``{source: [V, N, G, O]}``, summed over positions; for a parameter without Kronecker structure ``[V, N, 1, *parameter]`` flattened;
            none where only the moment is left.
        readers: How many parameters will ask for the moment.
    """

    __slots__ = ("_moment", "columns", "readers")

    def __init__(self, columns: Columns, moment: Tensor | None = None) -> None:
        self.columns, self._moment, self.readers = columns, moment, 0

    def moment(self) -> Tensor:
        """Sum the outer products of the columns with themselves, over columns and samples.

        Returns:
            ``[G, O, O]``, a tensor that the caller may change.
        """
        moment, self._moment = self._moment, None
        if moment is None:
            moment = second_moment(wide(stack(self.columns)).flatten(0, 1).transpose(0, 1))
        self.readers -= 1
        if self.readers > 0 or not self.columns:  # else what is handed over is kept no more, and computed again if need be
            self._moment = copied(moment)
        return moment


class KroneckerState:
    """What Kronecker factors are made of.

    Attributes:
        inputs: Input-side factor of each group ``[G, K, K]``, ``[1, K]`` if it is diagonal (of a table), or ``None`` for a bias.
        outputs: The other side.
        rule: Rule of the layer, if it is affine: says how the sides lie in the parameter.
    """

    __slots__ = ("_taken", "inputs", "outputs", "rule")

    def __init__(self, inputs: Tensor | None, outputs: OutputSide, rule: AffineDerivatives | None = None) -> None:
        self.inputs, self.outputs, self.rule, self._taken = inputs, outputs, rule, False

    def take_inputs(self) -> Tensor | None:
        """Return the input-side factor, for one of the extensions that read it.

        Returns:
            ``inputs``, a tensor that the caller may change.
        """
        copies, self._taken = self._taken, True
        return copied(self.inputs) if copies and self.inputs is not None else self.inputs


class KroneckerRule(Rule):
    """Input-side factor ``1/N sum_n sum_l x x^T`` and, for each sample, columns at the output summed over positions (Grosse & Martens 2016)."""

    takes_rows = True

    def __init__(self, mean_input: bool, reads_input: bool = True) -> None:
        """Choose the input-side factor.

        Args:
            mean_input: Use the mean input of the samples instead of each of them.
            reads_input: Whether there is to be one.
        """
        self._mean_input, self._reads_input = mean_input, reads_input
        self._tables = set[Parameter]()

    def again(self) -> KroneckerRule:
        return KroneckerRule(self._mean_input, reads_input=False)

    def at_call(self, use: Use, name: str) -> KroneckerState:
        rule, samples = use.call.derivatives, max(use.layout.samples, 1)
        if keeps_product(rule, LookupDerivatives, name) and not self._mean_input:
            sums = apply_to_all(use.value, lambda mat: add_rows(rule.sums_over_positions(use.call, mat), use.layout).unsqueeze(2))
            return KroneckerState(rule.input_moment(use.call, 1 / samples) if self._reads_input else None, OutputSide(sums))
        if not isinstance(rule, AffineDerivatives):
            columns = apply_to_all(use.value, lambda mat: rule._param_mjp(name, use.call, None, (use.grad,), mat, sum_batch=False))
            return _without_structure(apply_to_all(columns, lambda c: add_rows(c, use.layout)))
        if "outputs" not in use.notes:
            use.notes["outputs"] = OutputSide(apply_to_all(use.value, lambda mat: _over_positions(rule.rows(use.call, mat), use.layout)))
        outputs = use.notes["outputs"]
        outputs.readers += 1
        if name == "bias":
            return KroneckerState(None, outputs) if rule.groups(use.call) == 1 else _without_structure(outputs.columns)
        if not self._reads_input:
            return KroneckerState(None, outputs, rule)
        if not self._mean_input:
            return KroneckerState(rule.input_moment(use.call, 1 / samples), outputs, rule)
        if rule.in_parts and (rule.apart or not use.layout.plain):
            raise _without_means()
        x = wide(rule.columns(use.call))
        turns = torch.tensor(repetitions(use.layout.labels), dtype=torch.int64, device=x.device)
        positions = int(turns.max()) + 1 if len(turns) else 1
        mean = x.new_zeros(positions, *x.shape[1:]).index_add_(0, turns, x) / samples  # rows of one sample are positions
        return KroneckerState(einsum("ngkl,ngml->gkm", mean, mean), outputs, rule)

    def at_leaf(self, columns: Columns) -> KroneckerState:
        return _without_structure(columns)

    def at_parameter(self, parameter: Parameter, columns: Columns, plan: Plan) -> KroneckerState:
        rows = None if self._mean_input else tables_of(plan).get(parameter)
        if rows is None:
            return self.at_leaf(columns)
        sums = apply_to_all(columns, lambda c: c.reshape(*c.shape[:2], *as_table(parameter.shape)).sum(2, keepdim=True))
        if not self._reads_input:
            return KroneckerState(None, OutputSide(sums))
        counted = parameter in self._tables  # columns arrive one after the other, and all of the lookups are counted with the first
        self._tables.add(parameter)
        inputs = rows.to(torch.promote_types(parameter.dtype, torch.float32)) / max(1, next(iter(columns.values())).shape[1])
        return KroneckerState(torch.zeros_like(inputs)[None] if counted else inputs[None], OutputSide(sums))

    def add(self, one: KroneckerState, other: KroneckerState, parameter: Parameter) -> KroneckerState:
        if self._mean_input and one.inputs is not None and not all(isinstance(state.rule, PositionDerivatives) for state in (one, other)):
            raise _without_means()  # others are not joined, and may see some of the samples each
        inputs = None if one.inputs is None else one.inputs + other.inputs
        return KroneckerState(inputs, OutputSide(add_columns(one.outputs.columns, other.outputs.columns)), one.rule)


def _without_means() -> UnsupportedError:
    return UnsupportedError(
        "Mean inputs of a layer that is called for some of the samples at a time, as a convolution in a loop over samples, or an expert "
        "for its rows, are not known. Call it once for all of them, or take the input of each sample, as ExpectationApproximation.BOTEV_MARTENS does."
    )


def _over_positions(rows: Tensor, layout: Layout) -> Tensor:
    return add_rows(rows.squeeze(-1) if rows.shape[-1] == 1 else rows.sum(-1), layout)


def _without_structure(columns: Columns) -> KroneckerState:
    flat = {source: c.flatten(2).unsqueeze(2) if c.dim() > 2 else c[..., None, None] for source, c in columns.items()}
    return KroneckerState(None, OutputSide(flat))
