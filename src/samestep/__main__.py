"""`python -m samestep` is the command `samestep`."""

from samestep.cli import run

run()
