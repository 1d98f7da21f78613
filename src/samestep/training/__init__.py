"""The Trainer, and what it does: the loop, the group of replicas, and one step of it."""
