"""Models of Hugging Face ``transformers`` as they are, made from tiny configurations: nothing is downloaded, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable

from models import language, model
from oracle import Problem
from table import classify, regress
from torch import Tensor, randint, randn
from torch.nn import Module
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTForImageClassification,
)

WORDS, LENGTH = 6, 4


def logits(net: Module, x: Tensor) -> Tensor:
    """Call a model as its users do, and take the scores out of its dataclass."""
    return net(x).logits


def text(make: Callable[[], Module], head: Callable = classify, output: Callable = logits) -> Callable[[int], Problem]:
    """Put sentences in front of a model."""
    return lambda N: head(make().eval(), randint(WORDS, (N, LENGTH)), output=output)


def images(make: Callable[[], Module]) -> Callable[[int], Problem]:
    """Put images in front of a model."""
    return lambda N: classify(make().eval(), randn(N, 3, 8, 8), output=logits)


def gpt2(**options: object) -> Module:
    """GPT-2, whose output layer is its table of words, and whose layers are ``torch.addmm``."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **options))


def llama() -> Module:
    """Llama with rotary positions, gated units and shared keys."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, pad_token_id=0, **sizes))


def bert() -> Module:
    """BERT with a classifier on its pooled output."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=4, **sizes))


def vit() -> Module:
    """A vision transformer."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    return ViTForImageClassification(ViTConfig(num_labels=4, **sizes))


def t5() -> Module:
    """The encoder of T5, with its table of relative positions."""
    return T5EncoderModel(T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"))


def resnet() -> Module:
    """A residual network."""
    return ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 2], layer_type="basic", num_labels=4))


def convnext() -> Module:
    """A ConvNeXt, with depthwise convolutions and LayerScale."""
    return ConvNextForImageClassification(ConvNextConfig(num_stages=2, patch_size=2, hidden_sizes=[4, 6], depths=[1, 1], num_labels=4))


model("GPT-2", language(gpt2, WORDS, LENGTH, logits), "no factors")
model("GPT-2, eager attention", language(lambda: gpt2(attn_implementation="eager"), WORDS, LENGTH, logits), "no factors")
model("Llama", language(llama, WORDS, LENGTH, logits), "single")
model("BERT", text(bert), "no factors")
model("ViT", images(vit), "no factors")
model("T5 encoder", text(t5, regress, lambda net, x: net(x).last_hidden_state), "no factors", "single")
model("ResNet", images(resnet))
model("ConvNeXt", images(convnext))
