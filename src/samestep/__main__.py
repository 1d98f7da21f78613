"""`python -m samestep` is the command `samestep`."""

from samestep.screen.cli import run

run()
