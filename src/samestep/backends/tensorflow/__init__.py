"""TensorFlow, behind the classes of backends/base.py. Importing this package prepares the start of TensorFlow."""

import os

# TensorFlow reads both once, when it starts. The first lets every session have threads of its own; TensorFlow's own are as many
# as before. The second keeps its news (INFO) from standard error, where progress is shown; warnings still come.
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
