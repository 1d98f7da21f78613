"""How weights follow from gradients: the rules, what applies them to a replica, and averages over the path."""

from samestep.optimizers.averaging import path_average, swa
from samestep.optimizers.rules import adagrad, adam, adamw, sgd, sgld

__all__ = ["adagrad", "adam", "adamw", "path_average", "sgd", "sgld", "swa"]
