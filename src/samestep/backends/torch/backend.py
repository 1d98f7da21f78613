"""PyTorch: devices, arrays, and the settings that PyTorch needs during a run. The replica is in replica.py."""

from __future__ import annotations

import functools
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parameter import UninitializedParameter

from samestep.backends.base import Backend
from samestep.backends.calling import Style, spread, style_of
from samestep.backends.layout import Numbers
from samestep.backends.losses import (
    IGNORED,
    Measure,
    Shape,
    check_examples,
    check_weights,
    class_axis,
    convert,
    not_floats,
)  # fmt: skip
from samestep.backends.replacing import replaced
from samestep.backends.torch import kernels, numerics, precision
from samestep.backends.torch.content import content
from samestep.backends.torch.flat import on_host
from samestep.backends.torch.losses import rows, weighted
from samestep.backends.torch.replica import TorchReplica
from samestep.backends.torch.scheduler import read
from samestep.backends.torch.steps import TorchSteps
from samestep.backends.torch.updater import TorchUpdater
from samestep.devices import Device, cpu, gpu, host_memory
from samestep.errors import Invalid, NotBuilt, NotDeterministic, WrongType
from samestep.optimizers.updating import Update
from samestep.processes.place import Place
from samestep.processes.world import World
from samestep.trees import Tree, mapped

if TYPE_CHECKING:
    from samestep.backends.steps import Steps
    from samestep.training.replicas import Replicas

VIEWED = "view size is not compatible"  # PyTorch's words
# cuBLAS is deterministic only with a fixed workspace, and reads this once, when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _prepared(threads: int, compiles: bool) -> None:
    """What a thread that computes shards calls first."""
    torch.set_num_threads(threads)
    if compiles:
        precision.compile_in_thread()


@functools.cache
def _sending(device: Device) -> torch.cuda.Stream:
    """The stream of a GPU on which examples come to it."""
    return torch.cuda.Stream(str(device))


class TorchBackend(Backend):
    name, goes_on = "torch", True

    # Devices

    def devices(self) -> list[Device]:
        return [cpu(), *(gpu(i) for i in range(torch.cuda.device_count()))]

    def memory(self, device: Device) -> tuple[int, int]:
        if device.kind != "cuda":
            return host_memory()
        free, total = torch.cuda.mem_get_info(device.index)
        return total, total - free

    def evaluating(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.eval()

    def state_dict(self, model: torch.nn.Module) -> Any:
        return model.state_dict()

    # Arrays

    def owns(self, thing: object) -> bool:
        return isinstance(thing, (torch.Tensor, torch.nn.Module))

    def is_array(self, thing: object) -> bool:
        return isinstance(thing, torch.Tensor)

    def device_of(self, array: Any) -> Device:
        return Device.of(str(array.device)) if isinstance(array, torch.Tensor) else cpu()

    def put(self, array: Any, device: Device) -> Any:
        self.require(device)
        if not isinstance(array, torch.Tensor):
            array = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        if self.device_of(array) == device:
            return array
        return array.to(str(device), non_blocking=device.kind == "cuda")  # a copy to the host must wait

    def full(self, shape: tuple[int, ...], value: float, device: Device, dtype: str) -> Any:
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=str(device))

    def get(self, array: Any) -> Numbers:
        return on_host(array) if isinstance(array, torch.Tensor) else np.asarray(array)

    def copy(self, array: Any, device: Device, gradient: bool = False) -> Any:
        self.require(device)
        given = torch.as_tensor(array).detach()
        new = (
            self._sent(given, device)
            if device.kind == "cuda" and not given.is_cuda
            else given.to(str(device), copy=True)
        )
        if gradient:
            new.requires_grad_()
            new.grad = torch.zeros_like(new)
        return new

    def _sent(self, given: torch.Tensor, device: Device) -> torch.Tensor:
        """A copy on a GPU. It travels on a stream of its own, beside what the GPU computes, and the host does not wait."""
        sending, current = _sending(device), torch.cuda.current_stream(str(device))
        with torch.cuda.stream(sending):
            new = given.pin_memory().to(str(device), non_blocking=True)
        current.wait_stream(sending)
        new.record_stream(current)
        return new

    def staged(self, array: Any, device: Device) -> Any:
        return torch.from_numpy(array).pin_memory() if device.kind == "cuda" else array

    def assign(self, array: Any, value: Any) -> Any:
        with torch.no_grad():
            array.copy_(value)
        return array

    def index(self, order: Numbers, device: Device) -> Any:
        return self.put(self.staged(order, device), device)  # from pinned memory: the host does not wait

    def take(self, array: Any, index: Any) -> Any:
        # A fresh allocation, so that a shard's memory is aligned the same way, wherever its examples lie.
        return array.index_select(0, index)

    def add(self, left: Any, right: Any) -> Any:
        return left.add_(right)

    def in_memory(self, vector: Any) -> Numbers | None:
        return None if self.making.compile else vector.detach().numpy()

    def concat(self, vectors: Sequence[Any]) -> Any:
        return torch.cat(list(vectors))

    def choose(self, weight: Any, new: Any, old: Any) -> Any:
        return torch.where(weight != 0, new, old)

    def zeros_like(self, vector: Any) -> Any:
        return torch.zeros_like(vector)

    def scalar(self, value: Any, device: Device) -> Any:
        # On a GPU a recorded step reads it there; compiled code would be made anew for another number of Python's.
        if isinstance(value, torch.Tensor) or not (device.kind == "cuda" or self.making.compile):
            return value
        return torch.full((), value, dtype=torch.float64, device=str(device))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return precision.compiled(function) if self.making.compile and isinstance(function, Update) else function

    def clip(self, vector: Any, limit: float) -> Any:
        norm = (vector * vector).sum().sqrt()
        return vector * (limit / norm.clamp(min=limit))

    # A run

    def check_making(self, devices: Sequence[Device]) -> None:
        making, kinds = self.making, {device.kind for device in devices}
        if making.memory_format == "auto" and (kinds != {"cpu"} or self.portable):  # on CPUs `probe` decides
            self.making = replace(making, memory_format="contiguous")
        if making.precision == "tf32" and kinds != {"cuda"}:
            raise Invalid("precision='tf32' is a mode of GPUs: use 'float32' or 'bfloat16' on the CPU")
        if making.compile and self.portable:
            raise Invalid("portable: torch.compile writes kernels for this CPU: leave compile out")
        if making.compile and "cpu" in kinds and not shutil.which(os.environ.get("CXX", "g++")):
            raise Invalid("compile=True needs a C++ compiler on the CPU (g++, or $CXX): install one, or leave it out")

    require_portable, content = staticmethod(numerics.require_portable), staticmethod(content)
    numerics = staticmethod(numerics.found)

    @contextmanager
    def session(self, devices: Sequence[Device], *, deterministic: bool, threads: int) -> Iterator[None]:
        prepare = partial(_prepared, threads, self.making.compile)
        # If there is only one thread, the caller's is better: in others, malloc gives large blocks back and makes them anew.
        with self.workers.at_work(devices, threads, prepare, least=2), self._settings(devices, deterministic, threads):
            yield

    @contextmanager
    def _settings(self, devices: Sequence[Device], deterministic: bool, threads: int) -> Iterator[None]:
        if found := numerics.modes_around():
            instead = " or Trainer(precision='bfloat16')" * ("autocast" in found)
            raise Invalid(
                f"{found} around a fit reaches only some of its threads: use it in the model's forward{instead}"
            )
        cudnn, threads_before, mkldnn = torch.backends.cudnn, torch.get_num_threads(), torch._C._get_mkldnn_enabled()
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        flags = [(cudnn, "benchmark", False), (cudnn, "deterministic", deterministic),
                 (torch.utils.deterministic, "fill_uninitialized_memory", False)]  # fmt: skip # it writes every result twice
        # The device that other threads have: a default is one of the caller's thread alone.
        home = devices[0].kind == "cuda" or torch.get_default_device().type == "cpu"
        with ExitStack() as stack:
            stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
            stack.callback(torch.set_num_threads, threads_before)
            stack.callback(torch._C._set_mkldnn_enabled, mkldnn)
            for context in (
                replaced(flags), torch.random.fork_rng([d.index for d in devices if d.kind == "cuda"]),
                torch.inference_mode(False), torch.enable_grad(), nullcontext() if home else torch.device("cpu"),
                precision.of(way := self.making.precision), precision.compiling(way) if self.making.compile else nullcontext(),
                kernels.of_every_cpu() if self.portable else nullcontext(), warnings.catch_warnings(),
            ):  # fmt: skip
                stack.enter_context(context)
            torch.use_deterministic_algorithms(deterministic)
            if devices[0].kind == "cpu":
                # Beside workers, one: the threads of a second team would spin between calls and take the workers' cores.
                torch.set_num_threads(1 if self.workers.there else threads)
            # Weights are views of one vector, which cuDNN would lay out in another way.
            warnings.filterwarnings("ignore", "RNN module weights are not part")
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # `precision` says so
            yield

    # Models

    def style(self, model: torch.nn.Module, x: Tree, whole: bool) -> Style:
        return style_of(model.forward, x, whole)

    def probe(self, model: torch.nn.Module, measure: Any, x: Tree, y: Tree, name: str = "x") -> Shape:
        shape, making = self._probed(model, measure, x, y, name), self.making
        if making.memory_format == "auto":  # channels last are quicker on CPUs, but not every model computes that way
            last = shape.dtype == "float32" and any(isinstance(one, torch.nn.Conv2d) for one in model.modules())
            self.making = replace(making, memory_format="channels_last" if last else "contiguous")
            if last and self._views(model, replace(Measure.of(measure), kind=shape.kind), x, y):
                self.making = replace(making, memory_format="contiguous")
        return shape

    def _views(self, model: torch.nn.Module, measure: Measure, x: Tree, y: Tree) -> bool:
        """Whether a model views its numbers in a way that their order in memory does not allow."""
        device = Device.of(str(next(model.parameters()).device))
        replica = self.replica(model, measure, device, 1, capture=False)
        x, y = (mapped(partial(self.put, device=device), one) for one in (x, y))
        for training in (True, False):
            try:
                with torch.no_grad(), torch.random.fork_rng([]):
                    replica.lane(training=training).run(x, y, replica.state, self)
            except Exception as error:  # others are told where they count: a batch norm may want more than one example
                if VIEWED in str(error):
                    return True
        return False

    def _probed(self, model: torch.nn.Module, measure: Any, x: Tree, y: Tree, name: str) -> Shape:
        weights = [p for p in model.parameters() if p.requires_grad]
        dtype = check_weights(self.describe(model), (str(p.dtype).removeprefix("torch.") for p in weights))
        check_examples(name, x, dtype, y)
        device, lazy = Device.of(str(weights[0].device)), any(isinstance(p, UninitializedParameter) for p in weights)
        try:
            with torch.no_grad(), self.explained(), torch.random.fork_rng([], enabled=not lazy):
                given = mapped(partial(self.put, device=device), x)
                lane = None if lazy else self.replica(model, measure, device, 1, capture=False).lane(training=False)
                output = lane.forward(given) if lane else None
                if lane is None or len(weights) < sum(p.requires_grad for p in lane.module["model"].parameters()):
                    with replaced([(module, "training", False) for module in model.modules()]):
                        args, named = spread(given, Measure.of(measure).style)
                        model(*args, **named)  # makes weights: not in the copy alone
                    return self._probed(model, measure, x, y, name)
                return self.described(lane.measure, output, mapped(partial(self.put, device=device), y), y, dtype)
        except RuntimeError as error:
            if not_floats(x) and re.search("dtype|scalar type|Input type", str(error)):
                raise convert(name, x, dtype) from None
            raise

    def replica(
        self, model: torch.nn.Module, measure: Any, device: Device, shards: int, capture: bool = True
    ) -> TorchReplica:
        if self.portable and any(isinstance(layer, torch.nn.LSTM) for layer in model.modules()):
            torch._C._set_mkldnn_enabled(False)  # its LSTM differs between CPUs; `_settings` puts this back
        if any(isinstance(layer, torch.jit.ScriptModule) for layer in model.modules()):
            raise WrongType("a model of torch.jit cannot be copied around other weights: pass what it was made from")
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):  # a fit makes them
            raise NotBuilt(f"the model {self.describe(model)} has no weights yet: call it once with an example")
        if self.portable and any(hasattr(layer, "_orig_mod") for layer in model.modules()):
            raise Invalid("portable: torch.compile writes kernels for this CPU: leave it out")
        with self.explained():
            return TorchReplica(self, model, measure, device, shards, capture)

    def steps(self, group: Replicas) -> Steps | None:
        return TorchSteps.of(group)

    def updater(self, optimizer: Any, replica: TorchReplica, clip: Any) -> TorchUpdater:
        return TorchUpdater(optimizer, replica, clip)

    def rates(self, scheduler: Any, n: int, unit: str = "step") -> list[float]:
        return read(scheduler, n, unit)

    def world(self, place: Place, timeout: float, devices: Sequence[Device]) -> World:
        from samestep.processes.torch import join

        return join(place, timeout, devices, self.get)

    def profiler(self, devices: Sequence[Device]) -> AbstractContextManager[list[dict[str, Any]]]:
        from samestep.backends.torch.profile import watching

        return watching(devices)

    # Losses

    def cross_entropy(self, output: Any, y: Any) -> Any:
        return F.cross_entropy(output, y.long(), reduction="sum")

    def by_position(self, output: Any, y: Any) -> tuple[Any, Any]:
        scores, y = rows(output, class_axis(tuple(output.shape), tuple(y.shape))), y.flatten().long()
        return F.cross_entropy(scores, y, ignore_index=IGNORED, reduction="sum"), (y != IGNORED).sum()

    def call_loss(self, loss: Any, output: Any, y: Tree) -> Any:
        return weighted(loss, output, y) or loss(output, y)

    def number(self, value: Any, like: Any) -> Any:
        dtype = torch.promote_types(like.dtype, torch.float32)
        if isinstance(value, torch.Tensor):
            return value.detach().to(like.device, dtype).reshape(())
        # unlike a copy from the host, this can be recorded
        return torch.full((), value, dtype=dtype, device=like.device)

    def count_hits(self, output: Any, y: Any) -> Any:
        return (output.detach().argmax(1) == y).sum(dtype=torch.float32)

    def zero(self, like: Any) -> Any:
        return torch.zeros((), device=like.device)

    # Errors

    def explain(self, error: Exception) -> Exception | None:
        text = str(error) if isinstance(error, (RuntimeError, ValueError)) else ""
        if re.search("does not have a deterministic implementation|[Dd]eterministic behavior was enabled", text):
            operation = text.split(" does not have")[0].split()[-1]
            rows = "give it one row per position (scores.flatten(0, 1), y.flatten())"
            instead = rows if "nll_loss2d" in operation else "use another operation"
            return NotDeterministic(
                f"{operation} has no deterministic kernel in torch {torch.__version__}: {instead}, "
                "or Trainer(deterministic=False), which gives up sameness"
            )
        if "Expected more than 1 value per channel when training" in text:
            return Invalid(
                f"batch norm needs more than one value per channel in every shard: lower shards, or raise batch_size ({text})"
            )
        if VIEWED in text and self.making.memory_format == "channels_last":
            return Invalid(
                f"use reshape in the model, or Trainer(memory_format='contiguous'): with channels last, {text}"
            )
        if "Expected all tensors to be on the same device" in text:
            why = "a closure that holds a layer (self.f = lambda x: self.layer(x)), or tensors made without device=x.device"
            return Invalid(f"the model mixes devices, as by {why}: {text}")
        return super().explain(error)


backend: Backend = TorchBackend()
