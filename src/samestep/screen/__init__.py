"""What a person sees: the command line, progress, plots."""
