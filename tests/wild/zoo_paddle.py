"""Models of paddle.vision, as small as they come."""

from collections.abc import Callable
from typing import Any

import paddle
from paddle.vision import models

from wild.suite import Entry, images

CLASSES: dict[str, Any] = {"pretrained": False, "num_classes": 4}


def entry(make: Callable[[], Any], side: int = 32, channels: int = 3, **more: Any) -> Entry:
    def made() -> Any:
        paddle.seed(0)
        return make()

    return Entry(made, images(side, channels), **more)


MODELS = {
    "LeNet": entry(lambda: models.LeNet(4), 28, 1, quick=True),
    "resnet18": entry(lambda: models.resnet18(**CLASSES)),
    "mobilenet_v1": entry(lambda: models.mobilenet_v1(scale=0.25, **CLASSES)),
    "mobilenet_v2": entry(lambda: models.mobilenet_v2(scale=0.25, **CLASSES)),
    "mobilenet_v3": entry(lambda: models.mobilenet_v3_small(scale=0.5, **CLASSES)),
    "shufflenet_v2": entry(lambda: models.shufflenet_v2_x0_25(**CLASSES)),
    "squeezenet": entry(lambda: models.squeezenet1_1(**CLASSES)),
}
