"""One process of a run that mpiexec starts for launch.py: `python rank.py FOLDER OUT ERR COMMAND...`

It runs the command with its output in two files that the launcher has opened, and leaves in FOLDER the number of the process
(RANK.pid) and, when it has ended, how (RANK.status). Only the standard library is imported, so that it starts quickly.
"""

import os
import sys


def main(folder: str, out: str, err: str, *command: str) -> None:
    name = os.path.join(folder, os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    child = os.fork()
    if not child:
        os.dup2(int(out), 1)
        os.dup2(int(err), 2)
        os.execvp(command[0], command)
    write(f"{name}.pid", child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    write(f"{name}.status", status)
    os._exit(status if status >= 0 else 128 - status)  # before mpiexec notices, the status is there


def write(path: str, number: int) -> None:
    with open(f"{path}.tmp", "w") as file:
        file.write(str(number))
    os.rename(f"{path}.tmp", path)


if __name__ == "__main__":
    main(*sys.argv[1:])
