"""meeting: processes find each other at a file or at an address, whatever strangers and dead processes have left there."""

from __future__ import annotations

import json
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import Invalid, ProcessFailed
from samestep.processes.meeting import Links, Meeting, connect, meeting_at
from samestep.processes.place import Place, meeting

DEADLINE = 30.0  # seconds after which what does not come is a failure
SOON = 1.0  # seconds after which one that is known not to come is given up

Come = Callable[..., "Future[Links]"]


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> Iterator[Come]:
    """Starts a thread that comes to a meeting as a rank, and gives its connections."""
    made: list[Links] = []
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def work(rank: int, size: int, meet: str | Meeting, seconds: float = DEADLINE) -> Links:
        links: Links = {}
        made.append(links)
        there = (meet, None) if isinstance(meet, str) else ("", meet)
        connect(Place(rank, size, rank, size, there[0]), seconds, links, there[1])
        return links

    with ThreadPoolExecutor(16) as pool:
        yield lambda *arguments: pool.submit(work, *arguments)
    for links in made:
        for link in links.values():
            link.close()


def check(futures: list[Future[Links]]) -> None:
    """Every pair has its two connections, and each leads where it should."""
    links = [future.result(DEADLINE) for future in futures]
    ranks = range(len(links))
    for rank in ranks:
        others = {(other, channel) for other in ranks if other != rank for channel in meeting.CHANNELS}
        assert links[rank].keys() == others
        for other, channel in others:
            links[rank][other, channel].sendall(f"{rank} {channel}.".encode())
    for rank in ranks:
        for (other, channel), link in links[rank].items():
            word = f"{other} {channel}."
            assert meeting.exactly(link, bytearray(len(word))).decode() == word


def errors(futures: list[Future[Links]]) -> list[str]:
    found = [future.exception(DEADLINE) for future in futures]
    assert all(isinstance(error, ProcessFailed) for error in found), found
    return [str(error) for error in found]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def say(port: int, what: dict[str, Any]) -> socket.socket:
    """Speak to whoever listens at a port, once it does."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), DEADLINE)
            break
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
    content = json.dumps(what).encode()
    connection.sendall(struct.pack("<I", len(content)) + content)
    return connection


# Where they meet


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("order", [1, -1], ids=["rank 0 first", "rank 0 last"])
@pytest.mark.parametrize("way", ["file", "tcp", "anywhere"])
def test_every_pair_is_connected(way: str, order: int, count: int, come: Come, tmp_path: Path) -> None:
    host = {"tcp": "127.0.0.1", "anywhere": socket.gethostname()}.get(way, "")
    meet = f"tcp://{host}:{free_port()}" if host else f"file://{tmp_path}/meet"
    futures = {rank: come(rank, count, meet) for rank in list(range(count))[::order]}
    check([futures[rank] for rank in range(count)])


def test_env_names_host_and_port_and_leaves_torchrun_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert meeting_at("env://").look() == ("node1", 29500, "")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert (meeting_at("env://").host, meeting_at("env://").port) == ("node1", 29500)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meeting_at("env://").look() == ("node1", 29501, "")
    assert meeting_at("tcp://fe80::1:77").look() == ("fe80::1", 77, "")
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(Invalid, match="^the environment variable MASTER_ADDR must name the host of rank 0"):
        meeting_at("env://")


def test_the_file_is_for_this_user_alone_and_is_there_at_once(come: Come, tmp_path: Path) -> None:
    meet = meeting_at(f"file://{tmp_path}/meet")
    assert meet.look() is None
    meet.publish(77, "secret")
    assert meet.look() == ("127.0.0.1", 77, "secret")
    [path] = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    meet.publish(78, "other")
    assert meet.look() == ("127.0.0.1", 78, "other")


def test_a_port_that_is_taken_is_told(come: Come) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [message] = errors([come(0, 2, f"tcp://127.0.0.1:{port}", SOON)])
    assert message == f"rank 0 cannot listen at 127.0.0.1:{port}: Address already in use"


def test_one_that_came_by_the_loopback_is_known_elsewhere_as_rank_0_is() -> None:
    class Guest:
        def __init__(self, theirs: str, ours: str) -> None:
            self.theirs, self.ours = theirs, ours

        def getpeername(self) -> tuple[str, int]:
            return self.theirs, 1

        def getsockname(self) -> tuple[str, int]:
            return self.ours, 2

    near, mapped = Guest("127.0.0.1", "127.0.0.1"), Guest("::ffff:127.0.1.1", "::ffff:127.0.1.1")
    far: Any = Guest("10.0.0.2", "10.0.0.1")
    came: Any = {3: (far, 33), 1: (near, 31), 2: (mapped, 32)}
    assert meeting._table(came) == [None, ("10.0.0.1", 31), ("10.0.0.1", 32), ("10.0.0.2", 33)]
    del came[3]
    assert meeting._table(came) == [None, ("127.0.0.1", 31), ("::ffff:127.0.1.1", 32)]


# Who does not come


@pytest.mark.parametrize("way", ["file", "tcp"])
def test_one_that_never_comes_is_named_by_all(way: str, come: Come, tmp_path: Path) -> None:
    meet = f"file://{tmp_path}/meet" if way == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert (
        errors([come(rank, 3, meet, SOON) for rank in (0, 1)])
        == ["rank 2 has not come within 1 s: was it started?"] * 2
    )
    assert errors([come(0, 4, meet, SOON)]) == ["ranks 1, 2, 3 have not come within 1 s: were they started?"]
    expected = "rank 0 has not come within 1 s: was it started?"
    if way == "tcp":
        expected = f"rank 1 cannot reach {meet[6:]} within 1 s: was rank 0 started?"
    assert errors([come(1, 3, meet, SOON)]) == [expected]


def test_one_that_waits_longer_hears_it_from_rank_0(come: Come, tmp_path: Path) -> None:
    meet = f"file://{tmp_path}/meet"
    futures = [come(0, 3, meet, SOON), come(1, 3, meet)]
    assert errors(futures) == ["rank 2 has not come within 1 s: was it started?"] * 2


def test_one_that_gives_up_first_knows_whom_rank_0_waits_for(come: Come, tmp_path: Path) -> None:
    meet = f"file://{tmp_path}/meet"
    first, last = come(0, 3, meet), come(1, 3, meet, SOON)
    assert errors([last]) == ["rank 2 has not come within 1 s: was it started?"]
    check([first, come(1, 3, meet), come(2, 3, meet)])  # rank 1 was started again: the dead one is not in the table


# What others have left


def test_an_address_of_a_dead_process_is_passed_over(come: Come, tmp_path: Path) -> None:
    meet = f"file://{tmp_path}/meet"
    meeting_at(meet).publish(free_port(), "of another run")
    others = [come(rank, 3, meet) for rank in (1, 2)]
    check([come(0, 3, meet), *others])


@pytest.mark.parametrize("words", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", struct.pack("<I", 2) + b"[]"])
def test_an_address_where_now_somebody_else_listens_is_passed_over(words: bytes, come: Come, tmp_path: Path) -> None:
    meet = f"file://{tmp_path}/meet"
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        meeting_at(meet).publish(stranger.getsockname()[1], "of another run")
        other = come(1, 2, meet)
        with stranger.accept()[0] as connection:
            connection.sendall(words)
        first = come(0, 2, meet)
        check([first, other])


def test_strangers_do_not_get_in_and_keep_nobody(come: Come) -> None:
    port = free_port()
    first = come(0, 3, f"tcp://127.0.0.1:{port}")
    me = {"samestep": meeting.VERSION, "rank": 1, "size": 3, "run": "", "port": 1, "secret": ""}
    forged = {"token": "", "rank": 2, "channel": "talk"}
    wrong = [me | {"secret": "x"}, me | {"port": "x"}, {}, forged, me | {"rank": [1]}, me | {"size": 2}]
    strangers = [say(port, said) for said in wrong]
    silent = socket.create_connection(("127.0.0.1", port))
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x04\0\0\0null", b"\x03\0\0\0{{{", b""):
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[-1].sendall(words)
    strangers[-1].close()
    check([first, *(come(rank, 3, f"tcp://127.0.0.1:{port}") for rank in (1, 2))])
    for stranger in [*strangers[:-1], silent]:
        with stranger, pytest.raises((EOFError, ConnectionError)):  # turned away
            stranger.settimeout(DEADLINE)
            while True:
                meeting.exactly(stranger, bytearray(1))


class Forged:
    """A connection of one that says it is the next to come."""

    def __init__(self, behind: socket.socket) -> None:
        self.behind, self.closed = behind, False

    def close(self) -> None:
        self.closed = True

    def settimeout(self, seconds: float | None) -> None: ...
    def setsockopt(self, *_: int) -> None: ...


def forging(patch: pytest.MonkeyPatch, token: Callable[[str], str]) -> list[Forged]:
    """Before every process that connects, one comes that says it is that process."""
    guests, forged = meeting._guests, list[Forged]()

    def knocking(server: Any, end: float) -> Any:
        for said, guest in guests(server, end):
            if "token" in said:
                forged.append(Forged(guest))
                yield said | {"token": token(said["token"])}, forged[-1]
            yield said, guest

    patch.setattr(meeting, "_guests", knocking)
    return forged


def test_without_the_token_nobody_gets_in(come: Come, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = forging(monkeypatch, lambda token: token[::-1])
    check([come(rank, 3, f"file://{tmp_path}/meet") for rank in range(3)])
    assert [stranger.closed for stranger in forged] == [True] * 6


def test_with_it_one_would(come: Come, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it not for the token, the test above would fail."""
    forged = forging(monkeypatch, lambda token: token)
    links = [future.result(DEADLINE) for future in [come(rank, 2, f"file://{tmp_path}/meet") for rank in range(2)]]
    assert list(links[0].values()) == forged
    assert len(forged) == 2
    for stranger in forged:
        stranger.behind.close()


def test_one_that_does_not_know_the_secret_is_turned_away(come: Come, tmp_path: Path) -> None:
    meet = meeting_at(f"file://{tmp_path}/meet")
    first = come(0, 2, meet)
    other = Meeting(meet.host, 0, meet.publish, lambda: (found := meet.look()) and (*found[:2], "guessed"))
    assert errors([come(1, 2, other, SOON)]) == ["rank 0 has not come within 1 s: was it started?"]
    check([first, come(1, 2, meet)])


def test_one_of_another_run_is_turned_away_and_told_why(come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    first = come(0, 2, f"tcp://127.0.0.1:{port}")
    assert errors([come(1, 3, f"tcp://127.0.0.1:{port}", SOON)]) == [
        "rank 1 was turned away by rank 0: it is rank 1 of 3 processes, rank 0 is one of 2"
    ]
    with monkeypatch.context() as patch:
        patch.setattr(meeting, "VERSION", 0)
        words = "rank 1 was turned away by rank 0: it runs another version of samestep"
        assert errors([come(1, 2, f"tcp://127.0.0.1:{port}", SOON)]) == [words]
    check([first, come(1, 2, f"tcp://127.0.0.1:{port}")])


@pytest.mark.parametrize("names", [{"TORCHELASTIC_RUN_ID": "job{}"}, {"SLURM_JOB_ID": "{}", "SLURM_STEP_ID": "0"}])
def test_jobs_that_happen_to_use_one_port_do_not_meet(names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for i in (1, 2):
        for name, value in names.items():
            monkeypatch.setenv(name, value.format(i))
        runs.append(meeting._run())
    assert len({*runs}) == 2
    me = {"samestep": 1, "rank": 0, "size": 2}
    why = meeting._refusal(me | {"run": runs[0]}, me | {"rank": 1, "run": runs[1]})
    assert why == f"it is of the run {runs[1]}, rank 0 of {runs[0]}"
    assert meeting._refusal(me | {"run": runs[0]}, me | {"rank": 1, "run": ""}) == ""  # started by hand


def test_one_that_dies_when_all_are_there_is_named(come: Come, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table names a process that listens no longer."""
    table = meeting._table
    monkeypatch.setattr(
        meeting, "_table", lambda came: [*table(came)[:1], ("127.0.0.1", free_port()), *table(came)[2:]]
    )
    futures = [come(rank, 3, f"file://{tmp_path}/meet", 2 * SOON) for rank in range(3)]
    assert errors(futures[2:]) == ["rank 1 is gone: it was killed, or its host was lost"]


def test_where_nobody_listens_one_does_not_meet_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel connects a socket to itself if it happens to give it the very port that it dials."""
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    assert itself.getpeername() == itself.getsockname()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: itself)
    with pytest.raises(ConnectionRefusedError):
        meeting._dial(itself.getsockname(), DEADLINE)
    assert itself.fileno() == -1
