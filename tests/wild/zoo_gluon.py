"""Models of gluon's model zoo, as small as they come."""

import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MXNet uses names that NumPy has deprecated
    import mxnet as mx

from mxnet.gluon.model_zoo import vision

from wild.suite import Entry, images


def entry(make: Callable[..., Any], side: int = 32, hybrid: bool = False, quick: bool = False, **options: Any) -> Entry:
    def made() -> Any:
        mx.random.seed(0)
        model = make(classes=4, **options)
        model.initialize(mx.init.Xavier())
        if hybrid:
            model.hybridize()
        return model

    return Entry(made, images(side), quick=quick)


MODELS = {
    "mobilenet": entry(vision.mobilenet0_25, quick=True),
    "mobilenet_v2": entry(vision.mobilenet_v2_0_25),
    "mobilenet_v2, hybridized": entry(vision.mobilenet_v2_0_25, hybrid=True),
    "squeezenet": entry(vision.squeezenet1_1, 224),
    "resnet18_v2": entry(vision.resnet18_v2),
    "resnet_v1, bottlenecks": entry(
        vision.ResNetV1, block=vision.BottleneckV1, layers=[1, 1], channels=[8, 16, 32], thumbnail=True
    ),
    "densenet": entry(vision.DenseNet, 224, num_init_features=8, growth_rate=4, block_config=[1, 1, 1, 1], dropout=0.1),
}
