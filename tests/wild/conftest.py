"""The zoos are imported by the suite, one per process; collecting them would load every framework at once."""

collect_ignore_glob = ["zoo_*.py"]
