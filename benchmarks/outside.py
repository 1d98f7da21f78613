"""Models of other packages: does a fit with all its checks train them, with the same bits on 1 and 3 devices?

    python benchmarks/outside.py [timm] [torchvision] [transformers] [keras] [paddle] [--only bert]

Each model is small, has random weights, and makes 2 steps with the rehearsal and a spot check at every step. A refusal is shown
with its message; two models deserve one. Packages that are not installed are left out: timm, torchvision and transformers are
no dependencies of samestep. Each package has a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import samestep as ss

Models = dict[str, tuple[Callable[[], Any], Any]]  # a name → what makes the model, and examples for it
RIGHT = {
    "wav2vec2, masks": "it draws masks with NumPy",
    "rwkv, rescaled": "it writes its weights when it goes from training to evaluation",
}


def images(size: int, last: bool = False, channels: int = 3) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((16, size, size, channels) if last else (16, channels, size, size))
    return x.astype("float32"), draw.integers(0, 10, 16)


def tokens() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return draw.integers(3, 50, (16, 12)), draw.integers(0, 10, 16)


KEPT: list[Any] = []  # an operator is there for as long as its library is


def load_torchvision() -> None:
    """Import torchvision also where its wheel was built for another PyTorch, whose operators are then missing here."""
    import torch

    while importlib.util.find_spec("torchvision"):
        try:
            importlib.import_module("torchvision")
            return
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if not missing:
                raise
            KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
            KEPT[-1].define(f"{missing[1]}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def timm() -> Models:
    load_torchvision()
    import timm

    def model(name: str, size: int = 32, **options: Any) -> tuple[Callable[[], Any], Any]:
        return lambda: timm.create_model(name, num_classes=10, **options), images(size)

    vit: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2}
    windows: dict[str, Any] = {"img_size": 32, "window_size": 4, "depths": (1, 2), "num_heads": (2, 4), "embed_dim": 32}
    small: dict[str, Any] = {"growth_rate": 8, "block_config": (2, 2, 2, 2), "drop_rate": 0.1}
    return {
        "resnet18": model("resnet18", drop_rate=0.1, drop_path_rate=0.1),
        "efficientnet_b0": model("efficientnet_b0", drop_rate=0.1, drop_path_rate=0.2),
        "mobilenetv3": model("mobilenetv3_small_050", drop_rate=0.1),
        "convnext": model("convnext_atto", 64, depths=(1, 1, 2, 1), drop_path_rate=0.1),
        "vit": model("vit_tiny_patch16_224", drop_path_rate=0.1, attn_drop_rate=0.1, patch_drop_rate=0.25, **vit),
        "swin": model("swin_tiny_patch4_window7_224", drop_path_rate=0.1, **windows),
        "mixer": model("mixer_s16_224", 64, img_size=64, drop_path_rate=0.1),
        "regnet": model("regnety_002", drop_path_rate=0.1),
        "densenet, checkpointed": model("densenet121", memory_efficient=True, **small),
        "ghostnet": model("ghostnet_050", drop_rate=0.1),
    }


def torchvision() -> Models:
    from torch import nn
    from torch.nn.utils import parametrizations

    load_torchvision()
    from torchvision import models

    def normed(norm: Callable[[Any], Any]) -> Any:
        model = models.squeezenet1_1(num_classes=10)
        for layer in [m for m in model.modules() if isinstance(m, nn.Conv2d)]:
            norm(layer)
        return model

    tiny: dict[str, Any] = {"stem_channels": 16, "block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8}
    makers: dict[str, Callable[[], Any]] = {
        "shufflenet": lambda: models.shufflenet_v2_x0_5(num_classes=10),
        "googlenet": lambda: models.googlenet(num_classes=10, aux_logits=False, init_weights=False),
        "mnasnet": lambda: models.mnasnet0_5(num_classes=10),
        "maxvit": lambda: models.MaxVit((64, 64), partition_size=2, stochastic_depth_prob=0.2, num_classes=10, **tiny),
        "squeezenet, weight norm": lambda: normed(parametrizations.weight_norm),
        "squeezenet, spectral norm": lambda: normed(parametrizations.spectral_norm),
    }
    return {name: (make, images(64)) for name, make in makers.items()}


def transformers() -> Models:
    load_torchvision()
    import transformers as t
    from torch import nn

    class Head(nn.Module):
        """Ten scores from what a model says about each token, frame or patch."""

        def __init__(self, model: Any, **options: Any) -> None:
            super().__init__()
            self.model, self.options, self.head = model, options, nn.LazyLinear(10)

        def forward(self, x: Any) -> Any:
            return self.head(self.model(x, **self.options)[0].mean(1))

    size: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    text = size | {"vocab_size": 50, "max_position_embeddings": 32}
    conv: dict[str, Any] = {
        "conv_dim": (16, 16),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 8,
    }
    sound = size | conv | {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 4}
    gpt: dict[str, Any] = {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    t5: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    rwkv = {name: text[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    masks = {"mask_time_prob": 0.3, "mask_time_length": 2}

    def checkpointed() -> Any:
        model = t.BertModel(t.BertConfig(**text))
        model.gradient_checkpointing_enable()
        return model

    read: dict[str, Callable[[], Any]] = {
        "bert": lambda: t.BertModel(t.BertConfig(**text)),
        "bert, checkpointed": checkpointed,
        "bert, tied": lambda: t.BertForMaskedLM(t.BertConfig(**text)),
        "distilbert": lambda: t.DistilBertModel(
            t.DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
        ),
        "roberta": lambda: t.RobertaModel(t.RobertaConfig(**text)),
        "albert": lambda: t.AlbertModel(t.AlbertConfig(embedding_size=16, hidden_dropout_prob=0.1, **text)),
        "gpt2, tied": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**text)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(num_key_value_heads=2, sliding_window=4, **text)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(num_key_value_heads=2, num_local_experts=3, **text)),
        "t5": lambda: t.T5EncoderModel(t.T5Config(**t5)),
        "mamba": lambda: t.MambaModel(t.MambaConfig(state_size=4, **rwkv)),
        "rwkv, rescaled": lambda: t.RwkvModel(t.RwkvConfig(**rwkv)),
        "rwkv": lambda: t.RwkvModel(t.RwkvConfig(rescale_every=0, **rwkv)),
    }
    heard: dict[str, Callable[[], Any]] = {
        "wav2vec2, layerdrop": lambda: t.Wav2Vec2Model(
            t.Wav2Vec2Config(layerdrop=0.3, apply_spec_augment=False, **sound)
        ),
        "wav2vec2, masks": lambda: t.Wav2Vec2Model(t.Wav2Vec2Config(**masks, **sound)),
    }
    seen: dict[str, Callable[[], Any]] = {
        "vit": lambda: t.ViTModel(t.ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.1, **size)),
        "vit_mae": lambda: t.ViTMAEModel(t.ViTMAEConfig(image_size=32, patch_size=8, mask_ratio=0.5, **size)),
    }
    waves = images(20, channels=1)
    kinds = (read, tokens()), (heard, (waves[0].reshape(16, 400), waves[1])), (seen, images(32))
    return {name: (lambda make=make: Head(make()), data) for makers, data in kinds for name, make in makers.items()}


def keras() -> Models:
    from keras import applications

    names = {"MobileNetV2": {"alpha": 0.35}, "EfficientNetB0": {}, "MobileNetV3Small": {"minimalistic": True}}
    given: dict[str, Any] = {"weights": None, "classes": 10, "input_shape": (32, 32, 3), "classifier_activation": None}
    return {name: (lambda name=name, more=more: getattr(applications, name)(**given, **more), images(32, last=True))
            for name, more in names.items()}  # fmt: skip


def paddle() -> Models:
    from paddle.vision import models

    return {
        "LeNet": (models.LeNet, images(28, channels=1)),
        "resnet18": (lambda: models.resnet18(num_classes=10), images(32)),
        "mobilenet_v2": (lambda: models.mobilenet_v2(scale=0.25, num_classes=10), images(64)),
        "shufflenet_v2": (lambda: models.shufflenet_v2_x0_25(num_classes=10), images(64)),
    }


def outcome(make: Callable[[], Any], data: Any) -> str:
    try:
        model, fingerprints = make(), []
        for count in (1, 3):
            given = {"devices": count, "schedule": 1e-4, "check_every": 1, "progress": False}
            fingerprints.append(ss.Trainer(1, 8, shards=4, **given).fit(model, data).fingerprint)
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"
    return "same bits" if fingerprints[0] == fingerprints[1] else "OTHER BITS"


def main() -> int:
    packages = {made.__name__: made for made in (timm, torchvision, transformers, keras, paddle)}
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="*", default=list(packages))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if len(options.packages) > 1:
        given = ["--only", options.only]
        return max(subprocess.call([sys.executable, __file__, package, *given]) for package in options.packages)
    (package,) = options.packages
    if not importlib.util.find_spec(package):
        print(f"{package:13} is not installed")
        return 0
    wrong = 0
    for name, (make, data) in packages[package]().items():
        if options.only in name:
            found = outcome(make, data)
            wrong += found.startswith("refused") != (name in RIGHT) or found == "OTHER BITS"
            print(f"{package:13} {name:28} {found} {f'(rightly: {RIGHT[name]})' if name in RIGHT else ''}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
