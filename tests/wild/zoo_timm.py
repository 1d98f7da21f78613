"""timm's models, as small as they come, with all the noise that they have."""

from typing import Any

from wild import zoo_torch
from wild.suite import Entry, images

zoo_torch.torchvision()  # timm imports it
import timm  # noqa: E402

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
WINDOWS: dict[str, Any] = {"img_size": 32, "window_size": 4, "depths": (1, 2), "num_heads": (2, 4), "embed_dim": 32}
SMALL: dict[str, Any] = {"growth_rate": 8, "block_config": (2, 2), "drop_rate": 0.1}


def entry(model: str, side: int = 32, **options: Any) -> Entry:
    return Entry(
        zoo_torch.seeded(lambda: timm.create_model(model, pretrained=False, num_classes=4, **options)), images(side)
    )


MODELS = {
    "resnet18": entry("resnet18", drop_rate=0.1, drop_path_rate=0.1, drop_block_rate=0.1),
    "resnet, blurred": entry("resnetblur18"),
    "efficientnet": entry("efficientnet_lite0", drop_rate=0.1, drop_path_rate=0.2),
    "mobilenetv3": entry("mobilenetv3_small_050", drop_rate=0.1),
    "convnext": entry("convnext_atto", 64, depths=(1, 1, 2, 1), drop_path_rate=0.1),
    "vit": entry("vit_tiny_patch16_224", drop_path_rate=0.1, attn_drop_rate=0.1, patch_drop_rate=0.25, **VIT),
    "swin": entry("swin_tiny_patch4_window7_224", drop_path_rate=0.1, **WINDOWS),
    "mixer": entry("mixer_s16_224", img_size=32, drop_path_rate=0.1),
    "regnet": entry("regnety_002", drop_path_rate=0.1),
    "ghostnet": entry("ghostnet_050", drop_rate=0.1),
    "densenet, computed again": entry("densenet121", memory_efficient=True, **SMALL),
    "levit, cached biases": entry("levit_128s", 224, depth=(1, 1, 1)),
    "nf_resnet, standardized weights": entry("nf_regnet_b0", drop_path_rate=0.1),
    "xcit": entry("xcit_nano_12_p8_224", img_size=32, depth=1),
    "beit, relative positions": entry("beit_base_patch16_224", **VIT),
}
