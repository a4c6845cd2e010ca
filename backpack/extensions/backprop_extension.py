"""BackpropExtension: a quantity to be computed during a backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar
from warnings import warn

from torch import Size, Tensor
from torch.nn import Module, Parameter

from backpack.core.derivatives.basederivatives import BaseLossDerivatives
from backpack.core.derivatives.registry import computes_like, derivatives_for, register
from backpack.core.excluding import Excluded, Excluding, as_excluded
from backpack.core.flow import Flow, add_columns
from backpack.core.networks import Network
from backpack.core.owners import owners, savefields
from backpack.core.plan import Plan
from backpack.core.terms import Term
from backpack.extensions.combining import Combination
from backpack.extensions.module_extension import Grads, ModuleExtension
from backpack.extensions.rules import ColumnRule, Rule
from backpack.extensions.saved_quantities import SavedQuantities
from backpack.utils.differentiation import version_of
from backpack.utils.errors import ArgumentError, ArgumentTypeError, FailModeError, OverwrittenError, UnsupportedError
from backpack.utils.nested import tensors_in
from backpack.utils.subsampling import are_indices

FAIL_ERROR = "ERROR"
FAIL_WARN = "WARNING"
FAIL_SILENT = "SILENT"


class BackpropExtension(Excluding, ABC):
    """A quantity to be computed during a backward pass.

    The library's own extensions say which ``flow`` they read, by which ``rule``, and how to ``finish``; they need no module extensions. An
    extension written by a user names a ``ModuleExtension`` for each module class instead.

    Attributes:
        savefield: Name of the attribute under which parameters carry the result.
        ordered: Whether results of several losses have to be aligned, because their columns can be read.
        keeps_calls: Whether results read what modules have recorded, after the pass, too.
        any_root: Whether results are the same for all square roots of the loss's Hessian, so that one with few columns can be carried.
        sums_columns: Whether ``finish`` is a sum over columns, so that results of blocks of columns add up.
        combination: How it scales with the loss, and is made of the results of parts of a mini-batch; ``None`` where that is not known.
        saved_quantities: What module extensions have sent, in an extension whose ``backpropagate`` methods carry it.
    """

    ordered: ClassVar[bool] = False
    keeps_calls: ClassVar[bool] = False
    any_root: ClassVar[bool] = False
    sums_columns: ClassVar[bool] = False
    combination: Combination | None = None

    def __init__(
        self,
        savefield: str,
        module_exts: dict[type[Module], ModuleExtension] | None = None,
        fail_mode: str = FAIL_ERROR,
        subsampling: list[int] | None = None,
        *,
        exclude: Iterable[Excluded] = (),
    ) -> None:
        """Store the settings.

        Args:
            savefield: Name of the attribute under which parameters carry the result.
            module_exts: What to do for each module class; ``None`` for the library's own rules.
            fail_mode: For modules with parameters that ``module_exts`` does not name: ``"ERROR"``, ``"WARNING"`` or ``"SILENT"``.
            subsampling: Indices of the samples to use; duplicates count as separate samples, negative ones as in Python. ``None`` for all.
            exclude: What the extension leaves out: parameters, modules (that is, all parameters in them), and names of either. Names are those in the
                outermost module on which ``extend`` was called; ``*`` in them stands for anything. On excluded parameters nothing is written, and
                nothing is refused on their account. If all extensions exclude the same parameters, nothing is computed for them. A parameter that
                several modules share is excluded in all of them. A deep copy of the extension excludes the same, and the copies of these that are
                made along with it. A pickle of the extension refers to the model that is pickled along with it; without one, only names have a
                meaning when it is loaded.

        Raises:
            FailModeError: If the fail mode does not exist.
            ArgumentError: If the subsampling is not a list of integers, or something else than parameters, modules and names is excluded.
        """
        if fail_mode not in (FAIL_ERROR, FAIL_WARN, FAIL_SILENT):
            raise FailModeError(f"Unknown fail_mode {fail_mode!r}. Choose one of {[FAIL_ERROR, FAIL_WARN, FAIL_SILENT]}.")
        if subsampling is not None and not are_indices(subsampling):
            raise ArgumentError(f"{type(self).__name__}: subsampling must be a list of integer sample indices, got {subsampling!r}.")
        self._exclude = as_excluded(exclude, type(self).__name__)
        if isinstance(savefield, str):  # others are refused by the context
            savefields.add(savefield)
        self.savefield = savefield
        self._module_exts: dict[type[Module], ModuleExtension] = {}
        for module_cls, extension in (module_exts or {}).items():
            self.set_module_extension(module_cls, extension)
        self._fail_mode = fail_mode
        self._subsampling = subsampling
        self.saved_quantities = SavedQuantities()

    # ------------------------------------------------------------------------------------------- the library's own quantities
    @property
    def flow(self) -> Flow | None:
        """What travels backward for this extension; ``None`` if only module extensions say what to do."""
        return None

    def rule_at(self, samples: int) -> Rule:
        """Return the linear part of reading the quantity off. The default is the per-sample columns.

        Args:
            samples: Number of samples in the mini-batch.

        Returns:
            The rule.
        """
        return ColumnRule(self.flow, self.samples(samples))

    def rule_key(self) -> Any:
        """Return what two extensions have in common that can share the linear part.

        Returns:
            A hashable value.
        """
        chosen = self.get_subsampling()
        return (self.flow, None if chosen is None else tuple(chosen))

    def check(self, plan: Plan) -> None:  # noqa: B027  the default accepts all
        """Refuse a plan in which the quantity is not defined. The default accepts all.

        Args:
            plan: The plan.
        """

    def finish(self, state: Any, parameter: Parameter) -> Any:
        """Make the quantity from the linear part, added over all uses of the parameter.

        Args:
            state: What the rule returned; for per-sample columns ``{source: [V, N, *parameter]}``. Not to be changed: others may read it, too.
            parameter: The parameter.

        Raises:
            UnsupportedError: If the extension has no rule of its own.
        """
        raise UnsupportedError(f"{type(self).__name__} says what to do only for {[cls.__name__ for cls in self._module_exts]}.")

    def of_terms(self, terms: list[Term | Network]) -> Any:
        """Make the quantity of a parameter at which everything arrives as a sum of terms, if these need not be formed.

        Args:
            terms: The terms.

        Returns:
            The quantity; ``NotImplemented``, by default.
        """
        return NotImplemented

    def finish_beside(self, state: Any, parameter: Parameter) -> Any:
        """Make the quantity from a linear part of which other extensions make theirs, too.

        Args:
            state: What the rule returned.
            parameter: The parameter.

        Returns:
            The quantity.

        Raises:
            OverwrittenError: If ``finish`` changes the linear part.
        """
        tensors = tensors_in(state)
        before = [*map(version_of, tensors)]
        value = self.finish(state, parameter)
        if before != [*map(version_of, tensors)]:
            raise OverwrittenError(
                f"{{names}}: {type(self).__name__}.finish changes what it is given in place, of which other extensions in the context make their "
                f"quantities, too. Let it work out of place, or on a copy, or use {type(self).__name__} alone.",
                owners.about([parameter]),
            )
        return value

    @property
    def adds_up(self) -> bool:
        """Whether results of blocks of columns add up, unless a subclass has made something else of its quantity."""
        return self.sums_columns and type(self).finish is self._said_by("sums_columns").finish

    @property
    def takes_any_root(self) -> bool:
        """Whether any root will do, unless a user reads the columns, or a subclass has made something else of its quantity."""
        cls, says = type(self), self._said_by("any_root")
        return self.any_root and not self.has_module_exts and (cls.finish, cls.rule_at) == (says.finish, says.rule_at)

    def beside(self, kept: Any, state: Any) -> Any:
        """Put the linear part of a block of columns beside that of others. The default is that of per-sample columns.

        Args:
            kept: What was returned for the blocks before; ``None`` for the first one.
            state: The linear part of further columns. Those of a source that both have are of other samples.

        Returns:
            What ``finish`` takes.
        """
        return state if kept is None else add_columns(kept, state)

    def forms_gradients(self, rows: Size, entries: int) -> bool:
        """Say whether what each sample contributes to the gradient of the weight of an affine layer is formed on the way to the quantity.

        Args:
            rows: Shape ``[N, G, O, L]`` of the output: groups, outputs and positions.
            entries: Number of entries of the weight.

        Returns:
            ``False``, by default.
        """
        return False

    def combined_by(self) -> Combination | None:
        """Return what the extension says of scaled losses and of parts, unless a subclass has made something else of its quantity.

        Returns:
            The combination; ``None`` where it is not known.
        """
        return self.combination if type(self).finish is self._said_by("combination").finish else None

    def foreseen(self, plan: Plan) -> dict[Parameter, Any]:
        """Tell before a pass what its results must have in common with others that they are united with.

        Args:
            plan: The plan of the pass.

        Returns:
            The extra of the results, see ``Noted``, as far as known; nothing, by default.
        """
        return {}

    @classmethod
    def _said_by(cls, name: str) -> type[BackpropExtension]:
        return next(part for part in cls.__mro__ if name in vars(part))

    def samples(self, total: int) -> tuple[int, ...] | None:
        """Return the sub-sampled indices, non-negative.

        Args:
            total: Number of samples in the mini-batch.

        Returns:
            The indices; ``None`` for all samples.

        Raises:
            ArgumentError: If an index is out of range.
        """
        chosen = self.get_subsampling()
        if chosen is None:
            return None
        if any(not -total <= index < total for index in chosen):
            raise ArgumentError(f"{type(self).__name__}: subsampling {list(chosen)} is out of range for {total} samples.")
        return tuple(index % total for index in chosen)

    # -------------------------------------------------------------------------------------------------------------- users'
    def set_module_extension(self, module_cls: type[Module], extension: ModuleExtension, overwrite: bool = False) -> None:
        """Say what this extension does for a module class.

        Args:
            module_cls: The class; subclasses are meant, too, unless they are named themselves, or bring another ``forward``.
            extension: What to do.
            overwrite: Replace an entry that exists.

        Raises:
            ArgumentError: If there is an entry and ``overwrite`` is not set.
            ArgumentTypeError: If it is no class of modules, or no module extension.
        """
        if not (isinstance(module_cls, type) and issubclass(module_cls, Module)):
            raise ArgumentTypeError(f"{type(self).__name__} maps classes of modules, like torch.nn.Linear, to module extensions, got {module_cls!r}.")
        if not isinstance(extension, ModuleExtension):
            hint = f" Create it first: {extension.__name__}()." if isinstance(extension, type) else ""
            raise ArgumentTypeError(f"{type(self).__name__}, {module_cls.__name__}: needs an instance of ModuleExtension, got {extension!r}.{hint}")
        if module_cls in self._module_exts and not overwrite:
            raise ArgumentError(
                f"{type(self).__name__} has a module extension for {module_cls.__name__}: {self._module_exts[module_cls]}. Pass overwrite=True."
            )
        self._module_exts[module_cls] = extension
        derivatives = vars(extension).get("derivatives")
        if isinstance(derivatives, BaseLossDerivatives) and derivatives_for(module_cls) is None:
            register(module_cls, derivatives)  # a loss of the user's own: flows of the library can start at it, too

    @property
    def has_module_exts(self) -> bool:
        """Whether a user has said what to do for some module class."""
        return bool(self._module_exts)

    def module_extension(self, module: Module) -> ModuleExtension | None:
        """Return what a user has said for the class of a module.

        Args:
            module: The module.

        Returns:
            The most specific entry, ``None`` if there is none.
        """
        if not self._module_exts:
            return None
        return next((self._module_exts[cls] for cls in type(module).__mro__ if cls in self._module_exts and computes_like(module, cls)), None)

    def __call__(self, module: Module, g_inp: Grads, g_out: Grads) -> None:
        """Run the module extension for a module by hand, outside of a pass under ``backpack``.

        Args:
            module: A module whose last forward pass is recorded.
            g_inp: Gradients with respect to the inputs, ``None`` where not known.
            g_out: Gradient with respect to the output.
        """
        chosen = self.module_extension(module)
        if chosen is None:
            self.fail(module, type(module).__name__)
        else:
            chosen(self, module, g_inp, g_out)

    def fail(self, module: Module, path: str) -> None:
        """React to a module for which there is neither a rule nor a module extension, if it has parameters or has to be passed.

        Args:
            module: The module.
            path: Its name.

        Raises:
            UnsupportedError: In fail mode ``"ERROR"``.
        """
        blocks = self.expects_backpropagation_quantities() and not module._modules and self._fail_mode == FAIL_ERROR
        excluded = self.excluded()
        if not blocks and all(parameter is None or id(parameter) in excluded for parameter in module._parameters.values()):
            return
        carries = " (which helps where no module that has one lies upstream: nothing is carried there)"
        self._react(
            f"Extension saving to {self.savefield} does not have an extension for Module {type(module)} ({path}). Register one with "
            f"set_module_extension(), or leave the module out{carries if self.expects_backpropagation_quantities() else ''} with"
        )

    def fail_at(self, parameters: Mapping[Parameter, str]) -> None:
        """React to parameters that are used without a call of a module that holds them, so that no module extension is asked.

        Args:
            parameters: The parameters, with their names.

        Raises:
            UnsupportedError: In fail mode ``"ERROR"``.
        """
        self._react(
            f"Extension saving to {self.savefield} is not asked for {{names}}: module extensions say what a call of a module gives, and these are "
            "used without a call of the module that holds them. Call it, or leave them out with {exclude} or",
            parameters,
        )

    def _react(self, template: str, about: Mapping[Parameter, str] | None = None) -> None:
        allowed = "'WARNING' or 'SILENT'" if self._fail_mode == FAIL_ERROR else "'SILENT'"
        error = UnsupportedError(f"{template} fail_mode={allowed}.", about)
        if self._fail_mode == FAIL_ERROR:
            raise error
        if self._fail_mode == FAIL_WARN:
            warn(error.args[0], stacklevel=3)

    @abstractmethod
    def expects_backpropagation_quantities(self) -> bool:
        """Say whether the extension carries something beside the gradient."""

    def get_subsampling(self) -> list[int] | None:
        """Return the indices of the samples in use.

        Returns:
            Indices, ``None`` for all samples.
        """
        return self._subsampling

    def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
        """Unite what arrives from two consumers of a tensor, in a user's extension; of two losses only where a subclass says how.

        Args:
            existing: What arrived before.
            other: What arrives now.

        Returns:
            Their sum, for tensors.

        Raises:
            UnsupportedError: If they are no tensors: then the extension has to define it.
        """
        if isinstance(existing, Tensor) and isinstance(other, Tensor):
            return existing + other
        raise UnsupportedError(f"{type(self).__name__}: define accumulate_backpropagated_quantities(existing, other) for a graph that branches.")


class SubsamplingExtension(BackpropExtension):
    """A quantity whose class says where it is saved, and whose options are samples and exclusions: comes first among the bases of such a class."""

    savefield: str

    def __init__(self, subsampling: list[int] | None = None, *, exclude: Iterable[Excluded] = ()) -> None:
        """Choose the samples.

        Args:
            subsampling: Indices of the samples; ``None`` for all. The divisor of a mean loss stays that of the mini-batch.
            exclude: Parameters, modules or names of either that are left out, see ``BackpropExtension``.
        """
        super().__init__(self.savefield, subsampling=subsampling, exclude=exclude)
