"""Distributed programs: local results are right under every wrapper, reduced ones are those of a single process with all samples."""

from __future__ import annotations

import pickle
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from distributed_programs import SIZES, WRAPPERS, D, data, main, model
from oracle import Oracle, Problem, Term
from test_extensions import close, factors_close, grams, sum_batch
from torch import Tensor, nn

import backpack
from backpack import extend, extensions
from backpack.utils.errors import ArgumentError

PROGRAMS = {2: ["wrapped", "mean_over_all", "summed", "refused", "unequal", "sharded"], 4: ["mean_over_all"]}
"""Number of ranks to functions of ``distributed_programs``: starting a process takes longer than all of them."""


@cache
def run_all(ranks: int) -> list[dict]:
    """Run the programs on several ranks.

    Args:
        ranks: How many.

    Returns:
        For each rank, name of the program to what it returns.
    """
    context = get_context("forkserver")  # torch is imported once, in a process that does nothing else
    context.set_forkserver_preload(["distributed_programs"])
    with TemporaryDirectory() as folder:
        processes = [context.Process(target=main, args=(rank, ranks, Path(folder), PROGRAMS[ranks])) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        outcomes = [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
    assert not any(isinstance(outcome, str) for outcome in outcomes), "\n".join(map(str, outcomes))
    return outcomes


def run(program: str, ranks: int) -> list:
    return [outcomes[program] for outcomes in run_all(ranks)]


def oracle(x: Tensor, y: Tensor, weights: Tensor) -> Oracle:
    """Quantities of a weighted sum of the samples' cross-entropies."""
    return Oracle(Problem(model(), x, [Term(nn.CrossEntropyLoss(reduction="none"), y, scale=weights)]))


def check(truth: Oracle, found: list[dict], samples: list[slice]) -> None:
    """Compare the results of ranks, each of which has some of the samples, with the truth for all of them."""
    summed = {
        "sum_grad_squared": truth.sum_grad_squared,
        "variance": truth.variance,
        "diag_ggn_exact": sum_batch(truth.diag_ggn_batch(truth.hessian_exact)),
        "diag_h": sum_batch(truth.diag_h_batch),
    }
    local = {
        "grad_batch": truth.grad_batch,
        "batch_l2": truth.batch_l2,
        "diag_ggn_exact_batch": truth.diag_ggn_batch(truth.hessian_exact),
        "diag_h_batch": truth.diag_h_batch,
    }
    kronecker = truth.kronecker(truth.hessian_exact)
    for n, values in zip(samples, found, strict=True):
        assert values.keys() == truth.params.keys()
        for name, fields in values.items():
            for field, expected in summed.items():
                close(fields[field], expected[name])
            for field, expected in local.items():
                close(fields[field], expected[name][n])
            factors_close(fields["kflr"], kronecker[name])
        roots = {name: fields["sqrt_ggn_exact"] for name, fields in values.items()}
        grams(truth, roots, truth.ggn_per_sample(truth.hessian_exact)[n], 4)
    for name in truth.params:
        close(sum(values[name]["grad_batch"].sum(0) for values in found), sum_batch(truth.grad_batch)[name])
        for field in ("diag_ggn_mc", "kfac"):
            first, *others = (values[name][field] for values in found)
            for other in others:
                factors_close(other, first) if isinstance(first, list) else close(other, first)


def together(ranks: int) -> tuple[Tensor, Tensor, list[slice]]:
    """All samples, and which of them a rank has."""
    x, y = (torch.cat(part) for part in zip(*data(ranks), strict=True))
    return x, y, [slice(sum(SIZES[:r]), sum(SIZES[: r + 1])) for r in range(ranks)]


@pytest.mark.parametrize("before", [True, False], ids=["extended first", "wrapped first"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrapped_models(kind: str, before: bool) -> None:
    ranks = 2
    outcomes = [outcome[kind, before] for outcome in run("wrapped", ranks)]
    x, y, samples = together(ranks)
    for (own, _, _), n in zip(outcomes, samples, strict=True):  # each rank's own loss: the mean does not come from the averaged gradient
        size = n.stop - n.start
        check(oracle(x[n], y[n], torch.full((size,), 1 / size, dtype=torch.float64)), [own], [slice(0, size)])
    weights = torch.cat([torch.full((n,), 1 / (n * ranks), dtype=torch.float64) for n in SIZES[:ranks]])
    truth = oracle(x, y, weights)
    check(truth, [reduced for _, reduced, _ in outcomes], samples)
    for _, reduced, again in outcomes:
        for name, gradient in sum_batch(truth.grad_batch).items():
            close(reduced[name]["grad"], gradient)
        assert "was reduced before" in again


@pytest.mark.parametrize("ranks", [2, 4])
def test_mean_over_the_samples_of_all_ranks(ranks: int) -> None:
    """Uneven ranks with micro-batches: losses weighted by the number of samples give what one process gets for all samples."""
    found, (x, y, samples) = run("mean_over_all", ranks), together(ranks)
    truth = oracle(x, y, torch.full((len(x),), 1 / len(x), dtype=torch.float64))
    check(truth, found, samples)
    for values in found:
        for name, gradient in sum_batch(truth.grad_batch).items():
            close(values[name]["grad"], gradient)


def test_sum_of_the_losses() -> None:
    found, (x, y, samples) = run("summed", 2), together(2)
    check(oracle(x, y, torch.ones(len(x), dtype=torch.float64)), found, samples)


def test_refused_on_all_ranks() -> None:
    one, other = run("refused", 2)
    assert all("Ranks 0 and 1 carry different results: 0.bias." in outcome["other extensions"] for outcome in (one, other))
    assert all("0.bias.variance (Variance)" in outcome["one rank excludes"] for outcome in (one, other))
    assert all("weight.kfra" in outcome["KFRA"] and "KFRA for parts" in outcome["KFRA"] for outcome in (one, other))
    assert one["HMP on one rank"].startswith("UnsupportedError: Rank 1 cannot reduce its results: 0.weight.hmp")
    assert other["HMP on one rank"].startswith("UnsupportedError: 0.weight.hmp")
    assert all("was reduced between passes" in outcome["accumulate after"] for outcome in (one, other))


def test_other_shapes_or_types_are_refused() -> None:
    for outcome in run("unequal", 2):
        assert all("has other shapes, or another type, on rank 1 than on rank 0" in text for text in outcome.values()), outcome
        assert "weight.variance" in outcome["width"]
        assert "([[5, 3], [5, 3]] in torch.float64, and [[4, 3], [4, 3]] in torch.float64, with" in outcome["width"]


def test_sharded_models_are_refused() -> None:
    for outcome in run("sharded", 2):
        assert len(outcome) == 20
        for case, (text, left) in outcome.items():
            assert text.startswith("UnsupportedError: "), (case, text)
            assert "has parameters that are spread over ranks" in text
            assert not left


def test_outside_of_a_distributed_program() -> None:
    net = extend(nn.Linear(D, 2))
    with backpack.backpack(extensions.Variance()):
        net(torch.rand(3, D)).sum().backward()
    with pytest.raises(ArgumentError, match="init_process_group"):
        backpack.distributed.reduce(net)
