"""What stands for GPUs that are not there, and for names that newer frameworks have lost, while a chapter runs.

Without a GPU, the CPU stands for all of them; one GPU stands for several. Each stand-in has the meaning of what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from samestep.d2l.names import Names

Stand = Callable[..., Any]


@contextmanager
def standing_in(framework: str) -> Iterator[Names]:
    """The time of a chapter: `d2l` is samestep's, and devices that are not there are stood for."""
    d2l = import_module("samestep.d2l")
    module = getattr(d2l, framework)
    names: Names = module.names
    with ExitStack() as stack:
        stack.enter_context(patch.dict("sys.modules", {"d2l": d2l, f"d2l.{framework}": module}))
        stack.enter_context(patch.object(names, "virtual", True))
        {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow, "paddle": _paddle, "mxnet": _mxnet}[framework](stack)
        yield names


def _torch(stack: ExitStack) -> None:
    torch = import_module("torch")
    there, wait = torch.cuda.device_count(), torch.cuda.synchronize

    def real(device: Any) -> Any:
        """A device that is there."""
        if isinstance(device, str) and device.startswith(("cuda", "cpu")):
            device = torch.device(device)
        if isinstance(device, torch.device) and device.type == "cuda" and (device.index or 0) >= there:
            return torch.device("cuda", device.index % there) if there else torch.device("cpu")
        return device

    class Virtual(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.cuda:
                index = args[1] if len(args) > 1 else (kwargs or {}).get("device")
                wanted = torch.device("cuda", index or 0) if isinstance(index, (int, type(None))) else index
                return function(args[0], real(wanted)) if there else args[0].to("cpu")
            return function(*map(real, args), **{name: real(value) for name, value in (kwargs or {}).items()})

    def scatter(inputs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any:
        pieces = inputs.chunk(len(target_gpus), dim)
        return tuple(piece.to(device) for piece, device in zip(pieces, target_gpus, strict=False))

    def synchronize(device: Any = None) -> None:
        for i in range(there):  # all of them, and not the first one alone
            wait(i)

    stack.enter_context(Virtual())
    stack.enter_context(patch.object(torch.nn.parallel, "scatter", scatter))
    stack.enter_context(patch.object(torch.cuda, "synchronize", synchronize))
    if there == 1:
        stack.enter_context(patch.object(torch.cuda, "device_count", lambda: 2))


def _jax(stack: ExitStack) -> None:
    jax = import_module("jax")
    devices = jax.devices

    def virtual(kind: Any = None) -> list[Any]:
        if kind != "gpu":
            return list(devices(kind))
        try:
            found = devices("gpu")
        except RuntimeError:  # there is none
            found = devices("cpu")
        return list(found) * (2 if len(found) == 1 else 1)

    stack.enter_context(patch.object(jax, "devices", virtual))


def _tensorflow(stack: ExitStack) -> None:
    keras = import_module("keras")
    rate, device = property(lambda self: self.learning_rate), property(lambda self: self.value.device)
    stack.enter_context(patch.object(keras.optimizers.Optimizer, "lr", rate, create=True))  # Keras 3 has lost these two
    stack.enter_context(patch.object(keras.Variable, "device", device, create=True))


def _paddle(stack: ExitStack) -> None:
    paddle = import_module("paddle")
    there, original = paddle.device.cuda.device_count(), paddle.set_device

    def set_device(device: str) -> Any:
        kind, _, index = str(device).partition(":")
        return original(device if kind != "gpu" else f"gpu:{int(index or 0) % there}" if there else "cpu")

    stack.enter_context(patch.object(paddle, "set_device", set_device))
    if not there:
        stack.enter_context(patch.object(paddle.device.cuda, "synchronize", lambda device=None: None))


def _mxnet(stack: ExitStack) -> None:
    mx = import_module("mxnet")
    there = mx.context.num_gpus()
    gpu: Stand = (lambda i=0: mx.Context("gpu", i % there)) if there else (lambda i=0: mx.cpu(i))
    for module in (mx, mx.npx, mx.context):
        stack.enter_context(patch.object(module, "gpu", gpu))
