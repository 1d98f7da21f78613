"""The lab: gradient descent on small objectives, beside what theory says of it. Models of your own: tuning/."""

from samestep.lab.descent import Descent as Descent
from samestep.lab.descent import descend as descend
from samestep.lab.figures import FIGURES as FIGURES
from samestep.lab.figures import figure as figure
from samestep.lab.objectives import Objective as Objective
from samestep.lab.traces import show_trace_2d as show_trace_2d
from samestep.lab.traces import train_2d as train_2d
