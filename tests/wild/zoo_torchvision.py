"""torchvision's models, as small as they come."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from wild import zoo_torch
from wild.suite import Entry, draw, images, labels

zoo_torch.torchvision()
from torchvision import models  # noqa: E402

CLASSES: dict[str, Any] = {"weights": None, "num_classes": 4}
WINDOWS: dict[str, Any] = {
    "patch_size": [4, 4],
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": [4, 4],
}


def entry(make: Callable[[], Any], side: int = 32, **more: Any) -> Entry:
    return Entry(zoo_torch.seeded(make), **{"data": images(side), **more})


def normed(norm: Callable[[Any], Any]) -> nn.Module:
    model = models.squeezenet1_1(**CLASSES)
    for layer in [m for m in model.modules() if isinstance(m, nn.Conv2d)]:
        norm(layer)
    return model


def vit() -> nn.Module:
    size = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return models.VisionTransformer(32, 8, dropout=0.1, attention_dropout=0.1, num_classes=4, **size)


def maxvit() -> nn.Module:
    size: dict[str, Any] = {"stem_channels": 16, "block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8}
    return models.MaxVit((32, 32), partition_size=2, stochastic_depth_prob=0.2, num_classes=4, **size)


def densenet() -> nn.Module:
    return models.DenseNet(8, (1, 1), 16, drop_rate=0.1, memory_efficient=True, num_classes=4)


def swin(block: Any = None) -> nn.Module:
    return models.SwinTransformer(**WINDOWS, dropout=0.1, stochastic_depth_prob=0.2, num_classes=4)


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig

    return models.ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], 0.2, num_classes=4)


def with_helpers(output: Any, y: Any) -> Any:
    """GoogLeNet's own loss: in training, two more outputs from the middle are told the labels."""
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, y)
    first, second, third = (F.cross_entropy(one, y) for one in output)
    return first + 0.3 * second + 0.3 * third


def of_pixels(output: Any, y: Any) -> Any:
    """Segmentation's own loss."""
    return F.cross_entropy(output["out"], y)


MODELS = {
    "resnet18": entry(lambda: models.resnet18(**CLASSES)),
    "mobilenet_v3": entry(lambda: models.mobilenet_v3_small(**CLASSES)),
    "shufflenet": entry(lambda: models.shufflenet_v2_x0_5(**CLASSES)),
    "mnasnet": entry(lambda: models.mnasnet0_5(**CLASSES)),
    "efficientnet": entry(lambda: models.efficientnet_b0(**CLASSES)),
    "densenet, computed again": entry(densenet),
    "convnext": entry(convnext),
    "vit": entry(vit),
    "swin": entry(swin),
    "maxvit": entry(maxvit),
    "squeezenet, weight norm": entry(lambda: normed(parametrizations.weight_norm)),
    "squeezenet, spectral norm": entry(lambda: normed(parametrizations.spectral_norm)),
    "googlenet, three outputs": entry(
        lambda: models.googlenet(init_weights=False, aux_logits=True, **CLASSES), 64, settings={"loss": with_helpers}
    ),
    "video": entry(
        lambda: models.video.mc3_18(**CLASSES), data=(draw().standard_normal((20, 3, 2, 16, 16), "float32"), labels())
    ),
    "lraspp, pixels": entry(
        lambda: models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, **CLASSES),
        data=(images(32)[0], draw().integers(0, 4, (20, 32, 32))),
        settings={"loss": of_pixels},
    ),
    "resnet18, scripted": entry(
        lambda: torch.jit.script(models.resnet18(**CLASSES)), refused="a model of torch.jit cannot be copied"
    ),
}
