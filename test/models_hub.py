"""Models of Hugging Face ``transformers`` as they are, made from tiny configurations: nothing is downloaded, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from warnings import catch_warnings, simplefilter

import transformers
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
model("BERT", text(bert))
model("ViT", images(vit))
model("T5 encoder", text(t5, regress, lambda net, x: net(x).last_hidden_state), "single")
model("T5 encoder, mask", text(t5, regress, lambda net, x: net(x, attention_mask=(x + x[:, :1] > 0).long()).last_hidden_state), "single")
model("ResNet", images(resnet))
model("ConvNeXt", images(convnext))

# --- the rest of the hub: one row for each family, each with the options that make it special -------------------------------------------------

TEXT = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 16,
}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": WORDS, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
SEQ2SEQ = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 12))}
SEQ2SEQ |= {"vocab_size": WORDS, "d_model": 8, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
SOUND = {"conv_dim": [4, 4], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
KEYS = {"num_key_value_heads": 1, "head_dim": 4}


def stock(name: str, kind: str, **options: object) -> Callable[[], Module]:
    """Make a model from a configuration."""
    return lambda: getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**options))


def classifier(name: str, *tags: str, **options: object) -> None:
    """Add a model that classifies sentences."""
    model(name, text(stock(name, "ForSequenceClassification", **(TEXT | {"num_labels": 4} | options))), *tags)


def writer(name: str, *tags: str, kind: str = "ForCausalLM", sizes: dict = TEXT, **options: object) -> None:
    """Add a model that predicts the next word."""
    model(name, language(stock(name, kind, use_cache=False, **(sizes | options)), WORDS, LENGTH, logits), *tags)


def translator(name: str, *tags: str, kind: str = "ForConditionalGeneration", sizes: dict = SEQ2SEQ, **options: object) -> None:
    """Add a model that predicts words from those of another sentence."""

    def scores(net: Module, x: Tensor) -> Tensor:
        return net(input_ids=x, decoder_input_ids=x[:, :2]).logits.mean(1)

    model(name, text(stock(name, kind, use_cache=False, decoder_start_token_id=1, **(sizes | options)), output=scores), *tags)


def seen(name: str, *tags: str, size: int = 8, **options: object) -> None:
    """Add a model that classifies images."""
    model(
        name,
        lambda N: classify(stock(name, "ForImageClassification", num_labels=4, **options)().eval(), randn(N, 3, size, size), output=logits),
        *tags,
    )


def heard(name: str, *tags: str) -> None:
    """Add a model that classifies sound."""
    sizes = {key: size for key, size in TEXT.items() if "max" not in key and "token" not in key} | SOUND
    make = stock(name, "ForSequenceClassification", num_labels=4, classifier_proj_size=6, **sizes)
    model(name, lambda N: classify(make().eval(), randn(N, 32), output=logits), *tags)


def checkpointed() -> Module:
    """GPT-2 that runs its layers again in the backward pass, which it does in training mode."""
    net = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
    with catch_warnings():
        simplefilter("ignore")  # another name from version 6 on
        net.gradient_checkpointing_enable({"use_reentrant": False})
    net.eval = net.train
    return net


classifier("Albert", "curved", embedding_size=6)  # one layer, used again and again
DISENTANGLED = {"relative_attention": True, "pos_att_type": "c2p|p2c", "max_relative_positions": 4, "position_buckets": 4}
classifier("DebertaV2", "no factors", "curved", **DISENTANGLED, share_att_key=True, norm_rel_ebd="layer_norm")
translator("Bart", "no factors")
writer("StableLm", **KEYS)
seen("Swin", patch_size=2, image_size=8, embed_dim=4, depths=[2, 1], num_heads=[2, 2], window_size=2)
model("GPT-2, checkpoints", language(checkpointed, WORDS, LENGTH, logits), "no factors")

for _name, _options in {
    "Roberta": {},
    "Electra": {"embedding_size": 6},
    "RoFormer": {"embedding_size": 8},
    "ConvBert": {"embedding_size": 8, "head_ratio": 1, "conv_kernel_size": 3, "num_groups": 1},
    "BigBird": {"attention_type": "original_full"},
    "MPNet": {},
    "RemBert": {"input_embedding_size": 8, "output_embedding_size": 8},
    "Esm": {"mask_token_id": 3},
    "FNet": {},
    "SqueezeBert": {"embedding_size": 8, "q_groups": 2, "k_groups": 2, "v_groups": 2, "intermediate_groups": 2, "output_groups": 2},
}.items():
    classifier(_name, "slow", **_options)
for _name, _options in {
    "GPTNeoX": {},
    "Falcon": {"alibi": True, "new_decoder_architecture": False},
    "Mistral": KEYS,
    "Qwen2": KEYS,
    "Qwen3": KEYS,
    "Gemma2": KEYS | {"query_pre_attn_scalar": 4, "sliding_window": 2},
    "Phi": {},
    "Phi3": {"num_key_value_heads": 1},
    "Cohere2": KEYS,
    "Olmo2": {"num_key_value_heads": 1},
    "Granite": KEYS,
    "Nemotron": KEYS,
    "BioGpt": {},
    "BitNet": KEYS,
}.items():
    writer(_name, "slow", "single", **_options)
writer("GPTNeo", "slow", "single", sizes=TEXT | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 2})
writer("GPTJ", "slow", "single", sizes=GPT, rotary_dim=2)
writer("OPT", "slow", ffn_dim=12, word_embed_proj_dim=6, pad_token_id=1)
writer("Bloom", "slow", sizes=GPT, hidden_size=8)
writer("Rwkv", "slow", "single", sizes=TEXT, attention_hidden_size=8, context_length=8)
for _name, _kind in {
    "MBart": "ForConditionalGeneration",
    "Pegasus": "ForConditionalGeneration",
    "Marian": "MTModel",
    "PLBart": "ForConditionalGeneration",
}.items():
    translator(_name, "slow", kind=_kind)
T5_SIZES = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2}
translator("T5", "slow", "single", sizes=T5_SIZES)
seen("Dinov2", "slow", **IMAGE)
seen("Swinv2", "slow", patch_size=2, image_size=8, embed_dim=4, depths=[2, 1], num_heads=[2, 2], window_size=2)
seen("RegNet", "slow", size=16, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], groups_width=2, layer_type="y")
seen("FocalNet", "slow", patch_size=2, image_size=8, embed_dim=4, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3], hidden_sizes=[4, 8])
heard("Wav2Vec2", "slow")
heard("Hubert", "slow")
heard("WavLM", "slow")
