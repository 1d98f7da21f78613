"""One process of a run that launch.py starts: `python rank.py LIFELINE FOLDER OUT ERR COMMAND...`

LIFELINE is the end of a pipe whose other end only the launcher has: when that one is killed, the command is, too. The command
is run with its output in two files that the launcher has opened (through mpiexec it would be no terminal). Left in FOLDER are
the number of the process (RANK.pid) and, when it has ended, how (RANK.status).
Only the standard library is imported, so that it starts quickly.
"""

import os
import signal
import sys


def main(lifeline: str, folder: str, out: str, err: str, *command: str) -> None:
    watcher = watch(int(lifeline))
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
    name = os.path.join(folder, next((os.environ[name] for name in names if name in os.environ), "0"))
    child = os.fork()
    if not child:
        os.dup2(int(out), 1)
        os.dup2(int(err), 2)
        os.execvp(command[0], command)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])  # to a whole group: the command decides
    write(f"{name}.pid", child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    write(f"{name}.status", status)
    os.kill(watcher, signal.SIGKILL)
    os._exit(status if status >= 0 else 128 - status)  # before mpiexec notices, the status is there


def watch(lifeline: int) -> int:
    """Start a process that waits for the end of the launcher, and then kills this process group and all in it."""
    watcher = os.fork()
    if not watcher:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.dup2(lifeline, 0)
        os.closerange(1, 1 + max(map(int, os.listdir("/dev/fd"))))  # nobody must wait for us to close them
        os.read(0, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.close(lifeline)
    return watcher


def write(path: str, number: int) -> None:
    with open(f"{path}.tmp", "w") as file:
        file.write(str(number))
    os.rename(f"{path}.tmp", path)


if __name__ == "__main__":
    main(*sys.argv[1:])
