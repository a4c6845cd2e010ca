"""Kronecker factors of the generalized Gauss-Newton: KFAC, KFLR, KFRA, and Hessian backpropagation with all its options.

Each value is a list of matrices ``[F1, F2, ...]`` whose Kronecker product ``F1 (x) F2`` approximates the block of the flattened parameter: for a
weight ``[output side, input side]``, for a bias ``[output side]``; one such list a group for layers with groups. The sides come in the order of the
parameter's axes: a matrix ``W`` in ``x @ W`` has ``[input side, output side]``, and so has the table of an ``Embedding``, whose rows belong to
indices; its input side is a vector, the diagonal of a matrix. A parameter without Kronecker structure, if it is a vector, has one factor, its
exact block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch.nn import Parameter

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.bilinear import BilinearDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.flow import Flow, Use
from backpack.core.plan import Plan
from backpack.core.walk import GENERIC
from backpack.extensions.at_layers import OfLayers
from backpack.extensions.backprop_extension import Excluded
from backpack.extensions.chains import LARGEST, AverageFlow, too_large
from backpack.extensions.combining import Combination, Factors, Noted
from backpack.extensions.curvature import Curvature
from backpack.extensions.flows import SqrtFlow
from backpack.extensions.kronecker import KroneckerRule, KroneckerState, OutputSide
from backpack.extensions.rules import Rule, ValueRule
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension, checked_draws
from backpack.extensions.secondorder.hbp_options import BackpropStrategy, ExpectationApproximation, LossHessianStrategy
from backpack.extensions.sides import Sides, rows_of_weights, separates, sides, sides_of, structure_by, units_of
from backpack.utils.errors import ArgumentError, UnsupportedError, merge
from backpack.utils.precision import wide

FactorList = list[Any]


def _too_large(parameter: Parameter, use: Sides) -> str | None:
    squares = [use.outputs[::-1]] if use.inputs is None or len(use.inputs) < 3 else [use.outputs[::-1], (use.inputs[-1], use.inputs[0])]
    large = next(filter(None, (too_large(side, groups, parameter.dtype) for side, groups in squares)), None)
    if large is None:
        return None
    return f"a Kronecker factor of {{names}} {list(parameter.shape)} would be {large}: more than {LARGEST:,} numbers are not formed"


class HBP(OfLayers, SecondOrderBackpropExtension):
    """Kronecker factors by Hessian backpropagation (Dangel, Harmeling & Hennig 2020), saved to ``hbp`` unless another name is given.

    ``LossHessianStrategy.SUM`` goes with ``BackpropStrategy.BATCH_AVERAGE`` (sequences of modules only), ``EXACT`` and ``SAMPLING`` with ``SQRT``.

    Batch averages carry one matrix for all samples. Of the Hessian, second derivatives of element-wise modules are added over the samples; of a
    positive-curvature Hessian, this sum is modified, whereas ``PCHMP`` modifies those of each sample.
    """

    any_root = True

    def __init__(
        self,
        curv_type: str,
        loss_hessian_strategy: str,
        backprop_strategy: str,
        ea_strategy: str,
        savefield: str = "hbp",
        *,
        exclude: Iterable[Excluded] = (),
    ) -> None:
        """Choose the approximation.

        Args:
            curv_type: One of ``Curvature.CHOICES``; square roots are those of the generalized Gauss-Newton.
            loss_hessian_strategy: One of ``LossHessianStrategy.CHOICES``.
            backprop_strategy: One of ``BackpropStrategy.CHOICES``.
            ea_strategy: One of ``ExpectationApproximation.CHOICES``: whether the mean over samples of products of inputs is taken, or the
                product of means.
            savefield: Name of the attribute under which parameters carry the result.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.

        Raises:
            ArgumentError: If the strategies do not go together.
        """
        super().__init__(savefield, exclude=exclude)
        Curvature.require_residual(curv_type)
        LossHessianStrategy.check_exists(loss_hessian_strategy)
        ExpectationApproximation.check_exists(ea_strategy)
        if BackpropStrategy.is_batch_average(backprop_strategy) != (loss_hessian_strategy == LossHessianStrategy.SUM):
            raise ArgumentError(
                f"loss_hessian_strategy {loss_hessian_strategy!r} does not go with backprop_strategy {backprop_strategy!r}: "
                f"{LossHessianStrategy.SUM!r} goes with {BackpropStrategy.BATCH_AVERAGE!r}, the others with {BackpropStrategy.SQRT!r}."
            )
        if BackpropStrategy.is_sqrt(backprop_strategy) and curv_type != Curvature.GGN:
            raise ArgumentError(f"Square roots exist for curv_type {Curvature.GGN!r} only, got {curv_type!r}.")
        self._curv_type, self._loss_hessian_strategy = curv_type, loss_hessian_strategy
        self._backprop_strategy, self._ea_strategy = backprop_strategy, ea_strategy

    @cached_property
    def flow(self) -> Flow:
        """The square root of the loss's Hessian, or its average over samples."""
        if self._averages:
            return AverageFlow(self._curv_type)
        sampled = self._loss_hessian_strategy == LossHessianStrategy.SAMPLING
        return SqrtFlow(self.get_num_mc_samples() if sampled else None)

    @property
    def combination(self) -> Combination:
        """Products of means over samples are no means of products: such factors are not made of those of parts."""
        return Factors(unites=not (self._averages or self.averages_inputs))

    def rule_at(self, samples: int) -> Rule:
        return ValueRule() if self._averages else KroneckerRule(self.averages_inputs)

    def foreseen(self, plan: Plan) -> dict[Parameter, Any]:
        return {parameter: uses[0].structure for parameter, uses in sides_of(plan).items()}

    def rule_key(self) -> Any:
        return ("kronecker", self.flow, self._ea_strategy)

    def check(self, plan: Plan) -> None:
        refusals = list(self._without_averages(plan) if self._averages else self._without_factors(plan))
        if refusals:
            raise merge(refusals)

    def _without_factors(self, plan: Plan) -> Iterator[UnsupportedError]:
        """Refuse parameters that have no Kronecker factors.

        Args:
            plan: The plan.

        Yields:
            One error a parameter.
        """
        # beside products with curvature matrices, functions of a module are not read
        generic = (unit for unit in units_of(plan) if unit.call.derivatives is GENERIC)
        loose = {id(p) for p in (*plan.loose, *(p for unit in generic for p in unit.parameters.values()))}
        made = rows_of_weights(plan)
        mixed = {p for unit in units_of(plan) if not separates(unit) for name, p in unit.parameters.items() if name == "weight"}
        for parameter, uses in sides_of(plan, self.averages_inputs).items():
            shape = list(parameter.shape)
            if id(parameter) in loose and uses[-1].inputs is None and sum(size > 1 for size in shape) > 1:
                why = f"{{names}} of shape {shape}: used by an operation or a layer without a rule for Kronecker factors"
            elif parameter in mixed:
                why = (
                    f"{{names}} of shape {shape}: columns of it are used, as in x @ W[:, :k], or axes of inputs lie on both sides of axes of outputs "
                    "(or of a stack), as in einsum('bid,iod->bo', x, W). Let these be rows of the parameter (F.linear(x, W[:k])), or lie side by "
                    "side there ('ido' or 'oid'), and it has factors"
                )
            elif parameter in made:
                why = f"{{names}} of shape {shape}: makes the weight of another layer (W + B @ A), so that its Kronecker factors are not defined"
            elif len({(use.inputs, use.structure) for use in uses}) > 1:
                why = (
                    "{names}: used in two ways (for example as the weight of a layer and as the table of an Embedding, in a functional operation, "
                    "whole and in parts, or transposed, as in derivatives with respect to inputs, unless torch.func.jvp takes these), so that its "
                    "Kronecker factors are not defined"
                )
            elif (why := _too_large(parameter, uses[0])) is None:
                continue
            yield self._without(plan, parameter, why)

    def _without(self, plan: Plan, parameter: Parameter, why: str) -> UnsupportedError:
        way_out = "Use a diagonal (DiagGGNExact, DiagGGNMC) there, and leave them out here: {exclude}."
        return UnsupportedError(f"{self.savefield}: {why}. {way_out}", {parameter: plan.walk.names[parameter]})

    def _without_averages(self, plan: Plan) -> Iterator[UnsupportedError]:
        """Refuse modules other than affine ones without extra axes and groups, and factors that are too large.

        Args:
            plan: The plan.

        Yields:
            One error a module, or a parameter.
        """
        for unit in plan.units.values():
            rule, call = unit.call.derivatives, unit.call
            extra_axes = isinstance(rule, LinearDerivatives) and len(call.outputs[0].shape) > 2
            about = [p for p in unit.parameters.values() if p in plan.uses]
            fits = isinstance(rule, AffineDerivatives) and not isinstance(rule, BilinearDerivatives) and separates(unit)
            fits = fits and not extra_axes and rule.groups(call) == 1
            if about and not fits:
                yield UnsupportedError(
                    f"{self.savefield}: batch-averaged factors exist for Linear layers on inputs [N, in_features] and for convolutions "
                    f"without groups. {call.path} ({type(call.module).__name__}, output {list(call.outputs[0].shape)}) is none of these: use KFLR or "
                    "KFAC, or leave it out: {exclude}.",
                    {p: plan.walk.names[p] for p in about},
                )
            for name, parameter in unit.parameters.items() if fits else ():
                if parameter in plan.uses and (why := _too_large(parameter, sides(unit, name, parameter))) is not None:
                    yield self._without(plan, parameter, why)

    def beside(self, kept: KroneckerState | None, state: KroneckerState) -> KroneckerState:
        moment = state.outputs.moment()
        return KroneckerState(state.take_inputs(), OutputSide({}, moment if kept is None else moment.add_(kept.outputs.moment())), state.rule)

    def takes_matrix(self, use: Use) -> bool:
        return self.takes_any_root and "moment" in use.notes

    def of_matrix(self, use: Use, name: str) -> KroneckerState:
        if "outputs" not in use.notes:
            use.notes["outputs"] = OutputSide({}, use.notes["moment"]())
        return self.rule_at(use.layout.samples).at_call(use, name)

    def finish(self, state: Any, parameter: Parameter) -> Any:
        found = self._factors(state)
        return found if self.combined_by() else found.value

    def _factors(self, state: Any) -> Noted:
        if self._averages:
            factors = self._from_average(*state)
            return Noted(factors, structure_by(state[0].call.derivatives) if len(factors) > 1 else None)
        sides, inputs = state.outputs.moment(), state.take_inputs()
        if inputs is None:
            return Noted([sides[0]], None)
        structure = structure_by(state.rule, len(inputs))
        pairs = [[inputs[i], sides[i]] if structure.mean == 0 else [sides[i], inputs[i]] for i in range(len(sides))]
        return Noted(pairs[0] if len(pairs) == 1 else pairs, structure)

    @property
    def averages_inputs(self) -> bool:
        """Whether the mean input of the samples is taken instead of each of them."""
        return ExpectationApproximation.should_average_param_jac(self._ea_strategy)

    @property
    def _averages(self) -> bool:
        return self._backprop_strategy == BackpropStrategy.BATCH_AVERAGE

    def _from_average(self, use: Any, name: str) -> FactorList:
        """Read factors off a batch-averaged matrix.

        Args:
            use: The use.
            name: Name of the parameter.

        Returns:
            The factors.
        """
        rule, call = use.call.derivatives, use.call
        outputs = call.output.shape[1]
        side = wide(use.value)
        side = side.clone() if len(side) == outputs else side.unflatten(1, (outputs, -1)).unflatten(0, (outputs, -1)).sum((1, 3))
        if name == "bias":
            return [side]
        if self.averages_inputs:
            mean = wide(rule.columns(call)).sum(0)[0] / max(1, use.layout.samples)
            return [side, mean @ mean.T]
        return [side, rule.input_moment(call, 1 / max(1, use.layout.samples))[0]]

    def get_curv_type(self) -> str:
        """Return the kind of curvature.

        Returns:
            One of ``Curvature.CHOICES``.
        """
        return self._curv_type

    def get_loss_hessian_strategy(self) -> str:
        """Return how the Hessian of the loss enters.

        Returns:
            One of ``LossHessianStrategy.CHOICES``.
        """
        return self._loss_hessian_strategy

    def get_backprop_strategy(self) -> str:
        """Return what is carried.

        Returns:
            One of ``BackpropStrategy.CHOICES``.
        """
        return self._backprop_strategy

    def get_ea_strategy(self) -> str:
        """Return where the average over samples is taken.

        Returns:
            One of ``ExpectationApproximation.CHOICES``.
        """
        return self._ea_strategy

    def get_num_mc_samples(self) -> int:
        """Return the number of Monte-Carlo samples.

        Returns:
            1, unless a subclass says otherwise.
        """
        return 1


class KFAC(HBP):
    """Kronecker factors with a Monte-Carlo estimate of the loss's Hessian (Martens & Grosse 2015; Grosse & Martens 2016), saved to ``kfac``.

    Linear, weight ``[out, in]``: ``[B, A]`` with ``B = sum_{v,n} S[v,n] S[v,n]^T`` (contains the divisor of a mean loss) and
    ``A = 1/N sum_n x_n x_n^T``; bias: ``[B]``. Extra axes are positions: ``A`` is summed over them, and the columns in ``B`` are, before the outer
    product. Further uses of a parameter are further positions, as are the places at which a convolution applies its kernel: its input is unfolded.
    With groups there is a list of such lists. Factors of a transposed convolution are those of ``weight.transpose(0, 1)``.

    Products with a matrix are read off the graph, in attention, recurrent layers and functional code: ``F.linear(x, W)`` is a Linear layer, and a
    matrix ``W [in, out]`` in ``x @ W`` has its factors in the order of its axes, ``[A, B]``. Convolutions and embeddings that are called as functions
    are like their layers. A vector has one factor, its exact block. Where products take some rows of a weight each (``F.linear(x, W[:k])``,
    ``x @ W[:k]``, attention to another sequence), or one matrix of a stack (also in ``F.grouped_mm``), there is a list for each block of rows, of
    equal size, of which these consist. An ``einsum`` of a tensor and a weight is a product with a matrix, too: axes of inputs, and of outputs, are
    joined; axes of outputs that lie in front of those of inputs, apart from the others, count blocks.

    Refused are parameters with two or more axes longer than one in any other operation without a rule (also columns or a multiple of them in one
    of these), and those that are used in two ways, whole and in parts, or in two orientations: take a diagonal for these, or freeze them. Derivatives
    with respect to inputs by ``torch.autograd.grad`` are such a use; those by ``torch.func.jvp``, within a model, are further positions.

    Embedding: ``[A, B]``, as if one-hot vectors were multiplied by its table ``[K, D]``. ``A [K]`` is the diagonal of the second moment of these
    vectors, how often each row was looked up divided by ``N``, and ``B [D, D]`` is as above. Positions that hold ``padding_idx`` count in neither.
    Of an ``EmbeddingBag``, whose sums or means of rows are multiplications with sums or means of one-hot vectors, ``A`` is a matrix ``[K, K]``.
    A bare parameter with two axes longer than one is such a table where rows of it are looked up by integers (``table[numbers]``), or all of them are
    added to activations of all samples or laid beside them (positions ``[1, T, D]``), in front of a single loss: ``A`` is one for each row then.
    """

    def __init__(self, mc_samples: int = 1, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the number of draws.

        Args:
            mc_samples: Labels drawn for each sample.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        self._mc_samples = checked_draws(mc_samples, self)
        super().__init__(
            Curvature.GGN, LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT, ExpectationApproximation.BOTEV_MARTENS, "kfac", exclude=exclude
        )

    def get_num_mc_samples(self) -> int:
        return self._mc_samples


class KFLR(HBP):
    """Kronecker factors with the exact Hessian of the loss (Botev, Ritter & Barber 2017), saved to ``kflr``; scaling as for ``KFAC``."""

    def __init__(self, *, exclude: Iterable[Excluded] = ()) -> None:
        """Take the exact square root of the loss's Hessian.

        Args:
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(
            Curvature.GGN, LossHessianStrategy.EXACT, BackpropStrategy.SQRT, ExpectationApproximation.BOTEV_MARTENS, "kflr", exclude=exclude
        )


class KFRA(HBP):
    """Kronecker factors by recursion with batch-averaged matrices (Botev, Ritter & Barber 2017), saved to ``kfra``.

    For sequences of modules only, with parameters in Linear layers on inputs ``[N, in_features]`` and in convolutions without groups.
    """

    def __init__(self, *, exclude: Iterable[Excluded] = ()) -> None:
        """Carry one matrix for the whole mini-batch.

        Args:
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(
            Curvature.GGN, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE, ExpectationApproximation.BOTEV_MARTENS, "kfra", exclude=exclude
        )
