"""Settings for a model of your own: a range test of rates, the largest stable rate, and sweeps of whole trainings."""
