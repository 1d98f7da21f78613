"""Several processes, on one host or on many, as one group of devices: engines move numbers, samestep adds them."""
