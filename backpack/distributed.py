"""Quantities of a program that runs on several ranks, each with samples of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from backpack.accumulation import carried, combination_of, store
from backpack.extensions.combining import Note, Part, Parts
from backpack.utils.errors import ArgumentError, UnsupportedError, require_module
from backpack.utils.nested import tensors_in

_REDUCED = "reduced"


class Ranks(Parts):
    """Parts of which each rank has one. What is kept for each sample stays where it is."""

    def __init__(self, own: Part, samples: int, group: ProcessGroup | None) -> None:
        """Take the part of this rank.

        Args:
            own: The part.
            samples: Number of samples on all ranks.
            group: The ranks.
        """
        super().__init__(own, samples)
        self._group = group

    def total(self, function: Callable[[Part], Tensor]) -> Tensor:
        summand = function(self.some).detach().clone().contiguous()
        dist.all_reduce(summand, group=self._group)
        return summand

    def side_by_side(self, axis: int) -> Tensor:
        return self.some.value


def reduce(model: Module, group: ProcessGroup | None = None, average: bool = True) -> None:
    """Make the quantities that a model carries on each rank those of the loss of all ranks.

    To be called on every rank, after the backward pass (or the passes that accumulate). The loss of all ranks is the average of the ranks'
    losses, as that is whose gradient ``DistributedDataParallel`` leaves in ``.grad``; with uneven mini-batches, multiply the mean loss of rank ``r``
    by ``N_r * ranks / N`` for the mean over all ``N`` samples. Sums over samples, variances and Kronecker factors are the same on all ranks then:
    those of a single process with all samples. What is kept for each sample stays on its rank, divided by the number of ranks: added over samples
    and ranks, ``grad_batch`` is ``.grad``.

    Args:
        model: The model, wrapped or not.
        group: The ranks; ``None`` for all.
        average: Whether the loss is the average of the ranks' losses; otherwise it is their sum.

    Raises:
        ArgumentError: If ``torch.distributed`` is not initialized, or all quantities were reduced before.
        UnsupportedError: If ranks carry different quantities, or of other shapes or types, or one that is not made of those of its parts
            (``KFRA``, ``HBP`` with averages, ``HMP``, ``GGNMP``, ``PCHMP``).

    Example:
        >>> model = DistributedDataParallel(extend(model))
        >>> with backpack(Variance(), KFAC()):
        ...     lossfunc(model(X), y).backward()
        >>> backpack.distributed.reduce(model)
    """
    require_module(model, "backpack.distributed.reduce")
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("backpack.distributed.reduce() needs torch.distributed.init_process_group(), before the backward pass.")
    failure: Exception | None = None
    results = []
    try:
        results = carried(model, union=True, doing=_REDUCED)
    except (ArgumentError, UnsupportedError) as error:
        failure = error
    own = {what: (type(note.extension).__name__, part.samples, _form(parameter, note, part)) for what, parameter, _, note, part in results}
    samples = _agree(failure, own, group)
    factor = 1 / dist.get_world_size(group) if average else 1
    for what, parameter, field, note, part in results:
        combination = combination_of(note.extension, what)
        whole = combination.united(Ranks(combination.scaled(part, factor), samples[what], group))
        store(parameter, field, whole, note, _REDUCED)


def _form(parameter: Parameter, note: Note, part: Part) -> str:
    """Describe what the same result has in common on all ranks.

    Args:
        parameter: The parameter.
        note: What is known about the result.
        part: The result.

    Returns:
        Shapes and types.
    """
    types = dict.fromkeys(str(tensor.dtype) for tensor in (parameter, *tensors_in(part.value)))
    shapes = [parameter.shape, *combination_of(note.extension, "").shapes(part)]
    return f"{[list(shape) for shape in shapes]} in {', '.join(types)}"


def _agree(failure: Exception | None, own: dict[str, tuple[str, int, str]], group: ProcessGroup | None) -> dict[str, int]:
    """Let all ranks know what all ranks have, since nobody must wait for a rank that has nothing to say.

    Args:
        failure: Why this rank cannot go on, if it cannot.
        own: What this rank has: name of the result to (extension, number of samples, shapes and types).
        group: The ranks.

    Returns:
        Name of the result to number of samples on all ranks.

    Raises:
        UnsupportedError: If a rank cannot go on, or ranks have different results, or of other shapes or types.
    """
    everybody: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, (None if failure is None else str(failure), own), group=group)
    if failure is not None:
        raise failure
    for rank, (message, _) in enumerate(everybody):
        if message is not None:
            raise UnsupportedError(f"Rank {rank} cannot reduce its results: {message}")
    kinds = [{(what, kind) for what, (kind, *_) in results.items()} for _, results in everybody]
    for rank, some in enumerate(kinds):
        if some != kinds[0]:
            different = sorted(f"{what} ({kind})" for what, kind in some ^ kinds[0])
            raise UnsupportedError(
                f"Ranks 0 and {rank} carry different results: {', '.join(different[:4])}. Use the same extensions everywhere, and leave out what a "
                "rank does not use (`exclude=`)."
            )
    for rank, (_, results) in enumerate(everybody):
        for what, (_, _, form) in results.items():
            if form != (first := everybody[0][1][what][2]):
                raise UnsupportedError(
                    f"{what} has other shapes, or another type, on rank {rank} than on rank 0 ({form}, and {first}, with its parameter first). Give "
                    "all ranks the same model, in the same precision, and backpack(..., dtype=) the same type."
                )
    return {what: sum(results[what][1] for _, results in everybody) for what in own}
