"""TensorFlow, behind the classes of backends/base.py. Importing this package starts TensorFlow, without its greeting."""

import os
import sys
import tempfile
from importlib import import_module

# TensorFlow reads this once, when it starts. It lets every session have threads of its own; TensorFlow's are as many as before.
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")
# "You may see slightly different numerical results": not here. TF_CPP_MIN_LOG_LEVEL does not keep it away (TensorFlow 2.21).
GREETING = (b"oneDNN custom operations are on", b"WARNING: All log messages before absl::InitializeLog()")


def start() -> None:
    """Import TensorFlow; what its libraries print meanwhile comes afterwards, but for the greeting."""
    with tempfile.TemporaryFile() as held:
        before = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            import_module("tensorflow")
        finally:
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not any(words in line for words in GREETING)))


if "tensorflow" not in sys.modules:
    start()
