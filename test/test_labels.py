"""Models of Hugging Face ``transformers`` that compute their loss from ``labels=``: equal to the definition, from their scores and torch's losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from oracle import Oracle, Problem, Term
from table import bits, default_dtype
from test_extensions import MC, sum_batch
from test_models import compare, compare_all
from torch import Tensor, einsum, nn, rand, randint, randn
from torch.nn import Module
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from backpack import backpack, extend, extensions
from backpack.utils.errors import ShapeError

pytestmark = pytest.mark.filterwarnings("error")

WORDS, LENGTH = 6, 4
SMALL = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}


class Labelled(NamedTuple):
    """A model with labels.

    Attributes:
        make: Makes the model.
        given: Makes the arguments of the model, the input first, for a batch size.
        loss: The loss from scores and all further arguments, as the documentation of the model says.
        single: Whether the model computes in single precision inside.
        scores: Names of the outputs.
    """

    make: Callable[[], Module]
    given: Callable[[int], dict[str, Any]]
    loss: Callable[..., Tensor]
    single: bool = False
    scores: tuple[str, ...] = ("logits",)


def sentences(N: int, *shape: int) -> Tensor:
    return randint(WORDS, (N, *shape, LENGTH))


def words(N: int) -> dict[str, Tensor]:
    """Sentences whose words are the labels, all but one."""
    ids = sentences(N)
    labels = ids.clone()
    labels[0, 1] = -100
    return {"input_ids": ids, "labels": labels}


def of_next_word(scores: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> Tensor:
    loss = F.cross_entropy(scores.transpose(1, 2)[..., :-1], labels[:, 1:], reduction="sum")
    return loss / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def of_each_word(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels)


def gpt2(**options: Any) -> Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **options))


def bert(cls: type[Module], **options: Any) -> Callable[[], Module]:
    return lambda: cls(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SMALL, **options))


def classes(N: int) -> dict[str, Tensor]:
    return {"input_ids": sentences(N), "labels": randint(4, (N,))}


T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0}
MODELS = {
    "GPT-2": Labelled(gpt2, words, of_next_word, True),
    "GPT-2, accumulated": Labelled(gpt2, lambda N: words(N) | {"num_items_in_batch": 17}, of_next_word, True),
    "Llama": Labelled(
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, max_position_embeddings=LENGTH, pad_token_id=0, **SMALL)),
        words,
        of_next_word,
        True,
    ),
    "BERT, masked words": Labelled(bert(BertForMaskedLM), words, of_each_word),
    "BERT, classes": Labelled(bert(BertForSequenceClassification, num_labels=4), classes, F.cross_entropy),
    "BERT, several classes": Labelled(
        bert(BertForSequenceClassification, num_labels=4, problem_type="multi_label_classification"),
        lambda N: {"input_ids": sentences(N), "labels": bits(N, 4)},
        F.binary_cross_entropy_with_logits,
    ),
    "BERT, regression": Labelled(
        bert(BertForSequenceClassification, num_labels=1),
        lambda N: {"input_ids": sentences(N), "labels": rand(N)},
        lambda scores, labels: F.mse_loss(scores[:, 0], labels),
    ),
    "BERT, regressions": Labelled(
        bert(BertForSequenceClassification, num_labels=3, problem_type="regression"),
        lambda N: {"input_ids": sentences(N), "labels": rand(N, 3)},
        F.mse_loss,
    ),
    "BERT, tokens": Labelled(
        bert(BertForTokenClassification, num_labels=4), lambda N: {"input_ids": sentences(N), "labels": randint(4, (N, LENGTH))}, of_each_word
    ),
    "BERT, choice": Labelled(
        bert(BertForMultipleChoice),
        lambda N: {"input_ids": sentences(N, 3), "labels": randint(3, (N,))},
        F.cross_entropy,
    ),
    "BERT, questions": Labelled(
        bert(BertForQuestionAnswering, num_labels=2),
        lambda N: {"input_ids": sentences(N), "start_positions": randint(LENGTH, (N,)), "end_positions": randint(LENGTH, (N,))},
        lambda scores, start, end: (F.cross_entropy(scores[..., 0], start) + F.cross_entropy(scores[..., 1], end)) / 2,
        scores=("start_logits", "end_logits"),
    ),
    "T5": Labelled(
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **T5)),
        lambda N: {"input_ids": sentences(N), "labels": randint(1, WORDS, (N, 2))},
        of_each_word,
        True,
    ),
    "ViT": Labelled(
        lambda: ViTForImageClassification(ViTConfig(num_labels=4, image_size=8, patch_size=4, **SMALL)),
        lambda N: {"pixel_values": randn(N, 3, 8, 8), "labels": randint(4, (N,))},
        F.cross_entropy,
    ),
}


def build(name: str, N: int) -> tuple[Module, dict[str, Any]]:
    with torch.random.fork_rng(), default_dtype(torch.float64):
        torch.manual_seed(0)
        return MODELS[name].make().eval(), MODELS[name].given(N)


def truth(name: str, N: int) -> Oracle:
    """The scores of the model, and its loss in our words."""
    model, given = build(name, N)
    first, *others = given.values()
    inputs = {next(iter(given)): first} | ({"labels": given["labels"]} if name == "T5" else {})  # which the decoder reads

    def scores(model: Module, _: Tensor) -> Tensor:
        out = model(**inputs)
        return torch.stack([out[key] for key in MODELS[name].scores], -1) if len(MODELS[name].scores) > 1 else out[MODELS[name].scores[0]]

    return Oracle(Problem(model, first, [Term(nn.CrossEntropyLoss(), tuple(others), function=MODELS[name].loss)], scores))


def test_no_axis_left() -> None:
    """With one sample and one output, the model squeezes away the axis of samples."""
    model, given = build("BERT, regression", 1)
    with backpack(extensions.DiagGGNExact()), pytest.raises(ShapeError, match="batch axis of length 1"):
        extend(model)(**given).loss.backward()


@pytest.mark.parametrize(("name", "N"), [(name, N) for name in MODELS for N in (1, 3) if (name, N) != ("BERT, regression", 1)])
def test_models_that_compute_their_own_loss_are_exact(name: str, N: int) -> None:
    oracle, rtol = truth(name, N), 5e-6 if MODELS[name].single else 1e-9
    expected = {
        "grad_batch": oracle.grad_batch,
        "diag_ggn_exact": sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact)),
        "diag_ggn_exact_batch": oracle.diag_ggn_batch(oracle.hessian_exact),
    }
    model, given = build(name, N)
    extend(model)
    with backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.BatchDiagGGNExact(), extensions.SqrtGGNExact()):
        model(**given).loss.backward()
    for field, value in expected.items():
        compare_all({key: getattr(p, field) for key, p in model.named_parameters() if hasattr(p, field)}, value, rtol)
    vectors = {key: randn(p.numel(), 4, dtype=torch.float64) for key, p in oracle.params.items()}
    roots = {key: model.get_parameter(key).sqrt_ggn_exact.flatten(2) for key in vectors}
    seen = sum(roots[key] @ vector for key, vector in vectors.items())
    moved = einsum("nde,nek->ndk", oracle.hessian_exact, sum(oracle.jac[key] @ vector for key, vector in vectors.items()))
    for key, root in roots.items():
        compare(einsum("vnp,vnk->npk", root, seen), einsum("ndp,ndk->npk", oracle.jac[key], moved), rtol)


def test_sampled_labels_are_unbiased() -> None:
    """Each word has a label of its own, drawn from the distribution of the model: the mean lies within five standard errors of the truth."""
    name = "BERT, masked words"
    oracle, (model, given) = truth(name, 3), build(name, 3)
    exact = sum_batch(oracle.diag_ggn_batch(oracle.hessian_exact))
    extend(model)
    rows = []
    for _ in range(30):
        with backpack(extensions.DiagGGNMC(mc_samples=10 * MC)):
            model(**given).loss.backward()
        rows.append(torch.cat([model.get_parameter(key).diag_ggn_mc.flatten() for key in exact]))
    draws, expected = torch.stack(rows), torch.cat([value.flatten() for value in exact.values()])
    error = draws.std(0) / len(draws) ** 0.5
    assert error.amax() < 0.1 * expected.amax()
    assert ((draws.mean(0) - expected).abs() <= 5 * error + 1e-12).all()
