"""devices: their names, how many there are, and how what a user writes becomes the devices of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.backends import find
from samestep.backends.arrays import device_of, get, num_gpus, put, same_device, try_all_gpus, try_gpu
from samestep.backends.base import Backend
from samestep.devices import Device, cpu, gpu, host_memory, resolve
from samestep.errors import DevicesDiffer, Invalid, WrongType
from samestep.processes.place import Place


class Machine:
    """A backend on a machine with so many GPUs, and a CPU cut into so many devices; devices are all it knows about."""

    name = "fake"

    def __init__(self, gpus: int, cpus: int = 1) -> None:
        self.gpus, self.cpus = gpus, cpus

    def devices(self) -> list[Device]:
        return [*map(cpu, range(self.cpus)), *map(gpu, range(self.gpus))]

    usable, require = Backend.usable, Backend.require


NO_GPU: Any = Machine(0)
TWO_GPUS: Any = Machine(2)
THREE_CPUS: Any = Machine(0, 3)

# Names


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "gpu", "gpu:0", gpu(), gpu(0), torch.device("cuda", 0)])
def test_the_names_of_the_first_gpu(name: Any) -> None:
    assert Device.of(name) == gpu(0) == Device("cuda", 0)
    assert hash(Device.of(name)) == hash(gpu(0))


@pytest.mark.parametrize("name", ["cpu", "cpu:0", cpu(), cpu(0), torch.device("cpu"), torch.device("cpu", 0)])
def test_the_names_of_the_cpu(name: Any) -> None:
    assert Device.of(name) == cpu() == Device("cpu")
    assert Device.of(name) not in (gpu(0), cpu(1))


@pytest.mark.parametrize("name", ["cpu:2", cpu(2), Device("cpu", 2), torch.device("cpu", 2)])
def test_the_names_of_a_virtual_device(name: Any) -> None:
    assert Device.of(name) == cpu(2)
    assert Device.of(name) not in (cpu(), cpu(1), gpu(2))


def test_a_device_prints_as_its_name() -> None:
    devices = (cpu(), cpu(2), gpu(), gpu(12))
    assert [str(device) for device in devices] == ["cpu", "cpu:2", "cuda:0", "cuda:12"]
    assert repr([cpu(), gpu(1)]) == "[cpu, cuda:1]"
    assert all(Device.of(str(device)) == device for device in devices)


@pytest.mark.parametrize(
    "name", ["tpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "CPU", "cpu\n", "xcpu", "cuda:0:1", "cpu:", "cpu:-1"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(Invalid) as error:
        Device.of(name)
    assert str(error.value) == f"unknown device {name!r}: use 'cpu', 'cuda' or 'cuda:i'"


def test_a_device_of_torch_that_samestep_does_not_know_is_refused() -> None:
    with pytest.raises(Invalid) as error:
        device_of(torch.ones(1, device="meta"))
    assert str(error.value) == "unknown device 'meta': use 'cpu', 'cuda' or 'cuda:i'"


@pytest.mark.parametrize("name", [0, None, 1.5, b"cpu", ["cpu"]])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(WrongType) as error:
        Device.of(name)
    assert str(error.value) == f"a device is a name such as 'cpu' or 'cuda:1', got {name!r}"


@pytest.mark.parametrize("make", [cpu, gpu])
@pytest.mark.parametrize("i", ["0", 1.0, True, None])
def test_the_number_of_a_device_is_a_whole_number(i: Any, make: Any) -> None:
    with pytest.raises(WrongType) as error:
        make(i)
    assert str(error.value) == f"{make.__name__}: i must be a whole number, got i={i!r}"


@pytest.mark.parametrize("make", [cpu, gpu])
def test_the_number_of_a_device_is_not_negative(make: Any) -> None:
    with pytest.raises(Invalid) as error:
        make(-1)
    assert str(error.value) == f"{make.__name__}: i must be at least 0, got i=-1"


# What is there


def test_gpus_are_counted() -> None:
    assert (num_gpus(NO_GPU), num_gpus(TWO_GPUS)) == (0, 2)
    assert num_gpus() == num_gpus("torch") == torch.cuda.device_count()


def test_try_gpu_falls_back_to_the_cpu() -> None:
    assert (try_gpu(backend=NO_GPU), try_gpu(10, NO_GPU)) == (cpu(), cpu())
    assert [try_gpu(i, TWO_GPUS) for i in range(3)] == [gpu(0), gpu(1), cpu()]
    assert try_gpu(backend=TWO_GPUS) == gpu(0)
    assert try_gpu(torch.cuda.device_count()) == cpu()


@pytest.mark.parametrize("machine", [NO_GPU, TWO_GPUS])
@pytest.mark.parametrize("i", ["0", 1.5, True, None])
def test_try_gpu_asks_for_a_whole_number_on_every_machine(i: Any, machine: Any) -> None:
    with pytest.raises(WrongType):
        try_gpu(i, machine)


@pytest.mark.parametrize("machine", [NO_GPU, TWO_GPUS])
def test_try_gpu_refuses_a_negative_number_on_every_machine(machine: Any) -> None:
    with pytest.raises(Invalid, match=r"i must be at least 0, got i=-1$"):
        try_gpu(-1, machine)


def test_try_all_gpus_is_never_empty() -> None:
    assert try_all_gpus(NO_GPU) == [cpu()]
    assert try_all_gpus(TWO_GPUS) == [gpu(0), gpu(1)]
    assert try_all_gpus() == ([gpu(i) for i in range(torch.cuda.device_count())] or [cpu()])


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(WrongType) as error:
        num_gpus("caffe")
    assert str(error.value) == f"no backend 'caffe': samestep has {', '.join(find.FRAMEWORKS)}"


MEMINFO = """MemTotal:       64 kB
MemFree:        10 kB
MemAvailable:   24 kB
HugePages_Total:     0
"""


def test_the_memory_of_the_host_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/meminfo": MEMINFO}[str(path)])
    assert host_memory() == (65536, 40960)


def test_the_memory_of_a_host_that_is_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("samestep.devices.os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}.__getitem__)
    assert host_memory() == (40960, 0)


# The devices of a run


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", "cpu"),
        (4, "cpu cpu cpu cpu"),
        ("4", "cpu cpu cpu cpu"),
        (1, "cpu"),
        ("cpu", "cpu"),
        (cpu(), "cpu"),
        (["cpu", "cpu"], "cpu cpu"),
        (("cpu", cpu(), torch.device("cpu")), "cpu cpu cpu"),
        ("cpu,cpu", "cpu cpu"),
        ("cpu, cpu, cpu", "cpu cpu cpu"),
    ],
)
def test_what_is_asked_for_where_there_is_no_gpu(asked: Any, expected: str) -> None:
    assert " ".join(map(str, resolve(asked, 8, NO_GPU))) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", "cuda:0 cuda:1"),
        (1, "cuda:0"),
        (4, "cuda:0 cuda:1 cuda:0 cuda:1"),
        ("3", "cuda:0 cuda:1 cuda:0"),
        ("cuda", "cuda:0"),
        ("gpu:1", "cuda:1"),
        ("cpu", "cpu"),
        (["cpu"] * 3, "cpu cpu cpu"),
        (["cuda:1", "gpu:0", gpu(1)], "cuda:1 cuda:0 cuda:1"),
        ("cuda:1,cuda:0", "cuda:1 cuda:0"),
    ],
)
def test_what_is_asked_for_where_there_are_two_gpus(asked: Any, expected: str) -> None:
    assert " ".join(map(str, resolve(asked, 8, TWO_GPUS))) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", "cpu"),
        (1, "cpu"),
        (5, "cpu cpu:1 cpu:2 cpu cpu:1"),
        ("cpu", "cpu"),
        ("cpu:2", "cpu:2"),
        ("cpu:1,cpu:0", "cpu:1 cpu"),
        (["cpu:0", "cpu:1", cpu(2), "cpu"], "cpu cpu:1 cpu:2 cpu"),
    ],
)
def test_what_is_asked_for_where_the_cpu_is_three_devices(asked: Any, expected: str) -> None:
    assert " ".join(map(str, resolve(asked, 8, THREE_CPUS))) == expected
    assert resolve(4, 8, Machine(1, 3)) == [gpu()] * 4  # type: ignore[arg-type]


def test_a_virtual_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(Invalid) as error:
        resolve(["cpu", "cpu:3"], 8, THREE_CPUS)
    assert str(error.value) == "device cpu:3 is not there: fake sees cpu, cpu:1, cpu:2 on this machine"
    torch_backend = find.load("torch")
    listed = ", ".join(map(str, torch_backend.devices()))
    with pytest.raises(Invalid) as error:
        resolve("cpu:2", 8, torch_backend)
    assert str(error.value) == f"device cpu:2 is not there: torch sees {listed} on this machine"


def test_auto_takes_at_most_one_device_per_shard() -> None:
    assert resolve("auto", 1, TWO_GPUS) == [gpu(0)]
    assert resolve("auto", 3, Machine(5)) == [gpu(0), gpu(1), gpu(2)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "processes", "expected"),
    [
        (3, 1, [[0, 1, 2]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (4, 3, [[0, 1], [2], [3]]),
        (3, 5, [[0], [1], [2], [0], [1]]),  # more processes than GPUs: they share
    ],
)
def test_processes_on_one_host_share_its_gpus(gpus: int, processes: int, expected: list[list[int]]) -> None:
    places = [Place(i, processes, i, processes) for i in range(processes)]
    machine: Any = Machine(gpus)
    assert [[device.index for device in resolve("auto", 8, machine, place)] for place in places] == expected
    assert [resolve(1, 8, machine, place) for place in places] == [[gpu(mine[0])] for mine in expected]
    assert [resolve("auto", 8, NO_GPU, place) for place in places] == [[cpu()]] * processes


def test_as_many_devices_as_shards_are_allowed_and_no_more() -> None:
    assert resolve(8, 8, NO_GPU) == [cpu()] * 8
    for asked in (9, ["cpu"] * 9):
        with pytest.raises(Invalid) as error:
            resolve(asked, 8, NO_GPU)
        assert str(error.value) == "9 devices need at least 9 shards, got shards=8: raise shards or use fewer devices"


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        (0, Invalid, "devices must be at least 1, got 0"),
        ("0", Invalid, "devices must be at least 1, got 0"),
        (-2, Invalid, "devices must be at least 1, got -2"),
        (True, WrongType, "devices must be 'auto', a count, a name or a list of names, got True"),
        ([], Invalid, "devices is an empty list: name at least one, or write 'auto'"),
        ("tpu", Invalid, "unknown device 'tpu': use 'cpu', 'cuda' or 'cuda:i'"),
        ("cpu,", Invalid, "unknown device '': use 'cpu', 'cuda' or 'cuda:i'"),
        ("²", Invalid, "unknown device '²': use 'cpu', 'cuda' or 'cuda:i'"),
        (["cpu", 1], WrongType, "a device is a name such as 'cpu' or 'cuda:1', got 1"),
        (None, WrongType, "a device is a name such as 'cpu' or 'cuda:1', got None"),
        (2.0, WrongType, "a device is a name such as 'cpu' or 'cuda:1', got 2.0"),
        ("cuda:7", Invalid, "device cuda:7 is not there: fake sees cpu, cuda:0, cuda:1 on this machine"),
        (["cuda:1", "cuda:2"], Invalid, "device cuda:2 is not there: fake sees cpu, cuda:0, cuda:1 on this machine"),
        (
            ["cpu", "cuda:1"],
            Invalid,
            "devices must be of one kind, got cpu, cuda:1: a CPU and a GPU round differently",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(asked: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        resolve(asked, 8, TWO_GPUS)
    assert type(error.value) is kind
    assert str(error.value) == message


# Arrays on devices


def test_put_gives_back_an_array_that_is_there_already() -> None:
    x = torch.arange(3)
    assert put(x, "cpu") is put(x, cpu()) is put(x, "cpu", backend="torch") is x


@pytest.mark.parametrize("x", [np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3)[:, ::-1], np.float32(1.5)])
def test_put_makes_numpy_an_array_of_the_framework_and_get_brings_it_back(x: Any) -> None:
    there = put(x, "cpu", "torch")
    assert isinstance(there, torch.Tensor)
    assert device_of(there) == cpu()
    back = get(there)
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape, back.tobytes()) == (x.dtype, x.shape, x.tobytes())


def test_put_asks_the_backend_that_it_is_given() -> None:
    class Told(Machine):
        def put(self, array: Any, device: Device) -> Any:
            return array, device

    backend: Any = Told(0)
    assert put(3, "cpu:1", backend) == (3, cpu(1))
    assert isinstance(put([3], "cpu"), torch.Tensor)


def test_put_takes_arrays_that_cannot_be_written() -> None:
    x = np.arange(3)
    x.setflags(write=False)
    there = put(x, "cpu", "torch")
    there += 1
    assert there.tolist() == [1, 2, 3]
    assert x.tolist() == [0, 1, 2]


def test_put_names_the_devices_that_are_there() -> None:
    with pytest.raises(Invalid) as error:
        put(torch.ones(1), "cuda:99")
    listed = ", ".join(map(str, find.load("torch").devices()))
    assert str(error.value) == f"device cuda:99 is not there: torch sees {listed} on this machine"


def test_get_gives_numpy() -> None:
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], requires_grad=True), np.array([1.0, 2.0]), [1.0, 2.0]):
        back = get(x)
        assert type(back) is np.ndarray
        assert back.tolist() == [1.0, 2.0]


def test_where_an_array_is() -> None:
    assert device_of(torch.ones(2)) == device_of(np.ones(2)) == cpu()


@pytest.mark.parametrize("ask", [device_of, get, lambda thing: put(thing, "cpu")])
def test_what_is_no_array_is_refused(ask: Any) -> None:
    with pytest.raises(WrongType) as error:
        ask({"x": 1})
    assert str(error.value) == f"expected an array of {', '.join(find.FRAMEWORKS)} or NumPy, got builtins.dict"


def test_same_device_is_the_one_they_are_on() -> None:
    assert same_device(x=torch.ones(2), y=np.ones(3)) == cpu()


def test_different_devices_are_named_with_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"a": cpu(), "b": gpu(1), "c": cpu()}
    monkeypatch.setattr("samestep.backends.arrays.device_of", places.__getitem__)
    assert same_device(x="a", weight="c") == cpu()
    assert same_device(x="b") == gpu(1)
    with pytest.raises(DevicesDiffer) as error:
        same_device(x="a", weight="b", y="c")
    assert str(error.value) == (
        "arrays are on different devices (x on cpu, weight on cuda:1, y on cpu): "
        "move them to one with samestep.put(x, device)"
    )
    assert isinstance(error.value, ValueError)
