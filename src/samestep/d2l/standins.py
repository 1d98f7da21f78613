"""What stands for GPUs that are not there, and for names that newer frameworks have lost, while a chapter runs.

Without a GPU, the CPU stands for all of them; one GPU stands for several. Each stand-in has the meaning of what it replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from samestep.backends import find
from samestep.d2l.names import Batches, Names

Replaced = tuple[Any, str, Any]  # a module or a class, a name in it, and what stands for it


@contextmanager
def standing_in(framework: str, seed: int = 0, examples: int | None = None) -> Iterator[None]:
    """The time of a chapter: `d2l` is samestep's, and devices that are not there are stood for."""
    d2l, module = import_module("samestep.d2l"), find.imported(f"samestep.d2l.{framework}", framework)
    names: Names = module.names
    kinds = {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow, "paddle": _paddle, "mxnet": _mxnet}
    with ExitStack() as stack:
        sys.modules |= {"d2l": d2l, f"d2l.{framework}": module}
        stack.callback(lambda: [sys.modules.pop(name) for name in ("d2l", f"d2l.{framework}")])
        ours = [(names, "_virtual", True), (Batches, "examples", examples), (Batches, "seed", seed)]
        for owner, name, standin in [*ours, *kinds[framework](stack)]:
            stack.enter_context(patch.object(owner, name, standin, create=True))
        names.manual_seed(seed)
        yield


def _of_a_cell() -> bool:
    """Whether a cell has made the call, and not samestep."""
    return sys._getframe(2).f_globals.get("__name__") == "__main__"


def _torch(stack: ExitStack) -> list[Replaced]:
    torch: Any = import_module("torch")
    there, wait = torch.cuda.device_count(), torch.cuda.synchronize

    def real(device: Any) -> Any:
        """For a GPU, one that is there, or the CPU. All else is left as it is."""
        if isinstance(device, str) and device.startswith("cuda"):
            device = torch.device(device)
        if isinstance(device, torch.device) and device.type == "cuda":
            return torch.device("cuda", (device.index or 0) % there) if there else torch.device("cpu")
        return device

    class Virtual(torch.overrides.TorchFunctionMode):
        """Every function of PyTorch that is told a device."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.cuda:
                wanted = [*args[1:], *(kwargs or {}).values(), 0][0]
                return args[0].to(real(f"cuda:{wanted}" if isinstance(wanted, int) else wanted))
            return function(*map(real, args), **{name: real(value) for name, value in (kwargs or {}).items()})

    def scatter(inputs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any:
        pieces = inputs.chunk(len(target_gpus), dim)
        return tuple(piece.to(device) for piece, device in zip(pieces, target_gpus, strict=False))

    def synchronize(device: Any = None) -> None:
        for i in range(there):  # all of them, and not the first one alone
            wait(i)

    stack.enter_context(Virtual())
    count = (torch.cuda, "device_count", lambda: 2 if there == 1 and _of_a_cell() else there)
    return [(torch.nn.parallel, "scatter", scatter), (torch.cuda, "synchronize", synchronize), count]


def _jax(stack: ExitStack) -> list[Replaced]:
    jax: Any = import_module("jax")
    devices = jax.devices

    def virtual(kind: Any = None) -> list[Any]:
        if kind != "gpu" or not _of_a_cell():
            return devices(kind)
        found = [device for device in devices() if device.platform == "gpu"] or devices("cpu")
        return found * (1 if len(found) > 1 else 2)

    return [(jax, "devices", virtual)]


def _tensorflow(stack: ExitStack) -> list[Replaced]:
    keras: Any = import_module("keras")  # Keras 3 has lost these two
    rate, device = property(lambda self: self.learning_rate), property(lambda self: self.value.device)
    return [(keras.optimizers.Optimizer, "lr", rate), (keras.Variable, "device", device)]


def _paddle(stack: ExitStack) -> list[Replaced]:
    paddle: Any = import_module("paddle")
    there, original = paddle.device.cuda.device_count(), paddle.set_device

    def set_device(device: str) -> Any:
        kind, _, index = str(device).partition(":")
        return original(device if kind != "gpu" else f"gpu:{int(index or 0) % there}" if there else "cpu")

    none = [] if there else [(paddle.device.cuda, "synchronize", lambda device=None: None)]
    return [(paddle, "set_device", set_device), *none]


def _mxnet(stack: ExitStack) -> list[Replaced]:
    mx: Any = import_module("mxnet")
    there = mx.context.num_gpus()  # the CPU has many numbers, so that two GPUs are two contexts
    return [(at, "gpu", lambda i=0: mx.Context("gpu", i % there) if there else mx.cpu(i)) for at in (mx, mx.npx)]
