"""Several hosts under torchrun: one joins, one is cut off, processes are killed; the bits stay those of one process.

The hosts are network namespaces (hosts.py). What they train (elastic_job.py) waits at a step until a file is there, so that
whatever happens to a host happens at that step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from chaos import elastic_job
from chaos.hosts import LINK, Network, address, missing

import samestep as ss
from samestep.runs import checkpoint

DEADLINE = 120  # seconds that anything may take on a busy machine
TIMEOUT = 6  # seconds after which the job gives up a process that does not answer
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it, torchrun itself fails when a host joins later


@pytest.fixture(scope="module")
def able() -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def network(able: None) -> Iterator[Network]:
    with Network(3) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> ss.Run:
    """The same job in one process, here."""
    return elastic_job.fit(None)


class Job:
    """The job on some hosts, with a torchrun on each."""

    def __init__(
        self, network: Network, folder: Path, nodes: str, gates: tuple[int, ...] = (), endpoint: int = 1, **env: str
    ) -> None:
        self.network, self.folder, self.nodes, self.endpoint, self.env = network, folder, nodes, endpoint, env
        self.run_dir, self.torchruns = folder / "run", dict[int, subprocess.Popen[bytes]]()
        self.gates = {step: folder / f"gate-{step}" for step in gates}
        (folder / "tmp").mkdir()  # torchrun leaves folders behind

    def start(self, *hosts: int) -> None:
        for host in hosts:
            settings = {
                "is_host": int(host == self.endpoint), "join_timeout": DEADLINE, "read_timeout": 30, "close_timeout": 5,
                "last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 5,
            }  # fmt: skip
            command = [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nodes}", "--nproc-per-node=1",
                "--max-restarts=10", "--rdzv-backend=c10d", f"--rdzv-endpoint={address(self.endpoint)}:29400",
                "--rdzv-id=job", f"--local-addr={address(host)}",
                "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
                elastic_job.__file__, str(self.run_dir), str(TIMEOUT), *(f"{s}:{file}" for s, file in self.gates.items()),
            ]  # fmt: skip
            env = {**os.environ, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")}
            with open(self.folder / f"host-{host}.log", "wb") as output:
                self.torchruns[host] = self.network.start(host, command, env | self.env, output)

    def open(self, step: int) -> None:
        self.gates[step].touch()

    def says(self, host: int) -> str:
        return (self.folder / f"host-{host}.log").read_text(errors="replace")

    def begun(self) -> list[tuple[int, int]]:
        """Of how many processes, and at which step, the job began and went on."""
        log = self.run_dir / "events.jsonl"
        found = [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]] if log.exists() else []
        return [(e["processes"], e.get("step", 0)) for e in found if e["event"] in ("start", "resume")]

    def saved(self, step: int) -> bool:
        """Whether the job has got to this step, and a checkpoint of it is on the disk."""
        return any(path >= checkpoint.path_of(self.run_dir, step) for path in checkpoint.paths(self.run_dir))

    def until(self, what: str, done: Callable[[], bool], may_fail: bool = False) -> None:
        deadline = time.monotonic() + DEADLINE
        while not done():
            failed = [host for host, torchrun in self.torchruns.items() if torchrun.poll()]
            if time.monotonic() > deadline or (failed and not may_fail):
                logs = "\n".join(f"host {host}: {self.says(host)[-4000:]}" for host in self.torchruns)
                pytest.fail(f"not after {DEADLINE} s, or after torchrun has failed on {failed}: {what}\n{logs}")
            time.sleep(0.02)

    def end(self, host: int, may_fail: bool = False) -> int:
        torchrun = self.torchruns[host]
        self.until(f"the end of host {host}", lambda: torchrun.poll() is not None, may_fail)
        return int(torchrun.returncode)


def same(job: Job, alone: ss.Run) -> bool:
    """Whether the run folder holds the bits of the run in one process: those of every step, and of the weights."""
    run = ss.Run.load(job.run_dir)
    assert len(run.fingerprints) == elastic_job.STEPS == len(set(alone.fingerprints))
    return (run.fingerprint, run.fingerprints) == (alone.fingerprint, alone.fingerprints) and all(
        run.weights()[name].tobytes() == tensor.tobytes() for name, tensor in alone.weights().items()
    )


TALK = """
import pathlib, socket, sys, time
here, file = sys.argv[1], pathlib.Path(sys.argv[2])
server = socket.create_server((here, 5000)) if here.endswith(".1") else None
talk = server.accept()[0] if server else None
while not talk:
    try:
        talk = socket.create_connection(("10.77.0.1", 5000))
    except ConnectionRefusedError:
        time.sleep(0.01)
talk.settimeout(2)
for _ in range(2):
    talk.sendall(b"hello")
    try:
        print(talk.recv(5).decode() or "closed", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
    while not file.exists():
        time.sleep(0.01)
"""


def test_a_host_that_is_cut_off_hears_nothing(network: Network, tmp_path: Path) -> None:
    """The hosts are what the tests below take them for: no end and no reset of a connection gets through a cut."""
    logs, file = {host: tmp_path / str(host) for host in (1, 2)}, tmp_path / "cut"
    for host, log in logs.items():
        with open(log, "wb") as output:
            network.start(host, [sys.executable, "-c", TALK, address(host), str(file)], dict(os.environ), output)
    deadline = time.monotonic() + DEADLINE
    said: list[list[str]] = []
    while len(said) < 2 or not all(len(lines) == 2 for lines in said):
        assert time.monotonic() < deadline, said
        said = [log.read_text().split() for log in logs.values()]
        if said == [["hello"], ["hello"]] and not file.exists():
            network.cut(2)
            file.touch()
        time.sleep(0.02)
    assert said == [["hello", "TimeoutError"]] * 2


def test_two_hosts(network: Network, tmp_path: Path, alone: ss.Run) -> None:
    job = Job(network, tmp_path, nodes="2")
    job.start(1, 2)
    assert [job.end(1), job.end(2)] == [0, 0]
    assert job.begun()[0] == (2, 0)
    assert same(job, alone)
    for host in (1, 2):
        assert f"rank {host - 1} ends with {alone.fingerprint}\n" in job.says(host)


def test_a_host_that_joins_is_used(network: Network, tmp_path: Path, alone: ss.Run) -> None:
    """It becomes rank 0, as its address comes first: the run folder is all that it has to go on from."""
    job = Job(network, tmp_path, nodes="2:3", gates=(20,), endpoint=2, **FRESH_STORE)
    job.start(2, 3)
    job.until("step 20", lambda: job.saved(20))
    assert {processes for processes, _ in job.begun()} == {2}
    job.start(1)
    job.until("three processes", lambda: job.begun()[-1][0] == 3)
    job.open(20)
    assert [job.end(host) for host in (1, 2, 3)] == [0, 0, 0]
    processes, step = job.begun()[-1]
    assert processes == 3
    assert 20 <= step < elastic_job.STEPS
    assert same(job, alone)
    assert f"rank 0 ends with {alone.fingerprint}\n" in job.says(1)


def test_a_host_that_is_cut_off_is_given_up(network: Network, tmp_path: Path, alone: ss.Run) -> None:
    job = Job(network, tmp_path, nodes="2:3", gates=(20,), **FRESH_STORE)
    job.start(1, 2, 3)
    job.until("step 20 of three processes", lambda: job.saved(20) and job.begun()[-1][0] == 3)
    network.cut(3)
    job.open(20)
    assert [job.end(1, may_fail=True), job.end(2, may_fail=True)] == [0, 0]
    processes, step = job.begun()[-1]
    assert processes == 2
    assert 20 <= step < elastic_job.STEPS
    assert same(job, alone)
    lost = f"has not answered for {TIMEOUT} s: it hangs, or its host cannot be reached\n"
    assert f"ProcessFailed: rank 2 {lost}" in job.says(1) + job.says(
        2
    )  # the later of the two may be ended before it says so
    # The host that is cut off ends as well: its process by itself, its torchrun when TCP has given up (hosts.RETRIES).
    assert job.end(3, may_fail=True) == 1
    assert f"ProcessFailed: rank 0 {lost}" in job.says(3)
    assert network.workers(3) == []


def test_killed_processes_are_started_again(network: Network, tmp_path: Path, alone: ss.Run) -> None:
    """One after the other on both hosts; the second time, what was said about the first is forgotten."""
    job = Job(network, tmp_path, nodes="2", gates=(20, 40))
    job.start(1, 2)
    for gate, host in ((20, 2), (40, 1)):
        job.until(f"step {gate}", lambda gate=gate: job.saved(gate))
        times, [worker] = len(job.begun()), network.workers(host)
        os.kill(worker, signal.SIGKILL)
        job.until("another start", lambda times=times: len(job.begun()) > times)
        assert job.begun()[-1] == (2, gate)
        job.open(gate)
    assert [job.end(1), job.end(2)] == [0, 0]
    assert same(job, alone)
    assert "ProcessFailed: rank 1 is gone: it was killed, or its host was lost\n" in job.says(1)
    assert "ProcessFailed: rank 0 is gone: it was killed, or its host was lost\n" in job.says(2)


MEET = """
import os, sys
from samestep.processes.torch import TorchWorld
from samestep.errors import ProcessFailed
from samestep.processes.place import find
print("meeting", flush=True)
world = TorchWorld(find(), 30.0)
print(b" ".join(world.collect(sys.argv[1].encode())).decode(), flush=True)
if sys.argv[1] == "fails":
    world.fail(ValueError("of the first two"))
elif sys.argv[1] == "waits":
    try:
        world.collect(b"")
    except ProcessFailed as error:
        print(error, flush=True)
os._exit(0)
"""


def test_processes_meet_in_a_store_that_others_have_used() -> None:
    """torchrun keeps its store when it starts processes again: what the first two left there is not for the next two."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}

    started: list[subprocess.Popen[str]] = []

    def start(rank: int, what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEET, what]
        started.append(subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True))
        return started[-1]

    def says(process: subprocess.Popen[str]) -> list[str]:
        return process.communicate(timeout=DEADLINE)[0].splitlines()

    try:
        first, other = start(0, "fails"), start(1, "waits")
        assert says(first) == ["meeting", "fails waits"]
        assert says(other) == ["meeting", "fails waits", "rank 0 failed: ValueError: of the first two"]
        other = start(1, "waits")
        assert other.stdout
        assert other.stdout.readline() == "meeting\n"
        first = start(0, "dies")  # late, by the time that it takes to start
        assert says(first) == ["meeting", "dies waits"]
        assert says(other) == ["dies waits", "rank 0 is gone: it was killed, or its host was lost"]
    finally:
        for process in started:
            process.kill()
            process.communicate()
