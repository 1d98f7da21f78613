"""Models of keras.applications, as small as they come."""

from typing import Any

import keras
from keras import applications

from wild.suite import Entry, images

GIVEN: dict[str, Any] = {"weights": None, "classes": 4, "classifier_activation": None}


def entry(name: str, side: int = 32, **options: Any) -> Entry:
    def make() -> Any:
        keras.utils.set_random_seed(0)
        return getattr(applications, name)(input_shape=(side, side, 3), **GIVEN, **options)

    return Entry(make, images(side, last=True))


def beginning() -> Any:
    """The first blocks of a model, whose features go to a layer of one's own."""
    keras.utils.set_random_seed(0)
    whole = applications.MobileNet(alpha=0.25, input_shape=(32, 32, 3), **GIVEN)
    mean = keras.layers.GlobalAveragePooling2D()(whole.get_layer("conv_pw_2_relu").output)
    return keras.Model(whole.input, keras.layers.Dense(4)(mean))


def topped(name: str, side: int = 32) -> Entry:
    """Without its large dense layers: features, their mean, and a layer of one's own."""

    def make() -> Any:
        keras.utils.set_random_seed(0)
        below = getattr(applications, name)(include_top=False, weights=None, input_shape=(side, side, 3), pooling="avg")
        return keras.Sequential([below, keras.layers.Dropout(0.1), keras.layers.Dense(4)])

    return Entry(make, images(side, last=True))


MODELS = {
    "MobileNet": entry("MobileNet", alpha=0.25),
    "MobileNet, its beginning": Entry(beginning, images(32, last=True), quick=True),
    "MobileNetV2": entry("MobileNetV2", alpha=0.35),
    "MobileNetV3Small": entry("MobileNetV3Small", alpha=0.75, minimalistic=True),
    "EfficientNetB0": entry("EfficientNetB0"),
    "VGG16, another top": topped("VGG16"),
}
