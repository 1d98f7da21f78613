"""processes: several processes are one group. The same bits on any number of them, together to the end, and no hang.

What the processes do is in process_job.py. A few launches are those of a user (samestep train, torchrun); most processes are
forked from one that has loaded PyTorch already, and find their place in variables that a test makes up.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import process_job
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep as ss
from samestep import backends
from samestep.devices import cpu, gpu, resolve
from samestep.errors import Invalid
from samestep.processes import place as processes
from samestep.processes import torch as torch_world
from samestep.processes.place import Alone, Place, exchange, find, first_host, tasks_per_node
from samestep.shards import Fold, cut, parts

JOB = Path(process_job.__file__)
DEADLINE = process_job.DEADLINE
PLACES = re.compile("RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|SLURM_.*|SAMESTEP_.*|TORCHELASTIC_.*")
OUTSIDE = {name: value for name, value in os.environ.items() if not PLACES.fullmatch(name)}
OUTSIDE["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"


# Launching


@dataclass
class Seen:
    """What is known of a process that has ended."""

    status: int | None
    told: dict[str, Any]
    output: str

    @property
    def error(self) -> tuple[str, str]:
        assert "error" in self.told, self
        kind, message = self.told["error"]
        return kind, message


@dataclass(eq=False)
class Ranks:
    """Processes of one run, forked."""

    folder: Path
    running: dict[int, Any] = field(default_factory=dict)

    def end(self, besides: Sequence[int] = ()) -> list[Seen]:
        """Wait until all have ended; in the order of their ranks."""
        waiting = [rank for rank in self.running if rank not in besides]
        for rank in waiting:
            self.running[rank].join(DEADLINE)
        late = [rank for rank in waiting if self.running[rank].exitcode is None]
        assert not late, f"ranks {late} have not ended: {[self.seen(rank) for rank in self.running]}"
        return [self.seen(rank) for rank in waiting]

    def seen(self, rank: int) -> Seen:
        file, output = self.folder / f"rank-{rank}.json", self.folder / f"output-{rank}"
        told = json.loads(file.read_text()) if file.exists() else {}
        return Seen(self.running[rank].exitcode, told, output.read_text() if output.exists() else "")

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()
            process.close()


Launch = Callable[..., Ranks]


@pytest.fixture(scope="module")
def forks() -> Any:
    """A context whose processes are forked from one that has loaded what they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(JOB.parent), prepend=os.pathsep)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([JOB.stem])
        forkserver.ensure_running()
    return context


@pytest.fixture
def launch(forks: Any, tmp_path: Path) -> Iterator[Launch]:
    """Starts the processes of a run. `only` names those that are really started, `meet` says how they find each other."""
    launches: list[Ranks] = []

    def start(count: int, job: str, meet: str = "file", only: Sequence[int] | None = None, **given: Any) -> Ranks:
        ranks = Ranks(tmp_path / f"launch-{len(launches)}")
        launches.append(ranks)
        prepare(ranks.folder)
        port = free_port()
        for rank in range(count) if only is None else only:
            arguments = OUTSIDE | place_of(rank, count, meet, ranks.folder, port), str(ranks.folder / f"output-{rank}")
            process = forks.Process(
                target=process_job.enter, args=(*arguments, job, str(ranks.folder), json.dumps(given)), daemon=True
            )
            process.start()
            ranks.running[rank] = process
        return ranks

    yield start
    for ranks in launches:
        ranks.kill()


def place_of(rank: int, count: int, meet: str, folder: Path, port: int) -> dict[str, str]:
    if count == 1:
        return {}
    if meet == "slurm":
        numbers = {"PROCID": rank, "STEP_NUM_TASKS": count, "LOCALID": rank, "NODEID": 0, "JOB_ID": 12, "STEP_ID": 3}
        names = {"STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": count, "STEP_NUM_NODES": 1, "NTASKS": count}
        return {f"SLURM_{name}": str(value) for name, value in (numbers | names).items()} | {"MASTER_PORT": str(port)}
    place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    where = {processes.MEET: f"file://{folder}/meet"} if meet == "file" else {"MASTER_ADDR": "127.0.0.1"}
    return {name: str(value) for name, value in place.items()} | where | {"MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def prepare(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    np.save(folder / process_job.NUMBERS, process_job.X)


def command(*arguments: object, **environ: str) -> subprocess.Popen[str]:
    """A command with its standard error at hand, in an environment that knows of no other process."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=OUTSIDE | environ, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status, and what it said."""
    try:
        _, said = process.communicate(timeout=2 * DEADLINE)  # these load PyTorch, more of them than there are cores
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said


def told_by(folder: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# The same bits


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The zoo in this process, on one device and on two."""
    folder = tmp_path_factory.mktemp("expected")
    prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if PLACES.fullmatch(name)]:
            patch.delenv(name)
        return dict(json.loads(json.dumps(process_job.zoo(folder))))


def check_same(expected: dict[str, Any], told: dict[str, Any], name: str = "dropout") -> None:
    """A process has the run that one process with one device has."""
    assert told["run"] == expected[f"{name} on 1"]["run"]


def test_the_zoo_learns_and_draws_and_takes_two_devices(expected: dict[str, Any]) -> None:
    """What is compared below is worth comparing."""
    prints = [seen["run"]["fingerprint"] for name, seen in expected.items() if name.endswith("on 1")]
    assert len(prints) == len(set(prints)) == len(process_job.ZOO)
    for name, seen in expected.items():
        assert seen["run"] == expected[f"{name[:-1]}1"]["run"]
        assert seen["devices"] == ["cpu"] * int(name[-1])
        assert len(set(seen["run"]["fingerprints"])) == 6
        assert seen["weights"] == seen["run"]["fingerprint"] != seen["run"]["recipe"]["initial"]
        assert seen["bands"] == 1 if "bands" not in name else seen["bands"] > 2
    assert expected["swa on 1"]["run"]["average"] != expected["swa on 1"]["run"]["fingerprint"]
    test = expected["dropout on 1"]["run"]["history"][-1]["test_loss"]
    assert expected["dropout on 1"]["evaluated"]["loss"] == test


def check_zoo(expected: dict[str, Any], told: list[dict[str, Any]], names: set[str]) -> None:
    """Every process has the whole result of the one process, to the last bit."""
    count = len(told)
    for rank, seen in enumerate(told):
        assert {name for name in seen if " on " in name} == names
        for name in names:
            ours, theirs = seen[name], expected[f"{name[:-1]}1"]
            assert ours["run"] == theirs["run"], name
            assert ours["weights"] == theirs["weights"]
            assert ours["evaluated"] == theirs["evaluated"]
            assert ours["rank"] == rank
            assert ours["devices"] == ["cpu"] * int(name[-1]) * count


@pytest.mark.parametrize("count", [2, 3, 4])
def test_same_bits_with_samestep_train(count: int, expected: dict[str, Any], tmp_path: Path) -> None:
    """Every model on every number of processes and devices: also 7 shards, and a last batch that not all have a part of."""
    prepare(tmp_path)
    assert finish(command("-m", "samestep", "train", JOB, "--processes", count, "--", "zoo", tmp_path)) == (0, "")
    fits = {name for name in expected if int(name[-1]) * count <= process_job.ZOO[name[:-5]][2].get("shards", 8)}
    assert len(fits) == 2 * len(process_job.ZOO) - (3 if count == 4 else 0)
    check_zoo(expected, told_by(tmp_path, count), fits)


def test_same_bits_with_torchrun(expected: dict[str, Any], tmp_path: Path) -> None:
    prepare(tmp_path)
    names = ["seven shards", "bands", "unseeded", "memmap"]
    given = json.dumps({"names": names})
    status, said = finish(
        command("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, JOB, "zoo", tmp_path, given)
    )
    assert status == 0, said
    check_zoo(expected, told_by(tmp_path, 2), {f"{name} on {devices}" for name in names for devices in (1, 2)})


@pytest.mark.parametrize("meet", ["tcp", "slurm"])
def test_same_bits_when_started_by_hand(meet: str, launch: Launch, expected: dict[str, Any]) -> None:
    for seen in launch(2, "one", meet, name="batch norm").end():
        assert seen.status == 0, seen
        check_same(expected, seen.told, "batch norm")


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_same_bits_however_vectors_travel(transport: str, launch: Launch, expected: dict[str, Any]) -> None:
    for seen in launch(3, "one", name="bands", environ={"SAMESTEP_TRANSPORT": transport}).end():
        assert seen.status == 0, seen
        check_same(expected, seen.told, "bands")


def test_shared_memory_that_one_process_refuses_ends_all(launch: Launch) -> None:
    given = {f"rank {rank}": {"environ": {"SAMESTEP_TRANSPORT": how}} for rank, how in enumerate(("shared", "gloo"))}
    message = (
        "rank 0 cannot share memory with rank 1: processes that do must be on one host with Linux, of one user, and see each "
        "other in /proc"
    )
    ranks = launch(2, "one", **given).end()
    check_all(ranks, [("Invalid", message), ("ProcessFailed", f"rank 0 failed: Invalid: {message}")])


def test_same_bits_in_a_script_that_has_its_own_process_group(launch: Launch, expected: dict[str, Any]) -> None:
    for seen in launch(2, "own group", "tcp", name="bands").end():
        assert seen.status == 0, seen
        check_same(expected, seen.told, "bands")
        assert seen.told["gathered"] == [0.0, 1.0]  # it is still theirs
    for seen in launch(2, "own group", "tcp", **{"rank 1": {"befall": ["raise", 1, "middle"]}}).end():
        assert seen.status == 0, seen
        assert seen.told["caught"].startswith(("boom", "rank 1 failed: ValueError: boom"))
        assert seen.told["gathered"] == [0.0, 1.0]  # also after a failure


def test_evaluation_is_of_the_model_of_rank_0(launch: Launch, tmp_path: Path) -> None:
    """Every process has made another model; half of one and half of another would be nobody's loss."""
    alone = process_job.evaluated(tmp_path)
    for seen in launch(3, "evaluated").end():
        assert {name: seen.told[name] for name in alone} == alone


@pytest.mark.parametrize("devices", [1, 2])
def test_a_band_is_sent_while_the_backward_pass_goes_on(devices: int, launch: Launch) -> None:
    """The backward pass of the last shard cannot end before the sum of the last layer's band is there."""
    alone = process_job.pausing(lambda: None).fingerprints
    for seen in launch(3, "overlap", devices=devices).end():
        assert seen.status == 0, seen
        assert seen.told["run"]["fingerprints"] == alone
        told = seen.told["told"]
        order = ["band 0 is ready", "sending begins", "sending ends", "band 1 is ready", "band 2 is ready"]
        assert [told.index(event) for event in order] == sorted(told.index(event) for event in order)
        ends = [i for i, event in enumerate(told) if event == "a shard's backward ends"]
        assert max(told.index("the first layer's backward waits"), told.index("sending ends")) < ends[-1]
        assert told.count("sending ends") == 3


def test_a_twin_that_sends_after_the_backward_pass_is_rejected(launch: Launch) -> None:
    for seen in launch(2, "overlap", twin="sends at the end", deadline=2).end():
        assert seen.error[1].endswith("no band was sent while the backward pass went on")


# Going on elsewhere


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("swa", [(3, 1, 1), (2, 2, 3), (1, 3, 4), (4, 2, None)]),
        ("bands, seven shards", [(1, 1, 2), (3, 2, 5), (2, 1, None)]),
        ("bands, torch's", [(4, 1, 3), (2, 2, None)]),
    ],
)
def test_a_run_goes_on_with_other_processes(
    name: str, stages: list[tuple[int, int, int | None]], launch: Launch, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Stages are processes, devices of each, and the step at which the last of the processes fails."""
    before = None
    for count, devices, fails in stages:
        given: dict[str, Any] = {"name": name, "devices": devices, "run_dir": str(tmp_path / "run")}
        if fails is not None:
            given[f"rank {count - 1}"] = {"befall": ["raise", fails]}
        ranks = launch(count, "one", checkpoint_every=1, **given).end()
        if fails is None:
            for rank, seen in enumerate(ranks):
                assert (seen.status, seen.told["resumed"]) == (0, before)
                assert seen.told["folder"] == (str(tmp_path / "run") if rank == 0 else "None")
                check_same(expected, seen.told, name)
        else:
            assert [seen.status for seen in ranks] == [1] * count
            assert ranks[-1].error == ("ValueError", "boom\nand more of it")
        before = fails
    kept = ss.Run.load(tmp_path / "run")
    assert process_job.outcome(kept) | {"average_metrics": None} == expected[f"{name} on 1"]["run"] | {
        "average_metrics": None  # they are not in the folder
    }


@pytest.mark.parametrize(("who", "how", "status"), [(0, "terminate", 143), (2, "terminate", 143), (1, "interrupt", 1)])
def test_a_signal_to_one_process_stops_all_at_one_step(
    who: int, how: str, status: int, launch: Launch, expected: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    given = {"run_dir": str(folder), f"rank {who}": {"befall": [how, 0, "middle"]}, "name": "bands"}
    ranks = launch(3, "one", checkpoint_every=1000, **given).end()
    assert [seen.status for seen in ranks] == [status if rank == who else 143 for rank in range(3)]
    assert [seen.told["stopped"] for seen in ranks] == [[2]] * 3  # the step in which it came, and the one after it
    said = f"stopped after step 2; fit with run_dir={str(folder)!r} goes on from there\n"
    assert [said in seen.output for seen in ranks] == [True, False, False]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000002.safetensors"]
    for seen in launch(2, "one", devices=2, run_dir=str(folder), name="bands").end():
        assert seen.told["resumed"] == 2
        check_same(expected, seen.told, "bands")


# Failures


def check_all(ranks: list[Seen], errors: list[tuple[str, str]]) -> None:
    assert [seen.error for seen in ranks] == errors
    assert [seen.status for seen in ranks] == [1] * len(errors)


@pytest.mark.parametrize("meet", ["file", "tcp"])
@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_in_one_process_ends_all_with_its_message(who: int, meet: str, launch: Launch) -> None:
    """Also where rank 0 holds what the others would read the message from."""
    where = "middle" if meet == "file" else "after"
    ranks = launch(3, "one", meet, **{f"rank {who}": {"befall": ["raise", 1, where]}}).end()
    told = [("ProcessFailed", f"rank {who} failed: ValueError: boom")] * 3
    told[who] = "ValueError", "boom\nand more of it"
    check_all(ranks, told)


@pytest.mark.parametrize("meet", ["file", "tcp"])
@pytest.mark.parametrize(("name", "where", "others"), [("dropout", "before", [2]), ("bands", "bands", [0, 2])])
def test_processes_that_catch_the_exception_and_go_on_keep_nobody(
    name: str, where: str, others: list[int], meet: str, launch: Launch
) -> None:
    """With bands, one is on its way when the failure comes, and a thread waits for the others' answer."""
    given: dict[str, Any] = {f"rank {rank}": {"catch": True} for rank in {0, 1, 2} - set(others)}
    given["rank 1"]["befall"] = ["raise", 1, where]
    ranks = launch(3, "one", meet, name=name, **given)
    check_all(
        ranks.end(besides=list({0, 1, 2} - set(others))),
        [("ProcessFailed", "rank 1 failed: ValueError: boom")] * len(others),
    )
    assert ranks.running[1].is_alive()
    (ranks.folder / "go on").touch()
    last = ranks.end()[1]
    assert (last.status, last.error) == (0, ("ValueError", "boom\nand more of it"))


@pytest.mark.parametrize("meet", ["file", "tcp"])
def test_a_fit_after_one_that_failed_everywhere(meet: str, launch: Launch, expected: dict[str, Any]) -> None:
    """Nothing of the first is left to disturb the second."""
    for seen in launch(2, "again", meet).end():
        assert seen.status == 0, seen
        assert seen.told["before"].startswith("the loss is nan at step 1, shard 0, with learning rate 1e+30: ")
        check_same(expected, seen.told)


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_a_killed_process_is_named(transport: str, launch: Launch) -> None:
    """All at once, as most of it is waiting."""
    cases: dict[Ranks, int] = {}
    for who, meet, where in [(0, "file", "before"), (2, "file", "after"), (1, "tcp", "middle"), (0, "tcp", "after")]:
        given = {"environ": {"SAMESTEP_TRANSPORT": transport}, f"rank {who}": {"befall": ["kill", 1, where]}}
        cases[launch(3, "one", meet, **given)] = who
    for started, who in cases.items():
        ranks = started.end()
        assert ranks.pop(who).status == -signal.SIGKILL
        check_all(ranks, [("ProcessFailed", f"rank {who} is gone: it was killed, or its host was lost")] * 2)


class Gone:
    """A store whose process was killed."""

    def check(self, names: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(("holder", "named"), [(0, 0), (2, 1), (torch_world.NOBODY, 1)])
def test_who_is_named_when_the_store_is_gone(holder: int, named: int) -> None:
    """Rank 2 sees that rank 1 has left, as rank 1 had seen that of rank 0."""
    world = torch_world.TorchWorld.__new__(torch_world.TorchWorld)
    world.rank, world.size, world.timeout, world._holder, world._store = 2, 3, 60.0, holder, Gone()
    text = world._cause(1, RuntimeError("Connection closed by peer"))
    assert text == f"rank {named} is gone: it was killed, or its host was lost"


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_a_process_that_hangs_is_named(transport: str, launch: Launch) -> None:
    environ = {"SAMESTEP_TRANSPORT": transport}
    cases: dict[Ranks, int] = {}
    for who, meet, accident in [
        (2, "file", {"befall": ["stop", 1, "middle"]}),
        (2, "file", {"befall between": 1}),  # rank 0 waits for rank 1, which waits for it
        (0, "tcp", {"befall": ["stop", 1, "after"]}),  # it holds what the others would tell each other by
    ]:
        cases[launch(3, "one", meet, timeout=3, environ=environ, **{f"rank {who}": accident})] = who
    for started, who in cases.items():
        message = f"rank {who} has not answered for 3 s: it hangs, or its host cannot be reached"
        check_all(started.end(besides=[who]), [("ProcessFailed", message)] * 2)


def test_a_process_that_never_comes_is_named(launch: Launch) -> None:
    by_file, by_tcp = (launch(3, "one", meet, only=[0, 1], timeout=3) for meet in ("file", "tcp"))
    several = launch(4, "one", only=[1], timeout=1)
    first = launch(2, "one", "tcp", only=[1], timeout=1)
    for started in (by_file, by_tcp):
        check_all(started.end(), [("ProcessFailed", "rank 2 has not come within 3 s: was it started?")] * 2)
    check_all(several.end(), [("ProcessFailed", "ranks 0, 2, 3 have not come within 1 s: were they started?")])
    [seen] = first.end()
    assert re.fullmatch(r"rank 1 cannot reach 127\.0\.0\.1:\d+ within 1 s: was rank 0 started\?", seen.error[1]), seen


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ({"seed": 4}, "seed is 4, not 0"),
        ({"max_epochs": 3}, "max_epochs is 3, not 2"),
        ({"gradient_clip_val": 1.0, "batch_size": 8}, "batch_size is 8, not 16; gradient_clip_val is 1.0, not 0.0"),
    ],
    ids=["seed", "epochs", "two things"],
)
def test_ranks_with_different_recipes(given: dict[str, Any], difference: str, launch: Launch) -> None:
    ranks = launch(3, "one", **{"rank 1": given}).end()
    check_all(ranks, [("Invalid", f"rank 1 has another recipe than rank 0: {difference}")] * 3)


def test_ranks_with_different_data(launch: Launch) -> None:
    ranks = launch(2, "one", **{"rank 1": {"name": "memmap"}}).end()
    [message] = {seen.error[1] for seen in ranks}
    assert message.startswith(
        "rank 1 has another recipe than rank 0: train is {'examples': 35, 'x': [35, 12], 'y': [35], 'type': 'float32'}, "
        "not {'examples': 35, 'x': [35, 12], 'y': [35], 'type': 'float32', 'sha256': "
    )


def test_a_loss_that_is_not_a_number_is_told_by_all(launch: Launch, tmp_path: Path) -> None:
    message = (
        "the loss is nan at step 1, shard 0, with learning rate 1e+30: lower the rate, clip the gradient, or look at that "
        "shard's examples"
    )
    check_all(launch(3, "one", schedule=1e30).end(), [("NotFinite", message)] * 3)
    # With a run folder, rank 0 looks first.
    ranks = launch(2, "one", schedule=1e30, run_dir=str(tmp_path / "run"), checkpoint_every=1).end()
    check_all(ranks, [("NotFinite", message), ("ProcessFailed", f"rank 0 failed: NotFinite: {message}")])


def test_more_devices_than_shards(launch: Launch) -> None:
    message = "3 processes with 9 devices in all need at least 9 shards, got shards=8: raise shards or use fewer"
    check_all(launch(3, "one", devices=3).end(), [("Invalid", message)] * 3)


def test_a_folder_that_rank_0_may_not_use_is_refused_by_all(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process_job.trained("dropout", tmp_path, 1, run_dir=folder, seed=1)
    message = f"{folder} holds a run of another recipe (seed is 0, was 1): choose another run_dir, or delete it"
    ranks = launch(3, "one", run_dir=str(folder)).end()
    check_all(ranks, [("Invalid", message), *[("ProcessFailed", f"rank 0 failed: Invalid: {message}")] * 2])
    assert ss.Run.load(folder).recipe["seed"] == 1


def test_a_bad_transport_in_one_process_ends_all(launch: Launch) -> None:
    ranks = launch(2, "one", **{"rank 1": {"environ": {"SAMESTEP_TRANSPORT": "pigeons"}}}).end()
    message = "SAMESTEP_TRANSPORT must be gloo, nccl or shared, got 'pigeons'"
    check_all(ranks, [("ProcessFailed", f"rank 1 failed: Invalid: {message}"), ("Invalid", message)])


# Broken twins


@pytest.mark.parametrize("twin", ["adds in the order of ranks", "loses a part", "shuffles by rank"])
def test_a_broken_twin_is_rejected(twin: str, launch: Launch, expected: dict[str, Any]) -> None:
    for seen in launch(3, "one", twin=twin).end():
        assert seen.status == 0, seen
        with pytest.raises(AssertionError):
            check_same(expected, seen.told)


def test_a_sum_that_is_lost_on_the_way_to_one_process_is_found_by_all(launch: Launch) -> None:
    message = (
        "after step 3 the replicas on cpu, cpu, cpu are no longer equal: something outside samestep wrote to one of them, or a "
        "device computes wrongly"
    )
    check_all(launch(3, "one", twin="loses a sum").end(), [("ReplicasDiffer", message)] * 3)


def test_a_checkpoint_of_what_rank_0_has_is_rejected(launch: Launch, expected: dict[str, Any], tmp_path: Path) -> None:
    """The momentum of rank 0's shards alone: the run itself is right, and one that goes on from there is not."""
    for twin, folder in ((False, tmp_path / "whole"), (True, tmp_path / "part")):
        given: dict[str, Any] = {"name": "seven shards", "run_dir": str(folder), "checkpoint_every": 1}
        broken = {"twin": "saves what rank 0 has"} if twin else {}
        ranks = launch(2, "one", **given, **broken, **{"rank 1": {"befall": ["raise", 1]}}).end()
        assert [seen.status for seen in ranks] == [1, 1]
        for seen in launch(3, "one", **given).end():
            assert seen.told["resumed"] == 1
            if twin:
                with pytest.raises(AssertionError):
                    check_same(expected, seen.told, "seven shards")
            else:
                check_same(expected, seen.told, "seven shards")


# Across: the sum over processes, with threads in their place

BACKEND = backends.load("torch")


class Mail:
    """Messages between threads that stand for processes."""

    def __init__(self) -> None:
        self.messages: dict[
            Any, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # as it was sent, and the memory it was sent from
        self.arrived = threading.Condition()


@dataclass
class Thread:
    """A world as demanding as a real one may be: what is being sent must not change before it has arrived, and what is to be
    received is worth nothing before it was waited for."""

    rank: int
    size: int
    mail: Mail
    sent: int = 0
    swaps: int = 0
    lose: bool = False

    def swap(self, sends: Any, receives: Any) -> Any:
        for i, (to, vector) in enumerate(sends):
            assert len(vector) > 0
            self.sent += len(vector)
            content = vector.clone()
            if self.lose and self.swaps == 0 and i == 0:
                content = vector = torch.zeros_like(vector)
            with self.mail.arrived:
                self.mail.messages[self.rank, to, self.swaps, sum(q == to for q, _ in sends[:i])] = content, vector
                self.mail.arrived.notify_all()
        keys = [(q, self.rank, self.swaps, sum(p == q for p, _ in receives[:i])) for i, (q, _) in enumerate(receives)]
        self.swaps += 1
        return [], list(zip(keys, (memory for _, memory in receives), strict=True))

    def expect(self, receives: Any) -> Any:
        return receives

    def wait(self, works: Any) -> None:
        for key, memory in works:
            with self.mail.arrived:
                assert self.mail.arrived.wait_for(lambda key=key: key in self.mail.messages, DEADLINE), key
                content, now = self.mail.messages.pop(key)
                assert bits(content) == bits(now), "it was changed on its way"
                memory.copy_(content)

    def empty(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return torch.full((size,), torch.nan, dtype=like.dtype)


def bits(vector: torch.Tensor) -> bytes:
    return bytes(vector.numpy().tobytes())


def floats(count: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    """Vectors over eight orders of magnitude, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-4, 5, (count, size), generator=generator)
    return list((torch.randn((count, size), generator=generator) * 10.0**exponents).unbind())


def along_the_tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    power = 1
    while 2 * power < len(vectors):
        power *= 2
    return vectors[0] if len(vectors) == 1 else along_the_tree(vectors[:power]) + along_the_tree(vectors[power:])


def summed(
    vectors: list[torch.Tensor], shares: list[tuple[int, int]], across: Any = exchange.across, lose: bool = False
) -> tuple[list[torch.Tensor | BaseException], list[Thread]]:
    """What every process has in the end, each with its share of the shards; and their worlds."""
    n, count, mail = len(vectors), len(shares), Mail()
    held = [parts(lo, hi, n) for lo, hi in shares]
    worlds = [Thread(rank, count, mail, lose=lose and rank == 0) for rank in range(count)]
    results: list[Any] = [None] * count

    def work(rank: int) -> None:
        try:
            fold: Fold[torch.Tensor] = Fold(n, BACKEND.add)
            for shard in range(*shares[rank]):
                fold.add((shard, shard + 1), vectors[shard].clone())
            mine = dict(sorted(fold.parts.items()))
            assert list(mine) == held[rank]
            memory = torch.full_like(vectors[0], torch.nan)
            results[rank] = across(worlds[rank], BACKEND, mine, held, n, memory)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive()
    return results, worlds


def check_across(vectors: list[torch.Tensor], shares: list[tuple[int, int]], **broken: Any) -> list[Thread]:
    expected = bits(along_the_tree(vectors))
    results, worlds = summed(vectors, shares, **broken)
    for result in results:
        assert isinstance(result, torch.Tensor), result
        assert bits(result) == expected
    return worlds


@settings(max_examples=150, deadline=None)
@given(
    shards=st.integers(1, 11), hosts=st.lists(st.integers(1, 3), min_size=2, max_size=5), size=st.integers(0, 70),
    chunk=st.sampled_from([1, 3, 1 << 19]), seed=st.integers(0, 99),
)  # fmt: skip
def test_across_adds_along_the_tree(shards: int, hosts: list[int], size: int, chunk: int, seed: int) -> None:
    """Any number of processes with any number of devices; also more than there are shards, or numbers to add."""
    cuts = cut(shards, sum(hosts))
    edges = [sum(hosts[:i]) for i in range(len(hosts) + 1)]
    shares = [(cuts[lo][0], cuts[hi - 1][1]) for lo, hi in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CHUNK", chunk)
        worlds = check_across(floats(shards, size, seed), shares)
    assert len({world.swaps for world in worlds}) == 1
    assert not worlds[0].mail.messages  # nothing was sent that nobody wanted


@pytest.mark.parametrize("chunk", [3, 1 << 19])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 5, 64, 75])
def test_across_sends_what_a_ring_sends(size: int, count: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2(k - 1)/k of the vector, up to the rounding of slices; over all processes, exactly that."""
    monkeypatch.setattr(exchange, "CHUNK", chunk)
    sent = [world.sent for world in check_across(floats(8, size), cut(8, count))]
    assert sum(sent) == 2 * (count - 1) * size
    chunks = -(-size // (chunk * count))
    assert all(abs(numbers * count - 2 * (count - 1) * size) <= chunks * count * count for numbers in sent)
    if size % count == 0:
        assert sent == [2 * (count - 1) * size // count] * count


def test_across_sends_a_third_more_where_three_share_eight_shards() -> None:
    """Two processes hold two parts each, one holds one: 5/3 of what a ring's first half sends, and its second half."""
    sent = [world.sent for world in check_across(floats(8, 30), cut(8, 3))]
    assert sent == [2 * 20 + 20, 2 * 20 + 20, 20 + 20]


def test_across_notices_broken_twins() -> None:
    vectors = floats(8, 30)
    check_across(vectors, cut(8, 3))
    with pytest.raises(AssertionError):
        check_across(vectors, cut(8, 3), across=process_job.in_order_of_ranks)
    with pytest.raises(AssertionError):
        check_across(vectors, cut(8, 3), lose=True)


def test_across_notices_a_part_that_is_missing() -> None:
    """Where a process says that it holds less than it should, the sum is refused."""

    def forgetful(world: Any, backend: Any, mine: Any, held: Any, n: int, memory: Any) -> Any:
        return exchange.across(world, backend, dict(list(mine.items())[:1]), [spans[:1] for spans in held], n, memory)

    results, _ = summed(floats(8, 30), cut(8, 3), forgetful)
    message = "the sum over 8 shards is not complete: it has parts [(0, 2), (3, 4), (6, 8)]"
    assert [str(result) for result in results] == [message] * 3


# Finding one's place


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place()),
        ({"RANK": "1"}, Place()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place()),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 0, 1, "env://")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, Place(1, 2, 1, 1, "env://")),
        (
            {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            Place(5, 6, 1, 2, "env://"),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", processes.MEET: "file:///x"},
            Place(1, 2, 1, 2, "file:///x"),
        ),
    ],
)
def test_place_by_torchrun_or_by_hand(environ: dict[str, str], place: Place) -> None:
    assert find(environ) == place


SRUN = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "gpu[07-08],login", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, Place(4, 5, 0, 1, "tcp://gpu07:29695")),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}, Place(3, 5, 1, 2, "tcp://gpu07:29695")),
        ({"SLURM_STEP_ID": "2"}, Place(4, 5, 0, 1, "tcp://gpu07:29696")),  # two steps of a job do not meet each other
        ({"MASTER_ADDR": "other", "MASTER_PORT": "77"}, Place(4, 5, 0, 1, "tcp://other:77")),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Place()),  # a script inside a batch job
        ({"RANK": "0", "WORLD_SIZE": "2"}, Place(0, 2, 0, 1, "env://")),  # torchrun inside srun
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place()),
    ],
)
def test_place_by_slurm(change: dict[str, str], place: Place) -> None:
    assert find(SRUN | change) == place


def test_salloc_without_srun_is_one_process() -> None:
    assert find({"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "5", "SLURM_JOB_NODELIST": "gpu[07-08]"}) == Place()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "the environment variable RANK must be a whole number, got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "the environment variable WORLD_SIZE must be a whole number, got ''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1 = 1, got RANK=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1 = 1, got RANK=-1"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK must be from 0 to LOCAL_WORLD_SIZE - 1 = 1, got LOCAL_RANK=2",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "a"},
            "the environment variable LOCAL_RANK must be a whole number, got 'a'",
        ),
        (
            SRUN | {"SLURM_PROCID": "5"},
            "SLURM_PROCID must be from 0 to SLURM_STEP_NUM_TASKS - 1 = 4, got SLURM_PROCID=5",
        ),
        (
            SRUN | {"SLURM_LOCALID": "1"},
            "SLURM_LOCALID must be from 0 to the tasks of its node - 1 = 0, got SLURM_LOCALID=1",
        ),
        (SRUN | {"SLURM_JOB_ID": "a.b"}, "the environment variable SLURM_JOB_ID must be a whole number, got 'a.b'"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST must be a list of hosts, got ''"),
    ],
)
def test_a_place_that_cannot_be(environ: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid) as error:
        find(environ)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[1,3]", "n1"), ("n[010-020,30],m", "n010"), ("n[4]-ib,m", "n4-ib")],
)
def test_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(("text", "counts"), [("3", [3]), ("2(x3)", [2, 2, 2]), ("4,2(x2),1", [4, 2, 2, 1])])
def test_tasks_of_nodes(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_missing_addresses_are_named(launch: Launch) -> None:
    """Variables that torchrun would have set."""
    ranks = launch(2, "one", "tcp", environ={"MASTER_ADDR": ""}).end()
    message = "the environment variable MASTER_ADDR must name the host of rank 0, and is not set"
    check_all(ranks, [("Invalid", message)] * 2)
    ranks = launch(2, "one", "tcp", environ={"MASTER_PORT": "high"}).end()
    check_all(ranks, [("Invalid", "the environment variable MASTER_PORT must be a whole number, got 'high'")] * 2)


class FourGpus:
    name = "fake"

    def devices(self) -> list[Any]:
        return [cpu(), *map(gpu, range(4))]


@pytest.mark.parametrize(
    ("asked", "local", "devices"),
    [
        ("auto", (0, 1), [0, 1, 2, 3]),
        ("auto", (0, 2), [0, 1]),
        ("auto", (1, 2), [2, 3]),
        ("auto", (0, 3), [0, 1]),
        ("auto", (2, 3), [3]),
        ("auto", (3, 4), [3]),
        ("auto", (1, 6), [1]),
        ("auto", (5, 6), [1]),  # more processes than GPUs: they share
        (1, (1, 2), [2]),
        (2, (1, 2), [2, 3]),
        (3, (1, 2), [2, 3, 2]),
        ("2", (3, 4), [3, 3]),
        (["cuda:0", "cuda:3"], (1, 2), [0, 3]),  # what is named is meant
        ("cuda:1", (1, 2), [1]),
    ],
)
def test_processes_on_a_host_share_its_gpus(asked: Any, local: tuple[int, int], devices: list[int]) -> None:
    backend: Any = FourGpus()
    assert resolve(asked, 8, backend, Place(local[0], local[1], *local)) == [gpu(i) for i in devices]


def test_the_cpu_is_named_also_where_gpus_are_shared() -> None:
    backend: Any = FourGpus()
    assert resolve("cpu", 8, backend, Place(1, 2, 1, 2)) == [cpu()]
    assert resolve(["cpu", "cpu"], 8, backend, Place(1, 2, 1, 2)) == [cpu(), cpu()]


def test_alone_there_is_nobody_to_talk_to() -> None:
    alone = Alone()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.collect(b"x") == [b"x"]
    assert (alone.broadcast(b"x"), alone.broadcast(None)) == (b"x", b"")
    assert alone.agreed(alone.vote(True))
    assert not alone.agreed(alone.vote(False))
    alone.wait(alone.swap([], []))
    with pytest.raises(AssertionError, match="^there is nobody else$"):
        alone.swap([(1, b"")], [])


# Starting them

STARTER = """
import sys
from samestep.processes import place as processes
processes.GRACE = float(sys.argv[2])
sys.exit(processes.launch([sys.executable, "-c", sys.argv[1], *sys.argv[3:]], 3))
"""
CHILD = """
import os, pathlib, signal, sys
rank, folder, asked = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), 0
def ask(number, frame):
    global asked
    asked += 1
    (folder / f"{{rank}}.asked").touch()
    if asked == {needed}:
        sys.exit({status})
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ask)
(folder / f"{{rank}}.tmp").write_text(str(os.getpid()))
(folder / f"{{rank}}.tmp").rename(folder / f"{{rank}}.pid")
while True:
    signal.pause()
"""


def children(starter: subprocess.Popen[str], folder: Path) -> list[int]:
    """The processes that were started, once they are ready for signals."""
    files = [folder / f"{rank}.pid" for rank in range(3)]
    process_job.await_(lambda: all(file.exists() for file in files) or starter.poll() is not None, "no children")
    assert starter.poll() is None, finish(starter)
    pids = [int(file.read_text()) for file in files]
    assert all(map(is_running, pids))
    return pids


@pytest.mark.parametrize(
    ("child", "status"),
    [
        ("pass", 0),
        ("import os, sys; sys.exit(2 * (os.environ['RANK'] == '1'))", 2),
        ("import os; os.environ['RANK'] == '2' and os.kill(os.getpid(), 9)", 137),
        # the others would wait for ever
        ("import os, signal, sys; sys.exit(3) if os.environ['RANK'] == '1' else signal.pause()", 3),
        # a first failure counts, not that of the lowest rank
        ("import os, signal, sys; os.environ['RANK'] == '1' and sys.exit(5); signal.pause()", 5),
    ],
)
def test_exit_status_is_that_of_the_first_to_fail(child: str, status: int) -> None:
    assert finish(command("-c", STARTER, child, 0.2)) == (status, "")


def test_what_a_started_process_finds(tmp_path: Path) -> None:
    """Also where the folder for temporary files has a space and a percent sign in its name."""
    temporary = tmp_path / "a 100% b"
    temporary.mkdir()
    child = """
import os, pathlib, sys
from samestep.processes.place import find
place = find()
assert (place.size, place.local_size, place.local_rank) == (3, 3, place.rank)
assert pathlib.Path(place.meet.removeprefix("file://")).parent.is_dir(), place
pathlib.Path(sys.argv[1], str(place.rank)).touch()
"""
    assert finish(command("-c", STARTER, child, 5, tmp_path, TMPDIR=str(temporary))) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "a 100% b"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("signals", "needed", "status", "expected"),
    [
        ([signal.SIGTERM], 1, 143, 143),
        ([signal.SIGINT], 1, 130, 130),
        ([signal.SIGTERM, signal.SIGTERM], 2, 143, 143),
        ([signal.SIGINT, signal.SIGINT], 2, 130, 130),
        ([signal.SIGTERM], 1, 2, 143),  # whoever notices first that another is gone
        ([signal.SIGTERM], 1, 0, 0),  # it was ending anyway
    ],
)
def test_signals_are_handed_on(
    signals: list[signal.Signals], needed: int, status: int, expected: int, tmp_path: Path
) -> None:
    starter = command("-c", STARTER, CHILD.format(needed=needed, status=status), 10, tmp_path)
    pids = children(starter, tmp_path)
    starter.send_signal(signals[0])
    if signals[1:]:
        asked = [tmp_path / f"{rank}.asked" for rank in range(3)]
        process_job.await_(lambda: all(file.exists() for file in asked), "the signal has not come")
        starter.send_signal(signals[1])
    assert finish(starter) == (expected, "")
    assert not any(map(is_running, pids))


def test_no_child_outlives_the_starter(tmp_path: Path) -> None:
    """One of them ends when asked, the others ignore it, and are killed."""
    child = CHILD.format(needed="1 + 99 * rank", status=143)
    starter = command("-c", STARTER, child, 0.2, tmp_path)
    pids = children(starter, tmp_path)
    starter.terminate()
    starter.terminate()
    assert finish(starter) == (143, "")
    assert not any(map(is_running, pids))


def test_samestep_train_ends_with_status_2(tmp_path: Path) -> None:
    prepare(tmp_path)
    given = json.dumps({"schedule": 1e30})
    status, said = finish(command("-m", "samestep", "train", JOB, "--processes", 2, "--", "one", tmp_path, given))
    line = (
        "samestep: the loss is nan at step 1, shard 0, with learning rate 1e+30: lower the rate, clip the gradient, or look at "
        "that shard's examples\n"
    )
    assert (status, said) == (2, line * 2)
    assert not any(is_running(told["pid"]) for told in told_by(tmp_path, 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_samestep_train_stops_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    """And goes on from there to the same bits."""
    prepare(tmp_path)
    folder = tmp_path / "run"
    given = {"name": "seven shards", "run_dir": str(folder), "checkpoint_every": 1, "max_epochs": 100_000}
    starter = command(
        "-m", "samestep", "train", JOB, "--processes", 2, "--", "one", tmp_path, json.dumps(given)
    )  # fmt: skip
    process_job.await_(lambda: list(folder.glob("checkpoints/*")) or starter.poll() is not None, "no checkpoint")
    starter.send_signal(number)
    if number == signal.SIGTERM:
        starter.send_signal(number)  # a second one changes nothing
    status, said = finish(starter)
    told = told_by(tmp_path, 2)
    assert not any(is_running(rank["pid"]) for rank in told)
    [step] = told[0]["stopped"]
    assert told[1]["stopped"] == [step]
    assert said == f"stopped after step {step}; fit with run_dir={str(folder)!r} goes on from there\n"
    assert status == 128 + number
    epochs = step // 3 + 1
    whole = process_job.trained("seven shards", tmp_path, 1, max_epochs=epochs)[2]
    again = process_job.trained("seven shards", tmp_path, 3, max_epochs=epochs, run_dir=folder)[2]
    assert again.resumed == step
    assert process_job.outcome(again) == process_job.outcome(whole)
