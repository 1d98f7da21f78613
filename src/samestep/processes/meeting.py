"""How processes find each other: TCP connections between every pair of them, with the standard library alone.

Rank 0 listens. The others learn where, come there, and wait; when all are there, rank 0 hands out a table of addresses and a
token, and every process connects to those of lower rank. Whoever has no token is a stranger, and is turned away. An address
that a dead process has left does not answer, or not in the right way: whoever comes there looks again until its time is up.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import Invalid, ProcessFailed
from samestep.processes.place import Place, number

CHANNELS = ("talk", "vector")  # a connection of a pair for vectors, and one for all the rest
VERSION = 1  # of what is said here and in sockets.py
PAUSE = 0.02  # seconds between two looks
PATIENCE = 3.0  # seconds within which one that has begun to speak must have spoken
LIMIT = 1 << 20  # bytes of what is said here; a stranger may say anything
LENGTH = struct.Struct("<I")

Links = dict[tuple[int, str], socket.socket]  # by rank and channel
Said = dict[str, Any]
Guests = Generator[tuple[Said, socket.socket], None, None]


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 listens, how it says so, and how the others learn it."""

    host: str
    port: int  # 0: any
    publish: Callable[[int, str], object]  # takes the port, and a secret that the others must know
    look: Callable[[], tuple[str, int, str] | None]  # host, port and secret, once they are there
    fixed: bool = False  # host and port are known beforehand, and there is no secret


def meeting_at(meet: str) -> Meeting:
    """The meeting of a Place: file:///path on one host, tcp://host:port, or env:// (MASTER_ADDR and MASTER_PORT)."""
    if meet.startswith("file://"):
        path = Path(meet.removeprefix("file://") + ".address")
        return Meeting("127.0.0.1", 0, lambda port, secret: _write(path, port, secret), lambda: _read(path))
    if meet == "env://":
        host, port = os.environ.get("MASTER_ADDR", ""), number(os.environ, "MASTER_PORT")
        if not host:
            raise Invalid("the environment variable MASTER_ADDR must name the host of rank 0, and is not set")
        port += os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # there torchrun itself listens
    else:
        host, port = meet.removeprefix("tcp://").rpartition(":")[0], int(meet.rpartition(":")[2])
    return Meeting(host, port, lambda port, secret: None, lambda: (host, port, ""), fixed=True)


def _write(path: Path, port: int, secret: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:  # for no other user
        json.dump([port, secret], file)
    temporary.rename(path)


def _read(path: Path) -> tuple[str, int, str] | None:
    try:
        port, secret = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return "127.0.0.1", port, secret


def connect(place: Place, seconds: float, links: Links, meeting: Meeting | None = None) -> None:
    """Fill in the connections to all other processes; ProcessFailed names those that do not come in so many seconds."""
    end, meeting, rank = time.monotonic() + seconds, meeting or meeting_at(place.meet), place.rank
    with _server(meeting, rank) as server, closing(_guests(server, end)) as guests:
        port = server.getsockname()[1]
        me = {"samestep": VERSION, "rank": rank, "size": place.size, "run": _run(), "port": port}
        if rank == 0:
            secret = "" if meeting.fixed else secrets.token_hex(16)
            meeting.publish(port, secret)
            table, token = _receive(guests, me | {"secret": secret}, seconds)
        else:
            table, token = _come(meeting, me, end, seconds)
        for lower in range(rank):
            for channel in CHANNELS:
                me = {"token": token, "rank": rank, "channel": channel}
                links[lower, channel] = _link(lower, table[lower], end, me)
        higher = {(q, channel) for q in range(rank + 1, place.size) for channel in CHANNELS}
        while not higher <= links.keys():
            try:
                said, guest = next(guests)
            except StopIteration:
                raise ProcessFailed(_absent([q for q, _ in higher - links.keys()], seconds)) from None
            who = said.get("rank"), said.get("channel")
            if said.get("token") == token and who in higher and who not in links:
                guest.settimeout(None)
                links[who] = guest
            else:
                guest.close()
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(guests: Guests, me: Said, seconds: float) -> tuple[list[Any], str]:
    """Rank 0: wait for all, and hand out the table of where each one listens, and the token."""
    came: dict[int, tuple[socket.socket, int]] = {}
    size, missing = me["size"], list(range(1, me["size"]))
    try:
        for said, guest in guests:
            if said.get("secret") != me["secret"] or not isinstance(said.get("port"), int):
                guest.close()
                continue
            if why := _refusal(me, said):
                _tell([guest], refused=why)
                guest.close()
                continue
            if said["rank"] in came:  # it was started again
                came.pop(said["rank"])[0].close()
            came[said["rank"]] = guest, said["port"]
            for rank in [rank for rank, (guest, _) in came.items() if _left(guest)]:
                came.pop(rank)[0].close()
            missing = [rank for rank in range(1, size) if rank not in came]
            _tell([guest for guest, _ in came.values()], missing=missing)
            if not missing:
                token, table = secrets.token_hex(16), _table(came)
                _tell([guest for guest, _ in came.values()], table=table, token=token)
                return table, token
        cause = _absent(missing, seconds)
        _tell([guest for guest, _ in came.values()], cause=cause)
        raise ProcessFailed(cause)
    finally:
        for guest, _ in came.values():
            guest.close()


def _come(meeting: Meeting, me: Said, end: float, seconds: float) -> tuple[list[Any], str]:
    """The others: come to rank 0, and wait for the table and the token."""
    rank, why, missing = me["rank"], "", [0]
    for said in _told(meeting, me, end):
        if "cause" in said:
            raise ProcessFailed(said["cause"])
        if "table" in said:
            return [said["at"], *said["table"][1:]], said["token"]
        why, missing = said.get("refused", why), said.get("missing", [0])
    if missing != [0]:
        raise ProcessFailed(_absent(missing, seconds))
    if why:
        raise ProcessFailed(f"rank {rank} was turned away by rank 0: {why}")
    if meeting.fixed:
        where = f"{meeting.host}:{meeting.port}"
        raise ProcessFailed(f"rank {rank} cannot reach {where} within {seconds:g} s: was rank 0 started?")
    raise ProcessFailed(_absent(missing, seconds))


def _told(meeting: Meeting, me: Said, end: float) -> Iterator[Said]:
    """What rank 0 says to one that comes, and comes again where nobody is, or where it is sent away."""
    while (left := end - time.monotonic()) > 0:
        try:
            if known := meeting.look():
                with _dial(known[:2], min(left, PATIENCE)) as first:
                    _say(first, **me, secret=known[2])
                    while True:
                        yield _hear(first, end - time.monotonic()) | {"at": known[:2]}
        except TimeoutError:
            pass
        except (OSError, EOFError, ValueError):  # nobody is there yet, or no more; or somebody else
            yield {}
        time.sleep(PAUSE)


def _refusal(me: Said, said: Said) -> str:
    """Why one that has come cannot be of this run."""
    if said.get("samestep") != me["samestep"]:
        return "it runs another version of samestep"
    if said.get("run") and me["run"] and said["run"] != me["run"]:
        return f"it is of the run {said['run']}, rank 0 of {me['run']}"
    if said.get("size") != me["size"] or said.get("rank") not in range(1, me["size"]):
        return f"it is rank {said.get('rank')} of {said.get('size')} processes, rank 0 is one of {me['size']}"
    return ""


def _run() -> str:
    """The run, as far as whoever started this process gives it a name."""
    job, step = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return os.environ.get("TORCHELASTIC_RUN_ID") or (f"{job}.{step}" if job and step else "")


def _table(came: dict[int, tuple[socket.socket, int]]) -> list[Any]:
    """Where each one listens, from 0: its port, at the address that it has come from.

    One that shares a host with rank 0 has perhaps come by the loopback: on other hosts it is known as rank 0 is.
    """
    distant = [guest.getsockname()[0] for guest, _ in came.values() if not _loopback(guest.getpeername()[0])]
    hosts = {rank: guest.getpeername()[0] for rank, (guest, _) in came.items()}
    hosts = {rank: distant[0] if distant and _loopback(host) else host for rank, host in hosts.items()}
    return [None, *((hosts[rank], came[rank][1]) for rank in sorted(came))]


def _absent(ranks: Sequence[int], seconds: float) -> str:
    names = sorted(set(ranks))
    who = f"ranks {', '.join(map(str, names))} have" if names[1:] else f"rank {names[0]} has"
    return f"{who} not come within {seconds:g} s: {'were they' if names[1:] else 'was it'} started?"


# Connections


def _server(meeting: Meeting, rank: int) -> socket.socket:
    """Where this process listens: on its own host alone if rank 0 is reached by the loopback, else everywhere."""
    port = meeting.port if rank == 0 else 0
    try:
        if _loopback(meeting.host):
            return socket.create_server((meeting.host, port), family=_family(meeting.host), backlog=128)
        with suppress(OSError):
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        return socket.create_server(("", port), backlog=128)
    except OSError as error:
        raise ProcessFailed(
            f"rank {rank} cannot listen at {meeting.host}:{port}: {os.strerror(error.errno or 0)}"
        ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _guests(server: socket.socket, end: float) -> Guests:
    """Whoever comes and says who it is, until the end. One that says nothing keeps nobody."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(server, selectors.EVENT_READ)
        try:
            while time.monotonic() < end:
                for key, _ in waiting.select(end - time.monotonic()):
                    guest: Any = key.fileobj
                    if guest is server:
                        with suppress(OSError):
                            waiting.register(server.accept()[0], selectors.EVENT_READ)
                        continue
                    waiting.unregister(guest)
                    try:
                        said = _hear(guest, PATIENCE)
                    except (OSError, EOFError, ValueError):  # a stranger
                        guest.close()
                    else:
                        yield said, guest
        finally:
            for key in list(waiting.get_map().values()):
                if key.fileobj is not server:
                    key.fileobj.close()  # type: ignore[union-attr]


def _dial(address: tuple[str, int], seconds: float) -> socket.socket:
    connection = socket.create_connection(address, timeout=seconds)
    if connection.getsockname() == connection.getpeername():  # where nobody listens, one can happen to meet oneself
        connection.close()
        raise ConnectionRefusedError(f"nobody listens at {address[0]}:{address[1]}")
    return connection


def _link(other: int, address: tuple[str, int], end: float, me: Said) -> socket.socket:
    """A connection to a process that is there, as the table says."""
    try:
        link = _dial(address, max(end - time.monotonic(), PATIENCE))
        _say(link, **me)
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
        raise ProcessFailed(gone(other)) from error
    except OSError as error:
        where = f"rank {other} at {address[0]}:{address[1]}"
        raise ProcessFailed(f"rank {me['rank']} cannot reach {where}: {error}") from error
    link.settimeout(None)
    return link


def gone(rank: int) -> str:
    return f"rank {rank} is gone: it was killed, or its host was lost"


def _left(guest: socket.socket) -> bool:
    """Whether one that waits, and has nothing to say, has closed its connection."""
    guest.setblocking(False)
    try:
        return not guest.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        guest.settimeout(PATIENCE)


def _tell(guests: Sequence[socket.socket], **what: Any) -> None:
    for guest in guests:
        with suppress(OSError):
            _say(guest, **what)


def _say(connection: socket.socket, **what: Any) -> None:
    content = json.dumps(what).encode()
    connection.sendall(LENGTH.pack(len(content)) + content)


def _hear(connection: socket.socket, seconds: float) -> Said:
    """What is said next; ValueError for what no samestep would say."""
    connection.settimeout(max(seconds, PAUSE))
    (length,) = LENGTH.unpack(exactly(connection, bytearray(LENGTH.size)))
    if length > LIMIT:
        raise ValueError("a stranger")
    said = json.loads(exactly(connection, bytearray(length)))
    if not isinstance(said, dict):
        raise ValueError("a stranger")
    return said


def exactly(connection: socket.socket, memory: Any) -> Any:
    """Fill memory with what comes; EOFError where the other side closes the connection before."""
    view = memoryview(memory)
    while view:
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return memory
