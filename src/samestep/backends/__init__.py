"""The frameworks: what one must provide (base.py), and how one is found (find.py). Each has a folder of its own."""
