"""``check_rule``: compares registered derivatives with automatic differentiation, product by product."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, einsum, eye, randn
from torch.nn import Module

from backpack.core.derivatives.affine import AffineDerivatives
from backpack.core.derivatives.agreement import unasked
from backpack.core.derivatives.basederivatives import BaseDerivatives, BaseLossDerivatives
from backpack.core.derivatives.generic import GenericDerivatives
from backpack.core.derivatives.linearity import is_linear_in
from backpack.core.derivatives.loss_hessian import sample_hessians
from backpack.core.derivatives.own_names import hidden, reading_own
from backpack.core.derivatives.records import number_of
from backpack.core.derivatives.registry import derivatives_for
from backpack.utils.columns import unit_columns
from backpack.utils.errors import ArgumentError, BackpackError, LossValueError, OverwrittenError, UnsupportedError, require_module
from backpack.utils.nested import tensors_in

_COLUMNS = 2
_TOLERANCE = 1e-6
_DRAWS, _STANDARD_ERRORS = 4096, 8
"""Monte-Carlo samples of an estimate, and how far it may be from the truth: by chance alone, no entry ever is."""
_GENERIC = GenericDerivatives()
_IN_PLACE = "changes in place what it is given, which others read, too. Work out of place."


class RuleError(BackpackError, AssertionError):
    """Registered derivatives of a module are wrong.

    Raised by ``backpack.check_rule``. Way out: the message names the first product that differs from automatic differentiation, with shapes and
    the size of the error.
    """

    code = "wrong-rule"


def check_rule(module: Module, *inputs: Any) -> list[str]:
    """Compare the derivatives that are registered for the class of a module with automatic differentiation, in double precision.

    All products that the derivatives have are compared; they see only the tensors that they ``keeps``. Give several samples, and no exact kinks.

    Args:
        module: The module, with the options and in the mode in question; a loss function likewise.
        *inputs: Its arguments: tensors with the samples on axis 0, and what else it takes.

    Returns:
        Names of the products that were compared, and for each parameter whether the output is linear in it, as quantities of the Hessian require.

    Raises:
        ArgumentError: If there is nothing to run the module on, or automatic differentiation gives numbers there that are not finite.
        LossValueError: If it is a loss of which second-order quantities are refused, as with ``reduction="none"``.
        UnsupportedError: If there is no rule for the class, or it does not apply to this execution. A wrong product raises ``RuleError``, which
            is an ``AssertionError`` and names the first one, with shapes and the size of the error. Also if there is nothing to compare.

    Example:
        >>> @register(MyLayer)
        ... class MyDerivatives(ElementwiseDerivatives): ...
        >>> check_rule(MyLayer(), torch.randn(4, 3))
    """
    require_module(module, "check_rule")
    if not inputs or not isinstance(inputs[0], Tensor) or not inputs[0].numel():
        raise ArgumentError(f"check_rule() needs a tensor with some samples as first input of the module, got {inputs[:1]}.")
    rule = derivatives_for(module)
    if rule is None:
        name = type(module).__name__
        raise UnsupportedError(
            f"No rule is registered for {name}, or for a base class whose forward it keeps. Register one, backpack.register({name}, rule), "
            "GenericLossDerivatives for a loss function, say; to check the numbers that come without one, use backpack.verify on the whole model."
        )
    module = deepcopy(module).double()
    given = [value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs]
    with torch.random.fork_rng(), torch.no_grad(), unasked():
        torch.manual_seed(0)
        output = tensors_in(module(*(value.clone() if isinstance(value, Tensor) else value for value in given)))[0]
        seen, full = (_Execution(module, given, output, keeps) for keeps in (rule.needs(module), frozenset({"input", "output"})))
        rule = reading_own(rule, hidden(module, seen))
        if not rule.applies(seen):
            raise UnsupportedError(f"{type(rule).__name__} does not apply to this execution of {module}: the graph takes its place.")
        comparing = _Comparing(f"{type(rule).__name__} of {module}")
        if isinstance(rule, BaseLossDerivatives):
            _compare_loss(comparing, rule, seen, full)
        else:
            _compare_module(comparing, rule, seen, full)
    if not comparing.compared:
        kinds = ", ".join(str(value.dtype).removeprefix("torch.") for value in inputs if isinstance(value, Tensor))
        raise UnsupportedError(
            f"Nothing of {type(rule).__name__} could be compared for {module} on inputs of type {kinds}: it has no product that exists there. Are "
            "their names right (_jac_t_mat_prod, say), and does the module take numbers that can be differentiated?"
        )
    return comparing.done


class _Execution:
    """One execution of a module; tensors that a rule does not keep are known by shape and type only."""

    keywords = ()

    def __init__(self, module: Module, inputs: list[Any], output: Tensor, keeps: frozenset[str]) -> None:
        self.module, self.as_called, self.inputs = module, module, inputs
        for i, value in enumerate(inputs):
            setattr(self, f"input{i}", value if "input" in keeps or not isinstance(value, Tensor) else value.to("meta"))
        self.output = output if "output" in keeps else output.to("meta")

    def __getattr__(self, name: str) -> Any:
        if number_of(name) is not None:
            raise AttributeError(name)
        return self.own(name)

    def own(self, name: str) -> Any:
        """Return an attribute of the module.

        Args:
            name: Its name.

        Returns:
            Its value.
        """
        return getattr(self.module, name)

    def __repr__(self) -> str:
        return repr(self.module)


class _Comparing:
    """Compares results, one after the other, and remembers their names, and whether there were any."""

    def __init__(self, title: str) -> None:
        self.title, self.done, self.compared, self._watched = title, [], False, []

    def watch(self, *tensors: Any) -> None:
        """Take note of tensors that no product may change.

        Args:
            *tensors: The tensors; anything else is passed over.
        """
        self._watched += [(tensor, tensor.clone()) for tensor in tensors if isinstance(tensor, Tensor)]

    def __call__(self, name: str, said: Callable[[], Tensor], true: Tensor, allowed: Tensor | float = 0.0) -> None:
        """Compare a result; nothing happens where the rule does not have it.

        Args:
            name: Name of the product.
            said: Returns what the rule says.
            true: What is true.
            allowed: Error that is allowed beside rounding.

        Raises:
            LossValueError: If the loss is one of which second-order quantities are refused.
            RuleError: If it is wrong.
        """
        title = f"{name} of {self.title}"
        try:
            result = said()
        except UnsupportedError:
            return
        except LossValueError:  # the options of the loss are to blame
            raise
        except OverwrittenError as error:
            raise RuleError(f"{title} {_IN_PLACE}") from error
        except Exception as error:
            _require_finite(name, true)
            raise RuleError(f"{title} raised {type(error).__name__}: {error} (a tensor that `keeps` does not name has no entries)") from error
        if not all(torch.equal(tensor.nan_to_num(), before.nan_to_num()) for tensor, before in self._watched):
            raise RuleError(f"{title} {_IN_PLACE}")
        if result.is_meta or result.shape != true.shape:
            hint = "depends on a tensor that `keeps` does not name" if result.is_meta else f"should have shape {list(true.shape)}"
            raise RuleError(f"{title} has shape {list(result.shape)}; it {hint}.")
        _require_finite(name, true)
        error, largest = (result - true).abs(), true.abs().max().item() if true.numel() else 0.0
        if not (error <= allowed + _TOLERANCE * largest + _TOLERANCE**2).all():
            raise RuleError(
                f"{title} is wrong: error {error.max().item():.3g} in a result of shape {list(result.shape)} with largest entry {largest:.3g}."
            )
        self.done.append(name)
        self.compared = True


def _require_finite(name: str, true: Tensor) -> None:
    if not true.isfinite().all():
        raise ArgumentError(
            f"check_rule() cannot compare {name}: automatic differentiation gives numbers that are not finite. Give inputs where it does not."
        )


def _flat(columns: Tensor) -> Tensor:
    """Flatten each sample.

    Args:
        columns: ``[V, N, *]``.

    Returns:
        ``[V, N, D]``.
    """
    return columns.reshape(*columns.shape[:2], columns.shape[2:].numel())


def _compare_module(compare: _Comparing, rule: BaseDerivatives, seen: Any, full: Any) -> None:
    """Compare Jacobian and Hessian products.

    Args:
        compare: Compares.
        rule: The rule.
        seen: The execution as the rule sees it.
        full: The execution.
    """
    x, y = full.input0, full.output
    chosen = [len(y) - 1, 0, len(y) - 1]
    mat, some = randn(_COLUMNS, *y.shape, dtype=y.dtype), randn(_COLUMNS, len(chosen), *y.shape[1:], dtype=y.dtype)
    compare.watch(*full.inputs, y, mat, some)
    if x.is_floating_point():
        like_input = randn(_COLUMNS, *x.shape, dtype=x.dtype)
        jac = _flat(_GENERIC.jac_t_mat_prod(full, None, None, unit_columns(y.shape, y)))
        square = randn(len(jac), len(jac), dtype=y.dtype)
        compare.watch(like_input, square)

        def jac_t(columns: Tensor, samples: list[int]) -> Tensor:
            return einsum("oni,vno->vni", jac[:, samples], _flat(columns)).reshape(*columns.shape[:2], *x.shape[1:])

        true = einsum("oni,vni->vno", jac, _flat(like_input)).reshape(mat.shape)
        compare("jac_mat_prod", lambda: rule.jac_mat_prod(seen, None, None, like_input), true)
        compare("jac_t_mat_prod", lambda: rule.jac_t_mat_prod(seen, None, None, mat), jac_t(mat, list(range(len(y)))))
        compare("jac_t_mat_prod with subsampling", lambda: rule.jac_t_mat_prod(seen, None, None, some, chosen), jac_t(some, chosen))
        true = einsum("oni,op,pnj->ij", jac, square, jac) / len(y)
        compare("ea_jac_t_mat_jac_prod", lambda: rule.ea_jac_t_mat_jac_prod(seen, None, None, square), true)
        with suppress(UnsupportedError):  # torch cannot differentiate every function twice
            _compare_residual(compare, rule, seen, full, like_input)
        if rule.any_batch_axis and y.dim() > 1 + rule.feature_axes(full):
            moved = [value.movedim(1, 0) if isinstance(value, Tensor) else value for value in full.inputs]
            other = _Execution(full.module, moved, y.movedim(1, 0), rule.needs(full.module))
            true = jac_t(mat, list(range(len(y)))).movedim(2, 1)
            compare("jac_t_mat_prod with samples on axis 1", lambda: rule._jac_t_mat_prod(other, None, None, mat.movedim(2, 1)), true)
    for name in (name for name, _ in full.module.named_parameters() if name in rule.params):
        compare.done.append(f"linear in {name!r}" if is_linear_in(name, full) else f"not linear in {name!r}: quantities of the Hessian are refused")
        for given, samples in ((mat, None), (some, chosen)):
            for sum_batch in (True, False):
                title = f"param_mjp({name!r}, sum_batch={sum_batch}{'' if samples is None else ', subsampling'})"
                true = _GENERIC.param_mjp(name, full, None, None, given, sum_batch, samples)
                compare(title, partial(rule.param_mjp, name, seen, None, None, given, sum_batch, samples), true)
        if hasattr(rule, f"_{name}_jac_mat_prod"):
            like_param = randn(_COLUMNS, *full.module.get_parameter(name).shape, dtype=y.dtype)
            true = _GENERIC.param_jac_mat_prod(name, full, None, None, like_param)
            compare(f"{name}_jac_mat_prod", partial(getattr(rule, f"_{name}_jac_mat_prod"), seen, None, None, like_param), true)
        if name in {"weight", "bias"} and isinstance(rule, AffineDerivatives):  # what fast ways use, whatever products were written by hand
            said, true = getattr(AffineDerivatives, f"_{name}_jac_t_mat_prod"), _GENERIC.param_mjp(name, full, None, None, mat)
            compare("columns and rows" if name == "weight" else "rows of the bias", partial(said, rule, seen, None, None, mat), true)
            if name == "weight":
                _compare_views(compare, rule, seen, chosen)


def _compare_views(compare: _Comparing, rule: AffineDerivatives, seen: Any, chosen: list[int]) -> None:
    """Compare what an affine layer says of its input and its weight beside products.

    Args:
        compare: Compares.
        rule: The rule.
        seen: The execution as the rule sees it.
        chosen: Samples.
    """
    columns = rule.columns(seen)
    for samples in (chosen, slice(1, None)):
        compare(f"columns of {'a slice' if isinstance(samples, slice) else 'chosen samples'}", partial(rule.columns, seen, samples), columns[samples])
    if rule.vectors(seen) is not None:
        compare("vectors", lambda: rule.vectors(seen)[:, None, :, None], columns)
    compare("input_moment", lambda: rule.input_moment(seen, 0.5), einsum("ngkl,ngml->gkm", columns, columns) / 2)
    outputs = seen.module.weight.numel() // columns.shape[1] // columns.shape[2]
    counted = torch.arange(outputs, dtype=columns.dtype)[:, None].expand(columns.shape[1], -1, columns.shape[2])  # the number of the output
    weight = rule.weight_from_matrix(seen, counted)
    if weight.dim() == 2:
        true = weight[:1] if rule.transposed else weight[:, :1]
        compare(f"transposed={rule.transposed}", lambda: weight, true.expand_as(weight))


def _compare_residual(compare: _Comparing, rule: BaseDerivatives, seen: Any, full: Any, like_input: Tensor) -> None:
    """Compare the second derivative, and what the rule claims about it.

    Args:
        compare: Compares.
        rule: The rule.
        seen: The execution as the rule sees it.
        full: The execution.
        like_input: Columns.
    """
    g_out = (randn(full.output.shape, dtype=full.output.dtype),)
    residual = _GENERIC.residual(full, None, g_out)
    diagonal = residual.diagonal(dim1=1, dim2=2)
    compare("hessian_is_zero", lambda: residual * (not rule.hessian_is_zero(seen)), residual)
    compare("hessian_is_diagonal", lambda: diagonal.diag_embed() if rule.hessian_is_diagonal(seen) else residual, residual)
    product = einsum("nij,vnj->vni", residual, _flat(like_input)).reshape(like_input.shape)
    compare("residual_mat_prod", lambda: rule.residual_mat_prod(seen, None, g_out, like_input), product)
    with suppress(UnsupportedError):
        if rule.hessian_is_diagonal(seen):
            compare("hessian_diagonal", lambda: rule.hessian_diagonal(seen, None, g_out), diagonal.reshape(full.input0.shape))


def _compare_loss(compare: _Comparing, rule: BaseLossDerivatives, seen: Any, full: Any) -> None:
    """Compare square roots and products of a loss's Hessian; the sampled one within its standard error.

    Args:
        compare: Compares.
        rule: The rule.
        seen: The execution as the rule sees it.
        full: The execution.
    """
    hessian, x = sample_hessians(full), full.input0
    mat, chosen = randn(_COLUMNS, *x.shape, dtype=x.dtype), [len(x) - 1, 0]

    def outer(columns: Tensor) -> Tensor:
        return einsum("vni,vnj->nij", _flat(columns), _flat(columns))

    compare("hessian_is_psd", lambda: hessian + (eye(hessian.shape[1]) * _deficit(hessian) if rule.hessian_is_psd() else 0), hessian)
    compare("sqrt_hessian", lambda: outer(rule.sqrt_hessian(seen, None, None)), hessian)
    compare.watch(*full.inputs, mat)

    def signed(columns: Tensor, signs: Tensor | None) -> Tensor:
        return outer(columns) if signs is None else einsum("vni,vnj,vn->nij", _flat(columns), _flat(columns), signs)

    compare("signed_sqrt_hessian", lambda: signed(*rule._signed_sqrt_hessian(seen, None, None)), hessian)
    compare("signed_sqrt_hessian with few columns", lambda: signed(*rule._least_sqrt_hessian(seen, None, signed=True)), hessian)
    compare("sqrt_hessian with few columns", lambda: outer(rule._least_sqrt_hessian(seen, None, signed=False)[0]), hessian)
    compare("sqrt_hessian with subsampling", lambda: outer(rule.sqrt_hessian(seen, None, None, chosen)), hessian[chosen])
    with suppress(UnsupportedError):
        draws = _flat(rule.sqrt_hessian_sampled(seen, None, None, mc_samples=_DRAWS)) * sqrt(_DRAWS)
        squares = einsum("vni,vnj->nij", draws.square(), draws.square()) / _DRAWS
        allowed = _STANDARD_ERRORS * ((squares - hessian.square()).clamp(min=0) / _DRAWS).sqrt()
        compare("sqrt_hessian_sampled", lambda: outer(draws) / _DRAWS, hessian, allowed)
    product = einsum("nij,vnj->vni", hessian, _flat(mat)).reshape(mat.shape)
    compare("make_hessian_mat_prod", lambda: rule.make_hessian_mat_prod(seen, None, None)(mat), product)
    compare("sum_hessian", lambda: rule.sum_hessian(seen, None, None), hessian.sum(0).reshape(2 * x.shape[1:]))


def _deficit(hessian: Tensor) -> Tensor:
    """Return by how much the smallest eigenvalue is negative.

    Args:
        hessian: ``[N, D, D]``.

    Returns:
        A number, not negative.
    """
    return (-torch.linalg.eigvalsh(hessian).min()).clamp(min=0)
