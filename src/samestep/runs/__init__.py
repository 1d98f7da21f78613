"""What a fit leaves behind: the run, its folder and checkpoints; and comparing runs."""
