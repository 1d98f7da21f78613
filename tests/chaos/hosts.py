"""Hosts on one machine: network namespaces, each with an address of its own, joined by a bridge.

The bridge is in a namespace too, so that nothing of this machine's own network is touched. Namespaces have names of their
own for every Network, so that two test runs do not meet. They share the file system, as hosts share a run folder.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

LINK = "eth0"  # in every host
# So often a host sends again what nobody confirms, 25 s in all, before it takes a connection as lost. Linux: 15 times.
RETRIES = 6
_count = itertools.count()


def missing() -> str:
    """What this machine lacks to have hosts, or nothing."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid():
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "the command ip (iproute2) is not installed"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"


def address(host: int) -> str:
    return f"10.77.0.{host}"


class Network:
    """So many hosts, numbered from 1, that reach each other; all is gone at the end, processes too."""

    def __init__(self, hosts: int) -> None:
        name = f"samestep-{os.getpid()}-{next(_count)}"
        self.bridge, self.names = f"{name}-bridge", {i: f"{name}-{i}" for i in range(1, hosts + 1)}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            ip("netns", "add", self.bridge)
            ip("-n", self.bridge, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.bridge, "link", "set", "bridge", "up")
            for i, name in self.names.items():
                ip("netns", "add", name)
                ip("-n", self.bridge, "link", "add", f"port{i}", "type", "veth", "peer", "name", LINK, "netns", name)
                ip("-n", self.bridge, "link", "set", f"port{i}", "master", "bridge", "up")
                ip("-n", name, "address", "add", f"{address(i)}/24", "dev", LINK)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", LINK, "up")
                ip("netns", "exec", name, "sh", "-c", f"echo {RETRIES} > /proc/sys/net/ipv4/tcp_retries2")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in (*self.names.values(), self.bridge):
            for pid in self.processes(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
        for name in (*self.names.values(), self.bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # it may not have been made

    def start(self, host: int, command: list[str], env: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._started.append(process)
        return process

    def processes(self, name: str) -> list[int]:
        """The processes in a namespace; nobody but us has put one there."""
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def workers(self, host: int) -> list[int]:
        """The processes of a host that torchrun has started."""
        found = []
        for pid in self.processes(self.names[host]):
            with suppress(OSError):
                if b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def cut(self, host: int) -> None:
        """Pull the cable of a host: what it sends and what is sent to it is lost, and nobody is told."""
        ip("-n", self.bridge, "link", "set", f"port{host}", "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
