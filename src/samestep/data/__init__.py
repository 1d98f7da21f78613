"""Examples: where they come from, and how they get to the devices."""

from samestep.data.examples import Data
from samestep.data.fashion import fashion_mnist

__all__ = ["Data", "fashion_mnist"]
