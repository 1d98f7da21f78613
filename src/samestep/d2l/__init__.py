"""The chapters' names: what "Training on Multiple GPUs" and its neighbours write by hand."""
