"""Models of transformers, of one layer where it makes no difference."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from wild import zoo_torch
from wild.suite import Entry, images, labels, text, tokens

zoo_torch.torchvision()  # transformers imports it
import transformers as t  # noqa: E402

SIZE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = SIZE | {"vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 2}
SOUND = SIZE | {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
GPT: dict[str, Any] = {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
T5: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
BART: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
HEADS = {
    f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 64))
}
PLAIN = {name: TEXT[name] for name in ("hidden_size", "vocab_size")} | {"num_hidden_layers": 2}
PATCHES = SIZE | {"image_size": 32, "patch_size": 8}
WAVES = images(20, 1)[0].reshape(20, 400)
LABELS: dict[str, Any] = {"num_labels": 4}


class Scores(nn.Module):
    """The scores from what a model returns, which is a kind of dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, return_dict=True).logits


class Head(nn.Module):
    """Four scores from what a model says about each token, frame or patch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x)[0].mean(1))


def of_tokens(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.transpose(1, 2), y)


def scores(make: Callable[[], nn.Module], data: Any = None, **more: Any) -> Entry:
    return Entry(zoo_torch.seeded(lambda: Scores(make())), data or tokens(), **more)


def language(make: Callable[[], nn.Module], **more: Any) -> Entry:
    return scores(make, text(), settings={"loss": of_tokens}, **more)


def head(make: Callable[[], nn.Module], data: Any = None, **more: Any) -> Entry:
    return Entry(zoo_torch.seeded(lambda: Head(make())), data or tokens(), **more)


def again() -> nn.Module:
    model = t.BertForSequenceClassification(t.BertConfig(**TEXT, **LABELS))
    model.gradient_checkpointing_enable()
    return model


MODELS = {
    "bert": scores(lambda: t.BertForSequenceClassification(t.BertConfig(**TEXT, **LABELS))),
    "bert, computed again": scores(again),
    "bert, masked, tied": language(lambda: t.BertForMaskedLM(t.BertConfig(**TEXT))),
    "roberta": scores(lambda: t.RobertaForSequenceClassification(t.RobertaConfig(**TEXT, **LABELS))),
    "electra": scores(lambda: t.ElectraForSequenceClassification(t.ElectraConfig(embedding_size=16, **TEXT, **LABELS))),
    "albert, one layer twice": scores(
        lambda: t.AlbertForSequenceClassification(
            t.AlbertConfig(**TEXT | LABELS | {"embedding_size": 16, "num_hidden_layers": 2, "hidden_dropout_prob": 0.1})
        )
    ),
    "deberta": scores(
        lambda: t.DebertaV2ForSequenceClassification(
            t.DebertaV2Config(**TEXT, **LABELS, relative_attention=True, pos_att_type=["p2c", "c2p"])
        )
    ),
    "distilbert": head(
        lambda: t.DistilBertModel(t.DistilBertConfig(vocab_size=50, dim=32, n_layers=1, n_heads=4, hidden_dim=64))
    ),
    "gpt2, tied": language(lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT))),
    "llama": language(lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED))),
    "qwen2": language(lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**GROUPED))),
    "gemma": language(lambda: t.GemmaForCausalLM(t.GemmaConfig(head_dim=8, **GROUPED))),
    "mistral, a window": language(lambda: t.MistralForCausalLM(t.MistralConfig(sliding_window=4, **GROUPED))),
    "mixtral, experts": language(lambda: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=3, **GROUPED))),
    "mamba": language(lambda: t.MambaForCausalLM(t.MambaConfig(state_size=4, **PLAIN))),
    "t5": head(lambda: t.T5EncoderModel(t.T5Config(**T5))),
    "bart": head(lambda: t.BartModel(t.BartConfig(max_position_embeddings=32, **BART, **HEADS))),
    "vit": scores(lambda: t.ViTForImageClassification(t.ViTConfig(**PATCHES, **LABELS)), images(32)),
    "vit_mae, masks": head(lambda: t.ViTMAEModel(t.ViTMAEConfig(mask_ratio=0.5, **PATCHES)), images(32)),
    "wav2vec2, layers dropped": head(
        lambda: t.Wav2Vec2Model(t.Wav2Vec2Config(layerdrop=0.3, apply_spec_augment=False, **SOUND)), (WAVES, labels())
    ),
    "wav2vec2, masks of NumPy": head(
        lambda: t.Wav2Vec2Model(t.Wav2Vec2Config(mask_time_prob=0.3, mask_time_length=2, **SOUND)),
        (WAVES, labels()),
        refused="the loss is not the same; .* does the model or the loss use Python's or NumPy's random numbers",
    ),
    "rwkv": head(lambda: t.RwkvModel(t.RwkvConfig(rescale_every=0, **PLAIN))),
    "rwkv, rescaled": head(lambda: t.RwkvModel(t.RwkvConfig(**PLAIN)), refused="trained weight was written to"),
}
