"""The lab: gradient descent on small objectives, to look at."""

from samestep.lab.traces import show_trace_2d as show_trace_2d
from samestep.lab.traces import train_2d as train_2d
