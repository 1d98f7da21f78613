"""processes: several processes are one group. The same bits on any number of them, together to the end, and no hang.

What the processes do is in process_job.py. A few launches are those of a user (samestep train, torchrun); most processes are
forked from one that has loaded PyTorch already, and find their place in variables that a test makes up. Those that MPI connects
are started by mpiexec; the other frameworks do that in conformance/test_many_processes.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import process_job
import pytest
from commands import OUTSIDE, PLACES, command, finish, is_running

import samestep as ss
from samestep.processes import launch as launching
from samestep.processes import torch as torch_world
from samestep.processes.place import MEET

needs_mpi = pytest.mark.skipif(not launching.mpiexec(), reason="needs mpiexec (pip install '.[mpi]')")
ENGINES = ["file", pytest.param("mpi", marks=needs_mpi)]  # torch.distributed, and MPI
JOB = Path(process_job.__file__)
DEADLINE = process_job.DEADLINE


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


class ByMpi(Ranks):
    """Processes of one run, started by mpiexec and connected by MPI."""

    def begin(self, count: int, job: str, given: dict[str, Any]) -> None:
        # Without a place to meet, PyTorch's processes have nothing but MPI.
        given["environ"] = {MEET: "", **given.get("environ", {})}
        with open(self.folder / "output", "wb") as output:
            command = [sys.executable, str(JOB), job, str(self.folder), json.dumps(given)]
            self.processes = launching.Processes(command, count, OUTSIDE, "mpi", output.fileno())
            self.processes.__enter__()

    def end(self, besides: Sequence[int] = ()) -> list[Seen]:
        self.processes.wait()
        self.processes.kill()  # as `launch` does with those that mpiexec, on a busy machine, has not ended in time
        ended = [rank for rank in range(self.processes.count) if rank not in besides]
        process_job.await_(lambda: None not in self.processes.states(), "not all have ended")
        return [self.seen(rank) for rank in ended]

    def seen(self, rank: int) -> Seen:
        file, output = self.folder / f"rank-{rank}.json", (self.folder / "output").read_text()
        told = json.loads(file.read_text()) if file.exists() else {}
        return Seen(self.processes.states()[rank], told, output)

    def kill(self) -> None:
        self.processes.__exit__()


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
        ranks = (ByMpi if meet == "mpi" and count > 1 else Ranks)(tmp_path / f"launch-{len(launches)}")
        prepare(ranks.folder)
        if isinstance(ranks, ByMpi):
            ranks.begin(count, job, given)
            launches.append(ranks)
            return ranks
        launches.append(ranks)
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
    where = {MEET: f"file://{folder}/meet"} if meet == "file" else {"MASTER_ADDR": "127.0.0.1"}
    return {name: str(value) for name, value in place.items()} | where | {"MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def prepare(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    np.save(folder / process_job.NUMBERS, process_job.X)


def told_by(folder: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


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


@needs_mpi
def test_same_bits_with_mpi(launch: Launch, expected: dict[str, Any]) -> None:
    """One fit after the other in the same processes."""
    names = ["seven shards", "bands", "unseeded", "memmap"]
    ranks = launch(3, "zoo", "mpi", names=names).end()
    assert [seen.status for seen in ranks] == [0, 0, 0], ranks
    fits = {f"{name} on {devices}" for name in names for devices in (1, 2)}
    check_zoo(expected, [seen.told for seen in ranks], fits)


@pytest.mark.parametrize("meet", ["tcp", "slurm"])
def test_same_bits_when_started_by_hand(meet: str, launch: Launch, expected: dict[str, Any]) -> None:
    for seen in launch(2, "one", meet, name="batch norm").end():
        assert seen.status == 0, seen
        check_same(expected, seen.told, "batch norm")


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


@pytest.mark.parametrize(("count", "devices"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_a_band_is_sent_while_the_backward_pass_goes_on(count: int, devices: int, launch: Launch) -> None:
    """The backward pass of the last shard cannot end before the sum of the last layer's band is there."""
    alone = process_job.pausing(lambda: None).fingerprints
    for seen in launch(count, "overlap", devices=devices).end():
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
            for seen in ranks:
                assert (seen.status, seen.told["resumed"]) == (0, before)
                assert seen.told["folder"] == str(tmp_path / "run")
                assert seen.told["best"] == ss.Run.load(tmp_path / "run").best.fingerprint
                check_same(expected, seen.told, name)
        else:
            assert [seen.status for seen in ranks] == [1] * count
            assert ranks[-1].error == ("ValueError", "boom\nand more of it")
        before = fails
    kept = ss.Run.load(tmp_path / "run")
    assert process_job.outcome(kept) | {"average_metrics": None} == expected[f"{name} on 1"]["run"] | {
        "average_metrics": None  # they are not in the folder
    }


@pytest.mark.parametrize(
    ("engine", "who", "how", "status"),
    [
        ("file", 0, "terminate", 143),
        ("file", 2, "terminate", 143),
        ("file", 1, "interrupt", 0),  # all scripts go on with the run so far
        pytest.param("mpi", 2, "terminate", 143, marks=needs_mpi),
    ],
)
def test_a_signal_to_one_process_stops_all_at_one_step(
    engine: str, who: int, how: str, status: int, launch: Launch, expected: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    given = {"run_dir": str(folder), f"rank {who}": {"befall": [how, 0, "middle"]}, "name": "bands"}
    ranks = launch(3, "one", engine, checkpoint_every=1000, **given).end()
    if engine == "file":
        assert [seen.status for seen in ranks] == [status] * 3
    else:
        assert {seen.status for seen in ranks} <= {143, -signal.SIGKILL}  # mpiexec kills those that have not ended yet
    assert [seen.told["stopped"] for seen in ranks] == [[2]] * 3  # the step in which it came, and the one after it
    said = rf"interrupted after step 2 of \d+: to resume it, fit again with run_dir='{re.escape(str(folder))}'\n"
    told = [bool(re.search(said, seen.output)) for seen in ranks]
    assert told == ([True, False, False] if engine == "file" else [True] * 3)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000002.safetensors"]
    for seen in launch(2, "one", devices=2, run_dir=str(folder), name="bands").end():
        assert seen.told["resumed"] == 2
        check_same(expected, seen.told, "bands")


# Failures


def check_all(ranks: list[Seen], errors: list[tuple[str, str]]) -> None:
    assert [seen.error for seen in ranks] == errors
    # Where MPI connects them, the first that ends takes the others with it, once all have said why.
    assert {seen.status for seen in ranks} in ({1}, {1, -signal.SIGKILL}), ranks


@pytest.mark.parametrize(
    ("who", "meet"), [(0, "file"), (1, "file"), (0, "tcp"), (1, "tcp"), pytest.param(1, "mpi", marks=needs_mpi)]
)
def test_an_exception_in_one_process_ends_all_with_its_message(who: int, meet: str, launch: Launch) -> None:
    """Also where rank 0 holds what the others would read the message from."""
    where = "after" if meet == "tcp" else "middle"
    ranks = launch(3, "one", meet, **{f"rank {who}": {"befall": ["raise", 1, where]}}).end()
    told = [("ProcessFailed", f"rank {who} failed: ValueError: boom")] * 3
    told[who] = "ValueError", "boom\nand more of it"
    check_all(ranks, told)


@pytest.mark.parametrize("where", ["middle", "bands"])
@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_while_bands_are_sent_ends_both_processes(who: int, where: str, launch: Launch) -> None:
    """In the middle, no band is ready. Later, one is on its way, and the others will not come."""
    ranks = launch(2, "one", name="bands", **{f"rank {who}": {"befall": ["raise", 1, where]}}).end()
    told = [("ProcessFailed", f"rank {who} failed: ValueError: boom")] * 2
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


def test_a_killed_process_is_named(launch: Launch) -> None:
    """All at once, as most of it is waiting."""
    cases: dict[Ranks, int] = {}
    for who, meet, where in [(0, "file", "before"), (2, "file", "after"), (1, "tcp", "middle"), (0, "tcp", "after")]:
        cases[launch(3, "one", meet, **{f"rank {who}": {"befall": ["kill", 1, where]}})] = who
    for started, who in cases.items():
        ranks = started.end()
        assert ranks.pop(who).status == -signal.SIGKILL
        check_all(ranks, [("ProcessFailed", f"rank {who} is gone: it was killed, or its host was lost")] * 2)


@needs_mpi
def test_a_killed_process_is_named_by_the_launcher_where_mpiexec_ends_the_others(launch: Launch) -> None:
    ranks = launch(3, "one", "mpi", **{"rank 1": {"befall": ["kill", 1, "middle"]}}).end()
    assert [seen.status for seen in ranks] == [-signal.SIGKILL] * 3
    assert ranks[0].output == "samestep: rank 1 is gone: it was killed, or its host was lost\n"


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


def test_a_process_that_hangs_is_named(launch: Launch) -> None:
    cases: dict[Ranks, int] = {}
    for who, meet, accident in [
        (2, "file", {"befall": ["stop", 1, "middle"]}),
        (2, "file", {"befall between": 1}),  # rank 0 waits for rank 1, which waits for it
        (0, "tcp", {"befall": ["stop", 1, "after"]}),  # it holds what the others would tell each other by
    ]:
        cases[launch(3, "one", meet, timeout=3, **{f"rank {who}": accident})] = who
    for started, who in cases.items():
        check_hangs(started, who)


def check_hangs(started: Ranks, who: int) -> None:
    message = f"rank {who} has not answered for 3 s: it hangs, or its host cannot be reached"
    check_all(started.end(besides=[who]), [("ProcessFailed", message)] * 2)


@needs_mpi
def test_a_process_that_hangs_is_named_and_ended_where_mpi_connects_them(launch: Launch) -> None:
    accidents = [{"befall": ["stop", 1, "middle"]}, {"befall between": 1}]
    for started in [launch(3, "one", "mpi", timeout=3, **{"rank 2": accident}) for accident in accidents]:
        check_hangs(started, 2)
        assert isinstance(started, ByMpi)
        assert started.processes.states()[2] == -signal.SIGKILL


@needs_mpi
def test_who_ends_before_the_others_where_mpi_connects_them(launch: Launch) -> None:
    """Without a fit, so that it never joins them; and after one fit, when the others begin another."""
    never = launch(2, "several", "mpi", **{"rank 0": {"timeout": 3}, "rank 1": {"fits": 0}})
    message = "samestep: not all processes have come within 3 s: were all started, and has none ended?\n"
    assert never.end()[0].output == message
    [first, _] = launch(2, "several", "mpi", **{"rank 0": {"fits": 2}}).end()
    assert first.error == ("ProcessFailed", "rank 1 has ended before the others: see what it printed")


def test_a_process_that_never_comes_is_named(launch: Launch) -> None:
    by_file, by_tcp = (launch(3, "one", meet, only=[0, 1], timeout=3) for meet in ("file", "tcp"))
    several = launch(4, "one", only=[1], timeout=1)
    first = launch(2, "one", "tcp", only=[1], timeout=1)
    for started in (by_file, by_tcp):
        check_all(started.end(), [("ProcessFailed", "rank 2 has not come within 3 s: were all started?")] * 2)
    check_all(several.end(), [("ProcessFailed", "ranks 0, 2, 3 have not come within 1 s: were all started?")])
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


def test_a_schedule_that_ends_early_is_told_by_the_first_process_alone(launch: Launch) -> None:
    ranks = launch(2, "one", schedule="poly(0.1, 2)").end()
    assert [seen.output.count("schedule: poly(0.1, 2) ends at step 2 of ") for seen in ranks] == [1, 0]


WHOLE = "rank 1 has another batch or setting (every process gives the whole batch) than rank 0"


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ({"rows": [12, 24]}, "sha256 is '"),
        ({"rows": [0, 11]}, "examples is 11, not 12; x is [11, 12], not [12, 12]; y is [11], not [12]; sha256 is '"),
        ({"lr": 0.2}, "call is ['step 1', 'constant(0.2)'], not ['step 1', 'constant(0.1)']"),
        ({"seed": 4}, "seed is '4', not '0'"),
    ],
    ids=["other examples", "fewer", "rate", "seed"],
)
def test_ranks_that_give_a_group_different_things(given: dict[str, Any], difference: str, launch: Launch) -> None:
    for seen in launch(2, "own steps", **{"rank 1": given}).end():
        assert seen.error[0] == "Invalid"
        assert seen.error[1].startswith(f"{WHOLE}: {difference}"), seen.error


def test_ranks_that_give_a_group_the_same(launch: Launch) -> None:
    alone = process_job.own_steps(Path())["prints"]
    assert [seen.told["prints"] for seen in launch(2, "own steps").end()] == [alone, alone]


def test_ranks_with_different_data(launch: Launch) -> None:
    ranks = launch(2, "one", **{"rank 1": {"name": "memmap"}}).end()
    [message] = {seen.error[1] for seen in ranks}
    assert message.startswith(
        "rank 1 has another recipe than rank 0: test.sha256 is '"
    )  # the same examples for training


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_not_a_number_is_told_by_all(engine: str, launch: Launch, tmp_path: Path) -> None:
    message = (
        "the loss is nan at step 1, shard 0, with learning rate 1e+30: lower the rate, clip the gradient, or look at that "
        "shard's examples"
    )
    check_all(launch(3, "one", engine, schedule=1e30).end(), [("NotFinite", message)] * 3)
    # With a run folder, rank 0 looks first.
    ranks = launch(2, "one", engine, schedule=1e30, run_dir=str(tmp_path / "run"), checkpoint_every=1).end()
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
    message = "SAMESTEP_TRANSPORT must be gloo or nccl, got 'pigeons'"
    check_all(ranks, [("ProcessFailed", f"rank 1 failed: Invalid: {message}"), ("Invalid", message)])


# Broken twins


@pytest.mark.parametrize("twin", ["adds in the order of ranks", "loses a part", "shuffles by rank"])
def test_a_broken_twin_is_rejected(twin: str, launch: Launch, expected: dict[str, Any]) -> None:
    for seen in launch(3, "one", twin=twin, check_every=None).end():  # a spot check may notice some of this
        assert seen.status == 0, seen
        with pytest.raises(AssertionError):
            check_same(expected, seen.told)


def test_a_sum_that_is_lost_on_the_way_to_one_process_is_found_by_all(launch: Launch) -> None:
    message = (
        "after step 3 the replicas on cpu, cpu, cpu are no longer equal: something outside samestep wrote to one of them, or a "
        "device computes wrongly"
    )
    check_all(launch(3, "one", twin="loses a sum").end(), [("ReplicasDiffer", message)] * 3)


@pytest.mark.parametrize("engine", ["", pytest.param("mpi", marks=needs_mpi)])
def test_a_process_that_computes_wrongly_is_found_by_all(engine: str, launch: Launch) -> None:
    """Each process repeats its own numbers, so only a comparison of two tells: the step, the shard and the devices."""
    ranks = launch(2, "one", *([engine] if engine else []), twin="computes wrongly", check_every=1).end()
    for seen in ranks:
        kind, message = seen.told["error"]
        assert kind == "NotRepeatable"
        assert re.match(
            r"shard \d was computed twice at step 0, on cpu and on cpu: its result is not the same; ", message
        )


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


def test_missing_addresses_are_named(launch: Launch) -> None:
    """Variables that torchrun would have set."""
    ranks = launch(2, "one", "tcp", environ={"MASTER_ADDR": ""}).end()
    message = "the environment variable MASTER_ADDR must name the host of rank 0, and is not set"
    check_all(ranks, [("Invalid", message)] * 2)
    ranks = launch(2, "one", "tcp", environ={"MASTER_PORT": "high"}).end()
    check_all(ranks, [("Invalid", "the environment variable MASTER_PORT must be a whole number, got 'high'")] * 2)


# As a user starts them


def test_samestep_train_ends_with_status_2(tmp_path: Path) -> None:
    prepare(tmp_path)
    given = json.dumps({"schedule": 1e30})
    status, said = finish(command("-m", "samestep", "train", JOB, "--processes", 2, "--", "one", tmp_path, given))
    line = (
        r"samestep: process_job.py, line \d+: the loss is nan at step 1, shard 0, with learning rate 1e\+30: lower the rate, "
        r"clip the gradient, or look at that shard's examples\n"
    )
    assert status == 2
    assert re.fullmatch(line, said), said  # once, for both
    assert not any(is_running(told["pid"]) for told in told_by(tmp_path, 2))


RAISES = """
import os
import numpy as np
import torch
import samestep as ss

def loss(output, y):
    if os.environ["RANK"] in RANKS:
        raise KeyError("mine")  # line 9
    return torch.nn.functional.cross_entropy(output, y, reduction="none")

x, y = np.zeros((8, 5), "float32"), np.zeros(8, int)
ss.Trainer(1, 8, devices=1, progress=False, loss=loss).fit(torch.nn.Linear(5, 3), (x, y))
"""


@pytest.mark.parametrize(("ranks", "prefix"), [("012", ""), ("2", "rank 2: ")])
def test_an_error_is_said_once_with_the_lines_of_the_script(ranks: str, prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(RAISES.replace("RANKS", repr(ranks)))
    status, said = finish(command("-m", "samestep", "train", path, "--processes", 3))
    assert said.startswith(f"{prefix}Traceback (most recent call last):\n")
    assert re.findall(r'File "(.*)", line (\d+)', said) == [(str(path), "13"), (str(path), "9")]
    assert said.endswith("\nKeyError: 'mine'\n")
    assert (status, said.count("Traceback")) == (1, 1)


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
    rest = [str(JOB), "--processes", "2", "--", "one", str(tmp_path), json.dumps(given)]
    line = shlex.join(["samestep", "train", "--run-dir", str(folder), *rest])
    assert said == f"interrupted after step {step} of 300000: to resume it, {line}\n"
    assert status == 128 + number
    epochs = step // 3 + 1
    whole = process_job.trained("seven shards", tmp_path, 1, max_epochs=epochs)[2]
    again = process_job.trained("seven shards", tmp_path, 3, max_epochs=epochs, run_dir=folder)[2]
    assert again.resumed == step
    assert process_job.outcome(again) == process_job.outcome(whole)
